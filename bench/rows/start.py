"""The rows of a job that begins: how long until it has its first shuffled batch, on a bucket of a million objects.

Theory. To shuffle, a loader has to know what there is, so a bucket of a million small objects is first a matter of its
listing: a thousand pages, one after the other unless somebody asks for them otherwise. Measured is from making the
dataset, in a new process that has imported all it needs, to the first batch of BATCH samples. The node starts empty in
every round and lists anew; so do the peers, and litdata's index, which it keeps beside the data, is removed after each
run, since it would be one object more and the next job's listing. What a second job gets is told beside it: the node
has kept its listing, litdata its index, and s3torchconnector lists again, so that its first time stands for both.
litdata lists for minutes, four times as long as the best: it does so once, in the first round, and with what it kept
then it is the second job of every round.

Nobody has worker processes here: none of the loaders lists in them, and forking them only takes time.

The limit is shown as well: the bucket's pages asked for by CONNECTIONS connections at once, each folder by itself, by
somebody who knows the folders, reads nothing of what comes but where a page ends, and has both cores to share with the
bucket alone. No loader on this machine has its first batch sooner, since none can shuffle what it did not list.

Every object holds its own key, so that a batch can be checked: right sizes, no sample twice, all of them of the data
set, and not in order. A data set of another length than the bucket's is an error as well.
"""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from bench import load, peers
from bench.parts import BUCKET, Lab
from bench.report import Result
from bench.row import REPORTED, Objects, Row
from bench.rows import loader
from bench.stats import compared

BATCH = 64
CONNECTIONS = 16
PAGE_KEYS = 1000
TOLD_S = 10.0  # between two lines about the upload
OURS, KEEPS, CANNOT_SHUFFLE = "forebay", "litdata", "s3torchconnector-iterable"


# --- the bucket ------------------------------------------------------------------------------------------------------
def upload(lab: Lab, objects: Objects) -> None:
    """The objects in the lab's bucket, without files of their own; once for a lab. Says how far it is."""
    done = lab.dir / f"{objects.name}-uploaded"
    if done.exists():
        return
    port, counts, ended = lab.weed.port, [0] * CONNECTIONS, threading.Event()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        puts = [pool.submit(_put_share, port, objects, share, counts, ended) for share in range(CONNECTIONS)]
        try:
            while wait(puts, TOLD_S).not_done:
                rate = sum(counts) / (time.perf_counter() - began_s)
                left_s = (objects.count - sum(counts)) / max(1.0, rate)
                _say(f"{sum(counts):,} of {objects.count:,} objects uploaded, {rate:,.0f}/s, {left_s:.0f} s left")
            for put in puts:
                put.result()
        finally:
            ended.set()
    done.touch()


def _put_share(port: int, objects: Objects, share: int, counts: list[int], ended: threading.Event) -> None:
    """Every CONNECTIONS-th object over one connection; `ended` is set where one fails, for the others to end too."""
    try:
        with socket.create_connection(("127.0.0.1", port), load.TIMEOUT_S) as sock:
            for index in range(share, objects.count, CONNECTIONS):
                if ended.is_set():
                    return
                key = peers.many_key(objects.name, index)
                body = peers.many_body(key, objects.size_bytes)
                head = f"PUT /{BUCKET}/{key} HTTP/1.1\r\nHost: bucket\r\nContent-Length: {len(body)}\r\n\r\n"
                sock.sendall(head.encode() + body)
                _accepted(sock, key)
                counts[share] += 1
    except BaseException:
        ended.set()
        raise


def _accepted(sock: socket.socket, key: str) -> None:
    """Read one answer. `LoadFailed` unless it is 200 without a body."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        got = sock.recv(4096)
        if not got:
            raise load.LoadFailed(f"the connection ended at the upload of {key}")
        answer += got
    if not answer.startswith(b"HTTP/1.1 200 ") or b"content-length: 0\r\n" not in answer.lower():
        raise load.LoadFailed(f"SeaweedFS answered {answer[:100]!r} to the upload of {key}")


def _remove(lab: Lab, key: str) -> None:
    """Delete an object of the bucket; it may be absent."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", lab.weed.port, timeout=load.TIMEOUT_S)) as asked:
        asked.request("DELETE", f"/{BUCKET}/{key}")
        answer = asked.getresponse()
        answer.read()
        if answer.status not in (204, 404):
            raise load.LoadFailed(f"SeaweedFS answered {answer.status} to the removal of {key}")


def _say(line: str) -> None:
    print(f"[bench]   {line}", file=sys.stderr, flush=True)


def listing_alone(endpoint: str, objects: Objects) -> float:
    """Seconds until every page of the bucket's listing has come."""
    folders = sorted({peers.many_key(objects.name, index).rpartition("/")[0] + "/" for index in range(objects.count)})
    began_s = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        seen = sum(pool.map(lambda folder: _listed(endpoint, folder), folders))
    if seen != objects.count:
        raise load.LoadFailed(f"the bucket lists {seen} keys, not {objects.count}")
    return time.perf_counter() - began_s


def _listed(endpoint: str, folder: str) -> int:
    """How many keys a folder lists."""
    seen, after = 0, ""
    with contextlib.closing(http.client.HTTPConnection(endpoint.rpartition("/")[2], timeout=load.TIMEOUT_S)) as asked:
        while True:
            asked.request("GET", f"/{BUCKET}?list-type=2&max-keys={PAGE_KEYS}&prefix={folder}&start-after={after}")
            body = asked.getresponse().read()
            page = body.count(b"<Key>")
            seen += page
            if page < PAGE_KEYS:
                return seen
            after = body[body.rindex(b"<Key>") + 5 :].partition(b"<")[0].decode()


# --- sides -----------------------------------------------------------------------------------------------------------
def _work(objects: Objects) -> dict[str, Any]:
    return {
        "bucket": BUCKET,
        "objects": f"{objects.name}/",
        "samples": objects.count,
        "size_bytes": objects.size_bytes,
        "batch": BATCH,
        "seed": loader.SEED,
        "workers": 0,
    }


def _seconds(command: list[str], work: dict[str, Any], env: dict[str, str]) -> float:
    told = loader.lines_of(command, work, env, "first_batch_s")
    if len(told) != 1 or not told[0]["first_batch_s"] > 0:
        raise load.LoadFailed(f"{command[-1]} told of {len(told)} first batches")
    return told[0]["first_batch_s"]


def ours(lab: Lab, objects: Objects, endpoint: str) -> tuple[float, float]:
    """Seconds to the first batch with a node that begins empty, and those of the next job on that node."""
    with lab.node(core=None) as node:
        node.add_bucket(BUCKET, lab, endpoint)
        work = {**_work(objects), "url": node.endpoint, "place": f"{BUCKET}/{objects.name}/"}
        command = [sys.executable, "-m", "bench.trainee", "first"]
        return _seconds(command, work, {}), _seconds(command, work, {})


def theirs(lab: Lab, objects: Objects, name: str, endpoint: str) -> tuple[float | None, float]:
    """Seconds to a peer's first batch, and those of its next job: with what it kept, if it keeps anything. None where
    a listing from an earlier round is still kept."""
    cache = lab.dir / f"peer-cache-{objects.name}-{name}"
    listed = cache.exists()
    cache.mkdir(exist_ok=True)
    work = {**_work(objects), "endpoint": endpoint, "cache": str(cache), "list_anew": True}
    command, env = [loader.peers_python(), peers.__file__, "first", name], loader.peer_env(endpoint)
    if name != KEEPS:
        first_s = _seconds(command, work, env)
        return first_s, first_s
    try:
        anew_s = None if listed else _seconds(command, work, env)
        return anew_s, _seconds(command, {**work, "list_anew": False}, env)
    finally:
        _remove(lab, f"{objects.name}/{peers.LITDATA_INDEX}")


def first_batch(lab: Lab, row: Row) -> Result:
    """Every side in each round, one after the other, each time another one first."""
    (objects,) = row.quick if lab.quick else row.objects
    loader.peers_python()  # before minutes of uploading
    upload(lab, objects)
    shutil.rmtree(lab.dir / f"peer-cache-{objects.name}-{KEEPS}", ignore_errors=True)  # of a row before
    rivals = [name for name in peers.FIRST if name != CANNOT_SHUFFLE]
    sides = [OURS, *peers.FIRST]
    seconds: dict[str, list[tuple[float | None, float]]] = {side: [] for side in sides}
    alone: list[float] = []
    with lab.remote(row.link) as remote:
        for turn in range(1 if lab.quick else row.rounds):
            alone.append(listing_alone(remote.endpoint, objects))
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                if side == OURS:
                    seconds[side].append(ours(lab, objects, remote.endpoint))
                else:
                    seconds[side].append(theirs(lab, objects, side, remote.endpoint))
                _say(f"{side}: {' and '.join(f'{each:.2f} s' for each in seconds[side][-1] if each is not None)}")
    measures = []
    for job, name in enumerate(("first batch", "second job")):
        mine = [pair[job] or 0.0 for pair in seconds[OURS]]
        turns = [[seconds[peer][turn][job] for peer in rivals] for turn in range(len(mine))]
        best = [min(each for each in turn if each is not None) for turn in turns]
        measures.append(compared(name, "s", row.goals[name], mine, best, "best peer"))
    mine = [pair[0] or 0.0 for pair in seconds[OURS]]
    measures.append(compared("first batch / listing alone", "s", REPORTED, mine, alone, "listing alone"))
    limit = statistics.median(each / other for each, other in zip(alone, measures[0].theirs, strict=True))
    notes = (
        f"listing alone takes {limit:.3f} of the best peer's time",
        *(f"{side}: {_told(side, seconds[side])}" for side in sides),
        loader.peers_versions(),
    )
    return Result(row, tuple(measures), notes=notes, extra={"first_batch_s": seconds})


def _told(side: str, pairs: list[tuple[float | None, float]]) -> str:
    first_s = statistics.median(pair[0] for pair in pairs if pair[0] is not None)
    again_s = statistics.median(pair[1] for pair in pairs)
    said = f"{first_s:.2f} s{', but it cannot shuffle' if side == CANNOT_SHUFFLE else ''}"
    return said if again_s == first_s else f"{said}{' (once)' if side == KEEPS else ''}, the next job {again_s:.2f} s"
