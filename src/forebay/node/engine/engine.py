"""The engine: the one writer of a node. It fetches what is missing, keeps what fits, and answers the fronts.

Theory. This module puts the engine together, and is the only place that knows all its parts: store, buckets, cold
reads, room, fronts, jobs. The engine runs on one event loop. Worker threads only move bytes (writes to data files,
checks, reclaiming). Changes to the index gather for FLUSH_S and become visible to fronts together.

In the background it looks after the volumes every HOUSEKEEP_S, follows free space, scrubs blocks at a low rate, and
after each start removes files that no record names.

A directory has one engine: the engine holds the node's lock, unless its supervisor says that it holds it.

Invariants. (1) A front is welcomed only when the store is open and the buckets are loaded. (2) After `stop` nothing of
the engine is left: no task, thread, descriptor or socket file.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

import forebay
from forebay.backends.bounds import Bounds
from forebay.backends.seam import Backend
from forebay.backends.stack import open_backend
from forebay.backends.wrap.counting import BackendCounters
from forebay.core.cluster.coding import SLICES, code_of
from forebay.core.cluster.records import PROTOCOL, NodeRecord
from forebay.core.errors import ForebayError, Invalid
from forebay.core.machines.hints import Hints
from forebay.core.machines.pulse import interval_s
from forebay.core.machines.stall import LOOK_S
from forebay.core.messages.calls import JobCall, PutCall, Written
from forebay.core.messages.wire import Welcome
from forebay.core.reach import Reach
from forebay.core.record import present_blocks
from forebay.core.types import Bucket
from forebay.meta.etcd import EtcdMeta
from forebay.meta.etcd import parse_url as parse_etcd_url
from forebay.meta.sqlite import SqliteMeta
from forebay.node.engine.buckets import PREFIX as BUCKETS
from forebay.node.engine.buckets import Buckets, OpenBackend, decode_bucket
from forebay.node.engine.call_handlers import Verbs
from forebay.node.engine.counts import Tally
from forebay.node.engine.derived import Keeping
from forebay.node.engine.evictions import Room
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.flush.owed_at_start import CatchingUp
from forebay.node.engine.fronts import Connection, Fronts
from forebay.node.engine.homes import Homes
from forebay.node.engine.identities import IdentitiesFile
from forebay.node.engine.issuers import Issuers
from forebay.node.engine.jobs.hints import Hinting
from forebay.node.engine.jobs.rewarm import is_home_by
from forebay.node.engine.jobs.runner import Jobs
from forebay.node.engine.jobs.work import JobWork
from forebay.node.engine.kept import KeptCopies
from forebay.node.engine.leaving import Leaving
from forebay.node.engine.peers import Peers
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.listings import Listings
from forebay.node.engine.read.pages import Pages
from forebay.node.engine.read.prestage import Prestaging
from forebay.node.engine.read.relays import Relays
from forebay.node.engine.replicas import Replicas
from forebay.node.engine.seat import Remembered, Seat, recall, weight_of
from forebay.node.engine.shared_buckets import SharedBuckets
from forebay.node.engine.slices import Slices
from forebay.node.engine.volumes import Volumes
from forebay.node.engine.write.appends import Appends
from forebay.node.engine.write.begun_uploads import Begun
from forebay.node.engine.write.copies import Copies
from forebay.node.engine.write.tags import Tags
from forebay.node.engine.write.through_bodies import Through
from forebay.node.engine.write.through_streams import Streams
from forebay.node.engine.write.uploads import UploadBook
from forebay.node.engine.write.writes import Writes
from forebay.node.peer_key import identity_of_peers, read_secret
from forebay.node.settings import Settings
from forebay.node.store.derived import Derived
from forebay.node.store.disk.volume import Expected, Lost, StoreEvent, stalled
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.remembered_volumes import KnownVolumes
from forebay.node.store.writer.scrub import Scrubber
from forebay.node.store.writer.volumes import object_lost
from forebay.node.store.writer.writer import Store
from forebay.ports import chance as system_chance
from forebay.ports import clock as system_clock
from forebay.ports import threads
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock
from forebay.ports.machine import boot_id

log = logging.getLogger("forebay.engine")

FLUSH_S = 0.003  # changes within it share one index transaction
HOUSEKEEP_S = 5.0
AGAIN_S = 1.0  # until background work that broke begins again
WORKERS = 32  # threads for blocking work: few are used, but a stalled disk must not take all
FILES_NEEDED = 1024


def _make_volume_dir(volume: Path) -> None:
    try:
        volume.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"--volume {volume}: {error.strerror}: name a directory that this user can write") from error


class Engine:
    """One engine. Call `start`, then `stop`, both on the loop that it runs on. `opener` opens backends."""

    def __init__(
        self,
        settings: Settings,
        *,
        opener: OpenBackend | None = None,
        clock: Clock = system_clock.system,
        chance: Chance = system_chance.system,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.node_id = ""
        self.started_s = clock.wall_s()
        self.seat: Seat | None = None  # None: the node is alone
        self.peers: Peers | None = None
        self.homes: Homes | None = None
        self.replicas: Replicas | None = None
        self.slices: Slices | None = None
        self.shared_buckets: SharedBuckets | None = None
        self.restarts: list[tuple[str, str, int]] = []  # of the node's processes: which one, why, how often
        self._opener = opener or self._open_backend
        self._chance = chance
        self.bounds = Bounds(Reach(settings.allow_backends), settings.own_folders, settings.own_files)
        peers = [identity_of_peers(read_secret(settings.peer_key))] if settings.peer_key else []
        self._identities = IdentitiesFile(settings.identities, settings.identity_key, peers)
        self._flushing: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._background: list[asyncio.Task[None]] = []
        self._stopping = False
        self.starts_again = asyncio.Event()  # set when a volume that was left out may be opened now
        self._workers = threads.pool(WORKERS, "forebay-bytes")

    # --- starting and stopping ---------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open everything and accept fronts. If something prevents that, raises it and leaves nothing open."""
        directory = Path(self.settings.dir)
        for path in (directory, self.settings.run_dir):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._identities.read()
        self._meta = SqliteMeta(self.settings.meta_file)
        try:
            cluster = parse_etcd_url(self.settings.cluster)[1] if self.settings.cluster else ""
            remembered = await recall(self._meta, cluster, loosen=self.settings.loosen)
            self.known = KnownVolumes(self._meta, self.clock)
            await self._remember_volumes()
            self.node_id = await self._know_myself()
            await self._open_store()
        except BaseException:
            await self._meta.aclose()
            raise
        self._assemble()
        try:
            if self.settings.cluster:
                self.seat = self._take_seat(remembered)
                self.peers = self._meet_peers(self.seat)
                if self.peers is not None:
                    self.cold.is_of_another = self.peers.is_of_another
                    self.room.other_homes = self.peers
                    self.cold.relays = Relays(self.peers)
                self.homes = self.buckets.homes = self._know_homes(self.seat)
                self.flusher.is_second = self.seat.is_second
                self._keep_copies(self.seat, self.homes)
                if self.peers is not None and self.replicas is not None:
                    self.slices = Slices(self, self.seat, self.peers, self.homes, self._chance)
                    self.replicas.returns.slices_are_elsewhere = self.slices.are_elsewhere
                self.shared_buckets = await self._share_buckets(self.seat)
                self.verbs.buckets.shared = self.work.shared = self.shared_buckets
            await self.buckets.load()
            if self.seat is not None:
                self.seat.keeps(self.buckets.all())
            self.catching_up.start()
            self.room.restore(self.buckets.all(), self.catching_up.whole)
            await self.uploads.load()
            await self.begun.load()
            await self.issuers.follow(self._identities.oidc)
            await self._listen()
        except BaseException:
            await self.stop(clean=False)
            raise
        self.store.serve()
        self.fronts.beat()
        if self.seat is not None:
            self.seat.start()
        late: list[Callable[[], Awaitable[None]]] = [self._sweep, self.uploads.tend, self.begun.tend, self.hinting.tend]
        if self.catching_up.is_done:
            await self.jobs.resume()
        else:
            self._background.append(asyncio.create_task(self._when_whole(self.jobs.resume)))
        if self.homes is not None and self.replicas is not None:
            late += [self.homes.tend, self.replicas.tend]
        if self.slices is not None:
            late += [self.slices.tend, self.slices.tidy]
        if self.shared_buckets is not None:
            late.append(self.shared_buckets.follow)
        work = [*map(_lasting, [self._housekeep, self._watch, self._scrub])]
        work += [_lasting(self.replicas.tell_losses)] if self.replicas is not None else []
        work += [self._when_whole(functools.partial(_lasting, each)) for each in late]
        self._background += [asyncio.create_task(each) for each in work]

    def _open_backend(self, bucket: Bucket, counters: BackendCounters) -> Backend:
        if self.slices is not None and code_of(bucket.url) is not None:
            return self.slices.open(bucket, counters)
        return open_backend(bucket, counters=counters, node=self.node_id, bounds=self.bounds, peers=self.peers)

    async def _remember_volumes(self) -> None:
        """Load the known volumes, before the node gets an id: a node that has an id and remembers no volumes is of an
        older version."""
        entries, _ = await self._meta.range(BUCKETS)
        owing = [bucket.name for bucket in map(decode_bucket, entries) if bucket.write != "through"]
        paths = [str(path) for path in self.settings.volume_dirs]
        ran_before = await self._meta.get("node/id") is not None
        await self.known.load(paths, ran_before=ran_before, owing_buckets=owing)

    async def _open_store(self) -> None:
        """Open the volumes that are as remembered, and make those that were ordered. Warn about the others."""
        astray = any(known.astray for known in self.known.memory.volumes)
        expected: dict[str, Expected] = {}
        paths = []
        for each in self.known.judge([str(path) for path in self.settings.volume_dirs]):
            if each.state == "fresh":
                _make_volume_dir(Path(each.path))
            elif each.state == "present":
                expected[each.path] = Expected(each.volume_id, each.weight)
            if each.state in ("fresh", "present"):
                paths.append(each.path)
            if each.detail:
                shown = (each.volume_id or "?", each.path, each.state, each.detail, each.change or "nothing to do")
                log.warning("volume %s at %s is %s: %s; %s", *shown)
        await self.known.opening()
        self.store = Store.open(
            paths,
            capacity_bytes=self.settings.capacity_bytes,
            on_event=self._store_event,
            expected=expected,
            may_be_empty=len(paths) < len(self.known.standings),
            astray=astray,
            later=True,
            epoch=self.known.memory.epoch,
            ids_below=self.known.memory.ids_below,
        )
        await self.known.opened(self.store)

    def _assemble(self) -> None:
        self.tally = Tally()
        self.hints = Hints()
        self.index = StoreReader(self.store.volumes())
        self.scrubber = Scrubber(self.store, rate_bytes_s=max(1.0, self.settings.scrub_bytes_s))
        self.buckets = Buckets(
            self._meta, self._opener, self.clock, auto=self.settings.auto_buckets, changed=self._buckets_changed
        )
        self.room = Room(
            self.store,
            self.tally,
            self._workers,
            busy=lambda object_id, block: self.cold.busy(object_id, block),
            evicted=lambda object_id, blocks: self.cold.evicted(object_id, blocks),
            flush=self.flush,
            held=lambda object_ids: self._dropped(object_ids),
            hints=self.hints,
        )
        self.cold = ColdReads(
            self.store,
            self.buckets,
            self.room,
            self.tally,
            self.clock,
            self._workers,
            flush_soon=self.flush_soon,
            deleted=self._deleted,
            wrote=lambda bucket, key: self.listings.written(bucket, key),
        )
        self._assemble_writing()
        self._assemble_answers()

    def _assemble_writing(self) -> None:
        self.flusher = Flusher(
            self.store,
            self.buckets,
            self.clock,
            self._chance,
            self._workers,
            lock=lambda bucket, key: self.writes.lock(bucket, key),
            commit=lambda change: self.writes.commit(change),
            flush_soon=self.flush_soon,
            node_id=self.node_id,
            capacity_bytes=self._capacity_bytes,
            cleaned=lambda bucket, key, record: self.room.settled(record),
            found_bad=lambda bucket, key, record, bad: self.cold.suspicions.found_bad((bucket, key), record, bad),
        )
        self.catching_up = CatchingUp(self.store, self.flusher, lambda name: name in self.writes.locks)
        self.cold.bring_up = self.catching_up.key
        self.begun = Begun(self._meta, self.buckets, self._chance)
        self.writes = Writes(
            self.store,
            self.buckets,
            self.cold,
            self.room,
            self.flusher,
            self.clock,
            self._workers,
            through=Through(self.begun),
            flush=self.flush,
            known=self.known,
            member=lambda: 0 if self.seat is None else self.seat.member(),
            lost=lambda lease: "" if self.seat is None else self.seat.lost(lease),
        )
        self.streams = Streams(self.store, self.buckets, self.writes)
        self.copies = Copies(
            self.store,
            self.index,
            self.buckets,
            self.cold,
            self.writes,
            self._workers,
            lambda: self.uploads,
        )
        self.keeping = Keeping(self.store, self.writes, self.clock.wall_s, self.cold.forget)
        self.writes.moved_on = self.keeping.moved_on
        derived = Derived(self.index, lambda verb, call: self.keeping.keep(call), self.room.touched)
        self.appends = Appends(
            self.store,
            self.index,
            self.writes,
            derived,
            self._workers,
            flush=self.flush,
            wall_s=self.clock.wall_s,
        )
        self.tags = Tags(self.store, self.buckets, self.writes, self.flusher)
        self.uploads = UploadBook(
            self._meta,
            self.buckets,
            self.store,
            self.index,
            self.writes,
            self.clock,
            self._chance,
            self._workers,
            boot_id=boot_id(),
        )

    def _assemble_answers(self) -> None:
        self.pages = Pages(
            self.store,
            self.index,
            self.flusher,
            self.cold.openings.listed,
            lambda bucket, prefix: None if self.homes is None else self.homes.others(bucket, prefix),
        )
        self.derived = Derived(self.index, self._ask, self._touched)
        self.listings = Listings(self.buckets, self.pages, self.derived, self.clock, self._workers)
        self.hinting = Hinting(
            self.listings,
            self.cold,
            self.room,
            self.index,
            self.hints,
            self.tally,
            self.clock,
            self._workers,
        )
        self.room.foresight = self.hinting
        self.cold.foretold, self.cold.keeps = self.hinting.covers, self.hinting.keeps
        self.cold.read_apart = self.hinting.read_apart
        self.work = JobWork(
            self.buckets,
            self.cold,
            self.room,
            self.index,
            self.tally,
            self.flusher,
            flush=self.flush,
            flush_soon=self.flush_soon,
            is_home=lambda: is_home_by(self.seat, self.node_id),
        )
        self.prestaging = Prestaging(self.buckets, self.cold, self.tally, self.clock)
        self.store.on_lost = self._lost
        self.store.on_missing = lambda record: self.room.removed(record.object_id, present_blocks(record))
        self.store.on_answer = functools.partial(self._on_loop, asyncio.get_running_loop())
        self.jobs = Jobs(self._meta, self.clock, self._chance, self.work.make)
        paths = [str(path) for path in self.settings.volume_dirs]
        self.volumes = Volumes(self.store, self.known, self.flusher, paths)
        self.issuers = Issuers(self._meta, self.clock, self._chance, lambda: self.fronts.greet_again())
        self.leaving = Leaving(lambda: self.seat, self.store, self.buckets, self.cold.written)
        self.verbs = Verbs(self)
        self.fronts: Fronts = Fronts(
            self.cold,
            self.streams,
            welcome=self.welcome,
            answer=self.verbs.answer,
            begin=self._begin,
            touched=self._touched,
            beat_s=interval_s(self.settings.hung_after_s),
        )

    def _take_seat(self, remembered: Remembered) -> Seat:
        settings = self.settings
        addresses, name = parse_etcd_url(settings.cluster)
        at = os.stat(settings.dir)
        self._agreed = EtcdMeta(addresses, name, access=settings.access)
        return Seat(
            self._agreed,
            self._meta,
            remembered,
            self.node_id,
            NodeRecord(
                settings.advertised,
                weight_of(self._capacity_bytes()),
                replaced=settings.take_over,
                hands_over=True,
                protocol=PROTOCOL,
                release=forebay.__version__,
            ),
            lease_s=settings.lease_s,
            place=f"{boot_id()} {at.st_dev} {at.st_ino}",
            clock=system_clock.boottime,
            chance=self._chance,
            owes=self._owes_bytes,
            changed=lambda: self.fronts.greet_again(),
            acts=self._acts,
            drain=self._drain,
        )

    def _meet_peers(self, seat: Seat) -> Peers | None:
        """The other nodes; None where they would not know each other."""
        settings = self.settings
        if settings.identities and not settings.peer_key:
            log.warning("without --peer-key the node asks no other for bytes: each fetches for itself")
            return None
        secret = read_secret(settings.peer_key) if settings.peer_key else ""
        return Peers(seat, self.node_id, self.clock, secret=secret, ca=settings.peer_ca)

    async def _share_buckets(self, seat: Seat) -> SharedBuckets:
        shared = SharedBuckets(
            self._agreed,
            self._meta,
            self.verbs.buckets,
            seat,
            self.peers,
            secret=read_secret(self.settings.peer_key) if self.settings.peer_key else "",
            chance=self._chance,
            clock=self.clock,
        )
        await shared.load()
        return shared

    def _know_homes(self, seat: Seat) -> Homes:
        return Homes(
            seat,
            self.peers,
            self.node_id,
            self.clock,
            store=self.store,
            index=self.index,
            buckets=self.buckets,
            cold=self.cold,
            flusher=self.flusher,
            volumes=self.volumes,
            flush=self.flush,
            heard=self.fronts.heard,
            is_whole=lambda: self.catching_up.is_done,
        )

    def _keep_copies(self, seat: Seat, homes: Homes) -> None:
        kept = KeptCopies(
            self.node_id,
            lambda: seat.agreed,
            self.clock,
            self._workers,
            store=self.store,
            index=self.index,
            buckets=self.buckets,
            writes=self.writes,
            flusher=self.flusher,
            bring_up=self.catching_up.key,
        )
        self.replicas = self.writes.replicas = Replicas(
            seat,
            self.peers,
            self.node_id,
            self.clock,
            kept,
            store=self.store,
            index=self.index,
            buckets=self.buckets,
            writes=self.writes,
            flusher=self.flusher,
            volumes=self.volumes,
            flush=self.flush,
            is_whole=lambda: self.catching_up.is_done,
            lost_after_s=self.settings.volume_lost_after_s,
        )
        self.flusher.clear, self.flusher.may_send = self.replicas.clear, self.replicas.may_send
        homes.replicas = self.replicas

    def _acts(self, until_s: float) -> None:
        if any(bucket.is_kept_twice for bucket in self.buckets.all()):
            self.fronts.acts(until_s)

    def _owes_bytes(self) -> int:
        """How much would be lost with this node's disks; at least 1 if anything."""
        if not self.catching_up.is_done:
            return 1
        owed = sum(usage.owned_bytes for usage in self.store.usage() if usage.state != "out")  # as missing, below
        for bucket in self.buckets.all():
            if bucket.name == SLICES:
                continue  # those on a missing volume are made again elsewhere
            owed += self.flusher.totals(bucket.name).objects + len(self.volumes.missing(bucket.name))
        return owed

    async def _drain(self) -> None:
        """Bring to the backends what only this node has."""
        for bucket in self.buckets.all():
            if self.flusher.totals(bucket.name).objects:
                await self.jobs.start("flush", JobCall(bucket.name))

    async def _know_myself(self) -> str:
        if (entry := await self._meta.get("node/id")) is not None:
            return entry.value.decode()
        node_id = self._chance.token_hex(8)
        await self._meta.put("node/id", node_id.encode())
        return node_id

    async def _listen(self) -> None:
        path = self.settings.engine_socket
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        before = os.umask(0o077)
        try:
            self._server = await loop.create_unix_server(lambda: Connection(self.fronts), str(path), backlog=512)
        except OSError as error:
            raise Invalid(f"the socket {path} cannot be made ({error}): choose a shorter or writable --dir") from error
        finally:
            os.umask(before)

    async def stop(self, *, clean: bool = True, flush: bool = False) -> None:
        """Close everything. `clean` syncs all state, so that the next start trusts the index. `flush` first sends to
        the backends what only this node has, within the settings' bound."""
        self._stopping = True
        if self.slices is not None:
            self.slices.stops = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        await self.issuers.aclose()
        await self.jobs.aclose()
        await self.prestaging.aclose()
        await self.hinting.aclose()
        await self.listings.aclose()
        await self.streams.aclose()
        await self.uploads.aclose()
        await self.writes.aclose()
        if flush and not self.settings.no_flush_file.exists():
            await self.catching_up.whole(self.settings.flush_timeout_s)
        await self.catching_up.aclose()
        owed = await self.flusher.aclose(
            flush=flush, patience_s=self.settings.flush_timeout_s, skip=self.settings.no_flush_file.exists
        )
        if owed.objects:
            self.settings.owed_file.write_text(json.dumps({"objects": owed.objects, "bytes": owed.bytes}))
        await self.writes.commits.aclose()
        self.fronts.acts(0.0)
        if self.seat is not None:
            await self.seat.aclose()
        await self.cold.aclose()
        await self.fronts.aclose()
        await self.room.aclose()
        await self.buckets.aclose()
        if self.slices is not None:
            await self.slices.aclose()
        if self.peers is not None:
            await self.peers.aclose()
        if self._flushing is not None:
            self._flushing.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._workers.shutdown)
        await self._forget_settled()
        self.index.close()
        self.store.close(clean=clean)
        await self._meta.aclose()
        self.settings.engine_socket.unlink(missing_ok=True)

    async def _forget_settled(self) -> None:
        """Forget what the volumes no longer owe, so that the next start does not look for it on a volume that is
        gone."""
        try:
            self.store.settle()
            self.store.flush()
            await self.known.tend(self.store, ())
        except Exception:
            log.exception("what the volumes owe could not be brought up to date; the next start does it")

    # --- what fronts are told ----------------------------------------------------------------------------------------
    def welcome(self) -> Welcome:
        """What a front needs before it serves."""
        return Welcome(
            self.node_id,
            self.store.volumes(),
            self.buckets.all(),
            self._identities.encoded,
            pid=os.getpid(),
            trusted=self.issuers.encoded,
            away="" if self.seat is None else self.seat.away,
            as_home="" if self.seat is None else self.seat.as_home,
        )

    def told(self, line: bytes) -> None:
        """The supervisor reports how often it restarted the node's processes."""
        self.restarts = msgspec.json.decode(line, type=list[tuple[str, str, int]])

    def read_anew(self) -> None:
        """Read what somebody may have changed: the identities."""
        if self._identities.read(anew=True):
            self.fronts.greet_again()
            self._background.append(asyncio.create_task(self.issuers.follow(self._identities.oidc)))

    def _begin(self, call: PutCall, done: Callable[[Written | ForebayError], None]) -> bool:
        return self.catching_up.is_done and self.writes.begin(call, done)

    async def _ask(self, verb: str, arguments: Any) -> Any:
        return await self.verbs.answer(verb, arguments)

    def _deleted(self, bucket: str, key: str) -> bool:
        note = self.flusher.find(bucket, key)
        return note is not None and note.is_delete

    def _capacity_bytes(self) -> int:
        return sum(usage.capacity_bytes for usage in self.store.usage() if usage.state != "out")

    def _touched(self, object_id: int, first: int, end: int) -> None:
        self.room.touched(object_id, first, end)
        self.store.touch((object_id,), int(self.clock.wall_s() // 60))

    def _buckets_changed(self) -> None:
        self.room.set_quotas(self.buckets.all())
        if self.seat is not None:
            self.seat.keeps(self.buckets.all())
        self.fronts.greet_again()

    def _store_event(self, event: StoreEvent) -> None:
        log.warning("%s on volume %s: %s", event.kind, event.volume_id or "?", event.detail)
        if hasattr(self, "fronts"):
            asyncio.get_running_loop().call_soon(self._volumes_changed)

    def _on_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: a late disk has answered."""
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self.flush)

    def _lost(self, lost: Lost) -> None:
        self.flusher.forget(lost.bucket, lost.key, object_lost(lost))
        if self.slices is not None and lost.bucket == SLICES:
            self.slices.lost(lost.key)
        self.flush()  # before anybody hears: no front may answer from the record a moment later

    def _volumes_changed(self) -> None:
        if not self._stopping:
            self.store.deliver()  # a volume that has just gone out is no place for keys any more, nor in front's views
            volumes = self.store.volumes()
            self.index.refresh(volumes)
            self.room.follow_volumes()
            self.fronts.greet_again()

    # --- the index ---------------------------------------------------------------------------------------------------
    def flush_soon(self) -> None:
        """Make changes visible within FLUSH_S."""
        if self._flushing is None and not self._stopping:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Make changes visible now, and let fronts close what was dropped."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        self.store.flush()
        self.writes.commits.flushed()
        dropped = self.store.take_dropped()
        if dropped:
            self._dropped(dropped)
        if dropped or self.store.reclaimable:
            self.room.reclaim()

    def _dropped(self, object_ids: list[int]) -> None:
        self.index.dropped(object_ids)
        self.fronts.dropped(object_ids)

    # --- in the background -------------------------------------------------------------------------------------------
    async def _housekeep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(HOUSEKEEP_S)
            try:
                settling = [
                    loop.run_in_executor(volume.desk.bearers, self.store.settle, volume)
                    for volume in self.store.usable()
                    if not volume.silent
                ]
                if settling:
                    await asyncio.wait(settling, timeout=HOUSEKEEP_S)
                self.store.housekeep()
                self.catching_up.start()
                self.flush()
                if not self.store.any_stalled:  # else writes under way there may be owed later
                    await self.known.tend(self.store, self.writes.written_buckets())
                self.room.follow_volumes()
                if self.store.finds_room() and not self.starts_again.is_set():
                    log.warning("a volume has the room that it lacked at the start: the engine starts again")
                    self.starts_again.set()
                if self._identities.read():
                    self.fronts.greet_again()
                await self.issuers.follow(self._identities.oidc)
            except Exception:
                log.exception("housekeeping broke; it goes on")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            changed = self.store.watch(self.clock.monotonic_s())
            for volume in changed:
                if volume.stall.stalled:
                    log.error(
                        "the disk of volume %s does not answer: the node works without it until it does", volume.path
                    )
                    self.writes.commits.stalled(volume.id, stalled(volume.path, "a write"))
                else:
                    log.warning("the disk of volume %s answers again", volume.path)
            for volume in self.store.usable():
                if not volume.stall.stalled:
                    self.writes.commits.answers(volume.id)
            if changed:
                self.flush()
                self._volumes_changed()

    async def _scrub(self) -> None:
        if self.settings.scrub_bytes_s <= 0:
            return
        loop = asyncio.get_running_loop()
        while True:
            unit = self.scrubber.next_unit(self.clock.monotonic_s())
            wait_s = 60.0
            if unit is not None:
                try:
                    bad = await loop.run_in_executor(
                        self._workers, self.store.check_blocks, unit.record, unit.bucket, unit.key, [unit.block]
                    )
                    self.scrubber.settle(unit, bad)
                    if bad:
                        self.room.removed(unit.record.object_id, bad)
                        self.cold.evicted(unit.record.object_id, bad)
                    self.flush_soon()
                    wait_s = self.scrubber.pace(unit, self.clock.monotonic_s())
                except ForebayError as error:
                    log.warning("scrubbing waits: %s", error)
            await asyncio.sleep(wait_s)

    async def _when_whole(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.catching_up.whole()
        await work()

    async def _sweep(self) -> None:
        removed = 0
        for count in self.store.sweep():
            removed += count
            await asyncio.sleep(0.001)
        self.flush()
        self.room.reclaim()
        if removed:
            log.info("%d files that no record names were removed", removed)


async def _lasting(work: Callable[[], Awaitable[None]]) -> None:
    """Work for as long as the engine runs: a fault in it must not end it, and nobody hear of it."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s broke; it begins again", getattr(work, "__qualname__", work))
        await asyncio.sleep(AGAIN_S)
