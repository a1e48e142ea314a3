"""One flush of one key: sends its bytes, or its deletion, to the backend as the note says.

Theory. An errand is conditional on the version that the first unflushed write replaced. If the backend has another
version, that may still be ours: a put whose answer was lost, by this process or an earlier one. So the errand compares
the backend's object (by MD5, else by fetching and hashing it) with this body and with earlier bodies that may have been
sent. Only a stranger's object is a conflict. Then the bucket's policy decides, and the errand reports the outcome; it
never touches the index. A write without a base version is conditional too, on the version found there, so that no body
can land late on top of its successor.

Bodies are compared with their checksums before they are sent, so that bytes that rotted on a disk do not become the
truth. Large bodies go as uploads: the errand notes its intention, then the upload's id, and then sends parts, several
at once. After a restart it does not send the parts again that the backend has. If a later write makes an upload
useless, the later note lists it as stale, and it is aborted first.

While the bytes of a single put or a completion are on their way, nobody can know whether the backend has them. The
errand must not be cancelled then (`is_cancellable`): a put that arrives after its successor would be a lost write.

Rejected: marking objects with metadata of ours (users would see it); trusting the time of modification.

Invariants. (1) Every request carries a condition, unless the backend supports none or names no versions; then the
backend's version is checked first. (2) No part is sent to an upload whose id is not noted durably, and no upload is
aborted whose id was not heard. (3) Before a body or a delete may leave, the keeper of the note knows of it, and it is
still what the key owes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import xxhash

from forebay.backends.lost_answers import Unheard, says_no
from forebay.backends.seam import Backend, Body
from forebay.core import limits
from forebay.core.errors import Busy, Corrupt, ForebayError, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.machines import sent_bodies
from forebay.core.record import OWN_HEADERS, Record, blocks_in
from forebay.core.types import Bucket, Headers, ObjectInfo
from forebay.node.store.disk.notes import Note, digest_of

log = logging.getLogger("forebay.flush")
ResultT = TypeVar("ResultT")

PARTS_AT_ONCE = 8  # of one upload: one connection seldom fills a link
ROUNDS_MAX = 4  # give up for now on an object that changes at the backend at every look
COPIES_MAX = 100  # names tried for the copy of one conflict
TOLD_MAX = 8
BEGINNING = "?"  # its beginning was noted, and the upload may exist


class Superseded(Exception):
    """The key owes something else by now."""


class Books(Protocol):
    """What an errand reads of the store."""

    def check_present(self, bucket: str, key: str) -> None: ...
    def check_lost(self, bucket: str, key: str) -> None: ...
    def examine(self, bucket: str, key: str, object_id: int) -> Record | None: ...
    def lookup(self, bucket: str, key: str) -> Record | None: ...
    def data_path(self, record: Record) -> str: ...
    def check_blocks(self, record: Record, bucket: str, key: str, blocks: Sequence[int]) -> list[int]: ...


class Keeping(Protocol):
    """Keeps the key's note up to date for the errand."""

    def note(self) -> Note | None:
        """What the key owes now."""
        ...

    async def keep(self, note: Note) -> None:
        """Durably replace the note with the same `seq`. Nothing happens if the key owes something else now."""
        ...

    def leaves(self, seq: int, left: bool = True) -> bool:
        """Note that a request with write `seq` may leave from now on, or (not `left`) that none did. Returns whether
        one may have left before. `Superseded` if the key owes something else now."""
        ...


class Delivered(NamedTuple):
    """The backend has the object, as `version` ("" for a delete). `policy` is the policy that decided a conflict, if
    any."""

    version: str
    policy: str = ""


class Yielded(NamedTuple):
    """The backend's object wins: drop ours here. `kept_as`: the key under which ours was kept, if it was."""

    policy: str
    kept_as: str = ""


class _Whose(Enum):
    STRANGER = 0
    EARLIER = 1  # ours, of an earlier write
    THIS = 2


class Destination(NamedTuple):
    """Where errands of one bucket go, and what they share. `sends` bounds bodies under way. `linger` closes a file
    later, when no thread sends from it any more. `leave` reports uploads of a key that may be ours."""

    bucket: Bucket
    backend: Backend
    books: Books
    workers: Executor
    sends: asyncio.Semaphore
    node_id: str
    told: set[str]  # what was logged about this backend
    linger: Callable[[int], None]
    leave: Callable[[str], Coroutine[Any, Any, None]]
    found_bad: Callable[[str, str, Record, list[int]], object]  # bad blocks of an object: do not serve them


def conflict_key(key: str, node_id: str, since_s: float, copy: int) -> str:
    """The key for the loser of a conflict: KEY.conflict-NODE-TIME; a key too long for that loses its end.

    The same write gives the same name, so that a repeated errand finds its own copy. `copy` above 1 is appended.
    """
    moment = datetime.fromtimestamp(since_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    suffix = f".conflict-{node_id}-{moment}" + (f"-{copy}" if copy > 1 else "")
    room = limits.KEY_BYTES_MAX - len(suffix.encode())
    return key.encode()[:room].decode(errors="ignore") + suffix


class Errand:
    """See the module's header. `run` once. `began_s`: now, in Unix time."""

    def __init__(self, destination: Destination, key: str, note: Note, keeping: Keeping, began_s: float) -> None:
        self.note, self.began_s = note, began_s
        self.is_cancellable = True
        self._destination, self._key, self._keeping = destination, key, keeping
        self._backend = destination.backend
        self._plain: set[str] = set()  # features that this backend does not support: "expect", "tags"
        self._sent_bytes = 0
        self.is_repeated = False  # an earlier request with this body may be unanswered, and still arrive
        self._left = False  # this body is already noted as one that may have left
        self._fd = -1  # the data file: stays readable when a later write takes its name

    @property
    def sent_bytes(self) -> int:
        """Bytes sent, repeated parts included."""
        return self._sent_bytes

    async def run(self) -> Delivered | Yielded:
        """Flush the key. Raises the `ForebayError` that prevents it, or `Superseded`."""
        done = False
        try:
            outcome = await self._run()
            done = True
        finally:
            self._let_go(now=done)
        return outcome

    async def _run(self) -> Delivered | Yielded:
        if self._backend.read_only:
            raise NotSupported(
                f"the backend of bucket {self._destination.bucket.name} cannot be written to, and {self._key} waits "
                "for it: give the bucket a backend that can (`forebay bucket add` with another URL)"
            )
        await self._abort_stale()
        if self.note.is_delete:
            return await self._delete()
        await self._know_digest()
        if self.note.upload_key:  # decided before a restart
            return await self._keep_aside()
        return await self._put()

    async def abandon(self) -> None:
        """Leave nothing at the backend of a flush that is no longer wanted. Uploads that cannot be aborted now are
        logged."""
        try:
            if self.note.upload_id:
                await self._abort(self.note.upload_key or self._key, self.note.upload_id)
            await self._abort_stale()
        except ForebayError as error:
            log.warning("an upload of %s may stay behind at the backend: %s", self._key, error)

    # --- bytes -------------------------------------------------------------------------------------------------------
    def _record(self) -> Record:
        record = self._destination.books.lookup(self._destination.bucket.name, self._key)
        if record is None or record.object_id != self.note.object_id:
            if not self._is_current():
                raise Superseded
            self._destination.books.check_present(self._destination.bucket.name, self._key)
            self._destination.books.check_lost(self._destination.bucket.name, self._key)
            raise Unavailable(
                f"the bytes of {self._key}, which the backend lacks, cannot be read: see `forebay status`"
            )
        return record

    def _is_current(self) -> bool:
        note = self._keeping.note()
        return note is not None and note.seq == self.note.seq

    async def _body(self, start: int, end: int) -> Body:
        """The bytes [start, end), compared with their checksums."""
        record = self._record()
        whole = (start, end) == (0, record.size_bytes)
        md5 = self.note.md5 if whole else ""
        if record.inline is not None:
            return Body(end - start, data=record.inline[start:end], md5=md5)
        blocks = range(start // record.block_bytes, blocks_in(end, record.block_bytes))
        check = self._destination.books.check_blocks
        try:
            if self._fd < 0:
                self._fd = os.open(self._destination.books.data_path(record), os.O_RDONLY | os.O_CLOEXEC)
            bad = await self._in_worker(check, record, self._destination.bucket.name, self._key, list(blocks))
        except (OSError, ForebayError) as error:
            raise self._unreadable(error) from error
        if bad and not self._is_current():
            raise Superseded
        if bad:
            self._examine()
            self._destination.found_bad(self._destination.bucket.name, self._key, record, bad)
            raise Corrupt(
                f"{len(bad)} blocks of {self._key} do not match their checksums, and the backend has no other copy: "
                "write the object again; the disk that holds it is failing"
            )
        return Body(end - start, path=f"/proc/self/fd/{self._fd}", offset=start, md5=md5)

    def _unreadable(self, error: Exception) -> Exception:
        if not self._is_current():
            return Superseded()
        self._examine()
        return Unavailable(f"the bytes of {self._key} cannot be read: {error}; see `forebay status`")

    def _examine(self) -> None:
        """`ObjectLost` if the file is missing or has another size."""
        bucket = self._destination.bucket.name
        self._destination.books.examine(bucket, self._key, self.note.object_id)
        self._destination.books.check_lost(bucket, self._key)

    def _let_go(self, *, now: bool) -> None:
        """Close the file: `now`, or after any thread that still sends from it has stopped."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and now:
            os.close(fd)
        elif fd >= 0:
            self._destination.linger(fd)

    async def _know_digest(self) -> None:
        if self.note.digest:
            return
        record = self._record()
        if record.inline is not None:
            digest = digest_of(record.size_bytes, body=record.inline)
        else:
            try:
                digest = await self._in_worker(
                    _digest_of_file, self._destination.books.data_path(record), record.size_bytes
                )
            except OSError as error:
                raise self._unreadable(error) from error
        await self._keep(digest=digest)

    # --- putting -----------------------------------------------------------------------------------------------------
    async def _put(self) -> Delivered | Yielded:
        based_on, policy = self.note.based_on, ""
        expect: str | None = based_on or ""  # without a base version the key is mostly new
        asks_first = sent_bodies.asks_first(self.note.sent, self.note.digest)
        for _ in range(ROUNDS_MAX):
            if not asks_first:
                try:
                    return Delivered((await self._send(self._key, expect)).version, policy)
                except (Precondition, Unheard):  # find out below whether the object is ours
                    pass
            asks_first = False
            seen = await self._seen(self._key)
            there = "" if seen is None else seen.version or None
            if based_on is not None and there != expect:
                whose = await self._whose(seen)
                if whose is _Whose.THIS and seen is not None and _has_headers(seen, self.note.headers):
                    return Delivered(seen.version, policy)
                if whose is _Whose.STRANGER:
                    policy = self._destination.bucket.conflict
                    if policy == "theirs":
                        return Yielded(policy)
                    if policy == "keep-both":
                        return await self._keep_aside()
            expect = there
        raise Busy(f"{self._key} changes at the backend faster than it can be written: it is tried again")

    async def _keep_aside(self) -> Yielded:
        """Put our object under a key of its own."""
        for copy in range(1, COPIES_MAX + 1):
            name = self.note.upload_key or conflict_key(self._key, self._destination.node_id, self.note.since_s, copy)
            try:
                await self._send(name, "")
                return Yielded("keep-both", name)
            except (Precondition, Unheard):
                pass
            if await self._whose(await self._seen(name)) is _Whose.THIS:
                return Yielded("keep-both", name)
            await self._give_up_upload()
        raise Busy(f"all names for the copy of a conflict on {self._key} are taken: remove old *.conflict-* objects")

    async def _send(self, key: str, expect: str | None) -> ObjectInfo:
        size_bytes = self.note.size_bytes
        if size_bytes >= limits.MULTIPART_BYTES_MIN and self._backend.part_bytes_min:
            return await self._upload(key, expect)
        if self.note.upload_id:
            await self._give_up_upload()  # begun for another key, or when the backend still had uploads
        body = await self._body(0, size_bytes)
        async with self._destination.sends:

            async def put(expect: str | None, tags: str) -> ObjectInfo:
                return await self._backend.put(key, body, headers=_stored(self.note.headers), expect=expect, tags=tags)

            info = await self._conditionally(key, expect, put)
            self._sent_bytes += size_bytes
            return info

    async def _conditionally(
        self, key: str, expect: str | None, act: Callable[[str | None, str], Coroutine[Any, Any, ObjectInfo]]
    ) -> ObjectInfo:
        """Send a request that cannot be taken back: with the condition if the backend supports it, else after
        checking."""
        plain = self._plain
        guessed = False
        while True:
            tags = "" if "tags" in plain else self.note.tags
            given = expect
            if expect is not None and "expect" in plain:
                seen = await self._seen(key)
                if (seen.version if seen is not None else "") != expect:
                    raise Precondition(f"{key} changed at the backend: somebody else wrote it there")
                given = None
            self.is_cancellable = False
            try:
                return await self._leaving(key, act(given, tags))
            except NotSupported as error:
                if given is not None:
                    plain.add("expect")
                    guessed = bool(tags)  # the tags may be what it does not support
                elif tags:
                    plain.add("tags")
                    if guessed:
                        plain.discard("expect")
                        guessed = False
                else:
                    raise
                self._tell_once(error)
            finally:
                self.is_cancellable = True

    async def _leaving(self, key: str, request: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Make a request after which the backend may have this write, unless it answers with a refusal."""
        if key != self._key or self._left:
            return await request
        try:
            self.is_repeated = self._keeping.leaves(self.note.seq)
        except Superseded:
            request.close()
            raise
        self._left = True
        try:
            return await request
        except ForebayError as error:
            if says_no(error):
                self._left = self.is_repeated
                if self._is_current():
                    self._keeping.leaves(self.note.seq, self.is_repeated)
            raise

    # --- uploads -----------------------------------------------------------------------------------------------------
    async def _upload(self, key: str, expect: str | None) -> ObjectInfo:
        upload_key = "" if key == self._key else key
        if self.note.upload_id and self.note.upload_key != upload_key:
            await self._give_up_upload()
        size_bytes = self.note.size_bytes
        tokens: dict[int, str] = {}
        if self.note.upload_id:
            found = await self._resume(key)
            if isinstance(found, ObjectInfo):
                return found
            tokens = found
        if not self.note.upload_id:
            await self._begin(key, upload_key)
        part_bytes, upload_id = self.note.part_bytes, self.note.upload_id
        starts = range(0, size_bytes, part_bytes)
        missing = [number for number in range(1, len(starts) + 1) if number not in tokens]

        async def send() -> None:
            while missing:
                number = missing.pop(0)
                start = starts[number - 1]
                body = await self._body(start, min(start + part_bytes, size_bytes))
                async with self._destination.sends:
                    tokens[number] = await self._backend.put_part(key, upload_id, number, body)
                self._sent_bytes += body.size_bytes

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(PARTS_AT_ONCE, len(missing))):
                    group.create_task(send())
        except* (ForebayError, Superseded) as errors:
            raise _first(errors) from None

        async def complete(expect: str | None, tags: str) -> ObjectInfo:
            return await self._backend.complete_upload(key, upload_id, sorted(tokens.items()), expect=expect)

        try:
            return await self._conditionally(key, expect, complete)
        except NotFound:
            info = await self._completed_unheard(key)
        if info is None:
            raise Unavailable(f"the backend forgot the upload of {key}: it is begun again")
        return info

    async def _resume(self, key: str) -> dict[int, str] | ObjectInfo:
        """The parts that the backend has, or the object if an earlier completion succeeded without an answer."""
        if self.note.upload_id == BEGINNING:
            await self._give_up_upload()
            return {}
        try:
            parts = await self._backend.list_parts(key, self.note.upload_id)
        except NotFound:
            return await self._completed_unheard(key) or {}
        size_bytes, part_bytes = self.note.size_bytes, self.note.part_bytes
        return {
            part.number: part.token
            for part in parts
            if part.size_bytes == min(part_bytes, size_bytes - (part.number - 1) * part_bytes)
        }

    async def _completed_unheard(self, key: str) -> ObjectInfo | None:
        """The upload is gone: return the object if it was completed, or None, and it must begin anew."""
        seen = await self._seen(key)
        if seen is not None and await self._whose(seen) is _Whose.THIS:
            return seen
        await self._keep(upload_id="", upload_key="", part_bytes=0)
        return None

    async def _begin(self, key: str, upload_key: str) -> None:
        """Begin an upload and note its id. Cancelling the caller does not interrupt this."""
        least = max(limits.FLUSH_PART_BYTES, self._backend.part_bytes_min, -(-self.note.size_bytes // limits.PARTS_MAX))
        part_bytes = -(-least // limits.BLOCK_BYTES) * limits.BLOCK_BYTES
        tags = "" if "tags" in self._plain else self.note.tags
        headers = _stored(self.note.headers)

        async def begin() -> None:
            await self._keep(upload_id=BEGINNING, upload_key=upload_key, part_bytes=part_bytes)
            try:
                try:
                    upload_id = await self._backend.begin_upload(key, headers=headers, tags=tags)
                except NotSupported as error:
                    if not tags:
                        raise
                    self._plain.add("tags")
                    self._tell_once(error)
                    upload_id = await self._backend.begin_upload(key, headers=headers)
            except ForebayError as error:
                if says_no(error):
                    await self._keep(upload_id="", upload_key="", part_bytes=0)
                raise
            if not self._is_current():
                await self._backend.abort_upload(key, upload_id)
                raise Superseded
            await self._keep(upload_id=upload_id, upload_key=upload_key, part_bytes=part_bytes)

        beginning = asyncio.create_task(begin())
        try:
            await asyncio.shield(beginning)
        except asyncio.CancelledError:
            await asyncio.wait([beginning])
            raise

    async def _give_up_upload(self) -> None:
        """Abort the upload that the note names, and forget it."""
        if self.note.upload_id:
            await self._abort(self.note.upload_key or self._key, self.note.upload_id)
            await self._keep(upload_id="", upload_key="", part_bytes=0)

    async def _abort_stale(self) -> None:
        for key, upload_id in self.note.stale:
            await self._abort(key or self._key, upload_id)
        if self.note.stale:
            await self._keep(stale=())

    async def _abort(self, key: str, upload_id: str) -> None:
        if not self._backend.part_bytes_min:
            return
        if upload_id != BEGINNING:
            await self._backend.abort_upload(key, upload_id)
            return
        await self._destination.leave(key)

    # --- deleting ----------------------------------------------------------------------------------------------------
    async def _delete(self) -> Delivered | Yielded:
        based_on, policy = self.note.based_on, ""
        expect = based_on
        for _ in range(ROUNDS_MAX):
            # Where there was nothing, or no way to say what: look first.
            if expect and "expect" not in self._plain and await self._delete_if(expect):
                return Delivered("", policy)
            seen = await self._seen(self._key)
            if seen is None:
                return Delivered("", policy)
            if based_on is not None and seen.version != expect and await self._whose(seen) is _Whose.STRANGER:
                policy = self._destination.bucket.conflict
                if policy != "ours":
                    return Yielded(policy)
            expect = seen.version
            if "expect" in self._plain or not expect:  # it was checked; a backend without conditions can do no more
                await self._delete_if(None)
                return Delivered("", policy)
        raise Busy(f"{self._key} changes at the backend faster than it can be deleted: it is tried again")

    async def _delete_if(self, expect: str | None) -> bool:
        """Delete that version. False if the backend has another, or must be asked first."""
        self.is_cancellable = False
        try:
            await self._leaving(self._key, self._backend.delete(self._key, expect=expect))
        except (Precondition, Unheard):
            return False
        except NotFound:
            pass
        except NotSupported as error:
            if expect is None:
                raise
            self._plain.add("expect")
            self._tell_once(error)
            return False
        finally:
            self.is_cancellable = True
        return True

    # --- whose is it -------------------------------------------------------------------------------------------------
    async def _seen(self, key: str) -> ObjectInfo | None:
        try:
            return await self._backend.head(key)
        except NotFound:
            return None

    async def _whose(self, seen: ObjectInfo | None) -> _Whose:
        """Whether the backend's object is this body, an earlier one that this node may have sent, or a stranger's."""
        note = self.note
        if seen is None:
            return _Whose.EARLIER if sent_bodies.ABSENT in note.sent.digests else _Whose.STRANGER
        if not note.is_delete and note.md5 and note.md5 == seen.etag:
            return _Whose.THIS
        may_be_this = not note.is_delete and seen.size_bytes == note.size_bytes
        if not may_be_this and not any(note.sent.digests):
            return _Whose.STRANGER
        digest = await self._digest_there(seen)
        if not note.is_delete and digest == note.digest:
            return _Whose.THIS
        return _Whose.EARLIER if digest in note.sent.digests else _Whose.STRANGER

    async def _digest_there(self, seen: ObjectInfo) -> str:
        """The digest of the backend's object, which is fetched and discarded."""
        sums, block, filled = [], xxhash.xxh3_64(), 0
        if seen.size_bytes:
            fetch = await self._backend.fetch(seen.key, version=seen.version)
            try:
                async for chunk in fetch:
                    view = memoryview(chunk)
                    while view:
                        part = view[: limits.BLOCK_BYTES - filled]
                        block.update(part)
                        filled, view = filled + len(part), view[len(part) :]
                        if filled == limits.BLOCK_BYTES:
                            sums.append(block.intdigest())
                            block, filled = xxhash.xxh3_64(), 0
            finally:
                await fetch.aclose()
        if filled:
            sums.append(block.intdigest())
        return digest_of(seen.size_bytes, sums=sums)

    # --- help --------------------------------------------------------------------------------------------------------
    async def _keep(self, **changes: object) -> None:
        self.note = msgspec.structs.replace(self.note, **changes)
        await self._keeping.keep(self.note)

    def _tell_once(self, error: NotSupported) -> None:
        if error.message not in self._destination.told and len(self._destination.told) < TOLD_MAX:
            self._destination.told.add(error.message)
            log.warning(
                "bucket %s: its backend does not support all of a flush, which goes on without: %s",
                self._destination.bucket.name,
                error,
            )

    async def _in_worker(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._destination.workers, work, *arguments)


def _digest_of_file(path: str, size_bytes: int) -> str:
    sums = []
    with open(path, "rb") as file:
        while block := file.read(limits.BLOCK_BYTES):
            sums.append(xxhash.xxh3_64_intdigest(block))
    return digest_of(size_bytes, sums=sums)


def _has_headers(seen: ObjectInfo, headers: Headers) -> bool:
    return set(_stored(headers)) <= set(seen.headers)


def _stored(headers: Headers) -> Headers:
    """The headers that the backend stores; it makes checksums of its own."""
    return tuple(each for each in headers if not each[0].startswith(OWN_HEADERS))


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
