"""The events and effects of the flight machine (`core/machines/flight.py`).

Theory. The machine and its shell exchange only these values, so a run of a flight is a transcript. Readers and runs are
numbers. Positions are byte offsets in the object. Blocks are block numbers.

Invariant. Every `Fetch` is answered by exactly one of `Ended`, `GaveUp` and `Failed`, every `Verify` by one `Verified`.
"""

from __future__ import annotations

import msgspec

from forebay.core.errors import ErrorOnWire


# --- events ----------------------------------------------------------------------------------------------------------
class Join(msgspec.Struct, frozen=True):
    """A reader wants bytes [start, end). Fetch blocks up to byte `ahead_to` as well, for later readers."""

    reader: int
    start: int
    end: int
    ahead_to: int = 0


class Took(msgspec.Struct, frozen=True):
    """The reader's client took every byte below `position`."""

    reader: int
    position: int


class Leave(msgspec.Struct, frozen=True):
    """The reader is done or gone, and takes nothing more. It also leaves after a `Fail`."""

    reader: int


class Part(msgspec.Struct, frozen=True):
    """The reader gets the rest from elsewhere: tell it of no more bytes. It still holds the bytes it was told of until
    it leaves."""

    reader: int


class Progress(msgspec.Struct, frozen=True):
    """Every byte of `run` below `upto` (an offset in the object) may be read."""

    run: int
    upto: int


class Arrived(msgspec.Struct, frozen=True):
    """A block of `run` is whole. `kept`: it is on disk and indexed; otherwise it only passes through memory."""

    run: int
    block: int
    kept: bool


class Ended(msgspec.Struct, frozen=True):
    """The run is over: all its blocks have arrived, or it was cut."""

    run: int


class GaveUp(msgspec.Struct, frozen=True):
    """The run ended early, though nothing is wrong with the backend. Fetch the blocks that did not arrive again."""

    run: int


class Failed(msgspec.Struct, frozen=True):
    """The run ended early with an error. The blocks that did not arrive are absent again."""

    run: int
    error: ErrorOnWire


class Gone(msgspec.Struct, frozen=True):
    """The backend has another version now, or none. What is not here will never come."""

    error: ErrorOnWire


class Lost(msgspec.Struct, frozen=True):
    """These blocks are no longer here: they were evicted (never while a reader that was told of them has yet to take
    them), or found to be bad."""

    blocks: tuple[int, ...]


class Verified(msgspec.Struct, frozen=True):
    """A doubted block was compared with its checksum."""

    block: int
    good: bool


Event = Join | Took | Leave | Part | Progress | Arrived | Ended | GaveUp | Failed | Gone | Lost | Verified


# --- effects ---------------------------------------------------------------------------------------------------------
class Fetch(msgspec.Struct, frozen=True):
    """Fetch blocks [first, end) in one request. Answer with Progress, Arrived for each block, then Ended, GaveUp or
    Failed."""

    run: int
    first: int
    end: int


class Cut(msgspec.Struct, frozen=True):
    """End `run` before block `end`; if `end` is the run's first block, end it at once. Answer with Ended."""

    run: int
    end: int


class Verify(msgspec.Struct, frozen=True):
    """Compare a block on disk with its checksum; answer with Verified."""

    block: int


class Land(msgspec.Struct, frozen=True):
    """Tell the reader that bytes [start, end) may be read."""

    reader: int
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True):
    """The reader has been told of its last byte. It stays until it leaves."""

    reader: int


class Fail(msgspec.Struct, frozen=True):
    """The reader cannot be served further. It holds the bytes it was told of until it leaves."""

    reader: int
    error: ErrorOnWire


class Withdraw(msgspec.Struct, frozen=True):
    """Some bytes that the reader was told of and has not taken are wrong: it must ask again. It stays until it
    leaves."""

    reader: int


class Drop(msgspec.Struct, frozen=True):
    """No reader needs this passing block any more: free its memory."""

    block: int


Effect = Fetch | Cut | Verify | Land | Finish | Fail | Withdraw | Drop
