"""The rows of MLPerf Storage's shapes: is an emulated accelerator kept busy from a warm node as it is from nginx?

Theory. MLPerf Storage asks how many accelerators a server can feed, each at least 90 % busy. Two cores feed less than
one of them, so here the accelerator is made slower, by a factor k that is printed: the smallest at which nginx feeds it
with the same client. That is the most that this machine does with this client, so a server that costs more of the cores
misses it. Our loader asks a node as no other server can be asked; the load of its goal is the highest that nginx feeds
with *any* client, our loader with its reader of buckets among them.

The files are the same ones: nginx serves them, and they are the node's backend, from which it has fetched all before.
All of it is in the page cache on both sides. The server has one core, the client what it gets of both.

Rejected: one k for all clients (the slow ones would be fed at any load); a data set of five times the memory, as MLPerf
asks (it would measure this machine's disk, which the two servers read in the same way).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.accelerator import job as accelerator_job
from bench.parts import Lab
from bench.peer_process import PeerProcess
from bench.report import Result
from bench.row import MB, MIB, Objects, Row
from bench.rows.loader import SEED, peer_env, peers_python, peers_versions
from bench.servers import MissingProgram
from bench.stats import Measure
from forebay.core.types import FRESH_IMMUTABLE, Bucket

BUSY = 0.9  # MLPerf's bound
NOT_MUCH_MORE = 0.93  # at which the load is near enough to the highest
TRIES = 5  # of loads for each client
OURS = "forebay"
NODE, NGINX = "node", "nginx"
PIECE_BYTES = 4 * MIB


@dataclass(frozen=True)
class Shape:
    """How a model reads: samples in a batch, seconds of a step on a B200, and by how much sizes of files vary (their
    standard deviation as a share of the mean). `repeats`: how often a file comes in an epoch; `ahead`: batches."""

    batch: int
    compute_s: float
    varies: float
    repeats: int
    ahead: int


SHAPES = {"unet3d": Shape(7, 0.162, 68 / 146.6, 3, 2), "retinanet": Shape(24, 0.04755, 0.0, 2, 8)}


def sizes_of(objects: Objects, shape: Shape) -> dict[str, int]:
    """Keys and sizes of the files, which have the mean that the row says."""
    chance = random.Random(objects.name)
    drawn = [max(0.1, chance.gauss(1.0, shape.varies)) for _ in range(objects.count)]
    scale = objects.size_bytes * objects.count / sum(drawn)
    return {f"{index:06d}": round(each * scale) for index, each in enumerate(drawn)}


def make_files(folder: Path, sizes: dict[str, int]) -> None:
    folder.mkdir()
    for key, size_bytes in sizes.items():
        piece = os.urandom(min(size_bytes, PIECE_BYTES))  # nobody here compresses, or looks for what is alike
        with (folder / key).open("wb") as file:
            for at in range(0, size_bytes, len(piece)):
                file.write(piece[: size_bytes - at])


def fed(lab: Lab, row: Row) -> Result:
    """Utilisation with each client, from the node and from nginx, at the highest load that nginx feeds."""
    (objects,) = row.quick if lab.quick else row.objects
    shape = SHAPES[objects.name.partition("-")[0]]
    pythons, absent = interpreters()
    sizes, folder = sizes_of(objects, shape), lab.files / objects.name
    try:
        make_files(folder, sizes)
        with lab.node() as node:
            bucket = Bucket(objects.name, f"file://{folder}", freshness_s=FRESH_IMMUTABLE)
            with node.client() as asked:
                asked.bucket_put(bucket)
            node.prefetch(objects.name, "")
            key = min(sizes, key=sizes.__getitem__)
            lab.compare(node.endpoint, f"/{objects.name}/{key}", f"{objects.name}/{key}")
            work = {"bucket": objects.name, "sizes": sizes, **asdict(shape), "seed": SEED}
            with contextlib.ExitStack() as stack:
                jobs = {}
                for client, python in pythons.items():
                    for server, endpoint in ((NODE, node.endpoint), (NGINX, lab.nginx.url)):
                        told = {**work, "endpoint": endpoint, "is_node": server == NODE}
                        job = PeerProcess(lab, accelerator_job, python, client, told, peer_env(endpoint), log=server)
                        jobs[client, server] = stack.enter_context(job)
                result = measured(jobs, row, shape, sizes, quick=lab.quick)
                return replace(result, notes=(*result.notes, absent))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interpreters() -> tuple[dict[str, str], str]:
    """Who runs each client that is here, and a note of who that is."""
    found = {OURS: sys.executable}
    try:
        python = peers_python()
    except MissingProgram as error:
        return found, f"only our own client: {error}"
    found |= dict.fromkeys(accelerator_job.CLIENTS, python) | found
    return found, peers_versions([*accelerator_job.CLIENTS, "torch"])


def measured(
    jobs: dict[tuple[str, str], PeerProcess], row: Row, shape: Shape, sizes: dict[str, int], *, quick: bool
) -> Result:
    """Every client's rounds from both servers, at the load that is found for it first."""
    steps_s = {side: _unhindered(job) for side, job in jobs.items()}
    loads = {}
    for client in dict.fromkeys(client for client, _ in jobs):
        loads[client] = highest_load(jobs[client, NGINX], BUSY * steps_s[client, NGINX], 1 if quick else TRIES)
        _say(f"{client}, nginx: a step computes {loads[client]:.4f} s")
    best = min(loads, key=loads.__getitem__)
    loads[OURS] = loads[best]
    rivals = {client: best if client == OURS else client for client in loads}
    busy: dict[str, list[tuple[float, float]]] = {client: [] for client in loads}
    for turn in range(2 if quick else row.rounds):
        for client, compute_s in loads.items():
            sides = [(client, NODE), (rivals[client], NGINX)]
            got = {side: jobs[side].round(str(compute_s))["utilisation"] for side in sides[:: 1 - 2 * (turn % 2)]}
            busy[client].append((got[sides[0]], got[sides[1]]))
            _say(f"round {turn + 1}, {client}: {busy[client][-1][0]:.3f}, nginx {busy[client][-1][1]:.3f}")
    batch_bytes = sum(sizes.values()) / len(sizes) * shape.batch
    notes = [f"{len(sizes)} files of {sum(sizes.values()) / MB:,.0f} MB together, batches of {shape.batch}"]
    for client, compute_s in loads.items():
        alone = " and ".join(f"{batch_bytes / steps_s[client, at] / MB:,.0f} from {at}" for at in (NODE, NGINX))
        notes.append(
            f"{client}: k = {compute_s / shape.compute_s:.3g}, so a step computes {1000 * compute_s:.3g} ms and wants "
            f"{batch_bytes / compute_s / MB:,.0f} MB/s; where it computes nothing it gets {alone}"
        )
    measures = tuple(judged(row, client, busy[client], rivals[client]) for client in busy)
    return Result(row, measures, notes=tuple(notes), extra={"compute_s": loads, "utilisation": busy})


def _say(line: str) -> None:
    print(f"[bench]   {line}", file=sys.stderr, flush=True)


def _unhindered(job: PeerProcess) -> float:
    """Seconds of a step that computes nothing; the first epoch, which starts workers, does not count."""
    job.round("0")
    told = job.round("0")
    return told["run_s"] / told["steps"]


def highest_load(job: PeerProcess, compute_s: float, tries: int) -> float:
    """The least computation of a step at which the accelerator is busy; of the loads tried, beginning with that one."""
    fed_at: list[float] = []
    for _ in range(tries):
        found = job.round(str(compute_s))["utilisation"]
        if found >= BUSY:
            fed_at.append(compute_s)
        if BUSY <= found <= NOT_MUCH_MORE:
            break
        compute_s *= (BUSY + NOT_MUCH_MORE) / 2 / found  # a server at its limit gives as much at any load
    return min(fed_at, default=compute_s)


def judged(row: Row, client: str, busy: Sequence[tuple[float, float]], rival: str) -> Measure:
    """Ours is enough where it is BUSY, or as nginx was in a round in which even that was less."""
    ours, theirs = ([100 * pair[side] for pair in busy] for side in (0, 1))
    ratios = tuple(mine / min(other, 100 * BUSY) for mine, other in zip(ours, theirs, strict=True))
    peer = f"nginx, {rival}" if rival != client else "nginx"
    return Measure(f"busy, {client}", "%", row.goals["busy"], tuple(ours), tuple(theirs), ratios, peer)
