"""`forebay.ShardWriter`: samples, one after another, to tar shards with their index.

Theory. A shard is written when the next sample no longer fits, and then a note says which shards there are. The index
(`shardindex.json`) comes last and the note goes, so where there is an index all shards are there. A writer that was
killed is made again with the same arguments: it says in `samples` how many samples lie in whole shards, and goes on
with the next. The last shard is not noted, since whether it is full is only known when the samples end.

Nothing in a shard depends on when, where or by whom it was written: members have no time and no owner, the parts of a
sample are in the order of their extensions, and `samples.Cut` decides by sizes alone. So the same samples make the same
bytes, however often the writer was killed.

Rejected. Going through all samples again and leaving out those that are there (to make them is what takes long);
appending to a shard (a tar that was cut needs mending first); an upload that grows (a killed one stays at the bucket).

Invariants. (1) A shard is in the note only if it is there, whole. (2) A sample that was refused leaves no trace.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Protocol

import msgspec

from forebay.client.shards.places import Place, place_of
from forebay.core import limits
from forebay.core.errors import Closed, Exists, Invalid, Precondition
from forebay.core.formats import tar
from forebay.core.formats.samples import (
    INDEX,
    Cut,
    Shard,
    Unfinished,
    check_parts,
    decode_unfinished,
    encode_index,
    joined,
    shard_name,
)
from forebay.core.quantity import parse_size
from forebay.core.spelling import known_arguments

NOTE = "shardindex.unfinished.json"
SHARD_BYTES = 256 * limits.MIB  # a window of a first epoch, and some seconds of a fast link
_COPY_BYTES = limits.MIB


class Content(Protocol):
    """A part that is not in memory."""

    size_bytes: int

    def copy_to(self, file: IO[bytes]) -> None:
        """Write exactly `size_bytes` bytes."""
        ...


class ShardWriter:
    """Writes samples to `place` ('bucket/prefix' or 's3://bucket/prefix'; './folder' or a path object is a folder).

    A sample is a dictionary: `__key__` is its name, and each other name is the extension of a part, as in `{"__key__":
    "0001", "jpg": data, "cls": 3}`. Parts are bytes, or a path of a file; text and whole numbers; for `json` any value,
    for `npy` an array. Shards take at most `shard_bytes` (a number, or as in '256MiB') and `samples_max` samples. The
    place must be empty: `Exists` otherwise. `made_of` names the input, such as a version, in any words.

    If a writer with the same arguments was killed here, or ended with an error, this one goes on: leave out as many
    samples as `samples` says at first. `Precondition` if the arguments are others, or another process writes to the
    same place; `Busy` for that in a folder. Use it with `with`: at its end, without an error, the index is written,
    which is what `ShardDataset` reads. `Invalid` for a sample that no shard can hold; the next can be written.
    """

    @known_arguments
    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        shard_bytes: int | str = SHARD_BYTES,
        samples_max: int | None = None,
        made_of: str = "",
        url: str | None = None,
    ) -> None:
        size_bytes = parse_size(shard_bytes) if isinstance(shard_bytes, str) else shard_bytes
        self._cut = Cut(size_bytes, samples_max)
        self._keys: set[str] = set()  # of the shard that is open
        self._part: IO[bytes] | None = None
        self._ended = False
        self._place: Place = place_of(place, url)
        try:
            self._note = self._begun(Unfinished(made_of, size_bytes, samples_max))
        except BaseException:
            self._place.close()
            raise
        self.samples = sum(shard.nsamples for shard in self._note.shardlist)
        self._kept = self.samples

    def _begun(self, now: Unfinished) -> Unfinished:
        """The note of the writer before this one, or a new one."""
        there = dict(self._place.names())
        data = self._place.read(NOTE) if NOTE in there else None
        if data is None:
            if there:
                what = "is finished" if INDEX in there else f"holds {min(there)!r}"
                raise Exists(f"{self._place} {what}: write to an empty place, or remove what is there")
            self._place.put(NOTE, msgspec.json.encode(now))
            return now
        note = decode_unfinished(data, f"{self._place}{NOTE}")
        changed = note.difference(now)
        if changed:
            raise Precondition(
                f"a writer of other shards began at {self._place} ({changed}): go on with what it had, or remove what "
                "is there"
            )
        for shard in note.shardlist:
            if there.get(shard.url) != shard.filesize:
                raise Precondition(f"{shard.url} of {self._place} is gone or was changed: remove what is there")
        return note

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    @property
    def shards(self) -> list[Shard]:
        """Those that are there, whole."""
        return list(self._note.shardlist)

    def write(self, sample: Mapping[str, Any]) -> None:
        """One more sample; its parts are in the shard in the order of their names."""
        if self._ended:
            raise Closed("the writer is closed: make another for another place")
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise Invalid(f"the sample's __key__ is {key!r}: give it a name of its own, in text")
        if self.samples == self._kept and self._kept and key == self._note.first_key:
            raise Invalid(f"{key!r} is there already: leave out the first {self.samples} samples, as `samples` says")
        parts = {extension: sample[extension] for extension in sorted(sample) if not extension.startswith("__")}
        check_parts(key, parts)
        contents = [(joined(key, name), _content(key, name, value)) for name, value in parts.items()]
        heads = [tar.header_of(name, _size(content), 0) for name, content in contents]
        size_bytes = sum(
            len(head) + _size(content) + len(tar.padding(_size(content)))
            for head, (_, content) in zip(heads, contents, strict=True)
        )
        if not self._cut.fits(key, size_bytes):
            self._note.shardlist.append(self._finish())
            self._place.put(NOTE, msgspec.json.encode(self._note))
        if key in self._keys:
            raise Invalid(f"two samples of a shard are called {key!r}: a reader would take them for one")
        if self._part is None:
            self._part = self._place.part()
        self._append(self._part, heads, [content for _, content in contents], size_bytes)
        if not self.samples:
            self._note.first_key = key
        self._keys.add(key)
        self._cut.add(size_bytes)
        self.samples += 1

    def _append(self, part: IO[bytes], heads: list[bytes], contents: list[bytes | Content], size_bytes: int) -> None:
        """Whole, or nothing."""
        start = part.tell()
        try:
            for head, content in zip(heads, contents, strict=True):
                part.write(head)
                if isinstance(content, bytes):
                    part.write(content)
                else:
                    content.copy_to(part)
                part.write(tar.padding(_size(content)))
        except BaseException:
            part.seek(start)
            part.truncate()
            raise
        assert part.tell() - start == size_bytes, "a part gave other bytes than it said"

    def _finish(self) -> Shard:
        """Make the open shard one that is there."""
        part, self._part = self._part, None
        assert part is not None, "a shard begins with its first sample"
        part.write(tar.END)
        shard = Shard(shard_name(len(self._note.shardlist)), self._cut.samples, part.tell())
        assert shard.filesize <= self._cut.shard_bytes, "the cut went wrong"
        self._place.keep(shard.url, part)
        self._cut.begin()
        self._keys.clear()
        return shard

    def close(self) -> None:
        """Write the last shard and the index. `Invalid` if there was no sample."""
        if self._ended:
            return
        try:
            if not self.samples:
                self._place.remove(NOTE)
                raise Invalid(f"no sample was written to {self._place}: look at the input")
            if self._part is not None:
                self._note.shardlist.append(self._finish())
            self._place.put(INDEX, encode_index(self._note.shardlist))
            self._place.remove(NOTE)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End without an index: another writer goes on after the last whole shard."""
        self._ended = True
        part, self._part = self._part, None
        if part is not None:
            part.close()
        self._place.close()


class FileContent:
    """A file of this machine. `Precondition` if it is another size when it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.size_bytes = os.stat(path).st_size

    def copy_to(self, file: IO[bytes]) -> None:
        left = self.size_bytes
        with open(self.path, "rb", buffering=0) as source:
            while piece := source.read(_COPY_BYTES):
                left -= len(piece)
                if left < 0:
                    break
                file.write(piece)
        if left:
            raise Precondition(f"{os.fspath(self.path)} changed while it was read: leave the input alone meanwhile")


def _size(content: bytes | Content) -> int:
    return len(content) if isinstance(content, bytes) else content.size_bytes


def _content(key: str, name: str, value: Any) -> bytes | Content:
    """The bytes that a part's value stands for. `Invalid` if there are none that a reader would make it of."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return FileContent(value)
    if hasattr(value, "copy_to"):
        content: Content = value
        return content
    encode = _BY_EXTENSION.get(name.lower().rpartition(".")[2])
    try:
        if encode is not None:
            return encode(value)
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, int):
            return b"%d" % value
    except Exception as error:
        raise Invalid(f"the part {name!r} of {key!r} cannot be written ({error}): give it as bytes") from error
    raise Invalid(f"the part {name!r} of {key!r} is of {type(value).__name__}: give it as bytes, text or a number")


def _array(value: Any) -> bytes:
    numpy = importlib.import_module("numpy")  # whoever gives an array has it
    file = io.BytesIO()
    numpy.save(file, value, allow_pickle=False)
    return file.getvalue()


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


_BY_EXTENSION: dict[str, Callable[[Any], bytes]] = {"json": _json, "jsn": _json, "npy": _array}
