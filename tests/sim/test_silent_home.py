"""What was passed on to a node that fell silent is answered with its lease: in virtual time, a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_what_was_passed_on_to_a_silent_node_is_answered_with_its_lease(seed: int) -> None:
    command = [sys.executable, "-m", "tests.sim.silent_home", str(seed)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert re.match(r"[0-9.]+ s", run.stdout)
