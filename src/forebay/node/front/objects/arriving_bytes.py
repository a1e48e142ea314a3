"""The bytes of a read as they arrive from the engine, each from the file or memory where the engine put it.

Theory. The engine says "bytes [a, b) are in this file", and keeps them there until the read took them, is closed, or
the engine is gone (`node/engine/read/one_read.py`). A front may process such a message late: its client is slow, or the
front was paused. So it opens the file under a lease, and then checks that the engine that sent the message is still
there (`Read.stands`). If so, the bytes were there when the lease was taken, and nobody punches a hole in the file from
then on. If not, the message counts for nothing: the next engine may have removed the file, and a number in /proc may
name other memory.

Bytes that are no longer available are asked for again: the rest of the range, of the same version. This happens if the
engine or the file is gone, the file failed, or the engine withdrew wrong bytes (a piece that is being sent then still
goes on to its end). If that version is gone, the answer is cut short; it is never completed with another version's
bytes.

A *relayed* read has no bytes from the engine: another node sends them (`objects/relay.py`), a stripe at a time, and
the rest is asked for again after each. If that node does not give them, they are asked for as any others.

Rejected: remembering the inode of what was told (says which file it is, not whether its bytes are still in it).

Invariants. (1) Pieces come in order and without a gap. (2) Bytes are only taken from what the read's own engine keeps.
(3) The rest is asked for at most REOPENS_MAX times without a byte of progress. (4) After a relay that failed nothing
more of the read is relayed.
"""

from __future__ import annotations

from typing import NamedTuple

from forebay.core.errors import MAP_CHANGES, Bug, ForebayError, Unavailable
from forebay.core.messages.wire import Landed, Opened, Relay
from forebay.core.ranges import end_of_stripe
from forebay.core.record import is_version
from forebay.core.types import RangeSpec
from forebay.node.front.http.requests import Source
from forebay.node.front.link import Link, Read
from forebay.node.front.objects.relay import Refused, Relayed, Silent, Sources
from forebay.node.store.reader import LeasedFile, StoreReader

REOPENS_MAX = 3


class Piece(NamedTuple):
    """The next bytes of the object, up to `end`: `body`, or `size_bytes` of `file` from `offset` on, or of what another
    node sends. File and source are good until the next piece is asked for."""

    end: int
    size_bytes: int
    body: bytes | None
    file: LeasedFile | None
    offset: int
    source: Source | None = None


class Arriving:
    """Bytes [start, end) of the object in `opened`, the engine's answer to `read`. See the module's header. `reopened`
    counts how often the rest was asked for because something failed."""

    def __init__(
        self, store: StoreReader, link: Link, read: Read, opened: Opened, sources: Sources | None = None
    ) -> None:
        """`sources` is needed for a read that may be relayed."""
        self.position, self._end = opened.start, opened.end
        self._upto = opened.end if opened.relay is None else opened.relay.end  # of what this read gives
        self._relays = opened.relay is not None
        self._sources = sources
        self._relayed: Relayed | None = None
        self._silent = ""
        self.reopened = 0
        self.as_stored = opened.body is None and opened.record.object_id != 0  # all of it is in the object's file
        self._store, self._link, self._read = store, link, read
        self._version = opened.record.version
        self._opened: Opened | None = opened  # until its body was given
        self._path = ""
        self._file: LeasedFile | None = None
        self._broken = False
        self._tries = 0

    @property
    def left_bytes(self) -> int:
        """How many bytes have not been taken."""
        return self._end - self.position

    async def piece(self) -> Piece:
        """The next bytes, as many as there are. Raises the engine's error, `Precondition` if the version is gone,
        `Unavailable` if the rest is not available now."""
        while True:
            if self._broken or self.position == self._upto:
                await self._ask_again()
            opened, self._opened = self._opened, None
            if opened is not None and opened.relay is not None:
                source = await self._relay(opened.relay)
                if source is not None:
                    return Piece(self._upto, self._upto - self.position, None, None, 0, source)
                continue
            if opened is not None and opened.body is not None:
                if len(opened.body) != self._upto - self.position:
                    raise Bug("the engine sent a body of another size than it said: please report it")
                return Piece(self._upto, len(opened.body), opened.body, None, 0)
            landed = await self._landed()
            if landed is None:
                continue
            size_bytes = landed.end - self.position
            if landed.body is not None:
                assert len(landed.body) == size_bytes, "bytes of another length than announced"
                return Piece(landed.end, size_bytes, landed.body, None, 0)
            file = await self._open(landed.path)
            if file is not None:
                return Piece(landed.end, size_bytes, None, file, landed.offset)
            self._broken = True

    def took(self, position: int) -> None:
        """The client has every byte below `position`."""
        if position > self.position:
            self.position, self._tries = position, 0
            self._read.consumed(position)
        if self._relayed is not None and position == self._upto:
            self._relayed.end()
            self._relayed = None

    def failed(self, silent: bool = False) -> None:
        """The file or the source of the last piece failed or ended: bytes not taken must come from elsewhere. `silent`:
        nothing came of the source. The engine hears of it, or it would wait for the same node again."""
        self._broken = True
        self._relays = False
        if silent and self._relayed is not None:
            self._silent = self._relayed.node

    def close(self) -> None:
        """Close file and source. The read's owner closes the read."""
        file, self._file = self._file, None
        if file is not None:
            file.release()
        relayed, self._relayed = self._relayed, None
        if relayed is not None:
            relayed.close()

    # --- inside ------------------------------------------------------------------------------------------------------
    async def _landed(self) -> Landed | None:
        """The engine's next message; None when the engine is gone."""
        try:
            landed = await self._read.landed()
        except ForebayError as error:
            if self._read.stands and error.code != MAP_CHANGES:
                raise
            self._broken = True
            return None
        if landed.start != self.position or not self.position < landed.end <= self._upto:
            raise Bug(f"bytes landed at {landed.start}..{landed.end} where {self.position} was next")
        return landed

    async def _relay(self, relay: Relay) -> Source | None:
        """What another node sends; None if it does not."""
        assert self._sources is not None, "it was not asked for"
        try:
            self._relayed = await self._sources.open(relay, self.position)
        except (Silent, Refused) as error:
            self.failed()
            self._silent = relay.node if isinstance(error, Silent) else ""
            return None
        return self._relayed.source

    async def _open(self, path: str) -> LeasedFile | None:
        """The file that the engine named; None if it cannot be opened, or that engine is gone."""
        if self._file is not None and path == self._path and not path.startswith("/proc/"):
            return self._file  # its lease is older than what was told of it
        self.close()
        self.as_stored &= not path.startswith("/proc/")
        self._file, self._path = await self._store.open_landing(path), path
        if self._file is not None and not self._read.stands:
            self.close()
        return self._file

    async def _ask_again(self) -> None:
        """The rest of the same version, or its next stripe, from the engine that is there now."""
        self.close()
        if self._broken:
            if self._tries == REOPENS_MAX:
                raise Unavailable("the bytes cannot be read where they landed: read again")
            self._tries += 1
            self.reopened += 1
        self.as_stored = False
        self._broken = True  # until there is an answer
        self._upto = min(self._end, end_of_stripe(self.position)) if self._relays else self._end
        silent, self._silent = self._silent, ""
        await self._link.open_again(
            self._read,
            RangeSpec(self.position, self._upto - 1),
            version=self._version,
            may_relay=self._relays,
            silent=silent,
        )
        try:
            self._opened = opened = await self._read.opened()
        except ForebayError:
            if self._read.stands:
                raise
            return  # we asked an engine that was gone, which nobody had heard of yet
        check_same(opened, self._version, self.position, self._upto)
        self._broken = False


def check_same(opened: Opened, version: str, start: int, end: int) -> None:
    """Check that the engine opened what was asked for."""
    if not is_version(opened.record, version) or (opened.start, opened.end) != (start, end):
        raise Bug("the engine opened another version or range than was asked for: please report it")
