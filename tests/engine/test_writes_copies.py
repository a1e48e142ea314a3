"""Copies: at the backend where that can be, else through the node; of one version, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages import calls
from forebay.core.types import FRESH_IMMUTABLE, RangeSpec
from forebay.node.store.disk.volume_threads import BEARERS

from .conftest import MIB, Rig, pattern, until
from .writing import as_written, delete, flushed, put, temp_files, written

Rigged = Callable[..., None]


async def copy(rig: Rig, source: str, target: str, **more: Any) -> calls.Written:
    """`bucket/key` to `bucket/key`."""
    return await rig.front.call(  # type: ignore[no-any-return]
        "copy", calls.CopyCall(*source.split("/", 1), *target.split("/", 1), **more)
    )


async def add(rig: Rig, name: str, mode: str, **more: Any) -> None:
    await rig.front.call("bucket_put", msgspec.structs.replace(as_written(rig, mode, **more), name=name))


def test_within_a_backend_the_backend_copies(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        data = pattern(3 * MIB)
        rig.remote.place("a", data)
        await put(rig, "b", b"what was there")
        answer = await copy(rig, "remote/a", "remote/b")
        assert rig.remote.count("copy") == 1
        assert rig.remote.count("fetch") == 0, "no byte came here"
        assert answer.version == (await rig.remote.objects.head("b")).version
        assert await rig.front.get("b") == data
        replaced = (("content-type", "text/new"),)
        await copy(rig, "remote/a", "remote/a", headers=replaced)
        assert (await rig.remote.objects.head("a")).headers == replaced
        state = await rig.front.call("stat", calls.StatCall("remote", "a"))
        assert state.headers["content-type"] == "text/new"

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local", "through"])
@pytest.mark.parametrize("size", [0, 100, 9 * MIB + 5])
def test_between_buckets_bytes_pass_through_the_node(rigged: Rigged, mode: str, size: int) -> None:
    async def story(rig: Rig) -> None:
        await add(rig, "source", "local")
        await add(rig, "target", mode)
        data = pattern(size, 7)
        headers = (("content-type", "text/plain"), ("x-amz-meta-a", "b"))
        body: dict[str, Any] = {"body": data} if size <= 16384 else {}
        if not body:
            rig.remote.place("big", data)
            await copy(rig, "remote/big", "source/key", headers=headers)
        else:
            await rig.front.call("put", calls.PutCall("source", "key", size, headers=headers, **body))
        answer = await copy(rig, "source/key", "target/key")
        assert answer.size_bytes == size
        assert await rig.front.get("key", bucket="target") == data
        state = await rig.front.call("stat", calls.StatCall("target", "key"))
        assert (state.headers["content-type"], state.headers["x-amz-meta-a"]) == ("text/plain", "b")
        record = rig.engine.store.lookup("target", "key")
        assert record is not None
        assert rig.engine.store.check_blocks(record, "target", "key", range(3 if size > MIB else 0)) == []
        assert temp_files(rig) == []
        rig.engine.writes.commits.flush()
        await rig.engine.flusher.flush("target")

    rigged(story)


@pytest.mark.parametrize("size", [100, 5 * MIB])
def test_a_copy_has_the_checksum_of_its_source_or_the_one_asked_for(rigged: Rigged, size: int) -> None:
    async def story(rig: Rig) -> None:
        await add(rig, "source", "local")
        data = pattern(size, 3)
        crc, sha = (base64.b64encode(raw).decode() for raw in (zlib.crc32(data).to_bytes(4), sha256(data).digest()))
        rig.remote.place("big", data)
        plain = await copy(rig, "remote/big", "source/plain")
        assert plain.checksums == {}
        summed = await copy(rig, "source/plain", "source/summed", checksum_algorithm="CRC32")
        again = await copy(rig, "source/summed", "source/again", headers=(("content-type", "a/b"),))
        other = await copy(rig, "source/again", "source/other", checksum_algorithm="SHA256")
        assert (summed.checksums, again.checksums, other.checksums) == ({"CRC32": crc}, {"CRC32": crc}, {"SHA256": sha})
        state = await rig.front.call("stat", calls.StatCall("source", "other"))
        assert state.headers["x-amz-checksum-sha256"] == sha
        assert "x-amz-checksum-crc32" not in state.headers
        state = await rig.front.call("stat", calls.StatCall("source", "again"))
        assert (state.headers["x-amz-checksum-crc32"], state.headers["content-type"]) == (crc, "a/b")
        if size <= limits.ETAG_MD5_BYTES_MAX:
            assert other.etag == hashlib.md5(data).hexdigest()
        composite = (("x-amz-checksum-crc32", "AAAAAA==-2"), ("x-amz-checksum-type", "COMPOSITE"))
        await copy(rig, "source/plain", "source/parts", headers=(*composite, ("x-forebay-part-sizes", "50*2")))
        whole = await copy(rig, "source/parts", "source/whole")
        assert whole.checksums == {"CRC32": crc}, "of the bytes: the copy has no parts"
        state = await rig.front.call("stat", calls.StatCall("source", "whole"))
        assert (state.headers["x-amz-checksum-type"], "x-forebay-part-sizes" in state.headers) == ("FULL_OBJECT", False)

    rigged(story)


def test_what_only_the_node_has_is_copied_from_there(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        rig.remote.writable.clear()
        data = pattern(5 * MIB)
        first = await put(rig, "a", data, tags="t=1")
        again = await copy(rig, "remote/a", "remote/b")
        assert (again.etag, again.version == first.version) == (first.etag, False)
        assert await rig.front.get("b") == data
        await copy(rig, "remote/a", "remote/a", headers=(("x-amz-meta-new", "1"),))
        state = await rig.front.call("stat", calls.StatCall("remote", "a"))
        assert state.headers["x-amz-meta-new"] == "1"
        assert await rig.front.get("a") == data
        await flushed(rig)
        assert rig.remote.objects.tags == {"a": "t=1", "b": "t=1"}
        assert dict((await rig.remote.objects.head("a")).headers)["x-amz-meta-new"] == "1"

    rigged(story)


def test_conditions_on_source_and_target(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "through")
        with pytest.raises(NotFound):
            await copy(rig, "remote/none", "remote/b")
        a = await put(rig, "a", b"a")
        for refused in (
            {"source_if_match": "other"},
            {"source_if_none_match": a.etag},
            {"source_if_modified_since": "Thu, 01 Jan 2099 00:00:00 GMT"},
            {"source_if_unmodified_since": "Thu, 01 Jan 1998 00:00:00 GMT"},
            {"if_match": "other"},
        ):
            with pytest.raises((Precondition, NotFound)):
                await copy(rig, "remote/a", "remote/b", **refused)
        await copy(rig, "remote/a", "remote/b", if_none_match="*")
        with pytest.raises(Precondition):
            await copy(rig, "remote/a", "remote/b", if_none_match="*")
        with pytest.raises(Invalid, match="itself"):
            await copy(rig, "remote/a", "remote/a")
        assert await rig.front.get("b") == b"a"

    rigged(story)


def test_a_copy_onto_itself_does_not_bring_old_bytes_back(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "local")
        await put(rig, "key", pattern(3 * MIB, 0))
        tasks: list[Any] = []
        for number in range(1, 7):
            tasks.append(put(rig, "key", pattern(3 * MIB, number)))
            tasks.append(copy(rig, "remote/key", "remote/key", headers=(("x-amz-meta-n", str(number)),)))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [result for result in results if not isinstance(result, calls.Written | Precondition)]
        assert not wrong
        puts = [int(result.version[1:], 16) for result in results[::2] if isinstance(result, calls.Written)]
        last = 1 + puts.index(max(puts))  # ids grow in the order of the writes
        held = await rig.front.get("key")
        shown = next((number for number in range(7) if held == pattern(3 * MIB, number)), None)
        assert shown == last, f"no copy is of what was before the last put: {results}"

    rigged(story)


def test_a_source_that_breaks_off_leaves_nothing(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await add(rig, "target", "local")
        rig.remote.place("key", pattern(9 * MIB))
        rig.remote.cut_after = 5 * MIB
        with pytest.raises(Unavailable):
            await copy(rig, "remote/key", "target/key")
        with pytest.raises(NotFound):
            await rig.front.get("key", bucket="target")
        assert temp_files(rig) == []

    rigged(story)


def test_a_part_made_of_a_range(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await add(rig, "target", "local")
        data = pattern(12 * MIB)
        rig.remote.place("key", data)
        upload = await rig.front.call("upload_create", calls.UploadCreateCall("target", "whole"))
        spans = [(MIB, 7 * MIB), (0, 100)]
        parts = []
        for number, (start, end) in enumerate(spans, 1):
            call = calls.UploadPartCopyCall(
                "target", "whole", upload.upload_id, number, "remote", "key", start=start, end=end
            )
            part = await rig.front.call("upload_part_copy", call)
            assert part.etag == hashlib.md5(data[start:end]).hexdigest()
            parts.append((number, part.etag, {}))
        with pytest.raises(Invalid):
            await rig.front.call("upload_part_copy", msgspec.structs.replace(call, end=13 * MIB))
        complete = calls.UploadCompleteCall("target", "whole", upload.upload_id, parts)
        await rig.front.call("upload_complete", complete)
        whole = data[MIB : 7 * MIB] + data[:100]
        assert await rig.front.get("whole", bucket="target") == whole
        assert await rig.front.get("whole", RangeSpec(6 * MIB - 5, None), bucket="target") == whole[-105:]
        assert temp_files(rig) == []

    rigged(story)


def test_a_flushed_bucket_copies_at_its_backend_again(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back")
        await put(rig, "a", b"one")
        await flushed(rig)
        await copy(rig, "remote/a", "remote/b")
        assert await rig.front.get("b") == b"one"
        assert rig.remote.count("copy") == 0, "a bucket written back answers when the node has it"
        await flushed(rig)

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "through", "local"])
def test_a_source_that_is_replaced_before_its_bytes_are_taken_is_read_anew(rigged: Rigged, mode: str) -> None:
    """The copy knows where the bytes lie, and no worker is free to take them; then their file is gone."""

    async def story(rig: Rig) -> None:
        await written(rig, mode)
        await add(rig, "other", "local")
        await put(rig, "a", pattern(3 * MIB, 1))
        await copy(rig, "remote/a", "other/first")
        free = threading.Event()
        volume = rig.engine.store.volume_at("other", "b")
        assert volume is not None
        held = [volume.desk.bearers.submit(free.wait) for _ in range(BEARERS)]
        try:
            await until(lambda: all(each.running() for each in held))
            copied = asyncio.create_task(copy(rig, "remote/a", "other/b"))
            await until(lambda: volume.desk.bearers._pool._work_queue.qsize())  # type: ignore[attr-defined]
            await put(rig, "a", b"newer")
            rig.engine.flush()
            rig.engine.store.settle()
        finally:
            free.set()
        await copied
        assert await rig.front.get("b", bucket="other") in (pattern(3 * MIB, 1), b"newer")
        assert await rig.front.get("a") == b"newer"

    rigged(story)


def test_whose_copy_found_no_source_reads_no_source_after_it(rigged: Rigged) -> None:
    """The backend has deleted it, and the answer is on the way: readers still had what was cached."""

    async def story(rig: Rig) -> None:
        await written(rig, "through", freshness_s=FRESH_IMMUTABLE)
        await put(rig, "a", b"one")
        answered = rig.remote.answers["delete"] = asyncio.Event()
        change = asyncio.create_task(delete(rig, "a"))
        await until(lambda: rig.remote.unheard["delete"] == 1)
        assert await rig.front.get("a") == b"one", "nobody has seen anything else"
        with pytest.raises(NotFound):
            await copy(rig, "remote/a", "remote/b")
        with pytest.raises(NotFound):
            await rig.front.get("a")
        answered.set()
        await change

    rigged(story)
