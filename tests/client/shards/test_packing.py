"""`forebay shard pack`: a real program and a real node, killed anywhere; folders and buckets make the same shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.client.shards import packing
from forebay.client.shards.packing import pack
from tests.client.shards.test_writer import contents, members
from tests.node.conftest import NodeProcess
from tests.patience import until


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """24 samples in two classes; a large part, an empty one."""
    folder = tmp_path / "in"
    for number in range(24):
        where = folder / f"n{number % 2}.d"
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{number:03d}.jpg").write_bytes(bytes([number]) * (5_000_000 if number == 7 else 1000 * number))
        (where / f"{number:03d}.cls").write_bytes(b"%d" % (number % 2))
    return folder


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A node's URL, and the directory behind its bucket `lake`."""
    folder = tmp_path_factory.mktemp("lake")
    (folder / "bucket").mkdir()
    node = NodeProcess(folder / "node-0", "--fronts", "1")
    node.start()
    try:
        node.add_bucket("lake", f"file://{folder}/bucket")
        yield node.endpoint, folder / "bucket"
    finally:
        node.stop()


@pytest.fixture
def bucket(lake: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory behind `lake`, at the node that FOREBAY_URL names."""
    monkeypatch.setenv("FOREBAY_URL", lake[0])
    return lake[1]


def program(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forebay.cli.main", "shard", "pack", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_folder_is_packed_by_name(pictures: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    shards = pack(
        pictures, tmp_path / "out", shard_bytes="6MB", progress=lambda done, total: heard.append((done, total))
    )
    assert sum(shard.nsamples for shard in shards) == 24
    read = {name: data for s in shards for name, data in members((tmp_path / "out" / s.url).read_bytes()).items()}
    assert read == {
        str(path.relative_to(pictures)): path.read_bytes() for path in pictures.rglob("*") if path.is_file()
    }
    assert list(read) == sorted(read), "in byte order of their keys"
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] == sum(map(len, read.values()))


def test_what_cannot_be_packed_is_said_before_anything_is_written(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (pictures / "README").write_bytes(b"")
    with pytest.raises(forebay.Invalid, match="'README' is no part of a sample"):
        pack(pictures, out)
    with pytest.raises(forebay.Invalid, match=r"'n0.d/000' has no 'json'"):
        pack(pictures, out, parts=["jpg", ".JSON"])
    (pictures / "n0.d" / "000.JPG").write_bytes(b"")
    with pytest.raises(forebay.Invalid, match="'JPG' and 'jpg'"):
        pack(pictures, out, parts=["jpg"])
    with pytest.raises(forebay.Invalid, match="lies in"):
        pack(pictures, pictures / "out")
    with pytest.raises(forebay.NotFound, match="nothing to pack"):
        pack(pictures, out, parts=["png"])
    with pytest.raises(forebay.NotFound, match="no folder"):
        pack(tmp_path / "nowhere", out)
    assert not out.exists()
    with pytest.raises(forebay.Invalid, match="larger shards"):
        pack(pictures, out, parts=["cls"], shard_bytes=2000)
    assert [shard.nsamples for shard in pack(pictures, tmp_path / "labels", parts=["cls"])] == [24]


@pytest.mark.real
def test_killed_programs_go_on_to_the_same_bytes_in_a_bucket(
    pictures: Path, tmp_path: Path, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(pictures, tmp_path / "expected", samples_max=3)
    expected = contents(tmp_path / "expected")
    subprocess.run(["cp", "-r", pictures, bucket / "raw"], check=True)
    for source, target in ((pictures, "from-folder"), ("s3://lake/raw", "from-bucket/")):
        out = bucket / target
        for wanted in (1, 4, 7):
            running = program(source, f"s3://lake/{target}", "--samples", 3)
            until(lambda: running.poll() is not None or len(list(out.glob("*.tar"))) >= wanted)  # noqa: B023
            running.kill()
            running.communicate()
            there = {name: data for name, data in contents(out).items() if name in expected}
            assert all(expected[name] == data for name, data in there.items())
        if not (out / "shardindex.json").exists():
            done = program(source, f"s3://lake/{target}", "--samples", 3, "--json")
            said, err = done.communicate(timeout=90)
            assert done.returncode == 0, err
            told = json.loads(said)
            assert (told["shards"], told["samples"], told["target"]) == (8, 24, f"s3://lake/{target}")
        assert contents(out) == expected
        again = program(source, f"s3://lake/{target}")
        said, err = again.communicate(timeout=90)
        assert (again.returncode, said) == (5, "")
        assert "is finished" in err
    monkeypatch.setattr(packing, "AHEAD_ITEMS", 5)
    pack("lake/raw", tmp_path / "small-batches", samples_max=3)
    assert contents(tmp_path / "small-batches") == expected


@pytest.mark.real
def test_two_writers_to_one_prefix_never_mix(bucket: Path) -> None:
    with forebay.ShardWriter("lake/out", samples_max=1) as first:
        first.write({"__key__": "a", "txt": "first"})
        second = forebay.ShardWriter("s3://lake/out/", samples_max=1)
        second.write({"__key__": "b", "txt": "second"})
        first.write({"__key__": "c", "txt": "first"})
        with pytest.raises(forebay.Precondition, match="another process writes"):
            second.write({"__key__": "d", "txt": "second"})
        second.abandon()
    assert members((bucket / "out" / "shard-000000.tar").read_bytes()) == {"a.txt": b"first"}
    assert members((bucket / "out" / "shard-000001.tar").read_bytes()) == {"c.txt": b"first"}


@pytest.mark.real
def test_an_object_that_changes_meanwhile_is_an_error(bucket: Path, tmp_path: Path) -> None:
    raw = bucket / "changing"
    raw.mkdir()
    for name in ("a.bin", "b.bin"):
        (raw / name).write_bytes(os.urandom(5_000_000))

    def change(done: int, total: int) -> None:
        with forebay.connect() as client:
            client.put("lake", "changing/b.bin", b"other")

    with pytest.raises(forebay.Precondition):
        pack("lake/changing", tmp_path / "out", progress=change)
    assert not (tmp_path / "out" / "shardindex.json").exists()


@pytest.mark.real
def test_what_was_packed_is_read_by_name_and_its_length_is_known(bucket: Path, pictures: Path) -> None:
    from forebay.torch import ShardDataset

    pack(pictures, "lake/train", samples_max=5)
    dataset = ShardDataset("lake/train/", decode={})
    assert dataset.known_samples == 24, "from the index, with no shard read"
    assert [dataset[n]["__key__"] for n in (0, 23)] == ["n0.d/000", "n1.d/023"]
    assert dataset[23]["cls"] == b"1"
