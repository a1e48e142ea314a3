"""Counting: histograms, series names, merging, and that the document says the same as the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Bug
from forebay.core.metrics import (
    BUCKETS,
    METRICS,
    Histogram,
    HistogramValue,
    Snapshot,
    bound_s,
    decode_snapshot,
    encode_snapshot,
    label_names,
    merge,
    render,
    series,
)
from forebay.node.front.http.counts import VERB_AT, VERB_OTHER, FrontCounts


@given(st.floats(0, 1e5, allow_nan=False))
@settings(max_examples=200)
def test_a_duration_is_counted_below_its_bound_and_not_below_the_one_before(seconds: float) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    (index,) = [index for index, count in enumerate(histogram.counts) if count]
    micros = int(seconds * 1e6)
    assert micros < 1 << index or index == BUCKETS - 1
    assert index == 0 or micros >= 1 << (index - 1)
    assert histogram.value().quantile_s(0.5) == bound_s(index)


def test_quantiles_and_clocks_that_step() -> None:
    histogram = Histogram()
    assert histogram.value().quantile_s(0.99) == 0.0
    histogram.add(-1.0)
    assert histogram.counts[0] == 1
    for _ in range(98):
        histogram.add(10e-6)
    histogram.add(1.0)
    assert histogram.value().quantile_s(0.5) == 16e-6
    assert histogram.value().quantile_s(0.999) == bound_s(20)


_LABEL = st.text(alphabet=st.sampled_from('ab"\\\n,={} '), max_size=8)


@given(_LABEL, _LABEL)
@settings(max_examples=100)
def test_labels_of_any_text_are_found_again(bucket: str, verb: str) -> None:
    name = series("forebay_backend_requests_total", bucket=bucket, verb=verb)
    assert label_names(name) == ("bucket", "verb")
    assert "\n" not in name
    Snapshot({name: 1.0}).check()


def test_an_unknown_series_or_label_is_a_bug() -> None:
    for name in (
        "forebay_nothing_total",
        "forebay_reads_total",
        'forebay_reads_total{other="x"}',
        "forebay_hit_seconds",
    ):
        with pytest.raises(Bug):
            Snapshot({name: 1.0}).check()
    with pytest.raises(Bug):
        Snapshot({}, {"forebay_flights": HistogramValue([0] * BUCKETS, 0.0)}).check()


def test_merging_is_adding_in_any_order() -> None:
    one, two = FrontCounts(), FrontCounts()
    one.hits, two.hits = 3, 4
    one.hit_seconds.add(0.001)
    two.hit_seconds.add(0.001)
    two.requests[VERB_AT[b"GET"] + 2] = 5
    two.requests[VERB_OTHER + 4] = 1
    parts = [one.snapshot(), two.snapshot(), Snapshot({"forebay_flights": 2.0})]
    whole = merge(parts)
    assert whole == merge(reversed(parts)) == merge([merge(parts[:2]), parts[2]])
    assert decode_snapshot(encode_snapshot(whole)) == whole
    assert whole.values['forebay_reads_total{result="hit"}'] == 7
    assert whole.values['forebay_requests_total{verb="GET",status="2xx"}'] == 5
    assert whole.values['forebay_requests_total{verb="other",status="4xx"}'] == 1
    assert sum(whole.histograms["forebay_hit_seconds"].counts) == 2
    whole.check()
    assert 'forebay_hit_seconds_bucket{le="+Inf"} 2' in render(whole)


def test_the_document_says_type_and_labels_as_the_code_does() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(forebay_\w+)(?:{([\w,]+)})?` \| (\w+) \|", text, re.MULTILINE)
    assert {name: (tuple(filter(None, labels.split(","))), kind) for name, labels, kind in rows} == {
        metric.name: (metric.labels, metric.kind) for metric in METRICS.values()
    }
