"""Prestaging: fetching objects that a HEAD asked for before they are read.

Theory. Any S3 client can ask: a HEAD with `Range: bytes=0-0` gets its usual answer, and the node fetches the whole
object in the background, through the same flights as readers use. Wanted objects wait in line. Each bucket has its own
line, so a backend that hangs holds up only its own objects. AT_ONCE of each line are fetched at a time, since waiting
readers come first. A script can ask faster than any backend delivers, so when WAITING_MAX are in line the HEAD waits
for a place: a client that asks for a million objects slows to the speed of the fetches. After PLACE_WAIT_S the HEAD is
answered anyway, and the object is not fetched ("refused"). Prestaging never makes a HEAD fail.

A restart of the engine empties the line. A failed fetch is not repeated: a later read of the object reports the error.

Rejected: a job for each HEAD (a record in the metadata store for each object); a 503 when the line is full (the bucket
itself would have answered the HEAD).

Invariants. (1) At most WAITING_MAX are in line or under way, each name once. (2) At most AT_ONCE of a bucket are under
way. (3) Each object in line is counted once, as fetched, present or failed, unless a stop cuts it off.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict

from forebay.core import limits
from forebay.core.errors import ForebayError
from forebay.core.messages.calls import Nothing, ObjectNamed
from forebay.core.types import check_key
from forebay.node.engine.buckets import Buckets
from forebay.node.engine.counts import Tally
from forebay.node.engine.jobs.prefetch import prefetched
from forebay.node.engine.read.cold import ColdReads
from forebay.node.engine.read.one_read import Ask
from forebay.ports.clock import Clock

log = logging.getLogger("forebay.prestaging")

AT_ONCE = limits.FETCHES_MAX // 4
WAITING_MAX = 16_384  # names of at most 1 KiB each
PLACE_WAIT_S = 20.0  # SDKs give an answer 60 s


class Prestaging:
    """See the module's header."""

    def __init__(self, buckets: Buckets, cold: ColdReads, tally: Tally, clock: Clock) -> None:
        self._buckets, self._cold, self._tally, self._clock = buckets, cold, tally, clock
        self._lines: dict[str, OrderedDict[str, None]] = {}  # bucket -> keys that nobody fetches yet
        self._flying: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(WAITING_MAX)
        self._closed = False

    @property
    def waiting(self) -> int:
        """Objects in line or under way."""
        return sum(map(len, self._lines.values())) + len(self._flying)

    async def ask(self, call: ObjectNamed) -> Nothing:
        """Fetch the object soon, if it is not here. Returns when it is in line, or cannot be. `NotFound` for an unknown
        bucket."""
        bucket, key = call.bucket, check_key(call.key)
        served = await self._buckets.again(lambda: self._buckets.acting(bucket, key))
        record = self._cold.store.fresh(served.bucket, key, self._clock.wall_s())
        if record is not None and record.complete:
            self._tally.prestaged["present"] += 1
            return Nothing()
        if self._knows(bucket, key):
            return Nothing()
        try:
            async with asyncio.timeout(PLACE_WAIT_S):
                await self._places.acquire()
        except TimeoutError:
            self._tally.prestaged["refused"] += 1
            return Nothing()
        if self._knows(bucket, key):  # another asked for it while we waited
            self._places.release()
            return Nothing()
        self._lines.setdefault(bucket, OrderedDict())[key] = None
        self._go_on(bucket)
        return Nothing()

    def _knows(self, bucket: str, key: str) -> bool:
        return (bucket, key) in self._flying or key in self._lines.get(bucket, ())

    def _go_on(self, bucket: str) -> None:
        """Fetch the next objects of the bucket's line, up to AT_ONCE."""
        line = self._lines.get(bucket)
        flying = sum(name[0] == bucket for name in self._flying)
        while line and flying < AT_ONCE and not self._closed:
            key, _ = line.popitem(last=False)
            flying += 1
            task = self._flying[bucket, key] = asyncio.create_task(self._fetch(bucket, key))
            task.add_done_callback(functools.partial(self._over, bucket, key))
        if not line:
            self._lines.pop(bucket, None)

    def _over(self, bucket: str, key: str, done: asyncio.Task[None]) -> None:
        del self._flying[bucket, key]
        self._places.release()
        self._go_on(bucket)

    async def _fetch(self, bucket: str, key: str) -> None:
        try:
            fetched_bytes = await prefetched(self._cold, Ask(bucket, key))
        except ForebayError as error:
            self._tally.prestaged["failed"] += 1
            log.info("%s/%s could not be fetched beforehand: %s", bucket, key, error)
        else:
            self._tally.prestaged["fetched" if fetched_bytes else "present"] += 1
            self._tally.prestaged_bytes += fetched_bytes

    async def aclose(self) -> None:
        """Fetch no more."""
        self._closed = True
        self._lines.clear()
        flying = list(self._flying.values())
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)
