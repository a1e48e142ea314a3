"""Where tensors can move and how fast: a value that plans and replays take as given.

Theory. A move out of the accelerator's memory takes the link. A move to disk takes the link and the disk, at the speed
of the slower one. Each direction is a channel of its own: links and good disks read and write at once. A machine
without an accelerator has no link: its bandwidth is infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from forebay.core.errors import Invalid

RESERVE_SHARE = 0.01  # of the budget, for what an allocator cannot use (G10 plans to 0.99 as well)


class Channel(IntEnum):
    """One direction of one thing that bytes move through."""

    LINK_OUT = 0
    LINK_IN = 1
    DISK_WRITE = 2
    DISK_READ = 3


class Tier(IntEnum):
    """Where a tensor is while it is away."""

    DISK = 0
    HOST = 1


CHANNELS_OUT = {Tier.DISK: (Channel.LINK_OUT, Channel.DISK_WRITE), Tier.HOST: (Channel.LINK_OUT,)}
CHANNELS_IN = {Tier.DISK: (Channel.LINK_IN, Channel.DISK_READ), Tier.HOST: (Channel.LINK_IN,)}


@dataclass(frozen=True)
class Hardware:
    """`budget_bytes` of memory for the step; tiers with their room (0: there is none), and bytes a second."""

    budget_bytes: int
    disk_bytes: int = 0
    disk_write_bytes_s: float = 0.0
    disk_read_bytes_s: float = 0.0
    host_bytes: int = 0
    link_out_bytes_s: float = math.inf
    link_in_bytes_s: float = math.inf
    latency_s: float = 100e-6  # of a move, whatever its size

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0 or min(self.disk_bytes, self.host_bytes) < 0:
            raise Invalid(f"a budget of {self.budget_bytes} bytes: give a positive one, and no tier less than nothing")
        if self.disk_bytes and min(self.disk_write_bytes_s, self.disk_read_bytes_s) <= 0:
            raise Invalid("a disk tier that reads or writes nothing: give its bandwidth in bytes a second")
        if min(self.link_out_bytes_s, self.link_in_bytes_s) <= 0 or not 0 <= self.latency_s < 10:
            raise Invalid("a link that moves nothing, or a latency of 10 s and more: check the numbers")

    @property
    def target_bytes(self) -> int:
        """What a plan may fill."""
        return int(self.budget_bytes * (1 - RESERVE_SHARE))

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that there are."""
        return tuple(tier for tier, room in ((Tier.DISK, self.disk_bytes), (Tier.HOST, self.host_bytes)) if room)

    def room_bytes(self, tier: Tier) -> int:
        return self.disk_bytes if tier is Tier.DISK else self.host_bytes

    def channel_bytes_s(self, channel: Channel) -> float:
        """How quick one channel is."""
        return (self.link_out_bytes_s, self.link_in_bytes_s, self.disk_write_bytes_s, self.disk_read_bytes_s)[channel]

    def faster(self, times: float) -> Hardware:
        """The same, with disks and links that are so many times as fast."""
        return replace(
            self,
            disk_write_bytes_s=self.disk_write_bytes_s * times,
            disk_read_bytes_s=self.disk_read_bytes_s * times,
            link_out_bytes_s=self.link_out_bytes_s * times,
            link_in_bytes_s=self.link_in_bytes_s * times,
        )

    def out_bytes_s(self, tier: Tier) -> float:
        """How quickly a tensor is stored when nothing else moves."""
        return min(self.channel_bytes_s(channel) for channel in CHANNELS_OUT[tier])

    def in_bytes_s(self, tier: Tier) -> float:
        """How quickly a tensor is loaded when nothing else moves."""
        return min(self.channel_bytes_s(channel) for channel in CHANNELS_IN[tier])
