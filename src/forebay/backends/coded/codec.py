"""Computes slices from the bytes of a group, and lost slices from others: Reed-Solomon, by liberasurecode and ISA-L.

Theory. The code is systematic: the first K slices are the bytes themselves. It works byte for byte: byte i of each
slice is computed from bytes i of any K others. So a range of a lost slice is computed from the same range of K others,
and a read of a few kilobytes moves a few kilobytes.

The library puts 80 bytes of its own before each slice, with lengths and its version. They are left out where slices are
kept, so that what is kept is the code's alone, and are put back before the library is asked: they are those of as many
zeros.

Rejected: `zfec` (under the GPL); code of our own in numpy (slower by an order, and no place to be clever).

Invariant. What `restore` gives for a number is what `slices_of` gave for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.cluster.coding import Code
from forebay.core.errors import NotSupported

HEAD_BYTES = 80  # of liberasurecode: fragment_header_t
_KIND = "isa_l_rs_cauchy"  # any K rows of a Cauchy matrix can be inverted; ISA-L's Vandermonde matrix has not got that
_HEADS_KEPT_MAX = 64  # lengths of ranges for which the library's headers are known


class Codec:
    """Slices of one code. Methods block for milliseconds, and may run in threads at once. `NotSupported` without the
    library."""

    def __init__(self, code: Code) -> None:
        try:
            from pyeclib.ec_iface import ECDriver
        except ImportError:
            raise NotSupported(
                "buckets at coded:// need the package pyeclib, which is there for Linux alone: install it at every node"
            ) from None
        self.code = code
        self._driver: Any = ECDriver(k=code.k, m=code.m, ec_type=_KIND)
        self._heads: OrderedDict[int, list[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def slices_of(self, data: bytes) -> list[bytes]:
        """All slices of a group of these bytes, by number; each has `ceil(len(data) / k)` bytes."""
        short = -len(data) % self.code.k
        padded = data + bytes(short) if short else data
        return [fragment[HEAD_BYTES:] for fragment in self._driver.encode(padded)]

    def restore(self, known: Mapping[int, bytes], wanted: Sequence[int]) -> dict[int, bytes]:
        """The same range of these slices, from that of K others, by number."""
        assert len(known) >= self.code.k, (sorted(known), self.code)
        assert len({len(each) for each in known.values()}) == 1, "ranges of different lengths"
        wanted = [number for number in wanted if number not in known]
        if not wanted:
            return {}
        length = len(next(iter(known.values())))
        heads = self._heads_of(length)
        fragments = [heads[number] + known[number] for number in sorted(known)]
        made = self._driver.reconstruct(fragments, list(wanted))
        return {number: fragment[HEAD_BYTES:] for number, fragment in zip(wanted, made, strict=True)}

    def _heads_of(self, length: int) -> list[bytes]:
        with self._lock:
            heads = self._heads.get(length)
        if heads is None:
            heads = [fragment[:HEAD_BYTES] for fragment in self._driver.encode(bytes(length * self.code.k))]
        with self._lock:
            self._heads[length] = heads
            self._heads.move_to_end(length)
            while len(self._heads) > _HEADS_KEPT_MAX:
                self._heads.popitem(last=False)
        return heads
