"""Messages of the host door: a client asks a front of its own host for descriptors, over a Unix socket.

Theory. A frame is a 4-byte little-endian length and one msgpack array whose first item is the message's name. The
client says `DoorHello`, is answered with `DoorWelcome` or `DoorRefused`, and then asks:

    DoorOpen(number, objects)       ->   <-  DoorOpened(number, results)   one result for each object, in order
    DoorUsed(hits, reads, bytes)    ->                                     what was read meanwhile, about once a second
    DoorClosed(object_ids)          ->                                     descriptors that the client no longer has
    DoorTake(number, bucket, key, …) ->                                    this memory is to be the object
                                         <-  DoorTook(number, …)           it is, or why not
                                         <-  DoorDropped(object_ids)       evicted or replaced: close these

The descriptors of a `DoorOpened` travel with its first byte, as many as it has `DoorFile` results, in their order; so a
receiver that keeps descriptors in a queue takes those of a message when the message is complete. A question is for at
most DOOR_FILES_MAX objects, since that many descriptors fit one answer; to ask for more, send several: a front takes up
to DOOR_ASKS_MAX before it has answered the first. Results are told apart by a number, not by a name: there may be a
hundred thousand a second.

The other way round, a client hands over memory that it shares instead of sending the bytes in it: the descriptor of a
`DoorTake` travels with its first byte. It is that of a memfd that cannot shrink (F_SEAL_SHRINK), so reading from it
never waits for anybody and never finds it short. A connection hands over one body at a time.

Rejected: descriptors for small objects too (a file each where the index has the bytes at hand); one question for each
object (a way through two sockets costs more than either side's work).

Invariants. (1) However the bytes are cut, `Frames` yields the messages that were encoded, in order, or raises
`Corrupt`. (2) A `Frames` holds at most one frame beyond what was yielded, and no frame over its limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from forebay.core import limits
from forebay.core.errors import Corrupt, ErrorOnWire
from forebay.core.messages.calls import Written

DOOR_VERSION = 1
_ROOM_BYTES = 64 * limits.KIB  # received at once where no longer frame is expected


class DoorAt(msgspec.Struct, frozen=True):
    """What `GET /-/v1/door` answers: the socket's path on the node's host, and who answers there."""

    node_id: str
    path: str


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: the class name is the tag."""


# --- client to front -------------------------------------------------------------------------------------------------
class DoorHello(_Message):
    """`token`: the bearer token of HTTP, "" for none."""

    token: str = ""
    version: int = DOOR_VERSION


class DoorOpen(_Message):
    """Objects as (bucket, key), 1 to DOOR_FILES_MAX of them; `number` is the client's, for the answer. `proves`: the
    client has digests of its own, and compares what it reads; so the front need not."""

    number: int
    objects: list[tuple[str, str]]
    proves: bool = False


class DoorUsed(_Message):
    """Blocks read through descriptors since the last report, flat: object id, first block, end block, …; how many reads
    these were, and of how many bytes."""

    hits: list[int]
    reads: int = 0
    read_bytes: int = 0


class DoorClosed(_Message):
    object_ids: list[int]


class DoorTake(_Message):
    """Make the first `size_bytes` of the memory that came along the object. `sums`: the xxh3-64 of each 4 MiB of them,
    as the client's memory had them. For fronts whose `DoorWelcome` says `takes`."""

    number: int
    bucket: str
    key: str
    size_bytes: int
    sums: list[int]


# --- front to client -------------------------------------------------------------------------------------------------
class DoorWelcome(_Message):
    node_id: str
    version: int = DOOR_VERSION
    takes: bool = False


class DoorRefused(_Message):
    """Who asks is not let in, for the reason HTTP would have given; the connection ends."""

    error: ErrorOnWire


class DoorFile(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A whole object in a file; its descriptor comes with the message. It may be read without asking again until
    `fresh_until_s` (Unix time). `block_bytes` is the unit of `DoorUsed`. Not `compared`: the front has not compared its
    bytes with their checksums, and who asked does."""

    object_id: int
    size_bytes: int
    etag: str
    version: str
    fresh_until_s: float
    block_bytes: int = limits.BLOCK_BYTES
    compared: bool = True


class DoorInline(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A small object itself. Not to be kept: nobody says when it changes."""

    body: bytes
    etag: str
    version: str


class DoorCold(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """Not to be had here now: ask over HTTP."""


class DoorError(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """What HTTP would answer."""

    error: ErrorOnWire


Result = DoorFile | DoorInline | DoorCold | DoorError


class DoorOpened(_Message):
    number: int
    results: list[Result]


class DoorDropped(_Message):
    object_ids: list[int]


class DoorTook(_Message):
    """What the object is now, or the error that HTTP would have answered."""

    number: int
    written: Written | None
    error: ErrorOnWire | None = None


ToDoor = DoorHello | DoorOpen | DoorUsed | DoorClosed | DoorTake
FromDoor = DoorWelcome | DoorRefused | DoorOpened | DoorDropped | DoorTook
MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()
_length = struct.Struct("<I")


def encode(message: ToDoor | FromDoor) -> bytearray:
    """One frame, ready to send."""
    frame = bytearray(4)
    _encoder.encode_into(message, frame, 4)
    _length.pack_into(frame, 0, len(frame) - 4)
    return frame


class Frames(Generic[MessageT]):
    """Bytes in, messages out: receive into `room()`, release it, then iterate `wrote(size)` to its end."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT], frame_bytes_max: int) -> None:
        self._decoder = decoder
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray(_ROOM_BYTES)
        self._start = 0  # of what is not yielded yet
        self._end = 0  # of what has arrived

    def room(self) -> memoryview:
        """Where to receive to: at least one byte, and as much as the frame under way still needs."""
        return memoryview(self._buffer)[self._end :]

    def wrote(self, size_bytes: int) -> Iterator[MessageT]:
        """The first `size_bytes` of `room()` have arrived: the messages that are complete now."""
        self._end += size_bytes
        needed = 4
        try:
            while self._end - self._start >= 4:
                (length,) = _length.unpack_from(self._buffer, self._start)
                if length > self._frame_bytes_max:
                    raise Corrupt(f"a message of {length} bytes was announced: client and node are of two versions")
                needed = 4 + length
                if self._end - self._start < needed:
                    break
                start = self._start + 4
                self._start += needed
                needed = 4
                try:
                    with memoryview(self._buffer) as view, view[start : start + length] as frame:
                        message = self._decoder.decode(frame)
                except msgspec.MsgspecError as error:
                    raise Corrupt(f"a message of the door cannot be read ({error}): update client and node") from None
                yield message
        finally:
            self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        held = self._end - self._start
        if self._start and (held == 0 or len(self._buffer) - self._start < max(needed, held + _ROOM_BYTES // 2)):
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
        if len(self._buffer) - self._start < needed:
            self._buffer.extend(bytes(needed - (len(self._buffer) - self._start)))
        assert self._end < len(self._buffer), "no room for what comes next"


def ask_frames() -> Frames[ToDoor]:
    """For the front's side."""
    return Frames(msgspec.msgpack.Decoder(ToDoor), limits.DOOR_ASK_BYTES_MAX)


def answer_frames() -> Frames[FromDoor]:
    """For the client's side."""
    return Frames(msgspec.msgpack.Decoder(FromDoor), limits.DOOR_ANSWER_BYTES_MAX)
