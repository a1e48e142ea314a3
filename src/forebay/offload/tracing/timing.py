"""Times steps between points, without a profiler, and scales traces to those times.

Theory. A profiler that sees every operator slows each down, small ones most. Points are few, and reading the clock
there costs next to nothing. So a few ordinary steps are timed from point to point, and the operators of the trace are
scaled so that each stretch takes its median time. Within a stretch the operators keep their shares.

An accelerator works behind Python: there a point is an event in its current stream, and a stretch is what passes on the
device between two of them. That counts kernels, and the gaps in which the device waits for Python to launch some.

Invariant. A scaled trace takes as long as its measured stretches together: time measured where the trace has no
operator goes to the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from forebay.core.errors import Invalid
from forebay.offload.planning.trace import Floats, Ints, Trace
from forebay.offload.tracing.points import BEGINS, ENDS

STEPS_MAX = 64  # of which times are kept: the median does not need more


class SegmentTimer:
    """Times stretches between points: give it each point, run steps, ask for `seconds`. `device`: what runs them."""

    def __init__(self, device: Any = None) -> None:
        self._on_cuda = device is not None and device.type == "cuda"
        self._steps: list[list[tuple[str, Any, float]]] = []
        self._step: list[tuple[str, Any, float]] | None = None

    def at(self, name: str, *, waited_s: float = 0.0) -> None:
        """A point is reached. `waited_s`: what was waited until now in all, which is not of the stretches."""
        if name == BEGINS:
            self._step = []
        if self._step is None:
            return  # outside a step
        self._step.append((name, self._now(), waited_s))
        if name == ENDS:
            self._steps.append(self._step)
            self._step = None
            del self._steps[:-STEPS_MAX]

    @property
    def steps(self) -> int:
        """How many whole steps were timed."""
        return len(self._steps)

    def seconds(self) -> dict[str, float]:
        """For each point the median seconds to the next one. `Invalid` if no step was timed."""
        if not self._steps:
            raise Invalid("no step was timed: run some with the timer attached, from begin_step to end_step")
        found: dict[str, list[float]] = {}
        for step in self._steps:
            for (name, began, before_s), (_, ended, after_s) in itertools.pairwise(step):
                found.setdefault(name, []).append(max(0.0, self._between(began, ended) - (after_s - before_s)))
        return {name: statistics.median(times) for name, times in found.items()}

    def _now(self) -> Any:
        if not self._on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


def scaled(trace: Trace, segment_seconds: Mapping[str, float] | Sequence[float]) -> Trace:
    """The trace, with times such that each stretch from a point to the next takes `segment_seconds`: by the point's
    name (stretches without a name keep their time), or one number for each stretch in order."""
    begins: Ints = trace.points
    ends: Ints = np.append(trace.points[1:], trace.operator_count)
    if isinstance(segment_seconds, Mapping):
        wanted = [segment_seconds.get(name) for name in trace.point_names]
    else:
        wanted = list(segment_seconds)
        if len(wanted) == len(begins) - 1:  # nothing is behind the last point
            wanted.append(None)
        if len(wanted) != len(begins):
            raise Invalid(f"{len(wanted)} times for the stretches between {len(begins)} points: give one for each")
    times: Floats = trace.times_s.copy()
    over_s, last = 0.0, -1
    for begin, end, seconds in zip(begins.tolist(), ends.tolist(), wanted):
        if seconds is not None and seconds < 0:
            raise Invalid("a stretch between two points that takes less than no time: time the steps again")
        if begin == end:
            over_s += seconds or 0.0
            continue
        if seconds is not None:
            stretch = times[begin:end]
            total_s = float(stretch.sum())
            times[begin:end] = stretch * (seconds / total_s) if total_s else seconds / (end - begin)
        times[begin] += over_s
        over_s, last = 0.0, end - 1
    if last >= 0:
        times[last] += over_s
    return dataclasses.replace(trace, times_s=times)
