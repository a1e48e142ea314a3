"""Models of which parts are compiled: they stay compiled, their numbers stay the compiled code's, and tensors move."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from forebay.core.errors import NotSupported
from forebay.offload import DiskTier, Offload, engine
from forebay.offload.tracing import profile
from forebay.offload.tracing.profile import Profiler
from tests.torch.offload.programs import STEPS, compare, evaluated, left, loss_of, plain, run, told
from tests.torch.offload.test_engine import CLASSES, ROWS, SMALL, WIDTH, Block, batch, made

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns of itself
    pytest.mark.timeout(1200),  # and takes as long as the cores have for it: 20 s, or 300 where they are busy
]
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
CONFIG = {"wrap_inductor_compiled_regions": False, "compile_threads": 1}  # no pool of processes beside it
BLOCKS = 2  # each is compiled by itself
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_a_compiler)]

Compile = Callable[[Any, str], Any]  # a module that is compiled, of one that is not


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test finds what another one compiled, but for what inductor keeps on disk, for all processes of this run."""
    place = tmp_path_factory.getbasetemp()
    place = place.parent if "PYTEST_XDIST_WORKER" in os.environ else place
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(place / "inductor"))
    with torch._inductor.config.patch(CONFIG):
        yield
    torch._dynamo.reset()


def in_place(module: Any, backend: str) -> Any:
    module.compile(backend=backend)
    return module


def as_another(module: Any, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def of_compiled(backend: str, compiled: Compile = in_place) -> tuple[Any, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(7)
    model = nn.Sequential(*(compiled(Block(), backend) for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def what_was_compiled() -> tuple[int, int, int]:
    """Graphs, frames, and places at which torch had to stop."""
    return counters["stats"]["unique_graphs"], counters["frames"]["total"], sum(counters["graph_break"].values())


# --- blocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [in_place, as_another])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_much_is_compiled_as_without_and_to_the_same_bits(tmp_path: Path, backend: str, compiled: Compile) -> None:
    seen: list[tuple[int, int, int]] = []

    def last(model: Any, optimizer: Any, step: int) -> None:
        if step == STEPS - 1:
            seen.append(what_was_compiled())

    compare(lambda: of_compiled(backend, compiled), plain, tmp_path, after=last)
    alone, _with = seen
    assert alone[0] > 0
    assert alone[2] == 0
    assert _with == alone


@needs_a_compiler
def test_a_region_is_one_operator_of_the_trace() -> None:
    model, optimizer = of_compiled("inductor")
    with Profiler(model, optimizer):
        plain(model, optimizer, 0)
    with Profiler(model, optimizer) as profiler:
        plain(model, optimizer, 1)
    trace = profiler.trace()
    regions = [at for at, name in enumerate(trace.operators) if name == "compiled.region"]
    assert len(regions) == 2 * BLOCKS, "each block, there and back"
    weight = trace.tensors.index("parameter 0.up.weight")
    assert set(trace.uses(weight).tolist()) & set(regions)
    saved = next(at for at, name in enumerate(trace.tensors) if name.startswith("saved "))
    assert set(trace.uses(saved).tolist()) & set(regions)


@needs_a_compiler
@pytest.mark.parametrize("shown", [True, False])
def test_what_was_compiled_before_has_its_tensors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    """It is compiled once more, and is seen then; if that is not so, weights are brought with their module."""
    if not shown:
        monkeypatch.setattr(engine, "show_regions", lambda: None)
        monkeypatch.setattr(profile, "show_regions", lambda: None)
    expected, expected_left = run(lambda: of_compiled("inductor"), plain, None, STEPS)
    model, optimizer = of_compiled("inductor")
    found = [told(plain(model, optimizer, step)) for step in range(2)]
    with Offload(model, optimizer, budget="2MiB", tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        for step in range(2, STEPS):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
        assert off.report().read_bytes
        assert off.trace is not None
        assert ("compiled.region" in off.trace.operators) is shown
    assert found == expected[::2]
    assert dict(left(model, optimizer)) == expected_left


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_block_is_called_by_itself_between_steps(tmp_path: Path, backend: str) -> None:
    def after(model: Any, optimizer: Any, step: int) -> list[Any]:
        x, _ = batch(step)
        with torch.no_grad():
            looked = model[0](x)
        model[1](x).sum().backward()
        gradient = model[1].up.weight.grad.clone()
        optimizer.zero_grad()
        return [looked, gradient, evaluated(model, optimizer, step)]

    compare(lambda: of_compiled(backend), plain, tmp_path, after=after)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_is_compiled_within_the_forward(tmp_path: Path, backend: str) -> None:
    def make() -> tuple[Any, Any]:
        torch._dynamo.reset()

        @torch.compile(backend=backend)
        def gated(x: Any, gate: Any, weight: Any) -> Any:
            return nn.functional.silu(x @ weight) * torch.sigmoid(gate)

        class Gated(Block):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

            def forward(self, x: Any) -> Any:
                return gated(super().forward(x), x, self.weight)

        torch.manual_seed(5)
        model = nn.Sequential(*(Gated() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    compare(make, plain, tmp_path)


@needs_a_compiler
def test_running_numbers_that_a_region_writes(tmp_path: Path) -> None:
    """Those of a batch norm: buffers that the compiled code writes by itself."""

    def make() -> tuple[Any, Any]:
        torch._dynamo.reset()
        torch.manual_seed(5)
        layers = [nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)) for _ in range(BLOCKS)]
        for layer in layers:
            layer.compile()
        model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    compare(make, plain, tmp_path)


@needs_a_compiler
def test_a_batch_of_another_size_is_compiled_anew(tmp_path: Path) -> None:
    def take(model: Any, optimizer: Any, step: int) -> list[Any]:
        loss = loss_of(model, step, 3 * ROWS // 4 if step in (6, 9) else ROWS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item()]

    compare(lambda: of_compiled("inductor"), take, tmp_path, may_be_lost=True, steps=STEPS + 2)


# --- the whole -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [in_place, as_another])
def test_a_model_compiled_as_a_whole_is_refused(tmp_path: Path, compiled: Compile) -> None:
    model, optimizer = made()
    with pytest.raises(NotSupported, match="compile its blocks one by one"):
        Offload(compiled(model, "eager"), optimizer, budget="1GiB", tiers=[DiskTier([tmp_path], "64MiB")])


def test_nothing_of_ours_is_left_at_a_compiled_block(tmp_path: Path) -> None:
    model, optimizer = of_compiled("eager")
    before = [block._compiled_call_impl for block in model]
    with Offload(model, optimizer, budget="1MiB", tiers=[DiskTier([tmp_path], "64MiB")], **SMALL) as off:
        for step in range(STEPS):
            with off.step():
                plain(model, optimizer, step)
        assert [block._compiled_call_impl for block in model] != before
    assert [block._compiled_call_impl for block in model] == before
