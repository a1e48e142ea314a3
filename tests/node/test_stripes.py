"""Large objects lie in stripes over the nodes: whoever reads one reads it from all of them, and of one version."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from bench import servers
from forebay.aio import connect as connect_async
from forebay.client.sync import Client, connect
from forebay.core.errors import Precondition
from forebay.core.limits import BLOCK_BYTES, MIB, STRIPE_BYTES
from forebay.core.placement import Members
from forebay.core.types import RangeSpec
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags, until_all_are, url
from tests.patience import until

Make = Callable[..., NodeProcess]
SIZE = 6 * STRIPE_BYTES + 3 * MIB + 17
TURNS_MAX = 5  # a home that gets no processor for seconds is passed over: then it is no such turn


@pytest.fixture
def nodes(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> list[NodeProcess]:
    """Three that serve one directory; `keep` never changes, `look` is looked at each time it is a minute old."""
    (tmp_path / "bucket").mkdir()
    at = url(etcd.addresses, uuid.uuid4().hex)
    made = [node(*flags(tmp_path, at)) for _ in range(3)]
    until_all_are("active", *made)
    for one in made:
        one.add_bucket("keep", f"file://{tmp_path / 'bucket'}")
        one.add_bucket("look", f"file://{tmp_path / 'bucket'}", freshness_s=60.0)
    return made


def held(node: NodeProcess, bucket: str, key: str) -> int:
    """How many bytes of the object are on the node."""
    state = node.json("GET", f"stat/{bucket}/{key}")
    return int(state["cached_bytes"])


def owned(nodes: list[NodeProcess], bucket: str, key: str) -> list[int]:
    """How many bytes of an object of SIZE each node is the home of."""
    known = nodes[0].json("GET", "map")["nodes"]
    ids = [one.json("GET", "status")["cluster"]["node_id"] for one in nodes]
    members = Members({each["node_id"]: each["weight"] for each in known})
    cuts = [*range(0, SIZE, STRIPE_BYTES), SIZE]
    sizes = dict.fromkeys(ids, 0)
    for stripe, (start, end) in enumerate(pairwise(cuts)):
        sizes[members.owner(bucket, key, stripe)] += end - start
    return [sizes[each] for each in ids]


def spent(nodes: list[NodeProcess]) -> float:
    return sum(one.metric("forebay_backend_read_bytes_total") for one in nodes)


def reader_of(node: NodeProcess, bucket: str) -> Client:
    """A client that knows the map."""
    client = connect(node.endpoint)
    for _ in range(4):
        client.get(bucket, "small")
    return client


def test_a_large_object_is_read_from_all_nodes_and_each_holds_its_stripes(
    nodes: list[NodeProcess], tmp_path: Path
) -> None:
    body = pattern(SIZE, 1)
    (tmp_path / "bucket" / "small").write_bytes(b"small")
    for bucket in ("keep", "look"):
        with reader_of(nodes[0], bucket) as client:
            for turn in range(TURNS_MAX):
                key = f"of-{bucket}-{turn}"
                (tmp_path / "bucket" / key).write_bytes(body)
                before = spent(nodes)
                assert client.get(bucket, key) == body
                shares, own = [held(one, bucket, key) for one in nodes], owned(nodes, bucket, key)
                # the first answer was given up: what it read of blocks in progress was for nothing
                more = [share - mine for share, mine in zip(shares, own, strict=True)]
                exact = bucket == "look" or max(more) <= 2 * BLOCK_BYTES
                if min(more) >= 0 and exact and spent(nodes) - before <= SIZE + 2 * BLOCK_BYTES:
                    break
            else:
                pytest.fail(f"nodes hold {shares} and own {own}, and the bucket gave {spent(nodes) - before} bytes")
            assert min(own) >= 2 * STRIPE_BYTES, "all take part"

            # every way to read it, at once, from what the nodes have
            buffer = bytearray(SIZE + 10)
            start, end = STRIPE_BYTES - 5, 5 * STRIPE_BYTES + 7
            with open(tmp_path / "fd", "wb") as file:
                client.get_to_fd(bucket, key, file.fileno())
            assert (tmp_path / "fd").read_bytes() == body
            got = client.get_into(bucket, key, buffer)
            assert (buffer[:SIZE], got.size_bytes, got.body_bytes) == (body, SIZE, SIZE)
            assert client.get(bucket, key, range=RangeSpec(start, end - 1)) == body[start:end]
            assert client.get(bucket, key, range=RangeSpec(end, None)) == body[end:]
            assert client.get(bucket, key, range=RangeSpec(None, 9)) == body[-9:]
            client.download(bucket, key, str(tmp_path / "copy"))
            assert (tmp_path / "copy").read_bytes() == body
            with client.open(bucket, key) as reader:
                pieces = list(iter(lambda: reader.read(5 * MIB), b""))
                reader.seek(3)
                assert b"".join(pieces) == body == body[:3] + reader.read()
            assert spent(nodes) - before <= SIZE + 2 * BLOCK_BYTES

            async def story(bucket: str = bucket, key: str = key) -> None:
                async with connect_async(nodes[1].endpoint) as client:
                    for _ in range(4):
                        await client.get(bucket, "small")
                    assert await client.get(bucket, key) == body

            asyncio.run(story())


def test_any_node_gets_each_stripe_from_its_home(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """Whoever asks one node by S3: the node asks each stripe's home, and the bucket gives its bytes once."""
    body = pattern(SIZE, 2)
    (tmp_path / "bucket" / "large").write_bytes(body)
    for turn in range(TURNS_MAX):
        (tmp_path / "bucket" / f"large-{turn}").write_bytes(body)
        before = spent(nodes)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda one, key=f"large-{turn}": one.get("keep", key), nodes))
        assert all(each == body for each in found)
        if spent(nodes) - before <= 1.02 * SIZE:
            break
    else:
        pytest.fail("the bucket gave bytes more than once")
    span = (2 * STRIPE_BYTES - 5 * MIB, 4 * STRIPE_BYTES + 3)
    assert nodes[0].get("keep", "large", span) == body[span[0] : span[1]]


def test_no_read_fails_though_an_owner_dies_hangs_or_leaves(nodes: list[NodeProcess], tmp_path: Path) -> None:
    body = pattern(SIZE, 3)
    digest = hashlib.sha256(body).digest()
    (tmp_path / "bucket" / "small").write_bytes(b"small")
    (tmp_path / "bucket" / "large").write_bytes(body)
    with reader_of(nodes[0], "keep") as client:

        def read(meanwhile: Callable[[], None]) -> None:
            path, done = tmp_path / "sink", [False]

            def progress(_size: int) -> None:
                if not done[0]:
                    done[0] = True
                    meanwhile()

            with open(path, "wb") as file:
                client.get_to_fd("keep", "large", file.fileno(), progress=progress)
            assert hashlib.sha256(path.read_bytes()).digest() == digest

        read(lambda: None)
        engine = nodes[2].children()["engine"]
        os.kill(engine, signal.SIGSTOP)  # what it has its front still serves
        try:
            read(lambda: None)
        finally:
            with suppress(ProcessLookupError):  # on a busy machine its supervisor may have replaced it
                os.kill(engine, signal.SIGCONT)
        until(lambda: nodes[2].children().get("engine", 0))
        children = list(nodes[2].children().values())

        def kill() -> None:
            assert nodes[2].process is not None
            nodes[2].process.kill()
            nodes[2].process.wait()
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        read(kill)
        read(lambda: None)
        nodes[2].start()
        until_all_are("active", *nodes)
        read(lambda: None)


def test_versions_are_never_mixed(nodes: list[NodeProcess], tmp_path: Path) -> None:
    """The object changes under reads, and owners notice at different times: each read is of one version or fails."""
    place = tmp_path / "bucket" / "large"
    (tmp_path / "bucket" / "small").write_bytes(b"small")
    bodies = [pattern(SIZE, 10 + turn) for turn in range(4)]
    place.write_bytes(bodies[0])
    with reader_of(nodes[0], "look") as client:
        assert client.get("look", "large") == bodies[0]
        for body in bodies[1:]:
            (tmp_path / "next").write_bytes(body)
            os.replace(tmp_path / "next", place)
            nodes[0].json("GET", "stat/look/large?revalidate=1")
            assert client.get("look", "large") == body, "the own node's word counts, whatever owners hold"
        etag = client.head("look", "large").etag

        path = tmp_path / "fd"
        with open(path, "wb") as file:
            once = iter([True])

            def change(_size: int) -> None:
                if next(once, False):
                    (tmp_path / "next").write_bytes(bodies[0])
                    os.replace(tmp_path / "next", place)
                    for one in nodes:
                        one.json("GET", "stat/look/large?revalidate=1")

            try:
                client.get_to_fd("look", "large", file.fileno(), progress=change)
            except Precondition:
                pass  # what was written is of one version all the same
        written = path.read_bytes()
        assert written == bodies[-1][: len(written)]
        until(lambda: client.get("look", "large") == bodies[0])
        with pytest.raises(Precondition):
            client.get("look", "large", etag=etag)
