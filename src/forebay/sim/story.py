"""One seed's story: a node lives, is killed, lives again, in all weathers, while clients call; then it is judged.

Theory. The node is the product's, front and engine (`life.py`); what it stands on can fail (`host.py`, `bucket.py`,
`pools.py`). Clients write down what they were answered (`clients.py`), and each key's history must have an explanation
(`history.py`). A life ends by a kill, between two turns of the loop or between two calls that change the disk; by a
stop of the machine; or as an operator would end it. When clients have made their calls misfortune ends: everything is
flushed, the backends must hold what the histories allow, and a restart and a stop of the machine must change nothing.

What is written down of a run (`log`) says it all: two runs of a seed write the same.

Invariant. After `run` nothing of the world is left but its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import msgspec

from forebay.core.errors import ForebayError
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.settings import Settings
from forebay.sim.bucket import MOODS
from forebay.sim.checks import Homes, forgotten, left_over, watch_evictions, watched_retries
from forebay.sim.clients import FULL, Ask, Board, Client, Judge, Place, Sizes
from forebay.sim.doors import Listener, empty, open_doors
from forebay.sim.history import ABSENT
from forebay.sim.host import Host
from forebay.sim.life import Life
from forebay.sim.loop import Killed
from forebay.sim.operator import Operator
from forebay.sim.pools import SimThreads
from forebay.sim.wire import ANSWER_TIMEOUT_S, Line
from forebay.sim.world import Found, World

KIB = 1024
SIZES = Sizes(
    [80, 300, 900, 3_000, 9_000, 20_000, 40_000, 90_000],
    [6, 6, 4, 4, 4, 3, 2, 1],
    20 * KIB,
    [0, 0, 1, 50, 10_000, 30_000],
    [1, 40, 5_000, 80_000],
)
BUCKETS = (
    Bucket("through", "memory://through"),
    Bucket("back", "memory://back", write="back"),
    Bucket("hasty", "memory://hasty", write="back", durability="memory", conflict="ours"),
    Bucket("own", LOCAL_URL, write="local"),
)
KEYS, CLIENTS = 2, 4
ABSENT_RATE = 0.1  # of lives lack one of the volumes
SOURCES = {"source/small": 700, "source/large": 30_000}
THEIRS = "theirs"  # a key of each bucket that is written behind the node
VANISH_RATE = 0.03  # of GETs whose client goes away before it has everything
CALLS_DEFAULT = 120
TAIL_LINES = 60
TELLING_OF_THE_MACHINE = ("/-/metrics", "/-/v1/status")  # the real one, whose memory and time are not of the world
ARRIVES_S = 1500  # longer than any pause between two tries of a flush
SET_UP_TRIES = 60  # of a source whose disk is full of earlier ones
ROOM_BYTES = 64 * 1024 * KIB  # for everything, whatever the volumes
STALE_S = 100.0  # then the node asks its backends again: longer than a bucket's freshness


class _Pace(NamedTuple):
    """How long clients rest between calls and miseries last, at most, and how often each misery comes."""

    rest_s: float
    misery_s: float
    weights: list[float]  # of MISERIES


MISERIES = ["mood", "stall", "full", "calm", "owner", "failing"]
HURRIED = _Pace(0.1, 0.2, [6, 2, 2, 4, 2, 0.3])
UNHURRIED = _Pace(6.0, 2.0, [3, 5, 4, 4, 1, 0.3])  # lives are long enough for what a node does every few seconds


def pace_of(seed: int) -> _Pace:
    """That of the story of this seed."""
    return UNHURRIED if seed % 8 == 5 else HURRIED


class Story(World):
    """`run` it once. `echo` gets each line as it comes."""

    def __init__(self, seed: int, calls: int = CALLS_DEFAULT, echo: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, echo)
        self.calls_left, dice, self.pace = calls, self.draws, pace_of(seed)
        self.host = Host(self.root, Random(dice.getrandbits(64)))
        self.host.volumes = [f"{self.root}/v{number}" for number in range(dice.choice([2, 2, 3]))]
        self.threads = SimThreads(self.timing, self.clock, lambda: 0.002 * self.timing.random() ** 2)
        self.host.changes = self.threads.changes
        self.service = self.opens_a_bucket_service()
        self.chance = self.has_chances()
        self.settings = Settings(
            dir=f"{self.root}/node",
            listen="127.0.0.1:1",
            fronts=0,
            volumes=tuple(self.host.volumes),
            auto_buckets=False,
            capacity_bytes=dice.choice([256 * KIB, 512 * KIB, 1024 * KIB, 4096 * KIB]),
            flush_timeout_s=7200.0,
        )
        ticks = itertools.count()
        self.board = Board(lambda: float(next(ticks)))
        self.board.may_be_full = True  # 507 is an answer where owned objects take most of the room
        self.buckets = dice.sample(BUCKETS, dice.choice([1, 2, 2, 3]))
        self.places: list[Place] = [(bucket.name, f"k{number}") for bucket in self.buckets for number in range(KEYS)]
        self.sources: list[Place] = [(bucket.name, key) for bucket in self.buckets for key in SOURCES]
        self.judge = Judge(self.board, [*self.places, *self.sources])
        self.homes = Homes([*self.places, *self.sources])
        self.lines_to_front = [Line() for _ in range(CLIENTS)]
        self.clients = [self._client(number, dice.getrandbits(32)) for number in range(CLIENTS)]
        self.lines_to_front.append(Line())
        self.operator = Operator(self._ask_by(CLIENTS), self.board, self.places, Random(dice.getrandbits(64)))
        self._lost_memory = False
        self.life: Life | None = None
        self._callers: list[asyncio.Task[None]] = []
        self.lives = 0
        self.ever: dict[Place, dict[str, int]] = defaultdict(dict)  # what was ever written there

    def _client(self, number: int, seed: int) -> Client:
        line = self.lines_to_front[number]

        async def pause() -> None:
            if line.address:
                await asyncio.sleep(0.05)

        names, ask = list(SOURCES), self._ask_by(number)
        kinds = {"changing": ("back", "hasty"), "fleeting": ("through", "hasty")}
        return Client(ask, pause, self.board, f"c{number}", self.places, names, seed, SIZES, **kinds)

    def _ask_by(self, number: int) -> Ask:
        line = self.lines_to_front[number]

        async def ask(method: str, target: str, headers: dict[str, str], body: bytes | None) -> Any:
            vanishes = method == "GET" and self.calls_left > 0 and self.timing.random() < VANISH_RATE
            patience_s = 0.02 * self.timing.random() if vanishes else ANSWER_TIMEOUT_S
            try:
                answer = await line.ask(method, target, headers, body, patience_s)
            except OSError:
                self.log("client", f"{number} {method} {target} no answer")
                raise
            size = "" if target in TELLING_OF_THE_MACHINE else len(answer.body)
            self.log("client", f"{number} {method} {target} {answer.status} {size}")
            return answer

        return ask

    # --- the run -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Raises `Found`, or any `AssertionError` of the product."""
        ear = Listener(self.root, lambda: self.host.dead, lambda text: self.log("node", text), self.problems.append)
        doors = open_doors(self.clock, self.chance, self.threads, ear)
        with doors, self.host.installed(), watched_retries(self.problems.append):
            try:
                self._begin_life().run(self._set_up())
                self._bury("set up")
                while self.calls_left > 0:
                    self._bury(self._live())
                self._fair_weather()
                self._calm()
            finally:
                self.host.dead = True
                if self.life is not None:
                    self._bury("end")
                empty(self.graves)
        self.host.clean_up()
        shutil.rmtree(self.root, ignore_errors=True)

    def _begin_life(self) -> Life:
        self.lives += 1
        self.host.dead = False
        self.service.owes = lambda bucket, key: self._owes(bucket, key)
        life = self.life = Life(
            self.settings, self.service.open, self.clock, self.threads, self.broke, lambda: self.host.dead
        )
        self.log("world", f"life {self.lives} begins")
        return life

    def _owes(self, bucket: str, key: str) -> bool:
        flusher = getattr(getattr(self.life, "engine", None), "flusher", None)
        return flusher is not None and flusher.find(bucket, key) is not None

    def _live(self) -> str:
        """One life, with its end; how it ended."""
        life = self._begin_life()
        how = self.dice.choices(["kill", "machine", "stop"], [3, 4, 2])[0]
        early = self.dice.random() < 0.25
        if how != "stop" and early:
            self._arm(life, 400, 60)
        hidden = self.dice.choice(self.host.volumes) if self.dice.random() < ABSENT_RATE else ""
        if hidden:
            self.host.hide(hidden)
            self.log("misery", f"volume {hidden[-2:]} is absent")
        troubled = bool(hidden or self.host.full or self.host.failing)
        try:
            life.run(self._serve(life, how, early=early))
        except Killed:
            pass
        except ForebayError as error:
            if life.is_up or not troubled:
                raise Found(f"the node does not start: {error}") from error
            self.log("world", f"does not start: {type(error).__name__}")
            self._fair_weather()
        else:
            how = "stop"
        if hidden:
            self.host.show(hidden)
        self.check()
        return how

    def _arm(self, life: Life, turns: int, changes: int) -> None:
        """Choose the moment in which the process is killed."""
        if self.dice.random() < 0.5:
            life.loop.turns_left = int(turns * self.dice.random() ** 2) + 1
        else:
            self.host.changes_left = int(changes * self.dice.random() ** 2)

    async def _start(self, life: Life) -> None:
        await life.start()
        watch_evictions(life.engine, self.problems.append)
        if moved := self.homes.moved(life.engine, len(self.host.volumes)):
            self.problems.append(moved)

    async def _serve(self, life: Life, how: str, *, early: bool) -> None:
        await self._start(life)
        self.log("world", "serves")
        paths = {volume.id: volume.path for volume in life.engine.store.usable()}
        self.threads.name_of = lambda disk: paths.get(disk, disk)
        for line in self.lines_to_front:
            line.address = life.address
        if how != "stop" and not early:
            self._arm(life, 1500, 200)
        calls = min(self.calls_left, self.dice.randrange(5, 60))

        async def work(client: Client) -> None:
            nonlocal calls
            while calls > 0 and not self.board.wrong:
                calls -= 1
                self.calls_left -= 1
                await client.call()
                if self.host.dead:
                    return
                await asyncio.sleep(self.pace.rest_s * self.timing.random() ** 4)

        self._callers = [asyncio.ensure_future(work(client)) for client in self.clients]
        others = [asyncio.ensure_future(self._misery()), asyncio.ensure_future(self._operate())]
        await asyncio.gather(*self._callers)
        for each in others:
            each.cancel()
        disturbed = bool(self.host.full) or any(usage.state != "ok" for usage in life.engine.store.usage())
        self._fair_weather()
        if not disturbed:
            await self._arrives(life)
        await life.stop(flush=self.dice.random() < 0.3)

    async def _arrives(self, life: Life) -> None:
        """In fair weather what is owed arrives, unasked."""
        for _ in range(ARRIVES_S // 10):
            owed = [bucket.name for bucket in self.buckets if life.engine.flusher.totals(bucket.name).objects]
            if not owed:
                if wrong := forgotten(life.engine, [bucket.name for bucket in self.buckets]):
                    raise Found(wrong)
                return
            await asyncio.sleep(10.0)
        raise Found(f"{owed} owe something, and nobody brings it")

    async def _operate(self) -> None:
        while True:
            await asyncio.sleep(0.1 * self.timing.random())
            with contextlib.suppress(OSError):
                await self.operator.act()

    async def _set_up(self) -> None:
        assert self.life is not None
        await self.life.start()
        for each in self.buckets:
            await self.life.engine.buckets.put(each)
        self.lines_to_front[0].address = self.life.address
        for bucket, key in self.sources:
            label = f"{bucket} {key}"
            body = self.board.new((bucket, key), label, SOURCES[key])
            for _ in range(SET_UP_TRIES):
                answer = await self.lines_to_front[0].ask("PUT", f"/{bucket}/{key}", {}, body)
                if answer.status != FULL:
                    break
                await asyncio.sleep(1.0)  # the earlier ones are on their way to the backend
            assert answer.status == 200, answer
            self.judge.content[bucket, key] = {label}
        await self.life.stop(flush=True)

    async def _misery(self) -> None:
        self.service.set_mood(self.weather.choice(["fine", "away", "away", "losing", "slow"]))
        while True:
            await asyncio.sleep(self.pace.misery_s * self.weather.random())
            what = self.weather.choices(MISERIES, self.pace.weights)[0]
            volume = self.weather.choice(self.host.volumes)
            if what == "mood":
                mood = self.weather.choice(list(MOODS))
                self.service.set_mood(mood)
                self.log("misery", f"the bucket service is {mood}")
            elif what == "stall":
                self.threads.stall(volume)
                self.log("misery", f"the disk of {volume[-2:]} stalls")
                await asyncio.sleep(5.0 * self.weather.random() ** 2)
                self.threads.answered(volume)
                self.log("misery", f"the disk of {volume[-2:]} answers")
            elif what == "owner":
                for memory in self.service.memory.values():
                    memory.place(THEIRS, self.weather.randbytes(self.weather.choice([400, 3_000, 40_000])))
                self.log("misery", f"somebody else writes {THEIRS}")
            elif what == "full":
                self.host.full.add(volume)
                self.log("misery", f"the disk of {volume[-2:]} is full")
            elif what == "failing":
                self.host.failing.add(volume)
                self.log("misery", f"the next sync of {volume[-2:]} fails")
            else:
                self._fair_weather()
                self.log("misery", "fair")

    def _fair_weather(self) -> None:
        self.service.set_mood("fine")
        self.host.full.clear()
        self.host.failing.clear()
        for volume in self.host.volumes:
            self.threads.answered(volume)

    # --- ends --------------------------------------------------------------------------------------------------------
    def _bury(self, how: str) -> None:
        """The process is gone. Clients that wait learn it."""
        life = self.life
        assert life is not None
        self.host.dead = True
        self.log("world", f"life {self.lives} ends: {how}")
        for line in self.lines_to_front:
            line.cut()
        for caller in self._callers:
            if not caller.done():
                try:
                    caller.get_coro().throw(ConnectionResetError("the node is gone"))
                except (StopIteration, ConnectionResetError):
                    pass
        self.graves += [life, self._callers, list(asyncio.all_tasks(life.loop))]
        self._callers = []
        self.service.end_life()
        self.threads.end_life()
        self.host.kill()
        life.loop.abandon()
        self.life = None
        if how == "machine":
            self.host.stop()
            self.board.machine_stops += 1
            self._remember_less()
        self.check()

    def _remember_less(self) -> None:
        """What was asked to be kept in memory alone may be what it once was."""
        for place in self.places:
            if place[0] == "hasty":
                self._lost_memory = True
                self._judge_place(place)
                self.judge.content[place] = {ABSENT, *self.ever[place]}
                self.board.tried[place] = dict(self.ever[place])

    def _calm(self) -> None:
        """Everything arrives, and what is read is right: at once, after a restart, after a stop of the machine."""
        for how in ("flush", "stop", "machine", "last"):
            life = self._begin_life()
            life.run(self._start(life))
            if life.engine.store.astray:
                life = self._make_room(life)
            life.run(self._audit(life, flush=how == "flush"))
            if how == "flush":
                self.compare_backends([*self.places, *self.sources])
            self._bury(how)

    def _make_room(self, life: Life) -> Life:
        """What only this node has found no room where its key belongs now: as an operator would, give the node more
        capacity and restart it (docs/operating.md)."""
        life.run(life.stop(flush=False))
        self._bury("more capacity")
        self.settings = msgspec.structs.replace(self.settings, capacity_bytes=ROOM_BYTES)
        life = self._begin_life()
        life.run(self._start(life))
        if life.engine.store.astray:
            raise Found(f"there is room, and {life.engine.store.astray} could not move")
        return life

    async def _audit(self, life: Life, *, flush: bool) -> None:
        for line in self.lines_to_front:
            line.address = life.address
        self.service.land(float("inf"))
        await asyncio.sleep(STALE_S)
        reader = self.clients[0]
        for place in [*self.places, *self.sources]:
            for _ in range(100):
                if await reader.read(place, whole=True) or self.board.wrong:
                    break
                await asyncio.sleep(10.0)
            else:
                raise Found(f"{place[0]}/{place[1]} is not answered, though nothing is wrong any more")
            self.check()
            self._judge_place(place)
        for bucket in self.buckets:
            if wrong := await self.operator.check(
                bucket.name, may_be_older=bucket.name == "hasty" and self._lost_memory
            ):
                raise Found(wrong)
        await self._read_theirs()
        await self._rests(life)
        await life.stop(flush=flush)
        self.check()

    async def _read_theirs(self) -> None:
        """What somebody else changes behind the node reads as it is, once the bucket's freshness has run out."""
        before = {bucket: await self._reads_theirs(bucket) for bucket in self.service.memory}
        for memory in self.service.memory.values():
            memory.place(THEIRS, self.weather.randbytes(3_000))
        await asyncio.sleep(STALE_S)
        for bucket, body in before.items():
            if await self._reads_theirs(bucket) == body:
                raise Found(f"{bucket}/{THEIRS} was changed at the backend {STALE_S:.0f} s ago, and reads as before")

    async def _reads_theirs(self, bucket: str) -> bytes:
        for _ in range(3):
            with contextlib.suppress(OSError):  # the node closes a connection that rests
                return (await self.lines_to_front[0].ask("GET", f"/{bucket}/{THEIRS}", {}, None)).body
        raise Found(f"{bucket}/{THEIRS} is not answered, though nothing is wrong any more")

    async def _rests(self, life: Life) -> None:
        """Nothing is held when nobody asks anything."""
        for _ in range(30):
            wrong = left_over(life.engine, self.host.volumes)
            if not wrong:
                return
            await asyncio.sleep(10.0)
        raise Found(wrong)

    def _judge_place(self, place: Place) -> None:
        self.ever[place].update(self.board.tried[place])
        if wrong := self.judge.judge(place):
            raise Found("\n".join(wrong))
