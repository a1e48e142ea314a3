"""Bytes are compared with their checksums before a front uses them for the first time."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.core import limits
from forebay.core.messages import wire
from forebay.core.record import Record, encode_record
from forebay.node.front.objects.reads import whole_blocks
from forebay.node.store.disk import keys
from forebay.node.store.disk.compared_blocks import PAGES_MAX, PARTS_MAX, Compared
from forebay.node.store.reader import LeasedFile
from tests.front.fake_engine import Cold, Node
from tests.front.test_batch import ask, bodies

Eventually = Callable[..., Any]
BLOCK = limits.BLOCK_BYTES


def flip(node: Node, key: str, at: int) -> None:
    """What a disk does."""
    with node.data_file(key).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def flip_inline(node: Node, key: str) -> None:
    record = node.record(key)
    assert record.inline
    wrong = msgspec.structs.replace(record, inline=bytes([record.inline[0] ^ 1]) + record.inline[1:])
    node.store.home("b", key).index.put("records", keys.index_key("b", key), encode_record(wrong))
    node.store.flush()


class Comparisons:
    """Counts what is compared, and can hold it up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        self.go = threading.Event()
        self.go.set()
        prove = LeasedFile.prove

        def watched(file: LeasedFile, start: int, end: int) -> bool:
            self.spans.append((start, end))
            assert self.go.wait(90)
            return prove(file, start, end)

        monkeypatch.setattr(LeasedFile, "prove", watched)


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> Comparisons:
    return Comparisons(monkeypatch)


def test_a_flipped_byte_is_never_sent_and_the_engine_hears_of_it(node: Node, eventually: Eventually) -> None:
    sizes = {"small": 5_000, "middle": 100_000, "large": 2 * BLOCK + 5}
    for key, size in sizes.items():
        data = os.urandom(size)
        node.put(key, data)
        node.engine.cold["b", key] = Cold(data, whole=size < 10_000)
        flip_inline(node, key) if size < 10_000 else flip(node, key, size - 3)
        assert node.get(f"/b/{key}").body == data, key
        assert node.get(f"/b/{key}", Range=f"bytes={size - 9}-").body == data[-9:], key
        suspected = [node.record(key).object_id]
        eventually(lambda suspected=suspected: suspected[0] in {each.object_id for each in node.seen(wire.Suspect)})


def test_what_was_compared_is_not_compared_again_until_it_was_dropped(
    node: Node, comparisons: Comparisons, eventually: Eventually
) -> None:
    data = os.urandom(300_000)
    node.put("o", data)
    with node.connect() as client:
        for _ in range(5):
            assert client.ask("/b/o").body == data
        assert client.ask("/b/o", Range="bytes=7-9").body == data[7:10]
        assert comparisons.spans == [(0, 300_000)]
        assert node.seen_reads("o") == []
        node.call(lambda: node.engine.say(wire.Dropped([node.record("o").object_id])))
        eventually(lambda: node.call(lambda: node.front._store.files_open) == 0)
        assert client.ask("/b/o").body == data
    assert len(comparisons.spans) == 2


def test_only_the_blocks_that_are_used_are_compared(node: Node, comparisons: Comparisons) -> None:
    data = os.urandom(3 * BLOCK)
    node.put("o", data)
    for first in (2 * BLOCK, 2 * BLOCK + 500, 5):
        assert node.get("/b/o", Range=f"bytes={first}-{first + 99}").body == data[first : first + 100]
    assert comparisons.spans == [(2 * BLOCK, 2 * BLOCK + 100), (5, 105)]


def test_many_who_come_at_once_wait_for_one_comparison(node: Node, comparisons: Comparisons) -> None:
    data = os.urandom(200_000)
    node.put("o", data)
    comparisons.go.clear()
    clients = [node.connect() for _ in range(20)]
    for client in clients:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert node.get("/-/healthz").status == 200, "the loop goes on"
    comparisons.go.set()
    for client in clients:
        with client:
            assert client.answer().body == data
    assert comparisons.spans == [(0, 200_000)]


@pytest.mark.parametrize("size", [100_000, 5 * BLOCK])
def test_a_client_that_closed_its_half_gets_its_answer_after_a_slow_comparison(
    node: Node, comparisons: Comparisons, eventually: Eventually, size: int
) -> None:
    data = os.urandom(size)
    node.put("o", data)
    comparisons.go.clear()
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(comparisons.spans) == 1)
        client.sock.shutdown(socket.SHUT_WR)
        eventually(lambda: node.call(lambda: any(each._eof for each in node.front.server.connections)))
        comparisons.go.set()
        client.until(b"\r\n\r\n")
        assert client.rest() == data
    assert node.seen_reads("o") == []


def test_a_client_that_goes_meanwhile_leaves_nothing(
    node: Node, comparisons: Comparisons, eventually: Eventually
) -> None:
    data = os.urandom(100_000)
    node.put("o", data)
    comparisons.go.clear()
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(comparisons.spans) == 1)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    eventually(lambda: not node.call(lambda: node.front.server.connections))
    comparisons.go.set()
    eventually(lambda: node.call(lambda: len(node.front._store._idle)) == 1)
    assert node.get("/b/o").body == data
    assert len(comparisons.spans) == 1


def test_the_rest_of_a_large_object_comes_from_the_engine_where_a_block_is_wrong(node: Node) -> None:
    """Blocks are compared while those before them are sent, and none leaves uncompared."""
    data = os.urandom(6 * BLOCK)
    node.put("o", data)
    node.engine.cold["b", "o"] = Cold(data, piece_bytes=BLOCK)
    flip(node, "o", 4 * BLOCK + 77)
    assert node.get("/b/o").body == data
    (rest,) = node.seen_reads("o")
    assert rest.range is not None
    assert rest.range.first in (2 * BLOCK, 4 * BLOCK)
    assert rest.version == "v1"


@pytest.mark.parametrize("left_bytes", [0, 3_500_001])
def test_the_rest_comes_from_the_engine_where_the_file_ends_while_it_is_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, left_bytes: int
) -> None:
    data = os.urandom(3 * BLOCK + 7)
    node.put("o", data)
    node.engine.cold["b", "o"] = Cold(data)
    prove = LeasedFile.prove

    def proved(file: LeasedFile, start: int, end: int) -> bool:
        right = prove(file, start, end)
        os.truncate(node.data_file("o"), left_bytes)
        return right

    monkeypatch.setattr(LeasedFile, "prove", proved)
    assert node.get("/b/o").body == data
    (read,) = node.seen_reads("o")
    assert read.range is not None
    assert read.range.first == left_bytes
    eventually(lambda: node.seen(wire.Suspect))


def test_what_the_engine_landed_counts_as_compared_as_far_as_whole_blocks_were_seen() -> None:
    record = Record(7, 3 * BLOCK + 5, "v", "e", 0.0, 0.0, b"", complete=True)
    seen = {
        (0, 3 * BLOCK + 5): [0, 1, 2, 3],
        (0, 2 * BLOCK): [0, 1],
        (5, 3 * BLOCK): [1, 2],
        (BLOCK + 1, 2 * BLOCK - 1): [],
        (3 * BLOCK, 3 * BLOCK + 5): [3],
        (3 * BLOCK, 3 * BLOCK + 4): [],
    }
    for (start, end), blocks in seen.items():
        assert (list(whole_blocks(record, start, end)[0]), whole_blocks(record, start, end)[1]) == (blocks, 4)


def test_items_of_a_batch_are_compared_too(node: Node, comparisons: Comparisons) -> None:
    objects = {f"k{number:02}": os.urandom(20_000 + number) for number in range(40)}
    for key, data in objects.items():
        node.put(key, data)
        node.engine.cold["b", key] = Cold(data)
    flip(node, "k07", 11)
    for _ in range(2):
        _, found = ask(node, *(("b", key) for key in objects))
        assert bodies(found) == list(objects.values())
    once = [span for span in comparisons.spans if span != (0, 20_007)]
    assert len(once) == len(objects) - 1


def test_what_is_remembered_is_bounded_and_forgetting_is_right() -> None:
    compared = Compared()
    assert not compared.has(5, 0, 1)
    compared.add(5, (0,), 1)
    assert compared.whole(5)
    assert compared.has(5, 0, 1)
    compared.forget(5)
    assert not compared.whole(5)
    for number in range(PARTS_MAX + 10):
        compared.add(number << 20, (1, 3), 5)
    assert not compared.has(0, 1, 2), "the oldest is forgotten"
    assert compared.has((PARTS_MAX + 9) << 20, 1, 2)
    assert not compared.has((PARTS_MAX + 9) << 20, 1, 3)
    for number in range(PAGES_MAX + 1):
        compared.add((number << 12) + 1, (0,), 1)
    assert not compared.whole(1)
    assert compared.whole((PAGES_MAX << 12) + 1)
    assert len(compared.pages) == PAGES_MAX


def test_a_front_stops_while_it_compares(node: Node, comparisons: Comparisons, eventually: Eventually) -> None:
    node.put("o", os.urandom(100_000))
    comparisons.go.clear()
    with node.connect() as client:
        client.send(b"GET /b/o HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(lambda: len(comparisons.spans) == 1)
        stopped = asyncio.run_coroutine_threadsafe(node.front.stop(0.1), node.loop)
        comparisons.go.set()
        stopped.result(90)
