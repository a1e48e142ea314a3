"""An optimizer's step in chunks is the whole step, bit for bit, and leaves nothing behind."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from forebay.core.errors import Invalid
from forebay.offload.tracing.chunks import AFTER, ChunkedStep, default_chunks
from tests.torch.offload import networks

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {"foreach": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adadelta, {"foreach": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adamax, {"foreach": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.NAdam, {"foreach": True}),
    (torch.optim.RAdam, {}),
    (torch.optim.RAdam, {"foreach": True}),
    (torch.optim.ASGD, {}),
    (torch.optim.ASGD, {"foreach": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.Rprop, {"foreach": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adafactor, {"foreach": True}),
    (torch.optim.Muon, {}),
]


def matrices() -> Any:
    """Only matrices: Muon takes no others."""
    networks.seeded()
    first, *others = (nn.Linear(*sizes, bias=False) for sizes in ((64, 16), (16, 8), (8, 4)))
    return nn.Sequential(first, nn.Tanh(), *others)


def grouped(kind: Any, settings: dict[str, Any], model: Any) -> Any:
    """Two groups with different settings."""
    held = list(model.parameters())
    return kind([{"params": held[:1]}, {"params": held[1:], "lr": 0.01}], **settings)


def nothing(name: str) -> None:
    """A point where nothing is to be done."""


def attached(optimizer: Any, at: Any = nothing) -> ChunkedStep:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stepping = ChunkedStep(optimizer, [[parameter] for parameter in reversed(held)], at)
    stepping.attach()
    return stepping


# --- the same bits ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_steps_in_chunks_give_the_same_bits(kind: Any, settings: dict[str, Any]) -> None:
    model = matrices()
    other = copy.deepcopy(model)
    whole, parts = grouped(kind, settings, model), grouped(kind, settings, other)
    attached(parts)
    missing = 1 if settings.get("fused") else 0  # torch's fused SGD must see all gradients in its first step
    for number in range(10):
        batch = torch.randn(16, 64)
        for one, optimizer in ((model, whole), (other, parts)):
            networks.square_loss(one, batch).backward()
            if number % 3 == missing:
                one[2].weight.grad = None  # a parameter that takes no part in this step
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in whole.state[mine].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(parts.state[theirs][key]))


def test_a_parameter_that_is_added_later_is_stepped_too() -> None:
    model = matrices()
    optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    reached: list[str] = []
    attached(optimizer, reached.append)
    optimizer.add_param_group({"params": [model[3].weight], "lr": 0.5})
    before = model[3].weight.detach().clone()
    networks.square_loss(model, torch.randn(16, 64)).backward()
    optimizer.step()
    assert not torch.equal(before, model[3].weight)
    assert reached == ["optimizer chunk 0", "optimizer chunk 1", "optimizer chunk 2", AFTER]


# --- what else happens in a step -------------------------------------------------------------------------------------
def test_hooks_and_the_closure_run_once() -> None:
    model = matrices()
    optimizer = torch.optim.AdamW(model.parameters())
    happened: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: happened.append("before"))
    optimizer.register_step_post_hook(lambda *args: happened.append("behind"))
    attached(optimizer, happened.append)

    def closure() -> Any:
        happened.append("closure")
        loss = networks.square_loss(model, torch.ones(2, 64))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    chunks = [f"optimizer chunk {number}" for number in range(3)]
    assert happened == ["before", "closure", *chunks, AFTER, "behind"]


@pytest.mark.parametrize("first", ["schedule", "chunks"])
def test_schedules_work_whether_they_come_before_or_after(first: str) -> None:
    model = matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reached: list[str] = []
    if first == "chunks":
        stepping = attached(optimizer, reached.append)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if first == "schedule":
        stepping = attached(optimizer, reached.append)
    for _ in range(2):
        networks.square_loss(model, torch.ones(2, 64)).backward()
        optimizer.step()
        schedule.step()  # warns, which is an error here, unless it knows of the step
    assert reached.count(AFTER) == 2
    assert optimizer.param_groups[0]["lr"] == 0.25
    stepping.detach()
    reached.clear()
    optimizer.step()
    schedule.step()
    assert reached == []
    stepping.attach()
    optimizer.step()
    schedule.step()
    assert reached == [*(f"optimizer chunk {number}" for number in range(3)), AFTER], "once more, and once only"


@pytest.mark.parametrize("settings", [{}, {"fused": True}])
def test_a_scaler_of_gradients_sees_one_step(settings: dict[str, Any]) -> None:
    model = matrices()
    other = copy.deepcopy(model)
    reached: list[str] = []
    for one in (model, other):
        optimizer = torch.optim.AdamW(one.parameters(), **settings)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if one is other:
            attached(optimizer, reached.append)
        for number in range(3):
            loss = networks.square_loss(one, torch.ones(2, 64))
            scaler.scale(loss * float("inf") if number == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert reached.count(AFTER) == (3 if settings else 2)  # fused ones skip an overflow by themselves


def test_groups_are_whole_again_when_a_step_fails() -> None:
    model = matrices()
    optimizer = grouped(torch.optim.AdamW, {}, model)
    groups = optimizer.param_groups
    before = [list(group["params"]) for group in groups]

    def fail(name: str) -> None:
        if name == "optimizer chunk 1":
            raise RuntimeError("no more")

    attached(optimizer, fail)
    networks.square_loss(model, torch.ones(2, 64)).backward()
    with pytest.raises(RuntimeError, match="no more"):
        optimizer.step()
    assert optimizer.param_groups is groups
    for group, parameters in zip(groups, before, strict=True):
        assert [id(one) for one in group["params"]] == [id(one) for one in parameters]


def test_a_state_is_saved_and_loaded_while_chunks_are_on() -> None:
    model = matrices()
    optimizer = torch.optim.AdamW(model.parameters())
    attached(optimizer)
    networks.step(model, optimizer, torch.ones(2, 64), networks.square_loss)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert len(saved["state"]) == len(saved["param_groups"][0]["params"]) == 3
    networks.step(model, optimizer, torch.ones(2, 64), networks.square_loss)


# --- coming and going ------------------------------------------------------------------------------------------------
def test_nothing_is_left_and_nothing_is_kept_alive() -> None:
    model = matrices()
    optimizer = torch.optim.AdamW(model.parameters())
    stepping = attached(optimizer)
    assert "step" in vars(optimizer)
    stepping.attach()
    stepping.detach()
    stepping.detach()
    assert "step" not in vars(optimizer)
    attached(optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_optimizers_that_look_at_all_parameters_are_refused() -> None:
    class Mine(torch.optim.AdamW):  # what it does we cannot know
        pass

    for optimizer in (torch.optim.LBFGS(matrices().parameters()), Mine(matrices().parameters())):
        with pytest.raises(Invalid, match="is not known to update each parameter by itself"):
            ChunkedStep(optimizer, [], nothing)


def test_a_step_that_somebody_else_replaced_is_refused() -> None:
    optimizer = torch.optim.AdamW(matrices().parameters())
    optimizer.step = lambda: None
    with pytest.raises(Invalid, match="something else has replaced this optimizer's step"):
        attached(optimizer)


def test_a_parameter_in_two_chunks_is_refused() -> None:
    model = matrices()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Invalid, match="in two chunks"):
        ChunkedStep(optimizer, [[model[0].weight], [model[0].weight]], nothing)


# --- which chunks ----------------------------------------------------------------------------------------------------
def test_chunks_are_filled_from_the_last_parameter_on() -> None:
    model = matrices()  # of 4096, 512 and 128 bytes
    optimizer = grouped(torch.optim.AdamW, {}, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def named(chunk_bytes: int) -> list[list[str]]:
        chunks = default_chunks(model, optimizer, chunk_bytes)
        return [[names[id(parameter)] for parameter in chunk] for chunk in chunks]

    assert named(4 * (128 + 512)) == [["3.weight", "2.weight"], ["0.weight"]]
    assert named(1) == [["3.weight"], ["2.weight"], ["0.weight"]]
    assert named(1 << 20) == [["3.weight", "2.weight", "0.weight"]]
    networks.step(model, optimizer, torch.ones(2, 64), networks.square_loss)
    assert named(4 * (128 + 512)) == [["3.weight", "2.weight"], ["0.weight"]], "state does not change them"
