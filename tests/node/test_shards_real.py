"""Shards at a node of several processes: who dies takes nothing along, and nothing is found out twice without need."""

from __future__ import annotations

import gzip
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay.core.errors import ForebayError
from tests.core.archives import files_of, tar_of

from .conftest import NodeProcess, until

SAMPLES = [(f"{number:05}.bin", random.Random(number).randbytes(number % 97 * 53)) for number in range(800)]


@pytest.mark.real
def test_appends_survive_kills_whole_and_once(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    one = node("--fronts", "2")
    there = tmp_path / "bucket"
    there.mkdir()
    one.json("PUT", "buckets/back", {"name": "back", "url": there.as_uri(), "write": "back"})
    tried: dict[str, bytes] = {}
    acknowledged: set[str] = set()
    ended = threading.Event()

    def append(writer: int) -> None:
        with forebay.connect(one.endpoint, patience_s=20) as client:
            for number in range(1000):
                if ended.is_set():
                    return
                name = f"{writer}/{number}"
                tried[name] = random.Random(name).randbytes(random.Random(number).choice((5, 3_000, 60_000)))
                try:
                    client.append_member("back", "grown.tar", name, tried[name])
                except ForebayError:
                    continue  # perhaps it is there, perhaps not
                acknowledged.add(name)

    writers = [threading.Thread(target=append, args=(number,)) for number in range(3)]
    for each in writers:
        each.start()
    for victim in ("engine", "front", "engine"):
        count = len(acknowledged)
        until(lambda count=count: len(acknowledged) >= count + 6)  # type: ignore[misc]
        pid = next(pid for name, pid in one.children().items() if name.startswith(victim))
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: pid not in one.children().values())  # type: ignore[misc]
    count = len(acknowledged)
    until(lambda: len(acknowledged) >= count + 3)
    ended.set()
    for each in writers:
        each.join(60)
    found = files_of(one.get("back", "grown.tar"))
    names = [name for name, _ in found]
    assert len(names) == len(set(names)), "none is there twice"
    assert acknowledged <= set(names), "none that was acknowledged is missing"
    assert all(tried[name] == data for name, data in found)
    with forebay.connect(one.endpoint) as client:
        assert client.members("back", "grown.tar").names == names, "the index says what the tar says"
        for name in names[::5]:
            assert client.get("back", "grown.tar", member=name) == tried[name]
    assert one.stop() == 0
    assert files_of((there / "grown.tar").read_bytes()) == found, "and so has the backend"


@pytest.mark.real
def test_indexes_outlive_the_node_and_a_front_that_dies_while_it_builds(
    node: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    there = tmp_path / "bucket"
    there.mkdir()
    (there / "a.tar").write_bytes(tar_of(SAMPLES))
    (there / "b.tar.gz").write_bytes(gzip.compress(tar_of(SAMPLES), 1))
    one = node("--fronts", "2")
    one.add_bucket("corpus", there.as_uri())
    wrong: list[str] = []

    def read(seed: int) -> None:
        with forebay.connect(one.endpoint) as client:
            for name, data in random.Random(seed).choices(SAMPLES, k=40):
                for shard in ("a.tar", "b.tar.gz"):
                    try:
                        if client.get("corpus", shard, member=name) != data:
                            wrong.append(name)
                    except ForebayError:
                        pass  # its front died

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for each in readers:
        each.start()
    os.kill(next(pid for name, pid in one.children().items() if name.startswith("front")), signal.SIGKILL)
    for each in readers:
        each.join(60)
    assert wrong == []
    until(lambda: len(one.children()) == 3)
    assert one.metric("forebay_shard_indexes_total") <= 4, "two shards, and one front died"
    assert one.stop() == 0
    for path in there.iterdir():
        path.unlink()  # whoever asks the backend now gets nothing
    one.start()
    with forebay.connect(one.endpoint) as client:
        for name, data in SAMPLES[::100]:
            for shard in ("a.tar", "b.tar.gz"):
                assert client.get("corpus", shard, member=name) == data
        page = next(iter(client.list_pages("corpus")))
        assert page.entries == [], "what was derived is in no listing"
        assert client.status().derived_bytes > len(tar_of(SAMPLES))
    assert one.metric("forebay_shard_indexes_total") == 0, "nothing was found out again"
    assert not list((one.dir / "node" / "volumes" / "v0" / "tmp").glob("in-*")), "no temp file is left"
