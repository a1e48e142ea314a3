"""The objects of a dataset as columns (keys in byte order, sizes, etags), and a fingerprint of them.

Theory. A job lists its bucket once. Each rank and worker then holds columns of bytes and numbers, about 60 bytes an
object. Forked workers share them, since the interpreter counts no references in them. A fingerprint is small. It tells
whether two listings are the same, and if not, from about where on they differ: besides a hash of everything it has
RUNGS short hashes of the first 1/RUNGS, 2/RUNGS, … of the objects.

Invariants. (1) `sizes`, `key_ends` and `etag_ends` have one entry for each object. (2) Equal fingerprints mean the same
keys, sizes and etags, except for a collision of 128-bit hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.core.errors import NotFound
from forebay.core.formats.listing import Listing

RUNGS = 16
_RUNG_BYTES, _ID_BYTES = 4, 16
Column = Any  # numpy.ndarray
Blob = bytes | memoryview


class Fingerprint(msgspec.Struct, frozen=True, rename={"listing_id": "manifest"}):
    """What a dataset was when its state was saved. `shape` says how samples are made of objects and in what kind of
    order; `samples` is 0 where they were not counted, and follows from the rest; `rungs` are hexadecimal digits,
    2 * _RUNG_BYTES for each rung; `listing_id` (saved states call it `manifest`) is the id under which the node may
    still know the listing that it was made from."""

    shape: str
    samples: int
    objects: int
    size_bytes: int
    id: str
    rungs: str
    listing_id: str = ""


class ListingColumns(NamedTuple):
    """Objects of one bucket. Columns are NumPy arrays; `keys` and `etags` hold UTF-8 without separators."""

    bucket: str
    keys: Blob
    key_ends: Column
    sizes: Column
    etags: Blob
    etag_ends: Column
    listing_id: str
    numbers: Column | None = None  # in the listing; None: as here

    @classmethod
    def of(cls, listing: Listing, suffixes: Sequence[str] = (), names: Sequence[str] | None = None) -> ListingColumns:
        """The objects whose key ends in one of `suffixes` (any case); with none, all but folder marks (`x/`). Or those
        with these `names`, and no others; `NotFound` if one is missing."""
        keys, key_ends, sizes, etags, etag_ends = listing.columns()
        found = cls(listing.bucket, keys, _ints(key_ends), _ints(sizes), etags, _ints(etag_ends), listing.id)
        if names is not None:
            chosen = _named(listing, names)
        else:
            chosen = found._ending_in(suffixes) if suffixes else ~found._ending_in(("/",))
        return found if chosen.all() else found._only(chosen)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, tuple(bytes(item) if isinstance(item, memoryview) else item for item in self)

    @property
    def objects(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Of all objects together."""
        return int(self.sizes.sum())

    @property
    def names(self) -> list[str]:
        """All keys, in byte order."""
        return [self.key(number) for number in range(self.objects)]

    @property
    def memory_bytes(self) -> int:
        return (
            len(self.keys) + len(self.etags) + sum(int(c.nbytes) for c in (self.key_ends, self.sizes, self.etag_ends))
        )

    def key(self, number: int) -> str:
        """The key of object `number`."""
        return _text(self.keys, self.key_ends, number)

    def etag(self, number: int) -> str:
        """Its etag; empty where the backend has none."""
        return _text(self.etags, self.etag_ends, number)

    def numbers_in_listing(self, objects: Column) -> Column:
        """What the listing counts these objects as."""
        return objects if self.numbers is None else self.numbers[objects]

    def _ending_in(self, suffixes: Sequence[str]) -> Column:
        """Which keys end in one of `suffixes`, whatever the case of ASCII letters."""
        letters = np.frombuffer(self.keys, np.uint8)
        lengths = np.diff(self.key_ends, prepend=0)
        found: Column = np.zeros(self.objects, bool)
        for suffix in suffixes:
            wanted = suffix.encode()
            here = lengths >= len(wanted)
            for back, (lower, upper) in enumerate(zip(wanted.lower()[::-1], wanted.upper()[::-1], strict=True), 1):
                at = letters[np.where(here, self.key_ends - back, 0)] if len(letters) else letters
                here &= (at == lower) | (at == upper)
            found |= here
        return found

    def _only(self, chosen: Column) -> ListingColumns:
        """The objects of a mask, in runs of neighbours."""
        edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)

        def cut(blob: Blob, ends: Column) -> tuple[bytes, Column]:
            bounds = np.concatenate(([0], ends))
            pieces = [blob[bounds[first] : bounds[end]] for first, end in edges]
            return b"".join(pieces), np.cumsum(np.diff(bounds)[chosen])

        keys, key_ends = cut(self.keys, self.key_ends)
        etags, etag_ends = cut(self.etags, self.etag_ends)
        numbers = np.flatnonzero(chosen)
        return ListingColumns(
            self.bucket, keys, key_ends, self.sizes[chosen], etags, etag_ends, self.listing_id, numbers
        )

    def fingerprint(self, shape: str, samples: int) -> Fingerprint:
        """Of a dataset of `samples` made of these objects."""
        rungs = b"".join(self._hash(self.objects * rung // RUNGS, _RUNG_BYTES) for rung in range(1, RUNGS + 1))
        whole = self._hash(self.objects, _ID_BYTES).hex()
        return Fingerprint(shape, samples, self.objects, self.size_bytes, whole, rungs.hex(), self.listing_id)

    def _hash(self, objects: int, size_bytes: int) -> bytes:
        """Of the first `objects` objects."""
        hashed = xxhash.xxh3_128()
        for blob, ends in ((self.keys, self.key_ends), (self.etags, self.etag_ends)):
            hashed.update(memoryview(blob)[: int(ends[objects - 1]) if objects else 0])
            hashed.update(ends[:objects].tobytes())
        hashed.update(self.sizes[:objects].tobytes())
        return hashed.digest()[:size_bytes]

    def difference(self, saved: Fingerprint, now: Fingerprint) -> str:
        """In words, what changed since `saved`; empty if nothing did. `now` is of this listing."""
        found = []
        if saved.shape != now.shape:
            found.append(f"it was read as {saved.shape!r} and is now {now.shape!r}")
        for what, before, after in (
            ("objects", saved.objects, now.objects),
            ("samples", saved.samples, now.samples),
            ("bytes", saved.size_bytes, now.size_bytes),
        ):
            if before != after and (what != "samples" or (before and after)):
                found.append(f"{what}: {before} then, {after} now")
        if saved.id != now.id:
            found.append(self._where(saved))
        return "; ".join(found)

    def _where(self, saved: Fingerprint) -> str:
        """Between which keys the first difference lies."""
        width = 2 * _RUNG_BYTES
        same = 0
        for rung in range(1, RUNGS + 1):
            upto = saved.objects * rung // RUNGS
            digits = saved.rungs[(rung - 1) * width : rung * width]
            if upto > self.objects or self._hash(upto, _RUNG_BYTES).hex() != digits:
                first, last = same, min(upto, self.objects) - 1
                if first > last:
                    return f"everything up to {self.key(last)!r} is as it was" if last >= 0 else "all objects are gone"
                if first == last:
                    return f"{self.key(first)!r} is not what was there"
                return f"the first key that differs lies between {self.key(first)!r} and {self.key(last)!r}"
            same = upto
        return f"keys were added from {self.key(same)!r} on" if same < self.objects else "keys, sizes or etags differ"


def _named(listing: Listing, names: Sequence[str]) -> Column:
    """Which objects of a listing have these keys."""
    found = [listing.find(name) for name in names]
    if None in found:
        raise NotFound(
            f"{found.count(None)} of the {len(names)} keys= are not there, {names[found.index(None)]!r} being the "
            "first: put them back, or leave them out"
        )
    chosen: Column = np.zeros(len(listing), bool)
    chosen[np.asarray(found, np.int64)] = True
    return chosen


def _rebuilt(*columns: Any) -> ListingColumns:
    return ListingColumns(*columns)


def _ints(column: memoryview) -> Column:
    """A buffer of numbers as int64; one that has them already is not copied."""
    found = np.asarray(column)
    return found.view(np.int64) if found.itemsize == 8 else found.astype(np.int64)


def _text(blob: Blob, ends: Column, number: int) -> str:
    return str(blob[int(ends[number - 1]) if number else 0 : int(ends[number])], "utf-8")
