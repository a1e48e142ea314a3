"""Tensors that are away, and whoever comes for them by ways that are not the step's: they find them as they were."""

from __future__ import annotations

import copy
import ctypes
import errno
import io
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from forebay.core.errors import Corrupt, ForebayError, Invalid, NotSupported
from forebay.offload import DiskTier, Offload
from forebay.offload.tracing.storages import storage_of
from tests.torch.offload.memory import PeakMemory
from tests.torch.offload.programs import (
    FEW,
    STEPS,
    Take,
    budget_of,
    compare,
    evaluated,
    left,
    loss_of,
    no_norms,
    of,
    of_few_rows,
    plain,
    run,
    times_of_a_table,
    told,
    without_state,
)
from tests.torch.offload.test_engine import ROWS, SMALL, WATCHED, WIDTH, batch, made

Make = Callable[[], tuple[Any, Any]]


def is_away(tensor: Any) -> bool:
    return not storage_of(tensor).nbytes()


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """Some steps of a program by plan, and one evaluation after which weights are away."""
    opened: list[Offload] = []

    def begun(make: Make, take: Take, share: float, **how: Any) -> Offload:
        budget = budget_of(make, take, share)
        torch.manual_seed(11)
        model, optimizer = make()
        tier = DiskTier([tmp_path], "64MiB", **how)
        with times_of_a_table():
            opened.append(Offload(model, optimizer, budget=budget, tiers=[tier], **SMALL))
            for step in range(WATCHED + 2):
                with opened[-1].step():
                    take(model, optimizer, step)
        return opened[-1]

    yield begun
    for off in opened:
        off.close()


def states(optimizer: Any) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


# --- saving ----------------------------------------------------------------------------------------------------------
def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch.save": (saved, lambda file: torch.load(file, weights_only=False)),
    "pickle": (pickle.dumps, pickle.loads),
    "to another process": (ForkingPickler.dumps, ForkingPickler.loads),
    "deepcopy": (copy.deepcopy, lambda copied: copied),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["between steps", "within a step"])
def test_the_state_of_an_optimizer_is_saved_as_it_is(trained: Any, way: str, when: str) -> None:
    write, read = WAYS[way]
    off = trained(made, of_few_rows, 0.4)
    if way == "to another process":  # it would be shared with it otherwise
        write = lambda value: WAYS[way][0]([tensor.clone() for tensor in value])  # noqa: E731
    if when == "within a step":
        with off.step():
            of_few_rows(off.model, off.optimizer, 99)
            assert any(map(is_away, states(off.optimizer)))
            written = write(states(off.optimizer))
    else:
        assert any(map(is_away, states(off.optimizer)))
        written = write(states(off.optimizer))
    off.close()
    found = read(written)
    assert all(torch.equal(one, other) for one, other in zip(found, states(off.optimizer), strict=True))
    assert any(value.norm() > 0 for value in found)


def test_a_state_is_saved_in_a_step_without_a_plan(tmp_path: Path) -> None:
    """What torch has asked for stays until the step is over: torch writes it all at the end."""
    budget = budget_of(made, of_few_rows, 0.4)
    model, optimizer = made()
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        with off.step():
            of_few_rows(model, optimizer, 0)
            written = saved([*model.parameters(), *states(optimizer)])
    found = torch.load(written)
    assert all(map(torch.equal, found, [*model.parameters(), *states(optimizer)]))


def test_arrays_of_other_libraries_stay_over_their_weights(trained: Any) -> None:
    off = trained(without_state, of_few_rows, 0.5)
    arrays = [np.from_dlpack(parameter.detach()) for parameter in off.model.parameters()]
    for step in range(3):
        with off.step():
            of_few_rows(off.model, off.optimizer, step)
        evaluated(off.model, off.optimizer, step)
    assert not any(map(is_away, off.model.parameters()))
    for array, parameter in zip(arrays, off.model.parameters(), strict=True):
        assert array.ctypes.data == parameter.data_ptr()
        assert np.array_equal(array, parameter.detach().clone().numpy())


def test_weights_are_shared_while_they_are_on_their_way_to_a_disk(tmp_path: Path) -> None:
    """Their memory is let go of then, and the disk's worker reads it."""
    asked: list[float] = []

    def slowly(fd: int, buffers: Any, at: int) -> int:
        for _ in asked:
            time.sleep(0.02)
        return os.pwritev(fd, buffers, at)

    def after(model: Any, optimizer: Any, step: int) -> None:
        if step == WATCHED + 1 and isinstance(model[0].up.weight, nn.Parameter):
            model.share_memory()

    expected, expected_left = run(without_state, of_few_rows, after, STEPS)
    budget = budget_of(without_state, of_few_rows, 0.5)
    torch.manual_seed(11)
    model, optimizer = without_state()
    tier = DiskTier([tmp_path], "64MiB", pwritev=slowly)
    with Offload(model, optimizer, budget=budget, tiers=[tier], **SMALL) as off:
        found = []
        for step in range(STEPS):
            asked[:] = [0.0] if step == WATCHED + 1 else []
            with off.step():
                found.append(told(of_few_rows(model, optimizer, step)))
            found.append(told(after(model, optimizer, step)))
    assert found == expected
    assert dict(left(model, optimizer)) == expected_left


def test_parameters_that_are_swapped_when_a_state_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses that if anybody holds a weak reference to one."""
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)

    def after(model: Any, optimizer: Any, step: int) -> None:
        if step == WATCHED + 1:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})

    compare(without_state, of_few_rows, tmp_path, share=0.55, after=after, may_be_lost=True, steps=STEPS + 3)


# --- writing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", range(4))
def test_weights_that_share_a_storage_are_written_one_by_one(tmp_path: Path, which: int) -> None:
    def make() -> tuple[Any, Any]:
        model, _ = made()
        held = list(model[1].parameters())
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in held])
        begin = 0
        for parameter in held:
            parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def after(model: Any, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            list(model[1].parameters())[which].mul_(0.9)

    compare(make, of_few_rows, tmp_path, share=0.6, after=after)


def test_an_alias_that_was_taken_once_is_written_much_later(tmp_path: Path) -> None:
    aliases: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def make() -> tuple[Any, Any]:
        model, optimizer = without_state()
        aliases[model] = [parameter.data for parameter in model.parameters()]
        return model, optimizer

    def after(model: Any, optimizer: Any, step: int) -> None:
        for alias in aliases[model]:
            alias.mul_(0.99)
        evaluated(model, optimizer, step)

    compare(make, of_few_rows, tmp_path, share=0.5, after=after)


def test_a_scaler_and_another_optimizer_between_steps(tmp_path: Path) -> None:
    """Torch does not count what they write."""
    scalers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    others: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def make() -> tuple[Any, Any]:
        model, _ = made(6)
        optimizer = torch.optim.SGD([*model[:3].parameters(), *model[4:].parameters()], lr=1e-2)
        scalers[optimizer] = torch.amp.GradScaler("cpu", init_scale=1024.0)
        others[optimizer] = torch.optim.SGD(model[3].parameters(), lr=1e-2, fused=True)
        return model, optimizer

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        loss = loss_of(model, step, FEW)
        scalers[optimizer].scale(loss).backward()
        return [loss.item()]

    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        scaler = scalers[optimizer]
        scaler.unscale_(optimizer)
        found = [evaluated(model, optimizer, step).sum()]
        scaler.step(optimizer)
        scaler.unscale_(others[optimizer])
        others[optimizer].step()
        found.append(evaluated(model, optimizer, step).sum())
        scaler.update()
        model.zero_grad()
        return found

    compare(make, take, tmp_path, share=0.6, after=after)


def test_an_error_in_the_midst_of_whole_loses_no_write(tmp_path: Path) -> None:
    """What writes there is seen by nobody: here it goes by address."""

    def scale(model: Any) -> None:
        for weight in model[2].parameters():
            memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
            np.frombuffer(memory, np.float32)[:] *= np.float32(0.9)

    def failing(model: Any) -> None:
        scale(model)
        raise ZeroDivisionError

    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        scale(model)
        return [evaluated(model, optimizer, step)]

    expected, expected_left = run(without_state, of_few_rows, after, STEPS)
    budget = budget_of(without_state, of_few_rows, 0.5)
    torch.manual_seed(11)
    model, optimizer = without_state()
    found = []
    with Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        for step in range(STEPS):
            with off.step():
                found.append(told(of_few_rows(model, optimizer, step)))
            with pytest.raises(ZeroDivisionError), off.whole():
                failing(model)
            found.append(told([evaluated(model, optimizer, step)]))
        assert off.report().read_bytes
    assert found == expected
    assert dict(left(model, optimizer)) == expected_left


@pytest.mark.parametrize("kind", ["a weight", "what does not move", "what moves"])
def test_writing_what_is_saved_is_an_error_as_it_is_without(trained: Any, kind: str) -> None:
    def wrong(model: Any) -> None:
        x, y = batch(3)
        if kind == "a weight":
            loss = functional.cross_entropy(model(x), y)
            with torch.no_grad():
                model[1].up.weight.mul_(0.5)
        else:
            kept = model[0](x).exp() if kind == "what moves" else model[0](x)[:4, :4].exp()
            loss = (kept * kept).sum()
            kept.mul_(2)
        loss.backward()

    model, _ = made()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong(model)
    off = trained(made, plain, 0.6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), off.step():
        wrong(off.model)


# --- looking ---------------------------------------------------------------------------------------------------------
def test_functions_that_wrap_tensors_and_attributes_that_are_views(tmp_path: Path) -> None:
    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        evaluated(model, optimizer, step)
        weight, x = model[1].up.weight, batch(step, 8)[0]
        held = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(weights: Any, row: Any) -> Any:
            return torch.func.functional_call(model, weights, (row[None],)).square().sum()

        return [
            weight.T.sum(),
            model[2].down.weight.mT.norm(),
            torch.func.vmap(lambda row: functional.linear(row, weight).sum())(x),
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(held, x)["3.up.weight"].sum(),
            torch.func.jacrev(lambda weight: functional.linear(x[:1], weight).sum())(weight.detach()).sum(),
        ]

    compare(without_state, of_few_rows, tmp_path, share=0.5, after=after)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_an_encoder_with_a_mask_is_evaluated_between_steps(tmp_path: Path) -> None:
    """Torch packs the rows to tensors that are none of the usual kind."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3)

        def forward(self, x: Any) -> Any:
            x = x.unflatten(0, (8, -1))
            mask = torch.zeros(x.shape[:2], dtype=torch.bool)
            mask[:, -3:] = True
            y = self.encoder(x, src_key_padding_mask=mask)
            y = functional.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))
            return y.masked_fill(mask[..., None], 0).flatten(0, 1)

    compare(of(Encoder), plain, tmp_path, share=0.6, after=evaluated)


def test_an_evaluation_that_is_interrupted(trained: Any) -> None:
    off = trained(without_state, of_few_rows, 0.5)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = off.model[2].register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        off.model(batch(1)[0])
    handle.remove()
    expected = [parameter.detach().clone() for parameter in off.model.parameters()]
    for step in range(3):
        with off.step():
            of_few_rows(off.model, off.optimizer, step)
    evaluated(off.model, off.optimizer, 1)
    assert any(map(is_away, off.model.parameters()))
    norms = [float(parameter.detach().norm()) for parameter in off.model.parameters()]
    assert norms != [float(parameter.norm()) for parameter in expected]
    assert not any(facts.lost for facts in off.steps)


# --- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("take", [of_few_rows, no_norms])
@pytest.mark.parametrize("share", [0.5, 0.6])
def test_weights_do_not_come_while_gradients_are_still_there(tmp_path: Path, take: Take, share: float) -> None:
    """`zero_grad` looks at weights, but not at their bytes; in one program a list holds the gradients for longer."""
    budget = budget_of(without_state, take, share)
    model, optimizer = without_state()
    with (
        times_of_a_table(),
        Offload(model, optimizer, budget=budget, tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off,
    ):
        peaks = []
        for step in range(STEPS):
            with PeakMemory(model, optimizer) as memory, off.step():
                take(model, optimizer, step)
            peaks.append(memory.peak_bytes)
        assert off.report().moves
    assert [peak for peak in peaks if peak > budget] == []


def test_a_larger_batch_in_a_dictionary_is_seen(tmp_path: Path) -> None:
    class OfDictionaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = made()

        def forward(self, given: dict[str, Any]) -> Any:
            return self.inner(given["x"])

    def take(rows: int, step: int) -> None:
        x, y = batch(step, rows)
        functional.cross_entropy(model({"x": x}), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = OfDictionaries()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Offload(model, optimizer, budget="5632KiB", tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        for step in range(3):
            with off.step():
                take(ROWS // 4, step)
        assert off.choice is not None
        assert not off.choice.plan.moves, "it all fits"
        for step in range(WATCHED + 2):
            with off.step():
                take(4 * ROWS, step)
        assert off.report().moves


# --- what is refused, and what goes wrong ----------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(NotSupported, match=r"torch\.jit\.script made takes no hooks \(1\)"):
        Offload(model, optimizer, budget="1GiB", tiers=[DiskTier([tmp_path], "64MiB")])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"budget": 0}, "the budget of 0"),
        ({"budget": None}, "the budget of None"),
        ({"budget": 1e9}, "the budget of 1000000000.0"),
        ({"budget": True}, "the budget of True"),
        ({"chunk_bytes": 0}, "chunk_bytes of 0"),
        ({"chunk_bytes": "1MiB"}, "chunk_bytes of '1MiB'"),
        ({"size_bytes_min": -1}, "size_bytes_min of -1"),
        ({"tiers": ["/tmp"]}, "tiers are a list"),
        ({"tiers": []}, "give one disk tier"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, how: dict[str, Any], told: str) -> None:
    model, optimizer = made()
    given = {"budget": "1GiB", "tiers": [DiskTier([tmp_path], "64MiB")]} | how
    with pytest.raises(Invalid, match=told):
        Offload(model, optimizer, **given)


def test_a_step_in_which_nothing_is_done_is_not_the_profiled_one(tmp_path: Path) -> None:
    model, optimizer = made()
    with Offload(model, optimizer, budget="3584KiB", tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        for step in range(STEPS):
            with off.step():
                if step not in (1, 2):
                    plain(model, optimizer, step)
        assert off.report().moves


def test_it_is_not_closed_within_a_step(trained: Any) -> None:
    off = trained(made, plain, 0.6)
    with pytest.raises(Invalid, match="in the middle of a step"), off.step():
        off.close()
    off.close()
    assert not any(map(is_away, off.model.parameters()))


def test_a_disk_that_cannot_be_read_when_it_is_closed(trained: Any, tmp_path: Path) -> None:
    broken: list[int] = []

    def preadv(fd: int, buffers: Any, at: int) -> int:
        if broken:
            raise OSError(broken[0], "broken")
        return os.preadv(fd, buffers, at)

    off = trained(made, of_few_rows, 0.4, preadv=preadv)
    broken.append(errno.EIO)
    with pytest.raises(ForebayError):
        off.close()
    off.close()
    assert os.listdir(tmp_path) == []
    assert not off.model._forward_pre_hooks
    assert "step" not in vars(off.optimizer)

    off = trained(made, of_few_rows, 0.4, preadv=preadv) if not broken.clear() else off
    broken.append(errno.EIO)
    with pytest.raises(ZeroDivisionError) as raised, off:
        raise ZeroDivisionError
    assert "could not be brought back" in raised.value.__notes__[0]
    assert not isinstance(raised.value.__context__, Corrupt)
