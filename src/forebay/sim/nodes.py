"""One seed's story of a cluster: nodes live, die, pause and are cut off while clients call any; then it is judged.

Theory. Each node is the product's, engine and front, on a loop and a machine of its own (`life.py`, `host.py`). All
loops share one clock; of those that have something to do a draw decides who has the next turn, so what nodes do is
interleaved turn by turn. Between them lies `network.py`. A node that is paused gets no turns while time goes on. The
clients, their board and their judge are those of the stories of one node: every client asks any node, so a key's
history is that of all nodes together, and it must have an explanation.

A story has rounds. In each, clients call while misfortune happens: nodes are killed, between two turns or between two
calls that change their disk, machines stop, nodes pause for longer than a lease, links are cut in one direction or
both, the store that they agree on is away, the bucket service has moods, nodes join, drain and come back. Where what
no backend has lies on two nodes, one falls silent for longer than a lease now and then, and clients go on. Then it
ends: within HEALED_S every key must be answered at every node, with what its history allows. After the last round
everything is flushed, and the backends are compared.

Rejected: one loop for all nodes (a killed node's tasks would have to be told from the others').

Invariants. (1) A node's code runs with its own machine as the current one. (2) After `run` nothing of the world is left
but its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Container, Coroutine
from random import Random
from typing import Any

from msgspec.structs import replace

from forebay.backends.wrap.peers import Peers
from forebay.core.errors import ForebayError
from forebay.core.messages.node_state import ClusterState
from forebay.core.types import FRESH_IMMUTABLE, LOCAL_URL, Bucket
from forebay.node.settings import Settings
from forebay.sim.agreed import Agreed
from forebay.sim.bucket import MOODS
from forebay.sim.checks import left_over, watch_evictions, watched_retries
from forebay.sim.clients import Board, Client, Judge, Place
from forebay.sim.doors import Listener, empty, open_doors
from forebay.sim.host import Host, Hosts
from forebay.sim.life import Life
from forebay.sim.loop import Killed, ReadySockets, VirtualLoop
from forebay.sim.network import STORE, AgreedFar, Network
from forebay.sim.pools import SimThreads
from forebay.sim.story import SIZES
from forebay.sim.wire import ANSWER_TIMEOUT_S, Line
from forebay.sim.world import Found, World

BUCKETS = (
    Bucket("back", "memory://back", write="back"),
    Bucket("own", LOCAL_URL, write="local"),
    Bucket("through", "memory://through", freshness_s=0.0),  # each read asks the bucket: what others cache may be old
)
KEYS, CLIENTS, NODES_MAX = 3, 4, 5
SOURCES = {"source/small": 700, "source/large": 30_000}
KINDS = {"changing": ("back",), "fleeting": ("through",)}  # of buckets, as clients take them
ROUNDS, CALLS = 3, 50  # calls of a round
FIRST_PORT = 9400
HEALED_S = 240.0
AGAIN_S = 2.0
ARRIVES_S = 3_000.0
CAPACITY_BYTES = 16 << 20
TURNS_MAX = 3_000_000  # of all loops together


def copies_of(seed: int) -> int:
    """How many nodes keep what no backend has, in the story of this seed."""
    return 1 if seed // 2 % 2 == 0 else 3 if seed % 5 == 0 else 2


def relays_of(seed: int) -> bool:
    """Whether what is read first is relayed, in the story of this seed."""
    return seed % 3 == 2


class Node:
    """One node of the world, whether it lives or not."""

    def __init__(self, number: int, root: str, world: Nodes) -> None:
        self.name, self.port = f"n{number}", FIRST_PORT + number
        self.host = Host(f"{root}/{self.name}", Random(world.dice.getrandbits(64)))
        self.host.volumes = [f"{self.host.root}/v0"]
        timing = Random(world.dice.getrandbits(64))
        self.threads = SimThreads(timing, world.clock, lambda: 0.002 * timing.random() ** 2)
        self.host.changes = self.threads.changes
        self.settings = Settings(
            dir=f"{self.host.root}/node",
            listen=f"127.0.0.1:{self.port}",
            fronts=0,
            volumes=tuple(self.host.volumes),
            auto_buckets=False,
            capacity_bytes=CAPACITY_BYTES,
            flush_timeout_s=7200.0,
            cluster="etcd://127.0.0.1:2379/world",
            take_over=True,
        )
        self.life: Life | None = None
        self.is_up = False
        self.lives = 0
        self.paused_until_s = 0.0
        self.wanted = "active"
        self.owed: set[Place] = set()  # when it died

    def owes(self, place: Place) -> bool:
        """Whether something of the key is not flushed."""
        engine = getattr(self.life, "engine", None)
        flusher = getattr(engine, "flusher", None)
        return place in self.owed if flusher is None else flusher.find(*place) is not None

    @property
    def address(self) -> str:
        """Where its front listens."""
        return str(self.settings.run_dir / "http.sock")


class _Current:
    """The threads of the node whose turn it is."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.of: dict[int, SimThreads] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of[id(self._hosts.current)], name)


class Nodes(World):
    """`run` it once. `echo` gets each line as it comes."""

    def __init__(self, seed: int, calls: int = CALLS, echo: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, echo)
        self.calls = calls
        self.beyond = Host(f"{self.root}/beyond", Random(0))  # clients, and the store that nodes agree on
        self.hosts = Hosts(self.beyond)
        self.threads = _Current(self.hosts)
        self.chance = self.has_chances()
        self.service = self.opens_a_bucket_service()
        self.service.owes = self._owes
        self.network = Network(Random(self.draws.getrandbits(64)), self._here, self._where)
        self.network.opened = lambda connection: self.hosts.current.opened(connection)
        self.agreed, self._ends = Agreed(), dict[int, tuple[float, asyncio.TimerHandle]]()
        self.nodes = [Node(number, self.root, self) for number in range(3)]
        self.board = Board(self._tick)
        self.board.may_be_full = True
        # In every other story what a node was told once is asked about again only if the node knows that it must be,
        # and each misfortune is up to eight times as frequent as usual, or as rare: some have little but drains.
        for_ever = {} if seed % 2 else {"freshness_s": FRESH_IMMUTABLE}
        self._spread = 1.0 if seed % 2 else 8.0
        self.copies, self.relays = copies_of(seed), relays_of(seed)
        self.buckets = [replace(b, copies=self.copies, **for_ever) if b.write != "through" else b for b in BUCKETS]
        self.places: list[Place] = [(bucket.name, f"k{number}") for bucket in BUCKETS for number in range(KEYS)]
        self.sources: list[Place] = [(bucket.name, key) for bucket in BUCKETS for key in SOURCES]
        self.judge = Judge(self.board, [*self.places, *self.sources])
        self._ticks = 0
        self._turns = 0
        self._silent = 0  # nodes that are, for longer than a lease
        self._lines: dict[tuple[str, str], Line] = defaultdict(Line)
        self._loop: VirtualLoop
        self._pools = SimThreads(self.timing, self.clock, lambda: 0.0)

    def _tick(self) -> float:
        self._ticks += 1
        return float(self._ticks)

    @property
    def lives(self) -> int:
        """Of all nodes."""
        return sum(node.lives for node in self.nodes)

    # --- turns -------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Raises `Found`, or any `AssertionError` of the product."""
        ear = Listener(
            self.root, lambda: self.hosts.current.dead, lambda text: self.log(self._here(), text), self.problems.append
        )
        doors = open_doors(self.clock, self.chance, self.threads, ear)
        with doors, self.hosts.installed(), self.network.installed(self._store), watched_retries(self.problems.append):
            self.threads.of[id(self.beyond)] = self._pools
            self._loop = VirtualLoop(self.clock, lambda: self._pools.pool(8, ""), lambda: False, alone=False)
            self._sockets = ReadySockets()
            self._sockets.watch(self._loop)
            self._loop.set_exception_handler(lambda _, context: self.broke(context))
            self._pools.loop = self._loop
            try:
                self._turn_until(self._story())
            finally:
                for node in self.nodes:
                    self._bury(node, "end")
                self.graves += [list(asyncio.all_tasks(self._loop)), self._loop]
                self._loop.abandon()
                self._sockets.close()
                for node in self.nodes:
                    self.hosts.current = node.host
                    node.host.dead = True
                empty(self.graves)
                self.hosts.current = self.beyond
        for node in self.nodes:
            node.host.clean_up()
        shutil.rmtree(self.root, ignore_errors=True)

    def _turn_until(self, story: Coroutine[Any, Any, None]) -> None:
        """Give turns to whoever has something to do, until the story is told."""
        told = self._loop.create_task(story)
        while not told.done():
            self._turns += 1
            assert self._turns < TURNS_MAX, "this story does not come to an end"
            now_s, next_s, ready = self.clock.now_s, float("inf"), self._sockets.look()
            due: list[Node | None] = []
            for node in (None, *self.nodes):
                if node is not None and node.life is None:
                    continue
                at_s = self._loop.next_s(ready) if node is None else self._next_s(node, ready)
                if at_s <= now_s:
                    due.append(node)
                else:
                    next_s = min(next_s, at_s)
            if not due:
                assert next_s < float("inf"), "everybody waits for something that will not happen"
                self.clock.now_s = next_s
                continue
            self._turn(due[0] if len(due) == 1 else self.timing.choice(due))
        told.result()

    def _next_s(self, node: Node, ready: Container[int]) -> float:
        assert node.life is not None
        return max(node.paused_until_s, node.life.loop.next_s(ready))

    def _turn(self, node: Node | None) -> None:
        if node is None:
            self._loop.take_turn()
            return
        assert node.life is not None
        self.hosts.current = node.host
        try:
            node.life.loop.take_turn()
        except Killed:
            self._bury(node, "killed")
        finally:
            self.hosts.current = self.beyond

    def _here(self) -> str:
        return next((node.name for node in self.nodes if node.host is self.hosts.current), "beyond")

    def _where(self, port: int) -> tuple[str, str]:
        node = self.nodes[port - FIRST_PORT]
        return node.name, node.address

    def _store(self) -> AgreedFar:
        return AgreedFar(self.agreed, self.network, self._here(), self._loop, self._ends)

    def _owes(self, bucket: str, key: str) -> bool:
        return any(node.owes((bucket, key)) for node in self.nodes)

    # --- lives -------------------------------------------------------------------------------------------------------
    def _begin(self, node: Node) -> None:
        node.lives += 1
        node.paused_until_s = 0.0
        node.host.dead = False
        self.threads.of[id(node.host)] = node.threads
        self.hosts.current = node.host
        try:
            node.life = Life(
                node.settings,
                lambda bucket, counters: self.service.open(
                    bucket, counters, node.life.engine.peers if node.life else None
                ),
                self.clock,
                node.threads,
                self.broke,
                lambda: node.host.dead,
                alone=False,
            )
            self._sockets.watch(node.life.loop)
            node.life.loop.create_task(self._start(node, node.life))
        finally:
            self.hosts.current = self.beyond
        self.log("world", f"{node.name} begins life {node.lives}")

    @staticmethod
    def _peers_of(node: Node) -> Peers | None:
        return None if node.life is None else node.life.engine.peers

    async def _start(self, node: Node, life: Life) -> None:
        try:
            await life.start()
        except ForebayError as error:
            if node.host.full:
                self.log("world", f"{node.name} does not start: {type(error).__name__}")
                node.host.dead = True  # its next turn is its end
                life.loop.call_soon(lambda: None)
            else:
                self.problems.append(f"{node.name} does not start: {error}")
            return
        watch_evictions(life.engine, self.problems.append)
        life.front.relay_through(self.network.dial if self.relays else None)
        if life.engine.cold.relays is not None:
            life.engine.cold.relays.alone = ()
        paths = {volume.id: volume.path for volume in life.engine.store.usable()}
        node.threads.name_of = lambda disk: paths.get(disk, disk)
        known = {bucket.name for bucket in life.engine.buckets.all()}
        for bucket in self.buckets:
            while bucket.name not in known:
                with contextlib.suppress(ForebayError):
                    await life.engine.buckets.put(bucket)
                    break
                await asyncio.sleep(0.5)
        node.is_up = True
        self.log("world", f"{node.name} serves")

    def _bury(self, node: Node, how: str) -> None:
        """The process is gone."""
        life, node.life, node.is_up = node.life, None, False
        if life is None:
            return
        self.log("world", f"{node.name} ends: {how}")
        if hasattr(life, "engine") and hasattr(life.engine, "flusher"):
            node.owed = {place for place in self.places if life.engine.flusher.find(*place) is not None}
        node.host.dead = True
        self.hosts.current = node.host
        self.graves += [life, list(asyncio.all_tasks(life.loop))]
        told: list[Any] = list(self.agreed.told)
        self.agreed.told[:] = [each for each in told if getattr(each.__self__, "_loop", None) is not life.loop]
        node.threads.end_life()
        node.host.kill()
        life.loop.abandon()
        if how == "machine":
            node.host.stop()
            self.board.machine_stops += 1
        self.hosts.current = self.beyond

    async def _stop(self, node: Node) -> None:
        """As at SIGTERM."""
        life = node.life
        if life is None or not node.is_up:
            return
        node.is_up = False
        self.hosts.current = node.host
        task = life.loop.create_task(life.stop(flush=False))
        self.hosts.current = self.beyond
        for _ in range(10_000):
            if task.done() or node.life is not life:
                break
            await asyncio.sleep(0.1)
        self._bury(node, "stopped")

    # --- the story ---------------------------------------------------------------------------------------------------
    async def _story(self) -> None:
        for node in self.nodes:
            self._begin(node)
        await self._heal()
        for bucket, key in self.sources:
            body = self.board.new((bucket, key), f"{bucket} {key}", SOURCES[key])
            for _ in range(100):
                with contextlib.suppress(OSError):
                    answer = await self._ask_at("set-up", self.nodes[0], "PUT", f"/{bucket}/{key}", {}, body)
                    if answer.status == 200:
                        break
                await asyncio.sleep(AGAIN_S)
            else:
                raise Found(f"{bucket}/{key} is not taken, though nothing is wrong")
            self.judge.content[bucket, key] = {f"{bucket} {key}"}
        clients = [self._client(f"c{number}", self.dice.getrandbits(32)) for number in range(CLIENTS)]
        for number in range(ROUNDS):
            self.log("world", f"round {number}")
            left = [self.calls]
            misery = asyncio.ensure_future(self._misery(left))
            await asyncio.gather(*(self._work(client, left) for client in clients))
            await misery
            await self._heal()
            await self._audit()
        await self._arrives()
        self.compare_backends([*self.places, *self.sources])

    async def _work(self, client: Client, left: list[int]) -> None:
        while (left[0] > 0 or self._silent) and not self.is_wrong:
            left[0] -= 1
            await client.call()
            await asyncio.sleep(3.0 * self.timing.random() ** 3)

    def _client(self, name: str, seed: int) -> Client:
        async def ask(method: str, target: str, headers: dict[str, str], body: bytes | None) -> Any:
            up = [node for node in self.nodes if node.is_up]
            if not up:
                raise ConnectionRefusedError("nobody lives")
            return await self._ask_at(name, self.timing.choice(up), method, target, headers, body)

        async def pause() -> None:
            await asyncio.sleep(0.2)

        return Client(ask, pause, self.board, name, self.places, list(SOURCES), seed, SIZES, **KINDS)

    async def _ask_at(
        self, who: str, node: Node, method: str, target: str, headers: dict[str, str], body: bytes | None
    ) -> Any:
        line = self._lines[who, node.name]
        line.address = node.address
        try:
            answer = await line.ask(method, target, headers, body, ANSWER_TIMEOUT_S)
        except OSError as error:
            self.log("client", f"{who} {node.name} {method} {target} no answer: {error}")
            raise
        why = answer.body[-200:].decode(errors="replace") if answer.status >= 500 else len(answer.body)
        self.log("client", f"{who} {node.name} {method} {target} {answer.status} {why}")
        return answer

    # --- misfortune --------------------------------------------------------------------------------------------------
    async def _misery(self, left: list[int]) -> None:
        acts: list[tuple[Callable[[Node], Coroutine[Any, Any, None]], float]] = [
            (self._kill, 3),
            (self._stop_machine, 1.5),
            (self._restart, 1),
            (self._pause, 3),
            (self._cut_pair, 3),
            (self._cut_store, 2),
            (self._change_mood, 4),
            (self._stall, 1),
            (self._fill, 1),
            (self._drain, 1.5),
            (self._join, 0.7),
            *([(self._fall_silent, 2.5)] if self.copies > 1 else []),
        ]
        kinds = Random(self.seed)
        weights = [weight * self._spread ** kinds.uniform(-1, 1) for _, weight in acts]
        while left[0] > 0 and not self.is_wrong:
            await asyncio.sleep(6.0 * self.weather.random() ** 2)
            act = self.weather.choices([each for each, _ in acts], weights)[0]
            await act(self.weather.choice(self.nodes))

    async def _kill(self, node: Node) -> None:
        if node.life is None:
            self._begin(node)
        elif self.weather.random() < 0.5:
            node.life.loop.turns_left = int(400 * self.weather.random() ** 2) + 1
        else:
            node.host.changes_left = int(60 * self.weather.random() ** 2)

    async def _stop_machine(self, node: Node) -> None:
        self._bury(node, "machine")
        await asyncio.sleep(20.0 * self.weather.random() ** 2)
        if node.life is None:
            self._begin(node)

    async def _restart(self, node: Node) -> None:
        await self._stop(node)
        if node.life is None:
            self._begin(node)

    async def _pause(self, node: Node) -> None:
        pause_s = 25.0 * self.weather.random() ** 2
        self.log("misery", f"{node.name} is paused for {pause_s:.1f} s")
        node.paused_until_s = self.clock.now_s + pause_s

    async def _fall_silent(self, node: Node) -> None:
        """For longer than a lease, while clients go on: others take over."""
        how = self.weather.choice(["stands still", "is dead", "is alone"])
        lasts_s = node.settings.lease_s + 2.0 + 10.0 * self.weather.random()
        self.log("misery", f"{node.name} {how} for {lasts_s:.1f} s")
        if how == "stands still":
            node.paused_until_s = self.clock.now_s + lasts_s
        elif how == "is dead":
            self._bury(node, "machine")
        else:
            for other in (STORE, *(each.name for each in self.nodes if each is not node)):
                self.network.cut(node.name, other)
                self.network.cut(other, node.name)
        self._silent += 1
        await asyncio.sleep(lasts_s)
        self._silent -= 1
        if how == "is alone":
            self._mend()
        elif node.life is None:
            self._begin(node)

    async def _cut_pair(self, node: Node) -> None:
        other = self.weather.choice([each for each in self.nodes if each is not node])
        self._cut(node.name, other.name)
        if self.weather.random() < 0.3:
            await asyncio.sleep(20.0 * self.weather.random() ** 2)
            self._mend()

    async def _cut_store(self, node: Node) -> None:
        several = self.nodes if self.weather.random() < 0.3 else [node]
        for each in several:
            self._cut(each.name, STORE)
        await asyncio.sleep(15.0 * self.weather.random())
        self._mend()

    def _cut(self, one: str, other: str) -> None:
        which = self.weather.choice(["there", "back", "both"])
        self.log("misery", f"between {one} and {other} is cut: {which}")
        if which != "back":
            self.network.cut(one, other)
        if which != "there":
            self.network.cut(other, one)

    def _mend(self) -> None:
        self.log("misery", "all links are whole")
        self.network.heal()

    async def _change_mood(self, node: Node) -> None:
        mood = self.weather.choice(list(MOODS))
        self.service.set_mood(mood)
        self.log("misery", f"the bucket service is {mood}")

    async def _stall(self, node: Node) -> None:
        self.log("misery", f"the disk of {node.name} stalls")
        node.threads.stall(node.host.volumes[0])
        await asyncio.sleep(5.0 * self.weather.random() ** 2)
        self._answer(node)

    def _answer(self, node: Node) -> None:
        if node.life is not None:
            self.hosts.current = node.host
            node.threads.answered(node.host.volumes[0])
            self.hosts.current = self.beyond

    async def _fill(self, node: Node) -> None:
        self.log("misery", f"the disk of {node.name} is full")
        node.host.full.add(node.host.volumes[0])

    async def _drain(self, node: Node) -> None:
        word = "active" if node.wanted != "active" else self.weather.choice(["draining", "maintenance"])
        if not await self._wish(node, word) and word != "active":
            node.wanted = "perhaps " + word  # the answer may be lost: it is taken back all the same

    async def _wish(self, node: Node, word: str) -> bool:
        at = [each for each in self.nodes if each.is_up]
        if not at:
            return False
        call = json.dumps({"node": f"127.0.0.1:{node.port}", "wish": word}).encode()
        with contextlib.suppress(OSError):
            answer = await self._ask_at("wish", self.weather.choice(at), "POST", "/-/v1/cluster/wish", {}, call)
            if answer.status == 200:
                node.wanted = word
                return True
        return False

    async def _join(self, node: Node) -> None:
        if len(self.nodes) < NODES_MAX:
            self.nodes.append(Node(len(self.nodes), self.root, self))
            self._begin(self.nodes[-1])

    # --- ends --------------------------------------------------------------------------------------------------------
    async def _heal(self) -> None:
        """Nothing is wrong from now on, and everybody lives and has a place."""
        self.log("world", "fair weather")
        self.service.set_mood("fine")
        self.network.heal()
        for node in self.nodes:
            node.paused_until_s = 0.0
            node.host.changes_left = -1
            node.host.full.clear()
            self._answer(node)
            if node.life is not None:
                node.life.loop.turns_left = -1
        for _ in range(int(HEALED_S / AGAIN_S)):
            self.check()
            for node in self.nodes:
                if node.life is None:
                    self._begin(node)
                if node.wanted != "active" and await self._wish(node, "active"):
                    self.log("world", f"{node.name} is taken back")
            if all(self._is_active(node) for node in self.nodes):
                return
            await asyncio.sleep(AGAIN_S)
        seen = {node.name: self._known_by(node) for node in self.nodes}
        raise Found(f"{HEALED_S:.0f} s after trouble ended not every node is active: {seen}")

    def _is_active(self, node: Node) -> bool:
        known = self._known_by(node)
        return known is not None and known.active and [n.state for n in known.nodes] == ["active"] * len(self.nodes)

    def _known_by(self, node: Node) -> ClusterState | None:
        seat = node.life.engine.seat if node.life is not None and node.is_up else None
        return None if seat is None else seat.state()

    async def _audit(self) -> None:
        """Every key is answered at every node, and all of it has an explanation."""
        for place in [*self.places, *self.sources]:
            for node in self.nodes:
                await self._read_at(node, place)
            self.check()
            if wrong := self.judge.judge(place):
                raise Found("\n".join(wrong))

    async def _read_at(self, node: Node, place: Place) -> None:
        def at_node(method: str, target: str, headers: dict[str, str], body: bytes | None) -> Any:
            return self._ask_at("audit", node, method, target, headers, body)

        async def pause() -> None:
            await asyncio.sleep(AGAIN_S)

        reader = Client(at_node, pause, self.board, "audit", self.places, [], 0, SIZES, **KINDS)
        for _ in range(int(HEALED_S / AGAIN_S)):
            if await reader.read(place, whole=True) or self.board.wrong:
                return
        raise Found(f"{place[0]}/{place[1]} is not answered at {node.name}, though nothing is wrong any more")

    async def _arrives(self) -> None:
        """What is owed arrives at the backends, and nobody holds anything that nobody asks for."""
        owed: list[int] = []
        wrong: list[str] = []
        uncovered: list[str] = []
        patience_s = ARRIVES_S
        while patience_s > 0.0:
            engines = [node.life.engine for node in self.nodes if node.life is not None]
            owed = [engine.flusher.totals("back").objects for engine in engines]
            wrong = [left_over(node.life.engine, node.host.volumes) for node in self.nodes if node.life is not None]
            uncovered = self._uncovered()
            if not any(owed) and not any(wrong) and not uncovered:
                return
            if any(owed) or any(wrong):
                patience_s -= 10.0
            else:
                patience_s = min(HEALED_S, patience_s - 10.0)  # copies need no backend
            await asyncio.sleep(10.0)
        raise Found(f"when all is quiet, {owed} objects are owed, {wrong}, and not kept as they should: {uncovered}")

    def _uncovered(self) -> list[str]:
        """What one node alone has, though two should; and what is kept for nobody."""
        engines = [node.life.engine for node in self.nodes if node.life is not None]
        kept = {engine.node_id: dict(engine.replicas.kept.ledger.copies) for engine in engines if engine.replicas}
        wrong = []
        for engine in engines:
            agreed = engine.seat.agreed if engine.seat is not None else None
            if agreed is not None and self.copies > 1 and (agreed.deposed or not agreed.is_covered):
                wrong.append(f"{agreed.deposed} are deposed, and covered is {agreed.covered} of {agreed.due}")
            for name in [*self.places, *self.sources] if self.copies > 1 else ():
                record = engine.store.owned(*name)
                if agreed is None or record is None:
                    continue
                for second in agreed.seconds(engine.node_id, *name, self.copies):
                    copy = kept.get(second, {}).pop(name, None)
                    if copy is None or (copy.actor, copy.version) != (engine.node_id, record.object_id):
                        wrong.append(f"{name} of {engine.node_id} is not at {second}: {copy}")
        return wrong + [f"{name} at {node}: {copy}" for node, each in kept.items() for name, copy in each.items()]
