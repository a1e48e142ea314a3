"""One cloud bucket behind the seam: bodies through obstore, listings and unusual keys through `http/requests.py`.

Theory. obstore streams bodies in native threads without the GIL, so every body of an ordinary key goes through it: one
`get` per fetch, whose answer has the metadata too. Its retry is off, since the stack retries. obstore treats a key as a
path: it drops leading and trailing slashes and refuses empty and dot segments and control characters. `is_plain` says
which keys it passes unchanged; the others use our own requests. So do objects with non-ASCII metadata, which obstore
refuses to read (one more request for those). After every answer, the name that obstore used is compared with the key.

A version is the backend's ETag as sent, quotes included, so that it fits If-Match. Where the ETag is weak or absent
(plain HTTP allows that), the version is made of ETag, date and size, and compared after the answer only. Every answer's
version is compared, since some servers ignore conditions.

obstore does not report Retry-After. So after a "slow down" all requests are our own for WARY_S, and `Retrying` obeys
the time that the next answer names.

A missing object and a missing bucket are both a 404. The first drops a cached copy; the second must not. The body's
code tells them apart, but the answer to a HEAD has no body. So after a 404 without a code the bucket is listed too (one
key), unless it answered something else recently: for a `check`, whose answer drops a copy, since the request began;
otherwise within SEEN_KEPT_S. A web server has no buckets.

Rejected: HEAD of the bucket (Azure and GCS differ, and each needs other rights); keys with `.` or `..` segments (clouds
allow them, but a proxy may resolve them into another object, read with this bucket's credentials: RFC 3986, 5.2.4).

Invariants. (1) One request per `fetch`, except for a suffix range on Azure (which has none), a first range on an HTTP
server without ranges, a 404 without a code, and a bucket that `tells_keeping`: its objects are looked at, too. (2) A
body never ends early without an error and never exceeds its range. (3) Only the object of exactly the wanted key is
returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import obstore

from forebay.backends import errors
from forebay.backends.http.pace import Pace, pace_of
from forebay.backends.http.requests import Wire, WireFetch, bare_etag, is_condition, of_version_id, version_of
from forebay.backends.refusing import Refusing
from forebay.backends.seam import Body, Fetch, PartSeen, UploadSeen
from forebay.core import limits
from forebay.core.errors import (
    Busy,
    Corrupt,
    Denied,
    ForebayError,
    Invalid,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.s3rules.keeping import keeping_among, kept_as
from forebay.core.types import Headers, ListEntry, ListPage, ObjectInfo, RangeSpec, check_key
from forebay.ports.clock import Clock

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult
    from obstore.store import ObjectStore

log = logging.getLogger("forebay.backends")
ResultT = TypeVar("ResultT")

WARY_S = 10.0  # far more than `Retrying` waits before the attempt that follows
LOOK_WAIT_S = 0.5  # how much later than a body the HEAD beside it may come: no read is much slower for it
SEEN_KEPT_S = 2.0  # who asks key after key whether it exists pays for one more request in two seconds

_PLAIN = re.compile(r"(?!/)(?:(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+(?:/(?=[^/])|\Z))+")
_DOTS = re.compile(r"(?:\A|/)\.{1,2}(?:/|\Z)")
_CONTENT = {
    "Content-Type": "content-type",
    "Content-Encoding": "content-encoding",
    "Content-Language": "content-language",
    "Content-Disposition": "content-disposition",
    "Cache-Control": "cache-control",
    "Storage-Class": "x-amz-storage-class",
}

ListPageBlocking = Callable[[str, str, str, int], ListPage]


def is_plain(key: str) -> bool:
    """Whether obstore passes `key` to the backend as it is."""
    return _PLAIN.fullmatch(key) is not None


class CloudFetch:
    """A body from obstore. It is its own iterator, so that closing it drops the answer whoever still holds it."""

    def __init__(
        self,
        result: GetResult,
        info: ObjectInfo,
        start: int,
        end: int,
        what: str,
        skip_bytes: int,
        pace: Pace,
        clock: Clock,
    ) -> None:
        self.info, self.start, self.end = info, start, end
        self._pace, self._clock = pace, clock
        self._began = False
        self._stream: Any = result.stream(min_chunk_size=pace.chunk_bytes) if end > start else None
        # The first chunk is on its way before anybody asks: whoever opened this makes room for it meanwhile.
        self._ahead: Any = self._stream.__anext__() if self._stream is not None else None
        self._what, self._skip_bytes, self._got_bytes = what, skip_bytes, 0

    def __aiter__(self) -> CloudFetch:
        return self

    async def __anext__(self) -> Any:
        wanted = self.end - self.start
        while self._stream is not None and self._got_bytes < wanted:
            try:
                ahead, self._ahead = self._ahead, None
                chunk = await (ahead or self._stream.__anext__())
            except StopAsyncIteration:
                self._let_go()
                raise errors.ended_early(self._what, self._got_bytes, wanted) from None
            except Exception as error:
                self._let_go()
                raise errors.from_obstore(error, self._what) from error
            self._came(len(chunk))
            if self._skip_bytes or self._got_bytes + len(chunk) > wanted:
                chunk = self._trim(chunk, wanted - self._got_bytes)
            self._got_bytes += len(chunk)
            if self._got_bytes >= wanted:
                self._let_go()
            if len(chunk):
                return chunk
        self._let_go()
        raise StopAsyncIteration

    def _came(self, size_bytes: int) -> None:
        if self._began:
            self._pace.came(self._clock.monotonic_s(), size_bytes)
        else:
            self._began = True
            self._pace.began(self._clock.monotonic_s())

    def _let_go(self) -> None:
        """Drop the answer, which closes its connection if it is not at its end."""
        self._stream = None
        if self._began:
            self._began = False
            self._pace.ended(self._clock.monotonic_s())

    def _trim(self, chunk: Any, room_bytes: int) -> memoryview:
        """Of a whole body, what lies in the range asked (only where the server knows no ranges)."""
        view = memoryview(chunk)
        skipped = min(self._skip_bytes, len(view))
        self._skip_bytes -= skipped
        return view[skipped : skipped + room_bytes]

    async def aclose(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        self._let_go()


class Writes(Protocol):
    """The writing half of a service: the seam's methods, on keys of the bucket behind."""

    part_bytes_min: int

    async def put(self, key: str, body: Body, headers: Headers, expect: str | None, tags: str) -> ObjectInfo: ...

    async def delete(self, key: str, expect: str | None) -> None: ...

    async def copy(self, source_key: str, key: str, source_version: str, headers: Headers | None) -> ObjectInfo: ...

    async def read_tags(self, key: str) -> str: ...

    async def write_tags(self, key: str, tags: str) -> None: ...

    async def begin_upload(self, key: str, headers: Headers, tags: str) -> str: ...

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str: ...

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], expect: str | None
    ) -> ObjectInfo: ...

    async def abort_upload(self, key: str, upload_id: str) -> None: ...

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]: ...

    async def list_uploads(self, prefix: str) -> list[UploadSeen]: ...

    def close(self) -> None:
        """Close connections of its own."""


def check_sendable(key: str, what: str) -> None:
    """`Invalid` for a key that no request may name."""
    if _DOTS.search(key):
        raise Invalid(
            f"{what}: a key with '.' or '..' between slashes cannot be sent safely, as proxies resolve them: "
            "use another key",
            code="InvalidURI",
        )


class CloudReads:
    """The reading half of `Cloud`."""

    def __init__(
        self,
        scheme: str,
        open_store: Callable[[], ObjectStore],
        wire: Wire,
        prefix: str,
        list_page: ListPageBlocking | None,
        clock: Clock,
    ) -> None:
        self.scheme = scheme
        self._clock, self._seen_s = clock, float("-inf")  # monotonic: when a request began that the bucket answered
        self._open_store, self._wire, self._prefix, self._list_page = open_store, wire, prefix, list_page
        self._pace = pace_of(wire.url)
        self._has_ranges = True
        self.by_wire = False  # nothing goes through obstore
        self._wary_until_s = float("-inf")  # monotonic: nor before then
        self._looks: set[asyncio.Task[ObjectInfo]] = set()
        self.tells_keeping = False  # what is read says in which class it is and how encrypted; obstore does not

    @functools.cached_property
    def _store(self) -> ObjectStore:
        """Made when a body is first read with it: that takes 12 ms of the loop, over TLS 45. A node knows a thousand
        buckets, and each at every other node, anew with each map; most of them are never read there."""
        return self._open_store()

    async def _get(self, full: str, options: GetOptions) -> GetResult:
        """obstore's answer. Where it has no descriptors to begin its threads it panics: no `Exception`, so who waits
        for the bytes would wait for ever, and it never begins them again. Then `Unavailable`, and our own requests
        from now on."""
        try:
            return await obstore.get_async(self._store, full, options=options)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust; it cannot be imported
                raise
            self.by_wire = True
            log.error("%s is read without obstore from now on, which is slower (%s): restart", self._wire.url, error)
            raise Unavailable(f"{self._wire.url}: files are short: raise `ulimit -n`, and restart") from error

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        full, what = self._full(key)
        if range is not None:
            _check_range(range, what)
        return await self._answered(self._fetch_any(full, key, what, range, version), SEEN_KEPT_S)

    async def _fetch_any(self, full: str, key: str, what: str, range: RangeSpec | None, version: str) -> Fetch:
        if range is not None and range.first is None and self.scheme == "az":
            # Azure has no suffix ranges: ask for the size, then for that version's end.
            info = await self._head(full, key, what)
            if version and info.version != version:
                raise errors.changed(what)
            start, end = range.resolve(info.size_bytes)
            return await self._fetch(full, key, what, RangeSpec(start, end - 1), info.version)
        if self.tells_keeping and not version:
            return await self._fetch_and_look(full, key, what, range)
        return await self._fetch(full, key, what, range, version)

    async def _fetch_and_look(self, full: str, key: str, what: str, range: RangeSpec | None) -> Fetch:
        """A body, with what a HEAD meanwhile says of how the object is kept."""
        looking = asyncio.create_task(self._head_by_wire(full, key))
        self._looks.add(looking)  # it ends by itself: if it were cancelled, nobody would close what its thread opens
        looking.add_done_callback(self._looked)
        opened = await self._fetch(full, key, what, range, "")
        try:
            await asyncio.wait([looking], timeout=LOOK_WAIT_S)
        except BaseException:
            await opened.aclose()
            raise
        seen = looking.result() if looking.done() and not looking.exception() else None
        if seen is not None and seen.version == opened.info.version:
            headers = kept_as(opened.info.headers, keeping_among(seen.headers))
            opened.info = msgspec.structs.replace(opened.info, headers=headers)
        return opened

    def _looked(self, look: asyncio.Task[ObjectInfo]) -> None:
        self._looks.discard(look)
        if not look.cancelled():
            look.exception()  # seen, if nobody asks for it

    async def _fetch_by_wire(self, full: str, key: str, range: RangeSpec | None, version: str) -> WireFetch:
        call = functools.partial(self._wire.open, full, range, version, version_id=self._version_id(key))
        opened = await self._wire.run(call)
        opened.info = msgspec.structs.replace(opened.info, key=key)
        return opened

    async def _fetch(self, full: str, key: str, what: str, range: RangeSpec | None, version: str) -> Fetch:
        if not self._by_obstore(full):
            try:
                return await self._fetch_by_wire(full, key, range, version)
            except NotSupported:
                if self.by_wire or not is_plain(full):
                    raise  # else it may be a server without ranges, which is dealt with here
        options = _options(range if self._has_ranges else None, version, self._version_id(key))
        try:
            result = await self._get(full, options)
        except Exception as error:
            if errors.cannot_tell(error):
                return await self._fetch_by_wire(full, key, range, version)
            failed = errors.from_obstore(error, what)
            if isinstance(failed, NotSupported) and "range" in options and self.scheme in ("http", "https"):
                # A server without ranges, or (nginx) an empty object: take the whole and cut it.
                whole = await self._fetch_whole(full, key, what, range, version)
                self._has_ranges = whole.info.size_bytes == 0
                return whole
            if failed is error:
                raise
            raise failed from error
        return self._open(result, full, key, what, range, version)

    async def _fetch_whole(self, full: str, key: str, what: str, range: RangeSpec | None, version: str) -> CloudFetch:
        try:
            options = _options(None, version, self._version_id(key))
            result = await self._get(full, options)
        except Exception as error:
            raise errors.from_obstore(error, what) from error
        return self._open(result, full, key, what, range, version)

    def _open(
        self, result: GetResult, full: str, key: str, what: str, range: RangeSpec | None, version: str
    ) -> CloudFetch:
        """The body of an answer, after looking whether it is what was asked for."""
        info = self._describe(result, full, key, what)
        if version and info.version != version:
            raise errors.changed(what)
        start, end = range.resolve(info.size_bytes) if range is not None else (0, info.size_bytes)
        got_start, got_end = result.range
        if (got_start, got_end) == (0, info.size_bytes):
            return CloudFetch(result, info, start, end, what, start, self._pace, self._clock)
        if (got_start, got_end) != (start, end):
            raise Corrupt(f"{what}: bytes {start}-{end} were asked for and {got_start}-{got_end} came: try again")
        return CloudFetch(result, info, start, end, what, 0, self._pace, self._clock)

    def _by_obstore(self, full: str) -> bool:
        return not self.by_wire and self._clock.monotonic_s() >= self._wary_until_s and is_plain(full)

    async def _answered(self, answer: Awaitable[ResultT], kept_s: float) -> ResultT:
        """What `answer` is. A `NotFound` that does not say of what is one only if the bucket is there, or answered
        something else `kept_s` before it was asked or later; else it is `NoBackendBucket`, or why that is not known."""
        asked_s = self._clock.monotonic_s()
        try:
            result = await answer
        except NotFound as missing:
            if not errors.says_what_is_missing(missing.__cause__) and self._seen_s < asked_s - kept_s:
                await self._look_for_bucket()
            self._seen_s = max(self._seen_s, asked_s)
            raise
        except Busy:
            self._wary_until_s = self._clock.monotonic_s() + WARY_S
            raise
        self._seen_s = max(self._seen_s, asked_s)
        return result

    async def _look_for_bucket(self) -> None:
        if self._list_page is not None:
            # Where the bucket may not be listed, its 404 must do.
            with contextlib.suppress(Denied, Invalid, NotSupported):
                await self._wire.run(functools.partial(self._list_page, self._prefix, "", "", 1))

    async def head(self, key: str) -> ObjectInfo:
        full, what = self._full(key)
        return await self._answered(self._head(full, key, what), SEEN_KEPT_S)

    async def _head(self, full: str, key: str, what: str) -> ObjectInfo:
        if self.tells_keeping or not self._by_obstore(full):
            return await self._head_by_wire(full, key)
        try:
            options: GetOptions = {"head": True, **_options(None, "", self._version_id(key))}
            result = await self._get(full, options)
        except Exception as error:
            if errors.cannot_tell(error):
                return await self._head_by_wire(full, key)
            raise self._head_failed(errors.from_obstore(error, what), what) from error
        return self._describe(result, full, key, what)

    async def _head_by_wire(self, full: str, key: str) -> ObjectInfo:
        call = functools.partial(self._wire.open, full, None, "", head=True, version_id=self._version_id(key))
        opened = await self._wire.run(call)
        await opened.aclose()
        return msgspec.structs.replace(opened.info, key=key)

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self._answered(self._check(key, version), 0.0)

    async def _check(self, key: str, version: str) -> ObjectInfo | None:
        full, what = self._full(key)
        if not self._by_obstore(full) or not is_condition(version):
            info = await self._head(full, key, what)
            return None if info.version == version else info
        try:
            options = _options(None, "", self._version_id(key))
            options |= {"head": True, "if_none_match": version}
            result = await self._get(full, options)
        except Exception as error:
            failed = errors.from_obstore(error, what)
            if isinstance(failed, Precondition):
                return None
            if errors.cannot_tell(error):
                info = await self._head_by_wire(full, key)
                return None if info.version == version else info
            raise self._head_failed(failed, what) from error
        info = self._describe(result, full, key, what)
        if info.version != version and self.tells_keeping:
            info = await self._head_by_wire(full, key)
        return None if info.version == version else info

    def _head_failed(self, failed: ForebayError, what: str) -> ForebayError:
        """A HEAD has no body, so a bare 400 hides its reason: give the usual ones."""
        if isinstance(failed, Invalid) and not failed.code:
            return Invalid(f"{failed.message}; HEAD tells no reason: the usual ones are a wrong region or bad keys")
        return failed

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        if self._list_page is None:
            raise NotSupported(
                f"{self._wire.url} is a plain HTTP server and cannot be listed: read its objects by their keys, or use "
                "an S3 endpoint of the same data"
            )
        own = self._prefix
        after = own + start_after  # after the prefix itself too: a folder marker of that name is outside the bucket
        listed = self._wire.run(functools.partial(self._list_page, own + prefix, delimiter, after, limit))
        page = await self._answered(listed, 0.0)
        if not own:
            return page
        cut = len(own)
        entries = [ListEntry(entry.key[cut:], *entry[1:]) for entry in page.entries]
        prefixes = [common[cut:] for common in page.prefixes]
        return ListPage(entries, prefixes, page.next_after[cut:])

    async def probe(self) -> None:
        if self._list_page is not None:
            await self._wire.run(functools.partial(self._list_page, self._prefix, "", "", 1))
            return
        answer = await self._wire.run(functools.partial(self._wire.ask, [], method="HEAD", key=self._prefix))
        # 403 and 404 are what servers answer for a folder without an index.
        if answer.status in (401, 407, 429) or answer.status >= 500:
            raise errors.from_status(
                answer.status, answer.body.decode(errors="replace"), self._wire.url, answer.headers
            )

    async def aclose(self) -> None:
        if self._looks:
            await asyncio.wait(self._looks, timeout=LOOK_WAIT_S)
        self._wire.close()

    def _version_id(self, key: str) -> str:
        """The version that a request for `key` names, "" for the current one."""
        return ""

    def _describe(self, result: GetResult, full: str, key: str, what: str) -> ObjectInfo:
        info, version_id = _describe(result, full, key), self._version_id(key)
        return of_version_id(info, version_id, result.meta["version"] or "", what) if version_id else info

    def _full(self, key: str) -> tuple[str, str]:
        """The key behind the prefix, and the object's name for messages; `Invalid` for keys that cannot be sent."""
        check_key(key)
        full = self._prefix + key
        what = f"{self._wire.url}/{full}"
        if len(full.encode()) > limits.KEY_BYTES_MAX:
            raise Invalid(f"{what}: with the bucket's prefix the key is too long", code="KeyTooLongError")
        check_sendable(full, what)
        if self._list_page is None and ("//" in full or full[0] == "/" or full[-1] == "/"):
            raise errors.no_such_key(what)  # web servers fold slashes, and answer a folder with its index
        return full, what


class Unwritten(CloudReads, Refusing):
    """What can be read but not written, such as a plain web server."""

    read_only = True


class Cloud(CloudReads):
    """See the module. `locate.py` makes these. `prefix` is what comes before every key in the bucket behind."""

    read_only = False

    def __init__(
        self,
        scheme: str,
        open_store: Callable[[], ObjectStore],
        wire: Wire,
        prefix: str,
        list_page: ListPageBlocking,
        writes: Writes,
        clock: Clock,
    ) -> None:
        super().__init__(scheme, open_store, wire, prefix, list_page, clock)
        self._writes = writes
        self.part_bytes_min = writes.part_bytes_min

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        full, _ = self._full(key)
        return self._own(key, await self._writes.put(full, body, headers, expect, tags))

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        full, what = self._full(key)
        if expect == "":
            raise errors.expects_nothing(what)
        await self._writes.delete(full, expect)

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        source, full = self._full(source_key)[0], self._full(key)[0]
        return self._own(key, await self._writes.copy(source, full, source_version, headers))

    async def read_tags(self, key: str) -> str:
        return await self._writes.read_tags(self._full(key)[0])

    async def write_tags(self, key: str, tags: str) -> None:
        await self._writes.write_tags(self._full(key)[0], tags)

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return await self._writes.begin_upload(self._full(key)[0], headers, tags)

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        errors.check_part_number(number)
        return await self._writes.put_part(self._full(key)[0], upload_id, number, body)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        return self._own(key, await self._writes.complete_upload(self._full(key)[0], upload_id, parts, expect))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._writes.abort_upload(self._full(key)[0], upload_id)

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        return await self._writes.list_parts(self._full(key)[0], upload_id)

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        found = await self._writes.list_uploads(self._prefix + prefix)
        return [seen._replace(key=seen.key[len(self._prefix) :]) for seen in found]

    async def aclose(self) -> None:
        self._writes.close()
        await super().aclose()

    def _own(self, key: str, info: ObjectInfo) -> ObjectInfo:
        return msgspec.structs.replace(info, key=key) if self._prefix else info


def _options(range: RangeSpec | None, version: str, version_id: str = "") -> GetOptions:
    options: GetOptions = {}
    if range is not None:
        if range.first is None:
            options["range"] = {"suffix": range.last or 0}
        elif range.last is None:
            options["range"] = {"offset": range.first}
        else:
            options["range"] = (range.first, range.last + 1)
    if is_condition(version):
        options["if_match"] = version
    if version_id:
        options["version"] = version_id
    return options


def _check_range(range: RangeSpec, what: str) -> None:
    empty = not range.last if range.first is None else range.last is not None and range.last < range.first
    if empty:
        raise errors.out_of_range(what)


def _describe(result: GetResult, full: str, key: str) -> ObjectInfo:
    meta = result.meta
    if meta["path"] != full:
        raise Corrupt(f"{full!r} was asked for and {meta['path']!r} came: this key cannot be read through obstore")
    etag, modified_s, size = meta["e_tag"] or "", meta["last_modified"].timestamp(), meta["size"]
    version = version_of(etag, modified_s, size)
    return ObjectInfo(key, size, version, bare_etag(etag), modified_s, _headers(result.attributes))


def _headers(attributes: Mapping[str, str]) -> Headers:
    content, metadata = [], []
    for name, value in attributes.items():
        if name in _CONTENT:
            content.append((_CONTENT[name], value))
        else:
            metadata.append(("x-amz-meta-" + name.lower(), value))
    return (*sorted(content), *sorted(metadata))
