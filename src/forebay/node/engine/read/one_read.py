"""One read at the engine: what is asked, where the answers go, and what is held for it meanwhile.

Theory. A read lives from `OpenRead` to `CloseRead`. It may move between flights (the version changed before anything
was told, or a disk stopped taking bytes) without its asker noticing: bytes stay contiguous.

`Opened` goes out with the first bytes. Until then a version that changed can be exchanged for the new one. Bytes are
announced in pieces of at most TELL_BYTES_MAX: the front reports what its client took only at the end of a piece, and
fetching ahead waits for that report.

A read that moves on keeps its place in the old flight until its client has taken what was announced there: those bytes
are in that flight's file or memory, and nothing else may keep them. A failed read keeps its place until `close`.

Invariants. (1) Opened once, then landed pieces without a gap, then finished; or failed, once; nothing after `close`.
(2) At most one flight announces bytes to a read. (3) Announced bytes stay until the read took them or is closed; bytes
that turn out to be wrong are withdrawn.
"""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, NamedTuple, Protocol

from forebay.core import limits
from forebay.core.errors import ErrorOnWire
from forebay.core.messages.wire import Relay
from forebay.core.record import Record
from forebay.core.types import RangeSpec
from forebay.node.engine.asking import Patience
from forebay.node.engine.read.flights import Flight

if TYPE_CHECKING:
    from forebay.node.engine.read.cold import ColdReads

TELL_BYTES_MAX = 8 * limits.MIB
REOPENS_MAX = 3


class Ask(NamedTuple):
    """What a reader wants (`wire.OpenRead`)."""

    bucket: str
    key: str
    range: RangeSpec | None = None
    version: str = ""
    head_only: bool = False
    revalidate: bool = False
    may_relay: bool = False  # whether `Out` takes a `Relay`


class Out(Protocol):
    """Where a read's answers go. Called from the engine's loop; must not block."""

    def opened(
        self, record: Record, start: int, end: int, hit: bool, body: bytes | None, relay: Relay | None = None
    ) -> None: ...

    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None: ...

    def finished(self) -> None: ...

    def failed(self, error: ErrorOnWire) -> None: ...

    def withdrawn(self) -> None: ...


class Read:
    """One read under way. `ColdReads.open` makes it; the asker reports `took` and ends it with `close`."""

    __slots__ = (
        "_cold",
        "_flight",
        "_left",
        "_number",
        "_patience",
        "ask",
        "closed",
        "context",
        "hit",
        "out",
        "record",
        "span",
        "task",
        "tries",
    )

    def __init__(self, cold: ColdReads, ask: Ask, out: Out, patience: Patience | None) -> None:
        self.ask, self.out = ask, out
        self.record: Record | None = None  # set once opened
        self.span = (0, 0)
        self.hit = False
        self.task: asyncio.Task[None] | None = None
        self.tries = 0
        self.closed = False
        self.context = contextvars.copy_context()  # who asks
        self._cold, self._patience = cold, patience
        self._flight: Flight | None = None
        self._number = 0
        self._left: list[tuple[Flight, int, int]] = []  # flight, our number there, and the end of what it told us

    def follow(self, flight: Flight, start: int, end: int, ahead_to: int = 0) -> None:
        """Read [start, end) from `flight` from now on."""
        if self._flight is not None:
            self._left.append((self._flight, self._number, start))
        self._flight = flight
        if self.record is None:
            self.span, self.hit = (start, end), flight.has(start, end)
        self._number = flight.join(self, start, end, ahead_to)

    def took(self, position: int) -> None:
        """The client has every byte below `position`."""
        for flight, number, told in self._left[:]:
            if position < told:
                flight.took(number, position)
            else:
                self._left.remove((flight, number, told))
                flight.leave(number)
        if self._flight is not None:
            self._flight.took(self._number, position)

    def close(self) -> None:
        """The reader is done or gone. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._cold.reads -= 1
        if self.task is not None:
            self.task.cancel()
        self.detach()

    def detach(self) -> None:
        """Leave all flights."""
        left, self._left = self._left, []
        flight, self._flight = self._flight, None
        if flight is not None:
            left.append((flight, self._number, 0))
        for each, number, _ in left:
            each.leave(number)

    # --- as a flight's reader ----------------------------------------------------------------------------------------
    def landed(self, start: int, end: int, path: str, offset: int, body: bytes | None) -> None:
        self._open_once()
        if body is not None:
            if not self.closed:
                self.out.landed(start, end, path, offset, body)
            return
        while start < end and not self.closed:
            stop = min(end, start + TELL_BYTES_MAX)
            self.out.landed(start, stop, path, offset, None)
            offset += stop - start
            start = stop

    def finished(self) -> None:
        self._open_once()
        self.out.finished()

    def failed(self, error: ErrorOnWire) -> None:
        if self.record is None and not self.closed and self._patience is not None and self._patience.is_for(error.code):
            self.detach()  # nothing was told
            self._cold.start(self, self._patience)
        elif error.kind == "Precondition" and self.record is None and not self.ask.version and self.tries < REOPENS_MAX:
            self.detach()  # nothing was told
            self.tries += 1
            self._cold.start(self)
        elif not self.closed:
            self.out.failed(error)

    def withdrawn(self) -> None:
        if not self.closed:
            self.out.withdrawn()

    def _open_once(self) -> None:
        if self.record is None and self._flight is not None:
            self.record = self._cold.record_of(self._flight)
            self.out.opened(self.record, *self.span, self.hit, None)


class Evictor(Protocol):
    """What reads tell the room (`node/engine/evictions.py`). Object id 0 stands for an object that is not stored."""

    def landed(
        self, volume_id: str, unit: tuple[int, int], size_bytes: int, bucket: str, key: str, pinned: bool
    ) -> None: ...

    def touched(self, object_id: int, first: int, end: int) -> None: ...

    def removed(self, object_id: int, blocks: list[int]) -> None: ...

    def make_room(self) -> None: ...
