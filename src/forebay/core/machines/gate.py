"""Which write must wait until its bucket owes the backend less, and which is refused.

Theory. A write-back bucket may owe a bounded number of bytes, for a bounded time. Above the bound, writers wait in
order of arrival, and are refused when their time is up. A refused writer is told when to try again. Acknowledged writes
are not touched. An admitted write counts as owed only when it is committed, a little later; until it ends, well or
badly, its bytes are *promised*. Otherwise many writers admitted at once would pass the bound together. (Between its
commit and its end a write counts twice, which errs on the bound's side.) A write larger than the bound is admitted when
nothing else is owed, since it would otherwise never pass.

Rejected: letting small writes pass a large one that waits (the large one might wait for ever); refusing at once (most
writers would rather wait a second than handle an error); promises that only a commit or half a minute ends (writes that
failed, on a full disk or at a condition, kept the others waiting for nothing).

Invariants. (1) Every writer is answered once, in the order of arrival. (2) Owed and promised bytes together are at most
the bound, or one write.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from forebay.core.machines.flush import PROBE_MAX_S, Wake, Woke

RETRY_AFTER_S = 5.0  # what a refused writer is told; while the backend is ill, PROBE_MAX_S


class Knock(msgspec.Struct, frozen=True):
    """A writer of `size_bytes` asks to be admitted, and waits until `until_s`."""

    writer: int
    size_bytes: int
    until_s: float


class Gone(msgspec.Struct, frozen=True):
    """The writer stopped waiting, or its write ended: it failed, or it is among what is owed by now."""

    writer: int


class Owes(msgspec.Struct, frozen=True):
    """How much the bucket owes now, since when (in the gate's own seconds), and whether the backend is sick."""

    dirty_bytes: int
    oldest_s: float | None
    is_sick: bool = False


class Bounds(msgspec.Struct, frozen=True):
    """How much the bucket may owe, and for how long."""

    dirty_bytes_max: int
    dirty_age_max_s: float


class Admit(msgspec.Struct, frozen=True):
    writer: int


class Refuse(msgspec.Struct, frozen=True):
    writer: int
    retry_after_s: float


class Gate(msgspec.Struct):
    """See the module's header. All times are of one monotonic clock."""

    bounds: Bounds
    owes: Owes = Owes(0, None)
    waiting: OrderedDict[int, Knock] = msgspec.field(default_factory=OrderedDict)
    promised: dict[int, int] = msgspec.field(default_factory=dict)  # bytes of the admitted writes that have not ended
    promised_bytes: int = 0

    def step(self, now: float, event: Knock | Gone | Owes | Bounds | Woke) -> list[Admit | Refuse | Wake]:
        """Take one event; return answers in the order of arrival, then at most one `Wake`."""
        match event:
            case Knock(writer):
                assert writer not in self.waiting
                self.waiting[writer] = event
            case Gone(writer):
                self.waiting.pop(writer, None)
                self.promised_bytes -= self.promised.pop(writer, 0)
            case Bounds():
                self.bounds = event
            case Owes():
                self.owes = event
            case Woke():
                pass
        return self._answers(now)

    def _answers(self, now: float) -> list[Admit | Refuse | Wake]:
        effects: list[Admit | Refuse | Wake] = []
        while self.waiting:
            knock = next(iter(self.waiting.values()))
            if self._has_room(now, knock.size_bytes):
                self.promised[knock.writer] = knock.size_bytes
                self.promised_bytes += knock.size_bytes
                effects.append(Admit(knock.writer))
            elif knock.until_s <= now:
                effects.append(Refuse(knock.writer, PROBE_MAX_S if self.owes.is_sick else RETRY_AFTER_S))
            else:
                return [*effects, Wake(knock.until_s)]
            del self.waiting[knock.writer]
        return effects

    def _has_room(self, now: float, size_bytes: int) -> bool:
        """Whether a write of `size_bytes` may pass. One larger than the bound passes when nothing else is owed."""
        if self.owes.oldest_s is not None and now - self.owes.oldest_s > self.bounds.dirty_age_max_s:
            return False
        owed_bytes = self.owes.dirty_bytes + self.promised_bytes
        return owed_bytes == 0 or owed_bytes + size_bytes <= self.bounds.dirty_bytes_max

    def check(self) -> None:
        """Assert the invariants."""
        assert self.promised_bytes == sum(self.promised.values())
