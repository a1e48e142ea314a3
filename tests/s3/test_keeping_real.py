"""Encryption and storage class through a real node, to an S3 that keeps what it is told and says so."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from tests.backends.scripted_http import Asked, ScriptedServer, answer
from tests.s3.real_node import RealNode

CLASS, ENCRYPTION, KEY = (
    "x-amz-storage-class",
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
)
NAMES = (CLASS, ENCRYPTION, KEY)
ARN = "arn:aws:kms:eu:1:key/"
DATE = formatdate(1_790_000_000, usegmt=True)


class Amazon:
    """Objects with how they are kept. A key is named by its ARN once it is used."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> bytes:
        with self._lock:
            return self._answer(asked, asked.target.partition("?")[0])

    def _answer(self, asked: Asked, path: str) -> bytes:
        if asked.method == "PUT" and asked.headers.get("if-none-match") == "*" and path in self.objects:
            return answer("412 Precondition Failed")
        if asked.method == "PUT":
            body, said = asked.body, {name: asked.headers[name] for name in NAMES if name in asked.headers}
            if KEY in said:
                said[KEY] = ARN + said[KEY]
            if "x-amz-copy-source" in asked.headers:
                body = self.objects[asked.headers["x-amz-copy-source"]][0]
            self.objects[path] = body, said
            etag = hashlib.md5(body).hexdigest()
            copied = f"<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>".encode()
            shown = {name: value for name, value in said.items() if name != CLASS}
            return answer("200 OK", copied if "x-amz-copy-source" in asked.headers else b"", etag=f'"{etag}"', **shown)
        if path not in self.objects:
            missing = b"<Error><Code>NoSuchKey</Code></Error>" if asked.method == "GET" else b""
            listed = b"<ListBucketResult></ListBucketResult>"
            return answer("200 OK", listed) if path.count("/") < 2 else answer("404 Not Found", missing)
        body, said = self.objects[path]
        fields = {"etag": f'"{hashlib.md5(body).hexdigest()}"', "last_modified": DATE, **said}
        if asked.method == "HEAD":
            return answer("200 OK", content_length=str(len(body)), **fields)
        if "range" in asked.headers:
            first, _, last = asked.headers["range"].removeprefix("bytes=").partition("-")
            end = min(int(last or len(body)) + 1, len(body))
            fields["content_range"] = f"bytes {first}-{end - 1}/{len(body)}"
            return answer("206 Partial Content", body[int(first) : end], **fields)
        return answer("200 OK", body, **fields)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealNode, Amazon]]:
    amazon = Amazon()
    with ScriptedServer(amazon) as server, RealNode(tmp_path_factory.mktemp("node"), "--fronts", "1") as node:
        reached = {"endpoint": server.url, "skip_signature": "true", "region": "eu"}
        ours = {"storage_class": "STANDARD_IA", "server_side_encryption": "aws:kms", "sse_kms_key_id": "ours"}
        node.add_bucket("through", "s3://there", options=reached | ours)
        node.add_bucket("plain", "s3://plain", options=reached)
        node.add_bucket("back", "s3://back", options=reached | ours, write="back")
        node.add_bucket("alone", "local://", write="local")
        folder = tmp_path_factory.mktemp("folder")
        node.add_bucket("folder", f"file://{folder}")
        yield node, amazon


def said(headers: dict[str, str]) -> tuple[str, ...]:
    return tuple(headers.get(name, "") for name in NAMES)


def put(node: RealNode, path: str, headers: dict[str, str] | None = None, body: bytes = b"body") -> None:
    status, _, answered = node.ask("PUT", path, headers, body)
    assert status == 200, answered


def test_what_a_bucket_says_of_its_objects_holds_for_what_is_written_through(place: tuple[RealNode, Amazon]) -> None:
    node, amazon = place
    put(node, "/through/a")
    assert amazon.objects["/there/a"] == (b"body", {CLASS: "STANDARD_IA", ENCRYPTION: "aws:kms", KEY: ARN + "ours"})
    for method in ("GET", "HEAD"):
        assert said(node.ask(method, "/through/a")[1]) == ("STANDARD_IA", "aws:kms", ARN + "ours")
    put(node, "/through/copy", {"x-amz-copy-source": "/through/a"}, b"")
    assert amazon.objects["/there/copy"] == amazon.objects["/there/a"]
    attributes = node.ask("GET", "/through/a?attributes", {"x-amz-object-attributes": "StorageClass"})[2]
    assert b"<StorageClass>STANDARD_IA</StorageClass>" in attributes


def test_a_write_says_it_for_itself(place: tuple[RealNode, Amazon]) -> None:
    node, amazon = place
    put(node, "/through/own", {CLASS: "STANDARD", ENCRYPTION: "AES256"})
    assert amazon.objects["/there/own"][1] == {CLASS: "STANDARD", ENCRYPTION: "AES256"}
    put(node, "/plain/own", {CLASS: "GLACIER_IR", ENCRYPTION: "aws:kms", KEY: "mine"})
    assert amazon.objects["/plain/own"][1] == {CLASS: "GLACIER_IR", ENCRYPTION: "aws:kms", KEY: ARN + "mine"}
    assert said(node.ask("HEAD", "/plain/own")[1]) == ("GLACIER_IR", "aws:kms", ARN + "mine")
    # A copy is kept as its own write says, and a copy onto itself may change just that.
    put(node, "/plain/copy", {"x-amz-copy-source": "/plain/own"}, b"")
    assert amazon.objects["/plain/copy"] == (b"body", {})
    assert said(node.ask("HEAD", "/plain/copy")[1]) == ("", "", "")
    put(node, "/plain/copy", {"x-amz-copy-source": "/plain/copy", CLASS: "STANDARD_IA"}, b"")
    assert amazon.objects["/plain/copy"] == (b"body", {CLASS: "STANDARD_IA"})


def test_a_write_that_is_flushed_later_keeps_its_word(place: tuple[RealNode, Amazon]) -> None:
    node, amazon = place
    put(node, "/back/own", {CLASS: "ONEZONE_IA", "x-amz-meta-a": "1"})
    put(node, "/back/plain")
    put(node, "/back/copy", {"x-amz-copy-source": "/back/own"}, b"")
    assert said(node.ask("HEAD", "/back/own")[1])[0] == "ONEZONE_IA", "flushed or not"
    node.flush("back")
    assert amazon.objects["/back/own"][1] == {CLASS: "ONEZONE_IA", ENCRYPTION: "aws:kms", KEY: ARN + "ours"}
    for path in ("/back/plain", "/back/copy"):
        assert amazon.objects[path][1] == {CLASS: "STANDARD_IA", ENCRYPTION: "aws:kms", KEY: ARN + "ours"}
    status, headers, body = node.ask("GET", "/back/own")
    assert (status, body, headers["x-amz-meta-a"]) == (200, b"body", "1")
    assert said(headers) == ("ONEZONE_IA", "aws:kms", ARN + "ours")


def test_what_others_wrote_says_how_it_is_kept_too(place: tuple[RealNode, Amazon]) -> None:
    node, amazon = place
    amazon.objects["/there/theirs"] = b"theirs", {CLASS: "GLACIER_IR", ENCRYPTION: "AES256"}
    status, headers, body = node.ask("GET", "/through/theirs")
    assert (status, body, said(headers)) == (200, b"theirs", ("GLACIER_IR", "AES256", ""))


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/alone/a", {CLASS: "STANDARD_IA"}, 501, "NotImplemented"),
        ("/alone/a", {ENCRYPTION: "AES256"}, 501, "NotImplemented"),
        ("/folder/a", {ENCRYPTION: "AES256"}, 501, "NotImplemented"),
        ("/plain/a", {ENCRYPTION: "rot13"}, 400, "InvalidArgument"),
        ("/plain/a", {KEY: "mine"}, 400, "InvalidArgument"),
        ("/plain/a", {ENCRYPTION: "AES256", KEY: "mine"}, 400, "InvalidArgument"),
        ("/plain/a", {CLASS: "CHEAP"}, 400, "InvalidStorageClass"),
        ("/plain/a", {f"{ENCRYPTION}-customer-algorithm": "AES256"}, 501, "NotImplemented"),
        ("/plain/a?partNumber=1&uploadId=x", {ENCRYPTION: "AES256"}, 501, "NotImplemented"),
    ],
)
def test_what_cannot_be_kept_so_is_refused(
    place: tuple[RealNode, Amazon], path: str, headers: dict[str, str], status: int, code: str
) -> None:
    node, amazon = place
    refused, _, body = node.ask("PUT", path, headers, b"x")
    assert (refused, f"<Code>{code}</Code>".encode() in body) == (status, True), body
    assert "/plain/a" not in amazon.objects
    assert node.ask("PUT", "/alone/standard", {CLASS: "STANDARD"}, b"x")[0] == 200


def test_parts_go_where_their_upload_says(place: tuple[RealNode, Amazon]) -> None:
    node, _ = place
    status, _, body = node.ask("POST", "/back/parts?uploads", {CLASS: "ONEZONE_IA", ENCRYPTION: "AES256"}, b"")
    assert status == 200, body
    upload = body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    etag = node.ask("PUT", f"/back/parts?partNumber=1&uploadId={upload}", body=b"part")[1]["etag"]
    whole = (
        f"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
    )
    status, _, body = node.ask("POST", f"/back/parts?uploadId={upload}", body=whole.encode())
    assert status == 200, body
    node.flush("back")
    assert said(node.ask("HEAD", "/back/parts")[1]) == ("ONEZONE_IA", "AES256", "")
