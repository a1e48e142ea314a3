"""What a checkpoint is on the bucket: names, manifest, index, and which of several counts.

Theory. A checkpoint is made of new objects only. Under the prefix of a run lie

    data/<sequence>-<token>/<rank>.<blob>    the bytes of one rank's tensors, cut into blobs
    data/<sequence>-<token>/<rank>.index     what lies in them: an `Index`
    manifests/<sequence>                     a `Manifest`, written last, only if there is none of that name
    lives/<token>                            when the job ran, for `goodput`; no part of any checkpoint

and the checkpoint exists exactly when its manifest does. A save that was cut off has left blobs that nothing names.

The sequence counts saves, not steps. It grows, so the newest checkpoint is the one with the highest sequence, also
after a run was taken back to an earlier step on purpose. Two jobs that save under one prefix meet at a sequence: one of
them gets its manifest in, the other is told. The token keeps their blobs apart.

A rank's tensors lie one after the other in its *stream*. Blobs are the stream cut every `blob_bytes`, and checksums are
of its pieces of PIECE_BYTES. Neither knows of tensors, so a tensor of any size, and any part of one, is found by
arithmetic. Large tensors begin at multiples of 4 KiB, so that a blob on a local disk can be mapped.

Rejected: the step as the name (a run that was taken back would restore what it was taken back from); one manifest with
all tensors (a thousand ranks would send theirs to one, which writes hundreds of megabytes last); pickles (loading one
runs what it says); a checksum for each tensor (a tensor of 10 GB would have to be read whole to read a row).

Invariants. (1) What `Manifest.read` or `Index.read` returns has the digest that was recorded. (2) Two checkpoints never
share an object.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid

FORMAT = 1
PIECE_BYTES = limits.BLOCK_BYTES  # of a checksum: a node fetches no less
ALIGNED_BYTES = 4 * limits.KIB  # large tensors begin at a page
SMALL_BYTES = 64 * limits.KIB  # smaller ones begin at a cache line, else a page for each would be mostly empty
LINE_BYTES = 64
BLOB_BYTES_MIN, BLOB_BYTES_MAX = 64 * limits.MIB, limits.GIB  # a request's cost vanishes; a repeated one costs seconds
BLOBS_WANTED = 8  # of a rank: enough that some are sent while others are filled
INDEX_BYTES_MAX = 256 * limits.MIB  # a million tensors of a rank
T = TypeVar("T")
_SEQUENCE = re.compile(r"manifests/([0-9]{12})\Z")
_DATA = re.compile(r"data/([0-9]{12})-([0-9a-f]{16})/")


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor, or a rank's shard of one: `size_bytes` of the rank's stream from `offset` on, row-major.

    `shape` is of what lies here. Of a shard, `whole` is the shape of the tensor and `at` the shard's first element.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    whole: tuple[int, ...] | None = None
    at: tuple[int, ...] | None = None

    @property
    def is_sound(self) -> bool:
        """Whether what it says fits together. (An element takes a byte at least.)"""
        whole = self.whole_shape
        if len(self.first) != len(self.shape) or len(whole) != len(self.shape) or min(self.shape, default=0) < 0:
            return False
        lies = all(0 <= at <= at + n <= all_of for at, n, all_of in zip(self.first, self.shape, whole, strict=True))
        return lies and self.offset >= 0 and math.prod(self.shape) <= self.size_bytes

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.whole is None else self.whole

    @property
    def first(self) -> tuple[int, ...]:
        return (0,) * len(self.shape) if self.at is None else self.at


class Index(msgspec.Struct, frozen=True):
    """What one rank saved. `tree` holds everything that is no tensor, and refers to tensors by path (see `torch`).

    `digests`: the XXH3-64 of each piece of the stream, as one run of 16 hexadecimal digits each.
    """

    rank: int
    stream_bytes: int
    blob_bytes: int
    entries: tuple[Entry, ...]
    digests: str
    tree: dict[str, Any]

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def read(cls, data: bytes | memoryview, digest: str) -> Index:
        """`Corrupt` if it is not the index with that digest, or its parts contradict each other."""
        if digest_of(data) != digest:
            raise Corrupt("the index of a rank is not the one that the manifest names: restore an older checkpoint")
        index = _decoded(data, Index)
        pieces = -(-index.stream_bytes // PIECE_BYTES)
        fits = all(e.is_sound and e.offset + e.size_bytes <= index.stream_bytes for e in index.entries)
        if len(index.digests) != 16 * pieces or not fits or index.blob_bytes % PIECE_BYTES or index.blob_bytes <= 0:
            raise Corrupt("the index of a rank contradicts itself: restore an older checkpoint")
        return index

    def digest(self, piece: int) -> str:
        return self.digests[16 * piece : 16 * piece + 16]


class RankPart(msgspec.Struct, frozen=True, array_like=True):
    """One rank's objects: its index's digest and size, and the sizes of its blobs."""

    index_digest: str
    index_bytes: int
    blobs: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint. `saved_s`: Unix time of the manifest; `stall_s`: how long training stood still for it, on the rank
    that stood longest."""

    sequence: int
    step: int
    token: str
    saved_s: float
    ranks: tuple[RankPart, ...]
    names: tuple[str, ...] = ()  # of what was saved: "model", "optim", …
    stall_s: float = 0.0
    metadata: dict[str, str] = {}
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        return sum(part.index_bytes + sum(part.blobs) for part in self.ranks)

    def to_bytes(self) -> bytes:
        body = msgspec.json.encode(self)
        return body + b"\n" + digest_of(body).encode() + b"\n"

    @classmethod
    def read(cls, data: bytes) -> Manifest:
        """`Corrupt` for what is no whole manifest, `Invalid` for one of a later format."""
        body, _, digest = data.removesuffix(b"\n").rpartition(b"\n")
        if not body or digest.decode("ascii", "replace") != digest_of(body):
            raise Corrupt("a manifest is damaged: restore an older checkpoint, and delete this one")
        if _decoded(body, _Format).format != FORMAT:
            raise Invalid(f"this checkpoint is not of format {FORMAT}: use the release of Forebay that saved it")
        manifest = _decoded(body, Manifest)
        if not manifest.ranks:
            raise Corrupt("a manifest names nobody who saved: restore an older checkpoint, and delete this one")
        return manifest

    def objects(self) -> Iterator[tuple[str, int]]:
        """Names below the run's prefix, and sizes, of all objects but the manifest."""
        for rank, part in enumerate(self.ranks):
            yield index_name(self.sequence, self.token, rank), part.index_bytes
            for blob, size_bytes in enumerate(part.blobs):
                yield blob_name(self.sequence, self.token, rank, blob), size_bytes


class _Format(msgspec.Struct, frozen=True):
    format: int


class Data(NamedTuple):
    """What a name below data/ says of its save."""

    sequence: int
    token: str


# --- names -----------------------------------------------------------------------------------------------------------
def manifest_name(sequence: int) -> str:
    return f"manifests/{sequence:012}"


def blob_name(sequence: int, token: str, rank: int, blob: int) -> str:
    return f"data/{sequence:012}-{token}/{rank:06}.{blob:06}"


def index_name(sequence: int, token: str, rank: int) -> str:
    return f"data/{sequence:012}-{token}/{rank:06}.index"


def sequence_of(name: str) -> int | None:
    """Which checkpoint a name below the prefix is the manifest of; None for any other name."""
    found = _SEQUENCE.match(name)
    return int(found[1]) if found else None


def save_of(name: str) -> Data | None:
    """Which save an object below data/ belongs to; None for any other name."""
    found = _DATA.match(name)
    return Data(int(found[1]), found[2]) if found else None


# --- sizes -----------------------------------------------------------------------------------------------------------
def place_after(end: int, size_bytes: int) -> int:
    """Where in a stream the next tensor begins if the last one ended at `end`."""
    unit = ALIGNED_BYTES if size_bytes >= SMALL_BYTES else LINE_BYTES
    return -(-end // unit) * unit


def blob_bytes_for(stream_bytes: int) -> int:
    """How a stream of that size is cut: about BLOBS_WANTED blobs, whole pieces each."""
    wanted = -(-stream_bytes // BLOBS_WANTED)
    pieces = -(-min(max(wanted, BLOB_BYTES_MIN), BLOB_BYTES_MAX) // PIECE_BYTES)
    return pieces * PIECE_BYTES


def digest_of(data: bytes | memoryview) -> str:
    """The XXH3-128 of an index or manifest, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def piece_digest(data: bytes | memoryview) -> str:
    """The XXH3-64 of a piece, in hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


PieceDigest = xxhash.xxh3_64  # the same of a piece that comes in parts


# --- what may go -----------------------------------------------------------------------------------------------------
def prunable(sequences: list[int], keep: int, durable: int | None) -> list[int]:
    """Which checkpoints go if the newest `keep` stay. `durable`: the newest one that the bucket has whole, None if
    there is none. It stays, and so does everything newer: a lost node must not take the last one along."""
    if keep < 1:
        raise Invalid(f"keep={keep}: at least one checkpoint must stay; delete the prefix to remove them all")
    newest_first = sorted(sequences, reverse=True)
    if durable is None:
        return []
    return [sequence for sequence in newest_first[keep:] if sequence < durable]


def _decoded(data: bytes | memoryview, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"this is no checkpoint's {kind.__name__.lower()} ({error}): restore an older one") from None
