"""GPUDirect Storage: moves bytes between disks and a GPU without host memory, where that really works.

Theory. cuFile always works: without its requirements it copies through host memory ("compat mode") and calls that a
success. The tiers do that already, so it is not called GPUDirect here. The real requirements that can be checked are a
CUDA device, the kernel module nvidia-fs, directories on ext4 (in ordered mode) or XFS, and kvikio, which binds cuFile.
Not checked: whether disk and GPU share a PCIe switch, whether the IOMMU is off, RAID below the file system.
`gdscheck -p` knows more.

If nothing is missing, `ways` opens the tier's files once more, with compat mode forbidden, so cuFile refuses instead of
copying. Then a block goes to each disk and back, and only what comes back right is used.

All of this was written without such a machine. Tests run the tiers with a stand-in. kvikio was loaded where there is no
device; it said so, and refused to open a file without compat mode.

Rejected: `torch.cuda.gds` (each of its calls holds the interpreter's lock until the disk is done, so the step it should
hide behind would stand still); PCI P2PDMA, which newer cuFile uses without nvidia-fs (a settings file and options of
two kernel modules enable it, and nothing shows what is in force): the answer for such machines is no.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from forebay.offload.tiers.extents import BLOCK_BYTES

MODULE_PATHS = ("proc/driver/nvidia-fs", "sys/module/nvidia_fs")
INSTEAD = "bytes go through pinned host memory"


class Way(Protocol):
    """Between one open file and memory of accelerators. Several threads may use one at once."""

    def write(self, source: Any, at: int) -> None:
        """A tensor's bytes to the file: both begin at a block, and are whole blocks. `OSError` or `RuntimeError`."""
        ...

    def read(self, into: Any, at: int) -> None:
        """The same from the file."""
        ...

    def close(self) -> None:
        """No more; none is under way."""
        ...


class _CuFile:
    """A way by kvikio, whose own threads wait for the disk."""

    def __init__(self, kvikio: Any, fd: int) -> None:
        self._file = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")  # the file has no name any more

    def write(self, source: Any, at: int) -> None:
        _all_of(self._file.pwrite(source, source.numel(), at), source)

    def read(self, into: Any, at: int) -> None:
        _all_of(self._file.pread(into, into.numel(), at), into)

    def close(self) -> None:
        self._file.close()


def _all_of(future: Any, memory: Any) -> None:
    moved = future.get()
    if moved != memory.numel():
        raise OSError(f"cuFile moved {moved} of {memory.numel()} bytes")


class _Mount(NamedTuple):
    at: str
    file_system: str
    options: str


def gpudirect(directories: Sequence[str] = (), *, root: str = "/") -> tuple[bool, str]:
    """Whether it can be used for directories, as far as can be seen, and for people: why not. `root` is where /proc and
    /sys are."""
    lacking = _lacking_of_device()
    if not any(os.path.exists(os.path.join(root, path)) for path in MODULE_PATHS):
        lacking.append("the kernel module nvidia-fs is not loaded")
    mounts = _mounts(os.path.join(root, "proc/self/mountinfo"))
    lacking += [said for directory in directories if (said := _lacking_of_place(directory, mounts))]
    if not lacking:  # else it is not loaded for nothing
        lacking += _lacking_of_kvikio()
    if lacking:
        return False, f"GPUDirect Storage cannot be used: {'; '.join(lacking)}; {INSTEAD}"
    return True, "GPUDirect Storage can be used as far as can be seen; whether it is, says `path` after the first bytes"


def ways(fds: Sequence[int], directories: Sequence[str]) -> list[Way]:
    """A way for each open file; none at all if one of them would not truly be one."""
    if "torch" not in sys.modules:
        return []  # nobody has memory on a device, and tiers do without torch
    if not gpudirect(directories)[0]:
        return []
    opened: list[Way] = []
    kvikio = importlib.import_module("kvikio")
    try:
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.OFF):
            for fd in fds:
                opened.append(_CuFile(kvikio, fd))
        if all(map(works, opened)):
            return opened
    except (OSError, RuntimeError):
        pass
    for way in opened:
        with contextlib.suppress(OSError, RuntimeError):
            way.close()
    return []


def works(way: Way, device: str = "cuda") -> bool:
    """Whether a block that is written to the file's begin, where nothing is yet, comes back."""
    import torch

    source = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)
    if device == "cuda":
        torch.cuda.synchronize()
    way.write(source, 0)
    way.read(into, 0)
    return bool(torch.equal(source, into))


def _lacking_of_device() -> list[str]:
    try:
        import torch
    except ImportError:
        return ["there is no torch"]
    return [] if torch.cuda.is_available() else ["there is no CUDA device"]


def _lacking_of_kvikio() -> list[str]:
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        return [] if driver.get("is_gds_available") else ["kvikio says that cuFile cannot"]
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return [f"kvikio cannot be used ({type(error).__name__}: {error}; pip install kvikio-cu12 or -cu13)"]


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
