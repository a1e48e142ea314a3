"""Where a key is, and what this node has of it: the one place that answers, for fronts and engine.

Theory. A key belongs to one of the node's volumes, which `core/placement.py` computes from their ids and weights. That
volume's index has at most one record of the key. `StoreReader` (what is committed) and `Store` (pending changes
included) say how a record is read; everything else about a key's whereabouts stands here. So whoever serves, fetches,
evicts or writes an object asks this class and never looks for a volume itself. In a cluster a key may be another
node's: that is then one more field of `Here`, and `lookup` finds nothing.

Nearly all callers need the record alone, most of them under a condition. These are the questions below `here`: they
answer with the record, or None if there is none that will do. A hit asks `fresh` and nothing else.

Invariants. (1) The same volumes and weights give a key the same place in every process. (2) `lookup` never answers with
a record from another volume than the key's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from forebay.core.machines.opening import may_serve
from forebay.core.placement import Members
from forebay.core.record import OWNED, Record, is_version
from forebay.core.types import Bucket

VolumeT = TypeVar("VolumeT")


def _always() -> bool:
    return True


class Here(NamedTuple):
    """The answer. `volume_id`: the volume that the key belongs to, "" when every volume is out. `record`: what that
    volume has of the key; None: nothing, or its index cannot be read."""

    volume_id: str
    record: Record | None


class Whereabouts(ABC, Generic[VolumeT]):
    """See the module's header."""

    def __init__(self) -> None:
        self._by_id: dict[str, VolumeT] = {}
        self._members = Members([])
        self.acts: Callable[[], bool] = _always  # whether hits of buckets that are kept on two nodes may be served

    def _settle(self, volumes: dict[str, VolumeT], weights: Mapping[str, float]) -> None:
        """These are the volumes from now on. One with a weight alone has keys, but cannot be read."""
        self._by_id, self._members = volumes, Members(weights)

    def volume_of(self, bucket: str, key: str) -> str:
        """The id of the volume that a key belongs to; "" when every volume is out."""
        return self._members.first(bucket, key) if self._members.ids else ""

    @abstractmethod
    def lookup(self, bucket: str, key: str) -> Record | None:
        """The key's record; None if there is none, or if its volume cannot be read."""

    def here(self, bucket: str, key: str) -> Here:
        """Where the key is, and what is here of it."""
        return Here(self.volume_of(bucket, key), self.lookup(bucket, key))

    # --- what of it will do ---
    def fresh(self, bucket: Bucket, key: str, now_s: float) -> Record | None:
        """What may be served without asking anybody."""
        if bucket.copies > 1 and bucket.is_kept_twice and not self.acts():
            return None
        record = self.lookup(bucket.name, key)
        if record is not None and may_serve(record.state, record.checked_s, bucket.freshness_s, now_s):
            return record
        return None

    def of_version(self, bucket: str, key: str, version: str) -> Record | None:
        """The record, if it has bytes of this version."""
        record = self.lookup(bucket, key)
        return record if record is not None and is_version(record, version) else None

    def of_object(self, bucket: str, key: str, object_id: int) -> Record | None:
        """The record, if it is still this object's."""
        record = self.lookup(bucket, key)
        return record if record is not None and record.object_id == object_id else None

    def owned(self, bucket: str, key: str) -> Record | None:
        """The record, if the object is dirty or local: nobody else has it."""
        record = self.lookup(bucket, key)
        return record if record is not None and record.state & OWNED else None
