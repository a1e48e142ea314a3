"""A node in the simulator: the shells around flight, retry, eviction, freshness, commit and recover.

Theory. As little code as can join the machines the way the engine does: a read finds a fresh record whose blocks are
there (a hit: under a lease, piece by piece), or asks the backend what the object is now and joins the flight of that
version. Flights fetch through the retry decision, land blocks through commit plans, and tell readers. When too much is
kept the eviction machine names victims. A stop forgets all of this but the disk and the indexes.

Where the engine's shell is sequential (one thread) so is this; where bytes move by themselves (disk, backend, readers'
clients) there is a delay in between, and anything else may happen in it.

Invariants, checked as they go (`sim/checks.py` judges the answers). (1) Of one version a block is fetched by one run
at a time. (2) A victim is neither pinned nor in use. (3) Retries come as the machine says, and their load is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.errors import Closed, ErrorOnWire, ForebayError, NotFound, Precondition, from_wire
from forebay.core.machines import commit, eviction, flight_events, recover, retry
from forebay.core.machines import flight as flights
from forebay.core.ranges import ReadAhead
from forebay.sim.backend import Body, Name, SimBackend
from forebay.sim.disk import DiskFull, File
from forebay.sim.schedule import Schedule
from forebay.sim.store import BLOCK_BYTES, INLINE_BYTES_MAX, Record, SimStore, Subject, encode_header, sum_of

ATTEMPTS_MAX = retry.DEFAULT_POLICY.attempts_max
BUDGET_AT_START = 150  # small, so that an outage of a second exhausts it


def show(name: Name) -> str:
    return f"{name[0]}/{name[1]}"


@dataclass(slots=True)
class Read:
    """One read and what came of it. `end` -1: to the object's end. Exactly one of `done`'s arguments matters."""

    number: int
    name: Name
    start: int
    end: int
    asked_us: int
    done: Callable[[Read, ForebayError | None], None]
    version: str = ""
    got: bytearray = field(default_factory=bytearray)
    answered: bool = False
    flight: SimFlight | None = None
    untaken: deque[tuple[int, int]] = field(default_factory=deque)  # announced and not yet read by the client
    finished: bool = False
    error: ForebayError | None = None  # nothing more will be announced
    leased: str = ""


@dataclass(slots=True)
class _Run:
    number: int
    first: int
    end: int
    position: int
    attempt: int = 1
    since_us: int = 0
    block: bytearray = field(default_factory=bytearray)  # the block in progress
    waiting: int = 0  # blocks being committed
    body_over: bool = False
    over: bool = False


@dataclass(slots=True)
class SimFlight:
    """A flight with its file, its memory and its readers."""

    name: Name
    version: str
    size_bytes: int
    machine: flights.Flight
    object_id: int = 0
    path: str = ""
    file: File | None = None
    memory: dict[int, bytearray] = field(default_factory=dict)
    readers: dict[int, Read] = field(default_factory=dict)
    runs: dict[int, _Run] = field(default_factory=dict)
    checked_us: int = 0
    events: deque[flight_events.Event] = field(default_factory=deque)
    stepping: bool = False
    gone: bool = False  # the backend has another version now


class SimNode:
    """One engine with its store and backend."""

    def __init__(
        self, schedule: Schedule, store: SimStore, backend: SimBackend, freshness_s: dict[str, float], capacity: int
    ) -> None:
        self.schedule = schedule
        self.store = store
        self.backend = backend
        self.freshness_s = freshness_s
        self.capacity = capacity
        self.pinned_keys: set[Name] = set()
        self.quotas: dict[str, int] = {}
        self.requests_first = self.retries = self.lives = 0
        self.up = True
        self._forget()

    def _forget(self) -> None:
        self.lives += 1
        self.machine = eviction.Eviction(self.capacity)
        for bucket, quota in sorted(self.quotas.items()):
            self.machine.set_quota(bucket, quota)
        self.budget = retry.RetryBudget()
        self.budget.tokens = BUDGET_AT_START
        self.flights: dict[Name, SimFlight] = {}
        self.all_flights: list[SimFlight] = []
        self.forgotten: set[str] = set()  # files of objects that the backend lost
        self.reads: dict[int, Read] = {}
        self.ahead: dict[Name, ReadAhead] = {}
        self.units: dict[int, Name] = {}  # object id -> whose it is, for the eviction machine's units

    def _log(self, event: str, name: Name, detail: str = "") -> None:
        self.schedule.log("node", event, show(name), detail)

    def _later(self, delay_us: int, what: Callable[[], None]) -> None:
        """Do this unless the process has died by then."""
        incarnation = self.store.incarnation

        def still() -> None:
            if incarnation == self.store.incarnation:
                what()

        self.schedule.after(delay_us, still)

    # --- reading -----------------------------------------------------------------------------------------------------
    def read(self, read: Read) -> None:
        if not self.up:
            self._answer(read, Closed("the node is down: connect again"))
            return
        self.reads[read.number] = read
        record = self.store.lookup(read.name)
        if record is not None and record.durable:
            bad = [block for block in sorted(record.unverified) if not self.store.matches(record, block)]
            assert not bad, f"blocks {bad} of {show(read.name)} were acknowledged and are lost"
            record.unverified.clear()
        if record is not None and (record.durable or self._is_fresh(record)):
            self._serve(read, record.version, record.size_bytes, record.checked_us)
        else:
            self._resolve(read, attempt=1, since_us=self.schedule.now_us)

    def _is_fresh(self, record: Record) -> bool:
        from forebay.core.machines import opening  # it reads bounds, which `scale` may have to change first

        bound_s = self.freshness_s[record.name[0]]
        return opening.may_serve(0, record.checked_us / 1e6, bound_s, self.schedule.now_s)

    def _resolve(self, read: Read, attempt: int, since_us: int) -> None:
        """Ask the backend what the object is now."""
        asked_us = self.schedule.now_us
        self._count_request(attempt)

        def known(version: str, size_bytes: int) -> None:
            self.budget.succeeded()
            if not read.answered:
                record = self.store.clean.get(read.name)
                if record is not None and record.version == version:
                    record.checked_us = max(record.checked_us, asked_us)
                self._outdate(read.name, lambda other: other != version)
                self._serve(read, version, size_bytes, asked_us)

        def failed(error: ForebayError) -> None:
            if read.answered:
                return
            if isinstance(error, NotFound):
                self.budget.succeeded()
                self._drop_object(read.name)
                self._answer(read, error)
                return
            delay_s = self._retry(attempt, error, since_us)
            if delay_s is None:
                self._answer(read, error)
            else:
                self._later(int(delay_s * 1e6), lambda: self._resolve(read, attempt + 1, since_us))

        self.backend.head(read.name, self._if_alive(known), self._if_alive1(failed))

    def _if_alive(self, what: Callable[[str, int], None]) -> Callable[[str, int], None]:
        incarnation = self.store.incarnation
        return lambda version, size: what(version, size) if incarnation == self.store.incarnation else None

    def _if_alive1(self, what: Callable[[ForebayError], None]) -> Callable[[ForebayError], None]:
        incarnation = self.store.incarnation
        return lambda error: what(error) if incarnation == self.store.incarnation else None

    def _serve(self, read: Read, version: str, size_bytes: int, checked_us: int) -> None:
        """The version is known: from the record, or through its flight."""
        read.version = version
        read.end = size_bytes if read.end < 0 else min(read.end, size_bytes)
        read.start = min(read.start, read.end)
        record = self.store.lookup(read.name)
        if read.start == read.end:
            self._answer(read, None)
        elif record is not None and record.version == version and record.inline is not None:
            self.machine.touched(eviction.unit_of(record.object_id, 0))
            read.got += record.inline[read.start : read.end]
            self._answer(read, None)
        elif record is not None and record.version == version and self._is_ready(record, read):
            self._hit(read, record)
        else:
            self._join(read, version, size_bytes, checked_us)

    def _is_ready(self, record: Record, read: Read) -> bool:
        blocks = range(read.start // BLOCK_BYTES, -(-read.end // BLOCK_BYTES))
        return record.has(read.start, read.end) and not any(block in record.unverified for block in blocks)

    def _hit(self, read: Read, record: Record) -> None:
        """All is there: hold a lease and read piece by piece."""
        file = self.store.disk.open(record.path)
        self.store.lease(record.path)
        read.leased = record.path
        for block in range(read.start // BLOCK_BYTES, -(-read.end // BLOCK_BYTES)):
            self.machine.touched(eviction.unit_of(record.object_id, block))
        self._log("hit", read.name, f"read={read.number} {read.start}-{read.end} {read.version}")

        def piece() -> None:
            if read.answered:
                return
            at = read.start + len(read.got)
            read.got += self.store.read(file, at, min(at + 48, read.end))
            if read.start + len(read.got) == read.end:
                self._answer(read, None)
            else:
                self._later(self.schedule.delay_us(150), piece)

        self._later(self.schedule.delay_us(150), piece)

    def give_up(self, read: Read) -> None:
        """The client vanished."""
        if not read.answered:
            self._log("vanish", read.name, f"read={read.number}")
            self._answer(read, Closed("the client is gone"))

    def _answer(self, read: Read, error: ForebayError | None) -> None:
        assert not read.answered, f"read {read.number} is answered twice"
        read.answered = True
        self.reads.pop(read.number, None)
        if read.leased and self.up:
            self.store.unlease(read.leased)
        flight, read.flight = read.flight, None
        if flight is not None and self.up:
            flight.readers.pop(read.number, None)
            self._step(flight, flight_events.Leave(read.number))
        read.done(read, error)

    # --- flights -----------------------------------------------------------------------------------------------------
    def _join(self, read: Read, version: str, size_bytes: int, checked_us: int) -> None:
        flight = self.flights.get(read.name)
        if flight is None or flight.version != version:
            flight = self._take_off(read.name, version, size_bytes)
        flight.checked_us = max(flight.checked_us, checked_us)
        ahead = self.ahead.setdefault(read.name, ReadAhead(BLOCK_BYTES, 6 * BLOCK_BYTES))
        ahead_to = min(ahead.asked(read.start, read.end), size_bytes)
        ahead.check()
        read.flight = flight
        flight.readers[read.number] = read
        self._log("join", read.name, f"read={read.number} {read.start}-{read.end} ahead={ahead_to} {version}")
        self._step(flight, flight_events.Join(read.number, read.start, read.end, ahead_to))

    def _take_off(self, name: Name, version: str, size_bytes: int) -> SimFlight:
        """A flight over the record's file if it is this version's, else over a new one, else over memory."""
        record = self.store.clean.get(name)
        present, doubted = b"", set[int]()
        object_id, path = 0, ""
        if record is not None and record.version == version and record.path:
            object_id, path = record.object_id, record.path
            present = sum(1 << block for block in record.blocks).to_bytes(
                -(-size_bytes // BLOCK_BYTES) // 8 + 1, "little"
            )
            doubted = set(record.unverified)
        elif size_bytes > INLINE_BYTES_MAX:
            object_id, path = self._new_file(name, version, size_bytes)
        machine = flights.Flight(
            size_bytes,
            present,
            doubted,
            block_bytes=BLOCK_BYTES,
            window_bytes=5 * BLOCK_BYTES,
            parallel_max=3,
            run_blocks_max=2,
        )
        flight = SimFlight(name, version, size_bytes, machine, object_id, path)
        flight.file = self.store.disk.open(path) if path else None
        self.flights[name] = flight
        self.all_flights.append(flight)
        return flight

    def _new_file(self, name: Name, version: str, size_bytes: int) -> tuple[int, str]:
        """Perform `plan_begin` at once (the test of cuts cuts it everywhere); ("", 0) when the disk is full."""
        object_id, self.store.next_id = self.store.next_id, self.store.next_id + 1
        place = commit.StoredVersion(*name, object_id, f"data/{object_id}")
        header = encode_header(name, object_id, version, size_bytes)
        plan = commit.plan_begin(place, f"tmp/{object_id}", size_bytes, header)
        commit.check_plan(plan)
        try:
            for effect in plan:
                self.store.perform(effect, Subject(version, size_bytes))
        except DiskFull:
            return 0, ""
        return object_id, place.path

    def _step(self, flight: SimFlight, event: flight_events.Event) -> None:
        """Feed the machine and perform; an event that comes up meanwhile waits for its turn."""
        flight.events.append(event)
        if flight.stepping:
            return
        flight.stepping = True
        while flight.events:
            effects = flight.machine.step(self.schedule.now_s, flight.events.popleft())
            flight.machine.check()
            for effect in effects:
                self._perform(flight, effect)
        flight.stepping = False
        if flight.machine.idle and flight in self.all_flights and not flight.runs:
            self._close(flight)

    def _close(self, flight: SimFlight) -> None:
        self.all_flights.remove(flight)
        if self.flights.get(flight.name) is flight:
            del self.flights[flight.name]
        assert not flight.readers, "an idle flight has no readers"
        record = self.store.clean.get(flight.name)
        if flight.path and (record is None or record.path != flight.path):
            self.store.disk.unlink(flight.path)

    def _perform(self, flight: SimFlight, effect: flight_events.Effect) -> None:
        match effect:
            case flight_events.Fetch(number, first, end):
                self._fetch(flight, number, first, end)
            case flight_events.Cut(number, end):
                run = flight.runs[number]
                run.end = end
                self._log("cut", flight.name, f"run={number} end={end}")
                if end <= run.first or run.position >= end * BLOCK_BYTES:
                    self._later(0, lambda: self._over(flight, run, flight_events.Ended(run.number)))
            case flight_events.Land(reader, start, end):
                self._announce(flight, flight.readers.get(reader), start, end)
            case flight_events.Finish(reader):
                if read := flight.readers.get(reader):
                    read.finished = True
                    self._finish_if_taken(read)
            case flight_events.Fail(reader, error):
                if read := flight.readers.get(reader):
                    read.error = from_wire(error)
                    self._finish_if_taken(read)
            case flight_events.Verify(block):
                self._later(self.schedule.delay_us(300), lambda: self._verified(flight, block))
            case flight_events.Drop(block):
                flight.memory.pop(block, None)

    def _announce(self, flight: SimFlight, read: Read | None, start: int, end: int) -> None:
        """The client opens the file and reads the bytes some time after it was told that it may."""
        if read is None:
            return
        read.untaken.append((start, end))
        if len(read.untaken) == 1:
            self._later(self.schedule.delay_us(200), lambda: self._take(flight, read))

    def _take(self, flight: SimFlight, read: Read) -> None:
        if read.answered:
            return
        start, end = read.untaken.popleft()
        assert read.start + len(read.got) == start, "pieces come in order"
        if flight.path and not read.leased:
            if (flight.gone or flight.path in self.forgotten) and not self.store.disk.exists(flight.path):
                # The backend lost this version meanwhile. The front asks for its rest anew, and there is none.
                self._answer(read, Precondition("changed under an open read"))
                return
            assert self.store.disk.exists(flight.path), f"read {read.number} was told of a file that is gone"
            self.store.lease(flight.path)
            read.leased = flight.path
        read.got += self._bytes(flight, start, end)
        if read.untaken:
            self._later(self.schedule.delay_us(100), lambda: self._take(flight, read))
        self._step(flight, flight_events.Took(read.number, end))
        self._finish_if_taken(read)

    def _finish_if_taken(self, read: Read) -> None:
        if (read.finished or read.error is not None) and not read.untaken and not read.answered:
            self._answer(read, read.error)

    def _bytes(self, flight: SimFlight, start: int, end: int) -> bytes:
        parts = []
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            low, high = max(start, block * BLOCK_BYTES), min(end, (block + 1) * BLOCK_BYTES)
            if block in flight.memory:
                parts.append(bytes(flight.memory[block][low - block * BLOCK_BYTES : high - block * BLOCK_BYTES]))
            else:
                assert flight.file is not None, f"block {block} of {flight.name} is nowhere"
                parts.append(self.store.read(flight.file, low, high))
        return b"".join(parts)

    def _verified(self, flight: SimFlight, block: int) -> None:
        record = self.store.clean.get(flight.name)
        good = record is not None and record.path == flight.path and self.store.matches(record, block)
        self._log("verify", flight.name, f"block={block} {'good' if good else 'bad'}")
        if good and record is not None:
            record.unverified.discard(block)
        elif record is not None and record.path == flight.path:
            self.machine.removed(eviction.unit_of(flight.object_id, block))
            record.blocks.discard(block)  # at once: nobody may be told of it again
            record.unverified.discard(block)
        self._step(flight, flight_events.Verified(block, good))

    # --- fetching ----------------------------------------------------------------------------------------------------
    def _count_request(self, attempt: int) -> None:
        assert attempt <= ATTEMPTS_MAX, f"attempt {attempt} of one request"
        if attempt == 1:
            self.requests_first += 1
        else:
            self.retries += 1
            bound = (BUDGET_AT_START * self.lives + self.requests_first) // retry.RETRY_COST
            assert self.retries <= bound, f"{self.retries} retries of {self.requests_first} requests"

    def _outdate(self, name: Name, is_outdated: Callable[[str], bool]) -> None:
        """These versions of the object are known not to be the present one.

        The record is asked about again before its next use. A flight serves its readers to the end, but its blocks may
        no longer become the record: who asks later would be given an earlier version than somebody was before.
        """
        record = self.store.clean.get(name)
        if record is not None and is_outdated(record.version):
            record.checked_us = 0
        for flight in self.all_flights:
            if flight.name == name and is_outdated(flight.version):
                flight.checked_us, flight.gone = 0, True

    def _retry(self, attempt: int, error: ForebayError, since_us: int) -> float | None:
        elapsed_s = (self.schedule.now_us - since_us) / 1e6
        delay_s = retry.delay_before_retry(attempt, error, elapsed_s, self.schedule.dice.random(), self.budget)
        self.budget.check()
        assert delay_s is None or delay_s >= error.retry_after_s, "came back before the backend asked for it"
        return delay_s

    def _fetch(self, flight: SimFlight, number: int, first: int, end: int) -> None:
        for other in self.all_flights:
            if (other.name, other.version, other.gone) == (flight.name, flight.version, False):
                for run in other.runs.values():
                    # What came before may have passed through and be needed again; so may a last, short block.
                    coming = run.end if run.position >= flight.size_bytes else run.position // BLOCK_BYTES
                    assert max(first, coming) >= min(end, run.end), f"blocks {first}-{end} are fetched twice at once"
        run = _Run(number, first, end, first * BLOCK_BYTES, since_us=self.schedule.now_us)
        flight.runs[number] = run
        self._log("fetch", flight.name, f"run={number} blocks={first}-{end} {flight.version}")
        self._request(flight, run)

    def _request(self, flight: SimFlight, run: _Run) -> None:
        if run.over:
            return
        self._count_request(run.attempt)
        stop = min(run.end * BLOCK_BYTES, flight.size_bytes)
        incarnation = self.store.incarnation

        def opened(body: Body) -> None:
            if incarnation == self.store.incarnation and not run.over:
                self.budget.succeeded()
                pump(body)

        def pump(body: Body) -> None:
            body.next(lambda part: chunk(body, part), failed)

        def chunk(body: Body, part: bytes) -> None:
            if incarnation != self.store.incarnation or run.over:
                return
            self._landed(flight, run, part)
            run.body_over = not part or run.position >= min(run.end * BLOCK_BYTES, flight.size_bytes)
            if not run.body_over:
                pump(body)
            elif not run.waiting:
                self._over(flight, run, flight_events.Ended(run.number))

        def failed(error: ForebayError) -> None:
            if incarnation == self.store.incarnation and not run.over:
                self._broken(flight, run, error)

        self.backend.fetch(flight.name, flight.version, run.position, stop, opened, failed)

    def _broken(self, flight: SimFlight, run: _Run, error: ForebayError) -> None:
        """A request failed: go on from where it stopped, or give up."""
        if isinstance(error, Precondition):
            if self.flights.get(flight.name) is flight:
                del self.flights[flight.name]
            self._outdate(flight.name, lambda version: version == flight.version)
            self._log("gone", flight.name, flight.version)
            self._step(flight, flight_events.Gone(error.to_wire()))
        else:
            delay_s = self._retry(run.attempt, error, run.since_us)
            if delay_s is not None:
                run.attempt += 1
                self._log("retry", flight.name, f"run={run.number} attempt={run.attempt} after={delay_s * 1e3:.1f}ms")
                self._later(int(delay_s * 1e6), lambda: self._request(flight, run))
                return
        self._fail_when_committed(flight, run, error.to_wire())

    def _fail_when_committed(self, flight: SimFlight, run: _Run, error: ErrorOnWire) -> None:
        if run.waiting:
            self._later(50, lambda: self._fail_when_committed(flight, run, error))
        else:
            self._over(flight, run, flight_events.Failed(run.number, error))

    def _over(self, flight: SimFlight, run: _Run, outcome: flight_events.Event) -> None:
        if run.over:
            return
        if run.waiting:
            self._later(50, lambda: self._over(flight, run, outcome))
            return
        run.over = True
        del flight.runs[run.number]
        self._log("over", flight.name, f"run={run.number} {type(outcome).__name__}")
        self._step(flight, outcome)

    def _landed(self, flight: SimFlight, run: _Run, part: bytes) -> None:
        """Bytes came: put them where they belong, tell how far they reach, and finish whole blocks."""
        part = part[: max(0, min(run.end * BLOCK_BYTES, flight.size_bytes) - run.position)]
        while part:
            block = run.position // BLOCK_BYTES
            piece, part = (
                part[: (block + 1) * BLOCK_BYTES - run.position],
                part[(block + 1) * BLOCK_BYTES - run.position :],
            )
            run.block += piece
            self._write(flight, run, block, piece)
            run.position += len(piece)
            if run.position == min((block + 1) * BLOCK_BYTES, flight.size_bytes):
                self._finish_block(flight, run, block, bytes(run.block))
                run.block = bytearray()
            else:
                self._step(flight, flight_events.Progress(run.number, run.position))

    def _write(self, flight: SimFlight, run: _Run, block: int, piece: bytes) -> None:
        if block not in flight.memory and flight.file is not None:
            try:
                self.store.write_block_part(flight.file, flight.path, run.position, piece)
                return
            except DiskFull:
                self._log("full", flight.name, f"block={block}")
        if len(run.block) > len(flight.memory.get(block, b"")):  # an earlier run may have brought more of it
            flight.memory[block] = bytearray(run.block)

    def _finish_block(self, flight: SimFlight, run: _Run, block: int, data: bytes) -> None:
        size, name = flight.size_bytes, flight.name
        inline = size <= INLINE_BYTES_MAX
        if block in flight.memory and not inline:
            self._step(flight, flight_events.Arrived(run.number, block, kept=False))
            return
        if inline:
            flight.object_id, self.store.next_id = self.store.next_id, self.store.next_id + 1
        place = commit.StoredVersion(*name, flight.object_id, flight.path)
        run.waiting += 1

        def make() -> list[commit.Effect]:
            record = self.store.clean.get(name)
            if block >= run.end:
                return []  # cut while it landed: nobody owns the block any more
            if flight.gone:
                return []
            if record is not None and record.object_id > place.object_id:
                return []  # a later version is there already
            if place.path and not self.store.disk.exists(place.path):
                return []  # the object was forgotten meanwhile, its file with it
            old = record.place if record is not None and record.object_id != place.object_id else None
            if record is not None and old is not None:
                self._forget_units(record)
            if inline:
                return commit.plan_inline(place, old)
            self.store.sums.setdefault(flight.path, {})[block] = sum_of(data)
            return commit.plan_land(place, [], [block], record.blocks if record and not old else [], old)

        def done(ok: bool) -> None:
            record = self.store.clean.get(name)
            kept = ok and record is not None and record.object_id == place.object_id
            kept = kept and record is not None and (inline or block in record.blocks)
            if kept:
                self._log("land", name, f"block={block} {flight.version}")
                self.units[place.object_id] = name
                unit = eviction.unit_of(place.object_id, block)
                lasting = sum_of(f"{show(name)} {block}".encode())  # object ids change, history stays
                self.machine.landed(unit, len(data), name[0], lasting)
                if name in self.pinned_keys:
                    self.machine.pin(unit)
            if not kept or inline:
                flight.memory[block] = bytearray(data)
            run.waiting -= 1
            if block < run.end:
                self._step(flight, flight_events.Arrived(run.number, block, kept=kept and not inline))
            if run.body_over and not run.waiting:
                self._over(flight, run, flight_events.Ended(run.number))
            self.make_room()

        subject = Subject(flight.version, size, lambda: flight.checked_us, data if inline else b"", {block})
        self.store.submit(name, make, subject, done)

    # --- making room -------------------------------------------------------------------------------------------------
    def make_room(self) -> None:
        excess = self.machine.excess_bytes
        if not excess:
            return
        pinned = self.pinned_keys
        units, freed, stuck = self.machine.victims(excess, self._in_use)
        self.schedule.log(
            "node", "evict", "-", f"units={len(units)} bytes={freed} of {excess}{' stuck' if stuck else ''}"
        )
        by_object: dict[int, list[int]] = {}
        for unit in units:
            object_id, block = eviction.split_unit(unit)
            name = self.units[object_id]
            assert not self._in_use(unit), f"evicted {show(name)} block {block}, which is in use"
            assert name not in pinned, f"evicted {show(name)}, which is pinned"
            by_object.setdefault(object_id, []).append(block)
        assert stuck or freed >= excess
        for object_id, blocks in by_object.items():
            self._evict(self.units[object_id], object_id, blocks)

    def _in_use(self, unit: int) -> bool:
        object_id, block = eviction.split_unit(unit)
        flight = self.flights.get(self.units[object_id])
        return flight is not None and flight.object_id == object_id and flight.machine.needs(block)

    def _evict(self, name: Name, object_id: int, blocks: list[int]) -> None:
        record = self.store.clean.get(name)
        if record is None or record.object_id != object_id:
            return
        if record.path:
            self.store.holes.setdefault(record.path, set()).update(blocks)
        record.blocks -= set(blocks)  # what the index will say: nobody may be told of them from now on
        record.unverified -= set(blocks)  # nor may a check find them good while the hole is still to be punched
        flight = self.flights.get(name)
        if flight is not None and flight.object_id == object_id:
            self._step(flight, flight_events.Lost(tuple(blocks)))

        def make() -> list[commit.Effect]:
            now = self.store.clean.get(name)
            if now is None or now.object_id != object_id:
                return []
            if now.inline is not None:
                return commit.plan_forget(now.place)
            gone = [block for block in blocks if block not in now.blocks]
            if not now.blocks and name in self.flights and self.flights[name].object_id == object_id:
                return []  # it is landing again; its record stays
            return commit.plan_evict_blocks(now.place, now.blocks, gone, BLOCK_BYTES, now.size_bytes) if gone else []

        subject = Subject(record.version, record.size_bytes, lambda: record.checked_us, landed=set())
        self.store.submit(name, make, subject, lambda ok: None)

    def _drop_object(self, name: Name) -> None:
        """The backend has no such object."""
        record = self.store.clean.get(name)
        if record is None:
            return

        def make() -> list[commit.Effect]:
            now = self.store.clean.get(name)
            if now is None or now.object_id != record.object_id:
                return []
            self._forget_units(now)
            self.forgotten.add(now.path)
            return commit.plan_forget(now.place)

        self.store.submit(name, make, Subject("", 0), lambda ok: None)

    def _forget_units(self, record: Record) -> None:
        for block in record.blocks if record.path else (0,):
            self.machine.removed(eviction.unit_of(record.object_id, block))

    # --- writing -----------------------------------------------------------------------------------------------------
    def put(self, name: Name, version: str, data: bytes, done: Callable[[bool], None]) -> None:
        """A durable write of a local object; `done(True)` is the acknowledgement."""
        if not self.up:
            done(False)
            return
        object_id, self.store.next_id = self.store.next_id, self.store.next_id + 1
        place = commit.StoredVersion(*name, object_id, f"data/{object_id}", durable=True)
        half = len(data) // 2
        writes = [(start, length) for start, length in ((0, half), (half, len(data) - half)) if length]
        blocks = -(-len(data) // BLOCK_BYTES)
        acknowledged: list[bool] = []

        def make() -> list[commit.Effect]:
            old = self.store.lookup(name)
            header = encode_header(name, object_id, version, len(data), durable=True)
            return commit.plan_durable(place, f"tmp/{object_id}", writes, blocks, header, old.place if old else None)

        def acknowledge() -> None:
            acknowledged.append(True)
            done(True)

        def ended(ok: bool) -> None:
            if not ok:
                self.store.disk.unlink(f"tmp/{object_id}")
            if not acknowledged:
                done(False)

        self.store.submit(name, make, Subject(version, len(data), data=data, acknowledged=acknowledge), ended)

    # --- stops -------------------------------------------------------------------------------------------------------
    def stop(self, machine: bool) -> None:
        """kill -9, or the power fails."""
        self.schedule.log("node", "crash", "-", "machine" if machine else "process")
        self.up = False
        self.store.stop(machine)
        for read in list(self.reads.values()):
            read.leased = ""
            read.flight = None
            self._answer(read, Closed("the node died: connect again"))
        self._forget()

    def start(self, trusted: bool) -> None:
        actions = self.store.start(trusted)
        found = " ".join(f"{kind.replace(' ', '-')}={n}" for kind, n in sorted(recover.count_actions(actions).items()))
        self.schedule.log("node", "start", "-", f"trusted={trusted} {found}")
        self.up = True
        units = []
        for record in self.store.clean.values():
            self.units[record.object_id] = record.name
            for block in sorted(record.blocks) if record.path else (0,):
                size = min(BLOCK_BYTES, record.size_bytes - block * BLOCK_BYTES)
                pinned = record.name in self.pinned_keys
                units.append((eviction.unit_of(record.object_id, block), size, record.name[0], 0, pinned))
        self.machine.restore(units, 0)
        self.make_room()
