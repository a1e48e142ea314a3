"""A backend that fails as real ones do, for tests, benchmarks and the demo.

Theory. As a wrapper on the seam it gives the code above the same errors and bodies as a cloud. There are two ways to
order faults: a `FaultPlan` of rates drawn from a seed (the same seed and calls give the same faults), and a script of
single faults for the next fetches and writes, for tests that tell one story. It also breaks the seam's own promises (a
body that just ends, a wrong size, a stale listing), since the layers above must survive that too.

Adding to `version_salt` makes every object look changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from forebay.backends import errors
from forebay.backends.seam import Backend, Body, Fetch, PartSeen, UploadSeen
from forebay.core.errors import Busy, ForebayError, Unavailable
from forebay.core.types import Headers, ListPage, ObjectInfo, RangeSpec
from forebay.ports.chance import Seeded
from forebay.ports.clock import Clock, SystemClock

NOTHING = Body(0, b"")

ResultT = TypeVar("ResultT")
Sleep = Callable[[float], Awaitable[object]]


class FaultPlan(msgspec.Struct, frozen=True):
    """How often what happens. Rates are shares of requests, in [0, 1]; 0 is never.

    `latency_s` before each answer; `rate_bytes_s` of one body (0: unlimited). `error_rate` answers 5xx, `busy_rate`
    asks to slow down; `reset_rate` breaks a body midway, `truncate_rate` ends one early without a word; `change_rate`
    makes the object another version; `stale_rate` answers a listing as it was when first asked; `lie_rate` says an
    object is one byte larger than it is. Of writes, `error_rate` and `busy_rate` refuse, `reset_rate` breaks a body on
    its way, `lost_rate` does what was asked and then answers 5xx; `rate_bytes_s` paces a body. `retry_after_s` is what
    an answer says that asks to slow down.
    """

    seed: int = 0
    latency_s: float = 0.0
    rate_bytes_s: float = 0.0
    error_rate: float = 0.0
    busy_rate: float = 0.0
    reset_rate: float = 0.0
    truncate_rate: float = 0.0
    change_rate: float = 0.0
    stale_rate: float = 0.0
    lie_rate: float = 0.0
    lost_rate: float = 0.0
    retry_after_s: float = 0.0


class Fail(msgspec.Struct, frozen=True):
    """Script: the next fetch or write raises this instead of answering."""

    error: ForebayError


class Reset(msgspec.Struct, frozen=True):
    """Script: the next body, in either direction, breaks with `Unavailable` after so many bytes."""

    after_bytes: int


class Truncate(msgspec.Struct, frozen=True):
    """Script: the next body ends after so many bytes, without an error."""

    after_bytes: int


class Lie(msgspec.Struct, frozen=True):
    """Script: the next object says that it is so many bytes larger than it is."""

    extra_bytes: int


class Lose(msgspec.Struct, frozen=True):
    """Script: the next write happens, and its answer is lost."""


Fault = Fail | Reset | Truncate | Lie | Lose


class FaultyFetch:
    """A body with at most one fault."""

    def __init__(self, faulty: Faulty, inner: Fetch, info: ObjectInfo, end: int, fault: Fault | None) -> None:
        self.info, self.start, self.end = info, inner.start, end
        self._faulty, self._inner, self._chunks = faulty, inner, inner.__aiter__()
        self._fault = fault
        self._sent_bytes = 0
        self._began_s: float | None = None

    def __aiter__(self) -> FaultyFetch:
        return self

    async def __anext__(self) -> Any:
        stop = self._fault.after_bytes if isinstance(self._fault, Reset | Truncate) else None
        if stop is not None and self._sent_bytes >= stop:
            await self._inner.aclose()
            if isinstance(self._fault, Truncate):
                raise StopAsyncIteration
            raise Unavailable("planned fault: the connection was reset in the middle of the body; read the rest again")
        chunk: Any = await self._chunks.__anext__()
        if stop is not None and self._sent_bytes + len(chunk) > stop:
            chunk = memoryview(chunk)[: stop - self._sent_bytes]
        self._sent_bytes += len(chunk)
        await self._pace()
        return chunk

    async def _pace(self) -> None:
        rate, clock = self._faulty.plan.rate_bytes_s, self._faulty.clock
        if rate:
            if self._began_s is None:
                self._began_s = clock.monotonic_s()
            ahead_s = self._began_s + self._sent_bytes / rate - clock.monotonic_s()
            if ahead_s > 0:
                await self._faulty.sleep(ahead_s)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Disturbed:
    """Paces a body on its way to the backend, and breaks it."""

    def __init__(self, faulty: Faulty, body: Body, fault: Fault | None) -> None:
        self._faulty, self._body = faulty, body
        self._stop = fault.after_bytes if isinstance(fault, Reset) else None
        self._began_s = faulty.clock.monotonic_s()

    async def ready(self, upto: int) -> None:
        await self._body.ready(upto)
        if self._stop is not None and upto > self._stop:
            raise Unavailable("planned fault: the connection was reset while the body was sent; send it again")
        rate = self._faulty.plan.rate_bytes_s
        if rate:
            ahead_s = self._began_s + upto / rate - self._faulty.clock.monotonic_s()
            if ahead_s > 0:
                await self._faulty.sleep(ahead_s)


class Faulty:
    """See the module. `plan` and `version_salt` may be changed at any time; `script` is consumed from its left end."""

    def __init__(
        self,
        inner: Backend,
        plan: FaultPlan | None = None,
        *,
        script: list[Fault] | None = None,
        clock: Clock | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.scheme, self.read_only, self.part_bytes_min = inner.scheme, inner.read_only, inner.part_bytes_min
        self.inner = inner
        self.plan = plan or FaultPlan()
        self.script: deque[Fault] = deque(script or [])
        self.version_salt = 0
        self.clock, self.sleep = clock or SystemClock(), sleep
        self._draws = Seeded(self.plan.seed)
        self._first_pages: dict[tuple[str, str, str, int], ListPage] = {}

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> FaultyFetch:
        fault = self.script.popleft() if self.script else None
        if isinstance(fault, Fail):
            raise fault.error
        await self._before()
        if self._happens(self.plan.change_rate):
            self.version_salt += 1
        if version and version != self._salted(self._bare(version)):
            raise errors.changed(key)
        inner = await self.inner.fetch(key, range, version=self._bare(version))
        if fault is None:
            fault = self._draw_fault(inner.end - inner.start)
        info = msgspec.structs.replace(inner.info, version=self._salted(inner.info.version))
        end = inner.end
        if isinstance(fault, Lie):
            info = msgspec.structs.replace(info, size_bytes=info.size_bytes + fault.extra_bytes)
            if inner.end == inner.info.size_bytes:
                end += fault.extra_bytes
        return FaultyFetch(self, inner, info, end, fault)

    async def head(self, key: str) -> ObjectInfo:
        await self._before()
        info = await self.inner.head(key)
        return msgspec.structs.replace(info, version=self._salted(info.version))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        info = await self.head(key)
        return None if info.version == version else info

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        await self._before()
        asked = (prefix, delimiter, start_after, limit)
        if asked in self._first_pages and self._happens(self.plan.stale_rate):
            return self._first_pages[asked]
        page = await self.inner.list_page(prefix, delimiter, start_after, limit)
        if self.plan.stale_rate:
            self._first_pages.setdefault(asked, page)
        return page

    # --- writing -----------------------------------------------------------------------------------------------------
    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        bare = self._expected(key, expect)
        info = await self._write(lambda own: self.inner.put(key, own, headers=headers, expect=bare, tags=tags), body)
        return msgspec.structs.replace(info, version=self._salted(info.version))

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        bare = self._expected(key, expect)
        await self._write(lambda _: self.inner.delete(key, expect=bare))

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        bare = self._expected(source_key, source_version) or ""
        info = await self._write(lambda _: self.inner.copy(source_key, key, source_version=bare, headers=headers))
        return msgspec.structs.replace(info, version=self._salted(info.version))

    async def read_tags(self, key: str) -> str:
        return await self.inner.read_tags(key)

    async def write_tags(self, key: str, tags: str) -> None:
        await self.inner.write_tags(key, tags)

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        return await self._write(lambda _: self.inner.begin_upload(key, headers=headers, tags=tags))

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        return await self._write(lambda own: self.inner.put_part(key, upload_id, number, own), body)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        bare = self._expected(key, expect)
        info = await self._write(lambda _: self.inner.complete_upload(key, upload_id, parts, expect=bare))
        return msgspec.structs.replace(info, version=self._salted(info.version))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._write(lambda _: self.inner.abort_upload(key, upload_id))

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        await self._before()
        return await self.inner.list_parts(key, upload_id)

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        await self._before()
        return await self.inner.list_uploads(prefix)

    async def _write(self, call: Callable[[Body], Awaitable[ResultT]], body: Body = NOTHING) -> ResultT:
        """One write with at most one fault."""
        fault = self.script.popleft() if self.script else None
        if isinstance(fault, Fail):
            raise fault.error
        await self._before()
        if fault is None and self._happens(self.plan.reset_rate):
            fault = Reset(int(self._draws.random() * body.size_bytes))
        if fault is None and self._happens(self.plan.lost_rate):
            fault = Lose()
        result = await call(body._replace(ready=_Disturbed(self, body, fault).ready))
        if isinstance(fault, Reset):  # it had no body to break
            fault = Lose()
        if isinstance(fault, Lose):
            raise Unavailable("planned fault: the write happened and its answer was lost; look, or write again")
        return result

    def _expected(self, key: str, expect: str | None) -> str | None:
        """A condition as the backend beneath knows it."""
        if not expect:
            return expect
        if expect != self._salted(self._bare(expect)):
            raise errors.changed(key)
        return self._bare(expect)

    async def probe(self) -> None:
        await self._before()
        await self.inner.probe()

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._draws.random() < rate

    async def _before(self) -> None:
        if self.plan.latency_s:
            await self.sleep(self.plan.latency_s)
        if self._happens(self.plan.error_rate):
            raise Unavailable("planned fault: the backend answered 500; try again")
        if self._happens(self.plan.busy_rate):
            raise Busy(
                "planned fault: the backend answered 503 SlowDown; try again later",
                retry_after_s=self.plan.retry_after_s,
            )

    def _draw_fault(self, size_bytes: int) -> Fault | None:
        if self._happens(self.plan.reset_rate):
            return Reset(int(self._draws.random() * size_bytes))
        if self._happens(self.plan.truncate_rate):
            return Truncate(int(self._draws.random() * size_bytes))
        return Lie(1) if self._happens(self.plan.lie_rate) else None

    def _salted(self, version: str) -> str:
        return f"{version}+{self.version_salt}" if self.version_salt else version

    @staticmethod
    def _bare(version: str) -> str:
        head, plus, salt = version.rpartition("+")
        return head if plus and salt.isdigit() else version
