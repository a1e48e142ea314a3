"""The bound that hints are held to: a rule of thumb's worth of code, against all that any cache could do."""

from __future__ import annotations

import random
from itertools import combinations

from bench.rows.hinted import belady_hits


def most_hits(order: str, fit: int) -> int:
    """By trying everything: after each access a cache may keep any of what it had and what came."""
    best: dict[frozenset[str], int] = {frozenset(): 0}
    for block in order:
        after: dict[frozenset[str], int] = {}
        for kept, hits in best.items():
            had = hits + (block in kept)
            had_blocks = kept | {block}
            for size in range(min(fit, len(had_blocks)) + 1):
                for chosen in map(frozenset, combinations(sorted(had_blocks), size)):
                    after[chosen] = max(after.get(chosen, -1), had)
        best = after
    return max(best.values())


def test_no_cache_finds_more_than_the_bound() -> None:
    chance = random.Random(20261121)
    for _ in range(40):
        order = "".join(chance.choices("abcde", k=12))
        for fit in (1, 2, 3):
            assert sum(belady_hits(order, fit)) == most_hits(order, fit), order


def test_of_shuffled_epochs_a_cache_of_half_of_them_finds_half() -> None:
    chance, blocks = random.Random(1), [f"{number:03d}" for number in range(100)]
    order = [block for _ in range(4) for block in chance.sample(blocks, 100)]
    hits = belady_hits(order, 50)
    assert [sum(hits[epoch * 100 : (epoch + 1) * 100]) for epoch in range(4)] == [0, 50, 50, 50]
