"""Whether GPUDirect Storage could move bytes between these disks and a GPU without a stop in host memory.

Theory. cuFile always works: without what it needs it copies through host memory by itself ("compat mode"), and calls
that a success. That is what the tiers do already, with checksums, so it is never called GPUDirect here. What it truly
needs and what can be seen from here: a torch that was built with cuFile, a CUDA device, the kernel module nvidia-fs,
and directories on ext4 (in ordered mode) or XFS. Not seen: whether disk and GPU are below one PCIe switch, whether the
IOMMU is off, RAID below the file system. `gdscheck -p` knows more.

The tiers do not use it yet: they need the bytes in host memory for their checksums.

Rejected: to count the way by PCI P2PDMA that newer cuFile has without nvidia-fs (it is switched on in a file of
settings and by options of two kernel modules, and what of that is in force is not to be seen): such machines are told
no.
"""

from __future__ import annotations

import os
import types
from collections.abc import Sequence
from typing import NamedTuple

MODULE_PATHS = ("proc/driver/nvidia-fs", "sys/module/nvidia_fs")
WHAT_IS_DONE = "the tiers do not use it yet: bytes go through host memory"


class _Mount(NamedTuple):
    at: str
    file_system: str
    options: str


def gpudirect(directories: Sequence[str] = (), *, root: str = "/") -> tuple[bool, str]:
    """Whether it could be used for directories, and for people: why not, or what is used instead. `root` is where
    /proc and /sys are."""
    lacking = _lacking_of_torch()
    if not any(os.path.exists(os.path.join(root, path)) for path in MODULE_PATHS):
        lacking.append("the kernel module nvidia-fs is not loaded")
    mounts = _mounts(os.path.join(root, "proc/self/mountinfo"))
    lacking += [said for directory in directories if (said := _lacking_of_place(directory, mounts))]
    if lacking:
        return False, f"GPUDirect Storage cannot be used: {'; '.join(lacking)}; {WHAT_IS_DONE}"
    return True, f"GPUDirect Storage could be used as far as can be seen, but {WHAT_IS_DONE}"


def _lacking_of_torch() -> list[str]:
    try:
        import torch
        import torch.cuda.gds
    except ImportError:
        return ["there is no torch with torch.cuda.gds"]
    register = getattr(torch._C, "_gds_register_buffer", None)
    is_built = register is not None and not isinstance(register, types.FunctionType)  # one of Python only raises
    without = [] if is_built else ["this torch was built without cuFile"]
    return without if torch.cuda.is_available() else [*without, "there is no CUDA device"]


def _lacking_of_place(directory: str, mounts: list[_Mount]) -> str:
    path = os.path.join(os.path.realpath(directory), "")
    below = [mount for mount in mounts if path.startswith(os.path.join(mount.at, ""))]
    if not below:
        return f"it is not known what file system {directory} is on"
    mount = max(reversed(below), key=lambda mount: len(mount.at))  # of two at one place the later is on top
    if mount.file_system not in ("ext4", "xfs"):
        return f"{directory} is on {mount.file_system}, not on ext4 or XFS"
    if mount.file_system == "ext4" and {"data=journal", "data=writeback"} & set(mount.options.split(",")):
        return f"{directory} is on ext4, but not in its ordered mode"
    return ""


def _mounts(path: str) -> list[_Mount]:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    ends = [(fields, fields.index("-")) for fields in lines]  # proc(5): optional fields end with a hyphen
    return [_Mount(fields[4].replace("\\040", " "), fields[end + 1], fields[end + 3]) for fields, end in ends]
