"""A training job that can be killed anywhere: one process for each rank, its state saved after every step.

What it does in a step: take a batch, write down what was in it, wait for the other ranks, and rank 0 saves the state by
rename. A step counts once its state is saved: what came after is rolled back with the model, as in any job.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from forebay.torch import DataLoader, ObjectDataset
from tests.torch.memory_source import as_int


class Job(NamedTuple):
    """One start of the job. `dies_at`: the rank, step and moment at which it kills itself; None: it ends after
    `epochs`."""

    url: str
    place: str
    folder: str
    number: int
    world: int
    workers: int
    batch: int
    epochs: int
    dies_at: tuple[int, int, str] | None
    start_method: str = "fork"


def save(state: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    with open(new, "w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def run(job: Job, rank: int) -> None:
    """Rank `rank` of the job."""
    folder = Path(job.folder)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: that is the test
    if job.world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{folder}/store-{job.number}"
        distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=job.world)
    dataset = ObjectDataset(job.place, decode=as_int, url=job.url)
    with DataLoader(
        dataset, job.batch, seed=7, workers=job.workers, start_method=job.start_method if job.workers else None
    ) as loader:
        saved = folder / "state.json"
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
        step = 0
        with open(folder / f"log-{job.number}-{rank}", "a", buffering=1) as log:
            while loader.epoch < job.epochs:
                state = loader.state_dict()
                for batch in loader:
                    after = loader.state_dict()
                    said = {"before": [state["epoch"], state["samples"]], "after": [after["epoch"], after["samples"]]}
                    log.write(json.dumps({**said, "batch": batch.tolist(), "workers": worker_pids(loader)}) + "\n")
                    state = after
                    step += 1
                    perish(job, rank, step, "before saving")
                    if job.world > 1:
                        distributed.all_reduce(torch.zeros(1))
                    if rank == 0:
                        save(after, saved)
                    perish(job, rank, step, "after saving")
    if job.world > 1:
        distributed.destroy_process_group()


def perish(job: Job, rank: int, step: int, moment: str) -> None:
    if job.dies_at == (rank, step, moment):
        os.kill(os.getpid(), signal.SIGKILL)


def worker_pids(loader: DataLoader) -> list[int]:
    return [worker.pid for worker in getattr(getattr(loader._inner, "_iterator", None), "_workers", [])]
