"""Which disks to buy: replays step times over bandwidths.

Theory. For each bandwidth the best plan is chosen and replayed. The *knee* is the slowest disk with which a step takes
at most KNEE of the time that it takes with the fastest one tried: more bandwidth buys little. Plans are improved less
than the one that is chosen, which may be a little better than the sweep says at its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from forebay.offload.planning.choose import Choice, choose
from forebay.offload.planning.hardware import Hardware
from forebay.offload.planning.improve import EVALUATIONS
from forebay.offload.planning.trace import Trace

KNEE = 1.05
REPLAYS = EVALUATIONS // 8  # for each bandwidth: steps are 1 % longer than with all, and the sweep takes a sixth
RATES_BYTES_S = (1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 48e9, 64e9, 96e9)


class Step(NamedTuple):
    """A step with disks that read and write `bytes_s`."""

    bytes_s: float
    step_s: float
    excess_bytes: int
    written_bytes: int
    rank: str


def sweep(
    trace: Trace,
    hardware: Hardware,
    rates_bytes_s: Sequence[float] = RATES_BYTES_S,
    plan: Callable[[Trace, Hardware], Choice] = lambda trace, hardware: choose(trace, hardware, replays_max=REPLAYS)[0],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Step]:
    """The best step at each bandwidth, slowest disks first. `progress` is told how many of them are done."""
    steps = []
    for done, bytes_s in enumerate(sorted(rates_bytes_s)):
        machine = replace(hardware, disk_write_bytes_s=bytes_s, disk_read_bytes_s=bytes_s)
        found = plan(trace, machine)
        ran = found.replayed
        steps.append(Step(bytes_s, ran.step_s, found.plan.excess_bytes, ran.written_bytes, found.plan.rank))
        progress(done + 1, len(rates_bytes_s))
    return steps


def knee(steps: Sequence[Step]) -> Step:
    """The slowest disks that are within KNEE of the fastest that were tried."""
    quickest = min(step.step_s for step in steps)
    return next(step for step in sorted(steps) if step.step_s <= quickest * KNEE)
