"""Whoever is at home now for what a lost node had asks all others for their copies, and then acts on its keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.core.cluster.records import Map
from forebay.core.messages.copied import CopiesAsked, CopiesSaid, ListCopies, SendBack
from forebay.node.engine.kept import KeptCopies

from .conftest import Rig
from .test_doubtful_copies import returns_of
from .test_lost_copies import OWN, kept_copies, sent
from .test_replicas import beside_another

Rigged = Callable[..., None]
NAME = ("own", "key")


class Others:
    """Two more nodes, and the copies that they say they keep of what the lost node had: the number under which each
    was sent it, the version, and the body; None: its disk lost it."""

    def __init__(self, kept: KeptCopies, second: Any, third: Any) -> None:
        self.kept, self.copies = kept, {"second": second, "third": third}
        self.asked: list[str] = []

    def at(self, node: str) -> Any:
        async def says(call: CopiesAsked) -> CopiesSaid:
            copy = self.copies[node]
            if isinstance(call, ListCopies):
                assert call.is_lost
                return CopiesSaid(kept=[] if copy is None or call.after else [("key", copy[1])])
            assert isinstance(call, SendBack)
            self.asked.append(node)
            if copy[2] is None:
                return CopiesSaid(["key"])
            again = sent("key", *copy)
            again = msgspec.structs.replace(again, about=msgspec.structs.replace(again.about, held=call.held))
            await self.kept.answer(again)
            return CopiesSaid()

        return says


async def collected(rig: Rig, here: Any, second: Any, third: Any) -> tuple[Others, KeptCopies]:
    """What came, when the node that had it was given up; `here`: the copy here before, if any."""
    me = rig.engine.node_id
    await rig.engine.buckets.put(OWN)
    four = {me: 1e12, "gone": 1.0, "second": 1.0, "third": 1.0}
    maps = [Map(1, True, four, four, four, held=1, covered=1)]
    kept = kept_copies(rig, lambda: maps[-1])
    if here is not None:
        await kept.answer(sent("key", *here))
    three = {node: weight for node, weight in four.items() if node != "gone"}
    maps.append(Map(2, True, three, three, three, held=2, covered=1, given_up={"gone": 2}, deposed_at=2))
    assert maps[-1].bequeaths == ["gone"]
    assert maps[-1].holder(*NAME) == me
    others = Others(kept, second, third)
    returns = returns_of(rig, kept, maps[-1], None, alive=("second", "third"))  # type: ignore[arg-type]

    class Peers:
        async def ask_copies(self, home: str, call: CopiesAsked) -> CopiesSaid:
            return await others.at(home)(call)

    returns._peers = Peers  # type: ignore[assignment]
    await returns.collect(maps[-1])
    assert not kept.ledger.collects(maps[-1]), "all was asked for"
    return others, kept


@pytest.mark.parametrize(
    ("here", "second", "third", "asked", "body"),
    [
        (None, None, (20, 5, b"third"), ["third"], b"third"),
        (None, (30, 4, b"earlier"), (20, 5, b"third"), ["third"], b"third"),
        (None, (20, 5, b"second"), (30, 5, None), ["third", "second"], b"second"),
        (None, (20, 4, b"earlier"), (30, 5, None), ["third", "second"], b"earlier"),
        ((30, 5, b"here"), (20, 5, b"second"), None, [], b"here"),
        ((30, 4, b"earlier"), (20, 5, b"second"), None, ["second"], b"second"),
        ((10, 5, b"here"), (20, 4, b"earlier"), None, [], b"here"),
    ],
    ids=["third", "newest", "lost there", "lost where it was newest", "here", "number", "older"],
)
def test_the_newest_copy_that_is_left_comes(
    rigged: Rigged, here: Any, second: Any, third: Any, asked: list[str], body: bytes
) -> None:
    async def story(rig: Rig) -> None:
        others, kept = await collected(rig, here, second, third)
        assert others.asked == asked
        await kept.take_all_over()
        record = rig.engine.store.owned(*NAME)
        assert record is not None
        assert record.inline == body

    rigged(story)


def test_what_is_taken_over_late_is_compared_again(rigged: Rigged) -> None:
    """The lists that were compared before do not have it, and its seconds may have nothing of it."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        seat, engine = replicas._seat, rig.engine
        agreed = seat.agreed
        assert agreed is not None
        await engine.buckets.put(OWN)
        maps = [msgspec.structs.replace(agreed, holders={**agreed.holders, "gone": 1.0})]
        kept = kept_copies(rig, lambda: maps[-1])
        kept.took_over = replicas.kept.took_over
        await kept.answer(sent("key", 10, 5, b"bytes"))
        both = {engine.node_id: 1e12, "other": 1.0}
        maps.append(Map(2, True, both, both, both, held=2, covered=1, deposed=("gone",), deposed_at=2))
        seat.agreed = maps[-1]  # type: ignore[misc]
        assert await replicas._tend_once()
        assert replicas.sent.to_compare(maps[-1], seat.alive) is None
        await kept.take_all_over()
        assert replicas.sent.to_compare(maps[-1], seat.alive) == "other"
        assert await replicas._tend_once()
        assert other.kept["key"][1] == b"bytes"

    rigged(story)
