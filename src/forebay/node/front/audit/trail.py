"""The file of an audit log: lines of JSON, written by a thread of their own.

Theory. Whoever has a line hands it over and goes on: it waits in a bounded queue for a thread that alone writes. A disk
that stalls or is full holds up only that thread. It tries again every second, with what it has; meanwhile the queue
fills, and what no longer fits is dropped, counted, and said by a line of its own as soon as there is room for one.

Each front has its own file. So there is one writer, which may put the file aside when it is full, take back the part of
a line for which there was no room, and begin anew behind a line that a kill cut short. The lines of all fronts in the
order of time are one `sort` away, since each begins with its time.

What is lost. A kill takes the lines that wait: those of the last milliseconds, if the disk keeps up. A machine that
stops hard takes those of the last second too (`SYNC_S`). A line of `AuditBegins` without an `AuditEnds` before it says
that this may have happened.

Rejected: lines through the engine (denials would be lost while it is away, and it is the process with least to spare);
one file for all fronts (a torn line of one would spoil the next line of another); writing before the answer (a request
would wait for the disk of its log).

Invariants. (1) A line is one line of ASCII, whatever a client named its objects. (2) `put` never waits for a disk.
(3) `lines + dropped` is what was put and waits no longer.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forebay.node.rotated_files import is_at, open_to_append, rotate
from forebay.ports import clock as clocks
from forebay.ports import threads

log = logging.getLogger("forebay.audit")

WAITING_MAX = 8192  # lines of at most some 2 KiB
RETRY_S = 1.0
SYNC_S = 1.0

Line = Mapping[str, Any]  # "time" is Unix seconds; the order of names is that of the file


class Trail:
    """One file. `size_bytes_max`: it is put aside when it is longer; 0 is never. `front` is the number that each line
    names."""

    def __init__(
        self,
        path: Path,
        front: int,
        *,
        size_bytes_max: int = 0,
        waiting_max: int = WAITING_MAX,
        clock: clocks.Clock = clocks.system,
    ) -> None:
        self.lines = 0
        self.dropped = 0
        self._path = path
        self._front = front
        self._size_bytes_max = size_bytes_max
        self._waiting_max = waiting_max
        self._clock = clock
        self._news = threading.Condition()
        self._waiting: list[Line] = []
        self._unsaid = 0  # dropped, and not said in the file yet
        self._ending = False
        self._thread: threads.Started | None = None
        # the thread's alone
        self._fd = -1
        self._unsynced = False
        self._failing = False

    def start(self) -> None:
        """From now on lines are written."""
        self.put({"time": self._clock.wall_s(), "operation": "AuditBegins", "pid": os.getpid()})
        self._thread = threads.start(self._write_on, name="audit")

    def put(self, line: Line) -> None:
        """Have `line` written, unless too many wait already."""
        with self._news:
            if len(self._waiting) >= self._waiting_max:
                self.dropped += 1
                self._unsaid += 1
                return
            self._waiting.append(line)
            self._news.notify()

    def drop(self) -> None:
        """Count a line that shall not be written."""
        with self._news:
            self.dropped += 1
            self._unsaid += 1
            self._news.notify()

    def stop(self) -> None:
        """Write what waits, and end. Blocks until that is done; a disk that takes nothing is tried once."""
        if self._thread is None:
            return
        self.put({"time": self._clock.wall_s(), "operation": "AuditEnds", "pid": os.getpid()})
        with self._news:
            self._ending = True
            self._news.notify()
        self._thread.join()
        self._thread = None

    # --- the thread --------------------------------------------------------------------------------------------------
    def _write_on(self) -> None:
        synced_s = self._clock.monotonic_s()
        while True:
            with self._news:
                while not (self._waiting or self._unsaid or self._ending):
                    due_s = synced_s + SYNC_S - self._clock.monotonic_s()
                    if self._unsynced and due_s <= 0:
                        break
                    self._news.wait(due_s if self._unsynced else None)
                batch, self._waiting = self._waiting, []
                unsaid, ending = self._unsaid, self._ending
            if batch or unsaid:
                self._write_all(batch, unsaid)
            if self._unsynced and (ending or self._clock.monotonic_s() - synced_s >= SYNC_S):
                self._sync()
                synced_s = self._clock.monotonic_s()
            if ending:
                with suppress(OSError):
                    os.close(self._fd)
                return

    def _write_all(self, batch: list[Line], unsaid: int) -> None:
        """Write it, however long that takes; once the log ends, try only once."""
        text = "".join(map(self._text, batch))
        if unsaid:
            text += self._text({"time": self._clock.wall_s(), "operation": "AuditDropped", "lines": unsaid})
        while True:
            with self._news:
                last = self._ending
            try:
                self._write(text.encode("ascii"))
                break
            except OSError as error:
                self._fail(error)
                if last:
                    with self._news:
                        self.dropped += len(batch)
                    return
            with self._news:
                if not self._ending:
                    self._news.wait_for(lambda: self._ending, RETRY_S)
        with self._news:
            self.lines += len(batch)
            self._unsaid -= unsaid
        if self._failing:
            self._failing = False
            log.warning(
                "the audit log %s is written again; %d lines of it were dropped so far", self._path, self.dropped
            )

    def _fail(self, error: OSError) -> None:
        if not self._failing:
            log.error(
                "the audit log %s cannot be written: %s; requests go on, and up to %d of their lines wait",
                self._path, error, self._waiting_max,
            )  # fmt: skip
        self._failing = True

    def _write(self, data: bytes) -> None:
        """Append `data` to the file that is at the path, all of it or nothing."""
        if self._fd >= 0 and not is_at(self._path, self._fd):  # somebody moved it
            self._close()
        if self._fd < 0:
            self._open()
        size_bytes = os.fstat(self._fd).st_size
        if self._size_bytes_max and size_bytes and size_bytes + len(data) > self._size_bytes_max:
            with suppress(OSError):  # then it grows on: better too long than without these lines
                rotate(self._path)
                self._close()
                self._open()
                size_bytes = 0
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, size_bytes)
            raise
        self._unsynced = True

    def _open(self) -> None:
        self._fd = open_to_append(self._path)
        if os.fstat(self._fd).st_size:
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            if torn:  # a kill cut it short: it stays, as a line of its own
                os.write(self._fd, b"\n")

    def _close(self) -> None:
        if self._unsynced:
            self._sync()
        fd, self._fd = self._fd, -1
        os.close(fd)

    def _sync(self) -> None:
        self._unsynced = False
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)

    def _text(self, line: Line) -> str:
        at = datetime.fromtimestamp(line["time"], UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        said = json.dumps({**line, "time": at, "front": self._front})
        return f"{said}\n".replace("\x7f", "\\u007f")  # of what ASCII controls there are, the one that JSON lets pass
