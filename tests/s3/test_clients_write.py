"""Unmodified S3 clients write and read back through a real node with keys and TLS, into buckets of every write mode."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from bench import servers
from tests.node.certificates import Pair, make
from tests.s3.conftest import KEY_ID, SECRET, TOKEN, client
from tests.s3.real_node import RealNode

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MIB = 1 << 20
BUCKETS = ("written-through", "written-back", "written-here")
IDENTITIES = [
    {"name": "writer", "access_key_id": KEY_ID, "secret_access_key": SECRET, "allow": "admin:*"},
    {"name": "operator", "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "allow": "admin:*"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory.mktemp("tls"), "node")


def _started(node: RealNode, seaweed: servers.SeaweedFS) -> RealNode:
    for name, write in (("written-through", "through"), ("written-back", "back")):
        seaweed.create_bucket(name)
        node.add_bucket(name, f"s3://{name}", options=seaweed.options(), write=write)
    node.add_bucket("written-here", "local://", write="local")
    return node


@pytest.fixture(scope="module")
def node(seaweed: servers.SeaweedFS, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """One node that speaks TLS only and knows keys."""
    folder = tmp_path_factory.mktemp("writing-node")
    (folder / "identities.json").write_text(json.dumps({"identities": IDENTITIES}))
    flags = ("--identities", str(folder / "identities.json"), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with RealNode(folder / "node", *flags, token=TOKEN, trust=pair.cert) as running:
        yield _started(running, seaweed)


@pytest.fixture
def s3(node: RealNode, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(pair.cert))
    return client(node.endpoint, KEY_ID, SECRET)


def _code(call: Any, **arguments: Any) -> tuple[int, str]:
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def _data(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


# --- boto3 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("size_bytes", [0, 1, 10_000, 300_000, 5 * MIB + 3])
def test_boto3_reads_what_it_wrote(s3: Any, bucket: str, size_bytes: int) -> None:
    data, key = _data(size_bytes, 1), f"boto3/ü {size_bytes}.bin"
    put = s3.put_object(Bucket=bucket, Key=key, Body=data, ContentType="text/x-story", Metadata={"colour": "blue"})
    got = s3.get_object(Bucket=bucket, Key=key)
    assert got["Body"].read() == data
    assert (got["ContentType"], got["Metadata"], got["ETag"]) == ("text/x-story", {"colour": "blue"}, put["ETag"])
    listed = s3.list_objects_v2(Bucket=bucket, Prefix=key)["Contents"]
    assert [(entry["Key"], entry["Size"]) for entry in listed] == [(key, size_bytes)]
    s3.put_object(Bucket=bucket, Key=key, Body=b"other")
    assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == b"other"
    s3.delete_object(Bucket=bucket, Key=key)
    assert _code(s3.get_object, Bucket=bucket, Key=key) == (404, "NoSuchKey")
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket, Prefix=key)


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_boto3_checksums(s3: Any, bucket: str, algorithm: str) -> None:
    data, field = _data(200_000, 2), f"Checksum{algorithm}"
    put = s3.put_object(Bucket=bucket, Key="sum", Body=data, ChecksumAlgorithm=algorithm)
    head = s3.head_object(Bucket=bucket, Key="sum", ChecksumMode="ENABLED")
    assert head[field] == put[field]
    got = s3.get_object(Bucket=bucket, Key="sum", ChecksumMode="ENABLED")
    assert got["Body"].read() == data, "the client compares the checksum as it reads"
    if algorithm in ("SHA1", "SHA256"):
        assert put[field] == base64.b64encode(hashlib.new(algorithm.lower(), data).digest()).decode()
    wrong = {field: base64.b64encode(base64.b64decode(put[field])[::-1]).decode()}
    assert _code(s3.put_object, Bucket=bucket, Key="sum", Body=data[:-1], **wrong) == (400, "BadDigest")
    assert s3.get_object(Bucket=bucket, Key="sum")["Body"].read() == data, "nothing of the wrong one is there"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_boto3_without_checksums_and_with_md5(node: RealNode, pair: Pair, bucket: str) -> None:
    data = _data(100_000, 3)
    md5 = hashlib.md5(data)
    plain = client_with(node, pair, request_checksum_calculation="when_required")
    sent = base64.b64encode(md5.digest()).decode()
    put = plain.put_object(Bucket=bucket, Key="md5", Body=data, ContentMD5=sent)
    assert put["ETag"] == f'"{md5.hexdigest()}"'
    assert _code(plain.put_object, Bucket=bucket, Key="md5", Body=data[1:], ContentMD5=sent) == (400, "BadDigest")
    assert plain.get_object(Bucket=bucket, Key="md5")["Body"].read() == data


def client_with(node: RealNode, pair: Pair, **config: Any) -> Any:
    """A client whose trust is given, not taken from the environment."""
    os.environ["AWS_CA_BUNDLE"] = str(pair.cert)
    try:
        return client(node.endpoint, KEY_ID, SECRET, **config)
    finally:
        del os.environ["AWS_CA_BUNDLE"]


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("algorithm", ["CRC32", "SHA256"])
def test_boto3_uploads_large_files_in_parts(s3: Any, bucket: str, algorithm: str, tmp_path: Path) -> None:
    data = _data(21 * MIB + 5, 4)
    (tmp_path / "big").write_bytes(data)
    parts = TransferConfig(multipart_threshold=8 * MIB, multipart_chunksize=8 * MIB)
    more = {"ChecksumAlgorithm": algorithm, "Metadata": {"a": "b"}}
    s3.upload_file(str(tmp_path / "big"), bucket, "big", Config=parts, ExtraArgs=more)
    s3.download_file(bucket, "big", str(tmp_path / "back"), Config=parts)
    assert (tmp_path / "back").read_bytes() == data
    head = s3.head_object(Bucket=bucket, Key="big")
    assert head["ETag"].endswith('-3"')
    assert head["Metadata"] == {"a": "b"}


@pytest.mark.parametrize("bucket", BUCKETS)
def test_boto3_multipart_by_hand(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "parts"}
    upload = s3.create_multipart_upload(**where)["UploadId"]
    data = [_data(5 * MIB, 5), _data(5 * MIB, 6), b"end"]
    tags = {}
    for number in (3, 1, 2):
        tags[number] = s3.upload_part(**where, UploadId=upload, PartNumber=number, Body=data[number - 1])["ETag"]
    listed = s3.list_parts(**where, UploadId=upload)["Parts"]
    assert [(part["PartNumber"], part["Size"]) for part in listed] == [(1, 5 * MIB), (2, 5 * MIB), (3, 3)]
    assert [each["UploadId"] for each in s3.list_multipart_uploads(Bucket=bucket, Prefix="parts")["Uploads"]] == [
        upload
    ]
    parts = [{"PartNumber": number, "ETag": tags[number]} for number in (1, 2, 3)]
    finish = {**where, "UploadId": upload}
    assert _code(s3.complete_multipart_upload, **finish, MultipartUpload={"Parts": parts[::-1]}) == (
        400,
        "InvalidPartOrder",
    )
    s3.complete_multipart_upload(**finish, MultipartUpload={"Parts": parts})
    assert s3.get_object(**where)["Body"].read() == b"".join(data)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)
    gone = s3.create_multipart_upload(**where)["UploadId"]
    s3.abort_multipart_upload(**where, UploadId=gone)
    assert _code(s3.list_parts, **where, UploadId=gone) == (404, "NoSuchUpload")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_boto3_copies_conditions_and_many_deletes(s3: Any, bucket: str) -> None:
    data = _data(6 * MIB, 7)
    tag = s3.put_object(Bucket=bucket, Key="a", Body=data, Metadata={"one": "1"})["ETag"]
    s3.copy_object(Bucket=bucket, Key="b", CopySource={"Bucket": bucket, "Key": "a"})
    copied = s3.get_object(Bucket=bucket, Key="b")
    assert (copied["Body"].read(), copied["Metadata"]) == (data, {"one": "1"})
    s3.copy_object(Bucket=bucket, Key="b", CopySource=f"{bucket}/b", MetadataDirective="REPLACE", Metadata={"two": "2"})
    assert s3.head_object(Bucket=bucket, Key="b")["Metadata"] == {"two": "2"}
    assert _code(s3.put_object, Bucket=bucket, Key="a", Body=b"x", IfNoneMatch="*") == (412, "PreconditionFailed")
    assert _code(s3.put_object, Bucket=bucket, Key="a", Body=b"x", IfMatch='"other"') == (412, "PreconditionFailed")
    s3.put_object(Bucket=bucket, Key="a", Body=b"newer", IfMatch=tag)
    assert s3.get_object(Bucket=bucket, Key="a")["Body"].read() == b"newer"
    s3.put_object(Bucket=bucket, Key="fresh", Body=b"", IfNoneMatch="*")
    wanted = [{"Key": key} for key in ("a", "b", "fresh", "never")]
    done = s3.delete_objects(Bucket=bucket, Delete={"Objects": wanted})
    assert sorted(entry["Key"] for entry in done["Deleted"]) == ["a", "b", "fresh", "never"]
    assert _code(s3.head_object, Bucket=bucket, Key="a") == (404, "404")


def test_presigned_writes(s3: Any, node: RealNode, pair: Pair) -> None:
    signer = client(node.endpoint, KEY_ID, SECRET, signature_version="s3v4")
    url = signer.generate_presigned_url("put_object", {"Bucket": "written-here", "Key": "signed"}, ExpiresIn=60)
    trusting = ssl.create_default_context(cafile=str(pair.cert))
    with urllib.request.urlopen(urllib.request.Request(url, data=b"by url", method="PUT"), context=trusting) as answer:
        assert answer.status == 200
    assert s3.get_object(Bucket="written-here", Key="signed")["Body"].read() == b"by url"


def test_what_was_written_back_is_in_the_bucket_after_a_flush(
    s3: Any, node: RealNode, seaweed: servers.SeaweedFS
) -> None:
    data = {f"flushed/{n}": _data(size, n) for n, size in enumerate((0, 10, 70_000, 9 * MIB))}
    for key, body in data.items():
        s3.put_object(Bucket="written-back", Key=key, Body=body, Metadata={"kept": "yes"})
    node.flush("written-back")
    direct = client(seaweed.endpoint)
    for key, body in data.items():
        there = direct.get_object(Bucket="written-back", Key=key)
        assert there["Body"].read() == body
        assert there["Metadata"] == {"kept": "yes"}


# --- command lines ----------------------------------------------------------------------------------------------------
def _run(program: str, *arguments: str, home: Path, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_"))}
    known |= {"HOME": str(home), "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    known |= {"AWS_EC2_METADATA_DISABLED": "true", **environment}
    command = [servers.find_program(program), *arguments]
    done = subprocess.run(command, env=known, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout.decode()}{done.stderr.decode()}"
    return done.stdout.decode()


def _tree(folder: Path, seed: int) -> dict[str, bytes]:
    made = {}
    for n, (name, size) in enumerate((("one.bin", 1000), ("sub/two.bin", 300_000), ("sub/ü x.bin", 9 * MIB))):
        made[name] = _data(size, seed + n)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(made[name])
        os.utime(folder / name, (1.7e9, 1.7e9))  # long ago: clients compare it with an answer of whole seconds
    return made


@pytest.mark.parametrize("bucket", ["written-back", "written-through"])
def test_the_aws_command_line(node: RealNode, pair: Pair, tmp_path: Path, bucket: str) -> None:
    def aws(*arguments: str) -> str:
        return _run(
            "aws",
            *arguments,
            home=tmp_path,
            AWS_ENDPOINT_URL=node.endpoint,
            AWS_ACCESS_KEY_ID=KEY_ID,
            AWS_SECRET_ACCESS_KEY=SECRET,
            AWS_DEFAULT_REGION="us-east-1",
            AWS_CA_BUNDLE=str(pair.cert),
        )

    made, root = _tree(tmp_path / "tree", 20), f"s3://{bucket}/aws"
    aws("s3", "sync", "--only-show-errors", str(tmp_path / "tree"), root)
    assert aws("s3", "sync", str(tmp_path / "tree"), root) == "", "all is there already"
    aws("s3", "cp", "--only-show-errors", f"{root}/one.bin", f"{root}/copy.bin")
    aws("s3", "mv", "--only-show-errors", f"{root}/copy.bin", f"{root}/moved.bin")
    listed = aws("s3", "ls", "--recursive", root)
    assert "moved.bin" in listed
    assert "copy.bin" not in listed
    aws("s3", "sync", "--only-show-errors", root, str(tmp_path / "back"))
    for name, data in made.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    url = aws("s3", "presign", f"{root}/one.bin").strip()
    with urllib.request.urlopen(url, context=ssl.create_default_context(cafile=str(pair.cert))) as answer:
        assert answer.read() == made["one.bin"]
    aws("s3", "rm", "--only-show-errors", "--recursive", root)
    assert aws("s3api", "list-objects-v2", "--bucket", bucket, "--prefix", "aws/", "--query", "Contents") == "null\n"


@pytest.mark.parametrize("bucket", BUCKETS)
def test_rclone(node: RealNode, pair: Pair, tmp_path: Path, bucket: str) -> None:
    (tmp_path / "rclone.conf").touch()

    def rclone(*arguments: str) -> str:
        return _run(
            "rclone",
            "--ca-cert",
            str(pair.cert),
            *arguments,
            home=tmp_path,
            RCLONE_CONFIG_NODE_TYPE="s3",
            RCLONE_CONFIG_NODE_PROVIDER="Other",
            RCLONE_CONFIG_NODE_ENDPOINT=node.endpoint,
            RCLONE_CONFIG_NODE_ACCESS_KEY_ID=KEY_ID,
            RCLONE_CONFIG_NODE_SECRET_ACCESS_KEY=SECRET,
            RCLONE_CONFIG=str(tmp_path / "rclone.conf"),
        )

    made = _tree(tmp_path / "tree", 30)
    rclone("sync", "--s3-upload-cutoff", "6M", "--s3-chunk-size", "5M", str(tmp_path / "tree"), f"node:{bucket}/rclone")
    rclone("check", str(tmp_path / "tree"), f"node:{bucket}/rclone")
    (tmp_path / "tree" / "one.bin").unlink()
    rclone("sync", str(tmp_path / "tree"), f"node:{bucket}/rclone")
    rclone("check", str(tmp_path / "tree"), f"node:{bucket}/rclone")
    assert "one.bin" not in rclone("lsf", "-R", f"node:{bucket}/rclone")
    rclone("copy", f"node:{bucket}/rclone", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "two.bin").read_bytes() == made["sub/two.bin"]
    rclone("purge", f"node:{bucket}/rclone")


# --- file systems -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket", BUCKETS)
def test_s3fs(node: RealNode, pair: Pair, bucket: str) -> None:
    import s3fs

    fs = s3fs.S3FileSystem(
        key=KEY_ID,
        secret=SECRET,
        endpoint_url=node.endpoint,
        client_kwargs={"verify": str(pair.cert)},
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    data = _data(13 * MIB, 40)
    with fs.open(f"{bucket}/s3fs/big", "wb", block_size=5 * MIB) as file:
        for at in range(0, len(data), MIB):
            file.write(data[at : at + MIB])
    assert fs.cat(f"{bucket}/s3fs/big") == data
    fs.pipe(f"{bucket}/s3fs/small", b"small")
    fs.cp(f"{bucket}/s3fs/small", f"{bucket}/s3fs/copy")
    fs.mv(f"{bucket}/s3fs/copy", f"{bucket}/s3fs/moved")
    assert fs.find(f"{bucket}/s3fs") == [f"{bucket}/s3fs/{name}" for name in ("big", "moved", "small")]
    fs.rm(f"{bucket}/s3fs", recursive=True)
    assert not fs.exists(f"{bucket}/s3fs/big")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_pyarrow(node: RealNode, pair: Pair, bucket: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import fs

    s3 = fs.S3FileSystem(
        access_key=KEY_ID,
        secret_key=SECRET,
        endpoint_override=node.endpoint.removeprefix("https://"),
        scheme="https",
        region="us-east-1",
        tls_ca_file_path=str(pair.cert),
    )
    table = pa.table({"n": list(range(100_000)), "word": [f"word {n}" for n in range(100_000)]})
    pq.write_table(table, f"{bucket}/arrow/table.parquet", filesystem=s3)
    assert pq.read_table(f"{bucket}/arrow/table.parquet", filesystem=s3).equals(table)
    s3.copy_file(f"{bucket}/arrow/table.parquet", f"{bucket}/arrow/copy.parquet")
    s3.delete_file(f"{bucket}/arrow/table.parquet")
    found = s3.get_file_info(fs.FileSelector(f"{bucket}/arrow"))
    assert [info.base_name for info in found if info.is_file] == ["copy.parquet"]
    s3.delete_dir(f"{bucket}/arrow")


def test_s3torchconnector(seaweed: servers.SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys, but without TLS: its client trusts the system's certificates and cannot be given another."""
    import torch
    from s3torchconnector import S3Checkpoint, S3ClientConfig, S3MapDataset

    (tmp_path / "identities.json").write_text(json.dumps({"identities": IDENTITIES}))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with RealNode(tmp_path / "node", "--identities", str(tmp_path / "identities.json"), token=TOKEN) as running:
        _started(running, seaweed)
        style = S3ClientConfig(force_path_style=True)
        for bucket in BUCKETS:
            where = {"region": "us-east-1", "endpoint": running.endpoint, "s3client_config": style}
            checkpoint = S3Checkpoint(**where)
            state = {"weights": torch.arange(3_000_000, dtype=torch.float32), "step": 7}
            with checkpoint.writer(f"s3://{bucket}/torch/step-7") as writer:
                torch.save(state, writer)
            with checkpoint.reader(f"s3://{bucket}/torch/step-7") as reader:
                loaded = torch.load(reader)
            assert loaded["step"] == 7
            assert torch.equal(loaded["weights"], state["weights"])
            dataset = S3MapDataset.from_prefix(f"s3://{bucket}/torch/", **where)
            assert [item.key for item in dataset] == ["torch/step-7"]
