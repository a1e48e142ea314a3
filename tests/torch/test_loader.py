"""The loader: the order it promises, the state it keeps, and what happens when something goes wrong."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from forebay.core.errors import Busy, Corrupt, Denied, Invalid, Precondition, Unavailable
from forebay.torch import BatchSampler, DataLoader, ObjectDataset, ShardDataset, TokenDataset
from forebay.torch.fetching import Fetched
from forebay.torch.source import Facts, Patient
from tests.torch.memory_source import MemorySource, as_int

WORKERS = [0, 2]


@pytest.fixture
def dataset(numbers: MemorySource) -> ObjectDataset:
    """Samples are the numbers 0 to 99."""
    return ObjectDataset("b-1/numbers", decode=as_int, source=numbers, patience_s=20)


Make = Callable[..., DataLoader]


@pytest.fixture
def make(dataset: ObjectDataset, closing: list[DataLoader]) -> Make:
    def loader(batch: int = 8, **how: Any) -> DataLoader:
        made = DataLoader(how.pop("dataset", dataset), batch, **how)
        closing.append(made)
        return made

    return loader


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# --- order -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", WORKERS)
def test_epochs_follow_each_other_each_in_an_order_of_its_own(make: Make, workers: int):
    loader = make(workers=workers, seed=5)
    assert len(loader) == 13
    epochs = [flat(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert loader.epoch == 3
    loader.set_epoch(1)
    assert flat(loader) == epochs[1]


def test_the_order_depends_on_the_seed_alone(make: Make):
    assert flat(make(workers=0, seed=5)) == flat(make(5, workers=1, seed=5, prefetch=1))
    assert flat(make(seed=5)) != flat(make(seed=6))
    assert flat(make(shuffle=False)) == list(range(100))


def test_ranks_take_turns_and_together_everything(make: Make):
    whole = flat(make(8, seed=5))
    ranks = [[batch.tolist() for batch in make(4, seed=5, rank=rank, world=2)] for rank in range(2)]
    together = [number for pair in zip(*ranks, strict=True) for batch in pair for number in batch]
    assert together == whole


def test_a_block_shuffle_keeps_shards_together(shards: MemorySource, make: Make):
    dataset = ShardDataset("b-1/train", parts=["cls"], transform=lambda sample: sample["cls"], source=shards)
    loader = make(10, dataset=dataset, shuffle="block", window_bytes=1)
    found = [number // 1 for number in flat(loader)]
    assert sorted(found) == list(range(100))
    edges = [0, 0, 10, 30, 60, 100]
    where = [next(shard for shard in range(5) if number < edges[shard + 1]) for number in found]
    assert sum(a != b for a, b in pairwise(where)) == 3, "one shard at a time"
    assert "windows of 1 bytes" in loader.state_dict()["fingerprint"]["shape"]
    with pytest.raises(Invalid, match="blocks"):
        DataLoader([1, 2, 3], shuffle="block")


def test_last_steps(make: Make):
    assert [len(batch) for batch in make(30)] == [30, 30, 30, 10]
    assert [len(batch) for batch in make(30, last="drop")] == [30, 30, 30]
    filled = list(make(30, last="fill"))
    assert filled[3].tolist()[10:] == filled[0].tolist()[:20]
    with pytest.raises(Invalid, match="100 samples are not one step of 101"):
        make(101, last="drop")


def test_fewer_samples_than_ranks(make: Make, numbers: MemorySource):
    numbers.objects = {"numbers/0": b"0", "numbers/1": b"1"}
    two = ObjectDataset("b-1/numbers", decode=as_int, source=numbers)
    ranks = [flat(make(4, dataset=two, rank=rank, world=3)) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [1, 1, 1]
    assert sorted(set(ranks[0] + ranks[1])) == [0, 1]
    one = MemorySource({"x": b"7"})
    assert flat(make(4, dataset=ObjectDataset("b-1", decode=as_int, source=one))) == [7]


def test_rank_and_world_come_from_the_environment(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    schedule = make().schedule
    assert (schedule.rank, schedule.world) == (1, 4)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(Invalid, match="torchrun"):
        make()


@pytest.mark.parametrize(
    "said", [{"WORLD_SIZE": "4"}, {"RANK": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"SLURM_PROCID": "3"}]
)
def test_half_an_answer_is_not_rank_0(make: Make, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Invalid, match=r"which rank of how many.*RANK=.SLURM_PROCID"):
        make()
    assert make(rank=0, world=1).schedule.world == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    schedule = make().schedule
    assert (schedule.rank, schedule.world) == (1, 4)


def test_one_task_is_alone(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert make().schedule.world == 1


def test_numbers_may_be_numpys(dataset: ObjectDataset, make: Make):
    """Seeds are often drawn by it; a state is plain values all the same."""
    loader = make(np.int64(8), seed=np.int64(5), rank=np.int64(0), world=np.int64(1))
    loader.set_epoch(np.int32(1))
    expected = make(seed=5)
    expected.set_epoch(1)
    assert json.loads(json.dumps(loader.state_dict())) == expected.state_dict()
    assert flat(loader) == flat(expected)
    sampler = BatchSampler(dataset, np.int64(8), seed=np.int64(5), rank=0, world=1)
    sampler.set_epoch(np.int32(1))
    assert json.loads(json.dumps(sampler.state_dict()))["epoch"] == 1


@pytest.mark.parametrize(
    "how", [{"shuffle": "all"}, {"seed": -1}, {"workers": -1}, {"prefetch": 0}, {"last": "keep"}, {"batch": 0}]
)
def test_nonsense_is_refused(make: Make, how: dict[str, Any]):
    with pytest.raises(Invalid):
        make(**how)


def test_foreign_datasets_have_an_order_and_a_state_too(make: Make):
    tensors = torch.utils.data.TensorDataset(torch.arange(20))
    loader = make(3, dataset=tensors)
    assert sorted(int(n) for (batch,) in loader for n in batch) == list(range(20))
    state = loader.state_dict()
    with pytest.raises(Precondition, match="samples: 20 then, 10 now"):
        make(3, dataset=torch.utils.data.TensorDataset(torch.arange(10))).load_state_dict(state)


@pytest.mark.parametrize("workers", WORKERS)
def test_token_windows_are_one_tensor(text: MemorySource, make: Make, workers: int):
    loader = make(4, dataset=TokenDataset("b-1/text", 50, source=text), workers=workers, shuffle=False)
    first = next(iter(loader))
    assert first.tolist() == torch.arange(200).reshape(4, 50).tolist()


def test_workers_may_be_spawned(make: Make):
    assert flat(make(10, workers=1, seed=5, start_method="spawn")) == flat(make(10, seed=5))


class Batch(list[Any]):
    """A batch of a class of its own, which torch lets pin itself."""

    pinned = False

    def pin_memory(self) -> Batch:
        found = Batch(self)
        found.pinned = True
        return found


def test_batches_are_pinned_if_asked(make: Make):
    assert next(iter(make(collate=Batch, pin_memory=True))).pinned
    assert not next(iter(make(collate=Batch))).pinned or torch.cuda.is_available()
    assert Fetched(Batch([1]), 1, Facts()).pin_memory().batch.pinned, "as torch's own pinning thread does"


# --- state -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("taken", [0, 1, 5, 12, 13])
def test_a_state_goes_on_exactly(make: Make, workers: int, taken: int):
    whole = make(seed=5)
    expected = flat(whole) + flat(whole)
    loader = make(workers=workers, seed=5)
    batches = iter(loader)
    before = flat(next(batches) for _ in range(taken))
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1024
    assert not {"world", "workers", "batch"} & set(state)
    resumed = make(6, workers=2 - workers, seed=99)
    resumed.load_state_dict(state)
    assert resumed.epoch == (1 if taken == 13 else 0)
    after = flat(resumed)
    if taken < 13:
        after += flat(resumed)
    assert before + after == expected


def test_a_state_goes_on_with_another_world(make: Make):
    whole = make(seed=5)
    expected = flat(whole)
    first = make(4, seed=5, rank=1, world=2)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    assert first.state_dict()["samples"] == 40
    ranks = []
    for rank in range(3):
        loader = make(5, rank=rank, world=3)
        loader.load_state_dict(first.state_dict())
        ranks.append([batch.tolist() for batch in loader])
    assert [number for step in zip(*ranks, strict=True) for batch in step for number in batch] == expected[40:]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_that_is_left_is_begun_anew(make: Make, workers: int):
    expected = flat(make(seed=5))
    loader = make(workers=workers, seed=5)
    next(iter(loader))
    assert flat(itertools.islice(loader, 3)) == expected[:24], "a look at the first batch takes nothing away"
    assert loader.state_dict()["samples"] == 24
    loader.set_epoch(0)  # as trainers do at the top of every epoch
    assert flat(loader) == expected
    assert loader.epoch == 1
    following = flat(itertools.islice(loader, len(loader)))
    assert sorted(following) == list(range(100))
    assert loader.epoch == 2, "trainers that count steps leave at the last batch: that is the epoch's end"
    assert flat(loader) not in (expected, following)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_over_an_epoch_that_was_restored_goes_on_from_there(make: Make, workers: int):
    whole = make(seed=5)
    expected, following = flat(whole), flat(whole)
    loader = make(workers=workers, seed=5)
    flat(itertools.islice(loader, 3))
    resumed = make(workers=workers)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert resumed.state_dict()["samples"] == 32
    resumed.set_epoch(0)
    assert flat(resumed) == expected[24:], "a look takes nothing away from what was restored"
    assert flat(itertools.islice(resumed, 2)) == following[:16]
    assert flat(resumed) == following


@pytest.mark.parametrize("workers", WORKERS)
def test_a_sampler_is_begun_anew_too(dataset: ObjectDataset, workers: int):
    sampler = BatchSampler(dataset, 8, seed=5)
    plain = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    first = next(iter(plain)).tolist()
    whole = flat(plain)
    assert whole[:8] == first
    assert sorted(whole) == list(range(100))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_that_is_left_is_continued_if_that_is_asked_for(make: Make, workers: int):
    expected = flat(make(seed=5))
    loader = make(workers=workers, seed=5, continues=True)
    begun = []
    for batch in loader:
        begun += batch.tolist()
        if len(begun) == 24:
            break
    loader.set_epoch(0)  # as trainers do at the top of every epoch
    assert begun + flat(loader) == expected
    loader.restart(0)
    assert flat(loader) == expected
    next(iter(loader))
    loader.restart()
    assert loader.state_dict()["samples"] == 0
    assert loader.epoch == 1


def test_only_one_iteration_at_a_time(make: Make):
    loader = make(seed=5, continues=True)
    first = iter(loader)
    begun = next(first).tolist()
    second = iter(loader)
    begun += next(second).tolist()
    assert begun == flat(make(seed=5))[:16], "the second goes on where the first was"
    with pytest.raises(Invalid, match="iterated anew"):
        next(first)
    with pytest.raises(Invalid, match="epochs count from 0"):
        loader.set_epoch(-1)


def test_a_dropped_rest_is_not_an_epoch_of_nothing(make: Make):
    loader = make(15, last="drop")
    assert len(flat(loader)) == 90
    assert (loader.epoch, loader.state_dict()["samples"]) == (1, 0)
    smaller = make(8, last="drop", seed=5)
    for _, _ in zip(range(12), smaller, strict=False):
        pass
    assert smaller.state_dict()["samples"] == 0, "96 of 100, and no step is left"


def test_a_changed_dataset_is_refused(make: Make, numbers: MemorySource):
    state = make().state_dict()
    numbers.objects["numbers/00077"] = b"7777"
    changed = make(dataset=ObjectDataset("b-1/numbers", source=numbers))
    said = r"bytes: 190 then, 192 now; the first key that differs lies between.*1 object was changed \(numbers/00077\)"
    with pytest.raises(Precondition, match=said):
        changed.load_state_dict(state)
    with pytest.raises(Precondition, match="shuffled' and is now 'objects, in order"):
        make(shuffle=False).load_state_dict(state)
    with pytest.raises(Invalid, match="no state"):
        make().load_state_dict({"_index_sampler_state": None})


def test_a_state_costs_little(make: Make):
    """Counted in calls of functions, as a profiler sees them, so that a busy machine counts the same."""
    loader = make()
    loader.state_dict()
    state = calls_of(lambda: loader.state_dict())
    assert 0 < state < calls_of(lambda: flat(loader)) / 13, "a state takes less than a step of eight samples"


def calls_of(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls, in this thread."""
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it in torch 2.13
@pytest.mark.parametrize("workers", WORKERS)
def test_another_loader_can_keep_the_state(dataset: ObjectDataset, make: Make, workers: int):
    expected = flat(make(seed=5))

    def stateful() -> StatefulDataLoader:
        return StatefulDataLoader(dataset, batch_sampler=BatchSampler(dataset, 8, seed=5), num_workers=workers)

    loader = stateful()
    batches = iter(loader)
    begun = flat(next(batches) for _ in range(4))
    state = loader.state_dict()
    del batches, loader
    resumed = stateful()
    resumed.load_state_dict(state)
    assert begun + flat(resumed) == expected
    assert sorted(flat(resumed)) == list(range(100)), "the next epoch"


def test_torch_alone_can_use_the_dataset_and_the_sampler(dataset: ObjectDataset):
    sampler = BatchSampler(dataset, 8, seed=5)
    assert len(sampler) == 13
    plain = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
    first = flat(plain)
    assert sorted(first) == list(range(100))
    assert flat(plain) != first
    sampler.set_epoch(0)
    assert flat(plain) == first


# --- faults ----------------------------------------------------------------------------------------------------------
def test_a_node_that_is_away_is_waited_for(make: Make, numbers: MemorySource):
    loader = make(seed=5)
    away = iter(range(3))

    def before(_items: Any) -> None:
        if next(away, None) is not None:
            raise Unavailable("no node answers: start one", code="NoNode")

    numbers.before = before
    assert sorted(flat(loader)) == list(range(100))
    assert loader.stall.seconds["busy"] > 0


def test_only_items_that_failed_are_asked_for_again(numbers: MemorySource, dataset: ObjectDataset):
    busy = {"numbers/00003", "numbers/00005"}

    def fail(item: Any) -> Busy | None:
        if item.key in busy:
            busy.discard(item.key)
            return Busy("too much to do: try again")
        return None

    numbers.fail = fail
    numbers.batches.clear()
    facts = Facts()
    assert dataset.fetch(range(10), facts) == list(range(10))
    assert numbers.batches == [10, 2]
    assert (facts.items, facts.busy_s > 0) == (10, True)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_node_that_is_gone_ends_the_wait_with_the_next_step(numbers: MemorySource, make: Make, workers: int):
    numbers.fail = gone
    dataset = ObjectDataset("b-1/numbers", decode=as_int, source=Gone(numbers.objects), patience_s=0.2)
    loader = make(dataset=dataset, shuffle=False, workers=workers)
    batches = iter(loader)
    assert flat(next(batches) for _ in range(5)) == list(range(40))
    with pytest.raises(Unavailable, match=r"epoch 0, after 40 of 100 samples: waited 0\.2 s in vain .*no node"):
        next(batches)
    assert loader.state_dict()["samples"] == 40
    back = make(
        dataset=ObjectDataset("b-1/numbers", decode=as_int, source=MemorySource(numbers.objects)), shuffle=False
    )
    back.load_state_dict(loader.state_dict())
    assert flat(back) == list(range(40, 100))


def gone(item: Any) -> Unavailable | None:
    return Unavailable("no node answers: start one", code="NoNode") if item.key >= "numbers/00040" else None


class Gone(MemorySource):
    """A node that answers for the first 40 objects only."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.fail = gone


@pytest.mark.parametrize("workers", WORKERS)
def test_a_corrupt_sample_stops_its_step_and_no_other(numbers: MemorySource, make: Make, workers: int):
    numbers.objects["numbers/00050"] = b"fifty"
    dataset = ObjectDataset("b-1/numbers", decode=as_int, source=numbers)
    loader = make(10, dataset=dataset, shuffle=False, workers=workers)
    batches = iter(loader)
    assert flat(next(batches) for _ in range(5)) == list(range(50))
    with pytest.raises(Corrupt, match=r"after 50 of 100 samples: b-1/numbers/00050 cannot be decoded"):
        next(batches)
    skipping = make(
        10, dataset=ObjectDataset("b-1/numbers", decode=as_int, source=numbers, on_error="skip"), workers=workers
    )
    assert sorted(flat(skipping)) == [number for number in range(100) if number != 50]
    assert skipping.stall.report()["skipped"] == 1
    assert skipping.stall.report()["skipped_names"] == ["b-1/numbers/00050"]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_of_which_nothing_is_left_is_one_from_the_epochs_start(numbers: MemorySource, make: Make, workers: int):
    for number in [*range(40, 50), *range(4)]:
        numbers.objects[f"numbers/{number:05d}"] = b"none"
    skipping = ObjectDataset("b-1/numbers", decode=as_int, source=numbers, on_error="skip")
    batches = [flat([batch]) for batch in make(4, dataset=skipping, shuffle=False, workers=workers)]
    assert len(batches) == 25, "no step is lost"
    assert batches[10:13] == [[4, 5, 6, 7], [4, 5, 6, 7], [50, 51]]
    assert batches[0] == [4, 5, 6, 7], "of the first four nothing is left either"
    state = make(4, dataset=skipping, shuffle=False, workers=workers)
    state.load_state_dict(state.state_dict() | {"samples": 40})
    assert flat([next(iter(state))]) == [4, 5, 6, 7], "wherever it is resumed"
    numbers.objects = dict.fromkeys(numbers.objects, b"none")
    with pytest.raises(Corrupt, match="none of the 4 samples"):
        next(iter(make(4, dataset=skipping, shuffle=False, workers=workers)))


def test_an_error_of_the_callers_own_comes_through_and_leaves_no_thread(make: Make, dataset: ObjectDataset):
    def broken(samples: list[Any]) -> Any:
        raise ZeroDivisionError("my collate")

    before, kept = set(threading.enumerate()), set(children())  # multiprocessing's own servers
    with pytest.raises(ZeroDivisionError, match="my collate"):
        flat(make(collate=broken))
    assert set(threading.enumerate()) <= before, "those of tests before this one may end meanwhile"
    with pytest.raises(ZeroDivisionError, match="my collate"):
        flat(make(collate=broken, workers=1))
    assert set(children()) <= kept


@pytest.mark.parametrize("workers", WORKERS)
def test_a_fault_of_the_decoder_is_raised_at_its_step_which_the_next_loop_tries_again(
    numbers: MemorySource, make: Make, tmp_path: Path, workers: int
):
    mended = tmp_path / "mended"

    def decode(key: str, data: Any) -> int:
        if key.endswith("41") and not mended.exists():
            raise TypeError("my decoder")
        return as_int(key, data)

    faulty = ObjectDataset("b-1/numbers", decode=decode, source=numbers)
    loader = make(10, dataset=faulty, shuffle=False, workers=workers)
    found: list[int] = []

    def loop() -> None:
        for batch in loader:
            found.extend(batch.tolist())

    for _ in range(2):
        with pytest.raises(TypeError, match="my decoder"):
            loop()
    mended.touch()
    assert found + flat(loader) == list(range(100))


def test_a_worker_that_is_killed_costs_no_sample_and_repeats_none(make: Make):
    """Out of memory, most of the time. torch says so in whatever code the training process is in."""
    loader = make(4, workers=2, seed=5)
    found: list[int] = []

    def loop_until(killed: int) -> None:
        for batch in loader:
            found.extend(batch.tolist())
            if len(found) >= killed:
                worker = loader._inner._iterator._workers[0]  # type: ignore[union-attr]
                worker.kill()
                worker.join()

    for killed in (20, 60):
        with pytest.raises(RuntimeError, match="worker"):
            loop_until(killed)
    assert found + flat(loader) == flat(make(seed=5))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_interrupt_leaves_nothing_behind(make: Make, workers: int):
    flat(make(workers=1))  # whatever torch keeps for good
    threads, before, kept = set(threading.enumerate()), descriptors(), set(children())
    loader = make(workers=workers, seed=5, continues=True)
    seen = []
    try:
        for batch in loader:
            seen += batch.tolist()
            if len(seen) == 24:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    loader.close()
    assert seen + flat(loader) == flat(make(seed=5)), "it can be used again"
    loader.close()
    del batch, loader
    until_s = time.monotonic() + 20  # the queues' own threads end by themselves
    while not set(threading.enumerate()) <= threads and time.monotonic() < until_s:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert not [name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name], "torch's names have our pid"
    assert not set(children()) - kept
    assert descriptors() <= before + 1


def test_one_thread_fetches_what_is_near_and_several_what_is_far(make: Make, numbers: MemorySource):
    fetching: list[int] = []
    together = threading.Event()

    def before(_items: Any) -> None:
        fetching.append(1)
        if len(fetching) > 1:
            together.set()
        elif numbers.cold and numbers.batches:  # all but the first wait for company
            assert together.wait(90)
        fetching.pop()

    numbers.before = before
    flat(make(4))
    assert not together.is_set()
    numbers.batches.clear()
    numbers.cold = 1
    assert sorted(flat(make(4))) == list(range(100))
    assert together.is_set()


def test_a_refusal_is_not_waited_for(numbers: MemorySource):
    patient = Patient(numbers, 60)
    numbers.before = lambda _items: (_ for _ in ()).throw(Denied("no: ask for a token"))
    with pytest.raises(Denied):
        patient.get_many([], Facts())


def test_closing_ends_a_wait(numbers: MemorySource, make: Make):
    numbers.fail = lambda item: Unavailable("away: wait")
    loader = make(dataset=ObjectDataset("b-1/numbers", source=numbers, patience_s=600))
    threads = set(threading.enumerate())
    raised: list[BaseException] = []

    def loop() -> None:
        try:
            flat(loader)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    while len(set(threading.enumerate()) - threads) < 2 or not numbers.batches:
        time.sleep(0.01)
    loader.close()
    thread.join(90)
    assert not thread.is_alive()
    assert "closed while it waited" in str(raised[0])


# --- the meter -------------------------------------------------------------------------------------------------------
def test_the_meter_says_what_steps_waited_for(make: Make, numbers: MemorySource):
    numbers.cold = 1
    loader = make(10)
    flat(loader)
    report = loader.stall.report()
    assert (report["steps"], report["samples"], report["items"], report["cold_items"]) == (10, 100, 100, 10)
    assert report["size_bytes"] == 190
    assert sum(report["seconds"].values()) == pytest.approx(report["waited_s"])
    assert 0 < report["worst_s"] <= report["waited_s"]
    assert 0 < report["stalled"] <= 1
    assert "10 steps" in str(loader.stall)
    loader.stall.reset()
    assert str(loader.stall) == "no steps yet"


def test_reasons_are_shared_out_by_what_the_batch_took(make: Make):
    meter = make().stall
    meter.add(1.0, 2.0, 8, Facts(read_s=1.0, busy_s=2.0, decode_s=1.0))
    assert meter.last == pytest.approx({"cold": 0.0, "busy": 0.5, "direct": 0.0, "decode": 0.25, "read": 0.25})
    meter.add(1.0, 1.0, 8, Facts(read_s=1.0, cold=3))
    assert meter.last == pytest.approx({"cold": 1.0, "busy": 0.0, "direct": 0.0, "decode": 0.0, "read": 0.0})
    meter.add(1.0, 1.0, 8, Facts(read_s=3.0, decode_s=1.0, cold=1, direct=8))
    assert meter.last == pytest.approx({"cold": 0.0, "busy": 0.0, "direct": 0.75, "decode": 0.25, "read": 0.0})
    assert meter.report()["direct_items"] == 8
    meter.add(0.5, 0.5, 8, Facts(skipped=["a"]))
    assert meter.last["read"] == 0.5
    assert "cold 1.00 s" in str(meter)
    assert "skipped 1, first a" in str(meter)
