"""Writing to a rig's bucket as a front does it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import xxhash

from forebay.core import limits
from forebay.core.errors import Unavailable
from forebay.core.messages import calls
from forebay.core.types import LOCAL_URL, Bucket

from .conftest import Front, Rig

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
        hash128 = xxhash.xxh3_128_hexdigest(data)
        call = calls.PutCall("remote", key, len(data), path=path, sums=sums, hash128=hash128, **more)
    return await front.call("put", call)  # type: ignore[no-any-return]


async def delete(rig: Rig, key: str, if_match: str | None = None, **more: Any) -> None:
    await rig.front.call("delete", calls.DeleteCall("remote", key, if_match, **more))


async def names(rig: Rig, **more: Any) -> list[str]:
    page = await rig.front.call("list", calls.ListCall("remote", **more))
    return [entry.key for entry in page.entries] + page.prefixes


async def flushed(rig: Rig) -> None:
    """Let what is owed arrive."""
    rig.remote.writable.set()
    await rig.engine.flusher.flush("remote")


def temp_files(rig: Rig) -> list[str]:
    return [name for volume in rig.settings.volume_dirs for name in os.listdir(volume / "tmp")]
