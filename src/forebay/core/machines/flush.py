"""Which dirty object of a bucket goes to the backend next, and when a failed flush is tried again.

Theory. For each key that owes something, a `Queue` knows the size, the age and the number of failures, never the bytes.
Keys start oldest first, at most `flushes_max` at once, in three lanes that take turns: keys that somebody asked for (a
reader, a job, a person), keys that failed and have waited, and the rest. While other lanes have keys, a lane gets at
most every second start. So neither a stream of requests nor a heap of failures holds up the rest, nor the rest them.

A failed key waits. The delay doubles each time up to DELAY_MAX_S, and is at least what the backend asks for. It is
DELAY_MAX_S at once if only a person can help (a refusal). A request for the key ends this delay, but not one that the
backend asked for. After SICK_AFTER failures in a row the backend itself counts as sick. Then only one flush at a time
probes it, less and less often up to PROBE_MAX_S, and the first success lets all keys start again.

Large writes come in runs, as a checkpoint's do, and whoever makes them waits until the disk has them. Flushes would
take disk and cores from that. So after each of REST_BYTES_MIN or more the queue *rests* for REST_S: only what somebody
asked for starts. A run of more than REST_MAX_S is not waited for, and a writer that must wait for flushes (`Pressed`)
ends the rest.

A key that is written again during its flush still owes. It is queued anew when that flush ends, with the age of its
first write that the backend lacks.

`core/machines/gate.py` decides which writers must wait for all this.

Rejected: one queue over all buckets (one slow backend would hold up the others); largest first (it empties the disk
soonest, and starves the small and old); dropping what fails for long (an acknowledged write is never dropped).

Invariants. (1) A key is in at most one flush. (2) At most `flushes_max` flushes are under way. While the backend is
sick, none starts beside another. (3) Each key that owes is under way, held, waiting, or in exactly one lane. (4) A key
leaves only when the backend has its latest write, or when the owner says that it owes nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum

import msgspec

from forebay.core import limits

DELAY_BASE_S = 1.0  # after the backend's own attempts, which took seconds
DELAY_MAX_S = 60.0
SICK_AFTER = 8
PROBE_BASE_S = 0.5
PROBE_MAX_S = 10.0
REST_BYTES_MIN = 16 * limits.MIB  # flushing it takes the disk for long
REST_S = 1.0  # longer than the gap between two large writes of one run, and little beside the flush of it
REST_MAX_S = 30.0


# --- what happens to a queue -----------------------------------------------------------------------------------------
class Wrote(msgspec.Struct, frozen=True):
    """The key now owes this write instead of the one before. `seq` grows with every write."""

    key: str
    seq: int
    size_bytes: int
    since_s: float


class Forgot(msgspec.Struct, frozen=True):
    """The key owes nothing any more. A flush under way goes on; its `Ended` or `Failed` changes nothing for the key."""

    key: str


class Asked(msgspec.Struct, frozen=True):
    """Somebody waits for the backend to have what the key owes now."""

    key: str


class Held(msgspec.Struct, frozen=True):
    """Start no flush of the key until it is written again, forgotten or released."""

    key: str


class Released(msgspec.Struct, frozen=True):
    """The key is no longer held. It owes what it owed before."""

    key: str


class Ended(msgspec.Struct, frozen=True):
    """The backend has write `seq` of the key. If the key owes later writes, the first of them is from `since_s`."""

    key: str
    seq: int
    since_s: float | None = None


class Failed(msgspec.Struct, frozen=True):
    """The flush failed. `draw` is uniform in [0, 1). `hopeless`: only a person can help. `here`: the cause is on this
    node and says nothing about the backend."""

    key: str
    draw: float = 0.5
    retry_after_s: float = 0.0
    hopeless: bool = False
    here: bool = False


class Dropped(msgspec.Struct, frozen=True):
    """The flush was given up because the key was written again or held. It does not count as a failure."""

    key: str


class Pressed(msgspec.Struct, frozen=True):
    """A writer waits until the bucket owes less."""


class Woke(msgspec.Struct, frozen=True):
    """Only time has passed."""


Event = Wrote | Forgot | Asked | Held | Released | Ended | Failed | Dropped | Pressed | Woke


# --- what a queue wants done -----------------------------------------------------------------------------------------
class Start(msgspec.Struct, frozen=True):
    """Flush write `seq` of the key, then send `Ended`, `Failed` or `Dropped`."""

    key: str
    seq: int


class Wake(msgspec.Struct, frozen=True):
    """Send `Woke` at this moment, unless something else happens before."""

    at_s: float


class Lane(Enum):
    """Where a key that owes something stands."""

    FRESH = "fresh"
    AGAIN = "again"
    URGENT = "urgent"
    WAITING = "waiting"
    FLYING = "flying"
    HELD = "held"


class _Owing(msgspec.Struct):
    seq: int
    size_bytes: int
    since_s: float
    lane: Lane = Lane.HELD
    ticket: int = 0  # of its entry in its lane's heap; entries with other tickets are outdated
    birth: int = 0  # the same for the heap of ages
    failures: int = 0
    asked_seq: int = 0  # the latest write that somebody waits for
    earliest_s: float = 0.0  # the backend asked for no request before this moment
    flying_seq: int = 0


class Queue:
    """See the module's header. `step` takes monotonic seconds; `since_s` is Unix time and only compared."""

    def __init__(self, flushes_max: int = limits.FLUSHES_MAX) -> None:
        assert flushes_max >= 1
        self.flushes_max = flushes_max
        self.dirty_bytes = 0
        self.failures_in_a_row = 0
        self._owing: dict[str, _Owing] = {}
        self._flying: dict[str, int] = {}  # every flush under way, also of keys forgotten meanwhile
        self._held: set[str] = set()
        self._fresh: list[tuple[float, int, str]] = []
        self._again: list[tuple[float, int, str]] = []
        self._waiting: list[tuple[float, int, str]] = []
        self._urgent: OrderedDict[str, None] = OrderedDict()
        self._ages: list[tuple[float, int, str]] = []
        self._tickets = 0
        self._counts = {Lane.FRESH: 0, Lane.AGAIN: 0}
        self._urgent_last = self._again_last = False
        self._probe_s = 0.0
        self._large_s = self._run_s = -math.inf  # when the last large write came, and the first of its run
        self._rests_until_s = -math.inf

    # --- what it is asked --------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        """How many keys owe something."""
        return len(self._owing)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def is_sick(self) -> bool:
        """Whether the backend failed so often that it only gets probes."""
        return self.failures_in_a_row >= SICK_AFTER

    def oldest_s(self) -> float | None:
        """Since when (Unix time) the oldest key owes, or None."""
        ages = self._ages
        while ages:
            since_s, birth, key = ages[0]
            owing = self._owing.get(key)
            if owing is not None and owing.birth == birth:
                return since_s
            heapq.heappop(ages)
        return None

    def since_s(self, key: str) -> float | None:
        """Since when the key owes, or None."""
        owing = self._owing.get(key)
        return None if owing is None else owing.since_s

    # --- what happens ------------------------------------------------------------------------------------------------
    def step(self, now: float, event: Event) -> list[Start | Wake]:
        """What to do after `event`: starts in order, then at most one `Wake`."""
        match event:
            case Wrote():
                if event.size_bytes >= REST_BYTES_MIN:
                    self._rest(now)
                self._wrote(event)
            case Forgot(key):
                self._held.discard(key)
                self._remove(key)
            case Asked(key):
                self._asked(now, key)
            case Held(key):
                self._held.add(key)
                owing = self._owing.get(key)
                if owing is not None and owing.lane is not Lane.FLYING:
                    self._leave_lane(key, owing)
                    owing.lane = Lane.HELD
            case Released(key):
                self._held.discard(key)
                owing = self._owing.get(key)
                if owing is not None and owing.lane is Lane.HELD:
                    self._queue(key, owing)
            case Ended():
                self._ended(event)
            case Failed():
                self._failed(now, event)
            case Dropped(key):
                self._landed(key)
                if (owing := self._owing.get(key)) is not None:
                    self._queue(key, owing)
            case Pressed():
                self._rests_until_s = now
            case Woke():
                pass
        return self._plan(now)

    def _rest(self, now: float) -> None:
        """A large write came, and others may follow."""
        if now - self._large_s > REST_S:
            self._run_s = now
        self._large_s = now
        self._rests_until_s = min(now + REST_S, self._run_s + REST_MAX_S)

    def _wrote(self, event: Wrote) -> None:
        key = event.key
        self._held.discard(key)
        owing = self._owing.get(key)
        if owing is None:
            owing = self._owing[key] = _Owing(event.seq, event.size_bytes, event.since_s)
            self.dirty_bytes += event.size_bytes
            self._remember_age(key, owing)
            if key in self._flying:  # a flush of what it owed before it was forgotten is still under way
                owing.lane, owing.flying_seq = Lane.FLYING, self._flying[key]
                return
        else:
            assert event.seq >= owing.seq, f"write {event.seq} after {owing.seq}"
            self.dirty_bytes += event.size_bytes - owing.size_bytes
            owing.seq, owing.size_bytes = event.seq, event.size_bytes
            if event.since_s < owing.since_s:
                owing.since_s = event.since_s
                self._remember_age(key, owing)
                if owing.lane in self._counts:
                    self._leave_lane(key, owing)
                    self._queue(key, owing)
        if owing.lane is Lane.HELD:
            self._queue(key, owing)

    def _asked(self, now: float, key: str) -> None:
        owing = self._owing.get(key)
        if owing is None:
            return
        owing.asked_seq = owing.seq
        if owing.lane is Lane.WAITING and owing.earliest_s > now:
            self._leave_lane(key, owing)
            self._wait(key, owing, owing.earliest_s)
        elif owing.lane in (Lane.WAITING, Lane.FRESH, Lane.AGAIN):
            self._leave_lane(key, owing)
            self._queue(key, owing)

    def _ended(self, event: Ended) -> None:
        key, seq = event.key, event.seq
        self.failures_in_a_row = 0
        self._landed(key)
        owing = self._owing.get(key)
        if owing is None:
            return
        if seq >= owing.seq:
            self._remove(key)
            return
        owing.failures, owing.earliest_s = 0, 0.0
        if seq >= owing.asked_seq:
            owing.asked_seq = 0
        if event.since_s is not None:
            owing.since_s = event.since_s
            self._remember_age(key, owing)
        self._queue(key, owing)

    def _failed(self, now: float, event: Failed) -> None:
        assert 0.0 <= event.draw < 1.0
        self.failures_in_a_row += not event.here
        if self.is_sick and not event.here:
            worse = min(self.failures_in_a_row - SICK_AFTER, 30)
            self._probe_s = now + min(PROBE_MAX_S, PROBE_BASE_S * 2.0**worse)
        self._landed(event.key)
        owing = self._owing.get(event.key)
        if owing is None:
            return
        if event.key in self._held:
            owing.lane = Lane.HELD
            return
        owing.failures += 1
        ceiling_s = (
            DELAY_MAX_S if event.hopeless else min(DELAY_MAX_S, DELAY_BASE_S * 2.0 ** min(owing.failures - 1, 30))
        )
        delay_s = max(ceiling_s * (0.5 + event.draw / 2), event.retry_after_s)
        owing.earliest_s = now + event.retry_after_s
        self._wait(event.key, owing, now + delay_s)

    # --- lanes -------------------------------------------------------------------------------------------------------
    def _queue(self, key: str, owing: _Owing) -> None:
        """Put a key that is in no lane into its lane."""
        if key in self._held:
            owing.lane = Lane.HELD
        elif owing.asked_seq:
            owing.lane = Lane.URGENT
            self._urgent[key] = None
        else:
            owing.lane = Lane.AGAIN if owing.failures else Lane.FRESH
            self._counts[owing.lane] += 1
            heap = self._again if owing.failures else self._fresh
            heapq.heappush(heap, (owing.since_s, self._ticket(owing), key))
            self._sweep(heap)

    def _wait(self, key: str, owing: _Owing, until_s: float) -> None:
        owing.lane = Lane.WAITING
        heapq.heappush(self._waiting, (until_s, self._ticket(owing), key))
        self._sweep(self._waiting)

    def _leave_lane(self, key: str, owing: _Owing) -> None:
        owing.ticket = 0
        self._urgent.pop(key, None)
        if owing.lane in self._counts:
            self._counts[owing.lane] -= 1

    def _landed(self, key: str) -> None:
        """Note that the key's flush is over."""
        assert key in self._flying, f"no flush of {key} is under way"
        del self._flying[key]
        owing = self._owing.get(key)
        if owing is not None:
            assert owing.lane is Lane.FLYING
            owing.flying_seq = 0

    def _remove(self, key: str) -> None:
        owing = self._owing.pop(key, None)
        if owing is not None:
            self._leave_lane(key, owing)
            self.dirty_bytes -= owing.size_bytes

    def _ticket(self, owing: _Owing) -> int:
        self._tickets += 1
        owing.ticket = self._tickets
        return self._tickets

    def _remember_age(self, key: str, owing: _Owing) -> None:
        self._tickets += 1
        owing.birth = self._tickets
        heapq.heappush(self._ages, (owing.since_s, owing.birth, key))
        if len(self._ages) > 2 * len(self._owing) + 64:
            self._ages = [(each.since_s, each.birth, name) for name, each in self._owing.items()]
            heapq.heapify(self._ages)

    def _sweep(self, heap: list[tuple[float, int, str]]) -> None:
        """Remove outdated entries from a heap that consists mostly of them."""
        if len(heap) > 2 * len(self._owing) + 64:
            heap[:] = [entry for entry in heap if self._stands(entry)]
            heapq.heapify(heap)

    def _stands(self, entry: tuple[float, int, str]) -> bool:
        owing = self._owing.get(entry[2])
        return owing is not None and owing.ticket == entry[1]

    # --- deciding ----------------------------------------------------------------------------------------------------
    def _plan(self, now: float) -> list[Start | Wake]:
        while self._waiting and (self._waiting[0][0] <= now or not self._stands(self._waiting[0])):
            entry = heapq.heappop(self._waiting)
            if self._stands(entry):
                owing = self._owing[entry[2]]
                owing.ticket = 0
                self._queue(entry[2], owing)
        effects: list[Start | Wake] = []
        while len(self._flying) < self._allowed(now) and (key := self._pick(now)) is not None:
            owing = self._owing[key]
            self._leave_lane(key, owing)
            owing.lane, owing.flying_seq = Lane.FLYING, owing.seq
            self._flying[key] = owing.seq
            effects.append(Start(key, owing.seq))
        wake_s = self._wake_s(now)
        return effects if wake_s is None else [*effects, Wake(wake_s)]

    def _allowed(self, now: float) -> int:
        if not self.is_sick:
            return self.flushes_max
        return 1 if now >= self._probe_s else 0

    def _pick(self, now: float) -> str | None:
        """The key that starts next. Lanes take turns."""
        others = self._counts[Lane.FRESH] + self._counts[Lane.AGAIN] > 0 and now >= self._rests_until_s
        if self._urgent and not (self._urgent_last and others):
            self._urgent_last = True
            return next(iter(self._urgent))
        if not others:
            return None
        self._urgent_last = False
        if self._counts[Lane.AGAIN] and not (self._again_last and self._counts[Lane.FRESH]):
            self._again_last = True
            return self._first(self._again)
        self._again_last = False
        return self._first(self._fresh)

    def _first(self, heap: list[tuple[float, int, str]]) -> str:
        while True:
            entry = heapq.heappop(heap)
            if self._stands(entry):
                return entry[2]

    def _wake_s(self, now: float) -> float | None:
        moments = [self._waiting[0][0]] if self._waiting else []
        others = self._counts[Lane.FRESH] or self._counts[Lane.AGAIN]
        ready = self._urgent or others
        if others and now < self._rests_until_s:
            moments.append(self._rests_until_s)
        if self.is_sick and ready and not self._flying:
            moments.append(self._probe_s)
        return max(now, min(moments)) if moments else None

    def keys(self) -> Iterator[str]:
        """Every key that owes, in no particular order."""
        return iter(self._owing)

    def check(self) -> None:
        """Assert the invariants. For tests and the simulator: time grows with the queue."""
        assert self.dirty_bytes == sum(each.size_bytes for each in self._owing.values())
        for heap, lane in ((self._fresh, Lane.FRESH), (self._again, Lane.AGAIN), (self._waiting, Lane.WAITING)):
            standing = sorted(entry[2] for entry in heap if self._stands(entry))
            inside = sorted(key for key, each in self._owing.items() if each.lane is lane)
            assert standing == inside, (lane, standing, inside)
            if lane in self._counts:
                assert self._counts[lane] == len(inside), lane
        assert set(self._urgent) == {key for key, each in self._owing.items() if each.lane is Lane.URGENT}
        for key, owing in self._owing.items():
            assert (owing.lane is Lane.FLYING) == (key in self._flying), key
            assert owing.flying_seq == self._flying.get(key, 0), key
            assert owing.lane is not Lane.HELD or key in self._held, key
            assert key not in self._held or owing.lane in (Lane.HELD, Lane.FLYING), key
            assert owing.asked_seq <= owing.seq
        oldest_s = min((each.since_s for each in self._owing.values()), default=None)
        assert self.oldest_s() == oldest_s
