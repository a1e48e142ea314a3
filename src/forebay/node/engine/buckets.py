"""The buckets a node serves, kept in the metadata store, each with its open backend.

Theory. A bucket is added by name and URL. So that no set-up is needed, a name that nobody added stands for `s3://NAME`
with the environment's credentials, if there are any. Such a bucket is opened, probed, and then served like one that was
added. It is not written to the metadata store, since without those credentials it would mean something else. A name
that did not answer is remembered for UNKNOWN_KEPT_S, so that probing for names costs the backend nothing.

Backends open at first use: a node must start while a backend is down.

Some buckets stand for no client: the entries of one that is erasure-coded over the nodes, and the slices that this
node keeps (`core/cluster/coding.py`). They are there as long as what they belong to.

Invariants. (1) A bucket's backend is opened once and closed when its bucket changes or goes. (2) `changed` is called
after every change, with the new list in effect.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from forebay.backends import errors
from forebay.backends.http.cloud import check_sendable
from forebay.backends.seam import Backend, Body, Fetch, PartSeen, UploadSeen
from forebay.backends.wrap.counting import BackendCounters
from forebay.core.cluster.coding import SLICES, SLICES_BUCKET, code_of, hidden_of
from forebay.core.cluster.membership import LOOK_S
from forebay.core.errors import (
    Denied,
    ForebayError,
    Invalid,
    NoBackendBucket,
    NotFound,
    NotSupported,
    Precondition,
    map_changes,
)
from forebay.core.messages.calls import Uploads, UploadsCall
from forebay.core.types import (
    FRESH_IMMUTABLE,
    LOCAL_URL,
    Bucket,
    Headers,
    ListPage,
    ObjectInfo,
    RangeSpec,
    check_bucket_name,
)
from forebay.core.versions import whose_versions
from forebay.meta.seam import Entry, MetaStore
from forebay.node.engine.asking import Patience
from forebay.node.outcomes import from_node
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.buckets")
ResultT = TypeVar("ResultT")
OpenBackend = Callable[[Bucket, BackendCounters], Backend]

SENT = ("s3", "gs", "az", "coded")  # schemes of backends that keys are sent to over HTTP
UNKNOWN_KEPT_S = 30.0
UNKNOWN_MAX = 1024
TRIED_KEY = ".forebay-write-check"  # written and deleted to see that a bucket takes writes
PREFIX = "buckets/"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Bucket).decode


def decode_bucket(entry: Entry) -> Bucket:
    """Decode a bucket's entry in the metadata store, under PREFIX."""
    return _decode(entry.value)


class Served:
    """A bucket and its backend, until its settings change. `error` is the last failure ("" after a success). `of`: the
    bucket itself, where another node of the cluster, `home`, stands in its backend's place."""

    def __init__(
        self, bucket: Bucket, backend: Backend, implicit: bool = False, of: Served | None = None, home: str = ""
    ) -> None:
        self.bucket = bucket
        self.of, self.home = of, home
        self.backend: Backend = _Watched(backend, self)
        self.implicit = implicit
        self.error = ""
        self.answers = 0  # answers of the backend, refusals included
        self.silent_until_s = 0.0  # monotonic; it did not answer, and nobody waits for it until then

    def same_place(self, other: Served) -> bool:
        """Whether both read the same objects, whatever else differs."""
        return (self.bucket.url, self.bucket.options) == (other.bucket.url, other.bucket.options)


class _Watched:
    """A backend that notes how its last request went. A refusal is an answer too."""

    def __init__(self, inner: Backend, served: Served) -> None:
        self.scheme, self.read_only, self.part_bytes_min = inner.scheme, inner.read_only, inner.part_bytes_min
        self._inner, self._served = inner, served

    async def _watch(self, call: Awaitable[ResultT]) -> ResultT:
        try:
            result = await call
        except (NotFound, Precondition, Invalid, NotSupported):
            self._answered()
            raise
        except ForebayError as error:
            if self._served.home:
                errors.said_of_node(error, f"node {self._served.home}")
            self._served.error = f"{error.kind}: {error}"
            raise
        self._answered()
        return result

    def _answered(self) -> None:
        self._served.error = ""
        self._served.answers += 1

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Fetch:
        return await self._watch(self._inner.fetch(key, range, version=version))

    async def head(self, key: str) -> ObjectInfo:
        return await self._watch(self._inner.head(key))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self._watch(self._inner.check(key, version))

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return await self._watch(self._inner.list_page(prefix, delimiter, start_after, limit))

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        return await self._watch(self._inner.put(key, body, headers=headers, expect=expect, tags=tags))

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        await self._watch(self._inner.delete(key, expect=expect))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        return await self._watch(self._inner.copy(source_key, key, source_version=source_version, headers=headers))

    async def read_tags(self, key: str) -> str:
        return await self._watch(self._inner.read_tags(key))

    async def write_tags(self, key: str, tags: str) -> None:
        await self._watch(self._inner.write_tags(key, tags))

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return await self._watch(self._inner.begin_upload(key, headers=headers, tags=tags))

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        return await self._watch(self._inner.put_part(key, upload_id, number, body))

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        return await self._watch(self._inner.complete_upload(key, upload_id, parts, expect=expect))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._watch(self._inner.abort_upload(key, upload_id))

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        return await self._watch(self._inner.list_parts(key, upload_id))

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        return await self._watch(self._inner.list_uploads(prefix))

    async def probe(self) -> None:
        try:
            await self._inner.probe()
        except ForebayError as error:
            self._served.error = f"{error.kind}: {error}"
            raise
        self._answered()

    async def aclose(self) -> None:
        await self._inner.aclose()


def environment_has_credentials(environ: dict[str, str] | None = None) -> bool:
    """Whether AWS's own tools would find credentials without configuration."""
    env = dict(os.environ) if environ is None else environ
    if env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_PROFILE") or env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(env.get("HOME", "/nonexistent"))
    shared = Path(env.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws" / "credentials"))
    return shared.is_file() or Path(env.get("AWS_CONFIG_FILE", home / ".aws" / "config")).is_file()


class Homes(Protocol):
    """Whose word counts for a key (`node/engine/homes.py`)."""

    node_id: str

    def is_here(self, bucket: Bucket, key: str) -> bool: ...

    async def at(self, served: Served, key: str) -> Served: ...

    def acts(self, bucket: str, key: str) -> AbstractContextManager[None]: ...

    def begin(self, name: tuple[str, str]) -> None: ...

    def end(self, name: tuple[str, str]) -> None: ...

    def patience(self) -> Patience | None: ...

    def upload_at(self, served: Served, upload_id: str) -> Served | None: ...

    async def uploads(self, bucket: Bucket, call: UploadsCall) -> list[Uploads]: ...

    def completed_elsewhere(self, bucket: Bucket, key: str) -> None: ...


class Buckets:
    """See the module's header. `open_backend` makes a backend without a request to it; it may raise `Invalid`."""

    def __init__(
        self,
        meta: MetaStore,
        open_backend: OpenBackend,
        clock: Clock,
        *,
        auto: bool,
        changed: Callable[[], None],
    ) -> None:
        self.homes: Homes | None = None  # None: the node is alone, and its word counts
        self._meta = meta
        self._opener = open_backend
        self.heard: set[str] = set()  # ids of uploads at backends that are in use
        self.counters: dict[str, BackendCounters] = {}  # by bucket: they outlive a change of settings
        self._clock = clock
        self._auto = auto
        self._changed = changed
        self._kept: dict[str, Bucket] = {}
        self._hidden: dict[str, Bucket] = {}
        self._served: dict[str, Served] = {}
        self._versions: dict[str, tuple[Served, Served]] = {}  # of a bucket: as it was served then, and its versions
        self._unknown: dict[str, tuple[float, ForebayError]] = {}
        self._probing: dict[str, asyncio.Task[Served]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.settings = asyncio.Lock()  # held by whoever reads a bucket's settings and puts them back changed

    async def load(self) -> None:
        """Read the buckets from the metadata store."""
        entries, _ = await self._meta.range(PREFIX)
        for entry in entries:
            bucket = decode_bucket(entry)
            self._kept[bucket.name] = bucket
        self._hide()

    def shown(self) -> list[Bucket]:
        """Every bucket that clients name, by name, with those found in the environment."""
        implicit = {s.bucket.name: s.bucket for s in self._served.values() if s.implicit}
        return [bucket for _, bucket in sorted((implicit | self._kept).items())]

    def all(self) -> list[Bucket]:
        """Every bucket that is served, also those that only nodes name."""
        return [*(bucket for _, bucket in sorted(self._hidden.items())), *self.shown()]

    def _hide(self) -> None:
        """Have the buckets that only nodes name."""
        found = (hidden_of(bucket) for bucket in self._kept.values())
        hidden = {bucket.name: bucket for bucket in found if bucket is not None}
        if self.homes is not None:
            hidden[SLICES] = SLICES_BUCKET
        for name in [name for name, bucket in self._hidden.items() if hidden.get(name) != bucket]:
            self._close_later(self._served.pop(name, None))
        self._hidden = hidden

    def served(self) -> list[Served]:
        """The buckets whose backend is open."""
        return list(self._served.values())

    def _open_backend(self, bucket: Bucket) -> Backend:
        name = whose_versions(bucket.name) or bucket.name
        return self._opener(bucket, self.counters.setdefault(name, BackendCounters()))

    async def leave_uploads(self, served: Served, key: str) -> None:
        """An upload of `key` may have begun without its id being heard. The backend's uploads may be another writer's,
        so none is aborted. Those that may be ours, and are not in `heard`, are logged and counted. Raises if the
        backend does not answer now."""
        there = []
        try:
            for seen in await served.backend.list_uploads(key):
                if seen.key == key and seen.upload_id not in self.heard:
                    with suppress(NotFound):  # it ended meanwhile
                        if not await served.backend.list_parts(key, seen.upload_id):  # ours has none
                            there.append(seen.upload_id)
        except (Denied, Invalid, NotSupported) as error:  # it does not list uploads, so one may exist
            there = [f"unknown, since {error}"]
        name = served.bucket.name
        self.counters.setdefault(name, BackendCounters()).uploads_left += len(there)
        for upload_id in there:
            log.warning("an upload of %s/%s may be ours and stays at the backend: id %s", name, key, upload_id)

    def known(self, name: str) -> Served | None:
        """The bucket, if that needs no request."""
        served = self._served.get(name)
        if served is None and (bucket := self._kept.get(name) or self._hidden.get(name)) is not None:
            served = self._served[name] = Served(bucket, self._open_backend(bucket))
        return served

    def stands(self, served: Served) -> bool:
        """Whether the bucket still is the place that it was."""
        served = served.of or served
        name = whose_versions(served.bucket.name)
        now = self._versions[name][1] if name in self._versions else self._served.get(served.bucket.name)
        return now is served or (now is not None and now.same_place(served))

    async def get(self, name: str) -> Served:
        """The bucket. `NotFound` (`NoSuchBucket`) if there is none, `Denied` or `Unavailable` if the backend does not
        tell."""
        served = self.known(name)
        if served is not None:
            return served
        if not self._auto or not environment_has_credentials() or name.startswith("-"):
            raise no_bucket(name)
        at_s, error = self._unknown.get(name, (-UNKNOWN_KEPT_S, no_bucket(name)))
        if self._clock.monotonic_s() - at_s < UNKNOWN_KEPT_S:
            raise error
        task = self._probing.get(name)
        if task is None:
            task = self._probing[name] = asyncio.create_task(self._find(name))
            task.add_done_callback(lambda done: self._probing.pop(name, None))
        return await asyncio.shield(task)

    async def acting(self, name: str, key: str) -> Served:
        """The bucket as this node acts on the key: with the key's home in the backend's place, if that is another.
        Errors as `get`; `Unavailable` if nobody may act now. A node that came just now may act on keys of a bucket of
        which it hears in a moment: who asks as a node is not told that there is none, but to ask again."""
        try:
            served = await self.get(name)
        except NotFound as error:
            if self.homes is None or not from_node.get():
                raise
            raise map_changes(f"this node does not know bucket {name} yet: ask again", LOOK_S) from error
        if served.bucket.write == "back" and served.backend.scheme in SENT:  # else it would be acknowledged, never sent
            check_sendable(key, f"{name}/{key}")
        return served if self.homes is None else await self.homes.at(served, key)

    @property
    def patience(self) -> Patience | None:
        """For an operation that a client asks of this node; None if nobody else acts, or another node asks."""
        return None if self.homes is None or from_node.get() else self.homes.patience()

    async def again(self, act: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `act` returns; asked again while who acts on the key changes (`asking.py`), if a client asks this
        node."""
        patience = self.patience
        return await (act() if patience is None else patience.again(act))

    def is_here(self, name: str, key: str) -> bool:
        """Whether this node acts on the key."""
        served = None if self.homes is None else self.known(name)
        return served is None or self.homes is None or self.homes.is_here(served.bucket, key)

    async def readable(self, name: str, key: str) -> Served:
        """As `acting`, also for the versions of a bucket's objects (`core/versions.py`); `NotSupported` if its backend
        has none."""
        of = whose_versions(name)
        if not of:
            return await self.acting(name, key)
        served = await self.get(of)
        known = self._versions.get(of)
        if known is None or known[0] is not served:
            bucket = Bucket(
                name,
                served.bucket.url,
                FRESH_IMMUTABLE,
                options=served.bucket.options,
                created_s=served.bucket.created_s,
                held=served.bucket.held,
            )
            versions = Served(bucket, self._open_backend(bucket))
            self._close_versions(of)
            known = self._versions[of] = served, versions
        return known[1]

    async def _find(self, name: str) -> Served:
        bucket = Bucket(check_bucket_name(name), f"s3://{name}", created_s=self._clock.wall_s())
        backend = self._open_backend(bucket)
        try:
            await backend.probe()
        except ForebayError as error:
            await backend.aclose()
            missing = isinstance(error, NoBackendBucket) and error.code != "OwnBackend"
            told = no_bucket(name) if missing else error
            if isinstance(error, NoBackendBucket | Denied | Invalid):
                if len(self._unknown) >= UNKNOWN_MAX:
                    self._unknown.clear()
                self._unknown[name] = (self._clock.monotonic_s(), told)
            raise told from error
        log.info("bucket %s found at s3://%s with the environment's credentials", name, name)
        served = self._served[name] = Served(bucket, backend, implicit=True)
        self._changed()
        return served

    async def _open(self, bucket: Bucket) -> Served:
        """The bucket with its backend open. `Invalid` for settings that do not go together."""
        check_bucket_name(bucket.name)
        if (bucket.write == "local") != (bucket.url == LOCAL_URL):
            raise Invalid(f"write=local and the URL {LOCAL_URL} go together: give both, or another URL and write mode")
        if code_of(bucket.url) is not None and (bucket.write != "back" or not bucket.is_kept_twice):
            raise Invalid(f"{bucket.url} goes with write=back, durability=disk and copies=2 or more: set these")
        served = Served(bucket, self._open_backend(bucket))
        if bucket.write == "back" and served.backend.read_only:
            await served.backend.aclose()
            raise Invalid(f"nothing can be written back to {bucket.url}, which can only be read: give another URL")
        return served

    async def put(self, bucket: Bucket, *, as_it_is: bool = False) -> Bucket:
        """Add or change a bucket, whose backend is opened and not asked anything (see `try_out`). `as_it_is`: it says
        when it was made."""
        if not as_it_is:
            old = self._kept.get(bucket.name)
            bucket = msgspec.structs.replace(bucket, created_s=old.created_s if old else self._clock.wall_s())
        served = await self._open(bucket)
        await self._meta.put(PREFIX + bucket.name, _encode(bucket))
        before = self._served.get(bucket.name)
        served.answers = before.answers if before is not None else 0
        self._close_later(before)
        self._close_versions(bucket.name)
        self._kept[bucket.name] = bucket
        self._hide()
        self._served[bucket.name] = served
        self._unknown.pop(bucket.name, None)
        self._changed()
        return bucket

    async def try_out(self, bucket: Bucket) -> None:
        """Raise what keeps the bucket's backend from being read and, if it is written back, from being written."""
        served = await self._open(bucket)
        try:
            await _try_out(served)
        finally:
            await served.backend.aclose()

    async def delete(self, name: str) -> None:
        """Forget the bucket; `NotFound` if it was not added. The caller evicts its cached objects."""
        served = self._served.pop(name, None)
        self._close_later(served)
        self._close_versions(name)
        kept = self._kept.pop(name, None)
        if kept is None and served is None:
            raise no_bucket(name)
        self._hide()
        await self._meta.delete(PREFIX + name)
        self._changed()

    async def aclose(self) -> None:
        """Close every backend."""
        for task in list(self._probing.values()):
            task.cancel()
        for served in self._served.values():
            self._close_later(served)
        self._served.clear()
        for name in list(self._versions):
            self._close_versions(name)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _close_versions(self, name: str) -> None:
        if name in self._versions:
            self._close_later(self._versions.pop(name)[1])

    def _close_later(self, served: Served | None) -> None:
        if served is not None:
            task = asyncio.create_task(served.backend.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _try_out(served: Served) -> None:
    await served.backend.probe()
    if served.bucket.write != "back" or served.backend.read_only:
        return
    try:
        await served.backend.put(TRIED_KEY, Body(0, b""))
    except ForebayError as error:
        said = f"the backend can be read, but not written back to: {error.message}"
        raise type(error)(said, code=error.code, retry_after_s=error.retry_after_s) from error
    try:
        await served.backend.delete(TRIED_KEY)
    except ForebayError as error:  # a bucket that only grows can be written back to, if nothing is deleted
        log.warning("%s takes writes but not deletes: %s stays there: %s", served.bucket.url, TRIED_KEY, error)


def no_bucket(name: str) -> NotFound:
    """Nobody made the bucket."""
    return NotFound(
        f"there is no bucket {name!r}: add it with `forebay bucket add {name} URL`, or check the name",
        code="NoSuchBucket",
    )
