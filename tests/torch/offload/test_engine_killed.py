"""Training under `Offload` in a process that is killed in the middle of a step, again and again, and goes on."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from forebay.offload import DiskTier, Offload
from forebay.offload.planning import improve
from forebay.ports.machine import boot_id
from tests.torch.offload.conftest import FEW_REPLAYS
from tests.torch.offload.programs import left
from tests.torch.offload.test_engine import SMALL, WATCHED, made, take

STEPS, SAVED_EVERY, KILLS = 33, 3, 3
BLOCKS, BUDGET = 2, "1792KiB"  # of 2688
MOVED_BYTES_MIN = 1 << 18
DISK_BYTES_S = 25e6  # so that for much of a step something is under way to the disk or from there


# --- the process -----------------------------------------------------------------------------------------------------
def train(folder: Path) -> None:
    """Go on from the last checkpoint, by as many steps as there are lines to read.

    Says when steps begin and end, and when a checkpoint is begun.
    """
    torch.set_num_threads(1)
    improve.EVALUATIONS = FEW_REPLAYS  # in this process no fixture says so
    model, optimizer = made(BLOCKS)
    saved, begin = folder / "checkpoint", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["steps"]
    tier = DiskTier([folder / "disk"], "32MiB", limit_bytes_s=(DISK_BYTES_S, DISK_BYTES_S))
    with Offload(model, optimizer, budget=BUDGET, tiers=[tier], **SMALL) as off:
        for step in range(begin, STEPS):
            input()
            print("begins", step, flush=True)
            began_s = time.perf_counter()
            moved = tier.bytes_written + tier.bytes_read
            with off.step():
                loss, _ = take(model, optimizer, step)
            seconds = time.perf_counter() - began_s
            print("ends", step, loss.hex(), seconds, tier.bytes_written + tier.bytes_read - moved, flush=True)
            if (step + 1) % SAVED_EVERY == 0 or step + 1 == STEPS:
                print("saves", step, flush=True)
                save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}, saved)


def save(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    torch.save(state, new)
    new.replace(path)


# --- its lives -------------------------------------------------------------------------------------------------------
class Said(NamedTuple):
    """What a process said of a step that ended."""

    loss: float
    seconds: float
    moved_bytes: int


class Life:
    """One process that trains once it is told to: what torch imports, for optimizers too, takes longer than steps."""

    def __init__(self, folder: Path) -> None:
        code = f"from {__name__} import BLOCKS, Path, made, train; made(BLOCKS); input(); train(Path({str(folder)!r}))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self.ended: dict[int, Said] = {}
        self.begun: list[int] = []

    def begin(self, steps: int) -> None:
        """Train for at most so many steps: however late its killer runs, it waits within reach."""
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n" * (1 + steps))
        self.process.stdin.flush()

    def follow(self) -> Iterator[str]:
        """The first word of each line that it says."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, step, *more = line.split()
            if word == "begins":
                self.begun.append(int(step))
            elif word == "ends":
                self.ended[int(step)] = Said(float.fromhex(more[0]), float(more[1]), int(more[2]))
            yield word

    def until(self, word: str, steps: int) -> None:
        """Follow until it says this and has begun so many steps."""
        for said in self.follow():
            if said == word and len(self.begun) >= steps:
                return
        pytest.fail(f"it ended before it was killed: {self.finish()}")

    def kill(self) -> None:
        self.process.kill()
        self.finish()

    def finish(self) -> tuple[int, str]:
        for _ in self.follow():
            pass
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[list[Life]]:
    """One more than is killed. None is left at the end."""
    all_of_them = [Life(tmp_path) for _ in range(KILLS + 1)]
    yield all_of_them
    for life in all_of_them:
        life.process.kill()
        life.process.communicate()


def holders(directory: Path) -> list[str]:
    """The open files of all processes that lie, or lay, in a directory."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found += [target for target in [str(link.readlink())] if target.startswith(f"{directory}/")]
    return found


def left_behind(life: Life, disk: Path) -> list[str]:
    """Of a process that was killed: what is in its directory, who has that open, and who lives of its session."""
    others = [stat.parent.name for stat in Path("/proc").glob("[0-9]*/stat") if _session(stat) == life.process.pid]
    return [*os.listdir(disk), *holders(disk), *others]


def _session(stat: Path) -> int:
    with contextlib.suppress(OSError):
        return int(stat.read_text().rpartition(")")[2].split()[3])
    return -1


def test_killed_in_the_middle_of_steps_it_ends_with_the_weights_of_a_run_that_was_not(
    tmp_path: Path, lives: list[Life]
) -> None:
    """Each life begins with a file that one before it left behind, as if killed before it took the name away."""
    chance = random.Random(5)
    disk = tmp_path / "disk"
    disk.mkdir()
    last_words = ["begins"] * (KILLS - 1) + ["saves"]
    chance.shuffle(last_words)
    losses: dict[int, float] = {}
    for life, word in zip(lives, last_words, strict=False):
        steps = chance.randint(WATCHED + 2, WATCHED + 4)
        life.begin(steps if word == "begins" else steps + SAVED_EVERY - 1)
        life.until(word, steps)
        usual = life.ended[life.begun[-2]]
        assert usual.moved_bytes > MOVED_BYTES_MIN, "nearly nothing was under way"
        time.sleep(chance.uniform(0.05, 0.95) * (usual.seconds if word == "begins" else 0.02))
        assert [name.endswith("(deleted)") for name in holders(disk)] == [True]
        life.kill()
        assert life.process.returncode == -9
        assert left_behind(life, disk) == []
        losses |= {step: said.loss for step, said in life.ended.items()}
        (disk / f"forebay-offload-{boot_id()}-{life.process.pid}-0.swap").touch()
    life = lives[-1]
    life.begin(STEPS)
    assert life.finish() == (0, "")
    assert left_behind(life, disk) == []
    losses |= {step: said.loss for step, said in life.ended.items()}
    assert 0 < life.begun[0] < STEPS - WATCHED, "it went on from a checkpoint, for long enough to have a plan"

    model, optimizer = made(BLOCKS)
    assert losses == {step: take(model, optimizer, step)[0] for step in range(STEPS)}
    other, its_optimizer = made(BLOCKS)
    state = torch.load(tmp_path / "checkpoint")
    other.load_state_dict(state["model"])
    its_optimizer.load_state_dict(state["optimizer"])
    assert state["steps"] == STEPS
    assert dict(left(other, its_optimizer)) == dict(left(model, optimizer))
