"""Checkpoint rows: what a save costs training, when it counts, how it drains, and how fast it is restored.

Theory. A save may stall training for one copy of its state, so its stall stands beside that copy, made in the same run
by the same function of torch, and beside what scripts do today: `torch.save` through fsspec to the same node, and
`dcp.save`, `dcp.async_save` with its thread and with its process, and torch-checkpointing, all to this machine's disk,
which is the kindest place for them, and `dcp.async_save` by s3torchconnector to the same node. Those that need other
packages or a process group run in a process of their own, which stays over all rounds (`bench/stall_job.py`). A save
counts when the node has it on its disk, so that stands beside a program that writes and syncs the same bytes. A
restore stands beside reads of a file of the same bytes into memory that was touched before, and both find their bytes
in the page cache. A restore of what only the bucket has stands beside plain reads of the checkpoint's own objects over
the same link; each round's node knows the bucket by a name that it has not read.

A round measures all sides, one after the other. Before each, what the node flushes is waited for, and everything is
synced: SeaweedFS and some peers sync nothing, and the kernel would write out theirs while another is measured. The copy
and the save that it stands beside find the same machine: the copy is made just before, both into memory that was
touched before (the save's is kept from save to save). Two copies are made, and the quicker counts: the first may still
meet what the peers before it left to the kernel, and took 245 ms where the save after it took 98. Peers are judged by
the one whose median stall is least, round by round.

The steps beside which a save drains are multiplications of matrices in one thread, the same before and after it. They
are compared with the steps just before the save, since other steps ran at another time on a shared machine. What the
save has not sent when the fifth step ends is in the notes: a drain that is over early slows nothing. A bucket elsewhere
takes no core from training. So bucket and link run only on what the others leave of the cores, and the bucket is
another node that keeps all in its page cache: it takes about 3 s of a core for each GB. SeaweedFS takes 10, and so was
most of what drained beside the steps. The stalls have such a bucket too: SeaweedFS keeps what is written over, and
fills the disk in time.

Memory is what the process has more (RssAnon and RssShmem), at the most, while it saves in waves of a cap, than before
it made its first wave.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import load, stall_job
from bench.parts import BUCKET, Lab, Node
from bench.peer_process import PeerProcess
from bench.report import Result, quantity
from bench.row import MIB, Row
from bench.rows.loader import peer_env, peers_python
from bench.servers import MissingProgram
from bench.stats import Measure, compared, faster

TENSORS = 20
OWN_JOB = "dcp.async_save, process"  # needs no package that we do not have
STEPS = 5
STEP_S = 0.1  # about; a step is so many multiplications
READERS = 8  # connections of the plain reads from the bucket
WATCHDOG_S = 60.0  # of the training: a tenth of NCCL's
CAP_SHARE = 4  # the cap of the waves is this part of the state
LOOK_S = 0.002  # between looks at the memory


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise load.LoadFailed(f"{name} is not here ({error}): pip install 'forebay[torch]'") from None


def _state(size_bytes: int) -> dict[str, Any]:
    torch = _module("torch")
    return {"model": {f"w{number}": torch.randn(size_bytes // TENSORS // 4) for number in range(TENSORS)}}


def _size(lab: Lab, row: Row) -> int:
    (objects,) = row.quick if lab.quick else row.objects
    return objects.bytes_total


def _rounds(lab: Lab, row: Row) -> int:
    return 2 if lab.quick else row.rounds


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what dcp warns of: that there is one rank, and that it writes over its last checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@contextmanager
def _saver(node: Node, place: str, **more: Any) -> Iterator[Any]:
    with _module("forebay.torch").Checkpointer(place, url=node.endpoint, keep=1, **more) as checkpoints:
        yield checkpoints


def _settle(lab: Lab, node: Node, size_bytes: int) -> None:
    """Nothing is under way of what was saved before, and the kernel has memory at hand."""
    node.flush("runs")
    os.sync()
    lab.prime_memory(size_bytes)


# --- sides -----------------------------------------------------------------------------------------------------------
class Copy:
    """One copy of a state to memory that was touched before; `pinned` for a GPU, where it is only queued."""

    def __init__(self, state: dict[str, Any], *, pinned: bool = False) -> None:
        torch = _module("torch")
        self._sources = [tensor.view(torch.uint8) for tensor in state["model"].values()]
        self._queues = pinned
        self.bytes = torch.zeros(sum(source.numel() for source in self._sources), dtype=torch.uint8, pin_memory=pinned)

    def __call__(self) -> float:
        began_s = time.perf_counter()
        for source, part in self._pairs():
            part.copy_(source, non_blocking=self._queues)
        return time.perf_counter() - began_s

    def back(self) -> None:
        """The other way."""
        for source, part in self._pairs():
            source.copy_(part, non_blocking=self._queues)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        at = 0
        for source in self._sources:
            yield source, self.bytes[at : at + source.numel()]
            at += source.numel()


def written(path: Path, data: memoryview) -> float:
    """Seconds to write and sync it, as a program that does nothing else."""
    began_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), MIB):
            file.write(data[at : at + MIB])
        os.fsync(file.fileno())
    took_s = time.perf_counter() - began_s
    path.unlink()
    return took_s


def _fsspec(node: Node, lab: Lab, state: dict[str, Any]) -> float:
    files = _module("forebay.fsspec.filesystem").ForebayFileSystem(endpoint_url=node.endpoint, skip_instance_cache=True)
    began_s = time.perf_counter()
    with files.open("runs/peer.pt", "wb") as file:
        _module("torch").save(state, file)
    return time.perf_counter() - began_s


def _dcp(node: Node, lab: Lab, state: dict[str, Any]) -> float:
    dcp = _module("torch.distributed.checkpoint")
    began_s = time.perf_counter()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(lab.dir / "dcp"), no_dist=True)
    return time.perf_counter() - began_s


def _dcp_async(node: Node, lab: Lab, state: dict[str, Any]) -> float:
    dcp = _module("torch.distributed.checkpoint")
    began_s = time.perf_counter()
    saved = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(lab.dir / "dcp-async"), no_dist=True)
    took_s = time.perf_counter() - began_s
    saved.result()
    return took_s


PEERS = {"torch.save, fsspec": _fsspec, "dcp.save": _dcp, "dcp.async_save": _dcp_async}


def _jobs(stack: ExitStack, lab: Lab, node: Node, size_bytes: int) -> tuple[dict[str, PeerProcess], tuple[str, ...]]:
    """Peers in processes of their own, after a save that does not count; and who is missing."""
    folder = lab.dir / "stalls"
    folder.mkdir()
    work = {"folder": str(folder), "bucket": "connector", "size_bytes": size_bytes}
    node.add_local("connector", durability="disk")
    jobs: dict[str, PeerProcess] = {}
    notes: tuple[str, ...] = ()
    for side in stall_job.SIDES:
        try:
            python = sys.executable if side == OWN_JOB else peers_python()
        except MissingProgram as error:
            notes += (f"without {side}: {error}",)
            continue
        jobs[side] = stack.enter_context(PeerProcess(lab, stall_job, python, side, work, peer_env(node.endpoint)))
        jobs[side].round()
    return jobs, notes


def _after(lab: Lab, node: Node) -> None:
    """Nothing is left of what peers saved."""
    for left in (lab.dir / "stalls").iterdir():
        shutil.rmtree(left)
    with node.client() as client:
        for key in [entry.key for page in client.list_pages("connector", "") for entry in page.entries]:
            client.delete("connector", key)


# --- rows ------------------------------------------------------------------------------------------------------------
def save(lab: Lab, row: Row) -> Result:
    """The stall of a save, when it counts, and the memory that it takes."""
    size_bytes = _size(lab, row)
    state = _state(size_bytes)
    took: dict[str, list[float]] = {name: [] for name in ("copy", "stall", "durable", "write", *PEERS)}
    with _quiet(), ExitStack() as stack, lab.node(core=None) as bucket, lab.node(core=None) as node:
        bucket.add_local(BUCKET, durability="memory")
        node.add_bucket("runs", lab, bucket.endpoint, write="back")
        jobs, notes = _jobs(stack, lab, node, size_bytes)
        took |= {name: [] for name in jobs}
        memory = _memory(row, node, state, size_bytes // CAP_SHARE)
        copy = Copy(state)
        with _saver(node, "runs/bench") as checkpoints:
            checkpoints.save(0, state, wait=True)  # makes the memory of the copy, once for a job
            for turn in range(_rounds(lab, row)):
                _settle(lab, node, size_bytes)
                took["copy"].append(min(copy(), copy()))
                began_s = time.perf_counter()
                handle = checkpoints.save(turn + 1, state)
                took["stall"].append(time.perf_counter() - began_s)
                handle.durable()
                took["durable"].append(time.perf_counter() - began_s)
                _settle(lab, node, size_bytes)
                took["write"].append(written(lab.dir / "written", memoryview(copy.bytes.numpy())))
                for name, peer in PEERS.items():
                    _settle(lab, node, size_bytes)
                    took[name].append(peer(node, lab, state))
                for name, job in jobs.items():
                    _settle(lab, node, size_bytes)
                    took[name].append(job.round()["stall_s"])
                    _after(lab, node)
    peers = (*PEERS, *jobs)
    measures = (*_save_measures(row, took, peers), memory)
    notes += tuple(f"stall of {name}: {_said(took[name])}" for name in peers)
    return Result(row, measures, notes=notes, extra={"seconds": took})


def _said(seconds: list[float]) -> str:
    low, middle, high = (quantity(value, "s") for value in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle} ({low} to {high})"


def _save_measures(row: Row, took: dict[str, list[float]], peers: tuple[str, ...]) -> tuple[Measure, ...]:
    best = min(peers, key=lambda name: statistics.median(took[name]))
    return (
        compared("stall / copy", "s", row.goals["stall / copy"], took["stall"], took["copy"], "one copy"),
        compared("stall / peer", "s", row.goals["stall / peer"], took["stall"], took[best], best),
        compared("durable / write", "s", row.goals["durable / write"], took["durable"], took["write"], "write+fsync"),
    )


def _memory(row: Row, node: Node, state: dict[str, Any], cap_bytes: int) -> Measure:
    with _saver(node, "runs/waves", staging_bytes=cap_bytes) as checkpoints:
        checkpoints.save(0, {"nothing": 0}, wait=True)  # connections, threads
        before = _own_bytes()
        done, most = threading.Event(), [0]

        def look() -> None:
            while not done.wait(LOOK_S):
                most[0] = max(most[0], _own_bytes())

        looker = threading.Thread(target=look)
        looker.start()
        try:
            for step in (1, 2):
                checkpoints.save(step, state, wait=True)
        finally:
            done.set()
            looker.join()
    return compared(
        "memory / cap", "MiB", row.goals["memory / cap"], [(most[0] - before) / MIB], [cap_bytes / MIB], "the cap"
    )


def _own_bytes() -> int:
    """Memory that is no file's: of this process alone, and what a node may read."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    if len(found) != 2:
        raise load.LoadFailed("this kernel does not say RssAnon and RssShmem")
    return sum(found)


def drain(lab: Lab, row: Row) -> Result:
    """Five steps of training while a save drains, beside the five before it."""
    torch = _module("torch")
    size_bytes = _size(lab, row)
    state = _state(size_bytes)
    before: list[float] = []
    during: list[float] = []
    left: list[int] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            lab.node(core=None) as bucket,
            lab.remote(row.link, bucket=bucket) as remote,
            lab.node(core=None) as node,
            _saver(node, "runs/bench") as checkpoints,
        ):
            bucket.add_local(BUCKET, durability="memory")
            node.add_bucket("runs", lab, remote.endpoint, write="back")
            remote.give_way()
            checkpoints.save(0, state, wait=True)
            step = Step(torch)
            for turn in range(_rounds(lab, row)):
                _settle(lab, node, size_bytes)
                before.append(sum(step() for _ in range(STEPS)))
                handle = checkpoints.save(turn + 1, state)
                during.append(sum(step() for _ in range(STEPS)))
                left.append(size_bytes - handle.sent_bytes)
                handle.durable()
    finally:
        torch.set_num_threads(threads)
    shares = ", ".join(f"{max(0, bytes_left) / size_bytes:.0%}" for bytes_left in left)
    notes = (f"not yet sent when the fifth step ended, by round: {shares}",)
    measure = compared("steps / before", "s", row.goals["steps / before"], during, before, "before the save")
    return Result(row, (measure,), notes=notes)


class Step:
    """So many multiplications that a call takes about STEP_S. Returns its seconds."""

    def __init__(self, torch: Any) -> None:
        self._matrix, self._torch, self._count = torch.randn(384, 384), torch, 8
        took_s = min(self() for _ in range(5))
        self._count = max(1, round(self._count * STEP_S / took_s))

    def __call__(self) -> float:
        began_s = time.perf_counter()
        for _ in range(self._count):
            self._torch.mm(self._matrix, self._matrix)
        return time.perf_counter() - began_s


def restore(lab: Lab, row: Row) -> Result:
    """A restore from a node that has everything, beside reads of a file, and dcp.load from this machine's disk."""
    size_bytes = _size(lab, row)
    state = _state(size_bytes)
    found = {"model": {name: tensor.clone().zero_() for name, tensor in state["model"].items()}}
    file, memory = lab.dir / "bare", Copy(state)
    memory()
    file.write_bytes(memoryview(memory.bytes.numpy()))
    dcp = _module("torch.distributed.checkpoint")
    with _quiet():
        dcp.save(state, storage_writer=dcp.FileSystemWriter(lab.dir / "dcp"), no_dist=True)
    ours: list[float] = []
    bare: list[float] = []
    peer: list[float] = []
    with _quiet(), lab.node(core=None) as node, _saver(node, "runs/bench") as checkpoints:
        node.add_bucket("runs", lab, write="back")
        checkpoints.save(1, state, wait=True)
        node.flush("runs")
        for turn in range(_rounds(lab, row) + 1):
            times = (_read(file, memory), _restored(checkpoints, found), _loaded(dcp, lab.dir / "dcp", state))
            if turn:  # the first finds nothing warm
                for kept, took_s in zip((bare, ours, peer), times, strict=True):
                    kept.append(took_s)
    _compare(found, state)
    return Result(
        row,
        (
            faster("reads / restore", "s", row.goals["reads / restore"], ours, bare, "reads"),
            faster("dcp.load / restore", "s", row.goals["dcp.load / restore"], ours, peer, "dcp.load"),
        ),
    )


def watchdog(lab: Lab, row: Row) -> Result:
    """The longest that training stands still while a save goes to a bucket that takes longer than its watchdog."""
    state = _state(_size(lab, row))
    longest_s: list[float] = []
    said: list[str] = []
    with lab.remote(row.link) as remote, lab.node(core=None) as node, _saver(node, "runs/bench") as checkpoints:
        node.add_bucket("runs", lab, remote.endpoint, write="back")
        step = Step(_module("torch"))
        for turn in range(_rounds(lab, row)):
            gap_s, bucket_s, words = _watched(checkpoints, turn, state, step)
            if not lab.quick and bucket_s < WATCHDOG_S:
                raise load.LoadFailed(
                    f"the bucket had it after {bucket_s:.0f} s, before the watchdog would have looked"
                )
            longest_s.append(gap_s)
            said.append(words)
    goal = row.goals["stands still / watchdog"]
    longest = compared("stands still / watchdog", "s", goal, longest_s, [WATCHDOG_S] * len(longest_s), "the watchdog")
    return Result(row, (longest,), notes=tuple(said))


def _watched(checkpoints: Any, number: int, state: dict[str, Any], step: Step) -> tuple[float, float, str]:
    """Train from a save until the bucket has it: the longest that training stood still, when the bucket had it, and
    more in words."""
    gap_s, steps = 0.0, 0
    began_s = last_s = time.perf_counter()
    handle = checkpoints.save(number, state)
    with ThreadPoolExecutor(1) as waiting:
        in_bucket = waiting.submit(handle.durable, "bucket")
        while not in_bucket.done():
            step()
            now_s = time.perf_counter()
            gap_s, steps, last_s = max(gap_s, now_s - last_s), steps + 1, now_s
        in_bucket.result()
    bucket_s = time.perf_counter() - began_s
    counted_s = (handle.ended_s or 0.0) - handle.staged_s + handle.stall_s
    return gap_s, bucket_s, f"{steps} steps; the node had it after {counted_s:.1f} s, the bucket after {bucket_s:.0f} s"


def cold(lab: Lab, row: Row) -> Result:
    """A restore by a node that has nothing of it, beside reads of the same objects from the bucket."""
    size_bytes = _size(lab, row)
    state = _state(size_bytes)
    found = {"model": {name: tensor.clone().zero_() for name, tensor in state["model"].items()}}
    ours: list[float] = []
    plain: list[float] = []
    with lab.node(core=None) as node, _saver(node, "runs/cold") as checkpoints:
        node.add_bucket("runs", lab, write="back")
        manifest = checkpoints.save(1, state, wait=True).durable("bucket")
        names = [f"/{BUCKET}/{checkpoints.repository.prefix}{name}" for name, _ in manifest.objects()]
        with lab.remote(row.link) as remote:
            for turn in range(_rounds(lab, row)):
                lab.prime_memory(size_bytes)
                plain.append(_plain(remote.endpoint, names))
                lab.prime_memory(size_bytes)
                bucket = f"cold-{turn}"
                node.add_bucket(bucket, lab, remote.endpoint)
                with _saver(node, f"{bucket}/cold") as restoring:
                    ours.append(_restored(restoring, found))
                with node.client() as client:
                    client.bucket_delete(bucket)
    _compare(found, state)
    return Result(row, (faster("reads / restore", "s", row.goals["reads / restore"], ours, plain, "reads"),))


def _plain(endpoint: str, names: list[str]) -> float:
    """Seconds to read these objects, by READERS connections that take them in turn."""
    paths = iter(names)  # next() on it is atomic

    def some(_: int) -> None:
        with load.Reader(endpoint) as reader:
            for path in paths:
                reader.get(path)

    with ThreadPoolExecutor(READERS) as pool:
        began_s = time.perf_counter()
        list(pool.map(some, range(READERS)))
        return time.perf_counter() - began_s


def _compare(found: dict[str, Any], state: dict[str, Any]) -> None:
    torch = _module("torch")
    if not all(torch.equal(found["model"][name], tensor) for name, tensor in state["model"].items()):
        raise load.LoadFailed("what was restored is not what was saved")


def _read(file: Path, memory: Copy) -> float:
    began_s = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        view = memoryview(memory.bytes.numpy())
        while view:
            view = view[opened.readinto(view) or len(view) :]
    return time.perf_counter() - began_s


def _restored(checkpoints: Any, found: dict[str, Any]) -> float:
    began_s = time.perf_counter()
    checkpoints.restore(found)
    return time.perf_counter() - began_s


def _loaded(dcp: Any, folder: Path, state: dict[str, Any]) -> float:
    began_s = time.perf_counter()
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return time.perf_counter() - began_s
