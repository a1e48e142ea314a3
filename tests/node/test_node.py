"""A node as a program: it starts, serves, says no when it must, restarts what dies, and stops whole."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers import SeaweedFS
from bench.shaper import Shaper
from forebay.core.errors import Busy
from forebay.node.process.supervisor import last_run_ended
from forebay.node.settings import Settings
from forebay.ports import clock
from tests.patience import PATIENCE_S

from .conftest import MIB, START_TIMEOUT_S, NodeProcess, alive, pattern, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A directory that is a bucket."""
    path = tmp_path / "bucket"
    path.mkdir()
    return path


@pytest.mark.parametrize("fronts", [0, 2])
def test_it_starts_serves_and_stops(node: Make, bucket: Path, fronts: int) -> None:
    one = node("--fronts", str(fronts))
    (bucket / "small").write_bytes(b"hello")
    (bucket / "large").write_bytes(pattern(9 * MIB))
    one.add_bucket("files", f"file://{bucket}")
    assert sorted(one.children()) == sorted(["engine", *(f"front {number}" for number in range(fronts))])
    for _ in range(2):
        assert one.get("files", "small") == b"hello"
        assert one.get("files", "large") == pattern(9 * MIB)
        assert one.get("files", "large", (5 * MIB, 6 * MIB)) == pattern(9 * MIB)[5 * MIB : 6 * MIB]
    told = json.loads((one.dir / "node" / "run" / "node.json").read_text())
    assert one.process is not None
    assert told["pid"] == one.process.pid
    for path in ("run", "node.lock", "meta.sqlite", "volumes"):
        assert stat.S_IMODE(os.stat(one.dir / "node" / path).st_mode) & 0o077 == 0, path
    pids = one.children().values()
    assert one.stop() == 0
    assert not any(alive(pid) for pid in pids)
    assert not (one.dir / "node" / "run" / "node.json").exists()
    assert one.endpoint in one.log, "it says where it is"
    (bucket / "small").unlink()
    one.start()
    assert one.get("files", "small") == b"hello", "what is cached outlives a restart"


def test_two_nodes_on_one_directory(node: Make) -> None:
    one = node("--fronts", "1")
    other = node("--fronts", "1", start=False, dir=one.dir)
    other.start(wait=False)
    assert other.process is not None
    assert other.process.wait(PATIENCE_S) != 0
    assert "a node runs from" in one.log
    other.process = None
    assert one.ask("GET", "/-/readyz")[0] == 200, "the first is undisturbed"


def test_a_port_that_is_taken(node: Make) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        one = node("--listen", f"127.0.0.1:{stranger.getsockname()[1]}", start=False)
        one.start(wait=False)
        assert one.process is not None
        assert one.process.wait(PATIENCE_S) != 0
        assert "somebody listens there" in one.log


def test_beyond_loopback_only_with_identities(node: Make) -> None:
    one = node("--listen", "0.0.0.0:0", start=False)
    one.start(wait=False)
    assert one.process is not None
    assert one.process.wait(PATIENCE_S) != 0
    assert "identities" in one.log


def test_too_few_open_files(node: Make) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    one = node(start=False)
    one.start(wait=False, preexec_fn=few)
    assert one.process is not None
    assert one.process.wait(PATIENCE_S) != 0
    assert "ulimit -n" in one.log


def test_a_broken_configuration_ends_the_node_with_a_reason(node: Make, tmp_path: Path) -> None:
    (tmp_path / "identities.json").write_text("{}")
    one = node("--identities", str(tmp_path / "identities.json"), start=False)
    one.start(wait=False)
    assert one.process is not None
    assert one.process.wait(PATIENCE_S) != 0
    assert "identities file" in one.log
    config = tmp_path / "node.toml"
    config.write_text('capcity = "3GiB"\n')
    other = node("--config", str(config), start=False)
    other.start(wait=False)
    assert other.process is not None
    assert other.process.wait(PATIENCE_S) != 0
    assert "capcity" in other.log


def test_children_end_with_their_supervisor(node: Make) -> None:
    one = node("--fronts", "2")
    pids = one.children()
    assert len(pids) == 3
    for name in ("engine", "front 1"):
        os.kill(pids[name], signal.SIGSTOP)  # what cannot see its parent's end ends too
    assert one.process is not None
    one.process.kill()
    one.process.wait()
    one.start()  # at once
    assert one.ask("GET", "/-/readyz")[0] == 200
    assert not any(alive(pid) for pid in pids.values()), "the next node serves when the last one has ended"


def test_a_node_waits_for_what_its_last_run_left(node: Make) -> None:
    one = node("--fronts", "1", start=False)
    run = one.dir / "node" / "run"
    run.mkdir(parents=True)
    with (run / "children.lock").open("w") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_SH)
        one.start(wait=False)
        until(lambda: f"waiting until the node's last run has ended: pid {os.getpid()}" in one.log)
        assert one.stop() == 0, "a node that waits can be stopped"
        one.start(wait=False)
        until(lambda: one.log.count("waiting until") == 2)
        assert one.children() == {}
        assert one.process is not None
        assert one.process.poll() is None
    one.endpoint = until(one._ready, START_TIMEOUT_S)
    assert one.ask("GET", "/-/readyz")[0] == 200


def test_the_wait_for_the_last_run_has_an_end(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path))
    asyncio.run(last_run_ended(settings, clock.system))
    with settings.children_lock.open("w") as orphan:
        fcntl.flock(orphan, fcntl.LOCK_SH)
        with pytest.raises(Busy, match="have not ended"):
            asyncio.run(last_run_ended(settings, clock.system, patience_s=0.0))
    asyncio.run(last_run_ended(settings, clock.system))


def test_what_dies_is_started_again_and_hits_need_no_engine(node: Make, bucket: Path) -> None:
    one = node("--fronts", "1")
    (bucket / "object").write_bytes(pattern(5 * MIB))
    one.add_bucket("files", f"file://{bucket}")
    assert one.get("files", "object") == pattern(5 * MIB)
    until(lambda: one.json("GET", "status")["flights"] == 0)
    engine = one.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    assert one.get("files", "object") == pattern(5 * MIB), "a hit, while the engine stands still"
    os.kill(engine, signal.SIGKILL)
    assert one.get("files", "object") == pattern(5 * MIB)
    until(lambda: one.children().get("engine", engine) != engine)
    (bucket / "other").write_bytes(b"new")
    # A miss waits for the new engine, and on a busy machine longer than it may: then it is told to come again.
    until(lambda: one.ask("GET", "/files/other")[0] == 200, "the new engine answers")
    assert one.get("files", "other") == b"new"
    front = one.children()["front 0"]
    os.kill(front, signal.SIGKILL)
    until(lambda: one.children().get("front 0", front) != front)
    until(lambda: _answers(one))
    assert one.get("files", "object") == pattern(5 * MIB)


def _answers(one: NodeProcess) -> bool:
    try:
        return one.ask("GET", "/-/readyz")[0] == 200
    except OSError:
        return False


def test_thirty_two_readers_over_http_fetch_each_byte_once(node: Make, seaweed: SeaweedFS) -> None:
    seaweed.create_bucket("crowd-of-readers")
    data = pattern(40 * MIB + 17)
    request = urllib.request.Request(f"{seaweed.endpoint}/crowd-of-readers/object", data, method="PUT")
    with urllib.request.urlopen(request, timeout=60):
        pass
    with Shaper(seaweed.endpoint) as link:
        one = node("--fronts", "2")
        options = seaweed.options() | {"endpoint": link.endpoint}
        one.add_bucket("crowd", "s3://crowd-of-readers", **options)
        before = link.counters()["response_bytes"]
        with ThreadPoolExecutor(32) as readers:
            for body in readers.map(lambda _: one.get("crowd", "object"), range(32)):
                assert body == data
        fetched = link.counters()["response_bytes"] - before
        assert len(data) <= fetched < len(data) + 64 * 1024, "the object once, and headers"
        assert one.get("crowd", "object") == data
        until(lambda: one.json("GET", "status")["reads"] == 0)
        assert link.counters()["response_bytes"] - before == fetched, "warm: not a byte"
        link.set(fault="refuse", count=1000)
        link.cut()
        assert one.get("crowd", "object", (MIB, 2 * MIB)) == data[MIB : 2 * MIB], "the backend is not needed"
        status, body = one.ask("GET", "/crowd/never-read")
        assert status == 503, body
        link.set(fault="none")
        assert one.ask("GET", "/crowd/never-read")[0] == 404


def test_resident_memory_stays_flat_while_bytes_stream(node: Make, bucket: Path) -> None:
    one = node("--fronts", "1", "--capacity", "256MiB")
    data = pattern(96 * MIB)
    for number in range(4):
        (bucket / str(number)).write_bytes(data)
    one.add_bucket("files", f"file://{bucket}")

    def resident() -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in one.children().values()]
        return sum(pages) * resource.getpagesize()

    for turn in range(5):
        for number in range(4):
            assert one.get("files", str(number)) == data
        if turn == 0:
            first = resident()
    assert resident() < max(first * 1.25, first + 32 * MIB), (first, resident())
    assert resident() < 400 * MIB
