"""A fake node and a client of it, and a real node for the filesystem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.fake_node import FakeNode
from tests.node.conftest import NodeProcess

from forebay.client.sync import Client


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
