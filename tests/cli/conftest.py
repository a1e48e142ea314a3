"""A fake node with a few objects, and the program called in this process or as its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forebay.cli.main import app
from tests.client.fake_node import FakeNode

COMMAND = [sys.executable, "-m", "forebay.cli.main"]


class Program:
    """`program("ls", "corpus")`: the program in this process, with its node's URL and directory set."""

    def __init__(self, url: str, folder: Path) -> None:
        self.env = {
            "FOREBAY_URL": url,
            "FOREBAY_DIR": str(folder),
            "FOREBAY_TOKEN": "",
            "FOREBAY_DEBUG": "",
            # Where `doctor` compares the clock for s3:// buckets: no test leaves this machine. (The node's own URL does
            # not count.)
            "AWS_ENDPOINT_URL": f"{url}/clock",
        }

    def __call__(self, *args: str, code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(args), env=self.env, prog_name="forebay")
        assert result.exit_code == code, f"{args}: exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.env, "TZ": "UTC", "COLUMNS": "120"}

    def process(self, *args: str, **more: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*COMMAND, *args], env=self.environment(), **{**pipes, **more})


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        node.objects["corpus"] = {
            "readme": b"r" * 100,
            "train/a.tar": b"a" * 1000,
            "train/b.tar": b"b" * 3_000_000,
            "train/deep/c": b"c" * 5,
            "val/a.tar": b"v" * 2000,
        }
        node.cached["corpus", "train/a.tar"] = 1000
        node.cached["corpus", "train/b.tar"] = 1_000_000
        node.pinned.add(("corpus", "train/a.tar"))
        yield node


@pytest.fixture
def program(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield Program(node.url, tmp_path / "node")
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def alone(free_port: int, tmp_path: Path) -> Program:
    """The program with no node at its URL."""
    return Program(f"http://127.0.0.1:{free_port}", tmp_path / "node")
