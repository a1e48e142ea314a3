"""The `checkpoint-shape` rows: MLPerf Storage's checkpoints at a hundredth, by a node, by plain files, and by a peer.

Theory. Eight processes save 1.05 GiB together ten times, each save synced, and other processes load each. Before a load
nothing is in the page cache: everything that a side has on the disk is synced and dropped from it. The benchmark
keeps ten checkpoints and then loads ten. Here each is loaded before the next is saved, so that the sides take turns
and the disk need not hold ten of all of them.

Plain files, written and synced by the same eight processes, are what a local disk can do. The peer is what a script
takes for a bucket: `torch.distributed.checkpoint` through s3torchconnector to SeaweedFS, which syncs nothing. Ours is a
`Checkpointer` and a node, whose bucket counts when it is on the disk.

That SeaweedFS is the row's own, and takes in UPLOADS_MB at once. By default nothing bounds what it takes in: it held
what eight ranks send faster than it writes, 7.7 GB in the first save, until the kernel ended it; and a limit for its
garbage collector did not help. With 64 MB it had 2.6 GB at the most in three saves, and saves as fast as with 256,
which was measured on busy cores.

In `checkpoint-elsewhere` who loads asks another node of the cluster than who saved, as after a machine was lost. Both
nodes are on this machine: what crosses its loopback costs the cores what a network would spare them, and the node that
is asked has none of it at first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import checkpoint_job
from bench.cluster import wait_agreed
from bench.parts import BUCKET, Lab, Node
from bench.peer_process import PeerProcess
from bench.report import Result
from bench.row import Row
from bench.rows.loader import peer_env, peers_python
from bench.servers import EtcdCluster, MissingProgram, SeaweedFS
from bench.stats import Measure, compared

RANKS = 8
UPLOADS_MB = 64  # a part of 8 MB for each rank
RAW, OURS, CONNECTOR = "raw", "forebay", "s3torchconnector"
Jobs = dict[str, PeerProcess]  # by what they do: save, load


def shape(lab: Lab, row: Row) -> Result:
    """Bytes a second of saves and loads of all ranks together, round by round for each side in turn."""
    with lab.node(core=None) as node:
        node.add_local("saved", durability="disk")
        return _measured(lab, row, node, node)


def elsewhere(lab: Lab, row: Row) -> Result:
    """As `shape`, in a cluster of two nodes: who loads asks the other node than who saved."""
    with EtcdCluster(1) as etcd, contextlib.ExitStack() as stack:
        host, port = etcd.addresses[0]
        options = ("--cluster", f"etcd://{host}:{port}/shape")
        nodes = [stack.enter_context(Node(options=options)) for _ in range(2)]
        wait_agreed(nodes)
        for node in nodes:
            node.add_local("saved", durability="disk")
        return _measured(lab, row, *nodes)


def _measured(lab: Lab, row: Row, saved_at: Node, loaded_at: Node) -> Result:
    size_bytes = (row.quick if lab.quick else row.objects)[0].size_bytes
    rates: dict[tuple[str, str], list[float]] = {}
    notes: tuple[str, ...] = ()
    (lab.dir / "raw").mkdir()
    with contextlib.ExitStack() as stack:
        folders = [lab.dir / "raw", saved_at.dir, loaded_at.dir]
        at = {"save": saved_at.endpoint, "load": loaded_at.endpoint}
        work = {"endpoint": at, "bucket": "saved", "folder": str(lab.dir / "raw"), "size_bytes": size_bytes}
        sides = {side: _jobs(stack, lab, side, sys.executable, work, {}) for side in (RAW, OURS)}
        try:
            python = peers_python()
            weed = stack.enter_context(SeaweedFS(uploads_mb=UPLOADS_MB))
            weed.create_bucket(BUCKET)
            sides[CONNECTOR] = _jobs(stack, lab, CONNECTOR, python, {**work, "bucket": BUCKET}, peer_env(weed.endpoint))
            folders.append(weed.dir)
            notes = (f"SeaweedFS takes in {UPLOADS_MB} MB at once (-s3.concurrentUploadLimitMB): unbounded, it dies",)
        except MissingProgram as error:
            notes = (f"without s3torchconnector: {error}",)
        for turn in range(1 + (2 if lab.quick else row.rounds)):  # the first warms up
            for side, jobs in sides.items():
                for what, job in jobs.items():
                    if what == "load":
                        drop_cached(folders)
                    lab.prime_memory(size_bytes)
                    told = job.round()
                    if turn:
                        rates.setdefault((what, side), []).append(size_bytes / told["seconds"])
    return Result(row, tuple(_measures(row, rates)), notes=notes)


def _jobs(
    stack: contextlib.ExitStack, lab: Lab, side: str, python: str, work: dict[str, Any], env: dict[str, str]
) -> Jobs:
    """Those that save, and the others that load."""
    jobs = {}
    for what in ("save", "load"):
        meeting = str(lab.dir / f"meeting-{side}-{what}")
        job = PeerProcess(
            lab, checkpoint_job, python, side, {**work, "what": what, "ranks": RANKS, "meeting": meeting}, env
        )
        jobs[what] = stack.enter_context(job)
    return jobs


def drop_cached(folders: list[Path]) -> None:
    """Have nothing of the files in these folders in the page cache."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # old ones are being pruned
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _measures(row: Row, rates: dict[tuple[str, str], list[float]]) -> Iterator[Measure]:
    for what, side in rates:
        if side != OURS:
            name = f"{what} / {side}"
            yield compared(name, "B/s", row.goals[name], rates[what, OURS], rates[what, side], side)
