"""`forebay pin`: fetches what is under an address, and the node never evicts it."""

from __future__ import annotations

import typer

from forebay.cli import jobs
from forebay.cli.options import AsJson, Debug, Url
from forebay.cli.outcome import verb

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("pin")
@verb
def pin(
    addresses: jobs.Addresses,
    exact: jobs.Exact = False,
    dry_run: jobs.DryRun = False,
    wait: jobs.Wait = True,
    quiet: jobs.Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Fetch objects and never evict them.

    Runs as a job in the node: Ctrl-C stops watching, not the job. With --json a list of JobState (docs/protocol.md).
    """
    return jobs.run("pin", addresses, exact=exact, dry_run=dry_run, wait=wait, quiet=quiet, url=url, as_json=as_json)
