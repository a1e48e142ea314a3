"""What `Offload` refuses before it begins, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forebay.core.errors import Invalid, NotSupported
from forebay.offload.tiers.device_memory import accelerators
from forebay.offload.tiers.disk_tier import DiskTier
from forebay.offload.tiers.host_tier import HostTier
from forebay.offload.tiers.tiers import Storage
from forebay.offload.tracing.compiled import is_compiled


def is_sharded(parameter: Any) -> bool:
    """Whether a rank has a part of it only: a DTensor (FSDP2, tensor parallel), or flat as FSDP made it."""
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(parameter).__mro__}
    return hasattr(parameter, "_is_flat_param") or any(kind.endswith(".DTensor") for kind in kinds)


def check_numbers(budget_bytes: Any, chunk_bytes: Any, size_bytes_min: Any) -> None:
    """Whole numbers of bytes."""
    for what, value, least in (
        ("the budget", budget_bytes, 1),
        ("chunk_bytes", chunk_bytes, 1),
        ("size_bytes_min", size_bytes_min, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Invalid(f"{what} of {value!r}: give whole bytes, at least {least}, or for the budget as in '24GiB'")


def check_tiers(tiers: Sequence[Storage]) -> tuple[list[DiskTier], list[HostTier]]:
    """One of each kind at the most; those of each."""
    if isinstance(tiers, Storage) or not all(isinstance(tier, Storage) for tier in tiers):
        raise Invalid('tiers are a list, as in [HostTier("32GiB"), DiskTier(["/nvme/x"], "200GiB")]')
    disks = [tier for tier in tiers if isinstance(tier, DiskTier)]
    hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
    if not tiers or len(disks) > 1 or len(hosts) > 1:
        raise Invalid("give one disk tier, one host tier, or one of each: a disk tier may have many directories")
    return disks, hosts


def check_model(model: Any, device: Any, *, experimental: bool) -> Any:
    """A model whose tensors can be moved, from one device; that device. `device` is for those on `meta`."""
    if is_compiled(model):
        raise NotSupported(
            "a model that is compiled as a whole gets all its saved tensors back at once, so nothing would be gained: "
            "compile its blocks one by one instead"
        )
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise NotSupported(
            f"what torch.jit.script made takes no hooks ({scripted[0] or 'the model'}): give the model as it was before"
        )
    sharded = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if sharded:
        raise NotSupported(
            f"{sharded[0]} is sharded over ranks (FSDP, tensor parallel), whose shards come and go by themselves: use "
            "one process with the whole model, DistributedDataParallel, or FSDP's own CPUOffloadPolicy"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if torch.device("meta") in devices:
        if device is None:
            raise Invalid('the model is on meta: pass device=, as in device="cuda", where it is to be')
        devices = devices - {torch.device("meta")} | {torch.device(device)}
    told = ", ".join(sorted(map(str, devices))) or "no device: it has no parameters"
    if len(devices) != 1 or not {device.type for device in devices} <= {"cpu", *accelerators}:
        raise NotSupported(
            f"tensors are moved from one device's memory, cpu or {', '.join(accelerators)}; the model is on {told}: "
            "use one process and one Offload for each device"
        )
    if devices != {torch.device("cpu")} and not experimental:
        raise NotSupported(
            f"the model is on {told}, where not all checks have passed yet: pass experimental=True, after "
            "`python -m bench.gpu.offload --first-day` in a checkout, which looks at one thing after the other"
        )
    found = devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found
