"""`forebay volume`: the disks of a node, those that should be there too, and what would be lost with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli import show
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.errors import Invalid, NotFound
from forebay.core.volumes import VolumeState

app = typer.Typer(
    no_args_is_help=True, help="Show, add and give up volumes.", rich_markup_mode=None, add_completion=False
)

Name = Annotated[str, typer.Argument(metavar="VOLUME", help="Its id or path, as `forebay volume ls` shows them.")]


@app.command("ls")
@verb
def ls(url: Url = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List the volumes, those that are not in use too.

    With --json a list of VolumeState (docs/protocol.md).
    """
    with open_client(url) as client:
        found = client.status().volumes
    if as_json:
        show.document(found)
        return
    rows = [
        (volume.volume_id or "-", volume.state, show.size(volume.used_bytes), *_owed(volume), volume.path)
        for volume in found
    ]
    print(show.columns(("VOLUME", "STATE", "USED", "OWED", "BYTES", "PATH"), rows, right=(2, 3, 4)))
    for volume in found:
        if volume.reason or volume.change:
            print(f"{volume.volume_id or volume.path}: {'; '.join(filter(None, (volume.reason, volume.change)))}")


@app.command("owed")
@verb
def owed(
    name: Annotated[str | None, typer.Argument(metavar="[VOLUME]", help="Its id or path. Default: all.")] = None,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what only this node has, by volume: what would be lost with the disk.

    With --json a list of VolumeState (docs/protocol.md).
    """
    with open_client(url) as client:
        wanted = name and _whole(name)
        found = [each for each in client.status().volumes if wanted in (None, each.volume_id, each.path)]
    if name is not None and not found:
        raise NotFound(f"the node knows no volume {name}: `forebay volume ls` lists those it knows")
    if as_json:
        show.document(found)
        return
    for volume in found:
        print(f"{volume.volume_id or volume.path} ({volume.state}) at {volume.path}: {lost(volume)}")


@app.command("add")
@verb
def add(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A directory among the node's volumes.")],
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Have a volume made at a path, or taken in, at the next start.

    The path must be among the volumes that the node is told of (`--volume`). With --json a VolumeState.
    """
    with open_client(url) as client:
        state = client.volume_add(_whole(path))
    if as_json:
        show.document(state)
    else:
        print(f"a volume is made at {one_line(path)} when the node starts the next time")


@app.command("give-up")
@verb
def give_up(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="What it owes may be lost.")] = False,
    force: Annotated[bool, typer.Option("--force", help="So may what does not come back from other nodes.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Give up a volume that is not in use, and with it what only it has.

    In a cluster, what other nodes keep of it comes back first. Without --yes it says what would be lost, and does
    nothing. With --json a VolumeState.
    """
    name = _whole(name)
    with open_client(url) as client:
        known = [each for each in client.status().volumes if name in (each.volume_id, each.path)]
        if not yes and known and known[0].owed_buckets:
            raise Invalid(
                f"volume {name} is all that this node has of {lost(known[0])}: say --yes to lose that, but for what "
                "other nodes keep and send back"
            )
        state = client.volume_give_up(name, force=force)
    if as_json:
        show.document(state)
    else:
        print(f"volume {state.volume_id} was given up; {gone(state)}")


def _whole(name: str) -> str:
    """A path as the node has it; an id has no slash, and is no folder here."""
    is_path = "/" in name or Path(name).is_dir()
    return str(Path(name).expanduser().resolve()) if is_path else name


def lost(volume: VolumeState) -> str:
    """What would be lost with the volume, in words."""
    if not volume.owed_buckets:
        return "nothing"
    seen = f", as of {show.moment(volume.owed_s)}" if volume.owed_s and volume.state not in ("ok", "full") else ""
    what = f"{show.counted(volume.owed_objects, 'object')} with {show.size(volume.owed_bytes)}, and perhaps deletes"
    return f"{what}, in {', '.join(volume.owed_buckets)}{seen}"


def gone(volume: VolumeState) -> str:
    """What became of what a volume owed that was given up, in words."""
    if not volume.came_back and volume.lost_buckets == volume.owed_buckets:
        return f"lost: {lost(volume)}"
    back = f"{volume.came_back} came back from other nodes" if volume.came_back else "other nodes have it"
    rest = f"lost is what only it had in {', '.join(volume.lost_buckets)}" if volume.lost_buckets else "nothing is lost"
    return f"it owed {lost(volume)}: {back}, and {rest}"


def _owed(volume: VolumeState) -> tuple[str, str]:
    if not volume.owed_buckets:
        return "-", "-"
    return str(volume.owed_objects), show.size(volume.owed_bytes)
