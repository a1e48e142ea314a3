"""A body that comes through a thread can be closed at any time, and the loop never waits for that thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from forebay.backends.http.requests import Wire, anonymous
from forebay.core import limits
from tests.patience import PATIENCE_S

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
