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

*Who writes maps.* The living node with the least name. If two think so, one is refused. It takes in nodes that want to
be active and live, once nobody has come or gone for JOIN_AFTER_S: those that start together come in together. It takes
out those that shall not be active, at once, and those that are missing for MISSING_AFTER_S, provided that they still
are when the map is written.

*The detector is the lease*, and there is no second one. A process that gets no processor for less than half a lease is
noticed by nobody; for less than a lease, it pauses; beyond that its keys move, and move back. Lateness of whoever looks
cannot make another look dead, because the store counts, and is asked in the same transaction.

*Holders.* With the owners change the holders of what only nodes have (`records.py`), but not for a node that is
missing. Who held before goes to `past`, until each said that it has `Released` what is at home elsewhere, or is gone.
A node with local objects may never say so. So of more than PAST_MAX changes the oldest two become one, all of whose
nodes are asked about every key. A node that comes in holds once it said that it brings nothing; one that does not say
so within HOLDS_AFTER_S goes to `past` with that, and is asked about every key.

*Taking over.* A holder that is missing for MISSING_AFTER_S is taken over while all is covered (`records.py`). What it
alone had is on the next in order of each key, who is the home by the next map. One at a time: then all must be covered
again. It is `deposed`, acts on nothing, and holds again when it has forgotten its copies (`Released`) and all is
covered. Until then nobody else comes or goes as a holder, but one that is given up: it would take along what it has not
taken over. A node that keeps a bucket once (`NodeRecord.buckets`), or shall not be `replaced`, is waited for.

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

import math
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from forebay.core.cluster.lease import LeaseHold
from forebay.core.cluster.mirror import Change
from forebay.core.cluster.records import (
    ALIVE,
    MAP,
    NODES,
    TWICE,
    UNREADABLE,
    Loss,
    Map,
    NodeRecord,
    Past,
    Presence,
    State,
    bounded,
    encoded,
    may_mix,
)

T = TypeVar("T")
LOOK_S = 0.25  # how often the shell steps with `Due`, at least
AGAIN_S = 0.5  # after a refusal or no answer
JOIN_AFTER_S = 1.0  # nodes of one rack start within it, or cost a map each
MISSING_AFTER_S = 0.5  # beyond the lease: a process that was started again meanwhile waits for its end, and is back
CHANGES_MAX = 50  # nodes that one map takes in or out: each is a condition of the transaction
HOLDS_AFTER_S = 10.0


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


Event = Told | Due | Answered | Settled | Owes | Released | Covered | Lost


class Write(msgspec.Struct, frozen=True):
    """One transaction (`MetaStore.transact`); `Answered` follows."""

    changes: dict[str, bytes | None]
    when: dict[str, int]
    lease: int = 0


class Settle(msgspec.Struct, frozen=True):
    """Let end what is under way on keys that move under this epoch, and begin nothing; `Settled` follows."""

    epoch: int


Effect = Write | Settle


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
        self._owes_bytes: int | None = None  # nobody has said yet
        self._came_or_went_s = float("-inf")
        self._missing_s: dict[str, float] = {}  # since when

    def keeps(self, buckets: dict[str, str]) -> None:
        """How the node keeps its buckets that are not written through; the others are told."""
        self._record = msgspec.structs.replace(self._record, buckets=buckets)

    # --- what others ask ---------------------------------------------------------------------------------------------
    def right(self, now_s: float, bucket: str, key: str) -> Right | None:
        """Whether this node may act on the key at this moment."""
        if not self._present(now_s) or self.map is None or self.map.actor(bucket, key) != self.node:
            return None
        return Right(self.map.epoch, self.hold.lease)

    def still(self, now_s: float, right: Right) -> bool:
        """Whether it has been allowed ever since: what was done may be acknowledged."""
        return self._present(now_s) and right.lease == self.hold.lease

    def member(self, now_s: float) -> int:
        """The lease under which this process may acknowledge what only its node has; 0 if it may not."""
        own = self.nodes.get(self.node)
        wanted = own is not None and own.wanted == "active"
        deposed = self.map is not None and self.node in self.map.deposed
        return self.hold.lease if wanted and not deposed and self._present(now_s) else 0

    def acts_until_s(self, now_s: float) -> float:
        """Until when this process may answer for what others would take over; 0 if it may not."""
        deposed = self.map is None or self.node in self.map.deposed
        return self.hold.fenced_s if self._present(now_s) and not deposed else 0.0

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
            case Due():
                pass
        return [*self._settle(), *self._write(now_s)]

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
        wish = msgspec.structs.replace(wish, wanted=own.wanted)
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
        said = present.released, present.covered, present.lost
        if said != (self._released_epoch, self._covered_epoch, self.losses):
            return self._presence(present.epoch)
        return self._farewell(self.map) or (self._next_map(now_s, self.map) if min(self.alive) == self.node else None)

    def _presence(self, epoch: int) -> Write:
        presence = Presence(
            self.incarnation, epoch, self.hold.lease, self._released_epoch, self._covered_epoch, self.losses
        )
        return self._changed({ALIVE + self.node: presence}, lease=self.hold.lease)

    def _farewell(self, map: Map) -> Write | None:
        """A node that nobody asks any more and that owes nothing may go."""
        own = self.nodes[self.node]
        if own.wanted != "draining" or self._owes_bytes != 0 or not map.active or self.node in map.owners:
            return None
        if self._released_epoch < max((past.epoch for past in map.past), default=0) or self.node in map.holders:
            return None  # what it has cached counts as confirmed still, and nobody asks one that is gone
        gone = msgspec.structs.replace(own, wanted="gone")
        return self._changed({NODES + self.node: gone, ALIVE + self.node: None}, also=(MAP,))

    def _next_map(self, now_s: float, map: Map) -> Write | None:
        if not map.active:
            if any(presence.epoch < map.epoch for presence in self.alive.values()):
                return None
            return self._changed({MAP: msgspec.structs.replace(map, active=True)})
        owners, reasons = dict(map.owners), set[str]()
        for node in sorted({*self.nodes, *owners}):
            record, lives = self.nodes.get(node), node in self.alive
            wanted = record is not None and record.wanted == "active" and 0 < record.weight < math.inf
            if node in owners and not (wanted and lives):
                if wanted and now_s < self._missing_s[node] + MISSING_AFTER_S:
                    continue
                del owners[node]
            elif record is not None and wanted and lives and owners.get(node) != record.weight:
                if node not in owners and now_s < self._came_or_went_s + JOIN_AFTER_S:
                    continue
                owners[node] = record.weight
            else:
                continue
            reasons |= {NODES + node, ALIVE + node}
            if len(reasons) >= 2 * CHANGES_MAX:
                break
        past = tuple(each for each in map.past if not self._is_over(map, each))
        covered, lost = min([map.due, *(self._covered(node) for node in map.holders)]), self._losses(map)
        reasons |= {ALIVE + node for node, loss in lost.items() if loss.epoch > map.epoch}
        known = msgspec.structs.replace(map, covered=covered if covered >= map.held else map.covered, lost=lost)
        holders = self._holders(now_s, known, owners, reasons)
        held, deposed = map.held, tuple(node for node in map.deposed if node in self.nodes and node not in holders)
        if holders == map.holders and (gone := self._taken_over(now_s, known)):
            holders = {node: weight for node, weight in holders.items() if node != gone}
            held, deposed = map.epoch + 1, (*deposed, gone)  # the others keep what they had, so nobody is asked
            said = [gone, *sorted(map.holders)][:CHANGES_MAX]  # what the others said of lost copies counts, too
            reasons |= {NODES + gone, *(ALIVE + node for node in said)}
        elif holders != map.holders:
            came = sorted(holders.keys() - map.holders.keys())
            newcomers = tuple(node for node in came if self._released(node) < map.epoch)
            past, held = bounded((*past, Past(map.epoch + 1, map.holders, newcomers))), map.epoch + 1
        elif not reasons:
            changed = msgspec.structs.replace(known, past=past, deposed=deposed)
            return self._changed({MAP: changed}) if changed != map else None
        at_once = owners == map.owners  # whoever holds by a new map asks the others, who must know it too
        changed = Map(
            map.epoch + 1, at_once, owners, map.owners, holders, past, held, known.covered, deposed, known.lost
        )
        return self._changed({MAP: changed}, also=tuple(sorted(reasons)))

    def _losses(self, map: Map) -> dict[str, Loss]:
        """Who lost copies, with what is said for the first time."""
        lost = {node: loss for node, loss in map.lost.items() if node in self.nodes}
        for node in map.holders.keys() & self.alive.keys():
            said, known = self.alive[node], lost.get(node)
            if said.lost and (known is None or (known.incarnation, known.lost) != (said.incarnation, said.lost)):
                lost[node] = Loss(said.incarnation, said.lost, map.epoch + 1)
        return lost

    def _taken_over(self, now_s: float, map: Map) -> str | None:
        """A holder that is missing, and of which others have all that it alone had."""
        if not map.held or not map.is_covered or len(map.holders) < 2:
            return None  # `held` is 0 in a map of a release without copies
        missing = [node for node in sorted(map.holders) if self._is_missing(now_s, node)]
        others = [node for node in map.holders if node not in missing]
        if any(self._covered(node) < map.due for node in others):
            return None  # it came back without a disk, perhaps, on which the copies were: nobody compares then
        return next((node for node in missing if self._may_be_replaced(node)), None)

    def _may_be_replaced(self, node: str) -> bool:
        """Whether another node has all that this one alone may have acknowledged: it used no bucket that the others
        were not told of."""
        record = self.nodes[node]
        kept = record.buckets.values()
        return record.replaced and bool(kept) and all(how.endswith(TWICE) for how in kept)

    def _is_missing(self, now_s: float, node: str) -> bool:
        since_s = self._missing_s.get(node)
        wanted = since_s is not None and self.nodes[node].wanted == "active"  # in maintenance it is waited for
        return since_s is not None and wanted and now_s >= since_s + MISSING_AFTER_S

    def _holders(self, now_s: float, map: Map, owners: dict[str, float], reasons: set[str]) -> dict[str, float]:
        """Who holds what only nodes have under the next map. Why one leaves is added to `reasons`."""
        if map.deposed and not map.is_covered:  # copies are taken over: who went now would take them along
            gone = {node for node in map.holders if node not in self.nodes or self.nodes[node].wanted == "gone"}
            reasons |= {NODES + node for node in gone}
            return {node: weight for node, weight in map.holders.items() if node not in gone}
        waits = bool(map.holders) and now_s < self._came_or_went_s + HOLDS_AFTER_S
        holders = {
            node: weight
            for node, weight in owners.items()
            if node in map.holders
            or (self._has_forgotten(map, node) if node in map.deposed else not waits)
            or (node not in map.deposed and self._released(node) >= map.epoch)
        }
        for node, weight in map.holders.items():
            record = self.nodes.get(node)
            leaves = record is None or record.wanted not in ("active", "maintenance")
            if leaves and len(reasons) < 2 * CHANGES_MAX:
                reasons.add(NODES + node)
            else:
                holders.setdefault(node, weight)
        return holders

    def _has_forgotten(self, map: Map, node: str) -> bool:
        """Whether a deposed node has no old copies, and whoever took over has acted on it."""
        return map.is_covered and self._released(node) >= map.held

    def _released(self, node: str) -> int:
        return self.alive.get(node, UNREADABLE).released

    def _covered(self, node: str) -> int:
        return self.alive.get(node, UNREADABLE).covered

    def _is_over(self, map: Map, past: Past) -> bool:
        """Whether nobody may have keys from then any more."""
        return all(
            self.nodes[node].wanted == "gone" or node in map.deposed or self._released(node) >= past.epoch
            for node in (*past.holders, *past.newcomers)
            if node in self.nodes
        )

    def _changed(
        self, values: dict[str, NodeRecord | Presence | Map | None], also: tuple[str, ...] = (), lease: int = 0
    ) -> Write:
        """A write of these, on the condition that they, and what it was decided from, are as the copy has them."""
        changes = {key: None if value is None else encoded(value) for key, value in values.items()}
        return Write(changes, {key: self._revisions.get(key, 0) for key in (*values, *also)}, lease)

    def _present(self, now_s: float) -> bool:
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
