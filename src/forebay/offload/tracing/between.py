"""Points between the backward pass and the optimizer's step, where programs go over all gradients.

Theory. Clipping, unscaling and logging use gradients there one after the other, or all of them in one call of
`torch._foreach_*`, and when the optimizer is done drop them. Without a point in between, all of this would be one
stretch, and every gradient would have to be in memory at once. So calls of torch from Python are counted there: before
one that would make it more than `chunk_bytes` since the last point, there is a point. A call over a list of tensors
goes in parts of that size. Each of these functions works on each tensor by itself, so the parts give the bits of the
whole.

There is also a point before gradients are dropped: what comes after that has their memory.

Sizes are those of tensors, wherever their bytes are. So the same calls have the same points in every step.

Not the same bits: where torch chooses between its ways by looking at the whole list (layouts of several kinds in it, on
an accelerator).

Rejected: clipping of our own (unscaling, and whatever a program does by itself, would still need everything at once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from forebay.offload.tracing.storages import tensors

BETWEEN = "between passes"
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Between:
    """Calls `reach()` between calls that use more than `chunk_bytes` together, while `is_on`."""

    def __init__(self, reach: Callable[[], object], chunk_bytes: int) -> None:
        self.is_on = False
        self._reach, self._chunk_bytes = reach, chunk_bytes
        self._used_bytes = 0
        self._drops = False

    def begin(self) -> None:
        """A point is reached, with gradients behind it."""
        self.is_on, self._used_bytes, self._drops = True, 0, False

    def end(self) -> None:
        """Gradients are no longer what comes next."""
        self.is_on = False

    def drop(self) -> None:
        """A gradient is about to be dropped."""
        if not self._drops:
            self._reach()
            self._drops = True

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """What `call(func, args, kwargs)` gives, in parts if it is over a list."""
        if not _is_by_tensor(func, args, kwargs):
            self._use(sum(_size(tensor) for tensor in tensors([*args, *kwargs.values()])))
            return call(func, args, kwargs)
        made: list[Any] = []
        output: Any = None
        for begin, end, size_bytes in self._parts(args, kwargs):
            self._use(size_bytes)
            count = len(args[0])
            output = call(
                func,
                tuple(_part(value, count, begin, end) for value in args),
                {name: _part(value, count, begin, end) for name, value in kwargs.items()},
            )
            if isinstance(output, list | tuple):
                made.extend(output)
        return type(output)(made) if isinstance(output, list | tuple) else output

    def _use(self, size_bytes: int) -> None:
        if self._used_bytes and self._used_bytes + size_bytes > self._chunk_bytes:
            self._reach()  # which begins to count anew
        self._used_bytes += size_bytes
        self._drops = False

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
        """From which tensor to which, and their bytes: as many as fit beside what was used, and one at least."""
        count = len(args[0])
        lists = [value for value in (*args, *kwargs.values()) if _is_list(value, count)]
        begin = size_bytes = 0
        for at in range(count):
            more = sum(_size(value[at]) for value in lists if isinstance(value[at], torch.Tensor))
            if at > begin and size_bytes + more > self._chunk_bytes:
                yield begin, at, size_bytes
                begin, size_bytes = at, 0
            size_bytes += more
        yield begin, count, size_bytes


def _is_by_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function works on each tensor of a list by itself, and the list is its first argument."""
    name = getattr(func, "__name__", "")
    if not (name.startswith("_foreach_") or name == _UNSCALE) or not args or not isinstance(args[0], list | tuple):
        return False
    others = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return len(args[0]) > 1 and all(value.numel() == 1 for value in others)  # else one number for each of the list


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == count


def _part(value: Any, count: int, begin: int, end: int) -> Any:
    return value[begin:end] if _is_list(value, count) else value


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size()) if tensor.layout is torch.strided else 0
