"""Samples that are small parts of their blocks, from a cache smaller than the data: no byte is fetched in vain."""

import asyncio
import random

import pytest

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound, Precondition
from forebay.core.types import RangeSpec
from forebay.node.engine.read.one_read import Ask

from .conftest import pattern
from .test_hinting import MIB, Job, check, settled

BLOCK = limits.BLOCK_BYTES
SHARD_BLOCKS = 3
AT_ONCE = 8  # reads


def samples_of(shards, size_bytes, gap_bytes=0):
    """(shard, start, end) of samples that lie one after another, `gap_bytes` between them."""
    step = size_bytes + gap_bytes
    found = []
    for shard, length in enumerate(shards):
        found += [(shard, at, at + size_bytes) for at in range(0, length - step, step)]
    return found


class Trainer:
    """A job that tells and reads samples, some at a time."""

    def __init__(self, rig, shards, samples):
        self.rig, self.shards, self.samples = rig, shards, samples
        self.bodies = [pattern(size, number) for number, size in enumerate(shards)]
        for number, body in enumerate(self.bodies):
            rig.remote.place(f"s{number:02d}", body)
        self.told = 0
        self.read = 0

    async def open(self):
        self.job = await Job(self.rig).open()
        return self

    async def tell(self, order, use_bytes):
        rows = [(n, start // BLOCK, -(-end // BLOCK)) for n, start, end in order]
        uses = sum(end - first for _, first, end in rows)
        size_bytes = sum(end - start for _, start, end in order)
        await self.job.tell(self.told, rows, -(-size_bytes // uses) if use_bytes else 0)
        self.told += len(order)

    async def one(self, sample):
        number, start, end = sample
        data = await self.rig.front.get(f"s{number:02d}", RangeSpec(start, end - 1))
        assert data == self.bodies[number][start:end]

    async def epoch(self, order):
        """Read in order; returns how many bytes the bucket had to send for each that was read."""
        before = self.rig.remote.fetched_bytes()
        for at in range(0, len(order), AT_ONCE):
            some = order[at : at + AT_ONCE]
            await asyncio.gather(*(self.one(sample) for sample in some))
            self.read += len(some)
            await self.job.at(self.read)
        await settled(self.rig)
        check(self.rig)
        return (self.rig.remote.fetched_bytes() - before) / sum(end - start for _, start, end in order)


@pytest.mark.parametrize("size_bytes", [10_000, 100_000])
@pytest.mark.parametrize("capacity_blocks", [2, 8])
def test_random_epochs_fetch_no_more_than_their_samples(rigged, size_bytes, capacity_blocks):
    shards = [SHARD_BLOCKS * BLOCK] * 4
    samples = samples_of(shards, size_bytes, 500)
    samples = samples[:: 1 if size_bytes > 50_000 else 9]
    epoch_bytes = sum(end - start for _, start, end in samples)
    epochs = 2

    async def story(rig):
        trainer = await Trainer(rig, shards, samples).open()
        chance = random.Random(size_bytes)
        orders = [chance.sample(samples, len(samples)) for _ in range(epochs)]
        await trainer.tell(orders[0], True)
        for epoch, order in enumerate(orders):
            if epoch + 1 < epochs:
                await trainer.tell(orders[epoch + 1], True)
            await trainer.epoch(order)
        absent = 1 - capacity_blocks / (4 * SHARD_BLOCKS)
        filled_bytes = BLOCK * capacity_blocks + MIB
        assert rig.remote.fetched_bytes() <= filled_bytes + 1.02 * epochs * absent * epoch_bytes
        assert rig.engine.tally.ranged_bytes
        assert not rig.engine.tally.passed_bytes

    rigged(story, capacity_bytes=capacity_blocks * BLOCK + MIB)


def test_a_local_order_fetches_whole_blocks(rigged):
    """Of windows that fit, each block is read to its end before it leaves: one request brings it, not forty."""
    shards = [SHARD_BLOCKS * BLOCK] * 8
    samples = samples_of(shards, 100_000, 1000)

    async def story(rig):
        trainer = await Trainer(rig, shards, samples).open()
        chance = random.Random(5)
        order = []
        for shard in chance.sample(range(8), 8):
            window = [sample for sample in samples if sample[0] == shard]
            order += chance.sample(window, len(window))
        await trainer.tell(order, True)
        await trainer.epoch(order)
        assert rig.remote.fetched_bytes() <= 1.02 * sum(shards)
        assert rig.remote.count("fetch") <= 4 * 8 * SHARD_BLOCKS

    rigged(story, capacity_bytes=3 * SHARD_BLOCKS * BLOCK + MIB)


def test_a_cache_full_of_what_nobody_reads_any_more_is_filled_anew(rigged):
    shards = [SHARD_BLOCKS * BLOCK] * 4
    samples = samples_of(shards, 100_000, 1000)

    async def story(rig):
        for number in range(10):
            rig.remote.place(f"z{number}", pattern(BLOCK, 100 + number))
            await rig.front.get(f"z{number}")
        await rig.idle()
        trainer = await Trainer(rig, shards, samples).open()
        chance = random.Random(7)
        orders = [chance.sample(samples, len(samples)) for _ in range(3)]
        await trainer.tell(orders[0], True)
        for epoch, order in enumerate(orders):
            if epoch + 1 < len(orders):
                await trainer.tell(orders[epoch + 1], True)
            before = rig.remote.fetched_bytes()
            await trainer.epoch(order)
            fetched = rig.remote.fetched_bytes() - before
        assert fetched <= 0.5 * sum(end - start for _, start, end in samples)

    rigged(story, capacity_bytes=9 * BLOCK)


def test_a_range_alone_is_the_listed_version_and_as_fresh_as_any_read(rigged):
    """What is passed by is asked of the backend; a change, an absence and a range outside are what they always are."""
    shards = [2 * BLOCK] * 6
    samples = samples_of(shards, 50_000)

    async def story(rig):
        trainer = await Trainer(rig, shards, samples).open()
        await trainer.tell(random.Random(1).sample(samples, len(samples)), True)
        await settled(rig)
        cold = rig.engine.cold

        def passes(number):
            found = cold.here(("remote", f"s{number:02d}"))[0]
            ask = Ask("remote", f"s{number:02d}", RangeSpec(0, 49_999))
            return cold._passes_by(ask, found)

        apart = [n for n in range(len(shards)) if passes(n)]
        assert apart, "there are more blocks than places"
        number = apart[0]
        key = f"s{number:02d}"
        version = rig.remote.objects.place(key, pattern(2 * BLOCK, 50)).version
        seen = rig.front.open(key, RangeSpec(5, 12))
        assert await seen.whole() == pattern(2 * BLOCK, 50)[5:13]
        assert seen.opened is not None
        assert seen.opened.record.version == version
        with pytest.raises(Precondition):
            await rig.front.get(key, RangeSpec(5, 12), version="another")
        with pytest.raises(Invalid):
            await rig.front.get(key, RangeSpec(2 * BLOCK, 2 * BLOCK + 5))
        tail = await rig.front.get(key, RangeSpec(2 * BLOCK - 3, 2 * BLOCK + 500))
        assert tail == pattern(2 * BLOCK, 50)[-3:]
        await rig.remote.objects.delete(key)
        with pytest.raises(NotFound):
            await rig.front.get(key, RangeSpec(5, 12))
        await rig.idle()
        check(rig)

    rigged(story, freshness_s=0.0, capacity_bytes=4 * BLOCK + MIB)
