"""Writes back what the node owes: the shell around `core/machines/flush.py` and `gate.py`; `key_flush.py` sends one
key.

Theory. All notes of owed writes are in memory here, by bucket and key. The store keeps them too; after a start they are
taken up from there one by one (`flush/owed_at_start.py`). Each bucket has a queue that picks the next key. An errand
takes that key to the backend. Then, under the key's lock, its record becomes clean if it is still the one that was
sent. If the key was written again meanwhile, the newer note is based on the version just made, and the key is queued
anew. Other bodies of the key that were sent and may still arrive stay known as ours (`core/machines/sent_bodies.py`)
until their time is over: in the newer note, or only here if the key owes nothing any more.

A newer write stops an errand that sends the parts of an upload, whose parts would be thrown away. A single put runs to
its end, since nobody can call it back. `stop_key` waits for exactly that, and not for the bookkeeping after it, which
needs the lock that its caller may hold.

Rejected: clearing dirty without the lock (a write that is being committed would lose its note); a pool of threads for
sending (the backends stream natively).

Invariants. (1) The debts here are what the store's notes say, except between a write's commit and its `add`. (2) A note
goes only when the backend has that write, when its owner says so, or by the bucket's conflict policy. (3) Every wait
ends: with success, an error that says what to do, or `Closed`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.core import limits
from forebay.core.errors import Bug, Busy, Closed, ForebayError, ObjectLost, VolumeMissing
from forebay.core.machines import sent_bodies
from forebay.core.machines.delivery_events import Delivered, Yielded
from forebay.core.machines.flush import (
    Asked,
    Dropped,
    Ended,
    Event,
    Failed,
    Forgot,
    Held,
    Pressed,
    Queue,
    Released,
    Start,
    Woke,
    Wrote,
)
from forebay.core.machines.gate import Admit, Bounds, Gate, Gone, Knock, Owes, Refuse
from forebay.core.machines.sent_bodies import Sent
from forebay.core.metrics import series
from forebay.core.quantity import counted
from forebay.core.record import Record
from forebay.core.s3rules.keeping import keeping_among
from forebay.core.types import Bucket, Headers, ObjectInfo
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.delivery import Superseded
from forebay.node.engine.disk_wait import by_disk, check_flushes
from forebay.node.engine.flush.key_flush import Books, Destination, Errand
from forebay.node.store.disk.notes import Note, Owed, succeeding
from forebay.node.store.disk.volume import Volume
from forebay.node.store.writer.puts import Delete
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.flush")

SENDS_MAX = 16  # bodies under way at once per bucket: enough for 20 ms at 200 MB/s in bodies of 256 KiB
TRIES = 3  # attempts before waiters get the error
TELL_S = 5.0  # between log lines about the last flush
CAPACITY_KEPT_S = 5.0
HOPELESS_S = 15.0  # the last flush ends after this long without any success while every backend is sick
LINGER_S = 5.0
LOOK_S = 0.2  # how often the last flush checks whether to stop
PATIENCE_MAX_S = 60.0
ASKED_AT_ONCE = 2 * limits.FLUSHES_MAX  # keys that one flush asks for at once: enough to keep every start busy


class Ledger(Books, Protocol):
    """What the flusher needs of the store."""

    def mark_clean(
        self, bucket: str, key: str, object_id: int, *, version: str, checked_s: float, keeping: Headers = ()
    ) -> Record | None: ...
    def write_notes(self, owed: list[Owed]) -> None: ...
    def volume_at(self, bucket: str, key: str) -> Volume | None: ...


class Totals(NamedTuple):
    """What a bucket owes. `since_s` is Unix time. `error` is why the last flush failed ("" after a success)."""

    bytes: int = 0
    objects: int = 0
    since_s: float | None = None
    flushing: int = 0
    conflicts: int = 0
    error: str = ""


class Counts:
    """What was done for a bucket since the engine started."""

    def __init__(self) -> None:
        self.flushes = 0
        self.flushed_bytes = 0
        self.sent_bytes = 0
        self.failures: Counter[str] = Counter()  # by kind
        self.conflicts: Counter[str] = Counter()  # by policy
        self.waits = 0
        self.refusals = 0


class _Debt:
    """What one key owes. `left`: a request with this body or delete may have left. `rewritten_s`: when the key was
    first written again after its errand began."""

    __slots__ = ("left", "owed", "rewritten_s", "waiting")

    def __init__(self, owed: Owed, left: bool) -> None:
        self.owed, self.left = owed, left
        self.rewritten_s: float | None = None
        self.waiting: list[_Waiting] = []

    @property
    def note(self) -> Note:
        return self.owed.note


class _Waiting:
    """A caller that waits until the backend has write `seq`."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.tries = TRIES
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Flight:
    """An errand under way. `sent` is set when the errand has finished with the backend."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.errand: Errand | None = None
        self.task: asyncio.Task[None] | None = None
        self.sent = asyncio.Event()
        self.unwanted = False

    def give_up(self) -> None:
        """Stop it, if it can still be stopped."""
        self.unwanted = True  # a task that has not begun cannot clean up after itself: it checks this flag
        if self.task is not None and self.errand is not None and self.errand.is_cancellable and not self.sent.is_set():
            self.task.cancel()


class _Bucket:
    """All of one bucket."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.gate = Gate(Bounds(0, 1.0))
        self.debts: dict[str, _Debt] = {}
        self.keys: list[str] = []  # of `debts`, sorted
        self.flights: dict[str, _Flight] = {}
        self.writers: dict[int, asyncio.Future[None]] = {}
        self.sends = asyncio.Semaphore(SENDS_MAX)
        self.late: dict[str, Sent] = {}  # of keys that owe nothing, the latest last
        self.told: set[str] = set()
        self.counts = Counts()
        self.error = ""
        self.queue_timer: asyncio.TimerHandle | None = None
        self.gate_timer: asyncio.TimerHandle | None = None


class _Keeping:
    """Keeps one key's note up to date for its errand."""

    def __init__(self, flusher: Flusher, bucket: str, key: str) -> None:
        self._flusher, self._bucket, self._key = flusher, bucket, key

    def note(self) -> Note | None:
        return self._flusher.find(self._bucket, self._key)

    async def keep(self, note: Note) -> None:
        await self._flusher.keep(self._bucket, self._key, note)

    def leaves(self, seq: int, left: bool = True) -> bool:
        return self._flusher.leaves(self._bucket, self._key, seq, left)

    def may_send(self, under_way: bool = False) -> None:
        self._flusher.may_send(self._bucket, under_way)


class Flusher:
    """See the module's header. Everything runs on the loop that made it.

    `lock` is the key's lock, which writers hold from their judgement to their `add`. `commit` makes a change to the
    index durable and visible. `capacity_bytes` says how much the node may hold now. `cleaned` hears of each record that
    became clean and may be evicted from then on; `found_bad` of blocks that do not match their checksums.
    """

    def __init__(
        self,
        store: Ledger,
        buckets: Buckets,
        clock: Clock,
        chance: Chance,
        workers: Executor,
        *,
        lock: Callable[[str, str], AbstractAsyncContextManager[None]],
        commit: Callable[[Any], Any],
        flush_soon: Callable[[], None],
        node_id: str,
        capacity_bytes: Callable[[], int],
        cleaned: Callable[[str, str, Record], None] = lambda bucket, key, record: None,
        found_bad: Callable[[str, str, Record, list[int]], object] = lambda bucket, key, record, bad: None,
    ) -> None:
        self.is_second: Callable[[float], Coroutine[Any, Any, bool]] | None = None  # see `Seat.is_second`
        self.clear: Callable[[str, str], Coroutine[Any, Any, None]] | None = None  # what others keep of a key, first
        self.may_send: Callable[[str, bool], None] = lambda bucket, under_way: None  # see `Replicas.may_send`
        self._store, self._buckets, self._clock, self._chance, self._workers = store, buckets, clock, chance, workers
        self._lock, self._commit, self._flush_soon, self._cleaned = lock, commit, flush_soon, cleaned
        self._node_id, self._capacity_bytes, self._found_bad = node_id, capacity_bytes, found_bad
        self._of: dict[str, _Bucket] = {}
        self._numbers = 0
        self._closed = False
        self._quarter = (0.0, 0)  # until when it holds, bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._lingering: dict[int, asyncio.TimerHandle] = {}

    def take_up(self, owed: Owed) -> None:
        """Add a debt from before the start; it may have been sent already. Nothing happens if the key owes the same, or
        something later."""
        if (known := self.find(owed.bucket, owed.key)) is None or known.seq < owed.note.seq:
            self.add(owed, left=True)

    # --- what is owed ------------------------------------------------------------------------------------------------
    def add(self, owed: Owed, *, left: bool = False) -> None:
        """A write or delete was acknowledged: it replaces what the key owed. Call it under the key's lock. `left`: it
        may have been sent before.

        The note should come from `notes.succeeding`. If it does not, it is corrected in the store a moment later.
        """
        if owed.note.local:
            return
        of = self._bucket(owed.bucket)
        debt = of.debts.get(owed.key)
        if debt is None:
            of.debts[owed.key] = _Debt(owed, left)
            insort(of.keys, owed.key)
            note = owed.note
        else:
            note = succeeding(owed.note, debt.note)
            if note != owed.note:
                self._background(self.keep(owed.bucket, owed.key, note))
            elif not debt.left:  # the disk counts the earlier body as one that may have left, but it did not
                note = succeeding(owed.note, debt.note, left=False)
            debt.left = debt.left and debt.note.seq == note.seq
            debt.owed = msgspec.structs.replace(owed, note=note)
            flight = of.flights.get(owed.key)
            if flight is not None and flight.seq != note.seq:
                if debt.rewritten_s is None:
                    debt.rewritten_s = self._clock.wall_s()
                flight.give_up()
        self._step(owed.bucket, Wrote(owed.key, note.seq, note.size_bytes, note.since_s))

    def find(self, bucket: str, key: str) -> Note | None:
        """What the key owes now. If the note `is_delete`, the object does not exist."""
        of = self._of.get(bucket)
        debt = of.debts.get(key) if of is not None else None
        return None if debt is None else debt.note

    def leaves(self, bucket: str, key: str, seq: int, left: bool) -> bool:
        """Note that a request with write `seq` may leave from now on, or (not `left`) that none did. Returns whether
        one may have left before. `Superseded` if the key owes something else by now: no body may leave that no note
        here names."""
        of = self._of.get(bucket)
        debt = of.debts.get(key) if of is not None else None
        if debt is None or debt.note.seq != seq:
            raise Superseded
        if left:
            self.may_send(bucket, False)
        before, debt.left = debt.left, left
        return before

    def sent(self, bucket: str, key: str) -> Sent:
        """The bodies of a key without debt that may still arrive at the backend."""
        of = self._of.get(bucket)
        return of.late.get(key, Sent()) if of is not None else Sent()

    def forget(self, bucket: str, key: str, error: ForebayError | None = None) -> None:
        """The key owes nothing any more: it was written through, its bucket was removed, or (`error`) it is lost. Its
        waiters return, or get the error."""
        of = self._of.get(bucket)
        if of is None:
            return
        if (flight := of.flights.get(key)) is not None:
            flight.give_up()
        self._drop(of, key, error)
        self._step(bucket, Forgot(key))

    async def stop_key(self, bucket: str, key: str) -> None:
        """Under the key's lock: return when no flush of the key is on its way to the backend. None starts before the
        next `add` or `forget`, or before the lock is free again (then the write failed and changed nothing)."""
        of = self._bucket(bucket)
        self._step(bucket, Held(key))
        self._background(self._release(bucket, key))
        flight = of.flights.get(key)
        if flight is not None:
            flight.give_up()
            await flight.sent.wait()

    async def _release(self, bucket: str, key: str) -> None:
        async with self._lock(bucket, key):
            self._step(bucket, Released(key))

    def try_again(self, bucket: str) -> None:
        """What failed may go well now: try the first of it at once, and the rest follows a success."""
        for key, _ in self.window(bucket, "", "", ASKED_AT_ONCE):
            self.ask(bucket, key)

    def ask(self, bucket: str, key: str) -> None:
        """Somebody wants the backend to have this key soon."""
        self._step(bucket, Asked(key))

    def window(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[tuple[str, Note]]:
        """The first `limit` keys that owe, under `prefix` and after `start_after`, in UTF-8 byte order."""
        of = self._of.get(bucket)
        if of is None:
            return []
        keys = of.keys
        first = max(bisect_left(keys, prefix), bisect_right(keys, start_after))
        found: list[tuple[str, Note]] = []
        for index in range(first, min(len(keys), first + limit)):
            if not keys[index].startswith(prefix):
                break
            found.append((keys[index], of.debts[keys[index]].note))
        return found

    def sends(self, bucket: str) -> bool:
        """Whether something of the bucket is on its way to the backend."""
        of = self._of.get(bucket)
        return of is not None and bool(of.flights)

    def totals(self, bucket: str) -> Totals:
        """What the bucket owes now."""
        of = self._of.get(bucket)
        if of is None:
            return Totals()
        queue = of.queue
        conflicts = of.counts.conflicts.total()
        return Totals(queue.dirty_bytes, len(queue), queue.oldest_s(), queue.flying, conflicts, of.error)

    async def keep(self, bucket: str, key: str, note: Note) -> None:
        """Replace the note with the same `seq`, here and in the store. Nothing happens if the key owes something
        else."""
        of = self._of.get(bucket)
        debt = of.debts.get(key) if of is not None else None
        if debt is None or debt.note.seq != note.seq:
            return
        owed = debt.owed = msgspec.structs.replace(debt.owed, note=note)
        volume = self._store.volume_at(bucket, key)
        await by_disk(volume, self._workers, lambda: self._store.write_notes([owed]), f"{bucket}/{key}")

    # --- backpressure ------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def room(self, bucket: Bucket, size_bytes: int) -> AsyncIterator[None]:
        """Enter when the bucket may owe `size_bytes` more; `Busy` (`SlowDown`) if that takes longer than DIRTY_WAIT_S.
        The bytes count until the write ends. A bucket that is not written back owes nothing.

        Enter before taking the key's lock: the flush that makes room may need that lock.
        """
        writer, answer = self.admits(bucket, size_bytes), None
        if writer is None:
            answer = asyncio.get_running_loop().create_future()
            writer = self._knock(bucket, size_bytes, answer)
            self._of[bucket.name].counts.waits += 1
            self._step(bucket.name, Pressed())
        try:
            if answer is not None:
                await answer
            yield
        finally:
            self.ended(bucket.name, writer)

    def admits(self, bucket: Bucket, size_bytes: int) -> int | None:
        """As `room` if no wait is needed: returns the write's number, which `ended` must get. Otherwise returns None,
        and nothing happened."""
        if bucket.write != "back":
            return 0
        waiting = self._bucket(bucket.name).gate.waiting
        if waiting:
            return None
        writer = self._knock(bucket, size_bytes)
        if writer in waiting:
            self.ended(bucket.name, writer)
            return None
        return writer

    def ended(self, name: str, writer: int) -> None:
        """The write of this number waits no longer, failed, or has added what it owes."""
        of = self._of.get(name)
        if writer and of is not None:
            of.writers.pop(writer, None)
            self._at_gate(name, Gone(writer))

    def _knock(self, bucket: Bucket, size_bytes: int, answer: asyncio.Future[None] | None = None) -> int:
        """Ask the gate. Returns the writer's number, under which it waits there if it must."""
        dirty_bytes_max = bucket.dirty_bytes_max if bucket.dirty_bytes_max is not None else self._quarter_bytes()
        self._at_gate(bucket.name, Bounds(dirty_bytes_max, bucket.dirty_age_max_s))
        self._numbers += 1
        if answer is not None:
            self._of[bucket.name].writers[self._numbers] = answer
        until_s = self._clock.monotonic_s() + limits.DIRTY_WAIT_S
        self._at_gate(bucket.name, Knock(self._numbers, size_bytes, until_s))
        return self._numbers

    def _quarter_bytes(self) -> int:
        """A quarter of what the node may hold, refreshed every few seconds."""
        now = self._clock.monotonic_s()
        if now >= self._quarter[0]:
            self._quarter = (now + CAPACITY_KEPT_S, self._capacity_bytes() // 4)
        return self._quarter[1]

    def _at_gate(self, name: str, event: Knock | Gone | Owes | Bounds | Woke) -> None:
        of = self._of[name]
        if of.gate_timer is not None:
            of.gate_timer.cancel()
            of.gate_timer = None
        for effect in of.gate.step(self._clock.monotonic_s(), event):
            match effect:
                case Admit(writer):
                    _end(of.writers.pop(writer, None))
                case Refuse(writer, retry_after_s):
                    of.counts.refusals += 1
                    _end(of.writers.pop(writer, None), self._too_much(name, retry_after_s))
                case _:
                    of.gate_timer = self._later(effect.at_s, lambda: self._at_gate(name, Woke()))

    def _too_much(self, name: str, retry_after_s: float) -> Busy:
        totals = self.totals(name)
        why = f" (the last flush failed: {totals.error})" if totals.error else ""
        what = f"{counted(totals.objects, 'object')}, {totals.bytes} bytes"
        return Busy(
            f"bucket {name} owes its backend {what}, as much as it may or for as long{why}: write again in "
            f"{retry_after_s:g} s; raise dirty_bytes_max or dirty_age_max, or mend the backend, if this stays",
            code="SlowDown",
            retry_after_s=retry_after_s,
        )

    # --- flushing ----------------------------------------------------------------------------------------------------
    def _bucket(self, name: str) -> _Bucket:
        of = self._of.get(name)
        if of is None:
            of = self._of[name] = _Bucket()
        return of

    def _later(self, at_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        delay_s = max(0.0, at_s - self._clock.monotonic_s())
        return asyncio.get_running_loop().call_later(delay_s, call)

    def _step(self, name: str, event: Event) -> None:
        if self._closed:
            return
        of = self._bucket(name)
        if of.queue_timer is not None:
            of.queue_timer.cancel()
            of.queue_timer = None
        now = self._clock.monotonic_s()
        for effect in of.queue.step(now, event):
            if isinstance(effect, Start):
                self._launch(name, of, effect.key)
            else:
                of.queue_timer = self._later(effect.at_s, lambda: self._step(name, Woke()))
        oldest_s = of.queue.oldest_s()
        if oldest_s is not None:
            oldest_s = now - (self._clock.wall_s() - oldest_s)
        self._at_gate(name, Owes(of.queue.dirty_bytes, oldest_s, of.queue.is_sick))

    def _launch(self, name: str, of: _Bucket, key: str) -> None:
        debt = of.debts[key]
        debt.rewritten_s = None
        flight = of.flights[key] = _Flight(debt.note.seq)
        flight.task = asyncio.create_task(self._fly(name, of, key, debt.note, flight))

    async def _fly(self, name: str, of: _Bucket, key: str, note: Note, flight: _Flight) -> None:
        event: Event = Dropped(key)
        try:
            served = await self._buckets.get(name)
            if flight.unwanted:
                raise Superseded
            check_flushes(self._store.volume_at(name, key), f"{name}/{key}")
            self.may_send(name, False)
            destination = Destination(
                served.bucket,
                served.backend,
                self._store,
                self._workers,
                of.sends,
                self._node_id,
                of.told,
                self._linger,
                lambda key: self._buckets.leave_uploads(served, key),
                self._found_bad,
            )
            if note.based_on is None and self.is_second is not None and await self.is_second(note.since_s):
                note = msgspec.structs.replace(note, based_on="")  # what is there is somebody else's, and newer
            if flight.unwanted:
                raise Superseded
            errand = flight.errand = Errand(destination, key, note, _Keeping(self, name, key), self._clock.wall_s())
            try:
                outcome = await errand.run()
            except (asyncio.CancelledError, Superseded):
                if key not in of.debts and not self._closed:
                    await errand.abandon()
                raise
            flight.sent.set()
            event = await self._settle(name, of, key, errand, outcome)
        except asyncio.CancelledError:
            if self._closed:
                raise
        except (Superseded, ObjectLost):
            pass  # a lost object was reported, and is no longer owed
        except ForebayError as error:
            event = self._failed(name, of, key, error)
        except Exception as error:
            log.exception("the flush of %s/%s broke", name, key)
            event = self._failed(name, of, key, Bug(f"the flush broke: {error!r}; the node's log has more"))
        finally:
            flight.sent.set()
            of.counts.sent_bytes += flight.errand.sent_bytes if flight.errand is not None else 0
            del of.flights[key]
        self._step(name, event)

    async def _settle(self, name: str, of: _Bucket, key: str, errand: Errand, outcome: Delivered | Yielded) -> Event:
        """Record here how the errand ended."""
        note, began_s, now_s = errand.note, errand.began_s, self._clock.wall_s()
        version = outcome.seen.version if isinstance(outcome, Delivered) and outcome.seen is not None else ""
        async with self._lock(name, key):
            debt = of.debts.get(key)
            since_s = None
            if debt is not None and debt.note.seq == note.seq:
                if isinstance(outcome, Delivered):
                    if self.clear is not None:
                        await self.clear(name, key)
                    self._clean(name, key, note, outcome.seen)
                else:
                    await self._commit(Delete(name, key))
                sent = sent_bodies.left(note.sent, note.known_by) if errand.is_repeated else note.sent
                self._remember_late(of, key, sent_bodies.answered(sent, began_s, now_s), now_s)
                self._drop(of, key)
            elif debt is not None and isinstance(outcome, Delivered):
                since_s = debt.rewritten_s if debt.rewritten_s is not None else debt.note.since_s
                sent = sent_bodies.answered(debt.note.sent, began_s, now_s)
                newer = msgspec.structs.replace(
                    debt.note, based_on=version, stale=(), since_s=since_s, **sent._asdict()
                )
                await self.keep(name, key, newer)
        counts = of.counts
        if isinstance(outcome, Delivered):
            of.error = ""
            counts.flushes += 1
            counts.flushed_bytes += note.size_bytes
        if outcome.policy:
            counts.conflicts[outcome.policy] += 1
            became = f"ours is kept as {outcome.kept_as}" if isinstance(outcome, Yielded) and outcome.kept_as else ""
            became = became or ("theirs was replaced" if isinstance(outcome, Delivered) else "ours was dropped")
            log.warning("conflict: %s/%s was changed at the backend by others; %s", name, key, became)
        return Ended(key, note.seq, since_s)

    def _remember_late(self, of: _Bucket, key: str, sent: Sent, now_s: float) -> None:
        """Remember bodies that may still arrive, of a key that owes nothing."""
        of.late.pop(key, None)
        if sent.late:
            of.late[key] = sent
        while of.late and all(end_s <= now_s for _, end_s in next(iter(of.late.values())).late):
            del of.late[next(iter(of.late))]

    def _clean(self, name: str, key: str, note: Note, seen: ObjectInfo | None) -> None:
        record = self._store.mark_clean(
            name,
            key,
            note.object_id,
            version=seen.version if seen is not None else "",
            checked_s=self._clock.wall_s(),
            keeping=keeping_among(seen.headers) if seen is not None else (),
        )
        self._flush_soon()
        if record is not None:
            self._cleaned(name, key, record)

    def _failed(self, name: str, of: _Bucket, key: str, error: ForebayError) -> Failed:
        of.error = f"{key}: {error.kind}: {error}"
        of.counts.failures[error.kind] += 1
        here = isinstance(error, VolumeMissing)
        hopeless = here or error.retry == "never"
        log.warning("the flush of %s/%s failed, and is tried again: %s: %s", name, key, error.kind, error)
        debt = of.debts.get(key)
        for waiting in list(debt.waiting) if debt is not None else ():
            waiting.tries -= 1
            if hopeless or waiting.tries == 0:
                _end(waiting.done, error)
        return Failed(key, self._chance.random(), error.retry_after_s, hopeless, here)

    def _drop(self, of: _Bucket, key: str, error: ForebayError | None = None) -> None:
        debt = of.debts.pop(key, None)
        if debt is None:
            return
        del of.keys[bisect_left(of.keys, key)]
        for waiting in debt.waiting:
            _end(waiting.done, error)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a note could not be brought up to date: %s", error)  # memory has the right note until the stop

    def _linger(self, fd: int) -> None:
        """Close a file later: a thread may still send from it, and stops soon."""

        def close() -> None:
            del self._lingering[fd]
            os.close(fd)

        self._lingering[fd] = asyncio.get_running_loop().call_later(LINGER_S, close)

    # --- flushing on demand ------------------------------------------------------------------------------------------
    def owing(self, bucket: str, prefix: str = "", keys: Iterable[str] = ()) -> list[tuple[str, int, int]]:
        """(key, seq, bytes) of what is owed now: all under `prefix`, or exactly `keys` if given."""
        of = self._of.get(bucket)
        if of is None:
            return []
        names = [key for key in keys if key in of.debts]
        if not names and not keys:
            after = islice(of.keys, bisect_left(of.keys, prefix), None)
            names = list(takewhile(lambda key: key.startswith(prefix), after))
        return [(key, of.debts[key].note.seq, of.debts[key].note.size_bytes) for key in names]

    async def flushed(self, bucket: str, key: str, seq: int) -> None:
        """Return when the backend has write `seq` of the key or a later one, or when the key owes nothing any more.

        Raises the flush's error after TRIES failures, or at once if trying again does not help. The key still owes
        then.
        """
        of = self._of.get(bucket)
        debt = of.debts.get(key) if of is not None else None
        if debt is None:
            return
        waiting = _Waiting(seq)
        debt.waiting.append(waiting)
        try:
            self._step(bucket, Asked(key))
            if self._closed:
                raise Closed("the node is stopping: what is owed is flushed after the next start")
            await waiting.done
        finally:
            if waiting in debt.waiting:
                debt.waiting.remove(waiting)

    async def flush(
        self,
        bucket: str,
        prefix: str = "",
        keys: Iterable[str] = (),
        progress: Callable[[str, int], None] = lambda key, size_bytes: None,
    ) -> None:
        """Return when the backend has all that was owed at the call. `progress(key, bytes)` hears of each key.

        A failure does not stop the rest; the first is raised at the end.
        """
        failures: list[ForebayError] = []
        todo = self.owing(bucket, prefix, list(keys))
        todo.reverse()

        async def wait() -> None:
            while todo:
                key, seq, size_bytes = todo.pop()
                try:
                    await self.flushed(bucket, key, seq)
                    progress(key, size_bytes)
                except ForebayError as error:
                    failures.append(error)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(todo), ASKED_AT_ONCE)):
                group.create_task(wait())
        if failures:
            raise failures[0]

    def metrics(self) -> dict[str, float]:
        """Series for the engine's snapshot."""
        values: dict[str, float] = {}
        for name, of in self._of.items():
            queue, counts, since_s = of.queue, of.counts, of.queue.oldest_s()
            age_s = max(0.0, self._clock.wall_s() - since_s) if since_s is not None else 0.0
            values[series("forebay_dirty_bytes", bucket=name)] = queue.dirty_bytes
            values[series("forebay_dirty_objects", bucket=name)] = len(queue)
            values[series("forebay_dirty_age_seconds", bucket=name)] = age_s
            values[series("forebay_flushing", bucket=name)] = queue.flying
            values[series("forebay_flushes_total", bucket=name)] = counts.flushes
            values[series("forebay_flushed_bytes_total", bucket=name)] = counts.flushed_bytes
            values[series("forebay_flush_sent_bytes_total", bucket=name)] = counts.sent_bytes
            values[series("forebay_write_waits_total", bucket=name)] = counts.waits
            values[series("forebay_write_refusals_total", bucket=name)] = counts.refusals
            for kind, count in counts.failures.items():
                values[series("forebay_flush_failures_total", bucket=name, kind=kind)] = count
            for policy, count in counts.conflicts.items():
                values[series("forebay_flush_conflicts_total", bucket=name, policy=policy)] = count
        return values

    # --- the end -----------------------------------------------------------------------------------------------------
    async def aclose(
        self, *, flush: bool, patience_s: float = PATIENCE_MAX_S, skip: Callable[[], bool] = lambda: False
    ) -> Totals:
        """Stop. With `flush`, first send what is owed to the backends: for at most `patience_s`, and until `skip`
        returns true or no flush succeeds any more. Returns what remains; it stays owed, and as durable as it was."""
        if flush and patience_s > 0 and not skip():
            await self._flush_all(patience_s, skip)
        self._closed = True
        each = [self.totals(name) for name in self._of]
        remains = Totals(sum(one.bytes for one in each), sum(one.objects for one in each))
        if remains.objects:
            log.warning(
                "%d objects and deletes, %d bytes, are not in their backends yet: the next start goes on with them",
                remains.objects,
                remains.bytes,
            )
        tasks = [flight.task for of in self._of.values() for flight in of.flights.values() if flight.task is not None]
        for of in self._of.values():
            for timer in (of.queue_timer, of.gate_timer):
                if timer is not None:
                    timer.cancel()
            closed = Closed("the node is stopping: try again when it is back")
            for writer in of.writers.values():
                _end(writer, closed)
            for debt in of.debts.values():
                for waiting in debt.waiting:
                    _end(waiting.done, closed)
        for task in (*tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)
        for fd, timer in self._lingering.items():
            timer.cancel()
            os.close(fd)
        self._lingering.clear()
        return remains

    async def _flush_all(self, patience_s: float, skip: Callable[[], bool]) -> None:
        names = [name for name, of in self._of.items() if of.debts]
        if not names:
            return
        total = sum(self.totals(name).bytes for name in names)
        objects = sum(self.totals(name).objects for name in names)
        log.info("flushing %d objects, %d bytes, before stopping", objects, total)
        began_s = told_s = moved_s = self._clock.monotonic_s()
        left = objects
        pending: set[asyncio.Task[None]] = {asyncio.create_task(self.flush(name)) for name in names}
        while pending:
            done, pending = await asyncio.wait(pending, timeout=LOOK_S)
            for task in done:
                if (error := task.exception()) is not None:
                    log.warning("not all is flushed: %s", error)
            now = self._clock.monotonic_s()
            owing = [(self._of[name].queue, self.totals(name)) for name in names if self._of[name].debts]
            if (now_left := sum(totals.objects for _, totals in owing)) != left:
                left, moved_s = now_left, now
            if pending and now - told_s >= TELL_S:
                told_s = now
                left_bytes = sum(totals.bytes for _, totals in owing)
                log.info("flushing before stopping: %d of %d bytes left, %.0f s", left_bytes, total, now - began_s)
            is_hopeless = now - moved_s >= HOPELESS_S and all(queue.is_sick for queue, _ in owing)
            if pending and (now - began_s >= patience_s or is_hopeless or skip()):
                log.warning("the flush before stopping was cut short after %.0f s", now - began_s)
                break
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _end(future: asyncio.Future[None] | None, error: ForebayError | None = None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # mark it retrieved: the waiter may be gone
