"""What only this node has, when disks are full, gone, moved or rotten: refused or kept, and never silently lost."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.core.errors import Corrupt, Unavailable, VolumeMissing
from forebay.core.record import Record, State
from forebay.node.store.disk.index import Index
from forebay.node.store.writer import misplaced, volumes
from forebay.node.store.writer.writer import Store
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import LARGE, SMALL, Writer
from tests.store.store_objects import BUCKET, Bench
from tests.store.test_written_model import kill

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def writer(bench: Bench) -> Writer:
    return Writer(bench)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MiB in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "forebay-test", str(path)], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount program here")
    if done.returncode:
        pytest.skip("mounting a small filesystem is refused here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


# --- bytes that are gone ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("machine", [True, False])
@pytest.mark.parametrize("damage", ["gone", "short"])
def test_an_owed_object_whose_file_is_gone_is_told_and_kept_out(writer: Writer, machine: bool, damage: str) -> None:
    bench = writer.bench
    objects.land(bench.store, "k", LARGE, "old")
    record = writer.write("k")
    writer.write("other")
    path = Path(bench.store.data_path(record))
    bench.close()
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 1000)
    if machine:
        _another_boot(bench.dirs[0])
    for _ in range(2):
        bench.events.clear()
        bench.open()
        assert bench.kinds().count("object-lost") == 1
        assert "corpus/k: its data file" in next(each.detail for each in bench.events if each.kind == "object-lost")
        assert bench.store.lookup(BUCKET, "k") is None
        assert set(owning.owed(bench.store)) == {"other"}
        for _ in bench.store.sweep():
            pass
        assert path.exists() == (damage == "short"), "the evidence stays"
        bench.close()
    bench.events.clear()
    bench.open()
    writer.write("k", version="w2")
    bench.close()
    bench.events.clear()
    bench.open()
    assert bench.events == []
    assert owning.read(bench, "k") == objects.make("k", LARGE, "w2")[1]


def _another_boot(volume: Path) -> None:
    mark = volume / "volume.json"
    mark.write_text(
        mark.read_text().replace('"boot_id": "', '"boot_id": "x').replace('"clean": true', '"clean": false')
    )


def test_a_file_that_vanishes_while_we_run_is_told_by_the_sweep_and_by_whoever_reads(writer: Writer) -> None:
    bench = writer.bench
    for key in ("seen", "swept"):
        record = writer.write(key)
        Path(bench.store.data_path(record)).unlink()
        if key == "seen":
            assert bench.store.examine(BUCKET, key, record.object_id) is None
        else:
            for _ in bench.store.sweep():
                pass
        assert bench.kinds() == ["object-lost"]
        assert bench.store.lookup(BUCKET, key) is None
        assert record.object_id in bench.store.take_dropped() or bench.store.flush()
        bench.events.clear()
    assert owning.owed(bench.store) == {}


def test_rotten_blocks_are_not_served_and_the_rest_is(writer: Writer) -> None:
    bench = writer.bench
    record = writer.write("k")
    with open(bench.store.data_path(record), "r+b") as file:
        file.seek(70 * KIB)
        file.write(b"rot")
    bad = bench.store.check_blocks(record, BUCKET, "k", range(4))
    assert bad == [1]
    left = bench.store.settle_checked(BUCKET, "k", record.object_id, [0, 2, 3], bad)
    bench.store.flush()
    assert left is not None
    assert (objects.present(left), left.state) == ([0, 2, 3], State.DIRTY)
    assert bench.kinds() == ["object-lost"]
    bench.store.settle()
    owning.machine_stop(bench)
    again = bench.store.lookup(BUCKET, "k")
    assert again is not None
    assert objects.present(again) == [0, 2, 3], "nor after a stop"
    assert owning.owed(bench.store)["k"].object_id == record.object_id


def test_rotten_inline_bytes_are_taken_from_the_durable_index(writer: Writer) -> None:
    bench = writer.bench
    durable = writer.write("durable", SMALL)
    memory = writer.write("memory", SMALL, durable=False)
    volume = bench.store.usable()[0]
    for key, record in (("durable", durable), ("memory", memory)):
        import msgspec

        from forebay.core.record import encode_record
        from forebay.node.store.disk import keys

        rotten = msgspec.structs.replace(record, inline=b"x" * SMALL)
        volume.index.put("records", keys.index_key(BUCKET, key), encode_record(rotten))
        bench.store.flush()
        assert bench.store.check_blocks(rotten, BUCKET, key, [0]) == [0]
        after = bench.store.settle_checked(BUCKET, key, record.object_id, [], [0])
        bench.store.flush()
        assert after == (durable if key == "durable" else None)
    assert owning.read(bench, "durable") == objects.make("durable", SMALL, "w1")[1]
    assert owning.read(bench, "memory") is None
    assert bench.kinds() == ["object-lost"]


# --- no room ---------------------------------------------------------------------------------------------------------
def test_a_disk_full_of_what_is_owed_refuses_writes_and_takes_them_when_there_is_room(
    small_disk: Path, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench("disk/v0")
    writer = Writer(bench)
    store = bench.store
    kept: list[Record] = []
    refused = None
    while refused is None and len(kept) < 200:
        try:
            store.free_to_write(BUCKET, f"k{len(kept)}", 500 * KIB)  # as an engine asks before it takes the body
        except Unavailable as error:
            refused = error
        else:
            kept.append(writer.write(f"k{len(kept)}", 500 * KIB))
    assert refused is not None
    assert refused.code == "InsufficientStorage"
    assert 10 < len(kept) < 50
    for number in range(len(kept)):
        assert owning.read(bench, f"k{number}") == objects.make(f"k{number}", 500 * KIB, "w1")[1]
    owning.machine_stop(bench)
    store = bench.store
    assert len(owning.owed(store)) == len(kept)

    for number, record in enumerate(kept[:6]):
        store.mark_clean(BUCKET, f"k{number}", record.object_id, version="b1", checked_s=1.0)
    store.flush()
    store.free_to_write(BUCKET, "more", 500 * KIB)  # what is clean can go
    assert store.drop_units([(record.object_id, block) for record in kept[:6] for block in range(8)])
    store.flush()
    store.reclaim()
    store.housekeep()
    assert writer.write("more", 500 * KIB).state == State.DIRTY


def _fill(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4 * KIB))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    finally:
        os.close(fd)


def test_the_disk_fills_in_the_middle_of_a_group(small_disk: Path, make_bench: Callable[..., Bench]) -> None:
    """Headers in sidecars need room: some get it, one does not; each is whole or not there."""
    bench = make_bench("disk/v0", xattrs=False)
    writer = Writer(bench)
    old = writer.write("k3", LARGE, "w0")
    prepared = bench.store.prepare([writer.put(f"k{number}", LARGE, "w1") for number in range(12)])
    _fill(small_disk / "others")
    os.truncate(small_disk / "others", (small_disk / "others").stat().st_size - 24 * KIB)
    bench.store.make_durable(prepared)
    outcomes = bench.store.publish(prepared)
    failed = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Unavailable)]
    assert 0 < len(failed) < 12
    assert {outcome.code for outcome in outcomes if isinstance(outcome, Unavailable)} == {"InsufficientStorage"}
    assert bench.kinds() == ["volume-full"]
    (small_disk / "others").unlink()
    bench.store.reclaim()
    bench.settle()
    left = {path.name for path in owning.files_in(bench.dirs[0]) if path.suffix != ".head"}
    records = {f"k{n}": bench.store.lookup(BUCKET, f"k{n}") for n in range(12)}
    assert left == {f"{record.object_id:016x}" for record in records.values() if record is not None}
    for n in range(12):
        record = records[f"k{n}"]
        if n not in failed:
            assert record is not None
            assert record.version == "w1"
        elif n == 3:
            assert record == old
        else:
            assert record is None
    bench.store.housekeep()
    for n in failed:
        writer.write(f"k{n}", LARGE, "w1")


def test_a_capacity_bounds_what_is_owed_and_clean_bytes_make_room(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("v0", capacity_bytes=1 * MIB)
    writer = Writer(bench)
    for number in range(4):
        objects.land(bench.store, f"clean{number}", 200 * KIB)
    for number in range(5):
        writer.write(f"k{number}", 200 * KIB)
    with pytest.raises(Unavailable) as refused:
        bench.store.free_to_write(BUCKET, "more", 200 * KIB)
    assert refused.value.code == "InsufficientStorage"
    (outcome,) = owning.commit(bench.store, [writer.put("more", 200 * KIB)])
    assert isinstance(outcome, Unavailable)
    assert outcome.code == "InsufficientStorage"
    bench.settle()
    assert os.listdir(bench.dirs[0] / "tmp") == []


def test_a_body_that_is_not_whole_is_refused(writer: Writer) -> None:
    change = writer.put("k")
    os.truncate(change.path, LARGE - 1)
    good = writer.put("good")
    bad, fine = owning.commit(writer.bench.store, [change, good])
    assert isinstance(bad, Corrupt)
    assert isinstance(fine, Record)
    writer.bench.settle()
    assert len(owning.files_in(writer.bench.dirs[0])) == 1


def test_a_body_that_is_swept_with_its_dead_process_takes_no_volume_out(writer: Writer) -> None:
    """A front dies while the engine works on its write; housekeeping removes the body before it is in place."""
    bench = writer.bench
    writer.write("k", version="w1")
    swept, kept = writer.put("k", version="w2"), writer.put("other")
    os.unlink(swept.path)
    refused, made = owning.commit(bench.store, [swept, kept])
    assert isinstance(refused, Unavailable)
    assert "send it again" in str(refused)
    assert isinstance(made, Record), "what is committed together with it is not concerned"
    assert [volume.state for volume in bench.store.usable()] == ["ok"]
    bench.settle()
    assert objects.read(bench.reader(), "k") == objects.make("k", LARGE, "w1")[1]


def test_what_the_visible_index_could_not_take_comes_into_view_later(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = writer.bench
    old = writer.write("k", version="w0")
    prepared = bench.store.prepare([writer.put("k", version="w1"), writer.put("m", durable=False)])
    bench.store.make_durable(prepared)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "write", _no_space)
        outcomes = bench.store.publish(prepared)
    unsure, refused = outcomes
    assert isinstance(unsure, Unavailable)
    assert isinstance(refused, Unavailable)
    assert (unsure.code, refused.code) == ("", "InsufficientStorage")
    assert "may have been written" in unsure.message
    assert bench.kinds() == ["volume-full", "changes-lost"]
    assert bench.store.lookup(BUCKET, "k") == old
    bench.settle()
    assert len(owning.files_in(bench.dirs[0])) == 2, "of the write to memory nothing is left"
    bench.store.housekeep()  # there is room again
    assert bench.store.catching.may_catch_up
    assert [each.key for each in bench.store.catching.steps() if each is not None] == ["k"]
    assert not bench.store.catching.is_behind
    record = bench.store.lookup(BUCKET, "k")
    assert record is not None
    assert record.version == "w1"
    assert owning.read(bench, "k") == objects.make("k", LARGE, "w1")[1]


def _no_space(index: Index) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- volumes ---------------------------------------------------------------------------------------------------------
def test_what_is_owed_follows_its_key_to_other_volumes(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make_bench("a")
    writer = Writer(bench)
    for number in range(12):
        writer.write(f"k{number}", SMALL if number % 3 == 0 else LARGE, durable=bool(number % 2))
        writer.remove(f"gone{number}", durable=bool(number % 2))
    before = owning.owed(bench.store)
    bench.close()
    bench.dirs.append(tmp_path / "b")
    bench.open()
    assert bench.kinds() == ["owed-moved"]
    _all_there(bench, before)
    sizes = [usage.owned_objects for usage in bench.store.usage()]
    assert sum(sizes) == 12
    assert min(sizes) > 0
    owning.machine_stop(bench)
    kept = owning.owed(bench.store)
    assert set(kept) == {key for key in before if int(key.lstrip("gonek")) % 2}
    _all_there(bench, kept)
    for directory in bench.dirs:
        names = [int(path.name, 16) for path in owning.files_in(directory)]
        assert len(names) == len(set(names))


def _all_there(bench: Bench, notes: dict[str, object]) -> None:
    assert owning.owed(bench.store) == notes
    for key in notes:
        record = bench.store.lookup(BUCKET, key)
        if key.startswith("gone"):
            assert record is None
            continue
        assert record is not None
        assert owning.read(bench, key) == objects.make(key, record.size_bytes, "w1")[1]
        assert bench.store.check_blocks(record, BUCKET, key, range(4 if record.inline is None else 1)) == []


def test_a_volume_that_was_away_brings_what_it_owed_unless_it_was_written_again(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make_bench("a", "b")
    writer = Writer(bench)
    names = [f"k{number}" for number in range(24)]
    for name in names:
        writer.write(name)
    on_b = [name for name in names if bench.store.volume_of(BUCKET, name) == bench.store.volumes()[1].volume_id]
    assert len(on_b) > 4
    bench.close()
    bench.dirs.pop()
    bench.open()  # b is not there this time
    assert bench.kinds() == ["volume-absent"]
    assert set(owning.owed(bench.store)) == set(names) - set(on_b)
    written, flushed, deleted, fetched, *rest = on_b
    writer.write(written, version="w2")
    record = writer.write(flushed, version="w2")
    bench.store.mark_clean(BUCKET, flushed, record.object_id, version="b2", checked_s=1.0)
    writer.remove(deleted)
    objects.land(bench.store, fetched, LARGE, "b0")
    bench.close()

    bench.dirs.append(tmp_path / "b")
    bench.events.clear()
    bench.open()
    assert "owed-moved" in bench.kinds()
    notes = owning.owed(bench.store)
    assert set(notes) == set(names), "what was flushed meanwhile was clean when b came back: its older write decides"
    assert notes[deleted].is_delete
    assert owning.read(bench, written) == objects.make(written, LARGE, "w2")[1]
    for name in (fetched, *rest):
        assert owning.read(bench, name) == objects.make(name, LARGE, "w1")[1]


def test_a_volume_that_goes_out_says_what_it_owes(writer: Writer) -> None:
    bench = writer.bench
    writer.write("k")
    volume = bench.store.usable()[0]
    volume.trouble(OSError(5, "Input/output error"), "reading")
    bench.store.housekeep()
    assert bench.kinds() == ["volume-out", "owed-out"]
    assert f"1 object with {LARGE} bytes" in bench.events[-1].detail
    (outcome,) = owning.commit(bench.store, [writer.delete("k")])
    assert isinstance(outcome, Unavailable)
    assert bench.store.mark_clean(BUCKET, "k", 1, version="b", checked_s=1.0) is None


def test_a_damaged_durable_index_keeps_the_volume_out(bench: Bench, tmp_path: Path) -> None:
    Writer(bench).write("k")
    bench.close()
    os.truncate(bench.dirs[0] / "durable" / "data.mdb", 100)
    with pytest.raises(Unavailable, match="no volume can be used"):
        bench.open()
    assert bench.kinds() == ["volume-out"]
    assert "what it held is lost" in bench.events[0].detail
    bench.store = Store.open([tmp_path / "elsewhere"])


def test_a_settled_note_of_a_key_that_belongs_elsewhere_does_not_come_back(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Its removal waits for a commit when the process is killed. The next start finds its mark, and another set of
    volumes; a machine stop takes the mark. An old delete hid what was written since."""
    bench = make_bench("a", "b")
    home = {name: bench.store.volume_of(BUCKET, name) for name in (f"k{number}" for number in range(12))}
    away = bench.store.volumes()[1].volume_id
    bench.close()
    bench.dirs.pop()
    bench.open()  # b is not there this time
    writer = Writer(bench)
    for name in home:
        writer.remove(name)
    for name in home:
        bench.store.mark_clean(BUCKET, name, 0, version="", checked_s=9.0)
    bench.store.flush()
    assert owning.owed(bench.store) == {}
    kill(bench)
    bench.dirs.append(tmp_path / "b")
    bench.open()
    kill(bench)
    owning.unclean(bench)
    bench.open()
    assert not {name for name in owning.owed(bench.store) if home[name] == away}


def test_what_could_not_be_moved_is_refused_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([tmp_path / "a"])
    writer = Writer(bench)
    for number in range(8):
        writer.write(f"large-{number}")
    bench.close()
    bench.dirs.append(tmp_path / "b")

    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "no room", target)

    with monkeypatch.context() as patch:
        patch.setattr(misplaced, "_copy", refuse)
        patch.setattr(misplaced, "has_room", lambda path: path == str(tmp_path / "a"))
        patch.setattr(volumes, "has_room", lambda path: path == str(tmp_path / "a"))
        store = bench.open()
        assert not store.finds_room(), "the other volume has none"
    first, second = store.usable()
    assert store.astray == {first.id: {objects.BUCKET}}
    assert store.finds_room(), "now it has: the engine starts again, and moves them"
    with monkeypatch.context() as patch:
        patch.setattr(second, "state", "out")
        assert not store.finds_room(), "what lies at its path now is not its disk"
    stuck = [f"large-{n}" for n in range(8) if store.volume_of(objects.BUCKET, f"large-{n}") == second.id]
    assert stuck
    for number in range(8):
        if (key := f"large-{number}") not in stuck:
            store.check_present(objects.BUCKET, key)
            continue
        with pytest.raises(VolumeMissing, match="make room"):
            store.check_present(objects.BUCKET, key)
        (outcome,) = owning.commit(store, [writer.put(key)])
        assert isinstance(outcome, VolumeMissing), "nothing is written beside it"
    bench.close()
    store = bench.open()
    assert owning.read(bench, stuck[0]) is None, "the volumes are the same: nobody looks, unless told"
    bench.close()
    bench.options["astray"] = True
    assert bench.open().astray == {}
    assert not bench.store.finds_room()
    for key in stuck:
        assert owning.read(bench, key) is not None
    bench.close()


@pytest.mark.parametrize("blocks", [[1], [0, 1, 2, 3]])
def test_what_was_evicted_right_after_its_flush_is_not_owed_after_a_machine_stop(
    bench: Bench, writer: Writer, blocks: list[int]
) -> None:
    """The note of a flush that ended is forgotten before bytes go: it would name a file with holes, or none."""
    store = bench.store
    record = writer.write("k", 200 * KIB)
    assert store.mark_clean(BUCKET, "k", record.object_id, version="b1", checked_s=9.0)
    store.flush()
    store.drop_units([(record.object_id, block) for block in blocks])
    store.flush()
    store.reclaim()
    kill(bench)
    owning.unclean(bench)
    bench.open()
    assert "object-lost" not in bench.kinds()
    assert owning.owed(bench.store) == {}
    found = bench.store.lookup(BUCKET, "k")
    assert found is None or not found.complete, "a hole is no block"
