"""Works on many objects at once: a few threads, one tally, one progress line, and Ctrl-C at any moment.

Theory. The main thread takes units (a listing's entries, a directory's files) from an iterator and puts them into a
short queue, so a million of them need no memory. A few threads work through the queue. A unit that fails is counted and
named, and the others go on. If the node is not there at all, everything ends. Only the main thread hears Ctrl-C, so it
never blocks for long; workers notice when they next report progress.

Invariants. (1) After `run` no worker is at work. (2) Each unit is done, skipped or failed, unless `run` raised.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from forebay.cli import show
from forebay.cli.outcome import Interrupted, Partial, as_forebay, one_line
from forebay.cli.progress import Progress
from forebay.core.errors import ForebayError
from forebay.ports import clock

U = TypeVar("U")
COMPLAINTS_MAX = 10
STOP_WAIT_S = 5.0  # for workers to notice Ctrl-C and undo what they began


class Stopped(Exception):
    """Ctrl-C was pressed: a worker gives up the unit it is at."""


@dataclass
class Done:
    """What was done, for the summary. `moved_bytes` leaves out what was there already, and is called `moved_name`."""

    target: str
    moved_name: str
    started_s: float = field(default_factory=clock.monotonic_s)
    files: int = 0
    size_bytes: int = 0
    moved_bytes: int = 0
    skipped: int = 0
    failed: int = 0
    complaints: list[str] = field(default_factory=list)
    ended_s: float = 0.0

    def add(self, size_bytes: int, moved_bytes: int) -> None:
        self.files += 1
        self.size_bytes += size_bytes
        self.moved_bytes += moved_bytes

    def skip(self, size_bytes: int) -> None:
        self.skipped += 1
        self.add(size_bytes, 0)

    def end(self) -> Done:
        self.ended_s = clock.monotonic_s()
        return self

    def fields(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "size_bytes": self.size_bytes,
            self.moved_name: self.moved_bytes,
            "skipped": self.skipped,
            "failed": self.failed,
            "seconds": round(self.ended_s - self.started_s, 6),
            "target": self.target,
        }

    def sentence(self, source: str) -> str:
        seconds = max(self.ended_s - self.started_s, 1e-9)
        what = show.size(self.size_bytes)
        if self.files != 1 or self.skipped:
            what = f"{show.counted(self.files, 'file')}, {what}"
        there = f" (there already: {self.skipped})" if self.skipped else ""
        if self.moved_bytes < self.size_bytes and not self.skipped:
            there = f" (there already: {show.size(self.size_bytes - self.moved_bytes)})"
        pace = show.duration(seconds)
        if self.moved_bytes:
            pace += f", {show.rate(self.moved_bytes / seconds)}"
        return f"{one_line(source)} -> {one_line(self.target)}: {what} in {pace}{there}"

    def tell(self, source: str, *, as_json: bool) -> None:
        """Print the summary; `Partial` if something failed."""
        if as_json:
            show.document(self.fields())
        else:
            print(self.sentence(source))
        self.check()

    def check(self) -> None:
        """`Partial` if something failed."""
        if self.failed:
            of = show.counted(self.files + self.failed, "object")
            raise Partial(f"{self.failed} of {of} failed: run the same command again for them")


class Crew(Generic[U]):
    """`do` does one unit and calls what it is given with the unit's bytes so far, which raises `Stopped` when it is to
    give up; `name` and `size_bytes` say what a unit is called and how large it is."""

    def __init__(
        self,
        do: Callable[[U, Callable[[int], None]], None],
        *,
        name: Callable[[U], str],
        size_bytes: Callable[[U], int],
        done: Done,
        progress: Progress,
        threads: int,
    ) -> None:
        self.done = done
        self.lock = threading.Lock()
        self._do, self._name, self._size_bytes = do, name, size_bytes
        self._progress = progress
        self._threads = threads
        self._units: queue.Queue[U | None] = queue.Queue(maxsize=4 * threads)
        self._stop = False
        self._fatal: ForebayError | None = None
        self._offered_bytes = 0
        self._all_offered = False
        self._moving: dict[int, int] = {}  # bytes of units that are not done yet, by thread

    def run(self, units: Iterable[U], interrupted: Callable[[], str]) -> int:
        """Do all units; how many there were. Raises what ends everything; `Interrupted` with what `interrupted` says
        is kept; what went wrong with single units is in `done`."""
        count = 0
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._threads)]
        for worker in workers:
            worker.start()
        try:
            for unit in units:
                count += 1
                self._offered_bytes += self._size_bytes(unit)
                self._offer(unit)
            self._all_offered = True
            for _ in workers:
                self._offer(None)
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.1)
        except KeyboardInterrupt:
            self._end(workers)
            raise Interrupted(f"interrupted: {interrupted()}") from None
        except BaseException:
            self._end(workers)
            raise
        if self._fatal is not None:
            raise self._fatal
        self.done.end()
        for text in self.done.complaints:
            show.note(f"forebay: {text}")
        return count

    def _end(self, workers: list[threading.Thread]) -> None:
        self._stop = True
        give_up_s = clock.monotonic_s() + STOP_WAIT_S
        for worker in workers:
            try:
                self._units.put_nowait(None)
            except queue.Full:
                pass  # it looks at `_stop` when it has its next unit
            worker.join(max(0.0, give_up_s - clock.monotonic_s()))

    def _offer(self, unit: U | None) -> None:
        """Put a unit before the workers; `_fatal` ends the waiting, since nobody takes units then."""
        while self._fatal is None:
            try:
                self._units.put(unit, timeout=0.1)
                return
            except queue.Full:
                continue
        raise self._fatal

    def _work(self) -> None:
        me = threading.get_ident()

        def moved(bytes_so_far: int) -> None:
            if self._stop:
                raise Stopped
            with self.lock:
                self._moving[me] = bytes_so_far
                at = self.done.size_bytes + sum(self._moving.values())
            self._progress.at(at, self._offered_bytes if self._all_offered else None)

        while not self._stop and self._fatal is None:
            unit = self._units.get()
            if unit is None or self._stop:
                return
            try:
                self._do(unit, moved)
            except Stopped:
                return
            except (ForebayError, OSError) as error:
                self._failed(self._name(unit), as_forebay(error))
            except BaseException as error:
                self._fatal = ForebayError(f"unexpected {type(error).__name__}: {error}; please report it")
                return
            finally:
                with self.lock:
                    self._moving.pop(me, None)

    def _failed(self, name: str, error: ForebayError) -> None:
        with self.lock:
            if error.code == "NoNode":
                self._fatal = error
            self.done.failed += 1
            if len(self.done.complaints) < COMPLAINTS_MAX:
                self.done.complaints.append(f"{one_line(name)}: {one_line(error.message)}")
