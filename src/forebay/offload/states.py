"""The state of a model and its optimizer, copied out of memory that it does not fit into, and back.

Theory. `state_dict()` of torch holds the tensors themselves, so all of them have to be in memory at once, and an
optimizer's `load_state_dict` makes all of its state anew. Here each tensor is brought, copied, and may leave again
before the next one comes; `room` and `learn` are the engine's. What a state is, is torch's own: both are called for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

Bring = Callable[[Iterable[Any]], object]


def copied(state: Any, bring: Bring, known: dict[int, Any] | None = None) -> Any:
    """A state with copies in host memory in place of its tensors; one copy of a tensor that it has twice."""
    known = {} if known is None else known
    if isinstance(state, torch.Tensor):
        if id(state) not in known:
            bring([state])
            known[id(state)] = state.detach().to("cpu", copy=True)
        return known[id(state)]
    if isinstance(state, dict):
        made = copy.copy(state)  # with the versions that torch writes beside it
        for name, value in state.items():
            made[name] = copied(value, bring, known)
        return made
    if isinstance(state, list | tuple):
        return type(state)(copied(value, bring, known) for value in state)
    return state


def load_optimizer(
    optimizer: Any, saved: dict[str, Any], room: Callable[[int], object], learn: Callable[[Any], object]
) -> None:
    """As `optimizer.load_state_dict(saved)`, of one parameter after the other. `room(size_bytes)` is called before
    there are tensors of that size, and `learn(parameter)` when a parameter has its state."""
    optimizer.load_state_dict({**saved, "state": {}})  # checks the groups, and lets the old state go
    state = dict(saved["state"])
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state:
            found = state.pop(number)
            tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
            room(sum(value.numel() * value.element_size() for value in tensors))
            optimizer.state[parameter] = {
                name: _placed(optimizer, parameter, value, number, saved["param_groups"], name)
                for name, value in found.items()
            }
            learn(parameter)
    optimizer.state.update(state)  # of no parameter


def _placed(optimizer: Any, parameter: Any, value: Any, number: Any, groups: Any, name: str) -> Any:
    """A value of a parameter's state where and as torch puts it, never the one that was given."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    placed = optimizer._process_value_according_to_param_policy(parameter, value, number, groups, name)
    return placed.clone() if placed is value else placed
