"""A process of its own: `python store_worker.py write DIR SEED` changes a store until it is killed;
`python store_worker.py hold FILE` takes a reader's lease, says so, and re-reads the file for as long as it is told to.

The writer prints `acked KEY VERSION` only after a flush; the holder prints what it reads as hex digests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.store import store_objects as objects

from forebay.node.store import Scrubber, Store

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
    else:
        hold(sys.argv[2])
