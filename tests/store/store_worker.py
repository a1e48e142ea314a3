"""A process of its own: `python store_worker.py write DIR SEED` changes a store until it is killed;
`python store_worker.py hold FILE` takes a reader's lease, says so, and re-reads the file for as long as it is told to.

`python store_worker.py own DIR SEED` writes as an engine does, in groups made durable by a thread, until it is killed.

The writer prints `acked KEY VERSION` only after a flush; the holder prints what it reads as hex digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from forebay.core.record import Record
from forebay.node.store.writer.puts import Put
from forebay.node.store.writer.scrub import Scrubber
from forebay.node.store.writer.writer import Store
from tests.store import store_objects as objects
from tests.store.owned_objects import Writer
from tests.store.store_objects import Bench

KIB = 1024


def write(directory: str, seed: int) -> None:
    """Every kind of change, in random order, for ever."""
    chance = random.Random(seed)
    store = Store.open([directory], block_bytes=64 * KIB)
    scrubber = Scrubber(store, round_s=0.0)
    for number in range(10**9):
        key, version = f"k{chance.randrange(12)}", f"v{chance.randrange(3)}"
        move = chance.randrange(6)
        if move == 0:
            store.put_inline(objects.BUCKET, *objects.make(key, 100 + len(key), version), checked_s=1.0)
        elif move <= 3:
            _land(store, chance, key, version)
        elif move == 4:
            units = [(unit.object_id, unit.block) for unit in store.units()]
            store.drop_units(chance.sample(units, len(units) // 4))
        else:
            store.forget(objects.BUCKET, key)
        if chance.random() < 0.7:
            store.flush()
            if store.lookup(objects.BUCKET, key):
                print("acked", key, flush=True)
            store.reclaim()
        scrubber.step(float(number))
        assert scrubber.units_bad == 0


def _land(store: Store, chance: random.Random, key: str, version: str) -> None:
    info, data = objects.make(key, 300 * KIB + 7, version)
    landing = store.begin(objects.BUCKET, info, checked_s=1.0)
    for block in chance.sample(range(5), chance.randrange(1, 6)):
        if chance.random() < 0.2:
            landing.write(block * 64 * KIB, data[block * 64 * KIB : block * 64 * KIB + 100])  # never finished
        else:
            objects.land_block(landing, data, block)
        if chance.random() < 0.3:
            store.flush()
    landing.close()


def own(directory: str, seed: int) -> None:
    """Groups of durable writes and deletes, and the end of some of their flushes, for ever.

    Prints `sent KEY VERSION` before a group, `acked KEY VERSION` after it; a delete has the version `-`.
    """
    chance = random.Random(seed)
    bench = Bench([Path(directory)])
    writer = Writer(bench)
    writer.seq = seed * 1_000_000
    store = bench.store
    with ThreadPoolExecutor(1) as thread:
        for number in range(10**9):
            changes, told = [], []
            for key in chance.sample([f"k{n}" for n in range(8)], chance.randrange(1, 4)):
                version = f"v{seed}x{number}" if chance.random() < 0.8 else "-"
                size_bytes = chance.choice((500, 150 * KIB))
                changes.append(writer.put(key, size_bytes, version) if version != "-" else writer.delete(key))
                told.append(f"{key} {version}")
            print(*(f"sent {each}" for each in told), sep="\n", flush=True)
            prepared = store.prepare(changes)
            thread.submit(store.make_durable, prepared).result()
            outcomes = store.publish(prepared)
            print(*(f"acked {each}" for each in told), sep="\n", flush=True)
            store.reclaim()
            for change, record in zip(changes, outcomes, strict=True):
                if isinstance(change, Put) and isinstance(record, Record) and chance.random() < 0.3:
                    store.mark_clean(change.bucket, record.key or change.info.key, record.object_id, **_FLUSHED)
            store.flush()
            if chance.random() < 0.1:
                store.settle()


_FLUSHED: dict[str, Any] = {"version": "backend", "checked_s": 1.0}


def hold(path: str) -> None:
    """A front with a slow client: keeps the lease, reads when a line comes, ends when input does."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    print("held", flush=True)
    for _ in sys.stdin:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        print(hashlib.sha256(data).hexdigest(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "own":
        own(sys.argv[2], int(sys.argv[3]))
    else:
        hold(sys.argv[2])
