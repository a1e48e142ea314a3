"""What the ranks of a job say to each other about a checkpoint, and which rank saves which tensor.

Theory. Ranks agree by a gloo group of their own, never by the training's: a collective of ours between two of theirs,
on one rank earlier than on another, would mix both up, and NCCL's watchdog would kill a job whose bucket is slow. A
second group is for the thread that sends, since a group is not for two threads at once.

A DTensor says which part of it lies here. Of its replicas the first saves it. Everything else is taken for equal on
all ranks, as DDP keeps it, except below the names that are each rank's own (`own`; random states). Equal tensors are
saved once: large ones are spread over the ranks so that each sends about as much, small ones come from rank 0, so
that buffers that differ between ranks after all (batch statistics) come from one of them.

Rejected: to find out by comparing contents which tensors are equal (every save would hash the whole state in the
stall); the training's own group (above).

Invariants. (1) All ranks assign equal tensors alike, because the assignment depends on their order and size alone; what
they assigned is compared before a checkpoint is committed. (2) A shard is saved by one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from forebay.core import limits
from forebay.core.checkpoint import digest_of
from forebay.core.errors import Invalid
from forebay.torch.checkpoint.tree import Leaf, dtype_name

SPREAD_BYTES = limits.MIB  # equal tensors from this size on are spread over the ranks
PATIENCE = timedelta(days=1)  # of a group: the slowest rank may wait for its node for hours


class Ranks:
    """This process's place in the job. Alone, when `torch.distributed` is not initialised.

    Making one is collective: all ranks do it at the same point.
    """

    def __init__(self) -> None:
        self.rank, self.world = 0, 1
        self._groups: list[Any] = [None, None]
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._groups = [dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2)]

    def gather(self, value: Any, *, sending: bool = False) -> list[Any]:
        """Every rank's value, on every rank. `sending`: the caller is the thread that sends."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._groups[sending])
        return values

    def first(self, value: Any, *, sending: bool = False) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._groups[sending])
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether one rank at least says so: one small collective, made for every step."""
        if self.world == 1:
            return flag
        box = torch.tensor([flag], dtype=torch.uint8)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self._groups[0])
        return bool(box.item())

    def close(self) -> None:
        """Give the groups back; the job's own stay."""
        groups, self._groups = self._groups, [None, None]
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


class Share(NamedTuple):
    """What this rank saves of a leaf: `local` is contiguous memory's owner; `whole` and `at` are set for a shard."""

    path: str
    local: torch.Tensor
    whole: tuple[int, ...] | None
    at: tuple[int, ...] | None


class Shard(NamedTuple):
    """The part of a DTensor that lies here: its local tensor and where in the whole it begins."""

    local: torch.Tensor
    at: tuple[int, ...]
    first_replica: bool


def is_distributed(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "to_local")


def shard_of(tensor: Any, path: str) -> Shard | None:
    """Where this rank's part of a DTensor lies; None if it has none. `Invalid` for a sum that is still to be made."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # as torch's own checkpoints do

    mesh, placements = tensor.device_mesh, tensor.placements
    where = mesh.get_coordinate()
    if where is None:
        return None
    if any(placement.is_partial() for placement in placements):
        raise Invalid(f"{path} is a partial sum: call .full_tensor() or redistribute it before saving")
    local = tensor.to_local()
    shape, at = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise Invalid(f"{path} is sharded {placements} in a way that has no single place: save its full_tensor()")
    first = all(at == 0 for at, placement in zip(where, placements, strict=True) if placement.is_replicate())
    return Shard(local, tuple(at), first) if local.numel() else None


def shares(leaves: Sequence[Leaf], ranks: Ranks, own: Collection[str]) -> tuple[list[Share], str]:
    """What this rank saves, in order, and a digest of what all ranks must have alike. `own`: first parts of the paths
    of what is each rank's own."""
    mine: list[Share] = []
    equal: list[Leaf] = []
    alike: list[str] = []
    for leaf in leaves:
        if leaf.path.partition("/")[0] in own:
            mine.append(Share(leaf.path, leaf.tensor, None, None))
            continue
        alike.append(f"{leaf.path} {dtype_name(leaf.tensor.dtype)} {tuple(leaf.tensor.shape)}")
        if not is_distributed(leaf.tensor):
            equal.append(leaf)
            continue
        if not leaf.tensor.numel():  # nobody has a part of it
            equal.append(Leaf(leaf.path, torch.empty(leaf.tensor.shape, dtype=leaf.tensor.dtype)))
            continue
        shard = shard_of(leaf.tensor, leaf.path)
        if shard is not None and shard.first_replica:
            mine.append(Share(leaf.path, shard.local, tuple(leaf.tensor.shape), shard.at))
    mine += [Share(leaf.path, leaf.tensor, None, None) for leaf in _assigned(equal, ranks)]
    return mine, digest_of("\n".join(alike).encode())


def _assigned(equal: Sequence[Leaf], ranks: Ranks) -> list[Leaf]:
    """Those of the tensors that are equal everywhere that this rank saves."""
    loads = [0] * ranks.world
    mine: set[int] = set()
    sizes = [leaf.tensor.numel() * leaf.tensor.element_size() for leaf in equal]
    for number in sorted(range(len(equal)), key=lambda number: (-sizes[number], number)):
        to = loads.index(min(loads)) if sizes[number] >= SPREAD_BYTES else 0
        loads[to] += sizes[number]
        if to == ranks.rank:
            mine.add(number)
    return [leaf for number, leaf in enumerate(equal) if number in mine]
