"""Agreed state in memory: what etcd promises, in as few lines as possible, for simulated worlds.

Theory. `Agreed` is the state and its rules, without time: the world says when a lease ends. `MemoryMeta` makes a
`MetaStore` of it, so that the suite of all stores (`tests/meta/test_meta.py`) says whether the rules are etcd's.

Invariants. Those of `meta/seam.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from forebay.core.errors import NotFound, Precondition
from forebay.meta.held_lease import HeldLease
from forebay.meta.seam import Change, Entry, Heard, Lease, check_size
from forebay.ports.clock import Clock


class Agreed:
    """Entries, revisions and leases. `told` is called after each transaction that changed something."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.leases: dict[int, set[str]] = {}  # the keys under each
        self.told: list[Callable[[list[Change]], None]] = []
        self._given = 0

    def under(self, prefix: str) -> list[Entry]:
        """Every entry whose key starts so, by key."""
        return [self.entries[key] for key in sorted(self.entries) if key.startswith(prefix)]

    def transact(self, changes: Mapping[str, bytes | None], when: Mapping[str, int], lease: int = 0) -> int:
        """As `MetaStore.transact`."""
        for key, expected in when.items():
            found = self.entries[key].revision if key in self.entries else 0
            if found != expected:
                raise Precondition(f"{key} is at revision {found}, not {expected}: read it again and decide anew")
        self.check_lease(lease)
        told = []
        for key, value in changes.items():
            if value is None and key not in self.entries:
                continue
            for keys in self.leases.values():
                keys.discard(key)
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = Entry(key, value, self.revision + 1)
                if lease:
                    self.leases[lease].add(key)
            told.append(Change(key, value, self.revision + 1))
        if told:
            self.revision += 1
            for tell in list(self.told):
                tell(told)
        return self.revision

    def grant(self) -> int:
        """A lease that was never given before."""
        self._given += 1
        self.leases[self._given] = set()
        return self._given

    def check_lease(self, lease: int) -> None:
        """`NotFound` if it has ended; 0 is none."""
        if lease and lease not in self.leases:
            raise NotFound(f"there is no lease {lease}: it ran out, take a new one")

    def end(self, lease: int) -> None:
        """End it, with everything under it."""
        if lease in self.leases:
            self.transact(dict.fromkeys(sorted(self.leases[lease])), {})
            del self.leases[lease]


class MemoryMeta:
    """`MetaStore` over an `Agreed`; its leases end by the running loop's time."""

    def __init__(self, agreed: Agreed) -> None:
        self._agreed = agreed
        self._ends: dict[int, tuple[float, asyncio.TimerHandle]] = {}

    async def get(self, key: str) -> Entry | None:
        return self._agreed.entries.get(key)

    async def range(self, prefix: str) -> tuple[list[Entry], int]:
        return self._agreed.under(prefix), self._agreed.revision

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        return self._agreed.transact({key: value}, {} if revision is None else {key: revision}, lease)

    async def delete(self, key: str, *, revision: int | None = None) -> bool:
        before = self._agreed.revision
        return self._agreed.transact({key: None}, {} if revision is None else {key: revision}) > before

    async def transact(
        self, changes: Mapping[str, bytes | None], *, when: Mapping[str, int] | None = None, lease: int = 0
    ) -> int:
        check_size(changes, when or {})
        return self._agreed.transact(changes, when or {}, lease)

    async def watch(self, prefix: str) -> AsyncGenerator[Heard, None]:
        heard: asyncio.Queue[list[Change]] = asyncio.Queue()
        there = [Change(*entry) for entry in self._agreed.under(prefix)]
        revision = self._agreed.revision
        self._agreed.told.append(heard.put_nowait)
        try:
            yield Heard(sorted(there, key=lambda change: (change.revision, change.key)), revision)
            while True:
                if changes := [change for change in await heard.get() if change.key.startswith(prefix)]:
                    yield Heard(changes, changes[-1].revision)
        finally:
            self._agreed.told.remove(heard.put_nowait)

    async def grant(self, ttl_s: float) -> Lease:
        lease = self._agreed.grant()
        self._last(lease, ttl_s)
        return Lease(lease, ttl_s)

    async def renew(self, lease: int) -> None:
        self._agreed.check_lease(lease)
        ttl_s, end = self._ends[lease]
        end.cancel()
        self._last(lease, ttl_s)

    async def revoke(self, lease: int) -> None:
        if lease in self._ends:
            self._ends[lease][1].cancel()
            self._end(lease)

    def hold(self, ttl_s: float, clock: Clock) -> HeldLease:
        return HeldLease(self, ttl_s, clock)

    async def aclose(self) -> None:
        for _, end in self._ends.values():
            end.cancel()

    def _last(self, lease: int, ttl_s: float) -> None:
        self._ends[lease] = ttl_s, asyncio.get_running_loop().call_later(ttl_s, self._end, lease)

    def _end(self, lease: int) -> None:
        del self._ends[lease]
        self._agreed.end(lease)
