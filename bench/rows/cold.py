"""Cold rows: what only the bucket has, read through a node and directly, over the same link.

The direct side is the same client at the shaped bucket itself. Both sides begin each round with a fresh connection, and
the node reads the bucket under a name it has not seen, so nothing of the round before helps.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import load
from bench.parts import BUCKET, CLIENT_CORE, SERVER_CORE, CachingNginx, Lab, Node, Remote
from bench.report import Result
from bench.row import MIB, REPORTED, Objects, Row
from bench.stats import Measure, bounded, compared

FIRST_BYTE_FACTOR, FIRST_BYTE_EXTRA_S = 1.1, 0.002  # the goal of a cold first byte: at most 1.1 x theirs + 2 ms
CONNECT_TIMEOUT_S = 30.0


def throughput(lab: Lab, row: Row) -> Result:
    """Many connections for throughput; then one for the first byte and, reported, for one request after the other.

    The goals allow a first byte 2 ms later than the bucket's own. One request after the other would pay that for each
    object, and could not keep 0.97 of the throughput on objects that take 5 ms; so throughput means what several
    connections get through together, as data loaders read.
    """
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    unpinned = not (row.link.rate_bytes_s or row.link.connection_bytes_s)  # then both cores are the limit
    rounds = 2 if lab.quick else row.rounds
    rates: tuple[list[float], list[float]] = ([], [])
    kept: list[float] = []
    cached: list[float] = []
    singles: tuple[list[list[load.Read]], list[list[load.Read]]] = ([], [])
    with (
        lab.remote(row.link, core=None if unpinned else CLIENT_CORE) as remote,
        lab.node(core=None if unpinned else SERVER_CORE) as node,
        CachingNginx(remote.endpoint, BUCKET) if unpinned else contextlib.nullcontext() as nginx,
    ):
        load.pin_self(None if unpinned else CLIENT_CORE)
        _check(lab, row, node, remote, objects)
        for turn in range(rounds):
            for side, endpoint, bucket in ((0, node.endpoint, f"many-{turn}"), (1, remote.endpoint, BUCKET)):
                _prepare(lab, node, remote, bucket, objects)
                rates[side].append(_read_parallel(endpoint, bucket, objects, row.connections))
            if nginx is not None:
                lab.prime_memory(objects.bytes_total)
                cached.append(_read_parallel(nginx.url, f"many-{turn}", objects, row.connections))
                lab.prime_memory(objects.bytes_total)
                with tempfile.TemporaryDirectory(dir=lab.dir) as into:
                    kept.append(_read_parallel(remote.endpoint, BUCKET, objects, row.connections, Path(into)))
            if "first byte" not in row.goals:
                continue
            for side, endpoint, bucket in ((0, node.endpoint, f"one-{turn}"), (1, remote.endpoint, BUCKET)):
                _prepare(lab, node, remote, bucket, objects)
                singles[side].append(_read_all(endpoint, bucket, objects))
        load.pin_self(None)
        fetched = node.counter("forebay_backend_read_bytes_total")
        if nginx is not None:
            lab.compare(nginx.url, f"/many-0/{objects.key(0)}", objects.key(0))
    measures = [compared("rate", "B/s", row.goals["rate"], *rates)]
    if cached:
        measures.append(compared("rate, nginx as the cache", "B/s", REPORTED, rates[0], cached, "nginx, cold"))
        measures.append(compared("rate, peer keeps a file", "B/s", REPORTED, rates[0], kept))
    if "first byte" in row.goals:
        mine, others = ([_rate(reads) for reads in side] for side in singles)
        measures.append(_first_byte(row, *singles))
        measures.append(compared("rate, one at a time", "B/s", REPORTED, mine, others))
    return Result(row, tuple(measures), extra={"backend_bytes": fetched})


def _prepare(lab: Lab, node: Node, remote: Remote, bucket: str, objects: Objects) -> None:
    """The same memory for both sides; for the node's, the remote bucket under a name that it has not read yet."""
    if bucket != BUCKET:
        node.add_bucket(bucket, lab, remote.endpoint)
    lab.prime_memory(objects.bytes_total)


def _check(lab: Lab, row: Row, node: Node, remote: Remote, objects: Objects) -> None:
    """Both sides serve the bytes of the first object, under a name that no round uses."""
    node.add_bucket("checked", lab, remote.endpoint)
    lab.compare(node.endpoint, f"/checked/{objects.key(0)}", objects.key(0))
    if objects.size_bytes <= 64 * MIB:  # comparing costs a read of the whole object over the link
        lab.compare(remote.endpoint, f"/{BUCKET}/{objects.key(0)}", objects.key(0))


def _read_all(endpoint: str, bucket: str, objects: Objects) -> list[load.Read]:
    with load.Reader(endpoint) as reader:
        return [reader.get(f"/{bucket}/{objects.key(index)}") for index in range(objects.count)]


def _read_parallel(endpoint: str, bucket: str, objects: Objects, connections: int, keep: Path | None = None) -> float:
    """Bytes a second of all objects, read by `connections` connections that take them in turn.

    With `keep`, what is read is also written to files there: the least that any cache must do.
    """
    keys = iter([objects.key(index) for index in range(objects.count)])  # next() on it is atomic

    def read_some(_: int) -> int:
        with load.Reader(endpoint) as reader:
            return sum(
                reader.get(f"/{bucket}/{key}", keep=keep and keep / key.replace("/", "-")).size_bytes for key in keys
            )

    count = min(connections, objects.count)
    with ThreadPoolExecutor(count) as pool:
        started = time.perf_counter()
        total = sum(pool.map(read_some, range(count)))
        return total / (time.perf_counter() - started)


def _rate(reads: Sequence[load.Read]) -> float:
    return sum(read.size_bytes for read in reads) / sum(read.total_s for read in reads)


def _first_byte(row: Row, ours: list[list[load.Read]], theirs: list[list[load.Read]]) -> Measure:
    """The median time to first byte of each round, judged as the goal says."""
    mine = [statistics.median(read.first_byte_s for read in reads) for reads in ours]
    others = [statistics.median(read.first_byte_s for read in reads) for reads in theirs]
    allowed = (max(0.0, us - FIRST_BYTE_EXTRA_S) / (FIRST_BYTE_FACTOR * them) for us, them in zip(mine, others))
    return Measure("first byte", "s", row.goals["first byte"], tuple(mine), tuple(others), tuple(allowed))


def ranged(lab: Lab, row: Row) -> Result:
    """Backend bytes for one small range in the middle of a large cold object."""
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    start = objects.size_bytes // 2 + 12_345  # in the middle of a block: two blocks hold the range at worst
    fetched: list[float] = []
    with lab.remote(row.link) as remote, lab.node() as node:
        for turn in range(2 if lab.quick else row.rounds):
            node.add_bucket(f"round-{turn}", lab, remote.endpoint)
            before = remote.bytes_down()
            header = {"Range": f"bytes={start}-{start + row.range_bytes - 1}"}
            with load.Reader(node.endpoint) as reader:
                read = reader.get(f"/round-{turn}/{objects.key(0)}", header)
            assert read.size_bytes == row.range_bytes
            remote.settle()
            fetched.append((remote.bytes_down() - before) / MIB)
    return Result(row, (bounded("backend MiB", "MiB", row.goals["backend MiB"], fetched),))


def crowd(lab: Lab, row: Row) -> Result:
    """Many readers of one cold object at once against the same readers of the same file at nginx, which has it in
    memory: they take 32 times the bytes, which no machine sends at once. A single reader's time is reported.
    """
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    key, rounds = objects.key(0), 2 if lab.quick else row.rounds
    slowest: list[float] = []
    single: list[float] = []
    fetched: list[float] = []
    warm: list[float] = []
    with lab.remote(row.link, core=CLIENT_CORE) as remote, lab.node() as node:
        load.pin_self(CLIENT_CORE)
        for turn in range(rounds):
            node.add_bucket(f"alone-{turn}", lab, remote.endpoint)
            node.add_bucket(f"crowd-{turn}", lab, remote.endpoint)
            lab.prime_memory(objects.bytes_total)
            single.append(max(read_together(node.endpoint, f"/alone-{turn}/{key}", 1, objects.size_bytes)))
            before = remote.bytes_down()
            lab.prime_memory(objects.bytes_total)
            slowest.append(
                max(read_together(node.endpoint, f"/crowd-{turn}/{key}", row.connections, objects.size_bytes))
            )
            remote.settle()
            fetched.append((remote.bytes_down() - before) / objects.size_bytes)
            warm.append(max(read_together(lab.nginx.url, f"/{key}", row.connections, objects.size_bytes)))
            lab.compare(node.endpoint, f"/crowd-{turn}/{key}", key)
        load.pin_self(None)
    goals = row.goals
    return Result(
        row,
        (
            compared("slowest / nginx, warm", "s", goals["slowest / nginx, warm"], slowest, warm),
            compared("slowest / single", "s", goals["slowest / single"], slowest, single, "single"),
            bounded("backend bytes / object", "", goals["backend bytes / object"], fetched),
        ),
    )


def read_together(endpoint: str, path: str, readers: int, size_bytes: int) -> list[float]:
    """Seconds each of `readers` connections took for the whole object, all asking at once, served by one thread."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    request = load.request_bytes(f"{host}:{port}", path)
    buffer = memoryview(bytearray(load.RECV_BYTES))
    left: dict[socket.socket, int] = {}
    ended: list[float] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(readers):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S))
            left[sock] = -1
            selector.register(sock, selectors.EVENT_READ)
        started = time.perf_counter()
        for sock in left:
            sock.sendall(request)
            sock.setblocking(False)
        while selector.get_map():
            ready = selector.select(load.TIMEOUT_S)
            if not ready:
                raise load.LoadFailed(f"{path}: no byte for {load.TIMEOUT_S:.0f} s")
            for selected, _ in ready:
                assert isinstance(selected.fileobj, socket.socket)
                sock = selected.fileobj
                left[sock] = _receive(sock, path, buffer, left[sock], size_bytes)
                if left[sock] == 0:
                    ended.append(time.perf_counter() - started)
                    selector.unregister(sock)
                    sock.close()
    return ended


def _receive(sock: socket.socket, path: str, buffer: memoryview, left: int, size_bytes: int) -> int:
    """Bytes still to come after taking what is there; -1 stands for a head that has not come.

    The body is dropped in the kernel (for TCP that is what MSG_TRUNC does): copying it 32 times on the one core that
    client, link and bucket share would be all that is measured. What is served is compared afterwards.
    """
    got = sock.recv_into(buffer, load.RECV_BYTES, socket.MSG_TRUNC if left >= 0 else 0)
    if got == 0:
        raise load.LoadFailed(f"{path}: the connection ended early")
    if left >= 0:
        return left - got
    head, blank, rest = bytes(buffer[:got]).partition(b"\r\n\r\n")
    if not blank or not head.startswith(b"HTTP/1.1 200 "):
        raise load.LoadFailed(f"{path}: answered {head[:200]!r}")
    return size_bytes - len(rest)
