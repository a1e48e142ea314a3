"""A node is given up: others take over what they have of it, and only then is the next map as free as any."""

from __future__ import annotations

from forebay.core.cluster.records import NODES
from tests.core.test_membership import KEYS, Town


def test_what_others_keep_of_a_node_that_is_given_up_is_theirs_until_all_is_covered() -> None:
    town = Town()
    town.copying = set("abcd")
    for name in "abcd":
        town.start(name)
    town.quiet()
    town.stop("a")
    town.copying = {"b", "c"}
    town.stop("d")
    town.quiet(20.0)
    before = town.map
    assert (sorted(before.holders), before.deposed, before.given_up) == (["b", "c", "d"], ("a",), {}), "one at a time"
    town.want("d", "gone")
    town.copying = {"b"}
    town.quiet()
    given_up = town.map
    assert (sorted(given_up.holders), given_up.deposed, given_up.bequeaths) == (["b", "c"], ("a",), ["d"])
    assert given_up.is_taking_over
    assert given_up.replaced == ["a", "d"]
    assert given_up.covered < given_up.deposed_at == given_up.held
    for key in KEYS:
        if before.holder("b", key) == "d":
            assert given_up.holder("b", key) == before.seconds("d", "b", key, 3)[0], "who has the copy is the home"
    town.start("e")
    town.quiet(20.0)
    assert sorted(town.map.holders) == ["b", "c"], "nobody comes or goes who could take copies along"
    town.copying = set("bce")
    town.quiet(20.0)
    assert (sorted(town.map.holders), town.map.bequeaths, list(town.map.given_up)) == (list("bce"), [], ["d"])
    town.agreed.transact({NODES + "d": None}, {NODES + "d": town.agreed.entries[NODES + "d"].revision})
    town.quiet()
    assert town.map.given_up == {}, "nobody knows it any more"


def test_of_a_node_that_is_given_up_nobody_keeps_anything_where_all_is_kept_once() -> None:
    town = Town()
    for name in "abc":
        town.start(name).keeps({"own": "local"})
    town.quiet()
    town.stop("a")
    town.quiet(20.0)
    town.want("a", "gone")
    town.quiet()
    town.start("d").keeps({"own": "local"})
    town.quiet(20.0)
    assert (sorted(town.map.holders), town.map.given_up) == (["b", "c", "d"], {})
