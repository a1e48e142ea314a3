"""Several volumes: keys spread, listings merge, and a volume that missed a session is not believed blindly."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.core.errors import Invalid
from forebay.core.machines.opening import MISSED
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024


def test_keys_spread_and_readers_agree_where(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("a", "b", "c")
    names = [f"dir/k{number:03d}" for number in range(90)]
    for name in names:
        objects.land(bench.store, name, 70 * KIB)
    counts = [usage.objects for usage in bench.store.usage()]
    assert sum(counts) == 90
    assert min(counts) > 10
    reader = bench.reader()
    assert all(objects.read(reader, name) == objects.make(name, 70 * KIB)[1] for name in names)
    assert [entry.key for entry in reader.scan_entries(objects.BUCKET, "dir/", "dir/k004", 50)] == names[5:55]
    assert len(list(bench.store.units())) == 180


def test_a_lost_volume_loses_only_its_keys_and_a_returning_one_is_asked_about(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make_bench("a", "b")
    names = [f"k{number}" for number in range(40)]
    for name in names:
        objects.land(bench.store, name, 70 * KIB)
    first = bench.store.volumes()[0]
    with_first = {unit.key for unit in bench.store.units()}
    bench.close()

    alone = Store.open([tmp_path / "b"], block_bytes=64 * KIB)  # a is not there this time
    kept = {unit.key for unit in alone.units()}
    assert 5 < len(kept) < 35
    for name in names:
        objects.land(alone, name, 70 * KIB, "v2")
    alone.close()

    bench.open()
    assert bench.kinds() == ["volume-missed-session"]
    assert bench.events[0].volume_id == first.volume_id
    seen = set()
    for name in names:
        record = bench.store.lookup(objects.BUCKET, name)
        assert record is not None
        if name in kept:
            assert (record.version, record.checked_s) == ("v2", 100.0)
        else:
            assert (record.version, record.checked_s) == ("v1", MISSED), "an old version must not pass for fresh"
        seen.add(name)
    assert seen == with_first
    assert sum(usage.objects for usage in bench.store.usage()) == 40, "copies in the wrong place went"
    bench.close()
    bench.open()
    assert bench.kinds() == ["volume-missed-session"], "once"


def test_a_new_volume_takes_its_share(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make_bench("a")
    for number in range(40):
        objects.land(bench.store, f"k{number}", 70 * KIB)
    bench.close()
    bench.dirs.append(tmp_path / "b")
    bench.open()
    assert bench.kinds() == []
    objects_left = [usage.objects for usage in bench.store.usage()]
    assert 5 < objects_left[0] < 35
    assert objects_left[1] == 0
    reader = bench.reader()
    for number in range(40):
        assert (objects.read(reader, f"k{number}") is None) == (
            bench.store.lookup(objects.BUCKET, f"k{number}") is None
        )
        objects.land(bench.store, f"k{number}", 70 * KIB)
        assert objects.read(reader, f"k{number}") is not None


def test_a_copied_volume_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.close()
    shutil.copytree(bench.dirs[0], tmp_path / "copy")
    with pytest.raises(Invalid, match="is a copy of another volume"):
        Store.open([bench.dirs[0], tmp_path / "copy"])
    bench.open()


def test_a_reader_says_which_volume_it_cannot_open(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("a", "b")
    for number in range(20):
        objects.land(bench.store, f"k{number}", 70 * KIB)
    volumes = bench.store.volumes()
    bench.close()
    shutil.rmtree(bench.dirs[1])
    reader = StoreReader(volumes)
    assert set(reader.failures) == {volumes[1].volume_id}
    found = [objects.read(reader, f"k{number}") is not None for number in range(20)]
    assert 0 < sum(found) < 20
    reader.close()
    bench.open()


def test_what_was_in_the_wrong_place_does_not_come_back_with_a_machine_stop(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Nobody would find it there, and eviction would not count it. Its unlinking need not be on the disk yet."""
    bench = make_bench("a", "b")
    home = {name: bench.store.volume_of(objects.BUCKET, name) for name in (f"k{number}" for number in range(20))}
    bench.close()
    alone = Store.open([tmp_path / "b"], block_bytes=64 * KIB)  # a is not there this time
    for name in home:
        objects.land(alone, name, 70 * KIB)
    alone.close()
    shutil.copytree(tmp_path / "b" / "data", tmp_path / "kept")
    bench.open()
    bench.close(clean=False)
    shutil.rmtree(tmp_path / "b" / "data")
    shutil.copytree(tmp_path / "kept", tmp_path / "b" / "data")
    for volume in ("a", "b"):
        mark = tmp_path / volume / "volume.json"
        mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
    store = Store.open([tmp_path / "a", tmp_path / "b"], block_bytes=64 * KIB, later=True)
    assert not [each for each in store.catching.steps() if each is not None]
    found = {
        (volume.id, unit.key) for volume in store.usable() for unit in store.units() if home[unit.key] == volume.id
    }
    assert {key for _, key in found} == {name for name, where in home.items() if where == store.usable()[1].id}
    assert len({unit.object_id for unit in store.units()}) == len(found), "each in its place, and nothing else"
    store.close()
