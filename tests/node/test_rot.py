"""Bytes that rotted on a node's disk, told by real processes: no reader is given one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Program
from tests.node.conftest import NodeProcess, pattern

MIB = 1 << 20
MakeNode = Callable[..., NodeProcess]


def test_flipped_bytes_of_data_files_and_of_the_index_reach_nobody(node: MakeNode, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    objects: dict[str, bytes] = {f"large{number}": pattern(5 * MIB + number, number) for number in range(2)}
    objects |= {f"middle{number}": pattern(100_000, 10 + number) for number in range(3)}
    objects |= {f"small{number}": b"needle %d " % number * 30 for number in range(3)}
    for key, data in objects.items():
        (lake / key).write_bytes(data)
    one = node("--fronts", "1")
    one.add_bucket("lake", f"file://{lake}")
    for key, data in objects.items():
        assert one.get("lake", key) == data
    assert one.stop() == 0
    volume = next((tmp_path / "node-0" / "node" / "volumes").iterdir())
    for file in (volume / "data").rglob("*"):
        if file.is_file() and file.stat().st_size >= 100_000:
            flip(file, file.stat().st_size // 2)
    index = next(volume.glob("index/*/data.mdb"))
    stored = index.read_bytes()
    for number in range(3):
        at = stored.find(b"needle %d needle" % number)
        while at >= 0:  # pages that are not in use any more, too
            flip(index, at + 100)
            at = stored.find(b"needle %d needle" % number, at + 270)
    one.start()
    for _ in range(2):
        for key, data in objects.items():
            assert one.get("lake", key) == data, key
    assert one.get("lake", "large0", (3 * MIB, 3 * MIB + 9)) == objects["large0"][3 * MIB : 3 * MIB + 9]
    assert one.metric("forebay_corrupt_blocks_total") == len(objects)


@pytest.mark.parametrize(("write", "durability"), [("local", "disk"), ("back", "memory")])
def test_blocks_that_only_this_node_had_are_listed_until_they_are_written_again(
    node: MakeNode, tmp_path: Path, write: str, durability: str
) -> None:
    one = node("--fronts", "1", "--flush-timeout", "0")
    more = {"freshness_s": 1e18, "write": write, "durability": durability}
    url = "local://" if write == "local" else f"file://{tmp_path}/away"
    (tmp_path / "away").mkdir()
    one.json("PUT", "buckets/mine", {"name": "mine", "url": url, **more})
    (tmp_path / "away").rmdir()
    data = pattern(13 * MIB)
    for key in ("rots", "well"):
        assert one.ask("PUT", f"/mine/{key}", {}, data)[0] == 200
    assert one.get("mine", "rots") == data
    assert one.stop() == 0
    files = sorted((tmp_path / "node-0" / "node" / "volumes" / "v0" / "data").rglob("*"))
    file = min((path for path in files if path.is_file() and path.stat().st_size > MIB), key=lambda path: path.name)
    flip(file, 5 * MIB)
    flip(file, 13 * MIB - 1)
    one.start()
    for again in range(2):
        lost = [4 * MIB, 8 * MIB, 12 * MIB, 13 * MIB]
        assert one.get("mine", "rots", (0, 4 * MIB)) == data[: 4 * MIB]
        for start, end in zip(lost[::2], lost[1::2], strict=True):
            status, answer = one.ask("GET", "/mine/rots", {"Range": f"bytes={start}-{end - 1}"})
            assert (status, b"write it again" in answer) == (500, True), answer  # S3 knows no 502
        [found] = one.json("GET", "lost/mine?prefix=ro")
        assert (found["key"], [each for pair in found["ranges"] for each in pair]) == ("rots", lost)
        assert one.metric("forebay_lost_objects") == 1
        if not again:
            assert one.stop() == 0
            one.start()
    run = Program(one.endpoint, one.dir / "node")
    run("lost", "give-up", "-r", "mine/")
    assert "bytes 4194304-8388607, 12582912-13631487 rotted" in run("lost", "ls").output
    assert one.ask("PUT", "/mine/rots", {}, data)[0] == 200
    assert one.json("GET", "lost/mine") == []
    assert one.metric("forebay_lost_objects") == 0


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte: Any = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
