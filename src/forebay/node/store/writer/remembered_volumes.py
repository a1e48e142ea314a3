"""What the node remembers of its volumes, in its metadata store; and what lies at a path, for `core/volumes.py`.

Theory. The memory is one small entry. It is written when a volume comes or goes, and when a bucket first owes something
on a volume: before that write is acknowledged, so that after any stop the memory lists at least what there is. The
amount owed is updated every few seconds, for people.

The memory also says below which number all object ids lie. A volume that is away cannot say it, and an id that two
volumes used in turns would make one object's file overwrite another's when they meet again. So ids are noted ahead:
every start and every few seconds as many as nobody uses meanwhile.

At a start, owed objects may be about to move between volumes (`writer/misplaced.py`). Until they have moved, whatever a
volume owes counts as owed astray. Afterwards the present volumes are examined, and the memory is exact again.

Invariants. (1) `noted` answers yes only for what the metadata store has. (2) Only `give_up` forgets anything of a
volume that is not here. (3) The store uses no id that the memory has not noted.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from forebay.core.errors import Exists, Invalid, NotFound
from forebay.core.volumes import KnownVolume, Memory, Seen, Standing, first_memory, judge, memory_of_marks
from forebay.meta.seam import MetaStore
from forebay.node.store.disk.volume import OWN_NAMES, Volume, read_mark
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

ENTRY = "node/volumes"
IDS_AHEAD = 1 << 22  # object ids noted at once: minutes of as many writes as a node can take
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Memory).decode


def look(path: str) -> Seen:
    """What lies at `path`. Changes nothing. A directory that cannot be read counts as missing."""
    try:
        names = set(os.listdir(path))
        mark = read_mark(path)
    except OSError:
        return Seen(path, exists=False)
    foreign = min(names - OWN_NAMES, default="")
    if mark is None:
        leftovers = bool(names & OWN_NAMES - {"lost+found"})
        return Seen(
            path, has_data="data" in names, has_durable=_has_durable(path), leftovers=leftovers, foreign=foreign
        )
    members = tuple(mark.members)
    return Seen(path, True, mark.id, mark.weight, members, "data" in names, _has_durable(path), True, foreign)


def _has_durable(path: str) -> bool:
    return Path(path, "durable", "data.mdb").exists()


class KnownVolumes:
    """The memory. Call `load` first, then `judge`, `opening`, and once the store is open `opened`."""

    def __init__(self, meta: MetaStore, clock: Clock) -> None:
        self.memory = Memory()
        self.standings: list[Standing] = []
        self._before = Memory()
        self._meta = meta
        self._clock = clock
        self._changing = asyncio.Lock()
        self._noted: set[tuple[str, str]] = set()  # (volume id, bucket), as in `memory`
        self._noted_astray: set[tuple[str, str]] = set()

    async def load(self, paths: Sequence[str], *, ran_before: bool, owing_buckets: Collection[str]) -> None:
        """Load the memory. Without one, the volumes at `paths` are new, unless the node `ran_before` it had a memory.
        Then their marks make the memory, and an absent volume may own anything in `owing_buckets`."""
        entry = await self._meta.get(ENTRY)
        if entry is not None:
            self._hold(_decode(entry.value))
        elif ran_before:
            await self._keep(memory_of_marks([look(path) for path in paths], owing_buckets, self._clock.wall_s()))
        else:
            await self._keep(first_memory(paths))

    def judge(self, paths: Sequence[str]) -> list[Standing]:
        """What each volume is now. Those that are `present` or `fresh` are to be opened."""
        self.standings = judge(self.memory, [look(path) for path in paths])
        return self.standings

    async def opening(self) -> None:
        """Volumes are about to be opened: until `opened`, any of them may hold what they owe."""
        self._before = self.memory
        present = {each.volume_id for each in self.standings if each.state == "present"}
        kept = [
            msgspec.structs.replace(each, astray=tuple(sorted({*each.buckets, *each.astray})))
            if each.volume_id in present and each.owes
            else each
            for each in self.memory.volumes
        ]
        await self._keep(msgspec.structs.replace(self.memory, volumes=tuple(kept), doubted=True))

    async def opened(self, store: Store) -> None:
        """Remember the present volumes as they are, and tell the store of the absent ones."""
        here = {volume.id for volume in store.usable()}
        memory = self.memory
        for known in self._before.volumes:
            if known.volume_id not in here:  # a volume that could not be opened is remembered as before
                memory = memory.with_volume(known)
        store.doubt_buckets(bucket for each in memory.volumes if each.volume_id not in here for bucket in each.astray)
        all_here = all(known.volume_id in here for known in self._before.volumes)
        for volume in store.usable():
            buckets = store.owing_buckets(volume)
            before = self._before.find(volume.id)
            strayed = set(store.astray.get(volume.id, ()))
            if before is not None:
                store.superseded |= {(volume.id, bucket) for bucket in buckets if not before.owes_in(bucket)}
                buckets = tuple(bucket for bucket in buckets if before.owes_in(bucket))
            if before is not None and not all_here:
                strayed.update(before.astray)  # what belongs to a volume that is still away is still astray here
            astray = tuple(bucket for bucket in buckets if bucket in strayed)
            at = KnownVolume(volume.id, volume.path, volume.mark.weight, buckets, astray)
            memory = memory.with_volume(self._measured(at, volume))
        if self._before.doubted:
            store.any_missed = True
            store.missed |= here
        ids_below, doubted = store.next_id + IDS_AHEAD, store.any_missed
        await self._keep(msgspec.structs.replace(memory, epoch=store.epoch, ids_below=ids_below, doubted=doubted))
        self._tell(store)

    # --- what is owed where ---

    def noted(self, volume_id: str, bucket: str, astray: bool) -> bool:
        """Whether the memory says that this volume may own something of the bucket."""
        return (volume_id, bucket) in (self._noted_astray if astray else self._noted)

    async def note(self, store: Store, bucket: str, key: str) -> None:
        """Before something of this key is owned, remember that its volume may own it. Cheap if it is remembered."""
        volume_id = store.volume_of(bucket, key)
        astray = store.owners.strays(bucket, key, volume_id)
        if self.noted(volume_id, bucket, astray):
            return
        async with self._changing:
            known = self.memory.find(volume_id)
            if known is None:
                return  # every volume is out: the write is refused later
            if astray:
                known = msgspec.structs.replace(known, astray=tuple(sorted({*known.astray, bucket})))
            else:
                known = msgspec.structs.replace(known, buckets=tuple(sorted({*known.buckets, bucket})))
            await self._keep(self.memory.with_volume(known))
            self._tell(store)

    async def tend(self, store: Store, is_written: Collection[str]) -> None:
        """Every few seconds: update how much is owed, and forget buckets of which a volume owes nothing any more.
        Buckets in `is_written` have writes under way, and stay."""
        async with self._changing:
            memory = self.memory
            if (memory.epoch, memory.doubted) != (store.epoch, store.any_missed):
                memory = msgspec.structs.replace(memory, epoch=store.epoch, doubted=store.any_missed)
            if store.next_id > memory.ids_below - IDS_AHEAD // 2:
                memory = msgspec.structs.replace(memory, ids_below=store.next_id + IDS_AHEAD)
            for volume in store.usable():
                known = memory.find(volume.id)
                if known is None:
                    continue
                gone = {
                    bucket
                    for bucket in {*known.buckets, *known.astray}
                    if bucket not in is_written and not store.owes_in(volume, bucket)
                }
                now = self._measured(known, volume)
                if gone:
                    now = msgspec.structs.replace(
                        now,
                        buckets=tuple(bucket for bucket in now.buckets if bucket not in gone),
                        astray=tuple(bucket for bucket in now.astray if bucket not in gone),
                    )
                if now != known:
                    memory = memory.with_volume(now)
            if memory is not self.memory:
                await self._keep(memory)
                self._tell(store)

    def _measured(self, known: KnownVolume, volume: Volume) -> KnownVolume:
        usage = volume.usage
        if (known.owed_objects, known.owed_bytes) == (usage.owned_objects, usage.owed_bytes):
            return known
        return msgspec.structs.replace(
            known, owed_objects=usage.owned_objects, owed_bytes=usage.owed_bytes, seen_s=self._clock.wall_s()
        )

    async def supersede(self, store: Store, volume_ids: Collection[str], buckets: Collection[str]) -> None:
        """What these volumes, which are not here, have of the buckets is worth nothing if it comes back: it was made
        again elsewhere."""
        async with self._changing:
            memory = self.memory
            for known in [each for each in memory.volumes if each.volume_id in volume_ids]:
                left = tuple(each for each in known.buckets if each not in buckets)
                astray = tuple(each for each in known.astray if each not in buckets)
                memory = memory.with_volume(msgspec.structs.replace(known, buckets=left, astray=astray))
            await self._keep(memory)
            self._tell(store)

    # --- orders ---

    async def order(self, path: str, paths: Iterable[str]) -> None:
        """Order a volume at `path`: the next start makes it or takes it in. `Invalid` or `Exists` if that is
        impossible."""
        if path not in paths:
            raise Invalid(f"{path} is not among the node's volumes: add `--volume {path}` to its command first")
        known = self.memory.find(path)
        if known is not None:
            here = next((each.state for each in self.standings if each.volume_id == known.volume_id), "missing")
            raise Exists(
                f"volume {known.volume_id} lay at {path} and is {here}: bring it back, or give it up first "
                f"(`forebay volume give-up {known.volume_id}`)"
            )
        seen = look(path)
        if seen.foreign and not seen.mark_id:
            raise Invalid(f"{path} holds other files ({seen.foreign}): a volume needs an empty directory")
        if seen.mark_id in self.memory.given_up:
            raise Invalid(f"{path} holds volume {seen.mark_id}, which was given up for lost: empty the directory first")
        async with self._changing:
            await self._keep(msgspec.structs.replace(self.memory, ordered=tuple({*self.memory.ordered, path})))

    async def give_up(self, name: str, store: Store) -> KnownVolume:
        """Forget an absent volume and what it owes. `NotFound`; `Exists` when it is here."""
        known = self.memory.find(name)
        if known is None:
            raise NotFound(f"the node knows no volume {name}: `forebay volume ls` lists those it knows")
        if any(volume.id == known.volume_id for volume in store.usable()):
            raise Exists(
                f"volume {known.volume_id} is here and in use: only one that is not here can be given up; take it out "
                "of the node's volumes first"
            )
        async with self._changing:
            kept = tuple(each for each in self.memory.volumes if each.volume_id != known.volume_id)
            given_up = (*self.memory.given_up, known.volume_id)
            await self._keep(msgspec.structs.replace(self.memory, volumes=kept, given_up=given_up))
            self.standings = [each for each in self.standings if each.volume_id != known.volume_id]
            self._tell(store)
        return known

    # --- keeping ---

    def _tell(self, store: Store) -> None:
        """What was kept holds for the store."""
        store.ids_remembered = self.memory.ids_below
        store.know(self.memory.volumes, self.noted)

    async def _keep(self, memory: Memory) -> None:
        noted, astray = _pairs(memory)
        self._noted &= noted  # a writer may note again what is forgotten here, after this
        self._noted_astray &= astray
        await self._meta.put(ENTRY, _encode(memory))
        self._hold(memory)

    def _hold(self, memory: Memory) -> None:
        self.memory = memory
        self._noted, self._noted_astray = _pairs(memory)


def _pairs(memory: Memory) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Volume id and bucket of what is owed in place, and astray."""
    volumes = memory.volumes
    in_place = {(each.volume_id, bucket) for each in volumes for bucket in each.buckets}
    return in_place, {(each.volume_id, bucket) for each in volumes for bucket in each.astray}
