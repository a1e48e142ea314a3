"""Bodies on their way to the backend of a bucket written through.

Theory. `core/machines/delivery.py` decides how a body goes: as one put, or as an upload of parts. Nothing is tried
again here, and a refusal is the client's answer. An upload is invisible until it is completed, and it is aborted when
it is given up, while the client already has its answer.

A body's `ready` may wait: for bytes that a client still sends, and at the very end for permission to become visible
(`node/engine/write/through_streams.py`). A put holds back its last bytes for that; an upload asks before it completes.

Rejected: leaving uploads to be found later (the vendor charges for parts that nobody sees).

Invariant. After `put` raised, or after a stop, no upload of it is left at a backend that answers
(`write/begun_uploads.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from forebay.backends.lost_answers import says_no, whole_etag
from forebay.backends.seam import Body
from forebay.core.errors import ForebayError
from forebay.core.machines.delivery import Delivery, Terms
from forebay.core.machines.delivery_events import BEGINNING, Delivered, Upload
from forebay.core.machines.sent_bodies import Ours
from forebay.core.types import Headers, ObjectInfo
from forebay.node.engine.buckets import Served
from forebay.node.engine.delivery import Carrier, Hands, piece
from forebay.node.engine.write.begun_uploads import Begun

log = logging.getLogger("forebay.writes")
ResultT = TypeVar("ResultT")

SENDING_AT_ONCE = 4  # parts of one body that are being sent
Leave = Callable[[], Awaitable[None]]  # returns when the object may become visible


class Filled:
    """An upload at the backend that a client filled.

    `parts`: (number, start, end, MD5) in the order of the object. `tokens`: the backend's tokens of parts, as far as
    known; others are added. `part`: the bytes of a part, by its start. `used`: it became the object. `vanished`: the
    backend has it no more. `unheard`: it may have become the object, without an answer.
    """

    def __init__(
        self,
        upload_id: str,
        parts: tuple[tuple[int, int, int, str], ...],
        tokens: dict[int, str],
        part: Callable[[int], Body],
    ) -> None:
        self.upload_id, self.parts, self.tokens, self.part = upload_id, parts, tokens, part
        self.used = self.vanished = self.unheard = False


async def _at_once() -> None:
    """Nothing to wait for."""


class Through:
    """See the module's header."""

    def __init__(self, begun: Begun) -> None:
        self.begun = begun
        self._ending: set[asyncio.Task[None]] = set()

    async def put(
        self,
        served: Served,
        key: str,
        body: Body,
        *,
        headers: Headers = (),
        expect: str | None = None,
        tags: str = "",
        leave: Leave = _at_once,
        filled: Filled | None = None,
    ) -> ObjectInfo:
        """Make `body` the object at the backend; return its metadata there. Errors as `Backend.put`. Cancelling leaves
        nothing half done. Checksums among the headers stay here: they were compared, and no backend stores them.

        `filled`: an upload that has the same bytes, and is completed instead if it is still there. The body's path may
        be "" then: the bytes are nowhere else.
        """
        backend = served.backend
        terms = Terms(key, Ours(body.size_bytes), backend.part_bytes_min, expect, tags=bool(tags))
        delivery = Delivery(terms) if filled is None else _completing(terms, filled, bool(body.path))
        sending = _Sending(self, served, key, body, delivery, leave, filled)
        try:
            outcome = await Carrier(backend, delivery, sending, headers=headers, tags=tags).run()
        finally:
            if filled is not None:
                filled.vanished = delivery.upload is None or delivery.upload.upload_id != filled.upload_id
        assert isinstance(outcome, Delivered)
        assert outcome.seen is not None
        return outcome.seen

    def end_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` before the stop; nobody waits for it."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("the note of an upload could not be removed: %s", error)

    async def aclose(self) -> None:
        """Wait for clean-up under way."""
        await asyncio.gather(*self._ending, return_exceptions=True)


def _completing(terms: Terms, filled: Filled, is_here: bool) -> Delivery:
    etag = whole_etag([(number, md5) for number, _, _, md5 in filled.parts])
    terms = terms._replace(ours=terms.ours._replace(parts_etag=etag), parts=filled.parts, is_here=is_here)
    return Delivery(terms, Upload(terms.key, filled.upload_id, 0), tokens=filled.tokens)


class _Sending(Hands):
    """One body on its way: what its delivery asks for."""

    def __init__(
        self,
        through: Through,
        served: Served,
        key: str,
        body: Body,
        delivery: Delivery,
        leave: Leave,
        filled: Filled | None,
    ) -> None:
        self.sends = asyncio.Semaphore(SENDING_AT_ONCE)
        self._through, self._served, self._key = through, served, key
        self._body, self._delivery, self._leave, self._filled = body, delivery, leave, filled
        self._note = self._upload_id = ""  # the name of the upload's note, and its id

    async def body(self, start: int, end: int) -> Body:
        if (filled := self._of_client()) is not None:
            return filled.part(start)
        if self._delivery.upload is not None:
            return piece(self._body, start, end)
        return _held_back(self._body, self._leave)

    async def request(self, key: str, act: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        filled = self._of_client()
        if self._delivery.upload is not None:
            await self._leave()
        try:
            made = await act()
        except ForebayError as error:
            if filled is not None:
                filled.unheard |= not says_no(error)
            raise
        if filled is not None:
            filled.used = True
        return made

    def _of_client(self) -> Filled | None:
        """The client's upload, if that is what is delivered now."""
        upload, filled = self._delivery.upload, self._filled
        return filled if upload is not None and filled is not None and upload.upload_id == filled.upload_id else None

    async def keep(self, upload: Upload | None) -> None:
        begun, bucket = self._through.begun, self._served.bucket.name
        if upload is None:
            await begun.ended(self._note, self._upload_id)
        elif upload.upload_id == BEGINNING:
            self._note = await begun.begins(bucket, self._key)
        else:
            self._upload_id = upload.upload_id
            await begun.began(self._note, bucket, self._key, upload.upload_id)

    async def leave(self, key: str) -> None:
        await self._through.begun.leave(self._served, key)

    async def tidy(self, work: Coroutine[Any, Any, None]) -> None:
        self._through.end_later(work)


def _held_back(body: Body, leave: Leave) -> Body:
    """The body, with its end held back until `leave` returns."""
    if leave is _at_once:
        return body

    async def ready(upto: int) -> None:
        await body.ready(upto)
        if upto >= body.size_bytes:
            await leave()

    return body._replace(ready=ready)
