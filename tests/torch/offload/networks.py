"""Small networks for tests of profiling, and a step of training."""

from typing import Any

import torch
from torch import nn

from forebay.offload.tracing.shapes import Decoder, Shape

SMALL = Shape(vocabulary=64, layers=2, width=32, heads=4, key_heads=2, hidden=64)


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)


def layers() -> Any:
    """Two linear layers with an operator in place behind the first's output."""
    seeded()
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(inplace=True), nn.Linear(128, 10))


def decoder(shape: Shape = SMALL, length: int = 16) -> Any:
    seeded()
    return Decoder(shape, length)


def words(batch: int = 2, length: int = 16) -> tuple[Any, Any]:
    seeded(1)
    return torch.randint(0, 64, (batch, length)), torch.randint(0, 64, (batch, length))


def numbers(batch: int = 32) -> Any:
    seeded(1)
    return torch.randn(batch, 64)


def square_loss(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


def step(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
