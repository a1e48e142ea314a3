"""Computes what `forebay top` shows from two snapshots of the metrics. Pure, so tests use plain numbers.

Theory. A rate is the difference between two snapshots divided by the time between them; a state is the later snapshot's
gauge. Percentiles come from histogram differences and are upper bounds (buckets double).
"""

from __future__ import annotations

import msgspec

from forebay.client.exposition import since, total
from forebay.core.messages.node_state import NodeState
from forebay.core.metrics import Snapshot


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in seconds over the interval; None where nothing happened."""

    count: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class BucketView(msgspec.Struct, frozen=True):
    name: str
    cached_bytes: int
    backend_bytes_s: float
    backend_requests_s: float
    backend_errors: int
    error: str


class View(msgspec.Struct, frozen=True):
    """One look. Rates are per second over `interval_s`; ratios are None where nothing was read."""

    endpoint: str
    interval_s: float
    requests_s: float
    hit_ratio: float | None
    hit_ratio_bytes: float | None
    sent_bytes_s: float
    hit_bytes_s: float
    miss_bytes_s: float
    backend_bytes_s: float
    backend_requests_s: float
    backend_errors: int
    errors: int
    evictions: int
    evicted_bytes_s: float
    passed_bytes_s: float
    flights: int
    connections: int
    jobs_running: int
    used_bytes: int
    capacity_bytes: int
    hit: Latency
    miss_first_byte: Latency
    backend_first_byte: Latency
    buckets: list[BucketView]


def look(before: Snapshot, after: Snapshot, interval_s: float, state: NodeState) -> View:
    """The view of what happened between two snapshots `interval_s` apart."""
    assert interval_s > 0, "two looks are some time apart"
    change = since(before, after)

    def rate(name: str, **labels: str) -> float:
        return total(change, name, **labels) / interval_s

    hits, misses = (
        total(change, "forebay_reads_total", result="hit"),
        total(change, "forebay_reads_total", result="miss"),
    )
    hit_bytes = total(change, "forebay_read_bytes_total", result="hit")
    miss_bytes = total(change, "forebay_read_bytes_total", result="miss")
    return View(
        endpoint=state.endpoint,
        interval_s=interval_s,
        requests_s=rate("forebay_requests_total"),
        hit_ratio=_share(hits, misses),
        hit_ratio_bytes=_share(hit_bytes, miss_bytes),
        sent_bytes_s=rate("forebay_sent_bytes_total"),
        hit_bytes_s=hit_bytes / interval_s,
        miss_bytes_s=miss_bytes / interval_s,
        backend_bytes_s=rate("forebay_backend_read_bytes_total"),
        backend_requests_s=rate("forebay_backend_requests_total"),
        backend_errors=int(total(change, "forebay_backend_errors_total")),
        errors=int(total(change, "forebay_reads_total", result="error")),
        evictions=int(total(change, "forebay_evictions_total")),
        evicted_bytes_s=rate("forebay_evicted_bytes_total"),
        passed_bytes_s=rate("forebay_passed_bytes_total"),
        flights=int(total(after, "forebay_flights")),
        connections=int(total(after, "forebay_connections_open")),
        jobs_running=state.jobs_running,
        used_bytes=sum(volume.used_bytes for volume in state.volumes),
        capacity_bytes=sum(volume.capacity_bytes for volume in state.volumes),
        hit=_latency(change, "forebay_hit_seconds"),
        miss_first_byte=_latency(change, "forebay_miss_first_byte_seconds"),
        backend_first_byte=_latency(change, "forebay_backend_first_byte_seconds"),
        buckets=[
            BucketView(
                bucket.name,
                bucket.cached_bytes,
                rate("forebay_backend_read_bytes_total", bucket=bucket.name),
                rate("forebay_backend_requests_total", bucket=bucket.name),
                int(total(change, "forebay_backend_errors_total", bucket=bucket.name)),
                bucket.error,
            )
            for bucket in state.buckets
        ],
    )


def _share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest else None


def _latency(change: Snapshot, name: str) -> Latency:
    histogram = change.histograms.get(name)
    count = sum(histogram.counts) if histogram else 0
    if histogram is None or not count:
        return Latency(0, None, None, None)
    return Latency(count, histogram.quantile_s(0.5), histogram.quantile_s(0.9), histogram.quantile_s(0.99))
