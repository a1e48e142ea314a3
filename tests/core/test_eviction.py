"""The eviction machine: what it keeps (against dumb oracles), what it never drops, and that its books balance."""

import random
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.core.errors import Invalid
from forebay.core.machines.eviction import LOW_MARK, POOLS_MAX, Eviction, split_unit, unit_of
from tests.core.evictiontrace import (
    POLICIES,
    Belady,
    Lru,
    Ours,
    S3Fifo,
    dataset,
    epochs,
    replay,
    scan,
    size_of,
    zipf,
)

MIB = 1 << 20


def bytes_of(machine: Eviction, bucket: str) -> int:
    """How many bytes the units of a bucket take."""
    return machine._bucket_bytes[machine._bucket_ids[bucket]] if bucket in machine._bucket_ids else 0


def fill(machine: Eviction, units: range, bucket: str = "b", size: int = MIB) -> list[int]:
    """Land these units one by one, evicting as the engine does; who left."""
    left: list[int] = []
    for unit in units:
        machine.landed(unit, size, bucket)
        if machine.excess_bytes:
            left += machine.victims(machine.excess_bytes).units
    return left


# --- what is kept ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, objects", [("equal", 800), ("mixed", 800), ("blocks", 150)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_random_epochs_hit_nearly_as_often_as_the_share_that_fits(kind, objects, share):
    data = dataset(objects, kind, seed=1)
    trace = epochs(data, 7, seed=2)
    _, hit = replay(Ours(int(size_of(data) * share)), trace, skip=2 * len(trace) // 7)
    assert hit >= 0.95 * share


def test_nobody_who_does_not_know_the_future_does_better_on_random_epochs():
    data = dataset(800, "equal", seed=1)
    trace = epochs(data, 7, seed=2)
    capacity, skip = size_of(data) // 2, 1600
    _, best = replay(Belady(capacity, trace), trace, skip)
    hits = {name: replay(policy(capacity), trace, skip)[1] for name, policy in POLICIES.items()}
    assert hits["forebay"] >= 0.97 * best
    assert max(hits["LRU"], hits["CLOCK"], hits["S3-FIFO"]) < 0.5 * hits["forebay"]


@pytest.mark.parametrize("share, other", [(0.1, 1.0), (0.3, 3.0), (0.5, 1.0), (0.8, 0.3)])
def test_a_changed_dataset_is_followed_within_five_epochs(share, other):
    old, new = dataset(1000, "equal", seed=1), dataset(int(1000 * other), "equal", seed=3, first_id=10**6)
    capacity = int(size_of(old) * share)
    policy = Ours(capacity)
    replay(policy, epochs(old, 5, seed=2))
    replay(policy, epochs(new, 4, seed=4))
    _, hit = replay(policy, epochs(new, 1, seed=5))
    assert hit >= 0.9 * min(1.0, capacity / size_of(new))


@pytest.mark.parametrize("alpha", [0.7, 1.1])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_skewed_reads_are_served_as_well_as_by_lru_and_s3_fifo(alpha, share):
    trace = zipf(5000, 50_000, alpha, seed=5)
    capacity = int(5000 * share) * MIB
    hit = replay(Ours(capacity), trace, 15_000)[1]
    assert hit >= 0.95 * replay(Lru(capacity), trace, 15_000)[1]
    assert hit >= 0.95 * replay(S3Fifo(capacity), trace, 15_000)[1]


def test_a_scan_over_a_hot_set_does_no_lasting_harm():
    hot, junk = zipf(5000, 60_000, 0.9, seed=5), scan(10_000, first_id=10**6)
    before, during, after = hot[:20_000], hot[20_000:30_000], hot[30_000:]
    mixed = [access for pair in zip(during, junk, strict=True) for access in pair]
    for share in (0.05, 0.3):
        policy, calm = Ours(int(5000 * share) * MIB), Ours(int(5000 * share) * MIB)
        replay(policy, before + mixed)
        replay(calm, before + during)
        assert replay(policy, after[:5000])[1] >= 0.97 * replay(calm, after[:5000])[1]


def test_a_block_read_in_many_pieces_counts_as_read_once():
    """Eight requests per block tell no more than one: the same victims leave."""

    def play(pieces):
        machine, left, chance = Eviction(100 * MIB), [], random.Random(1)
        for _ in range(6):
            for unit in chance.sample(range(200), 200):
                for _ in range(pieces):
                    if not machine.touched(unit):
                        left += fill(machine, range(unit, unit + 1))
        return left

    assert play(1) == play(8)


# --- what is never dropped -------------------------------------------------------------------------------------------
def test_pinned_units_stay_and_a_cache_of_pinned_units_is_stuck():
    machine = Eviction(10 * MIB)
    fill(machine, range(10))
    for unit in range(10):
        assert machine.pin(unit)
    assert fill(machine, range(10, 40)) == list(range(10, 40)), "newcomers pass by"
    assert machine.victims(MIB) == ([], 0, True)
    machine.pin(3, False)
    assert machine.victims(MIB).units == [3]


def test_a_held_unit_goes_only_after_it_was_released_as_often():
    machine = Eviction(4 * MIB)
    fill(machine, range(4))
    for unit in range(4):
        machine.hold(unit)
    machine.hold(2)
    machine.release(2)
    assert machine.victims(MIB).stuck
    machine.release(2)
    assert machine.victims(2 * MIB) == ([2], MIB, True)


def test_a_unit_that_the_caller_calls_busy_is_passed_over():
    machine = Eviction(4 * MIB)
    fill(machine, range(4))
    assert machine.victims(2 * MIB, busy=lambda unit: unit != 1) == ([1], MIB, True)
    assert not machine.victims(3 * MIB).stuck, "busy holds for one call"


def test_a_bucket_above_its_quota_gives_up_its_own_units():
    machine = Eviction(100 * MIB)
    fill(machine, range(50), "calm")
    machine.set_quota("greedy", 20 * MIB)
    left = fill(machine, range(1000, 1100), "greedy")
    assert left
    assert min(left) >= 1000
    assert bytes_of(machine, "calm") == 50 * MIB
    assert 19 * MIB <= bytes_of(machine, "greedy") <= 20 * MIB


def test_a_quota_set_late_is_met_with_the_buckets_own_units_and_lifted_again():
    machine = Eviction(100 * MIB)
    fill(machine, range(60), "greedy")
    fill(machine, range(1000, 1030), "calm")
    machine.set_quota("greedy", 10 * MIB)
    machine.check()
    evicted = machine.victims(machine.excess_bytes)
    assert not evicted.stuck
    assert max(evicted.units) < 60
    assert bytes_of(machine, "greedy") <= 10 * MIB
    machine.set_quota("greedy", None)
    machine.check()
    assert fill(machine, range(60), "greedy") == [], "there is room for all again"


def test_within_a_quota_random_epochs_hit_what_the_quota_holds():
    machine, chance, hits = Eviction(1000 * MIB), random.Random(1), 0
    machine.set_quota("b", 100 * MIB)
    for epoch in range(8):
        for unit in chance.sample(range(300), 300):
            if machine.touched(unit):
                hits += epoch >= 2
            else:
                fill(machine, range(unit, unit + 1))
    assert hits / (6 * 300) >= 0.95 * 100 / 300


def test_too_many_quotas_are_refused_with_what_to_do():
    machine = Eviction(MIB)
    for n in range(POOLS_MAX):
        machine.set_quota(f"b{n}", MIB)
    with pytest.raises(Invalid, match="remove one"):
        machine.set_quota("one-more", MIB)
    machine.set_quota("b0", None)
    machine.set_quota("one-more", MIB)


def test_a_smaller_capacity_is_met_at_once():
    machine = Eviction(100 * MIB)
    fill(machine, range(100))
    machine.set_capacity(30 * MIB)
    assert not machine.victims(machine.excess_bytes).stuck
    assert 29 * MIB <= machine.used_bytes <= 30 * MIB
    assert machine.excess_bytes == 0


def test_of_a_large_share_that_must_go_the_idle_go_first():
    machine, chance = Eviction(4000), random.Random(7)
    machine.restore(
        ((unit, 1, "b", 1_000_000 + (unit % 3 == 0), False) for unit in chance.sample(range(3000), 3000)), 1_000_001
    )
    machine.set_capacity(1500)
    left = []
    while machine.excess_bytes:
        gone = machine.victims(machine.excess_bytes, units_max=200)
        assert 0 < len(gone.units) <= 200
        assert not gone.stuck
        left += gone.units
        machine.check()
    assert sum(unit % 3 == 0 for unit in left) < 0.05 * len(left)


def test_a_turn_is_bounded_and_a_bucket_above_its_quota_gives_first():
    machine = Eviction(10_000)
    machine.restore([(unit, 1, "ab"[unit % 2], 5, False) for unit in range(2000)], 5)
    machine.set_quota("b", 100)
    left = []
    while machine.excess_bytes:
        left += machine.victims(machine.excess_bytes, units_max=64).units
    assert {unit % 2 for unit in left} == {1}
    assert bytes_of(machine, "b") <= 100
    machine.check()


def test_memory_comes_back_when_most_have_left_and_the_rest_is_as_it_was():
    def play(shrinks):
        machine = Eviction(1 << 30)
        machine.restore([(unit, 1, "ab"[unit % 2], unit % 977, unit % 5000 == 0) for unit in range(70_000)], 977)
        machine.set_quota("b", 3000)
        machine.set_capacity(5000)
        if not shrinks:
            machine._shrink = lambda: None
        left = []
        while machine.excess_bytes:
            left += machine.victims(machine.excess_bytes, units_max=256).units
        machine.check()
        assert (len(machine._units) < 10_000) == shrinks
        for unit in range(100_000, 101_000):
            machine.landed(unit, 1, "a")
            left += machine.victims(machine.excess_bytes, units_max=256).units if machine.excess_bytes else []
        machine.check()
        return left

    assert play(True) == play(False)


def test_no_capacity_keeps_nothing():
    machine = Eviction(0)
    assert fill(machine, range(5)) == [0, 1, 2, 3, 4]


def test_a_unit_that_comes_back_with_another_size_is_counted_once():
    machine = Eviction(100 * MIB)
    machine.landed(7, MIB, "b")
    machine.landed(7, 2 * MIB, "b")
    machine.check()
    assert machine.used_bytes == 2 * MIB
    assert len(machine) == 1


# --- restart ---------------------------------------------------------------------------------------------------------
def test_after_a_restart_long_unused_units_go_first_and_pins_hold():
    machine, day = Eviction(100 * MIB), 1440
    known = [(unit, MIB, "b", 30_000_000 - (30 * day if unit < 40 else 0), unit == 5) for unit in range(100)]
    random.Random(1).shuffle(known)
    machine.landed(1000, MIB, "b")
    for first in range(0, 100, 30):
        machine.restore(known[first : first + 30], 30_000_000)
    machine.restore(known[:50], 30_000_000)
    assert machine.removed(1000)
    machine.check()
    assert machine.used_bytes == 100 * MIB
    evicted = machine.victims(20 * MIB).units
    assert all(unit < 40 and unit != 5 for unit in evicted)


def test_random_epochs_go_on_after_a_restart():
    data = dataset(400, "equal", seed=1)
    policy = Ours(200 * MIB)
    replay(policy, epochs(data, 3, seed=2))
    again = Ours(200 * MIB)
    again.machine.restore(
        [(unit, MIB, "b", 30_000_000, False) for [(unit, _)] in data if unit in policy.machine], 30_000_000
    )
    _, hit = replay(again, epochs(data, 5, seed=3))
    assert hit >= 0.95 * 0.5


# --- cost ------------------------------------------------------------------------------------------------------------
def test_a_unit_costs_little_memory():
    units = 60_000
    tracemalloc.start()
    machine = Eviction(units * MIB)
    for unit in range(units + units // 10):
        machine.landed(unit_of(1 << 30, unit), MIB, "b")
        if machine.excess_bytes:
            machine.victims(machine.excess_bytes)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(machine) >= units * LOW_MARK - 1
    assert used / len(machine) < 175


def test_the_clock_may_run_for_ever():
    machine = Eviction(100 * MIB)
    machine._now = (1 << 31) - 2000
    fill(machine, range(100))
    for _ in range(3):
        for unit in range(100):
            machine.touched(unit)
    fill(machine, range(100, 150))
    machine.check()
    assert machine._now < 1 << 31


# --- books -----------------------------------------------------------------------------------------------------------
class Books(RuleBasedStateMachine):
    """Any order of events against three dicts."""

    def __init__(self):
        super().__init__()
        self.capacity = 50
        self.machine = Eviction(self.capacity)
        self.sizes, self.pinned, self.held, self.quotas = {}, set(), {}, {}

    units = st.integers(0, 40).map(lambda n: unit_of(n // 4, n % 4))
    buckets = st.sampled_from(["a", "b", "c"])

    @rule(unit=units, size=st.integers(0, 9))
    def land(self, unit, size):
        bucket = "abc"[split_unit(unit)[0] % 3]
        if self.sizes.get(unit, (size,))[0] != size:
            self.pinned.discard(unit)
        self.machine.landed(unit, size, bucket)
        self.sizes[unit] = size, bucket

    @rule(unit=units)
    def touch(self, unit):
        assert self.machine.touched(unit) == (unit in self.sizes)

    @rule(object_id=st.integers(0, 10))
    def touch_all(self, object_id):
        self.machine.touched_blocks(object_id, 0, 4)

    @rule(unit=units)
    def remove(self, unit):
        assert self.machine.removed(unit) == (self.sizes.pop(unit, None) is not None)
        self.pinned.discard(unit)

    @rule(unit=units, pinned=st.booleans())
    def pin(self, unit, pinned):
        if self.machine.pin(unit, pinned):
            (self.pinned.add if pinned else self.pinned.discard)(unit)

    @rule(unit=units)
    def hold(self, unit):
        self.machine.hold(unit)
        self.held[unit] = self.held.get(unit, 0) + 1

    @rule()
    def release(self):
        for unit in sorted(self.held)[:1]:
            self.machine.release(unit)
            self.held[unit] -= 1
            if not self.held[unit]:
                del self.held[unit]

    @rule(bucket=buckets, quota=st.none() | st.integers(0, 40))
    def set_quota(self, bucket, quota):
        self.machine.set_quota(bucket, quota)
        self.quotas[bucket] = quota

    @rule(capacity=st.integers(0, 90))
    def set_capacity(self, capacity):
        self.machine.set_capacity(capacity)
        self.capacity = capacity

    @rule()
    def evict(self):
        asked = self.machine.excess_bytes
        units, freed, stuck = self.machine.victims(asked)
        assert len(units) == len(set(units))
        assert not set(units) & (self.pinned | set(self.held))
        assert freed == sum(self.sizes.pop(unit)[0] for unit in units)
        free = [unit for unit, (size, _) in self.sizes.items() if size and unit not in self.pinned | set(self.held)]
        used = sum(size for size, _ in self.sizes.values())
        if not stuck:
            assert used <= self.capacity
            for bucket, quota in self.quotas.items():
                assert quota is None or bytes_of(self.machine, bucket) <= quota
        elif used > self.capacity:
            assert not free, "stuck with something to give"
        assert asked or not units

    @invariant()
    def balanced(self):
        self.machine.check()
        assert self.machine.used_bytes == sum(size for size, _ in self.sizes.values())
        assert len(self.machine) == len(self.sizes)
        for name in "abc":
            assert bytes_of(self.machine, name) == sum(size for size, bucket in self.sizes.values() if bucket == name)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_of_events_keeps_the_books = Books.TestCase
