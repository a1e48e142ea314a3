"""Unmodified S3 clients list and read a bucket of SeaweedFS through a real node."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore
import pytest
from botocore.exceptions import ClientError

from bench import servers
from tests.patience import until
from tests.s3.conftest import BUCKET, KEY_ID, MANY, OTHER_KEY_ID, OTHER_SECRET, SECRET, TOKEN, Lake, client
from tests.s3.real_node import RealNode

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(params=["open", "keyed"])
def node(request: pytest.FixtureRequest) -> RealNode:
    """Each test runs against a node that asks for no key, and against one that does."""
    found: RealNode = request.getfixturevalue(f"{request.param}_node")
    return found


def _code(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


# --- warming --------------------------------------------------------------------------------------------------------
def _metric(node: RealNode, series: str) -> float:
    token = {"authorization": f"Bearer {TOKEN}"}
    lines = node.ask("GET", "/-/metrics", token)[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series + " "))


def test_a_head_of_the_first_byte_brings_the_whole_object(node: RealNode, lake: Lake) -> None:
    """As CoreWeave's clients warm their cache; only who may read the object can."""
    key, data = f"dir/warm-{urlsplit(node.endpoint).port}", os.urandom(5 << 20)
    behind = client(lake.server.endpoint)
    behind.put_object(Bucket=BUCKET, Key=key, Body=data)
    try:
        _warm_and_read(node, key, data)
    finally:
        behind.delete_object(Bucket=BUCKET, Key=key)


def _warm_and_read(node: RealNode, key: str, data: bytes) -> None:
    fetched = 'forebay_prestaged_total{result="fetched"}'
    before = _metric(node, fetched)
    if node._token:
        other = client(node.endpoint, OTHER_KEY_ID, OTHER_SECRET)
        assert _code(other.head_object, Bucket=BUCKET, Key=key, Range="bytes=0-0")[0] == 403
    s3 = client(node.endpoint, KEY_ID, SECRET)
    for asked in ("bytes=0-1", "bytes=1-1", "bytes=0-"):
        s3.head_object(Bucket=BUCKET, Key=key, Range=asked)
    assert _metric(node, "forebay_prestaging") == 0
    answer = s3.head_object(Bucket=BUCKET, Key=key, Range="bytes=0-0")
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["ContentLength"]) == (206, 1)
    assert answer["ResponseMetadata"]["HTTPHeaders"]["content-range"] == f"bytes 0-0/{len(data)}"
    until(lambda: _metric(node, fetched) == before + 1)
    read = 'forebay_backend_read_bytes_total{bucket="clients"}'
    taken = _metric(node, read)
    assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == data
    assert s3.head_object(Bucket=BUCKET, Key=key, Range="bytes=0-0")["ContentLength"] == 1
    assert _metric(node, read) == taken
    assert _code(s3.head_object, Bucket=BUCKET, Key="dir/nothing", Range="bytes=0-0")[0] == 404


# --- boto3 ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def localhost_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`*.localhost` is loopback, as RFC 6761 wishes and not every system's resolver says."""
    resolve = socket.getaddrinfo

    def resolve_loopback(host: Any, *arguments: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return resolve("127.0.0.1" if name and name.endswith("localhost") else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_loopback)


@pytest.mark.usefixtures("localhost_names")
@pytest.mark.parametrize("style", ["path", "virtual"])
def test_boto3_lists_and_reads(node: RealNode, lake: Lake, style: str) -> None:
    endpoint = node.endpoint.replace("127.0.0.1", "localhost")
    s3 = client(endpoint, KEY_ID, SECRET, s3={"addressing_style": style})
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == [BUCKET]
    assert s3.head_bucket(Bucket=BUCKET)["BucketRegion"] == "us-east-1"
    assert s3.get_bucket_location(Bucket=BUCKET)["LocationConstraint"] is None
    for version in ("list_objects", "list_objects_v2"):
        pages = list(s3.get_paginator(version).paginate(Bucket=BUCKET))
        listed = {entry["Key"]: entry["Size"] for page in pages for entry in page["Contents"]}
        assert listed == lake.sizes
        assert len(pages) == 2
    top = s3.list_objects_v2(Bucket=BUCKET, Delimiter="/")
    assert [entry["Prefix"] for entry in top["CommonPrefixes"]] == ["dir/", "many/", "odd/"]
    for key in ("hello.txt", "empty", "odd/a b+c.txt", "odd/ü-中-\U0001f600.txt", "odd/100%&=?#;.txt"):
        answer = s3.get_object(Bucket=BUCKET, Key=key)
        assert answer["Body"].read() == lake.objects[key]
        assert answer["ETag"] == f'"{hashlib.md5(lake.objects[key]).hexdigest()}"'
        assert s3.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(lake.objects[key])


def test_boto3_ranges_and_conditions(node: RealNode, lake: Lake) -> None:
    s3 = client(node.endpoint, KEY_ID, SECRET)
    big = lake.objects["big.bin"]
    for start, end in ((0, 1), (4 * 1024 * 1024 - 3, 4 * 1024 * 1024 + 5), (len(big) - 7, len(big)), (0, len(big))):
        answer = s3.get_object(Bucket=BUCKET, Key="big.bin", Range=f"bytes={start}-{end - 1}")
        assert answer["Body"].read() == big[start:end]
        assert answer["ContentRange"] == f"bytes {start}-{end - 1}/{len(big)}"
    assert s3.get_object(Bucket=BUCKET, Key="big.bin", Range="bytes=-9")["Body"].read() == big[-9:]
    assert s3.get_object(Bucket=BUCKET, Key="hello.txt", PartNumber=1)["Body"].read() == b"hello, world!"
    head = s3.head_object(Bucket=BUCKET, Key="hello.txt")
    etag, modified = head["ETag"], head["LastModified"]
    asked: dict[str, Any] = {"Bucket": BUCKET, "Key": "hello.txt"}
    assert s3.get_object(**asked, IfMatch=etag)["Body"].read() == b"hello, world!"
    assert _code(s3.get_object, **asked, IfMatch='"x"') == (412, "PreconditionFailed")
    assert _code(s3.get_object, **asked, IfNoneMatch=etag) == (304, "304")
    assert _code(s3.get_object, **asked, IfModifiedSince=modified) == (304, "304")
    assert s3.get_object(**asked, IfUnmodifiedSince=modified)["ContentLength"] == 13
    assert _code(s3.get_object, **asked, Range="bytes=13-") == (416, "InvalidRange")


def test_boto3_metadata_and_overrides(node: RealNode) -> None:
    s3 = client(node.endpoint, KEY_ID, SECRET)
    typed = s3.get_object(Bucket=BUCKET, Key="typed.json")
    assert (typed["ContentType"], typed["Metadata"]) == ("application/json", {"colour": "blue"})
    other = s3.get_object(
        Bucket=BUCKET, Key="typed.json", ResponseContentType="text/plain", ResponseCacheControl="no-store"
    )
    assert (other["ContentType"], other["CacheControl"]) == ("text/plain", "no-store")


def test_boto3_downloads_a_large_file_in_parallel_parts(node: RealNode, lake: Lake, tmp_path: Path) -> None:
    client(node.endpoint, KEY_ID, SECRET).download_file(BUCKET, "big.bin", str(tmp_path / "big"))
    assert (tmp_path / "big").read_bytes() == lake.objects["big.bin"]


def test_boto3_gets_the_errors_it_knows(node: RealNode) -> None:
    s3 = client(node.endpoint, KEY_ID, SECRET)
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket=BUCKET, Key="missing")
    with pytest.raises(s3.exceptions.NoSuchBucket):
        s3.list_objects_v2(Bucket="no-such-bucket")
    assert _code(s3.head_object, Bucket=BUCKET, Key="missing") == (404, "404")
    refused = {(501, "NotImplemented"), (403, "AccessDenied")} if node._token else {(501, "NotImplemented")}
    own_key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
    assert _code(s3.put_object, Bucket=BUCKET, Key="new", Body=b"x", **own_key) in refused
    assert _code(s3.put_bucket_versioning, Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"}) in refused
    assert _code(s3.put_bucket_policy, Bucket=BUCKET, Policy="{}") in refused


def test_presigned_urls_work_in_any_http_client(node: RealNode, lake: Lake) -> None:
    s3 = client(node.endpoint, KEY_ID, SECRET, signature_version="s3v4")
    for key in ("hello.txt", "odd/ü-中-\U0001f600.txt", "odd/100%&=?#;.txt"):
        url = s3.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key}, ExpiresIn=60)
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == lake.objects[key]


def test_a_node_with_keys_lets_nobody_else_in(keyed_node: RealNode) -> None:
    arguments = {"Bucket": BUCKET, "Key": "hello.txt"}
    for key_id, secret, code in (
        ("AKIDNOBODY", SECRET, "InvalidAccessKeyId"),
        (KEY_ID, "wrong", "SignatureDoesNotMatch"),
        (OTHER_KEY_ID, OTHER_SECRET, "AccessDenied"),
    ):
        s3 = client(keyed_node.endpoint, key_id, secret)
        assert _code(s3.get_object, **arguments) == (403, code)
        assert _code(s3.list_objects_v2, Bucket=BUCKET) == (403, code)
    assert client(keyed_node.endpoint, OTHER_KEY_ID, OTHER_SECRET).list_buckets()["Buckets"] == []
    anonymous = client(keyed_node.endpoint, signature_version=botocore.UNSIGNED)
    assert _code(anonymous.get_object, **arguments) == (403, "AccessDenied")
    url = client(keyed_node.endpoint, KEY_ID, SECRET, signature_version="s3v4").generate_presigned_url(
        "get_object", arguments, ExpiresIn=60
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url.replace("hello.txt", "typed.json"))
    with caught.value as refused:
        assert (refused.code, b"SignatureDoesNotMatch" in refused.read()) == (403, True)


def test_an_open_node_serves_requests_without_a_signature(open_node: RealNode) -> None:
    anonymous = client(open_node.endpoint, signature_version=botocore.UNSIGNED)
    assert anonymous.get_object(Bucket=BUCKET, Key="hello.txt")["Body"].read() == b"hello, world!"


# --- command lines ----------------------------------------------------------------------------------------------------
def _run(program: str, *arguments: str, home: Path, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_"))}
    known |= {"HOME": str(home), "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    known |= {"AWS_EC2_METADATA_DISABLED": "true", **environment}
    command = [servers.find_program(program), *arguments]
    done = subprocess.run(command, env=known, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
    return done.stdout.decode()


def test_the_aws_command_line(node: RealNode, lake: Lake, tmp_path: Path) -> None:
    environment = {
        "AWS_ENDPOINT_URL": node.endpoint,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "eu-central-1",
    }
    assert BUCKET in _run("aws", "s3", "ls", home=tmp_path, **environment)
    top = _run("aws", "s3", "ls", f"s3://{BUCKET}/", home=tmp_path, **environment)
    assert "PRE many/" in top
    assert "hello.txt" in top
    summary = _run(
        "aws", "s3", "ls", "--recursive", "--summarize", f"s3://{BUCKET}/many/", home=tmp_path, **environment
    )
    assert f"Total Objects: {MANY}" in summary
    _run("aws", "s3", "cp", "--quiet", f"s3://{BUCKET}/big.bin", str(tmp_path / "big"), home=tmp_path, **environment)
    assert (tmp_path / "big").read_bytes() == lake.objects["big.bin"]
    _run("aws", "s3", "sync", "--quiet", f"s3://{BUCKET}/odd/", str(tmp_path / "odd"), home=tmp_path, **environment)
    for key, data in lake.objects.items():
        if key.startswith("odd/"):
            assert (tmp_path / key).read_bytes() == data
    head = _run("aws", "s3api", "head-object", "--bucket", BUCKET, "--key", "typed.json", home=tmp_path, **environment)
    assert json.loads(head)["Metadata"] == {"colour": "blue"}


def test_rclone(node: RealNode, lake: Lake, tmp_path: Path) -> None:
    environment = {
        "RCLONE_CONFIG_NODE_TYPE": "s3",
        "RCLONE_CONFIG_NODE_PROVIDER": "Other",
        "RCLONE_CONFIG_NODE_ENDPOINT": node.endpoint,
        "RCLONE_CONFIG_NODE_ACCESS_KEY_ID": KEY_ID,
        "RCLONE_CONFIG_NODE_SECRET_ACCESS_KEY": SECRET,
        "RCLONE_CONFIG": str(tmp_path / "rclone.conf"),
    }
    (tmp_path / "rclone.conf").touch()
    assert _run("rclone", "lsd", "node:", home=tmp_path, **environment).split()[-1] == BUCKET
    listed = _run(
        "rclone", "lsf", "-R", "--files-only", "--format", "sp", f"node:{BUCKET}", home=tmp_path, **environment
    )
    sizes = {key: int(size) for size, _, key in (line.partition(";") for line in listed.splitlines())}
    assert sizes == lake.sizes
    assert _run("rclone", "cat", "--offset", "7", f"node:{BUCKET}/hello.txt", home=tmp_path, **environment) == "world!"
    for source in ("dir", "odd"):
        _run("rclone", "copy", f"node:{BUCKET}/{source}", str(tmp_path / source), home=tmp_path, **environment)
    for key, data in lake.objects.items():
        if key.startswith(("dir/", "odd/")):
            assert (tmp_path / key).read_bytes() == data
    _run("rclone", "check", f"node:{BUCKET}/dir", str(tmp_path / "dir"), home=tmp_path, **environment)


# --- file systems -----------------------------------------------------------------------------------------------------
def test_s3fs(node: RealNode, lake: Lake) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(key=KEY_ID, secret=SECRET, endpoint_url=node.endpoint, skip_instance_cache=True)
    assert set(fs.ls(f"{BUCKET}/dir")) == {f"{BUCKET}/dir/one.bin", f"{BUCKET}/dir/sub"}
    assert {path.removeprefix(f"{BUCKET}/") for path in fs.find(BUCKET)} == set(lake.objects)
    assert fs.info(f"{BUCKET}/big.bin")["size"] == len(lake.objects["big.bin"])
    assert fs.exists(f"{BUCKET}/odd/a b+c.txt")
    assert not fs.exists(f"{BUCKET}/missing")
    big = lake.objects["big.bin"]
    with fs.open(f"{BUCKET}/big.bin", block_size=2**20) as file:
        file.seek(5_000_000)
        assert file.read(100_000) == big[5_000_000:5_100_000]
    paths = [f"{BUCKET}/big.bin"] * 3
    assert fs.cat_ranges(paths, [0, 10_000, 20_000_000], [10, 10_010, 20_000_010]) == [
        big[:10],
        big[10_000:10_010],
        big[20_000_000:20_000_010],
    ]
    assert fs.cat(f"{BUCKET}/odd/ü-中-\U0001f600.txt") == b"unicode"
    with pytest.raises(FileNotFoundError):
        fs.cat_file(f"{BUCKET}/missing")


def test_pyarrow(node: RealNode, lake: Lake) -> None:
    from pyarrow import fs

    url = node.endpoint.removeprefix("http://")
    s3 = fs.S3FileSystem(access_key=KEY_ID, secret_key=SECRET, endpoint_override=url, scheme="http", region="eu-west-1")
    found = s3.get_file_info(fs.FileSelector(BUCKET, recursive=True))
    files = {info.path.removeprefix(f"{BUCKET}/"): info.size for info in found if info.is_file}
    assert files == lake.sizes
    assert s3.get_file_info(f"{BUCKET}/missing").type == fs.FileType.NotFound
    big = lake.objects["big.bin"]
    with s3.open_input_file(f"{BUCKET}/big.bin") as file:
        assert file.size() == len(big)
        assert file.read_at(1_000, 8_000_000) == big[8_000_000:8_001_000]
        file.seek(len(big) - 10)
        assert file.read() == big[-10:]
    with s3.open_input_stream(f"{BUCKET}/odd/100%&=?#;.txt") as stream:
        assert stream.read() == b"punctuation"
