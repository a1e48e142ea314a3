"""Training that is killed at any moment goes on from what was reported durable, with the same losses, bit by bit.

Blobs are long enough to go to the disk past the page cache. `FOREBAY_KILLS` sets the number of kills for each of the
three stories (one process; two ranks; the node), 2 by default: the run behind the promise had 100 of each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint import crash_trainer
from tests.checkpoint.crash_trainer import fork, read
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S, until

KILLS = int(os.environ.get("FOREBAY_KILLS", "2"))
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300 + 15 * KILLS),  # a kill takes three to five seconds, on a busy machine more
]
STEPS = 10
WHERE = sys.maxsize  # a seed of its own for each run: kills are to be anywhere


class Run:
    """A job of `world` ranks that is begun again and again under one prefix."""

    def __init__(self, node: NodeProcess, folder: Path, place: str, world: int, steps: int = STEPS) -> None:
        self.node = node
        self.folder = folder
        self.place = place
        self.world = world
        self.steps = steps
        self.pids: list[int] = []
        self.life = 0
        self.durable = 0
        self.losses: dict[tuple[int, int], str] = {}  # by rank and step

    def journal(self, rank: int) -> Path:
        return self.folder / f"{self.place.replace('/', '-')}-{self.life}-{rank}"

    def start(self) -> None:
        self.life += 1
        meeting = str(self.folder / f"meeting-{self.place.replace('/', '-')}-{self.life}")
        for number in range(self.world):
            journal = self.journal(number)
            work = partial(
                crash_trainer.rank,
                self.node.endpoint, self.place, journal, self.steps, number, self.world, meeting,
            )  # fmt: skip
            self.pids.append(fork(journal, work))

    def kill(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids = []
        self.look()

    def wait(self) -> None:
        """Until all ranks ended by themselves, without an error."""
        for rank, pid in enumerate(self.pids):
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            error = self.journal(rank).with_suffix(".error")
            assert status == 0, error.read_text() if error.exists() else f"rank {rank} ended with {status}"
        self.pids = []
        self.look()

    def look(self) -> None:
        """What the last life restored, computed and was told."""
        durable = self.durable
        for rank in range(self.world):
            error = self.journal(rank).with_suffix(".error")
            assert not error.exists(), error.read_text()
            for words in read(self.journal(rank)):
                if words[0] == "restored":
                    assert int(words[1]) >= self.durable, (
                        f"step {self.durable} was durable, and {words[1]} was restored"
                    )
                elif words[0] == "step":
                    before = self.losses.setdefault((rank, int(words[1])), words[2])
                    assert before == words[2], f"step {words[1]} had another loss than in the life before"
                elif words[0] == "durable":
                    durable = max(durable, int(words[1]))
        self.durable = durable

    def lines(self) -> int:
        return sum(len(read(self.journal(rank))) for rank in range(self.world))


def reference(node: NodeProcess, folder: Path, place: str, world: int) -> Run:
    """The same job, uninterrupted."""
    run = Run(node, folder, place, world)
    run.start()
    run.wait()
    assert len(run.losses) == STEPS * world
    assert run.durable == STEPS
    return run


@pytest.mark.parametrize("world", [1, 2])
def test_kills_of_the_job(node: NodeProcess, tmp_path: Path, world: int):
    chance = random.Random(random.SystemRandom().randrange(WHERE))
    expected = reference(node, tmp_path, f"runs/crash-reference-{world}", world)
    run = Run(node, tmp_path, f"runs/crash-{world}", world)
    for _ in range(KILLS):
        run.start()
        lines = chance.randrange(1, 8 * world)
        until(lambda: run.lines() >= lines or finished(run), "the job makes steps")  # noqa: B023
        time.sleep(chance.random() * 0.05)  # anywhere in a step or a save
        run.kill()
        if run.durable == STEPS:
            run = Run(node, tmp_path, f"{run.place}x", world)
    run.start()
    run.wait()
    assert run.losses == {place: loss for place, loss in expected.losses.items() if place in run.losses}
    assert (0, STEPS) in run.losses or run.durable == STEPS


def finished(run: Run) -> bool:
    return any(["done"] in read(run.journal(rank)) for rank in range(run.world))


def test_kills_of_the_node(node: NodeProcess, tmp_path: Path):
    chance = random.Random(random.SystemRandom().randrange(WHERE))
    expected = reference(node, tmp_path, "runs/crash-reference-node", 1)
    run = Run(node, tmp_path, "runs/crash-node", 1)
    run.start()
    for _ in range(KILLS):
        before = run.lines()
        until(lambda: run.lines() > before or finished(run), "the job makes steps", PATIENCE_S)  # noqa: B023
        time.sleep(chance.random() * 0.05)
        assert node.process is not None
        if chance.random() < 0.5:
            node.process.kill()
            node.process.wait()
            node.start()
        elif (engine := node.children().get("engine")) is not None:
            os.kill(engine, signal.SIGKILL)
    run.wait()
    assert run.losses == expected.losses
    assert run.durable == STEPS
