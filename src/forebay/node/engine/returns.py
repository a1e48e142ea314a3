"""What this node has lost comes back from the nodes that keep copies of it: an object that rotted, or a whole disk.

Theory. Of what no backend has, another node keeps a copy (`replicas.py`), and is asked to send it back. It comes on the
way on which copies go, and becomes this node's own as what is taken over does: as a new version, which the second is
sent when lists are compared.

*An object* whose bytes are lost, or rotted in part, has a note that says which version it was. A copy of that version,
and of no other, takes its place.

*A volume* that is not here had objects which nobody here can name. So every other holder lists what it keeps of this
node. Of each key the greatest version counts: a former second keeps an older one until lists are compared, and that
waits while a volume is missing. Nothing newer comes about meanwhile, since keys of that volume are refused. When all is
back the volume is given up, which ends the refusals. So does `forebay volume give-up`; and the node does it by itself
for a volume that was missing for `volume_lost_after_s`, if all that it owed was on two nodes: the map says so
(`covered` is `held`), and no bucket that is kept once has anything there. A volume that was given up is left alone if
it turns up again, so nothing old comes back with it.

What came back stays if the work is cut: the next attempt leaves it out.

Rejected: that the node is taken over, forgets all, and comes back without the disk (all of its disks would be moved for
the sake of one; and a disk that is only unmounted would be forgotten at once).

Invariants. (1) What comes back takes the place of nothing that is whole here. (2) A volume is given up by itself only
when everything that is kept for it elsewhere is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec

from forebay.backends.seam import Body
from forebay.core.cluster.records import Map
from forebay.core.cluster.replication import Name
from forebay.core.errors import Corrupt, ForebayError, Unavailable
from forebay.core.messages.calls import VolumeNamed
from forebay.core.messages.copied import (
    Copied,
    CopiesAsked,
    CopiesSaid,
    KeepCopy,
    ListCopies,
    SendBack,
    copies_of,
)
from forebay.core.record import State, own_version
from forebay.core.types import ObjectInfo
from forebay.core.volumes import KnownVolume, VolumeState
from forebay.node.engine.buckets import Buckets, no_bucket
from forebay.node.engine.kept import LISTED_MAX, KeptCopies, other_map, own_note
from forebay.node.engine.seat import Home, Seat
from forebay.node.engine.write.writes import Writes
from forebay.node.store.disk.notes import Note, digest_of
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.writer import owned
from forebay.node.store.writer.puts import Change, Delete, Put
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.replicas")

AT_ONCE = 4  # objects on their way back: more would take the link from clients
AGAIN_S = 60.0  # between attempts to get one object back: it may be large, and the disk full
VOLUME_AGAIN_S = 10.0  # and a volume: what came back is not fetched again


class ToPeers(Protocol):
    """What other nodes are told (`peers.py`)."""

    async def keep_copy(
        self, home: Home, bucket: str, key: str, about: Copied, body: Body, *, back: bool = False
    ) -> None: ...

    async def ask_copies(self, home: Home, call: CopiesAsked) -> CopiesSaid: ...


class Volumes(Protocol):
    """`node/engine/volumes.py`."""

    async def give_up(self, named: VolumeNamed, came_back: int = 0) -> VolumeState: ...


class Returns:
    """See the module's header. `peers` are the other nodes, or it raises `Unavailable`; `home_of` says where one is;
    `came_back` hears that a node keeps what is no more the version here."""

    def __init__(
        self,
        seat: Seat,
        node_id: str,
        clock: Clock,
        kept: KeptCopies,
        *,
        peers: Callable[[], ToPeers],
        home_of: Callable[[str], Home],
        came_back: Callable[[str], None],
        store: Store,
        buckets: Buckets,
        writes: Writes,
        volumes: Volumes,
        lost_after_s: float,
    ) -> None:
        self._seat, self._node_id, self._clock = seat, node_id, clock
        self._peers, self._home_of, self._came_back = peers, home_of, came_back
        self._store, self._buckets, self._writes, self._volumes = store, buckets, writes, volumes
        self._lost_after_s = lost_after_s
        self._asked: dict[tuple[Name, int], float] = {}  # when an object may be asked for again
        self._due_s: dict[str, float] = {}  # when a missing volume's objects are to come back
        kept.takes_back, kept.sends_back = self._take, self._send

    # --- at the other end --------------------------------------------------------------------------------------------
    async def _send(self, actor: str, name: Name, about: Copied, body: Body) -> None:
        await self._peers().keep_copy(self._home_of(actor), *name, about, body, back=True)

    # --- here --------------------------------------------------------------------------------------------------------
    async def _take(self, call: KeepCopy) -> CopiesSaid:
        """Make a copy that was kept for this node its own again, if it still lacks that."""
        name, about = (call.bucket, call.key), call.about
        try:
            agreed = self._seat.agreed
            if agreed is None or about.held != agreed.held or not self._is_its(agreed, about):
                raise other_map()
            served = self._buckets.known(call.bucket)
            if served is None:
                raise no_bucket(call.bucket)
            digest = msgspec.msgpack.decode(about.note, type=Note).digest
            found = digest_of(call.size_bytes, sums=call.sums, body=call.body)
            if digest and not about.is_delete and found != digest:
                raise Corrupt(f"what comes back of {call.bucket}/{call.key} is not what was sent: send it again")
            async with self._writes.keeping(*name):
                if self._lacks(name, about.version):
                    change = self._change(call, local=served.bucket.write == "local")
                    if change is not None:
                        await self._writes.commits.commit(change)
        finally:
            if call.path:
                remove_temp(call.path)
        return CopiesSaid()

    def _is_its(self, agreed: Map, about: Copied) -> bool:
        return about.actor == self._node_id and self._node_id in agreed.holders

    def _lacks(self, name: Name, version: int) -> bool:
        """Whether this version of the key was lost here."""
        if (lost := self._store.lost_of(*name)) is not None:
            return lost.note.seq == version
        kept = owned.entry_at(self._store.home(*name), *name)
        if kept is not None:
            record = self._store.owned(*name)
            rotted = record is not None and record.inline is None and not record.complete
            return rotted and kept.note.seq == version
        return self._store.owners.of_key(*name) is not None

    def _change(self, call: KeepCopy, *, local: bool) -> Change | None:
        """What makes it so; None if nothing is to be done for a delete."""
        about, seq = call.about, self._store.take_id()
        note = own_note(about, seq, local)
        if about.is_delete:
            return None if local else Delete(call.bucket, call.key, note, durable=True, returns=True)
        info = ObjectInfo(call.key, call.size_bytes, own_version(seq), about.etag, about.modified_s, about.headers)
        state = int(State.LOCAL if local else State.DIRTY)
        return Put(
            call.bucket, info, seq, state, checked_s=self._clock.wall_s(), body=call.body if not call.path else None,
            path=call.path, sums=call.sums, note=note, durable=True, returns=True,
        )  # fmt: skip

    # --- asking for it -----------------------------------------------------------------------------------------------
    async def objects(self, agreed: Map, buckets: list[str]) -> None:
        """Get back single objects of these buckets. What goes wrong with that is logged, and tried again."""
        for name, version in self._lost_objects(buckets):
            second = agreed.second(self._node_id, *name)
            now_s = self._clock.monotonic_s()
            if second is None or self._asked.get((name, version), 0.0) > now_s:
                continue
            self._asked[name, version] = now_s + AGAIN_S
            try:
                if await self._get(agreed, name, version, second):
                    log.warning("%s/%s was lost here, and came back from node %s", *name, second)
            except ForebayError as error:
                log.warning("%s/%s is lost here, and does not come back yet: %s", *name, error.message)

    async def volumes(self, agreed: Map, buckets: list[str]) -> None:
        """Do without volumes that have been missing for long, once all that they owed in these buckets is back. If this
        node was deposed, it is with others. What goes wrong with that is logged, and tried again."""
        for known in self._lost_volumes(agreed, buckets):
            try:
                await self.give_up(VolumeNamed(known.volume_id), by_itself=True)
            except ForebayError as error:
                self._due_s[known.volume_id] = self._clock.monotonic_s() + VOLUME_AGAIN_S
                log.warning("what volume %s owed does not come back yet: %s", known.volume_id, error.message)

    def _lost_objects(self, buckets: list[str]) -> list[tuple[Name, int]]:
        found: list[tuple[Name, int]] = []
        for bucket in buckets:
            found += [((bucket, lost.key), lost.note.seq) for lost in self._store.lost_in(bucket, limit=LISTED_MAX)]
            for each in self._store.partly_lost(bucket):
                kept = owned.entry_at(self._store.home(bucket, each.key), bucket, each.key)
                if kept is not None:
                    found.append(((bucket, each.key), kept.note.seq))
        self._asked = {asked: self._asked[asked] for asked in found if asked in self._asked}
        return found

    def _lost_volumes(self, agreed: Map, buckets: list[str]) -> list[KnownVolume]:
        """The missing volumes that are to be done without by now."""
        if not self._lost_after_s:
            return []
        now_s = self._clock.monotonic_s()
        twice = {*buckets, *map(copies_of, buckets)}
        missing = {each.volume_id: each for bucket in sorted(twice) for each in self._store.owners.of_bucket(bucket)}
        self._due_s = {each: self._due_s.get(each, now_s + self._lost_after_s) for each in missing}
        return [
            each
            for each in missing.values()
            if now_s >= self._due_s[each.volume_id]
            and agreed.covered == agreed.held
            and twice.issuperset((*each.buckets, *each.astray))
        ]

    async def give_up(self, named: VolumeNamed, *, by_itself: bool = False) -> VolumeState:
        """Get back what other nodes keep of a volume that is not here, then give it up. `Unavailable` if one of them
        cannot be asked, or (`by_itself`) has not all that it keeps."""
        came_back = 0
        agreed = self._seat.agreed
        if agreed is None or self._node_id not in agreed.deposed:  # else others have taken over all there was
            known = self._owing(named.name)
            if known is not None:
                if agreed is None:
                    raise Unavailable("this node does not know the cluster's map: try again", retry_after_s=1.0)
                came_back, left = await self._bring_back(agreed, known)
                if left and by_itself:
                    raise Unavailable(f"of {left} objects no whole copy was found: see `forebay volume owed`")
        return await self._volumes.give_up(named, came_back)

    def _owing(self, name: str) -> KnownVolume | None:
        """The missing volume of that id or path, if it owes something that is kept twice."""
        twice = (bucket.name for bucket in self._buckets.all() if bucket.is_kept_twice)
        found = (each for bucket in twice for each in self._store.owners.of_bucket(bucket))
        return next((each for each in found if name in (each.volume_id, each.path)), None)

    async def _bring_back(self, agreed: Map, known: KnownVolume) -> tuple[int, int]:
        """How many objects and deletes came back, and of how many there is no whole copy any more."""
        came_back = left = 0
        buckets = [each.name for each in self._buckets.all() if each.is_kept_twice and known.owes_in(each.name)]
        for bucket in buckets:
            newest: dict[str, tuple[int, str]] = {}
            for node in sorted(agreed.holders.keys() - {self._node_id}):
                for key, version in await self._listed(agreed, node, bucket):
                    newest[key] = max(newest.get(key, (0, "")), (version, node))
            wanted = [(key, *found) for key, found in sorted(newest.items()) if self._lacks((bucket, key), found[0])]
            log.warning("%d objects and deletes of %s come back from other nodes", len(wanted), bucket)
            got = await _some_at_once(self._get(agreed, (bucket, key), version, node) for key, version, node in wanted)
            came_back, left = came_back + sum(got), left + len(got) - sum(got)
        return came_back, left

    async def _listed(self, agreed: Map, node: str, bucket: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        while page := await self._page(agreed, node, bucket, found[-1][0] if found else ""):
            found += page
        return found

    async def _page(self, agreed: Map, node: str, bucket: str, after: str) -> list[tuple[str, int]]:
        call = ListCopies(bucket, self._node_id, agreed.held, after)
        return (await self._peers().ask_copies(self._home_of(node), call)).kept

    async def _get(self, agreed: Map, name: Name, version: int, node: str) -> bool:
        """Have a node send back what it keeps of a key. False if it has not got that."""
        call = SendBack(*name, self._node_id, agreed.held, version)
        if (await self._peers().ask_copies(self._home_of(node), call)).missing:
            return False
        self._came_back(node)
        return True


async def _some_at_once(works: Iterable[Awaitable[bool]]) -> list[bool]:
    """The results; the first error, when those under way have ended."""
    todo = iter(works)

    async def one_after_another() -> list[bool]:
        return [await work for work in todo]

    ended = await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)), return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [done for each in ended if not isinstance(each, BaseException) for done in each]
