"""Datasets and a loader for PyTorch: batched random access, an exact order, and exact resuming.

`ObjectDataset`, `ShardDataset`, `MdsDataset`, `LitDataset`, `ParquetDataset` and `TokenDataset` define what a sample
is. `DataLoader` feeds samples to a training loop, and its `state_dict()` holds the job's position. See
docs/training.md. `Checkpointer` saves and restores a job's state; `StorageWriter` and `StorageReader` are for
`torch.distributed.checkpoint`: docs/checkpoints.md.

Names are loaded when they are first used: planning an offload (`forebay.offload`) works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.torch.by_size import packed
    from forebay.torch.checkpoint.checkpointer import Checkpointer, Every
    from forebay.torch.checkpoint.dcp_reader import StorageReader
    from forebay.torch.checkpoint.dcp_writer import StorageWriter
    from forebay.torch.checkpoint.random_state import RandomState
    from forebay.torch.decoders import Pictures
    from forebay.torch.formats.litdata_chunks import LitDataset
    from forebay.torch.formats.mds import MdsDataset
    from forebay.torch.formats.parquet import ParquetDataset
    from forebay.torch.loader import DataLoader
    from forebay.torch.mixture import Mixture
    from forebay.torch.objects import ObjectDataset
    from forebay.torch.schedule import BatchSampler
    from forebay.torch.shards import ShardDataset
    from forebay.torch.stall import StallMeter
    from forebay.torch.tokens import TokenDataset

__all__ = [
    "BatchSampler",
    "Checkpointer",
    "DataLoader",
    "Every",
    "LitDataset",
    "MdsDataset",
    "Mixture",
    "ObjectDataset",
    "ParquetDataset",
    "Pictures",
    "RandomState",
    "ShardDataset",
    "StallMeter",
    "StorageReader",
    "StorageWriter",
    "TokenDataset",
    "packed",
]
_HOMES = {
    "BatchSampler": "schedule",
    "Checkpointer": "checkpoint.checkpointer",
    "DataLoader": "loader",
    "Every": "checkpoint.checkpointer",
    "LitDataset": "formats.litdata_chunks",
    "MdsDataset": "formats.mds",
    "Mixture": "mixture",
    "ObjectDataset": "objects",
    "ParquetDataset": "formats.parquet",
    "Pictures": "decoders",
    "RandomState": "checkpoint.random_state",
    "ShardDataset": "shards",
    "StallMeter": "stall",
    "StorageReader": "checkpoint.dcp_reader",
    "StorageWriter": "checkpoint.dcp_writer",
    "TokenDataset": "tokens",
    "packed": "by_size",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"forebay.torch has no {name!r}")
    return getattr(import_module(f"forebay.torch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
