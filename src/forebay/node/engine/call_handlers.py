"""What the engine answers to calls (`core/messages/calls.py`): buckets, listings, objects, jobs, and the node's state.

Theory. One method for each verb, and a table. Nothing here decides about bytes; it asks the parts that do.

Secrets in bucket options leave the engine only for its own fronts (`Welcome`): see `core/backend_options.py`.

Invariant. Every verb of `core.messages.calls.VERBS` is served.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

import forebay
from forebay.backends.bounds import Bounds
from forebay.core import limits
from forebay.core.backend_options import hide_secrets
from forebay.core.cluster.coding import code_of, entries_of
from forebay.core.errors import Bug, Invalid
from forebay.core.machines.opening import fresh_until_s
from forebay.core.messages import calls
from forebay.core.messages.copied import CheckSlices, CopiesCall, CopiesSaid
from forebay.core.messages.node_state import (
    BucketState,
    ClusterNode,
    ClusterState,
    FrontState,
    MapNode,
    NodeMap,
    NodeState,
)
from forebay.core.metrics import Snapshot, merge, series
from forebay.core.record import State, blocks_in, cached_bytes, headers_of, present_blocks
from forebay.core.types import Bucket, ListEntry, check_bucket_name, check_key
from forebay.core.versions import versions_of
from forebay.core.volumes import LostObject, VolumeState
from forebay.node.engine.bucket_verbs import BucketVerbs
from forebay.node.engine.buckets import Buckets, no_bucket
from forebay.node.engine.counts import Tally
from forebay.node.engine.derived import Keeping, derived_bytes
from forebay.node.engine.evictions import Room
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.flush.owed_at_start import CatchingUp
from forebay.node.engine.fronts import Fronts
from forebay.node.engine.homes import Homes
from forebay.node.engine.issuers import Issuers
from forebay.node.engine.jobs.hints import Hinting
from forebay.node.engine.jobs.runner import Jobs
from forebay.node.engine.jobs.work import JobWork
from forebay.node.engine.leaving import Leaving
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.listings import Listings
from forebay.node.engine.read.one_read import Ask
from forebay.node.engine.read.pages import Pages
from forebay.node.engine.read.prestage import Prestaging
from forebay.node.engine.replicas import Replicas
from forebay.node.engine.seat import Seat
from forebay.node.engine.shared_buckets import SharedBuckets
from forebay.node.engine.slices import Slices
from forebay.node.engine.volumes import Volumes
from forebay.node.engine.write.appends import Appends
from forebay.node.engine.write.copies import Copies
from forebay.node.engine.write.tags import Tags
from forebay.node.engine.write.through_streams import Streams
from forebay.node.engine.write.uploads import UploadBook
from forebay.node.engine.write.writes import Writes
from forebay.node.settings import Settings
from forebay.node.store.disk.usage import VolumeUsage
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.scrub import Scrubber
from forebay.node.store.writer.writer import Store
from forebay.node.vitals import vitals
from forebay.ports.clock import Clock

_HEARD = ("bucket_put", "bucket_create", "bucket_rules", "bucket_delete")  # acknowledged when all fronts act on it


class Engine(Protocol):
    """The parts of the engine that calls use."""

    settings: Settings
    node_id: str
    started_s: float
    restarts: list[tuple[str, str, int]]
    clock: Clock
    store: Store
    catching_up: CatchingUp
    bounds: Bounds
    index: StoreReader
    buckets: Buckets
    cold: ColdReads
    room: Room
    fronts: Fronts
    jobs: Jobs
    work: JobWork
    tally: Tally
    scrubber: Scrubber
    writes: Writes
    streams: Streams
    copies: Copies
    keeping: Keeping
    appends: Appends
    pages: Pages
    listings: Listings
    hinting: Hinting
    prestaging: Prestaging
    flusher: Flusher
    volumes: Volumes
    uploads: UploadBook
    tags: Tags
    issuers: Issuers
    seat: Seat | None
    shared_buckets: SharedBuckets | None
    homes: Homes | None
    leaving: Leaving
    replicas: Replicas | None
    slices: Slices | None

    def flush(self) -> None: ...


class Verbs:
    """See the module's header."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.buckets = BucketVerbs(engine)
        self._table: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "buckets": self._buckets,
            "bucket_put": self.buckets.put,
            "bucket_create": self.buckets.create,
            "bucket_rules": self.buckets.rules,
            "bucket_delete": self.buckets.delete,
            "bucket_check": self._bucket_check,
            "list": self._list,
            "list_cached": self._list_cached,
            "hints": engine.hinting.tell,
            "hints_at": engine.hinting.at,
            "hints_close": engine.hinting.close,
            "hints_state": engine.hinting.state,
            "listing": engine.listings.ask,
            "listing_part": engine.listings.part,
            "stat": self._stat,
            "job": self._job,
            "jobs": self._jobs,
            "job_cancel": self._job_cancel,
            "status": self._status,
            "lost": self._lost,
            "lost_give_up": self._lost_give_up,
            "volume_add": engine.volumes.add,
            "volume_give_up": self._volume_give_up,
            "claim": self._claim,
            "owed": self._owed,
            "copies": self._copies,
            "map": self._map,
            "wish": self._wish,
            "warm": engine.leaving.warm,
            "manifest": engine.leaving.manifest,
            "manifest_put": engine.leaving.write,
            "stop": engine.leaving.stop,
            "metrics": self._metrics,
            "issuer_keys": engine.issuers.refresh,
            "prestage": engine.prestaging.ask,
            "put": self._put,
            "put_open": engine.streams.open,
            "append": engine.appends.append,
            "keep": engine.keeping.keep,
            "delete": engine.writes.delete,
            "copy": engine.copies.copy,
            "tag": engine.tags.tag,
            "tags": engine.tags.read,
            "upload_create": engine.uploads.create,
            "upload_part": engine.uploads.part,
            "upload_part_copy": engine.copies.copy_part,
            "upload_parts": engine.uploads.parts,
            "upload_complete": engine.uploads.complete,
            "upload_abort": engine.uploads.abort,
            "uploads": engine.uploads.uploads,
        }

    async def answer(self, verb: str, arguments: Any) -> Any:
        """The answer to one call, of the type that `core.messages.calls.VERBS` gives."""
        await self._engine.catching_up.before(verb, arguments)
        if isinstance(arguments, calls.JobCall):
            return await self._engine.jobs.start(verb, arguments)  # type: ignore[arg-type]
        serve = self._table.get(verb)
        if serve is None:
            raise Bug(f"the call {verb} is not served: please report it")
        answer = await serve(arguments)
        if verb in _HEARD:
            await self._engine.fronts.heard()  # else one that is behind lets somebody read what is private by now
        return answer

    # --- buckets -----------------------------------------------------------------------------------------------------
    async def _buckets(self, _: calls.Nothing) -> list[Bucket]:
        return [hide_secrets(bucket) for bucket in self._engine.buckets.shown()]

    async def _bucket_check(self, named: calls.BucketNamed) -> calls.Nothing:
        await (await self._engine.buckets.get(named.name)).backend.probe()
        return calls.Nothing()

    # --- listings ----------------------------------------------------------------------------------------------------
    async def _list(self, call: calls.ListCall) -> Any:
        engine = self._engine
        served = await engine.buckets.get(call.bucket)
        return await engine.buckets.again(lambda: engine.pages.page(served, call))

    async def _list_cached(self, call: calls.ListCall) -> calls.CachedPage:
        check_bucket_name(call.bucket)
        return await self._engine.pages.cached(call)

    async def _stat(self, call: calls.StatCall) -> calls.ObjectState:
        check_key(call.key)
        return await self._engine.buckets.again(lambda: self._stat_once(call))

    async def _stat_once(self, call: calls.StatCall) -> calls.ObjectState:
        engine = self._engine
        served = await engine.buckets.acting(call.bucket, call.key)
        record = await engine.cold.metadata(Ask(call.bucket, call.key, revalidate=call.revalidate), served)
        volume_id, here = engine.store.here(call.bucket, call.key)
        if here is not None and here.version != record.version:
            here = None
        state, checked_s = (here.state, here.checked_s) if here is not None else (0, record.checked_s)
        return calls.ObjectState(
            bucket=call.bucket,
            key=call.key,
            size_bytes=record.size_bytes,
            version=record.version,
            etag=record.etag,
            modified_s=record.modified_s,
            cached_bytes=cached_bytes(here) if here else 0,
            pinned=bool(here and here.state & State.PINNED),
            dirty=bool(here and here.state & State.DIRTY),
            fresh_until_s=fresh_until_s(state, checked_s, served.bucket.freshness_s),
            headers=dict(headers_of(record)),
            volume=volume_id if here else "",
            blocks=blocks_in(record.size_bytes),
            cached_blocks=len(present_blocks(here)) if here else 0,
            local=bool(here and here.state & State.LOCAL),
        )

    # --- writing -----------------------------------------------------------------------------------------------------
    async def _put(self, call: calls.PutCall) -> calls.Written:
        return await (self._engine.streams.put(call) if call.put else self._engine.writes.put(call))

    # --- jobs --------------------------------------------------------------------------------------------------------
    async def _job(self, named: calls.JobNamed) -> calls.JobState:
        return self._engine.jobs.get(named.job)

    async def _jobs(self, _: calls.Nothing) -> list[calls.JobState]:
        return self._engine.jobs.all()

    async def _job_cancel(self, named: calls.JobNamed) -> calls.JobState:
        return await self._engine.jobs.cancel(named.job)

    # --- how the node is ---------------------------------------------------------------------------------------------
    async def _status(self, _: calls.Nothing) -> NodeState:
        engine = self._engine
        usages = engine.store.usage()
        served = {each.bucket.name: each for each in engine.buckets.served()}
        buckets = [
            self._bucket_state(bucket, usages, served[bucket.name].error if bucket.name in served else "")
            for bucket in engine.buckets.shown()
        ]
        return NodeState(
            node_id=engine.node_id,
            version=forebay.__version__,
            engine_pid=os.getpid(),
            started_s=engine.started_s,
            endpoint=engine.settings.endpoint,
            fronts=[FrontState(seen.front, seen.pid) for seen in engine.fronts.present()],
            volumes=engine.volumes.states(usages),
            buckets=buckets,
            flights=len(engine.cold.all_flights),
            reads=engine.cold.reads,
            jobs_running=engine.jobs.running,
            pass_bytes=engine.cold.pass_bytes,
            derived_bytes=derived_bytes(usages),
            cluster=self._cluster_state(),
            catching_up=not engine.catching_up.is_done,
        )

    def _cluster_state(self) -> ClusterState | None:
        seat, shared = self._engine.seat, self._engine.shared_buckets
        if seat is None or shared is None:
            return None
        return msgspec.structs.replace(seat.state(), lagging=shared.lagging)

    def _bucket_state(self, bucket: Bucket, usages: list[VolumeUsage], error: str) -> BucketState:
        owed, places = self._engine.flusher.totals(bucket.name), _places_of(bucket)
        return BucketState(
            bucket.name,
            bucket.url,
            sum(usage.buckets.get(name, 0) for usage in usages for name in (*places, versions_of(bucket.name))),
            bucket.quota_bytes,
            f"flush of {owed.error}" if owed.error else error,
            owed.bytes,
            owed.objects,
            owed.since_s,
            owed.flushing,
            owed.conflicts,
            sum(map(self._lost_objects, places)),
            sorted({each for name in places for each in self._engine.volumes.missing(name)}),
            owed.error,
        )

    def _lost_objects(self, bucket: str) -> int:
        store = self._engine.store
        return len(store.lost_in(bucket)) + sum(1 for _ in store.partly_lost(bucket))

    async def _lost(self, call: calls.LostCall) -> list[LostObject]:
        store = self._engine.store
        bucket = next((bucket for bucket in self._engine.buckets.shown() if bucket.name == call.bucket), None)
        if bucket is None:
            raise no_bucket(call.bucket)
        places = _places_of(bucket)
        if call.keys:
            named = (store.lost_of(name, key) for key in call.keys[: limits.LIST_KEYS_MAX] for name in places)
            found = [lost for lost in named if lost is not None]
        else:
            listed = (store.lost_in(name, call.prefix, call.start_after, limits.LIST_KEYS_MAX) for name in places)
            found = [lost for each in listed for lost in each]
        whole = [
            LostObject(each.bucket, each.key, each.record.size_bytes, each.record.modified_s, each.problem)
            for each in found
        ]

        def asked(key: str) -> bool:
            return key in call.keys if call.keys else key.startswith(call.prefix) and key > call.start_after

        partly = [each for name in places for each in store.partly_lost(name) if asked(each.key)]
        return sorted([*whole, *partly], key=lambda each: each.key)[: limits.LIST_KEYS_MAX]

    async def _lost_give_up(self, call: calls.LostCall) -> list[LostObject]:
        found = [each for each in await self._lost(call) if not each.ranges]  # the others can be read in part
        for each in found:
            await self._engine.writes.give_up(each.bucket, each.key)
        return found

    async def _volume_give_up(self, named: calls.VolumeNamed) -> VolumeState:
        if self._engine.replicas is not None:
            return await self._engine.replicas.returns.give_up(named)
        return await self._engine.volumes.give_up(named)

    async def _map(self, _: calls.Nothing) -> NodeMap:
        seat = self._engine.seat
        if seat is not None:
            return seat.map()
        return NodeMap(1, [MapNode(self._engine.node_id, self._engine.settings.endpoint)])

    async def _owed(self, call: calls.ListCall) -> list[tuple[str, ListEntry | None]]:
        bucket = (await self._engine.buckets.get(call.bucket)).bucket
        if self._engine.homes is not None:
            self._engine.homes.check_whole(bucket)
        return await self._engine.pages.owed(bucket, call.prefix, call.start_after)

    async def _claim(self, named: calls.ObjectNamed) -> bool:
        if self._engine.homes is None:
            raise Invalid("this node is of no cluster: start it with --cluster, or ask one that is")
        return await self._engine.homes.claim(named.bucket, named.key)

    async def _copies(self, call: CopiesCall | CheckSlices) -> CopiesSaid:
        if isinstance(call, CheckSlices):
            if self._engine.slices is None:
                raise Invalid("this node keeps no slices: start it with --cluster, and --peer-key where others have it")
            return await self._engine.slices.check(call)
        if self._engine.replicas is None:
            raise Invalid("this node is of no cluster: start it with --cluster, or ask one that is")
        return await self._engine.replicas.kept.answer(call)

    async def _wish(self, call: calls.WishCall) -> ClusterNode:
        if self._engine.seat is None:
            raise Invalid("this node is of no cluster: start it with --cluster, or ask one that is")
        return await self._engine.seat.want(call.node, call.wish)

    async def _metrics(self, _: calls.Nothing) -> Snapshot:
        return merge([self.snapshot(), *await self._engine.fronts.snapshots()])

    def snapshot(self) -> Snapshot:
        """The engine's own counters and gauges."""
        engine = self._engine
        counted = engine.tally.snapshot(engine.buckets.counters.items())
        values = dict(counted.values)
        values["forebay_flights"] = len(engine.cold.all_flights)
        for bucket, permits in engine.cold.all_permits.items():
            values[series("forebay_fetches_waiting", bucket=bucket)] = permits.waiting
        values["forebay_pass_bytes"] = engine.cold.pass_bytes
        values["forebay_jobs_running"] = engine.jobs.running
        values["forebay_prestaging"] = engine.prestaging.waiting
        values["forebay_hint_jobs"] = len(engine.hinting.hints.jobs)
        values["forebay_corrupt_blocks_total"] = engine.store.bad_blocks
        values["forebay_scrubbed_bytes_total"] = engine.scrubber.bytes_checked
        objects = 0
        for usage in engine.store.usage():
            volume = usage.volume_id
            values[series("forebay_volume_bytes", volume=volume)] = usage.used_bytes
            values[series("forebay_volume_capacity_bytes", volume=volume)] = usage.capacity_bytes
            objects += usage.objects
        values["forebay_objects"] = objects
        for each in engine.buckets.all():
            values[series("forebay_lost_objects", bucket=each.name)] = self._lost_objects(each.name)
        for process, reason, count in engine.restarts:
            values[series("forebay_process_restarts_total", process=process, reason=reason)] = count
        values |= engine.flusher.metrics() | engine.volumes.metrics()
        if engine.seat is not None:
            values |= engine.seat.metrics()
        if engine.slices is not None:
            values |= engine.slices.metrics()
        if engine.replicas is not None:
            values["forebay_kept_copies"] = len(engine.replicas.kept.ledger.copies)
        snapshot = Snapshot(values | vitals("engine", engine.started_s), counted.histograms)
        snapshot.check()
        return snapshot


def _places_of(bucket: Bucket) -> list[str]:
    """The buckets that hold what belongs to a bucket: itself, and the entries of one that is coded."""
    return [bucket.name] if code_of(bucket.url) is None else [bucket.name, entries_of(bucket.name)]
