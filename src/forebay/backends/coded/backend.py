"""The backend of a bucket at `coded://K+M`: objects in slices at nodes, and entries that say what is where.

Theory. `core/cluster/coding.py` has the theory. This is a backend like any other, made of backends: the bucket of
entries, which any node serves, and the places (each node as a backend for the slices that it keeps). A bucket is
written back to it: a write is acknowledged when two nodes have it, as in any bucket, and coded when it is flushed. What
is read often is cached as from any backend.

*A put* reads the body group by group, sends the slices of each at once, and at last replaces the entry, on the
condition that it is the one that was looked at. So a put that comes late replaces nothing newer. The slices of the
entry that was replaced are deleted in the background; what a stop leaves, nodes find and delete
(`node/engine/slices.py`). They wait hours before they do, and a put that was held up for long does not name slices any
more (STALE_S).

*A read* asks the places of the spans that it covers, AHEAD of them at a time. Where a place has not got its slice, does
not live, or is slow, the span is computed from the same range of others, which are asked at once.

Rejected: a multipart upload of its own (a flush sends whole objects, and begins again where it fails); the lengths of
groups in the entry (all but the last are alike); a checksum of each slice (its node has one of each block).

Invariants. (1) An entry names slices only when all of them are synced at their places. (2) What is read is of one
generation. (3) A slice is never written twice with other bytes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from forebay.backends import errors
from forebay.backends.coded.codec import Codec
from forebay.backends.http import bodies
from forebay.backends.refusing import Refusing
from forebay.backends.seam import Backend, Body, Fetch
from forebay.core.cluster.coding import (
    CELL_BYTES,
    ENTRY_BYTES_MAX,
    ETAG_HEADER,
    OF_HEADER,
    TIME_HEADER,
    Entry,
    Shown,
    Span,
    choose,
    decode_entry,
    encode_entry,
    slice_name,
    spans,
)
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.s3rules.tags import with_tags
from forebay.core.types import Headers, ListEntry, ListPage, ObjectInfo, RangeSpec, check_key
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.coded")

AHEAD = 3  # spans of one body that are asked for at once, each a cell at most
SPANS_AT_ONCE = 12  # of a bucket: each may take K cells of memory
GROUPS_AT_ONCE = 2  # of a bucket that are coded and sent: each is in memory, with its slices
PATIENCE_S = 3.0  # with one place, until something comes or goes on: then others are asked
PATIENT_S = 30.0  # with all places, where too few others have it
STALE_S = 120.0  # after its last slice: an entry that comes later is not put, since nodes may have begun to tidy up
GRACE_S = 30.0  # until the slices of what was replaced or deleted go: who reads them now may come to an end
TURNS = 5  # of replacing an entry that changes
DELETES_AT_ONCE = 16
ENTRIES_KEPT_MAX = 256


class Places(Protocol):
    """The nodes that keep slices (`node/engine/slices.py`)."""

    def weights(self, needed: int) -> Mapping[str, float]:
        """The nodes that take slices now, with their weights; so many of them, if there are."""
        ...

    def at(self, node: str, *, rested: bool = False) -> Backend | None:
        """The node as a backend for slices; None for one that does not live, or (`rested`) has `failed` just now."""
        ...

    def failed(self, node: str, error: BaseException) -> None:
        """The node did not answer: it rests for a while."""
        ...

    def refused(self, node: str) -> None:
        """The node took no slice (its disks are full, or failing): others are chosen for a while, if there are
        enough."""
        ...


class CodedBackend(Refusing):
    """See the module. `name` is the bucket's; `entries` gives the bucket of its entries, as who is to be asked now has
    it."""

    scheme = "coded"
    read_only = False

    def __init__(
        self,
        name: str,
        codec: Codec,
        entries: Callable[[], Backend],
        places: Places,
        chance: Chance,
        clock: Clock,
    ) -> None:
        self._name, self._codec, self._entries, self._places = name, codec, entries, places
        self._chance, self._clock, self._grace_s = chance, clock, GRACE_S
        self._reading, self._sending = asyncio.Semaphore(SPANS_AT_ONCE), asyncio.Semaphore(GROUPS_AT_ONCE)
        self._tidying: set[asyncio.Task[None]] = set()
        self._read: OrderedDict[str, Entry] = OrderedDict()  # of objects that are being read, piece by piece

    # --- reading -----------------------------------------------------------------------------------------------------
    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        entry = self._read.get(key) if version else None
        if entry is None or entry.generation != version:
            entry, _ = await self.entry(key)
        if version and version != entry.generation:
            raise errors.changed(self._of(key))
        start, end = range.resolve(entry.size_bytes) if range else (0, entry.size_bytes)
        return CodedFetch(self, entry, _info(key, entry), start, end)

    async def head(self, key: str) -> ObjectInfo:
        return _info(key, (await self.entry(key))[0])

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        info = await self.head(key)
        return None if info.version == version else info

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        page = await self._entries().list_page(prefix, delimiter, start_after, limit)
        entries = []
        for each in page.entries:
            try:
                of = Shown.of(each.etag)
            except Invalid as error:
                log.error("%s is left out of listings: %s", self._of(each.key), error.message)
            else:
                entries.append(ListEntry(each.key, of.size_bytes, of.etag, of.modified_s))
        return ListPage(entries, page.prefixes, page.next_after)

    async def read_tags(self, key: str) -> str:
        return (await self.entry(key))[0].tags

    async def probe(self) -> None:
        await self._entries().probe()

    async def entry(self, key: str) -> tuple[Entry, str]:
        """The entry of a key, and its version as an object. Errors as `fetch`."""
        try:
            fetch = await self._entries().fetch(check_key(key))
            try:
                data = b"".join([bytes(chunk) async for chunk in fetch])
            finally:
                await fetch.aclose()
        except NotFound as error:
            if error.code == "NoSuchKey":
                raise errors.no_such_key(self._of(key)) from None
            raise
        entry = decode_entry(data, self._of(key))
        if entry.body is None:
            self._read[key] = entry
            self._read.move_to_end(key)
            while len(self._read) > ENTRIES_KEPT_MAX:
                self._read.popitem(last=False)
        return entry, fetch.info.version

    async def span(self, key: str, entry: Entry, span: Span) -> bytes:
        """The bytes of a span, or of any range of a slice. `Precondition` if the object is another by now."""
        async with self._reading:
            found = await self.ask(entry, span)
            if found is None:
                found = (await self.ranges(key, entry, span, [span.number]))[span.number]
        return found

    async def ranges(self, key: str, entry: Entry, span: Span, wanted: Sequence[int]) -> dict[int, bytes]:
        """The range of a span in these slices of its group: computed from others, as many as it takes. Errors as
        `span`; `Unavailable` if too many are lost or silent."""
        count, k = entry.code.slices, entry.k
        left = deque(number for number in range(count) if number not in wanted)
        left.extend(wanted)  # asked last: they are wanted since they did not come
        known: dict[int, bytes] = {}

        async def ask(asked: Sequence[int], patience_s: float) -> None:
            each = (self.ask(entry, span._replace(number=number), patience_s) for number in asked)
            got = await asyncio.gather(*each)
            known.update((number, data) for number, data in zip(asked, got, strict=True) if data is not None)

        while len(known) < k and left:
            await ask([left.popleft() for _ in range(min(k - len(known), len(left)))], PATIENCE_S)
        if len(known) < k:  # all are slow, perhaps
            await ask([number for number in range(count) if number not in known], PATIENT_S)
        if len(known) < k:
            now, _ = await self.entry(key)
            if now.generation != entry.generation:
                raise errors.changed(self._of(key))
            if now.revision != entry.revision:  # slices have moved since it was read
                return await self.ranges(key, now, span, wanted)
            raise Unavailable(
                f"{self._of(key)}: of {count} slices only {len(known)} can be read, and {k} are needed: start the "
                "nodes that are missing again (`forebay status` lists them)",
                retry_after_s=1.0,
            )
        restored = await asyncio.to_thread(self._codec.restore, known, wanted)
        return {number: known[number] if number in known else restored[number] for number in wanted}

    async def ask(self, entry: Entry, span: Span, patience_s: float = PATIENCE_S) -> bytes | None:
        """The range of one slice as its place has it; None if that does not give it."""
        place = entry.places[span.number]
        backend = self._places.at(place, rested=patience_s == PATIENCE_S)
        if backend is None:
            return None
        name = slice_name(entry.generation, span.group, span.number)
        try:
            async with asyncio.timeout(patience_s) as patience:
                fetch = await backend.fetch(name, RangeSpec(span.start, span.end - 1))
                chunks = []
                try:
                    async for chunk in fetch:
                        chunks.append(bytes(chunk))
                        patience.reschedule(asyncio.get_running_loop().time() + patience_s)
                finally:
                    await fetch.aclose()
        except (Unavailable, TimeoutError) as error:
            self._places.failed(place, error)
            return None
        except ForebayError as error:  # the slice is not there, or rotted
            log.info("%s does not come from node %s: %s", name, place, error.message)
            return None
        data = b"".join(chunks)
        if fetch.info.size_bytes != entry.slice_bytes(span.group) or len(data) != span.end - span.start:
            log.error("%s at node %s is not as long as it was: it counts as lost", name, place)
            return None
        return data

    # --- writing -----------------------------------------------------------------------------------------------------
    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        check_key(key)
        seen = await self._expected(key, expect)
        told = {name: value for name, value in headers if name in (ETAG_HEADER, TIME_HEADER)}
        etag = told.get(ETAG_HEADER, "")  # of a flush, which has just compared the bytes with their checksums
        entry = Entry(
            etag,
            body.size_bytes,
            math.floor(float(told.get(TIME_HEADER, self._clock.wall_s())) * 1000) / 1000,  # in whole milliseconds
            self._chance.token_hex(12),
            headers=tuple(each for each in headers if each[0] not in told),
            tags=tags,
            k=self._codec.code.k,
            m=self._codec.code.m,
            cell_bytes=CELL_BYTES,
        )
        if body.size_bytes <= ENTRY_BYTES_MAX:
            await body.ready(body.size_bytes)
            data = await asyncio.to_thread(bodies.whole, body)
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            _check_md5(body, md5, self._of(key))
            entry = msgspec.structs.replace(entry, body=data, etag=etag or md5)
            return await self._replace(key, entry, expect, seen)
        entry = msgspec.structs.replace(
            entry, places=choose(entry.generation, self._codec.code, self._places.weights(self._codec.code.nodes_min))
        )
        try:
            md5, sent_s = await self._send_all(key, entry, body, hashes=not etag)
            if not etag:
                _check_md5(body, md5, self._of(key))
        except BaseException:
            self._tidy(entry)
            raise
        entry = msgspec.structs.replace(entry, etag=etag or md5)
        try:
            return await self._replace(key, entry, expect, seen, by_s=sent_s + STALE_S)
        except (Precondition, errors.NotDone):
            self._tidy(entry)  # of anything else nobody knows whether it was put: nodes find out
            raise

    async def _send_all(self, key: str, entry: Entry, body: Body, *, hashes: bool) -> tuple[str, float]:
        """Put all slices at their places; the MD5 of the bytes, if it is asked for, and when the last were sent."""
        md5, at, sent_s = hashlib.md5(usedforsecurity=False), 0, self._clock.monotonic_s()
        for group in range(entry.groups):
            self._check_not_stale(key, sent_s + STALE_S)
            sent_s = self._clock.monotonic_s()
            size_bytes = entry.group_bytes(group)
            await body.ready(at + size_bytes)
            async with self._sending:
                data = await asyncio.to_thread(_piece, body, at, size_bytes)
                if hashes:
                    await asyncio.to_thread(md5.update, data)
                made = await asyncio.to_thread(self._codec.slices_of, data)
                await self.send(key, entry, group, dict(enumerate(zip(entry.places, made, strict=True))))
                del data, made
            at += size_bytes
        return (md5.hexdigest() if hashes else ""), sent_s

    def _check_not_stale(self, key: str, by_s: float) -> None:
        """`NotDone` after that moment: nodes may have begun to delete what was sent."""
        if self._clock.monotonic_s() > by_s:
            raise errors.NotDone(f"{self._of(key)}: its put was held up for too long: it begins anew")

    async def send(self, key: str, entry: Entry, group: int, slices: dict[int, tuple[str, bytes]]) -> None:
        """Have nodes keep these slices of a group, by number. `Unavailable` unless all do."""
        of = ((OF_HEADER, base64.urlsafe_b64encode(f"{self._name}/{key}".encode()).decode()),)

        async def send(number: int, place: str, data: bytes) -> None:
            backend = self._places.at(place)
            if backend is None:
                raise Unavailable(f"node {place} is not heard of: its slices go elsewhere next time", retry_after_s=1.0)
            try:
                await backend.put(slice_name(entry.generation, group, number), Body(len(data), data), headers=of)
            except ForebayError as error:
                self._places.refused(place)
                raise Unavailable(f"node {place} keeps no slice: {error.message}", retry_after_s=1.0) from error

        said = await asyncio.gather(*(send(number, *what) for number, what in slices.items()), return_exceptions=True)
        for error in said:
            if error is not None:
                raise error

    async def _expected(self, key: str, expect: str | None) -> tuple[Entry, str] | None:
        """The entry and its version, None for none. `Precondition` if it is not what is expected."""
        try:
            seen = await self.entry(key)
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise
            if expect:
                raise errors.changed(self._of(key)) from None
            return None
        if expect == "":
            raise errors.exists(self._of(key))
        if expect is not None and seen[0].generation != expect:
            raise errors.changed(self._of(key))
        return seen

    async def _replace(
        self, key: str, entry: Entry, expect: str | None, seen: tuple[Entry, str] | None, by_s: float = 0.0
    ) -> ObjectInfo:
        """Make this the entry of the key, and let go of what was there."""
        for turn in range(TURNS):
            if by_s:
                self._check_not_stale(key, by_s)
            try:
                await self.put_entry(key, entry, "" if seen is None else seen[1])
            except Precondition:
                if turn == TURNS - 1:
                    raise
                seen = await self._expected(key, expect)
                continue
            if seen is not None:
                self._tidy(seen[0])
            return _info(key, entry)
        raise AssertionError("a turn ends the loop")

    async def put_entry(self, key: str, entry: Entry, version: str) -> None:
        """Replace the entry of this version ("": there is none). `Precondition`."""
        data = encode_entry(entry)
        headers = ((ETAG_HEADER, entry.shown().text()),)
        await self._entries().put(key, Body(len(data), data), headers=headers, expect=version)

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        if expect == "":
            raise errors.expects_nothing(self._of(key))
        for turn in range(TURNS):
            seen = await self._expected(key, expect)
            if seen is None:
                return
            try:
                await self._entries().delete(key, expect=seen[1])
            except Precondition:
                if turn == TURNS - 1:
                    raise
                continue
            self._tidy(seen[0])
            return

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        raise NotSupported("coded objects are not copied where they are: read and put")

    async def write_tags(self, key: str, tags: str) -> None:
        for turn in range(TURNS):
            entry, version = await self.entry(key)
            try:
                await self.put_entry(
                    key, msgspec.structs.replace(entry, tags=tags, revision=entry.revision + 1), version
                )
            except Precondition:
                if turn == TURNS - 1:
                    raise
                continue
            return

    # --- tidying up --------------------------------------------------------------------------------------------------
    def _tidy(self, entry: Entry) -> None:
        """Delete the slices of an entry that is none any more, in the background."""
        if entry.body is None:
            names = ((place, slice_name(entry.generation, group, number)) for group in range(entry.groups)
                     for number, place in enumerate(entry.places))  # fmt: skip
            self._in_background(self._drop_later(names))

    async def _drop_later(self, names: Iterable[tuple[str, str]]) -> None:
        await asyncio.sleep(self._grace_s)
        await self.drop(names)

    async def drop(self, names: Iterable[tuple[str, str]]) -> None:
        """Delete slices at nodes. What cannot be deleted now, its node deletes later."""
        todo = iter(names)

        async def some() -> None:
            for place, name in todo:
                backend = self._places.at(place)
                if backend is not None:
                    with contextlib.suppress(ForebayError):
                        await backend.delete(name)

        await asyncio.gather(*(some() for _ in range(DELETES_AT_ONCE)))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def aclose(self) -> None:
        for task in self._tidying:
            task.cancel()
        await asyncio.gather(*self._tidying, return_exceptions=True)

    def _of(self, key: str) -> str:
        return f"{self._name}/{key}"


class CodedFetch:
    """A body, of which AHEAD spans are asked for at once."""

    def __init__(self, backend: CodedBackend, entry: Entry, info: ObjectInfo, start: int, end: int) -> None:
        self.info, self.start, self.end = info, start, end
        self._read = functools.partial(backend.span, info.key, entry)
        self._body = entry.body
        self._spans: Iterator[Span] = iter(()) if entry.body is not None else spans(entry, start, end)
        self._coming: deque[asyncio.Task[bytes]] = deque()

    def __aiter__(self) -> CodedFetch:
        return self

    async def __anext__(self) -> bytes:
        if self._body is not None:
            body, self._body = self._body[self.start : self.end], None
            if body:
                return body
        while len(self._coming) < AHEAD and (span := next(self._spans, None)) is not None:
            self._coming.append(asyncio.ensure_future(self._read(span)))
        if not self._coming:
            raise StopAsyncIteration
        return await self._coming.popleft()

    async def aclose(self) -> None:
        self._spans, self._body = iter(()), None
        coming, self._coming = self._coming, deque()
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def _info(key: str, entry: Entry) -> ObjectInfo:
    headers = with_tags(entry.headers, entry.tags)  # a copy takes them along
    return ObjectInfo(key, entry.size_bytes, entry.generation, entry.etag, entry.modified_s, headers)


def _check_md5(body: Body, md5: str, what: str) -> None:
    if body.md5 not in ("", md5):
        raise Corrupt(f"{what}: the body was damaged on its way (its MD5 is {md5}, not {body.md5}): send it again")


def _piece(body: Body, start: int, size_bytes: int) -> bytes:
    data = None if body.data is None else body.data[start : start + size_bytes]
    return bodies.whole(body._replace(size_bytes=size_bytes, data=data, offset=body.offset + start))
