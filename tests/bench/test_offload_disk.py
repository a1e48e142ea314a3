"""The disk row of offloading: its sides against a real disk, and what it refuses to measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import load
from bench.parts import Lab
from bench.row import MIB
from bench.rows import offload_disk
from bench.rows.offload_disk import Course, Engine, Kind
from bench.workloads import BY_NAME
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.swapfile import SwapFile

pytestmark = pytest.mark.real
ROW = BY_NAME["offload-disk"]
TOTAL_BYTES = 32 * MIB


@pytest.fixture
def direct(tmp_path: Path) -> Path:
    file = SwapFile(str(tmp_path), MIB, direct=True)
    mode = file.mode
    file.close()
    if mode != "O_DIRECT":
        pytest.skip("no direct I/O here")
    return tmp_path


@pytest.mark.slow
def test_the_row_measures_all_sides_in_both_directions(
    direct: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(offload_disk, "QUICK_TOTAL_BYTES", TOTAL_BYTES)
    lab = Lab(quick=True)
    lab.dir = direct
    result = offload_disk.disk(lab, ROW)
    assert [measure.name for measure in result.measures] == [
        f"{direction}, {kind}"
        for direction in ("write", "read")
        for kind in ("1 × 32 MiB, aligned", "8 × 4 MiB, aligned", "1 × 32 MiB, unaligned", "8 × 4 MiB, unaligned")
    ]
    assert all(measure.peer.startswith("fio ") for measure in result.measures)
    assert all(rate > 1e6 for measure in result.measures for rate in (*measure.ours, *measure.theirs))
    notes = "\n".join(result.notes)
    assert "fio psync × 2: writes" in notes
    assert "the checksum (xxh3) of a piece" in notes
    assert "write: fio psync × 2 / fio io_uring" in notes or "io_uring could not be asked" in notes
    assert list(direct.iterdir()) == [], "nothing is left behind"


def test_what_fio_cannot_do_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(load.LoadFailed, match="fio psync × 2 ended with"):
        offload_disk.fio(tmp_path / "file" / "in-it", "read", Engine(threads=2), TOTAL_BYTES, 8 * MIB)


def test_a_way_of_fio_that_is_refused_is_left_out_and_told(direct: Path, monkeypatch: pytest.MonkeyPatch):
    real = offload_disk.fio

    def fio(file: Path, direction: str, engine: Engine, total_bytes: int, block_bytes: int) -> float:
        if engine.depth:
            raise load.LoadFailed(f"{engine} ended with 1: Operation not permitted")
        return real(file, direction, engine, total_bytes, block_bytes)

    monkeypatch.setattr(offload_disk, "fio", fio)
    with Course(direct, TOTAL_BYTES) as course:
        course.warm_up()
        course.round(0)
        assert course.engines == [Engine(threads=2)]
        assert course.best("write") == Engine(threads=2)
        notes = offload_disk._notes(course, direct)
    assert "fio io_uring 8 ended with 1: Operation not permitted" in notes
    assert "read: io_uring could not be asked" in notes


def test_without_direct_io_nothing_is_measured(tmp_path: Path):
    with Course(tmp_path, TOTAL_BYTES) as course:
        course.tier.close()
        course.tier = DiskTier([tmp_path], TOTAL_BYTES, direct=False)
        course.tier.open()
        with pytest.raises(load.LoadFailed, match="no direct I/O"):
            course.warm_up()


def test_tensors_lie_where_they_should():
    memory = bytes(4096 + 8 * MIB)
    parts = Kind(2, 64, 8 * MIB).tensors(memory)
    assert [len(part) for part in parts] == [4 * MIB, 4 * MIB]
    assert len(replace(Kind(2, 0, 8 * MIB), count=1).tensors(memory)[0]) == 8 * MIB
