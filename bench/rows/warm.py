"""Warm rows: what is in the cache already, served through the S3 path, against nginx and SeaweedFS on the same bytes.

One front on the server core, `wrk` on the client core, the same requests in the same shuffled order on both sides.
Rounds alternate, so that each ratio compares two runs that stood next to each other in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from bench import load, signing
from bench.parts import BUCKET, CLIENT_CORE, KEY_ID, SECRET, SERVER_CORE, Lab, pin
from bench.report import Result
from bench.row import Row
from bench.stats import compared

RANGES = 1024
SIGNED_PER_SECOND = 40_000  # more than one core can check, so that no signature is met twice in a round

Prepare = Callable[[int], Path]  # round number to the file of requests to replay


def throughput(lab: Lab, row: Row) -> Result:
    """Requests (or bytes) a second of the node and of the peer."""
    (objects,) = row.quick if lab.quick else row.objects
    lab.upload(objects)
    with lab.node(signed=row.signed) as node:
        node.add_bucket(BUCKET, lab)
        keys = [objects.key(index) for index in range(objects.count)]
        node.prefetch(BUCKET, f"{objects.name}/")
        theirs_endpoint, theirs_root = _peer(lab, row)
        lab.compare(theirs_endpoint, f"{theirs_root}/{keys[-1]}", keys[-1])
        if not row.signed:
            lab.compare(node.endpoint, f"/{BUCKET}/{keys[-1]}", keys[-1])
        ours = _prepare(lab, row, node.endpoint, f"/{BUCKET}", keys, signed=row.signed)
        theirs = _prepare(lab, row, theirs_endpoint, theirs_root, keys, signed=False)
        seconds, rounds = (1.0, 2) if lab.quick else (row.seconds, row.rounds)
        mine: list[load.Load] = []
        others: list[load.Load] = []
        for turn in range(rounds):
            for endpoint, prepare, into in ((node.endpoint, ours, mine), (theirs_endpoint, theirs, others)):
                requests = prepare(turn)
                into.append(
                    load.run_wrk(endpoint, requests, seconds=seconds, connections=row.connections, core=CLIENT_CORE)
                )
        missed = node.counter("forebay_reads_total", result="miss")
    body = row.range_bytes or objects.size_bytes
    unit, scale = ("req/s", 1.0) if body < 1 << 20 else ("B/s", float(body))
    measure = compared(
        "rate",
        unit,
        row.goals["rate"],
        [one.requests_per_s * scale for one in mine],
        [one.requests_per_s * scale for one in others],
    )
    latency = {
        "p50_us": [round(one.p50_s * 1e6) for one in mine],
        "p99_us": [round(one.p99_s * 1e6) for one in mine],
        "peer_p99_us": [round(one.p99_s * 1e6) for one in others],
        "misses": missed,
    }
    return Result(row, (measure,), extra=latency)


def _peer(lab: Lab, row: Row) -> tuple[str, str]:
    """Endpoint and path root of the other side, on the server core."""
    if row.peer == "nginx":
        return lab.nginx.url, ""
    pin(lab.weed.pid, SERVER_CORE)
    return lab.weed.endpoint, f"/{BUCKET}"


def _prepare(lab: Lab, row: Row, endpoint: str, root: str, keys: list[str], *, signed: bool) -> Prepare:
    """How to make the requests of a round; only signed ones differ from round to round."""
    host = endpoint.removeprefix("http://")
    paths = [f"{root}/{key}" for key in keys]
    random.Random(row.name).shuffle(paths)
    file = lab.dir / f"{row.name}-{host.replace(':', '-')}.requests"
    if signed:
        count = round(SIGNED_PER_SECOND * (1.0 if lab.quick else row.seconds))
        return lambda turn: load.write_requests(file, signing.signed_gets(host, paths, count, KEY_ID, SECRET))
    load.write_requests(file, [load.request_bytes(host, path, headers) for path, headers in _plain(lab, row, paths)])
    return lambda turn: file


def _plain(lab: Lab, row: Row, paths: list[str]) -> list[tuple[str, dict[str, str]]]:
    if not row.range_bytes:
        return [(path, {}) for path in paths]
    (objects,) = row.quick if lab.quick else row.objects
    chance = random.Random(row.name)
    starts = [chance.randrange(objects.size_bytes - row.range_bytes) for _ in range(RANGES)]
    return [(paths[0], {"Range": f"bytes={start}-{start + row.range_bytes - 1}"}) for start in starts]
