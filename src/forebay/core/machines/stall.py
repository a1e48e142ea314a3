"""Whether a disk that somebody waits for has stalled.

Theory. Nobody can ask a disk whether it lives: whoever asks waits with it. But whoever hands it something knows since
when that has not come back. A disk that finishes anything of what is oldest with it makes progress, however slow it is;
one with which the same thing stays the oldest for `stalled_after_s` has stalled. It is back as soon as that thing is.

The same silence is seen when this process was stopped, or got no processor. So it is not measured by the clock alone: a
look that comes late counts no more than COUNTED_MAX of the time between looks, as for processes (`pulse.py`).

Rejected: a longest time for each request (a slow disk under load would be taken out, and its load put on others); the
kernel's own counters (they say nothing of a filesystem that is frozen).

Invariants. (1) Stalled needs at least `stalled_after_s` by the clock, and as many looks in time as fill it. (2) What
answers is never stalled.
"""

from __future__ import annotations

LOOK_S = 0.5
COUNTED_MAX = 2.0
STALLED_AFTER_S = 5.0


class Stall:
    """See the module's header. For one disk."""

    def __init__(self, stalled_after_s: float = STALLED_AFTER_S) -> None:
        self.stalled_after_s = stalled_after_s
        self.stalled = False
        self.silent_s = 0.0  # how long the oldest has waited, as far as it counts
        self._oldest: int | None = None
        self._looked_s = 0.0

    def look(self, now_s: float, oldest: int | None) -> bool:
        """Whether it is stalled. `oldest`: the number of what it has had for the longest time, None if it has nothing.
        Call it every LOOK_S."""
        passed_s, self._looked_s = max(0.0, now_s - self._looked_s), now_s
        if oldest is None or oldest != self._oldest:
            self._oldest, self.silent_s, self.stalled = oldest, 0.0, False
            return False
        self.silent_s += min(passed_s, COUNTED_MAX * LOOK_S)
        self.stalled = self.stalled or self.silent_s >= self.stalled_after_s
        return self.stalled
