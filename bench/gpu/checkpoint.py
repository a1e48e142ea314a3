"""Checkpoints of a state that lies on a GPU: what a save costs training, when it counts, and how fast it is restored.

Theory. A save queues its copies where training's own work is queued, so it returns before they are made, and the device
goes on to the next step when they are. Its stall is both: from a device with nothing to do until the call has returned
and the device is past the copies. So is a peer's. That stands beside one copy of the same bytes to pinned memory, and
beside what scripts do: `torch.save` to a local file, `dcp.save` and `dcp.async_save` to the local disk. Nobody waits
for those to be written; what they leave is deleted at once. Ours goes to a node on the same disk, which syncs, and so
its time until it counts stands beside a program that writes and syncs the same bytes.

A restore, into tensors on the device, stands beside reads of a file into pinned memory and a copy from there, and
beside `torch.load` and `dcp.load`. All find their bytes in the page cache.

The first save of a job makes the memory that it copies to; the notes say what that took. Memory is what the process has
more, at the most, while it saves in waves of a quarter of the state.

`python -m bench.gpu.checkpoint [--device cpu] [--bytes N] [--rounds N]` runs the row alone.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.gpu.offload import no_device
from bench.parts import Lab
from bench.report import Result, quantity
from bench.row import Row
from bench.rows import checkpoint
from bench.rows.checkpoint import CAP_SHARE, Copy, written
from bench.stats import compared, faster
from bench.workloads import BY_NAME

PEERS = ("torch.save", "dcp.save", "dcp.async_save")
LOADERS = ("torch.load", "dcp.load")
Seconds = dict[str, list[float]]


def gpu(lab: Lab, row: Row) -> Result:
    """The row, or why it was not run."""
    if reason := no_device():
        return Result(row, error=reason)
    (objects,) = row.quick if lab.quick else row.objects
    return measured(lab, row, "cuda", objects.bytes_total, 2 if lab.quick else row.rounds)


def measured(lab: Lab, row: Row, device: str, size_bytes: int, rounds: int) -> Result:
    """A state of that size on that device, saved and restored so often."""
    torch = checkpoint._module("torch")
    count = size_bytes // checkpoint.TENSORS // 4
    state = {"model": {f"w{at}": torch.randn(count, device=device) for at in range(checkpoint.TENSORS)}}
    size_bytes = sum(tensor.nbytes for tensor in state["model"].values())
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    copy = Copy(state, pinned=device == "cuda")
    took: Seconds = {}
    with checkpoint._quiet(), lab.node(core=None) as node:
        node.add_local("runs", durability="disk")
        with checkpoint._saver(node, "runs/bench") as checkpoints:
            first, _, first_s = _stall(lambda: checkpoints.save(0, state), wait)
            _said_by(took, "the first save of a job, which makes its memory", first_s)
            first.durable()
            for turn in range(rounds):
                _save(took, checkpoints, turn + 1, state, copy, wait, lab)
                for name in PEERS:
                    _said_by(took, name, _peer(name, state, wait, lab.dir))
            _restores(took, checkpoints, state, copy, wait, lab.dir, rounds)
        memory = checkpoint._memory(row, node, state, size_bytes // CAP_SHARE)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    notes = (
        f"{name}, torch {torch.__version__}: {size_bytes / 1e9:.1f} GB in {checkpoint.TENSORS} tensors",
        *(f"{name}: {_said(seconds)}" for name, seconds in took.items()),
    )
    return Result(row, (*_measures(row, took), memory), notes=notes, extra={"seconds": took})


def _nothing() -> None:
    """A processor has done what it was asked for."""


def _stall(work: Callable[[], Any], wait: Callable[[], None]) -> tuple[Any, float, float]:
    """What it gives, after how long it returned, and after how long the device was past it."""
    wait()
    began_s = time.perf_counter()
    found = work()
    returned_s = time.perf_counter() - began_s
    wait()
    return found, returned_s, time.perf_counter() - began_s


def _said_by(took: Seconds, name: str, seconds: float) -> None:
    took.setdefault(name, []).append(seconds)
    print(f"[bench]   {name}: {quantity(seconds, 's')}", file=sys.stderr, flush=True)


def _save(took: Seconds, checkpoints: Any, step: int, state: Any, copy: Copy, wait: Any, lab: Lab) -> None:
    _said_by(took, "copy", _stall(copy, wait)[2])
    began_s = time.perf_counter()
    handle, returned_s, stall_s = _stall(lambda: checkpoints.save(step, state), wait)
    handle.durable()
    _said_by(took, "durable", time.perf_counter() - began_s)
    _said_by(took, "save", stall_s)
    _said_by(took, "save returned", returned_s)
    _said_by(took, "write+fsync", written(lab.dir / "written", memoryview(copy.bytes.numpy())))


def _peer(name: str, state: Any, wait: Any, folder: Path) -> float:
    """A peer's stall. What it leaves is there only for loading, after the last round."""
    torch, dcp = (checkpoint._module(f"torch{part}") for part in ("", ".distributed.checkpoint"))
    place = folder / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if name == "torch.save":
        return _stall(lambda: torch.save(state, place / "state.pt"), wait)[2]
    save = getattr(dcp, name.removeprefix("dcp."))
    saved, _, stall_s = _stall(lambda: save(state, storage_writer=dcp.FileSystemWriter(place), no_dist=True), wait)
    if name == "dcp.async_save":
        saved.result()
        shutil.rmtree(place)
    return stall_s


def _restores(took: Seconds, checkpoints: Any, state: Any, copy: Copy, wait: Any, folder: Path, rounds: int) -> None:
    torch, dcp = (checkpoint._module(f"torch{part}") for part in ("", ".distributed.checkpoint"))
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}}
    file = folder / "bare"
    file.write_bytes(memoryview(copy.bytes.numpy()))

    def bare() -> None:
        checkpoint._read(file, copy)
        copy.back()

    def loaded() -> None:
        saved = torch.load(folder / "torch.save" / "state.pt", mmap=True)
        for name, tensor in found["model"].items():
            tensor.copy_(saved["model"][name])

    sides: dict[str, Callable[[], object]] = {
        "reads": bare,
        "restore": lambda: checkpoints.restore(found),
        "torch.load": loaded,
        "dcp.load": lambda: dcp.load(found, storage_reader=dcp.FileSystemReader(folder / "dcp.save"), no_dist=True),
    }
    for turn in range(rounds + 1):
        for name, work in sides.items():
            for tensor in found["model"].values():
                tensor.zero_()
            seconds = _stall(work, wait)[2]
            if turn:  # the first finds nothing warm
                _said_by(took, name, seconds)
            if name != "reads":
                checkpoint._compare(found, state)
    for left in (file, folder / "torch.save" / "state.pt"):
        left.unlink()
    shutil.rmtree(folder / "dcp.save")


def _measures(row: Row, took: Seconds) -> tuple[Any, ...]:
    best, loader = (min(names, key=lambda name: statistics.median(took[name])) for names in (PEERS, LOADERS))
    goals = row.goals
    return (
        compared("stall / copy", "s", goals["stall / copy"], took["save"], took["copy"], "one copy"),
        compared("stall / peer", "s", goals["stall / peer"], took["save"], took[best], best),
        compared("durable / write", "s", goals["durable / write"], took["durable"], took["write+fsync"], "write+fsync"),
        faster("reads / restore", "s", goals["reads / restore"], took["restore"], took["reads"], "reads, a copy"),
        faster("peer / restore", "s", goals["peer / restore"], took["restore"], took[loader], loader),
    )


def _said(seconds: list[float]) -> str:
    low, middle, high = (quantity(value, "s") for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle} ({low} to {high})"


def main(argv: Sequence[str]) -> int:
    """The row alone."""
    row = BY_NAME["checkpoint-gpu"]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bytes", type=int, default=row.objects[0].bytes_total, help="of the state")
    parser.add_argument("--rounds", type=int, default=row.rounds)
    parser.add_argument("--out", metavar="FILE", help="JSON file")
    arguments = parser.parse_args(argv)
    began_s = time.perf_counter()
    with Lab() as lab:
        if arguments.device == "cuda" and (reason := no_device()):
            result = Result(row, error=reason)
        else:
            result = measured(lab, row, arguments.device, arguments.bytes, arguments.rounds)
    results = [report.timed(result, time.perf_counter() - began_s)]
    print(report.table(results))
    print(report.notes(results))
    if arguments.out:
        Path(arguments.out).write_text(report.as_json(results, quick=False, wall_s=time.time()))
    return 1 if result.error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
