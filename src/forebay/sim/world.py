"""What every simulated world has: a clock, draws, a log whose digest tells two runs of a seed apart, and findings.

Invariants. (1) All chance comes from the seed. (2) What is logged says it all: two runs of a seed log the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import xxhash

from forebay.ports import chance
from forebay.sim.bucket import Service
from forebay.sim.clients import Board, Judge, Place
from forebay.sim.history import ABSENT
from forebay.sim.loop import Killed, VirtualClock

MEMORY_DIR = "/dev/shm"


class Found(AssertionError):
    """What a world is run for."""


class World:
    """`echo` gets each line as it comes. `draws` are for what is made first; `root` is a folder in memory."""

    board: Board
    judge: Judge
    service: Service

    def __init__(self, seed: int, echo: Callable[[str], None] | None) -> None:
        self.seed, self._echo = seed, echo
        self.lines: list[str] = []
        self._digest = xxhash.xxh3_64()
        self.clock = VirtualClock()
        self.draws = Random(seed)
        self.dice, self.weather, self.timing = (Random(self.draws.getrandbits(64)) for _ in range(3))
        self.root = tempfile.mkdtemp(prefix="forebay-sim-", dir=MEMORY_DIR)
        self.problems: list[str] = []
        self.graves: list[Any] = []

    def opens_a_bucket_service(self) -> Service:
        """With moods of its own."""
        service = Service(self.clock, Random(self.draws.getrandbits(64)))
        service.told = lambda what: self.log("bucket", what)
        return service

    def has_chances(self) -> chance.Seeded:
        """What the product draws."""
        return chance.Seeded(self.draws.getrandbits(64))

    def log(self, who: str, what: str) -> None:
        line = f"{self.clock.now_s:12.6f} {who:<7} {what}"
        self._digest.update(line.encode())
        self.lines.append(line)
        if self._echo is not None:
            self._echo(line)

    @property
    def digest(self) -> str:
        return f"{self._digest.hexdigest()} {self.clock.now_s:.6f} {self.dice.random():.9f}"

    def broke(self, context: dict[str, Any]) -> None:
        """A loop's handler of what nobody caught."""
        error = context.get("exception")
        # when Python notices that nobody asked for an error is chance
        if not isinstance(error, Killed) and "never retrieved" not in str(context.get("message")):
            self.problems.append(f"{context.get('message')}: {error!r}")

    @property
    def is_wrong(self) -> bool:
        return bool(self.problems or self.board.wrong)

    def check(self) -> None:
        """Raise what was found."""
        if self.is_wrong:
            raise Found("\n".join([*self.problems, *self.board.wrong]))

    def compare_backends(self, places: Iterable[Place]) -> None:
        """Each backend holds what the histories allow."""
        for place in places:
            memory = self.service.memory.get(place[0])
            if memory is None or place[0] == "own":
                continue
            found = memory._objects.get(place[1])
            labels = {ABSENT} if found is None else set(self.board.labels_of(place, found[1], 0, len(found[1])))
            if not labels & self.judge.content[place]:
                raise Found(f"{place[0]}/{place[1]}: the backend has {labels}, clients {self.judge.content[place]}")
