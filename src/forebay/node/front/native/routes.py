"""The native API as a table: operations, parameters, answers, and the rights they need.

Theory. Each operation is one row. The handler (`api.py`) finds its method by the row's name, `openapi.py` publishes the
rows, and a test walks them, so the three cannot disagree. A path is a list of words. A word in braces takes one path
segment. `{key}` takes all the rest, slashes included, since keys are no paths.

Invariant. No two rows match the same request.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from forebay.core.access import Verb
from forebay.core.errors import Invalid, NotFound
from forebay.core.formats.listing import MEDIA_TYPE as LISTING
from forebay.core.formats.manifest import Manifest, WarmObjects
from forebay.core.machines.hints import HintsCall, HintsState
from forebay.core.messages import batch, calls
from forebay.core.messages.doorwire import DoorAt
from forebay.core.messages.native import Completion
from forebay.core.messages.node_state import ClusterNode, NodeMap, NodeState
from forebay.core.types import Bucket, ListPage
from forebay.core.volumes import LostObject, VolumeState
from forebay.node.front.http.requests import decode_component

PREFIX = "/-/"


class Parameter(NamedTuple):
    """One name in the query. `values` are examples or the only ones, for people."""

    name: str
    help: str
    type: Literal["string", "integer", "boolean"] = "string"


class Route(NamedTuple):
    """`may`: the verb that an identity needs, on the bucket in the path if there is one; None: open to all.
    `body` and `answer` are types (answer None: bytes or text, `media` says which; a tuple: one of them); a body of type
    `bytes` is taken as it is, however long."""

    name: str
    method: str
    path: str
    help: str
    may: Verb | None = "read"
    query: tuple[Parameter, ...] = ()
    body: Any = None
    answer: Any = None
    media: str = "application/json"


_PAGE = (
    Parameter("prefix", "Only keys that start with it."),
    Parameter("delimiter", "Roll keys up at its first occurrence behind the prefix."),
    Parameter("start_after", "Only keys after it, in byte order of UTF-8; `next_after` of the page before."),
    Parameter("limit", "At most so many entries and prefixes, up to 1,000.", "integer"),
    Parameter("cached", "1: from the node's index alone; the backend is not asked.", "boolean"),
    Parameter("format", "`ndjson`: all cached objects under the prefix, one JSON object a line."),
)
_LISTING = (
    Parameter("prefix", "Only keys that start with it."),
    Parameter("id", "Exactly this listing, else 412 says what changed."),
    Parameter("refresh", "1: list now, whatever the freshness.", "boolean"),
    Parameter("since", "A listing that began at this Unix time or later will do; `since_s` of the 202 before."),
    Parameter("versions", "1: the newest version of each object; a key is then KEY, NUL, and its id.", "boolean"),
)
_POSITION = (Parameter("position", "How many accesses the job has consumed.", "integer"),)
_REVALIDATE = (Parameter("revalidate", "1: ask the backend now, whatever the freshness.", "boolean"),)
_MEMBER = (Parameter("member", "One member of the shard (tar, zip) by its name, instead of all of it."),)
_MEMBERS = (
    Parameter("format", "`msgpack`: the index as the client reads it, whole; `json`: a page."),
    Parameter("first", "Of a page of JSON: the number of the first member; `next` of the page before.", "integer"),
    Parameter("limit", "At most so many members in a page, up to 10,000.", "integer"),
    Parameter("version", "The id of a version that the backend keeps, instead of the object as it is now."),
)
_LOST = (
    Parameter("prefix", "Only keys that start with it."),
    Parameter("start_after", "Only keys after it; the last key of the page before."),
)
_UPLOAD = Parameter("upload_id", "The upload.")
_PART = (_UPLOAD, Parameter("number", "The part's number, from 1 to 10,000.", "integer"))
_PARTS = (
    _UPLOAD,
    Parameter("after", "Only parts with a higher number.", "integer"),
    Parameter("limit", "At most so many parts, up to 1,000.", "integer"),
)
_UPLOADS = (
    Parameter("prefix", "Only keys that start with it."),
    Parameter("after_key", "Only uploads after it: the last key of the page before, with `after_id`."),
    Parameter("after_id", "The last upload of the page before."),
    Parameter("limit", "At most so many uploads, up to 1,000.", "integer"),
)
_CHECK = Parameter(
    "check", "1: keep it only if its backend answers; if it is written back, also takes a write.", "boolean"
)
_FORCE = Parameter("force", "1: give up what the node alone has, if that is in the way.", "boolean")
_HERE = Parameter("here", "1: only at this node of a cluster, not at the others.", "boolean")
_BYTES = "application/octet-stream"


def _job(verb: str, help: str, may: Verb = "read") -> Route:
    return Route(verb, "POST", f"/-/v1/{verb}", help, may, body=calls.JobCall, answer=calls.JobState)


ROUTES: tuple[Route, ...] = (
    Route("health", "GET", "/-/healthz", "This front is alive.", None, media="text/plain"),
    Route("ready", "GET", "/-/readyz", "This front has its engine and a volume: send requests.", None),
    Route(
        "metrics", "GET", "/-/metrics", "Counters, as Prometheus reads them; without observe:* of one's buckets.",
        media="text/plain",
    ),
    Route("describe", "GET", "/-/openapi.json", "This description.", None),
    Route(
        "object", "GET", "/-/v1/objects/{bucket}/{key}", "An object's bytes; Range and If-* hold.", "read", _MEMBER,
        media=_BYTES,
    ),
    Route(
        "object", "HEAD", "/-/v1/objects/{bucket}/{key}", "What a GET would say, without the body.", "read", _MEMBER,
        media=_BYTES,
    ),
    Route(
        "object_put", "PUT", "/-/v1/objects/{bucket}/{key}",
        "Make the body the object; If-Match, If-None-Match: * and checksums hold.", "write",
        body=bytes, answer=calls.Written,
    ),
    Route(
        "object_delete", "DELETE", "/-/v1/objects/{bucket}/{key}", "Delete the object; If-Match holds.", "write",
        answer=calls.Nothing,
    ),
    Route(
        "object_copy", "POST", "/-/v1/copy/{bucket}/{key}",
        "Make the object a copy of the one that the body names; conditions hold.", "write",
        body=calls.CopyCall, answer=calls.Written,
    ),
    Route(
        "members", "GET", "/-/v1/members/{bucket}/{key}", "The members of a shard; If-* hold.", "read", _MEMBERS,
        media="application/msgpack",
    ),
    Route(
        "member_append", "POST", "/-/v1/members/{bucket}/{key}",
        "Make the body one more member of a tar in a bucket written back or local; If-* hold.", "write",
        (Parameter("name", "The member's name."),), body=bytes, answer=calls.Written,
    ),
    Route(
        "batch", "POST", "/-/v1/batch", "Many objects, ranges and members in one answer, in their order.", "read",
        body=batch.BatchCall, media=batch.MEDIA,
    ),
    Route(
        "stat", "GET", "/-/v1/stat/{bucket}/{key}", "What the node knows of it.", "read", _REVALIDATE,
        answer=calls.ObjectState,
    ),
    Route(
        "list", "GET", "/-/v1/list/{bucket}", "One page of a listing: ListPage, or CachedPage with `cached`.",
        "read", _PAGE, answer=(ListPage, calls.CachedPage),
    ),
    Route(
        "listing", "GET", "/-/v1/listing/{bucket}",
        "All objects under a prefix as one listing; 202 and a ListingState while it is being listed.",
        "read", _LISTING, media=LISTING,
    ),
    Route(
        "upload_begin", "POST", "/-/v1/uploads/{bucket}/{key}", "Begin an upload in parts.", "write",
        answer=calls.UploadState,
    ),
    Route(
        "uploads", "GET", "/-/v1/uploads/{bucket}", "A page of the uploads that are open, by key, then time.", "write",
        _UPLOADS, answer=calls.Uploads,
    ),
    Route(
        "upload_parts", "GET", "/-/v1/uploads/{bucket}/{key}", "A page of the parts that the node has of an upload.",
        "write", _PARTS, answer=calls.UploadParts,
    ),
    Route(
        "upload_abort", "DELETE", "/-/v1/uploads/{bucket}/{key}", "Forget an upload and its parts.", "write",
        (_UPLOAD,), answer=calls.Nothing,
    ),
    Route(
        "upload_part", "PUT", "/-/v1/parts/{bucket}/{key}",
        "Make the body a part of an upload, in place of the one with its number; checksums hold.", "write",
        _PART, body=bytes, answer=calls.PartState,
    ),
    Route(
        "upload_complete", "POST", "/-/v1/complete/{bucket}/{key}",
        "Make the object of an upload's parts; If-Match and If-None-Match: * hold. 202 and nothing while it is made: "
        "ask again.", "write", (_UPLOAD,), body=Completion, answer=calls.UploadCompleted,
    ),
    Route("buckets", "GET", "/-/v1/buckets", "All buckets that a grant of the caller is about.", answer=list[Bucket]),
    Route("bucket", "GET", "/-/v1/buckets/{bucket}", "One bucket's settings; secrets are masked.", answer=Bucket),
    Route(
        "bucket_put", "PUT", "/-/v1/buckets/{bucket}", "Create or change a bucket.", "admin", (_CHECK, _FORCE, _HERE),
        body=Bucket, answer=Bucket,
    ),
    Route(
        "bucket_delete", "DELETE", "/-/v1/buckets/{bucket}",
        "Forget a bucket and what is cached of it; the backend is not touched.", "admin", (_FORCE, _HERE),
        answer=calls.Nothing,
    ),
    Route(
        "bucket_check", "GET", "/-/v1/buckets/{bucket}/check", "Ask the backend whether it answers.",
        answer=calls.Nothing,
    ),
    _job("prefetch", "Fetch objects ahead of use."),
    _job("refresh", "Ask the backend whether cached objects are current."),
    _job("flush", "Bring what only the node has to the backend.", "write"),
    _job("pin", "Fetch objects and never evict them.", "admin"),
    _job("unpin", "Let objects be evicted again.", "admin"),
    _job("evict", "Drop cached objects.", "admin"),
    _job("rewarm", "Fetch what the manifest of a former cluster names, which is the one key.", "admin"),
    Route(
        "jobs", "GET", "/-/v1/jobs", "The caller's jobs, and those of buckets they administer; newest first.",
        answer=list[calls.JobState],
    ),
    Route("job", "GET", "/-/v1/jobs/{job}", "One job's progress.", answer=calls.JobState),
    Route("job_cancel", "DELETE", "/-/v1/jobs/{job}", "Stop a job that one may see.", answer=calls.JobState),
    Route(
        "hints", "POST", "/-/v1/hints/{job}", "What a job will read, from one of its accesses on.",
        body=HintsCall, answer=HintsState,
    ),
    Route("hints_at", "PUT", "/-/v1/hints/{job}", "How far a job is.", query=_POSITION, answer=HintsState),
    Route("hints_state", "GET", "/-/v1/hints/{job}", "What is known of a job's reads.", answer=HintsState),
    Route("hints_close", "DELETE", "/-/v1/hints/{job}", "The job is over.", answer=calls.Nothing),
    Route(
        "lost", "GET", "/-/v1/lost/{bucket}", "Acknowledged objects whose bytes are gone; a page.", "read",
        _LOST, answer=list[LostObject],
    ),
    Route(
        "lost_give_up", "POST", "/-/v1/lost/give-up", "Give lost objects up; those that were, at most a page.", "admin",
        body=calls.LostCall, answer=list[LostObject],
    ),
    Route(
        "volume_add", "POST", "/-/v1/volumes/add", "Have a volume made, or taken in, at the next start.", "admin",
        body=calls.VolumeNamed, answer=VolumeState,
    ),
    Route(
        "volume_give_up", "POST", "/-/v1/volumes/give-up", "Give up a volume that is not in use, and what it owes.",
        "admin", body=calls.VolumeNamed, answer=VolumeState,
    ),
    Route(
        "status", "GET", "/-/v1/status", "Engine, fronts, volumes, buckets; without observe:* the caller's buckets.",
        answer=NodeState,
    ),
    Route(
        "door", "GET", "/-/v1/door", "Where clients on the node's host get descriptors instead of bytes.",
        answer=DoorAt,
    ),
    Route(
        "wish", "POST", "/-/v1/cluster/wish", "Have a node drained, maintained, taken back, given up or forgotten.",
        "admin", body=calls.WishCall, answer=ClusterNode,
    ),
    Route(
        "warm", "GET", "/-/v1/cluster/warm", "What this node has cached, what was used last first.", "admin",
        answer=WarmObjects,
    ),
    Route(
        "manifest", "GET", "/-/v1/manifests/{bucket}/{key}", "What a cluster left in a bucket.", "admin",
        answer=Manifest,
    ),
    Route(
        "manifest_put", "POST", "/-/v1/cluster/manifest", "Write what a cluster leaves, once all its nodes are gone.",
        "admin", body=calls.ManifestCall, answer=Manifest,
    ),
    Route("stop", "POST", "/-/v1/cluster/stop", "End this node, if it is gone.", "admin", answer=calls.Nothing),
    Route("map", "GET", "/-/v1/map", "The nodes of the cluster and their weights.", answer=NodeMap),
)  # fmt: skip

_ROWS = [(tuple(route.path.split("/")[2:]), route) for route in ROUTES]


def find(method: str, path: bytes) -> tuple[Route, dict[str, str]]:
    """The row for a request and what its braces took. `NotFound` (`NoSuchPath`); `Invalid` (`MethodNotAllowed`).

    A HEAD is answered as a GET without its body where no row says otherwise.
    """
    words = path.split(b"/")[2:]
    allowed = []
    for pattern, route in _ROWS:
        taken = _match(pattern, words)
        if taken is None:
            continue
        if route.method == method or (method == "HEAD" and route.method == "GET" and route.name != "object"):
            return route, {name: decode_component(raw) for name, raw in taken.items()}
        allowed.append(route.method)
    if allowed:
        raise Invalid(f"{method} is not served here: use {' or '.join(sorted(set(allowed)))}", code="MethodNotAllowed")
    raise NotFound("there is nothing at this path: see /-/openapi.json", code="NoSuchPath")


def _match(pattern: tuple[str, ...], words: list[bytes]) -> dict[str, bytes] | None:
    taken: dict[str, bytes] = {}
    for index, word in enumerate(pattern):
        if index >= len(words):
            return None
        if word == "{key}":
            taken["key"] = b"/".join(words[index:])
            return taken if taken["key"] else None
        if word.startswith("{"):
            if not words[index]:
                return None
            taken[word[1:-1]] = words[index]
        elif word.encode() != words[index]:
            return None
    return taken if len(words) == len(pattern) else None
