"""What this node keeps for others: copies of what only they have, until it is in a backend, or they are taken over.

Theory. `core/cluster/replication.py` decides whether a copy is taken and what it is worth; here it is brought to the
disk, and from there back. A copy is stored as a local object is (`core/messages/copied.py`): synced before the answer,
and found again after a stop. The ledger is made from what lies there at the start.

*Taking over.* When its actor was deposed, a copy becomes this node's own before the node acts on the key: written as an
owed or local object, with the actor's base version and the digests of all bodies that the actor may have sent, this one
among them. So the flush knows what it finds at the backend. Then the copy goes. Cut in between, the object is here
twice, and the copy goes when it is looked at again. Bytes are shared by the filesystem where it can.

What nobody will ask for (`Kept.useless`) goes.

Rejected: renaming the copy (its file says what it is; a stop in between would make it nobody's).

Invariants. (1) What the ledger has is on the disk. (2) A copy changes, and is taken over, under its lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

import msgspec

from forebay.backends.seam import Body
from forebay.core.cluster.records import Map
from forebay.core.cluster.replication import Copy, Kept, Name
from forebay.core.errors import Busy, Corrupt, ForebayError, Unavailable, map_changes
from forebay.core.machines import sent_bodies
from forebay.core.messages.copied import (
    ClearCopy,
    CompareCopies,
    CompareSome,
    Copied,
    CopiesCall,
    CopiesSaid,
    KeepCopy,
    ListCopies,
    SendAgain,
    SendBack,
    copies_of,
    whose_copies,
)
from forebay.core.record import Record, State, own_version
from forebay.core.s3rules.tags import tags_among, without_tags
from forebay.core.types import ObjectInfo
from forebay.node.engine.buckets import Buckets, no_bucket
from forebay.node.engine.disk_wait import by_disk
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.write.copies import share_file
from forebay.node.engine.write.writes import Writes
from forebay.node.store.disk.notes import Note, digest_of
from forebay.node.store.disk.volume_threads import remove_temp
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer import owned
from forebay.node.store.writer.puts import Change, Delete, Put
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.replicas")

TakesBack = Callable[[KeepCopy], Coroutine[None, None, CopiesSaid]]
SendsBack = Callable[[str, Name, Copied, Body], Awaitable[None]]  # to this node
SendsAgain = Callable[[SendAgain], Awaitable[CopiesSaid]]
LISTED_MAX = 2_000  # keys of one list: 2 MB where keys are as long as they may be
LOOKED_AT = 500  # keys between two turns of the loop
TAKEN_AT_ONCE = 32  # of what is taken over: one sync makes many of them durable, and listings wait for the last


class KeptCopies:
    """See the module's header. `agreed` is the map that the node knows, None if it may go by none. `bring_up` restores
    a key to view after a stop. Set `is_sure`, and what others are told at the other end: `takes_back`, `sends_back`,
    `sends_again`."""

    def __init__(
        self,
        node_id: str,
        agreed: Callable[[], Map | None],
        clock: Clock,
        workers: Executor,
        *,
        store: Store,
        index: StoreReader,
        buckets: Buckets,
        writes: Writes,
        flusher: Flusher,
        bring_up: Callable[[str, str], None],
    ) -> None:
        self._bring_up = bring_up
        self._agreed, self._clock, self._workers = agreed, clock, workers
        self._store, self._index, self._buckets = store, index, buckets
        self._writes, self._flusher = writes, flusher
        found = _found(store)
        stale = {name for volume, name, _ in found if (volume, copies_of(name[0])) in store.superseded}
        later = {name: copy for volume, name, copy in found if (volume, copies_of(name[0])) not in store.superseded}
        self.ledger = Kept(node_id, {name: copy for _, name, copy in found} | later)
        self._superseded = stale - later.keys()
        self._absent: set[str] = set()  # volumes on which copies are
        self._rotted: list[tuple[int, int]] = []  # how much of each volume was known to have
        self._may_be_old = store.any_missed and bool(self.ledger.copies)
        self._old = self._superseded | {name for volume, name, _ in found if volume in store.missed}  # perhaps
        self._doubtful: set[Name] = set()
        self._nowhere_else: set[Name] = set()  # of these
        self._expected: set[Name] = set()  # copies of lost nodes that others are asked for
        self.is_gone: Callable[[str], bool] = lambda node: False  # whether a node was given up
        self.was_kept_twice: Callable[[str, str], bool] = lambda node, bucket: True  # by the node that had it
        self.is_sure: Callable[[], bool] = lambda: True  # whether all is here again that was ever found gone
        self.took_over: Callable[[Name], None] = lambda name: None  # hears of what only this node has as its own now
        self.takes_back: TakesBack
        self.sends_back: SendsBack
        self.sends_again: SendsAgain

    async def answer(self, call: CopiesCall) -> CopiesSaid:
        """What another node asks. `Busy` if this one goes by another map."""
        if isinstance(call, KeepCopy):
            return await self._writes.finish(self.takes_back(call) if call.back else self._keep(call))
        if isinstance(call, ClearCopy):
            return await self._writes.finish(self._clear(call))
        if isinstance(call, ListCopies):
            return self._list(call)
        if isinstance(call, SendBack):
            return await self._send_back(call)
        if isinstance(call, SendAgain):
            return await self.sends_again(call)
        return await self._writes.finish(self._compare(call))

    def has_any(self, bucket: str) -> bool:
        """Whether something of the bucket is kept for others."""
        return self.ledger.has_any(bucket)

    async def _keep(self, call: KeepCopy) -> CopiesSaid:
        name, about = (call.bucket, call.key), call.about
        copy = Copy(about.actor, about.number, about.version)
        try:
            served = self._buckets.known(call.bucket)
            if served is None:
                raise no_bucket(call.bucket)
            note = msgspec.msgpack.decode(about.note, type=Note)
            found = digest_of(call.size_bytes, sums=call.sums, body=call.body)
            if note.digest and not about.is_delete and found != note.digest:
                raise Corrupt(f"the copy of {call.bucket}/{call.key} is not what was sent: send it again")
            async with self._writes.keeping(copies_of(call.bucket), call.key):
                agreed, asked = self._follow(), name in self._expected
                if not self.ledger.takes(agreed, about.held, name, copy, asked):
                    if asked and about.held == agreed.held:
                        return CopiesSaid()  # it is older than what was here, and whoever asked goes on
                    raise other_map()
                await self._writes.commits.commit(self._put(call, found))
                self.ledger.keep(name, copy)
                self._trust([name])
                if self._follow().held != about.held:
                    raise other_map()
        finally:
            if call.path:
                remove_temp(call.path)
        return CopiesSaid()

    def _put(self, call: KeepCopy, digest: str) -> Put:
        object_id, about = self._store.take_id(), call.about
        info = ObjectInfo(
            call.key, call.size_bytes, own_version(object_id), about.etag, about.modified_s, about.headers
        )
        note = Note(
            seq=object_id,
            since_s=self._clock.wall_s(),
            size_bytes=call.size_bytes,
            object_id=object_id,
            local=True,
            digest=digest,
            copied=msgspec.msgpack.encode(about),
        )
        return Put(
            copies_of(call.bucket),
            info,
            object_id,
            int(State.LOCAL),
            checked_s=self._clock.wall_s(),
            body=call.body if not call.path else None,
            path=call.path,
            sums=call.sums,
            note=note,
            durable=True,
        )

    async def _clear(self, call: ClearCopy) -> CopiesSaid:
        name = (call.bucket, call.key)
        async with self._writes.keeping(copies_of(call.bucket), call.key):
            self._follow()
            there = self.ledger.copies.get(name)
            if self.ledger.clears(name, call.actor, call.number):
                assert there is not None
                try:
                    await self._remove(name)
                except BaseException:
                    self.ledger.keep(name, there)
                    raise
        return CopiesSaid()

    async def _compare(self, call: CompareCopies) -> CopiesSaid:
        bucket = call.bucket
        listed = {(bucket, key): version for key, version in call.listed}
        busy = {(bucket, key) for key in call.busy}
        upto = (bucket, call.upto) if call.upto else (bucket + "\0", "")
        agreed, served = self._follow(), self._buckets.known(bucket)
        copies = served.bucket.copies if served is not None else 1

        def stays(name: Name) -> bool:
            is_stray = self.ledger.node not in agreed.seconds(call.actor, *name, copies)
            return call.strays_stay and is_stray and self._is_there(name)

        found = self.ledger.compare(
            agreed, call.held, call.actor, call.number, listed, busy, (bucket, call.after), upto, stays
        )
        if found is None:
            raise other_map()
        missing, dropped = found
        for name in dropped if not isinstance(call, CompareSome) else ():
            await self._drop(name, self.ledger.copies.get(name))
        same = [name for name in listed if name not in missing]
        self._trust(same)
        gone = [name for name in same if not self._is_there(name)]
        return CopiesSaid([key for _, key in (*missing, *gone)])

    def _list(self, call: ListCopies) -> CopiesSaid:
        self._goes_by(call.held)
        if not call.is_lost:
            self._check_sure()
        return CopiesSaid(kept=self.ledger.of(call.actor, call.bucket, call.after, LISTED_MAX))

    async def _send_back(self, call: SendBack) -> CopiesSaid:
        name, place = (call.bucket, call.key), copies_of(call.bucket)
        self._bring_up(place, call.key)
        async with self._writes.keeping(place, call.key):
            self._goes_by(call.held)
            if not call.keeper:
                self._check_sure()
            there = self.ledger.copies.get(name)
            kept = owned.entry_at(self._store.home(place, call.key), place, call.key)
            record = self._store.lookup(place, call.key)
            if there is None or there.actor != call.actor or not self._is_there(name) or self.is_superseded(name):
                return CopiesSaid([call.key])
            if there.version != call.version and not call.keeper:
                return CopiesSaid([call.key])
            assert record is not None
            if kept is None or not kept.note.copied:
                return CopiesSaid([call.key])
            about = msgspec.structs.replace(msgspec.msgpack.decode(kept.note.copied, type=Copied), held=call.held)
            inline = record.inline
            path = "" if inline is not None else self._store.data_path(record)
        # not under the lock: a write there may wait for this node to keep its copy, and what comes waits for the write
        await self.sends_back(call.keeper or call.actor, name, about, Body(record.size_bytes, inline, path))
        return CopiesSaid()

    def _goes_by(self, held: int) -> None:
        """`Busy` unless this node goes by the map of these holders, and what it keeps counts by it."""
        agreed = self._follow()
        if agreed.held != held or self.ledger.node in agreed.deposed:
            raise other_map()

    def _check_sure(self) -> None:
        """`Busy` while what is kept here may lack something, or be old."""
        if not self._is_sure():
            raise Busy("this node has lost copies, which are made again first", retry_after_s=1.0)

    def _is_sure(self) -> bool:
        return not self._may_be_old and self.is_sure()

    def _is_there(self, name: Name) -> bool:
        """Whether the copy still is where the ledger says, and whole: its disk may have failed, or rotted."""
        record = self._store.lookup(copies_of(name[0]), name[1])
        return record is not None and (record.inline is not None or record.complete)

    async def _drop(self, name: Name, there: Copy | None) -> None:
        """Remove the copy, if it still is this one."""
        async with self._writes.keeping(copies_of(name[0]), name[1]):
            if there is not None and self.ledger.copies.get(name) == there:
                await self._remove(name)
                self.ledger.forget([name])

    async def _remove(self, name: Name) -> None:
        await self._writes.commits.commit(Delete(copies_of(name[0]), name[1], durable=True))

    def _follow(self) -> Map:
        agreed = self._agreed()
        if agreed is None:
            raise Busy("this node does not know the cluster's map: try again", retry_after_s=1.0)
        self.ledger.follow(agreed)
        return agreed

    # --- what is lost ------------------------------------------------------------------------------------------------
    def find_lost(self) -> bool:
        """Whether copies are gone that were not when this was asked last: they rotted, or went with a volume. At the
        first time those of a volume that was away count as gone: they may be old."""
        before, self._absent = self._absent, self._absent_volumes()
        shape = [(len(volume.lost), len(volume.partly_lost)) for volume in self._store.usable()]
        shape, self._rotted = self._rotted, shape
        rotted = False
        for volume in self._store.usable() if shape != self._rotted else ():
            named = [(lost.bucket, lost.key) for lost in volume.lost.values() if whose_copies(lost.bucket)]
            for place, key in [*named, *volume.partly_lost.values()]:
                name = (whose_copies(place), key)
                rotted |= name in self.ledger.copies and not self._is_there(name)
        is_first, self._may_be_old = self._may_be_old, False
        return rotted or is_first or bool(self._absent - before)

    def _absent_volumes(self) -> set[str]:
        """Volumes that are not here, and may have copies."""
        if not self._store.owners:
            return set()
        places = [copies_of(bucket.name) for bucket in self._buckets.all() if bucket.is_kept_twice]
        return {each.volume_id for place in places for each in self._store.owners.of_bucket(place)}

    @property
    def absent(self) -> set[str]:
        """Volumes that are not here, and may have had copies, as was told."""
        return self._absent & self._absent_volumes()

    def _trust(self, names: Collection[Name]) -> None:
        """Their actor says that they are current."""
        self._old.difference_update(names)
        self._superseded.difference_update(names)

    def is_superseded(self, name: Name) -> bool:
        """Whether the copy lay on a volume that was away while all of its copies were made again elsewhere."""
        return name in self._superseded

    def doubtful(self) -> list[tuple[Name, Copy]]:
        """What could not be taken over the last time: it is gone, or may be old."""
        return [(name, self.ledger.copies[name]) for name in sorted(self._doubtful) if name in self.ledger.copies]

    def lacks(self, actor: str, name: Name, version: int) -> bool:
        """Whether another's copy of what a lost node had is to be asked for: there is none here as late as that."""
        there = self.ledger.copies.get(name)
        if self._is_own(name):
            return False
        return there is None or there.actor != actor or there.version < version or not self._is_there(name)

    def is_fine(self, name: Name) -> bool:
        """Whether the copy is here, and not old, as far as anybody said."""
        return name in self.ledger.copies and name not in self._old and self._is_there(name)

    @contextmanager
    def expecting(self, name: Name) -> Iterator[None]:
        """While another node is asked for its copy of what a lost or silent node had."""
        self._expected.add(name)
        try:
            yield
        finally:
            self._expected.discard(name)

    def is_nowhere_else(self, name: Name) -> None:
        """No other node has a copy of it, but its actor, perhaps."""
        self._nowhere_else.add(name)

    async def was_old(self, name: Name, copy: Copy) -> None:
        """Its actor has nothing of the key: forget it."""
        await self._drop(name, copy)

    # --- taking over -------------------------------------------------------------------------------------------------
    def acts_anew(self, name: Name) -> bool:
        """Whether the copy of a key must be made this node's own before it acts on it."""
        agreed = self._agreed()
        if agreed is None:
            return False
        if self.ledger.acts_anew(agreed, name) or self._may_be_absent(agreed, name):
            return True
        return not self.ledger.is_collected(agreed, name) and not self._is_own(name)

    def _is_own(self, name: Name) -> bool:
        return self._store.owned(*name) is not None or self._flusher.find(*name) is not None

    def _may_be_absent(self, agreed: Map, name: Name) -> bool:
        """Whether a copy that is to be taken over may be on a volume that is not here, and nowhere else."""
        if not self._lacks_some(agreed) or agreed.holder(*name) != self.ledger.node:
            return False
        if self._store.owners.of_key(copies_of(name[0]), name[1]) is None:
            return False
        return not self._is_own(name)

    def _lacks_some(self, agreed: Map) -> bool:
        """Whether what is to be taken over may be on a volume that is not here: it was not sent again since."""
        is_due = agreed.is_taking_over and self.ledger.node in agreed.holders
        return is_due and bool(self._store.owners) and not self._is_sure() and bool(self._absent_volumes())

    @property
    def waiting(self) -> bool:
        """Whether some copy is this node's own by the map, and not made so yet."""
        agreed = self._agreed()
        if agreed is None:
            return False
        return bool(self.ledger.taken_over(agreed)) or self._lacks_some(agreed) or self.ledger.collects(agreed)

    async def take_over(self, name: Name) -> None:
        """Make the copy this node's own, if it is to be. `Unavailable` if its disk does not let it."""
        await self._writes.finish(self._take_over(name))

    async def _take_over(self, name: Name) -> None:
        bucket, key = name
        for place in (bucket, copies_of(bucket)):
            self._bring_up(place, key)
        async with self._writes.keeping(bucket, key), self._writes.keeping(copies_of(bucket), key):
            there = self.ledger.copies.get(name)
            if not self.acts_anew(name):
                return
            if self.ledger.collects(self._follow()):
                raise map_changes("lost nodes may have had this: others are asked for their copies first", 0.25)
            if there is not None and not self.was_kept_twice(there.actor, bucket):
                await self._remove(name)  # from before the bucket was kept once: what became of it there nobody knows
                self.ledger.forget([name])
                return
            record = self._store.lookup(copies_of(bucket), key)
            if there is not None and name in self._nowhere_else and self.is_gone(there.actor):
                self._store.check_present(copies_of(bucket), key)
                if not self._is_there(name):
                    log.error("%s/%s is lost: no copy is left, and node %s was given up", bucket, key, there.actor)
                    await self._remove(name)
                    self.ledger.forget([name])
                    return
                if name in self._old and name not in self._superseded:
                    log.warning("%s/%s may be old, and node %s, which knew, was given up", bucket, key, there.actor)
                    self._old.discard(name)
            if there is None or name in self._old or not self._is_there(name):
                self._doubtful.add(name)
                self._store.check_present(copies_of(bucket), key)
                self._store.check_lost(copies_of(bucket), key)
                raise Unavailable(
                    f"what this node kept of {bucket}/{key} is gone, or may be old: the node that had it has to say. "
                    "Start that if it does not run, or give it up (`forebay status`, `forebay drain`)",
                    retry_after_s=1.0,
                )
            assert record is not None
            if not self._is_own(name):
                change = await self._own(name, record)
                if change is not None:
                    log.info("%s/%s is taken over from node %s", bucket, key, there.actor)
                    await self._writes.commits.commit(change)
                    self.took_over(name)
            await self._remove(name)
            self.ledger.forget([name])

    async def _own(self, name: Name, record: Record) -> Change | None:
        """What makes the copy this node's own; None if it needs nothing."""
        bucket, key = name
        served = self._buckets.known(bucket)
        if served is None:
            raise no_bucket(bucket)
        kept = owned.entry_at(self._store.home(copies_of(bucket), key), copies_of(bucket), key)
        if kept is None or not kept.note.copied:
            raise Unavailable(f"the copy of {bucket}/{key} is being changed: try again", retry_after_s=0.5)
        about = msgspec.msgpack.decode(kept.note.copied, type=Copied)
        seq = self._store.take_id()
        await self._writes.remember(bucket, key)
        path, sums = "", list[int]()
        if record.inline is None and not about.is_delete:
            path = await self._shared(name, record)
            sums = list(owned.sums_of(self._store.home(copies_of(bucket), key), record))
        copy = KeepCopy(bucket, key, about, record.size_bytes, path, record.inline, sums)
        return own_change(copy, seq, served.bucket.write == "local", self._clock.wall_s())

    async def _shared(self, name: Name, record: Record) -> str:
        """A new file with the bytes of a copy, on the volume of its key."""
        path, source = self._index.incoming(*name), self._store.data_path(record)
        if not path:
            raise Unavailable("no volume takes what is taken over: see `forebay status`", code="InsufficientStorage")
        try:
            volume = self._store.volume_at(*name)
            await by_disk(volume, self._workers, lambda: share_file(source, path, record.size_bytes), "/".join(name))
        except BaseException as error:
            remove_temp(path)
            if isinstance(error, OSError):
                raise Unavailable(f"what is taken over could not be written ({error.strerror})") from error
            raise
        return path

    async def take_all_over(self) -> None:
        """Make every copy this node's own that is to be."""
        self._nowhere_else &= self._doubtful
        self._doubtful.clear()
        if (agreed := self._agreed()) is None:
            return
        self.ledger.follow(agreed)
        if self.ledger.collects(agreed):
            return
        mine, refused = await self._of_this_node(agreed), list[ForebayError]()
        names = iter(mine)

        async def one_after_another() -> None:
            for name in names:
                try:
                    await self.take_over(name)
                except ForebayError as error:
                    refused.append(error)

        await asyncio.gather(*(one_after_another() for _ in range(TAKEN_AT_ONCE)))
        if refused:
            raise refused[0]

    async def _of_this_node(self, agreed: Map) -> list[Name]:
        """What it is to take over. What is spare is found here, some at a time."""
        mine: list[Name] = []
        for number, name in enumerate(self.ledger.taken_over(agreed)):
            if number % LOOKED_AT == LOOKED_AT - 1:
                await asyncio.sleep(0)
            if not self.ledger.is_spare(agreed, name):
                mine.append(name)
        return mine

    # --- forgetting --------------------------------------------------------------------------------------------------
    async def tidy(self, *, all: bool = False) -> None:
        """Forget what nobody will ask for any more; or all."""
        agreed = self._follow()
        for name in list(self.ledger.copies) if all else self.ledger.useless(agreed):
            await self._drop(name, self.ledger.copies.get(name))

    async def give_up(self, bucket: str) -> None:
        """Forget what is kept of a bucket for others, who still have it."""
        for name in [name for name in self.ledger.copies if name[0] == bucket]:
            await self._drop(name, self.ledger.copies.get(name))


def own_change(copy: KeepCopy, seq: int, local: bool, checked_s: float) -> Change | None:
    """What makes a copy the own object `seq` of who has it; None if nothing is to be done for a delete. What the actor
    had may have been sent to the backend. It is the key's last version, whatever a volume may have that is not here."""
    about = copy.about
    theirs = msgspec.msgpack.decode(about.note, type=Note)
    sent = sent_bodies.left(theirs.sent, sent_bodies.ABSENT if about.is_delete else theirs.digest or None)
    note = msgspec.structs.replace(
        theirs,
        seq=seq,
        object_id=0 if about.is_delete else seq,
        headers=without_tags(about.headers),
        tags=tags_among(about.headers) or "",
        local=local,
        **sent._asdict(),
    )
    if about.is_delete:
        return None if local else Delete(copy.bucket, copy.key, note, durable=True, returns=True)
    info = ObjectInfo(copy.key, copy.size_bytes, own_version(seq), about.etag, about.modified_s, about.headers)
    state = int(State.LOCAL if local else State.DIRTY)
    return Put(
        copy.bucket, info, seq, state, checked_s=checked_s, body=copy.body if not copy.path else None, path=copy.path,
        sums=copy.sums, note=note, durable=True, returns=True,
    )  # fmt: skip


def _found(store: Store) -> list[tuple[str, Name, Copy]]:
    """The copies that lie on this node's disks, with the id of the volume."""
    found: list[tuple[str, Name, Copy]] = []
    for volume in store.usable():
        for bucket, key, note in owned.kept_under(volume, copies_of("")):
            if note.copied:
                about = msgspec.msgpack.decode(note.copied, type=Copied)
                name = (whose_copies(bucket), key)
                found.append((volume.id, name, Copy(about.actor, about.number, about.version)))
    return found


def other_map() -> ForebayError:
    """What a node says to one that goes by another map."""
    return Busy("the nodes go by different maps, or this was let go of: number it anew", retry_after_s=0.25)
