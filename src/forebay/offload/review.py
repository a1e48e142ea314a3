"""Decides when a plan is made again, from the steps that followed it.

Theory. The first plan has a profiler's times, which profiling inflates. So steps that follow it are timed between
points, without their waits, and after TIMED_STEPS there are better times. On an accelerator those steps are watched as
well: their operators pass a mode (`rescue`), which slows small kernels down. So once TIMED_STEPS were not watched any
more there are better times again. From then on the plan is looked at now and then, and is good unless steps differ from
the prediction by DRIFT_SHARE.

Points are timed only in the steps before a look: on an accelerator each is an event.
"""

from __future__ import annotations

import statistics
from typing import Any

from forebay.offload import rescue
from forebay.offload.runner import StepFacts
from forebay.offload.tracing.timing import SegmentTimer

TIMED_STEPS = 3
REVIEW_STEPS = 16  # between two looks; after each new plan twice as many
DRIFT_SHARE = 0.25


class Review:
    """Of the plan that is followed; `device` runs its steps."""

    def __init__(self, device: Any) -> None:
        self.has_drifted = False  # as the last look found
        self._device = device
        self._due = 0
        self._is_profiled = self._is_watched = False  # whose times the plan has
        self._steps: list[StepFacts] = []
        self._timer = SegmentTimer(device)

    def begin(self, *, profiled: bool) -> None:
        """Another plan is followed from now on. `profiled`: its times are a profiler's."""
        self._is_profiled = profiled
        if profiled:
            self._due = TIMED_STEPS
        elif self._is_watched:
            self._due = max(rescue.STEPS + TIMED_STEPS, REVIEW_STEPS)
        else:
            self._due = max(2 * self._due, REVIEW_STEPS)
        self.restart()

    def restart(self) -> None:
        """Count steps from here."""
        self._steps = []
        self._timer = SegmentTimer(self._device)

    def at(self, name: str, waited_s: float) -> None:
        """A point is reached. `waited_s`: what was waited until now in all."""
        if len(self._steps) >= self._due - TIMED_STEPS:
            self._timer.at(name, waited_s=waited_s)

    def is_due(self, facts: StepFacts) -> bool:
        """A step is over that followed the plan to its end; whether to look at it now."""
        self._steps.append(facts)
        return len(self._steps) >= self._due

    def look(self, predicted_s: float) -> dict[str, float] | None:
        """The seconds from each point to the next that a new plan is to be made for; None if this one is good."""
        is_watched = any(step.watched for step in self._steps[-TIMED_STEPS:])
        if self._is_profiled or (self._is_watched and not is_watched):
            self.has_drifted, self._is_watched = False, is_watched
            return self._timer.seconds()
        later = self._steps[1:] or self._steps
        counted = [step.step_s for step in later if not step.watched] or [step.step_s for step in later]
        self.has_drifted = abs(statistics.median(counted) / predicted_s - 1) >= DRIFT_SHARE
        if self.has_drifted:
            self._is_watched = is_watched
            return self._timer.seconds()
        self.restart()
        return None
