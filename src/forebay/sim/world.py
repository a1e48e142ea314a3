"""A world from a seed: a node, its disk, its backend, people who use it, and everything that can go wrong.

Theory. Actors put themselves into the schedule again and again: readers (whole objects, ranges, in sequence; some
vanish), the owner of the bucket (writes, deletes), a writer of local objects, an operator (pins, quotas, capacity), and
misfortune (bad weather at the backend, full and slow disks, stops of process and machine, rot). After `ticks` events
misfortune and work end, and *liveness* is required: all that is under way ends within a bound, nothing is held, and
every object reads as the backend has it now. Then process and machine are stopped once more and all is read again.

Invariant. Everything random comes from the schedule's dice; nothing depends on hashing, memory addresses or real time.
"""

from __future__ import annotations

from collections.abc import Callable

from forebay.core.errors import ForebayError
from forebay.core.machines.eviction import split_unit, unit_of
from forebay.core.placement import Members
from forebay.core.types import FRESH_IMMUTABLE
from forebay.sim.backend import Name, SimBackend, Weather
from forebay.sim.checks import Finding, Judge
from forebay.sim.disk import SimDisk
from forebay.sim.node import Read, SimNode, show
from forebay.sim.schedule import Schedule
from forebay.sim.store import BLOCK_BYTES, SimStore

FRESHNESS_S = {"fixed": FRESH_IMMUTABLE, "data": 0.06, "live": 0.0, "local": FRESH_IMMUTABLE}
KEYS = {"fixed": 6, "data": 8, "live": 5, "local": 4}
DRAIN_EVENTS_MAX = 60_000


class World:
    """One simulated world. `run()` once."""

    def __init__(self, seed: int, ticks: int, echo: Callable[[str], None] | None = None) -> None:
        self.schedule = Schedule(seed, echo)
        self.ticks = ticks
        self.working = True
        self.reads = self.versions = 0
        schedule = self.schedule
        self.backend = SimBackend(schedule)
        self.disk = SimDisk(schedule)
        self.store = SimStore(schedule, self.disk)
        self.judge = Judge(schedule, self.backend, FRESHNESS_S)
        self.names: list[Name] = [(bucket, f"k{n}") for bucket, keys in KEYS.items() for n in range(keys)]
        self.sizes = {name: self._size() for name in self.names}
        for name in self.names:
            if name[0] != "local":
                self._write(name)
        capacity = int(sum(self.sizes.values()) * schedule.dice.choice((0.15, 0.4, 0.8, 1.5)))
        self.node = SimNode(schedule, self.store, self.backend, FRESHNESS_S, capacity)
        self.members = {f"node-{n}": 1.0 for n in range(4)}
        self.placed = {f"key-{n}": Members(self.members).order("b", f"key-{n}") for n in range(40)}

    def _size(self) -> int:
        draw = self.schedule.dice.random()
        if draw < 0.15:
            return self.schedule.dice.choice((0, 1, 16, 17, 64, 128))
        return self.schedule.between(18, 200) if draw < 0.6 else self.schedule.between(200, 900)

    @property
    def outcomes(self) -> dict[str, int]:
        return self.judge.outcomes

    # --- the run -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Raise what is found."""
        after = self.schedule.after
        for actor in (self._reader, self._reader, self._owner, self._local_writer, self._operator, self._placer):
            after(0, actor)
        after(20_000, self._misfortune)
        while self.schedule.events < self.ticks:
            self.schedule.step()
        self._calm()
        self._audit()
        self._restart_and_audit()

    def _drain(self) -> None:
        """Let everything that is under way end."""
        bound = self.schedule.events + DRAIN_EVENTS_MAX
        while self.schedule.step():
            if self.schedule.events > bound:
                raise Finding(f"something still goes on {DRAIN_EVENTS_MAX} events after all work ended")
        node = self.node
        stuck = [read for read in node.reads.values() if not read.answered]
        if stuck:
            raise Finding(f"reads {[read.number for read in stuck]} are never answered: {show(stuck[0].name)}")
        if node.all_flights:
            raise Finding(f"the flight of {show(node.all_flights[0].name)} never ends")
        if self.store.busy or self.store.leases or self.store.unpunched:
            raise Finding("a plan, a lease or a hole is left over when all is quiet")
        node.make_room()
        while self.schedule.step():
            pass
        node.machine.check()
        self._compare_books()

    def _compare_books(self) -> None:
        """The eviction machine counts exactly what the index lists, and that is not too much."""
        listed = {
            unit_of(record.object_id, block): min(BLOCK_BYTES, record.size_bytes - block * BLOCK_BYTES)
            for record in self.store.clean.values()
            for block in (sorted(record.blocks) if record.path else (0,))
        }
        counted = self.node.machine
        for unit in listed:
            if unit not in counted:
                raise Finding(f"object {split_unit(unit)} is listed, but eviction does not count it")
        if len(counted) != len(listed) or counted.used_bytes != sum(listed.values()):
            raise Finding(f"eviction counts {counted.used_bytes} bytes, the index lists {sum(listed.values())}")
        if counted.excess_bytes and not self.node.pinned_keys:
            raise Finding(f"{counted.excess_bytes} bytes too much are kept, and nothing is done about it")

    def _calm(self) -> None:
        """Misfortune and work end."""
        self.working = False
        self.backend.weather = Weather()
        self.disk.full = False
        self.store.pause_us = 200
        self.schedule.log("world", "calm", "-")
        while not self.node.up:
            self.schedule.step()
        self._drain()
        self.judge.calm_since_us = self.schedule.now_us

    def _audit(self) -> None:
        """Everything reads as it is."""
        for name in self.names:
            self._read(name, 0, -1)
            self._drain()
        self.schedule.log("world", "audited", "-")

    def _restart_and_audit(self) -> None:
        for machine in (False, True):
            self._stop(machine)
            self.node.start(trusted=not machine)
            rubbish = [path for path in self.disk.list() if path.startswith("tmp/")]
            named = {record.path for record in self.store.records()}
            orphans = [path for path in self.disk.list() if path not in named]
            if rubbish or orphans:
                raise Finding(f"files are left over after a start: {rubbish + orphans}")
            self._drain()
            self._audit()

    # --- actors ------------------------------------------------------------------------------------------------------
    def _again(self, actor: Callable[[], None], typical_us: int) -> None:
        if self.working:
            self.schedule.after(self.schedule.delay_us(typical_us), actor)

    def _reader(self) -> None:
        schedule = self.schedule
        if schedule.happens(0.2):  # somebody who goes by a listing, which may be old
            bucket = schedule.dice.choice(("fixed", "data", "live"))
            keys = self.backend.list_keys(bucket)
            name = (bucket, schedule.dice.choice(keys)) if keys else self.names[0]
        else:
            hot = schedule.happens(0.5)
            name = self.names[schedule.between(0, (len(self.names) - 1) // (3 if hot else 1))]
        size = max(1, self.sizes[name])
        start, end = 0, -1
        if schedule.happens(0.5):
            start = schedule.between(0, size - 1)
            end = start + schedule.between(1, 120)
        reads = schedule.between(1, 4) if end > 0 and schedule.happens(0.3) else 1
        for _ in range(reads):  # in sequence, overlapping in time
            self._read(name, start, end)
            start, end = end, end + 60
        self._again(self._reader, 1500)

    def _read(self, name: Name, start: int, end: int) -> None:
        self.reads += 1
        read = Read(self.reads, name, start, end, self.schedule.now_us, self._answered)
        if self.working and self.schedule.happens(0.05):
            self.schedule.after(self.schedule.delay_us(3000), self.node.give_up, read)
        self.node.read(read)

    def _answered(self, read: Read, error: ForebayError | None) -> None:
        what = f"{read.start}-{read.end} {read.version}" if error is None else error.kind
        self.schedule.log("reader", "done", show(read.name), f"read={read.number} {what}")
        self.judge.judge(read, error)

    def _owner(self) -> None:
        """The bucket's owner writes and deletes, behind our back."""
        name = self.names[self.schedule.between(0, len(self.names) - 1)]
        if name[0] in ("data", "live"):
            if self.schedule.happens(0.15):
                self.backend.delete(name)
                self.schedule.log("owner", "delete", show(name))
            else:
                self._write(name)
        self._again(self._owner, 15_000)

    def _write(self, name: Name) -> None:
        self.versions += 1
        if self.schedule.happens(0.3):
            self.sizes[name] = self._size()
        version = f"v{self.versions}"
        self.backend.put(name, version, self.schedule.dice.randbytes(self.sizes[name]))
        self.schedule.log("owner", "write", show(name), f"{version} bytes={self.sizes[name]}")

    def _local_writer(self) -> None:
        name = ("local", f"k{self.schedule.between(0, KEYS['local'] - 1)}")
        self.versions += 1
        version, data = f"w{self.versions}", self.schedule.dice.randbytes(self.schedule.between(1, 400))
        write = self.judge.writing(name, version, data)

        def done(acknowledged: bool) -> None:
            self.schedule.log("writer", "acked" if acknowledged else "failed", show(name), version)
            if acknowledged:
                write.acknowledged_us = self.schedule.now_us

        self.node.put(name, version, data, done)
        self._again(self._local_writer, 12_000)

    def _operator(self) -> None:
        """Pins, quotas, capacity."""
        schedule, node = self.schedule, self.node
        draw = schedule.dice.random()
        if draw < 0.4:
            name = self.names[schedule.between(0, len(self.names) - 1)]
            pinned = name not in node.pinned_keys and len(node.pinned_keys) < 2
            (node.pinned_keys.add if pinned else node.pinned_keys.discard)(name)
            record = self.store.clean.get(name)
            if record is not None:
                for block in sorted(record.blocks) if record.path else (0,):
                    node.machine.pin(unit_of(record.object_id, block), pinned)
            schedule.log("operator", "pin" if pinned else "unpin", show(name))
        elif draw < 0.7:
            bucket = schedule.dice.choice(("fixed", "data"))
            quota = schedule.between(100, 2000) if schedule.happens(0.6) else None
            (node.quotas.pop(bucket, None) if quota is None else node.quotas.update({bucket: quota}))
            node.machine.set_quota(bucket, quota)
            schedule.log("operator", "quota", bucket, str(quota))
        else:
            node.capacity = max(200, int(node.capacity * schedule.dice.choice((0.6, 1.5))))
            node.machine.set_capacity(node.capacity)
            schedule.log("operator", "capacity", "-", str(node.capacity))
        if node.up:
            node.make_room()
        self._again(self._operator, 40_000)

    def _placer(self) -> None:
        """A member of a cluster comes, goes or changes weight: only what must moves."""
        schedule, before = self.schedule, dict(self.members)
        name = f"node-{schedule.between(0, 7)}"
        if name in self.members and len(self.members) > 1 and schedule.happens(0.6):
            del self.members[name]
        else:
            self.members[name] = schedule.dice.choice((1.0, 2.0, 0.5))
        schedule.log("placer", "members", name, f"{before.get(name, 0)}->{self.members.get(name, 0)}")
        members = Members(self.members)
        for key, old in self.placed.items():
            new = members.order("b", key)
            if [other for other in new if other != name] != [other for other in old if other != name]:
                raise Finding(f"{key} moved from {old} to {new}, though only {name} changed")
            if members.first("b", key) != new[0]:
                raise Finding(f"{key} is owned by {new[0]}, but the table says {members.first('b', key)}")
            self.placed[key] = new
        self._again(self._placer, 60_000)

    # --- misfortune --------------------------------------------------------------------------------------------------
    def _misfortune(self) -> None:
        if not self.working:
            return
        schedule = self.schedule
        draw, next_us = schedule.dice.random(), 20_000
        if draw < 0.35:
            kind = schedule.dice.choice(("fair", "showers", "outage", "slow", "throttled"))
            self.backend.weather = {
                "fair": Weather(),
                "showers": Weather(refuse=0.2, break_off=0.08),
                "outage": Weather(refuse=1.0, break_off=0.3),
                "slow": Weather(latency_us=20_000, chunk_us=3000),
                "throttled": Weather(busy=0.4),
            }[kind]
            schedule.log("misery", "weather", "-", kind)
            next_us = 200_000 if kind == "outage" and schedule.happens(0.3) else next_us
        elif draw < 0.5:
            self.disk.full = not self.disk.full and schedule.happens(0.7)
            schedule.log("misery", "disk", "-", "full" if self.disk.full else "free")
        elif draw < 0.6:
            self.store.pause_us = schedule.dice.choice((50, 200, 5000))
            schedule.log("misery", "disk", "-", f"pause={self.store.pause_us}")
        elif draw < 0.75:
            self.disk.settle()
            schedule.log("misery", "writeback", "-")
        elif self.node.up:
            machine = schedule.happens(0.5)
            self._stop(machine)
            schedule.after(schedule.delay_us(5000), self.node.start, not machine)
        self._again(self._misfortune, next_us)

    def _stop(self, machine: bool) -> None:
        self.node.stop(machine)
        if machine and self.schedule.happens(0.5):  # and something rotted, of what was never synced
            clean = [path for path in self.disk.list() if path not in {r.path for r in self.store.durable.values()}]
            if clean:
                path = self.schedule.dice.choice(clean)
                self.disk.rot(path)
                self.schedule.log("misery", "rot", path)
