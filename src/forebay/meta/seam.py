"""The seam to cluster state: small values under keys, each with a revision, written by comparing.

Theory. What a node must not forget and what many nodes must agree on (buckets, pins, jobs; later map and members) are
kilobytes, change rarely and need one order. So the store has one counter, the *revision*, that grows with every change.
An entry carries the revision of its last change, and a writer may say which ones it read. Never object data, never what
happens to be cached, and no request for an object waits for it.

A *watch* gives the state under a prefix and then what changes, for as long as somebody listens. It outlives whatever
happens to the store: it waits, asks another member, and lists anew where history is gone (`core/cluster/mirror.py`). A
*lease* is a right that must be renewed: entries written under it go when it ends (`core/cluster/lease.py`).

A call is answered or raises within its bound; it never hangs. Reads are tried again, elsewhere too. A write is sent
once: when it raises `Unavailable` it may or may not have happened, and the writer reads before it decides anew.

Invariants. (1) Revisions only grow; all changes of one transaction share one, no two transactions do. (2) A transaction
happens only if every entry that it names has the revision named (0: the entry is absent), and then whole. (3) Who
applies what a watch gives, list by list, holds the state under the prefix at the revision named after each, and at last
that of now. (4) An entry under a lease goes no earlier than the lease's time after its last renewal.
"""

from __future__ import annotations

import typing
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple, Protocol

from forebay.core.cluster.mirror import Change, Entry
from forebay.core.errors import Invalid
from forebay.core.limits import META_CHANGES_MAX
from forebay.ports.clock import Clock

if typing.TYPE_CHECKING:
    from forebay.meta.held_lease import HeldLease

__all__ = ["Change", "Entry", "Heard", "Lease", "MetaStore"]


class Heard(NamedTuple):
    """What a watch gives: whoever applies `changes` has the state of `revision`."""

    changes: list[Change]
    revision: int


class Lease(NamedTuple):
    """A lease as it was given: its number, and how long it lasts after each renewal."""

    number: int
    ttl_s: float


class MetaStore(Protocol):
    """One implementation per place to keep state. Safe for concurrent tasks of one loop."""

    async def get(self, key: str) -> Entry | None:
        """The entry, or None."""
        ...

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        """Every entry whose key starts with `prefix`, by key, and the store's revision at that moment."""
        ...

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        """Write, and return the new revision. With `revision`, only if the entry has it; `Precondition` if not. With
        `lease`, the entry goes with it; `NotFound` if it is gone already."""
        ...

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        """Remove; whether there was something. `revision` as in `put`."""
        ...

    async def transact(
        self, changes: Mapping[str, bytes | None], *, when: Mapping[str, int] | None = None, lease: int = 0
    ) -> int:
        """Write all `changes` (None: delete) at one revision, which is returned, if every key of `when` has its
        revision; else `Precondition`, and nothing is changed. `Invalid` beyond META_CHANGES_MAX keys."""
        ...

    def watch(self, prefix: str) -> AsyncGenerator[Heard, None]:
        """First what is there (perhaps nothing), then what changes, without end and whatever happens to the store.
        Close it (`contextlib.aclosing`). A list is empty where looking anew showed that nothing is different: only the
        revision is news."""
        ...

    async def grant(self, ttl_s: float) -> Lease:
        """A new lease. The store may give another time than asked for."""
        ...

    async def renew(self, lease: int) -> None:
        """Let it last from now on. `NotFound` if it is gone: then everything under it is."""
        ...

    async def revoke(self, lease: int) -> None:
        """End it, with everything under it. One that is gone is fine."""
        ...

    def hold(self, ttl_s: float, clock: Clock) -> HeldLease:
        """A lease that is kept while one is inside it: `async with meta.hold(10.0, clock) as held`."""
        ...

    async def aclose(self) -> None:
        """Release what is held. Twice is fine."""
        ...


def check_size(changes: Mapping[str, bytes | None], when: Mapping[str, int]) -> None:
    """`Invalid` if a transaction names more than any store takes."""
    if len(changes) + len(when) > META_CHANGES_MAX:
        raise Invalid(
            f"a transaction of {len(changes) + len(when)} changes and conditions: at most {META_CHANGES_MAX}: split it"
        )
