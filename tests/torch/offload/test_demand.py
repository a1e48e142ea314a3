"""Steps without a plan: the first ones, those of another shape, and passes between steps. All within the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forebay.offload import DiskTier, HostTier, Offload
from forebay.offload.tracing.between import BETWEEN
from forebay.offload.tracing.profile import Profiler
from tests.torch.offload.memory import PeakMemory
from tests.torch.offload.stand_in import stand_in
from tests.torch.offload.test_engine import (
    CHUNK_BYTES,
    CLASSES,
    ROWS,
    SMALL,
    WATCHED,
    WIDTH,
    alone,
    batch,
    made,
    need_bytes,
    same,
    take,
)


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier([tmp_path], "256MiB")


def peak_of(model: Any, optimizer: Any, work: Callable[[], object]) -> int:
    with PeakMemory(model, optimizer) as memory:
        work()
    return memory.peak_bytes


def in_a_step(off: Offload, work: Callable[[], object]) -> None:
    with off.step():
        work()


def test_the_first_steps_are_within_the_budget_and_so_is_the_one_that_is_profiled(disk: DiskTier) -> None:
    model, optimizer = made()
    budget = int(need_bytes() * 0.5)
    with Offload(model, optimizer, budget=budget, tiers=[disk], **SMALL) as off:
        for step in range(2):
            peak = peak_of(model, optimizer, lambda: in_a_step(off, lambda: take(model, optimizer, step)))  # noqa: B023
            assert peak <= budget
            assert disk.bytes_written > 0
    _, model_alone = alone(2)
    assert same(model, model_alone)


def test_a_trace_is_the_same_whether_tensors_moved_meanwhile_or_not(disk: DiskTier) -> None:
    model, optimizer = made()
    take(model, optimizer, 0)
    with Profiler(model, optimizer, chunk_bytes=SMALL["chunk_bytes"]) as profiler:
        take(model, optimizer, 1)
    expected = profiler.trace()
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.5), tiers=[disk], **SMALL) as off:
        for step in range(2):
            in_a_step(off, lambda: take(model, optimizer, step))  # noqa: B023
        assert off.trace is not None
        assert off.trace.operators == expected.operators
        names = [
            name for name in off.trace.point_names if not name.startswith(BETWEEN)
        ]  # it takes a guard to see those
        assert names == list(expected.point_names)
        held = [name for name in off.trace.tensors if name.endswith(", held")]
        assert len(held) == 2, "the batch and its labels, which the caller has until the step ends"
        names = [name.removesuffix(", held") for name in off.trace.tensors]
        assert sorted(names) == sorted(expected.tensors)
        assert np.array_equal(off.trace.need_bytes(), expected.need_bytes())
        assert np.array_equal(off.trace.active_bytes(), expected.active_bytes())


@pytest.fixture
def trained(disk: DiskTier) -> Any:
    """An engine that has followed its plan for a while, and the same model without one."""
    model, optimizer = made()
    model_alone, optimizer_alone = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.75), tiers=[disk], **SMALL) as off:
        for step in range(WATCHED + 2):
            in_a_step(off, lambda: take(model, optimizer, step))  # noqa: B023
            take(model_alone, optimizer_alone, step)
        yield off, model_alone, optimizer_alone
        with off.whole():
            assert same(model, model_alone)


def test_a_larger_batch_goes_without_the_plan_and_within_the_budget(trained: Any) -> None:
    off, model, optimizer = trained
    for step, rows in enumerate((2 * ROWS, ROWS, 9 * ROWS // 4, ROWS)):
        expected = take(model, optimizer, step, rows)
        found = []
        peak = peak_of(
            off.model,
            off.optimizer,
            lambda: in_a_step(off, lambda: found.append(take(off.model, off.optimizer, step, rows))),  # noqa: B023
        )
        assert found == [expected]
        assert peak <= off.budget_bytes
        assert off.steps[-1].lost == (rows > ROWS)
        assert not off.steps[-1].over_bytes


def test_where_all_fitted_a_larger_batch_is_noticed_and_kept_within_the_budget(disk: DiskTier) -> None:
    model, optimizer = made()
    model_alone, optimizer_alone = made()
    with Offload(model, optimizer, budget=need_bytes() + CHUNK_BYTES, tiers=[disk], **SMALL) as off:
        measuring = disk.bytes_written
        for step in range(4):
            in_a_step(off, lambda: take(model, optimizer, step))  # noqa: B023
            take(model_alone, optimizer_alone, step)
        assert off.choice is not None
        assert not off.choice.plan.moves
        assert disk.bytes_written == measuring
        for step in range(WATCHED + 2):
            expected = take(model_alone, optimizer_alone, step, 4 * ROWS)
            found = []
            peak = peak_of(
                model,
                optimizer,
                lambda: in_a_step(off, lambda: found.append(take(model, optimizer, step, 4 * ROWS))),  # noqa: B023
            )
            assert found == [expected]
            assert peak <= off.budget_bytes
        assert off.choice.plan.moves
    assert same(model, model_alone)


def test_one_more_pass_goes_without_the_plan_and_within_the_budget(trained: Any) -> None:
    off, model, optimizer = trained

    def thrice(model: Any, optimizer: Any) -> None:
        for part in range(3):
            x, y = batch(part)
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):  # seen in the middle, and from the third on profiled anew
        thrice(model, optimizer)
        peak = peak_of(off.model, off.optimizer, lambda: in_a_step(off, lambda: thrice(off.model, off.optimizer)))
        assert peak <= off.budget_bytes


def test_a_step_that_differs_in_its_backward_pass_alone_is_right(trained: Any) -> None:
    off, model, optimizer = trained

    def partly(model: Any, optimizer: Any) -> None:
        x, y = batch(3)
        hidden = model[:3](x)
        loss = nn.functional.cross_entropy(model[3:](hidden.detach().requires_grad_()), y)
        model[3:](hidden)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        partly(model, optimizer)
        in_a_step(off, lambda: partly(off.model, off.optimizer))
        assert off.steps[-1].lost


def test_an_evaluation_between_steps_is_within_the_budget(trained: Any) -> None:
    off, model, _ = trained
    assert off._books.away_bytes
    with torch.no_grad():
        expected = [model(batch(step)[0]) for step in range(3)]
        found: list[Any] = []
        peak = peak_of(off.model, off.optimizer, lambda: found.extend(off.model(batch(step)[0]) for step in range(3)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert peak <= off.budget_bytes
    assert not torch._C._len_torch_dispatch_stack()


def test_a_forward_with_gradients_between_steps_has_everything(trained: Any) -> None:
    off, model, _ = trained
    x, y = batch(5)
    nn.functional.cross_entropy(model(x), y).backward()
    nn.functional.cross_entropy(off.model(x), y).backward()
    with off.whole():
        pairs = zip(off.model.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    model.zero_grad()
    off.model.zero_grad()


def test_what_one_operator_needs_beyond_the_budget_it_takes_and_that_is_told(disk: DiskTier) -> None:
    """A step of another shape never fails for its memory here: it is on an accelerator that it may."""
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL) as off:
        for step in range(WATCHED + 1):
            in_a_step(off, lambda: take(model, optimizer, step))  # noqa: B023
        in_a_step(off, lambda: take(model, optimizer, 0, 32 * ROWS))
        assert off.steps[-1].lost
        assert off.steps[-1].over_bytes > 0
        in_a_step(off, lambda: take(model, optimizer, 0))
        assert not off.steps[-1].lost


def test_a_failing_forward_between_steps_leaves_nothing_behind(trained: Any) -> None:
    off, _, _ = trained
    with torch.no_grad(), pytest.raises(RuntimeError):
        off.model(torch.randn(3, WIDTH + 1))
    assert not torch._C._len_torch_dispatch_stack()
    with torch.no_grad():
        assert off.model(torch.randn(3, WIDTH)).shape == (3, CLASSES)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_on_a_device_that_copies_when_it_comes_to_it_the_numbers_are_the_same(tier: str, tmp_path: Path) -> None:
    """Stand-in: no device is here. Host tensors count as a device's; copies are made later, in the order of streams."""
    expected, model_alone = alone(WATCHED + 4)
    model, optimizer = made()
    tiers = [HostTier("64MiB") if tier == "host" else DiskTier([tmp_path], "256MiB")]
    with stand_in() as device:
        with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=tiers, **SMALL) as off:
            found = []
            for step in range(WATCHED + 4):
                in_a_step(off, lambda: found.append(take(model, optimizer, step)))  # noqa: B023
            assert off.report().moves
        assert device.copies
    assert found == expected
    assert same(model, model_alone)


def test_an_operator_without_memory_is_run_again_when_more_has_left(disk: DiskTier) -> None:
    """As an accelerator's allocator says it, whose gaps nobody counts; here by an operator of our own."""
    model, optimizer = made()
    refused: list[int] = []

    @torch.library.custom_op("forebay_tests::hungry", mutates_args=())
    def hungry(x: torch.Tensor) -> torch.Tensor:
        if len(refused) < 3:
            refused.append(disk.bytes_written)
            raise torch.OutOfMemoryError("no memory for this one")
        return x.clone()

    hungry.register_autograd(lambda context, gradient: gradient)
    with Offload(model, optimizer, budget=need_bytes(), tiers=[disk], **SMALL) as off:
        with off.step():
            x, y = batch(0)
            nn.functional.cross_entropy(hungry(model(x)), y).backward()
        assert refused == sorted(set(refused)), "each time something else has left"
        model.zero_grad()
        model_alone, _ = made()
        with off.whole():
            assert same(model, model_alone)
