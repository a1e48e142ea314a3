"""Values that two or more rooms share: frozen, validated, printable.

Theory. A value that exists can be trusted: constructors check outside input and raise `Invalid` with what to do. One
struct serves memory and wire (msgspec). Unknown fields are ignored and new fields have defaults, so versions can mix. A
type with a single user lives with its user.

A *version* pins an object's bytes. It is an opaque string: the backend's ETag (S3, Azure, HTTP), `generation` (GCS) or,
for files, a token of inode, mtime and size. Reads with equal versions return bytes of the same object. Versions can
only be compared for equality.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.errors import Invalid

_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")

Headers = tuple[tuple[str, str], ...]  # lower-case names, in the order to send them


def check_bucket_name(name: str) -> str:
    """`name` if S3 would accept it as a bucket name, else `Invalid` saying which rule it breaks."""
    if not _BUCKET_NAME.fullmatch(name) or ".." in name or _IPV4.fullmatch(name):
        raise Invalid(
            f"bucket name {name!r} is not valid: use 3 to 63 characters of a-z, 0-9, '-' and '.', starting and ending "
            "with a letter or digit, not shaped like an IP address",
            code="InvalidBucketName",
        )
    return name


def check_key(key: str) -> str:
    """`key` if it is 1 to 1,024 bytes of UTF-8, else `Invalid`. Any character may be in it: no path."""
    try:
        size = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        raise Invalid("the key is not valid UTF-8: percent-encode it from UTF-8 bytes", code="InvalidURI") from None
    if size == 0:
        raise Invalid("the key is empty: name an object after the bucket", code="InvalidArgument")
    if size > limits.KEY_BYTES_MAX:
        raise Invalid(f"the key has {size} bytes; at most {limits.KEY_BYTES_MAX} are allowed", code="KeyTooLongError")
    return key


class RangeSpec(msgspec.Struct, array_like=True, frozen=True):
    """A range as asked for, before the object's size is known. Exactly one of three forms:

    `RangeSpec(first, last)` bytes first..last inclusive; `RangeSpec(first, None)` from first to the end;
    `RangeSpec(None, n)` the last n bytes.
    """

    first: int | None
    last: int | None

    def resolve(self, size_bytes: int) -> tuple[int, int]:
        """Half-open `(start, end)` in an object of `size_bytes`, clamped; `Invalid` (`InvalidRange`) if outside.

        RFC 9110 section 14.1.2: first past the end, or a suffix of zero bytes, is unsatisfiable.
        """
        if self.first is None:
            suffix = self.last or 0
            start, end = max(0, size_bytes - suffix), size_bytes
            satisfiable = suffix > 0 and size_bytes > 0
        else:
            start = self.first
            end = size_bytes if self.last is None else min(self.last + 1, size_bytes)
            satisfiable = start < size_bytes and end > start
        if not satisfiable:
            raise Invalid(
                f"the range is outside the object of {size_bytes} bytes: ask within 0..{max(0, size_bytes - 1)}",
                code="InvalidRange",
                size_bytes=size_bytes,
            )
        return start, end


class ObjectInfo(msgspec.Struct, array_like=True, frozen=True):
    """What a backend says of one version of an object.

    `version` pins the bytes; `etag` is what clients see (opaque, without quotes); `modified_s` is Unix time; `headers`
    are the stored content headers and user metadata to send back (`content-type`, `cache-control`, `x-amz-meta-…`).
    """

    key: str
    size_bytes: int
    version: str
    etag: str
    modified_s: float
    headers: Headers = ()


class ListEntry(NamedTuple):
    """One object in a listing. `etag` is opaque, without quotes, and may be empty where the backend has none."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class ListPage(msgspec.Struct, array_like=True, frozen=True):
    """One page of a listing, in byte order of UTF-8 keys; entries and prefixes together are at most the limit asked.

    `next_after`: pass it as `start_after` to get the next page; empty on the last page. It may be a key or a common
    prefix followed by the highest code point, so it is opaque to callers.
    """

    entries: list[ListEntry]
    prefixes: list[str]
    next_after: str = ""


FRESH_IMMUTABLE = 1e18  # a bucket's freshness in seconds: never ask again
FRESH_DEFAULT_S = 60.0


def parse_freshness(text: str) -> float:
    """`immutable`, `always`, or a time such as `60s`, `5m`, `2h`, `1d` as seconds; else `Invalid`."""
    if text == "immutable":
        return FRESH_IMMUTABLE
    if text == "always":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|d)", text)
    if not match:
        raise Invalid(f"freshness {text!r} is not known: use immutable, always, or a time like 60s, 5m, 2h, 1d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def format_freshness(seconds: float) -> str:
    """The shortest text that `parse_freshness` reads back as `seconds`."""
    if seconds >= FRESH_IMMUTABLE:
        return "immutable"
    return "always" if seconds == 0 else f"{seconds:g}s"


WriteMode = Literal["through", "back", "local"]
Durability = Literal["disk", "memory"]
Conflict = Literal["keep-both", "ours", "theirs"]
COPIES_MAX = 5  # each is one more sync before the answer, and one more transfer over the home's link
LOCAL_URL = "local://"  # the URL of a bucket without a backend
CODED = "coded://"  # begins the URL of one that is erasure-coded over the nodes (`core/cluster/coding.py`)
LOOP_HEADER = "cdn-loop"  # RFC 8586: a node puts its id into what it asks backends, and knows it when it comes back
PEER_HEADER = "x-forebay-peer"  # of a request between nodes: whom it takes for the home, and by which map
RELAY_HEADER = "x-forebay-relay"  # of such a request for bytes that go to a client, and stay nowhere on the way
CLAIM_QUERY = "forebay-claim"  # of a GET between nodes: the key's home asks who may have had it before
UPLOADS_QUERY = "forebay-uploads"  # of a GET of a bucket between nodes: the uploads that the node has
OWED_QUERY = "forebay-owed"  # of a GET of a bucket between nodes: what the node has that no backend has
COPY_QUERY = "forebay-copy"  # of a PUT, DELETE or POST between nodes: a copy that is kept for another, and its end
COPY_HEADER = "x-forebay-copy"  # of such a PUT: what goes with the copy (`core/messages/copied.py`)
AGAIN_HEADER = "x-forebay-again"  # of a request between nodes: who asks knows the status that follows
AGAIN_STATUS = 421  # RFC 9110, misdirected: nothing was done, for who acts on the key changes (`errors.map_changes`)
LOOP_STATUS = 508
DIRTY_AGE_MAX_S = 3600.0


class CorsRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rule of a bucket's CORS configuration, as S3 means it. An origin or header may hold one `*`."""

    origins: tuple[str, ...]
    methods: tuple[str, ...]
    headers: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    max_age_s: int | None = None
    id: str = ""


class Bucket(msgspec.Struct, frozen=True, omit_defaults=True):
    """A bucket and its settings, as kept in the metadata store and pushed to the fronts.

    `url`: where the backend is (`s3://name/prefix`, `gs://`, `az://`, `https://`, `file:///dir`, `memory://`).
    `options`: backend options (endpoint, region, profile, …); secrets are taken from the environment or a profile, and
    one given here is kept in the metadata store, readable by the node's user only.
    `write`: an acknowledged write is in the backend and here (`through`), here and flushed later (`back`), or here
    alone (`local`, with the URL `local://`). `durability` of bytes that only the node has: synced to the disk, or in
    the page cache. `dirty_bytes_max` (None: a quarter of the node's capacity) and `dirty_age_max_s` bound what is not
    flushed; beyond, writes wait and are then refused. `conflict`: what a flush does when the backend has changed.
    `held`: whoever set where it is may not do everything here, so it is held to what the node's settings allow
    (`core/reach.py`); the node alone decides it. `owner`: the identity that made it by a `create` grant (see
    `core/access.py`), or ""; the node alone sets it. `acl` is `private` or `public-read` (reading needs no identity
    then). `quota_bytes` bounds the bucket's share of the node's disks (None: no bound); `pinned` prefixes are never
    evicted. `copies`: on how many nodes of a cluster what no backend has is synced before a write is acknowledged, or
    on all, if there are fewer. 0 is not said: a request leaves it as it is, or to the node
    (`node/engine/bucket_verbs.py`); as kept, it means one.
    """

    name: str
    url: str
    freshness_s: float = FRESH_DEFAULT_S
    write: WriteMode = "through"
    quota_bytes: int | None = None
    pinned: tuple[str, ...] = ()
    options: dict[str, str] = {}
    created_s: float = 0.0
    durability: Durability = "disk"
    dirty_bytes_max: int | None = None
    dirty_age_max_s: Annotated[float, msgspec.Meta(gt=0)] = DIRTY_AGE_MAX_S
    conflict: Conflict = "keep-both"
    acl: Literal["private", "public-read"] = "private"
    cors: tuple[CorsRule, ...] = ()
    held: bool = False
    owner: str = ""
    copies: Annotated[int, msgspec.Meta(ge=0, le=COPIES_MAX)] = 0

    @property
    def is_kept_twice(self) -> bool:
        """Whether a cluster keeps on two nodes, or more, what no backend has of it. `memory` promises less than a disk,
        so of that there is one copy."""
        return self.copies > 1 and self.write != "through" and self.durability == "disk"

    @property
    def is_of_nodes(self) -> bool:
        """Whether its objects are on nodes alone: they go with the last of them."""
        return self.write == "local" or self.url.startswith(CODED)
