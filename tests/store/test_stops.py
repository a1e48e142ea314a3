"""What survives which stop: a killed writer, a stopped machine, a broken index. Nothing wrong is ever served."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.machines.opening import MISSED
from forebay.core.record import State
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024
WORKER = str(Path(__file__).with_name("store_worker.py"))


def _data_files(volume: Path) -> list[Path]:
    return [path for path in (volume / "data").rglob("*") if path.is_file() and path.suffix != ".head"]


def _check_all(store: Store, volume: Path) -> int:
    """Every block that the index lists holds the bytes of its version; how many."""
    blocks = 0
    for unit in list(store.units()):
        record = store.lookup(unit.bucket, unit.key)
        assert record is not None
        _, data = objects.make(unit.key, record.size_bytes, record.version)
        if record.inline is not None:
            assert record.inline == data
            continue
        path = next(path for path in _data_files(volume) if path.name == f"{unit.object_id:016x}")
        start = unit.block * record.block_bytes
        with open(path, "rb") as file:
            assert os.pread(file.fileno(), unit.size_bytes, start) == data[start : start + unit.size_bytes]
        blocks += 1
    return blocks


def _unclean_machine_stop(volume: Path) -> None:
    """What is left when the power went: a mark of another boot, and whatever the index became."""
    mark = volume / "volume.json"
    boot = '"boot_id": "'
    text = mark.read_text()
    at = text.index(boot) + len(boot)
    mark.write_text(text[:at] + "another-boot" + text[text.index('"', at) :].replace('"clean": true', '"clean": false'))


@pytest.mark.slow
def test_a_writer_killed_at_random_moments_leaves_only_what_is_right(tmp_path: Path) -> None:
    volume, chance, served = tmp_path / "v0", random.Random(5), 0
    for seed in range(12):
        command = [sys.executable, WORKER, "write", str(volume), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(chance.randrange(1, 150))]
            process.kill()
        assert all(line.startswith("acked") for line in lines), "the writer ended by itself"
        store = Store.open([volume], block_bytes=64 * KIB)
        assert os.listdir(volume / "tmp") == []
        served += _check_all(store, volume)
        for _ in store.sweep():
            pass
        store.flush()
        store.reclaim()
        ids = {unit.object_id for unit in store.units()}
        assert {int(path.name, 16) for path in _data_files(volume)} <= ids, "no file without a record is left"
        on_disk = sum(path.stat().st_blocks * 512 for path in _data_files(volume))
        assert on_disk <= store.usage()[0].used_bytes + len(ids) * 300 * KIB
        _check_all(store, volume)
        store.close(clean=bool(seed % 2))
    assert served > 50


def test_the_same_boot_or_a_clean_stop_keeps_the_index(bench: Bench) -> None:
    objects.land(bench.store, "k", 250 * KIB)
    bench.store.put_inline(objects.BUCKET, *objects.make("small", 500), checked_s=1.0)
    bench.close(clean=False)
    bench.open()
    bench.close(clean=True)
    mark = bench.dirs[0] / "volume.json"
    assert '"clean": true' in mark.read_text()
    mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
    bench.open()
    assert '"clean": false' in mark.read_text()
    assert bench.kinds() == []
    reader = bench.reader()
    assert objects.read(reader, "k") is not None
    assert objects.read(reader, "small") is not None


@pytest.mark.parametrize("xattrs", [True, False])
def test_after_a_machine_stop_blocks_are_found_again_and_doubted(
    make_bench: Callable[..., Bench], xattrs: bool
) -> None:
    bench = make_bench("v0", xattrs=xattrs)
    volume = bench.dirs[0]
    objects.land(bench.store, "whole", 250 * KIB)
    objects.land(bench.store, "part", 250 * KIB, blocks=[0, 3])
    torn_id = objects.land(bench.store, "torn", 250 * KIB)
    lost_id = objects.land(bench.store, "lost", 250 * KIB)
    dropped_id = objects.land(bench.store, "dropped", 250 * KIB)
    objects.land(bench.store, "k" * 1000, 70 * KIB)
    bench.store.put_inline(objects.BUCKET, *objects.make("small", 500), checked_s=1.0)
    bench.store.drop_units([(dropped_id, 1)])
    bench.store.flush()
    bench.store.reclaim()
    bench.close(clean=False)

    # pages that never reached the disk, a header that did not, and an index that is half zeros
    by_id = {int(path.name, 16): path for path in _data_files(volume)}
    with open(by_id[torn_id], "r+b") as file:
        file.seek(64 * KIB)
        file.write(bytes(64 * KIB))
    if xattrs:
        os.removexattr(by_id[lost_id], "user.forebay")
    else:
        os.truncate(str(by_id[lost_id]) + ".head", 10)
    index = volume / "index" / "1" / "data.mdb"
    os.truncate(index, index.stat().st_size // 2)
    _unclean_machine_stop(volume)

    bench.open()
    assert bench.kinds() == ["index-rebuilt"]
    assert "the machine stopped" in bench.events[0].detail
    store, reader = bench.store, bench.reader()
    assert os.listdir(volume / "index") == ["2"]
    assert reader.lookup(objects.BUCKET, "small") is None, "inline objects are lost with the index; they are clean"
    assert reader.lookup(objects.BUCKET, "lost") is None
    assert not by_id[lost_id].exists()
    for key, blocks in (("whole", [0, 1, 2, 3]), ("part", [0, 3]), ("torn", [0, 1, 2, 3]), ("dropped", [0, 2, 3])):
        record = reader.lookup(objects.BUCKET, key)
        assert record is not None
        assert objects.present(record) == blocks
        assert record.state & State.UNVERIFIED
        assert record.checked_s == MISSED
        assert store.doubtful(record, range(4)) == blocks
        bad = store.check_blocks(record, objects.BUCKET, key, blocks)
        assert bad == ([1] if key == "torn" else [])
        after = store.settle_checked(objects.BUCKET, key, record.object_id, [b for b in blocks if b not in bad], bad)
        assert after is not None
        assert after.state == 0
        assert store.doubtful(after, range(4)) == []
    store.flush()
    assert objects.read(reader, "whole") == objects.make("whole", 250 * KIB)[1]
    assert objects.read(reader, "torn") is None
    assert objects.read(reader, "k" * 1000) is not None
    assert "block-bad" in bench.kinds()
    objects.land(store, "torn", 250 * KIB, blocks=[1])
    assert objects.read(reader, "torn") == objects.make("torn", 250 * KIB)[1]
    assert objects.land(store, "new", 70 * KIB) > max(by_id)


def test_doubt_goes_block_by_block(bench: Bench) -> None:
    objects.land(bench.store, "k", 250 * KIB)
    bench.close(clean=False)
    _unclean_machine_stop(bench.dirs[0])
    bench.open()
    store = bench.store
    record = store.lookup(objects.BUCKET, "k")
    assert record is not None
    store.settle_checked(objects.BUCKET, "k", record.object_id, [2], [])
    assert store.doubtful(record, range(4)) == [0, 1, 3]
    store.drop_units([(record.object_id, 0)])
    store.flush()
    objects.land(store, "k", 250 * KIB, blocks=[0])  # what lands now is not in doubt
    now = store.lookup(objects.BUCKET, "k")
    assert now is not None
    assert store.doubtful(now, range(4)) == [1, 3]
    after = store.settle_checked(objects.BUCKET, "k", record.object_id, [1, 3], [])
    assert after is not None
    assert (after.state, after.complete) == (0, True)
    bench.close()
    bench.open()
    again = bench.store.lookup(objects.BUCKET, "k")
    assert again == after


def test_of_two_versions_that_survive_the_later_wins(bench: Bench) -> None:
    objects.land(bench.store, "k", 250 * KIB, "v1")
    first = _data_files(bench.dirs[0])[0]
    kept = first.with_name("kept")
    shutil.copy2(first, kept)
    os.setxattr(kept, "user.forebay", os.getxattr(first, "user.forebay"))
    objects.land(bench.store, "k", 250 * KIB, "v2")
    bench.store.reclaim()
    kept.rename(first)
    bench.close(clean=False)
    _unclean_machine_stop(bench.dirs[0])
    bench.open()
    record = bench.store.lookup(objects.BUCKET, "k")
    assert record is not None
    assert record.version == "v2"
    assert len(_data_files(bench.dirs[0])) == 1
    assert bench.store.usage()[0].used_bytes == 250 * KIB


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "garbage", "values", "crash"])
def test_a_damaged_index_is_rebuilt_though_the_boot_is_the_same(bench: Bench, damage: str) -> None:
    for number in range(40):
        objects.land(bench.store, f"k{number}", 70 * KIB)
    bench.close(clean=True)
    path = bench.dirs[0] / "index" / "1" / "data.mdb"
    if damage == "cut":
        with open(path, "r+b") as file:
            file.truncate(8192)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "gone":
        shutil.rmtree(path.parent)
    elif damage == "garbage":
        path.write_bytes(os.urandom(200_000))
    elif damage == "values":
        data = path.read_bytes()
        assert data.count(b"etag-v1") >= 40
        path.write_bytes(data.replace(b"etag-v1", b"\xc1\xff\xff\xff\xff\xff\xff"))
    else:
        (path.parent / "opening").write_bytes(b"...")  # three starts died while they read this index
    bench.open()
    if damage == "values":  # met by the first walk
        assert list(bench.store.units()) == []
        assert bench.kinds() == ["volume-out"]
        bench.close(clean=False)
        bench.events.clear()
        bench.open()
    assert bench.kinds() == ["index-rebuilt"]
    reader = bench.reader()
    for number in range(40):
        assert objects.read(reader, f"k{number}") == objects.make(f"k{number}", 70 * KIB)[1]


def test_a_lost_mark_costs_the_index_but_not_the_data(bench: Bench) -> None:
    objects.land(bench.store, "k", 70 * KIB)
    bench.close()
    (bench.dirs[0] / "volume.json").unlink()
    bench.open()
    assert bench.kinds() == ["index-rebuilt"]
    assert objects.read(bench.reader(), "k") is not None


def test_rubbish_in_the_directories_is_swept(bench: Bench) -> None:
    objects.land(bench.store, "k", 70 * KIB)
    volume = bench.dirs[0]
    bench.close()
    (volume / "tmp" / "0000000000000001").write_bytes(b"half a file")
    stranger = volume / "data" / "ab" / "cd" / "00000000abcd0000"
    stranger.parent.mkdir(parents=True, exist_ok=True)
    for path in (stranger, stranger.with_name("note.txt"), stranger.with_suffix(".head")):
        path.write_bytes(b"x" * 1000)
    bench.open()
    assert os.listdir(volume / "tmp") == []
    assert sum(bench.store.sweep()) == 2
    assert len(_data_files(volume)) == 1
    assert not stranger.with_suffix(".head").exists()
    assert objects.read(bench.reader(), "k") is not None


def test_a_reader_follows_a_rebuilt_index(bench: Bench) -> None:
    """As fronts that outlive their engine do: same volume, another index directory."""
    objects.land(bench.store, "k", 70 * KIB)
    volumes = bench.store.volumes()
    bench.store.close()
    reader = StoreReader(volumes)
    assert objects.read(reader, "k") is not None
    _unclean_machine_stop(bench.dirs[0])
    bench.open()
    objects.land(bench.store, "new", 70 * KIB)
    assert objects.read(reader, "new") is None, "it still looks at the old index"
    reader.refresh(bench.store.volumes())
    assert objects.read(reader, "new") is not None
    assert reader.failures == {}
    reader.close()
