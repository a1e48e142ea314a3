"""Nodes come and go as planned while clients read and write at all of them: none of their operations fails."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions

from bench import servers
from tests.node.conftest import NodeProcess, pattern
from tests.node.lossy import Lossy
from tests.node.test_cluster import flags, until_all_are
from tests.node.test_copies_kept import agreed, keep_nothing_once, twice, until_covered
from tests.node.test_hand_over import doing, wish
from tests.node.test_homes import ONCE, SOON, Cluster, client
from tests.patience import PATIENCE_S, until

Make = Callable[..., NodeProcess]
MIB = 1 << 20
KEYS = 8
LARGE = pattern(6 * MIB + 7)  # more than a node sends another in one request


class User(threading.Thread):
    """Writes and reads keys that nobody else writes, each time at other nodes, and asks for nothing twice."""

    def __init__(self, number: int, bucket: str, clients: list[Any]) -> None:
        super().__init__(daemon=True)
        self.clients = clients  # others may be put in its place
        self.failed: list[str] = []
        self.rounds = 0
        self._bucket, self._prefix, self._chance = bucket, f"user-{number}", random.Random(number)
        self._has: dict[str, bytes] = {}
        self._ends = threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            key = f"{self._prefix}/{self.rounds % KEYS}"
            act = self._deletes if self.rounds % 11 == 10 else self._copies if self.rounds % 13 == 12 else self._writes
            self._try(act, key)
            self._try(self._reads, key)
            if self.rounds % 7 == 6 and self._bucket != "away":  # which nobody lists: its backend is away
                self._try(self._lists, key)
            self.rounds += 1

    def _try(self, act: Callable[[str], None], key: str) -> None:
        try:
            act(key)
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            self.failed.append(f"{act.__name__} {self._bucket}/{key}: {error}")
            self._has.pop(key, None)

    @property
    def _asked(self) -> Any:
        return self._chance.choice(self.clients)

    def _writes(self, key: str) -> None:
        body = LARGE if self.rounds % 17 == 16 else f"round {self.rounds}".encode()
        self._asked.put_object(Bucket=self._bucket, Key=key, Body=body)
        self._has[key] = body

    def _copies(self, key: str) -> None:
        if self._has:
            source = self._chance.choice(list(self._has))
            if source != key:
                named = {"Bucket": self._bucket, "Key": source}
                self._asked.copy_object(Bucket=self._bucket, Key=key, CopySource=named)
                self._has[key] = self._has[source]

    def _deletes(self, key: str) -> None:
        self._asked.delete_object(Bucket=self._bucket, Key=key)
        self._has.pop(key, None)

    def _reads(self, key: str) -> None:
        if key in self._has:
            found = self._asked.get_object(Bucket=self._bucket, Key=key)["Body"].read()
            if found != self._has[key]:
                self.failed.append(f"{self._bucket}/{key} is {found[:20]!r}, not {self._has[key][:20]!r}")

    def _lists(self, _: str) -> None:
        found = self._asked.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}/")
        names = [each["Key"] for each in found.get("Contents", [])]
        if names != sorted(self._has):
            self.failed.append(f"{self._bucket} lists {names}, not {sorted(self._has)}")

    def end(self) -> None:
        self._ends.set()
        self.join(PATIENCE_S)


class Users:
    """Of all nodes and some buckets. `go_on` returns when each has done much more, and nothing failed."""

    def __init__(self, cluster: Cluster, *buckets: str) -> None:
        self._cluster = cluster
        clients = [client(node, ONCE) for node in cluster.nodes]
        self._users = [User(number, bucket, clients) for number, bucket in enumerate(buckets * 2)]
        for user in self._users:
            user.start()

    def go_on(self) -> None:
        for user in self._users:
            at = user.rounds
            until(lambda user=user, at=at: user.rounds > at + KEYS or user.failed, "that users go on")
        self._check()

    def ask(self, nodes: list[NodeProcess]) -> None:
        for user in self._users:
            user.clients = [client(node, ONCE) for node in nodes]

    def __enter__(self) -> Users:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for user in self._users:
            user.end()
        if kind is None:
            self._check()

    def _check(self) -> None:
        failed = [said for user in self._users for said in user.failed]
        assert not failed, "\n".join(failed)


def changes(cluster: Cluster, users: Users, until_settled: Callable[[Cluster], None]) -> None:
    """Two nodes come, one after the other; each of the first two goes, and comes back."""
    users.go_on()
    for goes in range(2):
        comes = cluster.make(*flags(cluster.root, cluster.at), *SOON)
        cluster.nodes.append(comes)
        cluster.ids = until_all_are("active", *cluster.nodes)
        until_settled(cluster)
        users.ask(cluster.nodes)
        users.go_on()
        node, asked = cluster.ids[goes], cluster.nodes[1 - goes]
        wish(asked, node, "draining")
        until(functools.partial(_has_gone, asked, node), "that it has gone")
        users.go_on()
        wish(asked, node, "active")
        until_all_are("active", *cluster.nodes)
        until_settled(cluster)
        users.go_on()


def _has_gone(asked: NodeProcess, node: str) -> bool:
    return doing(asked, node)[0] == "gone"


def test_nothing_fails_while_nodes_take_over_from_each_other(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """What no backend has is on two nodes: who goes hands it over."""
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
    keep_nothing_once(cluster)
    twice(cluster)
    until_covered(cluster)
    with Users(cluster, "own", "away") as users:
        changes(cluster, users, until_covered)


def test_nothing_fails_while_nodes_flush_and_go(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """What a node has alone it brings to the backend before it goes."""
    cluster = Cluster(node, etcd, tmp_path, 3, *SOON)
    for one in cluster.nodes:
        one.json("DELETE", "buckets/local?here=1")
        asked = {"name": "through", "url": f"file://{tmp_path / 'through'}", "freshness_s": 0}
        one.json("PUT", "buckets/through", asked)
    with Users(cluster, "back", "through") as users:
        changes(cluster, users, lambda _: None)


def test_a_write_that_its_node_began_before_it_was_drained_is_acknowledged(
    node: Make, etcd: servers.EtcdCluster, seaweed: servers.SeaweedFS, tmp_path: Path
) -> None:
    """The node asks the backend whether the object is new, and hears it only while it is drained."""
    cluster = Cluster(node, etcd, tmp_path, 2, *SOON)
    seaweed.create_bucket("drained-amid")
    relay, asked, answers = Lossy(seaweed.endpoint), threading.Event(), threading.Event()
    lake = {"name": "lake", "url": "s3://drained-amid", "write": "back"}
    for one in cluster.nodes:
        one.json("DELETE", "buckets/local?here=1")
        one.json("PUT", "buckets/lake", {**lake, "options": seaweed.options() | {"endpoint": relay.endpoint}})
    goes, (leaver, stays) = cluster.ids[0], cluster.nodes
    key = cluster.key(0, "lake")

    def holds_the_answer(line: str) -> bool:
        if line.startswith("HEAD") and key in line:
            asked.set()
            answers.wait(PATIENCE_S)
        return False

    relay.lose = holds_the_answer
    with ThreadPoolExecutor(1) as pool:
        put = client(leaver, ONCE).put_object
        written = pool.submit(put, Bucket="lake", Key=key, Body=b"amid", IfNoneMatch="*")
        try:
            assert asked.wait(PATIENCE_S), "it never asked the backend"
            wish(stays, goes, "draining")
            until(lambda: goes not in agreed(cluster).owners, "that the other is asked for every key")
            assert doing(stays, goes)[0] != "gone", "it went with a write under way"
        finally:
            answers.set()
        written.result(PATIENCE_S)
    until(functools.partial(_has_gone, stays, goes), "that it has gone")
    leaver.stop()
    found = client(stays, ONCE).get_object(Bucket="lake", Key=key)["Body"].read()
    direct = boto3.client("s3", endpoint_url=seaweed.endpoint, region_name="us-east-1", config=ONCE)
    assert found == direct.get_object(Bucket="drained-amid", Key=key)["Body"].read() == b"amid"
    relay.close()
