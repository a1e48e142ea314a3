"""The box: hosts come up, a cut link is felt, a machine dies and boots, a cluster runs, and nothing of it stays."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import box as boxes
from bench import load, main
from bench.box import Box, Host, cut_off
from bench.cluster import Cluster, Shell
from bench.rows.many_nodes import Reading, longest_gap
from bench.servers import Nginx, ServerFailed
from tests.patience import until

pytestmark = pytest.mark.real

ASK = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)
sock.sendall(b"GET /file HTTP/1.0\\r\\n\\r\\n")
print(sock.recv(12).decode())
"""
HELD = """
import subprocess, sys, time
from pathlib import Path
from bench.box import Box
from bench.servers import Nginx
with Box() as box:
    nginx = box.host("web").place(Nginx(Path(sys.argv[1])))
    box.start(nginx)
    (box.dir / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(box.dir / "disk")], check=True)
    print(box.number, nginx.pid, box.dir, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def box(able: None) -> Iterator[Box]:
    with Box() as box:
        yield box


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"bytes")
    return tmp_path


def answers(host: Host, server: Nginx) -> bool:
    """Whether a request from the host gets its answer; after a second without one it has none."""
    command = [sys.executable, "-S", "-c", ASK, server.host, str(server.ports[0])]
    return host.run(command).stdout.startswith("HTTP/1.1 200")


def left_of(number: int) -> list[Path]:
    return [*boxes.NAMESPACES.glob(f"forebay-box-{number}-*"), *Path("/sys/class/net").glob(f"fbbox{number}")]


def test_links_are_cut_and_machines_stop(box: Box, root: Path) -> None:
    web, one, two = (box.host(name) for name in ("web", "one", "two"))
    server = web.place(Nginx(root))
    box.start(server)
    assert answers(one, server)
    web.cut(one)
    assert not answers(one, server), "answers are lost, though requests arrive"
    assert answers(two, server), "only this way is cut"
    web.mend(one)
    assert until(lambda: answers(one, server))
    with cut_off(two, web):
        assert not answers(two, server)
        assert answers(one, server)
    for hurt, heal in ((web.unplug, web.plug), (web.pause, web.resume), (web.kill, web.restart)):
        hurt()
        assert not answers(one, server)
        heal()
        assert until(lambda: answers(one, server)), heal
    dirs, number, pid = (box.dir, server.dir), box.number, server.pid
    box.close()
    assert not left_of(number)
    assert not any(folder.exists() for folder in dirs)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_link_has_its_rate(box: Box, root: Path) -> None:
    (root / "large").write_bytes(bytes(3 << 20))
    web = box.host("web", up_bit_s=40e6)
    server = web.place(Nginx(root))
    box.start(server)
    with load.Reader(server.url) as reader:
        assert reader.get("/large").bytes_per_s < 40e6 / 8 * 1.2  # the burst is for free
    assert web.carried()[0] > 3 << 20


def test_readers_in_the_box_say_what_they_saw(box: Box, root: Path) -> None:
    web, client = box.host("web"), box.host("client")
    server = web.place(Nginx(root))
    box.start(server)
    how = ("--http", server.url, "--at-once", "2")
    reads, errors = Reading(client, ["/file"] * 5, *how, "--once").end()
    assert len(reads) == 5
    assert not errors
    reading = Reading(client, ["/file", "/nothing"], *how)
    sent = web.carried()[0]
    until(lambda: web.carried()[0] > sent + 20_000)
    reads, errors = reading.end()
    assert {key for _, _, key in reads} == {"/file"}
    assert {key for _, key, _ in errors} == {"/nothing"}
    ends = [end for _, end, _ in reads]
    assert 0 < longest_gap(ends, min(ends)) <= max(ends) - min(ends)
    assert longest_gap(ends, max(ends) + 1) == math.inf


def test_what_a_killed_harness_leaves_the_next_one_removes(box: Box, root: Path) -> None:
    command = [sys.executable, "-c", HELD, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(boxes.__file__).parents[1]) as other:
        assert other.stdout is not None
        *numbers, folder = other.stdout.readline().split()
        number, pid = map(int, numbers)
        try:
            assert number != box.number
            with Box() as third:  # which leaves alone whatever somebody holds
                assert third.number not in (number, box.number)
            assert len(left_of(number)) == 3
            os.kill(other.pid, signal.SIGSTOP)
            os.kill(pid, 0)
        finally:
            other.kill()

    web = boxes.NAMESPACES / f"forebay-box-{number}-web"

    def gone() -> bool:
        with Box():  # perhaps under the same number
            return not (web.exists() or Path(folder).exists() or folder in Path("/proc/self/mounts").read_text())

    until(gone)
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_cluster_in_a_box(box: Box, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(box, 2, lease_s=2.0)
    cluster.upload("file", root / "file")
    cluster.add_bucket("corpus")
    for node in cluster.nodes:
        with node.client() as client:
            assert client.get("corpus", "file") == b"bytes"
    shell = Shell(cluster)
    assert not shell.onecmd("kill node2")
    cluster_sees = cluster.nodes[0]

    def says(word: str) -> bool:
        shell.onecmd("status")
        return word in capsys.readouterr().out

    until(lambda: says("missing"))
    for line, said in (("cut node1 nobody", "nobody"), ("shape node1", "help"), ("run node1 echo hello", "hello")):
        assert not shell.onecmd(line)
        assert said in capsys.readouterr().out
    assert not shell.onecmd("restart node2")
    cluster.wait_agreed()
    with cluster_sees.client() as client:
        assert client.get("corpus", "file") == b"bytes"
    assert shell.onecmd("quit")


@pytest.mark.slow
def test_the_row_of_two_copies_runs_from_end_to_end(
    able: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert main.main(["--row", "nodes-put", "--quick", "--out", str(out)]) == 0, capsys.readouterr().out
    assert "0 could not run" in capsys.readouterr().out
    said = json.loads(out.read_text())
    assert '"rate / min(disk, link)"' in json.dumps(said)


def test_without_rights_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ServerFailed, match="needs root"), Box():
        pass
