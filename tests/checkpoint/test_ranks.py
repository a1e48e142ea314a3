"""Several ranks save one checkpoint, and another number of ranks restores it: plain copies, shards, and each rank's
own."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from forebay.core.errors import ForebayError, Invalid
from forebay.torch import Checkpointer, RandomState
from tests.checkpoint.crash_trainer import fork
from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real


def ranks(tmp_path: Path, world: int, work: Callable[[int], None]) -> None:
    """Run `work` on `world` ranks that know of each other; what one of them raises is raised here."""
    meeting = tmp_path / f"meeting-{len(list(tmp_path.iterdir()))}"

    def joined(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        work(rank)
        dist.destroy_process_group()

    pids = [fork(tmp_path / f"{meeting.name}-{rank}", lambda rank=rank: joined(rank)) for rank in range(world)]  # type: ignore[misc]
    failed = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    errors = [path.read_text() for path in sorted(tmp_path.glob(f"{meeting.name}-*.error"))]
    assert not any(failed), "\n".join(errors)


def sharded_model(world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters are sharded over all ranks, of 7 and 30 rows, which two ranks share unevenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 20)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of model and optimizer, whole."""
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optim.{number}.{name}": value for name, value in state.items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def test_shards_of_two_ranks_are_restored_by_one_and_by_two_again(node: NodeProcess, tmp_path: Path):
    place, expected = "runs/reshard", tmp_path / "expected.pt"

    def save(rank: int) -> None:
        model, optimizer = sharded_model(2, 1)
        step(model, optimizer, 5)
        with Checkpointer(place, url=node.endpoint) as checkpoints:
            checkpoints.save(1, {"model": model, "optim": optimizer}, wait=True)
        whole = full(model, optimizer)
        if rank == 0:
            torch.save(whole, expected)

    def restore(world: int, then: int) -> Callable[[int], None]:
        def work(rank: int) -> None:
            model, optimizer = sharded_model(world, 99)
            with Checkpointer(place, url=node.endpoint) as checkpoints:
                restored = checkpoints.restore({"model": model, "optim": optimizer})
                assert restored is not None
                found = full(model, optimizer)
                for name, tensor in torch.load(expected).items():
                    assert torch.equal(found[name], tensor), f"{name} with {world} ranks"
                step(model, optimizer, 6)
                checkpoints.save(then, {"model": model, "optim": optimizer}, wait=True)
                whole = full(model, optimizer)
                if rank == 0:
                    torch.save(whole, expected)

        return work

    ranks(tmp_path, 2, save)
    ranks(tmp_path, 1, restore(1, 2))
    ranks(tmp_path, 2, restore(2, 3))
    ranks(tmp_path, 3, restore(3, 4))


def test_a_job_under_ddp_goes_on_with_the_same_model_on_all_ranks(node: NodeProcess, tmp_path: Path):
    expected = tmp_path / "expected.pt"

    def job(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 7)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(rank: int) -> None:
        model, optimizer = job(1)
        step(model, optimizer, 5 + rank)
        with Checkpointer("runs/ddp", url=node.endpoint) as checkpoints:
            checkpoints.save(1, {"model": model, "optim": optimizer}, wait=True)
        step(model, optimizer, 7 + rank)
        if rank == 0:
            torch.save(full(model, optimizer), expected)

    def go_on(rank: int) -> None:
        model, optimizer = job(99)
        with Checkpointer("runs/ddp", url=node.endpoint) as checkpoints:
            assert checkpoints.restore({"model": model, "optim": optimizer}) is not None
        step(model, optimizer, 7 + rank)
        found = full(model, optimizer)
        for name, tensor in torch.load(expected).items():
            assert torch.equal(found[name], tensor), f"{name} on rank {rank}"

    ranks(tmp_path, 2, train)
    ranks(tmp_path, 2, go_on)


def test_cuts_in_any_dimension_meet(node: NodeProcess, tmp_path: Path):
    whole = torch.arange(12 * 10 * 3.0).reshape(12, 10, 3)
    placements = ([Shard(0)], [Shard(1)], [Shard(2)], [Replicate()])

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with Checkpointer("runs/cuts", url=node.endpoint) as checkpoints:
            for saved in placements:
                checkpoints.save(0, {"t": {"w": distribute_tensor(whole, mesh, saved)}}, wait=True)
                manifest = checkpoints.list()[0]
                sizes = [sum(part.blobs) for part in manifest.ranks]
                assert sum(sizes) < whole.nbytes + 200, "replicas are saved once"
                for wanted in placements:
                    target = {"t": {"w": distribute_tensor(torch.zeros_like(whole), mesh, wanted)}}
                    checkpoints.restore(target)
                    assert torch.equal(target["t"]["w"].full_tensor(), whole), (saved, wanted)
                plain = {"t": {"w": torch.zeros_like(whole)}}
                checkpoints.restore(plain)
                assert torch.equal(plain["t"]["w"], whole)

    ranks(tmp_path, 2, work)


def test_copies_are_saved_once_and_what_is_each_ranks_own_by_each(node: NodeProcess, tmp_path: Path):
    def save(rank: int) -> None:
        state = {
            "model": {f"w{n}": torch.full((400_000,), float(n)) for n in range(6)},
            "small": {"statistic": torch.tensor([float(rank)])},
            "rng": RandomState(),
            "mine": {"rank": rank, "noise": torch.full((5,), float(rank))},
        }
        torch.manual_seed(rank)
        with Checkpointer("runs/copies", url=node.endpoint, own=("rng", "mine")) as checkpoints:
            manifest = checkpoints.save(4, state, wait=True).durable()
        sizes = [sum(part.blobs) for part in manifest.ranks]
        assert 9_600_000 < sum(sizes) < 9_700_000, "copies are saved once"
        assert abs(sizes[0] - sizes[1]) < 100_000, "and both ranks send as much"

    def restore(rank: int) -> None:
        found: dict[str, Any] = {"model": {}, "small": {}, "mine": {}, "rng": RandomState()}
        with Checkpointer("runs/copies", url=node.endpoint, own=("rng", "mine")) as checkpoints:
            restored = checkpoints.restore(found)
        assert restored is not None
        assert found["small"]["statistic"].item() == 0.0, "small copies are rank 0's"
        assert [found["model"][f"w{n}"][0].item() for n in range(6)] == list(range(6))
        if rank < 2:
            assert (found["mine"]["rank"], found["mine"]["noise"][0].item()) == (rank, rank)
            drawn = torch.randn(3)
            torch.manual_seed(rank)
            assert torch.equal(drawn, torch.randn(3))
        else:
            assert restored.absent == ["mine", "rng"] or set(restored.absent) == {"mine", "rng"}

    ranks(tmp_path, 2, save)
    ranks(tmp_path, 1, restore)
    ranks(tmp_path, 3, restore)


def test_a_fault_of_one_rank_is_every_ranks_and_nobody_waits(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        with Checkpointer("runs/fault", url=node.endpoint) as checkpoints:
            odd: Any = object() if rank == 1 else 1
            if rank == 1:
                with pytest.raises(Invalid, match="cannot be saved"):
                    checkpoints.save(1, {"odd": odd})
            else:
                with pytest.raises(ForebayError, match=r"rank 1: .*cannot be saved"):
                    checkpoints.save(1, {"odd": odd}).durable()
            with pytest.raises(Invalid, match="states differ in names"):
                checkpoints.save(2, {"w": torch.zeros(3 + rank)}).durable()
            checkpoints.save(3, {"fine": [1]}, wait=True)
            assert [manifest.step for manifest in checkpoints.list()] == [3]
            target = {"fine": [], **({"more": {}} if rank == 1 else {})}
            with pytest.raises(Invalid, match="no more"):
                checkpoints.restore(target)

    ranks(tmp_path, 2, work)


def trained(checkpoints: Checkpointer, steps: Iterator[int]) -> None:
    """Until something is told: the ranks agree meanwhile that the save failed."""
    for step in steps:
        assert checkpoints.maybe_save(step, {"state": {"v": 3}}) is None
        time.sleep(0.01)


def test_what_is_wrong_with_one_ranks_state_is_told_on_all(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        with Checkpointer("runs/one-cannot", url=node.endpoint, every=1) as checkpoints:
            checkpoints.maybe_save(1, {"state": {"v": 1}})
            state = {"state": {"v": object() if rank == 0 else 2}}
            if rank == 0:
                with pytest.raises(Invalid, match="cannot be saved"):
                    checkpoints.save(2, state)
            else:
                checkpoints.save(2, state)
            steps = itertools.count(3)
            with pytest.raises(Invalid, match="rank 0: state/v is a"):
                trained(checkpoints, steps)
            handle = checkpoints.maybe_save(next(steps), {"state": {"v": 4}})
            assert handle is not None
            assert handle.durable().step > 3

    ranks(tmp_path, 2, work)


def test_tensors_without_elements_are_restored(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {"empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]), "w": torch.full((3,), 1.0)}
        with Checkpointer("runs/no-elements", url=node.endpoint) as checkpoints:
            checkpoints.save(1, {"state": state}, wait=True)
            state["w"].zero_()
            assert checkpoints.restore({"state": state}) is not None
        assert state["empty"].shape == (0, 4)
        assert bool((state["w"] == 1.0).all())

    ranks(tmp_path, 2, work)


def test_a_save_is_due_for_all_or_none(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        with Checkpointer("runs/due", url=node.endpoint) as checkpoints:
            saved = [bool(checkpoints.maybe_save(step, lambda: {"rank": 1})) for step in range(1, 30)]
            said: list[Any] = [None, None]
            dist.all_gather_object(said, saved)
            assert said[0] == said[1]
            assert saved[0], "the first measures what a save costs"
            if rank == 1:
                checkpoints._note_signal()
            handle = checkpoints.maybe_save(50, {"rank": 1})
            assert handle is not None, "a signal to one rank saves on all"
            assert handle.done
            assert checkpoints.stopping

    ranks(tmp_path, 2, work)


def test_shards_of_another_dtype_are_converted_where_they_lie(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        model, _ = sharded_model(2, 1)
        doubled = sharded_model(2, 2)[0].double()
        with Checkpointer("runs/doubled", url=node.endpoint) as checkpoints:
            checkpoints.save(1, {"model": model}, wait=True)
            with pytest.raises(Invalid, match="is float64 and was saved as float32"):
                checkpoints.restore({"model": doubled})
            checkpoints.restore({"model": doubled}, strict=False)
        for mine, saved in zip(doubled.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), saved.full_tensor().double())  # type: ignore[attr-defined]

    ranks(tmp_path, 2, work)
