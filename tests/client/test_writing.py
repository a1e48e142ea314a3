"""Writing through the client: bytes, files, streams, conditions, and what is left when it goes wrong."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.client import flows, upload
from forebay.client.http1 import EXPECT_BYTES_MIN, Request, Response, Source
from forebay.client.signing import Keys, sign
from forebay.client.sync import Client
from forebay.core.errors import Busy, Denied, Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages.calls import Written
from forebay.core.s3rules.sigv4 import Verifier
from tests.client.fake_node import FakeNode
from tests.client.test_flows import play, said

MIB = 1 << 20
WRITTEN = Written("e", "v", 3, 0.0)


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
            "corpus", "a/ü b", file.fileno(), len(data), upload.Plan(), None, part_bytes=MIB, whole_bytes_max=MIB
        )
        assert client.run(flow).size_bytes == len(data)
    assert node.objects["corpus"]["a/ü b"] == data
    assert len(node.requests("PUT", "partNumber")) == 4


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


def test_errors_of_the_s3_side_are_told_apart() -> None:
    def after(status: int, body: bytes) -> Any:
        stream = io.BytesIO(b"x" * 10)
        return play(upload.put_stream("b", "k", stream, upload.Plan(), part_bytes=5), Response(status, {}, body))

    with pytest.raises(Denied, match=r"sign it.*AWS_ACCESS_KEY_ID"):
        after(403, b"<Error><Code>AccessDenied</Code><Message>sign it</Message></Error>")
    with pytest.raises(NotFound, match="no such"):
        after(404, b"<Error><Code>NoSuchBucket</Code><Message>no such</Message></Error>")
    with pytest.raises(Busy):
        after(503, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(Unavailable):
        after(503, b"a proxy's page")


def test_a_late_failure_is_not_taken_for_success() -> None:
    started = Response(200, {}, b"<UploadId>u</UploadId>")
    part = Response(200, {"etag": '"e"'})
    late = Response(200, {}, b"<Error><Code>InternalError</Code><Message>broke</Message></Error>")
    flow = upload.put_stream("b", "k", io.BytesIO(b"x" * 5), upload.Plan(), part_bytes=5)
    with pytest.raises(Exception, match="broke"):
        play(flow, started, part, late)


def test_what_is_signed_verifies() -> None:
    keys = Keys("AKID", "secret")
    assert "secret" not in repr(keys)
    for target in ("/b/a%20b?uploads=", "/b/k?partNumber=1&uploadId=u%261", "/b/k"):
        request = sign(
            Request("PUT", target, (("x-amz-meta-a", "b  c"), ("Content-Type", "t/p"))), "127.0.0.1:9400", keys, 1.7e9
        )
        headers = {name.lower().encode(): value.encode() for name, value in request.headers}
        headers |= {b"host": b"127.0.0.1:9400"}
        path, _, query = target.encode().partition(b"?")
        verified = Verifier({"AKID": "secret"}).verify(1.7e9, b"PUT", path, query, headers, None)
        assert verified is not None
        with pytest.raises(Denied):
            Verifier({"AKID": "other"}).verify(1.7e9, b"PUT", path, query, headers, None)
