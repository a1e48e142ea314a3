"""A node with local objects is drained: others have all of them, clients go on, and its disks may go."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.exceptions

from bench import servers
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import cluster_of
from tests.node.test_copies_kept import agreed, keep_nothing_once, kept, read, twice, until_covered, written
from tests.node.test_homes import SOON, Cluster
from tests.patience import PATIENCE_S, until

Make = Callable[..., NodeProcess]
MIB = 1 << 20


def local_cluster(node: Make, etcd: servers.EtcdCluster, tmp_path: Path, count: int = 3) -> Cluster:
    """Nodes that keep all that no backend has on two of them."""
    cluster = Cluster(node, etcd, tmp_path, count, *SOON)
    keep_nothing_once(cluster)
    twice(cluster)
    until_covered(cluster)
    return cluster


def wish(asked: NodeProcess, node: str, word: str) -> None:
    asked.json("POST", "cluster/wish", {"node": node, "wish": word})


def doing(asked: NodeProcess, node: str) -> tuple[str, str]:
    found = next(each for each in cluster_of(asked)["nodes"] if each["node_id"] == node)
    return found["state"], found["doing"]


class Users(threading.Thread):
    """Write and read one key after another at living nodes, and note what does not fit."""

    def __init__(self, clients: list[Any]) -> None:
        super().__init__(daemon=True)
        self._clients, self._ends = clients, threading.Event()
        self.acknowledged: dict[str, bytes] = {}
        self.wrong: list[str] = []
        self.rounds = 0

    def run(self) -> None:
        while not self._ends.is_set():
            key, body = f"user-{self.rounds % 16}", f"round {self.rounds}".encode()
            try:
                self._clients[self.rounds % len(self._clients)].put_object(Bucket="own", Key=key, Body=body)
                self.acknowledged[key] = body
                found = self._clients[(self.rounds + 1) % len(self._clients)].get_object(Bucket="own", Key=key)
                if (seen := found["Body"].read()) != body:
                    self.wrong.append(f"{key}: {seen!r} after {body!r}")
            except botocore.exceptions.ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 503:
                    self.wrong.append(f"{key}: {error}")
                self.acknowledged.pop(key, None)  # it may have been written, or not
            self.rounds += 1

    def end(self) -> None:
        self._ends.set()
        self.join(PATIENCE_S)
        assert self.wrong == []


def test_a_drained_node_hands_over_its_local_objects_and_goes(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    cluster = local_cluster(node, etcd, tmp_path)
    bodies = {f"key-{number}": pattern(1000 + number * number * 5000, number) for number in range(24)}
    bodies["large"], bodies["empty"] = pattern(9 * MIB + 5), b""
    for number, (key, body) in enumerate(bodies.items()):
        cluster.clients[number % 3].put_object(Bucket="own", Key=key, Body=body, Metadata={"who": key})
    assert written(cluster.clients[0], "away", "dirty", b"its backend is away")
    cluster.clients[1].delete_object(Bucket="own", Key="key-3")
    del bodies["key-3"]
    goes = cluster.ids[1]
    assert any(agreed(cluster).holder("own", key) == goes for key in bodies), "it is the home of some"

    users = Users([cluster.clients[0], cluster.clients[2]])
    users.start()
    until(lambda: users.rounds > 20, "that users work")
    wish(cluster.nodes[0], goes, "draining")
    until(lambda: doing(cluster.nodes[0], goes)[0] == "gone", "that it has gone")
    at = users.rounds
    until(lambda: users.rounds > at + 20, "that users go on")
    users.end()

    left = cluster.nodes.pop(1)
    cluster.clients.pop(1)
    cluster.ids.remove(goes)
    assert left.json("GET", "status")["buckets"], "it still answers"
    left.stop()
    shutil.rmtree(left.dir / "node")
    until_covered(cluster)
    for asked in cluster.clients:
        for key, body in bodies.items():
            assert read(asked, "own", key) == (body, {"who": key}), key
        for key, body in users.acknowledged.items():
            assert read(asked, "own", key)[0] == body, key
        assert read(asked, "away", "dirty")[0] == b"its backend is away"
        names = [each["Key"] for each in asked.list_objects_v2(Bucket="own")["Contents"]]
        assert set(bodies) <= set(names)
        assert "key-3" not in names
    assert kept(cluster) == sum(int(each.metric("forebay_dirty_objects")) for each in cluster.nodes) + len(names)
