"""A cluster goes to zero while others write, and the next one has everything: nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import botocore.exceptions
import pytest
from botocore import UNSIGNED
from botocore.config import Config

from bench import servers
from bench.shaper import Shaper
from tests.cli.conftest import Program
from tests.node.conftest import NodeProcess, alive, pattern
from tests.node.test_cluster import cluster_of, flags, reached, until_all_are, url
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.real
Make = Callable[..., NodeProcess]
MIB = 1 << 20
ONCE = Config(signature_version=UNSIGNED, retries={"max_attempts": 1}, read_timeout=PATIENCE_S)


class Writer:
    """Goes on writing at any node, and knows what was acknowledged."""

    def __init__(self, nodes: list[NodeProcess], seed: int) -> None:
        self._clients = [
            boto3.client("s3", endpoint_url=node.endpoint, region_name="us-east-1", config=ONCE) for node in nodes
        ]
        self._chance = random.Random(seed)
        self._number = seed
        self.acknowledged: dict[str, int] = {}
        self.open: dict[str, set[int]] = {}  # asked for, without an answer that says what became of it
        self.refused = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        version = 0
        while not self._ended.is_set():
            version += 1
            key = f"{self._number}/{self._chance.randrange(40)}"
            try:
                client = self._chance.choice(self._clients)
                client.put_object(Bucket="back", Key=key, Body=body_of(key, version))
            except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError):
                self.refused += 1
                self.open.setdefault(key, set()).add(version)
            else:
                self.acknowledged[key] = version
                self.open.pop(key, None)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def body_of(key: str, version: int) -> bytes:
    return f"{key} {version} ".encode() + pattern(random.Random(f"{key}{version}").randrange(60_000), version)


def corpus(seaweed: servers.SeaweedFS) -> tuple[str, dict[str, bytes]]:
    """A bucket with something to read."""
    name = f"corpus-{uuid.uuid4().hex[:8]}"
    seaweed.create_bucket(name)
    objects = {f"small/{number}": pattern(20_000 + number, number) for number in range(20)}
    objects["large"] = pattern(40 * MIB, 5)
    backend = boto3.client("s3", endpoint_url=seaweed.endpoint, region_name="us-east-1", config=ONCE)
    for key, body in objects.items():
        backend.put_object(Bucket=name, Key=key, Body=body)
    return name, objects


def start(make: Make, root: Path, at: str, count: int) -> list[NodeProcess]:
    nodes = [make(*flags(root, at, 4.0)) for _ in range(count)]
    until_all_are("active", *nodes)
    return nodes


@pytest.fixture
def link(seaweed: servers.SeaweedFS) -> Iterator[Shaper]:
    """What is written back goes through it."""
    with Shaper(seaweed.endpoint) as shaper:
        yield shaper


def add_buckets(nodes: list[NodeProcess], seaweed: servers.SeaweedFS, link: Shaper, name: str, back: str) -> None:
    options = {"endpoint": seaweed.endpoint, "region": "us-east-1", "skip_signature": "true"}
    slowed = options | {"endpoint": link.endpoint}
    for node in nodes:
        node.add_bucket("corpus", f"s3://{name}", **options)
        bucket = {"name": "back", "url": f"s3://{back}", "write": "back", "options": slowed, "pinned": ["0/"]}
        node.json("PUT", "buckets/back", bucket)


def cached(nodes: list[NodeProcess], bucket: str) -> int:
    states = [each for node in nodes for each in node.json("GET", "status")["buckets"]]
    return sum(each["cached_bytes"] for each in states if each["name"] == bucket)


def wish_of(node: NodeProcess) -> set[str]:
    return {each["wanted"] for each in cluster_of(node)["nodes"]}


def drained(program: Program, *command: str) -> bytes:
    """What the program says; nothing if a node that gets no core for a lease is missing: then it is run again."""
    running = program.process(*command)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0 or b"is missing" in err, (out, err)
    return out if running.returncode == 0 else b""


def test_a_cluster_goes_to_zero_under_writers_and_the_next_one_is_warm(
    node: Make, etcd: servers.EtcdCluster, seaweed: servers.SeaweedFS, link: Shaper, tmp_path: Path
) -> None:
    name, objects = corpus(seaweed)
    back = f"back-{uuid.uuid4().hex[:8]}"
    seaweed.create_bucket(back)
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = start(node, tmp_path, at, 3)
    add_buckets(nodes, seaweed, link, name, back)
    for number, (key, body) in enumerate(objects.items()):
        if key != "large":
            assert nodes[number % 3].get("corpus", key) == body
    assert nodes[0].get("corpus", "large", (0, 9 * MIB)) == objects["large"][: 9 * MIB]
    writers = [Writer(nodes, seed) for seed in range(3)]
    try:
        until(lambda: all(len(writer.acknowledged) > 20 for writer in writers), "that they write")
        program = Program(nodes[0].endpoint, tmp_path / "cli")
        command = ["drain", "--all", "--manifest", "s3://corpus/.forebay/left.json"]
        link.set(latency_s=3.0)  # nobody is done before the first is killed
        with program.process(*command) as first:
            until(lambda: wish_of(nodes[1]) == {"draining"}, "that all drain")
            first.send_signal(signal.SIGKILL)
        link.set(latency_s=0.0)
        os.kill(nodes[2].children()["engine"], signal.SIGKILL)
        out = until(lambda: drained(program, *command, "--json"), "that all have gone")
    finally:
        for writer in writers:
            writer.end()
    for each in nodes:
        assert each.process is not None
        assert each.process.wait(PATIENCE_S) == 0, "all have stopped by themselves"

    backend = boto3.client("s3", endpoint_url=seaweed.endpoint, region_name="us-east-1", config=ONCE)
    for writer in writers:
        assert writer.refused, "it went on until there was nobody"
        for key, version in writer.acknowledged.items():
            body = backend.get_object(Bucket=back, Key=key)["Body"].read()
            possible = {version, *writer.open.get(key, ())}
            assert body in [body_of(key, each) for each in possible], (key, possible)
    told = json.loads(out)
    assert told == json.loads(backend.get_object(Bucket=name, Key=".forebay/left.json")["Body"].read())
    assert {bucket["name"]: bucket.get("pinned") for bucket in told["buckets"]} == {"back": ["0/"], "corpus": None}
    named = {key: (size, spans) for bucket, key, size, _, spans in told["warm"] if bucket == "corpus"}
    assert set(named) == set(objects)
    assert named["large"][1], "not all of it was cached"
    assert sum(end - start for start, end in named["large"][1]) < 24 * MIB

    again = start(node, tmp_path, url(etcd.addresses, uuid.uuid4().hex), 2)
    there = {"name": "corpus", "url": f"s3://{name}"}
    options = {"endpoint": seaweed.endpoint, "region": "us-east-1", "skip_signature": "true"}
    again[0].json("PUT", "buckets/corpus", {**there, "freshness_s": 1e18, "options": options})
    said = Program(again[0].endpoint, tmp_path / "cli")("rewarm", "s3://corpus/.forebay/left.json")
    assert said.stdout.count("rewarmed by s3://corpus/.forebay/left.json: ") == 2, said.stdout
    want = sum(sum(end - start for start, end in spans) or size for size, spans in named.values())
    assert want <= cached(again, "corpus") <= want + 3 * 4 * MIB, "each byte once, in whole blocks"
    assert all(each.json("GET", "buckets/back")["pinned"] == ["0/"] for each in again)
    before = sum(each.metric("forebay_backend_read_bytes_total") for each in again)
    for key, body in objects.items():
        if key != "large":
            assert again[1].get("corpus", key) == body
    assert sum(each.metric("forebay_backend_read_bytes_total") for each in again) == before, "they are here"
    for writer in writers:
        for key, version in writer.acknowledged.items():
            possible = {version, *writer.open.get(key, ())}
            assert again[0].get("back", key) in [body_of(key, each) for each in possible]
    second_time = Program(again[1].endpoint, tmp_path / "cli")("rewarm", "s3://corpus/.forebay/left.json")
    assert ", 0 B" in second_time.stdout, second_time.stdout


def test_what_would_be_lost_keeps_the_nodes(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = start(node, tmp_path, at, 2)
    root, corpus_root = tmp_path / "root", tmp_path / "corpus"
    for folder in (root, corpus_root):
        folder.mkdir()
    for each in nodes:
        each.json("PUT", "buckets/back", {"name": "back", "url": f"file://{root}", "write": "back"})
        each.json("PUT", "buckets/local", {"name": "local", "url": "local://", "write": "local"})
        each.add_bucket("corpus", f"file://{corpus_root}")
    program = Program(nodes[0].endpoint, tmp_path / "cli")
    place = "s3://corpus/left.json"

    def refused(words: str, code: int) -> None:
        assert words in " ".join(program("drain", "--all", "--manifest", place, code=code).stderr.split())
        assert wish_of(nodes[0]) == {"active"}, "nothing has begun"

    until(lambda: nodes[0].ask("PUT", "/local/only", body=b"here")[0] == 200)
    refused("has no backend, and its objects are on nodes alone", 5)
    assert nodes[0].ask("DELETE", "/local/only")[0] == 204
    root.rename(tmp_path / "away")
    until(lambda: nodes[1].ask("PUT", "/back/key", body=b"dirty")[0] == 200)
    refused("are only there, and the backend does not take them", 6)
    (tmp_path / "away").rename(root)
    place = "s3://local/left.json"
    refused("would go with the nodes", 2)
    for wrong in (["--all"], ["--all", "x", "--manifest", "s3://corpus/y"], ["--manifest", "s3://corpus/y"], []):
        program("drain", *wrong, code=2)
    assert nodes[0].ask("POST", "/-/v1/cluster/stop")[0] == 409
    (corpus_root / "other.json").write_bytes(b"{}")
    place = "s3://corpus/other.json"
    program("rewarm", place, code=2)
    refused("is something else", 5)

    # what goes wrong later keeps the nodes that have it, and is said
    until(lambda: nodes[1].json("GET", "status")["buckets"][0]["dirty_objects"] == 0)
    (root / "blocked" / "by").mkdir(parents=True)
    until(lambda: nodes[1].ask("PUT", "/back/blocked", body=b"still dirty")[0] == 200)
    running = program.process("drain", "--all", "--manifest", "s3://corpus/left.json", stderr=subprocess.STDOUT)
    assert running.stdout is not None
    line = running.stdout.readline()
    assert b"the node stays until then" in line, line
    assert all(alive(each.process.pid) for each in nodes if each.process is not None)
    assert not (corpus_root / "left.json").exists()
    (root / "blocked" / "by").rmdir()
    (root / "blocked").rmdir()
    said = running.communicate(timeout=PATIENCE_S)[0].decode()
    assert running.returncode == 0, said
    assert "is gone: s3://corpus/left.json names" in said
    assert (root / "blocked").read_bytes() == b"still dirty"


def test_a_cluster_that_drains_is_taken_back(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    nodes = start(node, tmp_path, url(etcd.addresses, uuid.uuid4().hex), 2)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "key").write_bytes(b"bytes")
    for each in nodes:
        each.add_bucket("corpus", f"file://{tmp_path / 'corpus'}")
    program = Program(nodes[0].endpoint, tmp_path / "cli")
    for each in nodes:
        program("drain", cluster_of(each)["node_id"])
    until_all_are("gone", *nodes)
    assert nodes[1].get("corpus", "key") == b"bytes", "they run on, and serve what is read"
    assert "taken back: 2 nodes" in program("drain", "--all", "--undo").stdout
    until_all_are("active", *nodes)

    # two at once: one of them writes the manifest
    command = [sys.executable, "-m", "forebay.cli.main", "drain", "--all", "--manifest", "s3://corpus/left"]
    both = [
        subprocess.Popen([*command, "--url", each.endpoint], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for each in nodes
    ]
    ends = [one.communicate(timeout=PATIENCE_S) for one in both]
    assert 0 in [one.returncode for one in both], ends
    assert json.loads((tmp_path / "corpus" / "left").read_bytes())["format"] == "forebay manifest 1"
    assert all(each.process is not None and each.process.wait(PATIENCE_S) == 0 for each in nodes)


def test_a_rewarm_goes_on_after_its_engine_is_killed(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    count, size_bytes = 1500, 90_000
    (tmp_path / "corpus").mkdir()
    for number in range(count):
        (tmp_path / "corpus" / f"object-{number}").write_bytes(pattern(size_bytes, number % 7))
    before = start(node, tmp_path, url(etcd.addresses, uuid.uuid4().hex), 1)
    before[0].add_bucket("corpus", f"file://{tmp_path / 'corpus'}")
    first = Program(before[0].endpoint, tmp_path / "cli")
    first("prefetch", "corpus")
    first("drain", "--all", "--manifest", "s3://corpus/left.json")

    (after,) = start(node, tmp_path, url(etcd.addresses, uuid.uuid4().hex), 1)
    after.add_bucket("corpus", f"file://{tmp_path / 'corpus'}")
    Program(after.endpoint, tmp_path / "cli")("rewarm", "--no-wait", "s3://corpus/left.json")
    until(lambda: cached([after], "corpus") > 20 * size_bytes, "that it has begun")
    os.kill(after.children()["engine"], signal.SIGKILL)
    until(lambda: reached(after) and cached([after], "corpus") == count * size_bytes, "that all is here")
    (job,) = until(lambda: [each for each in after.json("GET", "jobs") if each["state"] == "done"])
    assert (job["verb"], job["units_done"], job["units_failed"]) == ("rewarm", count, 0)
