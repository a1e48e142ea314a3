"""How long sending a checkpoint pauses, so that training keeps its cores.

Theory. The system says of a thread how long it ran and how long it was ready to run and had no core. Both together,
divided by the first, say how much slower the thread was than on a core of its own. What that is between saves is other
programs' doing. What it is more while a blob is sent is the price of sending: of our threads, and of the node, the
kernel and the disk, whom no priority of ours reaches. If a blob costs training a fifth and a twenty-fifth may be spent,
sending works a fifth of the time. So after each blob it pauses four times as long as the blob took.

What a blob cost is remembered for the next save, and forgotten by halves, since one blob says little on a busy machine.

A thread that hardly runs (it waits for a GPU) cannot be slowed by a lack of cores, and is no measure: then nothing
pauses.

Rejected: the time of a step (nobody tells it to the one who sends, and steps differ); low priorities alone (they count
within a session or a container, and the node is in another); a fixed rate (it wastes a free core).

Invariants. (1) A pause is at most REST_MAX times as long as what was sent before it. (2) Where nothing is known of the
thread, nothing pauses.
"""

from __future__ import annotations

from typing import NamedTuple

SPENT = 0.04  # of training's time, while a save is sent: below the twentieth that is promised
REST_MAX = 7.0  # times as long as sending: durable within eight times the time, whatever training does
SEEN_MIN_S = 0.01  # that a thread ran or was ready: less says nothing


class CoreTime(NamedTuple):
    """Of a thread: seconds that it ran, and that it was ready to run and waited for a core, since it began."""

    ran_s: float
    waited_s: float


NONE = CoreTime(0.0, 0.0)


class Pace:
    """What sending costs the thread that trains. One save at a time; `now` is what the system says of the thread."""

    def __init__(self) -> None:
        self.cost: float | None = None  # how much slower training is while a blob is sent: 0.2 is a fifth
        self._ended = NONE  # when the last save was over
        self._alone = 1.0  # how much slower than on a core of its own training is without us

    def begin(self, now: CoreTime) -> None:
        """A save begins."""
        slowness = _slowness(self._ended, now)
        if slowness is not None:
            self._alone = slowness

    def sent(self, before: CoreTime, now: CoreTime, took_s: float) -> float:
        """A blob was sent in `took_s`; how many seconds to pause."""
        slowness = _slowness(before, now)
        if slowness is None:
            return 0.0
        cost = max(0.0, slowness / self._alone - 1.0)
        self.cost = cost if self.cost is None else (self.cost + cost) / 2
        return took_s * min(REST_MAX, max(0.0, self.cost / SPENT - 1.0))

    def end(self, now: CoreTime) -> None:
        """The save is over."""
        self._ended = now


def _slowness(before: CoreTime, now: CoreTime) -> float | None:
    ran_s, waited_s = now.ran_s - before.ran_s, now.waited_s - before.waited_s
    if ran_s <= 0.0 or waited_s < 0.0 or ran_s + waited_s < SEEN_MIN_S:  # less than before: another thread
        return None
    return (ran_s + waited_s) / ran_s
