"""A dataset in which a sample is a row of a parquet file.

Theory. A file says at its end where its row groups are, and in each the chunk of each column. These ends are read when
the dataset is made, some KB of each file, so lengths are known at once. A row cannot be had without decoding its group:
so groups are fetched as ranges (only the columns that are wanted), decoded by pyarrow, and kept while rows of them are
due, and shuffled in windows: see `together.py`.

Invariant. Rows are numbered by file, in byte order of keys, then as they lie.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound
from forebay.core.formats.listing import Listing
from forebay.core.messages.batch import Item
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column
from forebay.torch.dataset import Accesses, Dataset, OnError, Shuffle, block_rows, decoded, frees_lock, parameters
from forebay.torch.formats.indexed import Decode
from forebay.torch.formats.together import WINDOW_BYTES, KeptHere, order_of_groups, pyarrow
from forebay.torch.order import Order
from forebay.torch.source import PATIENCE_S, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

SUFFIXES = (".parquet", ".pq")
GAP_BYTES_MAX = 64 * limits.KIB  # between chunks that are read together
_TAIL_BYTES = 64 * limits.KIB  # the end of most files
_FILES_AT_ONCE = 128
_MAGIC = b"PAR1"


class _Group(NamedTuple):
    """A row group. `spans`: the ranges of its file that hold the wanted columns."""

    file: int
    number: int  # in its file
    rows: int
    size_bytes: int  # decoded, as the file says
    spans: tuple[tuple[int, int], ...]


class ParquetDataset(Dataset):
    """The rows of the parquet files under `place`, each a dictionary by column: numbers, `str`, `bytes`, lists,
    dictionaries, as pyarrow gives them (extra `parquet`).

    With `columns`, only those are read. `decode` makes something of a column's values, as in `{"image": Pictures()}`,
    and `transform` of the dictionary. Shuffles are of row groups, and within windows of groups of `window_bytes`
    decoded: each process keeps up to twice that. See `ObjectDataset` for the rest.
    """

    any_order = False

    @known_arguments
    def __init__(
        self,
        place: str,
        *,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, Decode] | None = None,
        transform: Callable[..., Any] | None = None,
        window_bytes: int = WINDOW_BYTES,
        suffixes: Sequence[str] = SUFFIXES,
        url: str | None = None,
        on_error: OnError = "raise",
        patience_s: float = PATIENCE_S,
        direct_after_s: float | None = DIRECT_AFTER_S,
        direct: Mapping[str, str] | None = None,
        source: Source | None = None,
        keys: Sequence[str] | None = None,
        listing: Listing | bytes | None = None,
        versions: Listing | bytes | None = None,
    ) -> None:
        pyarrow("parquet")
        if isinstance(columns, str) or (columns is not None and not columns):
            raise Invalid(f"columns={columns!r} is not a list of columns: write columns=['text'], or leave it out")
        if window_bytes < 1:
            raise Invalid(f"window_bytes={window_bytes}: a window has at least one byte")
        self.columns = None if columns is None else tuple(columns)
        self.decode, self.transform, self._with_epoch = dict(decode or {}), transform, bool(parameters(transform))
        self.window_bytes = window_bytes
        self.shape = f"rows, in windows of {window_bytes} bytes"
        self.shape += "" if self.columns is None else f", of {', '.join(sorted(self.columns))}"
        self._decoded = KeptHere(2 * window_bytes)
        super().__init__(
            place,
            suffixes=suffixes,
            url=url,
            on_error=on_error,
            patience_s=patience_s,
            direct_after_s=direct_after_s,
            direct=direct,
            source=source,
            keys=keys,
            listing=listing,
            versions=versions,
        )
        self._ends_at: Column = np.zeros(self.listing.objects, np.int64)  # where each file's own end begins
        self._groups = list(self._read_ends())
        self._rows: Column = np.asarray([group.rows for group in self._groups], np.int64)
        self._row_ends: Column = np.cumsum(self._rows)
        read_bytes = [sum(end - start for start, end in group.spans) for group in self._groups]
        self._read_bytes: Column = np.asarray(read_bytes, np.int64)
        self.samples = int(self._rows.sum())
        if not self.samples:
            raise NotFound(f"the files under {place!r} hold no rows")

    # --- the ends of files -------------------------------------------------------------------------------------------
    def _read_ends(self) -> Iterator[_Group]:
        for first in range(0, self.listing.objects, _FILES_AT_ONCE):
            files = range(first, min(first + _FILES_AT_ONCE, self.listing.objects))
            sizes = [int(self.listing.sizes[file]) for file in files]
            items = [self._item(file, max(0, size - _TAIL_BYTES), size) for file, size in zip(files, sizes) if size]
            tails = iter(self._asked(items, Facts()) if items else ())
            for file, size in zip(files, sizes, strict=True):
                yield from self._read_end(file, size, next(tails) if size else b"")

    def _read_end(self, file: int, size: int, tail: bytes) -> Iterator[_Group]:
        length = int.from_bytes(tail[-8:-4], "little") + 8 if tail[-4:] == _MAGIC else 0
        if not 8 < length <= size:
            raise Corrupt(f"{self._name(file)} is no parquet file, or is cut short: repair it, or leave it out (keys=)")
        self._ends_at[file] = size - length
        if length > len(tail):
            tail = self._asked([self._item(file, size - length, size)], Facts())[0]
        end = self._parsed(file, tail)
        names = {end.schema.column(number).path: number for number in range(len(end.schema))}
        wanted = [n for path, n in names.items() if self.columns is None or path.partition(".")[0] in self.columns]
        known = {path.partition(".")[0] for path in names}
        missing = sorted(set(self.columns or ()) - known)
        if missing:
            raise Invalid(f"{self._name(file)} has no column {missing[0]!r}: it has {', '.join(sorted(known))}")
        for number in range(end.num_row_groups):
            group = end.row_group(number)
            if group.num_rows:
                chunks = [group.column(column) for column in wanted]
                decoded_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
                yield _Group(file, number, group.num_rows, decoded_bytes, tuple(_spans(chunks)))

    def _parsed(self, file: int, tail: bytes) -> Any:
        """The metadata in the end of a file."""
        try:
            return pyarrow("parquet").read_metadata(io.BytesIO(tail))
        except Exception as error:  # pyarrow has errors of many kinds for what is damaged
            raise Corrupt(f"the end of {self._name(file)} cannot be read ({error}): write it again") from error

    def _name(self, file: int) -> str:
        return f"{self.listing.bucket}/{self.listing.key(file)}"

    def _item(self, file: int, start: int, end: int) -> Item:
        return Item(self.listing.bucket, self.listing.key(file), start, end, "", self.listing.etag(file))

    def _asked(self, items: list[Item], facts: Facts) -> list[bytes]:
        values = self._source.get_many(items, facts)
        for value in values:
            if isinstance(value, ForebayError):
                raise value
        return [bytes(value) for value in values]  # type: ignore[arg-type]

    # --- order -------------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Column, Column]:
        return self._rows, np.asarray([group.size_bytes for group in self._groups], np.int64)

    def order(
        self,
        shuffle: Shuffle,
        window_bytes: int,
        seed: int,
        epoch: int,
        *,
        arriving: bool = False,
        window: int = 0,
        before: int = 0,
    ) -> Order:
        return order_of_groups(self.blocks(), self.window_bytes, shuffle, window_bytes, seed, epoch)

    def sizes(self, indices: Column) -> Column:
        """Their share of their groups."""
        groups = np.searchsorted(self._row_ends, indices, "right")
        return -(-self._read_bytes[groups] // self._rows[groups])

    def accesses(self, indices: Column) -> Accesses:
        """Of each row its group, from the first to the last of its columns."""
        groups = np.searchsorted(self._row_ends, indices, "right")
        table = [(each.file, each.spans[0][0], each.spans[-1][1]) for each in self._groups]
        files, starts, ends = np.asarray(table, np.int64)[groups].T
        return Accesses(block_rows(self.listing, files, starts, ends), int(self._read_bytes[groups].sum()))

    # --- rows --------------------------------------------------------------------------------------------------------
    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        numbers = np.asarray(indices, np.int64)
        groups: Column = np.searchsorted(self._row_ends, numbers, "right")
        inner = numbers - (self._row_ends[groups] - self._rows[groups])
        made: list[Any] = [None] * len(numbers)
        facts.unlocked = facts.unlocked or frees_lock(self.decode.values())
        kept = self._decoded.kept()
        for number in np.unique(groups).tolist():
            here = np.flatnonzero(groups == number)
            try:
                table = kept.group(number, partial(self._table, self._groups[number], facts))
            except (Corrupt, NotFound) as error:
                rows: list[Any] = [error] * len(here)
            else:
                began_s = clock.monotonic_s()
                rows = table.take(inner[here]).to_pylist()
                facts.decode_s += clock.monotonic_s() - began_s
            for at, row in zip(here.tolist(), rows, strict=True):
                made[at] = row

        def name(number: int) -> str:
            group = self._groups[int(groups[number])]
            return f"row {int(inner[number])} of row group {group.number} of {self._name(group.file)}"

        began_s = clock.monotonic_s()
        for at, row in enumerate(made):
            if not isinstance(row, ForebayError):
                made[at] = self._made(row, partial(name, at), facts.epoch)
        facts.decode_s += clock.monotonic_s() - began_s
        return self._kept(name, made, facts)

    def _made(self, row: dict[str, Any], name: Callable[[], str], epoch: int | None) -> Any:
        for column, decode in self.decode.items():
            if column in row:
                row[column] = decoded(lambda column=column: f"the {column} of {name()}", decode, row[column])  # type: ignore[misc]
                if isinstance(row[column], ForebayError):
                    return row[column]
        if self.transform is None:
            return row
        return decoded(name, partial(self.transform, epoch=epoch) if self._with_epoch else self.transform, row)

    def _table(self, group: _Group, facts: Facts) -> Any:
        """A row group as pyarrow has it."""
        size = int(self.listing.sizes[group.file])
        spans = [*group.spans, (int(self._ends_at[group.file]), size)]
        values = self._asked([self._item(group.file, *span) for span in spans], facts)
        facts.size_bytes += sum(map(len, values))
        began_s = clock.monotonic_s()
        end = self._parsed(group.file, values[-1])
        file = pyarrow("").PythonFile(_Pieces(size, dict(zip((start for start, _ in spans), values, strict=True))), "r")
        try:
            reader = pyarrow("parquet").ParquetFile(file, metadata=end)
            columns = None if self.columns is None else list(self.columns)
            table = reader.read_row_group(group.number, columns=columns, use_threads=False)
        except Exception as error:
            raise Corrupt(
                f"row group {group.number} of {self._name(group.file)} cannot be read ({error}): write the file again"
            ) from error
        facts.decode_s += clock.monotonic_s() - began_s
        return table


def _spans(chunks: list[Any]) -> Iterator[tuple[int, int]]:
    """The ranges that hold these chunks of columns; those with little between them are one."""
    begin = end = -1
    for chunk in sorted(chunks, key=_begin):
        start = _begin(chunk)
        if begin >= 0 and start - end > GAP_BYTES_MAX:
            yield begin, end
            begin = -1
        begin = start if begin < 0 else begin
        end = start + chunk.total_compressed_size
    yield begin, end


def _begin(chunk: Any) -> int:
    first = chunk.dictionary_page_offset
    return int(chunk.data_page_offset if not first else min(first, chunk.data_page_offset))


class _Pieces(io.RawIOBase):
    """A file of which some ranges are here, by where they begin."""

    def __init__(self, size_bytes: int, pieces: dict[int, bytes]) -> None:
        self._size_bytes, self._pieces, self._at = size_bytes, pieces, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size_bytes if size < 0 else min(self._size_bytes, self._at + size)
        for start, piece in self._pieces.items():
            if start <= self._at <= end <= start + len(piece):
                found = piece[self._at - start : end - start]
                self._at = end
                return found
        raise OSError(f"bytes {self._at} to {end} were not expected to be read")
