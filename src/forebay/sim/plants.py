"""Bugs to plant in the product: a simulator that finds nothing must be shown to find something.

Theory. Each changes one function of the product the way a tired programmer might, for the length of one run.
`tests/sim` runs seeds until each is found.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from forebay.backends.wrap import retrying
from forebay.core import placement
from forebay.core.machines import delivery, eviction, flight, flush, opening, recover, retry, sent_bodies
from forebay.core.s3rules import conditions
from forebay.node.engine.read import cold, pages
from forebay.node.engine.write import appends, copies, locks, parts, uploads, writes
from forebay.node.front.objects import fast_lane
from forebay.node.store import whereabouts
from forebay.node.store.disk import journal, volume_threads
from forebay.node.store.writer import puts
from forebay.sim.doors import Patch, patched

Plants = dict[str, Callable[[], list[Patch]]]


def _flight() -> list[Patch]:
    """A block that has begun to land is announced whole."""
    real = flight.Flight._readable_to

    def readable_to(self: flight.Flight, position: int, end: int) -> int:
        at = real(self, position, end)
        return min(end, -(-at // self.block_bytes) * self.block_bytes) if at > position else at

    return [(flight.Flight, "_readable_to", readable_to)]


def _ranges() -> list[Patch]:
    """The first missing block is overlooked when it is the last one asked for."""
    real = vars(flight)["next_absent"]

    def next_absent(present: bytes, first: int, end: int) -> int:
        at: int = real(present, first, end)
        return end if at == end - 1 else at

    return [(flight, "next_absent", next_absent)]


def _commit() -> list[Patch]:
    """A durable write is acknowledged without fsync of its file."""
    return [(puts, "_sync_files", lambda volume, steps: None)]


def _write() -> list[Patch]:
    """The name of a written file is not synced before its durable record."""
    real = vars(puts)["sync_path"]
    return [(puts, "sync_path", lambda path: None if os.path.isdir(path) else real(path))]


def _recover() -> list[Patch]:
    """Of two files of an object the one that its durable record names is deleted."""
    real = recover.judge_file

    def judge(seen: recover.FileSeen, record: recover.RecordSeen | None, trusted: bool) -> list[recover.Action]:
        actions = real(seen, record, trusted)
        if record and record.durable and actions == [recover.Delete(seen.path, "superseded")]:
            return [recover.Delete(record.path, "superseded")]
        return actions

    return [(recover, "judge_file", judge)]


def _owed() -> list[Patch]:
    """What is durable is not put into view again where nothing is in its place."""
    real = recover.judge_owed

    def judge(
        owed: recover.RecordSeen, now: recover.RecordSeen | None, settled: bool, size_bytes: int | None
    ) -> list[recover.Action]:
        return [] if now is None else real(owed, now, settled, size_bytes)

    return [(recover, "judge_owed", judge)]


def _flush() -> list[Patch]:
    """A flush that ends clears what the key owes, whatever was written meanwhile."""
    real = flush.Queue._ended

    def ended(self: flush.Queue, event: flush.Ended) -> None:
        real(self, msgspec.structs.replace(event, seq=1 << 60))

    return [(flush.Queue, "_ended", ended)]


def _sent() -> list[Patch]:
    """Of what was sent nothing is remembered."""
    return [(sent_bodies, "left", lambda sent, digest: sent)]


def _whose() -> list[Patch]:
    """What the backend has is taken for a stranger's."""
    return [(delivery, "judge", lambda seen, ours, digest="": sent_bodies.Whose.STRANGER)]


def _deleted() -> list[Patch]:
    """An opening forgets that a key's delete is on its way to the backend."""
    real = cold.ColdReads.__init__

    def init(self: cold.ColdReads, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        self._deleted = lambda bucket, key: False

    return [(cold.ColdReads, "__init__", init)]


def _listing() -> list[Patch]:
    """A listing does not know of what is owed."""
    return [(pages.Pages, "_window", lambda self, bucket, prefix, after: [])]


def _locks() -> list[Patch]:
    """Two have a key's lock at once."""

    async def take(self: locks.KeyLocks, name: tuple[str, str]) -> None:
        self._waiting.setdefault(name, deque())

    def give(self: locks.KeyLocks, name: tuple[str, str]) -> None:
        self._waiting.pop(name, None)

    return [(locks.KeyLocks, "take", take), (locks.KeyLocks, "give", give)]


def _condition() -> list[Patch]:
    """A write's condition always holds."""

    async def check(self: writes.Writes, *args: Any, **named: Any) -> None:
        return None

    return [(writes.Writes, "check", check)]


def _journal() -> list[Patch]:
    """The journal acknowledges a frame that is not synced."""

    class Unsynced:
        def __getattr__(self, name: str) -> Any:
            return (lambda fd: None) if name == "fdatasync" else getattr(os, name)

    return [(journal, "os", Unsynced())]


def _settled() -> list[Patch]:
    """What a start finds owed is taken for what has arrived."""
    real = recover.judge_owed

    def judge(
        owed: recover.RecordSeen, now: recover.RecordSeen | None, settled: bool, size_bytes: int | None
    ) -> list[recover.Action]:
        return real(owed, now, True, size_bytes)

    return [(recover, "judge_owed", judge)]


def _append() -> list[Patch]:
    """The last byte of a shard is not copied to the one with a member more."""
    real = appends._copy
    return [(appends, "_copy", lambda source, target, size_bytes: real(source, target, max(0, size_bytes - 1)))]


def _parts() -> list[Patch]:
    """The parts of an upload are joined in the order in which they came last."""
    real = parts.join
    return [(parts, "join", lambda directory, chosen, target: real(directory, chosen[::-1], target))]


def _conditions() -> list[Patch]:
    """If-Match of a copy's source is not looked at."""
    real = conditions.Conditions.judge

    def judge(self: Any, etag: str, modified_s: float) -> int:
        return 200 if real(self, etag, modified_s) == 412 else real(self, etag, modified_s)

    return [(conditions.Conditions, "judge", judge)]


def _eviction() -> list[Patch]:
    """Units in use are victims like any other."""
    return [(eviction.Eviction, "_in_use", lambda self, unit: False)]


def _retry() -> list[Patch]:
    """Every retry is decided as if it were the first: neither attempts nor the budget are counted."""
    real = vars(retrying)["delay_before_retry"]

    def delay(attempt: int, error: Any, elapsed_s: float, draw: float, budget: Any, policy: Any) -> float | None:
        delay_s: float | None = real(1, error, elapsed_s, draw, retry.RetryBudget(), policy)
        return delay_s

    return [(retrying, "delay_before_retry", delay)]


def _placement() -> list[Patch]:
    """A volume draws by its position in the list, not by its name."""
    real = placement.Members.__init__

    def init(self: placement.Members, weights: Any) -> None:
        real(self, weights)
        self._seeds = tuple(range(len(self.ids)))

    return [(placement.Members, "__init__", init)]


def _freshness() -> list[Patch]:
    """Fronts take seconds for minutes."""
    real = opening.may_serve

    def may_serve(state: int, checked_s: float, freshness_s: float, now_s: float) -> bool:
        return real(state, checked_s, freshness_s * 60, now_s)

    return [(module, "may_serve", may_serve) for module in (whereabouts, fast_lane)]


def _delete() -> list[Patch]:
    """A delete is taken for something that need not outlive the machine."""

    def delete(bucket: str, key: str, note: Any = None, durable: bool = False) -> puts.Delete:
        return puts.Delete(bucket, key, note)

    return [(writes, "Delete", delete)]


def _group() -> list[Patch]:
    """Of the changes that are made durable together only the first is."""
    real = puts.Puts._commit
    return [(puts.Puts, "_commit", lambda self, volume, steps: real(self, volume, steps[:1]))]


def _opening() -> list[Patch]:
    """An opening is content with what is here, however long ago it was confirmed."""
    return [(opening, "_suffices", lambda held, terms, now_s: True)]


def _copy() -> list[Patch]:
    """A piece of a copy's body is taken for shared with its source, and is not."""
    return [(copies, "_share", lambda source, target, size_bytes, offset, at: True)]


def _upload() -> list[Patch]:
    """An upload is completed whatever its If-None-Match says."""
    real = uploads.UploadBook._finish

    async def finish(self: uploads.UploadBook, served: Any, upload: Any, call: Any) -> Any:
        return await real(self, served, upload, msgspec.structs.replace(call, if_none_match=None))

    return [(uploads.UploadBook, "_finish", finish)]


def _waiting() -> list[Patch]:
    """The loop makes the changes that a volume's own thread should make, and so waits for the disk."""

    def call(self: volume_threads.Desk, work: Callable[..., Any], *arguments: Any, unwanted: Any = None) -> Any:
        if self.late:
            raise volume_threads.Late(self._path)
        return work(*arguments)

    return [(volume_threads.Desk, "call", call)]


PLANTS: Plants = {
    "append": _append,
    "commit": _commit,
    "condition": _condition,
    "conditions": _conditions,
    "copy": _copy,
    "delete": _delete,
    "deleted": _deleted,
    "eviction": _eviction,
    "flight": _flight,
    "flush": _flush,
    "freshness": _freshness,
    "group": _group,
    "journal": _journal,
    "listing": _listing,
    "locks": _locks,
    "opening": _opening,
    "owed": _owed,
    "parts": _parts,
    "placement": _placement,
    "ranges": _ranges,
    "recover": _recover,
    "retry": _retry,
    "sent": _sent,
    "settled": _settled,
    "upload": _upload,
    "waiting": _waiting,
    "whose": _whose,
    "write": _write,
}


@contextmanager
def planted(name: str | None, plants: Plants = PLANTS) -> Iterator[None]:
    """Run with this bug in place (None: as it is)."""
    with patched(plants[name]() if name else []):
        yield
