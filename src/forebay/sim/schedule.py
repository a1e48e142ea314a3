"""Time, chance and the log of a simulated world.

Theory. A world is a heap of (time, sequence, what to do). Whatever happens is put there with a delay drawn from the
seed, so the seed alone decides the order of everything; nothing waits, so an hour takes as long as its events. Every
event worth telling is one line of fixed columns (docs/simulator.md), and the lines are hashed as they come: two runs
are the same when the hash, the clock and the next random number are.

Rejected: a virtual asyncio loop (its ready queue promises an order that threads and processes do not have); threads.

Invariants. (1) Time never goes back. (2) Equal times happen in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import xxhash

TAIL_LINES = 60


class Schedule:
    """The clock, the dice and the log. Times are whole microseconds."""

    def __init__(self, seed: int, echo: Callable[[str], None] | None = None) -> None:
        self.now_us = 0
        self.events = 0
        self.dice = random.Random(seed)
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._echo = echo
        self._heap: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._sequence = 0
        self._hash = xxhash.xxh3_64()

    # --- time --------------------------------------------------------------------------------------------------------
    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    def after(self, delay_us: float, what: Callable[..., Any], *args: Any) -> None:
        """Do this later; a delay of 0 still comes after what is happening now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_us + int(delay_us), self._sequence, what, args))

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._heap:
            return False
        at_us, _, what, args = heapq.heappop(self._heap)
        assert at_us >= self.now_us
        self.now_us = at_us
        self.events += 1
        what(*args)
        return True

    # --- chance ------------------------------------------------------------------------------------------------------
    def happens(self, probability: float) -> bool:
        return self.dice.random() < probability

    def between(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return low + int(self.dice.random() * (high - low + 1))

    def delay_us(self, typical_us: int) -> int:
        """A delay: mostly around the typical one, sometimes nothing, now and then twenty times as long."""
        draw = self.dice.random()
        if draw < 0.1:
            return 0
        return int(typical_us * (20 * draw if draw > 0.98 else 2 * draw))

    # --- log ---------------------------------------------------------------------------------------------------------
    def log(self, actor: str, event: str, subject: str, detail: str = "") -> None:
        """One line: microseconds, event number, who, what, about what, details."""
        line = f"{self.now_us:>12} {self.events:>7} {actor:<9} {event:<12} {subject:<14} {detail}".rstrip()
        self._hash.update(line.encode())
        self.tail.append(line)
        if self._echo is not None:
            self._echo(line)

    def fingerprint(self) -> str:
        """Hash of the log, the clock and the next random number (which this takes)."""
        return f"{self._hash.hexdigest()} {self.now_us} {self.dice.random():.17g}"
