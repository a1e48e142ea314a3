"""The program and a real node: started, used, killed, started again, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.client import local_node
from forebay.client.sync import Client
from forebay.ports import machine
from tests.cli.conftest import COMMAND, Program
from tests.patience import until

pytestmark = pytest.mark.real


@pytest.fixture
def real(tmp_path: Path, free_port: int) -> Iterator[Program]:
    """The program with a directory and port of its own; whatever runs from that directory is stopped at the end."""
    program = Program(f"http://127.0.0.1:{free_port}", tmp_path / "node")
    program.env["FOREBAY_LISTEN"] = f"127.0.0.1:{free_port}"
    yield program
    program("down", "--timeout", "60")


def up(program: Program, *args: str) -> dict[str, object]:
    """As its own process, so that the node is nobody's child here."""
    out, err = program.process(
        "up", "--listen", program.env["FOREBAY_LISTEN"], "--fronts", "1", "--json", *args
    ).communicate(timeout=120)
    assert err == b""
    found: dict[str, object] = json.loads(out)
    return found


def fill(folder: Path) -> dict[str, bytes]:
    """A directory that serves as a bucket."""
    objects = {"big": os.urandom(9_000_000), "train/a": os.urandom(20_000), "train/b": b"small", "empty": b""}
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return objects


def test_a_node_from_up_to_down(real: Program, tmp_path: Path) -> None:
    objects = fill(tmp_path / "bucket")
    first = up(real)
    assert first["started"] is True
    assert first["endpoint"] == real.env["FOREBAY_URL"]
    again = up(real)
    assert (again["started"], again["pid"]) == (False, first["pid"])
    assert f"forebay down --dir {tmp_path / 'node'}" in real("up", "--listen", real.env["FOREBAY_LISTEN"]).stdout

    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}", "--freshness", "immutable")
    rows = real("ls", "-r", "-l", "data").stdout.splitlines()
    assert [row.split()[-1] for row in rows] == ["big", "empty", "train/a", "train/b"]
    assert [row.split()[3] for row in rows] == ["-"] * 4
    assert json.loads(real("stat", "data/big", "--json").stdout)["cached_bytes"] == 0

    real("get", "data/big", str(tmp_path / "big"))
    assert (tmp_path / "big").read_bytes() == objects["big"]
    found = json.loads(real("stat", "data/big", "--json").stdout)
    assert (found["cached_bytes"], found["cached_blocks"], found["blocks"]) == (9_000_000, 3, 3)
    assert found["volume"]
    assert "fresh until   for ever (immutable)" in real("stat", "data/big").stdout
    assert [row.split()[3:] for row in real("ls", "--cached", "-r", "data").stdout.splitlines()] == [["cached", "big"]]

    (state,) = json.loads(real("prefetch", "data/", "--json").stdout)
    assert (state["state"], state["units_failed"]) == ("done", 0)
    assert len(real("ls", "--cached", "-r", "data").stdout.splitlines()) == 4
    real("pin", "data/train/")
    assert json.loads(real("stat", "data/train/a", "--json").stdout)["pinned"] is True
    real("unpin", "data/train/")
    assert json.loads(real("stat", "data/train/a", "--json").stdout)["pinned"] is False
    real("refresh", "data/train/")
    real("evict", "data/train/")
    left = [row.split()[-1] for row in real("ls", "--cached", "-r", "data").stdout.splitlines()]
    assert left == ["big", "empty"]
    real("get", "-r", "data/", str(tmp_path / "all"))
    for key, data in objects.items():
        assert (tmp_path / "all" / key).read_bytes() == data, key

    assert len(json.loads(real("job", "ls", "--json").stdout)) >= 4
    assert json.loads(real("status", "--json").stdout)["buckets"][0]["name"] == "data"
    view = json.loads(real("top", "--once", "--json", "--interval", "0.2").stdout)
    assert view["capacity_bytes"] > 0
    checks = {finding["check"]: finding for finding in json.loads(real("doctor", "--json").stdout)["findings"]}
    assert checks["bucket"]["level"] == "ok"
    assert checks["node"]["level"] == "ok"
    stopped = json.loads(real("down", "--json").stdout)
    assert (stopped["dir"], stopped["pid"], stopped["stopped"]) == (str(tmp_path / "node"), first["pid"], True)
    assert (stopped["owed_objects"], stopped["owed_bytes"]) == (0, 0)
    assert not machine.alive(int(str(first["pid"])))
    assert real("down").stdout == f"no node runs from {tmp_path / 'node'}\n"


def test_errors_of_a_real_node_have_their_exit_codes(real: Program, tmp_path: Path) -> None:
    fill(tmp_path / "bucket")
    up(real, "--no-auto-buckets")
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}")
    assert "NoSuchKey" in real("stat", "data/none", "--json", code=3).stderr
    assert real("get", "data/none", str(tmp_path / "x"), code=3).stderr.startswith("forebay: ")
    assert "NoSuchBucket" in real("ls", "nowhere", "--json", code=3).stderr
    real("bucket", "rm", "nowhere", code=3)
    real("bucket", "show", "nowhere", code=3)
    real("job", "show", "nothing", code=3)
    out = real("bucket", "add", "gone", f"file://{tmp_path / 'not-there'}", code=6)
    assert "not-there" in out.stderr or "exist" in out.stderr
    assert [found["name"] for found in json.loads(real("bucket", "ls", "--json").stdout)] == ["data"]
    real("prefetch", "nowhere", code=3)


def test_a_killed_node_is_noticed_and_started_again_with_its_cache(real: Program, tmp_path: Path) -> None:
    objects = fill(tmp_path / "bucket")
    pid = int(str(up(real)["pid"]))
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}", "--freshness", "immutable")
    real("prefetch", "data", "-q")
    with Client(real.env["FOREBAY_URL"]) as client:
        assert client.get("data", "big") == objects["big"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: not local_node.is_locked(tmp_path / "node"))
        until(lambda: not local_node.is_ready(real.env["FOREBAY_URL"]))
        assert "no node answers" in real("status", code=6).stderr
        assert "was killed" in real("doctor", "--no-measure").stdout
        assert up(real)["started"] is True
        assert client.get("data", "big") == objects["big"], "the client finds the new node by itself"
    (tmp_path / "bucket" / "big").unlink()
    real("get", "data/big", str(tmp_path / "big"))
    assert (tmp_path / "big").read_bytes() == objects["big"], "it came from the cache"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_up_right_after_the_end_of_a_node_starts_another(real: Program, tmp_path: Path, how: signal.Signals) -> None:
    first = int(str(up(real)["pid"]))
    os.kill(first, how)
    until(lambda: not local_node.said(tmp_path / "node").pid or not machine.alive(first))
    second = up(real)
    assert second["started"] is True
    assert second["pid"] != first
    assert json.loads(real("status", "--json").stdout)["endpoint"] == real.env["FOREBAY_URL"]


def test_a_taken_port_is_explained_and_another_offered(real: Program, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as server:
        server.settimeout(0.1)
        error = real("up", "--listen", real.env["FOREBAY_LISTEN"], code=5).stderr
    assert f"port {free_port} is taken by another program (pid {os.getpid()}:" in error
    assert "forebay up --listen 127.0.0.1:" in error


def test_a_second_node_on_the_directory_is_refused(real: Program, tmp_path: Path) -> None:
    up(real)
    error = real("up", "--listen", "127.0.0.1:1", code=5).stderr
    assert f"listens at {real.env['FOREBAY_URL']}" in error
    second = real.process("node", "--listen", "127.0.0.1:0")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 5, err
    assert b"a node runs from" in err


def test_a_node_that_cannot_start_says_why(real: Program, tmp_path: Path) -> None:
    error = real("up", "--listen", real.env["FOREBAY_LISTEN"], "--identities", str(tmp_path / "none"), code=6).stderr
    assert "ended with status 78 before it was ready: " in error
    assert str(tmp_path / "none") in error
    assert len(error.splitlines()) == 1
    assert "loopback" in real("up", "--listen", "0.0.0.0:9400", code=2).stderr
    assert "is not known" in real("up", "--capacity", "lots", code=2).stderr
    assert "no configuration file" in real("up", "--config", str(tmp_path / "none.toml"), code=3).stderr
    assert "port 0" in real("up", "--listen", "127.0.0.1:0", code=2).stderr


def test_a_node_that_is_slow_to_start_can_be_stopped_all_the_same(real: Program, tmp_path: Path) -> None:
    """Its pid is known from the lock it holds, before it has written where it listens."""
    starting = real.process("up", "--listen", real.env["FOREBAY_LISTEN"], "--fronts", "1")
    until(lambda: local_node.is_locked(tmp_path / "node"))
    starting.send_signal(signal.SIGINT)
    _, err = starting.communicate(timeout=60)
    if starting.returncode != 0:  # it was not ready yet, as far as can be helped
        assert starting.returncode == 130
        assert b"goes on starting" in err
    assert json.loads(real("down", "--json").stdout)["stopped"] is True
    assert not local_node.is_locked(tmp_path / "node")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_node_in_the_foreground_prints_its_endpoint_and_stops_when_told(
    real: Program, tmp_path: Path, how: signal.Signals
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'dir = "{tmp_path / "node"}"\nlisten = "127.0.0.1:0"\nfronts = 0\ncapacity = "100MiB"\n')
    env = {name: value for name, value in real.environment().items() if name != "FOREBAY_DIR"}
    node = subprocess.Popen(
        [*COMMAND, "node", "--config", str(config)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert node.stdout is not None
        endpoint = node.stdout.readline().decode().strip()
        with Client(endpoint) as client:
            assert client.ready()
            assert client.status().volumes[0].capacity_bytes <= 100 << 20
        node.send_signal(how)
        _, err = node.communicate(timeout=60)
        assert node.returncode == 0, err
        assert b"Traceback" not in err
    finally:
        node.kill()
        node.wait()


def test_the_shell_completes_from_a_real_node(real: Program, tmp_path: Path) -> None:
    fill(tmp_path / "bucket")
    up(real)
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}")
    env = {
        **real.environment(),
        "_FOREBAY_COMPLETE": "complete_bash",
        "COMP_WORDS": "forebay stat data/tr",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(COMMAND, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["data/train/"]


def test_a_node_with_identities_wants_to_know_who_asks(real: Program, tmp_path: Path) -> None:
    fill(tmp_path / "bucket")
    keys = str(tmp_path / "keys.json")
    admin = json.loads(real("key", "create", "me", "--allow", "admin:*", "--file", keys, "--json").stdout)["token"]
    reader = json.loads(real("key", "create", "you", "--allow", "read:data", "--file", keys, "--json").stdout)["token"]
    up(real, "--identities", keys)
    assert "Denied" in real("bucket", "ls", "--json", code=4).stderr
    real.env["FOREBAY_TOKEN"] = admin
    real("bucket", "add", "data", f"file://{tmp_path / 'bucket'}")
    real.env["FOREBAY_TOKEN"] = reader
    assert len(real("ls", "-r", "data").stdout.splitlines()) == 4
    real("get", "data/train/b", str(tmp_path / "b"))
    real("evict", "data", code=4)
    real("bucket", "rm", "data", code=4)
