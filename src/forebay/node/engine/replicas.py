"""A second copy of what no backend has, on another node, before a write is acknowledged; or more (`Bucket.copies`).

Theory. `core/cluster/replication.py` decides; here is what carries it out for what this node acts on. A write of a
bucket that is kept twice is sent to the seconds (`Map.seconds`) as a copy, committed here, and acknowledged. If the
holders changed meanwhile, whoever is second now gets it before the answer. What a backend has by now, or nobody shall
have, is cleared there before it is forgotten here. `kept.py` is the other end.

In the background (`tend`) a node compares, with one other after another, what that is to keep, sends what is missing,
and says that all is covered. It does so again each hour, as a precaution. After something failed, it waits for AGAIN_S.
Nothing of it holds up what clients ask, but for the lock of one key while its copy is sent.

*A volume of this node that is missing* had objects that nobody here can list. If all was covered with these holders,
others have them. The rest is compared then, and nothing leaves who keeps it; but with a node that has lost copies
nothing is, since some may have been of those. *Copies that are gone here* are told (`Seat.lost_copies`) before anything
else is said: who died now would be lost.

A node alone has none of this, nor have buckets that are kept once. A node that is no holder (it comes or goes) keeps
one copy of what it has: nobody takes that over.

Rejected: sending while the body arrives (one of two that broke off had to be undone); many copies in one request (each
would wait for the slowest).

Invariants. (1) What was acknowledged is on the seconds by the map of the acknowledgement, until it is in a backend. (2)
A node that was deposed acknowledges nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.cluster.membership import LOOK_S
from forebay.core.cluster.records import Map
from forebay.core.cluster.replication import Name, Sent
from forebay.core.errors import MAP_CHANGES, Corrupt, ForebayError, Unavailable
from forebay.core.messages.calls import VolumeNamed
from forebay.core.messages.copied import (
    ClearCopy,
    CompareCopies,
    CompareSome,
    Copied,
    CopiesSaid,
    SendAgain,
    copies_of,
)
from forebay.core.record import Record, State, info_of
from forebay.core.types import Headers, ObjectInfo
from forebay.core.volumes import VolumeState
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.kept import LISTED_MAX, KeptCopies, other_map
from forebay.node.engine.peers import Peers
from forebay.node.engine.returns import Returns
from forebay.node.engine.seat import Home, Seat
from forebay.node.engine.write.writes import Writes
from forebay.node.store.disk.notes import Note
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer import owned
from forebay.node.store.writer.puts import Change, Put
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.replicas")
ResultT = TypeVar("ResultT")

AGAIN_S = 0.5  # between attempts to have a copy kept, or lists compared
PATIENCE_S = 4.0  # how long a write waits for its second, besides the time that its bytes take
BYTES_S = 4 * limits.MIB  # a link, and a disk at its end, that are slower count as silent
TOLD_S = 2.0  # between losses that are told: each has all nodes compare, and a bad disk shows one after another
ENDED_S = 0.02  # between looks at writes that are under way: each ends in milliseconds, and the join waits
TURNS = 6  # of sending, while the holders change
SENT_AT_ONCE = 4  # of the copies that a node lacks
COMPARED_FOR_S = 3600.0  # 10^7 keys are 5,000 requests


class Volumes(Protocol):
    """`node/engine/volumes.py`."""

    def missing(self, bucket: str) -> list[str]: ...

    async def give_up(self, named: VolumeNamed, came_back: int = 0, elsewhere: Collection[str] = ()) -> VolumeState: ...

    async def supersede(self, volume_ids: Collection[str], buckets: Collection[str]) -> None: ...


class _Copy(NamedTuple):
    """What is to be kept: `about` without number and `held`."""

    about: Copied
    body: Body


class Replicas:
    """See the module's header. `flush` makes changes of the index visible; `is_whole`: all that was owed before the
    start is in view; `lost_after_s` as in `Settings.volume_lost_after_s`."""

    def __init__(
        self,
        seat: Seat,
        peers: Peers | None,
        node_id: str,
        clock: Clock,
        kept: KeptCopies,
        *,
        store: Store,
        index: StoreReader,
        buckets: Buckets,
        writes: Writes,
        flusher: Flusher,
        volumes: Volumes,
        flush: Callable[[], None],
        is_whole: Callable[[], bool],
        lost_after_s: float,
    ) -> None:
        self._seat, self._peers, self.node_id, self._clock, self.kept = seat, peers, node_id, clock, kept
        self._store, self._index, self._buckets, self._writes = store, index, buckets, writes
        self._flusher, self._volumes, self._flush, self._is_whole = flusher, volumes, flush, is_whole
        self.sent = Sent(node_id, store.take_id, self._copies)
        kept.is_sure, kept.sends_again = lambda: seat.all_made_again, self._send_once_more
        kept.is_gone = lambda node: seat.is_gone(node)
        kept.took_over = self._compare_seconds_again
        kept.was_kept_twice = lambda node, bucket: seat.kept_twice_by(node, bucket)
        writes.commits.on_answer = self.compare_again  # what was given up may be written now
        self._silent: set[str] = set()
        self._compared_by: dict[str, int] = {}  # how many copies of each bucket lists were compared for
        self._compared_s = clock.monotonic_s()  # when all lists were due
        self.returns = Returns(
            seat,
            node_id,
            clock,
            kept,
            peers=self._to_peers,
            home_of=self._home_of,
            seconds=self.sent.seconds,
            came_back=self.sent.failed,
            store=store,
            buckets=buckets,
            writes=writes,
            volumes=volumes,
            lost_after_s=lost_after_s,
        )

    def keeps_twice(self, bucket: str) -> bool:
        """Whether what no backend has of the bucket is kept on two nodes, or more."""
        return self._copies(bucket) > 1

    def _copies(self, bucket: str) -> int:
        """On how many it is."""
        served = self._buckets.known(bucket)
        return served.bucket.copies if served is not None and served.bucket.is_kept_twice else 1

    def acts(self) -> bool:
        """Whether this node may answer for keys of such buckets: nobody acts in its place yet."""
        return self._seat.acts_until_s > 0.0

    def may_send(self, bucket: str, under_way: bool) -> None:
        """`Unavailable` if a flush of the bucket might come from a node that was taken over. What is `under_way` goes
        on while the node stands aside: that waits for it."""
        if self.keeps_twice(bucket) and not (self._seat.is_here if under_way else self.acts()):
            raise Unavailable("this node lost its place in the cluster: what it owes waits", retry_after_s=1.0)

    @property
    def is_deposed(self) -> bool:
        """Whether the node was taken over, and acts on nothing until it holds again."""
        agreed = self._seat.agreed
        return agreed is not None and self.node_id in agreed.deposed

    # --- writes ------------------------------------------------------------------------------------------------------
    async def commit(self, change: Change) -> Record | None:
        """As `Commits.commit`, under the key's lock. `Unavailable` if no second keeps it, or it is not known to: then
        it may have been written."""
        name = (change.bucket, change.info.key if isinstance(change, Put) else change.key)
        if not self.keeps_twice(change.bucket):
            return await self._writes.commits.commit(change)
        if change.note is None:
            return await self._forget(name, change)
        return await self._kept_first(
            name, self._of_change(change, change.note), lambda: self._writes.commits.commit(change)
        )

    async def retag(self, bucket: str, info: ObjectInfo, note: Note | None, act: Callable[[], Awaitable[None]]) -> None:
        """Under the key's lock: `act`, after which the object is described by `info` and `note`, its bytes as before.
        `Unavailable` as `commit`."""
        copy = self._of_store((bucket, info.key)) if self.keeps_twice(bucket) and note is not None else None
        if copy is None or note is None:
            await act()
            return
        about = self._about(note, info.etag, info.modified_s, info.headers)
        await self._kept_first((bucket, info.key), _Copy(about, copy.body), act)

    async def _kept_first(self, name: Name, first: _Copy, act: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """`act`, which makes the key what the copy is of, once the second keeps that."""
        holds = self.node_id in self._agreed().holders
        write = self.sent.begin(name)
        try:
            held = await self._place(name, first)
            try:
                if holds and self.node_id not in self._agreed().holders:
                    raise Unavailable("this node has handed its keys over. It may have been written: look first")
                result = await act()
            except BaseException as error:
                if not await self._take_back(name) and isinstance(error, ForebayError):
                    raise _may_be_written(error) from error
                raise
            for _ in range(TURNS):
                if self._agreed().held == held:
                    return result
                copy = self._of_store(name)
                if copy is None:
                    return result
                held = await self._place(name, copy)
        finally:
            self.sent.end(write)
        raise Unavailable("the holders change all the time. It may have been written: look before you write it again")

    async def _forget(self, name: Name, change: Change) -> Record | None:
        """Commit what leaves nothing here that a backend lacks."""
        if self._is_owned(*name):
            await self.clear(*name)
        try:
            return await self._writes.commits.commit(change)
        except BaseException as error:
            if not await self._take_back(name) and isinstance(error, ForebayError):
                raise _may_be_written(error) from error
            raise

    async def _take_back(self, name: Name) -> bool:
        """What was sent is not here: the second shall have what is. Whether it does; if not, lists tell it, but this
        node may be taken over before."""
        self._compare_seconds_again(name)
        if self._store.owners.of_key(*name) is not None:
            return False  # a disk failed: what was acknowledged was there, and what was sent is all there is now
        try:
            copy = self._of_store(name)
            if copy is not None:
                await self._place(name, copy)
            elif self._is_owned(*name) or owned.entry_at(self._store.home(*name), *name) is not None:
                return False  # it cannot be sent now, or is durable and not in view; and the second has something of it
            else:
                await self.clear(*name)
        except ForebayError:
            return False
        return True

    async def clear(self, bucket: str, key: str) -> None:
        """Under the key's lock: a backend has it, or nobody shall. Nobody keeps it for this node when this returns.
        `Unavailable` if that is not known."""
        name = (bucket, key)
        if not self.keeps_twice(bucket):
            return
        until_s = self._clock.monotonic_s() + PATIENCE_S
        while True:
            agreed = self._agreed()
            seconds = self._seconds(agreed, name)
            strays = self.sent.strays(agreed, self._seat.alive, name)
            errors = await asyncio.gather(*(self._clear_at(until_s, each, name) for each in (*seconds, *strays)))
            failed = [(second, error) for second, error in zip(seconds, errors, strict=False) if error is not None]
            if not failed and self._agreed().held == agreed.held:
                return  # what strays keep leaves soon in any case
            for second in seconds if failed else ():  # some have let go of what is here still
                self.sent.failed(second)
            for second, error in failed:
                # Only who goes by another map for a moment: a flush is tried again in any case, and others wait for it.
                if getattr(error, "code", "") != MAP_CHANGES or self._clock.monotonic_s() + AGAIN_S >= until_s:
                    raise _unheard(second, error) from error
            if failed:
                await self._seat.next_map(AGAIN_S)
            elif self._clock.monotonic_s() >= until_s:
                raise Unavailable("the holders change all the time: try again", retry_after_s=1.0)

    async def _clear_at(self, until_s: float, node: str, name: Name) -> Exception | None:
        """What went wrong, if anything."""
        try:
            async with asyncio.timeout(until_s - self._clock.monotonic_s()):
                call = ClearCopy(*name, self.node_id, self.sent.number())
                await self._to_peers().clear_copy(self._home_of(node), call)
        except (ForebayError, TimeoutError) as error:
            return error
        return None

    def _is_owned(self, bucket: str, key: str) -> bool:
        here = self._store.owned(bucket, key) is not None or self._flusher.find(bucket, key) is not None
        return here or self._store.lost_of(bucket, key) is not None

    def _agreed(self) -> Map:
        agreed = self._seat.agreed
        if agreed is None:
            raise Unavailable("this node does not know the cluster's map: try again", retry_after_s=LOOK_S)
        if self.node_id in agreed.deposed:
            raise Unavailable(
                "this node was taken over. It may have been written: look at another node", retry_after_s=LOOK_S
            )
        return agreed

    def _seconds(self, agreed: Map, name: Name) -> list[str]:
        return self.sent.seconds(agreed, name) if self.node_id in agreed.holders else []

    def _home_of(self, node: str) -> Home:
        home = self._seat.place_of(node)
        if home is None:
            raise Unavailable(f"node {node} is not heard of")
        return home

    def _to_peers(self) -> Peers:
        if self._peers is None:
            raise Unavailable("nodes with identities keep copies for each other with --peer-key: give it to every node")
        return self._peers

    async def _place(self, name: Name, copy: _Copy) -> int:
        """Return when everybody keeps it who should; by which holders. `Unavailable`."""
        until_s = self._clock.monotonic_s() + PATIENCE_S + copy.body.size_bytes / BYTES_S
        have, held = set[str](), -1  # those who keep it, by these holders
        while True:
            agreed = self._agreed()
            if agreed.held != held:
                have, held = set(), agreed.held
            seconds = self._seconds(agreed, name)
            lack = [second for second in seconds if second not in have]
            sending = [self._send_until(until_s, agreed, second, name, copy) for second in lack]
            errors = [await sending[0]] if len(sending) == 1 else await asyncio.gather(*sending)
            failed = [(second, error) for second, error in zip(lack, errors, strict=True) if error is not None]
            if not failed:
                return agreed.held
            have |= set(lack) - {second for second, _ in failed}
            for second in seconds:  # also who keeps it: it may be refused now, and nobody would look there again
                self.sent.failed(second)
            if self._clock.monotonic_s() + AGAIN_S >= until_s:
                raise _unheard(*failed[0]) from failed[0][1]
            await self._seat.next_map(AGAIN_S)

    async def _send_until(self, until_s: float, agreed: Map, second: str, name: Name, copy: _Copy) -> Exception | None:
        """What went wrong, if anything: whoever sends to several has to know of each."""
        try:
            async with asyncio.timeout(until_s - self._clock.monotonic_s()):
                await self._send(agreed, second, name, copy)
        except (ForebayError, TimeoutError) as error:
            return error
        return None

    async def _send(self, agreed: Map, second: str, name: Name, copy: _Copy) -> None:
        home = self._home_of(second)
        about = msgspec.structs.replace(copy.about, number=self.sent.number(), held=agreed.held)
        await self._to_peers().keep_copy(home, *name, about, copy.body)

    # --- what is sent ------------------------------------------------------------------------------------------------
    def _of_change(self, change: Change, note: Note) -> _Copy:
        if not isinstance(change, Put):
            return _Copy(self._about(note, "", 0.0, (), is_delete=True), Body(0, b""))
        info, size_bytes = change.info, change.info.size_bytes
        body = Body(size_bytes, change.body) if not change.path else Body(size_bytes, path=change.path)
        return _Copy(self._about(note, info.etag, info.modified_s, info.headers), body)

    def _of_store(self, name: Name) -> _Copy | None:
        """What this node has of the key and no backend has; None: nothing, or not whole."""
        kept = owned.entry_at(self._store.home(*name), *name)
        if kept is None or not self._is_owned(*name):
            return None
        if kept.note.is_delete:
            return _Copy(self._about(kept.note, "", 0.0, (), is_delete=True), Body(0, b""))
        record = self._store.owned(*name)
        if record is None or record.object_id != kept.note.object_id or not record.complete:
            return None
        info = info_of(record, name[1])
        if record.inline is not None:
            body = Body(record.size_bytes, record.inline)
        else:
            body = Body(record.size_bytes, path=self._store.data_path(record))
        return _Copy(self._about(kept.note, info.etag, info.modified_s, info.headers), body)

    def _about(self, note: Note, etag: str, modified_s: float, headers: Headers, *, is_delete: bool = False) -> Copied:
        bare = msgspec.structs.replace(note, headers=(), tags="", upload_id="", upload_key="", part_bytes=0, stale=())
        encoded = msgspec.msgpack.encode(bare)
        return Copied(self.node_id, 0, note.seq, 0, etag, modified_s, headers, encoded, is_delete)

    # --- comparing ---------------------------------------------------------------------------------------------------
    async def tend(self) -> None:
        """Do so, for ever."""
        said, goes_on = "", False
        while True:
            if not goes_on:
                await self._seat.next_map(LOOK_S)
            try:
                goes_on = await self._tend_once()
                said = ""
                continue
            except ForebayError as error:
                if error.message != said:
                    said = error.message
                    log.warning("not all is kept on two nodes yet: %s", said)
            except Exception:
                log.exception("keeping copies broke; it goes on")
            goes_on = False
            await asyncio.sleep(AGAIN_S)

    async def tell_losses(self) -> None:
        """Tell the cluster of copies that are gone here, for ever. Beside `tend`, which may wait long for others: who
        dies before this is told is lost."""
        while True:
            if not self.kept.find_lost():
                if self._seat.all_made_again:
                    self._store.any_missed = False
                    if absent := self.kept.absent:
                        await self._volumes.supersede(absent, [copies_of(bucket) for bucket in self._twice()])
                await asyncio.sleep(LOOK_S)
                continue
            self._seat.lost_copies()
            log.info("what is kept here for other nodes may not be all, or old: they compare it")
            await asyncio.sleep(TOLD_S)

    def compare_again(self) -> None:
        """Nobody knows what others keep by now."""
        for node in self._seat.alive:
            self.sent.failed(node)

    async def _tend_once(self) -> bool:
        """Whether another node keeps now what its list says, so that the next may be compared at once."""
        agreed = self._seat.agreed
        if agreed is None or not self._is_whole():
            return False
        await self.kept.tidy()
        if self.node_id in agreed.deposed:
            if agreed.is_covered:
                await self.returns.volumes(agreed, self._twice())
                await self._forget_all()
            return False
        await self._take_all_over(agreed)
        buckets = self._twice()
        if self.node_id not in agreed.holders or self._seat.agreed is not agreed:
            return False
        if not buckets:
            if (agreed.deposed or agreed.given_up) and not self.kept.waiting:
                self._seat.covered(agreed.due)  # others wait for that, and there is nothing to compare
            return False
        await self.returns.objects(agreed, buckets)
        await self.returns.volumes(agreed, buckets)
        now_s = self._clock.monotonic_s()
        if now_s >= self._compared_s + COMPARED_FOR_S or any(
            self._compared_by.get(name, copies) != copies for name, copies in buckets.items()
        ):
            self._compared_s = now_s
            self.compare_again()
        self._compared_by = buckets
        others = {node: present for node, present in self._seat.alive.items() if node not in self._silent}
        node = self.sent.to_compare(agreed, others)
        self._silent = set() if node is None else {*self._silent, node}  # whoever does not answer is tried again last
        if node is not None:
            await self._compare(agreed, node, buckets)
            self._silent.discard(node)
        if self.sent.covered(agreed, self._seat.alive) and not self.kept.waiting:
            self._seat.covered(agreed.due)
        return node is not None and node in self._seat.alive and self.sent.is_compared(agreed, self._seat.alive, node)

    async def _take_all_over(self, agreed: Map) -> None:
        """What cannot be is refused, and tried again; this node's own copies do not wait for it."""
        if self.kept.waiting:
            try:
                if self.kept.ledger.collects(agreed):
                    await self.returns.collect(agreed)
                await self.kept.take_all_over()
            except ForebayError as error:
                log.warning("not all is taken over yet: %s", error.message)
            await self.returns.copies(agreed)

    async def _send_once_more(self, call: SendAgain) -> CopiesSaid:
        """Of what this node had when it was taken over: others may lack it."""
        name = (call.bucket, call.key)
        async with self._writes.lock(*name):
            agreed = self._seat.agreed
            if agreed is None or agreed.held != call.held or not self.is_deposed or not self._is_whole():
                raise other_map()
            copy = self._of_store(name)
            if copy is None:
                self._check_whole(name)
                return CopiesSaid([call.key])
            try:
                async with asyncio.timeout(PATIENCE_S + copy.body.size_bytes / BYTES_S):
                    await self._send(agreed, call.keeper, name, copy)
            except TimeoutError as error:
                raise Unavailable(f"node {call.keeper} does not answer") from error
        return CopiesSaid()

    def _compare_seconds_again(self, name: Name) -> None:
        """Lists that were compared before do not say what is here of the key now: its seconds may lack it, or keep what
        is not here."""
        if (agreed := self._seat.agreed) is not None:
            for second in self._seconds(agreed, name):
                self.sent.failed(second)

    def _twice(self) -> dict[str, int]:
        """The buckets of which there are copies, and how many."""
        return {bucket.name: bucket.copies for bucket in self._buckets.all() if bucket.is_kept_twice}

    def is_settled(self) -> bool:
        """Whether all is this node's own that it is to take over; and of what it had when it was taken over itself,
        nothing is left."""
        if not self.is_deposed:
            agreed = self._seat.agreed
            holds = agreed is not None and self.node_id in agreed.holders
            return not self.kept.waiting and (holds or not self.kept.ledger.copies)
        self._flush()
        if self.kept.ledger.copies or any(self._volumes.missing(bucket) for bucket in self._twice()):
            return False
        return not any(self._next_owned(bucket) for bucket in self._twice())

    def _next_owned(self, bucket: str) -> list[str]:
        owed = [key for key, _ in self._flusher.window(bucket, "", "", LISTED_MAX)]
        owed += [lost.key for lost in self._store.lost_in(bucket, limit=LISTED_MAX)]
        after = ""
        while not owed and (found := self._index.scan(bucket, "", after, LISTED_MAX)):
            owed = [key for key, record in found if record.state & State.OWNED]
            after = found[-1][0]
        return owed

    async def _forget_all(self) -> None:
        """Others have taken over what this node had, and have it twice: forget it."""
        forgotten = 0
        for bucket in self._twice():
            self._flush()
            while keys := self._next_owned(bucket):
                for key in keys:
                    if not self.is_deposed:
                        return
                    await self._writes.forget(bucket, key)
                    forgotten += 1
                self._flush()
        await self.kept.tidy(all=True)
        if forgotten:
            log.warning("%d objects and deletes are forgotten: other nodes have taken them over", forgotten)

    async def _compare(self, agreed: Map, node: str, buckets: Iterable[str]) -> None:
        """Have a node keep what it is to keep, and no more."""
        marked, number, busy = self.sent.mark(agreed, self._seat.alive, node), self.sent.number(), self.sent.busy
        may_leave = self.sent.may_leave(agreed, self._seat.alive, node)
        written = set[Name]()
        for bucket in buckets:
            self._flush()
            after, is_last = "", False
            while not is_last:
                owed, upto = self._owned(bucket, after)
                is_last = not upto
                listed, writing = self.sent.listed(agreed, node, (((bucket, key), seq) for key, seq in owed))
                keys = [(key, version) for (_, key), version in listed.items()]
                under_way = sorted(key for of, key in writing if of == bucket)
                written |= {name for name in writing if name[0] == bucket}
                # Asked after the list was made, with nothing in between: a volume may fail at any moment.
                lacks = bool(self._volumes.missing(bucket))
                kind = CompareSome if lacks else CompareCopies
                if lacks and (agreed.covered < agreed.held or node in agreed.losers()):
                    raise Unavailable(f"volumes are missing that may have something of {bucket}: see `forebay status`")
                call = kind(bucket, self.node_id, number, agreed.held, keys, under_way, after, upto, not may_leave)
                missing = await self._to_peers().compare_copies(self._home_of(node), call)
                await self._send_all(agreed, node, [(bucket, key) for key in missing])
                after = upto
        while not self.sent.have_ended(busy):
            if self._agreed().held != agreed.held:
                return
            await asyncio.sleep(ENDED_S)
        for bucket, key in sorted(written):
            if (version := self._version(bucket, key)) is not None:
                call = CompareSome(bucket, self.node_id, number, agreed.held, [(key, version)])
                if await self._to_peers().compare_copies(self._home_of(node), call):
                    await self._send_again(agreed, node, (bucket, key))
        self.sent.compared(node, marked, may_leave)

    def _version(self, bucket: str, key: str) -> int | None:
        """Which version this node has that no backend has; a deletion is one."""
        if (note := self._flusher.find(bucket, key)) is not None:
            return note.seq
        record, lost = self._store.owned(bucket, key), self._store.lost_of(bucket, key)
        return record.object_id if record is not None else None if lost is None else lost.note.seq

    def _owned(self, bucket: str, after: str) -> tuple[list[tuple[str, int]], str]:
        """Keys after `after` of which this node has what no backend has, with their versions, and how far they go ("":
        to the end)."""
        served = self._buckets.known(bucket)
        if served is not None and served.bucket.write == "back":
            seen = [(key, note.seq) for key, note in self._flusher.window(bucket, "", after, LISTED_MAX)]
            owed = seen
        else:
            scanned = self._index.scan(bucket, "", after, LISTED_MAX)
            seen = [(key, record.object_id) for key, record in scanned]
            owed = [(key, record.object_id) for key, record in scanned if record.state & State.OWNED]
        upto = seen[-1][0] if len(seen) == LISTED_MAX else ""
        lost = {each.key: each.note.seq for each in self._store.lost_in(bucket, "", after)}
        return [*owed, *((key, seq) for key, seq in lost.items() if not upto or key <= upto)], upto

    async def _send_all(self, agreed: Map, node: str, names: list[Name]) -> None:
        """Send these, some at a time: each waits for the other's disk, and one alone would leave the link idle."""
        todo = iter(names)

        async def send_some() -> None:
            for name in todo:
                await self._send_again(agreed, node, name)

        sending = [asyncio.ensure_future(send_some()) for _ in range(min(SENT_AT_ONCE, len(names)))]
        try:
            await asyncio.gather(*sending)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _send_again(self, agreed: Map, node: str, name: Name) -> None:
        async with self._writes.lock(*name):
            if self._agreed().held != agreed.held:
                raise Unavailable("the holders changed meanwhile")
            copy = self._of_store(name)
            if copy is None:
                self._check_whole(name)
                return
            try:
                async with asyncio.timeout(PATIENCE_S + copy.body.size_bytes / BYTES_S):
                    await self._send(agreed, node, name, copy)
            except TimeoutError as error:
                raise Unavailable(f"node {node} does not answer") from error

    def _check_whole(self, name: Name) -> None:
        """`Unavailable` if this node has it, and cannot send it."""
        self._store.check_present(*name)
        record = self._store.owned(*name)
        if self._store.lost_of(*name) is not None or (record is not None and not record.complete):
            raise Unavailable(
                f"{name[0]}/{name[1]} rotted here, and node {self.node_id} alone has it: see `forebay lost`"
            )


def _may_be_written(error: ForebayError) -> Unavailable:
    """What is raised instead, where another node may act on what failed here."""
    if "may have been written" in error.message:
        return Unavailable(error.message, retry_after_s=1.0)
    return Unavailable(f"{error.message}. It may have been written: look before you write again", retry_after_s=1.0)


def _unheard(second: str, error: Exception) -> ForebayError:
    if isinstance(error, Corrupt):
        return error
    said = error.message if isinstance(error, ForebayError) else "no answer in time"
    return Unavailable(
        f"node {second} does not keep the second copy ({said}). It may have been written: look before you write again",
        retry_after_s=1.0,
    )
