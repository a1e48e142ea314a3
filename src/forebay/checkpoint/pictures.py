"""The picture of a run's checkpoints: how large each is, and how long it stalled training, over the time of the run.

The horizontal axis is the time at which each was saved, so that a gap shows where the run stood still or started again.
What cannot be restored is red.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

INK, SIZE, STALL, DAMAGED = "#222222", "#1f6f8b", "#b08d57", "#a8322a"
GB = 1e9
TIME_MAX_S = 2.5e11  # a date has four digits for its year
POINTS_OF_A_BAR = 3.0  # its width on paper: as wide for a run of hours as for one of weeks


class Saved(NamedTuple):
    """What is drawn of one checkpoint."""

    step: int
    saved_s: float
    size_bytes: int
    stall_s: float
    whole: bool


def draw_checkpoints(run: str, saved: Sequence[Saved], path: Path) -> None:
    """Write the picture to `path`; its ending says the format (.png, .svg, .pdf). There is one in `saved` at
    the least, and none was saved after TIME_MAX_S."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    shown = sorted(saved, key=lambda one: one.saved_s)
    times = [datetime.fromtimestamp(one.saved_s, UTC).astimezone() for one in shown]
    sizes = [one.size_bytes / GB for one in shown]
    colours = [SIZE if one.whole else DAMAGED for one in shown]
    figure = Figure(figsize=(9.2, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.vlines(times, 0, sizes, colors=colours, linewidth=POINTS_OF_A_BAR)
    above.set_ylabel("GB")
    above.set_ylim(bottom=0)
    below.plot(times, [one.stall_s for one in shown], color=STALL, marker="o", markersize=4, linewidth=1.0)
    below.set_ylabel("stall, seconds")
    below.set_ylim(bottom=0)
    for at in {0, len(shown) - 1}:
        above.annotate(f"step {shown[at].step:,}", (times[at], sizes[at]), (0, 3), textcoords="offset points",
                       ha="center", fontsize=8, color=INK)  # fmt: skip
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.05, y=0.15)
    locator = AutoDateLocator(tz=times[0].tzinfo)
    below.xaxis.set_major_locator(locator)
    below.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=times[0].tzinfo))
    damaged = sum(not one.whole for one in shown)
    said = f"; {damaged} (red) cannot be restored" if damaged else ""
    title = f"{run}: {len(shown)} checkpoint{'s' * (len(shown) > 1)}{said}"
    above.set_title(title, color=INK, fontsize=10, loc="left", parse_math=False)
    figure.savefig(path, dpi=160)
