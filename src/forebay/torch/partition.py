"""Divides the positions of an epoch among ranks and steps.

Theory. Position p belongs to step p // (batch * world), counted from where the epoch is begun or resumed. In a step,
ranks take consecutive runs. So one number says what all ranks together have consumed after a step. A run that resumes
there with another world size or batch goes on with exactly the remaining positions, in the same order.

The end of the epoch is uneven. `short` divides the last step as evenly as possible, `drop` leaves it out, and `fill`
completes it with samples from the epoch's start. All ranks have the same number of steps, since a rank without one
would leave the others waiting in their first collective operation. So a short step with fewer samples than ranks is
filled up to one sample each: the only case in which `short` repeats any.

Invariants. (1) Under `short` and `fill` one rank takes each position from `start` on, in one step; under `drop` each of
a whole step. (2) No rank takes an empty run. (3) `steps` is the same on all ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from forebay.core.errors import Invalid

Last = Literal["short", "drop", "fill"]


class Run(NamedTuple):
    """Positions `first`..`first + size - 1` of the epoch for one rank; those past its end mean its start again.
    `consumed`: how many samples the whole job has consumed after this step."""

    first: int
    size: int
    consumed: int


class Partition(NamedTuple):
    """The steps that are left of an epoch of `samples` after the first `start`, for one rank of `world`."""

    samples: int
    start: int
    batch: int
    rank: int
    world: int
    last: Last

    @classmethod
    def of(cls, samples: int, start: int, batch: int, rank: int, world: int, last: Last) -> Partition:
        """`Invalid` if the numbers make no sense."""
        if batch < 1 or world < 1 or not 0 <= rank < world:
            raise Invalid(
                f"batch {batch}, rank {rank} of {world}: a batch has at least one sample and ranks count from 0"
            )
        if last not in get_args(Last):
            raise Invalid(f"last={last!r} is not known: use 'short', 'drop' or 'fill'")
        if not 0 <= start <= samples:
            raise Invalid(f"{start} samples are consumed of an epoch of {samples}: the state is of another dataset")
        return cls(samples, start, batch, rank, world, last)

    @property
    def steps(self) -> int:
        whole, rest = divmod(self.samples - self.start, self.batch * self.world)
        return whole + (1 if rest and self.last != "drop" else 0)

    def run(self, step: int) -> Run:
        """This rank's part of step `step`, counted from `start`."""
        size = self.batch * self.world
        base = self.start + step * size
        left = self.samples - base
        assert 0 <= step < self.steps, "asked for a step that the epoch does not have"
        if left >= size or self.last == "fill":
            return Run(base + self.rank * self.batch, self.batch, min(base + size, self.samples))
        share, more = divmod(max(left, self.world), self.world)
        first = base + self.rank * share + min(self.rank, more)
        return Run(first, share + (1 if self.rank < more else 0), self.samples)
