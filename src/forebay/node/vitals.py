"""What a process can say of itself: memory, processor time, open files. Linux's /proc, read when asked."""

from __future__ import annotations

import os
import resource

from forebay.core.metrics import series

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def vitals(process: str, started_s: float) -> dict[str, float]:
    """Series for a `Snapshot`. `process` is `engine` or `front-N`; `started_s` is Unix time. Never raises."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    values = {
        series("forebay_process_cpu_seconds_total", process=process): usage.ru_utime + usage.ru_stime,
        series("forebay_process_start_seconds", process=process): started_s,
    }
    try:
        with open("/proc/self/statm", "rb") as statm:
            resident = int(statm.read().split()[1]) * _PAGE_BYTES
        values[series("forebay_process_resident_bytes", process=process)] = resident
        values[series("forebay_process_open_files", process=process)] = len(os.listdir("/proc/self/fd"))
    except (OSError, ValueError, IndexError):
        pass  # no /proc, or no descriptor left to read it with: the rest is still worth having
    return values


def raise_file_limit() -> int:
    """Allow this process as many open files as the system lets it; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        pass  # it stays at the soft limit; `forebay doctor` says what to change
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
