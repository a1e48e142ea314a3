"""Eviction in a cluster: copies of what is at home on other nodes leave first.

Theory. A node keeps what it is the home of, and copies of what its own clients read of others' keys. To the policy of
`core/machines/eviction.py` both are the same. But a copy that left costs a read of its home, and what left its home
costs a read of the backend, for every node. If both compete, a corpus that fits the cluster but not a node never comes
to rest: with room for 1.5 times the corpus on three nodes each epoch asked the backend for a sixth of it again.

So copies are a pool of their own. When room is needed it gives first, down to SHARE of the capacity; below that copies
and the rest compete as equals. What is left of a node's room belongs to copies, and SHARE of it always does: what is
read often on every node (a model's weights) stays near. In the pool the usual contest decides which copies stay.

Copies of a bucket with a quota stay in the bucket's pool, and count for the quota.

Rejected: no copies at all (a hot object would be as fast as its home's link); a price for each kind of miss (what a
backend's request costs beside a peer's is not known here, and any factor from 3 on does what this does).

Invariants. (1) While copies have more than SHARE, only copies, and units of buckets above their quota, are victims.
(2) A unit is a copy if and only if its bucket id is that of its bucket's copies.
"""

from __future__ import annotations

from forebay.core.machines.eviction import _PROBATION, POOLS_MAX, Eviction
from forebay.core.machines.pool import Pool
from forebay.core.machines.slots import APART

SHARE = 0.1
_CODE = POOLS_MAX + 2  # of the pool: quotas have those before it
_MARK = "\0copies"  # behind a bucket's name


class EvictionOfCopies(Eviction):
    """See the module's header."""

    def __init__(self, capacity_bytes: int) -> None:
        self._copies: Pool | None = None  # until there is the first
        super().__init__(capacity_bytes)

    # --- settings ----------------------------------------------------------------------------------------------------
    def set_capacity(self, capacity_bytes: int) -> None:
        super().set_capacity(capacity_bytes)
        if self._copies is not None:
            self._copies.limit_bytes = capacity_bytes

    def set_quota(self, bucket: str, quota_bytes: int | None) -> None:
        copies = self._bucket_ids.get(bucket + _MARK)
        if copies is not None and quota_bytes is None and self._pool_of[copies] is not self._copies:
            self._move(copies, self._pool_of[copies], self._pool_of_copies())
        super().set_quota(bucket, quota_bytes)
        pool = self._pool_of[self._bucket_ids[bucket]]
        if copies is not None and pool is not self._open and self._pool_of[copies] is not pool:
            self._move(copies, self._pool_of[copies], pool)

    def _pool_of_copies(self) -> Pool:
        if self._copies is None:
            self._copies = self._pools[_CODE] = Pool(_CODE, self.capacity_bytes)
        return self._copies

    def _id_of(self, bucket: str, copy: bool) -> int:
        if not copy:
            return self._bucket_id(bucket)
        found = self._bucket_ids.get(bucket + _MARK)
        if found is None:
            pool = self._pool_of[self._bucket_id(bucket)]
            found = self._bucket_id(bucket + _MARK)
            self._pool_of[found] = self._pool_of_copies() if pool is self._open else pool
        return found

    # --- events ------------------------------------------------------------------------------------------------------
    def landed(self, unit: int, size_bytes: int, bucket: str, name: int = 0, copy: bool = False) -> None:
        """As in `Eviction`; `copy`: another node is its home."""
        self._id_of(bucket, copy)
        super().landed(unit, size_bytes, bucket + _MARK if copy else bucket, name)

    def place(self, unit: int, copy: bool) -> None:
        """Note whether another node is the unit's home now."""
        slot = self._slots.get(unit)
        if slot is None or self.is_copy(slot) == copy:
            return
        before = self._buckets[slot]
        bucket_id = self._id_of(self._bucket_names[before].removesuffix(_MARK), copy)
        old, new, size_bytes = self._pool_of[before], self._pool_of[bucket_id], self._sizes[slot]
        self._buckets[slot] = bucket_id
        self._bucket_bytes[before] -= size_bytes
        self._bucket_bytes[bucket_id] += size_bytes
        if old is new:
            return
        if self._flags[slot] & _PROBATION:
            old.probation_bytes -= size_bytes
            new.probation_bytes += size_bytes
            new.probation.append(unit)
        else:
            old.main_bytes -= size_bytes
            new.main_bytes += size_bytes
            if self._state[slot] != APART:
                self._state[slot] = new.code

    def is_copy(self, slot: int) -> bool:
        """Whether the unit in a slot is one."""
        return self._bucket_names[self._buckets[slot]].endswith(_MARK)

    # --- choosing ----------------------------------------------------------------------------------------------------
    def _spare_bytes(self, more_bytes: int = 0) -> int:
        """How much copies have above their share, if they had so much more."""
        if self._copies is None:
            return 0
        return max(0, self._copies.used_bytes + more_bytes - int(self.capacity_bytes * SHARE))

    def _drain_all(self, need_bytes: int, units: list[int]) -> int:
        freed = 0
        if self._copies is not None and (spare_bytes := self._spare_bytes()):
            freed = self._drain(self._copies, min(need_bytes, spare_bytes), units)
        return freed + super()._drain_all(need_bytes - freed, units)

    def check(self) -> None:
        super().check()
        assert self._pools.get(_CODE) is self._copies
        for name, bucket_id in self._bucket_ids.items():
            of = self._pool_of[self._bucket_ids[name.removesuffix(_MARK)]]
            if name.endswith(_MARK):
                assert self._pool_of[bucket_id] is (self._copies if of is self._open else of), name
            else:
                assert of is not self._copies, name
