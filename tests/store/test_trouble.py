"""Disks that are full, read-only, gone or out of descriptors: pass through, say so, and nothing wrong is served."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core.errors import Unavailable
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024
MIB = 1024 * KIB


def _mount(arguments: list[str], path: Path) -> None:
    path.mkdir()
    try:
        done = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount program here")
    if done.returncode:
        pytest.skip(f"mounting a small filesystem is refused here: {done.stderr.strip()}")


def _umount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MiB in memory."""
    path = tmp_path / "disk"
    _mount(["-t", "tmpfs", "-o", "size=24m", "forebay-test"], path)
    yield path
    _umount(path)


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 that turns read-only at its first error; the file that, written to, makes one."""
    image, path = tmp_path / "image", tmp_path / "disk"
    with open(image, "wb") as file:
        file.truncate(48 * MIB)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4 here")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    _mount(["-o", "loop,errors=remount-ro", str(image)], path)
    try:
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", str(path)], capture_output=True, text=True, check=True
        ).stdout.strip()
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        if not trigger.exists():
            pytest.skip("this kernel cannot be told to meet an ext4 error")
        yield trigger
    finally:
        _umount(path)


def _fill_by_others(path: Path) -> None:
    """Somebody else takes every last byte."""
    with open(path, "wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(4 * KIB))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def _fill_up(store: Store) -> list[str]:
    """Land objects until the disk refuses; the keys that landed whole."""
    landed: list[str] = []
    try:
        while len(landed) < 200:
            objects.land(store, f"k{len(landed)}", 700 * KIB)
            landed.append(f"k{len(landed)}")
    except Unavailable:
        return landed
    raise AssertionError("200 objects of 700 KiB went into 24 MiB")


def test_a_full_disk_passes_through_serves_what_it_has_and_heals(
    small_disk: Path, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench("disk/v0")
    store, reader = bench.store, bench.reader()
    landed = _fill_up(store)
    assert len(landed) > 15
    assert bench.kinds() == ["volume-full"]
    assert store.usage()[0].state == "full"
    with pytest.raises(Unavailable, match="is full"):
        store.begin(objects.BUCKET, objects.make("more", 700 * KIB)[0], checked_s=1.0)
    for key in landed:
        assert objects.read(reader, key) == objects.make(key, 700 * KIB)[1]

    store.drop_units([(unit.object_id, unit.block) for unit in store.units() if unit.key in landed[:8]])
    store.flush()
    store.reclaim()
    store.housekeep()
    assert bench.kinds() == ["volume-full"], "files in use keep their space"
    reader.dropped(store.take_dropped())
    store.housekeep()
    assert bench.kinds() == ["volume-full", "volume-healed"]
    objects.land(store, "more", 700 * KIB)
    assert objects.read(reader, "more") is not None


def test_a_disk_filled_by_others_down_to_its_last_byte_can_still_evict(
    small_disk: Path, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench("disk/v0")
    store, reader = bench.store, bench.reader()
    for number in range(10):
        objects.land(store, f"k{number}", 700 * KIB)
    landing = store.begin(objects.BUCKET, objects.make("late", 700 * KIB)[0], checked_s=1.0)
    _fill_by_others(small_disk / "others")
    with pytest.raises(Unavailable):
        landing.write(0, objects.make("late", 700 * KIB)[1])
    landing.close()
    assert "volume-full" in bench.kinds()
    store.drop_units([(unit.object_id, unit.block) for unit in store.units() if unit.key != "k0"])
    store.flush()
    assert "changes-lost" not in bench.kinds(), "the ballast gave the index room"
    store.reclaim()
    assert objects.read(reader, "k0") is not None
    assert objects.read(reader, "k1") is None
    (small_disk / "others").unlink()
    store.housekeep()
    objects.land(store, "late", 700 * KIB)
    assert objects.read(reader, "late") is not None


def test_when_even_the_index_finds_no_room_the_old_state_stands(
    small_disk: Path, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench("disk/v0")
    store, reader = bench.store, bench.reader()
    objects.land(store, "k", 700 * KIB)
    (small_disk / "v0" / "ballast").unlink()
    _fill_by_others(small_disk / "others")
    used = store.usage()[0].used_bytes
    store.forget(objects.BUCKET, "k")
    for volume in store.usable():
        for number in range(4000):
            volume.index.put("used", b"%08d" % number, bytes(500))
    store.flush()
    assert "changes-lost" in bench.kinds()
    assert (store.usage()[0].used_bytes, store.pending) == (used, 0)
    store.reclaim()
    assert objects.read(reader, "k") == objects.make("k", 700 * KIB)[1]
    (small_disk / "others").unlink()


def test_a_commit_that_is_cut_short_for_want_of_room_leaves_the_volume_full(
    small_disk: Path, make_bench: Callable[..., Bench]
) -> None:
    """LMDB says EIO when some of its pages found room and others did not."""
    bench = make_bench("disk/v0")
    store = bench.store
    objects.land(store, "k", 700 * KIB)
    (small_disk / "v0" / "ballast").unlink()
    others = small_disk / "others"
    _fill_by_others(others)
    (volume,) = store.usable()
    for free_pages in (3, 6, 9):
        os.truncate(others, others.stat().st_size - free_pages * 4 * KIB)
        for number in range(200):
            volume.index.put("used", b"%08d" % number, bytes(1900))
        store.flush()
        assert (volume.state, "changes-lost" in bench.kinds()) == ("full", True)
        bench.events.clear()
    others.unlink()
    store.housekeep()
    assert volume.state == "ok"
    assert objects.read(bench.reader(), "k") is not None


def test_a_disk_that_turns_read_only_is_taken_out(
    failing_disk: Path, make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make_bench("disk/v0")
    bench.close()
    bench.dirs.append(tmp_path / "v1")
    Store.open([tmp_path / "v1"]).close()
    mark = tmp_path / "v1" / "volume.json"
    mark.write_text(re.sub('"weight": [0-9.]+', '"weight": 1.0', mark.read_text()))  # as small as the other
    store = bench.open()
    for number in range(40):
        objects.land(store, f"k{number}", 70 * KIB)
    assert all(usage.objects > 5 for usage in store.usage())
    failing_disk.write_text("forebay test")
    refused = 0
    for number in range(40, 80):
        try:
            objects.land(store, f"k{number}", 70 * KIB)
        except Unavailable:
            refused += 1
    store.flush()
    assert refused >= 1
    assert bench.kinds().count("volume-out") == 1
    assert [at.path for at in store.volumes()] == [str(tmp_path / "v1")]
    assert [usage.state for usage in store.usage()] == ["out", "ok"]
    objects.land(store, "after", 70 * KIB)  # every key has a home again
    reader = bench.reader()
    assert objects.read(reader, "after") is not None
    read = [objects.read(reader, f"k{number}") for number in range(80)]
    assert all(data in (None, objects.make(f"k{number}", 70 * KIB)[1]) for number, data in enumerate(read))
    assert sum(data is not None for data in read) > 5


def test_a_directory_removed_under_us_is_noticed(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make_bench("v0", "v1")
    for number in range(40):
        objects.land(bench.store, f"k{number}", 70 * KIB)
    shutil.rmtree(tmp_path / "v0")
    bench.store.housekeep()
    assert bench.kinds() == ["volume-out"]
    assert "No such file" in bench.events[0].detail
    reader = bench.reader()
    for number in range(40):
        objects.land(bench.store, f"k{number}", 70 * KIB, "v2")
        assert objects.read(reader, f"k{number}") == objects.make(f"k{number}", 70 * KIB, "v2")[1]
    assert not (tmp_path / "v0").exists(), "and it is not made again in the wrong place"


def test_the_only_volume_removed_leaves_pass_through(bench: Bench) -> None:
    objects.land(bench.store, "k", 70 * KIB)
    reader = bench.reader()
    shutil.rmtree(bench.dirs[0])
    with pytest.raises(Unavailable):
        objects.land(bench.store, "other", 70 * KIB)
    bench.store.flush()
    assert bench.store.volumes() == []
    assert bench.store.lookup(objects.BUCKET, "k") is None
    with pytest.raises(Unavailable, match="every volume is out"):
        bench.store.put_inline(objects.BUCKET, *objects.make("s", 10), checked_s=1.0)
    assert objects.read(reader, "k") is None, "its file is gone: the engine is asked, and the backend"
    reader.refresh([])
    assert reader.lookup(objects.BUCKET, "k") is None


def test_an_unusable_volume_at_start_is_left_out(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("a file, not a directory")
    bench = make_bench("v0", "v1")
    assert [at.path for at in bench.store.volumes()] == [str(tmp_path / "v0")]
    assert bench.kinds() == ["volume-out"]
    with pytest.raises(Unavailable, match="no volume can be used"):
        Store.open([tmp_path / "v1"])


def _hoard_descriptors(hoard: list[int]) -> None:
    """Take all that are left."""
    try:
        while True:
            hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise


def test_running_out_of_descriptors_is_not_the_disk_s_fault(bench: Bench) -> None:
    for number in range(8):
        objects.land(bench.store, f"k{number}", 70 * KIB)
    reader = bench.reader()
    for number in range(4):
        assert objects.read(reader, f"k{number}") is not None
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        _hoard_descriptors(hoard)
        assert objects.read(reader, "k7") is not None, "idle files make way"
        _hoard_descriptors(hoard)
        with pytest.raises(Unavailable):
            objects.land(bench.store, "new", 70 * KIB)
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert bench.kinds() == []
    objects.land(bench.store, "new", 70 * KIB)
