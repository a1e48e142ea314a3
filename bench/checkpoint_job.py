"""The ranks of a job that save or load, for the `checkpoint-shape` row: `python checkpoint_job.py SIDE`, the work as
JSON on the first line of stdin, and then one line for each round.

Theory. MLPerf Storage's checkpoints are saved by many processes at once, each its own part, and loaded by others. So
one process with torch forks `ranks` of them, which stay, and has all of them save or load in each round. A round takes
as long as the slowest. The state is the same for every side. It runs in the peers' own interpreter for theirs and in
ours for ours, and imports nothing of Forebay unless it is Forebay's turn. What is loaded is compared afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

TENSORS = 4  # of a rank
PR_SET_PDEATHSIG = 1
Job = tuple[Callable[[int], None], Callable[[int], None]]  # save and load a round


def state_of(rank: int, work: dict[str, Any], turn: int) -> dict[str, Any]:
    """What a rank saves in a round; its first elements say which round it is."""
    torch = importlib.import_module("torch")
    torch.manual_seed(rank)
    state = {
        f"rank{rank}.w{n}": torch.randn(work["size_bytes"] // work["ranks"] // TENSORS // 4) for n in range(TENSORS)
    }
    for tensor in state.values():
        tensor[0] = turn
    return state


class Raw:
    """A file for each rank, written and synced, and read into memory that was touched before."""

    def __init__(self, rank: int, work: dict[str, Any]) -> None:
        self._path = f"{work['folder']}/{rank}"

    def save(self, turn: int, state: dict[str, Any]) -> None:
        with open(self._path, "wb", buffering=0) as file:
            for tensor in state.values():
                view = memoryview(tensor.numpy()).cast("B")
                while view:
                    view = view[file.write(view[: 1 << 20]) :]
            os.fsync(file.fileno())

    def load(self, turn: int, into: dict[str, Any]) -> None:
        with open(self._path, "rb", buffering=0) as file:
            for tensor in into.values():
                view = memoryview(tensor.numpy()).cast("B")
                while view:
                    view = view[file.readinto(view[: 8 << 20]) or len(view) :]


class Forebay:
    """`Checkpointer`, with a state that is each rank's own."""

    def __init__(self, rank: int, work: dict[str, Any]) -> None:
        forebay = importlib.import_module("forebay.torch")
        self._saver = forebay.Checkpointer(
            f"{work['bucket']}/shape", url=work["endpoint"][work["what"]], keep=1, own=("shard",)
        )

    def save(self, turn: int, state: dict[str, Any]) -> None:
        self._saver.save(turn, {"shard": state}, wait=True)

    def load(self, turn: int, into: dict[str, Any]) -> None:
        restored = self._saver.restore({"shard": into})
        assert restored.step == turn, "the newest is restored"


class Connector:
    """`torch.distributed.checkpoint` through s3torchconnector."""

    def __init__(self, rank: int, work: dict[str, Any]) -> None:
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        self._connector = importlib.import_module("s3torchconnector.dcp")
        self._config = importlib.import_module("s3torchconnector").S3ClientConfig(force_path_style=True)
        self._path = f"s3://{work['bucket']}/shape/"

    def save(self, turn: int, state: dict[str, Any]) -> None:
        writer = self._connector.S3StorageWriter("us-east-1", self._path, s3client_config=self._config)
        self._dcp.save(state, storage_writer=writer)

    def load(self, turn: int, into: dict[str, Any]) -> None:
        reader = self._connector.S3StorageReader("us-east-1", self._path, s3client_config=self._config)
        self._dcp.load(into, storage_reader=reader)


SIDES: dict[str, Any] = {"raw": Raw, "forebay": Forebay, "s3torchconnector": Connector}


def rank_of(side: str, work: dict[str, Any], rank: int, pipe: Any) -> None:
    """One rank: does a round for each number that comes, and answers with its seconds."""
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work['meeting']}", rank=rank, world_size=work["ranks"])
    storage = SIDES[side](rank, work)
    memory = state_of(rank, work, 0)
    with contextlib.suppress(EOFError):
        while True:
            turn = pipe.recv()
            expected = state_of(rank, work, turn) if work["what"] == "load" else None
            for tensor in memory.values():
                if expected is None:
                    tensor[0] = turn
                else:
                    tensor.zero_()
            dist.barrier()
            began = time.perf_counter()
            getattr(storage, work["what"])(turn, memory)
            took = time.perf_counter() - began
            equal = expected is None or all(torch.equal(memory[name], tensor) for name, tensor in expected.items())
            assert equal, f"{side} does not load what it saved"
            expected = None  # other sides need the memory
            pipe.send(took)


def forked(side: str, work: dict[str, Any], rank: int, pipe: Any) -> None:
    """As `rank_of`; ends with the process that forked it, and what goes wrong ends all."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        rank_of(side, work, rank, pipe)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    side, work = sys.argv[1], json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore")
    importlib.import_module("torch.distributed.checkpoint")
    context = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(work["ranks"]):
        ours, theirs = context.Pipe()
        context.Process(target=forked, args=(side, work, rank, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for turn, _ in enumerate(sys.stdin):
        for pipe in pipes:
            pipe.send(turn)
        print(json.dumps({"seconds": max(pipe.recv() for pipe in pipes)}), flush=True)


if __name__ == "__main__":
    main()
