"""TLS at the node: the same answers, byte for byte, and certificates that are judged, replaced and never in the way."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
import pytest
from cryptography import x509
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.client.sync import connect
from forebay.core.errors import Denied, Invalid
from forebay.core.types import Bucket
from forebay.node.front.http.server import Timeouts
from forebay.node.settings import load
from forebay.node.tls import TlsFiles
from tests.front.fake_engine import WAIT_S, Client, Cold, Node, serve
from tests.node.certificates import Pair, make
from tests.node.conftest import NodeProcess, until

MIB = 1 << 20


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make(tmp_path / "tls", "node")


@pytest.fixture
def node(tmp_path: Path, pair: Pair) -> Iterator[Node]:
    with serve(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key), timeouts=Timeouts(tick_s=0.02)) as running:
        yield running


@pytest.fixture
def secure(node: Node, pair: Pair) -> Callable[..., Client]:
    """Opens a connection that trusts the node's first certificate (or the one given) and nothing else."""
    trusted = pair.cert.read_text()

    def connect(trust: str = trusted, version: ssl.TLSVersion | None = None) -> Client:
        context = ssl.create_default_context(cadata=trust)
        if version is not None:
            context.maximum_version = context.minimum_version = version
        sock = socket.create_connection(("127.0.0.1", node.port), timeout=WAIT_S)
        return Client(context.wrap_socket(sock, server_hostname="127.0.0.1"))

    return connect


def serial(client: Client) -> int:
    """Of the certificate that the connection began with."""
    assert isinstance(client.sock, ssl.SSLSocket)
    raw = client.sock.getpeercert(binary_form=True)
    assert raw is not None
    return x509.load_der_x509_certificate(raw).serial_number


# --- answers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_answers_are_the_same_as_without_it(node: Node, secure: Callable[..., Client], version: ssl.TLSVersion) -> None:
    chance = random.Random(1)
    objects = {f"o{size}": chance.randbytes(size) for size in (0, 1, 16_384, 16_385, 300_000, 9 * MIB + 1)}
    for key, data in objects.items():
        node.put(key, data)
    with secure(version=version) as client:
        for _ in range(2):  # the second time in the fast lane
            for key, data in objects.items():
                answer = client.ask(f"/b/{key}")
                assert (answer.status, answer.body) == (200, data)
                assert answer.headers["content-length"] == str(len(data))
        answer = client.ask("/b/o300000", Range="bytes=100000-200000")
        assert (answer.status, answer.body) == (206, objects["o300000"][100_000:200_001])
        assert client.ask("/b/o300000", "HEAD").headers["content-length"] == "300000"
        assert client.ask("/b/o1").body == objects["o1"], "the connection went on"
        assert b"NoSuchKey" in client.ask("/b/nothing").body
        assert client.ask("/-/healthz").status == 200


def test_many_connections_and_pipelined_requests(node: Node, secure: Callable[..., Client]) -> None:
    data = random.Random(2).randbytes(3 * MIB)
    node.put("large", data)
    node.put("small", b"x" * 10)

    def read(_: int) -> bool:
        with secure() as client:
            client.send(b"GET /b/small HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
            client.send(b"GET /b/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            small = all(client.answer().body == b"x" * 10 for _ in range(20))
            return small and client.answer().body == data

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_a_cold_read_and_a_slow_reader(node: Node, secure: Callable[..., Client]) -> None:
    data = random.Random(3).randbytes(2 * MIB)
    node.engine.cold["b", "cold"] = Cold(data)
    node.put("warm", data * 4)
    with secure() as client, secure() as slow:
        slow.send(b"GET /b/warm HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.ask("/b/cold").body == data, "one who does not read does not keep others waiting"
        assert slow.answer().body == data * 4


def test_a_file_that_ends_early_is_never_filled_up(node: Node, secure: Callable[..., Client]) -> None:
    data = os.urandom(3 * MIB)
    node.put("broken", data)
    node.engine.cold["b", "broken"] = Cold(data)
    with secure() as client:
        assert client.ask("/b/broken").body == data, "compared with its checksums: from now on it is taken as it is"
        os.truncate(node.data_file("broken"), MIB)
        del node.engine.cold["b", "broken"]  # nor has the engine the rest
        client.send(b"GET /b/broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with pytest.raises((EOFError, OSError)):
            client.answer()


def test_a_file_that_was_cut_before_its_first_use_is_fetched_anew(node: Node, secure: Callable[..., Client]) -> None:
    data = os.urandom(3 * MIB)
    node.put("broken", data)
    node.engine.cold["b", "broken"] = Cold(data)
    os.truncate(node.data_file("broken"), MIB)
    with secure() as client:
        assert client.ask("/b/broken").body == data


def test_a_refused_body_is_answered_before_the_end(node: Node, secure: Callable[..., Client]) -> None:
    with secure() as client:
        head = b"PUT /-/v1/buckets/abc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n"
        client.send(head + b"x" * 100_000)
        assert client.answer().status == 413
        assert client.rest() == b""


def test_an_answer_under_way_is_finished_when_the_node_stops(tmp_path: Path, pair: Pair) -> None:
    data = random.Random(4).randbytes(6 * MIB)
    with serve(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key)) as node:
        node.put("large", data)
        context = ssl.create_default_context(cadata=pair.cert.read_text())
        sock = socket.create_connection(("127.0.0.1", node.port), timeout=WAIT_S)
        client = Client(context.wrap_socket(sock, server_hostname="127.0.0.1"))
        client.send(b"GET /b/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.sock.recv(1)
        stopping = ThreadPoolExecutor(1).submit(lambda: node.run(node.front.stop(WAIT_S / 2)))
        client.buffer = b"H"
        assert client.answer().body == data
        assert client.rest() == b"", "ended in TLS's own words"
        stopping.result(WAIT_S)
        client.sock.close()


# --- who is no client ------------------------------------------------------------------------------------------------
def test_plain_http_is_told_to_use_tls(node: Node) -> None:
    with node.connect() as plain:
        answer = plain.ask("/b/x")
        assert answer.status == 400
        assert b"https://" in answer.body
    with connect(f"http://127.0.0.1:{node.port}") as client, pytest.raises(Invalid, match="use https:// in the URL"):
        client.buckets()


def test_noise_and_silence_end_soon(tmp_path: Path, pair: Pair) -> None:
    hasty = Timeouts(header_s=0.5, tick_s=0.02)
    with serve(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key), timeouts=hasty) as node:
        with node.connect() as noise, node.connect() as silence, node.connect() as half:
            noise.send(os.urandom(4096))
            half.send(b"\x16\x03\x01\x02\x00")
            assert b"HTTP" not in noise.rest()
            assert silence.rest() == b""
            assert half.rest() == b""
        until(lambda: node.front.server is not None and not node.front.server.connections)


def test_old_versions_are_refused(node: Node, pair: Pair) -> None:
    assert TlsFiles(str(pair.cert), str(pair.key)).context.minimum_version == ssl.TLSVersion.TLSv1_2


# --- certificates ----------------------------------------------------------------------------------------------------
def test_a_new_certificate_is_taken_without_cutting_anybody(
    node: Node, secure: Callable[..., Client], pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node.put("small", b"x")
    renewed = make(tmp_path / "tls", "renewed")
    both = pair.cert.read_text() + renewed.cert.read_text()
    with secure() as before, caplog.at_level(logging.ERROR):
        assert serial(before) == pair.serial
        kept = pair.key.read_bytes()
        pair.key.write_bytes(renewed.key.read_bytes())
        until(lambda: "is not the key of" in caplog.text)
        with secure(both) as between:
            assert serial(between) == pair.serial, "two files that do not fit change nothing"
        pair.key.write_bytes(b"garbage")
        until(lambda: "does not hold its private key" in caplog.text)
        pair.key.unlink()
        until(lambda: "cannot be read" in caplog.text)
        pair.key.write_bytes(kept)
        pair.replace(renewed)

        def taken() -> bool:
            with secure(both) as client:
                return serial(client) == renewed.serial

        until(taken)
        assert before.ask("/b/small").body == b"x"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "--tls-cert .*cannot be read"),
        ("no key", "--tls-key .*cannot be read"),
        ("not PEM", "does not hold a certificate"),
        ("not a key", "does not hold its private key"),
        ("another key", "is not the key of"),
        ("alone", "give --tls-key FILE too"),
        ("pass phrase", "has a pass phrase"),
        ("expired", "expired on .*renew it"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(tmp_path: Path, what: str, words: str) -> None:
    pair = make(tmp_path, "node", days=-1 if what == "expired" else 30, pass_phrase=b"x" * (what == "pass phrase"))
    cert, key = pair.cert, str(pair.key)
    if what == "missing":
        cert.unlink()
    elif what == "no key":
        pair.key.unlink()
    elif what == "not PEM":
        cert.write_text("certificate")
    elif what == "not a key":
        pair.key.write_text("key")
    elif what == "another key":
        key = str(make(tmp_path, "other").key)
    elif what == "alone":
        key = ""
    with pytest.raises(Invalid, match=words):
        TlsFiles(str(cert), key)


def test_one_file_may_hold_both_and_an_early_end_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = make(tmp_path, "node", days=3)
    pair.cert.write_bytes(pair.cert.read_bytes() + pair.key.read_bytes())
    with caplog.at_level(logging.WARNING):
        TlsFiles(str(pair.cert))
    assert "expires on" in caplog.text


def test_the_settings_of_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make(tmp_path, "node")
    settings = load(None, dir=str(tmp_path), tls_cert=str(pair.cert), tls_key=str(pair.key))
    assert settings.endpoint == "https://127.0.0.1:9400"
    assert load(None, dir=str(tmp_path)).endpoint == "http://127.0.0.1:9400"
    with pytest.raises(Invalid, match="--tls-cert"):
        load(None, dir=str(tmp_path), tls_key=str(pair.key))
    assert load(None, dir=str(tmp_path)).identity_key == ""
    (tmp_path / "forebay-identity-key").write_text("key")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load(None, dir=str(tmp_path)).identity_key == str(tmp_path / "forebay-identity-key")
    assert load(None, dir=str(tmp_path), identity_key="/else").identity_key == "/else"


# --- all of it -------------------------------------------------------------------------------------------------------
@pytest.mark.real
def test_a_node_with_tls_and_sealed_keys_is_written_and_read_and_its_keys_change(tmp_path: Path, pair: Pair) -> None:
    def key(*args: str) -> dict[str, str]:
        done = CliRunner().invoke(app, ["key", *args, "--json"], env={"FOREBAY_DIR": str(tmp_path / "keys")})
        assert done.exit_code == 0, done.output
        made: dict[str, str] = json.loads(done.stdout)
        return made

    (tmp_path / "keys").mkdir()
    key("seal", str(tmp_path / "sealing.key"))
    first = key("create", "trainer", "--allow", "admin:*")
    flags = ["--identities", str(tmp_path / "keys" / "identities.json")]
    flags += ["--identity-key", str(tmp_path / "sealing.key")]
    flags += ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    node = NodeProcess(tmp_path / "node", *flags)
    node.start()
    with ExitStack() as stack:
        stack.callback(node.stop)
        assert node.endpoint.startswith("https://")
        client = stack.enter_context(connect(node.endpoint, token=first["token"], ca=str(pair.cert)))
        (tmp_path / "lake").mkdir()
        client.bucket_put(Bucket("lake", f"file://{tmp_path}/lake"))
        data = random.Random(6).randbytes(9 * MIB)
        (tmp_path / "data").write_bytes(data)
        client.put("lake", "a", tmp_path / "data")
        assert client.get("lake", "a") == data
        assert (tmp_path / "lake" / "a").read_bytes() == data
        client.copy("lake", "a", "lake", "b")
        client.delete("lake", "a")
        assert [entry.key for page in client.list_pages("lake") for entry in page.entries] == ["b"]

        def s3(made: dict[str, str]) -> Any:
            opened = boto3.client(
                "s3",
                endpoint_url=node.endpoint,
                verify=str(pair.cert),
                aws_access_key_id=made["access_key_id"],
                aws_secret_access_key=made["secret_access_key"],
                region_name="us-east-1",
                config=botocore.config.Config(retries={"total_max_attempts": 1}),
            )
            stack.callback(opened.close)
            return opened

        before = s3(first)
        before.put_object(Bucket="lake", Key="c", Body=data)
        with before.get_object(Bucket="lake", Key="c")["Body"] as body:
            assert body.read() == data
        second = key("rotate", "trainer", "--grace", "0s")
        after = s3(second)
        until(lambda: _works(after))
        assert not _works(before)
        with pytest.raises(Denied):
            client.get("lake", "b")
        with connect(node.endpoint, token=second["token"], ca=str(pair.cert)) as now:
            now.put("lake", "parts", io.BytesIO(data * 2))  # in parts
            assert now.get("lake", "parts") == data * 2


def _works(client: Any) -> bool:
    try:
        client.head_object(Bucket="lake", Key="b")
    except botocore.exceptions.ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 403:
            raise
        return False
    return True
