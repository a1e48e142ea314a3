"""Writing through the client: bytes, files, streams, conditions, and what is left when it goes wrong."""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.client import aio, flows, upload
from forebay.client.sync import Client
from forebay.core.errors import Busy, Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages.calls import PartState, UploadCompleted, Uploads, UploadState, Written
from forebay.core.messages.http1 import EXPECT_BYTES_MIN, Request, Response, Source
from tests.client.fake_node import FakeNode
from tests.client.test_flows import play, said

MIB = 1 << 20
WRITTEN = Written("e", "v", 3, 0.0)
PLAN = upload.PutOptions()


def test_bytes_of_every_kind_become_the_object(node: FakeNode) -> None:
    with Client(node.url) as client:
        large = os.urandom(3 * MIB)
        for key, data in (
            ("empty", b""),
            ("small", b"abc"),
            ("array", bytearray(b"xyz")),
            ("large", memoryview(large)),
        ):
            written = client.put("corpus", key, data)
            assert node.objects["corpus"][key] == bytes(data)
            assert (written.etag, written.size_bytes) == (node.etag("corpus", key), len(data))
        assert client.get("corpus", "large") == large
        client.put("corpus", "typed", b"{}", content_type="application/json", metadata={"colour": "blue"})
        said_of_it = node.headers["corpus", "typed"]
        assert said_of_it["content-type"] == "application/json"
        assert said_of_it["x-amz-meta-colour"] == "blue"
        assert node.connections == 1


def test_a_file_goes_out_as_it_is(node: FakeNode, tmp_path: Path) -> None:
    data = os.urandom(9 * MIB + 5)
    (tmp_path / "file").write_bytes(data)
    moved: list[int] = []
    with Client(node.url) as client:
        client.put("corpus", "a", tmp_path / "file", progress=moved.append)
        assert node.objects["corpus"]["a"] == data
        assert sum(moved) == len(data)
        assert len(moved) > 1
        client.put("corpus", "a", str(tmp_path / "file"))
        (tmp_path / "file").write_bytes(b"")
        client.put("corpus", "a", tmp_path / "file")
        assert node.objects["corpus"]["a"] == b""
        assert node.connections == 1
    with Client(node.url) as client, pytest.raises(FileNotFoundError):
        client.put("corpus", "a", tmp_path / "missing")


def test_a_file_that_is_cut_while_it_is_sent_changes_nothing(node: FakeNode, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(12 * MIB))
    with Client(node.url) as client, pytest.raises(Invalid, match="ended after"):
        client.put("corpus", "a", path, progress=lambda _: os.truncate(path, 5 * MIB))
    assert "a" not in node.objects["corpus"]


def test_a_stream_is_one_put_if_it_is_short_and_parts_if_not(node: FakeNode) -> None:
    with Client(node.url) as client:
        written = client.put("corpus", "short", io.BytesIO(b"short"))
        assert (node.objects["corpus"]["short"], written.size_bytes) == (b"short", 5)
        data = os.urandom(2 * upload.STREAM_PART_BYTES + 7)
        moved: list[int] = []
        reading, writing = os.pipe()

        def feed() -> None:
            with open(writing, "wb") as pipe:
                pipe.write(data)

        feeder = threading.Thread(target=feed)
        feeder.start()
        with open(reading, "rb", buffering=0) as stream:
            written = client.put("corpus", "long", stream, progress=moved.append)
        feeder.join()
    assert node.objects["corpus"]["long"] == data
    assert (written.etag, written.size_bytes) == (node.etag("corpus", "long"), len(data))
    assert moved == [upload.STREAM_PART_BYTES, upload.STREAM_PART_BYTES, 7]
    assert not node.uploads


def test_a_file_too_large_for_one_request_goes_in_parts(node: FakeNode, tmp_path: Path) -> None:
    data = os.urandom(3 * MIB + 1)
    (tmp_path / "file").write_bytes(data)
    with Client(node.url) as client, open(tmp_path / "file", "rb") as file:
        flow = upload.put_file(
            "corpus", "a/ü b", file.fileno(), len(data), upload.PutOptions(), None, part_bytes=MIB, whole_bytes_max=MIB
        )
        assert client.run(flow).size_bytes == len(data)
    assert node.objects["corpus"]["a/ü b"] == data
    assert len(node.requests("PUT", "/-/v1/parts/")) == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_parts_are_given_up_when_it_fails(node: FakeNode, error: type[BaseException]) -> None:
    data = os.urandom(2 * upload.STREAM_PART_BYTES)

    def stop(_: int) -> None:
        assert len(node.uploads) == 1
        raise error

    with Client(node.url) as client:
        with pytest.raises(error):
            client.put("corpus", "a", io.BytesIO(data), progress=stop)
        assert not node.uploads
        assert "a" not in node.objects["corpus"]

        def disappear(_: int) -> None:
            node.uploads.clear()

        node.on_part = disappear
        with pytest.raises(NotFound, match="gone"):
            client.put("corpus", "a", io.BytesIO(data))


def send(client: Client, path: Path, plan: upload.PutOptions = PLAN, progress: Any = None, **more: bool) -> Written:
    """The file in parts of 1 MiB."""
    with open(path, "rb") as file:
        size_bytes = path.stat().st_size
        flow = upload.put_file(
            "corpus", "a", file.fileno(), size_bytes, plan, progress, part_bytes=MIB, whole_bytes_max=MIB, **more
        )
        return client.run(flow)


def parts_sent(node: FakeNode) -> list[int]:
    return [int(target.rpartition("number=")[2]) for target in node.requests("PUT", "/-/v1/parts/")]


@pytest.fixture
def cut_off(node: FakeNode, tmp_path: Path) -> Path:
    """A file of 3 MiB and a bit, of which an attempt sent two parts before the node went away."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 * MIB + 1))

    def go(count: int) -> None:
        if count == 2:
            node.fail_next = [Unavailable("the node stops")]

    node.on_part = go
    with Client(node.url) as client, pytest.raises(Unavailable, match="put the same file again"):
        send(client, path)
    node.on_part = lambda _: None
    assert sorted(next(iter(node.uploads.values())).parts) == [1, 2]
    node.seen.clear()
    return path


def test_a_file_that_was_cut_off_goes_on_where_it_was(node: FakeNode, cut_off: Path) -> None:
    moved: list[int] = []
    with Client(node.url) as client:
        written = send(client, cut_off, progress=moved.append)
    assert parts_sent(node) == [3, 4]
    assert node.objects["corpus"]["a"] == cut_off.read_bytes()
    assert (written.size_bytes, sum(moved)) == (3 * MIB + 1, 3 * MIB + 1)
    assert not node.uploads


def test_asyncio_goes_on_too(node: FakeNode, cut_off: Path) -> None:
    async def story() -> None:
        async with aio.connect(node.url) as client:
            with open(cut_off, "rb") as file:
                size_bytes = cut_off.stat().st_size
                await client.run(
                    upload.put_file("corpus", "a", file.fileno(), size_bytes, PLAN, None, MIB, whole_bytes_max=MIB)
                )

    asyncio.run(story())
    assert parts_sent(node) == [3, 4]
    assert node.objects["corpus"]["a"] == cut_off.read_bytes()


@pytest.mark.parametrize("change", ["bytes", "size", "headers", "key", "sizes of parts"])
def test_an_upload_of_anything_else_is_left_alone(node: FakeNode, cut_off: Path, change: str) -> None:
    theirs = next(iter(node.uploads.values()))
    plan = PLAN
    if change == "bytes":
        with open(cut_off, "r+b") as file:
            file.seek(MIB + 7)
            file.write(b"new")
    elif change == "size":
        os.truncate(cut_off, 2 * MIB - 1)
    elif change == "headers":
        plan = upload.PutOptions((("Content-Type", "text/x"),))
    elif change == "key":
        theirs.key = "ab"
    else:
        theirs.parts[2] = theirs.parts[2][:-1]
    parts = dict(theirs.parts)
    with Client(node.url) as client:
        send(client, cut_off, plan)
    assert parts_sent(node)[0] == 1
    assert node.objects["corpus"]["a"] == cut_off.read_bytes()
    assert list(node.uploads.values()) == [theirs]
    assert theirs.parts == parts


def test_an_upload_that_somebody_ends_meanwhile_is_begun_anew(node: FakeNode, cut_off: Path) -> None:
    def end(count: int) -> None:
        if count == 3:
            node.uploads.clear()
            node.on_part = lambda _: None

    node.on_part = end
    with Client(node.url) as client:
        send(client, cut_off)
    assert parts_sent(node) == [3, 4, 1, 2, 3, 4]
    assert node.objects["corpus"]["a"] == cut_off.read_bytes()


def test_headers_are_compared_as_the_node_keeps_them(node: FakeNode, cut_off: Path) -> None:
    plan = upload.PutOptions.of("text/x", {"Colour": " blue "}, "", False)
    next(iter(node.uploads.values())).headers = {"x-amz-meta-colour": "blue", "content-type": "text/x"}
    with Client(node.url) as client:
        send(client, cut_off, plan)
    assert parts_sent(node) == [3, 4]


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (Unavailable("no room", code="InsufficientStorage"), False),
        (Unavailable("its disk is out", code="UploadNotHere"), False),
        (Invalid("no such part"), False),
        (Busy("too much that is not written yet"), True),
    ],
)
def test_what_cannot_succeed_later_is_aborted(node: FakeNode, tmp_path: Path, error: Any, kept: bool) -> None:
    (tmp_path / "file").write_bytes(bytes(2 * MIB + 1))

    def go(count: int) -> None:
        if count == 3:
            node.fail_next = [error]

    node.on_part = go
    with Client(node.url) as client, pytest.raises(type(error)) as caught:
        send(client, tmp_path / "file")
    assert caught.value.code == error.code
    assert bool(node.uploads) is kept
    assert ("put the same file again" in caught.value.message) is kept


def test_a_file_that_nobody_has_afterwards_leaves_no_parts(node: FakeNode, cut_off: Path) -> None:
    theirs = list(node.uploads.values())

    def go(count: int) -> None:
        if count == 2:
            node.fail_next = [Unavailable("the node stops")]

    node.on_part = go
    with Client(node.url) as client, pytest.raises(Unavailable) as caught:
        send(client, cut_off, resumable=False)
    assert caught.value.message == "the node stops"
    assert list(node.uploads.values()) == theirs


@pytest.mark.parametrize("only_new", [False, True])
def test_a_lost_answer_to_the_last_request_is_told_apart(node: FakeNode, only_new: bool) -> None:
    node.lose_answers, node.slow_answers = 1, 2
    data = os.urandom(upload.STREAM_PART_BYTES + 1)
    with Client(node.url) as client:
        written = client.put("corpus", "a", io.BytesIO(data), only_new=only_new)
    assert (written.etag, written.size_bytes) == (node.etag("corpus", "a"), len(data))
    assert len(node.requests("POST", "/-/v1/complete/")) == 4, "202 twice, lost, and the same again"
    assert not node.requests("DELETE")


def test_answers_that_are_lost_again_and_again_end_it(node: FakeNode) -> None:
    def lose(_: int) -> None:
        node.answer_raw = b"\r"  # never a whole head

    node.on_part = lambda count: lose(count) if count == 2 else None
    with Client(node.url) as client, pytest.raises(Unavailable) as caught:
        client.put("corpus", "a", io.BytesIO(bytes(upload.STREAM_PART_BYTES + 1)))
    assert caught.value.code == "Cut"
    assert len(node.requests("POST", "/-/v1/complete/")) == 2


def test_conditions_hold_and_are_not_repeated(node: FakeNode) -> None:
    with Client(node.url) as client:
        written = client.put("corpus", "a", b"1", only_new=True)
        with pytest.raises(Precondition):
            client.put("corpus", "a", b"2", only_new=True)
        written = client.put("corpus", "a", b"2", etag=written.etag)
        with pytest.raises(Precondition):
            client.put("corpus", "a", b"3", etag="other")
        with pytest.raises(Precondition):
            client.delete("corpus", "a", etag="other")
        node.drop_connections()
        client.put("corpus", "a", b"4")  # a kept connection that died: sent again
        client.delete("corpus", "a")
        client.delete("corpus", "a")
    assert "a" not in node.objects["corpus"]
    assert Request("PUT", "/x").safe_to_repeat
    assert not Request("PUT", "/x", (("If-None-Match", "*"),)).safe_to_repeat
    assert not Request("DELETE", "/x", (("If-Match", '"e"'),)).safe_to_repeat


def test_a_body_that_is_not_wanted_is_not_sent(node: FakeNode, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(400 * MIB)
    node.refuse_body = Busy("too much that is not written yet: try again later")
    with Client(node.url) as client:
        sent: list[int] = []
        with pytest.raises(Busy, match="not written yet"):
            client.put("corpus", "a", path, progress=sent.append)
        assert not sent
        with pytest.raises(Busy):
            client.put("corpus", "a", bytes(EXPECT_BYTES_MIN))
        node.refuse_body = None
        client.put("corpus", "a", bytes(EXPECT_BYTES_MIN))
        assert client.head("corpus", "a").size_bytes == EXPECT_BYTES_MIN


def test_a_node_that_goes_away_while_it_is_sent(node: FakeNode, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(30 * MIB))
    with Client(node.url) as client, pytest.raises(Unavailable):
        client.put("corpus", "a", path, progress=lambda _: node.drop_connections())
    assert "a" not in node.objects["corpus"]


def test_a_copy_stays_in_the_node(node: FakeNode) -> None:
    node.objects["corpus"]["a"] = b"abc"
    with Client(node.url) as client:
        assert client.copy("corpus", "a", "corpus", "b").size_bytes == 3
        with pytest.raises(NotFound):
            client.copy("corpus", "missing", "corpus", "b")
    assert node.objects["corpus"]["b"] == b"abc"


# --- without a socket ------------------------------------------------------------------------------------------------
def test_what_a_put_asks() -> None:
    written, (asked,) = play(flows.put("corpus", "a b", (("If-None-Match", "*"),), body=b"xyz"), said(WRITTEN))
    assert written == WRITTEN
    assert (asked.method, asked.target, asked.body) == ("PUT", "/-/v1/objects/corpus/a%20b", b"xyz")
    _, (asked,) = play(flows.put("corpus", "a", source=Source(7, 0, 9)), said(WRITTEN))
    assert asked.body_bytes == 9


def drive(flow: Any, answer: Callable[[Request], Response]) -> Any:
    """The flow's result, where `answer` is the node."""
    asked = next(flow)
    while True:
        try:
            asked = flow.send(answer(asked))
        except StopIteration as end:
            return end.value


def test_six_gibibytes_are_parts_of_the_file(tmp_path: Path) -> None:
    size_bytes = 6 << 30
    parts: list[Source] = []

    def answer(asked: Request) -> Response:
        what = (asked.method, asked.target.split("/")[3])
        if what == ("GET", "uploads"):
            return said(Uploads([], False))
        if what == ("POST", "uploads"):
            return said(UploadState("b", "k", "u", 0.0))
        assert asked.safe_to_repeat, "a part replaces itself, and a completion is known again"
        if what == ("PUT", "parts"):
            assert asked.source is not None
            parts.append(asked.source)
            assert asked.target == f"/-/v1/parts/b/k?upload_id=u&number={len(parts)}"
            return said(PartState(len(parts), asked.body_bytes, "e", 0.0))
        assert what == ("POST", "complete")
        assert asked.headers[-1] == ("If-Match", '"e"')
        return said(UploadCompleted(WRITTEN))

    with open(tmp_path / "file", "wb+") as file:
        file.truncate(size_bytes)
        flow = upload.put_file("b", "k", file.fileno(), size_bytes, upload.PutOptions(if_match="e"))
        assert drive(flow, answer) == WRITTEN
    assert len(parts) == 96
    at = 0
    for part in parts:
        assert part.offset == at
        at += part.size_bytes
    assert at == size_bytes
