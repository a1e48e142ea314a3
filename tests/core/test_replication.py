"""Who is sent what of which there are two copies, and when what another node keeps is known."""

from __future__ import annotations

import itertools

from forebay.core.cluster.records import Map, Presence
from forebay.core.cluster.replication import Copy, Kept, Sent

BOTH = {"here": 1.0, "there": 1.0}
AGREED = Map(1, True, BOTH, BOTH, BOTH, held=1)
ALIVE = {node: Presence(f"{node} lives", 1, 1) for node in BOTH}


def test_what_fails_while_lists_are_compared_is_compared_again() -> None:
    """What the other keeps of it is not in the list, and stays there until a list is made that says so."""
    numbers = itertools.count(1)
    sent = Sent("here", lambda: next(numbers))
    assert sent.to_compare(AGREED, ALIVE) == "there"
    mark, busy = sent.mark(AGREED, ALIVE, "there"), sent.busy
    write = sent.begin(("own", "key"))
    sent.failed("there")
    sent.end(write)
    assert sent.compared("there", mark, busy)
    assert sent.to_compare(AGREED, ALIVE) == "there"
    assert not sent.covered(AGREED, ALIVE)
    assert sent.compared("there", sent.mark(AGREED, ALIVE, "there"), sent.busy)
    assert sent.to_compare(AGREED, ALIVE) is None
    assert sent.covered(AGREED, ALIVE)


def test_what_is_kept_for_a_node_is_listed_in_pieces() -> None:
    copies = {("own", f"key-{number}"): Copy("there", number, number) for number in range(10)}
    others = {("own", "key-x"): Copy("another", 1, 1), ("else", "key-3"): Copy("there", 1, 1)}
    kept = Kept("here", copies | others)
    found: list[tuple[str, int]] = []
    while page := kept.of("there", "own", found[-1][0] if found else "", 3):
        found += page
    assert found == [(f"key-{number}", number) for number in range(10)]
