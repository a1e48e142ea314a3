"""Processes are killed at random moments while clients read: never a wrong byte, and afterwards all is as before.

`FOREBAY_STORM_ROUNDS=100 pytest tests/node/test_storm.py` runs a hundred rounds; in the suite they are fewer.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.core.messages.calls import CachedPage

from .conftest import MIB, NodeProcess, pattern, until

ROUNDS = int(os.environ.get("FOREBAY_STORM_ROUNDS", "10"))
SEED = int(os.environ.get("FOREBAY_STORM_SEED", str(random.randrange(1 << 30))))
SIZES = [100, 9_000, 40_000, MIB, 3 * MIB, 4 * MIB, 9 * MIB + 77, 21 * MIB]


class Client(threading.Thread):
    """Reads objects and ranges at random and compares every byte. Errors are fine; wrong bytes are not."""

    def __init__(self, one: NodeProcess, data: dict[str, bytes], seed: int) -> None:
        super().__init__(daemon=True)
        self.good = self.failed = 0
        self.wrong: list[str] = []
        self.stopping = threading.Event()
        self._one, self._data, self._random = one, data, random.Random(seed)

    def run(self) -> None:
        while not self.stopping.is_set() and not self.wrong:
            key = self._random.choice(sorted(self._data))
            data = self._data[key]
            start = self._random.randrange(len(data)) if self._random.random() < 0.5 else 0
            end = self._random.randint(start + 1, len(data)) if start else len(data)
            try:
                headers = {"Range": f"bytes={start}-{end - 1}"} if start else {}
                status, body = self._one.ask("GET", f"/files/{key}", headers)
            except (OSError, http.client.HTTPException):
                self.failed += 1
                continue
            if status in (200, 206):
                if body == data[start:end]:
                    self.good += 1
                else:
                    self.wrong.append(f"{key} {start}-{end}: {difference(body, data[start:end])}")
            elif status == 503:
                self.failed += 1
            else:
                self.wrong.append(f"{key} {start}-{end}: status {status}, {body[:300]!r}")


def difference(body: bytes, expected: bytes) -> str:
    """Where two bodies differ, in words that tell a hole from another object's bytes."""
    if len(body) != len(expected):
        return f"{len(body)} bytes instead of {len(expected)}"
    wrong = [at for at in range(0, len(body), 4096) if body[at : at + 4096] != expected[at : at + 4096]]
    first, last = wrong[0], wrong[-1] + 4096
    what = "zeros" if not any(body[first : first + 4096]) else repr(body[first : first + 48])
    return f"{len(body)} bytes, {len(wrong)} pages wrong from {first} to {last}, first {what}"


def open_files(one: NodeProcess) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in one.children().items()}


def settled(one: NodeProcess) -> bool:
    try:
        state = one.json("GET", "status")
    except (OSError, AssertionError, http.client.HTTPException):
        return False
    return state["reads"] == 0 and state["flights"] == 0 and len(one.children()) == 3


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_random_moments(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    print(f"FOREBAY_STORM_SEED={SEED}")
    chance = random.Random(SEED)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    data = {f"object-{n:02}": pattern(chance.choice(SIZES) + chance.randrange(1000), n) for n in range(24)}
    for key, value in data.items():
        (bucket / key).write_bytes(value)
    one = node("--fronts", "2", "--capacity", "96MiB")  # less than the data: evictions run all the time
    one.add_bucket("files", f"file://{bucket}")
    for key, value in data.items():
        assert one.get("files", key) == value
    until(lambda: settled(one))
    before = open_files(one)
    clients = [Client(one, data, seed) for seed in range(3)]
    for client in clients:
        client.start()
    try:
        for _ in range(ROUNDS):
            time.sleep(chance.uniform(0.0, 0.4))  # a random moment is the point
            there = one.children()
            what = chance.choice([["engine"], ["engine"], ["front 0"], ["front 1"], ["engine", "front 0", "front 1"]])
            for name in what:
                if name in there:
                    os.kill(there[name], signal.SIGKILL)
            good = sum(client.good for client in clients)
            until(lambda good=good: any(c.wrong for c in clients) or sum(c.good for c in clients) >= good + 5, 60)
            assert not [wrong for client in clients for wrong in client.wrong]
    finally:
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(60)
    assert sum(client.good for client in clients) >= 5 * ROUNDS
    until(lambda: settled(one))
    for key, value in data.items():
        assert one.get("files", key) == value
    until(lambda: settled(one))
    served_without_the_bucket(one, data, bucket)
    volume = one.dir / "node" / "volumes" / "v0"
    assert not list((volume / "tmp").iterdir()), "temporary files are gone"
    after = open_files(one)
    for name, count in after.items():
        assert count <= before[name] + 40, (name, before, after)  # fronts keep files of hits open, the engine sockets


def served_without_the_bucket(one: NodeProcess, data: dict[str, bytes], bucket: Path) -> None:
    """What the node says is cached whole, it serves while the bucket is away."""
    page = msgspec.convert(one.json("GET", "list/files?cached=1"), CachedPage)
    whole = [entry.key for entry in page.entries if entry.cached_bytes == entry.size_bytes]
    assert len(whole) >= 3, "most of the cache is whole objects"
    away = bucket.with_name("away")
    bucket.rename(away)
    try:
        for key in whole:
            assert one.get("files", key) == data[key]
    finally:
        away.rename(bucket)
