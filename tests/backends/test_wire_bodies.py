"""A body that comes through a thread can be closed at any time, and the loop never waits for that thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from forebay.backends.http import bodies
from forebay.backends.http.bodies import Exchange
from forebay.backends.http.requests import Wire, anonymous
from forebay.backends.seam import Body
from forebay.core import limits
from tests.patience import PATIENCE_S, until_async

HEAD = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "1"\r\n\r\n'


@pytest.fixture
def halting() -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that sends half of each body, and then nothing; its connections."""
    server, taken = socket.create_server(("127.0.0.1", 0)), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                taken.append(connection)
                connection.recv(65536)
                connection.sendall(HEAD + b"x" * 500)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/bucket", taken
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for connection in taken:
        connection.close()


def test_a_body_that_has_stopped_is_closed_at_once(
    halting: tuple[str, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads may lose patience while a thread waits for the next bytes."""
    url, taken = halting
    monkeypatch.setattr(limits, "BACKEND_STALL_TIMEOUT_S", 3600.0)

    async def story() -> None:
        wire = Wire(url, anonymous, {})
        fetch = await wire.run(lambda: wire.open("key", None, ""))
        chunks = fetch.__aiter__()
        assert len(await anext(chunks)) == 500
        waiting = asyncio.ensure_future(anext(chunks))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await waiting
        await fetch.aclose()  # blocked the loop for as long as the thread waited
        server_side = taken[0]
        server_side.settimeout(PATIENCE_S)
        assert await asyncio.to_thread(server_side.recv, 1) == b"", "the connection has ended"
        wire.close()

    asyncio.run(story())


def test_what_the_network_has_not_taken_of_a_write_that_was_given_up_never_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would, when the network is back, and undo what others wrote since."""
    body, exchanges = os.urandom(256 * 1024), list[Exchange]()

    def begin(threads: bodies.Threads) -> Exchange:
        exchanges.append(Exchange(threads))
        return exchanges[-1]

    monkeypatch.setattr(bodies, "Exchange", begin)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # the rest waits at the sender

        async def story() -> socket.socket:
            wire = Wire(f"http://127.0.0.1:{server.getsockname()[1]}/bucket", anonymous, {})
            telling = asyncio.ensure_future(wire.tell("PUT", "key", body=Body(len(body), body)))
            connection, _ = await asyncio.to_thread(server.accept)
            await until_async(lambda: len(connection.recv(1 << 20, socket.MSG_PEEK)) > 1024, "that it sends")
            (exchange,) = exchanges
            await until_async(lambda: _waits_for_an_answer(exchange), "that all of it is with the kernel")
            telling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await telling
            await until_async(lambda: exchange.connection is None, "that it is closed")
            wire.close()
            return connection

        with asyncio.run(story()) as connection:
            arrived = b""
            with contextlib.suppress(ConnectionResetError):
                while data := connection.recv(1 << 20):
                    arrived += data
    assert len(arrived) < len(body) // 2


def _waits_for_an_answer(exchange: Exchange) -> bool:
    """Whether nothing is left to be handed to the kernel: a thread of it waits in a receive."""
    frames = [frame for frame in sys._current_frames().values() if frame.f_code.co_name == "readinto"]
    return exchange.connection is not None and bool(frames)
