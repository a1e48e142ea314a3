"""The listing of everything under a prefix, as bytes, with an id that is a hash of it.

Theory. A training job lists its bucket once, and all its ranks and workers then name objects by number. So a listing is
a value: columns in one run of bytes, read in place, sent as a file, shared between processes, and compared by its id. A
`Listing` of a million objects is made in the time it takes to hash them.

The bytes, numbers little-endian, every column padded to eight bytes:

    magic "fbmanif1" · length of the head u64 · head (msgpack map, `Head`)
    sizes u64 × n · modified f64 × n · key ends × n · keys · etags

Key ends are u32, or u64 when the keys have more than 4 GiB. Keys are UTF-8 without separators. ETags are 16 raw bytes
each if all have 32 hexadecimal digits (`hex`: S3's, for objects that were not put in parts), otherwise ends and text
(`text`).

The id covers bucket, prefix, keys, sizes and etags. It leaves out the time of an object with an etag: an object that
was flushed to its backend, or copied back, is the same object, and a job that resumes must not be turned away.

Listings come in *pieces* (pages, or the rest of a page) from several places in the bucket at once. Pieces that rise
from one to the next are joined without looking into them. If they do not (a server with an order of its own, ranges
that overlap), all entries are sorted, and of equal keys the last is kept.

Rejected: Arrow or Parquet (a dependency of 40 MB for three columns); front-coded keys (half the bytes, but reading a
key needs its block, and sendfile costs less than decoding); gzip on the way (0.5 s for a million objects).

Invariants. (1) Keys rise strictly, in byte order. (2) Equal ids mean the same keys, sizes and etags, except for a
collision of 128-bit hashes. (3) Bytes that are not a whole listing raise `Corrupt`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import lt
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid
from forebay.core.types import ListEntry

MAGIC = b"fbmanif1"
MEDIA_TYPE = "application/x-forebay-listing"
SAMPLES_MAX = 5  # keys named in a difference
_HEX = frozenset(b"0123456789abcdef")
_HEX_CHARS = 32


class Piece(NamedTuple):
    """Some entries of a listing, packed. `rising`: their keys rise strictly."""

    keys: bytes
    key_sizes: array[int]
    sizes: array[int]
    modified: array[float]
    etags: bytes
    etag_sizes: array[int]
    first: str
    last: str
    rising: bool


class Head(msgspec.Struct, frozen=True):
    """What stands before the columns."""

    bucket: str
    prefix: str
    objects: int
    key_bytes: int
    etag_bytes: int
    etags: Literal["hex", "text"]
    id: str


class Columns(NamedTuple):
    """The columns as buffers: u64, u32 or u64, and bytes. `ends[i]` is where item i ends in its blob."""

    keys: memoryview
    key_ends: memoryview
    sizes: memoryview
    etags: memoryview
    etag_ends: memoryview


class Difference(NamedTuple):
    """What changed from one listing to another: counts, and a few keys."""

    added: int
    removed: int
    changed: int
    samples: tuple[str, ...]

    def __str__(self) -> str:
        counts = ((self.added, "added"), (self.removed, "removed"), (self.changed, "changed"))
        said = " and ".join(
            f"{count} {'object was' if count == 1 else 'objects were'} {what}" for count, what in counts if count
        )
        return f"{said} ({', '.join(self.samples)})" if said else "nothing changed"


# --- how it is asked for ----------------------------------------------------------------------------------------------
class ListingCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """All objects under `prefix` as one listing, as fresh as the bucket wants it: begun now (`refresh`)
    or at Unix time `since_s` or later, if that is earlier. `id`: exactly that one, else `Precondition` says what
    changed."""

    bucket: str
    prefix: str = ""
    id: str = ""
    refresh: bool = False
    since_s: float = 0.0


class ListingState(msgspec.Struct, frozen=True):
    """A listing, or (`id` is "") that it is under way and has come to `objects`: ask again, with `since_s`
    as it is here. `listed_s` is when the listing began."""

    bucket: str
    prefix: str
    id: str = ""
    objects: int = 0
    size_bytes: int = 0
    listed_s: float = 0.0
    since_s: float = 0.0


class ListingPartCall(msgspec.Struct, frozen=True):
    """Bytes [start, end) of a listing that could not be kept in the store."""

    id: str
    start: int
    end: int


# --- making one -------------------------------------------------------------------------------------------------------
def pack(entries: Sequence[ListEntry]) -> Piece:
    """One page of a listing as a piece."""
    keys = [entry.key for entry in entries]
    etags = [entry.etag for entry in entries]
    key_blob, key_sizes = _blob(keys)
    etag_blob, etag_sizes = _blob(etags)
    return Piece(
        key_blob,
        key_sizes,
        array("Q", [entry.size_bytes for entry in entries]),
        array("d", [entry.modified_s for entry in entries]),
        etag_blob,
        etag_sizes,
        keys[0] if keys else "",
        keys[-1] if keys else "",
        all(map(lt, keys, keys[1:])),
    )


def _blob(texts: list[str]) -> tuple[bytes, array[int]]:
    text = "".join(texts)
    if text.isascii():
        return text.encode(), array("H", map(len, texts))
    parts = [text.encode() for text in texts]
    return b"".join(parts), array("H", map(len, parts))


def build(bucket: str, prefix: str, pieces: Iterable[Piece]) -> bytes:
    """The bytes of a listing. `Invalid` when it has more objects than a listing may."""
    kept = list(_in_order([piece for piece in pieces if piece.sizes]))
    if sum(len(piece.sizes) for piece in kept) > limits.LISTING_OBJECTS_MAX:
        raise Invalid(
            f"{bucket}/{prefix} holds more than {limits.LISTING_OBJECTS_MAX} objects, too many for one listing: name "
            "a longer prefix, or put samples together in shards"
        )
    key_ends = _ends([piece.key_sizes for piece in kept])
    keys = b"".join(piece.keys for piece in kept)
    sizes = _joined("Q", (piece.sizes for piece in kept))
    modified = _joined("d", (piece.modified for piece in kept))
    etag_text = b"".join(piece.etags for piece in kept)
    etag_sizes = _joined("H", (piece.etag_sizes for piece in kept))
    form, etags = _etags(etag_text, etag_sizes)
    head = Head(bucket, prefix, len(sizes), len(keys), len(etags), form, "")
    columns = [
        memoryview(column).cast("B") if len(column) else memoryview(b"") for column in (sizes, modified, key_ends)
    ]
    hashed = xxhash.xxh3_128(msgspec.msgpack.encode(head))
    for column in (columns[0], columns[2], keys, etags, columns[1] if 0 in etag_sizes else b""):
        hashed.update(column)
    packed = msgspec.msgpack.encode(msgspec.structs.replace(head, id=hashed.hexdigest()))
    parts: list[Any] = [MAGIC, len(packed).to_bytes(8, "little")]
    for part in (packed, *columns, keys, etags):
        parts += [part, bytes(-len(part) % 8)]
    return b"".join(parts)


def _etags(text: bytes, sizes: array[int]) -> tuple[Literal["hex", "text"], bytes]:
    if len(text) == _HEX_CHARS * len(sizes) and sizes.count(_HEX_CHARS) == len(sizes) and _HEX.issuperset(set(text)):
        return "hex", bytes.fromhex(text.decode())
    ends = _ends([sizes])
    return "text", b"".join((ends.tobytes(), bytes(-len(ends) * ends.itemsize % 8), text))


def _ends(sizes: Sequence[array[int]]) -> array[int]:
    total = sum(map(sum, sizes))
    return array("I" if total < 1 << 32 else "Q", accumulate(chain.from_iterable(sizes)))


def _joined(code: str, parts: Iterable[array[int] | array[float]]) -> array[int]:
    joined = array(code)
    for part in parts:
        joined.extend(part)  # type: ignore[arg-type]
    return joined


def _in_order(pieces: list[Piece]) -> Iterator[Piece]:
    """The pieces so that all keys rise; those that overlap are made one."""
    if all(piece.rising for piece in pieces) and all(a.last < b.first for a, b in pairwise(pieces)):
        yield from pieces
        return
    rank = {id(piece): at for at, piece in enumerate(pieces)}
    bounds = {id(piece): _bounds(piece) for piece in pieces}
    cluster: list[Piece] = []
    last = ""
    for piece in sorted(pieces, key=lambda piece: bounds[id(piece)]):
        if cluster and last < bounds[id(piece)][0]:
            yield _merged(sorted(cluster, key=lambda one: rank[id(one)]))
            cluster = []
        cluster.append(piece)
        last = max(last, bounds[id(piece)][1])
    if cluster:
        yield _merged(sorted(cluster, key=lambda one: rank[id(one)]))


def _bounds(piece: Piece) -> tuple[str, str]:
    """The lowest and the highest key."""
    if piece.rising:
        return piece.first, piece.last
    keys = list(_cut(piece.keys, piece.key_sizes))
    return min(keys), max(keys)


def _merged(pieces: list[Piece]) -> Piece:
    """One piece, sorted; of equal keys the last is kept."""
    if len(pieces) == 1 and pieces[0].rising:
        return pieces[0]
    keys = [key for piece in pieces for key in _cut(piece.keys, piece.key_sizes)]
    etags = [etag for piece in pieces for etag in _cut(piece.etags, piece.etag_sizes)]
    sizes = _joined("Q", (piece.sizes for piece in pieces))
    modified = _joined("d", (piece.modified for piece in pieces))
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    return pack([ListEntry(key, sizes[at], etags[at], modified[at]) for key, at in sorted(numbers.items())])


def _cut(blob: bytes, sizes: Iterable[int]) -> Iterator[str]:
    at = 0
    for size in sizes:
        yield blob[at : at + size].decode()
        at += size


class Listing:
    """A listing, read in place: see the module's header. `data` may be any buffer, a mapped file too; it is kept.

    `sizes` and `modified_s` are buffers of one number for each object (u64, f64), which NumPy takes as they are.
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        """`Corrupt` if these are not the bytes of a whole listing."""
        view = memoryview(data).cast("B").toreadonly()
        try:
            if bytes(view[:8]) != MAGIC:
                raise ValueError("it does not begin as one")
            at = 16 + int.from_bytes(view[8:16], "little")
            if at > len(view):
                raise ValueError("it ends within its head")
            self._head = head = msgspec.msgpack.decode(view[16:at], type=Head)
            if min(head.objects, head.key_bytes, head.etag_bytes) < 0:
                raise ValueError("its head counts less than nothing")
            self._view, self._at = view, at + -at % 8
            self.sizes = self._take(8 * head.objects).cast("Q")
            self.modified_s = self._take(8 * head.objects).cast("d")
            self._key_ends = self._take_ends(head.key_bytes)
            self._keys = self._take(head.key_bytes)
            self._etags = self._take(head.etag_bytes)
            if self._at != len(view):
                raise ValueError("it has another length than its head says")
            self._check()
        except (ValueError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Corrupt(f"these bytes are not a whole listing ({error}): ask the node for it again") from None
        self.bucket, self.prefix, self.id = head.bucket, head.prefix, head.id

    def _take(self, size_bytes: int) -> memoryview:
        start, self._at = self._at, self._at + size_bytes + -size_bytes % 8
        if self._at > len(self._view):
            raise ValueError("it is cut short")
        return self._view[start : start + size_bytes]

    def _take_ends(self, blob_bytes: int) -> memoryview:
        if blob_bytes < 1 << 32:
            return self._take(4 * self._head.objects).cast("I")
        return self._take(8 * self._head.objects).cast("Q")

    def _check(self) -> None:
        """`ValueError` unless the id is that of these columns."""
        head, ends = self._head, self._key_ends
        if (ends[-1] if head.objects else 0) != head.key_bytes:
            raise ValueError("its keys have another length than they say")
        if head.etags == "hex" and head.etag_bytes != head.objects * _HEX_CHARS // 2:
            raise ValueError("its etags have another length than they say")
        hashed = xxhash.xxh3_128(msgspec.msgpack.encode(msgspec.structs.replace(head, id="")))
        for column in (self.sizes, ends, self._keys, self._etags):
            hashed.update(column.cast("B") if len(column) else b"")
        if head.etags == "text" and self._has_empty_etag():
            hashed.update(self.modified_s.cast("B"))
        if hashed.hexdigest() != head.id:
            raise ValueError("its id is not that of its contents")

    def _text_etags(self) -> tuple[memoryview, memoryview]:
        """(ends, text) of etags in the form `text`."""
        objects, size = self._head.objects, self._head.etag_bytes
        width = 8 if size - 8 * objects >= 1 << 32 else 4
        start = width * objects + -width * objects % 8
        if start <= size:
            raw, text = self._etags[: width * objects], self._etags[start:]
            ends = raw.cast("Q") if width == 8 else raw.cast("I")
            if (ends[-1] if objects else 0) == len(text):
                return ends, text
        raise ValueError("its etags have another length than they say")

    def _has_empty_etag(self) -> bool:
        ends, _ = self._text_etags()
        return any(a == b for a, b in pairwise(chain((0,), ends)))

    # --- what is in it -----------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._head.objects

    def __repr__(self) -> str:
        return f"<Listing {self.id} of {self.bucket}/{self.prefix}, {len(self)} objects>"

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Listing) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def data(self) -> memoryview:
        """The bytes it was made from."""
        return self._view

    @property
    def size_bytes(self) -> int:
        """Of all its objects together."""
        return sum(self.sizes)

    def _key(self, number: int) -> bytes:
        ends = self._key_ends
        return bytes(self._keys[ends[number - 1] if number else 0 : ends[number]])

    def key(self, number: int) -> str:
        """The key of object `number`, from 0; `IndexError` beyond the last."""
        if not 0 <= number < len(self):
            raise IndexError(f"object {number} of a listing of {len(self)}")
        return self._key(number).decode()

    def keys(self, first: int = 0, end: int | None = None) -> list[str]:
        """The keys of objects [first, end), by default all: 0.2 µs each, half of what `key` takes."""
        end = len(self) if end is None else min(end, len(self))
        if first >= end:
            return []
        ends = self._key_ends
        start = ends[first - 1] if first else 0
        blob = bytes(self._keys[start : ends[end - 1]])
        bounds = pairwise(chain((start,), ends[first:end]))
        if blob.isascii():
            text = blob.decode()
            return [text[a - start : b - start] for a, b in bounds]
        return [blob[a - start : b - start].decode() for a, b in bounds]

    def etag(self, number: int) -> str:
        """The etag of object `number`; empty where the backend has none."""
        if not 0 <= number < len(self):
            raise IndexError(f"object {number} of a listing of {len(self)}")
        if self._head.etags == "hex":
            return self._etags[16 * number : 16 * number + 16].hex()
        ends, text = self._text_etags()
        return bytes(text[ends[number - 1] if number else 0 : ends[number]]).decode()

    def entry(self, number: int) -> ListEntry:
        """Object `number` as a listing shows it."""
        return ListEntry(self.key(number), self.sizes[number], self.etag(number), self.modified_s[number])

    def columns(self) -> Columns:
        """All of it as buffers. Etags are text here, whatever their form."""
        if self._head.etags == "hex":
            ends: memoryview = memoryview(array("Q", range(_HEX_CHARS, _HEX_CHARS * (len(self) + 1), _HEX_CHARS)))
            return Columns(self._keys, self._key_ends, self.sizes, memoryview(self._etags.hex().encode()), ends)
        ends, text = self._text_etags()
        return Columns(self._keys, self._key_ends, self.sizes, text, ends)

    def find(self, key: str) -> int | None:
        """The number of the object with this key; None if there is none. About 5 µs."""
        at = self.first_from(key)
        return at if at < len(self) and self._key(at) == key.encode() else None

    def first_from(self, key: str) -> int:
        """The number of the first object whose key is this or comes after it; how many there are, if none does."""
        return bisect_left(range(len(self)), key.encode(), key=self._key)

    # --- comparing ---------------------------------------------------------------------------------------------------
    def difference(self, other: Listing) -> Difference:
        """What changed from this one to `other`; `str` says it in words. Times count where there is no etag."""
        if self.id == other.id:
            return Difference(0, 0, 0, ())
        ours, theirs = self.keys(), other.keys()
        added, removed = set(theirs).difference(ours), set(ours).difference(theirs)
        pairs: Iterable[tuple[int, int]]
        if added or removed:
            there = dict(zip(theirs, range(len(theirs)), strict=True))
            pairs = ((at, there[key]) for at, key in enumerate(ours) if key in there)
        else:
            pairs = zip(range(len(ours)), range(len(ours)), strict=True)
        before, now = self._etag_texts(), other._etag_texts()
        changed = [
            ours[a]
            for a, b in pairs
            if before[a] != now[b]
            or self.sizes[a] != other.sizes[b]
            or (not before[a] and self.modified_s[a] != other.modified_s[b])
        ]
        samples = (*sorted(added)[:SAMPLES_MAX], *sorted(removed)[:SAMPLES_MAX], *changed[:SAMPLES_MAX])
        return Difference(len(added), len(removed), len(changed), tuple(sorted(samples)[:SAMPLES_MAX]))

    def _etag_texts(self) -> list[str]:
        columns = self.columns()
        return list(_cut(bytes(columns.etags), map(int.__sub__, columns.etag_ends, chain((0,), columns.etag_ends))))


def derived_key(prefix: str, id: str) -> str:
    """What a listing is kept under, in the reserved bucket of listings: see `core/derived.py`."""
    return f"{prefix}#{id}"
