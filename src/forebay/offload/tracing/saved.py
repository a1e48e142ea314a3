"""Numbers for saved activations: the name by which a plan and an engine mean the same storage.

Theory. Autograd saves tensors for the backward pass. A storage that is saved often, or through several views, is one
thing to move. Storages are numbered in the order in which each is first saved in the step. A step that does the same
saves in the same order, so "saved 17" of one step is "saved 17" of the next. Storages of parameters and buffers have
names of their own and no number.

Invariant. Two storages of a step never have the same number: a storage is recognised by itself, not by its address,
which may be used again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from forebay.offload.tracing.storages import storage_of


class SavedNumbers:
    """Numbers of the storages that are saved in one step, from 1 on. Keeps none of them alive."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._model, self._optimizer = model, optimizer
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._last = 0

    def begin_step(self) -> None:
        """Count from one again."""
        self._known.clear()
        self._last = 0
        held = [*self._model.parameters(), *self._model.buffers()]
        held += [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for tensor in held:
            storage = storage_of(tensor)
            self._known[id(storage)] = (weakref.ref(storage), 0)

    def number(self, tensor: Any) -> int:
        """The number of the storage of a tensor that is saved now; 0 for those that have none: parameters, buffers, and
        what is no plain tensor."""
        if tensor.layout is not torch.strided:
            return 0
        storage = storage_of(tensor)
        known = self._known.get(id(storage))
        if known is not None and known[0]() is storage:
            return known[1]
        self._last += 1
        self._known[id(storage)] = (weakref.ref(storage), self._last)
        return self._last
