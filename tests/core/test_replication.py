"""Who is sent what of which there are two copies, and when what another node keeps is known."""

from __future__ import annotations

import itertools
import random

import msgspec

from forebay.core.cluster.records import Map, Presence
from forebay.core.cluster.replication import Copy, Kept, Sent

BOTH = {"here": 1.0, "there": 1.0}
AGREED = Map(1, True, BOTH, BOTH, BOTH, held=1)
ALIVE = {node: Presence(f"{node} lives", 1, 1) for node in BOTH}


def test_what_fails_while_lists_are_compared_is_compared_again() -> None:
    """What the other keeps of it is not in the list, and stays there until a list is made that says so."""
    numbers = itertools.count(1)
    sent = Sent("here", lambda: next(numbers), lambda bucket: 2)
    assert sent.to_compare(AGREED, ALIVE) == "there"
    mark, busy = sent.mark(AGREED, ALIVE, "there"), sent.busy
    write = sent.begin(("own", "key"))
    sent.failed("there")
    sent.end(write)
    assert sent.have_ended(busy)
    sent.compared("there", mark, True)
    assert sent.to_compare(AGREED, ALIVE) == "there"
    assert not sent.covered(AGREED, ALIVE)
    sent.compared("there", sent.mark(AGREED, ALIVE, "there"), True)
    assert sent.to_compare(AGREED, ALIVE) is None
    assert sent.covered(AGREED, ALIVE)


def test_a_former_second_keeps_what_it_has_until_all_others_were_compared() -> None:
    """Else it might be the only one who has it. While one of them does not answer, nobody else is compared in vain."""
    numbers = itertools.count(1)
    three = dict.fromkeys(("first", "here", "second"), 1.0)
    agreed = Map(1, True, three, three, three, held=1)
    alive = {node: Presence(f"{node} lives", 1, 1) for node in three}
    sent = Sent("here", lambda: next(numbers), lambda bucket: 2)
    assert sent.to_compare(agreed, alive) == "first"
    assert not sent.may_leave(agreed, alive, "first")
    sent.compared("first", sent.mark(agreed, alive, "first"), False)
    assert sent.strays(agreed, alive, ("own", "key")), "who is no second of the key may have it"
    without = {node: lives for node, lives in alive.items() if node != "second"}
    assert sent.to_compare(agreed, without) is None
    assert sent.to_compare(agreed, alive) == "second"
    assert sent.may_leave(agreed, alive, "second")
    sent.compared("second", sent.mark(agreed, alive, "second"), True)
    assert sent.covered(agreed, alive)
    assert sent.to_compare(agreed, alive) == "first"
    assert sent.may_leave(agreed, alive, "first")
    sent.compared("first", sent.mark(agreed, alive, "first"), True)
    assert sent.to_compare(agreed, alive) is None
    assert sent.strays(agreed, alive, ("own", "key")) == []


def test_what_is_kept_for_a_node_is_listed_in_pieces() -> None:
    copies = {("own", f"key-{number}"): Copy("there", number, number) for number in range(10)}
    others = {("own", "key-x"): Copy("another", 1, 1), ("else", "key-3"): Copy("there", 1, 1)}
    kept = Kept("here", copies | others)
    found: list[tuple[str, int]] = []
    while page := kept.of("there", "own", found[-1][0] if found else "", 3):
        found += page
    assert found == [(f"key-{number}", number) for number in range(10)]


def test_what_is_found_in_order_is_what_a_look_at_all_finds() -> None:
    """Copies come, go, and change their actor; each question is asked of the ledger, and of all that it has."""
    chance = random.Random(1)
    actors = ["a", "b", "here"]
    kept = Kept("here", {("own", f"{n}"): Copy("a", 1, 1) for n in range(5)})
    for number in range(2, 3000):
        name = (chance.choice(["own", "own2", "ow"]), f"{chance.randrange(40)}")
        actor, act = chance.choice(actors[:2]), chance.randrange(4)
        if act < 2:
            kept.keep(name, Copy(actor, number, number))
        elif act == 2:
            kept.forget([name])
        else:
            kept.clears(name, actor, number)
        holders = {node: 1.0 for node in actors if node == "here" or chance.random() < 0.7}
        agreed = Map(1, True, holders, holders, holders, held=1, deposed=tuple(sorted({"a", "b"} - holders.keys())))
        every = kept.copies.items()
        assert sorted(kept.taken_over(agreed)) == sorted(n for n, there in every if there.actor in agreed.deposed)
        nobody_deposed = Map(1, True, holders, holders, holders, held=1)
        assert sorted(kept.useless(nobody_deposed)) == sorted(n for n, there in every if there.actor not in holders)
        assert kept.has_any("own") == any(n[0] == "own" for n in kept.copies)
        after, upto = (name, (name[0] + "\0", "")) if chance.random() < 0.5 else (None, None)
        found = kept.compare(agreed, 1, actor, number, {}, (), after, upto)
        if actor in holders:
            assert found is not None
            assert found[1] == sorted(
                n
                for n, there in every
                if there.actor == actor and (after is None or n > after) and (upto is None or n <= upto)
            )


def test_a_spare_copy_is_left_alone_until_its_home_is_gone_and_goes_with_what_the_home_lets_go_of() -> None:
    """A node that hands over has its keys at two: the home, and whoever is second then."""
    three = {"here": 1.0, "home": 1.0, "third": 1.0}
    agreed = Map(4, True, three, three, three, held=4, covered=3, deposed=("gone",))
    names = [("own", f"key-{number}") for number in range(60)]
    spare = next(name for name in names if agreed.holder(*name) == "home")
    mine = next(name for name in names if agreed.holder(*name) == "here")

    def kept() -> Kept:
        found = Kept("here", {name: Copy("gone", 5, 5) for name in (spare, mine)})
        found.follow(agreed)
        return found

    here = kept()
    assert here.acts_anew(agreed, mine)
    assert not here.acts_anew(agreed, spare), "the home acts on it"
    assert [here.is_spare(agreed, name) for name in (spare, mine)] == [True, False]
    assert here.taken_over(agreed) == [mine]
    left = {"here": 1.0, "third": 1.0}
    later = msgspec.structs.replace(agreed, epoch=5, held=5, covered=4, holders=left)
    assert spare in here.taken_over(later), "its home was given up: perhaps it is this node's by now"
    assert not here.clears(spare, "gone", 4), "a late word of who had it"
    assert not here.clears(spare, "third", 9), "it acts on something else"
    assert here.clears(spare, "home", 1)
    assert spare not in here.copies
    other = kept()
    assert not other.clears(mine, "home", 9), "this node has not taken it over yet"
    assert mine in other.copies


def test_a_copy_of_what_is_being_written_stays_though_no_list_has_it() -> None:
    """It may be kept and not committed yet; its actor looks at it again when it has ended."""
    name = ("own", "key")
    for busy in ([name], []):
        kept = Kept("here", {name: Copy("there", 5, 5)})
        found = kept.compare(AGREED, 1, "there", 9, {}, busy)
        assert found == ([], [] if busy else [name])
