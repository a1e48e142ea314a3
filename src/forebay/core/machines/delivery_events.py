"""The events and effects of a delivery (`core/machines/delivery.py`).

Theory. The machine and its shell exchange only these values. They name an object by its key and an upload by its id;
bytes are ranges of the body. The shell knows the backend and where the bytes are.

Invariant. Every effect that asks is answered by exactly one event, unless the delivery is given up.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

import msgspec

from forebay.core.types import ObjectInfo

BEGINNING: Final = "?"  # the id of an upload whose beginning was noted, and which may exist


class Upload(NamedTuple):
    """An upload at the backend, as it is noted. `key`: whose; `upload_id` may be BEGINNING."""

    key: str
    upload_id: str
    part_bytes: int


# --- how a request ended ---------------------------------------------------------------------------------------------
class Started(msgspec.Struct, frozen=True):
    """Begin."""


class Made(msgspec.Struct, frozen=True):
    """The put, completion or delete took effect. `seen`: what the object is now; None after a delete."""

    seen: ObjectInfo | None


class Refused(msgspec.Struct, frozen=True):
    """The backend has another version than expected, or nobody knows what it refused."""


class Unsupported(msgspec.Struct, frozen=True):
    """The backend supports no conditions, or no tags."""


class Forgotten(msgspec.Struct, frozen=True):
    """The backend has no such upload."""


class Begun(msgspec.Struct, frozen=True):
    """The upload has begun, and this is its id. `wanted`: the object is still to be delivered."""

    upload_id: str
    wanted: bool = True


class Listed(msgspec.Struct, frozen=True):
    """The backend has these parts: (number, token, bytes)."""

    parts: tuple[tuple[int, str, int], ...]


class Filled(msgspec.Struct, frozen=True):
    """Every missing part was sent: (number, token)."""

    parts: tuple[tuple[int, str], ...]


class Saw(msgspec.Struct, frozen=True):
    """What the backend has; None for nothing."""

    seen: ObjectInfo | None


class WasRead(msgspec.Struct, frozen=True):
    """The digest of the object that was seen."""

    digest: str


class Failed(msgspec.Struct, frozen=True):
    """The request failed in another way. `did_nothing`: it certainly had no effect."""

    did_nothing: bool


class GaveUp(msgspec.Struct, frozen=True):
    """Nobody wants the delivery any more. A `Begin` under way ends first: its outcome is told after this."""


Event = Started | Made | Refused | Unsupported | Forgotten | Begun | Listed | Filled | Saw | WasRead | Failed | GaveUp


# --- what a delivery wants done --------------------------------------------------------------------------------------
class Look(msgspec.Struct, frozen=True):
    """Ask what the object is now."""

    key: str


class Read(msgspec.Struct, frozen=True):
    """Read the object that was seen, and tell its digest."""

    seen: ObjectInfo


class Put(msgspec.Struct, frozen=True):
    """Send the body whole. `tags`: with the tags."""

    key: str
    expect: str | None
    tags: bool


class Delete(msgspec.Struct, frozen=True):
    key: str
    expect: str | None


class Keep(msgspec.Struct, frozen=True):
    """Note durably that this upload exists or may exist; None: that there is none."""

    upload: Upload | None


class Begin(msgspec.Struct, frozen=True):
    """Begin an upload. Do not interrupt it."""

    key: str
    tags: bool


class List(msgspec.Struct, frozen=True):
    """Ask which parts the backend has."""

    upload: Upload


class Fill(msgspec.Struct, frozen=True):
    """Send these parts, several at once: (number, start, end)."""

    upload: Upload
    missing: tuple[tuple[int, int, int], ...]


class Complete(msgspec.Struct, frozen=True):
    """Make the object of the parts: (number, token) in order."""

    upload: Upload
    parts: tuple[tuple[int, str], ...]
    expect: str | None


class Abort(msgspec.Struct, frozen=True):
    """Abort an upload of ours."""

    key: str
    upload_id: str


class Leave(msgspec.Struct, frozen=True):
    """An upload of the key may exist whose id was not heard: report those that may be it."""

    key: str


class Swept(msgspec.Struct, frozen=True):
    """Note durably that the stale uploads are gone."""


class Delivered(msgspec.Struct, frozen=True):
    """The backend has the object, as `seen` (None for a delete). `policy` is the one that decided a conflict, if
    any."""

    seen: ObjectInfo | None
    policy: str = ""


class Yielded(msgspec.Struct, frozen=True):
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


class Fail(msgspec.Struct, frozen=True):
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
