"""Uploads that this node begins at backends for whole bodies, noted so that a stop leaves none behind unknown.

Theory. A body that is written through goes as an upload, of which nothing is visible before it is completed. A process
that is killed midway leaves the backend with its parts, which nobody sees and somebody pays for. So before one is begun
that is noted in the metadata store, then its id, and the note goes when the upload has come to an end. The next start
aborts those whose id is noted. Where the stop came between note and id nobody knows which upload it is: one of that key
may be another writer's, about to get its first part. Such a one is never aborted, but told and counted
(`Buckets.leave_uploads`).

Rejected: aborting what has no parts yet (a stranger's has none either, for a moment); a lifecycle rule alone (not every
service has them).

Invariant. Nothing is aborted here whose id this node did not hear.
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
AGAIN_S = 60.0  # between attempts to abort what a backend did not abort yet


class Noted(msgspec.Struct, array_like=True, frozen=True):
    """An upload for a whole body. `upload_id`: empty before it is known."""

    bucket: str
    key: str
    upload_id: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Noted).decode


class Begun:
    """See the module's header. `load` before the first write; `tend` in the background."""

    def __init__(self, meta: MetaStore, buckets: Buckets, chance: Chance) -> None:
        self._meta, self._buckets, self._chance = meta, buckets, chance
        self._left: dict[str, Noted] = {}  # by an engine before this one

    async def load(self) -> None:
        """Find what a stop left behind."""
        entries, _ = await self._meta.range(PREFIX)
        self._left = {entry.key: _decode(entry.value) for entry in entries}

    async def begins(self, bucket: str, key: str) -> str:
        """An upload is about to be begun; the name of its note. "" where the disk takes none: that keeps no write from
        the backend."""
        name = PREFIX + self._chance.token_hex(12)
        return name if await self._put(name, Noted(bucket, key)) else ""

    async def began(self, name: str, bucket: str, key: str, upload_id: str) -> None:
        """It was, and this is its id."""
        if name:
            await self._put(name, Noted(bucket, key, upload_id))

    async def _put(self, name: str, noted: Noted) -> bool:
        try:
            await self._meta.put(name, _encode(noted))
        except Unavailable as error:
            log.warning("a stop would leave the upload of %s/%s at the backend: %s", noted.bucket, noted.key, error)
            return False
        return True

    async def ended(self, name: str) -> None:
        """It is completed, aborted, or was never begun."""
        if name:
            await self._meta.delete(name)

    async def leave(self, served: Served, key: str) -> None:
        """It may have been begun, and nobody heard its id."""
        await self._buckets.leave_uploads(served, key)

    async def tend(self) -> None:
        """Abort what is left, until nothing is."""
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
            pass  # there is no such bucket any more, or none that has uploads
