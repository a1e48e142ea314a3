"""Processes are killed at random moments while clients write: nothing acknowledged is ever gone, or half there.

Each writer owns its keys, so what a key may hold is known exactly: what was acknowledged last, or anything tried since.
`FOREBAY_STORM_ROUNDS=300 pytest tests/node/test_write_storm.py` runs three hundred rounds; in the suite they are fewer.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from .conftest import MIB, NodeProcess, until

ROUNDS = int(os.environ.get("FOREBAY_STORM_ROUNDS", "6"))
SEED = int(os.environ.get("FOREBAY_STORM_SEED", str(random.randrange(1 << 30))))
SIZES = [0, 1, 900, 9_000, 40_000, MIB, 4 * MIB, 5 * MIB + 17, 9 * MIB + 77]
KEYS = 6  # of each writer in each bucket
ABSENT = b""  # no body that is written is empty: each begins with whose it is


def body_of(label: str, size_bytes: int) -> bytes:
    """Bytes that say what they are, and that differ from any other body everywhere."""
    unit = random.Random(label).randbytes(65_521)
    return label.encode() + b"\n" + (unit * (size_bytes // len(unit) + 1))[:size_bytes]


class Held:
    """What one key may hold: the last acknowledged body, and those tried since. Kept as labels and sizes."""

    def __init__(self) -> None:
        self.possible: dict[str, bytes] = {"nothing": hashlib.sha256(ABSENT).digest()}

    def trying(self, label: str, body: bytes) -> None:
        self.possible[label] = hashlib.sha256(body).digest()

    def acknowledged(self, label: str) -> None:
        self.possible = {label: self.possible[label]}

    def seen(self, body: bytes) -> bool:
        """Whether the key may hold `body`; from now on it is that. (A try that came later would have been seen.)"""
        digest = hashlib.sha256(body).digest()
        return digest in self.possible.values()


class Writer(threading.Thread):
    """Puts, deletes and multipart uploads of its own keys, reading each back. Errors are fine; wrong bytes are not."""

    def __init__(self, one: NodeProcess, name: str, buckets: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.good = self.failed = self.tries = 0
        self.wrong: list[str] = []
        self.stopping = threading.Event()
        self.held = {(bucket, f"{name}/{n}"): Held() for bucket in buckets for n in range(KEYS)}
        self._one, self._name, self._random = one, name, random.Random(seed)

    def run(self) -> None:
        while not self.stopping.is_set() and not self.wrong:
            place = self._random.choice(sorted(self.held))
            try:
                self._change(place)
                self.check(place)
            except (OSError, http.client.HTTPException):
                self.failed += 1

    def _change(self, place: tuple[str, str]) -> None:
        self.tries += 1
        label = f"{self._name} {place[0]}/{place[1]} {self.tries}"
        draw = self._random.random()
        target = f"/{place[0]}/{quote(place[1])}"
        if draw < 0.2:
            self.held[place].trying(label, ABSENT)
            self._took(place, label, *self._one.ask("DELETE", target))
        elif draw < 0.35:
            self._multipart(place, label, target)
        else:
            body = body_of(label, self._random.choice(SIZES))
            self.held[place].trying(label, body)
            self._took(place, label, *self._one.ask("PUT", target, body=body))

    def _multipart(self, place: tuple[str, str], label: str, target: str) -> None:
        body = body_of(label, 5 * MIB + self._random.randrange(6 * MIB))
        status, answer = self._one.ask("POST", f"{target}?uploads")
        found = re.search(rb"<UploadId>([^<]+)</UploadId>", answer)
        if status != 200 or not found:
            return self._refused(place, status, answer)
        upload = quote(found[1].decode())
        tags = []
        for number, start in enumerate(range(0, len(body), 5 * MIB), 1):
            part = body[start : start + 5 * MIB]
            status, answer = self._one.ask("PUT", f"{target}?partNumber={number}&uploadId={upload}", body=part)
            if status != 200:
                return self._refused(place, status, answer)
            tags.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{hashlib.md5(part).hexdigest()}</ETag></Part>")
        if self._random.random() < 0.2:
            self._one.ask("DELETE", f"{target}?uploadId={upload}")
            return None
        self.held[place].trying(label, body)
        document = f"<CompleteMultipartUpload>{''.join(tags)}</CompleteMultipartUpload>".encode()
        status, answer = self._one.ask("POST", f"{target}?uploadId={upload}", body=document)
        if status == 404 and b"NoSuchUpload" in answer:  # an earlier answer of this upload cannot have been lost: it is
            self.wrong.append(f"{place}: {label}: the upload is gone: {answer[:300]!r}")  # completed once
        elif b"<Error>" in answer:
            self._refused(place, 503 if status == 200 else status, answer)
        else:
            self._took(place, label, status, answer)
        return None

    def _took(self, place: tuple[str, str], label: str, status: int, answer: bytes) -> None:
        if status in (200, 204):
            self.held[place].acknowledged(label)
            self.good += 1
        else:
            self._refused(place, status, answer)

    def _refused(self, place: tuple[str, str], status: int, answer: bytes) -> None:
        self.failed += 1
        if status != 503:
            self.wrong.append(f"{place}: status {status}, {answer[:300]!r}")

    def check(self, place: tuple[str, str]) -> None:
        """Read the key back: it is what it may be, whole."""
        status, body = self._one.ask("GET", f"/{place[0]}/{quote(place[1])}")
        if status == 404 and b"NoSuchKey" in body:
            status, body = 200, ABSENT
        if status != 200:
            self._refused(place, status, body)
        elif not self.held[place].seen(body):
            wanted = sorted(self.held[place].possible)
            self.wrong.append(f"{place}: {len(body)} bytes of {body[:60]!r}, none of {wanted}")


def write_buckets(one: NodeProcess, tmp_path: Path) -> dict[str, Path]:
    """One bucket of each kind; where the backends of those that have one lie."""
    backends = {}
    for name, settings in (
        ("through", {"write": "through"}),
        ("back", {"write": "back", "durability": "disk"}),
        ("hasty", {"write": "back", "durability": "memory"}),
        ("own", {"write": "local", "url": "local://"}),
    ):
        folder = tmp_path / "backends" / name
        folder.mkdir(parents=True)
        body: dict[str, Any] = {"name": name, "url": f"file://{folder}", "freshness_s": 1e18, **settings}
        one.json("PUT", f"buckets/{name}", body)
        if name != "own":
            backends[name] = folder
    return backends


def flush(one: NodeProcess, bucket: str) -> None:
    job = one.json("POST", "flush", {"bucket": bucket})
    done = until(lambda: (state := one.json("GET", f"jobs/{job['job']}"))["state"] != "running" and state, 120)
    assert (done["state"], done["units_failed"]) == ("done", 0), done


def settled(one: NodeProcess) -> bool:
    try:
        state = one.json("GET", "status")
    except (OSError, AssertionError, http.client.HTTPException):
        return False
    return state["reads"] == 0 and state["flights"] == 0 and len(one.children()) == 3


def open_files(one: NodeProcess) -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in one.children().items()}


def files_under(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kill_9_while_clients_write(node: Callable[..., NodeProcess], tmp_path: Path) -> None:
    print(f"FOREBAY_STORM_SEED={SEED}")
    chance = random.Random(SEED)
    one = node("--fronts", "2", "--capacity", "2GiB")
    backends = write_buckets(one, tmp_path)
    until(lambda: settled(one))
    before = open_files(one)
    writers = [Writer(one, f"writer-{n}", ["through", "back", "hasty", "own"], SEED + n) for n in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(ROUNDS):
            time.sleep(chance.uniform(0.0, 0.6))  # a random moment is the point
            there = one.children()
            what = chance.choice([["engine"], ["engine"], ["front 0"], ["front 1"], ["engine", "front 0", "front 1"]])
            for name in what:
                if name in there:
                    os.kill(there[name], signal.SIGKILL)
            good = sum(writer.good for writer in writers)
            until(lambda good=good: any(w.wrong for w in writers) or sum(w.good for w in writers) >= good + 5, 60)
            assert not [wrong for writer in writers for wrong in writer.wrong]
    finally:
        for writer in writers:
            writer.stopping.set()
        for writer in writers:
            writer.join(60)
    assert not [wrong for writer in writers for wrong in writer.wrong]
    assert sum(writer.good for writer in writers) >= 5 * ROUNDS
    until(lambda: settled(one))
    all_is_there(one, writers)
    for bucket in backends:
        flush(one, bucket)
    all_is_in_the_backends(one, writers, backends)
    nothing_is_left_over(one, before)


def all_is_there(one: NodeProcess, writers: list[Writer]) -> None:
    for writer in writers:
        for place in writer.held:
            writer.check(place)
        assert not writer.wrong


def all_is_in_the_backends(one: NodeProcess, writers: list[Writer], backends: dict[str, Path]) -> None:
    """After the flush each backend holds exactly what the node shows, byte for byte, and nothing else."""
    for bucket, folder in backends.items():
        held = {path.relative_to(folder).as_posix(): path for path in files_under(folder)}
        shown = {}
        for writer in writers:
            for where, key in writer.held:
                status, body = one.ask("GET", f"/{bucket}/{quote(key)}")
                if where == bucket and status == 200:
                    shown[key] = body
        assert sorted(held) == sorted(shown), bucket
        for key, body in shown.items():
            found = held[key].read_bytes()
            is_same = found == body  # what they say of themselves tells more than where they differ
            assert is_same, (bucket, key, found[:80], len(found), body[:80], len(body))
    state = {bucket["name"]: bucket for bucket in one.json("GET", "status")["buckets"]}
    for bucket in backends:
        assert not state[bucket].get("dirty_objects"), state[bucket]
        assert not state[bucket].get("conflicts"), state[bucket]


def nothing_is_left_over(one: NodeProcess, before: dict[str, int]) -> None:
    """No temporary file, no part without an open upload, no descriptor."""
    volume = one.dir / "node" / "volumes" / "v0"
    uploads = 0
    for bucket in ("through", "back", "hasty", "own"):
        status, answer = one.ask("GET", f"/{bucket}?uploads")
        assert status == 200
        for key, upload in re.findall(rb"<Key>([^<]+)</Key><UploadId>([^<]+)</UploadId>", answer):
            uploads += 1
            target = f"/{bucket}/{quote(key.decode())}?uploadId={quote(upload.decode())}"
            assert one.ask("DELETE", target)[0] == 204
    print(f"{uploads} uploads that nobody completed were aborted")
    until(lambda: not list((volume / "tmp").iterdir()))
    parts = volume / "parts"
    until(lambda: not parts.exists() or not list(files_under(parts)))
    after = open_files(one)
    for name, count in after.items():
        assert count <= before[name] + 40, (name, before, after)
