"""`Offload` beside what else training programs use: the numbers stay those of the same program without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from forebay.offload import DiskTier, Offload
from forebay.offload.tracing.profile import Profiler
from tests.torch.offload.test_engine import CLASSES, SMALL, WATCHED, WIDTH, Block, batch, made, same

STEPS = WATCHED + 5
Step = Callable[[Any, Any, int], float]


def plain(model: Any, optimizer: Any, step: int) -> float:
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def compare(make: Callable[[], tuple[Any, Any]], take: Step, folder: Path, share: float = 0.75) -> Offload:
    """Train twice, with and without; both must be the same, and something must have moved."""
    model_alone, optimizer_alone = make()
    expected = [take(model_alone, optimizer_alone, step) for step in range(STEPS)]
    model, optimizer = make()
    with Offload(
        model, optimizer, budget=need_of(make, take, share), tiers=[DiskTier([folder], "256MiB")], **SMALL
    ) as off:
        found = []
        for step in range(STEPS):
            with off.step():
                found.append(take(model, optimizer, step))
        assert off.report().moves
        assert off.report().written_bytes
        assert not any(facts.lost for facts in off.steps)
    assert found == expected
    assert same(model, model_alone)
    return off


def need_of(make: Callable[[], tuple[Any, Any]], take: Step, share: float) -> int:
    model, optimizer = make()
    take(model, optimizer, 0)
    with Profiler(model, optimizer, chunk_bytes=SMALL["chunk_bytes"]) as profiler:
        take(model, optimizer, 1)
    return int(profiler.trace().need_bytes().max() * share)


def test_under_autocast(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            x, y = batch(step)
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    compare(made, take, tmp_path)


def test_with_activation_checkpointing_inside(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.out = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        model = Checkpointed()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    compare(make, plain, tmp_path)


def test_with_tied_weights(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        model = nn.Sequential(first, nn.ReLU(inplace=True), second, nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    compare(make, plain, tmp_path, share=0.9)  # less than the only chunk of the optimizer needs cannot be


def test_with_a_schedule_and_gradients_kept_as_zeros(tmp_path: Path) -> None:
    schedules: dict[int, Any] = {}

    def take(model: Any, optimizer: Any, step: int) -> float:
        schedule = schedules.setdefault(id(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        return float(loss.item())

    compare(made, take, tmp_path)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_under_ddp(tmp_path: Path, group: None) -> None:
    def make() -> tuple[Any, Any]:
        model, _ = made()
        wrapped = nn.parallel.DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

    (tmp_path / "disk").mkdir()
    off = compare(make, plain, tmp_path / "disk")
    assert off.trace is not None
    assert off.choice is not None
    moved = {off.trace.tensors[move.tensor].partition(" ")[0] for move in off.choice.plan.moves}
    assert "gradient" not in moved
