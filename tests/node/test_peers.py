"""Nodes that ask each other before they ask the backend: one cold object costs it its bytes once, whatever happens."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config

from bench import servers
from forebay.client.sync import connect
from forebay.core.placement import Members
from forebay.core.types import Bucket
from tests.node import certificates
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags, until_all_are, url
from tests.patience import until

Make = Callable[..., NodeProcess]
MIB = 1 << 20
TURNS_MAX = 10
SIZES = {"empty": 0, "small": 5_000, "one": MIB, "blocks": 9 * MIB + 17, "large": 20 * MIB}


def fill(root: Path) -> dict[str, bytes]:
    root.mkdir()
    bodies = {key: pattern(size, seed) for seed, (key, size) in enumerate(SIZES.items())}
    for key, body in bodies.items():
        (root / key).write_bytes(body)
    return bodies


def home_of(node: NodeProcess, key: str) -> str:
    nodes = node.json("GET", "map")["nodes"]
    return Members({each["node_id"]: each["weight"] for each in nodes}).first("corpus", key)


def spent(nodes: list[NodeProcess]) -> tuple[float, float]:
    """Bytes that came from the backend, and from peers, relayed ones too."""
    names = ("forebay_backend_read_bytes_total", "forebay_peer_read_bytes_total", "forebay_relayed_bytes_total")
    backend, peers, relayed = (sum(one.metric(name) for one in nodes) for name in names)
    return backend, peers + relayed


def read(nodes: list[NodeProcess], bodies: dict[str, bytes]) -> None:
    """Every node reads every object, all at once."""
    asked = [(node, key) for key in bodies for node in nodes]
    with ThreadPoolExecutor(len(asked)) as pool:
        for (_, key), body in zip(asked, pool.map(lambda one: one[0].get("corpus", one[1]), asked), strict=True):
            assert body == bodies[key]


def test_what_all_nodes_read_at_once_costs_the_backend_its_bytes_once(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    bodies = fill(tmp_path / "bucket")
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at)) for _ in range(3)]
    ids = until_all_are("active", *nodes)
    for one in nodes:
        one.add_bucket("corpus", f"file://{tmp_path / 'bucket'}")
    costs = []
    for turn in range(TURNS_MAX):  # a home that gets no processor for seconds is passed over: then it is no such turn
        fresh = {f"{turn}-{key}": body for key, body in bodies.items()}
        for key, body in fresh.items():
            (tmp_path / "bucket" / key).write_bytes(body)
        before = spent(nodes)
        read(nodes, fresh)
        costs.append([(now - then) / sum(SIZES.values()) for then, now in zip(before, spent(nodes), strict=True)])
        if costs[-1][0] <= 1.02 and costs[-1][1] >= 1.98:
            break
    else:
        pytest.fail(f"by the backend and by peers, in sizes of what was read: {costs}")

    # a request of a node that goes by another map is refused, and nobody's cold read depends on it
    first = nodes[0]
    its = next(f"its-{number}" for number in range(1000) if home_of(first, f"its-{number}") == ids[0])
    (tmp_path / "bucket" / its).write_bytes(bodies["small"])

    def asked_as(node_id: str, later: int = 0, **more: str) -> int:
        epoch = first.json("GET", "status")["cluster"]["epoch"]
        return first.ask("GET", f"/corpus/{its}", {"x-forebay-peer": f"{node_id} {epoch + later}", **more})[0]

    assert asked_as(ids[0], 1000) == asked_as(ids[1]) == 503
    assert asked_as(ids[0], 1000, **{"x-forebay-again": "1"}) == 421, "to one of a release that knows it"
    until(lambda: asked_as(ids[0]) == 200)

    # a home that hangs, that has another version, and that does not know the bucket
    key = next(f"late-{number}" for number in range(1000) if home_of(first, f"late-{number}") == ids[1])
    (tmp_path / "bucket" / key).write_bytes(bodies["one"])
    engine = nodes[1].children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    try:
        assert first.get("corpus", key) == bodies["one"]
    finally:
        os.kill(engine, signal.SIGCONT)
    until(lambda: until_all_are("active", *nodes))
    old = next(f"old-{number}" for number in range(1000) if home_of(first, f"old-{number}") == ids[1])
    (tmp_path / "bucket" / old).write_bytes(bodies["one"])
    assert nodes[1].get("corpus", old) == bodies["one"]
    (tmp_path / "bucket" / old).write_bytes(bodies["blocks"])
    assert first.get("corpus", old) == bodies["blocks"]
    nodes[1].json("DELETE", "buckets/corpus?here=1")
    gone = next(f"gone-{number}" for number in range(1000) if home_of(first, f"gone-{number}") == ids[1])
    (tmp_path / "bucket" / gone).write_bytes(bodies["one"])
    assert first.get("corpus", gone) == bodies["one"]


def test_a_corpus_that_fits_the_cluster_but_no_node_stays_in_it(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Copies of what others are the home of leave first, also of what a node had before it started anew."""
    (tmp_path / "bucket").mkdir()
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at), "--capacity", "30MiB") for _ in range(3)]
    ids = until_all_are("active", *nodes)
    for one in nodes:
        one.add_bucket("corpus", f"file://{tmp_path / 'bucket'}")
    owned: dict[str, list[str]] = {node_id: [] for node_id in ids}
    for name in (f"{number:05d}" for number in range(10_000)):
        if len(mine := owned[home_of(nodes[0], name)]) < 24:
            mine.append(name)
            (tmp_path / "bucket" / name).write_bytes(pattern(MIB, int(name)))
        if all(len(keys) == 24 for keys in owned.values()):
            break
    corpus, chance = [name for mine in owned.values() for name in mine], random.Random(1)

    def epoch() -> float:
        """The nodes read the corpus together, each a third, in a new order; what the backend sent, over the corpus."""
        chance.shuffle(corpus)
        before, _ = spent(nodes)
        for number, key in enumerate(corpus):
            assert nodes[number % 3].get("corpus", key) == pattern(MIB, int(key))
        return (spent(nodes)[0] - before) / (len(corpus) * MIB)

    assert epoch() >= 0.99
    assert min(epoch() for _ in range(3)) == 0, "a home that gets no processor for seconds is passed over, but seldom"
    nodes[0].stop()
    nodes[0].start()
    until_all_are("active", *nodes)
    assert min(epoch() for _ in range(4)) == 0


TOKEN = "token-of-ops"
WHO = {"Authorization": f"Bearer {TOKEN}"}


def asked(node: NodeProcess, method: str, target: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    status, answer = node.ask(method, target, {**WHO, "Content-Type": "application/json"}, data)
    assert status < 300, answer
    return answer


def state_of(node: NodeProcess) -> dict[str, object]:
    found: dict[str, object] = json.loads(asked(node, "GET", "/-/v1/status"))["cluster"]
    return found


def peer_bytes(node: NodeProcess) -> float:
    text = asked(node, "GET", "/-/metrics").decode()
    return sum(map(float, re.findall(r'^forebay_peer_read_bytes_total\{bucket="corpus"\} (.*)$', text, re.MULTILINE)))


def test_nodes_prove_who_they_are_and_a_stranger_gets_nothing(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    bodies = fill(tmp_path / "bucket")
    identities = tmp_path / "identities.json"
    ops = {"name": "ops", "allow": "admin:*", "token": TOKEN}
    writer = {"name": "writer", "allow": "read:*,write:*", "access_key_id": "WRITER", "secret_access_key": "w" * 32}
    identities.write_text(json.dumps({"identities": [ops, writer]}))
    identities.chmod(0o600)
    keys = [tmp_path / "peer.key", tmp_path / "other.key"]
    for file in keys:
        file.write_text(uuid.uuid4().hex + uuid.uuid4().hex)
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [
        node(*flags(tmp_path, at), "--identities", str(identities), "--peer-key", str(file))
        for file in (keys[0], keys[0], keys[1])
    ]

    def all_active() -> bool:
        seen = [state_of(one) for one in nodes]
        return all([each["state"] for each in one["nodes"]] == ["active"] * 3 for one in seen)  # type: ignore[attr-defined]

    until(all_active)
    for one in nodes:
        bucket = {"name": "corpus", "url": f"file://{tmp_path / 'bucket'}", "freshness_s": 1e18}
        asked(one, "PUT", "/-/v1/buckets/corpus", bucket)
    for key, body in bodies.items():
        for one in nodes:
            assert asked(one, "GET", f"/-/v1/objects/corpus/{key}") == body
    many = [f"key-{number}" for number in range(24)]
    for key in many:
        (tmp_path / "bucket" / key).write_bytes(bodies["small"])
        for one in nodes:
            assert asked(one, "GET", f"/-/v1/objects/corpus/{key}") == bodies["small"]
    assert peer_bytes(nodes[0]) > 0, "of the second, which has the same key"
    assert peer_bytes(nodes[1]) > 0
    assert peer_bytes(nodes[2]) == 0, "nobody takes its key, and it asks the backend"

    for one in nodes:
        asked(one, "PUT", "/-/v1/buckets/local", {"name": "local", "url": "local://", "write": "local"})
    ids = [state_of(one)["node_id"] for one in nodes]
    members = Members(
        {each["node_id"]: each["weight"] for each in json.loads(asked(nodes[0], "GET", "/-/v1/map"))["nodes"]}
    )
    names = (f"key-{number}" for number in range(1000))
    key = next(key for key in names if list(members.order("local", key))[:2] == ids[:2])  # these two know each other

    def write(one: NodeProcess, headers: dict[str, str]) -> int:
        return one.ask("PUT", f"/-/v1/objects/local/{key}", headers, bodies["small"])[0]

    until(lambda: write(nodes[1], WHO) == 200, "that a home takes what another node was given")
    assert asked(nodes[0], "GET", f"/-/v1/objects/local/{key}") == bodies["small"]
    assert asked(nodes[1], "GET", f"/-/v1/objects/local/{key}") == bodies["small"]
    assert write(nodes[2], WHO) == 403, "nobody takes its key, and it does not act alone"
    assert write(nodes[1], {}) == 403

    for headers in ({}, {"x-forebay-peer": "anything"}):
        status, answer = nodes[0].ask("GET", "/corpus/small", headers)
        assert status in (403, 503), answer
    stranger = boto3.client(
        "s3",
        endpoint_url=nodes[0].endpoint,
        region_name="us-east-1",
        aws_access_key_id="FOREBAYPEERNODES",
        aws_secret_access_key=keys[0].read_text(),  # the file's own text is no secret of S3
        config=Config(retries={"max_attempts": 0}),
    )
    with pytest.raises(botocore.exceptions.ClientError, match="SignatureDoesNotMatch"):
        stranger.get_object(Bucket="corpus", Key="small")
    passed_off(nodes[0], ids[0], key)


def passed_off(node: NodeProcess, node_id: str, key: str) -> None:
    """Who may read and write is no node for that: a request between nodes is theirs alone."""
    epoch = json.loads(asked(node, "GET", "/-/v1/status"))["cluster"]["epoch"]
    one = boto3.client(
        "s3",
        endpoint_url=node.endpoint,
        region_name="us-east-1",
        aws_access_key_id="WRITER",
        aws_secret_access_key="w" * 32,
        config=Config(retries={"max_attempts": 0}),
    )
    assert one.get_object(Bucket="local", Key=key)["Body"].read()

    def pass_off(request: Any, **_: Any) -> None:
        request.headers["x-forebay-peer"] = f"{node_id} {epoch}"

    one.meta.events.register("before-sign.s3", pass_off)
    for ask in (
        lambda: one.get_object(Bucket="local", Key=key),
        lambda: one.put_object(Bucket="local", Key=key, Body=b"another"),
        lambda: one.put_object(Bucket="local", Key=key, Body=bytes(MIB)),
        lambda: one.list_objects_v2(Bucket="local"),
        lambda: one.delete_object(Bucket="local", Key=key),
    ):
        with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
            ask()


def test_nodes_that_speak_tls_trust_whom_the_operator_names(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Two have certificates of the same authority; who does not trust it asks the backend, and nothing fails."""
    bodies = fill(tmp_path / "bucket")
    authority = certificates.make(tmp_path / "tls", "authority")
    pair = certificates.make(tmp_path / "tls", "node", by=authority)
    at = url(etcd.addresses, uuid.uuid4().hex)
    tls = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    nodes = [node(*flags(tmp_path, at), *tls, *trust) for trust in (("--peer-ca", str(authority.cert)), ())]
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(one.endpoint, ca=str(authority.cert))) for one in nodes]

        def active() -> bool:
            states = [client.status().cluster for client in clients]
            return all(state and [each.state for each in state.nodes] == ["active"] * 2 for state in states)

        until(active)
        for client in clients:  # if its objects never changed, clients would go to owners themselves
            client.bucket_put(Bucket("corpus", f"file://{tmp_path / 'bucket'}", freshness_s=60.0))

        for number in range(24):
            (tmp_path / "bucket" / f"key-{number}").write_bytes(bodies["small"])
            for client in clients:
                assert client.get("corpus", f"key-{number}") == bodies["small"]
        name = 'forebay_peer_read_bytes_total{bucket="corpus"}'
        trusting, other = (client.metrics().values.get(name, 0.0) for client in clients)
        assert trusting > 0
        assert other == 0, "it was not told to trust the first's certificate"


def test_what_moves_on_a_join_and_a_drain_comes_from_the_nodes_that_have_it(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """The backend is asked what is there, and sends no bytes of what any node has."""
    (tmp_path / "bucket").mkdir()
    bodies = {f"key-{number}": pattern(40_000 + 600_000 * (number % 4), number) for number in range(24)}
    for key, body in bodies.items():
        (tmp_path / "bucket" / key).write_bytes(body)
    at = url(etcd.addresses, uuid.uuid4().hex)

    def started() -> NodeProcess:
        one = node(*flags(tmp_path, at))
        one.add_bucket("corpus", f"file://{tmp_path / 'bucket'}")
        return one

    nodes = [started()]
    until_all_are("active", *nodes)
    read(nodes, bodies)
    for _ in range(2):
        nodes.append(started())
        (*_, newest) = until_all_are("active", *nodes)
        own = [key for key in bodies if home_of(nodes[0], key) == newest]
        assert own
        for _ in range(TURNS_MAX):  # a peer that gets no processor for seconds is passed over: then it is no such turn
            before = spent(nodes)
            read(nodes[-1:], bodies)
            backend, peers = (now - then for now, then in zip(spent(nodes), before, strict=True))
            if (backend, peers) == (0, sum(map(len, bodies.values()))):
                break
            job = nodes[-1].json("POST", "evict", {"bucket": "corpus"})["job"]
            until(lambda job=job, one=nodes[-1]: one.json("GET", f"jobs/{job}")["state"] != "running")
        else:
            pytest.fail(f"by the backend and by peers: {backend, peers}")

    # what only a drained node has, whose process still runs
    ids = until_all_are("active", *nodes)
    keys = (key for number in range(1000) if home_of(nodes[0], key := f"late-{number}") == ids[0])
    owned = {key: pattern(300_000, number) for number, key in enumerate(islice(keys, 4))}
    for key, body in owned.items():
        (tmp_path / "bucket" / key).write_bytes(body)
    read(nodes[:1], owned)
    nodes[1].json("POST", "cluster/wish", {"node": ids[0], "wish": "draining"})
    until_all_are("gone", *nodes[1:], count=1)
    until(lambda: home_of(nodes[1], next(iter(owned))) != ids[0])
    before = nodes[0].metric("forebay_read_bytes_total")
    read(nodes[1:2], owned)
    assert nodes[0].metric("forebay_read_bytes_total") > before, "it gave what it has"

    # once it is stopped, and where nobody has them, the backend is asked
    nodes[0].stop()
    fresh = {f"fresh-{number}": pattern(5_000, number) for number in range(8)}
    for key, body in fresh.items():
        (tmp_path / "bucket" / key).write_bytes(body)
    read(nodes[1:], fresh)
