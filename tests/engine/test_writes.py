"""Writing at the engine: what an acknowledged write means, in each mode."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from forebay.core import calls, limits
from forebay.core.errors import NotFound, Unavailable
from forebay.core.types import LOCAL_URL, Bucket

from .conftest import MIB, Front, Rig, pattern

Rigged = Callable[..., None]
AWAY = Unavailable("the backend is away: try again")


def as_written(rig: Rig, mode: str, **more: Any) -> Bucket:
    """The rig's bucket, written in `mode`."""
    return Bucket("remote", LOCAL_URL if mode == "local" else "memory://remote", write=mode, **more)  # type: ignore[arg-type]


async def written(rig: Rig, mode: str, **more: Any) -> None:
    await rig.front.call("bucket_put", as_written(rig, mode, **more))


def incoming(rig: Rig, key: str, data: bytes, bucket: str = "remote") -> tuple[str, list[int]]:
    """A temp file as a front makes it, and its sums."""
    path = rig.engine.index.incoming(bucket, key)
    Path(path).write_bytes(data)
    step = limits.BLOCK_BYTES
    return path, [xxhash.xxh3_64_intdigest(data[at : at + step]) for at in range(0, len(data), step)]


async def put(rig: Rig, key: str, data: bytes, *, front: Front | None = None, **more: Any) -> calls.Written:
    """PUT as a front does it."""
    front = front or rig.front
    if len(data) <= limits.INLINE_BYTES_MAX:
        call = calls.PutCall("remote", key, len(data), body=data, **more)
    else:
        path, sums = incoming(rig, key, data)
        call = calls.PutCall("remote", key, len(data), path=path, sums=sums, **more)
    return await front.call("put", call)  # type: ignore[no-any-return]


async def delete(rig: Rig, key: str, if_match: str | None = None) -> None:
    await rig.front.call("delete", calls.DeleteCall("remote", key, if_match))


async def names(rig: Rig, **more: Any) -> list[str]:
    page = await rig.front.call("list", calls.ListCall("remote", **more))
    return [entry.key for entry in page.entries] + page.prefixes


async def flushed(rig: Rig) -> None:
    """Let what is owed arrive."""
    rig.remote.writable.set()
    await rig.engine.flusher.flush("remote")


def temp_files(rig: Rig) -> list[str]:
    return [name for volume in rig.settings.volume_dirs for name in os.listdir(volume / "tmp")]


SIZES = [0, 5, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, 9 * MIB + 7]


@pytest.mark.parametrize("mode", ["back", "local", "through"])
@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read_at_once_on_every_front(rigged: Rigged, mode: str, size: int) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode, freshness_s=0.0)
        if mode == "back":
            rig.remote.writable.clear()
        data = pattern(size, 3)
        answer = await put(rig, "a/key", data, headers=(("content-type", "text/plain"),))
        assert answer.size_bytes == size
        record = rig.engine.index.lookup("remote", "a/key")
        assert record is not None
        assert (record.etag, record.complete) == (answer.etag, True)
        assert b"text/plain" in record.head
        other = Front()
        await other.connect(rig.settings, 2)
        assert await other.get("a/key") == data
        await other.aclose()
        assert temp_files(rig) == []
        state = await rig.front.call("stat", calls.StatCall("remote", "a/key"))
        assert (state.size_bytes, state.dirty, state.version) == (size, mode == "back", record.version)
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
def test_deleted_is_gone_at_once(rigged: Rigged, mode: str) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, mode)
        await put(rig, "key", b"one")
        await delete(rig, "key")
        with pytest.raises(NotFound):
            await rig.front.get("key")
        with pytest.raises(NotFound):
            await rig.front.call("stat", calls.StatCall("remote", "key"))
        assert await names(rig) == []
        await delete(rig, "key")

    rigged(story)
