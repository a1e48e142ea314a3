"""What one row of the speed table is: its load, its link, and the goals that it is held to.

Theory. A goal is a bound on a ratio to a peer or a limit that was measured in the same run, or nothing (`REPORTED`). A
row is a value: `workloads` has all of them, and the function that a row names carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MB = 1_000_000

Op = Literal[">=", "<=", "report"]


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio or number. `report` is printed without a verdict."""

    op: Op
    bound: float = 0.0
    text: str = ""  # how the issue states it, when it is more than the bound

    def met(self, value: float) -> bool | None:
        if self.op == "report":
            return None
        return value >= self.bound if self.op == ">=" else value <= self.bound

    def __str__(self) -> str:
        if self.text:
            return self.text
        return "reported" if self.op == "report" else f"{'≥' if self.op == '>=' else '≤'} {self.bound:g}"


def at_least(bound: float, text: str = "") -> Goal:
    return Goal(">=", bound, text)


def at_most(bound: float, text: str = "") -> Goal:
    return Goal("<=", bound, text)


REPORTED = Goal("report")


@dataclass(frozen=True)
class Objects:
    """`count` objects of `size_bytes` of random bytes, keys `name/00000`…"""

    name: str
    size_bytes: int
    count: int

    @property
    def bytes_total(self) -> int:
        return self.size_bytes * self.count

    def key(self, index: int) -> str:
        return f"{self.name}/{index:05d}"


@dataclass(frozen=True)
class Link:
    """The road to the bucket. `rate_bytes_s` is shared by all connections, each way; `connection_bytes_s` binds
    what comes on each; zero is unlimited."""

    rate_bytes_s: float = 0.0
    latency_s: float = 0.0
    connection_bytes_s: float = 0.0

    def __str__(self) -> str:
        said = [f"{self.rate_bytes_s / MB:g} MB/s" if self.rate_bytes_s else "unlimited"]
        said += [f"{self.latency_s * 1000:g} ms"] if self.latency_s else []
        said += [f"{self.connection_bytes_s / MB:g} MB/s a connection"] if self.connection_bytes_s else []
        return ", ".join(said)


@dataclass(frozen=True)
class Row:
    """One line of the table: `name` selects it on the command line, `what` is printed, `goals` by measure."""

    name: str
    group: Literal["warm", "cold", "epoch", "scale", "write", "client", "loader", "resume", "checkpoint", "offload"]
    what: str
    run: str  # module:function that carries it out
    objects: tuple[Objects, ...] = ()
    quick: tuple[Objects, ...] = ()  # what --quick uses instead
    link: Link = Link()
    goals: dict[str, Goal] = field(default_factory=dict)
    rounds: int = 5
    seconds: float = 3.0  # of load per side and round, where load is timed
    connections: int = 8
    range_bytes: int = 0
    peer: Literal[
        "nginx",
        "seaweedfs",
        "direct",
        "limit",
        "write+fsync",
        "sink",
        "fio",
        "unlimited",
        "best peer",
        "empty node",
    ] = "direct"
    signed: bool = False
    decode: bool = False
    epochs: int = 0
    demand: float = 0.0  # trainer's demand as a multiple of the link's rate
    cache_bytes: int = 0
    quick_cache_bytes: int = 0


# --- objects ---------------------------------------------------------------------------------------------------------
