"""Which map follows: who owns keys, who holds what only nodes have, and who is taken over.

Theory. Whoever writes maps (`membership.py`) decides from its copy of the agreed state, and names the entries that its
decision rests on: the store writes the map only if they are as the copy had them.

*Owners.* Nodes that want to be active and live come in, once nobody has come or gone for JOIN_AFTER_S: those that start
together come in together. Those that shall not be active go at once, and those that are missing after MISSING_AFTER_S.

*Holders.* With the owners change the holders of what only nodes have (`records.py`), but not for a node that is
missing. Who held before goes to `past`, until each said that it has `Released` what is at home elsewhere, or is gone.
A node with local objects that are kept once may never say so. So of more than PAST_MAX changes the oldest two become
one, all of whose nodes are asked about every key. A node that comes in holds once it said that it brings nothing; one
that does not say so within HOLDS_AFTER_S goes to `past` with that, and is asked about every key.

*Taking over.* A holder that is missing for MISSING_AFTER_S is taken over while all is covered (`records.py`). What it
alone had is on the next in order of each key, who is the home by the next map. One at a time: then all must be covered
again. It is `deposed`, acts on nothing, and holds again when it has forgotten its copies (`Released`) and all is
covered. Until then nobody else comes or goes as a holder, but one that is given up: it would take along what it has not
taken over. A node that keeps a bucket once (`NodeRecord.buckets`), or shall not be `replaced`, is waited for.

*Giving up.* An operator says that a node never comes back. If not all was covered then, nobody could take it over
before; what others have of it becomes theirs now (`Map.given_up`). With more than two copies that is all, also of nodes
that were lost at the same time.

*Handing over.* A node that is drained, and keeps local objects, is taken over too, though it lives: no backend has
them, so it would never have nothing. It becomes the one that is `leaving`: what it has, and what it keeps for others,
lies on one node more from then on (`Map.seconds`). It goes on as a holder until all is covered. Then it stands aside:
it acts on nothing any more, and says so (`Presence.aside`). That is the word of the very process that is deposed, since
its entry is a condition.

Rejected: moving its objects key by key (each would have two owners for a while, and a protocol of its own; the copies
are where the next home is); letting it leave first (the others would let its copies go, and it had all of it once).

Invariants. (1) Nobody is deposed who may act by the entries that the map rests on. (2) Nobody is deposed unless all
that only it had lies on others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from forebay.core.cluster.records import (
    ALIVE,
    LOCAL_TWICE,
    NODES,
    TWICE,
    UNREADABLE,
    Loss,
    Map,
    NodeRecord,
    Past,
    Presence,
    bounded,
)

JOIN_AFTER_S = 0.5  # nodes that start together are rarely further apart, or cost a map each; a join waits for it
MISSING_AFTER_S = 0.5  # beyond the lease: a process that was started again meanwhile waits for its end, and is back
CHANGES_MAX = 50  # nodes that one map takes in or out: each is a condition of the transaction
HOLDS_AFTER_S = 10.0


class Seen(NamedTuple):
    """What is known of the nodes: their records, who lives, since when others do not, and when anybody last came or
    went."""

    nodes: Mapping[str, NodeRecord]
    alive: Mapping[str, Presence]
    missing_s: Mapping[str, float]
    came_or_went_s: float


class Next(NamedTuple):
    """A map, and the entries of the store that it was decided from, besides the map before."""

    map: Map
    reasons: frozenset[str]


def hands_over(nodes: Mapping[str, NodeRecord], map: Map, node: str) -> bool:
    """Whether a node that is drained stays a holder until others have taken over what it has."""
    record = nodes.get(node)
    if record is None or record.wanted != "draining" or not record.hands_over or not may_be_replaced(record):
        return False
    if not map.held:  # of a release without copies
        return False
    stay = (other for other in map.holders if other != node and other in nodes)
    return LOCAL_TWICE in record.buckets.values() and any(
        nodes[other].wanted in ("active", "maintenance") for other in stay
    )


def may_be_replaced(record: NodeRecord) -> bool:
    """Whether another node has all that this one alone may have acknowledged: it used no bucket that the others were
    not told of."""
    kept = record.buckets.values()
    return record.replaced and bool(kept) and all(map(_is_kept_twice, kept))


def _is_kept_twice(how: str) -> bool:
    """Whether a node keeps a bucket so that others have copies."""
    return how.endswith(TWICE)


class Succession:
    """See the module's header. Of the map that follows `map`, at one moment."""

    def __init__(self, seen: Seen, now_s: float, map: Map) -> None:
        self._seen, self._now_s = seen, now_s
        self._nodes, self._alive = seen.nodes, seen.alive
        covered, lost = min([map.due, *(self._covered(node) for node in map.holders)]), self._losses(map)
        self._reasons = {ALIVE + node for node, loss in lost.items() if loss.epoch > map.epoch}
        self._before = map
        self._known = msgspec.structs.replace(map, covered=covered if covered >= map.held else map.covered, lost=lost)

    def decide(self) -> Next | None:
        """The map that follows; None if this one stays."""
        before, known = self._before, self._known
        owners = self._owners()
        past = tuple(each for each in before.past if not self._is_over(each))
        holders = self._holders(owners)
        deposed = tuple(node for node in before.deposed if node not in holders and self._stays_deposed(node))
        held, leaving, deposed_at = before.held, self._leaving(holders), before.deposed_at
        given_up = {node: epoch for node, epoch in before.given_up.items() if self._is_known_as_gone(node)}
        if holders == before.holders and leaving == before.leaving and (gone := self._taken_over()):
            holders = {node: weight for node, weight in holders.items() if node != gone}
            held = deposed_at = before.epoch + 1
            deposed = (*deposed, gone)  # the others keep what they had, so nobody is asked
            said = [gone, *sorted(before.holders)][:CHANGES_MAX]  # what the others said of lost copies counts, too
            self._reasons |= {NODES + gone, *(ALIVE + node for node in said)}
        elif holders == before.holders and leaving != before.leaving:
            held = before.epoch + 1
        elif holders != before.holders:
            came = sorted(holders.keys() - before.holders.keys())
            newcomers = tuple(node for node in came if self._released(node) < before.epoch)
            past, held = bounded((*past, Past(before.epoch + 1, before.holders, newcomers))), before.epoch + 1
            if buried := sorted(node for node in before.holders.keys() - holders.keys() if self._has_heirs(node)):
                given_up, deposed_at = given_up | dict.fromkeys(buried, held), held
        elif not self._reasons:
            changed = msgspec.structs.replace(known, past=past, deposed=deposed, given_up=given_up)
            return Next(changed, frozenset()) if changed != before else None
        at_once = owners == before.owners  # whoever holds by a new map asks the others, who must know it too
        changed = Map(
            before.epoch + 1,
            at_once,
            owners,
            before.owners,
            holders,
            past,
            held,
            known.covered,
            deposed,
            known.lost,
            leaving=leaving if leaving in holders else "",
            deposed_at=deposed_at,
            given_up=given_up,
        )
        return Next(changed, frozenset(self._reasons))

    # --- owners ------------------------------------------------------------------------------------------------------
    def _owners(self) -> dict[str, float]:
        """Who owns keys by the next map. Why somebody comes or goes is added to the reasons."""
        owners = dict(self._before.owners)
        for node in sorted({*self._nodes, *owners}):
            record, lives = self._nodes.get(node), node in self._alive
            wanted = record is not None and record.wanted == "active" and 0 < record.weight < math.inf
            if node in owners and not (wanted and lives):
                if wanted and self._now_s < self._seen.missing_s[node] + MISSING_AFTER_S:
                    continue
                del owners[node]
            elif record is not None and wanted and lives and owners.get(node) != record.weight:
                if node not in owners and self._now_s < self._seen.came_or_went_s + JOIN_AFTER_S:
                    continue
                owners[node] = record.weight
            else:
                continue
            self._reasons |= {NODES + node, ALIVE + node}
            if len(self._reasons) >= 2 * CHANGES_MAX:
                break
        return owners

    # --- holders -----------------------------------------------------------------------------------------------------
    def _holders(self, owners: dict[str, float]) -> dict[str, float]:
        """Who holds what only nodes have under the next map. Why one leaves is added to the reasons."""
        known = self._known
        if self._takes_over():  # who went now would take copies along
            gone = {node for node in known.holders if self._is_gone(node)}
            self._reasons |= {NODES + node for node in gone}
            return {node: weight for node, weight in known.holders.items() if node not in gone}
        waits = bool(known.holders) and self._now_s < self._seen.came_or_went_s + HOLDS_AFTER_S
        holders = {
            node: weight
            for node, weight in owners.items()
            if node in known.holders
            or (self._has_forgotten(node) if node in known.deposed else not waits)
            or (node not in known.deposed and self._released(node) >= known.epoch)
        }
        for node, weight in known.holders.items():
            record = self._nodes.get(node)
            leaves = record is None or record.wanted not in ("active", "maintenance")
            if leaves and not hands_over(self._nodes, known, node) and len(self._reasons) < 2 * CHANGES_MAX:
                self._reasons.add(NODES + node)
            else:
                holders.setdefault(node, weight)
        return holders

    def _leaving(self, holders: dict[str, float]) -> str:
        """Who hands over next: one at a time, and nobody while copies are taken over."""
        before = self._known.leaving
        if before and before in holders and hands_over(self._nodes, self._known, before):
            return before
        if self._takes_over():
            return ""
        return next((node for node in sorted(holders) if hands_over(self._nodes, self._known, node)), "")

    def _takes_over(self) -> bool:
        """Whether copies are to become somebody's own still, and all is to be covered after that."""
        return bool((self._known.deposed and not self._known.is_covered) or self._known.bequeaths)

    def _is_gone(self, node: str) -> bool:
        """Whether its operator says that it does not come back."""
        return node not in self._nodes or self._nodes[node].wanted == "gone"

    def _has_heirs(self, node: str) -> bool:
        """Whether it is given up, and others were to keep copies of something that it had."""
        return self._is_known_as_gone(node) and any(map(_is_kept_twice, self._nodes[node].buckets.values()))

    def _is_known_as_gone(self, node: str) -> bool:
        return node in self._nodes and self._nodes[node].wanted == "gone"

    def _has_forgotten(self, node: str) -> bool:
        """Whether a deposed node has no old copies, and whoever took over has acted on it."""
        return self._known.is_covered and self._released(node) >= self._known.held

    def _stays_deposed(self, node: str) -> bool:
        """Not if it is of the cluster no more, nor if it was drained and has forgotten all."""
        record = self._nodes.get(node)
        return record is not None and not (record.wanted == "draining" and self._has_forgotten(node))

    def _is_over(self, past: Past) -> bool:
        """Whether nobody may have keys from then any more. Of a node that is given up others may have them, until they
        were asked: the entry says of which keys."""
        heirs = {*self._before.holders, *self._known.bequeaths}
        return all(
            (self._nodes[node].wanted == "gone" and node not in heirs)
            or node in self._before.deposed
            or self._released(node) >= past.epoch
            for node in (*past.holders, *past.newcomers)
            if node in self._nodes
        )

    # --- taking over -------------------------------------------------------------------------------------------------
    def _losses(self, map: Map) -> dict[str, Loss]:
        """Who lost copies, with what is said for the first time."""
        lost = {node: loss for node, loss in map.lost.items() if node in self._nodes}
        for node in map.holders.keys() & self._alive.keys():
            said, known = self._alive[node], lost.get(node)
            if said.lost and (known is None or (known.incarnation, known.lost) != (said.incarnation, said.lost)):
                lost[node] = Loss(said.incarnation, said.lost, map.epoch + 1)
        return lost

    def _taken_over(self) -> str | None:
        """A holder that is missing, or stands aside, and of which others have all that it alone had."""
        known = self._known
        if not known.held or not known.is_covered or len(known.holders) < 2:
            return None  # `held` is 0 in a map of a release without copies
        missing = [node for node in sorted(known.holders) if self._is_missing(node)]
        others = [node for node in known.holders if node not in missing]
        if any(self._covered(node) < known.due for node in others):
            return None  # it came back without a disk, perhaps, on which the copies were: nobody compares then
        aside = [node for node in others if node == known.leaving and self._alive[node].aside % 2]
        return next((node for node in (*missing, *aside) if may_be_replaced(self._nodes[node])), None)

    def _is_missing(self, node: str) -> bool:
        since_s = self._seen.missing_s.get(node)
        waited_for = since_s is None or self._nodes[node].wanted not in ("active", "draining")  # as in maintenance
        return since_s is not None and not waited_for and self._now_s >= since_s + MISSING_AFTER_S

    def _released(self, node: str) -> int:
        return self._alive.get(node, UNREADABLE).released

    def _covered(self, node: str) -> int:
        return self._alive.get(node, UNREADABLE).covered
