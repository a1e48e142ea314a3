"""A dataset in which a sample is a window of tokens in a file of tokens.

Theory. Token files are arrays of little-endian numbers of 1, 2 or 4 bytes, perhaps after a header. Window w of a file
begins `w * stride` tokens into it; an incomplete window is left out. Files begin and end where documents do, so windows
do not cross files, unless the caller says that the files are one text. A batch is read into one array and becomes one
tensor: rows are views of it, and the loader's collation passes on the whole.

Invariant. A search over one number for each file finds sample i; nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch

from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound
from forebay.core.formats.listing import Listing
from forebay.core.messages.batch import Item
from forebay.core.spelling import known_arguments
from forebay.ports import clock
from forebay.torch.columns import Column
from forebay.torch.dataset import BLOCK_BYTES, Accesses, Dataset, OnError, decoded, parameters, ranges
from forebay.torch.source import PATIENCE_S, Facts, Source
from forebay.torch.switch import DIRECT_AFTER_S

TokenType = Literal["uint8", "uint16", "uint32", "int32"]


class Rows(list[Any]):
    """Samples that are the rows of one tensor, so that collation need not stack them."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.unbind(0))
        self.tensor = tensor


class TokenDataset(Dataset):
    """Windows of `window` tokens, every `stride` tokens (by default `window`), of the files under `place`.

    A sample is a tensor of int64, as embeddings take it; with `raw=True` of the file's own type, which is a quarter or
    half of the memory. For inputs and targets shifted by one, ask for windows of one more than the stride. With
    `straddle`, all files are one text in the order of their keys. `header_bytes` at the start of each file are not
    tokens. `transform(tokens)` makes the sample; if it has parameters `epoch` or `index`, it is told the loader's epoch
    (None without our sampler) and the number of the window. `Invalid` if a file is not whole tokens, `NotFound` if no
    window fits. See `ObjectDataset` for the others.
    """

    @known_arguments
    def __init__(
        self,
        place: str,
        window: int,
        *,
        stride: int | None = None,
        dtype: TokenType = "uint16",
        raw: bool = False,
        straddle: bool = False,
        header_bytes: int = 0,
        transform: Callable[..., Any] | None = None,
        suffixes: Sequence[str] = (),
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
        if dtype not in get_args(TokenType):
            raise Invalid(f"dtype={dtype!r} is not known: use one of {', '.join(get_args(TokenType))}")
        self.window, self.stride = window, window if stride is None else stride
        if self.window < 1 or self.stride < 1 or header_bytes < 0:
            raise Invalid(f"a window of {window} tokens every {stride}: both are at least 1")
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
        self.raw, self.straddle, self.header_bytes = raw, straddle, header_bytes
        self.transform, self._told = transform, parameters(transform, ("epoch", "index"))
        self._type = np.dtype(dtype).newbyteorder("<")
        self.shape = f"windows of {window} every {self.stride} {dtype}"
        self.shape += (", over files" if straddle else "") + (f", after {header_bytes} bytes" if header_bytes else "")
        tokens = self._tokens()
        text = np.asarray([tokens.sum()]) if straddle else tokens
        windows = np.where(text >= self.window, (text - self.window) // self.stride + 1, 0)
        self._token_ends = np.cumsum(tokens)  # of files, in one text
        self._window_ends = np.cumsum(windows)  # of texts: a file is one, or all together
        self.samples = int(self._window_ends[-1])
        if not self.samples:
            raise NotFound(
                f"no file under {place!r} has the {window} tokens of a window: use a shorter one, or straddle"
            )

    def _tokens(self) -> Column:
        sizes = self.listing.sizes - self.header_bytes
        broken = np.flatnonzero((sizes < 0) | (sizes % self._type.itemsize != 0))
        if broken.size:
            key = self.listing.key(int(broken[0]))
            raise Invalid(
                f"{key!r} has {int(self.listing.sizes[broken[0]])} bytes, which are not whole tokens of "
                f"{self._type.itemsize} bytes: give its dtype and header_bytes, or leave it out with suffixes"
            )
        return sizes // self._type.itemsize

    def blocks(self) -> tuple[Column, Column]:
        each = max(1, BLOCK_BYTES // (self.stride * self._type.itemsize))
        counts: Column = np.diff(np.append(np.arange(0, self.samples, each), self.samples))
        return counts, counts * self.stride * self._type.itemsize

    def sizes(self, indices: Column) -> Column:
        return np.full(len(indices), self.window * self._type.itemsize)

    def accesses(self, indices: Column) -> Accesses:
        """Of a window over several files, the first of them."""
        file, start = self._begins(indices)
        begin = self.header_bytes + start * self._type.itemsize
        return ranges(self.listing, file, begin, begin + self.window * self._type.itemsize)

    def fetch(self, indices: Sequence[int], facts: Facts) -> list[Any]:
        items, owners = self._items(np.asarray(indices, np.int64))
        values = self._source.get_many(items, facts)
        read_s = clock.monotonic_s()
        tokens: Column = np.empty((len(indices), self.window), self._type if self.raw else np.int64)
        bad: dict[int, ForebayError] = {}
        filled = 0
        for value, item, owner in zip(values, items, owners, strict=True):
            if isinstance(value, ForebayError):
                bad[owner] = value
                filled += (item.end - item.start) // self._type.itemsize  # type: ignore[operator]
                continue
            facts.size_bytes += len(value)
            piece = np.frombuffer(value, self._type)
            if len(piece) * self._type.itemsize != item.end - item.start:  # type: ignore[operator]
                raise Corrupt(f"{item.bucket}/{item.key} is shorter than it was when it was listed: start anew")
            at = filled - owner * self.window
            tokens[owner, at : at + len(piece)] = piece
            filled += len(piece)
        facts.decode_s += clock.monotonic_s() - read_s
        rows = Rows(torch.from_numpy(tokens))
        if not bad and self.transform is None:
            return rows
        first = {owner: item for item, owner in reversed(list(zip(items, owners, strict=True)))}

        def name(number: int) -> str:
            return f"a window of {first[number].bucket}/{first[number].key}"

        made: list[Any] = [bad.get(number, row) for number, row in enumerate(rows)]
        if self.transform is not None:
            read_s = clock.monotonic_s()
            made = [
                row if number in bad else self._made(partial(name, number), row, facts.epoch, int(indices[number]))
                for number, row in enumerate(made)
            ]
            facts.decode_s += clock.monotonic_s() - read_s
        return self._kept(name, made, facts)

    def _made(self, name: Callable[[], str], tokens: Any, epoch: int | None, index: int) -> Any:
        told = {"epoch": epoch, "index": index}
        assert self.transform is not None, "asked only then"
        return decoded(name, partial(self.transform, **{about: told[about] for about in self._told}), tokens)

    def _begins(self, indices: Column) -> tuple[Column, Column]:
        """The file in which each window begins, and at which token."""
        text: Column = np.searchsorted(self._window_ends, indices, "right")
        before = np.where(text > 0, self._window_ends[text - 1], 0)
        start: Column = (indices - before) * self.stride
        if not self.straddle:
            return text, start
        file: Column = np.searchsorted(self._token_ends, start, "right")
        return file, start - np.where(file > 0, self._token_ends[file - 1], 0)

    def _items(self, indices: Column) -> tuple[list[Item], list[int]]:
        """The pieces of each window, and which window each belongs to."""
        file, start = self._begins(indices)
        items: list[Item] = []
        owners: list[int] = []
        width, bucket = self._type.itemsize, self.listing.bucket
        named = {number: (self.listing.key(number), self.listing.etag(number)) for number in set(file.tolist())}
        for owner, (number, first) in enumerate(zip(file.tolist(), start.tolist(), strict=True)):
            left = self.window
            while left:
                size = left if not self.straddle else min(left, self._file_tokens(number) - first)
                if size:
                    if number not in named:
                        named[number] = self.listing.key(number), self.listing.etag(number)
                    key, etag = named[number]
                    begin = self.header_bytes + first * width
                    items.append(Item(bucket, key, begin, begin + size * width, "", etag))
                    owners.append(owner)
                left -= size
                number, first = number + 1, 0
        return items, owners

    def _file_tokens(self, number: int) -> int:
        return int(self._token_ends[number]) - (int(self._token_ends[number - 1]) if number else 0)
