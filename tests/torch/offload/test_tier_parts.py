"""The parts of tiers by themselves: room against a dumb model, and time on a clock that tests move."""

import threading

import numpy as np
import pytest

from forebay.offload.tiers.extents import BLOCK_BYTES, Extents, blocks
from forebay.offload.tiers.queues import CATCH_UP_S, Throttle


@pytest.mark.parametrize("seed", range(20))
def test_extents_agree_with_a_list_of_blocks(seed: int) -> None:
    chance = np.random.default_rng(seed)
    count = int(chance.integers(1, 60))
    extents, model = Extents(count * BLOCK_BYTES), [False] * count
    held: list[tuple[int, int]] = []

    def runs() -> list[int]:
        """Lengths of free stretches."""
        return [len(run) for run in "".join("x" if taken else "." for taken in model).split("x") if run]

    for _ in range(300):
        if held and chance.random() < 0.45:
            begin, size = held.pop(int(chance.integers(len(held))))
            extents.give(begin * BLOCK_BYTES, size * BLOCK_BYTES)
            model[begin : begin + size] = [False] * size
        else:
            size = int(chance.integers(1, 12))
            fitting = [run for run in runs() if run >= size]
            before = sorted(runs())
            at = extents.take(size * BLOCK_BYTES)
            assert (at is None) == (not fitting)
            if at is not None:
                begin = at // BLOCK_BYTES
                assert not any(model[begin : begin + size])
                model[begin : begin + size] = [True] * size
                held.append((begin, size))
                before.remove(min(fitting))  # the smallest that fits is what was cut
                assert sorted(runs()) == sorted([*before, *([min(fitting) - size] if min(fitting) > size else [])])
        extents.check()
        assert extents.free_bytes == model.count(False) * BLOCK_BYTES
        assert extents.largest_bytes == max(runs(), default=0) * BLOCK_BYTES


def test_extents_notice_what_is_given_back_twice() -> None:
    extents = Extents(4 * BLOCK_BYTES)
    extents.take(2 * BLOCK_BYTES)
    extents.give(0, BLOCK_BYTES)
    with pytest.raises(AssertionError, match="twice"):
        extents.give(0, BLOCK_BYTES)
    assert [blocks(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


class Moved:
    """A clock that stands still until someone sleeps, who oversleeps each time."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.now_s, self._late_s, self._lock = 100.0, late_s, threading.Lock()

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now_s += seconds + self._late_s


@pytest.mark.parametrize("late_s", [0.0, 0.001, CATCH_UP_S])
@pytest.mark.parametrize("bytes_s", [50e6, 400e6])
def test_a_throttle_keeps_its_rate_whoever_wakes_late(bytes_s: float, late_s: float) -> None:
    clock = Moved(late_s)
    throttle = Throttle(bytes_s, time_from=clock, sleep=clock.sleep)
    for _ in range(100):
        throttle.wait(throttle.book(8 << 20))
    taken_s, ideal_s = clock.now_s - 100.0, 100 * (8 << 20) / bytes_s
    assert taken_s == pytest.approx(ideal_s + late_s)


def test_a_throttle_gives_no_credit_for_a_rest_after_a_late_awakening() -> None:
    clock = Moved(late_s=0.004)
    throttle = Throttle(1e6, time_from=clock, sleep=clock.sleep)
    throttle.wait(throttle.book(500_000))
    assert clock.now_s == pytest.approx(100.504)
    clock.now_s += 0.001  # what the thread did meanwhile is not made up for
    assert throttle.book(500_000) == pytest.approx(101.001)
    throttle.wait(101.001)
    clock.now_s += 1.0
    assert throttle.book(500_000) == pytest.approx(clock.now_s + 0.5)


def test_a_throttle_is_shared_and_saves_nothing_up() -> None:
    clock = Moved()
    throttle = Throttle(1e6, time_from=clock, sleep=clock.sleep)
    ends = [throttle.book(500_000) for _ in range(4)]
    assert ends == pytest.approx([100.5, 101.0, 101.5, 102.0])
    clock.now_s = 200.0  # a long rest is no credit
    assert throttle.book(500_000) == pytest.approx(200.5)
    throttle.wait(150.0)  # past: no wait
    assert clock.now_s == 200.0
    assert throttle.book(500_000) == pytest.approx(201.0)
