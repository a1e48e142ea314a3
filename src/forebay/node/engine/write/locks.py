"""One writer per key: first come, first served.

Theory. A write judges its conditions against what the key is and then changes it; two that do so at once would both be
right about a state that is gone. So whoever writes a key holds its lock from the judgement to the index. A key that
nobody writes has no lock object: the table holds only keys in use, so memory is bounded by the writes under way.

Rejected: a fixed set of striped locks (a slow write to the backend would hold up strangers); asyncio.Lock per key
(no rule for when it may be thrown away while others wait).

Invariants. (1) At most one holder per key. (2) Waiters get it in the order they came; one that was cancelled passes
its turn on. (3) A key without holder is not in the table.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class _Held:
    """One wish for one key's lock; an asynchronous context."""

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
        """Whether somebody has the key."""
        return name in self._waiting

    def lock(self, bucket: str, key: str) -> _Held:
        """`async with locks.lock(bucket, key):` is alone with the key."""
        return _Held(self, (bucket, key))

    def take_free(self, name: tuple[str, str]) -> bool:
        """Take the key if nobody has it; whether that was so."""
        if name in self._waiting:
            return False
        self._waiting[name] = deque()
        return True

    async def take(self, name: tuple[str, str]) -> None:
        """Wait for the key. Cancelling the wait takes nothing."""
        if self.take_free(name):
            return
        waiting = self._waiting[name]
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was ours already
                self.give(name)
            raise

    def give(self, name: tuple[str, str]) -> None:
        """Pass the key on to who waits longest."""
        waiting = self._waiting[name]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[name]
