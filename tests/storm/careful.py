"""A gate before a bucket service that lets only whole requests through.

SeaweedFS stores an empty object when a PUT ends right after its head, as it does when the sender is killed. S3 refuses
a body that is shorter than it was announced, so what stands behind a storm has to: each request is read to its end here
before the service hears of it, and one that is cut is dropped.

    python careful.py HOST PORT PORT_BEHIND     # as a process, on a host of the box
"""

from __future__ import annotations

import contextlib
import http.client
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class CarefulGate:
    """A server on `port` of an address (by default loopback, and any port) that passes whole requests on to another
    port there."""

    def __init__(self, port_behind: int, host: str = "127.0.0.1", port: int = 0) -> None:
        gate, self._under_way, self._lock = self, 0, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the node, or the link to it, was cut
                    super().handle()

            def pass_on(self) -> None:
                with gate.passing():
                    self.pass_whole()

            def pass_whole(self) -> None:
                size_bytes = int(self.headers.get("content-length", "0"))
                body = self.rfile.read(size_bytes)
                if len(body) < size_bytes:
                    self.close_connection = True
                    return
                behind = http.client.HTTPConnection(host, port_behind, timeout=90)
                with contextlib.closing(behind):
                    behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        behind.putheader(name, value)
                    behind.endheaders(body)
                    answer = behind.getresponse()
                    said = answer.read()
                    self.send_response_only(answer.status)
                    for name, value in answer.getheaders():
                        if name.lower() not in HOP_BY_HOP:
                            self.send_header(name, value)
                    told = answer.headers.get("content-length", "0") if self.command == "HEAD" else str(len(said))
                    self.send_header("Content-Length", told)
                    self.end_headers()
                    self.wfile.write(said)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def is_idle(self) -> bool:
        """No request is on its way through: what was cut before this one asks does not land any more."""
        return not self._under_way

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


if __name__ == "__main__":
    gate = CarefulGate(int(sys.argv[3]), sys.argv[1], int(sys.argv[2]))
    gate.start()
    threading.Event().wait()
