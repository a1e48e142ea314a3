"""A fake node and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.client.fake_node import FakeNode

from forebay.client.sync import Client


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.fixture
def client(node: FakeNode) -> Iterator[Client]:
    with Client(node.url) as client:
        yield client
