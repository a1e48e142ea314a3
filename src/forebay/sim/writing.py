"""The world of writers: nothing acknowledged is lost, whatever stops, and all of it reaches the backend.

Theory. Writers put and delete keys of three buckets: one whose writes are durable, one whose writes ask for memory
only, and one into which somebody else writes too. Misfortune: bad weather (with answers that are lost after the backend
has acted, and changes that land long after they were given up), a full disk, slow disks, stops of the process and of
the machine at any event. After `ticks` events misfortune and work end; then all that is owed must arrive, and the
backend must hold what the writers were told.

What lands late does so while its key owes something, and the node still knows that it was sent: after that nobody can
keep it from landing or know whose it is (docs/semantics.md).

What a key may hold. A writer owns its keys and changes one at a time, so it is what was acknowledged last or any change
tried since. A machine stop takes a `memory` bucket back to something that was written before, whole; where somebody
else writes, a value that was acknowledged is at the key or beside it, unless a later one was.

Invariant. A finding is raised as `Finding`; everything random comes from the schedule's dice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.core.machines.sent_bodies import Sent
from forebay.sim.backend import Name, SimBackend, Weather
from forebay.sim.checks import Finding
from forebay.sim.disk import SimDisk
from forebay.sim.owing import BUCKETS, OwingNode, show
from forebay.sim.schedule import Schedule

KEYS = 4
NOTHING = Sent()
DRAIN_EVENTS_MAX = 60_000


@dataclass(slots=True)
class Ledger:
    """What one key may hold: everything ever written to it, and from where on it may be."""

    tried: list[bytes | None] = field(default_factory=lambda: [None])
    certain: int = 0  # the last acknowledged one: nothing before it may be seen
    busy: bool = False
    told: list[bytes] = field(default_factory=list)  # acknowledged bodies, for keys that others write too

    def may_hold(self, data: bytes | None) -> bool:
        return data in self.tried[self.certain :]


class WritingWorld:
    """One simulated world of writers. `run()` once."""

    def __init__(self, seed: int, ticks: int, echo: Callable[[str], None] | None = None) -> None:
        self.schedule = Schedule(seed, echo)
        self.ticks, self.working, self.written = ticks, True, 0
        self.backend = SimBackend(self.schedule)
        self.disk = SimDisk(self.schedule)
        self.node = OwingNode(self.schedule, self.disk, self.backend)
        self.backend.may_land = self._may_land
        self.forgot_us: dict[Name, int] = {}  # when the node lost what it knew of changes on their way
        self.ledgers = {(bucket, f"k{n}"): Ledger() for bucket in BUCKETS for n in range(KEYS)}
        self.outcomes: dict[str, int] = {}
        self.stranger: set[Name] = set()

    # --- the run -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Raise what is found."""
        for actor in (self._writer, self._writer, self._writer, self._reader, self._stranger):
            self.schedule.after(0, actor)
        self.schedule.after(10_000, self._misfortune)
        while self.schedule.events < self.ticks:
            self.schedule.step()
        self._calm()
        self._arrived()
        for machine in (False, True):
            self._stop(machine)
            self.node.start(trusted=not machine)
            self._drain()
            self._nothing_left()
            self._arrived()

    def _calm(self) -> None:
        self.working = False
        self.backend.weather = Weather()
        self.disk.full = False
        self.node.pause_us = 150
        self.schedule.log("world", "calm", "-")
        while not self.node.up:
            self.schedule.step()
        self._drain()
        self._nothing_left()

    def _drain(self) -> None:
        bound = self.schedule.events + DRAIN_EVENTS_MAX
        while self.schedule.step():
            if self.schedule.events > bound:
                raise Finding(f"something still goes on {DRAIN_EVENTS_MAX} events after all work ended")
        owing = sorted(self.node.owing())
        if owing:
            raise Finding(f"{show(owing[0])} is owed and nothing is done about it")
        if any(len(queue) or queue.flying for queue in self.node.queues.values()):
            raise Finding("a queue owes what no note says")

    def _nothing_left(self) -> None:
        named = {kept.path for kept in self.node.visible.values() if kept.path}
        named |= {owed.path for owed in self.node.durable.values() if owed.path}
        rubbish = [path for path in self.disk.list() if path not in named]
        if rubbish:
            raise Finding(f"files are left over: {rubbish}")
        if self.node.lost:
            raise Finding(f"{show(self.node.lost[0])} is lost")

    def _arrived(self) -> None:
        """The backend has what the writers were told."""
        for name, ledger in sorted(self.ledgers.items()):
            _, there = self.backend.present(name)
            if name not in self.stranger:
                if not ledger.may_hold(there):
                    raise Finding(f"the backend has {_said(there)} of {show(name)}, which it may not")
            elif ledger.told:
                beside = [
                    data for other, data in self.backend.all_of(name[0]) if other.startswith(f"{name[1]}.conflict-")
                ]
                newest = ledger.told[-1]
                later = ledger.tried[ledger.certain + 1 :]
                overwritten = self.backend.ever_held(name, newest)
                if not (overwritten or newest in beside or later or ledger.tried[ledger.certain] is None):
                    raise Finding(f"{_said(newest)} of {show(name)} was acknowledged and is nowhere")
            held = self.node.read(name)
            if held != there and name not in self.stranger:  # a copy of ours may be older than what a stranger wrote
                raise Finding(f"{show(name)} reads as {_said(held)} when the backend has {_said(there)}")
        self.schedule.log("world", "arrived", "-")

    # --- actors ------------------------------------------------------------------------------------------------------
    def _again(self, actor: Callable[[], None], typical_us: int) -> None:
        if self.working:
            self.schedule.after(self.schedule.delay_us(typical_us), actor)

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def _writer(self) -> None:
        name = sorted(self.ledgers)[self.schedule.between(0, len(self.ledgers) - 1)]
        ledger = self.ledgers[name]
        if ledger.busy or not self.node.up:
            self._again(self._writer, 1000)
            return
        self.written += 1
        data = None if self.schedule.happens(0.4) else self.schedule.dice.randbytes(self._size())
        ledger.tried.append(data)
        ledger.busy = True
        at = len(ledger.tried) - 1
        self.schedule.log("writer", "write" if data is not None else "delete", show(name), f"n={at} {_said(data)}")

        def done(ok: bool) -> None:
            ledger.busy = False
            self._count("acknowledged" if ok else "refused")
            self.schedule.log("writer", "acked" if ok else "failed", show(name), f"n={at}")
            if ok:
                ledger.certain = at
                ledger.told += [data] if data is not None else []

        self.node.change(name, data, done)
        self._again(self._writer, 2500)

    def _size(self) -> int:
        return self.schedule.dice.choice((1, 5, 16, 17, 64, 200, 300))

    def _reader(self) -> None:
        if self.node.up:
            name = sorted(self.ledgers)[self.schedule.between(0, len(self.ledgers) - 1)]
            held = self.node.read(name)
            if name not in self.stranger and not self.ledgers[name].may_hold(held):
                raise Finding(f"{show(name)} reads as {_said(held)}, which it may not")
            self._count("read")
        self._again(self._reader, 1500)

    def _stranger(self) -> None:
        """Somebody else writes into the shared bucket."""
        if self.working and self.schedule.happens(0.5):
            name = ("shared", f"k{self.schedule.between(0, KEYS // 2 - 1)}")
            self.stranger.add(name)
            self.backend.put(name, f"s{self.written}-{self.schedule.events}", self.schedule.dice.randbytes(20))
            self.schedule.log("owner", "write", show(name))
        self._again(self._stranger, 30_000)

    def _may_land(self, name: Name, since_us: int) -> bool:
        return name in self.node.notes and since_us > self.forgot_us.get(name, -1)

    # --- misfortune --------------------------------------------------------------------------------------------------
    def _misfortune(self) -> None:
        if not self.working:
            return
        schedule, next_us = self.schedule, 12_000
        draw = schedule.dice.random()
        if draw < 0.35:
            kind = schedule.dice.choice(("fair", "showers", "outage", "forgetful", "throttled", "haze", "haze"))
            self.backend.weather = {
                "fair": Weather(),
                "showers": Weather(refuse=0.2, lose=0.1),
                "outage": Weather(refuse=1.0),
                "forgetful": Weather(lose=0.5),
                "throttled": Weather(busy=0.4),
                "haze": Weather(refuse=0.1, lose=0.1, hang=0.6),
            }[kind]
            schedule.log("misery", "weather", "-", kind)
        elif draw < 0.5:
            self.disk.full = not self.disk.full and schedule.happens(0.5)
            schedule.log("misery", "disk", "-", "full" if self.disk.full else "free")
        elif draw < 0.6:
            self.node.pause_us = schedule.dice.choice((30, 150, 3000))
        elif draw < 0.7:
            self.disk.settle()
            schedule.log("misery", "writeback", "-")
        elif self.node.up:
            machine = schedule.happens(0.5)
            self._stop(machine)
            schedule.after(schedule.delay_us(3000), self.node.start, not machine)
        schedule.after(schedule.delay_us(next_us), self._misfortune)

    def _stop(self, machine: bool) -> None:
        for name in self.ledgers:
            if self.node.late.get(name, NOTHING).late or (machine and not BUCKETS[name[0]]):
                self.forgot_us[name] = self.schedule.now_us
        self.node.stop(machine)
        for name, ledger in self.ledgers.items():
            ledger.busy = False
            if machine and not BUCKETS[name[0]]:
                ledger.certain = 0  # acknowledged from memory: any earlier one may be back
                ledger.told.clear()


def _said(data: bytes | None) -> str:
    return "nothing" if data is None else f"{len(data)} bytes {data[:4].hex()}"
