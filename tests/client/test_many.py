"""Reading many items at once: from a real front with a fake engine, and from a server that says what it is told."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import aio
from forebay.client.many import FrameSink, Many
from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError, Invalid, NotFound, Precondition, Unavailable
from forebay.core.messages import batch
from forebay.core.messages.batch import FRAME, Item, read_frames
from forebay.core.messages.http1 import Response
from tests.front.fake_engine import Cold, Node, serve

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-forebay-batch\r\n"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with over_http(f"http://127.0.0.1:{node.port}") as client:
        yield client


def over_http(url: str, **more: Any) -> Client:
    """A client that takes no short way to the node on its host."""
    client = Client(url, **more)
    client.door.off()
    return client


def frame(body: bytes, flags: int = 0, total: int | None = None) -> bytes:
    return FRAME.pack(200, flags, 0, len(body), len(body) if total is None else total) + body


def failure(error: ForebayError) -> bytes:
    return batch.failed_frame(error, error.status)


class Canned:
    """A server that answers each request with the next of its answers, and closes after one that is cut."""

    def __init__(self, answers: list[bytes], *, close_after: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.asked: list[list[Item]] = []
        self._answers = answers
        self._close_after = close_after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = 0
        while number < len(self._answers):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, sock.makefile("rb") as file:
                while number < len(self._answers) and (line := file.readline()):
                    length = 0
                    while line.strip():
                        name, _, value = line.partition(b":")
                        length = int(value) if name.lower() == b"content-length" else length
                        line = file.readline()
                    self.asked.append(msgspec.msgpack.decode(file.read(length), type=batch.BatchCall).items)
                    sock.sendall(self._answers[number])
                    number += 1
                    if number - 1 in self._close_after:
                        break

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()
        self._thread.join(90)
        assert not self._thread.is_alive()


@contextmanager
def canned(*answers: bytes, close_after: set[int] | None = None) -> Iterator[tuple[Canned, Client]]:
    server = Canned(list(answers), close_after=close_after or set())
    try:
        with over_http(server.url, patience_s=5) as client:
            yield server, client
    finally:
        server.close()


def sized(body: bytes, announced: int | None = None) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) if announced is None else announced) + body


def chunked(body: bytes, *cuts: int) -> bytes:
    edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    chunks = b"".join(b"%x\r\n%b\r\n" % (end - at, body[at:end]) for at, end in itertools.pairwise(edges))
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


# --- against a front --------------------------------------------------------------------------------------------------
def test_objects_and_ranges_in_the_order_asked(node: Node, client: Client) -> None:
    data = os.urandom(300_000)
    node.put("large", data)
    node.put("small", b"small")
    node.put("empty", b"")
    node.engine.cold["b", "cold"] = Cold(data[::-1])
    items: list[Any] = [
        ("b", "small"),
        ("b", "large", 5, 100_005),
        Item("b", "small", 1, 3),
        ("b", "cold"),
        ("b", "empty"),
        ("b", "large", 299_999, None),
        ("b", "small"),
    ]
    many = client.get_many(items)
    assert [bytes(result) for result in many] == [
        b"small", data[5:100_005], b"ma", data[::-1], b"", data[-1:], b"small",
    ]  # fmt: skip
    assert (len(many), many.cold, many.errors) == (7, 1, {})
    assert many.waited_s > 0
    assert many.bytes(1) == many[1] == data[5:100_005]
    assert many[2:4] == [b"ma", data[::-1]]
    assert repr(many) == "<Many 7 items, 0 failed, 1 cold>"
    assert list(client.get_many([])) == []


def test_errors_are_raised_or_stand_in_their_places(node: Node, client: Client) -> None:
    node.put("o", b"bytes")
    items = [("b", "o"), ("b", "nothing"), Item("b", "o", etag="old"), ("b", "o", 9, 10), ("b", "o", 1)]
    with pytest.raises(NotFound, match="item 1 of the batch, b/nothing: nothing does not exist") as caught:
        client.get_many(items)
    assert caught.value.code == "NoSuchKey"
    many = client.get_many(items, on_error="report")
    assert [many[0], many[4]] == [b"bytes", b"ytes"]
    assert {at: type(error) for at, error in many.errors.items()} == {1: NotFound, 2: Precondition, 3: Invalid}
    with pytest.raises(Invalid) as outside:
        many.bytes(3)
    assert (outside.value.code, outside.value.size_bytes) == ("InvalidRange", 5)
    with pytest.raises(Invalid, match="on_error"):
        client.get_many(items, on_error="ignore")  # type: ignore[arg-type]
    for wrong in (("b",), ("b", object()), ("b", "o", 1, 2, "", "", "", 7)):
        with pytest.raises(Invalid, match="an item is none"):
            client.get_many([wrong])
    assert client.get_many([("b", "o")])[0] == b"bytes", "the client is as good as before"


def test_into_a_buffer_of_the_callers(node: Node, client: Client) -> None:
    node.put("o", bytes(range(100)))
    into = bytearray(1000)
    for _ in range(3):
        many = client.get_many([("b", "o", 10, 20), ("b", "o", 90, 100)], into=into)
        assert [bytes(result) for result in many] == [bytes(range(10, 20)), bytes(range(90, 100))]
        assert into[24:34] == bytes(range(10, 20))
        into[24] = 77
        assert many[0][0] == 77, "it is that memory"
        into[:] = bytes(1000)
    small = bytearray(30)
    assert client.get_many([("b", "o")], into=small)[0] == bytes(range(100)), "memory of its own, where it does not fit"
    with pytest.raises(Invalid, match="read-only"):
        client.get_many([("b", "o")], into=memoryview(b"1234"))


def test_results_outlive_everything_but_their_own_memory(node: Node, client: Client) -> None:
    node.put("o", b"kept" * 1000)
    kept = client.get_many([("b", "o")] * 50)[49]
    gc.collect()
    for _ in range(5):
        client.get_many([("b", "o", 1, 50)] * 100)
    assert kept == b"kept" * 1000


def test_more_than_one_request_takes(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many items, too long a question, too long an answer: the caller sees one list."""
    data = {f"k{at}": os.urandom(1000 + at) for at in range(40)}
    for key, body in data.items():
        node.put(key, body)
    monkeypatch.setattr(limits, "BATCH_ITEMS_MAX", 16)
    monkeypatch.setattr(limits, "BATCH_BODY_BYTES_MAX", 100)
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 4000)
    many = client.get_many([("b", key) for key in data])
    assert [bytes(result) for result in many] == list(data.values())
    node.put("too-much", bytes(4000))
    many = client.get_many([("b", "k1"), ("b", "too-much"), ("b", "k2")], on_error="report")
    assert [many[0], many[2]] == [data["k1"], data["k2"]]
    assert (many.errors[1].code, "alone with a GET" in many.errors[1].message) == (batch.FULL, True)


def test_a_fetch_that_breaks_midway_is_asked_for_once_more(node: Node, client: Client) -> None:
    data = os.urandom(400_000)
    node.put("warm", b"warm")
    node.engine.cold["b", "breaks"] = cold = Cold(data, fail_at=150_000, piece_bytes=50_000)
    node.engine.cold["b", "fine"] = Cold(data[::-1])
    items = [("b", "warm"), ("b", "breaks"), ("b", "fine"), ("b", "warm")]
    many = client.get_many(items, on_error="report")
    assert many[0] == b"warm"
    assert {at: (type(error), error.code) for at, error in many.errors.items()} == dict.fromkeys(
        (1, 2, 3), (Unavailable, "Cut")
    )
    assert len(node.seen_reads("breaks")) == 2, "once, and once more"
    with pytest.raises(Unavailable, match="item 1 of the batch, b/breaks: the answer was cut"):
        client.get_many(items)

    def mend() -> None:
        cold.fail_at = None

    taken = node.front.link.open_read

    async def mend_then(*args: Any, **more: Any) -> Any:
        if len(node.seen_reads("breaks")) == 5:
            mend()
        return await taken(*args, **more)

    node.front.link.open_read = mend_then  # type: ignore[method-assign]
    many = client.get_many(items)
    assert [bytes(result) for result in many] == [b"warm", data, data[::-1], b"warm"]


def test_a_node_on_this_host_is_read_past_http(node: Node) -> None:
    data = os.urandom(100_000)
    node.put("o", data)
    node.engine.cold["b", "cold"] = Cold(data)
    with Client(f"http://127.0.0.1:{node.port}") as client:
        many = client.get_many([("b", "o", 5, 10_005), ("b", "cold"), ("b", "o"), ("b", "nothing")], on_error="report")
        assert [bytes(many[at]) for at in range(3)] == [data[5:10_005], data, data]  # type: ignore[arg-type]
        assert (many.cold, isinstance(many[3], NotFound)) == (1, True)
    assert node.snapshot().values['forebay_batch_items_total{result="hit"}'] == 0


def test_nothing_listens_is_said_at_once_whatever_the_policy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with over_http(url) as client, pytest.raises(Unavailable) as caught:
        client.get_many([("b", "o")], on_error="report")
    assert caught.value.code == "NoNode"


def test_the_asyncio_client_reads_the_same(node: Node) -> None:
    data = os.urandom(500_000)
    node.put("o", data)
    node.engine.cold["b", "cold"] = Cold(data)
    node.engine.cold["b", "breaks"] = Cold(data, fail_at=100_000)

    async def story() -> None:
        async with aio.connect(f"http://127.0.0.1:{node.port}") as client:
            many = await client.get_many([("b", "o"), ("b", "cold"), ("b", "o", 1, 9)])
            assert [bytes(result) for result in many] == [data, data, data[1:9]]
            many = await client.get_many([("b", "o"), ("b", "nothing"), ("b", "breaks")], on_error="report")
            assert many[0] == data
            assert {at: type(error) for at, error in many.errors.items()} == {1: NotFound, 2: Unavailable}
            found = await asyncio.gather(*(client.get_many([("b", "o", at, at + 9)]) for at in range(30)))
            assert [bytes(many[0]) for many in found] == [data[at : at + 9] for at in range(30)]

    asyncio.run(story())
    assert len(node.seen_reads("breaks")) == 2


def test_what_the_host_has_is_not_asked_for(node: Node, client: Client) -> None:
    node.put("remote", b"over http")
    asked: list[list[Item]] = []

    class Door:
        def read_many(self, items: list[Item]) -> list[bytes | None]:
            asked.append(items)
            return [b"from the file" if item.key == "near" else None for item in items]

        def close(self) -> None:
            pass

    client._door = Door()  # type: ignore[assignment]
    many = client.get_many([("b", "near"), ("b", "remote", 5), ("b", "near"), ("b", "nothing")], on_error="report")
    assert [many[0], many[1], many[2]] == [b"from the file", b"http", b"from the file"]
    assert isinstance(many[3], NotFound)
    assert asked == [[Item("b", "near"), Item("b", "remote", 5), Item("b", "near"), Item("b", "nothing")]]
    assert list(client.get_many([("b", "near")])) == [b"from the file"]
    assert node.snapshot().values["forebay_batches_total"] == 1


# --- against a server that misbehaves ---------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [0, 10, 24, 100, 1023, 1024, 1040, 2047])
@pytest.mark.parametrize("how", ["sized", "chunked"])
def test_a_cut_anywhere_keeps_what_is_whole_and_asks_for_the_rest(at: int, how: str) -> None:
    body = frame(b"a" * 1000) + frame(b"b" * 1000)
    if how == "sized":
        first = sized(body)[: len(sized(body)) - len(body) + at]
    else:
        first = chunked(body, 700, 1500)
        first = first[: first.index(b"\r\n\r\n") + 4 + at]
    arrived = at >= (1024 if how == "sized" else 1040)
    rest = frame(b"B" * 1000) if arrived else frame(b"A" * 1000) + frame(b"B" * 1000)
    with canned(first, sized(rest), close_after={0}) as (server, client):
        many = client.get_many([("b", "a"), ("b", "b")])
        assert [bytes(result)[:1] for result in many] == ([b"a", b"B"] if arrived else [b"A", b"B"])
        assert [[item.key for item in asked] for asked in server.asked] == [
            ["a", "b"],
            ["b"] if arrived else ["a", "b"],
        ]


def test_a_front_that_dies_before_it_answers_is_not_the_one_retry() -> None:
    """Who asked a front that is being killed may find the next connection in the queue of the same one."""
    body = frame(b"a") + frame(b"b")
    with canned(sized(body)[: -len(body) + 25], b"", sized(frame(b"B")), close_after={0, 1}) as (server, client):
        assert list(client.get_many([("b", "a"), ("b", "b")])) == [b"a", b"B"]
        assert [len(asked) for asked in server.asked] == [2, 1, 1]
    with canned(b"", b"", close_after={0, 1}) as (server, client):
        with pytest.raises(Unavailable, match="without an answer"):
            client.get_many([("b", "a")], on_error="report")
        assert len(server.asked) == 2


def test_all_that_was_asked_for_is_enough() -> None:
    """An answer in chunks that lacks its last one, of no bytes."""
    answer = chunked(frame(b"a"))[:-5]
    with canned(answer, answer, close_after={0, 1}) as (server, client):
        assert list(client.get_many([("b", "a")])) == [b"a"]
        assert len(server.asked) == 1


def test_a_kept_connection_that_was_closed_is_not_a_cut() -> None:
    answer = sized(frame(b"x"))
    with canned(answer, answer, answer, close_after={0, 1}) as (server, client):
        for _ in range(3):
            assert list(client.get_many([("b", "o")])) == [b"x"]
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    "answer",
    [
        sized(frame(b"one")),
        sized(frame(b"one") + frame(b"two") + frame(b"three")),
        sized(frame(b"one") + frame(b"two") + b"tail"),
        sized(frame(b"one") + struct.pack("<HHIQQ", 200, 0, 7, 0, 0)),
        sized(frame(b"one") + struct.pack("<HHIQQ", 200, 0, 0, 2**60, 0)),
        sized(frame(b"one") + struct.pack("<HHIQQ", 404, 0, 0, 3, 0) + b"\xc1\xc1\xc1"),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    ],
)
def test_what_is_no_answer_is_corrupt_and_never_asked_for_again(answer: bytes) -> None:
    with canned(answer, answer) as (server, client):
        with pytest.raises(Corrupt):
            client.get_many([("b", "a"), ("b", "b")])
        assert len(server.asked) == 1


def test_an_answer_with_an_error_is_that_error() -> None:
    body = b'{"error": {"kind": "Denied", "message": "no", "code": "AccessDenied"}}'
    answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with canned(answer) as (_, client), pytest.raises(ForebayError, match="no") as caught:
        client.get_many([("b", "a")], on_error="report")
    assert (caught.value.kind, caught.value.code) == ("Denied", "AccessDenied")


def test_errors_and_cold_ones_survive_their_way() -> None:
    error = Unavailable("the backend is down: try later", retry_after_s=7.0)
    body = frame(b"x", batch.COLD) + failure(error) + frame(b"y", batch.COLD) + frame(b"z")
    with canned(chunked(body, 3, 30, 31, 32, 50)) as (_, client):
        many = client.get_many([("b", "k")] * 4, on_error="report")
    assert [many[0], many[2], many[3], many.cold] == [b"x", b"y", b"z", 2]
    assert many.errors[1].to_wire() == error.to_wire()


# --- frames -----------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 100) | st.integers(0, 50_000), min_size=1, max_size=12),
    steps=st.lists(st.integers(1, 70_000), min_size=1, max_size=8),
    length_known=st.booleans(),
    expected=st.integers(0, 100_000),
    into=st.integers(0, 300_000),
)
def test_however_bytes_come_each_result_is_what_was_sent(
    sizes: list[int], steps: list[int], length_known: bool, expected: int, into: int
) -> None:
    """Into memory of any size, in pieces of any size."""
    sent = [bytes([at + 1]) * size for at, size in enumerate(sizes)]
    body = b"".join(frame(one) for one in sent)
    headers = {"content-type": batch.MEDIA} | ({"content-length": str(len(body))} if length_known else {})
    sink = FrameSink(memoryview(bytearray(into)), [Item("b", "k", 0, expected), ("b", "k"), ("b", "k", 0, None)])
    sink.begin(Response(200, headers))
    position, turn = 0, 0
    while position < len(body):
        view = sink.buffer()
        assert len(view) > 0
        size = min(steps[turn % len(steps)], len(view), len(body) - position)
        view[:size] = body[position : position + size]
        view.release()
        sink.wrote(size)
        position, turn = position + size, turn + 1
    assert [bytes(result) for result in sink.received()] == sent  # type: ignore[arg-type]
    assert sink.left_over() == 0


def test_frames_are_read_where_they_end() -> None:
    body = frame(b"abc") + frame(b"defg")
    for upto in range(len(body) + 1):
        found: list[Any] = []
        position, wanted, _ = read_frames(memoryview(body), 0, upto, found)
        assert [bytes(one) for one in found] == [b"abc", b"defg"][: len(found)]
        assert position == sum(24 + len(one) for one in found)
        begun = upto - position
        assert wanted == (0 if begun < 24 else 24 + (3 if not found else 4))


def test_many_is_a_sequence() -> None:
    many = Many([memoryview(b"a"), b"b", NotFound("gone")])
    check: Callable[[Any], bool] = many.__contains__
    assert check(b"a")
    assert not check(b"c")
    assert (many.index(b"b"), len(many), next(type(one) for one in reversed(many))) == (1, 3, NotFound)
