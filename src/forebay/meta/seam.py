"""The seam to cluster state: small values under keys, each with a revision, written by comparing.

Theory. What a node must not forget and what many nodes must agree on (buckets, pins, jobs; later map and leases) are
kilobytes, change rarely and need one order. So the store has one counter, the *revision*, that grows with every change;
an entry carries the revision of its last change, and a writer may say which one it read. Watching is being called after
each change, in order. Never object data, never what happens to be cached.

Invariants. (1) Revisions only grow; no two changes share one. (2) A put or delete that names a revision happens only
if the entry still has it (0: the entry is absent). (3) A watcher sees every change after the revision it starts from,
once, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """A value and the revision of its last change."""

    key: str
    value: bytes
    revision: int


class Change(NamedTuple):
    """What a watcher is told. `value` is None for a delete."""

    key: str
    value: bytes | None
    revision: int


class MetaStore(Protocol):
    """One implementation per place to keep state. Safe for concurrent tasks of one loop."""

    async def get(self, key: str) -> Entry | None:
        """The entry, or None."""
        ...

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        """Every entry whose key starts with `prefix`, by key, and the store's revision at that moment."""
        ...

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        """Write, and return the new revision. With `revision`, only if the entry has it; `Precondition` if not."""
        ...

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        """Remove; whether there was something. `revision` as in `put`."""
        ...

    def watch(self, prefix: str, told: Callable[[Change], None]) -> Callable[[], None]:
        """Call `told` after each change under `prefix` from now on; call what is returned to stop."""
        ...

    async def aclose(self) -> None:
        """Release what is held. Twice is fine."""
        ...
