"""A node that fell silent: what was passed on to it, and what it was sending. In virtual time, in processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def told(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim.silent_home", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_what_was_passed_on_to_a_silent_node_is_answered_with_its_lease(seed: int) -> None:
    run = told(str(seed))
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert re.match(r"[0-9.]+ s", run.stdout)


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_what_a_silent_node_was_sending_lands_on_nothing_newer(seed: int) -> None:
    run = told(str(seed), "flush")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    assert run.stdout == "refused\n"


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_without_its_condition_and_without_being_cut_off_it_would(seed: int) -> None:
    run = told(str(seed), "unconditional")
    assert run.returncode == 1
    assert re.search(r"Found: (n\d has 200 b'old'|the bucket has .* b'old'\), and the newest is b'newer')", run.stderr)
