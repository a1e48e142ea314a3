"""The demo as its audience runs it, shrunk: it ends with a table and a picture, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.servers import MissingProgram, find_program
from demo import corpus
from demo.picture import Run, draw
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
MARK = "FOREBAY_DEMO_TEST"
SMALL = ["--megabytes", "8", "--rate", "8", "--latency", "5", "--epochs", "2"]


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment that every process started under the demo inherits, so that stragglers can be found."""
    try:
        find_program("weed")
    except MissingProgram as missing:
        pytest.skip(str(missing))
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    yield environment
    for pid in marked_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def marked_processes(tmp_path: Path) -> list[int]:
    """Processes that carry the mark in their environment, zombies aside."""
    wanted = f"{MARK}={tmp_path}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def start(environment: dict[str, str], out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "demo", "--out", str(out), *SMALL, *more]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.real
@pytest.mark.slow
def test_the_demo_ends_with_a_table_and_a_picture(marked: dict[str, str], tmp_path: Path):
    job = start(marked, tmp_path / "out")
    said, _ = job.communicate(timeout=170)
    assert job.returncode == 0, said
    assert "through Forebay" in said
    assert "from the bucket" in said
    assert "from the cache" in said
    assert "resumed with 1 worker instead of 2" in said
    assert "faster over 2 epochs" in said
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "demo.txt").read_text() in said
    assert not marked_processes(tmp_path)
    through = [line.split() for line in said.splitlines() if line.endswith("%")]
    hits = [float(words[-1].rstrip("%")) for words in through]
    assert len(hits) == 2
    assert hits[0] < 50 < hits[1], "the second epoch came from the cache"


@pytest.mark.real
@pytest.mark.slow
def test_the_demo_of_a_cluster_kills_a_node_under_a_job_that_goes_on(marked: dict[str, str], tmp_path: Path):
    job = start(marked, tmp_path / "out", "--cluster", "--megabytes", "40", "--rate", "20")  # not all read ahead
    said, _ = job.communicate(timeout=270)
    assert job.returncode == 0, said
    for what in ("killed", "is read at the node at", "in each of 3 epochs, each once"):
        assert what in said
    assert said.count("active  33.") == 3
    assert (tmp_path / "out" / "cluster.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "cluster.txt").read_text() in said
    assert not marked_processes(tmp_path)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["1. shards", "$ forebay up", "through Forebay: epoch 1"])
def test_ctrl_c_stops_everything_at_any_moment(marked: dict[str, str], tmp_path: Path, moment: str):
    job = start(marked, tmp_path / "out")
    assert job.stdout is not None
    heard = []
    for line in job.stdout:
        heard.append(line)
        if moment in line:
            break
    else:
        pytest.fail(f"never said {moment!r}: {''.join(heard)}")
    os.killpg(job.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    rest, _ = job.communicate(timeout=60)
    assert job.returncode == 130, "".join(heard) + rest
    assert "everything that was started is gone" in rest
    assert "Traceback" not in rest
    deadline = time.monotonic() + PATIENCE_S
    while marked_processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked_processes(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("forebay-")], "temporary directories"


def test_shards_hold_whole_samples_of_every_kind_and_keep_files_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    files: dict[str, list[Path]] = {kind: [] for kind in corpus.KINDS}
    for kind, (suffix, *_) in corpus.KINDS.items():
        for number in range(60):
            path = sources / f"{kind}-{number}{suffix}"
            path.write_bytes(f"{kind} {number} ".encode() * 400)
            files[kind].append(path)
    monkeypatch.setattr(corpus, "find_files", lambda: files)
    monkeypatch.setattr(corpus, "SHARD_BYTES", 300_000)
    shards = corpus.make_shards(tmp_path / "shards", 1_000_000, lambda text: None)
    seen: dict[str, set[str]] = {"train": set(), "test": set()}
    kinds = set()
    for shard in shards:
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                kind, number = file.read().decode().split()[:2]
                assert member.name.endswith(f".{kind}")
                kinds.add(kind)
                seen[shard.name.partition("-")[0]].add(f"{kind} {number}")
    assert kinds == set(corpus.KINDS)
    assert seen["test"], "something is held out"
    assert not seen["train"] & seen["test"], "no file is in both"
    written = [path.stat().st_mtime_ns for path in shards]
    again = corpus.make_shards(tmp_path / "shards", 1_000_000, lambda text: None)
    assert [path.stat().st_mtime_ns for path in again] == written, "complete shards are used again"


def test_the_picture_is_drawn_from_two_runs(tmp_path: Path):
    def run(name: str, seconds: list[float]) -> Run:
        return Run(name, seconds, progress=[(sum(seconds[: n + 1]), 100 * (n + 1)) for n in range(len(seconds))])

    draw(tmp_path / "x.png", run("from the bucket", [9, 9, 9]), run("through Forebay", [9, 3, 3]), "A title")
    assert (tmp_path / "x.png").stat().st_size > 10_000
