"""The example that is killed and goes on, as a stranger runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).parents[2] / "examples" / "killed_and_resumed.py"


def test_training_that_is_killed_between_steps_and_inside_a_save_has_the_same_losses(node: NodeProcess):
    environment = {**os.environ, "FOREBAY_URL": node.endpoint}
    command = [sys.executable, str(EXAMPLE), "runs/example"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "life 1: steps 1 to 10\n" in done.stdout
    assert "to 22\n" in done.stdout
    assert "; 0 losses differ" in done.stdout
