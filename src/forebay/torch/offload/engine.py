"""`Offload`: a training step in less memory than it needs, by moving what waits.

Theory. The first steps are watched: one runs plainly (in the very first, optimizers make their state), one under the
profiler, a few against the clock. From that comes a trace, and with the measured speed of the tiers a plan, and from
then on each step follows it (`runner`). What moves: parameters and optimizer state, and gradients, emptied and filled
in place; and what autograd saves, through `saved_tensors_hooks`.

Until a plan is there, and in steps that are not like the one that was profiled, nothing is moved, so those take the
memory that they take. Where all fits into the budget nothing is moved either, and nothing of this is on the way. After
PATIENCE steps in a row that were not like it, the next ones are watched anew.

Between steps some of the model is away. Whatever touches it from Python, in a step or between, has it brought back
first (`guard`); a forward, `model.state_dict()` and `optimizer.state_dict()` between steps bring all of it. To save or
change everything by other means, or from another thread, use `with off.whole():`.

Refused, with the reason: a model that is compiled as a whole (its saved tensors come back all at once, so nothing is
gained), other saved-tensor hooks around the step (only the innermost are called), optimizers that cannot step in
chunks, and, for now, models on an accelerator: this engine moves host tensors.

Invariants. (1) Numbers are those of the same step without this, bit by bit. (2) After `close` model and optimizer are
as they were given, whole and without hooks.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from forebay.core.errors import Closed, Invalid, NotSupported
from forebay.core.quantity import parse_size
from forebay.torch.offload.choose import Choice, choose
from forebay.torch.offload.chunks import check_separable
from forebay.torch.offload.disk_tier import DiskTier
from forebay.torch.offload.guard import Guard
from forebay.torch.offload.hardware import Hardware, Tier
from forebay.torch.offload.host_tier import HostTier
from forebay.torch.offload.itinerary import itinerary
from forebay.torch.offload.movables import Books, Lasting, Movable, Saved
from forebay.torch.offload.plan import SIZE_BYTES_MIN, Plan
from forebay.torch.offload.points import Points
from forebay.torch.offload.profile import Profiler
from forebay.torch.offload.report import Report, explain, report_of
from forebay.torch.offload.runner import Runner, StepFacts
from forebay.torch.offload.saved import SavedNumbers
from forebay.torch.offload.tiers import Storage
from forebay.torch.offload.timing import SegmentTimer, scaled
from forebay.torch.offload.trace import KINDS, Trace

PLAIN_STEPS = 1  # in which optimizers make their state
TIMED_STEPS = 3
PATIENCE = 3  # steps in a row that were not like the profiled one, before it is profiled anew
CHUNK_BYTES = 64 << 20
_NOBODY = -1  # no storage has this address


class Offload:
    """Trains `model` with `optimizer` in `budget` bytes ("24GiB") of memory, moving what waits to `tiers`.

        off = Offload(model, optimizer, budget="24GiB", tiers=[HostTier("32GiB"), DiskTier(["/nvme/x"], "200GiB")])
        with off.step():
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    One step is whatever is in the `with`: with gradient accumulation all of its passes. `chunk_bytes` bounds what the
    optimizer updates at once. `Invalid` and `NotSupported` say what cannot be done; once a plan is made, `Invalid` if
    no plan can meet the budget. A tier slower than half of what it was said to be is refused. Use one from the thread
    that trains.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        budget: str | int,
        tiers: Sequence[Storage],
        chunk_bytes: int = CHUNK_BYTES,
        size_bytes_min: int = SIZE_BYTES_MIN,
    ) -> None:
        _check_model(model)
        self.budget_bytes = parse_size(budget) if isinstance(budget, str) else budget
        self.model, self.optimizer = model, optimizer
        self._disks = [tier for tier in tiers if isinstance(tier, DiskTier)]
        self._hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        if not tiers or len(self._disks) > 1 or len(self._hosts) > 1:
            raise Invalid("give one disk tier, one host tier, or one of each: a disk tier may have many directories")
        self._size_bytes_min = size_bytes_min
        self.trace: Trace | None = None
        self.choice: Choice | None = None
        self.steps: list[StepFacts] = []
        self._runner: Runner | None = None
        self._timer = SegmentTimer()
        self._numbers = SavedNumbers(model, optimizer)
        self._saved: dict[str, weakref.ref[Saved]] = {}
        self._globals: dict[str, Lasting] = {}
        self._unlike = self._watched = 0
        self._inside = self._closed = False
        self._moved = (0, 0)  # bytes written and read before this step
        self._books = Books([*self._disks, *self._hosts])
        self._guard = Guard(self._books)
        self._points = Points(model, optimizer, self._at, chunk_bytes=chunk_bytes)
        self._chunk_bytes = chunk_bytes
        opened: list[Storage] = []
        try:
            for tier in tiers:
                tier.open()
                opened.append(tier)
            self.hardware = self._measured()
            check_separable(optimizer)
        except BaseException:
            for tier in opened:
                tier.close()
            raise
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._come_back_outside(), prepend=True),
            model.register_state_dict_pre_hook(lambda *_: self._come_back_outside()),
            optimizer.register_state_dict_pre_hook(lambda *_: self._come_back_outside()),
        ]

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Bring everything back, remove all hooks, close the tiers. May be called again."""
        if self._closed:
            return
        self._come_back()
        self._closed = True
        self._let_go()
        for handle in self._handles:
            handle.remove()
        for movable in self._globals.values():
            movable.die()
        for tier in self._books.tiers:
            tier.close()

    # --- telling -----------------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """What the steps came to, and what was predicted; print it."""
        return report_of(self.trace, self.choice, self.steps, self.budget_bytes, self._books.failures)

    def explain(self, what: str) -> str:
        """Why a tensor ("parameter layers.0.weight") or a kind ("optimizer state") moves, or stays."""
        if self.trace is None or self.choice is None:
            return "there is no plan yet: the first steps are watched"
        return explain(self.trace, self.choice, what)

    # --- steps -------------------------------------------------------------------------------------------------------
    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step."""
        if self._closed:
            raise Closed("this Offload is closed: make another")
        if self._inside or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Invalid(
                "a step within a step, or within other saved-tensor hooks: only the innermost would be called"
            )
        self._inside = True
        began_s = perf_counter()
        try:
            if self._runner is not None:
                with self._following(self._runner):
                    yield
                self._told(self._runner, perf_counter() - began_s)
            elif self.choice is None and self._watched == PLAIN_STEPS:
                with Profiler(self.model, self.optimizer, chunk_bytes=self._chunk_bytes) as profiler:
                    yield
                self._rehearse(profiler.trace(type(self.model).__name__))
            else:
                yield
                self._watched += 1
                if self.choice is not None:  # all fits: nothing of ours is on the way
                    self.steps.append(StepFacts(step_s=perf_counter() - began_s))
        finally:
            self._inside = False

    def _at(self, name: str) -> None:
        if self._inside and self._runner is not None:
            if self.choice is None:
                self._timer.at(name)
            with self._books:
                self._runner.at(name)

    @contextmanager
    def _following(self, runner: Runner) -> Iterator[None]:
        self._numbers.begin_step()
        self._saved.clear()
        self._bury()
        runner.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            self._points.begin_step()
            yield
            self._points.end_step()
        runner.end_step()

    def _told(self, runner: Runner, step_s: float) -> None:
        """A step is over that followed something."""
        if self.choice is None:
            if self._timer.steps == TIMED_STEPS:
                self._plan()
            return
        facts = runner.facts
        facts.step_s = step_s
        facts.written_bytes = sum(tier.bytes_written for tier in self._books.tiers) - self._moved[0]
        facts.read_bytes = sum(tier.bytes_read for tier in self._books.tiers) - self._moved[1]
        self._moved = (self._moved[0] + facts.written_bytes, self._moved[1] + facts.read_bytes)
        self.steps.append(facts)
        self._unlike = self._unlike + 1 if facts.lost else 0
        if self._unlike >= PATIENCE:
            self._come_back()
            self._let_go()
            self.choice, self._unlike, self._watched = None, 0, PLAIN_STEPS

    def _let_go(self) -> None:
        """Nothing is followed any more, and nothing of ours is on the way of a step."""
        self._guard.take_off()
        self._points.detach()
        self._runner = None

    # --- what is away ------------------------------------------------------------------------------------------------
    @contextmanager
    def whole(self) -> Iterator[None]:
        """All of the model, its gradients and the optimizer's state are here: to evaluate, to save, to change weights.
        Changes through `.data` count as well."""
        self._come_back()
        yield
        for movable in self._globals.values():
            movable.written()

    def _come_back_outside(self) -> None:
        if not self._inside:
            self._come_back()

    def _come_back(self) -> None:
        with self._books:
            self._bury()
            for movable in self._globals.values():
                movable.come(0.0)
            for movable in self._globals.values():
                movable.ensure()

    def _bury(self) -> None:
        """Forget what was dropped by whoever held it."""
        for name in [name for name, movable in self._globals.items() if movable.is_dropped()]:
            self._globals.pop(name).die()

    def _find(self, name: str) -> Movable | None:
        """The storage that a trace's tensor is now."""
        if name.startswith("saved "):
            found = self._saved.get(name)
            return found() if found is not None else None
        known = self._globals.get(name)
        tensor = self._tensor(name)
        if known is not None and not known.is_of(tensor):
            known.die()
            del self._globals[name]
            known = None
        if known is None and tensor is not None and tensor.untyped_storage().resizable():
            known = self._globals[name] = Lasting(name, tensor, self._books)
        return known

    def _tensor(self, name: str) -> Any:
        """The tensor of that name in model or optimizer, None if it is not there."""
        kind, _, rest = name.partition(" ")
        if kind == "parameter":
            return self._parameters.get(rest)
        if kind == "gradient":
            parameter = self._parameters.get(rest.partition(" #")[0])
            return None if parameter is None else parameter.grad
        key, _, rest = name.partition(" of ")
        parameter = self._parameters.get(rest)
        return None if parameter is None else self.optimizer.state.get(parameter, {}).get(key)

    # --- what autograd saves -----------------------------------------------------------------------------------------
    def _pack(self, tensor: Any) -> Any:
        with self._books:
            number = self._numbers.number(tensor)
            name = f"saved {number}"
            if not number:
                return _Present(self._guard, tensor)
            if name not in self._moving:
                return tensor
            ref = self._saved.get(name)
            saved = ref() if ref is not None else None
            if saved is None:
                saved = Saved(name, tensor.untyped_storage(), self._books)
                self._saved[name] = weakref.ref(saved)
            saved.watch(tensor)
            return _Ticket(saved, tensor)

    def _unpack(self, packed: Any) -> Any:
        with self._books:
            return packed.tensor() if isinstance(packed, _Ticket | _Present) else packed

    # --- planning ----------------------------------------------------------------------------------------------------
    def _measured(self) -> Hardware:
        disk, host = next(iter(self._disks), None), next(iter(self._hosts), None)
        write_bytes_s = read_bytes_s = 0.0
        if disk is not None:
            found = disk.check_speed()
            write_bytes_s, read_bytes_s = found.write_bytes_s, found.read_bytes_s
        return Hardware(
            self.budget_bytes,
            disk_bytes=disk.room_bytes if disk else 0,
            disk_write_bytes_s=write_bytes_s,
            disk_read_bytes_s=read_bytes_s,
            host_bytes=host.room_bytes if host else 0,
        )

    def _rehearse(self, trace: Trace) -> None:
        """Time the next steps with all of the machinery and no moves, so that what it costs is in the times."""
        self.trace = trace
        self._watched += 1
        self._timer = SegmentTimer()
        self._parameters = dict(self.model.named_parameters())
        kinds = zip(trace.tensors, trace.kinds.tolist(), strict=True)
        self._moving = {name for name, kind in kinds if KINDS[kind] == "activation"}
        self._points.attach()
        self._guard.put()
        self._books.absent[_NOBODY] = None  # the guard looks only when something may be away
        nothing = Plan("rehearsal", (), trace.need_bytes(), self.hardware)
        self._follow(trace, nothing, int(trace.need_bytes().max()) * 2)

    def _plan(self) -> None:
        """From the trace and its times to moves."""
        assert self.trace is not None, "profiled before it is planned"
        del self._books.absent[_NOBODY]
        trace = scaled(self.trace, self._timer.seconds())
        if any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in self.model.modules()):
            trace = _unmoved(trace, "gradient")  # its buckets are written behind torch's back
        self.trace = trace
        self.choice, _ = choose(trace, self.hardware, size_bytes_min=self._size_bytes_min)
        self._moved = (
            sum(tier.bytes_written for tier in self._books.tiers),
            sum(tier.bytes_read for tier in self._books.tiers),
        )
        if self.choice.plan.moves:
            self._follow(trace, self.choice.plan, self.budget_bytes)
        else:
            self._let_go()

    def _follow(self, trace: Trace, plan: Plan, budget_bytes: int) -> None:
        tiers: dict[int, Storage] = {Tier.DISK: self._disks[0]} if self._disks else {}
        tiers |= {Tier.HOST: self._hosts[0]} if self._hosts else {}
        self._runner = Runner(
            itinerary(trace, plan),
            self._find,
            lambda: list(self._globals.values()),
            self._books,
            tiers,
            budget_bytes,
        )


class _Present:
    """What autograd holds of a parameter: the parameter, and who brings it."""

    __slots__ = ("_guard", "_tensor")

    def __init__(self, guard: Guard, tensor: Any) -> None:
        self._guard, self._tensor = guard, tensor

    def tensor(self) -> Any:
        """The parameter, with its bytes here."""
        self._guard.look(self._tensor)
        return self._tensor


class _Ticket:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "_dtype", "_offset", "_saved", "_size", "_stride")

    def __init__(self, saved: Saved, tensor: Any) -> None:
        self._saved = saved
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> Any:
        """The tensor again. `RuntimeError`, as torch has it, if it was written since it was saved."""
        self._saved.ensure()
        if self._saved.version():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self._saved.name}, of size {list(self._size)}"
            )
        found = torch.empty(0, dtype=self._dtype)
        return found.set_(self._saved.storage, self._offset, self._size, self._stride)


def _unmoved(trace: Trace, kind: str) -> Trace:
    """The trace with all of a kind left where it is."""
    kinds = trace.kinds.copy()
    kinds[kinds == KINDS.index(kind)] = KINDS.index("temporary")
    return dataclasses.replace(trace, kinds=kinds)


def _check_model(model: Any) -> None:
    if type(model).__module__.startswith("torch._dynamo"):
        raise NotSupported(
            "a model that is compiled as a whole gets all its saved tensors back at once, so nothing would be gained: "
            "compile its blocks one by one instead"
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise NotSupported(f"this version moves tensors of host memory only, and the model is on {sorted(devices)}")
