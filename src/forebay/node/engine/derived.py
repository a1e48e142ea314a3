"""Derived objects at the engine: stores what a front derived, and drops it with its source.

Theory. `store/derived.py` says what derived objects are and how a front finds and makes them. The verb `keep` is a put
like any other, into a reserved bucket and under its own lock, unless the source has changed meanwhile.

Invariant. A derived object is clean and never pinned. If the store has its source, it is of that version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from forebay.core.derived import DERIVED_KINDS, KeepAnswer, KeepCall, name_of, names_under, reserved
from forebay.core.errors import Invalid
from forebay.core.formats.members import form_of
from forebay.core.record import Record, State, is_version
from forebay.core.types import ObjectInfo
from forebay.core.versions import versions_of, whose_versions
from forebay.node.store.disk.usage import VolumeUsage
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.puts import Put

SCAN_LIMIT = 1000


def derived_bytes(usages: list[VolumeUsage]) -> int:
    """How many bytes of the volumes are derived objects."""
    return sum(usage.buckets.get(reserved(kind), 0) for usage in usages for kind in DERIVED_KINDS)


class Writing(Protocol):
    """What a derived object needs of `node/engine/write/writes.py`."""

    def lock(self, bucket: str, key: str) -> AbstractAsyncContextManager[None]: ...

    def entered(self, bucket: str, key: str, *, answers: bool = True) -> AbstractAsyncContextManager[Any]: ...

    async def finish(self, section: Any) -> Any: ...

    async def commit(self, change: Any) -> Record | None: ...


class Objects(Protocol):
    """What a derived object needs of the store."""

    def take_id(self) -> int: ...

    def lookup(self, bucket: str, key: str) -> Record | None: ...


class Keeping:
    """The verb `keep`. `wall_s` is the clock; `forget(bucket, name)` drops what the store has."""

    def __init__(
        self, store: Objects, writes: Writing, wall_s: Callable[[], float], forget: Callable[[str, str], object]
    ) -> None:
        self._store, self._writes, self._wall_s, self._forget = store, writes, wall_s, forget

    def moved_on(self, bucket: str, key: str) -> None:
        """An object was written or deleted here: drop what was derived from it as a shard. (For an object whose name is
        no shard's it stays until it is evicted: a look-up would cost every small write.)"""
        if form_of(key, None) is not None and not bucket.startswith("-"):
            name = name_of(bucket, key)
            self._forget(reserved("members"), name)
            self._forget(reserved("plain"), name)

    async def keep(self, call: KeepCall) -> KeepAnswer:
        """Put the object of `call` into the store. `NotFound` when its bucket is gone, `Unavailable`
        (`InsufficientStorage`) when it does not fit."""
        kept: KeepAnswer = await self._writes.finish(self._keep(call))
        return kept

    async def _keep(self, call: KeepCall) -> KeepAnswer:
        try:
            if (call.body is None) == (not call.path):
                raise Invalid("a derived object comes as a body or as a file: please report it")
            async with self._writes.entered(whose_versions(call.bucket) or call.bucket, call.key, answers=False):
                source = self._store.lookup(call.bucket, call.key) if call.kind != "listings" else None
                if source is not None and not is_version(source, call.version):
                    return KeepAnswer(False)  # the source changed meanwhile: nobody will ask for this
                place, name = reserved(call.kind), name_of(call.bucket, call.key)
                async with self._writes.lock(place, name):
                    await self._writes.commit(self._put(call, place, name))
            return KeepAnswer(True)
        finally:
            if call.path:
                remove_temp(call.path)

    def _put(self, call: KeepCall, place: str, name: str) -> Put:
        now_s = self._wall_s()
        info = ObjectInfo(name, call.size_bytes, call.version, "", now_s)
        return Put(
            place,
            info,
            self._store.take_id(),
            State.CLEAN,
            checked_s=now_s,
            body=call.body,
            path=call.path,
            sums=call.sums,
        )


def names_in(index: StoreReader, bucket: str, prefix: str = "", keys: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(reserved bucket, name) of committed objects derived from a bucket's, of versions that are here, and of what was
    derived from versions: of objects under `prefix`, or of exactly `keys` (then some may not exist)."""
    versions = versions_of(bucket)
    of_versions = [f"{key}\0" for key in keys] or [prefix]
    for kind in DERIVED_KINDS:
        place = reserved(kind)
        if keys:
            yield from ((place, name_of(bucket, key)) for key in keys)
        else:
            for under in names_under(bucket, prefix):
                yield from _scanned(index, place, under)
        for prefixed in of_versions:
            for under in names_under(versions, prefixed):
                yield from _scanned(index, place, under)
    for under in of_versions:
        yield from _scanned(index, versions, under)


def _scanned(index: StoreReader, place: str, under: str) -> Iterator[tuple[str, str]]:
    after = ""
    while found := index.scan_entries(place, under, after, SCAN_LIMIT):
        yield from ((place, entry.key) for entry in found)
        after = found[-1].key
