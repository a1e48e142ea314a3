"""A node among others: it enters, follows the map, acts only while it may, and writes the next map in its turn.

Theory. Every node runs this machine on its copy of the agreed state (`records.py`, kept by a watch) and on its lease
(`lease.py`). All it does to others is to write to the store, one transaction at a time, each under the condition that
what it was decided from is still so. So a node that is late, paused or cut off writes nothing that is wrong: it is
refused, and decides anew from what it is told.

*Acting.* A node may act on a key (serve it as its home, acknowledge a write) while it holds its lease, its presence is
in the store under that lease, and the map that it knows says so. `right` asks that before, `still` after, right before
the acknowledgement: between them the lease may have ended.

*A change of the map.* Somebody writes the next map as preparing. Each living node that is told acts from then on only
on keys that do not move, lets end what is under way (`Settle`, `Settled`), and says in its presence that it acts by
this map. When all have, the map is made active, and the new homes act. A node that does not answer holds the change up
until its lease ends; it has stopped half a lease before. Nobody comes in unseen with an older map: a node acts once its
copy has its presence, and the copy has the map of the same revision.

*Who writes maps.* The living node with the least name. If two think so, one is refused. What the map is to be says
`next_map.py`. Who is taken out for being missing must be so still when the map is written.

*The detector is the lease*, and there is no second one. A process that gets no processor for less than half a lease is
noticed by nobody; for less than a lease, it pauses; beyond that its keys move, and move back. Lateness of whoever looks
cannot make another look dead, because the store counts, and is asked in the same transaction.

*Handing over.* A node that is drained and keeps local objects hands them over (`next_map.py`): when all is covered, it
stands aside: it begins nothing any more of what others would take over, lets end what is under way (`StandAside`,
`StoodAside`), and says that in its presence. If it need not wait for that map any more, or not all is covered, it takes
that back, and acts again once its copy has it. The entry is a condition of the map that takes it over, so of the two
only one is written.

*Another release.* A node enters only if all others that are not gone speak a protocol next to its own (`strangers`).
The check comes before its record says what it speaks, so it is the newcomer who stays out, and nobody who is in.

*What cannot be read* (somebody wrote past us) is nobody's word. A node's record is written again by the node. A
presence counts as that of a process that has taken up no map, until the process writes it again. A map stops everybody:
who acts by the one before cannot be known, so no map follows until an operator has deleted it.

Rejected: an elected leader (a lease more, and a second way to be wrong; conditions do what it would); acknowledging
maps in an entry of its own (two entries could disagree; presence goes with the lease); counting heartbeats between
nodes (a majority of opinions about a node is not the node's own knowledge that it must stop).

Invariants. (1) Two nodes, or two processes of one node, never both may act on a key. (2) Epochs only grow, and a key is
acted on by epochs that never fall. (3) A node is taken out only by the store's word that its lease ended, or by its
operator's. (4) At most one transaction is out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from forebay.core.cluster.lease import LeaseHold
from forebay.core.cluster.mirror import Change
from forebay.core.cluster.next_map import Seen, Succession, hands_over
from forebay.core.cluster.records import (
    ALIVE,
    MAP,
    NODES,
    UNREADABLE,
    Map,
    NodeRecord,
    Past,
    Presence,
    State,
    encoded,
    may_mix,
)

T = TypeVar("T")
LOOK_S = 0.25  # how often the shell steps with `Due`, at least
AGAIN_S = 0.5  # after a refusal or no answer


class Told(msgspec.Struct, frozen=True):
    """The copy of the agreed state changed, and is of `revision` now."""

    changes: tuple[Change, ...]
    revision: int


class Due(msgspec.Struct, frozen=True):
    """Time has passed."""


class Answered(msgspec.Struct, frozen=True):
    """The transaction was done, at `revision`; or refused (0); or nobody knows (-1)."""

    revision: int


class Settled(msgspec.Struct, frozen=True):
    """What was under way when `Settle` asked for this epoch has ended."""

    epoch: int


class Owes(msgspec.Struct, frozen=True):
    """So many bytes are on this node alone, or for another to take over."""

    size_bytes: int


class Released(msgspec.Struct, frozen=True):
    """By the map of this epoch the node had nothing that is at home elsewhere."""

    epoch: int


class Covered(msgspec.Struct, frozen=True):
    """By this epoch (`Map.due`) all that the node has alone lies on another too."""

    due: int


class Lost(msgspec.Struct, frozen=True):
    """Copies that the node kept for others are gone."""


class StoodAside(msgspec.Struct, frozen=True):
    """Nothing is under way any more that `StandAside` of this turn asked about."""

    turn: int


Event = Told | Due | Answered | Settled | Owes | Released | Covered | Lost | StoodAside


class Write(msgspec.Struct, frozen=True):
    """One transaction (`MetaStore.transact`); `Answered` follows."""

    changes: dict[str, bytes | None]
    when: dict[str, int]
    lease: int = 0


class Settle(msgspec.Struct, frozen=True):
    """Let end what is under way on keys that move under this epoch, and begin nothing; `Settled` follows."""

    epoch: int


class StandAside(msgspec.Struct, frozen=True):
    """Begin nothing of what others would take over (`acts_until_s` says so by now), and let end what is under way;
    `StoodAside` follows."""

    turn: int


Effect = Write | Settle | StandAside


class Right(msgspec.Struct, frozen=True):
    """What `right` gave: valid as long as `still` says so."""

    epoch: int
    lease: int


class Membership:
    """See the module's header. Of one process of one node; `hold` is its lease, which the shell keeps."""

    def __init__(self, node: str, incarnation: str, record: NodeRecord, hold: LeaseHold) -> None:
        self.node, self.incarnation, self.hold = node, incarnation, hold
        self.map: Map | None = None
        self.nodes: dict[str, NodeRecord] = {}
        self.alive: dict[str, Presence] = {}
        self.unreadable: set[str] = set()  # entries that are none
        self._record = record
        self._revisions: dict[str, int] = {}
        self._revision = -1  # of the copy; -1: there is none yet
        self._wanted_revision = 0  # the copy must be of this one before it is decided from
        self._again_s = float("-inf")
        self._out = False  # a transaction is
        self._asked_epoch = self._settled_epoch = self._released_epoch = self._covered_epoch = 0
        self.losses = 0
        self._aside = 0  # as `Presence.aside`
        self._stands_aside = False  # begins nothing that others would take over
        self._turn = 0  # of standing aside
        self._owes_bytes: int | None = None  # nobody has said yet
        self._began_epoch = 0  # of the last map by which something could begin that only this node will have
        self._came_or_went_s = float("-inf")
        self._missing_s: dict[str, float] = {}  # since when

    def keeps(self, buckets: dict[str, str]) -> None:
        """How the node keeps its buckets that are not written through; the others are told."""
        self._record = msgspec.structs.replace(self._record, buckets=buckets)

    # --- what others ask ---------------------------------------------------------------------------------------------
    def right(self, now_s: float, bucket: str, key: str) -> Right | None:
        """Whether this node may act on the key at this moment."""
        if not self.is_present(now_s) or self.map is None or self.map.actor(bucket, key) != self.node:
            return None
        return Right(self.map.epoch, self.hold.lease)

    def still(self, now_s: float, right: Right) -> bool:
        """Whether it has been allowed ever since: what was done may be acknowledged."""
        return self.is_present(now_s) and right.lease == self.hold.lease

    def member(self, now_s: float) -> int:
        """The lease under which this process may begin what it acknowledges though only its node has it; 0 if it may
        not."""
        return self.remains(now_s) if self._takes_writes() else 0

    def _takes_writes(self) -> bool:
        own = self.nodes.get(self.node)
        return own is not None and not own.was_gone and (own.wanted == "active" or self._hands_over())

    def remains(self, now_s: float) -> int:
        """As `member`, for what began when that was so. A node that is drained may end it: it goes when it has let go
        of the key (`_farewell`), and nobody else acts on it before."""
        own = self.nodes.get(self.node)
        deposed = self.map is not None and self.node in self.map.deposed
        stays = own is not None and own.wanted != "gone" and not deposed
        acts = self.is_present(now_s) and not self._aside % 2 and self._has_said_aside()
        return self.hold.lease if stays and acts else 0

    def acts_until_s(self, now_s: float) -> float:
        """Until when this process may answer for what others would take over; 0 if it may not."""
        deposed = self.map is None or self.node in self.map.deposed
        acts = self.is_present(now_s) and not deposed and not self._stands_aside and self._has_said_aside()
        return self.hold.fenced_s if acts else 0.0

    def _hands_over(self) -> bool:
        """Whether it is drained, and holds keys until others have taken over what it has."""
        known = self.map
        return known is not None and self.node in known.holders and hands_over(self.nodes, known, self.node)

    def state(self, node: str) -> State:
        """What a node is doing, in one word."""
        record = self.nodes[node]
        owns = self.map is not None and node in (self.map.owners if self.map.active else self.map.former)
        if record.wanted == "gone":
            return "gone"
        if node not in self.alive:
            return "maintenance" if record.wanted == "maintenance" else "missing"
        if record.wanted == "active":
            return "active" if owns else "joining"
        if record.wanted == "maintenance":
            return "maintenance"
        return "draining" if owns else "leaving"

    @property
    def doubled(self) -> bool:
        """Whether another process lives under this node's name."""
        present = self.alive.get(self.node, UNREADABLE)
        return present.incarnation not in (self.incarnation, UNREADABLE.incarnation)

    @property
    def strangers(self) -> list[str]:
        """The nodes for whose sake this process stays out: of a release too far from its own."""
        own, speaks = self.nodes.get(self.node), self._record.protocol
        if own is not None and own.protocol == speaks:
            return []  # it came in
        others = [node for node, record in self.nodes.items() if node != self.node and record.wanted != "gone"]
        return sorted(node for node in others if not may_mix(self.nodes[node].protocol, speaks))

    # --- what happens ------------------------------------------------------------------------------------------------
    def step(self, now_s: float, event: Event) -> list[Effect]:
        match event:
            case Told(changes, revision):
                if revision < self._revision:  # the store was taken back, and what was written may be gone
                    self._wanted_revision = 0
                self._revision = revision
                self._follow(now_s, changes)
            case Answered(revision):
                assert self._out, "an answer to nothing"
                self._out = False
                if revision > 0:
                    self._wanted_revision = revision
                else:
                    self._again_s = now_s + AGAIN_S
            case Settled(epoch):
                self._settled_epoch = max(self._settled_epoch, epoch)
            case Owes(size_bytes):
                self._owes_bytes = size_bytes
            case Released(epoch):
                self._released_epoch = max(self._released_epoch, epoch)
            case Covered(due):
                self._covered_epoch = max(self._covered_epoch, due)
            case Lost():
                self.losses += 1
            case StoodAside(turn):
                if self._stands_aside and turn == self._turn and not self._aside % 2:
                    self._aside += 1
            case Due():
                pass
        return [*self._settle(), *self._stand_aside(), *self._write(now_s)]

    def _follow(self, now_s: float, changes: Iterable[Change]) -> None:
        lived = set(self.alive)
        for key, value, revision in changes:
            self._revisions[key] = revision if value is not None else 0
            if key == MAP:
                self.map = self._read(key, value, Map)
            elif key.startswith(NODES):
                _keep(self.nodes, key.removeprefix(NODES), self._read(key, value, NodeRecord))
            elif key.startswith(ALIVE):
                found = self._read(key, value, Presence)
                _keep(self.alive, key.removeprefix(ALIVE), UNREADABLE if key in self.unreadable else found)
        if lived != set(self.alive):
            self._came_or_went_s = now_s
        if self.map is not None and self._takes_writes():
            self._began_epoch = self.map.epoch
        self._missing_s = {node: self._missing_s.get(node, now_s) for node in self.nodes if node not in self.alive}

    def _read(self, key: str, value: bytes | None, kind: type[T]) -> T | None:
        self.unreadable.discard(key)
        try:
            return None if value is None else msgspec.json.decode(value, type=kind)
        except msgspec.MsgspecError:
            self.unreadable.add(key)
            return None

    def _settle(self) -> list[Effect]:
        if self.map is None or self.map.active or self.map.epoch <= self._asked_epoch:
            return []
        self._asked_epoch = self.map.epoch
        return [Settle(self.map.epoch)]

    def _stand_aside(self) -> list[Effect]:
        wants = self._may_stand_aside()
        if wants and not self._stands_aside and self._has_said_aside():
            self._stands_aside, self._turn = True, self._turn + 1
            return [StandAside(self._turn)]
        if not wants and self._stands_aside:
            self._stands_aside = False
            self._aside += self._aside % 2
        return []

    def _may_stand_aside(self) -> bool:
        """Whether it waits for nothing but to be taken over."""
        known = self.map
        if known is None or not known.active or self.node in known.owners or not known.is_covered:
            return False
        covered = (self.alive.get(node, UNREADABLE).covered for node in known.holders)
        return known.leaving == self.node and self._hands_over() and all(each >= known.due for each in covered)

    def _has_said_aside(self) -> bool:
        """Whether the copy has what this process says of that: whatever rests on what it said before is refused."""
        return self.alive.get(self.node, UNREADABLE).aside == self._aside

    def _write(self, now_s: float) -> list[Effect]:
        if self._out or now_s < self._again_s or self._revision < self._wanted_revision or self.strangers:
            return []
        write = self._own_record() or (self._in_turn(now_s) if self.hold.holds(now_s) else None)
        self._out = write is not None
        return [write] if write is not None else []

    def _own_record(self) -> Write | None:
        own, wish = self.nodes.get(self.node), self._record
        if own is None:
            return self._changed({NODES + self.node: wish})
        is_here = self.alive.get(self.node, UNREADABLE).incarnation == self.incarnation
        wish = msgspec.structs.replace(wish, wanted=own.wanted, was_gone=own.was_gone and not is_here)
        if own.wanted != "gone" and not self.doubled and own != wish:
            return self._changed({NODES + self.node: wish})
        return None

    def _in_turn(self, now_s: float) -> Write | None:
        """What is to be written under the lease."""
        if self.nodes[self.node].wanted == "gone" or self.doubled:
            return None  # the one is for its operator to take back, the other to end
        if MAP in self.unreadable:
            return None
        if self.map is None:
            # one that was deleted is followed by a later one, which the living must take up as any other
            epoch = max((self._asked_epoch, *(presence.epoch for presence in self.alive.values())))
            past = Past(epoch + 1, {}, tuple(sorted(self.nodes)))  # who held what is not known any more
            return self._changed({MAP: Map(epoch + 1, True, {}, {}, past=(past,), held=epoch + 1)})
        present = self.alive.get(self.node)
        if present in (None, UNREADABLE):
            return self._presence(self.map.epoch)
        assert present is not None
        if present.lease != self.hold.lease:
            return None  # it went with the lease that it hung on, and the copy will say so
        if not self.map.active and present.epoch < self.map.epoch <= self._settled_epoch:
            return self._presence(self.map.epoch)
        said = present.released, present.covered, present.lost, present.aside
        if said != (self._released_epoch, self._covered_epoch, self.losses, self._aside):
            return self._presence(present.epoch)
        return self._farewell(self.map) or (self._next_map(now_s, self.map) if min(self.alive) == self.node else None)

    def _presence(self, epoch: int) -> Write:
        presence = Presence(
            self.incarnation,
            epoch,
            self.hold.lease,
            self._released_epoch,
            self._covered_epoch,
            self.losses,
            self._aside,
        )
        return self._changed({ALIVE + self.node: presence}, lease=self.hold.lease)

    def _farewell(self, map: Map) -> Write | None:
        """A node that nobody asks any more and that owes nothing may go."""
        own = self.nodes[self.node]
        if own.wanted != "draining" or self._owes_bytes != 0 or not map.active or self.node in map.owners:
            return None
        if self.node in map.holders or self.node in map.deposed:
            return None
        if self._released_epoch < max((self._began_epoch, *(past.epoch for past in map.past))):
            return None  # what it has cached counts as confirmed still, or it writes, and nobody asks one that is gone
        gone = msgspec.structs.replace(own, wanted="gone")
        return self._changed({NODES + self.node: gone, ALIVE + self.node: None}, also=(MAP,))

    def _next_map(self, now_s: float, map: Map) -> Write | None:
        if not map.active:
            if any(presence.epoch < map.epoch for presence in self.alive.values()):
                return None
            return self._changed({MAP: msgspec.structs.replace(map, active=True)})
        seen = Seen(self.nodes, self.alive, self._missing_s, self._came_or_went_s)
        found = Succession(seen, now_s, map).decide()
        return None if found is None else self._changed({MAP: found.map}, also=tuple(sorted(found.reasons)))

    def _changed(
        self, values: dict[str, NodeRecord | Presence | Map | None], also: tuple[str, ...] = (), lease: int = 0
    ) -> Write:
        """A write of these, on the condition that they, and what it was decided from, are as the copy has them."""
        changes = {key: None if value is None else encoded(value) for key, value in values.items()}
        return Write(changes, {key: self._revisions.get(key, 0) for key in (*values, *also)}, lease)

    def is_present(self, now_s: float) -> bool:
        """Whether others wait for this process before they change who acts."""
        present = self.alive.get(self.node)
        return (
            present is not None
            and present.incarnation == self.incarnation
            and present.lease == self.hold.lease
            and self.hold.holds(now_s)
        )

    def check(self) -> None:
        """What must hold between steps."""
        assert self._settled_epoch <= self._asked_epoch
        assert set(self._missing_s) == set(self.nodes) - set(self.alive)
        assert self.map is None or self.map.epoch >= 1


def _keep(known: dict[str, T], node: str, value: T | None) -> None:
    if value is None:
        known.pop(node, None)
    else:
        known[node] = value
