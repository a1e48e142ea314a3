"""The two clients that put load on a server: `wrk` for rates, a bare socket for latency, throughput and readers.

Theory. A client that costs more than the server measures itself. `wrk` (C, one thread, its requests formatted before it
starts) is used where many small answers are counted. Where one answer is timed, a `Reader` does the least a client can
do: one send, then `recv_into` the same buffer, the first body byte and the last one stamped. Both sides of a comparison
always use the same client with the same requests.

Invariants. (1) An answer that is not 200 or 206, or is shorter than announced, is an error, never a sample. (2) `wrk`
reports socket errors and bad statuses: any of them fails the round.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.servers import find_program

RECV_BYTES = 1 << 20
TIMEOUT_S = 120.0

_WRK_SCRIPT = """
local requests, count, at = {}, 0, 0
function init(args)
  local file = assert(io.open(args[1], "rb"))
  local all = file:read("*a")
  file:close()
  for request in all:gmatch("([^%z]+)%z") do count = count + 1; requests[count] = request end
  assert(count > 0, "no requests in " .. args[1])
end
function request()
  at = at + 1
  if at > count then at = 1 end
  return requests[at]
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"bytes":%d,"seconds":%.6f,"p50_s":%.6f,"p99_s":%.6f,"errors":%d}\\n',
    summary.requests, summary.bytes, summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


class LoadFailed(RuntimeError):
    """The server under load answered wrongly; what was measured does not count."""


@dataclass(frozen=True)
class Load:
    """What `wrk` saw in one run."""

    requests: int
    bytes: int
    seconds: float
    p50_s: float
    p99_s: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


def request_bytes(host: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
    """A GET as it goes on the wire; `path` is sent as given (quote it first)."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def write_requests(path: Path, requests: Iterable[bytes]) -> Path:
    """The file that `run_wrk` replays: requests separated by zero bytes."""
    with path.open("wb") as file:
        for request in requests:
            file.write(request + b"\0")
    return path


def run_wrk(endpoint: str, requests: Path, *, seconds: float, connections: int, core: int | None = None) -> Load:
    """Replay the requests in order, over and over, for about `seconds`. `LoadFailed` if any was not answered well."""
    script = requests.with_suffix(".lua")
    script.write_text(_WRK_SCRIPT)
    duration = f"{max(1, round(seconds))}s"
    command = [find_program("wrk"), "-t1", f"-c{connections}", f"-d{duration}", "--timeout", "30s"]
    command += ["-s", str(script), endpoint, "--", str(requests)]
    done = subprocess.run(on_core(core, command), capture_output=True, text=True, timeout=seconds + 60, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise LoadFailed(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
    said = json.loads(lines[-1])
    if said.pop("errors") or not said["requests"]:
        raise LoadFailed(f"{endpoint} did not answer every request well: {done.stdout.strip()[-500:]}")
    return Load(**said)


def on_core(core: int | None, command: list[str]) -> list[str]:
    """`command` pinned to one core, or as it is."""
    return command if core is None else [find_program("taskset"), "-c", str(core), *command]


def pin_self(core: int | None) -> None:
    """Pin this process (all its threads started from now on) to one core, or let it roam again."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1) if core is None else {core})


@dataclass(frozen=True)
class Read:
    """One answer. Times count from the request's first byte on its way out."""

    size_bytes: int
    first_byte_s: float
    total_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.total_s


class Reader:
    """One keep-alive connection that reads objects as fast as a client can. Not for use by two threads."""

    def __init__(self, endpoint: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self.host = parts.netloc
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._socket: socket.socket | None = None
        self._buffer = memoryview(bytearray(RECV_BYTES))

    def get(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        into: bytearray | None = None,
        keep: Path | None = None,
    ) -> Read:
        """Read `path` to its end. With `into`, the body is appended there too (for comparing; it costs a copy); with
        `keep`, it is written to that new file."""
        if keep is not None:
            with keep.open("xb", buffering=0) as file:
                return self._get(path, headers, None, file)
        return self._get(path, headers, into, None)

    def _get(
        self, path: str, headers: Mapping[str, str] | None, into: bytearray | None, file: io.FileIO | None
    ) -> Read:
        request = request_bytes(self.host, urllib.parse.quote(path), headers)
        sock = self._connected()
        started = time.perf_counter()
        sock.sendall(request)
        head = b""
        while b"\r\n\r\n" not in head:
            got = sock.recv_into(self._buffer)
            if got == 0:
                self.close()
                raise LoadFailed(f"{path}: the connection ended inside the head {head[:200]!r}")
            head += self._buffer[:got]
        head, _, rest = head.partition(b"\r\n\r\n")
        size = self._size(path, head)
        first = time.perf_counter() if rest or size == 0 else 0.0
        if into is not None:
            into += rest
        if file is not None:
            file.write(rest)
        left = size - len(rest)
        while left > 0:
            got = sock.recv_into(self._buffer, min(RECV_BYTES, left))
            if got == 0:
                self.close()
                raise LoadFailed(f"{path}: the body ended {left} bytes early")
            first = first or time.perf_counter()
            if into is not None:
                into += self._buffer[:got]
            if file is not None:
                file.write(self._buffer[:got])
            left -= got
        return Read(size, first - started, time.perf_counter() - started)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _size(self, path: str, head: bytes) -> int:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        status = status_line.split(" ", 2)[1]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if status not in ("200", "206") or "content-length" not in headers:
            self.close()
            raise LoadFailed(f"{path}: answered {status_line!r}")
        return int(headers["content-length"])

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
