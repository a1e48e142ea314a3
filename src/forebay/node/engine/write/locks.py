"""One writer per key: first come, first served.

Theory. A write judges its conditions against the key's state and then changes it. Two writes that do so at once would
both judge a state that is gone. So a writer holds the key's lock from the judgement to the change of the index. A key
that nobody writes has no lock object: the table holds only keys in use, so memory is bounded by the writes under way.

Rejected: a fixed set of striped locks (a slow write to the backend would hold up strangers); asyncio.Lock per key (no
rule for when it may be thrown away while others wait).

Invariants. (1) At most one holder per key. (2) Waiters get the lock in order of arrival; a cancelled waiter passes its
turn on. (3) A key without a holder is not in the table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class _Held:
    """One request for one key's lock; an asynchronous context."""

    __slots__ = ("_locks", "_name")

    def __init__(self, locks: KeyLocks, name: tuple[str, str]) -> None:
        self._locks, self._name = locks, name

    async def __aenter__(self) -> None:
        await self._locks.take(self._name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.give(self._name)


class KeyLocks:
    """See the module's header. For one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """How many keys are held."""
        return len(self._waiting)

    def __contains__(self, name: tuple[str, str]) -> bool:
        """Whether somebody holds the key's lock."""
        return name in self._waiting

    def lock(self, bucket: str, key: str) -> _Held:
        """`async with locks.lock(bucket, key):` holds the key's lock inside."""
        return _Held(self, (bucket, key))

    def take_free(self, name: tuple[str, str]) -> bool:
        """Take the lock if nobody holds it; return whether it did."""
        if name in self._waiting:
            return False
        self._waiting[name] = deque()
        return True

    async def take(self, name: tuple[str, str]) -> None:
        """Wait for the lock. A cancelled wait takes nothing."""
        if self.take_free(name):
            return
        waiting = self._waiting[name]
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the lock was passed to us just before
                self.give(name)
            raise

    def give(self, name: tuple[str, str]) -> None:
        """Pass the lock to the longest waiter."""
        waiting = self._waiting[name]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[name]
