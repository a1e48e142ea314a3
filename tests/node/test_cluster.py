"""Real nodes and a real etcd: nodes come, drain, go back, are killed, copied and misdirected, and etcd goes away."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench import servers
from forebay.core.cluster.records import ID, PREFIX
from forebay.meta.etcd import EtcdMeta
from forebay.meta.etcd_link import Address, named
from tests.meta.secure_etcd import PASSWORD, USER, SecureEtcd
from tests.node.conftest import NodeProcess
from tests.patience import until

Make = Callable[..., NodeProcess]
AHEAD = "import time; time.time = lambda real=time.time: real() + 600"


@pytest.fixture
def single() -> Iterator[servers.EtcdCluster]:
    """An etcd of one member, to be killed."""
    with servers.EtcdCluster(1) as started:
        yield started


def url(addresses: list[Address], name: str) -> str:
    return f"etcd://{','.join(map(named, addresses))}/{name}"


def flags(tmp_path: Path, at: str, lease_s: float = 10.0) -> list[str]:
    config = tmp_path / f"lease-{lease_s:g}.toml"
    config.write_text(f"lease = {lease_s}\n")
    return ["--fronts", "0", "--capacity", "1GiB", "--config", str(config), "--cluster", at]


def cluster_of(node: NodeProcess) -> dict[str, Any]:
    return node.json("GET", "status")["cluster"]


def until_all_are(state: str, *nodes: NodeProcess, count: int = 0) -> list[str]:
    """Wait until all that these know of agree that they, `count` in all, are so; their ids."""

    def agree() -> bool:
        seen = [cluster_of(node) for node in nodes]
        active = [[each["node_id"] for each in one["nodes"] if each["state"] == state] for one in seen]
        return all(len(ids) == (count or len(nodes)) for ids in active) and all(one["active"] for one in seen)

    until(agree, f"that all are {state}")
    return [cluster_of(node)["node_id"] for node in nodes]


def add_back_bucket(node: NodeProcess, root: Path) -> None:
    """Of which each node alone has what it acknowledged."""
    root.mkdir(exist_ok=True)
    node.json("PUT", "buckets/back", {"name": "back", "url": f"file://{root}", "write": "back", "copies": 1})


def is_ready(node: NodeProcess) -> bool:
    return node.ask("GET", "/-/readyz")[0] == 200


def reached(node: NodeProcess) -> bool:
    """Whether its engine answers."""
    with suppress(OSError, http.client.HTTPException):
        return node.ask("GET", "/-/v1/status")[0] == 200
    return False


def takes_writes(node: NodeProcess, key: str = "key") -> bool:
    status, body = node.ask("PUT", f"/back/{key}", body=b"bytes")
    assert status in (200, 503), body
    return status == 200


def program(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-m", "forebay.cli.main", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def meta(addresses: list[Address], name: str, story: Callable[[EtcdMeta], Any]) -> None:
    async def run() -> None:
        store = EtcdMeta(addresses, name, patience_s=60.0)
        await story(store)
        await store.aclose()

    asyncio.run(run())


def test_nodes_find_each_other_one_drains_and_comes_back(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    """The clock of one of them is ten minutes ahead: nothing of this depends on what time it is."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    at = url(etcd.addresses, uuid.uuid4().hex)
    one = node(*flags(tmp_path, at))
    two = node(*flags(tmp_path, at), environment={"PYTHONPATH": str(tmp_path / "ahead")})
    first, second = until_all_are("active", one, two)
    text = program("status", "--url", one.endpoint)
    for line in (rf"{first} \* +active +50.0 %", rf"{second} +active +50.0 % .* {two.endpoint} +serves its keys"):
        assert re.search(line, text), text
    found = {each["node_id"]: each["endpoint"] for each in one.json("GET", "map")["nodes"]}
    assert found == {first: one.endpoint, second: two.endpoint}

    for each in (one, two):
        add_back_bucket(each, tmp_path / "bucket")
    until(lambda: takes_writes(two, "only-here"))
    assert "is gone: owes nothing" in program("drain", second[:8], "--url", one.endpoint)
    until((tmp_path / "bucket" / "only-here").exists, "that its home flushed it")
    assert cluster_of(one)["nodes"] != [], "it is still known"
    until(lambda: not is_ready(two), "that clients are sent elsewhere")
    assert two.get("back", "only-here") == b"bytes"
    until(lambda: takes_writes(two), "that it asks the home, which the other is")

    program("drain", two.endpoint.removeprefix("http://"), "--undo", "--url", one.endpoint)
    until_all_are("active", one, two)
    until(lambda: is_ready(two) and takes_writes(two))
    status, body = one.ask("POST", "/-/v1/cluster/wish", {}, b'{"node": "nobody", "wish": "gone"}')
    assert status == 404, body
    assert b"the cluster knows no node nobody" in body


def test_a_killed_engine_is_back_at_once_and_a_copy_of_its_directory_stays_out(
    node: Make, etcd: servers.EtcdCluster, tmp_path: Path
) -> None:
    """Leases of five minutes: nobody here can have waited for the end of one."""
    at = url(etcd.addresses, uuid.uuid4().hex)
    one = node(*flags(tmp_path, at, 300.0))
    until_all_are("active", one)
    os.kill(one.children()["engine"], signal.SIGKILL)
    until(lambda: reached(one) and one.metric("forebay_process_restarts_total") == 1, "a new engine")
    until_all_are("active", one)
    one.stop()
    shutil.copytree(one.dir / "node", tmp_path / "copy" / "node")
    one.start()
    until_all_are("active", one)
    two = node(*flags(tmp_path, at, 300.0), dir=tmp_path / "copy")
    trouble = until(lambda: cluster_of(two)["trouble"])
    assert "a process lives under this node's id" in trouble
    assert one.endpoint in trouble
    add_back_bucket(two, tmp_path / "bucket")
    assert not takes_writes(two)
    assert not is_ready(two)
    until_all_are("active", one)
    add_back_bucket(one, tmp_path / "bucket")
    assert takes_writes(one)
    one.stop()  # it gives its lease up
    until_all_are("active", two)
    until(lambda: takes_writes(two))


def test_the_wrong_cluster_is_noticed(node: Make, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    at = url(etcd.addresses, name)
    one = node(*flags(tmp_path, at))
    until_all_are("active", one)

    async def empty(store: EtcdMeta) -> None:
        for entry in (await store.range(PREFIX))[0]:
            await store.delete(entry.key)

    meta(etcd.addresses, name, empty)
    until_all_are("active", one)  # it is there anew, under the old id

    one.stop()
    for wrong, words in (
        (flags(tmp_path, at)[:-2], "is of the cluster"),
        (flags(tmp_path, url(etcd.addresses, "other")), "it is not of other"),
    ):
        other = node(*wrong, dir=one.dir, start=False)
        other.start(wait=False)
        assert other.process is not None
        assert other.process.wait(90) != 0
        assert words in other.log

    async def change_id(store: EtcdMeta) -> None:
        assert (await store.get(ID)) is not None
        await store.put(ID, b"another")

    meta(etcd.addresses, name, change_id)
    one.start()
    assert "has the id another" in until(lambda: cluster_of(one)["trouble"])
    assert not is_ready(one)


def test_a_node_works_while_etcd_is_away_and_acknowledges_nothing_that_only_it_has(
    node: Make, single: servers.EtcdCluster, tmp_path: Path
) -> None:
    for name in ("through", "bucket"):
        (tmp_path / name).mkdir()
    (tmp_path / "through" / "there").write_bytes(b"before")
    single.members[0].kill()
    one = node(*flags(tmp_path, url(single.addresses, "alone"), 4.0))
    status, answer = one.ask(
        "PUT", "/-/v1/buckets/all", {"Content-Type": "application/json"}, b'{"name": "all", "url": "memory://"}'
    )
    assert (status, b"--here" in answer) == (503, True), "the other nodes cannot be told"
    through = {"name": "through", "url": f"file://{tmp_path / 'through'}", "freshness_s": 1e18}
    one.json("PUT", "buckets/through?here=1", through)
    one.json("PUT", "buckets/back?here=1", {"name": "back", "url": f"file://{tmp_path / 'bucket'}", "write": "back"})
    for word in ("away at the start", "away later"):
        until(lambda: "etcd does not answer" in cluster_of(one)["trouble"])
        until(lambda: not takes_writes(one), "that it fenced itself")
        assert one.get("through", "there") == b"before"
        assert one.ask("PUT", "/through/new", body=b"bytes")[0] == 200, word
        assert is_ready(one)
        single.members[0].restart()
        until_all_are("active", one)
        until(lambda: takes_writes(one))
        assert cluster_of(one)["trouble"] == ""
        single.members[0].kill()


def test_a_node_shows_a_certificate_and_says_who_it_is(
    node: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    with SecureEtcd() as secure:
        secure.want_users("ours")
        files = [f"--cluster-{name}={path}" for name, path in zip(("ca", "cert", "key"), secure.access, strict=False)]
        who = [f"--cluster-user={USER}", f"--cluster-password-file={password}"]
        one = node(*flags(tmp_path, url([secure.address], "ours")), *files, *who)
        until_all_are("active", one)
        at = ["--dir", str(one.dir / "node"), "--no-measure", "--cluster", url([secure.address], "ours"), *files]
        run = subprocess.run(
            [sys.executable, "-m", "forebay.cli.main", "doctor", *at, *who], capture_output=True, text=True
        )
        assert re.search(r"ok +etcd +127.0.0.1:\d+: version 3", run.stdout), run.stdout + run.stderr
        password.unlink()
        one.stop()
        one.start(wait=False)
        assert one.process is not None
        assert one.process.wait(90) == 1
        assert "--cluster-password-file" in one.log


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for given, words in (
        (["--cluster", "http://h:1"], "is no etcd URL"),
        (["--cluster", "etcd://h:1", "--advertise", "0.0.0.0:1"], "is no place to reach the node at"),
        (["--cluster-user", "ann"], "are given without --cluster"),
        (["--cluster", "etcd://h:1", "--peer-key", "x"], "is for nodes with identities"),
        (["--cluster", "etcd://h:1", "--cluster-key", "x"], "without --cluster-cert"),
        (["--cluster", "etcd://h:1", "--advertise", "h:x"], "--advertise 'h:x' is not HOST:PORT"),
    ):
        command = [sys.executable, "-m", "forebay.node", "--dir", str(tmp_path / "node"), *given]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 1
        assert words in run.stderr
        assert not (tmp_path / "node").exists()
