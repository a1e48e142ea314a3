"""The node's volumes as operators see and order them: those in use, and those that should be.

Theory. The store knows the volumes in use; the others are remembered (`remembered_volumes.py`). Here the two become one
list, for `status`, metrics and the verbs. An order to add a volume takes effect at the next start, since placement
changes only there. Giving a volume up takes effect at once, since it only ends refusals.

Invariant. A volume that owes something stays in the list until it is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import msgspec

from forebay.core.cluster.coding import SLICES
from forebay.core.errors import NotFound
from forebay.core.messages.calls import VolumeNamed
from forebay.core.messages.copied import whose_copies
from forebay.core.metrics import series
from forebay.core.volumes import KnownVolume, VolumeState
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.store.disk.usage import VolumeUsage
from forebay.node.store.writer import owned
from forebay.node.store.writer.remembered_volumes import KnownVolumes
from forebay.node.store.writer.writer import Store

log = logging.getLogger("forebay.volumes")


class Volumes:
    """See the module's header. `paths` are the volumes in the node's settings."""

    def __init__(self, store: Store, known: KnownVolumes, flusher: Flusher, paths: Sequence[str]) -> None:
        self._store, self._known, self._flusher, self._paths = store, known, flusher, paths

    def states(self, usages: Sequence[VolumeUsage] | None = None) -> list[VolumeState]:
        """Every volume, those in use first."""
        usages = self._store.usage() if usages is None else usages
        shown = [self._used(usage) for usage in usages]
        there = {usage.volume_id for usage in usages}
        for each in self._known.standings:
            if each.volume_id not in there and each.state not in ("present", "fresh"):
                known = self._known.memory.find(each.volume_id) if each.volume_id else None
                shown.append(_absent(each.volume_id, each.path, each.state, each.detail, each.change, known))
                there.add(each.volume_id)
        for known in self._known.memory.volumes:
            if known.volume_id not in there:  # it could not be opened: the log says why
                detail, change = "it could not be opened", "mend the disk and restart the node"
                if known.path in self._store.roomless:
                    detail, change = "its disk has no room to open it", "make room there: it is opened by itself then"
                shown.append(_absent(known.volume_id, known.path, "out", detail, change, known))
        return shown

    def _used(self, usage: VolumeUsage) -> VolumeState:
        known = self._known.memory.find(usage.volume_id)
        state = usage.state if usage.state in ("ok", "full", "stalled") else "out"
        return VolumeState(
            usage.volume_id,
            usage.path,
            state,  # type: ignore[arg-type]
            usage.capacity_bytes,
            usage.used_bytes,
            usage.objects,
            usage.reason,
            _buckets(known),
            usage.owned_objects,
            usage.owed_bytes,
            known.seen_s if known is not None else 0.0,
            "look at the disk (`dmesg`; is it frozen?): it is used again when it answers" if state == "stalled" else "",
        )

    def missing(self, bucket: str) -> list[str]:
        """Volumes not in use that may hold the only copy of something in the bucket."""
        return [known.volume_id for known in self._store.owners.of_bucket(bucket)]

    async def supersede(self, volume_ids: Collection[str], buckets: Collection[str]) -> None:
        """What volumes that are not here have of these buckets was made again elsewhere."""
        await self._known.supersede(self._store, volume_ids, buckets)

    def metrics(self) -> dict[str, float]:
        """Series for the engine's snapshot."""
        values: dict[str, float] = {}
        for state in self.states():
            if not state.volume_id:
                continue
            in_use = state.state in ("ok", "full", "stalled")
            values[series("forebay_volume_stalled", volume=state.volume_id)] = float(state.state == "stalled")
            values[series("forebay_volume_up", volume=state.volume_id)] = float(in_use)
            values[series("forebay_volume_owed_objects", volume=state.volume_id)] = state.owed_objects
            values[series("forebay_volume_owed_bytes", volume=state.volume_id)] = state.owed_bytes
            values[series("forebay_volume_missing", volume=state.volume_id)] = float(
                not in_use and bool(state.owed_buckets)
            )
        return values

    async def add(self, named: VolumeNamed) -> VolumeState:
        """Order a volume: the next start makes it, or takes in the one that lies there."""
        await self._known.order(named.name, self._paths)
        log.warning("a volume at %s was ordered: the next start makes it", named.name)
        return VolumeState("", named.name, "new", reason="ordered", change="restart the node to use it")

    async def give_up(self, named: VolumeNamed, came_back: int = 0, elsewhere: Collection[str] = ()) -> VolumeState:
        """Forget a volume that is not in use, and what it owed. Of that so many objects came back from other nodes, and
        of the buckets `elsewhere` nothing is lost. Returns its last state."""
        before = self._known.memory.find(named.name)
        if before is None:
            raise NotFound(f"the node knows no volume {named.name}: `forebay volume ls` lists those it knows")
        state = next((each for each in self.states() if each.volume_id == before.volume_id), None)
        owners = self._store.owners
        lost = [
            (bucket, key)
            for bucket in _buckets(before)
            for key, _, _ in self._flusher.owing(bucket)
            if (owner := owners.of_key(bucket, key)) is not None
            and owner.volume_id == before.volume_id
            and not self._is_here(bucket, key)
        ]
        given = await self._known.give_up(named.name, self._store)
        for bucket, key in lost:
            self._flusher.forget(bucket, key)
        # What is kept for other nodes is theirs: they have it, and send it again. So it is with slices.
        of_others = [each for each in _buckets(given) if each == SLICES or whose_copies(each)]
        lost_buckets = [each for each in _buckets(given) if each not in elsewhere and each not in of_others]
        log.warning(
            "volume %s at %s was given up: it owed %d objects with %d bytes of %s; %d objects and deletes came back; "
            "lost is what only it had of %s",
            given.volume_id,
            given.path,
            given.owed_objects,
            given.owed_bytes,
            ", ".join(_buckets(given)) or "no bucket",
            came_back,
            ", ".join(lost_buckets) or "no bucket",
        )
        state = state or _absent(given.volume_id, given.path, "missing", "", "", given)
        return msgspec.structs.replace(state, came_back=came_back, lost_buckets=lost_buckets)

    def _is_here(self, bucket: str, key: str) -> bool:
        """Whether a volume in use owes something of the key."""
        return bool(self._store.usable()) and owned.entry_at(self._store.home(bucket, key), bucket, key) is not None


def _buckets(known: KnownVolume | None) -> list[str]:
    return sorted({*known.buckets, *known.astray}) if known is not None else []


def _absent(volume_id: str, path: str, state: str, detail: str, change: str, known: KnownVolume | None) -> VolumeState:
    if known is None:
        return VolumeState(volume_id, path, state, reason=detail, change=change)  # type: ignore[arg-type]
    return VolumeState(
        volume_id,
        path,
        state,  # type: ignore[arg-type]
        reason=detail,
        owed_buckets=_buckets(known),
        owed_objects=known.owed_objects,
        owed_bytes=known.owed_bytes,
        owed_s=known.seen_s,
        change=change,
    )
