"""Worker processes of the loader, and the memory that they keep."""

from __future__ import annotations

import multiprocessing
import os
import resource
from typing import Any

import pytest

from forebay.torch import DataLoader, ObjectDataset, fetching
from forebay.torch.fetching import keep_memory
from tests.torch.memory_source import MemorySource

PICTURE_BYTES, PICTURES = 2 << 20, 8


def faults_of_batches(keeps: bool, told: Any) -> None:
    """How often the kernel gives pages while memory is taken and given back ten times, as decoders do."""
    kept = keep_memory() if keeps else False
    for batch in range(11):
        if batch == 1:  # the first has its pages in any case
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pictures = [bytearray(PICTURE_BYTES) for _ in range(PICTURES)]
        del pictures
    told.send((kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def faults(keeps: bool) -> tuple[bool, int]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=faults_of_batches, args=(keeps, there))
    process.start()
    assert here.poll(60)
    told: tuple[bool, int] = here.recv()
    process.join()
    return told


def test_memory_that_is_kept_is_not_asked_for_again() -> None:
    kept, few = faults(True)
    if not kept:
        pytest.skip("another allocator than glibc's")
    _, many = faults(False)
    assert few < many / 20
    assert many > 10 * PICTURES * PICTURE_BYTES // os.sysconf("SC_PAGE_SIZE") / 2, "else there was nothing to be won"


class Telling:
    """A decoder that says whether its process keeps memory, and how many faults it has for a sample."""

    def __init__(self, called: list[int]) -> None:
        self.called = called

    def __call__(self, key: str, data: Any) -> tuple[bool, int]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pictures = [bytearray(PICTURE_BYTES) for _ in range(PICTURES)]
        del pictures
        return os.getpid() in self.called, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.parametrize("setting", ["", "MALLOC_TRIM_THRESHOLD_"])
def test_workers_keep_memory_unless_the_user_has_set_it(
    numbers: MemorySource, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    if not faults(True)[0]:
        pytest.skip("another allocator than glibc's")
    if setting:
        monkeypatch.setenv(setting, "131072")  # for what is started later; here it is only seen
    called: list[int] = []  # in the worker, which is forked
    monkeypatch.setattr(fetching, "keep_memory", lambda: called.append(os.getpid()) or keep_memory())
    dataset = ObjectDataset("b-1/numbers", source=numbers, decode=Telling(called))
    with DataLoader(dataset, 10, workers=1, collate=list, start_method="fork") as loader:
        found = [told for batch in loader for told in batch]
    assert {kept for kept, _ in found} == {not setting}
    if not setting:
        later = sorted(fault for _, fault in found[20:])
        assert later[len(later) // 2] < PICTURES * PICTURE_BYTES / os.sysconf("SC_PAGE_SIZE") / 2
    assert not called, "the training process is the user's"
