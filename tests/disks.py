"""Disks of a test's own: ext4 in a file, mounted by a loop device, that can be frozen so that every write to it hangs.

That takes the superuser and loop devices. Where it cannot be, the tests that ask for such a disk are skipped, in CI
too: most containers cannot. A disk is never left frozen: what freezes it thaws it, whatever happened in between.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_PROGRAMS = ("mkfs.ext4", "mount", "umount", "fsfreeze")


class Disk:
    """A mounted filesystem at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Writes to it hang, from here to the end; reads do not."""
        _run("fsfreeze", "-f", str(self.path))
        with ExitStack() as stack:
            stack.callback(subprocess.run, ["fsfreeze", "-u", str(self.path)], check=False, capture_output=True)
            yield


@contextmanager
def mounted(folder: Path, name: str, size_bytes: int = 128 << 20) -> Iterator[Disk]:
    """A disk; skips the test where there can be none."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"a disk of one's own takes the superuser and {', '.join(missing) or 'loop devices'}")
    image, path = folder / f"{name}.img", folder / name
    path.mkdir()
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    try:
        _run("mount", "-o", "loop", str(image), str(path))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["fsfreeze", "-u", str(path)], check=False, capture_output=True)
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    """`disk(name)` is a new one; all are thawed and unmounted at the end."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(mounted(tmp_path, name))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
