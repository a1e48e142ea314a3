"""Chunks of litdata whose samples were compressed together, in frames of zstd: see `litdata_chunks.py`.

Theory. Such a chunk begins with eight letters that tell what it is, a version, and three counts: of its samples, of the
samples of a frame, and of its frames. Then come the places of the samples, counted in what all frames hold when they
are unpacked, and for each frame its first sample, how many it has, where it lies in the chunk, and its sizes, packed
and plain. A sample is a range of one frame, which is unpacked as a whole and kept while samples of it are due.

Where samples are compressed one by one, the chunk is laid out as any other, and each sample is a frame of zstd.

Invariant. Nothing is unpacked that does not say its size before, and no more than FRAME_BYTES_MAX.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import zstandard

from forebay.core import limits
from forebay.torch.columns import Column
from forebay.torch.formats.indexed import Places
from forebay.torch.source import Bytes

FRAME_BYTES_MAX = 2 * limits.GIB  # plain; litdata's chunks have 64 MB
_BEGIN = b"LDFZ01\0\0"
_COUNTS = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("samples", "<u4"), ("start", "<u8"), ("packed", "<u4"), ("plain", "<u4")])


def head_bytes(samples: int, together: int) -> int:
    return _COUNTS.size + 4 * (samples + 1) + _FRAME.itemsize * -(-samples // together)


def is_framed(head: Bytes) -> bool:
    return head[: len(_BEGIN)] == _BEGIN


def places_of(head: Bytes, samples: int, together: int, size: int) -> Places:
    """Where the frames lie in a chunk of `size` bytes, of so many samples; `ValueError` if its head does not say so."""
    frames_count = -(-samples // together)
    if len(head) < head_bytes(samples, together):
        raise ValueError("its head is cut short")
    if _COUNTS.unpack_from(head)[1:] != (1, 0, samples, together, frames_count):
        raise ValueError(f"it has no frames of {together} samples")
    at = _COUNTS.size + 4 * (samples + 1)
    ends = np.frombuffer(head, "<u4", samples + 1, _COUNTS.size).astype(np.int64)
    frames = np.frombuffer(head, _FRAME, frames_count, at)
    first = np.minimum(np.arange(frames_count + 1) * together, samples)
    starts, packed = frames["start"].astype(np.int64), frames["packed"].astype(np.int64)
    sound = (
        ends[0] == 0
        and (np.diff(ends) >= 0).all()
        and (frames["first"] == first[:-1]).all()
        and (frames["samples"] == np.diff(first)).all()
        and (frames["plain"] == np.diff(ends[first])).all()
        and (starts >= at).all()
        and (starts <= size).all()
        and (packed > 0).all()
        and (starts + packed <= size).all()
    )
    if not sound:
        raise ValueError("its table of frames is damaged")
    return Places(starts, starts + packed, together, Frames(ends, together))


class Frames(NamedTuple):
    """How the frames of a chunk are read: a `Grouping`. `ends`: of the samples, when all is unpacked."""

    ends: Column
    together: int

    @property
    def nbytes(self) -> int:
        return int(self.ends.nbytes)

    def unpacked(self, group: int, data: Bytes) -> Any:
        first = group * self.together
        last = min(first + self.together, len(self.ends) - 1)
        return unpacked(data, int(self.ends[last] - self.ends[first]))

    def samples(self, found: Any, inner: list[int]) -> list[Any]:
        base = int(self.ends[inner[0] // self.together * self.together])
        return [found[int(self.ends[number]) - base : int(self.ends[number + 1]) - base] for number in inner]


def unpacked(data: Bytes, size_bytes: int | None = None) -> Any:
    """What a frame of zstd holds, of that size if it is given."""
    try:
        said = zstandard.frame_content_size(data)
        if not 0 <= said <= FRAME_BYTES_MAX or (size_bytes is not None and said != size_bytes):
            raise ValueError(
                f"it is said to have {said} bytes unpacked, at most {size_bytes or FRAME_BYTES_MAX} are read"
            )
        return memoryview(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
