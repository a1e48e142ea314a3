"""Notes of uploads that this node begins at backends for whole bodies, so that a stop leaves none unknown.

Theory. A large body that is written through goes as an upload, which is invisible until it is completed. If the process
is killed midway, its parts stay at the backend, where nobody sees them and somebody pays for them. So the metadata
store gets a note before an upload begins, then its id; the note is removed when the upload has ended. The next start
aborts the uploads whose id is noted. If the stop came between note and id, nobody knows which upload it is: an upload
of that key may be another writer's that is about to get its first part. Such an upload is never aborted, but logged and
counted (`Buckets.leave_uploads`).

Rejected: aborting what has no parts yet (a stranger's has none either, for a moment); a lifecycle rule alone (not every
service has them).

Invariant. No upload is aborted here whose id this node did not hear.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from forebay.core.errors import ForebayError, NotFound, NotSupported, Unavailable
from forebay.meta.seam import MetaStore
from forebay.node.engine.buckets import Buckets, Served
from forebay.ports.chance import Chance

log = logging.getLogger("forebay.writes")

PREFIX = "begun/"
AGAIN_S = 60.0  # between attempts to abort an upload


class Noted(msgspec.Struct, array_like=True, frozen=True):
    """An upload for a whole body. `upload_id` is empty until it is known."""

    bucket: str
    key: str
    upload_id: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Noted).decode


class Begun:
    """See the module's header. `load` before the first write; `tend` in the background."""

    def __init__(self, meta: MetaStore, buckets: Buckets, chance: Chance) -> None:
        self._meta, self._buckets, self._chance = meta, buckets, chance
        self._left: dict[str, Noted] = {}  # left by an earlier engine

    async def load(self) -> None:
        """Find what a stop left behind."""
        entries, _ = await self._meta.range(PREFIX)
        self._left = {entry.key: _decode(entry.value) for entry in entries}

    async def begins(self, bucket: str, key: str) -> str:
        """An upload is about to begin; returns the name of its note, or "" if the disk takes none (the write goes on
        anyway)."""
        name = PREFIX + self._chance.token_hex(12)
        return name if await self._put(name, Noted(bucket, key)) else ""

    async def began(self, name: str, bucket: str, key: str, upload_id: str) -> None:
        """The upload has begun, and this is its id."""
        self._buckets.heard.add(upload_id)
        if name:
            await self._put(name, Noted(bucket, key, upload_id))

    async def _put(self, name: str, noted: Noted) -> bool:
        try:
            await self._meta.put(name, _encode(noted))
        except Unavailable as error:
            log.warning(
                "the upload of %s/%s is not noted, so a stop would leave it at the backend: %s",
                noted.bucket,
                noted.key,
                error,
            )
            return False
        return True

    async def ended(self, name: str, upload_id: str = "") -> None:
        """The upload was completed or aborted, or never began."""
        self._buckets.heard.discard(upload_id)
        if name:
            await self._meta.delete(name)

    async def leave(self, served: Served, key: str) -> None:
        """The upload may have begun, and nobody heard its id."""
        await self._buckets.leave_uploads(served, key)

    async def tend(self) -> None:
        """Abort what is left, until nothing is left."""
        while self._left:
            for name, noted in list(self._left.items()):
                try:
                    await self._settle(noted)
                except ForebayError as error:
                    log.warning("the upload of %s/%s is not aborted yet: %s", noted.bucket, noted.key, error)
                    continue
                del self._left[name]
                await self._meta.delete(name)
            if self._left:
                await asyncio.sleep(AGAIN_S)

    async def _settle(self, noted: Noted) -> None:
        try:
            served = await self._buckets.get(noted.bucket)
            if noted.upload_id:
                await served.backend.abort_upload(noted.key, noted.upload_id)
            else:
                await self.leave(served, noted.key)
        except (NotFound, NotSupported):
            pass  # the bucket is gone, or its backend has no uploads
