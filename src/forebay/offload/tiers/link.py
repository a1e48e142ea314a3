"""Measures the speed of copies between host memory and an accelerator's, in each direction."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

LINK_BYTES = 16 << 20  # a third of a millisecond at 50 GB/s; memory of the device that the budget does not count
ROUNDS = 3  # the best of: who else uses the link is not its bandwidth


def measure_link(device: Any) -> tuple[float, float]:
    """Bytes a second out of the device's memory and into it, from and to pinned host memory."""
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    return _bytes_s(device, here, there), _bytes_s(device, there, here)


def _bytes_s(device: Any, into: Any, source: Any) -> float:
    taken = []
    for _ in range(ROUNDS + 1):  # the first is to warm up
        torch.cuda.synchronize(device)
        began_s = perf_counter()
        into.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        taken.append(perf_counter() - began_s)
    return LINK_BYTES / max(min(taken[1:]), 1e-9)
