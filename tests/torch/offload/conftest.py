"""Plans that are made quickly, and disks that are measured by little."""

from __future__ import annotations

import sys
from functools import partial

import pytest

from forebay.offload.planning import improve
from forebay.offload.planning.choose import choose
from forebay.offload.planning.plan import Rank
from forebay.offload.tiers import disk_tier

FEW_REPLAYS = 12
ONE_RANK: tuple[Rank, ...] = ("area",)
ABOUT_PLANS = ("test_improve", "test_plan")
MEASURED_BYTES = 4 << 20
ABOUT_DISKS = ("test_tiers", "test_tier_parts", "test_gpudirect", "test_on_a_device")


def module_of(request: pytest.FixtureRequest) -> str:
    return str(request.module.__name__.rpartition(".")[2])


@pytest.fixture(autouse=True)
def few_replays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is chosen from those of one rank, and improved by a few replays only: that it is followed is tested,
    whichever it is. How good plans are is tested in ABOUT_PLANS, with all ranks and replays."""
    if module_of(request) not in ABOUT_PLANS:
        monkeypatch.setattr(improve, "EVALUATIONS", FEW_REPLAYS)
        if (engine := sys.modules.get("forebay.offload.engine")) is not None:  # not imported for those that do without
            monkeypatch.setattr(engine, "choose", partial(choose, ranks=ONE_RANK))


@pytest.fixture(autouse=True)
def little_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `Offload` measures its disk first, by 64 MiB where that has room for 256. What is measured is tested in
    ABOUT_DISKS, with as much as the product takes."""
    if module_of(request) not in ABOUT_DISKS:
        monkeypatch.setattr(disk_tier, "MEASURED_BYTES_MAX", MEASURED_BYTES)
