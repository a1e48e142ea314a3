"""The doctor's rules with made-up facts, and its look at a real machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import servers
from forebay.cli.doctor import text
from forebay.core.errors import Denied
from forebay.core.messages import calls
from forebay.core.messages.node_state import ClusterNode, ClusterState, FrontState, NodeState
from forebay.core.types import Bucket
from forebay.health import facts, findings
from forebay.health.findings import (
    BucketFacts,
    ClockFacts,
    DiskFacts,
    EtcdFacts,
    Facts,
    Finding,
    LimitFacts,
    MemberFacts,
    NodeFacts,
    VersionFacts,
    judge,
    worst,
)
from tests.cli.conftest import Program
from tests.client.fake_node import FakeNode

GIB = 1 << 30
DISK = DiskFacts("/d", "ext4", 100 * GIB, 50 * GIB, 10_000_000, 9_000_000, True, True, 0.001, 1e9)
LIMITS = LimitFacts(1024, 1_048_576, 65_530, GIB, 8 * GIB)
STATE = NodeState(
    "n1", "0.1.0", 1, 0.0, "http://h:1", [FrontState(0, 2)], [calls.VolumeState("v0", "/d", "ok", GIB, 0, 3)]
)
NODE = NodeFacts("/d", "http://h:1", locked=True, answers=True, ready=True, state=STATE)
VERSIONS = VersionFacts("0.1.0", "0.1.0", "3.11.2", "6.1.0", {"lmdb": "1.6"})
SOUND = Facts([DISK], LIMITS, [ClockFacts("https://s3", 0.2)], NODE, [BucketFacts("corpus", "s3://corpus")], VERSIONS)


def only(found: Any) -> Finding:
    """The one finding that is not ok."""
    (finding,) = [finding for finding in found if finding.level != "ok"]
    return finding


def test_a_sound_machine_has_nothing_to_change() -> None:
    found = judge(SOUND)
    assert worst(found) == "ok"
    assert {finding.check for finding in found} == {
        "node", "space", "filesystem", "speed", "files", "shm", "memory", "clock", "bucket", "volume", "versions",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"error": "Permission denied"}, "disk", "bad", "Permission denied"),
        ({"free_bytes": 1000}, "space", "bad", "1000 B free"),
        ({"free_bytes": GIB}, "space", "warn", "1.0 GiB free of 100.0 GiB"),
        ({"inodes_free": 5}, "inodes", "warn", "5 free of 10000000"),
        ({"xattr": False}, "filesystem", "bad", "lacks extended attributes"),
        ({"punch": None}, "filesystem", "bad", "lacks hole punching"),
        ({"xattr": False, "punch": False}, "filesystem", "bad", "attributes and hole punching"),
        ({"filesystem": "nfs4"}, "filesystem", "bad", "on the network"),
        ({"filesystem": "tmpfs"}, "filesystem", "warn", "is memory"),
        ({"sync_s": 0.2}, "speed", "warn", "takes 200 ms"),
        ({"write_bytes_s": 50e6}, "speed", "warn", "47.7 MiB/s"),
        ({"sync_s": None}, "speed", "warn", "could not be measured"),
    ],
)
def test_disks(change: dict[str, Any], check: str, level: str, words: str) -> None:
    finding = only(findings.disk(msgspec.structs.replace(DISK, **change)))
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.what


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"files_soft": 256, "files_hard": 1024}, "files", "bad"),
        ({"files_soft": 1024, "files_hard": 4096}, "files", "warn"),
        ({"files_soft": None}, "files", "warn"),
        ({"map_count": 1000}, "maps", "warn"),
        ({"shm_free_bytes": 1 << 20}, "shm", "warn"),
        ({"memory_available_bytes": 100 << 20}, "memory", "warn"),
        ({"memory_available_bytes": None}, "memory", "warn"),
    ],
)
def test_limits(change: dict[str, Any], check: str, level: str) -> None:
    finding = only(findings.process_limits(msgspec.structs.replace(LIMITS, **change)))
    assert (finding.check, finding.level) == (check, level)


@pytest.mark.parametrize(
    ("skew_s", "level", "words"),
    [
        (0.0, "ok", "agrees"),
        (-20.0, "ok", "20 s behind"),
        (45.0, "warn", "45 s ahead"),
        (-45.0, "warn", "45 s behind"),
        (-7200.0, "bad", "2 h 0 min behind"),
        (None, "warn", "cannot be compared: no route"),
    ],
)
def test_clocks(skew_s: float | None, level: str, words: str) -> None:
    finding = findings.clock(ClockFacts("https://s3", skew_s, "no route"))
    assert finding.level == level
    assert words in finding.what


@pytest.mark.parametrize(
    ("kind", "level", "change"),
    [
        ("", "ok", ""),
        ("Denied", "bad", "credentials"),
        ("NotFound", "bad", "forebay bucket rm corpus"),
        ("NoBackendBucket", "bad", "mount it"),
        ("Unavailable", "bad", "network"),
        ("NotSupported", "warn", "read an object"),
        ("Corrupt", "bad", "log"),
    ],
)
def test_buckets(kind: str, level: str, change: str) -> None:
    finding = findings.bucket(BucketFacts("corpus", "s3://corpus", kind, "words of the node"))
    assert finding.level == level
    assert change in finding.change
    assert not kind or "words of the node" in finding.what


@pytest.mark.parametrize(
    ("node", "check", "level", "words"),
    [
        (NodeFacts("/d", "http://h:1"), "node", "warn", "no node answers"),
        (NodeFacts("/d", "http://h:1", port_holder="another program (pid 7: x)"), "port", "bad", "pid 7"),
        (NodeFacts("/d", "http://h:1", locked=True, error="refused"), "node", "bad", "does not answer (refused)"),
        (
            NodeFacts("/d", "http://h:1", locked=True, said_endpoint="http://h:2"),
            "node",
            "bad",
            "listens at http://h:2",
        ),
        (NodeFacts("/d", "http://h:1", answers=True), "node", "bad", "not ready"),
        (NodeFacts("/d", "http://h:1", answers=True, ready=True, leftovers=3), "leftovers", "warn", "3 temporary"),
    ],
)
def test_nodes(node: NodeFacts, check: str, level: str, words: str) -> None:
    finding = only(findings.node(node))
    assert (finding.check, finding.level) == (check, level)
    assert words in finding.what


def test_a_killed_node_left_its_file() -> None:
    found = list(findings.node(NodeFacts("/d", "http://h:1", said_pid=77)))
    assert [finding.check for finding in found] == ["node", "leftovers"]
    assert "77" in found[1].what


def test_what_the_node_says_of_itself() -> None:
    lost = msgspec.structs.replace(STATE, fronts=[FrontState(0, 2), FrontState(1, 3, connected=False)])
    assert "fronts 1 are not connected" in only(findings.node_state(lost)).what
    full = msgspec.structs.replace(STATE, volumes=[calls.VolumeState("v0", "/d", "full")])
    assert only(findings.node_state(full)).level == "warn"
    out = msgspec.structs.replace(STATE, volumes=[calls.VolumeState("v0", "/d", "out", reason="I/O error")])
    assert "I/O error" in only(findings.node_state(out)).what
    passing = msgspec.structs.replace(STATE, pass_bytes=200 << 20)
    assert only(findings.node_state(passing)).check == "pass-through"
    nodes = [ClusterNode(name, f"http://{name}:1", "active", "active", 0.5, 7, "serves its keys") for name in "ab"]
    nodes[1] = msgspec.structs.replace(nodes[1], kept_once=True)
    alone = msgspec.structs.replace(STATE, cluster=ClusterState("c", "a", 7, True, True, "", nodes))
    behind = msgspec.structs.replace(STATE, cluster=ClusterState("c", "a", 7, True, True, "", lagging={"b": "why"}))
    assert (only(findings.node_state(behind)).subject, "why" in only(findings.node_state(behind)).what) == ("b", True)
    assert (only(findings.node_state(alone)).check, only(findings.node_state(alone)).subject) == (
        "copies",
        "http://b:1",
    )


def test_versions() -> None:
    assert "restart the node" in only(findings.versions(msgspec.structs.replace(VERSIONS, node="0.2.0"))).change
    missing = msgspec.structs.replace(VERSIONS, libraries={"lmdb": ""})
    assert only(findings.versions(missing)).level == "bad"


small = st.one_of(st.none(), st.integers(0, 1 << 60))


@given(
    st.builds(
        DiskFacts,
        path=st.just("/d"),
        filesystem=st.sampled_from(["", "ext4", "nfs", "tmpfs"]),
        total_bytes=st.integers(0, 1 << 60),
        free_bytes=st.integers(0, 1 << 60),
        inodes_total=st.integers(0, 1 << 40),
        inodes_free=st.integers(0, 1 << 40),
        xattr=st.one_of(st.none(), st.booleans()),
        punch=st.one_of(st.none(), st.booleans()),
        sync_s=st.one_of(st.none(), st.floats(0, 1e6)),
        write_bytes_s=st.one_of(st.none(), st.floats(0, 1e12)),
        error=st.sampled_from(["", "gone"]),
    ),
    st.builds(LimitFacts, small, small, small, small, small),
    st.builds(ClockFacts, st.just("https://s3"), st.one_of(st.none(), st.floats(-1e9, 1e9)), st.just("why")),
)
@settings(max_examples=150)
def test_what_is_not_ok_says_what_to_change(disk: DiskFacts, limit: LimitFacts, clock: ClockFacts) -> None:
    found = judge(Facts([disk], limit, [clock], NodeFacts("/d", "http://h:1"), [], VERSIONS))
    for finding in found:
        assert (finding.level == "ok") == (finding.change == ""), finding
        assert finding.what


def test_the_report_for_people() -> None:
    found = [Finding("space", "ok", "/d", "fine"), Finding("clock", "bad", "https://s3", "1 h behind", "set the clock")]
    assert text(found) == (
        "ok    space  /d: fine\n"
        "BAD   clock  https://s3: 1 h behind\n"
        "             -> set the clock\n"
        "\n"
        "1 ok, 0 to look at, 1 bad"
    )
    assert "\x1b[31mBAD \x1b[0m" in text(found, colour=True)


# --- the look at a real machine --------------------------------------------------------------------------------------
def test_doctor_with_a_node(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.volumes = [calls.VolumeState("v0", str(tmp_path), "ok", GIB, 0, 0)]
    found = json.loads(program("doctor", "--json").stdout)
    checks = {finding["check"]: finding for finding in found["findings"]}
    assert checks["node"]["level"] == "ok"
    assert checks["speed"]["what"].startswith("a synced 4 KiB write takes")
    assert checks["bucket"]["level"] == "ok"
    assert list(tmp_path.rglob("*")) == [], "nothing is left behind"


def test_doctor_tells_which_bucket_is_refused(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.settings["other"] = Bucket("other", "s3://other")
    node.unreachable["other"] = Denied("the credentials are refused")
    shown = program("doctor", "--no-measure", "--volume", str(tmp_path), code=1).stdout
    assert "ok    bucket" in shown
    assert "BAD   bucket" in shown
    assert "other (s3://other): Denied: the credentials are refused" in shown
    assert shown.strip().endswith("bad")
    assert "speed" not in shown, "what was not to be measured is not missed"


def test_doctor_without_a_node_says_how_to_start_one(alone: Program, tmp_path: Path) -> None:
    shown = alone("doctor", "--volume", str(tmp_path)).stdout
    assert "-> start one with `forebay up`" in shown


def test_doctor_tells_who_took_the_port(tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        at_port = Program(f"http://127.0.0.1:{free_port}", tmp_path / "node")
        found = json.loads(at_port("doctor", "--json", "--no-measure", code=1).stdout)["findings"]
        server.shutdown(socket.SHUT_RDWR)
    (port,) = [finding for finding in found if finding["check"] == "port"]
    assert f"pid {os.getpid()}" in port["what"]


def test_a_directory_that_cannot_be_written_is_bad(alone: Program) -> None:
    found = json.loads(alone("doctor", "--json", "--volume", "/proc/self", code=1).stdout)["findings"]
    (disk,) = [finding for finding in found if finding["check"] == "disk"]
    assert disk["level"] == "bad"
    assert disk["subject"] == "/proc/self"


def test_a_real_directory_is_measured(tmp_path: Path) -> None:
    seen = facts.look_at_disk(str(tmp_path / "not" / "there" / "yet"), measure=True)
    assert seen.error == ""
    assert seen.above == str(tmp_path)
    assert any(f"it is not there, so this is {tmp_path}" in finding.what for finding in findings.disk(seen))
    rows = [row.split(" ") for row in Path("/proc/self/mounts").read_text().splitlines()]
    above = {str(tmp_path), *map(str, tmp_path.parents)}
    assert bool(seen.filesystem) == any(row[1] in above for row in rows), "a chroot's root may be in no table"
    assert seen.total_bytes > seen.free_bytes > 0
    assert seen.sync_s is not None
    assert seen.sync_s > 0
    assert seen.write_bytes_s is not None
    assert seen.write_bytes_s > 0


def test_the_mount_table_tells_the_filesystem_or_says_nothing() -> None:
    table = "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\ntmpfs /data/with\\040blank tmpfs rw 0 0\n"
    for path, kind in (("/", "ext4"), ("/database", "ext4"), ("/data", "xfs"), ("/data/with blank/x", "tmpfs")):
        assert facts.filesystem_in(table, path) == kind
    without_root = "".join(table.splitlines(keepends=True)[1:])
    assert facts.filesystem_in(without_root, "/database") == ""
    assert facts.filesystem_in(without_root, "/data/x") == "xfs"


def test_a_filesystem_that_no_table_names_is_said_to_be_unknown() -> None:
    unnamed = msgspec.structs.replace(DISK, filesystem="")
    (found,) = [one for one in findings.disk(unnamed) if one.check == "filesystem"]
    assert found.level == "ok"
    assert "unknown" in found.what


def test_the_clock_is_compared_with_any_http_server(node: FakeNode) -> None:
    seen = facts.compare_clock(node.url)
    assert seen.skew_s is not None
    assert abs(seen.skew_s) < 3
    assert facts.compare_clock("http://127.0.0.1:1").error


def test_the_endpoints_whose_clocks_count() -> None:
    buckets = [
        Bucket("a", "s3://a", options={"region": "eu-central-1"}),
        Bucket("b", "s3://b", options={"endpoint": "http://seaweed:8333"}),
        Bucket("c", "s3://c", options={"AWS_ENDPOINT_URL": "http://seaweed:8333"}),
        Bucket("d", "gs://d"),
        Bucket("e", "https://data.example/x/y"),
        Bucket("f", "file:///data"),
    ]
    assert facts.endpoints(buckets) == [
        "https://s3.eu-central-1.amazonaws.com",
        "http://seaweed:8333",
        "https://storage.googleapis.com",
        "https://data.example",
    ]


MEMBER = MemberFacts("h:2379", "3.4.23", "7", leads=True)


@pytest.mark.parametrize(
    ("told", "level", "words"),
    [
        (EtcdFacts([MEMBER, MemberFacts("i:2379", error="refused")], 0.01), "warn", "refused"),
        (EtcdFacts([MEMBER, MemberFacts("i:2379", "3.5.1", "8")], 0.01), "bad", "2 different clusters"),
        (EtcdFacts([MEMBER], 0.9), "warn", "agrees within 900 ms"),
        (EtcdFacts([MEMBER], error="no answer"), "bad", "no answer"),
        (EtcdFacts([MemberFacts("h:1", troubles=("alarm:NOSPACE",))], 0.01), "bad", "NOSPACE: it takes no change"),
    ],
)
def test_an_etcd_in_trouble_is_told(told: EtcdFacts, level: str, words: str) -> None:
    finding = only(findings.etcd(told))
    assert (finding.check, finding.level) == ("etcd", level)
    assert words in finding.what
    assert finding.change


def test_a_real_etcd_is_looked_at(program: Program, node: FakeNode, etcd: servers.EtcdCluster, tmp_path: Path) -> None:
    addresses = [*etcd.addresses, ("127.0.0.1", servers.free_ports(1)[0])]
    url = "etcd://" + ",".join(f"{host}:{port}" for host, port in addresses)
    told = json.loads(program("doctor", "--no-measure", "--volume", str(tmp_path), "--json", "--cluster", url).stdout)
    said = {one["subject"]: one for one in told["findings"] if one["check"] == "etcd"}
    assert [said[f"{host}:{port}"]["level"] for host, port in addresses] == ["ok", "ok", "ok", "warn"]
    assert sum("leads" in one["what"] for one in said.values()) == 1
    assert "agrees within" in said["majority"]["what"]
    assert "is no etcd URL" in program("doctor", "--cluster", "http://elsewhere", code=2).stderr


def test_a_shell_whose_s3_is_the_node_is_not_asked_for_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    buckets = [Bucket("a", "s3://a")]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9400/")
    assert facts.endpoints(buckets, "http://127.0.0.1:9400") == ["https://s3.us-east-1.amazonaws.com"]
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nendpoint_url = http://minio:9000\n")
    assert facts.endpoints(buckets, "http://127.0.0.1:9400") == ["http://minio:9000"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://other:9000")
    assert facts.endpoints(buckets, "http://127.0.0.1:9400") == ["http://other:9000"]
