"""Where a run's time went: productive, stalled by saves, restarting, or lost and down.

Theory. Each life of a job (from one start of its process to its end) keeps one small record beside its checkpoints
and writes it anew with every save. A record says when the life began, how long restoring took, how long saves stalled
it, and when it last saved. From the records of all lives follows everything: what a life did after its last save is
lost when the next one begins, because that one starts from the save.

Time between the last save of a life and the begin of the next is lost work and time that the job was down. Nobody who
was killed can say where one ends, so both are one number.

Invariant. The four parts add up to the time from the first begin to the last record, less the pauses after lives that
closed by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from forebay.core.metrics import Snapshot, series


class Life(msgspec.Struct, frozen=True):
    """One life of a job. Times are Unix time, durations seconds. `ended`: it closed by itself."""

    began_s: float
    saved_s: float  # of its last save that counts, or of the restore; `began_s` before
    restored_s: float = 0.0  # how long restoring took
    stall_s: float = 0.0
    saves: int = 0
    step: int = 0
    ended: bool = False


class Goodput(msgspec.Struct, frozen=True):
    """Sums over the lives of a run. `failures`: lives that another one followed without having closed."""

    productive_s: float
    stalled_s: float
    restarting_s: float
    lost_s: float
    failures: int
    lives: int
    saves: int

    @property
    def run_s(self) -> float:
        return self.productive_s + self.stalled_s + self.restarting_s + self.lost_s

    @property
    def share(self) -> float:
        """The productive share of the run, from 0 to 1."""
        return self.productive_s / self.run_s if self.run_s else 0.0


def goodput(lives: Sequence[Life]) -> Goodput:
    """The sums over `lives`, whatever their order."""
    ordered = sorted(lives, key=lambda life: life.began_s)
    productive_s = stalled_s = restarting_s = lost_s = 0.0
    failures = 0
    for at, life in enumerate(ordered):
        after = ordered[at + 1] if at + 1 < len(ordered) else None
        alive_s = max(0.0, life.saved_s - life.began_s)
        restarting = min(life.restored_s, alive_s)
        stalled = min(life.stall_s, alive_s - restarting)
        restarting_s += restarting
        stalled_s += stalled
        productive_s += alive_s - restarting - stalled
        if after is not None and not life.ended:
            failures += 1
            lost_s += max(0.0, after.began_s - max(life.saved_s, life.began_s))
    saves = sum(life.saves for life in ordered)
    return Goodput(productive_s, stalled_s, restarting_s, lost_s, failures, len(ordered), saves)


def as_metrics(run: str, lives: Sequence[Life]) -> Snapshot:
    """The same as metrics, labelled with the run's place."""
    found = goodput(lives)
    parts = {
        "productive": found.productive_s,
        "stalled": found.stalled_s,
        "restarting": found.restarting_s,
        "lost": found.lost_s,
    }
    values = {series("forebay_run_seconds", run=run, part=part): seconds for part, seconds in parts.items()}
    values[series("forebay_run_lives", run=run)] = found.lives
    values[series("forebay_run_failures", run=run)] = found.failures
    values[series("forebay_run_saves", run=run)] = found.saves
    saved = [life.saved_s for life in lives if life.saves]
    if saved:
        values[series("forebay_run_saved_seconds", run=run)] = max(saved)
    return Snapshot(values)
