"""`forebay flush`: bring to the backends what only the node has."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli import jobs, show
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import verb
from forebay.core.errors import Invalid

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("flush")
@verb
def flush(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS...]",
            autocompletion=complete_addresses,
            help="Buckets, folders, objects; NAME* for a prefix. Default: all buckets.",
        ),
    ] = None,
    exact: jobs.Exact = False,
    dry_run: jobs.DryRun = False,
    wait: jobs.Wait = True,
    quiet: jobs.Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Bring to the backends what only the node has.

    Done when all that was dirty at the beginning is there. Runs as a job in the node: Ctrl-C stops watching, not the
    job. With --json a list of JobState (docs/protocol.md).
    """
    names = list(addresses or ())
    if not names:
        if exact:
            raise Invalid("--exact is for addresses: name the objects to flush")
        with open_client(url) as client:
            names = [
                each.name for each in client.status().buckets if each.dirty_objects or each.missing or each.lost_objects
            ]
        if not names:
            if as_json:
                show.document([])
            else:
                print("nothing is dirty: the backends have all that was written")
            return 0
    return jobs.run("flush", names, exact=exact, dry_run=dry_run, wait=wait, quiet=quiet, url=url, as_json=as_json)
