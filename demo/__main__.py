"""`make demo`: a bucket behind a slow link, a node in front of it, and a training job that is fed from each.

What happens, about three minutes on two cores and 1.5 GB of disk:

1. fragments of the files that this machine's Python ships become tar shards (320 MB of samples);
2. SeaweedFS, a real S3 server, becomes the remote bucket, behind a link of 20 MB/s and 20 ms;
3. `forebay up` starts a node with its defaults, and `forebay bucket add` gives it the bucket;
4. the same model trains three epochs: fed by `forebay.torch` through the node, then by boto3 from the bucket;
5. a job of the first kind is killed with SIGKILL in the middle of an epoch, and goes on with another number of
   workers: it sees the samples that were left, in the order in which they would have come;
6. a table is printed, and a picture is drawn: `demo-out/demo.png`.

Ctrl-C stops everything that was started, at any moment.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.servers import SeaweedFS, free_ports
from bench.shaper import Shaper
from demo import corpus
from demo.feeds import from_node
from demo.picture import Run, draw

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
BUCKET = "corpus"
WORKERS = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where data and results go")
    parser.add_argument("--megabytes", type=int, default=320, help="of samples (default: 320)")
    parser.add_argument("--rate", type=float, default=20.0, help="of the link to the bucket, MB/s (default: 20)")
    parser.add_argument("--latency", type=float, default=20.0, help="of the link to the bucket, ms (default: 20)")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with contextlib.ExitStack() as stack:
            demonstrate(arguments, stack)
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
    weed = stack.enter_context(SeaweedFS())
    upload(weed, shards)
    rate, latency = arguments.rate * MB, arguments.latency / 1000
    remote = stack.enter_context(Shaper(weed.endpoint, rate_bytes_s=rate, latency_s=latency))
    say(f"at {remote.endpoint}")

    step("3. a node in front of it")
    endpoint = stack.enter_context(node(out / "node", remote.endpoint))

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


def step(text: str) -> None:
    print(f"\n{text}", flush=True)


def say(text: str) -> None:
    print(f"   {text}", flush=True)


# --- bucket and node -------------------------------------------------------------------------------------------------
def upload(weed: SeaweedFS, shards: list[Path]) -> None:
    """Put the shards into the bucket, past the link: filling it is not what is shown."""
    weed.create_bucket(BUCKET)
    for path in shards:
        connection = http.client.HTTPConnection("127.0.0.1", weed.port, timeout=120)
        with contextlib.closing(connection), path.open("rb") as file:
            headers = {"Content-Length": str(path.stat().st_size)}
            connection.request("PUT", f"/{BUCKET}/{path.name}", body=file, headers=headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, f"SeaweedFS answered {answer.status} to the upload of {path.name}"


@contextlib.contextmanager
def node(folder: Path, remote_endpoint: str) -> Iterator[str]:
    """`forebay up` in a directory of its own on a free port, with the bucket added; `forebay down` at the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
    try:
        forebay("up", "--dir", str(folder), "--listen", endpoint.removeprefix("http://"))
        options = {"endpoint": remote_endpoint, "region": "us-east-1", "skip_signature": "true"}
        flags = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        forebay("bucket", "add", BUCKET, f"s3://{BUCKET}", *flags, url=endpoint)
        yield endpoint
    finally:
        with uninterrupted():
            forebay("down", "--dir", str(folder), quiet=True)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not cut the tidying short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forebay(*words: str, url: str = "", quiet: bool = False) -> None:
    """Run a `forebay` command as a user would, showing it and its first line of answer."""
    if not quiet:
        say(f"$ forebay {' '.join(words)}")
    environment = {**os.environ, **({"FOREBAY_URL": url} if url else {})}
    command = [sys.executable, "-m", "forebay.cli.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and not quiet:
        raise SystemExit(f"forebay {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    if not quiet and done.stdout:
        say(done.stdout.splitlines()[0])


# --- training --------------------------------------------------------------------------------------------------------
def counter(remote: Shaper) -> Callable[[], float]:
    """Bytes that came over the link since the last look."""
    seen = [0.0]

    def look() -> float:
        before, seen[0] = seen[0], remote.counters()["response_bytes"]
        return seen[0] - before

    return look


def start(stack: contextlib.ExitStack, *words: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """A training job in a session of its own: Ctrl-C reaches us alone, and we end the job with all its workers."""
    command = [sys.executable, "-W", "ignore", "-m", "demo.train", *map(str, words)]
    job = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    stack.callback(end, job)
    return job


def train(
    stack: contextlib.ExitStack,
    folder: Path,
    kind: str,
    endpoint: str,
    epochs: int,
    run: Run,
    look: Callable[[], float],
) -> None:
    """Run the training job at `endpoint`, filling `run` from what it reports."""
    look()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    job = start(stack, kind, endpoint, BUCKET, epochs, WORKERS, folder)
    assert job.stdout is not None
    for line in job.stdout:
        said = json.loads(line)
        if "at_s" in said:
            seen = sum(run.samples) + said["seen"]
            if said["epoch"] > len(run.samples):
                run.progress.append((said["at_s"], seen))
            show_progress(f"{run.name}: epoch {said['epoch']}, {said['seen']} samples, {said['at_s']:.0f} s")
        elif "done" in said:
            run.seconds.append(said["seconds"])
            run.samples.append(said["samples"])
            run.bytes.append(said["bytes"])
            run.backend_bytes.append(look())
            show_progress("")
            say(f"{run.name}: epoch {said['done']} took {said['seconds']:.1f} s, loss {said['loss']:.3f}")
        elif "stall" in said:
            say(f"{run.name}: {said['stall']}")
        else:
            run.accuracy = said["accuracy"]
    if job.wait() != 0:
        raise SystemExit(f"the training job at {endpoint} ended with {job.returncode}: see its message above")


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


def uninterrupted_order(endpoint: str, epochs: int) -> list[str]:
    """What a job's notes say when nothing happens to it, from the order alone: no sample is read."""
    with from_node(endpoint, BUCKET, "train-", 0) as loader:
        names: list[str] = []
        schedule, dataset = loader.schedule, loader.dataset
        for epoch in range(epochs):
            order = schedule.order(epoch).at(np.arange(len(dataset)))
            names += [f"{epoch + 1} {dataset.key(int(index))}" for index in order]
        return names


def end(job: subprocess.Popen[str]) -> None:
    """Stop the job and its workers, if they still run."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def show_progress(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stdout.isatty():
        print(f"\r   {text:<78}\r" if not text else f"\r   {text:<78}", end="", flush=True)


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
