"""What a cluster leaves in a bucket when it goes to zero, so that the next one is warm soon.

Theory. A manifest says which buckets there were and how they were kept, which nodes there were, and what was cached,
with the minute of its last use: what was used last is fetched first. It is a hint. It is written when no node has
anything that a backend has not, so nothing is lost without it, and what it names may have changed or gone since.

It is one object of JSON, so that people can read it, and small, so that one request moves it: what was used longest ago
is left out, and counted. An object of which only parts were cached has those parts, to the byte.

Rejected: secrets (the object may be read by whoever reads the bucket); an object for each node (nobody would clean them
up); prefixes in place of keys (whoever rewarms a prefix fetches what nobody had read).

Invariants. (1) `encode` makes at most MANIFEST_BYTES_MAX. (2) No secret is in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from forebay.core.backend_options import HIDDEN
from forebay.core.errors import Invalid
from forebay.core.limits import MANIFEST_BYTES_MAX, WARM_OBJECTS_MAX
from forebay.core.types import Bucket

FORMAT = "forebay manifest 1"
Span = tuple[int, int]  # bytes [start, end) of an object


class Warm(msgspec.Struct, array_like=True, frozen=True):
    """An object that was cached, and when it was used last, in minutes since the epoch. `spans`: what of it; () is all
    of it."""

    bucket: str
    key: str
    size_bytes: int
    used_minute: int
    spans: tuple[Span, ...] = ()

    @property
    def cached_bytes(self) -> int:
        return sum(end - start for start, end in self.spans) if self.spans else self.size_bytes


class FormerNode(msgspec.Struct, frozen=True):
    """A node that there was, and how many bytes its disks held."""

    node_id: str
    address: str
    capacity_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """See the module's header. `hidden`: the options of each bucket that are secret, and not here. `left_out`: how many
    cached objects found no place in `warm`."""

    format: str
    cluster: str
    release: str  # of Forebay
    written_s: float  # Unix time
    nodes: list[FormerNode]
    buckets: list[Bucket]
    hidden: dict[str, list[str]]
    warm: list[Warm]
    left_out: int = 0


def without_secrets(buckets: Iterable[Bucket]) -> tuple[list[Bucket], dict[str, list[str]]]:
    """Buckets as an answer shows them, without what is hidden there; and the names of that, by bucket."""
    kept, hidden = [], {}
    for bucket in buckets:
        names = sorted(name for name, value in bucket.options.items() if value == HIDDEN)
        if names:
            hidden[bucket.name] = names
        options = {name: value for name, value in bucket.options.items() if value != HIDDEN}
        kept.append(msgspec.structs.replace(bucket, options=options))
    return kept, hidden


class WarmObjects(msgspec.Struct, frozen=True):
    """What one node has cached, what was used last first. `left_out`: how many more objects."""

    warm: list[Warm]
    left_out: int = 0


def hottest(found: Iterable[Warm]) -> list[Warm]:
    """The WARM_OBJECTS_MAX used last, those first."""
    return heapq.nlargest(WARM_OBJECTS_MAX, found, key=_heat)


def fitting(warm: Sequence[Warm], room_bytes: int = MANIFEST_BYTES_MAX) -> list[Warm]:
    """As many of the first as JSON of `room_bytes` holds."""
    kept = 0
    for each in warm:
        room_bytes -= len(msgspec.json.encode(each)) + 1
        if room_bytes < 0:
            break
        kept += 1
    return list(warm[:kept])


def _heat(warm: Warm) -> tuple[int, str, str]:
    return warm.used_minute, warm.bucket, warm.key


def merged(parts: Iterable[Iterable[Warm]]) -> list[Warm]:
    """What several nodes have, each object once: of the size that was used last, all that any has of it."""
    found: dict[tuple[str, str], Warm] = {}
    for part in parts:
        for warm in part:
            name = (warm.bucket, warm.key)
            before = found.get(name)
            found[name] = warm if before is None else _joined(before, warm)
    return sorted(found.values(), key=_heat, reverse=True)


def _joined(one: Warm, two: Warm) -> Warm:
    newer, older = (one, two) if one.used_minute >= two.used_minute else (two, one)
    if newer.size_bytes != older.size_bytes or not newer.spans:
        return newer
    if not older.spans:
        return msgspec.structs.replace(newer, spans=())
    spans = tuple(joined(sorted((*newer.spans, *older.spans))))
    return msgspec.structs.replace(newer, spans=() if spans == ((0, newer.size_bytes),) else spans)


def joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Sorted spans, those that touch as one."""
    start, end = 0, 0
    for each_start, each_end in spans:
        if each_start > end:
            if end > start:
                yield start, end
            start = each_start
        end = max(end, each_end)
    if end > start:
        yield start, end


def encode(manifest: Manifest) -> bytes:
    """As it stands in the bucket: without what was used longest ago, if that finds no room."""
    bare = msgspec.structs.replace(manifest, warm=[], left_out=1 << 53)
    warm = fitting(manifest.warm[:WARM_OBJECTS_MAX], MANIFEST_BYTES_MAX - len(msgspec.json.encode(bare)))
    left_out = manifest.left_out + len(manifest.warm) - len(warm)
    return msgspec.json.encode(msgspec.structs.replace(manifest, warm=warm, left_out=left_out))


def decode(data: bytes, name: str) -> Manifest:
    """The manifest; `Invalid` if the object `name` is none that this release can read."""
    try:
        found = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(f"{name} is no manifest of a cluster ({error}): name what `forebay drain --all` wrote") from None
    if found.format != FORMAT:
        raise Invalid(f"{name} is {found.format!r}, and this release reads {FORMAT!r}: use the release that wrote it")
    return found
