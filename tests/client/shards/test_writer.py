"""Shards that are written to a folder are read by tarfile and by name, and are the same however often it was killed."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay.client.shards.writer import NOTE, FileContent
from forebay.core.formats.samples import INDEX, Shard

Sample = dict[str, Any]


def numbered(count: int, size_bytes: int = 300) -> list[Sample]:
    return [{"__key__": f"{n:04d}", "bin": bytes([n % 251]) * (size_bytes + n), "cls": n} for n in range(count)]


def write(folder: Path, samples: list[Sample], **how: Any) -> list[Shard]:
    """As a program does that may have been killed before."""
    with forebay.ShardWriter(folder, **how) as writer:
        for sample in samples[writer.samples :]:
            writer.write(sample)
    return writer.shards


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        return {member.name: opened.extractfile(member).read() for member in opened}  # type: ignore[union-attr]


def killed(work: Callable[[], object], calls: int) -> bool:
    """Whether `work`, in a process of its own, was killed just before it synced, renamed or unlinked for the
    `calls`-th time."""
    child = os.fork()
    if not child:
        left = calls

        def counting(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **more: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **more)

            return call

        try:
            for name in ("fsync", "replace", "unlink"):
                setattr(os, name, counting(getattr(os, name)))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, "the writer failed"
    return os.WIFSIGNALED(status)


def test_shards_hold_the_samples_and_an_index(tmp_path: Path) -> None:
    samples = numbered(10)
    shards = write(tmp_path / "out", samples, shard_bytes=6000)
    found = contents(tmp_path / "out")
    assert sorted(found) == sorted([INDEX, *(shard.url for shard in shards)])
    assert len(shards) > 2
    read = [members(found[shard.url]) for shard in shards]
    assert [len(names) // 2 for names in read] == [shard.nsamples for shard in shards]
    assert all(len(found[shard.url]) == shard.filesize <= 6000 for shard in shards)
    together = {name: data for names in read for name, data in names.items()}
    assert together == {f"{s['__key__']}.bin": s["bin"] for s in samples} | {
        f"{s['__key__']}.cls": b"%d" % s["cls"] for s in samples
    }
    index = json.loads(found[INDEX])
    assert [(shard["url"], shard["nsamples"]) for shard in index["shardlist"]] == [(s.url, s.nsamples) for s in shards]


def test_values_become_bytes_as_decoders_read_them(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"pixels")
    array = np.arange(6).reshape(2, 3)
    sample = {
        "__key__": "ü/a",
        "__url__": "what WebDataset adds",
        "jpg": tmp_path / "picture",
        "txt": "Grüße",
        "cls": 7,
        "json": {"b": [1, None], "a": "x"},
        "npy": array,
        "raw": memoryview(b"view"),
    }
    write(tmp_path / "out", [sample], samples_max=1)
    found = members((tmp_path / "out" / "shard-000000.tar").read_bytes())
    assert list(found) == [f"ü/a.{extension}" for extension in ("cls", "jpg", "json", "npy", "raw", "txt")]
    assert found["ü/a.jpg"] == b"pixels"
    assert found["ü/a.txt"] == "Grüße".encode()
    assert found["ü/a.cls"] == b"7"
    assert found["ü/a.json"] == b'{"a":"x","b":[1,null]}'
    assert (np.load(io.BytesIO(found["ü/a.npy"])) == array).all()
    assert found["ü/a.raw"] == b"view"


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ({"jpg": b""}, "__key__ is None"),
        ({"__key__": "a.b", "jpg": b""}, "without dots"),
        ({"__key__": "a"}, "no parts"),
        ({"__key__": "a", "JPG": b"", "jpg": b""}, "one part to a reader"),
        ({"__key__": "a", "jpg": object()}, "'jpg' of 'a' is of object: give it as bytes"),
        ({"__key__": "a", "json": object()}, "'json' of 'a' cannot be written"),
        ({"__key__": "a", "npy": [object()]}, "'npy' of 'a' cannot be written"),
        ({"__key__": "a", "bin": bytes(9000)}, "take larger shards"),
        ({"__key__": "0000", "bin": b""}, "two samples of a shard are called '0000'"),
    ],
)
def test_a_sample_that_is_refused_leaves_no_trace(tmp_path: Path, sample: Sample, says: str) -> None:
    good = numbered(3)
    write(tmp_path / "expected", good, shard_bytes=9000)
    with forebay.ShardWriter(tmp_path / "out", shard_bytes="9000") as writer:
        writer.write(good[0])
        with pytest.raises(forebay.Invalid, match=says):
            writer.write(sample)
        for one in good[1:]:
            writer.write(one)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_a_file_that_changes_under_it_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    content = FileContent(tmp_path / "file")
    good = numbered(2)
    write(tmp_path / "expected", good)
    with forebay.ShardWriter(tmp_path / "out") as writer:
        writer.write(good[0])
        for now in (b"123", b"1234567"):
            (tmp_path / "file").write_bytes(now)
            with pytest.raises(forebay.Precondition, match="changed while it was read"):
                writer.write({"__key__": "a", "bin": content})
        writer.write(good[1])
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_killed_at_every_moment_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    samples, out = numbered(11), tmp_path / "out"
    write(tmp_path / "expected", samples, samples_max=4)
    expected = contents(tmp_path / "expected")
    for kills in range(100):
        again = tmp_path / f"again-{kills}"
        if not killed(partial(write, again, samples, samples_max=4), kills):
            break
        there = contents(again)
        named = set(expected) & set(there)
        assert {name: there[name] for name in named} == {name: expected[name] for name in named}, "a name means whole"
        assert INDEX not in there or named == set(expected)
        write(again, samples, samples_max=4)
        assert contents(again) == expected
    assert 15 < kills < 99, "it syncs and renames for each shard"
    for _ in range(100):  # a shard and its note take seven of these calls, so each start comes further
        if not killed(partial(write, out, samples, samples_max=4), 8):
            break
    assert contents(out) == expected


def test_only_an_empty_place_is_written_to(tmp_path: Path) -> None:
    write(tmp_path / "out", numbered(2))
    with pytest.raises(forebay.Exists, match="out is finished: write to an empty place"):
        forebay.ShardWriter(tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_bytes(b"")
    with pytest.raises(forebay.Exists, match=r"holds 'mine.txt'"):
        forebay.ShardWriter(tmp_path / "other")


def test_another_input_is_not_mixed_with_what_is_there(tmp_path: Path) -> None:
    def begun(**how: Any) -> forebay.ShardWriter:
        return forebay.ShardWriter(tmp_path / "out", **how)

    writer = begun(samples_max=1, made_of="v1")
    for sample in numbered(3):
        writer.write(sample)
    with pytest.raises(forebay.Busy, match="another process writes shards"):
        begun(samples_max=1, made_of="v1")
    writer.abandon()
    with pytest.raises(forebay.Closed):
        writer.write(numbered(1)[0])
    with pytest.raises(forebay.Precondition, match="samples_max: 1 then, 2 now"):
        begun(samples_max=2, made_of="v1")
    with pytest.raises(forebay.Precondition, match="input is another"):
        begun(samples_max=1, made_of="v2")
    with begun(samples_max=1, made_of="v1") as writer:
        assert writer.samples == 2
        with pytest.raises(forebay.Invalid, match="leave out the first 2"):
            writer.write(numbered(1)[0])
    assert INDEX in contents(tmp_path / "out")


def test_a_whole_shard_that_is_gone_is_said(tmp_path: Path) -> None:
    writer = forebay.ShardWriter(tmp_path, samples_max=1)
    for sample in numbered(3):
        writer.write(sample)
    writer.abandon()
    (tmp_path / "shard-000001.tar").unlink()
    with pytest.raises(forebay.Precondition, match=r"shard-000001.tar of .* is gone"):
        forebay.ShardWriter(tmp_path, samples_max=1)


def test_nothing_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(forebay.Invalid, match="no sample"), forebay.ShardWriter(tmp_path / "out"):
        pass
    assert contents(tmp_path / "out") == {}
    assert NOTE not in contents(tmp_path / "out")


@pytest.mark.parametrize("place", ["", "s3://", "gopher://x", "UPPER/x"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(forebay.Invalid):
        forebay.ShardWriter(place)
