"""Epochs of `forebay.torch`, in a process of its own: `python -m bench.trainee`, the work as JSON on stdin; or
only the first batch of an epoch: `python -m bench.trainee first`, or `first-of-shards`; or `members`, what is in the
shards and nothing else.

The counterpart of `peers.py`: the same work, the same lines of JSON, the same checks.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from typing import Any

from bench.peers import check_first, collate, decode
from forebay import Client
from forebay.torch import DataLoader, ObjectDataset, Pictures, ShardDataset

PICTURES = Pictures()


def of_object(key: str, data: Any, how: str) -> int:
    return of_shard(data, how)


def of_shard(data: Any, how: str) -> int:
    """Pictures by the decoder that ships."""
    return int(PICTURES(data).shape[1]) if how == "image" else decode(data, how)


def loader(work: dict[str, Any]) -> Any:
    """The loader that the work asks for, with the defaults that the documentation gives."""
    how, dataset = work["decode"], None
    if work["kind"] == "objects":
        made = functools.partial(of_object, how=how) if how else None
        dataset = ObjectDataset(work["place"], url=work["url"], decode=made)
    else:
        decoders = {"jpg": functools.partial(of_shard, how=how)} if how else {}  # {}: bytes, as the peers give
        dataset = ShardDataset(work["place"], url=work["url"], decode=decoders, parts=["jpg"])
    return DataLoader(dataset, work["batch"], seed=work["seed"], workers=work["workers"], collate=collate)


def first_batch(work: dict[str, Any]) -> None:
    began = time.perf_counter()
    dataset = ObjectDataset(work["place"], url=work["url"])
    with DataLoader(dataset, work["batch"], seed=work["seed"], workers=work["workers"], collate=collate) as batches:
        batch = next(iter(batches))
        taken_s = time.perf_counter() - began
    check_first(batch, len(dataset), work)
    print(json.dumps({"first_batch_s": taken_s}), flush=True)


def first_of_shards(work: dict[str, Any]) -> None:
    began = time.perf_counter()
    dataset = ShardDataset(work["place"], url=work["url"], decode={})
    with DataLoader(dataset, work["batch"], seed=work["seed"], collate=list) as batches:
        batches.set_epoch(work["epoch"])
        batch = next(iter(batches))
        taken_s = time.perf_counter() - began
    names = [sample["__key__"] for sample in batch]
    told = {"first_batch_s": taken_s, "samples": len(set(names)), "in_order": names == sorted(names)}
    print(json.dumps(told | {"known": dataset.known_samples}), flush=True)


def members_of_shards(work: dict[str, Any]) -> None:
    began = time.perf_counter()
    with Client(work["url"]) as client:
        found = sum(len(client.members(work["bucket"], key)) for key in work["keys"])
    print(json.dumps({"members_s": time.perf_counter() - began, "members": found}), flush=True)


def main() -> None:
    work = json.load(sys.stdin)
    if sys.argv[1:] == ["first-of-shards"]:
        first_of_shards(work)
        return
    if sys.argv[1:] == ["members"]:
        members_of_shards(work)
        return
    if sys.argv[1:] == ["first"]:
        first_batch(work)
        return
    began = time.perf_counter()
    with loader(work) as batches:
        for epoch in range(work["epochs"]):
            if epoch:
                began = time.perf_counter()
            count, first_s = 0, 0.0
            for batch in batches:
                first_s = first_s or time.perf_counter() - began
                count += len(batch)
            taken_s = time.perf_counter() - began
            if count != work["samples"]:
                raise SystemExit(f"epoch {epoch + 1} gave {count} of {work['samples']} samples")
            line = {"epoch": epoch + 1, "samples": count, "seconds": taken_s, "first_batch_s": first_s}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
