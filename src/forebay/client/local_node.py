"""Looks at a node of this machine from outside: whether it runs, where it listens, and who holds a port.

Theory. A running node holds an exclusive lock on DIR/node.lock, so the lock says whether it runs. A pid in a file would
not: it may belong to another process by now. DIR/run/node.json says where the node listens.

Invariants. (1) Nothing here changes the directory. (2) A pid is signalled only while the lock is held.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.core.errors import ForebayError
from forebay.ports import machine

if TYPE_CHECKING:
    import ssl


class Running(NamedTuple):
    """A node that holds its directory. `pid` is 0 and `endpoint` empty while it is still starting."""

    pid: int
    endpoint: str
    version: str


class Holder(NamedTuple):
    """Who listens on a port. `pid` is 0 where it cannot be told (another user's process)."""

    pid: int
    command: str
    is_node: bool

    def __str__(self) -> str:
        who = "another Forebay node" if self.is_node else "another program"
        return f"{who} (pid {self.pid}: {self.command})" if self.pid else who


def directory(dir: str | None) -> Path:
    """The node's directory: as given, else ~/.forebay."""
    return Path(dir or "~/.forebay").expanduser().absolute()


def is_locked(dir: Path) -> bool:
    """Whether a process holds the directory's lock."""
    try:
        fd = os.open(dir / "node.lock", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def said(dir: Path) -> Running:
    """What DIR/run/node.json says, whoever wrote it and when; empty where there is none."""
    try:
        found = json.loads((dir / "run" / "node.json").read_text("utf-8"))
        return Running(int(found.get("pid", 0)), str(found.get("endpoint", "")), str(found.get("version", "")))
    except (OSError, ValueError, AttributeError, TypeError):
        return Running(0, "", "")


def running(dir: Path) -> Running | None:
    """The node that runs from `dir`, or None. One that is not ready yet has said nothing: then its pid is that of the
    process that holds the lock's file open."""
    if not is_locked(dir):
        return None
    found = said(dir)
    if found.pid and machine.alive(found.pid):
        return found
    return Running(_pid_with(str((dir / "node.lock").resolve())), "", "")


def is_ready(url: str, patience_s: float = 2.0) -> bool:
    """Whether a node answers at `url` that it is ready. Whose certificate it shows does not matter here: nothing but
    the question is sent, and the name in it is for clients elsewhere."""
    from forebay.client.sync import Client

    try:
        with Client(url, token="", patience_s=patience_s, trust=_any_certificate) as client:
            return client.ready()
    except ForebayError:
        return False


def _any_certificate() -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def port_taken(host: str, port: int) -> bool:
    """Whether somebody listens at (host, port). Port 0 never is."""
    if port == 0:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return True
    return False


def holder(host: str, port: int) -> Holder:
    """Who listens on `port`, as far as this user may know."""
    pid = _listening_pid(port)
    command = ""
    if pid:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            command = " ".join(part.decode("utf-8", "replace") for part in raw.split(b"\0") if part)[:120]
        except OSError:
            pass
    name = f"[{host}]" if ":" in host else host
    return Holder(pid, command, is_ready(f"http://{name}:{port}"))


def _listening_pid(port: int) -> int:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            cells = line.split()
            if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    return _pid_with(*inodes)


def _pid_with(*names: str) -> int:
    """A process that has one of `names` open; 0 if none is seen."""
    return next(iter(machine.pids_with(*names)), 0)
