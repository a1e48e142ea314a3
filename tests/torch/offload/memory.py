"""An independent count of memory: every storage that any operator ever saw, while it lives, as large as it is now."""

import weakref
from collections.abc import Iterable
from operator import call
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
        self.peak_bytes = max(self.peak_bytes, self._bytes())
        return output

    def _bytes(self) -> int:
        """What lives now. Hundreds of storages are looked at after each operator: by loops that are not Python's."""
        try:
            return sum(map(torch.UntypedStorage.nbytes, map(call, self._live.values())))
        except TypeError:  # one is gone
            self._live = {number: ref for number, ref in self._live.items() if ref() is not None}
            return self._bytes()
