"""The engine's counters.

Theory. Plain integers in one object, which become a `Snapshot` on request (see `core/metrics.py`). Requests to backends
are counted by their own layer (`backends/wrap/counting.py`); here their series get their names.

Invariant. Every series is one of `core.metrics.METRICS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from forebay.backends.wrap.counting import FIRST_BYTE_BUCKETS_S, BackendCounters
from forebay.core.metrics import BUCKETS, Histogram, HistogramValue, Snapshot, series


class Tally:
    """One per engine."""

    def __init__(self) -> None:
        self.evictions: Counter[str] = Counter()  # by reason: capacity, hint, asked
        self.evicted_bytes = 0
        self.passed_bytes = 0
        self.ranged_bytes = 0  # fetched for jobs range by range, and not kept
        self.revalidations: Counter[str] = Counter()  # by result: unchanged, changed, gone, unreachable
        self.prestaged: Counter[str] = Counter()  # by result: fetched, present, refused, failed
        self.prestaged_bytes = 0
        self.hinted_bytes = 0  # fetched ahead because of hints
        self.hinted_hits = 0  # blocks of them that somebody read

    def snapshot(self, backends: Iterable[tuple[str, BackendCounters]]) -> Snapshot:
        """The counters, with those of the backends (by bucket). The caller adds gauges."""
        values: dict[str, float] = {
            "forebay_evicted_bytes_total": self.evicted_bytes,
            "forebay_passed_bytes_total": self.passed_bytes,
            "forebay_prestaged_bytes_total": self.prestaged_bytes,
            "forebay_hint_fetched_bytes_total": self.hinted_bytes,
            "forebay_hint_hits_total": self.hinted_hits,
            "forebay_hint_ranged_bytes_total": self.ranged_bytes,
        }
        for reason, count in self.evictions.items():
            values[series("forebay_evictions_total", reason=reason)] = count
        for result, count in self.prestaged.items():
            values[series("forebay_prestaged_total", result=result)] = count
        for result, count in self.revalidations.items():
            values[series("forebay_revalidations_total", result=result)] = count
        first_bytes = [0] * BUCKETS
        first_byte_sum_s = 0.0
        for bucket, counters in backends:
            for verb, count in counters.requests.items():
                values[series("forebay_backend_requests_total", bucket=bucket, verb=verb)] = count
            for kind, count in counters.errors.items():
                values[series("forebay_backend_errors_total", bucket=bucket, kind=kind)] = count
            values[series("forebay_backend_retries_total", bucket=bucket)] = counters.retries
            values[series("forebay_backend_read_bytes_total", bucket=bucket)] = counters.read_bytes
            values[series("forebay_peer_read_bytes_total", bucket=bucket)] = counters.peer_bytes
            values[series("forebay_backend_written_bytes_total", bucket=bucket)] = counters.written_bytes
            values[series("forebay_uploads_left_total", bucket=bucket)] = counters.uploads_left
            first_byte_sum_s += counters.first_byte_sum_s
            for index, count in enumerate(counters.first_byte_counts):
                first_bytes[_bucket_of(index)] += count
        histogram = HistogramValue(first_bytes, first_byte_sum_s)
        return Snapshot(values, {"forebay_backend_first_byte_seconds": histogram})


def _bucket_of(index: int) -> int:
    """The metrics bucket that holds the upper bound of a first-byte bucket. Both are upper bounds, so no count moves
    below its own."""
    if index >= len(FIRST_BYTE_BUCKETS_S):
        return BUCKETS - 1
    probe = Histogram()
    probe.add(FIRST_BYTE_BUCKETS_S[index] * 0.999)
    return probe.counts.index(1)
