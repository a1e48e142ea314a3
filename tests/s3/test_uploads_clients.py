"""Multipart uploads by boto3 through a real node, in every write mode; and a node that is killed in the middle."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError

from bench import servers
from forebay.core.machines import uploads
from forebay.core.s3rules.checksums import Checksum
from tests.node.conftest import until
from tests.s3.conftest import client
from tests.s3.real_node import RealNode

pytestmark = pytest.mark.real

MIB = 1 << 20
PARTS = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
DATA = random.Random(3).randbytes(12 * MIB + 17)
MODES = ("through", "back", "local")


class Place:
    """A node, its buckets `up-MODE`, and the bucket service behind."""

    def __init__(self, node: RealNode, server: servers.SeaweedFS) -> None:
        self.node, self.server = node, server
        self.s3 = client(node.endpoint)
        self.behind = client(server.endpoint)

    def parts_on_disk(self) -> list[Path]:
        return [path for path in self.node.dir.rglob("parts/*/*") if path.is_file()]

    def temps(self) -> list[Path]:
        return [path for path in self.node.dir.rglob("tmp/*") if path.is_file()]


def add_buckets(node: RealNode, server: servers.SeaweedFS) -> None:
    for mode in MODES:
        url = "local://" if mode == "local" else f"s3://up-{mode}"
        node.add_bucket(f"up-{mode}", url, write=mode, options={} if mode == "local" else server.options())


@pytest.fixture(scope="module")
def place(seaweed: servers.SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    for mode in ("through", "back"):
        seaweed.create_bucket(f"up-{mode}")
    with RealNode(tmp_path_factory.mktemp("uploads"), "--fronts", "1") as node:
        add_buckets(node, seaweed)
        yield Place(node, seaweed)


@pytest.mark.parametrize("mode", MODES)
def test_a_large_file_goes_up_in_parts(place: Place, mode: str) -> None:
    extra = {"ContentType": "text/x", "Metadata": {"colour": "blue"}}
    place.s3.upload_fileobj(io.BytesIO(DATA), f"up-{mode}", "large", ExtraArgs=extra, Config=PARTS)
    got = place.s3.get_object(Bucket=f"up-{mode}", Key="large")
    assert got["Body"].read() == DATA
    assert (got["ContentType"], got["Metadata"]) == ("text/x", {"colour": "blue"})
    pieces = [DATA[at : at + 5 * MIB] for at in range(0, len(DATA), 5 * MIB)]
    assert got["ETag"].strip('"') == uploads.etag_of([hashlib.md5(piece).hexdigest() for piece in pieces])
    until(lambda: not place.parts_on_disk(), "parts are removed")
    for number, piece in enumerate(pieces, 1):
        part = place.s3.get_object(Bucket=f"up-{mode}", Key="large", PartNumber=number)
        assert part["Body"].read() == piece
        assert (part["PartsCount"], part["ETag"]) == (len(pieces), got["ETag"])
    with pytest.raises(ClientError, match="InvalidPartNumber"):
        place.s3.get_object(Bucket=f"up-{mode}", Key="large", PartNumber=len(pieces) + 1)
    if mode == "through":
        there = place.behind.get_object(Bucket="up-through", Key="large")
        assert there["Body"].read() == DATA
        assert (there["ETag"], there["ContentType"], there["Metadata"]) == (got["ETag"], "text/x", {"colour": "blue"})
    assert "Uploads" not in place.behind.list_multipart_uploads(Bucket="up-through")


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_every_checksum_of_the_sdk(place: Place, algorithm: str) -> None:
    extra = {"ChecksumAlgorithm": algorithm}
    place.s3.upload_fileobj(io.BytesIO(DATA), "up-local", algorithm, ExtraArgs=extra, Config=PARTS)
    got = place.s3.get_object(Bucket="up-local", Key=algorithm, ChecksumMode="ENABLED")
    assert got["Body"].read() == DATA
    said = got[f"Checksum{algorithm}"]
    if algorithm == "CRC64NVME":
        whole = Checksum(algorithm)
        whole.update(DATA)
        assert said == whole.base64()
    else:
        assert said.endswith("-3")
    for ask in (place.s3.get_object, place.s3.head_object):
        part = ask(Bucket="up-local", Key=algorithm, ChecksumMode="ENABLED", PartNumber=3)
        own = Checksum(algorithm)
        own.update(DATA[10 * MIB :])
        assert (part[f"Checksum{algorithm}"], part["ChecksumType"]) == (own.base64(), got["ChecksumType"])


@pytest.mark.parametrize("mode", MODES)
def test_an_object_is_copied_in_parts(place: Place, mode: str) -> None:
    place.s3.put_object(Bucket="up-back", Key="source", Body=DATA)  # not flushed yet, perhaps: that must not matter
    source = {"Bucket": "up-back", "Key": "source"}
    place.s3.copy(source, f"up-{mode}", "copied", Config=PARTS)
    assert place.s3.get_object(Bucket=f"up-{mode}", Key="copied")["Body"].read() == DATA
    upload = place.s3.create_multipart_upload(Bucket=f"up-{mode}", Key="part")
    which = {"Bucket": f"up-{mode}", "Key": "part", "UploadId": upload["UploadId"]}
    with pytest.raises(ClientError, match="InvalidRange"):
        place.s3.upload_part_copy(**which, PartNumber=1, CopySource=source, CopySourceRange=f"bytes=0-{len(DATA)}")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        place.s3.upload_part_copy(**which, PartNumber=1, CopySource=source, CopySourceIfMatch='"other"')
    part = place.s3.upload_part_copy(**which, PartNumber=1, CopySource=source, CopySourceRange="bytes=7-6000006")
    chosen = [{"PartNumber": 1, "ETag": part["CopyPartResult"]["ETag"]}]
    place.s3.complete_multipart_upload(**which, MultipartUpload={"Parts": chosen})
    assert place.s3.get_object(Bucket=f"up-{mode}", Key="part")["Body"].read() == DATA[7:6_000_007]


@pytest.mark.parametrize("mode", MODES)
def test_conditions_of_complete_are_judged(place: Place, mode: str) -> None:
    place.s3.put_object(Bucket=f"up-{mode}", Key="there", Body=b"old")
    upload = place.s3.create_multipart_upload(Bucket=f"up-{mode}", Key="there")
    which = {"Bucket": f"up-{mode}", "Key": "there", "UploadId": upload["UploadId"]}
    etag = place.s3.upload_part(**which, PartNumber=1, Body=b"new")["ETag"]
    done = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": etag}]}}
    with pytest.raises(ClientError, match="PreconditionFailed"):
        place.s3.complete_multipart_upload(**which, **done, IfNoneMatch="*")
    assert place.s3.get_object(Bucket=f"up-{mode}", Key="there")["Body"].read() == b"old"
    now = place.s3.head_object(Bucket=f"up-{mode}", Key="there")["ETag"]
    place.s3.complete_multipart_upload(**which, **done, IfMatch=now)
    assert place.s3.get_object(Bucket=f"up-{mode}", Key="there")["Body"].read() == b"new"
    until(lambda: not place.parts_on_disk(), "parts are removed")


def test_of_two_uploads_of_one_part_the_one_that_ended_last_counts(place: Place) -> None:
    """As ceph's suite asks: the first begins, the second begins and ends, the first ends."""
    for mode in MODES:
        which: dict[str, Any] = {"Bucket": f"up-{mode}", "Key": "resent"}
        which["UploadId"] = place.s3.create_multipart_upload(**which)["UploadId"]
        first = http.client.HTTPConnection(urlsplit(place.node.endpoint).netloc, timeout=60)
        first.putrequest("PUT", f"/up-{mode}/resent?partNumber=1&uploadId={which['UploadId']}")
        first.putheader("content-length", "6")
        first.endheaders(b"fir")
        second = place.s3.upload_part(**which, PartNumber=1, Body=b"second!")["ETag"]
        first.send(b"st!")
        ended = first.getresponse()
        assert (ended.status, ended.read()) == (200, b"")
        first.close()
        (listed,) = place.s3.list_parts(**which)["Parts"]
        assert (listed["ETag"], listed["Size"]) == (ended.headers["etag"], 6)
        with pytest.raises(ClientError, match="InvalidPart"):
            complete(place, which, second)
        complete(place, which, listed["ETag"])
        assert place.s3.get_object(Bucket=f"up-{mode}", Key="resent")["Body"].read() == b"first!"


def complete(place: Place, which: dict[str, Any], etag: str) -> None:
    place.s3.complete_multipart_upload(**which, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})


@pytest.mark.parametrize("mode", MODES)
def test_metadata_comes_back_as_the_bytes_that_were_sent(place: Place, mode: str) -> None:
    """http.client sends and reads headers as Latin-1. What is evicted comes back from SeaweedFS."""
    for raw in ("Hello World\xe9", "\xe4\xf6\xfc", "ü".encode().decode("latin-1"), "=?ISO-8859-1?B?6Q==?="):
        put, copy = f"/up-{mode}/latin", f"/up-{mode}/copy-of-latin"
        assert place.node.ask("PUT", put, {"x-amz-meta-name": raw}, b"x")[0] == 200
        assert place.node.ask("PUT", copy, {"x-amz-copy-source": put})[0] == 200
        for evicted in (False, True)[: 1 if mode == "local" else 2]:
            if evicted:
                place.node.flush(f"up-{mode}")
                assert place.node._native("POST", "evict", {"bucket": f"up-{mode}", "prefix": ""})[0] < 300
            for method, path in (("GET", put), ("HEAD", put), ("GET", copy)):
                assert place.node.ask(method, path)[1]["x-amz-meta-name"] == raw, (method, path, evicted)


# --- killed in the middle --------------------------------------------------------------------------------------------
ROUNDS = 2


def test_nothing_acknowledged_is_lost_when_the_node_is_killed(seaweed: servers.SeaweedFS, tmp_path: Path) -> None:
    """Writers upload in parts while every process of the node is killed; they go on afterwards as clients do: parts
    that were acknowledged are not sent again, a Complete without an answer is asked again."""
    for mode in ("through", "back"):
        if f"up-{mode}" not in [each["Name"] for each in client(seaweed.endpoint).list_buckets()["Buckets"]]:
            seaweed.create_bucket(f"up-{mode}")
    chance = random.Random(11)
    node = RealNode(tmp_path / "node", "--fronts", "1")
    node.start()
    try:
        add_buckets(node, seaweed)
        writers = [_Writer(mode, number, chance.randbytes(5 * MIB + 3)) for number, mode in enumerate(MODES)]
        with ThreadPoolExecutor(len(writers)) as pool:
            for _ in range(ROUNDS):
                work = [pool.submit(writer.go_on, node.endpoint) for writer in writers]
                while sum(writer.parts_sent for writer in writers) < chance.randrange(1, 9) and not all(
                    each.done() for each in work
                ):
                    os.sched_yield()
                kill(node)
                for each in work:
                    each.result()
                for writer in writers:
                    writer.parts_sent = 0
                node.start()
        for writer in writers:
            writer.finish(node.endpoint)
            writer.check(node.endpoint)
        behind = client(seaweed.endpoint)
        assert "Uploads" not in behind.list_multipart_uploads(Bucket="up-through"), "an upload was left at the backend"
        place = Place(node, seaweed)
        for mode in MODES:
            assert "Uploads" not in place.s3.list_multipart_uploads(Bucket=f"up-{mode}")
        until(lambda: not place.parts_on_disk(), "parts are removed")
        until(lambda: not place.temps(), 60)  # what a dying front was receiving goes when the node next keeps house
    finally:
        node.stop()


def kill(node: RealNode) -> None:
    """SIGKILL for every process of the node."""
    process = node._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()
    node._process = None
    while any(Path(f"/proc/{pid}/fd").is_dir() and _has_files(pid) for pid in children):
        os.sched_yield()


def _has_files(pid: str) -> bool:
    """Whether the process still has something open: one that only waits for its parent has not."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


class _Writer:
    """Uploads objects of three parts one after the other, and remembers what was acknowledged."""

    def __init__(self, mode: str, number: int, data: bytes) -> None:
        self.bucket, self.number, self.data = f"up-{mode}", number, data
        self.objects = 0
        self.parts_sent = 0
        self.upload_id = ""
        self.etags: dict[int, str] = {}
        self.completed: list[str] = []

    @property
    def key(self) -> str:
        return f"storm/{self.number}/{self.objects}"

    def content(self, key: str, number: int) -> bytes:
        return f"{key} part {number} ".encode() + self.data

    def go_on(self, endpoint: str) -> None:
        """Until the node is gone."""
        s3 = client(endpoint)
        try:
            while True:
                self._step(s3)
        except BotoCoreError:
            pass  # the connection broke
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise
        finally:
            s3.close()

    def _step(self, s3: Any) -> None:
        which = {"Bucket": self.bucket, "Key": self.key}
        if not self.upload_id:
            self.upload_id = s3.create_multipart_upload(**which)["UploadId"]
        for number in (1, 2, 3):
            if number not in self.etags:
                body = self.content(self.key, number)
                answer = s3.upload_part(**which, UploadId=self.upload_id, PartNumber=number, Body=body)
                self.etags[number] = answer["ETag"]
                self.parts_sent += 1
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self.etags.items())]
        s3.complete_multipart_upload(**which, UploadId=self.upload_id, MultipartUpload={"Parts": parts})
        self.completed.append(self.key)
        self.objects, self.upload_id, self.etags = self.objects + 1, "", {}

    def finish(self, endpoint: str) -> None:
        """End what is open: complete it where something was acknowledged; abort uploads nobody heard of."""
        s3 = client(endpoint)
        if self.upload_id:
            self._step(s3)
        for left in s3.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []):
            if left["Key"].startswith(f"storm/{self.number}/"):
                s3.abort_multipart_upload(Bucket=self.bucket, Key=left["Key"], UploadId=left["UploadId"])
        s3.close()

    def check(self, endpoint: str) -> None:
        s3 = client(endpoint)
        assert self.completed
        for key in self.completed:
            got = s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            assert got == b"".join(self.content(key, number) for number in (1, 2, 3)), key
        s3.close()
