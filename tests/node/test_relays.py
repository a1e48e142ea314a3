"""A node relays what another owns: the bytes go from socket to socket, it keeps none, and nothing fails for that."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from bench import servers
from forebay.core.limits import MIB, RELAY_BYTES_MIN, STRIPE_BYTES
from forebay.core.placement import Members
from tests.node.conftest import NodeProcess, pattern
from tests.node.test_cluster import flags, until_all_are, url
from tests.patience import until

Make = Callable[..., NodeProcess]
LONG = 40 * MIB + 17
BODIES = {"one": pattern(3 * MIB + 5, 1), "long": pattern(LONG, 2), "little": pattern(RELAY_BYTES_MIN - 1, 3)}
RELAYED = "forebay_relayed_bytes_total"
TURNS_MAX = 8  # a home that gets no processor for seconds is passed over: then it is no such turn


class Pair:
    """Two nodes of one cluster that serve one directory; `put` makes objects that are at home at the second."""

    def __init__(self, nodes: list[NodeProcess], ids: list[str], root: Path) -> None:
        self.first, self.second = nodes
        self.root = root
        known = nodes[0].json("GET", "map")["nodes"]
        self._members = Members({each["node_id"]: each["weight"] for each in known})
        self._second = ids[1]
        self._number = 0

    def put(self, what: str, body: bytes | None = None) -> str:
        """A new object that is at home at the second node: of a long one, the first stripe and some others."""
        while True:
            self._number += 1
            key = f"{what}-{self._number}"
            if self.is_at_second(key):
                (self.root / key).write_bytes(BODIES[what] if body is None else body)
                return key

    def is_at_second(self, key: str) -> bool:
        return self._members.first("corpus", key) == self._second

    def relayed(self) -> float:
        return self.first.metric(RELAYED)

    def held(self, key: str) -> int:
        """Bytes of the object at the first node."""
        return int(self.first.json("GET", f"stat/corpus/{key}")["cached_bytes"])


@pytest.fixture
def pair(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> Pair:
    (tmp_path / "bucket").mkdir()
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at)) for _ in range(2)]
    ids = until_all_are("active", *nodes)
    for one in nodes:
        one.add_bucket("corpus", f"file://{tmp_path / 'bucket'}", freshness_s=0.0)
    return Pair(nodes, ids, tmp_path / "bucket")


def test_what_is_read_once_is_relayed_and_what_is_read_again_is_kept(pair: Pair) -> None:
    for _ in range(TURNS_MAX):
        key, before = pair.put("one"), pair.relayed()
        status, answer = pair.first.ask("GET", f"/corpus/{key}")
        assert (status, answer) == (200, BODIES["one"])
        if pair.relayed() - before == len(answer) and pair.held(key) == 0:
            break
    else:
        pytest.fail("nothing was relayed")
    now = pair.relayed()
    assert pair.first.ask("GET", f"/corpus/{key}") == (200, BODIES["one"])
    assert pair.relayed() == now, "who reads again is read to from here"
    until(lambda: pair.held(key) == len(BODIES["one"]))

    # what is little, what is at home here, what was asked for ahead, and what is pinned
    little = pair.put("little")
    assert pair.first.get("corpus", little) == BODIES["little"]
    here = next(f"here-{n}" for n in range(100) if not pair.is_at_second(f"here-{n}"))
    (pair.root / here).write_bytes(BODIES["one"])
    assert pair.first.get("corpus", here) == BODIES["one"]
    ahead = pair.put("one")
    pair.first.json("POST", "prefetch", {"bucket": "corpus", "keys": [ahead]})
    until(lambda: pair.held(ahead) == len(BODIES["one"]))
    assert pair.first.get("corpus", ahead) == BODIES["one"]
    pinned = pair.put("one")
    pair.first.json("POST", "pin", {"bucket": "corpus", "prefix": pinned})
    assert pair.first.get("corpus", pinned) == BODIES["one"]
    assert pair.relayed() == now


def test_a_range_a_condition_and_a_pipelined_request_are_answered_as_ever(pair: Pair) -> None:
    key, body = pair.put("long"), BODIES["long"]
    start, end = 5, 2 * STRIPE_BYTES + MIB
    for _ in range(TURNS_MAX):
        before = pair.relayed()
        status, answer = pair.first.ask("GET", f"/corpus/{key}", {"Range": f"bytes={start}-{end - 1}"})
        assert (status, answer) == (206, body[start:end])
        if pair.relayed() - before >= STRIPE_BYTES - start:
            break
        key = pair.put("long")
    else:
        pytest.fail("nothing was relayed")
    with closing(http.client.HTTPConnection(*pair.first.endpoint.removeprefix("http://").split(":"))) as connection:  # type: ignore[arg-type]
        for number in range(6):  # one after another on one connection, of which every other is relayed
            fresh = pair.put("long") if number % 2 else pair.put("little")
            connection.request("GET", f"/corpus/{fresh}")
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            assert answer.read() == BODIES[fresh.partition("-")[0]]
            connection.request("HEAD", f"/corpus/{fresh}")
            told = connection.getresponse()
            told.read()
            said = {name.lower(): value for name, value in told.getheaders()}
            assert {**said, "date": "", "x-amz-request-id": ""} == {**headers, "date": "", "x-amz-request-id": ""}
            connection.request("GET", f"/corpus/{fresh}", headers={"If-None-Match": headers["etag"]})
            unchanged = connection.getresponse()
            assert (unchanged.status, unchanged.read()) == (304, b"")


def test_many_clients_of_which_some_go_away(pair: Pair) -> None:
    """Slow ones, and ones that leave in the middle, take nothing from the others; no descriptor is left of them."""

    def ask(number: int, key: str) -> bool:
        host, port = pair.first.endpoint.removeprefix("http://").split(":")
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            connection.request("GET", f"/corpus/{key}")
            answer = connection.getresponse()
            if number % 3 == 0:
                return len(answer.read(100_000)) == 100_000  # and away
            body = b""
            while piece := answer.read(1 * MIB):
                body += piece
                if number % 3 == 1:
                    time.sleep(0.02)
            return hashlib.sha256(body).digest() == hashlib.sha256(BODIES["long"]).digest()

    keys = [pair.put("long") for _ in range(12)]
    with ThreadPoolExecutor(len(keys)) as pool:
        assert all(pool.map(ask, range(len(keys)), keys))
    assert pair.relayed() > 0
    front = pair.first.children()["engine"]  # which has the only front
    most = len(pipes(front))
    for _ in range(20):
        assert ask(0, pair.put("long"))
    until(lambda: len(pipes(front)) <= most, "that what clients left behind is closed")


def pipes(pid: int) -> list[str]:
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.append(str(Path(f"/proc/{pid}/fd/{fd}").readlink()))
    return [name for name in found if name.startswith("pipe:")]


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_a_home_that_ends_in_the_middle_is_not_noticed(pair: Pair, how: str) -> None:
    """The rest of the same version comes from the bucket."""
    key = pair.put("long")
    host, port = pair.first.endpoint.removeprefix("http://").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=120)) as connection:
        connection.request("GET", f"/corpus/{key}")
        answer = connection.getresponse()
        body = answer.read(MIB)
        if how == "dies":
            os.kill(pair.second.children()["engine"], signal.SIGKILL)
            body += answer.read()
        else:
            engine = pair.second.children()["engine"]
            os.kill(engine, signal.SIGSTOP)
            try:
                body += answer.read()
            finally:
                with suppress(ProcessLookupError):  # its supervisor replaces one that hangs
                    os.kill(engine, signal.SIGCONT)
    assert body == BODIES["long"]


def test_no_answer_is_of_two_versions(pair: Pair) -> None:
    """The object is replaced by one of the same size in the middle: the answer is of the first, or cut."""
    host, port = pair.first.endpoint.removeprefix("http://").split(":")
    for turn, told in enumerate((False, True, False, True)):
        key = pair.put("changing", bytes([turn]) * LONG)
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            connection.request("GET", f"/corpus/{key}")
            answer = connection.getresponse()
            body = answer.read(MIB)
            fresh = pair.root / f".fresh-{turn}"
            fresh.write_bytes(b"\xff" * LONG)
            fresh.replace(pair.root / key)
            if told:
                assert set(pair.second.get("corpus", key)) == {0xFF}
            try:
                body += answer.read()
            except (http.client.IncompleteRead, ConnectionError) as error:
                body += getattr(error, "partial", b"")
        assert set(body) == {turn}, "bytes of two versions"
        assert set(pair.first.get("corpus", key)) == {0xFF}


def test_nodes_with_identities_relay_too(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    identities, peer_key = tmp_path / "identities.json", tmp_path / "peer.key"
    identities.write_text(json.dumps({"identities": [{"name": "ops", "allow": "admin:*", "token": "token-of-ops"}]}))
    identities.chmod(0o600)
    peer_key.write_text(uuid.uuid4().hex + uuid.uuid4().hex)
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at), "--identities", str(identities), "--peer-key", str(peer_key)) for _ in range(2)]

    def active() -> bool:
        seen = [json.loads(one.ask("GET", "/-/v1/status", WHO)[1])["cluster"] for one in nodes]
        return all([each["state"] for each in one["nodes"]] == ["active"] * 2 for one in seen)

    until(active)
    for one in nodes:
        bucket = {"name": "corpus", "url": f"file://{tmp_path / 'bucket'}", "freshness_s": 0.0}
        status, said = one.ask("PUT", "/-/v1/buckets/corpus", {**WHO, **JSON}, json.dumps(bucket).encode())
        assert status < 300, said
    for turn in range(TURNS_MAX):
        for each in range(4):  # of them some are at home at the second
            (tmp_path / "bucket" / f"{turn}-{each}").write_bytes(BODIES["one"])
            assert nodes[0].ask("GET", f"/-/v1/objects/corpus/{turn}-{each}", WHO) == (200, BODIES["one"])
        told = nodes[0].ask("GET", "/-/metrics", WHO)[1].decode()
        if any(line.startswith(RELAYED) and float(line.split()[1]) > 0 for line in told.splitlines()):
            break
    else:
        pytest.fail("nothing was relayed")


WHO = {"Authorization": "Bearer token-of-ops"}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("write", ["back", "local"])
def test_ranges_of_what_no_backend_has_are_relayed(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path, write: str
) -> None:
    """As a restore on another node reads a checkpoint. What is not asked for by a range is kept, as ever."""
    (tmp_path / "bucket").mkdir()
    at = url(etcd.addresses, uuid.uuid4().hex)
    nodes = [node(*flags(tmp_path, at)) for _ in range(2)]
    ids = until_all_are("active", *nodes)
    place = "local://" if write == "local" else f"file://{tmp_path / 'bucket'}"
    nodes[0].json("PUT", "buckets/saves", {"name": "saves", "url": place, "write": write})
    until(lambda: nodes[1].ask("GET", "/-/v1/buckets/saves")[0] == 200)
    known = nodes[0].json("GET", "map")["nodes"]
    members = Members({each["node_id"]: each["weight"] for each in known})
    keys = [key for key in (f"blob-{number}" for number in range(50)) if members.first("saves", key) == ids[1]]
    for key in keys[:TURNS_MAX]:
        until(lambda key=key: nodes[1].ask("PUT", f"/saves/{key}", {}, BODIES["long"])[0] == 200)  # type: ignore[misc]
        before, body = nodes[0].metric(RELAYED), b""
        for start in range(0, LONG, 8 * MIB):
            end = min(start + 8 * MIB, LONG)
            status, piece = nodes[0].ask("GET", f"/saves/{key}", {"Range": f"bytes={start}-{end - 1}"})
            assert status == 206
            body += piece
        assert body == BODIES["long"]
        assert nodes[1].ask("PUT", f"/saves/{key}", {}, BODIES["one"])[0] == 200
        assert nodes[0].ask("GET", f"/saves/{key}", {"Range": f"bytes=0-{2 * MIB}"}) == (
            206,
            BODIES["one"][: 2 * MIB + 1],
        )
        if nodes[0].metric(RELAYED) - before >= LONG - MIB:
            break
    else:
        pytest.fail("nothing was relayed")
    now = nodes[0].metric(RELAYED)
    assert nodes[0].get("saves", keys[0]) in (BODIES["one"], BODIES["long"])
    assert nodes[0].metric(RELAYED) == now
