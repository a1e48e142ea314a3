"""Nodes of a cluster give up copies of each other's keys before they give up what they are the home of."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.core.machines.copies import SHARE, EvictionOfCopies
from forebay.core.machines.eviction import Eviction
from forebay.core.machines.foreseen import Stay
from forebay.core.machines.hinted_eviction import HintedEviction
from forebay.core.machines.hints import Hints

MIB = 1 << 20


class Cluster:
    """Nodes of `share` of the corpus each. A reader asks its node, that asks the home, and that the backend."""

    def __init__(self, units: int, share: float, nodes: int, *, know_copies: bool = True) -> None:
        self.chance, self._know = random.Random(1), know_copies
        self.nodes = [EvictionOfCopies(int(units * MIB * share)) for _ in range(nodes)]
        self.home = {unit: self.chance.randrange(nodes) for unit in range(1, units + 1)}
        self.from_backend = 0

    def _land(self, node: int, unit: int) -> None:
        machine = self.nodes[node]
        machine.landed(unit, MIB, "corpus", unit, self._know and self.home[unit] != node)
        if machine.excess_bytes:
            assert not machine.victims(machine.excess_bytes).stuck

    def read(self, node: int, unit: int) -> None:
        if self.nodes[node].touched(unit):
            return
        home = self.home[unit]
        if not self.nodes[home].touched(unit):
            self.from_backend += 1
            self._land(home, unit)
        if home != node:
            self._land(node, unit)

    def epoch(self) -> float:
        """One, in a new random order, the samples dealt out to the nodes; what the backend sent, over the corpus."""
        order, self.from_backend = list(self.home), 0
        self.chance.shuffle(order)
        for number, unit in enumerate(order):
            self.read(number % len(self.nodes), unit)
        for machine in self.nodes:
            machine.check()
        return self.from_backend / len(order)


@pytest.mark.parametrize("share", [0.4, 0.5, 0.7])
def test_a_corpus_that_fits_the_cluster_but_no_node_is_read_from_the_backend_once(share: float):
    cluster = Cluster(1500, share, 3)
    assert cluster.epoch() == 1
    assert [cluster.epoch() for _ in range(4)] == [0, 0, 0, 0]


def test_where_nobody_tells_copies_apart_it_comes_again_and_again():
    """The fault that this mends."""
    cluster = Cluster(1500, 0.4, 3, know_copies=False)
    cluster.epoch()
    assert min(cluster.epoch() for _ in range(3)) > 0.1


def test_a_corpus_that_does_not_fit_the_cluster_hits_what_the_nodes_hold_of_their_own():
    cluster = Cluster(1500, 0.25, 3)
    cluster.epoch()
    sent = [cluster.epoch() for _ in range(4)]
    ideal = 1 - 0.25 * (1 - SHARE) * 3
    assert max(sent) < ideal + 0.05


def filled(own: int, copies: int, capacity: int = 100) -> EvictionOfCopies:
    machine = EvictionOfCopies(capacity * MIB)
    for unit in range(own):
        machine.landed(1000 + unit, MIB, "b", copy=False)
    for unit in range(copies):
        machine.landed(5000 + unit, MIB, "b", copy=True)
    return machine


def is_copy(unit: int) -> bool:
    return unit >= 5000


def test_copies_leave_first_down_to_their_share():
    machine = filled(60, 40)
    assert all(map(is_copy, machine.victims(25 * MIB).units))
    machine.check()
    rest = machine.victims(25 * MIB).units
    assert sum(map(is_copy, rest)) >= 5, "down to a tenth of the capacity"
    assert not all(map(is_copy, rest)), "and then as equals"
    machine.check()


def test_what_is_hot_on_every_node_stays_as_a_copy():
    machine = EvictionOfCopies(100 * MIB)
    chance = random.Random(2)
    for turn in range(2000):
        for hot in range(4):
            if not machine.touched(hot + 1):
                machine.landed(hot + 1, MIB, "b", hot + 1, True)
        own = 100 + chance.randrange(300)
        if not machine.touched(own):
            machine.landed(own, MIB, "b", own, False)
        if machine.excess_bytes:
            machine.victims(machine.excess_bytes)
        assert turn < 500 or all(hot + 1 in machine for hot in range(4))


def test_a_changed_map_makes_copies_of_units_and_homes_of_copies():
    machine = filled(50, 40)
    for unit in range(50):
        machine.place(1000 + unit, True)
    for unit in range(40):
        machine.place(5000 + unit, False)
    machine.place(99, True)  # one that is not here
    machine.check()
    assert not any(map(is_copy, machine.victims(40 * MIB).units))
    machine.check()


def test_copies_of_a_bucket_with_a_quota_count_for_it_and_stay_in_it():
    machine = filled(20, 20)
    machine.set_quota("b", 30 * MIB)
    machine.check()
    assert machine.excess_bytes >= 10 * MIB
    machine.victims(machine.excess_bytes)
    assert 29 * MIB <= machine.used_bytes <= 30 * MIB
    machine.landed(9000, MIB, "b", copy=True)
    machine.check()
    machine.set_quota("b", None)
    machine.check()
    machine.landed(9001, MIB, "b", copy=True)
    machine.check()


def test_what_is_fetched_ahead_for_a_job_takes_the_room_of_copies_alone():
    hints = Hints()
    machine = HintedEviction(100 * MIB, hints)
    for unit in range(90):
        machine.landed(1000 + unit, MIB, "b", copy=False)
    for unit in range(10):
        machine.landed(5000 + unit, MIB, "b", copy=True)
    own = machine.stay("b", MIB, False)
    copy = machine.stay("b", MIB, True)
    assert isinstance(own, Stay)
    assert not copy.hinted
    machine.landed(5010, MIB, "b", copy=True)
    assert all(map(is_copy, machine.victims(machine.excess_bytes).units))
    machine.check()


class Machine(RuleBasedStateMachine):
    """Any events, in the books of `check`."""

    units = st.integers(1, 30)

    def __init__(self) -> None:
        super().__init__()
        self.machine: Eviction = EvictionOfCopies(12 * MIB)

    @rule(unit=units, size=st.sampled_from([MIB, MIB // 2]), bucket=st.sampled_from("ab"), copy=st.booleans())
    def land(self, unit: int, size: int, bucket: str, copy: bool) -> None:
        assert isinstance(self.machine, EvictionOfCopies)
        self.machine.landed(unit, size, bucket, unit, copy)

    @rule(unit=units)
    def touch(self, unit: int) -> None:
        self.machine.touched(unit)

    @rule(unit=units, pinned=st.booleans())
    def pin(self, unit: int, pinned: bool) -> None:
        self.machine.pin(unit, pinned)

    @rule(unit=units, copy=st.booleans())
    def place(self, unit: int, copy: bool) -> None:
        assert isinstance(self.machine, EvictionOfCopies)
        self.machine.place(unit, copy)

    @rule(bucket=st.sampled_from("ab"), quota=st.sampled_from([None, 2 * MIB, 8 * MIB]))
    def quota(self, bucket: str, quota: int | None) -> None:
        self.machine.set_quota(bucket, quota)

    @rule(capacity=st.integers(4, 16))
    def resize(self, capacity: int) -> None:
        self.machine.set_capacity(capacity * MIB)

    @rule()
    def make_room(self) -> None:
        found = self.machine.victims(self.machine.excess_bytes)
        assert found.stuck or not self.machine.excess_bytes

    @invariant()
    def books_are_right(self) -> None:
        self.machine.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
