"""Hints: the machine that knows the future against a dumb one, and eviction by it against Belady's."""

import random
from array import array
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.machines.eviction import split_unit, unit_of
from forebay.core.machines.foreseen import Stay
from forebay.core.machines.foretold import Dataset
from forebay.core.machines.hinted_eviction import HintedEviction
from forebay.core.machines.hints import NEVER, PAYING_USES, Hints
from tests.core.evictiontrace import Belady, Ours, dataset, epochs, replay, size_of, zipf

MIB = 1 << 20


def triples(accesses) -> array:
    return array("I", [number for access in accesses for number in access])


class Told:
    """A cache that was told its trace: a miss lands, then whatever is in excess leaves. One job reads it."""

    mixed = False  # others use the cache too

    def __init__(self, capacity, trace, ahead=None):
        self.hints, self.machine = Hints(), None
        self.machine = HintedEviction(capacity, self.hints)
        objects = sorted({split_unit(unit)[0] for unit, _ in trace})
        blocks = {}
        for unit, size in trace:
            number, block = split_unit(unit)
            blocks.setdefault(number, {})[block] = size
        self.numbers = {number: at for at, number in enumerate(objects)}
        self.dataset = Dataset(0, [(len(blocks[number]) - 1) * limits.BLOCK_BYTES + 1 for number in objects])
        self.hints.begin("job", self.dataset, 0, 0.0)
        self.trace = [self.access_of(unit) for unit, _ in trace]
        self.ahead = ahead or len(trace)
        self.now = self.told = 0
        self.tell()

    def access_of(self, unit):
        number, block = split_unit(unit)
        return self.numbers[number], block, block + 1

    def tell(self):
        if self.told < len(self.trace) and self.told - self.now <= self.ahead // 2:
            end = self.now + self.ahead
            self.hints.extend("job", self.told, triples(self.trace[self.told : end]), 0.0)
            self.told = min(end, len(self.trace))

    def access(self, unit, size):
        hit = self.machine.touched(unit)
        if not hit:
            self.machine.landed(unit, size, "b")
            number, first, _ = self.access_of(unit)
            self.hints.landed(unit, self.dataset, self.dataset.block(number, first))
            assert self.machine.hint(unit)
        self.now += 1
        moved = self.hints.at("job", self.now, 0.0)
        assert moved == [unit]
        self.machine.moved(unit)
        self.tell()
        excess = self.machine.excess_bytes
        if excess:
            chosen = self.machine.victims(excess)
            assert not chosen.stuck
            assert self.mixed or self.machine.by_hint == len(chosen.units)
            for victim in chosen.units:
                self.hints.gone(victim)
        return hit


# --- what is kept ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, objects", [("equal", 600), ("mixed", 600), ("blocks", 100)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_random_epochs_that_were_told_hit_as_often_as_can_be(kind, objects, share):
    data = dataset(objects, kind, seed=1)
    trace = epochs(data, 5, seed=2)
    capacity = int(size_of(data) * share)
    told = Told(capacity, trace)
    _, hit = replay(told, trace)
    _, best = replay(Belady(capacity, trace), trace)
    assert hit >= 0.95 * best
    assert hit >= replay(Ours(capacity), trace)[1]
    told.machine.check()
    told.hints.check()


def test_telling_one_epoch_ahead_is_enough():
    data = dataset(600, "equal", seed=1)
    trace = epochs(data, 6, seed=2)
    capacity = size_of(data) // 2
    _, hit = replay(Told(capacity, trace, ahead=1200), trace, 600)
    assert hit >= 0.95 * replay(Belady(capacity, trace), trace, 600)[1]


def test_samples_within_shards_are_kept_by_when_their_block_is_needed():
    """100 shards of 10 blocks, 20 samples in each block; samples in an order that is local, as a block shuffle's."""
    chance = random.Random(5)
    trace = []
    for _ in range(3):
        blocks = [(shard, block) for shard in range(100) for block in range(10)]
        chance.shuffle(blocks)
        for at in range(0, len(blocks), 50):
            window = [unit_of(*place) for place in blocks[at : at + 50] for _ in range(20)]
            chance.shuffle(window)
            trace += [(unit, 4 * MIB) for unit in window]
    capacity = 500 * 4 * MIB
    _, hit = replay(Told(capacity, trace), trace)
    _, best = replay(Belady(capacity, trace), trace)
    assert hit >= 0.95 * best


@pytest.mark.parametrize("paces", [(1, 1), (1, 3)])
def test_two_jobs_share_what_both_need_soonest(paces):
    """Two jobs over one dataset, each with its own order; the second reads as fast or three times as fast."""
    data = dataset(500, "equal", seed=1)
    orders = [epochs(data, 3 * pace, seed=7 + at) for at, pace in enumerate(paces)]
    trace, places = [], [0, 0]
    while places[0] < len(orders[0]):
        for at, pace in enumerate(paces):
            for unit, size in orders[at][places[at] : places[at] + pace]:
                trace.append((at, unit, size))
            places[at] += pace
    capacity = size_of(data) // 2
    hints = Hints()
    machine = HintedEviction(capacity, hints)
    blocks = Dataset(3, [MIB] * 500)
    positions = [0, 0]
    for at, order in enumerate(orders):
        hints.begin(str(at), blocks, 0, 0.0)
        hints.extend(str(at), 0, triples((split_unit(unit)[0], 0, 1) for unit, _ in order), 0.0)
    hits = 0
    for at, unit, size in trace:
        hit = machine.touched(unit)
        hits += hit
        if not hit:
            machine.landed(unit, size, "b")
            hints.landed(unit, blocks, split_unit(unit)[0])
            machine.hint(unit)
        positions[at] += 1
        hints.at(str(at), positions[at], 0.0)
        machine.moved(unit)
        for victim in machine.victims(machine.excess_bytes).units:
            hints.gone(victim)
    hints.check()
    best, _ = replay(Belady(capacity, [(unit, size) for _, unit, size in trace]), [(u, s) for _, u, s in trace])
    assert hits / len(trace) >= 0.95 * best


def test_neither_a_hinted_epoch_nor_a_hot_set_without_hints_starves_the_other():
    data = dataset(1000, "equal", seed=1)
    epoch = epochs(data, 6, seed=2)
    hot = zipf(400, len(epoch), 1.1, seed=5, first_id=10**6)
    capacity = 700 * MIB
    told = Told(capacity, epoch)
    told.mixed = True
    hits = {"epoch": 0, "hot": 0}
    for at, (one, two) in enumerate(zip(epoch, hot, strict=True)):
        counted = at > 2000
        hits["epoch"] += told.access(*one) and counted
        if told.machine.touched(two[0]):
            hits["hot"] += counted
        else:
            told.machine.landed(two[0], two[1], "b")
            for victim in told.machine.victims(told.machine.excess_bytes).units:
                told.hints.gone(victim)
    told.machine.check()
    assert hits["epoch"] / 4000 > 0.4, hits
    assert hits["hot"] / 4000 > 0.7, hits


def test_a_scan_beside_a_job_takes_nothing_from_it():
    data = dataset(600, "equal", seed=1)
    trace = epochs(data, 4, seed=2)
    capacity = 300 * MIB
    told = Told(capacity, trace)
    told.mixed = True
    hits = 0
    for at, one in enumerate(trace):
        hits += told.access(*one)
        told.machine.landed(unit_of(10**6 + at, 0), MIB, "b")
        for victim in told.machine.victims(told.machine.excess_bytes).units:
            told.hints.gone(victim)
    best, _ = replay(Belady(capacity, trace), trace)
    assert hits / len(trace) >= 0.9 * best


def test_when_the_job_ends_its_units_compete_like_any_other():
    data = dataset(200, "equal", seed=1)
    trace = epochs(data, 2, seed=2)
    told = Told(100 * MIB, trace)
    replay(told, trace)
    freed = told.hints.close("job")
    assert len(freed) == len(told.machine.units()) == len(told.machine)
    for unit in freed:
        told.machine.unhint(unit)
    told.machine.check()
    assert len(told.machine.units()) == 0
    assert len(told.machine.victims(10 * MIB).units) == 10
    assert told.machine.by_hint == 0


def test_what_is_needed_sooner_is_never_evicted_to_fetch_ahead():
    trace = [(unit_of(n, 0), MIB) for n in (0, 1, 2, 3, 0, 1, 2)]
    told = Told(3 * MIB, trace)
    for unit, size in trace[:3]:
        told.access(unit, size)
    machine, now = told.machine, told.hints.passed
    due = {n: told.hints.due(unit_of(n, 0)) for n in range(3) if unit_of(n, 0) in machine}
    last = max(due.values())
    assert machine.stay("b", MIB) == (last, True, last)
    assert now < min(due.values()) < last
    assert not machine.pin(unit_of(9, 9))
    for n in due:
        machine.pin(unit_of(n, 0))
    assert machine.stay("b", MIB) == (now, True, now), "what is pinned never leaves"
    machine.check()


def test_what_comes_stays_no_longer_than_all_that_leaves_for_it():
    """Else a large block replaces what is needed sooner, leaves before it is read enough, and is fetched again."""
    small = [(unit_of(n, 0), MIB // 4) for n in range(4)]
    large = (unit_of(9, 0), 4 * MIB)
    told = Told(5 * MIB, [*small, large, small[0], large, *small[1:]])
    for unit, size in (*small, large):
        told.access(unit, size)
    machine, hints, now = told.machine, told.hints, told.hints.passed
    assert len(machine) == 5
    last = max(hints.due(unit) for unit, _ in small)
    assert now <= hints.due(small[0][0]) < hints.due(large[0]) < last
    assert machine.stay("b", MIB // 8) == (last, True, last), "one of the small is enough"
    assert machine.stay("b", 4 * MIB) == (hints.due(large[0]), True, last), "the small ones are not enough"
    assert machine.stay("b", 6 * MIB) == (now, True, last), "there is no room for so much, whatever leaves"


# --- what is wanted next ---------------------------------------------------------------------------------------------
def wanted(hints, window_bytes):
    found = []
    while (next_one := hints.wanted("job", window_bytes)) is not None:
        hints.fetching("job", next_one)
        found.append((next_one.object, next_one.first, next_one.end))
    return found


def test_what_is_not_here_is_wanted_once_in_order_and_within_the_window():
    hints = Hints()
    data = Dataset(0, [10 * limits.BLOCK_BYTES - 1, 1, 0, 5 * limits.BLOCK_BYTES])
    hints.begin("job", data, 100, 0.0)
    hints.extend("job", 100, triples([(1, 0, 1), (0, 2, 9), (1, 0, 1), (2, 0, 1), (3, 4, 5)]), 0.0)
    hints.landed(77, data, data.block(0, 4))
    assert wanted(hints, 16 * limits.BLOCK_BYTES) == [(1, 0, 1), (0, 2, 4), (0, 5, 9), (2, 0, 1), (3, 4, 5)]
    assert hints.is_ahead("job", 1 << 40)
    hints.check()
    hints.at("job", 102, 0.0)
    assert hints.job("job").position == 102
    assert hints.job("job").known == hints.job("job").ahead == 105

    hints.extend("job", 103, triples([(0, 0, 10)] * 3), 0.0)  # it changed its mind
    assert hints.job("job").known == 106
    found = wanted(hints, 3 * limits.BLOCK_BYTES)
    assert found == [(1, 0, 1), (0, 0, 4)], "no more than the window, but for the last"
    hints.at("job", 104, 0.0)  # it went over them without waiting, so they are wanted for the next time
    assert wanted(hints, 100 * limits.BLOCK_BYTES) == [(0, 0, 4), (0, 5, 9), (0, 9, 10)]
    assert wanted(hints, 100 * limits.BLOCK_BYTES) == []
    hints.check()


def test_what_cannot_be_is_refused_and_changes_nothing():
    hints = Hints()
    data = Dataset(0, [1, limits.BLOCK_BYTES + 1])
    hints.begin("job", data, 0, 0.0)
    hints.extend("job", 0, triples([(0, 0, 1), (1, 0, 2)]), 0.0)
    for wrong in ((2, 0, 1), (0, 0, 2), (1, 1, 1), (1, 2, 1)):
        with pytest.raises(Invalid):
            hints.extend("job", 2, triples([(0, 0, 1), wrong]), 0.0)
    with pytest.raises(Invalid, match="go on from there"):
        hints.extend("job", 3, triples([(0, 0, 1)]), 0.0)
    with pytest.raises(NotFound):
        hints.at("other", 1, 0.0)
    assert hints.job("job").known == 2
    assert hints.expired(limits.HINT_TTL_S) == []
    assert hints.expired(limits.HINT_TTL_S + 1) == ["job"]
    hints.check()


class AgainstAList(RuleBasedStateMachine):
    """The machine beside lists that are searched from the front."""

    def __init__(self):
        super().__init__()
        self.hints = Hints()
        self.data = Dataset(0, [limits.BLOCK_BYTES * 2] * 4)
        self.future = {}
        self.here = {}

    @rule(job=st.sampled_from("ab"), start=st.integers(0, 5))
    def begin(self, job, start):
        self.hints.begin(job, self.data, start, 0.0)
        self.future.pop(job, None)
        self.future[job] = [start, []]  # position, [object, block, whether it was read apart] from there on
        self.here = {unit: block for unit, block in self.here.items() if self.hints.knows(unit)}

    @rule(
        job=st.sampled_from("ab"),
        accesses=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), max_size=8),
        keep=st.integers(0, 8),
    )
    def extend(self, job, accesses, keep):
        if job in self.future:
            position, known = self.future[job]
            if len(known) > keep:
                known = [[at, block, False] for at, block, _ in known[:keep]]
            given = triples((at, block, block + 1) for at, block in accesses)
            self.hints.extend(job, position + len(known), given, 0.0)
            self.future[job] = [position, known + [[at, block, False] for at, block in accesses]]

    @rule(job=st.sampled_from("ab"), steps=st.integers(0, 6))
    def at(self, job, steps):
        if job in self.future:
            position, known = self.future[job]
            steps = min(steps, len(known))
            self.hints.at(job, position + steps, 0.0)
            self.future[job] = [position + steps, known[steps:]]

    @rule(at=st.integers(0, 3), block=st.integers(0, 1))
    def land(self, at, block):
        if self.future:
            unit, number = unit_of(at + 1, block), self.data.block(at, block)
            self.hints.landed(unit, self.data, number)
            self.here[unit] = number

    @rule(at=st.integers(0, 3), block=st.integers(0, 1))
    def read_apart(self, at, block):
        if unit_of(at + 1, block) in self.here:
            return
        self.hints.read_apart(self.data, self.data.block(at, block), limits.BLOCK_BYTES)
        left = [(self.hints.jobs[job], known) for job, (_, known) in self.future.items() if [at, block, False] in known]
        if left:
            soonest = min(left, key=lambda each: each[1].index([at, block, False]) / each[0].share)[1]
            soonest[soonest.index([at, block, False])][2] = True

    @rule(at=st.integers(0, 3), block=st.integers(0, 1))
    def leave(self, at, block):
        self.hints.gone(unit_of(at + 1, block))
        self.here.pop(unit_of(at + 1, block), None)

    @rule(job=st.sampled_from("ab"))
    def close(self, job):
        last = job in self.future and len(self.future) == 1
        assert sorted(self.hints.close(job)) == (sorted(self.here) if last else [])
        self.future.pop(job, None)
        if last:
            self.here = {}

    @invariant()
    def dues_are_those_of_the_lists(self):
        self.hints.check()
        for at in range(4):
            for block in range(2):
                due = self.hints.due(unit_of(at + 1, block))
                if unit_of(at + 1, block) not in self.here:
                    assert due == -1.0
                    continue
                soonest = [
                    self.hints.passed + known.index([at, block, False]) / self.hints.jobs[job].share
                    for job, (_, known) in self.future.items()
                    if [at, block, False] in known
                ]
                assert due == min(soonest, default=NEVER)


AgainstAList.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_hints_are_those_of_a_list = AgainstAList.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_events_keeps_the_books(seed):
    """Hinted, pinned, in use and plain units of buckets with and without a quota, in any order; and who is due last
    leaves first."""
    chance = random.Random(seed)
    hints = Hints()
    blocks = Dataset(1, [limits.BLOCK_BYTES] * 60)
    machine = HintedEviction(40 * MIB, hints)
    machine.set_quota("b", 20 * MIB)
    told, evicted = False, 0
    for _ in range(3000):
        n = chance.randrange(80)
        unit, bucket = unit_of(n, 0), "ab"[n % 2]
        event = chance.randrange(12)
        if event < 4:
            machine.landed(unit, chance.choice((MIB, MIB, 3 * MIB)), bucket)
            if told and n < 60:
                hints.landed(unit, blocks, n)
                machine.hint(unit)
        elif event == 4 and told:
            position = hints.job("job").position + chance.randrange(6)
            for moved in hints.at("job", position, 0.0):
                machine.moved(moved)
        elif event == 5 and told:
            future = [(chance.randrange(60), 0, 1) for _ in range(chance.randrange(40))]
            if hints.extend(
                "job", chance.randint(hints.job("job").position, hints.job("job").known), triples(future), 0.0
            ):
                machine.all_moved()
        elif event == 6:
            machine.removed(unit)
            hints.gone(unit)
        elif event == 7:
            pinned = chance.random() < 0.3
            if machine.pin(unit, pinned) and not pinned and hints.knows(unit):
                machine.hint(unit)
        elif event == 8 and chance.random() < 0.1:
            if told:
                for freed in hints.close("job"):
                    machine.unhint(freed)
            else:
                hints.begin("job", blocks, 0, 0.0)
                for other in range(60):
                    if unit_of(other, 0) in machine:
                        hints.landed(unit_of(other, 0), blocks, other)
                        machine.hint(unit_of(other, 0))
            told = not told
        elif event == 9:
            machine.touched(unit)
        elif event == 10 and chance.random() < 0.05:
            machine.set_quota("b", chance.choice((None, 15 * MIB)))
        if machine.excess_bytes:
            busy = {unit_of(chance.randrange(80), 0) for _ in range(5)}
            dues = {each: hints.due(each) for each in machine.units()}
            chosen = machine.victims(machine.excess_bytes, busy.__contains__)
            assert not busy.intersection(chosen.units)
            for victim in chosen.units:
                hints.gone(victim)
            for victim in dues.keys() & set(chosen.units):
                beside = (each for each in dues if each in machine and each not in busy)
                later = [each for each in beside if dues[each] > dues[victim]]
                assert not [each for each in later if split_unit(each)[0] % 2 == split_unit(victim)[0] % 2]
                evicted += 1
        machine.stay("b", MIB)
        machine.check()
        hints.check()
    assert evicted > 20


def test_what_was_read_apart_is_not_fetched_for_reads_that_are_over():
    hints = Hints()
    data = Dataset(0, [2 * limits.BLOCK_BYTES])
    hints.begin("job", data, 0, 0.0)
    tenth = limits.BLOCK_BYTES // 10
    hints.extend("job", 0, triples([(0, 0, 1)] * 10 + [(0, 1, 2)]), 0.0, tenth)
    for _ in range(9):  # by batches that are under way: the job says that it is at the first
        hints.read_apart(data, 0, tenth)
    assert not hints.pays(data, [0], Stay(inf, True)), "a tenth is left"
    hints.read_apart(data, 0, tenth - 1)
    assert hints.wanted("job", inf).first == 0, "less than that was read"
    hints.read_apart(data, 0, 1)
    assert hints.wanted("job", inf).first == 1
    hints.at("job", 10, 0.0)
    hints.extend("job", 11, triples([(0, 0, 1)]), 0.0)
    hints.read_apart(data, 0, limits.BLOCK_BYTES // 2)
    assert hints.pays(data, [0], Stay(inf, True)), "all of it is read, and half was"
    hints.at("job", 11, 0.0)
    assert hints.wanted("job", inf).first == 0
    hints.check()


# --- whether a block pays ---------------------------------------------------------------------------------------------
def test_a_block_that_is_read_now_and_then_pays_only_if_it_outlasts_all_that_leaves():
    hints = Hints()
    data = Dataset(0, [8 * limits.BLOCK_BYTES])
    hints.begin("job", data, 0, 0.0)
    hints.extend("job", 0, triples([(0, n % 8, n % 8 + 1) for n in range(1600)]), 0.0, limits.BLOCK_BYTES // 100)
    assert not hints.pays(data, [0], Stay(8 * 90.0, True, 1600.0)), "an eighth of the reads are of it"
    assert hints.pays(data, [0], Stay(8 * 91.0, True, 1600.0))


def test_a_block_pays_if_nine_tenths_of_it_are_read_before_it_leaves():
    hints = Hints()
    data = Dataset(0, [4 * limits.BLOCK_BYTES])
    hints.begin("job", data, 0, 0.0)
    hints.extend("job", 0, triples([(0, n % 4, n % 4 + 1) for n in range(400)]), 0.0, limits.BLOCK_BYTES // 100)
    assert hints.pays(data, [0], Stay(400.0, True))
    assert hints.pays(data, [0], Stay(4 * 91.0, True))
    assert not hints.pays(data, [0], Stay(4 * 90.0, True))
    assert not hints.pays(data, [0, 1], Stay(4 * 90.0, True))
    assert not hints.pays(data, [0], Stay(4 * 90.0, False)), "it may be needed again before that"
    assert hints.pays(data, [0], Stay(400.0, False)), "nobody told that far"
    assert hints.pays(data, [0], Stay(0.0, True, 400.0)), (
        "a quarter of all reads are of it, until what leaves first is due"
    )
    assert not hints.pays(data, [0], Stay(0.0, True, 4 * 90.0))
    hints.at("job", 100, 0.0)
    assert not hints.pays(data, [0], Stay(inf, True)), "three quarters of its reads are left"
    hints.extend("job", 400, triples([(0, 0, 1)]), 0.0)
    assert hints.pays(data, [0], Stay(inf, True)), "and one of all of it"
    hints.extend("job", 350, triples([(0, 3, 4)]), 0.0, 7)
    assert not hints.pays(data, [0], Stay(inf, True)), "which is not told any more"
    assert hints.pays(data, [0], Stay(inf, False))
    hints.check()


def test_a_use_after_as_many_bytes_as_a_node_holds_does_not_count():
    hints = Hints()
    data = Dataset(0, [6 * limits.BLOCK_BYTES])
    tenth = limits.BLOCK_BYTES // 10
    hints.begin("job", data, 0, 0.0)
    hints.extend("job", 0, triples([(0, n // 10 % 6, n // 10 % 6 + 1) for n in range(120)]), 0.0, tenth)
    room, full = Stay(inf, False, inf), Stay(inf, True, inf)
    held = 3 * limits.BLOCK_BYTES
    for stay in (room, full):
        assert hints.pays(data, [0], stay, held), "all of it is read at once"
        assert hints.pays(data, [2], stay, held), "soon"
        assert not hints.pays(data, [5], stay, held)
    for _ in range(5):
        hints.read_apart(data, 0, tenth)
    for stay in (room, full):
        assert not hints.pays(data, [0], stay, held), "half of it now, and the whole in an epoch"
        assert hints.pays(data, [0], stay), "where all has room"
    hints.at("job", 10, 0.0)
    assert not hints.pays(data, [0], room, held)


def test_thousands_of_small_reads_pay_whatever_they_read():
    hints = Hints()
    data = Dataset(0, [limits.BLOCK_BYTES])
    hints.begin("job", data, 0, 0.0)
    hints.extend("job", 0, triples([(0, 0, 1)] * (PAYING_USES + 1)), 0.0, 10)
    assert hints.pays(data, [0], Stay(PAYING_USES + 1.0, True))
    assert not hints.pays(data, [0], Stay(PAYING_USES - 1.0, True))
