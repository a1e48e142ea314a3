"""The load generators: they count only what was answered well, and notice when it was not."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import load, signing
from bench.parts import BenchNginx

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "tiny").write_bytes(os.urandom(1024))
    (root / "large").write_bytes(os.urandom(3_000_001))
    (root / "empty").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def nginx(root: Path) -> Iterator[BenchNginx]:
    with BenchNginx(root) as server:
        yield server


def test_a_reader_gets_every_byte_and_stamps_the_first(nginx: BenchNginx, root: Path):
    with load.Reader(nginx.url) as reader:
        for name in ("tiny", "large", "empty", "large"):
            body = bytearray()
            read = reader.get(f"/{name}", into=body)
            assert body == (root / name).read_bytes()
            assert read.size_bytes == len(body)
            assert 0 < read.first_byte_s <= read.total_s
        part = bytearray()
        assert reader.get("/large", {"Range": "bytes=1000-1999"}, into=part).size_bytes == 1000
        assert part == (root / "large").read_bytes()[1000:2000]


def test_a_missing_object_is_no_sample(nginx: BenchNginx):
    with load.Reader(nginx.url) as reader, pytest.raises(load.LoadFailed, match="404"):
        reader.get("/no-such-object")


def test_a_body_cut_short_is_no_sample():
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_half() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")

    thread = threading.Thread(target=answer_half)
    thread.start()
    with listener, load.Reader(f"http://127.0.0.1:{listener.getsockname()[1]}") as reader:
        with pytest.raises(load.LoadFailed, match="6 bytes early"):
            reader.get("/x")
    thread.join()


def test_wrk_replays_the_requests_it_was_given(nginx: BenchNginx, tmp_path: Path):
    host = nginx.url.removeprefix("http://")
    requests = [
        load.request_bytes(host, "/tiny"),
        load.request_bytes(host, "/large", {"Range": "bytes=0-99"}),
    ]
    file = load.write_requests(tmp_path / "requests", requests)
    seen = load.run_wrk(nginx.url, file, seconds=1, connections=2)
    assert seen.requests > 10
    assert seen.requests_per_s > 0
    assert 0 < seen.p50_s <= seen.p99_s
    mean = seen.bytes / seen.requests  # half are 1,024 byte bodies, half 100 byte ranges, each with its head
    assert 562 < mean < 562 + 500


def test_wrk_refuses_to_count_bad_answers(nginx: BenchNginx, tmp_path: Path):
    host = nginx.url.removeprefix("http://")
    good_and_bad = [load.request_bytes(host, "/tiny"), load.request_bytes(host, "/gone")]
    file = load.write_requests(tmp_path / "requests", good_and_bad)
    with pytest.raises(load.LoadFailed, match="did not answer every request well"):
        load.run_wrk(nginx.url, file, seconds=1, connections=2)


def test_signed_requests_differ_and_verify():
    requests = list(signing.signed_gets("127.0.0.1:9", ["/corpus/a", "/corpus/b"], 50, "KEY", "secret"))
    assert len(set(requests)) == 50
    signatures = set()
    for index, request in enumerate(requests):
        lines = request.decode().split("\r\n")
        path = "/corpus/a" if index % 2 == 0 else "/corpus/b"
        assert lines[0] == f"GET {path} HTTP/1.1"
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        claims = dict(part.strip().split("=", 1) for part in headers["Authorization"].split(" ", 1)[1].split(","))
        assert claims["Signature"] == _signature(path, {k.lower(): v for k, v in headers.items()}, claims, "secret")
        signatures.add(claims["Signature"])
    assert len(signatures) == 50


def _signature(path: str, headers: dict[str, str], claims: dict[str, str], secret: str) -> str:
    """Signature Version 4 as its specification states it, written apart from what is tested."""
    _, day, region, service, _ = claims["Credential"].split("/")
    names = claims["SignedHeaders"].split(";")
    signed = "".join(f"{name}:{headers[name]}\n" for name in names)
    canonical = f"GET\n{path}\n\n{signed}\n{';'.join(names)}\n{headers['x-amz-content-sha256']}"
    scope = f"{day}/{region}/{service}/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{hashed}"
    key = b"AWS4" + secret.encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    return hmac.new(key, to_sign.encode(), "sha256").hexdigest()
