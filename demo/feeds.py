"""The demo's two ways to feed the same model: boto3 straight from the bucket, and `forebay.torch` through a node.

Both give batches of half a kilobyte cut at random out of each sample, with its kind. `FromBucket` is what people write
by hand: workers stream shards in an order that is new each epoch, and where a job stopped is not known. `FromNode` is a
dataset and a loader: an order that is new each epoch, from the second on over all samples, and a state that says where
the job is.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator
from typing import Any

import boto3
import numpy as np
import torch
from botocore import UNSIGNED
from botocore.config import Config
from torch.utils import data

from demo.corpus import NAMES
from forebay.torch import DataLoader, ShardDataset

CROP_BYTES = 512
BATCH = 128
SEED = 41
LABELS = {name: number for number, name in enumerate(NAMES)}

Batch = tuple[torch.Tensor, torch.Tensor, int, list[str]]  # bytes, labels, size of the samples as read, their names


def crop(sample: bytes) -> bytes:
    start = random.randrange(max(1, len(sample) - CROP_BYTES))
    return sample[start : start + CROP_BYTES].ljust(CROP_BYTES, b"\0")


def as_batch(samples: list[tuple[bytes, str, int, str]]) -> Batch:
    """Of (crop, kind, size, name)."""
    crops, kinds, sizes, names = zip(*samples, strict=True)
    bytes_ = np.frombuffer(b"".join(crops), np.uint8).reshape(-1, CROP_BYTES)
    return torch.from_numpy(bytes_.copy()), torch.tensor([LABELS[kind] for kind in kinds]), sum(sizes), list(names)


# --- from the bucket -------------------------------------------------------------------------------------------------
def s3_client(endpoint: str):
    """boto3 as anybody would make it, without credentials (the bucket is open on this machine's loopback)."""
    config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


def list_shards(s3, bucket: str, prefix: str) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def read_shard(s3, bucket: str, key: str) -> Iterator[tuple[str, bytes]]:
    """Members of a tar shard as they arrive: (name, bytes)."""
    body = s3.get_object(Bucket=bucket, Key=key)["Body"]
    with tarfile.open(fileobj=body, mode="r|", bufsize=1 << 20) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None, f"{key}: {member.name} is not a file"
            yield member.name, file.read()


class _Shards(data.IterableDataset):
    """Batches out of shards; each worker reads every so-many-th shard of the epoch's order."""

    def __init__(self, endpoint: str, bucket: str, keys: list[str], seed: int) -> None:
        self.endpoint, self.bucket, self.keys = endpoint, bucket, list(keys)
        random.Random(seed).shuffle(self.keys)

    def __iter__(self) -> Iterator[Batch]:
        info = data.get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        s3 = s3_client(self.endpoint)
        samples: list[tuple[bytes, str, int, str]] = []
        for key in self.keys[number::count]:
            for name, sample in read_shard(s3, self.bucket, key):
                samples.append((crop(sample), name.rpartition(".")[2], len(sample), f"{key}/{name}"))
                if len(samples) == BATCH:
                    yield as_batch(samples)
                    samples = []
        if samples:
            yield as_batch(samples)


class FromBucket:
    """Epochs straight from `endpoint`. Its state is the number of the epoch: a job that was killed begins it anew."""

    def __init__(self, endpoint: str, bucket: str, prefix: str, workers: int) -> None:
        self.endpoint, self.bucket, self.workers = endpoint, bucket, workers
        self.keys = list_shards(s3_client(endpoint), bucket, prefix)
        assert self.keys, f"no shard {prefix}* in {bucket} at {endpoint}"
        self.epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        shards = _Shards(self.endpoint, self.bucket, self.keys, self.epoch)
        yield from data.DataLoader(shards, None, num_workers=self.workers)
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


# --- through the node ------------------------------------------------------------------------------------------------
def as_sample(parts: dict[str, Any]) -> tuple[bytes, str, int, str]:
    (kind,) = (name for name in parts if not name.startswith("__"))
    return crop(parts[kind]), kind, len(parts[kind]), f"{parts['__shard__']}/{parts['__key__']}"


def from_node(url: str, bucket: str, prefix: str, workers: int, *, shuffle: bool = True) -> DataLoader:
    """The same samples through the node at `url`: this is all of it."""
    dataset = ShardDataset(f"{bucket}/{prefix}", url=url, decode={}, transform=as_sample)
    return DataLoader(dataset, BATCH, seed=SEED, shuffle=shuffle, workers=workers, collate=as_batch)
