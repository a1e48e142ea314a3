"""Sends bodies to a backend in bounded memory, also from files that still grow, and stops when the caller gives up.

Theory. A put waits for two independent things: the client whose bytes still arrive, and the network. The event loop
awaits the first (`Body.ready`); the second blocks a thread. So a request is an `Exchange` of short steps, each run in a
thread, and a slow client holds no thread between steps. File bytes go to a plain socket by sendfile(2) and never enter
Python. TLS sends pieces of at most `PIECE_BYTES` through memory.

A cancelled caller must leave neither half a request on a connection that is used again nor a thread that still sends.
So the socket is shut down, which wakes the thread, and the last user closes it. A body that is cut off is shorter than
its Content-Length, and no service makes an object of it.

Rejected: obstore's puts (they hold whole bodies in memory, or make uploads whose ids we cannot learn and so not resume
after a crash); asyncio's streams (TLS would run on the loop that serves every hit).

Invariants. (1) Never more than the announced bytes are sent. (2) A connection is closed exactly once, and never while a
thread uses it. (3) An error of `Body.ready` ends the request and is raised unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import Corrupt

PIECE_BYTES = limits.MIB  # one thread hand-over (about 60 us) for each: 1 % at 200 MB/s

ResultT = TypeVar("ResultT")


class Threads:
    """Up to `most` threads that end when they are let go, and come again for whoever still has something to do."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], ResultT]) -> Future[ResultT]:
        """Have `call` made in one of them."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._most, thread_name_prefix=self._name)
            return self._pool.submit(call)

    def let_go(self) -> None:
        """What was submitted is still done."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class Exchange:
    """One request and its answer. Steps run one after another, each in a thread of `threads`."""

    def __init__(self, threads: Threads, connection: http.client.HTTPConnection | None = None) -> None:
        self.connection = connection
        self._threads = threads
        self._lock = threading.Lock()
        self._busy = self._given_up = False

    async def step(self, call: Callable[[], ResultT]) -> ResultT:
        """`call` in a thread. If this is cancelled, the socket is shut down and closed once `call` has ended."""
        self._busy = True
        future = self._threads.submit(call)
        future.add_done_callback(self._stepped)  # before the loop hears of it
        return await asyncio.wrap_future(future)

    def keep_going(self) -> None:
        """Raise if the caller has given up: asked by steps that could still prevent something."""
        if self._given_up:
            raise ConnectionAbortedError("the caller gave up")

    def close(self) -> None:
        """End the exchange without its answer. May be called twice."""
        if not self.stop():
            with self._lock:
                self._given_up = True
                self._close()

    def stop(self) -> bool:
        """As `close`, if a step is under way; else False, and the connection is whole."""
        with self._lock:
            if not self._busy:
                return False
            self._given_up = True
            sock = self.connection.sock if self.connection is not None else None
            if sock is not None:
                with contextlib.suppress(OSError):
                    # What the kernel has not sent is dropped: else it leaves when the network is back, for nobody.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # SSLSocket's own would drop its state under us
            return True

    def _stepped(self, _: Future[ResultT]) -> None:
        with self._lock:
            self._busy = False
            if self._given_up:
                self._close()

    def _close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


def whole(body: Body) -> bytes:
    """All bytes of a small body. Blocks."""
    if body.data is not None:
        return body.data
    with open(body.path, "rb") as file:
        data = os.pread(file.fileno(), body.size_bytes, body.offset)
    if len(data) != body.size_bytes:
        raise _short(body)
    return data


def send_piece(sock: socket.socket, body: Body, start: int, end: int) -> None:
    """Send bytes `start` to `end` of the body, which are there. Blocks; `OSError` of the socket."""
    if body.data is not None:
        sock.sendall(memoryview(body.data)[start:end])
        return
    with open(body.path, "rb") as file:
        if not isinstance(sock, ssl.SSLSocket):
            if sock.sendfile(file, body.offset + start, end - start) != end - start:
                raise _short(body)
            return
        data = os.pread(file.fileno(), end - start, body.offset + start)
        if len(data) != end - start:
            raise _short(body)
        sock.sendall(data)


def _short(body: Body) -> Corrupt:
    return Corrupt(f"{body.path} is shorter than the {body.size_bytes} bytes to send: write the object again")
