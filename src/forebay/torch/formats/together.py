"""Samples that can only be had together: the rows of a row group, or of whatever else is decoded as a whole.

Theory. Such a group is decoded once, and kept while samples of it are due. A shuffle over all samples would decode a
group for each. Therefore every shuffle is one of groups, and then of the samples within windows of them, of
`window_bytes` decoded; a process keeps two such windows.

Invariants. (1) The order is a function of seed, epoch and `window_bytes`, which the fingerprint has. (2) Nothing that
is kept goes to another process.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from forebay.core import limits
from forebay.core.errors import NotSupported
from forebay.torch.columns import Column
from forebay.torch.dataset import Shuffle
from forebay.torch.order import BlockShuffled, InOrder, Order

WINDOW_BYTES = 256 * limits.MIB  # of decoded groups


def order_of_groups(
    groups: tuple[Column, Column], own_bytes: int, shuffle: Shuffle, window_bytes: int, seed: int, epoch: int
) -> Order:
    """In windows, whatever the shuffle: see the module's header. `groups`: the samples and bytes of each. The loader's
    windows count where states name them: in a block shuffle."""
    if not shuffle:
        return InOrder(int(groups[0].sum()))
    size_bytes = min(window_bytes, own_bytes) if shuffle == "block" else own_bytes
    return BlockShuffled(*groups, size_bytes, seed, epoch)


def pyarrow(part: str, what: str = "parquet files need") -> Any:
    """That part of pyarrow; the whole if it is empty."""
    try:
        return importlib.import_module("pyarrow" + (f".{part}" if part else ""))
    except ImportError:
        raise NotSupported(f"{what} pyarrow: `pip install pyarrow`, or the extra `parquet`") from None


class KeptHere:
    """What each process keeps for itself, up to `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._held: tuple[int, Kept | None] = (0, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptHere, (self._size_bytes,)

    def kept(self) -> Kept:
        pid, kept = self._held
        if kept is None or pid != os.getpid():
            kept = Kept(self._size_bytes)
            self._held = os.getpid(), kept
        return kept


class Kept:
    """Decoded groups of one process, up to `size_bytes`; a thread that needs one that another decodes waits for it."""

    def __init__(self, size_bytes: int) -> None:
        self._bytes_max, self._bytes = size_bytes, 0
        self._groups: OrderedDict[Any, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[Any, threading.Lock] = {}

    def __contains__(self, number: Any) -> bool:
        with self._lock:
            return number in self._groups

    def group(self, number: Any, load: Callable[[], Any]) -> Any:
        """That group, whatever its number is; `load()` makes it, and what it makes has `nbytes`."""
        with self._lock:
            found = self._seen(number)
            if found is not None:
                return found
            loading = self._loading.setdefault(number, threading.Lock())
        with loading:
            with self._lock:
                found = self._seen(number)
            if found is not None:
                return found
            try:
                found = load()
            finally:
                with self._lock:
                    self._loading.pop(number, None)
                    if found is not None:
                        self._keep(number, found)
            return found

    def _keep(self, number: Any, found: Any) -> None:
        before = self._groups.pop(number, None)
        self._bytes += found.nbytes - (0 if before is None else before.nbytes)
        self._groups[number] = found
        while self._bytes > self._bytes_max and len(self._groups) > 1:
            self._bytes -= self._groups.popitem(last=False)[1].nbytes

    def _seen(self, number: Any) -> Any:
        found = self._groups.get(number)
        if found is not None:
            self._groups.move_to_end(number)
        return found
