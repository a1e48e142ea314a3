"""Reads the listed versions straight from the bucket's backend when the node is gone.

Theory. What a node served is still in the bucket, so a job that may read the bucket need not stop. The listing gives
keys, sizes and etags, and a sample is an object or a range of one. Items become requests to the backend, PARALLEL at
once, each of which must answer with the listed etag. Nothing is cached and no range is read twice. This is slower than
a node, and serves until one is back.

The node named the bucket's place when the dataset was made, or the user gave it. Secrets never come from the node: this
process's environment and profiles have them, or the user gives them.

obstore, which reads fastest, hangs in a process forked from one that used it. So each process opens its backend on
first use, on a loop in a thread of its own. A child of a process that had loaded obstore reads by our own requests,
which have no state that a fork could break.

Some things only the node can do: unpack deflated members and compressed shards, and read objects that it has not
written to the backend yet. Those raise `Refused`, and the caller waits for the node.

Invariants. (1) A value is bytes of the wanted version, or an error. (2) A pickle holds settings, and no connection,
thread or loop.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.core import limits
from forebay.core.backend_options import HIDDEN
from forebay.core.errors import Denied, ForebayError, Invalid, NoBackendBucket, NotFound, NotSupported, Precondition
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.formats.members import SNIFF_BYTES, MemberIndex, form_of
from forebay.core.formats.members import build as build_members
from forebay.core.messages.batch import Item
from forebay.core.types import LOCAL_URL, Bucket, RangeSpec
from forebay.core.versions import versioned

if TYPE_CHECKING:
    from forebay.backends.seam import Backend, Fetch

PARALLEL = 32  # requests at once in a process: at 20 ms each, some 1,500 samples a second
_CLOSING_S = 2.0
_REFUSALS = (Denied, Invalid, NoBackendBucket, NotSupported)  # a backend that says this of one item says it of all
_FORKED = threading.Event()  # this process was forked from one that had loaded obstore

T = TypeVar("T")


def _note_fork() -> None:
    if "obstore" in sys.modules:
        _FORKED.set()


os.register_at_fork(after_in_child=_note_fork)
if multiprocessing.parent_process() is not None:  # perhaps a fork of a process that had not loaded this module
    _note_fork()


class Refused(Exception):
    """The bucket cannot be read past the node; the text says why, and what to do."""


def settings_told(bucket: Bucket) -> Bucket:
    """What a node says of a bucket, without what it hides: `Refused` if nobody else can read that bucket."""
    if bucket.url == LOCAL_URL:
        raise Refused("the bucket is on the node alone")
    if bucket.url.startswith("memory://"):
        raise Refused("its backend is the node's memory")
    options = {name: value for name, value in bucket.options.items() if value != HIDDEN}
    if len(options) < len(bucket.options):
        options.pop("access_key_id", None)  # goes with a secret
    return Bucket(bucket.name, bucket.url, write=bucket.write, options=options)


def settings_given(name: str, direct: Mapping[str, str]) -> Bucket:
    """The settings in a dataset's `direct`: `url`, and options as of `forebay bucket add`."""
    options = dict(direct)
    url = options.pop("url", "")
    if "://" not in url or url == LOCAL_URL:
        raise Invalid("direct= needs the bucket's own URL: write direct={'url': 's3://bucket/prefix', …options…}")
    return Bucket(name, url, options=options)


class DirectSource:
    """`bucket`, read from its backend. `given`: its settings are the user's, who knows that they are right here; where
    they are the node's, a path may name something else on this machine.

    `Refused` when this bucket cannot be read here; other errors as of `Source`.
    """

    def __init__(self, bucket: Bucket, given: bool = False) -> None:
        self.bucket, self.given = bucket, given
        self._readers: dict[int, _Reader] = {}  # by process; those of a parent are only kept from being taken apart

    def __reduce__(self) -> tuple[Any, ...]:
        return DirectSource, (self.bucket, self.given)

    def __repr__(self) -> str:
        return f"<DirectSource {self.bucket.name} at {self.bucket.url}>"  # without options: some are secrets

    def get_many(self, items: Sequence[Item]) -> list[Any]:
        """The bytes of all items, in order; what is wrong with one of them stands in its place."""
        for item in items:
            if item.member:
                raise Refused(f"{item.bucket}/{item.key} is compressed, and only the node unpacks")
        values: list[Any] = self._run(lambda reader: reader.read_many(items))
        for value in values:
            if isinstance(value, ForebayError):
                self._check(value)
        return values

    def listing(self, bucket: str, prefix: str, id: str = "") -> Listing:
        """The listing as the backend has it now; with `id` that one, else `Precondition`."""
        found = Listing(build(bucket, prefix, self._ask(lambda reader: reader.listed(prefix))))
        if id not in ("", found.id):
            raise Precondition(f"{bucket}/{prefix} is not what it was when the dataset was listed: start anew")
        return found

    def members(self, bucket: str, key: str, etag: str, version: str = "") -> MemberIndex:
        """What is in a shard; reads it by its headers, 64 KiB at a time."""
        info = self._ask(lambda reader: reader.info(key, version))
        if etag and info.etag != etag:
            raise _changed(bucket, key)

        def read(start: int, size: int) -> bytes:
            (value,) = self.get_many([Item(bucket, key, start, start + size, "", info.etag, version)])
            if isinstance(value, ForebayError):
                raise value
            data: bytes = value
            return data

        form = form_of(key, None) or form_of(key, read(0, SNIFF_BYTES) if info.size_bytes else b"")
        assert form is not None, "the first bytes decide"
        if form.packing:
            raise Refused(f"{bucket}/{key} is compressed, and only the node unpacks")
        return build_members(form.kind, read, info.size_bytes, version=info.version, etag=info.etag)

    def _ask(self, ask: Any) -> Any:
        try:
            return self._run(ask)
        except ForebayError as error:
            self._check(error)
            raise

    def _check(self, error: ForebayError) -> None:
        """`Refused` for an error that says nothing of the object."""
        if isinstance(error, _REFUSALS):
            raise Refused(f"{error.message}; see docs/training.md for `direct=`") from error
        if isinstance(error, NotFound | Precondition):
            if self.bucket.write == "back":
                raise Refused(f"perhaps the node has not written it yet: {error.message}") from error
            if self.bucket.url.startswith("file:") and not self.given:
                raise Refused(f"perhaps that is another directory on this machine: {error.message}") from error

    def _run(self, ask: Any) -> Any:
        pid = os.getpid()
        reader = self._readers.get(pid)
        if reader is None:
            try:
                made = _Reader(self.bucket)
            except ForebayError as error:
                raise Refused(error.message) from error
            reader = self._readers.setdefault(pid, made)
            if reader is made:
                weakref.finalize(self, made.close)
            else:
                made.close()
        return reader.run(ask(reader))


class _Reader:
    """A backend and the loop it lives on, in one process."""

    def __init__(self, bucket: Bucket) -> None:
        self._pid = os.getpid()
        self._bucket = bucket
        self._backend = _opened(bucket)
        self._of_versions: Backend | None = None  # which are read by their ids
        self._room = asyncio.Semaphore(PARALLEL)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-direct", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, done on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Give up what is under way. In a child of the process that made it: nothing, it is not there."""
        if self._pid != os.getpid() or self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_CLOSING_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._backend.aclose()
        if self._of_versions is not None:
            await self._of_versions.aclose()
        self._loop.stop()

    async def read_many(self, items: Sequence[Item]) -> list[bytes | ForebayError]:
        return await asyncio.gather(*map(self._read, items))

    async def _read(self, item: Item) -> bytes | ForebayError:
        span = None
        if item.start or item.end is not None:
            span = RangeSpec(item.start, None if item.end is None else item.end - 1)
        try:
            async with self._room:
                body = await self._fetch(item.key, item.version, span)
                try:
                    if item.etag and body.info.etag != item.etag:
                        return _changed(item.bucket, item.key)
                    return b"".join([chunk async for chunk in body])
                finally:
                    await body.aclose()
        except ForebayError as error:
            if error.code == "InvalidRange":  # the size was listed
                return _changed(item.bucket, item.key)
            return error

    async def _fetch(self, key: str, version: str, span: RangeSpec | None = None) -> Fetch:
        if not version:
            return await self._backend.fetch(key, span)
        bucket, name = versioned(self._bucket, key, version)
        if self._of_versions is None:
            self._of_versions = _opened(bucket)
        return await self._of_versions.fetch(name, span)

    async def info(self, key: str, version: str = "") -> Any:
        """What a read of the object says of it."""
        body = await self._fetch(key, version)
        await body.aclose()
        return body.info

    async def listed(self, prefix: str) -> list[Any]:
        """All objects, as pieces of a listing."""
        pieces, after = [], ""
        while True:
            page = await self._backend.list_page(prefix, "", after, limits.LIST_KEYS_MAX)
            pieces.append(pack(page.entries))
            if not page.next_after:
                return pieces
            after = page.next_after


def _opened(bucket: Bucket) -> Backend:
    from forebay.backends.stack import open_backend  # loads obstore: only in processes that come to need it

    return open_backend(bucket, forked=_FORKED.is_set())


def _changed(bucket: str, key: str) -> Precondition:
    return Precondition(f"{bucket}/{key} changed in its backend since the dataset was listed: start anew")
