"""Stores in temporary directories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.store.store_objects import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """One volume."""
    bench = Bench([tmp_path / "v0"])
    yield bench
    bench.close()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Benches over chosen directories."""
    made: list[Bench] = []

    def make(*names: str, **options: object) -> Bench:
        made.append(Bench([tmp_path / name for name in names or ("v0",)], **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
