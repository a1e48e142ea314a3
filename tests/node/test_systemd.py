"""What systemd is told of a node, and the unit that it is given."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.node.process.service import ServiceManager

from .conftest import NodeProcess, until

Make = Callable[..., NodeProcess]


class Listener:
    """A service manager's end: what came, by name, in order."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        self.socket.setblocking(False)
        self.told: list[str] = []

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def heard(self, what: str) -> bool:
        while True:
            try:
                self.told += self.socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return what in self.told


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Listener]:
    with Listener(str(tmp_path / "notify")) as listener:
        yield listener


@pytest.mark.real
def test_systemd_hears_when_a_node_is_ready_reloads_lives_and_stops(
    node: Make, manager: Listener, tmp_path: Path
) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}
    one = node("--fronts", "1", start=False, environment=environment)
    one.start(wait=False)
    assert one.process is not None
    until(lambda: manager.heard("READY=1"))
    one.endpoint = next(line for line in manager.told if line.startswith("STATUS=")).removeprefix("STATUS=serving at ")
    assert one.ask("GET", "/-/readyz")[0] == 200
    assert not manager.heard("RELOADING=1")
    for pid in one.children().values():
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
    until(lambda: manager.heard("WATCHDOG=1") and manager.told.count("WATCHDOG=1") > 1)
    manager.told.clear()
    one.process.send_signal(signal.SIGHUP)
    until(lambda: manager.heard("RELOADING=1") and manager.heard("READY=1"))
    at = manager.told.index("RELOADING=1")
    assert manager.told[at + 1].removeprefix("MONOTONIC_USEC=").isdecimal()
    assert manager.told.index("READY=1") > at
    assert not manager.heard("STOPPING=1")
    assert one.stop() == 0
    assert manager.heard("STOPPING=1")
    assert "READY=1" not in manager.told[manager.told.index("STOPPING=1") :]


@pytest.mark.real
def test_a_node_that_cannot_start_is_never_ready(node: Make, manager: Listener, tmp_path: Path) -> None:
    (tmp_path / "identities.json").write_text("not json")
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    one = node("--identities", str(tmp_path / "identities.json"), start=False, environment=environment)
    one.start(wait=False)
    assert one.process is not None
    until(lambda: one.process is not None and one.process.poll() is not None)
    assert manager.heard("STOPPING=1")
    assert not manager.heard("READY=1")


def test_a_manager_that_does_not_listen_keeps_nobody(tmp_path: Path) -> None:
    ServiceManager({}).tell("READY=1")
    gone = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "2000000"})
    gone.tell("READY=1")
    assert gone.watchdog_s == 1
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "full")})
    with Listener(str(tmp_path / "full")) as full:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, suppress(BlockingIOError):
            other.setblocking(False)
            while True:
                other.sendto(b"of others", str(tmp_path / "full"))
        manager.tell("READY=1")  # nobody reads
        assert not full.heard("READY=1")
    assert manager.watchdog_s == 0, "it did not ask"
    another = {"NOTIFY_SOCKET": str(tmp_path / "full"), "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getppid())}
    assert ServiceManager(another).watchdog_s == 0, "it asked somebody else"


def test_an_abstract_socket_is_found() -> None:
    name = f"forebay-test-{os.getpid()}"
    with Listener(f"\0{name}") as listener:
        ServiceManager({"NOTIFY_SOCKET": f"@{name}"}).tell("READY=1", "STATUS=x")
        assert listener.heard("READY=1")
        assert listener.told == ["READY=1", "STATUS=x"]


# --- the unit --------------------------------------------------------------------------------------------------------
def unit(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["up", "--systemd", *args])
    assert done.exit_code == code, done.output
    return done.stdout


def values(text: str, name: str) -> list[str]:
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


def test_the_unit_runs_the_node_that_was_described(tmp_path: Path) -> None:
    volume = tmp_path / "a disk 100%"
    text = unit(
        "--dir", str(tmp_path / "node"), "--volume", str(volume), "--listen", "127.0.0.1:9555", "--audit", "changes",
        "--allow-backend", "https://host/a$x*", "--flush-timeout", "30",
    )  # fmt: skip
    (command,) = values(text, "ExecStart")
    words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(command)]
    assert words[1:4] == ["-m", "forebay.cli.main", "node"]
    for flag, value in (
        ("--dir", str(tmp_path / "node")),
        ("--volume", str(volume)),
        ("--listen", "127.0.0.1:9555"),
        ("--audit", "changes"),
        ("--allow-backend", "https://host/a$x*"),
    ):
        assert words[words.index(flag) + 1] == value
    assert "--log-to-file" not in words, "it logs to the journal"
    written = [word.replace("%%", "%") for word in shlex.split(values(text, "ReadWritePaths")[0])]
    assert written == [str(tmp_path / "node"), str(volume)]
    assert values(text, "Type") == ["notify"]
    assert values(text, "TimeoutStopSec") == ["90"], "the time to flush, and to finish"
    assert values(text, "CapabilityBoundingSet") == [""]
    assert not (tmp_path / "node").exists(), "nothing is started"


def test_what_a_unit_cannot_hold_is_refused(tmp_path: Path) -> None:
    unit("--dir", f"{tmp_path}/line\nExecStart=/bin/sh", code=2)
    unit("--listen", "127.0.0.1:0", code=2)
    low = unit("--listen", "127.0.0.1:443", "--dir", str(tmp_path))
    assert values(low, "AmbientCapabilities") == values(low, "CapabilityBoundingSet") == ["CAP_NET_BIND_SERVICE"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="Debian's package systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "forebay.service"
    file.write_text(unit("--dir", str(tmp_path / "a node"), "--listen", "127.0.0.1:443"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(file)], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr) == (0, "")
