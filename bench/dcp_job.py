"""Saves and loads of `torch.distributed.checkpoint` by one storage: `python dcp_job.py SIDE`, the work as JSON on the
first line of stdin, and then one line for each round.

Theory. The same state and the same calls for every side, so that what differs is the storage. It runs in the peers' own
interpreter for theirs and in ours for ours, and imports nothing of Forebay unless it is Forebay's turn. A round is a
save, and a load into new memory; both are timed, and then compared.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from typing import Any

TENSORS = 20


def storage(side: str, work: dict[str, Any], number: int) -> tuple[Any, Any]:
    """Writer and reader of one round, used as their documentation says."""
    if side == "forebay":
        forebay = importlib.import_module("forebay.torch")
        place = f"{work['bucket']}/dcp/step-{number}"
        return forebay.StorageWriter(place, url=work["endpoint"]), forebay.StorageReader(place, url=work["endpoint"])
    if side == "torch":
        dcp = importlib.import_module("torch.distributed.checkpoint")
        return dcp.FileSystemWriter(f"{work['folder']}/{number}"), dcp.FileSystemReader(f"{work['folder']}/{number}")
    connector = importlib.import_module("s3torchconnector.dcp")
    config = importlib.import_module("s3torchconnector").S3ClientConfig(force_path_style=True)
    path = f"s3://{work['bucket']}/connector/{number}/"
    return (
        connector.S3StorageWriter("us-east-1", path, s3client_config=config),
        connector.S3StorageReader("us-east-1", path, s3client_config=config),
    )


def main() -> None:
    side, work = sys.argv[1], json.loads(sys.stdin.readline())
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")  # that there is one process is meant
    state: dict[str, Any] = {
        "model": {f"w{n}": torch.randn(work["size_bytes"] // TENSORS // 4) for n in range(TENSORS)},
        "step": 1,
    }
    for number, _ in enumerate(sys.stdin):
        writer, reader = storage(side, work, number)
        began = time.perf_counter()
        dcp.save(state, storage_writer=writer)
        saved = time.perf_counter()
        into: dict[str, Any] = {
            "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
            "step": 0,
        }
        loading = time.perf_counter()
        dcp.load(into, storage_reader=reader)
        loaded = time.perf_counter()
        equal = all(torch.equal(into["model"][name], tensor) for name, tensor in state["model"].items())
        assert equal, f"{side} does not load what it saved"
        print(json.dumps({"save_s": saved - began, "load_s": loaded - loading}), flush=True)


if __name__ == "__main__":
    main()
