"""One save: a thread sends what was staged, the ranks agree that all is there, and rank 0 writes the manifest.

Theory. The thread digests a blob, sends it to the node and gives its buffer back; two senders keep the node busy
while one digests. A node that restarts, is full of unflushed bytes, or is cut off is waited for, up to `patience_s`:
training goes on meanwhile, and the handle says what is waited for. Then each rank tells the others what it sent or
why it could not. If all could, rank 0 commits the manifest, and all hear whether it did. So a rank that fails fails
the save on every rank, and none waits for it.

A save that somebody waits for from the start is sent while it is copied, at training's own priority.

Each sender keeps a core busy at the node. Where training leaves fewer than two, one of them sends alone, until
somebody waits for the end. Until then they also pause after each blob, as long as what it cost training's thread
(the main one) demands (`core/checkpoint_pace.py`).

The threads are not daemons: a script that simply ends after its last save waits for it. On Linux they run at a lower
priority than training.

Invariants. (1) A manifest is committed only after every rank's blobs and index are acknowledged. (2) Every rank takes
part in both exchanges of every save that was begun, whatever happened to it before. (3) Every buffer that was filled is
given back.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import torch

from forebay.checkpoint.repository import Repository
from forebay.client.patience import with_patience
from forebay.core import checkpoint as form
from forebay.core.checkpoint import PIECE_BYTES, Index, Manifest, RankPart
from forebay.core.checkpoint_pace import NONE, CoreTime, Pace
from forebay.core.errors import Bug, Corrupt, ForebayError, Invalid, NotFound, Unavailable, from_wire
from forebay.ports import clock
from forebay.torch.checkpoint.ranks import Ranks
from forebay.torch.checkpoint.staging import Arena, Filled, Layout

Level = Literal["tier", "bucket"]
T = TypeVar("T")
SENDERS = 2
NICENESS = 10  # of the threads that send: training's threads come first
_LOOK_S = 0.05  # between looks at a job of the node
log = logging.getLogger("forebay.checkpoint")


class Terms(NamedTuple):
    """What a save is of: agreed by all ranks before it begins."""

    sequence: int
    step: int
    token: str
    metadata: dict[str, str]


class SaveHandle:
    """A save that was begun. Its methods may be called from any thread."""

    def __init__(self, terms: Terms, repository: Repository, patience_s: float) -> None:
        self.step = terms.step
        self.sequence = terms.sequence
        self.stall_s = 0.0  # how long the save kept training from going on: a GPU's copies are in it once they are made
        self.held_s = 0.0  # how long copies held the GPU
        self.size_bytes = 0  # of this rank
        self.sent_bytes = 0
        self.waiting = ""  # what is waited for, in words; empty while bytes flow
        self.error: ForebayError | None = None
        self.manifest: Manifest | None = None
        self.staged_s = 0.0  # when the stall was over, monotonic
        self.ended_s: float | None = None  # when the save counted or failed, monotonic
        self._told = False  # somebody was raised `error`
        self._told_here_only = False  # and it was the fault of this rank, so that others were not
        self._hurry = threading.Event()  # somebody waits for it, or nothing is left to send
        self._terms = terms
        self._repository = repository
        self._patience_s = patience_s
        self._ready: list[Callable[[], Any]] = []
        self._ended = threading.Event()
        self._finished = threading.Event()  # after `on_end`, too

    def __repr__(self) -> str:
        if self.error is not None:
            state = f"failed: {self.error}"
        elif self._ended.is_set():
            state = "durable"
        else:
            state = f"{self.sent_bytes} of {self.size_bytes} bytes sent" + (f", {self.waiting}" if self.waiting else "")
        return f"<save {self.sequence} of step {self.step}: {state}>"

    @property
    def done(self) -> bool:
        """Whether it counts as a checkpoint now, or has failed."""
        return self._ended.is_set()

    def staged(self) -> None:
        """Return when the state may be changed. On a CPU that is so when `save` returns; work queued on a GPU waits by
        itself."""
        for ready in self._ready:
            ready()

    def durable(self, level: Level = "tier", timeout_s: float | None = None) -> Manifest:
        """Wait until the checkpoint counts: at the node (`tier`), or at the backend as well (`bucket`), so that it
        outlives the node. Its manifest. A node that restarts and a bucket that is away are waited for.

        The save's own error if it failed. For the bucket `NotFound` or `Corrupt` if the checkpoint is not there any
        more (it was pruned, or its node was lost before the bucket had it): save again. `Unavailable` when `timeout_s`
        have passed (for the bucket at the latest the checkpointer's `patience_s`), and the save goes on.
        """
        if level not in ("tier", "bucket"):
            raise Invalid(f"level={level!r}: durable in the 'tier' or in the 'bucket'")
        give_up_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
        self._hurry.set()
        if not self._ended.wait(timeout_s):
            raise Unavailable(f"{self!r} after {timeout_s:g} s: wait longer, or go on and look again later")
        if self.error is not None:
            self._told = True
            raise self.error
        assert self.manifest is not None, "a save ends with a manifest or an error"
        if level == "bucket":
            left_s = self._patience_s if give_up_s is None else max(0.0, give_up_s - clock.monotonic_s())
            self._wait_for_bucket(self.manifest, left_s)
        return self.manifest

    def _wait_for_bucket(self, manifest: Manifest, patience_s: float) -> None:
        give_up_s = clock.monotonic_s() + patience_s

        def pause(delay_s: float, error: ForebayError) -> None:
            if not self.waiting:
                log.warning("checkpoint %d waits for the bucket: %s", self.sequence, error)
            self.waiting = f"waits for the bucket: {error}"
            threading.Event().wait(delay_s)

        try:
            with_patience(
                lambda: _flush(self._repository, manifest, give_up_s), patience_s, pause, "the node goes on flushing it"
            )
        finally:
            self.waiting = ""

    def _end(self, manifest: Manifest | None, error: ForebayError | None) -> None:
        self.manifest, self.error, self.waiting = manifest, error, ""
        self.ended_s = clock.monotonic_s()
        self._ended.set()


def _flush(repository: Repository, manifest: Manifest, give_up_s: float) -> None:
    """Have the node flush a checkpoint, blobs before the manifest, and wait for it. `Unavailable` if it could not, or
    not until `give_up_s`; `NotFound` or `Corrupt` if it is not there to be flushed."""
    prefix = repository.prefix
    names = tuple(prefix + name for name, _ in manifest.objects())
    for keys in (names, (prefix + form.manifest_name(manifest.sequence),)):
        for at in range(0, len(keys), 1000):
            job = repository.client.start_job("flush", repository.bucket, keys=keys[at : at + 1000])
            while job.state == "running":
                if clock.monotonic_s() > give_up_s:
                    raise Unavailable("the bucket does not have the checkpoint yet: wait longer, or look again later")
                threading.Event().wait(_LOOK_S)
                try:
                    job = repository.client.job(job.job)
                except NotFound as error:
                    raise Unavailable(f"the node that flushed it started again ({error}): flush again") from error
            if job.state != "done" or job.units_failed:
                raise Unavailable(f"the bucket does not take all of it: {'; '.join(job.errors) or job.state}")
    if repository.manifest(manifest.sequence) != manifest:
        raise Corrupt(f"checkpoint {manifest.sequence} was replaced by another one: give each job a prefix of its own")
    damage = repository.damage(manifest)  # a node has nothing to flush of what it does not know
    if damage is not None:
        raise NotFound(f"{damage}: it was pruned, or its node lost it before the bucket had it: save again")


class Sending:
    """Sends one rank's blobs while they are filled, and its index. What goes wrong stops it and is in `failed`."""

    def __init__(
        self,
        handle: SaveHandle,
        terms: Terms,
        repository: Repository,
        rank: int,
        arena: Arena,
        patience_s: float,
        niceness: int = NICENESS,
        pace: Pace | None = None,
    ) -> None:
        self.handle = handle
        self.failed: ForebayError | None = None  # set by `fail`
        self.terms = terms
        self.repository = repository
        self._rank = rank
        self._arena = arena
        self._patience_s = patience_s
        self._niceness = niceness
        self._pace = pace or Pace()
        self._training = threading.main_thread().native_id or 0
        self._filled: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self._senders: list[threading.Thread] = []
        self._digests: list[str] = []
        self._lock = threading.Lock()
        self._broken = threading.Event()  # it failed: what is waited for would not help it

    def fail(self, error: ForebayError) -> None:
        """Nothing more is sent, and nothing waited for. The first error stays."""
        self.failed = self.failed or error
        self._broken.set()

    def begin(self, layout: Layout) -> None:
        self.handle.size_bytes = layout.stream_bytes
        self._digests = [""] * -(-layout.stream_bytes // PIECE_BYTES)
        self._pace.begin(core_time(self._training))

    def add(self, filled: Filled) -> None:
        """A blob is staged: it is sent once the senders run."""
        self.handle._ready.append(filled.ready)
        self._filled.put(filled)

    def send(self, layout: Layout, hurry: bool = False) -> None:
        """Start the senders, if they do not run yet. `hurry`: training waits."""
        if hurry:
            self.handle._hurry.set()
        if not self._senders:
            spare = (os.cpu_count() or 1) - torch.get_num_threads()
            self._senders = [
                threading.Thread(
                    target=self._sender,
                    args=(layout, number > 0 and spare < SENDERS),
                    name=f"checkpoint-{self.terms.sequence}",
                )
                for number in range(min(SENDERS, max(1, layout.blobs)))
            ]
            for thread in self._senders:
                thread.start()

    def no_more(self) -> None:
        """All blobs are filled, or none will be."""
        while not self._senders and not self._filled.empty():  # copying broke off before anything was sent
            given_up = self._filled.get()
            assert given_up is not None, "only the end of a save is None"
            self._arena.give(given_up.buffer)
        for _ in self._senders:
            self._filled.put(None)

    def join(self) -> None:
        """Wait until what was filled is sent; after `no_more`."""
        for thread in self._senders:
            thread.join()
        self._pace.end(core_time(self._training))

    # --- in threads of its own ---------------------------------------------------------------------------------------
    def _sender(self, layout: Layout, only_in_a_hurry: bool) -> None:
        if only_in_a_hurry:
            self.handle._hurry.wait()
        else:
            _be_nice(self._niceness)
        while (filled := self._filled.get()) is not None:
            try:
                if self.failed is None:
                    self._send_beside(layout, filled)
            except ForebayError as error:
                self.fail(error)
            except Exception as error:  # a thread that ends in silence would leave the ranks waiting
                self.fail(Bug(f"sending a blob failed: {error!r}: please report this"))
                log.exception("sending a blob of checkpoint %d failed", self.terms.sequence)
            finally:
                self._arena.give(filled.buffer)
        self.handle._hurry.set()

    def _send_beside(self, layout: Layout, filled: Filled) -> None:
        """Send a blob and, while nobody waits for the save and more is to be sent, pause."""
        before, began_s = core_time(self._training), clock.monotonic_s()
        self._send_one(layout, filled)
        hurry, handle = self.handle._hurry, self.handle
        if not hurry.is_set():
            pause_s = self._pace.sent(before, core_time(self._training), clock.monotonic_s() - began_s)
            if handle.sent_bytes < handle.size_bytes:  # the last blob has nothing behind it that a pause would spare
                hurry.wait(pause_s)

    def _send_one(self, layout: Layout, filled: Filled) -> None:
        held_s = filled.ready()
        view = filled.view()
        first = filled.blob * layout.blob_bytes // PIECE_BYTES
        digests = [form.piece_digest(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES)]
        self._digests[first : first + len(digests)] = digests
        name = form.blob_name(self.terms.sequence, self.terms.token, self._rank, filled.blob)
        shared = filled.buffer.shared
        if shared is None:
            self._put(name, view)
        else:
            bucket, key = self.repository.bucket, self.repository.prefix + name
            sums = [int(digest, 16) for digest in digests]
            self.waited_for(lambda: self.repository.client.put_shared(bucket, key, shared, len(view), sums))
        with self._lock:
            self.handle.sent_bytes += len(view)
            self.handle.held_s += held_s

    def _put(self, name: str, data: bytes | memoryview) -> None:
        key = self.repository.prefix + name
        self.waited_for(lambda: self.repository.client.put(self.repository.bucket, key, data))

    def waited_for(self, attempt: Callable[[], Any]) -> Any:
        def pause(delay_s: float, error: ForebayError) -> None:
            if not self.handle.waiting:
                log.warning("checkpoint %d waits for the node: %s", self.terms.sequence, error)
            self.handle.waiting = f"waits for the node: {error}"
            if self._broken.wait(delay_s):
                raise error

        advice = "the checkpoint is given up; the last one before it counts"
        found = with_patience(attempt, self._patience_s, pause, advice)
        self.handle.waiting = ""
        return found

    def put_index(self, layout: Layout, trees: dict[str, Any]) -> RankPart:
        """After `join` without a fault."""
        index = Index(
            self._rank, layout.stream_bytes, layout.blob_bytes, layout.entries, "".join(self._digests), trees
        ).to_bytes()
        if len(index) > form.INDEX_BYTES_MAX:
            raise Invalid(f"the state has {len(layout.entries)} tensors, more than an index holds: join small ones")
        self._put(form.index_name(self.terms.sequence, self.terms.token, self._rank), index)
        blobs = tuple(layout.blob_size(blob) for blob in range(layout.blobs))
        return RankPart(form.digest_of(index), len(index), blobs)


class _End(NamedTuple):
    """What `Save.finish` is told."""

    layout: Layout | None
    trees: dict[str, Any]
    alike: str
    failed: ForebayError | None
    on_end: Callable[[SaveHandle], None]


class Save(Sending):
    """Sends one rank's part of a checkpoint and joins the others'. `on_end` hears of the end, in the thread."""

    def __init__(
        self,
        handle: SaveHandle,
        terms: Terms,
        repository: Repository,
        ranks: Ranks,
        arena: Arena,
        patience_s: float,
        niceness: int,
        pace: Pace,
    ) -> None:
        super().__init__(handle, terms, repository, ranks.rank, arena, patience_s, niceness, pace)
        self._ranks = ranks
        self._heard: queue.SimpleQueue[Layout | _End] = queue.SimpleQueue()
        self._once = threading.Lock()
        self._thread = threading.Thread(target=self._complete, name=f"checkpoint-{terms.sequence}")

    def start(self) -> None:
        """Before anything else. From then on the training's thread only says what has come about, in one step that no
        Ctrl-C can cut in two; threads are started by the save's own."""
        self._thread.start()

    def send(self, layout: Layout, hurry: bool = False) -> None:
        if hurry:
            self.handle._hurry.set()
        self._heard.put(layout)

    def finish(
        self,
        layout: Layout | None,
        trees: dict[str, Any],
        alike: str,
        failed: ForebayError | None,
        on_end: Callable[[SaveHandle], None],
    ) -> None:
        """Everything is staged, or `failed`: the rest happens in the thread. Only the first call counts."""
        if self._thread.ident is None:  # Ctrl-C came while it was started
            with suppress(RuntimeError):  # it was
                self._thread.start()
        self._heard.put(_End(layout, trees, alike, failed, on_end))

    def _complete(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        while isinstance(heard := self._heard.get(), Layout):
            super().send(heard)
        layout, trees, alike, given_up, on_end = heard
        if given_up is not None:
            self.fail(given_up)
        if layout is not None:
            super().send(layout)
        self.no_more()
        self.join()
        self.handle.stall_s = max(self.handle.stall_s, self.handle.held_s)  # in waves `save` waits for the copies
        part: RankPart | None = None
        try:
            if self.failed is None:
                assert layout is not None, "only a failed save has no layout"
                part = self.put_index(layout, trees)
        except ForebayError as error:
            self.fail(error)
        except Exception as error:  # the other ranks, and who waits for the handle, are to hear of it
            log.exception("the index of checkpoint %d could not be written", self.terms.sequence)
            self.fail(Bug(f"the index of the checkpoint could not be written: {error!r}: please report this"))
        manifest: Manifest | None = None
        failed: ForebayError | None = None
        try:
            manifest = self._agreed(part, tuple(sorted(trees)), alike)
        except ForebayError as error:
            failed = error
        except Exception as error:  # gloo: another rank is gone
            failed = Unavailable(f"the ranks could not agree on the checkpoint: {error}: start the job again")
        self.handle._end(manifest, failed)
        if failed is not None:
            log.warning("checkpoint %d of step %d failed: %s", self.terms.sequence, self.terms.step, failed)
        try:
            on_end(self.handle)
        finally:
            self.handle._finished.set()

    def _agreed(self, part: RankPart | None, names: tuple[str, ...], alike: str) -> Manifest:
        """The committed manifest; what went wrong, on whichever rank, is raised on all."""
        said = (part, names, alike, self.handle.stall_s, self.failed and self.failed.to_wire())
        everyone = self._ranks.gather(said, sending=True)
        outcome: Any = None
        if self._ranks.rank == 0:
            try:
                outcome = self._committed(everyone)
            except ForebayError as error:
                outcome = error.to_wire()
            except Exception as error:
                log.exception("the manifest of checkpoint %d could not be written", self.terms.sequence)
                outcome = Bug(f"the manifest could not be written: {error!r}: please report this").to_wire()
        outcome = self._ranks.first(outcome, sending=True)
        if isinstance(outcome, Manifest):
            return outcome
        raise from_wire(outcome)

    def _committed(self, everyone: list[Any]) -> Manifest:
        for rank, (_, _, _, _, failed) in enumerate(everyone):
            if failed is not None:
                whose = f"rank {rank}: " if self._ranks.world > 1 else ""
                raise from_wire(msgspec.structs.replace(failed, message=whose + failed.message))
        if len({alike for _, _, alike, _, _ in everyone}) > 1:
            raise Invalid(
                "the ranks' states differ in names, shapes or dtypes: save each rank's own things under a name of `own`"
            )
        names = sorted({name for _, found, _, _, _ in everyone for name in found})
        manifest = Manifest(
            self.terms.sequence,
            self.terms.step,
            self.terms.token,
            clock.wall_s(),
            tuple(part for part, _, _, _, _ in everyone),
            tuple(names),
            max(stall_s for _, _, _, stall_s, _ in everyone),
            self.terms.metadata,
        )
        self.waited_for(lambda: self.repository.commit(manifest))
        return manifest


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """What the caller, who stands still meanwhile, asks the node for."""
    told = False

    def pause(delay_s: float, error: ForebayError) -> None:
        nonlocal told
        if not told:
            log.warning("the checkpoint waits for the node: %s", error)
        told = True
        threading.Event().wait(delay_s)

    return with_patience(ask, patience_s, pause, "bring the node back, then go on")


def asked(ask: Callable[[], T], ask_node: Callable[[], T], outage_s: float, patience_s: float) -> tuple[T, bool]:
    """What `ask` finds; or, once the bucket has been away for `outage_s`, what `ask_node` does, and True."""
    try:
        return patiently(ask, min(outage_s, patience_s)), False
    except Unavailable as error:
        log.warning("the bucket does not answer, so what the node knows has to do: %s", error)
        return patiently(ask_node, patience_s), True


def core_time(thread_id: int) -> CoreTime:
    """What the system says of a thread of this process; `NONE` where it says nothing."""
    try:
        ran_ns, waited_ns = Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()[:2]
        return CoreTime(int(ran_ns) / 1e9, int(waited_ns) / 1e9)
    except (OSError, ValueError):
        return NONE


def _be_nice(niceness: int) -> None:
    try:
        priority = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread that asks, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(priority, niceness))
    except (OSError, AttributeError):
        pass
