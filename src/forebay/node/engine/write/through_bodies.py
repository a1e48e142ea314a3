"""Bodies on their way to the backend of a bucket written through.

Theory. A body goes as one put. From MULTIPART_BYTES_MIN on, if the backend has uploads, it goes as an upload of parts
that travel in parallel: one connection seldom fills a link, and a broken connection must not cost 50 GiB again. An
upload is invisible until it is completed, and it is aborted when it is given up.

Parts of equal length that begin together end together, and then the link would rest while the backend processes them
all. So a part gives its turn to the next as its last piece leaves. A separate bound holds for parts that wait for an
answer.

A body's `ready` may wait: for bytes that a client still sends, and at the very end for permission to become visible
(`node/engine/write/through_streams.py`). A put holds back its last bytes for that; an upload asks before it completes.

Rejected: trying again here (the backend's own layer does); leaving uploads to be found later (the vendor charges for
parts that nobody sees); parts of different lengths, which would end apart (some services want them equal).

Invariant. After `put` raised, or after a stop, no upload of it is left at a backend that answers
(`write/begun_uploads.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from forebay.backends.lost_answers import says_no
from forebay.backends.seam import Backend, Body
from forebay.core import limits
from forebay.core.errors import ForebayError, NotFound, Unavailable
from forebay.core.record import OWN_HEADERS
from forebay.core.types import Headers, ObjectInfo
from forebay.node.engine.buckets import Served
from forebay.node.engine.write.begun_uploads import Begun

log = logging.getLogger("forebay.writes")

SENDING_AT_ONCE = 4  # parts that are being sent
PARTS_AT_ONCE = 8  # those, and parts sent but not answered
Leave = Callable[[], Awaitable[None]]  # returns when the object may become visible


async def _at_once() -> None:
    """Nothing to wait for."""


class Through:
    """See the module's header."""

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
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
    ) -> ObjectInfo:
        """Make `body` the object at the backend; return its metadata there. Errors as `Backend.put`. Cancelling leaves
        nothing half done. Checksums among the headers stay here: they were compared, and no backend stores them."""
        headers = tuple(each for each in headers if not each[0].startswith(OWN_HEADERS))
        backend = served.backend
        if body.size_bytes >= limits.MULTIPART_BYTES_MIN and backend.part_bytes_min:
            return await self._upload(served, key, body, headers, expect, tags, leave)
        return await backend.put(key, _held_back(body, leave), headers=headers, expect=expect, tags=tags)

    async def _upload(
        self,
        served: Served,
        key: str,
        body: Body,
        headers: Headers,
        expect: str | None,
        tags: str,
        leave: Leave,
    ) -> ObjectInfo:
        backend, bucket = served.backend, served.bucket.name
        noted, upload_id = await self._begun.begins(bucket, key), ""
        beginning = asyncio.create_task(backend.begin_upload(key, headers=headers, tags=tags))
        try:
            upload_id = await asyncio.shield(beginning)
            await self._begun.began(noted, bucket, key, upload_id)
            parts = await self._send_parts(backend, key, upload_id, body)
            await leave()
            info = await backend.complete_upload(key, upload_id, parts, expect=expect)
        except NotFound as error:
            self._end_later(self._give_up(served, key, noted, beginning))
            raise Unavailable(f"the backend forgot the upload of {key}: write it again") from error
        except BaseException:
            self._end_later(self._give_up(served, key, noted, beginning))
            raise
        self._end_later(self._begun.ended(noted))
        return info

    async def _send_parts(self, backend: Backend, key: str, upload_id: str, body: Body) -> list[tuple[int, str]]:
        part_bytes = part_size(body.size_bytes, backend.part_bytes_min)
        under_way, turns = asyncio.Semaphore(PARTS_AT_ONCE), asyncio.Semaphore(SENDING_AT_ONCE)

        async def send(number: int, start: int) -> tuple[int, str]:
            part = piece(body, start, part_bytes)
            async with under_way:
                await turns.acquire()
                with contextlib.ExitStack() as turn:
                    turn.callback(turns.release)

                    async def ready(upto: int) -> None:
                        await part.ready(upto)
                        if upto == part.size_bytes:
                            turn.close()  # the last piece leaves now

                    await part.ready(1)  # a part that has not begun to arrive holds no connection
                    return number, await backend.put_part(key, upload_id, number, part._replace(ready=ready))

        starts = range(0, body.size_bytes, part_bytes)
        tasks = [asyncio.create_task(send(number, start)) for number, start in enumerate(starts, 1)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _give_up(self, served: Served, key: str, noted: str, beginning: asyncio.Task[str]) -> None:
        """Abort the upload at the backend, even if its beginning is still under way."""
        try:
            upload_id = await beginning
        except ForebayError as error:
            if not says_no(error):
                await self._begun.leave(served, key)
        else:
            try:
                await served.backend.abort_upload(key, upload_id)
            except ForebayError as error:
                log.warning("the upload %s of %s stays at the backend until the next start: %s", upload_id, key, error)
                return
        await self._begun.ended(noted)

    def _end_later(self, work: Coroutine[Any, Any, None]) -> None:
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


def part_size(size_bytes: int, part_bytes_min: int) -> int:
    """The size of an upload's parts: whole blocks, and at most PARTS_MAX parts."""
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
    """The body, with its end held back until `leave` returns."""
    if leave is _at_once:
        return body

    async def ready(upto: int) -> None:
        await body.ready(upto)
        if upto >= body.size_bytes:
            await leave()

    return body._replace(ready=ready)
