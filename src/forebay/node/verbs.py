"""What the engine answers to calls (`core/calls.py`): buckets, listings, objects, jobs, and how the node is.

Theory. One method for each verb, and a table. Nothing here decides about bytes; it asks the parts that do.

Secrets in bucket options leave the engine only towards its fronts' own use (`Welcome`); an answer shows HIDDEN in their
place, and a bucket that comes back with HIDDEN keeps what it had.

Invariant. Every verb of `core.calls.VERBS` is served.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

import forebay
from forebay.core import calls, limits
from forebay.core.errors import Bug, Invalid
from forebay.core.freshness import fresh_until_s
from forebay.core.metrics import Snapshot, merge, series
from forebay.core.record import Record, State, blocks_in
from forebay.core.types import Bucket, check_bucket_name, check_key
from forebay.node.buckets import Buckets
from forebay.node.cold import ColdReads
from forebay.node.fronts import Fronts
from forebay.node.jobs.runner import Jobs
from forebay.node.jobs.work import JobWork
from forebay.node.read import Ask
from forebay.node.records import cached_bytes, headers_of, present_blocks
from forebay.node.room import Room
from forebay.node.settings import Settings
from forebay.node.store import Scrubber, Store, StoreReader
from forebay.node.tally import Tally
from forebay.node.vitals import vitals
from forebay.ports.clock import Clock

HIDDEN = "***"
_SECRET_WORDS = ("secret", "token", "password", "key", "sas", "credential")
SCAN_PAGES_MAX = 100  # index pages looked through for one page of a listing with a delimiter


class Engine(Protocol):
    """The parts of the engine that calls ask."""

    settings: Settings
    node_id: str
    started_s: float
    clock: Clock
    store: Store
    index: StoreReader
    buckets: Buckets
    cold: ColdReads
    room: Room
    fronts: Fronts
    jobs: Jobs
    work: JobWork
    tally: Tally
    scrubber: Scrubber


def _is_secret(option: str) -> bool:
    return option != "access_key_id" and any(word in option.lower() for word in _SECRET_WORDS)


def hide_secrets(bucket: Bucket) -> Bucket:
    """The bucket as people may see it."""
    shown = {name: HIDDEN if _is_secret(name) else value for name, value in bucket.options.items()}
    return msgspec.structs.replace(bucket, options=shown)


class Verbs:
    """See the module's header."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._table: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "buckets": self._buckets,
            "bucket_put": self._bucket_put,
            "bucket_delete": self._bucket_delete,
            "bucket_check": self._bucket_check,
            "list": self._list,
            "list_cached": self._list_cached,
            "stat": self._stat,
            "job": self._job,
            "jobs": self._jobs,
            "job_cancel": self._job_cancel,
            "status": self._status,
            "map": self._map,
            "metrics": self._metrics,
        }

    async def answer(self, verb: str, arguments: Any) -> Any:
        """The answer to one call, of the type that `core.calls.VERBS` gives."""
        if isinstance(arguments, calls.JobCall):
            return await self._engine.jobs.start(verb, arguments)  # type: ignore[arg-type]
        serve = self._table.get(verb)
        if serve is None:
            raise Bug(f"the call {verb} is not served: please report it")
        return await serve(arguments)

    # --- buckets -----------------------------------------------------------------------------------------------------
    async def _buckets(self, _: calls.Nothing) -> list[Bucket]:
        return [hide_secrets(bucket) for bucket in self._engine.buckets.all()]

    async def _bucket_put(self, bucket: Bucket) -> Bucket:
        if bucket.freshness_s < 0:
            raise Invalid("freshness is negative: use immutable, always, or a time like 60s")
        if bucket.quota_bytes is not None and bucket.quota_bytes < limits.BLOCK_BYTES:
            raise Invalid(f"a quota below one block ({limits.BLOCK_BYTES} bytes) keeps nothing: give more, or none")
        old = {each.name: each for each in self._engine.buckets.all()}.get(bucket.name)
        if old is not None:
            options = {n: old.options.get(n, "") if v == HIDDEN else v for n, v in bucket.options.items()}
            bucket = msgspec.structs.replace(bucket, options=options)
        kept = await self._engine.buckets.put(bucket)
        if old is not None and (old.url, old.options) != (kept.url, kept.options):
            self._engine.cold.leave(kept.name)
            await self._engine.work.evict_bucket(kept.name)  # cached from another place, perhaps: not this bucket's
        return hide_secrets(kept)

    async def _bucket_delete(self, named: calls.BucketNamed) -> calls.Nothing:
        await self._engine.buckets.delete(named.name)
        self._engine.cold.leave(named.name)
        await self._engine.work.evict_bucket(named.name)
        return calls.Nothing()

    async def _bucket_check(self, named: calls.BucketNamed) -> calls.Nothing:
        await (await self._engine.buckets.get(named.name)).backend.probe()
        return calls.Nothing()

    # --- listings ----------------------------------------------------------------------------------------------------
    async def _list(self, call: calls.ListCall) -> Any:
        served = await self._engine.buckets.get(call.bucket)
        limit = max(1, min(call.limit, limits.LIST_KEYS_MAX))
        return await served.backend.list_page(call.prefix, call.delimiter, call.start_after, limit)

    async def _list_cached(self, call: calls.ListCall) -> calls.CachedPage:
        check_bucket_name(call.bucket)
        limit = max(1, min(call.limit, limits.LIST_KEYS_MAX))
        entries: list[calls.CachedEntry] = []
        prefixes: list[str] = []
        after = call.start_after
        for _ in range(SCAN_PAGES_MAX):
            room = limit - len(entries) - len(prefixes)
            found = self._engine.index.scan(call.bucket, call.prefix, after, room)
            for key, record in found:
                cut = key.find(call.delimiter, len(call.prefix)) if call.delimiter else -1
                if cut < 0:
                    entries.append(_cached_entry(key, record))
                    after = key
                elif not prefixes or not key.startswith(prefixes[-1]):
                    prefixes.append(key[: cut + len(call.delimiter)])
                    after = prefixes[-1] + "\U0010ffff"
                    break  # nothing below it is shown: go on behind it
            else:
                if len(found) < room:
                    return calls.CachedPage(entries, prefixes)
            if len(entries) + len(prefixes) >= limit:
                break
        return calls.CachedPage(entries, prefixes, after)

    async def _stat(self, call: calls.StatCall) -> calls.ObjectState:
        engine = self._engine
        check_key(call.key)
        served = await engine.buckets.get(call.bucket)
        record = await engine.cold.metadata(Ask(call.bucket, call.key, revalidate=call.revalidate), served)
        here = engine.store.lookup(call.bucket, call.key)
        if here is not None and here.version != record.version:
            here = None
        checked_s = here.checked_s if here is not None else record.checked_s
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
            fresh_until_s=fresh_until_s(checked_s, served.bucket.freshness_s),
            headers=dict(headers_of(record)),
            volume=engine.store.volume_of(call.bucket, call.key) if here else "",
            blocks=blocks_in(record.size_bytes),
            cached_blocks=len(present_blocks(here)) if here else 0,
        )

    # --- jobs --------------------------------------------------------------------------------------------------------
    async def _job(self, named: calls.JobNamed) -> calls.JobState:
        return self._engine.jobs.get(named.job)

    async def _jobs(self, _: calls.Nothing) -> list[calls.JobState]:
        return self._engine.jobs.all()

    async def _job_cancel(self, named: calls.JobNamed) -> calls.JobState:
        return await self._engine.jobs.cancel(named.job)

    # --- how the node is ---------------------------------------------------------------------------------------------
    async def _status(self, _: calls.Nothing) -> calls.NodeState:
        engine = self._engine
        usages = engine.store.usage()
        served = {each.bucket.name: each for each in engine.buckets.served()}
        volumes = [
            calls.VolumeState(
                usage.volume_id,
                usage.path,
                {"ok": "ok", "full": "full"}.get(usage.state, "out"),  # type: ignore[arg-type]
                usage.capacity_bytes,
                usage.used_bytes,
                usage.objects,
                usage.reason,
            )
            for usage in usages
        ]
        buckets = [
            calls.BucketState(
                bucket.name,
                bucket.url,
                sum(usage.buckets.get(bucket.name, 0) for usage in usages),
                bucket.quota_bytes,
                served[bucket.name].error if bucket.name in served else "",
            )
            for bucket in engine.buckets.all()
        ]
        return calls.NodeState(
            node_id=engine.node_id,
            version=forebay.__version__,
            engine_pid=os.getpid(),
            started_s=engine.started_s,
            endpoint=engine.settings.endpoint,
            fronts=[calls.FrontState(seen.front, seen.pid) for seen in engine.fronts.present()],
            volumes=volumes,
            buckets=buckets,
            flights=len(engine.cold.all_flights),
            reads=engine.cold.reads,
            jobs_running=engine.jobs.running,
            pass_bytes=engine.cold.budget.used_bytes,
        )

    async def _map(self, _: calls.Nothing) -> calls.NodeMap:
        return calls.NodeMap(1, [calls.MapNode(self._engine.node_id, self._engine.settings.endpoint)])

    async def _metrics(self, _: calls.Nothing) -> Snapshot:
        return merge([self.snapshot(), *await self._engine.fronts.snapshots()])

    def snapshot(self) -> Snapshot:
        """What the engine alone counted, and its gauges."""
        engine = self._engine
        counted = engine.tally.snapshot(engine.buckets.counters.items())
        values = dict(counted.values)
        values["forebay_flights"] = len(engine.cold.all_flights)
        values["forebay_pass_bytes"] = engine.cold.budget.used_bytes
        values["forebay_jobs_running"] = engine.jobs.running
        values["forebay_scrubbed_bytes_total"] = engine.scrubber.bytes_checked
        objects = 0
        for usage in engine.store.usage():
            volume = usage.volume_id
            values[series("forebay_volume_bytes", volume=volume)] = usage.used_bytes
            values[series("forebay_volume_capacity_bytes", volume=volume)] = usage.capacity_bytes
            values[series("forebay_volume_up", volume=volume)] = float(usage.state != "out")
            objects += usage.objects
        values["forebay_objects"] = objects
        snapshot = Snapshot(values | vitals("engine", engine.started_s), counted.histograms)
        snapshot.check()
        return snapshot


def _cached_entry(key: str, record: Record) -> calls.CachedEntry:
    return calls.CachedEntry(
        key,
        record.size_bytes,
        record.etag,
        record.modified_s,
        cached_bytes(record),
        bool(record.state & State.PINNED),
        bool(record.state & State.DIRTY),
    )
