"""On a terminal: progress bars, a live screen, colours; and none of them elsewhere."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from forebay.core.messages import calls
from tests.cli.conftest import COMMAND, Program
from tests.client.fake_node import STARTED_S, FakeNode
from tests.patience import PATIENCE_S


class Terminal:
    """The program on a pseudo-terminal. `until(text)` reads until it is shown; `end()` reads the rest."""

    def __init__(self, program: Program, *args: str) -> None:
        self.fd, other = pty.openpty()
        env = {**program.environment(), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen([*COMMAND, *args], env=env, stdin=other, stdout=other, stderr=other)
        os.close(other)
        self.shown = ""

    def until(self, pattern: str, on_wait: Callable[[], None] = lambda: None) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < give_up, self.shown
            on_wait()
            self._read(0.1)

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        if not ready:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += data.decode("utf-8", "replace")
        return bool(data)

    def end(self) -> int:
        while self._read(PATIENCE_S):
            pass
        os.close(self.fd)
        return self.process.wait(PATIENCE_S)


def test_a_job_draws_a_bar_and_ctrl_c_takes_it_away(program: Program, node: FakeNode) -> None:
    state = calls.JobState("", "prefetch", "corpus", "", "running", 1, 0, 4, 1 << 20, 4 << 20, STARTED_S)
    node.job_steps["prefetch"] = [state] * 10_000
    terminal = Terminal(program, "prefetch", "corpus")
    terminal.until(r"prefetch corpus/.*1\.0/4\.2 MB|1\.0/4\.0 MiB")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert "goes on in the node" in terminal.shown


def test_get_draws_a_bar_and_quiet_does_not(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"]["big"] = os.urandom(20_000_000)
    loud = Terminal(program, "get", "corpus/big", str(tmp_path))
    assert loud.end() == 0
    assert "\x1b[" in loud.shown
    assert "19.1 MiB in" in loud.shown
    quiet = Terminal(program, "get", "-q", "corpus/big", str(tmp_path))
    assert quiet.end() == 0
    assert "\x1b[" not in quiet.shown


def test_top_draws_a_screen_until_ctrl_c(program: Program, node: FakeNode) -> None:
    terminal = Terminal(program, "top", "--interval", "0.1")
    terminal.until("LATENCY")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0
    assert "\x1b[?1049h" in terminal.shown, "a screen of its own"
    assert "\x1b[?1049l" in terminal.shown, "and it is given back"


def test_doctor_has_colours_on_a_terminal_only(program: Program, tmp_path: Path) -> None:
    terminal = Terminal(program, "doctor", "--no-measure", "--volume", str(tmp_path))
    assert terminal.end() == 0
    assert "\x1b[32mok" in terminal.shown
    assert "\x1b[" not in program("doctor", "--no-measure", "--volume", str(tmp_path)).stdout
