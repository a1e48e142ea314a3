"""A door that is not a front's: it gives files of a directory, says what it is told, and notes what it hears."""

from __future__ import annotations

import array
import os
import socket
import threading
from pathlib import Path
from typing import Any

from forebay.core.errors import Denied
from forebay.core.messages import doorwire
from forebay.core.messages.doorwire import (
    DoorAt,
    DoorClosed,
    DoorCold,
    DoorDropped,
    DoorFile,
    DoorHello,
    DoorInline,
    DoorOpen,
    DoorOpened,
    DoorRefused,
    DoorUsed,
    DoorWelcome,
)

FOR_EVER_S = 1e18


class FakeDoor:
    """`files`: (bucket, key) to the file that is the object; `small`: to its bytes. Start with `with`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "door-0.sock"
        self.node_id = "n1"
        self.files: dict[tuple[str, str], Path] = {}
        self.small: dict[tuple[str, str], bytes] = {}
        self.fresh_until_s = FOR_EVER_S
        self.block_bytes = 1 << 20
        self.asked: list[tuple[str, str]] = []
        self.heard: list[Any] = []
        self.tokens: list[str] = []
        self.silent = False  # takes questions, answers none
        self.refuses = False
        self.where_asked = 0
        self._ids: dict[Path, int] = {}
        self._socks: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> FakeDoor:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(90)
        self.cut()

    @property
    def connections(self) -> int:
        return len(self.tokens)

    def where(self) -> DoorAt:
        self.where_asked += 1
        return DoorAt("n1", str(self.path))

    def put(self, bucket: str, key: str, data: bytes, folder: Path) -> int:
        """A new file that is the object from now on; its object id."""
        path = folder / f"{bucket}-{key}-{len(self._ids)}"
        path.write_bytes(data)
        self.files[bucket, key] = path
        return self.id_of(path)

    def id_of(self, path: Path) -> int:
        return self._ids.setdefault(path, len(self._ids) + 1)

    def drop(self, *object_ids: int) -> None:
        """Tell every client."""
        self.say(DoorDropped(list(object_ids)))

    def say(self, message: Any) -> None:
        with self._lock:
            for sock in self._socks:
                sock.sendall(doorwire.encode(message))

    def cut(self) -> None:
        """End all connections, as a front that dies does."""
        with self._lock:
            for sock in self._socks:
                sock.shutdown(socket.SHUT_RDWR)
                sock.close()
            self._socks.clear()

    def closed_ids(self) -> list[int]:
        return [closed for message in self.heard if isinstance(message, DoorClosed) for closed in message.object_ids]

    def used(self) -> list[DoorUsed]:
        return [message for message in self.heard if isinstance(message, DoorUsed)]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        frames = doorwire.ask_frames()
        try:
            while True:
                with frames.room() as room:
                    size = sock.recv_into(room)
                if not size:
                    return
                for message in frames.wrote(size):
                    self._take(sock, message)
        except OSError:
            return

    def _take(self, sock: socket.socket, message: Any) -> None:
        if isinstance(message, DoorHello):
            self.tokens.append(message.token)
            with self._lock:  # the welcome is the first thing that a client hears, as of a front
                if self.refuses:
                    sock.sendall(doorwire.encode(DoorRefused(Denied("who?").to_wire())))
                else:
                    sock.sendall(doorwire.encode(DoorWelcome(self.node_id)))
                self._socks.append(sock)
        elif not isinstance(message, DoorOpen):
            self.heard.append(message)
        elif not self.silent:
            self.asked += message.objects
            self._answer(sock, message)

    def _answer(self, sock: socket.socket, ask: DoorOpen) -> None:
        fds: list[int] = []
        results: list[Any] = []
        for name in ask.objects:
            if name in self.small:
                results.append(DoorInline(self.small[name], "e-small", "v"))
            elif name in self.files:
                path = self.files[name]
                size, object_id = path.stat().st_size, self.id_of(path)
                fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                results.append(DoorFile(object_id, size, f"e{object_id}", "v", self.fresh_until_s, self.block_bytes))
            else:
                results.append(DoorCold())
        frame = memoryview(doorwire.encode(DoorOpened(ask.number, results)))
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            sent = sock.sendmsg([frame], passed)
            if sent < len(frame):  # sending nothing fails where the client has its answer and is gone
                sock.sendall(frame[sent:])
        for fd in fds:
            os.close(fd)
