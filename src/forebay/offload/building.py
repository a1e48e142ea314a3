"""A model on `meta` gets memory and values one module after the other, and gives them up one tensor after the other.

Theory. A model that is larger than the memory it is trained in cannot be made there. Made under
`torch.device("meta")` it has no bytes. Here each module that has tensors of its own gets memory for them, and then its
values, as when it was made: by `reset_parameters()`, children before parents. So with the same seed the values are
those of the model made at once, if its modules draw nothing besides. What was made before may leave meanwhile.

Tensors are replaced in place (`torch.utils.swap_tensors`), so an optimizer that was made for the model on `meta`, and
weights that are tied, stay so.

`move_to` is the way back: each tensor of model and optimizer is brought, copied to another device, and gone from here
before the next comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from forebay.core.errors import Invalid

Initialize = Callable[[Any], object]  # with a module whose own tensors have memory, and any bytes in it


def is_on_meta(model: Any) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def build(model: Any, device: Any, initialize: Initialize | None, learn: Callable[[Any], object]) -> None:
    """Tensors on `meta` are on `device` afterwards. `learn(parameter)` when it has its values. `Invalid`, with nothing
    done, if a module does not say how it gets its values, and `initialize` is not given."""
    modules = [(module, held) for module in _children_first(model, set()) if (held := _own_on_meta(module))]
    silent = sorted({type(module).__qualname__ for module, _ in modules if _reset_of(module) is None})
    if initialize is None and silent:
        raise Invalid(
            f"{', '.join(silent)} has tensors of its own on meta, and no reset_parameters(): pass initialize=, which "
            "is called with each module that has tensors of its own when they have memory"
        )
    for module, held in modules:
        fresh = [tensor for tensor in held if tensor.is_meta]
        tied = [tensor for tensor in _own(module) if not tensor.is_meta]  # to a module before this
        for tensor in fresh:
            replace(tensor, torch.empty_like(tensor, device=device, requires_grad=False))
        with torch.no_grad():
            kept = [tensor.clone() for tensor in tied]
            if initialize is not None:
                initialize(module)
            elif (reset := _reset_of(module)) is not None:
                reset()
            for tensor, values in zip(tied, kept, strict=True):
                tensor.copy_(values)
        for tensor in fresh:
            learn(tensor)


def move_to(model: Any, optimizer: Any, device: Any, bring: Callable[[Iterable[Any]], object] | None) -> None:
    """All tensors of both on another device, one after the other. Without `bring` they are not looked at: for `meta`,
    where they have no bytes."""

    def moved(tensor: Any) -> Any:
        if bring is None:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        bring([tensor])
        return tensor.detach().to(device, copy=True)

    for parameter in model.parameters():
        gradient, parameter.grad = parameter.grad, None
        kept = None if gradient is None else moved(gradient)
        del gradient
        replace(parameter, moved(parameter))
        parameter.grad = kept
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = moved(value)
            del value
    for buffer in model.buffers():
        replace(buffer, moved(buffer))


def replace(tensor: Any, by: Any) -> None:
    """The same tensor for all who hold it, with the memory of another, on another device perhaps."""
    try:
        tensor.data = by
    except RuntimeError:  # of another kind, as those on meta are
        new = nn.Parameter(by, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else by
        new.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, new)
        except RuntimeError as error:
            raise Invalid(
                f"a tensor of the model cannot be replaced ({error}): let go of what refers to it, and do this again"
            ) from error


def _children_first(module: Any, seen: set[int]) -> Iterator[Any]:
    """As they were made: what a module consists of is there before it."""
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _own_on_meta(module: Any) -> list[Any]:
    return [tensor for tensor in _own(module) if tensor.is_meta]


def _own(module: Any) -> list[Any]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _reset_of(module: Any) -> Any:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
