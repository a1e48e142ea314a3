"""Makes batches from indices, in worker processes or in threads ahead of the training loop.

Theory. Threads and processes do the same work: fetch, decode, collate. They return the batch and how long each part
took. An error of ours is returned as a value, so the training process gets its kind, and it is raised at its own step.

Threads are enough where nothing is decoded: sockets and copies release the interpreter's lock, and no batch moves
between processes. While batches come from the node's disks, one thread works alone, since several only wait for the
lock (140,000 samples of 10 KiB a second with one, half of that with two). When bytes come from further away, the other
threads join in until they are near again; also where a decoder releases the lock (`decoders.Pictures`). Threads are
daemons, so a read that waits for a node does not keep a program from ending.

A worker process ends with the training process, however that ends: it watches the process's own descriptor. torch looks
at the parent every 5 s, and under `forkserver` the parent is not the training process: workers of a killed one would
stay for good.

Decoders allocate and free a megabyte for each sample. Depending on its heap, glibc returns such memory to the kernel at
once, and getting it back costs a page fault for every 4 KiB: 670,000 in an epoch of 2,000 pictures of 100 KB, a fifth
of the workers' time. So worker processes keep freed memory, up to KEPT_BYTES.

Invariants. (1) Results come in the order of the steps. (2) At most `depth` batches are made or kept ahead. (3) After
`close` no new fetch begins.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data._utils.collate import collate as collated
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map  # as torch's documentation says

from forebay.core.errors import ForebayError
from forebay.ports import clock
from forebay.torch.dataset import Dataset
from forebay.torch.schedule import LATER
from forebay.torch.source import Facts
from forebay.torch.tokens import Rows

KEPT_BYTES = 256 << 20  # of free memory, in a worker; what its batches need, they need again
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_BYTES = 32 << 20  # the most that glibc takes: larger blocks are mapped and unmapped each time
_MALLOC_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # the user's own
_CLOSING_S = 0.5  # how long `close` waits for fetches to notice; they end by themselves otherwise
Collate = Callable[[list[Any]], Any]


def collate(samples: list[Any]) -> Any:
    """torch's default, without a copy where the samples are the rows of one tensor, and without laying out planes of
    pictures whose pixels lie together."""
    return samples.tensor if isinstance(samples, Rows) else collated(samples, collate_fn_map=_COLLATED)


def stacked(tensors: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """A batch of tensors, in memory laid out like the first. In a worker it is memory shared with the training process,
    into which each tensor is copied once."""
    first = tensors[0]
    plain = first.layout is torch.strided and not first.is_nested  # of others torch itself says why they do not stack
    if not (plain and first.dim() == 3 and first.stride(0) == 1 < first.shape[0] == first.stride(2)):
        return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)
    return collate_tensor_fn([tensor.permute(1, 2, 0) for tensor in tensors]).permute(0, 3, 1, 2)


_COLLATED = {**default_collate_fn_map, torch.Tensor: stacked}


class Step(NamedTuple):
    """What a batch is made of."""

    epoch: int
    indices: Any


class Fetched:
    """A batch, or the error in its place, and what it took."""

    __slots__ = ("batch", "error", "facts", "samples")

    def __init__(self, batch: Any, samples: int, facts: Facts, error: ForebayError | None = None) -> None:
        self.batch, self.samples, self.facts, self.error = batch, samples, facts, error

    def pin_memory(self) -> Fetched:
        """torch's protocol for batches of a class of their own."""
        return Fetched(pinned(self.batch), self.samples, self.facts, self.error)


def pinned(batch: Any) -> Any:
    """The batch with its tensors in page-locked memory."""
    from torch.utils.data._utils.pin_memory import pin_memory  # what DataLoader itself calls; it has no public name

    return pin_memory(batch)


class Fetching(TorchDataset):  # type: ignore[misc]  # torch is not followed by the type checker
    """A dataset whose "samples" are batches: `__getitems__` gives one `Fetched`."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, step: Any) -> Any:
        return self.fetch(step, None)

    def fetch(self, step: Any, ended: threading.Event | None) -> Any:
        """One batch (`Fetched`); waiting ends when `ended` is set. What stands in place of a step, LATER or an error,
        is handed on in its turn."""
        if step is LATER:
            return LATER
        if isinstance(step, ForebayError):
            return Fetched(None, 0, Facts(), step)
        facts = Facts(ended=ended, epoch=step.epoch)
        try:
            samples = self._samples(step.indices, facts)
            began_s = clock.monotonic_s()
            batch = self.collate(samples)
            facts.decode_s += clock.monotonic_s() - began_s
        except ForebayError as error:
            facts.ended = None
            return Fetched(None, 0, facts, error)
        facts.ended = None
        return Fetched(batch, len(samples), facts)

    def _samples(self, indices: Any, facts: Facts) -> list[Any]:
        if isinstance(self.dataset, Dataset):
            return self.dataset.fetch(indices, facts)
        began_s = clock.monotonic_s()  # a foreign dataset, or one of ours within one: nobody says what it spends
        indices = indices.tolist()
        many: Callable[[Sequence[int]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        samples = many(indices) if many else [self.dataset[index] for index in indices]
        facts.read_s += clock.monotonic_s() - began_s
        facts.items += len(indices)
        return samples


class Following:
    """What a worker process does first: follow the training process, keep its memory, then the caller's
    `worker_init`."""

    def __init__(self, worker_init: Callable[[int], None] | None) -> None:
        self._leader_pid = os.getpid()
        self._worker_init = worker_init

    def __call__(self, number: int) -> None:
        try:
            leader = os.pidfd_open(self._leader_pid)
        except ProcessLookupError:
            os._exit(1)
        except (AttributeError, OSError):  # no such thing on this platform: torch's own watch has to do
            leader = -1
        if leader >= 0:
            threading.Thread(target=_follow, args=(leader,), name="forebay-follow", daemon=True).start()
        if not any(name in os.environ for name in _MALLOC_SETTINGS):
            keep_memory()
        if self._worker_init is not None:
            self._worker_init(number)


def keep_memory() -> bool:
    """From now on this process keeps up to KEPT_BYTES of free memory; whether its allocator can be told to."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc's
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def _follow(leader: int) -> None:
    poll = select.poll()
    poll.register(leader, select.POLLIN)
    poll.poll()  # readable when that process has ended
    os._exit(1)


def as_is(batch: Any) -> Any:
    """The collation of what is a batch already."""
    return batch


class _Slot:
    """One step's place in the row."""

    __slots__ = ("indices", "made", "result")

    def __init__(self, indices: Any) -> None:
        self.indices = indices
        self.made = threading.Event()
        self.result: Any = None


class Ahead:
    """Fetches of successive steps, by `threads` threads, `depth` steps ahead. Iterate, then `close`. `steps` gives
    LATER for one that is not known yet, as long as others are under way."""

    def __init__(
        self, fetch: Callable[[Any, threading.Event], Fetched], steps: Iterator[Any], threads: int, depth: int
    ) -> None:
        assert min(threads, depth) >= 1, "nobody would fetch"
        self._fetch, self._steps, self._depth = fetch, steps, depth
        self._row: deque[_Slot] = deque()
        self._asked: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._far = threading.Event()  # set while batches are not all at the node: then every thread works
        self._threads = [
            threading.Thread(target=self._work, args=(number == 0,), name=f"forebay-fetch-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> Fetched:
        while len(self._row) < self._depth and not self._ended.is_set():
            indices = next(self._steps, LATER)
            if indices is LATER:
                break
            slot = _Slot(indices)
            self._row.append(slot)
            self._asked.put(slot)
        if not self._row:
            raise StopIteration
        slot = self._row.popleft()
        slot.made.wait()
        if isinstance(slot.result, BaseException):
            raise slot.result
        found: Fetched = slot.result
        return found

    def _work(self, always: bool) -> None:
        while True:
            if not always:
                self._far.wait()
            slot = self._asked.get()
            if slot is None or self._ended.is_set():
                return
            try:
                slot.result = self._fetch(slot.indices, self._ended)
                facts = slot.result.facts
                if facts.cold or facts.direct or facts.busy_s or facts.unlocked:
                    self._far.set()
                else:
                    self._far.clear()
            except BaseException as error:  # of a user's decode or collate: raised where the step is taken
                slot.result = error
            slot.made.set()

    def close(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the threads; one that waits for bytes ends when it has them."""
        if ending():
            return  # Python is being taken down: no daemon runs any more, and what this needs may be gone
        self._ended.set()
        self._far.set()
        for _ in self._threads:
            self._asked.put(None)
        until_s = clock.monotonic_s() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - clock.monotonic_s()))
