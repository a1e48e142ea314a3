"""`Offload`: runs a training step in less memory than it needs, by moving tensors that wait.

Theory. The first steps run within the budget without a plan (`demand`). One of them is plain, since optimizers make
their state in the very first, and one is profiled. The profile gives a trace. Trace and measured speed of the tiers
give a plan, and each step from then on follows it (`runner`). Parameters, gradients and optimizer state are emptied and
filled in place. What autograd saves moves by tickets (`tickets`).

The plan is made again for the times of steps that followed it (`review`). Where later steps differ from the
prediction, the tiers are measured first.

A step whose first forward pass gets more bytes than any that was planned for is profiled from there on, and the plan is
then made for it; smaller ones follow that plan. So where lengths vary there is a plan for the longest so far.

A step that differs otherwise from the profiled one continues without a plan, within the budget, from the point where
that shows, or from the next point outside the backward pass. After PATIENCE such steps in a row the next ones are
profiled anew. If everything fits into the budget, nothing moves and nothing of this is on the way.

Between steps part of the model is away. Whatever touches it from Python has it loaded first (`guard`). A forward pass
without gradients loads what it uses, within the budget. So do `state_dict` and `load_state_dict` of an `Offload`, one
tensor after the other. A forward pass with gradients, `model.state_dict()` and `optimizer.state_dict()` load all of it.
To save or change everything in another way, or from another thread, use `with off.whole():`.

Refused, with the reason: a model that is compiled as a whole (its saved tensors come back all at once, so nothing is
gained), other saved-tensor hooks around the step (only the innermost are called), optimizers that cannot step in
chunks, models on several devices.

Invariants. (1) Results equal those without offloading, bit by bit. (2) After `close`, model and optimizer are as they
were given, whole and without hooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from forebay.core.errors import Busy, Closed, ForebayError, Invalid, NotSupported
from forebay.core.quantity import parse_size
from forebay.offload.building import Initialize, build, is_on_meta, move_to
from forebay.offload.demand import Demand
from forebay.offload.guard import Guard
from forebay.offload.movables import Books
from forebay.offload.names import Names
from forebay.offload.planning.choose import Choice, choose
from forebay.offload.planning.hardware import Hardware, Tier
from forebay.offload.planning.itinerary import itinerary
from forebay.offload.planning.plan import SIZE_BYTES_MIN
from forebay.offload.planning.trace import KINDS, Trace, unmoved
from forebay.offload.refusals import check_model, check_numbers, check_tiers
from forebay.offload.report import Report, explain, report_of
from forebay.offload.rescue import Rescue
from forebay.offload.review import Review
from forebay.offload.runner import Runner, StepFacts
from forebay.offload.states import copied, load_optimizer
from forebay.offload.tickets import Tickets
from forebay.offload.tiers.device_memory import accelerators
from forebay.offload.tiers.link import measure_link
from forebay.offload.tiers.tiers import Storage
from forebay.offload.tracing.chunks import check_separable, is_of_torch
from forebay.offload.tracing.compiled import Around, Hook, compiled_modules, show_regions
from forebay.offload.tracing.dispatch import in_backward
from forebay.offload.tracing.points import Points
from forebay.offload.tracing.profile import Profiler
from forebay.offload.tracing.saved import SavedNumbers
from forebay.offload.tracing.storages import Storages
from forebay.offload.tracing.timing import scaled

PLAIN_STEPS = 1  # in which optimizers make their state
REFUSED_STEPS = 16  # without a plan, once none was found: then a step is profiled again
PATIENCE = 3  # steps in a row that were not like the profiled one, before it is profiled anew
CHUNK_BYTES = 64 << 20


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

    `separable` says of an optimizer of a class of yours, made from one of torch's, that it updates each parameter by
    itself as that does: from its own gradient, state and group. What of the model is on `meta` gets memory on `device`,
    and values by each module's `reset_parameters()` or by `initialize(module)`, within the budget. `experimental` takes
    models on an accelerator, on which this has run a little, and not all of it well (docs/offload.md).
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
        separable: bool = False,
        device: Any = None,
        initialize: Initialize | None = None,
        experimental: bool = False,
    ) -> None:
        self._device = check_model(model, device, experimental=experimental)
        self.budget_bytes = parse_size(budget) if isinstance(budget, str) else budget
        check_numbers(self.budget_bytes, chunk_bytes, size_bytes_min)
        check_separable(optimizer, trusted=separable)
        self._disks, self._hosts = check_tiers(tiers)
        self.model, self.optimizer = model, optimizer
        self._size_bytes_min = size_bytes_min
        self._chunk_bytes = chunk_bytes
        self.trace: Trace | None = None
        self.choice: Choice | None = None
        self.steps: list[StepFacts] = []  # that followed a plan
        self._runner: Runner | None = None
        self._review = Review(self._device)
        self._moving: dict[str, int] = {}  # of what autograd saves: bytes, by name
        self._unlike = self._watched = 0
        self._since = 0
        self._refused = ""  # why there is no plan any more
        self._inside = self._closed = self._evaluates = self._in_part = False
        self._here_bytes: dict[str, int] = {}
        self._input_bytes = 0  # of a forward pass in the profiled step, the largest
        self._hopeless_bytes = math.inf  # of passes that no plan was found for
        self._passes = 0  # forward, in this step
        self._late = ExitStack()
        self._profiler: Profiler | None = None  # of a step that turned out larger
        self._moved = (0, 0)  # bytes written and read before this step
        self._books = Books([*self._disks, *self._hosts])
        self._names = Names(model, optimizer, self._books, self._device)
        self._books.look_up = self._names.tensor
        self._guard = Guard(self._books)
        self._points = self._new_points()
        find, at = self._names.find, self._names.at
        self._demand = Demand(self._books, find, at, self.budget_bytes, self._device, size_bytes_min=size_bytes_min)
        self._tickets = self._demand.tickets = self._names.tickets = Tickets(
            SavedNumbers(model, optimizer),
            self._books,
            self._guard,
            larger=self._is_larger,
            seen=self._demand.saw,
            asked=self._demand.asked,
        )
        self._rescue = Rescue(self._books, self._demand.used, self._shortages)
        self._link_bytes_s = math.inf, math.inf  # out and in
        self.hardware = self._opened(tiers)
        self._heard: Any = None
        self._handles = self._hooks()
        self._regions: set[int] = set()  # by `id`: compiled modules that are watched
        self._see_regions()
        if is_on_meta(model):
            self._build(initialize)

    def _build(self, initialize: Initialize | None) -> None:
        """Give a model on `meta` its memory. If that fails, nothing of ours is left."""
        names = {id(parameter): f"parameter {name}" for name, parameter in self._names.parameters.items()}

        def learn(tensor: Any) -> None:
            if id(tensor) in names:
                self._demand.learn([names[id(tensor)]])

        self._guard.put()
        self._demand.start()
        try:
            build(self.model, self._device, initialize, learn)
        except BaseException:
            self._demand.stop()
            self._drop()
            raise
        self._demand.stop()

    def _opened(self, tiers: Sequence[Storage]) -> Hardware:
        """What there is to move to, measured; all tiers are open then, or none."""
        opened: list[Storage] = []
        try:
            for tier in tiers:
                tier.open()
                opened.append(tier)
            if self._device.type == "cuda":  # once: later there may be no memory for it
                self._link_bytes_s = measure_link(self._device)
            return self._measured()
        except BaseException:
            for tier in opened:
                tier.close()
            raise

    def _hooks(self) -> list[Any]:
        """What stays at model and optimizer until the end."""
        self._hear_forward()
        return [
            self.model.register_forward_hook(Hook(self._after_forward), always_call=True),
            self.model.register_state_dict_pre_hook(Hook(self._come_back_outside)),
            self.optimizer.register_state_dict_pre_hook(Hook(self._come_back_outside)),
            self.optimizer.register_step_post_hook(Hook(self._all_written)),
        ]

    def _hear_forward(self) -> None:
        """Before all points of the model's forward pass."""
        if self._heard is not None:
            self._heard.remove()
        self._heard = self.model.register_forward_pre_hook(Hook(self._before_forward), prepend=True, with_kwargs=True)

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except ForebayError as failed:
            if error is None:
                raise
            error.add_note(f"and what had left could not be brought back: {failed.message}")

    def close(self, *, to: Any = None) -> None:
        """Bring everything back, remove all hooks, close the tiers. May be called again. If a tier cannot be read it is
        closed all the same, and the error is raised: what was there is lost.

        Where not everything fits into the device's memory: `to="cpu"` leaves model and optimizer in host memory, and
        `to="meta"` without any bytes. Both go tensor by tensor, within the budget."""
        if self._closed:
            return
        if self._inside:
            raise Invalid("this Offload is in the middle of a step: close it after that")
        self._end_evaluation()
        if to is not None:
            self._leave_for(torch.device(to))
        try:
            self._names.come_back()
        finally:
            self._drop()

    def _leave_for(self, device: Any) -> None:
        with self._in_parts():
            self._let_go()  # hooks of ours would go with the tensors
            if device.type == "meta":
                with self._books:
                    move_to(self.model, self.optimizer, device, None)
            else:
                move_to(self.model, self.optimizer, device, self._demand.bring)

    def _drop(self) -> None:
        """Nothing of ours is left, and what is away is lost."""
        self._closed = True
        self._let_go()
        for handle in (self._heard, *self._handles):
            handle.remove()
        for movable in self._names.movables():
            with suppress(ForebayError):  # the first of them is on its way
                movable.die()
        for tier in self._books.tiers:
            tier.close()

    # --- telling -----------------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """What the steps came to, and what was predicted; print it."""
        steps = self.steps[self._since :]
        return report_of(self.trace, self.choice, steps, self.budget_bytes, self._books.failures, self._refused)

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
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotSupported(
                "a CUDA graph is being captured: it would replay the step with addresses that tensors have left by "
                "then; run the step without one (and torch.compile without mode='reduce-overhead')"
            )
        self._end_evaluation()
        self._inside = True
        began_s = perf_counter()
        try:
            if (runner := self._runner) is not None:
                with self._following(runner):
                    yield
                self._told(runner, perf_counter() - began_s)
            elif self.choice is None:
                with self._watching():
                    yield
            else:  # all fits: nothing of ours is on the way
                choice = self.choice
                with self._perhaps_profiled():
                    yield
                facts = StepFacts(step_s=perf_counter() - began_s, lost=self.choice is not choice)
                self._add(facts)
                self.steps.append(facts)
        finally:
            self._inside = False
            self._demand.stop()
            self._books.make_room = self._books.relieve = None

    def _at(self, name: str) -> None:
        if not self._inside:
            return
        runner = self._runner
        if runner is not None and not runner.facts.lost:
            self._review.at(name, self._books.waited_s + runner.facts.memory_s)
            with self._books:
                runner.at(name)
        elif self._demand.is_on:
            self._demand.at(name)
        elif runner is not None and not in_backward():
            self._demand.start(self._unknown_bytes(runner.operator))

    def _new_points(self) -> Points:
        points = Points(self.model, self.optimizer, self._at, chunk_bytes=self._chunk_bytes, around=self._updating)
        self._names.chunks = points.chunks
        return points

    @contextmanager
    def _updating(self, parameters: Sequence[Any]) -> Iterator[None]:
        """The optimizer updates these and looks at nothing else, so not each of its calls has to be guarded."""
        if self._runner is None or self._runner.facts.lost or not is_of_torch(self.optimizer):
            yield
            return
        held: list[Any] = []
        with self._books:
            for parameter in parameters:
                if parameter.grad is not None:  # the step skips the others
                    held += [parameter, parameter.grad, *self.optimizer.state.get(parameter, {}).values()]
            self._guard.changes(held)
        self._guard.take_off()
        try:
            yield
        finally:
            self._guard.put()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """A step without a plan."""
        self._see_regions()
        self._names.renew()
        self._points = self._new_points()  # model and optimizer may have others now
        self._begin_step()
        self._tickets.moving = None
        self._guard.put()
        if self._watched < PLAIN_STEPS:
            self._points.attach()
            self._guard.between = self._points.between
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._tickets.pack, self._tickets.unpack):
                    self._demand.start()
                    self._points.begin_step()
                    yield
                    self._points.end_step()
            finally:
                self._points.detach()
            self._watched += 1
            return
        with Profiler(self.model, self.optimizer, chunk_bytes=self._chunk_bytes, company=self._demand) as profiler:
            self._guard.between = profiler.between
            yield
        if profiler.operators:  # else nothing was done in this step: the next one is profiled
            self._plan_for(profiler)
            self._watched += 1

    def _plan_for(self, profiler: Profiler) -> bool:
        """Follow a plan for what was profiled from the next step on, if there is one."""
        self._demand.stop()
        trace = profiler.trace(type(self.model).__name__)
        here_bytes, self._here_bytes = self._here_bytes, profiler.here_bytes
        if self._follow(trace if self._names.moves_gradients else unmoved(trace, "gradient"), anew=True):
            return True
        self._here_bytes = here_bytes
        return False

    @contextmanager
    def _perhaps_profiled(self) -> Iterator[None]:
        """What the program does in a step. If that is larger than all that was planned for, it is profiled from its
        first forward pass on, and the next steps have a plan for it."""
        planned_bytes, self._passes = self._input_bytes, 0
        try:
            with ExitStack() as self._late:
                yield
            if self._profiler is not None and self._profiler.operators and not self._plan_for(self._profiler):
                self._hopeless_bytes = min(self._hopeless_bytes, self._input_bytes)
                self._input_bytes = planned_bytes
        except BaseException:
            self._input_bytes = planned_bytes
            raise
        finally:
            self._profiler = None
            if self._runner is not None:
                self._points.attach()

    def _profile_from_here(self) -> None:
        """The first forward pass of a step has begun, and it is a larger one."""
        if self._runner is not None:
            self._runner.leave()
            self._points.detach()
        else:
            self._begin_step()
        self._tickets.moving = None
        self._guard.put()
        dropped = [parameter for parameter in self._names.parameters.values() if parameter.grad is None]
        profiler = Profiler(
            self.model, self.optimizer, chunk_bytes=self._chunk_bytes, company=self._demand, dropped=dropped
        )
        self._profiler = self._late.enter_context(profiler)
        self._guard.between = profiler.between
        profiler.begin_forward(self.model)

    def _is_first_pass(self) -> bool:
        """Whether nothing was done in this step before the forward pass that begins, and it can be profiled from
        here."""
        ours = (self._tickets.pack, self._tickets.unpack) if self._runner is not None else None
        if torch._C._autograd._top_saved_tensors_default_hooks(True) != ours or self._passes != 1:
            return False
        return self._runner is None or not (self._runner.has_begun or self._runner.facts.lost)

    @contextmanager
    def _following(self, runner: Runner) -> Iterator[None]:
        self._begin_step()
        self._guard.put()
        self._tickets.moving = self._moving
        self._guard.between = self._points.between
        runner.begin_step()
        self._books.make_room, self._books.relieve = runner.make_room, runner.relieve
        if self._device.type in accelerators:
            runner.facts.watched = self._rescue.put()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._tickets.pack, self._tickets.unpack):
                self._points.begin_step()
                with self._perhaps_profiled():
                    yield
                if not runner.is_left:
                    self._points.end_step()
        except torch.OutOfMemoryError as error:
            self._rescue.failed(error, updating=runner.is_updating)
            raise
        finally:
            self._rescue.take_off()
        runner.end_step()

    def _shortages(self) -> int:
        return accelerators[self._device.type].shortages(self._device)

    def _begin_step(self) -> None:
        self._books.shown.clear()
        self._tickets.begin_step()
        self._names.bury()

    def _is_larger(self) -> None:
        if self._runner is not None:
            self._runner.is_larger = True

    def _lost(self) -> None:
        """The runner is: the rest of the step goes without a plan. In a backward pass no operator is seen coming before
        that is over; so what autograd adds to has to be here, and all else is brought by who asks for it."""
        self._tickets.moving = None
        if in_backward():
            for name in self._names.gradients():
                if (gradient := self._names.find(name)) is not None:
                    gradient.ensure()
        elif self._runner is not None:
            self._demand.start(self._unknown_bytes(self._runner.operator))

    def _unknown_bytes(self, operator: int) -> int:
        """What lives before an operator, by the trace, that cannot be found by a name."""
        trace, choice = self.trace, self.choice
        assert trace is not None, "a plan without a trace"
        assert choice is not None, "a plan that was not chosen"
        small = (trace.kinds == KINDS.index("activation")) & (trace.sizes_bytes < choice.plan.size_bytes_min)
        nameless = small | (trace.kinds == KINDS.index("temporary"))
        alive = (trace.births < operator) & (trace.deaths >= operator)
        return int(trace.sizes_bytes[nameless & alive].sum())

    def _told(self, runner: Runner, step_s: float) -> None:
        """A step is over that followed a plan."""
        self._demand.stop()
        facts = runner.facts
        facts.step_s = step_s
        self._add(facts)
        facts.written_bytes = sum(tier.bytes_written for tier in self._books.tiers) - self._moved[0]
        facts.read_bytes = sum(tier.bytes_read for tier in self._books.tiers) - self._moved[1]
        self._moved = (self._moved[0] + facts.written_bytes, self._moved[1] + facts.read_bytes)
        self.steps.append(facts)
        self._unlike = self._unlike + 1 if facts.lost and runner is self._runner else 0
        if self._unlike >= PATIENCE:
            self._let_go()
            self.choice, self._unlike, self._watched, self._input_bytes = None, 0, PLAIN_STEPS, 0
            self._hopeless_bytes = math.inf
        elif not facts.lost and self._review.is_due(facts):
            self._look_again()

    def _add(self, facts: StepFacts) -> None:
        """What the part of a step came to that went without the plan."""
        if facts.lost:
            more = self._demand.facts
            facts.memory_s += more.memory_s
            facts.unplanned += more.unplanned
            facts.over_bytes = max(facts.over_bytes, more.over_bytes)
            facts.most_bytes = max(facts.most_bytes, more.most_bytes)

    def _let_go(self) -> None:
        """No plan is followed any more, and nothing of ours is on the way of a step that has everything."""
        self._points.detach()
        self._runner = None
        if self._closed:
            self._guard.take_off()

    # --- what is away ------------------------------------------------------------------------------------------------
    @contextmanager
    def whole(self) -> Iterator[None]:
        """All of the model, its gradients and the optimizer's state are here: to evaluate, to save, to change weights.
        Changes through `.data` count as well."""
        self._end_evaluation()
        self._names.come_back()
        try:
            yield
        finally:
            self._names.written()

    def state_dict(self) -> dict[str, Any]:
        """`{"model": …, "optimizer": …}`: what their own `state_dict` says, in copies in host memory. They are made one
        after the other, within the budget. Between steps."""
        with self._in_parts():
            state = {"model": self.model.state_dict(keep_vars=True), "optimizer": self.optimizer.state_dict()}
            copies: dict[str, Any] = copied(state, self._demand.bring)
            return copies

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, or the two of the same model and optimizer from elsewhere; within the budget, in the
        place of what is there. Between steps. `RuntimeError` and `ValueError` as of torch if it does not fit them: what
        was loaded before that stays."""
        with self._in_parts():
            self.model.load_state_dict(state["model"])  # each of its copies passes the guard, which brings the weight
            names = {id(parameter): name for name, parameter in self._names.parameters.items()}

            def learn(parameter: Any) -> None:
                if (name := names.get(id(parameter))) is not None:
                    self._demand.learn(self._names.states(parameter, name))

            load_optimizer(self.optimizer, state["optimizer"], self._demand.make_room, learn)

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        """Between steps, what comes sends away what was used longest ago."""
        if self._closed:
            raise Closed("this Offload is closed: ask model and optimizer themselves")
        if self._inside:
            raise Invalid("this Offload is in the middle of a step: save and load between two of them")
        self._end_evaluation()
        self._names.renew()
        ledger = Storages(self._device, self._demand.size_of)
        self._in_part = True
        self._guard.put()
        self._demand.begin(ledger)
        try:
            yield
        finally:
            self._demand.end()
            ledger.close()
            self._in_part = False
            if self.choice is not None and self._runner is None and not self._books.away_bytes:
                self._guard.take_off()

    def _come_back_outside(self, *_: Any) -> None:
        if not (self._inside or self._in_part):
            self._names.come_back()

    def _before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside:
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            self._compare(sum(tensor.numel() * tensor.element_size() for tensor in given))
        elif torch.is_grad_enabled():
            self._end_evaluation()
            self._names.come_back()
        elif self._books.away_bytes and not self._evaluates:
            self._evaluates = True
            self._guard.take_off()  # torch takes other ways through some modules where a mode of functions is
            self._demand.start()

    def _see_regions(self) -> None:
        show_regions()
        for module in compiled_modules(self.model):
            if id(module) not in self._regions:
                self._regions.add(id(module))
                self._handles.append(Around(module, self._before_region))

    def _before_region(self, module: Any, _: Any) -> None:
        """What is compiled reads memory by itself."""
        if self._books.absent:
            held = [*module.parameters(), *module.buffers()]
            if self._demand.is_on:
                self._demand.bring(held)
            else:
                for tensor in held:
                    self._guard.look(tensor)

    def _all_written(self, *_: Any) -> None:
        """The optimizer stepped, and no plan or operator says what it wrote."""
        if not self._inside or (self._runner is not None and self._runner.facts.lost):
            self._names.written()

    def _compare(self, input_bytes: int) -> None:
        """A batch that is larger than that of the profiled step is seen here before it takes more memory."""
        self._passes += 1
        if self.choice is None or self._profiler is not None:
            self._input_bytes = max(self._input_bytes, input_bytes)
        elif input_bytes > self._input_bytes:
            if input_bytes < self._hopeless_bytes and self._is_first_pass():
                self._profile_from_here()
                self._input_bytes = input_bytes
            elif self._runner is not None:
                self._runner.is_larger = True
            else:  # it all fitted, and this may not: the rest of this step is within the budget, the next is watched
                self._guard.put()
                self._demand.start()
                self.choice, self._watched, self._input_bytes = None, PLAIN_STEPS, 0

    def _after_forward(self, *_: Any) -> None:
        if not self._inside:
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        """Also where one was interrupted: torch calls no hooks then."""
        if self._evaluates:
            self._evaluates = False
            self._demand.stop()
            self._guard.put()

    # --- planning ----------------------------------------------------------------------------------------------------
    def _measured(self) -> Hardware:
        disk, host = next(iter(self._disks), None), next(iter(self._hosts), None)
        write_bytes_s = read_bytes_s = 0.0
        if disk is not None:
            found = disk.check_speed()
            write_bytes_s, read_bytes_s = found.write_bytes_s, found.read_bytes_s
        return Hardware(
            self.budget_bytes,
            link_out_bytes_s=self._link_bytes_s[0],
            link_in_bytes_s=self._link_bytes_s[1],
            disk_bytes=disk.room_bytes if disk else 0,
            disk_write_bytes_s=write_bytes_s,
            disk_read_bytes_s=read_bytes_s,
            host_bytes=host.room_bytes if host else 0,
        )

    def _follow(self, trace: Trace, *, anew: bool = False) -> bool:
        """Plan for a trace, and follow the plan from the next step on; False if there is none. `anew`: its times are a
        profiler's."""
        replays_max = 0 if anew else None  # such a plan is followed for a few steps only: not worth the time
        try:
            choice, _ = choose(trace, self.hardware, size_bytes_min=self._size_bytes_min, replays_max=replays_max)
        except Invalid as refused:
            if self.trace is None:
                raise  # at the beginning, when whoever gave the budget is still there
            self._since = len(self.steps)
            self._review.restart()
            if self._runner is None:
                self._refused = refused.message
                self._watched = PLAIN_STEPS - REFUSED_STEPS
            return False  # with the plan that there is, if there is one
        self.trace, self.choice, self._refused = trace, choice, ""
        self._since = len(self.steps)
        self._moved = (
            sum(tier.bytes_written for tier in self._books.tiers),
            sum(tier.bytes_read for tier in self._books.tiers),
        )
        if self.choice.plan.is_idle:
            self._names.come_back()
            self._let_go()
            self._guard.take_off()
            return True
        self._review.begin(profiled=anew)
        kinds = zip(trace.tensors, trace.kinds.tolist(), trace.sizes_bytes.tolist(), strict=True)
        least = self.choice.plan.size_bytes_min
        self._moving = {name: size for name, kind, size in kinds if KINDS[kind] == "activation" and size >= least}
        self._points.attach()
        self._hear_forward()
        self._guard.put()
        self._rescue.renew()
        tiers: dict[int, Storage] = {Tier.DISK: self._disks[0]} if self._disks else {}
        tiers |= {Tier.HOST: self._hosts[0]} if self._hosts else {}
        self._runner = Runner(
            itinerary(trace, self.choice.plan, self._here_bytes),
            self._names.find,
            self._lost,
            self._books,
            tiers,
            self.budget_bytes,
            self._names.movables(),
        )
        return True

    def _look_again(self) -> None:
        """Whether the plan is still good; if not, another one."""
        assert self.trace is not None, "a plan without a trace"
        assert self.choice is not None, "followed without a plan"
        seconds = self._review.look(self.choice.replayed.step_s)
        if seconds is None:
            return
        if self._review.has_drifted:
            with suppress(Busy):  # no room to try: the bandwidth stays what it was believed to be
                self.hardware = self._measured()
        self._follow(scaled(self.trace, seconds))
