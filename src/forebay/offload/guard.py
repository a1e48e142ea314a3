"""Loads a storage before Python touches it.

Theory. A storage that is away has no memory, and one that is being loaded has undefined memory. On a CPU, touching the
first ends the process, and touching the second gives wrong numbers; torch checks neither. A plan covers what the
profiled step uses, but programs also log a norm every hundred steps or look at a weight between steps. So every call of
torch from Python, functions and methods of tensors alike, passes this guard. It looks for storages that are not here
and loads them. It is active only while something may be away.

The guard also reports writes, since a write makes the copy on a tier stale. Torch counts writes per tensor, but several
tensors may share a storage, and some functions write without being counted. The names of functions tell that they
write, and which argument. A storage that is handed out, for torch to save for instance, stays for the rest of the step.
One whose address others will hold, as other libraries' arrays do, stays for good.

The guard is a `TorchFunctionMode` at the *bottom* of the thread's stack. Others take their modes off the top when their
`with` ends, so ours is never in between.

Not covered: other threads, and C++ that reaches tensors by itself (autograd's backward, which uses the tickets of saved
tensors; collectives, whose tensors do not move).

Rejected: errors instead of loading (the program was right before it had less memory); looking at sizes of storages only
(misses what is being loaded).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from forebay.offload.movables import Books, Lasting
from forebay.offload.tracing.between import Between
from forebay.offload.tracing.dispatch import in_backward
from forebay.offload.tracing.storages import storage_of, tensors

# What looks at a tensor and not at its bytes. `__get__` and `__set__` are every attribute: `.grad`, which `zero_grad`
# sets, and `.data`, but what is done with that alias comes by here again.
_WITHOUT_BYTES = frozenset(
    {"__get__", "__set__", "__hash__", "__len__", "register_hook", "requires_grad_"}
    | {"size", "dim", "numel", "nelement", "stride", "element_size", "storage_offset"}
    | {"is_contiguous", "is_floating_point", "is_complex"}
)
_GRADIENT = torch.Tensor.grad
_DATA = torch.Tensor.data  # of which `__get__` gives an alias that counts its writes apart
_VIEWS = frozenset(
    {torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.real, torch.Tensor.imag}
)
_BY_ADDRESS = frozenset({"__dlpack__", "to_dlpack", "_to_dlpack"})
_ARRAY = torch.Tensor.__cuda_array_interface__
_HANDED_OUT = frozenset({"untyped_storage", "_typed_storage", "storage", "share_memory_"})
_IN_PLACE = frozenset(
    {"__setitem__"}
    | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
    | {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")}
)
_WITHOUT_WRITES = frozenset({"requires_grad_"})


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a function does with tensors. `writes`: how many of its arguments, from the first on. `is_plain`: whether to
    bring what it reads is all that is to be done."""

    counts: bool  # as a use of bytes, for points between passes
    reads: bool
    writes: int
    drops: bool  # perhaps a gradient
    by_address: bool
    hands_out: bool
    is_plain: bool


@functools.lru_cache(4096)  # a step calls thousands, of a few dozen kinds
def _kind_of(func: Any) -> _Kind:
    name = func.__name__
    attribute = getattr(func, "__self__", None)
    gets = attribute if name == "__get__" else None
    counts = name not in _WITHOUT_BYTES
    writes = max(_writes(name), int(gets is _DATA))
    by_address, hands_out = name in _BY_ADDRESS or gets is _ARRAY, name in _HANDED_OUT
    return _Kind(
        counts,
        reads=counts or gets in _VIEWS,
        writes=writes,
        drops=name == "__set__" and attribute is _GRADIENT,
        by_address=by_address,
        hands_out=hands_out,
        is_plain=not (writes or by_address or hands_out),
    )


def _writes(name: str) -> int:
    if name.startswith(("_fused_", "_amp_")):
        return 1 << 10
    in_place = name.endswith("_") and not name.endswith("__") and name not in _WITHOUT_WRITES
    return int(in_place or name in _IN_PLACE)


class Guard(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by the type checker
    """Brings what calls of torch are about to touch. `put` and `take_off` are for one thread."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self.between: Between | None = None  # of the step under way
        self._books = books
        self._is_on = False

    def put(self) -> None:
        """Guard this thread from now on."""
        if not self._is_on:
            self._is_on = True
            above = _taken_off()
            _push_mode(self)
            for mode in reversed(above):
                _push_mode(mode)

    def take_off(self) -> None:
        """Guard it no more."""
        if self._is_on:
            self._is_on = False
            modes = _taken_off()
            for mode in reversed(modes):
                if mode is not self:
                    _push_mode(mode)

    def look(self, tensor: Any) -> None:
        """Bring the storage of a tensor, if it is not here."""
        absent = self._books.absent
        if absent and (storage := _storage(tensor)) is not None:
            movable = absent.get(storage._cdata)
            if movable is not None:
                self._bring(movable, storage)

    def look_together(self, values: Any) -> None:
        """Bring the storages of all tensors among these; none leaves for another of them."""
        if not _is_absent(values, self._books.absent):
            return
        self._each(values, self._books.together.append)
        try:
            for tensor in tensors(values):
                self.look(tensor)
        finally:
            self._books.together.clear()

    def changes(self, values: Any) -> None:
        """Bring all tensors among these, which are about to be written in a way that nobody sees."""
        self.look_together(values)
        self._each(values, _written)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _bring(self, movable: Lasting, storage: Any) -> None:
        with self._books:
            if movable.is_at(storage):
                movable.ensure()
            else:  # that one is gone, and its address is another's
                self._books.absent.pop(storage._cdata, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self._books.own_work:  # what is compiled shall not depend on books
            return func(*args, **kwargs)
        kind = _kind_of(func)
        between = self.between
        if between is None or not between.is_on or in_backward():
            return self._call(func, args, kwargs, kind)
        if kind.counts:
            return between.run(func, args, kwargs, functools.partial(self._call, kind=kind))
        if kind.drops and args[1] is None:
            between.drop()
        return self._call(func, args, kwargs, kind)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: _Kind) -> Any:
        """Call a function, with all of its tensors here."""
        if kind.reads and self._books.absent:
            self.look_together((args, tuple(kwargs.values())) if kwargs else args)
        if kind.is_plain and "out" not in kwargs:
            return func(*args, **kwargs)
        if self._books.lasting:
            self._each(args[: kind.writes], _written)
            if "out" in kwargs:
                self._each(kwargs["out"], _written)
            if kind.by_address:
                self._each(args[:1], _held)
            if kind.hands_out:
                self._each(args[:1], self._hand_out)
        return func(*args, **kwargs)

    def _hand_out(self, movable: Lasting) -> None:
        movable.ensure()  # also from a store under way: who has a storage may free its memory
        self._books.shown.add(movable)

    def _each(self, values: Any, work: Callable[[Lasting], object]) -> None:
        """Do something with what lasts, of these arguments."""
        for tensor in tensors(values):
            storage = _storage(tensor)
            movable = None if storage is None else self._books.lasting.get(storage._cdata)
            if movable is not None and movable.is_at(storage):
                work(movable)


def _written(movable: Lasting) -> None:
    movable.written()


def _held(movable: Lasting) -> None:
    movable.ensure()
    movable.stays = True


def _is_absent(value: Any, absent: Mapping[int, object]) -> bool:
    """Whether the storage of a tensor among these is not here."""
    if isinstance(value, torch.Tensor):
        storage = _storage(value)
        return storage is not None and storage._cdata in absent
    if isinstance(value, list | tuple):
        for part in value:  # as a loop: each call of torch comes by here
            if _is_absent(part, absent):
                return True
    return False


def _storage(tensor: Any) -> Any:
    """The storage of a tensor, or of the one inside; None for tensors that have none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is not torch.strided:
        return None
    try:
        return storage_of(tensor)
    except NotImplementedError:  # one of those that only look like tensors
        return None


def _taken_off() -> list[Any]:
    """All modes of this thread, from the top, off the stack."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    return modes


for _function in (
    Guard.__torch_function__,
    Guard._call,
    Guard.look_together,
    _is_absent,
    _kind_of.__wrapped__,
    Between.run,
    Guard.look,
    Guard._each,
    _storage,
    tensors,
):
    skip_code(_function.__code__)  # what a compiled module does not compile itself calls them: torch would compile them
