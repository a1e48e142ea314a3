"""`Checkpointer`: what a training script uses to save and restore its state.

Theory. `save` does in the training's thread only what must be done before training may go on: it takes the state
apart, copies it (`staging`), and starts the threads that send it (`saving`). `restore` finds the newest checkpoint
that is whole and verifies, on all ranks the same one. `maybe_save` asks `core/checkpoint_interval.py` whether a save
is worth it.

One save is under way at a time: a second one would take the memory and the bandwidth that the first needs. `save` waits
for the one before and says so; `maybe_save` lets it finish and comes back at the next step.

Every method that takes part in what ranks agree on is called by all ranks, in the same order: the constructor, `save`,
`maybe_save`, `restore`, `close`.

Invariants. (1) A checkpoint that `durable` reported is found by `restore` until `prune` deletes it. (2) A save that
fails leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import logging
import operator
import os
import signal
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from forebay.checkpoint.repository import Damage, Pruned, Repository, check_pace, parse_run
from forebay.client.sync import Client
from forebay.core.checkpoint import Manifest
from forebay.core.checkpoint_interval import Interval, Reason
from forebay.core.checkpoint_pace import Pace
from forebay.core.errors import Bug, Closed, Corrupt, ForebayError, Invalid, NotFound
from forebay.core.goodput import Goodput, Life, goodput
from forebay.ports import clock
from forebay.ports.chance import SystemChance
from forebay.torch.checkpoint.ranks import Ranks, shares
from forebay.torch.checkpoint.restoring import Plan, Source, put_back
from forebay.torch.checkpoint.saving import NICENESS, Save, SaveHandle, Terms, asked, patiently
from forebay.torch.checkpoint.staging import Arena, Layout, lay_out, stage
from forebay.torch.checkpoint.tree import Flat, is_text, key_text

PATIENCE_S = 6 * 3600.0  # of the threads that send: an outage of hours costs one checkpoint's delay, not the run
RESTORE_PATIENCE_S = 600.0
OUTAGE_S = 30.0  # how long a bucket is waited for before the node's own knowledge has to do
UNSEEN = 1000  # sequences left free while the bucket is away: what it has beyond the node's knowledge is less
OWN = ("rng",)
T = TypeVar("T")
log = logging.getLogger("forebay.checkpoint")


class Every(NamedTuple):
    """When `maybe_save` saves: after so many steps, or so many seconds, or when it is worth it (`auto`)."""

    steps: int | None = None
    seconds: float | None = None


class Restored(NamedTuple):
    """Which checkpoint was restored. `skipped`: others that were tried first, and why they were not. `absent`: names
    that it does not have for this rank, or that do not fit, which were left as they were."""

    step: int
    sequence: int
    metadata: dict[str, str]
    skipped: list[str]
    absent: list[str]


class Checkpointer:
    """Saves a job's state under `place` (`bucket/path/of/the/run`) and restores it. All ranks make one, together.

    `every`: "auto", a number of steps, or `Every(seconds=…)`, for `maybe_save`. `keep`: how many checkpoints stay;
    None keeps all. `own`: top-level names whose state differs from rank to rank; everything else that is no DTensor
    is taken for equal on all ranks, as DDP keeps it, and saved once. `staging_bytes` bounds the host memory that
    saves use beside the state itself (default: as much as the state has); with less, `save` stalls until the rest is
    sent. `url` is the node's, as of `forebay.connect`. `patience_s`: how long a save waits for a node that is away or
    full. `mtti_s`: the mean time to interrupt of this job, if you know it; otherwise it is estimated.

    `Invalid` for a place without a path or numbers that make no sense. Nothing is opened before the first save or
    restore.
    """

    def __init__(
        self,
        place: str,
        *,
        every: Literal["auto"] | int | Every = "auto",
        keep: int | None = None,
        own: Collection[str] = OWN,
        staging_bytes: int | None = None,
        url: str | None = None,
        patience_s: float = PATIENCE_S,
        mtti_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        bucket, prefix = parse_run(place)
        if keep is not None and keep < 1:
            raise Invalid(f"keep={keep}: at least one checkpoint must stay, or None to keep all")
        if isinstance(own, str):
            raise Invalid(f"own={own!r} is one name: write own=({own!r},)")
        self._every = _every(every)
        self._keep = keep
        self._own = frozenset(own)
        self._own_paths = frozenset(key_text(name) for name in own)
        self._arena = Arena(staging_bytes)
        self._pace = Pace()
        self._metadata = _texts(metadata or {})
        self._patience_s = patience_s
        self._interval = Interval(mtti_s, began_s=clock.monotonic_s())
        self._client = Client(url)
        self.repository = Repository(self._client, bucket, prefix)
        self._ranks = Ranks()
        self._token_base = self._ranks.first(SystemChance().token_hex(4))
        self._pid = os.getpid()
        began_s = clock.wall_s()
        self._life = Life(began_s, began_s)
        self._began_s = clock.monotonic_s()
        self._sequence: int | None = None  # of the last save that was begun; None: not asked yet
        self._last: SaveHandle | None = None
        self._passed_over: list[SaveHandle] = []  # they failed, and the next save came before anybody was told
        self._last_step: int | None = None
        self._away = False  # the bucket did not answer when it was asked last
        self._signalled = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Checkpointer {self.repository.bucket}/{self.repository.prefix} at {self._client.url}>"

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            for handle in self._saves():
                handle._told = True  # what ends the job is not to be hidden
        self.close()

    def close(self) -> None:
        """Wait for the save under way, and give back connections and groups. Raises, after that, why a save failed, if
        nobody was told; at the end of a `with` that an error ends, it is only logged."""
        if self._closed:
            return
        self._closed = True
        self._look_for_fork()
        if self._last is not None:
            self._last._hurry.set()
            self._last._finished.wait()
        if self._ranks.rank == 0 and self._life.saves:
            try:
                self.repository.record(self._token_base, msgspec.structs.replace(self._life, ended=True))
            except ForebayError as error:
                log.warning("this run is not recorded as ended: %s", error)
        self._client.close()
        self._ranks.close()
        for untold in self._untold():
            if not untold._told:
                untold.durable()

    # --- saving ------------------------------------------------------------------------------------------------------
    def save(self, step: int, state: Mapping[str, Any], *, wait: bool = False) -> SaveHandle:
        """Save `state` as it is now; training may go on when this returns. All ranks call it with the same step.

        The values of `state` are objects with `state_dict()` (modules, optimizers, loaders), or states themselves:
        dictionaries, lists, numbers, text, bytes, tensors, arrays. With `wait` it returns when the checkpoint counts.

        `Invalid` if something in the state cannot be saved; on other ranks it is in the handle, and the next
        `maybe_save` raises it on all. Waits for a save that is still under way. What happens later (a full disk,
        another job's checkpoint) is in the handle.
        """
        if self._closed:
            raise Closed("this checkpointer was closed: make another one")
        step = _whole(step)
        self._look_for_fork()
        self._wait_for_last(step)
        self._passed_over = self._untold()
        began_s = clock.monotonic_s()
        terms = self._terms(step)
        handle = SaveHandle(terms, self.repository, self._patience_s)
        niceness = 0 if wait else NICENESS
        work = Save(handle, terms, self.repository, self._ranks, self._arena, self._patience_s, niceness, self._pace)
        self._last, self._last_step = handle, step
        try:
            work.start()
            failed = self._begun(state, work, wait, began_s)
        except BaseException as error:  # Ctrl-C, sys.exit() in a handler: the script wants to end
            stopped = Closed(f"the save of step {step} was interrupted: the last one before it counts")
            work.finish(None, {}, "", stopped, self._ended)
            handle._told = not isinstance(error, Exception)
            raise
        if failed is not None:
            handle._told, handle._told_here_only = True, self._ranks.world > 1
            raise failed
        if wait:
            handle.durable()
        return handle

    def _begun(self, state: Mapping[str, Any], work: Save, wait: bool, began_s: float) -> ForebayError | None:
        """Copy the state, and hand the rest to the save's thread; what was wrong with the state."""
        handle, flat, alike = work.handle, Flat(), ""
        layout: Layout | None = None
        failed: ForebayError | None = None
        try:
            layout, alike = self._stage(state, flat, work, wait)
        except ForebayError as error:
            failed = error
        except Exception as error:  # the ranks wait for this one to say so
            failed = Bug(f"the state could not be copied: {error!r}: please report this")
            failed.__cause__ = error
        handle.staged_s = clock.monotonic_s()
        handle.stall_s = handle.staged_s - began_s
        self._interval.saved(clock.monotonic_s(), handle.stall_s)
        work.finish(layout, self._trees(flat), alike, failed, self._ended)
        return failed

    def _stage(self, state: Mapping[str, Any], flat: Flat, work: Save, wait: bool) -> tuple[Layout, str]:
        if not state:
            raise Invalid("the state is empty: give what is to be saved, by name")
        for name, value in state.items():
            if not isinstance(name, str) or not is_text(name):
                raise Invalid(f"{name!r} is no text: what is saved has names such as 'model'")
            flat.add(name, value.state_dict() if hasattr(value, "state_dict") else value)
        mine, alike = shares(flat.leaves, self._ranks, self._own_paths)
        layout = lay_out(mine, self._arena.memory_bytes)
        self._arena.prepare(layout, pinned=any(share.local.is_cuda for share in mine))
        staged = stage(layout, self._arena, lambda: work.send(layout, hurry=True), at_once=not wait)
        layout = layout._replace(shares=[])  # what is copied is the job's again, to free or change
        work.begin(layout)
        if wait:  # nobody gains from a short stall: the disk begins with the first blob
            work.send(layout, hurry=True)
        for filled in staged:
            work.add(filled)
        return layout, alike

    def _trees(self, flat: Flat) -> dict[str, Any]:
        """Rank 0's trees stand for all, but for names that are each rank's own."""
        return {name: tree for name, tree in flat.trees.items() if self._ranks.rank == 0 or name in self._own}

    def _look_for_fork(self) -> None:
        """In a child of the process that made this: its saves are another job's, with tokens of their own, and what
        the parent has under way is the parent's."""
        if self._pid != os.getpid():
            self._pid, self._token_base, self._last = os.getpid(), SystemChance().token_hex(4), None
            self._passed_over = []

    def _wait_for_last(self, step: int) -> None:
        last = self._last
        if last is not None and not last.done:
            log.warning(
                "step %d waits for %r before it is saved: save less often, or give it more bandwidth", step, last
            )
            last._hurry.set()
            last._ended.wait()

    def _terms(self, step: int) -> Terms:
        if self._sequence is None:
            past = self._agreed(self._history, self._history_known, OUTAGE_S)
            self._sequence, self._interval.failures, self._interval.run_s = past
        self._sequence += 1
        token = f"{self._token_base}{self._sequence & 0xFFFFFFFF:08x}"
        return Terms(self._sequence, step, token, self._metadata)

    def _history(self) -> tuple[int, int, float]:
        """The newest sequence, and how often earlier lives of the job failed in how much time."""
        lives = self.repository.lives()
        newest = max(self.repository.sequences(), default=0)
        past = goodput(lives)
        cut_off = bool(lives) and not max(lives, key=lambda life: life.began_s).ended  # nobody followed it until now
        return newest, past.failures + cut_off, past.run_s

    def _history_known(self) -> tuple[int, int, float]:
        """As `_history`, of what the node knows."""
        return max(self.repository.sequences(known=True), default=0) + UNSEEN, 0, 0.0

    def _agreed(self, ask: Callable[[], Any], ask_node: Callable[[], Any], outage_s: float) -> Any:
        """What rank 0 finds, on all ranks; its error too. `ask_node`: the same of what the node knows, once the bucket
        has been away for `outage_s`."""
        found: tuple[Any, bool, ForebayError | None] = (None, False, None)
        if self._ranks.rank == 0:
            try:
                found = (*self._asked(ask, ask_node, outage_s), None)
            except ForebayError as error:
                found = (None, False, error)
        value, self._away, failed = self._ranks.first(found)
        if failed is not None:
            raise failed
        return value

    def _asked(self, ask: Callable[[], Any], ask_node: Callable[[], Any], outage_s: float) -> tuple[Any, bool]:
        return asked(ask, ask_node, outage_s, min(self._patience_s, RESTORE_PATIENCE_S))

    def _patient(self, ask: Callable[[], Any]) -> Any:
        return patiently(ask, min(self._patience_s, RESTORE_PATIENCE_S))

    def _ended(self, handle: SaveHandle) -> None:
        """In the saving thread: the save counts, or has failed."""
        if handle.error is not None or handle.ended_s is None:
            return
        self._interval.durable(max(0.0, handle.ended_s - handle.staged_s), handle.stall_s)
        if self._ranks.rank:
            return
        life = self._life
        self._life = msgspec.structs.replace(
            life, saved_s=self._now_s(), stall_s=life.stall_s + handle.stall_s, saves=life.saves + 1, step=handle.step
        )
        try:
            self.repository.record(self._token_base, self._life)
            if self._keep is not None:
                self.repository.prune(self._keep)
        except ForebayError as error:
            log.warning("old checkpoints and the record of this run stay as they are for now: %s", error)

    def _now_s(self) -> float:
        """Unix time as of this life's begin: a clock that is set meanwhile moves no part of a life."""
        return self._life.began_s + clock.monotonic_s() - self._began_s

    # --- when to save ------------------------------------------------------------------------------------------------
    def maybe_save(self, step: int, state: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> SaveHandle | None:
        """Save if it is time to; None if not. Call it after every step, on all ranks. `state` may be a function, which
        is called only then.

        It is time when `every` says so and the last save is done; at once after a signal of `on_signal`, and then it
        returns when the checkpoint is durable.

        Raises, on all ranks and once, why an earlier save failed, unless its handle's `durable` did: catch
        `ForebayError` if training shall go on without that checkpoint, and the next save comes when it is due.
        """
        self._look_for_fork()
        urgent = self._ranks.any(self._signalled)
        if urgent:  # never the other way: a signal may come while the ranks agree
            self._signalled = True
        else:
            due = self._due(step)  # first: what ends between the two is told before the next save
            untold = self._untold()
            due, failed = self._ranks.first((due, untold[0].sequence if untold else None))
            for handle in self._saves():
                if handle.sequence == failed:
                    handle._told_here_only = False
                    handle.durable()  # waits where the end is not known yet, so that all ranks raise at this step
            if failed is not None or not due:
                return None
        return self.save(step, state() if callable(state) else state, wait=urgent)

    def _saves(self) -> list[SaveHandle]:
        """The last, and those before it whose end nobody was told."""
        return [*self._passed_over, *([self._last] if self._last is not None else [])]

    def _untold(self) -> list[SaveHandle]:
        """The saves that failed, and that somebody was not told of."""
        failed = (each for each in self._saves() if each.done and each.error is not None)
        return [each for each in failed if each._told_here_only or not each._told]

    def _due(self, step: int) -> bool:
        if self._last is not None and not self._last.done:
            return False
        if self._every.steps is not None:
            saved = self._last_step
            since = step - 1 if saved is None or saved > step else saved
            return step // self._every.steps > since // self._every.steps  # one that was missed is made up for
        now_s = clock.monotonic_s()
        if self._every.seconds is not None:
            last_s = self._interval._last_s
            return now_s - (self._interval.began_s if last_s is None else last_s) >= self._every.seconds
        return self._interval.due(now_s)

    def explain(self) -> Reason:
        """Why `auto` saves as often as it does: stall, lag, failure rate, expected waste. Print it."""
        return self._interval.reason(clock.monotonic_s())

    @property
    def stopping(self) -> bool:
        """Whether a signal of `on_signal` came to any rank: the step after `maybe_save` is the place to leave the
        loop."""
        return self._signalled

    def on_signal(self, number: int = signal.SIGTERM) -> None:
        """From now on that signal means: save at the next `maybe_save`, then stop (`stopping`). A scheduler sends it
        before it takes the machine. Call it in the main thread."""
        signal.signal(number, self._note_signal)

    def _note_signal(self, *_: Any) -> None:
        self._signalled = True

    # --- restoring ---------------------------------------------------------------------------------------------------
    def restore(
        self, into: Mapping[str, Any], step: int | Literal["latest"] = "latest", *, strict: bool = True
    ) -> Restored | None:
        """Put a checkpoint back into the objects of `into`, by the names they were saved under. None if there is none.

        `latest` is the newest that is whole and verifies; an older one is taken if a newer one is damaged, and
        `skipped` says why. One that a running job prunes meanwhile is skipped, too, for a newer one. Objects get
        `load_state_dict`; dictionaries and lists are changed in place, and so is the memory of tensors.

        `NotFound` for a step that was not saved. `Invalid`, before anything is changed, if a module's names, shapes or
        dtypes differ, an optimizer's parameters, or a name was not saved; with `strict=False` what fits is taken, and
        `absent` names the rest. `Unavailable` if checkpoints are pruned faster than they can be read. `Corrupt` if no
        checkpoint verifies: then the objects hold parts of several, so do not train with them.
        """
        began_s = clock.monotonic_s()
        wanted = None if step == "latest" else step
        tried: dict[int, str] = {}  # by sequence, and what was wrong
        touched: set[str] = set()  # paths of tensors that hold parts of a damaged one
        while (sequence := self._untried(wanted, tried)) is not None:
            found = self._try(sequence, into, strict, touched)
            if isinstance(found, Restored):
                took_s = self._life.restored_s + clock.monotonic_s() - began_s
                self._life = msgspec.structs.replace(self._life, restored_s=took_s, saved_s=self._now_s())
                return found._replace(skipped=[f"checkpoint {number}: {what}" for number, what in tried.items()])
            tried[sequence] = found
            log.warning("checkpoint %d: %s; trying another one", sequence, found)
        if tried:
            said = "; ".join(f"checkpoint {number}: {what}" for number, what in tried.items())
            raise Corrupt(f"no checkpoint of {self.repository!r} can be restored: {said}")
        if wanted is not None:
            raise NotFound(f"step {wanted} was not saved under {self.repository.prefix}: `list()` shows what was")
        return None

    def _untried(self, step: int | None, tried: Collection[int]) -> int | None:
        """The newest checkpoint that was not tried yet, on all ranks the same; None if there is none. It is asked anew
        each time: what a running job prunes while it is read has a newer one in its place."""
        check_pace(tried)
        return self._agreed(  # type: ignore[no-any-return]
            lambda: self.repository.newest(step, tried),
            lambda: self.repository.newest(step, tried, known=True),
            0.0 if self._away else OUTAGE_S,
        )

    def _try(self, sequence: int, into: Mapping[str, Any], strict: bool, touched: set[str]) -> Restored | str:
        """Restore one checkpoint on all ranks, or why it cannot be. `touched` gets what is read of one that is not
        whole: another counts only if it overwrites all of that."""
        plan, damage = self._on_all(lambda: self._plan(sequence, into, strict, touched))
        if damage is not None:
            return damage
        assert plan is not None, "nobody found a fault"
        _, damage = self._on_all(lambda: self._patient(plan.read))
        if damage is not None:
            touched |= plan.paths
            return damage
        for name, value in plan.values.items():
            put_back(into[name], value, strict)
        return Restored(plan.manifest.step, sequence, plan.manifest.metadata, [], plan.absent)

    def _on_all(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """What `work` returns, and what is damaged on any rank, in words. An error that an older checkpoint does not
        mend is raised on all."""
        value: T | None = None
        damage: str | None = None
        refused: ForebayError | None = None
        try:
            value = work()
        except (Corrupt, NotFound) as error:
            damage = str(error)
        except ForebayError as error:
            refused = error
        except Exception as error:  # the other ranks wait for this one to say so
            refused = Bug(f"the checkpoint could not be put back: {error!r}: please report this")
            refused.__cause__ = error
        said = self._ranks.gather((damage, refused))
        for _, failed in said:
            if failed is not None:
                raise failed
        return value, next((str(found) for found, _ in said if found is not None), None)

    def _plan(self, sequence: int, into: Mapping[str, Any], strict: bool, touched: Collection[str]) -> Plan:
        try:
            plan = self._fitting(sequence, into, strict)
        except Invalid as error:
            if not touched:
                raise
            raise Corrupt(f"{error.message} (and a newer one that is damaged was read before that was seen)") from error
        if left := sorted(set(touched) - plan.paths):
            raise Corrupt(f"it has no {', '.join(left[:3])}, which hold parts of a newer one that is damaged")
        return plan

    def _fitting(self, sequence: int, into: Mapping[str, Any], strict: bool) -> Plan:
        """The plan, if what was saved fits what is wanted."""
        manifest = self._patient(lambda: self.repository.manifest(sequence))
        missing = self._patient(lambda: self.repository.damage(manifest, known=self._away))
        if missing is not None:
            raise Corrupt(str(missing))
        plan = Plan(Source(self.repository, manifest, self._own), self._ranks, strict)
        for name, wanted in into.items():
            self._patient(partial(plan.look, name, wanted))
        plan.part()
        for name, wanted in into.items():
            self._patient(partial(plan.add, name, wanted))
        lacking = [name for name in plan.absent if name not in self._own]
        if strict and lacking:
            has = ", ".join(manifest.names)
            raise Invalid(f"the checkpoint has no {', '.join(lacking)}; it has {has}: leave it out, or strict=False")
        plan.check()
        return plan

    def goodput(self) -> Goodput:
        """Where the time of this run went, over all its lives so far. Print its `share`."""
        return goodput(self._patient(self.repository.lives))

    # --- what there is -----------------------------------------------------------------------------------------------
    def list(self) -> list[Manifest]:
        """All checkpoints, newest first, but for those whose manifest is damaged."""
        return [found for found in self.repository.candidates() if isinstance(found, Manifest)]

    def verify(self, step: int | Literal["latest"] = "latest") -> Damage | None:
        """Read a checkpoint whole and compare it; what is wrong with it, or None. `NotFound` if there is none."""
        for found in self.repository.candidates(None if step == "latest" else step):
            if isinstance(found, Manifest):
                return self.repository.verify(found)
            return Damage(f"checkpoint {found[0]}", str(found[1]))
        raise NotFound(f"there is no checkpoint {step} under {self.repository.prefix}")

    def prune(self, keep: int | None = None) -> Pruned:
        """Delete all but the newest `keep`; see `Repository.prune` for what always stays."""
        kept = keep if keep is not None else self._keep
        if kept is None:
            raise Invalid("how many checkpoints shall stay? prune(keep=3)")
        return self.repository.prune(kept)


def _whole(step: Any) -> int:
    """A step as Python's number: another one would be written, and nobody could read the manifest."""
    try:
        number = int(operator.index(step))
    except TypeError:
        raise Invalid(f"step={step!r}: a step is a whole number") from None
    if number < 0:
        raise Invalid(f"step={step}: steps count from 0")
    return number


def _texts(metadata: Mapping[str, str]) -> dict[str, str]:
    for each in (*metadata, *metadata.values()):
        if not isinstance(each, str) or not is_text(each):
            raise Invalid(f"metadata has {each!r}: names and values are text, str(...) of what you have")
    return {str.__str__(name): str.__str__(value) for name, value in metadata.items()}


def _every(every: Literal["auto"] | int | Every) -> Every:
    if every == "auto":
        return Every()
    found = every if isinstance(every, Every) else Every(steps=every) if isinstance(every, int) else None
    if found is None or isinstance(every, bool):
        raise Invalid(f"every={every!r}: say 'auto', a number of steps, or Every(seconds=600)")
    if (found.steps is not None and found.steps < 1) or (found.seconds is not None and found.seconds <= 0):
        raise Invalid(f"every={every!r}: it must be above 0")
    return found
