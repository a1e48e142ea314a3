"""Which samples come in which batch, for this rank, from any point of any epoch on; and the state that says the point.

Theory. A schedule is arithmetic over an `Order` and a `Partition`; it holds no position of its own. Whoever gives
batches out does: `DataLoader` counts the batches that its user has received, `BatchSampler` those that it has yielded,
for loaders that keep the books themselves (torchdata's StatefulDataLoader).

Indices are computed for some thousand samples at a time, since one alone costs as much as a hundred.

Invariants. (1) The batches from (epoch, samples) on depend on nothing but the schedule's arguments. (2) An epoch that
has no steps left is the start of the next.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from forebay.core.errors import Invalid
from forebay.core.formats.manifest import Manifest, build
from forebay.torch.dataset import WINDOW_BYTES, Dataset, Shuffle
from forebay.torch.listing import Fingerprint, Listing
from forebay.torch.order import Indices, InOrder, Order, Permuted
from forebay.torch.partition import Last, Partition
from forebay.torch.state import VERSION, State, from_dict

_AHEAD_SAMPLES = 16_384  # 2 ms of computing


class Place(NamedTuple):
    """A point in a job's data: `samples` of `epoch` are consumed."""

    epoch: int
    samples: int


class Schedule:
    """Of `batch` samples for each rank and step. `rank` and `world` are torch.distributed's, else the environment's
    (RANK, WORLD_SIZE), else one of one. `dataset` is any map-style dataset; a block shuffle needs one of Forebay's."""

    def __init__(
        self,
        dataset: Any,
        batch: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        window_bytes: int = WINDOW_BYTES,
        last: Last = "short",
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if shuffle not in (True, False, "block"):
            raise Invalid(f"shuffle={shuffle!r} is not known: use True, False or 'block'")
        if shuffle == "block" and not isinstance(dataset, Dataset):
            raise Invalid("a block shuffle needs to know the blocks: give it one of forebay.torch's datasets")
        if not 0 <= seed < 1 << 63:
            raise Invalid(f"the seed {seed} is not in 0..2**63-1")
        self.dataset, self.seed, self.batch, self.last = dataset, seed, batch, last
        self.shuffle: Shuffle = shuffle
        self.window_bytes = window_bytes
        self.samples = len(dataset)
        ours = _rank_and_world()
        self.rank = ours[0] if rank is None else rank
        self.world = ours[1] if world is None else world
        self._fingerprint: Fingerprint | None = None
        if not self.partition(Place(0, 0)).steps:
            raise Invalid(
                f"{self.samples} samples are not one step of {batch} for each of {self.world} ranks: "
                "take a smaller batch, or last='short' or 'fill'"
            )

    # --- order -------------------------------------------------------------------------------------------------------
    def partition(self, place: Place) -> Partition:
        """The steps from `place` to the end of its epoch."""
        return Partition.of(self.samples, place.samples, self.batch, self.rank, self.world, self.last)

    def order(self, epoch: int) -> Order:
        if isinstance(self.dataset, Dataset):
            return self.dataset.order(self.shuffle, self.window_bytes, self.seed, epoch)
        return Permuted(self.samples, self.seed, epoch) if self.shuffle else InOrder(self.samples)

    def batches(self, place: Place) -> Iterator[tuple[Indices, Place]]:
        """This rank's indices of each step from `place` on, and where the job is after the step."""
        partition, order = self.partition(place), self.order(place.epoch)
        together = max(1, _AHEAD_SAMPLES // self.batch)
        for begin in range(0, partition.steps, together):
            runs = [partition.run(step) for step in range(begin, min(begin + together, partition.steps))]
            sizes = [run.size for run in runs]
            first: Indices = np.repeat(np.asarray([run.first for run in runs]), sizes)
            ends: Indices = np.cumsum(sizes)
            inner = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
            indices = order.at((first + inner) % self.samples)
            for run, end in zip(runs, ends.tolist(), strict=True):
                yield indices[end - run.size : end], self.settled(Place(place.epoch, run.consumed))

    def settled(self, place: Place) -> Place:
        """`place`, or the start of the next epoch if nothing is left of this one."""
        return place if self.partition(place).steps else Place(place.epoch + 1, 0)

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def _listing(self) -> Listing:
        if isinstance(self.dataset, Dataset):
            return self.dataset.listing
        return Listing.of(Manifest(build("-", "", ())))  # of a foreign dataset only the number of samples is known

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the dataset, and of the kind of order."""
        if self._fingerprint is None:
            found = (
                self.dataset.fingerprint
                if isinstance(self.dataset, Dataset)
                else self._listing.fingerprint("samples", self.samples)
            )
            order = {True: "shuffled", False: "in order", "block": f"shuffled in windows of {self.window_bytes} bytes"}
            self._fingerprint = msgspec.structs.replace(found, shape=f"{found.shape}, {order[self.shuffle]}")
        return self._fingerprint

    def save(self, place: Place) -> dict[str, Any]:
        """The state at `place`, as plain values."""
        return State(VERSION, self.seed, place.epoch, place.samples, self.fingerprint).to_dict()

    def load(self, state: dict[str, Any]) -> Place:
        """The place in `state`; the seed becomes the state's. Errors as of `state.from_dict`."""
        told = self.dataset.changed_since if isinstance(self.dataset, Dataset) else lambda manifest: ""
        loaded = from_dict(state, self._listing, self.fingerprint, told)
        self.seed = loaded.seed
        return self.settled(Place(loaded.epoch, loaded.samples))


def _rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise Invalid("RANK and WORLD_SIZE are not numbers: pass rank= and world=, or start with torchrun") from None


class BatchSampler(Sampler):  # type: ignore[misc]  # torch is not followed by the type checker
    """Batches of indices for a loader that keeps the state itself: `StatefulDataLoader(dataset, batch_sampler=…)`.

    Each iteration goes on from the state to the end of its epoch; the next one is the next epoch. `state_dict()` counts
    what was yielded. Arguments as of `Schedule`.
    """

    def __init__(self, dataset: Any, batch: int, **how: Any) -> None:
        self.schedule = Schedule(dataset, batch, **how)
        self._place = Place(0, 0)

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return self.schedule.partition(Place(0, 0)).steps

    def __iter__(self) -> Iterator[list[int]]:
        for indices, after in self.schedule.batches(self._place):
            self._place = after
            yield indices.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; within it, nothing happens."""
        if epoch != self._place.epoch:
            self._place = Place(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Less than 1 KiB of plain values."""
        return self.schedule.save(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. `Precondition` if the dataset has changed."""
        self._place = self.schedule.load(state)
