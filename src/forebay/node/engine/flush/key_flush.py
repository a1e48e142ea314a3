"""One flush of one key: what a delivery needs of the store and of the key's note.

Theory. `core/machines/delivery.py` decides how the key gets to its backend, and insists; this brings it the bytes and
keeps the note. It reports the outcome and never touches the index.

Bodies are compared with their checksums before they are sent, so that bytes that rotted on a disk do not become the
truth. The note says which upload was begun, so that after a restart no part is sent again that the backend has. If a
later write makes an upload useless, the later note lists it as stale, and it is aborted first.

While the bytes of a single put or a completion are on their way, nobody can know whether the backend has them. The
errand must not be cancelled then (`is_cancellable`): a put that arrives after its successor would be a lost write. A
node that lost its lease ends such requests all the same, before others act in its place.

Invariants. (1) No part is sent to an upload whose id is not noted durably. (2) Before a body or a delete may leave, the
keeper of the note knows of it, and it is still what the key owes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from forebay.backends.lost_answers import says_no
from forebay.backends.seam import Backend, Body
from forebay.core import limits
from forebay.core.cluster.coding import ETAG_HEADER, TIME_HEADER
from forebay.core.errors import Corrupt, ForebayError, NotSupported, Unavailable
from forebay.core.machines import sent_bodies
from forebay.core.machines.delivery import Delivery, Terms, drop
from forebay.core.machines.delivery_events import Delivered, Upload, Yielded
from forebay.core.machines.sent_bodies import Ours
from forebay.core.record import Record, blocks_in
from forebay.core.types import Bucket, Headers
from forebay.node.engine.delivery import Carrier, Superseded, run_to_the_end, stored
from forebay.node.store.disk.notes import BlockDigest, Note, digest_of

log = logging.getLogger("forebay.flush")
ResultT = TypeVar("ResultT")

TOLD_MAX = 8
CUT_OFF_S = 0.25  # between looks whether a request may go on: others act half a lease after it may not


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

    def may_send(self, under_way: bool = False) -> None:
        """`Unavailable` if another node may act in this one's place, or soon, for what is `under_way`."""
        ...


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
        self.is_repeated = False  # an earlier request with this body may be unanswered, and still arrive
        self.sends = destination.sends
        self._destination, self._key, self._keeping = destination, key, keeping
        self._backend = destination.backend
        self._carrier: Carrier | None = None
        self._left = False  # this body is already noted as one that may have left
        self._fd = -1  # the data file: stays readable when a later write takes its name

    @property
    def sent_bytes(self) -> int:
        """Bytes sent, repeated parts included."""
        return self._carrier.sent_bytes if self._carrier is not None else 0

    async def run(self) -> Delivered | Yielded:
        """Flush the key. Raises the `ForebayError` that prevents it, or `Superseded`."""
        done = False
        try:
            if self._backend.read_only:
                raise NotSupported(
                    f"the backend of bucket {self._destination.bucket.name} cannot be written to, and {self._key} "
                    "waits for it: give the bucket a backend that can (`forebay bucket add` with another URL)"
                )
            if not self.note.is_delete:
                await self._know_digest()
            outcome = await self._carry().run()
            if outcome.policy:
                self._keeping.may_send()  # to who was taken over meanwhile, what others wrote since is a stranger's
            done = True
        finally:
            self._let_go(now=done)
        return outcome

    def _carry(self) -> Carrier:
        note = self.note
        upload = Upload(note.upload_key or self._key, note.upload_id, note.part_bytes) if note.upload_id else None
        delivery = Delivery(self._terms(), upload, self._stale())
        self._carrier = Carrier(self._backend, delivery, self, headers=(*note.headers, *self._told()), tags=note.tags)
        return self._carrier

    def _told(self) -> Headers:
        """What a backend that is ours is told: the ETag and the time that clients were told."""
        record = self._destination.books.lookup(self._destination.bucket.name, self._key)
        if self._backend.scheme != "coded" or record is None or record.object_id != self.note.object_id:
            return ()
        return ((ETAG_HEADER, record.etag), (TIME_HEADER, repr(record.modified_s)))

    def _terms(self) -> Terms:
        note, destination = self.note, self._destination
        size_bytes = -1 if note.is_delete else note.size_bytes
        return Terms(
            self._key,
            Ours(size_bytes, note.md5, note.digest, earlier=note.sent.digests),
            self._backend.part_bytes_min,
            note.based_on,
            destination.bucket.conflict,
            is_delete=note.is_delete,
            tags=bool(note.tags),
            asks_first=not note.is_delete and sent_bodies.asks_first(note.sent, note.digest),
            headers=stored(note.headers),
            copy_name=lambda copy: conflict_key(self._key, destination.node_id, note.since_s, copy),
        )

    def _stale(self) -> tuple[tuple[str, str], ...]:
        return tuple((key or self._key, upload_id) for key, upload_id in self.note.stale)

    async def abandon(self) -> None:
        """Leave nothing at the backend of a flush that is no longer wanted. Uploads that cannot be aborted now are
        logged."""
        note = self.note
        uploads = [(note.upload_key or self._key, note.upload_id)] if note.upload_id else []
        carrier = self._carrier or self._carry()
        try:
            for effect in drop([*uploads, *self._stale()]):
                await carrier.carry_out(effect)
        except ForebayError as error:
            log.warning("an upload of %s may stay behind at the backend: %s", self._key, error)

    # --- what the delivery asks for ----------------------------------------------------------------------------------
    async def request(self, key: str, act: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Make a request after which the backend may have this write, unless it answers with a refusal."""
        self.is_cancellable = False
        try:
            if key != self._key or self._left:
                self._keeping.may_send()
                return await self._unless_cut_off(act())
            self.is_repeated = self._keeping.leaves(self.note.seq)
            self._left = True
            try:
                return await self._unless_cut_off(act())
            except ForebayError as error:
                if says_no(error):
                    self._left = self.is_repeated
                    if self.is_wanted():
                        self._keeping.leaves(self.note.seq, self.is_repeated)
                raise
        finally:
            self.is_cancellable = True

    async def _unless_cut_off(self, request: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What the request gives. It is cut off when others may soon act in this node's place: what lies in its socket
        then would reach the backend after what they flush, and a create is not held off by a delete."""
        running = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({running}, timeout=CUT_OFF_S))[0]:
                self._keeping.may_send(under_way=True)
            return running.result()
        finally:
            if running.cancel():
                await asyncio.wait({running})

    async def keep(self, upload: Upload | None) -> None:
        if upload is None:
            await self._keep(upload_id="", upload_key="", part_bytes=0)
        else:
            upload_key = "" if upload.key == self._key else upload.key
            await self._keep(upload_id=upload.upload_id, upload_key=upload_key, part_bytes=upload.part_bytes)

    async def swept(self) -> None:
        await self._keep(stale=())

    async def leave(self, key: str) -> None:
        await self._destination.leave(key)

    async def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        await run_to_the_end(work)

    def is_wanted(self) -> bool:
        note = self._keeping.note()
        return note is not None and note.seq == self.note.seq

    def does_without(self, error: NotSupported) -> None:
        if error.message not in self._destination.told and len(self._destination.told) < TOLD_MAX:
            self._destination.told.add(error.message)
            log.warning(
                "bucket %s: its backend does not support all of a flush, which goes on without: %s",
                self._destination.bucket.name,
                error,
            )

    # --- bytes -------------------------------------------------------------------------------------------------------
    def _record(self) -> Record:
        record = self._destination.books.lookup(self._destination.bucket.name, self._key)
        if record is None or record.object_id != self.note.object_id:
            if not self.is_wanted():
                raise Superseded
            self._destination.books.check_present(self._destination.bucket.name, self._key)
            self._destination.books.check_lost(self._destination.bucket.name, self._key)
            raise Unavailable(
                f"the bytes of {self._key}, which the backend lacks, cannot be read: see `forebay status`"
            )
        return record

    async def body(self, start: int, end: int) -> Body:
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
        if bad and not self.is_wanted():
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
        if not self.is_wanted():
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
                digest = await self._in_worker(_digest_of_file, self._destination.books.data_path(record))
            except OSError as error:
                raise self._unreadable(error) from error
        await self._keep(digest=digest)

    async def _keep(self, **changes: object) -> None:
        self.note = msgspec.structs.replace(self.note, **changes)
        await self._keeping.keep(self.note)

    async def _in_worker(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._destination.workers, work, *arguments)


def _digest_of_file(path: str) -> str:
    digest = BlockDigest()
    with open(path, "rb") as file:
        while block := file.read(limits.BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
