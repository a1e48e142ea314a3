"""Kill training with -9 between two steps and inside a save, go on, and compare every loss with an undisturbed run's.

    python examples/killed_and_resumed.py corpus/runs/killed

The job starts three times under one name. Twice it is killed. Each start goes on from the newest checkpoint that
counts. Steps that are done again have the same losses, bit by bit: weights, optimizer and random generators were saved.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

import torch
from torch import nn

from forebay.torch import Checkpointer, RandomState

STEPS, EVERY = 22, 4
KILLED_AFTER, KILLED_SAVING = 10, 16  # steps


def train(place: str, end: str = "") -> list[str]:
    """One life of the job: a line for each step that it did. `end`: "step" or "save", where it is killed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    state = {"model": model, "optim": optimizer, "rng": RandomState()}
    told = []
    with Checkpointer(place, every=EVERY, keep=2) as checkpoints:
        restored = checkpoints.restore(state)
        for step in range(restored.step + 1 if restored else 1, STEPS + 1):
            numbers = torch.randn(16, 64)
            loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.append(f"{step} {loss.item()!r}")
            if end:
                print(told[-1], flush=True)
            if end == "step" and step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "save" and step == KILLED_SAVING:
                checkpoints.save(step, state)
                os.kill(os.getpid(), signal.SIGKILL)  # its bytes are on their way
            checkpoints.maybe_save(step, state)
        checkpoints.save(STEPS, state, wait=True)
    return told


def killed(place: str, end: str) -> list[str]:
    """The same in a process of its own, which is killed."""
    done = subprocess.run([sys.executable, __file__, place, end], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != -signal.SIGKILL:
        raise SystemExit(f"the job ended with {done.returncode} instead of being killed")
    return done.stdout.splitlines()


def main(place: str) -> int:
    """How many steps had another loss than in the undisturbed run."""
    place = f"{place}/{secrets.token_hex(4)}"  # a run of its own, each time
    expected = train(f"{place}/undisturbed")
    lives = [killed(f"{place}/killed", "step"), killed(f"{place}/killed", "save"), train(f"{place}/killed")]
    for number, told in enumerate(lives, 1):
        print(f"life {number}: steps {told[0].split()[0]} to {told[-1].split()[0]}")
    found = [line for told in lives for line in told]
    other = set(found) ^ set(expected)
    print(f"{len(found)} steps for {len(expected)}; {len(other)} losses differ")
    return len(other)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(sys.argv[1], sys.argv[2])
    else:
        sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
