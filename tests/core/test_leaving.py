"""A drained node is gone when nothing that it acknowledges would be on it alone."""

from __future__ import annotations

import msgspec

from forebay.core.cluster.records import NODES, NodeRecord
from tests.core.test_membership import Town


def wanted(town: Town, node: str) -> str:
    return msgspec.json.decode(town.agreed.entries[NODES + node].value, type=NodeRecord).wanted


def test_a_newcomer_with_a_write_under_way_is_not_gone() -> None:
    """It holds nothing yet, so no map names it among those who let go; but it acts on what it brought."""
    town = Town()
    town.start("a")
    town.start("b")
    town.quiet(15.0)
    newcomer = town.start("c")
    town.keeping.add("c")
    town.owing.add("c")
    town.quiet(3.0)
    assert "c" in town.map.owners
    assert "c" not in town.map.holders
    assert town.map.past == ()
    lease = newcomer.member(town.now_s)
    assert lease, "a write begins"
    town.want("c", "draining")
    town.quiet(3.0)
    assert (newcomer.member(town.now_s), newcomer.remains(town.now_s)) == (0, lease)
    town.owing.discard("c")  # what the write replaces is flushed
    town.quiet(5.0)
    assert wanted(town, "c") == "draining"
    town.keeping.discard("c")  # it ended, and was flushed: the node lets go of all
    town.quiet(5.0)
    assert wanted(town, "c") == "gone"
    assert newcomer.remains(town.now_s) == 0


def test_a_node_that_is_taken_back_takes_writes_when_others_count_it_as_here() -> None:
    town = Town()
    for name in "ab":
        town.start(name)
    town.quiet(15.0)
    town.want("b", "draining")
    town.quiet(5.0)
    assert wanted(town, "b") == "gone"
    town.stop("b")
    town.quiet(15.0)
    town.want("b", "active")
    back = town.start("b")
    while not back.is_present(town.now_s):
        assert not back.member(town.now_s)
        assert back.nodes.get("b") is None or back.nodes["b"].was_gone
        town.quiet(0.25)
    town.quiet(5.0)
    assert back.member(town.now_s)
    known = back.nodes["b"]
    back.nodes["b"] = msgspec.structs.replace(known, was_gone=True)
    assert not back.member(town.now_s), "others may take it for gone if it is lost now"
    back.nodes["b"] = known
    assert not town.nodes["a"].membership.nodes["b"].was_gone
    assert back.member(town.now_s)
