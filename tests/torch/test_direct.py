"""A node that is gone: the epoch goes on from the bucket itself, and through the node again when it is back."""

from __future__ import annotations

import gzip
import itertools
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import servers
from forebay.core.errors import Busy, Denied, ForebayError, Invalid, Precondition, Unavailable
from forebay.core.messages.batch import Item
from forebay.core.types import Bucket
from forebay.torch import DataLoader, ObjectDataset, ShardDataset, switch
from forebay.torch.direct import DirectSource, Refused, settings_told
from forebay.torch.source import Answers, NodeSource, Patient
from forebay.torch.switch import NodeOrBackend
from tests.backends.backend_places import s3_place
from tests.node.conftest import NodeProcess, until
from tests.node.test_cluster import flags, until_all_are, url
from tests.torch.memory_source import as_int, label, numbered_shard

OBJECTS, SAMPLES = 120, 160


def contents() -> Iterator[tuple[str, bytes]]:
    for number in range(OBJECTS):
        yield f"numbers/{number:05d}", b"%d" % number
    for number in range(4):
        yield f"train/{number}.tar", numbered_shard(40 * number, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("direct") / "bucket"
    for key, data in contents():
        path = found / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return found


@pytest.fixture(scope="module")
def node(folder: Path, seaweed_keys: servers.SeaweedFS) -> Iterator[NodeProcess]:
    """A node with the same objects as `files` and as `cloud`, for which it has keys that it tells nobody."""
    place = s3_place(seaweed_keys, "s3-keys")
    for key, data in contents():
        place.put(key, data)
    port = servers.free_ports(1)[0]
    running = NodeProcess(folder.parent / "node-0", "--listen", f"127.0.0.1:{port}", "--fronts", "1")
    running.start()
    running.add_bucket("files", f"file://{folder}")
    running.add_bucket("cloud", place.url, **place.options)
    yield running
    if running.process is not None and running.process.poll() is None:
        running.stop()


@pytest.fixture
def running(node: NodeProcess) -> NodeProcess:
    """The node, started again if the test before killed it."""
    assert node.process is not None
    if node.process.poll() is not None:
        node.start()
    return node


@pytest.fixture
def keys(seaweed_keys: servers.SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own keys, as people have them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed_keys.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed_keys.secret_key)


def kill(node: NodeProcess) -> None:
    """All of it, at once."""
    assert node.process is not None
    children = node.children().values()
    node.process.kill()
    for pid in children:
        with suppress(ProcessLookupError):  # it saw that its supervisor is gone
            os.kill(pid, 9)
    node.process.wait()


def in_order(loader: DataLoader) -> list[int]:
    found: list[int] = loader.schedule.order(0).at(np.arange(len(loader.dataset))).tolist()
    return found


# --- over a real node -------------------------------------------------------------------------------------------------
@pytest.mark.real
def test_the_listing_is_the_nodes(running: NodeProcess, keys: None, folder: Path):
    for bucket in ("files", "cloud"):
        source = NodeOrBackend(NodeSource(running.endpoint), bucket, 60.0)
        found = source.listing(bucket, "train/")
        direct = source._direct
        assert direct is not None
        assert "access_key_id" not in direct.bucket.options, "the job finds its own"
        assert direct.listing(bucket, "train/", found.id).id == found.id
        shard = found.key(0)
        index = direct.members(bucket, shard, found.etag(0))
        assert index.names == source.members(bucket, shard, found.etag(0)).names
        assert direct.get_many([Item(bucket, shard, 512, 600, "", found.etag(0))]) == [
            (folder / shard).read_bytes()[512:600]
        ]
        with pytest.raises(Precondition):
            direct.listing(bucket, "numbers/", found.id)


@pytest.mark.real
@pytest.mark.parametrize("bucket", ["files", "cloud"])
def test_an_epoch_goes_on_without_its_node_and_goes_back_to_it(
    running: NodeProcess, keys: None, bucket: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "forebay.torch")
    dataset = ObjectDataset(f"{bucket}/numbers/", decode=as_int, url=running.endpoint, direct_after_s=0.3)
    with DataLoader(dataset, 4, seed=1, prefetch=2) as loader:
        batches = iter(loader)
        found = [number for _ in range(5) for number in next(batches).tolist()]
        kill(running)
        found += [number for batch in batches for number in batch.tolist()]
        assert found == in_order(loader)
        assert 0 < loader.stall.direct_items <= OBJECTS - 20
        assert loader.stall.seconds["direct"] > 0
        assert len(caplog.records) == 1, "said once"
        assert "not answered" in caplog.text
        assert "read from" in caplog.text
        running.start()

        def directly() -> int:
            before = loader.stall.direct_items
            assert sorted(number for batch in loader for number in batch.tolist()) == list(range(OBJECTS))
            return loader.stall.direct_items - before

        until(lambda: not directly())
        assert "answers again" in caplog.records[-1].getMessage()
        assert not directly()


@pytest.mark.real
def test_workers_however_they_were_started(running: NodeProcess, keys: None):
    """Forked ones come from a process that has read from the bucket itself, where obstore would hang. Spawned ones know
    the shards' layouts only as far as they have used them, and read the others' headers."""
    numbers = ObjectDataset("cloud/numbers/", decode=as_int, url=running.endpoint, direct_after_s=0.3)
    shards = ShardDataset("cloud/train/", transform=label, url=running.endpoint, direct_after_s=0.3)
    direct = numbers._source.source._direct
    assert direct.get_many([Item("cloud", "numbers/00007")]) == [b"7"]
    with (
        DataLoader(numbers, 4, seed=1, prefetch=2, workers=2, start_method="fork") as forked,
        DataLoader(shards, 4, shuffle=False, prefetch=2, workers=1, start_method="spawn") as spawned,
    ):
        iterations = [(loader, iter(loader)) for loader in (forked, spawned)]
        begun = [next(batches).tolist() for _, batches in iterations]
        kill(running)
        for first, (loader, batches) in zip(begun, iterations, strict=True):
            found = first + [number for batch in batches for number in batch.tolist()]
            assert found == (in_order(loader) if loader is forked else list(range(len(shards))))
            assert loader.stall.direct_items


@pytest.mark.real
def test_without_credentials_the_error_says_so(running: NodeProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    dataset = ObjectDataset("cloud/numbers/", decode=as_int, url=running.endpoint, direct_after_s=0.2, patience_s=1.5)
    with DataLoader(dataset, 4, shuffle=False) as loader:
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        kill(running)
        with pytest.raises(Unavailable, match=r"waited 1\.5 s in vain .*no AWS credentials.*last saved state"):
            list(loader)
        assert loader.stall.direct_items == 0


@pytest.mark.real
def test_an_epoch_goes_on_at_another_node_of_the_cluster(
    folder: Path, etcd: servers.EtcdCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "forebay.torch")
    at = url(etcd.addresses, uuid.uuid4().hex)
    ports = servers.free_ports(2)
    nodes = [NodeProcess(tmp_path / str(port), *flags(tmp_path, at), "--listen", f"127.0.0.1:{port}") for port in ports]
    try:
        for node in nodes:
            node.start()
            node.add_bucket("files", f"file://{folder}")
        until_all_are("active", *nodes)
        dataset, whole = (
            ShardDataset("files/train/", transform=label, url=node.endpoint, direct_after_s=None) for node in nodes
        )
        with DataLoader(whole, 4, seed=1) as loader:
            expected = [number for batch in loader for number in batch.tolist()]
        with DataLoader(dataset, 4, seed=1, prefetch=2, workers=2) as loader:
            batches = iter(loader)
            found = [number for _ in range(3) for number in next(batches).tolist()]
            kill(nodes[0])
            found += [number for batch in batches for number in batch.tolist()]
            assert found == expected
            assert loader.stall.direct_items == 0
            nodes[0].start()
            assert sorted(number for batch in loader for number in batch.tolist()) == list(range(len(dataset)))
    finally:
        for node in nodes:
            if node.process is not None and node.process.poll() is None:
                node.stop()


# --- what is refused --------------------------------------------------------------------------------------------------
class GoneNode(NodeSource):
    """A node that told `bucket` before it went; `up` brings it back."""

    url = "http://gone"

    def __init__(self, bucket: Bucket | ForebayError) -> None:
        self.bucket, self.up = bucket, False

    def settings(self, bucket: str) -> Bucket:
        if isinstance(self.bucket, ForebayError):
            raise self.bucket
        return self.bucket

    def answers(self) -> bool:
        return self.up

    def listing(self, bucket: str, prefix: str, id: str = "") -> Any:
        return None

    def nodes(self) -> list[str]:
        return []

    def get_many(self, items: Any) -> Any:
        raise Unavailable("no node answers")


Make = Callable[..., Patient]


@pytest.fixture
def past(tmp_path: Path) -> Make:
    """`past(settings)`: what is behind a node that has gone."""

    def make(
        bucket: Bucket | ForebayError, direct: dict[str, str] | None = None, after_s: float | None = 0.0
    ) -> Patient:
        source = NodeOrBackend(GoneNode(bucket), "b-1", after_s, direct)
        source.listing("b-1", "")
        return Patient(source, 0.2)

    return make


def ask(source: Patient, *items: Item) -> list[Any]:
    from forebay.torch.source import Facts

    return source.get_many(items, Facts())


def test_only_the_version_that_was_listed(past: Make, tmp_path: Path):
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "none").write_bytes(b"")
    url = tmp_path.as_uri()
    etag = DirectSource(Bucket("b-1", url)).listing("b-1", "").etag(0)
    source = past(Bucket("b-1", "memory://x"), {"url": url})
    assert ask(source, Item("b-1", "a", 3, 5, "", etag), Item("b-1", "none"), Item("b-1", "a", 8)) == [
        b"34",
        b"",
        b"89",
    ]
    (tmp_path / "a").write_bytes(b"01")
    changed = ask(source, Item("b-1", "a", 0, 2, "", etag), Item("b-1", "a", 3, 5, "", etag), Item("b-1", "gone"))
    assert [type(error).__name__ for error in changed] == ["Precondition", "Precondition", "NotFound"]


def test_what_only_the_node_can_do_waits_for_it(past: Make, tmp_path: Path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(numbered_shard(0, 3)))
    files = Bucket("b-1", tmp_path.as_uri())
    for bucket, item, why in [
        (files, Item("b-1", "a.tar.gz", member="1.cls"), "compressed, and only the node unpacks"),
        (files, Item("b-1", "gone"), "another directory on this machine"),
        (
            Bucket("b-1", "s3://x", write="back", options={"profile": "no such"}),
            Item("b-1", "a"),
            "there is no profile",
        ),
        (Bucket("b-1", "local://", write="local"), Item("b-1", "a"), "on the node alone"),
        (Bucket("b-1", "memory://x"), Item("b-1", "a"), "the node's memory"),
        (Bucket("b-1", (tmp_path / "none").as_uri()), Item("b-1", "a"), "no such bucket at the backend"),
        (Denied("not for you"), Item("b-1", "a"), "not for you.*give direct="),
    ]:
        with pytest.raises(Unavailable, match=f"in vain .*no node answers; b-1 cannot be read past the node: .*{why}"):
            ask(past(bucket), item)
    with pytest.raises(Refused, match="only the node unpacks"):
        DirectSource(files).members("b-1", "a.tar.gz", "")


def test_a_write_back_bucket_may_have_newer_objects_at_the_node(past: Make, tmp_path: Path):
    with pytest.raises(Unavailable, match="perhaps the node has not written it yet"):
        ask(past(Bucket("b-1", tmp_path.as_uri(), write="back")), Item("b-1", "a"))


def test_a_node_that_answers_is_waited_for(past: Make, tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a")
    for after_s, up in ((60.0, False), (None, False), (0.0, True)):
        source = past(Bucket("b-1", tmp_path.as_uri()), after_s=after_s)
        source.source.node.up = up  # type: ignore[attr-defined]
        with pytest.raises(Unavailable, match=r"in vain \(no node answers\)"):
            ask(source, Item("b-1", "a"))


def test_secrets_stay_where_they_are(tmp_path: Path):
    options = {"region": "r", "access_key_id": "AK", "secret_access_key": "***", "profile": "p"}
    told = settings_told(Bucket("b-1", "s3://x", options=options))
    assert told.options == {"region": "r", "profile": "p"}
    assert settings_told(Bucket("b-1", "s3://x", options={"access_key_id": "AK"})).options == {"access_key_id": "AK"}
    given = DirectSource(Bucket("b-1", "s3://x", options={"secret_access_key": "hidden"}), True)
    assert "hidden" not in repr(given)
    with pytest.raises(Invalid, match="own URL"):
        ObjectDataset("b-1", direct={"region": "x"})


def test_a_dataset_that_was_never_at_a_node(tmp_path: Path, free_port: int):
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(numbered_shard(10 * number, 10))
    direct = {"url": tmp_path.as_uri()}
    url = f"http://127.0.0.1:{free_port}"
    dataset = ShardDataset("b-1", transform=label, url=url, direct_after_s=0.1, direct=direct)
    with DataLoader(dataset, 4, shuffle=False) as loader:
        assert [number for batch in loader for number in batch.tolist()] == list(range(30))
    with pytest.raises(Unavailable, match=r"waited 0\.5 s in vain .* b-1 cannot be read past the node: .*none"):
        ShardDataset("b-1", url=url, patience_s=0.5, direct_after_s=0.1, direct={"url": f"file://{tmp_path}/none"})


def test_a_pickle_reads_for_itself(tmp_path: Path):
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    source = NodeOrBackend(GoneNode(Bucket("b-1", tmp_path.as_uri())), "b-1", 0.0)
    source.listing("b-1", "")
    items = [Item("b-1", str(number)) for number in itertools.chain(range(3), range(3))]
    expected = [b"0", b"1", b"2"] * 2
    assert source.get_many(items).values == expected
    again = pickle.loads(pickle.dumps(source))
    assert again.get_many(items) == (expected, 0, 6)


# --- another node stands in ------------------------------------------------------------------------------------------
class Neighbour(GoneNode):
    """A node of `cluster`, which has all by URL."""

    def __init__(self, url: str, cluster: dict[str, Neighbour], values: list[Any], place: str = "s3://b-1") -> None:
        super().__init__(Bucket("b-1", place))
        self.url, self.up, self.cluster, self.values, self.asked = url, True, cluster, values, 0  # type: ignore[misc]
        cluster[url] = self

    def nodes(self) -> list[str]:
        return list(self.cluster)

    def at(self, url: str) -> NodeSource:
        return self.cluster[url]

    def get_many(self, items: Any) -> Any:
        self.asked += 1
        if not self.up:
            raise Unavailable("no node answers")
        return Answers([self.values.pop(0) if len(self.values) > 1 else self.values[0] for _ in items])


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "OTHER_AFTER_S", 0.0)
    monkeypatch.setattr(switch, "LOOK_S", 0.0)


def test_another_node_stands_in_until_the_own_one_is_back(at_once: None, caplog: pytest.LogCaptureFixture):
    cluster: dict[str, Neighbour] = {}
    own = Neighbour("http://own", cluster, [b"own"])
    Neighbour("http://other", cluster, [b"other"])
    elsewhere = Neighbour("http://elsewhere", cluster, [b"?"], "s3://another")
    waited = Patient(NodeOrBackend(own, "b-1", None), 60.0)
    item = Item("b-1", "a")
    assert ask(waited, item) == [b"own"]
    own.up = False
    for _ in range(3):
        assert ask(waited, item) == [b"other"]
    assert (own.asked, len(caplog.records)) == (2, 1), "it is not asked while another stands in, and that is said once"
    again = pickle.loads(pickle.dumps(NodeOrBackend(GoneNode(own.bucket), "b-1", None)))
    assert again._other is None
    own.up = True
    until(lambda: ask(waited, item) == [b"own"])
    assert elsewhere.asked == 0, "its bucket of that name is another"


def test_what_a_stand_in_says_that_the_node_might_not_is_not_believed(at_once: None):
    cluster: dict[str, Neighbour] = {}
    own = Neighbour("http://own", cluster, [b"own"])
    old = [Neighbour(f"http://old-{number}", cluster, [Precondition("has an older version")]) for number in range(3)]
    waited = Patient(NodeOrBackend(own, "b-1", None), 0.3)
    item = Item("b-1", "a")
    assert ask(waited, item) == [b"own"]
    own.up = False
    with pytest.raises(Unavailable, match=r"in vain \(no node answers\)"):
        ask(waited, item)
    assert [other.asked for other in old] == [1, 1, 1]
    own.up = True
    assert ask(waited, item) == [b"own"]


def test_a_stand_in_that_goes_too_is_followed_by_another_and_a_busy_one_is_waited_for(at_once: None):
    cluster: dict[str, Neighbour] = {}
    own = Neighbour("http://own", cluster, [b"own"])
    two = [Neighbour(f"http://{name}", cluster, [Busy("a moment", retry_after_s=0.01), b"x"]) for name in "ab"]
    waited = Patient(NodeOrBackend(own, "b-1", None), 60.0)
    item = Item("b-1", "a")
    ask(waited, item)
    own.up = False
    assert ask(waited, item) == [b"x"]
    first = next(other for other in two if other.asked)
    first.up = False
    assert ask(waited, item) == [b"x"]
    assert all(other.asked for other in two)
