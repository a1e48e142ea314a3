"""Buckets in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forebay.torch import DataLoader
from tests.torch.memory_source import MemorySource, numbered_shard, tokens

torch.set_num_threads(1)  # tensors here are small, and cores are busy


@pytest.fixture
def numbers() -> MemorySource:
    """`numbers/00000`…: 100 objects that say their number."""
    return MemorySource({f"numbers/{number:05d}": b"%d" % number for number in range(100)})


@pytest.fixture
def shards() -> MemorySource:
    """`train/0.tar`…: five shards with 0, 10, 20, 30 and 40 samples, numbered from 0."""
    return MemorySource({f"train/{n}.tar": numbered_shard(5 * n * (n - 1), 10 * n) for n in range(5)})


@pytest.fixture
def text() -> MemorySource:
    """`text/0`…: token files of 1,000, 95, 100 and 0 tokens that count up."""
    return MemorySource({"text/0": tokens(1000), "text/1": tokens(95), "text/2": tokens(100, 5000), "text/3": b""})


@pytest.fixture
def closing() -> Iterator[list[DataLoader]]:
    """Loaders appended here are closed at the end."""
    loaders: list[DataLoader] = []
    yield loaders
    for loader in loaders:
        loader.close()
