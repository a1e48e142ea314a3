"""put, cp, rm: what reaches the node, what is left out, and what a slip of the hand cannot do."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import xxhash
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.put import key_for, same_bytes
from forebay.cli.stat import facts
from forebay.core.errors import Denied, Invalid
from forebay.core.messages.calls import ObjectState
from forebay.core.types import Bucket
from tests.cli.conftest import Program
from tests.client.fake_node import MODIFIED_S, FakeNode
from tests.patience import PATIENCE_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, one of them deep, all older than anything in the node."""
    root = tmp_path / "data"
    for name, data in {"a.bin": b"a" * 1000, "b.bin": b"b" * 3_000_000, "deep/er/c ü.bin": b"c"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
        os.utime(root / name, (MODIFIED_S - 1000, MODIFIED_S - 1000))
    return root


# --- put -------------------------------------------------------------------------------------------------------------
def test_one_file(program: Program, node: FakeNode, folder: Path) -> None:
    path = str(folder / "b.bin")
    assert "b.bin -> s3://corpus/new/b.bin: 2.9 MiB in" in program("put", path, "corpus/new/").stdout
    assert node.objects["corpus"]["new/b.bin"] == b"b" * 3_000_000
    program("put", path, "s3://corpus/other", "--content-type", "text/x-b")
    assert node.headers["corpus", "other"]["content-type"] == "text/x-b"
    program("put", path, "corpus")
    assert "b.bin" in node.objects["corpus"]
    assert "not what was expected" in program("put", path, "corpus/other", "--only-new", code=5).stderr
    said = json.loads(program("put", path, "corpus/x", "--json").stdout)
    assert {**said, "seconds": 0} == {
        "files": 1, "size_bytes": 3_000_000, "sent_bytes": 3_000_000, "skipped": 0, "failed": 0, "seconds": 0,
        "target": "s3://corpus/x",
    }  # fmt: skip


def test_standard_input(program: Program, node: FakeNode) -> None:
    with program.process("put", "-", "corpus/z", stdin=subprocess.PIPE) as running:
        said, _ = running.communicate(bytes(100_000), timeout=30)
    assert b"97.7 KiB" in said
    assert node.objects["corpus"]["z"] == bytes(100_000)


def test_what_cannot_be_meant_is_refused(program: Program, folder: Path, tmp_path: Path) -> None:
    assert "add -r" in program("put", str(folder), "corpus/x", code=2).stderr
    assert "leave out -r" in program("put", "-r", str(folder / "a.bin"), "corpus/x", code=2).stderr
    assert "no directory" in program("put", "-r", str(tmp_path / "missing"), "corpus/x", code=3).stderr
    assert "missing" in program("put", str(tmp_path / "missing"), "corpus/x", code=10).stderr
    assert "name the object" in program("put", "-", "corpus/", code=2).stderr
    assert "leave out -r" in program("put", "-r", "--only-new", str(folder), "corpus/x", code=2).stderr
    assert "not known here" in program("put", str(folder / "a.bin"), "nowhere/x", code=3).stderr
    (tmp_path / "empty").mkdir()
    assert "no files" in program("put", "-r", str(tmp_path / "empty"), "corpus/x", code=3).stderr
    assert key_for("/x/a", "k/") == "k/a"
    with pytest.raises(Invalid):
        key_for("x" * 2000, "k/")


def test_a_directory_goes_up_and_the_second_time_only_what_is_new(
    program: Program, node: FakeNode, folder: Path
) -> None:
    assert "3 files, 2.9 MiB in" in program("put", "-r", str(folder), "corpus/up").stdout
    assert {key for key in node.objects["corpus"] if key.startswith("up/")} == {
        "up/a.bin", "up/b.bin", "up/deep/er/c ü.bin",
    }  # fmt: skip
    node.seen.clear()
    again = json.loads(program("put", "-r", str(folder), "corpus/up/", "--json").stdout)
    assert (again["files"], again["skipped"], again["sent_bytes"]) == (3, 3, 0)
    assert not node.requests("PUT")
    (folder / "a.bin").write_bytes(b"A" * 1000)  # newer, of the same size
    (folder / "b.bin").write_bytes(b"B")
    os.utime(folder / "b.bin", (0, 0))  # older, of another size
    assert "(there already: 1)" in program("put", "-r", str(folder), "corpus/up").stdout
    assert node.objects["corpus"]["up/a.bin"] == b"A" * 1000
    assert node.objects["corpus"]["up/b.bin"] == b"B"
    node.seen.clear()
    program("put", "-r", "--force", str(folder), "corpus/up")
    assert len(node.requests("PUT")) == 3


def test_bytes_are_compared_when_that_is_asked(program: Program, node: FakeNode, folder: Path) -> None:
    program("put", "-r", str(folder), "corpus/up")
    (folder / "a.bin").write_bytes(b"A" * 1000)
    os.utime(folder / "a.bin", (0, 0))  # other bytes, but older and of the same size
    program("put", "-r", str(folder), "corpus/up")
    assert node.objects["corpus"]["up/a.bin"] == b"a" * 1000
    later_s = time.time() + 1000
    os.utime(folder / "b.bin", (later_s, later_s))  # the same bytes, but newer
    node.seen.clear()
    program("put", "-r", "--checksum", str(folder), "corpus/up")
    assert node.objects["corpus"]["up/a.bin"] == b"A" * 1000
    assert len(node.requests("PUT")) == 1
    data = (folder / "a.bin").read_bytes()
    md5, xxh3 = hashlib.md5(data).hexdigest(), xxhash.xxh3_128_hexdigest(data)
    for etag, same in ((md5, True), (f"{xxh3}-x", True), (f"{md5}-x", False), (xxh3, False), (f"{md5}-3", None)):
        assert same_bytes(str(folder / "a.bin"), etag) is same


def test_what_fails_is_named_and_the_rest_goes_on(program: Program, node: FakeNode, folder: Path) -> None:
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    done = program("put", "-r", "-j", "1", str(folder), "corpus/up", code=9)
    assert "broken: " in done.stderr
    assert "1 of 4 objects failed" in done.stderr
    assert len([key for key in node.objects["corpus"] if key.startswith("up/")]) == 3


def test_ctrl_c_keeps_what_is_whole(program: Program, node: FakeNode, folder: Path) -> None:
    for number in range(30):
        with open(folder / f"large{number:02d}", "wb") as file:
            file.truncate(20_000_000)
    running = program.process("put", "-r", "-j", "2", str(folder), "corpus/up")
    until_s = time.monotonic() + PATIENCE_S
    while "up/large03" not in node.objects["corpus"]:
        assert time.monotonic() < until_s
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)  # between looks
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert b"run the same command again for the rest" in said
    for key, data in node.objects["corpus"].items():
        assert not key.startswith("up/large") or len(data) == 20_000_000


# --- cp --------------------------------------------------------------------------------------------------------------
def test_cp_goes_where_its_arguments_say(program: Program, node: FakeNode, folder: Path, tmp_path: Path) -> None:
    program("cp", str(folder / "a.bin"), "s3://corpus/one")
    assert node.objects["corpus"]["one"] == b"a" * 1000
    program("cp", "s3://corpus/one", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == b"a" * 1000
    program("cp", "-r", str(folder), "s3://corpus/up")
    program("cp", "-r", "s3://corpus/up/", str(tmp_path / "down"))
    assert (tmp_path / "down" / "deep" / "er" / "c ü.bin").read_bytes() == b"c"
    assert "(there already: 3)" in program("cp", "-r", "s3://corpus/up/", str(tmp_path / "down")).stdout
    assert "neither side" in program("cp", "a", "b", code=2).stderr
    assert "forebay cat" in program("cp", "s3://corpus/one", "-", code=2).stderr


def test_cp_inside_the_node_moves_no_bytes_through_here(program: Program, node: FakeNode) -> None:
    node.settings["other"] = Bucket("other", "s3://other")
    assert "s3://other/a.tar: 1000 B" in program("cp", "s3://corpus/train/a.tar", "s3://other/").stdout
    assert node.objects["other"]["a.tar"] == b"a" * 1000
    assert "4 files" not in program("cp", "-r", "s3://corpus/train/", "s3://other/copy").stdout
    assert set(node.objects["other"]) == {"a.tar", "copy/a.tar", "copy/b.tar", "copy/deep/c"}
    assert not node.requests("GET", "/objects/")
    again = json.loads(program("cp", "-r", "s3://corpus/train/", "s3://other/copy", "--json").stdout)
    assert (again["skipped"], again["copied_bytes"]) == (3, 0)
    for source, target in (("s3://corpus/train/", "s3://corpus/train/x"), ("s3://corpus", "s3://corpus/x")):
        assert "copied again" in program("cp", "-r", source, target, code=2).stderr
    assert "onto itself" in program("cp", "s3://corpus/readme", "s3://corpus/readme", code=2).stderr
    assert "nothing begins" in program("cp", "-r", "s3://corpus/none/", "s3://other/", code=3).stderr


# --- rm --------------------------------------------------------------------------------------------------------------
def test_rm_deletes_what_is_named_and_no_more(program: Program, node: FakeNode) -> None:
    assert program("rm", "corpus/train/a.tar").stdout == "s3://corpus/train/a.tar: 1 object, 1000 B deleted\n"
    assert "train/a.tar" not in node.objects["corpus"]
    assert "does not exist" in program("rm", "corpus/train/a.tar", code=3).stderr
    assert "names a bucket" in program("rm", "corpus", code=2).stderr
    shown = program("rm", "-r", "--dry-run", "corpus/train/").stdout
    assert shown.splitlines() == [
        "would delete s3://corpus/train/b.tar",
        "would delete s3://corpus/train/deep/c",
        "s3://corpus/train/: 2 objects, 2.9 MiB would go",
    ]
    assert "train/b.tar" in node.objects["corpus"]
    said = json.loads(program("rm", "-r", "corpus/train/", "--json").stdout)
    assert {**said, "seconds": 0} == {
        "deleted": 2, "size_bytes": 3_000_005, "failed": 0, "dry_run": False, "seconds": 0,
    }  # fmt: skip
    assert set(node.objects["corpus"]) == {"readme", "val/a.tar"}
    assert "--dry-run" in program("rm", "-r", "corpus", code=2).stderr
    assert set(node.objects["corpus"]) == {"readme", "val/a.tar"}
    assert "nothing begins" in program("rm", "-r", "corpus/none/", code=3).stderr
    program("rm", "-r", "--yes", "corpus")
    assert not node.objects["corpus"]


def test_rm_says_what_is_still_there(program: Program, node: FakeNode) -> None:
    node.on_delete = lambda key: Denied("not yours") if key == "train/b.tar" else None
    done = program("rm", "-r", "corpus/train/", code=9)
    assert "train/b.tar: not yours" in done.stderr
    assert "still there: 1 of 3 objects" in done.stderr
    assert set(node.objects["corpus"]) == {"readme", "val/a.tar", "train/b.tar"}


def test_a_node_that_is_not_there_is_said_once(alone: Program, folder: Path) -> None:
    path = str(folder / "a.bin")
    for args in (("put", "-r", str(folder), "corpus/x"), ("rm", "-r", "corpus/x"), ("put", path, "corpus/x")):
        assert alone(*args, code=6).stderr.count("no node answers") == 1


# --- stat ------------------------------------------------------------------------------------------------------------
def test_stat_says_where_what_was_written_is() -> None:
    clean = ObjectState("b", "k", 10, "v", "e", 0.0, 10, False, False, 0.0, volume="v0")
    for state, here, there in (
        (clean, "complete, clean", "has it"),
        (msgspec.structs.replace(clean, dirty=True), "complete, dirty", "does not have this version yet"),
        (msgspec.structs.replace(clean, local=True), "complete, local", "only this node has it"),
    ):
        shown = dict(facts(state, 0.0))
        assert shown["state"] == here
        assert there in shown["backend"]
        assert shown["volume"] == "v0"


RUNS = ("run-1", "run-1/a", "run-1/b/c", "run-1.txt", "run-10/a", "run-10/b")


@pytest.mark.parametrize(
    "name, gone", [("run-1", RUNS[:3]), ("run-1/", RUNS[1:3]), ("run-1*", RUNS), ("run-10", RUNS[4:])]
)
def test_a_name_is_the_object_and_the_folder_and_nothing_that_only_begins_so(
    program: Program, node: FakeNode, name: str, gone: tuple[str, ...]
) -> None:
    node.objects["corpus"] = dict.fromkeys(RUNS, b"x")
    program("rm", "-r", f"corpus/{name}")
    assert sorted(node.objects["corpus"]) == sorted(set(RUNS) - set(gone))


def test_jobs_take_a_name_as_rm_does(program: Program, node: FakeNode) -> None:
    node.objects["corpus"] = dict.fromkeys(RUNS, b"x")
    node.cached.clear()
    node.cached.update({("corpus", key): 1 for key in RUNS[:-1]})
    said = program("evict", "corpus/run-1").stdout
    assert said.count("evicted") == 2, "a job for the object and one for the folder"
    assert "evicted s3://corpus/run-1: 1 object," in said
    assert sorted(key for _, key in node.cached) == ["run-1.txt", "run-10/a"]
    for verb in ("evict", "refresh"):
        program(verb, "corpus/run-none")
    assert node.requests("GET", "/list") == [], "what is here is worked on though the backend may be away"
    assert "neither an object nor a folder" in program("pin", "corpus/run", code=3).stderr
    program("prefetch", "corpus/run-10")
    assert ("corpus", "run-10/b") in node.cached


@pytest.mark.parametrize("answer, left", [("n", 6), ("y", 3), ("", 6)])
def test_at_a_terminal_rm_asks_before_it_deletes_many(
    program: Program, node: FakeNode, monkeypatch: pytest.MonkeyPatch, answer: str, left: int
) -> None:
    node.objects["corpus"] = dict.fromkeys(RUNS, b"x")
    monkeypatch.setattr("forebay.cli.rm._is_terminal", lambda: True)
    result = CliRunner().invoke(app, ["rm", "-r", "corpus/run-1"], input=f"{answer}\n", env=program.env)
    assert "Delete 3 objects at s3://corpus/run-1?" in result.stderr
    assert (result.exit_code == 0) == (answer == "y")
    assert len(node.objects["corpus"]) == left
    node.objects["corpus"] = dict.fromkeys(RUNS, b"x")
    assert "Delete" not in program("rm", "-r", "--yes", "corpus/run-1").stderr
    assert "Delete" not in program("rm", "-r", "corpus/run-10/a").stderr, "one object is what was named"
