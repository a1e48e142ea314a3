"""Rows of very many small objects: how soon a node with millions of them serves, what their leaving costs and whom it
keeps waiting, and whether a volume that was full of them takes as many again.

Theory. What a node does per object shows only with very many, and making them by requests would take an hour. So they
are put through the store's own API, a few hundred to a commit, into the volume of a node that stands still; the node
then meets them as any others. The rows are about what comes after.

`start-2m` kills a node of 2,000,000 objects and an empty one, starts each and asks until the first hit and the first
miss are answered; what the objects cost is the difference. Then it waits until the engine has learned what there is,
kills the engine alone and asks for a miss again. One object in OWNED_EVERY is local, so that there is what is owed.

`evict-1m` cuts a bucket's quota to one block, and reads one cold object after the other until all others have left. The
limit is the same index entries deleted in the same batches by nobody else.

`fill-delete-fill` needs no node: it writes small objects until the store refuses, deletes them all, and does it again.

Invariants. (1) Every round of a node begins when the engine has come to rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from bench import load
from bench.parts import BUCKET, Lab, Node
from bench.report import Result
from bench.row import KIB, MIB, REPORTED, Goal, Objects, Row
from bench.stats import Measure, bounded, compared
from forebay.core import limits
from forebay.core.errors import ForebayError
from forebay.core.record import State
from forebay.core.types import ObjectInfo
from forebay.node.store.disk.notes import Note
from forebay.node.store.writer.puts import Change, Delete, Put
from forebay.node.store.writer.writer import Store

KEPT = "kept"  # the local bucket
OWNED_EVERY = 8
TOGETHER = 512  # changes in a commit
FETCHED = Objects("fetched", 4 * KIB, 2000)  # what only the bucket has
FETCHED_QUICK = Objects("fetched", 4 * KIB, 300)
PATIENCE_S = 600.0
LOOK_S = 0.01
LEAVING_S = 0.5  # objects that leave are fewer after so long
REST_S = 1.0  # an engine that took hardly any processor time for so long has nothing to do


# --- many objects ----------------------------------------------------------------------------------------------------
def _put(store: Store, bucket: str, key: str, size_bytes: int, state: State) -> Put:
    object_id = store.take_id()
    info = ObjectInfo(key, size_bytes, f"v{object_id}", "d41d8cd98f00b204e9800998ecf8427e", 1.7e9)
    note = Note(object_id, 1.7e9, size_bytes, object_id, "", local=True) if state & State.LOCAL else None
    return Put(bucket, info, object_id, state, 1.7e9, body=bytes(size_bytes), note=note, durable=note is not None)


def _commit(store: Store, changes: Sequence[Change]) -> list[bool]:
    """Which of them were done."""
    prepared = store.prepare(changes)
    store.make_durable(prepared)
    return [not isinstance(outcome, ForebayError) for outcome in store.publish(prepared) or ()]


def _fill(volume: Path, objects: Objects, owned_every: int = 0) -> None:
    """The objects in a volume, as if they had been fetched; one in `owned_every` is local, in a bucket of its own."""
    store = Store.open([volume])
    try:
        for first in range(0, objects.count, TOGETHER):
            batch = []
            for index in range(first, min(first + TOGETHER, objects.count)):
                local = bool(owned_every) and index % owned_every == 0
                bucket, state = (KEPT, State.LOCAL) if local else (BUCKET, State.CLEAN)
                batch.append(_put(store, bucket, objects.key(index), objects.size_bytes, state))
            if not all(_commit(store, batch)):
                raise load.LoadFailed(f"the volume {volume} did not take {objects.count} objects")
    finally:
        store.close()


def _volume(node: Node) -> Path:
    return node.dir / "node" / "volumes" / "v0"


# --- a node that comes back ------------------------------------------------------------------------------------------
def _answered(node: Node, path: str, since_s: float) -> float:
    """Seconds from `since_s` until `path` is answered, by whatever process."""
    while True:
        with contextlib.suppress(OSError, load.LoadFailed), load.Reader(node.endpoint) as reader:
            reader.get(path)
            return time.perf_counter() - since_s
        if time.perf_counter() - since_s > PATIENCE_S:
            raise load.LoadFailed(f"{path} was not answered in {PATIENCE_S:.0f} s: {node.log_tail()}")
        time.sleep(LOOK_S)


def _engine(node: Node) -> int:
    with node.client() as client:
        return client.status().engine_pid


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rest(lab: Lab, node: Node) -> int:
    """Return when the engine has nothing to do: its process."""
    pid = _engine(node)
    used_s, rest_s = float("-inf"), REST_S / 4 if lab.quick else REST_S
    while (now_s := _cpu_s(pid)) - used_s > 0.2 * rest_s:
        used_s = now_s
        time.sleep(rest_s)
    return pid


def _own_bytes(pid: int) -> int:
    """Memory that is the process's own: pages of the index, which the kernel has anyway, are not."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * KIB if found else 0


class _Cold:
    """Paths of objects that the node has not read yet."""

    def __init__(self, lab: Lab) -> None:
        objects = FETCHED_QUICK if lab.quick else FETCHED
        lab.upload(objects)
        self._paths = iter([f"/{BUCKET}/{objects.key(index)}" for index in range(objects.count)])

    def path(self) -> str:
        return next(self._paths)


def start(lab: Lab, row: Row) -> Result:
    """First hits and misses after a start and after a kill of the engine, against an empty node's."""
    (objects,) = row.quick if lab.quick else row.objects
    hits: tuple[list[float], list[float]] = ([], [])
    misses: tuple[list[float], list[float]] = ([], [])
    kills: tuple[list[float], list[float]] = ([], [])
    known: list[float] = []
    memory: list[float] = []
    with lab.node(core=None) as full, lab.node(core=None) as empty:
        for node in (full, empty):
            node.add_bucket(BUCKET, lab)
            node.add_local(KEPT, "disk")
        full.kill()
        _fill(_volume(full), objects, OWNED_EVERY)
        full.restart()
        cold = (_Cold(lab), _Cold(lab))
        warm = (f"/{BUCKET}/{objects.key(1)}", cold[1].path())
        _answered(empty, warm[1], time.perf_counter())
        for _ in range(1 if lab.quick else row.rounds):
            own = []
            for side, node in ((0, full), (1, empty)):
                _rest(lab, node)
                node.kill()
                began_s = time.perf_counter()
                node.restart(wait=False)
                hits[side].append(_answered(node, warm[side], began_s))
                misses[side].append(_answered(node, cold[side].path(), began_s))
                engine = _rest(lab, node)
                if side == 0:
                    known.append(time.perf_counter() - began_s - REST_S)
                own.append(_own_bytes(engine))
                os.kill(engine, signal.SIGKILL)
                kills[side].append(_answered(node, cold[side].path(), time.perf_counter()))
            memory.append((own[0] - own[1]) / objects.count)
    goals = row.goals
    return Result(
        row,
        (
            _later("first hit", goals["first hit"], *hits),
            _later("first miss", goals["first miss"], *misses),
            _later("miss after a kill", goals["miss after a kill"], *kills),
            bounded("all is known after", "s", REPORTED, known),
            bounded("engine's memory / object", "B", REPORTED, memory),
        ),
        notes=(f"one object in {OWNED_EVERY} is local; all were made through the store's API, not by requests",),
    )


def _later(name: str, goal: Goal, ours: Sequence[float], theirs: Sequence[float]) -> Measure:
    """Judge by how many seconds ours came later."""
    later = tuple(mine - other for mine, other in zip(ours, theirs, strict=True))
    return Measure(name, "s", goal, tuple(ours), tuple(theirs), later, "empty node")


# --- leaving ---------------------------------------------------------------------------------------------------------
def evict(lab: Lab, row: Row) -> Result:
    """What it costs the engine that a bucket's objects leave at once, and how long cold reads take meanwhile."""
    (objects,) = row.quick if lab.quick else row.objects
    costs: tuple[list[float], list[float]] = ([], [])
    reads: tuple[list[float], list[float]] = ([], [])
    worst: list[float] = []
    for _ in range(1 if lab.quick else row.rounds):
        with lab.node(core=None) as node:
            node.add_bucket(BUCKET, lab)
            node.kill()
            _fill(_volume(node), objects)
            costs[1].append(_deleting_us(lab, _volume(node), objects))
            node.restart()
            pid, cold = _rest(lab, node), _Cold(lab)
            with load.Reader(node.endpoint) as reader:
                before = [reader.get(cold.path()).total_s for _ in range(20 if lab.quick else 100)]
                _rest(lab, node)
                used_s = _cpu_s(pid)
                during = list(_read_while(node, reader, cold))
                left = node.counter("forebay_objects")
                _rest(lab, node)
            costs[0].append((_cpu_s(pid) - used_s) * 1e6 / (objects.count - left))
            reads[0].append(statistics.median(during))
            reads[1].append(statistics.median(before))
            worst.append(max(during))
    goals = row.goals
    return Result(
        row,
        (
            compared("processor time / object", "µs", goals["processor time / object"], *costs, "deleting alone"),
            compared("cold read meanwhile", "s", goals["cold read meanwhile"], *reads, "before"),
            bounded("worst cold read", "s", goals["worst cold read"], worst),
        ),
        notes=(
            "processor time counts the cold reads meanwhile too; the objects were made through the store's API",
            "deleting alone: the same entries of a copy of the index, in batches of as many, by one thread",
        ),
    )


def _read_while(node: Node, reader: load.Reader, cold: _Cold) -> Iterator[float]:
    """Cut the bucket's quota, and tell how long each cold read takes while objects leave."""
    with node.client() as client:
        (bucket,) = (each for each in client.buckets() if each.name == BUCKET)
        client.bucket_put(msgspec.structs.replace(bucket, quota_bytes=limits.BLOCK_BYTES))
    looked_s, left = time.perf_counter(), float("inf")
    while True:
        yield reader.get(cold.path()).total_s
        if time.perf_counter() - looked_s > LEAVING_S:
            before, left = left, node.counter("forebay_objects")
            if left > before * 0.995:
                return
            looked_s = time.perf_counter()
        time.sleep(5 * LOOK_S)


def _deleting_us(lab: Lab, volume: Path, objects: Objects) -> float:
    """Processor time, in µs, for each object when the same index entries are deleted by nobody else."""
    copy = lab.dir / "deleted"
    shutil.copytree(volume, copy)
    store = Store.open([copy])
    try:
        (at,) = store.usable()
        index = at.index
        names = [entry for entry, _ in index.walk("records")]
        ids = {value[8:]: name for name, value in index.walk("ids")}
        began_s = time.process_time()
        for first in range(0, len(names), 1024):
            batch = names[first : first + 1024]
            index.delete_many("records", batch)
            index.delete_many("ids", [ids[entry] for entry in batch])
            index.flush()
        return (time.process_time() - began_s) * 1e6 / len(names)
    finally:
        store.close(clean=False)
        shutil.rmtree(copy)


# --- full again ------------------------------------------------------------------------------------------------------
def refill(lab: Lab, row: Row) -> Result:
    """How many small objects a volume takes, and how many after all of them were deleted."""
    (objects,) = row.quick if lab.quick else row.objects
    capacity_bytes = row.quick_cache_bytes if lab.quick else row.cache_bytes
    taken: tuple[list[float], list[float]] = ([], [])
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(1 if lab.quick else row.rounds):
        volume = lab.dir / f"refilled-{turn}"
        store = Store.open([volume], capacity_bytes=capacity_bytes)
        try:
            for side in (1, 0):
                began_s = time.perf_counter()
                keys = _until_full(store, objects, f"{side}")
                rates[side].append(len(keys) / (time.perf_counter() - began_s))
                taken[side].append(len(keys))
                for first in range(0, len(keys), TOGETHER):
                    if not all(_commit(store, [Delete(KEPT, key) for key in keys[first : first + TOGETHER]])):
                        raise load.LoadFailed("a delete was refused")
        finally:
            store.close(clean=False)
            shutil.rmtree(volume)
    goals = row.goals
    return Result(
        row,
        (
            compared("objects", "", goals["objects"], *taken, "first fill"),
            compared("rate", "1/s", goals["rate"], *rates, "first fill"),
        ),
        notes=(f"synced writes, {TOGETHER} to a commit, into {capacity_bytes // MIB} MiB, through the store's API",),
    )


def _until_full(store: Store, objects: Objects, name: str) -> list[str]:
    keys: list[str] = []
    while len(keys) < objects.count:
        batch = [f"{name}/{len(keys) + at:07d}" for at in range(TOGETHER)]
        done = _commit(store, [_put(store, KEPT, key, objects.size_bytes, State.LOCAL) for key in batch])
        keys += [key for key, went in zip(batch, done, strict=True) if went]
        if not all(done):
            return keys
    raise load.LoadFailed(f"the volume took {len(keys)} objects, and is not full")
