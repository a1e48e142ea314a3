"""Batches of varying lengths: one that is larger than all before costs one step without a plan; the others have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.offload import DiskTier, Offload
from forebay.offload.engine import PATIENCE
from tests.torch.offload.memory import PeakMemory
from tests.torch.offload.programs import loss_of, told
from tests.torch.offload.test_engine import ROWS, SMALL, WATCHED, WIDTH, made, need_bytes, same, take

LONG = 3 * ROWS
LENGTHS = [ROWS] * WATCHED + [ROWS // 2, 2 * ROWS, ROWS, 2 * ROWS, LONG, ROWS, LONG, ROWS // 2, 2 * ROWS, LONG]


class Owning(nn.Module):
    """A model with a weight of its own: it has a point itself."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        return self.inner(x * self.scale)


def made_owning() -> tuple[Any, Any]:
    inner, _ = made()
    model = Owning(inner)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def first_dropping(model: Any, optimizer: Any, step: int, rows: int) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, step, rows)
    loss.backward()
    optimizer.step()
    return loss.item()


def need_of(make: Any, step_of: Any, rows: int) -> int:
    model, optimizer = make()
    for step in range(2):
        with PeakMemory(model, optimizer) as memory:
            step_of(model, optimizer, step, rows)
    return memory.peak_bytes


@pytest.mark.parametrize(("make", "step_of"), [(made, take), (made_owning, take), (made, first_dropping)])
def test_a_longer_batch_is_planned_for_and_shorter_ones_follow_that_plan(
    tmp_path: Path, make: Any, step_of: Any
) -> None:
    """Before, each of them went without a plan, until three came in a row."""
    model_alone, optimizer_alone = make()
    model, optimizer = make()
    budget = int(need_of(make, step_of, LONG) * 0.75)
    longest = LENGTHS[0]
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "256MiB")], **SMALL) as off:
        for step, rows in enumerate(LENGTHS):
            followed = len(off.steps)
            with PeakMemory(model, optimizer) as memory, off.step():
                found = told(step_of(model, optimizer, step, rows))
            assert found == told(step_of(model_alone, optimizer_alone, step, rows))
            assert memory.peak_bytes <= budget
            if step >= 2:
                assert [facts.lost for facts in off.steps[followed:]] == [rows > longest], (step, rows)
            longest = max(longest, rows)
        assert off.choice is not None
        assert off.choice.plan.moves
        assert off.report().over_bytes == 0
    assert same(model, model_alone)


def test_a_batch_that_no_plan_can_keep_takes_no_plan_from_the_others(tmp_path: Path) -> None:
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    budget = int(need_bytes() * 0.75)
    lengths = [ROWS] * WATCHED + [8 * ROWS, ROWS, 9 * ROWS, ROWS, 8 * ROWS, ROWS]
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "256MiB")], **SMALL) as off:
        for step, rows in enumerate(lengths):
            with off.step():
                found = take(model, optimizer, step, rows)
            assert found == take(model_alone, optimizer_alone, step, rows)
            if step >= 2:
                assert off.steps[-1].lost == (rows > ROWS)
        assert len(lengths) > WATCHED + PATIENCE
    assert same(model, model_alone)


def test_a_longer_step_that_fails_leaves_the_plan(tmp_path: Path) -> None:
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    budget = int(need_of(made, take, LONG) * 0.75)
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "256MiB")], **SMALL) as off:
        for step in range(WATCHED + 6):
            rows = ROWS if step < WATCHED + 3 else LONG
            if step in (WATCHED + 1, WATCHED + 4):
                with pytest.raises(ZeroDivisionError), off.step():
                    raise ZeroDivisionError(loss_of(model, step, LONG).item())
            with off.step():
                found = take(model, optimizer, step, rows)
            assert found == take(model_alone, optimizer_alone, step, rows)
        assert not off.steps[-1].lost
    assert not torch._C._len_torch_dispatch_stack()
    assert same(model, model_alone)
