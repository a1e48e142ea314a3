"""What a listing says of an object is what a read says: clients compare the two."""

from __future__ import annotations

from collections.abc import Callable

from forebay.core.messages import calls

from .conftest import Rig
from .writing import flushed, put, written

Rigged = Callable[..., None]


def test_an_object_written_back_keeps_its_tag_in_listings_after_its_flush(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        ours = await put(rig, "a", b"one")
        rig.remote.objects.place("b", b"somebody else's")
        await flushed(rig)
        assert (await rig.remote.objects.head("a")).etag != ours.etag, "the backend has a tag of its own for it"
        listed = {entry.key: entry.etag for entry in (await rig.front.call("list", calls.ListCall("remote"))).entries}
        assert listed == {"a": ours.etag, "b": (await rig.remote.objects.head("b")).etag}
        rig.remote.objects.place("a", b"two")  # behind our back: what the backend says of it is another version
        listed = {entry.key: entry.etag for entry in (await rig.front.call("list", calls.ListCall("remote"))).entries}
        assert listed["a"] == (await rig.remote.objects.head("a")).etag

    rigged(story)
