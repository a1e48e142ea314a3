"""The Python in docs/training.md runs as it stands there."""

from __future__ import annotations

import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forebay
from bench import servers
from forebay.torch import DataLoader, ShardDataset
from tests.backends.backend_places import s3_client
from tests.node.conftest import NodeProcess
from tests.torch.memory_source import numbered_shard
from tests.torch.test_mds import written

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.real


def block(mark: str) -> str:
    """The one block with `mark` in it."""
    (found,) = (text for text in BLOCKS if mark in text)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`train/` of the bucket `corpus` at the node that FOREBAY_URL names."""
    train = tmp_path / "bucket" / "train"
    train.mkdir(parents=True)
    for number in range(3):
        (train / f"{number}.tar").write_bytes(numbered_shard(40 * number, 40))
    node = NodeProcess(tmp_path / "node-0", "--fronts", "1")
    node.start()
    try:
        node.add_bucket("corpus", f"file://{tmp_path}/bucket", freshness_s=0.0)
        monkeypatch.setenv("FOREBAY_URL", node.endpoint)
        yield train
    finally:
        node.stop()


def test_every_block_runs(folder: Path):
    assert len(BLOCKS) == 12, "give what was added a test"  # those of trainers have theirs in test_frameworks.py
    seen: list[dict[str, Any]] = []
    names: dict[str, Any] = {
        "resuming": False,
        "model": None,
        "train": lambda batch: None,
        "checkpoint": lambda model, state: seen.append(state),
    }
    # batches as dictionaries of tensors need members of one size, which these samples do not have
    text = block("while loader.epoch < 10").replace("workers=4", "workers=1, collate=list").replace("< 10", "< 2")
    exec("import torch\n" + text, names)
    assert [state["epoch"] for state in seen] == [1, 2]
    names["loader"].close()


def test_shards_of_mosaic_are_read_where_they_lie(folder: Path):
    (folder.parent / "mosaic").mkdir()
    for key, data in written().objects.items():
        (folder.parent / "mosaic" / Path(key).name).write_bytes(data)
    names: dict[str, Any] = {"DataLoader": DataLoader}
    exec(block("MdsDataset"), names)
    with names["loader"] as loader:
        assert sorted(-each["number"] for batch in loader for each in batch) == list(range(100))


def test_a_run_goes_on_with_what_it_began_with(folder: Path):
    text = block("keys=")
    names: dict[str, Any] = {"saved": None, "DataLoader": DataLoader}
    exec("from forebay.torch import ShardDataset\n" + text, names)
    loader, dataset = names["loader"], names["dataset"]
    assert len(dataset) == 120
    whole = [sample["cls"] for batch in DataLoader(dataset, 8, seed=1, collate=list) for sample in batch]
    loader.close()
    (folder / "00.tar").write_bytes(numbered_shard(500, 10))  # it lies between the others
    exec(text, names)
    assert len(names["dataset"]) == 120
    again = DataLoader(names["dataset"], 8, seed=1, collate=list)
    again.load_state_dict(names["saved"]["loader"])
    assert [sample["cls"] for batch in again for sample in batch] == whole
    again.close()
    names["loader"].close()
    names["saved"] = None
    exec(text, names)
    assert len(names["dataset"]) == 130, "a new run takes what there is"
    names["loader"].close()


def test_a_file_says_what_a_run_began_with_and_the_next_epoch_may_take_more(folder: Path, tmp_path: Path):
    names: dict[str, Any] = {"folder": tmp_path, "Path": Path, "forebay": forebay, "ShardDataset": ShardDataset}
    exec(block("listing="), names)
    with DataLoader(names["dataset"], 8, seed=1, collate=list) as loader:
        assert len([sample for batch in loader for sample in batch]) == 120
    (folder / "00.tar").write_bytes(numbered_shard(500, 10))
    exec(block("listing="), names)
    with DataLoader(names["dataset"], 8, seed=1, collate=list) as again:
        again.load_state_dict(loader.state_dict())
        next(iter(again))
        state = again.state_dict()
        assert state["epoch"] == 1
        assert len(names["dataset"]) == 120
    (tmp_path / "listing").unlink()
    exec(block("listing="), names)
    with DataLoader(names["dataset"], 8, seed=1, collate=list) as more:
        more.set_epoch(state["epoch"] + 1)
        assert len({sample["cls"] for batch in more for sample in batch}) == 130


def test_a_run_reads_what_was_overwritten_since(
    seaweed: servers.SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seaweed.create_bucket("doc-versions")
    s3: Any = s3_client(seaweed)
    s3.put_bucket_versioning(Bucket="doc-versions", VersioningConfiguration={"Status": "Enabled"})
    s3.put_object(Bucket="doc-versions", Key="train/0.tar", Body=numbered_shard(0, 40))
    node = NodeProcess(tmp_path / "node", "--fronts", "1")
    node.start()
    try:
        node.add_bucket("corpus", "s3://doc-versions", freshness_s=0.0, **seaweed.options())
        monkeypatch.setenv("FOREBAY_URL", node.endpoint)
        names: dict[str, Any] = {"folder": tmp_path, "Path": Path, "forebay": forebay, "ShardDataset": ShardDataset}
        for _ in range(2):
            exec(block("versions="), names)
            with DataLoader(names["dataset"], 8, seed=1, collate=list) as loader:
                assert sorted(sample["cls"] for batch in loader for sample in batch) == list(range(40))
            s3.put_object(Bucket="doc-versions", Key="train/0.tar", Body=numbered_shard(500, 10))
    finally:
        node.stop()


def test_datasets_are_mixed_and_augmented_the_same_again(folder: Path):
    packed = folder.parent / "packed"
    packed.mkdir()
    (packed / "0.tar").write_bytes(numbered_shard(1000, 40))
    names: dict[str, Any] = {"DataLoader": DataLoader, "torch": torch, "zlib": zlib}
    exec(block("def augmented"), names)
    web = block("Mixture").replace('"corpus/train/"', '"corpus/train/", transform=augmented')
    exec(web, names)
    with names["loader"] as loader:
        epoch = [sample for batch in loader for sample in batch]
    assert len(epoch) == 160
    assert sum(sample["cls"] >= 1000 for sample in epoch) == 40
    flips = [sample["flip"] for sample in epoch if "flip" in sample]
    assert set(flips) == {True, False}
    with DataLoader(names["dataset"], batch_size=7, seed=1, collate=list) as loader:
        assert flips == [sample["flip"] for batch in loader for sample in batch if "flip" in sample]
    del loader
    names.clear()  # the function holds its globals, and so all else


def test_documents_are_packed(folder: Path):
    documents = folder.parent / "documents"
    documents.mkdir()
    lengths = [number * 37 % 1500 + 1 for number in range(60)]
    for number, length in enumerate(lengths):
        (documents / f"{number:03d}").write_bytes(np.full(length, number, np.uint16).tobytes())
    names: dict[str, Any] = {"torch": torch, "numpy": np}
    exec(block("batch_bytes="), names)
    seen: list[int] = []
    with names["loader"] as loader:
        for batch in loader:
            assert batch["tokens"].shape == batch["positions"].shape == (4096,)
            starts = batch["starts"].tolist()
            for start, end in pairwise(starts):
                row = batch["tokens"][start:end]
                if start and not row.any():  # what fills it, or document 0, which has one token
                    continue
                assert set(row.tolist()) == {int(row[0])}
                assert len(row) == lengths[int(row[0])]
                assert batch["positions"][start:end].tolist() == list(range(len(row)))
                seen.append(int(row[0]))
    del loader
    names.clear()
    assert set(range(1, 60)) <= set(seen)
    assert len(seen) <= 60


def test_shards_are_made_and_a_second_run_goes_on(folder: Path):
    text = block("ShardWriter")
    names: dict[str, Any] = {"pictures": [b"%d" % number for number in range(100)], "labels": list(range(99))}
    smaller = text.replace('shard_bytes="256MiB"', "samples_max=30")
    with pytest.raises(IndexError):  # the program ends in the middle
        exec(smaller, names)
    names["labels"].append(99)
    exec(smaller, names)
    assert names["writer"].samples == 100
    dataset = ShardDataset("corpus/packed/", decode={})
    assert dataset.known_samples == 100
    assert [int(dataset[number]["jpg"]) for number in (0, 50, 99)] == [0, 50, 99]
