"""A job that is killed again and again, and goes on each time with other workers and ranks, sees every sample once.

FOREBAY_RESUME_ROUNDS: how many whole jobs to run, each killed in every shape; by default one, of half the shapes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.torch.order import Permuted
from tests.node.conftest import NodeProcess, alive, until
from tests.torch import resume_trainer
from tests.torch.resume_trainer import Job

ROUNDS = int(os.environ.get("FOREBAY_RESUME_ROUNDS", "0"))
SAMPLES, EPOCHS = 241, 2
SHAPES = [(world, workers) for world in (1, 2) for workers in (0, 1, 2, 4)]
HALF = [(1, 0), (2, 1), (1, 4), (2, 2)]


@pytest.fixture
def numbered(tmp_path: Path) -> Iterator[tuple[NodeProcess, str]]:
    """A node, and a place there with SAMPLES objects that say their number."""
    folder = tmp_path / "bucket" / "numbers"
    folder.mkdir(parents=True)
    for number in range(SAMPLES):
        (folder / f"{number:05d}").write_bytes(b"%d" % number)
    node = NodeProcess(tmp_path / "node-0", "--fronts", "1")
    node.start()
    node.add_bucket("corpus", f"file://{tmp_path}/bucket")
    yield node, "corpus/numbers/"
    node.stop()


@pytest.fixture
def start() -> Iterator[Callable[[Job], list[Any]]]:
    """Start a job; a process that has torch in memory already forks its ranks. None is left at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.torch.resume_trainer"])
    processes: list[Any] = []

    def launch(job: Job) -> list[Any]:
        ranks = [context.Process(target=resume_trainer.run, args=(job, rank)) for rank in range(job.world)]
        for process in ranks:
            process.start()
        processes.extend(ranks)
        return ranks

    yield launch
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join(90)


def read_log(folder: Path, job: Job, rank: int) -> list[dict[str, Any]]:
    path = folder / f"log-{job.number}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def committed(folder: Path, job: Job, saved: list[int]) -> dict[tuple[int, int], list[int]]:
    """What all ranks took in the steps up to the saved state: by (epoch, position) the samples, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    ranks = [read_log(folder, job, rank) for rank in range(job.world)]
    for steps in zip(*ranks, strict=False):
        assert len({(*step["before"], *step["after"]) for step in steps}) == 1, "ranks disagree about where they are"
        (epoch, position), after = steps[0]["before"], steps[0]["after"]
        if after > saved:
            break
        end = after[1] if after[0] == epoch else SAMPLES
        together = [number for step in steps for number in step["batch"]]
        found[epoch, position] = together[: end - position]  # but for what a short last step repeats
    return found


def finish(ranks: list[Any]) -> list[int]:
    """Wait until one rank has died or all are done; kill the others, as a launcher does. The exit codes."""
    until(lambda: not all(process.is_alive() for process in ranks), 60)
    if any(process.exitcode not in (0, None) for process in ranks):
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(120 + 120 * ROUNDS)
def test_every_sample_once_in_one_order_whatever_is_killed(
    numbered: tuple[NodeProcess, str], start: Callable[[Job], list[Any]], tmp_path: Path
):
    node, place = numbered
    expected = [Permuted(SAMPLES, 7, epoch).at(np.arange(SAMPLES)).tolist() for epoch in range(EPOCHS)]
    for round_number in range(max(1, ROUNDS)):
        chance = random.Random(round_number)
        folder = tmp_path / f"round-{round_number}"
        folder.mkdir()
        shapes = chance.sample(SHAPES, len(SHAPES)) if ROUNDS else HALF
        seen: dict[tuple[int, int], list[int]] = {}
        saved, number, workers = [0, 0], 0, set()
        while saved[0] < EPOCHS:
            world, count = shapes[number % len(shapes)]
            rank, moment = chance.randrange(world), chance.choice(["before saving", "after saving"])
            dies_at = (rank, chance.randint(1, 12), moment) if number < len(shapes) else None
            job = Job(node.endpoint, place, str(folder), number, world, count, chance.choice([5, 8]), EPOCHS, dies_at)
            codes = finish(start(job))
            assert codes == [0] * world or (dies_at and -9 in codes), codes
            if (folder / "state.json").exists():
                state = json.loads((folder / "state.json").read_text())
                saved = [state["epoch"], state["samples"]]
            for where, batch in committed(folder, job, saved).items():
                assert where not in seen, "a step that was saved is done again"
                seen[where] = batch
            workers |= {pid for rank in range(world) for step in read_log(folder, job, rank) for pid in step["workers"]}
            number += 1
        assert number >= len(shapes), "every shape was killed"
        for epoch in range(EPOCHS):
            positions = sorted(position for at, position in seen if at == epoch)
            assert [n for position in positions for n in seen[epoch, position]] == expected[epoch]
        until(lambda pids=workers: not any(alive(pid) for pid in pids), 30)


@pytest.mark.real
@pytest.mark.slow
def test_workers_of_a_killed_job_end_even_if_it_is_not_their_parent(
    numbered: tuple[NodeProcess, str], start: Callable[[Job], list[Any]], tmp_path: Path
):
    node, place = numbered
    dies_at = (0, 3, "after saving")
    job = Job(node.endpoint, place, str(tmp_path), 0, 1, 2, 8, EPOCHS, dies_at, "forkserver")
    assert finish(start(job)) == [-9]
    pids = read_log(tmp_path, job, 0)[-1]["workers"]
    assert len(pids) == 2
    until(lambda: not any(alive(pid) for pid in pids), 30)


def test_the_harness_finds_a_sample_that_is_lost(tmp_path: Path):
    """A log in which a step is missing, and one in which ranks disagree."""
    job = Job("", "", str(tmp_path), 0, 2, 0, 1, 1, None)

    def say(rank: int, *steps: tuple[list[int], list[int], list[int]]) -> None:
        lines = [json.dumps({"before": b, "after": a, "batch": batch, "workers": []}) for b, a, batch in steps]
        (tmp_path / f"log-0-{rank}").write_text("\n".join(lines) + "\n{cut")

    say(0, ([0, 0], [0, 2], [10]), ([0, 2], [0, 4], [12]))
    say(1, ([0, 0], [0, 2], [11]), ([0, 2], [0, 4], [13]))
    assert committed(tmp_path, job, [0, 2]) == {(0, 0): [10, 11]}
    assert committed(tmp_path, job, [0, 4]) == {(0, 0): [10, 11], (0, 2): [12, 13]}
    say(1, ([0, 0], [0, 2], [11]), ([0, 2], [0, 5], [13]))
    with pytest.raises(AssertionError, match="disagree"):
        committed(tmp_path, job, [0, 4])


INTERRUPTED = """
import sys
from forebay.torch import DataLoader, ObjectDataset
loader = DataLoader(ObjectDataset(sys.argv[2], url=sys.argv[1]), 4, workers=int(sys.argv[3]))
while True:
    for batch in loader:
        inner = loader._inner._iterator._workers if loader.workers else []
        print(*[worker.pid for worker in inner], flush=True)
"""


@pytest.mark.real
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_from_the_terminal_ends_everything(numbered: tuple[NodeProcess, str], workers: int):
    """Ctrl-C reaches the training process and its workers at once."""
    node, place = numbered
    command = [sys.executable, "-c", INTERRUPTED, node.endpoint, place, str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == workers
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read().decode()
        assert process.wait(90) != 0
    assert "KeyboardInterrupt" in said
    until(lambda: not any(alive(pid) for pid in pids), 30)
