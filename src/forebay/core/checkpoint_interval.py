"""How often to save: the interval that loses the least of a run, from what saving costs and how often runs fail.

Theory. Saving every `interval_s` costs the stall once an interval. A failure costs, on average, half an interval of
work and the time that the last save still took to become durable, and then the restart. Young (1974, "A first order
approximation to the optimum checkpoint interval", CACM 17(9)) balances the first two: sqrt(2·C·M), with C the stall
and M the mean time to interrupt. Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart
dumps", FGCS 22(3)) goes on in powers of C/2M, and holds where C is no longer small against M.

M is not known, so it is estimated from failures seen, starting from a guess that counts as one failure: (guess + time
run) / (1 + failures). A run that goes on without failures raises it, each failure lowers it.

Rejected: a fixed step count (stalls and failure rates differ a thousandfold between runs); the last stall alone (one
slow disk write would double the interval; the median of the last few does not).

Invariants. (1) The interval is never below the time that one save takes to become durable: a save that is cut short by
the next would never count. (2) It is finite and above zero.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from forebay.core.errors import Invalid

MTTI_GUESS_S = 24 * 3600.0  # of a job nobody knows anything about; one failure in a day
INTERVAL_S_MIN = 1.0
SAVES_KEPT = 7  # of the last stalls and durations; their median counts


def young_s(stall_s: float, mtti_s: float) -> float:
    """Young's interval between the ends of saves."""
    return math.sqrt(2 * stall_s * mtti_s)


def daly_s(stall_s: float, mtti_s: float) -> float:
    """Daly's interval: work between saves, without the stall itself."""
    if stall_s >= 2 * mtti_s:
        return mtti_s
    share = stall_s / (2 * mtti_s)
    return young_s(stall_s, mtti_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def waste(interval_s: float, stall_s: float, mtti_s: float, durable_s: float = 0.0, restart_s: float = 0.0) -> float:
    """The share of a run that is lost, to first order: stalls, half an interval and the lag of durability for each
    failure, and restarts. `durable_s`: from the end of the stall until the save counts."""
    failures = (interval_s / 2 + durable_s + restart_s) / mtti_s
    return min(1.0, stall_s / (interval_s + stall_s) + failures)


@dataclass(frozen=True)
class Reason:
    """Why the interval is what it is. Times in seconds; `failures` and `run_s` are what the estimate rests on."""

    interval_s: float
    stall_s: float
    durable_s: float
    mtti_s: float
    failures: int
    run_s: float
    given: bool
    expected_waste: float

    def __str__(self) -> str:
        source = (
            "as given"
            if self.given
            else f"from {self.failures} failures in {self.run_s / 3600:.1f} h and a first guess of "
            f"{MTTI_GUESS_S / 3600:.0f} h"
        )
        return (
            f"a save every {self.interval_s:.1f} s: it stalls training {self.stall_s:.2f} s and is durable "
            f"{self.durable_s:.1f} s later; a failure every {self.mtti_s / 3600:.1f} h ({source}); "
            f"expected waste {self.expected_waste:.1%}"
        )


@dataclass
class Interval:
    """When the next save is due. `mtti_s`: a mean time to interrupt that the user knows; None to estimate it."""

    mtti_s: float | None = None
    failures: int = 0
    run_s: float = 0.0  # time run before this life of the job
    began_s: float = 0.0
    _stalls: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _lags: deque[float] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    _last_s: float | None = None

    def __post_init__(self) -> None:
        if self.mtti_s is not None and not 0 < self.mtti_s < math.inf:
            raise Invalid(f"mtti_s={self.mtti_s}: the mean time to interrupt is seconds above 0")

    def saved(self, now_s: float, stall_s: float) -> None:
        """A save began that stalled training for `stall_s`, until now."""
        self._stalls.append(stall_s)
        self._last_s = now_s

    def durable(self, lag_s: float, stall_s: float = 0.0) -> None:
        """The last save counts, `lag_s` after its stall ended. `stall_s`: as it is known now; a GPU that copies behind
        the script's back is held longer than the script is."""
        self._lags.append(lag_s)
        if self._stalls:
            self._stalls[-1] = max(self._stalls[-1], stall_s)

    def due(self, now_s: float) -> bool:
        """Whether to save now. The first save is due at once: it measures the stall."""
        return self._last_s is None or now_s - self._last_s >= self.reason(now_s).interval_s

    def reason(self, now_s: float) -> Reason:
        run_s = self.run_s + max(0.0, now_s - self.began_s)
        mtti_s = self.mtti_s or (MTTI_GUESS_S + run_s) / (1 + self.failures)
        stall_s = median(self._stalls) if self._stalls else 0.0
        lag_s = median(self._lags) if self._lags else 0.0
        interval_s = max(daly_s(stall_s, mtti_s), stall_s + lag_s, INTERVAL_S_MIN)
        lost = waste(interval_s, stall_s, mtti_s, lag_s)
        return Reason(interval_s, stall_s, lag_s, mtti_s, self.failures, run_s, self.mtti_s is not None, lost)
