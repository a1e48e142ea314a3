"""Whether a process that should give a sign of life now and then hangs.

Theory. A process that serves beats from its event loop every `interval_s`. One that has beaten once and then gives no
beat for `deadline_s` is hung: it is stopped, or its loop waits for something that does not come. Two things look the
same from outside and must not be taken for it, since killing a process that works makes a slow machine slower:

* *The machine is starved*, paused or swapping, and the watcher with it. So silence is not measured by the clock alone:
  a look that comes late counts no more than one interval, however much time has gone by.
* *The process works*: its loop computes for long, or waits for its turn on a processor. The watcher says how long the
  loop's thread ran or waited to run (`active_s`); while that grows the process has WORKING_TIMES the deadline.

Think of a night watchman who calls the hours. If you slept through some calls, that says nothing about him; if you hear
him shovel snow, he gets more time; if you stood awake at the window and heard nothing at all, send somebody.

Rejected: asking it and waiting for the answer (the same wait, and traffic both ways); a thread that beats (it lives on
when the loop does not); judging from the start (opening a large index takes as long as it takes).

Invariants. (1) Nothing is hung before its first beat, and nothing with a deadline of 0. (2) Hung needs at least
`deadline_s` of silence by the clock, and as many looks in time as fill it.
"""

from __future__ import annotations

INTERVAL_MAX_S = 1.0
BEATS_A_DEADLINE = 4  # at least so many are missed before a process is hung
WORKING_TIMES = 6  # how many deadlines a process has that works and does not beat
ACTIVE_SHARE = 0.05  # of the time, below which a thread does not work: threads that wait wake up for a moment


def interval_s(deadline_s: float) -> float:
    """How often to beat, and how often to look."""
    return min(INTERVAL_MAX_S, deadline_s / BEATS_A_DEADLINE) if deadline_s else INTERVAL_MAX_S


class Pulse:
    """See the module's header. For one process that is watched, and one connection to it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.silent_s = 0.0  # since the last beat, as far as it counts
        self.still_s = 0.0  # of that, how long without a sign of work
        self._beats = 0
        self._looked_s = 0.0
        self._active_s = 0.0

    def look(self, now_s: float, beats: int, active_s: float) -> bool:
        """Whether it is hung. `beats`: how many came in all; `active_s`: how long its thread ran or waited to run, in
        all. Call it every `interval_s`."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        worked_s, self._active_s = active_s - self._active_s, active_s
        if beats != self._beats or not beats or not self.deadline_s:
            self._beats = beats
            self.silent_s = self.still_s = 0.0
            return False
        counted_s = min(max(passed_s, 0.0), interval_s(self.deadline_s))
        self.silent_s += counted_s
        self.still_s = 0.0 if worked_s >= ACTIVE_SHARE * passed_s else self.still_s + counted_s
        return self.still_s >= self.deadline_s or self.silent_s >= WORKING_TIMES * self.deadline_s
