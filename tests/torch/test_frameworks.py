"""Trainers of other libraries resume exactly where they stopped, as docs/training.md has them do it.

`make frameworks` sets FOREBAY_FRAMEWORKS to the Python that has Lightning and transformers (200 MB, 20 s to import on
a busy machine), and runs each library's jobs in it: real processes, killed and started again. Without it, accelerate's
own functions are asked here, and what the others ask of a loader is asked by hand.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils import data as torch_data

from forebay.core.errors import Invalid
from forebay.torch import BatchSampler, DataLoader, ObjectDataset, ShardDataset
from forebay.torch.order import Permuted
from tests.node.conftest import NodeProcess
from tests.torch.framework_jobs import BATCH, BLOCKS, EPOCHS, SAMPLES, resumptions
from tests.torch.memory_source import MemorySource, as_int

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = os.environ.get("FOREBAY_FRAMEWORKS", "")
SHAPES = ("1x0", "1x2", "2x0", "2x2")
JOBS = {
    "lightning": [f"ours/{shape}" for shape in SHAPES],
    "accelerate": [f"{flavour}/{shape}" for flavour in ("ours", "skip", "prepared") for shape in SHAPES]
    # with 2x2, a state of an epoch's end makes it go through the next epoch's sampler in vain: the page says so
    + [f"stateful/{shape}" for shape in SHAPES[:3]],
    "transformers": [f"{flavour}/{shape}" for flavour in ("skip", "state") for shape in SHAPES],
}
ORDER = [Permuted(SAMPLES, 1, epoch).at(np.arange(SAMPLES)).tolist() for epoch in range(EPOCHS)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A node's address, and a place there with SAMPLES objects that say their number."""
    folder = tmp_path / "bucket" / "numbers"
    folder.mkdir(parents=True)
    for number in range(SAMPLES):
        (folder / f"{number:05d}").write_bytes(b"%d" % number)
    node = NodeProcess(tmp_path / "node-0", "--fronts", "1")
    node.start()
    try:
        node.add_bucket("corpus", f"file://{tmp_path}/bucket")
        yield node.endpoint, "corpus/numbers/"
    finally:
        node.stop()


def check_epochs(ranks: list[list[list[int]]]) -> None:
    """Each epoch is the order of its number, dealt out batch by batch; at its end some may be repeated."""
    steps = -(-SAMPLES // (BATCH * len(ranks)))
    for epoch in range(EPOCHS):
        found = [
            number for step in range(epoch * steps, (epoch + 1) * steps) for rank in ranks for number in rank[step]
        ]
        assert found[:SAMPLES] == ORDER[epoch]
    assert all(len(rank) == EPOCHS * steps for rank in ranks)


def check_jobs(python: str, library: str, jobs: list[str], place: tuple[str, str], folder: Path) -> None:
    """Each, killed and started again, trains on what it trains on without a stop, and begins nothing anew."""
    command = [python, "-m", "tests.torch.framework_jobs", library, *place, str(folder / "jobs"), *jobs]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    known = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=known, capture_output=True, timeout=2900, check=False)
    assert done.returncode == 0, (done.stderr + done.stdout).decode()[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == jobs
    for job, kinds in found.items():
        world = len(kinds["whole"])
        check_epochs(kinds["whole"])
        assert kinds["resumed"] == [resumptions(world)] * world, job
        assert kinds["stopped"] == kinds["whole"], job
        for kind in ("whole, validated", "stopped, validated"):
            if library == "lightning":
                check_validations(kinds[kind])
        assert library != "lightning" or len(kinds["whole, validated"][0]) == 1 + EPOCHS


def check_validations(ranks: list[list[tuple[bool, list[list[int]]]]]) -> None:
    """A sanity check takes two batches, and the validation after it all of them, from the first one on."""
    found = list(zip(*ranks, strict=True))
    assert found[0][0][0], "Lightning checks first"
    for validation in found:
        batches = [batch for step in zip(*(batches for _, batches in validation), strict=True) for batch in step]
        seen = [number for batch in batches for number in batch]
        count = 2 * BATCH * len(ranks) if validation[0][0] else SAMPLES
        assert seen[:count] == list(range(count))
        assert len(seen) < count + len(ranks), "at the end some ranks may get one from the start"


@pytest.mark.real
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("library", list(JOBS) if FRAMEWORKS else [])
def test_a_job_that_was_killed_trains_on_what_another_trains_on(
    place: tuple[str, str], tmp_path: Path, library: str
) -> None:
    check_jobs(str(ROOT / FRAMEWORKS), library, JOBS[library], place, tmp_path)


def test_the_blocks_of_the_others_are_python() -> None:
    for mark in ("pl.LightningDataModule", "(Trainer)"):
        (text,) = (block for block in BLOCKS if mark in block)
        compile(text, "docs/training.md", "exec")


# --- accelerate, which our own Python has ----------------------------------------------------------------------------
@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The library; what it knows of this process is forgotten at the end."""
    library = importlib.import_module("accelerate")
    library.PartialState(cpu=True)
    yield library
    library.state.AcceleratorState._reset_state(reset_partial_state=True)
    library.state.GradientState._reset_state()


@pytest.mark.real
def test_the_block_for_accelerate_runs_and_resumes(place: tuple[str, str], tmp_path: Path) -> None:
    check_jobs(sys.executable, "accelerate", ["ours/1x0"], place, tmp_path)


def numbered(numbers: MemorySource) -> ObjectDataset:
    return ObjectDataset("bucket/numbers/", source=numbers, decode=as_int)


@pytest.mark.parametrize("world", [1, 2])
def test_accelerate_skips_the_first_batches_of_an_epoch(numbers: MemorySource, accelerate: Any, world: int) -> None:
    def of_epoch(key: str, data: Any, epoch: int) -> int:
        return 1000 * epoch + as_int(key, data)

    dataset = ObjectDataset("bucket/numbers/", source=numbers, decode=of_epoch)
    with DataLoader(dataset, 7, seed=3, rank=world - 1, world=world) as loader:
        loader.set_epoch(4)
        whole = [batch.tolist() for batch in loader]
        loader.set_epoch(0)
        skipped = accelerate.skip_first_batches(loader, 2)
        loader.set_epoch(4)  # Trainer does it after
        assert [batch.tolist() for batch in skipped] == whole[2:]
        assert min(whole[2]) >= 4000
        next(iter(loader))
        again = accelerate.skip_first_batches(loader, 2)
        assert [batch.tolist() for batch in again] == whole[2:], (
            "counted from the epoch's start, wherever the loader is"
        )
        assert accelerate.Accelerator(cpu=True).prepare(loader) is loader


def test_accelerate_divides_what_is_not_divided_and_is_refused_the_rest(numbers: MemorySource, accelerate: Any) -> None:
    def prepared(process: int, sampler: BatchSampler) -> Any:
        loader = torch_data.DataLoader(numbered(numbers), batch_sampler=sampler)
        return accelerate.data_loader.prepare_data_loader(loader, num_processes=2, process_index=process)

    ranks = [prepared(process, BatchSampler(numbered(numbers), 5, rank=0, world=1)) for process in (0, 1)]
    for epoch in (0, 3):
        for rank in ranks:
            rank.set_epoch(epoch)
        found = [number for batches in zip(*ranks, strict=True) for batch in batches for number in batch.tolist()]
        assert found == Permuted(100, 0, epoch).at(np.arange(100)).tolist()
    with pytest.raises(Invalid, match=r"accelerate divides batches among ranks.* rank 1 of 2 already"):
        prepared(0, BatchSampler(numbered(numbers), 5, rank=1, world=2))


# --- what others ask of a loader ------------------------------------------------------------------------------------
def test_an_iterator_that_gave_nothing_yet_follows_where_the_loader_goes(numbers: MemorySource) -> None:
    """Lightning makes it first and then calls `set_epoch` of the loader's sampler, or restores a state."""
    with DataLoader(numbered(numbers), 40, seed=3) as loader:
        batches = iter(loader)
        loader.sampler.set_epoch(2)
        assert [len(batch) for batch in batches] == [40, 40, 20]
        assert loader.epoch == 3
        begun, late = iter(loader), iter(loader)
        with pytest.raises(Invalid, match="iterated anew before"):
            next(begun)
        next(late)
        loader.set_epoch(7)
        with pytest.raises(Invalid, match="in the middle"):
            next(late)


def test_a_loader_that_was_made_before_there_were_ranks_says_so(
    numbers: MemorySource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    early, told = DataLoader(numbered(numbers), 40), DataLoader(numbered(numbers), 40, rank=1, world=2)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(Invalid, match=r"as rank 1 of 2, before torch\.distributed .* says 0 of 1"):
            next(iter(early))
        assert len(list(told)) == 2
        with pytest.raises(Invalid, match=r"before torch\.distributed"):
            next(iter(early.batch_sampler))
    finally:
        distributed.destroy_process_group()
        early.close()
        told.close()


@pytest.mark.parametrize("batch_bytes", [None, 100])
def test_trainers_that_count_steps_are_told_that_nobody_can(shards: MemorySource, batch_bytes: int | None) -> None:
    loader = DataLoader(ShardDataset("bucket/train/", source=shards), 5, batch_bytes=batch_bytes)
    asked = "def has_length(loader):\n  try:\n    return len(loader)\n  except TypeError:\n    return None\n"
    for name in ("lightning.fabric.utilities.data", "transformers.trainer_utils"):
        names: dict[str, Any] = {"__name__": name}
        exec(asked, names)
        with pytest.raises(Invalid, match="resumes at another batch where it does not know"):
            names["has_length"](loader)
    names = {"__name__": "torch.utils.data"}
    exec(asked, names)
    assert names["has_length"](loader) is None
    assert torch.tensor(len(loader.dataset)) == 100
    if batch_bytes is None:
        assert len(loader) == 20
    else:
        with pytest.raises(TypeError, match="known at its end"):
            len(loader)
    loader.close()
