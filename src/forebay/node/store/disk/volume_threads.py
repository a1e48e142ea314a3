"""One volume's threads: what changes its disk is done here, and nobody who serves others waits for it.

Theory. A disk may stop to answer at any moment: a write to it then waits, in the kernel, for as long as the disk does,
and nothing can call it back. So each volume has threads of its own. Its *hand* does what the store's thread wants
changed, one after the other; the store's thread waits for it CALL_S at most and then goes on without. Its *bearers*
move bytes. What was begun is not undone by that: it ends when the disk answers.

While something is overdue at the hand nobody waits for it any more: the disk is *late*.

Rejected: asking first whether the disk answers (it may stop a moment later); one pool for all disks (the frozen one
takes every thread).

Invariants. (1) What the hand is given is done once, in order. (2) Once others are served (`patience_s`), the store's
thread waits for a disk at most CALL_S, and not at all while it is late.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

log = logging.getLogger("forebay.store")

CALL_S = 1.0  # how long the store's thread waits: a busy machine gives a thread its turn in that time, mostly
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
BEARERS = 8  # what a disk with queues of its own is fed by

Result = TypeVar("Result")


class Late(OSError):
    """The disk has not answered in time. What was asked for may still come about."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ETIMEDOUT, "the disk does not answer", path)


class _Threads(ThreadPoolExecutor):
    """Notes what waits for the disk."""

    def __init__(self, desk: Desk, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._desk = desk

    def submit(self, work: Callable[..., Result], /, *arguments: Any, **named: Any) -> Future[Result]:
        return super().submit(self._desk.timed, work, *arguments, **named)


class Desk:
    """The threads of the volume at `path`. `call` and `begin` are for the store's thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._hand = _Threads(self, 1, "forebay-hand")
        self.bearers: Executor = _Threads(self, BEARERS, "forebay-bytes")
        self._lock = threading.Lock()
        self._waiting: dict[int, None] = {}  # what was begun and has not ended, in order
        self._number = 0
        self._overdue: Future[Any] | None = None
        self.patience_s: float | None = None  # nobody else is served yet

    @property
    def late(self) -> bool:
        """Whether what the store's thread once waited for is still not done."""
        if self._overdue is not None and self._overdue.done():
            self._overdue = None
        return self._overdue is not None

    def oldest(self) -> int | None:
        """The number of what has waited for the disk for the longest time. Any thread."""
        with self._lock:
            return next(iter(self._waiting), None)

    def begin(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Have it done; returns at once."""
        return self._hand.submit(work, *arguments)

    def call(
        self, work: Callable[..., Result], *arguments: Any, unwanted: Callable[[Result], None] | None = None
    ) -> Result:
        """Have it done and wait. `Late`: it is not done yet, and `unwanted` gets what comes of it; what `work` raises
        else."""
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
        """Have bytes moved by a bearer and wait, `patience_s` at most; as `call`. Any thread."""
        if self.late:
            raise Late(self._path)
        future = self.bearers.submit(work, *arguments)
        try:
            future.exception(patience_s)
        except TimeoutError:
            self._overdue = future
            _leave(future, unwanted)
            raise Late(self._path) from None
        return future.result()

    def wait(self, future: Future[Any]) -> None:
        """Return when it is done, or overdue."""
        if self.late:
            return
        try:
            future.exception(self.patience_s)
        except TimeoutError:
            self._overdue = future

    def timed(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """Do it here, in any thread, as something that waits for the disk."""
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
        """Return when all is done. Twice is fine."""
        self._hand.shutdown()
        self.bearers.shutdown()


def _leave(future: Future[Result], unwanted: Callable[[Result], None] | None) -> None:
    """Nobody waits for it any more."""
    if unwanted is not None:
        take = unwanted
        future.add_done_callback(lambda done: take(done.result()) if done.exception() is None else None)


_of_files: dict[str, Desk] = {}


def desk_of(path: str) -> Desk:
    """The desk for files like `path`, which lie in the tmp/ of a volume that is not at hand."""
    volume = os.path.dirname(os.path.dirname(path))
    if volume not in _of_files:
        _of_files[volume] = Desk(volume)
        _of_files[volume].patience_s = CALL_S
    return _of_files[volume]


def create_temp(path: str, patience_s: float) -> int:
    """Make a file of tmp/ and open it to be written. `Late`: it is not there, and goes if it comes to be."""
    return desk_of(path).carry(patience_s, os.open, path, _FLAGS, 0o600, unwanted=lambda fd: _undo(fd, path))


def _undo(fd: int, path: str) -> None:
    os.close(fd)
    _unlink(path)


def remove_temp(path: str) -> None:
    """Remove a file of tmp/ that nobody needs, if it is still there. Any thread; waits for its disk CALL_S at most, and
    the file goes when that answers."""
    if os.path.lexists(path):  # else it became the object; and unlinking nothing, too, waits for a disk that is frozen
        desk = desk_of(path)
        desk.wait(desk.bearers.submit(_unlink, path))


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("a temp file stays at %s: %s", path, error)
