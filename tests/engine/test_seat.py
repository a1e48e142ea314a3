"""A node's seat in its cluster, over a store in memory: what its directory remembers, and wishes that do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from forebay.core.cluster.records import NodeRecord
from forebay.core.errors import Busy, Exists, Invalid, NotFound, Unavailable
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.engine.seat import MEMORY, Remembered, Seat, recall, weight_of
from forebay.ports import chance, clock
from forebay.sim.agreed import Agreed, MemoryMeta
from tests.patience import until_async


class Forgetful(MemoryMeta):
    """A directory whose disk is full after the first write."""

    writes = 0

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        self.writes += 1
        if self.writes > 1:
            raise Unavailable("the disk is full")
        return await super().put(key, value, revision=revision, lease=lease)


async def refused() -> None:
    raise Busy("no job is begun now")


def seat_of(agreed: Agreed, node: str, memory: MemoryMeta | None = None, owes: int = 0) -> Seat:
    return Seat(
        MemoryMeta(agreed),
        memory or MemoryMeta(Agreed()),
        Remembered("ours"),
        node,
        NodeRecord(f"http://{node}:9400", 1.0, hands_over=True),
        lease_s=10.0,
        place="here",
        clock=clock.boottime,
        chance=chance.system,
        owes=lambda: owes,
        changed=lambda: None,
        acts=lambda until_s: None,
        drain=refused,
    )


def is_member(seat: Seat) -> bool:
    with suppress(Unavailable, Busy):
        return seat.member() > 0
    return False


def state_of(seat: Seat, node: str) -> str:
    return next((each.state for each in seat.state().nodes if each.node_id == node), "")


def run(story: Callable[[Agreed], Awaitable[None]]) -> None:
    asyncio.run(story(Agreed()))  # type: ignore[arg-type]


def test_a_full_disk_and_a_refused_job_cost_the_node_nothing() -> None:
    async def story(agreed: Agreed) -> None:
        memory = Forgetful(Agreed())
        seat = seat_of(agreed, "n1", memory)
        seat.start()
        await until_async(lambda: is_member(seat) and memory.writes > 1)
        assert not seat.trouble
        await seat.want("n1", "draining")

        def went() -> bool:
            seat.released(seat.state().epoch)  # nothing is cached here
            return state_of(seat, "n1") == "gone"

        await until_async(went)
        assert not seat.trouble
        await seat.aclose()

    run(story)


def test_a_node_that_is_taken_back_has_nothing_until_it_is_here() -> None:
    """Others asked it for what it had once, from the wish on, and refused their clients until it answered."""

    async def story(agreed: Agreed) -> None:
        one, two = seat_of(agreed, "n1"), seat_of(agreed, "n2")
        for seat in (one, two):
            seat.keeps([Bucket("own", LOCAL_URL, write="local")])
            seat.start()
        await until_async(lambda: state_of(one, "n2") == "active")
        await one.want("n2", "draining")

        def went() -> bool:
            two.released(two.state().epoch)
            return one.is_gone("n2")

        await until_async(went)
        await two.aclose()
        local = Bucket("own", LOCAL_URL, write="local", copies=2)
        one.keeps([local])
        await until_async(lambda: not one.unfit(local))
        await one.want("n2", "active")
        await until_async(lambda: state_of(one, "n2") == "missing")
        assert one.is_gone("n2")
        assert not one.unfit(local), "how n2 kept it once counts no more"
        again = seat_of(agreed, "n2")
        again.keeps([local])
        again.start()
        assert await again.is_second(0.0), "others may have acted on what it has"
        await until_async(lambda: is_member(again))
        await until_async(lambda: not one.records["n2"].was_gone)
        assert not one.is_gone("n2")
        await again.aclose()
        await until_async(lambda: "n2" not in one.alive)
        assert not one.is_gone("n2"), "it may have acknowledged something"
        await one.aclose()

    run(story)


def test_who_keeps_what_no_backend_has_alone_says_so() -> None:
    async def story(agreed: Agreed) -> None:
        one = seat_of(agreed, "n1")
        one.keeps([Bucket("once", LOCAL_URL, write="local")])
        one.start()
        await until_async(lambda: is_member(one))
        assert not one.state().nodes[0].kept_once, "nobody asked for two copies"
        one.keeps([Bucket("own", LOCAL_URL, write="local", copies=2)])
        await until_async(lambda: one.state().nodes[0].kept_once)
        await until_async(lambda: "here alone" in one.state().nodes[0].doing)

        two = seat_of(agreed, "n2")
        two.keeps([Bucket("own", LOCAL_URL, write="local", copies=2)])
        two.start()
        two.released(one.state().epoch)  # it brings nothing
        await until_async(lambda: "not all on two nodes yet" in one.state().nodes[0].doing)
        assert one.agreed is not None
        one.covered(one.agreed.held)
        await until_async(lambda: [node.kept_once for node in one.state().nodes] == [False, True])
        assert one.metrics()["forebay_cluster_kept_once"] == 1
        for seat in (one, two):
            await seat.aclose()

    run(story)


def test_wishes_that_do_not_fit_are_refused() -> None:
    async def story(agreed: Agreed) -> None:
        one, two = seat_of(agreed, "n1"), seat_of(agreed, "n2", owes=1)
        with pytest.raises(Unavailable, match="ask another node"):
            await one.want("n1", "draining")
        for seat in (one, two):
            seat.start()
        await until_async(lambda: all(state_of(seat, node) == "active" for seat in (one, two) for node in ("n1", "n2")))
        for name, wish, kind in (
            ("n3", "draining", NotFound),
            ("n", "draining", Invalid),
            ("n2", "gone", Exists),
            ("n2", "forgotten", Exists),
        ):
            with pytest.raises(kind):
                await one.want(name, wish)  # type: ignore[arg-type]
        await one.want("http://n2:9400", "draining")
        await until_async(lambda: state_of(one, "n2") == "leaving")  # and stays so: it owes something
        assert not is_member(two)
        await two.aclose()
        await until_async(lambda: state_of(one, "n2") == "missing")
        with pytest.raises(Exists, match="may come back"):
            await one.want("n2", "forgotten")
        await one.want("n2", "gone")
        await one.want("n2", "forgotten")
        await until_async(lambda: state_of(one, "n2") == "")
        await one.aclose()

    run(story)


def test_a_node_is_not_forgotten_before_others_have_taken_over_what_it_had() -> None:
    """Its copies would be nobody's: whoever is not known to the cluster any more has no heirs."""

    async def story(agreed: Agreed) -> None:
        twice = [Bucket("own", LOCAL_URL, write="local", copies=2)]
        one, two = seat_of(agreed, "n1"), seat_of(agreed, "n2")
        for seat in (one, two):
            seat.keeps(twice)
            seat.start()
        await until_async(lambda: state_of(one, "n1") == state_of(one, "n2") == "active")
        two.released(one.state().epoch)  # it brings nothing
        await until_async(lambda: one.agreed is not None and set(one.agreed.holders) == {"n1", "n2"})
        await two.aclose()
        await until_async(lambda: state_of(one, "n2") == "missing")
        await one.want("n2", "gone")
        with pytest.raises(Busy, match="still take over"):
            await one.want("n2", "forgotten")  # perhaps before there is a map without it
        await until_async(lambda: one.agreed is not None and list(one.agreed.given_up) == ["n2"])
        with pytest.raises(Busy, match="still take over"):
            await one.want("n2", "forgotten")
        assert one.agreed is not None
        one.covered(one.agreed.due)
        await until_async(lambda: one.agreed is not None and not one.agreed.is_taking_over)
        await one.want("n2", "forgotten")
        await until_async(lambda: state_of(one, "n2") == "")
        await one.aclose()

    run(story)


def test_a_directory_remembers_its_cluster() -> None:
    async def story(agreed: Agreed) -> None:
        memory = MemoryMeta(agreed)
        assert await recall(memory, "", loosen=False) == Remembered("")
        seat = seat_of(Agreed(), "n1", memory)
        seat.start()
        await until_async(lambda: is_member(seat))
        await seat.aclose()
        known = await recall(memory, "ours", loosen=False)
        assert known.id
        for name in ("", "theirs"):
            with pytest.raises(Invalid, match="is of the cluster ours"):
                await recall(memory, name, loosen=False)
        assert await recall(memory, "theirs", loosen=True) == Remembered("theirs")
        assert await memory.get(MEMORY) is None

    run(story)


def test_a_few_bytes_more_weigh_nothing() -> None:
    assert weight_of(10**12) == weight_of(10**12 + 10**9)
    assert weight_of(0) == weight_of(1) == 1.0
    for size in (3, 1000, 10**9, 10**13 + 7):
        assert weight_of(size) == pytest.approx(size, rel=1 / 30)


def test_what_was_acknowledged_before_a_node_was_given_up_is_a_second_history() -> None:
    async def story(agreed: Agreed) -> None:
        now_s = clock.wall_s()
        other = seat_of(agreed, "n2")
        other.start()
        first = seat_of(agreed, "n1")
        asked = asyncio.create_task(first.is_second(now_s))
        await asyncio.sleep(0)
        assert not asked.done(), "nobody knows yet"
        first.start()
        assert not await asked
        await until_async(lambda: state_of(other, "n1") == "active")
        await first.aclose()
        await until_async(lambda: state_of(other, "n1") == "missing")
        await other.want("n1", "gone")

        second = seat_of(agreed, "n1")
        second.start()
        assert await second.is_second(now_s)
        await second.want("n1", "active")
        await until_async(lambda: is_member(second))
        assert await second.is_second(now_s), "what is old stays old"
        assert not await second.is_second(clock.wall_s() + 1), "what it acknowledges from now on is not"
        await second.aclose()

        await until_async(lambda: state_of(other, "n1") == "missing")
        await other.want("n1", "gone")
        await until_async(lambda: state_of(other, "n1") == "gone")
        await other.want("n1", "forgotten")
        third = Seat(
            MemoryMeta(agreed), MemoryMeta(Agreed()), Remembered("ours", lease=7), "n1",
            NodeRecord("http://n1:9400", 1.0), lease_s=10.0, place="here", clock=clock.boottime,
            chance=chance.system, owes=lambda: 0, changed=lambda: None, acts=lambda until_s: None, drain=refused,
        )  # fmt: skip
        third.start()
        assert await third.is_second(now_s), "it was of the cluster, which knows it no more"
        for each in (other, third):
            await each.aclose()

    run(story)


def test_a_node_that_is_given_up_may_have_something_until_the_map_says_who_has_it() -> None:
    async def story(agreed: Agreed) -> None:
        one, two = seat_of(agreed, "n1"), seat_of(agreed, "n2")
        for seat in (one, two):
            seat.keeps([Bucket("own", LOCAL_URL, write="local", copies=2)])
            seat.start()

        def both_hold() -> bool:
            for seat in (one, two):
                seat.released(seat.agreed.epoch if seat.agreed is not None else 0)
            return all(seat.agreed is not None and len(seat.agreed.holders) == 2 for seat in (one, two))

        await until_async(both_hold)
        await one.aclose()
        await until_async(lambda: state_of(two, "n1") == "missing")
        await two.want("n1", "gone")
        was_told = False
        while not two.is_gone("n1"):
            was_told |= state_of(two, "n1") == "gone"
            await asyncio.sleep(0)
        assert was_told, "the record alone says nothing of what it had"
        assert two.agreed is not None
        assert (two.agreed.bequeaths, list(two.agreed.holders)) == (["n1"], ["n2"])
        await two.aclose()

    run(story)
