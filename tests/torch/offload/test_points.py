"""The points of a step: what is called, in which order, and that nothing stays."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import TensorSaid, Trace, build
from forebay.offload.tracing.points import BEGINS, ENDS, Points, default_points
from forebay.offload.tracing.shapes import word_loss
from forebay.offload.tracing.timing import SegmentTimer, scaled
from tests.torch.offload import networks


def reached_in(points: Points, reached: list[str], model: Any, optimizer: Any, batch: Any, loss_of: Any) -> list[str]:
    reached.clear()
    points.begin_step()
    networks.step(model, optimizer, batch, loss_of)
    points.end_step()
    return list(reached)


def test_a_step_reaches_its_points_in_order() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    reached: list[str] = []
    points = Points(model, optimizer, reached.append, chunk_bytes=1 << 16)
    points.attach()
    first = reached_in(points, reached, model, optimizer, networks.numbers(), networks.square_loss)
    assert [name for name in first if not name.startswith("gradient")] == [
        BEGINS,
        "forward of 0",
        "after forward of 0",
        "forward of 2",
        "after forward of 2",
        "backward of 2",
        "backward of 0",
        "optimizer chunk 0",
        "optimizer chunk 1",
        "after optimizer",
        ENDS,
    ]
    assert first.index("backward of 2") < first.index("gradient of 2.weight") < first.index("backward of 0")
    assert first.index("gradient of 0.weight") < first.index("optimizer chunk 0")
    assert reached_in(points, reached, model, optimizer, networks.numbers(), networks.square_loss) == first


def test_after_detach_neither_model_nor_optimizer_holds_a_hook() -> None:
    model = networks.decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    reached: list[str] = []
    points = Points(model, optimizer, reached.append)
    points.attach()
    points.attach()
    assert model.layers[0]._forward_hooks
    graph = word_loss(model, networks.words())
    points.detach()
    points.detach()
    reached.clear()
    graph.backward()
    optimizer.step()
    networks.step(model, optimizer, networks.words(), word_loss)
    assert reached == [], "a graph that was made before is silent too"
    for name, module in model.named_modules():
        assert not module._forward_hooks, name
        assert not module._forward_pre_hooks, name
        assert set(vars(module)) == before[name]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert "step" not in vars(optimizer)


def test_no_graph_is_kept_alive() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    points = Points(model, optimizer, lambda name: None)
    points.attach()
    gc.disable()
    try:
        points.begin_step()
        output = model(networks.numbers())
        gone = weakref.ref(output), weakref.ref(output.untyped_storage())
        output.sum().backward()
        points.end_step()
        del output
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_a_module_that_is_used_twice_has_numbers() -> None:
    networks.seeded()
    model = nn.ModuleDict({"shared": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reached: list[str] = []
    points = Points(model, optimizer, reached.append)
    points.attach()
    points.begin_step()
    model["shared"](model["shared"](torch.ones(2, 8))).sum().backward()
    assert [name for name in reached if "forward of" in name and "after" not in name] == [
        "forward of shared",
        "forward of shared #2",
    ]
    assert [name for name in reached if "backward" in name] == ["backward of shared", "backward of shared #2"]
    assert reached.count("gradient of shared.weight") == 1, "when it is complete"


def test_several_outputs_have_one_backward() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return {"double": 2 * self.weight * x, "others": (self.weight + x, 3)}

    model = Split()
    reached: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = Points(model, optimizer, reached.append)
    points.attach()
    output = model(torch.ones(4))
    (output["double"] + output["others"][0]).sum().backward()
    assert [name for name in reached if "backward" in name] == ["backward of the model"]


def test_modules_that_own_parameters_and_blocks_have_points() -> None:
    model = networks.decoder()
    wanted = default_points(model)
    chosen = {name for name, module in model.named_modules() if wanted(name, module)}
    assert {"words", "layers.0", "layers.1", "layers.0.attention.query", "norm", "scores"} <= chosen
    assert not {"", "layers", "layers.0.attention", "layers.0.feed_forward"} & chosen


# --- times -----------------------------------------------------------------------------------------------------------
def test_stretches_are_timed_in_ordinary_steps() -> None:
    model = networks.layers()
    optimizer = torch.optim.AdamW(model.parameters())
    timer = SegmentTimer()
    points = Points(model, optimizer, timer.at)
    points.attach()
    model(networks.numbers())  # outside a step: not timed
    with pytest.raises(Invalid, match="no step was timed"):
        timer.seconds()
    for _ in range(3):
        points.begin_step()
        networks.step(model, optimizer, networks.numbers(), networks.square_loss)
        points.end_step()
    found = timer.seconds()
    assert timer.steps == 3
    assert found["forward of 0"] > 0
    assert ENDS not in found
    assert min(found.values()) >= 0


def four_stretches() -> Trace:
    operators = [("a", 1.0, 0), ("b", 3.0, 0), ("c", 0.0, 0), ("d", 0.0, 0), ("e", 1.0, 0)]
    points = [("begins", 0), ("middle", 2), ("empty", 4), ("late", 4), ("ends", 5)]
    return build("four", operators, points, [TensorSaid("one", "parameter", 8, [0], persistent=True)])


def test_on_a_device_stretches_are_what_passes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is far ahead of a device. What it waited there is not of the stretch, and no stretch is less than none."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms, self.is_past = 0.0, False

        def record(self) -> None:
            self.at_ms = next(times_ms)

        def synchronize(self) -> None:
            self.is_past = True

        def elapsed_time(self, later: Any) -> float:
            assert later.is_past
            return later.at_ms - self.at_ms

    times_ms = iter([100.0, 130.0, 135.0, 175.0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = SegmentTimer(torch.device("cuda", 0))
    for name, waited_s in ((BEGINS, 0.0), ("forward", 0.0), ("backward", 0.01), (ENDS, 0.02)):
        timer.at(name, waited_s=waited_s)
    assert timer.seconds() == pytest.approx({BEGINS: 0.03, "forward": 0.0, "backward": 0.03})


def test_a_trace_is_scaled_to_its_stretches() -> None:
    trace = four_stretches()
    by_name = scaled(trace, {"begins": 0.4, "middle": 0.2, "empty": 0.05, "late": 0.1})
    assert by_name.times_s.tolist() == pytest.approx([0.1, 0.3, 0.1, 0.1, 0.15])
    in_order = scaled(trace, [0.4, 0.2, 0.05, 0.1])
    assert in_order.times_s.tolist() == by_name.times_s.tolist()
    assert scaled(trace, {"begins": 8.0}).times_s.tolist() == pytest.approx([2, 6, 0, 0, 1])
    with pytest.raises(Invalid, match="2 times for the stretches between 5 points"):
        scaled(trace, [1.0, 2.0])
    with pytest.raises(Invalid, match="less than no time"):
        scaled(trace, {"begins": -1.0})


def test_what_is_measured_behind_the_last_operator_is_not_lost() -> None:
    trace = four_stretches()
    measured = {"begins": 0.4, "middle": 0.2, "empty": 0.0, "late": 0.1, "ends": 0.3}
    assert scaled(trace, measured).compute_s == pytest.approx(1.0)
