"""Messages between a front and the engine, over a Unix socket of the node's own directory.

Theory. A frame is a 4-byte big-endian length and one msgpack array whose first item is the message's name. The front
connects, says `Hello`, is answered with `Welcome`, and from then on both sides send whenever they have something to
say. A *read* is a conversation with a number chosen by the front:

    OpenRead ->            <- Opened  (what the object is, and the range resolved against its size)
                           <- Landed* (bytes [start, end) may be sent from this file at this offset), in order
    Consumed* ->           (the client took bytes up to here: lets fetching run on, and memory be freed)
                           <- Failed  at any point: nothing more will land
                           <- Withdrawn  what landed and was not consumed is wrong: close, and ask anew
    CloseRead ->           (done, failed, or the client is gone)

What `Landed` said stays true until the front consumed it, closed the read, or the connection ended: the engine keeps
the bytes in that file, at that place, whatever became of the object and of the read. Bytes that are found to be wrong
meanwhile are withdrawn, and stay there too: a front that has not heard of it yet must not meet a hole.

Small objects come whole inside `Opened`. A *call* is one question and one answer (`Call` -> `Answer` | `Failed`);
listing and administration are calls. `Touched` reports hits, which otherwise never reach the engine. `Dropped` asks
fronts to close files of evicted objects. `Grown` says how much of a body has been received, so that writing it through
to the backend overlaps receiving it. Versions: `Hello.wire_version` must match; both come from one installation.

Rejected: gRPC and HTTP between the two (a hundred times the cost per message, no gain on one host); shared memory
for progress (a futex per reader to save 200 small messages a second).

Invariants. (1) However the bytes of a stream are cut, `Frames` yields the messages that were encoded, in order, or
raises `Bug`. (2) A number of a read or call is not used again while it is open.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from forebay.core import limits
from forebay.core.errors import Bug, ErrorOnWire
from forebay.core.record import Record
from forebay.core.types import Bucket, RangeSpec

WIRE_VERSION = 10


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: the class name is the tag."""


# --- front to engine -------------------------------------------------------------------------------------------------
class Hello(_Message):
    front: int
    pid: int
    wire_version: int = WIRE_VERSION


class OpenRead(_Message):
    """`version`: only this version will do (a later part of one response). `head_only`: metadata, no body.
    `revalidate`: ask the backend now, whatever the freshness. `from_node`: another node of the cluster asks.
    `may_relay`: the front can take the bytes from another node itself (`Relay`). `silent`: a node that was to be asked
    in that way, and did not answer. `for_client`: a node that relays the bytes asks."""

    read: int
    bucket: str
    key: str
    range: RangeSpec | None = None
    version: str = ""
    head_only: bool = False
    revalidate: bool = False
    from_node: bool = False
    may_relay: bool = False
    silent: str = ""
    for_client: bool = False


class Consumed(_Message):
    """The client took every byte below `position` (an offset in the object)."""

    read: int
    position: int


class CloseRead(_Message):
    """The front takes no more of this read. Comes once for each, after `Failed` too."""

    read: int


class Touched(_Message):
    """Hits since the last report, flat: object id, first block, end block, object id, first block, end block, …"""

    hits: list[int]


class Suspect(_Message):
    """A front met an I/O error or a missing file for a record that said the bytes were present."""

    bucket: str
    key: str
    object_id: int
    reason: str


class Call(_Message):
    """`verb` names an engine call (`calls.py` lists them); `body` is msgpack of its arguments. `from_node`: another
    node of the cluster asks."""

    call: int
    verb: str
    body: bytes
    from_node: bool = False


class Grown(_Message):
    """The file of the put that `put_open` numbered `put` holds every byte below `upto`."""

    put: int
    upto: int


class GaveUp(_Message):
    """The body of put `put` will not be completed: forget it."""

    put: int


class Reported(_Message):
    """A front's counters, on `Report`: msgpack of the metrics snapshot (`core/metrics.py`)."""

    report: int
    front: int
    body: bytes


# --- engine to front -------------------------------------------------------------------------------------------------
class VolumeAt(msgspec.Struct, array_like=True, frozen=True):
    """`stalled`: its disk does not answer. What its index says may be older than what the engine knows: ask that."""

    volume_id: str
    path: str
    stalled: bool = False


class Welcome(_Message):
    """What a front needs before it serves. Sent again, whole, whenever any of it changes."""

    node_id: str
    volumes: list[VolumeAt]
    buckets: list[Bucket]
    identities: bytes = b""  # msgpack; see node/front/http/auth.py
    pid: int = 0  # the engine's
    wire_version: int = WIRE_VERSION
    trusted: bytes = b""  # issuers and their keys; see core/oidc.py
    as_home: str = ""  # how other nodes name this one when they take it for a key's home
    away: str = ""  # why clients should go to another node; "" if they need not


class Relay(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of the range up to `end` are to be taken from `node`, at `host` and `port`: `request` is the whole head of
    the GET, signed, and `etag` the version's, without quotes."""

    node: str
    host: str
    port: int
    request: bytes
    etag: str
    end: int


class Opened(_Message):
    """The object and the resolved half-open range. `body` carries the range's bytes when they are few. With `relay`
    nothing will land: what is beyond its end is asked for anew, and so is everything if that node does not give it."""

    read: int
    record: Record
    start: int
    end: int
    hit: bool = False  # every byte was present already (only revalidation or verification was needed)
    body: bytes | None = None
    relay: Relay | None = None


class Landed(_Message):
    """Bytes [start, end) of the object may be read from `path` at `offset`. Successive messages are contiguous. A path
    in /proc is memory, and a number there names another as soon as the connection ended: look, once it is open.

    With `body` they are these, and `path` is empty: the first bytes of a flight, on their way to the disk."""

    read: int
    start: int
    end: int
    path: str
    offset: int
    body: bytes | None = None


class Withdrawn(_Message):
    """What the read was told of and has not consumed does not match its checksums: nothing of it shall be sent any
    more. Nothing more will land."""

    read: int


class Failed(_Message):
    """Ends the call numbered `number`; or says that nothing more of that read will land, which is closed as any."""

    number: int
    error: ErrorOnWire


class Answer(_Message):
    call: int
    body: bytes


class Dropped(_Message):
    """Objects evicted or replaced: close cached files, so that their space comes back."""

    object_ids: list[int]


class Report(_Message):
    report: int


class Acts(_Message):
    """Until when, by the clock of leases, hits of buckets that are kept on two nodes may be served; 0: they may not."""

    until_s: float


class Beat(_Message):
    """The engine lives: said every `core/machines/pulse.py` interval."""


ToEngine = Hello | OpenRead | Consumed | CloseRead | Touched | Suspect | Call | Grown | GaveUp | Reported
ToFront = Welcome | Opened | Landed | Withdrawn | Failed | Answer | Dropped | Report | Beat | Acts
Message = ToEngine | ToFront

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_length = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """One frame, ready to write."""
    body = _encoder.encode(message)
    if len(body) > limits.FRAME_BYTES_MAX:
        raise Bug(f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit: page or split it")
    return _length.pack(len(body)) + body


class Frames:
    """Bytes in, messages out. Feed what arrived; iterate what is complete. Holds at most one partial frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        kept = self._buffer
        if kept:
            kept += data
        buffer = memoryview(kept or data)
        size, position = len(buffer), 0
        try:
            while size - position >= 4:
                (length,) = _length.unpack_from(buffer, position)
                if length > limits.FRAME_BYTES_MAX:
                    raise Bug(f"a frame of {length} bytes was announced: the two sides disagree on the protocol")
                end = position + 4 + length
                if end > size:
                    break
                message = _decoder.decode(buffer[position + 4 : end])
                position = end
                yield message
        finally:
            if position or not kept:
                self._buffer = bytearray(buffer[position:])
            buffer.release()
