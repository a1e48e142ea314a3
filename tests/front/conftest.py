"""A running front for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.front.fake_engine import Node, serve
from tests.patience import until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A front with a fake engine and an empty store; buckets `b` (immutable) and `strict` (always asked)."""
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition."""

    return until
