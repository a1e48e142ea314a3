"""Bitmaps against sets of block numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.record import Record
from forebay.node.store import presence

BLOCK = 1000


def _record(size_bytes: int) -> Record:
    return Record(1, size_bytes, "v", "e", 0.0, 0.0, b"", complete=False, block_bytes=BLOCK)


@given(st.integers(1, 40_000), st.data())
def test_blocks_come_one_by_one_and_go_again(size_bytes: int, data: st.DataObject) -> None:
    count = -(-size_bytes // BLOCK)
    some = data.draw(st.lists(st.integers(0, count - 1), max_size=2 * count))
    record, model = _record(size_bytes), set()
    for block in some:
        record = presence.with_block(record, block)
        model.add(block)
        assert record.complete == (len(model) == count)
        assert not (record.complete and record.present)
        assert sorted(presence.iterate(presence.bits_of(record))) == sorted(model)
        assert record.has(block * BLOCK, min(size_bytes, block * BLOCK + BLOCK))
    lengths = {block: min(size_bytes, (block + 1) * BLOCK) - block * BLOCK for block in model}
    assert presence.bytes_of(record) == sum(lengths.values())
    assert presence.bits_of(record) == presence.mask(model)
    if model:
        assert presence.with_bits(record, presence.bits_of(record)) == record
    victims = data.draw(st.sets(st.sampled_from(sorted(model)))) if model else set()
    left = presence.with_bits(record, presence.mask(model) & ~presence.mask(victims))
    assert sorted(presence.iterate(presence.bits_of(left))) == sorted(model - victims)


def test_an_inline_object_counts_its_bytes_and_has_no_blocks() -> None:
    record = Record(1, 3, "v", "e", 0.0, 0.0, b"", complete=True, inline=b"abc")
    assert (presence.bytes_of(record), presence.bits_of(record)) == (3, 0)
