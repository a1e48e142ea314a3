"""`forebay stat`: what the node knows of one object."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli import address, show
from forebay.cli.options import Address, AsJson, Debug, Url, open_client
from forebay.cli.outcome import one_line, verb
from forebay.core.messages.calls import ObjectState
from forebay.core.record import blocks_in
from forebay.core.types import FRESH_IMMUTABLE
from forebay.ports import clock

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("stat")
@verb
def stat(
    where: Address,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the backend first, however fresh it is.")] = False,
    url: Url = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what the node knows of an object.

    With --json the fields are those of ObjectState in docs/protocol.md.
    """
    at = address.parse_object(where)
    with open_client(url) as client:
        state = client.stat(at.bucket, at.key, revalidate=refresh)
    if as_json:
        show.document(state)
        return
    print(one_line(str(at)))
    print(show.fields(facts(state, clock.wall_s())))


def facts(state: ObjectState, now_s: float) -> list[tuple[str, str]]:
    """The lines for people."""
    blocks = state.blocks or blocks_in(state.size_bytes)
    have = state.cached_blocks or blocks_in(min(state.cached_bytes, state.size_bytes))
    return [
        ("size", f"{show.size(state.size_bytes)} ({state.size_bytes} bytes)"),
        ("modified", show.moment(state.modified_s)),
        ("etag", state.etag or "-"),
        ("version", state.version or "-"),
        ("state", word(state)),
        ("backend", backend(state)),
        ("cached", f"{show.size(state.cached_bytes)}, {have} of {blocks} blocks"),
        ("volume", state.volume or "-"),
        ("pinned", "yes" if state.pinned else "no"),
        ("fresh until", fresh(state.fresh_until_s, now_s)),
        *((name, value) for name, value in sorted(state.headers.items())),
    ]


def word(state: ObjectState) -> str:
    """What of it is here (`absent`, `partial`, `complete`), and whether the backend has it too (`clean`), not yet
    (`dirty`), or never (`local`)."""
    if state.cached_bytes >= state.size_bytes and (state.cached_bytes or state.cached_blocks or state.volume):
        have = "complete"
    else:
        have = "partial" if state.cached_bytes else "absent"
    return f"{have}, {'dirty' if state.dirty else 'local' if state.local else 'clean'}"


def backend(state: ObjectState) -> str:
    if state.dirty:
        return "does not have this version yet (`forebay flush` brings it)"
    return "none: only this node has it" if state.local else "has it"


def fresh(until_s: float, now_s: float) -> str:
    if until_s >= FRESH_IMMUTABLE / 2:
        return "for ever (immutable)"
    if until_s <= now_s:
        return "now: the next read asks the backend"
    return f"{show.moment(until_s)} (in {show.duration(until_s - now_s)})"
