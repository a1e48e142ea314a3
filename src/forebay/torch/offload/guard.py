"""Between whoever touches a tensor and memory that is not there.

Theory. A storage that is away has no memory, and one that is being loaded has memory with anything in it. On a CPU
touching the one ends the process, and touching the other gives wrong numbers; torch checks neither. A plan makes sure
of what the profiled step uses, but programs also log a norm every hundred steps, or look at a weight between two steps.
So every call of torch from Python, functions and methods of tensors alike, passes this guard, which looks for storages
that are not here and has them brought. It is on the way only while something may be away.

The guard is a `TorchFunctionMode` at the *bottom* of this thread's stack of them. Modes are taken off the top by
whoever put them there, when their `with` ends; whatever ends when, ours is not in between.

Not covered: other threads, and C++ that reaches tensors by itself (autograd's backward, which goes through the tickets
of saved tensors; collectives, whose tensors are not moved).

Rejected: errors instead of bringing (the program was right before it had less memory); looking at sizes of storages
only (misses what is being loaded).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from forebay.torch.offload.movables import Books, Lasting

# What looks at a tensor and not at its bytes. `__get__` is every attribute, `.data` among them: what is done with that
# alias comes by here again.
_WITHOUT_BYTES = frozenset(
    {"__get__", "size", "dim", "numel", "stride", "element_size", "storage_offset", "untyped_storage", "is_contiguous"}
    | {"is_floating_point", "is_complex", "requires_grad_", "register_hook", "__hash__", "__len__", "nelement"}
)


_DATA = torch.Tensor.data  # of which `__get__` gives an alias that counts its writes apart


class Guard(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by the type checker
    """Brings what calls of torch are about to touch. `put` and `take_off` are for one thread."""

    def __init__(self, books: Books) -> None:
        super().__init__()
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
        if absent and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            movable = absent.get(storage._cdata)
            if movable is not None:
                self._bring(movable, storage)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _bring(self, movable: Lasting, storage: Any) -> None:
        with self._books:
            if movable.is_at(storage):
                movable.ensure()
            else:  # that one is gone, and its address is another's
                self._books.absent.pop(storage._cdata, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling() or self._books.own_work:  # what is compiled shall not depend on books
            return func(*args, **(kwargs or {}))
        if func.__name__ == "__get__" and getattr(func, "__self__", None) is _DATA and args[0].layout is torch.strided:
            movable = self._books.lasting.get(args[0].untyped_storage()._cdata)
            if movable is not None:
                movable.written()
        if self._books.absent and func.__name__ not in _WITHOUT_BYTES:
            self._look_at(args)
            if kwargs:
                self._look_at(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look_at(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                self.look(value)
            elif isinstance(value, list | tuple):
                self._look_at(value)


def _taken_off() -> list[Any]:
    """All modes of this thread, from the top, off the stack."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    return modes


for _function in (Guard.__torch_function__, Guard._look_at, Guard.look):
    skip_code(_function.__code__)  # what a compiled module does not compile itself calls them: torch would compile them
