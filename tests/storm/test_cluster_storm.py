"""Storms over a cluster, a short one here; `make storm` runs long ones. Planted faults are found."""

from __future__ import annotations

import random

import pytest

from tests.storm.cluster_storm import Wrong, storm

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("able")
def test_every_answer_of_a_cluster_in_a_storm_has_an_explanation() -> None:
    storm(random.randrange(1 << 30), 3)


@pytest.mark.usefixtures("able")
def test_objects_in_slices_survive_a_storm() -> None:
    storm(random.randrange(1 << 30), 3, kinds=["coded"], takes_over=True)


# What is found first says which fault it is; the nodes' logs come after it.
FOUND = r"\Aseed 1: .*(nothing explains this|nobody wrote|nodes show|there is no object)"
STRIKES = {"earlier": ["join"], "everybody": ["deaf"], "listing": ["deaf"]}  # the others by `--plant`


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("plant", STRIKES)
def test_a_fault_planted_in_the_protocol_is_found(plant: str) -> None:
    with pytest.raises(Wrong, match=FOUND):
        storm(1, 8, faults=STRIKES[plant], kinds=["back", "local"], plant=plant)


FOUND_SLICES = r"\Aseed 1: .*(slice |slices|nobody wrote)"
STRIKES_SLICES = {"swapped": ("deaf", 8), "zeros": ("kill", 8), "hasty": ("dark", 8), "named": ("drain", 8)}
STRIKES_SLICES["untidy"] = ("away", 1)  # it is found at the end of a storm


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("plant", STRIKES_SLICES)
def test_a_fault_planted_in_slices_is_found(plant: str) -> None:
    strikes, rounds = STRIKES_SLICES[plant]
    with pytest.raises(Wrong, match=FOUND_SLICES):
        storm(1, rounds, faults=[strikes], kinds=["coded"], plant=plant, takes_over=True)
