"""`forebay drain`: have a node of the cluster give its keys away, and take nothing new."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import show, zero
from forebay.cli.options import AsJson, Debug, Url, open_client
from forebay.cli.outcome import Interrupted, verb
from forebay.core.errors import Invalid
from forebay.core.messages.node_state import ClusterNode, Wish

if TYPE_CHECKING:
    from forebay.client.sync import Client

LOOK_S = 0.5
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("drain")
@verb
def drain(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Its id, the beginning of it, or its address: `forebay status`.")
    ] = "",
    everyone: Annotated[
        bool, typer.Option("--all", help="All nodes, which then stop: the cluster goes to zero.")
    ] = False,
    manifest: Annotated[
        str | None,
        typer.Option("--manifest", metavar="ADDRESS", help="With --all: the object that says what was warm."),
    ] = None,
    maintenance: Annotated[
        bool, typer.Option("--maintenance", help="It gives its keys away and keeps what it owes: it comes back.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take it back.")] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="It is missing and does not come back: what only it has is lost.")
    ] = False,
    forget: Annotated[bool, typer.Option("--forget", help="It is gone: strike it off the list.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")] = True,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Have a node of the cluster give its keys away and go.

    It takes nothing new, and brings to the backends what only it has. Then it is gone, and may be stopped: nothing is
    lost with it. Any node of the cluster can be asked. Ctrl-C stops waiting, not the node.

    With --all the whole cluster goes: what only nodes have reaches the backends, --manifest says what was cached and
    how buckets were kept, and the nodes stop. `forebay rewarm` begins a new cluster from it.

    With --json a ClusterNode, with --all the Manifest, or with --undo a list of ClusterNode (docs/protocol.md).
    """
    wishes: dict[Wish, bool] = {"maintenance": maintenance, "active": undo, "gone": give_up, "forgotten": forget}
    chosen: list[Wish] = [wish for wish, given in wishes.items() if given]
    if len(chosen) > 1:
        raise Invalid("--maintenance, --undo, --give-up and --forget exclude each other: give one of them, or none")
    wish: Wish = chosen[0] if chosen else "draining"
    if everyone:
        if node or wish not in ("draining", "active") or bool(manifest) != (wish == "draining"):
            raise Invalid("--all takes no NODE, but --undo, or --manifest s3://BUCKET/KEY: where to say what was warm")
        zero.take_back(url, as_json=as_json) if wish == "active" else zero.drain(url, manifest or "", as_json=as_json)
        return
    if not node or manifest:
        raise Invalid("name the NODE to drain; --manifest goes with --all")
    with open_client(url) as client:
        state = client.wish(node, wish)
        if wait and wish in ("draining", "maintenance", "active"):
            try:
                state = _follow(client, state, quiet=as_json)
            except KeyboardInterrupt:
                raise Interrupted(f"stopped waiting; node {state.node_id} goes on: `forebay status` tells") from None
    if as_json:
        show.document(state)
    elif wish == "forgotten":
        print(f"node {state.node_id} is forgotten")
    else:
        print(f"node {state.node_id} is {state.state}: {state.doing}")


def _follow(client: Client, state: ClusterNode, *, quiet: bool) -> ClusterNode:
    """Until it is as it shall be, or somebody wants something else of it."""
    said = ""
    while not _is_done(state):
        time.sleep(LOOK_S)
        cluster = client.status().cluster
        found = [] if cluster is None else [each for each in cluster.nodes if each.node_id == state.node_id]
        if not found:
            return state
        state = found[0]
        line = f"{state.state}: {state.doing}"
        if line != said and not quiet and not _is_done(state):
            said = line
            print(line, flush=True)
    return state


def _is_done(state: ClusterNode) -> bool:
    """Whether nothing more is to come of what is wanted of it, as long as nobody does anything."""
    if state.state == "missing":
        return True
    if state.wanted == "maintenance":
        return state.share == 0.0
    return (state.wanted, state.state) in (("gone", "gone"), ("active", "active"))
