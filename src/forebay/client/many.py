"""The results of a batch, and the memory that they are received into.

Theory. The answer to a batch (core/messages/batch.py) is received into *rooms*: pieces of memory that never move, since
callers get views of them. If the length is known, one room holds all of it, and after the kernel nothing copies an
item's bytes. If the answer comes in chunks, a full room is followed by another, and only the frame that had begun in it
is copied. Frames are parsed once, at the end or when a room is full.

A result is a view into its room and keeps all of the room alive: one sample that is kept for long keeps its batch.
`Many.bytes` copies. Results in a caller's buffer (`into`) are valid until the buffer is used again.

Rejected: a `bytes` for each item (a copy and an allocation, 1 µs at 10 KiB); resizing one buffer (views forbid it).

Invariant. A frame lies in one room, whole.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from forebay.core import limits
from forebay.core.errors import Corrupt, ForebayError
from forebay.core.messages.batch import FRAME, MEDIA, Item, Wanted, read_frames
from forebay.core.messages.http1 import Response

Result = memoryview | bytes | ForebayError
Host = Callable[[Sequence[Item]], Sequence[bytes | memoryview | None]]  # what can be had without HTTP, else None
ROOM_BYTES_MIN = 64 * limits.KIB  # of an answer in chunks
ROOM_BYTES_MAX = 16 * limits.MIB


class Many(Sequence[Result]):
    """What `get_many` returns: for each item its bytes, in the order asked; with `on_error="report"`, or the error.

    The bytes are a read-only-by-agreement `memoryview` (or `bytes`): see the module's header for how long they last.
    `cold`: how many of the items were not on the node when they were asked for. `waited_s`: how long the call waited
    for the node.
    """

    __slots__ = ("_results", "cold", "waited_s")

    def __init__(self, results: list[Result], cold: int = 0, waited_s: float = 0.0) -> None:
        self._results = results
        self.cold = cold
        self.waited_s = waited_s

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, at: int) -> Result: ...
    @overload
    def __getitem__(self, at: slice) -> list[Result]: ...
    def __getitem__(self, at: int | slice) -> Result | list[Result]:
        return self._results[at]

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def __repr__(self) -> str:
        return f"<Many {len(self)} items, {len(self.errors)} failed, {self.cold} cold>"

    def bytes(self, at: int) -> bytes:
        """A copy of one result, which keeps nothing else alive. Raises the error that it is instead."""
        result = self._results[at]
        if isinstance(result, ForebayError):
            raise result
        return bytes(result)

    @property
    def errors(self) -> dict[int, ForebayError]:
        """What could not be had, by position."""
        return {at: result for at, result in enumerate(self._results) if isinstance(result, ForebayError)}


class FrameSink:
    """Receives the answer to a batch (see `http1.Sink`). `into`: memory to use where the answer fits; `items`: what was
    asked for, which tells how long an answer in chunks will be at least."""

    def __init__(self, into: memoryview | None = None, items: Sequence[Wanted] = ()) -> None:
        self.results: list[Result] = []
        self.cold = 0
        self.begun = False
        self._into = into
        self._items = items
        self._room = memoryview(b"")
        self._room_bytes = 0
        self._used = 0  # of the room
        self._parsed = 0  # of the room, up to here whole frames were taken

    def begin(self, response: Response) -> None:
        """`Corrupt` if it is no batch's answer."""
        if response.headers.get("content-type") != MEDIA:
            raise Corrupt(
                f"the answer to a batch is {response.headers.get('content-type', 'of no type')!r}: check that client "
                "and node are of one version, and that a Forebay node answers at this URL"
            )
        self.begun = True
        said = response.headers.get("content-length")
        length = max(least_bytes(self._items), ROOM_BYTES_MIN) if said is None else int(said)
        if length > 2 * limits.BATCH_BYTES_MAX:
            raise Corrupt(f"the answer to a batch has {length} bytes: check what listens at this URL")
        self._enter(length)

    def _enter(self, size_bytes: int) -> None:
        """Receive into a room of that size from here on."""
        into = self._into
        if into is not None and len(into) >= size_bytes:
            self._room, self._into = into, None
        else:
            self._room = io.BytesIO(bytes(size_bytes)).getbuffer()  # zero pages of the kernel, touched when written
        self._room_bytes = len(self._room)

    def buffer(self) -> memoryview:
        """Room for the next bytes."""
        if self._used == self._room_bytes:
            self._next_room()
        return self._room[self._used :]

    def wrote(self, size_bytes: int) -> None:
        self._used += size_bytes

    def _next_room(self) -> None:
        wanted = self._take()
        begun = self._room[self._parsed : self._used]
        size = min(max(2 * self._room_bytes, ROOM_BYTES_MIN), ROOM_BYTES_MAX)
        self._enter(max(size, wanted, len(begun) + FRAME.size))
        self._room[: len(begun)] = begun
        self._parsed, self._used = 0, len(begun)

    def _take(self) -> int:
        """Take the whole frames that are here; how long the one that has begun will be, 0 if that is not known."""
        self._parsed, wanted, cold = read_frames(self._room, self._parsed, self._used, self.results)
        self.cold += cold
        return wanted

    def received(self) -> list[Result]:
        """The results that are here whole. Once, after the last byte."""
        self._take()
        return self.results

    def left_over(self) -> int:
        """How many bytes belong to a frame that is not whole."""
        return self._used - self._parsed


def least_bytes(items: Sequence[Wanted]) -> int:
    """How long an answer will be as far as ranges tell."""
    size = 0
    for item in items:
        start, end = (item.start, item.end) if isinstance(item, Item) else item[2:4] if len(item) > 3 else (0, None)
        size += FRAME.size
        if isinstance(end, int) and isinstance(start, int):
            size += end - start
    return size if 0 < size <= limits.BATCH_BYTES_MAX else 0
