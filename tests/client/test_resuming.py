"""A read whose answer is cut goes on with the rest of the same version, and fails only if that does not come either."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.aio import connect as connect_async
from forebay.client import resuming
from forebay.client.connection import CUT, Collected, Connection, CutOff
from forebay.client.sync import Client
from forebay.core.errors import Busy, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.messages.http1 import Request, Response
from forebay.core.types import RangeSpec
from tests.client.fake_node import FakeNode

DATA = bytes(range(256)) * 12_000  # 3 MB
OTHER = DATA[::-1]
Read = Callable[[FakeNode, Path], bytes]


@pytest.fixture(autouse=True)
def there(node: FakeNode) -> None:
    node.objects["corpus"]["a"] = DATA


def ranges(node: FakeNode) -> list[str]:
    return [headers.get("range", "").removeprefix("bytes=") for method, _, headers in node.seen if method == "GET"]


def get(node: FakeNode, tmp_path: Path) -> bytes:
    with Client(node.url) as client:
        return client.get("corpus", "a")


def get_into(node: FakeNode, tmp_path: Path) -> bytes:
    room = bytearray(len(DATA) + 10)
    with Client(node.url) as client:
        got = client.get_into("corpus", "a", room)
        assert (got.start, got.size_bytes, got.body_bytes) == (0, len(DATA), len(DATA))
    return bytes(room[: got.body_bytes])


def download(node: FakeNode, tmp_path: Path) -> bytes:
    seen: list[tuple[int, int]] = []
    with Client(node.url) as client:
        client.download("corpus", "a", str(tmp_path / "a"), progress=lambda *at: seen.append(at))
    assert seen == sorted(seen), "no byte is told of twice"
    return (tmp_path / "a").read_bytes()


def get_async(node: FakeNode, tmp_path: Path) -> bytes:
    async def story() -> bytes:
        async with connect_async(node.url) as client:
            return await client.get("corpus", "a")

    return asyncio.run(story())


def get_into_async(node: FakeNode, tmp_path: Path) -> bytes:
    room = bytearray(len(DATA))

    async def story() -> None:
        async with connect_async(node.url) as client:
            await client.get_into("corpus", "a", room)

    asyncio.run(story())
    return bytes(room)


READS = [get, get_into, download, get_async, get_into_async]


@pytest.mark.parametrize("read", READS)
def test_the_rest_is_asked_for(node: FakeNode, tmp_path: Path, read: Read) -> None:
    node.cuts = [89_164]
    assert read(node, tmp_path) == DATA
    assert ranges(node) == ["", f"89164-{len(DATA) - 1}"]
    etag = node.etag("corpus", "a")
    assert [headers.get("if-match") for _, _, headers in node.seen] == [None, f'"{etag}"']


@pytest.mark.parametrize("read", READS)
def test_cuts_in_a_row_are_an_error(node: FakeNode, tmp_path: Path, read: Read) -> None:
    node.cut_after = 1000
    with pytest.raises(Unavailable, match=f"cut after 1000 of {len(DATA)} bytes") as caught:
        read(node, tmp_path)
    assert caught.value.code == CUT
    assert len(ranges(node)) == 1 + resuming.CUTS_MAX


@pytest.mark.parametrize("read", READS)
def test_what_was_not_answered_is_asked_again(node: FakeNode, tmp_path: Path, read: Read) -> None:
    node.cuts = [-1, -1, -1]
    assert read(node, tmp_path) == DATA
    node.cuts = [-1, 1000, -1, 1000]
    assert read(node, tmp_path) == DATA
    assert len(ranges(node)) == 4 + 5
    node.cut_after = -1
    with pytest.raises(Unavailable, match="without an answer") as caught:
        read(node, tmp_path)
    assert caught.value.code == CUT


def test_progress_renews_the_patience(node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "PROGRESS_BYTES", 100_000)
    node.cuts = [*range(100_000, 3_000_000, 100_000)]
    assert get(node, tmp_path) == DATA
    assert len(ranges(node)) == 30
    node.cuts = [*range(50_000, 200_000, 50_000)]
    assert get(node, tmp_path) == DATA
    node.cuts = [*range(20_000, 200_000, 20_000)]
    with pytest.raises(Unavailable, match="cut after 80000 of"):
        get(node, tmp_path)


@pytest.mark.parametrize(
    ("asked", "start", "end"),
    [(RangeSpec(10, 2_000_009), 10, 2_000_010), (RangeSpec(500, None), 500, None), (RangeSpec(None, 900), -900, None)],
)
def test_ranges_too(node: FakeNode, asked: RangeSpec, start: int, end: int | None) -> None:
    wanted = DATA[start:end]
    first = start % len(DATA)
    node.cuts = [first + 100]
    with Client(node.url) as client:
        assert client.get("corpus", "a", range=asked) == wanted
    assert ranges(node)[1:] == [f"{first + 100}-{first + len(wanted) - 1}"]


@pytest.mark.parametrize("read", [get, get_into, get_async, get_into_async])
def test_another_version_is_read_from_its_start(node: FakeNode, tmp_path: Path, read: Read) -> None:
    def change(key: str, done: int) -> None:
        node.objects["corpus"]["a"] = OTHER

    node.cuts, node.on_body = [1000], change
    assert read(node, tmp_path) == OTHER
    assert ranges(node) == ["", f"1000-{len(DATA) - 1}", ""]


def test_who_has_seen_bytes_or_wants_one_version_hears_that_it_changed(node: FakeNode, tmp_path: Path) -> None:
    etag = node.etag("corpus", "a")

    def change(key: str, done: int) -> None:
        node.objects["corpus"]["a"] = OTHER

    node.cuts, node.on_body = [1000], change
    with pytest.raises(Precondition, match="corpus/a"):
        download(node, tmp_path)
    assert not (tmp_path / "a").exists()
    node.objects["corpus"]["a"], node.cuts = DATA, [1000]
    with Client(node.url) as client, pytest.raises(Precondition):
        client.get("corpus", "a", etag=etag)


def test_what_changes_each_time_is_given_up(node: FakeNode, tmp_path: Path) -> None:
    def change(key: str, done: int) -> None:
        node.objects["corpus"]["a"] = node.objects["corpus"]["a"][1:]

    node.cut_after, node.on_body = 1000, change
    for read in (get, get_async):
        with pytest.raises(Busy, match="corpus/a changed 3 times"):
            read(node, tmp_path)


@pytest.mark.parametrize("error", [Busy("too many"), Unavailable("the backend is gone"), NotFound("it is not there")])
def test_what_the_node_says_ends_the_read(node: FakeNode, tmp_path: Path, error: ForebayError) -> None:
    node.cuts = [1000]
    node.on_body = lambda key, done: node.fail_next.append(error)
    with pytest.raises(type(error), match=error.message):
        get(node, tmp_path)
    assert len(ranges(node)) == 2


def test_a_node_that_is_gone_is_not_waited_for(node: FakeNode, tmp_path: Path) -> None:
    def end(key: str, done: int) -> None:
        node.server.shutdown()
        node.server.server_close()

    node.cuts, node.on_body = [1000], end
    with pytest.raises(Unavailable) as caught:
        get(node, tmp_path)
    assert caught.value.code == "NoNode"


@pytest.mark.parametrize("read", READS)
def test_what_names_no_version_is_not_gone_on_with(node: FakeNode, tmp_path: Path, read: Read) -> None:
    node.no_etag, node.cuts = True, [1000]
    with pytest.raises(Unavailable, match="cut after 1000"):
        read(node, tmp_path)
    assert ranges(node) == [""]


def test_a_machine_that_is_lost_within_an_answer_ends_it_as_a_cut(
    node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says ETIMEDOUT then."""
    receive, lost = Connection._receive_into, [1]

    def once(self: Connection, view: memoryview) -> int:
        if lost:
            lost.pop()
            raise self._silent(TimeoutError(110, "Connection timed out"))
        return receive(self, view)

    monkeypatch.setattr(Connection, "_receive_into", once)
    assert get_into(node, tmp_path) == DATA
    assert len(ranges(node)) == 2


def test_a_reader_goes_on_over_cuts(node: FakeNode) -> None:
    node.cuts = [0, 0, 1000, 1000, 1000]
    with Client(node.url) as client, client.open("corpus", "a") as file:
        assert file.read() == DATA
        file.seek(5000)
        node.cuts = [6000, 6000, 7000]
        assert file.read(10_000) == DATA[5000:15_000]
        node.cut_after = 0
        file.seek(0)
        with pytest.raises(Unavailable):
            file.read()


def test_what_came_in_chunks_is_not_asked_for_twice() -> None:
    """Nobody knows how much of it there is."""
    cut = CutOff("cut", Response(200, {"transfer-encoding": "chunked", "etag": '"one"'}), Collected(), 3)
    flow = resuming.from_own_node(Request("GET", "/-/v1/objects/corpus/a"))
    next(flow)
    with pytest.raises(CutOff):
        flow.throw(cut)


def test_the_error_reaches_another_process() -> None:
    error: Any = CutOff("cut", Response(200, {}), Collected(1), 0)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.code, error.kind) == (Unavailable, "cut", CUT, "Unavailable")
