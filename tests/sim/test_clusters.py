"""Worlds of many nodes: the same seed is the same world, fresh ones are sound, and planted bugs are found."""

from __future__ import annotations

from collections import Counter

import pytest

from forebay.sim.cluster import TTL_S, Cluster
from forebay.sim.cluster_plants import PLANTS
from forebay.sim.plants import planted
from tests.sim.test_stories import told

SEEDS_MAX = 60  # the rarest is found by one in ten


def test_a_seed_is_the_same_world_whatever_the_hash_seed() -> None:
    runs = [told("--cluster", "--seed", "11", hash_seed=hash_seed) for hash_seed in ("1", "2")]
    assert runs[0].returncode == 0, runs[0].stdout[-3000:] + runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "crashes" in runs[0].stdout


def test_these_seeds_find_nothing() -> None:
    run = told("--cluster", "--seed", "1", "--seeds", "20")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr
    assert "1.2 hours of clusters" in run.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", sorted(PLANTS))
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug, PLANTS):
        for seed in range(1, SEEDS_MAX):
            try:
                Cluster(seed).run()
            except AssertionError:
                return
    pytest.fail(f"{SEEDS_MAX} worlds do not find {bug}")


def test_there_are_bugs() -> None:
    assert len(PLANTS) >= 10


@pytest.mark.parametrize("starving_s", [0.5, 2.0, 3.0])
def test_a_node_that_waits_for_its_processor_keeps_its_keys(starving_s: float) -> None:
    """Up to so long for each turn: its copy is old, its renewals are late, and it is not taken for dead."""
    acknowledged = Counter[str]()
    for seed in range(3):
        fed, starved = Cluster(seed, starving_s=0.001), Cluster(seed, starving_s=starving_s)
        fed.run()
        starved.run()
        assert len(starved.epochs) == len(fed.epochs), "a map more would say that its keys went and came back"
        acknowledged += Counter(fed=fed.acknowledged, starved=starved.acknowledged)
    assert acknowledged["starved"] > 0.8 * acknowledged["fed"]


def test_a_crashed_nodes_keys_have_a_home_within_a_lease_and_two_seconds() -> None:
    for seed in range(20):
        world = Cluster(seed, starving_s=0.001)
        world.begin()
        assert world.rehomed_s() <= TTL_S + 2.0, f"seed {seed}"
