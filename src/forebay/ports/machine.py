"""What the kernel says of this machine: when it started, and who runs on it; and giving memory back to it.

Linux only, as nodes are.

Rejected: signal 0 to find out whether a process runs (a dead one, not yet looked at by its parent, gets it too).
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def boot_id() -> str:
    """What the kernel drew when the machine started. `OSError` where no kernel says so."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def alive(pid: int) -> bool:
    """Whether a process with this number runs. A zombie does not: it holds no files any more."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2][:1] not in ("Z", "X")
    except OSError:
        return False


def active_s(pid: int) -> float:
    """How long the main thread of a process has run or waited for a processor; 0.0 where no kernel says so."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            ran_ns, waited_ns, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return (int(ran_ns) + int(waited_ns)) / 1e9


def pids_with(*names: str) -> list[int]:
    """The processes that have one of `names` open (as /proc/PID/fd names it), as far as this user may see."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if any(str(fd.readlink()) in names for fd in Path("/proc", entry, "fd").iterdir()):
                found.append(int(entry))
        except OSError:  # another user's, or gone
            continue
    return found


def release_memory() -> None:
    """Give the kernel what the allocator holds and nobody uses. Takes milliseconds: not on a loop."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it
        trim(0)
