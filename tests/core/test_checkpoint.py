"""Checkpoints as values: names, manifests, indexes, what may be pruned, and how often to save."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core import checkpoint as form
from forebay.core.checkpoint import PIECE_BYTES, Entry, Index, Manifest, RankPart
from forebay.core.checkpoint_interval import INTERVAL_S_MIN, MTTI_GUESS_S, Interval, daly_s, waste, young_s
from forebay.core.errors import Corrupt, Invalid
from forebay.core.goodput import Life, as_metrics, goodput
from forebay.core.metrics import render

MANIFEST = Manifest(
    12, 3400, "ab" * 8, 1.7e9, (RankPart("d" * 32, 700, (5, 6)), RankPart("e" * 32, 800, ())), ("model",)
)


def test_a_manifest_is_read_as_it_was_written_and_any_flipped_bit_is_seen():
    data = MANIFEST.to_bytes()
    assert Manifest.read(data) == MANIFEST
    assert MANIFEST.size_bytes == 700 + 5 + 6 + 800
    assert len(list(MANIFEST.objects())) == 4
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x04
        with pytest.raises((Corrupt, Invalid)):
            assert Manifest.read(bytes(flipped)) != MANIFEST
    for cut in range(0, len(data) - 1, 7):
        with pytest.raises(Corrupt):
            Manifest.read(data[:cut])


def test_a_later_format_is_told_from_damage():
    body = MANIFEST.to_bytes().partition(b"\n")[0].replace(b'"format":1', b'"format":2')
    later = body + b"\n" + form.digest_of(body).encode() + b"\n"
    with pytest.raises(Invalid, match="format 1"):
        Manifest.read(later)


def test_an_index_that_contradicts_itself_is_refused():
    entry = Entry("model/w", "float32", (3,), 0, 12)
    good = Index(0, 12, PIECE_BYTES, (entry,), "0" * 16, {"model": {"x": "model/w"}})
    assert Index.read(good.to_bytes(), form.digest_of(good.to_bytes())) == good
    with pytest.raises(Corrupt, match="not the one that the manifest names"):
        Index.read(good.to_bytes(), "0" * 32)
    for wrong in (
        Index(0, 11, PIECE_BYTES, (entry,), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (entry,), "0" * 15, {}),
        Index(0, 12, 100, (entry,), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (Entry("w", "float32", (3,), -1, 12),), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (Entry("w", "float32", (2**40, 2**40), 0, 12),), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (Entry("w", "float32", (-3,), 0, 12),), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (Entry("w", "float32", (3,), 0, 12, (3,), (1,)),), "0" * 16, {}),
        Index(0, 12, PIECE_BYTES, (Entry("w", "float32", (3,), 0, 12, (3, 3), (0, 0)),), "0" * 16, {}),
    ):
        data = wrong.to_bytes()
        with pytest.raises(Corrupt):
            Index.read(data, form.digest_of(data))


@given(st.integers(0, 10**12 - 1), st.integers(0, 2**64 - 1), st.integers(0, 999_999), st.integers(0, 999_999))
def test_names_say_what_they_are_of(sequence: int, token: int, rank: int, blob: int):
    text = f"{token:016x}"
    assert form.sequence_of(form.manifest_name(sequence)) == sequence
    for name in (form.blob_name(sequence, text, rank, blob), form.index_name(sequence, text, rank)):
        assert form.save_of(name) == (sequence, text)
        assert form.sequence_of(name) is None
    assert form.save_of(form.manifest_name(sequence)) is None
    assert form.sequence_of("manifests/000000000012.bak") is None


@given(st.integers(0, 2**50))
def test_blobs_are_whole_pieces_of_a_sensible_size(stream_bytes: int):
    blob_bytes = form.blob_bytes_for(stream_bytes)
    assert blob_bytes % PIECE_BYTES == 0
    assert form.BLOB_BYTES_MIN <= blob_bytes <= form.BLOB_BYTES_MAX


@given(st.sets(st.integers(1, 40)), st.integers(1, 10), st.data())
def test_what_the_bucket_has_whole_and_all_that_is_newer_stays(sequences: set[int], keep: int, data: st.DataObject):
    durable = data.draw(st.sampled_from([None, *sorted(sequences)]))
    going = set(form.prunable(list(sequences), keep, durable))
    newest = set(sorted(sequences)[-keep:])
    if durable is None:
        assert not going
    else:
        assert going == {sequence for sequence in sequences if sequence not in newest and sequence < durable}
    with pytest.raises(Invalid):
        form.prunable(list(sequences), 0, durable)


def test_the_interval_is_that_of_young_and_daly():
    assert young_s(30, 3.09 * 3600) == pytest.approx(817, abs=1)  # 13.6 minutes
    assert daly_s(1, 7.9 * 3600) == pytest.approx(238, abs=1)
    assert daly_s(50_000, 20_000) == 20_000, "beyond the formula's range"
    for stall_s, mtti_s in ((30, 3.09 * 3600), (1, 3.09 * 3600), (30, 7.9 * 3600), (1, 7.9 * 3600)):
        best = min(waste(s, stall_s, mtti_s) for s in [stall_s * 1.02**n for n in range(600)])
        assert waste(daly_s(stall_s, mtti_s), stall_s, mtti_s) <= best + 0.002


FAILURES, RUNS, RESTART_S = 150, 6, 60.0


def fixed_work_s(interval_s: float, stall_s: float, lag_s: float, gap_s: float) -> float:
    """How much of a life that ends after `gap_s` counts, with a save each `interval_s` of work. It begins restored."""
    saves = max(0, math.floor((gap_s - lag_s) / (interval_s + stall_s)))
    return saves * interval_s


def auto_work_s(past: list[Life], began_s: float, stall_s: float, lag_s: float, gap_s: float) -> Life:
    """A life as a `Checkpointer` with `every="auto"` has it, which knows what its run has recorded, and nothing more;
    its record."""
    found = goodput(past)
    interval = Interval(None, found.failures + bool(past), found.run_s, began_s)
    end_s, now_s = began_s + gap_s, began_s
    life = Life(began_s, began_s)
    while now_s < end_s:
        assert interval.due(now_s)
        now_s += stall_s
        interval.saved(now_s, stall_s)
        if now_s + lag_s > end_s:
            break
        interval.durable(lag_s)
        life = Life(began_s, now_s, stall_s=life.stall_s + stall_s, saves=life.saves + 1)
        saved_s = now_s
        while not interval.due(now_s):  # an estimate grows while nothing fails
            now_s = saved_s + interval.reason(now_s).interval_s + 1e-6
    return life


@pytest.mark.parametrize("lag_s", [0.0, 20.0])
@pytest.mark.parametrize("stall_s", [1.0, 30.0])
@pytest.mark.parametrize("mtti_h", [3.09, 7.9])
def test_auto_loses_hardly_more_than_the_best_fixed_interval(stall_s: float, mtti_h: float, lag_s: float):
    """Poisson failures, fresh ones each time: the same for both. The best is found with them, too, as nobody could."""
    seed = random.SystemRandom().getrandbits(32)
    mtti_s, chance = mtti_h * 3600, random.Random(seed)
    factors = [0.3 * 1.15**n for n in range(20)]
    fixed = dict.fromkeys(factors, 0.0)
    auto = 0.0
    for _ in range(RUNS):
        gaps = [chance.expovariate(1 / mtti_s) for _ in range(FAILURES)]
        lives: list[Life] = []
        now_s = 0.0
        for gap_s in gaps:
            for factor in factors:
                interval_s = max(daly_s(stall_s, mtti_s) * factor, lag_s)
                fixed[factor] += fixed_work_s(interval_s, stall_s, lag_s, gap_s)
            life = auto_work_s(lives, now_s, stall_s, lag_s, gap_s)
            lives.append(life)
            auto += life.saved_s - life.began_s - life.stall_s
            now_s += gap_s + RESTART_S
    assert auto >= 0.98 * max(fixed.values()), f"goodput within 2 % of the best fixed interval's: seed {seed}"


def test_the_estimate_follows_what_happens_and_says_why():
    interval = Interval()
    assert interval.due(0.0), "the first save measures the stall"
    interval.saved(10.0, 2.0)
    interval.durable(30.0)
    calm = interval.reason(10.0)
    assert calm.mtti_s == pytest.approx(MTTI_GUESS_S + 10)
    assert calm.interval_s == pytest.approx(daly_s(2.0, calm.mtti_s))
    assert not interval.due(10.0 + calm.interval_s / 2)
    assert interval.due(10.0 + calm.interval_s + 5)
    interval.failures = 9
    assert interval.reason(10.0).mtti_s == pytest.approx((MTTI_GUESS_S + 10) / 10)
    assert "from 9 failures" in str(interval.reason(10.0))
    interval.durable(4000.0)
    interval.durable(4000.0)
    assert interval.reason(10.0).interval_s == 4002.0, "never more often than saves become durable"
    assert Interval().reason(5.0).interval_s == INTERVAL_S_MIN
    given_ = Interval(mtti_s=3600.0)
    given_.failures = 50
    assert given_.reason(0.0).mtti_s == 3600.0
    for wrong in (0.0, -5.0, math.inf):
        with pytest.raises(Invalid):
            Interval(mtti_s=wrong)


def test_the_time_of_a_run_is_divided_without_rest():
    lives = [
        Life(began_s=0, saved_s=1000, restored_s=10, stall_s=40, saves=4, step=400),  # killed after its last save
        Life(began_s=1200, saved_s=2200, restored_s=30, stall_s=20, saves=2, step=600, ended=True),
        Life(began_s=5000, saved_s=5000),  # killed before it saved anything
        Life(began_s=5300, saved_s=6300, restored_s=5, stall_s=5, saves=1, step=700),
    ]
    for order in (lives, lives[::-1]):
        found = goodput(order)
        assert (found.stalled_s, found.restarting_s, found.failures, found.saves) == (65, 45, 2, 7)
        assert found.lost_s == 200 + 300
        assert found.productive_s == 3000 - 65 - 45
        assert found.run_s == 6300 - (5000 - 2200), "the pause between two runs is nobody's"
        assert found.share == pytest.approx(2890 / 3500)
    assert goodput([]).share == 0.0


def test_a_runs_time_is_told_as_metrics():
    lives = [Life(0, 1000, 10, 40, 4, 400), Life(1200, 2200, 30, 20, 2, 600, ended=True), Life(5000, 5000)]
    told = as_metrics('b/run "x"', lives)
    told.check()
    text = render(told)
    assert 'forebay_run_seconds{run="b/run \\"x\\"",part="lost"} 200' in text
    assert 'forebay_run_saved_seconds{run="b/run \\"x\\""} 2200' in text
    assert "forebay_run_saved_seconds" not in render(as_metrics("b/run", lives[2:]))
