"""The asyncio client: the same flows, the same promises, many at once."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from forebay.aio import Client, connect
from forebay.client import upload
from forebay.core.errors import Busy, Closed, Corrupt, Invalid, NotFound, Precondition, Unavailable
from forebay.core.types import RangeSpec
from tests.client.fake_node import FakeNode

MIB = 1 << 20


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_reads_of_every_kind(node: FakeNode) -> None:
    data = os.urandom(3 * MIB)
    node.objects["corpus"] = {"a": data, "empty": b"", "b": b"bb"}

    async def story() -> None:
        async with connect(node.url) as client:
            assert await client.get("corpus", "a") == data
            assert await client.get("corpus", "empty") == b""
            assert await client.get("corpus", "a", range=RangeSpec(5, 9)) == data[5:10]
            room = bytearray(3 * MIB)
            assert (await client.get_into("corpus", "a", room)).size_bytes == len(data)
            assert bytes(room) == data
            with pytest.raises(Invalid, match="holds"):
                await client.get_into("corpus", "a", bytearray(5))
            assert (await client.head("corpus", "a")).size_bytes == len(data)
            assert (await client.stat("corpus", "b")).size_bytes == 2
            with pytest.raises(NotFound):
                await client.get("corpus", "missing")
            with pytest.raises(Precondition):
                await client.get("corpus", "b", etag="other")
            node.page_limit = 2
            assert [e.key async for page in client.list_pages("corpus") for e in page.entries] == ["a", "b", "empty"]
            assert [bucket.name for bucket in await client.buckets()] == ["corpus"]
            assert (await client.start_job("prefetch", "corpus")).state == "done"
            assert (await client.status()).node_id == "n1"
        with pytest.raises(Closed):
            await client.status()

    run(story())


def test_writes_of_every_kind(node: FakeNode, tmp_path: Path) -> None:
    data = os.urandom(upload.STREAM_PART_BYTES + 5)
    (tmp_path / "file").write_bytes(data)

    async def story() -> None:
        async with connect(node.url) as client:
            moved: list[int] = []
            written = await client.put("corpus", "file", tmp_path / "file", progress=moved.append)
            assert written.size_bytes == len(data)
            assert sum(moved) == len(data)
            await client.put("corpus", "bytes", data, content_type="text/x", metadata={"a": "b"})
            await client.put("corpus", "stream", io.BytesIO(data))
            await client.put("corpus", "small", b"s", only_new=True)
            with pytest.raises(Precondition):
                await client.put("corpus", "small", b"s", only_new=True)
            await client.copy("corpus", "small", "corpus", "copy")
            await client.delete("corpus", "small")
        assert node.connections == 1, "kept and used again"

    run(story())
    assert {key for key, kept in node.objects["corpus"].items() if kept == data} == {"file", "bytes", "stream"}
    assert node.headers["corpus", "bytes"]["x-amz-meta-a"] == "b"
    assert node.objects["corpus"]["copy"] == b"s"
    assert "small" not in node.objects["corpus"]
    assert not node.uploads


def test_many_at_once(node: FakeNode) -> None:
    node.objects["corpus"] = {str(number): os.urandom(10_000) for number in range(100)}

    async def story() -> None:
        async with connect(node.url) as client:
            found = await asyncio.gather(*(client.get("corpus", key) for key in node.objects["corpus"]))
            assert found == list(node.objects["corpus"].values())

    run(story())


def test_what_goes_wrong_is_said(node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"]["a"] = bytes(100_000)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(50 * MIB)

    async def story() -> None:
        async with connect(node.url) as client:
            await client.status()
            node.drop_connections()
            assert len(await client.get("corpus", "a")) == 100_000, "a kept connection that died is replaced"
            node.cut_after = 1000
            with pytest.raises(Unavailable, match="cut after"):
                await client.get("corpus", "a")
            node.cut_after = None
            node.refuse_body = Busy("not now")
            with pytest.raises(Busy, match="not now"):
                await client.put("corpus", "x", tmp_path / "large")
            node.refuse_body = None

            def shorten(_: int) -> None:
                os.truncate(tmp_path / "large", MIB)

            with pytest.raises(Invalid, match="ended after"):
                await client.put("corpus", "x", tmp_path / "large", progress=shorten)
            node.answer_raw = b"SSH-2.0\r\n\r\n"
            with pytest.raises(Corrupt, match="not HTTP"):
                await client.status()
        async with Client("http://127.0.0.1:1") as nobody:
            with pytest.raises(Unavailable) as caught:
                await nobody.status()
            assert caught.value.code == "NoNode"

    run(story())
    assert "x" not in node.objects["corpus"]


def test_an_upload_that_is_cancelled_is_given_up(node: FakeNode) -> None:
    async def story() -> None:
        async with connect(node.url) as client:
            data = io.BytesIO(bytes(3 * upload.STREAM_PART_BYTES))
            putting = asyncio.ensure_future(client.put("corpus", "x", data, progress=lambda _: putting.cancel()))
            with pytest.raises(asyncio.CancelledError):
                await putting

    run(story())
    assert not node.uploads
    assert "x" not in node.objects["corpus"]
