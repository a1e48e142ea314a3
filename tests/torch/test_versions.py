"""Runs that pin the versions which they began with, in a bucket that keeps versions (SeaweedFS), at real nodes."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import forebay
from bench import servers
from forebay.core.errors import Invalid, NotFound, NotSupported, Precondition
from forebay.core.formats.listing import Listing, build, pack
from forebay.core.messages.batch import Item
from forebay.core.types import ListEntry
from forebay.core.versions import name_of_version, versions_of
from forebay.torch import DataLoader, ObjectDataset, ShardDataset
from forebay.torch.source import Answers
from forebay.torch.versions import Pinned
from tests.backends.backend_places import s3_client
from tests.patience import until
from tests.s3.real_node import RealNode
from tests.torch.memory_source import MemorySource, as_int, label, numbered_shard

BUCKET = "pinned-versions"
HINTED = "forebay_hint_fetched_bytes_total"
real = pytest.mark.real


class Place(NamedTuple):
    node: RealNode
    s3: Any
    options: dict[str, str]

    def put(self, key: str, body: bytes) -> str:
        found: str = self.s3.put_object(Bucket=BUCKET, Key=key, Body=body)["VersionId"]
        return found

    def versions(self, prefix: str, bucket: str = "pinned") -> bytes:
        with forebay.connect(self.node.endpoint) as client:
            return bytes(client.listing(bucket, prefix, versions=True).data)


@pytest.fixture(scope="module")
def place(seaweed: servers.SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    client: Any = s3_client(seaweed)
    for name in (BUCKET, "keeps-no-versions"):
        seaweed.create_bucket(name)
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    with RealNode(tmp_path_factory.mktemp("node"), "--fronts", "1") as node:
        node.add_bucket("pinned", f"s3://{BUCKET}", options=seaweed.options(), freshness_s=0)
        node.add_bucket("plain", "s3://keeps-no-versions", options=seaweed.options(), freshness_s=0)
        node.add_bucket("folder", f"file://{tmp_path_factory.mktemp('folder')}")
        yield Place(node, client, seaweed.options())


def numbers_of(loader: DataLoader) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


# --- reading ---------------------------------------------------------------------------------------------------------
@real
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_with_what_it_began_with_though_all_of_it_was_overwritten(place: Place, workers: int) -> None:
    prefix = f"run-{workers}/"
    for number in range(3):
        place.put(f"{prefix}{number}.tar", numbered_shard(40 * number, 40))
    place.put(f"{prefix}3.tar.gz", gzip.compress(numbered_shard(120, 20)))
    place.put(f"{prefix}gone-before.tar", numbered_shard(900, 5))
    place.s3.delete_object(Bucket=BUCKET, Key=f"{prefix}gone-before.tar")
    versions = place.versions(prefix)

    def begun(**how: Any) -> DataLoader:
        dataset = ShardDataset(f"pinned/{prefix}", transform=label, url=place.node.endpoint, **how)
        return DataLoader(dataset, 8, workers=workers, seed=1)

    with begun() as loader:
        whole = numbers_of(loader)
    assert sorted(whole) == list(range(140))
    with begun(versions=versions) as loader:
        assert numbers_of(loader) == whole, "it is the same dataset"
        batches = iter(loader)
        second = [number for _ in range(5) for number in next(batches).tolist()]
        state = loader.state_dict()
    for number in range(3):
        place.put(f"{prefix}{number}.tar", numbered_shard(500, 30))
    place.put(f"{prefix}0-new.tar", numbered_shard(600, 10))
    place.s3.delete_object(Bucket=BUCKET, Key=f"{prefix}3.tar.gz")
    place.node.evict("pinned", "")
    with begun(versions=versions) as loader:
        loader.load_state_dict(state)
        rest = numbers_of(loader)
        assert sorted(second + rest) == list(range(140))
        assert (len(rest), loader.epoch) == (100, 2)
    with begun() as loader:
        with pytest.raises(Precondition, match="not the one of the saved state"):
            loader.load_state_dict(state)
        assert sorted(set(numbers_of(loader))) == [*range(500, 530), *range(600, 610)]


@real
def test_objects_are_fetched_ahead_at_their_versions_where_the_node_has_the_listing(place: Place) -> None:
    for number in range(40):
        place.put(f"ahead/{number:03d}", b"%d" % number)
    versions = place.versions("ahead/")
    for number in range(40):
        place.put(f"ahead/{number:03d}", b"%d" % (1000 + number))
    dataset = ObjectDataset("pinned/ahead/", decode=as_int, versions=versions, url=place.node.endpoint)
    hints = dataset.hints("ahead")
    assert hints is not None
    with forebay.connect(place.node.endpoint) as client:
        before = hinted(client)
        hints.future(dataset.accesses(range_of(40)).rows)
        until(lambda: hinted(client) >= before + 70)
    for item in map(item_of, Listing(versions).keys()):
        place.s3.delete_object(Bucket=BUCKET, Key=item.key, VersionId=item.version)
    assert [dataset[number] for number in range(40)] == list(range(40)), "the node has them already"
    hints.close()


def hinted(client: forebay.Client) -> float:
    """How many bytes were fetched ahead."""
    (line,) = (line for line in client.metrics_text().splitlines() if line.startswith(HINTED))
    return float(line.rpartition(" ")[2])


def range_of(count: int) -> Any:
    return np.arange(count)


def item_of(name: str) -> Item:
    """What a name in a listing of versions stands for."""
    key, version = name.split("\0")
    return Item("pinned", key, version=version)


@real
def test_a_node_that_has_not_the_listing_is_told_nothing_and_reads_all_the_same(place: Place, tmp_path: Path) -> None:
    place.put("other/0", b"0")
    versions = place.versions("other/")
    place.put("other/0", b"1")
    with RealNode(tmp_path / "node", "--fronts", "1") as node:
        node.add_bucket("pinned", f"s3://{BUCKET}", options=place.options, freshness_s=0)
        dataset = ObjectDataset("pinned/other/", decode=as_int, versions=versions, url=node.endpoint)
        hints = dataset.hints("other")
        assert hints is not None
        with pytest.raises(NotSupported, match="has that listing of versions no more"):
            hints.future(dataset.accesses(range_of(1)).rows)
        hints.close()
        with DataLoader(dataset, 1) as loader:
            assert numbers_of(loader) == [0]


@real
def test_versions_are_read_past_a_node_that_is_gone(place: Place, free_port: int) -> None:
    place.put("past/0.tar", numbered_shard(0, 20))
    versions = place.versions("past/")
    place.put("past/0.tar", numbered_shard(700, 20))
    direct = {"url": f"s3://{BUCKET}", **place.options}
    url = f"http://127.0.0.1:{free_port}"
    how: dict[str, Any] = {"transform": label, "url": url, "direct_after_s": 0.1, "direct": direct}
    with DataLoader(ShardDataset("pinned/past/", versions=versions, **how), 4, shuffle=False) as loader:
        assert numbers_of(loader) == list(range(20))
    with DataLoader(ShardDataset("pinned/past/", **how), 4, shuffle=False) as loader:
        assert numbers_of(loader) == list(range(700, 720))


@real
def test_a_version_that_was_deleted_is_said(place: Place) -> None:
    first = place.put("lost/0", b"0")
    place.put("lost/1", b"1")
    shard = place.put("lost-shard/0.tar", numbered_shard(0, 4))
    versions, shards = place.versions("lost/"), place.versions("lost-shard/")
    for key, version in (("lost/0", first), ("lost-shard/0.tar", shard)):
        place.put(key, b"9")
        place.s3.delete_object(Bucket=BUCKET, Key=key, VersionId=version)
    dataset = ObjectDataset("pinned/lost/", decode=as_int, versions=versions, url=place.node.endpoint)
    assert dataset[1] == 1
    said = r"pinned/lost.*/0.*: the bucket has the version that versions= names no more .* new listing of versions"
    with pytest.raises(NotFound, match=said):
        dataset[0]
    with pytest.raises(NotFound, match=said):
        ShardDataset("pinned/lost-shard/", versions=shards, url=place.node.endpoint)[0]
    skipping = ObjectDataset("pinned/lost/", versions=versions, url=place.node.endpoint, on_error="skip")
    assert skipping.__getitems__([0, 1]) == [b"1"]


# --- listing ---------------------------------------------------------------------------------------------------------
@real
def test_where_no_versions_are_kept_it_is_said(place: Place) -> None:
    place.s3.put_object(Bucket="keeps-no-versions", Key="a/0", Body=b"0")
    with pytest.raises(NotSupported, match=r"'a/0' has no version of its own.*PutBucketVersioning.*listing="):
        place.versions("a/", "plain")
    with pytest.raises(NotSupported, match=r"folder is not on S3.*listing="):
        place.versions("", "folder")
    with forebay.connect(place.node.endpoint) as client:
        (error,) = client.get_many([Item("folder", "a", version="x")], on_error="report")
        assert isinstance(error, NotSupported)
        with pytest.raises(NotFound):
            client.listing("none-such", "", versions=True)


@real
def test_what_the_backend_does_not_have_yet_has_no_version(place: Place, tmp_path: Path, free_port: int) -> None:
    with RealNode(tmp_path / "node", "--fronts", "1") as node, forebay.connect(node.endpoint) as client:
        gone = {**place.options, "endpoint": f"http://127.0.0.1:{free_port}"}
        node.add_bucket("owing", f"s3://{BUCKET}/back", options=gone, freshness_s=0, write="back")
        client.put("owing", "run/0", b"0")
        with pytest.raises(Precondition, match=r"run `forebay flush owing/run/`"):
            client.listing("owing", "run/", versions=True)
        node.add_bucket("back", f"s3://{BUCKET}/back", options=place.options, freshness_s=0, write="back")
        client.put("back", "run/0", b"0")
        node.flush("back")
        versions = client.listing("back", "run/", versions=True)
        place.put("back/run/0", b"1")
        node.evict("back", "")
        assert ObjectDataset("back/run/", decode=as_int, versions=versions, url=node.endpoint)[0] == 0
        assert ObjectDataset("back/run/", decode=as_int, url=node.endpoint)[0] == 1


@real
def test_pages_of_versions_are_put_together(place: Place) -> None:
    for key in ("pages/a", "pages/b/c", "pages/ü +%"):
        for number in range(3):
            newest = place.put(key, b"%d" % number)
        assert newest
    with forebay.connect(place.node.endpoint) as client:
        found = client.listing("pinned", "pages/", versions=True)
        asked = list(map(item_of, found.keys()))
        assert [item.key for item in asked] == ["pages/a", "pages/b/c", "pages/ü +%"]
        assert [bytes(each) for each in client.get_many(asked)] == [b"2"] * 3


# --- the seam --------------------------------------------------------------------------------------------------------
class Recording(MemorySource):
    """Notes what it is asked."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.items: list[Item] = []

    def get_many(self, items: Any) -> Answers:
        self.items += items
        return super().get_many(items)


def listed(entries: list[tuple[str, str, int]], bucket: str = "b-1", prefix: str = "n/") -> Listing:
    rows = [ListEntry(name_of_version(key, kept), size, f"etag-{kept}", 1.0) for key, kept, size in entries]
    return Listing(build(versions_of(bucket), prefix, [pack(rows)]))


def test_every_item_has_a_version_and_what_is_not_listed_is_not_asked_for() -> None:
    source = Recording({"n/a": b"1", "n/a0": b"2", "n/new": b"3"})
    pinned = Pinned(source, ("b-1", "n/"), listed([("n/a", "v7", 1), ("n/a0", "v8", 1)]))
    for again in (pinned, pickle.loads(pickle.dumps(pinned))):
        found = again.listing("b-1", "n/")
        assert (found.keys(), found.etag(1)) == (["n/a", "n/a0"], "etag-v8")
    values = pinned.get_many([Item("b-1", "n/new"), Item("b-1", "n/a0"), Item("b-1", "n/a"), Item("b-1", "n/")]).values
    assert [item.version for item in source.items] == ["v8", "v7"]
    assert [isinstance(value, NotFound) for value in values] == [True, False, False, True]
    assert [bytes(value) for value in values[1:3]] == [b"2", b"1"]
    with pytest.raises(NotFound, match="was not there when"):
        pinned.members("b-1", "n/new", "")


def test_what_is_no_listing_of_versions_of_the_place_is_refused(numbers: MemorySource) -> None:
    with pytest.raises(Invalid, match=r"listing of objects.*versions=True"):
        ObjectDataset("b-1/numbers/", source=numbers, versions=numbers.listing("b-1", "numbers/"))
    with pytest.raises(Invalid, match=r"lists b-2/n/, and the dataset is of b-1/n/"):
        ObjectDataset("b-1/n/", source=numbers, versions=listed([("n/a", "v7", 1)], "b-2"))
    with pytest.raises(Invalid, match="pass one of them"):
        ObjectDataset("b-1/n/", source=numbers, keys=["n/a"], versions=listed([("n/a", "v7", 1)]))
