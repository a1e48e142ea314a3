"""Feeds an emulated accelerator: `python job.py CLIENT`, the work as JSON on the first line of stdin, and
then for each epoch the seconds of a step's computation on a line of its own.

Theory. As MLPerf Storage does it, a step computes by sleeping, while the client fetches the next batches; what is
judged is accelerator utilisation, the time of computing over that of the epoch without its first step. A sample's bytes
are all received, and dropped. Each client is set as its documentation says, with what was fastest on two cores. The
peers live in an environment of their own, so this file imports nothing of Forebay for them.

Invariant. An epoch that does not yield the bytes of every sample is an error, not a number.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

WORKERS = 2  # one for each core, of those clients that work in processes


def sizes(batch: list[int]) -> list[int]:
    """Nothing to collate."""
    return batch


def size_of(key: str, data: Any) -> int:
    return len(data)


def forebay(work: dict[str, Any]) -> Any:
    """Our loader as it is by default, with threads; where nobody is a node, with the reader that stands in for one."""
    ours = importlib.import_module("forebay.torch")
    source = None if work["is_node"] else Served(work)
    dataset = ours.ObjectDataset(work["bucket"], url=work["endpoint"], decode=size_of, source=source)
    repeated = ours.Mixture([dataset], repeats=[work["repeats"]])
    return ours.DataLoader(repeated, work["batch"], seed=work["seed"], prefetch=work["ahead"], collate=sizes)


class Served:
    """Objects that nginx serves, for our own reader of buckets, which cannot list there."""

    def __init__(self, work: dict[str, Any]) -> None:
        types = importlib.import_module("forebay.core.types")
        options = {"endpoint": work["endpoint"], "region": "us-east-1", "skip_signature": "true"}
        bucket = types.Bucket(work["bucket"], f"s3://{work['bucket']}", options=options)
        self._work, self._direct = work, importlib.import_module("forebay.torch.direct").DirectSource(bucket)

    def listing(self, bucket: str, prefix: str, id: str = "") -> Any:
        types, form = (importlib.import_module(f"forebay.core.{name}") for name in ("types", "formats.listing"))
        entries = [types.ListEntry(key, size, "", 0.0) for key, size in self._work["sizes"].items()]
        return form.Listing(form.build(bucket, prefix, [form.pack(entries)]))

    def room_bytes(self, bucket: str, *, cluster: bool = False) -> None:
        return None

    def hints(self, job: str, listing: Any) -> None:
        return None

    def get_many(self, items: Sequence[Any]) -> Any:
        return importlib.import_module("forebay.torch.source").Answers(self._direct.get_many(items))


def torch_loader(dataset: Any, work: dict[str, Any]) -> Any:
    return importlib.import_module("torch.utils.data").DataLoader(
        dataset,
        batch_size=work["batch"],
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
        prefetch_factor=max(1, work["ahead"] // WORKERS),
        collate_fn=sizes,
    )


def uris(work: dict[str, Any]) -> list[str]:
    repeats: int = work["repeats"]
    return [f"s3://{work['bucket']}/{key}" for key in work["sizes"]] * repeats


def s3torchconnector(work: dict[str, Any]) -> Any:
    connector = importlib.import_module("s3torchconnector")
    dataset = connector.S3MapDataset.from_objects(
        uris(work),
        region="us-east-1",
        endpoint=work["endpoint"],
        transform=size_read,
        s3client_config=connector.S3ClientConfig(force_path_style=True),
    )
    return torch_loader(dataset, work)


def size_read(reader: Any) -> int:
    return len(reader.read())


class Dlio:
    """Objects by s3dlio, a batch with one call. It is imported in the workers: its threads do not survive a fork."""

    def __init__(self, uris: Sequence[str]) -> None:
        self._uris = uris

    def __len__(self) -> int:
        return len(self._uris)

    def __getitems__(self, indices: Sequence[int]) -> list[int]:
        wanted = [self._uris[index] for index in indices]
        got = importlib.import_module("s3dlio").get_many(wanted, max_in_flight=len(wanted))
        return [len(memoryview(data)) for _, data in got]


def s3dlio(work: dict[str, Any]) -> Any:
    return torch_loader(Dlio(uris(work)), work)


CLIENTS = {"forebay": forebay, "s3torchconnector": s3torchconnector, "s3dlio": s3dlio}


def epoch(batches: Any, work: dict[str, Any], compute_s: float) -> dict[str, float]:
    """Steps that count, how long they took, and the accelerator's utilisation."""
    steps, size_bytes, began_s = 0, 0, 0.0
    for batch in batches:
        size_bytes += sum(batch)
        time.sleep(compute_s)
        began_s = began_s or time.perf_counter()  # with the second step
        steps += 1
    run_s = time.perf_counter() - began_s
    wanted_bytes = sum(work["sizes"].values()) * work["repeats"]
    if size_bytes != wanted_bytes or steps < 2:
        raise SystemExit(f"{steps} steps gave {size_bytes} bytes, not {wanted_bytes}")
    return {"steps": steps - 1, "run_s": run_s, "utilisation": (steps - 1) * compute_s / run_s}


def main() -> None:
    work = json.loads(sys.stdin.readline())
    batches = CLIENTS[sys.argv[1]](work)
    for line in sys.stdin:
        print(json.dumps(epoch(batches, work, float(line))), flush=True)


if __name__ == "__main__":
    main()
