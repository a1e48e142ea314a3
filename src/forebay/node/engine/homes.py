"""Whose word counts for a key that only nodes may have, and how this node gets it.

Theory. In a bucket that is written back or local, what was acknowledged is on a node's disks before any backend has it.
So each key has one home, which judges and acknowledges its writes, and says what it is. Every node and client may be
asked: one that is not the home has the home in the backend's place (`Buckets.acting`), for this key alone. It writes
through to it and confirms with it at each read, by the same code as with any backend.

*Who acts.* A node that has something of the key that nobody else has (dirty, local, deleted and not flushed) acts on
it, whatever the map says. Else the home by the map's `holders`, once nobody whom `Map.earlier` names has anything.
It asks them (`claim`). One that has nothing counts what is cached of the key as unconfirmed and acts on it no more,
before it says so. One that has something hurries its flush and keeps the key until a later claim, and the home sends
everybody there. So a backend that is away, or a local bucket, holds nothing up. A claim goes by one map at both ends
(the epoch is in the request), so of two that take themselves for the home only the later one is given the key. Nothing
here depends on who lives or how late it is: a node that is not heard of keeps what it has, and its keys are refused.

*Slices* of coded objects (`slices.py`) have no homes: each node acts on its own.

*Letting go.* In the background a node looks through what it has for keys that are at home elsewhere. It flushes them,
takes their confirmations away, and when nothing is left it says so (`Seat.released`). Then nobody asks it any more.

*Kept twice.* Of a bucket with two copies (`replicas.py`) a node answers only while it holds its lease: another may act
in its place afterwards. A copy of one that was deposed is made this node's own before it acts on the key.

*No loops, no knots.* A request between nodes (`from_node`) is passed on by the key's home alone, to one that keeps the
key, who passes nothing on: each of them holds its own lock of the key meanwhile.

Rejected: moving keys with the map, all at once (a backend that is away would hold up the map, and so everybody);
handing local objects over (they are asked for where they are; moving bytes belongs to replication).

Invariants. (1) Of two nodes at most one acts on a key. (2) What a front finds confirmed on a node that is not the home
is as new as what anybody was answered: the home asked before it acted, and then nothing was confirmed any more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from forebay.core import limits
from forebay.core.cluster.coding import SLICES
from forebay.core.cluster.membership import LOOK_S
from forebay.core.cluster.records import Map
from forebay.core.errors import MAP_CHANGES, ForebayError, NoBackendBucket, Unavailable, map_changes
from forebay.core.machines import uploads
from forebay.core.machines.opening import MISSED
from forebay.core.messages.calls import Uploads, UploadsCall
from forebay.core.record import State
from forebay.core.types import Bucket
from forebay.node.engine.asking import Patience
from forebay.node.engine.buckets import Buckets, Served
from forebay.node.engine.flush.flusher import Flusher
from forebay.node.engine.peers import Peers
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.owed_keys import Found
from forebay.node.engine.seat import Seat
from forebay.node.outcomes import from_node
from forebay.node.store.reader import StoreReader
from forebay.node.store.writer.writer import Store
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.homes")

Name = tuple[str, str]
CLAIM_S = 3.0  # how long a claim waits for what is under way
LOOKED_S = 0.01  # between looks while it waits
AGAIN_S = 2.0  # between rounds of letting go, each of which looks at every record
CLAIMED_MAX = 65_536  # keys known to be nobody else's, or ours: of one that was forgotten it is asked again
FLUSHED_AT_ONCE = 64
TURNS = 3  # of finding out who acts, while the map changes


class Volumes(Protocol):
    """`node/engine/volumes.py`."""

    def missing(self, bucket: str) -> list[str]: ...


class Kept(Protocol):
    """What this node keeps for others (`node/engine/kept.py`)."""

    @property
    def waiting(self) -> bool: ...

    def acts_anew(self, name: Name) -> bool: ...

    async def take_over(self, name: Name) -> None: ...


class Replicas(Protocol):
    """Copies of what no backend has (`node/engine/replicas.py`)."""

    @property
    def kept(self) -> Kept: ...

    @property
    def is_deposed(self) -> bool: ...

    def acts(self) -> bool: ...

    def is_settled(self) -> bool: ...


class Homes:
    """See the module's header. `peers` is None where the nodes would not know each other; `flush` makes changes of the
    index visible; `heard` returns whether all fronts act on what they were told; `is_whole`: all that was owed before
    the start is in view."""

    def __init__(
        self,
        seat: Seat,
        peers: Peers | None,
        node_id: str,
        clock: Clock,
        *,
        store: Store,
        index: StoreReader,
        buckets: Buckets,
        cold: ColdReads,
        flusher: Flusher,
        volumes: Volumes,
        flush: Callable[[], None],
        heard: Callable[[], Awaitable[bool]],
        is_whole: Callable[[], bool],
    ) -> None:
        seat.stand_aside, self._heard = self._stand_aside, heard
        self._seat, self._peers, self.node_id, self._clock = seat, peers, node_id, clock
        self._store, self._index, self._buckets, self._cold = store, index, buckets, cold
        self._flusher, self._volumes, self._flush, self._is_whole = flusher, volumes, flush, is_whole
        self.replicas: Replicas | None = None
        self._acting: Counter[Name] = Counter()
        self._amid: set[Name] | None = None  # what it began to act on during a round of letting go
        self._claimed: dict[Name, None] = {}  # as their home, of whom may have them from before
        self._kept: dict[Name, None] = {}  # though others are their home, who were told so
        self._map: Map | None = None
        self._released_epoch = 0

    # --- who acts ----------------------------------------------------------------------------------------------------
    def is_here(self, bucket: Bucket, key: str) -> bool:
        """Whether this node acts on the key, as far as it knows without asking anybody."""
        if bucket.name == SLICES:
            return True
        if bucket.write == "through":
            return self._unfit(bucket) == ""
        if bucket.is_kept_twice and not self._may_act((bucket.name, key)):
            return False
        return not self._unfit(bucket) and (self._has(bucket.name, key) or self._is_home((bucket.name, key)))

    def _may_act(self, name: Name) -> bool:
        """Whether nobody acts in this node's place, and it has not got to take the key over first."""
        replicas = self.replicas
        return replicas is not None and replicas.acts() and not replicas.kept.acts_anew(name)

    async def _take_over(self, name: Name) -> None:
        """In a bucket that is kept twice: make what is kept of the key this node's own, if it is. `Unavailable` if the
        node may not say anything about it."""
        assert self.replicas is not None
        if self.replicas.is_deposed and self._owes_key(*name):
            raise map_changes("this node was taken over, and is about to forget what it had: ask another", LOOK_S)
        if self.replicas.kept.acts_anew(name):
            await self.replicas.kept.take_over(name)

    def _check_acts(self, bucket: Bucket) -> None:
        if bucket.is_kept_twice and self.replicas is not None and not self.replicas.acts():
            said = (
                f"this node may not answer for it ({self._seat.trouble or 'it hands over, or is not heard of'}), since "
                "others may act in its place: try again, or ask another"
            )
            raise map_changes(said, LOOK_S) if self._seat.is_here else Unavailable(said, retry_after_s=LOOK_S)

    def patience(self) -> Patience:
        """For one operation, which is asked again while who acts on its key changes."""
        return Patience(self._seat, self._clock)

    async def at(self, served: Served, key: str) -> Served:
        """The bucket as this node acts on the key: itself, or with whoever acts in the backend's place. `Unavailable`
        if nobody may act now."""
        bucket = served.bucket
        if bucket.name == SLICES:
            return served
        unfit = self._unfit(bucket)
        if unfit:
            raise Unavailable(unfit, retry_after_s=LOOK_S)
        if bucket.write == "through":
            return served
        name = (bucket.name, key)
        for _ in range(TURNS):
            if bucket.is_kept_twice:
                await self._take_over(name)
            if self._has(*name) or self._is_home(name):
                self._check_acts(bucket)
                return served
            agreed = self._agreed()
            home = agreed.holder(*name)
            if home is None:
                raise Unavailable("no node of the cluster holds keys: `forebay status` lists them", retry_after_s=1.0)
            if home == self.node_id:
                keeper = await self._claim_from(agreed, name)
                if self._agreed() is not agreed:
                    continue
                if not keeper:
                    self._check_acts(bucket)
                    _note(self._claimed, name)
                    continue
                home = keeper
            elif from_node.get():
                raise map_changes("this node does not act on the key: the cluster's map changes", LOOK_S)
            return self.through(served, home)
        raise map_changes("the cluster's map changes: try again in a moment", LOOK_S)

    @contextmanager
    def acts(self, bucket: str, key: str) -> Iterator[None]:
        """Spans what this node does as the one who acts on the key, from the moment that `at` or `is_here` said so."""
        name = (bucket, key)
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: Name) -> None:
        """As `acts`; `end` follows."""
        self._acting[name] += 1
        if self._amid is not None:
            self._amid.add(name)

    def end(self, name: Name) -> None:
        self._acting[name] -= 1
        if not self._acting[name]:
            del self._acting[name]

    async def _stand_aside(self) -> None:
        """Return when nothing of what is kept twice is written or flushed here any more, or after CLAIM_S: what goes on
        then is not acknowledged, and finds other holders. Nothing begins meanwhile (`Replicas.acts`)."""
        if not await self._heard():
            await asyncio.sleep(self._seat.fenced_within_s)
        until_s = self._clock.monotonic_s() + CLAIM_S
        while self._clock.monotonic_s() < until_s:
            twice = [bucket.name for bucket in self._buckets.all() if bucket.is_kept_twice]
            if not any(name in twice for name, _ in self._acting) and not any(map(self._flusher.sends, twice)):
                return
            await asyncio.sleep(LOOKED_S)

    def through(self, served: Served, node: str) -> Served:
        """The bucket with that node in the backend's place."""
        home = self._seat.place_of(node)
        if home is None:
            raise Unavailable(
                f"node {node} has this, and is not heard of: start it again; if it never will be, give it up with "
                f"`forebay drain {node} --give-up`",
                retry_after_s=1.0,
            )
        if self._peers is None:
            raise Unavailable("nodes with identities pass requests on with --peer-key: give it to every node")
        return self._peers.in_place(served, home)

    def upload_at(self, served: Served, upload_id: str) -> Served | None:
        """The bucket with the node in its backend's place that has this upload; None if that is this one, or nobody has
        it. `Unavailable` if this node does not know the others yet, or one that came just now."""
        node = upload_id[-len(self.node_id) :]
        if node == self.node_id:
            return None
        if not self._seat.knows(node):
            self._agreed()
            if uploads.is_new(upload_id, self._clock.wall_s()):
                raise Unavailable("the upload may be at a node that came just now: try again", retry_after_s=1.0)
            return None
        return self.through(served, node)

    async def uploads(self, bucket: Bucket, call: UploadsCall) -> list[Uploads]:
        """What each other node lists. `Unavailable` for one that does not say; where the bucket is written through it
        is left out, since a listing must not fail for want of a peer."""
        agreed = self._follow() if bucket.write == "through" else self._agreed()
        if agreed is None or from_node.get():
            return []
        asked = {*agreed.owners, *self._holders(agreed)} - {self.node_id}
        return await asyncio.gather(*(self._uploads(node, bucket, call) for node in sorted(asked)))

    async def _uploads(self, node: str, bucket: Bucket, call: UploadsCall) -> Uploads:
        place = self._seat.place_of(node)
        try:
            if place is None or self._peers is None:
                raise Unavailable("it is not heard of" if place is None else "nodes with identities need --peer-key")
            return await self._peers.uploads(place, call)
        except ForebayError as error:
            if bucket.write == "through":
                return Uploads([], False)
            raise Unavailable(
                f"node {node} may have uploads of {call.bucket}, and does not say ({error.message}): start it again",
                retry_after_s=1.0,
            ) from error

    def completed_elsewhere(self, bucket: Bucket, key: str) -> None:
        """Another node has just written the key through: what is here of it counts as unconfirmed."""
        if bucket.write == "through":
            self._let_go((bucket.name, key))
            self._flush()

    def _holders(self, agreed: Map) -> set[str]:
        """Who may have what only nodes have."""
        found = {*agreed.holders, *(node for past in agreed.past for node in (*past.holders, *past.newcomers))}
        return {node for node in found if not self._seat.is_gone(node) and node not in agreed.deposed}

    def others(self, bucket: Bucket, prefix: str) -> list[Callable[[str], Awaitable[Found]]]:
        """Ask each other node that may have what no backend has under a prefix. `Unavailable` for one that does not
        say."""
        if bucket.write == "through" or bucket.name == SLICES:
            return []
        self.check_whole(bucket)
        if from_node.get():
            return []
        asked = self._holders(self._agreed()) - {self.node_id}
        return [functools.partial(self._owed, node, bucket.name, prefix) for node in sorted(asked)]

    def check_whole(self, bucket: Bucket) -> None:
        """`Unavailable` if what is here of the bucket is not what no backend has: it was taken over, or is about to be
        this node's."""
        if bucket.is_kept_twice and self.replicas is not None and not self._went(bucket):
            self._check_acts(bucket)
            if self.replicas.kept.waiting:
                raise map_changes("what another node had is taken over: try again in a moment", LOOK_S)

    def _went(self, bucket: Bucket) -> bool:
        """Whether this node was drained, and has nothing left that others do not list."""
        seat, node = self._seat, self.node_id
        has_any = self._flusher.totals(bucket.name).objects or any(each.owned_bytes for each in self._store.usage())
        return seat.knows(node) and seat.is_gone(node) and not has_any and not self._volumes.missing(bucket.name)

    async def _owed(self, node: str, bucket: str, prefix: str, after: str) -> Found:
        place = self._seat.place_of(node)
        try:
            if place is None or self._peers is None:
                raise Unavailable("it is not heard of" if place is None else "nodes with identities need --peer-key")
            return await self._peers.owed(place, bucket, prefix, after)
        except ForebayError as error:
            what = f"node {node} may have what no backend has of {bucket}"
            raise self._does_not_say(what, node, error, lives=place is not None) from error

    def _has(self, bucket: str, key: str) -> bool:
        """Whether this node has something of the key that nobody else has, or had it and was not asked since."""
        return (bucket, key) in self._kept or self._owes_key(bucket, key)

    def _owes_key(self, bucket: str, key: str) -> bool:
        if self._flusher.find(bucket, key) is not None or self._store.lost_of(bucket, key) is not None:
            return True
        record = self._store.lookup(bucket, key)
        return record is not None and bool(record.state & State.OWNED)

    def _is_home(self, name: Name) -> bool:
        agreed = self._follow()
        if agreed is None or agreed.holder(*name) != self.node_id:
            return False
        return name in self._claimed or not self._asked(agreed, name)

    def _asked(self, agreed: Map, name: Name) -> list[str]:
        return sorted(node for node in agreed.earlier(*name) if not self._seat.is_gone(node))

    def _agreed(self) -> Map:
        agreed = self._follow()
        if agreed is None:
            raise Unavailable(
                f"this node does not know the cluster's map ({self._seat.trouble or 'not yet'}), so not who has what "
                "no backend has: ask another node, or try again",
                retry_after_s=LOOK_S,
            )
        return agreed

    def _follow(self) -> Map | None:
        """The agreed, if this node is of the cluster. What was claimed by another is forgotten."""
        agreed, before = self._seat.agreed, self._map
        if agreed is not before:
            self._map = agreed
            if agreed is None or before is None or (agreed.holders, agreed.past) != (before.holders, before.past):
                self._claimed.clear()
                self._kept.clear()
        return agreed

    def _unfit(self, bucket: Bucket) -> str:
        """Why the bucket is not served: other nodes know it otherwise."""
        return self._seat.unfit(bucket)

    # --- claims ------------------------------------------------------------------------------------------------------
    async def _claim_from(self, agreed: Map, name: Name) -> str:
        """Ask all who may have something of the key from before; who keeps it, "" if nobody does."""
        if self._peers is None:
            raise Unavailable("nodes with identities ask each other with --peer-key: give it to every node")
        for node in self._asked(agreed, name):
            place = self._seat.place_of(node)
            try:
                if place is None:
                    raise Unavailable("it is not heard of")
                if not await self._peers.claim(place, *name):
                    return node
            except ForebayError as error:
                what = f"node {node} may have what no backend has of {name[0]}/{name[1]}"
                raise self._does_not_say(what, node, error, lives=place is not None) from error
        return ""

    def _does_not_say(self, what: str, node: str, error: ForebayError, *, lives: bool) -> ForebayError:
        """A question may be asked again whatever became of it. Who lives is not to be given up, and who does not know
        the bucket came just now, or knows already that it was deleted."""
        if error.code == MAP_CHANGES or isinstance(error, NoBackendBucket) or self._seat.is_gone(node):
            return map_changes(f"{what}, and does not say now ({error.message}): try again", LOOK_S)
        if lives:
            return Unavailable(f"{what}, and does not say now ({error.message}): try again", retry_after_s=1.0)
        return Unavailable(
            f"{what}, and does not say ({error.message}): start it again; if it never will be, give it up with "
            f"`forebay drain {node} --give-up`",
            retry_after_s=1.0,
        )

    async def claim(self, bucket: str, key: str) -> bool:
        """The key's home asks: True if this node has nothing of the key that nobody else has, and acts on it no more;
        False if it keeps the key. `Busy` if it cannot say yet."""
        name, until_s = (bucket, key), self._clock.monotonic_s() + CLAIM_S
        self._store.check_present(bucket, key)  # a volume that is out may have it
        while self._agreed().holder(*name) != self.node_id:
            if self.replicas is not None and self.replicas.kept.acts_anew(name):
                await self.replicas.kept.take_over(name)
            if self._owes_key(bucket, key):
                if self._flusher.find(bucket, key) is not None:
                    self._flusher.ask(bucket, key)
                _note(self._kept, name)
                return False
            if name not in self._acting:
                self._let_go(name)
                self._flush()
                return True
            if self._clock.monotonic_s() >= until_s:
                raise map_changes(f"{bucket}/{key} is being written: try again in a moment", LOOK_S)
            await asyncio.sleep(LOOKED_S)
        raise map_changes("this node is the key's home by now: the cluster's map changes", LOOK_S)

    def _let_go(self, name: Name) -> None:
        """What is here of the key counts as unconfirmed, and so will what is on its way."""
        self._claimed.pop(name, None)
        self._kept.pop(name, None)
        self._cold.written(*name)
        self._cold.confirmations.windows.forsake(name)
        self._store.unconfirm(*name, MISSED)

    # --- letting go of what is at home elsewhere ---------------------------------------------------------------------
    async def tend(self) -> None:
        """Do so, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            agreed = self._follow()
            if agreed is None or agreed.epoch == self._released_epoch or not self._is_whole():
                continue
            past = any(self.node_id in past.holders or self.node_id in past.newcomers for past in agreed.past)
            if not past and self.node_id in agreed.holders:
                continue
            try:
                if await self._let_all_go(agreed):
                    self._released_epoch = agreed.epoch
                    self._seat.released(agreed.epoch)
                else:
                    await asyncio.sleep(AGAIN_S)
            except ForebayError as error:
                log.warning("what is at home elsewhere is not let go yet: %s", error)
            except Exception:
                log.exception("letting go broke; it goes on")

    async def _let_all_go(self, agreed: Map) -> bool:
        """One round; whether nothing is left that is at home elsewhere by this map, and nothing came meanwhile."""
        self._kept.clear()
        if self.replicas is not None and not self.replicas.is_settled():
            return False
        self._amid = set(self._acting)
        try:
            return not self._is_elsewhere(agreed) and await self._let_go_of_records(agreed)
        finally:
            self._amid = None

    def _is_elsewhere(self, agreed: Map) -> bool:
        """Whether something is at home elsewhere on which the node has acted since the round began."""
        return any(agreed.holder(*name) != self.node_id for name in self._amid or () if name[0] != SLICES)

    async def _let_go_of_records(self, agreed: Map) -> bool:
        """Whether that was all. A write that begins meanwhile may be of a record that was looked at before."""
        asked = self._cold.openings.under_way.keys() | self._cold.confirmations.windows.asked()
        buckets = [each.name for each in self._buckets.all() if each.write != "through" and each.name != SLICES]
        for name in self._cold.flights.keys() | asked:
            if name[0] in buckets and agreed.holder(*name) != self.node_id:
                self._let_go(name)
        left = False
        for bucket in buckets:
            left |= bool(self._volumes.missing(bucket)) or bool(self._store.lost_in(bucket, limit=1))
            left |= await self._owes(agreed, bucket) or await self._unconfirm(agreed, bucket)
        self._flush()
        return not left and self._seat.agreed is agreed and not self._is_elsewhere(agreed)

    async def _owes(self, agreed: Map, bucket: str) -> bool:
        """Whether something of the bucket is owed for others; some of it is hurried."""
        after, moved = "", 0
        while moved < FLUSHED_AT_ONCE and (found := self._flusher.window(bucket, "", after, limits.LIST_KEYS_MAX)):
            after = found[-1][0]
            for key, _ in found:
                if agreed.holder(bucket, key) != self.node_id:
                    self._flusher.ask(bucket, key)
                    moved += 1
            await asyncio.sleep(0)
        return moved > 0

    async def _unconfirm(self, agreed: Map, bucket: str) -> bool:
        """Nothing of what others are the home of counts as confirmed. Whether some of it is here alone."""
        self._flush()
        after, owned = "", False
        while found := self._index.scan(bucket, "", after, limits.LIST_KEYS_MAX):
            after = found[-1][0]
            for key, record in found:
                if agreed.holder(bucket, key) == self.node_id:
                    continue
                owned |= bool(record.state & State.OWNED)
                if record.checked_s > MISSED:
                    self._store.unconfirm(bucket, key, MISSED)
            await asyncio.sleep(0)
        return owned


def _note(names: dict[Name, None], name: Name) -> None:
    names[name] = None
    if len(names) > CLAIMED_MAX:
        del names[next(iter(names))]
