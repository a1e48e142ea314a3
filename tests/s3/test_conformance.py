"""What public S3 suites ask of a reader, asked through a real node in front of SeaweedFS, checked by a dumb oracle."""

from __future__ import annotations

import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.s3.conftest import BUCKET, KEY_ID, SECRET, Lake, client
from tests.s3.fake_front import list_dumbly
from tests.s3.real_node import RealNode

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

# fmt: off
KEYS = [  # none is the folder of another: neither a directory nor SeaweedFS keeps `a` beside `a/b` well
    "asdf", "asdf+b", "foo-1", "foo.bar/x", "foo+1/bar", "foo/bar/xyzzy/1", "foo/baz", "b", "ba", "bar", "baz", "cab",
    "quux ab/thud", "quux/thud", "under1/bar", "under1-bar", "under1.bar", "0/1000", "0/1001", "1999", "1999#", "1999+",
    "2000", "a%b", "a&b<c>", "ü/中/\U0001f600", "z/z/z/z/z", "z.z", "zz~(*)!'", "x\ty", "x\ny",
]
# fmt: on


@pytest.fixture(scope="module")
def shelf(lake: Lake, open_node: RealNode) -> Iterator[Any]:
    """A SeaweedFS bucket of awkward keys behind the node: a client of the node."""
    lake.server.create_bucket("shelf")
    writer = client(lake.server.endpoint, max_pool_connections=8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: writer.put_object(Bucket="shelf", Key=key, Body=key.encode()), KEYS))
    open_node.add_bucket("shelf", "s3://shelf", options=lake.server.options())
    yield client(open_node.endpoint)
    open_node.remove_bucket("shelf")  # others share the node, and list its buckets


@pytest.fixture(scope="module")
def folder(open_node: RealNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same keys with a directory as the backend."""
    root = tmp_path_factory.mktemp("folder")
    for key in KEYS:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_text(key)
    open_node.add_bucket("folder", root.as_uri())
    yield client(open_node.endpoint)
    open_node.remove_bucket("folder")


def _shown(answer: dict[str, Any]) -> tuple[list[str], list[str]]:
    keys = [entry["Key"] for entry in answer.get("Contents", [])]
    return keys, [entry["Prefix"] for entry in answer.get("CommonPrefixes", [])]


def test_random_questions_are_answered_as_the_oracle_does(folder: Any) -> None:
    chance = random.Random(7)
    words = ["", "a", "foo", "foo/", "foo/bar", "b", "ba", "0/", "ü", "z/", "quux ", "under1", "19", "nothing"]
    for _ in range(120):
        prefix, marker = chance.choice(words), chance.choice(["", "", *words, *KEYS])
        delimiter, limit = chance.choice(["", "/", "/", "a", "-", " ", "/b", "%"]), chance.choice([1, 2, 3, 7, 1000])
        asked: dict[str, Any] = {"Bucket": "folder", "Prefix": prefix, "MaxKeys": limit}
        if delimiter:
            asked["Delimiter"] = delimiter
        start = marker
        if delimiter and marker.startswith(prefix) and delimiter in marker[len(prefix) :]:
            start = marker[: marker.index(delimiter, len(prefix)) + len(delimiter)] + "\U0010ffff"
        plain, rolled, after = list_dumbly(KEYS, prefix, delimiter, start, limit)
        for answer in (
            folder.list_objects_v2(**asked, StartAfter=marker),
            folder.list_objects(**asked, Marker=marker),
        ):
            assert _shown(answer) == (plain, rolled), asked | {"marker": marker}
            assert answer["IsTruncated"] is bool(after)


@pytest.mark.parametrize("backend", ["folder", "shelf"])
def test_paging_shows_each_name_once(backend: str, request: pytest.FixtureRequest) -> None:
    """Also from SeaweedFS, whose order is not that of bytes where a name holds characters below '/'."""
    s3 = request.getfixturevalue(backend)
    for prefix, delimiter in (("", "/"), ("foo", "/"), ("", ""), ("under1", "")):
        plain, rolled, _ = list_dumbly(KEYS, prefix, delimiter, "", 10_000)
        for limit in (1, 2, 5):
            for version in ("list_objects", "list_objects_v2"):
                pages = s3.get_paginator(version).paginate(
                    Bucket=backend, Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": limit}
                )
                shown = [_shown(page) for page in pages]
                asked = (prefix, delimiter, limit, version)
                assert sorted(key for names, _ in shown for key in names) == plain, asked
                assert sorted(text for _, texts in shown for text in texts) == rolled, asked
                assert all(len(names) + len(texts) <= limit for names, texts in shown)


def test_every_listed_key_can_be_read_and_says_the_same_of_itself(shelf: Any) -> None:
    for entry in shelf.list_objects_v2(Bucket="shelf")["Contents"]:
        head = shelf.head_object(Bucket="shelf", Key=entry["Key"])
        assert (head["ETag"], head["ContentLength"]) == (entry["ETag"], entry["Size"])
        assert head["LastModified"] == entry["LastModified"].replace(microsecond=0)
        assert shelf.get_object(Bucket="shelf", Key=entry["Key"])["Body"].read() == entry["Key"].encode()


def test_raw_responses_of_reads(open_node: RealNode) -> None:
    status, headers, body = open_node.ask("GET", f"/{BUCKET}/hello.txt")
    assert (status, body) == (200, b"hello, world!")
    assert headers["content-length"] == "13"
    assert headers["accept-ranges"] == "bytes"
    assert headers["x-amz-request-id"]
    for target, code in ((f"/{BUCKET}/gone", b"NoSuchKey"), ("/no-such-bucket/hello.txt", b"NoSuchBucket")):
        status, headers, body = open_node.ask("GET", target)
        assert (status, code in body) == (404, True)
        assert headers["x-amz-request-id"].encode() in body
        status, headers, body = open_node.ask("HEAD", target)
        assert (status, body) == (404, b"")


def test_presigned_urls_and_their_limits(keyed_node: RealNode) -> None:
    s3 = client(keyed_node.endpoint, KEY_ID, SECRET, signature_version="s3v4")
    for expires_s, status in ((100, 200), (604_800, 200), (604_801, 403)):
        url = s3.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "hello.txt"}, ExpiresIn=expires_s)
        try:
            with urllib.request.urlopen(url) as answer:
                assert answer.read() == b"hello, world!"
                assert answer.status == status
        except urllib.error.HTTPError as refused:
            with refused:
                seen = refused.code
        else:
            seen = 200
        assert seen == status, expires_s
    listing = s3.generate_presigned_url("list_objects_v2", {"Bucket": BUCKET, "Prefix": "odd/"}, ExpiresIn=60)
    with urllib.request.urlopen(listing) as answer:
        assert b"<KeyCount>3</KeyCount>" in answer.read()


def test_times_as_conditions(open_node: RealNode) -> None:
    s3 = client(open_node.endpoint)
    asked: dict[str, Any] = {"Bucket": BUCKET, "Key": "hello.txt"}
    modified = s3.head_object(**asked)["LastModified"]
    assert modified <= datetime.now(UTC)
    second = timedelta(seconds=1)
    assert s3.get_object(**asked, IfModifiedSince=modified - second)["ContentLength"] == 13
    assert s3.get_object(**asked, IfUnmodifiedSince=modified + second)["ContentLength"] == 13
    for arguments, status in (
        ({"IfModifiedSince": modified + second}, 304),
        ({"IfUnmodifiedSince": modified - second}, 412),
    ):
        with pytest.raises(ClientError) as caught:
            s3.get_object(**asked, **arguments)
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == status


def test_ranges_cold_and_warm_over_block_borders(lake: Lake, open_node: RealNode) -> None:
    """Each range twice, in random order: the first is fetched, the second comes from the disk."""
    data = lake.objects["big.bin"]
    mib = 1024 * 1024
    writer = client(lake.server.endpoint)
    writer.put_object(Bucket=BUCKET, Key="borders.bin", Body=data)
    lake.objects["borders.bin"] = data
    edges = [0, 1, 4 * mib - 1, 4 * mib, 4 * mib + 1, 16 * mib - 1, 16 * mib, 20 * mib, len(data) - 1, len(data)]
    ranges = [(start, end) for start in edges for end in edges if start < end] * 2
    random.Random(3).shuffle(ranges)
    for start, end in ranges:
        status, headers, body = open_node.ask("GET", f"/{BUCKET}/borders.bin", {"range": f"bytes={start}-{end - 1}"})
        assert (status, body == data[start:end]) == (206, True), (start, end)
        assert headers["content-range"] == f"bytes {start}-{end - 1}/{len(data)}"
