"""Which members of a shard make which sample, as columns.

Theory. A rank lays out every shard that it reads from, so what a member costs here, it costs in each process of a job.
No Python code runs for a member: numpy finds the dots and slashes of all names at once, and what is done by name is
done by list comprehensions and dictionaries over slices. Rejected: an object and a regular expression for each member,
which took 7 µs.

Names are read as WebDataset reads them (`core/formats/samples.py`, whose `split` is the oracle of the tests). All
members of a shard with one key are one sample, and of two with the same name the last counts, as in tar.

Invariant. Samples are in the order in which their first members appear; members of a sample in that of their offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from forebay.core.errors import Corrupt
from forebay.core.formats.members import MemberIndex
from forebay.torch.columns import Column

WORDS_BYTES = 32  # extensions up to here are compared as numbers
EXTENSIONS_MAX = 1 << 16  # different ones in a shard; who has more has put numbers where extensions go
_MASKS = np.asarray([(1 << 8 * size) - 1 for size in range(9)], np.uint64)  # of the first bytes of a word


class Layout(NamedTuple):
    """The samples of one shard. Sample i has the members `ends[i-1]`..`ends[i]`, in the order of their offsets."""

    keys: bytes
    key_ends: array[int]
    ends: array[int]
    offsets: array[int]
    sizes: array[int]
    kinds: array[int]  # of a member: which of `extensions` it has
    extensions: tuple[str, ...]
    plain: bool  # members are ranges of the shard; else they are asked for by name

    @property
    def samples(self) -> int:
        return len(self.ends)

    @property
    def memory_bytes(self) -> int:
        columns = (self.key_ends, self.ends, self.offsets, self.sizes, self.kinds)
        return len(self.keys) + sum(len(column) * column.itemsize for column in columns)

    def key(self, sample: int) -> str:
        start = self.key_ends[sample - 1] if sample else 0
        return _text(self.keys[start : self.key_ends[sample]])

    def first(self, samples: int) -> Layout:
        """Of the first `samples` alone."""
        members = self.ends[samples - 1] if samples else 0
        return self._replace(
            keys=self.keys[: self.key_ends[samples - 1] if samples else 0],
            key_ends=self.key_ends[:samples],
            ends=self.ends[:samples],
            offsets=self.offsets[:members],
            sizes=self.sizes[:members],
            kinds=self.kinds[:members],
        )

    def members(self, sample: int) -> range:
        return range(self.ends[sample - 1] if sample else 0, self.ends[sample])


def lay_out(members: MemberIndex, parts: Sequence[str] = (), keep: Callable[[str], bool] | None = None) -> Layout:
    """Group members to samples; with `parts`, only those extensions count, and with `keep`, samples of which it says
    so by their keys. `Corrupt` for a shard with more than EXTENSIONS_MAX different extensions."""
    text = members.text
    numbers, starts, dots, ends = _named(text, len(members))
    kinds, extensions = _extensions(text, dots + 1, ends)
    if len(extensions) > EXTENSIONS_MAX:
        raise Corrupt(
            f"{len(extensions)} different extensions, more than {EXTENSIONS_MAX}: a member's name is its sample's key, "
            "a dot and an extension that samples share, as in 000017.jpg"
        )
    if parts:
        wanted = np.asarray([_text(extension).lower() in parts for extension in extensions], bool)[kinds]
        numbers, starts, dots, kinds = (column[wanted] for column in (numbers, starts, dots, kinds))
    samples, keys = _samples(text, starts, dots)
    plain = members.ranged or (not members.plain and not np.frombuffer(members.methods, np.uint8)[numbers].any())
    if keep is not None:
        kept = np.asarray([bool(keep(_text(key))) for key in keys], bool)
        keys = list(compress(keys, kept))
        here = kept[samples]
        samples, numbers, kinds = (np.cumsum(kept) - 1)[samples[here]], numbers[here], kinds[here]
    offsets, sizes = (np.frombuffer(column, np.uint64)[numbers] for column in members.places)
    rows = _rows(samples, kinds, offsets, sizes)
    return Layout(
        b"".join(keys),
        array("I", np.cumsum(np.fromiter(map(len, keys), np.uint32, len(keys)), dtype=np.uint32).tobytes()),
        array("I", np.cumsum(np.bincount(samples[rows], minlength=len(keys)), dtype=np.uint32).tobytes()),
        array("Q", offsets[rows].tobytes()),
        array("Q", sizes[rows].tobytes()),
        array("H", kinds[rows].astype(np.uint16).tobytes()),
        tuple(map(_text, extensions)),
        plain,
    )


def _named(text: bytes, members: int) -> tuple[Column, Column, Column, Column]:
    """Of those members whose names are a key and an extension: their numbers, and where in `text` the name begins,
    where its first dot after the last slash is, and where it ends."""
    letters = np.frombuffer(text, np.uint8)
    ends: Column = np.append(np.flatnonzero(letters == 0), len(letters))  # of no members, that of one without a name
    if len(ends) != max(1, members):
        raise Corrupt("an index of members has not as many names as members: it is damaged")
    starts: Column = np.append(0, ends[:-1] + 1)
    bases = _last_before(np.flatnonzero(letters == ord("/")), ends, starts - 1) + 1
    dots: Column = np.append(np.flatnonzero(letters == ord(".")), len(letters))
    dots = dots[np.searchsorted(dots, bases)]
    numbers = np.flatnonzero((dots > bases) & (dots + 1 < ends))
    return numbers, starts[numbers], dots[numbers], ends[numbers]


def _last_before(places: Column, ends: Column, floor: Column) -> Column:
    """For each end the last of `places` before it; at least `floor`."""
    places = np.append(-1, places)
    found: Column = np.maximum(places[np.searchsorted(places, ends) - 1], floor)
    return found


def _words(text: bytes) -> Any:
    """The 8 bytes from each place of `text` on, as a number; zeros follow the text."""
    return np.ndarray(len(text) + 1, "<u8", text + bytes(8), strides=(1,))


def _extensions(text: bytes, starts: Column, ends: Column) -> tuple[Column, list[bytes]]:
    """Numbers of the extensions that lie there, and these by their numbers."""
    words, sizes = _words(text), ends - starts
    longest = int(sizes.max(initial=0))
    if not longest or longest > WORDS_BYTES:
        return _numbered(_slices(text, starts, ends))
    numbers: Column = np.zeros(len(starts), np.int64)
    for at in range(0, longest, 8):  # names have no zero bytes, so no two become the same by what is masked
        here = words[np.minimum(starts + at, len(text))] & _MASKS[np.clip(sizes - at, 0, 8)]
        _, firsts, found = np.unique(here, return_index=True, return_inverse=True)
        if at:
            _, firsts, found = np.unique(numbers * len(here) + found, return_index=True, return_inverse=True)
        numbers = found
    return numbers, _slices(text, starts[firsts], ends[firsts])


def _samples(text: bytes, starts: Column, ends: Column) -> tuple[Column, list[bytes]]:
    """Numbers of the samples whose keys lie there, and their keys. Members of one mostly follow each other, so only
    the first of each row of members with one key is looked up by name."""
    words, sizes = _words(text), ends - starts
    first: Column = np.append(np.ones(min(1, len(sizes)), bool), sizes[1:] != sizes[:-1])
    like, at = np.flatnonzero(~first), 0  # not known to differ from the key before
    while like.size:
        same = (words[starts[like] + at] ^ words[starts[like - 1] + at]) & _MASKS[np.minimum(sizes[like] - at, 8)] == 0
        first[like[~same]] = True
        at += 8
        like = like[same & (sizes[like] > at)]
    numbers, keys = _numbered(_slices(text, starts[first], ends[first]))
    return numbers[np.cumsum(first) - 1], keys


def _slices(text: bytes, starts: Column, ends: Column) -> list[bytes]:
    return [text[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _numbered(names: list[bytes]) -> tuple[Column, list[bytes]]:
    """Equal names get equal numbers, in the order in which they first appear; and the names by their numbers."""
    found = list(dict.fromkeys(names))
    if len(found) == len(names):
        return np.arange(len(names)), found
    numbers = dict(zip(found, range(len(found)), strict=True))
    return np.fromiter(map(numbers.__getitem__, names), np.int64, len(names)), found


def _rows(samples: Column, kinds: Column, offsets: Any, sizes: Any) -> Column:
    """Which members there are in the layout, in its order: by sample, then by offset; of those with one name the
    last."""
    names = samples * EXTENSIONS_MAX + kinds
    backwards, last = np.unique(names[::-1], return_index=True)
    rows: Column = np.arange(len(names))
    if len(backwards) < len(names):
        rows = np.sort(len(names) - 1 - last)
    by_place = np.lexsort((sizes[rows], offsets[rows], samples[rows]))
    return rows[by_place]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
