"""`forebay rewarm`: begin a new cluster from what a former one left in a bucket."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli import address, jobs, show
from forebay.cli.complete import addresses as complete_addresses
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import EXIT_PARTIAL, verb
from forebay.core.formats.manifest import Manifest

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("rewarm")
@verb
def rewarm(
    manifest: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", autocompletion=complete_addresses, help="What `forebay drain --all` wrote."),
    ],
    wait: jobs.Wait = True,
    dry_run: jobs.DryRun = False,
    quiet: jobs.Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> int:
    """Fetch what a former cluster had cached.

    Adds the buckets that the manifest names and that are not there, at each node. Then each node fetches what is at
    home there, what was used last first, as far as its disks have room: nothing leaves for it. Runs as a job in each
    node: Ctrl-C stops watching, not the job. Run it again after a failure, or for nodes that came later.

    With --json a list of JobState (docs/protocol.md).
    """
    place = address.parse_object(manifest)
    with open_client(url) as client, jobs.nodes(client) as at:
        left = client.manifest(*place)
        shy = [] if dry_run else _add_buckets(at, left)
        code = jobs.on_nodes(
            at, "rewarm", lambda _: [str(place)], exact=True, dry_run=dry_run, wait=wait, quiet=quiet, as_json=as_json
        )
    if not as_json:
        of = show.counted(len(left.warm), "object")
        print(f"the manifest of {left.cluster}, of {show.moment(left.written_s)}, names {of}")
    for name in shy:
        show.note(
            f"forebay: bucket {name} is not here, and its {', '.join(left.hidden[name])} is in no manifest: `forebay "
            f"bucket add {name} …` at each node, then run this again"
        )
    return max(code, EXIT_PARTIAL if shy else 0)


def _add_buckets(at: list[jobs.Node], left: Manifest) -> list[str]:
    """Add what is not there; the names of those that need a secret first."""
    shy = set()
    for node in at:
        there = {bucket.name for bucket in node.client.buckets()}
        for bucket in left.buckets:
            if bucket.name in there:
                continue
            if bucket.name in left.hidden:
                shy.add(bucket.name)
            else:
                node.client.bucket_put(bucket, check=False)
    return sorted(shy)
