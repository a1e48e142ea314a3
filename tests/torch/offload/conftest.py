"""Plans that are made quickly."""

from __future__ import annotations

import pytest

from forebay.offload.planning import improve

FEW_REPLAYS = 40
ABOUT_PLANS = ("test_improve", "test_plan")


@pytest.fixture(autouse=True)
def few_replays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is improved by a few replays only: that it is followed is tested, whichever it is. How good plans are is
    tested in ABOUT_PLANS, with all replays."""
    if request.module.__name__.rpartition(".")[2] not in ABOUT_PLANS:
        monkeypatch.setattr(improve, "EVALUATIONS", FEW_REPLAYS)
