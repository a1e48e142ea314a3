"""Who may send a real node where, and what its identities see of each other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .conftest import NodeProcess

Make = Callable[..., NodeProcess]


class Listener(ThreadingHTTPServer):
    """Notes what it is asked, and answers 404, or what `says` has for a path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.says: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        status, headers, body = self.server.says.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Callable[[], Listener]]:
    """`listener()` is a web server that notes what it is asked."""
    made: list[Listener] = []

    def make() -> Listener:
        made.append(Listener())
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


def put(node: NodeProcess, name: str, url: str, token: str = "", query: str = "", **more: Any) -> tuple[int, str]:
    """Add or change a bucket: status and answer."""
    body = json.dumps({"name": name, "url": url, **more}).encode()
    status, said = node.ask("PUT", f"/-/v1/buckets/{name}{query}", _bearer(token), body)
    return status, said.decode()


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def test_a_hidden_secret_does_not_follow_to_another_place(node: Make, listener: Callable[[], Listener]) -> None:
    ours, theirs = listener(), listener()
    one = node("--fronts", "1")
    options = {"account_name": "acc", "endpoint": f"{ours.url}/acc", "sas_token": "sig=s3cr3t"}
    assert put(one, "lake", "az://lake", options=options)[0] == 200
    shown = one.json("GET", "buckets/lake")
    assert shown["options"] == {**options, "sas_token": "***"}
    moves: list[dict[str, str]] = [
        {"endpoint": f"{theirs.url}/acc"}, {"account_name": "other"}, {"proxy_url": theirs.url},
        {"allow_invalid_certificates": "true"},
    ]  # fmt: skip
    for moved in moves:
        for query in ("", "?check=1"):
            status, said = put(one, "lake", "az://lake", query=query, options={**shown["options"], **moved})
            assert (status, "sas_token" in said) == (400, True), (moved, said)
    assert put(one, "lake", "az://another", options=shown["options"])[0] == 400
    assert put(one, "lake", "az://lake", options=shown["options"], freshness_s=5.0)[0] == 200, "nothing moved"
    assert not theirs.asked, "nobody else was asked, with the secret or without"
    assert put(one, "lake", "az://lake", query="?check=1", options={**options, "endpoint": theirs.url})[0] == 404
    assert one.json("GET", "buckets/lake")["options"]["endpoint"] == options["endpoint"], "the check came first"
    one.ask("GET", "/-/v1/buckets/lake/check")
    assert any("s3cr3t" in path for path in ours.asked), "and the secret of before is in use"
