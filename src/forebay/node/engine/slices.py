"""Slices of erasure-coded objects: which nodes keep them, how they are reached, and that none is missing for long.

Theory. `core/cluster/coding.py` has the theory, `backends/coded/` reads and writes. A slice is an object of the local
bucket `-slices`, which is at each node another: so it is synced, checked, scrubbed and counted as any local object is.
A node asks another for slices by no map, since a slice lies where its entry says.

*Nothing is missing for long.* The home of an entry asks its places whether they have their slices: every minute (with
very many entries less often), and at once when nodes come, go or are silent. What is missing at a place is computed
again and sent there. What was at a node that is lost (given up, or silent for ten minutes) or leaves goes to
another, and the entry says so from then on. Objects with the fewest slices left come first, at REPAIR_BYTES_S. So a
drained node keeps nothing, and a lost disk's slices are there again, without an operator. Who asks says when it has
asked for all, so a node knows that nothing of a missing volume is wanted any more (`are_elsewhere`).

*Nothing is left over.* Slices that no entry names are left by writers that stopped in between, and by nodes that were
away when their slices were deleted. Whoever keeps slices that nobody has asked about, and that have not become more,
for TIDY_AFTER_S looks at their entry, and deletes them if it does not name them. A writer whose entry comes later than
that does not put it (`STALE_S`).

Rejected: a list of slices at their entry's home (a second truth); one node that looks after all (it would have to be
elected, and would read every entry through the network).

Invariants. (1) A slice is deleted only after its entry was read and did not name it, or by who replaced the entry.
(2) An entry names a new place only when all that it says is there is there.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from forebay.backends.coded.backend import STALE_S, CodedBackend
from forebay.backends.locate import check
from forebay.backends.seam import Backend
from forebay.backends.stack import open_coded
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.core import limits
from forebay.core.cluster.coding import (
    OF_HEADER,
    SLICES,
    Entry,
    Shown,
    Span,
    code_of,
    decode_entry,
    entries_of,
    moves,
    slice_name,
    split_slice,
)
from forebay.core.cluster.membership import LOOK_S
from forebay.core.errors import ForebayError, NotFound, Precondition
from forebay.core.messages.calls import DeleteCall
from forebay.core.messages.copied import CheckSlices, CopiesSaid
from forebay.core.record import Record, headers_of
from forebay.core.types import Bucket
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.homes import Homes
from forebay.node.engine.peers import Peers
from forebay.node.engine.seat import Home, Seat
from forebay.node.engine.shared_buckets import SharedBuckets
from forebay.node.engine.write.writes import Writes
from forebay.node.settings import Settings
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock, boottime

log = logging.getLogger("forebay.slices")

CHECK_S = 60.0  # between rounds in which all places are asked, while nothing happens
CHECK_SHARE = 0.05  # of the time at most, that rounds take
AGAIN_S = 5.0  # after a round that could not do all, and while entries may still go from home to home
SETTLED_S = 60.0  # they do for so long after a change of nodes
REPAIR_BYTES_S = 256 * limits.MIB  # of one node: it leaves most of a link and of the disks to clients
TIDY_S = 600.0
TIDY_AFTER_S = 7200.0
LEAVING_TIDY_S, LEAVING_TIDY_AFTER_S = 20.0, 300.0  # of a node that is drained: it goes when it has nothing any more
MISSING_MAX = 20_000  # slices that one answer names
REST_S = 3.0  # of a node that did not answer
assert LEAVING_TIDY_AFTER_S > 2 * STALE_S
SILENT_FACTOR = 5  # a machine's start takes longer than a mount, and its node has more than a volume has
REFUSES_S = 60.0  # a node that refused a slice is not chosen for so long
ENTRIES_AT_ONCE = 256  # about whose slices a node is asked in one request
DAMAGED_MAX = 100_000  # objects that are put in order by how urgent they are

Slice = tuple[str, int]  # generation and number: what of an object lies at one place


class Situation(NamedTuple):
    """Which nodes take slices (with weights), which are lost, and which leave; by which map."""

    nodes: Mapping[str, float]
    lost: frozenset[str]
    leaving: frozenset[str]
    epoch: int


class Damaged(NamedTuple):
    """An object of which slices are not where they should be; `left` are where they should, of its scarcest group."""

    left: int
    bucket: str
    key: str


class Asked(msgspec.Struct):
    """A round of another node, or this one, that asks which slices are here."""

    round: int
    began_s: float
    missed: bool = False


class Kept(NamedTuple):
    """Slices here of one generation and number: how many there were, and since when nothing was heard of them."""

    size: int
    since_s: float


class Engine(Protocol):
    """What slices need of the engine."""

    buckets: Buckets
    clock: Clock
    index: StoreReader
    node_id: str
    settings: Settings
    shared_buckets: SharedBuckets | None
    store: Store
    writes: Writes

    def flush(self) -> None: ...


class Slices:
    """See the module's header."""

    def __init__(self, engine: Engine, seat: Seat, peers: Peers, homes: Homes, chance: Chance) -> None:
        self._engine, self._seat, self._peers, self._homes, self._chance = engine, seat, peers, homes, chance
        self._node_id, self._clock, self._store, self._index = engine.node_id, engine.clock, engine.store, engine.index
        self._buckets, self._writes = engine.buckets, engine.writes
        self._lost_after_s = engine.settings.volume_lost_after_s  # 0: never
        self._open: dict[tuple[str, str], CodedBackend] = {}
        self._silent_since_s: dict[str, float] = {}
        self._refuses_until_s: dict[str, float] = {}
        self._rests_until_s: dict[str, float] = {}
        self._clients: dict[tuple[str, str], Backend] = {}  # of buckets of entries, by bucket and address
        self.stops = False  # the fronts of this node have ended
        self._kept: dict[Slice, Kept] = {}
        self._lost_tasks: set[asyncio.Task[None]] = set()
        self._absent_since_s: float | None = None  # a volume that may have slices
        self._asked: dict[str, Asked] = {}  # by who asks
        self._had_all_s: dict[str, float] = {}  # when the last round of each began in which nothing was missing here
        self.damaged: dict[str, int] = {}  # objects by bucket, by the last round
        self.made_again = self.deleted = 0
        self._round = 0

    # --- the backend of coded buckets --------------------------------------------------------------------------------
    def open(self, bucket: Bucket, counters: BackendCounters) -> Backend:
        """The backend of a coded bucket, ready to use. `Invalid` for options that it does not know."""
        check(bucket)
        return Counting(self._backend(bucket), counters, self._clock)

    def _backend(self, bucket: Bucket) -> CodedBackend:
        # A put that was held up is told by a clock that goes on while the machine is suspended, as others' clocks do.
        entries = functools.partial(self._entries_of, entries_of(bucket.name))
        return open_coded(bucket, entries, self, clock=boottime, chance=self._chance)

    def _entries_of(self, bucket: str) -> Backend:
        """A bucket of entries, asked by way of this node, or while that stops of another one."""
        address = self._engine.settings.advertised
        if self.stops:
            others = (self._seat.place_of(node) for node in sorted(self._seat.alive) if node != self._node_id)
            address = next((other.address for other in others if other is not None), address)
        backend = self._clients.get((bucket, address))
        if backend is None:
            backend = self._clients[bucket, address] = self._peers.as_client(bucket, address)
        return backend

    def weights(self, needed: int) -> Mapping[str, float]:
        """The nodes that take slices now, with their weights; so many of them, if there are."""
        return self._willing(self._situation().nodes, needed)

    def _willing(self, nodes: Mapping[str, float], needed: int) -> Mapping[str, float]:
        """Those that have not just refused a slice, if they are enough."""
        now_s = self._clock.monotonic_s()
        refuses = {node for node, until_s in self._refuses_until_s.items() if until_s > now_s}
        refuses |= {self._node_id} if self.stops else set()
        found = {node: weight for node, weight in nodes.items() if node not in refuses}
        return found if len(found) >= needed else nodes

    def at(self, node: str, *, rested: bool = False) -> Backend | None:
        """The node as a backend for slices; None for one that does not live, or (`rested`) has `failed` just now."""
        rests = rested and self._rests_until_s.get(node, 0.0) > self._clock.monotonic_s()
        return None if rests else self._peers.slices_at(node)

    def failed(self, node: str, error: BaseException) -> None:
        """The node did not answer: it rests for a while."""
        said = error.message if isinstance(error, ForebayError) else "no answer in time"
        log.info("node %s rests, others are asked for slices: %s", node, said)
        self._rests_until_s[node] = self._clock.monotonic_s() + REST_S

    def refused(self, node: str) -> None:
        """The node took no slice: others are chosen for a while, if there are enough."""
        self._refuses_until_s[node] = self._clock.monotonic_s() + REFUSES_S

    def _situation(self) -> Situation:
        agreed, records, alive = self._seat.agreed, self._seat.records, self._seat.alive
        now_s = self._clock.monotonic_s()
        for node in records.keys() - alive.keys():
            self._silent_since_s.setdefault(node, now_s)
        for node in self._silent_since_s.keys() & alive.keys():
            del self._silent_since_s[node]
        if agreed is None:
            return Situation({}, frozenset(), frozenset(), 0)
        nodes = {
            node: weight
            for node, weight in agreed.holders.items()
            if node in alive and node in records and records[node].wanted == "active"
        }
        lost, leaving, late_s = set[str](), set[str](), SILENT_FACTOR * self._lost_after_s
        for node, record in records.items():
            silent_s = now_s - self._silent_since_s.get(node, now_s)
            is_late = 0.0 < late_s <= silent_s and record.wanted != "maintenance"
            if is_late or (record.wanted == "gone" and node not in alive):
                lost.add(node)
            elif record.wanted in ("draining", "gone"):
                leaving.add(node)
        return Situation(nodes, frozenset(lost), frozenset(leaving), agreed.epoch)

    # --- what others ask ---------------------------------------------------------------------------------------------
    async def check(self, call: CheckSlices) -> CopiesSaid:
        """Which of these slices are not here. What is on a volume that is missing may come back, and counts as here."""
        missing = list[str]()
        now_s = self._clock.monotonic_s()
        may_come_back = self._may_come_back(now_s)
        asked = self._asked.get(call.asker)
        if asked is None or asked.round != call.round:
            asked = self._asked[call.asker] = Asked(call.round, now_s)
        for generation, number, groups in call.asked:
            kept = self._kept.get((generation, number), Kept(0, now_s))
            self._kept[generation, number] = kept._replace(since_s=now_s)
            for group in range(groups):
                name = slice_name(generation, group, number)
                record = self._store.lookup(SLICES, name)
                if not (may_come_back and record is None) and (record is None or not record.complete):
                    missing.append(name)  # or a part of it rotted
                if len(missing) >= MISSING_MAX:
                    asked.missed = True
                    return CopiesSaid(missing)
                if group % limits.LIST_KEYS_MAX == limits.LIST_KEYS_MAX - 1:
                    await asyncio.sleep(0)
        asked.missed |= bool(missing) or may_come_back
        if call.ends and not asked.missed:
            self._had_all_s[call.asker] = asked.began_s
        return CopiesSaid(missing)

    def _may_come_back(self, now_s: float) -> bool:
        """Whether a volume is missing that may have slices, and not for long."""
        if not self._store.owners.of_bucket(SLICES):
            self._absent_since_s = None
            return False
        if self._absent_since_s is None:
            self._absent_since_s = now_s
        return not self._lost_after_s or now_s - self._absent_since_s < self._lost_after_s

    def are_elsewhere(self) -> bool:
        """Whether what missing volumes had of slices was made again: everybody has asked since, and nothing was
        missing."""
        agreed = self._seat.agreed
        if agreed is None or self._may_come_back(self._clock.monotonic_s()) or self._absent_since_s is None:
            return False
        lost_s = self._absent_since_s + self._lost_after_s
        return all(self._had_all_s.get(node, 0.0) > lost_s for node in agreed.holders)

    def lost(self, name: str) -> None:
        """A slice rotted, or its file is gone: it is forgotten here, and made again by its entry's home."""
        task = asyncio.ensure_future(self._writes.give_up(SLICES, name))
        self._lost_tasks.add(task)
        task.add_done_callback(self._lost_tasks.discard)

    # --- nothing is missing for long ---------------------------------------------------------------------------------
    async def tend(self) -> None:
        """See to it, for ever."""
        looked_at, changed_s, due_s = None, 0.0, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            seen, began_s = self._situation(), self._clock.monotonic_s()
            if not seen.nodes or (seen == looked_at and began_s < due_s):
                continue
            if seen != looked_at:
                looked_at, changed_s = seen, began_s
            is_all = await self._look_after(seen)
            now_s = self._clock.monotonic_s()
            settled = is_all and not seen.leaving and began_s - changed_s > SETTLED_S
            took_s = now_s - began_s
            due_s = now_s + (max(CHECK_S, took_s / CHECK_SHARE) if settled else max(AGAIN_S, took_s))

    async def _look_after(self, seen: Situation) -> bool:
        """One round; whether all slices are where they should be now."""
        damaged, is_sure = list[Damaged](), True
        self._round += 1
        for bucket in self._coded():
            for page in self._entries(bucket):
                found, sure = await self._damaged(bucket, page, seen)
                damaged += found
                is_sure &= sure
                if len(damaged) >= DAMAGED_MAX:
                    is_sure = False
                    break
        if is_sure:
            await self._tell_end()
        self.damaged = {bucket.name: 0 for bucket in self._coded()}
        for each in damaged:
            self.damaged[each.bucket] = self.damaged.get(each.bucket, 0) + 1
        for each in sorted(damaged):
            served = self._buckets.known(each.bucket)
            if served is None or self._situation() != seen:
                return False
            try:
                await self._mend(served.bucket, each.key, seen)
                self.damaged[each.bucket] -= 1
            except (NotFound, Precondition):
                self.damaged[each.bucket] -= 1  # it was deleted or replaced
            except ForebayError as error:
                is_sure = False
                log.warning("slices of %s/%s are not made again yet: %s", each.bucket, each.key, error.message)
        return is_sure

    def _coded(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets.shown() if code_of(bucket.url) is not None]

    def _entries(self, bucket: Bucket) -> Iterator[list[tuple[str, Entry]]]:
        """Entries with slices that are at home here, in pages."""
        name, after = entries_of(bucket.name), ""
        served = self._buckets.known(name)
        self._engine.flush()
        while served is not None and (found := self._index.scan(name, "", after, ENTRIES_AT_ONCE)):
            after = found[-1][0]
            page = [
                (key, record)
                for key, record in found
                if _has_slices(record) and self._homes.is_here(served.bucket, key)
            ]
            yield [(key, entry) for key, record in page if (entry := self._entry(name, key, record)) is not None]

    def _entry(self, name: str, key: str, record: Record) -> Entry | None:
        data = record.inline
        try:
            if data is None:
                with open(self._store.data_path(record), "rb") as file:
                    data = file.read()
            return decode_entry(data, f"{name}/{key}")
        except (OSError, ForebayError) as error:
            log.warning("the entry %s/%s cannot be read here: %s", name, key, error)
            return None

    async def _damaged(
        self, bucket: Bucket, page: list[tuple[str, Entry]], seen: Situation
    ) -> tuple[list[Damaged], bool]:
        """Those of a page that want something, and whether all places said."""
        missing, is_sure = await self._missing([entry for _, entry in page])
        found = []
        for key, entry in page:
            gone = {number for number, place in enumerate(entry.places) if place in seen.lost}
            gone |= missing.get(entry.generation, {}).keys()
            if gone or moves(entry, seen.nodes, seen.lost, seen.leaving):
                found.append(Damaged(entry.code.slices - len(gone), bucket.name, key))
        return found, is_sure

    async def _missing(self, entries: list[Entry]) -> tuple[dict[str, dict[int, list[int]]], bool]:
        """Groups that are missing at their living place, by generation and number; and whether all places said."""
        asked: dict[str, list[tuple[str, int, int]]] = {}
        for entry in entries:
            for number, place in enumerate(entry.places):
                asked.setdefault(place, []).append((entry.generation, number, entry.groups))
        found: dict[str, dict[int, list[int]]] = {}
        is_sure = True
        for place, of in asked.items():
            home = self._seat.place_of(place)
            if home is None:
                continue  # it is silent: it is lost, or waited for
            try:
                said = await self._ask(home, CheckSlices(SLICES, of, self._node_id, self._round))
            except ForebayError as error:
                is_sure = False
                log.info("node %s does not say which slices it has: %s", place, error.message)
                continue
            is_sure &= len(said.missing) < MISSING_MAX
            for name in said.missing:
                if (of_slice := split_slice(name)) is not None:
                    found.setdefault(of_slice[0], {}).setdefault(of_slice[2], []).append(of_slice[1])
        return found, is_sure

    async def _ask(self, home: Home, call: CheckSlices) -> CopiesSaid:
        return await (self.check(call) if home.node == self._node_id else self._peers.ask_copies(home, call))

    async def _tell_end(self) -> None:
        """All places were asked about all slices that they have to have, of entries that are not on a missing volume.
        Those that are come back when it is given up: for its own node's sake they need not be asked about before."""
        owners = self._store.owners
        is_whole = not any(owners.of_bucket(entries_of(bucket.name)) for bucket in self._coded())
        for node in sorted(self._seat.alive) if is_whole else [self._node_id]:
            if (home := self._seat.place_of(node)) is not None:
                with suppress(ForebayError):  # it waits for the next round
                    await self._ask(home, CheckSlices(SLICES, [], self._node_id, self._round, ends=True))

    async def _mend(self, bucket: Bucket, key: str, seen: Situation) -> None:
        """Have all slices of an object where they should be."""
        coded = self._backend_of(bucket)
        entry, version = await coded.entry(key)
        if entry.body is not None:
            return
        missing = (await self._missing([entry]))[0].get(entry.generation, {})
        new = moves(entry, self._willing(seen.nodes, entry.code.nodes_min), seen.lost, seen.leaving)
        lacking = {number: set(groups) for number, groups in missing.items() if number not in new}
        lacking |= {number: set(range(entry.groups)) for number in new}
        absent = {(number, group) for number, groups in missing.items() for group in groups}
        for group in range(entry.groups):
            wanted = [number for number, groups in lacking.items() if group in groups]
            if wanted:
                there = [number for number in wanted if (number, group) not in absent]
                made = await self._made(coded, key, entry, group, wanted, there)
                await coded.send(key, entry, group, {i: (new.get(i, entry.places[i]), made[i]) for i in wanted})
                self.made_again += len(wanted)
                await asyncio.sleep(sum(map(len, made.values())) / REPAIR_BYTES_S)
        if new:
            await self._move(coded, key, entry, version, new)

    async def _made(
        self, coded: CodedBackend, key: str, entry: Entry, group: int, wanted: list[int], there: list[int]
    ) -> dict[int, bytes]:
        """Whole slices of a group: those that are `there` are read, others are computed."""
        whole = Span(group, 0, 0, entry.slice_bytes(group))
        read = await asyncio.gather(*(coded.ask(entry, whole._replace(number=number)) for number in there))
        found = {number: data for number, data in zip(there, read, strict=True) if data is not None}
        rest = [number for number in wanted if number not in found]
        return found | (await coded.ranges(key, entry, whole, rest) if rest else {})

    async def _move(self, coded: CodedBackend, key: str, entry: Entry, version: str, new: dict[int, str]) -> None:
        """Have the entry name the new places, and delete what is at those it named before."""
        places = tuple(new.get(number, place) for number, place in enumerate(entry.places))
        moved = msgspec.structs.replace(entry, places=places, revision=entry.revision + 1)
        # If it is refused, another home may have moved them to the same places: what is nobody's, tidying finds.
        await coded.put_entry(key, moved, version)
        await coded.drop(_names(entry, {number: entry.places[number] for number in new}))

    # --- nothing is left over ----------------------------------------------------------------------------------------
    async def tidy(self) -> None:
        """Delete slices that no entry names, for ever."""
        while True:
            for _ in range(round(TIDY_S / LEAVING_TIDY_S)):
                await asyncio.sleep(LEAVING_TIDY_S)
                if self._leaves:
                    break
            await self._tidy(LEAVING_TIDY_AFTER_S if self._leaves else TIDY_AFTER_S)

    @property
    def _leaves(self) -> bool:
        own = self._seat.records.get(self._node_id)
        return own is not None and own.wanted == "draining"

    async def _tidy(self, after_s: float) -> None:
        counts: dict[Slice, int] = {}
        of: dict[Slice, str] = {}
        after = ""
        self._engine.flush()
        while found := self._index.scan(SLICES, "", after, limits.LIST_KEYS_MAX):
            after = found[-1][0]
            for name, record in found:
                if (named := split_slice(name)) is not None:
                    one = (named[0], named[2])
                    counts[one] = counts.get(one, 0) + 1
                    of.setdefault(one, dict(headers_of(record)).get(OF_HEADER, ""))
            await asyncio.sleep(0)
        now_s = self._clock.monotonic_s()
        before, self._kept = self._kept, {}
        for one, count in counts.items():
            kept = before.get(one)
            self._kept[one] = kept if kept is not None and kept.size == count else Kept(count, now_s)
        for one, kept in list(self._kept.items()):
            if now_s - kept.since_s >= after_s:
                try:
                    await self._judge(one, of[one])
                except ForebayError as error:
                    log.info("whether slices %s/%d are anybody's is not known: %s", *one, error.message)

    async def _judge(self, one: Slice, said: str) -> None:
        """Delete the slices, if their entry is there and does not name them, or is not there."""
        generation, number = one
        if await self._is_named(generation, number, said):
            self._kept[one] = self._kept[one]._replace(since_s=self._clock.monotonic_s())
            return
        prefix = f"{generation}/{number:02d}/"
        while found := self._index.scan(SLICES, prefix, "", limits.LIST_KEYS_MAX):
            for name, _ in found:
                await self._writes.delete(DeleteCall(SLICES, name))
                self.deleted += 1
            self._engine.flush()
        self._kept.pop(one, None)
        log.info("slices %s/%d were nobody's any more, and are deleted", generation, number)

    async def _is_named(self, generation: str, number: int, said: str) -> bool:
        try:
            name, _, key = base64.urlsafe_b64decode(said).decode().partition("/")
        except (binascii.Error, UnicodeDecodeError):
            return True  # nobody knows
        served = self._buckets.known(name)
        if served is None or code_of(served.bucket.url) is None:
            shared = self._engine.shared_buckets  # a node that does not hear of buckets knows of none that is gone
            return shared is None or bool(shared.lagging) or not self._seat.is_found
        try:
            entry, _ = await self._backend_of(served.bucket).entry(key)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise
            return False
        if entry.generation != generation or entry.body is not None:
            return False
        return entry.places[number] == self._node_id

    def _backend_of(self, bucket: Bucket) -> CodedBackend:
        coded = self._open.get((bucket.name, bucket.url))
        if coded is None:
            coded = self._open[bucket.name, bucket.url] = self._backend(bucket)
        return coded

    def metrics(self) -> dict[str, float]:
        """Series for the engine's snapshot."""
        return {
            "forebay_slices_made_again_total": self.made_again,
            "forebay_slices_deleted_total": self.deleted,
            "forebay_objects_without_all_slices": sum(self.damaged.values()),
        }

    async def aclose(self) -> None:
        """Ask nobody any more."""
        for task in self._lost_tasks:
            task.cancel()
        closing = (each.aclose() for each in (*self._open.values(), *self._clients.values()))
        await asyncio.gather(*self._lost_tasks, *closing, return_exceptions=True)


def _has_slices(record: Record) -> bool:
    try:
        return Shown.of(record.etag).has_slices
    except ForebayError:
        return False


def _names(entry: Entry, places: Mapping[int, str]) -> list[tuple[str, str]]:
    named = ((number, group) for number in places for group in range(entry.groups))
    return [(places[number], slice_name(entry.generation, group, number)) for number, group in named]
