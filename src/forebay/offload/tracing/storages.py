"""A ledger of what a step's operators do with storages: their lives and uses.

Theory. A tensor of a trace is a storage. The ledger knows a storage by a weak reference to its Python object, which
torch keeps as long as the storage lives. So the birth is the operator whose output is a new storage, and the death is
when the reference dies, whoever held it last. A storage that is first seen as an input was there before. An operator
writes what its schema marks as written, and its new outputs.

Operators that only make views touch no data and do not count, nor do questions about shapes.

Invariants. (1) Nothing here keeps a storage alive. (2) Uses of a storage rise. (3) Only storages of one device are
counted: the memory that a plan is about.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from forebay.offload.planning.trace import Kind
from forebay.offload.tracing.compiled import REGION

_NO_WORK = frozenset({"prim", "profiler"})  # namespaces of operators that ask or note something


class Seen:
    """One storage. `birth` and `death` are operators, -1 before the first; `existed`: before the step began."""

    __slots__ = (
        "alive",
        "birth",
        "death",
        "existed",
        "holders",
        "kind",
        "name",
        "references",
        "saved",
        "size_bytes",
        "uses",
        "writes",
    )

    def __init__(self, size_bytes: int, birth: int, *, existed: bool) -> None:
        self.size_bytes, self.birth, self.existed = size_bytes, birth, existed
        self.death = -1
        self.alive = True
        self.holders = 1  # storages that are it: one that left and came back is another for torch
        self.kind: Kind | None = None
        self.name = ""
        self.saved = 0  # its number, if autograd saved it
        self.uses: list[int] = []
        self.writes: list[int] = []
        self.references: list[Any] = []


def bytes_here(storage: Any) -> int:
    """The bytes of a storage that nobody has moved."""
    return int(storage.nbytes())


class Storages:
    """The ledger of one step. `operators` is how many were recorded, `living_bytes` what lives now, whether its bytes
    are here or not (`size_of` knows)."""

    def __init__(self, device: Any, size_of: Callable[[Any], int] = bytes_here) -> None:
        self.seen: list[Seen] = []
        self.operators = 0
        self.living_bytes = 0
        self._device, self._size_of = device, size_of
        self._living: dict[int, Seen] = {}  # by the address of the storage's Python object

    def name(self, tensor: Any, kind: Kind, name: str) -> None:
        """Say what the storages of a tensor are, and that they were there before. What was said first holds."""
        for seen in self.of(tensor, existed=True):
            if seen.kind is None:
                seen.kind, seen.name = kind, name

    def of(self, tensor: Any, *, existed: bool) -> list[Seen]:
        """The storages of a tensor, on the device; `existed` is for those not seen before."""
        if tensor.device != self._device:
            return []
        return [self._find(storage_of(part), existed=existed) for part in parts(tensor)]

    def find(self, storage: Any) -> Seen | None:
        """What is known of a storage; None if it was not seen yet."""
        return self._living.get(id(storage))

    def know(self, storage: Any) -> None:
        """A storage that was there before, if it was not seen yet."""
        self._find(storage, existed=True)

    def hold_on_to(self, storage: Any, name: str) -> None:
        """Somebody holds a storage, whoever lets go of it besides: it is temporary, of that name."""
        seen = self._find(storage, existed=True)
        if seen.kind is None:
            seen.kind, seen.name = "temporary", name

    def adopt(self, storage: Any, seen: Seen) -> None:
        """That storage is one that was seen before, which left and came back."""
        if id(storage) not in self._living:
            seen.holders += 1
            seen.alive = True
            self._hold(storage, seen)

    def _find(self, storage: Any, *, existed: bool) -> Seen:
        seen = self._living.get(id(storage))
        size_bytes = self._size_of(storage)
        if seen is None:
            seen = Seen(size_bytes, 0 if existed else self.operators, existed=existed)
            self._hold(storage, seen)
            self.seen.append(seen)
        elif size_bytes > seen.size_bytes:
            self.living_bytes += (size_bytes - seen.size_bytes) * seen.holders
            seen.size_bytes = size_bytes
        return seen

    def _hold(self, storage: Any, seen: Seen) -> None:
        key = id(storage)
        seen.references.append(weakref.ref(storage, functools.partial(self._died, key)))
        self._living[key] = seen
        self.living_bytes += seen.size_bytes

    def _died(self, key: int, reference: Any) -> None:
        seen = self._living.pop(key)
        self.living_bytes -= seen.size_bytes
        seen.references.remove(reference)
        seen.holders -= 1
        if not seen.holders:
            seen.death, seen.alive = self.operators - 1, False

    def close(self) -> None:
        """The step is over: what lives now outlives it."""
        for seen in self._living.values():
            seen.death = self.operators - 1
            seen.references.clear()
        self._living.clear()

    # --- operators ---------------------------------------------------------------------------------------------------
    def record(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
        """An operator ran. False if it did nothing with data, and is not counted."""
        positions, names = _written(operator)
        touched: dict[Seen, bool] = {}
        for at, value in enumerate(args):
            self._touch(value, touched, writes=at in positions)
        for name, value in kwargs.items():
            self._touch(value, touched, writes=name in names)
        if not any(touched.values()) and not self._brings_forth(output, touched, operator):
            return False
        self._touch_output(output, touched)
        for seen, writes in touched.items():
            seen.uses.append(self.operators)
            if writes:
                seen.writes.append(self.operators)
        self.operators += 1
        return True

    def born(self, value: Any) -> None:
        """Tensors that come into being here other than by an operator that is counted."""
        for tensor in tensors(value):
            self.of(tensor, existed=False)

    def _touch(self, value: Any, touched: dict[Seen, bool], *, writes: bool) -> None:
        for tensor in tensors(value):
            for seen in self.of(tensor, existed=True):
                touched[seen] = writes or touched.get(seen, False)

    def _touch_output(self, output: Any, touched: dict[Seen, bool]) -> None:
        known = len(self.seen)
        for tensor in tensors(output):
            for seen in self.of(tensor, existed=False):
                touched.setdefault(seen, False)
        for seen in self.seen[known:]:
            touched[seen] = True

    def _brings_forth(self, output: Any, touched: dict[Seen, bool], operator: Any) -> bool:
        """Whether an operator that writes none of its inputs did anything: made a storage, or read data."""
        made = list(tensors(output))
        if not made:
            return torch.Tag.data_dependent_output in operator.tags
        here = [tensor for tensor in made if tensor.device == self._device]
        if not here:
            return bool(touched)  # a copy to elsewhere
        keys = {id(storage_of(part)) for tensor in here for part in parts(tensor)}
        return not all(self._living.get(key) in touched for key in keys)


def does_no_work(operator: Any) -> bool:
    """Whether an operator is known beforehand to touch no data."""
    return operator.is_view or operator.namespace in _NO_WORK or torch.Tag.inplace_view in operator.tags


@functools.cache
def short_name(operator: Any) -> str:
    """`mm` for `aten::mm.default`; other namespaces are kept."""
    space, _, name = operator._schema.name.partition("::")
    return name if space == "aten" else f"{space}.{name}"


def writes_an_input(operator: Any) -> bool:
    """Whether running it twice may be something else than running it once."""
    return operator is REGION or any(_written(operator))  # of a region it is not known


def arguments_written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Those arguments that an operator says it writes."""
    positions, names = _written(operator)
    return [args[at] for at in positions if at < len(args)] + [kwargs[name] for name in names if name in kwargs]


@functools.cache
def _written(operator: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Which arguments the operator writes, by position and by name."""
    silent = operator.namespace == "c10d"  # collectives write tensors, and do not say so
    written = [
        (at, argument.name)
        for at, argument in enumerate(operator._schema.arguments)
        if silent or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return frozenset(at for at, _ in written), frozenset(name for _, name in written)


def tensors(value: Any) -> Iterator[Any]:
    """The tensors of an operator's argument or output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def storage_of(tensor: Any) -> Any:
    """The storage of a tensor, for who does not want its bytes: nobody brings them."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()


def parts(tensor: Any) -> tuple[Any, ...]:
    """The tensors with a storage that make up one: itself, or a sparse one's indices and values."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return ()
