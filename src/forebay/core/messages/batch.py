"""A request for many items, and the frames of its answer.

Theory. A batch names objects, ranges of objects, or members of shards. One stream answers them in the same order. Each
item has a header of 24 bytes, then its bytes or the error that a GET would have returned. The header is fixed and flat
because Python reads hundreds of thousands of them a second.

A range that runs past the end is answered up to the end, as in HTTP. A range without a byte is an error, except for all
of an empty object. Items that do not fit into BATCH_BYTES_MAX are answered with an `Invalid` of code FULL; the reader
requests those again in the next batch.

Invariants. (1) There are as many frames as items, in their order; an answer that ends early is none. (2) A frame with
status 200 carries exactly the bytes asked for; any other carries a msgpack `ErrorOnWire`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from forebay.core import limits
from forebay.core.errors import Corrupt, ErrorOnWire, ForebayError, Invalid, from_wire

MEDIA = "application/x-forebay-batch"
FRAME = struct.Struct("<HHIQQ")  # status, flags, zero, size of what follows, size of the whole object or member
COLD = 1  # a flag: the bytes were not here when they were asked for
FULL = "BatchFull"  # the code of the error for an item that the answer has no room for
ASK_MEDIA = "application/msgpack"  # of a request; anything else is read as JSON
_OK = 200


class Item(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Bytes [start, end) of an object, or of a member of a shard; end None: to its end. `etag` without quotes: only
    that version will do. `version`: the id of one that the backend keeps, whatever the object is now."""

    bucket: str
    key: str
    start: int = 0
    end: int | None = None
    member: str = ""
    etag: str = ""
    version: str = ""


class BatchCall(msgspec.Struct, frozen=True):
    """What `POST /-/v1/batch` takes, as msgpack or JSON."""

    items: list[Item]
    format: Literal["frames", "tar"] = "frames"


Wanted = Item | tuple[Any, ...]  # an Item, or its fields in that order, as many as are needed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BatchCall).decode
_decode_json = msgspec.json.Decoder(BatchCall).decode
_decode_error = msgspec.msgpack.Decoder(ErrorOnWire).decode


def encode_items(items: Sequence[Wanted]) -> bytes:
    """The body of a request for the frames of `items`, as ASK_MEDIA."""
    return _encode({"items": items})


def decode_call(body: bytes, media: str) -> BatchCall:
    """What a request's body asks for. `Invalid` if it is malformed, empty or over BATCH_ITEMS_MAX."""
    try:
        call = _decode(body) if media.startswith(ASK_MEDIA) else _decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(
            f"the body is no batch ({error}): send {{items, format}} as {ASK_MEDIA} or JSON, see /-/openapi.json"
        ) from None
    if not call.items:
        raise Invalid("the batch names no item: leave the request out")
    if len(call.items) > limits.BATCH_ITEMS_MAX:
        raise Invalid(
            f"the batch names {len(call.items)} items, at most {limits.BATCH_ITEMS_MAX} are allowed: ask in parts",
            code="TooManyItems",
        )
    return call


def failed_frame(error: ForebayError, status: int) -> bytes:
    """The whole frame of an item that cannot be had."""
    body = _encode(error.to_wire())
    return FRAME.pack(status, 0, 0, len(body), 0) + body


def read_frames(
    memory: memoryview, position: int, upto: int, into: list[memoryview | bytes | ForebayError]
) -> tuple[int, int, int]:
    """Take the whole frames in memory[position:upto] apart, appending each one's bytes (a view, no copy) or error.

    Returns where the first frame that is not whole begins, how many bytes that one has with its header (0 when even
    that is not there), and how many of those taken were cold. `Corrupt` for what cannot be a frame.
    """
    unpack, add, header_bytes = FRAME.unpack_from, into.append, FRAME.size
    cold = 0
    while (body_at := position + header_bytes) <= upto:
        status, flags, zero, size, _ = unpack(memory, position)
        end = body_at + size
        if zero or size > limits.BATCH_BYTES_MAX:
            raise Corrupt("a batch's answer holds what is no frame: check that client and node are of one version")
        if end > upto:
            return position, end - position, cold
        if status == _OK:
            add(memory[body_at:end])
            cold += flags & COLD
        else:
            add(_error_in(memory[body_at:end]))
        position = end
    return position, 0, cold


def _error_in(body: memoryview) -> ForebayError:
    try:
        return from_wire(_decode_error(body))
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"a batch's answer holds an error that cannot be read ({error}): check that client and node are of one "
            "version"
        ) from None


def outside(start: int, end: int | None, size_bytes: int | None) -> Invalid:
    """The error for a range that holds no byte of the object."""
    until = "its end" if end is None else end
    if size_bytes is None:
        return Invalid(f"the range from {start} to {until} holds no byte: its end must lie behind", code="InvalidRange")
    return Invalid(
        f"the range from {start} to {until} is outside the object of {size_bytes} bytes: ask within 0..{size_bytes}",
        code="InvalidRange",
        size_bytes=size_bytes,
    )


def full(size_bytes: int) -> Invalid:
    """The error for an item of `size_bytes` that the answer has no room for."""
    return Invalid(
        f"the answer to the batch would be over {limits.BATCH_BYTES_MAX} bytes with these {size_bytes}: ask for the "
        "item in another batch, or alone with a GET",
        code=FULL,
        size_bytes=size_bytes,
    )
