"""What a node keeps its buckets from: addresses as they are dialled, and paths as they lead."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.backends.bounds import Bounds
from forebay.backends.locate import locate
from forebay.backends.stack import open_backend
from forebay.core.errors import Denied, Invalid
from forebay.core.reach import Reach
from forebay.core.types import Bucket

KEYS = {"access_key_id": "A", "secret_access_key": "s"}


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1.", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "localhost.",
        "LOCALHOST", "0.0.0.0", "0", "::1", "::ffff:127.0.0.1", "::ffff:7f00:1", "0:0:0:0:0:ffff:127.0.0.1",
        "169.254.169.254", "fd00:ec2::254", "fe80::1%lo",
    ],
)  # fmt: skip
def test_no_spelling_of_an_inner_address_is_dialled(host: str, port: int) -> None:
    dial = Bounds(Reach(["http://*:*"])).dial(Bucket("b", "http://x", held=True))
    assert dial is not None
    with pytest.raises((Denied, OSError)):  # some are no address to this machine's resolver
        dial((host, port))


def test_the_address_is_what_counts_and_not_what_the_name_said_before(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    answers = ["127.0.0.1", "203.0.113.1"]
    dialled: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(2, 1, 6, "", (answers.pop(), port))]

    def connect(address: tuple[str, int], *_: object) -> socket.socket:
        dialled.append(address[0])
        return socket.socket()

    dial = Bounds(Reach(["http://*:*"])).dial(Bucket("b", "http://x", held=True))
    assert dial is not None
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    dial(("rebinds.example", port)).close()
    with pytest.raises(Denied, match=r"rebinds\.example leads to 127.0.0.1"):
        dial(("rebinds.example", port))
    assert dialled == ["203.0.113.1"], "an address, which nobody resolves again"


def test_an_inner_address_that_is_named_is_dialled(port: int) -> None:
    bounds = Bounds(Reach([f"http://127.0.0.1:{port}", f"http://localhost:{port}"]))
    dial = bounds.dial(Bucket("b", "http://x", held=True))
    assert dial is not None
    for host in ("127.0.0.1", "localhost"):
        dial((host, port)).close()
    assert bounds.dial(Bucket("b", "http://x")) is None, "who holds admin:* is not watched"
    own = {"endpoint": "https://x", **KEYS}
    assert bounds.dial(Bucket("b", "s3://x", options=KEYS, held=True)) is None, "the node's own service is not either"
    assert bounds.dial(Bucket("b", "s3://x", options=own, held=True)) is not None


def test_the_proxy_of_the_nodes_environment_is_reached_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("no_proxy", raising=False)
    backend = locate(Bucket("b", "http://web.example", held=True), bounds=Bounds(Reach(["http://*"])))
    connection = backend._wire._connect()  # type: ignore[attr-defined]
    assert connection.sock.getpeername()[1] == port
    connection.close()


def test_a_held_bucket_never_uses_what_is_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has credentials that the order of the chain would prefer to the bucket's."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bm9kZQ==")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "nodes")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "nodes")
    bounds = Bounds(Reach(["az://*", "gs://*"]))
    azure = locate(
        Bucket("b", "az://c", options={"account_name": "nodes", "sas_token": "sig=mine"}, held=True), bounds=bounds
    )
    _, headers = azure._wire._request("GET", "/k", [], {})  # type: ignore[attr-defined]
    assert "authorization" not in headers
    google = locate(Bucket("b", "gs://c", options={"bearer_token": "mine"}, held=True), bounds=bounds)
    _, headers = google._wire._request("GET", "/k", [], {})  # type: ignore[attr-defined]
    assert headers["authorization"] == "Bearer mine"
    with pytest.raises(Invalid, match="account is not named"):
        locate(Bucket("b", "az://c", options={"sas_token": "sig=mine"}, held=True), bounds=bounds)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", {"region": "evil.example/#"}), ("s3://b", {"region": "x@evil.example:80/"}),
        ("az://c", {"account_name": "evil.example/"}), ("s3://evil.example:80", {"addressing_style": "virtual"}),
    ],
)  # fmt: skip
def test_no_part_of_a_hosts_name_is_more_than_a_name(url: str, options: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        locate(Bucket("b", url, options={**KEYS, **options} if url.startswith("s3") else options))


def test_a_held_bucket_is_opened_within_the_list_only() -> None:
    for url in ("file:///data", "memory://x", "s3://b", "http://host"):
        with pytest.raises(Denied, match="--allow-backend"):
            open_backend(Bucket("b", url, held=True))


def test_a_root_that_becomes_a_link_leads_nowhere(tmp_path: Path) -> None:
    own, root = tmp_path / "node", tmp_path / "data"
    own.mkdir()
    root.mkdir()
    (own / "k").write_text("own")
    (root / "k").write_text("ours")
    bounds = Bounds(folders=[str(own)])

    async def story() -> None:
        backend = open_backend(Bucket("b", f"file://{root}"), bounds=bounds)
        assert (await backend.head("k")).size_bytes == 4
        root.rename(tmp_path / "was")
        root.symlink_to(own)
        for work in (backend.head("k"), backend.fetch("k"), backend.list_page("", "", "", 10), backend.probe()):
            with pytest.raises(Denied):
                await work
        assert (own / "k").read_text() == "own"

    asyncio.run(story())


def test_links_that_turn_all_the_time_never_lead_to_the_nodes_own(tmp_path: Path) -> None:
    own, root = tmp_path / "node", tmp_path / "data"
    for folder, text in ((own, "own"), (root / "a", "ours")):
        folder.mkdir(parents=True)
        (folder / "k").write_text(text)
    stop = threading.Event()

    def turn() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            (tmp_path / "next").symlink_to(own if number % 2 else root / "a")
            os.replace(tmp_path / "next", root / "link")

    async def story() -> None:
        backend = open_backend(Bucket("b", f"file://{root}"), bounds=Bounds(folders=[str(own)]))
        seen = set()
        for _ in range(300):
            try:
                fetch = await backend.fetch("link/k")
                seen.add(b"".join([chunk async for chunk in fetch]))
            except Denied:
                seen.add(b"denied")
        assert seen <= {b"ours", b"denied"}

    (root / "link").symlink_to(root / "a")
    turning = threading.Thread(target=turn)
    turning.start()
    try:
        asyncio.run(story())
    finally:
        stop.set()
        turning.join()
