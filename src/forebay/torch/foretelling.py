"""Tells the node what the job will read next, while the job reads.

Theory. The order is computed, so the future is known exactly, for all ranks. A thread of rank 0 sends it as accesses in
the order of the epoch: for each sample, the blocks of its bytes, and how many bytes it reads of them. It stays an epoch
ahead of the job (or as much as the node allows), goes on into the next epoch before this one ends, and now and then
sends the job's position. So the node fetches what comes next and keeps what is needed soonest.

In an epoch that goes window by window over uncounted shards (`shards.py`), an access is a whole shard, and the position
is where the job's window begins. A few windows are told at a time, so that later data takes no share of the link. The
epoch after it is told when all shards are counted, some windows before the end. A node that cannot hold three windows
is told as much as fits, at least the window that the job is in. To it the whole of a window is needed until its end, so
what is read to count the next would find no room, and be read twice. So it hears where the job is, and what comes next,
right before that is counted (`comes`): what was read gives way.

Accesses are numbered from where the job began, across epochs. The loader only leaves its cursor here. A cursor that the
numbers do not lead to (a restart, a jump to another epoch) makes the thread tell the future anew from there.

All of this is advice. If the node does not understand it, forgot it or is away, it costs a few requests in a thread.
The thread has a client of its own, so workers are never forked while it holds a lock.

Invariants. (1) The node never knows more than AHEAD_BLOCKS_MAX blocks ahead of the position. (2) The loader's thread
waits for this one only in `close` and `heard`, and never long.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotFound, NotSupported
from forebay.torch.dataset import Dataset
from forebay.torch.order import Order, Windows
from forebay.torch.schedule import Cursor, Schedule
from forebay.torch.source import Telling

AHEAD_BLOCKS_MAX = limits.HINT_ACCESSES_MAX // 2  # leaves room for a piece of large objects
FIRST_SAMPLES, PIECE_SAMPLES = 2048, 65_536  # told at first, so that fetching begins; then at once
_PAUSE_S = 0.2  # between reports: some ten batches of a fast job
_AWAY_S = 5.0  # after a failure
_CLOSING_S = 2.0
_HEARD_S = 1.0  # hundreds of round trips to a node that is there


class _Epoch(NamedTuple):
    """How an epoch is told: `windows`, as whole shards; else by its samples."""

    order: Order
    accesses: int
    windows: Windows | None

    def told_up_to(self, window: int) -> int:
        """How many accesses may be told while the job is in `window`."""
        return self.accesses if self.windows is None else self.windows.end_after(window)

    def before(self, cursor: Cursor) -> int:
        """How many accesses lie before `cursor`."""
        if self.windows is None:
            return cursor.samples
        return int(self.windows.ends[cursor.window - 1]) if cursor.window else 0


class Foretelling:
    """A thread that tells `schedule`'s future over `hints`. Leave word with `at`; `close` at the end."""

    def __init__(self, schedule: Schedule, hints: Telling, cursor: Cursor) -> None:
        self._schedule, self._hints = schedule, hints
        self._dataset: Dataset = schedule.dataset
        self._word = cursor  # the loader's; replaced whole
        self._origin = cursor  # the cursor of access number `_zero`
        self._zero = self._known = self._said = self._reported = 0
        self._ahead_blocks: list[tuple[int, int]] = []  # of each piece that is not consumed: its end, its blocks
        self._epochs: dict[int, _Epoch] = {}
        self._ended = threading.Event()
        self._wake = threading.Event()  # set when there is a new word, or the end
        self._said_all = threading.Condition()
        self._done: Cursor | None = None  # the word after which all that was due was said, or could not be
        self.failed: ForebayError | None = None  # why nothing is told any more
        self._thread = threading.Thread(target=self._run, name="forebay-foretell", daemon=True)
        self._thread.start()

    def at(self, cursor: Cursor) -> None:
        """The job is at `cursor`."""
        self._word = cursor

    def heard(self, cursor: Cursor) -> None:
        """The job is about to read from `cursor` on. Returns when the node knows what comes there, if it can be told
        soon."""
        self._word = cursor
        if not self._thread.is_alive():
            return  # it ended, or it is the one of the process that this was forked from
        self._wake.set()
        with self._said_all:
            self._said_all.wait_for(lambda: self._done is cursor or self.failed, _HEARD_S)

    def comes(self, cursor: Cursor) -> None:
        """All before `cursor` was given out, and more is looked into: as `heard`, where that needs their room."""
        found = self._epochs.get(cursor.epoch)
        if found is None or (found.windows is not None and found.windows.is_tight):
            self.heard(cursor)

    def end(self) -> None:
        """As `close`, without waiting for it."""
        self._ended.set()
        self._wake.set()

    def close(self) -> None:
        """The job is over, or goes on elsewhere."""
        self.end()
        self._thread.join(_CLOSING_S)

    def _rested(self, pause_s: float) -> bool:
        """Whether it goes on, after a pause that a new word ends."""
        self._wake.wait(pause_s)
        self._wake.clear()
        return not self._ended.is_set()

    def _run(self) -> None:
        pause_s = 0.0
        lost = False
        while self._rested(pause_s):
            word = self._word
            try:
                pause_s = 0.0 if self._step(word) else _PAUSE_S
                lost = False
            except NotFound:  # a node that was restarted; if it has not even the listing, it has no use for this
                self._known = self._said
                self._ahead_blocks.clear()
                pause_s, lost = (_AWAY_S if lost else 0.0), True
            except (Invalid, NotSupported) as error:
                self.failed = error
            except ForebayError:
                pause_s = _AWAY_S
            if pause_s or (self._known > self._said == self._reported):
                with self._said_all:
                    self._done = word
                    self._said_all.notify_all()
            if self.failed:
                break
        try:
            self._hints.close()
        except ForebayError:
            pass  # it forgets by itself

    def _step(self, cursor: Cursor) -> bool:
        """Say how far the job is, at `cursor`, or one piece of its future; whether there is more to say at once."""
        position = self._number(cursor)
        self._said = position
        if self._reported < position < self._known:
            self._hints.at(position)
            self._reported = position
        while self._ahead_blocks and self._ahead_blocks[0][0] <= position:
            self._ahead_blocks.pop(0)
        ahead = self._known - position
        epoch, begin = self._at(self._known)
        found = self._epoch(epoch) if epoch <= cursor.epoch or self._dataset.counted else None
        if (
            found is None
            or ahead >= found.accesses
            or sum(count for _, count in self._ahead_blocks) >= AHEAD_BLOCKS_MAX
        ):
            return False
        end = found.told_up_to(cursor.window)
        if begin >= end:
            return False
        self._tell(found, begin, min(end - begin, FIRST_SAMPLES if not ahead else PIECE_SAMPLES))
        return True

    def _epoch(self, number: int) -> _Epoch | None:
        """How an epoch is told, once that was begun always the same; None if nothing is known of it yet."""
        if number not in self._epochs:
            counted = self._dataset.counted
            if not counted and not self._schedule.in_windows(number):
                return None
            order = self._schedule.order(number)
            if counted:
                self._epochs[number] = _Epoch(order, len(self._dataset), None)
                return self._epochs[number]
            assert isinstance(order, Windows), "that is what in_windows says"
            self._epochs[number] = _Epoch(order, len(order.blocks), order)
        return self._epochs[number]

    def _number(self, cursor: Cursor) -> int:
        """The number of the access at `cursor`. A cursor that cannot be reached from the origin becomes the origin."""
        number, origin_before = self._reached(cursor), self._before(self._origin)
        if not self._said <= number <= self._known:
            self._origin, self._zero = cursor, self._said
            self._known = number = self._said
            self._ahead_blocks.clear()
            self._epochs.clear()
        while self._origin.epoch < cursor.epoch:  # epochs that are over need not be kept
            told = self._epochs.pop(self._origin.epoch).accesses
            self._zero += told - origin_before
            self._origin, origin_before = Cursor(self._origin.epoch + 1, 0), 0
        return number

    def _reached(self, cursor: Cursor) -> int:
        """The number of the access at `cursor`, counted from the origin; -1 if that leads nowhere."""
        epoch, _ = self._at(self._known)
        if not self._origin.epoch <= cursor.epoch <= epoch:
            return -1
        number = self._zero - self._before(self._origin)
        number += sum(self._epochs[told].accesses for told in range(self._origin.epoch, cursor.epoch))
        return number + self._before(cursor)

    def _before(self, cursor: Cursor) -> int:
        """How many accesses of its epoch lie before `cursor`."""
        found = self._epoch(cursor.epoch) if cursor.samples else None
        return 0 if found is None else found.before(cursor)

    def _at(self, number: int) -> tuple[int, int]:
        """The epoch of access `number`, which was told or is the next to be, and how many lie before it there."""
        epoch, left = self._origin.epoch, number - self._zero + self._before(self._origin)
        while epoch in self._epochs and left >= self._epochs[epoch].accesses:
            left -= self._epochs[epoch].accesses
            epoch += 1
        return epoch, left

    def _tell(self, epoch: _Epoch, begin: int, count: int) -> None:
        """The next accesses, at most `count` and to the end of their epoch, in which `begin` lie before them."""
        end = min(begin + count, epoch.accesses)
        if epoch.windows is None:
            accesses = self._dataset.accesses(epoch.order.at(np.arange(begin, end)))
        else:
            accesses = self._dataset.of_blocks(epoch.windows.blocks[begin:end])
        blocks = accesses.blocks
        if blocks > AHEAD_BLOCKS_MAX and end - begin > 1:
            self._tell(epoch, begin, (end - begin) // 2)
            return
        self._hints.future(accesses.rows, self._known, accesses.use_bytes)
        self._known += end - begin
        self._ahead_blocks.append((self._known, blocks))
