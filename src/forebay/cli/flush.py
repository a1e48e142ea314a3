"""`forebay flush`: bring to the backends what only nodes have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import jobs
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Here, Url, open_client
from forebay.cli.outcome import verb
from forebay.core.errors import Invalid

if TYPE_CHECKING:
    from forebay.client.sync import Client

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
    here: Here = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Bring to the backends what only nodes have.

    Done when all that was dirty at the beginning is there, at each node of the cluster. Runs as a job in each node:
    Ctrl-C stops watching, not the job. With --json a list of JobState (docs/protocol.md).
    """
    if exact and not addresses:
        raise Invalid("--exact is for addresses: name the objects to flush")
    dirty: list[str] = []

    def names(client: Client) -> list[str]:
        found = list(addresses or _dirty(client))
        dirty.extend(found)
        return found

    with open_client(url) as client:
        with jobs.nodes(client, here=here) as at:
            code = jobs.on_nodes(
                at, "flush", names, exact=exact, dry_run=dry_run, wait=wait, quiet=quiet, as_json=as_json
            )
    if not dirty and not code and not as_json:
        print("nothing is dirty: the backends have all that was written")
    return code


def _dirty(client: Client) -> list[str]:
    """The buckets that owe something."""
    return [each.name for each in client.status().buckets if each.dirty_objects or each.missing or each.lost_objects]
