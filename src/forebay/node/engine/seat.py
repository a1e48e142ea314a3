"""A node's seat among others: it is registered, its lease is held, the map is followed, and who asks is told.

Theory. What is decided is decided by `core/cluster/membership.py`. Here is what carries it out: a watch that tells the
machine what is agreed, a lease, transactions, and a look every LOOK_S. No request waits for any of it. Whoever is about
to acknowledge something that only this node will have asks `member` before, and `lost` after: they answer from memory
and a clock.

*Which cluster.* Whoever comes first draws the cluster's id. A node remembers name and id in its directory. So a node
that is pointed at another cluster by a slip is told, and stays out; one whose etcd was emptied brings the id back.

*A quick return.* The lease of a process that was killed would keep the node's place until it ends. So the node
remembers its lease too, and ends it when it comes back. Only in the same directory of the same machine since the same
boot: there the directory's lock says that the process is gone. In a copy of the directory the process may live, and its
lease is left alone.

Rejected: asking etcd before the node serves (a node whose etcd is away would not start); a process of its own for the
lease (it would live on while the engine hangs, and vouch for it).

Invariants. (1) Nothing is written before it is known that the store is of the right cluster. (2) `member` is 0 unless
others wait for this process's lease to end before they act in its place. (3) A lease is revoked only by its own node,
when no process of it acts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

import msgspec

from forebay.core.cluster.coding import SLICES
from forebay.core.cluster.lease import FENCED_SHARE
from forebay.core.cluster.membership import (
    LOOK_S,
    Answered,
    Covered,
    Due,
    Event,
    Lost,
    Membership,
    Owes,
    Released,
    Settle,
    Settled,
    StandAside,
    StoodAside,
    Told,
    Write,
)
from forebay.core.cluster.next_map import hands_over
from forebay.core.cluster.records import (
    ID,
    MAP,
    NODES,
    PREFIX,
    PROTOCOL,
    TWICE,
    UNREADABLE,
    Map,
    NodeRecord,
    Presence,
    wanted_record,
)
from forebay.core.errors import (
    Busy,
    Exists,
    ForebayError,
    Invalid,
    NotFound,
    Precondition,
    Unavailable,
    map_changes,
)
from forebay.core.messages.node_state import ClusterNode, ClusterState, MapNode, NodeMap, Wish
from forebay.core.metrics import series
from forebay.core.types import Bucket
from forebay.meta.seam import Entry, MetaStore
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.cluster")

AGAIN_S = 1.0  # between attempts to find out which cluster it is
TOLD_LOOKS = 200
TOLD_S = 2.0  # how long the change of a bucket waits until the cluster is told
ASKS_MAX = 5  # of a wish for a node whose entry changes meanwhile
EARLIER_MAX, EARLIER_S = 4, 3600.0  # maps whose homes are asked for bytes that are not here, and for how long
MEMORY = "node/cluster"


class Home(NamedTuple):
    """Where a key is at home, by the active map of `epoch`."""

    node: str
    address: str
    epoch: int


class Remembered(msgspec.Struct, frozen=True):
    """What the directory knows of the cluster. `place` is where and since when the process with `lease` ran."""

    name: str
    id: str = ""
    lease: int = 0
    place: str = ""


async def recall(memory: MetaStore, name: str, *, loosen: bool) -> Remembered:
    """What the directory knows of cluster `name`; "" is none. `Invalid` if it belongs to another, unless `loosen` says
    that it may leave that."""
    entry = await memory.get(MEMORY)
    known = Remembered("") if entry is None else msgspec.json.decode(entry.value, type=Remembered)
    if known.name == name:
        return known
    if known.name and not loosen:
        now = f"start it with --cluster …/{known.name}" if not name else f"it is not of {name}: correct the name"
        raise Invalid(
            f"this directory's node is of the cluster {known.name}: {now}, or give another --dir. If it shall leave "
            "that cluster, drain it there first, then add --loosen"
        )
    if known.name:
        await memory.delete(MEMORY)
    return Remembered(name)


def weight_of(capacity_bytes: int) -> float:
    """What a node of this size weighs: in steps of 3 to 6 %, so that a start with a few bytes more moves no key."""
    step = 1 << max(0, capacity_bytes.bit_length() - 5)
    return float(max(1, round(capacity_bytes / step) * step))


class Seat:
    """See the module's header. `memory` is the node's own store, `place` names its directory on this machine since its
    boot, `owes` says how many bytes only this node has, `changed` hears when `away` does, `acts` of `acts_until_s`.
    Set `stand_aside`: it returns when nothing is under way any more that began before `acts_until_s` was 0."""

    def __init__(
        self,
        meta: MetaStore,
        memory: MetaStore,
        known: Remembered,
        node_id: str,
        record: NodeRecord,
        *,
        lease_s: float,
        place: str,
        clock: Clock,
        chance: Chance,
        owes: Callable[[], int],
        changed: Callable[[], None],
        acts: Callable[[float], None],
        drain: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._meta, self._memory, self._known = meta, memory, known
        self._clock, self._chance, self._place = clock, chance, place
        self._owes, self._changed, self._acts, self._drain = owes, changed, acts, drain
        self._told_acts_s = 0.0
        self._held = meta.hold(lease_s, clock)
        self._machine = Membership(node_id, chance.token_hex(8), record, self._held.hold)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wrong = ""  # which cluster it is instead
        self._draining = self._closed = False
        self.found = asyncio.Event()  # the store has answered, and was that of the right cluster
        self._trouble = ""
        self._said = ""  # the last `away` or trouble that was logged
        self._known_as = ""
        self._earlier: deque[tuple[float, Map]] = deque(maxlen=EARLIER_MAX)  # maps with other owners; until when
        self._was_in = bool(known.lease)  # a process of this directory was of the cluster before
        self._turned = asyncio.Event()  # of the map that is known: another is
        self._heard = asyncio.Event()  # what the cluster wants of this node is known
        self._outlived_s = 0.0  # Unix time; others may have gone on without what was acknowledged here before
        self.away = ""  # why clients should go to another node; "" if they need not
        self.left: Callable[[str], None] = lambda node: None  # hears of each node whose process lives no more
        self.stand_aside: Callable[[], Awaitable[None]]

    def start(self) -> None:
        """Begin; it goes on in the background, whatever the store does."""
        self._spawn(self._live())

    async def aclose(self) -> None:
        """Give the seat up: the lease ends now. Call it when nothing is acknowledged any more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._meta.aclose()

    # --- what others ask ---------------------------------------------------------------------------------------------
    def member(self) -> int:
        """The lease under which the node may begin what it acknowledges though only it has it. `Unavailable` if it may
        not."""
        lease = 0 if self._closed or self._wrong else self._machine.member(self._clock.monotonic_s())
        if not lease:
            why = self.away or self.trouble or "it is not registered yet"
            said = f"this node may not acknowledge writes that its backend does not have ({why}): write at another node"
            own = self._machine.nodes.get(self._machine.node)
            leaves = self.is_here and own is not None and own.wanted in ("active", "draining")
            raise map_changes(said, LOOK_S) if leaves else Unavailable(said, retry_after_s=LOOK_S)
        return lease

    def lost(self, lease: int) -> str:
        """Why the node may not acknowledge what it began under this lease; "" if it may."""
        now_s = self._clock.monotonic_s()
        if not self._closed and not self._wrong and self._machine.remains(now_s) == lease:
            return ""
        return self.away or self.trouble or "this node lost its place in the cluster for a while"

    async def next_map(self, timeout_s: float) -> None:
        """Return when another map is known, or after so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._turned.wait()

    @property
    def is_here(self) -> bool:
        """Whether this process lives by the cluster's word: what it may not do then, others do or will in a moment."""
        return not self._closed and not self._wrong and self._machine.is_present(self._clock.monotonic_s())

    @property
    def acts_until_s(self) -> float:
        """Until when, by the clock of leases, this node may answer for what others would take over; 0 if it may not."""
        return 0.0 if self._closed or self._wrong else self._machine.acts_until_s(self._clock.monotonic_s())

    @property
    def fenced_within_s(self) -> float:
        """`acts_until_s` is never further ahead."""
        return self._held.hold.ttl_s * FENCED_SHARE

    def home(self, bucket: str, key: str, stripe: int = 0) -> Home | None:
        """The node that everybody takes for the home of the key, or of a later stripe of it; None while nobody can
        tell, or it does not live."""
        machine, known = self._machine, self.agreed
        if known is None or not known.active:
            return None
        node = known.home(bucket, key, stripe)
        if node is None or node not in machine.alive or node not in machine.nodes:
            return None
        return Home(node, machine.nodes[node].address, known.epoch)

    def former_homes(self, bucket: str, key: str, stripe: int) -> list[Home]:
        """Where a stripe was at home by earlier maps, the latest first: who may have what the backend has too. Not this
        node, nor one that is missing."""
        machine, agreed, now_s, found = self._machine, self.agreed, self._clock.monotonic_s(), dict[str, Home]()
        for until_s, known in self._earlier:
            node = known.home(bucket, key, stripe)
            record = machine.nodes.get(node or "")
            if node is None or record is None or node == machine.node or until_s <= now_s:
                continue
            if agreed is not None and (node in machine.alive or record.wanted == "gone"):  # what is gone may still run
                found[node] = Home(node, record.address, agreed.epoch)
        return list(found.values())

    @property
    def is_found(self) -> bool:
        """Whether the store has answered, and is that of the right cluster now."""
        return self.found.is_set() and not self._wrong and not self._closed

    @property
    def agreed(self) -> Map | None:
        """The map; None if this process is not one that may go by it."""
        return None if self._wrong or self._closed or self._machine.doubled or self._strange else self._machine.map

    def place_of(self, node: str) -> Home | None:
        """Where a node is reached by the agreed map; None if it does not live."""
        machine, agreed = self._machine, self.agreed
        if agreed is None or node not in machine.alive or node not in machine.nodes:
            return None
        return Home(node, machine.nodes[node].address, agreed.epoch)

    async def is_second(self, since_s: float) -> bool:
        """Whether others may have acted in this node's place since that Unix time: it was given up with what it has.
        Waits until the cluster's word about this node was heard once."""
        await self._heard.wait()
        own = self._machine.nodes.get(self._machine.node)
        return since_s < self._outlived_s or (own is not None and own.wanted == "gone")

    def _hear(self, before: NodeRecord | None) -> None:
        """Told for the first time, or again: note when this node was given up, or forgotten, with what it has."""
        own = self._machine.nodes.get(self._machine.node)
        came_back = before is not None and before.wanted == "gone" and own is not None and own.wanted != "gone"
        came_back |= own is not None and own.was_gone  # it was wanted back before it started
        if came_back or (not self._heard.is_set() and self._was_in and own is None):
            self._outlived_s = self._clock.wall_s()
        self._heard.set()

    def knows(self, node: str) -> bool:
        """Whether a node of this id is, or was, of the cluster."""
        return node in self._machine.nodes

    def is_gone(self, node: str) -> bool:
        """Whether a node has nothing that is only there: it was drained, or given up, and did not come back. Not before
        the map says who has its keys: until then nobody takes over what others keep of it."""
        record, agreed = self._machine.nodes.get(node), self.agreed
        return (record is None or self._is_away(node, record)) and (agreed is None or node not in agreed.holders)

    def _is_away(self, node: str, record: NodeRecord) -> bool:
        """Whether it is gone, or was and is not back."""
        return record.wanted == "gone" or (record.was_gone and node not in self._machine.alive)

    def kept_twice_by(self, node: str, bucket: str) -> bool:
        """Whether a node had others keep copies of a bucket, as far as it said last: it used it in no other way."""
        record = self._machine.nodes.get(node)
        return record is None or record.buckets.get(bucket, TWICE).endswith(TWICE)

    def released(self, epoch: int) -> None:
        """By the map of this epoch the node has nothing that is at home elsewhere."""
        self._step(Released(epoch))

    def covered(self, due: int) -> None:
        """By this epoch (`Map.due`) all that the node has alone lies on another too."""
        self._step(Covered(due))

    @property
    def all_made_again(self) -> bool:
        """Whether all copies are here again that this process found gone."""
        agreed, machine = self.agreed, self._machine
        return agreed is not None and agreed.was_made_again(machine.node, machine.incarnation, machine.losses)

    def lost_copies(self) -> None:
        """Copies that the node kept for others are gone: until they have looked, nobody is taken over."""
        self._step(Lost())

    @property
    def alive(self) -> dict[str, Presence]:
        """The processes that live, by node."""
        return self._machine.alive

    @property
    def records(self) -> dict[str, NodeRecord]:
        """What is known of all nodes."""
        return self._machine.nodes

    def keeps(self, buckets: list[Bucket]) -> None:
        """These are the node's buckets from now on."""
        told = [bucket for bucket in buckets if bucket.write != "through" and bucket.name != SLICES]
        self._machine.keeps({bucket.name: kept_how(bucket) for bucket in told})
        self._step(Due())

    async def told_of(self, bucket: Bucket) -> None:
        """Return when the cluster is told how the node keeps the bucket, or after TOLD_S."""
        for _ in range(TOLD_LOOKS):
            if not self.unfit(bucket):
                return
            await asyncio.sleep(TOLD_S / TOLD_LOOKS)

    def unfit(self, bucket: Bucket) -> str:
        """Why the bucket must not be used: the nodes keep it differently, or do not know yet how; "" if it may."""
        machine, how = self._machine, kept_how(bucket)
        for node, record in machine.nodes.items():
            theirs = record.buckets.get(bucket.name, how)
            if theirs != how and node != machine.node and not self._is_away(node, record):
                return (
                    f"bucket {bucket.name} is {how} here, and {theirs} at node {node}: make them the same with "
                    "`forebay bucket set`, or `forebay bucket rm` and `add`"
                )
        own = machine.nodes.get(machine.node)
        if bucket.write != "through" and (own is None or own.buckets.get(bucket.name) != how):
            return f"the cluster is not told yet that bucket {bucket.name} is {how} ({self.trouble or 'a moment'})"
        return ""

    @property
    def as_home(self) -> str:
        """How other nodes name this one when they take it for a home, by the map that it knows."""
        return f"{self._machine.node} {0 if self._machine.map is None else self._machine.map.epoch}"

    @property
    def _strange(self) -> str:
        """Why the node stays out for the sake of another release; "" if it does not."""
        machine = self._machine
        strangers = machine.strangers
        if not strangers:
            return ""
        record = machine.nodes[strangers[0]]
        newer = record.protocol > PROTOCOL
        release = record.release or "an earlier one"
        return (
            f"node {strangers[0]} speaks protocol {record.protocol} (its release is {release}), and this one "
            f"{PROTOCOL}: {'install a release next to that one here' if newer else 'upgrade that node first'}, or give "
            "it up if it never comes back. Nodes of a cluster may be one release apart"
        )

    @property
    def trouble(self) -> str:
        """What keeps the node from its place; "" if nothing does."""
        if self._wrong:
            return self._wrong
        if self._machine.doubled:
            node = self._machine.node
            other = self._machine.nodes[node].address if node in self._machine.nodes else "an unknown address"
            return (
                f"a process lives under this node's id, {node}, at {other}: if it was this node before a crash, its "
                "lease ends in seconds; else one of the two directories is a copy: stop that node, and give it an "
                "empty --dir"
            )
        if strange := self._strange:
            return strange
        unreadable = ", ".join(sorted(self._machine.unreadable))
        if unreadable:
            return (
                f"the entries {unreadable} of the cluster {self._known.name} cannot be read: delete them with etcdctl"
            )
        return self._held.trouble or self._trouble

    def state(self) -> ClusterState:
        """The cluster, as this node knows it."""
        machine, now_s = self._machine, self._clock.monotonic_s()
        holds = not self._wrong and self._held.hold.holds(now_s)
        nodes = [self._node(node) for node in sorted(machine.nodes)]
        epoch, active = (0, False) if machine.map is None else (machine.map.epoch, machine.map.active)
        return ClusterState(self._known.name, machine.node, epoch, active, holds, self.trouble, nodes)

    def metrics(self) -> dict[str, float]:
        """Gauges of the cluster, as this node knows it."""
        state = self.state()
        values = {"forebay_cluster_holds": float(state.holds), "forebay_cluster_epoch": float(state.epoch)}
        for word, count in Counter(node.state for node in state.nodes).items():
            values[series("forebay_cluster_nodes", state=word)] = count
        values["forebay_cluster_kept_once"] = sum(node.kept_once for node in state.nodes)
        return values

    def map(self) -> NodeMap:
        """The nodes that own keys, or will when the map is active."""
        machine = self._machine
        owners = machine.map.owners if machine.map is not None else {}
        nodes = [MapNode(node, self._address(node), weight) for node, weight in owners.items()]
        return NodeMap(machine.map.epoch if machine.map is not None else 0, nodes)

    def _address(self, node: str) -> str:
        record = self._machine.nodes.get(node)
        return "" if record is None else record.address

    async def want(self, name: str, word: Wish) -> ClusterNode:
        """Have a node be `word` from now on: named by its id, the beginning of its id, or its address. `Invalid`,
        `NotFound`, `Exists` for a wish that does not fit what it is."""
        if self._wrong or not self._machine.nodes:
            raise Unavailable(f"this node does not know the cluster ({self.trouble or 'not yet'}): ask another node")
        for _ in range(ASKS_MAX):
            node = self._named(name)
            entry = await self._meta.get(NODES + node)
            if entry is None:
                raise _no_node(name)
            try:
                return await self._wish(node, entry, word)
            except msgspec.MsgspecError:
                raise Invalid(f"the entry of node {node} cannot be read: delete {NODES}{node} with etcdctl") from None
            except Precondition:
                continue
        raise Unavailable(f"the entry of node {name} changes all the time: try again")

    def _named(self, name: str) -> str:
        nodes = self._machine.nodes
        found = [node for node, at in nodes.items() if name in (node, at.address, at.address.partition("://")[2])]
        found = found or [node for node in nodes if name and node.startswith(name)]
        if len(found) > 1:
            raise Invalid(f"{name} may be any of {', '.join(found)}: write more of the id")
        if not found:
            raise _no_node(name)
        return found[0]

    async def _wish(self, node: str, entry: Entry, word: Wish) -> ClusterNode:
        record = msgspec.json.decode(entry.value, type=NodeRecord)
        if word in ("gone", "forgotten") and node in self._machine.alive:
            raise Exists(f"node {node} lives: drain it, so that nothing is lost")
        as_it_is = self._node(node)
        if word == "forgotten" and record.wanted != "gone":
            raise Exists(f"node {node} may come back with what only it has: drain it, or give it up, first")
        if word != record.wanted:
            when = {entry.key: entry.revision}
            if record.wanted == "gone":
                when |= await self._check_heirs(node, word)
            value = None if word == "forgotten" else wanted_record(entry.value, word)
            await self._meta.transact({entry.key: value}, when=when)
        log.info("node %s is wanted %s", node, word)
        return msgspec.structs.replace(as_it_is, wanted=word)

    async def _check_heirs(self, node: str, word: Wish) -> dict[str, int]:
        """Refuse what does not go with a node that was given up; on which map that rests."""
        entry = await self._meta.get(MAP)
        if entry is None:
            return {}
        known = msgspec.json.decode(entry.value, type=Map)
        if word == "forgotten":
            if node in known.holders or (known.is_taking_over and node in known.replaced):
                raise Busy(f"others still take over what node {node} had: try again in a while", retry_after_s=LOOK_S)
        elif node in known.given_up:
            raise Exists(
                f"others have taken over what node {node} had, and it would be a second history: start it with an "
                f"empty directory, under a new id, and forget this one (`forebay drain {node} --forget`)"
            )
        return {MAP: entry.revision}

    def _node(self, node: str) -> ClusterNode:
        machine = self._machine
        record, present = machine.nodes[node], machine.alive.get(node)
        owners = machine.map.owners if machine.map is not None else {}
        share = owners.get(node, 0.0) / (sum(owners.values()) or 1.0)
        epoch = 0 if present is None else present.epoch
        doing, state = self._doing(node), machine.state(node)
        once = present is not None and not self._keeps_twice(node, present)
        return ClusterNode(node, record.address, state, record.wanted, share, epoch, doing, record.release, once)

    def _doing(self, node: str) -> str:
        machine = self._machine
        state, known, present = machine.state(node), machine.map, machine.alive.get(node)
        if node == machine.node and self.trouble:
            return "in trouble, see below"
        if present == UNREADABLE:
            return "its entry cannot be read"
        if state == "missing":
            if known is not None and node in known.owners:
                return "was not heard of for a lease; its keys move"
            return "is not heard of; others have its keys"
        if known is not None and not known.active and present is not None and present.epoch < known.epoch:
            return f"takes up map {known.epoch}"
        if known is not None and not known.active and present is not None:
            return f"waits until all have taken up map {known.epoch}"
        if state == "maintenance" and known is not None and node in known.owners:
            return "gives its keys away"
        if known is not None and node in known.deposed:
            how = "has handed over what only it had" if state == "leaving" else "was taken over"
            return f"{how}; forgets it when the others have it twice"
        if known is not None and node in known.holders and hands_over(machine.nodes, known, node):
            if present is not None and present.aside % 2:
                return "hands over what only it has"
            return "serves what only it has, and hands it over when all of that is on two nodes"
        if present is not None and not self._keeps_twice(node, present):
            if known is not None and len(known.holders) == 1:
                return "serves its keys; what no backend has is here alone until another node holds keys"
            return "serves its keys; what no backend has is not all on two nodes yet"
        return {
            "joining": "waits to be taken in",
            "active": "serves its keys",
            "draining": "gives its keys away",
            "leaving": "brings to the backends what only it has",
            "maintenance": "owns no keys until it is taken back",
            "gone": "owes nothing: it may be stopped",
        }[state]

    def _keeps_twice(self, node: str, present: Presence) -> bool:
        """Whether all is on two nodes that should be."""
        known, buckets = self._machine.map, self._machine.nodes[node].buckets.values()
        if known is None or node not in known.holders or not any(how.endswith(TWICE) for how in buckets):
            return True
        return len(known.holders) > 1 and present.covered >= known.due

    # --- living ------------------------------------------------------------------------------------------------------
    async def _live(self) -> None:
        await self._find_cluster()
        self.found.set()
        if self._known.lease and self._known.place == self._place:
            with suppress(ForebayError):
                await self._meta.revoke(self._known.lease)
        async with self._held:
            self._spawn(self._follow())
            self._spawn(self._remember_lease())
            while True:
                self._look()
                await asyncio.sleep(LOOK_S)

    async def _find_cluster(self) -> None:
        """Return when the store is known to be of the right cluster, and has its id."""
        while True:
            if await self._is_right():
                return
            await asyncio.sleep(AGAIN_S)

    async def _is_right(self) -> bool:
        """Look once."""
        try:
            entry = await self._meta.get(ID)
            if entry is None:
                drawn = self._known.id or self._chance.token_hex(8)
                with suppress(Precondition):
                    await self._meta.put(ID, drawn.encode(), revision=0)
                return False  # whoever was first: look again
            self._trouble = ""
            self._judge(entry.value)
            if not self._wrong and not self._known.id:
                await self._remember(id=entry.value.decode("utf-8", "replace"))
        except ForebayError as error:
            self._trouble = error.message
        self._tell()
        return not self._wrong and not self._trouble

    def _judge(self, id: bytes) -> None:
        found = id.decode("utf-8", "replace")
        self._wrong = ""
        if self._known.id not in ("", found):
            self._wrong = (
                f"the cluster {self._known.name} there has the id {found}, and this node is of one with the id "
                f"{self._known.id}: correct --cluster, or give the node an empty --dir"
            )

    async def _remember(self, **values: Any) -> None:
        self._known = msgspec.structs.replace(self._known, **values)
        await self._memory.put(MEMORY, msgspec.json.encode(self._known))

    async def _remember_lease(self) -> None:
        lease = 0
        while True:
            lease = await self._held.number(other_than=lease)
            try:
                await self._remember(lease=lease, place=self._place)
            except ForebayError as error:  # a return will wait for the lease's end, that is all
                log.warning("the lease is not remembered: %s", error)

    async def _follow(self) -> None:
        async with aclosing(self._meta.watch(PREFIX)) as told:
            async for heard in told:
                for change in heard.changes:
                    if change.key == ID:
                        self._judge(self._known.id.encode() if change.value is None else change.value)
                        if change.value is None:  # the store was emptied
                            self._spawn(self._find_cluster())
                self._step(Told(tuple(heard.changes), heard.revision))

    def _look(self) -> None:
        own = self._machine.nodes.get(self._machine.node)
        if own is not None and own.wanted == "draining":
            if not self._draining:
                self._draining = True
                self._spawn(self._begin_to_drain())
            self._step(Owes(self._owes()))
        else:
            self._draining = False
        self._step(Due())

    async def _begin_to_drain(self) -> None:
        try:
            await self._drain()
        except ForebayError as error:  # what is owed is brought to the backends all the same, later
            log.warning("nothing was hurried: %s", error)

    def _step(self, event: Event) -> None:
        if self._closed:
            return
        machine, before, lived = self._machine, self._machine.map, dict(self._machine.alive)
        own = machine.nodes.get(machine.node)
        events: list[Event] = [event]
        while events:
            for effect in machine.step(self._clock.monotonic_s(), events.pop(0)):
                match effect:
                    case Settle(epoch):
                        events.append(Settled(epoch))  # a new home asks the former ones, who wait for what is under way
                    case StandAside(turn):
                        self._spawn(self._stand_aside(turn))
                    case Write() if self._wrong:
                        events.append(Answered(0))
                    case Write():
                        self._spawn(self._write(effect))
        machine.check()
        for node, present in lived.items():
            if machine.alive.get(node, UNREADABLE).incarnation != present.incarnation:
                self.left(node)
        if isinstance(event, Told) and not self._wrong:
            self._hear(own)
        if before is not None and machine.map is not None and before.owners not in ({}, machine.map.owners):
            self._earlier.appendleft((self._clock.monotonic_s() + EARLIER_S, before))
        was = (0, False) if before is None else (before.epoch, before.active)
        if machine.map is not None and (machine.map.epoch, machine.map.active) != was:
            word = "active" if machine.map.active else "preparing"
            self._turned.set()
            self._turned = asyncio.Event()
            log.info("map %d is %s: %s", machine.map.epoch, word, ", ".join(machine.map.owners) or "nobody")
        self._tell()

    async def _stand_aside(self, turn: int) -> None:
        await self.stand_aside()
        self._step(StoodAside(turn))

    async def _write(self, write: Write) -> None:
        revision = -1
        try:
            revision = await self._meta.transact(write.changes, when=write.when, lease=write.lease)
        except (Precondition, NotFound):
            revision = 0
        except ForebayError as error:
            log.warning("the cluster's store took no change: %s", error)
        finally:
            self._step(Answered(revision))

    def _tell(self) -> None:
        """Say what is new for people and for those who send requests here."""
        own = self._machine.nodes.get(self._machine.node)
        wish = "" if own is None or own.wanted == "active" else own.wanted
        away = f"the node is {wish}" if wish else ""
        if self._wrong or self._machine.doubled or self._strange:
            away = self.trouble
        if (away, self.as_home) != (self.away, self._known_as):
            self.away, self._known_as = away, self.as_home
            self._changed()
        if (acts_until_s := self.acts_until_s) != self._told_acts_s:
            self._told_acts_s = acts_until_s
            self._acts(acts_until_s)
        said = self.trouble or away
        if said != self._said:
            self._said = said
            (log.warning if said else log.info)("cluster %s: %s", self._known.name, said or "all is well again")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            log.error("the node leaves its cluster, since a part of it broke", exc_info=error)
            self._wrong = "a fault of Forebay ended the node's part in it: restart the node, and report its log"
            for other in self._tasks:
                other.cancel()
            self._tell()


def kept_how(bucket: Bucket) -> str:
    """What nodes must agree on about a bucket, for people too."""
    twice = TWICE if bucket.is_kept_twice else ""
    if bucket.write == "local":
        return f"local{twice}"
    at = f" at {bucket.options['endpoint']}" if "endpoint" in bucket.options else ""
    return f"written {bucket.write} to {bucket.url}{at}{twice}"


def _no_node(name: str) -> NotFound:
    return NotFound(f"the cluster knows no node {name}: `forebay status` lists its nodes")
