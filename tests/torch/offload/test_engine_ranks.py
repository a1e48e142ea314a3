"""Two ranks, each a process with an `Offload` of its own, train as the same two ranks do without it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from forebay.offload import DiskTier, HostTier, Offload
from tests.torch.offload.programs import FEW, budget_of, kinds_moved, left, run, times_of_a_table, told, without_state
from tests.torch.offload.test_engine import ROWS, SMALL, WATCHED, batch, made

WORLD, STEPS, SHARE = 2, WATCHED + 4, 0.75
Ranks = Callable[..., list[dict[str, Any]]]


def loss_of(model: Any, step: int, rows: int = ROWS // 2) -> Any:
    """Each rank has its own batches."""
    x, y = batch(WORLD * step + distributed.get_rank(), rows)
    return functional.cross_entropy(model(x), y)


def wrapped(**settings: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(made()[0], bucket_cap_mb=0.5, **settings)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(model: Any, optimizer: Any, step: int) -> list[Any]:
    loss = loss_of(model, step)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), norm]


def accumulating(model: Any, optimizer: Any, step: int) -> list[Any]:
    """Of two backwards only the second one tells the others."""
    with model.no_sync():
        first = loss_of(model, 2 * step)
        first.backward()
    second = loss_of(model, 2 * step + 1)
    second.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return [first.item(), second.item()]


def averaging(model: Any, optimizer: Any, step: int) -> list[Any]:
    """Without DDP: gradients are summed over the ranks by hand, and looked at before they are used."""
    loss = loss_of(model, step, FEW)
    loss.backward()
    with torch.no_grad():
        before = model(batch(step, FEW)[0]).sum()
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
    with torch.no_grad():
        after = model(batch(step + 1, FEW)[0]).sum()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), before, after]


Program = tuple[Callable[[], tuple[Any, Any]], Callable[[Any, Any, int], Any]]
PROGRAMS: dict[str, Program] = {
    "ddp": (wrapped, plain),
    "ddp that accumulates": (lambda: wrapped(gradient_as_bucket_view=True), accumulating),
    "by hand": (without_state, averaging),
}


def train(folder: str, rank: int, name: str, share: float, hosts: tuple[int, ...]) -> None:
    """What one rank does: the program alone, then with an `Offload`; it writes down what both came to."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=WORLD)
    make, take = PROGRAMS[name]
    expected, expected_left = run(make, take, None, STEPS)
    budget = budget_of(make, take, share)
    torch.manual_seed(11)
    model, optimizer = make()
    disk = Path(folder) / f"disk-{rank}"
    disk.mkdir()
    tier = HostTier("64MiB") if rank in hosts else DiskTier([disk], "128MiB")
    found = []
    with times_of_a_table(), Offload(model, optimizer, budget=budget, tiers=[tier], **SMALL) as off:
        for step in range(STEPS):
            with off.step():
                found.append(told(take(model, optimizer, step)))
            found.append([])
        report = off.report()
        facts = {"moves": report.moves, "read": report.read_bytes, "kinds": kinds_moved(off)}
        facts["lost"] = sum(step.lost for step in off.steps)
    facts["steps that differ"] = [at // 2 for at in range(2 * STEPS) if found[at] != expected[at]]
    mine = dict(left(model, optimizer))
    facts["what differs at the end"] = [key for key, value in expected_left.items() if mine[key] != value]
    facts["weights"] = [value for key, value in mine.items() if "weight" in key and " of " not in key]
    facts["left in the directory"] = os.listdir(disk)
    torch.save(facts, f"{folder}/facts-{rank}")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Run a program in two processes; what each wrote down. None is left at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.torch.offload.test_engine_ranks"])
    processes: list[Any] = []

    def launch(name: str, share: float = SHARE, hosts: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        for rank in range(WORLD):
            processes.append(context.Process(target=train, args=(str(tmp_path), rank, name, share, hosts)))
            processes[-1].start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * WORLD
        return [torch.load(tmp_path / f"facts-{rank}", weights_only=False) for rank in range(WORLD)]

    yield launch
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(90)


def check(found: list[dict[str, Any]]) -> None:
    for rank, facts in enumerate(found):
        assert facts["moves"], rank
        assert facts["read"], rank
        assert not facts["lost"], rank
        assert not facts["left in the directory"], rank
        assert not facts["steps that differ"], rank
        assert not facts["what differs at the end"], rank
    assert found[0]["weights"] == found[1]["weights"]


@pytest.mark.parametrize("name", ["ddp", "ddp that accumulates"])
def test_two_ranks_are_the_same_two_ranks(ranks: Ranks, name: str) -> None:
    check(ranks(name))


def test_one_rank_moves_to_a_disk_and_the_other_to_host_memory(ranks: Ranks) -> None:
    """Their plans differ, and so do their times; their collectives meet all the same."""
    check(ranks("ddp", hosts=(1,)))


def test_gradients_that_are_summed_over_ranks_by_hand(ranks: Ranks) -> None:
    """A collective writes them without being seen as a write; some leave before it, and again after it."""
    found = ranks("by hand", share=0.55)
    check(found)
    assert all("gradient" in facts["kinds"] for facts in found)
