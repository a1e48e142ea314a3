"""What no backend has lies on two nodes: kept before the answer, cleared after the flush, made good after a change."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import msgspec
import pytest

from bench import servers
from forebay.core.cluster.records import MAP, Map
from forebay.meta.etcd import EtcdMeta
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import cluster_of, flags, meta, until_all_are, url
from tests.node.test_homes import AWAY, MIB, PATIENT, SOON, Cluster, client, listed
from tests.node.test_peers import TOKEN, WHO, state_of
from tests.node.test_peers import asked as told_by
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


def answers_with(node: NodeProcess, key: str, body: bytes) -> bool:
    """Whether it serves these bytes of the local bucket now. Starved of its lease it may say 503, and nothing else."""
    status, answered = node.ask("GET", f"/own/{key}")
    assert status in (200, 503), (status, answered)
    assert status == 503 or answered == body, answered
    return status == 200


def test_who_does_not_say_how_many_copies_gets_two_in_a_cluster(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    alone, one = node("--fronts", "0", "--capacity", "1GiB"), node(*flags(tmp_path, url(etcd.addresses, "default")))
    until_all_are("active", one)

    def copies(at: NodeProcess, name: str, here: str = "", **said: int) -> int:
        settings = {"name": name, "url": "local://", "write": "local", **said}
        at.json("PUT", f"buckets/{name}{here}", settings)
        return int(at.json("GET", f"buckets/{name}")["copies"])

    assert copies(one, "silent") == 2
    assert (copies(one, "once", copies=1), copies(one, "once", quota_bytes=1 << 30)) == (1, 1), "as it was"
    assert copies(one, "silent", quota_bytes=1 << 30) == 2
    client(one).create_bucket(Bucket="made-by-s3")
    assert one.json("GET", "buckets/made-by-s3")["copies"] == 2
    assert copies(one, "here", "?here=1") == 1, "no other node knows it"
    assert copies(alone, "silent") == 1


def test_a_bucket_is_given_up_node_by_node_while_its_backend_is_away(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    cluster = Cluster(node, etcd, tmp_path, 2, *SOON)
    keep_nothing_once(cluster)
    twice(cluster)
    for number in range(20):
        assert written(cluster.clients[0], "away", f"key-{number}")
    assert kept(cluster) > 20
    one, other = cluster.nodes
    status, said = one.ask("DELETE", "/-/v1/buckets/away")
    assert (status, b"forebay flush away" in said, b"--force" in said) == (503, True, True), said
    status, said = one.ask("DELETE", "/-/v1/buckets/away?force=1")
    assert status == 200, said
    lagging = until(lambda: cluster_of(other)["lagging"].get("away", ""), "that the other cannot follow")
    assert "--force" in lagging
    assert other.json("GET", "status")["buckets"], "it gives up nothing by itself"
    status, said = other.ask("DELETE", "/-/v1/buckets/away?force=1&here=1")
    assert status == 200, said
    until(lambda: kept(cluster) == 1, "that only the copy in the other bucket is left")


def test_copies_come_and_go(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
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
    killed.kill()
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


def test_nodes_with_identities_keep_copies_too(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    identities, peer_key = tmp_path / "identities.json", tmp_path / "peer.key"
    identities.write_text(json.dumps({"identities": [{"name": "ops", "allow": "admin:*", "token": TOKEN}]}))
    identities.chmod(0o600)
    peer_key.write_text(uuid.uuid4().hex + uuid.uuid4().hex)
    known = ("--identities", str(identities), "--peer-key", str(peer_key))
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at), *known) for _ in range(2)]
    for one in nodes:
        told_by(one, "PUT", "/-/v1/buckets/own", {"name": "own", "url": "local://", "write": "local", "copies": 2})

    def covered() -> bool:
        known = [each for one in nodes for each in state_of(one)["nodes"]]  # type: ignore[attr-defined]
        return [each["doing"] for each in known] == ["serves its keys"] * 4

    for key, body in {"small": b"small bytes", "large": pattern(9 * MIB)}.items():
        until(lambda key=key, body=body: nodes[0].ask("PUT", f"/-/v1/objects/own/{key}", WHO, body)[0] == 200)
    until(covered, "that lists were compared")
    told = [told_by(one, "GET", "/-/metrics").decode() for one in nodes]
    copies = [re.search(r"^forebay_kept_copies (.*)$", text, re.MULTILINE) for text in told]
    assert sum(float(found[1]) for found in copies if found) == 2


def waited_for(node: Make) -> Make:
    """Nodes that nobody takes over."""

    def make(*given: str) -> NodeProcess:
        config = Path(given[given.index("--config") + 1])
        config.write_text("lease = 10.0\ntake_over = false\n")
        return node(*given)

    return make


def test_copies_are_cleared_when_the_backend_has_them(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    cluster = Cluster(waited_for(node), etcd, tmp_path, 2, *SOON)
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
    cluster.nodes[1].kill()
    assert not written(a, "double", "lonely")
    for _ in range(2):
        status, body = cluster.nodes[0].ask("PUT", "/double/lonely", body=b"bytes")
        assert status == 503, body
    assert b"other history" not in body


def states(node: NodeProcess) -> dict[str, str]:
    return {each["node_id"]: each["doing"] for each in cluster_of(node)["nodes"]}


def id_of(node: NodeProcess) -> str:
    return str(cluster_of(node)["node_id"])


def until_covered(cluster: Cluster) -> None:
    """Until every node knows that all that no backend has is on two nodes."""

    def covered() -> bool:
        return all(states(node)[other] == "serves its keys" for node in living for other in map(id_of, living))

    living = cluster.nodes
    until(covered, "that all is kept twice")
    until(lambda: agreed(cluster).is_covered, "that the map says so")


def agreed(cluster: Cluster) -> Map:
    seen: list[Map] = []

    async def look(store: EtcdMeta) -> None:
        entry = await store.get(MAP)
        assert entry is not None
        seen.append(msgspec.json.decode(entry.value, type=Map))

    meta(cluster.addresses, cluster.name, look)
    return seen[0]


def keep_nothing_once(cluster: Cluster) -> None:
    """A bucket that is kept once would keep its node from being taken over."""
    once = {"local", "back"}
    for name in once:
        cluster.nodes[0].json("DELETE", f"buckets/{name}")
    until(lambda: not any(once & {each["name"] for each in one.json("GET", "buckets")} for one in cluster.nodes))


def test_what_a_killed_node_acknowledged_is_taken_over(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Its disks never come back, as far as the others know, until all is in the bucket."""
    with servers.SeaweedFS() as seaweed:
        seaweed.create_bucket("lake")
        cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
        twice(cluster)
        lake = {"name": "lake", "url": "s3://lake", "write": "back", "options": seaweed.options()}
        for one in cluster.nodes:
            one.json("PUT", "buckets/lake", lake)
        keep_nothing_once(cluster)
        for asked in cluster.clients:
            until(lambda asked=asked: written(asked, "lake", "warm"), "that it takes writes")
        until(lambda: kept(cluster) == 2, "that it is flushed")
        until_covered(cluster)
        seaweed.kill()

        bodies = {f"key-{number}": pattern(1000 + number * number * 3000, number) for number in range(24)}
        tags = {"TagSet": [{"Key": "of", "Value": "mine"}]}
        for number, (key, body) in enumerate(bodies.items()):
            for bucket in ("lake", "own"):
                asked = cluster.clients[number % 3]
                asked.put_object(Bucket=bucket, Key=key, Body=b"earlier")
                asked.put_object(Bucket=bucket, Key=key, Body=body, Metadata={"who": key})
        cluster.clients[0].put_object_tagging(Bucket="own", Key="key-5", Tagging=tags)
        gone = [f"key-{number}" for number in range(20, 24)]
        for key in gone:
            for bucket in ("lake", "own"):
                cluster.clients[2].delete_object(Bucket=bucket, Key=key)
        left = {key: body for key, body in bodies.items() if key not in gone}
        homes = {bucket: {agreed(cluster).holder(bucket, key) for key in left} for bucket in ("lake", "own")}
        assert cluster.ids[1] in homes["lake"] & homes["own"], "it is the home of some"

        dead = cluster.nodes.pop(1)
        dead.kill()
        cluster.clients.pop(1)
        for asked in cluster.clients:
            until(lambda asked=asked: listed_there(asked) == sorted({*left, "warm"}), "a listing")
            for bucket in ("lake", "own"):
                for key, body in left.items():
                    found = until(
                        lambda asked=asked, bucket=bucket, key=key: read(asked, bucket, key), f"{bucket}/{key}"
                    )
                    assert found == (body, {"who": key}), key
            for key in gone:
                assert read(asked, "lake", key) is None
                with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
                    asked.get_object(Bucket="own", Key=key)
        assert cluster.clients[1].get_object_tagging(Bucket="own", Key="key-5")["TagSet"] == tags["TagSet"]
        until_covered(cluster)
        newer = [key for key in left if agreed(cluster).holder("own", key) != ""][:6]
        for key in newer:
            until(lambda key=key: written(cluster.clients[0], "own", key, b"newer"), "that it is written again")

        # the dead one comes back with all that it had: it shows nothing of it, forgets it, and holds again
        dead.start()
        cluster.nodes.append(dead)
        cluster.clients.append(client(dead))
        until(lambda: sorted(agreed(cluster).holders) == sorted(cluster.ids), "that it holds again")
        until_covered(cluster)
        for asked in cluster.clients:
            for key in newer:
                assert until(lambda asked=asked, key=key: read(asked, "own", key))[0] == b"newer"
            for key in gone:
                with pytest.raises(botocore.exceptions.ClientError, match="NoSuchKey"):
                    asked.get_object(Bucket="own", Key=key)

        seaweed.restart()
        all_is_flushed(seaweed, left)


def all_is_flushed(seaweed: servers.SeaweedFS, left: dict[str, bytes]) -> None:
    """As if nothing had happened."""
    direct = boto3.client("s3", endpoint_url=seaweed.endpoint, region_name="us-east-1", config=PATIENT)
    until(lambda: listed(direct, "lake") == sorted({*left, "warm"}), "that all is in the bucket")
    for key, body in left.items():
        until(lambda key=key, body=body: direct.head_object(Bucket="lake", Key=key)["ContentLength"] == len(body))
        assert direct.get_object(Bucket="lake", Key=key)["Body"].read() == body, key


def listed_there(asked: Any) -> list[str] | None:
    with suppress(botocore.exceptions.ClientError):
        return listed(asked, "own")
    return None


def read(asked: Any, bucket: str, key: str) -> tuple[bytes, dict[str, str]] | None:
    with suppress(botocore.exceptions.ClientError, botocore.exceptions.EndpointConnectionError):
        found = asked.get_object(Bucket=bucket, Key=key)
        return found["Body"].read(), found["Metadata"]
    return None


def test_a_home_that_was_paused_shows_nothing_old(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Its fronts would find all of it in the index, and its engine would acknowledge."""
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON, "--fronts", "1")
    twice(cluster)
    keep_nothing_once(cluster)
    key = cluster.key(1, "own")
    passed_on = cluster.key(1, "own", start=int(key.partition("-")[2]) + 1)
    assert written(cluster.clients[0], "own", key, b"old")
    until_covered(cluster)
    home = cluster.nodes[1]
    until(lambda: answers_with(home, key, b"old"), "the old version from its home")
    assert home.process is not None
    processes = [home.process.pid, *home.children().values()]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:  # nobody waits for what it might still answer, and holds the key's lock
        answer = thread.submit(written, cluster.clients[0], "own", passed_on)
        until(lambda: agreed(cluster).deposed == (cluster.ids[1],), "that it is taken over")
        until(answer.done, "an answer to what was passed on to it")
    until(lambda: written(cluster.clients[0], "own", passed_on, b"again"), "that the key is written again")
    until(lambda: written(cluster.clients[0], "own", key, b"new"), "that others act")
    for pid in processes:
        os.kill(pid, signal.SIGCONT)

    def answers() -> bool:
        read_there = answers_with(home, key, b"new")
        written_there, body = home.ask("PUT", f"/own/{key}-2", body=b"bytes")
        assert written_there in (200, 503), body
        return read_there and written_there == 200

    until(answers, "that it answers again, with what is true")
    until(lambda: sorted(agreed(cluster).holders) == sorted(cluster.ids), "that it holds again")
    until(lambda: answers_with(home, key, b"new"), "the new version from its home")
    until(lambda: answers_with(cluster.nodes[0], f"{key}-2", b"bytes"), "what it wrote from another node")
