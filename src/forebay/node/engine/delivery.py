"""Sends a body to a backend, or deletes an object there: carries out what `core/machines/delivery.py` decides.

Theory. Every write that leaves the node goes through here: flushes, bodies written through (held, or still arriving),
and uploads that a client completes. What differs between them is in their `Hands`: where the bytes come from, where an
upload is noted, and what surrounds a request that cannot be taken back.

Parts travel in parallel: one connection seldom fills a link. Parts of equal length that begin together end together,
and then the link would rest while the backend processes them all. So a part gives its turn to the next as its last
piece leaves. A separate bound holds for parts that wait for an answer.

Rejected: trying again here (the backend's own layer does); parts of different lengths, which would end apart (some
services want them equal).

Invariants. (1) Effects are carried out in order, one after the other. (2) The beginning of an upload is never
interrupted, so that its id is heard if the backend tells it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from forebay.backends import lost_answers
from forebay.backends.lost_answers import Unheard, says_no
from forebay.backends.seam import Backend, Body
from forebay.core.errors import Busy, ForebayError, NotFound, NotSupported, Precondition, Unavailable
from forebay.core.machines.delivery import Delivery
from forebay.core.machines.delivery_events import (
    Abort,
    Begin,
    Begun,
    Complete,
    Delete,
    Delivered,
    Effect,
    Event,
    Fail,
    Failed,
    Fill,
    Filled,
    Forgotten,
    GaveUp,
    Keep,
    Leave,
    List,
    Listed,
    Look,
    Made,
    Put,
    Read,
    Refused,
    Saw,
    Started,
    Swept,
    Unsupported,
    Upload,
    WasRead,
    Why,
    Yielded,
)
from forebay.core.record import OWN_HEADERS
from forebay.core.types import Headers
from forebay.node.store.disk.notes import BlockDigest

log = logging.getLogger("forebay.delivery")
ResultT = TypeVar("ResultT")

PARTS_AT_ONCE = 8  # of one upload: those that are being sent, and those sent but not answered


class Superseded(Exception):
    """The key owes something else by now."""


class Hands(Protocol):
    """What each kind of delivery does in its own way. `sends` bounds bodies that are being sent."""

    sends: asyncio.Semaphore

    async def body(self, start: int, end: int) -> Body:
        """These bytes of the object."""
        ...

    async def request(self, key: str, act: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Make a request after which the backend may have the object under `key`."""
        ...

    async def keep(self, upload: Upload | None) -> None:
        """Note durably that this upload exists or may exist; None: that there is none."""
        ...

    async def leave(self, key: str) -> None:
        """Report the uploads of the key that may be ours."""
        ...

    async def swept(self) -> None:
        """Note durably that stale uploads are gone."""
        raise AssertionError("there are none")

    async def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, even if this is cancelled: here, or where nobody waits for it."""
        ...

    def is_wanted(self) -> bool:
        """Whether the object is still to be delivered."""
        return True

    def does_without(self, error: NotSupported) -> None:
        """Something that the backend does not support was left out."""
        raise AssertionError("only a flush goes without")


def stored(headers: Headers) -> Headers:
    """The headers that a backend stores; it makes checksums of its own."""
    return tuple(each for each in headers if not each[0].startswith(OWN_HEADERS))


class Carrier:
    """Carries out one delivery. `run` once. `headers` and `tags` are the object's."""

    def __init__(
        self, backend: Backend, delivery: Delivery, hands: Hands, *, headers: Headers = (), tags: str = ""
    ) -> None:
        self.sent_bytes = 0  # repeated parts included
        self._backend, self._delivery, self._hands = backend, delivery, hands
        self._headers, self._tags = stored(headers), tags
        self._error: BaseException | None = None  # what the last request failed with

    async def run(self) -> Delivered | Yielded:
        """Deliver. Raises the `ForebayError` that prevents it, or `Superseded`."""
        event: Event = Started()
        try:
            while True:
                effects = self._delivery.step(event)
                for at, effect in enumerate(effects):
                    if isinstance(effect, Delivered | Yielded | Fail):
                        if rest := effects[at + 1 :]:
                            await self._hands.tidy(self._clean_up(rest))
                        if isinstance(effect, Fail):
                            raise self._reason(effect.why)
                        return effect
                    if at < len(effects) - 1:
                        await self.carry_out(effect)
                event = await self._ask(effects[-1])
                if isinstance(event, Unsupported) and isinstance(self._error, NotSupported) and self._delivery.insists:
                    self._hands.does_without(self._error)
        except BaseException:
            if rest := self._delivery.step(GaveUp())[1:]:
                await self._hands.tidy(self._clean_up(rest))
            raise

    def _reason(self, why: Why) -> BaseException:
        key, verb = self._delivery.key, "deleted" if self._delivery.terms.is_delete else "written"
        match why:
            case Why.CHANGING:
                return Busy(f"{key} changes at the backend faster than it can be {verb}: it is tried again")
            case Why.NAMES:
                return Busy(
                    f"all names for the copy of a conflict on {self._delivery.terms.key} are taken: remove old "
                    "*.conflict-* objects"
                )
            case Why.FORGOTTEN:
                return Unavailable(f"the backend forgot the upload of {key}: write it again")
            case Why.UNWANTED:
                return Superseded()
        assert self._error is not None, "it failed without an error"
        return self._error

    # --- effects that nobody answers ---------------------------------------------------------------------------------
    async def carry_out(self, effect: Effect) -> None:
        """Carry out an effect that no event answers."""
        match effect:
            case Keep(upload):
                await self._hands.keep(upload)
            case Swept():
                await self._hands.swept()
            case Abort(key, upload_id):
                if self._backend.part_bytes_min:
                    await self._backend.abort_upload(key, upload_id)
            case Leave(key):
                if self._backend.part_bytes_min:
                    await self._hands.leave(key)
            case _:
                raise TypeError(effect)

    async def _clean_up(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            try:
                await self.carry_out(effect)
            except ForebayError as error:
                log.warning("an upload of %s stays at the backend until the next start: %s", self._delivery.key, error)
                return

    # --- requests ----------------------------------------------------------------------------------------------------
    async def _ask(self, effect: Effect) -> Event:
        try:
            return await self._answer(effect)
        except NotSupported as error:
            self._error = error
            return Unsupported() if isinstance(effect, Put | Delete | Complete | Begin) else Failed(True)
        except (Precondition, Unheard) as error:
            self._error = error
            return Refused() if isinstance(effect, Put | Delete | Complete | Read) else Failed(says_no(error))
        except NotFound as error:
            self._error = error
            if isinstance(effect, Delete):
                return Made(None)
            if isinstance(effect, Read):
                return Refused()
            if isinstance(effect, Begin):
                self._error = Unavailable(f"the backend began no upload of {effect.key}: {error}")
            return Forgotten() if isinstance(effect, List | Fill | Complete) else Failed(True)
        except ForebayError as error:
            self._error = error
            return Failed(says_no(error))

    async def _answer(self, effect: Effect) -> Event:
        backend, request = self._backend, self._hands.request
        match effect:
            case Look(key):
                return Saw(await lost_answers.look(backend, key))
            case Read(seen):
                return WasRead(await lost_answers.digest_there(backend, seen, BlockDigest()))
            case Put(key, expect, tagged):
                body = await self._hands.body(0, self._delivery.terms.ours.size_bytes)
                tags = self._tags if tagged else ""
                async with self._hands.sends:
                    info = await request(
                        key, lambda: backend.put(key, body, headers=self._headers, expect=expect, tags=tags)
                    )
                self.sent_bytes += body.size_bytes
                return Made(info)
            case Delete(key, expect):
                await request(key, lambda: backend.delete(key, expect=expect))
                return Made(None)
            case Begin(key, tagged):
                return await self._begin(key, self._tags if tagged else "")
            case List(upload):
                parts = await backend.list_parts(upload.key, upload.upload_id)
                return Listed(tuple((part.number, part.token, part.size_bytes) for part in parts))
            case Fill(upload, missing):
                return Filled(tuple(await self._fill(upload, missing)))
            case Complete(upload, parts, expect):
                return Made(
                    await request(
                        upload.key,
                        lambda: backend.complete_upload(upload.key, upload.upload_id, list(parts), expect=expect),
                    )
                )
        raise TypeError(effect)

    async def _begin(self, key: str, tags: str) -> Event:
        async def begin() -> Event:
            upload_id = await self._backend.begin_upload(key, headers=self._headers, tags=tags)
            return Begun(upload_id, wanted=self._hands.is_wanted())

        beginning = asyncio.create_task(begin())
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self._delivery.step(GaveUp())
            await self._hands.tidy(self._end_begun(beginning))
            raise

    async def _end_begun(self, beginning: asyncio.Task[Event]) -> None:
        """Its delivery was given up while an upload began."""
        event: Event
        try:
            event = await beginning
        except ForebayError as error:
            event = Failed(says_no(error))
        await self._clean_up([effect for effect in self._delivery.step(event) if not isinstance(effect, Fail)])

    async def _fill(self, upload: Upload, missing: Sequence[tuple[int, int, int]]) -> list[tuple[int, str]]:
        """Send these parts; return their tokens."""
        left, tokens = list(reversed(missing)), []

        async def send() -> None:
            while left:
                number, start, end = left.pop()
                part = await self._hands.body(start, end)
                tokens.append((number, await self._send_part(upload, number, part)))
                self.sent_bytes += part.size_bytes

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(PARTS_AT_ONCE, len(left))):
                    group.create_task(send())
        except* (ForebayError, Superseded) as errors:
            raise _first(errors) from None
        return tokens

    async def _send_part(self, upload: Upload, number: int, part: Body) -> str:
        await self._hands.sends.acquire()
        with contextlib.ExitStack() as turn:
            turn.callback(self._hands.sends.release)

            async def ready(upto: int) -> None:
                await part.ready(upto)
                if upto == part.size_bytes:
                    turn.close()  # the last piece leaves now

            await part.ready(1)  # a part that has not begun to arrive holds no connection
            return await self._backend.put_part(upload.key, upload.upload_id, number, part._replace(ready=ready))


async def run_to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, also when this is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def piece(body: Body, start: int, end: int) -> Body:
    """A part of a body, as a body."""
    data = None if body.data is None else body.data[start:end]

    async def ready(upto: int) -> None:
        await body.ready(start + upto)

    return Body(end - start, data, body.path, body.offset + start, ready)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
