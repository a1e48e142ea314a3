"""Offload rows: how long planning takes, what plans are worth in simulation, and an engine on emulated disks.

Theory. Planning is timed on a trace of the size that the paper reports (60,000 operators, 20,000 tensors), made up
here. What plans are worth is *simulated*: traces of known models by fake tensors and a table of an H100's times, the
chosen plan beside the paper's rank and G10's in the same replay, over budgets and bandwidths. The engine row is real: a
network in host memory under an emulated budget, disks slowed to a few speeds, the step time that was predicted when the
plan was made beside that of the steps that followed it, and every loss and weight compared with the same steps without
it; at last on the disk as it is, whose speed nobody holds. Where all fits the engine must cost nothing, which is the
last row.
"""

from __future__ import annotations

import importlib
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import load
from bench.parts import Lab
from bench.report import Result
from bench.row import MB, MIB, Row
from bench.stats import bounded, compared

BUDGETS = (0.9, 0.75, 0.6)
RATES_BYTES_S = (4e9, 16e9, 48e9, 96e9)
PEERS = {"ratio": "the paper's rank", "area": "G10's rank", "whole_layer": "whole layers"}
SHAPES = {"gpt2-xl": (4, 1024), "granite-8b-code": (1, 2048), "llama-3-8b": (4, 2048), "llama-3-70b": (1, 2048)}
LIMITS_BYTES_S = (50e6, 100e6, 200e6, 400e6)
WIDTH, LAYERS, ROWS, CLASSES = 512, 8, 1024, 16
SHARE = 0.75  # of its need that the network gets
PLANNED_STEPS = 8


def _offload(name: str) -> Any:
    """A module of `forebay.offload`, which wants numpy, and parts of which want torch."""
    return importlib.import_module(f"forebay.offload.{name}")


# --- planning --------------------------------------------------------------------------------------------------------
def made_up(layers: int) -> Any:
    """A step of so many layers, each with 150 operators and 50 tensors, as training with Adam has them."""
    trace = _offload("planning.trace")
    said, chance, times = trace.TensorSaid, random.Random(3), random.Random(4)
    forward, backward, update = 50, 90, 10
    operators: list[tuple[str, float, int]] = []
    points: list[tuple[str, int]] = [("step begins", 0)]
    order = [("forward", forward, range(layers)), ("backward", backward, reversed(range(layers)))]
    for what, count, numbers in [*order, ("update", update, range(layers))]:
        for layer in numbers:
            points.append((f"{what} of {layer}", len(operators)))
            operators += [(f"{what} {layer}.{number}", times.uniform(20e-6, 200e-6), 0) for number in range(count)]
    tensors = []
    for layer in range(layers):
        first, second = layer * forward, layers * (forward + backward) + layer * update
        middle = layers * forward + (layers - 1 - layer) * backward
        for number in range(7):
            ahead, back, late = first + 6 * number, middle + backward - 1 - 10 * number, second + number
            name, size = f"{layer}.{number}", 64 * MIB
            tensors.append(said(f"weight {name}", "parameter", size, [ahead, back, late], [late], True))
            tensors.append(said(f"gradient {name}", "gradient", size, [back, late], [back]))
            for state in ("mean", "variance"):
                tensors.append(said(f"{state} {name}", "optimizer state", size, [late], [late], True))
        for number in range(22):
            uses = [first + 2 * number, first + 2 * number + 1, middle + backward - 1 - 4 * number]
            size = chance.choice((8, 16, 32)) * MIB
            tensors.append(said(f"activation {layer}.{number}", "activation", size, uses, uses[:1]))
    return trace.build("made up", operators, points, tensors)


def planning(lab: Lab, row: Row) -> Result:
    """Seconds of the processor for a plan by each rank, and for the whole portfolio with its replays."""
    hardware, plan, choose = _offload("planning.hardware"), _offload("planning.plan"), _offload("planning.choose")
    trace = made_up(20 if lab.quick else 400)
    machine = hardware.Hardware(
        int(trace.need_bytes().max() * 0.8),
        disk_bytes=1 << 50,
        disk_write_bytes_s=32e9,
        disk_read_bytes_s=32e9,
    )
    seconds: dict[str, list[float]] = {"ratio": [], "area": []}
    for _ in range(2 if lab.quick else row.rounds):
        for rank, taken in seconds.items():
            taken.append(_cpu_seconds(lambda: plan.plan(trace, machine, rank)))  # noqa: B023
    portfolio = [_cpu_seconds(lambda: choose.choose(trace, machine))]
    memory = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    measures = [bounded(f"a plan by {rank}", "s", row.goals["a plan"], taken) for rank, taken in seconds.items()]
    measures.append(bounded("all plans, replayed", "s", row.goals["all plans, replayed"], portfolio))
    measures.append(bounded("memory", "MiB", row.goals["memory"], memory))
    return Result(row, tuple(measures))


def _cpu_seconds(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


# --- simulation ------------------------------------------------------------------------------------------------------
def shapes(lab: Lab, row: Row) -> Result:
    """The best step of plans that owe a peer nothing beside that peer's: the paper's rank, G10's and whole layers, for
    every model, budget and bandwidth. What is chosen has these among it, so it says nothing that it is no worse."""
    hardware, choose, made = _offload("planning.hardware"), _offload("planning.choose"), _offload("tracing.shapes")
    steps: dict[str, list[float]] = {rank: [] for rank in PEERS}
    without: dict[str, list[float]] = {rank: [] for rank in PEERS}
    notes = []
    for name, (batch, sequence) in list(SHAPES.items())[: 1 if lab.quick else None]:
        trace = made.trace_of(name, batch=batch, sequence=sequence, layers=4 if lab.quick else None)
        need = int(trace.need_bytes().max())
        knees = []
        for share in BUDGETS:
            shares = []
            for bytes_s in RATES_BYTES_S:
                least = _offload("planning.stretches").stretches_of(trace, 1).required_bytes.max()
                budget = max(int(need * share), int(least * 1.02))
                machine = hardware.Hardware(
                    budget, disk_bytes=1 << 50, disk_write_bytes_s=bytes_s, disk_read_bytes_s=bytes_s
                )
                best, tried = choose.choose(trace, machine)
                found = {choice.plan.rank: choice.replayed.step_s for choice in tried}
                for rank in PEERS if best.plan.moves else ():  # else there is nothing to choose
                    steps[rank].append(found[rank])
                    others = [choice for choice in tried if choice.plan.rank.partition(",")[0] != rank]
                    without[rank].append(choose.best(others).replayed.step_s)
                shares.append(f"{best.replayed.share_of_ideal:.0%}")
            knees.append(f"{share:.0%}: {' '.join(shares)}")
        active = trace.active_bytes() / trace.need_bytes().max()
        mean = float(active @ trace.times_s / trace.times_s.sum())
        told = f"{name}, {need / 1e9:.0f} GB, in use {mean:.1%} on the mean over time and {active.max():.0%} at most"
        notes.append(f"{told}; of ideal at 4, 16, 48, 96 GB/s by budget: {'; '.join(knees)}")
    measures = []
    for rank, peer in PEERS.items():
        ratios = compared(f"step / {peer}, mean", "s", row.goals["mean"], without[rank], steps[rank], peer)
        measures.append(bounded(f"step / {peer}, mean", "of it", row.goals["mean"], [statistics.fmean(ratios.ratios)]))
    note = "simulated; each peer beside the best of all plans but those that begin with its own rank"
    return Result(row, tuple(measures), notes=(note, *notes))


# --- the engine ------------------------------------------------------------------------------------------------------
def _network() -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    torch.manual_seed(11)
    layers = [part for _ in range(LAYERS) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _take(model: Any, optimizer: Any, step: int) -> float:
    torch = importlib.import_module("torch")
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=chance)
    loss = torch.nn.functional.cross_entropy(model(x), torch.randint(0, CLASSES, (ROWS,), generator=chance))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _need_bytes() -> int:
    """What a step of the network needs, from its profile."""
    model, optimizer = _network()
    _take(model, optimizer, 0)
    with _offload("tracing.profile").Profiler(model, optimizer) as profiler:
        _take(model, optimizer, 1)
    return int(profiler.trace().need_bytes().max())


def _trained(folder: Path, budget: int, limit_bytes_s: float | None, steps: int) -> tuple[list[float], Any, Any]:
    """The losses of so many steps, the engine's report, and the weights."""
    limits = None if limit_bytes_s is None else (limit_bytes_s, limit_bytes_s)
    disk = _offload("tiers.disk_tier").DiskTier([folder], "512MiB", limit_bytes_s=limits)
    model, optimizer = _network()
    engine = _offload("engine").Offload(
        model, optimizer, budget=budget, tiers=[disk], size_bytes_min=64 << 10, chunk_bytes=8 * MIB
    )
    with engine as off:
        losses = []
        for step in range(steps):
            with off.step():
                losses.append(_take(model, optimizer, step))
        return losses, off.report(), [parameter.detach().clone() for parameter in model.parameters()]


def emulated(lab: Lab, row: Row) -> Result:
    """Steps on disks of several speeds: as predicted, in the same order, with the same numbers."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    need, watched = _need_bytes(), 5
    steps = watched + PLANNED_STEPS
    model, optimizer = _network()
    expected = [_take(model, optimizer, step) for step in range(steps)]
    limits = LIMITS_BYTES_S[:: 3 if lab.quick else 1]
    errors: list[float] = []
    real: list[float] = []
    order: list[float] = []
    notes = []
    for _ in range(1 if lab.quick else row.rounds):
        pairs = []
        for limit_bytes_s in (*limits, None):
            with tempfile.TemporaryDirectory(dir=lab.dir) as folder:
                losses, report, weights = _trained(Path(folder), int(need * SHARE), limit_bytes_s, steps)
            same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
            if losses != expected or not same:
                raise load.LoadFailed("training with the engine gave other numbers than without it")
            if report.over_bytes:
                raise load.LoadFailed(f"a step took {report.over_bytes} bytes more than its budget")
            pairs.append((report.predicted_s, report.step_s))
            disk = "the disk as it is" if limit_bytes_s is None else f"{limit_bytes_s / MB:.0f} MB/s"
            told = f"{disk}: {report.step_s:.3f} s, predicted {report.predicted_s:.3f} s"
            notes.append(f"{told}, waited {report.missing_s + report.memory_s:.3f} s")
            print(f"[bench]   {notes[-1]}", file=sys.stderr, flush=True)
        predicted, measured = pairs.pop()
        real.append(abs(predicted / measured - 1))
        errors.append(statistics.fmean(abs(predicted / measured - 1) for predicted, measured in pairs))
        ranked = sorted(range(len(pairs)), key=lambda at: pairs[at][0])
        order.append(float(ranked == sorted(range(len(pairs)), key=lambda at: pairs[at][1])))
    return Result(
        row,
        (
            bounded("error of the prediction, mean", "of it", row.goals["error"], errors),
            bounded("error of the prediction, the disk as it is", "of it", row.goals["real"], real),
            bounded("rank order right", "rounds", row.goals["order"], order),
        ),
        notes=tuple(notes),
    )


def idle(lab: Lab, row: Row) -> Result:
    """Steps within a budget that everything fits into, beside the same steps without an engine."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    rates: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory(dir=lab.dir) as folder:
        disk = _offload("tiers.disk_tier").DiskTier([folder], "64MiB")
        model, optimizer = _network()
        plain, its_optimizer = _network()
        with _offload("engine").Offload(model, optimizer, budget=1 << 40, tiers=[disk]) as off:

            def with_engine(step: int) -> None:
                with off.step():
                    _take(model, optimizer, step)

            for step in range(8):
                with_engine(step)
                _take(plain, its_optimizer, step)
            for turn in range(2 if lab.quick else 2 * row.rounds):
                sides = [(0, with_engine), (1, lambda step: _take(plain, its_optimizer, step))]
                for side, work in sides[:: 1 if turn % 2 else -1]:
                    began_s = time.perf_counter()
                    for step in range(10):
                        work(step)
                    rates[side].append(10 / (time.perf_counter() - began_s))
    return Result(row, (compared("with the engine", "steps/s", row.goals["with the engine"], *rates, "without"),))
