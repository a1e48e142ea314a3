"""A bucket that is added, changed or deleted at one node of a cluster is so at all of them, and at those that come."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from bench import servers
from forebay.meta.etcd import EtcdMeta
from forebay.node.engine.shared_buckets import PREFIX
from tests.node.conftest import NodeProcess
from tests.node.test_cluster import cluster_of, flags, until_all_are, url
from tests.node.test_peers import TOKEN, asked, state_of
from tests.patience import until

Make = Callable[..., NodeProcess]
SECRET = "a-secret-that-nobody-may-read-anywhere"


@pytest.fixture
def start(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> Callable[..., NodeProcess]:
    """One more node of one cluster, with identities and a peer key if `known`."""
    key, identities = tmp_path / "peer.key", tmp_path / "identities.json"
    key.write_text(uuid.uuid4().hex * 2)
    identities.write_text(json.dumps({"identities": [{"name": "ops", "allow": "admin:*", "token": TOKEN}]}))
    identities.chmod(0o600)
    at = url(etcd.addresses, f"shared-{uuid.uuid4().hex}")
    (tmp_path / "name").write_text(at)
    who = ("--identities", str(identities), "--peer-key", str(key))

    def start(known: bool = False) -> NodeProcess:
        return node(*flags(tmp_path, at), *(who if known else ()))

    return start


def put(node: NodeProcess, name: str, **settings: Any) -> None:
    asked(node, "PUT", f"/-/v1/buckets/{name}", {"name": name, **settings})


def bucket(node: NodeProcess, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asked(node, "GET", f"/-/v1/buckets/{name}"))
    return found


def names(node: NodeProcess) -> set[str]:
    return {each["name"] for each in json.loads(asked(node, "GET", "/-/v1/buckets"))}


def all_active(*nodes: NodeProcess) -> bool:
    return all([each["state"] for each in state_of(one)["nodes"]] == ["active"] * len(nodes) for one in nodes)


def entries(etcd: servers.EtcdCluster, tmp_path: Path, change: dict[str, bytes | None] | None = None) -> dict[str, Any]:
    """What the cluster's store says of buckets, after `change`."""

    async def read() -> dict[str, Any]:
        meta = EtcdMeta(etcd.addresses, (tmp_path / "name").read_text().rpartition("/")[2])
        if change is not None:
            await meta.transact({PREFIX + name: value for name, value in change.items()})
        found, _ = await meta.range(PREFIX)
        await meta.aclose()
        return {entry.key.removeprefix(PREFIX): json.loads(entry.value)["word"] for entry in found}

    return asyncio.run(read())


def lagging(node: NodeProcess) -> dict[str, str]:
    found: dict[str, str] = cluster_of(node)["lagging"]
    return found


def test_a_bucket_is_added_changed_and_deleted_at_any_node(
    start: Callable[..., NodeProcess], etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "one").write_bytes(b"1" * 5000)
    nodes = [start(known=True), start(known=True)]
    until(lambda: all_active(*nodes))
    put(nodes[0], "corpus", url=f"file://{corpus}")
    assert asked(nodes[1], "GET", "/-/v1/objects/corpus/one") == b"1" * 5000, "it is there for who goes there next"
    secret = {"access_key_id": "ME", "secret_access_key": SECRET, "region": "r", "endpoint": "http://127.0.0.1:1"}
    put(nodes[1], "far", url="s3://far", options=secret)
    said = entries(etcd, tmp_path)
    assert set(said) == {"corpus", "far"}
    assert SECRET not in json.dumps(said)

    asked(nodes[0], "POST", "/-/v1/pin", {"bucket": "corpus", "prefix": "o", "share": True})
    until(lambda: bucket(nodes[1], "corpus").get("pinned") == ["o"])

    third = start(known=True)
    until(lambda: all_active(*nodes, third))
    until(lambda: names(third) == {"corpus", "far"}, "that a newcomer has them too")
    assert bucket(third, "corpus")["pinned"] == ["o"]
    far = bucket(third, "far")
    assert far["options"]["secret_access_key"] == "***"
    put(third, **{**far, "quota_bytes": 1 << 30})  # what is hidden stands for what the newcomer was told
    until(lambda: all(bucket(one, "far")["quota_bytes"] == 1 << 30 for one in nodes))
    assert bucket(nodes[0], "corpus") == bucket(nodes[1], "corpus") == bucket(third, "corpus")

    nodes[1].stop()
    asked(third, "DELETE", "/-/v1/buckets/far")
    until(lambda: names(nodes[0]) == {"corpus"})
    nodes[1].start()
    until(lambda: names(nodes[1]) == {"corpus"}, "that a node which was away deletes it when it comes back")
    assert "bucket" not in entries(etcd, tmp_path)["far"]
    put(nodes[0], "far", url=f"file://{corpus}")
    until(lambda: all("far" in names(one) for one in (nodes[1], third)), "that one of the name can be added again")

    forged = {"word": {"version": 1 << 60, "bucket": {"name": "corpus", "url": "file:///etc"}}, "mac": "00" * 32}
    entries(etcd, tmp_path, {"corpus": json.dumps(forged).encode(), "more": json.dumps(forged).encode()})
    until(lambda: all("not signed" in state_of(one)["lagging"].get("corpus", "") for one in (*nodes, third)))  # type: ignore[attr-defined]
    assert all(names(one) == {"corpus", "far"} for one in nodes), "nobody follows who has not got the key"
    assert bucket(third, "corpus")["url"] == f"file://{corpus}"
    put(third, **bucket(third, "corpus"))
    until(lambda: not any("corpus" in state_of(one)["lagging"] for one in (*nodes, third)), "that it is set anew")  # type: ignore[operator]
    entries(etcd, tmp_path, {"more": None})
    until(lambda: not any(state_of(one)["lagging"] for one in (*nodes, third)))

    entries(etcd, tmp_path, dict.fromkeys(("corpus", "far")))  # an operator's slip, or a store that was emptied
    until(lambda: set(entries(etcd, tmp_path)) == {"corpus", "far"}, "that the store is told again")
    assert all(names(one) == {"corpus", "far"} for one in (*nodes, third))


def test_s3_clients_create_a_bucket_at_one_node_and_use_it_at_another(start: Callable[..., NodeProcess]) -> None:
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    options = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    one, two = (
        boto3.client(
            "s3", endpoint_url=each.endpoint, config=options, region_name="us-east-1",
            aws_access_key_id="a", aws_secret_access_key="b",
        )
        for each in nodes
    )  # fmt: skip
    one.create_bucket(Bucket="made-by-s3")
    keys = [f"k-{number}" for number in range(8)]  # at home at either
    for key in keys:
        two.put_object(Bucket="made-by-s3", Key=key, Body=key.encode())
    for key in keys:
        assert one.get_object(Bucket="made-by-s3", Key=key)["Body"].read() == key.encode()
        for each in (one, two):
            with pytest.raises(one.exceptions.ClientError, match="BucketNotEmpty"):
                each.delete_bucket(Bucket="made-by-s3")
        for node in nodes:
            status, said = node.ask("DELETE", "/-/v1/buckets/made-by-s3")
            assert (status, b"BucketNotEmpty" in said) == (409, True), said
        one.delete_object(Bucket="made-by-s3", Key=key)
    two.delete_bucket(Bucket="made-by-s3")
    until(lambda: names(nodes[0]) == set())


def test_here_means_one_node_and_nobody_takes_it_away(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    body = {"name": "own", "url": f"file://{tmp_path / 'own'}"}
    nodes[0].json("PUT", "buckets/own?here=1", body)
    assert names(nodes[1]) == set()
    nodes[1].json("PUT", "buckets/all", {**body, "name": "all"})
    until(lambda: names(nodes[0]) == {"own", "all"})
    nodes[0].json("DELETE", "buckets/all?here=1")
    assert names(nodes[1]) == {"all"}
    nodes[1].json("DELETE", "buckets/all")
    assert names(nodes[0]) == {"own"}


def test_what_would_lose_something_waits_and_says_so(start: Callable[..., NodeProcess], tmp_path: Path) -> None:
    """A node owes the backend something when another deletes the bucket."""
    root = tmp_path / "back"
    root.mkdir()
    nodes = [start(), start()]
    ids = until_all_are("active", *nodes)
    once = {"name": "back", "url": f"file://{root}", "write": "back", "copies": 1}  # else it keeps what the other owes
    nodes[0].json("PUT", "buckets/back", once)
    homes = {ids[0]: nodes[0], ids[1]: nodes[1]}
    root.chmod(0o500)  # root may write all the same, so the backend is taken away
    root.rename(tmp_path / "gone")
    put = (nodes[0].ask("PUT", f"/-/v1/objects/back/{number}", {}, b"x" * 100)[0] for number in range(40))
    assert set(put) == {200}
    owing = [one for one in homes.values() if one.json("GET", "status")["buckets"][0]["dirty_objects"]]
    assert len(owing) == 2
    status, answer = nodes[0].ask("DELETE", "/-/v1/buckets/back")
    assert (status, b"forebay flush back" in answer) == (503, True), answer
    assert all(names(one) == {"back"} for one in nodes), "nobody heard of what was refused"
    (tmp_path / "gone").rename(root)
    root.chmod(0o700)
    until(lambda: not nodes[0].json("GET", "status")["buckets"][0]["dirty_objects"])
    (tmp_path / "gone").mkdir()
    status, answer = nodes[0].ask("DELETE", "/-/v1/buckets/back")
    assert status == 200, answer
    until(lambda: names(nodes[1]) == set() or lagging(nodes[1]))
    until(lambda: names(nodes[1]) == set(), "that the other deletes it when all is flushed")
    assert len(list(root.iterdir())) == 40


def test_two_that_change_a_bucket_at_once_leave_one_and_the_same(
    start: Callable[..., NodeProcess], etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    nodes = [start(), start(), start()]
    until_all_are("active", *nodes)

    def change(turn: int) -> int:
        body = {"name": "corpus", "url": f"file://{tmp_path / 'corpus'}", "quota_bytes": (turn + 1) << 30}
        return nodes[turn % 3].ask(
            "PUT", "/-/v1/buckets/corpus", {"Content-Type": "application/json"}, json.dumps(body).encode()
        )[0]

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(change, range(30)))
    assert set(answers) <= {200, 503}
    assert answers.count(200) >= 3

    def agreed() -> bool:
        said = entries(etcd, tmp_path)["corpus"]["bucket"]["quota_bytes"]
        return {one.json("GET", "buckets/corpus")["quota_bytes"] for one in nodes} == {said}

    until(agreed, "that all have what the store says")
    assert not any(map(lagging, nodes))
