"""Train on WebDataset shards in any order, without unpacking them, on one process or many.

    python examples/samples_from_shards.py corpus/train/
    torchrun --nproc-per-node 2 examples/samples_from_shards.py corpus/train/

Each sample is a `.npy` with 16 numbers and a `.cls` with its label, 0 to 3, in tars. A block shuffle keeps shards that
are read together near each other in the epoch, for data that is larger than the node's disks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import distributed, nn

from forebay.torch import DataLoader, ShardDataset

EPOCHS, BATCH = 2, 32


def pair(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """What the model wants of a sample. Without this, samples are dictionaries of all parts, and their names."""
    return torch.from_numpy(sample["npy"]).float(), sample["cls"]


def main(place: str) -> float:
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(16, 4)
    if distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = ShardDataset(place, parts=["npy", "cls"], transform=pair)
    # Rank and world size are torchrun's. `fill` gives every rank a whole last batch, with some samples twice.
    with DataLoader(dataset, BATCH, seed=1, shuffle="block", window_bytes=1 << 30, last="fill") as loader:
        print(f"{dataset.listing.objects} shards, {dataset.listing.size_bytes} bytes")
        loss = torch.tensor(0.0)
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            for numbers, labels in loader:
                loss = nn.functional.cross_entropy(model(numbers), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}; {loader.stall}")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__)
