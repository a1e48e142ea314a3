"""Names of all metrics, and how counts of several processes are added.

Theory. A hit may cost 10 µs, so counting must cost next to nothing. Counters are plain integers and lists, and only a
request for metrics turns them into a `Snapshot`, a value that can be sent and added. A series is written as Prometheus
writes it (`name{label="value"}`), so merging adds dictionaries and showing prints them. Histogram buckets double from 1
µs: the bucket of a duration is a bit length, and any two snapshots add.

Rejected: prometheus-client's counters (a lock and a method call each, about 1 µs, and its multiprocess mode writes
files); HDR histograms (a dependency for precision nobody reads).

Invariants. (1) `METRICS` names everything that a snapshot may hold; `Snapshot.check` asserts it. (2) `merge` is
associative and commutative: counters, gauges and buckets add. (3) Names contain the unit: `_seconds`, `_bytes`, and
`_total` for what only grows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

from forebay.core.errors import Bug

BUCKETS = 28  # the last finite bound is 2**26 µs = 67 s, above STALL_TIMEOUT_S; longer goes to +Inf


class Metric(NamedTuple):
    """One documented name. `labels` are the label names, in the order they are written."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        # fronts
        Metric("forebay_requests_total", "counter", "HTTP requests answered.", ("verb", "status")),
        Metric("forebay_reads_total", "counter", "Object reads by result: hit, miss or error.", ("result",)),
        Metric("forebay_read_bytes_total", "counter", "Body bytes promised to readers, by result.", ("result",)),
        Metric("forebay_batches_total", "counter", "Batch requests."),
        Metric("forebay_batch_items_total", "counter", "Items of batches, by result.", ("result",)),
        Metric("forebay_batch_bytes_total", "counter", "Body bytes of batches' items promised to readers."),
        Metric("forebay_shard_indexes_total", "counter", "Indexes of shards' members that were begun to be built."),
        Metric("forebay_sent_bytes_total", "counter", "Bytes handed to client sockets, headers included."),
        Metric("forebay_hit_seconds", "histogram", "A hit, from request parsed to last byte handed to the kernel."),
        Metric("forebay_miss_first_byte_seconds", "histogram", "A miss, from request parsed to first body byte sent."),
        Metric("forebay_connections_open", "gauge", "Client connections open."),
        Metric("forebay_connections_total", "counter", "Client connections accepted."),
        Metric("forebay_connections_refused_total", "counter", "Connections refused at the limit, or lacking files."),
        Metric("forebay_connections_over_share_total", "counter", "Of those, from an address that held its share."),
        Metric("forebay_unproved_bytes", "gauge", "Bytes held for clients that have not shown who they are."),
        Metric("forebay_connections_cut_total", "counter", "Connections cut by us, by reason.", ("reason",)),
        Metric("forebay_requests_refused_total", "counter", "Requests refused before they reached a handler."),
        Metric("forebay_limited_requests_total", "counter", "Requests of identities with limits.", ("identity",)),
        Metric("forebay_limited_bytes_total", "counter", "Bytes to and from identities with limits.", ("identity",)),
        Metric("forebay_limited_connections", "gauge", "Connections of identities with limits.", ("identity",)),
        Metric("forebay_limit_refusals_total", "counter", "Requests over a limit, by which.", ("identity", "limit")),
        Metric("forebay_reads_waiting", "gauge", "Reads waiting for the engine."),
        Metric("forebay_reads_resumed_total", "counter", "Times the rest of a begun body was asked for anew."),
        Metric("forebay_relayed_bytes_total", "counter", "Bytes passed on from other nodes, and not kept."),
        Metric("forebay_suspects_total", "counter", "Hits whose file was gone or unreadable, read again as misses."),
        Metric("forebay_files_open", "gauge", "Data files that fronts hold open."),
        Metric("forebay_door_connections", "gauge", "Processes on this host that read through the door."),
        Metric("forebay_door_files_total", "counter", "Descriptors given to them."),
        Metric("forebay_audit_lines_total", "counter", "Lines written to the audit log."),
        Metric("forebay_audit_dropped_total", "counter", "Lines of the audit log for which there was no room."),
        Metric("forebay_engine_connects_total", "counter", "Times a front connected to its engine."),
        # engine
        Metric("forebay_flights", "gauge", "Cold fetches in progress."),
        Metric("forebay_fetches_waiting", "gauge", "Requests of reads that wait for a permit.", ("bucket",)),
        Metric("forebay_backend_requests_total", "counter", "Requests to backends.", ("bucket", "verb")),
        Metric("forebay_backend_errors_total", "counter", "Backend requests that failed, by kind.", ("bucket", "kind")),
        Metric("forebay_backend_retries_total", "counter", "Backend requests made again after a failure.", ("bucket",)),
        Metric("forebay_peer_read_bytes_total", "counter", "Body bytes received from other nodes.", ("bucket",)),
        Metric("forebay_backend_read_bytes_total", "counter", "Body bytes received from backends.", ("bucket",)),
        Metric("forebay_backend_written_bytes_total", "counter", "Body bytes that backends took.", ("bucket",)),
        Metric("forebay_backend_first_byte_seconds", "histogram", "Backend request to its first body byte."),
        Metric("forebay_evictions_total", "counter", "Units evicted, by reason.", ("reason",)),
        Metric("forebay_evicted_bytes_total", "counter", "Bytes freed by eviction."),
        Metric("forebay_hint_jobs", "gauge", "Jobs that told their future."),
        Metric("forebay_hint_fetched_bytes_total", "counter", "Bytes fetched ahead because of hints."),
        Metric("forebay_hint_hits_total", "counter", "Blocks fetched ahead because of hints that were read."),
        Metric("forebay_hint_ranged_bytes_total", "counter", "Bytes fetched range by range for jobs, and not kept."),
        Metric("forebay_prestaging", "gauge", "Objects that a HEAD asked to have here, and that are not yet."),
        Metric("forebay_prestaged_total", "counter", "Objects that a HEAD asked to have here.", ("result",)),
        Metric("forebay_prestaged_bytes_total", "counter", "Bytes fetched because a HEAD asked for them."),
        Metric("forebay_pass_bytes", "gauge", "Memory held by bytes that no disk takes."),
        Metric("forebay_passed_bytes_total", "counter", "Bytes that passed through memory because no disk took them."),
        Metric("forebay_revalidations_total", "counter", "Freshness checks at backends, by result.", ("result",)),
        Metric("forebay_scrubbed_bytes_total", "counter", "Bytes that the scrubber read and compared."),
        Metric("forebay_corrupt_blocks_total", "counter", "Blocks whose checksum did not match: dropped, refetched."),
        Metric("forebay_volume_bytes", "gauge", "Bytes taken on a volume.", ("volume",)),
        Metric("forebay_volume_capacity_bytes", "gauge", "Bytes that a volume may use.", ("volume",)),
        Metric("forebay_volume_up", "gauge", "1 while a volume is in use, 0 when it was taken out.", ("volume",)),
        Metric("forebay_lost_objects", "gauge", "Acknowledged objects whose bytes are gone.", ("bucket",)),
        Metric("forebay_volume_stalled", "gauge", "1 while a volume's disk does not answer.", ("volume",)),
        Metric("forebay_volume_missing", "gauge", "1 while a volume that owes something is not in use.", ("volume",)),
        Metric("forebay_volume_owed_objects", "gauge", "Objects that no backend has, on a volume.", ("volume",)),
        Metric("forebay_volume_owed_bytes", "gauge", "Their bytes.", ("volume",)),
        Metric("forebay_objects", "gauge", "Objects in the index."),
        Metric("forebay_jobs_running", "gauge", "Jobs in progress."),
        Metric("forebay_cluster_holds", "gauge", "Whether the node holds its lease."),
        Metric("forebay_cluster_epoch", "gauge", "Number of the map of nodes."),
        Metric("forebay_cluster_nodes", "gauge", "Nodes that the cluster knows.", ("state",)),
        Metric("forebay_cluster_kept_once", "gauge", "Nodes that may have alone what two should have."),
        Metric("forebay_kept_copies", "gauge", "Objects and deletes kept for other nodes."),
        Metric("forebay_objects_without_all_slices", "gauge", "Coded objects whose slices are not all in place."),
        Metric("forebay_slices_made_again_total", "counter", "Slices that were made again, or moved."),
        Metric("forebay_slices_deleted_total", "counter", "Slices that were nobody's."),
        Metric("forebay_dirty_bytes", "gauge", "Acknowledged bytes that the backend has not.", ("bucket",)),
        Metric("forebay_dirty_objects", "gauge", "Objects and deletes that the backend has not.", ("bucket",)),
        Metric("forebay_dirty_age_seconds", "gauge", "How long the oldest of them waits.", ("bucket",)),
        Metric("forebay_flushing", "gauge", "Flushes under way.", ("bucket",)),
        Metric("forebay_flushes_total", "counter", "Objects and deletes that were flushed.", ("bucket",)),
        Metric("forebay_flushed_bytes_total", "counter", "Bytes of objects that were flushed.", ("bucket",)),
        Metric("forebay_flush_sent_bytes_total", "counter", "Bytes that flushes sent to backends.", ("bucket",)),
        Metric("forebay_flush_failures_total", "counter", "Flushes that failed, by kind.", ("bucket", "kind")),
        Metric("forebay_flush_conflicts_total", "counter", "Conflicts, by how they ended.", ("bucket", "policy")),
        Metric("forebay_uploads_left_total", "counter", "Uploads that may stay at backends, ids unknown.", ("bucket",)),
        Metric("forebay_write_waits_total", "counter", "Writes that waited for dirty bytes to go.", ("bucket",)),
        Metric("forebay_write_refusals_total", "counter", "Writes refused because they did not go.", ("bucket",)),
        Metric("forebay_process_resident_bytes", "gauge", "Resident memory.", ("process",)),
        Metric("forebay_process_cpu_seconds_total", "counter", "Processor time, user and system.", ("process",)),
        Metric("forebay_process_open_files", "gauge", "File descriptors open.", ("process",)),
        Metric("forebay_process_restarts_total", "counter", "Times it was started again.", ("process", "reason")),
        Metric("forebay_process_start_seconds", "gauge", "When the process started, Unix time.", ("process",)),
        # checkpoints of training runs: `forebay ckpt goodput --prometheus`
        Metric("forebay_run_seconds", "gauge", "Time of a run, by where it went.", ("run", "part")),
        Metric("forebay_run_lives", "gauge", "Times that a run was started.", ("run",)),
        Metric("forebay_run_failures", "gauge", "Of those, lives that broke off.", ("run",)),
        Metric("forebay_run_saves", "gauge", "Checkpoints that counted.", ("run",)),
        Metric("forebay_run_saved_seconds", "gauge", "When the last of them counted, Unix time.", ("run",)),
    )
}


class Histogram:
    """Durations in buckets that double from 1 µs. `add` is meant for hot paths: one bit length and two additions."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration; what is negative (a clock stepped) counts as zero."""
        index = int(seconds * 1e6).bit_length() if seconds > 0 else 0
        self.counts[index if index < BUCKETS else BUCKETS - 1] += 1
        self.sum_s += seconds

    def value(self) -> HistogramValue:
        return HistogramValue(list(self.counts), self.sum_s)


class HistogramValue(msgspec.Struct, array_like=True, frozen=True):
    """A histogram as it travels. `counts[i]` are durations below 2**i µs and not below the bound before; the last
    bucket has no upper bound."""

    counts: list[int]
    sum_s: float

    def quantile_s(self, fraction: float) -> float:
        """An upper bound of the quantile in seconds: the bound of the bucket it falls into; 0.0 when empty."""
        total = sum(self.counts)
        if total == 0:
            return 0.0
        rank, seen = fraction * total, 0
        for index, count in enumerate(self.counts):
            seen += count
            if seen >= rank and count:
                return bound_s(index)
        return bound_s(BUCKETS - 1)


def bound_s(index: int) -> float:
    """The upper bound of a bucket in seconds."""
    return float((1 << index) / 1e6)


class Snapshot(msgspec.Struct, frozen=True):
    """Counts at one moment: series name to number, series name to histogram."""

    values: dict[str, float] = {}
    histograms: dict[str, HistogramValue] = {}

    def check(self) -> None:
        """Raise `Bug` for a series that is not in `METRICS` or has other labels than documented."""
        for name in self.values:
            metric = METRICS.get(name.partition("{")[0])
            if metric is None or metric.kind == "histogram" or label_names(name) != metric.labels:
                raise Bug(f"the series {name} is not documented in core/metrics.py")
        for name in self.histograms:
            metric = METRICS.get(name.partition("{")[0])
            if metric is None or metric.kind != "histogram" or label_names(name) != metric.labels:
                raise Bug(f"the histogram {name} is not documented in core/metrics.py")


def series(name: str, **labels: str) -> str:
    """`name{label="value",…}` with values escaped, labels in the order documented."""
    if not labels:
        return name
    escaped = (
        f'{label}="{value.translate(_ESCAPES)}"' for label, value in ((at, labels[at]) for at in METRICS[name].labels)
    )
    return f"{name}{{{','.join(escaped)}}}"


_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n"}


def label_names(name: str) -> tuple[str, ...]:
    """The label names of a series, in the order written."""
    names: list[str] = []
    rest = name.partition("{")[2]
    while rest and rest != "}":
        label, _, rest = rest.partition('="')
        position = 0
        while position < len(rest) and rest[position] != '"':
            position += 2 if rest[position] == "\\" else 1
        names.append(label.lstrip(","))
        rest = rest[position + 1 :]
    return tuple(names)


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The sum of all: what one process that had done everything would report."""
    values: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    sums: dict[str, float] = {}
    for snapshot in snapshots:
        for name, value in snapshot.values.items():
            values[name] = values.get(name, 0) + value
        for name, histogram in snapshot.histograms.items():
            into = counts.setdefault(name, [0] * BUCKETS)
            for index, count in enumerate(histogram.counts[:BUCKETS]):
                into[index] += count
            sums[name] = sums.get(name, 0.0) + histogram.sum_s
    return Snapshot(values, {name: HistogramValue(into, sums[name]) for name, into in counts.items()})


def of_buckets(snapshot: Snapshot, sees: Callable[[str], bool]) -> Snapshot:
    """Of the series those that are about a bucket which `sees` allows."""
    found = ((name, _BUCKET.search(name)) for name in snapshot.values)
    return Snapshot({name: snapshot.values[name] for name, label in found if label is not None and sees(label[1])})


_BUCKET = re.compile(r'[{,]bucket="([^"\\]*)"')


def render(snapshot: Snapshot) -> str:
    """The snapshot in Prometheus's text format, families in the order of `METRICS`, each documented once."""
    by_name: dict[str, list[str]] = {}
    for name in sorted(snapshot.values):
        by_name.setdefault(name.partition("{")[0], []).append(name)
    for name in sorted(snapshot.histograms):
        by_name.setdefault(name.partition("{")[0], []).append(name)
    lines: list[str] = []
    for metric in METRICS.values():
        names = by_name.get(metric.name)
        if not names:
            continue
        lines.append(f"# HELP {metric.name} {metric.help}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for name in names:
            if metric.kind == "histogram":
                lines += _render_histogram(name, snapshot.histograms[name])
            else:
                lines.append(f"{name} {_number(snapshot.values[name])}")
    return "\n".join(lines) + "\n"


def _render_histogram(name: str, histogram: HistogramValue) -> list[str]:
    base, _, labels = name.partition("{")
    prefix = labels[:-1] + "," if labels else ""
    suffix = "{" + labels if labels else ""
    lines, seen = [], 0
    for index, count in enumerate(histogram.counts):
        seen += count
        bound = "+Inf" if index == BUCKETS - 1 else _number(bound_s(index))
        lines.append(f'{base}_bucket{{{prefix}le="{bound}"}} {seen}')
    return [*lines, f"{base}_sum{suffix} {_number(histogram.sum_s)}", f"{base}_count{suffix} {seen}"]


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


encode_snapshot = msgspec.msgpack.Encoder().encode
decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode
