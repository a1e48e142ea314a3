"""Writers, deletes, kills, failures and lost answers at random: in the end the backend is what the writers made."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.faulty import FaultPlan, Faulty
from forebay.backends.wrap.retrying import Retrying
from forebay.core.errors import Unavailable
from forebay.core.machines.retry import RetryPolicy
from forebay.ports.chance import Seeded
from forebay.ports.clock import SystemClock
from tests.flush.conftest import Node, Remote


async def _storm(node: Node, dice: random.Random, turns: int) -> dict[str, bytes]:
    """Writers, deletes, kills and impatience at random; what the bucket must be in the end."""
    truth: dict[str, bytes] = {}
    for turn in range(turns):
        key = f"k{dice.randrange(12)}"
        if dice.random() < 0.25:
            await node.delete(key)
            truth.pop(key, None)
        else:
            truth[key] = f"{turn} ".encode() * dice.choice([1, 10, 6000])
            await node.write(key, truth[key])
        if dice.random() < 0.04:
            await node.crash()
        if dice.random() < 0.1:
            node.flusher.ask("b", f"k{dice.randrange(12)}")
        if dice.random() < 0.05:
            node.clock.ahead_s += 3.0
        await asyncio.sleep(dice.choice([0, 0, 0.003]))
    return truth


async def _calm(node: Node, remote: Remote, truth: dict[str, bytes]) -> None:
    try:
        node.clock.ahead_s += 100.0
        await node.settle()
        assert {key: remote.data(key) for key in remote.names()} == truth
        assert await remote.list_uploads("") == []
        assert not node.conflicts
    finally:
        await node.flusher.aclose(flush=False)
        node.workers.shutdown()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_the_backend_has_what_was_last_written(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)

    class Stormy(Remote):
        calm = False

        async def _write(self, verb: str, key: str, work: Any) -> Any:
            await asyncio.sleep(dice.random() * 0.002)
            if not self.calm and dice.random() < 0.15:
                if dice.random() < 0.6:
                    await work()
                raise Unavailable("a storm: try again")
            return await Remote._write(self, verb, key, work)

    async def all_of_it() -> None:
        node = Node(tmp_path, Stormy())
        truth = await _storm(node, dice, 400)
        node.remote.calm = True
        await _calm(node, node.remote, truth)

    asyncio.run(all_of_it())


@pytest.mark.parametrize("seed", range(3))
def test_so_it_is_beneath_the_layer_that_tries_again(tmp_path: Path, seed: int) -> None:
    """There a put whose answer was lost is made again, and refused because the first one arrived."""
    dice = random.Random(seed)

    async def all_of_it() -> None:
        remote = Remote()
        plan = FaultPlan(seed, latency_s=0.0005, error_rate=0.1, busy_rate=0.05, lost_rate=0.2, reset_rate=0.1)
        faulty = Faulty(remote, plan)
        policy = RetryPolicy(attempts_max=3, base_s=0.001, delay_max_s=0.002)
        node = Node(tmp_path, Retrying(faulty, SystemClock(), Seeded(seed), BackendCounters(), policy))
        truth = await _storm(node, dice, 250)
        faulty.plan = FaultPlan()
        await _calm(node, remote, truth)

    asyncio.run(all_of_it())
