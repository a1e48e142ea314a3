"""What to do for each item of a batch, decided before the answer begins.

Theory. Each distinct object is looked up once, however many items name it. Each item becomes a *step*: bytes that are
here (a hit), finished bytes (a known error), a member that must be unpacked, or a question to the engine. First the
members of each shard are located, once per shard; then most members are ranges like others, of the version whose layout
is known. If the engine need not be asked, `total` is the length of the answer.

An item that names a version (`core/versions.py`) is one of the bucket that versions are in, from here on. Who may read
the bucket itself may read that.

A plan holds records and small objects, but no leases: sending may take long, and a held lease is space that cannot be
freed.

Invariants. (1) A hit is fresh or owned, verified, of a key that the caller may read, and its range lies in the
object. (2) The steps of a plan are of at most BATCH_BYTES_MAX, as far as sizes are known. (3) Planning keeps the loop
for at most LOOKUPS_AT_ONCE look-ups.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Denied, ForebayError, NotSupported, Precondition
from forebay.core.formats.members import MemberIndex
from forebay.core.messages import batch
from forebay.core.messages.batch import FRAME, Item
from forebay.core.record import Record, is_version
from forebay.core.types import Bucket, check_key
from forebay.core.versions import object_of, versioned
from forebay.node.front.batch.forms import Form
from forebay.node.front.http.auth import Auth
from forebay.node.front.objects.reads import Reads
from forebay.node.front.objects.shards import Shards, Span
from forebay.node.store.reader import LeasedFile, StoreReader
from forebay.ports.clock import Clock

INLINE_BYTES_KEPT_MAX = 16 * limits.MIB  # of small objects between plan and sending; more are looked up again
LOOKUPS_AT_ONCE = 512  # about a millisecond; then others have their turn
SHARDS_AT_ONCE = 8  # whose members are found out at once, when nobody knows them yet

_HEADER_BYTES = FRAME.size


class Known:
    """One object of a batch, however many items name it. Without a record it must be asked for, or `error` says why
    not. `cold`: it was brought here for this batch."""

    __slots__ = ("bucket", "cold", "error", "file", "inline", "key", "members", "object_id", "record", "size", "whole")

    def __init__(self, bucket: str, key: str, record: Record | None, error: ForebayError | None = None) -> None:
        self.bucket, self.key = bucket, key
        self.record = record
        self.error = error
        self.cold = False
        self.file: LeasedFile | None = None
        self.inline: bytes | None = None
        self.members: MemberIndex | None = None  # set when each of them is a range that is here
        self.whole = False
        self.object_id = self.size = 0
        if record is not None:
            self.inline, self.whole = record.inline, record.complete
            self.object_id, self.size = record.object_id, record.size_bytes


class Ask:
    """A question to the engine. `version`: only that, whose size was announced. `total`: the size of the member that
    the range is of; None for an object's, which the answer says."""

    __slots__ = ("item", "total", "version")

    def __init__(self, item: Item, version: str = "", total: int | None = None) -> None:
        self.item = item
        self.version = version
        self.total = total


class Packed:
    """[start, end) of a member that is no range of its shard."""

    __slots__ = ("end", "span", "start")

    def __init__(self, span: Span, start: int, end: int) -> None:
        self.span, self.start, self.end = span, start, end


Hit = tuple[Known, int, int, int]  # the object, the half-open range of it, and the size of the whole (or of a member)
Step = Hit | bytes | Ask | Packed
Shard = tuple[Record, MemberIndex]


class Sources(NamedTuple):
    """What a plan is made from; one for each front."""

    reads: Reads
    store: StoreReader
    auth: Auth
    shards: Shards | None
    clock: Clock


class BatchPlan:
    """The steps of one batch, once `make` has returned, and the items as they are read. `failed`: how many of the steps
    are errors; `brought`: shards that were not here."""

    def __init__(self, sources: Sources, identity: Identity, form: Form, items: list[Item]) -> None:
        self.steps: list[Step] = []
        self.items = items
        self.total = 0  # bytes of the answer, as far as they are known
        self.failed = 0
        self.packed = False
        self.brought: set[tuple[str, str]] = set()
        self._sources = sources
        self._identity = identity
        self._form = form
        self._versions: dict[tuple[str, str], Bucket | ForebayError] = {}  # where versions are read, as items name it
        self._readable: dict[str, Bucket] = {}  # of these the caller may read everything
        self.denied: dict[tuple[str, str], Denied] = {}  # by bucket and key
        self._shards: dict[tuple[str, str], Shard | ForebayError] = {}

    async def make(self) -> None:
        """Decide. What is wrong with an item becomes its step; nothing is raised."""
        if any(item.version for item in self.items):
            self.items = list(map(self._of_version, self.items))
        if any(item.member for item in self.items):
            await self._find_shards()
        await self._take_steps()

    def _of_version(self, item: Item) -> Item:
        """The item as what it names is called here. What is wrong with it is found out when that is looked up."""
        if not item.version:
            return item
        name = (item.bucket, f"{item.key}\0{item.version}")
        try:
            bucket, key = versioned(self._bucket(item.bucket, item.key), check_key(item.key), item.version)
            name = (bucket.name, key)
            self._versions[name] = bucket
        except ForebayError as error:
            self._versions[name] = error
        return msgspec.structs.replace(item, bucket=name[0], key=name[1], version="")

    def questions(self) -> list[int]:
        """The positions of the items that must be asked for."""
        return [at for at, step in enumerate(self.steps) if type(step) is Ask]

    async def _find_shards(self) -> None:
        """Where the members of all shards are that are named, several shards at a time."""
        names = dict.fromkeys((item.bucket, item.key) for item in self.items if item.member)
        turns = asyncio.Semaphore(SHARDS_AT_ONCE)

        async def find(name: tuple[str, str]) -> None:
            try:
                async with turns:
                    if self._sources.shards is None:
                        raise NotSupported("members of shards are not served here: ask the node itself")
                    record = self._look_up(*name).record
                    if record is None or not record.complete:
                        self.brought.add(name)
                    self._shards[name] = await self._sources.shards.index(self._bucket(*name), check_key(name[1]))
            except ForebayError as error:
                self._shards[name] = error

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(find(name))

    async def _take_steps(self) -> None:
        known: dict[tuple[str, str], Known] = {}
        steps, room = self.steps, limits.BATCH_BYTES_MAX
        inline_left = INLINE_BYTES_KEPT_MAX
        total = 0
        for item in self.items:
            name = (item.bucket, item.key)
            at = known.get(name)
            if at is None:
                at = known[name] = self._look_up(*name)
                at.cold = name in self.brought
                if at.inline is not None:
                    inline_left -= at.size
                    if inline_left < 0 and at.record is not None:
                        at.inline = at.record.inline = None
                self._use_members(at)
            size = at.size
            start, end = item.start, item.end
            if end is None or end > size:
                end = size
            if item.member:
                step = self._member_here(item, at) or self._uncommon(item, at)
            elif at.record is None or not 0 <= start < end or (item.etag and item.etag != at.record.etag):
                step = self._uncommon(item, at)
            elif at.whole or at.record.has(start, end):
                step = (at, start, end, size)
            else:
                step = Ask(item)
            if type(step) is tuple:
                length = _HEADER_BYTES + step[2] - step[1]
            elif type(step) is Packed:
                length = _HEADER_BYTES + step.end - step.start
                self.packed = True
            if type(step) in (tuple, Packed) and total + length > room:
                step = self._form.failed(item, batch.full(length))
            if type(step) is bytes:
                self.failed += 1
                length = len(step)
            elif type(step) is Ask:
                length = 0
            total += length
            steps.append(step)
            if not len(steps) % LOOKUPS_AT_ONCE:
                await asyncio.sleep(0)
        self.total = total

    def _uncommon(self, item: Item, at: Known) -> Step:
        """The step for an item that is no plain range of a hit."""
        end = item.end
        try:
            if at.error is not None:
                raise at.error
            if item.member:
                return self._member(item, at)
            record = at.record
            if record is None:
                if item.start < 0 or (end is not None and end <= item.start) or item.start > limits.OBJECT_BYTES_MAX:
                    raise batch.outside(item.start, end, None)
                return Ask(item)
            if item.etag and item.etag != record.etag:
                raise changed(item)
            size = record.size_bytes
            stop = size if end is None or end > size else end
            if item.start < 0 or (item.start >= stop and not (end is None and size == item.start == 0)):
                raise batch.outside(item.start, end, size)
            return (at, item.start, stop, size) if record.has(item.start, stop) else Ask(item)
        except ForebayError as error:
            return self._form.failed(item, error)

    def _use_members(self, at: Known) -> None:
        """Let members of a shard that is here, and of the version whose members are known, be found at once."""
        found = self._shards.get((at.bucket, at.key))
        if found is None or isinstance(found, ForebayError) or at.record is None:
            return
        if at.whole and found[1].ranged and is_version(at.record, found[1].version):
            at.members = found[1]

    def _member_here(self, item: Item, at: Known) -> Hit | None:
        """The step for a member that is here; None where that takes more to say."""
        place = at.members.place(item.member) if at.members is not None else None
        if place is None or at.record is None or (item.etag and item.etag != at.record.etag):
            return None
        offset, size = place
        start, end = item.start, item.end
        if end is None or end > size:
            end = size
        return (at, offset + start, offset + end, size) if 0 <= start < end else None

    def _member(self, item: Item, at: Known) -> Step:
        """The step for a member: of the version that its place is true of."""
        found = self._shards[item.bucket, item.key]
        if isinstance(found, ForebayError):
            raise found
        shard, index = found
        if item.etag and item.etag != shard.etag:
            raise changed(item)
        member = index.find(item.member)
        member.check_readable()
        size, start = member.size_bytes, item.start
        stop = size if item.end is None or item.end > size else item.end
        if start < 0 or (start >= stop and not (item.end is None and size == start == 0)):
            raise batch.outside(start, item.end, size)
        span = Span(item.bucket, item.key, shard, member, index.plain)
        if not span.ranged:
            return Packed(span, start, stop)
        first, last = member.start + start, member.start + stop
        record = at.record
        if record is not None and is_version(record, index.version) and record.has(first, last):
            return (at, first, last, size)
        if first == last:
            return Packed(span, start, stop)
        return Ask(Item(item.bucket, item.key, first, last), shard.version, size)

    def _look_up(self, name: str, key: str) -> Known:
        """What is here of an object that the caller may read."""
        try:
            bucket = self._bucket(name, key)
            check_key(key)
        except ForebayError as error:
            if isinstance(error, Denied):
                self.denied[name, key] = error
            return Known(name, key, None, error)
        return Known(name, key, self._sources.store.fresh(bucket, key, self._sources.clock.wall_s()))

    def _bucket(self, name: str, key: str) -> Bucket:
        """The bucket of a key that the caller may read."""
        versions = self._versions.get((name, key))
        if versions is not None:
            if isinstance(versions, ForebayError):
                raise versions
            return versions
        found = self._readable.get(name)
        if found is None:
            found, auth = self._sources.reads.bucket(name), self._sources.auth
            auth.require_read(self._identity, found, key)
            if auth.may(self._identity, "read", name):
                self._readable[name] = found
        return found


def changed(item: Item) -> Precondition:
    """The error for an item whose version is another now."""
    return Precondition(
        f"{'/'.join(object_of(item.bucket, item.key))} is not the version {item.etag!r} any more: read its current "
        "state, and decide anew",
        code="PreconditionFailed",
    )
