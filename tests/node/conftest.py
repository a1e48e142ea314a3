"""A node as a service manager starts it: a process tree, asked over HTTP, and killed in all ways."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests.patience import PATIENCE_S, until

START_TIMEOUT_S = PATIENCE_S
MIB = 1 << 20


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that differ at every place that matters: a wrong offset or a mixed version shows."""
    unit = random.Random(seed).randbytes(65_521)
    return (unit * (size // len(unit) + 1))[:size]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


class NodeProcess:
    """`python -m forebay.node` and its children."""

    def __init__(self, dir: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.dir = dir
        self.endpoint = ""
        self._flags = flags
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
        self._environment = kept | (environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = False  # asked to end: asked again, a node gives up what it waits for

    @property
    def log(self) -> str:
        return (self.dir / "stderr.log").read_text(errors="replace")

    def start(self, *, wait: bool = True, **more: Any) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        self.ending = False
        command = [sys.executable, "-m", "forebay.node", "--dir", str(self.dir / "node"), "--listen", "127.0.0.1:0"]
        with open(self.dir / "stderr.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--no-auto-buckets", *self._flags],
                stderr=log,
                stdout=log,
                env=self._environment,
                **more,
            )
        if wait:
            try:
                self.endpoint = until(self._ready, START_TIMEOUT_S)
            except AssertionError:
                raise AssertionError(f"the node did not become ready:\n{self.log[-3000:]}") from None

    def _ready(self) -> str:
        assert self.process is not None
        assert self.process.poll() is None, self.log[-3000:]
        with suppress(OSError, ValueError):
            told = json.loads((self.dir / "node" / "run" / "node.json").read_text())
            return str(told["endpoint"]) if told["pid"] == self.process.pid else ""  # else one that was killed
        return ""

    def ask_to_end(self) -> None:
        """Ask it to end, once, and wait for nothing."""
        assert self.process is not None
        if not self.ending and self.process.poll() is None:
            self.ending = True
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        self.ask_to_end()
        assert self.process is not None
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the node did not stop:\n{self.log[-3000:]}") from None

    def kill(self) -> None:
        """End all of its processes at once, as a machine that fails does."""
        assert self.process is not None
        for pid in (self.process.pid, *self.children().values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def children(self) -> dict[str, int]:
        """Name ("engine", "front 0", …) to pid of every child that runs."""
        assert self.process is not None
        found = {}
        with suppress(OSError):
            for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                with suppress(OSError):
                    words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
                    if len(words) < 4:
                        continue  # between fork and exec
                    name = " ".join([words[2].rpartition(".")[2], *words[3:4]]).strip()
                    if alive(int(child)):
                        found[name] = int(child)
        return found

    # --- asking ------------------------------------------------------------------------------------------------------
    def ask(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """One request on a connection of its own: status and whole body."""
        url = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        try:
            connection.request(method, target, body=body, headers=headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def get(self, bucket: str, key: str, span: tuple[int, int] | None = None) -> bytes:
        """The object, or bytes [start, end) of it."""
        headers = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
        status, body = self.ask("GET", f"/{bucket}/{quote(key)}", headers)
        assert status == (206 if span else 200), (status, body[:500])
        return body

    def json(self, method: str, target: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        status, answer = self.ask(method, f"/-/v1/{target}", {"Content-Type": "application/json"}, data)
        assert status < 300, (status, answer)
        return json.loads(answer) if answer else None

    def add_bucket(self, name: str, url: str, freshness_s: float = 1e18, **options: str) -> None:
        body = {"name": name, "url": url, "freshness_s": freshness_s, "options": options}
        self.json("PUT", f"buckets/{name}", body)

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = self.ask("GET", "/-/metrics")[1].decode().splitlines()
        rows = (line.rpartition(" ") for line in lines if line.partition("{")[0].partition(" ")[0] == name)
        return sum(float(value) for _, _, value in rows)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """`node(*flags)` is a running node; all are stopped at the end, and nothing of them may be left."""
    made: list[NodeProcess] = []

    def make(*flags: str, start: bool = True, dir: Path | None = None, **more: Any) -> NodeProcess:
        one = NodeProcess(dir or tmp_path / f"node-{len(made)}", *flags, **more)
        made.append(one)
        if start:
            one.start()
        return one

    yield make
    started = [(one, one.children()) for one in made if one.process is not None]
    for one, _ in started:
        one.ask_to_end()  # all at once: some wait for a backend that is away before they end
    for one, pids in started:
        one.stop()
        assert not [pid for pid in pids.values() if alive(pid)], "a child outlived the node"
