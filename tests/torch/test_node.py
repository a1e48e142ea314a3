"""Datasets over a real node: all kinds, from threads and workers, through a restart of the node."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import servers
from forebay import aio
from forebay.core.errors import Corrupt, NotFound, Unavailable
from forebay.torch import (
    DataLoader,
    LitDataset,
    MdsDataset,
    Mixture,
    ObjectDataset,
    ParquetDataset,
    ShardDataset,
    TokenDataset,
)
from tests.core.archives import tar_of
from tests.node.conftest import NodeProcess, until
from tests.torch import foreign, test_litdata, test_mds, test_parquet
from tests.torch.memory_source import as_int, label, numbered_shard, tokens

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bucket with objects, shards and token files."""
    folder = tmp_path_factory.mktemp("training") / "bucket"
    for name in ("numbers", "train", "text"):
        (folder / name).mkdir(parents=True)
    for number in range(200):
        (folder / "numbers" / f"{number:05d}").write_bytes(b"%d" % number)
    for number in range(4):
        (folder / "train" / f"{number}.tar").write_bytes(numbered_shard(40 * number, 40))
    (folder / "text" / "a.bin").write_bytes(tokens(10_000))
    return folder


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[NodeProcess]:
    """A running node with that bucket as `corpus`, always at one port. A test that stops it starts it again."""
    port = servers.free_ports(1)[0]
    running = NodeProcess(place.parent / "node-0", "--listen", f"127.0.0.1:{port}", "--fronts", "1")
    running.start()
    running.add_bucket("corpus", f"file://{place}")
    yield running
    running.stop()


def test_all_kinds_from_threads_and_workers(node: NodeProcess):
    numbers = ObjectDataset("corpus/numbers/", decode=as_int, url=node.endpoint)
    shards = ShardDataset("corpus/train/", transform=label, url=node.endpoint)
    windows = TokenDataset("corpus/text/", 100, url=node.endpoint)
    assert (len(numbers), len(shards), len(windows)) == (200, 160, 100)
    for dataset in (numbers, shards):
        for workers in (0, 2):
            with DataLoader(dataset, 16, workers=workers, seed=1) as loader:
                found = [number for batch in loader for number in batch.tolist()]
                assert sorted(found) == list(range(len(dataset)))
                assert loader.stall.items == len(dataset)
    with DataLoader(windows, 8, workers=2) as loader:
        assert sorted(first for batch in loader for first in batch[:, 0].tolist()) == list(range(0, 10_000, 100))
    assert numbers[3] == 3, "the parent's connections are its own after workers were forked"


def test_other_archives_and_damage(node: NodeProcess, place: Path):
    folder = place / "odd"
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("one.txt", "x" * 5000)
    packed = io.BytesIO()
    with gzip.open(packed, "wb") as file:
        file.write(tar_of([("two.txt", b"y" * 700)]))
    (folder / "b.tar.gz").write_bytes(packed.getvalue())
    found = ShardDataset("corpus/odd/", url=node.endpoint)
    assert [(sample["__key__"], len(sample["txt"])) for sample in found] == [("one", 5000), ("two", 700)]
    folder = place / "damaged"
    folder.mkdir()
    (folder / "a.tar").write_bytes(numbered_shard(10, 10)[:8492])  # in the head of a member
    (folder / "b.tar").write_bytes(numbered_shard(10, 10))
    with pytest.raises(Corrupt):
        len(ShardDataset("corpus/damaged/", url=node.endpoint))
    skipping = ShardDataset("corpus/damaged/", url=node.endpoint, on_error="skip")
    assert len(skipping) == 10
    assert list(skipping.damaged) == ["damaged/a.tar"]
    with pytest.raises(NotFound):
        ObjectDataset("corpus/none/", url=node.endpoint)


def test_rows_of_parquet_files(node: NodeProcess, place: Path):
    (place / "rows").mkdir()
    for key, data in test_parquet.written().objects.items():
        (place / key).write_bytes(data)
    dataset = ParquetDataset("corpus/rows/", columns=["number"], url=node.endpoint, window_bytes=1000)
    for workers in (0, 2):
        with DataLoader(dataset, 16, workers=workers, seed=1) as loader:
            found = [number for batch in loader for number in batch["number"].tolist()]
            assert sorted(found) == list(range(3 * test_parquet.ROWS))


@pytest.mark.parametrize("library", [test_mds, test_litdata])
def test_shards_of_other_libraries_that_are_compressed(node: NodeProcess, place: Path, library: Any):
    folder = place / library.__name__.rpartition(".")[2]
    folder.mkdir()
    for key, data in library.written(packed=True).objects.items():
        (folder / Path(key).name).write_bytes(data)
    kind, number = (MdsDataset, "number") if library is test_mds else (LitDataset, "i")
    dataset = kind(f"corpus/{folder.name}/", url=node.endpoint, transform=lambda sample: abs(sample[number]))
    for workers in (0, 1):
        with DataLoader(dataset, 16, workers=workers, seed=1) as loader:
            assert sorted(each for batch in loader for each in batch.tolist()) == list(range(100))


@pytest.mark.parametrize("name", ["mds-gz", "mds-zstd-7", "mds-merged", "lit-chunk"])
def test_what_other_libraries_compressed_themselves(node: NodeProcess, place: Path, name: str):
    shutil.copytree(foreign.FIXTURES / name, place / name)
    kind, number = (MdsDataset, "number") if name in foreign.MDS else (LitDataset, "i")
    dataset = kind(f"corpus/{name}/", url=node.endpoint, transform=lambda sample: sample[number])
    samples = [(foreign.MDS | foreign.LIT)[name].sample(n)[number] for n in range(len(dataset))]
    assert sorted(dataset.__getitems__(range(len(dataset)))) == samples


def test_the_node_knows_what_is_read_next(node: NodeProcess):
    dataset = ShardDataset("corpus/train/", url=node.endpoint, index_first=True)
    with DataLoader(dataset, 8, job="told", seed=1, workers=1) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        # Both come in calls of their own.
        until(lambda: (state := node.json("GET", "hints/told"))["position"] == 24 and state["known"] >= 24 + 160)
    assert node.ask("GET", "/-/v1/hints/told")[0] == 404, "the job is over"


def test_the_node_knows_what_a_mixture_reads_next_of_each_dataset(node: NodeProcess):
    shards = ShardDataset("corpus/train/", url=node.endpoint, transform=label)
    numbers = ObjectDataset("corpus/numbers/", decode=lambda _, data: -1 - int(data), url=node.endpoint)
    mixture = Mixture([shards, numbers], proportions=[1, 1])
    with DataLoader(mixture, 8, job="mixed", seed=1, collate=list) as loader:
        batches = iter(loader)
        read = [sample for _ in range(3) for sample in next(batches)]
        of_shards = sum(sample >= 0 for sample in read)

        def told(source: int, position: int) -> bool:
            status, body = node.ask("GET", f"/-/v1/hints/mixed.{source}")
            state = json.loads(body) if status == 200 else {"position": -1}
            return state["position"] == position and state["known"] > position

        until(lambda: told(0, of_shards) and told(1, 24 - of_shards))
        assert 0 < of_shards < 24
    assert {node.ask("GET", f"/-/v1/hints/mixed.{source}")[0] for source in (0, 1)} == {404}


def test_the_node_knows_which_shards_come_next_and_later_what_is_read_of_them(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forebay.torch.shards.FIRST_BYTES", 20_000)
    dataset = ShardDataset("corpus/train/", url=node.endpoint)
    with DataLoader(dataset, 8, job="whole", seed=1, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        until(lambda: node.ask("GET", "/-/v1/hints/whole")[0] == 200)
        state = node.json("GET", "hints/whole")
        assert (state["position"], state["known"]) == (0, 3), "the head of a shard, its rest, and another shard"
        list(batches)
        next(iter(loader))
        until(lambda: (state := node.json("GET", "hints/whole"))["known"] >= state["position"] + 152)


def test_an_asyncio_program_tells_what_it_will_read(node: NodeProcess):
    async def story() -> None:
        async with aio.connect(node.endpoint) as client:
            listing = await client.listing("corpus", "numbers/")
            async with client.hints("told", listing) as hints:
                assert (await hints.future([(n, 0, 1) for n in range(9)])).known == 9
                assert (await hints.future([(9, 0, 1)])).known == 10
                assert (await hints.at(4)).position == 4
                assert (await hints.state()).position == 4
            with pytest.raises(NotFound):
                await hints.state()

    asyncio.run(story())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_node_that_restarts_in_the_middle_of_an_epoch(node: NodeProcess, workers: int):
    dataset = ObjectDataset("corpus/numbers/", decode=as_int, url=node.endpoint)
    with DataLoader(dataset, 4, workers=workers, seed=1, prefetch=2) as loader:
        batches = iter(loader)
        found = [number for _ in range(5) for number in next(batches).tolist()]
        assert node.process is not None
        for pid in node.children().values():
            os.kill(pid, 9)
        node.process.kill()
        node.process.wait()
        starting = threading.Thread(target=node.start)
        starting.start()
        found += [number for batch in batches for number in batch.tolist()]
        starting.join()
        assert sorted(found) == list(range(200))
        assert loader.stall.seconds["busy"] > 0


def test_a_node_that_is_gone_for_good(node: NodeProcess):
    dataset = ObjectDataset("corpus/numbers/", decode=as_int, url=node.endpoint, patience_s=0.5)
    with DataLoader(dataset, 4, shuffle=False) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        node.stop()
        with pytest.raises(Unavailable, match=r"waited 0\.5 s in vain .*no node answers.*last saved state"):
            list(batches)
        state = loader.state_dict()
    node.start()
    with DataLoader(dataset, 4, shuffle=False) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist()[0] == state["samples"]


ENDING = """
import sys

import fsspec

import forebay
from forebay.torch import DataLoader, ObjectDataset

url = sys.argv[1]
dataset = ObjectDataset("corpus/numbers/", url=url)
loader = DataLoader(ObjectDataset("corpus/numbers/", url=url), 4)
batches = iter(loader)
client = forebay.connect(url)
file = client.open("corpus", "text/a.bin")
fs = fsspec.filesystem("forebay", endpoint_url=url)
column = fs.open("corpus/text/a.bin")
forgotten = [client.open("corpus", "never", "wb"), fs.open("corpus/never", "wb")]
print(dataset[3], len(next(batches)), file.read(4) == column.read(4))
"""


@pytest.mark.parametrize("last", ["", "sys.exit()"])
def test_a_script_that_ends_with_all_of_it_open_ends_without_a_word(node: NodeProcess, tmp_path: Path, last: str):
    script = tmp_path / "script.py"
    script.write_text(ENDING + last)
    done = subprocess.run([sys.executable, script, node.endpoint], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("b'3' 4 True\n", "", 0)
