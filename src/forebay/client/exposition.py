"""Parses a node's `/-/metrics` into a snapshot, and subtracts two snapshots.

Theory. The node prints a `core.metrics.Snapshot` in Prometheus's text format; this is the inverse of
`core.metrics.render`. A dashboard shows rates between two looks, so `since` subtracts counters and histograms and keeps
gauges as they are now.

Invariants. (1) `parse(render(snapshot))` is `snapshot`, without series that hold nothing. (2) A counter that fell (the
node was restarted) counts from zero: a difference is never negative.
"""

from __future__ import annotations

from forebay.core.errors import Corrupt
from forebay.core.metrics import BUCKETS, METRICS, HistogramValue, Snapshot


def parse(text: str) -> Snapshot:
    """The snapshot that `text` prints. Families this version does not know are left out, so versions can mix.

    `Corrupt` if a line is not of the text format: something other than a node answered.
    """
    values: dict[str, float] = {}
    cumulative: dict[str, list[int]] = {}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        series, space, number = line.rpartition(" ")
        if not space:
            raise Corrupt(f"the metrics hold the line {line[:60]!r}: check that a Forebay node answers at this URL")
        try:
            value = float(number)
        except ValueError:
            raise Corrupt(
                f"the metrics hold the number {number[:40]!r}: check that a Forebay node answers at this URL"
            ) from None
        name, brace, labels = series.partition("{")
        if name in METRICS:
            values[series] = value
            continue
        base, _, part = name.rpartition("_")
        if base not in METRICS or METRICS[base].kind != "histogram":
            continue
        if part == "bucket":
            kept = _without_bound(labels)
            cumulative.setdefault(base + kept, []).append(int(value))
        elif part == "sum":
            sums[base + brace + labels] = value
    histograms = {
        series: HistogramValue(_differences(counts), sums.get(series, 0.0)) for series, counts in cumulative.items()
    }
    return Snapshot(values, histograms)


def _without_bound(labels: str) -> str:
    """`a="b",le="0.5"}` to `{a="b"}`; only `le` to nothing. `le` comes last, as `render` writes it."""
    kept = labels[: labels.rfind('le="')].rstrip(",")
    return "{" + kept + "}" if kept else ""


def _differences(cumulative: list[int]) -> list[int]:
    counts = [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]
    return (counts + [0] * BUCKETS)[:BUCKETS]


def since(before: Snapshot, after: Snapshot) -> Snapshot:
    """What happened between two snapshots: counters and histograms subtracted, gauges as `after` has them."""
    values: dict[str, float] = {}
    for series, value in after.values.items():
        if METRICS[series.partition("{")[0]].kind == "gauge":
            values[series] = value
            continue
        old = before.values.get(series, 0.0)
        values[series] = value - old if value >= old else value
    histograms: dict[str, HistogramValue] = {}
    for series, histogram in after.histograms.items():
        old_counts = before.histograms.get(series, HistogramValue([0] * BUCKETS, 0.0))
        counts = [now - then for now, then in zip(histogram.counts, old_counts.counts, strict=True)]
        fell = any(count < 0 for count in counts)
        histograms[series] = histogram if fell else HistogramValue(counts, max(0.0, histogram.sum_s - old_counts.sum_s))
    return Snapshot(values, histograms)


def total(snapshot: Snapshot, name: str, **labels: str) -> float:
    """The sum of the series of `name` whose labels include `labels`; 0.0 when there is none."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    found = 0.0
    for series, value in snapshot.values.items():
        base, _, rest = series.partition("{")
        if base == name and all(f"{{{want}" in series or f",{want}" in rest for want in wanted):
            found += value
    return found
