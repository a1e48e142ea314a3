"""A cluster in virtual time: many memberships and one store, in a world where everything that can go wrong does.

Theory. Nodes run the product's machines (`core/cluster/`): lease, mirror, membership. What is made up is the world: a
heap of moments, and messages between nodes and the store that are late, lost, and cut off in one direction or both.
Processes crash, are paused, and start again; clocks run at different rates; the store stands still; an operator drains
nodes, puts them into maintenance, changes their size and starts a second process under a name that lives. Somebody acts
on keys all the time, wherever a node says that it may.

The store is linearizable (it is etcd's job, not ours), and ends leases at or after their time, never before.

Invariants, which the world checks. (1) What was acted on and acknowledged for one key by two processes never overlaps
in time. (2) When one process acknowledges, no other may act on the key. (3) A key's epochs never fall, from the end of
an act to the beginning of another. (4) When trouble has ended, all nodes that are wanted own their share by one active
map within QUIET_S, and every key has a node that may act. (5) No node goes that owes something.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from forebay.core.cluster import membership
from forebay.core.cluster.lease import LeaseHold, Take
from forebay.core.cluster.membership import (
    Answered,
    Due,
    Membership,
    Owes,
    Released,
    Right,
    Settle,
    Settled,
    StandAside,
    StoodAside,
    Told,
    Write,
)
from forebay.core.cluster.mirror import Mirror
from forebay.core.cluster.records import NODES, PREFIX, TWICE, NodeRecord, Wanted, wanted_record
from forebay.core.cluster.replication import Copy, Kept, Name, Sent
from forebay.core.errors import ForebayError, NotFound
from forebay.sim.agreed import Agreed
from forebay.sim.history import ABSENT, GONE

TTL_S = 10.0
PATIENCE_S = 3.0  # of a process with the store
LIST_S = 2.0  # a copy is made anew at least so often
BUCKET = "corpus"
KEYS = tuple(f"key-{number}" for number in range(12))
TROUBLE_S = 150.0
QUIET_S = 60.0
WORLD_S = TROUBLE_S + QUIET_S
TAIL_LINES = 40


@dataclass(eq=False)
class Process:
    """One process of a node: its machines, and what it has under way. It knows its own clock alone."""

    node: str
    incarnation: str
    rate: float
    membership: Membership
    mirror: Mirror = field(default_factory=Mirror)
    dead: bool = False
    paused_until_s: float = 0.0
    starved_s: float = 0.0  # how long it may wait for a processor whenever it wants one
    deaf: bool = False  # nothing that is sent to it arrives
    mute: bool = False  # nothing that it sends arrives
    awkward: Callable[[Process], None] | None = None  # what happens to it when it next waits for an answer
    listing: bool = False
    listed_s: float = -1e9
    acts: dict[int, tuple[str, Right, float]] = field(default_factory=dict)  # what is under way, and since when
    settling: list[tuple[int, set[int]]] = field(default_factory=list)  # epochs, and the acts that must end before

    def clock_s(self, now_s: float) -> float:
        return now_s * self.rate + 1000.0

    def may(self, now_s: float, key: str) -> Right | None:
        return None if self.dead else self.membership.right(self.clock_s(now_s), BUCKET, key)


class Body(NamedTuple):
    """What a node owes the backend: the version that it follows there, and earlier bodies that may have been sent."""

    label: str
    version: int
    based_on: int
    tried: frozenset[str]

    @property
    def shown(self) -> str:
        return ABSENT if self.label.startswith(GONE) else self.label


@dataclass
class Disk:
    """What outlives a node's process."""

    owed: dict[Name, Body] = field(default_factory=dict)
    copies: dict[Name, tuple[Copy, Body]] = field(default_factory=dict)
    away: dict[Name, tuple[Copy, Body]] = field(default_factory=dict)  # until it starts again, and perhaps old then
    doubted: bool = False  # what was away, or may be lost, is not made again yet
    number: int = 0

    def draw(self) -> int:
        self.number += 1
        return self.number


class Ledgers:
    """What a process knows besides its membership."""

    def __init__(self, node: str, disk: Disk, copies: int) -> None:
        self.disk = disk
        self.kept = Kept(node, {name: copy for name, (copy, _) in disk.copies.items()})
        self.sent = Sent(node, disk.draw, lambda bucket: copies)
        self.gone: set[Name] = set()  # copies whose disk has failed, or was away
        self.fetching: set[Name] = set()
        self.claimed: set[Name] = set()
        self.locked: set[Name] = set()
        self.comparing = self.collecting = False
        self.holders: object = None


class Cluster:
    """One world. `run` is the story; it raises what it finds. `starving`: nothing goes wrong, but a process that waits
    up to so long for each turn of its processor."""

    def __init__(self, seed: int, echo: Callable[[str], object] | None = None, starving_s: float = 0.0) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.lines: list[str] = []
        self.acknowledged = 0
        self.epochs: set[int] = set()  # of maps with other owners than before
        self._echo = echo
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._agreed = Agreed()
        self._agreed.told.append(lambda changes: self._poke())
        self._ends_s: dict[int, float] = {}
        self._store_until_s = 0.0  # it stands still until then
        self._stormy, self._starving_s = starving_s == 0.0, starving_s
        self._living: dict[str, Process] = {}  # the process of each node; twins are not in it
        self.processes: list[Process] = []
        self._last: dict[str, tuple[float, Process, int]] = {}  # of each key: when the last act ended, whose it was
        self._owes = {f"n{number}" for number in range(self.chance.randint(3, 6))}
        self._names = sorted(self._owes)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:12]

    def run(self) -> None:
        self.begin()
        self._at(5.0, self._trouble)
        self._at(0.5, self._somebody_acts)
        self._until(20.0)
        self._living[self._names[-1]].starved_s = self._starving_s
        self._until(TROUBLE_S)
        self._calm()
        self._until(WORLD_S)
        self._check_quiet()

    def begin(self) -> None:
        """Start every node, within seconds of each other."""
        for name in self._names:
            self._at(self.chance.uniform(0.0, 3.0), partial(self._start, name))

    def rehomed_s(self) -> float:
        """Let a node crash for good; how long it takes until every key has a home again that may act."""
        self._until(20.0)
        self._living[self.chance.choice(self._names)].dead = True
        began_s = self.now_s
        while any(len(self._acting(key)) != 1 for key in KEYS):
            self._until(self.now_s + 0.05)
        return self.now_s - began_s

    def _acting(self, key: str) -> list[str]:
        return [process.node for process in self._living.values() if process.may(self.now_s, key)]

    # --- time --------------------------------------------------------------------------------------------------------
    def _at(self, after_s: float, what: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + after_s, self._count, what))

    def _until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] <= end_s:
            self.now_s, _, what = heapq.heappop(self._heap)
            what()
        self.now_s = end_s

    def _tell(self, who: str, what: str) -> None:
        self.lines.append(f"{self.now_s:9.3f} {who:<8} {what}")
        if self._echo is not None:
            self._echo(self.lines[-1])

    # --- processes ---------------------------------------------------------------------------------------------------
    def _start(self, node: str, *, twin: bool = False) -> Process:
        incarnation = f"{node}.{len(self.processes)}"
        record = NodeRecord(
            f"{incarnation}:9400", self._weight(node), buckets=self._buckets(), replaced=True, hands_over=True
        )
        process = Process(
            node,
            incarnation,
            self.chance.choice([0.6, 0.95, 1.0, 1.05, 1.6]),
            Membership(node, incarnation, record, LeaseHold(TTL_S)),
        )
        self.processes.append(process)
        if not twin:
            self._living[node] = process
        self._tell(incarnation, f"starts, its clock runs at {process.rate}")
        self._beat(process)
        return process

    def _buckets(self) -> dict[str, str]:
        """How nodes say that they keep their buckets."""
        return {"back": TWICE}

    def _weight(self, node: str) -> float:
        return float(self.chance.choice([1, 2, 3])) * 1e12

    def _within(self, process: Process, what: Callable[[], object]) -> None:
        """Run it in the process: when its pause is over and it gets a processor, and not if it is dead."""
        if process.paused_until_s > self.now_s:
            self._at(process.paused_until_s - self.now_s, partial(self._within, process, what))
        elif process.starved_s and not process.dead:
            self._at(self.chance.uniform(0.0, process.starved_s), partial(self._run, process, what))
        else:
            self._run(process, what)

    def _run(self, process: Process, what: Callable[[], object]) -> None:
        if not process.dead:
            what()

    def _beat(self, process: Process) -> None:
        hold, now_s = process.membership.hold, process.clock_s(self.now_s)
        if hold.due_s <= now_s:
            self._renew(process)
        if not process.listing and self.now_s - process.listed_s > LIST_S:
            self._list(process)
        self._step(process, Owes(self._owed_at(process.node)))
        self._tend(process)
        pause_s = membership.LOOK_S * self.chance.uniform(0.5, 1.5)
        self._at(pause_s, lambda: self._within(process, lambda: self._beat(process)))

    def _owed_at(self, node: str) -> int:
        """How many bytes would be lost with the node."""
        return 1 if node in self._owes else 0

    def _tend(self, process: Process) -> None:
        """What it does at each beat: it has nothing that is at home elsewhere."""
        if process.membership.map is not None:
            self._step(process, Released(process.membership.map.epoch))

    def _step(self, process: Process, event: membership.Event) -> None:
        machine = process.membership
        before = machine.map
        for effect in machine.step(process.clock_s(self.now_s), event):
            match effect:
                case Settle(epoch):
                    process.settling.append((epoch, set(process.acts)))
                case StandAside(turn):
                    self._stand_aside(process, turn, self.now_s)
                case Write():
                    self._send(process, effect)
        machine.check()
        if machine.map is not before and machine.map is not None:
            if machine.map.owners != machine.map.former:
                self.epochs.add(machine.map.epoch)
            owners = ",".join(machine.map.owners)
            self._tell(process.incarnation, f"knows map {machine.map.epoch} {machine.map.active} {owners}")
        self._settle(process)

    def _stand_aside(self, process: Process, turn: int, since_s: float) -> None:
        """Nothing here asks whether it may answer for what others would take over."""
        self._step(process, StoodAside(turn))

    def _settle(self, process: Process) -> None:
        while process.settling and not process.settling[0][1] & set(process.acts):
            self._step(process, Settled(process.settling.pop(0)[0]))

    # --- between processes and the store -----------------------------------------------------------------------------
    def _ask(self, process: Process, question: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """Ask the store; `answered` gets what it returns, or the error, or None when the patience is over."""
        waiting = [True]

        def done(answer: Any) -> None:
            if waiting:
                waiting.clear()
                answered(answer)

        def arrives() -> None:
            if self._store_until_s > self.now_s:
                self._at(self._store_until_s - self.now_s + self._delay_s(), arrives)
                return
            try:
                answer = question()
            except ForebayError as error:
                answer = error
            if not process.deaf and not self._lost():
                self._at(self._delay_s(), lambda: self._within(process, lambda: done(answer)))

        if not process.mute and not self._lost():
            self._at(self._delay_s(), arrives)
        self._at(PATIENCE_S, lambda: self._within(process, lambda: done(None)))
        if process.awkward is not None:
            self._at(self.chance.uniform(0.0, 0.03), partial(process.awkward, process))
            process.awkward = None

    def _delay_s(self) -> float:
        if self._stormy and self.chance.random() < 0.05:
            return self.chance.uniform(0.0, 6.0)
        return self.chance.uniform(0.0005, 0.02)

    def _lost(self) -> bool:
        return self._stormy and self.chance.random() < 0.03

    def _renew(self, process: Process) -> None:
        hold = process.membership.hold
        asked = hold.ask(process.clock_s(self.now_s))

        def question() -> int:
            lease = self._agreed.grant() if isinstance(asked, Take) else asked.lease
            self._agreed.check_lease(lease)
            self._ends_s[lease] = self.now_s + TTL_S
            self._at(TTL_S + self.chance.uniform(0.0, 1.0), lambda: self._end(lease))
            return lease

        def answered(answer: Any) -> None:
            now_s = process.clock_s(self.now_s)
            if isinstance(answer, NotFound):
                self._tell(process.incarnation, "its lease is gone")
                hold.gone(now_s)
            elif not isinstance(answer, int):
                hold.failed(now_s)
            elif isinstance(asked, Take):
                hold.taken(now_s, answer, TTL_S)
            else:
                hold.renewed(now_s)
            self._step(process, Due())

        self._ask(process, question, answered)

    def _end(self, lease: int) -> None:
        if lease in self._ends_s and self._ends_s[lease] <= self.now_s:
            del self._ends_s[lease]
            self._agreed.end(lease)

    def _send(self, process: Process, write: Write) -> None:
        def answered(answer: Any) -> None:
            revision = answer if isinstance(answer, int) else -1 if answer is None else 0
            if revision > 0:
                self._tell(process.incarnation, f"wrote {', '.join(write.changes)}")
            self._step(process, Answered(revision))

        self._ask(process, lambda: self._agreed.transact(write.changes, write.when, write.lease), answered)

    def _poke(self) -> None:
        """Something changed: whoever can be told makes its copy anew."""
        for entry in self._agreed.under(NODES):
            gone = msgspec.json.decode(entry.value, type=NodeRecord).wanted == "gone"
            assert not gone or not self._owed_at(entry.key.removeprefix(NODES)), f"{entry.key} went, and owes something"
        for process in self.processes:
            if not process.dead and not process.deaf and not self._lost():
                self._at(self._delay_s(), partial(self._within, process, partial(self._list, process)))

    def _list(self, process: Process) -> None:
        if process.listing:
            process.listed_s = -1e9  # again, at the next beat
            return
        process.listing, process.listed_s = True, self.now_s

        def answered(answer: Any) -> None:
            process.listing = False
            if isinstance(answer, tuple):
                changes = process.mirror.listed(*answer)
                self._step(process, Told(tuple(changes), process.mirror.revision))

        self._ask(process, lambda: (self._agreed.under(PREFIX), self._agreed.revision), answered)

    # --- acting ------------------------------------------------------------------------------------------------------
    def _somebody_acts(self) -> None:
        self._at(self.chance.expovariate(10.0), self._somebody_acts)
        key = self.chance.choice(KEYS)
        for process in self.processes:
            self._within(process, partial(self._act, process, key))

    def _act(self, process: Process, key: str) -> None:
        right = process.may(self.now_s, key)
        if right is None:
            return
        self._count += 1
        act = self._count
        process.acts[act] = key, right, self.now_s
        takes_s = self.chance.uniform(0.0, 3.0) if self.chance.random() < 0.2 else self.chance.uniform(0.0, 0.1)
        self._at(takes_s, lambda: self._within(process, lambda: self._acknowledge(process, act)))

    def _acknowledge(self, process: Process, act: int) -> None:
        key, right, began_s = process.acts.pop(act)
        if process.membership.still(process.clock_s(self.now_s), right):
            self.acknowledged += 1
            ended_s, last, epoch = self._last.get(key, (-1.0, process, 0))
            assert last is process or ended_s <= began_s, (
                f"{process.incarnation} acted on {key} from {began_s:.3f} on, {last.incarnation} until {ended_s:.3f}"
            )
            assert right.epoch >= epoch or began_s < ended_s, (
                f"{key} was acted on by epoch {epoch}, now by {right.epoch}"
            )
            self._last[key] = self.now_s, process, right.epoch
            for other in self.processes:
                if other is not process and other.may(self.now_s, key) is not None:
                    raise AssertionError(f"{process.incarnation} and {other.incarnation} may both act on {key}")
        self._settle(process)

    # --- trouble -----------------------------------------------------------------------------------------------------
    def _trouble(self) -> None:
        if not self._stormy:
            return
        self._at(self.chance.expovariate(0.4), self._trouble)
        process = self._living[self.chance.choice(self._names)]
        trouble = self.chance.choice(
            [self._pause, self._pause, self._crash, self._crash, self._cut, self._cut, self._stand_still, self._twin]
            + [self._starve] * 2
            + [self._operate] * 4
        )
        if trouble in (self._pause, self._crash) and self.chance.random() < 0.7:
            process.awkward = trouble
        else:
            trouble(process)

    def _pause(self, process: Process) -> None:
        process.paused_until_s = self.now_s + self.chance.choice([0.5, 4.0, 8.0, 20.0]) * self.chance.uniform(0.5, 1.5)
        self._tell(process.incarnation, f"is paused until {process.paused_until_s:.3f}")

    def _starve(self, process: Process) -> None:
        process.starved_s = self.chance.choice([0.0, 0.3, 3.0])
        self._tell(process.incarnation, f"waits up to {process.starved_s} s for a processor")

    def _crash(self, process: Process) -> None:
        if process.dead:
            return
        process.dead = True
        self._tell(process.incarnation, "crashes")
        self._at(self.chance.choice([0.1, 5.0, 25.0]), lambda: self._start_again(process.node))

    def _start_again(self, node: str) -> None:
        if self._living[node].dead:
            self._start(node)

    def _cut(self, process: Process) -> None:
        process.mute, process.deaf = self.chance.choice([(True, False), (False, True), (True, True)])
        self._tell(process.incarnation, f"is cut off: mute {process.mute}, deaf {process.deaf}")
        self._at(self.chance.choice([1.0, 6.0, 15.0]), lambda: self._mend(process))

    def _mend(self, process: Process) -> None:
        process.mute = process.deaf = False

    def _stand_still(self, process: Process) -> None:
        self._store_until_s = self.now_s + self.chance.choice([1.0, 4.0, 12.0])
        self._tell("store", f"stands still until {self._store_until_s:.3f}")

    def _twin(self, process: Process) -> None:
        """A second process under the name."""
        twin = self._start(process.node, twin=True)
        self._at(self.chance.uniform(5.0, 20.0), lambda: setattr(twin, "dead", True))

    def _operate(self, process: Process) -> None:
        wanted: Wanted = self.chance.choice(["draining", "maintenance", "active", "active"])
        self._want(process.node, wanted)
        if wanted == "draining" and self.chance.random() < 0.5:
            self._owes.discard(process.node)

    def _want(self, node: str, wanted: Wanted) -> None:
        entry = self._agreed.entries.get(NODES + node)
        if entry is not None:
            self._agreed.transact({entry.key: wanted_record(entry.value, wanted)}, {entry.key: entry.revision})
            self._tell("operator", f"wants {node} {wanted}")

    # --- the end -----------------------------------------------------------------------------------------------------
    def _calm(self) -> None:
        self._stormy, self._store_until_s = False, self.now_s
        self._tell("world", "is calm")
        for process in self.processes:
            process.mute = process.deaf = False
            process.starved_s = 0.0
            process.paused_until_s = min(process.paused_until_s, self.now_s)
        for node in self._names:
            self._start_again(node)
            self._want(node, "active")
        for process in self.processes:
            process.dead = process.dead or self._living[process.node] is not process

    def _check_quiet(self) -> None:
        known = self._living[self._names[0]].membership.map
        for process in self._living.values():
            assert process.membership.map == known, f"{process.incarnation} knows another map than {self._names[0]}"
        assert known is not None, "there is no map"
        assert known.active, f"map {known.epoch} was never made active"
        assert sorted(known.owners) == self._names, f"{sorted(known.owners)} own keys, {self._names} are wanted"
        for process in self._living.values():
            assert {process.membership.state(node) for node in self._names} == {"active"}
        for key in KEYS:
            assert len(self._acting(key)) == 1, f"{self._acting(key)} may act on {key}"
        assert self.acknowledged > 100, "hardly anybody could act"
