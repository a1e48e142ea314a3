"""GPUDirect Storage: what is missing is named, and what copies through host memory is not called by that name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.cuda.gds

from forebay.torch.offload.disk_tier import DiskTier
from forebay.torch.offload.gpudirect import gpudirect

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
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with cuFile and a device; `len` stands in for a function that is not Python's."""
    monkeypatch.setattr(torch._C, "_gds_register_buffer", len, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("able")
def test_where_all_is_there_it_could_be_used_and_is_not(root: Path) -> None:
    can, said = gpudirect(["/fast/a", "/fast/with space", "/stacked"], root=str(root))
    assert can
    assert "could be used" in said
    assert "the tiers do not use it yet" in said
    (root / "proc/driver/nvidia-fs").rmdir()
    (root / "sys/module/nvidia_fs").mkdir(parents=True)
    assert gpudirect(root=str(root))[0]


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
        "the tiers do not use it yet: bytes go through host memory"
    )


def test_a_torch_without_cufile_and_a_machine_without_a_device_are_no(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_gds_register_buffer", torch.cuda.gds._dummy_fn("_gds_register_buffer"))
    can, said = gpudirect(["/fast"], root=str(root))
    assert not can
    assert "this torch was built without cuFile; there is no CUDA device" in said
    (root / "proc/self/mountinfo").unlink()
    assert "not known what file system /fast is on" in gpudirect(["/fast"], root=str(root))[1]


def test_a_tier_asks_for_its_own_directories(tmp_path: Path) -> None:
    can, said = DiskTier([tmp_path], "1MiB").gpudirect()
    assert said.startswith("GPUDirect Storage could" if can else "GPUDirect Storage cannot")
    assert "the tiers do not use it yet" in said
