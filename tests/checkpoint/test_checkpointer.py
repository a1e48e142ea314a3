"""A training job's state through a real node: saved, restored, damaged, pruned, and refused."""

from __future__ import annotations

import math
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.checkpoint_pace import CoreTime, Pace
from forebay.core.errors import Bug, Corrupt, Invalid, NotFound, Precondition, Unavailable
from forebay.torch import Checkpointer, Every, RandomState
from forebay.torch.checkpoint import checkpointer, staging
from forebay.torch.checkpoint.saving import Sending
from forebay.torch.checkpoint.staging import Arena, Filled, Layout
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.real


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Steps on random data; the losses, exactly."""
    losses = []
    for _ in range(steps):
        inputs = torch.randn(16, 40)
        loss = model(inputs).square().mean() + random.random() * 0.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saver(node: NodeProcess, place: str, **more: Any) -> Checkpointer:
    return Checkpointer(place, url=node.endpoint, **more)


def test_a_run_goes_on_with_the_same_losses(node: NodeProcess, request: pytest.FixtureRequest):
    place = f"runs/{request.node.name}"
    model, optimizer = small()
    state = {"model": model, "optim": optimizer, "rng": RandomState(), "loader": {"epoch": 2, "samples": 640}}
    with saver(node, place) as checkpoints:
        train(model, optimizer, 3)
        handle = checkpoints.save(3, state)
        assert checkpoints.restore({"loader": {}}) is None or handle.done, "not before it counts"
        expected = train(model, optimizer, 4)
        handle.durable()
    model, optimizer = small()
    loader: dict[str, Any] = {}
    random.seed(99)
    torch.manual_seed(99)
    with saver(node, place) as checkpoints:
        restored = checkpoints.restore({"model": model, "optim": optimizer, "rng": RandomState(), "loader": loader})
    assert restored is not None
    assert (restored.step, restored.sequence, restored.skipped, restored.absent) == (3, 1, [], [])
    assert loader == {"epoch": 2, "samples": 640}
    assert train(model, optimizer, 4) == expected


def test_every_value_comes_back_as_it_was(node: NodeProcess):
    shared = torch.arange(6.0)
    state = {
        "numbers": [1, -(2**70), 1.5, math.inf, True, None, "text", b"\x00\xff", (1, [2, (3,)])],
        "keys": {1: "one", "1": "text", "a/b~#": 3, None: 4, 2.5: 5},
        "dtype": torch.bfloat16,
        "arrays": {"a": np.arange(5, dtype=np.int16), "scalar": np.array(3.5)},
        "tensors": {
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(4),
            "half": torch.randn(3, 5).to(torch.bfloat16),
            "complex": torch.randn(4, dtype=torch.complex64).conj(),
            "strided": torch.arange(24.0).reshape(4, 6)[:, ::2].T,
            "flags": torch.tensor([True, False]),
            "float8": torch.randn(7).to(torch.float8_e4m3fn),
        },
        "tied": [shared, shared],
        "large": torch.randn(3_000_000),
    }
    with saver(node, "runs/values") as checkpoints:
        manifest = checkpoints.save(0, state, wait=True).durable()
        assert manifest.size_bytes < 12_000_000 + 200_000, "what is tied is saved once"
        found: dict[str, Any] = {name: {} if isinstance(value, dict) else [] for name, value in state.items()}
        found["large"] = torch.zeros(3_000_000)
        found.pop("dtype")
        checkpoints.restore(found)
    assert found["numbers"] == state["numbers"]
    assert found["keys"] == state["keys"]
    assert np.array_equal(found["arrays"]["a"], np.arange(5))
    assert found["arrays"]["a"].dtype == np.int16
    assert found["arrays"]["scalar"].shape == ()
    for name, tensor in state["tensors"].items():
        back = found["tensors"][name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(back.view(torch.uint8) if name == "float8" else back,
                           tensor.view(torch.uint8) if name == "float8" else tensor), name  # fmt: skip
    assert found["tied"][0] is found["tied"][1], "tied weights stay tied"
    assert torch.equal(found["large"], state["large"]), "read into the memory that was there"


def test_what_cannot_be_saved_is_named_and_nothing_is_left(node: NodeProcess):
    loop: list[Any] = []
    loop.append(loop)
    with saver(node, "runs/refused") as checkpoints:
        for value, said in (
            ({"odd": object()}, "odd is a builtins.object"),
            ({"a": {("tuple",): 1}}, "key of type tuple"),
            ({"s": torch.eye(3).to_sparse()}, "sparse"),
            ({"o": np.array([object()])}, "array of Python objects"),
            ({"loop": loop}, "contain itself"),
            ({}, "empty"),
        ):
            with pytest.raises(Invalid, match=said):
                checkpoints.save(1, value)
        assert checkpoints.list() == []
        assert checkpoints.restore({"a": {}}) is None
        handle = checkpoints.save(1, {"fine": 1}, wait=True)
        assert handle.sequence == 7, "a refused save takes a number and no more"
        with pytest.raises(NotFound, match="step 5 was not saved"):
            checkpoints.restore({"fine": []}, step=5)


def test_the_newest_that_verifies_is_restored(node: NodeProcess):
    with saver(node, "runs/damaged") as checkpoints:
        for step in (10, 20, 30, 40):
            checkpoints.save(step, {"w": torch.full((2_500_000,), float(step)), "step": [step]}, wait=True)
        client, bucket, prefix = checkpoints._client, "runs", "runs/damaged/".partition("/")[2]
        by_step = {manifest.step: manifest for manifest in checkpoints.list()}
        assert list(by_step) == [40, 30, 20, 10]
        blob = {s: prefix + form.blob_name(m.sequence, m.token, 0, 0) for s, m in by_step.items()}
        rotten = bytearray(client.get(bucket, blob[40]))
        rotten[5_000_000] ^= 1
        client.put(bucket, blob[40], bytes(rotten))
        client.delete(bucket, blob[30])
        found = {"w": torch.zeros(2_500_000), "step": []}
        restored = checkpoints.restore(found)
        assert restored is not None
        assert restored.step == 20
        assert "do not match their digest" in restored.skipped[0]
        assert "is missing" in restored.skipped[1]
        assert found["step"] == [20]
        assert found["w"].unique().tolist() == [20.0], "nothing of the damaged one is left"
        assert "digest" in str(checkpoints.verify(40))
        assert "missing" in str(checkpoints.verify(30))
        assert checkpoints.verify(10) is None
        for step in (10, 20):
            client.put(bucket, prefix + form.manifest_name(by_step[step].sequence), b"{}")
        with pytest.raises(Corrupt, match="no checkpoint"):
            checkpoints.restore(found)


def test_a_run_that_went_back_restores_what_it_saved_last(node: NodeProcess):
    with saver(node, "runs/back") as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save(step, {"step": [step]}, wait=True)
        found: dict[str, Any] = {"step": []}
        checkpoints.restore(found, step=100)
        assert found == {"step": [100]}
    with saver(node, "runs/back") as checkpoints:
        checkpoints.save(150, {"step": [150]}, wait=True)
        restored = checkpoints.restore(found)
    assert restored is not None
    assert restored.step == 150, "the newest save, not the highest step"


def test_a_model_that_differs_is_refused_before_it_is_touched(node: NodeProcess):
    model, _ = small()
    with saver(node, "runs/differs") as checkpoints:
        checkpoints.save(1, {"model": model}, wait=True)
        other = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 6))
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(Invalid, match=r"2.weight has shape \(6, 300\) and was saved as \(5, 300\)"):
            checkpoints.restore({"model": other})
        with pytest.raises(Invalid, match=r"0\.weight is float64 and was saved as float32"):
            checkpoints.restore({"model": small()[0].double()})
        with pytest.raises(Invalid, match=r"model/3.weight is missing in the checkpoint"):
            checkpoints.restore({"model": nn.Sequential(*small()[0], nn.Linear(5, 5))})
        with pytest.raises(Invalid, match="no optim; it has model"):
            checkpoints.restore({"optim": {}})
        assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
        double = small()[0].double()
        for parameter in double.parameters():
            nn.init.zeros_(parameter)
        restored = checkpoints.restore({"model": double, "optim": {}}, strict=False)
        assert restored is not None
        assert restored.absent == ["optim"]
        assert torch.equal(double[0].weight, model[0].weight.double()), "converted, because strict=False says so"


def test_memory_that_is_smaller_than_the_state(node: NodeProcess):
    state = {f"w{n}": torch.randn(1_700_000 + n) for n in range(8)}  # 54 MB
    with saver(node, "runs/waves", staging_bytes=16 * 1024 * 1024) as checkpoints:
        for step in (1, 2):
            handle = checkpoints.save(step, state)
            assert checkpoints._arena.held_bytes <= 16 * 1024 * 1024
            manifest = handle.durable()
            assert len(manifest.ranks[0].blobs) == 7, "blobs are as large as half of the memory"
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpoints.restore(found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with pytest.raises(Invalid, match="staging_bytes=1000"):
        Checkpointer("runs/x", staging_bytes=1000)


def test_beside_training_one_sender_does_it_alone_until_somebody_waits(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    begun: list[int] = []
    go_on = threading.Event()
    send_one = Sending._send_one

    def slow(self: Sending, layout: Layout, filled: Filled) -> None:
        begun.append(filled.blob)
        go_on.wait()
        send_one(self, layout, filled)

    monkeypatch.setattr("os.cpu_count", lambda: 2)  # and training has one of them
    state = {"w": torch.randn(40_000_000)}  # two blobs
    with saver(node, "runs/hurry") as checkpoints:
        monkeypatch.setattr(Sending, "_send_one", slow)
        handle = checkpoints.save(1, state)
        until(lambda: begun, "a sender has a blob")
        assert begun == [0]
        with pytest.raises(Unavailable):
            handle.durable(timeout_s=0.0)
        until(lambda: begun == [0, 1], "the other helps")
        go_on.set()
        handle.durable()
        checkpoints.save(2, {"w": state["w"]})  # nobody waits, but for the end
    with saver(node, "runs/hurry") as checkpoints:
        assert [manifest.step for manifest in checkpoints.list()] == [2, 1]


def test_sending_pauses_while_it_costs_training_until_somebody_waits(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    seen: list[CoreTime] = []

    def costly(self: Pace, before: CoreTime, now: CoreTime, took_s: float) -> float:
        assert took_s > 0.0
        seen.extend((before, now))
        return 3600.0

    monkeypatch.setattr("os.cpu_count", lambda: 2)  # so one thread sends
    monkeypatch.setattr(Pace, "sent", costly)
    state = {"w": torch.randn(40_000_000)}  # three blobs
    with saver(node, "runs/paced") as checkpoints:
        handle = checkpoints.save(1, state)
        until(lambda: seen, "a blob was sent, and a pause begins")
        assert 0 < handle.sent_bytes < handle.size_bytes
        assert not handle.done
        assert 0.0 < seen[0].ran_s <= seen[1].ran_s, "the system says how long training ran"
        handle.durable()
        assert len(seen) == 2, "who waits is not kept waiting"
        checkpoints.save(2, state, wait=True)
        assert len(seen) == 2
        small = checkpoints.save(3, {"w": torch.randn(1000)})
        until(lambda: small.done, "what is sent in one piece counts without a pause")
        assert len(seen) == 4


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("staging_bytes", [None, 16 * 1024 * 1024])
def test_a_copy_that_breaks_off_costs_one_save(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, staging_bytes: int | None, wait: bool
):
    state = {f"w{n}": torch.randn(3_000_000) for n in range(12)}  # 144 MB: three blobs, or eighteen
    place = f"runs/broken-{staging_bytes}-{wait}"
    copy, copied = Arena.copy, []

    def breaking(self: Arena, copies: Any) -> None:
        copied.append(True)
        if len(copied) == (6 if staging_bytes else 2 if wait else 1):  # where nobody waits all is copied at once
            raise MemoryError("no pinned memory is left")
        copy(self, copies)

    with saver(node, place, staging_bytes=staging_bytes) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(Arena, "copy", breaking)
            for step in (1, 2):  # each would lose the buffer that it was filling
                copied.clear()
                with pytest.raises(Bug, match="no pinned memory"):
                    checkpoints.save(step, state, wait=wait)
        checkpoints.save(2, state, wait=True)
        assert [manifest.step for manifest in checkpoints.list()] == [2]
        assert checkpoints.verify() is None


def test_what_changes_once_it_is_staged_is_not_in_the_checkpoint(node: NodeProcess):
    weights = torch.full((20_000_000,), 1.0)  # 80 MB, in two blobs
    with saver(node, "runs/staged") as checkpoints:
        handle = checkpoints.save(1, {"w": weights})
        handle.staged()
        weights.fill_(2.0)
        handle.durable()
        found = {"w": torch.zeros_like(weights)}
        checkpoints.restore(found)
        assert found["w"].unique().tolist() == [1.0]


def test_two_jobs_under_one_prefix_are_told(node: NodeProcess):
    with saver(node, "runs/two") as one, saver(node, "runs/two") as two:
        one.save(1, {"who": "one"}, wait=True)
        two.save(2, {"who": "two"}, wait=True)
        handle = one.save(2, {"who": "one again"})
        with pytest.raises(Precondition, match="another job saved checkpoint 2"):
            handle.durable()
        found: dict[str, Any] = {"who": []}
        assert [manifest.sequence for manifest in two.list()] == [2, 1]
        assert two.verify() is None
        del found


def test_pruning_keeps_what_the_bucket_has(node: NodeProcess, backend: Path):
    with saver(node, "runs/pruned", keep=2) as checkpoints:
        for step in range(5):
            handle = checkpoints.save(step, {"w": torch.randn(1000)}, wait=True)
        handle.durable("bucket")
    with saver(node, "runs/pruned") as checkpoints:  # nobody else prunes now
        assert len(list((backend / "pruned" / "data").iterdir())) >= 1, "its bytes are at the backend"
        checkpoints.prune(2)  # what the other left, since the bucket did not have newer ones yet
        leftover = "pruned/" + form.blob_name(2, "ab" * 8, 0, 0)
        checkpoints._client.put("runs", leftover, b"cut off")
        unfinished = "pruned/" + form.blob_name(9, "cd" * 8, 0, 0)
        checkpoints._client.put("runs", unfinished, b"of a save under way elsewhere")
        pruned = checkpoints.prune(2)
        assert [manifest.step for manifest in checkpoints.list()] == [4, 3]
        assert pruned.leftovers == 1
        names = [entry.key for page in checkpoints._client.list_pages("runs", "pruned/data/") for entry in page.entries]
        assert unfinished in names
        assert leftover not in names
        assert {form.save_of(name.removeprefix("pruned/")).sequence for name in names} == {4, 5, 9}  # type: ignore[union-attr]
        assert checkpoints.verify(3) is None


def test_the_bucket_is_away_for_a_while(node: NodeProcess, backend: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpointer, "OUTAGE_S", 0.2)
    with saver(node, "runs/outage", keep=2) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(50_000)}, wait=True).durable("bucket")
        backend.rename(backend.with_name("away"))
        try:
            for step in (2, 3):
                checkpoints.save(step, {"w": torch.full((50_000,), float(step))}, wait=True)
            with saver(node, "runs/outage") as later:
                found = {"w": torch.zeros(50_000)}
                restored = later.restore(found)
                assert restored is not None
                assert restored.step == 3
                assert found["w"].unique().tolist() == [3.0]
                last = later.save(4, {"w": torch.full((50_000,), 4.0)}, wait=True)
                assert later.restore(found) is not None
        finally:
            backend.with_name("away").rename(backend)
        manifest = last.durable()
        until(lambda: checkpoints.repository.is_in_bucket(manifest), "the node flushes")
        assert [manifest.step for manifest in checkpoints.list()] == [4, 3, 2, 1]
        assert checkpoints.verify() is None
        with pytest.raises(Precondition, match="another job"):
            checkpoints.save(9, {"w": torch.zeros(3)}).durable()
        checkpoints.prune()
        assert [manifest.step for manifest in checkpoints.list()] == [4, 3]


def test_a_stall_is_as_long_as_copies_hold_a_device_behind_the_scripts_back(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    """`save` only queues them there, so what it takes itself says little; `auto` would save far too often."""
    monkeypatch.setattr(staging, "_ready", lambda begun: lambda: 100.0)
    monkeypatch.setattr(form, "BLOB_BYTES_MIN", 4 << 20)
    with saver(node, "runs/held") as checkpoints:
        handle = checkpoints.save(1, {"w": torch.ones(2_000_000)})
        assert handle.durable().stall_s == 200.0, "two blobs, one after the other"
        until(lambda: checkpoints.explain().stall_s == 200.0, "auto takes it into account")
        assert checkpoints.list()[0].stall_s == handle.stall_s == 200.0


def test_a_step_that_the_last_save_took_is_made_up_for(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    go_on = threading.Event()
    put = Client.put_shared

    def putting(self: Client, *rest: Any) -> Any:
        assert go_on.wait(PATIENCE_S)
        return put(self, *rest)

    monkeypatch.setattr(Client, "put_shared", putting)
    with saver(node, "runs/made-up", every=10) as checkpoints:
        state = {"w": torch.ones(3)}
        assert checkpoints.maybe_save(9, state) is None
        first = checkpoints.maybe_save(10, state)
        assert first is not None
        assert [checkpoints.maybe_save(step, state) for step in (19, 20, 21)] == [None] * 3, "it is under way"
        go_on.set()
        first.durable()
        second = checkpoints.maybe_save(22, state)
        assert second is not None
        second.durable()
        assert [checkpoints.maybe_save(step, state) for step in (22, 23, 29)] == [None] * 3
        assert checkpoints.maybe_save(30, state) is not None
        assert checkpoints.maybe_save(4, state) is None, "taken back: the tens count from there"


def test_through_buckets_and_when_to_save(node: NodeProcess):
    with saver(node, "straight/run", every=10) as checkpoints:
        saved = [step for step in range(1, 35) if checkpoints.maybe_save(step, {"step": step})]
        assert checkpoints._last is not None
        checkpoints._last.durable("bucket")
        assert saved[0] == 10
        tens = [step // 10 for step in saved]
        assert tens == sorted(set(tens)), "one for each ten at the most, later where the last one was still under way"
        assert checkpoints.list()[0].step == saved[-1]
    for wrong in (0, -1, "often", True, Every(seconds=0)):
        with pytest.raises(Invalid, match="every="):
            Checkpointer("straight/run", every=wrong)  # type: ignore[arg-type]
    for place in ("bucket", "bucket/", "https://x/y", ""):
        with pytest.raises(Invalid):
            Checkpointer(place)
