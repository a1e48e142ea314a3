"""A server that receives bodies and writes each to a file, and nothing else: the least that taking an upload costs.

    python -m bench.sink --listen 127.0.0.1:9001 --dir DIRECTORY

Theory. The limit for a PUT that is acknowledged from the page cache is a loop of `recv_into` and `write` on one thread
without a protocol: eight bytes of length, the body, and one byte back when it is written. The file is truncated for
each body, as a new object would be a new file, and removed when the connection ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import struct
import sys
from pathlib import Path

from bench import load
from bench.servers import Server

RECV_BYTES = 1 << 20


def _take(sock: socket.socket, path: Path) -> None:
    """Serve one connection to its end."""
    buffer = memoryview(bytearray(RECV_BYTES))
    turn = 0
    while head := sock.recv(8, socket.MSG_WAITALL):
        (left,) = struct.unpack("!Q", head)
        turn += 1
        with path.with_suffix(f".{turn}").open("xb", buffering=0) as file:
            while left:
                got = sock.recv_into(buffer, min(left, RECV_BYTES))
                if not got:
                    return
                file.write(buffer[:got])
                left -= got
        sock.sendall(b"\x01")


class Sink(Server):
    """The sink in a process of its own, on the core of the server under test."""

    name = "sink"

    def __init__(self, core: int | None) -> None:
        super().__init__()
        self._core = core

    def command(self) -> list[str]:
        place = ["--listen", f"127.0.0.1:{self.ports[0]}", "--dir", str(self.dir)]
        return load.on_core(self._core, [sys.executable, "-m", "bench.sink", *place])

    def is_ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.ports[0]), timeout=5):
            return True


class Sender:
    """One connection to a sink."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=load.TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, body: memoryview) -> None:
        """Return when the sink has written all of it."""
        self._socket.sendall(struct.pack("!Q", len(body)))
        self._socket.sendall(body)
        if self._socket.recv(1) != b"\x01":
            raise load.LoadFailed("the sink did not take the body")

    def close(self) -> None:
        self._socket.close()


def main(arguments: list[str]) -> int:
    """Serve one connection after the other until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sink", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--dir", required=True, type=Path, help="where the bodies are written")
    given = parser.parse_args(arguments)
    host, _, port = given.listen.rpartition(":")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = socket.create_server((host, int(port)))
    while True:
        sock, _ = listener.accept()
        with sock:
            _take(sock, given.dir / "body")
        for file in given.dir.glob("body.*"):
            os.unlink(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
