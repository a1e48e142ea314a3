"""Which write must wait until its bucket owes the backend less, and which is refused.

Theory. A write-back bucket may owe a bounded number of bytes, for a bounded time. Above the bound, writers wait in
order of arrival, and are refused when their time is up. A refused writer is told when to try again. Acknowledged writes
are not touched. An admitted write counts as owed only when it is committed, a little later; until then its bytes are
*promised*. Otherwise many writers admitted at once would pass the bound together. A write larger than the bound is
admitted when nothing else is owed, since it would otherwise never pass.

Rejected: letting small writes pass a large one that waits (the large one might wait for ever); refusing at once (most
writers would rather wait a second than handle an error).

Invariants. (1) Every writer is answered once, in the order of arrival. (2) Owed and promised bytes together are at most
the bound, or one write.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import msgspec

from forebay.core.machines.flush import PROBE_MAX_S, Wake, Woke

PROMISE_KEPT_S = 30.0  # of an admitted write that failed before its commit: longer than a commit takes
RETRY_AFTER_S = 5.0  # what a refused writer is told; while the backend is ill, PROBE_MAX_S


class Knock(msgspec.Struct, frozen=True):
    """A writer of `size_bytes` asks to be admitted, and waits until `until_s`."""

    writer: int
    size_bytes: int
    until_s: float


class Gone(msgspec.Struct, frozen=True):
    """The writer stopped waiting."""

    writer: int


class Owes(msgspec.Struct, frozen=True):
    """How much the bucket owes now, since when (in the gate's own seconds), and whether the backend is sick."""

    dirty_bytes: int
    oldest_s: float | None
    is_sick: bool = False
    came_bytes: int | None = None  # the size of an admitted write that `dirty_bytes` now includes


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
    promised: deque[tuple[float, int]] = msgspec.field(default_factory=deque)  # (kept until, bytes) of admitted writes
    promised_bytes: int = 0

    def step(self, now: float, event: Knock | Gone | Owes | Bounds | Woke) -> list[Admit | Refuse | Wake]:
        """Take one event; return answers in the order of arrival, then at most one `Wake`."""
        match event:
            case Knock(writer):
                assert writer not in self.waiting
                self.waiting[writer] = event
            case Gone(writer):
                self.waiting.pop(writer, None)
            case Bounds():
                self.bounds = event
            case Owes():
                self.owes = event
                if event.came_bytes is not None and self.promised:
                    self.promised_bytes -= self.promised.popleft()[1]
            case Woke():
                pass
        while self.promised and self.promised[0][0] <= now:
            self.promised_bytes -= self.promised.popleft()[1]
        return self._answers(now)

    def _answers(self, now: float) -> list[Admit | Refuse | Wake]:
        effects: list[Admit | Refuse | Wake] = []
        while self.waiting:
            knock = next(iter(self.waiting.values()))
            if self._has_room(now, knock.size_bytes):
                self.promised.append((now + PROMISE_KEPT_S, knock.size_bytes))
                self.promised_bytes += knock.size_bytes
                effects.append(Admit(knock.writer))
            elif knock.until_s <= now:
                effects.append(Refuse(knock.writer, PROBE_MAX_S if self.owes.is_sick else RETRY_AFTER_S))
            else:
                ends_s = [knock.until_s, *(until_s for until_s, _ in list(self.promised)[:1])]
                return [*effects, Wake(max(now, min(ends_s)))]
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
        assert self.promised_bytes == sum(size_bytes for _, size_bytes in self.promised) >= 0
