"""What no backend has lies on three nodes: two may be lost at once, for good."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from bench import servers
from tests.node.conftest import NodeProcess
from tests.node.test_copies_kept import agreed, keep_nothing_once, read, until_covered, written
from tests.node.test_hand_over import doing, wish
from tests.node.test_homes import SOON, Cluster
from tests.patience import until

Make = Callable[..., NodeProcess]
KEYS = 40


def add(cluster: Cluster, name: str, copies: int) -> None:
    cluster.nodes[0].json(
        "PUT", f"buckets/{name}", {"name": name, "url": "local://", "write": "local", "copies": copies}
    )


def kept(cluster: Cluster) -> int:
    return sum(int(each.metric("forebay_kept_copies")) for each in cluster.nodes)


def test_two_of_four_are_lost_at_once(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """Of a bucket with three copies everything is there when they are given up; of one with two all but what was on
    just these two. Both were buckets with two copies first."""
    cluster = Cluster(node, etcd, tmp_path, 4, *SOON)
    keep_nothing_once(cluster)
    for name in ("two", "three"):
        add(cluster, name, 2)
        for asked in cluster.clients:
            until(lambda asked=asked, name=name: written(asked, name, "warm"), "that it takes writes")
        for number in range(KEYS):
            assert written(cluster.clients[number % 4], name, f"key-{number}", f"{name} {number}".encode())
    until_covered(cluster)
    until(lambda: kept(cluster) == 2 * (KEYS + 1), "that all is on two nodes, and nothing on more")
    add(cluster, "three", 3)
    until(lambda: kept(cluster) == 3 * (KEYS + 1), "that what was written before is on three nodes, too")
    for number in range(KEYS, 2 * KEYS):
        assert written(cluster.clients[number % 4], "three", f"key-{number}", f"three {number}".encode())
    cluster.clients[0].delete_object(Bucket="three", Key="key-1")
    until(lambda: kept(cluster) == 3 * (KEYS + 1) + 2 * KEYS - 2, "that nobody keeps what was deleted")

    before, lost = agreed(cluster), set(cluster.ids[2:])
    for each in cluster.nodes[2:]:
        each.kill()
    for each in cluster.nodes[2:]:
        shutil.rmtree(each.dir / "node")
    del cluster.nodes[2:], cluster.clients[2:]
    for goes in sorted(lost):
        until(lambda goes=goes: doing(cluster.nodes[0], goes)[0] == "missing", "that it is missed")
        wish(cluster.nodes[0], goes, "gone")
    until_covered(cluster)
    for asked in cluster.clients:
        for number in range(2 * KEYS):
            found = read(asked, "three", f"key-{number}")
            assert found == (None if number == 1 else (f"three {number}".encode(), {})), number
        for number in range(KEYS):
            key = f"key-{number}"
            home = before.holder("two", key)
            assert home is not None
            was_on = {home, *before.seconds(home, "two", key)}
            expected = (f"two {number}".encode(), {}) if was_on - lost else None
            assert read(asked, "two", key) == expected, f"{key} was on {was_on}, and {lost} are lost"
    assert len(cluster.clients[0].list_objects_v2(Bucket="three")["Contents"]) == 2 * KEYS
    assert written(cluster.clients[1], "three", "key-1", b"anew")
    assert read(cluster.clients[0], "three", "key-1") == (b"anew", {})
