"""Steps, names, texts and arrays that a script may well hand over: taken as they are, or refused before anything is
written; never a checkpoint that is told durable and that nobody can read."""

from __future__ import annotations

import enum
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.errors import Bug, Invalid
from forebay.torch import Checkpointer
from forebay.torch.checkpoint.restoring import Plan
from forebay.torch.checkpoint.staging import Arena
from tests.checkpoint.test_ranks import ranks
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.real


class Mode(enum.StrEnum):
    FAST = "fast"


def saver(node: NodeProcess, place: str, **more: Any) -> Checkpointer:
    return Checkpointer(place, url=node.endpoint, **more)


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7)])
def test_whole_numbers_of_all_libraries_are_steps(node: NodeProcess, step: Any):
    with saver(node, f"runs/step-{type(step).__name__}") as checkpoints:
        checkpoints.save(step, {"a": [1]}).durable(timeout_s=PATIENCE_S)
        assert [found.step for found in checkpoints.list()] == [7]


@pytest.mark.parametrize("step", [7.0, 0.5, "7", None])
def test_other_steps_are_refused(node: NodeProcess, step: Any):
    with saver(node, "runs/no-step") as checkpoints:
        with pytest.raises(Invalid, match="whole number"):
            checkpoints.save(step, {"a": [1]})
        assert checkpoints.list() == []


@pytest.mark.parametrize("metadata", [{"lr": 0.1}, {1: "a"}, {"file": "half \ud800"}])
def test_metadata_is_text(metadata: Any):
    with pytest.raises(Invalid, match="metadata"):
        Checkpointer("runs/metadata", metadata=metadata)


@pytest.mark.parametrize("state", [{0: [1]}, {"a": ["half \ud800"]}, {"a": {"half \ud800": 1}}, {"half \ud800": [1]}])
def test_names_and_texts_that_the_format_cannot_hold_are_refused(node: NodeProcess, state: Any):
    with saver(node, "runs/no-text") as checkpoints:
        with pytest.raises(Invalid, match="text"):
            checkpoints.save(1, state)
        assert checkpoints.list() == []


def test_texts_that_are_more_than_text_come_back_as_text(node: NodeProcess):
    with saver(node, "runs/texts") as checkpoints:
        state = {"a": {"mode": Mode.FAST, Mode.FAST: 1, "numpy": np.str_("é"), np.str_("key"): [True, np.bool_(True)]}}
        checkpoints.save(1, state).durable(timeout_s=PATIENCE_S)
        found: dict[str, Any] = {}
        assert checkpoints.restore({"a": found}) is not None
        assert found == {"mode": "fast", "fast": 1, "numpy": "é", "key": [True, True]}


def test_what_goes_wrong_behind_a_save_or_restore_ends_it_on_all_ranks(
    node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A thread that ends in silence would leave `durable` and the other ranks waiting for good."""

    def work(rank: int) -> None:
        with saver(node, "runs/behind") as checkpoints:
            for step, name in ((1, "Index"), (2, "Manifest")):
                with pytest.MonkeyPatch.context() as patch:
                    if rank == (name == "Index"):
                        patch.setattr(getattr(form, name), "to_bytes", broken)
                    with pytest.raises(Bug, match="a fault of ours"):
                        checkpoints.save(step, {"w": torch.ones(3)}).durable(timeout_s=PATIENCE_S)
            checkpoints.save(3, {"w": torch.ones(3)}, wait=True)
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1:
                    patch.setattr(Plan, "read", broken)
                with pytest.raises(Bug, match="a fault of ours"):
                    checkpoints.restore({"w": torch.zeros(3)})
            assert checkpoints.restore({"w": torch.zeros(3)}) is not None

    ranks(tmp_path, 2, work)


def broken(_: Any) -> bytes:
    raise RuntimeError("a fault of ours")


def test_a_name_of_its_own_may_have_any_text(node: NodeProcess, tmp_path: Path):
    names = ("rank/seed", "#1", "a~b")

    def work(rank: int) -> None:
        with saver(node, "runs/own-names", own=names) as checkpoints:
            mine = {name: {"w": torch.full((3,), float(rank))} for name in names}
            checkpoints.save(1, mine, wait=True)
            found: dict[str, Any] = {name: {} for name in names}
            assert checkpoints.restore(found) is not None
            assert {name: found[name]["w"].tolist() for name in names} == {name: [float(rank)] * 3 for name in names}

    ranks(tmp_path, 2, work)


def test_what_a_rank_has_of_its_own_is_nobody_elses_memory(node: NodeProcess, tmp_path: Path):
    """A tensor under two names is saved once; but a rank that joins later has no such thing of its own."""

    def save(rank: int) -> None:
        with saver(node, "runs/tied-own", own=("mine",)) as checkpoints:
            tensor = torch.full((3,), 7.0)
            checkpoints.save(1, {"mine": {"w": tensor}, "model": {"w": tensor}}, wait=True)

    def restore(rank: int) -> None:
        with saver(node, "runs/tied-own", own=("mine",)) as checkpoints:
            found: dict[str, Any] = {"mine": {}, "model": {}}
            restored = checkpoints.restore(found)
            assert restored is not None
            assert restored.absent == (["mine"] if rank == 2 else [])
            assert found["model"]["w"].tolist() == [7.0] * 3

    ranks(tmp_path, 2, save)
    ranks(tmp_path, 3, restore)


def test_a_state_made_for_the_save_is_given_back_when_save_returns(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    """Such as what `state_dict` gathered: the save has its copy, and draining may take minutes."""
    begun = threading.Event()
    put = Client.put_shared

    def putting(self: Client, *rest: Any) -> Any:
        assert begun.wait(PATIENCE_S)
        return put(self, *rest)

    monkeypatch.setattr(Client, "put_shared", putting)
    with saver(node, "runs/given-back") as checkpoints:
        made = torch.ones(3_000_000)
        watched = weakref.ref(made)
        handle = checkpoints.save(1, {"w": made})
        del made
        gone = watched() is None
        begun.set()
        handle.durable()
        assert gone


@pytest.mark.parametrize(
    "array", [np.arange(2_000_000), np.arange(2_000_000)[::-1], np.broadcast_to(np.ones(5), (9, 5))]
)
def test_arrays_are_saved_without_a_copy_where_they_lie_in_order(
    node: NodeProcess, array: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
):
    lying: list[bool] = []
    copy = Arena.copy

    def copying(self: Arena, copies: Any) -> None:
        lying.extend(source.data_ptr() == array.ctypes.data for _, source in copies)
        copy(self, copies)

    monkeypatch.setattr(Arena, "copy", copying)
    with saver(node, f"runs/array-{array.strides}") as checkpoints:
        checkpoints.save(1, {"a": {"array": array}}, wait=True)
        found: dict[str, Any] = {}
        assert checkpoints.restore({"a": found}) is not None
        assert np.array_equal(found["array"], array)
    assert any(lying) == (array.flags.c_contiguous and array.flags.writeable)


# --- memory that two names have --------------------------------------------------------------------------------------
@pytest.mark.parametrize("first", ["model", "best"])
def test_what_was_saved_apart_and_lies_together_now_is_restored_apart(node: NodeProcess, first: str):
    """As at a first start, where the best weights so far are those of the model."""
    place = f"runs/alias-{first}"
    model = torch.nn.Linear(4, 4)
    best = {key: value.clone() + 100 for key, value in model.state_dict().items()}
    with saver(node, place) as checkpoints:
        checkpoints.save(1, {"model": model, "best": best}, wait=True)
    fresh = torch.nn.Linear(4, 4)
    into: dict[str, Any] = {"model": fresh, "best": fresh.state_dict()}
    with saver(node, place) as checkpoints:
        checkpoints.restore({name: into[name] for name in sorted(into, key=lambda name: name != first)})
    for key, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], value)
        assert torch.equal(into["best"][key], best[key])


def test_what_was_saved_as_one_tensor_reaches_both_that_it_is_now(node: NodeProcess):
    place, one = "runs/tied-apart", torch.arange(4.0)
    with saver(node, place) as checkpoints:
        checkpoints.save(1, {"w": one, "average": one}, wait=True)
        w, average = torch.zeros(4), torch.zeros(4)
        checkpoints.restore({"w": w, "average": average})
        assert torch.equal(w, one)
        assert torch.equal(average, one)
        with pytest.raises(Invalid, match=r"shape \(7,\), not \(4,\)"):
            checkpoints.restore({"w": w, "average": torch.zeros(7)})


def test_the_same_bytes_with_another_sign_are_another_tensor(node: NodeProcess):
    x = torch.tensor([1 + 2j, 3 + 4j])
    state = {"x": x, "conjugate": x.conj(), "imaginary": x.imag, "negative": x.conj().imag}
    into: dict[str, Any] = {}
    with saver(node, "runs/lazy") as checkpoints:
        checkpoints.save(1, {"state": state}, wait=True)
        checkpoints.restore({"state": into})
    for name, value in state.items():
        assert torch.equal(into[name], value), name


@pytest.mark.parametrize(
    "value", [np.ma.masked_array([1.0, 2.0], [0, 1]), np.arange(3, dtype=">f4")], ids=["mask", "big"]
)
def test_arrays_that_would_lose_something_are_refused_by_name(node: NodeProcess, value: Any):
    with saver(node, "runs/arrays") as checkpoints, pytest.raises(Invalid, match="state/v: "):
        checkpoints.save(1, {"state": {"v": value}})


def test_an_index_whose_sizes_are_not_those_of_its_elements_is_damage(node: NodeProcess):
    """Such a tensor would be read past the end of the stream."""
    with saver(node, "runs/sizes") as checkpoints, Client(node.endpoint) as client:
        state: dict[str, Any] = {"state": {"w": torch.arange(1000.0)}}
        checkpoints.save(1, state, wait=True)
        manifest = checkpoints.save(2, state, wait=True).manifest
        assert manifest is not None
        prefix = checkpoints.repository.prefix
        name = prefix + form.index_name(manifest.sequence, manifest.token, 0)
        index = bytes(client.get("runs", name)).replace(b'"dtype":"float32"', b'"dtype":"float64"')
        client.put("runs", name, index)
        part = form.RankPart(form.digest_of(index), len(index), manifest.ranks[0].blobs)
        for ranks_, said in (((part,), "another size than its elements"), ((), "names nobody who saved")):
            forged = msgspec.structs.replace(manifest, ranks=ranks_)
            client.put("runs", prefix + form.manifest_name(manifest.sequence), forged.to_bytes())
            restored = checkpoints.restore({"state": {}})
            assert restored is not None
            assert restored.step == 1
            assert said in restored.skipped[0]
