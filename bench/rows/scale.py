"""Scale rows: a listing of a million keys out of the index, and memory while much more streams through than fits."""

from __future__ import annotations

import time
from pathlib import Path

from bench import load
from bench.parts import BUCKET, Lab, Node, resident_bytes
from bench.report import Result
from bench.row import MIB, Row
from bench.stats import bounded
from forebay.core.types import ObjectInfo
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store

KEYS_PER_PREFIX = 10_000
PAGE_KEYS = 1000
SAMPLE_EVERY_BYTES = 128 * MIB


def listing(lab: Lab, row: Row) -> Result:
    """Keys a second when every prefix is listed page by page."""
    (objects,) = row.quick if lab.quick else row.objects
    prefixes = [f"listed/{prefix:04d}/" for prefix in range(objects.count // KEYS_PER_PREFIX)]
    volume = lab.dir / "listing"
    _fill(volume, prefixes, objects.size_bytes)
    rates: list[float] = []
    store = Store.open([volume])
    try:
        reader = StoreReader(store.volumes())
        for _ in range(2 if lab.quick else row.rounds):
            started, seen = time.perf_counter(), 0
            for prefix in prefixes:
                after = ""
                while True:
                    page = reader.scan_entries(BUCKET, prefix, after, PAGE_KEYS)
                    seen += len(page)
                    if len(page) < PAGE_KEYS:
                        break
                    after = page[-1].key
            rates.append(seen / (time.perf_counter() - started))
            if seen != objects.count:
                raise load.LoadFailed(f"the listing has {seen} keys, not {objects.count}")
        reader.close()
    finally:
        store.close()
    return Result(row, (bounded("keys/s", "keys/s", row.goals["keys/s"], rates),))


def _fill(volume: Path, prefixes: list[str], size_bytes: int) -> None:
    store = Store.open([volume])
    body = bytes(size_bytes)
    try:
        for prefix in prefixes:
            for index in range(KEYS_PER_PREFIX):
                key = f"{prefix}{index:06d}"
                info = ObjectInfo(key, size_bytes, "v1", "d41d8cd98f00b204e9800998ecf8427e", 1.7e9)
                store.put_inline(BUCKET, info, body, checked_s=1.7e9)
            store.flush()
    finally:
        store.close()


def resident(lab: Lab, row: Row) -> Result:
    """Memory of engine and fronts, sampled while many times the cache streams through."""
    (objects,) = row.quick if lab.quick else row.objects
    capacity = row.quick_cache_bytes if lab.quick else row.cache_bytes
    epochs = 2 if lab.quick else row.epochs
    lab.upload(objects)
    samples: list[float] = []
    by_process: dict[str, list[int]] = {}
    with lab.remote(row.link) as remote, lab.node(fronts=2, capacity_bytes=capacity, core=None) as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        since = 0
        for _ in range(epochs):
            with load.Reader(node.endpoint) as one, load.Reader(node.endpoint) as two:
                for index in range(objects.count):
                    reader = one if index % 2 else two
                    since += reader.get(f"/{BUCKET}/{objects.key(index)}").size_bytes
                    if since >= SAMPLE_EVERY_BYTES:
                        since = 0
                        samples.append(_sample(node, by_process))
        samples.append(_sample(node, by_process))
    settled = samples[len(samples) // 4 :]  # the first quarter fills pools and caches
    growth = max(settled) / settled[0]
    goals = row.goals
    return Result(
        row,
        (
            bounded("MiB", "MiB", goals["MiB"], [max(samples)]),
            bounded("growth over the last three quarters", "", goals["growth over the last three quarters"], [growth]),
        ),
        notes=(f"{epochs * objects.bytes_total / 2**30:.1f} GiB through a cache of {capacity / 2**30:.2f} GiB",),
        extra={"mib": samples, "processes": by_process},
    )


def _sample(node: Node, by_process: dict[str, list[int]]) -> float:
    total = 0
    for pid in node.processes():
        size = resident_bytes(pid)
        by_process.setdefault(str(pid), []).append(size)
        total += size
    return total / MIB
