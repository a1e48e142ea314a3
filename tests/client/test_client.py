"""One client against a node over real sockets: reads, errors, connections that die, processes that fork."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.client.connection import parse_url
from forebay.client.sync import Client, connect
from forebay.core.errors import Busy, Closed, Corrupt, Denied, Invalid, NotFound, Precondition, Unavailable
from forebay.core.types import Bucket, RangeSpec
from tests.client.fake_node import FakeNode


@contextmanager
def listener(*answers: bytes) -> Iterator[str]:
    """A server that reads a request and says the next answer, then closes; its URL."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(90)
        assert not thread.is_alive(), "every answer was asked for"
    finally:
        server.close()


def test_an_object_arrives_whole_in_a_range_and_in_a_buffer(node: FakeNode, client: Client) -> None:
    data = os.urandom(3_000_000)
    node.objects["corpus"]["a/b"] = data
    assert client.get("corpus", "a/b") == data
    assert client.get("corpus", "a/b", range=RangeSpec(10, 19)) == data[10:20]
    assert client.get("corpus", "a/b", range=RangeSpec(2_999_990, None)) == data[-10:]
    assert client.get("corpus", "a/b", range=RangeSpec(None, 7)) == data[-7:]
    room = bytearray(len(data) + 5)
    facts = client.get_into("corpus", "a/b", room)
    assert (facts.size_bytes, facts.start, facts.body_bytes) == (len(data), 0, len(data))
    assert room[: len(data)] == data
    facts = client.get_into("corpus", "a/b", room, range=RangeSpec(100, 199))
    assert (facts.size_bytes, facts.start, facts.body_bytes) == (len(data), 100, 100)
    assert room[:100] == data[100:200]
    assert node.connections == 1, "one connection served them all"


def test_an_empty_object_is_nothing_and_no_error(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["empty"] = b""
    assert client.get("corpus", "empty") == b""
    assert client.get_into("corpus", "empty", bytearray()).size_bytes == 0


@pytest.mark.parametrize("key", ["..", "a//b", "/lead", "a b?c#d%e&f=g", "grüße/日本", "line\nbreak", "x" * 1024])
def test_any_key_is_one_key(node: FakeNode, client: Client, key: str) -> None:
    node.objects["corpus"][key] = key.encode()
    assert client.get("corpus", key) == key.encode()
    assert client.stat("corpus", key).key == key


def test_a_buffer_that_is_too_small_takes_nothing(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["a"] = b"0123456789"
    room = bytearray(5)
    with pytest.raises(Invalid, match="the body has 10"):
        client.get_into("corpus", "a", room)
    assert room == bytes(5)
    assert client.get("corpus", "a") == b"0123456789", "and the next request has a sound connection"


def test_errors_come_back_as_their_kind_with_the_nodes_words(node: FakeNode, client: Client) -> None:
    with pytest.raises(NotFound, match="corpus/nothing does not exist") as caught:
        client.get("corpus", "nothing")
    assert caught.value.code == "NoSuchKey"
    with pytest.raises(NotFound, match="not known here"):
        client.get("elsewhere", "a")
    node.objects["corpus"]["a"] = b"one"
    with pytest.raises(Precondition):
        client.get("corpus", "a", etag="another")
    with pytest.raises(Invalid, match="outside"):
        client.get("corpus", "a", range=RangeSpec(99, 100))
    node.fail_next = [Denied("no", code="AccessDenied")]
    with pytest.raises(Denied):
        client.status()
    with pytest.raises(NotFound):
        client.head("corpus", "nothing")
    assert node.connections == 1, "an error of the object is no error of the connection"


def test_an_answer_without_words_becomes_the_kind_of_its_status() -> None:
    page = b"<html>too busy</html>"
    with (
        listener(
            b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page),
            b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n",
        ) as url,
        Client(url) as client,
    ):
        with pytest.raises(Busy) as caught:
            client.status()
        assert caught.value.retry_after_s == 7
        with pytest.raises(Denied):
            client.status()


def test_no_node_says_how_to_get_one(free_port: int) -> None:
    with Client(f"http://127.0.0.1:{free_port}") as client, pytest.raises(Unavailable, match="forebay up") as caught:
        client.status()
    assert caught.value.code == "NoNode"


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n", Corrupt, "not HTTP"),
        (b"", Unavailable, "without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", Unavailable, "middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, Corrupt, "over"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Unavailable, "cut after 3 of 10"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", Corrupt, "longer than"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", Unavailable, "cut after 3"),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(answer: bytes, kind: type[Exception], words: str) -> None:
    with listener(answer) as url, Client(url) as client, pytest.raises(kind, match=words):
        client.status()


@pytest.mark.parametrize("part", [b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"])
def test_a_connection_that_is_reset_within_an_answer_is_an_error(part: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = server.accept()
        peer.recv(65536)
        peer.sendall(part)
        arrived.wait(90)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()  # a reset, not an end of file

    arrived = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with Client(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
        threading.Timer(0.2, arrived.set).start()
        with pytest.raises(Unavailable, match=r"middle of an answer|cut after 2 of 9"):
            client.status()
    thread.join(90)
    server.close()


def test_a_node_that_says_nothing_is_not_waited_for_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with connect(url, patience_s=0.2) as client, pytest.raises(Unavailable, match=r"sent nothing for 0\.2 s"):
            client.status()


def test_bodies_of_unknown_length_are_read_to_their_end() -> None:
    with (
        listener(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 300_000,
        ) as url,
        Client(url) as client,
    ):
        assert client.get("corpus", "a") == b"abcde"
        client.close_idle()
        assert client.get("corpus", "a") == b"x" * 300_000


def test_a_kept_connection_that_died_is_replaced_without_a_word(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["a"] = b"one"
    assert client.get("corpus", "a") == b"one"
    node.drop_connections()
    assert client.get("corpus", "a") == b"one"
    node.drop_connections()
    assert client.start_job("prefetch", "corpus").state == "done", "also for what may not be sent twice"
    assert len(node.requests("POST")) == 1
    assert node.connections == 3


def test_listings_come_page_by_page(node: FakeNode, client: Client) -> None:
    keys = [f"d{n // 10}/{n:03d}" for n in range(35)] + ["top"]
    node.objects["corpus"].update(dict.fromkeys(keys, b"x"))
    node.page_limit = 7
    pages = list(client.list_pages("corpus"))
    assert [entry.key for page in pages for entry in page.entries] == keys
    assert len(pages) == 6
    pages = list(client.list_pages("corpus", delimiter="/"))
    assert [prefix for page in pages for prefix in page.prefixes] == ["d0/", "d1/", "d2/", "d3/"]
    assert [entry.key for page in pages for entry in page.entries] == ["top"]
    assert [entry.key for page in client.list_pages("corpus", "d3/") for entry in page.entries] == keys[30:35]


def test_buckets_come_change_and_go(node: FakeNode, client: Client) -> None:
    kept = client.bucket_put(Bucket("extra", "file:///data", freshness_s=5.0), check=False)
    assert kept.freshness_s == 5.0
    assert [bucket.name for bucket in client.buckets()] == ["corpus", "extra"]
    client.bucket_delete("extra")
    assert [bucket.name for bucket in client.buckets()] == ["corpus"]
    with pytest.raises(NotFound):
        client.bucket_delete("extra")


def test_a_bucket_is_checked_on_demand(node: FakeNode, client: Client) -> None:
    client.bucket_check("corpus")
    node.unreachable["corpus"] = Denied("the credentials are refused", code="AccessDenied")
    with pytest.raises(Denied, match="refused"):
        client.bucket_check("corpus")


def test_a_client_works_on_in_a_forked_child(node: FakeNode, client: Client) -> None:
    node.objects["corpus"]["a"] = b"parent and child"
    assert client.get("corpus", "a") == b"parent and child"
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(write_end, client.get("corpus", "a"))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        assert pipe.read() == b"parent and child"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.get("corpus", "a") == b"parent and child"
    assert node.connections == 2, "the child opened its own; the parent kept its own"


def test_threads_share_a_client(node: FakeNode, client: Client) -> None:
    for n in range(20):
        node.objects["corpus"][f"k{n}"] = bytes([n]) * 50_000
    wrong: list[int] = []

    def read(worker: int) -> None:
        for n in range(20):
            if client.get("corpus", f"k{(n + worker) % 20}") != bytes([(n + worker) % 20]) * 50_000:
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert node.connections <= 12


def test_a_closed_client_says_so(node: FakeNode) -> None:
    client = connect(node.url)
    client.close()
    client.close()
    with pytest.raises(Closed):
        client.status()


def test_importing_and_making_a_client_opens_nothing_and_loads_nothing_heavy() -> None:
    code = (
        "import os, sys\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "from forebay.client.sync import connect\n"
        "client = connect('http://127.0.0.1:1')\n"
        "assert set(os.listdir('/proc/self/fd')) == before\n"
        "print([m for m in ('obstore', 'ssl', 'asyncio', 'uvloop', 'http.client', 'typer') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://h:1", ("http", "h", 1, "")),
        ("h:1", ("http", "h", 1, "")),
        ("h", ("http", "h", 9400, "")),
        ("https://h", ("https", "h", 443, "")),
        ("https://h:9/base/", ("https", "h", 9, "/base")),
        ("http://[::1]:7", ("http", "::1", 7, "")),
    ],
)
def test_urls_name_a_place(url: str, where: tuple[str, str, int, str]) -> None:
    assert tuple(parse_url(url)) == where


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h:99999", "http://u@h", "http://h?x=1"])
def test_urls_that_name_no_place_are_refused(url: str) -> None:
    with pytest.raises(Invalid, match=r"http://127\.0\.0\.1:9400"):
        parse_url(url)


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_URL", "http://elsewhere:12")
    assert connect().url == "http://elsewhere:12"
    assert connect("other:13").url == "http://other:13"


def test_a_token_travels_as_bearer(node: FakeNode) -> None:
    with connect(node.url, token="secret") as client:
        client.status()
    assert node.seen[-1][2]["authorization"] == "Bearer secret"
