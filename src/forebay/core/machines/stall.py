"""Whether a disk that somebody waits for has stalled.

Theory. Nobody can ask a disk whether it lives: the question would wait with everything else. But whoever hands it a
request knows how long the request has been out. A disk that finishes its oldest request makes progress, however slow it
is. A disk whose oldest request stays the same for `stalled_after_s` has stalled. It recovers as soon as that request
finishes.

A stopped or starved process sees the same silence. So the clock alone does not measure it: a late look counts no more
than COUNTED_MAX intervals between looks, as for processes (`pulse.py`).

Rejected: a time limit for each request (a slow disk under load would be taken out, and its load put on others); the
kernel's own counters (they say nothing about a frozen filesystem).

Invariants. (1) A stall needs at least `stalled_after_s` by the clock, and enough timely looks to fill it. (2) A disk
that answers is never stalled.
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
        self.silent_s = 0.0  # counted waiting time of the oldest request
        self._oldest: int | None = None
        self._looked_s = 0.0

    def look(self, now_s: float, oldest: int | None) -> bool:
        """Whether the disk is stalled. `oldest` is the number of its oldest unfinished request, None if it has none.
        Call it every LOOK_S."""
        passed_s, self._looked_s = max(0.0, now_s - self._looked_s), now_s
        if oldest is None or oldest != self._oldest:
            self._oldest, self.silent_s, self.stalled = oldest, 0.0, False
            return False
        self.silent_s += min(passed_s, COUNTED_MAX * LOOK_S)
        self.stalled = self.stalled or self.silent_s >= self.stalled_after_s
        return self.stalled
