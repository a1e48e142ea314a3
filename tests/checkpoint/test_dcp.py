"""`torch.distributed.checkpoint` on our storage, in one process: what it saves is a checkpoint like any other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from forebay.checkpoint.repository import Repository, parse_run
from forebay.client.door import HostDoor
from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.errors import Invalid
from forebay.torch import Checkpointer, RandomState, StorageReader, StorageWriter
from forebay.torch.checkpoint import dcp_reader, dcp_writer
from forebay.torch.checkpoint.dcp import named, pickle_of, plain_of
from tests.checkpoint.conftest import ckpt
from tests.node.conftest import NodeProcess
from tests.patience import until

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore:torch.distributed is")]


class Odd:
    """Nothing that a tree can hold."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def save(node: NodeProcess, place: str, state: dict[str, Any], **more: Any) -> None:
    dcp.save(state, checkpoint_id=place, storage_writer=StorageWriter(url=node.endpoint), **more)


def load(node: NodeProcess, place: str, state: dict[str, Any], **more: Any) -> None:
    dcp.load(state, checkpoint_id=place, storage_reader=StorageReader(url=node.endpoint), **more)


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.endpoint) as client:
        yield client


def flush(client: Client) -> None:
    job = client.start_job("flush", "runs")
    until(lambda: client.job(job.job).state == "done", "what is owed is flushed")


def manifests(client: Client, place: str) -> list[form.Manifest]:
    """The checkpoints there, newest first."""
    return [each for each in Repository(client, *parse_run(place)).candidates() if isinstance(each, form.Manifest)]


def values() -> dict[str, Any]:
    return {
        "model": {
            "weight": torch.arange(6_000_000.0).reshape(2000, 3000),
            "half": torch.randn(3, 5).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(4),
            "strided": torch.arange(24.0).reshape(4, 6)[:, ::2].T,
        },
        "many": [{"w": torch.full((50,), float(n)), "n": n} for n in range(40)],
        "plain": {"lr": 1e-3, "betas": (0.9, 0.999), "none": None, "names": ["a", "b"], "big": 2**70, "nan": -0.0},
        "odd": {"size": torch.Size([2]), "set": {1}, "object": Odd(5), "pair": (torch.ones(2), 1)},
        "array": np.arange(5, dtype=np.int16),
    }


def emptied(state: Any) -> Any:
    """The same shape with nothing in it."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(each, dict) for each in state):
        return [emptied(each) for each in state]
    return "nothing"


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, dict):
        return type(found) is type(wanted) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and all(map(same, found, wanted))
    return type(found) is type(wanted) and found == wanted


def test_what_dcp_saves_it_loads_whole_in_part_and_without_being_told_what_there_is(node: NodeProcess):
    state = values()
    save(node, "runs/values", state)
    found = emptied(state)
    load(node, "runs/values", found)
    assert same(found, state)

    part = {"model": {"scalar": torch.tensor(0)}, "many": [{"n": 0}]}
    load(node, "runs/values", part)
    assert same(part, {"model": {"scalar": torch.tensor(4)}, "many": [{"n": 0}]})

    found = _load_state_dict_from_keys(
        {"model", "plain"}, checkpoint_id="runs/values", storage_reader=StorageReader(url=node.endpoint)
    )
    assert same(found, {"model": state["model"], "plain": state["plain"]})

    wider = {"model": {"weight": torch.zeros(2000, 3000, dtype=torch.float64)}}
    load(node, "runs/values", wider)
    assert torch.equal(wider["model"]["weight"], state["model"]["weight"].double()), "converted, as DCP does"


def test_many_small_tensors_are_few_requests_and_a_part_of_a_large_one_is_read_alone(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    """Over HTTP, as from another host."""
    read: list[int] = []
    get_into = Client.get_into

    def seen(self: Client, bucket: str, key: str, buffer: Any, **more: Any) -> Any:
        read.append(len(buffer))
        return get_into(self, bucket, key, buffer, **more)

    monkeypatch.setattr(HostDoor, "readinto", lambda *_, **__: None)
    monkeypatch.setattr(Client, "get_into", seen)
    state: dict[str, Any] = {f"s{n}": torch.full((1000,), float(n)) for n in range(500)}
    state["large"] = torch.arange(10_000_000.0)  # 40 MB
    save(node, "runs/coalesced", state)
    small = {name: torch.zeros(1000) for name in state if name != "large"}
    load(node, "runs/coalesced", small)
    assert all(torch.equal(found, state[name]) for name, found in small.items())
    assert len(read) <= 2, "500 tensors of 2 MB lie in one piece, or across the border of two"
    read.clear()
    load(node, "runs/coalesced", {"large": torch.zeros(10_000_000)})
    assert len(read) <= 4, "requests of up to 16 MiB"
    assert sum(read) <= 40_000_000 + form.PIECE_BYTES


def test_plain_values_stand_in_the_tree_and_only_others_are_pickles(node: NodeProcess, client: Client):
    save(node, "runs/tree", values())
    found = Repository(client, *parse_run("runs/tree")).index(manifests(client, "runs/tree")[0], 0).tree
    assert sorted(found) == ["array", "many", "model", "odd", "plain"]
    assert dict(found["plain"]["d"]) == {
        "lr": 1e-3,
        "betas": {"t": [0.9, 0.999]},
        "none": None,
        "names": {"l": ["a", "b"]},
        "big": {"i": str(2**70)},
        "nan": -0.0,
    }
    assert dict(found["odd"]["d"]) == {name: {"p": f"odd.{name}"} for name in ("size", "set", "object", "pair")}
    for value in (np.float64(1), "half\ud800", float("nan"), [{}], b"bytes", True, torch.Size([1]), "x" * 100_000):
        plain = plain_of(pickle_of(value))
        if plain is not None:
            assert type(value) in (float, bytes, bool), value
    assert plain_of(b"no pickle") is None


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 40)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_each_reads_what_the_other_saved(node: NodeProcess):
    model, optimizer = model_and_optimizer(1)
    train(model, optimizer, 3, seed=5)
    save(node, "runs/by-dcp/step-3", {"model": model, "optim": optimizer, "loader": {"epoch": 2}})
    with Checkpointer("runs/by-checkpointer", url=node.endpoint) as checkpoints:
        checkpoints.save(
            3, {"model": model, "optim": optimizer, "loader": {"epoch": 2}, "rng": RandomState()}, wait=True
        )
    expected = train(model, optimizer, 4, seed=6)

    model, optimizer = model_and_optimizer(2)
    loader: dict[str, Any] = {}
    with Checkpointer("runs/by-dcp", url=node.endpoint) as checkpoints:
        restored = checkpoints.restore({"model": model, "optim": optimizer, "loader": loader})
    assert restored is not None
    assert (restored.step, loader) == (3, {"epoch": 2})
    assert train(model, optimizer, 4, seed=6) == expected

    model, optimizer = model_and_optimizer(3)
    train(model, optimizer, 1, seed=7)  # DCP loads into the state that there is
    loader = {"epoch": 0}
    load(node, "runs/by-checkpointer", {"model": model, "optim": optimizer, "loader": loader})
    assert loader == {"epoch": 2}
    assert train(model, optimizer, 4, seed=6) == expected

    save(node, "runs/odd", {"odd": {"object": Odd(1)}})
    with (
        Checkpointer("runs/odd", url=node.endpoint) as checkpoints,
        pytest.raises(Invalid, match=r"odd\.object was pick"),
    ):
        checkpoints.restore({"odd": {}})


def test_a_save_to_an_id_that_has_one_is_a_newer_one_and_nothing_is_lost_before(node: NodeProcess, client: Client):
    writer = StorageWriter("runs/again", url=node.endpoint, keep=3)
    for number, place in enumerate(["runs/again/step-100", "step-100", "200", "runs/again/step-100"]):
        flush(client)  # one that the bucket has stays, however many are newer
        dcp.save({"number": number, "w": torch.full((10,), float(number))}, checkpoint_id=place, storage_writer=writer)
    found = manifests(client, "runs/again")
    assert [(each.sequence, each.step) for each in found] == [(4, 100), (3, 200), (2, 100)]
    for place, number in (("runs/again", 3), ("runs/again/step-100", 3), ("s3://runs/again/step-200", 2)):
        state = {"number": -1, "w": torch.zeros(10)}
        load(node, place, state)
        assert state["number"] == state["w"][0].item() == number, place
    client.delete("runs", "again/" + form.blob_name(4, found[0].token, 0, 0))
    state = {"number": -1}
    load(node, "runs/again", state)
    assert state["number"] == 2, "the newest that is whole"
    with pytest.raises(CheckpointException, match="no checkpoint of step 7 under runs/again/"):
        load(node, "runs/again/step-7", {"number": 0})


def test_bytes_that_rotted_are_refused(node: NodeProcess, client: Client):
    save(node, "runs/rotten", {"a": torch.arange(2_000_000.0), "b": torch.ones(5)})
    name = "rotten/" + form.blob_name(1, manifests(client, "runs/rotten")[0].token, 0, 0)
    damaged = bytearray(client.get("runs", name))
    damaged[100] ^= 1
    client.put("runs", name, bytes(damaged))
    with pytest.raises(CheckpointException, match="do not match their digest: restore an older checkpoint"):
        load(node, "runs/rotten", {"a": torch.zeros(2_000_000), "b": torch.ones(5)})
    state = {"b": torch.zeros(5)}
    load(node, "runs/rotten", state)
    assert torch.equal(state["b"], torch.ones(5)), "what is whole can be read"


def test_what_cannot_be_is_said_before_anything_is_written(node: NodeProcess, client: Client):
    state = {"model": {"w": torch.ones(3)}}
    save(node, "runs/strict", state)
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.more"):
        load(node, "runs/strict", {"model": {"w": torch.ones(3), "more": torch.ones(1)}})
    load(node, "runs/strict", {"model": {"more": torch.ones(1)}}, planner=DefaultLoadPlanner(allow_partial_load=True))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load(node, "runs/strict", {"model": {"w": torch.ones(4)}})

    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(node, "runs/caching", state, planner=planner)
    with pytest.raises(CheckpointException, match="leave enable_plan_caching out"):
        save(node, "runs/caching", state, planner=planner)
    with pytest.raises(Invalid, match="use_collectives=False"):
        save(node, "runs/apart", state, use_collectives=False)
    with pytest.raises(CheckpointException, match="cannot be saved: make it dense"):
        save(node, "runs/sparse", {"s": torch.eye(3).to_sparse()})
    with pytest.raises(CheckpointException, match="where to"):
        dcp.save(state, storage_writer=StorageWriter(url=node.endpoint))
    with pytest.raises(CheckpointException, match="from where"):
        dcp.load(state, storage_reader=StorageReader(url=node.endpoint))
    with pytest.raises(Invalid, match="at least one checkpoint must stay"):
        StorageWriter("runs/x", keep=0)
    for place in ("runs/apart", "runs/sparse"):
        assert manifests(client, place) == []
    assert len(manifests(client, "runs/caching")) == 1
    flat = {"model.w": torch.ones(3), "n": 5}
    save(node, "runs/flat", flat, planner=DefaultSavePlanner(flatten_state_dict=False))
    found = {"model.w": torch.zeros(3), "n": 0}
    load(node, "runs/flat", found, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert same(found, flat)


@pytest.mark.parametrize(
    ("place", "means"),
    [
        ("runs/llama", ("runs", "llama/", None)),
        ("runs/llama-3", ("runs", "llama-3/", None)),
        ("runs/sweep/7", ("runs", "sweep/7/", None)),
        ("forebay://runs/a/step-100", ("runs", "a/", 100)),
        (Path("s3://runs/a/step_0100/"), ("runs", "a/", 100)),
        ("runs/a/epoch=3-step=1000.ckpt", ("runs", "a/", 1000)),
        ("runs/a/checkpoint-500", ("runs", "a/", 500)),
        ("runs/a/global_step1000", ("runs", "a/", 1000)),
        ("runs/a/lockstep-3", ("runs", "a/lockstep-3/", None)),
    ],
)
def test_an_id_is_a_run_and_may_end_with_a_step(place: Any, means: tuple[Any, ...]):
    assert named(place) == means
    assert StorageWriter.validate_checkpoint_id(place)
    assert StorageReader.validate_checkpoint_id(place)


@pytest.mark.parametrize("place", ["", "runs", "step-100", "runs/step-100", "gs://runs/a"])
def test_an_id_that_names_no_run_is_refused(place: str):
    with pytest.raises(Invalid, match="name"):
        named(place)
    assert not StorageWriter.validate_checkpoint_id(place)


def test_the_verbs_tend_what_dcp_saved(node: NodeProcess):
    for step in (1, 2, 3):
        save(node, f"runs/verbs/step-{step}", {"w": torch.full((500_000,), float(step)), "n": step})

    listed = [json.loads(line) for line in ckpt(node, "ls", "runs/verbs", "--json").splitlines()]
    assert [(each["step"], each["problem"]) for each in listed] == [(3, ""), (2, ""), (1, "")]
    assert "all as they were saved" in ckpt(node, "verify", "runs/verbs", "--step", "2")
    ckpt(node, "cp", "runs/verbs", "runs/verbs-copy")
    state = {"w": torch.zeros(500_000), "n": 0}
    load(node, "runs/verbs-copy/step-3", state)
    assert (state["n"], state["w"][-1].item()) == (3, 3.0)


def test_while_the_bucket_is_away_saves_and_loads_go_on(
    node: NodeProcess, backend: Path, monkeypatch: pytest.MonkeyPatch
):
    for module in (dcp_writer, dcp_reader):
        monkeypatch.setattr(module, "OUTAGE_S", 0.2)
    save(node, "runs/dcp-outage", {"w": torch.ones(50_000)})
    backend.rename(backend.with_name("away"))
    try:
        save(node, "runs/dcp-outage", {"w": torch.full((50_000,), 2.0)})
        state = {"w": torch.zeros(50_000)}
        load(node, "runs/dcp-outage", state)
        assert state["w"].unique().tolist() == [2.0]
    finally:
        backend.with_name("away").rename(backend)


def test_the_manuals_script_runs(node: NodeProcess, client: Client, monkeypatch: pytest.MonkeyPatch):
    manual = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (script,) = (each for each in re.findall(r"```python\n(.*?)```", manual, re.DOTALL) if "StorageWriter" in each)
    monkeypatch.setenv("FOREBAY_URL", node.endpoint)
    names: dict[str, Any] = {}
    exec(script.replace("corpus/runs/dcp", "runs/manual-dcp"), names)
    assert torch.equal(names["part"]["model"]["bias"], names["model"].bias)
    assert [each.step for each in manifests(client, "runs/manual-dcp")] == [200, 100]
    dcp.save({"w": torch.ones(3)}, checkpoint_id="forebay://runs/by-torch/step-1")  # an id alone: torch's own format
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id="forebay://runs/by-torch/step-1")
    assert torch.equal(state["w"], torch.ones(3))
