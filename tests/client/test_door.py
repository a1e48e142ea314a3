"""The client's side of the host door: what it keeps, what it lets go, and what it leaves to HTTP without a word."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forebay.client import door as client_door
from forebay.client.door import HostDoor
from forebay.client.sync import Client
from forebay.core import limits
from forebay.core.errors import Denied, NotFound, Unavailable
from forebay.core.formats import members
from forebay.core.messages import doorwire
from forebay.core.messages.batch import Item
from forebay.core.messages.doorwire import DoorAt, DoorOpened
from forebay.ports import clock
from tests.client.conftest import in_child
from tests.client.fake_door import FakeDoor
from tests.client.fake_node import FakeNode
from tests.core.archives import tar_of, zip_of
from tests.patience import until

DATA = random.Random(1).randbytes(3_000_000)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FakeDoor]:
    with FakeDoor(tmp_path) as door:
        door.small["b", "small"] = b"hello"
        yield door


@pytest.fixture
def large(front: FakeDoor, tmp_path: Path) -> int:
    """The object id of b/large."""
    return front.put("b", "large", DATA, tmp_path)


@pytest.fixture
def door(front: FakeDoor) -> Iterator[HostDoor]:
    door = HostDoor(front.where, lambda: "token")
    yield door
    door.close()


def descriptors() -> set[str]:
    """The files that this process has open; sockets are the fake's as well. The fake is a thread of it: a file that it
    has sent is open twice until it has closed its own."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {entry for entry in found if "/proc/" not in entry and "socket:" not in entry}


def test_items_are_read_from_files_and_small_ones_come_along(front: FakeDoor, door: HostDoor, large: int) -> None:
    assert large
    got = door.read_many(
        [
            Item("b", "large", 10, 20),
            Item("b", "small"),
            Item("b", "missing"),
            Item("b", "large"),
            Item("b", "small", 1, 3),
            Item("b", "large", 2_999_990),
        ]
    )
    assert got == [DATA[10:20], b"hello", None, DATA, b"el", DATA[-10:]]
    assert door.read_many([Item("b", "large", 5, 6)]) == [DATA[5:6]]
    assert front.asked == [("b", "large"), ("b", "small"), ("b", "missing")], "each once, and what is open not again"
    assert (front.tokens, front.where_asked, door.connected) == (["token"], 1, True)
    room = bytearray(100)
    assert door.readinto("b", "large", 2_999_950, room) == 50
    assert room[:50] == DATA[-50:]
    assert door.readinto("b", "small", 2, room) == 3
    assert door.readinto("b", "missing", 0, room) is None
    assert door.pread("b", "large", 7, 3) == DATA[7:10]
    assert door.find("b", "large") == (3_000_000, f"e{large}", None)
    assert door.find("b", "small") == (5, "e-small", b"hello")


def test_what_is_odd_is_left_to_http(door: HostDoor, large: int) -> None:
    odd = [
        Item("b", "large", 0, 3_000_001),
        Item("b", "large", 3_000_000),
        Item("b", "large", 20, 10),
        Item("b", "large", -5, 10),
        Item("b", "large", 0, 5, etag="another"),
        Item("b", "large", 0, 5, member="m"),
        Item("b", "small", 0, 6),
        Item("b", "small", 5),
        Item("b", "small", etag="another"),
    ]
    assert door.read_many(odd) == [None] * len(odd)
    assert door.read_many(odd) == [None] * len(odd), "nor when it is open"
    assert door.read_many([Item("b", "large", 0, 5, etag=f"e{large}")]) == [DATA[:5]]
    assert door.readinto("b", "large", 3_000_001, bytearray(1)) is None
    assert door.readinto("b", "large", 0, bytearray(1), etag="another") is None


def test_members_of_shards_are_ranges_of_their_files(front: FakeDoor, tmp_path: Path) -> None:
    packed = tar_of((f"m{number}", DATA[number : number + 1000 + number]) for number in range(30))
    zipped = zip_of([("deflated", bytes(5000))], zipfile.ZIP_DEFLATED)
    indexes = {}
    for key, data in (("t", packed), ("z", zipped)):
        object_id = front.put("b", key, data, tmp_path)
        kind: Any = {"t": "tar", "z": "zip"}[key]
        indexes["b", key] = members.build(
            kind,
            lambda start, size, data=data: data[start : start + size],
            len(data),
            version="v",
            etag=f"e{object_id}",
        )
    known: dict[Any, members.MemberIndex] = {}
    fetched: list[str] = []

    def fetch(bucket: str, key: str) -> members.MemberIndex:
        fetched.append(key)
        if (bucket, key) not in indexes:
            raise NotFound("no such shard")
        return known.setdefault((bucket, key), indexes[bucket, key])

    front.put("b", "odd", b"no shard" * 1000, tmp_path)
    door = HostDoor(front.where, known_members=lambda *name: known.get(name), read_members=fetch)
    items = [
        Item("b", "t", member="m7"),
        Item("b", "t", 10, 20, member="m29"),
        Item("b", "t", 10, member="m0"),
        Item("b", "t", 0, 1001, member="m0"),
        Item("b", "t", 1000, member="m0"),
        Item("b", "t", -1, 5, member="m1"),
        Item("b", "t", member="none"),
        Item("b", "t", member="m1", etag="another"),
        Item("b", "z", member="deflated"),
        Item("b", "odd", member="m"),
        Item("b", "unknown", member="m"),
        Item("b", "t", 0, 100),
    ]
    wanted = [DATA[7:1014], DATA[39:49], DATA[10:1000], *[None] * 8, packed[:100]]
    for _ in range(client_door.BATCHES_MIN - 1):
        assert door.read_many(items) == [*[None] * 11, packed[:100]]
    assert fetched == [], "an index is long: the node reads single members"
    for _ in range(3):
        assert door.read_many(items) == wanted
    assert [fetched.count(key) for key in ("t", "z", "odd", "unknown")] == [1, 1, 3, 0]
    newer = packed + bytes(512)
    object_id = front.put("b", "t", newer, tmp_path)
    front.drop(1)
    until(lambda: door.read_many(items)[:3] == [None] * 3)  # it is another version than the index is of
    assert door.read_many(items)[:3] == [None] * 3
    known["b", "t"] = members.build(
        "tar", lambda start, size: newer[start : start + size], len(newer), version="v", etag=f"e{object_id}"
    )
    assert door.read_many(items)[:3] == wanted[:3]
    door.close()


def test_what_is_dropped_is_closed_before_the_next_use(
    front: FakeDoor, door: HostDoor, large: int, tmp_path: Path
) -> None:
    before = descriptors()
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    newer = front.put("b", "large", b"newer" * 1000, tmp_path)
    front.drop(large, 99)
    until(lambda: door.pread("b", "large", 0, 5) == b"newer")
    assert front.asked == [("b", "large")] * 2
    front.drop(newer)
    until(lambda: door._look() or door.files_open == 0)
    until(lambda: descriptors() == before)
    assert door.connected
    assert front.closed_ids() == [], "what the front dropped it need not be told"


def test_what_is_no_longer_fresh_is_asked_for_again(front: FakeDoor, door: HostDoor, large: int) -> None:
    front.fresh_until_s = clock.wall_s() + 0.2
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    until(lambda: clock.wall_s() > front.fresh_until_s)
    front.fresh_until_s = 1e18
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    assert front.asked == [("b", "large")] * 2
    door.read_many([Item("b", "small")])
    assert front.closed_ids() == [], f"{large} is open, as before"
    front.drop(large)
    until(lambda: door._look() or door.files_open == 0)


@pytest.mark.parametrize("large_bytes", [1, limits.MIB])
def test_so_many_are_kept_and_the_oldest_go(
    front: FakeDoor, tmp_path: Path, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_door, "LARGE_BYTES", large_bytes)
    before = descriptors()
    door = HostDoor(front.where, files_open_max=16)
    for number in range(200):
        front.put("b", f"k{number}", DATA[number : number + 20_000], tmp_path)
    items = [Item("b", f"k{number}") for number in range(200)]
    assert door.read_many(items) == [DATA[number : number + 20_000] for number in range(200)]
    assert 8 <= door.files_open <= 16
    assert door.read_many(items[-8:]) == [DATA[number : number + 20_000] for number in range(192, 200)]
    assert len(front.asked) == 200, "the last are open"
    door.read_many([Item("b", "small")])
    assert set(front.closed_ids()) == set(range(1, 201 - door.files_open)), "the front knows"
    door.close()
    until(lambda: descriptors() == before)


def test_what_is_read_is_reported_now_and_then(
    front: FakeDoor, door: HostDoor, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_door, "REPORT_S", 0.0)
    door.pread("b", "large", 0, 5)
    for start in (0, 10, 2_500_000):
        door.pread("b", "large", start, 5)
    door.pread("b", "large", 1_048_570, 10)
    door.read_many([Item("b", "small")])
    until(lambda: sum(used.reads for used in front.used()) == 5)
    assert sum(used.read_bytes for used in front.used()) == 30
    blocks = {
        (used.hits[at], block)
        for used in front.used()
        for at in range(0, len(used.hits), 3)
        for block in range(used.hits[at + 1], used.hits[at + 2])
    }
    assert blocks == {(large, 0), (large, 1), (large, 2)}


def test_an_object_of_one_block_is_not_counted_twice(front: FakeDoor, door: HostDoor, tmp_path: Path) -> None:
    front.put("b", "one", DATA[:50_000], tmp_path)
    assert door.read_many([Item("b", "one")]) == [DATA[:50_000]]
    door.close()
    until(lambda: front.used())
    assert [used.hits for used in front.used()] == [[]], "giving it was its use"


def test_a_file_that_is_cut_short_is_left_to_http(front: FakeDoor, door: HostDoor, large: int) -> None:
    assert large
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    os.truncate(front.files["b", "large"], 1000)
    items = [Item("b", "large", 990, 1010), Item("b", "large", 5000, 6000), Item("b", "large", 0, 10)]
    assert door.read_many(items)[:2] == [None, None]
    room = bytearray(2000)
    assert door.readinto("b", "large", 0, room) == 1000, "asked for again, it is what it is"


def test_a_front_that_dies_takes_its_descriptors_along(
    front: FakeDoor, door: HostDoor, large: int, tmp_path: Path
) -> None:
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    front.put("b", "large", b"newer" * 1000, tmp_path)
    front.cut()
    until(lambda: door.pread("b", "large", 0, 5) == b"newer")
    assert (front.connections, front.where_asked) == (2, 2)
    assert large


def test_a_door_that_is_silent_is_left_alone_for_a_while(
    front: FakeDoor, door: HostDoor, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_door, "PATIENCE_S", 1)
    front.silent = True
    assert door.pread("b", "large", 0, 5) is None
    asked = front.where_asked
    assert door.pread("b", "large", 0, 5) is None
    assert front.where_asked == asked, "not at once"
    front.silent = False
    until(lambda: door.pread("b", "large", 0, 5) == DATA[:5])
    assert large


@pytest.mark.parametrize("how", ["another node", "no such path", "not a door", "old node", "no token", "not allowed"])
def test_where_there_is_no_door_nothing_is_said(front: FakeDoor, tmp_path: Path, how: str) -> None:
    asked = 0

    def where() -> DoorAt:
        nonlocal asked
        asked += 1
        if how == "old node":
            raise NotFound("nothing here", code="NoSuchPath")
        if how == "not allowed":
            raise Denied("no")
        path = {"no such path": str(tmp_path / "door-9.sock"), "not a door": "/run/other.sock"}.get(how, front.path)
        return DoorAt("n1", str(path))

    front.node_id = "n2" if how == "another node" else "n1"
    front.refuses = how == "no token"
    before = descriptors()
    door = HostDoor(where)
    for _ in range(3):
        assert door.read_many([Item("b", "small")]) == [None]
    assert (asked, door.connected) == (1, False), "and it is remembered"
    until(lambda: descriptors() == before)


def test_a_node_that_restarts_is_found_again_soon(front: FakeDoor, large: int) -> None:
    gone = 2

    def where() -> DoorAt:
        nonlocal gone
        gone -= 1
        if gone >= 0:
            raise Unavailable("no node", code="NoNode")
        return front.where()

    door = HostDoor(where)
    assert door.pread("b", "large", 0, 5) is None
    until(lambda: door.pread("b", "large", 0, 5) == DATA[:5])
    assert large
    door.close()


@pytest.mark.parametrize(
    "said", [DoorOpened(77, []), b"\x05\0\0\0hello", b"\xff\xff\xff\xff", doorwire.DoorHello()], ids=str
)
def test_a_door_that_makes_no_sense_is_left(front: FakeDoor, door: HostDoor, large: int, said: Any) -> None:
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    if isinstance(said, bytes):
        for sock in front._socks:
            sock.sendall(said)
    else:
        front.say(said)
    until(lambda: door._look() or not door.connected)
    assert door.files_open == 0
    assert door.pread("b", "large", 0, 5) == DATA[:5], "another may be better"
    assert large


def test_out_of_descriptors(front: FakeDoor, tmp_path: Path) -> None:
    """The kernel drops what has no room: then no result may get another's descriptor."""
    for number in range(64):
        front.put("b", f"k{number}", DATA[number : number + 20_000], tmp_path)

    def run() -> bool:
        door = HostDoor(front.where)
        assert door.pread("b", "k0", 0, 10) == DATA[:10]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [fd for fd in range(1000) if not os.path.lexists(f"/proc/self/fd/{fd}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[10], hard))  # room for ten more
        got = door.read_many([Item("b", f"k{number}", 0, 20_000) for number in range(64)])
        right = all(body in (None, DATA[number : number + 20_000]) for number, body in enumerate(got))
        assert None in got
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: door.pread("b", "k5", 0, 10) == DATA[5:15])
        return right

    assert in_child(run)


def test_threads_share_it(front: FakeDoor, tmp_path: Path) -> None:
    """Few may be open, so that files are closed all the time while others read them."""
    door = HostDoor(front.where, files_open_max=8)
    for number in range(60):
        front.put("b", f"k{number}", DATA[number * 1000 : number * 1000 + 20_000], tmp_path)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(100):
            picked = [(chance.randrange(60), chance.randrange(19_000)) for _ in range(10)]
            got = door.read_many([Item("b", f"k{number}", start, start + 100) for number, start in picked])
            for (number, start), body in zip(picked, got, strict=True):
                if body != DATA[number * 1000 + start :][:100]:
                    wrong.append((number, start, body))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for number in range(0, 60, 7):
        front.drop(number + 1)
        time.sleep(0.01)  # between other moments
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    door.close()


def test_a_forked_child_leaves_the_parents_alone(front: FakeDoor, door: HostDoor, large: int) -> None:
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    path = str(front.files["b", "large"])

    def of_it() -> list[str]:
        return [entry for entry in descriptors() if path in entry]

    def child() -> bool:
        return (
            of_it() == []
            and not door.connected
            and door.pread("b", "large", 5, 5) == DATA[5:10]
            and door.read_many([Item("b", "small")]) == [b"hello"]
        )

    until(lambda: len(of_it()) == 1)
    assert in_child(child)
    assert front.connections == 2
    assert door.pread("b", "large", 10, 5) == DATA[10:15]
    assert front.connections == 2, "the parent's goes on"
    assert large


def test_a_fork_while_threads_read(front: FakeDoor, door: HostDoor, large: int) -> None:
    """Whatever lock another thread holds at that moment, the child is free."""
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            door.forget("b", "large")
            door.pread("b", "large", 0, 5)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: door.pread("b", "large", 5, 5) == DATA[5:10])
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
    assert large


def test_what_is_not_used_is_closed(
    front: FakeDoor, door: HostDoor, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread that comes by itself, since the process may never read again, and ends with its work."""
    monkeypatch.setattr(limits, "CLIENT_FILE_IDLE_S", 0.2)
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    until(lambda: door.files_open == 0)
    until(lambda: front.closed_ids() == [large])
    until(lambda: door._sweeping is None)
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    until(lambda: door.files_open == 0)


def test_off_is_off(front: FakeDoor, door: HostDoor, large: int) -> None:
    assert door.pread("b", "large", 0, 5) == DATA[:5]
    door.off()
    assert door.read_many([Item("b", "large", 0, 5)]) == [None]
    assert door.find("b", "large") is None
    assert (door.connected, front.connections) == (False, 1)
    assert large


def test_a_client_without_a_door_asks_once(node: FakeNode, client: Client) -> None:
    for _ in range(3):
        assert client.door.read_many([Item("corpus", "a")]) == [None]
    assert node.requests("GET", "door") == ["/-/v1/door"]


def test_threads_that_come_at_once_share_one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Barrier(2, timeout=90)

    class Slow(HostDoor):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            waiting.wait()
            super().__init__(*arguments, **more)

    monkeypatch.setattr("forebay.client.sync.HostDoor", Slow)
    found: list[HostDoor] = []
    with Client("http://127.0.0.1:9") as client:
        threads = [threading.Thread(target=lambda: found.append(client.door)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert found == [client.door] * 2
