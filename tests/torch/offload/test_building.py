"""A model that is larger than the budget is made within it, from `meta`, and given up without coming back whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.core.errors import Closed, Invalid, NotSupported
from forebay.offload import DiskTier, Offload
from tests.torch.offload.memory import PeakMemory
from tests.torch.offload.programs import left, no_norms, told
from tests.torch.offload.test_engine import CHUNK_BYTES, CLASSES, SMALL, WATCHED, WIDTH, Block
from tests.torch.offload.test_engine_states import Held

BLOCKS = 8
STEPS = WATCHED + 3


class Tied(nn.Module):
    """With modules of several kinds, a buffer, and a weight that two have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first, self.last = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        x = self.norm(self.blocks(x))
        x = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        return self.first(x) + self.last(x)


def made(make: Callable[[], Any] = Tied, device: str = "cpu") -> tuple[Any, Any]:
    torch.manual_seed(7)
    with torch.device(device):
        model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def weight_bytes() -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in made()[0].parameters())


def values_of(model: Any) -> list[Any]:
    return told(list(model.state_dict().values()))


def offloaded(folder: Path, model: Any, optimizer: Any, budget: int, **how: Any) -> Offload:
    return Offload(model, optimizer, budget=budget, tiers=[DiskTier([folder], "256MiB")], **SMALL, **how)


def test_a_model_on_meta_is_made_within_the_budget_with_the_values_of_one_made_at_once(tmp_path: Path) -> None:
    """Before, such a model was refused: it had to be whole in memory first."""
    model_alone, optimizer_alone = made()
    started = values_of(model_alone)
    budget = weight_bytes() // 2
    model, optimizer = made(device="meta")
    torch.manual_seed(7)
    with PeakMemory(model, optimizer) as memory:
        off = offloaded(tmp_path, model, optimizer, budget, device="cpu")
    with off:
        assert memory.peak_bytes <= budget
        assert off._books.away_bytes > 0
        assert model.last.weight is model.first.weight
        assert told(off.state_dict()["model"]) == started
        torch.manual_seed(11)
        expected = [told(no_norms(model_alone, optimizer_alone, step)) for step in range(STEPS)]
        torch.manual_seed(11)
        for step in range(STEPS):
            with PeakMemory(model, optimizer) as memory, off.step():
                found = told(no_norms(model, optimizer, step))
            assert found == expected[step]
            assert memory.peak_bytes <= budget
        assert off.choice is not None
        assert off.choice.plan.moves
    assert dict(left(model, optimizer)) == dict(left(model_alone, optimizer_alone))


def test_a_model_on_meta_is_loaded_without_being_initialised(tmp_path: Path) -> None:
    alone, its_optimizer = made()
    state = {"model": alone.state_dict(), "optimizer": its_optimizer.state_dict()}
    model, optimizer = made(device="meta")
    seen: list[Any] = []
    budget = weight_bytes() // 2
    with offloaded(tmp_path, model, optimizer, budget, device="cpu", initialize=seen.append) as off:
        assert model.attention in seen
        assert model.blocks not in seen, "it has no tensors of its own"
        with Held(model, optimizer) as held:
            off.load_state_dict(state)
        assert held.most_bytes <= budget
        assert told(off.state_dict()["model"]) == values_of(alone)


class Silent(nn.Module):
    """Nobody knows how it gets its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))


def test_what_cannot_be_made_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model, optimizer = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Silent()), "meta")
    with pytest.raises(Invalid, match="pass device="):
        offloaded(tmp_path, model, optimizer, CHUNK_BYTES)
    with pytest.raises(Invalid, match=r"Silent has tensors .* pass initialize="):
        offloaded(tmp_path, model, optimizer, CHUNK_BYTES, device="cpu")
    with pytest.raises(NotSupported, match="not all checks have passed yet"):
        offloaded(tmp_path, model, optimizer, CHUNK_BYTES, device="cuda")
    with pytest.raises(ZeroDivisionError):
        offloaded(tmp_path, model, optimizer, CHUNK_BYTES, device="cpu", initialize=lambda module: 1 // 0)
    assert not model._forward_pre_hooks
    assert not torch._C._len_torch_dispatch_stack()
    assert not torch._C._len_torch_function_stack()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["cpu", "meta"])
def test_closing_where_not_everything_fits(tmp_path: Path, to: str) -> None:
    """Before, all of it had to come back at once."""
    model_alone, optimizer_alone = made()
    for step in range(STEPS):
        no_norms(model_alone, optimizer_alone, step)
    model, optimizer = made()
    budget = weight_bytes()
    disk = DiskTier([tmp_path], "256MiB")
    off = Offload(model, optimizer, budget=budget, tiers=[disk], **SMALL)
    for step in range(STEPS):
        with off.step():
            no_norms(model, optimizer, step)
    books = off._books
    for movable in books.lasting.values():  # on a slow disk what the next step begins with is still on its way
        if movable._ticket is not None:
            movable._ticket.ended.wait()
    weights, read, most = list(model.parameters()), disk.bytes_read, [0]

    class Managed(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            here = [m.size_bytes for m in books.lasting.values() if m._storage() is not None and m._storage().nbytes()]
            most[0] = max(most[0], sum(here))
            return func(*args, **(kwargs or {}))

    with Managed():
        off.close(to=to)
    assert most[0] <= budget
    assert (most[0] > 0) == (to == "cpu")
    assert [id(weight) for weight in model.parameters()] == [id(weight) for weight in weights]
    if to == "meta":
        assert disk.bytes_read == read
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert all(value.is_meta for state in optimizer.state.values() for value in state.values())
    else:
        assert dict(left(model, optimizer)) == dict(left(model_alone, optimizer_alone))
        assert no_norms(model, optimizer, 99) == no_norms(model_alone, optimizer_alone, 99)
    with pytest.raises(Closed), off.step():
        pass
    off.close(to=to)


def test_a_weight_that_cannot_be_replaced_is_said_before_anything_is_given_up(tmp_path: Path) -> None:
    model, optimizer = made()
    off = offloaded(tmp_path, model, optimizer, weight_bytes())
    for step in range(STEPS):
        with off.step():
            no_norms(model, optimizer, step)
    values = told(off.state_dict())
    reference = weakref.ref(next(model.parameters()))
    with pytest.raises(Invalid, match="let go of what refers to it"):
        off.close(to="meta")
    assert told(off.state_dict()) == values
    del reference
    off.close(to="meta")
    assert next(model.parameters()).is_meta
