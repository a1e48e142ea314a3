"""Whether a watched process hangs.

Theory. A process that serves sends a beat from its event loop every `interval_s`. After its first beat, a silence of
`deadline_s` means that it hangs: it is stopped, or its loop waits for something that never comes. Two harmless cases
look the same from outside. Killing a process in either would make a slow machine slower:

* *The machine is starved*, paused or swapping, and the watcher with it. So the clock alone does not measure silence: a
  late look counts as one interval at most, however much time has passed.
* *The process works*: its loop computes for long, or waits for a processor. The watcher passes how long the loop's
  thread ran or waited to run (`active_s`). While that grows, the process has WORKING_TIMES the deadline.

Rejected: asking and waiting for the answer (the same wait, and traffic both ways); a thread that beats (it lives on
when the loop does not); judging from the start (opening a large index takes as long as it takes).

Invariants. (1) A process never hangs before its first beat, nor with a deadline of 0. (2) A hang needs at least
`deadline_s` of silence by the clock, and enough timely looks to fill it.
"""

from __future__ import annotations

INTERVAL_MAX_S = 1.0
BEATS_A_DEADLINE = 4  # a process misses at least this many before it counts as hung
WORKING_TIMES = 6  # how many deadlines a process has that works but does not beat
ACTIVE_SHARE = 0.05  # share of the time below which a thread counts as idle: waiting threads wake up for moments


def interval_s(deadline_s: float) -> float:
    """How often to beat, and how often to look."""
    return min(INTERVAL_MAX_S, deadline_s / BEATS_A_DEADLINE) if deadline_s else INTERVAL_MAX_S


class Pulse:
    """See the module's header. For one watched process and one connection to it."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.silent_s = 0.0  # counted silence since the last beat
        self.still_s = 0.0  # the part of it without a sign of work
        self._beats = 0
        self._looked_s = 0.0
        self._active_s = 0.0

    def look(self, now_s: float, beats: int, active_s: float) -> bool:
        """Whether the process hangs. Call it every `interval_s`. `beats`: how many came in all; `active_s`: how long
        its thread ran or waited to run, in all."""
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
