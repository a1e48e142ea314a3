"""Arithmetic on a record's bitmap of present blocks: set some, clear some, count bytes.

Theory. A complete record has an empty bitmap (a hit on it must be cheap). Every change goes through here, where that
rule is kept. Big integers do the counting: the bitmap of a terabyte is 32 KiB, and popcount and shifts run in C.

Invariants. (1) `complete` implies `present == b""`. (2) Bits past the last block are never set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from forebay.core.record import Record, blocks_in


def bits_of(record: Record) -> int:
    """The bitmap as a number, bit b for block b; all ones when complete. An inline object has no blocks here."""
    if record.inline is not None:
        return 0
    if record.complete:
        return (1 << blocks_in(record.size_bytes, record.block_bytes)) - 1
    return int.from_bytes(record.present, "little")


def with_bits(record: Record, bits: int) -> Record:
    """The record with exactly these blocks present."""
    count = blocks_in(record.size_bytes, record.block_bytes)
    assert bits >> count == 0, f"block beyond the last of {count}"
    complete = bits == (1 << count) - 1
    present = b"" if complete else bits.to_bytes(-(-count // 8), "little")
    return msgspec.structs.replace(record, complete=complete, present=present)


def with_block(record: Record, block: int) -> Record:
    """The record with one more block present."""
    if record.complete:
        return record
    count = blocks_in(record.size_bytes, record.block_bytes)
    assert 0 <= block < count, f"block {block} of {count}"
    present = bytearray(record.present.ljust(-(-count // 8), b"\0"))
    present[block >> 3] |= 1 << (block & 7)
    others = len(present) - 1  # the last byte counts apart: it may be 0xFF too
    if present[-1] == (1 << ((count - 1) & 7) + 1) - 1 and present.count(0xFF, 0, others) == others:
        return msgspec.structs.replace(record, complete=True, present=b"")
    return msgspec.structs.replace(record, present=bytes(present))


def mask(blocks: Iterable[int]) -> int:
    """A number with these bits set."""
    chosen = list(blocks)
    bitmap = bytearray((max(chosen, default=0) >> 3) + 1)
    for block in chosen:
        bitmap[block >> 3] |= 1 << (block & 7)
    return int.from_bytes(bitmap, "little")


def iterate(bits: int) -> Iterator[int]:
    """The set bits, lowest first."""
    for index, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        if byte:
            for bit in range(8):
                if byte >> bit & 1:
                    yield index * 8 + bit


def bytes_of(record: Record, bits: int | None = None) -> int:
    """How many bytes these blocks (by default: those present) hold; for an inline object its size."""
    if record.inline is not None:
        return len(record.inline)
    if bits is None:
        if record.complete:
            return record.size_bytes
        bits = int.from_bytes(record.present, "little")
    last = blocks_in(record.size_bytes, record.block_bytes) - 1
    total = bits.bit_count() * record.block_bytes
    if last >= 0 and bits >> last & 1:
        total -= (last + 1) * record.block_bytes - record.size_bytes
    return total
