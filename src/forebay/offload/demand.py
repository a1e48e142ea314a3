"""Runs steps without a plan within the budget: brings what an operator uses, and evicts the least recently used.

Theory. Before there is a plan, and in steps that differ from the planned one, nobody knows what will be needed when.
But every operator below autograd passes a dispatch mode with its tensors. Those that are away are loaded before it
runs. If they and the operator's outputs do not fit, storages leave, least recently used first. This is virtual memory
for tensors, and as slow: nothing is fetched ahead. A training step goes through its layers forward and then backward,
so the least recently used storage is mostly the one needed last. Parameters, gradients, optimizer state and what
autograd saves can leave. A batch cannot: its owner holds it until the backward pass, so nothing would be freed.

The size of an operator's outputs is found beforehand on tensors of the meta device, once per combination of shapes and
arguments. An operator without such an answer counts as its largest tensor. Memory that operators need inside is
unknown. If an accelerator's allocator runs short, more leaves, and an operator that writes nothing is run again.

On an accelerator, memory is what its allocator reports. In host memory a ledger counts the storages that operators made
and that live, without those whose bytes are away. A ledger that begins within a step is told how much older memory is
neither the model's nor saved.

The same works around a forward pass without gradients between two steps.

Rejected: acting at points only (autograd uses tensors below Python, where only a dispatch mode sees it coming); asking
fake tensors for sizes (they look at storages, and those that are away have none).

Invariants. (1) What an operator uses is here while it runs. (2) Memory stays within the budget as far as eviction can
help; `facts.over_bytes` is the rest. (3) Nothing here keeps a storage alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from time import perf_counter
from typing import Any

import torch

from forebay.offload.movables import Books, Lasting, Movable, Residency, Saved
from forebay.offload.runner import StepFacts
from forebay.offload.tickets import Tickets
from forebay.offload.tracing.compiled import REGION
from forebay.offload.tracing.dispatch import OperatorMode, with_memory
from forebay.offload.tracing.profile import Company
from forebay.offload.tracing.storages import (
    Seen,
    Storages,
    arguments_written,
    bytes_here,
    does_no_work,
    parts,
    tensors,
    writes_an_input,
)

_META = torch.device("meta")


class Demand(Company):
    """Keeps steps within `budget_bytes`, between `start` and `stop` (or, with a profiler, `begin` and `end`).

    `find(name)` gives what lasts by its name, and `names(point)` the names that there may be at a point: all of them,
    least needed first, for None.
    """

    def __init__(
        self,
        books: Books,
        find: Callable[[str], Movable | None],
        names: Callable[[str | None], Iterable[str]],
        budget_bytes: int,
        device: Any,
        *,
        size_bytes_min: int,
    ) -> None:
        self.facts = StepFacts()
        self.is_on = False
        self._books, self._find, self._names = books, find, names
        self._budget, self._device, self._size_bytes_min = budget_bytes, device, size_bytes_min
        self._ledger = Storages(device, self.size_of)
        self._mode = OperatorMode(self._dispatch)
        self._profiled = False
        self._unknown_bytes = 0
        self._recent: dict[int, weakref.ref[Movable]] = {}  # what is here, least recently used first
        self._gone: weakref.WeakKeyDictionary[Saved, Seen] = weakref.WeakKeyDictionary()
        self._kept: set[Movable] = set()  # of the operator that is about to run
        self._makes: dict[Hashable, int] = {}
        self.tickets: Tickets | None = None

    # --- life --------------------------------------------------------------------------------------------------------
    def start(self, unknown_bytes: int = 0) -> None:
        """From now on operators of this thread are watched, and backward passes that it begins. `unknown_bytes` live
        that are neither the model's nor saved, and are taken to live on."""
        if not self.is_on:
            self._open(Storages(self._device, self.size_of))
            self._unknown_bytes = unknown_bytes
            self._profiled = False
            self._mode.put()

    def stop(self) -> None:
        """No more."""
        if self.is_on and not self._profiled:
            self._mode.take_off()
            self._ledger.close()
        self._close()

    def begin(self, storages: Storages) -> None:
        self._open(storages)
        self._profiled = True

    def end(self) -> None:
        self._close()

    def _open(self, ledger: Storages) -> None:
        self.is_on = True
        self._ledger = ledger
        self._unknown_bytes = 0
        self._recent.clear()
        self._gone.clear()
        self.facts = StepFacts()
        self._waited_s = self._books.waited_s
        self._books.make_room, self._books.relieve = self._room_for, self._evict
        self._books.brought = self._use  # it can leave again, whoever wanted it
        with self._books:
            self._learn(self._names(None))
            for saved in self.tickets.alive() if self.tickets is not None else ():
                self._use(saved)
                if saved.storage is not None:
                    self._ledger.know(saved.storage)

    def _close(self) -> None:
        if self.is_on:
            self.is_on = False
            self.facts.missing_s = self._books.waited_s - self._waited_s
            self._books.make_room = self._books.relieve = self._books.brought = None

    # --- what is there -----------------------------------------------------------------------------------------------
    def at(self, name: str) -> None:
        """A point: gradients and state that came into being are known by their names from now on."""
        with self._books:
            self._learn(self._names(name))

    def learn(self, names: Iterable[str]) -> None:
        """These came into being."""
        with self._books:
            self._learn(names)

    def make_room(self, size_bytes: int) -> None:
        """So much is about to come into being."""
        with self._books:
            self._room_for(size_bytes)

    def pack(self, tensor: Any) -> Any:
        return tensor if self.tickets is None else self.tickets.pack(tensor)

    def unpack(self, packed: Any) -> Any:
        return packed if self.tickets is None else self.tickets.unpack(packed)

    def _learn(self, names: Iterable[str]) -> None:
        for name in names:
            movable = self._find(name)
            if isinstance(movable, Lasting):
                self._use(movable)
                movable.tell(lambda tensor: self._ledger.of(tensor, existed=True))

    def saw(self, saved: Saved) -> None:
        """Autograd saved a storage."""
        if self.is_on:
            self._use(saved)

    def asked(self, saved: Saved) -> None:
        """Autograd asks for one that it saved."""
        if self.is_on:
            saved.ensure()
            self._use(saved)
            seen = self._gone.pop(saved, None)
            if seen is not None:
                self._ledger.adopt(saved.storage, seen)
            else:
                self._ledger.know(saved.storage)
                if self._profiled and saved.is_held_elsewhere():
                    self._ledger.hold_on_to(saved.storage, f"{saved.name}, held")

    def gone_bytes(self) -> int:
        return sum(seen.size_bytes for seen in self._gone.values())

    def hollow_bytes(self) -> int:
        return self._books.hollow_bytes

    def size_of(self, storage: Any) -> int:
        movable = self._books.absent.get(storage._cdata)
        return movable.size_bytes if movable is not None and movable.is_at(storage) else bytes_here(storage)

    def _use(self, movable: Movable) -> None:
        key = id(movable)
        self._recent.pop(key, None)
        self._recent[key] = weakref.ref(movable)

    # --- operators ---------------------------------------------------------------------------------------------------
    def before(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._books:
            makes = 0 if does_no_work(operator) else self._made_by(operator, args, kwargs)
            self._bring([*self.used(args), *self.used(kwargs.values())], makes)
            if writes_an_input(operator):
                for movable in self.used(arguments_written(operator, args, kwargs)):
                    movable.written()

    def bring(self, values: Iterable[Any]) -> None:
        """Tensors are about to be used together, by what passes no mode."""
        with self._books:
            self._bring(self.used(values), 0)

    def _bring(self, used: Iterable[Movable], more_bytes: int) -> None:
        self._kept.update(used)
        try:
            self._room_for(more_bytes + sum(each.size_bytes for each in self._kept if each.residency is Residency.AWAY))
            for movable in self._kept:
                movable.ensure()
                self._use(movable)
        finally:
            self._kept.clear()

    def after(self) -> None:
        self.facts.most_bytes = max(self.facts.most_bytes, self.living_bytes())

    def _dispatch(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in (*tensors(args), *tensors(list(kwargs.values()))):
            self._ledger.of(tensor, existed=True)
        self.before(operator, args, kwargs)
        output = with_memory(lambda: operator(*args, **kwargs), lambda: self.relieve(operator, args, kwargs))
        self._ledger.born(output)
        self.after()
        return output

    def used(self, values: Iterable[Any]) -> Iterator[Movable]:
        """What lasts, of these tensors."""
        for value in values:
            for tensor in tensors(value):
                for part in parts(tensor):
                    movable = self._books.lasting.get(part.untyped_storage()._cdata)
                    if movable is not None and movable.is_at(part.untyped_storage()):
                        yield movable

    def _made_by(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Bytes of the storages that an operator will bring forth."""
        try:
            key = operator, _shapes(args), _shapes(kwargs)
            known = self._makes.get(key)
        except TypeError:  # an argument that cannot be told from others
            return _bytes_made(operator, args, kwargs)
        if known is None:
            known = self._makes[key] = _bytes_made(operator, args, kwargs)
        return known

    # --- memory ------------------------------------------------------------------------------------------------------
    def living_bytes(self) -> int:
        """What is in memory."""
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return self._ledger.living_bytes + self._unknown_bytes - self._books.hollow_bytes

    def _room_for(self, size_bytes: int) -> None:
        """See to it that so much fits."""
        living = self.living_bytes()
        if living + size_bytes <= self._budget:
            return
        began_s = perf_counter()
        while living + size_bytes > self._budget and self._evict():
            living = self.living_bytes()
        self.facts.memory_s += perf_counter() - began_s
        self.facts.over_bytes = max(self.facts.over_bytes, living + size_bytes - self._budget)

    def relieve(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if writes_an_input(operator):
            return False  # perhaps it did already
        with self._books:
            self._kept.update(self.used(args), self.used(kwargs.values()))
            try:
                return self._evict()
            finally:
                self._kept.clear()

    def _evict(self) -> bool:
        """Send away what was used longest ago, what is below `size_bytes_min` after all else; False if nothing is left
        that could go."""
        return self._evict_from(self._size_bytes_min) or (self._size_bytes_min > 1 and self._evict_from(1))

    def _evict_from(self, size_bytes_min: int) -> bool:
        for key, ref in list(self._recent.items()):
            movable = ref()
            if movable is not None and movable.size_bytes < size_bytes_min:
                continue
            if movable is None or (isinstance(movable, Lasting) and movable.is_dropped()):
                del self._recent[key]
            elif (
                movable not in self._kept
                and movable not in self._books.together
                and not movable.is_held_elsewhere()
                and self._send(movable)
            ):
                self._recent.pop(key, None)
                self.facts.unplanned += 1
                return True
        return False

    def _send(self, movable: Movable) -> bool:
        movable.settle()
        if movable.residency is Residency.HERE:
            seen = self._ledger.find(movable.storage) if isinstance(movable, Saved) else None
            for tier in self._books.tiers:
                if tier not in self._books.failed and movable.leave(tier, 0.0):
                    movable.wait()
                    break
            if seen is not None and Residency(movable.residency) is Residency.AWAY:
                assert isinstance(movable, Saved), "only they are other storages when they are back"
                self._gone[movable] = seen
        elif movable.residency is Residency.STORING:
            movable.wait()
        return Residency(movable.residency) is Residency.AWAY


def _shapes(value: Any) -> Hashable:
    """An argument as far as what an operator makes depends on it. `TypeError` if that cannot be said."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise TypeError("its shape is not one")
        return value.dtype, value.shape, value.stride() if value.layout is torch.strided else str(value.layout)
    if isinstance(value, list | tuple):
        return tuple(_shapes(part) for part in value)
    if isinstance(value, dict):
        return tuple((name, _shapes(part)) for name, part in value.items())
    if isinstance(value, torch.Generator):
        return "generator"
    hash(value)
    return type(value), value


def _bytes_made(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    try:
        held: dict[int, Any] = {}
        run = REGION.on_meta if operator is REGION else operator
        output = run(*_on_meta(args, held), **({} if operator is REGION else _on_meta(kwargs, held)))
        made = {id(part.untyped_storage()): part for tensor in tensors(output) for part in parts(tensor)}
        old = {id(tensor.untyped_storage()) for tensor in held.values()}
        return sum(part.untyped_storage().nbytes() for key, part in made.items() if key not in old)
    except Exception:  # whatever an operator does that is not made for this
        used = [*tensors(args), *tensors(list(kwargs.values()))]
        return max((tensor.numel() * tensor.element_size() for tensor in used), default=0)


def _on_meta(value: Any, held: dict[int, Any]) -> Any:
    """The same argument without bytes."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise NotImplementedError("there are none on the meta device")
        if id(value) not in held:
            held[id(value)] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
        return held[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(part, held) for part in value)
    if isinstance(value, dict):
        return {name: _on_meta(part, held) for name, part in value.items()}
    if isinstance(value, torch.device):
        return _META
    return None if isinstance(value, torch.Generator) else value
