"""Chunks of litdata whose samples lie behind the table of places, as Arrow: see `litdata_chunks.py`.

Theory. Where all that samples hold is text, numbers, truths, bytes, lists and dictionaries, litdata keeps them as rows
of a table. The chunk begins as the others do, with the number of its samples and their places, but the places are all
the same: the end of that table of places. There a file of Arrow's begins (its IPC format, with a directory). After it
come its size (4 bytes) and eight letters that tell what it is.

The directory is at the file's end. It has the columns' types, and says where each record batch is. A batch has 256
rows, and the last one the rest. So of a chunk the head and the end are read once, some KB; a sample is a row of one
batch, which is one range, is decoded as a whole, and is kept while samples of it are due (`together.py`). The values of
a batch may be compressed by zstd or lz4, each column's by itself.

pyarrow decodes a batch. It does not say where batches are, nor how large they will be, so the two tables that say it
(flatbuffers) are read here. A batch is validated in full before a value is taken from it: without that, an offset that
is damaged would have pyarrow read memory that is not its own.

Rejected: to read single rows of a batch that is not compressed, as its offsets would allow (a second reader of Arrow's
layout); types that litdata does not write, such as dictionaries and extensions; a stream instead of a file.

Invariant. What a batch takes in memory is known and bounded before it is decoded.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from forebay.core import limits
from forebay.core.errors import NotSupported
from forebay.torch.formats.indexed import Places
from forebay.torch.formats.together import pyarrow
from forebay.torch.source import Bytes

ROWS = 256  # of a record batch
TAIL_BYTES = 16 * limits.KIB  # the directory of most chunks
DIRECTORY_BYTES_MAX = 16 * limits.MIB  # some 600 000 batches, or as many columns as nobody has
BATCH_BYTES_MAX = 2 * limits.GIB  # decoded; litdata's chunks have 64 MB
VALUES_MAX = 1 << 26  # of a batch with all that is in lists: each becomes a value of Python's once its row is asked for
BUFFERS_MAX = 1 << 16  # of a batch: two or three for each column
_CHUNK_END = b"LDARW01\0"
_FILE_END = b"ARROW1"
_AFTER_BYTES = 4 + len(_CHUNK_END)  # after the file
_NEAR = 6  # one row of many is six times as dear as a row among neighbours
_BLOCK_BYTES = 24  # of where a batch is: its begin (8), the size of its head (4, and 4 of nothing), of its values (8)
_IS_NEEDED = "litdata's chunks of dictionaries are Arrow, which needs"


def end_bytes(tail: Bytes) -> int:
    """How many bytes of a chunk's end are needed to know its batches; `tail` are some of them."""
    tail = bytes(tail[-64:])
    if len(tail) < _AFTER_BYTES + 10 or tail[-8:] != _CHUNK_END:
        raise ValueError("its end is not that of a chunk of Arrow")
    if tail[-_AFTER_BYTES - 6 : -_AFTER_BYTES] != _FILE_END:
        raise NotSupported(
            "it holds Arrow as a stream, which an older litdata wrote and which is not read here: optimize() it again"
        )
    (directory_bytes,) = struct.unpack_from("<i", tail, len(tail) - _AFTER_BYTES - 10)
    if not 0 < directory_bytes <= DIRECTORY_BYTES_MAX:
        raise ValueError(f"its directory is said to have {directory_bytes} bytes")
    return int(directory_bytes) + 10 + _AFTER_BYTES


def places_of(end: Bytes, samples: int, begin: int, size: int) -> Places:
    """Where the batches of a chunk of that many samples lie; `begin`: the file's in the chunk of `size` bytes."""
    data = bytes(end)
    (file_bytes,) = struct.unpack_from("<I", data, len(data) - _AFTER_BYTES)
    if file_bytes != size - _AFTER_BYTES - begin:
        raise ValueError(f"it is said to have {file_bytes} bytes of Arrow")
    directory = data[: -_AFTER_BYTES - 10]
    try:
        at, batches = _Table.root(directory).vector(3, _BLOCK_BYTES)
    except struct.error as error:
        raise ValueError(f"its directory is damaged: {error}") from None
    if batches != -(-samples // ROWS):
        raise ValueError(f"it has {batches} batches for {samples} samples")
    blocks = np.frombuffer(directory, [("start", "<i8"), ("head", "<i4"), ("", "<i4"), ("body", "<i8")], batches, at)
    starts, sizes = blocks["start"].astype(np.int64), blocks["head"].astype(np.int64)
    most = file_bytes - len(directory)
    for column in (starts, sizes, blocks["body"]):
        if (column < 0).any() or (column > most).any():
            raise ValueError("its directory is damaged: a batch lies outside of it")
    ends = starts + sizes + blocks["body"]
    if (sizes < 8).any() or (ends > most).any():
        raise ValueError("its directory is damaged: a batch lies outside of it")
    schema = _schema(data[:-_AFTER_BYTES])
    return Places(begin + starts, begin + ends, ROWS, ArrowRows(schema, samples))


def _schema(end: bytes) -> bytes:
    """The types of the columns, as a stream of Arrow's begins with them. The end of a file has them too."""
    arrow = pyarrow("", _IS_NEEDED)
    pyarrow("ipc", _IS_NEEDED)
    try:
        schema = arrow.ipc.open_file(arrow.py_buffer(_FILE_END + b"\0\0" + end)).schema
    except Exception as error:  # pyarrow has errors of many kinds for what is damaged
        raise ValueError(f"its directory is damaged: {error}") from None
    for field in schema:
        _checked(arrow.types, field.type)
    return bytes(schema.remove_metadata().serialize())


def _checked(types: Any, kind: Any) -> None:
    """Raises `NotSupported` for a type that litdata does not write."""
    if types.is_struct(kind):
        for number in range(kind.num_fields):
            _checked(types, kind.field(number).type)
    elif types.is_list(kind) or types.is_large_list(kind):
        _checked(types, kind.value_type)
    elif not (
        types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        or types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    ):  # fmt: skip
        raise NotSupported(
            f"it has a column of Arrow's type {kind}, which is not read here: optimize() text, numbers, bytes, lists "
            "and dictionaries"
        )


class ArrowRows(NamedTuple):
    """How the batches of a chunk are read: a `Grouping`."""

    schema: bytes
    rows: int

    @property
    def nbytes(self) -> int:
        return len(self.schema)

    def unpacked(self, group: int, data: Bytes) -> Any:
        """The record batch. Its rows are counted, and it is sound."""
        arrow = pyarrow("", _IS_NEEDED)
        stream = b"".join((self.schema, data))  # of its own memory: an answer holds more than this
        _bounded(memoryview(stream)[len(self.schema) :])
        try:
            options = pyarrow("ipc").IpcReadOptions(use_threads=False)  # a forked worker has none of them
            batch = pyarrow("ipc").open_stream(stream, options=options).read_next_batch()
            batch.validate(full=True)
        except Exception as error:  # pyarrow has errors of many kinds for what is damaged
            raise ValueError(str(error)) from None
        rows = min(ROWS, self.rows - ROWS * group)
        if batch.num_rows != rows:
            raise ValueError(f"it has {batch.num_rows} rows, not {rows}")
        values = sum(_values(arrow.types, column) for column in batch.columns)
        if values > VALUES_MAX:
            raise ValueError(f"it has {values} values, more than {VALUES_MAX}: write smaller samples")
        return _Batch(batch, batch.columns, batch.schema.names, batch.nbytes)

    def samples(self, found: _Batch, inner: list[int]) -> list[Any]:
        """Rows, each a dictionary, by their numbers in the chunk."""
        numbers = [number % ROWS for number in inner]
        first, last = min(numbers), max(numbers)
        try:
            if last - first < _NEAR * len(set(numbers)) and len(set(numbers)) == len(numbers):  # twice is two samples
                rows = found.batch.slice(first, last + 1 - first).to_pylist()
                return [rows[number - first] for number in numbers]
            return [
                {name: column[number].as_py() for name, column in zip(found.names, found.columns, strict=True)}
                for number in numbers
            ]
        except Exception as error:
            raise ValueError(str(error)) from None


class _Batch(NamedTuple):
    batch: Any
    columns: list[Any]  # and their names, since it costs more to ask for these than for a value
    names: list[str]
    nbytes: int


def _values(types: Any, column: Any) -> int:
    """How many values there are, with those in lists and dictionaries."""
    count = len(column)
    if types.is_struct(column.type):
        return count + sum(_values(types, column.field(number)) for number in range(column.type.num_fields))
    if types.is_list(column.type) or types.is_large_list(column.type):
        return count + _values(types, column.values)
    return count


def _bounded(data: Bytes) -> None:
    """Raises `ValueError` for a batch that would take too much memory."""
    try:
        mark, head_bytes = struct.unpack_from("<Ii", data)
        if mark != 0xFFFFFFFF or not 0 < head_bytes <= len(data) - 8:
            raise ValueError("it does not begin as a record batch")
        batch = _Table.root(data[8 : 8 + head_bytes]).table(2)
        at, count = batch.vector(2, 16)
        if count > BUFFERS_MAX:
            raise ValueError(f"it has {count} buffers, more than {BUFFERS_MAX}")
        if not batch.field(3):  # not compressed: it takes what it has here
            return
        total = 0
        for start, size in np.frombuffer(batch.data, "<i8", 2 * count, at).reshape(-1, 2).tolist():
            if size:
                if start < 0:
                    raise ValueError("a buffer lies outside of it")
                (plain_bytes,) = struct.unpack_from("<q", data, 8 + head_bytes + start)
                total += size if plain_bytes == -1 else plain_bytes
                if plain_bytes < -1 or total > BATCH_BYTES_MAX:
                    raise ValueError(f"it would have {total} bytes decoded, at most {BATCH_BYTES_MAX} are read")
    except struct.error as error:
        raise ValueError(f"it is cut short: {error}") from None


class _Table(NamedTuple):
    """A table of a flatbuffer. It begins with how far before it the list of its fields is; that says how far into the
    table each field is, 0 where it has none."""

    data: Bytes
    at: int

    @classmethod
    def root(cls, data: Bytes) -> _Table:
        return cls(data, _Table(data, 0)._number("<I", 0))

    def field(self, number: int) -> int:
        """Where that field is; 0: nowhere."""
        fields = self.at - self._number("<i", self.at)
        if 4 + 2 * number >= self._number("<H", fields):
            return 0
        inside = self._number("<H", fields + 4 + 2 * number)
        return self.at + inside if inside else 0

    def table(self, number: int) -> _Table:
        at = self.field(number)
        if not at:
            raise ValueError("a table is missing in it")
        return _Table(self.data, at + self._number("<I", at))

    def vector(self, number: int, each_bytes: int) -> tuple[int, int]:
        """Where the first of a row of things of `each_bytes` is, and how many there are."""
        at = self.field(number)
        if not at:
            return 0, 0
        at += self._number("<I", at)
        count = self._number("<I", at)
        if count * each_bytes > len(self.data) - at - 4:
            raise ValueError(f"it says that {count} things follow, and there is not room for them")
        return at + 4, count

    def _number(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("a field lies outside of it")
        return int(struct.unpack_from(form, self.data, at)[0])
