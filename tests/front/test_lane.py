"""The fast lane and the chain it spares answer the same requests with the same bytes."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from forebay.core.messages import wire
from forebay.node.front.objects.fast_lane import Lane
from tests.front.fake_engine import Cold, Node

_CHANGING = re.compile(rb"(Date: |x-amz-request-id: |<RequestId>)[^\r<]*")


def answers(node: Node, requests: list[bytes]) -> list[bytes]:
    """What each request is answered with, the first time on a connection and again when its fields are remembered."""
    found = []
    for request in requests:
        with node.connect() as client:
            for _ in range(2):
                client.send(request)
                answer = client.answer(request.split(b" ")[0].decode())
                found.append(_CHANGING.sub(rb"\1", answer.raw_head + answer.body))
    return found


def plain(target: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", *more, "", ""]).encode()


def test_both_ways_answer_alike(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.put("small", b"tiny")
    node.put("empty", b"")
    node.put("dir/with/slashes//and..", b"deep")
    node.put("big", os.urandom(50_000))
    node.put("ü", b"umlaut")
    node.put("x" * 1024, b"longest")
    node.put("x" * 1021, b"the longest that the lane takes")
    node.engine.cold["b", "cold"] = Cold(b"cold" * 10_000)
    targets = [
        "/b/small",
        "/b/empty",
        "/b/dir/with/slashes//and..",
        "/b/big",
        "/b/%C3%BC",
        "/b/small?x-id=GetObject",
        "/b/small?acl",
        "/b/missing",
        "/b/cold",
        "/b",
        "/b/sm%2",
        "/strict/none",
        "/nowhere/small",
        "//small",
        "/b//small",
        "/-/v1/objects/b/small",
        "/b/small%00",
    ]
    targets += ["/b/" + "x" * length for length in (1021, 1024, 1025)]
    requests = [plain(target, "Host: localhost") for target in targets]
    requests += [
        plain("/b/small", "Host: localhost", field)
        for field in ("Range: bytes=1-2", 'If-None-Match: "etag-v1"', "Authorization: x", "Accept: a", "X-New: b")
    ]
    requests += [plain("/small", "Host: b.localhost"), plain("/small", "Host: b.s3.localhost:9400")]
    requests += [plain("/b/small", f"Host: {host}") for host in ("evil.example", "127.0.0.1:9400", "[::1]", "")]
    requests += [request.replace(b"GET", b"HEAD", 1) for request in requests[:6]]
    served: list[bool] = []
    serve = Lane.serve

    def watched(self: Lane, connection: Any, target: bytes) -> bool:
        served.append(serve(self, connection, target))
        return served[-1]

    monkeypatch.setattr(Lane, "serve", watched)
    by_lane = answers(node, requests)
    assert sum(served) >= 5, "the lane was not used"
    monkeypatch.setattr(Lane, "serve", lambda self, connection, target: False)
    assert answers(node, requests) == by_lane


def test_pipelined_hits_leave_the_lane_in_order(node: Node) -> None:
    for number in range(5):
        node.put(f"k{number}", b"%d" % number)
    with node.connect() as client:
        for _ in range(3):
            client.send(b"".join(plain(f"/b/k{number}", "Host: localhost") for number in range(5)))
            assert [client.answer().body for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]


def test_identities_close_the_lane(node: Node) -> None:
    from forebay.core.access import Identity, encode_identities

    node.put("small", b"tiny")
    with node.connect() as client:
        assert [client.ask("/b/small").status for _ in range(2)] == [200, 200]
        node.engine.identities = encode_identities([Identity("ann", "AKIDAKIDAKIDAKID", "s" * 40)])
        node.call(lambda: node.engine.say(node.engine.welcome()))
        while not node.seen(wire.Hello):
            pass
        statuses = [client.ask("/b/small").status for _ in range(200)]
        assert statuses[-1] == 403


def test_a_name_that_is_not_the_nodes_is_never_served_here(node: Node) -> None:
    """Also when the connection remembers its fields, and when another sends the same request under a right name."""
    node.put("k", b"secret")
    request = plain("/b/k", "Host: evil.example:9400")
    with node.connect() as client, node.connect() as other:
        for _ in range(3):
            client.send(request)
            answer = client.answer()
            assert (answer.status, b"secret" in answer.body) == (403, False)
        other.send(plain("/b/k", "Host: localhost"))
        assert other.answer().body == b"secret"


def test_a_large_hit_may_be_inline_and_slow_to_send(node: Node) -> None:
    """An answer of the lane that the socket does not take at once is finished later, in order."""
    data = os.urandom(16_000)
    node.put("small", data)
    with node.connect() as client:
        client.ask("/b/small")
        client.send(plain("/b/small", "Host: localhost") * 2000)
        assert all(client.answer().body == data for _ in range(2000))
