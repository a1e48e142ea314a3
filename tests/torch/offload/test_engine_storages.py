"""`Offload` where storages are not one for each tensor, not plain, or somebody else has them too."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.torch.offload.programs import STEPS, compare, of_few_rows, plain, without_state
from tests.torch.offload.test_engine import CLASSES, WATCHED, WIDTH, Block, batch, made


# --- seen from elsewhere ---------------------------------------------------------------------------------------------
def test_a_weight_that_is_logged_as_an_array(tmp_path: Path) -> None:
    """From the middle of training on: torch lets no storage be emptied that was made an array."""

    def after(model: Any, optimizer: Any, step: int) -> list[float]:
        if step < WATCHED + 1:
            return []
        state = optimizer.state[model[0].down.weight]["exp_avg"]
        return [float(model[1].up.weight.detach().numpy().sum()), float(state.numpy().sum())]

    compare(made, plain, tmp_path, after=after)


def test_arrays_over_weights_that_are_kept(tmp_path: Path) -> None:
    """They show what the weights are, whenever they are looked at."""
    kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def after(model: Any, optimizer: Any, step: int) -> list[float]:
        if step < WATCHED + 1:
            return []
        arrays = kept.setdefault(model, [parameter.detach().numpy() for parameter in model.parameters()])
        return [float(array.sum()) for array in arrays]

    compare(made, plain, tmp_path, share=0.85, after=after)


def test_weights_in_shared_memory(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model, optimizer = made()
        model.share_memory()
        return model, optimizer

    compare(make, plain, tmp_path)


def test_weights_that_are_mapped_from_a_file(tmp_path: Path) -> None:
    """And written to in memory only."""
    model, _ = made()
    torch.save(model.state_dict(), tmp_path / "state")
    (tmp_path / "disk").mkdir()

    def make() -> tuple[Any, Any]:
        model, _ = made()
        model.load_state_dict(torch.load(tmp_path / "state", mmap=True), assign=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    compare(make, plain, tmp_path / "disk", share=0.85)


def test_weights_made_of_arrays(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model, optimizer = made()
        for block in model[:2]:
            block.up.weight.data = torch.from_numpy(block.up.weight.detach().numpy().copy())
        return model, optimizer

    compare(make, plain, tmp_path)


def test_weights_that_are_parts_of_a_tensor_that_is_held(tmp_path: Path) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = torch.randn(4 * WIDTH, WIDTH) / WIDTH
            self.up, self.down = nn.Parameter(self.all[: 2 * WIDTH]), nn.Parameter(self.all[2 * WIDTH :])

        def forward(self, x: Any) -> Any:
            return x + functional.linear(functional.gelu(functional.linear(x, self.up)), self.down.t())

    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(*(Part() for _ in range(3)), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        if step == STEPS - 3:
            model[1].all.mul_(0.5)
        return [part.all.norm() for part in model[:-1]]

    compare(make, plain, tmp_path, after=after)


# --- one storage for many --------------------------------------------------------------------------------------------
def laid_flat(model: Any) -> Any:
    """All parameters of each block in one storage, as libraries do that send or update them at once."""
    for block in model[:-1]:
        flat = nn.utils.parameters_to_vector(block.parameters()).detach().clone()
        at = 0
        for parameter in block.parameters():
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
    return model


@pytest.mark.parametrize("share", [0.85, 0.7])
def test_parameters_that_lie_in_one_storage(tmp_path: Path, share: float) -> None:
    def make() -> tuple[Any, Any]:
        model, optimizer = without_state()
        return laid_flat(model), optimizer

    compare(make, of_few_rows, tmp_path, share=share, moving="parameter")


def test_frozen_and_trained_parameters_in_one_storage(tmp_path: Path) -> None:
    """The first of them, whose name the storage has, is never written; others are."""

    def make() -> tuple[Any, Any]:
        model, optimizer = without_state()
        for block in model[:-1]:
            block.norm.weight.requires_grad_(False)
        return laid_flat(model), optimizer

    compare(make, of_few_rows, tmp_path, moving="parameter")


def test_parameters_that_are_laid_into_one_storage_on_the_way(tmp_path: Path) -> None:
    def after(model: Any, optimizer: Any, step: int) -> None:
        if step == WATCHED + 1:
            laid_flat(model)

    compare(
        *(without_state, of_few_rows, tmp_path),
        after=after,
        steps=STEPS + 2,
        moving="parameter",
        may_be_lost=True,
    )


def test_weights_that_are_averaged_as_one_vector(tmp_path: Path) -> None:
    def after(model: Any, optimizer: Any, step: int) -> Any:
        if step % 3 != 1:
            return []
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
        return vector.norm()

    compare(
        *(without_state, of_few_rows, tmp_path),
        after=after,
        steps=STEPS + 2,
        moving="parameter",
        may_be_lost=True,
    )


def test_gradients_in_one_storage_that_is_kept(tmp_path: Path) -> None:
    flat: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        parameters = list(model.parameters())
        if model not in flat:
            mine = flat[model] = torch.zeros(sum(parameter.numel() for parameter in parameters))
            parts = mine.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        x, y = batch(step)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        norm = flat[model].norm()
        flat[model].mul_(0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return [loss.item(), norm]

    compare(made, take, tmp_path)


# --- tensors that are not plain --------------------------------------------------------------------------------------
class Spectral(nn.Module):
    """A layer in the frequency domain, with complex weights and conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, dtype=torch.cfloat) / WIDTH)

    def forward(self, x: Any) -> Any:
        waves = torch.fft.rfft(self.norm(x)) @ self.weight
        power = (waves * waves.conj()).real + (waves.conj().imag * waves.real).cos()
        return x + self.out(torch.fft.irfft(waves * torch.tanh(power), n=WIDTH))


def test_complex_weights_and_conjugates(tmp_path: Path) -> None:
    """A conjugate is a view with a mark: autograd saves it as such."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(*(Spectral() for _ in range(4)), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    compare(make, plain, tmp_path)


class Bag(nn.Module):
    """Looks rows up that its input tells, with gradients for these alone."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(1024, WIDTH, sparse=sparse)

    def forward(self, x: Any) -> Any:
        return x + self.table((x[:, :8] * 100).long().abs() % 1024).mean(1)


@pytest.mark.parametrize("sparse", [False, True])
def test_tables_of_which_a_step_uses_a_few_rows(tmp_path: Path, sparse: bool) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        layers = [Bag(sparse=sparse), Block(), Block(), Bag(sparse=sparse), Block()]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.0 if sparse else 0.9)

    compare(make, plain, tmp_path)


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


def test_saved_tensors_with_a_class_of_their_own(tmp_path: Path) -> None:
    seen: set[type] = set()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x.square().as_subclass(Marked))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (square,) = ctx.saved_tensors
            seen.add(type(square))
            return gradient * 2 + square.as_subclass(torch.Tensor) * 1e-6

    class Doubling(Block):
        def forward(self, x: Any) -> Any:
            return Doubled.apply(super().forward(x))

    def make() -> tuple[Any, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(*(Doubling() for _ in range(4)), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    compare(make, plain, tmp_path)
    assert seen == {Marked}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_in_each_mode_of_torch(tmp_path: Path, mode: Any) -> None:
    def after(model: Any, optimizer: Any, step: int) -> Any:
        with mode():
            return model(batch(1000 + step)[0]).sum().item()

    compare(made, plain, tmp_path, after=after)
