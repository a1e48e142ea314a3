"""What clients did to one key and what they were answered, and whether one order of it explains every answer.

Theory. A key is a register that holds a body (named by its label) or nothing. A history is linearizable when each call
can be put at one moment between its beginning and its end so that every answer is right (Herlihy and Wing, 1990).
`explain` looks for such an order the way Wing and Gong (1993) do: take any call that no other has to precede, apply it,
go on; sets of calls that were taken already with the same content are not tried twice (Lowe, 2017). It returns every
content that the key may have at the end, so that a long story is checked in pieces, one a quiet moment.

A call without an answer may have happened at any moment from its beginning on, or never: it has no end, and it may be
left out.

Rejected: "the last acknowledged or anything tried since" of one writer a key. It needs no search, but it has no two
writers at once, and so no conditional write that somebody else decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

from forebay.ports import clock

Kind = Literal["write", "create", "swap", "delete", "read", "refused create", "refused swap"]
UNCHANGING = {"read", "refused create", "refused swap"}  # they only look
ABSENT = ""  # the label of nothing
GONE = "gone-"  # how the label of a deletion begins
STATES_MAX = 2_000_000  # that a search may visit; beyond it the harness asks too much of one key


class Call(NamedTuple):
    """One call to a key. `label` is the body that it wrote, or that it read (`ABSENT`: none).

    `create` wrote only if there was nothing, `swap` only if `seen` was there; "refused …" are those that were told 412.
    `ended` is infinite where no answer came. `act` says how it was asked, for people.
    """

    kind: Kind
    label: str
    began: float
    ended: float
    seen: str = ""
    act: str = ""

    @property
    def is_open(self) -> bool:
        return self.ended == math.inf


class TooLong(RuntimeError):
    """The search visited `STATES_MAX` states: fewer calls between two quiet moments are needed."""


def apply(call: Call, content: str) -> str | None:
    """The content after the call, or None where this call cannot have been answered so."""
    match call.kind:
        case "write":
            return call.label
        case "delete":
            return ABSENT
        case "create":
            return call.label if content == ABSENT else (content if call.is_open else None)
        case "swap":
            return call.label if content == call.seen else (content if call.is_open else None)
        case "read":
            return content if content == call.label else None
        case "refused create":
            return content if content != ABSENT else None
        case "refused swap":
            return content if content != call.seen else None


def explain(calls: Iterable[Call], before: Iterable[str]) -> set[str]:
    """Every content the key may have after `calls`, from one of `before`; empty if no order explains the answers."""
    story = sorted(calls, key=lambda call: call.began)
    closed = sum(1 << number for number, call in enumerate(story) if not call.is_open)
    found: set[str] = set()
    todo = [(0, content) for content in set(before)]
    visited = set(todo)
    while todo:
        taken, content = todo.pop()
        if taken & closed == closed:
            found.add(content)
        first_end = min((call.ended for n, call in enumerate(story) if not taken >> n & 1), default=math.inf)
        next_states = []
        for number, call in enumerate(story):
            if call.began > first_end:
                break
            if taken >> number & 1 or (after := apply(call, content)) is None:
                continue
            next_states.append((taken | 1 << number, after))
            if call.kind in UNCHANGING:  # whatever order works, works with this call first as well
                next_states = next_states[-1:]
                break
        todo += [state for state in next_states if state not in visited]
        visited.update(next_states)
        if len(visited) > STATES_MAX:
            raise TooLong(f"{len(story)} calls")
    return found


def told(calls: Iterable[Call]) -> str:
    """A history in words, one call a line, for whoever has to find out."""
    story = sorted(calls, key=lambda call: call.began)
    first = story[0].began if story else 0.0
    began = time.strftime("%H:%M:%S", time.localtime(first + clock.wall_s() - clock.monotonic_s()))
    return f"  from {began} on:\n" + "\n".join(
        f"  {call.began - first:9.4f} to {call.ended - first:9.4f} {call.kind:14} {call.label or 'nothing'}"
        + (f" where {call.seen or 'nothing'} was" if "swap" in call.kind else "")
        + f" ({call.act})"
        for call in story
    )
