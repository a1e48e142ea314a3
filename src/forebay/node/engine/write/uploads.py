"""Multipart uploads of clients, at the engine: begun, filled, completed, aborted, found again after a stop.

Theory. An upload is an entry of the metadata store and a directory of parts (`node/engine/write/parts.py`). Everything
else is in memory, and can be rebuilt from these two. Complete and Abort close the upload first. A part that arrives
meanwhile waits for the outcome; it then belongs to the open upload, or is refused.

Complete chooses the parts (`core/machines/uploads.py`), joins them, notes in the metadata store what the object will
be, and commits it as a put would. The note stays for DONE_KEPT_S, so that a client whose answer was lost may ask again.
After a stop between note and end, the object's data file shows whether the commit happened: it is the first part's
file, or it is not.

In a bucket written through, the backend's own upload begins with ours and gets each part as it arrives. It is completed
while the parts are joined here. The metadata store notes that it is about to begin, and then its id, before the first
part. If the backend has no uploads, or lost ours, the joined file is put as a body would be.

`disk`: a part is on disk before it is acknowledged. Otherwise (`memory`, and `through`, where a part is only half of a
write that nobody has acknowledged) an upload does not survive a stop of the machine, and is aborted after it.

Rejected: parts as objects under hidden keys (listed, evicted and flushed by accident); joining as parts arrive (parts
are replaced, left out, and come in any order).

Invariants. (1) A file in `parts/` belongs to an upload of the metadata store, or is removed by the next sweep. (2) An
upload is either open or done, never both: its parts are removed only after its object is committed. (3) No upload whose
id we heard is left at a backend that answers, and none is aborted whose id we did not hear.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import logging
import os
from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from forebay.backends import lost_answers
from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import Busy, ForebayError, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.machines import uploads as rules
from forebay.core.machines.uploads import Part
from forebay.core.messages.calls import (
    Nothing,
    PartState,
    UploadCompleteCall,
    UploadCompleted,
    UploadCreateCall,
    UploadNamed,
    UploadPartCall,
    UploadParts,
    UploadPartsCall,
    Uploads,
    UploadsCall,
    UploadState,
    Written,
)
from forebay.core.types import Headers, ObjectInfo, check_key
from forebay.meta.seam import MetaStore
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.disk_wait import SharedThreads
from forebay.node.engine.write import parts as files
from forebay.node.engine.write import uploads_elsewhere
from forebay.node.engine.write.through_bodies import Filled
from forebay.node.outcomes import from_node
from forebay.node.store.disk.volume import refusal
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.uploads")
ResultT = TypeVar("ResultT")

PREFIX = "upload/"
SWEEP_EVERY_S = 3600.0
DONE_KEPT_S = 3600.0  # how long a Complete may be repeated
FULL_RETRY_S = 60.0


class Done(msgspec.Struct, array_like=True, frozen=True):
    """What an upload became, or is about to become (`committed` false). `etag` is computed from the parts, whatever the
    backend's ETag is."""

    at_s: float
    etag: str
    answer: UploadCompleted
    committed: bool = False


class UploadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An upload in the metadata store. `begin`: an upload at the backend is beginning, and its id is not known yet.
    `boot_id` is set if parts are not synced: they are valid until the machine stops."""

    bucket: str
    key: str
    upload_id: str
    created_s: float
    volume_id: str
    headers: Headers = ()
    checksum_algorithm: str = ""
    checksum_type: str = ""
    tags: str = ""
    boot_id: str = ""
    begin: bool = False
    backend_id: str = ""
    aborting: bool = False
    done: Done | None = None

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.bucket}/{self.upload_id}"

    @property
    def state(self) -> UploadState:
        return UploadState(
            self.bucket, self.key, self.upload_id, self.created_s, self.checksum_algorithm, self.checksum_type
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(UploadRecord).decode


class Upload:
    """One open upload in memory. Whoever ends it holds `closing`; `gone`: it has ended."""

    def __init__(self, kept: UploadRecord) -> None:
        self.kept = kept
        self.parts: dict[int, Part] = {}
        self.tokens: dict[int, str] = {}  # the backend's tokens of parts, as far as known
        self.seq = 0
        self.gone = False
        self.passed = False  # the backend's upload became the object
        self.unheard = kept.done is not None  # the backend may have completed it in an attempt without an answer
        self.tried_s = kept.done.at_s if kept.done is not None else 0.0  # Unix time of the first attempt; 0: none
        self.closing = asyncio.Lock()
        self._arriving = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._turns: dict[int, asyncio.Lock] = {}

    @asynccontextmanager
    async def arrival(self, number: int) -> AsyncIterator[None]:
        """Spans the placing of a part. Parts of one number are placed one after the other, and the directory stays
        until then."""
        self._arriving += 1
        self._quiet.clear()
        turn = self._turns.setdefault(number, asyncio.Lock())
        try:
            async with turn:
                if self.gone:
                    raise rules.no_such_upload(self.kept.upload_id)
                yield
        finally:
            self._arriving -= 1
            if self._arriving == 0:
                self._turns.clear()
                self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no part is being placed."""
        await self._quiet.wait()


class UploadBook:
    """Every upload of the node. `load` before use; `tend` in the background; `aclose` at the end.

    `store` and `writes` are the engine's; `workers` are threads that move bytes; `index` names temp files.
    """

    def __init__(
        self,
        meta: MetaStore,
        buckets: Buckets,
        store: Any,
        index: Any,
        writes: Any,
        clock: Clock,
        chance: Chance,
        workers: Executor,
        *,
        boot_id: str,
    ) -> None:
        self._meta = meta
        self._buckets = buckets
        self._store = store
        self._index = index
        self._writes = writes
        self._clock = clock
        self._chance = chance
        self._work = SharedThreads(store, workers).work  # a function of `parts`, whose first argument is a path
        self._boot_id = boot_id
        self._open: dict[str, Upload] = {}
        self._done: dict[str, UploadRecord] = {}
        self._aborting: dict[str, UploadRecord] = {}
        self._names: dict[str, list[tuple[str, str]]] = {}  # by bucket: (key, id) of open uploads, sorted
        self._completing: dict[str, tuple[UploadCompleteCall, asyncio.Task[UploadCompleted]]] = {}
        self._clearing: set[str] = set()  # done, but not noted yet: the parts are the proof
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- the verbs ---------------------------------------------------------------------------------------------------
    async def create(self, call: UploadCreateCall) -> UploadState:
        """Begin an upload. It is stored before this returns."""
        return await self._whole(self._buckets.again(lambda: self._create(call)))

    async def part(self, call: UploadPartCall) -> PartState:
        """Take a part. The file `call.path` is gone afterwards in any case."""
        return await self._whole(self._take_all(call))

    async def parts(self, call: UploadPartsCall) -> UploadParts:
        """A page of an upload's parts."""
        return await self._buckets.again(lambda: self._parts(call))

    async def _parts(self, call: UploadPartsCall) -> UploadParts:
        if (there := await self._elsewhere(call.bucket, call.upload_id)) is not None:
            return await uploads_elsewhere.parts(there, call)
        upload = self.find(call.bucket, call.key, call.upload_id)
        numbers = sorted(number for number in upload.parts if number > call.after)
        shown = numbers[: max(0, min(call.limit, limits.LIST_KEYS_MAX))]
        kept = upload.kept
        headers = (*kept.headers, ("x-amz-tagging", kept.tags)) if kept.tags else kept.headers
        state = msgspec.structs.replace(kept.state, headers=headers)
        return UploadParts(state, [_state(upload.parts[number]) for number in shown], len(numbers) > len(shown))

    async def complete(self, call: UploadCompleteCall) -> UploadCompleted:
        """Make the object from the named parts. A repeated call, meanwhile or after a lost answer, gets the same
        answer."""
        asked, work = self._completing.get(call.upload_id, (None, None))
        if work is None or asked != call:
            work = self._spawn(self._buckets.again(lambda: self._complete(call)))
            self._completing[call.upload_id] = call, work
            work.add_done_callback(functools.partial(self._completed, call))
        return await asyncio.shield(work)

    def _completed(self, call: UploadCompleteCall, work: asyncio.Task[UploadCompleted]) -> None:
        if self._completing.get(call.upload_id) == (call, work):
            del self._completing[call.upload_id]

    async def abort(self, call: UploadNamed) -> Nothing:
        """Forget the upload and its parts."""
        return await self._buckets.again(lambda: self._abort_any(call))

    async def _abort_any(self, call: UploadNamed) -> Nothing:
        if (there := await self._elsewhere(call.bucket, call.upload_id)) is not None:
            await there.backend.abort_upload(call.key, call.upload_id)
            return Nothing()
        return await self._whole(self._abort(self.find(call.bucket, call.key, call.upload_id)))

    async def uploads(self, call: UploadsCall) -> Uploads:
        """A page of a bucket's open uploads, of all nodes of the cluster."""
        return await self._buckets.again(lambda: self._uploads(call))

    async def _uploads(self, call: UploadsCall) -> Uploads:
        served, homes = await self._buckets.get(call.bucket), self._buckets.homes
        limit = max(0, min(call.limit, limits.LIST_KEYS_MAX))
        page, more = rules.page_of(self._names.get(call.bucket, []), call.prefix, call.after_key, call.after_id, limit)
        pages = [Uploads([self._open[upload_id].kept.state for _, upload_id in page], more)]
        if homes is not None:
            pages += await homes.uploads(served.bucket, msgspec.structs.replace(call, limit=limit))
        found = sorted((each for page in pages for each in page.uploads), key=lambda each: (each.key, each.upload_id))
        return Uploads(found[:limit], len(found) > limit or any(page.more for page in pages))

    async def abort_bucket(self, bucket: str) -> int:
        """Abort every open upload of a bucket that goes, and forget those that are done; return how many were open."""
        count = 0
        for _, upload_id in list(self._names.get(bucket, [])):
            if (upload := self._open.get(upload_id)) is not None:
                await self._whole(self._abort(upload))
                count += 1
        for kept in [each for each in self._done.values() if each.bucket == bucket]:
            self._done.pop(kept.upload_id, None)
            await self._meta.delete(kept.name)
        return count

    async def check(self, bucket: str, key: str, upload_id: str) -> None:
        """`NotFound` (`NoSuchUpload`) unless there is such an open upload, or another node says."""
        if await self._elsewhere(bucket, upload_id) is None:
            self.find(bucket, key, upload_id)

    async def _elsewhere(self, bucket: str, upload_id: str) -> Served | None:
        """The bucket with the node in its backend's place that has the upload; None if that is this one."""
        homes = self._buckets.homes
        if homes is None or upload_id in self._open or upload_id in self._done:
            return None
        return homes.upload_at(await self._buckets.get(bucket), upload_id)

    def find(self, bucket: str, key: str, upload_id: str) -> Upload:
        """The open upload; `NotFound` (`NoSuchUpload`)."""
        upload = self._open.get(upload_id)
        if upload is None or (upload.kept.bucket, upload.kept.key) != (bucket, key):
            raise rules.no_such_upload(upload_id)
        return upload

    # --- beginning ---------------------------------------------------------------------------------------------------
    async def _create(self, call: UploadCreateCall) -> UploadState:
        check_key(call.key)
        algorithm, kind = rules.settle_checksum(call.checksum_algorithm, call.checksum_type)
        async with self._writes.entered(call.bucket, call.key) as served:
            if served.of is not None:
                return await uploads_elsewhere.begin(served, call, self._clock.wall_s(), algorithm, kind)
            return await self._begin(served, call, algorithm, kind)

    async def _begin(self, served: Served, call: UploadCreateCall, algorithm: str, kind: str) -> UploadState:
        bucket, backend = served.bucket, served.backend
        if backend.read_only and bucket.write != "local":
            raise NotSupported(f"bucket {bucket.name} is read-only at {bucket.url}: write to another bucket")
        if len(self._names.get(call.bucket, [])) >= limits.UPLOADS_MAX:
            raise Busy(
                f"bucket {bucket.name} has {limits.UPLOADS_MAX} open uploads: complete or abort some first",
                code="SlowDown",
                retry_after_s=FULL_RETRY_S,
            )
        self._store.free_to_write(call.bucket, call.key, 0)
        created_s, homes = self._clock.wall_s(), self._buckets.homes
        node = "" if homes is None else homes.node_id  # any node is asked for it
        synced = bucket.durability == "disk" and bucket.write != "through"
        kept = UploadRecord(
            bucket=call.bucket,
            key=call.key,
            upload_id=rules.new_id(created_s, self._chance.token_hex(10), node),
            created_s=created_s,
            volume_id=self._store.volume_of(call.bucket, call.key),
            headers=call.headers,
            checksum_algorithm=algorithm,
            checksum_type=kind,
            tags=call.tags,
            boot_id="" if synced else self._boot_id,
            begin=bucket.write == "through" and backend.part_bytes_min > 0,
        )
        await self._keep(kept)
        if kept.begin:
            try:
                backend_id = await backend.begin_upload(call.key, headers=call.headers, tags=call.tags)
            except ForebayError as error:
                if lost_answers.says_no(error):
                    await self._meta.delete(kept.name)
                else:
                    await self._abort_there(msgspec.structs.replace(kept, aborting=True))
                raise
            kept = msgspec.structs.replace(kept, begin=False, backend_id=backend_id)
            await self._keep(kept)
        self._list(Upload(kept))
        return kept.state

    async def _keep(self, kept: UploadRecord) -> None:
        await self._meta.put(kept.name, _encode(kept))

    def _list(self, upload: Upload) -> None:
        kept = upload.kept
        self._open[kept.upload_id] = upload
        self._buckets.heard.add(kept.backend_id)
        insort(self._names.setdefault(kept.bucket, []), (kept.key, kept.upload_id))

    def _unlist(self, upload: Upload) -> None:
        kept = upload.kept
        upload.gone = True
        self._open.pop(kept.upload_id, None)
        self._buckets.heard.discard(kept.backend_id)
        names = self._names.get(kept.bucket, [])
        at = bisect_left(names, (kept.key, kept.upload_id))
        if names[at : at + 1] == [(kept.key, kept.upload_id)]:
            del names[at]
        if not names:
            self._names.pop(kept.bucket, None)

    # --- parts -------------------------------------------------------------------------------------------------------
    def directory(self, kept: UploadRecord) -> str:
        """Where the upload's parts are; `Unavailable` while that volume is out."""
        for at in self._store.volumes():
            if at.volume_id == kept.volume_id:
                return os.path.join(at.path, "parts", kept.upload_id)
        raise Unavailable(
            f"the disk that holds upload {kept.upload_id} is out (`forebay status`): abort it and begin another",
            code="UploadNotHere",
        )

    async def _take_all(self, call: UploadPartCall) -> PartState:
        try:
            return await self._buckets.again(lambda: self._take(call))
        finally:
            if call.path:
                await self._work(files.forget, call.path)

    async def _take(self, call: UploadPartCall) -> PartState:
        if (there := await self._elsewhere(call.bucket, call.upload_id)) is not None:
            rules.check_part(call.number, call.size_bytes)
            return await uploads_elsewhere.part(there, call, round(self._clock.wall_s(), 3))
        upload = self.find(call.bucket, call.key, call.upload_id)
        rules.check_part(call.number, call.size_bytes)
        kept, directory = upload.kept, self.directory(upload.kept)
        algorithm, checksum = rules.pick_checksum(kept.checksum_algorithm, call.checksums)
        from_node.set(False)  # who asks holds no lock: the upload is here, wherever its key is at home by now
        async with self._writes.entered(call.bucket, call.key) as served, upload.arrival(call.number):
            upload.seq += 1
            now_s = round(self._clock.wall_s(), 3)
            part = Part(call.number, upload.seq, call.size_bytes, call.md5, now_s, algorithm, checksum)
            part = await self._work(self._place, directory, call, part, kept, doing=f"part {call.number}")
            path = os.path.join(directory, rules.name_of(part))
            try:
                token = await self._send(upload, served, part, path)
                async with upload.closing:
                    if upload.gone:
                        raise rules.no_such_upload(kept.upload_id)
                    replaced = upload.parts.get(part.number)
                    upload.parts[part.number] = part
                    if token:
                        upload.tokens[part.number] = token
                    if replaced is not None:
                        await self._work(files.forget, os.path.join(directory, rules.name_of(replaced)))
            except BaseException:
                if upload.parts.get(part.number) is not part:
                    await self._work(files.forget, path)
                raise
        return _state(part)

    def _place(self, directory: str, call: UploadPartCall, part: Part, kept: UploadRecord) -> Part:
        """In a worker: move the bytes to their place under their name. Returns the part, with the checksum that it
        needs."""
        source = call.path
        if not source:
            assert call.body is not None, "a part has a path or a body"
            files.ensure(directory, durable=not kept.boot_id)
            source = os.path.join(directory, f"new-{part.seq:x}")
            files.write(source, call.body)
        try:
            if kept.checksum_algorithm and not part.checksum:
                checksum = files.checksum(source, kept.checksum_algorithm)
                part = part._replace(algorithm=kept.checksum_algorithm, checksum=checksum)
            files.place(source, directory, part, durable=not kept.boot_id)
        except BaseException:
            files.forget(source)
            raise
        return part

    async def _send(self, upload: Upload, served: Served, part: Part, path: str) -> str:
        """Send the part to the backend's upload, if there is one. Returns its token there, or ""."""
        if not upload.kept.backend_id or served.bucket.write != "through":
            return ""
        body = Body(part.size_bytes, path=path, md5=part.md5)
        return await served.backend.put_part(upload.kept.key, upload.kept.backend_id, part.number, body)

    # --- aborting ----------------------------------------------------------------------------------------------------
    async def _abort(self, upload: Upload) -> Nothing:
        async with upload.closing:
            if upload.gone:
                raise rules.no_such_upload(upload.kept.upload_id)
            kept = msgspec.structs.replace(upload.kept, aborting=True)
            if kept.backend_id:
                await self._keep(kept)
            else:
                await self._meta.delete(kept.name)
            self._unlist(upload)
        await upload.quiet()
        await self._remove(kept)
        if kept.backend_id:
            await self._abort_there(kept)
        return Nothing()

    async def _remove(self, kept: UploadRecord) -> None:
        try:
            await self._work(files.remove, self.directory(kept))
        except Unavailable:
            pass  # a sweep removes it when the disk is back

    async def _abort_there(self, kept: UploadRecord) -> None:
        """Abort the backend's upload, then forget ours. The sweep repeats what fails."""
        try:
            served = await self._buckets.get(kept.bucket)
            if kept.backend_id:
                await served.backend.abort_upload(kept.key, kept.backend_id)
            elif kept.begin:
                await self._buckets.leave_uploads(served, kept.key)
        except (NotFound, NotSupported):
            pass
        except ForebayError as error:
            self._aborting[kept.upload_id] = kept
            log.warning("the backend's upload of %s/%s is not aborted yet: %s", kept.bucket, kept.key, error)
            return
        self._aborting.pop(kept.upload_id, None)
        await self._meta.delete(kept.name)

    # --- completing --------------------------------------------------------------------------------------------------
    async def _complete(self, call: UploadCompleteCall) -> UploadCompleted:
        if (there := await self._elsewhere(call.bucket, call.upload_id)) is not None:
            try:
                return await uploads_elsewhere.complete(there, call)
            finally:
                await self._completed_elsewhere(call)
        from_node.set(False)  # as in `_take`
        if call.upload_id not in self._done:
            upload = self.find(call.bucket, call.key, call.upload_id)
            async with self._writes.entered(call.bucket, call.key) as served, upload.closing:
                if not upload.gone:
                    return await self._finish(served, upload, call)
        kept = self._done.get(call.upload_id)
        if kept is None or kept.done is None or (kept.bucket, kept.key) != (call.bucket, call.key):
            raise rules.no_such_upload(call.upload_id)
        if not rules.same_request(call.parts, kept.done.etag):
            raise rules.no_such_upload(call.upload_id)
        return kept.done.answer

    async def _completed_elsewhere(self, call: UploadCompleteCall) -> None:
        if self._buckets.homes is not None:
            self._buckets.homes.completed_elsewhere((await self._buckets.get(call.bucket)).bucket, call.key)

    async def _finish(self, served: Served, upload: Upload, call: UploadCompleteCall) -> UploadCompleted:
        """Make the object. The upload is closed meanwhile, and ended afterwards."""
        kept = upload.kept
        algorithm, kind = kept.checksum_algorithm, kept.checksum_type
        rules.check_form(call.checksums, algorithm, kind)
        chosen = rules.choose(upload.parts, call.parts, algorithm, kind, call.size_bytes)
        value = rules.checksum_of(algorithm, kind, chosen)
        rules.check_promised(call.checksums, value)
        etag, now_s = rules.etag_of([part.md5 for part in chosen]), self._clock.wall_s()
        checksums = {algorithm: value} if value else {}
        size_bytes = sum(part.size_bytes for part in chosen)
        expected = UploadCompleted(Written(etag, "", size_bytes, now_s), checksums, kind if value else "")
        upload.tried_s = upload.tried_s or now_s
        noted = msgspec.structs.replace(kept, done=Done(upload.tried_s, etag, expected))
        await self._keep(noted)
        try:
            written = await self._make(served, upload, call, chosen, _stored(kept, value, chosen), etag)
        except Precondition as error:
            if not upload.unheard:
                raise
            written = await self._made_unheard(served, upload, chosen, error)
        answer = UploadCompleted(written, checksums, expected.checksum_type)
        done = msgspec.structs.replace(noted, done=Done(now_s, etag, answer, committed=True))
        self._done[kept.upload_id] = done
        self._unlist(upload)
        self._clearing.add(kept.upload_id)
        self._spawn(self._clear(upload, done))
        return answer

    async def _make(
        self, served: Served, upload: Upload, call: UploadCompleteCall, chosen: list[Part], headers: Headers, etag: str
    ) -> Written:
        """Join the parts and write the object."""
        kept, directory = upload.kept, self.directory(upload.kept)
        size_bytes = sum(part.size_bytes for part in chosen)
        target = self._index.incoming(call.bucket, call.key)

        async def send(expect: str | None) -> ObjectInfo:
            return await self._complete_there(served, upload, chosen, target, expect)

        try:
            self._store.free_to_write(call.bucket, call.key, size_bytes - chosen[0].size_bytes)
            sums = await self._work(files.join, directory, chosen, target, doing="joining the parts")
        except Unavailable:
            if kept.backend_id and served.bucket.write == "through":
                return await self._make_there_alone(served, upload, call, chosen)
            raise
        try:
            written: Written = await self._writes.put_file(
                served,
                call.key,
                target,
                size_bytes,
                sums,
                headers,
                etag=etag,
                tags=kept.tags,
                if_match=call.if_match,
                if_none_match=call.if_none_match,
                send=send,
            )
        except Exception:  # a cancelled call is left as a stop would leave it: the commit may be under way
            await self._work(files.unjoin, directory, chosen[0], target)
            raise
        await self._work(files.forget, target)  # left over if the object is small or had no room
        return written

    async def _make_there_alone(
        self, served: Served, upload: Upload, call: UploadCompleteCall, chosen: list[Part]
    ) -> Written:
        """Make the object at the backend when no disk here takes it. The node forgets what it had of the key."""
        writes, bucket, key = self._writes, call.bucket, call.key
        async with writes.lock(bucket, key):
            expect = await writes.expected(served, key, call.if_match, call.if_none_match)
            async with writes.asking(served.bucket, key):
                try:
                    info = await self._complete_there(served, upload, chosen, "", expect)
                except BaseException as error:
                    writes.doubt(served.bucket, key, error, expect)
                    raise
                await writes.drop(bucket, key)
        return Written(info.etag, info.version, info.size_bytes, info.modified_s)

    async def _made_unheard(self, served: Served, upload: Upload, chosen: list[Part], refusal: Precondition) -> Written:
        """The conditions failed, perhaps because this upload was completed before and its answer was lost: then return
        that. `Unheard` if nobody can know."""
        bucket, key = upload.kept.bucket, upload.kept.key
        parts = [(part.number, part.md5, part.size_bytes) for part in chosen]
        async with self._writes.lock(bucket, key):
            info = await lost_answers.refused_completion(served.backend, key, parts, refusal, upload.tried_s)
            await self._writes.drop(bucket, key)
        upload.passed = True
        return Written(info.etag, info.version, info.size_bytes, info.modified_s)

    async def _complete_there(
        self, served: Served, upload: Upload, chosen: list[Part], target: str, expect: str | None
    ) -> ObjectInfo:
        """Make the object at the backend: from the parts that it has, or else from the joined file `target`, if there
        is one."""
        kept, through = upload.kept, self._writes.through
        filled = self._filled(served, upload, chosen)
        no_room = refusal(OSError(errno.ENOSPC, "no room"), "joining the parts, which the backend has not,")
        if not target and filled is None:
            raise no_room
        body = Body(sum(part.size_bytes for part in chosen), path=target)
        try:
            made: ObjectInfo = await through.put(
                served, kept.key, body, headers=kept.headers, expect=expect, tags=kept.tags, filled=filled
            )
        except ForebayError as error:
            if filled is not None:
                upload.unheard |= filled.unheard
                if filled.vanished and not target:
                    raise no_room from error
            raise
        upload.passed = filled is not None and filled.used
        return made

    def _filled(self, served: Served, upload: Upload, chosen: list[Part]) -> Filled | None:
        """The backend's upload, if it can be completed from the chosen parts."""
        kept, ends = upload.kept, list(itertools.accumulate(part.size_bytes for part in chosen))
        least = served.backend.part_bytes_min
        if not kept.backend_id or any(part.size_bytes < least for part in chosen[:-1]):
            return None
        at = {end - part.size_bytes: part for part, end in zip(chosen, ends, strict=True)}

        def bytes_of(start: int) -> Body:
            part = at[start]
            return Body(part.size_bytes, path=os.path.join(self.directory(kept), rules.name_of(part)), md5=part.md5)

        parts = tuple((part.number, start, start + part.size_bytes, part.md5) for start, part in at.items())
        return Filled(kept.backend_id, parts, upload.tokens, bytes_of)

    async def _clear(self, upload: Upload, done: UploadRecord) -> None:
        """After the answer: record the outcome, then remove the parts, and the backend's upload if it was not used."""
        if upload.passed:
            done = self._done[done.upload_id] = msgspec.structs.replace(done, backend_id="")
        try:
            await upload.quiet()
            await self._keep(done)
        finally:
            self._clearing.discard(done.upload_id)
        await self._remove(done)
        if done.backend_id:
            await self._leave_there(done)

    async def _leave_there(self, done: UploadRecord) -> None:
        """Abort a backend's upload that was not needed. The sweep repeats what fails."""
        try:
            served = await self._buckets.get(done.bucket)
            await served.backend.abort_upload(done.key, done.backend_id)
        except (NotFound, NotSupported):
            pass
        except ForebayError as error:
            log.warning("the backend's upload of %s/%s is not aborted yet: %s", done.bucket, done.key, error)
            return
        done = self._done[done.upload_id] = msgspec.structs.replace(done, backend_id="")
        await self._keep(done)

    # --- after a stop, and from time to time -------------------------------------------------------------------------
    async def load(self) -> None:
        """Restore every upload. Asks no backend; `tend` does what remains to do there."""
        entries, _ = await self._meta.range(PREFIX)
        for entry in entries:
            kept = _decode(entry.value)
            if kept.done is not None and kept.done.committed:
                self._done[kept.upload_id] = kept
            elif kept.aborting or kept.begin or kept.boot_id not in ("", self._boot_id):
                self._aborting[kept.upload_id] = msgspec.structs.replace(kept, aborting=True)
            else:
                await self._find_again(kept)

    async def _find_again(self, kept: UploadRecord) -> None:
        upload = Upload(kept)
        try:
            directory = self.directory(kept)
        except Unavailable as error:
            log.warning("%s", error)
        else:
            upload.parts = await self._work(files.scan, directory)
            upload.seq = max((part.seq for part in upload.parts.values()), default=0)
            if kept.done is not None and await self._committed(kept, directory, upload):
                done = msgspec.structs.replace(kept, done=msgspec.structs.replace(kept.done, committed=True))
                self._done[kept.upload_id] = done
                self._clearing.add(kept.upload_id)
                self._spawn(self._clear(upload, done))
                return
        self._list(upload)

    async def _committed(self, kept: UploadRecord, directory: str, upload: Upload) -> bool:
        """Whether the noted object was committed before the stop."""
        record = self._store.lookup(kept.bucket, kept.key)
        if record is None or kept.done is None:
            return False
        if record.etag == kept.done.etag:
            return True
        path = self._store.data_path(record)
        return bool(path) and await self._work(files.holds, directory, list(upload.parts.values()), path)

    async def tend(self) -> None:
        """Sweep now, and then every SWEEP_EVERY_S, for ever."""
        while True:
            try:
                await self.sweep()
            except Exception:
                log.exception("sweeping uploads broke; it goes on")
            await asyncio.sleep(SWEEP_EVERY_S)

    async def sweep(self) -> None:
        """Abort uploads that are too old, repeat failed aborts at backends, forget uploads done long ago, and remove
        directories that no upload owns."""
        now_s = self._clock.wall_s()
        for upload in [each for each in self._open.values() if now_s - each.kept.created_s > limits.UPLOAD_AGE_MAX_S]:
            log.info(
                "upload %s of %s/%s is too old: aborted", upload.kept.upload_id, upload.kept.bucket, upload.kept.key
            )
            try:
                await self._whole(self._abort(upload))
            except NotFound:
                pass  # somebody ended it just now
        for kept in list(self._aborting.values()):
            await self._remove(kept)
            await self._abort_there(kept)
        for kept in list(self._done.values()):
            if kept.backend_id and kept.upload_id not in self._clearing:
                await self._leave_there(kept)
            elif kept.done is not None and now_s - kept.done.at_s > DONE_KEPT_S:
                del self._done[kept.upload_id]
                await self._meta.delete(kept.name)
        for at in self._store.volumes():
            holder = os.path.join(at.path, "parts")
            for upload_id in await self._work(files.directories, holder):
                if upload_id not in self._open and upload_id not in self._clearing:
                    await self._work(files.remove, os.path.join(holder, upload_id))

    async def aclose(self, grace_s: float = 10.0) -> None:
        """Stop. Work that does not end within `grace_s` is left as a stop of the process would leave it."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- running -----------------------------------------------------------------------------------------------------
    async def _whole(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run to the end even if the caller goes away."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ForebayError):
            log.error("an upload's work broke: %r", error, exc_info=error)


def _state(part: Part) -> PartState:
    checksums = {part.algorithm: part.checksum} if part.checksum else {}
    return PartState(part.number, part.size_bytes, part.md5, part.modified_s, checksums)


def _stored(kept: UploadRecord, checksum: str, chosen: Sequence[Part]) -> Headers:
    """The object's headers: the client's, and those that show its parts and checksum to readers."""
    headers = kept.headers
    if text := rules.sizes_text([part.size_bytes for part in chosen]):
        headers = (*headers, (rules.SIZES_HEADER, text))
    if text := rules.checksums_text(kept.checksum_algorithm, chosen):
        headers = (*headers, (rules.PARTS_CHECKSUMS_HEADER, text))
    if checksum:
        headers = (
            *headers,
            (f"x-amz-checksum-{kept.checksum_algorithm.lower()}", checksum),
            ("x-amz-checksum-type", kept.checksum_type),
        )
    return headers
