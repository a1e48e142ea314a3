"""A write, a delete or the end of a flush, cut before each thing it does to the disk: whole-old, new or absent."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.core.record import Record, State
from forebay.node.store.disk.durable import Durable
from forebay.node.store.disk.index import Index
from forebay.node.store.writer.puts import Change
from tests.store import owned_objects as owning
from tests.store import store_objects as objects
from tests.store.owned_objects import LARGE, SMALL, Writer
from tests.store.store_objects import BUCKET, Bench

State_ = tuple[str, int] | None  # version and state of the key, None: absent


class Cut(BaseException):
    """The process, or the machine, stops here."""


class Knife:
    """Counts what is done to the disk, and stops before one of them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.done: list[str] = []
        for name in ("setxattr", "replace", "fsync", "unlink"):
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        patch.setattr(Durable, "commit", self._wrapped("durable", Durable.commit))
        patch.setattr(Index, "write", self._wrapped("visible", Index.write))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.left == 0:
                raise Cut
            if self.left > 0:
                self.left -= 1
                self.done.append(name)
            return real(*args, **options)

        return call


@pytest.fixture
def knife(monkeypatch: pytest.MonkeyPatch) -> Knife:
    return Knife(monkeypatch)


def _kill(bench: Bench) -> None:
    """What a killed process leaves: nothing is flushed, locks are let go."""
    for reader in bench.readers:
        reader.close()
    bench.readers.clear()
    for volume in bench.store._all:
        volume.index.discard()
        volume.index.close()
        volume.durable._env.close()
        os.close(volume._lock_fd)
    bench.store._closed = True
    for directory in bench.dirs:
        for path in (directory / "tmp").glob("in-*"):  # bodies of this test's process: it is as good as dead
            path.rename(path.with_name(path.name.replace(f"in-{os.getpid()}-", "in-99999999-")))


def _another_boot(volume: Path) -> None:
    mark = volume / "volume.json"
    mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))


def _look(bench: Bench) -> State_:
    """What there is of the key, after it was found to be whole and right."""
    store = bench.store
    record = store.lookup(BUCKET, "k")
    notes = owning.owed(store)
    if record is None:
        assert "k" not in notes or notes["k"].is_delete
        return None
    assert record.complete
    assert owning.read(bench, "k") == objects.make("k", record.size_bytes, record.version.replace("b", "w"))[1]
    assert store.check_blocks(record, BUCKET, "k", range(4 if record.inline is None else 1)) == []
    assert ("k" in notes) == bool(record.state & State.DIRTY)
    if "k" in notes:
        assert notes["k"].object_id == record.object_id
    return record.version, record.state & ~State.UNVERIFIED


def _no_rubbish(bench: Bench) -> None:
    for _ in bench.store.sweep():
        pass
    bench.store.flush()
    bench.store.reclaim()
    record = bench.store.lookup(BUCKET, "k")
    names = [path.name for path in owning.files_in(bench.dirs[0])]
    assert names == ([f"{record.object_id:016x}"] if record is not None and record.inline is None else [])


Before = Callable[[Writer], None]
Act = Callable[[Writer], Change]

BEFORE: dict[str, Before] = {
    "nothing": lambda writer: None,
    "clean": lambda writer: objects.land(writer.bench.store, "k", LARGE, "w0") and None,
    "dirty": lambda writer: writer.write("k", LARGE, "w0") and None,
    "dirty-small": lambda writer: writer.write("k", SMALL, "w0") and None,
    "dirty-memory": lambda writer: writer.write("k", LARGE, "w0", durable=False) and None,
}
ACTS: dict[str, Act] = {
    "put": lambda writer: writer.put("k", LARGE, "w1"),
    "put-small": lambda writer: writer.put("k", SMALL, "w1"),
    "put-memory": lambda writer: writer.put("k", LARGE, "w1", durable=False),
    "put-through": lambda writer: writer.put("k", LARGE, "w1", State.CLEAN, durable=False),
    "delete": lambda writer: writer.delete("k"),
    "delete-through": lambda writer: writer.delete("k", note=False),
}


def _worlds(
    knife: Knife, make_bench: Callable[..., Bench], before: Before, act: Callable[[Writer], bool]
) -> Iterator[tuple[Bench, bool, bool]]:
    """The node after each cut: (reopened, whether the act had been acknowledged, whether the machine stopped)."""
    cut, acknowledged = 0, False
    while not acknowledged:
        for machine in (False, True):
            bench = make_bench(f"v{cut}-{machine}")
            writer = Writer(bench)
            before(writer)
            bench.store.reclaim()
            knife.left, acknowledged = cut, False
            try:
                acknowledged = act(writer)
            except Cut:
                pass
            finally:
                knife.left = -1
            _kill(bench)
            if machine:
                _another_boot(bench.dirs[0])
            bench.open()
            yield bench, acknowledged, machine
            bench.close()
        cut += 1
    assert cut > 1


@pytest.mark.parametrize("after", ACTS)
@pytest.mark.parametrize("before", BEFORE)
def test_a_change_cut_anywhere(knife: Knife, make_bench: Callable[..., Bench], before: str, after: str) -> None:
    if before == "nothing" and after.startswith("delete"):
        pytest.skip("nothing happens")
    memory = "memory" in after and before not in ("dirty", "dirty-small")

    def act(writer: Writer) -> bool:
        (outcome,) = owning.commit(writer.bench.store, [ACTS[after](writer)])
        assert outcome is None or isinstance(outcome, Record)
        return True

    seen = set()
    for bench, acknowledged, machine in _worlds(knife, make_bench, BEFORE[before], act):
        found = _look(bench)
        version = found[0] if found is not None else "absent"
        seen.add(version)
        new = "absent" if "delete" in after else "w1"
        old = "absent" if before == "nothing" else "w0"
        forgotten = machine and (memory or before == "dirty-memory")  # it was promised to outlive processes only
        through = after in ("put-through", "delete-through")  # the backend has it: "absent" is asked about
        assert version in {old, new} | ({"absent"} if forgotten or through else set())
        asked = machine and through  # a clean file that a machine stop brings back is asked about before it is served
        if acknowledged and not (machine and memory) and not asked:
            assert version == new
            if not through:
                assert new == "absent" or (found is not None and found[1] == State.DIRTY)
        if after == "delete" and acknowledged:
            assert owning.owed(bench.store)["k"].is_delete
        _no_rubbish(bench)
        assert _look(bench) == found
    assert new in seen


@pytest.mark.parametrize("before", ["dirty", "dirty-small", "dirty-memory"])
def test_the_end_of_a_flush_cut_anywhere(knife: Knife, make_bench: Callable[..., Bench], before: str) -> None:
    def act(writer: Writer) -> bool:
        store = writer.bench.store
        record = store.lookup(BUCKET, "k")
        assert record is not None
        assert store.mark_clean(BUCKET, "k", record.object_id, version="b0", checked_s=1.0) is not None
        store.flush()
        store.settle()
        return True

    seen = set()
    for bench, acknowledged, machine in _worlds(knife, make_bench, BEFORE[before], act):
        found = _look(bench)
        seen.add(found)
        possible: set[State_] = {("w0", State.DIRTY), ("b0", 0)}
        if machine and before != "dirty":
            possible.add(None)  # clean bytes in the record are lost with it; a memory write was never promised more
        assert found in possible
        if acknowledged:
            assert owning.owed(bench.store) == {}, "settled for good"
        _no_rubbish(bench)
    assert ("b0", 0) in seen


def test_the_shell_does_what_the_plan_says(knife: Knife, bench: Bench) -> None:
    """The order of a write: header, rename | sync file, sync directories, durable record | visible record."""
    writer = Writer(bench)
    writer.write("before")  # the journal has its file
    change = writer.put("k")
    knife.left = 1000
    owning.commit(bench.store, [change])
    assert knife.done[:2] == ["setxattr", "replace"]
    assert knife.done[-2:] == ["durable", "visible"]
    assert set(knife.done[2:-2]) == {"fsync"}


WORKER = str(Path(__file__).with_name("store_worker.py"))


def test_nothing_acknowledged_is_gone_when_the_writer_is_killed(tmp_path: Path) -> None:
    """kill -9 at random moments, six times over one volume; every third time the machine stops with it."""
    chance, volume = random.Random(7), tmp_path / "v0"
    allowed: dict[str, set[str]] = {f"k{number}": {"never"} for number in range(8)}
    acked = 0
    for seed in range(1, 7):
        command = [sys.executable, WORKER, "own", str(volume), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(chance.randrange(10, 60))]
            process.kill()
            lines += process.stdout.readlines()
        for line in lines:
            kind, key, version = (*line.split(), "", "", "")[:3]
            if kind == "sent":
                allowed[key].add(version)
            elif kind == "acked" and version:
                allowed[key] = {version}
                acked += 1
        if seed % 3 == 0:
            _another_boot(volume)
        bench = Bench([volume])
        notes = owning.owed(bench.store)
        for key, versions in allowed.items():
            record = bench.store.lookup(BUCKET, key)
            if record is None and key in notes:
                assert notes[key].is_delete
                assert "-" in versions
                allowed[key] = {"-"}
            elif record is None:
                flushed = seed % 3 == 0  # clean bytes in a record go with the index
                assert "never" in versions or (flushed and versions != {"-"})
                allowed[key] = {"never"}
            else:
                data = owning.read(bench, key)
                version = next(each for each in versions if objects.make(key, record.size_bytes, each)[1] == data)
                assert record.version in (version, "backend")
                assert (key in notes) == bool(record.state & State.DIRTY)
                allowed[key] = {version}
        assert "object-lost" not in bench.kinds()
        for _ in bench.store.sweep():
            pass
        bench.store.flush()
        bench.store.reclaim()
        records = [bench.store.lookup(BUCKET, key) for key in allowed]
        names = {f"{record.object_id:016x}" for record in records if record is not None and record.inline is None}
        assert {path.name for path in owning.files_in(volume)} == names, "no orphan, no temp file"
        bench.close(clean=False)
    assert acked > 30


def test_groups_from_several_threads_do_not_mix(make_bench: Callable[..., Bench]) -> None:
    """`make_durable` may run in several threads; the loop's part stays with one."""
    bench = make_bench("a", "b")
    writer = Writer(bench)
    groups = [[writer.put(f"k{group}-{n}", (SMALL, LARGE)[n % 2]) for n in range(6)] for group in range(12)]
    prepared = [bench.store.prepare(group) for group in groups]
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(bench.store.make_durable, prepared):
            pass
    for each in prepared:
        assert all(isinstance(outcome, Record) for outcome in bench.store.publish(each))
    owning.machine_stop(bench)
    assert len(owning.owed(bench.store)) == 72
    for group in groups:
        for change in group:
            assert owning.read(bench, change.info.key) == objects.make(change.info.key, change.info.size_bytes, "w1")[1]


def test_bytes_that_the_durable_index_still_names_outlive_a_sweep(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the durable index cannot forget what was flushed. The object leaves the visible one, the process
    is killed, and the next one sweeps: after a stop of the machine the index would name a file that is gone."""
    bench = make_bench("a")
    record = Writer(bench).write("k", LARGE)
    path = Path(bench.store.data_path(record))
    bench.store.mark_clean(BUCKET, "k", record.object_id, version="b1", checked_s=9.0)
    bench.store.flush()

    def full(self: Durable, entries: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Durable, "commit", full)
        bench.store.forget(BUCKET, "k")
        bench.store.flush()
        bench.store.reclaim()
        assert path.exists()
        _kill(bench)
        bench.open()
        assert owning.owed(bench.store) == {}
        _clean_up(bench)
        assert path.exists(), "the durable index still names it"
        _kill(bench)
    _another_boot(bench.dirs[0])
    bench.events.clear()
    bench.open()
    assert set(owning.owed(bench.store)) == {"k"}, "the mark went with the visible index: it is flushed once more"
    assert "object-lost" not in bench.kinds()
    assert owning.read(bench, "k") == objects.make("k", LARGE, "w1")[1]
    bench.store.mark_clean(BUCKET, "k", record.object_id, version="b1", checked_s=9.0)
    bench.store.forget(BUCKET, "k")
    bench.store.flush()
    _kill(bench)
    bench.open()
    assert owning.owed(bench.store) == {}
    _clean_up(bench)
    assert not path.exists(), "once the index forgot it, it is rubbish"


def _clean_up(bench: Bench) -> None:
    for _ in bench.store.sweep():
        pass
    bench.store.flush()
    bench.store.reclaim()
