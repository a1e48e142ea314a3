"""Whole trees: names with a star, sync, mv, du."""

from __future__ import annotations

import json
import os
from pathlib import Path

from forebay.core.types import Bucket
from tests.cli.conftest import Program
from tests.client.fake_node import FakeNode


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_star_in_a_name_is_any_run_of_characters(program: Program, node: FakeNode, tmp_path: Path) -> None:
    program("get", "corpus/*/a.tar", str(tmp_path / "got"))
    assert files(tmp_path / "got") == {"train/a.tar", "val/a.tar"}
    program("cp", "s3://corpus/train/*.tar", str(tmp_path / "copied"))
    assert files(tmp_path / "copied") == {"a.tar", "b.tar"}
    assert "nothing is named like corpus/*.zip" in program("rm", "corpus/*.zip", code=3).stderr
    assert "not at its end" in program("evict", "corpus/*/a.tar", code=2).stderr
    assert not node.jobs
    program("rm", "corpus/*/a.tar", "--dry-run")
    program("rm", "corpus/*/a.tar")
    assert set(node.objects["corpus"]) == {"readme", "train/b.tar", "train/deep/c"}
    program("rm", "corpus/*", code=2)  # all of a bucket wants --yes
    assert len(node.objects["corpus"]) == 3


def test_sync_both_ways(program: Program, node: FakeNode, tmp_path: Path) -> None:
    here, remote = tmp_path / "here", node.objects["corpus"]
    program("sync", "s3://corpus/train", str(here))
    assert files(here) == {"a.tar", "b.tar", "deep/c"}
    (here / "mine").write_bytes(b"mine")
    shown = program("sync", "s3://corpus/train", str(here), "--delete", "--dry-run")
    assert f"would delete {here}/mine" in shown.stderr
    assert "1 would be deleted" in shown.stdout
    said = json.loads(program("sync", "s3://corpus/train", str(here), "--delete", "--json").stdout)
    assert (said["files"], said["skipped"], said["deleted"]) == (3, 3, 1)
    assert files(here) == {"a.tar", "b.tar", "deep/c"}

    (here / "new").write_bytes(b"new")
    os.unlink(here / "a.tar")
    os.truncate(here / "b.tar", 10)
    shown = program("sync", str(here), "s3://corpus/train/", "--delete", "--dry-run")
    assert "would send" in shown.stderr
    assert "would delete s3://corpus/train/a.tar" in shown.stderr
    assert "2 files to copy; there already: 1" in shown.stdout
    assert len(remote["train/b.tar"]) == 3_000_000
    program("sync", str(here), "s3://corpus/train/", "--delete")
    assert {key for key in remote if key.startswith("train/")} == {"train/b.tar", "train/deep/c", "train/new"}
    assert len(remote["train/b.tar"]) == 10
    assert "readme" in remote, "what is not in the folder stays"

    for source, target in ((tmp_path / "none", "s3://corpus/train"), ("s3://corpus/none", here)):
        program("sync", str(source), str(target), "--delete", code=3)
    (tmp_path / "empty").mkdir()
    program("sync", str(tmp_path / "empty"), "s3://corpus/train", "--delete", code=3)
    assert "train/new" in remote
    assert "deep/c" in files(here)
    program("sync", str(here), str(tmp_path), code=2)


def test_mv_deletes_what_is_copied(program: Program, node: FakeNode, tmp_path: Path) -> None:
    remote = node.objects["corpus"]
    program("mv", "s3://corpus/readme", "s3://corpus/docs/readme")
    assert "readme" not in remote
    assert remote["docs/readme"] == b"r" * 100
    program("mv", "-r", "s3://corpus/train/", "s3://corpus/old/")
    assert {key for key in remote if "train/" in key or "old/" in key} == {"old/a.tar", "old/b.tar", "old/deep/c"}
    program("mv", "s3://corpus/old/*.tar", str(tmp_path / "here"))
    assert files(tmp_path / "here") == {"a.tar", "b.tar"}
    assert "old/a.tar" not in remote
    program("mv", "-r", str(tmp_path / "here"), "s3://corpus/back/")
    assert files(tmp_path / "here") == set()
    assert {"back/a.tar", "back/b.tar"} <= set(remote)
    program("mv", "s3://corpus/back/a.tar", str(tmp_path / "a"))
    program("mv", str(tmp_path / "a"), "s3://corpus/a")
    assert not (tmp_path / "a").exists()
    assert len(remote["a"]) == 1000


def test_mv_never_moves_what_is_onto_itself(program: Program, node: FakeNode, tmp_path: Path) -> None:
    before = dict(node.objects["corpus"])
    folder = tmp_path / "backend"
    folder.mkdir()
    (folder / "file").write_bytes(b"kept")
    node.settings["same"] = Bucket("same", "s3://corpus/train/")
    node.settings["disk"] = Bucket("disk", f"file://{tmp_path}/backend")
    node.objects["same"] = {"a.tar": b"a" * 1000}
    node.objects["disk"] = {"file": b"kept"}
    for source, target in (
        ("s3://corpus/train", "s3://corpus/"),
        ("s3://corpus/train/a*", "s3://corpus/train/"),
        ("s3://corpus/*", "s3://corpus"),
        ("s3://same/", "s3://corpus/train/"),
        ("s3://corpus/train/", "s3://same/"),
        ("s3://disk/", str(folder)),
        (str(folder), "s3://disk/"),
    ):
        assert "move" in program("mv", "-r", source, target, code=2).stderr.replace("name another", "move"), source
    program("mv", "s3://disk/file", str(folder / "file"), code=2)
    program("mv", "-", "s3://corpus/x", code=2)
    assert "s3://BUCKET/KEY" in program("mv", "corpus/readme", "corpus/other", code=2).stderr
    assert node.objects["corpus"] == before
    assert node.objects["same"]
    assert node.objects["disk"]
    assert (folder / "file").exists()


def test_mv_does_not_take_a_likeness_for_a_copy(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"]["old/a.tar"] = b"x" * 1000  # of the same size, and not older
    program("mv", "s3://corpus/train/*.tar", "s3://corpus/old/")
    assert node.objects["corpus"]["old/a.tar"] == b"a" * 1000


def test_mv_leaves_an_object_that_was_written_meanwhile(program: Program, node: FakeNode, tmp_path: Path) -> None:
    def write_again(key: str, done: int) -> None:
        node.objects["corpus"]["readme"] = b"newer"

    node.on_body = write_again
    program("mv", "s3://corpus/readme", str(tmp_path / "readme"), code=5)
    assert node.objects["corpus"]["readme"] == b"newer"


def test_du_sums_up_one_level(program: Program) -> None:
    lines = [json.loads(line) for line in program("du", "corpus", "--json").stdout.splitlines()]
    assert [(each["name"], each["objects"], each["size_bytes"]) for each in lines] == [
        ("readme", 1, 100),
        ("train/", 3, 3_001_005),
        ("val/", 1, 2000),
        ("s3://corpus/", 5, 3_003_105),
    ]
    rows = [row.split()[-2:] for row in program("du", "corpus/train").stdout.splitlines()]
    expected = [["1", "train/a.tar"], ["1", "train/b.tar"], ["1", "train/deep/"], ["3", "s3://corpus/train"]]
    assert rows[1:] == expected
    program("du", "corpus/none", code=3)
