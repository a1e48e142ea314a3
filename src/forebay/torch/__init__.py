"""Datasets and a loader for PyTorch: random access by the batch, an exact order, and resuming where the job stopped.

`ObjectDataset`, `ShardDataset` and `TokenDataset` say what a sample is; `DataLoader` feeds them to a training loop and
its `state_dict()` says where that is. See docs/training.md.
"""

from __future__ import annotations

from forebay.torch.loader import DataLoader
from forebay.torch.objects import ObjectDataset
from forebay.torch.schedule import BatchSampler
from forebay.torch.shards import ShardDataset
from forebay.torch.stall import StallMeter
from forebay.torch.tokens import TokenDataset

__all__ = ["BatchSampler", "DataLoader", "ObjectDataset", "ShardDataset", "StallMeter", "TokenDataset"]
