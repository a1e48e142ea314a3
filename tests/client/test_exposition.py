"""Metrics come back as they were printed, and only differences are shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.client import exposition
from forebay.core.errors import Corrupt
from forebay.core.metrics import BUCKETS, METRICS, HistogramValue, Snapshot, render, series

plain = sorted(name for name, metric in METRICS.items() if metric.kind != "histogram")
histograms = sorted(name for name, metric in METRICS.items() if metric.kind == "histogram")
label_text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=8)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    values = {}
    for name in draw(st.lists(st.sampled_from(plain), max_size=6)):
        labels = {label: draw(label_text) for label in METRICS[name].labels}
        values[series(name, **labels)] = float(draw(st.integers(0, 1 << 50)))
    found = {}
    for name in draw(st.lists(st.sampled_from(histograms), max_size=3)):
        counts = draw(st.lists(st.integers(0, 1000), min_size=BUCKETS, max_size=BUCKETS))
        found[series(name)] = HistogramValue(counts, float(draw(st.integers(0, 1 << 30))) / 1024)
    return Snapshot(values, found)


@given(snapshots())
@settings(max_examples=60)
def test_what_is_printed_is_read_back(snapshot: Snapshot) -> None:
    assert exposition.parse(render(snapshot)) == snapshot


@given(snapshots())
@settings(max_examples=30)
def test_nothing_happens_between_a_moment_and_itself(snapshot: Snapshot) -> None:
    change = exposition.since(snapshot, snapshot)
    for name, value in change.values.items():
        if METRICS[name.partition("{")[0]].kind == "counter":
            assert value == 0
    assert all(not any(histogram.counts) for histogram in change.histograms.values())


def test_a_counter_that_fell_counts_from_zero() -> None:
    name = series("forebay_reads_total", result="hit")
    before, after = Snapshot({name: 100.0}), Snapshot({name: 7.0})
    assert exposition.since(before, after).values[name] == 7.0


def test_gauges_are_as_they_are_now() -> None:
    before, after = Snapshot({"forebay_flights": 9.0}), Snapshot({"forebay_flights": 2.0})
    assert exposition.since(before, after).values["forebay_flights"] == 2.0


def test_totals_sum_over_labels() -> None:
    snapshot = Snapshot(
        {
            series("forebay_backend_requests_total", bucket="a", verb="get"): 3.0,
            series("forebay_backend_requests_total", bucket="a", verb="head"): 4.0,
            series("forebay_backend_requests_total", bucket="b", verb="get"): 5.0,
        }
    )
    assert exposition.total(snapshot, "forebay_backend_requests_total") == 12
    assert exposition.total(snapshot, "forebay_backend_requests_total", bucket="a") == 7
    assert exposition.total(snapshot, "forebay_backend_requests_total", bucket="a", verb="head") == 4
    assert exposition.total(snapshot, "forebay_backend_requests_total", bucket="c") == 0


def test_names_of_a_newer_node_are_left_out() -> None:
    assert exposition.parse("forebay_of_tomorrow 1\nforebay_flights 2\n").values == {"forebay_flights": 2.0}


@pytest.mark.parametrize("text", ["<html>", "forebay_flights many"])
def test_what_is_not_metrics_is_refused(text: str) -> None:
    with pytest.raises(Corrupt):
        exposition.parse(text)
