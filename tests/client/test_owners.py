"""Reads go to the owners of objects, whatever happens to owners and maps, and only where every node gives the same."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest

from forebay.aio import connect as connect_async
from forebay.client import connection, owners
from forebay.client.sync import Client
from forebay.core.errors import Busy, NotFound, Unavailable
from forebay.core.messages.http1 import Endpoint
from forebay.core.messages.node_state import MapNode, NodeMap
from forebay.core.placement import Members
from forebay.core.types import FRESH_IMMUTABLE
from forebay.ports import clock as system_clock
from tests.client.fake_node import FakeNode

KEYS = [f"key-{number}" for number in range(40)]
IDS = ["n1", "n2", "n3"]


class Nodes:
    """Three nodes that have the same; a client knows the first."""

    def __init__(self, nodes: list[FakeNode]) -> None:
        self.nodes = nodes
        for node in nodes:
            node.objects["corpus"] = {key: key.encode() * 100 for key in KEYS}
            node.settings["corpus"] = msgspec.structs.replace(node.settings["corpus"], freshness_s=FRESH_IMMUTABLE)
        self.become(IDS)

    def become(self, ids: list[str]) -> None:
        """Those are the nodes of the map from now on."""
        urls = dict(zip(IDS, [node.url for node in self.nodes], strict=True))
        for node in self.nodes:
            node.map = NodeMap(1, [MapNode(name, urls[name]) for name in ids])
        self.members = Members(ids)

    def asked(self, part: str = "/objects/") -> list[list[str]]:
        """The keys that each was asked for since the last time."""
        seen = [[target.rpartition("/")[2] for target in node.requests("GET", part)] for node in self.nodes]
        for node in self.nodes:
            node.seen.clear()
        return seen

    def owned(self, keys: list[str]) -> list[list[str]]:
        return [[key for key in keys if self.members.first("corpus", key) == name] for name in IDS]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes([stack.enter_context(FakeNode()) for _ in IDS])


@pytest.fixture
def client(nodes: Nodes) -> Iterator[Client]:
    with Client(nodes.nodes[0].url) as client:
        for key in KEYS[: owners.FIRST_OBJECTS]:
            client.get("corpus", key)
        assert nodes.asked() == [KEYS[: owners.FIRST_OBJECTS], [], []]
        yield client


def read_all(client: Client) -> None:
    for key in KEYS:
        assert client.get("corpus", key) == key.encode() * 100


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock of owners says, as the last of a list."""
    now = [1000.0]
    monkeypatch.setattr(system_clock, "monotonic_s", lambda: now[-1])
    return now


def test_each_is_read_at_its_owner(nodes: Nodes, client: Client) -> None:
    read_all(client)
    assert len(nodes.nodes[0].requests("GET", "/-/v1/map")) == 1
    assert len(nodes.nodes[0].requests("GET", "/-/v1/buckets/corpus")) == 1
    assert nodes.asked() == nodes.owned(KEYS)
    key = nodes.owned(KEYS)[1][0]
    buffer, out = bytearray(1000), io.BytesIO()
    client.get_into("corpus", key, buffer)
    with client.open("corpus", key) as file:
        file.seek(10)
        out.write(file.read())
    assert out.getvalue() == (key.encode() * 100)[10:]
    assert client.head("corpus", key).size_bytes == len(key) * 100
    assert nodes.asked()[0] == []


def test_threads_that_begin_together_all_ask_for_the_map_first(nodes: Nodes) -> None:
    """What they read meanwhile at a node that does not own it would cross two links."""
    others = [key for own in nodes.owned(KEYS)[1:] for key in own]
    begin = threading.Barrier(len(others))

    def read(key: str) -> bytes:
        begin.wait(60)
        return client.get("corpus", key)

    with Client(nodes.nodes[0].url) as client, ThreadPoolExecutor(len(others)) as pool:
        assert list(pool.map(read, others)) == [key.encode() * 100 for key in others]
    assert len(nodes.asked()[0]) <= 2 * owners.FIRST_OBJECTS, "two threads may count as one"


def test_what_cannot_be_learnt_again_changes_nothing(nodes: Nodes, client: Client, clock: list[float]) -> None:
    read_all(client)
    for failures, buckets_asked in (([Busy("come back")], 0), ([], 1)):  # the map, and then nothing
        nodes.asked()
        clock.append(clock[-1] + owners.MAP_S + 1)
        nodes.nodes[0].fail_next = [*failures]
        read_all(client)
        assert len(nodes.nodes[0].requests("GET", "/-/v1/buckets/corpus")) == buckets_asked
        assert nodes.asked() == nodes.owned(KEYS)


@pytest.mark.parametrize("how", ["put", "delete", "copy", "append"])
def test_who_writes_reads_what_it_wrote(nodes: Nodes, client: Client, how: str) -> None:
    """The others do not hear of it: they go on with what they have."""
    key, other = nodes.owned(KEYS)[1][:2]
    assert client.get("corpus", key) == key.encode() * 100
    assert len(nodes.asked()[1]) == 1
    match how:
        case "put":
            client.put("corpus", key, b"new")
        case "delete":
            client.delete("corpus", other)
        case "copy":
            client.copy("corpus", other, "corpus", key)
        case "append":
            with suppress(NotFound):  # a node that is none has no tars
                client.append_member("corpus", key, "name", b"more")
    client.get("corpus", key)
    assert nodes.asked() == [[key], [], []]


def test_the_same_without_blocking(nodes: Nodes) -> None:
    async def story() -> None:
        async with connect_async(nodes.nodes[0].url) as client:
            for key in KEYS:
                assert await client.get("corpus", key) == key.encode() * 100

    asyncio.run(story())
    later = KEYS[owners.FIRST_OBJECTS :]
    assert [keys[-len(own) :] for keys, own in zip(nodes.asked(), nodes.owned(later), strict=True)] == nodes.owned(
        later
    )


def test_an_owner_that_dies_fails_no_read_and_is_tried_again(nodes: Nodes, client: Client, clock: list[float]) -> None:
    read_all(client)
    second = nodes.nodes[1]
    second.cut_after = 10
    read_all(client)  # its first answer ends early
    nodes.asked()
    second.cut_after = None
    read_all(client)
    assert nodes.asked()[1] == [], "it rests"
    clock.append(clock[-1] + owners.REST_S)
    read_all(client)
    assert nodes.asked() == nodes.owned(KEYS)
    second.__exit__()
    read_all(client)
    sunk = bytearray(1000)
    clock.append(clock[-1] + owners.REST_S)
    client.get_into("corpus", nodes.owned(KEYS)[1][0], sunk)
    assert len(nodes.asked()[0]) == len(nodes.owned(KEYS)[0] + nodes.owned(KEYS)[1]) + 1
    second.__enter__()


def test_what_an_owner_breaks_off_is_gone_on_with_at_the_own_node(nodes: Nodes, client: Client) -> None:
    """Also where somebody has seen bytes: no byte comes twice."""
    read_all(client)
    second = nodes.owned(KEYS)[1][0]
    nodes.asked()
    nodes.nodes[1].cuts = [10]
    room = bytearray(1000)
    assert client.get_into("corpus", second, room).body_bytes == len(second) * 100
    assert room.startswith(second.encode() * 100)
    asked = [headers.get("range", "") for node in nodes.nodes for method, _, headers in node.seen if method == "GET"]
    assert asked == [f"bytes=10-{len(second) * 100 - 1}", ""]
    nodes.asked()
    client.get("corpus", second)
    assert nodes.asked() == [[second], [], []], "it rests"


def test_maps_are_followed(nodes: Nodes, client: Client, clock: list[float]) -> None:
    read_all(client)
    nodes.asked()
    nodes.become(["n1", "n3"])
    clock.append(clock[-1] + owners.MAP_S)
    read_all(client)
    assert nodes.asked() == nodes.owned(KEYS)
    for node in nodes.nodes:
        node.map = NodeMap(3, [MapNode("n1", "what is this"), MapNode("n2", "https://127.0.0.1:1"), MapNode("n3", "")])
    clock.append(clock[-1] + owners.MAP_S)
    read_all(client)
    assert nodes.asked() == [KEYS, [], []], "nobody else can be asked"


def test_where_no_owner_can_be_reached_few_are_tried(
    nodes: Nodes, client: Client, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    opened = connection._open

    def spy(at: Endpoint, *more: Any) -> Any:
        tried.append(at)
        return opened(at, *more)

    monkeypatch.setattr(connection, "_open", spy)
    for node in nodes.nodes[1:]:
        node.__exit__()
    read_all(client)
    assert len(tried) == 1
    clock.append(clock[-1] + owners.REST_S)
    read_all(client)
    clock.append(clock[-1] + owners.REST_S)
    read_all(client)
    assert len(tried) == 2, "the second time for longer"
    for node in nodes.nodes[1:]:
        node.__enter__()


@pytest.mark.parametrize("error", [NotFound("none"), Unavailable("not now"), Busy("too many")])
def test_what_an_owner_refuses_the_own_node_decides(nodes: Nodes, client: Client, error: Any) -> None:
    key = nodes.owned(KEYS[owners.FIRST_OBJECTS :])[2][0]
    client.get("corpus", key)
    nodes.asked()
    nodes.nodes[2].fail_next = [error, error, error]
    assert client.get("corpus", key) == key.encode() * 100
    with client.open("corpus", key) as file:
        assert file.read() == key.encode() * 100
    nodes.nodes[2].fail_next = []
    with pytest.raises(NotFound):
        client.get("corpus", "nothing")


@pytest.mark.parametrize("changed", [{"freshness_s": 60.0}, {"write": "back", "freshness_s": 0.0}])
def test_what_nodes_may_see_differently_is_read_at_the_own_node(
    nodes: Nodes, client: Client, changed: dict[str, Any]
) -> None:
    for node in nodes.nodes:
        node.settings["corpus"] = msgspec.structs.replace(node.settings["corpus"], **changed)
    read_all(client)
    assert nodes.asked() == [KEYS, [], []]


def test_who_tells_hints_reads_where_they_are_heard(nodes: Nodes, client: Client) -> None:
    read_all(client)
    nodes.asked()
    client.hints("job", None)  # type: ignore[arg-type]
    read_all(client)
    assert nodes.asked() == [KEYS, [], []]


def test_a_node_alone_is_asked_once_a_minute(nodes: Nodes, client: Client, clock: list[float]) -> None:
    nodes.become(["n1"])
    read_all(client)
    clock.append(clock[-1] + owners.LONE_S - 1)
    read_all(client)
    assert len(nodes.asked("/-/v1/map")[0]) == 1
    clock.append(clock[-1] + 2)
    nodes.become(IDS)
    read_all(client)
    assert nodes.asked() == nodes.owned(KEYS)
