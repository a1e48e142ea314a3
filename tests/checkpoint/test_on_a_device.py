"""Checkpoints of a job on a CUDA device: what was saved is what the device would have computed by then.

Where no device is, nothing of this runs; the same code is tested with tensors in host memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from forebay.torch import Checkpointer, RandomState, StorageReader, StorageWriter
from forebay.torch.checkpoint.staging import Arena
from tests.node.conftest import NodeProcess

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]

MIB = 1 << 20
LONG_CYCLES = 200_000_000  # of a GPU's clock: a tenth of a second


def saver(node: NodeProcess, place: str, **more: Any) -> Checkpointer:
    return Checkpointer(place, url=node.endpoint, **more)


def made() -> tuple[Any, Any]:
    torch.manual_seed(7)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(512, 2048), nn.Dropout(0.2), nn.ReLU(), nn.Linear(2048, 512))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_goes_on_with_the_same_losses(node: NodeProcess) -> None:
    model, optimizer = made()
    with saver(node, "runs/device") as checkpoints:
        train(model, optimizer, 3)
        handle = checkpoints.save(3, {"model": model, "optim": optimizer, "rng": RandomState()})
        expected = train(model, optimizer, 4)  # queued behind the copies, while these go on
        handle.durable()
    model, optimizer = made()
    torch.manual_seed(99)
    with saver(node, "runs/device") as checkpoints:
        restored = checkpoints.restore({"model": model, "optim": optimizer, "rng": RandomState()})
    assert restored is not None
    assert (restored.step, restored.skipped, restored.absent) == (3, [], [])
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert train(model, optimizer, 4) == expected


@pytest.mark.parametrize("cap", [None, 16 * MIB])  # all at once, and in waves
def test_what_is_saved_is_what_was_queued_before_and_nothing_after(node: NodeProcess, cap: int | None) -> None:
    place = f"runs/late-{cap}"
    state = torch.zeros(20_000_000, device="cuda")  # 80 MB
    seen = torch.arange(20_000_000, device="cuda").float()
    with saver(node, place, staging_bytes=cap) as checkpoints:
        for step in (1, 2):
            torch.cuda._sleep(LONG_CYCLES)
            state.copy_(seen)
            state.add_(step)
            handle = checkpoints.save(step, {"w": state})
            state.fill_(-1)  # as the next step would
            handle.durable()
        found = torch.empty_like(state)
        restored = checkpoints.restore({"w": found})
        assert restored is not None
        assert torch.equal(found, seen + 2)
        assert checkpoints.verify() is None
        if cap is not None:
            assert checkpoints._arena.held_bytes <= cap


def test_a_save_returns_before_the_device_has_got_to_it(node: NodeProcess) -> None:
    """Training's thread goes on queueing; only the device waits for the copy."""
    state = torch.zeros(5_000_000, device="cuda")
    with saver(node, "runs/ahead") as checkpoints:
        checkpoints.save(0, {"w": state}, wait=True)
        torch.cuda._sleep(10 * LONG_CYCLES)
        reached = torch.cuda.Event()
        reached.record()
        handle = checkpoints.save(1, {"w": state})
        assert not reached.query()
        handle.staged()
        assert reached.query()
        handle.durable()


def test_every_kind_of_tensor_comes_back(node: NodeProcess) -> None:
    torch.manual_seed(3)
    base = torch.randn(64, 33, device="cuda")
    state = {
        "transposed": base.t(),
        "part": base[3:50, 5:9],
        "number": torch.tensor(7, device="cuda"),
        "none": torch.empty(0, 4, device="cuda"),
        "half": base.bfloat16(),
        "small": base.to(torch.float8_e4m3fn),
        "complex": torch.complex(base, base).conj(),
        "host": torch.arange(10),
        "bools": base > 0,
    }
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with saver(node, "runs/kinds") as checkpoints:
        checkpoints.save(1, state, wait=True)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpoints.restore(into) is not None
    for name, tensor in expected.items():
        found = into[name]
        assert (found.device, found.dtype) == (tensor.device, tensor.dtype)
        if tensor.dtype == torch.float8_e4m3fn:
            found, tensor = found.view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(found, tensor), name


def test_blobs_of_a_gpu_are_handed_over_too(node: NodeProcess) -> None:
    """The pinned memory is the node's to read: nothing is sent."""
    arena = Arena(None)
    with saver(node, "runs/handed") as checkpoints:
        checkpoints._arena = arena
        checkpoints.save(1, {"w": torch.ones(5_000_000, device="cuda")}, wait=True)
    buffer = arena.take(lambda: None)
    assert buffer.shared is not None
    assert buffer.tensor.is_pinned()


def test_torchs_own_checkpoints_take_what_is_on_a_gpu(node: NodeProcess) -> None:
    model, optimizer = made()
    train(model, optimizer, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id="runs/dcp", storage_writer=StorageWriter(url=node.endpoint))
    train(model, optimizer, 1)
    into = model.state_dict()
    dcp.load({"model": into}, checkpoint_id="runs/dcp", storage_reader=StorageReader(url=node.endpoint))
    assert all(torch.equal(into[name], value) for name, value in before.items())
