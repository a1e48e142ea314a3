"""`make demo`: a bucket behind a slow link, a node in front of it, and a training job that is fed from each.

What happens, about three minutes on two cores and 1.5 GB of disk:

1. fragments of the files that this machine's Python ships become tar shards (320 MB of samples);
2. SeaweedFS, a real S3 server, becomes the remote bucket, behind a link of 20 MB/s and 20 ms;
3. `forebay up` starts a node with its defaults, and `forebay bucket add` gives it the bucket;
4. the same model trains three epochs: fed by `forebay.torch` through the node, then by boto3 from the bucket;
5. a job of the first kind is killed with SIGKILL in the middle of an epoch, and goes on with another number of
   workers: it sees the samples that were left, in the order in which they would have come;
6. a table is printed, and a picture is drawn: `demo-out/demo.png`.

With `--cluster` it shows three nodes instead (`cluster.py`). Ctrl-C stops everything that was started, at any moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from demo import cluster, corpus
from demo.picture import Run, draw
from demo.stage import (
    BUCKET,
    MB,
    WORKERS,
    Node,
    bucket_behind_link,
    counter,
    say,
    start,
    step,
    train,
    uninterrupted_order,
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where data and results go")
    parser.add_argument("--megabytes", type=int, default=320, help="of samples (default: 320)")
    parser.add_argument("--rate", type=float, default=20.0, help="of the link to the bucket, MB/s (default: 20)")
    parser.add_argument("--latency", type=float, default=20.0, help="of the link to the bucket, ms (default: 20)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--cluster", action="store_true", help="three nodes instead, one of which is killed")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with contextlib.ExitStack() as stack:
            (cluster.demonstrate if arguments.cluster else demonstrate)(arguments, stack)
    except KeyboardInterrupt:
        print("\nstopped; everything that was started is gone")
        return 130
    return 0


def demonstrate(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """The six steps; whatever is started is registered on `stack`."""
    out: Path = arguments.out.resolve()
    step(f"1. shards of samples in {out / 'shards'}")
    shards = corpus.make_shards(out / "shards", arguments.megabytes * MB, say)
    size = sum(path.stat().st_size for path in shards)
    say(f"{len(shards)} shards, {size / MB:.0f} MB")

    step(f"2. the remote bucket: SeaweedFS behind {arguments.rate:g} MB/s and {arguments.latency:g} ms")
    remote = stack.enter_context(bucket_behind_link(shards, arguments.rate, arguments.latency))

    step("3. a node in front of it")
    endpoint = stack.enter_context(Node(out / "node", remote.endpoint)).endpoint

    step(f"4. training, {arguments.epochs} epochs: through the node, then from the bucket")
    through, direct = Run("through Forebay"), Run("from the bucket")
    train(stack, out / "through", "node", endpoint, arguments.epochs, through, counter(remote))
    train(stack, out / "direct", "bucket", remote.endpoint, arguments.epochs, direct, counter(remote))

    step("5. killed in the middle of an epoch, and on again")
    resumed = kill_and_resume(stack, out / "killed", endpoint)

    step("6. what came of it")
    report = f"{table(direct, through)}\n\n   {resumed}"
    print(report)
    picture = out / "demo.png"
    link = f"{arguments.rate:g} MB/s and {arguments.latency:g} ms"
    draw(picture, direct, through, f"Training on {size / MB:.0f} MB behind a link of {link}")
    (out / "demo.txt").write_text(report + "\n")
    print(f"\nwritten: {picture}, {out / 'demo.txt'}")


# --- killed and resumed ----------------------------------------------------------------------------------------------
def kill_and_resume(stack: contextlib.ExitStack, folder: Path, endpoint: str) -> str:
    """Kill a job in the middle of its second epoch and start it again with fewer workers; what came of the order."""
    wanted = uninterrupted_order(endpoint, 2)
    samples = len(wanted) // 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    kill_midway(start(stack, "node", endpoint, BUCKET, 2, WORKERS, folder, 0, stdin=subprocess.PIPE), samples)
    trained = len((folder / "seen.txt").read_text().splitlines())
    if not samples < trained < 2 * samples:
        raise SystemExit(f"the job was killed after {trained} of {2 * samples} samples, not in its second epoch")
    say(f"killed with {WORKERS} workers after {trained - samples} of {samples} samples of epoch 2")
    job = start(stack, "node", endpoint, BUCKET, 2, WORKERS - 1, folder)
    job.communicate()
    if job.returncode != 0:
        raise SystemExit(f"the job that was to go on ended with {job.returncode}: see its message above")
    if (folder / "seen.txt").read_text().splitlines() != wanted:
        raise SystemExit("the job that went on did not see the samples that were left, in their order: please report")
    done = f"{2 * samples} samples in two epochs, each once in each, in the order of a job that was never killed"
    say(f"on again with {WORKERS - 1} worker: {done}")
    return f"Killed with SIGKILL in epoch 2, resumed with {WORKERS - 1} worker instead of {WORKERS}: {done}."


def kill_midway(job: subprocess.Popen[str], samples: int) -> None:
    """SIGKILL for a job and its workers when it says that a third of its second epoch is done."""
    assert job.stdout is not None
    assert job.stdin is not None
    for line in job.stdout:
        said = json.loads(line)
        if said.get("epoch") == 2 and said["seen"] >= samples / 3:
            break
        if said.get("waits"):
            print(file=job.stdin, flush=True)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    job.stdin.close()
    job.stdout.close()


# --- results ---------------------------------------------------------------------------------------------------------
def table(direct: Run, through: Run) -> str:
    """Both runs, epoch by epoch, and their totals."""
    head = ("", "epoch", "seconds", "samples/s", "bucket sent", "from the cache")
    lines = [head]
    for run in (direct, through):
        for number, seconds in enumerate(run.seconds):
            hits = f"{max(0.0, 1 - run.backend_bytes[number] / run.bytes[number]):.1%}" if run is through else "–"
            fetched = f"{run.backend_bytes[number] / MB:.1f} MB"
            rate = f"{run.samples[number] / seconds:,.0f}".replace(",", " ")
            lines.append((run.name if number == 0 else "", str(number + 1), f"{seconds:.1f}", rate, fetched, hits))
        fetched = f"{sum(run.backend_bytes) / MB:.1f} MB"
        rate = f"{sum(run.samples) / sum(run.seconds):,.0f}".replace(",", " ")
        lines.append(("", "all", f"{sum(run.seconds):.1f}", rate, fetched, ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(width) if column < 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        out.append("   " + "   ".join(cells).rstrip())
    out.insert(1, "   " + "-" * (sum(widths) + 3 * (len(widths) - 1)))
    faster = sum(direct.seconds) / sum(through.seconds)
    out.append("")
    out.append(
        f"   {faster:.2f}× faster over {len(through.seconds)} epochs; first epoch at "
        f"{direct.seconds[0] / through.seconds[0]:.2f} of the bucket's own speed; the model tells the kind of "
        f"{through.accuracy:.0%} of held-out fragments ({direct.accuracy:.0%} when trained from the bucket)."
    )
    return "\n".join(out)


if __name__ == "__main__":
    started = time.perf_counter()
    status = main()
    if status == 0:
        print(f"{time.perf_counter() - started:.0f} s in all")
    sys.exit(status)
