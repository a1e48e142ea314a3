"""Names of derived objects, and the call that stores one.

Theory. The node stores what it computes from an object in a reserved bucket, one for each kind, under the source's name
(`node/store/derived.py` says why). Names of reserved buckets begin with `-`, which no bucket's name may. A derived
object is called `BUCKET/=KEY`. Where that is longer than a key may be, it is called `BUCKET/#`, the beginning of the
key, and a hash of the whole name.

Invariants. (1) Different sources have different names (except for 128-bit collisions). (2) No name is longer than
KEY_BYTES_MAX. (3) Names derived from keys under a prefix begin with one of `names_under`.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import xxhash

from forebay.core import limits

DerivedKind = Literal["members", "listings", "plain"]
DERIVED_KINDS: tuple[DerivedKind, ...] = ("members", "listings", "plain")
_HASH_CHARS = 32
# Buckets on disk. A listing was once called a manifest, and nodes have such buckets.
_ON_DISK: dict[DerivedKind, str] = {"members": "-members", "listings": "-manifests", "plain": "-plain"}


class KeepCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep what was computed from `version` of an object. It is `body` (at most INLINE_BYTES_MAX) or the temp file
    `path`, which is the engine's from here on, with `sums`: the xxh3-64 of each block."""

    kind: DerivedKind
    bucket: str
    key: str
    version: str
    size_bytes: int
    path: str = ""
    body: bytes | None = None
    sums: list[int] = []


class KeepAnswer(msgspec.Struct, frozen=True):
    """False: the object is of another version by now, and nothing was kept."""

    kept: bool


def reserved(kind: DerivedKind) -> str:
    """The bucket that derived objects of this kind are in."""
    return _ON_DISK[kind]


def name_of(bucket: str, key: str) -> str:
    """The name of what is derived from an object."""
    name = f"{bucket}/={key}"
    raw = name.encode()
    if len(raw) <= limits.KEY_BYTES_MAX:
        return name
    return f"{bucket}/#{_cut(key, _stem_bytes(bucket))}{xxhash.xxh3_128_hexdigest(raw)}"


def names_under(bucket: str, prefix: str) -> tuple[str, str]:
    """What the names of all that is derived from keys under `prefix` begin with. Where the prefix itself is longer than
    the part of a long key that is in its name, names of other keys may begin like that too."""
    stem = _cut(prefix, _stem_bytes(bucket) - 4)  # a character may be cut from a key where the prefix goes on
    return f"{bucket}/={prefix}", f"{bucket}/#{stem}"


def _stem_bytes(bucket: str) -> int:
    return limits.KEY_BYTES_MAX - len(bucket) - 2 - _HASH_CHARS


def _cut(text: str, size_bytes: int) -> str:
    """The beginning of `text` that fits."""
    return text.encode()[:size_bytes].decode("utf-8", "ignore")
