"""What demonstrations stand on: the bucket behind a link, nodes, and training jobs, each gone when it is left."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np

from bench.servers import SeaweedFS, free_ports
from bench.shaper import Shaper
from demo.feeds import from_node
from demo.picture import Run

ROOT = Path(__file__).resolve().parents[1]
MB = 1_000_000
BUCKET = "corpus"
WORKERS = 2


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
def bucket_behind_link(shards: list[Path], rate_mb_s: float, latency_ms: float) -> Iterator[Shaper]:
    """SeaweedFS with the shards in a bucket, and the link to it."""
    with SeaweedFS() as weed:
        upload(weed, shards)
        with Shaper(weed.endpoint, rate_bytes_s=rate_mb_s * MB, latency_s=latency_ms / 1000) as remote:
            say(f"at {remote.endpoint}")
            yield remote


class Node:
    """A node in a directory of its own, started by `forebay up` on a free port, with the bucket at `remote_endpoint`
    (""; its cluster has it); gone with its stack. `flags`: further ones of `forebay up`."""

    def __init__(self, folder: Path, remote_endpoint: str, *flags: str) -> None:
        self.folder, self.remote_endpoint, self.flags = folder, remote_endpoint, flags
        self.endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            self.up()
            if not self.remote_endpoint:
                return self
            options = {"endpoint": self.remote_endpoint, "region": "us-east-1", "skip_signature": "true"}
            flags = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
            forebay("bucket", "add", BUCKET, f"s3://{BUCKET}", *flags, url=self.endpoint)
        except BaseException:
            self.__exit__()
            raise
        return self

    def up(self) -> None:
        """Start it; again after `kill`."""
        forebay("up", "--dir", str(self.folder), "--listen", self.endpoint.removeprefix("http://"), *self.flags)

    def kill(self) -> None:
        """SIGKILL for all of its processes, as when its machine goes."""
        supervisor = json.loads((self.folder / "run" / "node.json").read_text())["pid"]
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        for pid in (supervisor, *map(int, children)):
            os.kill(pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            forebay("down", "--dir", str(self.folder), quiet=True)
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not cut the tidying short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forebay(*words: str, url: str = "", quiet: bool = False, lines: int = 1) -> None:
    """Run a `forebay` command as a user would, showing it and the first `lines` of its answer."""
    if not quiet:
        say(f"$ forebay {' '.join(words)}")
    environment = {**os.environ, **({"FOREBAY_URL": url} if url else {})}
    command = [sys.executable, "-m", "forebay.cli.main", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and not quiet:
        raise SystemExit(f"forebay {words[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    for line in [] if quiet else done.stdout.splitlines()[:lines]:
        say(line)


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
    follow(start(stack, kind, endpoint, BUCKET, epochs, WORKERS, folder), run, look)


def follow(
    job: subprocess.Popen[str],
    run: Run,
    look: Callable[[], float],
    reported: Callable[[int, int, float], None] = lambda epoch, seen, at_s: None,
) -> None:
    """Fill `run` from what `job` reports to its end; `reported` hears of the epoch, its samples seen, and the time."""
    assert job.stdout is not None
    for line in job.stdout:
        said = json.loads(line)
        if "at_s" in said:
            seen = sum(run.samples) + said["seen"]
            if said["epoch"] > len(run.samples):
                run.progress.append((said["at_s"], seen))
            show_progress(f"{run.name}: epoch {said['epoch']}, {said['seen']} samples, {said['at_s']:.0f} s")
            reported(said["epoch"], said["seen"], said["at_s"])
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
        raise SystemExit(f"a training job ended with {job.returncode}: see its message above")


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
