"""From the bytes of a compressed archive to those of the archive, a bounded piece at a time.

Theory. A few bytes of a compressed file can stand for megabytes, so what one step puts out is bounded: by zlib itself
for gzip, and for zstd, where four bytes stand for 128 KiB at most, by how little is put in. zlib checks sizes and
checksums of each of a file's streams; zstd is the `zstandard` package, since the standard library has it only from
Python 3.14 on.

Rejected: `zstandard`'s reader, which takes a file that is cut for one that ends.

Invariant. What is yielded is all of the plain form, or an error ends it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import zstandard

from forebay.core import limits
from forebay.core.errors import Bug, Corrupt

PIECE_BYTES = limits.MIB
_ZSTD_INPUT_BYTES = 2048  # 64 MiB of output at most


def unpack(source: Iterator[bytes], packing: str, what: str) -> Iterator[bytes]:
    """The plain bytes of `source`, packed by `gzip` or `zstd`; `what` is its name for people. `Corrupt`."""
    if packing == "gzip":
        return _gunzip(source, what)
    if packing == "zstd":
        return _unzstd(source, what)
    raise Bug(f"packing {packing!r} is not known: please report it")


def _gunzip(source: Iterator[bytes], what: str) -> Iterator[bytes]:
    """One or more gzip streams, zeros behind them (padding of tapes) passed over."""
    stream, begun = None, False
    for piece in source:
        while piece:
            if stream is None:
                piece = piece.lstrip(b"\0") if begun else piece
                if not piece:
                    break
                begun = True
                stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
            try:
                data = stream.decompress(piece, PIECE_BYTES)
            except zlib.error as error:
                raise Corrupt(f"{what} cannot be unpacked ({error}): it is damaged, or no gzip file") from None
            if data:
                yield data
            piece = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof:
                stream = None
    if stream is not None:
        raise Corrupt(f"{what} is cut: its gzip stream goes on")


def _unzstd(source: Iterator[bytes], what: str) -> Iterator[bytes]:
    """One or more zstd frames."""
    stream = None
    for piece in source:
        for at in range(0, len(piece), _ZSTD_INPUT_BYTES):
            left = piece[at : at + _ZSTD_INPUT_BYTES]
            while left:
                stream = stream or zstandard.ZstdDecompressor().decompressobj()
                try:
                    data = stream.decompress(left)
                except zstandard.ZstdError as error:
                    raise Corrupt(
                        f"{what} cannot be unpacked ({error}): it is damaged, no zstd, or its window is over 128 MiB"
                    ) from None
                for first in range(0, len(data), PIECE_BYTES):
                    yield data[first : first + PIECE_BYTES]
                left = b""
                if stream.eof:
                    left, stream = stream.unused_data, None
    if stream is not None:
        raise Corrupt(f"{what} is cut: its zstd frame goes on")
