"""A body that a client on this host hands over as memory, instead of sending it.

Theory. A client that has its bytes in a memfd passes the descriptor at the door. The bytes are then copied once, from
that memory through a small buffer to the object's file, by the threads that write files anyway, and digested on the
way like any body. A socket would copy them twice more and take turns with the loop. Everything else is a PUT's: who
may, how long, where to, and what the engine does with the file.

The client says what digests its bytes have. They are compared with those of the bytes that arrived, so what is changed
in between, in whatever memory, is refused.

Whether the client shares the memory on is its own affair: it may write to it while it is read, and gets an object that
nobody asked for, or a refusal. No other object is concerned, and it never has the file itself. Only a memfd that cannot
shrink is read: a file of a filesystem that the client runs could keep a thread waiting for ever.

Rejected: giving the client the file to write to (it could write to it after it was acknowledged, and its digests would
have to be believed or computed a second time); mapping the memory (its pages must be found one by one: slower than a
copy within the cache).

Invariant. What is acknowledged has the digests that the client said, and the node wrote it itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Executor

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Closed, Invalid
from forebay.core.messages.calls import Written
from forebay.core.messages.doorwire import DoorTake
from forebay.core.types import check_key
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Request
from forebay.node.front.objects.puts import Puts
from forebay.node.front.objects.reads import Reads

RUN_BYTES = 8 * limits.MIB  # copied by a thread without looking whether the client is still there


class HandedMemory:
    """See the module's header. `workers` store bodies."""

    def __init__(self, reads: Reads, puts: Puts, auth: Auth, workers: Executor) -> None:
        self._reads = reads
        self._puts = puts
        self._auth = auth
        self._workers = workers

    async def take(self, identity: Identity, asked: DoorTake, fd: int, gone: Callable[[], bool]) -> Written:
        """Make the object. `fd` stays the caller's. Raises what a PUT over HTTP is answered, and `Invalid` with code
        `BadDigest` if other bytes arrived than the client says."""
        bucket, key = self._reads.bucket(asked.bucket), check_key(asked.key)
        self._auth.require_write(identity, bucket, key)
        size_bytes = asked.size_bytes
        _check_memory(fd, size_bytes)
        headers = {b"content-length": b"%d" % size_bytes}
        incoming = self._puts.take(Request(b"PUT", b"", b"", b"", headers), None, bucket, key, hashed=False)
        loop = asyncio.get_running_loop()
        try:
            for at in range(0, size_bytes, RUN_BYTES):
                if gone():
                    raise Closed("the client went away")
                run = min(RUN_BYTES, size_bytes - at)
                copying = loop.run_in_executor(self._workers, incoming.take_from, fd, at, run)
                await _ended(copying)
                incoming.wrote()
            incoming.finish()
            if incoming.result.sums != asked.sums:
                raise Invalid("the bytes that arrived have other digests than was said: try again", code="BadDigest")
        except BaseException:
            incoming.abort()
            raise
        return await self._puts.put(bucket.name, key, incoming)


async def _ended(copying: asyncio.Future[None]) -> None:
    """As `await copying`; a cancellation (the front stops) comes when no thread uses the descriptors any more."""
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise


def _check_memory(fd: int, size_bytes: int) -> None:
    if not limits.ETAG_MD5_BYTES_MAX < size_bytes <= limits.PUT_BYTES_MAX:
        raise Invalid(f"a body of {size_bytes} bytes is not handed over: send it over HTTP")
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # no memfd
        sealed = 0
    if not sealed or os.fstat(fd).st_size < size_bytes:
        raise Invalid("what was handed over is no memfd that cannot shrink, or is too small: send it over HTTP")
