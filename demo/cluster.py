"""`make demo ARGS=--cluster`: three nodes, a training job, a node killed, and the job that does not notice.

What happens, about three minutes on two cores:

1. fragments of the files that this machine's Python ships become tar shards;
2. SeaweedFS becomes the remote bucket, behind a slow link; three members of etcd start beside it;
3. three nodes start with `forebay up --cluster`, each with the bucket;
4. a job trains at the first node. In the middle of its second epoch all processes of that node are killed with
   SIGKILL; the job reads on at the others. In the third epoch the node is started again, and the job goes back to it;
5. the job has seen every sample of every epoch once, in the order of a job that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.servers import EtcdCluster
from demo import corpus
from demo.picture import Run, draw_cluster
from demo.stage import (
    BUCKET,
    MB,
    WORKERS,
    Node,
    bucket_behind_link,
    counter,
    follow,
    forebay,
    say,
    start,
    step,
    uninterrupted_order,
)
from forebay.client.sync import Client

NODES = 3
TOGETHER_S = 60.0


def demonstrate(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """The five steps; whatever is started is registered on `stack`."""
    out: Path = arguments.out.resolve()
    step(f"1. shards of samples in {out / 'shards'}")
    shards = corpus.make_shards(out / "shards", arguments.megabytes * MB, say)

    step(f"2. the remote bucket behind {arguments.rate:g} MB/s and {arguments.latency:g} ms, and an etcd of three")
    remote = stack.enter_context(bucket_behind_link(shards, arguments.rate, arguments.latency))
    etcd = stack.enter_context(EtcdCluster(3))
    url = f"etcd://{','.join(f'{host}:{port}' for host, port in etcd.addresses)}/demo"

    step("3. three nodes")
    flags = ("--fronts", "1", "--capacity", "4GiB", "--cluster", url)  # of one size, so that each owns a third
    nodes = [
        stack.enter_context(Node(out / f"node-{number}", "" if number else remote.endpoint, *flags))
        for number in range(NODES)
    ]  # who is told of the bucket tells the others
    own = nodes[0]
    _wait_until_together(own.endpoint)
    forebay("status", url=own.endpoint, lines=NODES + 8)

    epochs = max(3, arguments.epochs)
    step(f"4. training at the first node, {epochs} epochs; it is killed in the second and back in the third")
    run = Run("training")
    happened = _train(stack, out / "cluster", own, epochs, run, counter(remote))
    wanted = uninterrupted_order(own.endpoint, epochs)
    if (out / "cluster" / "seen.txt").read_text().splitlines() != wanted:
        raise SystemExit("the job did not see every sample once, in its order: please report")

    step("5. what came of it")
    pauses = [after - before for (before, _), (after, _) in itertools.pairwise(run.progress)]
    report = (
        f"{run.samples[0]} samples in each of {epochs} epochs, each once, in the order of a job that nothing happened "
        f"to.\n   Epochs took {_joined(run.seconds)} s, and the bucket sent "
        f"{_joined(sent / MB for sent in run.backend_bytes)} MB. The longest time between two reports was "
        f"{max(pauses):.1f} s."
    )
    say(report)
    picture = out / "cluster.png"
    draw_cluster(picture, run, happened)
    (out / "cluster.txt").write_text(report + "\n")
    print(f"\nwritten: {picture}, {out / 'cluster.txt'}")


def _joined(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.1f}" for number in numbers)


def _wait_until_together(endpoint: str) -> None:
    give_up_s = time.monotonic() + TOGETHER_S
    with Client(endpoint) as client:
        while len(client.node_map().nodes) < NODES:
            if time.monotonic() > give_up_s:
                raise SystemExit(f"the nodes did not find each other within {TOGETHER_S:g} s: see their logs")
            time.sleep(0.1)


def _train(
    stack: contextlib.ExitStack, folder: Path, own: Node, epochs: int, run: Run, look: Callable[[], float]
) -> list[tuple[float, str]]:
    """Train at `own`, kill it in epoch 2 and start it again in epoch 3; when that was, by the job's clock."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    happened: list[tuple[float, str]] = []

    def reported(epoch: int, seen: int, at_s: float) -> None:
        if epoch == len(happened) + 2 and seen >= run.samples[0] / 3:
            if epoch == 2:
                own.kill()
                say(f"all processes of the node at {own.endpoint} are killed")
            elif epoch == 3:
                own.up()
            else:
                return
            happened.append((at_s, "its node killed" if epoch == 2 else "its node back"))

    look()
    follow(start(stack, "node", own.endpoint, BUCKET, epochs, WORKERS, folder), run, look, reported)
    return happened
