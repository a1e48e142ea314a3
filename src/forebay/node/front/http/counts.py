"""The counters of a front: plain integers, which become metrics only when somebody asks.

Invariant. `snapshot` uses only series that `core/metrics.py` documents (it checks).
"""

from __future__ import annotations

from forebay.core.metrics import Histogram, Snapshot, series

VERBS = ("GET", "HEAD", "PUT", "POST", "DELETE", "other")
VERB_AT = {verb.encode(): index * 6 for index, verb in enumerate(VERBS[:-1])}
VERB_OTHER = 5 * 6
CUT_REASONS = ("client", "stall", "error", "header-timeout", "idle")


class FrontCounts:
    """Counters of one front. `requests` is indexed by `VERB_AT[method] + status // 100`."""

    __slots__ = (
        "batch_bytes",
        "batch_failed",
        "batch_hits",
        "batch_misses",
        "batches",
        "connections",
        "connections_over_share",
        "connections_refused",
        "connections_total",
        "cuts",
        "engine_connects",
        "hit_bytes",
        "hit_seconds",
        "hits",
        "lane_hits",
        "miss_bytes",
        "miss_first_byte_seconds",
        "misses",
        "read_errors",
        "reads_resumed",
        "reads_waiting",
        "relayed_bytes",
        "requests",
        "requests_refused",
        "sent_bytes",
        "shard_indexes",
        "suspects",
        "unproved_bytes",
    )

    def __init__(self) -> None:
        self.requests = [0] * (len(VERBS) * 6)
        self.requests_refused = 0
        self.batches = 0
        self.batch_hits = 0  # items of batches; those that were had count among hits and misses too
        self.batch_misses = 0
        self.batch_failed = 0
        self.batch_bytes = 0
        self.shard_indexes = 0  # begun to be built
        self.hits = 0
        self.lane_hits = 0  # hits that the fast lane answered: each is a GET with status 200 too
        self.hit_bytes = 0
        self.misses = 0
        self.miss_bytes = 0
        self.read_errors = 0
        self.reads_resumed = 0
        self.reads_waiting = 0
        self.relayed_bytes = 0
        self.suspects = 0
        self.unproved_bytes = 0
        self.sent_bytes = 0
        self.connections = 0
        self.connections_total = 0
        self.connections_refused = 0
        self.connections_over_share = 0  # of those refused
        self.engine_connects = 0
        self.cuts = dict.fromkeys(CUT_REASONS, 0)
        self.hit_seconds = Histogram()
        self.miss_first_byte_seconds = Histogram()

    def snapshot(self) -> Snapshot:
        """Everything counted so far, as a value that merges with other processes' snapshots."""
        values: dict[str, float] = {
            series("forebay_reads_total", result="hit"): self.hits + self.lane_hits,
            series("forebay_reads_total", result="miss"): self.misses,
            series("forebay_reads_total", result="error"): self.read_errors,
            series("forebay_read_bytes_total", result="hit"): self.hit_bytes,
            series("forebay_read_bytes_total", result="miss"): self.miss_bytes,
            "forebay_batches_total": self.batches,
            series("forebay_batch_items_total", result="hit"): self.batch_hits,
            series("forebay_batch_items_total", result="miss"): self.batch_misses,
            series("forebay_batch_items_total", result="failed"): self.batch_failed,
            "forebay_batch_bytes_total": self.batch_bytes,
            "forebay_shard_indexes_total": self.shard_indexes,
            "forebay_sent_bytes_total": self.sent_bytes,
            "forebay_connections_open": self.connections,
            "forebay_connections_total": self.connections_total,
            "forebay_connections_refused_total": self.connections_refused,
            "forebay_connections_over_share_total": self.connections_over_share,
            "forebay_unproved_bytes": self.unproved_bytes,
            "forebay_requests_refused_total": self.requests_refused,
            "forebay_reads_waiting": self.reads_waiting,
            "forebay_reads_resumed_total": self.reads_resumed,
            "forebay_relayed_bytes_total": self.relayed_bytes,
            "forebay_suspects_total": self.suspects,
            "forebay_engine_connects_total": self.engine_connects,
        }
        for reason, count in self.cuts.items():
            values[series("forebay_connections_cut_total", reason=reason)] = count
        requests = list(self.requests)
        requests[VERB_AT[b"GET"] + 2] += self.lane_hits
        for index, count in enumerate(requests):
            if count:
                verb, status = VERBS[index // 6], f"{index % 6}xx"
                values[series("forebay_requests_total", verb=verb, status=status)] = count
        snapshot = Snapshot(
            values,
            {
                "forebay_hit_seconds": self.hit_seconds.value(),
                "forebay_miss_first_byte_seconds": self.miss_first_byte_seconds.value(),
            },
        )
        snapshot.check()
        return snapshot
