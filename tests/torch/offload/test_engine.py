"""Training under `Offload`: the same numbers in less memory, and what happens when something goes wrong."""

from __future__ import annotations

import copy
import errno
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.core.errors import Closed, ForebayError, Invalid, Unavailable
from forebay.offload import engine
from forebay.offload.engine import PATIENCE, PLAIN_STEPS, Offload
from forebay.offload.review import TIMED_STEPS
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.host_tier import HostTier
from forebay.offload.tracing.storages import storage_of
from tests.torch.offload.memory import PeakMemory

WATCHED = PLAIN_STEPS + 1 + TIMED_STEPS  # until the plan is one from times that nobody disturbed
WIDTH, CLASSES, ROWS = 128, 16, 128
KIB = 1 << 10
CHUNK_BYTES = 256 * KIB
SMALL: dict[str, Any] = {"size_bytes_min": 4 * KIB, "chunk_bytes": CHUNK_BYTES}


class Block(nn.Module):
    """A layer with a residual around it, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def made(blocks: int = 4, optimizer: Callable[..., Any] = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(WIDTH, CLASSES))
    return model, optimizer(model.parameters(), lr=1e-2)


def batch(step: int, rows: int = ROWS) -> tuple[Any, Any]:
    chance = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=chance), torch.randint(0, CLASSES, (rows,), generator=chance)


def take(model: Any, optimizer: Any, step: int, rows: int = ROWS) -> tuple[float, bytes]:
    """One step: its loss, and the gradients of the first weight."""
    x, y = batch(step, rows)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    gradient = next(model.parameters()).grad
    optimizer.step()
    told = loss.item(), gradient.numpy().tobytes() if gradient is not None else b""
    optimizer.zero_grad()
    return told


@functools.cache
def _alone(steps: int, optimizer: Callable[..., Any]) -> tuple[list[Any], tuple[Any, Any]]:
    model, used = made(optimizer=optimizer)
    return [take(model, used, step) for step in range(steps)], (model, used)


def alone(steps: int, optimizer: Callable[..., Any] = torch.optim.AdamW) -> tuple[list[Any], Any]:
    """What steps without `Offload` tell, and their model. Many ask for the same steps, and each has a copy."""
    found, (model, _) = _alone(steps, optimizer)
    return list(found), copy.deepcopy(model)


def trained_alone(steps: int) -> tuple[Any, Any]:
    """Model and optimizer after so many steps without `Offload`, to go on with."""
    _, pair = _alone(steps, torch.optim.AdamW)
    model, optimizer = copy.deepcopy(pair)
    return model, optimizer


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    return DiskTier([tmp_path], "256MiB")


@functools.cache
def need_bytes() -> int:
    """What a step of `made` needs, by count."""
    model, optimizer = made()
    for step in range(2):
        with PeakMemory(model, optimizer) as memory:
            take(model, optimizer, step)
    return memory.peak_bytes


def same(model: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


# --- the same numbers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "steps"), [(0.9, WATCHED + 8), (0.75, WATCHED + 8), (0.6, 50)])
def test_numbers_are_the_same_in_less_memory(disk: DiskTier, share: float, steps: int) -> None:
    expected, model_alone = alone(steps)
    model, optimizer = made()
    budget = int(need_bytes() * share)
    found, peaks = [], []
    with Offload(model, optimizer, budget=budget, tiers=[disk], **SMALL) as off:
        for step in range(steps):
            with PeakMemory(model, optimizer) as memory, off.step():
                found.append(take(model, optimizer, step))
            peaks.append(memory.peak_bytes)
        assert off.choice is not None
        assert off.choice.plan.moves
        assert disk.bytes_written > 0
        assert not any(facts.lost for facts in off.steps)
    assert found == expected
    assert same(model, model_alone)
    assert max(peaks) <= budget, "from the first step on"


def test_tensors_that_are_all_small_move_where_the_budget_asks_for_it(disk: DiskTier) -> None:
    """None has the size from which on tensors move by default: without moves the budget would be broken in silence."""
    expected, model_alone = alone(WATCHED + 2)
    model, optimizer = made()
    budget = int(need_bytes() * 0.7)
    found, peaks = [], []
    with Offload(model, optimizer, budget=budget, tiers=[disk], chunk_bytes=CHUNK_BYTES) as off:
        for step in range(WATCHED + 2):
            with PeakMemory(model, optimizer) as memory, off.step():
                found.append(take(model, optimizer, step))
            peaks.append(memory.peak_bytes)
        assert off.choice is not None
        assert off.choice.plan.moves
        assert off.report().over_bytes == 0
    assert found == expected
    assert same(model, model_alone)
    assert max(peaks) <= budget, "from the first step on"


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop])
def test_other_optimizers_too(disk: DiskTier, kind: Callable[..., Any]) -> None:
    expected, model_alone = alone(12, optimizer=kind)
    model, optimizer = made(optimizer=kind)
    with Offload(model, optimizer, budget="1280KiB", tiers=[disk], **SMALL) as off:
        found = []
        for step in range(12):
            with off.step():
                found.append(take(model, optimizer, step))
        assert off.report().written_bytes > 0
    assert found == expected
    assert same(model, model_alone)


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_an_optimizer_whose_writes_torch_does_not_count(disk: DiskTier, share: float) -> None:
    """Fused ones raise no version: a copy from before the step is not good after it."""

    def fused(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    rows = [3 * ROWS // 2 if step == WATCHED + 6 else ROWS for step in range(WATCHED + 12)]
    model, optimizer = made(optimizer=fused)
    with Offload(model, optimizer, budget=int(need_bytes() * share), tiers=[disk], **SMALL) as off:
        found = []
        for step, many in enumerate(rows):
            with off.step():
                found.append(take(model, optimizer, step, many))
            if step == WATCHED + 3:
                with off.whole():
                    pass
    model_alone, optimizer_alone = made(optimizer=fused)
    assert found == [take(model_alone, optimizer_alone, step, many) for step, many in enumerate(rows)]
    assert same(model, model_alone)


def test_into_host_memory() -> None:
    expected, model_alone = alone(12)
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.7), tiers=[HostTier("64MiB")], **SMALL) as off:
        found = []
        for step in range(12):
            with off.step():
                found.append(take(model, optimizer, step))
        assert off.report().read_bytes > 0
    assert found == expected
    assert same(model, model_alone)


def test_with_room_for_everything_nothing_moves(disk: DiskTier) -> None:
    model, optimizer = made()
    with Offload(model, optimizer, budget="1GiB", tiers=[disk], **SMALL) as off:
        written = disk.bytes_written
        for step in range(WATCHED + 3):
            with off.step():
                take(model, optimizer, step)
        assert disk.bytes_written == written
        assert "nothing moves" in str(off.report())


def test_accumulated_gradients_are_the_same(disk: DiskTier) -> None:
    def accumulated(model: Any, optimizer: Any, step: int) -> float:
        for half in range(2):
            x, y = batch(2 * step + half)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    model_alone, optimizer_alone = made()
    expected = [accumulated(model_alone, optimizer_alone, step) for step in range(12)]
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.75), tiers=[disk], **SMALL) as off:
        found = []
        for step in range(12):
            with off.step():
                found.append(accumulated(model, optimizer, step))
        assert off.report().steps > 3
    assert found == expected
    assert same(model, model_alone)


def test_clipping_sees_every_gradient(disk: DiskTier) -> None:
    def clipped(model: Any, optimizer: Any, step: int) -> float:
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    model_alone, optimizer_alone = made()
    expected = [clipped(model_alone, optimizer_alone, step) for step in range(12)]
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.75), tiers=[disk], **SMALL) as off:
        found = []
        for step in range(12):
            with off.step():
                found.append(clipped(model, optimizer, step))
    assert found == expected
    assert same(model, model_alone)


# --- between steps ---------------------------------------------------------------------------------------------------
def trained(off: Offload, steps: int, begin: int = 0) -> None:
    for step in range(begin, begin + steps):
        with off.step():
            take(off.model, off.optimizer, step)


@pytest.fixture
def off(disk: DiskTier) -> Iterator[Offload]:
    """One that has followed its plan for some steps."""
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL) as off:
        trained(off, WATCHED + 4)
        assert off._books.away_bytes > 0
        yield off


def test_a_state_that_is_saved_between_steps_is_whole(off: Offload, tmp_path: Path) -> None:
    _, model_alone = alone(WATCHED + 4)
    torch.save({"model": off.model.state_dict(), "optimizer": off.optimizer.state_dict()}, tmp_path / "state")
    saved = torch.load(tmp_path / "state")
    assert all(torch.equal(saved["model"][name], value) for name, value in model_alone.state_dict().items())
    assert all(
        value.untyped_storage().nbytes() for state in saved["optimizer"]["state"].values() for value in state.values()
    )


def test_an_evaluation_between_steps_sees_the_weights(off: Offload) -> None:
    _, model_alone = alone(WATCHED + 4)
    with torch.no_grad():
        assert torch.equal(off.model(batch(1)[0]), model_alone(batch(1)[0]))
    trained(off, 2, WATCHED + 4)
    _, model_alone = alone(WATCHED + 6)
    with off.whole():
        assert same(off.model, model_alone)


def test_weights_changed_by_hand_are_kept(off: Offload) -> None:
    model_alone, optimizer_alone = trained_alone(WATCHED + 4)
    with off.whole():
        for parameter in off.model.parameters():
            parameter.data.mul_(0.5)
    for parameter in model_alone.parameters():
        parameter.data.mul_(0.5)
    trained(off, 3, WATCHED + 4)
    for step in range(WATCHED + 4, WATCHED + 7):
        take(model_alone, optimizer_alone, step)
    with off.whole():
        assert same(off.model, model_alone)


def test_whoever_touches_what_is_away_has_it_brought(off: Offload) -> None:
    model_alone, optimizer_alone = trained_alone(WATCHED + 4)
    pairs = list(zip(off.model.parameters(), model_alone.parameters(), strict=True))
    pairs += [
        (state[key], optimizer_alone.state[theirs][key])
        for (ours, theirs) in list(pairs)
        for state, key in ((off.optimizer.state[ours], "exp_avg"), (off.optimizer.state[ours], "exp_avg_sq"))
    ]
    away = [(mine, theirs) for mine, theirs in pairs if not storage_of(mine).nbytes()]
    assert away
    for number, (mine, theirs) in enumerate(away):
        touch = (lambda t: t.sum(), lambda t: t.detach().clone(), lambda t: t.data + 0, lambda t: t.reshape(-1)[0])
        assert torch.equal(touch[number % 4](mine), touch[number % 4](theirs))


def test_a_norm_that_is_logged_now_and_then_is_right(off: Offload) -> None:
    """Not in the step that was profiled, and in the middle of one that follows the plan."""
    model_alone, _ = trained_alone(WATCHED + 5)
    with off.step():
        take(off.model, off.optimizer, WATCHED + 4)
        norms = [float(parameter.detach().norm()) for parameter in off.model.parameters()]
    assert norms == [float(parameter.detach().norm()) for parameter in model_alone.parameters()]


def test_the_guard_is_below_other_modes_and_goes_without_them(disk: DiskTier) -> None:
    model, optimizer = made()
    depth = torch._C._len_torch_function_stack()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL) as off:
        with torch.device("cpu"):
            trained(off, WATCHED + 2)
            assert torch._C._len_torch_function_stack() == depth + 2
        assert torch._C._len_torch_function_stack() == depth + 1
        trained(off, 1, WATCHED + 2)
    assert torch._C._len_torch_function_stack() == depth


def test_close_leaves_model_and_optimizer_as_they_were(disk: DiskTier) -> None:
    model, optimizer = made()
    off = Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL)
    trained(off, WATCHED + 3)
    off.close()
    off.close()
    assert all(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    assert "step" not in vars(optimizer)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    take(model, optimizer, WATCHED + 3)
    _, model_alone = alone(WATCHED + 4)
    assert same(model, model_alone)
    with pytest.raises(Closed), off.step():
        pass


def test_gradients_that_are_dropped_are_gone(off: Offload) -> None:
    """The engine holds none of them back, whether they were away or here."""
    with off.step():
        x, y = batch(3)
        nn.functional.cross_entropy(off.model(x), y).backward()
        refs = [weakref.ref(parameter.grad.untyped_storage()) for parameter in off.model.parameters()]
        off.optimizer.step()
        off.optimizer.zero_grad()
        assert [ref() for ref in refs] == [None] * len(refs)
    trained(off, 1)
    assert not any(facts.lost for facts in off.steps)


def test_who_holds_a_gradient_by_another_tensor_has_it_still(off: Offload) -> None:
    with off.step():
        x, y = batch(3)
        nn.functional.cross_entropy(off.model(x), y).backward()
        expected = [parameter.grad.clone() for parameter in off.model.parameters()]
        kept = [parameter.grad.detach() for parameter in off.model.parameters()]
        off.optimizer.step()
        off.optimizer.zero_grad()
    trained(off, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))


def test_weights_that_are_replaced_are_the_new_ones(off: Offload) -> None:
    with torch.no_grad():
        for parameter in off.model.parameters():
            parameter.data = torch.ones_like(parameter)
    with off.whole():
        assert all(bool((parameter == 1).all()) for parameter in off.model.parameters())


# --- steps that are not like the others ------------------------------------------------------------------------------
def test_another_batch_size_is_computed_rightly_and_followed_soon(off: Offload) -> None:
    model_alone, optimizer_alone = trained_alone(WATCHED + 4)
    seen = len(off.steps)
    for step in range(WATCHED + 4, WATCHED + 7):  # one other shape, then the old one again
        rows = ROWS // 4 if step == WATCHED + 4 else ROWS
        with off.step():
            found = take(off.model, off.optimizer, step, rows)
        assert found == take(model_alone, optimizer_alone, step, rows)
    assert len(off.steps) == seen + 3
    with off.whole():
        assert same(off.model, model_alone)


def test_a_step_of_another_shape_is_lost_and_after_some_the_plan_is_made_anew(off: Offload) -> None:
    def twice(step: int) -> None:
        x, y = batch(step)
        for _ in range(2):
            nn.functional.cross_entropy(off.model(x), y).backward()
        off.optimizer.step()
        off.optimizer.zero_grad()

    before = off.choice
    for step in range(PATIENCE):
        with off.step():
            twice(step)
    assert [facts.lost for facts in off.steps[-PATIENCE:]] == [True] * PATIENCE
    for step in range(WATCHED + 2):
        with off.step():
            twice(step)
    assert off.choice is not before
    assert not off.steps[-1].lost


def test_a_program_that_comes_to_need_more_than_any_plan_can_keep_goes_on_without_one(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is too small is refused when the first plan is made. Later that would end a long training."""

    monkeypatch.setattr(engine, "REFUSED_STEPS", 3)
    rows = [ROWS if step < WATCHED else 6 * ROWS for step in range(WATCHED + PATIENCE + 2)]
    model_alone, optimizer_alone = made()
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL) as off:
        for step, many in enumerate(rows):
            with off.step():
                found = take(model, optimizer, step, many)
            assert found == take(model_alone, optimizer_alone, step, many)
        assert off.choice is None
        assert re.search(r"without a plan.* give at least [\d,]+", str(off.report()))
        for _ in range(3):  # it is tried again, and then there is a plan
            with off.step():
                found = take(model, optimizer, 0)
            assert found == take(model_alone, optimizer_alone, 0)
        assert off.choice is not None
        assert off.choice.plan.moves
    assert same(model, model_alone)


def failing(model: Any) -> None:
    x, y = batch(99)
    raise ZeroDivisionError(nn.functional.cross_entropy(model(x), y))


def writing_what_is_saved(model: Any) -> None:
    kept = model[0](torch.randn(ROWS, WIDTH, requires_grad=True)).exp()
    loss = (kept * kept).sum()
    kept.mul_(2)
    loss.backward()


def test_an_exception_inside_a_step_leaves_the_weights_as_they_were(off: Offload) -> None:
    _, model_alone = alone(WATCHED + 4)
    with pytest.raises(ZeroDivisionError), off.step():
        failing(off.model)
    with off.whole():
        assert same(off.model, model_alone)
    trained(off, 2, WATCHED + 4)
    _, model_alone = alone(WATCHED + 6)
    with off.whole():
        assert same(off.model, model_alone)


def test_a_saved_tensor_that_is_written_is_refused_as_torch_does(disk: DiskTier) -> None:
    model, optimizer = made()
    with Offload(model, optimizer, budget=int(need_bytes() * 0.9), tiers=[disk], **SMALL) as off:
        trained(off, WATCHED + 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"), off.step():
            writing_what_is_saved(model)


# --- what cannot be done ---------------------------------------------------------------------------------------------
def test_a_budget_below_the_largest_operator_is_refused_by_name(disk: DiskTier) -> None:
    model, optimizer = made()
    with Offload(model, optimizer, budget="256KiB", tiers=[disk], **SMALL) as off:
        with pytest.raises(Invalid, match=r"operator \d+ \(.*\) uses [\d,]+ bytes at once"):
            trained(off, WATCHED)


def test_other_hooks_around_a_step_are_refused(off: Offload) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        with pytest.raises(Invalid, match="only the innermost"), off.step():
            pass
    with off.step(), pytest.raises(Invalid, match="step within a step"), off.step():
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, when its compiler is loaded
def test_an_optimizer_over_all_parameters_at_once_is_refused(disk: DiskTier) -> None:
    model, _ = made()
    with pytest.raises(Invalid, match="LBFGS"):
        Offload(model, torch.optim.LBFGS(model.parameters()), budget="1GiB", tiers=[disk])
    disk.open()  # it was closed again
    disk.close()


def test_a_tier_slower_than_said_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    slow = DiskTier([tmp_path], "64MiB", write_bytes_s=1e9, limit_bytes_s=(100e6, 100e6))
    with pytest.raises(Invalid, match="was said to write"):
        Offload(model, optimizer, budget="1GiB", tiers=[slow])


# --- tiers that fail -------------------------------------------------------------------------------------------------
class Failing:
    """A disk that works until it is told not to."""

    def __init__(self) -> None:
        self.broken = 0

    def pwritev(self, fd: int, buffers: list[Any], offset: int) -> int:
        if self.broken:
            raise OSError(self.broken, os.strerror(self.broken))
        return os.pwritev(fd, buffers, offset)


def until_it_fails(off: Offload, done: int) -> tuple[int, ForebayError]:
    """How many steps ended, and why the next did not."""
    for step in range(done, done + 3):
        try:
            trained(off, 1, step)
        except ForebayError as error:
            return step, error
    pytest.fail("a broken disk made no difference")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_fails_a_step_before_it_updates_anything(tmp_path: Path, code: int) -> None:
    """The step under way may still end, above its budget; the next one cannot begin to fit."""
    failing = Failing()
    model, optimizer = made()
    disk = DiskTier([tmp_path], "256MiB", pwritev=failing.pwritev)
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=[disk], **SMALL) as off:
        trained(off, WATCHED + 3)
        failing.broken = code
        done, raised = until_it_fails(off, WATCHED + 3)
        assert isinstance(raised, Unavailable)
        assert "weights and optimizer state are as before" in raised.message
        failing.broken = 0
        optimizer.zero_grad()
        _, model_alone = alone(done)
        with off.whole():
            assert same(model, model_alone)
        trained(off, 2, done)
        assert not off.steps[-1].over_bytes
    _, model_alone = alone(done + 2)
    assert same(model, model_alone)


def test_with_a_host_tier_beside_it_a_failing_disk_is_done_without(tmp_path: Path) -> None:
    failing = Failing()
    model, optimizer = made()
    tiers = [DiskTier([tmp_path], "256MiB", pwritev=failing.pwritev), HostTier("64MiB")]
    with Offload(model, optimizer, budget=int(need_bytes() * 0.6), tiers=tiers, **SMALL) as off:
        trained(off, WATCHED + 3)
        failing.broken = errno.EIO
        trained(off, 3, WATCHED + 3)
        assert off.report().failures
    _, model_alone = alone(WATCHED + 6)
    assert same(model, model_alone)


# --- telling ---------------------------------------------------------------------------------------------------------
def test_the_report_and_explanations_say_what_moved_and_why(off: Offload) -> None:
    told = str(off.report())
    assert "steps by plan" in told
    assert "compare with the disks' TBW" in told
    assert off.trace is not None
    assert off.choice is not None
    moved = off.trace.tensors[off.choice.plan.moves[0].tensor]
    assert "disk" in off.explain(moved)
    assert "leave" in off.explain("optimizer state")
    assert "there is no tensor or kind" in off.explain("nonsense")
    temporary = next(name for name in off.trace.tensors if name.startswith("temporary"))
    assert "it stays" in off.explain(temporary)


def test_before_there_is_a_plan_the_report_says_so(disk: DiskTier) -> None:
    model, optimizer = made()
    with Offload(model, optimizer, budget="1GiB", tiers=[disk]) as off:
        assert "no step has followed a plan yet" in str(off.report())
        assert "first steps are watched" in off.explain("activation")
