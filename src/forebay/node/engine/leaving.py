"""What a node does for a cluster that goes to zero: says what is warm, writes the manifest, and stops.

Theory. Draining all nodes is draining each (`seat.py`): `forebay drain --all` asks for it, and waits. Then every node
owes nothing, and this part does the rest, one call at a time, each of which may be repeated. Whoever asks may die in
between, and asks again.

The manifest (`core/formats/manifest.py`) is written straight to the backend, since a bucket that is written back takes
no writes any more. It replaces only a manifest of the same cluster, under a condition: of two who write at once one is
refused. So it is read from the backend, too.

Invariants. (1) No manifest is written while a node that is not gone may have what no backend has. (2) A node stops only
if it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import msgspec

from forebay.backends.seam import Body
from forebay.core.errors import Exists, Invalid, NotFound, NotSupported, Unavailable
from forebay.core.formats.manifest import Manifest, Span, Warm, WarmObjects, decode, encode, fitting, hottest, joined
from forebay.core.formats.manifest import merged as merged_warm
from forebay.core.limits import MANIFEST_BYTES_MAX, WARM_OBJECTS_MAX
from forebay.core.messages.calls import ManifestCall, Nothing, ObjectNamed
from forebay.core.record import present_blocks
from forebay.core.types import check_key
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.seat import Seat
from forebay.node.store.disk.volume import Unit
from forebay.node.store.writer.writer import Store

log = logging.getLogger("forebay.leaving")


async def read_manifest(served: Served, key: str) -> tuple[Manifest, str]:
    """The manifest that the backend has, and its version. `Invalid` if the object is none."""
    name = f"s3://{served.bucket.name}/{key}"
    body = await served.backend.fetch(key)
    try:
        if body.info.size_bytes > MANIFEST_BYTES_MAX:
            raise Invalid(f"{name} is no manifest of a cluster, which is small: name what `forebay drain --all` wrote")
        data = b"".join([bytes(chunk) async for chunk in body])
    finally:
        await body.aclose()
    return decode(data, name), body.info.version


class Leaving:
    """See the module's header. `written` hears of a key that has another version now. Wait for `leaves`, then stop the
    node."""

    def __init__(
        self, seat: Callable[[], Seat | None], store: Store, buckets: Buckets, written: Callable[[str, str], object]
    ) -> None:
        self._seat, self._store, self._buckets, self._written = seat, store, buckets, written
        self.leaves = asyncio.Event()

    async def warm(self, _: Nothing) -> WarmObjects:
        """What is cached of buckets that have a backend."""
        found: list[Warm] = []
        count = 0
        for _volume, units in self._store.unit_batches(marked=False):
            for warm in self._warm_in(units):
                found.append(warm)
                count += 1
            if len(found) >= 2 * WARM_OBJECTS_MAX:
                found = hottest(found)
            await asyncio.sleep(0)
        kept = fitting(hottest(found))
        return WarmObjects(kept, count - len(kept))

    def _warm_in(self, units: list[Unit]) -> Iterator[Warm]:
        named = {bucket.name for bucket in self._buckets.all() if not bucket.is_of_nodes}
        before = 0
        for unit in units:
            if unit.object_id == before or unit.bucket not in named:
                continue
            before = unit.object_id
            record = self._store.lookup(unit.bucket, unit.key)
            if record is None or record.object_id != unit.object_id:
                continue
            spans: tuple[Span, ...] = ()
            if not record.complete:
                size_bytes, block_bytes = record.size_bytes, record.block_bytes
                starts = (block * block_bytes for block in present_blocks(record))
                spans = tuple(joined((start, min(start + block_bytes, size_bytes)) for start in starts))
            yield Warm(unit.bucket, unit.key, record.size_bytes, unit.used_minute, spans)

    async def manifest(self, named: ObjectNamed) -> Manifest:
        """What a cluster left in a bucket. `NotFound`; `Invalid` for another object."""
        served = await self._buckets.get(named.bucket)
        return (await read_manifest(served, check_key(named.key)))[0]

    async def write(self, call: ManifestCall) -> Manifest:
        """Write what the cluster leaves. `Exists` while it may owe something, or if another object is there."""
        self._check_all_gone()
        name = f"s3://{call.bucket}/{check_key(call.key)}"
        served = await self._buckets.get(call.bucket)
        if served.bucket.is_of_nodes or served.backend.read_only:
            raise Invalid(f"{name} goes with the nodes or cannot be written: name an object of a bucket with a backend")
        manifest, expect = call.manifest, ""
        try:
            before, expect = await read_manifest(served, call.key)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise
        except Invalid as error:
            raise Exists(f"{name} is something else ({error.message}): name an object that is not there") from None
        else:
            if before.cluster != manifest.cluster:
                raise Exists(f"{name} is what the cluster {before.cluster} left: name another object")
            if call.joined:
                warm = merged_warm([manifest.warm, before.warm])
                manifest = msgspec.structs.replace(manifest, warm=warm, left_out=manifest.left_out + before.left_out)
        data = encode(manifest)
        await self._put(served, call.key, Body(len(data), data), expect)
        self._written(call.bucket, call.key)
        log.info("the manifest of cluster %s is %s", manifest.cluster, name)
        return decode(data, name)

    async def _put(self, served: Served, key: str, body: Body, expect: str) -> None:
        headers = (("content-type", "application/json"),)
        try:
            await served.backend.put(key, body, headers=headers, expect=expect)
        except NotSupported:  # a backend without conditions
            await served.backend.put(key, body, headers=headers)

    async def stop(self, _: Nothing) -> Nothing:
        """End this node, once its answer is sent. `Exists` if it is not gone."""
        seat = self._known()
        own = next((node for node in seat.state().nodes if node.node_id == seat.state().node_id), None)
        if own is None or own.state != "gone":
            said = "unknown" if own is None else own.state
            raise Exists(
                f"this node is {said}: drain it first, so that nothing is lost, or stop it with `forebay down`"
            )
        self.leaves.set()
        return Nothing()

    def _check_all_gone(self) -> None:
        seat = self._known()
        state = seat.state()
        if not state.nodes or state.trouble:
            raise Unavailable(f"this node does not know the cluster ({state.trouble or 'not yet'}): ask another node")
        for node in state.nodes:
            if node.state != "gone":
                raise Exists(
                    f"node {node.node_id} is {node.state}, and may have what no backend has: wait until it is drained"
                )

    def _known(self) -> Seat:
        seat = self._seat()
        if seat is None:
            raise Invalid("this node is of no cluster: start it with --cluster, or ask one that is")
        return seat
