"""The HTTP server over real sockets: what it answers, what it refuses, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.node.front.http.connection import READ_BYTES, Connection
from forebay.node.front.http.server import Timeouts, listen
from tests.front.fake_engine import Client, Cold, Node, serve

Eventually = Callable[[Callable[[], bool]], None]
QUICK = Timeouts(header_s=0.3, idle_s=0.6, stall_s=0.4, tick_s=0.05)


def head(target: str = "/b/small", method: str = "GET", version: str = "1.1", *more: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/{version}", "Host: localhost", *more, "", ""]).encode()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- ordinary life ----------------------------------------------------------------------------------------------------
def test_one_connection_carries_many_requests(node: Node) -> None:
    node.put("small", b"tiny")
    node.put("big", os.urandom(3_000_000))
    with node.connect() as client:
        for _ in range(3):
            for key in ("small", "big"):
                answer = client.ask(f"/b/{key}")
                assert (answer.status, len(answer.body)) == (200, 4 if key == "small" else 3_000_000)
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers["date"])
    assert node.snapshot().values["forebay_connections_total"] == 1


def test_fields_that_were_understood_before_are_judged_by_the_version_that_sends_them_now(node: Node) -> None:
    node.put("small", b"tiny")
    with node.connect() as client:
        for version, status in (("1.0", 200), ("1.0", 200), ("1.1", 400)):  # HTTP/1.1 wants a Host
            client.send(f"GET /b/small HTTP/{version}\r\nConnection: keep-alive\r\n\r\n".encode())
            assert client.answer().status == status


def test_pipelined_requests_are_answered_in_order(node: Node) -> None:
    keys = [f"k{number}" for number in range(20)]
    for key in keys:
        node.put(key, key.encode() * 10)
    node.put("big", os.urandom(2_000_000))
    node.engine.cold["b", "cold"] = Cold(b"c" * 50_000)
    with node.connect() as client:
        order = [*keys[:10], "big", "cold", *keys[10:], "missing", "k0"]
        client.send(b"".join(head(f"/b/{key}") for key in order))
        for key in order:
            answer = client.answer()
            if key == "missing":
                assert answer.status == 404
            elif key == "big":
                assert len(answer.body) == 2_000_000
            else:
                assert answer.body == (b"c" * 50_000 if key == "cold" else key.encode() * 10)


def test_a_request_may_arrive_byte_by_byte(node: Node) -> None:
    node.put("small", b"tiny")
    with node.connect() as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for byte in head():
                client.send(bytes([byte]))
            assert client.answer().body == b"tiny"
        client.send(b"\r\n\r\n" + head())  # empty lines before a request
        assert client.answer().body == b"tiny"


def test_a_flood_of_pipelined_requests_is_held_back_and_answered(node: Node) -> None:
    """More waits than one read buffer or PIPELINE_MAX allows; reading pauses, and nothing is lost."""
    node.put("small", b"tiny")
    node.engine.cold["b", "slow"] = slow = Cold(b"s" * 1000, hold_at=1)
    count = 4000
    assert count * len(head()) > 2 * READ_BYTES
    with node.connect() as client:
        sender = threading.Thread(target=client.send, args=(head("/b/slow") + head() * count,))
        sender.start()
        time.sleep(0.1)
        (connection,) = node.front.server.connections
        assert len(connection._pending) <= 2 * READ_BYTES
        slow.release.set()
        assert client.answer().body == b"s" * 1000
        for _ in range(count):
            assert client.answer().body == b"tiny"
        sender.join()


def test_head_has_the_headers_of_get_and_no_body(node: Node) -> None:
    node.put("small", b"tiny")
    node.put("big", bytes(200_000))
    node.engine.cold["b", "cold"] = Cold(bytes(77_000))
    with node.connect() as client:
        for key, size in (("small", 4), ("big", 200_000), ("cold", 77_000), ("missing", None)):
            answer = client.ask(f"/b/{key}", "HEAD")
            got = client.ask(f"/b/{key}")
            assert answer.status == got.status
            if size is not None:
                assert answer.headers["content-length"] == str(size)
                assert {k for k in answer.headers if k != "x-amz-request-id"} == {
                    k for k in got.headers if k != "x-amz-request-id"
                }
    assert [read.head_only for read in node.seen_reads("cold")] == [True, False]


def test_http_1_0_closes_unless_asked_to_keep_alive(node: Node) -> None:
    node.put("small", b"tiny")
    with node.connect() as client:
        client.send(b"GET /b/small HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"tiny", "keep-alive")
        client.send(b"GET /b/small HTTP/1.0\r\n\r\n")
        assert client.rest().endswith(b"tiny")
    with node.connect() as client:
        client.send(head("/-/v1/list/b?format=ndjson", "GET", "1.0"))
        whole = client.rest()  # no size is known and there are no chunks in 1.0: the end is the end
        assert b"chunked" not in whole
        assert b'{"key":"small"' in whole


def test_connection_close_is_obeyed(node: Node) -> None:
    node.put("small", b"tiny")
    with node.connect() as client:
        client.send(head("/b/small", "GET", "1.1", "Connection: close") + head())
        answer = client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"tiny", "close")
        assert client.rest() == b""


def test_an_absolute_target_is_read_like_a_path(node: Node) -> None:
    node.put("small", b"tiny")
    with node.connect() as client:
        client.send(b"GET http://localhost/b/small HTTP/1.1\r\nHost: other\r\n\r\n")
        assert client.answer().body == b"tiny"


# --- bodies -----------------------------------------------------------------------------------------------------------
def test_a_small_body_reaches_its_handler_plain_or_chunked(node: Node) -> None:
    from forebay.core.messages.calls import JobState

    node.engine.answers["prefetch"] = JobState("j1", "prefetch", "b")
    body = b'{"bucket":"b","prefix":"x/"}'
    with node.connect() as client:
        assert client.ask("/-/v1/prefetch", "POST", body).status == 202
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        client.send(head("/-/v1/prefetch", "POST", "1.1", "Transfer-Encoding: chunked") + chunks[:9])
        client.send(chunks[9:] + head("/-/healthz"))
        assert client.answer().status == 202
        assert client.answer().body == b"ok\n"
    assert [arguments.prefix for _, arguments in node.engine.calls] == ["x/", "x/"]


def test_expect_100_is_answered_before_the_body_is_sent(node: Node) -> None:
    from forebay.core.messages.calls import JobState

    node.engine.answers["prefetch"] = JobState("j1", "prefetch", "b")
    body = b'{"bucket":"b"}'
    with node.connect() as client:
        client.send(head("/-/v1/prefetch", "POST", "1.1", f"Content-Length: {len(body)}", "Expect: 100-continue"))
        assert client.answer().status == 100
        client.send(body)
        assert client.answer().status == 202


def test_a_body_that_nobody_takes_is_refused_before_it_is_sent(node: Node) -> None:
    with node.connect() as client:
        client.send(head("/b/new?encryption", "PUT", "1.1", "Content-Length: 999999", "Expect: 100-continue"))
        answer = client.answer()
        assert answer.status == 501
        assert b"<Code>NotImplemented</Code>" in answer.body
        assert client.rest() == b""


def test_the_answer_to_a_refused_body_survives_the_body(node: Node) -> None:
    """The client goes on sending; our answer must not be destroyed by a reset."""
    with node.connect() as client:
        client.send(head("/b/new?encryption", "PUT", "1.1", "Content-Length: 30000000"))
        for _ in range(30):
            client.send(bytes(100_000))
        assert client.answer().status == 501


def test_a_body_over_the_limit_is_refused_before_it_is_sent(node: Node) -> None:
    with node.connect() as client:
        client.send(head("/-/v1/evict", "POST", "1.1", "Content-Length: 9999999999", "Expect: 100-continue"))
        assert client.answer().status == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(node: Node, chunked: bool) -> None:
    size = limits.JSON_BODY_BYTES_MAX + 1
    with node.connect() as client:
        if chunked:
            client.send(head("/-/v1/evict", "POST", "1.1", "Transfer-Encoding: chunked") + b"%x\r\n" % size)
        else:
            client.send(head("/-/v1/evict", "POST", "1.1", f"Content-Length: {size}"))
        client.send(bytes(size))
        assert client.answer().status == 413


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * limits.REQUEST_LINE_BYTES_MAX + b" HTTP/1.1\r\nHost: h\r\n\r\n", 414),
        (b"GET /" + b"a" * (limits.REQUEST_LINE_BYTES_MAX + 100), 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * (limits.HEADER_BYTES_MAX + 100), 431),
        (b"GET /-/healthz HTTP/1.1\r\nHost: h\r\nX: " + b"a" * limits.HEADER_BYTES_MAX + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/3.0\r\nHost: h\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /-/v1/evict HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST /-/v1/evict HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /-/v1/evict HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST /-/v1/evict HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /-/v1/evict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_each_kind_of_bad_request_has_its_answer_and_ends_the_connection(node: Node, data: bytes, status: int) -> None:
    smuggled = b"GET /-/healthz HTTP/1.1\r\nHost: h\r\n\r\n"
    with node.connect() as client:
        client.send(data + smuggled)
        first = client.answer()
        assert first.status == status
        assert first.headers["connection"] == "close"
        assert client.rest() == b"", "bytes behind a refused request were taken for a request"
    assert node.snapshot().values["forebay_requests_refused_total"] == 1


@pytest.mark.parametrize("expect", [b"magic", b"", b"200-ok"])
def test_an_expectation_that_is_not_known_is_ignored(node: Node, expect: bytes) -> None:
    request = b"GET /-/healthz HTTP/1.1\r\nHost: h\r\nExpect: " + expect + b"\r\n\r\n"
    with node.connect() as client:
        client.send(request + request)
        assert (client.answer().status, client.answer().status) == (200, 200)


def test_each_api_words_its_own_errors(node: Node) -> None:
    assert b"<Code>NoSuchBucket</Code>" in node.get("/nowhere/key").body
    answer = node.get("/-/v1/nothing")
    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert b'"kind":"NotFound"' in answer.body


# --- time -------------------------------------------------------------------------------------------------------------
def test_a_slow_loris_is_told_408(tmp_path: Path) -> None:
    with serve(tmp_path, timeouts=QUICK) as node, node.connect() as client:
        client.send(b"GET /b/small HT")
        for _ in range(100):
            try:
                client.send(b"T")
            except OSError:
                break
            time.sleep(0.02)
            if node.snapshot().values['forebay_connections_cut_total{reason="header-timeout"}']:
                break
        assert client.answer().status == 408


def test_a_body_that_stalls_is_told_408(tmp_path: Path) -> None:
    with serve(tmp_path, timeouts=QUICK) as node, node.connect() as client:
        client.send(head("/-/v1/evict", "POST", "1.1", "Content-Length: 1000") + b"{")
        assert client.answer().status == 408


def test_an_idle_connection_is_closed_without_a_word(tmp_path: Path) -> None:
    with serve(tmp_path, timeouts=QUICK) as node, node.connect() as client:
        assert client.ask("/-/healthz").status == 200
        assert client.rest() == b""


def test_a_client_that_stops_reading_is_cut_and_its_file_let_go(tmp_path: Path, eventually: Eventually) -> None:
    with serve(tmp_path, timeouts=QUICK) as node:
        node.put("big", bytes(40_000_000))  # before there is a connection, whose patience it may outlast
        with node.connect() as client:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.send(head("/b/big"))
            eventually(lambda: node.snapshot().values['forebay_connections_cut_total{reason="stall"}'] == 1)
            eventually(lambda: not node.front.server.connections)
            assert len(client.rest()) < 40_000_000
        assert all(leased._uses == 0 for leased in node.front._store._files.values())


class LateClock:
    """The time is what it was when it was made, and as much later as is said."""

    def __init__(self) -> None:
        self.began_s, self.later_s = time.monotonic(), 0.0

    wall_s = staticmethod(time.time)

    def monotonic_s(self) -> float:
        return self.began_s + self.later_s


def acknowledged(connection: Connection) -> int:
    """How much of the file the server's kernel knows the client to have, at least."""
    sent = connection._file_offset
    (held,) = struct.unpack("i", fcntl.ioctl(connection._fd, termios.TIOCOUTQ, b"\0\0\0\0"))
    return sent - int(held)


def test_a_slow_reader_that_goes_on_is_not_cut(tmp_path: Path, eventually: Eventually) -> None:
    """Time passes only when the reader has read: the machine's own pauses are not the reader's."""
    with serve(tmp_path, timeouts=QUICK) as node, node.connect() as client:
        data = os.urandom(12_000_000)
        node.put("big", data)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.send(head("/b/big"))
        server = node.front.server
        eventually(lambda: server.connections)
        [connection] = server.connections
        server.clock = late = LateClock()
        received = b""
        while late.later_s < 4 * QUICK.stall_s:
            before = acknowledged(connection)
            received += client.sock.recv(300_000, socket.MSG_WAITALL)  # more than makes a window open
            eventually(lambda before=before: acknowledged(connection) > before)  # busy cores tell the server late
            late.later_s += QUICK.stall_s / 2
            eventually(lambda: server.now_s == late.monotonic_s())  # the server has looked
        client.buffer = received
        assert client.answer().body == data


@pytest.mark.parametrize("sent", [b"", b"GET /b/k HTTP/1.1\r\n"])
def test_a_front_that_did_not_run_for_long_cuts_no_client_for_it(
    tmp_path: Path, eventually: Eventually, sent: bytes
) -> None:
    """What a client sent meanwhile waits in the kernel, and a connection seemed to be idle all the time."""
    with serve(tmp_path) as node, node.connect() as client:
        node.put("k", b"value")
        client.send(sent)
        server = node.front.server
        eventually(lambda: server.connections)
        server.clock = late = LateClock()
        for _ in range(2):
            late.later_s += 300.0
            eventually(lambda: server.now_s == late.monotonic_s())
        client.send(head("/b/k")[len(sent) :])
        assert client.answer().body == b"value"


# --- ends -------------------------------------------------------------------------------------------------------------
def test_clients_that_vanish_leave_nothing_behind(node: Node, eventually: Eventually) -> None:
    node.put("big", bytes(30_000_000))
    node.engine.cold["b", "cold"] = Cold(bytes(30_000_000), hold_at=5_000_000)
    assert node.get("/b/big").status == 200  # its file stays open from here on
    eventually(lambda: not node.front.server.connections)
    before = open_files()
    for number in range(30):
        client = node.connect()
        if number % 3 == 0:
            client.send(head("/b/big"))
            client.until(b"\r\n\r\n")
        elif number % 3 == 1:
            client.send(head("/b/cold"))
            client.until(b"\r\n\r\n")
        else:
            client.send(head("/-/v1/evict", "POST", "1.1", "Content-Length: 1000") + b"half")
        if number % 2:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sock.close()
    eventually(lambda: not node.front.server.connections)
    eventually(lambda: node.front.link.waiting == 0)
    eventually(lambda: open_files() <= before)
    assert node.snapshot().values["forebay_reads_waiting"] == 0
    assert node.snapshot().values["forebay_connections_open"] == 0


def test_a_client_that_shuts_its_side_still_gets_a_hit(node: Node) -> None:
    data = os.urandom(8_000_000)
    node.put("big", data)
    with node.connect() as client:
        client.send(head("/b/big"))
        client.sock.shutdown(socket.SHUT_WR)
        assert client.answer().body == data
        assert client.rest() == b""


def test_too_many_connections_are_told_so(node: Node, eventually: Eventually) -> None:
    node.front.server.admission.connections_max = 2
    with node.connect() as one, node.connect() as two:
        assert one.ask("/-/healthz").status == two.ask("/-/healthz").status == 200
        with node.connect() as three:
            whole = three.rest()
            assert whole.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1" in whole
    eventually(lambda: not node.front.server.connections)
    assert node.get("/-/healthz").status == 200


def test_stopping_finishes_what_is_under_way(node: Node) -> None:
    data = os.urandom(1_000_000)
    node.engine.cold["b", "cold"] = cold = Cold(data, hold_at=500_000)
    with node.connect() as idle, node.connect() as busy:
        assert idle.ask("/-/healthz").status == 200
        busy.send(head("/b/cold"))
        busy.until(b"\r\n\r\n")
        stopping = threading.Thread(target=lambda: node.run(node.front.server.stop(10.0)))
        stopping.start()
        assert idle.rest() == b""
        cold.release.set()
        assert busy.rest().endswith(data[-100:])
        stopping.join()
    with pytest.raises(OSError):
        Client(socket.create_connection(("127.0.0.1", node.port), timeout=90))


def test_stopping_does_not_wait_for_ever(node: Node) -> None:
    node.engine.cold["b", "cold"] = Cold(bytes(1_000_000), hold_at=500_000)
    with node.connect() as busy:
        busy.send(head("/b/cold"))
        busy.until(b"\r\n\r\n")
        node.run(node.front.server.stop(0.1))
        assert len(busy.rest()) < 1_000_000
        assert not node.front.server.connections


def test_a_port_in_use_is_said_plainly() -> None:
    from forebay.core.errors import Invalid

    taken = listen("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(Invalid, match="choose another --listen"):
        listen("127.0.0.1", taken.getsockname()[1])
    taken.close()


def test_empty_lines_before_a_request_cost_their_length(node: Node) -> None:
    """Each was taken off by a copy of all that followed."""
    node.put("small", b"tiny")
    with node.connect() as client:
        for _ in range(2):
            client.send(b"\r\n" * (2 << 20) + head())
            assert client.answer().body == b"tiny"
