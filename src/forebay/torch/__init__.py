"""Datasets and a loader for PyTorch: random access by the batch, an exact order, and resuming where the job stopped.

`ObjectDataset`, `ShardDataset` and `TokenDataset` say what a sample is; `DataLoader` feeds them to a training loop and
its `state_dict()` says where that is. See docs/training.md.

Names are loaded when they are first asked for: planning an offload (`forebay.offload`) works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.torch.loader import DataLoader
    from forebay.torch.objects import ObjectDataset
    from forebay.torch.schedule import BatchSampler
    from forebay.torch.shards import ShardDataset
    from forebay.torch.stall import StallMeter
    from forebay.torch.tokens import TokenDataset

__all__ = ["BatchSampler", "DataLoader", "ObjectDataset", "ShardDataset", "StallMeter", "TokenDataset"]
_HOMES = {
    "BatchSampler": "schedule",
    "DataLoader": "loader",
    "ObjectDataset": "objects",
    "ShardDataset": "shards",
    "StallMeter": "stall",
    "TokenDataset": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"forebay.torch has no {name!r}")
    return getattr(import_module(f"forebay.torch.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
