"""Tickets that autograd holds in place of saved tensors.

Theory. `pack` receives every tensor that autograd saves. A parameter's tensor is kept as it is, with a hook that loads
its bytes. Any other is known by the number of its storage (`saved`). If that may move, autograd gets a ticket: how the
tensor looked, and the `Saved` storage, which may be anywhere when the tensor is asked for.

A plan names the storages that may move. Without a plan (`moving` is None) every storage may.

Invariant. A tensor that is asked for has the bytes that were saved, or an error is raised, as torch does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from forebay.offload.guard import Guard
from forebay.offload.movables import Books, Original, Saved
from forebay.offload.tracing.saved import SavedNumbers


class Tickets:
    """The saved tensors of a step. `pack` and `unpack` are for `saved_tensors_hooks`.

    `moving` has the names that may move, with the bytes that are expected of each; `larger()` is called when one is
    larger than that. `seen(saved)` is called for each that is saved, and `asked(saved)` when it is asked for.
    """

    def __init__(
        self,
        numbers: SavedNumbers,
        books: Books,
        guard: Guard,
        *,
        larger: Callable[[], None],
        seen: Callable[[Saved], None],
        asked: Callable[[Saved], None],
    ) -> None:
        self.moving: Mapping[str, int] | None = None
        self._numbers, self._books, self._guard = numbers, books, guard
        self._larger, self._seen, self._asked = larger, seen, asked
        self._saved: dict[str, weakref.ref[Saved]] = {}

    def begin_step(self) -> None:
        """Numbers begin again."""
        self._numbers.begin_step()
        self._saved.clear()

    def find(self, name: str) -> Saved | None:
        """What "saved <n>" is in this step; None if it is not there, or no more."""
        found = self._saved.get(name)
        return found() if found is not None else None

    def alive(self) -> list[Saved]:
        """All that autograd holds of this step, first saved first."""
        return [saved for ref in list(self._saved.values()) if (saved := ref()) is not None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack(self, tensor: Any) -> Any:
        with self._books:
            number = self._numbers.number(tensor)
            name = f"saved {number}"
            if not number:
                return _Present(self._guard, tensor)
            if not self._may_move(name, tensor):
                return _Present(self._guard, tensor)
            saved = self.find(name)
            if saved is None:
                saved = Saved(name, tensor.untyped_storage(), self._books)
                self._saved[name] = weakref.ref(saved)
            self._seen(saved)
            return _Ticket(saved, saved.watch(tensor), tensor)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(self, packed: Any) -> Any:
        with self._books:
            if isinstance(packed, _Ticket):
                self._asked(packed.saved)
                return packed.tensor()
            return packed.tensor()

    def _may_move(self, name: str, tensor: Any) -> bool:
        if type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg():
            return False  # more than a view of a storage
        size_bytes = tensor.untyped_storage().nbytes()
        if self.moving is not None and size_bytes > self.moving.get(name, size_bytes):
            self._larger()
        if self.moving is None:
            return bool(size_bytes)
        return name in self.moving


class _Present:
    """What autograd holds of what does not move, or moves in place: the tensor, and who brings it."""

    __slots__ = ("_guard", "_tensor", "_version")

    def __init__(self, guard: Guard, tensor: Any) -> None:
        self._guard, self._tensor = guard, tensor
        self._version = _version(tensor)

    def tensor(self) -> Any:
        """The tensor, with its bytes here. `RuntimeError`, as torch has it, if it was written since it was saved: torch
        itself leaves that to hooks."""
        self._guard.look(self._tensor)
        if _version(self._tensor) != self._version:
            raise _written(f"a tensor of size {list(self._tensor.size())}")
        return self._tensor


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _written(what: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was written after it was saved"
    )


class _Ticket:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "_dtype", "_offset", "_original", "_size", "_stride", "saved")

    def __init__(self, saved: Saved, original: Original, tensor: Any) -> None:
        self.saved, self._original = saved, original
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> Any:
        """The tensor again. `RuntimeError`, as torch has it, if it was written since it was saved."""
        self.saved.ensure()
        if self._original.is_changed():
            raise _written(f"{self.saved.name}, of size {list(self._size)},")
        found = torch.empty(0, dtype=self._dtype, device=self.saved.storage.device)
        return found.set_(self.saved.storage, self._offset, self._size, self._stride)
