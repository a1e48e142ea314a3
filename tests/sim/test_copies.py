"""Worlds of nodes that keep copies for each other: nothing acknowledged is lost, and planted bugs are found."""

from __future__ import annotations

import pytest

from forebay.sim.copies import Copies
from forebay.sim.copies_plants import PLANTS
from forebay.sim.plants import planted
from tests.sim.test_stories import told

SEEDS_MAX = 250
# Worlds that find bugs that few meet; where the product has changed since, a later one does.
FIRST = {"fence": 31, "floors": 71, "replaced": 100}


def test_a_seed_is_the_same_world_whatever_the_hash_seed() -> None:
    runs = [told("--copies", "--seed", "2", hash_seed=hash_seed) for hash_seed in ("1", "2")]
    assert runs[0].returncode == 0, runs[0].stdout[-3000:] + runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
    assert "takes over" in runs[0].stdout
    assert "forgets" in runs[0].stdout, "a node that was taken over came back"


def test_these_seeds_find_nothing() -> None:
    run = told("--copies", "--seed", "1", "--seeds", "20")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr
    assert "1.2 hours of clusters" in run.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", sorted(PLANTS))
def test_a_planted_bug_is_found(bug: str) -> None:
    with planted(bug, PLANTS):
        for seed in range(FIRST.get(bug, 1), FIRST.get(bug, 1) + SEEDS_MAX):
            try:
                Copies(seed).run()
            except AssertionError:
                return
    pytest.fail(f"{SEEDS_MAX} worlds do not find {bug}")


def test_there_are_bugs() -> None:
    assert len(PLANTS) >= 10
