"""`python -m tests.sim.outage`: a bucket is away for an hour while two ranks save under a bound of what it may owe.

The node is the product's, front and engine, in virtual time. So is what a rank does towards it: the client, the
patience of a save, and the repository that commits a manifest. A rank is a greenlet, which gives way where it would
wait. What is left out is what takes no part in waiting for the bucket: torch, and the memory that is handed over.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import greenlet

from forebay.checkpoint.repository import Repository
from forebay.client.patience import with_patience
from forebay.client.sync import Client
from forebay.core.checkpoint import Manifest, RankPart, blob_name, index_name
from forebay.core.errors import ForebayError
from forebay.core.types import Bucket
from forebay.node.settings import Settings
from forebay.sim.clients import Board
from forebay.sim.doors import Listener, empty, open_doors, patched
from forebay.sim.host import Host
from forebay.sim.life import Life
from forebay.sim.network import _Connection, _sleep
from forebay.sim.pools import SimThreads
from forebay.sim.world import World

KIB = 1024
HOUR_S = 3600.0
PATIENCE_S = 6 * HOUR_S  # the default of a save
BLOBS, BLOB_BYTES = 3, 100 * KIB
SAVE_BYTES = 2 * (BLOBS * BLOB_BYTES)
OWED_BYTES_MAX = 4 * SAVE_BYTES + 20 * KIB  # four saves, and a part of the fifth
STEP_S = 5.0
BACK_S = 120.0  # then everything must have arrived: twice the longest pause between two tries


class _Wire(_Connection):
    def recv(self, size: int, flags: int = 0) -> bytes:
        if flags:  # a look that does not wait
            return socket.socket.recv(self, size, flags)
        room = bytearray(size)
        return bytes(room[: self.recv_into(room)])


class _Line:
    """What a connection asks of the network: here nothing is cut, and nothing takes time."""

    def __init__(self, world: Outage) -> None:
        self._world = world

    def is_cut(self, sender: str, receiver: str) -> bool:
        return False

    def delay_s(self) -> float:
        return 0.001

    def dial(self, address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
        assert self._world.life is not None
        connection = _Wire(self, "job", "node")  # type: ignore[arg-type]
        connection.settimeout(timeout)
        connection.connect(self._world.life.address)
        return connection


def _begin(work: Callable[[], None]) -> None:
    """As a thread that is started."""
    asyncio.get_running_loop().call_soon(lambda: greenlet.greenlet(work).switch())


class Rank:
    """Saves as a job's rank does: its blobs, then its index, then, for all, the manifest."""

    def __init__(self, world: Outage, number: int) -> None:
        self.number = number
        self._world = world
        client = Client("http://127.0.0.1:1")
        client.door.off()
        self.repository = Repository(client, "runs", "job/")
        self.waited_s = 0.0  # for the node, in all
        self.waiting = ""

    def patiently(self, attempt: Callable[[], Any]) -> Any:
        def pause(delay_s: float, error: ForebayError) -> None:
            self.waiting = str(error)
            self.waited_s += delay_s
            _sleep(delay_s)

        found = with_patience(attempt, PATIENCE_S, pause, "given up")
        self.waiting = ""
        return found

    def save(self, sequence: int) -> RankPart:
        token = f"{sequence:016x}"
        client, prefix = self.repository.client, self.repository.prefix
        for blob in range(BLOBS):
            name = prefix + blob_name(sequence, token, self.number, blob)
            self.patiently(lambda name=name: client.put("runs", name, self._world.body(name)))  # type: ignore[misc]
        name = prefix + index_name(sequence, token, self.number)
        self.patiently(lambda: client.put("runs", name, b"index"))
        return RankPart("0" * 32, 5, (BLOB_BYTES,) * BLOBS)

    def commit(self, sequence: int, parts: list[RankPart]) -> None:
        manifest = Manifest(sequence, sequence, f"{sequence:016x}", 0.0, tuple(parts), ("w",))
        self.patiently(lambda: self.repository.commit(manifest))


class Outage(World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, None)
        self.host = Host(self.root, Random(self.draws.getrandbits(64)))
        self.host.volumes = [f"{self.root}/v0"]
        self.threads = SimThreads(self.timing, self.clock, lambda: 0.002 * self.timing.random() ** 2)
        self.service = self.opens_a_bucket_service()
        self.chance = self.has_chances()
        self.settings = Settings(
            dir=f"{self.root}/node",
            listen="127.0.0.1:1",
            fronts=0,
            volumes=tuple(self.host.volumes),
            auto_buckets=False,
            capacity_bytes=64 << 20,
        )
        self.board = Board(lambda: self.clock.now_s)
        self.life: Life | None = None
        self.counted: list[tuple[float, int]] = []  # when which save counted
        self.ranks: list[Rank] = []
        self.most_owed_bytes = 0
        self.steps = 0  # of training, which goes on

    def body(self, name: str) -> bytes:
        return Random(name).randbytes(BLOB_BYTES)

    def run(self) -> None:
        ear = Listener(self.root, lambda: self.host.dead, lambda text: self.log("node", text), self.problems.append)
        line = _Line(self)
        with open_doors(self.clock, self.chance, self.threads, ear), self.host.installed():
            with patched([(socket, "create_connection", line.dial)]):
                life = self.life = Life(
                    self.settings, self.service.open, self.clock, self.threads, self.broke, lambda: self.host.dead
                )
                life.run(self._tell(life))
                self.host.dead = True
                life.loop.abandon()
        empty(self.graves)
        self.host.clean_up()
        shutil.rmtree(self.root, ignore_errors=True)
        self.check()

    async def _tell(self, life: Life) -> None:
        await life.start()
        await life.engine.buckets.put(Bucket("runs", "memory://runs", write="back", dirty_bytes_max=OWED_BYTES_MAX))
        self.ranks = [Rank(self, number) for number in range(2)]
        ended = asyncio.Event()
        _begin(lambda: self._job(ended))
        await self._owes_nothing(life)
        before = len(self.counted)
        assert before, "saves count while all is well"

        self.service.set_mood("away")
        away_s = self.clock.now_s
        while self.clock.now_s < away_s + HOUR_S:
            await asyncio.sleep(1.0)
            self.most_owed_bytes = max(self.most_owed_bytes, life.engine.flusher.totals("runs").bytes)
        during = [at_s for at_s, _ in self.counted[before:]]
        assert len(during) >= 3, f"what fits counts although the bucket is away: {len(during)} saves"
        assert max(during) < away_s + HOUR_S / 2, "the bound is reached"
        waits = [rank.waiting for rank in self.ranks]
        assert any("owes its backend" in said for said in waits), f"who waits says for what: {waits}"
        assert self.most_owed_bytes <= OWED_BYTES_MAX
        assert self.steps > 0.9 * HOUR_S / STEP_S, "training goes on"
        there = set(self.service.memory["runs"]._objects)

        self.service.set_mood("fine")
        back_s = self.clock.now_s
        while len(self.counted) == before + len(during):
            assert self.clock.now_s < back_s + BACK_S, "the save that waited counts soon after"
            await asyncio.sleep(1.0)
        self.stops = True
        await ended.wait()
        await self._owes_nothing(life)
        assert self.clock.now_s < back_s + 2 * BACK_S, "all of it is in the bucket soon after"
        found = self.service.memory["runs"]._objects
        assert len(found) > len(there)
        for _, sequence in self.counted:
            for number in range(2):
                for blob in range(BLOBS):
                    name = "job/" + blob_name(sequence, f"{sequence:016x}", number, blob)
                    assert found[name][1] == self.body(name), name
        assert self.ranks[0].waited_s + self.ranks[1].waited_s > HOUR_S / 2
        await life.stop(flush=True)

    stops = False

    def _job(self, ended: asyncio.Event) -> None:
        """Training, and a save whenever the one before has ended."""
        sequence = 0
        while not self.stops:
            sequence += 1
            parts: dict[int, RankPart] = {}
            for rank in self.ranks:

                def work(rank: Rank = rank, sequence: int = sequence, parts: dict[int, RankPart] = parts) -> None:
                    parts[rank.number] = rank.save(sequence)

                _begin(work)
            while len(parts) < len(self.ranks):
                self._train()
            committed: list[bool] = []

            def commit(
                sequence: int = sequence, parts: dict[int, RankPart] = parts, committed: list[bool] = committed
            ) -> None:
                self.ranks[0].commit(sequence, [parts[number] for number in sorted(parts)])
                committed.append(True)

            _begin(commit)
            while not committed:
                self._train()
            self.counted.append((self.clock.now_s, sequence))
            for _ in range(6):
                self._train()
        ended.set()

    def _train(self) -> None:
        _sleep(STEP_S)
        self.steps += 1

    async def _owes_nothing(self, life: Life) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.counted and not life.engine.flusher.totals("runs").objects:
                return


def main() -> None:
    seed = int(sys.argv[1])
    world = Outage(seed)
    world.run()
    waited_s = sum(rank.waited_s for rank in world.ranks)
    print(
        f"{len(world.counted)} saves counted, {world.steps} steps, ranks waited {waited_s:.0f} s; at most "
        f"{world.most_owed_bytes} of {OWED_BYTES_MAX} bytes were owed"
    )


if __name__ == "__main__":
    main()
