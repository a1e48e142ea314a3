"""A job that saves or loads with `torch.distributed.checkpoint` is killed at any moment: what was saved is found.

`FOREBAY_KILLS` sets the number of kills, 2 by default.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from forebay.torch import StorageReader, StorageWriter
from tests.checkpoint.crash_trainer import fork, read
from tests.checkpoint.test_crashes import KILLS
from tests.node.conftest import NodeProcess
from tests.patience import until

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:torch.distributed is")]
PLACE = "runs/dcp-crash"
WEIGHTS = 5_000_000  # 20 MB: handed over, and long enough to go past the page cache


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((WEIGHTS,), float(step)), "step": step}


def saves(node: str, journal: Path, first: int) -> None:
    writer = StorageWriter(PLACE, url=node, keep=2)
    with journal.open("a", buffering=1) as out:
        for step in itertools.count(first):
            dcp.save(state_of(step), checkpoint_id=f"{PLACE}/step-{step}", storage_writer=writer)
            out.write(f"saved {step}\n")


def loads(node: str, journal: Path) -> None:
    with journal.open("a", buffering=1) as out:
        for turn in itertools.count():
            load(node)
            out.write(f"loaded {turn}\n")


def load(node: str) -> int:
    """The step of the newest checkpoint, which must be whole."""
    found = state_of(0)
    dcp.load(found, storage_reader=StorageReader(PLACE, url=node))
    assert found["w"].unique().tolist() == [float(found["step"])]
    return int(found["step"])


def killed(journal: Path, work: Any, chance: random.Random) -> None:
    """Run `work` in a process that is killed after some lines."""
    pid, lines = fork(journal, work), chance.randrange(1, 5)
    until(lambda: len(read(journal)) >= lines or journal.with_suffix(".error").exists(), "it makes progress")
    time.sleep(chance.random() * 0.05)  # anywhere in a save or load
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    error = journal.with_suffix(".error")
    assert not error.exists(), error.read_text()


def test_kills_of_saves_and_loads(node: NodeProcess, tmp_path: Path):
    chance = random.Random(random.SystemRandom().randrange(sys.maxsize))
    newest = 0
    for number in range(KILLS):
        journal = tmp_path / f"saves-{number}"
        killed(journal, partial(saves, node.endpoint, journal, newest + 1), chance)
        told = max(int(step) for _, step in read(journal))
        killed(tmp_path / f"loads-{number}", partial(loads, node.endpoint, tmp_path / f"loads-{number}"), chance)
        newest = load(node.endpoint)
        assert newest in (told, told + 1), "the last that was reported, or the one that was being saved"
