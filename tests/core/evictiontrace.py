"""Traces and dumb oracles for the eviction machine: LRU, CLOCK, S3-FIFO, Belady, each as short as can be.

A trace is a list of (unit, size_bytes). `replay` plays it through a policy and gives hits by request and by byte.
Every policy has `access(unit, size) -> hit` and a capacity in bytes.
"""

import bisect
import random
from collections import OrderedDict

from forebay.core.machines.eviction import Eviction, unit_of

Trace = list[tuple[int, int]]


class Ours:
    """The machine as the engine drives it: a miss lands, then whatever is in excess leaves."""

    def __init__(self, capacity):
        self.machine = Eviction(capacity)

    def access(self, unit, size):
        if self.machine.touched(unit):
            return True
        self.machine.landed(unit, size, "b")
        excess = self.machine.excess_bytes
        if excess:
            assert not self.machine.victims(excess).stuck
        return False


class Lru:
    def __init__(self, capacity):
        self.capacity, self.used, self.kept = capacity, 0, OrderedDict()

    def access(self, unit, size):
        if unit in self.kept:
            self.kept.move_to_end(unit)
            return True
        self.kept[unit] = size
        self.used += size
        while self.used > self.capacity:
            self.used -= self.kept.popitem(last=False)[1]
        return False


class Clock:
    def __init__(self, capacity):
        self.capacity, self.used, self.kept = capacity, 0, OrderedDict()

    def access(self, unit, size):
        if unit in self.kept:
            self.kept[unit][1] = True
            return True
        self.kept[unit] = [size, False]
        self.used += size
        while self.used > self.capacity:
            old, (old_size, used) = self.kept.popitem(last=False)
            if used:
                self.kept[old] = [old_size, False]
            else:
                self.used -= old_size
        return False


class S3Fifo:
    def __init__(self, capacity):
        self.capacity = capacity
        self.small, self.main, self.ghost = OrderedDict(), OrderedDict(), OrderedDict()  # unit -> [size, frequency]
        self.small_bytes = self.main_bytes = self.ghost_bytes = 0

    def access(self, unit, size):
        entry = self.small.get(unit) or self.main.get(unit)
        if entry:
            entry[1] = min(3, entry[1] + 1)
            return True
        if unit in self.ghost:
            self.ghost_bytes -= self.ghost.pop(unit)
            self.main[unit] = [size, 0]
            self.main_bytes += size
        else:
            self.small[unit] = [size, 0]
            self.small_bytes += size
        while self.small_bytes + self.main_bytes > self.capacity:
            self._evict()
        return False

    def _evict(self):
        if self.small and (self.small_bytes >= self.capacity // 10 or not self.main):
            unit, (size, frequency) = self.small.popitem(last=False)
            self.small_bytes -= size
            if frequency > 1:
                self.main[unit] = [size, 0]
                self.main_bytes += size
            else:
                self.ghost[unit] = size
                self.ghost_bytes += size
                while self.ghost_bytes > self.capacity * 9 // 10:
                    self.ghost_bytes -= self.ghost.popitem(last=False)[1]
            return
        unit, (size, frequency) = self.main.popitem(last=False)
        if frequency:
            self.main[unit] = [size, frequency - 1]
        else:
            self.main_bytes -= size


class Belady:
    """Knows the future: evicts what is needed last, the newcomer included. Made for one trace."""

    def __init__(self, capacity, trace):
        self.capacity, self.used, self.now = capacity, 0, 0
        self.next_use, seen = [0] * len(trace), {}
        for at in range(len(trace) - 1, -1, -1):
            unit = trace[at][0]
            self.next_use[at] = seen.get(unit, len(trace) + unit)
            seen[unit] = at
        self.kept, self.order = {}, []

    def access(self, unit, size):
        upcoming, self.now = self.next_use[self.now], self.now + 1
        hit = unit in self.kept
        if hit:
            del self.order[bisect.bisect_left(self.order, (self.kept[unit][0], unit))]
        else:
            self.used += size
        self.kept[unit] = upcoming, size
        bisect.insort(self.order, (upcoming, unit))
        while self.used > self.capacity:
            _, old = self.order.pop()
            self.used -= self.kept.pop(old)[1]
        return hit


POLICIES = {"forebay": Ours, "LRU": Lru, "CLOCK": Clock, "S3-FIFO": S3Fifo}


def replay(policy, trace, skip=0):
    """(hit ratio by requests, by bytes), not counting the first `skip` accesses."""
    hits = hit_bytes = total_bytes = 0
    for at, (unit, size) in enumerate(trace):
        hit = policy.access(unit, size)
        if at >= skip:
            total_bytes += size
            hits += hit
            hit_bytes += size * hit
    return hits / (len(trace) - skip), hit_bytes / total_bytes


# --- traces ----------------------------------------------------------------------------------------------------------
def dataset(objects: int, kind: str, seed: int, first_id: int = 0) -> list[Trace]:
    """Objects as lists of units: `equal` one block each; `mixed` 4 KiB to 4 MiB; `blocks` 1 to 16 blocks of 4 MiB."""
    chance = random.Random(seed)
    made = []
    for n in range(first_id, first_id + objects):
        if kind == "equal":
            made.append([(unit_of(n, 0), 1 << 20)])
        elif kind == "mixed":
            made.append([(unit_of(n, 0), int(2 ** chance.uniform(12, 22)))])
        else:
            blocks = chance.randint(1, 16)
            made.append([(unit_of(n, b), 4 << 20) for b in range(blocks - 1)] + [(unit_of(n, blocks - 1), 1 << 20)])
    return made


def size_of(objects) -> int:
    return sum(size for units in objects for _, size in units)


def epochs(objects, count, seed) -> Trace:
    """Every object once per epoch, whole, in a new random order each time."""
    chance, order, trace = random.Random(seed), list(objects), []
    for _ in range(count):
        chance.shuffle(order)
        trace += [unit for units in order for unit in units]
    return trace


def zipf(units: int, accesses: int, alpha: float, seed: int, first_id: int = 0, size: int = 1 << 20) -> Trace:
    chance, total, sums = random.Random(seed), 0.0, []
    for rank in range(1, units + 1):
        total += rank**-alpha
        sums.append(total)
    names = list(range(first_id, first_id + units))
    chance.shuffle(names)
    return [(unit_of(names[bisect.bisect_left(sums, chance.random() * total)], 0), size) for _ in range(accesses)]


def scan(units: int, first_id: int, size: int = 1 << 20) -> Trace:
    return [(unit_of(first_id + n, 0), size) for n in range(units)]


# --- the table of docs/design/0002-eviction.md -----------------------------------------------------------------------
def sliding(accesses: int, width: int, seed: int) -> Trace:
    """A working set that slides along: recency is all that counts."""
    chance = random.Random(seed)
    return [(unit_of(at // 20 + chance.randrange(width), 0), 1 << 20) for at in range(accesses)]


def drifting(rounds: int, seed: int) -> Trace:
    """A skewed popularity that moves on by a tenth of its units, again and again."""
    return [access for n in range(rounds) for access in zipf(5000, 20_000, 0.9, seed, first_id=n * 500)]


def rows():
    """(name, trace, capacity, accesses not counted)"""
    for kind, objects in (("equal", 2000), ("mixed", 2000), ("blocks", 400)):
        data = dataset(objects, kind, seed=1)
        trace = epochs(data, 8, seed=2)
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            yield f"random epochs, {kind}, C/D = {share}", trace, int(size_of(data) * share), len(trace) // 4
    for alpha in (0.7, 0.9, 1.1):
        for share in (0.01, 0.1, 0.3):
            trace = zipf(20_000, 200_000, alpha, seed=5)
            yield f"zipf {alpha}, C = {share:.0%} of units", trace, int(20_000 * share) << 20, 50_000
    hot, junk = zipf(20_000, 150_000, 0.9, seed=5), scan(20_000, first_id=10**6)
    during = [access for at, one in enumerate(junk) for access in (one, *hot[75_000 + 2 * at : 77_000 + 2 * at][:2])]
    scanned = hot[:75_000] + during + hot[115_000:]
    yield "zipf 0.9 after a scan, C = 10%", scanned, 2000 << 20, len(scanned) - 35_000
    both = [
        one for pair in zip(epochs(dataset(2000, "equal", 1), 6, 3), zipf(3000, 12_000, 1.0, 4, 10**6)) for one in pair
    ]
    yield "epochs and zipf mixed", both, 1500 << 20, 8000
    yield "sequential loop, C/D = 0.5", scan(3000, 0) * 6, 1500 << 20, 6000
    yield "drifting zipf 0.9, C = 20%", drifting(10, seed=5), 1000 << 20, 20_000
    yield "sliding window of 0.8 C", sliding(100_000, 800, seed=3), 1000 << 20, 20_000
    yield "sliding window of 1.6 C", sliding(100_000, 800, seed=3), 500 << 20, 20_000


def main():
    names = [*POLICIES, "Belady"]
    print(f"| trace | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for name, trace, capacity, skip in rows():
        policies = [*(make(capacity) for make in POLICIES.values()), Belady(capacity, trace)]
        print(f"| {name} | {' | '.join(f'{replay(policy, trace, skip)[1]:.3f}' for policy in policies)} |", flush=True)


if __name__ == "__main__":
    main()
