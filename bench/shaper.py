"""A TCP proxy that makes a server on this machine as far and as slow as a real bucket, and as unreliable.

    python -m bench.shaper --to 127.0.0.1:8333 --rate-bytes-s 200e6 --latency-s 0.02

Theory. It shares two cores with the thing it measures, so it must cost next to nothing: responses go from socket to
socket through a pipe by `splice`, so their bytes never enter this process, and one thread waits with epoll (edge
triggered: a connection that waits for tokens costs nothing). Three things are shaped, each where a real link has it:

* *latency*: what the client sends is held back for `latency_s` (a delay line), so every round trip takes that longer;
  bytes that follow each other stay as close as they were. What the server sends is not delayed: one round trip, once.
* *rate*: a token bucket over the response bytes of all connections together (the link), served in turns of
  `TURN_BYTES`, so that connections share it fairly.
* *connection rate*: a bucket for each connection, as clouds limit a single stream.
* *request rate*: a bucket over what all clients send. These bytes do pass through this process, in pieces of 256 KiB.

A bucket that nobody draws from holds `BURST_S` seconds of its rate: more would let an idle link deliver a whole object
at once. While connections wait for tokens it may hold `CATCH_UP_S`, because on busy cores this process is woken late,
and what was late is not lost on a real link. Rates are bytes of TCP payload, headers included.

Faults, for the next `count` connections that come that far: `reset-after=N` (RST after N response bytes),
`close-after=N` (FIN, a body cut short), `stall-after=N` (nothing more, ever). `refuse` resets new connections.

Everything can be changed while it runs, by lines of JSON on a Unix socket (`Shaper` speaks it): what is set stays,
`cut` resets all connections, and every line is answered with the counters.

Rejected: netem and tbf (not in every kernel, need root and a namespace); asyncio streams (a copy into Python for every
byte: 0.6 GB/s at a whole core).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from bench.servers import Server

PIPE_BYTES = 1 << 20  # the most an unprivileged process may ask for
TURN_BYTES = 256 << 10  # what one connection may move before the next has its turn, where rates are limited
BURST_S = 0.005
CATCH_UP_S = 0.1
BURST_BYTES_MIN = 64 << 10
PIECE_BYTES_MIN = 16 << 10  # less than this is not worth a turn
HELD_BYTES_MAX = 64 << 20  # what a client may have in the delay line before reading from it pauses
REQUEST_BYTES = 256 << 10
HELD_BYTES_MIN = 1 << 20  # where requests are limited: what lies in a link's buffers, at least
F_SETPIPE_SZ = 1031
_EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Bucket:
    """Tokens in bytes, coming at `rate_bytes_s` (0: unlimited)."""

    __slots__ = ("burst_bytes", "filled_s", "is_idle", "is_open", "rate_bytes_s", "tokens")

    def __init__(self, rate_bytes_s: float) -> None:
        self.filled_s = time.monotonic()
        self.tokens = 0.0
        self.is_idle = True
        self.is_open = False
        self.set_rate(rate_bytes_s)

    def set_rate(self, rate_bytes_s: float) -> None:
        self.rate_bytes_s = rate_bytes_s
        self.burst_bytes = max(BURST_BYTES_MIN, rate_bytes_s * BURST_S)
        self.tokens = min(self.tokens, self.burst_bytes)

    def room(self, now_s: float) -> int:
        """Bytes that may pass now. It opens at half a burst and shuts near nothing: few wake-ups, large pieces."""
        if not self.rate_bytes_s:
            return PIPE_BYTES
        most = self.burst_bytes if self.is_idle else max(self.burst_bytes, self.rate_bytes_s * CATCH_UP_S)
        self.tokens = min(most, self.tokens + (now_s - self.filled_s) * self.rate_bytes_s)
        self.filled_s, self.is_idle = now_s, False
        self.is_open = self.tokens >= (PIECE_BYTES_MIN if self.is_open else self.burst_bytes / 2)
        return min(int(self.tokens), TURN_BYTES) if self.is_open else 0

    def take(self, size_bytes: int) -> None:
        if self.rate_bytes_s:
            self.tokens -= size_bytes

    def rest(self) -> None:
        """Nobody waits for tokens any more: what comes from now on is kept up to a burst only."""
        self.is_idle = True
        self.tokens = min(self.tokens, self.burst_bytes)

    def wait_s(self) -> float:
        """How long until `room` is not nothing."""
        if not self.rate_bytes_s or self.is_open:
            return 0.0
        return max(0.0, (self.burst_bytes / 2 - self.tokens) / self.rate_bytes_s)


class Link:
    """One client connection and its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket, rate_bytes_s: float, number: int) -> None:
        self.client, self.server, self.number = client, server, number
        self.pipe_out, self.pipe_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # pipe-user-pages-soft is used up: smaller pipes work too
            fcntl.fcntl(self.pipe_in, F_SETPIPE_SZ, PIPE_BYTES)
        self.piped_bytes = 0
        self.bucket = Bucket(rate_bytes_s)
        self.server_readable = self.client_writable = self.client_readable = True
        self.server_writable = False  # until it has connected
        self.server_ended = self.client_ended = self.client_told = self.server_told = False
        self.held: deque[tuple[float, bytes]] = deque()  # (when to send on, what), in order
        self.held_bytes = 0
        self.response_bytes = 0
        self.fault: tuple[str, int] | None = None
        self.is_queued = self.is_stalled = self.is_closed = False

    def close(self, *, reset: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for sock in (self.client, self.server):
            if reset:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        os.close(self.pipe_out)
        os.close(self.pipe_in)


class Proxy:
    """The event loop. `run` serves until `stop` is set."""

    def __init__(self, listen: tuple[str, int], to: tuple[str, int], control: str = "") -> None:
        self.to = to
        self.listener = socket.create_server(listen, backlog=1024)
        self.listener.setblocking(False)
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.links: dict[int, Link] = {}  # by either socket's descriptor
        self.ready: deque[Link] = deque()  # links with a response to move
        self.delayed: set[Link] = set()  # links with something in their delay line
        self.bucket = Bucket(0.0)
        self.requests = Bucket(0.0)
        self.turns = 0
        self.held_bytes_max = HELD_BYTES_MAX  # of one connection
        self.settings: dict[str, Any] = {
            "rate_bytes_s": 0.0,
            "request_rate_bytes_s": 0.0,
            "latency_s": 0.0,
            "connection_rate_bytes_s": 0.0,
            "fault": "none",
            "count": 0,
        }
        self.counters = {"connections": 0, "request_bytes": 0, "response_bytes": 0, "faults": 0}
        self.stop = False
        self.controls: dict[int, tuple[socket.socket, bytearray]] = {}
        self.control_listener: socket.socket | None = None
        if control:
            self.control_listener = socket.socket(socket.AF_UNIX)
            self.control_listener.bind(control)
            self.control_listener.listen()
            self.epoll.register(self.control_listener, select.EPOLLIN)

    # --- the loop ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        while not self.stop:
            for fd, events in self.epoll.poll(self._wait_s()):
                self._dispatch(fd, events)
            for link in self._in_turn():
                self._pump_requests(link)
            if not self.delayed:
                self.requests.rest()
            self._serve(time.monotonic())

    def _in_turn(self) -> list[Link]:
        """The links with something in their delay line, another one first each time: the first may take all tokens."""
        links = sorted(self.delayed, key=lambda link: link.number)
        self.turns += 1
        first = self.turns % len(links) if links else 0
        return links[first:] + links[:first]

    def _wait_s(self) -> float | None:
        """How long nothing can be done but wait for events; None: for ever."""
        waits = []
        if self.ready:
            waits.append(self.bucket.wait_s())
            if self.settings["connection_rate_bytes_s"]:
                waits[0] = max(waits[0], min(link.bucket.wait_s() for link in self.ready))
        now_s = time.monotonic()
        tokens_s = self.requests.wait_s()
        waits += [
            max(tokens_s, link.held[0][0] - now_s, 0.0) for link in self.delayed if link.held and link.server_writable
        ]
        return min(waits) if waits else None

    def _dispatch(self, fd: int, events: int) -> None:
        if fd == self.listener.fileno():
            self._accept()
        elif fd in self.links:
            self._note(self.links[fd], fd, events)
        elif self.control_listener is not None and fd == self.control_listener.fileno():
            sock, _ = self.control_listener.accept()
            self.epoll.register(sock, select.EPOLLIN)
            self.controls[sock.fileno()] = (sock, bytearray())
        elif fd in self.controls:
            self._control(fd)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.settings["fault"] == "refuse":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                self.counters["faults"] += 1
                continue
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server.connect_ex(self.to)
            self.counters["connections"] += 1
            link = Link(client, server, self.settings["connection_rate_bytes_s"], self.counters["connections"])
            for sock in (client, server):
                self.links[sock.fileno()] = link
                self.epoll.register(sock, _EDGE)

    def _note(self, link: Link, fd: int, events: int) -> None:
        """Take an event into the link's state, and act on requests at once."""
        if fd == link.client.fileno():
            link.client_readable |= bool(events & (select.EPOLLIN | select.EPOLLRDHUP))
            link.client_writable |= bool(events & select.EPOLLOUT)
            broken = bool(events & (select.EPOLLERR | select.EPOLLHUP))
        else:
            link.server_readable |= bool(events & (select.EPOLLIN | select.EPOLLRDHUP))
            link.server_writable |= bool(events & select.EPOLLOUT)
            # A server that has sent all and closed may still have bytes to read.
            broken = bool(events & select.EPOLLERR)
        if broken:
            self._close(link, reset=True)
            return
        self._pump_requests(link)
        self._queue(link)

    def _queue(self, link: Link) -> None:
        """Give the link its turn if it has a response to move and somewhere to put it."""
        has_bytes = link.piped_bytes or (link.server_readable and not link.server_ended)
        if has_bytes and link.client_writable and not link.is_queued and not link.is_stalled and not link.is_closed:
            link.is_queued = True
            self.ready.append(link)

    def _close(self, link: Link, *, reset: bool = False) -> None:
        if link.is_closed:
            return
        for sock in (link.client, link.server):
            self.links.pop(sock.fileno(), None)
        self.delayed.discard(link)
        link.close(reset=reset)

    # --- client to server --------------------------------------------------------------------------------------------
    def _pump_requests(self, link: Link) -> None:
        """Read what the client sends and send on what has been held long enough, as far as either goes."""
        while not link.is_closed:
            self._hold_requests(link)
            if not link.is_closed:
                self._send_requests(link, time.monotonic())
            if not link.client_readable or link.client_ended or link.held_bytes >= self.held_bytes_max:
                return

    def _hold_requests(self, link: Link) -> None:
        release_s = time.monotonic() + self.settings["latency_s"]
        while link.client_readable and not link.client_ended and link.held_bytes < self.held_bytes_max:
            try:
                data = link.client.recv(REQUEST_BYTES)
            except BlockingIOError:
                link.client_readable = False
                return
            except OSError:
                self._close(link, reset=True)
                return
            self.counters["request_bytes"] += len(data)
            link.held_bytes += len(data)
            link.client_ended = not data
            link.held.append((release_s, data))
            self.delayed.add(link)

    def _send_requests(self, link: Link, now_s: float) -> None:
        """Send on what is due. An empty piece is the client's end of file."""
        while link.held and link.server_writable and link.held[0][0] <= now_s:
            release_s, data = link.held[0]
            room = self.requests.room(now_s)
            if data and room <= 0:
                return  # still in the delay line: it is looked at again when there are tokens
            try:
                sent = link.server.send(memoryview(data)[:room]) if data else 0
                if not data:
                    link.server.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                link.server_writable = False
                return
            except OSError:
                self._close(link, reset=True)
                return
            self.requests.take(sent)
            link.held_bytes -= sent
            if sent < len(data):
                link.held[0] = (release_s, data[sent:])
            else:
                link.held.popleft()
        if not link.held:
            self.delayed.discard(link)

    # --- server to client --------------------------------------------------------------------------------------------
    def _serve(self, now_s: float) -> None:
        """Give turns while there are tokens. Links that only wait for tokens stay in the queue."""
        waiting: list[Link] = []
        turns = 256  # then look at events again, whatever is left
        while self.ready and turns:
            room = self.bucket.room(now_s)
            if room <= 0:
                break
            turns -= 1
            link = self.ready.popleft()
            if link.is_closed:
                continue
            room = min(room, link.bucket.room(now_s))
            if room <= 0:
                waiting.append(link)
                continue
            moved = self._move(link, room)
            self.bucket.take(moved)
            link.bucket.take(moved)
            link.is_queued = False
            self._queue(link)
            if not link.is_queued:
                link.bucket.rest()
            now_s = time.monotonic()
        self.ready.extend(waiting)
        if not self.ready:
            self.bucket.rest()

    def _move(self, link: Link, room: int) -> int:
        """Move up to `room` new bytes from the server's socket towards the client's; how many were taken."""
        taken = 0
        if link.fault is None:
            link.fault = self._plant()
        kind, at_bytes = link.fault or ("none", -1)
        if at_bytes >= 0:
            room = min(room, at_bytes - link.response_bytes)
        try:
            if room > 0 and link.server_readable and not link.server_ended and link.piped_bytes < PIPE_BYTES:
                taken = self._fill(link, room)
            if link.piped_bytes:
                try:
                    sent = os.splice(link.pipe_out, link.client.fileno(), link.piped_bytes, flags=3)
                    link.piped_bytes -= sent
                except BlockingIOError:
                    link.client_writable = False
        except OSError:
            self._close(link, reset=True)
            return taken
        if at_bytes >= 0 and link.response_bytes >= at_bytes and not link.piped_bytes:
            self._fail(link, kind)
        elif link.server_ended and not link.piped_bytes and not link.client_told:
            link.client_told = True
            with contextlib.suppress(OSError):
                link.client.shutdown(socket.SHUT_WR)
            if link.client_ended:
                self._close(link)
        return taken

    def _fill(self, link: Link, room: int) -> int:
        try:
            taken = os.splice(link.server.fileno(), link.pipe_in, min(room, PIPE_BYTES), flags=3)
        except BlockingIOError:
            # Nothing to read, or a pipe full of small pieces: only an empty pipe tells.
            if not link.piped_bytes:
                link.server_readable = False
            return 0
        if taken == 0:
            link.server_ended = True
        link.piped_bytes += taken
        link.response_bytes += taken
        self.counters["response_bytes"] += taken
        return taken

    # --- faults and control ------------------------------------------------------------------------------------------
    def _plant(self) -> tuple[str, int] | None:
        """The fault that the next connection gets, if any is left."""
        kind, _, at = str(self.settings["fault"]).partition("=")
        if not at or self.settings["count"] <= 0:
            return None
        self.settings["count"] -= 1
        return kind, int(float(at))

    def _fail(self, link: Link, kind: str) -> None:
        self.counters["faults"] += 1
        if kind == "stall-after":
            link.is_stalled = True
        else:
            self._close(link, reset=kind == "reset-after")

    def configure(self, change: dict[str, Any]) -> None:
        """Take new settings; `ValueError` for one that is not known or not valid."""
        for name in change:
            if name not in self.settings and name != "cut":
                raise ValueError(f"{name!r} is not a setting: use {', '.join([*self.settings, 'cut'])}")
        if "fault" in change:
            kind, _, at = str(change["fault"]).partition("=")
            if (kind, bool(at)) not in {(name, True) for name in FAULTS} | {("refuse", False), ("none", False)}:
                raise ValueError(f"fault {change['fault']!r} is not known: use none, refuse, {'=N, '.join(FAULTS)}=N")
            change.setdefault("count", 1)
        self.settings.update({name: value for name, value in change.items() if name != "cut"})
        self.bucket.set_rate(float(self.settings["rate_bytes_s"]))
        request_rate = float(self.settings["request_rate_bytes_s"])
        self.requests.set_rate(request_rate)
        on_the_way = int(2 * request_rate * self.settings["latency_s"])
        self.held_bytes_max = max(HELD_BYTES_MIN, on_the_way) if request_rate else HELD_BYTES_MAX
        links = set(self.links.values())
        for link in links:
            link.bucket.set_rate(float(self.settings["connection_rate_bytes_s"]))
            if change.get("cut"):
                self._close(link, reset=True)

    def _control(self, fd: int) -> None:
        sock, buffer = self.controls[fd]
        data = sock.recv(65536)
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            try:
                self.configure(json.loads(line))
                answer: dict[str, Any] = {**self.counters, "open": len(set(self.links.values()))}
            except (ValueError, TypeError) as error:
                answer = {"error": str(error)}
            sock.sendall(json.dumps(answer).encode() + b"\n")
        if not data:
            del self.controls[fd]
            sock.close()


FAULTS = ("reset-after", "close-after", "stall-after")


class Shaper(Server):
    """A shaper in a process of its own, between its clients and `to` (host:port or an http URL).

    with Shaper(seaweed.endpoint, rate_bytes_s=200e6, latency_s=0.02) as link:
        link.endpoint                      # what clients use instead
        link.set(rate_bytes_s=50e6)        # from now on
        link.set(fault="reset-after=1000000", count=3)
        link.cut()                         # reset all connections
    """

    name = "shaper"

    def __init__(self, to: str, **settings: Any) -> None:
        super().__init__()
        self._to = to.rpartition("//")[2].rstrip("/")
        self._settings = settings

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        control = Path(self.dir) / "control"
        control.unlink(missing_ok=True)
        place = ["--listen", f"127.0.0.1:{self.port}", "--to", self._to, "--control", str(control)]
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        return [sys.executable, "-m", "bench.shaper", *place, *options]

    def is_ready(self) -> bool:
        self.set()
        return True

    def set(self, **settings: Any) -> dict[str, int]:
        """Change settings (`rate_bytes_s`, `request_rate_bytes_s`, `connection_rate_bytes_s`, `latency_s`, `fault`,
        `count`); the counters."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10.0)
            sock.connect(str(self.dir / "control"))
            sock.sendall(json.dumps(settings).encode() + b"\n")
            with sock.makefile() as lines:
                answer: dict[str, Any] = json.loads(lines.readline())
        if "error" in answer:
            raise ValueError(answer["error"])
        self._settings |= {name: value for name, value in settings.items() if name != "cut"}
        return answer

    def cut(self) -> dict[str, int]:
        """Reset every connection that is open now."""
        return self.set(cut=True)

    def counters(self) -> dict[str, int]:
        """`connections`, `open`, `request_bytes`, `response_bytes`, `faults` since the start."""
        return self.set()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def main(arguments: list[str]) -> int:
    """Run a proxy until a signal ends it."""
    parser = argparse.ArgumentParser(prog="python -m bench.shaper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--listen", default="127.0.0.1:0", type=_address, help="HOST:PORT (port 0: any, printed)")
    parser.add_argument("--to", required=True, type=_address, help="HOST:PORT of the server")
    parser.add_argument("--rate-bytes-s", type=float, default=0.0, help="of all responses together; 0: unlimited")
    parser.add_argument("--connection-rate-bytes-s", type=float, default=0.0, help="of each connection; 0: unlimited")
    parser.add_argument("--request-rate-bytes-s", type=float, default=0.0, help="of all requests; 0: unlimited")
    parser.add_argument("--latency-s", type=float, default=0.0, help="added to every round trip")
    parser.add_argument("--fault", default="none", help="none, refuse, reset-after=N, close-after=N or stall-after=N")
    parser.add_argument("--count", type=int, default=1, help="connections that meet the fault")
    parser.add_argument("--control", default="", help="path of a Unix socket for lines of JSON")
    given = parser.parse_args(arguments)
    proxy = Proxy(given.listen, given.to, given.control)
    names = ("rate_bytes_s", "request_rate_bytes_s", "connection_rate_bytes_s", "latency_s", "fault", "count")
    proxy.configure({name: getattr(given, name) for name in names})
    print(f"listening on {proxy.listener.getsockname()[0]}:{proxy.listener.getsockname()[1]}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        proxy.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
