"""A training program run twice, without `Offload` and with it: all that it told and all that it left is the same.

What a plan moves follows from times, and those of a busy machine are another each time. So here operators take what a
table says and the disk is as quick as a constant says: on every machine the same plan is made, from the same trace, and
a test may ask for what it moves. Steps and disks are real; what measured times do is seen in test_engine."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from forebay.offload import DiskTier, Offload, engine, review
from forebay.offload.planning import improve
from forebay.offload.planning.trace import KINDS
from forebay.offload.tiers.disk_tier import Measured
from forebay.offload.tracing.profile import Profiler
from forebay.offload.tracing.roofline import Roofline
from tests.torch.offload.conftest import FEW_REPLAYS
from tests.torch.offload.test_engine import CLASSES, ROWS, SMALL, WATCHED, WIDTH, batch, made
from tests.torch.offload.test_engine_beside import need_of

STEPS = WATCHED + 5
FEW = 16  # rows
CORE = Roofline("a core, a table", {"float32": 50e9}, memory_bytes_s=10e9, link_bytes_s=10e9)
DISK = Measured(write_bytes_s=250e6, read_bytes_s=500e6, mode="O_DIRECT", size_bytes=1 << 20)

Make = Callable[[], tuple[Any, Any]]  # a model and its optimizer
Take = Callable[[Any, Any, int], Any]  # a step, or what is done after it; what it tells


# --- programs --------------------------------------------------------------------------------------------------------
def loss_of(model: Any, step: int, rows: int = ROWS) -> Any:
    x, y = batch(step, rows)
    return functional.cross_entropy(model(x), y)


def plain(model: Any, optimizer: Any, step: int, rows: int = ROWS) -> list[Any]:
    """The usual step; it tells its loss and the norms of its gradients."""
    loss = loss_of(model, step, rows)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [(gradient.coalesce().values() if gradient.is_sparse else gradient).norm() for gradient in gradients]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), *norms]


def of_few_rows(model: Any, optimizer: Any, step: int) -> list[Any]:
    """A step whose memory is weights and gradients, so that these move."""
    return plain(model, optimizer, step, FEW)


def no_norms(model: Any, optimizer: Any, step: int) -> list[Any]:
    """The same without a look at the gradients."""
    loss = loss_of(model, step, FEW)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item()]


def of(*layers: Callable[[], Any], lr: float = 1e-2) -> Callable[[], tuple[Any, Any]]:
    """A model of these layers, each made anew, and a last one for the classes."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(*(layer() for layer in layers), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=lr)

    return make


def without_state() -> tuple[Any, Any]:
    """A model whose optimizer remembers nothing."""
    model, _ = made(6)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2)


def evaluated(model: Any, optimizer: Any, step: int) -> Any:
    model.eval()
    with torch.no_grad():
        found = model(batch(1000 + step)[0])
    model.train()
    return found


# --- what they come to -----------------------------------------------------------------------------------------------
def bits(value: Any) -> Any:
    """What can be compared: of tensors dtype, shape and bytes."""
    if not isinstance(value, torch.Tensor):
        return value
    here = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
    whole = here.resolve_conj().resolve_neg().contiguous().clone()  # what is made an array cannot be emptied any more
    return here.dtype, tuple(here.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def told(value: Any) -> list[Any]:
    return [bits(leaf) for leaf in tree_leaves(value)]


def left(model: Any, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """All bytes of a model and of its optimizer, by name."""
    for name, value in model.state_dict().items():
        yield name, bits(value)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            yield f"{key} of {number}", bits(value)


def run(make: Make, take: Take, after: Take | None, steps: int) -> tuple[list[Any], dict[str, Any]]:
    """The program alone."""
    torch.manual_seed(11)
    model, optimizer = make()
    found = []
    for step in range(steps):
        found.append(told(take(model, optimizer, step)))
        found.append(told(after(model, optimizer, step)) if after else [])
    return found, dict(left(model, optimizer))


@functools.lru_cache(maxsize=8)  # several tests run the same program one after the other
def budget_of(make: Make, take: Take, share: float) -> int:
    torch.manual_seed(11)
    return need_of(make, take, share)


@contextmanager
def times_of_a_table() -> Iterator[None]:
    """Plans are made from CORE and DISK, and stay. They are improved by a few replays only: what is tested here is that
    a plan is followed, whichever it is, and how good plans are is tested in test_improve."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(engine, "Profiler", partial(Profiler, seconds_of=CORE.seconds)))
        patches.enter_context(mock.patch.object(engine, "scaled", lambda trace, _: trace))
        patches.enter_context(mock.patch.object(review, "DRIFT_SHARE", math.inf))
        patches.enter_context(mock.patch.object(improve, "EVALUATIONS", FEW_REPLAYS))
        patches.enter_context(mock.patch.object(DiskTier, "check_speed", return_value=DISK))
        yield


def kinds_moved(off: Offload) -> set[str]:
    """Of what the plan moves."""
    assert off.trace is not None
    assert off.choice is not None
    return {KINDS[off.trace.kinds[move.tensor]] for move in off.choice.plan.moves}


def compare(
    make: Make,
    take: Take,
    folder: Path,
    *,
    share: float = 0.75,
    steps: int = STEPS,
    after: Take | None = None,
    moving: str = "",
    may_be_lost: bool = False,
) -> Offload:
    """Run it twice. `after` is done between steps. Something must have moved, `moving` (a kind) among it;
    `may_be_lost`: steps may differ."""
    expected, expected_left = run(make, take, after, steps)
    budget = budget_of(make, take, share)
    torch.manual_seed(11)
    model, optimizer = make()
    found = []
    with (
        times_of_a_table(),
        Offload(model, optimizer, budget=budget, tiers=[DiskTier([folder], "64MiB")], **SMALL) as off,
    ):
        for step in range(steps):
            with off.step():
                found.append(told(take(model, optimizer, step)))
            found.append(told(after(model, optimizer, step)) if after else [])
        assert off.report().moves
        assert off.report().read_bytes
        assert not moving or moving in kinds_moved(off)
        assert may_be_lost or not any(facts.lost for facts in off.steps)
        assert not off.report().failures
    numbers = [number for row in expected for number in row if isinstance(number, float)]
    assert all(map(math.isfinite, numbers)), "the program itself is no good"
    assert found == expected
    found_left = dict(left(model, optimizer))
    assert found_left.keys() == expected_left.keys()
    assert [name for name, value in found_left.items() if value != expected_left[name]] == []
    return off
