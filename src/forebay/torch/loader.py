"""`forebay.torch.DataLoader`: batches in an exact order, from exactly where the job stopped.

Theory. A thin layer over `torch.utils.data.DataLoader`, which moves batches between processes, or over threads of this
process (`workers=0`). It adds three things. The schedule gives the order, so workers hold nothing of it. The state
counts the batches that were *given out*, not those under way. A meter says how long steps waited, and for what.

Iteration has one rule: a loop yields an epoch, or what a loaded state leaves of it. So the first loop over a restored
loader yields the rest of its epoch. A loop that is left early is begun anew by the next one: looking at a first batch,
or validating on a few, should not cost data. A loop that came to its end is followed by the next epoch. With
`continues`, the next loop continues one that was left early. It also continues one that an error in the loader ended
(bytes that did not come, a fault of the caller's decoder, a worker that was killed), with the step that failed.
`set_epoch` with the current epoch changes nothing, so trainers that call it at the top of every epoch do not undo a
resume; `restart` begins an epoch anew.

Rejected. Counting in the sampler (it runs ahead by all that is prefetched); state in workers (it would depend on their
number); always continuing (`next(iter(loader))` would take a batch out of the epoch, and a trainer's sanity check half
of the first validation, unnoticed).

Invariants. (1) The state includes a batch before its receiver runs, and no batch that was not given out. (2) After an
error or an interrupt nothing waits for a worker, and the state is at the first step not given out.
"""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import data

from forebay.core.errors import ForebayError, Invalid
from forebay.core.spelling import known_arguments
from forebay.ports import chance, clock
from forebay.torch.by_size import greedy
from forebay.torch.choosing import WINDOWS_KEPT
from forebay.torch.dataset import NOTHING_LEFT, WINDOW_BYTES, Dataset, OfEpoch, Shuffle
from forebay.torch.fetching import Ahead, Collate, Fetched, Fetching, Following, Step, as_is, collate, pinned
from forebay.torch.foretelling import Foretelling
from forebay.torch.partition import Last
from forebay.torch.schedule import LATER, Cursor, Schedule, asked_by
from forebay.torch.stall import StallMeter

THREADS = 4  # with workers=0, while bytes come from far: batches under way at once
INSTEAD_MAX = 8  # batches that are tried in place of one of which nothing is left
AHEAD = 4  # batches made ahead, in all by threads and for each by a worker


_END = object()
_COUNTING = ("lightning", "lightning_fabric", "pytorch_lightning", "transformers")
_NO_RUN = ("", "none")  # what torchrun calls a run without an id
_made: Counter[str] = Counter()  # loaders of each run in this process


def _job_name() -> str:
    """The run's id, with a number from the second loader of it on: each has a future of its own."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "").replace("/", "-")[:32]
    if run in _NO_RUN:
        return chance.token_hex(8)
    _made[run] += 1
    return run if _made[run] == 1 else f"{run}-{_made[run]}"


class DataLoader:
    """Batches of `batch_size` for this rank, in an order that is a function of `seed` and the epoch.

    `shuffle`: True over all samples, 'block' within windows of `window_bytes`, or False; 'auto' is True, or windows
    that fit if the data is more than the node, or its cluster, can hold. `last`: what becomes of the
    end of an epoch, see `partition`. `workers`: processes that fetch and decode; 0 means threads of this process, which
    is faster where little is decoded. `prefetch`: batches made ahead, for each worker, or in all by threads. `collate`
    makes a batch of a list of samples. `pin_memory`: None means where there is a GPU. `start_method`: 'fork', 'spawn'
    or 'forkserver' for workers. `worker_init` is called in each with its number. `rank` and `world` as of `Schedule`.
    `hints`: rank 0 tells the node what all ranks will read, so that it fetches ahead and keeps what is needed soonest;
    `job` is the name it does that under, by default torchrun's run id (the second loader of a process has it with a
    number) or one of its own. `continues`: a loop that was
    left early is continued by the next one, instead of begun anew. `batch_bytes`: a batch has as many samples as fit
    that many bytes, as they lie in the bucket, at least one and at most `batch_size`.

    A state (`state_dict`) is less than 1 KiB of plain values, and costs microseconds. Errors are raised at the step
    that they belong to, and the loader stays where it was: iterate again to try that step again.
    """

    @known_arguments
    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        seed: int = 0,
        shuffle: Shuffle | Literal["auto"] = "auto",
        window_bytes: int = WINDOW_BYTES,
        last: Last = "short",
        rank: int | None = None,
        world: int | None = None,
        workers: int = 0,
        prefetch: int = AHEAD,
        collate: Collate = collate,
        pin_memory: bool | None = None,
        start_method: str | None = None,
        worker_init: Callable[[int], None] | None = None,
        hints: bool = True,
        job: str = "",
        continues: bool = False,
        batch_bytes: int | None = None,
    ) -> None:
        try:
            batch_size = operator.index(batch_size)
        except TypeError:
            raise Invalid(
                f"batch_size={batch_size!r} is no number: for single samples take batch_size=1, or the dataset"
            ) from None
        if workers < 0 or prefetch < 1:
            raise Invalid(f"{workers} workers with {prefetch} batches ahead: at least 0 and 1")
        self.schedule = Schedule(
            dataset,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            window_bytes=window_bytes,
            last=last,
            rank=rank,
            world=world,
            batch_bytes=batch_bytes,
        )
        self.dataset, self.batch_size = dataset, batch_size
        self.stall = StallMeter()
        # named as torch has them: libraries that make a loader of their own from this one take them over
        self.workers = self.num_workers = workers
        self.worker_init_fn, self.multiprocessing_context = worker_init, start_method
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.prefetch_factor = prefetch if workers else None
        self.collate_fn = collate
        self._prefetch = prefetch
        self._fetching = Fetching(dataset, collate)
        self._cursor = self._start = Cursor(0, 0)  # where the job is, and where the next loop begins
        self._continues = continues
        self._steps: Iterator[Any] = iter(())
        self._inner: data.DataLoader | None = None
        self._ahead: Ahead | None = None
        self._foretold = not hints or self.schedule.rank != 0
        self._foretelling: Foretelling | None = None
        self._job = job or _job_name()
        self._iteration = 0
        self._begun = False  # whether a batch of this iteration was asked for

    def __len__(self) -> int:
        """Steps of a whole epoch, wherever the state is; `TypeError`, saying what to do, while that is not known. To
        trainers that lose their place without it that is `Invalid`, which they do not pass over."""
        unknown = self.schedule.samples is None or self.schedule.batch_bytes is not None
        if unknown and (trainer := asked_by(*_COUNTING)):
            raise Invalid(
                f"{trainer} resumes at another batch where it does not know how many an epoch has: leave out "
                "batch_bytes=; say how many samples shards have with counts=, or a shardindex.json beside them, or ask "
                "len(dataset) before, which reads the shards that nobody has read"
            )
        return self.schedule.steps

    @property
    def batch_sampler(self) -> EpochSteps:
        """For libraries that go through a loader's epoch in their own way, from its start (`skip_first_batches`)."""
        return EpochSteps(self)

    sampler = batch_sampler

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End workers and threads. The loader can be iterated again, which starts others."""
        self._iteration += 1
        inner, self._inner = self._inner, None
        iterator = getattr(inner, "_iterator", None)  # kept there only with persistent workers
        if iterator is not None:
            iterator._shutdown_workers()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        self._hush()

    # --- where it is -------------------------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; if that is the one under way, stay where it is (see `restart`)."""
        if epoch != self._cursor.epoch:
            self.restart(epoch)

    def restart(self, epoch: int | None = None) -> None:
        """Go to the start of `epoch`, by default the one under way."""
        cursor = Cursor(self._cursor.epoch if epoch is None else operator.index(epoch), 0)
        if cursor.epoch < 0:
            raise Invalid(f"epoch {cursor.epoch}: epochs count from 0")
        self._go_to(cursor)

    def state_dict(self) -> dict[str, Any]:
        """Where the job is: after the batches that were given out. The same on all ranks."""
        return self.schedule.save(self._cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, whatever the world size, workers and batch size were. `Precondition`, saying what
        changed, if the dataset is not the one that it was saved with."""
        self._go_to(self.schedule.load(state))

    def _go_to(self, cursor: Cursor) -> None:
        """Iterate from there. An iterator that gave nothing yet begins there; any other has ended."""
        if self._begun:
            self._iteration += 1
        self._cursor = self._start = cursor

    # --- batches -----------------------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, or those that are left after the state that was loaded. Only one iteration at a
        time: a new one ends the last."""
        self._iteration += 1
        self._begun = False
        lost = self._lost_a_worker()
        if lost:
            self.close()
        if self._continues or lost:
            self._start = self._cursor
        self._cursor = self._start
        return self._iterate(self._iteration)

    def _iterate(self, iteration: int) -> Iterator[Any]:
        if iteration != self._iteration:
            raise Invalid("the loader was closed or iterated anew before this iteration began")
        self._begun = True
        after: list[tuple[Cursor, float]] = []  # of the steps under way and before them; how long each was unknown
        taken = 0
        epoch = self._cursor.epoch
        batches = self.schedule.batches(self._cursor, lambda: None if taken == len(after) else self._cursor)
        arriving = not self.schedule.counted

        def steps() -> Iterator[Any]:
            try:
                began_s, of_epoch = clock.monotonic_s(), epoch
                for indices, cursor in batches:
                    if indices is LATER:
                        yield LATER
                    else:
                        after.append((cursor, clock.monotonic_s() - began_s))
                        yield Step(of_epoch, indices)
                        of_epoch = cursor.epoch
                    began_s = clock.monotonic_s()
            except ForebayError as error:  # of finding out what the next step is: it is raised where that is taken
                yield error

        source: Iterator[Any] = self._begin(steps())
        if not arriving:  # else once a batch is there: what was fetched ahead would be in its way
            self._foretell()  # after workers were forked: its thread must not hold a lock then
        given_s = clock.monotonic_s()
        try:
            asked_s = given_s
            while True:
                fetched: Any = next(source, _END)
                if fetched is _END:
                    return
                if fetched is LATER:
                    continue
                if fetched.error is not None and fetched.error.code == NOTHING_LEFT:
                    fetched = self._instead(fetched, epoch)
                if fetched.error is not None:
                    self._start = self._cursor
                    raise self._told(fetched.error, epoch)
                now_s = clock.monotonic_s()
                fetched.facts.index_s = after[taken][1]
                self.stall.add(now_s - asked_s, now_s - given_s, fetched.samples, fetched.facts)
                given_s = now_s
                self._cursor = after[taken][0]
                if not self._cursor.samples:
                    self._start = self._cursor
                if not taken and arriving:
                    self._foretell()
                taken += 1
                if self._foretelling is not None:
                    self._foretelling.at(self._cursor)
                yield fetched.batch
                asked_s = clock.monotonic_s()
                if iteration != self._iteration:
                    raise Invalid("the loader was restarted, closed or iterated anew in the middle of this iteration")
        except GeneratorExit:
            raise
        except ForebayError:
            raise
        except BaseException as error:  # Ctrl-C has reached the workers too, and one that died cannot be asked again
            self.close()
            if isinstance(error, Exception):  # of the caller's decoder, or a worker's end: that step was not given out
                self._start = self._cursor
            raise
        finally:
            ahead, self._ahead = (self._ahead, None) if source is self._ahead else (None, self._ahead)
            if ahead is not None:
                ahead.close()

    def _foretell(self) -> None:
        """Begin telling the node, once; a loader in a forked child leaves that to its parent."""
        if not self._foretold and isinstance(self.dataset, Dataset):
            told = self.dataset.hints(self._job)
            if told is not None:
                self._foretelling = Foretelling(self.schedule, told, self._cursor)
                self.schedule.coming = self._foretelling.comes
                weakref.finalize(self, self._foretelling.end)  # a loader that is forgotten says nothing more
        elif self._foretelling is not None:
            self._foretelling.heard(self._cursor)
        self._foretold = True

    def _hush(self) -> None:
        """End telling, if it was begun; the next iteration begins again."""
        foretelling, self._foretelling = self._foretelling, None
        if foretelling is not None:
            foretelling.close()
            self._foretold = False

    def _begin(self, steps: Iterator[Any]) -> Any:
        depth = self._depth()
        if not self.workers:
            if self._ahead is not None:
                self._ahead.close()
            self._ahead = Ahead(self._fetch, steps, min(THREADS, depth), depth)
            return self._ahead
        self._steps = steps
        if self._inner is None:
            self._inner = data.DataLoader(
                self._fetching,
                batch_sampler=_Steps(self),
                num_workers=self.workers,
                collate_fn=as_is,
                pin_memory=self.pin_memory,
                prefetch_factor=-(-depth // self.workers),
                persistent_workers=True,
                multiprocessing_context=self.multiprocessing_context,
                worker_init_fn=Following(self.worker_init_fn),
            )
        return iter(self._inner)

    def _depth(self) -> int:
        """Batches that are made ahead in all. If windows were chosen since the node does not hold the data, these must
        not be more than a part of what it holds: it takes what was read before its turn for what is still to be read,
        so there would be no room for what comes next."""
        said, schedule = self._prefetch * max(1, self.workers), self.schedule
        if not (schedule.auto and schedule.shuffle == "block" and schedule.samples):
            return said
        room_bytes: int | None = self.dataset.room_bytes()
        if room_bytes is None:
            return said
        batch_bytes: int = self.batch_size * self.dataset.listing.size_bytes // schedule.samples
        step_bytes = schedule.world * min(batch_bytes, schedule.batch_bytes or batch_bytes)
        return max(1, min(said, room_bytes // WINDOWS_KEPT // max(1, step_bytes)))

    def _lost_a_worker(self) -> bool:
        """Whether the last loop ended so: torch says that by an error in whatever code the process is in then, and to
        who asks the other workers once more."""
        iterator = getattr(self._inner, "_iterator", None)
        return iterator is not None and not all(worker.is_alive() for worker in iterator._workers)

    def _fetch(self, step: Any, ended: Any) -> Fetched:
        fetched: Fetched = self._fetching.fetch(step, ended)
        return fetched.pin_memory() if self.pin_memory and fetched.error is None else fetched

    def _instead(self, fetched: Fetched, epoch: int) -> Fetched:
        """A batch from the epoch's start in place of one of which all was skipped, as for a rank that has none at the
        end; the same wherever the job is resumed. If it cannot be had either, `fetched`."""
        if not isinstance(self.dataset, Dataset) or self.dataset.on_error != "skip":
            return fetched
        order, first, most_bytes = self.schedule.order(epoch), 0, self.schedule.batch_bytes
        for _ in range(INSTEAD_MAX):
            known = order.reach(first + self.batch_size)
            if first >= known:
                break
            instead = order.at(np.arange(first, min(first + self.batch_size, known)))
            if most_bytes is not None:
                ((_, end),) = greedy(self.dataset.sizes(instead), self.batch_size, most_bytes, 1)
                instead = instead[:end]
            first += len(instead)
            again = self._fetch(Step(epoch, instead), None)
            again.facts.skipped = fetched.facts.skipped + again.facts.skipped
            if again.error is None:
                return again
        return fetched

    def _told(self, error: ForebayError, epoch: int) -> ForebayError:
        """The error with the step that it stopped."""
        samples = self.schedule.samples
        done = self._cursor.samples if self._cursor.epoch == epoch else samples
        told = type(error)(
            f"epoch {epoch}, after {done}{'' if samples is None else f' of {samples}'} samples: {error.message}",
            code=error.code,
            retry_after_s=error.retry_after_s,
        )
        with contextlib.suppress(AttributeError):
            told.__cause__ = error
        return told


class EpochSteps:
    """The steps of the loader's epoch from its start, as a batch sampler. `set_epoch` is the loader's."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._loader.epoch
        for indices, after in self._loader.schedule.batches(Cursor(epoch, 0)):
            yield OfEpoch(indices.tolist(), epoch)
            epoch = after.epoch

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _Steps:
    """torch's batch sampler: the steps of whatever iteration the loader is in."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._loader._steps

    def __len__(self) -> int:
        return len(self._loader)


__all__ = ["DataLoader", "pinned"]
