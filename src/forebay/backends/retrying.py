"""The one layer that tries again, so that a passing fault of a backend is invisible above.

Theory. `core/retry.py` decides whether and when; this wrapper performs it. A call is simply made again. A body is not:
what arrived is kept, and the rest is asked for as a range of the same version, so a reset in the middle of a large
object costs one request and no byte twice. Progress renews the patience: a body that breaks every gigabyte is slow, not
broken. If the object has changed meanwhile, the range is refused (`Precondition`), because gluing two versions together
would be a lie.

Invariants. (1) Bytes leave in order, each once, all of one version. (2) A body that ends without its last byte counts
as broken, whatever the layers beneath believe. (3) Nothing is tried again after `aclose`, or when the caller is
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from forebay.backends import errors
from forebay.backends.counting import BackendCounters
from forebay.backends.refusing import Refusing
from forebay.backends.seam import Backend, Fetch
from forebay.core.errors import Corrupt, ForebayError
from forebay.core.retry import DEFAULT_POLICY, RetryBudget, RetryPolicy, delay_before_retry
from forebay.core.types import ListPage, ObjectInfo, RangeSpec
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

ResultT = TypeVar("ResultT")
Sleep = Callable[[float], Awaitable[object]]


class RetryingFetch:
    """A body that goes on where it broke."""

    def __init__(self, stack: Retrying, key: str, inner: Fetch) -> None:
        self.info, self.start, self.end = inner.info, inner.start, inner.end
        self._stack, self._key = stack, key
        self._inner: Fetch | None = inner
        self._chunks: Any = inner.__aiter__()
        self._position = inner.start
        self._attempt = 1
        self._since_s = stack.now_s()

    def __aiter__(self) -> RetryingFetch:
        return self

    async def __anext__(self) -> Any:
        while self._inner is not None:
            try:
                chunk = await self._chunks.__anext__()
            except StopAsyncIteration:
                if self._position == self.end:
                    self._inner = None
                    break
                await self._resume(errors.ended_early(self._key, self._position - self.start, self.end - self.start))
                continue
            except ForebayError as error:
                await self._resume(error)
                continue
            self._position += len(chunk)
            if self._position > self.end:
                raise Corrupt(f"{self._key}: the backend sent more than the {self.end - self.start} bytes asked for")
            self._attempt, self._since_s = 1, self._stack.now_s()
            return chunk
        raise StopAsyncIteration

    async def _resume(self, error: ForebayError) -> None:
        """Open the rest of the body, however many attempts that takes; raises when patience or hope is at an end."""
        while self._inner is not None:
            await self._inner.aclose()
            await self._stack.wait(self._attempt, error, self._since_s)
            self._attempt += 1
            rest = RangeSpec(self._position, self.end - 1)
            try:
                inner = await self._stack.inner.fetch(self._key, rest, version=self.info.version)
            except ForebayError as failed:
                if failed.code == "InvalidRange":
                    raise Corrupt(
                        f"{self._key}: the backend said the object has {self.info.size_bytes} bytes, but it ends "
                        f"before {self._position + 1}: read it again"
                    ) from failed
                error = failed
                continue
            if inner.info.version != self.info.version or (inner.start, inner.end) != (self._position, self.end):
                await inner.aclose()
                raise errors.changed(self._key)
            self._inner, self._chunks = inner, inner.__aiter__()
            return

    async def aclose(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.aclose()


class Retrying(Refusing):
    """See the module."""

    def __init__(
        self,
        inner: Backend,
        clock: Clock,
        chance: Chance,
        counters: BackendCounters,
        policy: RetryPolicy = DEFAULT_POLICY,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.scheme, self.read_only, self.inner = inner.scheme, inner.read_only, inner
        self._clock, self._chance, self._counters, self._policy, self._sleep = clock, chance, counters, policy, sleep
        self._budget = RetryBudget()

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> RetryingFetch:
        return RetryingFetch(self, key, await self._again(lambda: self.inner.fetch(key, range, version=version)))

    async def head(self, key: str) -> ObjectInfo:
        return await self._again(lambda: self.inner.head(key))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self._again(lambda: self.inner.check(key, version))

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return await self._again(lambda: self.inner.list_page(prefix, delimiter, start_after, limit))

    async def probe(self) -> None:
        """One attempt: who asks whether the backend answers wants to know now."""
        await self.inner.probe()

    async def aclose(self) -> None:
        await self.inner.aclose()

    def now_s(self) -> float:
        return self._clock.monotonic_s()

    async def wait(self, attempt: int, error: ForebayError, since_s: float) -> None:
        """Wait before attempt `attempt + 1`, or raise `error` if there shall be none."""
        elapsed_s = self.now_s() - since_s
        delay_s = delay_before_retry(attempt, error, elapsed_s, self._chance.random(), self._budget, self._policy)
        if delay_s is None:
            raise error
        self._counters.retries += 1
        await self._sleep(delay_s)

    async def _again(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        since_s, attempt = self.now_s(), 0
        while True:
            attempt += 1
            try:
                result = await call()
            except ForebayError as error:
                await self.wait(attempt, error, since_s)
            else:
                self._budget.succeeded()
                return result
