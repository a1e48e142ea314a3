"""What goes wrong around a save or restore: a full disk, a rank that dies, a signal, a clock, another job's pruning."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from forebay.client.sync import Client
from forebay.core import checkpoint as form
from forebay.core.errors import Corrupt, Invalid, NotFound, Precondition, Unavailable
from forebay.core.types import LOCAL_URL, Bucket
from forebay.ports import clock
from forebay.torch import Checkpointer, RandomState
from forebay.torch.checkpoint.restoring import Plan
from forebay.torch.checkpoint.saving import Save
from tests.checkpoint.crash_trainer import fork
from tests.checkpoint.test_ranks import ranks
from tests.disks import mounted
from tests.node.conftest import NodeProcess
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.real
MIB = 1 << 20


def saver(node: NodeProcess, place: str, **more: Any) -> Checkpointer:
    return Checkpointer(place, url=node.endpoint, **more)


def whole(value: float) -> dict[str, Any]:
    return {"w": torch.full((500_000,), value)}  # 2 MB


# --- room ------------------------------------------------------------------------------------------------------------
def test_a_full_disk_is_waited_for_while_training_goes_on(tmp_path: Path):
    node = NodeProcess(tmp_path, "--capacity", str(16 * MIB), "--fronts", "1")
    node.start()
    try:
        with Client(node.endpoint) as client, saver(node, "here/run", every=1) as checkpoints:
            client.bucket_put(Bucket("here", LOCAL_URL, write="local"))
            checkpoints.save(1, whole(1.0), wait=True)
            client.put("here", "other", bytes(13 * MIB))
            handle = checkpoints.save(2, whole(2.0))
            until(lambda: handle.waiting or handle.done, "the save says that it waits")
            assert "waits for the node" in repr(handle)
            for step in range(3, 40):
                assert checkpoints.maybe_save(step, whole(3.0)) is None, "training goes on, and nothing piles up"
            with pytest.raises(Unavailable, match="wait longer, or go on"):
                handle.durable(timeout_s=0.01)
            client.delete("here", "other")
            assert handle.durable().step == 2
            assert handle.waiting == ""
            assert checkpoints.maybe_save(40, whole(4.0)) is not None
    finally:
        node.stop()


def test_a_disk_that_others_fill_in_the_middle_of_a_save_is_waited_for_and_nothing_half_stays(tmp_path: Path):
    """The disk itself says that it is full, while blobs of a save go to it."""
    with mounted(tmp_path, "small", 400 * MIB) as disk:
        node = NodeProcess(disk.path, "--fronts", "1")
        node.start()
        try:
            with Client(node.endpoint) as client, saver(node, "here/run") as checkpoints:
                client.bucket_put(Bucket("here", LOCAL_URL, write="local"))
                checkpoints.save(1, whole(1.0), wait=True)
                others = disk.path / "others"
                with others.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk.path).free - 30 * MIB)
                handle = checkpoints.save(2, {"w": torch.full((20_000_000,), 2.0)})  # 80 MB, in two blobs
                until(lambda: handle.waiting or handle.done, "the save says that it waits")
                assert "no room" in handle.waiting, handle
                assert [manifest.step for manifest in checkpoints.list()] == [1]
                others.unlink()
                assert handle.durable().step == 2
                found = {"w": torch.zeros(20_000_000)}
                restored = checkpoints.restore(found)
                assert restored is not None
                assert (restored.step, restored.skipped) == (2, [])
                assert found["w"].unique().tolist() == [2.0]
                volumes = disk.path / "node" / "volumes"
                until(lambda: not list(volumes.rglob("tmp/*")), "nothing stays of what did not fit")
        finally:
            node.stop()


def test_a_save_that_is_larger_than_what_may_be_dirty_ends_on_all_ranks(node: NodeProcess, tmp_path: Path):
    folder = node.dir / "narrow"
    folder.mkdir()
    body = {"name": "narrow", "url": f"file://{folder}", "write": "back", "dirty_bytes_max": 100_000}
    node.json("PUT", "buckets/narrow", body)

    def work(rank: int) -> None:
        with saver(node, "narrow/run", own=("rng", "mine")) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, {"model": whole(1.0), "mine": whole(float(rank))}, wait=True)
            assert [manifest.step for manifest in checkpoints.list()] == [2, 1]

    ranks(tmp_path, 2, work)


def test_saves_wait_for_a_bucket_that_is_away_once_it_owes_all_it_may(node: NodeProcess):
    folder = node.dir / "owing"
    folder.mkdir()
    body = {"name": "owing", "url": f"file://{folder}", "write": "back", "dirty_bytes_max": 5_000_000}
    node.json("PUT", "buckets/owing", body)
    with saver(node, "owing/run", every=1) as checkpoints:
        checkpoints.save(1, whole(1.0), wait=True).durable("bucket")
        folder.rename(folder.with_name("owing-away"))
        handle = None
        try:
            for step in itertools.count(2):
                handle = checkpoints.maybe_save(step, whole(float(step))) or handle
                assert handle is not None
                waits = checkpoints._client.metrics().values.get('forebay_write_waits_total{bucket="owing"}', 0)
                if waits and not handle.done:
                    break
            assert handle.step > 2, "what fits counts although the bucket is away"
            assert "bytes sent" in repr(handle)
            assert checkpoints.maybe_save(10**6, whole(0.0)) is None, "training goes on, and nothing piles up"
        finally:
            folder.with_name("owing-away").rename(folder)
        assert handle.durable("bucket").step == handle.step
        found = whole(0.0)
        assert checkpoints.restore(found) is not None
        assert found["w"].unique().tolist() == [float(handle.step)]


def test_who_waits_for_the_bucket_waits_through_its_outage_and_a_restart_of_the_node(node: NodeProcess):
    folder = node.dir / "outlived"
    folder.mkdir()
    node.json("PUT", "buckets/outlived", {"name": "outlived", "url": f"file://{folder}", "write": "back"})
    with saver(node, "outlived/run") as checkpoints:
        checkpoints.save(1, whole(1.0), wait=True).durable("bucket")
        folder.rename(folder.with_name("outlived-away"))
        handle = checkpoints.save(2, whole(2.0), wait=True)
        with pytest.raises(Unavailable, match="goes on flushing it"):
            handle.durable("bucket", timeout_s=0.1)
        with ThreadPoolExecutor(1) as waiting:
            told = waiting.submit(handle.durable, "bucket")
            until(lambda: "waits for the bucket" in handle.waiting or told.done(), "it says that it waits")
            assert node.process is not None
            node.process.kill()
            node.process.wait()
            until(lambda: "no node answers" in handle.waiting or told.done(), "it says what it waits for now")
            node.start()
            assert not told.done()
            folder.with_name("outlived-away").rename(folder)
            manifest = told.result(PATIENCE_S)
        assert handle.waiting == ""
        assert checkpoints.repository.is_in_bucket(manifest)
        names = {path.name for path in folder.rglob("*") if path.is_file()}
        assert f"{manifest.sequence:012}" in names, "the manifest is in the bucket's own folder"


def test_ranks_wait_together_while_the_bucket_is_away_and_train_on(node: NodeProcess, tmp_path: Path):
    """What one rank has still to send keeps the others from no step. The hour of it: tests/sim/test_outage.py."""
    folder = node.dir / "shared"
    folder.mkdir()
    body = {"name": "shared", "url": f"file://{folder}", "write": "back", "dirty_bytes_max": 5_000_000}
    node.json("PUT", "buckets/shared", body)

    def work(rank: int) -> None:
        with saver(node, "shared/run", every=1, own=("w",)) as job:
            job.save(1, whole(1.0), wait=True).durable("bucket")
            dist.barrier()
            if rank == 0:
                folder.rename(folder.with_name("shared-away"))
            dist.barrier()
            handle, waited = None, False
            for step in itertools.count(2):
                handle = job.maybe_save(step, whole(float(step))) or handle
                assert handle is not None
                waits = job._client.metrics().values.get('forebay_write_waits_total{bucket="shared"}', 0)
                waited = job._ranks.any(bool(waits) and not handle.done)
                if waited:
                    break
            assert handle is not None
            last = handle.step
            for later in range(step + 1, step + 50):
                assert job.maybe_save(later, whole(0.0)) is None, "training goes on, and nothing piles up"
            dist.barrier()
            if rank == 0:
                folder.with_name("shared-away").rename(folder)
            assert handle.durable("bucket").step == last
            found = whole(0.0)
            assert job.restore(found) is not None
            assert found["w"].unique().tolist() == [float(last)]

    ranks(tmp_path, 2, work)


# --- who hears of a failure ------------------------------------------------------------------------------------------
def overtaken(node: NodeProcess, place: str) -> Checkpointer:
    """A job whose next save fails, because another one saved under its number."""
    job = saver(node, place, every=1)
    job.save(1, whole(1.0), wait=True)
    with saver(node, place) as other:
        other.save(2, whole(2.0), wait=True)
    return job


def test_a_save_that_failed_is_raised_by_the_next_maybe_save_once(node: NodeProcess):
    with overtaken(node, "runs/told") as job:
        handle = job.maybe_save(2, whole(2.0))
        assert handle is not None
        until(lambda: handle.done, "the save fails")
        with pytest.raises(Precondition, match="another job saved checkpoint 2"):
            job.maybe_save(3, whole(3.0))
        handle = job.maybe_save(4, whole(4.0))
        assert handle is not None, "who catches it goes on"
        handle.durable()
        assert [manifest.step for manifest in job.list()] == [4, 2, 1]


def test_the_last_save_of_a_script_does_not_fail_in_silence(node: NodeProcess):
    with pytest.raises(Precondition, match="another job"), overtaken(node, "runs/last") as job:
        job.maybe_save(2, whole(2.0))
    with pytest.raises(KeyError), overtaken(node, "runs/hidden") as job:
        fail(job.maybe_save(2, whole(2.0)))
    with overtaken(node, "runs/heard") as job:
        handle = job.maybe_save(2, whole(2.0))
        assert handle is not None
        with pytest.raises(Precondition):
            handle.durable()


def test_all_ranks_hear_of_a_failure_at_the_same_step(node: NodeProcess, tmp_path: Path):
    def work(rank: int) -> None:
        with saver(node, "runs/all-told", every=1, own=("w",)) as job:
            job.save(1, whole(1.0), wait=True)
            if rank == 1:
                refused = Save._put
                Save._put = refuse  # type: ignore[method-assign, assignment]
            steps: list[int] = []
            with pytest.raises(Invalid, match="rank 1: this rank cannot save"):
                saves_until_one_fails(job, steps)
            if rank == 1:
                Save._put = refused  # type: ignore[method-assign]
            assert len(set(job._ranks.gather(steps[-1]))) == 1
            handle = job.maybe_save(steps[-1] + 1, whole(0.0))
            assert handle is not None
            assert handle.durable().step == steps[-1] + 1

    ranks(tmp_path, 2, work)


def saves_until_one_fails(job: Checkpointer, steps: list[int]) -> None:
    for step in itertools.count(2):
        steps.append(step)
        job.maybe_save(step, whole(float(step)))


def refuse(*_: object) -> None:
    raise Invalid("this rank cannot save")


def fail(*_: object) -> None:
    raise KeyError("the script's own error")


# --- ranks and signals -----------------------------------------------------------------------------------------------
def test_a_rank_that_dies_in_a_save_fails_it_on_the_others_and_nobody_hangs(node: NodeProcess, tmp_path: Path):
    meeting = tmp_path / "meeting"

    def work(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        with saver(node, "runs/bereft", own=("w",)) as checkpoints:
            checkpoints.save(1, whole(1.0), wait=True)
            if rank == 1:
                Save._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            handle = checkpoints.save(2, whole(2.0))
            with pytest.raises(Unavailable, match="start the job again"):
                handle.durable(timeout_s=60.0)

    pids = [fork(tmp_path / f"rank-{rank}", lambda rank=rank: work(rank)) for rank in range(2)]  # type: ignore[misc]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    error = tmp_path / "rank-0.error"
    assert ended == [0, -signal.SIGKILL], error.read_text() if error.exists() else ended
    found = whole(0.0)
    with saver(node, "runs/bereft", keep=1, own=("w",)) as checkpoints:
        restored = checkpoints.restore(found)
        assert restored is not None
        assert restored.step == 1
        assert found["w"].unique().tolist() == [1.0]
        checkpoints.save(2, found, wait=True).durable("bucket")
        checkpoints.prune()
        left = {name for name, _ in checkpoints.repository._objects("data/")}
        assert left == {name for name, _ in checkpoints.list()[0].objects()}, "nothing stays of the save that broke off"


def test_a_scheduler_that_sends_its_signal_twice_gets_one_save_that_counts(node: NodeProcess):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with saver(node, "runs/sigterm", every=1000) as checkpoints:
            checkpoints.on_signal()
            assert checkpoints.maybe_save(1, whole(1.0)) is None
            os.kill(os.getpid(), signal.SIGTERM)
            timer = threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            handle = checkpoints.maybe_save(2, whole(2.0))
            timer.join()
            assert handle is not None
            assert handle.done
            assert checkpoints.stopping
            assert [manifest.step for manifest in checkpoints.list()] == [2]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    with saver(node, "runs/between", every=1000) as checkpoints:

        def meanwhile(flag: bool) -> bool:
            monkeypatch.undo()
            checkpoints._note_signal()
            return flag

        monkeypatch.setattr(checkpoints._ranks, "any", meanwhile)
        assert checkpoints.maybe_save(1, whole(1.0)) is None
        assert checkpoints.maybe_save(2, whole(2.0)) is not None
        assert checkpoints.stopping


# --- the clock -------------------------------------------------------------------------------------------------------
def test_a_clock_that_is_set_back_changes_neither_what_is_newest_nor_where_the_time_went(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    day_s = 86_400.0
    with saver(node, "runs/clock") as checkpoints:
        checkpoints.save(1, whole(1.0), wait=True)
        monkeypatch.setattr(clock, "wall_s", lambda: time.time() - day_s)
        checkpoints.save(2, whole(2.0), wait=True)
        monkeypatch.setattr(clock, "wall_s", lambda: time.time() + day_s)
        checkpoints.save(3, whole(3.0), wait=True)
        monkeypatch.setattr(clock, "wall_s", lambda: time.time() - 7 * day_s)
        checkpoints.save(4, whole(4.0), wait=True)
        assert [manifest.step for manifest in checkpoints.list()] == [4, 3, 2, 1]
    found = whole(0.0)
    with saver(node, "runs/clock") as checkpoints:  # its life begins a week before the one before it
        restored = checkpoints.restore(found)
        assert restored is not None
        assert restored.step == 4
        checkpoints.save(5, found, wait=True)
        until(lambda: checkpoints.goodput().lives == 2, "both lives are recorded")
        said = checkpoints.goodput()
        assert min(said.productive_s, said.stalled_s, said.restarting_s, said.lost_s) >= 0
        assert said.productive_s + said.stalled_s < day_s, "a life is as long as it was, whatever the clock says"
        assert checkpoints.explain().interval_s < day_s


# --- readers beside pruning, and damage ------------------------------------------------------------------------------
def test_a_restore_whose_checkpoint_is_pruned_meanwhile_takes_the_newer_one(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
):
    read, saved, last = Plan.read, [1], [3]
    with saver(node, "straight/raced", keep=1) as job, saver(node, "straight/raced") as reader:
        job.save(1, whole(1.0), wait=True)

        def late(plan: Plan) -> None:
            if saved[0] < last[0]:
                saved[0] += 1
                job.save(saved[0], whole(float(saved[0])), wait=True)._finished.wait()
            read(plan)

        monkeypatch.setattr(Plan, "read", late)
        found = whole(0.0)
        restored = reader.restore(found)
        assert restored is not None
        assert restored.step == 3
        assert len(restored.skipped) == 2
        assert found["w"].unique().tolist() == [3.0]
        last[0] = 1000
        with pytest.raises(Unavailable, match="keep more of them"):
            reader.restore(found)
        assert reader.repository.rehearse()[1] == {}, "what was pruned is not damaged"


def test_what_a_manifest_names_must_be_there_and_be_the_same(node: NodeProcess):
    with saver(node, "runs/manifests") as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, whole(float(step)), wait=True)
        client, prefix = checkpoints._client, checkpoints.repository.prefix
        for manifest in checkpoints.list()[:3]:
            for name, _ in manifest.objects():
                index = name.endswith("index")
                if manifest.step == 4 or (manifest.step == 3 and index):
                    client.delete("runs", prefix + name)  # all of it, and the index alone
                elif manifest.step == 2 and index:
                    rotten = bytearray(client.get("runs", prefix + name))
                    rotten[-2] ^= 1
                    client.put("runs", prefix + name, bytes(rotten))
        foreign = client.get("runs", prefix + form.manifest_name(4))
        client.put("runs", prefix + form.manifest_name(9), foreign)
        found = whole(0.0)
        restored = checkpoints.restore(found)
        assert restored is not None
        assert restored.step == 1
        assert [what.partition(":")[0] for what in restored.skipped] == [f"checkpoint {n}" for n in (9, 4, 3, 2)]
        assert found["w"].unique().tolist() == [1.0]
        with pytest.raises(Corrupt, match="no checkpoint"):
            checkpoints.restore(found, step=2)
        told: list[tuple[int, int]] = []
        taken, damaged = checkpoints.repository.rehearse(progress=lambda done, total: told.append((done, total)))
        assert taken is not None
        assert (taken.step, list(damaged)) == (1, [9, 4, 3, 2])
        assert told[-1] == (taken.size_bytes, taken.size_bytes)


def test_a_checkpoint_that_somebody_forged_ends_no_restore_and_takes_no_memory(node: NodeProcess):
    """Whoever may write to the bucket can make digests that fit."""
    forgeries = {
        2: ('{"i":"1180591620717411303424"}', '{"i":"' + "9" * 5000 + '"}'),  # a number that takes minutes to read
        3: ('"size_bytes":2000000', '"size_bytes":2000000,"whole":[1099511627776],"at":[0]'),  # a shard of 4 TiB
        4: ('"shape":[500000]', '"shape":[1099511627776]'),
    }
    with saver(node, "runs/forged") as checkpoints:
        for step in (1, *forgeries):
            checkpoints.save(step, {"s": whole(float(step)), "n": [2**70]}, wait=True)
        client, prefix = checkpoints._client, checkpoints.repository.prefix
        for manifest in checkpoints.list():
            if manifest.step in forgeries:
                name = prefix + form.index_name(manifest.sequence, manifest.token, 0)
                before = bytes(client.get("runs", name)).decode()
                index = forged(before, *forgeries[manifest.step]).encode()
                client.put("runs", name, index)
                part = form.RankPart(form.digest_of(index), len(index), manifest.ranks[0].blobs)
                said = msgspec.structs.replace(manifest, ranks=(part,)).to_bytes()
                client.put("runs", prefix + form.manifest_name(manifest.sequence), said)
        found: dict[str, Any] = {"s": {}, "n": []}  # so memory is taken for what the checkpoint says
        restored = checkpoints.restore(found)
        assert restored is not None
        assert (restored.step, len(restored.skipped)) == (1, 3)
        assert (found["s"]["w"].unique().tolist(), found["n"]) == ([1.0], [2**70])


def forged(text: str, old: str, new: str) -> str:
    assert old in text, text
    return text.replace(old, new)


# --- what does not fit -----------------------------------------------------------------------------------------------
def test_nothing_is_changed_if_any_of_it_does_not_fit(node: NodeProcess):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with saver(node, "runs/unfit") as checkpoints:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        checkpoints.save(1, {"model": model, "optim": optimizer, "counts": [1, 2], "rng": RandomState()}, wait=True)
        other = nn.Linear(3, 2)
        before = other.weight.detach().clone()
        frozen = torch.optim.Adam([other.weight])
        split = torch.optim.Adam([{"params": [other.weight]}, {"params": [other.bias]}])
        for wrong, said in (
            ({"optim": frozen}, r"optim has groups of \[1\] parameters and was saved with \[2\]"),
            ({"optim": split}, r"groups of \[1, 1\] parameters"),
            ({"counts": {}}, "counts was saved as a list and cannot be put into a dict"),
            ({"counts": 7}, "cannot be put into a int"),
        ):
            with pytest.raises(Invalid, match=said):
                checkpoints.restore({"model": other, **wrong})
            assert torch.equal(other.weight, before)
        with pytest.raises(Invalid, match="leave out what differs"):
            checkpoints.restore({"counts": 7}, strict=False)
        restored = checkpoints.restore({"model": other, "optim": frozen}, strict=False)
        assert restored is not None
        assert restored.absent == ["optim"]
        assert torch.equal(other.weight, model.weight)
        assert not frozen.state


def test_the_random_state_of_another_number_of_gpus(node: NodeProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.get_rng_state()] * 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    set_there: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: set_there.append(len(states)))
    state = {"w": torch.ones(3), "rng": RandomState()}
    with saver(node, "runs/gpus") as checkpoints:
        torch.manual_seed(4)
        checkpoints.save(1, state, wait=True)
        drawn = torch.rand(3)
        checkpoints.restore({"w": torch.zeros(3), "rng": RandomState()})
        assert set_there == [2]
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        found = {"w": torch.zeros(3), "rng": RandomState()}
        before = torch.get_rng_state()
        with pytest.raises(Invalid, match="rng is of 2 GPUs, and 1 are here"):
            checkpoints.restore(found)
        assert found["w"].tolist() == [0.0] * 3, "refused before anything is changed"
        assert torch.equal(torch.get_rng_state(), before)
        checkpoints.restore(found, strict=False)
        assert torch.equal(torch.rand(3), drawn), "the other generators are restored"
        assert set_there == [2], "the GPUs' stay as they are"


def test_a_tensor_of_another_dtype_is_converted_where_it_lies(node: NodeProcess):
    with saver(node, "runs/converted") as checkpoints:
        checkpoints.save(1, whole(1.5), wait=True)
        found = torch.zeros(500_000, dtype=torch.float64)
        with pytest.raises(Invalid, match="w is float64 and was saved as float32"):
            checkpoints.restore({"w": found})
        checkpoints.restore({"w": found}, strict=False)
        assert found.unique().tolist() == [1.5]


# --- what does not count ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict", [True, False])
def test_what_holds_parts_of_a_damaged_checkpoint_is_never_called_restored(node: NodeProcess, strict: bool):
    place = f"runs/half-{strict}"
    with saver(node, place) as checkpoints, Client(node.endpoint) as client:
        checkpoints.save(1, {"model": whole(1.0)}, wait=True)
        manifest = checkpoints.save(2, {"model": whole(2.0), "average": whole(2.0)}, wait=True).manifest
        assert manifest is not None
        name = checkpoints.repository.prefix + form.blob_name(manifest.sequence, manifest.token, 0, 0)
        data = bytearray(client.get("runs", name))
        data[0] ^= 1
        client.put("runs", name, bytes(data))
        with pytest.raises(Corrupt, match="no checkpoint of"):
            checkpoints.restore({"model": whole(0.0), "average": whole(0.0)}, strict=strict)
        model = whole(0.0)
        restored = checkpoints.restore({"model": model}, strict=strict)  # the older one has all of that
        assert restored is not None
        assert restored.step == 1
        assert bool((model["w"] == 1.0).all())


def test_what_is_not_there_any_more_is_not_durable_in_the_bucket(node: NodeProcess):
    """The node has nothing to flush of what it does not know."""
    with saver(node, "runs/gone") as checkpoints, Client(node.endpoint) as client:
        handle = checkpoints.save(1, whole(1.0), wait=True)
        assert handle.manifest is not None
        for name, _ in handle.manifest.objects():
            client.delete("runs", checkpoints.repository.prefix + name)
        with pytest.raises(NotFound, match="save again"):
            handle.durable("bucket", timeout_s=PATIENCE_S)


def test_a_failure_is_told_although_the_next_save_came_first(node: NodeProcess):
    place = "runs/passed-over"
    with saver(node, place) as other:
        mine = saver(node, place)
        mine.save(1, whole(1.0), wait=True)
        other.save(2, whole(2.0), wait=True)
        failed = mine.save(3, whole(3.0))
        until(lambda: failed.done, "it fails, since another job has its number")
        assert mine.save(4, whole(4.0), wait=True).done
        with pytest.raises(Precondition, match="another job saved checkpoint 2"):
            mine.close()
