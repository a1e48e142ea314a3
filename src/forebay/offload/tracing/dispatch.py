"""A dispatch mode that passes every operator below autograd to a function.

Theory. A mode sees the operators of forward, backward and the optimizer, also those that autograd runs by itself.
Subclasses that wrap tensors arrive as the tensors inside. Compiled code arrives as one operator (`compiled`). A mode
that is added in the middle of something goes to the *bottom* of the thread's stack: others take their modes off the top
when their `with` ends.

Autograd runs each node with the modes that were active when the backward pass began. A mode that is added within it
has no effect on the nodes to come, and `in_backward` says when that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from forebay.offload.tracing.compiled import hand_regions_to

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class OperatorMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed by the type checker
    """Hands each operator to `dispatch(operator, args, kwargs)`, which runs it and returns its output."""

    def __init__(self, dispatch: Dispatch) -> None:
        super().__init__()
        self._dispatch = dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN and is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it will be back with the tensors that are inside
        return self._dispatch(func, args, kwargs or {})

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or nothing is compiled while it is on the way, and what was not is not compiled later

    def put(self) -> None:
        """On the way of this thread's operators from now on, below all other modes."""
        above = _taken_off()
        _python_dispatch._push_mode(self)
        for mode in reversed(above):
            _python_dispatch._push_mode(mode)

    def sink(self) -> None:
        """Entered by `with`, it goes below all others: those that are on now may end first."""
        self.take_off()
        self.put()

    def rise(self) -> None:
        """To the top again, where `with` ends."""
        self.take_off()
        _python_dispatch._push_mode(self)

    def take_off(self) -> None:
        """On the way no more."""
        for mode in reversed([mode for mode in _taken_off() if mode is not self]):
            _python_dispatch._push_mode(mode)


hand_regions_to(OperatorMode)


def _taken_off() -> list[Any]:
    """All modes of this thread but torch's own, from the top, off the stack."""
    count = torch._C._len_torch_dispatch_stack() - len(_infra())
    return [_python_dispatch._pop_mode() for _ in range(count)]


def _infra() -> list[Any]:
    """Modes that torch keeps below all others in places of their own, such as the one for fake tensors."""
    return [mode for mode in _python_dispatch._get_current_dispatch_mode_stack() if mode.is_infra_mode()]


def in_backward() -> bool:
    """Whether this thread is within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def with_memory(work: Callable[[], Any], relieved: Callable[[], bool]) -> Any:
    """What `work` gives; where an accelerator has no memory for it, once more as long as that could be `relieved`."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError:
            if not relieved():
                raise
