"""A small training job that is killed and begun again: one process for each rank, forked from one that has torch
loaded.

A rank writes a line to its journal for each step (`step N LOSS`), for what it restored (`restored N`), and for each
save that it was told is durable (`durable N`). Lines are written with one system call each, so a kill loses none.
"""

from __future__ import annotations

import os
import random
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from forebay.torch import Checkpointer, RandomState

DIMENSIONS = 64
WEIGHTS = 3_000_000  # beside the network: each step changes and saves 36 MB, so that a kill meets a save


class Job(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIMENSIONS, DIMENSIONS), nn.Tanh(), nn.Linear(DIMENSIONS, 1))
        self.table = nn.Parameter(torch.ones(WEIGHTS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs).mean() * self.table.mean()


def rank(
    node: str, place: str, journal: Path, steps: int, number: int, world: int, meeting: str, every: int = 1
) -> None:
    """Train from the newest checkpoint to `steps`, and save after every step."""
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=world)
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(line: str) -> None:
        os.write(out, (line + "\n").encode())

    torch.manual_seed(11 + number)
    random.seed(5)
    model = Job()
    for parameter in model.parameters():
        if world > 1:
            dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = {"samples": 0}
    state: dict[str, Any] = {"model": model, "optim": optimizer, "rng": RandomState(), "loader": seen}
    with Checkpointer(place, url=node, keep=3, patience_s=60) as checkpoints:
        restored = checkpoints.restore(state)
        at = restored.step if restored is not None else 0
        assert seen["samples"] == 8 * at, "the loader's place is the model's"
        say(f"restored {at}")
        waiting: list[Any] = []
        for step in range(at + 1, steps + 1):
            loss = model(torch.randn(8, DIMENSIONS))
            seen["samples"] += 8
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                if world > 1:
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            say(f"step {step} {loss.item()!r}")
            if step % every == 0:
                waiting.append(checkpoints.save(step, state))
            waiting = _told(waiting, say)
        for handle in waiting:
            handle.durable()
        _told(waiting, say)
    say("done")
    os.close(out)
    if world > 1:
        dist.destroy_process_group()


def _told(waiting: list[Any], say: Any) -> list[Any]:
    for handle in waiting:
        if handle.done and handle.error is None:
            say(f"durable {handle.step}")
    return [handle for handle in waiting if not handle.done]


def fork(journal: Path, work: Any) -> int:
    """Run `work` in a child, with what it raises in `<journal>.error`; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        journal.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def read(journal: Path) -> list[list[str]]:
    """The lines of a journal, as words."""
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
