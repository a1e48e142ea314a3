"""Write rows: PUTs through the S3 path, against the disk, a bare sink, SeaweedFS, or the bucket itself.

Theory. A PUT is judged against what it cannot avoid: the same bytes written and synced by a loop (`disk`), or received
and written by a sink without a protocol (`memory`). Sixteen writers of 4 KiB are judged against sixteen fio jobs that
append 4 KiB and sync, whose syncs the filesystem's journal groups as the node groups its own. SeaweedFS is the peer at
equal durability: with its `fsync` on for `disk`, off for `memory`.

Both sides of a round get the same bytes under new keys, from the same client: a bare socket for large bodies, `wrk`
for 4 KiB. The memory that new file pages come from is primed before each side (see `Lab.prime_memory`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import load
from bench.parts import BUCKET, CLIENT_CORE, SERVER_CORE, Lab, Node, pin
from bench.report import Result
from bench.row import MIB, Objects, Row
from bench.servers import SeaweedFS, find_program
from bench.sink import Sender, Sink
from bench.stats import Measure, bounded, compared

WRITE_BYTES = 1 << 20  # of one write of the loop that only writes and syncs
SMALL_KEYS = 4096  # of 4 KiB each, written over and over
SYNCED = "synced"  # the bucket of SeaweedFS whose writes are synced


class Writer:
    """One keep-alive connection that puts objects as fast as a client can. Not for use by two threads."""

    def __init__(self, endpoint: str) -> None:
        parts = urllib.parse.urlsplit(endpoint)
        self._host = parts.netloc
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=load.TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, path: str, body: memoryview) -> None:
        """Return when the server has acknowledged it. `LoadFailed` for anything but 200."""
        head = f"PUT {urllib.parse.quote(path)} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode())
        self._socket.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            got = self._socket.recv(65536)
            if not got:
                raise load.LoadFailed(f"PUT {path}: the connection ended after {answer[:200]!r}")
            answer += got
        head_bytes, _, rest = answer.partition(b"\r\n\r\n")
        status = head_bytes.split(b"\r\n", 1)[0]
        if b" 200 " not in status + b" ":
            raise load.LoadFailed(f"PUT {path}: answered {answer[:300]!r}")
        for line in head_bytes.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                left = int(value) - len(rest)
                while left > 0:
                    left -= len(self._socket.recv(left)) or left

    def close(self) -> None:
        self._socket.close()


def _bodies(lab: Lab, objects: Objects) -> list[memoryview]:
    """The objects in memory. Large ones are one file read once: which bytes they are makes no difference."""
    lab.make(objects)
    return [memoryview((lab.files / objects.key(index)).read_bytes()) for index in range(min(objects.count, 4))]


def _put_all(put: Callable[[int, memoryview], None], bodies: list[memoryview], count: int) -> float:
    """Bytes a second over `count` bodies, one after the other."""
    started = time.perf_counter()
    for index in range(count):
        put(index, bodies[index % len(bodies)])
    return sum(len(bodies[index % len(bodies)]) for index in range(count)) / (time.perf_counter() - started)


@contextlib.contextmanager
def _writer(endpoint: str) -> Iterator[Writer]:
    writer = Writer(endpoint)
    try:
        yield writer
    finally:
        writer.close()


def _check(lab: Lab, node: Node, path: str, body: memoryview) -> None:
    got = bytearray()
    with load.Reader(node.endpoint) as reader:
        reader.get(path, into=got)
    if got != body:
        raise load.LoadFailed(f"{path} does not read back as it was written")


# --- large bodies ----------------------------------------------------------------------------------------------------
def disk(lab: Lab, row: Row) -> Result:
    """PUTs that are synced before the answer, beside the same bytes written and synced by a loop, and SeaweedFS."""

    def loop(folder: Path, turn: int, index: int, body: memoryview) -> None:
        fd = os.open(folder / f"{turn}-{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for at in range(0, len(body), WRITE_BYTES):
                os.write(fd, body[at : at + WRITE_BYTES])
            os.fsync(fd)
        finally:
            os.close(fd)

    (objects,) = row.quick if lab.quick else row.objects
    bodies = _bodies(lab, objects)
    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    folder = lab.dir / "looped"
    folder.mkdir(exist_ok=True)
    with lab.node() as node:
        node.add_local("written", durability="disk")
        _seaweed(lab, SYNCED)
        for turn in range(2 if lab.quick else row.rounds):
            rates[0].append(_round(lab, node.endpoint, f"/written/{turn}", bodies, objects))
            lab.prime_memory(objects.bytes_total)
            load.pin_self(SERVER_CORE)
            rates[1].append(_put_all(lambda i, body: loop(folder, turn, i, body), bodies, objects.count))  # noqa: B023
            load.pin_self(None)
            rates[2].append(_round(lab, lab.weed.endpoint, f"/{SYNCED}/{turn}", bodies, objects))
        _check(lab, node, "/written/0-0", bodies[0])
    return Result(row, _against(row, rates))


def memory(lab: Lab, row: Row) -> Result:
    """PUTs that are acknowledged from the page cache, beside a sink that receives and writes, and SeaweedFS."""
    (objects,) = row.quick if lab.quick else row.objects
    bodies = _bodies(lab, objects)
    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    with lab.node() as node, Sink(SERVER_CORE) as sink:
        node.add_local("written", durability="memory")
        _seaweed(lab, BUCKET)
        for turn in range(2 if lab.quick else row.rounds):
            rates[0].append(_round(lab, node.endpoint, f"/written/{turn}", bodies, objects))
            lab.prime_memory(objects.bytes_total)
            load.pin_self(CLIENT_CORE)
            sender = Sender(sink.ports[0])
            rates[1].append(_put_all(lambda _, body: sender.put(body), bodies, objects.count))  # noqa: B023
            sender.close()
            load.pin_self(None)
            rates[2].append(_round(lab, lab.weed.endpoint, f"/{BUCKET}/w{turn}", bodies, objects))
        _check(lab, node, "/written/0-0", bodies[0])
    return Result(row, _against(row, rates))


def _against(row: Row, rates: tuple[list[float], list[float], list[float]]) -> tuple[Measure, ...]:
    return (
        compared("rate", "B/s", row.goals["rate"], rates[0], rates[1]),
        compared("rate / SeaweedFS", "B/s", row.goals["rate / SeaweedFS"], rates[0], rates[2], "seaweedfs"),
    )


def _round(lab: Lab, endpoint: str, path: str, bodies: list[memoryview], objects: Objects) -> float:
    lab.prime_memory(objects.bytes_total)
    return _primed_round(endpoint, path, bodies, objects)


def _primed_round(endpoint: str, path: str, bodies: list[memoryview], objects: Objects) -> float:
    load.pin_self(CLIENT_CORE)
    with _writer(endpoint) as writer:
        rate = _put_all(lambda index, body: writer.put(f"{path}-{index}", body), bodies, objects.count)
    load.pin_self(None)
    return rate


def _seaweed(lab: Lab, bucket: str) -> SeaweedFS:
    pin(lab.weed.pid, SERVER_CORE)
    lab.weed.create_bucket(bucket)
    if bucket == SYNCED:
        lab.weed.sync_bucket(bucket)
    return lab.weed


# --- small bodies ----------------------------------------------------------------------------------------------------
def small(lab: Lab, row: Row) -> Result:
    """4 KiB PUTs of many writers, synced, beside fio jobs that append and sync, and SeaweedFS."""
    (objects,) = row.quick if lab.quick else row.objects
    seconds, rounds = (1.0, 2) if lab.quick else (row.seconds, row.rounds)
    rates: tuple[list[float], list[float], list[float]] = ([], [], [])
    with lab.node() as node:
        node.add_local("written", durability="disk")
        weed = _seaweed(lab, SYNCED)
        ours = _puts(lab, node.endpoint, "/written", objects)
        theirs = _puts(lab, weed.endpoint, f"/{SYNCED}", objects)
        for _ in range(rounds):
            rates[0].append(_replay(node.endpoint, ours, row, seconds))
            rates[1].append(_appends(lab, row.connections, objects.size_bytes, seconds))
            rates[2].append(_replay(weed.endpoint, theirs, row, seconds))
    measures = (
        compared("rate", "PUT/s", row.goals["rate"], rates[0], rates[1]),
        compared("rate / SeaweedFS", "PUT/s", row.goals["rate / SeaweedFS"], rates[0], rates[2], "seaweedfs"),
    )
    return Result(row, measures)


def _puts(lab: Lab, endpoint: str, root: str, objects: Objects) -> Path:
    host = endpoint.removeprefix("http://")
    body = base64.b64encode(os.urandom(objects.size_bytes))[: objects.size_bytes]  # the file of requests has no zeros
    requests = (
        f"PUT {root}/{objects.key(index)} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
        for index in range(SMALL_KEYS)
    )
    return load.write_requests(lab.dir / f"puts-{host.replace(':', '-')}.requests", requests)


def _replay(endpoint: str, requests: Path, row: Row, seconds: float) -> float:
    done = load.run_wrk(endpoint, requests, seconds=seconds, connections=row.connections, core=CLIENT_CORE)
    return done.requests_per_s


def _appends(lab: Lab, writers: int, size_bytes: int, seconds: float) -> float:
    """Appends a second of fio: each job has a file of its own and syncs after every append."""
    folder = lab.dir / "appended"
    folder.mkdir(exist_ok=True)
    command = [find_program("fio"), "--name=append", f"--directory={folder}", "--rw=write", f"--bs={size_bytes}"]
    command += ["--ioengine=sync", "--fsync=1", f"--numjobs={writers}", "--thread", "--group_reporting"]
    command += [
        "--size=256m",
        "--file_append=1",
        "--fallocate=none",
        "--time_based",
        f"--runtime={max(1, round(seconds))}",
    ]
    command += ["--output-format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    for file in folder.iterdir():
        file.unlink()
    if done.returncode:
        raise load.LoadFailed(f"fio ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]["iops"])


# --- through and back ------------------------------------------------------------------------------------------------
def through(lab: Lab, row: Row) -> Result:
    """PUTs written through, beside the same PUTs to the bucket itself over the same link."""
    (objects,) = row.quick if lab.quick else row.objects
    bodies = _bodies(lab, objects)
    rates: tuple[list[float], list[float]] = ([], [])
    with lab.remote(row.link, core=CLIENT_CORE) as remote, lab.node() as node:
        node.add_bucket("through", lab, remote.endpoint, write="through")
        for turn in range(2 if lab.quick else row.rounds):
            rates[0].append(_round(lab, node.endpoint, f"/through/n{turn}", bodies, objects))
            rates[1].append(_round(lab, remote.endpoint, f"/{BUCKET}/d{turn}", bodies, objects))
        _check(lab, node, "/through/n0-0", bodies[0])
        with load.Reader(lab.weed.endpoint) as reader:
            got = bytearray()
            reader.get(f"/{BUCKET}/n0-0", into=got)
        if got != bodies[0]:
            raise load.LoadFailed("what was written through is not in the bucket")
    return Result(row, (compared("rate", "B/s", row.goals["rate"], *rates),))


def back(lab: Lab, row: Row) -> Result:
    """Write-back: the acknowledgements with a slow bucket beside those with an unlimited one, and the flush itself.

    The first objects are for the acknowledgements: sides take turns at going first, for a disk is not the same disk
    after so many bytes. The second are for the flush, many enough that its first and last moments weigh little.
    """
    acknowledged, flushed = row.quick if lab.quick else row.objects
    bodies = _bodies(lab, acknowledged)
    rates: dict[str, list[float]] = {"slow": [], "quick": []}
    shares: list[float] = []
    with lab.remote(row.link, core=CLIENT_CORE) as remote, lab.node() as node:
        node.add_bucket("slow", lab, remote.endpoint, write="back")
        node.add_bucket("quick", lab, write="back")
        for turn in range(2 if lab.quick else row.rounds):
            for side in sorted(rates, reverse=bool(turn % 2)):
                rates[side].append(_round(lab, node.endpoint, f"/{side}/{side}{turn}", bodies, acknowledged))
                node.flush(side)
            lab.prime_memory(flushed.bytes_total)
            began_s = time.perf_counter()  # of the first PUT: the flush must keep up from there
            _primed_round(node.endpoint, f"/slow/flushed{turn}", bodies, flushed)
            node.flush("slow")
            shares.append(flushed.bytes_total / (time.perf_counter() - began_s) / row.link.rate_bytes_s)
    return Result(
        row,
        (
            compared("acknowledged", "B/s", row.goals["acknowledged"], rates["slow"], rates["quick"]),
            bounded("flushed / link", "", row.goals["flushed / link"], shares),
        ),
    )


assert WRITE_BYTES <= MIB
