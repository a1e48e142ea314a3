"""Epochs of one peer's loader, in the peers' own interpreter: `python peers.py PEER`, the work as JSON on stdin; or
only the first batch of an epoch: `python peers.py first PEER`.

Theory. The peers pin other versions of shared libraries than Forebay's tests do (botocore above all), so they live in
an environment of their own (`make peers`), and this file imports nothing of Forebay. It prints one JSON line for each
epoch: samples, seconds from asking for the first batch to the end, seconds to the first batch. Making the dataset
object counts to the first epoch, since that is where some of them list or download. Each peer is used as its
documentation says for object storage: shards for those that have them, a local cache where they offer one, persistent
worker processes, and whole batches left as lists, so that nobody pays for collating.

Invariant. An epoch that does not yield every sample once is an error, not a number, and so is a first batch that is
not one of shuffled samples of the data set.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.metadata
import io
import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any


def decode(data: bytes, how: str) -> int:
    """What the training would do with a sample's bytes. `image`: pillow, by which the peers' own decoders work; `fast`:
    what ships with Forebay."""
    if how == "fast":
        return int(importlib.import_module("simplejpeg").decode_jpeg(data).shape[0])
    if how == "image":
        image = importlib.import_module("PIL.Image").open(io.BytesIO(data)).convert("RGB")
        return int(importlib.import_module("numpy").asarray(image).shape[0])
    return len(data)


def collate(samples: list[Any]) -> list[Any]:
    """Nothing: batches are lists."""
    return samples


def loader(dataset: Any, work: dict[str, Any]) -> Any:
    torch_data = importlib.import_module("torch.utils.data")
    workers = work["workers"]
    return torch_data.DataLoader(
        dataset,
        batch_size=work["batch"],
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=collate,
        shuffle=work.get("map_style", False) or None,
    )


def web_shards(work: dict[str, Any]) -> Any:
    """The shards as its documentation says for object storage, each rank and worker with shards of its own."""
    wds = importlib.import_module("webdataset")
    urls = [f"pipe:curl -s -f {work['endpoint']}/{work['bucket']}/{key}" for key in work["shards"]]
    return wds.WebDataset(
        urls,
        cache_dir=work["cache"],
        shardshuffle=len(urls),
        nodesplitter=wds.split_by_node,
        workersplitter=wds.split_by_worker,
        empty_check=False,
        seed=work["seed"],
    )


def webdataset(work: dict[str, Any]) -> Any:
    wds = importlib.import_module("webdataset")
    dataset = (
        web_shards(work)
        .shuffle(1000)
        .map(functools.partial(of_webdataset, how=work["decode"]))
        .batched(work["batch"], collation_fn=collate)
    )
    return wds.WebLoader(dataset, batch_size=None, num_workers=work["workers"], persistent_workers=work["workers"] > 0)


def of_webdataset(sample: dict[str, Any], how: str) -> int:
    return decode(sample["jpg"], how)


def loads(module: str) -> bool:
    """Whether it can be imported; if not, nothing of it stays."""
    try:
        importlib.import_module(module)
    except (ImportError, RuntimeError):  # a wheel for another build of torch
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            del sys.modules[name]
        return False
    return True


def import_streaming() -> Any:
    """The package names classes of torchvision, whose wheel wants a CUDA build of torch: where that is not here, or
    cannot be loaded, it gets empty ones while it is imported."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    absent = not loads("torchvision")
    if absent:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        setattr(sys.modules["torchvision.datasets"], "VisionDataset", object)  # noqa: B010 - not an attribute of modules
        setattr(sys.modules["torchvision.transforms.functional"], "to_tensor", None)  # noqa: B010
    try:
        return importlib.import_module("streaming")
    finally:
        for name in names if absent else ():
            del sys.modules[name]


def streaming(work: dict[str, Any]) -> Any:
    mosaic = import_streaming()
    mosaic.base.util.clean_stale_shared_memory()

    class Decoded(mosaic.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> int:
            return decode(super().__getitem__(index)["data"], work["decode"])

    dataset = Decoded(
        remote=f"s3://{work['bucket']}/{work['mds']}",
        local=work["cache"],
        shuffle=True,
        shuffle_seed=work["seed"],
        batch_size=work["batch"],
    )
    forget_connections(dataset)
    return loader(dataset, work)


def forget_connections(dataset: Any) -> None:
    """Drop the connection by which Mosaic's index was read. Workers that are forked would share it, and read each
    other's answers: incomplete shards, and waits of a minute, which is boto3's patience. Over TLS, as its users have
    it, such a connection fails at once and is made anew."""
    for stream in dataset.streams:
        stream._downloader.clean_up()


def allow_plain_http() -> None:
    """litdata reaches a bucket over plain HTTP only if its client is told so, for which it has no option."""
    importlib.import_module("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def litdata(work: dict[str, Any]) -> Any:
    lit = importlib.import_module("litdata")
    allow_plain_http()

    class Decoded(lit.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: int) -> int:
            return decode(super().__getitem__(index), work["decode"])

    dataset = Decoded(
        f"s3://{work['bucket']}/{work['lit']}",
        cache_dir=work["cache"],
        shuffle=True,
        seed=work["seed"],
        storage_options={"endpoint_url": work["endpoint"], "aws_access_key_id": "any", "aws_secret_access_key": "any"},
        batch_decode=0,  # by default a window of 256 samples, of those that are no JPEGs to it, is read for each
    )
    return lit.StreamingDataLoader(
        dataset,
        batch_size=work["batch"],
        num_workers=work["workers"],
        persistent_workers=work["workers"] > 0,
        collate_fn=collate,
    )


def s3torchconnector(work: dict[str, Any]) -> Any:
    connector = importlib.import_module("s3torchconnector")
    dataset = connector.S3MapDataset.from_prefix(
        f"s3://{work['bucket']}/{work['objects']}",
        region="us-east-1",
        endpoint=work["endpoint"],
        transform=functools.partial(of_s3, how=work["decode"]),
        s3client_config=connector.S3ClientConfig(force_path_style=True),
    )
    return loader(dataset, {**work, "map_style": True})


def of_s3(reader: Any, how: str) -> int:
    return decode(reader.read(), how)


PEERS = {
    "webdataset": webdataset,
    "mosaicml-streaming": streaming,
    "litdata": litdata,
    "s3torchconnector": s3torchconnector,
}


class Files:
    """The samples as files that are in memory already: no bucket, no cache, no protocol."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._paths = [f"{work['files']}/{index:07d}.jpg" for index in range(work["samples"])]
        self._how = work["decode"] and "fast"

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        return decode(read_file(self._paths[index]), self._how)


def files(work: dict[str, Any]) -> Any:
    return loader(Files(work), {**work, "map_style": True})


LIMITS = {"files": files}  # what no loader of the same decoder can be quicker than


# --- the first batch -------------------------------------------------------------------------------------------------
FOLDER_OBJECTS = 10_000
LITDATA_INDEX = "index.json.zstd"  # put beside the data by litdata


def many_key(name: str, index: int) -> str:
    """The key of one of very many objects."""
    return f"{name}/{index // FOLDER_OBJECTS:04d}/{index:06d}.bin"


def many_body(key: str, size_bytes: int) -> bytes:
    """What that object holds: its key."""
    return key.encode().ljust(size_bytes, b"\n")


def check_first(batch: list[Any], samples: int, work: dict[str, Any], *, shuffled: bool = True) -> None:
    """End the process unless `batch` is a batch of the data set, which has `samples` samples."""
    if samples != work["samples"]:
        raise SystemExit(f"the data set has {samples} samples, not {work['samples']}")
    if len(batch) != work["batch"] or len(set(batch)) != len(batch):
        raise SystemExit(f"{len(set(batch))} different samples in a batch of {work['batch']}")
    numbers = []
    for data in batch:
        key = bytes(data).rstrip(b"\n").decode()
        numbers.append(int(key[-10:-4]))
        wanted = many_key(work["objects"].rstrip("/"), numbers[-1])
        if key != wanted or data != many_body(wanted, work["size_bytes"]) or numbers[-1] >= samples:
            raise SystemExit(
                f"{data[:40]!r} is not the {len(wanted)} characters of {wanted} in {work['size_bytes']} bytes"
            )
    if shuffled and numbers == sorted(numbers):
        raise SystemExit("the batch is not shuffled")


def whole(reader: Any) -> bytes:
    return bytes(reader.read())


def s3_objects(work: dict[str, Any], kind: str) -> Any:
    connector = importlib.import_module("s3torchconnector")
    return getattr(connector, kind).from_prefix(
        f"s3://{work['bucket']}/{work['objects']}",
        region="us-east-1",
        endpoint=work["endpoint"],
        transform=whole,
        s3client_config=connector.S3ClientConfig(force_path_style=True),
    )


def litdata_raw(work: dict[str, Any]) -> Any:
    """Its listing goes by fsspec and its reads by obstore, which share no option but the environment's."""
    allow_plain_http()
    place = f"s3://{work['bucket']}/{work['objects'].rstrip('/')}"
    dataset = importlib.import_module("litdata").StreamingRawDataset
    return dataset(place, cache_dir=work["cache"], recompute_index=work["list_anew"])


FIRST: dict[
    str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Any]]
] = {  # what is imported before the clock starts, and what makes the data set
    "s3torchconnector": (("s3torchconnector",), functools.partial(s3_objects, kind="S3MapDataset")),
    "litdata": (("litdata", "litdata.streaming.downloader", "s3fs", "obstore"), litdata_raw),
    "s3torchconnector-iterable": (("s3torchconnector",), functools.partial(s3_objects, kind="S3IterableDataset")),
}


def first_batch(peer: str, work: dict[str, Any]) -> None:
    modules, make = FIRST[peer]
    for module in ("torch.utils.data", *modules):
        importlib.import_module(module)
    map_style = not peer.endswith("-iterable")
    began = time.perf_counter()
    dataset = make(work)
    batch = next(iter(loader(dataset, {**work, "map_style": map_style})))
    taken_s = time.perf_counter() - began
    check_first(batch, len(dataset) if map_style else work["samples"], work, shuffled=map_style)
    print(json.dumps({"first_batch_s": taken_s}), flush=True)


def read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def prepare(work: dict[str, Any]) -> None:
    """The same samples in the forms that two of the peers need: MDS shards, litdata's chunks."""
    paths = [f"{work['files']}/{index:07d}.jpg" for index in range(work["samples"])]
    writer = import_streaming().MDSWriter
    with writer(out=work["mds"], columns={"data": "bytes"}, size_limit=64 << 20) as shards:
        for path in paths:
            shards.write({"data": read_file(path)})
    importlib.import_module("litdata").optimize(
        fn=read_file, inputs=paths, output_dir=work["lit"], num_workers=1, chunk_bytes="64MB"
    )


def versions() -> dict[str, str]:
    """Of all peers that are here, by the names of their packages."""
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    return {name: found[name] for name in (*PEERS, "s3dlio", "torch") if name in found}


def main() -> None:
    if sys.argv[1] == "versions":
        print(json.dumps(versions()))
        return
    work = json.load(sys.stdin)
    if sys.argv[1] == "prepare":
        prepare(work)
        return
    if sys.argv[1] == "first":
        first_batch(sys.argv[2], work)
        return
    began = time.perf_counter()
    batches = (PEERS | LIMITS)[sys.argv[1]](work)
    for epoch in range(work["epochs"]):
        if epoch:
            began = time.perf_counter()
        count, first_s = 0, None
        for batch in batches:
            if first_s is None:
                first_s = time.perf_counter() - began
            count += len(batch)
        taken_s = time.perf_counter() - began
        if count != work["samples"]:
            raise SystemExit(f"epoch {epoch + 1} gave {count} of {work['samples']} samples")
        print(
            json.dumps({"epoch": epoch + 1, "samples": count, "seconds": taken_s, "first_batch_s": first_s}), flush=True
        )


if __name__ == "__main__":
    main()
