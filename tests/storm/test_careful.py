"""The gate before the bucket service: whole requests pass unchanged, cut ones are never heard of."""

from __future__ import annotations

import http.client
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.storm.careful import CarefulGate


class Behind(BaseHTTPRequestHandler):
    heard: list[tuple[str, str, bytes]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append((self.path, self.headers["x-amz-meta-colour"], body))
        self.send_response(200)
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def gate() -> object:
    Behind.heard = []
    server = HTTPServer(("127.0.0.1", 0), Behind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    gate = CarefulGate(server.server_address[1])
    gate.start()
    yield gate
    gate.stop()
    server.shutdown()
    server.server_close()
    thread.join(90)


def test_whole_requests_pass_and_cut_ones_do_not(gate: CarefulGate) -> None:
    cut = b"PUT /b/cut HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nx-amz-meta-colour: red\r\n\r\n"
    for body in (b"", bytes(99)):
        with socket.create_connection(("127.0.0.1", gate.port), timeout=90) as sock:
            sock.sendall(cut + body)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b"", "no answer"
    connection = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=90)
    for key in ("a%20b?x=1", "c"):
        connection.request("PUT", f"/b/{key}", body=b"whole", headers={"x-amz-meta-colour": "blue"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["etag"], answer.read()) == (200, '"x"', b"done")
    connection.close()
    assert Behind.heard == [("/b/a%20b?x=1", "blue", b"whole"), ("/b/c", "blue", b"whole")]
