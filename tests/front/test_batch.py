"""Batches at a front: hits of every size, what must be asked for, what cannot be had, and what breaks midway."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from forebay.core import limits
from forebay.core.access import Grant, Identity, encode_identities
from forebay.core.errors import Denied, ErrorOnWire, Unavailable
from forebay.core.messages import batch, wire
from forebay.core.messages.batch import FRAME, BatchCall, Item
from forebay.core.types import RangeSpec
from forebay.node.front.batch import batches, plan
from tests.front.fake_engine import Answer, Client, Cold, Node, serve
from tests.node.certificates import make

Eventually = Callable[[Callable[[], bool]], None]
BLOCK = limits.BLOCK_BYTES


class Frame(NamedTuple):
    status: int
    cold: bool
    total: int
    body: bytes

    @property
    def error(self) -> ErrorOnWire:
        return msgspec.msgpack.decode(self.body, type=ErrorOnWire)


def frames(body: bytes) -> list[Frame]:
    """The answer taken apart the slow way."""
    found = []
    while body:
        status, flags, zero, size, total = FRAME.unpack(body[: FRAME.size])
        assert zero == 0
        assert flags & ~batch.COLD == 0
        found.append(Frame(status, bool(flags), total, body[FRAME.size : FRAME.size + size]))
        assert len(found[-1].body) == size
        body = body[FRAME.size + size :]
    return found


def send(client: Client, items: list[Any], form: str = "frames", token: str = "") -> None:
    body = msgspec.msgpack.encode({"items": items, "format": form})
    proof = f"Authorization: Bearer {token}\r\n" if token else ""
    client.send(
        f"POST /-/v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n{proof}"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def ask(node: Node, *items: Any, token: str = "") -> tuple[Answer, list[Frame]]:
    with node.connect() as client:
        send(client, list(items), token=token)
        answer = client.answer()
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == batch.MEDIA
        send(client, [("b", "nothing")])  # the connection is as good as before
        assert client.answer().status == (200 if not token else 403)
        return answer, frames(answer.body)


def bodies(found: list[Frame]) -> list[bytes]:
    assert all(frame.status == 200 for frame in found)
    return [frame.body for frame in found]


# --- hits -------------------------------------------------------------------------------------------------------------
def test_hits_of_every_size_come_in_order_with_a_length(node: Node) -> None:
    sizes = [0, 1, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, batches.SMALL_BYTES_MAX, 300_000, BLOCK + 9]
    data = {f"o{size}": os.urandom(size) for size in sizes}
    for key, body in data.items():
        node.put(key, body)
    items = [("b", key) for key in data] * 2
    answer, found = ask(node, *items)
    assert answer.headers["content-length"] == str(len(answer.body))
    assert bodies(found) == list(data.values()) * 2
    assert [frame.total for frame in found] == [len(body) for body in data.values()] * 2
    assert not any(frame.cold for frame in found)
    assert {read.key for read in node.seen(wire.OpenRead)} == {"nothing"}
    values = node.snapshot().values
    assert values['forebay_batch_items_total{result="hit"}'] == values['forebay_reads_total{result="hit"}'] == 14
    assert values["forebay_batch_bytes_total"] == 2 * sum(sizes)
    assert values["forebay_batches_total"] == 2


def test_ranges_are_those_bytes_and_past_the_end_is_the_end(node: Node) -> None:
    data = os.urandom(2 * BLOCK + 77)
    small = os.urandom(1000)
    node.put("large", data)
    node.put("small", small)
    cuts = [0, 1, 999, BLOCK - 1, BLOCK, BLOCK + 10_240, 2 * BLOCK + 76]
    spans = [(start, start + size) for start in cuts for size in (1, 10_240, 65_536, 65_537, 200_000)]
    items = [("b", "large", start, end) for start, end in spans] + [("b", "small", 10, 20), ("b", "small", 990)]
    _, found = ask(node, *items)
    assert bodies(found) == [data[start:end] for start, end in spans] + [small[10:20], small[990:]]
    assert {frame.total for frame in found[:-2]} == {len(data)}


def test_many_more_bytes_than_one_write_takes(node: Node) -> None:
    """Small and large ones mixed, read slowly: nothing is lost at the seams."""
    data = os.urandom(8 * BLOCK)
    node.put("o", data)
    spans = [(at * 7919, at * 7919 + (at * 37) % 150_000 + 1) for at in range(600)]
    with node.connect() as client:
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 20_000)
        send(client, [("b", "o", start, end) for start, end in spans])
        assert bodies(frames(client.answer().body)) == [data[start:end] for start, end in spans]


def test_more_files_than_a_batch_may_hold_and_more_inline_bytes_than_it_keeps(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "HELD_MAX", 3)
    monkeypatch.setattr(plan, "INLINE_BYTES_KEPT_MAX", 5000)
    data = {f"k{at}": os.urandom(20_000 if at % 2 else 1000 + at) for at in range(40)}
    for key, body in data.items():
        node.put(key, body)
    items = [("b", key) for key in data] + [("b", key, 5, 500) for key in data]
    answer, found = ask(node, *items)
    assert "content-length" in answer.headers
    assert bodies(found) == list(data.values()) + [body[5:500] for body in data.values()]
    assert node.call(lambda: len(node.front._store._idle)) == 20, "all leases are given back"


def test_hits_are_reported_once_for_each_block(node: Node, eventually: Eventually) -> None:
    node.put("small", b"tiny")
    node.put("big", bytes(3 * BLOCK))
    ask(node, *[("b", "small")] * 20, *[("b", "big", BLOCK - 5, BLOCK + 5)] * 20)
    small, big = node.record("small").object_id, node.record("big").object_id

    def reported() -> set[tuple[int, int, int]]:
        flat = [number for message in node.seen(wire.Touched) for number in message.hits]
        return {tuple(flat[at : at + 3]) for at in range(0, len(flat), 3)}  # type: ignore[misc]

    eventually(lambda: reported() == {(small, 0, 1), (big, 0, 2)})


def test_json_asks_as_well(node: Node) -> None:
    node.put("o", b"0123456789")
    with node.connect() as client:
        answer = client.ask("/-/v1/batch", "POST", b'{"items": [["b", "o", 2, 4], ["b", "o", 8, null], ["b", "o"]]}')
    assert bodies(frames(answer.body)) == [b"23", b"89", b"0123456789"]


# --- what is not here -------------------------------------------------------------------------------------------------
def test_cold_items_come_in_their_places(node: Node) -> None:
    data = {f"k{at}": os.urandom(size) for at, size in enumerate((50, 300_000, 40_000, 0, 16_000, 700_000, 9))}
    for at, (key, body) in enumerate(data.items()):
        if at % 2:
            node.engine.cold["b", key] = Cold(body, whole=len(body) <= 16_384)
        else:
            node.put(key, body)
    answer, found = ask(node, *[("b", key) for key in data], ("b", "k5", 100_000, 400_000), ("b", "k5", 5, 6))
    assert answer.headers["transfer-encoding"] == "chunked"
    assert bodies(found) == [*data.values(), data["k5"][100_000:400_000], data["k5"][5:6]]
    assert [frame.cold for frame in found] == [False, True] * 3 + [False, True, True]
    values = node.snapshot().values
    assert values['forebay_batch_items_total{result="miss"}'] == values['forebay_reads_total{result="miss"}'] == 5
    assert values["forebay_reads_waiting"] == 0


def test_the_next_ones_are_asked_for_ahead_and_out_of_turn_is_fine(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BATCH_COLD_AHEAD", 8)
    colds = [Cold(os.urandom(100_000 + at), hold_at=0) for at in range(20)]
    for at, cold in enumerate(colds):
        node.engine.cold["b", f"k{at}"] = cold
    with node.connect() as client:
        send(client, [("b", f"k{at}") for at in range(20)])
        eventually(lambda: len(node.seen(wire.OpenRead)) == 8)
        for cold in reversed(colds):
            cold.release.set()
        assert bodies(frames(client.answer().body)) == [cold.data for cold in colds]
    eventually(lambda: len(node.seen(wire.CloseRead)) == 20)


def test_a_slow_client_holds_the_engine_up(node: Node, eventually: Eventually) -> None:
    """What was not taken is not consumed, so the engine's windows close; nothing piles up here."""
    data = os.urandom(12_000_000)
    node.engine.cold["b", "o"] = Cold(data, piece_bytes=500_000)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        sock.settimeout(90)
        sock.connect(("127.0.0.1", node.port))
        client = Client(sock)
        send(client, [("b", "o"), ("b", "o")])
        client.until(b"\r\n\r\n")

        def consumed() -> int:
            return max((message.position for message in node.seen(wire.Consumed)), default=0)

        eventually(lambda: consumed() > 0)
        assert consumed() < len(data), "megabytes are on their way to a client that took a few bytes"
        body = b"".join(client._chunks())
    assert bodies(frames(body)) == [data, data]


def test_what_changed_or_is_denied_or_missing_is_said_in_place(node: Node) -> None:
    node.put("warm", bytes(100_000))
    node.put("empty", b"")
    node.engine.cold["b", "cold"] = Cold(b"cold" * 10_000)
    node.engine.cold["b", "shut"] = Cold(b"", error=Denied("the backend refuses: check its credentials"))
    node.engine.cold["b", "down"] = Cold(b"", error=Unavailable("the backend is down: try later", retry_after_s=7.0))
    wanted: list[tuple[Any, int, str]] = [
        (Item("b", "warm", 0, 3), 200, ""),
        (Item("b", "warm", 0, 3, etag="etag-v1"), 200, ""),
        (Item("b", "warm", 0, 3, etag="other"), 412, "PreconditionFailed"),
        (Item("b", "cold", 0, 3, etag="etag-v1"), 200, ""),
        (Item("b", "cold", etag="other"), 412, "PreconditionFailed"),
        (Item("b", "nothing"), 404, "NoSuchKey"),
        (Item("nowhere", "o"), 404, "NoSuchBucket"),
        (Item("b", "shut"), 403, ""),
        (Item("b", "down"), 503, ""),
        (Item("b", "warm", 100_000), 416, "InvalidRange"),
        (Item("b", "warm", 7, 7), 416, "InvalidRange"),
        (Item("b", "warm", -1, 7), 416, "InvalidRange"),
        (Item("b", "warm", 8, 7), 416, "InvalidRange"),
        (Item("b", "cold", 40_000), 416, "InvalidRange"),
        (Item("b", "cold", 9, 9), 416, "InvalidRange"),
        (Item("b", "cold", -4), 416, "InvalidRange"),
        (Item("b", "cold", 2**63), 416, "InvalidRange"),
        (Item("b", "empty"), 200, ""),
        (Item("b", "empty", 0, 1), 416, "InvalidRange"),
        (Item("b", ""), 400, "InvalidArgument"),
        (Item("b", "x" * 2000), 400, "KeyTooLongError"),
        (Item("-members", "x"), 400, "InvalidBucketName"),
        (Item("b", "warm", 99_999, 2**62), 200, ""),
    ]
    _, found = ask(node, *[item for item, _, _ in wanted])
    assert [frame.status for frame in found] == [status for _, status, _ in wanted]
    assert [frame.error.code if frame.status != 200 else "" for frame in found] == [code for _, _, code in wanted]
    assert [frame.total for frame in found if frame.status != 200] == [0] * 18
    assert found[8].error == ErrorOnWire("Unavailable", "the backend is down: try later", "", 7.0)
    assert found[9].error.size_bytes == found[3].total + 60_000 == 100_000
    values = node.snapshot().values
    assert values['forebay_batch_items_total{result="failed"}'] == 18 + 1
    assert values["forebay_reads_waiting"] == 0


def test_what_is_not_fresh_or_not_whole_is_the_engines(node: Node) -> None:
    node.put("o", b"old", bucket="strict")
    node.engine.cold["strict", "o"] = Cold(b"new!", "v2", whole=True)
    data = os.urandom(3 * BLOCK)
    node.put("part", data, blocks={0, 2})
    node.engine.cold["b", "part"] = Cold(data)
    spans = [(10, 20), (BLOCK - 5, BLOCK + 5), (2 * BLOCK, 2 * BLOCK + 100_000), (BLOCK, BLOCK + 9)]
    _, found = ask(node, ("strict", "o"), *[("b", "part", start, end) for start, end in spans])
    assert bodies(found) == [b"new!", *[data[start:end] for start, end in spans]]
    assert [read.range for read in node.seen_reads("part")] == [
        RangeSpec(BLOCK - 5, BLOCK + 4),
        RangeSpec(BLOCK, BLOCK + 8),
    ]


def test_each_frame_is_what_a_get_would_have_said(node: Node) -> None:
    """Two ways to the same bytes: random items in one batch, and each with a request of its own."""
    chance = random.Random(11)
    part = os.urandom(2 * BLOCK + 100)
    node.put("inline", os.urandom(9000))
    node.put("file", os.urandom(150_000))
    node.put("part", part, blocks={1})
    node.put("gone", os.urandom(50_000))
    node.data_file("gone").unlink()
    node.put("stale", b"stale" * 900, bucket="strict")
    for bucket, key, data in (
        ("b", "part", part), ("b", "gone", os.urandom(50_000)), ("b", "cold", os.urandom(123_456)),
        ("strict", "stale", b"newer" * 1000),
    ):  # fmt: skip
        node.engine.cold[bucket, key] = Cold(data, "v1")
    names = [("b", key) for key in ("inline", "file", "part", "gone", "cold", "none")] + [
        ("strict", "stale"),
        ("no", "k"),
    ]
    items = []
    for _ in range(150):
        bucket, key = chance.choice(names)
        start = chance.choice((0, 0, 1, 8999, 49_999, BLOCK - 7, BLOCK, 10**7))
        end = chance.choice((None, start + 1, start + 5000, start + 100_000))
        items.append(Item(bucket, key, start, end, etag=chance.choice(("", "", "etag-v1", "etag-v0"))))
    _, found = ask(node, *items)
    with node.connect() as client:
        for item, frame in zip(items, found, strict=True):
            headers = {"Range": f"bytes={item.start}-{'' if item.end is None else item.end - 1}"}
            if item.etag:
                headers["If_Match"] = f'"{item.etag}"'
            said = client.ask(f"/-/v1/objects/{item.bucket}/{item.key}", **headers)
            assert frame.status == (200 if said.status == 206 else said.status), (item, said)
            if frame.status == 200:
                assert frame.body == said.body
                assert said.headers["content-range"].endswith(f"/{frame.total}")
            else:
                assert json.loads(said.body)["error"]["code"] == frame.error.code, item
    assert {frame.status for frame in found} == {200, 400, 404, 412, 416}


def test_each_bucket_asks_for_its_own_grant(node: Node) -> None:
    token_hash = hashlib.sha256(b"t" * 32).hexdigest()
    reader = Identity("ann", token_sha256=token_hash, grants=(Grant("read", "b"),))
    node.put("o", b"hers")
    node.put("o", b"not hers", bucket="strict")
    node.engine.identities = encode_identities([reader])
    node.call(lambda: node.engine.say(node.engine.welcome()))
    with node.connect() as client:
        assert client.ask("/-/healthz").status == 200
        send(client, [("b", "o")])
        assert client.answer().status == 403
    with node.connect() as client:
        send(client, [("b", "o"), ("strict", "o"), ("b", "o"), ("strange", "o")], token="t" * 32)
        found = frames(client.answer().body)
    assert [frame.status for frame in found] == [200, 403, 200, 404]
    assert found[0].body == found[2].body == b"hers"
    assert not node.seen(wire.OpenRead)


# --- what cannot be a batch -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{}", 400, "no batch"),
        (b'{"items": []}', 400, "names no item"),
        (b'{"items": [["b"]]}', 400, "no batch"),
        (b'{"items": [["b", 3]]}', 400, "no batch"),
        (b'{"items": [["b", "k"]], "format": "zip"}', 400, "no batch"),
        (b"\xff\xfe", 400, "no batch"),
        (msgspec.json.encode(BatchCall([Item("b", "k")] * (limits.BATCH_ITEMS_MAX + 1))), 400, "at most 16384"),
    ],
)
def test_what_is_no_batch_is_refused(node: Node, body: bytes, status: int, said: str) -> None:
    with node.connect() as client:
        answer = client.ask("/-/v1/batch", "POST", body)
        assert (answer.status, said in answer.body.decode()) == (status, True)
        assert client.ask("/-/healthz").status == 200


def test_too_long_a_request_is_refused_before_it_is_sent(node: Node) -> None:
    with node.connect() as client:
        size = limits.BATCH_BODY_BYTES_MAX + 1
        client.send(f"POST /-/v1/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode())
        assert client.answer().status == 413
    assert node.get("/-/v1/batch").status == 405


def test_an_answer_has_room_for_so_much_and_says_what_does_not_fit(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BATCH_BYTES_MAX", 50_000)
    node.put("warm", bytes(20_000))
    node.put("large", bytes(60_000))
    answer, found = ask(node, ("b", "warm"), ("b", "large"), ("b", "warm"), ("b", "warm"), ("b", "warm", 0, 9))
    assert "content-length" in answer.headers
    assert [(frame.status, len(frame.body) if frame.status == 200 else frame.error.code) for frame in found] == [
        (200, 20_000),
        (400, batch.FULL),
        (200, 20_000),
        (400, batch.FULL),
        (200, 9),
    ]
    node.engine.cold["b", "cold"] = Cold(bytes(20_000))
    _, found = ask(node, ("b", "cold"), ("b", "cold"), ("b", "cold"), ("b", "cold", 0, 9))
    assert [frame.status for frame in found] == [200, 200, 400, 200]
    assert found[2].error.code == batch.FULL


# --- what breaks midway -----------------------------------------------------------------------------------------------
def test_an_error_in_the_middle_of_an_item_cuts(node: Node, eventually: Eventually) -> None:
    node.put("warm", b"warm")
    data = os.urandom(500_000)
    node.engine.cold["b", "breaks"] = Cold(data, fail_at=250_000)
    node.engine.cold["b", "after"] = Cold(data)
    with node.connect() as client:
        send(client, [("b", "warm"), ("b", "breaks"), ("b", "after")])
        client.until(b"\r\n\r\n")
        with pytest.raises((EOFError, ConnectionResetError)):
            b"".join(client._chunks())
    values = node.snapshot().values
    assert values['forebay_connections_cut_total{reason="error"}'] == 1
    asked = {read.read for key in ("breaks", "after") for read in node.seen_reads(key)}
    eventually(lambda: closed(node) == asked)


def closed(node: Node) -> set[int]:
    return {message.read for message in node.seen(wire.CloseRead)}


def test_a_client_that_goes_lets_everything_go(node: Node, eventually: Eventually) -> None:
    for at in range(5):
        node.engine.cold["b", f"k{at}"] = Cold(bytes(100_000), hold_at=50_000)
    node.put("file", bytes(100_000))
    with node.connect() as client:
        send(client, [("b", "file", 0, 10), *[("b", f"k{at}") for at in range(5)]])
        eventually(lambda: len(node.seen(wire.OpenRead)) == 5)
    eventually(lambda: len(closed(node)) == 5)
    eventually(lambda: node.snapshot().values["forebay_reads_waiting"] == 0)
    assert node.call(lambda: len(node.front._store._idle)) == 1, "the lease is given back"


@pytest.mark.parametrize("size", [30_000, 100_000])
def test_a_file_that_is_short_is_finished_by_the_engine(node: Node, eventually: Eventually, size: int) -> None:
    data, other = os.urandom(size), os.urandom(size)
    node.put("short", data)
    node.put("other", other)
    assert node.get("/b/short").body == data, "compared: what happens to it afterwards shows only when it is sent"
    os.truncate(node.data_file("short"), 20_000)
    node.engine.cold["b", "short"] = Cold(data)
    answer, found = ask(node, ("b", "other"), ("b", "short"), ("b", "other"))
    assert "content-length" in answer.headers
    assert bodies(found) == [other, data, other]
    assert found[1].cold is (size == 30_000), "the head of the other left with what the file had"
    eventually(lambda: len(node.seen(wire.Suspect)) == 1)


@pytest.mark.parametrize("size", [30_000, 100_000])
@pytest.mark.parametrize("cold", [False, True])
def test_a_file_that_is_short_of_a_version_that_is_gone_cuts(node: Node, size: int, cold: bool) -> None:
    """Its size was announced: another version's bytes would not do, and an error would not fit."""
    data = os.urandom(size)
    node.put("short", data)
    assert node.get("/b/short").body == data, "compared: what happens to it afterwards shows only when it is sent"
    os.truncate(node.data_file("short"), 20_000)
    node.engine.cold["b", "short"] = Cold(os.urandom(size), "v2")
    node.engine.cold["b", "cold"] = Cold(b"cold", whole=True)
    with node.connect() as client:
        send(client, [("b", "short"), *([("b", "cold")] if cold else [])])
        if cold and size == 30_000:  # nothing was announced: the new version is as good
            assert len(frames(client.answer().body)[0].body) == size
        else:
            whole = client.rest()
            assert len(whole) < 21_000, "no more than its file had"
            assert size == 30_000 or data[:20_000] in whole
    assert node.get("/-/healthz").status == 200


def test_an_evicted_file_comes_from_the_engine_whole(node: Node) -> None:
    data = os.urandom(100_000)
    node.put("o", data)
    node.data_file("o").unlink()
    node.engine.cold["b", "o"] = Cold(data)
    _, found = ask(node, ("b", "o"), ("b", "o", 5, 10))
    assert bodies(found) == [data, data[5:10]]


def test_without_an_engine_hits_are_served_and_the_rest_says_503_without_waiting_each(
    tmp_path: Path, eventually: Eventually
) -> None:
    with serve(tmp_path, grace_s=0.3) as node:
        node.put("o", b"here")
        node.run(node.engine.stop())
        eventually(lambda: not node.front.link.connected)
        with node.connect() as client:
            send(client, [("b", "o"), *[("b", f"cold{at}") for at in range(100)], ("b", "o")])
            found = frames(client.answer().body)  # 100 waits in turn would be 30 s
    assert [frame.status for frame in found] == [200] + [503] * 100 + [200]
    assert found[1].error.kind == "Unavailable"


def test_an_engine_that_restarts_within_the_grace_is_not_noticed(tmp_path: Path, eventually: Eventually) -> None:
    with serve(tmp_path, grace_s=5.0) as node:
        node.engine.cold["b", "cold"] = Cold(b"cold", whole=True)
        node.run(node.engine.stop())
        eventually(lambda: not node.front.link.connected)
        with node.connect() as client:
            send(client, [("b", "cold")] * 3)
            node.run(node.engine.start())
            assert bodies(frames(client.answer().body)) == [b"cold"] * 3


def test_an_engine_that_dies_fails_what_is_not_open_in_place(node: Node, eventually: Eventually) -> None:
    for at in range(3):
        node.engine.cold["b", f"k{at}"] = Cold(b"", silent=True)
    node.put("o", b"here")
    with node.connect() as client:
        send(client, [("b", "nothing"), *[("b", f"k{at}") for at in range(3)], ("b", "o")])
        eventually(lambda: len(node.seen(wire.OpenRead)) == 4)
        node.run(node.engine.stop())
        found = frames(client.answer().body)
    assert [frame.status for frame in found] == [404, 503, 503, 503, 200]


def test_an_engine_that_dies_cuts_what_is_open(node: Node) -> None:
    node.engine.cold["b", "o"] = Cold(bytes(100_000), hold_at=50_000, piece_bytes=50_000)
    with node.connect() as client:
        send(client, [("b", "o")])
        client.until(b"\r\n\r\n")
        assert sum(len(next(chunks)) for chunks in [client._chunks()] for _ in range(2)) == FRAME.size + 50_000
        node.run(node.engine.stop())
        assert client.rest() in (b"", b"\r\n"), "the end of its last chunk, at most"


def test_memory_that_is_held_ahead_is_given_up_for_what_is_due(
    node: Node, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without a disk promises memory first come, first served: the item that is due may be behind."""
    monkeypatch.setattr(batches, "PATIENCE_S", 0.05)
    due = Cold(os.urandom(50_000), hold_at=0)
    ahead = Cold(os.urandom(80_000), memory=True)
    node.engine.cold["b", "due"], node.engine.cold["b", "ahead"] = due, ahead
    with node.connect() as client:
        send(client, [("b", "due"), ("b", "ahead")])

        def given_up() -> bool:
            return {read.read for read in node.seen_reads("ahead")} <= closed(node) and bool(closed(node))

        eventually(given_up)
        due.release.set()
        assert bodies(frames(client.answer().body)) == [due.data, ahead.data]
    assert len(node.seen_reads("ahead")) == 2
    assert len(node.seen_reads("due")) == 1


# --- other ways -------------------------------------------------------------------------------------------------------
def test_as_a_tar_for_people_with_curl(node: Node, tmp_path: Path) -> None:
    data = {"a/b.txt": b"hello", "large": os.urandom(200_000), "e" * 300: b"long name", "über": b""}
    data["cold"] = bytes(70_001)
    for key, body in data.items():
        if key == "cold":
            node.engine.cold["b", key] = Cold(body)
        else:
            node.put(key, body)
    with node.connect() as client:
        items = [*[("b", key) for key in data], ("b", "nothing"), ("b", "large", 5, 9), ("b", "cold", 0)]
        send(client, items, "tar")
        answer = client.answer()
        assert answer.headers["content-type"] == "application/x-tar"
        assert client.ask("/-/healthz").status == 200
    assert len(answer.body) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
        found = [(entry.name, archive.extractfile(entry).read()) for entry in archive]  # type: ignore[union-attr]
        refused = archive.getmember("nothing.error")
    assert found == [
        *data.items(),
        ("nothing.error", b""),
        ("large", data["large"][5:9]),
        ("cold", data["cold"]),
    ]
    assert "404 NotFound: nothing does not exist" in refused.pax_headers["comment"]


def test_over_tls_and_http_1_0(tmp_path: Path) -> None:
    import ssl

    pair = make(tmp_path / "tls", "node")
    data = os.urandom(900_000)
    with serve(tmp_path / "n", tls_cert=str(pair.cert), tls_key=str(pair.key)) as node:
        node.put("o", data)
        node.engine.cold["b", "cold"] = Cold(data)
        context = ssl.create_default_context(cafile=str(pair.cert))
        context.check_hostname = False
        with socket.create_connection(("127.0.0.1", node.port), timeout=90) as plain:
            client = Client(context.wrap_socket(plain, server_hostname="localhost"))
            for items in ([("b", "o"), ("b", "o", 5, 60_000)], [("b", "cold"), ("b", "o"), ("b", "o", 1, 2)]):
                send(client, items)
                spans = [(item[2], item[3]) if len(item) > 2 else (0, len(data)) for item in items]
                assert bodies(frames(client.answer().body)) == [data[start:end] for start, end in spans]
            client.sock.close()


def test_an_old_client_gets_what_is_cold_until_the_end(node: Node) -> None:
    node.engine.cold["b", "cold"] = Cold(b"cold" * 50_000)
    node.put("o", bytes(100_000))
    body = msgspec.json.encode({"items": [("b", "cold"), ("b", "o")]})
    with node.connect() as client:
        client.send(f"POST /-/v1/batch HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = client.answer()
    assert "transfer-encoding" not in answer.headers
    assert bodies(frames(answer.body)) == [b"cold" * 50_000, bytes(100_000)]
