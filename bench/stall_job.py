"""How long others' asynchronous saves stall training: `python stall_job.py SIDE`, the work as JSON on the first line of
stdin, and then one line for each round.

Theory. Each side saves the same kind of state as its documentation says. Training stalls until its next step may change
the weights: for torch until `async_save` returns, for torch-checkpointing until its lock lets the optimizer in. A round
ends when the save is done, so that none runs beside another. torch's saver in a process of its own is made with the
first save; the rounds that count come after that.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

TENSORS = 20
Wait = Callable[[], Any]  # until a save is done
Save = Callable[[dict[str, Any], int], Wait]  # of a state in a round


def in_a_process(work: dict[str, Any]) -> Save:
    """`dcp.async_save` to this machine's disk, with the process that torch has for it."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
    distributed = importlib.import_module("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def save(state: dict[str, Any], number: int) -> Wait:
        writer = dcp.FileSystemWriter(f"{work['folder']}/process")
        kind = saver.AsyncCheckpointerType.PROCESS
        saved: Any = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
        return lambda: saved.result()

    return save


def by_the_connector(work: dict[str, Any]) -> Save:
    """`dcp.async_save` to the node as a bucket of S3."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    connector = importlib.import_module("s3torchconnector.dcp")
    config = importlib.import_module("s3torchconnector").S3ClientConfig(force_path_style=True)

    def save(state: dict[str, Any], number: int) -> Wait:
        path = f"s3://{work['bucket']}/connector/"
        writer = connector.S3StorageWriter("us-east-1", path, s3client_config=config)
        saved: Any = dcp.async_save(state, storage_writer=writer, no_dist=True)
        return lambda: saved.result()

    return save


def by_torch_checkpointing(work: dict[str, Any]) -> Save:
    """torch-checkpointing as its documentation has it for machines without CUDA. Its direct I/O is refused by ext4."""
    module = importlib.import_module("torch_checkpointing.checkpoint_manager")
    config = importlib.import_module("torch_checkpointing.config")
    staging = importlib.import_module("torch_checkpointing.staging")
    plain = staging.CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    files = importlib.import_module("torch_checkpointing.storage.filesystem")
    manager = module.CheckpointManager(
        module.CheckpointManager.Config(
            save=config.AsyncCheckpointSaverConfig(staging_config=plain),
            storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )

    def save(state: dict[str, Any], number: int) -> Wait:
        saved = manager.save(f"{work['folder']}/torch-checkpointing-{number}", state)
        with manager.lock():
            pass
        return lambda: saved.result()

    return save


SIDES = {
    "dcp.async_save, process": in_a_process,
    "dcp.async_save, s3torchconnector": by_the_connector,
    "torch-checkpointing": by_torch_checkpointing,
}


def main() -> None:
    side, work = sys.argv[1], json.loads(sys.stdin.readline())
    torch = importlib.import_module("torch")
    warnings.simplefilter("ignore")  # that there is one rank is meant
    state = {"model": {f"w{n}": torch.randn(work["size_bytes"] // TENSORS // 4) for n in range(TENSORS)}}
    save = SIDES[side](work)
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        wait = save(state, number)
        stalled = time.perf_counter()
        wait()
        done = time.perf_counter()
        print(json.dumps({"stall_s": stalled - began, "done_s": done - began}), flush=True)


if __name__ == "__main__":
    main()
