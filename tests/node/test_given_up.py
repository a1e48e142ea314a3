"""A node is given up: what others have of it is theirs, wherever it is; nothing old comes back, and nobody waits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import servers
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags
from tests.node.test_copies_kept import agreed, keep_nothing_once, read, until_covered, written
from tests.node.test_hand_over import doing, wish
from tests.node.test_homes import SOON, Cluster, client
from tests.node.test_more_copies import add
from tests.patience import until

Make = Callable[..., NodeProcess]


def of_two(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, *others: tuple[str, int]
) -> tuple[Cluster, list[str]]:
    """A bucket with two copies, beside others; and keys of it that are at home at the first node."""
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
    keep_nothing_once(cluster)
    for name, copies in (("own", 2), *others):
        add(cluster, name, copies)
        for asked in cluster.clients:
            until(lambda asked=asked, name=name: written(asked, name, "warm"), "that it takes writes")
    first, known = cluster.ids[0], agreed(cluster)
    keys = [key for key in (f"key-{n}" for n in range(200)) if known.holder("own", key) == first][:6]
    for key in keys:
        assert written(cluster.clients[0], "own", key, b"v1")
    until_covered(cluster)
    return cluster, keys


def lose_first(cluster: Cluster) -> None:
    cluster.nodes[0].kill()
    shutil.rmtree(cluster.nodes[0].dir / "node")
    del cluster.nodes[0], cluster.clients[0]
    until(lambda: doing(cluster.nodes[0], cluster.ids[0])[0] == "missing", "that it is missed")


def test_copies_from_before_a_bucket_was_kept_once_are_nobodys(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    cluster, keys = of_two(node, etcd, tmp_path, ("keep", 2))
    add(cluster, "own", 1)
    for key in keys[:3]:
        until(lambda key=key: written(cluster.clients[0], "own", key, b"v2"), "that it takes writes as it is now")
    for key in keys[3:]:
        cluster.clients[0].delete_object(Bucket="own", Key=key)
    lose_first(cluster)
    wish(cluster.nodes[0], cluster.ids[0], "gone")
    until(lambda: cluster.ids[0] not in agreed(cluster).holders, "that it is given up")
    until_covered(cluster)
    assert [read(asked, "own", key) for asked in cluster.clients for key in keys] == [None] * 12


def test_nobody_waits_for_copies_of_which_there_are_none(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """The only bucket with two copies is kept once when its node is given up."""
    cluster, keys = of_two(node, etcd, tmp_path, ("once", 1))
    lose_first(cluster)
    add(cluster, "own", 1)
    wish(cluster.nodes[0], cluster.ids[0], "gone")
    until(lambda: cluster.ids[0] not in agreed(cluster).holders, "that it is given up")
    until(lambda: not agreed(cluster).bequeaths, "that all is taken over")
    assert [read(cluster.clients[0], "own", key) for key in keys] == [(b"v1", {})] * 6, "it had copies when it went"
    fourth = node(*flags(tmp_path, cluster.at), *SOON)
    at = fourth.json("GET", "status")["node_id"]
    until(lambda: at in agreed(cluster).holders, "that a new node holds keys")


def test_a_newcomer_is_sent_what_a_lost_node_had(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """It is the home of many keys by then, and has no copy of them: another node has."""
    cluster = Cluster(node, etcd, tmp_path, 2, *SOON)
    keep_nothing_once(cluster)
    add(cluster, "own", 2)
    for asked in cluster.clients:
        until(lambda asked=asked: written(asked, "own", "warm"), "that it takes writes")
    until_covered(cluster)
    body = pattern(256 << 10)
    keys = [f"key-{number}" for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: written(cluster.clients[0], "own", key, body), keys))
    until_covered(cluster)
    cluster.nodes.append(node(*flags(tmp_path, cluster.at), *SOON))
    until(lambda: len((known := agreed(cluster)).holders) == 3 and known.active, "that the third holds keys")
    lose_first(cluster)
    third = client(cluster.nodes[1])
    cluster.clients.append(third)
    wish(cluster.nodes[0], cluster.ids[0], "gone")
    until(lambda: cluster.ids[0] not in agreed(cluster).holders, "that it is given up, or was taken over")
    until_covered(cluster)
    for asked in cluster.clients:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda key, asked=asked: read(asked, "own", key), keys))
        assert found == [(body, {})] * len(keys)
        assert len(asked.list_objects_v2(Bucket="own")["Contents"]) == len(keys) + 1


def test_what_was_taken_over_is_not_brought_back(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """It would be a second history of each key. The machine comes back under a new id."""
    cluster, keys = of_two(node, etcd, tmp_path, ("once", 1))
    first, asked = cluster.nodes[0], cluster.nodes[1]
    first.kill()
    del cluster.nodes[0], cluster.clients[0]
    until(lambda: doing(asked, cluster.ids[0])[0] == "missing", "that it is missed")
    wish(asked, cluster.ids[0], "gone")
    until(lambda: cluster.ids[0] not in agreed(cluster).holders, "that it is given up")
    for word, words in (("active", b"with an empty directory"), ("draining", b"with an empty directory")):
        call = json.dumps({"node": cluster.ids[0], "wish": word}).encode()
        status, said = asked.ask("POST", "/-/v1/cluster/wish", {}, call)
        assert (status, words in said) == (409, True), said
    first.start()
    until_covered(cluster)
    for key in keys:
        assert read(cluster.clients[0], "own", key) == (b"v1", {})
    assert doing(asked, cluster.ids[0])[0] == "gone", "it stays out"
    cluster.clients[0].delete_object(Bucket="own", Key=keys[0])
    first.kill()
    shutil.rmtree(first.dir / "node")
    until(lambda: forgotten(asked, cluster.ids[0]), "that it may be forgotten")
    first.start()
    at = first.json("GET", "status")["node_id"]
    assert at != cluster.ids[0]
    until(lambda: at in agreed(cluster).holders, "that it holds keys again")
    assert [read(client(first), "own", key) for key in keys] == [None, *[(b"v1", {})] * (len(keys) - 1)]


def forgotten(asked: NodeProcess, node_id: str) -> bool:
    call = json.dumps({"node": node_id, "wish": "forgotten"}).encode()
    return asked.ask("POST", "/-/v1/cluster/wish", {}, call)[0] == 200
