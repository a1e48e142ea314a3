"""Bytes that rotted on a node's disk, told by real processes: no reader is given one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte: Any = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))
