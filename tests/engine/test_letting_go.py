"""A node lets go of what is at home elsewhere, while writes go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.core.cluster.records import Map, Past
from forebay.node.engine.homes import Homes

from .conftest import Rig
from .writing import written

Rigged = Callable[..., None]


def elsewhere(rig: Rig) -> tuple[Homes, Map]:
    """The engine's homes, by a map that took all keys from this node."""
    engine: Any = rig.engine
    agreed = Map(2, True, {"other": 1.0}, {}, {"other": 1.0}, past=(Past(2, {engine.node_id: 1.0}),), held=2)
    seat: Any = SimpleNamespace(agreed=agreed, is_here=True, trouble="")
    homes = Homes(
        seat, None, engine.node_id, engine.clock,
        store=engine.store, index=engine.index, buckets=engine.buckets, cold=engine.cold, flusher=engine.flusher,
        volumes=engine.volumes, flush=engine.flush, heard=engine.fronts.heard, is_whole=lambda: True,
    )  # fmt: skip
    return homes, agreed


@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
def test_what_began_to_be_written_meanwhile_is_not_let_go(rigged: Rigged, ends: bool) -> None:
    """The round has looked at its key before, or after what it replaces was flushed."""

    async def story(rig: Rig) -> None:
        await written(rig, "local")
        homes, agreed = elsewhere(rig)
        assert await homes._let_all_go(agreed), "there is nothing"
        looks, goes_on = asyncio.Event(), asyncio.Event()
        owes = homes._owes

        async def owes_late(agreed: Map, bucket: str) -> bool:
            found = await owes(agreed, bucket)
            looks.set()
            await goes_on.wait()
            return found

        homes._owes = owes_late  # type: ignore[method-assign]
        round_ = asyncio.create_task(homes._let_all_go(agreed))
        await looks.wait()
        with homes.acts("remote", "key"):
            if not ends:
                goes_on.set()
                assert not await round_
        goes_on.set()
        assert not await round_
        homes._owes = owes  # type: ignore[method-assign]
        assert await homes._let_all_go(agreed)

    rigged(story)
