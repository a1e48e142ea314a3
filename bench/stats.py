"""Medians, spreads and verdicts: how rounds become one line of a table.

Theory. One number from one run says little on a shared machine. A *measure* keeps every round's pair and judges the
median of the per-round ratios, so that what disturbs a whole round disturbs both sides of it; the spread (lowest to
highest ratio) stands beside it, and whoever reads a wide one knows not to trust the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.row import Goal


@dataclass(frozen=True)
class Measure:
    """One judged number of a row. `ours` and `theirs` are per round, in `unit`; `theirs` is empty where the goal is
    on our number itself. `ratios` are what is judged. `peer`: who `theirs` are, where it is not the row's peer."""

    name: str
    unit: str
    goal: Goal
    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    ratios: tuple[float, ...]
    peer: str = ""

    def __post_init__(self) -> None:
        assert self.ratios, f"{self.name}: a measure without a round"
        assert len(self.ratios) == len(self.ours), f"{self.name}: a ratio per round"

    @property
    def value(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.ratios), max(self.ratios)

    @property
    def verdict(self) -> str:
        met = self.goal.met(self.value)
        return "reported" if met is None else "reached" if met else "MISSED"


def compared(
    name: str, unit: str, goal: Goal, ours: Sequence[float], theirs: Sequence[float], peer: str = ""
) -> Measure:
    """Judge ours/theirs, round by round."""
    assert len(ours) == len(theirs), f"{name}: rounds come in pairs"
    ratios = tuple(mine / other for mine, other in zip(ours, theirs, strict=True))
    return Measure(name, unit, goal, tuple(ours), tuple(theirs), ratios, peer)


def faster(name: str, unit: str, goal: Goal, ours: Sequence[float], theirs: Sequence[float], peer: str = "") -> Measure:
    """Judge theirs/ours, for times: above 1 means that we took less."""
    turned = compared(name, unit, goal, theirs, ours)
    return Measure(name, unit, goal, tuple(ours), tuple(theirs), turned.ratios, peer)


def bounded(name: str, unit: str, goal: Goal, ours: Sequence[float]) -> Measure:
    """Judge our number itself."""
    return Measure(name, unit, goal, tuple(ours), (), tuple(ours))
