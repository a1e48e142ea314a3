"""The rows of a cache that is smaller than the data: what the bucket sends for an epoch of small samples.

Samples are windows of large files, so each is a range of a block of 4 MiB. Beside the node stands a reader of ranges
without a cache, which gets each sample with one request over the same link; heads of answers count on both sides. The
first epoch, which fills the cache, does not count.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from bench import load
from bench.parts import BUCKET, Lab, Remote
from bench.report import Result
from bench.row import Objects, Row
from bench.stats import compared

BATCH = 64
SHARES = {"an eighth": 8, "half": 2}  # of the data that the cache holds
DIRECT_SAMPLES = 200  # whose cost stands for that of all


def backend_bytes(lab: Lab, row: Row) -> Result:
    """Bytes of an epoch over all samples, and of one as the loader chooses it, for caches of two sizes."""
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    measures = []
    with lab.remote(row.link) as remote:
        a_sample = _direct(remote, objects, row.range_bytes)
        for said, shuffle in (("shuffle=True", True), ("as it comes", "auto")):
            for share, part in SHARES.items():
                name = f"{said}, cache of {share}"
                sent, samples = _epoch(lab, row, remote, objects, shuffle, objects.bytes_total // part)
                measures.append(compared(name, "B", row.goals[name], [float(sent)], [samples * a_sample], "ranges"))
    return Result(row, tuple(measures), notes=(f"link {row.link}; {samples:,} samples an epoch, the second counts",))


def _direct(remote: Remote, objects: Objects, sample_bytes: int) -> float:
    """Bytes over the link for one sample that is read alone."""
    chance = random.Random(1)
    before = remote.bytes_down()
    with load.Reader(remote.endpoint) as reader:
        for _ in range(DIRECT_SAMPLES):
            start = chance.randrange(objects.size_bytes - sample_bytes)
            span = {"Range": f"bytes={start}-{start + sample_bytes - 1}"}
            reader.get(f"/{BUCKET}/{objects.key(chance.randrange(objects.count))}", span)
    remote.settle()
    return (remote.bytes_down() - before) / DIRECT_SAMPLES


def _epoch(lab: Lab, row: Row, remote: Remote, objects: Objects, shuffle: Any, capacity: int) -> tuple[int, int]:
    """Bytes over the link in the second epoch of a job, and how many samples it had."""
    feeding = importlib.import_module("forebay.torch")
    with lab.node(capacity_bytes=capacity, core=None) as node:
        node.add_bucket(BUCKET, lab, remote.endpoint)
        dataset = feeding.TokenDataset(
            f"{BUCKET}/{objects.name}/", row.range_bytes // 2, raw=True, url=node.endpoint, direct_after_s=None
        )
        with feeding.DataLoader(dataset, BATCH, seed=1, shuffle=shuffle) as batches:
            before = 0
            for _ in range(2):
                remote.settle()
                before = remote.bytes_down()
                samples = sum(len(batch) for batch in batches)
                if samples != len(dataset):
                    raise load.LoadFailed(f"an epoch gave {samples} samples of {len(dataset)}")
            return remote.bytes_down() - before, samples
