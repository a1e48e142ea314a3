"""A bucket that is erasure-coded over the nodes: nothing is lost with a node, and what it had is there again."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import botocore.exceptions
import pytest

from bench import servers
from forebay.core.cluster.coding import CELL_BYTES, ENTRY_BYTES_MAX
from forebay.core.types import PEER_HEADER
from tests.cli.conftest import Program
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags, url
from tests.node.test_copies_kept import keep_nothing_once, read, until_covered
from tests.node.test_hand_over import doing, wish
from tests.node.test_homes import SOON, Cluster, client
from tests.patience import until

Make = Callable[..., NodeProcess]
MIB = 1 << 20


def coded_cluster(
    node: Make, etcd: servers.EtcdCluster, root: Path, count: int, code: str = "2+1", *, lost_after_s: int = 120
) -> Cluster:
    def make(*given: str) -> NodeProcess:
        config = Path(given[given.index("--config") + 1])
        config.write_text(f"{config.read_text()}\nvolume_lost_after = {lost_after_s}\n")
        return node(*given)

    cluster = Cluster(make, etcd, root, count, *SOON)
    keep_nothing_once(cluster)
    cluster.nodes[0].json("PUT", "buckets/shards", {"name": "shards", "url": f"coded://{code}", "write": "back"})
    for asked in cluster.nodes:
        until(lambda asked=asked: asked.ask("HEAD", "/shards/nothing")[0] == 404, "that its bucket is known")
    until_covered(cluster)
    return cluster


def flushed(cluster: Cluster) -> None:
    def dirty(node: NodeProcess) -> int:
        return sum(int(each["dirty_objects"]) for each in node.json("GET", "status")["buckets"])

    until(lambda: not any(map(dirty, cluster.nodes)), "that all is coded")


def evict(cluster: Cluster) -> None:
    for each in cluster.nodes:
        job = each.json("POST", "evict", {"bucket": "shards"})["job"]
        until(lambda each=each, job=job: each.json("GET", f"jobs/{job}")["state"] == "done", "that it is evicted")


def slices(node: NodeProcess) -> list[str]:
    """The names of slices that a node keeps, as other nodes ask it."""
    names: list[str] = []
    while True:
        after = f"&start-after={quote(names[-1])}" if names else ""
        status, body = node.ask(
            "GET", f"/-slices?list-type=2{after}", {PEER_HEADER: node.json("GET", "status")["node_id"]}
        )
        assert status == 200, body
        page = re.findall(r"<Key>([^<]*)</Key>", body.decode())
        if not page:
            return names
        names += page


def all_slices(cluster: Cluster) -> int:
    return sum(len(slices(each)) for each in cluster.nodes)


def put_all(cluster: Cluster, bodies: dict[str, bytes]) -> dict[str, str]:
    """Write them, each at another node; their ETags."""
    etags = {}
    for number, (key, body) in enumerate(bodies.items()):
        asked = cluster.clients[number % len(cluster.clients)]
        etags[key] = asked.put_object(Bucket="shards", Key=key, Body=body, Metadata={"who": key})["ETag"]
    flushed(cluster)
    return etags


def check_all(cluster: Cluster, bodies: dict[str, bytes]) -> None:
    for asked in cluster.clients:
        for key, body in bodies.items():
            assert read(asked, "shards", key) == (body, {"who": key}), key


def test_objects_are_coded_and_read_from_slices(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    bodies = {f"key-{number}": pattern(number * 3 * MIB + 7 * number, number) for number in range(8)}
    bodies["small"], bodies["empty"] = b"small", b""
    etags = put_all(cluster, bodies)
    large = sum(1 for body in bodies.values() if len(body) > ENTRY_BYTES_MAX)
    groups = sum(-(-len(body) // (2 * CELL_BYTES)) for body in bodies.values() if len(body) > ENTRY_BYTES_MAX)
    assert large == 7
    assert [len(slices(each)) for each in cluster.nodes] == [groups] * 3, "one slice of each group at each node"
    evict(cluster)
    for asked in cluster.clients:
        listed: list[Any] = asked.list_objects_v2(Bucket="shards")["Contents"]
        assert {each["Key"]: (each["Size"], each["ETag"]) for each in listed} == {
            key: (len(body), etags[key]) for key, body in bodies.items()
        }
        middle = asked.get_object(Bucket="shards", Key="key-7", Range=f"bytes={7 * MIB}-{9 * MIB}")["Body"].read()
        assert middle == bodies["key-7"][7 * MIB : 9 * MIB + 1]
    check_all(cluster, bodies)

    before = slices(cluster.nodes[0])
    bodies |= {"key-1": pattern(5 * MIB, 99), "key-2": b"small now"}
    put_all(cluster, {key: bodies[key] for key in ("key-1", "key-2")})
    cluster.clients[1].delete_object(Bucket="shards", Key="key-3")
    del bodies["key-3"]
    flushed(cluster)
    groups = sum(-(-len(body) // (2 * CELL_BYTES)) for body in bodies.values() if len(body) > ENTRY_BYTES_MAX)
    for each in cluster.nodes:
        until(lambda each=each: len(slices(each)) == groups, "that slices of what is gone are deleted")
    assert set(slices(cluster.nodes[0])) < {*before, *slices(cluster.nodes[0])}
    evict(cluster)
    check_all(cluster, bodies)


def test_what_clients_see_does_not_change_when_it_is_coded(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Uploads in parts, conditions, tags, metadata to the limit, long names: as before the flush, also from slices."""
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    one, two, three = cluster.clients
    parts = [pattern(5 * MIB, 1), pattern(6 * MIB, 2), pattern(100, 3)]
    upload = one.create_multipart_upload(Bucket="shards", Key="parts", Metadata={"who": "parts"})["UploadId"]
    tokens = []
    for number, part in enumerate(parts, 1):
        asked = cluster.clients[number % 3]
        said = asked.upload_part(Bucket="shards", Key="parts", UploadId=upload, PartNumber=number, Body=part)
        tokens.append({"PartNumber": number, "ETag": said["ETag"]})
    done = two.complete_multipart_upload(
        Bucket="shards", Key="parts", UploadId=upload, MultipartUpload={"Parts": tokens}
    )
    assert done["ETag"].strip('"').endswith("-3")
    key, metadata = "\u00fc\u4e16" * 200 + "/name", {"m": "x" * 2000}
    named = three.put_object(
        Bucket="shards", Key=key, Body=parts[0], Metadata=metadata, Tagging="a=1&b=2", ContentType="text/x-test"
    )
    for cached in (True, False):
        if not cached:
            flushed(cluster)
            evict(cluster)
        for asked in cluster.clients:
            found = asked.get_object(Bucket="shards", Key="parts")
            assert (found["ETag"], found["Body"].read()) == (done["ETag"], b"".join(parts)), cached
            head = asked.head_object(Bucket="shards", Key=key)
            assert (head["ETag"], head["ContentLength"]) == (named["ETag"], len(parts[0]))
            assert (head["Metadata"], head["ContentType"]) == (metadata, "text/x-test")
            tags = asked.get_object_tagging(Bucket="shards", Key=key)["TagSet"]
            assert {each["Key"]: each["Value"] for each in tags} == {"a": "1", "b": "2"}
    for each in cluster.nodes:  # it would be acknowledged, and never coded
        assert each.ask("PUT", "/shards/a/%2E%2E/b", body=b"body")[0] == 400
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        one.put_object(Bucket="shards", Key=key, Body=b"new", IfNoneMatch="*")
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        one.put_object(Bucket="shards", Key="parts", Body=b"new", IfMatch=named["ETag"])
    one.put_object(Bucket="shards", Key="parts", Body=parts[1], IfMatch=done["ETag"])
    two.copy_object(Bucket="shards", Key="copied", CopySource={"Bucket": "shards", "Key": key})
    three.put_object_tagging(Bucket="shards", Key=key, Tagging={"TagSet": [{"Key": "c", "Value": "3"}]})
    flushed(cluster)
    evict(cluster)
    assert read(three, "shards", "parts") == (parts[1], {})
    assert read(three, "shards", "copied") == (parts[0], metadata)
    assert one.get_object_tagging(Bucket="shards", Key=key)["TagSet"] == [{"Key": "c", "Value": "3"}]
    assert one.get_object_tagging(Bucket="shards", Key="copied")["TagSet"] != []


def test_a_bucket_goes_when_it_is_empty_or_by_force(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    put_all(cluster, {"large": pattern(3 * MIB), "small": b"small"})
    status, said = cluster.nodes[1].ask("DELETE", "/-/v1/buckets/shards")
    assert (status, b"BucketNotEmpty" in said) == (409, True), said
    status, said = cluster.nodes[1].ask("DELETE", "/-/v1/buckets/shards?here=1")
    assert (status, b"leave --here out" in said) == (400, True), said
    wrong = {"name": "shards", "url": "coded://4+2", "write": "back"}
    status, said = cluster.nodes[1].ask("PUT", "/-/v1/buckets/shards", {}, json.dumps(wrong).encode())
    assert (status, b"BucketNotEmpty" in said) == (409, True), said
    for key in ("large", "small"):
        cluster.clients[2].delete_object(Bucket="shards", Key=key)
    flushed(cluster)
    cluster.nodes[0].json("DELETE", "buckets/shards")
    for each in cluster.nodes:
        until(lambda each=each: "shards" not in str(each.json("GET", "buckets")), "that it is gone everywhere")
        assert b"-entries-" not in each.ask("GET", "/")[1], "hidden from clients"
    cluster.nodes[2].json("PUT", "buckets/shards", {"name": "shards", "url": "coded://2+1", "write": "back"})
    for asked in cluster.nodes:
        until(lambda asked=asked: asked.ask("HEAD", "/shards/large")[0] == 404, "that it is there, and empty")
    put_all(cluster, {"again": pattern(3 * MIB)})
    evict(cluster)
    assert read(cluster.clients[0], "shards", "again")[0] == pattern(3 * MIB)
    assert cluster.nodes[0].ask("DELETE", "/-/v1/buckets/-slices")[0] == 404
    for each in cluster.nodes:
        until(lambda each=each: each.ask("DELETE", "/-/v1/buckets/shards?force=1&here=1")[0] in (200, 404), "given up")
    cluster.nodes[0].ask("DELETE", "/-/v1/buckets/shards?force=1")
    for each in cluster.nodes:
        until(lambda each=each: "shards" not in str(each.json("GET", "buckets")), "that it is gone everywhere")


@pytest.mark.parametrize(
    "change", [{"write": "through"}, {"durability": "memory"}, {"copies": 1}, {"url": "coded://1+1"}], ids=str
)
def test_what_does_not_go_with_a_code_is_refused(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, change: dict[str, Any]
) -> None:
    one = node(*flags(tmp_path, url(etcd.addresses, uuid.uuid4().hex)))
    bucket = {"name": "shards", "url": "coded://2+1", "write": "back", **change}
    status, said = one.ask("PUT", "/-/v1/buckets/shards", {}, json.dumps(bucket).encode())
    assert (status, b"coded://" in said) == (400, True), said


def test_a_node_alone_keeps_no_coded_bucket(node: Make) -> None:
    one = node("--fronts", "0", "--capacity", "1GiB")
    bucket = {"name": "shards", "url": "coded://2+1", "write": "back", "copies": 2}
    status, said = one.ask("PUT", "/-/v1/buckets/shards", {}, json.dumps(bucket).encode())
    assert (status, b"start them with --cluster" in said) == (400, True), said


def test_a_node_that_is_silent_is_missed_by_nobody(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Read without it, write without it, and it comes back."""
    cluster = coded_cluster(node, etcd, tmp_path, 4)
    bodies = {f"key-{number}": pattern(3 * MIB + 7 * number, number) for number in range(12)}
    put_all(cluster, bodies)
    evict(cluster)
    left = cluster.nodes.pop(3)
    cluster.clients.pop(3)
    left.kill()
    until_covered(cluster)
    check_all(cluster, bodies)
    more = {f"more-{number}": pattern(4 * MIB + number, number) for number in range(4)}
    put_all(cluster, more)
    evict(cluster)
    check_all(cluster, bodies | more)


def test_what_a_lost_node_had_is_there_again(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Its disks never come back. Nobody does anything. Then another node is lost."""
    cluster = coded_cluster(node, etcd, tmp_path, 5, lost_after_s=1)
    bodies = {f"key-{number}": pattern(5 * MIB + 7 * number, number) for number in range(12)}
    put_all(cluster, bodies)
    evict(cluster)
    for _ in range(2):
        left = cluster.nodes.pop()
        cluster.clients.pop()
        assert all_slices(cluster) < 36, "it had some"
        left.kill()
        shutil.rmtree(left.dir / "node")
        until(lambda: all_slices(cluster) == 36, "that all slices are there again")
        until_covered(cluster)
        check_all(cluster, bodies)
        evict(cluster)


def test_two_nodes_that_are_lost_at_once_take_nothing_along(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Their disks never come back. An operator gives them up: what an object is was on a third node, too."""
    cluster = coded_cluster(node, etcd, tmp_path, 4, "2+2", lost_after_s=1)
    bodies = {f"key-{number}": pattern(3 * MIB + 7 * number, number) for number in range(8)}
    bodies |= {f"small-{number}": pattern(1000 + number, number) for number in range(24)}
    put_all(cluster, bodies)
    until_covered(cluster)
    evict(cluster)
    assert all_slices(cluster) == 32
    lost = cluster.nodes[2:]
    del cluster.nodes[2:], cluster.clients[2:]
    for each in lost:
        each.kill()
    for each in lost:
        shutil.rmtree(each.dir / "node")
    for goes in cluster.ids[2:]:
        until(lambda goes=goes: doing(cluster.nodes[0], goes)[0] == "missing", "that it is missed")
        wish(cluster.nodes[0], goes, "gone")
    until(lambda: all_slices(cluster) == 32, "that all slices are there again, two at each node")
    until_covered(cluster)
    check_all(cluster, bodies)
    for asked in cluster.clients:
        assert {each["Key"] for each in asked.list_objects_v2(Bucket="shards")["Contents"]} == bodies.keys()


def test_slices_of_a_lost_disk_are_there_again(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """A machine comes back without one of its disks. Nobody does anything, and the volume is given up by itself."""
    volumes = [tmp_path / "disk-0", tmp_path / "disk-1"]

    def make(*given: str) -> NodeProcess:
        own = [] if volumes[0].exists() else [flag for path in volumes for flag in ("--volume", str(path))]
        return node(*given, *own)

    cluster = coded_cluster(make, etcd, tmp_path, 3, lost_after_s=3)
    bodies = {f"key-{number}": pattern(3 * MIB + 7 * number, number) for number in range(16)}
    put_all(cluster, bodies)
    first = cluster.nodes[0]
    assert len(slices(first)) == 16
    first.kill()
    shutil.rmtree(volumes[1])
    first.start()
    cluster.clients[0] = client(first)
    until(lambda: first.ask("GET", "/-/readyz")[0] == 200, "that it is back")
    until(lambda: len(first.json("GET", "status")["volumes"]) == 1, "that the volume was given up")
    until(lambda: len(slices(first)) == 16, "that all slices are there again")
    until_covered(cluster)
    evict(cluster)
    check_all(cluster, bodies)


def test_a_slice_that_rots_is_made_again(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    bodies = {f"key-{number}": pattern(3 * MIB + 7 * number, number) for number in range(12)}  # one in three slices of
    put_all(cluster, bodies)  # a node is read only when others are gone
    evict(cluster)
    first = cluster.nodes[0]
    files = [path for path in (first.dir / "node").rglob("*") if path.is_file() and path.stat().st_size > MIB]
    data = [path for path in files if path.suffix not in (".mdb", ".sqlite")]
    rotten = 0
    for path in data:
        with suppress(FileNotFoundError), open(path, "r+b") as file:  # what was evicted goes a moment later
            file.seek(os.fstat(file.fileno()).st_size // 2)
            rotten += bool(file.write(b"rotten rotten rotten"))
    assert rotten >= len(bodies)
    check_all(cluster, bodies)
    until(lambda: first.metric("forebay_corrupt_blocks_total") > 0, "that it is noticed")
    evict(cluster)
    check_all(cluster, bodies)
    until(lambda: sum(each.metric("forebay_slices_made_again_total") for each in cluster.nodes), "that they are mended")
    assert not any(each["lost_objects"] for one in cluster.nodes for each in one.json("GET", "status")["buckets"])


SLOW = "import forebay.node.engine.slices as slices\nslices.REPAIR_BYTES_S = 4 << 20\n"


def test_a_drained_node_hands_its_slices_on(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take longer than its keys do: it has handed those over, and acts on nothing any more."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    cluster = coded_cluster(node, etcd, tmp_path, 4)
    bodies = {f"key-{number}": pattern(5 * MIB + 7 * number, number) for number in range(12)}
    put_all(cluster, bodies)
    evict(cluster)
    goes = cluster.ids[3]
    assert slices(cluster.nodes[3])
    wish(cluster.nodes[0], goes, "draining")
    until(lambda: doing(cluster.nodes[0], goes)[0] == "gone", "that it has gone")
    left = cluster.nodes.pop(3)
    cluster.clients.pop(3)
    assert slices(left) == []
    left.stop()
    shutil.rmtree(left.dir / "node")
    assert sorted(len(slices(each)) for each in cluster.nodes) == [12] * 3
    until_covered(cluster)
    check_all(cluster, bodies)


def test_a_node_without_which_there_are_too_few_stays(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    bodies = {"large": pattern(5 * MIB)}
    put_all(cluster, bodies)
    goes = cluster.ids[1]
    wish(cluster.nodes[0], goes, "draining")
    for each in cluster.nodes:
        until(lambda each=each: doing(each, goes)[0] != "active", "that all know it")
    asked = cluster.clients[0]
    asked.put_object(Bucket="shards", Key="new", Body=bodies["large"], Metadata={"who": "new"})
    bodies["new"] = bodies["large"]
    until(lambda: any("need 3 nodes" in str(each.json("GET", "status")) for each in cluster.nodes), "that it is said")
    assert doing(cluster.nodes[0], goes)[0] != "gone"
    check_all(cluster, {"new": bodies["new"]})
    wish(cluster.nodes[0], goes, "active")
    until_covered(cluster)
    flushed(cluster)
    evict(cluster)
    assert read(asked, "shards", "new")[0] == bodies["new"]


def test_a_cluster_goes_to_zero_only_without_coded_objects(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """They are on its nodes alone, and so would a manifest be that is put there."""
    cluster = coded_cluster(node, etcd, tmp_path, 3)
    bodies = {"large": pattern(3 * MIB), "small": b"small"}
    put_all(cluster, bodies)
    program, place = Program(cluster.nodes[0].endpoint, tmp_path / "cli"), "s3://through/left.json"

    def refused(words: str, code: int) -> None:
        assert words in " ".join(program("drain", "--all", "--manifest", place, code=code).stderr.split())
        assert {doing(cluster.nodes[0], each)[0] for each in cluster.ids} == {"active"}, "nothing has begun"

    refused("and its objects are on nodes alone", 5)
    check_all(cluster, bodies)
    for key in bodies:
        cluster.clients[1].delete_object(Bucket="shards", Key=key)
    flushed(cluster)
    place = "s3://shards/left.json"
    refused("would go with the nodes", 2)
    program("drain", "--all", "--manifest", "s3://through/left.json")
    assert json.loads((tmp_path / "through" / "left.json").read_bytes())["format"] == "forebay manifest 1"
    for each in cluster.nodes:
        assert each.process is not None
        until(lambda each=each: each.process.poll() is not None, "that it has ended")
