"""Long bodies over TLS: what was decrypted no further while a disk was slow is not forgotten."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import pytest

from forebay.node.front.http import bodies
from tests.front.fake_engine import WAIT_S, Client, serve
from tests.node.certificates import make

DATA = os.urandom(5_000_000)


@pytest.mark.parametrize("slow", [False, True])
def test_a_long_body_and_the_request_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    pair = make(tmp_path / "tls", "node")
    pwrite = os.pwrite

    def slowly(fd: int, data: memoryview, offset: int) -> int:
        return pwrite(fd, data[:100_000], offset)  # many small steps, and short ones

    if slow:
        monkeypatch.setattr(bodies.os, "pwrite", slowly)
    with serve(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key)) as node:
        context = ssl.create_default_context(cadata=pair.cert.read_text())
        sock = socket.create_connection(("127.0.0.1", node.port), timeout=WAIT_S)
        with Client(context.wrap_socket(sock, server_hostname="127.0.0.1")) as client:
            for number in range(3):
                head = f"PUT /b/{number} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(DATA)}\r\n\r\n"
                client.send(head.encode() + DATA + f"GET /b/{number} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert client.answer("PUT").status == 200
                assert client.answer().body == DATA
