"""Training under `Offload` on a CUDA device: the numbers of training without it, in less memory.

Each program runs twice, and all that it tells and leaves is compared bit by bit. Where no device is, nothing of this
runs: what the engine decides is tested in host memory, and what it asks of torch.cuda in test_device_memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from forebay.offload import DiskTier, HostTier, Offload
from forebay.offload.tiers.tiers import Storage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

MIB = 1 << 20
BLOCKS, WIDTH, CLASSES, ROWS = 4, 1024, 16, 4096
STEPS = 10
LEFT_TO_THE_ALLOCATOR = 0.92  # as docs/offload.md says

Make = Callable[[], tuple[Any, Any]]
Take = Callable[[Any, Any, int], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Recomputed(Block):
    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def model_of(block: type[Block] = Block, device: str = "cuda") -> Any:
    torch.manual_seed(7)
    with torch.device(device):
        return nn.Sequential(*(block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))


def fused() -> tuple[Any, Any]:
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def foreach() -> tuple[Any, Any]:
    model = model_of()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def recomputed() -> tuple[Any, Any]:
    model = model_of(Recomputed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(step: int, rows: int = ROWS) -> tuple[Any, Any]:
    chance = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(rows, WIDTH, generator=chance, device="cuda")
    return x, torch.randint(0, CLASSES, (rows,), generator=chance, device="cuda")


def loss_of(model: Any, step: int, rows: int = ROWS) -> Any:
    x, y = batch(step, rows)
    return functional.cross_entropy(model(x), y)


# --- programs --------------------------------------------------------------------------------------------------------
def plain(model: Any, optimizer: Any, step: int) -> Any:
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def clipped(model: Any, optimizer: Any, step: int) -> Any:
    loss = loss_of(model, step)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def accumulated(model: Any, optimizer: Any, step: int) -> Any:
    losses = [loss_of(model, 2 * step + half, ROWS // 2) for half in range(1)]
    for loss in losses:
        loss.backward()
    losses.append(loss_of(model, 2 * step + 1, ROWS // 2))
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return losses


def scaling() -> Take:
    """Half precision with a scaler of its own."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)

    def take(model: Any, optimizer: Any, step: int) -> Any:
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss, norm

    return take


def evaluated(model: Any, optimizer: Any, step: int) -> Any:
    """A look at the weights and a forward pass without gradients, between two steps."""
    with torch.no_grad():
        return model(batch(1000 + step)[0]).sum(), next(model.parameters()).norm()


# --- what they come to -----------------------------------------------------------------------------------------------
def told(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        return [float(value.detach().double().item())]
    return [number for part in value for number in told(part)]


def left(model: Any, optimizer: Any) -> dict[str, Any]:
    """All of a model and of its optimizer, in host memory."""
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{key} of {number}": torch.as_tensor(value).cpu() for key, value in state.items()}
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def alone(make: Make, take: Take, after: Take | None = None) -> tuple[list[Any], dict[str, Any], int]:
    """What the program tells, what it leaves, and the most memory that it takes."""
    gc.collect()  # graphs of an earlier test, which are cycles
    torch.cuda.empty_cache()
    model, optimizer = make()
    found: list[Any] = []
    for step in range(STEPS):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        found.append(told(take(model, optimizer, step)))
        if step == 2:
            peak = torch.cuda.max_memory_allocated()
        found.append(told(after(model, optimizer, step)) if after else [])
    return found, left(model, optimizer), peak


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return HostTier("2GiB") if request.param == "host" else DiskTier([tmp_path], "2GiB")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


CASES: dict[str, tuple[Make, Callable[[], Take], Take | None]] = {
    "fused": (fused, lambda: plain, None),
    "foreach": (foreach, lambda: plain, None),
    "clipped": (fused, lambda: clipped, None),
    "accumulated": (fused, lambda: accumulated, None),
    "half precision": (foreach, scaling, None),
    "recomputed": (recomputed, lambda: plain, None),
    "evaluated": (fused, lambda: plain, evaluated),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_tells_and_leaves_the_same_in_less_memory(tmp_path: Path, case: str) -> None:
    make, take_of, after = CASES[case]
    expected, expected_left, need = alone(make, take_of(), after)
    model, optimizer = make()
    take, found, peaks = take_of(), [], []
    budget = int(0.75 * need)
    tiers = [HostTier("2GiB"), DiskTier([tmp_path], "2GiB")]
    with Offload(model, optimizer, budget=budget, tiers=tiers, chunk_bytes=8 * MIB, experimental=True) as off:
        for step in range(STEPS):
            torch.cuda.reset_peak_memory_stats()
            with off.step():
                found.append(told(take(model, optimizer, step)))
            peaks.append(torch.cuda.max_memory_allocated())
            found.append(told(after(model, optimizer, step)) if after else [])
        report = off.report()
        assert not report.failures
        assert report.moves
        assert report.read_bytes
        assert not any(facts.lost for facts in off.steps)
    assert found == expected
    assert differing(left(model, optimizer), expected_left) == []
    assert max(peaks) <= budget / LEFT_TO_THE_ALLOCATOR, [f"{peak / budget:.3f}" for peak in peaks]


def test_either_tier_will_do(tier: Storage) -> None:
    expected, expected_left, need = alone(fused, plain)
    model, optimizer = fused()
    with Offload(model, optimizer, budget=int(0.6 * need), tiers=[tier], chunk_bytes=8 * MIB, experimental=True) as off:
        found = []
        for step in range(STEPS):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
            found.append([])
        assert off.report().written_bytes
        assert not off.report().failures
    assert found == expected
    assert differing(left(model, optimizer), expected_left) == []


def test_a_state_goes_out_and_comes_back_tensor_by_tensor(tmp_path: Path) -> None:
    expected, _, need = alone(fused, plain)
    model, optimizer = fused()
    budget = int(0.75 * need)
    with Offload(
        model, optimizer, budget=budget, tiers=[HostTier("2GiB")], chunk_bytes=8 * MIB, experimental=True
    ) as off:
        for step in range(7):
            with off.step():
                plain(model, optimizer, step)
        state = off.state_dict()
        assert {value.device.type for value in state["model"].values()} == {"cpu"}
        with off.step():
            plain(model, optimizer, 7)
        off.load_state_dict(state)  # the step that was taken since is undone
        for step in range(7, STEPS):
            with off.step():
                assert told(plain(model, optimizer, step)) == expected[2 * step]
        off.close(to="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_model_on_meta_is_made_on_the_device(tmp_path: Path) -> None:
    """Weights are drawn by the device's generator, in the order of the modules."""
    expected, expected_left, need = alone(fused, plain)
    model = model_of(device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(7)
    found: list[Any] = []
    with Offload(
        model,
        optimizer,
        budget=int(0.75 * need),
        tiers=[DiskTier([tmp_path], "2GiB")],
        chunk_bytes=8 * MIB,
        device="cuda",
        experimental=True,
    ) as off:
        for step in range(STEPS):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
            found.append([])
        assert off.report().moves
    assert found == expected
    assert differing(left(model, optimizer), expected_left) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, where it is new for that Python
def test_a_compiled_block_stays_compiled(tmp_path: Path) -> None:
    def compiled() -> tuple[Any, Any]:
        model, optimizer = fused()
        for block in model[:-1]:
            block.compile()
        return model, optimizer

    expected, expected_left, need = alone(compiled, plain)
    model, optimizer = compiled()
    found: list[Any] = []
    with Offload(
        model,
        optimizer,
        budget=int(0.8 * need),
        tiers=[HostTier("2GiB")],
        chunk_bytes=8 * MIB,
        experimental=True,
    ) as off:
        for step in range(STEPS):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
            found.append([])
        assert off.report().moves
    assert found == expected
    assert differing(left(model, optimizer), expected_left) == []


def test_a_step_in_the_capture_of_a_graph_is_refused(tmp_path: Path) -> None:
    from forebay.core.errors import NotSupported

    model, optimizer = fused()
    with Offload(
        model, optimizer, budget="1GiB", tiers=[HostTier("1GiB")], chunk_bytes=8 * MIB, experimental=True
    ) as off:
        graph = torch.cuda.CUDAGraph()
        x = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x.add_(1)
            with pytest.raises(NotSupported, match="CUDA graph is being captured"), off.step():
                pass
