"""Bugs to plant, one per machine: a simulator that finds nothing must be shown to find something.

Theory. Each plant changes one machine the way a tired programmer might, for the length of one run. `tests/sim` runs
seeds until each is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forebay.core import placement
from forebay.core.machines import commit, eviction, flight, flush, recover, retry, sent_bodies

_Patch = tuple[Any, str, Any]


def _flight() -> list[_Patch]:
    """A block that has begun to land is announced whole."""
    real = flight.Flight._readable_to

    def readable_to(self: flight.Flight, position: int, end: int) -> int:
        at = real(self, position, end)
        return min(end, -(-at // self.block_bytes) * self.block_bytes) if at > position else at

    return [(flight.Flight, "_readable_to", readable_to)]


def _ranges() -> list[_Patch]:
    """The first missing block is overlooked when it is the last one asked for."""
    real = vars(flight)["next_absent"]

    def next_absent(present: bytes, first: int, end: int) -> int:
        at: int = real(present, first, end)
        return end if at == end - 1 else at

    return [(flight, "next_absent", next_absent)]


def _commit() -> list[_Patch]:
    """A durable write is acknowledged without fsync of its file (and the plan checker looks away)."""
    real = commit.plan_durable

    def plan(*args: Any, **kwargs: Any) -> list[commit.Effect]:
        return [effect for effect in real(*args, **kwargs) if not isinstance(effect, commit.SyncFile)]

    return [(commit, "plan_durable", plan), (commit, "check_plan", lambda effects: None)]


def _recover() -> list[_Patch]:
    """Of two files of an object the one that its durable record names is deleted."""
    real = recover.judge_file

    def judge(seen: recover.FileSeen, record: recover.RecordSeen | None, trusted: bool) -> list[recover.Action]:
        actions = real(seen, record, trusted)
        if record and record.durable and actions == [recover.Delete(seen.path, "superseded")]:
            return [recover.Delete(record.path, "superseded")]
        return actions

    return [(recover, "judge_file", judge)]


def _eviction() -> list[_Patch]:
    """Units in use are victims like any other."""
    return [(eviction.Eviction, "_in_use", lambda self, unit: False)]


def _retry() -> list[_Patch]:
    """Every retry is decided as if it were the first: neither attempts nor the budget are counted."""
    real = retry.delay_before_retry

    def delay(attempt: int, error: Any, elapsed_s: float, draw: float, budget: Any) -> float | None:
        return real(1, error, elapsed_s, draw, retry.RetryBudget())

    return [(retry, "delay_before_retry", delay)]


def _placement() -> list[_Patch]:
    """A member draws by its position in the list, not by its name."""
    real = placement.Members.__init__

    def init(self: placement.Members, weights: Any) -> None:
        real(self, weights)
        self._seeds = tuple(range(len(self.ids)))

    return [(placement.Members, "__init__", init)]


def _freshness() -> list[_Patch]:
    """Seconds are taken for minutes."""
    from forebay.core.machines import opening  # it reads bounds, which `scale` may have to change first

    real = opening.may_serve

    def serve(state: int, checked_s: float, freshness_s: float, now_s: float) -> bool:
        return real(state, checked_s, freshness_s * 60, now_s)

    return [(opening, "may_serve", serve)]


def _write() -> list[_Patch]:
    """The name of a written file is not synced before its durable record (and the plan checker looks away)."""
    real = commit.plan_put

    def plan(*args: Any, **kwargs: Any) -> list[commit.Effect]:
        return [effect for effect in real(*args, **kwargs) if not isinstance(effect, commit.SyncDir)]

    return [(commit, "plan_put", plan), (commit, "check_plan", lambda effects: None)]


def _delete() -> list[_Patch]:
    """A delete is taken for something that need not outlive the machine."""
    real = commit.plan_delete

    def plan(old: commit.StoredVersion, *, tombstone: bool, durable: bool) -> list[commit.Effect]:
        return [
            dataclasses.replace(effect, durable=False) if isinstance(effect, commit.PutTombstone) else effect
            for effect in real(old, tombstone=tombstone, durable=durable)
        ]

    return [(commit, "plan_delete", plan), (commit, "check_plan", lambda effects: None)]


def _owed() -> list[_Patch]:
    """What is durable is not put into view again where nothing is in its place."""
    real = recover.judge_owed

    def judge(
        owed: recover.RecordSeen, now: recover.RecordSeen | None, settled: bool, size_bytes: int | None
    ) -> list[recover.Action]:
        return [] if now is None else real(owed, now, settled, size_bytes)

    return [(recover, "judge_owed", judge)]


def _flush() -> list[_Patch]:
    """A flush that ends clears what the key owes, whatever was written meanwhile."""
    real = flush.Queue._ended

    def ended(self: flush.Queue, event: flush.Ended) -> None:
        real(self, dataclasses.replace(event, seq=1 << 60))

    return [(flush.Queue, "_ended", ended)]


def _sent(bound: int = 2) -> list[_Patch]:
    """Of what was sent only the last few are known."""
    real = sent_bodies.left

    def left(sent: sent_bodies.Sent, digest: str) -> sent_bodies.Sent:
        return sent_bodies.Sent(real(sent, digest).tried[-bound:], sent.late)

    return [(sent_bodies, "left", left)]


def _late() -> list[_Patch]:
    """An answered flush is taken for the end of all that was sent before it."""
    return [(sent_bodies, "answered", lambda sent, began_s, ended_s, late_s=0.0: sent_bodies.Sent())]


PLANTS: dict[str, Callable[[], list[_Patch]]] = {
    "commit": _commit,
    "delete": _delete,
    "eviction": _eviction,
    "flight": _flight,
    "flush": _flush,
    "freshness": _freshness,
    "late": _late,
    "owed": _owed,
    "placement": _placement,
    "ranges": _ranges,
    "recover": _recover,
    "retry": _retry,
    "sent": _sent,
    "write": _write,
}
WRITING = {"delete", "flush", "late", "owed", "sent", "write"}  # those of the writers' world


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run with this bug in place (None: as it is)."""
    patches = PLANTS[name]() if name else []
    kept = [(where, what, vars(where)[what]) for where, what, _ in patches]
    for where, what, replacement in patches:
        setattr(where, what, replacement)
    try:
        yield
    finally:
        for where, what, original in kept:
            setattr(where, what, original)
