"""The order of flushes, against a model that looks through everything each time; and the gate that writers wait at."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.core.machines.flush import (
    DELAY_BASE_S,
    DELAY_MAX_S,
    PROBE_BASE_S,
    PROBE_MAX_S,
    REST_BYTES_MIN,
    REST_MAX_S,
    REST_S,
    SICK_AFTER,
    Asked,
    Dropped,
    Ended,
    Event,
    Failed,
    Forgot,
    Held,
    Pressed,
    Queue,
    Released,
    Start,
    Wake,
    Woke,
    Wrote,
)
from forebay.core.machines.gate import RETRY_AFTER_S, Admit, Bounds, Gate, Gone, Knock, Owes, Refuse


def starts(queue: Queue, now: float, event: Event) -> list[str]:
    found = [effect.key for effect in queue.step(now, event) if isinstance(effect, Start)]
    queue.check()
    return found


def write_all(queue: Queue, names: str, now: float = 0.0) -> list[str]:
    """Each letter is a key, as old as its place in the alphabet."""
    return [key for n, name in enumerate(names) for key in starts(queue, now, Wrote(name, n + 1, 10, ord(name)))]


# --- order -----------------------------------------------------------------------------------------------------------
def test_the_oldest_goes_first_and_never_more_than_allowed():
    queue = Queue(2)
    assert write_all(queue, "dcba") == ["d", "c"]
    assert starts(queue, 1.0, Ended("d", 1)) == ["a"]
    assert starts(queue, 1.0, Ended("c", 2)) == ["b"]
    assert (queue.flying, len(queue), queue.dirty_bytes) == (2, 2, 20)
    assert queue.oldest_s() == ord("a")


def test_what_is_asked_for_goes_before_but_only_every_second_time():
    queue = Queue(1)
    write_all(queue, "abcdefgh")
    for key in "hgf":
        starts(queue, 0.0, Asked(key))
    order, key, seq = [], "a", 1
    while key:
        order.append(key)
        following = starts(queue, 0.0, Ended(key, 100))
        key = following[0] if following else ""
        seq += 1
    assert order == ["a", "h", "b", "g", "c", "f", "d", "e"]


def test_a_key_is_in_one_flush_and_goes_again_if_it_was_written_meanwhile():
    queue = Queue(4)
    assert write_all(queue, "a") == ["a"]
    assert starts(queue, 1.0, Wrote("a", 7, 30, 97.0)) == []
    assert queue.dirty_bytes == 30
    assert queue.step(2.0, Ended("a", 1, since_s=120.0)) == [Start("a", 7)]
    assert queue.oldest_s() == 120.0  # what remains is as old as the write that the backend lacks
    assert starts(queue, 3.0, Ended("a", 7)) == []
    assert (len(queue), queue.dirty_bytes, queue.oldest_s()) == (0, 0, None)


def test_a_write_older_than_what_is_known_moves_the_age_back_and_a_newer_one_does_not():
    queue = Queue(1)
    write_all(queue, "xa")
    starts(queue, 0.0, Wrote("a", 5, 10, 200.0))
    assert queue.oldest_s() == ord("a")
    starts(queue, 0.0, Wrote("a", 6, 10, 50.0))
    assert queue.oldest_s() == 50.0


# --- failures --------------------------------------------------------------------------------------------------------
def test_a_failure_waits_twice_as_long_each_time_and_holds_up_nobody():
    queue = Queue(1)
    write_all(queue, "ab")
    assert starts(queue, 0.0, Failed("a", draw=0.0)) == ["b"]
    now, waits = 0.0, []
    starts(queue, now, Ended("b", 2))
    for _ in range(SICK_AFTER - 2):  # after more the backend counts as ill
        [wake] = queue.step(now, Woke())
        assert isinstance(wake, Wake)
        waits.append(wake.at_s - now)
        now = wake.at_s
        assert starts(queue, now, Woke()) == ["a"]
        starts(queue, now, Failed("a", draw=0.0))
    assert waits == [DELAY_BASE_S / 2 * 2**n for n in range(SICK_AFTER - 2)]


def test_the_backend_may_ask_for_more_patience_and_a_refusal_is_tried_seldom():
    queue = Queue(4)
    write_all(queue, "ab")
    queue.step(0.0, Failed("a", retry_after_s=33.0))
    [wake] = queue.step(0.0, Failed("b", draw=0.999, hopeless=True))
    assert wake == Wake(33.0)
    assert starts(queue, 33.0, Woke()) == ["a"]
    [later] = queue.step(33.0, Woke())
    assert isinstance(later, Wake)
    assert DELAY_MAX_S / 2 < later.at_s <= DELAY_MAX_S


def test_who_asks_ends_the_wait_of_a_failure_but_not_the_backends_own():
    queue = Queue(4)
    write_all(queue, "ab")
    starts(queue, 0.0, Failed("a", hopeless=True))
    starts(queue, 0.0, Failed("b", retry_after_s=33.0))
    assert starts(queue, 1.0, Asked("a")) == ["a"]
    assert starts(queue, 1.0, Asked("b")) == []
    assert starts(queue, 33.0, Woke()) == ["b"]


def test_old_failures_do_not_keep_the_rest_from_its_turn():
    queue = Queue(1)
    write_all(queue, "abc")  # all older than what follows
    now = 0.0
    for key in "abc":
        starts(queue, now, Failed(key, draw=0.0))
    for number in range(6):
        queue.step(now, Wrote(f"new{number}", 100 + number, 1, 1000.0 + number))
    order, now = [], 100.0  # a, b and c have waited long enough; "new0" is under way
    key = "new0"
    for _ in range(8):
        [key, *_] = starts(queue, now, Failed(key, draw=0.0) if key in "abc" else Ended(key, 200))
        order.append(key)
    assert order == ["a", "new1", "b", "new2", "c", "new3", "new4", "new5"]


def test_an_ill_backend_is_asked_by_one_flush_at_a_time_and_all_go_when_it_is_well():
    queue = Queue(16)
    for number in range(40):
        queue.step(0.0, Wrote(f"k{number:02}", number + 1, 1, float(number)))
    while queue.flying:  # those under way when it fell ill fail too
        key = min(queue._flying)
        queue.step(0.0, Failed(key, draw=0.5))
    assert queue.is_sick
    now, probes = 0.0, []
    for _ in range(10):
        effects = queue.step(now, Woke())
        while not isinstance(effects[0], Start):
            now = effects[0].at_s
            effects = queue.step(now, Woke())
        probes.append(now)
        assert queue.flying == 1
        queue.step(now, Failed(effects[0].key))
        queue.check()
    gaps = [after - before for before, after in pairwise(probes)]
    assert all(PROBE_BASE_S <= gap <= PROBE_MAX_S for gap in gaps)
    assert gaps[-1] == PROBE_MAX_S
    now += PROBE_MAX_S
    [probe, *_] = starts(queue, now, Woke())
    assert len(starts(queue, now, Ended(probe, 99))) == 16


# --- held, forgotten, dropped ----------------------------------------------------------------------------------------
def test_flushes_give_way_to_a_run_of_large_writes():
    queue, large = Queue(2), REST_BYTES_MIN
    assert starts(queue, 0.0, Wrote("before", 1, 10, 0.0)) == ["before"]
    assert starts(queue, 1.0, Wrote("a", 2, large, 1.0)) == []
    assert starts(queue, 1.5, Wrote("small", 3, 10, 1.5)) == [], "what came with it waits, too"
    assert starts(queue, 1.9, Wrote("b", 4, large, 1.9)) == []
    assert queue.step(2.5, Ended("before", 1)) == [Wake(1.9 + REST_S)]
    assert starts(queue, 2.6, Asked("small")) == ["small"], "somebody waits for it"
    assert starts(queue, 1.9 + REST_S, Woke()) == ["a"]
    assert starts(queue, 3.0, Wrote("c", 5, large, 3.0)) == []
    assert starts(queue, 3.1, Ended("small", 3)) == []
    assert starts(queue, 3.2, Pressed()) == ["b"], "a writer waits for room"
    queue.check()


def test_a_run_of_large_writes_without_end_is_not_waited_for():
    queue, now, seq = Queue(1), 0.0, 0
    while now < 2 * REST_MAX_S:
        seq += 1
        started = starts(queue, now, Wrote(f"k{seq}", seq, REST_BYTES_MIN, now))
        assert not started or now >= REST_MAX_S
        while started:
            started += starts(queue, now, Ended(started.pop(), seq))
        now += REST_S / 2
    assert len(queue) == 0, "from then on as many as ever"


def test_a_held_key_does_not_start_until_it_is_written_again():
    queue = Queue(1)
    write_all(queue, "ab")
    starts(queue, 0.0, Held("b"))
    assert starts(queue, 0.0, Ended("a", 1)) == []
    assert queue.dirty_bytes == 10
    assert starts(queue, 0.0, Asked("b")) == []
    assert starts(queue, 0.0, Wrote("b", 9, 1, 98.0)) == ["b"]


def test_a_held_flight_that_ends_without_its_newest_write_stays_held():
    queue = Queue(1)
    write_all(queue, "a")
    starts(queue, 0.0, Wrote("a", 5, 1, 97.0))
    starts(queue, 0.0, Held("a"))
    assert starts(queue, 0.0, Dropped("a")) == []
    assert starts(queue, 9.0, Woke()) == []
    assert starts(queue, 9.0, Forgot("a")) == []
    assert len(queue) == 0


def test_a_forgotten_key_may_be_written_before_its_flight_ends():
    queue = Queue(4)
    write_all(queue, "a")
    starts(queue, 0.0, Forgot("a"))
    assert starts(queue, 0.0, Wrote("a", 5, 3, 97.0)) == []
    assert starts(queue, 0.0, Dropped("a")) == ["a"]
    assert starts(queue, 0.0, Ended("a", 5)) == []
    assert len(queue) == 0


# --- a dumb model ----------------------------------------------------------------------------------------------------
@dataclass
class Model:
    """One key, as the model sees it."""

    seq: int
    size: int
    since: float
    failures: int = 0
    asked: int = 0
    until: float = 0.0  # waits until
    earliest: float = 0.0
    asked_at: int = 0
    waits_as: int = 0  # of those that wait until one moment, who began to first


class QueueAgainstModel(RuleBasedStateMachine):
    """Whatever happens in whatever order: the queue starts what a search through everything would."""

    KEYS = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(2)
        self.now = 0.0
        self.seq = 0
        self.asks = 0
        self.keys: dict[str, Model] = {}
        self.flying: dict[str, int] = {}
        self.held: set[str] = set()
        self.in_a_row = 0
        self.probe = 0.0
        self.urgent_last = self.again_last = False
        self.waits_since: dict[str, int] = {}

    def ready(self, urgent: bool, again: bool | None = None) -> list[str]:
        names = [
            key
            for key, each in self.keys.items()
            if key not in self.flying and key not in self.held and each.until <= self.now
            if bool(each.asked) == urgent and (again is None or bool(each.failures) == again)
        ]
        place = (lambda key: self.keys[key].asked_at) if urgent else (lambda key: self.keys[key].since)
        return sorted(names, key=place)

    def expected(self) -> list[str]:
        found = []
        while True:
            allowed = 2 if self.in_a_row < SICK_AFTER else int(self.now >= self.probe)
            if len(self.flying) >= allowed:
                return found
            urgent, fresh, again = self.ready(True), self.ready(False, False), self.ready(False, True)
            if urgent and not (self.urgent_last and (fresh or again)):
                self.urgent_last, key = True, urgent[0]
            elif again and not (self.again_last and fresh):
                self.urgent_last, self.again_last, key = False, True, again[0]
            elif fresh:
                self.urgent_last, self.again_last, key = False, False, fresh[0]
            else:
                return found
            self.flying[key] = self.keys[key].seq
            found.append(key)

    def step(self, event: Event) -> None:
        effects = self.queue.step(self.now, event)
        assert [effect.key for effect in effects if isinstance(effect, Start)] == self.expected()
        assert all(self.flying[effect.key] == effect.seq for effect in effects if isinstance(effect, Start))
        wakes = [effect for effect in effects if isinstance(effect, Wake)]
        if not self.flying and any(key not in self.held for key in self.keys):
            assert wakes, "nothing is under way, something is owed, and nobody would ever look again"

    def ask_place(self, key: str) -> None:
        """An urgent key stands behind those that were urgent before it came (back)."""
        self.asks += 1
        self.keys[key].asked_at = self.asks

    def wait_place(self, each: Model) -> None:
        self.asks += 1
        each.waits_as = self.asks

    @rule(key=KEYS, size=st.integers(0, 100), age=st.integers(0, 1000))
    def write(self, key: str, size: int, age: int) -> None:
        self.seq += 1
        since = age + self.seq / 1000  # all different, so that the order is one
        was_held = key in self.held
        self.held.discard(key)
        if key in self.keys:
            each = self.keys[key]
            each.seq, each.size, each.since = self.seq, size, min(each.since, since)
            if was_held and key not in self.flying:
                each.until = 0.0
                self.ask_place(key)
        else:
            self.keys[key] = Model(self.seq, size, since)
        self.step(Wrote(key, self.seq, size, since))

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        self.keys.pop(key, None)
        self.held.discard(key)
        self.step(Forgot(key))

    @rule(key=KEYS)
    def hold(self, key: str) -> None:
        self.held.add(key)
        self.step(Held(key))

    @rule(key=KEYS)
    def release(self, key: str) -> None:
        if key in self.held:
            self.held.discard(key)
            if key in self.keys and key not in self.flying:
                self.keys[key].until = 0.0
                self.ask_place(key)
        self.step(Released(key))

    @rule(key=KEYS)
    def ask(self, key: str) -> None:
        each = self.keys.get(key)
        if each is not None:
            was = each.asked
            each.asked = each.seq
            waiting = each.until > self.now
            if waiting:
                each.until = each.earliest if each.earliest > self.now else 0.0
                self.wait_place(each)
            if key not in self.flying and key not in self.held and each.until <= self.now and (waiting or not was):
                self.ask_place(key)
        self.step(Asked(key))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.flying)))
        seq = self.flying.pop(key)
        self.in_a_row = 0
        each = self.keys.get(key)
        since = None
        if each is not None and seq >= each.seq:
            del self.keys[key]
        elif each is not None:
            since = each.since = 2000 + self.asks / 1000  # all different: `asks` grows below
            each.failures, each.until, each.earliest = 0, 0.0, 0.0
            if seq >= each.asked:
                each.asked = 0
            self.ask_place(key)
        self.step(Ended(key, seq, since))

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), after=st.sampled_from([0.0, 0.0, 90.0]), hopeless=st.booleans())
    def fail(self, data: st.DataObject, after: float, hopeless: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.flying)))
        del self.flying[key]
        self.in_a_row += 1
        if self.in_a_row >= SICK_AFTER:
            self.probe = self.now + min(PROBE_MAX_S, PROBE_BASE_S * 2 ** (self.in_a_row - SICK_AFTER))
        each = self.keys.get(key)
        if each is not None and key not in self.held:
            each.failures += 1
            delay = DELAY_MAX_S if hopeless else min(DELAY_MAX_S, DELAY_BASE_S * 2 ** (each.failures - 1))
            each.until, each.earliest = self.now + max(0.75 * delay, after), self.now + after
            self.wait_place(each)
        self.step(Failed(key, 0.5, after, hopeless))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.flying)))
        del self.flying[key]
        if key in self.keys:
            self.ask_place(key)
        self.step(Dropped(key))

    @rule(seconds=st.sampled_from([0.3, 2.0, 40.0, 100.0]))
    def wait(self, seconds: float) -> None:
        ripe = [key for key, each in self.keys.items() if self.now < each.until <= self.now + seconds]
        self.now += seconds
        for key in sorted(ripe, key=lambda key: (self.keys[key].until, self.keys[key].waits_as)):
            if key not in self.held:
                self.ask_place(key)
        self.step(Woke())

    @invariant()
    def books_balance(self) -> None:
        self.queue.check()
        assert self.queue.dirty_bytes == sum(each.size for each in self.keys.values())
        assert set(self.queue.keys()) == set(self.keys)
        assert len(self.queue) == len(self.keys)


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_starves_under_a_stream_of_requests_and_failures(seed):
    """Keys 0-4 always fail, somebody asks for something all the time, and new writes come as fast as flushes end."""
    import random

    dice = random.Random(seed)
    queue, now, seq = Queue(3), 0.0, 0
    flying: list[tuple[str, int]] = []
    began: dict[str, int] = {}
    waited = []

    def do(event: Event) -> None:
        flying.extend((effect.key, effect.seq) for effect in queue.step(now, event) if isinstance(effect, Start))

    for turn in range(3000):
        now += 0.1
        seq += 1
        key = f"bad{turn % 5}" if turn < 5 else f"k{dice.randrange(400)}"
        if queue.since_s(key) is None:
            began[key] = turn
        do(Wrote(key, seq, 1, float(began[key])))
        do(Asked(f"k{dice.randrange(400)}"))
        do(Woke())
        if flying and dice.random() < 0.95:
            key, at = flying.pop(dice.randrange(len(flying)))
            if key.startswith("bad"):
                do(Failed(key, draw=dice.random()))
                continue
            waited.append(turn - began[key])
            do(Ended(key, at, since_s=float(turn)))
            if queue.since_s(key) is not None:
                began[key] = turn
    queue.check()
    still = [turn - at for key, at in began.items() if queue.since_s(key) is not None and not key.startswith("bad")]
    assert len(waited) > 2000
    assert max(waited + still) < 1500, "the oldest is reached although newer ones are asked for all the time"


# --- the gate --------------------------------------------------------------------------------------------------------
def test_writers_pass_until_the_bound_and_then_wait_in_order():
    gate = Gate(Bounds(100, 60.0))
    assert gate.step(0.0, Knock(1, 60, 10.0)) == [Admit(1)]
    assert gate.step(0.0, Knock(2, 60, 10.0)) == [Wake(10.0)]  # the first is promised its 60, though not yet owed
    assert gate.step(0.1, Knock(3, 1, 10.1)) == [Wake(10.0)]  # no overtaking
    assert gate.step(0.2, Owes(60, 0.2)) == [Wake(10.0)]
    assert gate.step(0.2, Gone(1)) == [Wake(10.0)]
    assert gate.step(0.3, Owes(0, None)) == [Admit(2), Admit(3)]
    gate.check()


def test_who_has_waited_long_enough_is_told_when_to_come_again():
    gate = Gate(Bounds(100, 60.0), Owes(100, 0.0))
    gate.step(1.0, Knock(1, 1, 11.0))
    gate.step(2.0, Knock(2, 1, 12.0))
    assert gate.step(11.0, Woke()) == [Refuse(1, RETRY_AFTER_S), Wake(12.0)]
    gate.step(11.5, Owes(100, 0.0, is_sick=True))
    assert gate.step(12.0, Woke()) == [Refuse(2, PROBE_MAX_S)]


def test_what_is_owed_for_too_long_stops_writers_however_little_it_is():
    gate = Gate(Bounds(100, 60.0), Owes(1, 0.0))
    assert gate.step(60.0, Knock(1, 1, 70.0)) == [Admit(1)]
    assert gate.step(61.0, Knock(2, 1, 71.0)) == [Wake(71.0)]
    assert gate.step(62.0, Owes(1, 50.0)) == [Admit(2)]


def test_a_write_larger_than_the_bound_passes_alone():
    gate = Gate(Bounds(100, 60.0), Owes(1, 0.0))
    assert gate.step(0.0, Knock(1, 500, 10.0)) == [Wake(10.0)]
    assert gate.step(1.0, Owes(0, None)) == [Admit(1)]
    assert gate.step(1.0, Knock(2, 1, 11.0)) == [Wake(11.0)]


def test_who_leaves_makes_room_for_the_next():
    gate = Gate(Bounds(100, 60.0), Owes(60, 0.0))
    gate.step(0.0, Knock(1, 60, 100.0))
    assert gate.step(0.0, Knock(2, 40, 100.0)) == [Wake(100.0)]
    assert gate.step(0.0, Gone(1)) == [Admit(2)]
    gate.check()


def test_a_write_that_fails_makes_room_at_once():
    gate = Gate(Bounds(100, 60.0))
    assert gate.step(0.0, Knock(1, 60, 10.0)) == [Admit(1)]
    assert gate.step(0.0, Knock(2, 60, 10.0)) == [Wake(10.0)]
    assert gate.step(0.1, Gone(1)) == [Admit(2)], "the first owes nothing and never will"
    assert gate.step(0.2, Gone(2)) == []
    assert gate.promised_bytes == 0
    gate.check()


def test_a_wider_bound_lets_the_waiting_through():
    gate = Gate(Bounds(100, 60.0), Owes(100, 0.0))
    gate.step(0.0, Knock(1, 50, 10.0))
    assert gate.step(1.0, Bounds(200, 60.0)) == [Admit(1)]
