"""What only one node has lies on a second one: what may be acknowledged, what a copy is worth, when one may go.

Theory. The node that acts on a key sends what it is about to acknowledge to the next holder in the key's order
(`Map.seconds`): the home, if the actor were gone. So a node that is taken over needs no search: each of its keys is at
home where its copy is. Two ledgers, on every node: `Sent` of what it has others keep, `Kept` of what it keeps for them.
A copy is no object: nobody reads or lists it until the actor is deposed. Then its keeper makes it its own, and goes on.

*A write* is numbered, kept by the second, committed here, and acknowledged, in this order. Nobody can read here what
would be gone with this node. If the holders changed meanwhile it is sent again, to whoever is second now.

*A fence.* Whoever keeps a copy goes by the same `held` as who sends it, or refuses. Who takes over knows a later map by
then: nothing that a deposed node sends is kept, and so nothing that it writes is acknowledged.

*Clearing.* When a backend has a body (or a deletion), the copy goes first and then what the actor knows of it. Cut in
between, the actor flushes again. The other way round a copy could outlive its truth, and come back as a newer one.

*Late messages.* A number that was cleared, or lies below what was compared, is never kept again (`_floors`). They are
forgotten when the holders change, since what was sent before that is refused for its `held`.

*Comparing.* With each other holder, after each change of holders, each start of either, each sending that failed, and
when the other has lost copies (its disk failed; `Map.lost` says so to all),
the actor goes through its list: what is not on it leaves, what is missing or of another version is sent. A copy of
another version stays until then: the actor may be gone before it has sent the right one. Writes that are under way
(`busy`) are left alone where they belong: they may be kept and not committed yet. When they have ended, they are
compared too: what was kept of them may be gone since. When all are compared the node says that it is `covered`.
What a node keeps as a former second stays until all others have been sent what they lack: it is the only other copy
until the new one has it. What is cleared meanwhile is cleared there too, if it answers (`strays`).

*Given up.* Of a node that is lost and was not covered, whoever is home may have no copy, and others may (`bequeaths`).
It asks them all first, and says nothing of such a key before that.

*Gone.* Copies whose disk failed, or that rotted, stay in the ledger: whoever keeps them says nothing of such a key if
its actor is deposed. One that handed over, or came back, still has them until all is covered, and is asked for them.

*Back.* What the actor lost while it lives (`node/engine/returns.py`) it may ask for. Of two copies of a key the one of
the greater version counts: a former second keeps its own until lists are compared.

Rejected: a quorum of copies with a log (consensus is etcd's; one second under a lease and a fence suffices for one
failure); copies noted with the object (each change of holders would rewrite every record); the epoch of the map as the
fence (each join of a node that holds nothing would send everything anew).

The names of what is kept are in order, by actor: 10^6 copies are looked through in pieces (2,000 names: 1 ms), and who
has nothing to do with them does not look at them.

Invariants. (1) While `Map.is_covered`, for each key that the actor owes or alone has, its second keeps the
same version, or one that is being written. (2) A copy is never of a version that the actor has let go of. (3) What is
refused once for its number is refused for ever.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from forebay.core.cluster.records import Map, Presence

Name = tuple[str, str]
Mark = tuple[int, str, int, int]
FLOORS_MAX = 65_536  # numbers of cleared copies; beyond, all lower numbers of the actor count as cleared


class Copy(NamedTuple):
    """Whose copy, the number under which it was sent (of two the greater is later), and which version it is of."""

    actor: str
    number: int
    version: int


class Kept:
    """What this node keeps for others. The shell reads `copies` at its start, and persists a change before it answers.
    Of one process; what an earlier one was sent does not arrive here."""

    def __init__(self, node: str, copies: Mapping[Name, Copy]) -> None:
        self.node = node
        self.copies: dict[Name, Copy] = {}
        self._names: dict[str, list[Name]] = {}  # of each actor, in order
        for name, copy in copies.items():
            self.copies[name] = copy
            self._names.setdefault(copy.actor, []).append(name)
        for names in self._names.values():
            names.sort()
        self._held = 0
        self._known: Map | None = None
        self._spare: set[Name] = set()  # found to be at home elsewhere, by these holders
        self._collected = 0  # by these holders all was asked for that others keep of lost nodes
        self._floors: dict[tuple[str, Name], int] = {}
        self._floor: dict[str, int] = {}  # of each actor, for all its keys

    def follow(self, agreed: Map) -> None:
        """The map that the node knows from now on."""
        self._known = agreed
        if agreed.held != self._held:
            self._held = agreed.held
            self._spare.clear()
            self._floors.clear()
            self._floor.clear()

    def takes(self, agreed: Map, held: int, name: Name, copy: Copy, asked: bool = False) -> bool:
        """Whether to keep it, in the place of what is there; if not, the sender looks at its map, and numbers it anew.
        `held` is the sender's. `asked`: this node asked another keeper for it, since its actor is away, and what is
        here may be gone. Each keeper was sent it under a number of its own, so the version says which is later."""
        there = self.copies.get(name)
        again = there is not None and there.actor == copy.actor  # what is here is gone, or may be old
        acts = copy.actor in agreed.holders or (again and self.acts_anew(agreed, name))
        acts = acts or (asked and copy.actor in agreed.bequeaths and agreed.holder(*name) == self.node)
        if held != agreed.held or not acts or self.node in agreed.deposed:
            return False
        floor = max(self._floor.get(copy.actor, 0), self._floors.get((copy.actor, name), 0))
        if there is not None and there.actor == copy.actor:
            if asked:
                return copy.number > floor and copy.version >= there.version
            floor = max(floor, there.number - 1)  # the same again, whose answer was lost, is fine
        return copy.number > floor

    def keep(self, name: Name, copy: Copy) -> None:
        """It is on disk."""
        there = self.copies.get(name)
        if there is None or there.actor != copy.actor:
            self._remove(name)
            insort(self._names.setdefault(copy.actor, []), name)
        self.copies[name] = copy

    def _remove(self, name: Name) -> None:
        there = self.copies.pop(name, None)
        if there is None:
            return
        names = self._names[there.actor]
        del names[bisect_left(names, name)]
        if not names:
            del self._names[there.actor]

    def has_any(self, bucket: str) -> bool:
        """Whether something of the bucket is kept."""
        return any(self._within(actor, (bucket, ""), _end_of(bucket)) for actor in self._names)

    def _within(self, actor: str, after: Name | None, upto: Name | None, most: int = sys.maxsize) -> list[Name]:
        """Names of the actor's copies after one, up to another."""
        names = self._names.get(actor, [])
        first = bisect_right(names, after) if after is not None else 0
        last = bisect_right(names, upto) if upto is not None else len(names)
        return names[first : min(last, first + most)]

    def clears(self, name: Name, actor: str, number: int) -> bool:
        """The actor has let go of all up to this number: nothing of it is kept any more. Whether something was."""
        self._floors[actor, name] = max(number, self._floors.get((actor, name), 0))
        if len(self._floors) > FLOORS_MAX:
            (old, _), below = next(iter(self._floors.items()))
            self._floor[old] = max(below, self._floor.get(old, 0))
            del self._floors[next(iter(self._floors))]
        there = self.copies.get(name)
        if there is not None and self._took_over(actor, there.actor, name):
            self._remove(name)
            return True
        if there is None or there.actor != actor or there.number > number:
            return False
        self._remove(name)
        return True

    def _took_over(self, actor: str, other: str, name: Name) -> bool:
        """Whether `actor` acts on the key in the place of the other, who was deposed: what is here was a spare copy."""
        known = self._known
        return known is not None and other in known.replaced and actor != other and known.holder(*name) == actor

    def compare(
        self,
        agreed: Map,
        held: int,
        actor: str,
        number: int,
        listed: Mapping[Name, int],
        busy: Collection[Name],
        after: Name | None = None,
        upto: Name | None = None,
        stays: Callable[[Name], bool] = lambda name: False,
    ) -> tuple[list[Name], list[Name]] | None:
        """The list of all that the actor has this node keep (versions by name), when its numbers had come so far; of
        the names `after` and `upto` these, where it is given in pieces. What is missing, and what leaves (`forget` it
        when that is on disk), but for what `stays` says of. None if it was made by another map."""
        if held != agreed.held or actor not in agreed.holders or self.node in agreed.deposed:
            return None
        self._floor[actor] = max(number, self._floor.get(actor, 0))
        dropped = [
            name
            for name in self._within(actor, after, upto)
            if self.copies[name].number <= number and name not in busy and name not in listed and not stays(name)
        ]
        missing = [name for name, version in listed.items() if not self._has(name, actor, version)]
        return missing, dropped

    def of(self, actor: str, bucket: str, after: str, most: int) -> list[tuple[str, int]]:
        """The next keys of a bucket, by name, of which this node keeps the actor's copies, and their versions."""
        names = self._within(actor, (bucket, after), _end_of(bucket), most)
        return [(name[1], self.copies[name].version) for name in names]

    def forget(self, names: Iterable[Name]) -> None:
        """They are on disk no more."""
        for name in names:
            self._remove(name)

    def _has(self, name: Name, actor: str, version: int) -> bool:
        there = self.copies.get(name)
        return there is not None and (there.actor, there.version) == (actor, version)

    def collects(self, agreed: Map) -> bool:
        """Whether others may have copies of lost nodes that are to be this one's, and were not asked yet. Who is at
        home now need not be who had a copy: holders may have come since."""
        return bool(agreed.bequeaths) and self.node in agreed.holders and self._collected != agreed.held

    def collected(self, agreed: Map) -> None:
        """All others were asked, and what they have of lost nodes is here."""
        self._collected = agreed.held

    def is_collected(self, agreed: Map, name: Name) -> bool:
        """Whether nothing of the key may come from others any more."""
        if not self.collects(agreed) or agreed.holder(*name) != self.node:
            return True
        return agreed.earlier(*name).isdisjoint(agreed.bequeaths)

    def taken_over(self, agreed: Map) -> list[Name]:
        """What is this node's own from now on: copies of those who were replaced, but not those found to be spare.
        Nothing at a node that holds none, or was deposed itself: its copies may be old."""
        if not agreed.is_taking_over or self.node not in agreed.holders:
            return []
        names = (name for actor in agreed.replaced for name in self._names.get(actor, ()))
        spare = self._spare if agreed.held == self._held else set[Name]()
        return [name for name in names if name not in spare]

    def is_spare(self, agreed: Map, name: Name) -> bool:
        """Whether another holder is to take the key over, who has a copy too. (A look at all would take seconds.)"""
        if agreed.holder(*name) == self.node:
            return False
        self._spare.add(name)
        return True

    def useless(self, agreed: Map) -> list[Name]:
        """What nobody will take over any more: copies for a node that does not hold, and all of them at such a one. Of
        one that was deposed they leave only when it forgets everything."""
        if self.node in agreed.deposed:
            return []
        if self.node not in agreed.holders:
            return list(self.copies)
        acting = agreed.holders.keys() | set(agreed.replaced if agreed.is_taking_over else ())
        return [name for actor, names in self._names.items() if actor not in acting for name in names]

    def acts_anew(self, agreed: Map, name: Name) -> bool:
        """Whether the copy of a key must be made this node's own before it acts on it."""
        there = self.copies.get(name)
        if there is None or not agreed.is_taking_over:
            return False  # if there is one of a deposed node still, a disk came back with it, and it is old
        return there.actor in agreed.replaced and agreed.holder(*name) == self.node


def _end_of(bucket: str) -> Name:
    return bucket + "\0", ""


class Sent:
    """What others keep for this node. `numbers` draws numbers that grow, over starts of the node too; `copies` says on
    how many nodes what no backend has of a bucket is, with this one."""

    def __init__(self, node: str, numbers: Callable[[], int], copies: Callable[[str], int]) -> None:
        self.node, self.number = node, numbers  # `number`: of the next copy that is sent, or list that is compared
        self._copies = copies
        self._busy: dict[int, Name] = {}
        self._compared: dict[str, Mark] = {}
        self._tidied: dict[str, Mark] = {}
        self._failures: dict[str, int] = {}  # so often nobody knew what a node keeps

    def seconds(self, agreed: Map, name: Name) -> list[str]:
        """Who is to keep what this node alone has of the key."""
        return agreed.seconds(self.node, *name, self._copies(name[0]))

    def begin(self, name: Name) -> int:
        """A write of the key begins; `end` it when it is committed and kept by the holders of then, or `failed`."""
        write = self.number()
        self._busy[write] = name
        return write

    def end(self, write: int) -> None:
        del self._busy[write]

    @property
    def busy(self) -> dict[int, Name]:
        """The writes that are under way."""
        return dict(self._busy)

    def failed(self, second: str) -> None:
        """Nobody knows whether it keeps what was sent: it is compared again, also if it is being compared now."""
        self._failures[second] = self._failures.get(second, 0) + 1

    def mark(self, agreed: Map, alive: Mapping[str, Presence], node: str) -> Mark:
        """By which holders, with which process, after how many failures, and after which loss there (its epoch) a node
        that lives is compared."""
        loss = agreed.lost.get(node)
        since = loss.epoch if loss is not None else 0
        return agreed.held, alive[node].incarnation, self._failures.get(node, 0), since

    def to_compare(self, agreed: Map, alive: Mapping[str, Presence]) -> str | None:
        """The next node to compare lists with: first those that may lack something, then those that may have too much,
        if that may leave."""
        for node in (found := self._others(agreed, alive)):
            if not self.is_compared(agreed, alive, node):
                return node
        for node in found:
            if self._tidied.get(node) != self.mark(agreed, alive, node) and self.may_leave(agreed, alive, node):
                return node
        return None

    def _others(self, agreed: Map, alive: Mapping[str, Presence]) -> list[str]:
        return [node for node in sorted(agreed.holders) if node in alive and node != self.node]

    def is_compared(self, agreed: Map, alive: Mapping[str, Presence], node: str) -> bool:
        """Whether that node, which lives, keeps what it shall, as far as this one knows."""
        return self._compared.get(node) == self.mark(agreed, alive, node)

    def may_leave(self, agreed: Map, alive: Mapping[str, Presence], node: str) -> bool:
        """Whether the node may let go of what it keeps as a former second: everybody else has what is to be there by
        now. Until then that may be the only other copy of what a newcomer is to have."""
        others = agreed.holders.keys() - {self.node, node}
        return others <= alive.keys() and all(self.is_compared(agreed, alive, each) for each in others)

    def strays(self, agreed: Map, alive: Mapping[str, Presence], name: Name) -> list[str]:
        """Who else may keep a copy of the key, as a former second of this node or of one that was given up: this one
        may ask for that again, after a start."""
        found, seconds = self._others(agreed, alive), self.seconds(agreed, name)
        if not agreed.bequeaths:
            found = [node for node in found if self._tidied.get(node) != self.mark(agreed, alive, node)]
        return [node for node in found if node not in seconds] if self.node in agreed.holders else []

    def listed(self, agreed: Map, node: str, owned: Iterable[tuple[Name, int]]) -> tuple[dict[Name, int], set[Name]]:
        """What that node is to keep, of all that this one has alone; and the names of which it may keep more, since
        they are being written. A write that is kept by earlier holders is sent again, so what they keep may leave."""
        listed = {name: version for name, version in owned if node in self.seconds(agreed, name)}
        return listed, {name for name in self._busy.values() if node in self.seconds(agreed, name)}

    def have_ended(self, busy: Iterable[int]) -> bool:
        """Whether none of these writes is under way any more."""
        return not any(write in self._busy for write in busy)

    def compared(self, node: str, mark: Mark, left: bool) -> None:
        """The node keeps all of a list that was made when its mark was this one, and of what was being written then;
        and no more, if what was not on it might leave."""
        self._compared[node] = mark
        if left:
            self._tidied[node] = mark

    def covered(self, agreed: Map, alive: Mapping[str, Presence]) -> bool:
        """Whether all that this node has alone lies on another too, by this map."""
        others = agreed.holders.keys() - {self.node}
        return (
            self.node in agreed.holders
            and others <= alive.keys()
            and all(self.is_compared(agreed, alive, node) for node in others)
        )
