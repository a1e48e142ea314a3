"""Background scrub: re-reads every block from time to time, to find a rotten one before a client does.

Theory. The scrub walks records in index order, volume after volume, block after block, at a bounded rate. Its position
is kept in the index's `meta` table, so a restart continues the walk. A block that does not match is dropped from the
index and reported; the next reader fetches it again. Blocks in doubt after an unclean machine stop are checked by the
same walk, which removes the doubt.

A step has three parts, so that an engine can read in a worker thread: `next_unit` (index), `Store.check_blocks` (disk),
`settle` (index). `step` does all three.

Rejected: checking at every read (a third of the hit's cost, for a fault seen once in years); a random walk (no bound on
how long a block stays unread).

Invariants. (1) Over any second, no more than `rate_bytes_s` plus one block is read. (2) Each round reads every block
that stays listed meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from forebay.core.errors import Unavailable
from forebay.core.record import Record, decode_record
from forebay.node.store.disk import files, keys, presence
from forebay.node.store.writer.writer import Store

IDLE_S = 60.0  # until the next look when there is nothing to scrub
UNIT_BYTES_MIN = 64 * 1024  # the least that a unit counts: a million tiny objects must not keep a core busy
ROUND_S = 6 * 3600.0  # between two rounds over a volume
_KEEP_EVERY = 64  # units between two records of the position


class ScrubUnit(NamedTuple):
    """One block (or one inline object) to be checked."""

    bucket: str
    key: str
    record: Record
    block: int
    size_bytes: int


class _Cursor(msgspec.Struct, array_like=True):
    """The walk's position in a volume: the next index key, and the next block of its object."""

    entry: bytes = b""
    block: int = 0
    rounds: int = 0


class Scrubber:
    """Re-reads every block in index order, for ever, resuming where it was after a restart.

    Counts since the start: `units_checked`, `bytes_checked`, `units_bad`.
    """

    def __init__(self, store: Store, *, rate_bytes_s: float = 50e6, round_s: float = ROUND_S) -> None:
        self._store = store
        self._rate_bytes_s = rate_bytes_s
        self._round_s = round_s
        self._rest_until_s: dict[str, float] = {}
        self._volume = 0
        self._cursors: dict[str, _Cursor] = {}
        self._due_s: float | None = None
        self._steps = 0
        self.units_checked = 0
        self.bytes_checked = 0
        self.units_bad = 0

    def step(self, now_s: float) -> float:
        """Check the next block if it is due; return the seconds (monotonic) until the next call.

        Reads from the disk. Call it where waiting is acceptable, or use the three parts.
        """
        if self._due_s is not None and now_s < self._due_s:
            return self._due_s - now_s
        unit = self.next_unit(now_s)
        if unit is None:
            return IDLE_S
        try:
            bad = self._store.check_blocks(unit.record, unit.bucket, unit.key, [unit.block])
        except Unavailable:
            return IDLE_S  # the volume is out; the store has reported it
        self.settle(unit, bad)
        return self.pace(unit, now_s)

    def pace(self, unit: ScrubUnit, now_s: float) -> float:
        """Seconds to wait after a unit to keep the rate."""
        start_s = now_s if self._due_s is None else max(self._due_s, now_s - 1.0)
        self._due_s = start_s + max(unit.size_bytes, UNIT_BYTES_MIN) / self._rate_bytes_s
        return max(0.0, self._due_s - now_s)

    def next_unit(self, now_s: float) -> ScrubUnit | None:
        """The next unit to check; None when there is none now. The walk goes round through all volumes in turn."""
        volumes = self._store.usable()
        for _ in range(len(volumes) + 1):
            if not volumes:
                return None
            volume = volumes[self._volume % len(volumes)]
            if now_s < self._rest_until_s.get(volume.id, now_s):
                self._volume += 1
                continue
            cursor = self._cursors.get(volume.id)
            if cursor is None:
                cursor = self._cursors[volume.id] = _read_cursor(volume.get("meta", b"scrub"))
            for entry, value in volume.index.walk("records", cursor.entry, batch=2):
                if entry != cursor.entry:
                    cursor.entry, cursor.block = entry, 0
                record = volume.record(entry, decode_record(value).key)  # pending changes included
                unit = _unit_at(entry, record, cursor.block) if record is not None else None
                if unit is not None:
                    cursor.block = unit.block + 1
                    self._keep(volume.id)
                    return unit
            cursor.entry, cursor.block, cursor.rounds = b"", 0, cursor.rounds + 1
            self._rest_until_s[volume.id] = now_s + self._round_s
            self._volume += 1
        return None

    def settle(self, unit: ScrubUnit, bad: list[int]) -> None:
        """Record the outcome of a unit. A block that was dropped while it was read is not bad."""
        self.units_checked += 1
        self.bytes_checked += unit.size_bytes
        now = self._store.of_object(unit.bucket, unit.key, unit.record.object_id)
        if now is None:
            return
        if now.inline is None and not presence.bits_of(now) >> unit.block & 1:
            return
        self.units_bad += len(bad)
        good = [] if bad else [unit.block]
        self._store.settle_checked(unit.bucket, unit.key, now.object_id, good, bad)

    def rounds(self) -> int:
        """How often the slowest volume has been walked completely, restarts included."""
        return min((cursor.rounds for cursor in self._cursors.values()), default=0)

    def _keep(self, volume_id: str) -> None:
        self._steps += 1
        if self._steps % _KEEP_EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Store the walk's position with the next flush."""
        for volume in self._store.usable():
            if volume.id in self._cursors:
                volume.index.put("meta", b"scrub", msgspec.msgpack.encode(self._cursors[volume.id]))


def _read_cursor(value: bytes | None) -> _Cursor:
    try:
        return msgspec.msgpack.decode(value, type=_Cursor) if value else _Cursor()
    except msgspec.MsgspecError:
        return _Cursor()


def _unit_at(entry: bytes, record: Record, block: int) -> ScrubUnit | None:
    """The first present block of the record at or after `block`; None when there is none."""
    bucket, key = keys.split(entry, record.key)
    if record.inline is not None:
        return ScrubUnit(bucket, key, record, 0, len(record.inline)) if block == 0 else None
    left = presence.bits_of(record) >> block
    if not left:
        return None
    block += (left & -left).bit_length() - 1
    start, end = files.block_range(record.size_bytes, record.block_bytes, block)
    return ScrubUnit(bucket, key, record, block, end - start)
