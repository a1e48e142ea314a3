"""Queues of transfers: the order in which pieces move, their threads, and how a caller learns of the end.

Theory. A tier has one queue in each direction, so tensors that leave never delay those that an operator waits for. A
transfer is cut into pieces. Each piece belongs to a lane (a disk) with its own threads. A thread takes the next piece
of the best transfer that has one in its lane: urgent ones first, then the smallest `due`, then the oldest request. So
one transfer uses all disks, a slow disk delays only its own pieces, and an urgent transfer waits only for the pieces
under way. Python runs once per piece; the calls that move bytes release the interpreter's lock.

A ticket stands for a transfer. It is *done* when no thread touches its memory any more, whatever the outcome: a failed
piece drops those that had not begun, and the ticket waits for those that had. First the owner's bookkeeping runs, then
the callback `then`, then waiters go on: whoever sees a ticket done sees both.

`Throttle` slows a direction down, to stand in for slower disks. It books time on a line that all threads share: a piece
ends when the line says, or when it really ended if that is later.

Rejected: concurrent.futures (no order except that of asking, and work that has begun cannot give way between pieces);
one heap of pieces (making a transfer of a thousand pieces urgent is a thousand changes); whole transfers as the unit
(an operator would wait for a tensor of gigabytes to pass).

Invariants. (1) Each piece is moved at most once, and none after its ticket is done. (2) A ticket is done exactly once,
and its callback called exactly once, without the lock. (3) A thread takes no piece while its lane has one of a better
transfer. (4) All fields of queues and tickets change under the one lock of their tier.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from forebay.core.errors import Bug, Closed, ForebayError
from forebay.ports import clock
from forebay.ports.clock import Clock

log = logging.getLogger(__name__)

CATCH_UP_S = 0.005  # a thread that is woken late makes up for so much: on a real disk that time is not lost

Array = Any  # numpy arrays of uint8: numpy is not followed by the type checker
Key = tuple[bool, float, int]  # not urgent, due, number: smaller is better


class Piece(NamedTuple):
    """Bytes begin..end of a transfer's memory, at `at` of its lane."""

    number: int  # in its slot
    lane: int
    at: int
    begin: int
    end: int


class Ticket:
    """A transfer that was asked for. Any thread may use its methods, `slot`, `size_bytes`, `error` and
    `ended` (set once it is done, for who waits without wanting the error); the rest is the queue's."""

    def __init__(
        self,
        queue: Queue,
        slot: Any,
        memory: Any,
        pieces: Sequence[Piece],
        *,
        due: float = math.inf,
        urgent: bool = False,
        then: Callable[[Ticket], object] | None = None,
    ) -> None:
        self.slot, self.size_bytes = slot, pieces[-1].end
        self.error: ForebayError | None = None
        self.memory: Any = memory  # an array, or DeviceBytes; until the ticket is done
        self.key: Key = (not urgent, due, 0)
        self.left: dict[int, deque[Piece]] = {}  # lane -> pieces that nobody has begun
        for piece in pieces:
            self.left.setdefault(piece.lane, deque()).append(piece)
        self.under_way = 0
        self.has_begun = self.is_over = False
        self.then = then
        self.ended = threading.Event()
        self._queue = queue

    def done(self) -> bool:
        """Whether it ended, well or not: its memory is the caller's again, and `then` has returned."""
        return self.ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is done, or for so long; whether it is. Raises what went wrong with the transfer: `error`.
        Not from the callback of the same ticket, which would wait for itself."""
        if not self.ended.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def cancel(self) -> bool:
        """Take it back if no byte of it has begun to move; whether that was so. It is then done, with `Closed`."""
        return self._queue.cancel(self)

    def drop(self) -> None:
        """Move no more of it than what is under way. If that is not all, it ends with `Closed`."""
        self._queue.drop(self)

    def urge(self) -> None:
        """Put it before all that is not urgent. What is under way or done is not affected."""
        self._queue.urge(self)


Carry = Callable[[Ticket, Piece, int], int]  # moves one piece on that worker, and returns the bytes that it moved


class Queue:
    """One direction of a tier, with `threads` workers for each of its lanes.

    `carry` is called on the workers, numbered from 0 over all lanes. `settled` does the owner's bookkeeping for a
    ticket that ended, with the lock held. `lock` is the owner's, and shared by its queues.
    """

    def __init__(
        self,
        name: str,
        lanes: int,
        threads: int,
        carry: Carry,
        settled: Callable[[Ticket], None],
        lock: threading.Lock,
    ) -> None:
        self.moved_bytes = 0  # since it started
        self._name, self._carry, self._settled, self._lock = name, carry, settled, lock
        self._heaps: list[list[tuple[Key, Ticket]]] = [[] for _ in range(lanes)]
        self._wake = [threading.Condition(lock) for _ in range(lanes)]
        self._count = 0
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._work, args=(worker // threads, worker), name=f"forebay-{name}-{worker}", daemon=True
            )
            for worker in range(lanes * threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def owns(self, thread: threading.Thread) -> bool:
        """Whether that is one of the workers."""
        return thread in self._threads

    # --- from callers ------------------------------------------------------------------------------------------------
    def submit(self, ticket: Ticket) -> None:
        """Line a new ticket up. The caller holds the lock, and has seen that the queue is not closed."""
        assert not self._closing, "asked of a closed queue"
        self._count += 1
        ticket.key = (*ticket.key[:2], self._count)
        self._push(ticket)

    def _push(self, ticket: Ticket) -> None:
        for lane, pieces in ticket.left.items():
            if pieces:
                heapq.heappush(self._heaps[lane], (ticket.key, ticket))
                self._wake[lane].notify(len(pieces))

    def urge(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.key[0] and not ticket.is_over:
                ticket.key = (False, *ticket.key[1:])  # its old places in the heaps find nothing left
                self._push(ticket)

    def drop(self, ticket: Ticket) -> None:
        with self._lock:
            if ticket.is_over or not any(ticket.left.values()):
                return
            over = self._fail(ticket, Closed("the rest of the transfer was dropped: ask for it anew if it is needed"))
        if over:
            self._tell(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.has_begun or ticket.is_over:
                return False
            self._fail(ticket, Closed("the transfer was cancelled before it began: ask for it anew if it is needed"))
        self._tell(ticket)
        return True

    def close(self) -> None:
        """Fail what has not begun with `Closed`, finish the pieces under way, and end the threads."""
        ended = []
        with self._lock:
            self._closing = True
            for ticket in {id(ticket): ticket for heap in self._heaps for _, ticket in heap}.values():
                waits = not ticket.is_over and any(ticket.left.values())
                if waits and self._fail(ticket, Closed(f"{self._name} was closed: nothing more moves")):
                    ended.append(ticket)
            for heap, wake in zip(self._heaps, self._wake, strict=True):
                heap.clear()
                wake.notify_all()
        for ticket in ended:
            self._tell(ticket)
        for thread in self._threads:
            thread.join()

    # --- on the workers ----------------------------------------------------------------------------------------------
    def _work(self, lane: int, worker: int) -> None:
        while (found := self._next(lane)) is not None:
            ticket, piece = found
            moved, error = 0, None
            try:
                moved = self._carry(ticket, piece, worker)
            except ForebayError as failed:
                error = failed
            except Exception as failed:
                error = Bug(f"{self._name}: moving a piece failed with {failed!r}: please report this")
                error.__cause__ = failed
            self._finish(ticket, moved, error)
            del ticket, found, error  # a worker that waits keeps nobody's memory

    def _next(self, lane: int) -> tuple[Ticket, Piece] | None:
        """The next piece for that lane, when there is one; None at the end."""
        heap = self._heaps[lane]
        with self._lock:
            while True:
                while heap:
                    _, ticket = heap[0]
                    pieces = ticket.left.get(lane)
                    if not pieces:  # begun, dropped, or it became urgent and has a better place in the heap
                        heapq.heappop(heap)
                        continue
                    ticket.has_begun = True
                    ticket.under_way += 1
                    return ticket, pieces.popleft()
                if self._closing:
                    return None
                self._wake[lane].wait()

    def _finish(self, ticket: Ticket, moved_bytes: int, error: ForebayError | None) -> None:
        with self._lock:
            assert ticket.under_way > 0, "a piece that was not begun"
            assert not ticket.is_over, "a piece of a ticket that is done"
            ticket.under_way -= 1
            self.moved_bytes += moved_bytes
            if error is not None:
                over = self._fail(ticket, error)
            else:
                over = self._end_if_over(ticket)
        if over:
            self._tell(ticket)

    # --- ends, with the lock held ------------------------------------------------------------------------------------
    def _fail(self, ticket: Ticket, error: ForebayError) -> bool:
        """Drop the pieces that nobody has begun; whether the ticket is over with that. The first error counts."""
        if ticket.error is None:
            ticket.error = error
        ticket.left.clear()
        return self._end_if_over(ticket)

    def _end_if_over(self, ticket: Ticket) -> bool:
        if ticket.under_way or any(ticket.left.values()):
            return False
        ticket.is_over = True
        ticket.memory = None
        self._settled(ticket)
        return True

    def _tell(self, ticket: Ticket) -> None:
        """Without the lock: the callback may ask for more."""
        then, ticket.then = ticket.then, None
        try:
            if then is not None:
                then(ticket)
        except Exception:
            log.exception("%s: a callback raised, which it must not", self._name)
        finally:
            ticket.ended.set()


class Throttle:
    """A line of time on which bytes pass at `bytes_s`, shared by all that book on it."""

    def __init__(
        self, bytes_s: float, *, time_from: Clock = clock.system, sleep: Callable[[float], object] = time.sleep
    ):
        assert bytes_s > 0, "a disk that moves nothing"
        self.bytes_s = bytes_s
        self._clock, self._sleep = time_from, sleep
        self._lock = threading.Lock()
        self._booked_s = -math.inf  # until when the line is taken
        self._woken_s, self._late_s = -math.inf, 0.0  # the last wait that slept: when it ended, and how much too late

    def book(self, size_bytes: int) -> float:
        """Take the next stretch of the line for so many bytes; when it ends, for `wait`."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            late_s = self._late_s if now_s - self._woken_s <= CATCH_UP_S else 0.0  # else the disk had a rest: no credit
            self._booked_s = max(self._booked_s, now_s - late_s) + size_bytes / self.bytes_s
            self._late_s = 0.0
            return self._booked_s

    def wait(self, until_s: float) -> None:
        """Until that moment of the line, if it is not past."""
        slept = False
        while (left_s := until_s - self._clock.monotonic_s()) > 0:
            self._sleep(left_s)
            slept = True
        if slept:
            with self._lock:
                self._woken_s = self._clock.monotonic_s()
                self._late_s = min(self._woken_s - until_s, CATCH_UP_S)
