"""The events and effects of a delivery (`core/machines/delivery.py`).

Theory. The machine and its shell exchange only these values. They name an object by its key and an upload by its id;
bytes are ranges of the body. The shell knows the backend and where the bytes are.

Invariant. Every effect that asks is answered by exactly one event, unless the delivery is given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from forebay.core.types import ObjectInfo

BEGINNING: Final = "?"  # the id of an upload whose beginning was noted, and which may exist


class Upload(NamedTuple):
    """An upload at the backend, as it is noted. `key`: whose; `upload_id` may be BEGINNING."""

    key: str
    upload_id: str
    part_bytes: int


# --- how a request ended ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Started:
    """Begin."""


@dataclass(frozen=True, slots=True)
class Made:
    """The put, completion or delete took effect. `seen`: what the object is now; None after a delete."""

    seen: ObjectInfo | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The backend has another version than expected, or nobody knows what it refused."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The backend supports no conditions, or no tags."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The backend has no such upload."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The upload has begun, and this is its id. `wanted`: the object is still to be delivered."""

    upload_id: str
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Listed:
    """The backend has these parts: (number, token, bytes)."""

    parts: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """Every missing part was sent: (number, token)."""

    parts: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Saw:
    """What the backend has; None for nothing."""

    seen: ObjectInfo | None


@dataclass(frozen=True, slots=True)
class WasRead:
    """The digest of the object that was seen."""

    digest: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed in another way. `did_nothing`: it certainly had no effect."""

    did_nothing: bool


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Nobody wants the delivery any more. A `Begin` under way ends first: its outcome is told after this."""


Event = Started | Made | Refused | Unsupported | Forgotten | Begun | Listed | Filled | Saw | WasRead | Failed | GaveUp


# --- what a delivery wants done --------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Look:
    """Ask what the object is now."""

    key: str


@dataclass(frozen=True, slots=True)
class Read:
    """Read the object that was seen, and tell its digest."""

    seen: ObjectInfo


@dataclass(frozen=True, slots=True)
class Put:
    """Send the body whole. `tags`: with the tags."""

    key: str
    expect: str | None
    tags: bool


@dataclass(frozen=True, slots=True)
class Delete:
    key: str
    expect: str | None


@dataclass(frozen=True, slots=True)
class Keep:
    """Note durably that this upload exists or may exist; None: that there is none."""

    upload: Upload | None


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin an upload. Do not interrupt it."""

    key: str
    tags: bool


@dataclass(frozen=True, slots=True)
class List:
    """Ask which parts the backend has."""

    upload: Upload


@dataclass(frozen=True, slots=True)
class Fill:
    """Send these parts, several at once: (number, start, end)."""

    upload: Upload
    missing: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Make the object of the parts: (number, token) in order."""

    upload: Upload
    parts: tuple[tuple[int, str], ...]
    expect: str | None


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort an upload of ours."""

    key: str
    upload_id: str


@dataclass(frozen=True, slots=True)
class Leave:
    """An upload of the key may exist whose id was not heard: report those that may be it."""

    key: str


@dataclass(frozen=True, slots=True)
class Swept:
    """Note durably that the stale uploads are gone."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The backend has the object, as `seen` (None for a delete). `policy` is the one that decided a conflict, if
    any."""

    seen: ObjectInfo | None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Yielded:
    """The backend's object wins. `kept_as`: the key under which ours was kept, if it was."""

    policy: str
    kept_as: str = ""


class Why(Enum):
    """Why a delivery failed."""

    ERROR = 0  # of the last request
    CHANGING = 1  # the object changes at every look
    NAMES = 2  # all names for the copy are taken
    FORGOTTEN = 3  # the upload is gone
    UNWANTED = 4


@dataclass(frozen=True, slots=True)
class Fail:
    """The delivery failed. The effects after this one clean up."""

    why: Why = Why.ERROR


Effect = (
    Look
    | Read
    | Put
    | Delete
    | Keep
    | Begin
    | List
    | Fill
    | Complete
    | Abort
    | Leave
    | Swept
    | Delivered
    | Yielded
    | Fail
)
