"""`torch.distributed.checkpoint` on our storage, with several ranks: FSDP2 and DTensor, other numbers of ranks, saves
in a thread and in a process, and a rank that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forebay.checkpoint.repository import Repository, parse_run
from forebay.client.sync import Client
from forebay.core.checkpoint import Manifest
from forebay.torch import Checkpointer, StorageReader, StorageWriter
from tests.checkpoint.test_ranks import full, ranks, sharded_model, step
from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real


class App:
    """A job's state as frameworks hand it to DCP: one object for model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def steps(node: NodeProcess, place: str) -> list[int]:
    with Client(node.endpoint) as client:
        found = Repository(client, *parse_run(place)).candidates()
        return [each.step for each in found if isinstance(each, Manifest)]


def test_two_ranks_then_one_then_two_with_saves_of_every_kind(node: NodeProcess, tmp_path: Path):
    place, expected = "runs/dcp-reshard", tmp_path / "expected.pt"

    def begin(rank: int) -> None:
        model, optimizer = sharded_model(2, 1)
        step(model, optimizer, 5)
        writer = StorageWriter(place, url=node.endpoint)
        dcp.save({"app": App(model, optimizer), "n": 1}, checkpoint_id="step-1", storage_writer=writer)
        whole = full(model, optimizer)
        if rank == 0:
            torch.save(whole, expected)

    def go_on(world: int, then: int) -> Callable[[int], None]:
        def work(rank: int) -> None:
            model, optimizer = sharded_model(world, 99)
            state = {"app": App(model, optimizer), "n": 0}
            dcp.load(state, checkpoint_id=place, storage_reader=StorageReader(url=node.endpoint))
            assert state["n"] == then - 1
            found = full(model, optimizer)
            for name, tensor in torch.load(expected).items():
                assert torch.equal(found[name], tensor), f"{name} with {world} ranks"
            step(model, optimizer, 6)
            whole = {name: tensor.clone() for name, tensor in full(model, optimizer).items()}
            state["n"] = then
            writer = StorageWriter(url=node.endpoint)
            saving = dcp.async_save(state, checkpoint_id=f"{place}/step-{then}", storage_writer=writer)
            for parameter in model.parameters():  # training goes on while it is saved
                parameter.data.zero_()
            saving.result()
            if rank == 0:
                torch.save(whole, expected)

        return work

    ranks(tmp_path, 2, begin)
    ranks(tmp_path, 1, go_on(1, 2))
    ranks(tmp_path, 2, go_on(2, 3))
    assert steps(node, place) == [3, 2, 1]

    def restore(rank: int) -> None:
        model, _ = sharded_model(3, 98)
        into = {"app": {"model": model.state_dict()}}
        with Checkpointer(place, url=node.endpoint) as checkpoints:
            checkpoints.restore(into)
        for name, tensor in torch.load(expected).items():
            if name.startswith("model."):
                found = into["app"]["model"][name.removeprefix("model.")].full_tensor()
                assert torch.equal(found, tensor), f"{name} by Checkpointer"

    ranks(tmp_path, 3, restore)


def test_cuts_in_any_dimension_meet(node: NodeProcess, tmp_path: Path):
    whole = torch.arange(12 * 10 * 3.0).reshape(12, 10, 3)
    placements = ([Shard(0)], [Shard(1)], [Shard(2)], [Replicate()])

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        writer = StorageWriter("runs/dcp-cuts", url=node.endpoint)
        reader = StorageReader("runs/dcp-cuts", url=node.endpoint)
        for saved in placements:
            state = {"t": distribute_tensor(whole, mesh, saved), "rank": rank, "copy": torch.ones(5)}
            state["row"] = distribute_tensor(
                torch.arange(4.0).reshape(1, 4), mesh, [Shard(0)]
            )  # of which rank 1 has none
            dcp.save(state, storage_writer=writer)
            for wanted in placements:
                target = {"t": distribute_tensor(torch.zeros_like(whole), mesh, wanted), "copy": torch.zeros(5)}
                target["row"] = distribute_tensor(torch.zeros(1, 4), mesh, [Shard(1)])
                dcp.load(target, storage_reader=reader)
                assert torch.equal(target["t"].full_tensor(), whole), (saved, wanted)
                assert torch.equal(target["copy"], torch.ones(5))
                assert torch.equal(target["row"].full_tensor(), torch.arange(4.0).reshape(1, 4))
            plain = {"t": torch.zeros_like(whole), "rank": -1}
            dcp.load(plain, storage_reader=reader)
            assert torch.equal(plain["t"], whole)

    ranks(tmp_path, 2, work)
    assert len(steps(node, "runs/dcp-cuts")) == 4


class FailingPlanner(DefaultSavePlanner):
    """A planner whose second rank cannot hand over its data."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("this rank is broken")
        return super().resolve_data(write_item)


def test_a_fault_of_one_rank_is_every_ranks_and_nobody_waits(node: NodeProcess, tmp_path: Path):
    place = "runs/dcp-fault"

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {"t": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
        writer = StorageWriter(place, url=node.endpoint)
        with pytest.raises(CheckpointException, match="this rank is broken") as failed:
            dcp.save(state, storage_writer=writer, planner=FailingPlanner())
        assert list(failed.value.failures) == [1]
        away = StorageWriter(place, url="http://127.0.0.1:9" if rank else node.endpoint, patience_s=0.1)
        with pytest.raises(CheckpointException, match=r"waited 0\.1 s in vain") as failed:
            dcp.save(state, storage_writer=away)
        assert list(failed.value.failures) == [1]
        reader = StorageReader(place, url=node.endpoint)
        with pytest.raises(CheckpointException, match="there is no checkpoint under runs/dcp-fault/"):
            dcp.load(state, storage_reader=reader)
        dcp.save(state, storage_writer=writer)  # which goes on as if nothing had been
        target = {"t": distribute_tensor(torch.zeros(10), mesh, [Shard(0)])}
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["t"].full_tensor(), torch.arange(10.0))
        dist.barrier()
        if rank == 1:  # a rank that found another checkpoint than the others
            reader.reset()
            reader._chosen = lambda known=False: _older(reader)  # type: ignore[method-assign]
        dcp.save(state, storage_writer=writer)
        with pytest.raises(CheckpointException, match="was saved while the ranks looked"):
            dcp.load(target, storage_reader=reader)

    ranks(tmp_path, 2, work)
    assert len(steps(node, place)) == 2


def _older(reader: StorageReader) -> Any:
    source = StorageReader._chosen(reader)
    source.manifest = source._repository.manifest(source.manifest.sequence - 1)
    return source


def test_a_process_of_its_own_saves(node: NodeProcess, tmp_path: Path):
    place = "runs/dcp-process"

    def work(rank: int) -> None:
        model, optimizer = sharded_model(1, 1)
        step(model, optimizer, 5)
        state = {"app": App(model, optimizer)}
        writer = StorageWriter(place, url=node.endpoint)
        for number in (1, 2):
            dcp.async_save(
                state,
                checkpoint_id=f"{place}/step-{number}",
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result()
        expected = full(model, optimizer)
        other, its_optimizer = sharded_model(1, 2)
        dcp.load({"app": App(other, its_optimizer)}, storage_reader=StorageReader(place, url=node.endpoint))
        found = full(other, its_optimizer)
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    ranks(tmp_path, 1, work)
    assert steps(node, place) == [2, 1]
