"""A cache that is smaller than the data: the bucket sends no more than a reader of ranges would ask it for."""

from __future__ import annotations

import http.client
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from bench.servers import SeaweedFS
from bench.shaper import Shaper
from forebay.core.limits import BLOCK_BYTES
from forebay.torch import DataLoader, ShardDataset
from tests.core.archives import tar_of
from tests.node.conftest import NodeProcess

MIB = 1 << 20
SHARDS, SHARD_BYTES = 6, 4 * MIB + 300_000


def put(url: str, data: bytes) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data, method="PUT"), timeout=60):
        pass


def shard(number: int, sample_bytes: int) -> bytes:
    names = [f"{number}-{n:04d}.bin" for n in range(SHARD_BYTES // (sample_bytes + 600))]
    return tar_of([(name, body_of(name.removesuffix(".bin"), sample_bytes)) for name in names])


def body_of(name: str, sample_bytes: int) -> bytes:
    return (name.encode() * (sample_bytes // len(name) + 1))[:sample_bytes]


def names(samples: list[dict[str, Any]]) -> list[str]:
    for sample in samples:
        assert sample["bin"] == body_of(sample["__key__"], len(sample["bin"]))
    return [sample["__key__"] for sample in samples]


def read_directly(endpoint: str, bucket: str, samples: int, sample_bytes: int) -> None:
    """Each sample with one ranged GET, as whoever has an index and no cache reads them."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(endpoint).netloc, timeout=60)
    for number in range(samples):
        span = {"Range": f"bytes={number}-{number + sample_bytes - 1}"}
        connection.request("GET", f"/{bucket}/train/{number % SHARDS}.tar", headers=span)
        assert len(connection.getresponse().read()) == sample_bytes
    connection.close()


@pytest.mark.real
@pytest.mark.parametrize(
    ("sample_bytes", "capacity", "shuffle", "batch", "made_s"),
    [
        (100_000, 8 * MIB, True, 6, 0.0),  # holds one shard: the samples of one batch a shard come twice
        (10_000, 16 * MIB, True, 16, 0.0),
        (100_000, 12 * MIB, "auto", 16, 0.0),
        (100_000, 12 * MIB, "auto", 16, 0.005),  # bytes wait here for batches that are made before theirs
        (100_000, 8 * MIB, "auto", 16, 0.0),  # batches are made for two windows, and one has room
        (100_000, 10 * MIB, "auto", 16, 0.005),
    ],
)
def test_an_epoch_sends_no_more_than_its_ranges(
    seaweed: SeaweedFS,
    tmp_path: Path,
    closing: list[DataLoader],
    sample_bytes: int,
    capacity: int,
    shuffle: Any,
    batch: int,
    made_s: float,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("forebay.torch.foretelling._HEARD_S", 60.0)  # also where the cores are busy
    bucket = f"small-cache-{sample_bytes}-{capacity // MIB}-{1000 * made_s:.0f}"
    seaweed.create_bucket(bucket)

    def make(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(made_s)
        return sample

    for number in range(SHARDS):
        put(f"{seaweed.endpoint}/{bucket}/train/{number}.tar", shard(number, sample_bytes))
    node = NodeProcess(tmp_path / "node-0", "--fronts", "1", "--capacity", str(capacity))
    with Shaper(seaweed.endpoint) as link:
        node.start()
        try:
            node.add_bucket("far", f"s3://{bucket}", **(seaweed.options() | {"endpoint": link.endpoint}))
            dataset = ShardDataset("far/train/", decode={}, url=node.endpoint, transform=make)
            loader = DataLoader(dataset, batch, seed=3, collate=names, shuffle=shuffle)
            closing.append(loader)
            sent, epochs = [], []
            for _ in range(2):
                before = link.counters()["response_bytes"]
                epochs.append([])
                for some in loader:
                    epochs[-1] += some
                    if loader._foretelling is not None:  # a step takes longer than a word to the node
                        loader._foretelling.heard(loader._cursor)
                sent.append(link.counters()["response_bytes"] - before)
            samples = len(dataset)
            for found in epochs:
                assert len(found) == len(set(found)) == samples
            loader.close()  # and the node fetches nothing for the next epoch
            before = link.counters()["response_bytes"]
            read_directly(link.endpoint, bucket, samples, sample_bytes)
            direct = link.counters()["response_bytes"] - before
            # A block that is fetched for the next epoch counts here, and at the edges one may be fetched in vain.
            assert max(sent) <= 1.1 * direct + 2 * BLOCK_BYTES, (sent, direct)
            if shuffle == "auto":
                assert (loader.schedule.shuffle, loader.schedule.window_bytes) == ("block", 2 * MIB)
            else:
                assert node.metric("forebay_hint_ranged_bytes_total") > 0
        finally:
            loader.close()
            node.stop()
