"""`forebay ckpt export`: tensors of a checkpoint as a safetensors file, read by safetensors itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forebay.checkpoint.export import DTYPES, export
from forebay.checkpoint.repository import Repository, parse_run
from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.errors import Corrupt, Invalid, NotFound
from forebay.torch import Checkpointer, StorageWriter
from tests.checkpoint.conftest import ckpt
from tests.checkpoint.test_ranks import ranks
from tests.node.conftest import NodeProcess

pytestmark = pytest.mark.real


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.endpoint) as client:
        yield client


def newest(client: Client, place: str) -> tuple[Repository, form.Manifest]:
    repository = Repository(client, *parse_run(place))
    return repository, next(each for each in repository.candidates() if isinstance(each, form.Manifest))


def test_every_dtype_and_nested_names_and_tied_weights(node: NodeProcess, client: Client, tmp_path: Path):
    tied = torch.arange(12.0).reshape(3, 4)
    model = {
        **{
            f"of.{name}": torch.arange(10).to(getattr(torch, name))
            for name in DTYPES
            if not name.startswith("float8_e8")
        },
        "large": torch.arange(5_000_000.0).reshape(5, 1000, 1000),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(4),
        "layers": [{"w": tied}, {"w": tied}],
        "version": 3,
    }
    with Checkpointer("runs/export", url=node.endpoint) as checkpoints:
        checkpoints.save(
            7,
            {"model": model, "optim": {"m": torch.ones(3)}, "half": {"c": torch.ones(2).cfloat().to(torch.complex128)}},
            wait=True,
        )
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"an older one")
    done: list[int] = []
    found = export(*newest(client, "runs/export"), str(path), "model", lambda at, total: done.append(at))
    assert path.stat().st_size == found.size_bytes > done[-1] > 20_000_000
    loaded = load_file(path)
    wanted = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    wanted |= {"layers.0.w": tied, "layers.1.w": tied}
    assert sorted(loaded) == sorted(wanted)
    for name, tensor in wanted.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert (
            torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
            if tensor.dim()
            else loaded[name] == tensor
        )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}

    export(*newest(client, "runs/export"), str(path), "model.layers.1.w")
    assert list(load_file(path)) == ["model.layers.1.w"]
    with pytest.raises(Invalid, match="half/c is complex128, for which safetensors has no word"):
        export(*newest(client, "runs/export"), str(path))
    with pytest.raises(NotFound, match=r"no tensor below 'mod': it has .*model"):
        export(*newest(client, "runs/export"), str(path), "mod")
    assert list(load_file(path)) == ["model.layers.1.w"], "the file stays as it was"


def test_what_ranks_saved_in_parts_is_joined_by_the_verb(node: NodeProcess, client: Client, tmp_path: Path):
    whole = torch.arange(12 * 10 * 3.0).reshape(12, 10, 3)
    large = torch.arange(6_000_000.0).reshape(1000, 6000)
    placements = {"rows": Shard(0), "columns": Shard(1), "last": Shard(2), "copies": Replicate()}

    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = {name: distribute_tensor(whole, mesh, [placement]) for name, placement in placements.items()}
        model["large"] = distribute_tensor(large, mesh, [Shard(1)])
        state = {"model": model, "mine": {"rank": torch.tensor([float(rank)])}, "n": 5}
        dcp.save(state, storage_writer=StorageWriter("runs/parts/step-3", url=node.endpoint))
        with Checkpointer("runs/parts", url=node.endpoint, own=("mine",)) as checkpoints:
            checkpoints.save(4, state, wait=True)

    ranks(tmp_path, 2, work)
    path = tmp_path / "out.safetensors"
    for step in (3, 4):
        said = ckpt(node, "export", "runs/parts", str(path), "--step", str(step), "--json")
        assert json.loads(said)["tensors"] == 6
        loaded = load_file(path)
        assert torch.equal(loaded.pop("model.large"), large)
        assert loaded.pop("mine.rank").item() in ({0.0} if step == 4 else {0.0, 1.0}), "rank 0's, or any that DCP took"
        assert sorted(loaded) == sorted(f"model.{name}" for name in placements)
        assert all(torch.equal(tensor, whole) for tensor in loaded.values())

    repository, manifest = newest(client, "runs/parts")
    name = "parts/" + form.blob_name(manifest.sequence, manifest.token, 1, 0)
    damaged = bytearray(client.get("runs", name))
    damaged[5] ^= 1
    client.put("runs", name, bytes(damaged))
    with pytest.raises(Corrupt, match="do not match their digest"):
        export(repository, manifest, str(path))
    assert [each.name for each in tmp_path.glob("*safetensors*")] == ["out.safetensors"], "nothing half is left"
    assert list(tmp_path.glob(".*")) == []
