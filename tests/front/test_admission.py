"""What a client may hold before anybody knows who it is: connections by address, and bytes; and what is said of it."""

from __future__ import annotations

import hashlib
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core import limits
from forebay.core.access import Identity, encode_identities, parse_grants
from forebay.core.errors import Busy
from forebay.node.front.http.admission import SAY_EVERY_S, Admission
from forebay.node.front.http.counts import FrontCounts
from forebay.node.front.http.parser import Chunked
from tests.front.fake_engine import Client, Node, serve

Eventually = Callable[[Callable[[], bool]], None]
TOKEN = "a-token"


def keyed(node: Node, grants: str = "write:b") -> None:
    """Have the node know one identity."""
    identity = Identity(
        "i", "AKID", "secret", token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest(), grants=parse_grants(grants)
    )
    node.call(lambda: node.front._auth.update(encode_identities([identity])))


# --- connections ------------------------------------------------------------------------------------------------------
def test_one_address_holds_its_share_and_others_come_in() -> None:
    counts = FrontCounts()
    admission = Admission(counts, 4, 0.5)
    for peer in ("10.0.0.1", "10.0.0.1"):
        admission.enter(peer)
    with pytest.raises(Busy, match="connections_share"):
        admission.enter("10.0.0.1")
    for peer in ("10.0.0.2", "10.0.0.3"):
        admission.enter(peer)
    with pytest.raises(Busy, match="this front has as many"):
        admission.enter("10.0.0.4")
    assert (counts.connections_refused, counts.connections_over_share) == (2, 1)
    admission.leave("10.0.0.1")
    admission.enter("10.0.0.4")
    with pytest.raises(Busy):
        admission.enter("10.0.0.4")
    for peer in ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"):
        admission.leave(peer)
    assert admission._of == {}


def test_an_ipv6_client_is_its_network_and_a_mapped_one_its_ipv4_address() -> None:
    admission = Admission(FrontCounts(), 4, 0.5)
    for peer in ("2001:db8::1", "2001:db8::2:3"):
        admission.enter(peer)
    with pytest.raises(Busy):
        admission.enter("2001:db8::4")
    admission.enter("2001:db8:0:1::1")
    admission.enter("fe80::1%eth0")
    other = Admission(FrontCounts(), 4, 0.25)
    other.enter("::ffff:10.0.0.1")
    with pytest.raises(Busy):
        other.enter("10.0.0.1")


def test_with_a_share_of_all_one_address_may_hold_them_all() -> None:
    admission = Admission(FrontCounts(), 4, 1.0)
    for _ in range(4):
        admission.enter("10.0.0.1")


def test_refusals_are_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(FrontCounts(), 2, 0.5, bytes_max=10)
    caplog.set_level(logging.WARNING)
    admission.say(0.0)
    assert caplog.messages == []
    admission.enter("10.0.0.1")
    for now_s in (1.0, 2.0, SAY_EVERY_S):
        with pytest.raises(Busy):
            admission.enter("10.0.0.1")
        admission.say(now_s)
    assert len(caplog.messages) == 1
    assert "10.0.0.1" in caplog.messages[0]
    assert not admission.hold("10.0.0.1", 11)
    admission.say(SAY_EVERY_S + 1.0)
    assert len(caplog.messages) == 3
    assert caplog.messages[1].startswith("2 connections from 1 addresses")
    assert caplog.messages[2].startswith("1 requests were refused")


def test_a_client_that_holds_its_share_is_told_so(tmp_path: Path, eventually: Eventually) -> None:
    with serve(tmp_path, connections_share=2 / limits.CONNECTIONS_MAX) as node:
        with node.connect() as one, node.connect() as two:
            assert one.ask("/-/healthz").status == two.ask("/-/healthz").status == 200
            with node.connect() as three:
                whole = three.rest()
            assert whole.startswith(b"HTTP/1.1 503 ")
            assert b"connections_share" in whole
            values = node.snapshot().values
            assert values["forebay_connections_over_share_total"] == 1
            assert values["forebay_connections_refused_total"] == 1
        eventually(lambda: not node.front.server.connections)
        assert node.get("/-/healthz").status == 200


def test_one_address_holds_its_share_of_the_bytes() -> None:
    admission = Admission(FrontCounts(), bytes_max=100, share=0.5)
    assert admission.hold("10.0.0.1", 50)
    assert not admission.hold("10.0.0.1", 1)
    assert admission.hold("10.0.0.2", 50)
    assert not admission.hold("10.0.0.3", 1)
    assert admission.hold("10.0.0.1", -50)
    assert admission.hold("10.0.0.3", 1)
    for peer, held in (("10.0.0.2", 50), ("10.0.0.3", 1)):
        assert admission.hold(peer, -held)
    assert (admission.held_bytes, admission._bytes_of) == (0, {})


# --- bytes ------------------------------------------------------------------------------------------------------------
def test_heads_that_do_not_end_share_one_budget(node: Node, eventually: Eventually) -> None:
    admission = node.front.server.admission
    admission.bytes_max = 100_000  # half of it for one address
    part = b"GET /b/k HTTP/1.1\r\nX: " + b"x" * 20_000
    with node.connect() as one, node.connect() as two, node.connect() as three:
        one.send(part)
        two.send(part)
        eventually(lambda: admission.held_bytes == 2 * len(part))
        three.send(part)
        refused = three.answer()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert node.get("/-/healthz").status == 200, "who sends a whole request needs none of it"
        one.send(b"\r\nHost: localhost\r\n\r\n")
        assert one.answer().status == 404
        eventually(lambda: admission.held_bytes == len(part))
    eventually(lambda: admission.held_bytes == 0)


def test_what_is_pipelined_waits_in_the_socket_when_the_budget_is_used(node: Node, eventually: Eventually) -> None:
    from tests.front.fake_engine import Cold

    node.put("small", b"tiny")
    node.engine.cold["b", "slow"] = slow = Cold(b"s" * 1000, hold_at=1)
    node.front.server.admission.bytes_max = 10
    with node.connect() as client:
        client.send(b"GET /b/slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(node.seen_reads("slow")) == 1)
        for _ in range(10):
            client.send(b"GET /b/small HTTP/1.1\r\nHost: localhost\r\n\r\n")
        (connection,) = node.front.server.connections
        eventually(lambda: connection._paused)
        slow.release.set()
        assert client.answer().body == b"s" * 1000
        for _ in range(10):
            assert client.answer().body == b"tiny"
    eventually(lambda: node.front.server.admission.held_bytes == 0)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/-/v1/buckets/b"),
        ("POST", "/-/v1/evict"),
        ("POST", "/-/v1/batch"),
        ("POST", "/-/v1/copy/b/k"),
        ("POST", "/-/v1/lost/give-up"),
        ("GET", "/-/v1/status"),
        ("PUT", "/b/k"),
        ("POST", "/b?delete"),
    ],
)
def test_who_is_nobody_is_refused_before_the_body(node: Node, method: str, target: str) -> None:
    keyed(node)
    with node.connect() as client:
        client.send(
            f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000\r\nExpect: 100-continue\r\n\r\n"
            .encode()
        )  # fmt: skip
        assert client.answer().status == 403, "not 100: the body is not asked for"


def test_a_body_where_none_has_a_meaning_is_short(node: Node) -> None:
    keyed(node)
    node.put("k", b"tiny")
    for target, status in (("/-/healthz", 200), ("/b/k", 403)):
        for size, expected in ((1000, status), (limits.STRAY_BODY_BYTES_MAX + 1, 413)):
            with node.connect() as client:
                answer = client.ask(target, body=b"x" * size)
                assert answer.status in (expected, 400 if expected == 413 else expected), (target, size)


def chunks(size: int, count: int) -> bytes:
    return (b"%x\r\n" % size + b"x" * size + b"\r\n") * count


def test_a_body_costs_its_bytes_however_small_its_chunks_are(node: Node) -> None:
    """A list of parts held 45 bytes for each, and each was written on its own."""
    head = b"PUT /-/v1/buckets/b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = chunks(2, 60_000)
    with node.connect() as client:
        tracemalloc.start()
        try:
            client.send(head + body)
            client.send(b"0\r\n\r\n")
            assert client.answer().status == 400  # it is no JSON
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 3_000_000, "64 KiB are read at a time, as 9,362 pieces at most"


def test_chunks_of_two_bytes_are_refused_when_they_go_on(node: Node) -> None:
    with node.connect() as client:
        client.send(b"PUT /b/k HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(2, 90_000))
        assert client.answer().status == 400
    whole = Chunked()
    pieces, _ = whole.feed(chunks(100, 20_000) + chunks(1, 10_000) + b"0\r\n\r\n")
    assert (sum(map(len, pieces)), whole.done) == (2_010_000, True)


def test_a_form_counts_until_its_policy_is_there(node: Node, eventually: Eventually) -> None:
    keyed(node)
    admission = node.front.server.admission
    start = (
        b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        b'Content-Length: 900000\r\n\r\n--x\r\nContent-Disposition: form-data; name="key"\r\n\r\n'
    )
    with node.connect() as client:
        client.send(start + b"k" * 1000)
        eventually(lambda: admission.held_bytes >= 1000)
        admission.bytes_max = 2000
        client.send(b"k" * 3000)
        assert client.answer().status in (400, 503)
    eventually(lambda: admission.held_bytes == 0)


def test_a_client_cut_in_the_middle_gives_back_what_it_held(node: Node, eventually: Eventually) -> None:
    admission = node.front.server.admission
    clients: list[Client] = [node.connect() for _ in range(5)]
    for client in clients:
        client.send(b"GET /b/k HTTP/1.1\r\nX: " + b"x" * 5000)
    eventually(lambda: admission.held_bytes > 25_000)
    for client in clients:
        client.sock.close()
    eventually(lambda: admission.held_bytes == 0 and not admission._of)
