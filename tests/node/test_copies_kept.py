"""What no backend has lies on two nodes: kept before the answer, cleared after the flush, made good after a change."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import servers
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags
from tests.node.test_homes import AWAY, MIB, Cluster, client
from tests.patience import until

Make = Callable[..., NodeProcess]


def twice(cluster: Cluster) -> None:
    """Two buckets that are kept on two nodes: one whose backend is away, and one without a backend."""
    for one in cluster.nodes:
        away = {"name": "away", "url": "s3://nowhere", "write": "back", "options": AWAY, "copies": 2}
        one.json("PUT", "buckets/away", away)
        one.json("PUT", "buckets/own", {"name": "own", "url": "local://", "write": "local", "copies": 2})
    for asked in cluster.clients:
        until(
            lambda asked=asked: written(asked, "away", "warm") and written(asked, "own", "warm"), "that it takes writes"
        )


def written(asked: Any, bucket: str, key: str, body: bytes = b"warm") -> bool:
    with suppress(Exception):
        asked.put_object(Bucket=bucket, Key=key, Body=body)
        return True
    return False


def kept(cluster: Cluster) -> int:
    """How many copies all nodes keep for each other."""
    return sum(int(node.metric("forebay_kept_copies")) for node in cluster.nodes if node.process is not None)


def kill(node: NodeProcess) -> None:
    assert node.process is not None
    for pid in (node.process.pid, *node.children().values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.process.wait()


def test_copies_come_and_go(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(node, etcd, tmp_path)
    twice(cluster)
    a, b, c = cluster.clients
    assert kept(cluster) == 2, "the two objects that were written"

    bodies = {"small": b"small bytes", "large": pattern(9 * MIB + 5), "empty": b""}
    for number, (key, body) in enumerate(bodies.items()):
        for bucket in ("away", "own"):
            cluster.clients[number].put_object(Bucket=bucket, Key=key, Body=body, Metadata={"who": key})
    assert kept(cluster) == 8
    for asked in cluster.clients:  # nobody sees them as objects
        assert {each["Key"] for each in asked.list_objects_v2(Bucket="own")["Contents"]} == {"warm", *bodies}
        assert asked.get_object(Bucket="own", Key="large")["Body"].read() == bodies["large"]

    # each way to write
    a.copy_object(Bucket="own", Key="copy", CopySource={"Bucket": "own", "Key": "large"})
    b.put_object_tagging(Bucket="own", Key="copy", Tagging={"TagSet": [{"Key": "c", "Value": "d"}]})
    upload = c.create_multipart_upload(Bucket="own", Key="parts")["UploadId"]
    named = {"Bucket": "own", "Key": "parts", "UploadId": upload}
    etag = c.upload_part(**named, PartNumber=1, Body=bodies["large"])["ETag"]
    c.complete_multipart_upload(**named, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    assert kept(cluster) == 10

    # a deletion has a copy while the backend does not know of it, and none where there is no backend
    a.delete_objects(Bucket="own", Delete={"Objects": [{"Key": "copy"}, {"Key": "parts"}]})
    a.delete_object(Bucket="away", Key="small")
    assert kept(cluster) == 8

    # a node that was killed has what it kept, and all of it is there when it is back
    killed = cluster.nodes[1]
    kill(killed)
    killed.start()
    cluster.clients[1] = client(killed)
    until(lambda: kept(cluster) == 8, "that the copies are found again")
    for asked in cluster.clients:
        until(lambda asked=asked: written(asked, "own", "warm", b"again"), "that writes go on")
        assert asked.get_object(Bucket="own", Key="large")["Body"].read() == bodies["large"]

    # a fourth node changes who is second: copies move with it, and none is left over
    cluster.nodes.append(node(*flags(tmp_path, cluster.at)))
    cluster.settle()
    twice(cluster)
    until(lambda: kept(cluster) == 8, "that each copy is where it should be")


def test_copies_are_cleared_when_the_backend_has_them(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(node, etcd, tmp_path, 2)
    (tmp_path / "double").mkdir()
    for one in cluster.nodes:
        double = {"name": "double", "url": f"file://{tmp_path / 'double'}", "write": "back", "copies": 2}
        one.json("PUT", "buckets/double", double)
    a, b = cluster.clients
    until(lambda: written(a, "double", "key") and written(b, "double", "other"))
    for number in range(20):
        cluster.clients[number % 2].put_object(Bucket="double", Key=f"key-{number}", Body=str(number).encode())
    until(lambda: len(list((tmp_path / "double").glob("key-*"))) == 20, "that all is flushed")
    until(lambda: kept(cluster) == 0, "that no copy is left")
    a.delete_object(Bucket="double", Key="key-1")
    until(lambda: not (tmp_path / "double" / "key-1").exists(), "that the deletion is flushed")
    until(lambda: kept(cluster) == 0, "that none of it is left")

    # alone, a node goes on only when the other is no holder any more: until then it refuses
    kill(cluster.nodes[1])
    assert not written(a, "double", "lonely")
    for _ in range(2):
        status, body = cluster.nodes[0].ask("PUT", "/double/lonely", body=b"bytes")
        assert status == 503, body
    assert b"other history" not in body
