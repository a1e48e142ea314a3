"""The bitmap of a record against a set of numbers."""

from __future__ import annotations

import random

import pytest

from forebay.core.record import Record
from forebay.node.store.disk import presence


@pytest.mark.parametrize("blocks", [1, 2, 7, 8, 9, 15, 16, 17, 24, 63, 64, 65, 256])
def test_complete_means_every_block_in_whatever_order_they_come(blocks: int) -> None:
    chance = random.Random(blocks)
    for _ in range(20):
        record = Record(1, blocks * 10, "v", "e", 0.0, 0.0, b"", complete=False, block_bytes=10)
        order = list(range(blocks))
        chance.shuffle(order)
        here: set[int] = set()
        for block in order:
            record = presence.with_block(record, block)
            here.add(block)
            assert record.complete == (len(here) == blocks), (blocks, sorted(here))
            assert set(presence.iterate(presence.bits_of(record))) == here
            assert all(record.has(b * 10, b * 10 + 10) == (b in here) for b in range(blocks))
            if chance.random() < 0.2:
                gone = chance.choice(sorted(here))
                here.discard(gone)
                order.append(gone)
                record = presence.with_bits(record, presence.bits_of(record) & ~(1 << gone))
