"""Plots of a trace and of a plan: what needs memory when, what waits how long, and what faster disks would give.

There are three. The memory curve stacks what lives at each operator by kind, with the budget as a line and, under a
plan, the replayed curve. Lifetimes show the largest tensors as bars from their first to their last use, dark where an
operator uses them and light where they wait: the light part is what offloading can free. The sweep shows step time
against the disks' bandwidth, on logarithmic axes: the knee is what to buy.

The horizontal axis is time, not the number of operators, because durations matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.offload.planning.trace import KINDS, Trace

if TYPE_CHECKING:
    from forebay.offload.planning.choose import Choice
    from forebay.offload.planning.sweep import Step

COLOURS = {
    "parameter": "#1f6f8b",
    "gradient": "#79b4c9",
    "optimizer state": "#b08d57",
    "activation": "#6f9f6a",
    "temporary": "#c9c9c9",
}
INK, FAINT, LIMIT = "#222222", "#dddddd", "#a8322a"
GIB = 1 << 30
LIFETIMES = 60  # bars: more are thinner than a line
COLUMNS_MAX = 4000  # of a curve: more are finer than a picture


def draw_memory(trace: Trace, path: str | Path, budget_bytes: int = 0, choice: Choice | None = None) -> None:
    """Memory over the time of a step, by kind; with `choice`, as the step ran under its plan."""
    figure, axes = _figure(9.2, 4.2)
    begins = np.concatenate([[0.0], np.cumsum(trace.times_s)])
    shown = _thinned(trace.operator_count)
    layers = [trace.living_bytes(trace.kinds == number)[shown] / GIB for number in range(len(KINDS))]
    layers.append(trace.workspace_bytes[shown] / GIB)
    colours = [COLOURS[kind] for kind in KINDS] + [FAINT]
    axes.stackplot(begins[:-1][shown], layers, labels=[*KINDS, "workspace"], colors=colours, step="post", linewidth=0)
    if choice is not None:
        curve = choice.replayed.memory_bytes[shown] / GIB
        axes.step(begins[:-1][shown], curve, where="post", color=INK, linewidth=1.0, label=f"under {choice.plan.rank}")
        axes.axhline(choice.plan.hardware.budget_bytes / GIB, color=LIMIT, linewidth=1.0, label="budget")
    elif budget_bytes:
        axes.axhline(budget_bytes / GIB, color=LIMIT, linewidth=1.0, label="budget")
    axes.set_xlabel("seconds of compute")
    axes.set_ylabel("GiB")
    axes.set_title(f"{trace.name}: memory of a step", color=INK, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _write(figure, path)


def draw_lifetimes(trace: Trace, path: str | Path) -> None:
    """The largest tensors: when each lives, and when it is used."""
    figure, axes = _figure(8.0, 5.2)
    begins = np.concatenate([[0.0], np.cumsum(trace.times_s)])
    order = np.argsort(-trace.sizes_bytes, kind="stable")[:LIFETIMES]
    for row, tensor in enumerate(order.tolist()):
        colour = COLOURS[KINDS[int(trace.kinds[tensor])]]
        born, died = begins[trace.births[tensor]], begins[trace.deaths[tensor] + 1]
        axes.broken_barh([(born, died - born)], (row - 0.4, 0.8), facecolor=colour, alpha=0.25, linewidth=0)
        used = [(begins[at], trace.times_s[at]) for at in trace.uses(tensor).tolist()]
        axes.broken_barh(used, (row - 0.4, 0.8), facecolor=colour, linewidth=0.3, edgecolor=colour)
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(0, begins[-1])
    axes.set_yticks([])
    axes.set_xlabel("seconds of compute")
    title = f"{trace.name}: the {len(order)} largest tensors; dark: used, light: waiting"
    axes.set_title(title, color=INK, fontsize=10, loc="left")
    _write(figure, path)


def draw_sweep(name: str, lines: dict[str, list[Step]], ideal_s: float, path: str | Path) -> None:
    """Step time by the disks' bandwidth, a line for each policy."""
    figure, axes = _figure(6.4, 4.0)
    for number, (label, steps) in enumerate(lines.items()):
        colour = list(COLOURS.values())[number % len(COLOURS)]
        rates = [step.bytes_s / 1e9 for step in steps]
        axes.plot(rates, [step.step_s for step in steps], marker="o", markersize=3, color=colour, label=label)
    axes.axhline(ideal_s, color=LIMIT, linewidth=1.0, label="without waiting")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="minor", labelsize=6)
    axes.set_xlabel("GB/s to and from the disks")
    axes.set_ylabel("seconds a step (simulated)")
    axes.set_title(name, color=INK, fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(color=FAINT, linewidth=0.5, which="both")
    _write(figure, path)


def _thinned(count: int) -> Any:
    """Numbers of the operators that a curve shows."""
    return np.unique(np.linspace(0, count - 1, min(count, COLUMNS_MAX)).astype(np.int64))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _write(figure: Any, path: str | Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
