"""The demo's plot: how long each epoch took, and how far training had come after how many seconds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET_COLOUR, NODE_COLOUR, INK, FAINT = "#9a9a9a", "#1f6f8b", "#222222", "#dddddd"


@dataclass
class Run:
    """One training job: seconds per epoch, and (seconds, samples) as it went."""

    name: str
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    backend_bytes: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)
    accuracy: float = 0.0


def _pyplot() -> Any:
    """Without a screen, in the demo's colours."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK})
    return pyplot


def draw(path: Path, direct: Run, node: Run, title: str) -> None:
    """Write the picture to `path`."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1, 1.35))
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    _epochs(left, direct, node)
    _progress(right, direct, node)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    figure.tight_layout(rect=(0, 0, 1, 0.95), w_pad=3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_cluster(path: Path, run: Run, happened: list[tuple[float, str]]) -> None:
    """Write the picture of one job's progress, with what happened when."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 4.4))
    times, seen = [0.0, *(at for at, _ in run.progress)], [0, *(samples for _, samples in run.progress)]
    axes.plot(times, seen, color=NODE_COLOUR, linewidth=2.2)
    for samples in itertools.accumulate(run.samples):
        axes.axhline(samples, color=FAINT, linewidth=0.8, zorder=0)
    for at_s, what in happened:
        axes.axvline(at_s, color=BUCKET_COLOUR, linewidth=1.2, linestyle=":")
        axes.annotate(what, (at_s, 0), (4, 6), textcoords="offset points", fontsize=9)
    axes.set_xlim(0, times[-1] * 1.03)
    axes.set_ylim(0, seen[-1] * 1.1)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("samples seen (lines: end of an epoch)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f} k")
    axes.set_title("A training job whose node dies in a cluster of three", loc="left", fontsize=12, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _epochs(axes, direct: Run, node: Run) -> None:
    width = 0.38
    for run, shift, colour in ((direct, -width / 2, BUCKET_COLOUR), (node, width / 2, NODE_COLOUR)):
        places = [number + shift for number in range(1, len(run.seconds) + 1)]
        bars = axes.bar(places, run.seconds, width * 0.94, color=colour, label=run.name)
        axes.bar_label(bars, [f"{seconds:.1f}" for seconds in run.seconds], padding=2, fontsize=9)
    axes.set_xticks(range(1, len(direct.seconds) + 1), [f"epoch {n}" for n in range(1, len(direct.seconds) + 1)])
    axes.set_ylabel("seconds")
    axes.set_ylim(0, max(direct.seconds + node.seconds) * 1.28)
    axes.set_title("Time of each epoch", loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper right", ncols=1, fontsize=9)


def _progress(axes, direct: Run, node: Run) -> None:
    longest = max(run.progress[-1][0] for run in (direct, node))
    total = max(run.progress[-1][1] for run in (direct, node))
    each = total / max(1, len(node.seconds))
    for number in range(1, len(node.seconds) + 1):
        axes.axhline(number * each, color=FAINT, linewidth=0.8, zorder=0)
    for run, colour in ((direct, BUCKET_COLOUR), (node, NODE_COLOUR)):
        times = [0.0, *(at for at, _ in run.progress)]
        seen = [0, *(samples for _, samples in run.progress)]
        axes.plot(times, seen, color=colour, linewidth=2.2)
        axes.plot(times[-1], seen[-1], "o", color=colour, markersize=5)
        axes.annotate(
            f"{run.name}\n{times[-1]:.0f} s", (times[-1], seen[-1]), (-6, 7), textcoords="offset points", ha="right",
            va="bottom", color=colour, fontsize=9,
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.03)
    axes.set_ylim(0, total * 1.22)
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("samples seen")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:.0f} k")
    axes.set_title("Progress (lines: end of an epoch)", loc="left", fontsize=10)
