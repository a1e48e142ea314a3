"""What this node has lost comes back from the nodes that keep copies of it: an object that rotted, or a whole disk.

Theory. Of what no backend has, another node keeps a copy (`replicas.py`), and is asked to send it back. It comes on the
way on which copies go, and becomes this node's own as what is taken over does: as a new version, which the second is
sent when lists are compared.

*An object* whose bytes are lost, or rotted in part, has a note that says which version it was. A copy of that version,
and of no other, takes its place.

*A volume* that is not here had objects which nobody here can name. So every other holder lists what it keeps of this
node. Of each key the greatest version counts: a former second keeps an older one until lists are compared, and that
waits while a volume is missing. Nothing newer comes about meanwhile, since keys of that volume are refused. When all is
back the volume is given up, which ends the refusals: by `forebay volume give-up`, or by itself for a volume that was
missing for `volume_lost_after_s`. Both only if the map says that all was on two nodes and that no other node has lost
copies since, every node can be asked, and all came; the verb can be forced to lose what does not come. By itself also
only if no bucket that is kept once has anything there. A volume that was given up is left alone if it turns up again,
so nothing old comes back.

What came back stays if the work is cut: the next attempt leaves it out.

Rejected: that the node is taken over, forgets all, and comes back without the disk (all of its disks would be moved for
the sake of one; and a disk that is only unmounted would be forgotten at once).

Invariants. (1) What comes back takes the place of nothing that is whole here. (2) A volume is given up unforced
only when everything that is kept for it elsewhere is here. (3) Nothing comes that was not asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import msgspec

from forebay.backends.seam import Body
from forebay.core.cluster.coding import SLICES
from forebay.core.cluster.records import Map
from forebay.core.cluster.replication import Copy, Name
from forebay.core.errors import Corrupt, ForebayError, ObjectLost, Unavailable
from forebay.core.messages.calls import VolumeNamed
from forebay.core.messages.copied import (
    Copied,
    CopiesAsked,
    CopiesSaid,
    KeepCopy,
    ListCopies,
    SendAgain,
    SendBack,
    copies_of,
)
from forebay.core.volumes import KnownVolume, VolumeState
from forebay.node.engine.buckets import Buckets, no_bucket
from forebay.node.engine.kept import LISTED_MAX, KeptCopies, other_map, own_change
from forebay.node.engine.seat import Home, Seat
from forebay.node.engine.write.writes import Writes
from forebay.node.store.disk.notes import Note, digest_of
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.writer import owned
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.replicas")

Keepers = list[tuple[int, str]]  # versions of an object, and the nodes that say that they keep them
AT_ONCE = 4  # objects on their way back: more would take the link from clients
AGAIN_S = 60.0  # between attempts to get one object back: it may be large, and the disk full
LOOKED_AT = 500  # keys between two turns of the loop: 6 ms
DOUBTFUL_AGAIN_S = 5.0  # and to have others say what they keep of a silent node's
VOLUME_AGAIN_S = 10.0  # and a volume: what came back is not fetched again


class ToPeers(Protocol):
    """What other nodes are told (`peers.py`)."""

    async def keep_copy(
        self, home: Home, bucket: str, key: str, about: Copied, body: Body, *, back: bool = False
    ) -> None: ...

    async def ask_copies(self, home: Home, call: CopiesAsked) -> CopiesSaid: ...


class Volumes(Protocol):
    """`node/engine/volumes.py`."""

    async def give_up(self, named: VolumeNamed, came_back: int = 0, elsewhere: Collection[str] = ()) -> VolumeState: ...


class Returns:
    """See the module's header. `peers` are the other nodes, or it raises `Unavailable`; `home_of` says where one is;
    `seconds` who keeps what this node has of a key; `came_back` hears that a node keeps what is no more the version
    here."""

    def __init__(
        self,
        seat: Seat,
        node_id: str,
        clock: Clock,
        kept: KeptCopies,
        *,
        peers: Callable[[], ToPeers],
        home_of: Callable[[str], Home],
        seconds: Callable[[Map, Name], list[str]],
        came_back: Callable[[str], None],
        store: Store,
        buckets: Buckets,
        writes: Writes,
        volumes: Volumes,
        lost_after_s: float,
    ) -> None:
        self._seat, self._node_id, self._clock = seat, node_id, clock
        self._peers, self._home_of, self._seconds, self._came_back = peers, home_of, seconds, came_back
        self._store, self._buckets, self._writes, self._volumes = store, buckets, writes, volumes
        self._kept = kept
        self._lost_after_s = lost_after_s
        self._awaited: set[tuple[Name, int]] = set()  # what a node was asked for, and has not answered
        self._asked: dict[tuple[Name, int], float] = {}  # when an object may be asked for again
        self._doubtful_s: dict[Name, float] = {}  # when others may be asked again what they have in its place
        self._back: dict[str, int] = {}  # how much of a missing volume came back
        self.slices_are_elsewhere: Callable[[], bool] = lambda: False  # those of missing volumes (`slices.py`)
        self._due_s: dict[str, float] = {}  # when a missing volume's objects are to come back
        kept.takes_back, kept.sends_back = self._take, self._send

    # --- at the other end --------------------------------------------------------------------------------------------
    async def _send(self, node: str, name: Name, about: Copied, body: Body) -> None:
        await self._peers().keep_copy(self._home_of(node), *name, about, body, back=node == about.actor)

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
                if (name, about.version) in self._awaited and self._lacks(name, about.version):
                    local = served.bucket.write == "local"
                    change = own_change(call, self._store.take_id(), local, self._clock.wall_s())
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
        owner = self._store.owners.of_key(*name)
        if owner is None:
            return False
        record = self._store.lookup(*name)  # of a bucket that is owed astray there, any key may be on the volume
        here = record is not None and (record.complete or record.inline is not None)
        return not here or self._store.owners.home(*name) == owner.volume_id

    # --- asking for it -----------------------------------------------------------------------------------------------
    async def objects(self, agreed: Map, buckets: Iterable[str]) -> None:
        """Get back single objects of these buckets. What goes wrong with that is logged, and tried again."""
        for name, version in self._lost_objects(buckets):
            now_s = self._clock.monotonic_s()
            if self._asked.get((name, version), 0.0) > now_s:
                continue
            self._asked[name, version] = now_s + AGAIN_S
            for second in self._seconds(agreed, name):
                if await self._came(agreed, name, version, second):
                    log.warning("%s/%s was lost here, and came back from node %s", *name, second)
                    break
                if self._seat.agreed is not agreed or second not in self._seat.alive:
                    return

    async def collect(self, agreed: Map) -> None:
        """Have other nodes send what they keep of nodes that were given up and this one is the home of now, where it
        has no copy itself, or an older one. `Unavailable` while one does not say what it keeps."""
        buckets = [bucket.name for bucket in self._buckets.all() if bucket.write != "through"]
        came = 0
        for actor in agreed.bequeaths:
            for bucket in buckets:
                kept = defaultdict[Name, Keepers](list)
                for node in sorted(agreed.holders.keys() - {self._node_id}):
                    for number, (key, version) in enumerate(await self._listed(agreed, node, bucket, actor)):
                        if number % LOOKED_AT == 0:
                            await asyncio.sleep(0)
                        if agreed.holder(bucket, key) == self._node_id:
                            kept[bucket, key].append((version, node))
                todo = iter(kept.items())

                async def get_some(actor: str = actor, todo: Iterator[tuple[Name, Keepers]] = todo) -> int:
                    return sum([await self._collect(agreed, actor, name, keepers) for name, keepers in todo])

                came += sum(await asyncio.gather(*(get_some() for _ in range(AT_ONCE))))
        if self._seat.agreed is agreed:
            self._kept.ledger.collected(agreed)
            log.warning("%d copies of what lost nodes had came from others", came)

    async def _collect(self, agreed: Map, actor: str, name: Name, keepers: Keepers) -> bool:
        """Whether a copy came: the latest of those that are there still, if it is later than what is here."""
        call = SendBack(*name, actor, agreed.held, 0, self._node_id)
        for version, node in sorted(keepers, reverse=True):
            if not self._kept.lacks(actor, name, version):
                return False
            with self._kept.expecting(name):
                if not (await self._peers().ask_copies(self._home_of(node), call)).missing:
                    return True
        return False

    async def copies(self, agreed: Map) -> None:
        """Have nodes that were deposed, and live, send once more what cannot be taken over: it is gone, or may be old.
        Where they do not live, others may have a copy, too. What goes wrong with that is logged, and tried again."""
        silent, doubtful = set[str](), self._kept.doubtful()
        self._doubtful_s = {name: self._doubtful_s[name] for name, _ in doubtful if name in self._doubtful_s}
        for name, copy in doubtful:
            if self._kept.is_superseded(name):
                await self._kept.was_old(name, copy)
            if self._kept.is_superseded(name) or copy.actor in silent:
                continue
            if copy.actor not in self._seat.alive:
                await self._from_others(agreed, name, copy)
                continue
            call = SendAgain(*name, self._node_id, agreed.held)
            try:
                if (await self._peers().ask_copies(self._home_of(copy.actor), call)).missing:
                    await self._kept.was_old(name, copy)
            except ForebayError as error:
                log.warning("%s/%s is not sent again by node %s yet: %s", *name, copy.actor, error.message)
                if not isinstance(error, Corrupt | ObjectLost):
                    silent.add(copy.actor)

    async def _from_others(self, agreed: Map, name: Name, copy: Copy) -> None:
        """A copy of what a silent node had, from one who keeps it, too. What is older than the copy here is refused
        here."""
        now_s = self._clock.monotonic_s()
        if self._doubtful_s.get(name, 0.0) > now_s:
            return
        self._doubtful_s[name] = now_s + DOUBTFUL_AGAIN_S
        has_none = list[str]()
        others = sorted(agreed.holders.keys() - {self._node_id})
        for node in others:
            call = SendBack(*name, copy.actor, agreed.held, copy.version, self._node_id)
            try:
                with self._kept.expecting(name):
                    if (await self._peers().ask_copies(self._home_of(node), call)).missing:
                        has_none.append(node)
                if self._kept.is_fine(name):
                    log.warning("%s/%s is as node %s keeps it", *name, node)
                    return
            except ForebayError as error:
                log.warning("%s/%s does not come from node %s: %s", *name, node, error.message)
        if has_none == others:
            self._kept.is_nowhere_else(name)

    async def volumes(self, agreed: Map, buckets: Iterable[str]) -> None:
        """Do without volumes that have been missing for long, once all that they owed in these buckets is back. If this
        node was deposed, it is with others. What goes wrong with that is logged, and tried again."""
        for known in self._lost_volumes(agreed, buckets):
            try:
                await self.give_up(VolumeNamed(known.volume_id))
            except ForebayError as error:
                self._due_s[known.volume_id] = self._clock.monotonic_s() + VOLUME_AGAIN_S
                log.warning("what volume %s owed does not come back yet: %s", known.volume_id, error.message)

    def _lost_objects(self, buckets: Iterable[str]) -> list[tuple[Name, int]]:
        found: list[tuple[Name, int]] = []
        for bucket in buckets:
            found += [((bucket, lost.key), lost.note.seq) for lost in self._store.lost_in(bucket, limit=LISTED_MAX)]
            for each in self._store.partly_lost(bucket):
                kept = owned.entry_at(self._store.home(bucket, each.key), bucket, each.key)
                if kept is not None:
                    found.append(((bucket, each.key), kept.note.seq))
        self._asked = {asked: self._asked[asked] for asked in found if asked in self._asked}
        return found

    def _lost_volumes(self, agreed: Map, buckets: Iterable[str]) -> list[KnownVolume]:
        """The missing volumes that are to be done without by now."""
        if not self._lost_after_s:
            return []
        now_s = self._clock.monotonic_s()
        twice = {*buckets, *map(copies_of, buckets), SLICES}
        missing = {each.volume_id: each for bucket in sorted(twice) for each in self._store.owners.of_bucket(bucket)}
        self._due_s = {each: self._due_s.get(each, now_s + self._lost_after_s) for each in missing}
        return [
            each
            for each in missing.values()
            if now_s >= self._due_s[each.volume_id]
            and self._all_is_elsewhere(agreed)
            and each.path not in self._store.roomless  # it is opened when there is room
            and twice.issuperset((*each.buckets, *each.astray))
            and (not each.owes_in(SLICES) or self.slices_are_elsewhere())
        ]

    async def give_up(self, named: VolumeNamed) -> VolumeState:
        """Get back what other nodes keep of a volume that is not here, then give it up. `Unavailable` if that cannot be
        all, unless it is forced: a node cannot be asked, has no whole copy of what it should, or had not been told
        everything when the volume went."""
        came_back, elsewhere = 0, set[str]()
        agreed, known = self._seat.agreed, self._owing(named.name)
        is_deposed = agreed is not None and self._node_id in agreed.deposed  # others have taken over all there was
        if known is not None:
            if not named.force and agreed is None:
                raise Unavailable("this node does not know the cluster's map: try again, or --force")
            if not named.force and agreed is not None and not self._all_is_elsewhere(agreed):
                raise Unavailable(
                    f"not all that volume {known.volume_id} owed is on other nodes (the holders changed, or one of "
                    "them lost a disk): bring it back, or --force to lose what is not"
                )
            if agreed is not None and (
                agreed.is_covered if is_deposed else await self._bring_back(agreed, known, named.force)
            ):
                elsewhere = {bucket.name for bucket in self._buckets.all() if bucket.is_kept_twice}
            came_back = self._back.get(known.volume_id, 0)
        return await self._volumes.give_up(named, came_back, elsewhere)

    def _all_is_elsewhere(self, agreed: Map) -> bool:
        """Whether all that this node alone has or had was on another node too, and no other has lost copies since."""
        return agreed.covered >= agreed.held and agreed.losers() <= {self._node_id}

    def _owing(self, name: str) -> KnownVolume | None:
        """The missing volume of that id or path, if it owes something that is kept twice."""
        twice = (bucket.name for bucket in self._buckets.all() if bucket.is_kept_twice)
        found = (each for bucket in twice for each in self._store.owners.of_bucket(bucket))
        return next((each for each in found if name in (each.volume_id, each.path)), None)

    async def _bring_back(self, agreed: Map, known: KnownVolume, force: bool) -> bool:
        """Whether all came back that other nodes keep of it, and that was all it owed in these buckets."""
        left = 0
        for bucket in [each.name for each in self._buckets.all() if each.is_kept_twice and known.owes_in(each.name)]:
            wanted, unasked = await self._wanted(agreed, bucket, force)
            log.warning("%d objects and deletes of %s come back from other nodes", len(wanted), bucket)
            todo = iter(wanted)

            async def get_some(bucket: str = bucket, todo: Iterator[tuple[str, int, str]] = todo) -> list[bool]:
                return [await self._came(agreed, (bucket, key), version, node) for key, version, node in todo]

            got = [each for some in await asyncio.gather(*(get_some() for _ in range(AT_ONCE))) for each in some]
            self._back[known.volume_id] = self._back.get(known.volume_id, 0) + sum(got)
            left += len(got) - sum(got) + unasked
        now = self._seat.agreed
        is_all = not left and now is not None and now.held == agreed.held and self._all_is_elsewhere(now)
        if not force and not is_all:
            raise Unavailable(
                f"{self._back.get(known.volume_id, 0)} objects came back, and {left} did not (the log says why): try "
                "again, bring the volume back, or --force to lose them"
            )
        return is_all

    async def _wanted(self, agreed: Map, bucket: str, force: bool) -> tuple[list[tuple[str, int, str]], int]:
        """Keys that are to come back, their versions, and from which node; and how many nodes did not say. A former
        second may keep what was deleted since, until nothing of it is needed: only the seconds count."""
        newest: dict[str, tuple[int, str]] = {}
        unasked = 0
        for node in sorted(agreed.holders.keys() - {self._node_id}):
            try:
                listed = await self._listed(agreed, node, bucket)
            except ForebayError as error:
                if not force:
                    raise
                unasked += 1
                log.warning("what node %s keeps of %s does not come back: %s", node, bucket, error.message)
                continue
            for number, (key, version) in enumerate(listed):
                if number % LOOKED_AT == 0:
                    await asyncio.sleep(0)
                if node in self._seconds(agreed, (bucket, key)):
                    newest[key] = max(newest.get(key, (0, "")), (version, node))
        wanted = []
        for number, (key, (version, node)) in enumerate(sorted(newest.items())):
            if number % LOOKED_AT == 0:
                await asyncio.sleep(0)
            if self._lacks((bucket, key), version):
                wanted.append((key, version, node))
        return wanted, unasked

    async def _came(self, agreed: Map, name: Name, version: int, node: str) -> bool:
        try:
            return await self._get(agreed, name, version, node)
        except ForebayError as error:
            log.warning("%s/%s does not come back from node %s: %s", *name, node, error.message)
            return False

    async def _listed(self, agreed: Map, node: str, bucket: str, lost: str = "") -> list[tuple[str, int]]:
        """What a node keeps of this one's, or of one that is lost."""
        found: list[tuple[str, int]] = []
        while page := await self._page(agreed, node, bucket, found[-1][0] if found else "", lost):
            found += page
        return found

    async def _page(self, agreed: Map, node: str, bucket: str, after: str, lost: str) -> list[tuple[str, int]]:
        call = ListCopies(bucket, lost or self._node_id, agreed.held, after, bool(lost))
        return (await self._peers().ask_copies(self._home_of(node), call)).kept

    async def _get(self, agreed: Map, name: Name, version: int, node: str) -> bool:
        """Have a node send back what it keeps of a key. False if it has not got that."""
        call = SendBack(*name, self._node_id, agreed.held, version)
        self._awaited.add((name, version))
        try:
            return not (await self._peers().ask_copies(self._home_of(node), call)).missing
        finally:
            self._awaited.discard((name, version))
            self._came_back(node)
