"""The rows of a job that begins on shards: nobody has looked into them, or the node knows what is in all of them.

Theory. To know what is in a tar is to read it, and a job of 10 TB must not wait for that. So the first batch of the
first epoch needs the head of one shard (16 MiB), whatever the total is. Measured is from making the dataset, in a new
process that has imported all it needs, to the first batch of BATCH samples, on a node that begins empty. Beside it
stands a reader that gets HEAD_BYTES of a shard with one request over the same link, and knows nothing then. The shards
here are 1 GB: a dataset that read them all first would take fifty times as long, and of 10 GB five hundred times.

The second job on the same node finds what the first has found out.

From epoch 1 on, samples are drawn from all shards, so a rank needs to know what is in each. `next_epoch` is a new rank
that begins there, on small samples, where that costs most: beside it stands a process that gets the same from the node,
shard by shard, and makes nothing of it.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tarfile
import time
from typing import Any

from bench import load
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import MIB, Objects, Row
from bench.rows import loader
from bench.stats import bounded, compared

BATCH = 64
SAMPLE_BYTES = 100_000
SMALL_BYTES = 200  # of a part of a small sample: 1 KiB in a tar
PARTS = ("jpg", "cls")
HEAD_BYTES = 16 * MIB


def upload(lab: Lab, objects: Objects, sample_bytes: int = SAMPLE_BYTES, parts: tuple[str, ...] = ("bin",)) -> None:
    """`count` tars of about `size_bytes` each, of samples of so many parts of `sample_bytes`."""
    keys = keys_of(objects)
    for shard, key in enumerate(keys):
        path = lab.files / key
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for number in range(samples_of(objects, sample_bytes, parts)):
                for part in parts:
                    member = tarfile.TarInfo(f"{shard:03d}{number:06d}.{part}")
                    member.size = sample_bytes
                    tar.addfile(member, io.BytesIO(os.urandom(sample_bytes)))
    lab.upload_files(keys)


def keys_of(objects: Objects) -> list[str]:
    return [f"{objects.key(index)}.tar" for index in range(objects.count)]


def samples_of(objects: Objects, sample_bytes: int, parts: tuple[str, ...]) -> int:
    """In a shard. A part has a header of 512 bytes, and its bytes are rounded up to as many."""
    return objects.size_bytes // (len(parts) * 512 * (1 + -(-sample_bytes // 512)))


def first_batch(lab: Lab, row: Row) -> Result:
    """Seconds to the first batch of the first job and of the next, beside the head of one shard."""
    (objects,) = row.quick if lab.quick else row.objects
    upload(lab, objects)
    first: list[float] = []
    second: list[float] = []
    heads: list[float] = []
    with lab.remote(row.link) as remote:
        for _ in range(1 if lab.quick else row.rounds):
            with load.Reader(remote.endpoint) as reader:
                began_s = time.perf_counter()
                reader.get(f"/{BUCKET}/{objects.key(0)}.tar", {"Range": f"bytes=0-{HEAD_BYTES - 1}"})
                heads.append(time.perf_counter() - began_s)
            remote.settle()
            with lab.node(core=None) as node:
                node.add_bucket(BUCKET, lab, remote.endpoint)
                work = {"place": f"{BUCKET}/{objects.name}/", "url": node.endpoint, "batch": BATCH, "seed": loader.SEED}
                first.append(_seconds(work))
                second.append(_seconds(work))
            remote.settle()
    return Result(
        row,
        (
            compared("first batch", "s", row.goals["first batch"], first, heads, "16 MiB over the link"),
            compared("second job", "s", row.goals["second job"], second, heads, "16 MiB over the link"),
        ),
        notes=(f"{objects.count} tars of {objects.size_bytes / 1e6:.0f} MB, samples of 100 KB, link {row.link}",),
    )


def next_epoch(lab: Lab, row: Row) -> Result:
    """Seconds to the first batch of epoch 1 of a rank that knows nothing, on a node that knows all."""
    (objects,) = row.quick if lab.quick else row.objects
    upload(lab, objects, SMALL_BYTES, PARTS)
    samples = objects.count * samples_of(objects, SMALL_BYTES, PARTS)
    ours: list[float] = []
    members: list[float] = []
    with lab.remote(row.link) as remote, lab.node(core=None) as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        node.prefetch(BUCKET, f"{objects.name}/")
        work = {"place": f"{BUCKET}/{objects.name}/", "url": node.endpoint, "batch": BATCH, "seed": loader.SEED}
        _seconds(work | {"epoch": 1}, samples)  # the job's first rank: the node lists, and looks into the shards
        before = remote.bytes_down()
        for _ in range(1 if lab.quick else row.rounds):
            members.append(_members(work, objects, samples))
            ours.append(_seconds(work | {"epoch": 1}, samples))
        sent = remote.bytes_down() - before
    more_us = (statistics.median(ours) - statistics.median(members)) / samples * 1e6
    return Result(
        row,
        (
            compared("first batch", "s", row.goals["first batch"], ours, members, "members alone"),
            bounded("bytes of the bucket", "B", row.goals["bytes of the bucket"], [float(sent)]),
        ),
        notes=(f"{samples} samples of 2 parts in {objects.count} tars; {more_us:.2f} µs a sample beyond the members",),
    )


def _members(work: dict[str, Any], objects: Objects, samples: int) -> float:
    asked = work | {"bucket": BUCKET, "keys": keys_of(objects)}
    (told,) = loader.lines_of([sys.executable, "-m", "bench.trainee", "members"], asked, {}, "members_s")
    if told["members"] != len(PARTS) * samples:
        raise load.LoadFailed(f"the shards have {told['members']} members, not {len(PARTS) * samples}")
    return float(told["members_s"])


def _seconds(work: dict[str, Any], known: int | None = None) -> float:
    """To the first batch of a process of its own; `known`: how many samples it must know then."""
    asked = {"epoch": 0} | work
    told = loader.lines_of([sys.executable, "-m", "bench.trainee", "first-of-shards"], asked, {}, "first_batch_s")
    if len(told) != 1 or not told[0]["first_batch_s"] > 0:
        raise load.LoadFailed(f"{len(told)} first batches were told of")
    if told[0]["samples"] != work["batch"] or told[0]["in_order"]:
        raise load.LoadFailed(f"the first batch is none of {work['batch']} shuffled samples: {told[0]}")
    if known is not None and told[0]["known"] != known:
        raise load.LoadFailed(f"{told[0]['known']} samples are known, not {known}")
    return float(told[0]["first_batch_s"])
