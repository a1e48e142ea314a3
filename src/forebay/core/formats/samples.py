"""What a sample in a shard is called, where shards are cut, and the index beside them.

Theory. The layout is WebDataset's. A sample is the members of a shard that share a key. A member's name is the key, a
dot and the part's extension; the key is everything up to the first dot of the last component. So `a/b.seg.png` is the
part `seg.png` of the sample `a/b`, and a key with a dot in its last component would be read as another. Extensions are
the same in any case of their letters.

The index, `shardindex.json`, is that of WebDataset's `wids`: `{"shardlist": [{"url": "train-0.tar", "nsamples": 1000,
…}, …]}`. Its URLs may be of another place, so readers know a shard by the last part of its name.

DALI's index is one for each shard, `train-0.idx` beside `train-0.tar`: `v1.2 COUNT`, then a line for each sample, of
the extension, offset, size and name of each part.

Where a shard ends follows from the sizes of the samples in their order alone, so the same samples make the same shards.

Invariants. (1) `split(joined(key, extension)) == (key, extension)`. (2) A shard that a `Cut` made has a sample, and at
most the bytes and samples it was told.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

import msgspec

from forebay.core.errors import Corrupt, Invalid
from forebay.core.formats import tar
from forebay.core.quantity import size

INDEX = "shardindex.json"
SHARDS_MAX = 1_000_000  # their numbers have six digits, so that byte order is their order
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


def split(name: str) -> tuple[str, str] | None:
    """Key and extension of a member's name; None if it has not both, so that it belongs to no sample."""
    match = _NAME.fullmatch(name)
    return (match[1], match[2]) if match else None


def joined(key: str, extension: str) -> str:
    """A member's name. `Invalid` if it would not be read as these two, or a tar cannot hold it."""
    name = f"{key}.{extension}"
    if split(name) != (key, extension):
        raise Invalid(
            f"a reader would not find the part {extension!r} of the sample {key!r}: a key has a last component without "
            "dots, and an extension has no slash"
        )
    try:
        tar.header_of(name, 0, 0)
    except (Invalid, UnicodeEncodeError) as error:
        raise Invalid(f"a tar cannot hold the name {name[:200]!r} ({error}): give the sample another key") from None
    return name


def check_parts(key: str, extensions: Iterable[str]) -> None:
    """`Invalid` if a sample has no part, or one twice."""
    seen: dict[str, str] = {}
    for extension in extensions:
        before = seen.setdefault(extension.lower(), extension)
        if before != extension:
            raise Invalid(f"the sample {key!r} has both {before!r} and {extension!r}, which are one part to a reader")
    if not seen:
        raise Invalid(f"the sample {key!r} has no parts: give it one, such as 'jpg', beside its key")


def shard_name(number: int) -> str:
    """The name of shard `number`."""
    if number >= SHARDS_MAX:
        raise Invalid(f"more than {SHARDS_MAX} shards: make them larger")
    return f"shard-{number:06d}.tar"


class Cut:
    """Where shards of at most `shard_bytes` (and `samples_max`) end. `room` is asked before each sample."""

    def __init__(self, shard_bytes: int, samples_max: int | None = None) -> None:
        if samples_max is not None and samples_max < 1:
            raise Invalid(f"{samples_max} samples in a shard: take at least 1, or None")
        self.shard_bytes, self.samples_max = shard_bytes, samples_max
        self.size_bytes = self.samples = 0  # of the shard that is open

    def fits(self, key: str, size_bytes: int) -> bool:
        """Whether the sample, with its headers, goes into this shard; else into the next. `Invalid` if into none."""
        if size_bytes + len(tar.END) > self.shard_bytes:
            raise Invalid(
                f"the sample {key!r} takes {size(size_bytes)} with its headers, and a shard {size(self.shard_bytes)}: "
                "take larger shards"
            )
        full = self.samples_max is not None and self.samples >= self.samples_max
        return not full and self.size_bytes + size_bytes + len(tar.END) <= self.shard_bytes

    def add(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self.samples += 1

    def begin(self) -> None:
        """Another shard."""
        self.size_bytes = self.samples = 0


# --- the index -------------------------------------------------------------------------------------------------------
class Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    """One shard, in the words of `wids`. `filesize` is in bytes; 0 where nobody said it."""

    url: str
    nsamples: int
    filesize: int = 0


class _Index(msgspec.Struct, kw_only=True):
    kind: str = msgspec.field(name="__kind__", default="wids-shard-index-v1")
    wids_version: int = 1
    shardlist: list[Shard]


class Unfinished(msgspec.Struct):
    """What is done of a dataset that is being written: its shards; and what must be the same to go on with it."""

    made_of: str
    shard_bytes: int
    samples_max: int | None
    first_key: str = ""
    shardlist: list[Shard] = []

    def difference(self, now: Unfinished) -> str:
        """In words, why `now` cannot go on with this; empty if it can."""
        found = [
            f"{what}: {before} then, {after} now"
            for what, before, after in (
                ("shard_bytes", self.shard_bytes, now.shard_bytes),
                ("samples_max", self.samples_max, now.samples_max),
            )
            if before != after
        ]
        if self.made_of != now.made_of:
            found.append("the input is another one")
        return "; ".join(found)


def encode_index(shards: list[Shard]) -> bytes:
    """The index, byte for byte the same for the same shards."""
    return msgspec.json.format(msgspec.json.encode(_Index(shardlist=shards)), indent=1)


def decode_index(data: bytes | memoryview) -> list[Shard] | None:
    """The shards of an index; None if it is something else."""
    try:
        found = msgspec.json.decode(data, type=_Index)
    except msgspec.DecodeError:
        return None
    return found.shardlist


def dali_name(shard: str) -> str:
    """The key of DALI's index of a shard."""
    folder, slash, name = shard.rpartition("/")
    return f"{folder}{slash}{name[:1]}{name[1:].partition('.')[0]}.idx"


def decode_dali(data: bytes) -> tuple[list[str], array[int], array[int]] | None:
    """Names, offsets and sizes of the members of a shard, as DALI's index says; None if it is something else, or of a
    version without names."""
    try:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        version, count = lines[0].split(" ")
        rows = [line.split(" ") for line in lines[1:] if line]
        if version != "v1.2" or len(rows) != int(count) or any(len(row) % 4 for row in rows):  # a name has a space
            return None
        names = [name for row in rows for name in row[3::4]]
        offsets = array("Q", [int(offset) for row in rows for offset in row[1::4]])
        return names, offsets, array("Q", [int(size) for row in rows for size in row[2::4]])
    except (ValueError, OverflowError):
        return None


def decode_unfinished(data: bytes, where: str) -> Unfinished:
    """`Corrupt` if it is none."""
    try:
        return msgspec.json.decode(data, type=Unfinished)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{where} cannot be read ({error}): remove what is there, and write it anew") from None
