"""Computes this rank's batches from any point of any epoch on, and the state that names the point.

Theory. A schedule is arithmetic over an `Order` and a `Partition` and holds no position. Whoever gives out batches
does: `DataLoader` counts the batches that its user has received, `BatchSampler` those that it has yielded, for loaders
that keep the books themselves (torchdata's StatefulDataLoader).

Indices are computed for some thousand samples at a time, since one alone costs as much as a hundred. From an order of
windows the schedule takes only the step and what tells whether another follows: the epoch's length may be known only at
its end.

Invariants. (1) The batches from (epoch, samples) on depend only on the schedule's arguments. (2) An epoch without steps
left is the start of the next.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from forebay.core.errors import Invalid
from forebay.core.formats.listing import Listing, build
from forebay.torch.by_size import Run, step
from forebay.torch.choosing import chosen_window
from forebay.torch.columns import Fingerprint, ListingColumns
from forebay.torch.dataset import WINDOW_BYTES, Dataset, OfEpoch, Shuffle
from forebay.torch.order import Indices, InOrder, Order, Permuted, Windows
from forebay.torch.partition import Last, Partition
from forebay.torch.state import VERSION, State, from_dict

_AHEAD_SAMPLES = 16_384  # 2 ms of computing
_ARRIVING = "shuffled, in epoch 0 in windows"  # in the shape of states
LATER = None  # in place of a step's indices: they are not known yet


class Cursor(NamedTuple):
    """A point in a job's data: `samples` of `epoch` are consumed. `window`, `before`: as of `state.State`."""

    epoch: int
    samples: int
    window: int = 0
    before: int = 0


class Schedule:
    """Of `batch` samples for each rank and step, or as many as have `batch_bytes`, at most `batch`. `rank` and
    `world` are torch.distributed's, else the environment's (RANK, WORLD_SIZE; `Invalid` if it says only a part of
    that), else one of one. `dataset` is any map-style dataset; a block shuffle needs one of Forebay's."""

    def __init__(
        self,
        dataset: Any,
        batch: int,
        *,
        seed: int = 0,
        shuffle: Shuffle | Literal["auto"] = "auto",
        window_bytes: int = WINDOW_BYTES,
        last: Last = "short",
        rank: int | None = None,
        world: int | None = None,
        batch_bytes: int | None = None,
    ) -> None:
        if shuffle not in (True, False, "block", "auto"):
            raise Invalid(f"shuffle={shuffle!r} is not known: use True, False, 'block' or 'auto'")
        if shuffle == "block" and not isinstance(dataset, Dataset):
            raise Invalid("a block shuffle needs to know the blocks: give it one of forebay.torch's datasets")
        seed, batch = operator.index(seed), operator.index(batch)  # of NumPy, as seeds often are; states are plain
        if not 0 <= seed < 1 << 63:
            raise Invalid(f"the seed {seed} is not in 0..2**63-1")
        if batch_bytes is not None and (batch_bytes < 1 or batch < 2 or not isinstance(dataset, Dataset)):
            raise Invalid(
                f"batches of {batch_bytes} bytes: they need one of forebay.torch's datasets, at least one byte, and as "
                "batch_size= the most samples that one may have"
            )
        self.dataset, self.seed, self.batch, self.last = dataset, seed, batch, last
        self.batch_bytes = batch_bytes
        self.auto = shuffle == "auto"
        self.shuffle: Shuffle = True if shuffle == "auto" else shuffle
        self.window_bytes = self._said_bytes = window_bytes
        self.arriving = isinstance(dataset, Dataset) and dataset.arriving and shuffle != "block"
        self._inferred = rank is None and world is None
        ours = _rank_and_world() if rank is None or world is None else (rank, world)
        self.rank = ours[0] if rank is None else rank
        self.world = ours[1] if world is None else world
        if self.auto and isinstance(dataset, Dataset) and (fits := chosen_window(dataset, window_bytes, self.world)):
            self.shuffle, self.window_bytes = "block", fits
        elif self.arriving and shuffle is True:  # of epoch 0, which goes in windows all the same
            self.window_bytes = chosen_window(dataset, window_bytes, self.world, quietly=True) or window_bytes
        self._fingerprint: Fingerprint | None = None
        # hears where the job is before more is looked into
        self.coming: Callable[[Cursor], None] = lambda cursor: None
        self._split(self.samples or 0, 0)  # says what is wrong with the numbers
        if self.samples is not None and batch_bytes is None:
            self._check(self.samples)

    @property
    def samples(self) -> int | None:
        """Of an epoch; None as long as that is not known."""
        return self.dataset.known_samples if isinstance(self.dataset, Dataset) else len(self.dataset)

    @property
    def counted(self) -> bool:
        """Whether all of the dataset was looked at."""
        return not isinstance(self.dataset, Dataset) or self.dataset.counted

    @property
    def steps(self) -> int:
        """Of a whole epoch. `TypeError` while that is not known, as Python has it for what has no length."""
        if self.batch_bytes is not None:
            raise TypeError("how many steps an epoch of batches by bytes has is known at its end: count them there")
        if self.samples is None:
            raise TypeError(
                "how many steps an epoch has is not known before the shards were read once: ask len(dataset) first, "
                "which reads them now, or say how many samples they have with counts="
            )
        return self._split(self.samples, 0).steps

    # --- order -------------------------------------------------------------------------------------------------------
    def in_windows(self, epoch: int) -> bool:
        """Whether an epoch goes from window to window, with nothing known of those that follow."""
        if not (isinstance(self.dataset, Dataset) and self.dataset.comes_in_parts):
            return False
        return self.shuffle is not True or (self.arriving and not epoch)

    def order(self, epoch: int, window: int = 0, before: int = 0) -> Order:
        """The order of an epoch, to be used from window `window` on."""
        if isinstance(self.dataset, Dataset):
            return self.dataset.order(
                self.shuffle, self.window_bytes, self.seed, epoch, arriving=self.arriving, window=window, before=before
            )
        samples = len(self.dataset)
        return Permuted(samples, self.seed, epoch) if self.shuffle else InOrder(samples)

    def batches(
        self, cursor: Cursor, given: Callable[[], Cursor | None] = lambda: None
    ) -> Iterator[tuple[Indices, Cursor]]:
        """This rank's indices of each step from `cursor` on, and where the job is after the step. They end with the
        epoch; if nothing was left of it, with the next. `given` says where the job is by the steps that were given out;
        None: by all of them. Until then LATER stands for the indices of a step that cannot be known at once. `Invalid`
        if torch.distributed, begun since, says another rank."""
        self._check_rank()
        if self.batch_bytes is not None:
            yield from self._batches_by_size(cursor, given)
            return
        order = self._followed(cursor)
        size = self.batch * self.world
        needed = size if self.last == "drop" else 1  # for another step
        at = cursor.samples
        while True:
            while not (_all_given(order, given) or order.at_once(at + size + needed)):
                yield LATER, cursor
            known = self._reached(order, cursor.epoch, at, size + needed)
            if not (known or order.samples):
                raise self.dataset.empty()
            if not at:
                self._check(known, whole=order.samples is not None)
            partition = self._split(known, at)
            steps = partition.steps
            if order.samples is None:  # the last step is one of which it is certain that another follows
                steps = (known - needed - at) // size
            if not steps:
                break
            steps = min(steps, max(1, _AHEAD_SAMPLES // self.batch))
            for indices, consumed in _indices(order, partition, steps):
                yield indices, self._settled(order, Cursor(cursor.epoch, consumed))
                _all_given(order, given)
            at = consumed
            if at >= known:
                return
        if at == cursor.samples:
            yield from self.batches(Cursor(cursor.epoch + 1, 0), given)

    def _batches_by_size(self, cursor: Cursor, given: Callable[[], Cursor | None]) -> Iterator[tuple[Indices, Cursor]]:
        """The same with batches of `batch_bytes`."""
        assert self.batch_bytes is not None, "else they are of one length"
        order = self._followed(cursor)
        size = self.batch * self.world  # the most samples of a step
        at = base = cursor.samples
        ahead = order.at(np.arange(0))
        sizes: Indices = np.zeros(0, np.int64)  # of `ahead`, which begins at `base`
        again = sizes

        def runs(start: int) -> list[Run]:
            left = sizes[start - base : start - base + size]
            return step(left, self.batch, self.batch_bytes or 0, self.world, self.last, again)

        while True:
            while not (_all_given(order, given) or order.at_once(at + 2 * size + 1)):
                yield LATER, cursor
            known = self._reached(order, cursor.epoch, at, 2 * size + 1)
            if not (known or order.samples):
                raise self.dataset.empty()
            if at + 2 * size > base + len(sizes) and base + len(sizes) < known:
                base, ahead = at, order.at(np.arange(at, min(known, at + 2 * size + _AHEAD_SAMPLES)))
                sizes = self.dataset.sizes(ahead)
            if self.last == "fill" and not len(again):
                again = self.dataset.sizes(order.at(np.arange(min(known, size))))
            found = runs(at)
            if not found:
                break
            first, end = found[self.rank]
            consumed = min(at + found[-1][1], known)
            mine = ahead[at - base + first : at - base + end]
            if at + end > known:
                mine = order.at((at + np.arange(first, end)) % known)
            over = consumed == known or (self.last == "drop" and not runs(consumed))
            yield mine, Cursor(cursor.epoch + 1, 0) if over else _placed(order, Cursor(cursor.epoch, consumed))
            at = consumed
            if over:
                return
        if at == cursor.samples:
            if not at:
                self._check(known)
            yield from self._batches_by_size(Cursor(cursor.epoch + 1, 0), given)

    def _followed(self, cursor: Cursor) -> Order:
        """The order from `cursor` on, where `coming` hears of what is looked into ahead."""
        order = self.order(cursor.epoch, cursor.window, cursor.before)
        if isinstance(order, Windows):
            order.coming = lambda position, window: self.coming(Cursor(cursor.epoch, position, window))
        return order

    def _reached(self, order: Order, epoch: int, at: int, samples: int) -> int:
        """What is known when `samples` beyond `at` are asked for. All before them was given out, so `coming` is told of
        each window that must be looked into."""
        while isinstance(order, Windows) and not order.at_once(at + samples):
            self.coming(Cursor(epoch, at, order.next_window))
            order.advance()
        return order.reach(at + samples)

    def settled(self, cursor: Cursor) -> Cursor:
        """`cursor`, or the start of the next epoch if nothing is left of this one, as far as that is known."""
        if self.batch_bytes is not None and cursor.samples < (self.samples or cursor.samples + 1):
            return cursor
        if self.samples is None or self._split(self.samples, cursor.samples).steps:
            return cursor
        return Cursor(cursor.epoch + 1, 0)

    def _settled(self, order: Order, cursor: Cursor) -> Cursor:
        """The same in an epoch that was reached beyond that, where it goes on."""
        if order.samples is not None and not self._split(order.samples, cursor.samples).steps:
            return Cursor(cursor.epoch + 1, 0)
        return _placed(order, cursor)

    def _split(self, samples: int, start: int) -> Partition:
        """The steps from `start` to the end of an epoch of `samples`."""
        return Partition.of(samples, start, self.batch, self.rank, self.world, self.last)

    def _check(self, samples: int, *, whole: bool = True) -> None:
        """`Invalid` if that many samples are an epoch without a step."""
        if whole and not self._split(samples, 0).steps:
            raise Invalid(
                f"{samples} samples are not one step of {self.batch} for each of {self.world} ranks: "
                "take a smaller batch, or last='short' or 'fill'"
            )

    def _check_rank(self) -> None:
        """Who was made before there were ranks would read all of the data on each of them."""
        if not (self._inferred and distributed.is_available() and distributed.is_initialized()):
            return
        now = distributed.get_rank(), distributed.get_world_size()
        if now != (self.rank, self.world):
            raise Invalid(
                f"this was made as rank {self.rank} of {self.world}, before torch.distributed was initialised, which "
                f"says {now[0]} of {now[1]}: make it after that (in Lightning in train_dataloader()), or pass rank= "
                "and world="
            )

    # --- state -------------------------------------------------------------------------------------------------------
    @property
    def _listing(self) -> ListingColumns:
        if isinstance(self.dataset, Dataset):
            return self.dataset.listing
        # Of a foreign dataset only the number of samples is known.
        return ListingColumns.of(Listing(build("-", "", ())))

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the dataset, and of the kind of order."""
        if self._fingerprint is None:
            found = (
                self.dataset.fingerprint
                if isinstance(self.dataset, Dataset)
                else self._listing.fingerprint("samples", len(self.dataset))
            )
            self._fingerprint = msgspec.structs.replace(found, shape=f"{found.shape}, {self._kind()}")
        return self._fingerprint

    def _kind(self) -> str:
        """What kind of order it is, in a state's words."""
        if self.shuffle == "block":
            return f"shuffled in windows {'that grow to' if self.arriving else 'of'} {self.window_bytes} bytes"
        if not self.shuffle:
            return "in order"
        return f"{_ARRIVING} of {self.window_bytes} bytes" if self.arriving else "shuffled"

    def save(self, cursor: Cursor) -> dict[str, Any]:
        """The state at `cursor`, as plain values."""
        window, before = cursor.window, cursor.before
        return State(VERSION, self.seed, cursor.epoch, cursor.samples, self.fingerprint, window, before).to_dict()

    def load(self, state: dict[str, Any]) -> Cursor:
        """The cursor in `state`; the seed becomes the state's, and where there are two kinds of shuffle the kind too.
        Errors as of `state.from_dict`."""
        told = self.dataset.changed_since if isinstance(self.dataset, Dataset) else lambda listing: ""
        shape = _shape_in(state)
        if self.auto and (windows := re.search(r", shuffled in windows (of|that grow to) (\d+) bytes$", shape)):
            self.shuffle, self.window_bytes = "block", int(windows[2])
            self.arriving, self._fingerprint = windows[1] != "of", None
        elif self.auto and (shape.endswith(", shuffled") or _ARRIVING in shape):
            self.shuffle, self.window_bytes, self._fingerprint = True, self._said_bytes, None
        if self.shuffle is True and isinstance(self.dataset, Dataset) and self.dataset.comes_in_parts:
            arriving = re.search(rf"{_ARRIVING} of (\d+) bytes$", shape)
            self.arriving, self._fingerprint = arriving is not None, None
            if arriving and int(arriving[1]) <= self._said_bytes:  # chosen by what a node held then
                self.window_bytes = int(arriving[1])
        loaded = from_dict(state, self._listing, self.fingerprint, told)
        self.seed = loaded.seed
        return self.settled(Cursor(loaded.epoch, loaded.samples, loaded.window, loaded.before))


def _all_given(order: Order, given: Callable[[], Cursor | None]) -> bool:
    """Whether all steps were given out. An order that looks ahead learns how far they were."""
    where = given()
    if isinstance(order, Windows):
        order.given(None if where is None else where.samples)
    return where is None


def _placed(order: Order, cursor: Cursor) -> Cursor:
    """The cursor with the window that it is in, if there are any."""
    if not isinstance(order, Windows):
        return cursor
    window, before = order.window_at(cursor.samples)
    return cursor._replace(window=window, before=before)


def _indices(order: Order, partition: Partition, steps: int) -> Iterator[tuple[Indices, int]]:
    """The indices of the first `steps` steps of a partition, and what is consumed after each."""
    runs = [partition.run(step) for step in range(steps)]
    sizes = [run.size for run in runs]
    first: Indices = np.repeat(np.asarray([run.first for run in runs]), sizes)
    ends: Indices = np.cumsum(sizes)
    inner = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
    indices = order.at((first + inner) % partition.samples)
    for run, end in zip(runs, ends.tolist(), strict=True):
        yield indices[end - run.size : end], run.consumed


def _shape_in(state: Any) -> str:
    """The shape that a state says, if it is one."""
    fingerprint = state.get("fingerprint") if isinstance(state, dict) else None
    return str(fingerprint.get("shape", "")) if isinstance(fingerprint, dict) else ""


def _rank_and_world() -> tuple[int, int]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    said = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")}
    try:
        rank, world, number, tasks = (int(value) if value else None for value in said.values())
    except ValueError:
        raise Invalid(f"{_spelled(said)} are not numbers: pass rank= and world=, or start with torchrun") from None
    if rank is not None and world is not None:
        return rank, world
    if (rank or 0) > 0 or (world or 1) > 1 or (number or 0) > 0 or (tasks or 1) > 1:
        # as rank 0 of one each of these processes would read all of the data
        raise Invalid(
            f"which rank of how many this is, is not clear: the environment says {_spelled(said)}. Set RANK and "
            "WORLD_SIZE (under Slurm: RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS), or pass rank= and world=; "
            "rank=0, world=1 if this process is alone"
        )
    return 0, 1


def _spelled(said: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in said.items() if value)


def asked_by(*packages: str) -> str:
    """Which of `packages` called the function that asks this; empty if none did."""
    name = str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]
    return name if name in packages else ""


class BatchSampler(Sampler):  # type: ignore[misc]  # torch is not followed by the type checker
    """Batches of indices for a loader that keeps the state itself: `StatefulDataLoader(dataset, batch_sampler=…)`.

    An iteration yields the epoch, or what a state that was loaded leaves of it; after one that came to its end the next
    is the next epoch. `state_dict()` counts what was yielded. Arguments as of `Schedule`. Where accelerate is to divide
    the batches among ranks, it needs `rank=0, world=1`.
    """

    def __init__(self, dataset: Any, batch: int, **how: Any) -> None:
        self.schedule = Schedule(dataset, batch, **how)
        self._cursor = self._begin = Cursor(0, 0)

    def __len__(self) -> int:
        """Steps of a whole epoch; `TypeError` as of `Schedule.steps`."""
        return self.schedule.steps

    @property
    def batch_size(self) -> int:
        """Of a step, but for an epoch's last."""
        return self.schedule.batch

    @property
    def sampler(self) -> BatchSampler:
        """Itself: what has the `set_epoch` that accelerate and Lightning look for here. `Invalid` for accelerate if
        ranks were dealt to: of one rank's batches it would give each rank a part, and the rest to nobody."""
        if self.schedule.world > 1 and asked_by("accelerate"):
            raise Invalid(
                f"accelerate divides batches among ranks, and this sampler has those of rank {self.schedule.rank} of "
                f"{self.schedule.world} already: make it with rank=0, world=1; or take forebay.torch.DataLoader, which "
                "needs no prepare()"
            )
        return self

    def __iter__(self) -> Iterator[list[int]]:
        self._cursor = self._begin
        for indices, after in self.schedule.batches(self._begin):
            epoch, self._cursor = self._cursor.epoch, after
            if not after.samples:
                self._begin = after
            yield OfEpoch(indices.tolist(), epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; within it, nothing happens."""
        if epoch != self._cursor.epoch:
            self._cursor = self._begin = Cursor(operator.index(epoch), 0)

    def state_dict(self) -> dict[str, Any]:
        """Less than 1 KiB of plain values."""
        return self.schedule.save(self._cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. `Precondition` if the dataset has changed."""
        self._cursor = self._begin = self.schedule.load(state)
