"""A training job that is killed and goes on, with any of the loaders: `python resume_job.py LOADER`, the work as JSON
on stdin. One process for each rank.

Theory. The same loop for every side, so that what differs is the loader. It runs in the peers' own interpreter for
theirs and in ours for ours, and imports nothing of Forebay unless it is Forebay's turn. A step: take a batch, note
which samples it gave, wait for the other ranks, write the loader's state to a file of its own (fsync, then rename). A
step counts when the state of every rank is there; what came after is rolled back with the model, as in any job.

Each peer resumes as its documentation says: mosaicml-streaming and litdata by the `state_dict` of their own loaders;
webdataset and s3torchconnector, which have none, in torchdata's StatefulDataLoader, with everything seeded that can be.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

torch = importlib.import_module("torch")


def id_of(data: Any) -> int:
    """A sample's number: its first eight bytes."""
    return int(bytes(data[:8]))


def collate(ids: list[int]) -> dict[str, Any]:
    return {"id": torch.tensor(ids)}


def peers() -> Any:
    """The module beside this one, which also runs as a script."""
    return importlib.import_module("bench.peers" if __package__ else "peers")


# --- the loaders -----------------------------------------------------------------------------------------------------
def stateful(dataset: Any, work: dict[str, Any], **options: Any) -> Any:
    """torchdata's loader, for those without a state of their own."""
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(
        dataset, num_workers=work["workers"], collate_fn=collate, **options
    )


def webdataset(work: dict[str, Any]) -> Any:
    dataset = (
        peers()
        .web_shards(work)
        .shuffle(1000, seed=work["seed"])
        .map(of_webdataset)
        .batched(work["batch"], collation_fn=list)
    )
    return stateful(dataset, work, batch_size=None)


def of_webdataset(sample: dict[str, Any]) -> int:
    return id_of(sample["bin"])


def streaming(work: dict[str, Any]) -> Any:
    mosaic = peers().import_streaming()
    mosaic.base.util.clean_stale_shared_memory()  # as its documentation advises for a job that begins after a crash

    class Numbers(mosaic.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> int:
            return id_of(super().__getitem__(index)["data"])

    dataset = Numbers(
        remote=f"s3://{work['bucket']}/{work['mds']}",
        local=work["cache"],
        shuffle=True,
        shuffle_seed=work["seed"],
        batch_size=work["batch"],
    )
    return mosaic.StreamingDataLoader(
        dataset, batch_size=work["batch"], num_workers=work["workers"], collate_fn=collate
    )


def litdata(work: dict[str, Any]) -> Any:
    lit = importlib.import_module("litdata")
    peers().allow_plain_http()

    class Numbers(lit.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> int:
            return id_of(super().__getitem__(index))

    dataset = Numbers(
        f"s3://{work['bucket']}/{work['lit']}",
        cache_dir=work["cache"],
        shuffle=True,
        drop_last=False,  # its default depends on the number of ranks, which its state then refuses
        seed=work["seed"],
        storage_options={"endpoint_url": work["endpoint"], "aws_access_key_id": "any", "aws_secret_access_key": "any"},
    )
    return lit.StreamingDataLoader(dataset, batch_size=work["batch"], num_workers=work["workers"], collate_fn=collate)


def s3torchconnector(work: dict[str, Any]) -> Any:
    connector = importlib.import_module("s3torchconnector")
    samplers = importlib.import_module("torchdata.stateful_dataloader.sampler")
    dataset = connector.S3MapDataset.from_prefix(
        f"s3://{work['bucket']}/{work['objects']}",
        region="us-east-1",
        endpoint=work["endpoint"],
        transform=of_s3,
        s3client_config=connector.S3ClientConfig(force_path_style=True),
    )
    sampler = samplers.StatefulDistributedSampler(
        dataset, num_replicas=work["world"], rank=work["rank"], shuffle=True, seed=work["seed"]
    )
    return stateful(dataset, work, batch_size=work["batch"], sampler=sampler)


def of_s3(reader: Any) -> int:
    return id_of(reader.read())


def forebay(work: dict[str, Any]) -> Any:
    ours = importlib.import_module("forebay.torch")
    dataset = ours.ShardDataset(work["place"], url=work["url"], decode={"bin": id_of}, parts=["bin"])
    return ours.DataLoader(dataset, work["batch"], seed=work["seed"], workers=work["workers"], collate=of_forebay)


def of_forebay(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return collate([sample["bin"] for sample in samples])


LOADERS = {
    "webdataset": webdataset,
    "mosaicml-streaming": streaming,
    "litdata": litdata,
    "s3torchconnector": s3torchconnector,
    "forebay": forebay,
}


# --- the job ---------------------------------------------------------------------------------------------------------
def save(state: Any, path: Path) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def named_shared_memory() -> list[str]:
    """Files of /dev/shm that this process has in memory and that have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[5] for line in lines if " /dev/shm/" in line and not line.endswith("(deleted)")})


def perish(work: dict[str, Any], step: int, moment: str) -> None:
    if work["dies_at"] == [work["rank"], step, moment]:
        Path(work["folder"], "shared-memory.json").write_text(json.dumps(named_shared_memory()))
        os.kill(os.getpid(), signal.SIGKILL)


def train(name: str, work: dict[str, Any]) -> None:
    """One epoch, or what is left of it, or until death."""
    folder, rank = Path(work["folder"]), work["rank"]
    torch.set_num_threads(1)
    if work["world"] > 1:
        # A file, since a port that is free when it is chosen may be another program's when rank 0 listens.
        meeting = f"file://{folder.absolute()}/meeting"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=work["world"])
    batches = LOADERS[name](work)
    if work["state"]:
        batches.load_state_dict(torch.load(work["state"], weights_only=False))
    with (folder / f"notes-{rank}").open("a", buffering=1) as notes:
        for step, batch in enumerate(batches, 1):
            notes.write(json.dumps(batch["id"].tolist()) + "\n")
            if work["dies_at"]:  # only then are states needed, and that ranks agree on what was done
                if work["world"] > 1:
                    torch.distributed.barrier()
                perish(work, step, "before saving")
                save(batches.state_dict(), folder / f"state-{rank}-{step}")
                perish(work, step, "after saving")
    if work["world"] > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def prepare(work: dict[str, Any]) -> None:
    """MDS shards and litdata's chunks of the samples, as many as there are tar shards. Prints the versions."""
    writer = peers().import_streaming().MDSWriter
    paths = sorted(str(path) for path in Path(work["files"]).iterdir())
    with writer(out=work["mds"], columns={"data": "bytes"}, size_limit=work["shard_bytes"]) as shards:
        for path in paths:
            shards.write({"data": read_file(path)})
    importlib.import_module("litdata").optimize(
        fn=read_file, inputs=paths, output_dir=work["lit"], num_workers=1, chunk_size=work["shard_samples"]
    )
    version = importlib.import_module("importlib.metadata").version
    names = [name for name in LOADERS if name != "forebay"]
    Path(work["versions"]).write_text(json.dumps({name: version(name) for name in [*names, "torchdata", "torch"]}))


def read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def main() -> None:
    work = json.load(sys.stdin)
    if sys.argv[1] == "prepare":
        prepare(work)
    else:
        train(sys.argv[1], work)


if __name__ == "__main__":
    main()
