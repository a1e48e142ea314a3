"""Makes, changes and deletes buckets: what keeps that from losing something, and how a cluster hears of it.

Theory. A change that moves a bucket, or changes how it is written, first stops the writes of the bucket, then checks
that the node owes its backend nothing, and evicts what is cached from the old place. Deleting does the same.

In a cluster a bucket is the cluster's (`shared_buckets.py`), unless the caller says `here`. What this module does is
done at one node: for the caller there, and by each other node when it hears of it.

Invariant. No change gives up what only the node has, unless the caller forces it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from forebay.backends.bounds import Bounds
from forebay.backends.locate import same_place
from forebay.core import limits
from forebay.core.backend_options import hide_secrets, with_secrets
from forebay.core.cluster.coding import code_of, entries_of
from forebay.core.errors import Busy, Denied, Exists, Invalid, NotFound
from forebay.core.messages import calls
from forebay.core.quantity import counted
from forebay.core.record import State
from forebay.core.s3rules.compat.cors import check_rules
from forebay.core.types import Bucket
from forebay.node.engine.buckets import Buckets, no_bucket
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.jobs.runner import Jobs
from forebay.node.engine.jobs.work import JobWork
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.pages import Pages
from forebay.node.engine.replicas import Replicas
from forebay.node.engine.seat import Seat
from forebay.node.engine.shared_buckets import SharedBuckets
from forebay.node.engine.write.uploads import UploadBook
from forebay.node.engine.write.writes import Writes
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.volumes import object_lost
from forebay.node.store.writer.writer import Store

COPIES_IN_CLUSTER = 2


class Engine(Protocol):
    """What buckets need of the engine."""

    bounds: Bounds
    buckets: Buckets
    cold: ColdReads
    flusher: Flusher
    index: StoreReader
    jobs: Jobs
    pages: Pages
    replicas: Replicas | None
    seat: Seat | None
    store: Store
    uploads: UploadBook
    work: JobWork
    writes: Writes

    def flush(self) -> None: ...


class BucketVerbs:
    """See the module's header. `shared` (set it in a cluster) tells the other nodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.shared: SharedBuckets | None = None

    # --- calls -------------------------------------------------------------------------------------------------------
    async def put(self, call: calls.BucketPutCall) -> Bucket:
        """Create or change a bucket; its secrets are hidden in the answer."""
        if self.shared is not None and not call.here:
            self.shared.check(call.bucket)
        return await self._change(call.bucket.name, lambda: self.put_here(call), here=call.here)

    async def create(self, bucket: Bucket) -> Bucket:
        """As `put` by its `owner`; `Exists` for one that is there."""

        async def create_here() -> Bucket:
            if self.kept(bucket.name) is not None:
                raise _there_already(bucket.name)
            return await self.put_here(calls.BucketPutCall(bucket, free=True, maker=bucket.owner))

        return await self._change(bucket.name, create_here)

    async def rules(self, call: calls.BucketRulesCall) -> Bucket:
        """Change what S3 lets a bucket's admin change."""

        async def rules_here() -> Bucket:
            async with self._engine.buckets.settings:
                bucket = (await self._engine.buckets.get(call.name)).bucket
                _check_owner(bucket, call.maker)
                if call.acl is not None:
                    bucket = msgspec.structs.replace(bucket, acl=call.acl)
                if call.cors is not None:
                    bucket = msgspec.structs.replace(bucket, cors=call.cors)
                return await self._engine.buckets.put(bucket)

        return await self._change(call.name, rules_here)

    async def _change(self, name: str, make: Callable[[], Awaitable[Bucket]], *, here: bool = False) -> Bucket:
        """Have `make` change the bucket here, then all nodes of the cluster unless it is `here` alone."""
        changed = await (make() if self.shared is None or here else self.shared.change(name, make))
        return hide_secrets(changed)

    async def delete(self, named: calls.BucketNamed) -> calls.Nothing:
        """Forget a bucket and what is cached of it."""
        bucket = self.kept(named.name)
        if named.name.startswith("-"):
            raise no_bucket(named.name)
        if bucket is not None and code_of(bucket.url) is not None and named.here and not named.force:
            raise _of_all(bucket)
        if self.shared is None or named.here:
            await self.delete_here(named)
            return calls.Nothing()

        async def delete_here() -> None:
            bucket = self.kept(named.name)
            if bucket is not None and bucket.is_of_nodes and not named.force:
                await self._empty_everywhere(bucket)
            await self.delete_here(named)

        await self.shared.delete(named.name, delete_here)
        return calls.Nothing()

    async def _empty_everywhere(self, bucket: Bucket) -> None:
        served = await self._engine.buckets.get(bucket.name)
        page = await self._engine.pages.page(served, calls.ListCall(bucket.name, limit=1))
        if page.entries:
            raise Exists(
                f"bucket {bucket.name} holds objects, of which the cluster's nodes have the only copies: delete them "
                "first, then the bucket",
                code="BucketNotEmpty",
            )

    # --- at this node ------------------------------------------------------------------------------------------------
    def kept(self, name: str) -> Bucket | None:
        """The bucket as this node has it."""
        return next((bucket for bucket in self._engine.buckets.shown() if bucket.name == name), None)

    async def put_here(self, call: calls.BucketPutCall) -> Bucket:
        """As `put`, at this node alone, with its secrets in the answer."""
        bucket, buckets = call.bucket, self._engine.buckets
        if bucket.freshness_s < 0:
            raise Invalid("freshness is negative: use immutable, always, or a time like 60s")
        if bucket.quota_bytes is not None and bucket.quota_bytes < limits.BLOCK_BYTES:
            raise Invalid(f"a quota below one block ({limits.BLOCK_BYTES} bytes) keeps nothing: give more, or none")
        if bucket.dirty_bytes_max is not None and bucket.dirty_bytes_max < 0:
            raise Invalid(
                "dirty_bytes_max is negative: give bytes, or leave it out for a quarter of the node's capacity"
            )
        if bucket.cors:
            check_rules(bucket.cors)
        old = self.kept(bucket.name)
        if call.maker:
            await self._check_maker(call, old)
        owner = old.owner if old else call.maker
        copies = bucket.copies or (old.copies if old else self._copies(call))
        bucket = msgspec.structs.replace(with_secrets(bucket, old), owner=owner, copies=copies)
        if old is None or (old.url, old.options) != (bucket.url, bucket.options):
            held = not call.free
        else:  # who may set it anyhow may also take it on as it is
            held = old.held and (bucket.held or not call.free)
        bucket = msgspec.structs.replace(bucket, held=held)
        self._engine.bounds.check(bucket)
        is_coded = code_of(bucket.url) is not None
        if is_coded and call.here:
            raise _of_all(bucket)
        if call.check and not is_coded:  # where one that is coded has its entries is there when the bucket is
            await buckets.try_out(bucket)  # before anything is given up
        if old is not None and not same_place(old, bucket) and code_of(old.url) is not None and not call.force:
            await self._empty_everywhere(old)
        return await self._make(bucket, old, force=call.force)

    def _copies(self, call: calls.BucketPutCall) -> int:
        """Of a new bucket whose maker does not say. Two need nodes that all know the bucket, and each other."""
        all_know = self.shared is not None and self.shared.reaches_others and not call.here
        return COPIES_IN_CLUSTER if all_know else 1

    async def take_up(self, bucket: Bucket) -> None:
        """Have the bucket as the cluster has it. `Busy` while that would lose something."""
        self._engine.bounds.check(bucket)
        await self._make(bucket, self.kept(bucket.name), force=False, as_it_is=True)

    def takes_writes(self, name: str, does: bool) -> None:
        """Whether the bucket takes writes at this node."""
        closing = self._engine.writes.closing
        (closing.discard if does else closing.add)(name)

    async def _make(self, bucket: Bucket, old: Bucket | None, *, force: bool, as_it_is: bool = False) -> Bucket:
        """`as_it_is`: with the time at which it says it was made."""
        if old is None:
            return await self._keep(bucket, None, as_it_is)
        moved = not same_place(old, bucket)
        again = bucket.is_kept_twice and not old.is_kept_twice  # what is there has one copy, and nobody would know
        if not moved and old.write == bucket.write and not again:
            kept = await self._keep(bucket, old, as_it_is)
            self._engine.flusher.try_again(bucket.name)  # what failed may have failed for want of the new key
            return kept
        async with self._engine.writes.quiet(bucket.name):
            if force:
                await self._give_up(old)
            await self._settled(bucket.name, "change where or how it is written")
            if bucket.write != "local" or again:
                await self._empty(old, "change the bucket")
            if moved:
                await self._engine.uploads.abort_bucket(bucket.name)  # their parts are at the old place
            kept = await self._keep(bucket, old, as_it_is)
            if moved:
                self._engine.cold.leave(kept.name)
                await self._engine.work.evict_bucket(kept.name)  # cached objects may be from the old place
        return kept

    async def delete_here(self, named: calls.BucketNamed) -> None:
        """As `delete`, at this node alone."""
        async with self._engine.writes.quiet(named.name):
            bucket = self.kept(named.name)
            if bucket is not None:
                _check_owner(bucket, named.maker)
                if named.force:
                    await self._give_up(bucket)
                    if self._engine.replicas is not None:
                        await self._engine.replicas.kept.give_up(named.name)
                await self._settled(named.name, "delete the bucket")
                await self._empty(bucket, "delete the bucket")
                await self._engine.uploads.abort_bucket(named.name)
            await self._engine.buckets.delete(named.name)
            self._engine.cold.leave(named.name)
            await self._engine.work.evict_bucket(named.name)
        await self._engine.jobs.forget(named.name)

    async def _check_maker(self, call: calls.BucketPutCall, old: Bucket | None) -> None:
        """Return if the bucket is the maker's, or nobody's. A name that stands for what the node's credentials reach is
        taken: a bucket made under it would be read in its place."""
        if old is None:
            try:
                old = (await self._engine.buckets.get(call.bucket.name)).bucket
            except NotFound:
                return
        if old.owner != call.maker:
            raise Exists(
                f"the name {call.bucket.name} is not available: somebody else has it, choose another",
                code="BucketAlreadyExists",
            )

    async def _keep(self, bucket: Bucket, old: Bucket | None, as_it_is: bool) -> Bucket:
        """Make `bucket` what it is to be, if it still is what it was: who had it tried out may have let it wait for
        long, and it may be another's by now."""
        async with self._engine.buckets.settings:
            now = self.kept(bucket.name)
            if now is not old:
                raise (
                    _there_already(bucket.name)
                    if old is None
                    else Busy(f"bucket {bucket.name} was changed or deleted meanwhile: look at it, then try again")
                )
            kept = await self._engine.buckets.put(bucket, as_it_is=as_it_is)
        if self._engine.seat is not None:
            await self._engine.seat.told_of(kept)
        return kept

    # --- nothing is lost ---------------------------------------------------------------------------------------------
    async def _settled(self, bucket: str, change: str) -> None:
        """Check that `change` loses nothing. `Busy` while the node owes the bucket's backend something, `VolumeMissing`
        while a missing volume may owe something, `ObjectLost` while a lost object is not given up."""
        self._engine.store.check_bucket(bucket)
        for lost in self._engine.store.lost_in(bucket, limit=1):
            raise object_lost(lost)
        if self._engine.replicas is not None and self._engine.replicas.kept.has_any(bucket):
            raise Busy(
                f"this node keeps copies of what other nodes have of {bucket}: `forebay flush {bucket}`, or delete "
                f"that, then {change}; or give them up with --force",
                retry_after_s=5.0,
            )
        owed = self._engine.flusher.totals(bucket)
        if owed.objects:
            what = f"{counted(owed.objects, 'object')} or deletes ({owed.bytes} bytes)"
            raise Busy(
                f"bucket {bucket} has {what} that its backend has not got: `forebay flush {bucket}` first, then "
                f"{change}; or give them up with --force, which lists them",
                retry_after_s=5.0,
            )

    async def _give_up(self, bucket: Bucket) -> None:
        """Forget what the node has of the bucket and no backend has: writes, deletes, lost objects."""
        engine, name = self._engine, bucket.name
        engine.store.check_bucket(name)  # what a missing volume may owe is not given up here: `forebay volume give-up`
        engine.flush()
        while owed := engine.flusher.window(name, "", "", limits.LIST_KEYS_MAX):
            for key, _ in owed:
                await engine.writes.disown(name, key)
        for key in [lost.key for lost in engine.store.lost_in(name)]:
            await engine.writes.disown(name, key)
        for here in self._only_here(bucket):
            while found := engine.index.scan(here, limit=limits.LIST_KEYS_MAX):
                for key, _ in found:
                    await engine.writes.disown(here, key)
                engine.flush()
            if here != name and engine.replicas is not None:
                await engine.replicas.kept.give_up(here)

    async def _empty(self, bucket: Bucket, change: str) -> None:
        """`Exists` while a local bucket holds objects, which exist nowhere else."""
        self._engine.flush()
        if any(map(self._holds_some, self._only_here(bucket))):
            raise Exists(
                f"bucket {bucket.name} holds objects that are on this node alone: delete them first, then {change}; or "
                "give them up with --force, which lists them",
                code="BucketNotEmpty",
            )

    def _only_here(self, bucket: Bucket) -> list[str]:
        """What of the bucket no backend has, and this node or other nodes have: itself, or the entries of one that is
        coded, whose slices are nobody's without them."""
        if code_of(bucket.url) is not None:
            return [entries_of(bucket.name)]
        return [bucket.name] if bucket.write == "local" else []

    def _holds_some(self, bucket: str) -> bool:
        """Whether an object of the bucket is nowhere else. Of other nodes' there may be copies."""
        after = ""
        while found := self._engine.index.scan(bucket, "", after, limits.LIST_KEYS_MAX):
            if any(record.state & State.OWNED for _, record in found):
                return True
            after = found[-1][0]
        return False


def _check_owner(bucket: Bucket, maker: str) -> None:
    """`Denied` for somebody whose bucket this is no more."""
    if maker and bucket.owner != maker:
        raise Denied(f"{maker} did not make the bucket {bucket.name}: have 'admin:{bucket.name}' granted")


def _of_all(bucket: Bucket) -> Invalid:
    return Invalid(f"a bucket at {bucket.url} is of all nodes: leave --here out")


def _there_already(name: str) -> Exists:
    return Exists(f"there is a bucket {name} already: use it", code="BucketAlreadyOwnedByYou")
