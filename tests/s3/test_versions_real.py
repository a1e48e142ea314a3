"""Versions of a bucket that keeps them (SeaweedFS), read through a real node: each cached for itself, none mixed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from bench import servers
from tests.backends.backend_places import s3_client
from tests.s3.real_node import RealNode

BUCKET = "versioned-here"
SIZES = (5, 3_000, 300_000, 9 * 1024 * 1024 + 3)
chance = random.Random(7)


class Place(NamedTuple):
    node: RealNode
    client: Any

    def write(self, key: str, *bodies: bytes) -> list[str]:
        """Write these, one after the other; the id of each."""
        put = self.client.put_object
        return [put(Bucket=BUCKET, Key=key, Body=body, Metadata={"n": str(len(body))})["VersionId"] for body in bodies]

    def ask(self, method: str, key: str, version: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        query = f"?versionId={version}" if version else ""
        return self.node.ask(method, f"/vers/{key}{query}", headers)

    def drop(self, key: str, version: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=key, VersionId=version)


@pytest.fixture(scope="module")
def place(seaweed: servers.SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    seaweed.create_bucket(BUCKET)
    client: Any = s3_client(seaweed)
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    with RealNode(tmp_path_factory.mktemp("node"), "--fronts", "1") as node:
        node.add_bucket("vers", f"s3://{BUCKET}", options=seaweed.options(), freshness_s=0)
        node.add_bucket("folder", f"file://{tmp_path_factory.mktemp('folder')}")
        yield Place(node, client)


@pytest.mark.parametrize("size", SIZES)
def test_each_version_is_read_for_itself(place: Place, size: int) -> None:
    key, bodies = f"each-{size}", [chance.randbytes(size), chance.randbytes(size // 2), chance.randbytes(size)]
    ids = place.write(key, *bodies)
    for _ in range(2):  # from the backend, then from here
        for version, body in zip(ids, bodies, strict=True):
            status, headers, got = place.ask("GET", key, version)
            assert (status, headers["x-amz-version-id"], got == body) == (200, version, True)
            assert (headers["etag"], headers["x-amz-meta-n"]) == (f'"{hashlib.md5(body).hexdigest()}"', str(len(body)))
            status, _, got = place.ask("GET", key, version, range=f"bytes=1-{size // 3}")
            assert (status, got == body[1 : size // 3 + 1]) == (206, True)
            status, headers, _ = place.ask("HEAD", key, version)
            assert (status, headers["content-length"], headers["x-amz-version-id"]) == (200, str(len(body)), version)
        status, headers, got = place.ask("GET", key)
        assert (status, got == bodies[-1], "x-amz-version-id" in headers) == (200, True, False)
    assert place.ask("GET", key, ids[0], **{"if-none-match": f'"{hashlib.md5(bodies[0]).hexdigest()}"'})[0] == 304
    assert place.ask("GET", key, ids[0], **{"if-match": '"other"'})[0] == 412
    assert place.ask("GET", f"{key}?partNumber=1&versionId={ids[0]}")[0] == 206


def test_what_was_read_stays_until_it_is_evicted(place: Place) -> None:
    old, new = chance.randbytes(100_000), chance.randbytes(100_000)
    first, _ = place.write("stays", old, new)
    assert place.ask("GET", "stays", first)[2] == old
    place.drop("stays", first)
    assert place.ask("GET", "stays", first)[2] == old, "a version never changes: nobody is asked again"
    place.node.evict("vers", "stay")
    status, _, answered = place.ask("GET", "stays", first)
    assert (status, b"<Code>NoSuchVersion</Code>" in answered) == (404, True), answered
    assert place.ask("HEAD", "stays", first)[0] == 404
    assert place.ask("GET", "stays")[2] == new


def test_an_object_that_was_deleted_has_its_versions_still(place: Place) -> None:
    body = chance.randbytes(50_000)
    (version,) = place.write("gone", body)
    place.client.delete_object(Bucket=BUCKET, Key="gone")
    assert place.ask("GET", "gone")[0] == 404
    assert place.ask("GET", "gone", version)[2] == body
    assert place.ask("GET", "gone")[0] == 404


def test_a_version_is_the_source_of_a_copy(place: Place) -> None:
    old, new = chance.randbytes(40_000), chance.randbytes(30_000)
    first, _ = place.write("source", old, new)
    for target in ("copy", "source"):  # also onto the object itself: that is how a version is brought back
        status, _, answered = place.ask("PUT", target, **{"x-amz-copy-source": f"/vers/source?versionId={first}"})
        assert status == 200, answered
        status, headers, got = place.ask("GET", target)
        assert (status, got == old, headers["x-amz-meta-n"]) == (200, True, "40000")
        assert "x-amz-version-id" not in headers
        assert place.client.get_object(Bucket=BUCKET, Key=target)["Body"].read() == old
    upload = place.ask("POST", "parts?uploads")[2].partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    source = {"x-amz-copy-source": f"vers/source?versionId={first}", "x-amz-copy-source-range": "bytes=0-9"}
    status, _, answered = place.ask("PUT", f"parts?partNumber=1&uploadId={upload}", **source)
    assert (status, hashlib.md5(old[:10]).hexdigest().encode() in answered) == (200, True), answered


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code"),
    [
        ("GET", "/vers/refused?versionId=0123456789abcdef0123456789abcdef", {}, 404, "NoSuchVersion"),
        ("GET", "/vers/refused?versionId=two%20words", {}, 400, "InvalidArgument"),
        ("GET", "/vers/refused?versionId=", {}, 400, "InvalidArgument"),
        ("GET", "/vers/refused?versionId=" + "x" * 1020, {}, 400, "KeyTooLongError"),
        ("GET", "/vers/refused?tagging&versionId=x", {}, 501, "NotImplemented"),
        ("DELETE", "/vers/refused?versionId=x", {}, 501, "NotImplemented"),
        ("GET", "/folder/refused?versionId=x", {}, 501, "NotImplemented"),
        ("PUT", "/vers/copy", {"x-amz-copy-source": "/folder/a?versionId=x"}, 501, "NotImplemented"),
        ("GET", "/-versions-vers/refused", {}, 400, "InvalidBucketName"),
    ],
)
def test_what_names_no_version_is_refused(
    place: Place, method: str, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    place.write("refused", b"body")
    refused, _, body = place.node.ask(method, path, headers)
    assert (refused, f"<Code>{code}</Code>".encode() in body) == (status, True), body
    assert place.ask("GET", "refused?versionId=null")[2] == b"body"
