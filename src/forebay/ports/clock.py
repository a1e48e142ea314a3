"""Time as a door: the only place that reads a clock.

Theory. Code that decides takes `now` as an argument; code that acts asks a `Clock`, which a test or the simulator
replaces. Two clocks, never mixed: *wall* (Unix seconds; may jump; for what people and other machines read) and
*monotonic* (seconds from an arbitrary start; never jumps back; for every duration and timeout).

Rejected: calling `time.time` where it is needed (a test then sleeps); one clock for both (a jump ends leases).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def wall_s(self) -> float:
        """Unix time in seconds. May jump in either direction."""
        ...

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start of this process's machine; never less than before."""
        ...


class SystemClock:
    """The machine's clocks."""

    wall_s = staticmethod(time.time)  # no frame around them: a hit asks three times
    monotonic_s = staticmethod(time.monotonic)


class BoottimeClock(SystemClock):
    """The machine's clocks, of which the monotonic one goes on while the machine is suspended: for what others count
    meanwhile, such as leases."""

    @staticmethod
    def monotonic_s() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


system: Clock = SystemClock()
boottime: Clock = BoottimeClock()


def wall_s() -> float:
    """Unix time in seconds, by the system's clock."""
    return system.wall_s()


def monotonic_s() -> float:
    """Monotonic seconds, by the system's clock."""
    return system.monotonic_s()
