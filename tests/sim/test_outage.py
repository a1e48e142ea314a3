"""A bucket that is away for an hour, in virtual time: in a process of its own, whose clock is the world's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_hour_without_the_bucket_costs_saves_their_time_and_training_nothing(seed: int) -> None:
    """Saves count until the bound of what the bucket may be owed; the next waits, and says so, while training goes on;
    no rank gives up; everything arrives when the bucket is back."""
    command = [sys.executable, "-m", "tests.sim.outage", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert re.match(r"[0-9]+ saves counted", run.stdout)
