"""Copies of what no backend has, in virtual time: writes, take-over and repair where everything goes wrong.

Theory. The world of `cluster.py`, whose nodes also have disks, write for clients, flush to a backend, and run the
product's ledgers (`core/cluster/replication.py`) as a shell would. Nodes talk to each other over a network that loses,
doubles and delays, and is cut in one direction or both, between two nodes or around one. Keys change hands after a join
as `node/engine/homes.py` has them do: who held before is asked, flushes what it has, and says so. In some worlds
three nodes have what no backend has, and there two may be lost for good at the same time: an operator gives them up.

Clients write, delete and read at any node. What they were answered must be linearizable for each key (`history.py`):
so no acknowledged write is lost, no version goes back, and nothing that was deleted comes back.

Invariants, which the world checks. (1) Each key's history is explained by one order. (2) No flush of a node that may
act finds a backend that somebody else wrote. (3) When trouble has ended, all nodes hold, all is covered, everything is
in the backend, and no copy is left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from forebay.core.cluster import membership
from forebay.core.cluster.membership import Covered, Lost, Released, StoodAside
from forebay.core.cluster.records import LOCAL_TWICE, TWICE, Map
from forebay.core.cluster.replication import Copy, Name
from forebay.sim.cluster import QUIET_S, TROUBLE_S, WORLD_S, Body, Cluster, Disk, Ledgers, Process
from forebay.sim.history import ABSENT, GONE, Call, explain, told

BUCKET = "back"
NAMES: tuple[Name, ...] = tuple((BUCKET, f"key-{number}") for number in range(8))
SENDINGS_MAX = 6
AGAIN_S = 0.4
SPARED_S, RENEWED_S, APART_S = 3.0, 2.0, 15.0
BURIED_S = 90.0  # two nodes are given up, and all is covered, within it
ASIDE_S = 3.0  # how long it lets end what is under way
LAST_WRITES_S = TROUBLE_S + QUIET_S - 25.0


Say = Callable[[Any], None]


class Copies(Cluster):
    """One world; `run` is its story. It raises what it finds."""

    _clears_first = True  # a copy, before it forgets what it owed
    _says_lost = True  # that its copies are gone

    def __init__(self, seed: int, echo: Callable[[str], object] | None = None) -> None:
        super().__init__(seed, echo)
        self.taken_over = self.labels = self.lost = self.handed_over = self.fetched = self.buried = 0
        self._local = seed % 2 == 1  # nothing has a backend until the end, and nodes are drained
        self._copies = 3 if seed % 5 < 2 else 2
        self._spared_until_s = 0.0
        self._owes.clear()
        self._names = self._names[: self.chance.choice([2, 3, 4, 5])]
        self._disks = {name: Disk() for name in self._names}
        self._ledgers: dict[str, Ledgers] = {}
        self._backend: dict[Name, tuple[str, int]] = {}
        self._calls: dict[Name, list[Call]] = {name: [] for name in NAMES}
        self._cut_pairs: set[tuple[str, str]] = set()
        self._ever: set[str] = set()  # labels that any node had

    def run(self) -> None:
        self._at(10.0, self._lose_copies)
        self._at(20.0, self._bury)
        super().run()

    # --- processes ---------------------------------------------------------------------------------------------------
    def _start(self, node: str, *, twin: bool = False) -> Process:
        disk = self._disks[node]
        back, disk.away = disk.away, {}
        disk.copies = back | disk.copies
        disk.doubted |= bool(back)
        ledgers = self._ledgers[f"{node}.{len(self.processes)}"] = Ledgers(node, disk, self._copies)
        ledgers.gone = set(disk.copies) if disk.doubted else set()
        process = super()._start(node, twin=twin)
        if disk.doubted and self._says_lost:
            self._step(process, Lost())
        return process

    def _buckets(self) -> dict[str, str]:
        return {BUCKET: LOCAL_TWICE if self._local else TWICE}

    def _owed_at(self, node: str) -> int:
        return len(self._disks[node].owed)

    def _stand_aside(self, process: Process, turn: int, since_s: float) -> None:
        ledgers = self._of(process)
        if ledgers.locked and self.now_s < since_s + ASIDE_S:
            later = partial(self._stand_aside, process, turn, since_s)
            self._at(0.05, lambda: self._within(process, later))
            return
        self._step(process, StoodAside(turn))

    def _weight(self, node: str) -> float:
        return 1e12 if self.chance.random() < 0.9 else 2e12  # mostly it comes back as large as it went

    def _of(self, process: Process) -> Ledgers:
        return self._ledgers[process.incarnation]

    def _tend(self, process: Process) -> None:
        agreed = process.membership.map
        if agreed is None:
            return
        ledgers, member = self._of(process), process.membership
        if ledgers.disk.doubted and agreed.was_made_again(process.node, process.incarnation, member.losses):
            ledgers.disk.doubted = False
            ledgers.disk.away.clear()  # what is there was made again
            kept = ledgers.kept.copies
            left = [name for name in ledgers.gone if name in kept and kept[name].actor in agreed.holders]
            assert not left, f"{process.incarnation} hears that all is made again, and lacks {left}"
        self._follow(process, agreed)
        self._forget(process, agreed)
        for name in ledgers.kept.useless(agreed):
            self._drop(ledgers, name)
        if ledgers.kept.collects(agreed):
            self._collect(process, agreed)
        for name in ledgers.kept.taken_over(agreed) if not ledgers.kept.collects(agreed) else ():
            if not ledgers.kept.is_spare(agreed, name):
                self._take(process, name)
                self._fetch(process, agreed, name)
        astray = [name for name in (*ledgers.disk.owed, *ledgers.locked) if agreed.holder(*name) != process.node]
        deposed = process.node in agreed.deposed
        if not astray and not (deposed and (ledgers.disk.owed or ledgers.disk.copies or not agreed.is_covered)):
            self._step(process, Released(agreed.epoch))
        self._compare(process, agreed)
        waits = ledgers.kept.taken_over(agreed) or ledgers.kept.collects(agreed)
        if ledgers.sent.covered(agreed, process.membership.alive) and not waits:
            self._step(process, Covered(agreed.due))
        often = 0.5 if not self._stormy else 0.0 if self._local else 0.5 if astray else 0.03
        if ledgers.disk.owed and self.chance.random() < often:
            self._flush(process, self.chance.choice(sorted(ledgers.disk.owed)))

    def _follow(self, process: Process, agreed: Map) -> None:
        ledgers = self._of(process)
        ledgers.kept.follow(agreed)
        if ledgers.holders != (agreed.holders, agreed.past):
            ledgers.holders = agreed.holders, agreed.past
            ledgers.claimed.clear()

    def _forget(self, process: Process, agreed: Map) -> None:
        """A node that was taken over has nothing of worth, once the others have it twice."""
        ledgers = self._of(process)
        if process.node in agreed.deposed and agreed.is_covered and not ledgers.locked:
            if ledgers.disk.owed or ledgers.disk.copies:
                self._tell(process.incarnation, f"forgets {len(ledgers.disk.owed)} keys")
                self.handed_over += process.membership.nodes[process.node].wanted == "draining"
            ledgers.disk.owed.clear()
            ledgers.disk.copies.clear()
            ledgers.disk.away.clear()
            ledgers.gone.clear()
            ledgers.kept.forget(list(ledgers.kept.copies))

    def _take(self, process: Process, name: Name) -> None:
        """The copy of one who was deposed is this node's own, if it is there."""
        ledgers = self._of(process)
        if name in ledgers.gone:
            return
        _, body = ledgers.disk.copies.pop(name)
        ledgers.kept.forget([name])
        if name not in ledgers.disk.owed:
            self.taken_over += 1
            self._tell(process.incarnation, f"takes over {name[1]} {body.label}")
            tried = body.tried | {body.label}
            ledgers.disk.owed[name] = body._replace(version=ledgers.disk.draw(), tried=tried)
            if (agreed := process.membership.map) is not None:
                for second in ledgers.sent.seconds(agreed, name):
                    ledgers.sent.failed(second)

    def _fetch(self, process: Process, agreed: Map, name: Name) -> None:
        """Ask who was deposed, and lives, for a copy of its that is gone."""
        ledgers = self._of(process)
        if name not in ledgers.gone or name in ledgers.fetching or name not in ledgers.kept.copies:
            return
        copy = ledgers.kept.copies[name]

        def send(asked: Process, say: Say) -> None:
            known, body = asked.membership.map, self._of(asked).disk.owed.get(name)
            if known is not None and known.held == agreed.held and asked.node in known.deposed:
                say((body,) if body is not None else ())

        def came(answer: Any) -> None:
            ledgers.fetching.discard(name)
            known = process.membership.map
            if answer is None or known is None or known.held != agreed.held or ledgers.kept.copies.get(name) != copy:
                return
            self.fetched += 1
            if answer:
                again = copy._replace(version=answer[0].version)
                assert ledgers.kept.takes(known, known.held, name, again), "it would be refused"
                ledgers.gone.discard(name)
                ledgers.disk.copies[name] = again, answer[0]
                ledgers.kept.keep(name, again)
            else:
                self._drop(ledgers, name)

        ledgers.fetching.add(name)
        self._between(process, copy.actor, send, came)

    def _collect(self, process: Process, agreed: Map) -> None:
        """Ask all others for what they keep of nodes that were given up, where this one is the home now."""
        ledgers = self._of(process)
        waiting, found = set(agreed.holders) - {process.node}, list[tuple[int, Name, Copy, Body]]()
        if ledgers.collecting:
            return
        ledgers.collecting = True

        def send(asked: Process, say: Say) -> None:
            known, ledger = asked.membership.map, self._of(asked)
            if known is not None and known.held == agreed.held:
                has = [(name, of) for name, of in ledger.disk.copies.items() if name not in ledger.gone]
                mine = [
                    (copy.version, name, copy, body) for name, (copy, body) in has if copy.actor in agreed.bequeaths
                ]
                say([each for each in mine if agreed.holder(*each[1]) == process.node])

        def came(node: str, answer: Any) -> None:
            known = process.membership.map
            if answer is None or known is None or known.held != agreed.held:
                ledgers.collecting = False
                return
            waiting.discard(node)
            found.extend(answer)
            if not waiting:
                end(known)

        def end(known: Map) -> None:
            ledgers.collecting = False
            for version, name, copy, body in sorted(found, key=lambda each: each[:2]):
                there = ledgers.kept.copies.get(name)
                is_late = there is not None and there.actor == copy.actor and there.version >= version
                if name in ledgers.disk.owed or (is_late and name not in ledgers.gone):
                    continue
                if not ledgers.kept.takes(known, known.held, name, copy, asked=True):
                    assert there is not None, "it would be refused"
                    assert there.version > version, "it would be refused"
                    continue
                ledgers.disk.copies[name] = copy, body
                ledgers.kept.keep(name, copy)
                ledgers.gone.discard(name)
            ledgers.kept.collected(known)

        for node in sorted(waiting):
            self._between(process, node, send, partial(came, node))
        if not waiting:
            end(agreed)

    def _drop(self, ledgers: Ledgers, name: Name) -> None:
        ledgers.gone.discard(name)
        ledgers.kept.forget([name])
        ledgers.disk.copies.pop(name, None)

    def _acts(self, process: Process, name: Name) -> int:
        """The lease under which it acts on the key; 0 if it does not."""
        agreed, ledgers = process.membership.map, self._of(process)
        lease = process.membership.member(process.clock_s(self.now_s))
        if agreed is None or not lease or not process.membership.acts_until_s(process.clock_s(self.now_s)):
            return 0
        self._follow(process, agreed)
        if name not in ledgers.disk.owed and not ledgers.kept.is_collected(agreed, name):
            return 0
        if ledgers.kept.acts_anew(agreed, name):
            if ledgers.kept.collects(agreed):
                return 0
            self._take(process, name)
            if name in ledgers.gone:
                return 0
        if name in ledgers.disk.owed:
            return lease
        if agreed.holder(*name) != process.node:
            return 0
        if name in ledgers.claimed or not agreed.earlier(*name) - agreed.given_up.keys():
            return lease
        self._claim(process, agreed, name)
        return 0

    def _claim(self, process: Process, agreed: Map, name: Name) -> None:
        """Ask who may have the key from before."""
        waiting = agreed.earlier(*name) - agreed.given_up.keys()

        def answered(node: str, lets_go: Any) -> None:
            ledgers = self._of(process)
            same = ledgers.holders == (agreed.holders, agreed.past)
            if lets_go is True and same:
                waiting.discard(node)
                if not waiting:
                    ledgers.claimed.add(name)

        for node in sorted(waiting):
            self._between(process, node, partial(self._asked_for, name), partial(answered, node))

    def _asked_for(self, name: Name, asked: Process, say: Say) -> None:
        agreed, ledgers = asked.membership.map, self._of(asked)
        if agreed is None or agreed.holder(*name) == asked.node or name in ledgers.locked:
            say(False)
            return
        if ledgers.kept.acts_anew(agreed, name):
            if ledgers.kept.collects(agreed):
                say(False)
                return
            self._take(asked, name)
            if name in ledgers.gone:
                say(False)
                return
        if name in ledgers.disk.owed:
            if not self._local:
                self._flush(asked, name)
            say(False)
            return
        self._follow(asked, agreed)
        ledgers.claimed.discard(name)
        say(True)

    # --- between nodes -----------------------------------------------------------------------------------------------
    def _between(
        self,
        process: Process,
        node: str,
        question: Callable[[Process, Say], None],
        answered: Callable[[Any], None],
        once: bool = False,
    ) -> None:
        """Ask the process that lives at the node now; `answered` gets what it says, or None. It may hear it twice,
        unless `once`: what a client wants is passed on once, and sent again by nobody."""
        waiting, other = [True], self._living[node]

        def done(answer: Any) -> None:
            if waiting:
                waiting.clear()
                answered(answer)

        def say(answer: Any) -> None:
            if not (other.mute or process.deaf or self._lost() or (node, process.node) in self._cut_pairs):
                self._at(self._delay_s(), lambda: self._within(process, lambda: done(answer)))

        if not (process.mute or other.deaf or self._lost() or (process.node, node) in self._cut_pairs):
            doubled = self._stormy and not once and self.chance.random() < 0.05
            for _ in range(2 if doubled else 1):
                self._at(self._delay_s(), lambda: self._within(other, lambda: question(other, say)))
        self._at(2.0, lambda: self._within(process, lambda: done(None)))

    def _keep(self, held: int, name: Name, copy: Copy, body: Body, keeper: Process, say: Say) -> None:
        agreed, ledgers = keeper.membership.map, self._of(keeper)
        if agreed is None:
            say(False)
            return
        self._follow(keeper, agreed)
        if not ledgers.kept.takes(agreed, held, name, copy):
            say(False)
            return
        self._ever.add(body.label)
        ledgers.disk.copies[name] = copy, body
        ledgers.kept.keep(name, copy)
        ledgers.gone.discard(name)
        say(True)

    def _clear(self, name: Name, actor: str, number: int, keeper: Process, say: Say) -> None:
        if self._of(keeper).kept.clears(name, actor, number):
            self._of(keeper).disk.copies.pop(name, None)
            self._of(keeper).gone.discard(name)
        say(True)

    # --- comparing ---------------------------------------------------------------------------------------------------
    def _compare(self, process: Process, agreed: Map) -> None:
        ledgers = self._of(process)
        alive = process.membership.alive
        node = ledgers.sent.to_compare(agreed, alive)
        if ledgers.comparing or node is None or process.node not in agreed.holders:
            return
        ledgers.comparing = True
        marked, busy, number = ledgers.sent.mark(agreed, alive, node), ledgers.sent.busy, ledgers.disk.draw()
        may_leave = ledgers.sent.may_leave(agreed, alive, node)
        owed = [(name, body.version) for name, body in ledgers.disk.owed.items()]
        listed, written = ledgers.sent.listed(agreed, node, owed)

        def settled() -> None:
            if not ledgers.sent.have_ended(busy):
                self._at(AGAIN_S, lambda: self._within(process, settled))
            elif written:
                names, again = set(written), {n: b.version for n, b in ledgers.disk.owed.items() if n in written}
                written.difference_update(names)
                ask = partial(self._compared, agreed.held, process.node, number, again, set(), some=True)
                self._between(process, node, ask, compared)
            else:
                ledgers.sent.compared(node, marked, may_leave)
                ledgers.comparing = False

        def send(missing: list[Name]) -> None:
            if not missing:
                settled()
                return
            name = missing.pop()
            body = ledgers.disk.owed.get(name)
            if body is None:
                send(missing)
                return
            if name in ledgers.locked:
                ledgers.comparing = False
                return
            ledgers.locked.add(name)
            copy = Copy(process.node, ledgers.disk.draw(), body.version)

            def kept(answer: Any) -> None:
                ledgers.locked.discard(name)
                if answer is True:
                    send(missing)
                    return
                ledgers.comparing = False

            self._between(process, node, partial(self._keep, agreed.held, name, copy, body), kept)
            return

        def compared(missing: Any) -> None:
            if isinstance(missing, list):
                send(missing)
                return
            ledgers.comparing = False

        ask = partial(self._compared, agreed.held, process.node, number, listed, written, strays_stay=not may_leave)
        self._between(process, node, ask, compared)

    def _compared(
        self,
        held: int,
        actor: str,
        number: int,
        listed: dict[Name, int],
        busy: set[Name],
        keeper: Process,
        say: Say,
        some: bool = False,
        strays_stay: bool = False,
    ) -> None:
        agreed, ledgers = keeper.membership.map, self._of(keeper)
        if agreed is None:
            say(None)
            return
        self._follow(keeper, agreed)

        def stays(name: Name) -> bool:
            is_stray = keeper.node not in agreed.seconds(actor, *name, self._copies)
            return strays_stay and is_stray and name not in ledgers.gone

        found = ledgers.kept.compare(agreed, held, actor, number, listed, busy, stays=stays)
        if found is None:
            say(None)
            return
        missing, dropped = found[0], found[1] if not some else []
        ledgers.gone -= {name for name in listed if name not in missing and name in ledgers.disk.copies}
        for name in dropped:
            ledgers.disk.copies.pop(name, None)
        ledgers.kept.forget(dropped)
        ledgers.gone.intersection_update(ledgers.kept.copies)
        say([*missing, *(name for name in listed if name in ledgers.gone and name not in missing)])

    # --- what clients do ---------------------------------------------------------------------------------------------
    def _somebody_acts(self) -> None:
        self._at(self.chance.expovariate(8.0), self._somebody_acts)
        process, name = self._living.get(self.chance.choice(self._names)), self.chance.choice(NAMES)
        draw, agreed = self.chance.random(), None if process is None else process.membership.map
        if process is None or process.dead or agreed is None or not agreed.holders:
            return
        self.labels += 1
        label = f"body-{self.labels}" if draw < 0.35 else f"{GONE}{self.labels}" if draw < 0.45 else None
        if label is not None and self.now_s > LAST_WRITES_S:
            return
        if label is None:
            self._call(process, agreed, name, partial(self._read, name), Call("read", "", self.now_s, math.inf))
        else:
            shown = ABSENT if label.startswith(GONE) else label
            call = Call("delete" if shown == ABSENT else "write", shown, self.now_s, math.inf, act=label)
            self._call(process, agreed, name, partial(self._write, name, label), call)

    def _call(self, process: Process, agreed: Map, name: Name, act: Callable[[Process, Say], None], call: Call) -> None:
        at = len(self._calls[name])
        self._calls[name].append(call)

        def answered(answer: Any) -> None:
            if answer is None:
                return
            self.acknowledged += 1
            label = answer if call.kind == "read" else call.label
            self._calls[name][at] = call._replace(label=label, ended=self.now_s, act=process.incarnation)

        if self._acts(process, name):
            act(process, answered)
        elif (home := agreed.holder(*name)) is not None and home != process.node:
            self._between(process, home, act, answered, once=True)

    def _read(self, name: Name, process: Process, say: Say) -> None:
        lease, owed = self._acts(process, name), self._of(process).disk.owed
        if not lease:
            return
        found: list[str] = [owed[name].shown] if name in owed else []

        def ask() -> None:
            found.append(_shown(self._backend.get(name)))

        def end() -> None:
            if found and process.membership.member(process.clock_s(self.now_s)) == lease:
                say(owed[name].shown if name in owed else found[0])

        wait_s = self._delay_s()
        if not found:
            self._at(wait_s / 2, ask)
        self._at(wait_s, lambda: self._within(process, end))

    def _write(self, name: Name, label: str, process: Process, say: Say) -> None:
        ledgers, lease = self._of(process), self._acts(process, name)
        if not lease or name in ledgers.locked:
            return
        ledgers.locked.add(name)
        write = ledgers.sent.begin(name)
        before, (_, there) = ledgers.disk.owed.get(name), self._backend.get(name, ("", 0))
        based_on, tried = (there, frozenset[str]()) if before is None else (before.based_on, before.tried)
        body = Body(label, ledgers.disk.draw(), based_on, tried | ({before.label} if before is not None else set()))

        def end() -> None:
            ledgers.sent.end(write)
            ledgers.locked.discard(name)

        def commit(held: int) -> None:
            if process.membership.map is None or process.node in process.membership.map.deposed:
                end()
                return
            self._ever.add(label)
            ledgers.disk.owed[name] = body
            if not self._kept_still(process, held):
                send(SENDINGS_MAX)
                return
            end()
            if process.membership.member(process.clock_s(self.now_s)) == lease:
                say(True)
            return

        def send(left: int) -> None:
            agreed = process.membership.map
            if agreed is None or not left or process.node in agreed.deposed:
                end()
                return
            place(left, agreed, ledgers.sent.seconds(agreed, name))

        def place(left: int, agreed: Map, seconds: list[str]) -> None:
            if not seconds:
                self._at(self._delay_s(), lambda: self._within(process, lambda: commit(agreed.held)))
                return
            copy = Copy(process.node, ledgers.disk.draw(), body.version)

            def kept(answer: Any) -> None:
                if answer is True:
                    place(left, agreed, seconds[1:])
                    return
                for each in ledgers.sent.seconds(agreed, name):
                    ledgers.sent.failed(each)
                self._at(AGAIN_S, lambda: self._within(process, lambda: send(left - 1)))

            self._between(process, seconds[0], partial(self._keep, agreed.held, name, copy, body), kept)

        send(SENDINGS_MAX)

    def _kept_still(self, process: Process, held: int) -> bool:
        """Whether who keeps a copy by the holders of then is who should by those of now."""
        agreed = process.membership.map
        return agreed is not None and agreed.held == held and process.node not in agreed.deposed

    # --- flushing ----------------------------------------------------------------------------------------------------
    def _flush(self, process: Process, name: Name) -> None:
        ledgers = self._of(process)
        if name in ledgers.locked or not self._acts(process, name) or name not in ledgers.disk.owed:
            return
        ledgers.locked.add(name)
        body = ledgers.disk.owed[name]

        def arrives() -> None:
            label, version = self._backend.get(name, ("", 0))
            fine = label == body.label or version == body.based_on or label in body.tried
            if fine and label != body.label:
                self._backend[name] = body.label, version + 1
            if not self._lost():
                self._at(self._delay_s(), lambda: self._within(process, lambda: answered(fine, label)))
            else:
                self._at(self._delay_s(), lambda: self._within(process, lambda: ledgers.locked.discard(name)))

        def answered(fine: bool, label: str) -> None:
            if fine:
                self._let_go(process, name)
                return
            ledgers.locked.discard(name)
            assert not self._acts(process, name), f"{process.incarnation} owes {body}, and {label} is in the backend"

        self._at(self._delay_s(), arrives)

    def _let_go(self, process: Process, name: Name) -> None:
        """The backend has it: whoever keeps a copy forgets that, and then this node what it owed."""
        ledgers, agreed = self._of(process), process.membership.map
        if agreed is None or process.node in agreed.deposed:
            ledgers.locked.discard(name)
            return
        held, number = agreed.held, ledgers.disk.draw()

        def clear(seconds: list[str], answer: Any) -> None:
            if answer is True and seconds and self._clears_first:
                ask = partial(self._clear, name, process.node, number)
                self._between(process, seconds[0], ask, partial(clear, seconds[1:]))
                return
            ledgers.locked.discard(name)
            if answer is True and self._kept_still(process, held):
                ledgers.disk.owed.pop(name, None)

        for node in ledgers.sent.strays(agreed, process.membership.alive, name):
            ask = partial(self._clear, name, process.node, number)
            self._between(process, node, ask, lambda answer: None)
        clear(ledgers.sent.seconds(agreed, name), True)

    # --- trouble, and the end ----------------------------------------------------------------------------------------
    def _trouble(self) -> None:
        if not self._stormy:
            return
        self._at(self.chance.expovariate(0.18), self._trouble)
        if self.now_s < self._spared_until_s:
            return
        process = self._living[self.chance.choice(self._names)]
        trouble = self.chance.choice(
            [self._pause, self._pause, self._crash, self._crash, self._cut, self._stand_still, self._cut_pair]
            + [self._drain] * 7 * self._local
        )
        if trouble in (self._pause, self._crash) and self.chance.random() < 0.5:
            process.awkward = trouble
        else:
            trouble(process)

    def _lost(self) -> bool:
        return self.now_s >= self._spared_until_s and super()._lost()

    def _delay_s(self) -> float:
        return super()._delay_s() if self.now_s >= self._spared_until_s else 0.01

    def _drain(self, process: Process) -> None:
        """An operator takes a node away, and back: at once, in the middle, or after it went."""
        self._want(process.node, "draining")
        if self.chance.random() < 0.4:  # it is late to hear that it was taken over
            trouble = self.chance.choice([self._cut, self._pause])
            self._at(self.chance.uniform(0.0, 2.0), lambda: trouble(process))
        back_s = self.chance.choice([0.5, 3.0, 20.0]) * self.chance.random()
        self._at(back_s, lambda: self._want(process.node, "active"))

    def _cut_pair(self, process: Process) -> None:
        """One hears nothing of another any more, and both talk to the store."""
        pair = self.chance.choice([name for name in self._names if name != process.node]), process.node
        self._cut_pairs.add(pair)
        self._tell(pair[0], f"is not heard by {pair[1]}")
        self._at(self.chance.choice([2.0, 10.0]), lambda: self._cut_pairs.discard(pair))

    def _lose_copies(self) -> None:
        """A disk fails on which copies were, while its node runs. What is the node's own is on another disk, and for
        as long as it takes to say so nothing else fails: more at once loses what lay on two nodes."""
        if not self._stormy:
            return
        self._at(1.0, self._lose_copies)
        process = self._living[self.chance.choice(self._names)]
        ledgers, agreed = self._of(process), process.membership.map
        if self.now_s < max(self._store_until_s, self._spared_until_s + APART_S):
            return
        if agreed is None or not ledgers.disk.copies or not self._is_calm(agreed):
            return
        handed_over = agreed.is_taking_over and not any(self._living[node].dead for node in agreed.deposed)
        if not handed_over and (agreed.deposed or not agreed.is_covered):
            return
        self._spared_until_s = self.now_s + SPARED_S
        lost = list(ledgers.disk.copies)
        ledgers.disk.away |= ledgers.disk.copies
        self._tell(process.incarnation, f"loses {len(lost)} copies")
        for name in lost:
            del ledgers.disk.copies[name]
        ledgers.gone.update(lost)
        ledgers.disk.doubted = True
        self.lost += len(lost)
        if self._says_lost:
            self._step(process, Lost())

    def _is_calm(self, agreed: Map) -> bool:
        """Whether nothing else is wrong at the moment."""
        for other in self._living.values():
            clock_s = other.clock_s(self.now_s)
            if other.node in agreed.deposed:
                clock_s = -math.inf  # it acts on nothing, and has what it had
            if other.dead or other.mute or other.deaf or other.awkward or other.membership.map != agreed:
                return False
            if other.paused_until_s > self.now_s or other.membership.acts_until_s(clock_s) < clock_s + RENEWED_S:
                return False
        return True

    def _bury(self) -> None:
        """Where three nodes have all, two are lost at once, for good. What one alone of the others has then is as good
        as two copies are with one node less: until all is covered nothing else fails."""
        if self._copies < 3 or len(self._names) < 4 or self.now_s > TROUBLE_S - BURIED_S:
            return
        self._spared_until_s = max(self._spared_until_s, self.now_s + 1.0)  # no trouble until there is none
        agreed = self._living[self._names[0]].membership.map
        is_whole = agreed is not None and agreed.active and agreed.is_covered and not agreed.deposed
        if agreed is None or not is_whole or len(agreed.holders) < len(self._names) or not self._is_calm(agreed):
            self._at(0.5, self._bury)
            return
        lost = self.chance.sample(self._names, 2)
        self._cut_pairs.clear()
        self._spared_until_s = math.inf
        if self.chance.random() < 0.5:
            self._lose(lost)
            return
        self._living[lost[0]].dead = True  # it is taken over, and comes back with its disk
        self._tell(lost[0], "ends")
        self._at(15.0, lambda: self._start(lost[0]))
        self._at(15.0, lambda: self._lose_beside(*lost))

    def _lose_beside(self, newcomer: str, node: str) -> None:
        """One is lost as soon as another holds keys again, which it has no copies of yet."""
        agreed = self._living[node].membership.map
        if agreed is not None and agreed.active and newcomer in agreed.holders:
            self._lose([node])
        else:
            self._at(0.05, lambda: self._lose_beside(newcomer, node))

    def _lose(self, lost: list[str]) -> None:
        for node in lost:
            self._living[node].dead = True
            self._disks[node] = Disk(number=self._disks[node].number)
            self._tell(node, "is lost for good")
        self._at(self.chance.choice([0.0, 4.0, 15.0]), lambda: self._give_up(lost))

    def _give_up(self, lost: list[str]) -> None:
        """An operator gives lost nodes up, one or two at once, and brings machines back in their place."""
        known = next(process.membership for process in self._living.values() if process.node not in lost)
        agreed = known.map
        assert agreed is not None
        up = [node for node in lost if known.nodes[node].wanted != "gone" and node not in known.alive]
        for node in up[: self.chance.choice([1, 2])]:
            self._want(node, "gone")
        if any(node in agreed.holders for node in lost) or not agreed.is_covered:
            self._at(1.0, lambda: self._give_up(lost))
            return
        self.buried += 1
        self._spared_until_s = self.now_s
        for node in lost:
            self._want(node, "active")
            self._start(node)
        self._at(self.chance.uniform(5.0, 20.0), self._bury)

    def _calm(self) -> None:
        super()._calm()
        self._cut_pairs.clear()

    def _check_quiet(self) -> None:
        agreed = self._living[self._names[0]].membership.map
        assert agreed is not None, "there is no map"
        assert sorted(agreed.holders) == self._names, (
            f"{sorted(agreed.holders)} hold keys, {agreed.deposed} are deposed"
        )
        assert agreed.is_covered, "not all is covered"
        for node, disk in self._disks.items():
            assert not disk.owed, f"{node} owes {sorted(disk.owed)}"
            assert not disk.copies, f"{node} has copies left over of {sorted(disk.copies)}"
        for name, calls in self._calls.items():
            final = Call("read", _shown(self._backend.get(name)), WORLD_S, WORLD_S + 1.0, act="the backend")
            self._explain(name, [*calls, final])
        assert self.acknowledged > 150, "hardly anybody could act"

    def _explain(self, name: Name, calls: list[Call]) -> None:
        seen = {call.label for call in calls if call.kind == "read" and not call.is_open}
        known = [  # what nobody had did not happen; nor need a write that nobody read
            call
            for call in calls
            if not call.is_open or (call.act in self._ever and (call.kind == "delete" or call.label in seen))
        ]
        assert explain(known, [ABSENT]), f"no order explains {name[1]}\n{told(known)}"


def _shown(content: tuple[str, int] | None) -> str:
    return ABSENT if content is None or content[0].startswith(GONE) else content[0]


assert membership.LOOK_S < AGAIN_S
