"""What the store promises its engine and its fronts, on a real disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from forebay.core import limits
from forebay.core.errors import Exists, Invalid, Unavailable
from forebay.core.record import State
from forebay.node.store.disk.usage import small_bytes
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024
ODD_KEYS = [
    "a",
    "a/../b",
    "//",
    "/leading",
    "trailing/",
    "white space\t\n",
    "\x00\x01\x7f",
    "ünï/日本語/😀",
    "%2F?&#+",
    "k" * 1024,
    "k" * 1023 + "l",
    "é" * 512,
    "s" * 495,
    "s" * 504,
    "s" * 505,
    ".",
    "..",
    "\U0010ffff",
]


def test_blocks_become_visible_with_the_flush_and_not_before(bench: Bench) -> None:
    info, data = objects.make("train/0.tar", 200 * KIB)
    reader = bench.reader()
    landing = bench.store.begin(objects.BUCKET, info, checked_s=100.0)
    objects.land_block(landing, data, 1)
    assert landing.record is not None
    assert objects.present(landing.record) == [1]
    assert reader.lookup(objects.BUCKET, info.key) is None
    assert bench.store.pending > 0
    bench.store.flush()
    record = reader.lookup(objects.BUCKET, info.key)
    assert record is not None
    assert objects.present(record) == [1]
    assert Path(landing.path).read_bytes()[64 * KIB : 128 * KIB] == data[64 * KIB : 128 * KIB]
    for block in (0, 2, 3):
        objects.land_block(landing, data, block)
    bench.store.flush()
    landing.close()
    assert objects.read(reader, info.key) == data
    record = reader.lookup(objects.BUCKET, info.key)
    assert record is not None
    assert (record.complete, record.present, record.checked_s, record.etag) == (True, b"", 100.0, info.etag)
    assert b"X/Y" not in record.head
    assert b"Content-Type: x/y\r\n" in record.head


@pytest.mark.parametrize("key", ODD_KEYS)
def test_keys_of_every_odd_kind_are_kept_apart(bench: Bench, key: str) -> None:
    for number, each in enumerate(ODD_KEYS):
        info, data = objects.make(each, 100 + number)
        bench.store.put_inline(objects.BUCKET, info, data, checked_s=1.0)
    objects.land(bench.store, key, 70 * KIB, "v2")
    reader = bench.reader()
    for number, each in enumerate(ODD_KEYS):
        size_bytes, version = (70 * KIB, "v2") if each == key else (100 + number, "v1")
        assert objects.read(reader, each) == objects.make(each, size_bytes, version)[1]
    assert [entry.key for entry in reader.scan_entries(objects.BUCKET)] == sorted(ODD_KEYS, key=str.encode)


def test_pieces_are_written_one_behind_the_other_however_little_a_call_takes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    write = os.pwritev

    def short(fd: int, pieces: list[bytes | memoryview], offset: int) -> int:
        asked.append(len(pieces))
        return write(fd, [b"".join(pieces)[:30_001]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    info, data = objects.make("k", 150 * KIB)
    edges = [0, *range(0, 20_000, 7), 20_000, 20_000, 90_000, 150 * KIB]
    landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    landing.write(0, *(memoryview(data)[low:high] for low, high in pairwise(edges)))
    assert max(asked) <= os.sysconf("SC_IOV_MAX") < len(edges)
    for block in range(3):
        part = data[block * landing.block_bytes : (block + 1) * landing.block_bytes]
        landing.finish_block(block, xxhash.xxh3_64_intdigest(part))
    landing.close()
    bench.store.flush()
    assert objects.read(bench.reader(), "k") == data


def test_a_version_replaces_another_when_its_first_block_is_whole(bench: Bench) -> None:
    reader = bench.reader()
    old_id = objects.land(bench.store, "k", 200 * KIB, "v1")
    info, data = objects.make("k", 150 * KIB, "v2")
    landing = bench.store.begin(objects.BUCKET, info, checked_s=200.0)
    landing.write(0, data[:1000])
    bench.store.flush()
    assert objects.read(reader, "k") == objects.make("k", 200 * KIB, "v1")[1], "the old one stands until then"
    objects.land_block(landing, data, 0)
    bench.store.flush()
    record = reader.lookup(objects.BUCKET, "k")
    assert record is not None
    assert (record.version, objects.present(record)) == ("v2", [0])
    assert bench.store.take_dropped() == [old_id]
    bench.store.reclaim()
    landing.close()
    assert [usage.used_bytes for usage in bench.store.usage()] == [64 * KIB]
    assert len([path for path in (bench.dirs[0] / "data").rglob("*") if path.is_file()]) == 1


def test_a_landing_is_shared_resumed_and_ends_with_its_last_user(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB)
    one = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    other = bench.store.begin(objects.BUCKET, info, checked_s=2.0)
    assert one is other
    objects.land_block(one, data, 0)
    one.close()
    objects.land_block(other, data, 1)
    other.close()
    bench.store.flush()
    again = bench.store.begin(objects.BUCKET, info, checked_s=3.0)
    assert again.object_id == one.object_id
    assert again.record is not None
    assert objects.present(again.record) == [0, 1]
    for block in (2, 3):
        objects.land_block(again, data, block)
    bench.store.flush()
    again.close()
    assert objects.read(bench.reader(), "k") == data


def test_a_landing_without_a_whole_block_leaves_nothing(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB)
    landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    landing.write(0, data[:5000])
    landing.close()
    bench.store.flush()
    bench.store.reclaim()
    assert bench.store.lookup(objects.BUCKET, "k") is None
    assert [path for path in bench.dirs[0].rglob("*") if path.is_file() and "data/" in str(path)] == []


def test_a_superseded_landing_lists_nothing_more(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB, "v1")
    old = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    objects.land_block(old, data, 0)
    new_info, new_data = objects.make("k", 200 * KIB, "v2")
    new = bench.store.begin(objects.BUCKET, new_info, checked_s=1.0)
    objects.land_block(new, new_data, 3)
    old.write(64 * KIB, data[64 * KIB : 128 * KIB])
    assert old.finish_block(1, 5) is False
    assert old.record is None
    old.close()
    new.close()
    bench.store.flush()
    record = bench.store.lookup(objects.BUCKET, "k")
    assert record is not None
    assert (record.version, objects.present(record)) == ("v2", [3])


def test_forgetting_while_bytes_land_does_not_bring_the_object_back(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB)
    landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    objects.land_block(landing, data, 0)
    assert bench.store.forget(objects.BUCKET, "k") == landing.object_id
    objects.land_block(landing, data, 1)
    bench.store.flush()
    bench.store.reclaim()
    landing.close()
    assert bench.reader().lookup(objects.BUCKET, "k") is None
    assert bench.store.forget(objects.BUCKET, "k") is None


def test_eviction_takes_blocks_then_the_object(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 250 * KIB)
    inline = bench.store.put_inline(objects.BUCKET, *objects.make("small", 500), checked_s=1.0)
    reader = bench.reader()
    assert bench.store.drop_units([(object_id, 1), (object_id, 3), (12345, 0)]) == []
    bench.store.flush()
    assert bench.store.take_dropped() == [object_id]
    path = next(path for path in (bench.dirs[0] / "data").rglob("*") if path.is_file())
    assert bench.store.reclaim().deferred == []
    record = reader.lookup(objects.BUCKET, "k")
    assert record is not None
    assert objects.present(record) == [0, 2]
    assert path.read_bytes()[64 * KIB : 128 * KIB] == bytes(64 * KIB), "the hole is made"
    units = list(bench.store.units())
    assert [(unit.key, unit.block, unit.size_bytes) for unit in units] == [
        ("k", 0, 64 * KIB),
        ("k", 2, 64 * KIB),
        ("small", 0, small_bytes(inline)),
    ]
    gone = bench.store.drop_units([(object_id, 0), (object_id, 2), (inline.object_id, 0)])
    assert gone == [object_id, inline.object_id]
    bench.store.flush()
    bench.store.reclaim()
    assert list(bench.store.units()) == []
    assert not path.exists()
    usage = bench.store.usage()[0]
    assert (usage.used_bytes, usage.objects, usage.buckets) == (0, 0, {})


def test_a_block_that_comes_back_before_its_hole_is_made_keeps_its_bytes(bench: Bench) -> None:
    info, data = objects.make("k", 250 * KIB)
    object_id = objects.land(bench.store, "k", 250 * KIB)
    reader = bench.reader()
    for flush_between in (False, True):
        bench.store.drop_units([(object_id, 1)])
        if flush_between:
            bench.store.flush()
        landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
        objects.land_block(landing, data, 1)
        bench.store.flush()
        bench.store.reclaim()
        landing.close()
        assert objects.read(reader, "k") == data


def test_confirming_pinning_and_touching_change_the_record(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 250 * KIB)
    store = bench.store
    store.confirm([(objects.BUCKET, "k", "v1", 555.0), (objects.BUCKET, "other", "v1", 1.0)])
    assert store.set_pinned(objects.BUCKET, "k", True)
    assert not store.set_pinned(objects.BUCKET, "none", True)
    store.flush()
    record = bench.reader().lookup(objects.BUCKET, "k")
    assert record is not None
    assert (record.checked_s, record.state) == (555.0, State.PINNED)
    store.confirm([(objects.BUCKET, "k", "another version", 999.0)])
    store.set_pinned(objects.BUCKET, "k", False)
    store.touch([object_id, 42], 40_000_000)
    store.housekeep()
    store.flush()
    record = store.lookup(objects.BUCKET, "k")
    assert record is not None
    assert (record.checked_s, record.state) == (555.0, 0)
    assert {unit.used_minute for unit in store.units()} == {40_000_000}
    found = store.find(object_id)
    assert found is not None
    assert found[:2] == (objects.BUCKET, "k")
    assert store.find(42) is None


def test_an_empty_object_lives_in_its_record(bench: Bench) -> None:
    bench.store.put_inline(objects.BUCKET, *objects.make("empty", 0), checked_s=1.0)
    bench.store.flush()
    assert objects.read(bench.reader(), "empty") == b""


def test_a_restart_finds_everything_and_ids_go_on(bench: Bench) -> None:
    first = objects.land(bench.store, "k", 250 * KIB, blocks=[0, 2])
    bench.store.put_inline(objects.BUCKET, *objects.make("small", 500), checked_s=1.0)
    bench.close()
    bench.open()
    assert bench.kinds() == []
    reader = bench.reader()
    record = reader.lookup(objects.BUCKET, "k")
    assert record is not None
    assert objects.present(record) == [0, 2]
    assert objects.read(reader, "small") == objects.make("small", 500)[1]
    assert bench.store.usage()[0].buckets == {objects.BUCKET: 128 * KIB + 500}
    assert objects.land(bench.store, "new", 70 * KIB) > first


def test_capacity_bounds_what_is_taken(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("v0", capacity_bytes=300 * KIB)
    objects.land(bench.store, "a", 250 * KIB)
    objects.land(bench.store, "b", 100 * KIB)
    with pytest.raises(Unavailable, match="holds what it may"):
        bench.store.begin(objects.BUCKET, objects.make("c", 100 * KIB)[0], checked_s=1.0)
    usage = bench.store.usage()[0]
    assert (usage.state, usage.capacity_bytes, usage.used_bytes) == ("ok", 300 * KIB, 350 * KIB)


def test_two_nodes_on_one_directory_get_a_clear_error(bench: Bench) -> None:
    with pytest.raises(Exists, match=rf"in use by another node \(process {os.getpid()}\)"):
        Store.open(bench.dirs)


def test_a_newer_format_is_refused(bench: Bench) -> None:
    bench.close()
    mark = bench.dirs[0] / "volume.json"
    mark.write_text(mark.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(Invalid, match="has format 3, this version reads up to 2"):
        bench.open()
    mark.write_text(mark.read_text().replace('"format": 3', '"format": 1'))
    bench.open()
    assert '"format": 2' in mark.read_text(), "an older one is this one from now on"


def test_a_directory_with_other_files_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(Invalid, match="holds other files"):
        Store.open([tmp_path])
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_files_of_a_reader_stay_few_and_close_when_dropped(bench: Bench) -> None:
    ids = [objects.land(bench.store, f"k{number}", 70 * KIB) for number in range(6)]
    reader = bench.reader(files_open_max=3)
    for number in range(6):
        assert objects.read(reader, f"k{number}") is not None
    assert reader.files_open == 3
    record = reader.lookup(objects.BUCKET, "k5")
    assert record is not None
    leased = reader.acquire(objects.BUCKET, "k5", record)
    again = reader.acquire(objects.BUCKET, "k5", record)
    assert leased is again
    assert leased is not None
    reader.dropped(ids)
    assert reader.files_open == 0
    leased.release()
    assert os.pread(leased.fd, 10, 0), "one user is left"
    leased.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pread(leased.fd, 10, 0)


def test_acquire_says_no_when_the_object_changed_or_is_gone(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 70 * KIB)
    reader = bench.reader()
    record = reader.lookup(objects.BUCKET, "k")
    assert record is not None
    bench.store.drop_units([(object_id, 0), (object_id, 1)])
    bench.store.flush()
    assert reader.acquire(objects.BUCKET, "k", record) is None, "the file is there, the record is not"
    objects.land(bench.store, "k", 70 * KIB, "v2")
    assert reader.acquire(objects.BUCKET, "k", record) is None
    bench.store.reclaim()
    assert reader.acquire(objects.BUCKET, "k", record) is None
    assert objects.read(reader, "k") == objects.make("k", 70 * KIB, "v2")[1]


def test_a_missing_data_file_is_found_out_and_dropped(bench: Bench) -> None:
    object_id = objects.land(bench.store, "k", 70 * KIB)
    next(path for path in (bench.dirs[0] / "data").rglob("*") if path.is_file()).unlink()
    reader = bench.reader()
    assert objects.read(reader, "k") is None
    assert bench.store.examine(objects.BUCKET, "k", object_id) is None
    bench.store.flush()
    assert reader.lookup(objects.BUCKET, "k") is None
    assert bench.kinds() == ["object-missing"]
    objects.land(bench.store, "k", 70 * KIB)
    assert objects.read(reader, "k") is not None


def test_no_more_than_limits_allow_goes_inline(bench: Bench) -> None:
    size_bytes = limits.INLINE_BYTES_MAX
    bench.store.put_inline(objects.BUCKET, *objects.make("most", size_bytes), checked_s=1.0)
    bench.store.flush()
    assert objects.read(bench.reader(), "most") == objects.make("most", size_bytes)[1]
    with pytest.raises(AssertionError):
        bench.store.put_inline(objects.BUCKET, *objects.make("more", size_bytes + 1), checked_s=1.0)


def test_a_landing_that_lost_its_key_leaves_the_file_that_is_still_listed(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB, "v1")
    old = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    objects.land_block(old, data, 0)
    new = bench.store.begin(objects.BUCKET, objects.make("k", 200 * KIB, "v2")[0], checked_s=1.0)
    old.close()
    new.close()
    bench.store.flush()
    bench.store.reclaim()
    objects.land(bench.store, "k", 200 * KIB, "v1", blocks=[1, 2, 3])
    assert objects.read(bench.reader(), "k") == data


def test_a_landing_and_its_successor_on_one_file_do_not_punch_each_other(bench: Bench) -> None:
    info, data = objects.make("k", 200 * KIB, "v1")
    old = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    objects.land_block(old, data, 0)
    bench.store.flush()
    bench.store.begin(objects.BUCKET, objects.make("k", 200 * KIB, "v2")[0], checked_s=1.0).close()
    new = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
    assert new is not old
    assert new.object_id == old.object_id
    old.write(64 * KIB, data[64 * KIB : 65 * KIB])
    new.write(64 * KIB, data[64 * KIB : 65 * KIB])
    old.close()
    bench.store.flush()
    objects.land_block(new, data, 1)
    bench.store.flush()
    bench.store.reclaim()
    new.close()
    objects.land(bench.store, "k", 200 * KIB, "v1", blocks=[2, 3])
    assert objects.read(bench.reader(), "k") == data


def test_nothing_is_taken_from_readers_before_the_commit(bench: Bench) -> None:
    ids = [objects.land(bench.store, key, 250 * KIB) for key in ("part", "whole", "replaced")]
    reader = bench.reader()
    bench.store.drop_units([(ids[0], 1)])
    bench.store.forget(objects.BUCKET, "whole")
    bench.store.put_inline(objects.BUCKET, *objects.make("replaced", 10, "v2"), checked_s=1.0)
    bench.store.reclaim()
    assert bench.store.take_dropped() == []
    for key in ("part", "whole", "replaced"):
        assert objects.read(reader, key) == objects.make(key, 250 * KIB)[1]
