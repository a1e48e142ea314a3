"""A cluster is upgraded node by node, from an earlier release that is really run, without a request that fails."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config

from bench import servers
from forebay.core.cluster.records import NODES, PROTOCOL, NodeRecord, encoded
from forebay.meta.etcd import EtcdMeta
from tests.cli.conftest import Program
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import cluster_of, flags, is_ready, meta, takes_writes, until_all_are, url
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
EARLIER = "f6aec76"  # maps without `held`, records without `protocol`, jobs without `share`
Make = Callable[..., NodeProcess]
THROUGH = {"name": "through", "freshness_s": 0.0}  # so that every node asks each time
PATIENT = Config(signature_version=UNSIGNED, retries={"max_attempts": 8, "mode": "standard"}, read_timeout=PATIENCE_S)


def earlier(folder: Path) -> dict[str, str]:
    """The environment in which `python -m forebay.node` is the earlier release."""
    run = subprocess.run(["git", "-C", str(ROOT), "archive", EARLIER, "src"], capture_output=True)
    if run.returncode:
        pytest.skip(f"the history of this checkout does not go back to {EARLIER}")
    with tarfile.open(fileobj=io.BytesIO(run.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return {"PYTHONPATH": str(folder / "src")}


class Balancer:
    """Sends each request to a node that says it is ready, as a load balancer does."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self.away = set[int]()
        self.clients = [self.client_of(node) for node in nodes]
        self.under_way, self.lock = Counter[int](), threading.Lock()

    @staticmethod
    def client_of(node: NodeProcess) -> object:
        """Made in the test's own thread: boto3 walks through the environment, which a program's run changes."""
        return boto3.client("s3", endpoint_url=node.endpoint, region_name="us-east-1", config=PATIENT)

    @contextmanager
    def client(self, chance: random.Random) -> Iterator[object]:
        with self.lock:
            number = chance.choice([n for n in range(len(self.clients)) if n not in self.away])
            self.under_way[number] += 1
        try:
            yield self.clients[number]
        finally:
            with self.lock:
                self.under_way[number] -= 1


class Load:
    """Writes and reads through the balancer; remembers what failed and what was wrong."""

    def __init__(self, balancer: Balancer, seed: int) -> None:
        self.balancer, self.chance, self.seed = balancer, random.Random(seed), seed
        self.versions: dict[tuple[str, str], int] = {}
        self.requests = 0
        self.failed: list[str] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.ended.is_set():
            name = (self.chance.choice(("back", "through")), f"{self.seed}/{self.chance.randrange(30)}")
            try:
                self.one(*name)
            except Exception as error:  # whatever it is, it is a request that failed
                self.failed.append(f"{name}: {error!r}")
            self.requests += 1

    def one(self, bucket: str, key: str) -> None:
        version = self.versions.get((bucket, key), 0)
        with self.balancer.client(self.chance) as s3:
            if version and self.chance.random() < 0.5:
                body = s3.get_object(Bucket=bucket, Key=key)["Body"].read()  # type: ignore[attr-defined]
                assert body == self.body(key, version), "what was acknowledged last"
                return
            s3.put_object(Bucket=bucket, Key=key, Body=self.body(key, version + 1))  # type: ignore[attr-defined]
        self.versions[bucket, key] = version + 1

    def body(self, key: str, version: int) -> bytes:
        return f"{key} {version} ".encode() + pattern(len(key) * 3000, version)


def test_nodes_are_upgraded_one_by_one_and_no_request_fails(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    old = earlier(tmp_path / "earlier")
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at), environment=old) for _ in range(3)]
    until_all_are("active", *nodes)
    for name in ("back", "through"):
        (tmp_path / name).mkdir()
    for each in nodes:
        each.json("PUT", "buckets/through", {**THROUGH, "url": f"file://{tmp_path / 'through'}"})
        each.json("PUT", "buckets/back", {"name": "back", "url": f"file://{tmp_path / 'back'}", "write": "back"})
    for each in nodes:
        until(lambda each=each: takes_writes(each, "first"))
    balancer = Balancer(nodes)
    loads = [Load(balancer, seed) for seed in range(3)]
    try:
        for number, each in enumerate(nodes):
            until(lambda: all(load.requests > 20 for load in loads))
            other = nodes[number - 1]
            program = Program(other.endpoint, tmp_path / "cli")
            id_of_it = cluster_of(each)["node_id"]
            balancer.away.add(number)  # a balancer sees that it is not ready any more
            assert "is gone" in program("drain", id_of_it).stdout
            until(lambda number=number: not balancer.under_way[number], "that what was sent to it is answered")
            each.stop()
            again = node(*flags(tmp_path, at), dir=each.dir)  # this release, in the same directory
            nodes[number] = again
            program("drain", id_of_it, "--undo")
            until(lambda again=again: is_ready(again))
            balancer.clients[number] = balancer.client_of(again)
            balancer.away.discard(number)
            for load in loads:
                load.requests = 0
        until(lambda: all(load.requests > 20 for load in loads))
    finally:
        for load in loads:
            load.ended.set()
            load.thread.join()
    assert not [text for load in loads for text in load.failed], loads[0].failed
    releases = {state["release"] for each in nodes for state in cluster_of(each)["nodes"]}
    assert "" not in releases, "all say what they are by now"
    program = Program(nodes[0].endpoint, tmp_path / "cli")
    program("flush")
    for load in loads:
        for (bucket, key), version in load.versions.items():
            assert (tmp_path / bucket / key).read_bytes() == load.body(key, version)


def test_a_release_too_far_is_named_and_stays_out(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    name = uuid.uuid4().hex

    async def plant(store: EtcdMeta) -> None:
        later = NodeRecord("http://10.0.0.9:9400", 1e9, protocol=PROTOCOL + 2, release="9.9")
        await store.put(NODES + "feedfeed00000000", encoded(later))

    meta(etcd.addresses, name, plant)
    one = node(*flags(tmp_path, url(etcd.addresses, name)))
    (tmp_path / "back").mkdir()
    one.json("PUT", "buckets/back", {"name": "back", "url": f"file://{tmp_path / 'back'}", "write": "back"})
    trouble = until(lambda: cluster_of(one)["trouble"])
    assert f"node feedfeed00000000 speaks protocol {PROTOCOL + 2} (its release is 9.9)" in trouble
    assert "install a release next to that one here" in trouble
    until(lambda: not is_ready(one))
    assert not takes_writes(one)
    Program(one.endpoint, tmp_path / "cli")("drain", "feedfeed", "--give-up")
    until_all_are("active", one)
    until(lambda: takes_writes(one))
