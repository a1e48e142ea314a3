"""A tier that is smaller than one tensor: the tensor goes to another tier, or stays, and the rest goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.core.errors import Invalid
from forebay.offload import DiskTier, HostTier, Offload
from forebay.offload.movables import Books, Lasting, Movable, Residency
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.itinerary import Itinerary, Stop
from forebay.offload.runner import Runner
from tests.torch.offload.programs import STEPS, budget_of, left, plain, run, times_of_a_table, told
from tests.torch.offload.test_engine import SMALL, made

KIB = 1024


def weight(books: Books, name: str, size_bytes: int) -> tuple[Any, Lasting]:
    tensor = torch.ones(size_bytes, dtype=torch.uint8)
    return tensor, Lasting(name, tensor, books)


def test_a_tensor_larger_than_the_tier_stays() -> None:
    with HostTier(64 * KIB) as tier:
        books = Books([tier])
        tensor, movable = weight(books, "parameter x", 65 * KIB)
        with books:
            assert not movable.leave(tier, 0.0)
        assert movable.residency is Residency.HERE
        assert tensor.sum() == 65 * KIB


def test_a_copy_elsewhere_is_kept_when_a_tier_is_too_small_or_full() -> None:
    with HostTier("1MiB") as large, HostTier(64 * KIB) as small:
        books = Books([large, small])
        kept = [weight(books, "parameter x", 128 * KIB), weight(books, "parameter y", 64 * KIB)]
        small.reserve(4 * KIB)
        for _, movable in kept:
            with books:
                movable.leave(large, 0.0)
                movable.wait()
                movable.ensure()
                written = large.bytes_written
                assert not movable.leave(small, 0.0)
                assert movable.leave(large, 0.0)
            assert movable.residency is Residency.AWAY, "at once: nothing was to be written"
            assert large.bytes_written == written


def test_what_fits_goes_in_place_of_what_is_needed_later_and_does_not() -> None:
    with HostTier(64 * KIB) as tier:
        books = Books([tier])
        large_tensor, large = weight(books, "large", 128 * KIB)
        small_tensor, small = weight(books, "small", 16 * KIB)
        found: dict[str, Movable] = {"large": large, "small": small}
        stop = Stop("a", 0, (), (), (), 144 * KIB, ())
        itinerary = Itinerary((stop,), {"large": (9,), "small": (5,)}, 10)
        runner = Runner(itinerary, found.get, lambda: None, books, {Tier.HOST: tier}, 130 * KIB)
        runner.begin_step()
        with books:
            runner.at("a")
        assert [large.residency, small.residency] == [Residency.HERE, Residency.AWAY]
        assert not runner.facts.over_bytes
        assert [large_tensor.untyped_storage().nbytes(), small_tensor.untyped_storage().nbytes()] == [128 * KIB, 0]


def test_training_beside_a_tier_that_is_too_small_is_the_same(tmp_path: Path) -> None:
    expected, expected_left = run(made, plain, None, STEPS)
    budget = budget_of(made, plain, 0.75)
    torch.manual_seed(11)
    model, optimizer = made()
    tiers = [HostTier("64KiB"), DiskTier([tmp_path], "64MiB")]
    found = []
    with times_of_a_table(), Offload(model, optimizer, budget=budget, tiers=tiers, **SMALL) as off:
        for step in range(STEPS):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
            found.append([])
        assert off.report().moves
        assert off.report().over_bytes == 0
    assert found == expected
    assert dict(left(model, optimizer)) == expected_left


def test_a_tier_that_is_too_small_for_the_budget_is_refused_when_that_is_known() -> None:
    """Once a step was profiled: what has to leave does not fit in there, so that no plan keeps the budget."""
    budget = budget_of(made, plain, 0.75)
    model, optimizer = made()
    with times_of_a_table(), Offload(model, optimizer, budget=budget, tiers=[HostTier("64KiB")], **SMALL) as off:
        with off.step():
            plain(model, optimizer, 0)
        with pytest.raises(Invalid, match="there is room for 65,536: give larger tiers"), off.step():
            plain(model, optimizer, 1)
