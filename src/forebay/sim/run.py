"""One run of a world: what it came to, as a value that two runs of a seed must agree on.

Theory. There are two worlds. *reading* is a cache in front of a bucket: flights, eviction, freshness, local writes,
stops (`sim/world.py`). *writing* is what is owed to a bucket: group commit, flushes, conflicts, stops
(`sim/writing.py`). They share schedule, disk and backend, and are apart because a machine is found out sooner where it
has the world to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.sim.plants import WRITING, planted
from forebay.sim.world import World
from forebay.sim.writing import WritingWorld

TICKS_DEFAULT = 2500
WORLDS = ("reading", "writing")


@dataclass(slots=True)
class Outcome:
    """What a run came to. `finding` is empty when nothing was found."""

    seed: int
    events: int
    simulated_s: float
    outcomes: dict[str, int]
    fingerprint: str
    finding: str
    tail: list[str]


def world_of(plant: str | None) -> str:
    """The world in which a planted bug shows."""
    return "writing" if plant in WRITING else "reading"


def simulate(
    seed: int,
    ticks: int,
    plant: str | None = None,
    echo: Callable[[str], None] | None = None,
    world: str = "",
) -> Outcome:
    """Run one world (by default the one of the plant, or of reading); never raises for a finding."""
    finding = ""
    with planted(plant):
        made = (WritingWorld if (world or world_of(plant)) == "writing" else World)(seed, ticks, echo)
        try:
            made.run()
        except (AssertionError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            finding = f"{type(error).__name__}: {error}" + _where(error)
    schedule = made.schedule
    return Outcome(
        seed,
        schedule.events,
        schedule.now_s,
        made.outcomes,
        schedule.fingerprint(),
        finding,
        list(schedule.tail),
    )


def _where(error: BaseException) -> str:
    """File and line where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    return f" ({trace.tb_frame.f_code.co_filename.rpartition('/src/')[2]}:{trace.tb_lineno})"
