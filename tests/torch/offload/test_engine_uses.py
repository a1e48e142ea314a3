"""`Offload` under odd uses of torch that are right all the same: the numbers stay those of the program without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.torch.offload.programs import FEW, compare, evaluated, loss_of, of, of_few_rows, plain, without_state
from tests.torch.offload.test_engine import CLASSES, WATCHED, WIDTH, Block, batch, made

# --- weights that are used in other ways -----------------------------------------------------------------------------
VIEWS: dict[str, Callable[[Any], Any]] = {
    "as_strided": lambda w: [w.as_strided((WIDTH, WIDTH), (WIDTH, 1), at * WIDTH * WIDTH) for at in range(3)],
    "chunk": lambda w: torch.chunk(w, 3),
    "narrow": lambda w: [w.narrow(0, at * WIDTH, WIDTH) for at in range(3)],
    "transposed": lambda w: [w[at::3].t() for at in range(3)],
    "unflatten": lambda w: w.unflatten(0, (3, WIDTH)).unbind(),
}


class Packed(nn.Module):
    """Three weights that lie in one, as queries, keys and values do."""

    def __init__(self, parts: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight, self.parts = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH), parts

    def forward(self, x: Any) -> Any:
        first, second, third = self.parts(self.weight)
        return x + functional.linear(functional.gelu(functional.linear(x, first)) * x.matmul(second), third)


@pytest.mark.parametrize("how", VIEWS)
def test_views_of_a_weight(tmp_path: Path, how: str) -> None:
    compare(of(*[lambda: Packed(VIEWS[how])] * 3), plain, tmp_path)


class Remembering(nn.Module):
    """Makes views of its weight once, and uses these ever after."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH)
        self.halves = self.weight.detach().chunk(2)

    def forward(self, x: Any) -> Any:
        size = self.halves[0].square().mean() + self.halves[1].abs().mean()
        return x + functional.linear(functional.gelu(functional.linear(x, self.weight)), self.weight.t()) * size


def test_views_of_a_weight_that_were_made_before_the_first_step(tmp_path: Path) -> None:
    compare(of(*[Remembering] * 3), plain, tmp_path)


class Sharing(nn.Module):
    """Two blocks, and a function that runs the first with the second's parameters; a bank that both layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.one, self.two = Block(), Block()

    def forward(self, x: Any) -> Any:
        x = self.one(functional.linear(x, self.bank))
        x = torch.func.functional_call(self.one, dict(self.two.named_parameters()), (x,))
        return self.two(functional.linear(x, self.bank + self.bank.t()))


def test_parameters_used_in_several_modules_through_functional_calls(tmp_path: Path) -> None:
    compare(of(Sharing, Sharing), plain, tmp_path)


@pytest.mark.parametrize("held", [True, False], ids=["in the optimizer", "not in the optimizer"])
def test_a_frozen_parameter_among_the_others(tmp_path: Path, held: bool) -> None:
    def make() -> tuple[Any, Any]:
        model, _ = made()
        for parameter in (model[0].up.weight, model[1].down.weight, model[2].norm.weight, model[2].up.bias):
            parameter.requires_grad_(False)
        taken = [parameter for parameter in model.parameters() if held or parameter.requires_grad]
        return model, torch.optim.AdamW(taken, lr=1e-2)

    compare(make, plain, tmp_path)


def test_weights_under_parametrizations(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model, _ = made()
        for block in model[:2]:
            nn.utils.parametrizations.weight_norm(block.up)
            nn.utils.parametrizations.spectral_norm(block.down)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    compare(make, plain, tmp_path)


def test_a_loss_with_weights_of_its_own(tmp_path: Path) -> None:
    """The optimizer has a parameter that is not the model's."""

    def make() -> tuple[Any, Any]:
        model, optimizer = made()
        optimizer.add_param_group({"params": [nn.Parameter(torch.eye(CLASSES, WIDTH))]})
        return model, optimizer

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        centres = optimizer.param_groups[-1]["params"][0]
        x, y = batch(step)
        hidden = model[:-1](x)
        loss = functional.cross_entropy(model[-1](hidden), y) + (hidden - centres[y]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item(), centres.detach().norm()]

    compare(make, take, tmp_path)


# --- modules ---------------------------------------------------------------------------------------------------------
class Normed(nn.Module):
    """With buffers that each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.down(functional.relu_(self.norm(self.up(x)))))


def test_buffers_and_dropout(tmp_path: Path) -> None:
    """Running means are the same, and chance is drawn as without."""
    compare(of(*[Normed] * 4), plain, tmp_path)


def test_buffers_that_an_evaluation_uses_between_steps(tmp_path: Path) -> None:
    compare(of(*[Normed] * 4), plain, tmp_path, after=evaluated)


class Recurrent(nn.Module):
    """Its weights go to one operator, all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: Any) -> Any:
        return x + self.lstm(x.unflatten(0, (8, -1)))[0].flatten(0, 1)


def test_a_recurrent_network(tmp_path: Path) -> None:
    compare(of(Recurrent, Block), plain, tmp_path, share=0.85)


class Attending(nn.Module):
    """Attention as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x.unflatten(0, (8, -1))).flatten(0, 1)


def test_a_transformer_of_torchs_own(tmp_path: Path) -> None:
    compare(of(*[Attending] * 3), plain, tmp_path)


def test_a_transformer_of_torchs_own_that_is_evaluated_between_steps(tmp_path: Path) -> None:
    """Without gradients torch takes another path through it, with other roundings; not while a mode is on the stack."""
    compare(of(*[Attending] * 3), plain, tmp_path, after=evaluated)


class Squared(torch.autograd.Function):
    """x * sigmoid(w * x), saving an input, a weight and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        gate = torch.sigmoid(x * weight)
        ctx.save_for_backward(x, weight, gate)
        ctx.mark_non_differentiable(gate)
        return x * gate, gate

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        x, weight, gate = ctx.saved_tensors
        inner = gradient * x * gate * (1 - gate)
        again = ctx.saved_tensors[0]
        return gradient * gate + inner * weight, (inner * again).sum(0)


class Gated(nn.Module):
    """Uses a function with a backward of its own, and keeps what it computed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.gate: Any = None

    def forward(self, x: Any) -> Any:
        y, self.gate = Squared.apply(self.up(x), self.weight)
        return x + y


def test_a_function_with_its_own_backward(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        found = plain(model, optimizer, step)
        return [*found, *(layer.gate.mean() for layer in model[:-1])]

    compare(of(*[Gated] * 5), take, tmp_path)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_with_dropout(tmp_path: Path, reentrant: bool) -> None:
    class Checkpointed(Normed):
        def forward(self, x: Any) -> Any:
            if not x.requires_grad:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    compare(of(*[Checkpointed] * 4), plain, tmp_path)


def test_other_hooks_for_saved_tensors_within_the_forward(tmp_path: Path) -> None:
    class Parked(Block):
        def forward(self, x: Any) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    compare(of(Block, Parked, Block, Parked), plain, tmp_path)


# --- batches ---------------------------------------------------------------------------------------------------------
def test_the_same_batch_again_and_again(tmp_path: Path) -> None:
    same = batch(0)

    def take(model: Any, optimizer: Any, step: int) -> float:
        loss = functional.cross_entropy(model(same[0]), same[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    compare(made, take, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(same, batch(0), strict=True))


def test_a_batch_that_was_new_and_then_is_the_old_one_again(tmp_path: Path) -> None:
    """In the profiled step it was made within the step, later it was there before."""
    kept: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()

    def take(model: Any, optimizer: Any, step: int) -> float:
        mine, number = kept.setdefault(model, {}), min(step, WATCHED + 1)
        x, y = mine[number] = mine.get(number) or batch(number)
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    off = compare(made, take, tmp_path, share=0.6)
    assert all(torch.equal(x, batch(number)[0]) for number, (x, _) in kept[off.model].items())


def test_a_batch_buffer_that_is_filled_anew_in_each_step(tmp_path: Path) -> None:
    x, y = batch(0)

    def take(model: Any, optimizer: Any, step: int) -> float:
        new = batch(step)
        x.copy_(new[0])
        y.copy_(new[1])
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        x.zero_()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    compare(made, take, tmp_path)


# --- optimizers and what is around them ------------------------------------------------------------------------------
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_clipping_with_a_gradient_scaler(tmp_path: Path, clipped: bool, enabled: bool) -> None:
    scalers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        scaler = scalers.setdefault(optimizer, torch.amp.GradScaler("cpu", enabled=enabled))
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5) if clipped else 0.0
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss.item(), norm, scaler.get_scale()]

    compare(made, take, tmp_path, share=0.6)


def test_gradients_that_wait_between_being_unscaled_and_being_used(tmp_path: Path) -> None:
    """What removes the scale writes all gradients at once, and does not count it in their versions."""
    scalers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        scaler = scalers.setdefault(optimizer, torch.amp.GradScaler("cpu"))
        loss = loss_of(model, step, FEW)
        scaler.scale(loss).backward()
        before = evaluated(model, optimizer, step).sum()
        scaler.unscale_(optimizer)
        after = evaluated(model, optimizer, step + 1).sum()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [loss.item(), before, after]

    compare(without_state, take, tmp_path, share=0.55, moving="gradient")


def in_two_groups(**settings: Any) -> tuple[Any, Any]:
    """Decay for matrices and none for the others, as is usual."""
    model, _ = made()
    split: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in model.parameters():
        split[parameter.ndim > 1].append(parameter)
    groups = [{"params": split[True], "weight_decay": 0.1}, {"params": split[False], "weight_decay": 0.0, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-2, **settings)


@pytest.mark.parametrize(
    "settings", [{}, {"fused": True}, {"foreach": False}, {"amsgrad": True, "foreach": True}], ids=str
)
def test_an_optimizer_with_two_groups(tmp_path: Path, settings: dict[str, Any]) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        return plain(model, optimizer, step)

    compare(lambda: in_two_groups(**settings), take, tmp_path)


def test_a_closure(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> float:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        return float(optimizer.step(closure).item())

    compare(made, take, tmp_path)


def test_the_optimizer_steps_after_the_step(tmp_path: Path) -> None:
    """Its step and `zero_grad` come when the `with` has ended."""

    def take(model: Any, optimizer: Any, step: int) -> float:
        loss = loss_of(model, step)
        loss.backward()
        return float(loss.item())

    def after(model: Any, optimizer: Any, step: int) -> None:
        optimizer.step()
        optimizer.zero_grad()

    compare(made, take, tmp_path, after=after)


@pytest.mark.parametrize("small", [torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_several_kinds(tmp_path: Path, small: Any) -> None:
    class Cast(Block):
        def forward(self, x: Any) -> Any:
            wide = self.norm(x)
            return x + self.down(functional.gelu(self.up(wide.to(small)))).to(x.dtype)

    def make() -> tuple[Any, Any]:
        model, _ = of(*[Cast] * 4)()
        for block in model[:-1]:
            block.up.to(small)
            block.down.to(small)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)

    compare(make, of_few_rows, tmp_path)  # processors are slow at these kinds


# --- other ways through a step ---------------------------------------------------------------------------------------
def test_two_backwards_through_one_graph(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        x, y = batch(step)
        out = model(x)
        losses = functional.cross_entropy(out, y), out.square().mean()
        losses[0].backward(retain_graph=True)
        middle = [parameter.grad.norm() for parameter in model.parameters()]
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return [*(loss.item() for loss in losses), *middle]

    compare(made, take, tmp_path)


def test_gradients_of_gradients(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        x, y = batch(step)
        x.requires_grad_(True)
        loss = functional.cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item(), penalty.item()]

    compare(made, take, tmp_path, share=0.9)


def test_gradients_that_are_asked_for_and_put_there_by_hand(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> float:
        loss = loss_of(model, step)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient.mul_(0.5)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return float(loss.item())

    compare(made, take, tmp_path)


def test_hooks_that_change_gradients_on_the_way(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model, optimizer = made()
        for block in model[:-1]:
            block.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            block.register_forward_hook(lambda module, args, output: output * 0.9)
            block.down.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))
        return model, optimizer

    compare(make, plain, tmp_path)


def test_activations_that_are_kept_and_looked_at_later(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        kept: list[Any] = []
        handles = [block.up.register_forward_hook(lambda m, args, out: kept.append(out)) for block in model[:-1]]
        loss = loss_of(model, step)
        kept[1].retain_grad()
        loss.backward()
        found = [loss.item(), kept[1].grad.norm(), *(value.detach().norm() for value in kept)]
        for handle in handles:
            handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        return [*found, *(value.detach().abs().sum() for value in kept)]

    compare(made, take, tmp_path)


def test_a_norm_of_what_is_written_in_place_afterwards(tmp_path: Path) -> None:
    """Its graph has saved the tensor, and is kept, but nobody goes back through it: torch has nothing against that."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            self.norm: Any = None

        def forward(self, x: Any) -> Any:
            hidden = self.up(x)
            self.norm = hidden.norm()
            return x + self.down(functional.relu_(hidden))

    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        found = plain(model, optimizer, step)
        return [*found, *(layer.norm.detach() for layer in model[:-1])]

    compare(of(*[Watched] * 4), take, tmp_path)


def test_a_forward_without_gradients_between_steps(tmp_path: Path) -> None:
    compare(made, plain, tmp_path, after=evaluated)


def test_a_forward_without_gradients_in_each_step(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        x, _ = batch(step)
        with torch.no_grad():
            target = model(x.flip(0)).softmax(-1)
        loss = functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item(), target.sum()]

    compare(made, take, tmp_path)
