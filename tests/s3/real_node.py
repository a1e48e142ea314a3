"""A node as users run it: `forebay node` in a process of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

from tests.patience import PATIENCE_S

START_TIMEOUT_S = PATIENCE_S
STOP_TIMEOUT_S = PATIENCE_S
FLUSH_TIMEOUT_S = PATIENCE_S


class RealNode:
    """Running between `start` and `stop`. `endpoint` is its URL."""

    def __init__(self, dir: Path, *flags: str, token: str = "", trust: Path | None = None) -> None:
        self.dir = dir
        self.endpoint = ""
        self._flags = flags
        self._token = token
        self._trust = trust  # the certificate of a node that speaks TLS
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.dir.mkdir(parents=True, exist_ok=True)
        log = open(self.dir / "stderr.log", "ab")  # noqa: SIM115
        command = [sys.executable, "-m", "forebay.cli.main", "node", "--dir", str(self.dir), "--listen", "127.0.0.1:0"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
        with log:
            self._process = subprocess.Popen(
                [*command, "--no-auto-buckets", *self._flags], stderr=log, stdout=log, env=environment
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            try:
                self.endpoint = json.loads((self.dir / "run" / "node.json").read_text())["endpoint"]
                if self.ask("GET", "/-/readyz")[0] == 200:
                    return
            except (OSError, ValueError, KeyError, http.client.HTTPException):
                pass
            time.sleep(0.05)  # between looks, not instead of one
        tail = (self.dir / "stderr.log").read_text(errors="replace")[-3000:]
        self.stop()
        raise AssertionError(f"the node did not become ready:\n{tail}")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> RealNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ask(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One raw request: status, headers by lower-case name, body."""
        url = urlsplit(self.endpoint)
        if self._trust is None:
            connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        else:
            trusting = ssl.create_default_context(cafile=str(self._trust))
            connection = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=60, context=trusting)
        try:
            connection.putrequest(
                method, target, skip_host=bool(headers and "host" in headers), skip_accept_encoding=True
            )
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def add_bucket(
        self,
        name: str,
        url: str,
        freshness_s: float = 60.0,
        options: dict[str, str] | None = None,
        write: str = "through",
    ) -> None:
        settings = {"name": name, "url": url, "freshness_s": freshness_s, "options": options or {}, "write": write}
        status, body = self._native("PUT", f"buckets/{quote(name)}", settings)
        assert status in (200, 201), body

    def remove_bucket(self, name: str) -> None:
        status, body = self._native("DELETE", f"buckets/{quote(name)}")
        assert status < 300, body

    def flush(self, bucket: str) -> None:
        """Return when all that was written to the bucket is in its backend."""
        self._job("flush", {"bucket": bucket})

    def evict(self, bucket: str, prefix: str) -> None:
        """Return when nothing under the prefix is cached any more."""
        self._job("evict", {"bucket": bucket, "prefix": prefix})

    def _job(self, verb: str, call: dict[str, str]) -> None:
        status, body = self._native("POST", verb, call)
        assert status < 300, body
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        while (state := json.loads(body))["state"] == "running":
            assert time.monotonic() < deadline_s, state
            time.sleep(0.05)  # between looks
            _, body = self._native("GET", f"jobs/{state['job']}")
        assert (state["state"], state["units_failed"]) == ("done", 0), state

    def _native(self, method: str, path: str, document: object = None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        body = None if document is None else json.dumps(document).encode()
        status, _, answer = self.ask(method, f"/-/v1/{path}", headers, body)
        return status, answer
