"""The `dcp` row: `torch.distributed.checkpoint` saves a state to a node, to files, and to the node by s3torchconnector.

Theory. torch's own writer to a directory of the same disk, which it syncs, is what a save cannot be much faster than;
s3torchconnector is the peer that writes to a bucket, here that of the same node. One process for each side stays over
all rounds, so that starting it does not count. A load follows its save at once. torch's then comes out of the page
cache; ours comes from the disk, since what is handed over goes past that cache, and digests every byte on the way,
which no other does. In turns in one run, on busy cores, such a load took 1.4 times that of blobs in the cache.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator

from bench import dcp_job
from bench.parts import Lab
from bench.peer_process import PeerProcess
from bench.report import Result
from bench.row import Row
from bench.rows.loader import peer_env, peers_python
from bench.servers import MissingProgram
from bench.stats import Measure, compared

BUCKET = "saved"
OURS, FILES, CONNECTOR = "forebay", "torch", "s3torchconnector"


def dcp(lab: Lab, row: Row) -> Result:
    """Bytes a second of saves and loads, round by round for each side in turn."""
    size_bytes = (row.quick if lab.quick else row.objects)[0].size_bytes
    folder = lab.dir / "dcp-files"
    rates: dict[str, dict[str, list[float]]] = {}
    notes: tuple[str, ...] = ()
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(lab.node())
        node.add_local(BUCKET, durability="disk")
        work = {"endpoint": node.endpoint, "bucket": BUCKET, "folder": str(folder), "size_bytes": size_bytes}
        sides = {
            side: stack.enter_context(PeerProcess(lab, dcp_job, sys.executable, side, work)) for side in (OURS, FILES)
        }
        try:
            python = peers_python()
            env = peer_env(node.endpoint)
            sides[CONNECTOR] = stack.enter_context(PeerProcess(lab, dcp_job, python, CONNECTOR, work, env))
        except MissingProgram as error:
            notes = (f"without s3torchconnector: {error}",)
        for turn in range(1 + (2 if lab.quick else row.rounds)):  # the first warms up
            for side, job in sides.items():
                lab.prime_memory(size_bytes)
                told = job.round()
                for what in ("save", "load"):
                    if turn:
                        rates.setdefault(what, {}).setdefault(side, []).append(size_bytes / told[f"{what}_s"])
            with node.client() as client:
                for key in [entry.key for page in client.list_pages(BUCKET, "") for entry in page.entries]:
                    client.delete(BUCKET, key)
            shutil.rmtree(folder)
    return Result(row, tuple(_measures(row, rates)), notes=notes)


def _measures(row: Row, rates: dict[str, dict[str, list[float]]]) -> Iterator[Measure]:
    for what, sides in rates.items():
        for peer in (FILES, CONNECTOR):
            if peer in sides:
                name = f"{what} / {peer}"
                yield compared(name, "B/s", row.goals[name], sides[OURS], sides[peer], peer)
