"""Storms over a cluster, a short one here; `make storm` runs long ones. Planted faults are found."""

from __future__ import annotations

import random

import pytest

from tests.storm.cluster_storm import Wrong, storm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("able")
def test_every_answer_of_a_cluster_in_a_storm_has_an_explanation() -> None:
    storm(random.randrange(1 << 30), 3)


STRIKES = {"earlier": ["join"], "everybody": ["deaf"], "listing": ["deaf"]}  # the others by `--plant`


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("plant", STRIKES)
def test_a_fault_planted_in_the_protocol_is_found(plant: str) -> None:
    with pytest.raises(Wrong, match=r"nothing explains this|nobody wrote|nodes show|there is no object"):
        storm(1, 8, faults=STRIKES[plant], plant=plant)
