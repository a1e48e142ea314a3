"""An independent count of memory: every storage that any operator ever saw, while it lives, as large as it is now."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """`with PeakMemory(model, optimizer) as memory:` counts until its end; `memory.peak_bytes` is the most at once."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}
        self._look(model.parameters())
        self._look(parameter.grad for parameter in model.parameters())
        self._look(value for state in optimizer.state.values() for value in state.values())

    def _look(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if hasattr(tensor, "untyped_storage") and not tensor.is_meta:
                with torch._C.DisableTorchFunction():  # who is on the way would take it that somebody wants the bytes
                    storage = tensor.untyped_storage()
                self._live[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._look(tree_leaves((args, kwargs, output)))
        total = 0
        for number, ref in list(self._live.items()):
            storage = ref()
            if storage is None:
                del self._live[number]
            else:
                total += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, total)
        return output
