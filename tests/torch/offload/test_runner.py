"""What a runner does at a point, with an itinerary made by hand."""

from __future__ import annotations

import torch

from forebay.offload.movables import Books, Lasting, Movable, Residency
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.itinerary import Itinerary, Stop
from forebay.offload.runner import Runner
from forebay.offload.tiers.host_tier import HostTier

SIZE_BYTES = 1 << 20
BEGINS = Stop("step begins", 0, leaving=(), coming=(), used=(), need_bytes=3 * SIZE_BYTES, written=())
NAME = "parameter w"


def test_what_was_leaving_for_a_plan_is_waited_for_by_the_next() -> None:
    """Its store ended and nobody looked, so it kept its memory until a plan named it: the budget was exceeded, now and
    then, in the first step of a new plan."""
    tensor = torch.ones(SIZE_BYTES, dtype=torch.uint8)
    with HostTier("16MiB") as tier:
        books = Books([tier])
        movable = Lasting(NAME, tensor, books)
        books.look_up = {NAME: tensor}.get
        movable._tensor = lambda: tensor
        runner = Runner(
            Itinerary((BEGINS,), {NAME: (5,)}, 10),
            {NAME: movable}.get,
            lambda: None,
            books,
            {Tier.HOST: tier},
            2 * SIZE_BYTES,
            under_way=_leaving(movable, tier),
        )
        runner.begin_step()
        runner.at(BEGINS.name)
        assert movable.residency is Residency.AWAY
        assert runner.facts.over_bytes == 0
        assert runner.facts.unplanned == 0
        movable.ensure()
        assert int(tensor.sum()) == SIZE_BYTES


def _leaving(movable: Movable, tier: HostTier) -> list[Movable]:
    """It is on its way for another plan."""
    assert movable.leave(tier, 0.0)
    assert movable.residency is Residency.STORING
    return [movable]
