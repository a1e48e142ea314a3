"""Epoch rows: what a training loop sees, epoch after epoch, through the node and straight from the bucket.

The trainer is a clock: samples arrive in a random order that differs each epoch, fetched by a few reading threads ahead
of it, and each occupies the trainer for `size / demand`. So an epoch takes the longer of what the trainer needs and
what the bytes need, which is what a GPU does to a data loader, without the GPU.
"""

from __future__ import annotations

import queue
import random
import threading
import time

from bench import load
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import Objects, Row
from bench.stats import bounded, faster

AHEAD_MAX = 32  # samples fetched and not yet consumed


def train_epoch(
    endpoint: str, bucket: str, objects: Objects, *, epoch: int, readers: int, demand_bytes_s: float
) -> float:
    """Seconds from the first request to the end of the last sample's turn. `demand_bytes_s` of 0: as fast as it can."""
    order = list(range(objects.count))
    random.Random(epoch).shuffle(order)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in order:
        todo.put(index)
    arrived: queue.Queue[int | BaseException] = queue.Queue(AHEAD_MAX)
    threads = [
        threading.Thread(target=_read_loop, args=(endpoint, bucket, objects, todo, arrived), daemon=True)
        for _ in range(readers)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    free_at = started
    for _ in range(objects.count):
        size = arrived.get(timeout=load.TIMEOUT_S)
        if isinstance(size, BaseException):
            raise size
        now = time.perf_counter()
        free_at = max(free_at, now) + (size / demand_bytes_s if demand_bytes_s else 0.0)
        if free_at > now:
            time.sleep(free_at - now)
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def _read_loop(
    endpoint: str,
    bucket: str,
    objects: Objects,
    todo: queue.SimpleQueue[int],
    arrived: queue.Queue[int | BaseException],
) -> None:
    try:
        with load.Reader(endpoint) as reader:
            while True:
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                arrived.put(reader.get(f"/{bucket}/{objects.key(index)}").size_bytes)
    except BaseException as error:  # handed to the trainer, which raises it
        arrived.put(error)


def training(lab: Lab, row: Row) -> Result:
    """All epochs through the node, and as many from the bucket."""
    (objects,) = row.quick if lab.quick else row.objects
    epochs = 3 if lab.quick else row.epochs
    lab.upload(objects)
    demand = row.demand * row.link.rate_bytes_s
    ours: list[float] = []
    theirs: list[float] = []
    with lab.remote(row.link) as remote, lab.node() as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        before = remote.bytes_down()
        for epoch in range(epochs):
            ours.append(_epoch(node.endpoint, row, objects, epoch, demand))
        remote.settle()
        fetched = remote.bytes_down() - before
        for epoch in range(epochs):
            theirs.append(_epoch(remote.endpoint, row, objects, epoch, demand))
    return Result(
        row,
        (
            faster("speed-up", "s", row.goals["speed-up"], [sum(ours)], [sum(theirs)]),
            faster("first epoch", "s", row.goals["first epoch"], [ours[0]], [theirs[0]]),
            bounded("backend bytes / data", "", row.goals["backend bytes / data"], [fetched / objects.bytes_total]),
        ),
        notes=(f"link {row.link}; {epochs} epochs of {objects.count} x {objects.size_bytes} bytes",),
        extra={"epochs_s": ours, "epochs_direct_s": theirs},
    )


def _epoch(endpoint: str, row: Row, objects: Objects, epoch: int, demand: float) -> float:
    return train_epoch(endpoint, BUCKET, objects, epoch=epoch, readers=row.connections, demand_bytes_s=demand)


def half(lab: Lab, row: Row) -> Result:
    """The share of bytes that random epochs find in a cache that holds half of them, by what the bucket had to send."""
    (objects,) = row.quick if lab.quick else row.objects
    capacity = row.quick_cache_bytes if lab.quick else row.cache_bytes
    epochs = 4 if lab.quick else row.epochs
    lab.upload(objects)
    hits: list[float] = []
    with lab.remote(row.link) as remote, lab.node(capacity_bytes=capacity) as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        for epoch in range(epochs):
            before = remote.bytes_down()
            _epoch(node.endpoint, row, objects, epoch, 0.0)
            remote.settle()
            hits.append(1 - (remote.bytes_down() - before) / objects.bytes_total)
    share = capacity / objects.bytes_total
    goal = row.goals["hit ratio / (cache/data)"]
    ratios = [hit / share for hit in hits[1:]]  # the first epoch finds nothing: it fills the cache
    return Result(row, (bounded("hit ratio / (cache/data)", "", goal, ratios),), extra={"hit_ratio_by_epoch": hits})
