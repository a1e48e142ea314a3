"""Bodies over a real connection: announced, slow, cut, lying. Nothing of a body that fails is ever left."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.errors import Precondition
from forebay.core.messages import calls, wire
from forebay.core.types import Bucket
from forebay.node.front.http import bodies
from forebay.node.front.http.requests import Request
from forebay.node.front.http.server import Timeouts
from forebay.node.front.objects import puts
from forebay.node.front.objects.object_headers import check_acl
from tests.front.fake_engine import Client, Node, serve
from tests.s3.test_write_chunked import encode

BIG = os.urandom(1_700_000)
Eventually = Callable[[Callable[[], bool]], None]


def head(target: str, *fields: str, method: str = "PUT") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: localhost", *fields, "", ""]).encode()


def files(node: Node) -> list[str]:
    """Bodies that lie about."""
    return os.listdir(node.dir / "volumes" / "v0" / "tmp")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_put_is_there(node: Node) -> None:
    with node.connect() as client:
        for number, data in enumerate([b"", b"small", BIG, BIG * 30]):
            put = client.ask(f"/b/{number}", "PUT", data, **({} if data else {"Content-Length": "0"}))
            assert (put.status, put.body) == (200, b"")
            got = client.ask(f"/b/{number}")
            assert (got.status, got.body) == (200, data)
            assert got.headers["etag"] == put.headers["etag"]
    assert files(node) == []


def test_a_body_waits_for_continue_and_is_followed_by_the_next_request(node: Node) -> None:
    with node.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}", "Expect: 100-continue"))
        assert client.answer().status == 100
        client.send(BIG + head("/b/k", method="GET"))
        assert client.answer("PUT").status == 200
        assert client.answer().body == BIG


def test_what_will_not_be_taken_is_refused_instead_of_continue(node: Node) -> None:
    for target, field, status in (
        ("/b/k", f"Content-Length: {limits.PUT_BYTES_MAX + 1}", 400),
        ("/b/" + "k" * 1025, "Content-Length: 1", 400),
        ("/b/k?versionId=7", "Content-Length: 1", 501),
        ("/-/v1/objects/b/" + "k" * 1025, "Content-Length: 1", 400),
    ):
        with node.connect() as client:
            client.send(head(target, field, "Expect: 100-continue"))
            assert client.answer("PUT").status == status, target
            assert client.rest() == b""
    assert node.engine.calls == []


def test_both_framings_on_top_of_each_other(node: Node) -> None:
    """What SDKs send that do not know a body's length before: aws-chunked inside HTTP's own chunks."""
    inner = encode([BIG[:300_000], BIG[300_000:]], trailers=[b"x-amz-checksum-sha256:" + _sha256(BIG)])
    outer = b"".join(
        b"%x\r\n%b\r\n" % (len(inner[at : at + 70_001]), inner[at : at + 70_001]) for at in range(0, len(inner), 70_001)
    )
    fields = ("Transfer-Encoding: chunked", "Content-Encoding: aws-chunked", "x-amz-trailer: x-amz-checksum-sha256")
    length = f"x-amz-decoded-content-length: {len(BIG)}"
    with node.connect() as client:
        client.send(head("/b/k", *fields, length) + outer + b"0\r\n\r\n")
        put = client.answer("PUT")
        assert (put.status, put.headers["x-amz-checksum-sha256"]) == (200, _sha256(BIG).decode())
        assert client.ask("/b/k").body == BIG


def _sha256(data: bytes) -> bytes:
    return base64.b64encode(hashlib.sha256(data).digest())


@pytest.mark.parametrize("api", ["/b/k", "/-/v1/objects/b/k"])
@pytest.mark.parametrize("sent", [0, 1, 20_000, len(BIG) - 1])
def test_a_client_that_vanishes_leaves_nothing(node: Node, eventually: Eventually, api: str, sent: int) -> None:
    before = descriptors()
    for ending in ("close", "reset", "half"):
        with node.connect() as client:
            client.send(head(api, f"Content-Length: {len(BIG)}") + BIG[:sent])
            eventually(lambda: len(files(node)) == 1)
            if ending == "reset":
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            elif ending == "half":
                client.sock.shutdown(socket.SHUT_WR)
                assert client.rest() == b""
        eventually(lambda: files(node) == [])
    eventually(lambda: descriptors() <= before)
    assert node.get("/b/k").status == 404


def test_a_body_longer_than_announced_is_the_next_request(node: Node) -> None:
    """Bytes behind the announced length are no part of the object; they are no request either."""
    with node.connect() as client:
        client.send(head("/b/k", "Content-Length: 5") + b"bytes and more\r\n\r\n")
        assert client.answer("PUT").status == 200
        assert client.answer().status == 400
    assert node.get("/b/k").body == b"bytes"


def test_a_chunked_body_that_lies_about_its_length_is_cut_off_early(node: Node, eventually: Eventually) -> None:
    fields = ("Content-Encoding: aws-chunked", "x-amz-decoded-content-length: 100000", "Content-Length: 99999999")
    with node.connect() as client:
        client.send(head("/b/k", *fields) + b"%x\r\n" % 99_999_000 + bytes(1_200_000))
        answer = client.answer("PUT")
        assert (answer.status, b"IncompleteBody" in answer.body) == (400, True)
    eventually(lambda: files(node) == [])
    assert node.engine.calls == []


def test_a_refused_write_leaves_nothing_and_the_connection_goes_on(node: Node) -> None:
    node.engine.answers["put"] = Precondition("it is there", code="PreconditionFailed")
    with node.connect() as client:
        assert client.ask("/b/k", "PUT", BIG, If_None_Match="*").status == 412
        assert files(node) == []
        assert client.ask("/b/k").status == 404


def test_a_write_that_was_handed_over_is_finished_without_its_client(node: Node, eventually: Eventually) -> None:
    node.engine.mute.add("put")
    client = node.connect()
    client.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG)
    eventually(lambda: bool(node.engine.calls))
    client.sock.close()
    eventually(lambda: not node.front.server.connections)
    assert len(files(node)) == 1  # the engine's now: it answers, or its connection ends
    node.run(node.engine.stop())
    eventually(lambda: files(node) == [])


def test_an_engine_that_dies_with_a_body_is_503_and_leaves_nothing(node: Node, eventually: Eventually) -> None:
    node.engine.mute.add("put")
    with node.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG)
        eventually(lambda: bool(node.engine.calls))
        node.run(node.engine.stop())
        answer = client.answer("PUT")
        assert (answer.status, b"ServiceUnavailable" in answer.body) == (503, True)
        assert files(node) == []


def test_a_front_that_stops_lets_a_body_come_to_its_end(node: Node) -> None:
    with node.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG[:100_000])
        client.send(BIG[100_000:])
        assert client.answer("PUT").status == 200
    assert files(node) == []


# --- slow bodies -----------------------------------------------------------------------------------------------------
@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Node]:
    """A front that gives a body a tenth of a second to make progress."""
    with serve(tmp_path, timeouts=Timeouts(stall_s=0.1, tick_s=0.02)) as running:
        yield running


def test_a_body_that_stalls_is_given_up(hasty: Node, eventually: Eventually) -> None:
    with hasty.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG[:300_000])
        answer = client.answer("PUT")
        assert (answer.status, b"RequestTimeout" in answer.body) == (400, True)
        assert client.rest() == b""
    assert files(hasty) == []


def test_a_trickle_is_no_progress(hasty: Node) -> None:
    """One byte at a time would keep the connection for ever."""
    with hasty.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}"))
        with pytest.raises(OSError):  # noqa: PT012 - refused while it is still sending
            while True:
                client.send(b"x")
                client.sock.settimeout(0.01)
                try:
                    if not client.sock.recv(100_000):
                        raise ConnectionResetError
                except TimeoutError:
                    pass
    assert files(hasty) == []


# --- written through -------------------------------------------------------------------------------------------------
def test_the_engine_hears_how_far_a_body_is(node: Node, eventually: Eventually) -> None:
    data = BIG * 10
    node.engine.answers["put_open"] = calls.PutOpened(5)
    with node.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(data)}") + data[:5_000_000])
        eventually(lambda: any(message.upto > 3_000_000 for message in node.seen(wire.Grown)))
        (opening,) = [call for verb, call in node.engine.calls if verb == "put_open"]
        upto = node.seen(wire.Grown)[-1].upto
        with open(opening.path, "rb") as file:
            assert file.read(upto) == data[:upto]
        client.send(data[5_000_000:])
        assert client.answer("PUT").status == 200
    assert node.seen(wire.Grown)[-1].upto == len(data)
    (put,) = [call for verb, call in node.engine.calls if verb == "put"]
    assert (put.put, put.path, put.hash128) == (5, opening.path, "")


def test_a_body_that_breaks_off_is_given_up_at_the_engine(node: Node, eventually: Eventually) -> None:
    node.engine.answers["put_open"] = calls.PutOpened(5)
    with node.connect() as client:
        client.send(head("/b/k", "Content-Length: 9000000") + bytes(6_000_000))
        eventually(lambda: bool(node.seen(wire.Grown)))
    eventually(lambda: [message.put for message in node.seen(wire.GaveUp)] == [5])
    assert files(node) == []


def test_a_bucket_behind_a_web_server_is_not_written(node: Node) -> None:
    node.call(lambda: node.front._reads.buckets.update({"web": Bucket("web", "https://example.com/")}))
    with node.connect() as client:
        client.send(head("/web/k", "Content-Length: 9", "Expect: 100-continue"))
        assert client.answer("PUT").status == 501


def test_hits_are_answered_while_a_body_arrives(node: Node) -> None:
    node.put("hit", b"here")
    with node.connect() as writer, node.connect() as reader:
        writer.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG[:-1])
        for _ in range(20):
            assert reader.ask("/b/hit").body == b"here"
        writer.send(BIG[-1:])
        assert writer.answer("PUT").status == 200
        assert isinstance(reader, Client)


def test_hits_are_answered_while_the_disk_is_stuck(
    node: Node, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """The writer waits, and its connection is not read meanwhile; nobody else notices."""
    stuck = threading.Event()
    waiting = threading.Event()
    pwrite = os.pwrite

    def slowly(fd: int, data: memoryview, offset: int) -> int:
        waiting.set()
        assert stuck.wait(90)
        return pwrite(fd, data, offset)

    node.put("hit", b"here")
    monkeypatch.setattr(bodies.os, "pwrite", slowly)
    data = BIG * 8
    with node.connect() as writer, node.connect() as reader:
        sending = threading.Thread(target=lambda: writer.send(head("/b/k", f"Content-Length: {len(data)}") + data))
        sending.start()
        assert waiting.wait(90)
        for _ in range(20):
            assert reader.ask("/b/hit").body == b"here"
        stuck.set()
        assert writer.answer("PUT").status == 200
        sending.join()
        assert reader.ask("/b/k").body == data


def test_a_disk_that_is_full_midway_is_507_and_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    pwrite = os.pwrite

    def until_full(fd: int, data: memoryview, offset: int) -> int:
        if offset + len(data) > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(bodies.os, "pwrite", until_full)
    for api in ("/b/k", "/-/v1/objects/b/k"):
        with node.connect() as client:
            client.send(head(api, f"Content-Length: {len(BIG)}") + BIG)
            answer = client.answer("PUT")
            assert (answer.status, b"InsufficientStorage" in answer.body) == (507, True)
        eventually(lambda: files(node) == [])
    assert node.engine.calls == []


def test_a_client_that_vanishes_while_the_disk_is_stuck_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    stuck = threading.Event()
    waiting = threading.Event()
    pwrite = os.pwrite

    def slowly(fd: int, data: memoryview, offset: int) -> int:
        waiting.set()
        assert stuck.wait(90)
        return pwrite(fd, data, offset)

    before = descriptors()
    monkeypatch.setattr(bodies.os, "pwrite", slowly)
    with node.connect() as client:
        client.send(head("/b/k", f"Content-Length: {len(BIG)}") + BIG[:600_000])
        assert waiting.wait(90)
    eventually(lambda: not node.front.server.connections)
    stuck.set()
    eventually(lambda: files(node) == [])
    eventually(lambda: descriptors() <= before)


def test_a_client_that_goes_before_its_small_write_is_answered(node: Node, eventually: Eventually) -> None:
    node.engine.mute.add("put")
    before = descriptors()
    with node.connect() as client:
        client.send(head("/b/small", "Content-Length: 5") + b"hello")
        eventually(lambda: "put" in [verb for verb, _ in node.engine.calls])
    eventually(lambda: node.snapshot().values["forebay_connections_open"] == 0)
    (number,) = [message.call for message in node.seen(wire.Call) if message.verb == "put"]
    late = calls.encode_answer(calls.Written("e", "v", 5, 0.0))
    node.call(lambda: node.engine.say(wire.Answer(number, late)))
    with node.connect() as client:
        node.engine.mute.clear()
        assert client.ask("/b/small", "PUT", b"again").status == 200
    eventually(lambda: descriptors() <= before)


def test_small_writes_that_wait_when_the_engine_dies_are_each_503(node: Node, eventually: Eventually) -> None:
    node.engine.mute.add("put")
    clients = [node.connect() for _ in range(5)]
    for number, client in enumerate(clients):
        client.send(head(f"/b/{number}", "Content-Length: 5") + b"hello" + head("/b/old", method="GET"))
    eventually(lambda: len([message for message in node.seen(wire.Call) if message.verb == "put"]) == 5)
    node.run(node.engine.stop())
    for client in clients:
        with client:
            assert client.answer("PUT").status == 503, "and what was pipelined behind it is served"
            assert client.answer().status in (404, 503)


def test_small_writes_wait_for_an_engine_that_comes_back(node: Node, eventually: Eventually) -> None:
    node.run(node.engine.stop())
    eventually(lambda: not node.front.link.connected)
    with node.connect() as client:
        client.send(head("/b/k", "Content-Length: 5") + b"hello")
        node.run(node.engine.start())
        assert client.answer("PUT").status == 200
        assert client.ask("/b/k").body == b"hello"


def test_fields_of_the_transfer_say_nothing_of_the_object() -> None:
    for value in (b"public-read", b"GLACIER", b"a=b", b"*", b"\xff"):
        headers = dict.fromkeys(puts.OF_THE_TRANSFER, value)
        request = Request(b"PUT", b"/b/k", b"/b/k", b"", headers)
        assert puts.options_of(request, Bucket("bucket", "local://")) == puts.PutOptions()
        check_acl(request, "private")
