"""Copies that one node keeps for another: what goes with them, and what the nodes say to each other about them.

Theory. What no backend has yet lies on a second node too (`core/cluster/replication.py` decides, `node/engine/kept.py`
keeps). There it is stored as a local object is, in a bucket that exists on that node alone and that no client can name:
bucket names do not begin with `-`. So it is synced, counted, scrubbed and found after a stop as any object is, and no
listing and no read looks at it. With it is kept all that whoever takes it over must know.

Rejected: a place of its own on the disk (a second way to be durable).

Invariants. (1) `whose_copies` undoes `copies_of`, which makes no name that a client can use. (2) `of_line` undoes
`on_one_line`.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

import msgspec

from forebay.core.errors import Invalid
from forebay.core.types import Headers

_PREFIX: Final = "-copies-"
BACK: Final = "back"  # as the value of COPY_QUERY in a PUT: `KeepCopy.back`
Names = list[tuple[str, str]]


def copies_of(bucket: str) -> str:
    """The bucket that copies of a bucket's objects are in."""
    return _PREFIX + bucket


def whose_copies(bucket: str) -> str:
    """The bucket whose objects' copies are in this one; "" for any other bucket."""
    return bucket[len(_PREFIX) :] if bucket.startswith(_PREFIX) else ""


class Copied(msgspec.Struct, frozen=True):
    """Of a copy: `actor`, `number`, `version` as in `replication.Copy`, and the `held` by which it was sent. `headers`
    are those that reads show; `note` is the actor's, as its disk has it, without them. `is_delete`: there is no body,
    since the key was deleted."""

    actor: str
    number: int
    version: int
    held: int
    etag: str = ""
    modified_s: float = 0.0
    headers: Headers = ()
    note: bytes = b""
    is_delete: bool = False


def on_one_line(copied: Copied) -> str:
    """As a header's value."""
    return base64.b64encode(msgspec.msgpack.encode(copied)).decode()


def of_line(line: bytes) -> Copied:
    """What `on_one_line` wrote. `Invalid` for anything else."""
    try:
        return msgspec.msgpack.decode(base64.b64decode(line, validate=True), type=Copied)
    except (binascii.Error, msgspec.MsgspecError) as error:
        raise Invalid(f"what goes with a copy does not fit ({error}): the nodes must be of one release") from None


class KeepCopy(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Keep this copy, of `size_bytes` in `body` or in the file `path`, with `sums` as in `PutCall`. `back`: it was kept
    for the node that is told, which has lost it."""

    bucket: str
    key: str
    about: Copied
    size_bytes: int = 0
    path: str = ""
    body: bytes | None = None
    sums: list[int] = []
    back: bool = False


class ClearCopy(msgspec.Struct, frozen=True, tag=True):
    """The actor has let go of all of the key up to this number."""

    bucket: str
    key: str
    actor: str
    number: int


class CompareCopies(msgspec.Struct, frozen=True, tag=True):
    """A piece of the list of what the actor has the node keep in a bucket: keys after `after` up to `upto` ("": to the
    end), with their versions. `busy`: keys of writes that are under way. `strays_stay`: what the node does not list
    leaves only where the node is to keep it by the map of now. Answered with the keys that are missing."""

    bucket: str
    actor: str
    number: int
    held: int
    listed: list[tuple[str, int]]
    busy: list[str] = []
    after: str = ""
    upto: str = ""
    strays_stay: bool = False


class CompareSome(CompareCopies, frozen=True, tag=True):
    """There is more on a disk of the actor that is not there, so nothing leaves. (A message of its own: an earlier
    release would not see a field.)"""


class ListCopies(msgspec.Struct, frozen=True, tag=True):
    """The next of what the node keeps for this actor in a bucket, after a key. `is_lost`: the actor is, so whatever
    there is counts, though it may be old, or not be all."""

    bucket: str
    actor: str
    held: int
    after: str = ""
    is_lost: bool = False


class SendBack(msgspec.Struct, frozen=True, tag=True):
    """Send the actor the copy of a key that is kept for it: answered when the actor has it. If there is none of this
    version, the key is `missing`. `keeper`: send whatever copy of it there is to that node instead, which is to take
    the key over, and whose own copy is gone or may be old."""

    bucket: str
    key: str
    actor: str
    held: int
    version: int
    keeper: str = ""


class SendAgain(msgspec.Struct, frozen=True, tag=True):
    """Asked of the actor, when it was deposed and another is to take this key over: send the keeper what it has of it,
    which may be an earlier version than the keeper was sent. Answered when that is kept. If the actor has nothing of
    the key that a backend lacks, it is `missing`."""

    bucket: str
    key: str
    keeper: str
    held: int


class CheckSlices(msgspec.Struct, frozen=True, tag=True):
    """Which slices the node has to have (`core/cluster/coding.py`): generation, number, and how many groups. Answered
    with the names of those that are missing. `bucket` is the one that slices are in; `asker` asks in its round of this
    number, and with `ends` has asked about all slices that the node has to have of entries at home there."""

    bucket: str
    asked: list[tuple[str, int, int]]
    asker: str
    round: int
    ends: bool = False


class CopiesSaid(msgspec.Struct, frozen=True):
    """`missing`: keys of which there is no copy, or of another version. `kept`: keys and versions of those there are;
    none after the last."""

    missing: list[str] = []
    kept: list[tuple[str, int]] = []


CopiesAsked = CompareCopies | CompareSome | ListCopies | SendBack | SendAgain
CopiesCall = KeepCopy | ClearCopy | CopiesAsked
Posted = CopiesAsked | CheckSlices  # in a POST's body
