"""Bodies on their way to the backend of a bucket written through.

Theory. A body goes as one put, or, from MULTIPART_BYTES_MIN on where the backend has uploads, as an upload of parts
that travel beside each other: one connection seldom fills a link, and nobody wants to send 50 GiB again for one broken
connection. Nothing of an upload is visible before it is completed, and it is aborted when it is given up.

`ready` of a body may wait: for bytes that a client still sends, and at the very end for leave to make it visible
(`node/streamed.py`). A put holds its last bytes back for that; an upload asks before it completes.

Rejected: trying again here (the backend's own layer does); leaving uploads to be found later (the vendor charges for
parts that nobody sees).

Invariant. After `put` raised, no upload of it is left at a backend that answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from forebay.backends.seam import Backend, Body
from forebay.core import limits
from forebay.core.errors import ForebayError, NotFound, Unavailable
from forebay.core.record import OWN_HEADERS
from forebay.core.types import Headers, ObjectInfo

log = logging.getLogger("forebay.writes")

PARTS_AT_ONCE = 4
Leave = Callable[[], Awaitable[None]]  # returns when the object may become visible


async def _at_once() -> None:
    """Nothing to wait for."""


class Through:
    """See the module's header."""

    def __init__(self) -> None:
        self._aborting: set[asyncio.Task[None]] = set()

    async def put(
        self,
        backend: Backend,
        key: str,
        body: Body,
        *,
        headers: Headers = (),
        expect: str | None = None,
        tags: str = "",
        leave: Leave = _at_once,
    ) -> ObjectInfo:
        """Make `body` the object at the backend; what it is there. Errors as `Backend.put`. Cancelling it leaves
        nothing half done. Checksums among the headers stay here: they were compared, and no backend stores them."""
        headers = tuple(each for each in headers if not each[0].startswith(OWN_HEADERS))
        if body.size_bytes >= limits.MULTIPART_BYTES_MIN and backend.part_bytes_min:
            return await self._upload(backend, key, body, headers, expect, tags, leave)
        return await backend.put(key, _held_back(body, leave), headers=headers, expect=expect, tags=tags)

    async def _upload(
        self,
        backend: Backend,
        key: str,
        body: Body,
        headers: Headers,
        expect: str | None,
        tags: str,
        leave: Leave,
    ) -> ObjectInfo:
        upload_id = await backend.begin_upload(key, headers=headers, tags=tags)
        try:
            parts = await self._send_parts(backend, key, upload_id, body)
            await leave()
            return await backend.complete_upload(key, upload_id, parts, expect=expect)
        except NotFound as error:
            self._abort_later(backend, key, upload_id)
            raise Unavailable(f"the backend forgot the upload of {key}: write it again") from error
        except BaseException:
            self._abort_later(backend, key, upload_id)
            raise

    async def _send_parts(self, backend: Backend, key: str, upload_id: str, body: Body) -> list[tuple[int, str]]:
        part_bytes = part_size(body.size_bytes, backend.part_bytes_min)
        turns = asyncio.Semaphore(PARTS_AT_ONCE)

        async def send(number: int, start: int) -> tuple[int, str]:
            async with turns:
                await body.ready(start + 1)  # a part that has not begun to arrive holds no connection
                return number, await backend.put_part(key, upload_id, number, piece(body, start, part_bytes))

        starts = range(0, body.size_bytes, part_bytes)
        tasks = [asyncio.create_task(send(number, start)) for number, start in enumerate(starts, 1)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _abort_later(self, backend: Backend, key: str, upload_id: str) -> None:
        task = asyncio.create_task(_abort(backend, key, upload_id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def aclose(self) -> None:
        """Wait for what is being cleaned up."""
        await asyncio.gather(*self._aborting)


def part_size(size_bytes: int, part_bytes_min: int) -> int:
    """How large the parts of an upload are: as few as PARTS_MAX allows, in whole blocks."""
    least = max(limits.FLUSH_PART_BYTES, part_bytes_min, -(-size_bytes // limits.PARTS_MAX))
    return -(-least // limits.BLOCK_BYTES) * limits.BLOCK_BYTES


def piece(body: Body, start: int, length: int) -> Body:
    """A part of a body, as a body."""
    size_bytes = min(length, body.size_bytes - start)
    data = None if body.data is None else body.data[start : start + size_bytes]

    async def ready(upto: int) -> None:
        await body.ready(start + upto)

    return Body(size_bytes, data, body.path, body.offset + start, ready)


def _held_back(body: Body, leave: Leave) -> Body:
    """The body, whose end is not there before `leave`."""
    if leave is _at_once:
        return body

    async def ready(upto: int) -> None:
        await body.ready(upto)
        if upto >= body.size_bytes:
            await leave()

    return body._replace(ready=ready)


async def _abort(backend: Backend, key: str, upload_id: str) -> None:
    try:
        await backend.abort_upload(key, upload_id)
    except ForebayError as error:
        log.warning("the upload %s of %s stays at the backend: %s", upload_id, key, error)
