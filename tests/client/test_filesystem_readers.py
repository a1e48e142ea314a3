"""Libraries that read and write through fsspec, on a real node: pandas, pyarrow, datasets, Ray Data."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.fsspec.filesystem import ForebayFileSystem
from tests.node.conftest import NodeProcess

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("default")]  # what others warn of is theirs to mend
ROWS = 2000


@pytest.fixture
def options(file_node: NodeProcess) -> dict[str, str]:
    """`storage_options`, as a user writes them."""
    return {"endpoint_url": file_node.endpoint}


@pytest.fixture
def fs(options: dict[str, str]) -> Iterator[ForebayFileSystem]:
    made = ForebayFileSystem(**options)
    made.invalidate_cache()
    yield made
    made.rm("lake", recursive=True)


def test_pandas(fs: ForebayFileSystem, options: dict[str, str]):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"number": range(ROWS), "name": [f"n{n}" for n in range(ROWS)]})
    frame["part"] = frame["number"] % 3
    with_options: dict[str, Any] = {"storage_options": options}
    frame.to_parquet("forebay://lake/frame.parquet", **with_options)
    names = pandas.read_parquet("forebay://lake/frame.parquet", columns=["name"], **with_options)
    assert names.equals(frame[["name"]])
    for name in ("frame.csv", "frame.csv.gz"):
        frame.to_csv(f"forebay://lake/{name}", index=False, **with_options)
        assert pandas.read_csv(f"forebay://lake/{name}", **with_options).equals(frame)
    frame.to_json("forebay://lake/frame.jsonl", orient="records", lines=True, **with_options)
    lines = pandas.read_json("forebay://lake/frame.jsonl", lines=True, chunksize=300, **with_options)
    assert pandas.concat(list(lines)).equals(frame)
    frame.to_parquet("forebay://lake/parts", partition_cols=["part"], **with_options)
    assert [path.split("/")[2] for path in fs.find("lake/parts")] == ["part=0", "part=1", "part=2"]
    second = pandas.read_parquet("forebay://lake/parts", filters=[("part", "==", 2)], **with_options)
    assert sorted(second["number"]) == list(range(2, ROWS, 3))
    with pytest.raises(FileNotFoundError):
        pandas.read_csv("forebay://lake/none.csv", **with_options)


@pytest.mark.parametrize("wrapped", [False, True])
def test_pyarrow(fs: ForebayFileSystem, wrapped: bool):
    pyarrow = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow_fs = pytest.importorskip("pyarrow.fs")
    place: Any = arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(fs)) if wrapped else fs
    table = pyarrow.table(
        {"number": range(ROWS), "twice": [2 * n for n in range(ROWS)], "part": [n % 4 for n in range(ROWS)]}
    )
    dataset.write_dataset(
        table, "lake/set", filesystem=place, format="parquet", partitioning=["part"], partitioning_flavor="hive"
    )
    found = dataset.dataset("lake/set", filesystem=place, format="parquet", partitioning="hive")
    assert found.count_rows() == ROWS
    odd = found.to_table(columns=["twice"], filter=dataset.field("part") == 1)
    assert (odd.column_names, sorted(odd["twice"].to_pylist())) == (["twice"], list(range(2, 2 * ROWS, 8)))
    dataset.write_dataset(
        *(table, "lake/set"),
        filesystem=place,
        format="parquet",
        partitioning=["part"],
        partitioning_flavor="hive",
        existing_data_behavior="delete_matching",
    )
    assert dataset.dataset("lake/set", filesystem=place, partitioning="hive").count_rows() == ROWS
    parquet.write_table(table, "lake/one.parquet", filesystem=place, row_group_size=100)
    with parquet.ParquetFile("lake/one.parquet", filesystem=place) as file:
        assert file.read_row_group(7, columns=["number"])["number"].to_pylist() == list(range(700, 800))
    if wrapped:
        infos = {info.path: info for info in place.get_file_info(arrow_fs.FileSelector("lake", recursive=True))}
        assert infos["lake/set"].type == arrow_fs.FileType.Directory
        assert infos["lake/one.parquet"].size == fs.info("lake/one.parquet")["size"]
        assert infos["lake/one.parquet"].mtime is not None
        assert place.get_file_info("lake/none").type == arrow_fs.FileType.NotFound
        place.delete_dir("lake/set")
        assert not fs.exists("lake/set")


def test_fsspecs_reader_of_columns(fs: ForebayFileSystem, options: dict[str, str]):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    open_parquet_file = pytest.importorskip("fsspec.parquet").open_parquet_file
    packed = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": range(ROWS), "b": [str(n) for n in range(ROWS)]}), packed)
    fs.pipe_file("lake/two.parquet", packed.getvalue())
    pytest.importorskip("pandas")
    with open_parquet_file(
        "forebay://lake/two.parquet", columns=["b"], storage_options=options, engine="pyarrow"
    ) as file:
        assert parquet.read_table(file, columns=["b"])["b"].to_pylist() == [str(n) for n in range(ROWS)]


def test_datasets_stream(
    fs: ForebayFileSystem, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for shard in range(2):
        numbers = range(shard * 100, shard * 100 + 100)
        parquet.write_table(pyarrow.table({"number": numbers}), f"lake/p/{shard}.parquet", filesystem=fs)
        fs.pipe_file(f"lake/j/{shard}.jsonl", b"".join(b"%s\n" % json.dumps({"number": n}).encode() for n in numbers))
    for kind, files in (("parquet", "p/*.parquet"), ("json", "j/*.jsonl")):
        stream = datasets.load_dataset(
            *(kind,),
            data_files=f"forebay://lake/{files}",
            storage_options=options,
            streaming=True,
            split="train",
            cache_dir=str(tmp_path),
        )
        assert [row["number"] for row in stream] == list(range(200))
    made = datasets.Dataset.from_dict({"number": [1, 2, 3]})
    made.save_to_disk("forebay://lake/saved", storage_options=options)
    assert datasets.load_from_disk("forebay://lake/saved", storage_options=options)["number"][:] == [1, 2, 3]


def test_ray_data(fs: ForebayFileSystem):
    ray = pytest.importorskip("ray")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for shard in range(3):
        parquet.write_table(pyarrow.table({"number": [shard] * 10}), f"lake/ray/{shard}.parquet", filesystem=fs)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        found = ray.data.read_parquet("lake/ray", filesystem=fs)
        assert found.count() == 30
        assert found.sum("number") == 30
        found.write_parquet("lake/out", filesystem=fs)
        assert ray.data.read_parquet("lake/out", filesystem=fs).count() == 30
    finally:
        ray.shutdown()
