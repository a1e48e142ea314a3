"""Three nodes, one truth: what one acknowledged, every other serves at once, before any backend has it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import msgspec
import pytest
import torch
from botocore import UNSIGNED
from botocore.config import Config

from bench import servers
from forebay.core.cluster.records import MAP, Map
from forebay.core.placement import Members
from forebay.meta.etcd import Address, EtcdMeta
from forebay.torch import Checkpointer
from forebay.torch.checkpoint import checkpointer
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import cluster_of, flags, meta, until_all_are, url
from tests.patience import until

Make = Callable[..., NodeProcess]
MIB = 1 << 20
ASKED: list[tuple[str, bytes | None]] = [("GET", None), ("PUT", b"new")]
PATIENT = Config(signature_version=UNSIGNED, retries={"max_attempts": 8, "mode": "standard"}, read_timeout=30)


def client(node: NodeProcess, config: Config = PATIENT) -> Any:
    return boto3.client("s3", endpoint_url=node.endpoint, region_name="us-east-1", config=config)


class Cluster:
    """Three nodes and their clients, with one local bucket and one that is written back to a directory."""

    def __init__(self, make: Make, etcd: servers.EtcdCluster, root: Path, count: int = 3, *more: str) -> None:
        self.root, self.make = root, make
        self.addresses, self.name = etcd.addresses, uuid.uuid4().hex
        self.at = url(self.addresses, self.name)
        self.nodes: list[NodeProcess] = []
        self.ids: list[str] = []
        (root / "bucket").mkdir()
        (root / "through").mkdir()
        for _ in range(count):
            self.nodes.append(make(*flags(root, self.at), *more))
        self.settle()

    def settle(self) -> None:
        self.ids = until_all_are("active", *self.nodes)
        until(lambda: hold_keys(self.addresses, self.name, self.ids), "that all hold keys")
        for node in self.nodes:
            self.add_buckets(node)
        for node in self.nodes:
            until(lambda node=node: node.ask("HEAD", "/back/nothing")[0] == 404, "that its buckets are known")
        self.clients = [client(node) for node in self.nodes]

    def add_buckets(self, node: NodeProcess) -> None:
        node.json("PUT", "buckets/local", {"name": "local", "url": "local://", "write": "local", "copies": 1})
        back = {"name": "back", "url": f"file://{self.root / 'bucket'}", "write": "back", "copies": 1}
        node.json("PUT", "buckets/back", back)
        through = {"name": "through", "url": f"file://{self.root / 'through'}"}
        node.json("PUT", "buckets/through", through)

    def key(self, home: int, bucket: str = "local", start: int = 0) -> str:
        """A key whose home is that node."""
        return next(keys_at(self.nodes[0], self.ids[home], bucket, start))


def hold_keys(addresses: list[Address], name: str, ids: list[str]) -> bool:
    """Whether these nodes of the cluster, and no others, hold what only nodes have."""
    seen: list[Map] = []

    async def look(store: EtcdMeta) -> None:
        entry = await store.get(MAP)
        if entry is not None:
            seen.append(msgspec.json.decode(entry.value, type=Map))

    meta(addresses, name, look)
    return bool(seen) and sorted(seen[0].holders) == sorted(ids) and seen[0].active


def keys_at(asked: NodeProcess, home: str, bucket: str = "local", start: int = 0) -> Iterator[str]:
    """Keys whose home is that node."""
    members = Members({each["node_id"]: each["weight"] for each in asked.json("GET", "map")["nodes"]})
    names = (f"key-{number}" for number in range(start, start + 1000))
    return (name for name in names if members.first(bucket, name) == home)


def test_what_one_node_acknowledged_every_node_serves(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(node, etcd, tmp_path)
    objects(cluster)
    listings(cluster, tmp_path)
    uploads(cluster)


def objects(cluster: Cluster) -> None:
    a, b, c = cluster.clients
    bodies = {"small": b"small bytes", "large": pattern(9 * MIB + 5), "empty": b""}
    for home in range(3):
        for name, body in bodies.items():
            key = f"{cluster.key(home)}"
            said = a.put_object(Bucket="local", Key=key, Body=body, ContentType="text/x", Metadata={"who": name})
            for asked in (b, c, a, b):
                found = asked.get_object(Bucket="local", Key=key)
                assert found["Body"].read() == body
                assert (found["ETag"], found["ContentType"], found["Metadata"]) == (
                    said["ETag"], "text/x", {"who": name},
                )  # fmt: skip
            c.delete_object(Bucket="local", Key=key)
            for asked in (a, b, c):
                with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
                    asked.get_object(Bucket="local", Key=key)

    # of many who create an object at all nodes at once one succeeds; and of those who replace it
    for home in range(3):
        key = cluster.key(home, start=1000)

        def create(number: int, key: str = key, **condition: str) -> str:
            try:
                condition = condition or {"IfNoneMatch": "*"}
                body = str(number).encode()
                cluster.clients[number % 3].put_object(Bucket="local", Key=key, Body=body, **condition)
            except botocore.exceptions.ClientError as error:
                if error.response["Error"]["Code"] != "PreconditionFailed":
                    raise
                return ""
            return str(number)

        with ThreadPoolExecutor(9) as pool:
            (won,) = filter(None, pool.map(create, range(9)))
            seen = [asked.get_object(Bucket="local", Key=key) for asked in cluster.clients]
            assert {each["Body"].read() for each in seen} == {won.encode()}
            (won,) = filter(None, pool.map(lambda n: create(n, IfMatch=seen[0]["ETag"]), range(10, 19)))  # noqa: B023
        assert {each.get_object(Bucket="local", Key=key)["Body"].read() for each in cluster.clients} == {won.encode()}

    # copies and tags
    key = cluster.key(1, start=2000)
    a.put_object(Bucket="local", Key=key, Body=bodies["small"], Tagging="a=b")
    for home in range(3):
        to = cluster.key(home, start=3000)
        c.copy_object(Bucket="local", Key=to, CopySource={"Bucket": "local", "Key": key})
        assert b.get_object(Bucket="local", Key=to)["Body"].read() == bodies["small"]
        assert b.get_object_tagging(Bucket="local", Key=to)["TagSet"] == [{"Key": "a", "Value": "b"}]
        b.put_object_tagging(Bucket="local", Key=to, Tagging={"TagSet": [{"Key": "c", "Value": "d"}]})
        assert a.get_object_tagging(Bucket="local", Key=to)["TagSet"] == [{"Key": "c", "Value": "d"}]


def listed(asked: Any, bucket: str, **options: Any) -> list[str]:
    found = asked.list_objects_v2(Bucket=bucket, **options)
    return [each["Key"] for each in found.get("Contents", [])] + [
        each["Prefix"] for each in found.get("CommonPrefixes", [])
    ]


def listings(cluster: Cluster, tmp_path: Path) -> None:
    a, b, _ = cluster.clients
    for key in listed(a, "local"):
        a.delete_object(Bucket="local", Key=key)
    keys = [f"{folder}/{number}" for folder in "xyz" for number in range(4)] + ["top"]
    for number, key in enumerate(keys):
        cluster.clients[number % 3].put_object(Bucket="local", Key=key, Body=b"1")
    b.get_object(Bucket="local", Key="top")
    for number in range(4):
        cluster.clients[number % 3].delete_object(Bucket="local", Key=f"y/{number}")
    for asked in cluster.clients:
        assert listed(asked, "local") == sorted(key for key in keys if not key.startswith("y"))
        assert listed(asked, "local", Delimiter="/") == ["top", "x/", "z/"]
        assert listed(asked, "local", Prefix="z/", StartAfter="z/1") == ["z/2", "z/3"]

    # what is in the backend, less what was deleted here and is not flushed, plus what is not flushed
    (tmp_path / "bucket" / "theirs").mkdir()
    for name in ("one", "two"):
        (tmp_path / "bucket" / "theirs" / name).write_bytes(b"theirs")
    a.delete_object(Bucket="back", Key="theirs/one")
    b.put_object(Bucket="back", Key="theirs/three", Body=b"ours")
    for asked in cluster.clients:
        assert listed(asked, "back") == ["theirs/three", "theirs/two"]


def uploads(cluster: Cluster) -> None:
    """Begun at one node, filled at the others, completed at each."""
    a, b, c = cluster.clients
    parts = [pattern(5 * MIB, 1), pattern(5 * MIB, 2), b"the rest"]
    for bucket, home in [(bucket, home) for bucket in ("local", "through") for home in range(3)]:
        key = cluster.key(home, start=4000)
        made = cluster.clients[home - 1].create_multipart_upload(Bucket=bucket, Key=key, ContentType="text/y")
        named = {"Bucket": bucket, "Key": key, "UploadId": made["UploadId"]}
        sent = [
            {"PartNumber": n, "ETag": cluster.clients[n - 1].upload_part(**named, PartNumber=n, Body=body)["ETag"]}
            for n, body in enumerate(parts, 1)
        ]
        assert [each["PartNumber"] for each in b.list_parts(**named)["Parts"]] == [1, 2, 3]
        done = cluster.clients[(home + 1) % 3].complete_multipart_upload(**named, MultipartUpload={"Parts": sent})
        for asked in cluster.clients:
            found = asked.get_object(Bucket=bucket, Key=key)
            assert found["Body"].read() == b"".join(parts)
            if bucket == "local":  # a directory keeps no headers, and has ETags of its own
                assert (found["ETag"], found["ContentType"]) == (done["ETag"], "text/y")
        given_up = a.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        c.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=given_up)
        with pytest.raises(botocore.exceptions.ClientError, match="NoSuchUpload"):
            b.list_parts(Bucket=bucket, Key=key, UploadId=given_up)
    listed_uploads(cluster)


def listed_uploads(cluster: Cluster) -> None:
    """Each node lists what all have, page by page in one order."""
    for bucket in ("local", "back", "through"):
        made = []
        for number in range(9):
            asked = cluster.clients[number % 3]
            key = f"open/{number % 5}"
            made.append((key, asked.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]))
        for asked in cluster.clients:
            pages = asked.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix="open/", PaginationConfig={"PageSize": 2}
            )
            found = [(each["Key"], each["UploadId"]) for page in pages for each in page.get("Uploads", [])]
            assert found == sorted(made), bucket
        for number, (key, upload_id) in enumerate(made):
            cluster.clients[(number + 1) % 3].abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
        assert "Uploads" not in cluster.clients[0].list_multipart_uploads(Bucket=bucket)


SOON = ("--flush-timeout", "1")  # with a backend that is away for good: nobody waits a minute for it at the end
AWAY = {"endpoint": "http://127.0.0.1:9", "skip_signature": "true"}
ONCE = Config(signature_version=UNSIGNED, retries={"max_attempts": 0}, read_timeout=30)


def test_what_a_killed_home_acknowledged_is_refused_and_then_there(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """The backend is away throughout, so nothing is anywhere but on the nodes."""
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
    away = {"name": "away", "url": "s3://nowhere", "write": "back", "options": AWAY, "copies": 1}
    for one in cluster.nodes:
        one.json("PUT", "buckets/away", away)
    a, _, c = cluster.clients
    until(lambda: a.put_object(Bucket="away", Key="warm", Body=b"up"))
    first, other = cluster.key(1, "away"), cluster.key(0, "away")
    home = cluster.nodes[1]
    for key in (first, other):
        a.put_object(Bucket="away", Key=key, Body=key.encode())
        assert c.get_object(Bucket="away", Key=key)["Body"].read() == key.encode()
    assert home.process is not None
    for pid in (home.process.pid, *home.children().values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    home.process.wait()
    once = client(cluster.nodes[2], ONCE)
    for act in (
        lambda: once.get_object(Bucket="away", Key=first),
        lambda: once.put_object(Bucket="away", Key=first, Body=b"another history"),
        lambda: once.delete_object(Bucket="away", Key=first),
        lambda: once.list_objects_v2(Bucket="away"),
    ):
        with pytest.raises(botocore.exceptions.ClientError) as refused:
            act()
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503, refused.value
    assert c.get_object(Bucket="away", Key=other)["Body"].read() == other.encode(), "of those whose home lives"
    home.start()
    cluster.clients[1] = client(home)
    until_all_are("active", *cluster.nodes)
    for asked in cluster.clients:
        for key in (first, other):
            until(lambda asked=asked, key=key: asked.get_object(Bucket="away", Key=key)["Body"].read() == key.encode())
    c.put_object(Bucket="away", Key=first, Body=b"newer")
    assert a.get_object(Bucket="away", Key=first)["Body"].read() == b"newer"


def test_a_join_and_a_drain_while_data_is_dirty(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(node, etcd, tmp_path, 2, *SOON)
    kept_differently(cluster, tmp_path)
    away = {"name": "away", "url": "s3://nowhere", "write": "back", "options": AWAY}
    for one in cluster.nodes:
        one.json("PUT", "buckets/away", away)
    a, b = cluster.clients
    until(lambda: a.put_object(Bucket="away", Key="warm", Body=b"up"))
    until(lambda: b.put_object(Bucket="away", Key="warm", Body=b"up"))
    keys = [f"key-{number}" for number in range(6)]
    for bucket in ("away", "local", "back"):
        for number, key in enumerate(keys):
            cluster.clients[number % 2].put_object(Bucket=bucket, Key=key, Body=key.encode())
            b.get_object(Bucket=bucket, Key=key)

    kept = cluster.key(1, start=5000)
    a.put_object(Bucket="local", Key=kept, Body=b"kept")

    third = node(*flags(tmp_path, cluster.at), *SOON)
    cluster.nodes.append(third)
    cluster.settle()
    third.json("PUT", "buckets/away", away)
    c = cluster.clients[2]
    until(lambda: c.head_object(Bucket="away", Key="warm"))
    for bucket in ("away", "local", "back"):
        if bucket != "away":
            assert [each for each in listed(c, bucket) if each in keys] == sorted(keys), bucket
        for number, key in enumerate(keys):
            assert c.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode(), (bucket, key)
            cluster.clients[number % 3].put_object(Bucket=bucket, Key=key, Body=b"2" + key.encode())
            for asked in cluster.clients:
                assert asked.get_object(Bucket=bucket, Key=key)["Body"].read() == b"2" + key.encode(), (bucket, key)
            if number % 3 == 0:
                cluster.clients[(number + 1) % 3].delete_object(Bucket=bucket, Key=key)
    left = {key: b"2" + key.encode() for number, key in enumerate(keys) if number % 3}
    for asked in cluster.clients:
        for bucket in ("local", "back"):
            assert [each for each in listed(asked, bucket) if each in keys] == sorted(left), bucket

    # the second is drained; what it cannot bring to a backend stays there, and every node says so by serving it
    third.json("POST", "cluster/wish", {"node": cluster.ids[1], "wish": "draining"})
    until(lambda: [each["state"] for each in cluster_of(cluster.nodes[0])["nodes"]].count("leaving") == 1)
    for bucket in ("away", "local", "back"):
        for key, body in left.items():
            for asked in cluster.clients:
                assert asked.get_object(Bucket=bucket, Key=key)["Body"].read() == body, (bucket, key)
    assert c.get_object(Bucket="local", Key=kept)["Body"].read() == b"kept"
    for key in left:
        until(lambda key=key: a.put_object(Bucket="back", Key=key, Body=b"3"), "that a home writes again")
        assert b.get_object(Bucket="back", Key=key)["Body"].read() == b"3"
    until(lambda: all((tmp_path / "bucket" / key).read_bytes() == b"3" for key in left), "that it is flushed")


def kept_differently(cluster: Cluster, tmp_path: Path) -> None:
    """Nodes that keep a bucket differently refuse it: each was told alone."""
    one, two = cluster.nodes
    (tmp_path / "other").mkdir()
    other = {"name": "mixed", "url": f"file://{tmp_path / 'other'}", "write": "back"}
    one.json("PUT", "buckets/mixed?here=1", other)
    two.json("PUT", "buckets/mixed?here=1", {**other, "write": "through"})

    def words(asked: NodeProcess) -> bytes:
        status, said = asked.ask("GET", "/mixed/key")
        return said if status == 503 else b""

    assert b"written back to" in until(lambda: words(two), "that it knows how the other keeps it")
    assert two.ask("PUT", "/mixed/key", body=b"bytes")[0] == 503
    assert not list((tmp_path / "other").iterdir())
    two.json("PUT", "buckets/mixed?here=1", other)
    until(lambda: two.ask("PUT", "/mixed/key", body=b"bytes")[0] == 200)
    assert one.get("mixed", "key") == b"bytes"


def test_a_job_that_moves_to_another_node_finds_its_newest_checkpoint_while_the_bucket_is_away(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "OUTAGE_S", 0.2)
    cluster = Cluster(node, etcd, tmp_path, 2)
    (tmp_path / "bucket").rename(tmp_path / "away")
    for step, (one, other) in enumerate(zip(cluster.nodes, reversed(cluster.nodes), strict=True), 1):
        weights = torch.full((300_000,), float(step))
        with Checkpointer("back/run", url=one.endpoint) as checkpoints:
            checkpoints.save(step, {"w": weights}, wait=True).durable("tier")
        with Checkpointer("back/run", url=other.endpoint) as checkpoints:
            found = {"w": torch.zeros(300_000)}
            restored = checkpoints.restore(found)
            assert restored is not None
            assert restored.step == step
            assert torch.equal(found["w"], weights)
    (tmp_path / "away").rename(tmp_path / "bucket")


def test_what_a_home_cannot_answer_is_said_of_the_home_and_not_of_a_backend(node: Make, tmp_path: Path) -> None:
    with servers.EtcdCluster(1) as single:
        at = url(single.addresses, "words")
        asked = node(*flags(tmp_path, at, 300.0))
        other = node(*flags(tmp_path, at, 300.0))
        ids = until_all_are("active", asked, other)
        id_of_other = ids[1]
        until(lambda: hold_keys(single.addresses, "words", ids), "that both hold keys")
        for each in (asked, other):
            each.json("PUT", "buckets/local", {"name": "local", "url": "local://", "write": "local", "copies": 1})
        keys = [key for home in ids for key in islice(keys_at(asked, home), 3)]
        for key in keys:
            until(lambda key=key: asked.ask("PUT", f"/local/{key}", body=b"bytes")[0] == 200)
        single.members[0].kill()
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait()

        def refused() -> list[str]:
            answers = [asked.ask(verb, f"/local/{key}", body=body) for key in keys for verb, body in ASKED]
            assert {status for status, _ in answers} == {200, 503}, answers
            return [body.decode() for status, body in answers if status == 503]

        for text in refused():
            assert f"node {id_of_other} cannot be asked" in text, text
        again = node("--listen", other.endpoint.removeprefix("http://"), *flags(tmp_path, at, 300.0), dir=other.dir)
        assert again.endpoint == other.endpoint
        texts = refused()
        said = (f"node {id_of_other} does not act on it now", f"node {id_of_other} cannot answer now", "could not")
        assert all(any(each in text for each in said) for text in texts), texts
        assert any("does not know the cluster" in text for text in texts), "\n".join(texts)
        assert not any("backend" in text for text in texts), texts
