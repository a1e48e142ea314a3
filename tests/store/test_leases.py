"""A reader in another process never sees a hole: eviction waits for its lease, or takes the whole file away."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.node.store.reader import StoreReader
from tests.store import store_objects as objects
from tests.store.store_objects import Bench

KIB = 1024
WORKER = str(Path(__file__).with_name("store_worker.py"))


class Holder:
    """Another process that holds a lease on a file."""

    def __init__(self, path: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, WORKER, "hold", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "held"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def digest(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return self._line()

    def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(90)
        self.process.stdout.close()


@contextmanager
def holding(path: str) -> Iterator[Holder]:
    holder = Holder(path)
    try:
        yield holder
    finally:
        if holder.process.poll() is None:
            holder.end(kill=True)


def _landed(bench: Bench) -> tuple[int, str, bytes]:
    _, data = objects.make("k", 250 * KIB)
    object_id = objects.land(bench.store, "k", 250 * KIB)
    path = next(str(path) for path in (bench.dirs[0] / "data").rglob("*") if path.is_file())
    return object_id, path, data


def test_holes_wait_for_the_lease_of_another_process(bench: Bench) -> None:
    object_id, path, data = _landed(bench)
    with holding(path) as holder:
        bench.store.drop_units([(object_id, 1), (object_id, 2)])
        bench.store.flush()
        assert bench.store.reclaim().deferred == [object_id]
        assert holder.digest() == hashlib.sha256(data).hexdigest()
        assert bench.store.reclaim().deferred == [object_id]
        holder.end(kill=False)
        reclaimed = bench.store.reclaim()
        assert (reclaimed.deferred, reclaimed.freed_bytes) == ([], 128 * KIB)
    assert Path(path).read_bytes()[64 * KIB : 192 * KIB] == bytes(128 * KIB)


def test_the_lease_of_a_killed_process_ends_with_it(bench: Bench) -> None:
    object_id, path, _ = _landed(bench)
    with holding(path) as holder:
        bench.store.drop_units([(object_id, 1)])
        bench.store.flush()
        assert bench.store.reclaim().deferred == [object_id]
        holder.end(kill=True)
        assert bench.store.reclaim().deferred == []


def test_a_whole_object_goes_at_once_and_its_readers_keep_its_bytes(bench: Bench) -> None:
    object_id, path, data = _landed(bench)
    with holding(path) as holder:
        bench.store.forget(objects.BUCKET, "k")
        bench.store.flush()
        reclaimed = bench.store.reclaim()
        assert reclaimed.deferred == []
        assert reclaimed.freed_bytes >= 250 * KIB
        assert not os.path.exists(path)
        assert holder.digest() == hashlib.sha256(data).hexdigest()
    assert bench.store.take_dropped() == [object_id]


def test_a_dropped_block_that_lands_again_under_a_lease_is_never_punched(bench: Bench) -> None:
    object_id, path, data = _landed(bench)
    info, _ = objects.make("k", 250 * KIB)
    with holding(path) as holder:
        bench.store.drop_units([(object_id, 1), (object_id, 2)])
        bench.store.flush()
        bench.store.reclaim()
        landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
        objects.land_block(landing, data, 1)
        bench.store.flush()
        landing.close()
        assert holder.digest() == hashlib.sha256(data).hexdigest()
        holder.end(kill=False)
        assert bench.store.reclaim().deferred == []
    record = bench.store.lookup(objects.BUCKET, "k")
    assert record is not None
    assert objects.present(record) == [0, 1, 3]
    assert Path(path).read_bytes()[64 * KIB : 128 * KIB] == data[64 * KIB : 128 * KIB]


def test_an_idle_cached_file_holds_its_lease_until_dropped(bench: Bench) -> None:
    object_id, _, _ = _landed(bench)
    reader = bench.reader()
    assert objects.read(reader, "k") is not None
    bench.store.drop_units([(object_id, 1)])
    bench.store.flush()
    assert bench.store.reclaim().deferred == [object_id]
    reader.dropped(bench.store.take_dropped())
    assert bench.store.reclaim().deferred == []


def test_readers_racing_with_eviction_see_right_bytes_or_none(bench: Bench) -> None:
    """One thread evicts and lands again as fast as it can; readers check every byte that the lease rule lets them."""
    info, data = objects.make("k", 250 * KIB)
    object_id = objects.land(bench.store, "k", 250 * KIB)
    stop, seen, wrong = threading.Event(), [0, 0], []

    def look(reader: StoreReader) -> None:
        while not stop.is_set():
            record = reader.lookup(objects.BUCKET, "k")
            leased = reader.acquire(objects.BUCKET, "k", record) if record is not None else None
            if leased is None:
                continue
            for block in objects.present(leased.record):
                start, end = block * 64 * KIB, min((block + 1) * 64 * KIB, len(data))
                if os.pread(leased.fd, end - start, start) != data[start:end]:
                    wrong.append(block)
            seen[len(objects.present(leased.record)) == 4] += 1
            leased.release()
            reader.dropped([object_id])

    threads = [threading.Thread(target=look, args=(bench.reader(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    rounds = 0
    while (rounds < 300 or min(seen) < 20) and rounds < 20_000 and not wrong:
        rounds += 1
        block = rounds % 3
        bench.store.drop_units([(object_id, block)])
        bench.store.flush()
        bench.store.reclaim()
        landing = bench.store.begin(objects.BUCKET, info, checked_s=1.0)
        objects.land_block(landing, data, block)
        bench.store.flush()
        landing.close()
    stop.set()
    for thread in threads:
        thread.join(90)
    assert wrong == []
    assert min(seen) >= 20, "both whole and holed records were met"


def test_the_slot_of_a_killed_reader_is_cleared(bench: Bench) -> None:
    """A dead reader's transaction would keep every page that was ever replaced."""
    _landed(bench)
    code = (
        "import sys; from forebay.core.messages.wire import VolumeAt; "
        "from forebay.node.store.reader import StoreReader; "
        "reader = StoreReader([VolumeAt(sys.argv[1], sys.argv[2])]); "
        "view = reader._sole; txn = view.begin(view.records); "
        "print(txn.get(b'corpus\\0k') is not None, flush=True); sys.stdin.read()"
    )
    at = bench.store.volumes()[0]
    command = [sys.executable, "-c", code, at.volume_id, at.path]
    env = bench.store.usable()[0].index.env
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert str(process.pid) in env.readers()
        process.kill()
    bench.store.housekeep()
    assert str(process.pid) not in env.readers()
