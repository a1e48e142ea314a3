"""A fake node and a client of it, a real node for the filesystem, and a child to look from."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.client.sync import Client
from tests.client.fake_node import FakeNode
from tests.node.conftest import NodeProcess


def in_child(run: Callable[[], bool]) -> bool:
    """Whether `run` says True in a forked child."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            os._exit(0 if run() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.fixture
def client(node: FakeNode) -> Iterator[Client]:
    with Client(node.url) as client:
        yield client


@pytest.fixture(scope="session")
def file_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A running node with the buckets `scratch` (on it alone), `lake` (written through to `lake/` in its folder), and
    `asked` (the same folder, asked whether it changed for each read)."""
    folder: Path = tmp_path_factory.mktemp("file-node")
    (folder / "lake").mkdir()
    running = NodeProcess(folder, "--fronts", "1")
    running.start()
    try:
        running.json("PUT", "buckets/scratch", {"name": "scratch", "url": "local://", "write": "local"})
        running.add_bucket("lake", f"file://{folder / 'lake'}")
        running.add_bucket("asked", f"file://{folder / 'lake'}", 0)
        yield running
    finally:
        running.stop()
