"""Tensors that torch treats as another kind: in memory that processes share, made in inference mode, swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.offload.movables import Books, Lasting, Residency
from forebay.offload.tiers.host_tier import HostTier
from tests.torch.offload.programs import FEW, compare, loss_of, of_few_rows, without_state
from tests.torch.offload.test_engine import WATCHED, made

SIZE = 64 * 1024


# --- memory that processes share -------------------------------------------------------------------------------------
def test_what_has_become_shared_memory_stays() -> None:
    """Torch lets it be resized, and the process ends when it is used then."""
    with HostTier("1MiB") as tier:
        books = Books([tier])
        tensor = torch.ones(SIZE, dtype=torch.uint8)
        movable = Lasting("parameter x", tensor, books)
        assert movable.can_leave()
        tensor.share_memory_()
        assert not movable.can_leave()
        with books:
            assert not movable.leave(tier, 0.0)
        assert tensor.sum() == SIZE


def test_weights_that_are_shared_on_the_way(tmp_path: Path) -> None:
    def after(model: Any, optimizer: Any, step: int) -> None:
        if step == WATCHED + 1:
            model.state_dict()  # brings them
            model.share_memory()

    compare(without_state, of_few_rows, tmp_path, share=0.5, after=after)


# --- inference mode --------------------------------------------------------------------------------------------------
def test_an_optimizer_that_steps_in_inference_mode(tmp_path: Path) -> None:
    """Its state is made of tensors whose writes torch does not count."""

    def take(model: Any, optimizer: Any, step: int) -> float:
        loss = loss_of(model, step, FEW)
        loss.backward()
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    compare(made, take, tmp_path, share=0.5, moving="optimizer state")


def test_of_an_inference_tensor_no_copy_is_good_for_long() -> None:
    with HostTier("1MiB") as tier, torch.inference_mode():
        books = Books([tier])
        tensor = torch.ones(SIZE, dtype=torch.uint8)
        movable = Lasting("exp_avg of x", tensor, books)
        for lap in range(1, 4):
            with books:
                assert movable.leave(tier, 0.0)
                assert movable.residency is Residency.AWAY, "it is waited for: nobody would know of writes meanwhile"
                assert tensor.untyped_storage().nbytes() == 0
                movable.ensure()
            assert tensor.sum() == SIZE * lap
            assert tier.bytes_written == SIZE * lap
            tensor += 1


# --- swapped ---------------------------------------------------------------------------------------------------------
def test_a_tensor_that_is_found_by_its_name_can_be_swapped() -> None:
    with HostTier("1MiB") as tier:
        books = Books([tier])
        parameter, other = nn.Parameter(torch.zeros(SIZE)), nn.Parameter(torch.ones(SIZE))
        books.look_up = {"parameter x": parameter}.get
        movable = Lasting("parameter x", parameter, books)
        with books:
            movable.leave(tier, 0.0)
            movable.wait()
            movable.ensure()
        assert movable.is_of(parameter)
        assert movable.version() == movable.version()
        torch.utils.swap_tensors(parameter, other)
        assert not movable.is_of(parameter)
        assert movable.is_dropped()
        assert movable.version() != movable.version(), "the copy is good for nobody"
        movable.die()
        assert tier.used_bytes == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_that_is_gone_or_has_other_memory_is_dropped(*, by_name: bool) -> None:
    books = Books([])
    held: dict[str, Any] = {"parameter x": torch.zeros(SIZE), "parameter y": torch.zeros(SIZE)}
    if by_name:
        books.look_up = held.get
    movables = [Lasting(name, tensor, books) for name, tensor in held.items()]
    assert not any(movable.is_dropped() for movable in movables)
    del held["parameter x"]
    held["parameter y"].data = torch.ones(SIZE)
    assert all(movable.is_dropped() for movable in movables)
