"""Reads that come to the engine: from a question to a flight, an inline body, or an error.

Theory. A front asks when it has no record, a stale one, or lacks bytes. The engine looks for an answer in this order: a
flight of the object, the index, the backend (`read/openings.py`). `core/machines/opening.py` decides whether what is
here will do.

An object or delete that the node owes to the backend (`State.OWNED`, or an unflushed delete) is the truth, and is
served without asking. A small range of a block that a job's hints say will leave before enough of it is read is
fetched by itself (`_passes_by`), and nothing of it is kept. A write *overtakes* the flights and openings of its key:
readers already waiting get the earlier version, but nobody else joins, and nothing of theirs is kept.

Invariants. (1) A read is answered once: opened then landed to its end, or failed. (2) `flights` holds only flights that
can be joined.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any

from forebay.backends.refusing import Refusing
from forebay.backends.seam import Backend, Fetch
from forebay.core import limits
from forebay.core.errors import Bug, Closed, Corrupt, ForebayError, Invalid, NotFound, Unavailable
from forebay.core.machines.opening import ANY, DOWN_FOR_S, Absent, Held, Terms, Verdict, judge, terms_of
from forebay.core.machines.shares import Need
from forebay.core.ranges import ReadAhead, Run, end_of_stripe
from forebay.core.record import Record, State, cached_bytes, info_of, is_pinned, is_version, make_record, present_blocks
from forebay.core.types import ListPage, ObjectInfo, RangeSpec
from forebay.core.versions import versions_of
from forebay.node.engine.asking import Patience
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.counts import Tally
from forebay.node.engine.read.bad_blocks import Suspicions
from forebay.node.engine.read.flights import Flight
from forebay.node.engine.read.one_read import REOPENS_MAX, Ask, Evictor, Out, Read
from forebay.node.engine.read.openings import Openings, changed_meanwhile, held_of
from forebay.node.engine.read.permits import Permits
from forebay.node.engine.read.relays import Offer, Relays
from forebay.node.engine.read.sink import DiskSink, DiskTrouble, MemorySink, pass_memory
from forebay.node.outcomes import for_client, from_node
from forebay.node.store.writer.landing import Landing
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.cold")

SLOW_DISK_FOR_S = 30.0  # how long a volume that stalled gets no new bytes
READ_AHEADS_MAX = 1024
RANGE_BLOCKS_MAX = 16  # of a range that may be fetched by itself: the edges of a longer one are an eighth of it
STREAMS_MAX = 4  # sequential readers tracked per object
_BLOCK = limits.BLOCK_BYTES


class Nowhere(Refusing):
    """Stands for the backend of an owned object: there is nowhere to fetch bytes from that a disk lost."""

    scheme = "local"
    read_only = True

    def __init__(self, bucket: str, still_owned: Callable[[], bool]) -> None:
        """`still_owned()`: whether the key still has this object and owes it. A replaced object has lost nothing."""
        self._bucket, self._still_owned = bucket, still_owned

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Any:
        if not self._still_owned():
            raise changed_meanwhile(self._bucket, key)
        raise Corrupt(
            f"{key} was written here, its backend does not have it, and its bytes on this node's disk are damaged: "
            "write it again"
        )

    async def head(self, key: str) -> ObjectInfo:
        return await self.fetch(key)  # type: ignore[no-any-return]

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self.fetch(key)  # type: ignore[no-any-return]

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return ListPage([], [])

    async def probe(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class ColdReads:
    """See the module's header. `flush_soon` is called after changes to the store."""

    def __init__(
        self,
        store: Store,
        buckets: Buckets,
        evictor: Evictor,
        tally: Tally,
        clock: Clock,
        workers: Executor,
        *,
        flush_soon: Callable[[], None],
        deleted: Callable[[str, str], bool] = lambda bucket, key: False,
        wrote: Callable[[str, str], None] = lambda bucket, key: None,
    ) -> None:
        """`deleted`: whether the key was deleted here and the backend does not know yet. `wrote` is called by
        `written`."""
        self.store = store
        self.evictor = evictor
        self.clock = clock
        self.workers = workers
        self.memory = pass_memory()
        self.flights: dict[tuple[str, str], Flight] = {}
        self.all_flights: set[Flight] = set()
        self._by_object: dict[int, list[Flight]] = {}
        self.suspicions = Suspicions(self, flush_soon)
        self.compared = self.suspicions.compared
        self.reads = 0
        self.openings = Openings(self, buckets, tally, flush_soon)
        self.confirmations = self.openings.confirmations
        self._buckets = buckets
        self._tally = tally
        self._flush_soon = flush_soon
        self._deleted = deleted
        self._wrote = wrote
        self.foretold: Callable[[str, str], bool] = lambda bucket, key: False  # whether a job gives hints of the key
        # whether blocks of a key that are not here are worth fetching whole for so many bytes in them
        self.keeps: Callable[[str, str, list[int], int], bool] = lambda bucket, key, blocks, wanted_bytes: True
        self.read_apart: Callable[[str, str, int, int], None] = lambda bucket, key, start, end: None
        self.relays: Relays | None = None  # among other nodes
        self.is_of_another: Callable[[str, str, int], bool] = lambda bucket, key, position: False  # by the map
        self.bring_up: Callable[[str, str], None] = lambda bucket, key: (
            None
        )  # restores the key to view if it was owed before the start
        self._ahead: OrderedDict[tuple[str, str], list[ReadAhead]] = OrderedDict()
        self.all_permits: dict[str, Permits] = {}
        self._slow: dict[str, float] = {}  # volume path -> monotonic time until which it gets no bytes
        self._background: set[asyncio.Task[Any]] = set()

    # --- a read ------------------------------------------------------------------------------------------------------
    def open(self, ask: Ask, out: Out) -> Read:
        """Begin a read; its answers come later, from the loop."""
        read = Read(self, ask, out, self._buckets.patience)
        self.reads += 1
        self.start(read)
        return read

    def start(self, read: Read, patience: Patience | None = None) -> None:
        """Find an answer for `read`, after a pause of `patience`."""
        read.task = asyncio.create_task(self._serve(read, patience), context=read.context)

    async def _serve(self, read: Read, patience: Patience | None) -> None:
        try:
            if patience is not None:
                await patience.pause()
            self.bring_up(read.ask.bucket, read.ask.key)
            served = await self._buckets.readable(read.ask.bucket, read.ask.key)
            if read.ask.head_only:
                record = await self.metadata(read.ask, served)
                start, end = _resolve(read.ask.range, record.size_bytes)
                if not read.closed:
                    read.record = record
                    read.out.opened(record, start, end, True, None)
                    read.out.finished()
            else:
                await self._serve_body(read, served)
        except ForebayError as error:
            self._fail(read, error)
        except Exception as error:
            log.exception("opening %s/%s broke", read.ask.bucket, read.ask.key)
            self._fail(read, Bug(f"opening {read.ask.bucket}/{read.ask.key} broke: {error!r}"))

    def _fail(self, read: Read, error: ForebayError) -> None:
        if not read.closed:
            read.failed(error.to_wire())

    async def _serve_body(self, read: Read, served: Served) -> None:
        ask, name = read.ask, (read.ask.bucket, read.ask.key)
        if self._asks_for_what_is_here(ask, served):
            await self._serve_what_is_here(read, served)
            return
        arrived_s = self.clock.wall_s()
        terms = _terms(ask, served, arrived_s)
        while not read.closed:
            await self.suspicions.settled(name)
            found = self._found(name, terms)
            if found is not None:
                await self._give_found(read, served, found)
                return
            if self.here(name)[0] is None and self._passes_by(ask, None) and await self._pass_unknown(read, served):
                return
            answer = await self.openings.share(ask, served, terms)
            if answer is None:
                continue  # it began before we came: ask again
            if answer.stale:
                if not terms.tolerant:
                    raise _unreachable(ask.bucket)
                terms = terms._replace(since_s=ANY)
            elif answer.beyond is not None:
                _resolve(ask.range, answer.beyond.size_bytes)  # raises if our range lies outside too; else ask again
                if read.tries >= REOPENS_MAX:
                    raise Unavailable(f"{ask.key} changed while it was opened: try again")
                read.tries += 1
            elif answer.inline is not None:
                self._give_inline(read, answer.inline, hit=False)
                return
            elif answer.offer is not None:
                if self._give_offer(read, served, answer.offer, answer.asked_s):
                    return
            elif answer.passing is not None:
                info = answer.passing.info
                await self._pass(read, served, info, answer.asked_s, body=answer.passing.take())
                return
            elif answer.flight is not None and not answer.flight.closed:
                self._give(read, answer.flight)
                return
            elif (now := await self._buckets.readable(*name)).same_place(served):
                terms = terms.confirmed(answer.asked_s)
            else:  # who was asked does not act on the key any more
                served, terms = now, _terms(ask, now, arrived_s)

    def _asks_for_what_is_here(self, ask: Ask, served: Served) -> bool:
        """Whether the home of these bytes asks this node, which was that before: asking back would be a loop. Not so
        where another node stands in the backend's place: then this one is the home, and passes the question on."""
        if not from_node.get() or served.of is not None or served.bucket.write != "through":
            return False
        return self.is_of_another(ask.bucket, ask.key, (ask.range.first or 0) if ask.range is not None else 0)

    async def _serve_what_is_here(self, read: Read, served: Served) -> None:
        """Nobody is asked. Who asks names the version, which the backend told it: no confirmation is needed."""
        ask, name = read.ask, (read.ask.bucket, read.ask.key)
        await self.suspicions.settled(name)
        found, _ = self.here(name)
        if found is not None:
            size_bytes = found.info.size_bytes if isinstance(found, Flight) else found.size_bytes
            inline = isinstance(found, Record) and found.inline is not None
            if inline or found.has(*_resolve(ask.range, size_bytes)):
                await self._give_found(read, served, found)
                return
        raise _no_key(*name)

    async def _give_found(self, read: Read, served: Served, found: Flight | Record) -> None:
        if read.closed:
            return
        if isinstance(found, Record) and found.inline is not None:
            self._give_inline(read, found, hit=True)
        elif self._passes_by(read.ask, found):
            info = found.info if isinstance(found, Flight) else info_of(found, read.ask.key)
            await self._pass(read, served, info, found.checked_s, record=self._stored(found), by_choice=True)
        elif isinstance(found, Flight):
            self._give(read, found)
        else:
            await self._give_record(read, served, found)

    def _passes_by(self, ask: Ask, found: Flight | Record | None) -> bool:
        """Whether to fetch the range alone, and keep nothing: its blocks would leave before enough of them is read."""
        if ask.range is None or ask.range.first is None or ask.range.last is None:
            return False
        start, end = ask.range.first, ask.range.last + 1
        blocks = range(start // _BLOCK, -(-end // _BLOCK))
        if len(blocks) > RANGE_BLOCKS_MAX:
            return False  # at most two of them are not read whole
        if isinstance(found, Flight):
            missing = [block for block in blocks if found.lacks(block)]
        else:
            missing = [b for b in blocks if found is None or not found.has(b * _BLOCK, (b + 1) * _BLOCK)]
        wanted_bytes = sum(min(end, (block + 1) * _BLOCK) - max(start, block * _BLOCK) for block in missing)
        return bool(missing) and not self.keeps(ask.bucket, ask.key, missing, wanted_bytes)

    async def _pass_unknown(self, read: Read, served: Served) -> bool:
        """Pass the range of an object of which nothing is here. False if it must be asked for as any other."""
        ask, asked_s = read.ask, self.clock.wall_s()
        assert ask.range is not None
        try:
            async with self.permits(ask.bucket).claim(read, Need.FIRST):
                fetch = await served.backend.fetch(ask.key, ask.range, version=ask.version)
        except Invalid:
            return False  # it lies outside the object
        span = ask.range.resolve(fetch.info.size_bytes)
        if (fetch.start, fetch.end) != span:
            await fetch.aclose()
            return False
        run = Run(span[0] // _BLOCK, -(-span[1] // _BLOCK))
        await self._pass(read, served, fetch.info, asked_s, body=(fetch, run), by_choice=True)
        return True

    def _stored(self, found: Flight | Record) -> Record | None:
        """What the store has of it."""
        if isinstance(found, Flight):
            return found.sink.landing.record if isinstance(found.sink, DiskSink) else found.record
        return found

    def _found(self, name: tuple[str, str], terms: Terms) -> Flight | Record | None:
        """What is here, if the reader may have it; None if the backend must be asked. `NotFound` if it was deleted
        here, `Precondition` if it is not the version that the reader names. `VolumeMissing` or `ObjectLost` if a newer
        version cannot be read."""
        self.store.check_present(*name)
        found, record = self.here(name)
        held: Held | Absent
        if found is None:
            held = Absent.DELETED if self._deleted(*name) else Absent.UNKNOWN
        else:
            is_owned = record is not None and record.state & State.OWNED != 0
            held = self.confirmations.held(name, found, is_owned=is_owned)
        match judge(held, terms, self.clock.wall_s()):
            case Verdict.SERVE:
                return found
            case Verdict.CHANGED:
                raise changed_meanwhile(*name)
            case Verdict.NO_KEY:
                raise _no_key(*name)
        if found is None:
            self.store.check_lost(*name)
        return None

    def here(self, name: tuple[str, str]) -> tuple[Flight | Record | None, Record | None]:
        """The flight of this object, or else its record; and the record.

        Skips a flight whose bytes are no longer kept, or that has the object's version from before its flush.
        """
        record = self.suspicions.first_look(name, self.store.lookup(*name))
        flight = self.flights.get(name)
        if flight is None:
            return record, record
        gone = isinstance(flight.sink, DiskSink) and flight.sink.landing.gone
        if (
            gone
            or flight.closed
            or (record is not None and record.object_id == flight.object_id and record.version != flight.info.version)
        ):
            del self.flights[name]
            return record, record
        return flight, record

    def _give_inline(self, read: Read, record: Record, *, hit: bool) -> None:
        assert record.inline is not None
        if read.ask.version and not is_version(record, read.ask.version):
            raise changed_meanwhile(read.ask.bucket, read.ask.key)
        start, end = _resolve(read.ask.range, record.size_bytes)
        if hit:
            self.evictor.touched(record.object_id, 0, 1)
        if not read.closed:
            read.record = record
            read.out.opened(record, start, end, hit, record.inline[start:end])
            read.out.finished()

    def _give_offer(self, read: Read, served: Served, offer: Offer, asked_s: float) -> bool:
        """Tell the reader where to take the bytes; False if it must ask anew.

        Of many who ask at once for the same range one is relayed, and the others share a copy. Of those who ask for
        others each is relayed, without a question to the backend for each.
        """
        mine: Offer | None = offer
        if offer.ask is not read.ask:
            assert self.relays is not None, "somebody made an offer"
            place = self.relays.place(read.ask, served)
            mine = self.relays.offer(read.ask, served, place, offer.info) if place is not None else None
        if mine is not None and not read.closed:
            read.record = make_record(mine.info, asked_s)
            read.out.opened(read.record, mine.start, mine.end, False, None, mine.relay)
        return mine is not None

    def _give(self, read: Read, flight: Flight) -> None:
        if read.closed:
            return
        if read.ask.version and not held_of(flight).is_called(read.ask.version):
            raise changed_meanwhile(read.ask.bucket, read.ask.key)
        start, end = _resolve(read.ask.range, flight.info.size_bytes)
        self.evictor.touched(flight.object_id, start // _BLOCK, -(-end // _BLOCK))
        read.follow(flight, start, end, self._ahead_to(read.ask, start, end))

    async def _give_record(self, read: Read, served: Served, record: Record) -> None:
        """Make a flight over the stored blocks of the object, for a reader that joins it at once."""
        if record.state & State.OWNED and self.store.examine(*read.ask[:2], record.object_id) is None:
            self.store.check_lost(*read.ask[:2])
        _resolve(read.ask.range, record.size_bytes)
        info = info_of(record, read.ask.key)
        landing = self.landing(served, info, record.checked_s)
        if landing is None:
            await self._pass(read, served, info, record.checked_s, record=record)
        else:
            self._give(read, self.take_off(served, info, landing, record.checked_s, landing.record))

    def _ahead_to(self, ask: Ask, start: int, end: int) -> int:
        """How far to fetch ahead for a reader that asks for one range after another; 0 for readers of whole objects.

        Ranges count in whole blocks, since only the first touch of a block reaches the engine. Blocks fetched ahead are
        skipped: they are hits, which never reach the engine.
        """
        if ask.range is None or ask.range.first is None or ask.range.last is None:
            return 0
        if from_node.get() and not for_client.get():
            return 0  # the node that asks reads ahead itself
        if self.foretold(ask.bucket, ask.key):
            return 0  # `node/engine/jobs/hints.py` fetches what comes next, and a guess would only take its place
        streams = self._ahead.setdefault((ask.bucket, ask.key), [])
        self._ahead.move_to_end((ask.bucket, ask.key))
        while len(self._ahead) > READ_AHEADS_MAX:
            self._ahead.popitem(last=False)
        first, stop = start // _BLOCK * _BLOCK, -(-end // _BLOCK) * _BLOCK
        for stream in streams:
            if stream.next_start <= first <= stream.fetched_to:
                if first > stream.next_start:
                    stream.asked(stream.next_start, first)
                return self._own(stream.asked(first, stop), end)
        streams.append(ReadAhead())
        del streams[:-STREAMS_MAX]
        return self._own(streams[-1].asked(first, stop), end)

    @staticmethod
    def _own(ahead: int, end: int) -> int:
        """As far ahead as it is this node's part: of a later stripe another may be the home, and is asked for it."""
        return min(ahead, end_of_stripe(end - 1)) if for_client.get() else ahead

    # --- metadata alone ----------------------------------------------------------------------------------------------
    async def metadata(self, ask: Ask, served: Served) -> Record:
        """The object's metadata, as fresh as its bucket requires. For an unknown object nothing is fetched or kept."""
        name = (ask.bucket, ask.key)
        asked_s = self.clock.wall_s()
        terms = _terms(ask, served, asked_s)
        found = self._found(name, terms)
        if found is None:
            found, _ = self.here(name)
            if found is None:
                return make_record(await self.openings.head(served, ask.key), asked_s)
            _, info = await self.openings.check(served, ask.key, found, terms, asked_s)
            if info is not None:
                return make_record(info, asked_s)
        return self.record_of(found) if isinstance(found, Flight) else found

    def written(self, bucket: str, key: str) -> None:
        """The key was written or deleted here, and the store knows it: flights and openings of the key are outdated."""
        self._wrote(bucket, key)
        self.flights.pop((bucket, key), None)
        self.openings.overtake((bucket, key))

    def replaced(self, name: tuple[str, str], version: str) -> None:
        """The backend has another version, or none: stop serving this one."""
        flight = self.flights.get(name)
        landing = flight is not None and flight.info.version == version
        if landing:
            del self.flights[name]
        record = self.store.lookup(*name)
        if record.version == version if record is not None else landing:
            self.forget(*name)  # before its first block is whole a flight has no record, but it must not make one now

    def forget(self, bucket: str, key: str) -> int:
        """Drop what the store has of an object, unless it is owned; return how many bytes that was."""
        record = self.store.lookup(bucket, key)
        if record is not None and record.state & State.OWNED:
            return 0  # it is nowhere else
        if self.store.forget(bucket, key) is None or record is None:
            return 0
        self.evictor.removed(record.object_id, present_blocks(record))
        self._flush_soon()
        return cached_bytes(record)

    def leave(self, bucket: str) -> None:
        """The bucket now points elsewhere or is gone: keep nothing of its reads under way, and let nobody join them."""
        for name in [name for name in self.flights if name[0] in (bucket, versions_of(bucket))]:
            del self.flights[name]
            self.forget(*name)

    # --- flights -----------------------------------------------------------------------------------------------------
    def permits(self, bucket: str) -> Permits:
        """The bucket's permits. They bound its requests, so that a backend that hangs does not hold up the others."""
        return self.all_permits.setdefault(bucket, Permits())

    def landing(self, served: Served, info: ObjectInfo, checked_s: float) -> Landing | None:
        """A data file for this version. None if no disk takes it now, or if the bucket has moved."""
        bucket = served.bucket
        if not self._buckets.stands(served):
            return None
        checked_s = self.confirmations.kept_s(bucket.name, info.key, info.version, checked_s)
        try:
            landing = self.store.begin(bucket.name, info, checked_s=checked_s, pinned=is_pinned(bucket, info.key))
        except Unavailable as error:
            log.info("%s/%s passes through: %s", bucket.name, info.key, error)
            self.evictor.make_room()
            return None
        until_s = self._slow.get(landing.volume.path, 0.0)
        if self.clock.monotonic_s() < until_s:
            landing.close()
            return None
        return landing

    def take_off(
        self,
        served: Served,
        info: ObjectInfo,
        landing: Landing,
        checked_s: float,
        record: Record | None,
        adopted: tuple[Fetch, Run] | None = None,
    ) -> Flight:
        """A flight that others can join."""
        name = (served.bucket.name, info.key)
        sink = DiskSink(landing, landing.volume.desk.bearers)
        backend = self._source(served, info.key, record)
        flight = Flight(self, name[0], backend, info, sink, checked_s=checked_s, record=record, adopted=adopted)
        self.flights[name] = flight
        self._enter(flight)
        return flight

    def _enter(self, flight: Flight) -> None:
        self.all_flights.add(flight)
        self._by_object.setdefault(flight.object_id, []).append(flight)

    def busy(self, object_id: int, block: int) -> bool:
        """Whether somebody may still read this block, or it is landing: it must not be evicted now."""
        flights = self._by_object.get(object_id)
        return flights is not None and any(flight.needs(block) for flight in flights)

    async def _pass(
        self,
        read: Read,
        served: Served,
        info: ObjectInfo,
        checked_s: float,
        *,
        record: Record | None = None,
        body: tuple[Fetch, Run] | None = None,
        rest: tuple[int, int] | None = None,
        by_choice: bool = False,
    ) -> None:
        """Serve one reader from memory, over the blocks that `record` has. `rest`: what remains of a read whose flight
        broke. `by_choice`: a disk would take the bytes."""
        try:
            if read.ask.version not in ("", info.version) and not (record and is_version(record, read.ask.version)):
                raise changed_meanwhile(read.ask.bucket, read.ask.key)
            start, end = rest or _resolve(read.ask.range, info.size_bytes)
            asked, (record, below) = record, self._still_there(record)
            if record is None and asked is not None and asked.state & State.OWNED:
                self.store.check_reads(*read.ask[:2])  # nobody else has it; if it was replaced, the flight finds that
        except BaseException:
            if body:
                await body[0].aclose()
            raise
        if record is None or not record.has(start, end) or not self.compared.whole(record.object_id):
            if by_choice:
                self._tally.ranged_bytes += end - start
                self.read_apart(read.ask.bucket, read.ask.key, start, end)
            else:
                self._tally.passed_bytes += end - start
        sink = MemorySink(below, self.memory)
        flight = Flight(
            self,
            served.bucket.name,
            self._source(served, info.key, record),
            info,
            sink,
            checked_s=checked_s,
            record=record,
            adopted=body,
            span=(start, end),
        )
        self._enter(flight)
        read.follow(flight, start, end)
        if read.closed:
            read.detach()

    @property
    def landing_bytes(self) -> int:
        """Bytes on their way to a disk, about."""
        flying_bytes = sum(flight.bytes_on_the_way for flight in self.all_flights if not flight.private)
        return flying_bytes + len(self.openings.under_way) * _BLOCK

    @property
    def pass_bytes(self) -> int:
        """Memory held for bytes that no disk takes."""
        return len(self.memory.shares.given) * limits.PASS_UNIT_BYTES

    def _still_there(self, record: Record | None) -> tuple[Record | None, str]:
        """The record as it is now, and its data file; (None, "") if there is no file to read."""
        found = self.store.find(record.object_id) if record is not None else None
        if found is None or found[2].inline is not None:
            return None, ""
        paths = [volume.data_path(found[2].object_id) for volume in self.store.usable() if not volume.silent]
        path = next((path for path in paths if os.path.exists(path)), "")
        return (found[2], path) if path else (None, "")

    def record_of(self, flight: Flight) -> Record:
        """The record of a flight's object, for a front: the stored one, or what it would be."""
        sink = flight.sink
        stored = sink.landing.record if isinstance(sink, DiskSink) else flight.record
        if stored is not None:
            return stored
        return make_record(flight.info, flight.checked_s, object_id=flight.object_id)

    # --- as the flights' surroundings --------------------------------------------------------------------------------
    def block_kept(self, flight: Flight, block: int) -> None:
        size = min(_BLOCK, flight.info.size_bytes - block * _BLOCK)
        assert isinstance(flight.sink, DiskSink)
        landing = flight.sink.landing
        unit = (flight.object_id, block)
        self.evictor.landed(landing.volume.id, unit, size, flight.bucket, flight.info.key, landing.pinned)
        self._flush_soon()

    def flight_over(self, flight: Flight) -> None:
        self.all_flights.discard(flight)
        beside = self._by_object[flight.object_id]
        beside.remove(flight)
        if not beside:
            del self._by_object[flight.object_id]
        name = (flight.bucket, flight.info.key)
        if self.flights.get(name) is flight:
            del self.flights[name]

    def flight_gone(self, flight: Flight) -> None:
        self.replaced((flight.bucket, flight.info.key), flight.info.version)

    def disk_trouble(self, flight: Flight, error: DiskTrouble) -> None:
        name = (flight.bucket, flight.info.key)
        if self.flights.get(name) is flight:
            del self.flights[name]
        assert isinstance(flight.sink, DiskSink)
        if error.slow:
            self._slow[flight.sink.landing.volume.path] = self.clock.monotonic_s() + SLOW_DISK_FOR_S
        leaving = flight.depart()
        if leaving:
            log.warning("%s/%s goes on through memory: %s", *name, error)
        self.evictor.make_room()
        for reader, start, end in leaving:
            assert isinstance(reader, Read)
            reader.task = self.spawn(self._pass_on(reader, flight, start, end))

    async def _pass_on(self, read: Read, flight: Flight, start: int, end: int) -> None:
        """Serve the rest of a read whose flight lost its disk."""
        assert isinstance(flight.sink, DiskSink)
        try:
            served = await self._buckets.readable(flight.bucket, flight.info.key)
            record = flight.sink.landing.record
            await self._pass(read, served, flight.info, flight.checked_s, record=record, rest=(start, end))
        except ForebayError as error:
            self._fail(read, error)

    def blocks_bad(self, flight: Flight, blocks: list[int]) -> None:
        self.evictor.removed(flight.object_id, blocks)
        self.evicted(flight.object_id, blocks)  # other flights may have told of them
        self._flush_soon()

    def evicted(self, object_id: int, blocks: list[int]) -> None:
        """Blocks left the store: tell the object's flights."""
        self.compared.forget(object_id)
        for flight in list(self._by_object.get(object_id, ())):
            flight.lost(blocks)

    def _source(self, served: Served, key: str, record: Record | None) -> Backend:
        """The backend that has the object's missing bytes."""
        if record is None or not record.state & State.OWNED:
            return served.backend
        object_id = record.object_id

        def still_owned() -> bool:
            now = self.store.owned(served.bucket.name, key)
            return now is not None and now.object_id == object_id

        return Nowhere(served.bucket.name, still_owned)

    def silent(self, node: str) -> None:
        """A front asked a node for what was to be relayed, and it did not answer."""
        if self.relays is not None:
            self.relays.silent(node)

    def suspect(self, bucket: str, key: str, object_id: int, reason: str) -> None:
        """A front could not use the bytes that the record lists."""
        self.suspicions.suspect(bucket, key, object_id, reason)

    # --- the end -----------------------------------------------------------------------------------------------------
    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task and keep it until it ends. Its exception is logged."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the engine broke", exc_info=error)

    async def aclose(self) -> None:
        """End every flight and opening. Readers are told `Closed`."""
        opening = self.openings.cancel()
        for flight in list(self.all_flights):
            flight.shut(Closed("the node is stopping: connect again in a moment"))
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*opening, *self._background, return_exceptions=True)


# --- small rules -----------------------------------------------------------------------------------------------------
def _terms(ask: Ask, served: Served, arrived_s: float) -> Terms:
    freshness_s, is_written = served.bucket.freshness_s, not served.backend.read_only
    return terms_of(freshness_s, arrived_s, version=ask.version, revalidate=ask.revalidate, is_written=is_written)


def _resolve(asked: RangeSpec | None, size_bytes: int) -> tuple[int, int]:
    return (0, size_bytes) if asked is None else asked.resolve(size_bytes)


def _no_key(bucket: str, key: str) -> NotFound:
    return NotFound(f"there is no object {key!r} in bucket {bucket}: check the name", code="NoSuchKey")


def _unreachable(bucket: str) -> Unavailable:
    return Unavailable(f"the backend of {bucket} does not answer: try again later", retry_after_s=DOWN_FOR_S)
