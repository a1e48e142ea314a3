"""The row of a job that begins on shards that nobody has looked into.

Theory. To know what is in a tar is to read it, and a job of 10 TB must not wait for that. So the first batch of the
first epoch needs the head of one shard (16 MiB), whatever the total is. Measured is from making the dataset, in a new
process that has imported all it needs, to the first batch of BATCH samples, on a node that begins empty. Beside it
stands a reader that gets HEAD_BYTES of a shard with one request over the same link, and knows nothing then. The shards
here are 1 GB: a dataset that read them all first would take fifty times as long, and of 10 GB five hundred times.

The second job on the same node finds what the first has found out.
"""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from typing import Any

from bench import load
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import MIB, Objects, Row
from bench.rows import loader
from bench.stats import compared

BATCH = 64
SAMPLE_BYTES = 100_000
HEAD_BYTES = 16 * MIB


def upload(lab: Lab, objects: Objects) -> None:
    """`count` tars of about `size_bytes` each, of members of SAMPLE_BYTES."""
    keys = [f"{objects.key(index)}.tar" for index in range(objects.count)]
    for shard, key in enumerate(keys):
        path = lab.files / key
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for number in range(objects.size_bytes // SAMPLE_BYTES):
                member = tarfile.TarInfo(f"{shard:03d}{number:06d}.bin")
                member.size = SAMPLE_BYTES
                tar.addfile(member, io.BytesIO(os.urandom(SAMPLE_BYTES)))
    lab.upload_files(keys)


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


def _seconds(work: dict[str, Any]) -> float:
    told = loader.lines_of([sys.executable, "-m", "bench.trainee", "first-of-shards"], work, {}, "first_batch_s")
    if len(told) != 1 or not told[0]["first_batch_s"] > 0:
        raise load.LoadFailed(f"{len(told)} first batches were told of")
    if told[0]["samples"] != work["batch"] or told[0]["in_order"]:
        raise load.LoadFailed(f"the first batch is none of {work['batch']} shuffled samples: {told[0]}")
    return float(told[0]["first_batch_s"])
