"""A relay between a node and a server of S3 that loses answers: the server has acted, and nobody hears of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"


class Lossy:
    """Relays HTTP/1.1 to `endpoint`. `lose` is asked about each request line; if it says so the answer is read, and
    the connection is closed instead. `before` is called then, before the node can try again."""

    def __init__(self, endpoint: str) -> None:
        split = urlsplit(endpoint)
        self._server = (split.hostname or "", split.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose: Callable[[str], bool] = lambda line: False
        self.before: Callable[[], None] = lambda: None
        self.lost: list[str] = []
        self.seen: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_once(self, *words: str) -> None:
        """Lose the answer to the next request whose line has all these words."""
        self.lost, self.seen, self.before = [], [], lambda: None
        lock = threading.Lock()

        def lose(line: str) -> bool:
            with lock:
                return not self.lost and all(word in line for word in words) and not self.lost.append(line)  # type: ignore[func-returns-value]

        self.lose = lose

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[client], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client, socket.create_connection(self._server) as server:
            asking, answering = client.makefile("rb"), server.makefile("rb")
            with asking, answering:
                while head := _head(asking):
                    line = head.partition(b"\r\n")[0].decode()
                    self.seen.append(line)
                    server.sendall(head)
                    _relay(asking, server.sendall, _length(head))
                    if not (told := _head(answering)):
                        return
                    if self.lose(line):
                        self.before()
                        return
                    client.sendall(told)
                    if b"transfer-encoding: chunked" in told.lower():
                        _relay_chunks(answering, client.sendall)
                    elif not line.startswith("HEAD ") and told.split()[1] not in (b"204", b"304"):
                        _relay(answering, client.sendall, _length(told))


def _head(file) -> bytes:  # type: ignore[no-untyped-def]
    lines = []
    while line := file.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


def _relay(file, send: Callable[[bytes], object], left: int) -> None:  # type: ignore[no-untyped-def]
    while left and (data := file.read1(min(left, 1 << 18))):
        send(data)
        left -= len(data)


def _relay_chunks(file, send: Callable[[bytes], object]) -> None:  # type: ignore[no-untyped-def]
    while size := file.readline():
        send(size)
        _relay(file, send, int(size.split(b";")[0], 16) + 2)
        if size.strip() == b"0":
            return
