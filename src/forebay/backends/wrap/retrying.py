"""The one layer that retries, so that passing faults of a backend are invisible above.

Theory. `core/machines/retry.py` decides whether and when; this wrapper does it. A call is simply repeated. A body is
not: the bytes that arrived are kept, and the rest is fetched as a range of the same version, so a reset in the middle
of a large object costs one request and no byte twice. Progress renews the patience: a body that breaks every gigabyte
is slow, not broken. If the object has changed, the range is refused (`Precondition`): two versions are never glued.

A write is repeated whole, with its body read again from the file. Nobody knows whether a write happened whose answer
was lost. Without a condition it is simply made again, as any client of a bucket service does. With one, the second
attempt would take the result of the first for somebody else's. So a refusal after an attempt that may have happened is
`Unheard`, and `machines/sent_bodies.py` decides whether the object there is the one that was sent. An error of
`Body.ready` is the caller's own and ends the write. Progress of a body that still grows renews the patience here too.

*Another node* in a backend's place is asked to write `once`: a second attempt follows only what certainly did nothing.
Else a deletion that happened twice would take what another client was told in between. The client that asked hears that
nobody knows, and decides.

Invariants. (1) Bytes leave in order, each once, all of one version. (2) A body without its last byte is broken,
whatever the layers beneath say. (3) Nothing is retried after `aclose` or for a cancelled caller. (4) A write refused
with any error but `Unheard` or a bare `Unavailable` did not happen.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from forebay.backends import errors, lost_answers
from forebay.backends.lost_answers import Unheard, says_no
from forebay.backends.seam import Backend, Body, Fetch, PartSeen, UploadSeen
from forebay.backends.wrap.counting import BackendCounters
from forebay.core.errors import Corrupt, ForebayError, NotFound, Unavailable
from forebay.core.machines.retry import DEFAULT_POLICY, RetryBudget, RetryPolicy, delay_before_retry
from forebay.core.types import Headers, ListPage, ObjectInfo, RangeSpec
from forebay.ports.chance import Chance
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.backends")
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


class Retrying:
    """See the module."""

    def __init__(
        self,
        inner: Backend,
        clock: Clock,
        chance: Chance,
        counters: BackendCounters,
        policy: RetryPolicy = DEFAULT_POLICY,
        sleep: Sleep = asyncio.sleep,
        *,
        once: bool = False,
    ) -> None:
        self.scheme, self.read_only, self.part_bytes_min = inner.scheme, inner.read_only, inner.part_bytes_min
        self.inner = inner
        self._clock, self._chance, self._counters, self._policy, self._sleep = clock, chance, counters, policy, sleep
        self._budget = RetryBudget()
        self._once = once

    async def fetch(self, key: str, range: RangeSpec | None = None, *, version: str = "") -> RetryingFetch:
        return RetryingFetch(self, key, await self._again(lambda: self.inner.fetch(key, range, version=version)))

    async def head(self, key: str) -> ObjectInfo:
        return await self._again(lambda: self.inner.head(key))

    async def check(self, key: str, version: str) -> ObjectInfo | None:
        return await self._again(lambda: self.inner.check(key, version))

    async def list_page(self, prefix: str, delimiter: str, start_after: str, limit: int) -> ListPage:
        return await self._again(lambda: self.inner.list_page(prefix, delimiter, start_after, limit))

    # --- writing -----------------------------------------------------------------------------------------------------
    async def put(
        self, key: str, body: Body, *, headers: Headers = (), expect: str | None = None, tags: str = ""
    ) -> ObjectInfo:
        sending, since_s = _Sending(self, body, self._once), self._clock.wall_s()
        own = body._replace(ready=sending.ready)
        try:
            return await self._write(
                lambda: self.inner.put(key, own, headers=headers, expect=expect, tags=tags), sending
            )
        except Unheard as error:
            return await lost_answers.put(self, key, body, error, since_s)
        except Unavailable as error:
            # The same bytes may be another writer's, whose condition held; or a node says that it could not keep these.
            if sending.over or expect is not None or self._once or tags:
                raise
            return await lost_answers.put_in_silence(self, key, body, headers, error, since_s)

    async def delete(self, key: str, *, expect: str | None = None) -> None:
        since_s = self._clock.wall_s()
        try:
            await self._write(lambda: self.inner.delete(key, expect=expect))
        except Unheard as error:
            await lost_answers.delete(self, key, error, since_s)

    async def copy(
        self, source_key: str, key: str, *, source_version: str = "", headers: Headers | None = None
    ) -> ObjectInfo:
        since_s = self._clock.wall_s()
        try:
            return await self._write(
                lambda: self.inner.copy(source_key, key, source_version=source_version, headers=headers)
            )
        except Unheard as error:
            return await lost_answers.copy(self, key, "" if headers is not None else source_version, error, since_s)

    async def read_tags(self, key: str) -> str:
        return await self._again(lambda: self.inner.read_tags(key))

    async def write_tags(self, key: str, tags: str) -> None:
        await self._again(lambda: self.inner.write_tags(key, tags), _Attempts(self._once))

    async def begin_upload(self, key: str, *, headers: Headers = (), tags: str = "") -> str:
        attempts = _Attempts()
        begin = functools.partial(self.inner.begin_upload, key, headers=headers, tags=tags)
        upload_id = await self._write(begin, attempts)
        if attempts.lost:
            self._counters.uploads_left += 1
            log.warning("an upload of %s may stay at the backend: its id was in an answer that was lost", key)
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        sending = _Sending(self, body)
        own = body._replace(ready=sending.ready)
        return await self._again(lambda: self.inner.put_part(key, upload_id, number, own), sending)

    async def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[tuple[int, str]], *, expect: str | None = None
    ) -> ObjectInfo:
        since_s = self._clock.wall_s()
        try:
            return await self._write(lambda: self.inner.complete_upload(key, upload_id, parts, expect=expect))
        except (Unheard, NotFound) as error:
            return await lost_answers.complete(self, key, parts, error, since_s)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._again(lambda: self.inner.abort_upload(key, upload_id))

    async def list_parts(self, key: str, upload_id: str) -> list[PartSeen]:
        return await self._again(lambda: self.inner.list_parts(key, upload_id))

    async def list_uploads(self, prefix: str) -> list[UploadSeen]:
        return await self._again(lambda: self.inner.list_uploads(prefix))

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

    async def _write(self, call: Callable[[], Awaitable[ResultT]], attempts: _Attempts | None = None) -> ResultT:
        """As `_again`, for what leaves something: `Unheard` for a refusal of which nobody knows what it refused."""
        attempts = attempts or _Attempts(self._once)
        try:
            return await self._again(call, attempts)
        except ForebayError as error:
            if attempts.lost and says_no(error) and not attempts.over:
                raise Unheard(error) from error
            raise

    async def _again(self, call: Callable[[], Awaitable[ResultT]], attempts: _Attempts | None = None) -> ResultT:
        attempts = attempts or _Attempts()
        attempts.since_s, attempt = self.now_s(), 0
        while True:
            attempt += 1
            try:
                result = await call()
            except ForebayError as error:
                if attempts.over:
                    raise
                attempts.lost |= not says_no(error)
                if attempts.lost and attempts.once:
                    raise
                await self.wait(attempt, error, attempts.since_s)
            else:
                self._budget.succeeded()
                return result


class _Attempts:
    """What must be known of a write's attempts."""

    def __init__(self, once: bool = False) -> None:
        self.since_s = 0.0  # when patience began
        self.lost = False  # an attempt failed in a way that does not say whether it happened
        self.over = False  # no attempt can help any more
        self.once = once  # none follows one that may have happened


class _Sending(_Attempts):
    """A body that is watched as it is sent."""

    def __init__(self, stack: Retrying, body: Body, once: bool = False) -> None:
        super().__init__(once)
        self._stack, self._body, self._furthest = stack, body, 0

    async def ready(self, upto: int) -> None:
        try:
            await self._body.ready(upto)
        except Exception:
            self.over = True
            raise
        if upto > self._furthest:
            self._furthest, self.since_s = upto, self._stack.now_s()
