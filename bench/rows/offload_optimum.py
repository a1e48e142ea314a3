"""How far plans are from the optimum: beside a bound that no plan can beat, and beside a search of great patience.

Theory. The bound is the step if tensors were a fluid: any part of each may leave at any time between two of its uses,
a store frees what it has written, bytes flow at full bandwidth, and moves have no latency. That is a linear program
over the stretches (scipy's, where it is installed). A step must wait for what does not fit through; the least sum of
waits is the bound. Whole tensors that free memory only once all of them is stored can never reach it, so the distance
to it is the distance to the optimum and the bound's own looseness.

The search is the planner's own local improvement with PATIENCE times as many replays, from each of the plans that were
tried: what the planner leaves to those who have the time. On small nets that is near the optimum.

All of it is simulated, on random traces and small nets that are made up here.
"""

from __future__ import annotations

import importlib
import random
import statistics
from collections.abc import Iterator
from typing import Any

from bench import load
from bench.parts import Lab
from bench.report import Result
from bench.row import MIB, Row
from bench.stats import bounded

TRACES, QUICK_TRACES = 616, 24
CASES = ((0.8, 1e9), (0.8, 4e9), (0.6, 1e9), (0.6, 4e9))  # of the need, bytes a second each way
NETS = ((2, 0.7), (3, 0.7), (4, 0.7), (6, 0.7), (2, 0.55), (3, 0.55), (4, 0.55), (6, 0.55))  # layers, of the need
QUICK_NETS = 2
PATIENCE = 8


def _offload(name: str) -> Any:
    return importlib.import_module(f"forebay.offload.{name}")


def optimum(lab: Lab, row: Row) -> Result:
    """Steps of the chosen plans over the fluid bound, and over those of the patient search."""
    try:
        importlib.import_module("scipy.optimize")
    except ImportError:
        raise load.LoadFailed("the bound is a linear program, and scipy is not here: pip install scipy") from None
    choose = _offload("planning.choose")
    over = []
    for trace, machine in _cases(QUICK_TRACES if lab.quick else TRACES):
        best, _ = choose.choose(trace, machine, size_bytes_min=1)
        over.append(best.replayed.step_s / bound_s(trace, machine))
    beside = []
    for trace, machine in _nets(QUICK_NETS if lab.quick else len(NETS)):
        best, tried = choose.choose(trace, machine, size_bytes_min=1)
        beside.append(best.replayed.step_s / _searched_s(trace, tried))
    measures = (
        bounded("step / fluid bound, mean", "of it", row.goals["fluid"], [statistics.fmean(over)]),
        bounded("step / fluid bound, p90", "of it", row.goals["spread"], [_p90(over)]),
        bounded("step / patient search, mean", "of it", row.goals["search"], [statistics.fmean(beside)]),
        bounded("step / patient search, p90", "of it", row.goals["spread"], [_p90(beside)]),
    )
    return Result(row, measures, notes=(f"simulated, {len(over)} random traces and {len(beside)} small nets",))


def _p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def _searched_s(trace: Any, tried: list[Any]) -> float:
    improve = _offload("planning.improve")
    evaluations = PATIENCE * improve.EVALUATIONS
    found = [improve.improved(trace, each.plan, each.replayed, evaluations)[1] for each in tried if each.fits]
    return min(float(ran.step_s) for ran in found)


# --- traces ----------------------------------------------------------------------------------------------------------
def _cases(count: int) -> Iterator[tuple[Any, Any]]:
    for number in range(count):
        seed, case = divmod(number, len(CASES))
        share, bytes_s = CASES[case]
        yield _on_disk(_at_random(seed), share, bytes_s)


def _nets(count: int) -> Iterator[tuple[Any, Any]]:
    for layers, share in NETS[:count]:
        yield _on_disk(_layered(layers), share, 4e9)


def _on_disk(trace: Any, share: float, bytes_s: float) -> tuple[Any, Any]:
    """The trace, and a disk of that speed with that share of the need, or the least that any plan can do with."""
    hardware, stretches = _offload("planning.hardware"), _offload("planning.stretches").stretches_of(trace, 1)
    least = int(stretches.required_bytes.max() / (1 - hardware.RESERVE_SHARE)) + 2
    budget = max(int(trace.need_bytes().max() * share), least)
    return trace, hardware.Hardware(budget, disk_bytes=1 << 40, disk_write_bytes_s=bytes_s, disk_read_bytes_s=bytes_s)


def _at_random(seed: int, operators: int = 24, tensors: int = 12) -> Any:
    """Sizes, lives, uses and writes at random, points at some operators only."""
    trace, chance = _offload("planning.trace"), random.Random(seed)
    rows = [(f"op {at}", chance.choice((0.0, 0.001, 0.01, 0.05)), chance.randrange(4) * MIB) for at in range(operators)]
    points = [("step", 0)] + [(f"point {at}", at) for at in range(1, operators + 1) if chance.random() < 0.6]
    said = []
    for number in range(tensors):
        persistent = chance.random() < 0.4
        uses = sorted(chance.sample(range(operators), chance.randrange(1, 6)))
        writes = [at for at in uses if chance.random() < 0.4]
        if not persistent and uses[0] not in writes:
            writes = [uses[0], *writes]
        kind = chance.choice(("parameter", "optimizer state") if persistent else ("activation", "gradient"))
        size = chance.randrange(1, 64) * MIB
        said.append(trace.TensorSaid(f"tensor {number}", kind, size, uses, writes, persistent))
    return trace.build(f"random {seed}", rows, points, said)


def _layered(layers: int) -> Any:
    """Forward, backward and an update of each layer, with a point at each operator."""
    trace = _offload("planning.trace")
    forward = range(layers)
    rows = [(f"forward {at}", 0.01, MIB) for at in forward]
    rows += [(f"backward {at}", 0.02, MIB) for at in reversed(forward)] + [
        (f"update {at}", 0.0025, 0) for at in forward
    ]
    said = []
    for at in forward:
        back, late = 2 * layers - 1 - at, 2 * layers + at
        said.append(trace.TensorSaid(f"weight {at}", "parameter", 64 * MIB, [at, back, late], [late], True))
        said += [
            trace.TensorSaid(f"{name} {at}", "optimizer state", 64 * MIB, [late], [late], True)
            for name in ("mean", "variance")
        ]
        said.append(trace.TensorSaid(f"gradient {at}", "gradient", 64 * MIB, [back, late], [back]))
        said.append(trace.TensorSaid(f"activation {at}", "activation", 48 * MIB, [at, back], [at]))
    return trace.build(f"{layers} layers", rows, [(name, at) for at, (name, _, _) in enumerate(rows)], said)


# --- the bound -------------------------------------------------------------------------------------------------------
class _Program:
    """A linear program: variables with upper bounds, rows `sum <= most`."""

    def __init__(self) -> None:
        self.tops: list[float | None] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._mosts: list[float] = []

    def variable(self, top: float | None = None) -> int:
        self.tops.append(top)
        return len(self.tops) - 1

    def row(self, most: float, plus: list[int], minus: list[int], minus_times: float = 1.0) -> None:
        for columns, value in ((plus, 1.0), (minus, -minus_times)):
            self._rows += [len(self._mosts)] * len(columns)
            self._columns += columns
            self._values += [value] * len(columns)
        self._mosts.append(most)

    def least(self, columns: list[int]) -> float:
        """The least sum of those variables."""
        numpy, sparse = importlib.import_module("numpy"), importlib.import_module("scipy.sparse")
        shape = len(self._mosts), len(self.tops)
        matrix = sparse.csr_matrix((self._values, (self._rows, self._columns)), shape=shape)
        costs = numpy.zeros(len(self.tops))
        costs[columns] = 1.0
        bounds = [(0.0, top) for top in self.tops]
        found = importlib.import_module("scipy.optimize").linprog(
            costs, A_ub=matrix, b_ub=self._mosts, bounds=bounds, method="highs"
        )
        if found.status != 0:
            raise load.LoadFailed(f"the bound was not found: {found.message}")
        return float(found.fun)


def bound_s(trace: Any, machine: Any) -> float:
    """No step under any plan is shorter, with one disk tier. Bytes are counted in MB, for the solver's sake.

    For each tensor and stretch: `away` and `copied` while it runs, and what flows out and in before it (while the step
    waits) and while it runs. What flows in while a stretch runs takes memory there already.
    """
    numpy = importlib.import_module("numpy")
    stretches = _offload("planning.stretches").stretches_of(trace, 1)
    count, program = stretches.count, _Program()
    waits = [program.variable() for _ in range(count)]
    flows: list[list[list[int]]] = [[[] for _ in range(count)] for _ in range(5)]
    written: list[set[int]] = [set() for _ in range(count)]
    at = stretches.of(trace.use_operators).tolist()
    for tensor, stretch, writes in zip(trace.users().tolist(), at, trace.use_writes.tolist(), strict=True):
        if writes:
            written[stretch].add(tensor)
    for tensor in numpy.flatnonzero(stretches.movable).tolist():
        size = float(trace.sizes_bytes[tensor]) / 1e6
        begin, end = stretches.of(numpy.array([trace.births[tensor], trace.deaths[tensor]])).tolist()
        of: dict[int, list[int]] = {}
        for stretch in range(begin, end + 1):
            top = 0.0 if tensor in stretches.counted[stretch] else size
            of[stretch] = [program.variable(top), program.variable(size), *(program.variable() for _ in range(4))]
            for each, column in zip(flows, [of[stretch][0], *of[stretch][2:]], strict=True):
                each[stretch].append(column)
            program.row(0.0, of[stretch][:1], of[stretch][1:2])
        for stretch, (away, copied, out, _, into, _) in of.items():
            if stretch == begin and not trace.persistent[tensor]:
                program.row(0.0, [copied], [])
                continue
            before = of[(stretch - 1) % count]
            program.row(0.0, before[:1], [away, into, before[5]])
            earlier = [] if tensor in written[(stretch - 1) % count] else [before[1], before[3]]
            program.row(0.0, [copied], [out, *earlier])
    gone, out_waiting, out_running, in_waiting, in_running = flows
    sides = (
        (machine.disk_write_bytes_s, out_waiting, out_running),
        (machine.disk_read_bytes_s, in_waiting, in_running),
    )
    for stretch in range(count):
        for bytes_s, waiting, running in sides:
            program.row(0.0, waiting[stretch], [waits[stretch]], bytes_s / 1e6)
            program.row(bytes_s / 1e6 * float(stretches.times_s[stretch]), running[stretch], [])
        room = (machine.budget_bytes - int(stretches.need_bytes[stretch])) / 1e6
        program.row(room, in_running[stretch], gone[stretch])
    return float(trace.compute_s) + program.least(waits)
