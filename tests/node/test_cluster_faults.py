"""What goes wrong with one node of a cluster, as its other nodes and their clients see it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import servers
from forebay.core.placement import Members
from tests.cli.conftest import Program
from tests.disks import Disk, disk
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import add_back_bucket, cluster_of, flags, is_ready, takes_writes, until_all_are, url
from tests.node.test_frozen import answers
from tests.patience import until

__all__ = ["disk"]
pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]


def pair(node: Make, etcd: servers.EtcdCluster, root: Path, *second: str) -> list[NodeProcess]:
    """Two nodes, the second with more flags, and a bucket of each mode."""
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(root, at)), node(*flags(root, at), *second)]
    until_all_are("active", *nodes)
    for name in ("through", "back"):
        (root / name).mkdir()
    for each in nodes:
        add_back_bucket(each, root / "back")
        each.json("PUT", "buckets/local", {"name": "local", "url": "local://", "write": "local", "copies": 1})
        each.add_bucket("through", f"file://{root / 'through'}")
    for each in nodes:
        until(lambda each=each: takes_writes(each, "first"))
    return nodes


def keys_of(nodes: list[NodeProcess], bucket: str) -> list[str]:
    """A key at home at each."""
    weights = {each["node_id"]: each["weight"] for each in nodes[0].json("GET", "map")["nodes"]}
    members = Members(weights)
    names = [f"key-{number}" for number in range(1000)]
    ids = [cluster_of(each)["node_id"] for each in nodes]
    return [next(name for name in names if members.first(bucket, name) == one) for one in ids]


def takes_new_writes(one: NodeProcess) -> bool:
    """Of bytes that are not there: who writes what is there already is told that it is."""
    status, body = one.ask("PUT", f"/back/{uuid.uuid4().hex}", body=b"bytes")
    assert status in (200, 503), body
    return status == 200


def test_what_a_node_brings_that_was_given_up_goes_beside_what_was_written_since(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Its old directory has a version that was never flushed, older than what others acknowledged since."""
    nodes = pair(node, etcd, tmp_path)
    asked, lost = nodes
    _, key = keys_of(nodes, "back")
    (tmp_path / "back" / key / "in-the-way").mkdir(parents=True)  # it cannot be flushed
    until(lambda: asked.ask("PUT", f"/back/{key}", body=b"old")[0] == 200)
    lost.kill()
    program = Program(asked.endpoint, tmp_path / "cli")
    id_of_it = next(each["node_id"] for each in cluster_of(asked)["nodes"] if each["address"] == lost.endpoint)
    until(lambda: asked.ask("GET", f"/back/{key}")[0] == 503, "nobody else answers for it")
    until(lambda: "missing" in [each["state"] for each in cluster_of(asked)["nodes"]])
    program("drain", id_of_it, "--give-up")
    (tmp_path / "back" / key / "in-the-way").rmdir()
    (tmp_path / "back" / key).rmdir()
    until(lambda: asked.ask("PUT", f"/back/{key}", body=b"newer")[0] == 200)
    until(lambda: (tmp_path / "back" / key).exists() and (tmp_path / "back" / key).read_bytes() == b"newer")

    lost.start()
    until(lambda: [each["state"] for each in cluster_of(lost)["nodes"]].count("gone") == 1)
    assert not is_ready(lost), "it stays out"
    assert asked.get("back", key) == b"newer"
    until(lambda: list((tmp_path / "back").glob(f"{key}.conflict-*")), "that what it had is kept beside")
    program("drain", id_of_it, "--undo")
    until_all_are("active", *nodes)
    for each in nodes:
        until(lambda each=each: each.ask("GET", f"/back/{key}") == (200, b"newer"))
    (beside,) = (tmp_path / "back").glob(f"{key}.conflict-*")
    assert beside.read_bytes() == b"old"
    assert (tmp_path / "back" / key).read_bytes() == b"newer"


def test_a_frozen_disk_on_one_node_is_that_nodes_alone(
    node: Make, etcd: servers.EtcdCluster, disk: Callable[[str], Disk], tmp_path: Path
) -> None:
    slow = disk("slow")
    nodes = pair(node, etcd, tmp_path, "--flush-timeout", "0", "--volume", str(slow.path / "v"))
    asked, frozen = nodes
    mine, theirs = keys_of(nodes, "local")
    bodies = {f"object-{number}": pattern(50_000, number) for number in range(12)}
    for key, body in bodies.items():
        (tmp_path / "through" / key).write_bytes(body)
    for key in (mine, theirs):
        until(lambda key=key: asked.ask("PUT", f"/local/{key}", body=b"before")[0] == 200)
    with slow.frozen():
        status, said = answers(asked, "PUT", f"/local/{theirs}", b"meanwhile")
        assert status == 503, said
        assert cluster_of(frozen)["node_id"] in said.decode(), said
        for key, body in bodies.items():
            assert answers(asked, "GET", f"/through/{key}") == (200, body), "whoever is its home"
            assert answers(frozen, "GET", f"/through/{key}") == (200, body)
        assert answers(asked, "PUT", f"/local/{mine}", b"meanwhile")[0] == 200
        assert all(each["state"] == "active" for each in cluster_of(asked)["nodes"]), "it lives"
    until(lambda: answers(asked, "PUT", f"/local/{theirs}", b"after")[0] == 200)
    for each in nodes:
        assert answers(each, "GET", f"/local/{theirs}") == (200, b"after")
        assert answers(each, "GET", f"/local/{mine}") == (200, b"meanwhile")


def test_a_missing_volume_of_one_node_refuses_its_keys_everywhere_and_no_others(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    nodes = pair(node, etcd, tmp_path, "--volume", str(volume))
    asked, bare = nodes
    mine, theirs = keys_of(nodes, "local")
    (tmp_path / "through" / "key").write_bytes(b"bytes")
    for key in (mine, theirs):
        until(lambda key=key: asked.ask("PUT", f"/local/{key}", body=b"only here")[0] == 200)
    bare.stop()
    volume.rename(tmp_path / "unmounted")
    volume.mkdir()
    bare.start()
    until_all_are("active", *nodes)
    for each in nodes:
        status, said = until(lambda each=each: (each.ask("GET", f"/local/{theirs}"), "an answer")[0])
        assert status == 503, said
        assert each.ask("PUT", f"/local/{theirs}", body=b"another history")[0] == 503
        assert each.get("through", "key") == b"bytes"
    assert str(volume) in bare.ask("GET", f"/local/{theirs}")[1].decode(), "what to bring back"
    until(lambda: asked.ask("GET", f"/local/{mine}") == (200, b"only here"))
    bare.stop()
    volume.rmdir()
    (tmp_path / "unmounted").rename(volume)
    bare.start()
    until_all_are("active", *nodes)
    for each in nodes:
        until(lambda each=each: each.ask("GET", f"/local/{theirs}") == (200, b"only here"))


def test_two_of_three_members_of_etcd_are_lost_and_come_back(node: Make, tmp_path: Path) -> None:
    with servers.EtcdCluster(3) as three:
        at = url(three.addresses, "three")
        nodes = [node(*flags(tmp_path, at, 4.0)) for _ in range(2)]
        until_all_are("active", *nodes)
        (tmp_path / "through").mkdir()
        for each in nodes:
            add_back_bucket(each, tmp_path / "back")
            each.add_bucket("through", f"file://{tmp_path / 'through'}", freshness_s=0.0)
        for each in nodes:
            until(lambda each=each: takes_new_writes(each))
        for member in three.members[1:]:
            member.kill()
        for each in nodes:
            until(lambda each=each: not takes_new_writes(each), "that it fenced itself")
            assert each.ask("PUT", "/through/key", body=b"bytes")[0] == 200
            assert each.get("through", "key") == b"bytes"
        for member in three.members[1:]:
            member.restart(wait=False)
        for each in nodes:
            until(lambda each=each: takes_new_writes(each))
        until_all_are("active", *nodes)
        assert [cluster_of(each)["trouble"] for each in nodes] == ["", ""]
