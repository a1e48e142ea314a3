"""The rows of MLPerf's shapes: the emulated accelerator, the search for a load, and our client at both servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import main
from bench.accelerator import fed as accelerator
from bench.accelerator import job as accelerator_job
from bench.parts import Lab
from bench.row import Objects
from bench.workloads import BY_NAME

WORK = {"sizes": {"a": 10, "b": 30}, "repeats": 2}


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(accelerator_job, "time", clock)
    return clock


def arriving(clock: Clock, waits_s: list[float]) -> Iterator[list[int]]:
    for wait_s in waits_s:
        clock.sleep(wait_s)
        yield [20]


def test_utilisation_is_the_time_of_computing_without_the_first_step(clock: Clock):
    told = accelerator_job.epoch(arriving(clock, [50.0, 0.0, 0.0, 1.0]), WORK, 1.0)
    assert told == {"steps": 3, "run_s": pytest.approx(4.0), "utilisation": pytest.approx(0.75)}


def test_an_epoch_that_lacks_bytes_is_an_error(clock: Clock):
    with pytest.raises(SystemExit, match="3 steps gave 60 bytes, not 80"):
        accelerator_job.epoch(arriving(clock, [0.0] * 3), WORK, 1.0)


class Limited:
    """A server that needs `step_s` for a step of which nothing is computed meanwhile."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def round(self, asked: str) -> dict[str, float]:
        return {"utilisation": min(1.0, float(asked) / self.step_s)}


@pytest.mark.parametrize("begin_s", [0.2, 0.9, 3.0])
def test_the_load_is_the_highest_that_keeps_it_busy(begin_s: float):
    job: Any = Limited(1.0)
    assert 0.9 <= accelerator.highest_load(job, begin_s, 20) <= 0.93


def test_a_server_that_nginx_could_not_follow_either_is_held_to_what_nginx_did():
    row = BY_NAME["mlperf-unet3d"]
    measure = accelerator.judged(row, "s3dlio", [(0.91, 0.97), (0.80, 0.85), (0.81, 0.90)], "s3dlio")
    assert measure.ratios == pytest.approx((91 / 90, 80 / 85, 81 / 90))
    assert measure.verdict == "MISSED"
    reached = accelerator.judged(row, "forebay", [(0.90, 0.97)], "s3dlio")
    assert (reached.verdict, reached.peer) == ("reached", "nginx, s3dlio")


def test_files_vary_around_the_size_that_the_row_says():
    (objects,) = BY_NAME["mlperf-unet3d"].objects
    sizes = accelerator.sizes_of(objects, accelerator.SHAPES["unet3d"])
    assert len(sizes) == objects.count
    assert sum(sizes.values()) == pytest.approx(objects.bytes_total, abs=objects.count)
    assert max(sizes.values()) > 1.5 * objects.size_bytes
    assert min(sizes.values()) < 0.7 * objects.size_bytes
    (alike,) = BY_NAME["mlperf-retinanet"].objects
    assert set(accelerator.sizes_of(alike, accelerator.SHAPES["retinanet"]).values()) == {322_957}


@pytest.mark.real
def test_our_client_is_fed_by_both_servers_and_absent_ones_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FOREBAY_BENCH_PEERS", str(tmp_path / "none"))
    with Lab(quick=True) as lab:
        row = dataclasses.replace(BY_NAME["mlperf-unet3d"], quick=(Objects("unet3d-few", 300_000, 14),))
        result = main.run_row(lab, row)
        assert not result.error
        assert not list(lab.files.iterdir()), "gigabytes are removed with the row"
    (measure,) = result.measures
    assert (measure.name, measure.peer, len(measure.ours)) == ("busy, forebay", "nginx", 2)
    assert all(0 < each <= 100 for each in (*measure.ours, *measure.theirs))
    assert "forebay: k = " in result.notes[1]
    assert "only our own client: the peers are missing" in result.notes[-1]
