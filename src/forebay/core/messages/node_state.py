"""The state of a node: its processes, volumes and buckets, and the map of nodes.

Theory. Plain values, sent like those of `calls.py`. People read them as JSON, so fields have names, and fields can be
added with defaults.

Invariant. A value holds what was true of the node at one moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from forebay.core.cluster.records import State
from forebay.core.volumes import VolumeState

Sees = Callable[[str], bool]  # whether a bucket of that name may be known


class FrontState(msgspec.Struct, frozen=True):
    front: int
    pid: int
    connected: bool = True


class BucketState(msgspec.Struct, frozen=True):
    """`error` is the last trouble with the backend ("" when the last request went well)."""

    name: str
    url: str
    cached_bytes: int = 0
    quota_bytes: int | None = None
    error: str = ""
    dirty_bytes: int = 0
    dirty_objects: int = 0  # deletes that are not flushed are counted too
    dirty_since_s: float | None = None  # Unix time of the oldest
    flushing: int = 0
    conflicts: int = 0
    lost_objects: int = 0  # acknowledged, and their bytes are gone
    missing: list[str] = []  # volumes that are not in use, and may hold what only they have of the bucket
    flush_error: str = ""  # why the last flush failed, after the key; "" after a success


Wish = Literal["active", "draining", "maintenance", "gone", "forgotten"]


class ClusterNode(msgspec.Struct, frozen=True):
    """One node of a cluster. `share`: the part of all keys that it owns; `epoch`: of the map that it acts by, 0 if it
    does not live; `doing`: what it does, in words; `release`: of Forebay, "" if it does not say. `kept_once`: it may
    have on its own disks alone what no backend has, of buckets with two copies."""

    node_id: str
    address: str
    state: State
    wanted: Wish
    share: float
    epoch: int
    doing: str
    release: str = ""
    kept_once: bool = False


class ClusterState(msgspec.Struct, frozen=True):
    """The cluster as a node knows it. `epoch`, `active`: of the map; `holds`: the node holds its lease; `trouble` keeps
    it from its place. `lagging`: buckets that this node does not have yet as the cluster has them, and why."""

    name: str
    node_id: str
    epoch: int
    active: bool
    holds: bool
    trouble: str = ""
    nodes: list[ClusterNode] = []
    lagging: dict[str, str] = {}


class NodeState(msgspec.Struct, frozen=True):
    node_id: str
    version: str
    engine_pid: int
    started_s: float
    endpoint: str = ""
    fronts: list[FrontState] = []
    volumes: list[VolumeState] = []
    buckets: list[BucketState] = []
    flights: int = 0
    reads: int = 0
    jobs_running: int = 0
    pass_bytes: int = 0
    derived_bytes: int = 0  # of the volumes' used bytes: indexes of shards, listings and the like, of no bucket
    cluster: ClusterState | None = None
    catching_up: bool = False  # what was owed before the start is not all known yet: buckets owe at least what they say


def part_of(state: NodeState, sees: Sees) -> NodeState:
    """What somebody may know who may not observe the whole node: their buckets, and how the disks are."""
    volumes = [
        VolumeState(volume.volume_id, "", volume.state, volume.capacity_bytes, volume.used_bytes)
        for volume in state.volumes
    ]
    buckets = [bucket for bucket in state.buckets if sees(bucket.name)]
    return msgspec.structs.replace(state, volumes=volumes, buckets=buckets, cluster=None)


class MapNode(msgspec.Struct, frozen=True):
    node_id: str
    endpoint: str
    weight: float = 1.0


class NodeMap(msgspec.Struct, frozen=True):
    """The versioned list of nodes. One node alone is a map of one."""

    epoch: int
    nodes: list[MapNode]
