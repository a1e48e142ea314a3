"""Objects that come from writers: shown at once, kept through every stop, clean when the backend has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.core.errors import Unavailable
from forebay.core.record import State
from forebay.node.store.disk.notes import Owed
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import LARGE, SMALL, Writer
from tests.store.store_objects import BUCKET, Bench

KIB = 1024
SIZES = [SMALL, LARGE]


@pytest.fixture
def writer(bench: Bench) -> Writer:
    return Writer(bench)


def _data(key: str, size_bytes: int, version: str = "w1") -> bytes:
    return objects.make(key, size_bytes, version)[1]


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("durable", [True, False])
def test_a_write_is_read_at_once_and_after_a_process_stop(writer: Writer, size_bytes: int, durable: bool) -> None:
    bench = writer.bench
    record = writer.write("k", size_bytes, durable=durable)
    assert (record.state, record.complete, record.version) == (State.DIRTY, True, "w1")
    for _ in range(2):
        assert owning.read(bench, "k") == _data("k", size_bytes)
        assert owning.owed(bench.store)["k"].size_bytes == size_bytes
        assert [each.durable for each in owning.notes_of(bench.store)] == [durable]
        bench.close(clean=False)
        bench.open()
    assert bench.events == []
    assert bench.store.data_path(record) == (
        "" if size_bytes == SMALL else f"{bench.dirs[0]}/data/{_name(record.object_id)}"
    )
    assert bench.store.check_blocks(record, BUCKET, "k", range(size_bytes > SMALL and 4)) == []


def _name(object_id: int) -> str:
    name = f"{object_id:016x}"
    return f"{name[10:12]}/{name[12:14]}/{name}"


@pytest.mark.parametrize("size_bytes", SIZES)
def test_after_a_machine_stop_what_was_durable_is_there_and_the_rest_is_not(writer: Writer, size_bytes: int) -> None:
    bench = writer.bench
    kept = writer.write("kept", size_bytes)
    writer.write("gone", size_bytes, durable=False)
    objects.land(bench.store, "clean", LARGE)
    owning.machine_stop(bench)
    assert bench.kinds() == ["index-rebuilt"]
    record = bench.store.lookup(BUCKET, "kept")
    assert record is not None
    assert (record.object_id, record.state, record.etag) == (kept.object_id, State.DIRTY, "etag-w1")
    assert owning.read(bench, "kept") == _data("kept", size_bytes)
    assert bench.store.check_blocks(record, BUCKET, "kept", range(4 if size_bytes == LARGE else 1)) == []
    assert bench.store.lookup(BUCKET, "gone") is None, "never a clean object that the backend has not got"
    assert set(owning.owed(bench.store)) == {"kept"}
    clean = bench.store.lookup(BUCKET, "clean")
    assert clean is not None
    assert clean.state == State.UNVERIFIED
    usage = bench.store.usage()[0]
    assert (usage.owned_objects, usage.owed_bytes, usage.objects) == (1, size_bytes, 2)


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("durable", [True, False])
def test_a_flushed_object_is_clean_and_may_go(writer: Writer, size_bytes: int, durable: bool) -> None:
    bench = writer.bench
    store = bench.store
    record = writer.write("k", size_bytes, durable=durable)
    assert store.drop_units([(record.object_id, block) for block in range(4)]) == [], "no victim"
    assert store.forget(BUCKET, "k") is None
    store.flush()
    assert store.lookup(BUCKET, "k") == record
    assert store.mark_clean(BUCKET, "k", record.object_id + 1, version="b1", checked_s=9.0) is None
    clean = store.mark_clean(BUCKET, "k", record.object_id, version="b1", checked_s=9.0)
    store.flush()
    assert clean is not None
    assert (clean.state, clean.version, clean.etag, clean.checked_s) == (0, "b1", record.etag, 9.0)
    assert owning.owed(store) == {}
    assert (store.usage()[0].owned_bytes, store.usage()[0].owed_bytes) == (0, 0)
    bench.close(clean=False)
    bench.open()
    assert owning.owed(bench.store) == {}, "the mark in the visible index says that it is settled"
    assert bench.store.lookup(BUCKET, "k") == clean
    bench.store.settle()
    if size_bytes == LARGE:
        owning.machine_stop(bench)
        again = bench.store.lookup(BUCKET, "k")
        assert again is not None
        assert (again.version, again.state) == ("b1", State.UNVERIFIED), "a clean file like any other"
        assert owning.owed(bench.store) == {}
    else:
        assert bench.store.drop_units([(record.object_id, 0)]) == [record.object_id]


def test_a_flush_that_was_not_settled_on_the_disk_is_owed_again_after_a_machine_stop(writer: Writer) -> None:
    bench = writer.bench
    record = writer.write("k")
    bench.store.mark_clean(BUCKET, "k", record.object_id, version="b1", checked_s=9.0)
    bench.store.flush()
    volume = bench.store.usable()[0]
    volume.durable.close = lambda: None  # type: ignore[method-assign]  # the machine stops: nothing more is committed
    owning.machine_stop(bench, reopen=False)
    volume.durable._env.close()
    bench.open()
    assert owning.owed(bench.store)["k"].object_id == record.object_id
    again = bench.store.lookup(BUCKET, "k")
    assert again is not None
    assert (again.state, again.version) == (State.DIRTY, "w1")
    assert owning.read(bench, "k") == _data("k", LARGE)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_later_write_replaces_a_dirty_one_for_ever(
    writer: Writer, first: bool, second: bool, size_bytes: int
) -> None:
    bench = writer.bench
    old = writer.write("k", size_bytes, "w1", durable=first)
    new = writer.write("k", LARGE, "w2", durable=second)
    bench.store.reclaim()
    fronts_hold_its_file = old.inline is None
    assert (old.object_id in bench.store.take_dropped()) == fronts_hold_its_file
    bench.settle()
    assert [int(path.name, 16) for path in owning.files_in(bench.dirs[0])] == [new.object_id]
    assert bench.store.mark_clean(BUCKET, "k", old.object_id, version="b1", checked_s=9.0) is None
    bench.close()
    bench.open()
    assert owning.owed(bench.store)["k"].object_id == new.object_id
    assert owning.read(bench, "k") == _data("k", LARGE, "w2")
    owning.machine_stop(bench)
    if not first and not second:
        assert bench.store.lookup(BUCKET, "k") is None
    else:
        assert owning.owed(bench.store)["k"].object_id == new.object_id
        assert owning.read(bench, "k") == _data("k", LARGE, "w2"), "what replaces durable bytes is durable itself"


@pytest.mark.parametrize("durable", [True, False])
def test_a_tombstone_hides_and_is_kept(writer: Writer, durable: bool) -> None:
    bench = writer.bench
    objects.land(bench.store, "k", LARGE)
    writer.remove("k", durable=durable)
    for stop in ("none", "process", "machine") if durable else ("none", "process"):
        if stop == "process":
            bench.close(clean=False)
            bench.open()
        elif stop == "machine":
            owning.machine_stop(bench)
        assert bench.store.lookup(BUCKET, "k") is None
        assert owning.owed(bench.store)["k"].is_delete
        with pytest.raises(Unavailable, match="is not flushed yet"):
            bench.store.begin(BUCKET, objects.make("k", LARGE)[0], checked_s=1.0)
    assert bench.store.mark_clean(BUCKET, "k", 0, version="", checked_s=9.0) is None
    bench.store.flush()
    assert owning.owed(bench.store) == {}
    objects.land(bench.store, "k", LARGE)
    bench.close(clean=False)
    bench.open()
    assert bench.store.lookup(BUCKET, "k") is not None


def test_nothing_that_lands_replaces_what_was_written(writer: Writer) -> None:
    bench = writer.bench
    info, data = objects.make("k", LARGE, "v1")
    landing = bench.store.begin(BUCKET, info, checked_s=1.0)
    objects.land_block(landing, data, 0)
    record = writer.write("k")
    assert landing.gone
    objects.land_block(landing, data, 1)
    landing.close()
    for version in ("v1", "w1"):
        with pytest.raises(Unavailable, match="is not flushed yet"):
            bench.store.begin(BUCKET, objects.make("k", LARGE, version)[0], checked_s=1.0)
        with pytest.raises(Unavailable, match="is not flushed yet"):
            bench.store.put_inline(BUCKET, *objects.make("k", SMALL, version), checked_s=1.0)
    bench.store.flush()
    bench.store.reclaim()
    assert bench.store.lookup(BUCKET, "k") == record
    bench.settle()
    assert len(owning.files_in(bench.dirs[0])) == 1


def test_writing_through_replaces_what_was_owed(writer: Writer) -> None:
    """A bucket whose mode changed: the clean write is in the backend, so the dirty one must not come back."""
    bench = writer.bench
    writer.write("k", version="w1")
    clean = writer.write("k", version="b1", state=State.CLEAN, durable=False)
    assert (clean.state, clean.checked_s) == (State.CLEAN, 5.0)
    owning.machine_stop(bench)
    assert owning.owed(bench.store) == {}
    record = bench.store.lookup(BUCKET, "k")
    assert record is not None
    assert (record.version, record.state) == ("b1", State.UNVERIFIED)


def test_local_objects_stay_and_are_not_flushed(writer: Writer) -> None:
    bench = writer.bench
    writer.write("k", state=State.LOCAL)
    writer.write("m", SMALL, state=State.LOCAL, durable=False)
    owning.machine_stop(bench)
    assert owning.owed(bench.store) == {}
    assert sum(each.owned_objects for each in bench.store.usage()) == 1
    record = bench.store.lookup(BUCKET, "k")
    assert record is not None
    assert record.state == State.LOCAL
    assert bench.store.mark_clean(BUCKET, "k", record.object_id, version="b", checked_s=1.0) is None
    writer.remove("k", note=False)
    assert sum(each.owned_objects for each in bench.store.usage()) == 0
    owning.machine_stop(bench)
    assert bench.store.lookup(BUCKET, "k") is None


@pytest.mark.parametrize("version", ["b1", "a-version-" + "x" * 5000])
def test_headers_in_sidecars_are_synced_and_follow_the_flush(make_bench: Callable[..., Bench], version: str) -> None:
    bench = make_bench("v0", xattrs=False)
    record = Writer(bench).write("k")
    owning.machine_stop(bench)
    assert owning.read(bench, "k") == _data("k", LARGE)
    assert bench.store.check_blocks(record, BUCKET, "k", range(4)) == []
    bench.store.mark_clean(BUCKET, "k", record.object_id, version=version, checked_s=9.0)
    bench.store.flush()
    bench.store.settle()
    owning.machine_stop(bench)
    again = bench.store.lookup(BUCKET, "k")
    assert again is not None
    assert (again.version, again.state) == (version, State.UNVERIFIED)
    assert bench.store.check_blocks(again, BUCKET, "k", range(4)) == []
    bench.settle()
    assert len(owning.files_in(bench.dirs[0])) == 2


def test_a_version_too_long_for_the_header_costs_cached_bytes_only(writer: Writer) -> None:
    bench = writer.bench
    record = writer.write("k")
    version = "x" * 70_000
    bench.store.mark_clean(BUCKET, "k", record.object_id, version=version, checked_s=9.0)
    bench.store.flush()
    bench.store.settle()
    assert owning.read(bench, "k") is not None
    owning.machine_stop(bench)
    assert bench.store.lookup(BUCKET, "k") is None
    assert owning.owed(bench.store) == {}


def test_notes_are_replaced_where_they_stand(writer: Writer) -> None:
    bench = writer.bench
    writer.write("disk")
    writer.write("memory", durable=False)
    for each in list(owning.notes_of(bench.store)):
        begun = msgspec.structs.replace(each.note, upload_id=f"up-{each.key}", part_bytes=7)
        late = msgspec.structs.replace(begun, seq=each.note.seq - 1, upload_id="late")
        bench.store.write_notes([Owed(each.bucket, each.key, begun, each.durable)])
        bench.store.write_notes([Owed(each.bucket, each.key, late, each.durable)])
    bench.close(clean=False)
    bench.open()
    assert {key: note.upload_id for key, note in owning.owed(bench.store).items()} == {
        "disk": "up-disk",
        "memory": "up-memory",
    }
    owning.machine_stop(bench)
    assert {key: note.upload_id for key, note in owning.owed(bench.store).items()} == {"disk": "up-disk"}


def test_a_thousand_changes_are_one_synced_frame(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = writer.bench
    volume = bench.store.usable()[0]
    commits = volume.durable.commits
    synced: list[str] = []
    journal: list[str] = []
    real, real_data = os.fsync, os.fdatasync

    def fdatasync(fd: int) -> None:
        journal.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real_data(fd)

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    changes = [writer.put(f"k{number}", SMALL if number % 10 else 20 * KIB) for number in range(1000)]
    outcomes = owning.commit(bench.store, changes)
    assert all(getattr(outcome, "state", None) == State.DIRTY for outcome in outcomes)
    assert journal == ["journal.1"]
    assert volume.durable.commits - commits == 1
    directories = [path for path in synced if os.path.isdir(path)]
    folders = {os.path.dirname(volume.data_path(change.object_id)) for change in changes if change.path}
    parents = {os.path.dirname(folder) for folder in folders}
    durable = f"{volume.path}/durable"  # of the journal, which is new
    assert sorted(directories) == sorted({*folders, *parents, f"{volume.path}/data", durable})
    assert len(synced) - len(directories) == 100, "each data file once"
    assert len(owning.owed(bench.store)) == 1000


def test_a_body_on_its_way_outlives_the_engine_but_not_its_own_process(
    make_bench: Callable[..., Bench], writer: Writer
) -> None:
    bench = writer.bench
    path = bench.reader().incoming(BUCKET, "k")
    assert not os.path.exists(path)
    dead = path.replace(f"in-{os.getpid()}-", "in-99999999-")
    for each in (path, dead, path + ".head"):
        with open(each, "wb") as file:
            file.write(b"half a body")
    parts = f"{bench.store.home(BUCKET, 'k').path}/parts"
    os.makedirs(f"{parts}/upload")
    bench.close()
    bench.open()
    assert sorted(os.listdir(os.path.dirname(path))) == sorted(
        [os.path.basename(path), os.path.basename(path) + ".head"]
    )
    assert list(bench.store.sweep()) is not None
    assert os.listdir(parts) == ["upload"]
