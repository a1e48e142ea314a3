"""A running front for each test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.front.fake_engine import WAIT_S, Node, serve


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A front with a fake engine and an empty store; buckets `b` (immutable) and `strict` (always asked)."""
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition."""

    def wait(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.005)

    return wait
