"""Buckets of a cluster where something is away, old, lost or half-way."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import servers
from forebay.meta.etcd import EtcdMeta
from tests.node.conftest import NodeProcess
from tests.node.test_cluster import until_all_are
from tests.node.test_shared_buckets import PREFIX, lagging, start
from tests.patience import until

Start = Callable[..., NodeProcess]
__all__ = ["start"]  # a fixture
JSON = {"Content-Type": "application/json"}


def raw(etcd: servers.EtcdCluster, tmp_path: Path, change: dict[str, bytes | None] | None = None) -> dict[str, bytes]:
    """All that the cluster's store has, after `change`."""

    async def read() -> dict[str, bytes]:
        meta = EtcdMeta(etcd.addresses, (tmp_path / "name").read_text().rpartition("/")[2])
        if change is not None:
            await meta.transact(change)
        found, _ = await meta.range("")
        await meta.aclose()
        return {entry.key: entry.value for entry in found}

    return asyncio.run(read())


def make(node: NodeProcess, name: str, root: Path, **more: Any) -> None:
    root.mkdir(exist_ok=True)
    node.json("PUT", f"buckets/{name}", {"name": name, "url": f"file://{root}", **more})


def test_a_bucket_that_was_made_anew_meanwhile_is_another(start: Start, tmp_path: Path) -> None:
    """What a node has cached of a bucket that is deleted, and made again while the node is away, is not of the new."""
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "corpus", tmp_path / "corpus", freshness_s=1e9)
    (tmp_path / "corpus" / "one").write_bytes(b"old")
    assert nodes[1].get("corpus", "one") == b"old"
    nodes[1].stop()
    nodes[0].json("DELETE", "buckets/corpus")
    (tmp_path / "corpus" / "one").write_bytes(b"new")
    make(nodes[0], "corpus", tmp_path / "corpus", freshness_s=1e9)
    nodes[1].start()
    until(lambda: nodes[1].get("corpus", "one") == b"new")


def test_what_is_changed_here_stays_over_a_restart(start: Start, tmp_path: Path) -> None:
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "corpus", tmp_path / "corpus")
    body = {**nodes[1].json("GET", "buckets/corpus"), "quota_bytes": 1 << 30}
    nodes[1].json("PUT", "buckets/corpus?here=1", body)
    nodes[1].stop()
    nodes[1].start()
    until_all_are("active", *nodes)
    make(nodes[0], "after", tmp_path / "after")
    until(lambda: "after" in {each["name"] for each in nodes[1].json("GET", "buckets")})
    assert nodes[1].json("GET", "buckets/corpus")["quota_bytes"] == 1 << 30
    nodes[0].json("PUT", "buckets/corpus", {**body, "quota_bytes": 2 << 30})
    until(lambda: nodes[1].json("GET", "buckets/corpus")["quota_bytes"] == 2 << 30, "that a later word counts")


def test_an_old_entry_is_not_followed(start: Start, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Put back by who can write to etcd, or by who restored an old backup."""
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "moved", tmp_path / "before")
    make(nodes[0], "dropped", tmp_path / "before")
    old = raw(etcd, tmp_path)
    make(nodes[0], "moved", tmp_path / "after")
    nodes[0].json("DELETE", "buckets/dropped")
    until(lambda: bucket_urls(nodes[1]) == {"moved": f"file://{tmp_path / 'after'}"})
    new = raw(etcd, tmp_path)
    raw(etcd, tmp_path, {PREFIX + name: old[PREFIX + name] for name in ("moved", "dropped")})
    until(lambda: all(raw(etcd, tmp_path)[PREFIX + name] == new[PREFIX + name] for name in ("moved", "dropped")))
    assert all(bucket_urls(one) == {"moved": f"file://{tmp_path / 'after'}"} for one in nodes)


def bucket_urls(node: NodeProcess) -> dict[str, str]:
    return {each["name"]: each["url"] for each in node.json("GET", "buckets")}


def test_an_emptied_store_is_told_again(start: Start, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """All of it is gone, what it knew of nodes too."""
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "corpus", tmp_path / "corpus")
    raw(etcd, tmp_path, dict.fromkeys(raw(etcd, tmp_path)))
    until(lambda: PREFIX + "corpus" in raw(etcd, tmp_path))
    assert all(set(bucket_urls(one)) == {"corpus"} for one in nodes)


def test_a_deleted_bucket_that_a_node_still_owes_for_can_be_given_up_there(start: Start, tmp_path: Path) -> None:
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "back", tmp_path / "back", write="back")
    (tmp_path / "back").rename(tmp_path / "gone")
    number = 0
    while not nodes[1].json("GET", "status")["buckets"][0]["dirty_objects"]:
        name = f"/-/v1/objects/back/{number}"  # 503 while the cluster is being told of the bucket
        until(lambda name=name: nodes[1].ask("PUT", name, {}, b"x")[0] == 200)
        number += 1
    status, answer = nodes[0].ask("DELETE", "/-/v1/buckets/back?force=1")
    assert status == 200, answer
    until(lambda: lagging(nodes[1]))
    status, answer = nodes[1].ask("DELETE", "/-/v1/buckets/back?force=1")
    assert status == 200, answer
    assert bucket_urls(nodes[1]) == {}
    until(lambda: not lagging(nodes[1]))


def test_a_bucket_too_large_for_the_store_is_refused(start: Start, tmp_path: Path) -> None:
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    (tmp_path / "huge").mkdir()
    body = {"name": "huge", "url": f"file://{tmp_path / 'huge'}", "pinned": [f"{n:0900d}" for n in range(700)]}
    status, answer = nodes[0].ask("PUT", "/-/v1/buckets/huge", JSON, json.dumps(body).encode())
    assert (status, b"pin fewer" in answer) == (400, True), answer
    assert bucket_urls(nodes[0]) == {}


def test_a_key_of_no_bucket_in_the_store_harms_nobody(start: Start, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    bad, mismatch = (
        json.dumps({"word": {"version": 1, "bucket": {"name": name, "url": "file:///tmp"}}}).encode()
        for name in ("../../x", "other")
    )
    raw(etcd, tmp_path, {PREFIX + "../../x": bad, PREFIX + "this": mismatch, PREFIX + "a/b": b"\xff"})
    name = (tmp_path / "name").read_text().rpartition("/")[2].encode()
    put = {"key": base64.b64encode(name + b"/bucket/\xff\xfe").decode(), "value": base64.b64encode(b"?").decode()}
    host, port = etcd.addresses[0]
    urllib.request.urlopen(f"http://{host}:{port}/v3/kv/put", json.dumps(put).encode()).close()
    make(nodes[0], "corpus", tmp_path / "corpus")
    until(lambda: "corpus" in bucket_urls(nodes[1]))
    assert bucket_urls(nodes[1]).keys() == {"corpus"}
    assert lagging(nodes[1]).keys() == {"../../x", "this", "a/b", "\ufffd\ufffd"}


def test_a_node_that_is_written_to_all_the_time_follows_too(start: Start, tmp_path: Path) -> None:
    """It owes something in each moment: it must stop taking more."""
    nodes = [start(), start()]
    until_all_are("active", *nodes)
    make(nodes[0], "back", tmp_path / "back", write="back", copies=1)  # a node that keeps copies refuses the change
    (tmp_path / "back").rename(tmp_path / "gone")
    key = ""
    for number in range(200):
        key = str(number)
        assert nodes[1].ask("PUT", f"/-/v1/objects/back/{key}", {}, b"x")[0] == 200
        if nodes[1].json("GET", "status")["buckets"][0]["dirty_objects"]:
            break
    (tmp_path / "gone").rename(tmp_path / "back")
    until(lambda: not nodes[0].json("GET", "status")["buckets"][0]["dirty_objects"])
    (tmp_path / "back").rename(tmp_path / "gone")
    assert nodes[1].ask("PUT", f"/-/v1/objects/back/{key}", {}, b"last")[0] == 200
    nodes[0].json("PUT", "buckets/back", {"name": "back", "url": f"file://{tmp_path / 'back'}"})
    until(lambda: lagging(nodes[1]))
    status, answer = nodes[1].ask("PUT", f"/-/v1/objects/back/{key}", {}, b"more")
    assert (status, b"first flushes" in answer) == (503, True), answer
    assert nodes[1].get("back", key) == b"last"
    settings = json.dumps(nodes[0].json("GET", "buckets/back")).encode()
    status, answer = nodes[1].ask("PUT", "/-/v1/buckets/back?force=1", JSON, settings)
    assert (status, b"(and `--here`" in answer) == (503, True), "its word is not heard, and it says how it would be"
    (tmp_path / "gone").rename(tmp_path / "back")
    until(lambda: not lagging(nodes[1]))
    assert nodes[1].json("GET", "buckets/back").get("write", "through") == "through"
    until(lambda: nodes[1].ask("PUT", f"/-/v1/objects/back/{key}", {}, b"more")[0] == 200)
    until(lambda: nodes[0].get("back", key) == b"more")
