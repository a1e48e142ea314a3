"""Tags, told to every backend: read and changed where there are any, refused where there are none."""

from __future__ import annotations

import os

import pytest

from forebay.backends.seam import Body
from forebay.core.errors import NotFound, NotSupported
from forebay.core.s3rules.tags import format_tags
from tests.backends.backend_places import WRITTEN, Place, read, run

TAGGED = {"memory", "coded", "s3", "s3-keys", "azure"}
TAGS = format_tags([("project", "blue sky"), ("stage", "a/b+c")])


@pytest.mark.parametrize("place", WRITTEN, indirect=True)
def test_tags_are_changed_without_touching_the_object(place: Place) -> None:
    data = os.urandom(1000)

    async def story() -> None:
        backend = place.open()
        put = await backend.put("dir/k", Body(len(data), data))
        assert await backend.read_tags("dir/k") == ""
        if place.kind not in TAGGED:
            with pytest.raises(NotSupported):
                await backend.write_tags("dir/k", TAGS)
            await backend.aclose()
            return
        await backend.write_tags("dir/k", TAGS)
        assert set((await backend.read_tags("dir/k")).split("&")) == set(TAGS.split("&"))
        assert await backend.check("dir/k", put.version) is None, "it is the same version still"
        assert await read(backend, "dir/k") == data
        await backend.write_tags("dir/k", "")
        assert await backend.read_tags("dir/k") == ""
        tagged = await backend.put("dir/tagged", Body(len(data), data), tags=TAGS)
        assert tagged.size_bytes == len(data)
        assert set((await backend.read_tags("dir/tagged")).split("&")) == set(TAGS.split("&"))
        with pytest.raises(NotFound):
            await backend.read_tags("none")
        with pytest.raises(NotFound):
            await backend.write_tags("none", TAGS)
        await backend.aclose()

    run(story())
