"""Relays under attack: many at once, owners that stop or say too much, clients that ask for everything in odd ways."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from bench import servers
from forebay.core.limits import MIB
from forebay.core.messages.wire import Relay
from forebay.node.front.http.sender import SOURCE_PATIENCE_S
from forebay.node.front.objects.relay import IDLE_MAX, UNDER_WAY_MAX, Refused, Sources
from tests.node.conftest import NodeProcess
from tests.node.test_cluster import flags, until_all_are, url
from tests.node.test_relays import BODIES, Pair, pipes
from tests.patience import until

SIZE = 2 * MIB
HEAD = b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 0-%d/%d\r\nETag: "of-it"\r\n\r\n'


@pytest.fixture(scope="module")
def pair(etcd: servers.EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two nodes for all tests here; the last of them stops the second."""
    at = tmp_path_factory.mktemp("pair")
    (at / "bucket").mkdir()
    cluster = flags(at, url(etcd.addresses, uuid.uuid4().hex))
    nodes = [NodeProcess(at / name, *cluster) for name in ("first", "second")]
    try:
        for one in nodes:
            one.start()
        ids = until_all_are("active", *nodes)
        for one in nodes:
            one.add_bucket("corpus", f"file://{at / 'bucket'}")
        yield Pair(nodes, ids, at / "bucket")
    finally:
        for one in nodes:
            one.stop()


def at_once(pair: Pair, asked: list[tuple[str, dict[str, str]]]) -> list[tuple[int, bytes]]:
    """What the first node answers to GETs that it finds all together."""
    host, port = pair.first.endpoint.removeprefix("http://").split(":")
    engine = pair.first.children()["engine"]
    with ExitStack() as stack:
        connections = []
        for _ in asked:
            connections.append(stack.enter_context(closing(http.client.HTTPConnection(host, int(port), timeout=60))))
            connections[-1].connect()
        pair.first.metric("forebay_flights")  # by now it has accepted them
        os.kill(engine, signal.SIGSTOP)
        for connection, (key, headers) in zip(connections, asked, strict=True):
            connection.request("GET", f"/corpus/{key}", headers=headers)
        os.kill(engine, signal.SIGCONT)
        answers = [connection.getresponse() for connection in connections]
        return [(answer.status, answer.read()) for answer in answers]


def heads(pair: Pair) -> int:
    lines = pair.first.ask("GET", "/-/metrics")[1].decode().splitlines()
    told = [line for line in lines if line.startswith("forebay_backend_requests_total") and 'verb="head"' in line]
    return sum(int(float(line.split()[-1])) for line in told)


def test_of_many_who_ask_at_once_for_the_same_few_are_relayed(pair: Pair) -> None:
    """The link from the owner carries the bytes once more for the copy, and not once for each."""
    key, before = pair.put("one"), pair.relayed()
    assert at_once(pair, [(key, {})] * 24) == [(200, BODIES["one"])] * 24
    assert pair.relayed() - before <= 2 * len(BODIES["one"])
    until(lambda: pair.held(key) == len(BODIES["one"]), "that it is kept")

    # each a part of the same object: the backend is not asked by each after the other
    key, before = pair.put("long"), heads(pair)
    parts = [(start, start + 2 * MIB) for start in range(0, 16 * MIB, 2 * MIB)]
    asked = [(key, {"Range": f"bytes={start}-{end - 1}"}) for start, end in parts]
    assert at_once(pair, asked) == [(206, BODIES["long"][start:end]) for start, end in parts]
    assert heads(pair) - before <= 3


def test_no_more_are_relayed_at_once_than_may_be(pair: Pair) -> None:
    """Clients that take nothing have pipes for as many as are allowed, however many ask before the owner answers."""
    front = pair.first.children()["engine"]  # which has the only front
    before = len(pipes(front))
    host, port = pair.first.endpoint.removeprefix("http://").split(":")
    key = pair.put("long")
    keys = [pair.put("long", b"") for _ in range(UNDER_WAY_MAX + 16)]
    for each in keys:
        (pair.root / each).unlink()
        os.link(pair.root / key, pair.root / each)
    with ExitStack() as stack:
        for each in keys:
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(f"GET /corpus/{each} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        until(lambda: len(pipes(front)) - before >= UNDER_WAY_MAX, "that many are relayed")
        assert pair.first.ask("GET", "/-/metrics")[0] == 200
        assert len(pipes(front)) - before <= 2 * UNDER_WAY_MAX
    until(lambda: len(pipes(front)) - before <= 2 * IDLE_MAX, "that pipes of clients that went are closed")


# --- what one front does, alone --------------------------------------------------------------------------------------
class Owner:
    """A node that answers every request with SIZE bytes in two parts, and may say `more` than that, or nothing."""

    def __init__(self) -> None:
        self.more, self.connections = b"", 0
        self.open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.of = Relay("n1", "127.0.0.1", self._listener.getsockname()[1], b"GET /b/k HTTP/1.1\r\n\r\n", "of-it", SIZE)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self.open.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(10_000):
                connection.sendall(HEAD % (SIZE, SIZE - 1, SIZE) + bytes(SIZE) + self.more)

    def hang_up(self) -> None:
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def close(self) -> None:
        self._listener.close()
        self.hang_up()


@contextmanager
def owners(count: int) -> Iterator[list[Owner]]:
    made = [Owner() for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


async def taken(sources: Sources, of: Relay) -> None:
    """Relay a body, to nobody, as a client's connection does: waiting for more than one byte at a time."""
    body = await sources.open(of, 0)
    connection, left = body.source.socket, SIZE - len(body.source.first)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 256 * 1024)
    while left:
        left -= len(await asyncio.get_running_loop().sock_recv(connection, min(left, 256 * 1024)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, min(left, 256 * 1024)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 256 * 1024)
    body.end()


def test_what_an_owner_says_unasked_is_in_no_answer() -> None:
    """A few bytes too many after a body: the connection is not used again."""

    async def run(owner: Owner) -> None:
        sources = Sources()
        owner.more = HEAD % (SIZE, SIZE - 1, SIZE)
        await taken(sources, owner.of)
        await asyncio.sleep(0.05)
        (await sources.open(owner.of, 0)).close()
        sources.close()
        assert owner.connections == 2

    with owners(1) as made:
        asyncio.run(run(made[0]))


def test_connections_that_owners_closed_take_no_places() -> None:
    async def run(made: list[Owner]) -> None:
        sources = Sources()
        gone, other = made
        bodies = [await sources.open(gone.of, 0) for _ in range(IDLE_MAX)]
        for body in bodies:
            body.end()  # as if it had been taken
        gone.hang_up()
        await taken(sources, other.of)
        await taken(sources, other.of)
        assert other.connections == 1
        sources.close()
        assert sources.under_way == 0

    with owners(2) as made:
        asyncio.run(run(made))


def test_an_owner_is_not_to_blame_for_want_of_descriptors() -> None:
    async def dial(host: str, port: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    async def run() -> None:
        sources = Sources(dial)
        with pytest.raises(Refused):
            await sources.open(Relay("n1", "127.0.0.1", 1, b"", "e", SIZE), 0)
        assert sources.under_way == 0

    asyncio.run(run())


# --- last -----------------------------------------------------------------------------------------------------------
def test_an_owner_that_stops_in_the_middle_is_waited_for_once(pair: Pair) -> None:
    """The engine hears that the owner is silent, and does not wait for it again. What was sent counts once."""
    key, before = pair.put("long"), pair.first.metric("forebay_sent_bytes_total")
    host, port = pair.first.endpoint.removeprefix("http://").split(":")
    owner = pair.second.children()["engine"]
    with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
        connection.request("GET", f"/corpus/{key}")
        answer = connection.getresponse()
        body = answer.read(MIB)
        os.kill(owner, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            body += answer.read()
        finally:
            with suppress(ProcessLookupError):  # its supervisor replaces one that hangs
                os.kill(owner, signal.SIGCONT)
    assert body == BODIES["long"]
    assert pair.first.metric("forebay_sent_bytes_total") - before < len(body) + MIB, "what was not sent counts"
    assert time.monotonic() - began_s < 2 * SOURCE_PATIENCE_S
