"""How the pieces of a large object are asked for, and what becomes of the memory that they are received in."""

from __future__ import annotations

import asyncio
import threading
from io import BytesIO

import pytest

from forebay.aio import connect as connect_async
from forebay.client import sync
from forebay.client.connection import CUT
from forebay.client.resuming import CUTS_MAX
from forebay.client.stripes import Striped
from forebay.core.errors import Unavailable
from forebay.core.limits import CLIENT_LANE_STRIPES, MIB, STRIPE_BYTES
from forebay.core.messages.http1 import Endpoint, Request, Response
from forebay.core.types import RangeSpec

NODES = [Endpoint("http", f"10.0.0.{number}", 9400) for number in range(3)]
SIZE = 7 * STRIPE_BYTES + 5 * MIB
ETAG = '"of-all-stripes"'


class Owned:
    """Every third stripe is at the same node, whichever the object is."""

    def owner(self, bucket: str, key: str, stripe: int, *, pinned: bool = False) -> Endpoint | None:
        assert pinned
        return NODES[stripe % 3] if stripe % 3 else None  # the first of them is the client's own

    def failed(self, owner: Endpoint) -> None: ...

    def answered(self, owner: Endpoint, response: Response) -> None: ...


def begun() -> Striped:
    head = {"content-length": str(SIZE), "etag": ETAG, "last-modified": "Tue, 14 Nov 2023 22:13:25 GMT"}
    return Striped(Owned(), Request("GET", "/bucket/key", of=("bucket", "key")), Response(200, head))  # type: ignore[arg-type]


def byte_at(position: int) -> int:
    return position // MIB % 251


def answer(request: Request) -> Response:
    """As a node would: each MiB has bytes of its own."""
    first, _, last = dict(request.headers)["Range"].removeprefix("bytes=").partition("-")
    start, end = RangeSpec(int(first), int(last)).resolve(SIZE)
    length = {"content-length": str(end - start), "content-range": f"bytes {start}-{end - 1}/{SIZE}", "etag": ETAG}
    response = Response(206, {**length, "last-modified": "Tue, 14 Nov 2023 22:13:25 GMT"}, size_bytes=end - start)
    assert request.sink is not None
    request.sink.begin(response)
    while start < end:
        view = request.sink.buffer()
        size = min(len(view), MIB - start % MIB, end - start)
        view[:size] = bytes([byte_at(start)]) * size
        request.sink.wrote(size)
        start += size
    return response


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> sync.Client:
    found = sync.Client("http://10.0.0.0:9400")
    monkeypatch.setattr(found, "send", answer)
    monkeypatch.setattr(found, "run", lambda flow: sync.driven(flow, found.send))
    return found


def is_right(body: bytes) -> bool:
    return len(body) == SIZE and all(body[at] == body[at + MIB - 1] == byte_at(at) for at in range(0, SIZE, MIB))


@pytest.mark.parametrize("times", [1, CUTS_MAX, CUTS_MAX + 1])
def test_a_stripe_that_the_own_node_breaks_off_is_gone_on_with(
    client: sync.Client, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    asked: list[str] = []

    def one(request: Request) -> Response:
        wanted = dict(request.headers)["Range"]
        if request.at is None and wanted.endswith(f"-{4 * STRIPE_BYTES - 1}"):  # the fourth stripe
            asked.append(wanted)
            if len(asked) <= times:
                assert request.sink is not None
                request.sink.buffer()[:10] = bytes([byte_at(3 * STRIPE_BYTES)]) * 10
                request.sink.wrote(10)
                raise Unavailable("cut", code=CUT)
        return answer(request)

    monkeypatch.setattr(client, "send", one)
    if times > CUTS_MAX:
        with pytest.raises(Unavailable, match="cut"):
            client._gathered(begun())
    else:
        assert is_right(client._gathered(begun()).body)
    wanted = [f"bytes={3 * STRIPE_BYTES + 10 * n}-{4 * STRIPE_BYTES - 1}" for n in range(CUTS_MAX + 1)]
    assert asked == wanted[: times + 1]


def test_each_owner_has_a_lane() -> None:
    lanes = begun().lanes()
    assert [[piece.start // STRIPE_BYTES for piece in lane] for lane in lanes] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_what_is_returned_is_what_was_received_into(client: sync.Client) -> None:
    striped = begun()
    body = client._gathered(striped).body
    assert is_right(body)
    collected = striped._collected
    assert collected is not None
    room: BytesIO = collected._rooms[0]
    assert room.getvalue() is body, "it was copied"


def test_a_lane_whose_owner_is_slow_holds_up_no_other(client: sync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than its share of requests waits at an owner, and the others' stripes all come meanwhile."""
    rest, slow, most, lock = threading.Event(), 0, 0, threading.Lock()
    done: list[int] = []

    def look() -> None:
        if {0, 2, 3, 5, 6} <= set(done) and most >= CLIENT_LANE_STRIPES:
            rest.set()

    def one(request: Request) -> Response:
        nonlocal slow, most
        stripe = int(dict(request.headers)["Range"].removeprefix("bytes=").partition("-")[0]) // STRIPE_BYTES
        if request.at == NODES[1]:
            with lock:
                slow += 1
                most = max(most, slow)
                look()
            assert rest.wait(60)
            with lock:
                slow -= 1
        response = answer(request)
        with lock:
            done.append(stripe)
            look()
        return response

    monkeypatch.setattr(client, "send", one)
    assert is_right(client._gathered(begun()).body)
    assert most == CLIENT_LANE_STRIPES
    assert set(done[:5]) == {0, 2, 3, 5, 6}


def test_a_lane_that_fails_ends_the_read(client: sync.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(request: Request) -> Response:
        if "bytes=16777216-" in dict(request.headers)["Range"]:
            raise Unavailable("neither its owner nor the own node gives it")
        return answer(request)

    monkeypatch.setattr(client, "send", one)
    with pytest.raises(Unavailable, match="neither"):
        client._gathered(begun())


def test_the_same_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with connect_async("http://10.0.0.0:9400") as client:

            async def send(request: Request) -> Response:
                return answer(request)

            monkeypatch.setattr(client, "send", send)
            striped = begun()
            body = (await client._gathered(striped)).body
            assert is_right(body)
            assert striped._collected is not None
            assert striped._collected._rooms[0].getvalue() is body

    asyncio.run(story())
