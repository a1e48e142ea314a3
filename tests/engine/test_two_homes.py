"""What a node was told by the home of a key counts no more once it is the home itself, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from forebay.core.errors import MAP_CHANGES, Busy, NotFound
from forebay.core.messages.calls import Uploads, UploadsCall
from forebay.core.types import FRESH_IMMUTABLE, Bucket
from forebay.node.engine.asking import Patience
from forebay.node.engine.buckets import Served
from forebay.node.outcomes import from_node

from .conftest import MIB, Remote, Rig, pattern, until

Rigged = Callable[..., None]


class Homes:
    """One other node beside this one, which has `elsewhere` in its place; who acts is what the test says."""

    node_id = "here"

    def __init__(self, elsewhere: Remote) -> None:
        self.elsewhere, self.acts_here = elsewhere, False
        self._through: Served | None = None

    def is_here(self, bucket: Bucket, key: str) -> bool:
        return self.acts_here

    def patience(self) -> Patience | None:
        return None

    async def at(self, served: Served, key: str) -> Served:
        if self.acts_here:
            return served
        if self._through is None:
            self._through = Served(Bucket(served.bucket.name, "s3://elsewhere", 0.0), self.elsewhere, of=served)
        return self._through

    def acts(self, bucket: str, key: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, name: tuple[str, str]) -> None: ...

    def end(self, name: tuple[str, str]) -> None: ...

    def upload_at(self, served: Served, upload_id: str) -> Served | None:
        return None

    async def uploads(self, bucket: Bucket, call: UploadsCall) -> list[Uploads]:
        return []

    def completed_elsewhere(self, bucket: Bucket, key: str) -> None: ...


def _beside_another(rig: Rig) -> Homes:
    homes = rig.engine.buckets.homes = Homes(Remote())
    return homes


def test_a_node_that_asks_for_a_bucket_is_told_to_ask_again_where_it_is_not_known_yet(rigged: Rigged) -> None:
    """A node that came just now is the home of keys before it hears of their bucket. A HEAD, whose answer has no body,
    took that for a missing object."""

    async def story(rig: Rig) -> None:
        _beside_another(rig).acts_here = True
        with pytest.raises(NotFound, match="no bucket"):
            await rig.engine.buckets.acting("unheard", "key")
        from_node.set(True)
        with pytest.raises(Busy) as caught:
            await rig.engine.buckets.acting("unheard", "key")
        assert caught.value.code == MAP_CHANGES

    rigged(story)


def test_bytes_that_another_home_gives_are_joined_only_while_it_is_the_home(rigged: Rigged) -> None:
    """A slow reader keeps its flight. Meanwhile the home deletes the object and lets go of the key."""

    async def story(rig: Rig) -> None:
        homes, data = _beside_another(rig), pattern(40 * MIB)
        homes.elsewhere.place("object", data)
        slow = rig.front.open("object")
        slow.takes = False
        await slow.until(lambda: len(slow.data) >= 20 * MIB)
        beside = rig.front.open("object")
        await beside.until(lambda: len(beside.data) >= 20 * MIB)
        homes.acts_here = True
        with pytest.raises(NotFound):
            await rig.front.get("object")
        slow.close()
        beside.close()

    rigged(story, freshness_s=FRESH_IMMUTABLE)


@pytest.mark.parametrize("size_bytes", [10, 3 * MIB])
def test_an_answer_of_another_home_that_comes_late_is_not_confirmed(rigged: Rigged, size_bytes: int) -> None:
    """This node becomes the home while it waits for what the other was asked."""

    async def story(rig: Rig) -> None:
        homes, data = _beside_another(rig), pattern(size_bytes)
        homes.elsewhere.place("object", data)
        homes.elsewhere.open.clear()
        late = rig.front.open("object")
        await until(lambda: homes.elsewhere.count("fetch"))
        homes.acts_here = True
        homes.elsewhere.open.set()
        assert await late.whole() == data
        rig.engine.flush()
        await rig.idle()
        with pytest.raises(NotFound):
            await rig.front.get("object")

    rigged(story, freshness_s=FRESH_IMMUTABLE)


def test_a_confirmation_of_another_home_that_comes_late_is_none(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        homes, data = _beside_another(rig), pattern(3 * MIB)
        homes.elsewhere.place("object", data)
        assert await rig.front.get("object") == data
        await rig.idle()
        hung = homes.elsewhere.hung_check = asyncio.get_running_loop().create_future()
        late = rig.front.open("object")
        await until(lambda: homes.elsewhere.count("check"))
        homes.acts_here = True
        hung.set_result(None)
        with pytest.raises(NotFound):  # who was asked is not the home any more: it is asked here
            await late.whole()
        with pytest.raises(NotFound):
            await rig.front.get("object")

    rigged(story, freshness_s=FRESH_IMMUTABLE)
