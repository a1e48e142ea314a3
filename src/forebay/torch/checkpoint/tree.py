"""A job's state as a tree of plain values and a list of tensors, and back.

Theory. What a script saves is dictionaries, lists and numbers around tensors. `flatten` takes it apart: the tensors
go to the stream, the rest becomes a tree that JSON can hold, in which each tensor is named by its path. `rebuild`
puts both together. Nothing is pickled, so loading a checkpoint runs no code, and a checkpoint can be read without the
classes that made it. An object that is neither is refused by name when it is saved, not when it is needed.

A node of the tree is null, a boolean, a number, a string, or one of: {"d": [[key, node], …]} a dict, {"l": […]} a
list, {"t": […]} a tuple, {"f": "nan"} a float that JSON has not, {"i": "…"} a whole number beyond 64 bits, {"b": "…"}
bytes in base64, {"x": path} a tensor, {"n": path} a NumPy array, {"y": name} a torch dtype. `torch.distributed` alone
(`dcp`) also has {"p": path}: what it pickled, and cannot be said otherwise.

A path is the keys on the way, joined by slashes. A key that is a number begins with `#`; in text `~`, `/` and a first
`#` are written ~0, ~1 and ~2. Two names for one memory (tied weights) are saved once: the second refers to the
first's path.

Invariant. `rebuild(flatten(x))` equals x, types included, for every x that `flatten` takes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.core.errors import Corrupt, Invalid

DEPTH_MAX = 64  # state dictionaries are five deep; a cycle is deeper than anything
_INT_MAX = 2**63


class Leaf(NamedTuple):
    """A tensor of the state: `tensor` is a DTensor where the state has one."""

    path: str
    tensor: torch.Tensor


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`Corrupt` for a name that this torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Corrupt(f"the checkpoint has a tensor of dtype {name!r}: restore it with a torch that knows it")
    return found


def key_text(key: Any) -> str:
    """One part of a path. `Invalid` for a key that is neither text, number, boolean nor None."""
    if isinstance(key, str):
        text = key.replace("~", "~0").replace("/", "~1")
        return "~2" + text[1:] if text.startswith("#") else text
    if key is None or isinstance(key, bool | int | float):
        return f"#{key!r}"
    raise Invalid(f"the state has a key of type {type(key).__name__}: use text or numbers as keys")


def dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor without its graph; `Invalid` if its elements do not lie in memory one by one."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise Invalid(f"{path}: a {tensor.layout} tensor on {tensor.device} cannot be saved: make it dense first")
    return tensor.detach()


class Flat:
    """A state taken apart: `trees` by top-level name, `leaves` in the order of the state."""

    def __init__(self) -> None:
        self.trees: dict[str, Any] = {}
        self.leaves: list[Leaf] = []
        self._seen: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, value: Any) -> None:
        self.trees[name] = self._node(value, key_text(name), 0)

    def _node(self, value: Any, path: str, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise Invalid(f"{path[:200]} is more than {DEPTH_MAX} levels deep: does the state contain itself?")
        if isinstance(value, torch.Tensor):
            return {"x": self._leaf(value, path)}
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise Invalid(f"{path}: an array of Python objects cannot be saved: make it numbers")
            return {"n": self._leaf(_tensor_of(value, path), path)}
        if isinstance(value, Mapping):
            return {"d": [[_key_node(k), self._node(v, f"{path}/{key_text(k)}", depth + 1)] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            nodes = [self._node(item, f"{path}/#{number}", depth + 1) for number, item in enumerate(value)]
            return {"t" if isinstance(value, tuple) else "l": nodes}
        return _plain(value, path)

    def _leaf(self, tensor: torch.Tensor, path: str) -> str:
        tensor = dense(tensor, path)
        memory = _memory(tensor)
        if memory in self._seen:
            return self._seen[memory]
        if memory:
            self._seen[memory] = path
        self.leaves.append(Leaf(path, tensor))
        return path


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two names of one tensor have in common; empty where that cannot be said."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return ()
    how = tensor.is_conj(), tensor.is_neg()  # lazily: the same bytes with another value
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), *how)


def is_text(text: str) -> bool:
    """Whether it is made of whole characters: halves stand in names of files that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """The array's own memory, or a copy where torch does not take that."""
    if isinstance(array, np.ma.MaskedArray):
        raise Invalid(f"{path}: an array with a mask would be saved without it: save its data and its mask")
    if not (array.flags.c_contiguous and array.flags.writeable and type(array) is np.ndarray):
        array = np.array(array, copy=True, order="C")
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # the latter for numbers in the other byte order
        raise Invalid(f"{path}: torch has no dtype for a NumPy array of {array.dtype}: convert it first") from None


def _key_node(key: Any) -> Any:
    key_text(key)
    return _plain(key, "a key")


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not is_text(value):
            raise Invalid(f"{path} is {value!r}, which is no text that can be stored: save it as bytes")
        return str.__str__(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value) if -_INT_MAX <= value < _INT_MAX else {"i": str(int(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"f": repr(float(value))}
    if isinstance(value, bytes | bytearray):
        return {"b": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"y": dtype_name(value)}
    raise Invalid(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: save its "
        "state_dict(), or numbers, text, lists, dictionaries and tensors"
    )


def rebuild(node: Any, tensor: Callable[[str, Any], torch.Tensor], template: Any = None) -> Any:
    """The value that a tree stands for. `tensor` gives the tensor of a path; it is told what `template`, the state as
    it is now, has in that place."""
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise Corrupt("the checkpoint's tree is damaged: restore an older one")
    ((kind, body),) = node.items()
    if kind == "d":
        now = template if isinstance(template, Mapping) else {}
        pairs = ((rebuild(key, tensor), value) for key, value in body)
        return {key: rebuild(value, tensor, now.get(key)) for key, value in pairs}
    if kind in ("l", "t"):
        old = template if isinstance(template, list | tuple) and len(template) == len(body) else [None] * len(body)
        values = [rebuild(item, tensor, before) for item, before in zip(body, old, strict=True)]
        return tuple(values) if kind == "t" else values
    if kind == "x":
        return tensor(body, template if isinstance(template, torch.Tensor) else None)
    if kind == "n":
        return tensor(body, None).numpy()
    return _rebuilt_plain(kind, body)


_PLAIN: dict[str, Callable[[Any], Any]] = {"f": float, "i": int, "b": base64.b64decode}


def _rebuilt_plain(kind: str, body: Any) -> Any:
    if kind in _PLAIN:
        try:
            return _PLAIN[kind](body)
        except (ValueError, TypeError):
            raise Corrupt(f"the checkpoint's tree has a {kind!r} that is none: restore an older one") from None
    if kind == "y":
        return dtype_of(body)
    if kind == "p":
        raise Invalid(
            f"{body} was pickled by torch.distributed.checkpoint: load it with that and forebay.torch.StorageReader, "
            "or leave it out"
        )
    raise Corrupt(f"the checkpoint's tree has a {kind!r}: restore it with the release of Forebay that saved it")
