"""What happens to a flight, and what it asks for: the words of `core/machines/flight.py`.

Theory. The machine and its shell talk in these values only, so a run of a flight is a transcript. Readers and runs are
numbers; positions are byte offsets in the object; blocks are block numbers.

Invariant. Every `Fetch` is answered by exactly one of `Ended`, `GaveUp` and `Failed`, every `Verify` by one `Verified`.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.core.errors import ErrorOnWire


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Join:
    """A reader wants bytes [start, end); blocks up to byte `ahead_to` are fetched as well, for whoever comes next."""

    reader: int
    start: int
    end: int
    ahead_to: int = 0


@dataclass(frozen=True, slots=True)
class Took:
    """The reader's client took every byte below `position`."""

    reader: int
    position: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The reader is done or gone: it takes nothing more from here. Comes after `Fail` too."""

    reader: int


@dataclass(frozen=True, slots=True)
class Part:
    """The reader gets what it was not told of yet from elsewhere. It stays, with what it was told of, until it
    leaves."""

    reader: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Of `run`, every byte below `upto` (an offset in the object) may be read."""

    run: int
    upto: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A block of `run` is whole. `kept`: on disk, and indexed; otherwise it is only passing through."""

    run: int
    block: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over: all its blocks have arrived, or it was cut."""

    run: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The run is over before its end, and nothing is wrong with the backend: fetch again what did not arrive."""

    run: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The run is over before its end; the blocks that did not arrive are absent again."""

    run: int
    error: ErrorOnWire


@dataclass(frozen=True, slots=True)
class Gone:
    """The backend has another version now, or none: what is not here will never come."""

    error: ErrorOnWire


@dataclass(frozen=True, slots=True)
class Lost:
    """Blocks that were here are not: evicted (none that a reader was told of and has not taken), or found bad."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """A doubted block has been compared with its checksum."""

    block: int
    good: bool


Event = Join | Took | Leave | Part | Progress | Arrived | Ended | GaveUp | Failed | Gone | Lost | Verified


# --- effects ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch blocks [first, end) by one request; answer with Progress, Arrived for each block, then Ended or Failed."""

    run: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """End `run` before block `end`; at `end == first` block of the run, at once. Answer with Ended."""

    run: int
    end: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare a block on disk with its checksum; answer with Verified."""

    block: int


@dataclass(frozen=True, slots=True)
class Land:
    """Tell the reader that bytes [start, end) may be read."""

    reader: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The reader has been told of its last byte. It stays until it leaves."""

    reader: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The reader cannot be served further. It stays, with what it was told of, until it leaves."""

    reader: int
    error: ErrorOnWire


@dataclass(frozen=True, slots=True)
class Withdraw:
    """What the reader was told of and has not taken is wrong: it shall ask anew. It stays until it leaves."""

    reader: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody needs this passing block any more: free its memory."""

    block: int


Effect = Fetch | Cut | Verify | Land | Finish | Fail | Withdraw | Drop
