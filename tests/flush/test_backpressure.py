"""Writers wait while a bucket owes its backend as much as it may, and are refused when that lasts."""

from __future__ import annotations

import asyncio

import pytest

from forebay.core import limits
from forebay.core.errors import Busy, Closed, Unavailable
from tests.flush.conftest import Node


async def admitted(node: Node, size_bytes: int) -> None:
    """A write of `size_bytes` that comes to nothing once it is admitted."""
    async with node.flusher.room(node.bucket, size_bytes):
        pass


def test_a_write_that_fails_takes_no_room_from_others(story):
    async def tell(node: Node) -> None:
        for _ in range(3):
            with pytest.raises(Unavailable):
                async with node.flusher.room(node.bucket, 60):
                    raise Unavailable("the disk is full")
        await admitted(node, 60)
        assert node.flusher.metrics()['forebay_write_waits_total{bucket="b"}'] == 0

    story(tell, dirty_bytes_max=100)


def test_a_writer_waits_while_too_much_is_owed_and_goes_on_when_it_is_less(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        async with node.flusher.room(node.bucket, 60):
            await node.write("a", b"x" * 60)
        waiting = asyncio.create_task(admitted(node, 60))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        node.remote.open.set()
        await waiting
        assert node.flusher.metrics()['forebay_write_waits_total{bucket="b"}'] == 1

    story(tell, dirty_bytes_max=100)


def test_a_writer_that_waited_long_enough_is_told_to_slow_down(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"x" * 100)
        waiting = asyncio.create_task(admitted(node, 1))
        await asyncio.sleep(0)
        node.clock.ahead_s += limits.DIRTY_WAIT_S
        await node.write("c", b"")  # whatever happens: the gate looks at its clock
        with pytest.raises(Busy, match="owes its backend 2 objects, 100 bytes") as caught:
            await waiting
        assert caught.value.code == "SlowDown"
        assert caught.value.retry_after_s > 0
        assert node.flusher.metrics()['forebay_write_refusals_total{bucket="b"}'] == 1

    story(tell, dirty_bytes_max=100)


def test_a_writer_waits_while_something_is_owed_for_too_long(story):
    async def tell(node: Node) -> None:
        node.remote.open.clear()
        await node.write("a", b"x")
        await admitted(node, 1)
        node.clock.ahead_s += 61
        waiting = asyncio.create_task(admitted(node, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        node.remote.open.set()
        await node.settle()
        await admitted(node, 1)

    story(tell, dirty_age_max_s=60.0)


def test_without_a_bound_a_quarter_of_the_node_is_the_bound(story):
    async def tell(node: Node) -> None:
        node.capacity_bytes = 400
        node.remote.open.clear()
        await node.write("a", b"x" * 90)
        async with node.flusher.room(node.bucket, 10):
            waiting = asyncio.create_task(admitted(node, 10))
            await asyncio.sleep(0.01)
            assert not waiting.done(), "90 are owed, and 10 are being written"
            # The write fails; the one that waits gets its room.
        await waiting
        waiting = asyncio.create_task(admitted(node, 11))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await node.flusher.aclose(flush=False)
        with pytest.raises(Closed):
            await waiting

    story(tell)
