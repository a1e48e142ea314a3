"""One object read: hits from the store, misses as they land, and what happens when either goes wrong midway."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.core import limits
from forebay.core.errors import Denied, Unavailable
from forebay.core.messages import wire
from forebay.core.record import Record, State
from forebay.core.types import RangeSpec
from forebay.node.front.objects.reads import WINDOW_BLOCKS, Reads
from forebay.node.store.reader import StoreReader
from tests.front.fake_engine import Cold, Node, serve
from tests.patience import PATIENCE_S

Eventually = Callable[[Callable[[], bool]], None]
BLOCK = limits.BLOCK_BYTES
SIZES = [1, 1000, limits.INLINE_BYTES_MAX, limits.INLINE_BYTES_MAX + 1, 100_000, BLOCK, BLOCK + 1, 3 * BLOCK + 12345]


def ranges_of(size: int) -> list[tuple[int, int]]:
    """Half-open ranges that touch ends, block borders and the border between pread and sendfile."""
    cuts = sorted(
        {at for at in (0, 1, size // 2, size - 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7, 16 * 1024) if 0 <= at < size}
    )
    found = [(start, min(size, start + length)) for start in cuts for length in (1, 5000, 16384, 16385, size)]
    return sorted(set(found))


# --- hits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", SIZES)
def test_every_range_of_a_hit_is_those_bytes(node: Node, size: int) -> None:
    data = os.urandom(size)
    node.put("o", data)
    with node.connect() as client:
        answer = client.ask("/b/o")
        assert (answer.status, answer.body == data) == (200, True)
        for api in ("/b/o", "/-/v1/objects/b/o"):
            for start, end in ranges_of(size):
                answer = client.ask(api, Range=f"bytes={start}-{end - 1}")
                assert (answer.status, answer.body == data[start:end]) == (206, True)
                assert answer.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
            assert client.ask(api, Range=f"bytes=-{size}").body == data
            outside = client.ask(api, Range=f"bytes={size}-")
            assert (outside.status, outside.headers["content-range"]) == (416, f"bytes */{size}")
    assert not node.seen(wire.OpenRead), "a hit reached the engine"


def test_an_empty_object_is_a_hit_too(node: Node) -> None:
    node.put("empty", b"")
    answer = node.get("/b/empty")
    assert (answer.status, answer.headers["content-length"], answer.body) == (200, "0", b"")
    assert not node.seen(wire.OpenRead)


def test_hits_are_reported_once_for_many(node: Node, eventually: Eventually) -> None:
    node.put("small", b"tiny")
    node.put("big", bytes(3 * BLOCK))
    with node.connect() as client:
        for _ in range(50):
            client.ask("/b/small")
            client.ask("/b/big", Range=f"bytes={BLOCK}-{BLOCK + 99}")
    small, big = node.record("small").object_id, node.record("big").object_id

    def reported() -> set[tuple[int, int, int]]:
        flat = [number for message in node.seen(wire.Touched) for number in message.hits]
        return {tuple(flat[at : at + 3]) for at in range(0, len(flat), 3)}  # type: ignore[misc]

    eventually(lambda: reported() == {(small, 0, 1), (big, 1, 2)})
    assert sum(len(message.hits) for message in node.seen(wire.Touched)) < 50 * 3
    values = node.snapshot().values
    assert values['forebay_reads_total{result="hit"}'] == 100
    assert values['forebay_read_bytes_total{result="hit"}'] == 50 * 104
    assert sum(node.snapshot().histograms["forebay_hit_seconds"].counts) == 100


def test_what_is_not_fresh_is_the_engines(node: Node) -> None:
    node.put("o", b"old", bucket="strict")
    node.engine.cold["strict", "o"] = Cold(b"new", "v2", whole=True)
    assert node.get("/strict/o").body == b"new"
    assert node.get("/strict/o", "HEAD").headers["etag"] == '"etag-v2"'


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_not_verified_is_the_engines(node: Node, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an unclean machine stop a record says so; its bytes may be torn, so they are not served unseen."""
    node.put("o", bytes(size))
    node.engine.cold["b", "o"] = Cold(b"verified" * 50, whole=True)
    lookup = StoreReader.lookup

    def doubted(self: StoreReader, bucket: str, key: str) -> Record | None:
        record = lookup(self, bucket, key)
        if record is not None:
            record.state |= State.UNVERIFIED
        return record

    with node.connect() as client:
        assert [client.ask("/b/o").body for _ in range(2)] == [bytes(size)] * 2
        monkeypatch.setattr(StoreReader, "lookup", doubted)
        monkeypatch.setattr(node.front._lane, "_lookup", node.front._store.lookup)
        assert [client.ask("/b/o").body for _ in range(2)] == [b"verified" * 50] * 2


def test_a_range_whose_blocks_are_absent_is_the_engines(node: Node) -> None:
    data = os.urandom(3 * BLOCK)
    node.put("part", data, blocks={0, 2})
    node.engine.cold["b", "part"] = Cold(data, piece_bytes=BLOCK)
    with node.connect() as client:
        assert client.ask("/b/part", Range=f"bytes=5-{BLOCK - 1}").body == data[5:BLOCK]
        assert client.ask("/b/part", Range=f"bytes={2 * BLOCK}-").body == data[2 * BLOCK :]
        assert not node.seen(wire.OpenRead)
        assert client.ask("/b/part", Range=f"bytes={BLOCK - 1}-{BLOCK}").body == data[BLOCK - 1 : BLOCK + 1]
        assert client.ask("/b/part").body == data
    assert [read.range for read in node.seen_reads("part")] == [RangeSpec(BLOCK - 1, BLOCK), None]


# --- misses -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["file", "memory", "whole"])
def test_a_miss_is_sent_as_it_lands(node: Node, how: str, eventually: Eventually) -> None:
    data = os.urandom(250_001)
    node.engine.cold["b", "o"] = Cold(data, memory=how == "memory", whole=how == "whole")
    with node.connect() as client:
        assert client.ask("/b/o").body == data
        assert client.ask("/-/v1/objects/b/o", Range="bytes=100-200100").body == data[100:200_101]
        assert client.ask("/b/o", Range="bytes=-7").body == data[-7:]
    eventually(lambda: len(node.seen(wire.CloseRead)) == 3)
    if how != "whole":
        positions = [message.position for message in node.seen(wire.Consumed) if message.read == 1]
        assert positions == [100_000, 200_000, 250_001]
    values = node.snapshot().values
    assert values['forebay_reads_total{result="miss"}'] == 3
    assert values['forebay_read_bytes_total{result="miss"}'] == 250_001 + 200_001 + 7
    assert sum(node.snapshot().histograms["forebay_miss_first_byte_seconds"].counts) == 3


def test_a_miss_waits_while_holes_are_made_in_the_file_it_lands_in(node: Node, eventually: Eventually) -> None:
    data = os.urandom(250_001)
    node.engine.cold["b", "o"] = Cold(data)
    landing = node.engine.path.parent / "landing-1"
    with open(landing, "w+b") as file, node.connect() as client:
        fcntl.flock(file, fcntl.LOCK_EX)  # as `files.punch_blocks` does, for blocks that were evicted before
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: landing.stat().st_size == len(data))
        time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert client.answer().body == data


def test_the_first_byte_does_not_wait_for_the_last(node: Node) -> None:
    data = os.urandom(1_000_000)
    node.engine.cold["b", "o"] = cold = Cold(data, hold_at=300_001)
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.until(b"\r\n\r\n")
        assert client.exactly(300_000) == data[:300_000]
        cold.release.set()
        assert client.exactly(700_000) == data[300_000:]


def test_errors_before_the_first_byte_are_told(node: Node) -> None:
    node.engine.cold["b", "denied"] = Cold(b"x", error=Denied("the backend refuses: check its credentials"))
    node.engine.cold["b", "down"] = Cold(b"x", error=Unavailable("the backend is down: try later", retry_after_s=7))
    node.engine.cold["b", "breaks"] = Cold(bytes(100), fail_at=0)
    with node.connect() as client:
        assert client.ask("/b/nothing").status == 404
        assert client.ask("/b/denied").status == 403
        down = client.ask("/-/v1/objects/b/down")
        assert (down.status, down.headers["retry-after"]) == (503, "7")
        assert client.ask("/b/breaks").status == 500
        assert client.ask("/b/nothing", Range="bytes=0-1").status == 404
        outside = client.ask("/b/breaks", Range="bytes=500-")
        assert (outside.status, outside.headers["content-range"]) == (416, "bytes */100")
    assert node.snapshot().values['forebay_reads_total{result="error"}'] == 2


def test_an_error_midway_cuts_the_answer(node: Node) -> None:
    data = os.urandom(500_000)
    node.engine.cold["b", "o"] = Cold(data, fail_at=250_000)
    for target in ("/b/o", "/-/v1/objects/b/o"):
        with node.connect() as client:
            client.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert b"Content-Length: 500000" in client.until(b"\r\n\r\n")
            body = client.rest()
            assert len(body) <= 200_000
            assert body == data[: len(body)]
    assert node.snapshot().values['forebay_connections_cut_total{reason="error"}'] == 2


def test_conditions_hold_for_misses_too(node: Node) -> None:
    data = os.urandom(300_000)
    node.engine.cold["b", "o"] = Cold(data)
    with node.connect() as client:
        for target in ("/b/o", "/-/v1/objects/b/o"):
            assert client.ask(target, If_None_Match='"etag-v1"').status == 304
            assert client.ask(target, If_Match='"other"').status == 412
            whole = client.ask(target, Range="bytes=0-9", If_Range='"other"')  # the range does not hold: asked anew
            assert (whole.status, whole.body == data) == (200, True)
            part = client.ask(target, Range="bytes=0-9", If_Range='"etag-v1"')
            assert (part.status, part.body) == (206, data[:10])
    assert {read.version for read in node.seen_reads("o")} == {"", "v1"}


# --- when the disk lies -----------------------------------------------------------------------------------------------
def test_a_hit_whose_file_is_gone_is_read_as_a_miss(node: Node) -> None:
    data = os.urandom(100_000)
    node.put("o", data)
    node.data_file("o").unlink()
    node.engine.cold["b", "o"] = Cold(data)
    with node.connect() as client:
        assert client.ask("/b/o").body == data
        assert client.ask("/b/o", Range="bytes=7-9").body == data[7:10]


def test_a_short_file_is_suspected_and_small_ranges_come_from_the_engine(node: Node, eventually: Eventually) -> None:
    data = os.urandom(100_000)
    node.put("o", data)
    os.truncate(node.data_file("o"), 50_000)
    node.engine.cold["b", "o"] = Cold(data)
    with node.connect() as client:
        assert client.ask("/b/o", Range="bytes=49999-50001").body == data[49_999:50_002]
    eventually(lambda: len(node.seen(wire.Suspect)) == 1)
    assert node.seen(wire.Suspect)[0].object_id == node.record("o").object_id


def test_a_file_that_ends_midway_is_finished_from_the_engine(node: Node, eventually: Eventually) -> None:
    """The head and the first bytes are sent: the rest must be the same version's, and the client sees nothing of it."""
    data = os.urandom(6_000_000)
    node.put("o", data)
    assert node.get("/b/o").body == data, "compared: what happens to it afterwards shows only when it is sent"
    os.truncate(node.data_file("o"), 3_500_001)
    node.engine.cold["b", "o"] = Cold(data, piece_bytes=700_000)
    with node.connect() as client:
        answer = client.ask("/b/o")
        assert (answer.status, answer.body == data) == (200, True)
        assert client.ask("/-/healthz").body == b"ok\n"
    eventually(lambda: len(node.seen(wire.Suspect)) == 1)
    (rest,) = node.seen_reads("o")
    assert (rest.version, rest.range) == ("v1", RangeSpec(3_500_001, 5_999_999))


@pytest.mark.parametrize("trouble", ["changed", "gone"])
def test_a_file_that_ends_midway_is_never_finished_with_another_version(node: Node, trouble: str) -> None:
    data = os.urandom(6_000_000)
    node.put("o", data)
    assert node.get("/b/o").body == data, "compared: what happens to it afterwards shows only when it is sent"
    os.truncate(node.data_file("o"), 3_500_001)
    if trouble == "changed":
        node.engine.cold["b", "o"] = Cold(os.urandom(6_000_000), "v2")
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.until(b"\r\n\r\n")
        assert data.startswith(client.rest())
    assert node.get("/-/healthz").status == 200


@pytest.mark.parametrize("gone", [False, True])
def test_what_cannot_be_read_where_it_landed_is_asked_for_anew(node: Node, gone: bool) -> None:
    data = os.urandom(450_000)
    node.engine.cold["b", "o"] = Cold(data, spoiled=2, spoil_at=150_001, gone=gone)
    with node.connect() as client:
        answer = client.ask("/b/o")
        assert (answer.status, answer.body == data) == (200, True)
        assert client.ask("/-/healthz").body == b"ok\n"
    asked = [(read.version, read.range and read.range.first) for read in node.seen_reads("o")]
    assert asked == [("", None), *[("v1", 0 if gone else 150_001)] * 2]
    assert node.snapshot().values["forebay_reads_resumed_total"] == 2
    assert node.front.link.waiting == 0


def test_what_the_engine_takes_back_is_asked_for_anew(node: Node, eventually: Eventually) -> None:
    """What was sent before is the client's; of what follows the same version comes."""
    data = os.urandom(450_000)
    node.engine.cold["b", "o"] = cold = Cold(data, hold_at=150_000, withdrawn=1)
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        eventually(lambda: bool(node.seen(wire.Consumed)))
        cold.release.set()
        client.until(b"\r\n\r\n")
        assert client.rest() == data
    assert [(read.version, read.range and read.range.first) for read in node.seen_reads("o")] == [
        ("", None),
        ("v1", 100_000),
    ]
    assert node.front.link.waiting == 0


def test_the_rest_is_not_asked_for_without_end_nor_of_another_version(node: Node, eventually: Eventually) -> None:
    data = os.urandom(450_000)
    node.engine.cold["b", "ends"] = Cold(data, spoiled=100, spoil_at=150_001)
    node.engine.cold["b", "changes"] = changing = Cold(data, hold_at=150_000, spoiled=1, gone=True)
    with node.connect() as client:
        client.send(b"GET /b/ends HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        client.until(b"\r\n\r\n")
        assert data[:150_001].startswith(client.rest())  # a reset may take what was under way
    assert len(node.seen_reads("ends")) == 4
    with node.connect() as client:
        client.send(b"GET /b/changes HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        client.until(b"\r\n\r\n")  # of what is said to have begun, nothing else may follow
        node.engine.cold["b", "changes"] = Cold(os.urandom(450_000), "v2")
        changing.release.set()
        assert data.startswith(client.rest()), "of the old version, as far as it came"


def test_an_object_that_is_replaced_before_its_first_byte_is_opened_anew(node: Node) -> None:
    """Nothing is said yet: the client gets the version that is there, and his conditions are judged by it."""
    data = os.urandom(450_000)
    node.engine.cold["b", "o"] = Cold(data, spoiled=2, gone=True, overwritten=2)
    with node.connect() as client:
        answer = client.ask("/b/o")
        assert (answer.status, answer.body == data, answer.headers["etag"]) == (200, True, "\"etag-v1''\"")
    assert [read.version for read in node.seen_reads("o")] == ["", "v1", "", "v1'", ""]
    node.engine.cold["b", "if"] = Cold(data, spoiled=1, gone=True, overwritten=1)
    with node.connect() as client:
        assert client.ask("/b/if", If_Match='"etag-v1"').status == 412, "it was that version when it was opened first"
    node.engine.cold["b", "busy"] = Cold(data, spoiled=99, gone=True, overwritten=99)
    with node.connect() as client:
        answer = client.ask("/b/busy")
        assert answer.status == 503
        assert b"read again" in answer.body
    assert node.front.link.waiting == 0


def test_a_large_hit_that_is_replaced_before_its_first_byte_is_opened_anew(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first blocks were right, and are not when they are to be sent. Nothing is said yet, so nothing is refused."""
    node.put("o", os.urandom(WINDOW_BLOCKS * BLOCK + 1000))
    newer = os.urandom(450_000)
    node.engine.cold["b", "o"] = Cold(newer, "v2")
    compare, compared = Reads.compare, 0

    def wrong_from_the_second_on(self: Reads, *args: Any) -> asyncio.Task[bool]:
        nonlocal compared
        compared += 1
        return compare(self, *args) if compared == 1 else asyncio.create_task(asyncio.sleep(0, False))

    monkeypatch.setattr(Reads, "compare", wrong_from_the_second_on)
    with node.connect() as client:
        answer = client.ask("/b/o")
        assert (answer.status, answer.body == newer, answer.headers["etag"]) == (200, True, '"etag-v2"')
    assert compared == 2
    assert [read.version for read in node.seen_reads("o")] == [""]


def test_an_evicted_objects_file_is_closed_when_the_engine_says_so(node: Node, eventually: Eventually) -> None:
    node.put("o", bytes(100_000))
    assert node.get("/b/o").status == 200
    assert node.call(lambda: node.front._store.files_open) == 1
    node.call(lambda: node.engine.say(wire.Dropped([node.record("o").object_id])))
    eventually(lambda: node.call(lambda: node.front._store.files_open) == 0)


# --- when the engine dies ---------------------------------------------------------------------------------------------
def test_without_an_engine_hits_go_on_and_misses_wait_then_say_503(tmp_path: Path, eventually: Eventually) -> None:
    with serve(tmp_path, grace_s=0.2) as node:
        node.put("o", b"here")
        node.engine.cold["b", "cold"] = Cold(b"cold", whole=True)
        with node.connect() as client:
            assert client.ask("/-/readyz").status == 200
            node.run(node.engine.stop())
            eventually(lambda: not node.front.link.connected)
            assert client.ask("/b/o").body == b"here"
            answer = client.ask("/b/cold")
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            ready = client.ask("/-/readyz")
            assert (ready.status, b"engine" in ready.body) == (503, True)
            assert client.ask("/-/healthz").status == 200
            assert client.ask("/-/v1/status").status == 503
            node.run(node.engine.start())
            eventually(lambda: node.front.link.connected)
            assert client.ask("/b/cold").body == b"cold"
            assert client.ask("/-/readyz").status == 200
        assert node.snapshot().values["forebay_engine_connects_total"] == 2


def test_a_restart_of_the_engine_within_the_grace_is_not_noticed(tmp_path: Path, eventually: Eventually) -> None:
    with serve(tmp_path, grace_s=5.0) as node:
        node.engine.cold["b", "cold"] = Cold(b"cold", whole=True)
        node.run(node.engine.stop())
        eventually(lambda: not node.front.link.connected)
        with node.connect() as client:
            client.send(b"GET /b/cold HTTP/1.1\r\nHost: localhost\r\n\r\n")
            eventually(lambda: node.snapshot().values["forebay_reads_waiting"] == 1)
            node.run(node.engine.start())
            assert client.answer().body == b"cold"


def test_a_read_under_way_goes_on_with_the_next_engine(tmp_path: Path, eventually: Eventually) -> None:
    data = os.urandom(450_000)
    with serve(tmp_path, grace_s=PATIENCE_S) as node, node.connect() as client:
        node.engine.cold["b", "o"] = cold = Cold(data, hold_at=250_000)
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.until(b"\r\n\r\n")
        assert client.exactly(200_000) == data[:200_000]
        node.run(node.engine.stop())
        cold.release.set()
        node.run(node.engine.start())
        assert client.exactly(250_000) == data[200_000:]
        assert [read.range for read in node.seen_reads("o")][1:] == [RangeSpec(200_000, 449_999)]
        assert node.snapshot().values["forebay_reads_resumed_total"] == 1


def test_reads_under_way_end_cleanly_when_the_engine_dies(node: Node, eventually: Eventually) -> None:
    node.engine.cold["b", "half"] = Cold(bytes(500_000), hold_at=200_000)
    node.engine.cold["b", "none"] = Cold(bytes(500_000), hold_at=1)
    with node.connect() as half, node.connect() as none, node.connect() as call:
        half.send(b"GET /b/half HTTP/1.1\r\nHost: localhost\r\n\r\n")
        half.until(b"\r\n\r\n")
        none.send(b"GET /b/none HTTP/1.1\r\nHost: localhost\r\n\r\n")
        call.send(b"GET /-/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(node.seen(wire.OpenRead)) == 2 and len(node.engine.calls) == 1)
        node.run(node.engine.stop())
        assert len(half.rest()) < 500_000
        assert none.answer().status == 503
        assert call.answer().status == 503
    assert node.front.link.waiting == 0


def test_fronts_answer_a_report_with_their_counts(node: Node, eventually: Eventually) -> None:
    node.put("o", b"x" * 10)
    node.get("/b/o")
    node.call(lambda: node.engine.say(wire.Report(5)))
    eventually(lambda: len(node.engine.reports) == 1)
    assert node.engine.reports[0].values['forebay_reads_total{result="hit"}'] == 1
    assert node.engine.reports[0].values['forebay_process_resident_bytes{process="front-3"}'] > 1e6


def test_new_buckets_and_volumes_are_followed(node: Node, eventually: Eventually) -> None:
    from forebay.core.types import Bucket

    assert node.get("/later/o").status == 404
    node.buckets.append(Bucket("later", "memory://", freshness_s=1e18))
    node.put("o", b"x", bucket="later")
    node.call(lambda: node.engine.say(node.engine.welcome()))
    eventually(lambda: node.get("/later/o").status == 200)
    node.engine.volumes_said = []
    node.call(lambda: node.engine.say(node.engine.welcome()))
    eventually(lambda: node.get("/-/readyz").status == 503)


def test_an_unknown_bucket_is_the_engines_to_find(node: Node) -> None:
    """Somebody may have added it a moment ago, through another front."""
    node.engine.cold["found", "o"] = Cold(b"there", whole=True)
    assert node.get("/found/o").body == b"there"
    assert node.get("/nowhere/o").status == 404
    assert node.get("/Not_A_Bucket/o").status == 400
