"""Traces of real steps: what they say of memory and of uses, against a recount; and what looking leaves behind."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import KINDS, Trace, load
from forebay.offload.tracing import profile
from forebay.offload.tracing.profile import Profiler
from forebay.offload.tracing.shapes import Shape, word_loss
from tests.torch.offload import networks

# What can be profiled here: a model, a batch and a loss.
CASES = {
    "layers": lambda: (networks.layers(), networks.numbers(), networks.square_loss),
    "decoder": lambda: (networks.decoder(), networks.words(), word_loss),
}


def profiled(
    model: Any, batch: Any, loss_of: Any, optimizer: Any = None, run: Any = networks.step, **settings: Any
) -> Trace:
    """The second step."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    run(model, optimizer, batch, loss_of)
    with Profiler(model, optimizer, **settings) as profiler:
        run(model, optimizer, batch, loss_of)
    return profiler.trace("step")


def number_of(trace: Trace, name: str) -> int:
    assert trace.tensors.count(name) == 1, name
    return trace.tensors.index(name)


def kind_of(trace: Trace, name: str) -> str:
    return KINDS[trace.kinds[number_of(trace, name)]]


def point(trace: Trace, name: str) -> int:
    return int(trace.points[trace.point_names.index(name)])


# --- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}])
def test_the_peak_is_that_of_torchs_own_tracker(case: str, settings: dict[str, Any]) -> None:
    model, batch, loss_of = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    trace = profiled(model, batch, loss_of, optimizer, chunk_bytes=1 << 40)
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *(batch if isinstance(batch, tuple) else [batch]))
    with tracker:
        networks.step(model, optimizer, batch, loss_of)
    total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert trace.need_bytes().max() == total
    assert trace.active_bytes().max() <= total


def test_what_is_smaller_when_it_steps_in_chunks() -> None:
    """State and parameters of one chunk at a time: with fused operators, no more than that is used at once."""
    model, batch, loss_of = CASES["decoder"]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    whole = profiled(model, batch, loss_of, optimizer, chunk_bytes=1 << 40)
    parts = profiled(model, batch, loss_of, optimizer, chunk_bytes=1 << 14)
    step = whole.operators.index("_fused_adamw_")
    assert whole.active_bytes()[step] == pytest.approx(4 * sum(p.nbytes for p in model.parameters()), rel=0.05)
    assert parts.active_bytes()[point(parts, "optimizer chunk 0") :].max() < whole.active_bytes()[step] / 4


def test_what_is_never_used_is_memory_all_the_same() -> None:
    model = networks.layers()
    plain = profiled(model, networks.numbers(), networks.square_loss)
    model.register_parameter("idle", nn.Parameter(torch.ones(1000)))
    trace = profiled(model, networks.numbers(), networks.square_loss)
    assert not [name for name in trace.tensors if "idle" in name]
    assert (trace.need_bytes() - plain.need_bytes()).tolist() == [4000] * trace.operator_count


def test_memory_that_an_allocator_gave_to_others_is_needed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries keep some on a device, which no operator returns."""

    class Counting(profile._Clock):
        def beside(self, known_bytes: int) -> int:
            told.append(known_bytes)
            return 5000

    told: list[int] = []
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = profiled(model, networks.numbers(), networks.square_loss, optimizer)
    monkeypatch.setattr(profile, "_clock", lambda device, seconds_of: Counting())
    trace = profiled(model, networks.numbers(), networks.square_loss, optimizer)
    assert (trace.need_bytes() - plain.need_bytes()).tolist() == [5000] * trace.operator_count
    assert told == [sum(p.nbytes for p in model.parameters()) + _state_bytes(optimizer) + networks.numbers().nbytes]


def _state_bytes(optimizer: Any) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_peak_is_the_allocators() -> None:
    model = networks.decoder(Shape(8192, 4, 1024, 16, 8, 4096), 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.zeros(4, 512, dtype=torch.int64, device="cuda")
    trace = profiled(model, (words, words), word_loss, optimizer)
    torch.cuda.reset_peak_memory_stats()
    networks.step(model, optimizer, (words, words), word_loss)
    assert trace.need_bytes().max() == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.02)
    assert (trace.times_s > 0).all()
    assert "step of words.weight" in trace.tensors  # fused ones keep their counts on the GPU


# --- uses ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_used_in_all_three_and_written_by_the_optimizer_only(case: str) -> None:
    model, batch, loss_of = CASES[case]()
    trace = profiled(model, batch, loss_of)
    backward = trace.operators.index("ones_like")
    update = point(trace, "optimizer chunk 0")
    for name, parameter in model.named_parameters():
        tensor = number_of(trace, f"parameter {name}")
        uses = trace.uses(tensor)
        writes = set(uses[trace.use_writes[trace.users() == tensor]].tolist())
        assert trace.persistent[tensor]
        assert trace.sizes_bytes[tensor] == parameter.nbytes
        assert (uses < backward).any(), name
        assert (uses >= update).any(), name
        assert writes
        assert min(writes) >= update
        if parameter.dim() > 1 and name not in ("0.weight", "words.weight"):  # products need them to go on backward
            assert ((uses >= backward) & (uses < update)).any(), name
        for key in ("exp_avg", "exp_avg_sq"):
            state = number_of(trace, f"{key} of {name}")
            assert trace.persistent[state]
            assert min(trace.uses(state)) >= update
        gradient = number_of(trace, f"gradient {name}")
        assert not trace.persistent[gradient]
        assert backward < trace.births[gradient] < update <= max(trace.uses(gradient))
        assert trace.births[gradient] < point(trace, f"gradient of {name}")


def test_what_autograd_saves_is_an_activation_and_nothing_else_is() -> None:
    model = networks.layers()
    trace = profiled(model, networks.numbers(), networks.square_loss)
    # the batch is the caller's; of the first layer's output, changed in place, and of the second's, squares need them
    assert kind_of(trace, "saved 1") == "temporary"
    assert trace.persistent[number_of(trace, "saved 1")]
    assert [
        (name, size)
        for name, size, kind in zip(trace.tensors, trace.sizes_bytes, trace.kinds, strict=True)
        if KINDS[kind] == "activation"
    ] == [("saved 2", 4 * 32 * 128), ("saved 3", 4 * 32 * 10)]
    assert len(trace.uses(number_of(trace, "saved 2"))) == 5  # product, in place, product; two in backward


def test_buffers_stay_where_they_are() -> None:
    trace = profiled(*CASES["decoder"]())
    assert kind_of(trace, "buffer cosines") == "temporary"
    assert trace.persistent[number_of(trace, "buffer cosines")]


def test_tied_weights_are_one_tensor() -> None:
    shape = networks.SMALL
    tied = networks.decoder(type(shape)(64, 2, 32, 4, 2, 64, tied=True))
    trace = profiled(tied, networks.words(), word_loss)
    weight = number_of(trace, "parameter words.weight")
    assert not [name for name in trace.tensors if "scores" in name]
    assert trace.uses(weight)[0] == 0
    assert {trace.operators[use] for use in trace.uses(weight)} >= {"embedding", "mm"}
    assert kind_of(trace, "gradient words.weight") == "gradient"


# --- other ways to train ---------------------------------------------------------------------------------------------
class Checkpointed(nn.Module):
    """Layers that are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        networks.seeded()
        self.reentrant = reentrant
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_computes_again_under_numbered_points(reentrant: bool) -> None:
    model = Checkpointed(reentrant=reentrant)
    trace = profiled(model, networks.numbers(), networks.square_loss)
    assert point(trace, "forward of layers.0.0") < point(trace, "forward of layers.0.0 #2")
    assert point(trace, "backward of layers.2") < point(trace, "forward of layers.1 #2")
    weight = number_of(trace, "parameter layers.0.0.weight")
    update = point(trace, "optimizer chunk 0")
    assert [trace.operators[use] for use in trace.uses(weight) if use < update] == ["addmm", "addmm", "mm"]
    turn = trace.operators.index("ones_like")
    kept = (trace.births < turn) & (trace.deaths > turn) & (trace.kinds == KINDS.index("activation"))
    assert kept.sum() <= 4, "only what goes into each layer, and the output"


def test_accumulated_gradients_are_one_tensor_with_uses_in_both_passes() -> None:
    def twice(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
        for _ in range(2):
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = profiled(networks.layers(), networks.numbers(), networks.square_loss, run=twice)
    gradient = number_of(trace, "gradient 0.weight")
    between = point(trace, "forward of 0 #2")
    assert trace.births[gradient] < between
    assert "add_" in [trace.operators[use] for use in trace.uses(gradient) if use > between]
    assert point(trace, "gradient of 0.weight") <= between < point(trace, "gradient of 0.weight #2")
    assert kind_of(trace, "saved 4") == "activation", "numbers go on"


def test_gradients_that_are_kept_are_persistent() -> None:
    def keeping(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    trace = profiled(networks.layers(), networks.numbers(), networks.square_loss, run=keeping)
    assert all(trace.persistent[number_of(trace, f"gradient {name}")] for name in ("0.weight", "2.bias"))


def test_gradients_that_the_next_step_drops_first_live_to_the_end() -> None:
    def dropping(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    trace = profiled(networks.layers(), networks.numbers(), networks.square_loss, run=dropping)
    gradient = number_of(trace, "gradient 0.weight")
    assert not trace.persistent[gradient]
    assert trace.births[gradient] > 0
    assert trace.deaths[gradient] == trace.operator_count - 1
    assert trace.need_bytes()[0] < trace.need_bytes()[-1]


def test_gradients_of_the_step_before_are_memory_until_they_are_dropped() -> None:
    def late(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    trace = profiled(networks.layers(), networks.numbers(), networks.square_loss, run=late)
    held = sum(parameter.nbytes for parameter in networks.layers().parameters())
    assert trace.workspace_bytes[0] == held
    assert trace.workspace_bytes[-1] == 0


def test_gradients_in_one_buffer_are_one_tensor() -> None:
    """As reducers across machines keep them."""
    model = networks.layers()
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    at = 0
    for parameter in model.parameters():
        parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()

    def keeping(model: Any, optimizer: Any, batch: Any, loss_of: Any) -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    trace = profiled(model, networks.numbers(), networks.square_loss, run=keeping)
    gradients = [name for name, kind in zip(trace.tensors, trace.kinds, strict=True) if KINDS[kind] == "gradient"]
    assert gradients == ["gradient 0.weight"]
    assert trace.sizes_bytes[number_of(trace, "gradient 0.weight")] == flat.nbytes


def test_the_first_step_says_of_state_what_the_others_say() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with Profiler(model, optimizer) as profiler:
        networks.step(model, optimizer, networks.numbers(), networks.square_loss)
    first = profiler.trace()
    with Profiler(model, optimizer) as profiler:
        networks.step(model, optimizer, networks.numbers(), networks.square_loss)
    second = profiler.trace()

    def kept(trace: Trace) -> set[tuple[str, int]]:
        return {
            (name, int(size))
            for name, size, persistent in zip(trace.tensors, trace.sizes_bytes, trace.persistent, strict=True)
            if persistent
        }

    assert kept(first) == kept(second)


# --- looking and telling ---------------------------------------------------------------------------------------------
def test_training_goes_on_as_if_nobody_had_looked() -> None:
    parameters = []
    for looks in (False, True):
        model = networks.decoder()
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(3):
            if looks and number == 1:
                with Profiler(model, optimizer, chunk_bytes=1 << 12):
                    networks.step(model, optimizer, networks.words(), word_loss)
            else:
                networks.step(model, optimizer, networks.words(), word_loss)
        parameters.append(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_nothing_is_kept_alive_and_nothing_is_left() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    gc.disable()
    try:
        with Profiler(model, optimizer) as profiler:
            loss = networks.square_loss(model, networks.numbers())
            gone = weakref.ref(loss), weakref.ref(loss.untyped_storage())
            loss.backward()
            optimizer.step()
            del loss
            assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()
    assert profiler.trace().operator_count > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert "step" not in vars(optimizer)


def test_a_step_that_fails_leaves_nothing_either() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    profiler = Profiler(model, optimizer)
    with pytest.raises(RuntimeError), profiler:
        model(torch.ones(2, 3))
    assert not any(module._forward_hooks for module in model.modules())
    assert "step" not in vars(optimizer)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    with pytest.raises(Invalid, match="no step was profiled"):
        profiler.trace()
    with pytest.raises(Invalid, match="a profiler sees one step"):
        profiler.__enter__()


def test_what_cannot_be_profiled_is_said() -> None:
    model = networks.layers()
    with pytest.raises(Invalid, match="not known to update each parameter by itself"):
        Profiler(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(Invalid, match="no parameters"):
        Profiler(nn.ReLU(), torch.optim.AdamW(model.parameters()))


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    trace = profiled(*CASES["decoder"]())
    trace.save(tmp_path / "trace.json.gz")
    again = load(tmp_path / "trace.json.gz")
    assert again.tensors == trace.tensors
    assert again.point_names == trace.point_names
    assert np.array_equal(again.need_bytes(), trace.need_bytes())
    assert again.about["device"] == "cpu"
    assert again.about["seconds"] == "measured"
    assert (trace.times_s > 0).all()
