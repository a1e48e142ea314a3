"""The audit log of a real node: who did what, from where, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError

from tests.front.fake_engine import WAIT_S, Client, serve

from .certificates import make
from .conftest import NodeProcess, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real

HOSTILE = 'a\n{"operation": "DeleteBucket"}\r\x1b[2J\x7f\u2028\u202e"'
WRITER, READER, ADMIN = "writer-token", "reader-token", "admin-token"
SECRETS = (WRITER, READER, ADMIN, "secret-of-writer", "secret-of-reader")


def identity(name: str, allow: str, token: str) -> dict[str, str]:
    keys = {"access_key_id": f"AK{name.upper()}", "secret_access_key": f"secret-of-{name}"}
    return {"name": name, "allow": allow, "token": token, **keys}


class Audited:
    """A node with an audit log and two buckets."""

    def __init__(self, node: NodeProcess) -> None:
        self.node = node
        self.file = node.dir / "node" / "log" / "audit-0.jsonl"

    def client(self, name: str, secret: str = "") -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.node.endpoint,
            aws_access_key_id=f"AK{name.upper()}",
            aws_secret_access_key=secret or f"secret-of-{name}",
            region_name="us-east-1",
            config=botocore.client.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def native(self, method: str, path: str, token: str, body: Any = None) -> int:
        data = None if body is None else json.dumps(body).encode()
        return self.node.ask(method, f"/-/v1/{path}", {"Authorization": f"Bearer {token}"}, data)[0]

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text("ascii").splitlines()]

    def of(self, **wanted: Any) -> list[dict[str, Any]]:
        """The lines that say so, once there are any."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines() if all(line.get(name) == value for name, value in wanted.items())]

        return list(until(found, f"a line with {wanted}"))


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    root = tmp_path_factory.mktemp("audit")
    entries = [
        identity("writer", "write:data,read:data", WRITER),
        identity("reader", "read:data", READER),
        identity("admin", "admin:*", ADMIN),
    ]
    (root / "identities.json").write_text(json.dumps({"identities": entries}))
    (root / "identities.json").chmod(0o600)
    flags = ["--fronts", "1", "--audit", "changes", "--identities", str(root / "identities.json")]
    one = Audited(NodeProcess(root / "node", *flags))
    one.node.start()
    (root / "bucket").mkdir()
    (root / "bucket" / "cold").write_bytes(b"cold")
    assert one.native("PUT", "buckets/data", ADMIN, {"name": "data", "url": "local://", "write": "local"}) == 200
    assert one.native("PUT", "buckets/other", ADMIN, {"name": "other", "url": f"file://{root / 'bucket'}"}) == 200
    yield one
    one.node.stop()


def test_each_change_by_s3_is_a_line(audited: Audited) -> None:
    s3 = audited.client("writer")
    answer = s3.put_object(Bucket="data", Key=HOSTILE, Body=b"x" * 1000)
    s3.get_object(Bucket="data", Key=HOSTILE)["Body"].read()
    s3.list_objects_v2(Bucket="data")
    s3.copy_object(Bucket="data", Key="copy", CopySource={"Bucket": "data", "Key": HOSTILE})
    s3.put_object_tagging(Bucket="data", Key="copy", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]})
    upload = s3.create_multipart_upload(Bucket="data", Key="whole")["UploadId"]
    part = s3.upload_part(Bucket="data", Key="whole", UploadId=upload, PartNumber=1, Body=b"y" * 100)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    s3.complete_multipart_upload(Bucket="data", Key="whole", UploadId=upload, MultipartUpload=parts)
    s3.delete_objects(Bucket="data", Delete={"Objects": [{"Key": "copy"}, {"Key": "whole"}]})
    s3.delete_object(Bucket="data", Key=HOSTILE)
    with pytest.raises(ClientError):
        s3.put_object(Bucket="data", Key="k", Body=b"x", ContentMD5="AAAAAAAAAAAAAAAAAAAAAA==")

    (put,) = audited.of(operation="PutObject", key=HOSTILE)
    assert put == {
        "time": put["time"],
        "request": answer["ResponseMetadata"]["RequestId"],
        "identity": "writer",
        "address": "127.0.0.1",
        "operation": "PutObject",
        "bucket": "data",
        "key": HOSTILE,
        "status": 200,
        "error": "",
        "bytes": 1000,
        "front": 0,
    }
    assert audited.of(operation="CopyObject", key="copy")[0]["source"] == f"data/{HOSTILE}"
    audited.of(operation="PutObjectTagging", key="copy", status=200)
    audited.of(operation="CreateMultipartUpload", key="whole", status=200)
    audited.of(operation="CompleteMultipartUpload", key="whole", status=200)
    assert [line["key"] for line in audited.of(operation="DeleteObjects", status=204)] == ["copy", "whole"]
    audited.of(operation="DeleteObject", key=HOSTILE, status=204)
    audited.of(operation="PutObject", key="k", status=400, error="BadDigest")
    said = {line["operation"] for line in audited.lines()}
    assert said.isdisjoint({"GetObject", "ListObjectsV2", "UploadPart"}), "reads, and parts that are no object yet"


def test_each_denial_is_a_line_and_no_secret_is_in_any(audited: Audited) -> None:
    reader = audited.client("reader")
    presigned = urlsplit(reader.generate_presigned_url("get_object", Params={"Bucket": "other", "Key": "cold"}))
    assert audited.node.ask("GET", f"{presigned.path}?{presigned.query}")[0] == 403
    for refused in (
        lambda: reader.put_object(Bucket="data", Key="mine", Body=b"x" * 100_000),
        lambda: reader.delete_object(Bucket="data", Key="mine"),
        lambda: audited.client("reader", "not-the-secret").get_object(Bucket="data", Key="x"),
    ):
        with pytest.raises(ClientError):
            refused()
    assert audited.node.ask("GET", "/data/x")[0] == 403
    assert audited.native("GET", "objects/other/cold", READER) == 403
    assert audited.native("PUT", "buckets/mine", READER, {"name": "mine", "url": "local://"}) == 403
    assert audited.native("GET", "status", "no-token-of-ours") == 403
    wanted = {"items": [["other", "cold"], ["data", "none"]]}
    assert audited.native("POST", "batch", READER, wanted) == 200

    audited.of(operation="GetObject", identity="reader", bucket="other", key="cold", status=403, error="AccessDenied")
    audited.of(operation="PutObject", identity="reader", key="mine", status=403)
    audited.of(operation="DeleteObject", identity="reader", key="mine", status=403)
    audited.of(operation="GetObject", identity="", error="SignatureDoesNotMatch", key="x")
    audited.of(operation="GetObject", identity="", error="AccessDenied", key="x")
    audited.of(operation="object", identity="reader", bucket="other", key="cold", status=403)
    audited.of(operation="bucket_put", identity="reader", bucket="mine", status=403)
    audited.of(operation="status", identity="", status=403)
    (item,) = audited.of(operation="batch", status=403)
    assert (item["identity"], item["bucket"], item["key"]) == ("reader", "other", "cold")
    text = audited.file.read_text()
    for secret in (*SECRETS, "not-the-secret", "no-token-of-ours", "Signature=", "AKREADER"):
        assert secret not in text
    signature = presigned.query.partition("Signature=")[2].partition("&")[0]
    assert signature
    assert signature not in text


def test_what_an_admin_asks_is_a_line(audited: Audited) -> None:
    assert audited.native("POST", "evict", ADMIN, {"bucket": "other", "prefix": "co"}) == 202
    assert audited.native("POST", "pin", ADMIN, {"bucket": "other", "keys": ["cold", "gone"]}) == 202
    assert audited.native("POST", "volumes/give-up", ADMIN, {"name": "none"}) == 404
    assert audited.native("POST", "copy/data/to", ADMIN, {
        "source_bucket": "other", "source_key": "cold", "bucket": "data", "key": "to"}) == 200  # fmt: skip
    assert audited.native("DELETE", "objects/data/to", WRITER) == 200
    assert audited.native("PUT", "buckets/brief", ADMIN, {"name": "brief", "url": "local://", "write": "local"}) == 200
    assert audited.native("DELETE", "buckets/brief", ADMIN) == 200
    assert audited.native("GET", "status", ADMIN) == 200
    (evict,) = audited.of(operation="evict", identity="admin", status=202)
    assert (evict["bucket"], evict["prefix"], evict["keys"]) == ("other", "co", 0)
    assert len(evict["request"]) == 16
    assert audited.of(operation="pin")[0]["keys"] == 2
    assert audited.of(operation="volume_give_up", status=404)[0]["volume"] == "none"
    assert audited.of(operation="object_copy", key="to")[0]["source"] == "other/cold"
    audited.of(operation="object_delete", identity="writer", key="to")
    audited.of(operation="bucket_delete", identity="admin", bucket="brief", status=200)
    audited.of(operation="bucket_put", identity="admin", bucket="brief", status=200)
    assert not [line for line in audited.lines() if line["operation"] == "status" and line["identity"] == "admin"]


def test_a_change_whose_client_is_gone_is_a_line_too(audited: Audited) -> None:
    """Nobody else may ever hear whether it came about."""
    engine = audited.node.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    try:
        url = urlsplit(audited.node.endpoint)
        with socket.create_connection((url.hostname, url.port)) as client:
            head = f"DELETE /-/v1/objects/data/gone HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {WRITER}\r\n\r\n"
            client.sendall(head.encode())
        (line,) = audited.of(operation="object_delete", key="gone")
    finally:
        with suppress(ProcessLookupError):  # it was taken for one that hangs
            os.kill(engine, signal.SIGCONT)
    assert (line["identity"], line["status"], line["cut"], line["error"]) == ("writer", 0, True, "cut: client")


def test_with_reads_every_request_is_a_line(node: Make, tmp_path: Path) -> None:
    one = Audited(node("--fronts", "0", "--audit", "reads"))
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "small").write_bytes(b"x" * 100)
    (tmp_path / "bucket" / "large").write_bytes(b"x" * 300_000)
    one.node.add_bucket("data", f"file://{tmp_path / 'bucket'}")
    for _ in range(3):  # misses, then hits, which a node without an audit log answers in its fast lane
        assert len(one.node.get("data", "small")) == 100
        assert len(one.node.get("data", "large")) == 300_000
    one.node.get("data", "large", (10, 30))
    one.node.ask("HEAD", "/data/large")
    one.node.ask("GET", "/data?list-type=2")
    one.node.ask("GET", "/data/none")
    assert one.of(operation="GetObject", key="none", status=404)[0]["error"] == "NoSuchKey"
    assert [line["bytes"] for line in one.of(operation="GetObject", key="small")] == [100] * 3
    assert [line["bytes"] for line in one.of(operation="GetObject", key="large")] == [300_000] * 3 + [20]
    (head,) = one.of(operation="HeadObject")
    assert (head["bytes"], head["identity"], head["status"]) == (0, "anyone", 200)
    assert one.of(operation="ListObjectsV2")[0]["bytes"] > 0
    assert "health" not in {line["operation"] for line in one.lines()}
    assert one.node.metric("forebay_audit_lines_total") >= 10
    assert one.node.metric("forebay_audit_dropped_total") == 0
    one.node.stop()
    assert [line["operation"] for line in one.lines()][-1] == "AuditEnds"


def test_over_tls_it_is_the_same(tmp_path: Path) -> None:
    pair = make(tmp_path / "tls", "node")
    with serve(tmp_path, tls_cert=str(pair.cert), tls_key=str(pair.key), audit="reads") as node:
        node.put("small", b"x")
        node.put("large", b"x" * 300_000)
        context = ssl.create_default_context(cadata=pair.cert.read_text())
        sock = socket.create_connection(("127.0.0.1", node.port), timeout=WAIT_S)
        with Client(context.wrap_socket(sock, server_hostname="127.0.0.1")) as client:
            answers = [client.ask(f"/b/{key}") for key in ("small", "large", "none")]
    assert [answer.status for answer in answers] == [200, 200, 404]
    (file,) = tmp_path.rglob("audit-3.jsonl")
    _, *told, _ = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["key"], line["status"], line["bytes"]) for line in told[:2]] == [
        ("small", 200, 1),
        ("large", 200, 300_000),
    ]
    assert [line["request"] for line in told] == [answer.headers["x-amz-request-id"] for answer in answers]


def test_strangers_cannot_fill_the_log(audited: Audited) -> None:
    url = urlsplit(audited.node.endpoint)

    def dropped() -> int:
        """How many refused requests were not written, after some more of them."""
        denied = b"HEAD /data/x HTTP/1.1\r\nHost: x\r\n\r\n"
        garbled = b"PUT /data/x HTTP/1.1\r\nHost: x\r\nAuthorization: AWS4-HMAC-SHA256 x\r\nContent-Length: 0\r\n\r\n"
        with socket.create_connection((url.hostname, url.port)) as client, client.makefile("rb") as answers:
            for _ in range(50):
                client.sendall((denied + garbled) * 5)
                for status in (b"403", b"400") * 5:
                    assert answers.readline().startswith(b"HTTP/1.1 %b " % status)
                    fields = dict(line.split(b": ", 1) for line in iter(answers.readline, b"\r\n"))
                    answers.read(int(fields[b"Content-Length"]) if status == b"400" else 0)
        return sum(line["lines"] for line in audited.lines() if line["operation"] == "AuditDropped")

    until(dropped)
    strangers = Counter(line["time"][:19] for line in audited.of(identity=""))
    assert max(strangers.values()) == 100
    assert audited.of(identity="", operation="PutObject", status=400)
