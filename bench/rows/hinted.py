"""The row of a job that tells its future: how close to the best possible cache the node comes.

Theory. A loader with hints tells the node what it will read, so the node's choice of what to keep can be compared with
the best there is on the very order that was read: Belady's, which lets go of what is needed last. Ours is counted at
the link, as bytes that the bucket sent; so a block that was fetched ahead of its read was fetched, and is no hit.

The bound. The node may let go of a block as soon as it was read, so the oracle may too: what has just come is among
what it chooses from (with "what comes must stay" the bound would be lower). Fetching ahead cannot beat it, since
whatever is not kept has to come once before each use. Every object here is one block, and all are of one size, for
which the rule is exactly optimal. The oracle has all of the capacity, also the part that the node needs for what it
fetches ahead. The first epoch, which finds nothing, does not count.

The trainer is a clock, as in `epoch.py`, since advice needs time to be followed. How far the job is reaches the node
with a delay (a report each 0.2 s, batches made ahead), in which blocks that were read still count as needed next. That
is a matter of seconds and batches and not of the cache's size, so the cache, which is scaled down, has to be read as
slowly: it lasts the trainer for seconds, as a real one does for minutes.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench import load
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import MB, Objects, Row
from bench.stats import compared

BATCH = 4


def belady_hits(order: Sequence[str], fit: int) -> list[bool]:
    """Which accesses of `order` a cache of `fit` blocks can find at best, what comes need not stay."""
    later: list[float] = []  # by access, when that block is used next
    seen: dict[str, int] = {}
    for at in range(len(order) - 1, -1, -1):
        later.append(seen.get(order[at], float("inf")))
        seen[order[at]] = at
    later.reverse()
    kept: dict[str, float] = {}
    hits = []
    for block, due in zip(order, later, strict=True):
        hits.append(block in kept)
        kept[block] = due
        if len(kept) > fit:
            del kept[max(kept, key=lambda each: kept[each])]
    return hits


def half(lab: Lab, row: Row) -> Result:
    """The share of bytes that a job with hints finds in a cache that holds half of them, beside Belady's."""
    (objects,) = row.quick if lab.quick else row.objects
    capacity = row.quick_cache_bytes if lab.quick else row.cache_bytes
    rounds, epochs = (1, 3) if lab.quick else (row.rounds, row.epochs)
    lab.upload(objects)
    ours: list[float] = []
    best: list[float] = []
    ahead: list[float] = []
    for seed in range(rounds):
        order, fetched, found = _job(lab, row, objects, capacity, seed, epochs)
        hits = belady_hits(order, capacity // objects.size_bytes)[objects.count :]
        ours.append(1 - (fetched[-1] - fetched[0]) / (len(hits) * objects.size_bytes))
        best.append(sum(hits) / len(hits))
        ahead.append(found * objects.size_bytes / fetched[-1])
    measure = compared("hit ratio / Belady's", "", row.goals["hit ratio / Belady's"], ours, best, "Belady's")
    note = (
        f"link {row.link}, trainer at {row.demand * row.link.rate_bytes_s / MB:g} MB/s; of what was fetched, "
        f"{statistics.median(ahead):.0%} had come before it was asked for"
    )
    return Result(row, (measure,), notes=(note,), extra={"fetched_ahead": ahead})


def _job(
    lab: Lab, row: Row, objects: Objects, capacity: int, seed: int, epochs: int
) -> tuple[list[str], list[int], float]:
    """The keys in the order in which a job with an empty cache got them; bytes over the link after each epoch; and how
    many blocks were there because they had been fetched ahead."""
    feeding = importlib.import_module("forebay.torch")
    batch_s = BATCH * objects.size_bytes / (row.demand * row.link.rate_bytes_s)
    order: list[str] = []
    fetched: list[int] = []

    def checked(key: str, data: Any) -> str:
        if (lab.files / key).read_bytes() != data:
            raise load.LoadFailed(f"{key} does not read back as it is")
        return key

    with lab.remote(row.link) as remote, lab.node(capacity_bytes=capacity, core=None) as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        dataset = feeding.ObjectDataset(
            f"{BUCKET}/{objects.name}/", url=node.endpoint, decode=checked, direct_after_s=None
        )
        with feeding.DataLoader(dataset, BATCH, seed=seed, shuffle=True, collate=list, hints=True) as batches:
            for epoch in range(epochs):
                free_at = time.perf_counter()
                for batch in batches:
                    order += batch
                    free_at = max(free_at, time.perf_counter()) + batch_s
                    time.sleep(max(0.0, free_at - time.perf_counter()))
                if len(set(order[epoch * objects.count :])) != objects.count:
                    raise load.LoadFailed(f"epoch {epoch + 1} did not give each of {objects.count} samples once")
                if epoch in (0, epochs - 1):  # between others the job does not wait, since jobs do not
                    remote.settle()
                fetched.append(remote.bytes_down())
        found = node.counter("forebay_hint_hits_total")
    if not found:
        raise load.LoadFailed("nothing was fetched ahead: the node did not follow the hints")
    return order, fetched, found
