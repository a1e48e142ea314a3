"""An event loop whose time is the world's: it never waits.

Theory. What is ready happens; when nothing is, the clock jumps to the next timer. Sockets are real ones of this
machine's kernel (Unix sockets, whose bytes are there as soon as they were sent), so nothing between client, front and
engine need be faked, and the order of everything is that in which it was scheduled.

Rejected: transports in memory (a second implementation of what senders and receivers see of the kernel).

Invariants. (1) Time never goes back, and stands still while code runs. (2) Sockets that are ready together are served
in the order in which they were first watched, whatever their numbers are.
"""

from __future__ import annotations

import asyncio
import heapq
import select
import selectors
import threading
from collections.abc import Callable, Container
from concurrent.futures import Executor
from typing import Any

START_S = 1_700_000_000.0  # Unix time when every world begins
TURNS_MAX = 400_000  # of one life


class VirtualClock:
    """The world's time. It goes on over all lives of a node."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return START_S + self.now_s


class Killed(KeyboardInterrupt):
    """The process ends at this very call. No `Exception`, and one that a loop passes on: nobody may catch it."""


class Idle(AssertionError):
    """Nothing is ready and no timer is set, yet somebody waits."""


class _Selector(selectors.EpollSelector):
    """Never waits: it moves the clock, unless somebody else does."""

    def __init__(self, clock: VirtualClock, *, moves: bool) -> None:
        super().__init__()
        self._clock, self._moves = clock, moves
        self._count = 0
        self.turn: Callable[[], None] = lambda: None
        self._order: dict[int, int] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self._count += 1
        self._order[key.fd] = self._count
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turn()
        ready = super().select(0)
        if ready:
            return sorted(ready, key=lambda each: self._order[each[0].fd]) if len(ready) > 1 else ready
        if not self._moves:
            return ready
        if timeout is None:
            raise Idle("everybody waits for something that will not happen")
        if timeout > 0:
            self._clock.now_s += timeout
        return ready


class ReadySockets:
    """Which of several loops have a socket that is ready: one question to the kernel, not one a loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def watch(self, loop: VirtualLoop) -> None:
        """From now on, until it is abandoned."""
        self._epoll.register(loop._selector.fileno(), select.EPOLLIN)

    def look(self) -> Container[int]:
        """For `VirtualLoop.next_s`."""
        return [fd for fd, _ in self._epoll.poll(0)]

    def close(self) -> None:
        self._epoll.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of one life of a node. `threads` does what `run_in_executor` is given without an executor. It ends where
    `is_dead` says so. `alone`: time is its own to move; else somebody else gives turns to this and other loops."""

    def __init__(
        self, clock: VirtualClock, threads: Callable[[], Executor], is_dead: Callable[[], bool], *, alone: bool = True
    ) -> None:
        self._world_clock = clock
        self._threads = threads
        self._own_pool: Executor | None = None
        super().__init__(_Selector(clock, moves=alone))
        self._clock_resolution = 1e-7 if alone else 1e-9
        self.turns_left = -1  # until the process is killed; negative: it is not
        self.turns = 0
        self._is_dead = is_dead
        self._selector.turn = self._turn

    _ready: Any
    _scheduled: Any
    _selector: Any

    def time(self) -> float:
        return self._world_clock.now_s

    def _turn(self) -> None:
        self.turns += 1
        assert self.turns < TURNS_MAX, "this life does not come to an end"
        if self.turns_left > 0:
            self.turns_left -= 1
        if self.turns_left == 0 or self._is_dead():
            raise Killed

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)  # there is one thread

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        if executor is None:
            executor = self._own_pool = self._own_pool or self._threads()
        return asyncio.wrap_future(executor.submit(func, *args), loop=self)

    # --- beside other loops ------------------------------------------------------------------------------------------
    def next_s(self, ready: Container[int]) -> float:
        """When something is to be done here next: now, at a timer's time, or never (infinity). `ready` is what
        `ReadySockets` said."""
        if self._ready or self._selector.fileno() in ready:
            return self._world_clock.now_s
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        return float(self._scheduled[0]._when) if self._scheduled else float("inf")

    def take_turn(self) -> None:
        """Do what is ready, once."""
        kept, self._thread_id = self._thread_id, threading.get_ident()
        asyncio.events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            self._thread_id = kept
            asyncio.events._set_running_loop(None)

    _run_once: Any
    _thread_id: Any
    _timer_cancelled_count: Any

    def abandon(self) -> None:
        """The process has ended: nothing of this loop happens any more."""
        self._ready.clear()
        self._scheduled.clear()
        self._selector.close()
        self._closed = True
