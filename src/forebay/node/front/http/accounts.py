"""What identities with limits have used, on all fronts of the node together.

Theory. `core/machines/allowance.py` decides; here its numbers lie in memory that the fronts share. The supervisor makes
it (`make_shared`) and hands its descriptor to each front, so a front that starts anew finds what was used. An account
is a row of it, found by the hash of the identity's name: when paid for requests, when for bytes, and for each front
how many connections it has for that identity. Only the front that a cell belongs to writes it, and clears it when it
starts.

A row is taken under a lock, which fronts do when they hear of an identity. Nothing else locks: a front that is stopped
in the middle holds up nobody. Identities without limits have no account, and cost one comparison.

Rejected: asking the engine (a round trip for each hit, or limits that lag); a file (its disk may stall).

Invariants. (1) Two identities never share a row. (2) A connection counts for one account at a time, until it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Final

import xxhash

from forebay.core import limits
from forebay.core.access import OIDC_NAMES, Identity
from forebay.core.errors import Busy
from forebay.core.machines import allowance
from forebay.core.machines.allowance import Limits
from forebay.core.metrics import series

KINDS: Final = ("requests", "bytes", "connections")
_REQUESTS, _BYTES, _CELLS = 1, 2, 3  # numbers of eight bytes in a row; the first is the hash
_ROW: Final = _CELLS + limits.FRONTS_MAX
_SIZE_BYTES: Final = limits.ACCOUNTS_MAX * _ROW * 8


def make_shared() -> int:
    """The descriptor of memory for all fronts of a node."""
    fd = os.memfd_create("forebay-accounts")
    os.ftruncate(fd, _SIZE_BYTES)
    return fd


class Account:
    """One identity's. Counters are this front's; the rest is the node's."""

    __slots__ = ("_at", "_cell", "_clock_s", "_floats", "_ints", "bytes", "limits", "name", "refused", "requests")

    def __init__(self, name: str, table: memoryview, row: int, front: int, clock_s: Callable[[], float]) -> None:
        self.name = name
        self.limits = Limits()
        self.requests = 0
        self.bytes = 0
        self.refused = dict.fromkeys(KINDS, 0)
        self._floats, self._ints = table.cast("d"), table.cast("q")
        self._at, self._cell, self._clock_s = row * _ROW, row * _ROW + _CELLS + front, clock_s
        self._ints[self._cell] = 0

    @property
    def connections(self) -> int:
        """Connections that count for this account, on all fronts."""
        return sum(self._ints[self._at + _CELLS : self._at + _ROW])

    @property
    def held(self) -> int:
        """Those of this front."""
        return int(self._ints[self._cell])

    def admit(self, *, is_held: bool) -> None:
        """Count a request; `Busy` if it is one too many. `is_held`: its connection counts for this account already."""
        now_s, at, bounds = self._clock_s(), self._at, self.limits
        if bounds.connections and not is_held and self.connections >= bounds.connections:
            self._refuse("connections", f"{bounds.connections} connections", 1.0)
        if bounds.requests_per_s and (wait_s := allowance.wait_s(self._floats[at + _REQUESTS], now_s)):
            self._refuse("requests", f"{bounds.requests_per_s:g} requests a second", wait_s)
        if bounds.bytes_per_s and (wait_s := allowance.wait_s(self._floats[at + _BYTES], now_s)):
            self._refuse("bytes", f"{bounds.bytes_per_s:g} bytes a second", wait_s)
        self.requests += 1
        if bounds.requests_per_s:
            paid_s = self._floats[at + _REQUESTS]
            self._floats[at + _REQUESTS] = allowance.charge(paid_s, now_s, 1, bounds.requests_per_s)

    def _refuse(self, kind: str, most: str, wait_s: float) -> None:
        self.refused[kind] += 1
        raise Busy(
            f"{self.name} may have {most} on this node, and has them: wait as long as Retry-After says, or have the "
            "identity's limits raised",
            code="TooManyRequests",
            retry_after_s=wait_s,
        )

    def spent(self, size_bytes: int) -> None:
        """So many bytes go to its client, or came from it."""
        self.bytes += size_bytes
        if per_s := self.limits.bytes_per_s:
            at = self._at + _BYTES
            self._floats[at] = allowance.charge(self._floats[at], self._clock_s(), size_bytes, per_s)

    def hold(self, connections: int) -> None:
        """One connection more (1) or less (-1) counts for this account."""
        self._ints[self._cell] += connections
        assert self._ints[self._cell] >= 0, "let go twice"


class Accounts:
    """One per front, whose number is `front`. `shared_fd`: what `make_shared` made; None for memory of its own."""

    def __init__(self, front: int, clock_s: Callable[[], float], shared_fd: int | None = None) -> None:
        self._front, self._clock_s, self._lock_fd = front, clock_s, shared_fd
        self._table = memoryview(mmap.mmap(-1 if shared_fd is None else shared_fd, _SIZE_BYTES))
        self._rows = self._table.cast("Q")
        self._known: dict[str, Account] = {}

    def follow(self, identities: Iterable[Identity]) -> None:
        """These are the identities from now on."""
        for identity in identities:
            account = self._known.get(identity.name)
            if identity.limits is not None and account is None:
                account = self._known[identity.name] = self._open(identity.name)
            if account is not None:
                account.limits = identity.limits or Limits()

    def of(self, identity: Identity) -> Account:
        """The account of an identity that has limits."""
        account = self._known.get(identity.name)
        if account is None:  # somebody for whom an issuer vouches: nobody told of them before
            self._forget_people()
            account = self._known[identity.name] = self._open(identity.name)
        account.limits = identity.limits or Limits()
        return account

    def _forget_people(self) -> None:
        """Keep few accounts of people who come and go. What somebody used stays in the row, for when they come back."""
        if len(self._known) >= limits.ACCOUNTS_MAX:
            idle = (name for name, one in self._known.items() if name.startswith(OIDC_NAMES) and not one.held)
            self._known.pop(next(idle, ""), None)

    def _open(self, name: str) -> Account:
        digest = xxhash.xxh3_64_intdigest(name.encode()) or 1
        if self._lock_fd is not None:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX)
        try:
            for step in range(limits.ACCOUNTS_MAX):
                row = (digest + step) % limits.ACCOUNTS_MAX
                if self._rows[row * _ROW] in (0, digest):
                    self._rows[row * _ROW] = digest
                    return Account(name, self._table, row, self._front, self._clock_s)
        finally:
            if self._lock_fd is not None:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
        own = memoryview(bytearray(_ROW * 8))  # no row is left before a restart: this front counts for itself
        return Account(name, own, 0, self._front, self._clock_s)

    def values(self) -> dict[str, float]:
        """Counters and gauges of this front's part."""
        found: dict[str, float] = {}
        for account in self._known.values():
            name = account.name
            found[series("forebay_limited_requests_total", identity=name)] = account.requests
            found[series("forebay_limited_bytes_total", identity=name)] = account.bytes
            found[series("forebay_limited_connections", identity=name)] = account.held
            for kind, count in account.refused.items():
                found[series("forebay_limit_refusals_total", identity=name, limit=kind)] = count
        return found
