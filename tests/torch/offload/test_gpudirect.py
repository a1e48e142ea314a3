"""GPUDirect Storage: what is missing is named, and what copies through host memory is not called by that name.

There is no such machine here. kvikio is played as `ways` uses it, and what tiers do with a way is tested with plain
reads and writes on memory that a stand-in calls a device's.
"""

from __future__ import annotations

import os
import random
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.core.errors import Corrupt
from forebay.offload.tiers import gpudirect as module
from forebay.offload.tiers.device_memory import weighted
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.gpudirect import gpudirect, ways, works
from tests.torch.offload.stand_in import stand_in
from tests.torch.offload.test_tiers import PIECE, disk, noise

MIB = 1 << 20

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - btrfs /dev/sda1 rw
30 22 259:1 / /fast rw,relatime shared:2 master:3 - ext4 /dev/nvme0n1 rw,stripe=32
31 22 259:2 / /journal rw - ext4 /dev/nvme1n1 rw,data=journal
32 30 259:3 / /fast/with\\040space rw - xfs /dev/nvme2n1 rw
33 22 259:4 / /stacked rw - tmpfs tmpfs rw
34 33 259:5 / /stacked rw - xfs /dev/nvme3n1 rw
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine where all is there but torch and the device."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTS)
    return tmp_path


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A device, and a kvikio that says that it can."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kvikio, driver = types.ModuleType("kvikio"), types.ModuleType("kvikio.cufile_driver")
    driver.get = {"is_gds_available": True}.get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    return driver


def test_where_all_is_there_it_can_be_used(root: Path, able: types.ModuleType) -> None:
    can, said = gpudirect(["/fast/a", "/fast/with space", "/stacked"], root=str(root))
    assert can
    assert "can be used as far as can be seen" in said
    (root / "proc/driver/nvidia-fs").rmdir()
    (root / "sys/module/nvidia_fs").mkdir(parents=True)
    assert gpudirect(root=str(root))[0]
    able.get = {"is_gds_available": False}.get  # type: ignore[attr-defined]
    assert "kvikio says that cuFile cannot" in gpudirect(root=str(root))[1]


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("/home", "/home is on btrfs, not on ext4 or XFS"),
        ("/fastest", "/fastest is on btrfs"),
        ("/journal/deep", "/journal/deep is on ext4, but not in its ordered mode"),
    ],
)
def test_a_place_that_cannot_do_it_is_named(root: Path, directory: str, why: str) -> None:
    can, said = gpudirect(["/fast", directory], root=str(root))
    assert not can
    assert why in said
    assert "cannot be used" in said
    assert "/fast is" not in said


@pytest.mark.usefixtures("able")
def test_without_the_kernel_module_cufile_would_copy_through_host_memory_and_that_is_no(root: Path) -> None:
    (root / "proc/driver/nvidia-fs").rmdir()
    can, said = gpudirect(["/fast"], root=str(root))
    assert not can
    assert said == (
        "GPUDirect Storage cannot be used: the kernel module nvidia-fs is not loaded; "
        "bytes go through pinned host memory"
    )


def test_a_machine_without_a_device_or_without_kvikio_is_no(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    can, said = gpudirect(["/fast"], root=str(root))
    assert not can
    assert "there is no CUDA device" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    can, said = gpudirect(["/fast"], root=str(root))
    assert not can
    assert "kvikio cannot be used (" in said
    assert "pip install kvikio-cu12" in said
    (root / "proc/self/mountinfo").unlink()
    assert "not known what file system /fast is on" in gpudirect(["/fast"], root=str(root))[1]


def test_a_tier_asks_for_its_own_directories(tmp_path: Path) -> None:
    can, said = DiskTier([tmp_path], "1MiB").gpudirect()
    assert said.startswith("GPUDirect Storage can be" if can else "GPUDirect Storage cannot")


# --- kvikio, played --------------------------------------------------------------------------------------------------
class Kvikio(types.ModuleType):
    """What `ways` uses of it. `strict` is whether compat mode was off when a file was opened."""

    CompatMode = types.SimpleNamespace(OFF="off")

    def __init__(self) -> None:
        super().__init__("kvikio")
        self.settings: dict[str, str] = {}
        self.opened: list[Any] = []
        self.spoils = self.refuses = False
        kvikio = self

        class CuFile:
            def __init__(self, path: str, flags: str) -> None:
                if kvikio.refuses:
                    raise RuntimeError("cuFile error: NVFS driver initialization error")
                self.strict, self.closed = kvikio.settings.get("compat_mode") == "off", False
                self.fd = os.open(path, os.O_RDWR)
                kvikio.opened.append(self)

            def pwrite(self, source: Any, size_bytes: int, at: int) -> Any:
                return types.SimpleNamespace(get=lambda: os.pwrite(self.fd, source.numpy().tobytes(), at))

            def pread(self, into: Any, size_bytes: int, at: int) -> Any:
                found = bytearray(os.pread(self.fd, size_bytes, at))
                found[0] ^= kvikio.spoils
                into.copy_(torch.frombuffer(found, dtype=torch.uint8))
                return types.SimpleNamespace(get=lambda: len(found))

            def close(self) -> None:
                os.close(self.fd)
                self.closed = True

        self.CuFile = CuFile
        self.defaults = types.SimpleNamespace(set=self._set)

    @contextmanager
    def _set(self, name: str, value: str) -> Iterator[None]:
        self.settings[name] = value
        yield
        del self.settings[name]


@pytest.fixture
def kvikio(able: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Kvikio:
    made = Kvikio()
    monkeypatch.setitem(sys.modules, "kvikio", made)
    monkeypatch.setattr(module, "gpudirect", lambda directories: (True, "played"))
    monkeypatch.setattr(module, "works", lambda way: works(way, "cpu"))
    return made


def test_files_are_opened_without_the_mode_that_copies_and_tried(tmp_path: Path, kvikio: Kvikio) -> None:
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        os.truncate(file.fileno(), MIB)
        found = ways([file.fileno()], [str(tmp_path)])
        assert len(found) == 1
        assert kvikio.opened[0].strict
        source, into = noise(8192), torch.zeros(8192, dtype=torch.uint8)
        found[0].write(source, 4096)
        found[0].read(into, 4096)
        assert torch.equal(into, source)
        found[0].close()


@pytest.mark.parametrize("trouble", ["spoils", "refuses"])
def test_what_does_not_work_is_not_used(tmp_path: Path, kvikio: Kvikio, trouble: str) -> None:
    setattr(kvikio, trouble, True)
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        os.truncate(file.fileno(), MIB)
        assert ways([file.fileno()], [str(tmp_path)]) == []
    assert all(cufile.closed for cufile in kvikio.opened)


# --- tiers with a way ------------------------------------------------------------------------------------------------
class Way:
    """By plain reads and writes; `trouble` is raised by the next, `spoils` changes a bit of what is read."""

    def __init__(self, fd: int) -> None:
        self.fd, self.closed = fd, False
        self.written: list[int] = []  # bytes
        self.loaded: list[int] = []
        self.trouble: Exception | None = None
        self.spoils = False

    def write(self, source: Any, at: int) -> None:
        self._fail()
        assert source.numel() % 4096 == at % 4096 == 0
        with open(f"/proc/self/fd/{self.fd}", "r+b") as file:
            self.written.append(os.pwrite(file.fileno(), source.numpy().tobytes(), at))

    def read(self, into: Any, at: int) -> None:
        self._fail()
        with open(f"/proc/self/fd/{self.fd}", "rb") as file:
            found = bytearray(os.pread(file.fileno(), into.numel(), at))
        found[len(found) // 2] ^= self.spoils
        into.copy_(torch.frombuffer(found, dtype=torch.uint8))
        self.loaded.append(len(found))

    def close(self) -> None:
        self.closed = True

    def _fail(self) -> None:
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble


@pytest.fixture
def opened() -> list[Way]:
    return []


@pytest.fixture
def tier(tmp_path: Path, opened: list[Way]) -> Iterator[DiskTier]:
    """Two directories, and a stand-in for the device's memory."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()

    def played(fds: Sequence[int], directories: Sequence[str]) -> list[Any]:
        opened.extend(Way(fd) for fd in fds)
        return list(opened)

    with stand_in(), disk(*folders, ways=played, experimental=True) as made:
        if made.mode != "O_DIRECT":
            pytest.skip("no direct I/O here")
        yield made


def there_and_back(tier: DiskTier, source: torch.Tensor) -> torch.Tensor:
    slot, into = tier.reserve(len(source)), torch.zeros_like(source)
    tier.store(slot, source).wait()
    tier.load(slot, into).wait()
    tier.release(slot)
    return into


@pytest.mark.parametrize("size_bytes", [4096, PIECE, 3 * PIECE + 8192])
def test_whole_blocks_go_straight(tier: DiskTier, opened: list[Way], size_bytes: int) -> None:
    source = noise(size_bytes)
    assert torch.equal(there_and_back(tier, source), source)
    assert sum(sum(way.written) for way in opened) == sum(sum(way.loaded) for way in opened) == size_bytes
    assert tier.path == "GPUDirect Storage"


def test_a_broken_block_and_its_piece_go_by_host_memory(tier: DiskTier, opened: list[Way]) -> None:
    source = noise(2 * PIECE + 100)
    assert torch.equal(there_and_back(tier, source), source)
    assert sum(sum(way.written) for way in opened) == 2 * PIECE


def test_what_went_straight_can_be_read_into_host_memory(tier: DiskTier) -> None:
    """Its checksum is the device's, and is made again by the host."""
    source = noise(2 * PIECE)
    slot, into = tier.reserve(len(source)), np.zeros(len(source), np.uint8)
    tier.store(slot, source).wait()
    tier.load(slot, into).wait()
    assert np.array_equal(into, source.numpy())


def test_the_first_failure_ends_it_and_loses_nothing(tier: DiskTier, opened: list[Way]) -> None:
    source = noise(2 * PIECE)
    slot, into = tier.reserve(len(source)), torch.zeros_like(source)
    tier.store(slot, source).wait()
    opened[0].trouble = RuntimeError("cuFileRead failed")
    tier.load(slot, into).wait()
    assert torch.equal(into, source)
    assert tier.path == "O_DIRECT, after GPUDirect Storage failed"
    written = [len(way.written) for way in opened]
    assert torch.equal(there_and_back(tier, source), source)
    assert [len(way.written) for way in opened] == written


def test_wrong_bytes_are_asked_for_once_more(tier: DiskTier, opened: list[Way]) -> None:
    source = noise(2 * PIECE)
    for way in opened:
        way.spoils = True
    assert torch.equal(there_and_back(tier, source), source)


def test_bytes_that_are_wrong_on_the_disk_are_corrupt(tier: DiskTier, opened: list[Way]) -> None:
    source = noise(PIECE)
    slot, into = tier.reserve(len(source)), torch.zeros_like(source)
    tier.store(slot, source).wait()
    for way in opened:
        fd = os.open(f"/proc/self/fd/{way.fd}", os.O_RDWR)
        os.pwrite(fd, b"other bytes" * 400, 0)
        os.close(fd)
    with pytest.raises(Corrupt):
        tier.load(slot, into).wait()


def test_ways_end_with_the_tier_and_there_are_none_for_emulated_disks(tmp_path: Path, opened: list[Way]) -> None:
    def played(fds: Sequence[int], directories: Sequence[str]) -> list[Any]:
        opened.extend(Way(fd) for fd in fds)
        return list(opened)

    with disk(tmp_path, ways=played, experimental=True, limit_bytes_s=(1e9, 1e9)):
        assert not opened
    with disk(tmp_path, ways=played, experimental=True):
        assert not any(way.closed for way in opened)
    assert all(way.closed for way in opened)


# --- the device's checksum -------------------------------------------------------------------------------------------
def test_every_change_of_a_word_and_every_exchange_of_two_is_seen() -> None:
    source = noise(PIECE)
    whole = weighted(source).item()
    chance = random.Random(3)
    for _ in range(500):
        changed = source.clone()
        at, bit = chance.randrange(PIECE), chance.randrange(8)
        changed[at] ^= 1 << bit
        assert weighted(changed).item() != whole
        words = source.clone().view(torch.int64)
        one, other = chance.sample(range(len(words)), 2)
        words[[one, other]] = words[[other, one]]
        assert weighted(words.view(torch.uint8)).item() != whole


def test_it_is_the_sum_that_it_says() -> None:
    source = noise(4096)
    words = np.frombuffer(source.numpy().tobytes(), np.int64).tolist()
    total = sum(word * ((at * 0x1E3779B97F4A7C15) | 1) for at, word in enumerate(words)) % (1 << 64)
    assert weighted(source).item() % (1 << 64) == total
