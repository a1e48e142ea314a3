"""A bucket service with moods: what a node's backends are in a simulated world.

Theory. The objects are those of the seam's memory backend; `Faulty` refuses, breaks bodies and loses answers as a
mood's plan says. What it cannot do is done here: a request whose answer was lost may arrive long after, when it was
given up. It lands at its time, which is looked at before anything else is asked, so that no timer has to outlive a
node's life. It does so only while its key owes something: what comes after that is beyond any node
(docs/semantics.md says so).

Invariant. A request that arrives late does so within `LATE_S`, and its conditions are judged then.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random
from typing import Any

import msgspec

from forebay.backends.http import bodies
from forebay.backends.local.memory import MemoryBackend
from forebay.backends.seam import Backend, Body, PartSeen, UploadSeen
from forebay.backends.wrap.counting import BackendCounters, Counting
from forebay.backends.wrap.faulty import FaultPlan, Faulty
from forebay.backends.wrap.peers import Peers, PeersFirst
from forebay.backends.wrap.retrying import Retrying
from forebay.core import limits
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.types import Bucket, Headers, ListPage, ObjectInfo, RangeSpec
from forebay.ports import chance, clock
from forebay.sim.loop import VirtualClock

MOODS = {
    "fine": FaultPlan(latency_s=0.004),
    "quick": FaultPlan(),
    "slow": FaultPlan(latency_s=0.3, rate_bytes_s=40_000),
    "refusing": FaultPlan(latency_s=0.004, error_rate=0.3, busy_rate=0.2),
    "breaking": FaultPlan(latency_s=0.004, reset_rate=0.3, truncate_rate=0.2),
    "losing": FaultPlan(latency_s=0.004, lost_rate=0.4),
    "away": FaultPlan(latency_s=0.02, error_rate=1.0),
}
_Late = Callable[[], Coroutine[Any, Any, Any]]
LATE_RATE = 0.5  # of the writes in the mood `losing`


class Service:
    """All buckets of a world. They outlive the node."""

    def __init__(self, virtual: VirtualClock, dice: Random) -> None:
        self.memory: dict[str, MemoryBackend] = {}
        self._virtual, self._dice = virtual, dice
        self._late: list[tuple[float, int, tuple[str, str], _Late]] = []
        self.owes: Callable[[str, str], bool] = lambda bucket, key: False
        self._count = 0
        self.landed_late = 0
        self.steady = {"through"}
        self._doors: dict[str, _Moody] = {}
        self.mood = {"": "fine"}
        self.told: Callable[[str], None] = lambda what: None

    def open(self, bucket: Bucket, counters: BackendCounters, peers: Peers | None = None) -> Backend:
        """As `backends/stack.py` puts one together."""
        door = self._doors.get(bucket.name)
        if door is None:
            memory = self.memory[bucket.name] = _Memory(bucket.name)
            faulty = Faulty(memory, FaultPlan(seed=self._dice.getrandbits(32)), clock=clock.system)
            door = self._doors[bucket.name] = _Moody(faulty, self)
            self.set_mood(self.mood[""])
        counting = Counting(door, counters, clock.system)
        if peers is not None and bucket.write == "through":
            counting = PeersFirst(door, counters, clock.system, bucket.name, peers)
        return Retrying(counting, clock.system, chance.system, counters)

    def set_mood(self, name: str) -> None:
        """Of all buckets, from now on."""
        self.mood[""] = name
        for door in self._doors.values():
            door.inner.plan = MOODS[name]

    def loses(self, bucket: str) -> bool:
        """Whether a request arrives late. Who writes through has no means against that, as any client of S3."""
        return bucket not in self.steady and self.mood[""] == "losing" and self._dice.random() < LATE_RATE

    def later(self, place: tuple[str, str], what: _Late) -> None:
        """Let this happen within `LATE_S`, mostly soon."""
        self._count += 1
        delay_s = limits.LATE_S * self._dice.random() ** 6
        heapq.heappush(self._late, (self._virtual.now_s + delay_s, self._count, place, what))

    def land(self, upto_s: float | None = None) -> None:
        """Let happen what was late and is due now, or at `upto_s`."""
        upto_s = self._virtual.now_s if upto_s is None else upto_s
        while self._late and self._late[0][0] <= upto_s:
            _, _, place, what = heapq.heappop(self._late)
            if not self.owes(*place):
                continue
            self.landed_late += 1
            self.told(f"late {place[0]}/{place[1]}")
            try:
                what().send(None)
            except (StopIteration, ForebayError):
                continue
            raise AssertionError("what lands late must not wait")

    def end_life(self) -> None:
        """A node that starts again knows of what is on its way only for keys that owe something."""
        self._late = [each for each in self._late if self.owes(*each[2])]
        heapq.heapify(self._late)
        self.owes = lambda bucket, key: False


class _Memory(MemoryBackend):
    """With the ETags that S3 gives."""

    def place(self, key: str, data: bytes, headers: Headers = ()) -> ObjectInfo:
        info = super().place(key, data, headers)
        info = msgspec.structs.replace(info, etag=hashlib.md5(data, usedforsecurity=False).hexdigest())
        self._objects[key] = (info, self._objects[key][1])
        return info


class _Moody:
    """The seam to one bucket."""

    def __init__(self, inner: Faulty, service: Service) -> None:
        self.scheme, self.read_only, self.part_bytes_min = inner.scheme, inner.read_only, inner.part_bytes_min
        self.inner, self._service = inner, service
        self._bare: Any = inner.inner

    async def _ask(self, call: Awaitable[Any]) -> Any:
        self._service.land()
        return await call

    async def _change(self, key: str, call: Awaitable[Any], late: _Late) -> Any:
        self._service.land()
        name = f"{getattr(call, '__name__', '')} {self._bare.name}/{key}"
        if self._service.loses(self._bare.name):
            assert asyncio.iscoroutine(call)
            call.close()
            self._service.later((self._bare.name, key), late)
            self._service.told(f"{name} will be late")
            await asyncio.sleep(0.01)
            raise Unavailable("the connection was lost while the request was under way; look, or send it again")
        try:
            done = await call
        except ForebayError as error:
            self._service.told(f"{name} {type(error).__name__}")
            raise
        self._service.told(f"{name} done {getattr(done, 'version', '')}")
        return done

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> Any:
        return await self._ask(self.inner.fetch(key, range, version=version))

    async def head(self, key: str) -> ObjectInfo:
        found: ObjectInfo = await self._ask(self.inner.head(key))
        return found

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        found: ObjectInfo | None = await self._ask(self.inner.check(key, version))
        return found

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        page: ListPage = await self._ask(self.inner.list_page(prefix, delimiter, start_after, limit))
        return page

    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        kept = body
        if self._service.mood[""] == "losing":  # what has left cannot be read again later
            await body.ready(body.size_bytes)
            kept = Body(body.size_bytes, bodies.whole(body), md5=body.md5)
        info: ObjectInfo = await self._change(
            key,
            self.inner.put(key, body, headers=headers, expect=expect, tags=tags),
            lambda: _placed(self._bare, key, kept, headers, expect, tags),
        )
        return info

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        await self._change(key, self.inner.delete(key, expect=expect), lambda: self._bare.delete(key, expect=expect))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        named: Any = {"source_version": source_version, "headers": headers}
        info: ObjectInfo = await self._change(
            key, self.inner.copy(source_key, key, **named), lambda: self._bare.copy(source_key, key, **named)
        )
        return info

    async def read_tags(self, key: str) -> str:
        return str(await self._ask(self.inner.read_tags(key)))

    async def write_tags(self, key: str, tags: str) -> None:
        await self._ask(self.inner.write_tags(key, tags))

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return str(
            await self._change(
                key,
                self.inner.begin_upload(key, headers=headers, tags=tags),
                lambda: self._bare.begin_upload(key, headers=headers, tags=tags),
            )
        )

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        return str(await self._ask(self.inner.put_part(key, upload_id, number, body)))

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        info: ObjectInfo = await self._change(
            key,
            self.inner.complete_upload(key, upload_id, parts, expect=expect),
            lambda: self._bare.complete_upload(key, upload_id, parts, expect=expect),
        )
        return info

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._ask(self.inner.abort_upload(key, upload_id))

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        found: list[PartSeen] = await self._ask(self.inner.list_parts(key, upload_id))
        return found

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        found: list[UploadSeen] = await self._ask(self.inner.list_uploads(prefix))
        return found

    async def probe(self) -> None:
        await self._ask(self.inner.probe())

    async def aclose(self) -> None:
        """It stays for the next life."""


async def _placed(
    bare: MemoryBackend, key: str, body: Body, headers: Headers, expect: str | None, tags: str
) -> ObjectInfo:
    bare._check_expected(key, expect)
    assert body.data is not None
    info = bare.place(key, body.data, headers)
    if tags:
        bare.tags[key] = tags
    return info
