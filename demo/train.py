"""The demo's training job: a small PyTorch model that reads tar shards with boto3, from whatever endpoint it is given.

Nothing here knows about Forebay: the same program runs against the bucket and through the node, and only the endpoint
differs. `DataLoader` workers read the shards in an order that is new each epoch, cut a random half kilobyte out of each
sample, and hand batches to the model, which learns to tell of which kind of file they are.

    python -m demo.train ENDPOINT BUCKET EPOCHS

prints one line of JSON per progress report and per epoch, for the program that started it.
"""

from __future__ import annotations

import json
import random
import sys
import tarfile
import time
from collections.abc import Iterator

import boto3
import numpy as np
import torch
from botocore import UNSIGNED
from botocore.config import Config
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo.corpus import NAMES

CROP_BYTES = 512
BATCH = 128
WORKERS = 2
REPORT_EVERY_S = 0.25
LABELS = {name: number for number, name in enumerate(NAMES)}

Batch = tuple[torch.Tensor, torch.Tensor, int]  # bytes, labels, size of the samples as they were read


# --- reading ---------------------------------------------------------------------------------------------------------
def s3_client(endpoint: str):
    """boto3 as anybody would make it, without credentials (both ends are open on this machine's loopback)."""
    config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


def list_shards(s3, bucket: str, prefix: str) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def read_shard(s3, bucket: str, key: str) -> Iterator[tuple[str, bytes]]:
    """Members of a tar shard as they arrive: (kind, bytes)."""
    body = s3.get_object(Bucket=bucket, Key=key)["Body"]
    with tarfile.open(fileobj=body, mode="r|", bufsize=1 << 20) as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None, f"{key}: {member.name} is not a file"
            yield member.name.rpartition(".")[2], file.read()


class Shards(IterableDataset):
    """Batches out of shards; each worker reads every so-many-th shard of the epoch's order."""

    def __init__(self, endpoint: str, bucket: str, keys: list[str], seed: int) -> None:
        self.endpoint, self.bucket, self.keys, self.seed = endpoint, bucket, list(keys), seed
        random.Random(seed).shuffle(self.keys)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        chance = random.Random(self.seed * 1000 + number)
        s3 = s3_client(self.endpoint)
        crops: list[bytes] = []
        labels: list[int] = []
        size = 0
        for key in self.keys[number::count]:
            for kind, sample in read_shard(s3, self.bucket, key):
                start = chance.randrange(max(1, len(sample) - CROP_BYTES))
                crops.append(sample[start : start + CROP_BYTES].ljust(CROP_BYTES, b"\0"))
                labels.append(LABELS[kind])
                size += len(sample)
                if len(crops) == BATCH:
                    yield as_batch(crops, labels, size)
                    crops, labels, size = [], [], 0
        if crops:
            yield as_batch(crops, labels, size)


def as_batch(crops: list[bytes], labels: list[int], size: int) -> Batch:
    data = np.frombuffer(b"".join(crops), np.uint8).reshape(-1, CROP_BYTES)
    return torch.from_numpy(data.copy()), torch.tensor(labels), size


# --- learning --------------------------------------------------------------------------------------------------------
class FragmentNet(nn.Module):
    """Bytes to kind: an embedding per byte, two strided convolutions, the strongest and the mean response of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.features = nn.Sequential(nn.Conv1d(8, 32, 16, 8), nn.GELU(), nn.Conv1d(32, 64, 8, 4), nn.GELU())
        self.head = nn.Linear(128, len(NAMES))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found = self.features(self.embed(data.long()).transpose(1, 2))
        return self.head(torch.cat([found.amax(2), found.mean(2)], 1))


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def train(endpoint: str, bucket: str, epochs: int) -> FragmentNet:
    """Train on every `train-` shard of the bucket, reporting as it goes."""
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the workers need processors too
    model = FragmentNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    keys = list_shards(s3_client(endpoint), bucket, "train-")
    assert keys, f"no training shard in {bucket} at {endpoint}"
    began, seen, said = time.perf_counter(), 0, 0.0
    for epoch in range(1, epochs + 1):
        started, first, size_read, loss_sum = time.perf_counter(), seen, 0, 0.0
        for data, labels, size in DataLoader(Shards(endpoint, bucket, keys, epoch), None, num_workers=WORKERS):
            loss = nn.functional.cross_entropy(model(data), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(labels)
            size_read += int(size)
            loss_sum += loss.item() * len(labels)
            now = time.perf_counter() - began
            if now - said > REPORT_EVERY_S:
                say(at_s=now, seen=seen, epoch=epoch)
                said = now
        ended = time.perf_counter()
        say(at_s=ended - began, seen=seen, epoch=epoch)
        say(done=epoch, seconds=ended - started, samples=seen - first, bytes=size_read, loss=loss_sum / (seen - first))
    return model


@torch.no_grad()
def accuracy(model: FragmentNet, endpoint: str, bucket: str) -> float:
    """The share of held-out fragments whose kind the model tells."""
    right = total = 0
    for data, labels, _ in Shards(endpoint, bucket, list_shards(s3_client(endpoint), bucket, "test-"), 0):
        right += int((model(data).argmax(1) == labels).sum())
        total += len(labels)
    return right / max(1, total)


if __name__ == "__main__":
    trained = train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    say(accuracy=accuracy(trained, sys.argv[1], sys.argv[2]))
