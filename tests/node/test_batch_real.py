"""Batches at a real node: cold and warm, members of a shard, and processes that die in the middle."""

from __future__ import annotations

import io
import os
import random
import signal
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.client.sync import Client
from forebay.core.errors import NotFound, Unavailable
from forebay.core.messages.batch import Item

from .conftest import MIB, NodeProcess, pattern, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A directory that is a bucket."""
    path = tmp_path / "bucket"
    path.mkdir()
    return path


def over_http(node: NodeProcess) -> Client:
    client = Client(node.endpoint, token="")
    client.door.off()
    return client


def test_a_dataset_read_in_batches(node: Make, bucket: Path) -> None:
    """Small objects, ranges of a large one and members of a shard: first from the backend, then from here."""
    one = node("--fronts", "1")
    chance = random.Random(7)
    large = pattern(37 * MIB + 11)
    (bucket / "large").write_bytes(large)
    wanted: list[tuple[Item, bytes]] = []
    for at in range(60):
        data = chance.randbytes(chance.choice((0, 100, 10_000, 40_000)))
        (bucket / f"small-{at}").write_bytes(data)
        wanted.append((Item("files", f"small-{at}"), data))
    with tarfile.open(bucket / "shard.tar", "w") as shard:
        for at in range(60):
            data = chance.randbytes(chance.randrange(1, 30_000))
            info = tarfile.TarInfo(f"train/{at:04}.bin")
            info.size = len(data)
            shard.addfile(info, io.BytesIO(data))
            wanted.append((Item("files", "shard.tar", member=info.name), data))
    for size in (1, 10_240, 70_000, 2 * MIB) * 10:
        start = chance.randrange(len(large) - size)
        wanted.append((Item("files", "large", start, start + size), large[start : start + size]))
    chance.shuffle(wanted)
    items = [item for item, _ in wanted]
    one.add_bucket("files", f"file://{bucket}")
    with over_http(one) as client:
        for turn in range(3):
            many = client.get_many(items)
            assert all(result == data for result, (_, data) in zip(many, wanted, strict=True))
            assert (many.cold == 0) is (turn > 0), many.cold
        into = bytearray(30 * MIB)
        assert [bytes(result) for result in client.get_many(items, into=into)] == [data for _, data in wanted]
        (bucket / "late").write_bytes(b"late")
        many = client.get_many([("files", "nothing"), ("files", "late"), ("nowhere", "x")], on_error="report")
        assert [type(many[0]), many[1], type(many[2])] == [NotFound, b"late", NotFound]
    body = b'{"items": [["files", "late"], ["files", "shard.tar", 0, null, "train/0007.bin"]], "format": "tar"}'
    status, answer = one.ask("POST", "/-/v1/batch", {"Content-Type": "application/json"}, body)
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(answer)) as archive:
        assert archive.getnames() == ["late", "shard.tar/train/0007.bin"]
    assert one.metric("forebay_batches_total") == 6
    assert one.metric("forebay_batch_items_total") == 4 * len(items) + 3 + 2


def test_a_front_that_dies_costs_one_retry(node: Make, bucket: Path) -> None:
    one = node("--fronts", "2")
    large = pattern(16 * MIB)
    (bucket / "large").write_bytes(large)
    one.add_bucket("files", f"file://{bucket}")
    assert one.get("files", "large") == large
    done: list[int] = []
    failures: list[BaseException] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        with over_http(one) as client:
            while not stop.is_set():
                starts = [chance.randrange(len(large) - 30_000) for _ in range(100)]
                try:
                    many = client.get_many([("files", "large", start, start + 30_000) for start in starts])
                    assert all(result == large[at : at + 30_000] for at, result in zip(starts, many, strict=True))
                except BaseException as error:
                    failures.append(error)
                    return
                done.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(done) > 20 or failures)
        pid = one.children()["front 0"]
        os.kill(pid, signal.SIGKILL)
        before = len(done)
        until(lambda: one.children().get("front 0", pid) != pid)
        until(lambda: len(done) > before + 40 or failures)
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)
    assert not failures, failures


def test_an_engine_that_dies_midway_fails_items_and_never_mixes_them(node: Make, bucket: Path) -> None:
    one = node("--fronts", "1")
    data = {f"k{at:03}": pattern(600_000 + at, at) for at in range(80)}
    for key, body in data.items():
        (bucket / key).write_bytes(body)
    one.add_bucket("files", f"file://{bucket}")
    engine = one.children()["engine"]

    def kill() -> None:
        until(lambda: one.metric("forebay_batches_total"))
        os.kill(engine, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    with over_http(one) as client:
        killer.start()
        whole = False
        while not whole or one.children().get("engine", engine) == engine:
            try:
                many = client.get_many([("files", key) for key in data], on_error="report")
            except Unavailable:
                continue
            for result, body in zip(many, data.values(), strict=True):
                assert isinstance(result, Unavailable) or result == body
            whole = not many.errors
        killer.join(90)
