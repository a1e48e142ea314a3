"""What a front takes from another node, and what it does not: real sockets, answers good and odd, and the splice."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import pytest

from forebay.core.messages.wire import Relay
from forebay.node.front.http import sender
from forebay.node.front.http.sender import ClientGone, FileFailed, Pipe, Sender
from forebay.node.front.objects import relay
from forebay.node.front.objects.relay import Refused, Silent, Sources
from tests.patience import until

START, SIZE = 1000, 700_000
BODY = os.urandom(SIZE)
LENGTH = b"Content-Length: %d\r\n" % SIZE
RANGE = b"Content-Range: bytes %d-%d/5000000\r\n" % (START, START + SIZE - 1)
GOOD = b"HTTP/1.1 206 Partial Content\r\n" + LENGTH + RANGE + b'ETag: "of-it"\r\n\r\n'
Answer = Callable[[socket.socket], None]


class Owner:
    """A node that answers each connection's requests with what `answers` say, one after the other."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.answers: list[Answer] = []
        self.connections = 0
        self.requests: list[bytes] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with suppress(OSError, IndexError):
            while request := connection.recv(10_000):
                self.requests.append(request)
                self.answers.pop(0)(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()

    @property
    def relay(self) -> Relay:
        return Relay("n1", "127.0.0.1", self.port, b"GET /b/k HTTP/1.1\r\nHost: x\r\n\r\n", "of-it", START + SIZE)


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()


class Client(Sender):
    """A client's connection, of which `far` is the other end."""

    def __init__(self) -> None:
        super().__init__()
        near, self.far = socket.socketpair()
        with near:
            self._open_socket(asyncio.get_running_loop(), near.fileno())
        self.progress = 0

    def _progressed(self) -> None:
        self.progress += 1

    def _sent(self) -> None:
        self._wake()

    def _vanished(self) -> None:
        self._close_socket()

    def close(self) -> None:
        self._close_socket()
        self.far.close()

    async def relay_from(self, source: relay.Source) -> None:
        await self._put_and_wait(source.first)
        await self._splice_and_wait(source.socket, source.pipe, SIZE - len(source.first))


def all_of(far: socket.socket) -> bytes:
    got = b""
    while len(got) < SIZE and (piece := far.recv(100_000)):
        got += piece
    return got


async def till(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    while True:
        if is_so():
            return
        await asyncio.sleep(0.001)


def told(story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(run())


def test_bodies_come_whole_one_after_the_other_over_one_connection(owner: Owner) -> None:
    async def story() -> None:
        sources, client = Sources(), Client()
        owner.answers = [lambda there: there.sendall(GOOD + BODY)] * 3
        for _ in range(3):
            relayed = await sources.open(owner.relay, START)
            reading = asyncio.create_task(asyncio.to_thread(all_of, client.far))
            await client.relay_from(relayed.source)
            relayed.end()
            relayed.close()
            assert await reading == BODY
            assert sources.under_way == 0
        assert owner.connections == 1
        assert len(owner.requests) == 3
        sources.close()
        client.close()

    told(story)


ODD: dict[str, bytes] = {
    "another status": b"HTTP/1.1 200 OK\r\n" + LENGTH + RANGE + b'ETag: "of-it"\r\n\r\n',
    "no object": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "another version": GOOD.replace(b"of-it", b"of-that"),
    "no version": GOOD.replace(b'ETag: "of-it"\r\n', b""),
    "another range": GOOD.replace(b"bytes 1000-", b"bytes 1001-"),
    "no range": GOOD.replace(RANGE, b""),
    "fewer bytes": GOOD.replace(LENGTH, b"Content-Length: 699999\r\n"),
    "chunks": GOOD.replace(LENGTH, b"Transfer-Encoding: chunked\r\n"),
    "two lengths": GOOD.replace(LENGTH, LENGTH * 2),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "no end": b"HTTP/1.1 206 Partial Content\r\n" + b"X-More: and more\r\n" * 9000,
}


@pytest.mark.parametrize("what", ODD)
def test_an_answer_that_is_not_what_was_asked_for_is_not_taken(owner: Owner, what: str) -> None:
    async def story() -> None:
        sources = Sources()
        owner.answers = [lambda there: there.sendall(ODD[what])]
        with pytest.raises(Refused):
            await sources.open(owner.relay, START)
        assert sources.under_way == 0
        assert not any(sources._idle.values())

    told(story)


def test_who_does_not_answer_is_silent(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SOURCE_PATIENCE_S", 0.05)

    async def story() -> None:
        sources = Sources()
        owner.answers = [lambda there: None, lambda there: there.close()]
        for _ in range(2):  # nothing comes, and the end comes
            with pytest.raises(Silent):
                await sources.open(owner.relay, START)
        with pytest.raises(Silent):
            await sources.open(Relay("n1", "127.0.0.1", 1, b"", "", 0), 0)
        assert sources.under_way == 0

    told(story)


def test_a_kept_connection_that_was_closed_is_replaced(owner: Owner) -> None:
    """It was closed before the request, which is seen, or while it came, which is not."""

    async def story() -> None:
        sources = Sources()

        def and_end(there: socket.socket) -> None:
            there.sendall(GOOD + BODY)
            there.close()

        client = Client()
        owner.answers = [and_end, lambda there: there.sendall(GOOD + BODY), lambda there: there.close(), and_end]
        for _ in range(3):
            relayed = await sources.open(owner.relay, START)
            reading = asyncio.create_task(asyncio.to_thread(all_of, client.far))
            await client.relay_from(relayed.source)
            relayed.end()
            assert await reading == BODY
        assert owner.connections == 3
        sources.close()
        client.close()

    told(story)


@pytest.mark.parametrize("how", ["ends", "falls silent"])
def test_a_source_that_breaks_off_says_how_much_is_left(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(sender, "SOURCE_PATIENCE_S", 0.05)

    async def story() -> None:
        sources, client = Sources(), Client()

        def half(there: socket.socket) -> None:
            there.sendall(GOOD + BODY[: SIZE // 2])
            if how == "ends":
                there.close()

        owner.answers = [half]
        relayed = await sources.open(owner.relay, START)
        reading = asyncio.create_task(asyncio.to_thread(all_of, client.far))
        with pytest.raises(FileFailed) as failed:
            await client.relay_from(relayed.source)
        relayed.close()
        left_bytes = failed.value.left_bytes
        assert SIZE - SIZE // 2 <= left_bytes <= SIZE - len(relayed.source.first), "some may be in the pipe"
        await client._put_and_wait(BODY[-left_bytes:])  # the connection is as good as before
        assert await reading == BODY
        client.close()

    told(story)


def test_a_client_that_goes_ends_it_and_one_that_waits_for_the_source_is_not_blamed(owner: Owner) -> None:
    async def story() -> None:
        sources, client = Sources(), Client()
        owner.answers = [lambda there: there.sendall(GOOD + BODY[:5000])]
        relayed = await sources.open(owner.relay, START)
        sending = asyncio.create_task(client.relay_from(relayed.source))
        await till(lambda: client._waiter is not None)
        assert not client._sending, "the stall timeout is for clients that do not read"
        client._close_socket()
        with pytest.raises(ClientGone):
            await sending
        relayed.close()
        client.close()
        assert sources.under_way == 0

        client = Client()
        owner.answers = [lambda there: there.sendall(GOOD + BODY)]
        relayed = await sources.open(owner.relay, START)
        sending = asyncio.create_task(client.relay_from(relayed.source))
        await till(lambda: client._sending)  # it reads nothing, so its socket is full in a moment
        client.far.close()
        with pytest.raises(ClientGone):
            await sending
        relayed.close()
        client.close()

    told(story)


def test_a_relay_that_is_cancelled_leaves_no_watch(owner: Owner) -> None:
    async def story() -> None:
        sources = Sources()
        for reads in (False, True):
            client = Client()
            owner.answers = [lambda there: there.sendall(GOOD + BODY[: SIZE - 1])]
            relayed = await sources.open(owner.relay, START)
            reading = asyncio.create_task(asyncio.to_thread(all_of, client.far)) if reads else None
            sending = asyncio.create_task(client.relay_from(relayed.source))
            await till(lambda client=client: client._waiter is not None)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            loop = asyncio.get_running_loop()
            assert not loop.remove_reader(relayed.source.socket)
            assert not loop.remove_writer(client._fd)
            relayed.close()
            client._close_socket()
            if reading is not None:
                await reading  # until it sees the end: a descriptor that is closed under it may be another's by then
            client.close()

    told(story)


def test_no_more_bodies_are_under_way_than_may_be(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "UNDER_WAY_MAX", 2)

    async def story() -> None:
        sources = Sources()
        owner.answers = [lambda there: there.sendall(GOOD)] * 2
        first = await sources.open(owner.relay, START)
        assert sources.has_room
        second = await sources.open(owner.relay, START)
        assert not sources.has_room
        first.close()
        first.close()
        assert sources.under_way == 1
        second.close()
        assert sources.has_room

    told(story)


def test_a_pipe_gives_its_descriptors_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pipe = Pipe()
    assert len(os.listdir("/proc/self/fd")) == before + 2
    pipe.close()
    pipe.close()
    until(lambda: len(os.listdir("/proc/self/fd")) == before)
