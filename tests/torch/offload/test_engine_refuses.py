"""What `Offload` refuses, with the reason; and what it takes at its user's word."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from forebay.core.errors import Invalid, NotSupported
from forebay.offload import DiskTier, Offload
from tests.torch.offload.programs import budget_of, left, plain, run, times_of_a_table, told
from tests.torch.offload.test_engine import SMALL, WATCHED, disk, made, off

__all__ = ["disk", "off"]  # fixtures


class Decaying(torch.optim.AdamW):
    """Somebody's own: what it adds is of each parameter by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)
        return loss


def test_an_optimizer_made_from_a_known_one_is_taken_at_its_users_word(tmp_path: Path) -> None:
    mine = partial(made, optimizer=Decaying)
    tiers: Any = [DiskTier([tmp_path], "64MiB")]
    with pytest.raises(Invalid, match=r"pass separable=True if it does so .* as AdamW does"):
        Offload(*mine(), budget="1GiB", tiers=tiers)
    expected, left_alone = run(mine, plain, None, WATCHED + 3)
    budget = budget_of(made, plain, 0.75)  # its state is as large as theirs
    torch.manual_seed(11)
    model, optimizer = mine()
    with times_of_a_table(), Offload(model, optimizer, budget=budget, tiers=tiers, separable=True, **SMALL) as off:
        found = []
        for step in range(WATCHED + 3):
            with off.step():
                found.append(told(plain(model, optimizer, step)))
        assert off.report().moves
    assert found == [row for row in expected if row]
    assert dict(left(model, optimizer)) == left_alone


def test_a_model_of_which_a_rank_has_a_part_is_refused(disk: DiskTier, tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model, _ = made()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(NotSupported, match=r"sharded over ranks .* CPUOffloadPolicy"):
            Offload(model, optimizer, budget="1GiB", tiers=[disk])
    finally:
        distributed.destroy_process_group()


def test_accelerators_are_experimental_and_graphs_of_theirs_refused(
    off: Offload, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        NotSupported, match=r"not all checks have passed yet: pass experimental=True, after .*--first-day"
    ):
        Offload(model, optimizer, budget="1GiB", tiers=[disk], device="cuda")
    monkeypatch.setattr(off, "_device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotSupported, match="CUDA graph"), off.step():
        pass
