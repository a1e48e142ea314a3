"""A web server whose every answer a test writes out, and which remembers what it was asked."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import NamedTuple, Self


class Asked(NamedTuple):
    """A request as it came: nothing decoded."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Closing(bytes):
    """An answer after which the connection is closed, whatever it said."""


Answer = Callable[[Asked], bytes]


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """A whole HTTP answer; `content_length="5"` makes it lie."""
    fields = {"content-length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class ScriptedServer:
    """Serves connections in threads until the `with` block ends. `b""` as an answer closes the connection instead."""

    def __init__(self, script: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was first

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True)
            except OSError:
                sock.close()
                return  # the client did not trust us
        # A client that gives up in the middle is what some tests are about.
        with contextlib.suppress(ConnectionError), sock, sock.makefile("rb") as lines:
            while first := lines.readline():
                method, target, _ = first.decode().split(" ", 2)
                headers = {}
                while (line := lines.readline().decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                body = lines.read(int(headers.get("content-length", 0)))
                asked = Asked(method, target, headers, body)
                self.asked.append(asked)
                said = self.script(asked)
                sock.sendall(said)
                if not said or isinstance(said, Closing):
                    return
