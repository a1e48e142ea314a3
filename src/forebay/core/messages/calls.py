"""Calls from a front to the engine: one question, one answer, each a plain msgpack map.

Theory. `wire.Call` carries a verb and bytes, and this table gives their types. One side uses `encode_call` and
`decode_answer`, the other `decode_call` and `encode_answer`, so the two cannot disagree without a type error here. Maps
are used rather than arrays: calls are rare, people read them (the native API shows most of them as JSON), and fields
can be added with defaults. A failed call is answered with `wire.Failed`, never with an answer that means failure.

Invariants. (1) Every verb has one argument type and one answer type. (2) An answer fits a frame: listings come in
pages, jobs report counts and a few samples of errors.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from forebay.core import limits
from forebay.core.derived import KeepAnswer, KeepCall
from forebay.core.errors import Invalid
from forebay.core.formats.listing import ListingCall, ListingPartCall, ListingState
from forebay.core.formats.manifest import Manifest, WarmObjects
from forebay.core.formats.members import AppendCall
from forebay.core.machines.hints import HintsAtCall, HintsCall, HintsNamed, HintsState
from forebay.core.messages.copied import CheckSlices, CopiesCall, CopiesSaid
from forebay.core.messages.jobs import JobCall as JobCall
from forebay.core.messages.jobs import JobNamed as JobNamed
from forebay.core.messages.jobs import JobState as JobState
from forebay.core.messages.jobs import JobVerb as JobVerb
from forebay.core.messages.jobs import no_such_job as no_such_job
from forebay.core.messages.node_state import ClusterNode, NodeMap, NodeState, Wish
from forebay.core.metrics import Snapshot
from forebay.core.types import Bucket, CorsRule, Headers, ListEntry, ListPage
from forebay.core.volumes import LostObject, VolumeState


class Nothing(msgspec.Struct, frozen=True):
    """No arguments, or nothing to say beyond that it is done."""


class BucketNamed(msgspec.Struct, frozen=True, omit_defaults=True):
    """`force`: delete it although the node has something of it that is nowhere else, which is given up. `maker` and
    `here` as in `BucketPutCall`."""

    name: str
    force: bool = False
    maker: str = ""
    here: bool = False


class IssuerNamed(msgspec.Struct, frozen=True):
    """An OIDC issuer, by its name in the identities file."""

    name: str


class BucketPutCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Create or change a bucket. `check`: only if its backend answers and, where it is written back, takes a write.
    `force`: also if that gives up what the node has not brought to the old place. `free`: the caller may send the node
    anywhere; else the place is one that the node's settings allow, or as it was. `maker`: whoever may do it only to a
    bucket that they made, or make now; "" for others. The engine asks again, since a bucket of that name may have
    become another's meanwhile. `here`: only at this node of a cluster, not at the others."""

    bucket: Bucket
    check: bool = False
    force: bool = False
    free: bool = False
    maker: str = ""
    here: bool = False


class BucketRulesCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Change what S3 lets a bucket's admin change of one that is there; None leaves it as it is. `maker` as in
    `BucketPutCall`."""

    name: str
    acl: Literal["private", "public-read"] | None = None
    cors: tuple[CorsRule, ...] | None = None
    maker: str = ""


class ListCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next page of a bucket as the backend has it now. `limit` counts entries and prefixes together."""

    bucket: str
    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    limit: int = limits.LIST_KEYS_MAX


class StatCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """`revalidate`: ask the backend now, whatever the freshness."""

    bucket: str
    key: str
    revalidate: bool = False


class ObjectState(msgspec.Struct, frozen=True):
    """What the node knows of one object. `fresh_until_s` is Unix time; at or before now means the next open asks."""

    bucket: str
    key: str
    size_bytes: int
    version: str
    etag: str
    modified_s: float
    cached_bytes: int
    pinned: bool
    dirty: bool
    fresh_until_s: float
    headers: dict[str, str] = {}
    volume: str = ""  # the volume's id; "" where nothing of it is on a disk
    blocks: int = 0
    cached_blocks: int = 0
    local: bool = False  # in a bucket without a backend: only this node has it


class CachedEntry(msgspec.Struct, frozen=True, array_like=True):
    """One object that the index knows, whatever of it is present."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float
    cached_bytes: int
    pinned: bool = False
    dirty: bool = False


class CachedPage(msgspec.Struct, frozen=True, array_like=True):
    """As `ListPage`, from the index alone: the backend is not asked."""

    entries: list[CachedEntry]
    prefixes: list[str]
    next_after: str = ""


class PutCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Make these bytes the object. They are `body` (at most INLINE_BYTES_MAX) or the temp file `path`, which is the
    engine's from here on, with `sums`: the xxh3-64 of each block. `headers` as in `ObjectInfo`, `x-amz-checksum-*`
    among them. `md5` is hex, "" when it was not computed; `hash128` the xxh3-128, hex. Conditions as the headers say.
    `put`: the number from `put_open`, 0 without it."""

    bucket: str
    key: str
    size_bytes: int
    headers: Headers = ()
    path: str = ""
    body: bytes | None = None
    sums: list[int] = []
    md5: str = ""
    hash128: str = ""
    if_match: str | None = None
    if_none_match: str | None = None
    tags: str = ""  # as x-amz-tagging: a query string
    put: int = 0


class PutOpenCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A body of `size_bytes` begins to arrive in the file `path` for a bucket written through: send it on as it comes.
    `Grown` tells how far it is; `put` with the number completes it, `GaveUp` or the end of the connection cancels it.
    `checksum` is what the client promised for the whole body in its headers (name, value), to be sent along."""

    bucket: str
    key: str
    size_bytes: int
    path: str
    headers: Headers = ()
    if_match: str | None = None
    if_none_match: str | None = None
    tags: str = ""


class PutOpened(msgspec.Struct, frozen=True):
    """`put` is 0 when this backend or bucket takes the body only when it is whole."""

    put: int


class Written(msgspec.Struct, frozen=True):
    """What the object is now. `version` is what a read will pin. `checksums` are those of the whole that a copy has,
    as base64 by S3's name of the algorithm."""

    etag: str
    version: str
    size_bytes: int
    modified_s: float
    checksums: dict[str, str] = {}


class DeleteCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Deleting what is not there is fine, unless a condition is given: an entity tag, a size, or the time of its last
    change in whole seconds of Unix time."""

    bucket: str
    key: str
    if_match: str | None = None
    if_size_bytes: int | None = None
    if_modified_s: int | None = None


class CopyCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Copy an object; `headers` None: the source's. The `source_*` conditions are judged against the source. `keeping`:
    how the copy is kept (`core/s3rules/keeping.py`)."""

    source_bucket: str
    source_key: str
    bucket: str
    key: str
    headers: Headers | None = None
    source_if_match: str | None = None
    source_if_none_match: str | None = None
    source_if_modified_since: str | None = None
    source_if_unmodified_since: str | None = None
    if_match: str | None = None
    if_none_match: str | None = None
    tags: str | None = None  # None: the source's
    checksum_algorithm: str = ""  # to compute of the copy, by S3's name; "": the source's, if it has one
    keeping: Headers = ()


class ObjectNamed(msgspec.Struct, frozen=True):
    bucket: str
    key: str


class TagsSaid(msgspec.Struct, frozen=True):
    """An object's tags as `core/s3rules/tags.py` spells them; "" for none."""

    tags: str


class TagCall(msgspec.Struct, frozen=True):
    """Make `tags` (as `s3rules/tags.py` spells them; "" for none) the object's, which stays as it is else: its bytes,
    version and ETag."""

    bucket: str
    key: str
    tags: str


class UploadCreateCall(msgspec.Struct, frozen=True, omit_defaults=True):
    bucket: str
    key: str
    headers: Headers = ()
    checksum_algorithm: str = ""  # CRC32, CRC32C, CRC64NVME, SHA1, SHA256; "" for none
    checksum_type: Literal["", "COMPOSITE", "FULL_OBJECT"] = ""
    tags: str = ""


class UploadNamed(msgspec.Struct, frozen=True):
    bucket: str
    key: str
    upload_id: str


class UploadPartCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """As `PutCall`, for one part. `md5` is always set: it is the part's ETag. `checksums`: algorithm to base64."""

    bucket: str
    key: str
    upload_id: str
    number: int
    size_bytes: int
    md5: str
    path: str = ""
    body: bytes | None = None
    checksums: dict[str, str] = {}


class UploadPartCopyCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part made of the half-open range [start, end) of another object; both None: all of it."""

    bucket: str
    key: str
    upload_id: str
    number: int
    source_bucket: str
    source_key: str
    start: int | None = None
    end: int | None = None
    source_if_match: str | None = None
    source_if_none_match: str | None = None
    source_if_modified_since: str | None = None
    source_if_unmodified_since: str | None = None


class PartState(msgspec.Struct, frozen=True, omit_defaults=True):
    number: int
    size_bytes: int
    etag: str
    modified_s: float
    checksums: dict[str, str] = {}


class UploadCompleteCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """`parts`: number, ETag without quotes ("" for any), checksums as the client repeats them."""

    bucket: str
    key: str
    upload_id: str
    parts: list[tuple[int, str, dict[str, str]]]
    if_match: str | None = None
    if_none_match: str | None = None
    checksums: dict[str, str] = {}  # of the whole object (FULL_OBJECT), as the client promises
    size_bytes: int | None = None  # x-amz-mp-object-size


class UploadCompleted(msgspec.Struct, frozen=True):
    written: Written
    checksums: dict[str, str] = {}
    checksum_type: str = ""


class UploadState(msgspec.Struct, frozen=True, omit_defaults=True):
    bucket: str
    key: str
    upload_id: str
    created_s: float
    checksum_algorithm: str = ""
    checksum_type: str = ""
    headers: Headers = ()  # of the object to be, its tags as `x-amz-tagging`; told with the parts alone


class UploadPartsCall(msgspec.Struct, frozen=True, omit_defaults=True):
    bucket: str
    key: str
    upload_id: str
    after: int = 0  # only parts with a higher number
    limit: int = limits.LIST_KEYS_MAX


class UploadParts(msgspec.Struct, frozen=True):
    upload: UploadState
    parts: list[PartState]
    more: bool


class UploadsCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Open uploads whose key starts with `prefix`, after (`after_key`, `after_id`), by key, then time."""

    bucket: str
    prefix: str = ""
    after_key: str = ""
    after_id: str = ""
    limit: int = limits.LIST_KEYS_MAX


class Uploads(msgspec.Struct, frozen=True):
    uploads: list[UploadState]
    more: bool


class LostCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lost objects of `bucket`: all under `prefix` and after `start_after`, or exactly `keys` when given."""

    bucket: str
    prefix: str = ""
    keys: list[str] = []
    start_after: str = ""


class VolumeNamed(msgspec.Struct, frozen=True):
    """By id or path. `force`: give it up without what does not come back from other nodes."""

    name: str
    force: bool = False


class WishCall(msgspec.Struct, frozen=True):
    """What a node of the cluster shall be: named by its id, the beginning of it, or its address."""

    node: str
    wish: Wish


class ManifestCall(msgspec.Struct, frozen=True):
    """Write what a cluster leaves as an object. `joined`: with what the manifest there says of nodes that have stopped
    since."""

    bucket: str
    key: str
    manifest: Manifest
    joined: bool = False


VERBS: dict[str, tuple[Any, Any]] = {
    "buckets": (Nothing, list[Bucket]),
    "bucket_put": (BucketPutCall, Bucket),  # create or change; the bucket as kept
    "bucket_create": (Bucket, Bucket),  # as bucket_put by its `owner`, but `Exists` for one that is there
    "bucket_rules": (BucketRulesCall, Bucket),
    "bucket_delete": (BucketNamed, Nothing),  # forgets the bucket and evicts what is cached of it, never the backend
    "bucket_check": (BucketNamed, Nothing),  # Backend.probe: it answers, or the error says why not
    "list": (ListCall, ListPage),
    "list_cached": (ListCall, CachedPage),
    "hints": (HintsCall, HintsState),
    "hints_at": (HintsAtCall, HintsState),
    "hints_close": (HintsNamed, Nothing),
    "hints_state": (HintsNamed, HintsState),
    "listing": (ListingCall, ListingState),
    "listing_part": (ListingPartCall, bytes),
    "stat": (StatCall, ObjectState),
    "prefetch": (JobCall, JobState),
    "pin": (JobCall, JobState),
    "unpin": (JobCall, JobState),
    "evict": (JobCall, JobState),
    "refresh": (JobCall, JobState),
    "rewarm": (JobCall, JobState),
    "flush": (JobCall, JobState),  # done when all that was dirty when it began is in the backend
    "prestage": (ObjectNamed, Nothing),  # fetch it in the background
    "put": (PutCall, Written),
    "put_open": (PutOpenCall, PutOpened),
    "append": (AppendCall, Written),  # one more member of a tar
    "keep": (KeepCall, KeepAnswer),  # something derived from an object
    "delete": (DeleteCall, Nothing),
    "copy": (CopyCall, Written),
    "tag": (TagCall, Nothing),
    "tags": (ObjectNamed, TagsSaid),
    "upload_create": (UploadCreateCall, UploadState),
    "upload_part": (UploadPartCall, PartState),
    "upload_part_copy": (UploadPartCopyCall, PartState),
    "upload_parts": (UploadPartsCall, UploadParts),
    "upload_complete": (UploadCompleteCall, UploadCompleted),
    "upload_abort": (UploadNamed, Nothing),
    "uploads": (UploadsCall, Uploads),
    "job": (JobNamed, JobState),
    "jobs": (Nothing, list[JobState]),  # newest first
    "job_cancel": (JobNamed, JobState),
    "status": (Nothing, NodeState),
    "volume_add": (VolumeNamed, VolumeState),  # by path: made, or taken in, at the next start
    "volume_give_up": (VolumeNamed, VolumeState),  # what it owed is lost; as it was
    "lost": (LostCall, list[LostObject]),  # at most LIST_KEYS_MAX
    "lost_give_up": (LostCall, list[LostObject]),  # these are given up; at most LIST_KEYS_MAX
    "claim": (ObjectNamed, bool),  # by the key's home; whether nothing is here that nobody else has
    "owed": (ListCall, list[tuple[str, ListEntry | None]]),  # what the node has that no backend has; None: a delete
    "copies": (CopiesCall | CheckSlices, CopiesSaid),  # of another node: what this one keeps for it
    "map": (Nothing, NodeMap),
    "wish": (WishCall, ClusterNode),
    "warm": (Nothing, WarmObjects),
    "manifest": (ObjectNamed, Manifest),
    "manifest_put": (ManifestCall, Manifest),  # once no node of the cluster owes anything; as it is written
    "stop": (Nothing, Nothing),  # of a node that is gone; it ends after its answer
    "metrics": (Nothing, Snapshot),  # engine and all fronts, merged
    "issuer_keys": (IssuerNamed, Nothing),  # answered when its keys are as of seconds ago; they come with a Welcome
}

_encode = msgspec.msgpack.Encoder().encode
_arguments = {verb: msgspec.msgpack.Decoder(types[0]) for verb, types in VERBS.items()}
_answers = {verb: msgspec.msgpack.Decoder(types[1]) for verb, types in VERBS.items()}


def encode_call(verb: str, arguments: Any) -> bytes:
    """The body of a `wire.Call`. The arguments must be of the verb's type: anything else is a bug here, not there.
    `Invalid` for a number that no message can hold: a client may have said it."""
    assert isinstance(arguments, VERBS[verb][0]), f"{verb} takes {VERBS[verb][0]}, not {type(arguments)}"
    try:
        return _encode(arguments)
    except OverflowError:
        raise Invalid("a number is outside -2**63 to 2**64-1: give one that can be meant") from None


def decode_call(verb: str, body: bytes) -> Any:
    """The arguments of a `wire.Call`; `Invalid` for a verb or body that this version does not know."""
    decoder = _arguments.get(verb)
    if decoder is None:
        raise Invalid(f"the engine knows no call {verb!r}: front and engine must come from one installation")
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Invalid(f"the arguments of {verb} do not fit: {error}") from None


def encode_answer(answer: Any) -> bytes:
    """The body of a `wire.Answer`."""
    return _encode(answer)


def decode_answer(verb: str, body: bytes) -> Any:
    """The answer to `verb`, of the type that the table gives."""
    return _answers[verb].decode(body)
