"""The judge is judged: against every order of small histories, and by histories that are known to be wrong."""

from __future__ import annotations

import itertools
import math
import random

from forebay.sim.history import ABSENT, Call, Kind, apply, explain

KINDS: list[Kind] = ["write", "create", "swap", "delete", "read", "refused create", "refused swap"]


def every_order(calls: list[Call], before: str) -> set[str]:
    """Dumb: all subsets that leave out only open calls, in all orders that keep what came before what."""
    found = set()
    opened = [call for call in calls if call.is_open]
    closed = [call for call in calls if not call.is_open]
    for count in range(len(opened) + 1):
        for some in itertools.combinations(opened, count):
            for order in itertools.permutations([*closed, *some]):
                if any(later.ended < sooner.began for n, sooner in enumerate(order) for later in order[n + 1 :]):
                    continue
                content: str | None = before
                for call in order:
                    content = apply(call, content) if content is not None else None
                if content is not None:
                    found.add(content)
    return found


def test_it_finds_what_every_order_finds() -> None:
    chance = random.Random(20)
    explained = 0
    for _ in range(3000):
        calls = []
        for number in range(chance.randrange(1, 6)):
            kind = chance.choice(KINDS)
            began = chance.random()
            is_open = chance.random() < 0.25 and not kind.startswith(("read", "refused"))
            label = chance.choice(["x", "y", ABSENT]) if kind == "read" else f"{'xyxyz'[number]}"
            ended = math.inf if is_open else began + chance.random() * 0.6
            calls.append(Call(kind, label, began, ended, chance.choice(["x", "y"])))
        wanted = every_order(calls, ABSENT)
        explained += bool(wanted)
        assert explain(calls, [ABSENT]) == wanted, calls
    assert 300 < explained < 2700, "both kinds of histories were there"


def test_an_acknowledged_write_that_is_not_read_has_no_explanation() -> None:
    story = [Call("write", "one", 0, 1), Call("write", "two", 2, 3), Call("read", "one", 4, 5)]
    assert explain(story, [ABSENT]) == set()
    assert explain([*story[:2], Call("read", "two", 4, 5)], [ABSENT]) == {"two"}


def test_a_write_without_an_answer_may_come_late_but_not_twice() -> None:
    lost = Call("write", "lost", 0, math.inf)
    story = [lost, Call("write", "two", 1, 2), Call("read", "two", 3, 4), Call("read", "lost", 5, 6)]
    assert explain(story, [ABSENT]) == {"lost"}
    again = [*story, Call("write", "three", 7, 8), Call("read", "lost", 9, 10)]
    assert explain(again, [ABSENT]) == set()


def test_one_of_two_that_create_is_refused() -> None:
    both = [Call("create", "one", 0, 2), Call("create", "two", 1, 3)]
    assert explain(both, [ABSENT]) == set()
    assert explain([both[0], Call("refused create", "two", 1, 3)], [ABSENT]) == {"one"}
    own = [Call("refused create", "one", 0, 2), Call("read", "one", 3, 4)]  # its first try was stored, then refused
    assert explain(own, [ABSENT]) == set()
