"""Rules that a node keeps whatever its clients see, known to the world by other means than the node's own.

Theory. Some faults are not in any answer: a request that is tried for ever, bytes evicted while somebody reads them,
keys that move although their volume stays, books that drift from what is there. `watched` looks at them as they happen;
`left_over` says what remains when all is quiet.

Invariant. Nothing here changes what the node does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forebay.backends.wrap import retrying
from forebay.core.machines.retry import DEFAULT_POLICY, RETRY_COST
from forebay.node.engine.engine import Engine

_Place = tuple[str, str]


@contextmanager
def watched_retries(found: Callable[[str], None]) -> Iterator[None]:
    """A request is tried again within its attempts, and as long as its backend's budget pays."""
    real: Any = vars(retrying)["delay_before_retry"]

    def delay(attempt: int, error: Any, elapsed_s: float, draw: float, budget: Any, policy: Any) -> float | None:
        tokens = budget.tokens
        delay_s: float | None = real(attempt, error, elapsed_s, draw, budget, policy)
        if delay_s is not None and attempt >= DEFAULT_POLICY.attempts_max:
            found(f"attempt {attempt + 1} of a request, and {DEFAULT_POLICY.attempts_max} are allowed")
        if delay_s is not None and (tokens < RETRY_COST or budget.tokens != tokens - RETRY_COST):
            found(f"a retry that its budget of {tokens} tokens does not pay")
        return delay_s

    vars_of: Any = retrying
    vars_of.delay_before_retry = delay
    try:
        yield
    finally:
        vars_of.delay_before_retry = real


def watch_evictions(engine: Engine, found: Callable[[str], None]) -> None:
    """Bytes that somebody may still read, or that are landing, are no victims; nor is what only this node has."""
    store: Any = engine.store
    real = store.drop_units

    def drop(units: Sequence[tuple[int, int]]) -> Any:
        for object_id, block in units:
            if engine.cold.busy(object_id, block):
                found(f"block {block} of object {object_id} is evicted while it is in use")
        return real(units)

    store.drop_units = drop


class Homes:
    """Where keys belong. A volume that comes or goes moves only keys that are its own."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        self._first: dict[_Place, str] = {}

    def moved(self, engine: Engine, volumes: int) -> str:
        """What is wrong with where keys belong now; "" if nothing is. `volumes`: how many the node has."""
        there = {volume.id for volume in engine.store.usable()}
        now = {place: engine.store.volume_of(*place) for place in self._places}
        if len(there) == volumes:
            self._first = self._first or now
        for place, home in self._first.items():
            if home in there and now[place] != home:
                return f"{place[0]}/{place[1]} belongs to {now[place]}, though its volume {home} is there"
        return ""


def forgotten(engine: Engine, buckets: Iterable[str]) -> str:
    """What is owed and in no queue; "" if nothing is. For moments when the queues are empty."""
    for bucket in buckets:
        if not engine.flusher.totals(bucket).objects and (owed := engine.flusher.window(bucket, "", "", 9)):
            return f"{bucket}/{owed[0][0]} is owed, and no flush of it will begin"
    return ""


def left_over(engine: Engine, volumes: Sequence[str]) -> str:
    """What a node still holds though nobody asks anything; "" if it is nothing."""
    cold, openings = engine.cold, list(engine.cold.openings.under_way)
    if cold.all_flights or cold.reads or openings or cold.pass_bytes:
        return f"{cold.reads} reads, flights {cold.all_flights}, openings {openings}, {cold.pass_bytes} bytes"
    if engine.store.unshown:
        return f"changes of {list(engine.store.unshown)} are never shown"
    for usage in engine.store.usage():
        machine = engine.room._machines.get(usage.volume_id)
        if usage.state == "ok" and machine is not None and machine.used_bytes != usage.weighed_bytes:
            return f"eviction counts {machine.used_bytes} bytes on {usage.path}, the index {usage.weighed_bytes}"
    for volume in volumes:
        if os.path.isdir(f"{volume}/tmp") and (names := os.listdir(f"{volume}/tmp")):
            return f"{names} are left in tmp/"
    return ""
