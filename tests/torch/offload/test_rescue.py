"""Planned steps on a device whose allocator has no room although the plan keeps its budget. Stand-in: no device is
here, an operator of our own says what an allocator would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.offload import DiskTier, Offload, rescue
from tests.torch.offload.programs import told
from tests.torch.offload.stand_in import stand_in
from tests.torch.offload.test_engine import SMALL, WATCHED, batch, made, need_bytes, same

refusals: list[int] = []  # how many are left
away: list[Callable[[], int]] = []  # says how many bytes are away
seen: list[int] = []  # of it, at each refusal and at what came after them


@torch.library.custom_op("forebay_tests::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    seen.extend(each() for each in away)
    if refusals and refusals[0]:
        refusals[0] -= 1
        raise torch.OutOfMemoryError("no memory for this one")
    return x.clone()


greedy.register_autograd(lambda context, gradient: gradient)


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    for each in (refusals, away, seen):
        each.clear()


def take(model: Any, optimizer: Any, step: int, refused: int = 0) -> list[Any]:
    x, y = batch(step)
    refusals[:] = [refused]
    loss = nn.functional.cross_entropy(greedy(model(x)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return told(loss.item())


def test_an_operator_of_a_planned_step_is_run_again_when_more_has_left(tmp_path: Path) -> None:
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    with (
        stand_in(),
        Offload(
            model, optimizer, budget=int(need_bytes() * 0.75), tiers=[DiskTier([tmp_path], "256MiB")], **SMALL
        ) as off,
    ):
        for step in range(WATCHED + 3):
            refused = 2 if step == WATCHED + 1 else 0
            with off.step():
                away[:] = [lambda: off._books.away_bytes] if refused else []
                found = take(model, optimizer, step, refused)
            away.clear()
            assert found == take(model_alone, optimizer_alone, step)
            assert step < 2 or not off.steps[-1].lost
        assert off._rescue.rescued == 2
        assert len(seen) == 3
        assert seen == sorted(set(seen)), "each time something else has left"
    assert same(model, model_alone)
    assert not torch._C._len_torch_dispatch_stack()


def test_a_step_that_fails_for_memory_says_what_to_do_and_the_next_is_rescued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "STEPS", 0)
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    with (
        stand_in(),
        Offload(
            model, optimizer, budget=int(need_bytes() * 0.75), tiers=[DiskTier([tmp_path], "256MiB")], **SMALL
        ) as off,
    ):
        for step in range(WATCHED + 1):
            with off.step():
                found = take(model, optimizer, step)
            assert found == take(model_alone, optimizer_alone, step)
        with pytest.raises(torch.OutOfMemoryError) as failed, off.step():
            take(model, optimizer, WATCHED + 1, 1)
        assert "take it again" in "".join(failed.value.__notes__)
        optimizer.zero_grad()
        with off.step():
            found = take(model, optimizer, WATCHED + 1, 2)
        assert found == take(model_alone, optimizer_alone, WATCHED + 1)
        assert off._rescue.rescued == 2
    assert same(model, model_alone)


def test_an_allocator_that_comes_to_be_short_is_noticed_before_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps grow over many steps. It gives back what it kept, and finds room: the next time it may find none."""
    monkeypatch.setattr(rescue, "STEPS", 1)
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    with (
        stand_in() as device,
        Offload(
            model, optimizer, budget=int(need_bytes() * 0.75), tiers=[DiskTier([tmp_path], "256MiB")], **SMALL
        ) as off,
    ):
        for step in range(WATCHED + 5):
            device.short += step == WATCHED + 2
            with off.step():
                found = take(model, optimizer, step, int(step == WATCHED + 2))
            assert found == take(model_alone, optimizer_alone, step)
            assert step < WATCHED + 1 or off.steps[-1].watched == (step in (WATCHED + 2, WATCHED + 3))
        assert off._rescue.rescued == 1
    assert same(model, model_alone)


def test_rescue_stays_as_long_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator that was short in the first steps of a plan is so in later ones: these do not fail."""
    monkeypatch.setattr(rescue, "STEPS", 2)
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    with (
        stand_in(),
        Offload(
            model, optimizer, budget=int(need_bytes() * 0.75), tiers=[DiskTier([tmp_path], "256MiB")], **SMALL
        ) as off,
    ):
        for step in range(WATCHED + 8):
            refused = int(step >= WATCHED and step % 2 == 0)
            with off.step():
                found = take(model, optimizer, step, refused)
            assert found == take(model_alone, optimizer_alone, step)
        assert off._rescue.rescued == 4
        for step in range(2):
            assert off._rescue._left, "it may be needed still"
            with off.step():
                take(model, optimizer, step)
        assert not off._rescue._left, "then it goes"
    assert not torch._C._len_torch_dispatch_stack()
