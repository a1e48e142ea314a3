"""Threads that are none: what they are given happens on the loop, one piece at a time, at moments a seed decides.

Theory. A piece of work runs from its beginning to its end without anything between; what is left to chance is when it
begins, and which of the waiting ones is next. Where the product blocks until a piece is done, it is done there and
then. A stalled disk's pools do nothing until it answers: who blocks for one of them loses its patience, and so much
time has passed. If the loop changes something on it while others are served, that is a finding (`changes`).

Rejected: real threads that take turns (a switch costs more than most pieces).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from random import Random
from types import SimpleNamespace
from typing import Any

from forebay.sim.loop import Killed, VirtualClock

_Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Pool(Executor):
    def __init__(self, threads: SimThreads, count: int, disk: str) -> None:
        self._threads, self._count, self.disk = threads, count, disk
        self.waiting: deque[_Work] = deque()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, work, arguments, named))
        self._threads.pool_of[future] = self
        self._threads.later(self.turn)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait:
            while self.waiting:
                self._threads.answered(self.disk)
                self.do(0)

    def turn(self) -> None:
        """Do one of those that a thread would have begun by now."""
        if not self.waiting:
            return
        if self._threads.stalled(self.disk):
            self._threads.held.append(self)
            return
        self.do(self._threads.chance.randrange(min(self._count, len(self.waiting))))

    def do(self, number: int) -> None:
        future, work, arguments, named = self.waiting[number]
        del self.waiting[number]
        self._threads.pool_of.pop(future, None)
        if not future.set_running_or_notify_cancel():
            return
        self._threads.working += 1
        try:
            result = work(*arguments, **named)
        except (AssertionError, Killed):
            raise  # a finding or an end, not an outcome
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            self._threads.working -= 1


class SimThreads:
    """`ports.threads.Threads` for one world. `loop` is that of the present life."""

    def __init__(self, chance: Random, clock: VirtualClock, delay_s: Callable[[], float]) -> None:
        self.chance, self._clock, self._delay_s = chance, clock, delay_s
        self.loop: asyncio.AbstractEventLoop
        self.pool_of: dict[Future[Any], _Pool] = {}
        self.held: list[_Pool] = []
        self.working = 0  # pieces under way; more than one where a piece blocks for another
        self.serves = False  # clients
        self._stalled: set[str] = set()
        self.name_of: Callable[[str], str] = lambda disk: disk  # a volume's id to its path

    # --- the port ----------------------------------------------------------------------------------------------------
    def pool(self, count: int, name: str, disk: str = "") -> Executor:
        return _Pool(self, count, disk)

    def wait(self, future: Future[Any], patience_s: float | None = None) -> bool:
        while not future.done():
            pool = self.pool_of[future]
            if self.stalled(pool.disk):
                if patience_s is not None:
                    self._clock.now_s += patience_s
                    return False
                self.answered(pool.disk)
            number = 0 if pool._count == 1 else next(n for n, each in enumerate(pool.waiting) if each[0] is future)
            pool.do(number)
        return True

    def start(self, work: Callable[..., None], *arguments: Any, name: str) -> Any:
        future = _Pool(self, 1, "").submit(work, *arguments)
        return SimpleNamespace(join=lambda: self.wait(future))

    # --- the world ---------------------------------------------------------------------------------------------------
    def later(self, turn: Callable[[], None]) -> None:
        self.loop.call_later(self._delay_s(), turn)

    def stalled(self, disk: str) -> bool:
        return bool(self._stalled) and self.name_of(disk) in self._stalled

    def stall(self, path: str) -> None:
        """The disk of this volume does not answer from now on."""
        self._stalled.add(path)

    def answered(self, disk: str) -> None:
        """It answers, and has everything to do that waits."""
        path = self.name_of(disk)
        if path in self._stalled:
            self._stalled.discard(path)
            held, self.held = self.held, []
            for pool in held:
                self.later(pool.turn)

    def changes(self, path: str) -> None:
        """Something on this volume is changed now. While its disk is stalled that waits until it answers: with a thread
        that is nobody's own, or with the loop, which is a finding if the node `serves`."""
        if path in self._stalled:
            assert self.working or not self.serves, f"the loop itself changes {path}, which does not answer"
            self.answered(path)

    def end_life(self) -> None:
        """All threads are gone with the process; the disks stay as they are."""
        self.pool_of.clear()
        self.held.clear()
