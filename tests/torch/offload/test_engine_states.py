"""The state of a training under `Offload` is saved and loaded within the budget, one tensor after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forebay.core.errors import Closed, Invalid
from forebay.offload import DiskTier, Offload
from forebay.offload.movables import Books
from tests.torch.offload.programs import left, told
from tests.torch.offload.test_engine import SMALL, WATCHED, made, take, trained

STEPS = 2


class Held(TorchDispatchMode):
    """The most bytes of weights, gradients and optimizer's state at any operator."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self.most_bytes = self.looks = 0

    def now(self) -> int:
        parameters = list(self._model.parameters())
        lasting = [
            *parameters,
            *(parameter.grad for parameter in parameters),
            *tree_leaves(dict(self._optimizer.state)),
        ]
        with torch._C.DisableTorchFunction():
            storages = [value.untyped_storage() for value in lasting if isinstance(value, torch.Tensor)]
            return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.most_bytes, self.looks = max(self.most_bytes, self.now()), self.looks + 1
        return output


class Watching(Books):
    """Remembers how little was away at any moment: operators alone would not show what comes and leaves again."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "away_bytes":
            self.__dict__["least_bytes"] = min(self.__dict__.get("least_bytes", value), value)


def state_bytes() -> int:
    """Of weights and both moments."""
    return 3 * sum(parameter.numel() * parameter.element_size() for parameter in made()[0].parameters())


def offloaded(folder: Path, model: Any, optimizer: Any, budget: int) -> Offload:
    folder.mkdir(exist_ok=True)
    return Offload(model, optimizer, budget=budget, tiers=[DiskTier([folder], "256MiB")], **SMALL)


@pytest.mark.parametrize("share", [0.6, 10.0])
def test_a_state_is_saved_and_loaded_within_the_budget(tmp_path: Path, share: float) -> None:
    model, optimizer = made()
    expected = [told(take(model, optimizer, step)) for step in range(WATCHED + 2 * STEPS)]
    left_alone = dict(left(model, optimizer))
    budget = int(share * state_bytes()) + (1 << 20)
    model, optimizer = made()
    with offloaded(tmp_path / "one", model, optimizer, budget) as off:
        trained(off, WATCHED + STEPS)
        off._books.__class__ = Watching
        with Held(model, optimizer) as held:
            off._books.away_bytes += 0  # begins to watch
            state = off.state_dict()
            least_bytes = off._books.least_bytes  # type: ignore[attr-defined]
        assert state_bytes() - least_bytes <= budget
        assert held.looks
        assert held.most_bytes <= budget
        assert (off._books.away_bytes > 0) == (share < 1)
        for part in (model, optimizer):
            assert told(state["model" if part is model else "optimizer"]) == told(part.state_dict())
    other, its_optimizer = made()
    with offloaded(tmp_path / "other", other, its_optimizer, budget) as off:
        off.load_state_dict(state) if share < 1 else trained(off, 1)
        with Held(other, its_optimizer) as held:
            off.load_state_dict(state)
        assert held.most_bytes <= budget
        for step in range(WATCHED + STEPS, WATCHED + 2 * STEPS):
            with off.step():
                assert told(take(other, its_optimizer, step)) == expected[step]
    assert dict(left(other, its_optimizer)) == left_alone
    before = told(state)
    take(other, its_optimizer, 0)
    assert told(state) == before, "it is nobody's memory"


def test_a_state_is_asked_for_between_steps(tmp_path: Path) -> None:
    model, optimizer = made()
    with offloaded(tmp_path, model, optimizer, 1 << 30) as off:
        with off.step(), pytest.raises(Invalid, match="between two of them"):
            off.state_dict()
        with pytest.raises(RuntimeError, match="Missing key"):
            off.load_state_dict({"model": {}, "optimizer": {}})
    with pytest.raises(Closed):
        off.state_dict()
