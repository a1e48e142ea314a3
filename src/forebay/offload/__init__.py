"""Offloads tensors while they wait: traces a step, plans moves, replays the plan, and runs it behind the computing.

    from forebay.offload import DiskTier, HostTier, Offload

See docs/offload.md. Names are loaded when they are first used: plans work without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.offload.engine import Offload
    from forebay.offload.tiers.disk_tier import DiskTier
    from forebay.offload.tiers.host_tier import HostTier

__all__ = ["DiskTier", "HostTier", "Offload"]
_HOMES = {"DiskTier": "tiers.disk_tier", "HostTier": "tiers.host_tier", "Offload": "engine"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"forebay.offload has no {name!r}")
    return getattr(import_module(f"forebay.offload.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
