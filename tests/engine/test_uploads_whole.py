"""Uploads in a whole engine: real store, real writes, asked over the wire as a front asks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import ForebayError, NotFound
from forebay.core.messages.calls import (
    BucketNamed,
    UploadCompleteCall,
    UploadCreateCall,
    UploadPartCall,
    UploadPartCopyCall,
    UploadsCall,
)
from forebay.core.types import Bucket

from .conftest import MIB, Rig, pattern

LOCAL = Bucket("kept", "local://", write="local")


async def send(
    rig: Rig, upload: str, number: int, data: bytes, bucket: str = "kept"
) -> tuple[int, str, dict[str, str]]:
    """A part as a front sends it; as Complete names it."""
    md5 = hashlib.md5(data).hexdigest()
    path = rig.engine.index.incoming(bucket, "k")
    Path(path).write_bytes(data)
    await rig.front.call("upload_part", UploadPartCall(bucket, "k", upload, number, len(data), md5, path))
    assert not os.path.exists(path)
    return number, md5, {}


def parts_on_disk(rig: Rig) -> list[str]:
    return [str(path) for path in Path(rig.settings.dir).rglob("parts/*/*")]


@pytest.mark.parametrize("write", ["local", "back", "through"])
def test_an_upload_becomes_an_object_that_outlives_a_restart(rigged: Callable[..., None], write: str) -> None:
    async def story(rig: Rig) -> None:
        url = "local://" if write == "local" else "memory://remote"
        await rig.front.call("bucket_put", Bucket("kept", url, write=write))
        made = await rig.front.call("upload_create", UploadCreateCall("kept", "k", (("content-type", "text/x"),)))
        one, two = pattern(9 * MIB, 1), pattern(6 * MIB + 5, 2)
        asked = [await send(rig, made.upload_id, 1, one), await send(rig, made.upload_id, 2, two)]
        await rig.again()
        done = await rig.front.call("upload_complete", UploadCompleteCall("kept", "k", made.upload_id, asked))
        assert await rig.front.get("k", bucket="kept") == one + two
        await rig.again()
        read = rig.front.open("k", bucket="kept")
        assert await read.whole() == one + two
        assert read.opened is not None
        assert read.opened.record.etag == done.written.etag
        assert b"text/x" in read.opened.record.head
        assert parts_on_disk(rig) == []
        record = rig.engine.store.lookup("kept", "k")
        assert record is not None
        blocks = range(-(-len(one + two) // record.block_bytes))
        assert rig.engine.store.check_blocks(record, "kept", "k", list(blocks)) == [], "sums made while joining"

    rigged(story)


def test_a_part_is_copied_from_an_object_that_only_the_backend_has(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        data = pattern(11 * MIB)
        rig.remote.place("source", data)
        await rig.front.call("bucket_put", LOCAL)
        made = await rig.front.call("upload_create", UploadCreateCall("kept", "k"))
        asked = []
        for number, (start, end) in enumerate(((3, 6 * MIB), (6 * MIB, 11 * MIB)), 1):
            call = UploadPartCopyCall("kept", "k", made.upload_id, number, "remote", "source", start, end)
            state = await rig.front.call("upload_part_copy", call)
            assert state.etag == hashlib.md5(data[start:end]).hexdigest()
            asked.append((number, state.etag, {}))
        with pytest.raises(ForebayError) as caught:
            await rig.front.call(
                "upload_part_copy",
                UploadPartCopyCall("kept", "k", made.upload_id, 3, "remote", "source", 0, len(data) + 1),
            )
        assert caught.value.code == "InvalidRange"
        await rig.front.call("upload_complete", UploadCompleteCall("kept", "k", made.upload_id, asked))
        assert await rig.front.get("k", bucket="kept") == data[3:]

    rigged(story)


def test_a_bucket_that_goes_or_moves_takes_its_open_uploads_with_it(rigged: Callable[..., None]) -> None:
    async def story(rig: Rig) -> None:
        for leave in (
            lambda: rig.front.call("bucket_delete", BucketNamed("kept")),
            lambda: rig.front.call("bucket_put", Bucket("kept", "memory://elsewhere", write="back")),
        ):
            await rig.front.call("bucket_put", Bucket("kept", "memory://remote", write="back"))
            made = await rig.front.call("upload_create", UploadCreateCall("kept", "k"))
            await send(rig, made.upload_id, 1, pattern(MIB))
            await leave()
            assert parts_on_disk(rig) == []
            with pytest.raises(NotFound):
                await send(rig, made.upload_id, 2, b"too late")
        assert (await rig.front.call("uploads", UploadsCall("kept"))).uploads == []

    rigged(story)
