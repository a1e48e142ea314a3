"""Hints at the engine: what a job told is fetched ahead, what it needs last leaves first, and the rest is as before."""

import asyncio
import random
from array import array

import pytest

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.formats.listing import ListingCall
from forebay.core.machines.eviction import split_unit
from forebay.core.machines.hints import HintsAtCall, HintsCall, HintsNamed
from forebay.core.messages import calls
from forebay.core.types import RangeSpec
from forebay.node.engine.jobs import hints
from tests.core.evictiontrace import Belady

from .conftest import pattern, until

MIB = 1 << 20
BLOCK = limits.BLOCK_BYTES


def packed(accesses):
    return array("I", [number for access in accesses for number in access]).tobytes()


class Job:
    """One job on a rig, reading what it told."""

    def __init__(self, rig, name="job"):
        self.rig, self.name = rig, name

    async def open(self):
        state = await self.rig.front.call("listing", ListingCall("remote"))
        self.listing = await self.rig.engine.listings.load("remote", "", state.id)
        return self

    async def tell(self, start, accesses, use_bytes=0):
        call = HintsCall(self.name, "remote", "", self.listing.id, start, packed(accesses), use_bytes=use_bytes)
        return await self.rig.front.call("hints", call)

    async def at(self, position):
        return await self.rig.front.call("hints_at", HintsAtCall(self.name, position))

    async def read(self, access):
        number, first, end = access
        size = self.listing.sizes[number]
        stop = min(end * BLOCK, size)
        whole = stop - first * BLOCK == size
        span = None if whole else RangeSpec(first * BLOCK, stop - 1)
        data = await self.rig.front.get(self.listing.key(number), span)
        await self.rig.idle()
        return data


def check(rig):
    rig.engine.hints.check()
    for machine in rig.engine.room._machines.values():
        machine.check()
        known = {unit for unit in machine._slots if rig.engine.hints.knows(unit)}
        assert known == set(machine.units())


async def settled(rig):
    """Until nothing is fetched ahead any more."""
    await until(lambda: all(not plan.wake.is_set() and not plan.flying for plan in rig.engine.hinting._plans.values()))
    await rig.idle()


def test_what_comes_next_is_fetched_ahead_in_order(rigged):
    async def story(rig):
        for n in range(12):
            rig.remote.place(f"k{n:02d}", pattern(MIB, n))
        job = await Job(rig).open()
        order = [7, 3, 11, 0, 5, 1, 9, 2]
        await job.tell(0, [(n, 0, 1) for n in order])
        await settled(rig)
        fetched = [key for verb, key, _, _ in rig.remote.asked if verb == "fetch"]
        assert sorted(fetched) == sorted(f"k{n:02d}" for n in order)
        for at, n in enumerate(order):
            assert await job.read((n, 0, 1)) == pattern(MIB, n)
            await job.at(at + 1)
        assert rig.remote.count("fetch") == len(order), "every read was a hit"
        tally = rig.engine.tally
        assert tally.hinted_bytes == len(order) * MIB
        state = await rig.front.call("hints_state", HintsNamed("job"))
        assert (state.position, state.known, state.ahead) == (8, 8, 8)
        check(rig)
        await rig.front.call("hints_close", HintsNamed("job"))
        assert not rig.engine.hints.jobs
        check(rig)

    rigged(story, capacity_bytes=64 * MIB)


@pytest.mark.parametrize("kind", ["objects", "blocks"])
def test_with_half_the_data_in_cache_few_more_bytes_are_fetched_than_must_be(rigged, kind):
    """Belady's count on the same order is what a cache that knows the future must fetch."""
    objects = [MIB] * 48 if kind == "objects" else [9 * BLOCK, 2 * BLOCK, 13 * BLOCK - 5, BLOCK, 20 * BLOCK]
    places = [(n, b) for n, size in enumerate(objects) for b in range(-(-size // BLOCK))]
    sizes = {place: min(BLOCK, objects[place[0]] - place[1] * BLOCK) for place in places}
    chance = random.Random(3)
    order = []
    for _ in range(4 if kind == "objects" else 3):
        chance.shuffle(places)
        order += places
    half = sum(sizes.values()) // 2

    bodies = [pattern(size, n) for n, size in enumerate(objects)]

    async def story(rig):
        for n, body in enumerate(bodies):
            rig.remote.place(f"k{n:02d}", body)
        job = await Job(rig).open()
        await job.tell(0, [(n, b, b + 1) for n, b in order])
        for at, (n, b) in enumerate(order):
            got = await job.read((n, b, b + 1))
            assert got == bodies[n][b * BLOCK : (b + 1) * BLOCK]
            await job.at(at + 1)
        await settled(rig)
        check(rig)
        numbers = {place: number for number, place in enumerate(sorted(sizes))}
        trace = [(numbers[place], sizes[place]) for place in order]
        [machine] = rig.engine.room._machines.values()
        best = Belady(machine.capacity_bytes, trace)
        must = sum(size for unit, size in trace if not best.access(unit, size))
        total = sum(size for _, size in trace)
        assert 1 - rig.remote.fetched_bytes() / total >= 0.95 * (1 - must / total)
        assert rig.engine.tally.evictions["hint"] > 0
        assert rig.engine.tally.hinted_hits > len(order) // 4

    rigged(story, capacity_bytes=half)


def test_nothing_is_fetched_ahead_for_which_something_needed_sooner_would_leave(rigged, monkeypatch):
    monkeypatch.setattr(hints, "WINDOW_SHARE", 1.0)

    async def story(rig):
        for n in range(8):
            rig.remote.place(f"k{n}", pattern(4 * MIB, n))
        job = await Job(rig).open()
        await job.tell(0, [(n % 8, 0, 1) for n in range(80)])
        await settled(rig)
        [machine] = rig.engine.room._machines.values()
        here = {split_unit(unit)[0] for unit in machine._slots}
        names = {
            rig.engine.store.find(object_id)[1] for object_id in here if rig.engine.store.find(object_id)[0] == "remote"
        }
        assert names == {f"k{n}" for n in range(len(names))}, "the first of them, and they stay"
        assert 3 <= len(names) <= 5
        fetched = rig.remote.count("fetch")
        await job.at(0)
        await settled(rig)
        assert rig.remote.count("fetch") == fetched
        check(rig)

    rigged(story, capacity_bytes=20 * MIB)


def test_jobs_end_by_themselves_and_their_units_are_like_any_other(rigged, monkeypatch):
    monkeypatch.setattr(hints, "TEND_S", 0.01)

    async def story(rig):
        for n in range(4):
            rig.remote.place(f"k{n}", pattern(MIB, n))
        job = await Job(rig).open()
        await job.tell(0, [(n, 0, 1) for n in range(4)])
        await settled(rig)
        [machine] = rig.engine.room._machines.values()
        assert len(machine.units()) == 4
        rig.clock.ahead_s += limits.HINT_TTL_S + 1
        await until(lambda: not rig.engine.hints.jobs)
        assert len(machine.units()) == 0
        check(rig)
        with pytest.raises(NotFound, match="tell its future"):
            await job.at(2)

    rigged(story, capacity_bytes=64 * MIB)


def test_what_was_here_before_the_job_is_not_fetched_again_and_two_jobs_share(rigged):
    async def story(rig):
        for n in range(10):
            rig.remote.place(f"k{n}", pattern(10_000 if n % 2 else 3 * MIB, n))
        for n in range(5):
            await rig.front.get(f"k{n}")
        await rig.idle()
        one, two = await Job(rig).open(), await Job(rig, "two").open()
        await asyncio.gather(
            one.tell(0, [(n, 0, 1) for n in range(10)]), two.tell(5, [(9 - n, 0, 1) for n in range(10)])
        )
        await settled(rig)
        assert rig.remote.count("fetch") == 10
        check(rig)
        [machine] = rig.engine.room._machines.values()
        assert len(machine.units()) == 10
        await rig.front.call("hints_close", HintsNamed("job"))
        assert len(machine.units()) == 10
        await rig.front.job("evict", calls.JobCall("remote", "k3"))
        await rig.front.job("pin", calls.JobCall("remote", "k4"))
        assert len(machine.units()) == 8
        await rig.front.job("unpin", calls.JobCall("remote", "k4"))
        assert len(machine.units()) == 9
        check(rig)
        await rig.front.call("hints_close", HintsNamed("two"))
        assert len(machine.units()) == 0

    rigged(story, capacity_bytes=256 * MIB)


def test_hints_that_make_no_sense_are_refused_and_reads_go_on(rigged):
    async def story(rig):
        rig.remote.place("k", b"x" * 100)
        job = await Job(rig).open()
        for accesses in ([(1, 0, 1)], [(0, 0, 2)], [(0, 1, 1)]):
            with pytest.raises(Invalid):
                await job.tell(0, accesses)
        with pytest.raises(Invalid, match="triples"):
            await rig.front.call("hints", HintsCall("job", "remote", "", job.listing.id, 0, b"x" * 8))
        with pytest.raises(NotFound, match="ask for the listing"):
            await rig.front.call("hints", HintsCall("job", "remote", "", "0" * 32, 0, b""))
        with pytest.raises(Invalid, match="name"):
            await rig.front.call("hints", HintsCall("a/b", "remote", "", job.listing.id, 0, b""))
        rig.remote.down = NotFound("gone")
        await job.tell(0, [(0, 0, 1)])
        await settled(rig)
        rig.remote.down = None
        assert await rig.front.get("k") == b"x" * 100

    rigged(story)
