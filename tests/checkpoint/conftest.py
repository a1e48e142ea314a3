"""A node with a bucket that is written back, and one without a backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench import servers
from forebay.cli.main import app
from tests.node.conftest import NodeProcess

torch.set_num_threads(1)  # tensors here are small, and cores are busy


def ckpt(node: NodeProcess, *arguments: str, status: int = 0) -> str:
    """All that `forebay ckpt` says, in this process: to start one takes longer than most of its verbs."""
    ended = CliRunner().invoke(app, ["ckpt", *arguments], env={"FOREBAY_URL": node.endpoint}, prog_name="forebay")
    assert ended.exit_code == status, (ended.stdout, ended.stderr)
    assert "Traceback" not in ended.output
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A running node. `runs` is written back to a directory, `straight` is written through."""
    folder = tmp_path_factory.mktemp("checkpoints")
    port = servers.free_ports(1)[0]  # where clients find it again after a test killed it
    running = NodeProcess(folder, "--listen", f"127.0.0.1:{port}", "--fronts", "1")
    running.start()
    for name, mode in (("runs", "back"), ("straight", "through")):
        (folder / name).mkdir()
        body = {"name": name, "url": f"file://{folder / name}", "write": mode}
        running.json("PUT", f"buckets/{name}", body)
    yield running
    running.stop()


@pytest.fixture
def backend(node: NodeProcess) -> Path:
    """The directory behind `runs`."""
    return node.dir / "runs"
