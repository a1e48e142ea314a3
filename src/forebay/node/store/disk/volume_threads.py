"""One volume's threads: changes to its disk are made here, so that nobody who serves others waits for it.

Theory. A disk may stop answering at any moment. A write to it then waits in the kernel as long as the disk does, and
nothing can call it back. So each volume has its own threads. Its *hand* makes the changes for the store's thread, one
after the other. The store's thread waits for it at most CALL_S and then goes on. Its *bearers* move bytes. Work that
was begun is not undone by that: it ends when the disk answers.

While the hand has an overdue task, nobody waits for it any more: the disk is *late*.

Rejected: asking first whether the disk answers (it may stop a moment later); one pool for all disks (the frozen one
takes every thread).

Invariants. (1) The hand does each task once, in order. (2) Once others are served (`patience_s`), the store's thread
waits for a disk at most CALL_S, and not at all while it is late.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from forebay.ports import threads

log = logging.getLogger("forebay.store")

CALL_S = 1.0  # how long the store's thread waits; even a busy machine mostly runs a thread in that time
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
BEARERS = 8  # parallel requests for a disk that queues them itself

Result = TypeVar("Result")


class Late(OSError):
    """The disk has not answered in time. The work may still be done."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ETIMEDOUT, "the disk does not answer", path)


class _Threads(Executor):
    """A pool that tracks the tasks waiting for the disk."""

    def __init__(self, desk: Desk, path: str, count: int, name: str) -> None:
        self._desk, self._pool = desk, threads.pool(count, name, path)

    def submit(self, work: Callable[..., Result], /, *arguments: Any, **named: Any) -> Future[Result]:
        return self._pool.submit(self._desk.timed, work, *arguments, **named)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


class Desk:
    """The threads of the volume at `path`. `call` and `begin` are for the store's thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._hand = _Threads(self, path, 1, "forebay-hand")
        self.bearers: Executor = _Threads(self, path, BEARERS, "forebay-bytes")
        self._lock = threading.Lock()
        self._waiting: dict[int, None] = {}  # tasks begun and not ended, in order
        self._number = 0
        self._overdue: Future[Any] | None = None
        self.patience_s: float | None = None  # nobody else is served yet

    @property
    def late(self) -> bool:
        """Whether the store's thread has waited in vain for a task that is still not done."""
        if self._overdue is not None and self._overdue.done():
            self._overdue = None
        return self._overdue is not None

    def oldest(self) -> int | None:
        """The number of the oldest task that waits for the disk. Any thread."""
        with self._lock:
            return next(iter(self._waiting), None)

    def begin(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Queue the work; returns at once."""
        return self._hand.submit(work, *arguments)

    def call(
        self, work: Callable[..., Result], *arguments: Any, unwanted: Callable[[Result], None] | None = None
    ) -> Result:
        """Do the work and wait for its result. `Late`: it is not done yet, and `unwanted` gets its result. Raises what
        `work` raises."""
        if self.late:
            raise Late(self._path)
        future = self.begin(work, *arguments)
        self.wait(future)
        if not future.done():
            _leave(future, unwanted)
            raise Late(self._path)
        return future.result()

    def carry(
        self,
        patience_s: float,
        work: Callable[..., Result],
        *arguments: Any,
        unwanted: Callable[[Result], None] | None = None,
    ) -> Result:
        """Let a bearer do the work and wait at most `patience_s`; otherwise as `call`. Any thread."""
        if self.late:
            raise Late(self._path)
        future = self.bearers.submit(work, *arguments)
        if not threads.wait(future, patience_s):
            self._overdue = future
            _leave(future, unwanted)
            raise Late(self._path)
        return future.result()

    def wait(self, future: Future[Any]) -> None:
        """Return when it is done or overdue."""
        if self.late:
            return
        if not threads.wait(future, self.patience_s):
            self._overdue = future

    def timed(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Do the work in the calling thread, tracked as waiting for the disk."""
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = None
        try:
            return work(*arguments, **named)
        finally:
            with self._lock:
                del self._waiting[number]

    def close(self) -> None:
        """Return when all work is done. May be called twice."""
        self._hand.shutdown()
        self.bearers.shutdown()


def _leave(future: Future[Result], unwanted: Callable[[Result], None] | None) -> None:
    """Stop waiting for it."""
    if unwanted is not None:
        take = unwanted
        future.add_done_callback(lambda done: take(done.result()) if done.exception() is None else None)


_of_files: dict[str, Desk] = {}


def desk_of(path: str) -> Desk:
    """The desk for files like `path`, in the tmp/ of a volume that this process has not opened."""
    volume = os.path.dirname(os.path.dirname(path))
    if volume not in _of_files:
        _of_files[volume] = Desk(volume)
        _of_files[volume].patience_s = CALL_S
    return _of_files[volume]


def create_temp(path: str, patience_s: float) -> int:
    """Make a file in tmp/ and open it for writing. `Late`: it does not exist yet, and is removed if it appears."""
    return desk_of(path).carry(patience_s, os.open, path, _FLAGS, 0o600, unwanted=lambda fd: _undo(fd, path))


def _undo(fd: int, path: str) -> None:
    os.close(fd)
    _unlink(path)


def remove_temp(path: str) -> None:
    """Remove a file in tmp/ that nobody needs, if it is still there. Any thread. Waits for the disk at most CALL_S; the
    file goes when the disk answers."""
    if os.path.lexists(path):  # else it became the object; even unlinking a missing file waits for a frozen disk
        desk = desk_of(path)
        desk.wait(desk.bearers.submit(_unlink, path))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("a temp file stays at %s: %s", path, error)
