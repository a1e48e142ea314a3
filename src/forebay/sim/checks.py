"""What must hold, whatever happened: the judge of every answer.

Theory. The judge knows the truth (the backend's history, the list of local writes) and looks at answers only, so it
shares no code and no opinion with the machines it judges. A read is right if its bytes are exactly those of the version
it says, that version was current at some moment the bucket's freshness allows, or if it failed for a reason that was
real. A local write that was acknowledged is read back, or a later one.

Invariant. A finding is raised as `Finding` with what was expected; the run ends there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.core.errors import Busy, Closed, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.types import FRESH_IMMUTABLE
from forebay.sim.backend import Name, SimBackend
from forebay.sim.node import Read, show
from forebay.sim.schedule import Schedule


class Finding(AssertionError):
    """The simulator found a bug."""


@dataclass(slots=True)
class LocalWrite:
    version: str
    data: bytes
    started_us: int
    acknowledged_us: int = -1


@dataclass(slots=True)
class Judge:
    """Keeps the ledger and judges answers."""

    schedule: Schedule
    backend: SimBackend
    freshness_s: dict[str, float]
    writes: dict[Name, list[LocalWrite]] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    newest: dict[Name, list[tuple[int, int]]] = field(default_factory=dict)  # (answered at, position in history)
    calm_since_us: int = -1  # since when nothing fails any more; -1: not yet

    # --- the ledger --------------------------------------------------------------------------------------------------
    def writing(self, name: Name, version: str, data: bytes) -> LocalWrite:
        write = LocalWrite(version, data, self.schedule.now_us)
        self.writes.setdefault(name, []).append(write)
        return write

    # --- answers -----------------------------------------------------------------------------------------------------
    def judge(self, read: Read, error: ForebayError | None) -> None:
        outcome = "ok" if error is None else error.kind
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if read.name in self.writes or read.name[0] == "local":
            self._judge_local(read, error)
        elif error is not None:
            self._judge_failure(read, error)
        else:
            self._judge_bytes(read, self.backend.bytes_of(read.name, read.version))
            self._judge_freshness(read, read.version)
            self._judge_order(read)

    def _judge_bytes(self, read: Read, whole: bytes) -> None:
        expected = whole[read.start : read.end]
        if bytes(read.got) != expected:
            at = next((n for n, (a, b) in enumerate(zip(read.got, expected, strict=False)) if a != b), len(read.got))
            raise Finding(
                f"read {read.number} of {show(read.name)} {read.version} {read.start}-{read.end} got "
                f"{len(read.got)} of {len(expected)} bytes, wrong from byte {read.start + at} on"
            )

    def _judge_freshness(self, read: Read, version: str) -> None:
        bound_s = self.freshness_s[read.name[0]]
        from_us = 0 if bound_s >= FRESH_IMMUTABLE else read.asked_us - int(bound_s * 1e6)
        if not self.backend.was_current(read.name, version, from_us, self.schedule.now_us):
            what = f"{version} of {show(read.name)}" if version else f"that {show(read.name)} does not exist"
            raise Finding(f"read {read.number} answered {what}, which was not so within {bound_s} s of being asked")

    def _judge_order(self, read: Read) -> None:
        """Who asks after somebody was answered is not given an earlier version."""
        moments = self.backend.history[read.name]
        position = next(at for at, moment in enumerate(moments) if moment.version == read.version)
        answered = self.newest.setdefault(read.name, [])
        if any(at_us < read.asked_us and other > position for at_us, other in answered):
            raise Finding(f"read {read.number} of {show(read.name)} got {read.version} after a later one was read")
        answered.append((self.schedule.now_us, position))
        del answered[:-50]

    def _judge_failure(self, read: Read, error: ForebayError) -> None:
        if isinstance(error, NotFound):
            self._judge_freshness(read, "")
        elif isinstance(error, Precondition):
            moments = self.backend.history.get(read.name, [])
            if not any(moment.since_us >= read.asked_us for moment in moments) and len(moments) < 2:
                raise Finding(f"read {read.number} of {show(read.name)} failed as changed, but it never changed")
        elif isinstance(error, Closed):
            pass  # the node was stopped, or the client left: the simulator did that
        elif not isinstance(error, Unavailable | Busy):
            raise Finding(f"read {read.number} of {show(read.name)} failed with {error!r}")
        elif 0 <= self.calm_since_us <= read.asked_us:
            raise Finding(f"read {read.number} of {show(read.name)} failed though nothing is wrong: {error!r}")

    def _judge_local(self, read: Read, error: ForebayError | None) -> None:
        writes = self.writes.get(read.name, [])
        known = [n for n, write in enumerate(writes) if 0 <= write.acknowledged_us < read.asked_us]
        if error is not None:
            if isinstance(error, NotFound) and known:
                raise Finding(f"{show(read.name)} is lost: {writes[known[-1]].version} was acknowledged")
            return
        at = next((n for n, write in enumerate(writes) if write.version == read.version), -1)
        if at < 0 or (known and at < known[-1]):
            newest = writes[known[-1]].version if known else "nothing"
            raise Finding(f"{show(read.name)} reads as {read.version} after {newest} was acknowledged")
        self._judge_bytes(read, writes[at].data)
