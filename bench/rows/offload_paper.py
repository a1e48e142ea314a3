"""The budgets of TERAIO's paper in simulation: 53, 26, 10 and 8 % of what a step in float32 needs.

Theory. The paper trains in float32 and does not say whether with TF32, whose peak is seven times that of plain float32
products. The share of the ideal follows from that more than from any plan: the disks have seven times as long. So each
cell is simulated at both peaks. Nothing here ran on an accelerator, and times are those of a table
(`tracing.roofline`).

Beside our plan stands one that moves as ZeRO-Infinity does: all that persists leaves after each use, and parameters
and optimizer state are fetched in the order of their use, BUCKET_BYTES ahead (`stage3_prefetch_bucket_size`, 5e7
elements by default). What of activations does not fit is moved by the replay as an engine without a plan would. That is
kinder than ZeRO-Infinity, which fails there, and harsher than its optimizer on host processors, whose time no table
here says.

Budgets below what one stretch of the step uses at once are raised to that, and the cell says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

from bench.parts import Lab
from bench.report import Result
from bench.row import Row
from bench.stats import bounded

MODELS = {
    "llama-3-8b": (16, 2048, (0.53,)),
    "granite-8b-code": (16, 2048, (0.26,)),
    "llama-3-70b": (8, 2048, (0.10, 0.08)),
}
RATES_BYTES_S = (16e9, 32e9, 48e9)
FP32_FLOPS_S = 0.65 * 66.9e12  # of an H100 SXM without TF32, as large products reach it
BUCKET_BYTES = 4 * 50_000_000


def _offload(name: str) -> Any:
    return importlib.import_module(f"forebay.offload.{name}")


def as_zero_infinity(trace: Any, hardware: Any) -> Any:
    """The plan of the module's header."""
    planned = _offload("planning.plan")
    whole = _offload("planning.choose").whole_layer(trace, hardware)
    moves = sorted(whole.moves, key=lambda move: (move.need, move.tensor))
    ahead_bytes, first, made = 0, 0, []
    for at, move in enumerate(moves):
        ahead_bytes += int(trace.sizes_bytes[move.tensor])
        while ahead_bytes > BUCKET_BYTES and first < at:  # what was needed before has left the bucket
            ahead_bytes -= int(trace.sizes_bytes[moves[first].tensor])
            first += 1
        begun = (other.load for other in moves[first : at + 1] if other.load > move.gone)  # at a point
        made.append(move._replace(load=min(move.load, next(begun, move.load))))
    made.sort(key=lambda move: (move.leave, move.tensor))
    stretches = _offload("planning.stretches").stretches_of(trace, whole.size_bytes_min)
    left = planned.left_bytes(stretches, made)
    return dataclasses.replace(whole, rank="as ZeRO-Infinity", moves=tuple(made), left_bytes=left)


def budgets(lab: Lab, row: Row) -> Result:
    """Shares of the step without waiting, by model, budget, peak and bandwidth: ours and as ZeRO-Infinity moves."""
    hardware, choose, made = _offload("planning.hardware"), _offload("planning.choose"), _offload("tracing.shapes")
    tf32 = _offload("tracing.roofline").H100
    fp32 = dataclasses.replace(tf32, name="fp32", flops_s={**tf32.flops_s, "float32": FP32_FLOPS_S})
    notes = ["SIMULATION: times of a table, nothing ran on an accelerator"]
    found: dict[str, list[float]] = {"TF32": [], "fp32": []}
    beside: dict[str, list[float]] = {"TF32": [], "fp32": []}
    for name, (batch, sequence, shares) in list(MODELS.items())[: 1 if lab.quick else None]:
        for peak, table in (("TF32", tf32), ("fp32", fp32)):
            layers = 4 if lab.quick else None
            trace = made.trace_of(name, batch=batch, sequence=sequence, layers=layers, table=table)
            need = int(trace.need_bytes().max())
            least = int(_offload("planning.stretches").stretches_of(trace, 1).required_bytes.max() * 1.02)
            for share in shares:
                cells = []
                for bytes_s in RATES_BYTES_S[:: 2 if lab.quick else 1]:
                    machine = hardware.Hardware(
                        max(int(need * share), least),
                        disk_bytes=1 << 50,
                        disk_write_bytes_s=bytes_s,
                        disk_read_bytes_s=bytes_s,
                    )
                    best, _ = choose.choose(trace, machine)
                    theirs = _offload("planning.replay").replay(trace, as_zero_infinity(trace, machine))
                    found[peak].append(best.replayed.share_of_ideal)
                    beside[peak].append(best.replayed.step_s / theirs.step_s)
                    cells.append(f"{best.replayed.share_of_ideal:.1%} ({theirs.share_of_ideal:.1%})")
                raised = f", raised to {least / need:.0%}" if least > need * share else ""
                rates = " ".join(f"{rate / 1e9:g}" for rate in RATES_BYTES_S)
                notes.append(
                    f"{name} {batch} x {sequence}, need {need / 1e9:.0f} GB, budget {share:.0%}{raised}, {peak} peak, "
                    f"of ideal at {rates} GB/s (as ZeRO-Infinity moves): "
                    f"{' '.join(cells)}"
                )
                print(f"[bench]   {notes[-1]}", file=sys.stderr, flush=True)
    measures = [
        *(bounded(f"of ideal, {peak} peak", "of it", row.goals["of ideal"], shares) for peak, shares in found.items()),
        *(
            bounded(f"step / as ZeRO-Infinity moves, {peak} peak", "of it", row.goals["beside"], ratios)
            for peak, ratios in beside.items()
        ),
    ]
    return Result(row, tuple(measures), notes=tuple(notes))
