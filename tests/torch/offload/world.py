"""A world for the runner: tensors, tiers and time, as plain as can be, to hold replays against.

Nothing here is quick, and nothing is shared with the planner or the replay: lists are searched, memory is counted anew
at each operator, and what to do at a point is the runner's own code.
"""

from __future__ import annotations

import math
from typing import Any

from forebay.offload.movables import Residency
from forebay.offload.planning.hardware import Tier
from forebay.offload.planning.itinerary import itinerary
from forebay.offload.planning.plan import Plan
from forebay.offload.planning.trace import Trace
from forebay.offload.runner import Runner


class Transfer:
    def __init__(self, thing: Thing, server: tuple[Tier, bool], due: float, number: int, *, urgent: bool) -> None:
        self.thing, self.server, self.due, self.number, self.urgent = thing, server, due, number, urgent
        self.began_s = self.ends_s = math.inf
        self.is_over = False


class Thing:
    """What the runner takes for a storage that moves."""

    def __init__(self, world: World, name: str, size_bytes: int) -> None:
        self.world, self.name, self.size_bytes = world, name, size_bytes
        self.residency = Residency.HERE
        self.tier: Tier | None = None
        self.is_good = False
        self.transfer: Transfer | None = None

    def leave(self, tier: Tier, due: float) -> bool:
        self.settle()
        if self.residency is not Residency.HERE:
            return self.residency is not Residency.LOADING
        if self.tier is tier and self.is_good:
            self.residency = Residency.AWAY
            return True
        if self.tier is not tier and not self.world.has_room(tier, self.size_bytes):
            return False
        self.tier, self.is_good = tier, False
        self.residency = Residency.STORING
        self.transfer = self.world.ask(self, (tier, True), due, urgent=False)
        return True

    def come(self, due: float, *, urgent: bool = False) -> None:
        self.settle()
        if self.residency is Residency.AWAY:
            assert self.tier is not None
            self.residency = Residency.LOADING
            self.transfer = self.world.ask(self, (self.tier, False), due, urgent=urgent)
        elif self.residency is Residency.LOADING and urgent:
            assert self.transfer is not None
            self.transfer.urgent = True

    def ensure(self) -> None:
        self.settle()
        if self.residency is Residency.STORING:
            assert self.transfer is not None
            self.world.transfers.remove(self.transfer)
            self.transfer, self.residency = None, Residency.HERE
            self.world.begin()
        elif self.residency is not Residency.HERE:
            self.come(0.0, urgent=True)
            self.wait()

    def settle(self) -> None:
        if self.transfer is not None and self.transfer.is_over:
            self.transfer = None
            if self.residency is Residency.STORING:
                self.is_good, self.residency = True, Residency.AWAY
            else:
                self.residency = Residency.HERE

    def wait(self) -> None:
        if self.transfer is not None:
            self.transfer.urgent = True
            while not self.transfer.is_over:
                self.world.until(min(each.ends_s for each in self.world.transfers))
            self.settle()

    def written(self) -> None:
        self.is_good = False


class World:
    """A step's tensors and machine, and the runner's `Books`."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.trace, self.hardware = trace, plan.hardware
        self.now_s = 0.0
        self.things: dict[str, Thing] = {}
        self.transfers: list[Transfer] = []
        self.number = 0
        self.movable = set(itinerary(trace, plan).uses)
        self.tiers = list(self.hardware.tiers)
        self.failed: list[Any] = []
        self.failures: list[Any] = []
        self.waited_s = 0.0
        for tensor in [tensor for tensor, stays in enumerate(trace.persistent) if stays]:
            self.bear(tensor)
        for move in plan.moves:
            if move.leave < trace.operator_count <= move.load:
                thing = self.things[trace.tensors[move.tensor]]
                if not self.has_room(move.tier, thing.size_bytes):
                    continue
                thing.residency, thing.tier, thing.is_good = Residency.AWAY, move.tier, True
        tiers: Any = {tier: tier for tier in self.tiers}
        books: Any = self
        self.runner = Runner(itinerary(trace, plan), self.find, self.is_lost, books, tiers, self.hardware.budget_bytes)
        self.peak_bytes = 0

    @property
    def away_bytes(self) -> int:
        return sum(thing.size_bytes for thing in self.things.values() if thing.residency is Residency.AWAY)

    def has_room(self, tier: Tier, size_bytes: int) -> bool:
        held = sum(thing.size_bytes for thing in self.things.values() if thing.tier is tier)
        return held + size_bytes <= self.hardware.room_bytes(tier)

    def find(self, name: str) -> Any:
        return self.things.get(name)

    def is_lost(self) -> None:
        raise AssertionError("the step is the one that was planned")

    def bear(self, tensor: int) -> None:
        name = self.trace.tensors[tensor]
        if name in self.movable:
            self.things[name] = Thing(self, name, int(self.trace.sizes_bytes[tensor]))

    # --- time --------------------------------------------------------------------------------------------------------
    def ask(self, thing: Thing, server: tuple[Tier, bool], due: float, *, urgent: bool) -> Transfer:
        self.number += 1
        found = Transfer(thing, server, due, self.number, urgent=urgent)
        self.transfers.append(found)
        self.begin()
        return found

    def begin(self) -> None:
        for tier in self.tiers:
            for out in (True, False):
                mine = [each for each in self.transfers if each.server == (tier, out)]
                if mine and all(each.ends_s == math.inf for each in mine):
                    first = min(mine, key=lambda each: (not each.urgent, each.due, each.number))
                    first.began_s = self.now_s
                    first.ends_s = self.now_s + self.hardware.latency_s + first.thing.size_bytes / self.speed(tier, out)

    def speed(self, tier: Tier, out: bool) -> float:
        bytes_s = self.hardware.out_bytes_s(tier) if out else self.hardware.in_bytes_s(tier)
        disk_s = self.hardware.out_bytes_s(Tier.DISK) if out else self.hardware.in_bytes_s(Tier.DISK)
        busy = any(each.server == (Tier.DISK, out) and each.ends_s < math.inf for each in self.transfers)
        return max(bytes_s - disk_s, bytes_s / 8) if tier is Tier.HOST and busy and bytes_s < math.inf else bytes_s

    def until(self, end_s: float) -> None:
        while due := [each for each in self.transfers if each.ends_s <= end_s]:
            first = min(due, key=lambda each: (each.ends_s, each.number))
            self.now_s = max(self.now_s, first.ends_s)
            first.is_over = True
            self.transfers.remove(first)
            self.begin()
        self.now_s = max(self.now_s, end_s)

    # --- steps -------------------------------------------------------------------------------------------------------
    def lap(self) -> float:
        """One step under the runner; how long it took."""
        trace, began_s = self.trace, self.now_s
        self.peak_bytes = 0
        names = list(zip(trace.points.tolist(), trace.point_names, strict=True))
        self.runner.begin_step()
        for operator in range(trace.operator_count):
            for _, name in [each for each in names if each[0] == operator]:
                self.runner.at(name)
            self.operator(operator)
        for _, name in [each for each in names if each[0] == trace.operator_count]:
            self.runner.at(name)
        self.runner.end_step()
        return self.now_s - began_s

    def operator(self, operator: int) -> None:
        trace = self.trace
        for tensor in [t for t, born in enumerate(trace.births) if born == operator and not trace.persistent[t]]:
            self.bear(tensor)
        used = [t for t in range(trace.tensor_count) if operator in trace.uses(t)]
        for name in [trace.tensors[tensor] for tensor in used]:
            assert name not in self.movable or self.things[name].residency is Residency.HERE, f"{name} is not here"
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes(operator))
        self.until(self.now_s + float(trace.times_s[operator]))
        users = trace.users()
        for at, tensor in enumerate(users):
            name = trace.tensors[tensor]
            if trace.use_operators[at] == operator and trace.use_writes[at] and name in self.things:
                self.things[name].written()
        for tensor in [t for t, died in enumerate(trace.deaths) if died == operator and not trace.persistent[t]]:
            thing = self.things.pop(trace.tensors[tensor], None)
            if thing is not None and thing.transfer in self.transfers:
                self.transfers.remove(thing.transfer)
                self.begin()

    def memory_bytes(self, operator: int) -> int:
        """Tensor by tensor."""
        trace, found = self.trace, int(self.trace.workspace_bytes[operator])
        for tensor in range(trace.tensor_count):
            thing = self.things.get(trace.tensors[tensor])
            lives = trace.births[tensor] <= operator <= trace.deaths[tensor]
            if lives and (thing is None or thing.residency is not Residency.AWAY):
                found += int(trace.sizes_bytes[tensor])
        return found
