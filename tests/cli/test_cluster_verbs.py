"""Verbs that are the cluster's: flush, evict and jobs at any node are of all of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import servers
from tests.cli.conftest import Program
from tests.node.conftest import NodeProcess, node, pattern
from tests.node.test_cluster import flags, until_all_are, url
from tests.patience import until

__all__ = ["node"]
pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]
MIB = 1 << 20


def test_what_is_dirty_or_cached_on_any_node_is_flushed_and_evicted_by_one_command(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    (tmp_path / "bucket").mkdir()
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at)) for _ in range(3)]
    until_all_are("active", *nodes)
    for one in nodes:
        backing = {"name": "back", "url": f"file://{tmp_path / 'bucket'}", "write": "back", "dirty_age_max_s": 86400.0}
        one.json("PUT", "buckets/back", backing)
    program = Program(nodes[1].endpoint, tmp_path / "cli")
    keys = [f"key-{number}" for number in range(24)]
    for number, key in enumerate(keys):
        asked = nodes[number % 3]
        until(lambda asked=asked, key=key: asked.ask("PUT", f"/back/{key}", body=pattern(20_000, 1))[0] == 200)
    listed = json.loads(program("flush", "back", "--json").stdout)
    assert [state["state"] for state in listed] == ["done"] * 3
    assert sorted(path.name for path in (tmp_path / "bucket").iterdir()) == sorted(keys)
    assert [one.json("GET", "status")["buckets"][0]["dirty_objects"] for one in nodes] == [0, 0, 0]
    assert program("flush").stdout == "nothing is dirty: the backends have all that was written\n"

    def cached() -> list[int]:
        return [one.json("GET", "status")["buckets"][0]["cached_bytes"] for one in nodes]

    assert all(cached()), "each node has its own"
    said = program("evict", "back/").stdout.splitlines()
    assert [line.partition(" at ")[0] for line in said] == [f"node {each}" for each in _ids(nodes)]
    until(lambda: not any(cached()))

    jobs = json.loads(program("job", "ls", "--json").stdout)
    evicted = [state["job"] for state in jobs if state["verb"] == "evict"]
    assert len(evicted) == 3
    table = program("job", "ls").stdout
    assert all(one.endpoint in table for one in nodes)
    for name in evicted:
        assert program("job", "show", name).stdout.startswith("evicted s3://back/")
    assert "evicted" in program("job", "watch", evicted[0]).stdout
    program("job", "show", "nothing", code=3)

    # one that is away is told of, and hinders no other
    for number, key in enumerate(keys):
        assert nodes[number % 3].get("back", key) == pattern(20_000, 1)
    nodes[2].stop()
    result = program("evict", "back/", code=9)
    assert f"at {nodes[2].endpoint}: " in result.stderr
    assert not any(one.json("GET", "status")["buckets"][0]["cached_bytes"] for one in nodes[:2])
    program("evict", "--here", "back/")


def test_what_is_prefetched_or_pinned_is_fetched_once_by_all_nodes_together(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    objects = {f"small-{number}": pattern(100_000, number) for number in range(12)}
    objects["large"] = pattern(100 * MIB, 5)
    (tmp_path / "corpus").mkdir()
    for key, body in objects.items():
        (tmp_path / "corpus" / key).write_bytes(body)
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at)) for _ in range(3)]
    until_all_are("active", *nodes)
    for one in nodes:
        one.add_bucket("corpus", f"file://{tmp_path / 'corpus'}")
    program = Program(nodes[1].endpoint, tmp_path / "cli")
    whole = sum(map(len, objects.values()))

    def cached() -> list[int]:
        return [one.json("GET", "status")["buckets"][0]["cached_bytes"] for one in nodes]

    states = json.loads(program("prefetch", "corpus/", "--json").stdout)
    assert [state["state"] for state in states] == ["done"] * 3
    assert sum(state["bytes_total"] for state in states) == whole
    assert sum(cached()) == whole
    assert all(cached()), "each has its share"
    assert sum(one.metric("forebay_backend_read_bytes_total") for one in nodes) == whole
    assert nodes[0].get("corpus", "large") == objects["large"]
    assert sum(one.metric("forebay_backend_read_bytes_total") for one in nodes) == whole, "the rest came from peers"

    program("evict", "corpus/")
    until(lambda: not any(cached()))
    program("pin", "corpus/small-1*")
    names = {key: len(body) for key, body in objects.items() if key.startswith("small-1")}
    assert sum(cached()) == sum(names.values())
    assert all(one.json("GET", "buckets/corpus")["pinned"] == ["small-1"] for one in nodes)
    program("evict", "corpus/")
    assert sum(cached()) == sum(names.values()), "what is pinned stays, at each node"
    program("unpin", "corpus/small-1*")
    assert not any("pinned" in one.json("GET", "buckets/corpus") for one in nodes)
    program("prefetch", "--here", "corpus/small-2")
    assert nodes[1].json("GET", "stat/corpus/small-2")["cached_bytes"] == len(objects["small-2"])


def _ids(nodes: list[NodeProcess]) -> list[str]:
    """First the one that is asked."""
    ids = [one.json("GET", "status")["node_id"] for one in nodes]
    return [ids[1], *sorted(each for each in ids if each != ids[1])]
