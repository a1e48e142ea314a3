"""What goes over all gradients between the passes is done in parts, so it needs no more memory than the rest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from forebay.offload import DiskTier, Offload
from forebay.offload.tracing.between import BETWEEN, Between
from tests.torch.offload.memory import PeakMemory
from tests.torch.offload.programs import FEW, left, loss_of, told
from tests.torch.offload.test_engine import CHUNK_BYTES, SMALL, WATCHED, made

BLOCKS = 6
STEPS = WATCHED + 4
make = partial(made, BLOCKS)


def clipped(model: Any, optimizer: Any, step: int, *, foreach: bool, scaler: Any = None) -> list[Any]:
    loss = loss_of(model, step, FEW)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
    (optimizer if scaler is None else scaler).step(*(() if scaler is None else (optimizer,)))
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()
    return [loss.item(), norm]


def gradient_bytes() -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in make()[0].parameters())


@pytest.mark.parametrize("way", ["one by one", "as a list", "with a scaler"])
def test_clipping_and_unscaling_need_no_more_than_a_chunk(tmp_path: Path, way: str) -> None:
    """Before, all gradients had to be there at once: a budget below that was refused."""
    scalers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        scaler = scalers.setdefault(optimizer, torch.amp.GradScaler("cpu")) if way == "with a scaler" else None
        return told(clipped(model, optimizer, step, foreach=way != "one by one", scaler=scaler))

    torch.manual_seed(11)
    model, optimizer = make()
    expected = [take(model, optimizer, step) for step in range(STEPS)]
    left_alone = dict(left(model, optimizer))
    torch.manual_seed(11)
    model, optimizer = make()
    budget = gradient_bytes() - CHUNK_BYTES
    found, peaks = [], []
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "256MiB")], **SMALL) as off:
        for step in range(STEPS):
            with PeakMemory(model, optimizer) as memory, off.step():
                found.append(take(model, optimizer, step))
            peaks.append(memory.peak_bytes)
        assert off.choice is not None
        assert off.trace is not None
        assert sum(name.startswith(BETWEEN) for name in off.trace.point_names) > 4
        assert not any(facts.lost for facts in off.steps)
    assert found == expected
    assert dict(left(model, optimizer)) == left_alone
    assert max(peaks) <= budget


def test_what_is_logged_now_and_then_is_no_other_step_and_keeps_the_budget(tmp_path: Path) -> None:
    """In some steps more is done between the passes than was profiled, in some less: the plan is followed in all."""

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        loss = loss_of(model, step, FEW)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if step % 3 or step < WATCHED else 0.0
        norms = torch._foreach_norm([p.grad for p in model.parameters()]) if step > WATCHED and step % 2 else ()
        optimizer.step()
        optimizer.zero_grad()
        return told([loss.item(), norm, list(norms)])

    steps = WATCHED + 12
    model, optimizer = make()
    expected = [take(model, optimizer, step) for step in range(steps)]
    left_alone = dict(left(model, optimizer))
    model, optimizer = make()
    budget = gradient_bytes() - CHUNK_BYTES
    found, peaks = [], []
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "256MiB")], **SMALL) as off:
        for step in range(steps):
            with PeakMemory(model, optimizer) as memory, off.step():
                found.append(take(model, optimizer, step))
            peaks.append(memory.peak_bytes)
        assert not any(facts.lost for facts in off.steps)
    assert found == expected
    assert dict(left(model, optimizer)) == left_alone
    assert max(peaks) <= budget


def test_a_call_over_a_list_goes_in_parts_with_points_between_them() -> None:
    reached: list[int] = []
    calls: list[int] = []
    between = Between(lambda: (reached.append(len(calls)), between.begin())[1], chunk_bytes=100)
    between.begin()

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        calls.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **kwargs)

    tensors = [torch.full((count,), float(count)) for count in (5, 5, 5, 10, 60, 1, 2)]  # 4 bytes each
    norms = between.run(torch._foreach_norm, (tensors,), {}, call)
    assert calls == [100, 240, 12][: len(calls)] or calls == [60, 40, 240, 12]
    assert torch.equal(torch.stack(list(norms)), torch.stack(list(torch._foreach_norm(tensors))))
    assert len(reached) == len(calls) - 1
    before = [tensor.clone() for tensor in tensors]
    between.run(torch._foreach_addcmul_, (tensors, before, before), {"value": 0.5}, call)
    assert all(torch.equal(now, was + 0.5 * was * was) for now, was in zip(tensors, before, strict=True))
    numbers = torch.arange(7.0)  # one for each of the list: not in parts
    calls.clear()
    between.run(torch._foreach_addcmul_, (tensors, before, before, numbers), {}, call)
    assert len(calls) == 1
