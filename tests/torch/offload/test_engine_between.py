"""`Offload` between steps and in steps that differ: what programs do there they may do with it, to the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.nn import functional

from forebay.offload import DiskTier, Offload
from tests.torch.offload.programs import (
    FEW,
    STEPS,
    compare,
    evaluated,
    left,
    loss_of,
    no_norms,
    of,
    plain,
    without_state,
)
from tests.torch.offload.test_engine import CLASSES, SMALL, WATCHED, WIDTH, Block, batch, made


# --- between steps ---------------------------------------------------------------------------------------------------
def test_an_average_of_the_weights_is_kept_beside_them(tmp_path: Path) -> None:
    averages: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def average(model: Any, optimizer: Any, step: int) -> list[Any]:
        if model not in averages:
            averages[model] = copy.deepcopy(model).requires_grad_(False)
        mine = averages[model]
        torch._foreach_lerp_(list(mine.parameters()), [weight.detach() for weight in model.parameters()], 0.1)
        return [*mine.parameters()] if step == STEPS - 1 else []

    compare(made, plain, tmp_path, after=average)


def test_a_copy_of_the_whole_model_between_steps(tmp_path: Path) -> None:
    def copied(model: Any, optimizer: Any, step: int) -> list[Any]:
        other = copy.deepcopy(model)
        return [nn.utils.parameters_to_vector(other.parameters()).norm(), other(batch(step)[0])]

    compare(made, plain, tmp_path, after=copied)


def test_a_copy_that_teaches_from_then_on(tmp_path: Path) -> None:
    """The model as it was is run in every step after it was copied."""
    teachers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def copied(model: Any, optimizer: Any, step: int) -> None:
        if step == WATCHED + 1:
            teachers[model] = copy.deepcopy(model).requires_grad_(False)

    def take(model: Any, optimizer: Any, step: int) -> float:
        x, y = batch(step)
        out = model(x)
        loss = functional.cross_entropy(out, y)
        if model in teachers:
            loss = loss + (out - teachers[model](x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    off = compare(made, take, tmp_path, after=copied, steps=3 * WATCHED + 2, may_be_lost=True)
    assert not off.steps[-1].lost


def test_a_model_that_is_saved_as_an_object(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()

    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        if step % 4:
            return []
        torch.save(model, tmp_path / "model")
        return [*torch.load(tmp_path / "model", weights_only=False).parameters()]

    compare(made, plain, tmp_path / "disk", after=after)


def test_a_state_that_is_loaded_on_the_way(tmp_path: Path) -> None:
    """Back to what was three steps before, twice."""
    states: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def after(model: Any, optimizer: Any, step: int) -> None:
        kept = states.setdefault(optimizer, [])
        kept.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        if step in (WATCHED + 1, WATCHED + 4):
            model.load_state_dict(kept[-3][0])
            optimizer.load_state_dict(kept[-3][1])

    compare(made, plain, tmp_path, after=after, steps=STEPS + 3)


def test_weights_changed_in_place_between_steps(tmp_path: Path) -> None:
    def after(model: Any, optimizer: Any, step: int) -> None:
        if step % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
            torch._foreach_clamp_max_([parameter.detach() for parameter in model.parameters()], 0.5)

    compare(made, plain, tmp_path, after=after)


def test_weights_clamped_through_data_between_steps(tmp_path: Path) -> None:
    """As the first Wasserstein networks were: torch does not count what is written this way."""

    def after(model: Any, optimizer: Any, step: int) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.02, 0.02)

    compare(without_state, no_norms, tmp_path, share=0.6, after=after, moving="parameter")


# --- steps that differ -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["before the forward", "after the backward", "after the update"])
def test_a_forward_without_gradients_in_a_step_now_and_then(tmp_path: Path, where: str) -> None:
    def looked(model: Any, optimizer: Any, step: int, here: str) -> Any:
        return evaluated(model, optimizer, step).sum() if here == where and step in (WATCHED + 1, WATCHED + 3) else 0

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        found = [looked(model, optimizer, step, "before the forward")]
        loss = loss_of(model, step)
        loss.backward()
        found.append(looked(model, optimizer, step, "after the backward"))
        optimizer.step()
        found.append(looked(model, optimizer, step, "after the update"))
        optimizer.zero_grad()
        return [loss.item(), *found]

    compare(made, take, tmp_path, may_be_lost=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_is_given_up_now_and_then(tmp_path: Path, where: str) -> None:
    """As programs do that run out of memory or see a number that is none: it is caught within the step."""

    def trip(*_: Any) -> None:
        raise ArithmeticError("no number")

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        bad = step in (WATCHED + 1, WATCHED + 4)
        handles = [model[1].register_forward_hook(trip)] if bad and where == "forward" else []
        try:
            loss = loss_of(model, step, FEW)
            if bad:
                handles.append(model[1].up.weight.register_hook(trip))
            loss.backward()
            optimizer.step()
            return [loss.item()]
        except ArithmeticError:
            return ["given up"]
        finally:
            optimizer.zero_grad()
            for handle in handles:
                handle.remove()

    compare(
        *(without_state, take, tmp_path),
        share=0.6,
        steps=STEPS + 2,
        moving="gradient",
        may_be_lost=True,
    )


@pytest.mark.parametrize("none", [True, False], ids=["to none", "to zeros"])
def test_an_update_that_is_left_out_now_and_then(tmp_path: Path, none: bool) -> None:
    """Gradients are dropped, or written, that were away and that nobody used."""

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        loss = loss_of(model, step, FEW)
        loss.backward()
        if step not in (WATCHED + 1, WATCHED + 4):
            optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        return [loss.item()]

    compare(
        *(without_state, take, tmp_path),
        share=0.6,
        steps=STEPS + 2,
        moving="gradient",
        may_be_lost=True,
    )


def test_a_layer_that_is_left_out_now_and_then(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        x, y = batch(step)
        for number, layer in enumerate(model):
            x = x if number == 2 and step in (WATCHED + 1, WATCHED + 4) else layer(x)
        loss = functional.cross_entropy(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item()]

    compare(made, take, tmp_path, may_be_lost=True, steps=STEPS + 2)


def test_layers_that_are_unfrozen_on_the_way(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model, _ = made()
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        return model, torch.optim.AdamW(model[2:].parameters(), lr=1e-2)

    def unfreeze(model: Any, optimizer: Any, step: int) -> None:
        if step in (WATCHED + 1, 2 * WATCHED + 6):
            block = model[1 if step == WATCHED + 1 else 0]
            block.requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 5e-3})

    off = compare(make, plain, tmp_path, after=unfreeze, steps=6 * WATCHED, may_be_lost=True)
    assert not off.steps[-1].lost


# --- two at once -----------------------------------------------------------------------------------------------------
def test_two_models_that_are_trained_in_turns(tmp_path: Path) -> None:
    """Each is in the other's steps: a generator and its critic, with an `Offload` for each."""

    def pair() -> list[tuple[Any, Any]]:
        made_here = of(*[Block] * 3), of(*[Block] * 3)
        models = [
            nn.Sequential(make()[0], nn.Linear(CLASSES, WIDTH if not at else 1)) for at, make in enumerate(made_here)
        ]
        return [(model, torch.optim.AdamW(model.parameters(), lr=1e-3)) for model in models]

    def teach(generator: Any, critic: Any, optimizer: Any, step: int) -> float:
        real, _ = batch(step)
        with torch.no_grad():
            false = generator(real.flip(0))
        loss = (critic(false) - critic(real)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def generate(generator: Any, critic: Any, optimizer: Any, step: int) -> float:
        loss = -critic(generator(batch(step)[0].flip(0))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        critic.zero_grad()
        return float(loss.item())

    (generator, first), (critic, second) = pair()
    expected = []
    for step in range(STEPS):
        expected.append(teach(generator, critic, second, step))
        expected.append(generate(generator, critic, first, step))
    state = [dict(left(generator, first)), dict(left(critic, second))]
    (generator, first), (critic, second) = pair()
    found = []
    with (
        Offload(generator, first, budget="2560KiB", tiers=[DiskTier([tmp_path], "128MiB")], **SMALL) as one,
        Offload(critic, second, budget="2560KiB", tiers=[DiskTier([tmp_path], "128MiB")], **SMALL) as other,
    ):
        for step in range(STEPS):
            with other.step():
                found.append(teach(generator, critic, second, step))
            with one.step():
                found.append(generate(generator, critic, first, step))
        assert one.report().moves
        assert other.report().moves
    assert found == expected
    assert [dict(left(generator, first)), dict(left(critic, second))] == state
