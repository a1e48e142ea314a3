"""bucket, job, prefetch and its kin, status, top: outputs for people and shapes for programs."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cli import jobs, status, top
from forebay.cli.view import look
from forebay.core.errors import Denied
from forebay.core.messages import calls
from forebay.core.messages.node_state import BucketState, NodeState
from forebay.core.metrics import BUCKETS, HistogramValue, Snapshot, series
from forebay.core.types import Bucket, CorsRule
from tests.cli.conftest import Program
from tests.client.fake_node import STARTED_S, FakeNode


# --- bucket ----------------------------------------------------------------------------------------------------------
def test_a_bucket_is_added_shown_changed_and_removed(program: Program, node: FakeNode) -> None:
    said = program(
        "bucket", "add", "data", "s3://far/prefix", "--freshness", "5m", "--quota", "1.5GiB", "--write", "back",
        "--option", "endpoint=http://h:1?a=b", "--option", "region=x",
    ).stdout  # fmt: skip
    assert said == "bucket data serves s3://far/prefix\n\n  forebay ls data/\n"
    assert node.settings["data"] == Bucket(
        "data", "s3://far/prefix", 300.0, "back", 1610612736, options={"endpoint": "http://h:1?a=b", "region": "x"}
    )
    assert node.requests("PUT") == ["/-/v1/buckets/data?check=1"], "the backend was asked first"
    assert program("bucket", "ls").stdout == (
        "NAME    BACKEND          FRESHNESS  WRITE      QUOTA\n"
        "corpus  s3://corpus      60s        through        -\n"
        "data    s3://far/prefix  300s       back     1.5 GiB\n"
    )
    assert program("bucket", "show", "data").stdout == (
        "bucket data\n"
        "  backend          s3://far/prefix\n"
        "  freshness        300s\n"
        "  write            back\n"
        "  durability       disk\n"
        "  copies           1\n"
        "  dirty at most    a quarter of the capacity\n"
        "  dirty for        1 h 0 min\n"
        "  conflict         keep-both\n"
        "  quota            1.5 GiB\n"
        "  pinned           -\n"
        "  acl              private\n"
        "  cors             -\n"
        "  added            -\n"
        "  option endpoint  http://h:1?a=b\n"
        "  option region    x\n"
    )
    assert "is there already, from s3://far/prefix" in program("bucket", "add", "data", "s3://x", code=5).stderr
    program("bucket", "add", "data", "s3://x", "--replace", "--no-check")
    assert node.settings["data"].url == "s3://x"
    assert node.requests("PUT")[-1] == "/-/v1/buckets/data", "the backend was not asked"
    assert (
        program("bucket", "rm", "data").stdout
        == "bucket data is gone; what it may have had in a backend is there as it was\n"
    )
    assert "data" not in node.settings


def test_how_a_bucket_is_written_is_said_when_it_is_added_or_later(
    program: Program, node: FakeNode, tmp_path: Path
) -> None:
    program(
        "bucket", "add", "ckpt", "s3://far", "--write", "back", "--durability", "memory", "--dirty-bytes-max", "10GiB",
        "--dirty-age-max", "10m", "--conflict", "ours", "--acl", "public-read", "--option", "region=x",
    )  # fmt: skip
    wanted = Bucket(
        "ckpt", "s3://far", write="back", durability="memory", dirty_bytes_max=10 << 30, dirty_age_max_s=600.0,
        conflict="ours", acl="public-read", options={"region": "x"},
    )  # fmt: skip
    assert node.settings["ckpt"] == wanted
    said = program("bucket", "set", "ckpt", "--dirty-bytes-max", "none", "--conflict", "theirs").stdout
    assert "  dirty at most  a quarter of the capacity\n" in said
    assert node.settings["ckpt"] == msgspec.structs.replace(wanted, dirty_bytes_max=None, conflict="theirs")
    program("bucket", "set", "ckpt", "--option", "region=", "--option", "endpoint=http://h", "--no-check")
    assert node.settings["ckpt"].options == {"endpoint": "http://h"}
    assert node.requests("PUT")[-1] == "/-/v1/buckets/ckpt", "the backend was not asked"
    rules = tmp_path / "cors.json"
    rules.write_text(
        '{"CORSRules": [{"AllowedOrigins": ["https://app.example"], "AllowedMethods": ["GET", "PUT"],'
        ' "AllowedHeaders": ["*"], "ExposeHeaders": ["ETag"], "MaxAgeSeconds": 60, "ID": "app"}]}'
    )
    assert "  cors             1 rule\n" in program("bucket", "set", "ckpt", "--cors", str(rules)).stdout
    rule = CorsRule(("https://app.example",), ("GET", "PUT"), ("*",), ("ETag",), 60, "app")
    assert node.settings["ckpt"].cors == (rule,)
    program("bucket", "set", "ckpt", "--cors", "none")
    assert node.settings["ckpt"].cors == ()
    assert json.loads(program("bucket", "set", "ckpt", "--acl", "private", "--json").stdout)["name"] == "ckpt"


def test_a_bucket_without_a_backend_is_local(program: Program, node: FakeNode) -> None:
    assert (
        program("bucket", "add", "scratch", "local://").stdout
        == "bucket scratch serves local://\n\n  forebay ls scratch/\n"
    )
    assert node.settings["scratch"] == Bucket("scratch", "local://", write="local")
    said = program("bucket", "show", "scratch").stdout
    assert "durability" in said
    assert "dirty" not in said
    for wrong in (
        ("add", "x-bucket", "local://", "--write", "back"),
        ("add", "x-bucket", "s3://x", "--write", "local"),
        ("set", "scratch", "--write", "through"),
        ("set", "scratch", "--backend", "s3://x"),
    ):
        assert "go together" in program("bucket", *wrong, code=2).stderr
    program("bucket", "set", "scratch", "--backend", "s3://x", "--write", "back")
    assert (node.settings["scratch"].url, node.settings["scratch"].write) == ("s3://x", "back")


def test_buckets_as_json(program: Program) -> None:
    (found,) = json.loads(program("bucket", "ls", "--json").stdout)
    assert found["name"] == "corpus"
    assert json.loads(program("bucket", "show", "corpus", "--json").stdout)["url"] == "s3://corpus"
    assert json.loads(program("bucket", "add", "data", "s3://x", "--json").stdout)["name"] == "data"
    assert json.loads(program("bucket", "rm", "data", "--json").stdout) == {"name": "data", "removed": True}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("No", "s3://x"), "not valid"),
        (("data", "ftp://x"), "is not served"),
        (("data", "x"), "is not served"),
        (("data", "s3://"), "names no bucket"),
        (("data", "file://relative/x"), "no absolute directory"),
        (("data", "s3://x", "--freshness", "soon"), "use immutable, always"),
        (("data", "s3://x", "--write", "up"), "use through, back or local"),
        (("data", "s3://x", "--quota", "lots"), "use a number with"),
        (("data", "s3://x", "--option", "region"), "is not NAME=VALUE"),
        (("data", "s3://x", "--durability", "paper"), "use disk or memory"),
        (("data", "s3://x", "--conflict", "none"), "use keep-both, ours or theirs"),
        (("data", "s3://x", "--acl", "public"), "use private or public-read"),
        (("data", "s3://x", "--dirty-age-max", "always"), "is no time"),
        (("data", "s3://x", "--dirty-bytes-max", "lots"), "use a number with"),
        (("data", "s3://x", "--cors", "/nonexistent.json"), "cannot be read"),
        (("data", "s3://x", "--cors", "/dev/null"), "does not fit"),
    ],
)
def test_a_wrong_bucket_is_refused_with_the_rule(program: Program, args: tuple[str, ...], words: str) -> None:
    assert words in program("bucket", "add", *args, code=2).stderr


def test_a_bucket_whose_backend_refuses_is_not_added(program: Program, node: FakeNode) -> None:
    node.unreachable["data"] = Denied("the credentials are refused: check them", code="AccessDenied")
    assert "credentials are refused" in program("bucket", "add", "data", "s3://x", code=4).stderr
    assert "data" not in node.settings
    program("bucket", "add", "data", "s3://x", "--no-check")


def test_buckets_that_are_not_there(program: Program, node: FakeNode) -> None:
    assert "not known here" in program("bucket", "show", "none", code=3).stderr
    assert "not known here" in program("bucket", "rm", "none", code=3).stderr
    node.settings.clear()
    result = program("bucket", "ls")
    assert (result.stdout, "no buckets yet" in result.stderr) == ("", True)


# --- jobs ------------------------------------------------------------------------------------------------------------
def test_prefetch_pin_unpin_evict_and_refresh_change_what_is_cached(program: Program, node: FakeNode) -> None:
    assert program("prefetch", "corpus/val/").stdout == (
        "brought in s3://corpus/val/: 1 object, 2.0 KiB in 2 s, 1000 B/s\n"
    )
    assert node.cached["corpus", "val/a.tar"] == 2000
    assert program("pin", "corpus/val/").stdout.startswith("pinned s3://corpus/val/: 1 object,")
    assert ("corpus", "val/a.tar") in node.pinned
    program("unpin", "s3://corpus/val/")
    assert ("corpus", "val/a.tar") not in node.pinned
    assert program("evict", "corpus", "--dry-run").stdout == "would have evicted s3://corpus/: 3 objects, 2.9 MiB\n"
    assert len(node.cached) == 3
    program("evict", "corpus/val/", "corpus/train/b*")
    assert list(node.cached) == [("corpus", "train/a.tar")]
    assert program("refresh", "corpus").stdout.startswith("checked s3://corpus/: 5 objects")


def test_what_jobs_say_is_counted_and_names_what_was_named(program: Program, node: FakeNode) -> None:
    node.cached.clear()
    assert program("prefetch", "--exact", "corpus/readme").stdout == (
        "brought in s3://corpus/readme: 1 object, 100 B in 2 s, 50 B/s\n"
    )
    assert program("evict", "corpus/readme").stdout == "evicted s3://corpus/readme: 1 object, 100 B in 2 s\n"
    assert program("evict", "corpus/readme").stdout == "evicted s3://corpus/readme/: 0 objects, 0 B in 2 s\n"
    assert program("prefetch", "--dry-run", "corpus/val/").stdout == (
        "would have brought in s3://corpus/val/: 1 object, 2.0 KiB\n"
    )
    program("pin", "corpus/val/")
    for _ in range(2):
        error = program("unpin", "corpus/train/", code=3)
        assert (error.stdout, "pins of this bucket: s3://corpus/val/" in error.stderr) == ("", True)
    assert program("unpin", "corpus/val").stdout == "unpinned s3://corpus/val/: 1 object, 2.0 KiB in 2 s\n"
    assert "pins of this bucket: none" in program("unpin", "corpus/val/", code=3).stderr


def test_exact_addresses_are_objects_and_not_prefixes(program: Program, node: FakeNode) -> None:
    node.objects["corpus"]["train/a.tar.gz"] = b"x"
    program("evict", "corpus")
    program("prefetch", "--exact", "corpus/train/a.tar", "s3://corpus/readme")
    assert set(node.cached) == {("corpus", "train/a.tar"), ("corpus", "readme")}
    assert len(node.requests("POST", "/prefetch")) == 1, "one job for one bucket"
    assert "names a bucket and no object" in program("prefetch", "--exact", "corpus", code=2).stderr


def running(done: int, **more: Any) -> calls.JobState:
    return calls.JobState(
        "", "prefetch", "corpus", "train/", "running", done, 0, 3, done * 1000, 3000, STARTED_S, None, **more
    )


def test_to_prefetch_nothing_is_an_error(program: Program, node: FakeNode) -> None:
    for nothing in ("corpus/trian/", "corpus/trian*", "corpus/trian"):
        assert "see `forebay ls corpus/" in program("prefetch", nothing, code=3).stderr
    assert not node.jobs


def test_only_bytes_that_moved_have_a_rate() -> None:
    done = msgspec.structs.replace(running(3), state="done", ended_s=STARTED_S + 2, bytes_done=3000)
    assert jobs.sentence(done) == "brought in s3://corpus/train/: 3 objects, 2.9 KiB in 2 s, 1.5 KiB/s"
    evicted = msgspec.structs.replace(done, verb="evict")
    assert jobs.sentence(evicted) == "evicted s3://corpus/train/: 3 objects, 2.9 KiB in 2 s"


def test_a_bucket_that_is_not_there_is_named_with_the_one_that_is_meant(program: Program) -> None:
    assert program("ls", "corpsu/", code=3).stderr.rstrip().endswith("; did you mean corpus?")
    assert "mean" not in program("ls", "other-thing/", code=3).stderr
    assert json.loads(program("stat", "corpsu/a", "--json", code=3).stderr)["error"]["code"] == "NoSuchBucket"


def test_a_job_is_watched_until_it_ends(program: Program, node: FakeNode) -> None:
    ended = msgspec.structs.replace(running(3), state="done", ended_s=STARTED_S + 4)
    node.job_steps["prefetch"] = [running(0), running(1), running(2), ended]
    (found,) = json.loads(program("prefetch", "corpus/train/", "--json").stdout)
    assert (found["state"], found["units_done"], found["bytes_done"]) == ("done", 3, 3000)
    assert len(node.requests("GET", "/jobs/")) == 3


def test_a_job_need_not_be_waited_for(program: Program, node: FakeNode) -> None:
    node.job_steps["prefetch"] = [running(0), running(1)]
    said = program("prefetch", "corpus/train/", "--no-wait").stdout
    assert said == "job prefetch-1 runs: prefetch s3://corpus/train/: 0 of 3 objects\n"
    assert node.requests("GET", "/jobs/") == []


def test_a_job_with_failures_names_them_and_exits_9(program: Program, node: FakeNode) -> None:
    ended = msgspec.structs.replace(
        running(2), state="done", ended_s=STARTED_S + 1, units_failed=1, errors=["train/b.tar: Denied: no rights"]
    )
    node.job_steps["prefetch"] = [running(0), ended]
    result = program("prefetch", "corpus/train/", code=9)
    assert "1 of 3 objects failed" in result.stderr
    assert "train/b.tar: Denied: no rights" in result.stderr
    failed = msgspec.structs.replace(running(0), state="failed", errors=["NotFound: no such bucket"])
    node.job_steps["prefetch"] = [failed]
    assert "no such bucket" in program("prefetch", "corpus/train/", code=1).stderr


def test_ctrl_c_stops_the_watching_and_not_the_job(program: Program, node: FakeNode) -> None:
    node.job_steps["prefetch"] = [running(1)] * 10_000
    watching = program.process("prefetch", "corpus/train/")
    while not node.requests("GET", "/jobs/"):
        assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert b"job prefetch-1 goes on in the node: `forebay job watch prefetch-1`" in err
    assert node.jobs["prefetch-1"].state == "running"


def test_a_node_that_goes_away_while_a_job_is_watched(program: Program, node: FakeNode) -> None:
    node.job_steps["prefetch"] = [running(1)] * 10_000
    watching = program.process("prefetch", "corpus/train/")
    while not node.requests("GET", "/jobs/"):
        assert watching.poll() is None
    node.server.socket.close()
    node.drop_connections()
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 6
    assert b"lost sight of job prefetch-1" in err


def test_jobs_are_listed_shown_watched_and_cancelled(program: Program, node: FakeNode) -> None:
    result = program("job", "ls")
    assert (result.stdout, "no jobs" in result.stderr) == ("", True)
    node.job_steps["prefetch"] = [running(1)] * 3
    program("prefetch", "corpus/train/", "--no-wait")
    program("evict", "corpus/val/")
    assert program("job", "ls").stdout == (
        "JOB         VERB      ON             STATE    OBJECTS  FAILED    DONE  STARTED\n"
        "evict-2     evict     corpus/val/    done         0/0       0     0 B  2025-10-09 08:53:20\n"
        "prefetch-1  prefetch  corpus/train/  running      1/3       0  1000 B  2025-10-09 08:53:20\n"
    )
    assert "runs: prefetch" in program("job", "show", "prefetch-1").stdout
    assert "was cancelled" in program("job", "cancel", "prefetch-1").stdout
    program("job", "watch", "prefetch-1", code=9)
    assert json.loads(program("job", "show", "prefetch-1", "--json").stdout)["state"] == "cancelled"
    assert len(json.loads(program("job", "ls", "--json").stdout)) == 2
    assert "not known" in program("job", "show", "none", code=3).stderr
    assert "not known" in program("job", "cancel", "none", code=3).stderr


# --- status ----------------------------------------------------------------------------------------------------------
def test_status_at_a_glance(program: Program, node: FakeNode) -> None:
    node.volumes.append(calls.VolumeState("v1", "/mnt/disk", "out", 1 << 40, 0, 0, "I/O error"))
    state = msgspec.json.decode(program("status", "--json").stdout, type=NodeState)
    assert status.text(state, "", STARTED_S + 7500) == (
        f"node n1 at {node.url}\n"
        "  version    0.1.0\n"
        "  up for     2 h 5 min\n"
        "  processes  engine 4242; fronts 4243, 4244\n"
        "  now        flights: 2, cold reads: 3, jobs: 0\n"
        "\n"
        "VOLUME  STATE              USED  CAPACITY   FULL  OBJECTS  PATH\n"
        "v0      ok              3.0 GiB   1.0 TiB  0.3 %       12  /var/lib/forebay/v0\n"
        "v1      out: I/O error      0 B   1.0 TiB  0.0 %        0  /mnt/disk\n"
        "\n"
        "BUCKET     CACHED  QUOTA  BACKEND      LAST ANSWER\n"
        "corpus  977.5 KiB      -  s3://corpus  ok"
    )
    assert f"node n1 at {node.url}" in program("status").stdout


# --- top -------------------------------------------------------------------------------------------------------------
def histogram(**buckets: int) -> HistogramValue:
    counts = [0] * BUCKETS
    for name, count in buckets.items():
        counts[int(name[1:])] = count
    return HistogramValue(counts, 1.0)


def looks() -> tuple[Snapshot, Snapshot]:
    reads, read_bytes = "forebay_reads_total", "forebay_read_bytes_total"
    before = Snapshot(
        {series(reads, result="hit"): 100.0, series(reads, result="miss"): 50.0},
        {"forebay_hit_seconds": histogram(b4=1000)},
    )
    after = Snapshot(
        {
            series(reads, result="hit"): 190.0,
            series(reads, result="miss"): 60.0,
            series(reads, result="error"): 2.0,
            series(read_bytes, result="hit"): 3 * 2.0**20,
            series(read_bytes, result="miss"): 2.0**20,
            series("forebay_requests_total", verb="get", status="200"): 102.0,
            "forebay_sent_bytes_total": 4.5 * 2**20,
            series("forebay_backend_requests_total", bucket="corpus", verb="get"): 10.0,
            series("forebay_backend_read_bytes_total", bucket="corpus"): 2.0**20,
            series("forebay_backend_errors_total", bucket="corpus", kind="Unavailable"): 1.0,
            series("forebay_evictions_total", reason="full"): 4.0,
            "forebay_evicted_bytes_total": 8 * 2.0**20,
            "forebay_flights": 3.0,
            "forebay_connections_open": 5.0,
        },
        {
            "forebay_hit_seconds": histogram(b4=1090, b7=10),
            "forebay_miss_first_byte_seconds": histogram(b15=10),
        },
    )
    return before, after


def test_top_shows_what_happened_between_two_looks() -> None:
    state = NodeState(
        "n1", "0.1.0", 1, STARTED_S, "http://h:1", [], [calls.VolumeState("v0", "/d", "ok", 4 << 30, 1 << 30, 2)],
        [BucketState("corpus", "s3://corpus", 1 << 30)], jobs_running=1,
    )  # fmt: skip
    view = look(*looks(), 2.0, state)
    assert (view.hit_ratio, view.hit_ratio_bytes, view.requests_s, view.errors) == (0.9, 0.75, 51.0, 2)
    assert (view.hit.count, view.hit.p50_s, view.hit.p99_s) == (100, 16e-6, 128e-6)
    assert top.text(view) == (
        "forebay top  http://h:1  over 2 s\n"
        "  hits           90.0 % of reads, 75.0 % of bytes\n"
        "  requests       51/s over 5 connections; failed reads: 2\n"
        "  to clients     1.5 MiB/s from disk, 512.0 KiB/s from backends\n"
        "  from backends  512.0 KiB/s in 5 requests/s, 3 flights; 1 failed\n"
        "  cache          1.0 GiB of 4.0 GiB (25.0 %); 4 evicted, 4.0 MiB/s\n"
        "  jobs           1\n"
        "\n"
        "LATENCY              COUNT    P50 <    P90 <    P99 <\n"
        "hit                    100    16 µs    16 µs   128 µs\n"
        "miss, first byte        10  32.8 ms  32.8 ms  32.8 ms\n"
        "backend, first byte      0        -        -        -\n"
        "\n"
        "BUCKET   CACHED      BACKEND  REQUESTS  FAILED  LAST ANSWER\n"
        "corpus  1.0 GiB  512.0 KiB/s       5/s       1  ok"
    )


def test_top_of_an_idle_node_divides_by_nothing(program: Program, node: FakeNode) -> None:
    found = json.loads(program("top", "--once", "--json", "--interval", "0.1").stdout)
    assert found["hit_ratio"] is None
    assert found["hit"] == {"count": 0, "p50_s": None, "p90_s": None, "p99_s": None}
    assert "-  of reads" not in program("top", "--once", "--interval", "0.1").stdout


def test_top_counts_its_looks(program: Program, node: FakeNode) -> None:
    before, after = looks()
    node.snapshots = [before, after, after]
    views = [
        json.loads(line) for line in program("top", "--json", "--count", "2", "--interval", "0.1").stdout.splitlines()
    ]
    assert [view["hit_ratio"] for view in views] == [0.9, None]
    assert len(program("top", "--count", "2", "--interval", "0.1").stdout.split("forebay top")) == 3
    assert "--interval" in program("top", "--interval", "0", code=2).stderr


def test_top_on_a_pipe_ends_with_ctrl_c_and_without_a_word(program: Program, node: FakeNode) -> None:
    watching = program.process("top", "--interval", "0.1", "--json")
    assert watching.stdout is not None
    watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert (watching.returncode, err) == (0, b"")
