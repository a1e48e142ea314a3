"""The operations on a node as generators: they yield requests and are sent responses.

Theory. A flow knows the native API (docs/protocol.md) and nothing of sockets. A driver (`sync.py`, `aio.py`) sends what
it yields and returns what arrived: `flow.send(send(request))`. So the two drivers cannot differ in meaning, and a list
of responses tests a flow.

Errors. An answer without success carries a `core.errors` error as JSON, and `raised` raises it as that kind. An answer
without one (a proxy's page) becomes the kind that its status stands for.

Invariants. (1) A flow never repeats what failed at a backend: the node alone retries that. (2) A download that resumes
asks for exactly the version of its first bytes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from forebay.core.errors import (
    KINDS,
    Bug,
    Busy,
    Corrupt,
    Denied,
    ForebayError,
    Invalid,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.formats.manifest import Manifest, WarmObjects
from forebay.core.messages.calls import (
    CachedPage,
    CopyCall,
    JobCall,
    JobState,
    JobVerb,
    LostCall,
    ManifestCall,
    Nothing,
    ObjectState,
    VolumeNamed,
    WishCall,
    Written,
)
from forebay.core.messages.doorwire import DoorAt
from forebay.core.messages.http1 import Request, Response, Sink, Source, encode_path, with_query
from forebay.core.messages.node_state import ClusterNode, NodeMap, NodeState, Wish
from forebay.core.types import Bucket, ListPage, RangeSpec
from forebay.core.volumes import LostObject, VolumeState

T = TypeVar("T")
Flow = Generator[Request, Response, T]

_BY_STATUS: dict[int, type[ForebayError]] = {
    400: Invalid,
    401: Denied,
    403: Denied,
    404: NotFound,
    405: NotSupported,
    409: Precondition,
    412: Precondition,
    413: Invalid,
    416: Invalid,
    429: Busy,
    501: NotSupported,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


class Got(NamedTuple):
    """What a GET or HEAD said of an object: `start` is the offset of the first byte of the body in the object.
    `etag` is without quotes; empty where the backend has none."""

    size_bytes: int
    start: int
    body_bytes: int
    etag: str
    headers: dict[str, str]


def raised(response: Response, what: str) -> ForebayError:
    """The error that an answer other than 2xx stands for; `what` names the thing asked for, if it says nothing."""
    retry_after_s = _number(response.headers.get("retry-after", ""))
    try:
        body = msgspec.json.decode(response.body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        kind = _BY_STATUS.get(response.status, Bug)
        why = "without saying why: see its log"
        if response.headers.get("content-type", "").startswith("text/plain"):  # a node's TLS port, or a proxy
            why = f"and said: {response.body[:200].decode(errors='replace').strip()}"
        return kind(f"{what}: the node answered status {response.status} {why}", retry_after_s=retry_after_s)
    error = body.error
    return KINDS.get(error.kind, Bug)(error.message, code=error.code, retry_after_s=error.retry_after_s)


class _ErrorSaid(msgspec.Struct):
    kind: str
    message: str
    code: str = ""
    retry_after_s: float = 0.0


class _ErrorBody(msgspec.Struct):
    error: _ErrorSaid


def _number(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _ask(request: Request, what: str) -> Flow[Response]:
    response = yield request
    if not response.ok:
        raise raised(response, what)
    return response


def ask_json(request: Request, what: str, type_: Any) -> Flow[Any]:
    """The JSON of the answer as a `type_`; raised what it says instead. `what` is the thing asked for."""
    response = yield request
    return decoded(response, what, type_)


def decoded(response: Response, what: str, type_: Any) -> Any:
    """The JSON of an answer as a `type_`; raises what it says instead."""
    if not response.ok:
        raise raised(response, what)
    try:
        return msgspec.json.decode(response.body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{what}: the answer does not have the expected shape ({error}): check that client and node are of "
            "one version, and that a Forebay node answers at this URL"
        ) from None


def _post(path: str, body: Any, method: str = "POST") -> Request:
    return Request(method, path, (("Content-Type", "application/json"),), msgspec.json.encode(body))


# --- objects ---------------------------------------------------------------------------------------------------------
def object_target(bucket: str, key: str) -> str:
    """The target of an object's bytes."""
    return encode_path("-/v1/objects", bucket, key)


def get(
    bucket: str,
    key: str,
    *,
    sink: Sink | None = None,
    range: RangeSpec | None = None,
    etag: str = "",
    member: str | None = None,
) -> Flow[tuple[Got, bytes]]:
    """The object, or a range of it, into `sink`, else returned. With `etag` only that version will do; with `member` it
    is that file in a shard."""
    headers = []
    if range is not None:
        first = "" if range.first is None else str(range.first)
        headers.append(("Range", f"bytes={first}-{'' if range.last is None else range.last}"))
    if etag:
        headers.append(("If-Match", f'"{etag}"'))
    target = object_target(bucket, key)
    if member is not None:
        if not member:
            raise Invalid("a member has a name: give one, or leave it out for the whole shard")
        target = with_query(target, (("member", member),))
    request = Request("GET", target, tuple(headers), sink=sink, of=(bucket, key))
    response = yield from _ask(request, f"{bucket}/{key}" if member is None else f"{member!r} in {bucket}/{key}")
    return got(response), response.body


def head(bucket: str, key: str) -> Flow[Got]:
    """What a GET would say, without the body."""
    response = yield Request("HEAD", object_target(bucket, key), of=(bucket, key))
    if response.status == 404:  # an answer to HEAD has no body, so it cannot say more than its status
        raise NotFound(f"{bucket}/{key} does not exist: see what does with `forebay ls {bucket}/`", code="NoSuchKey")
    if not response.ok:
        raise raised(response, f"{bucket}/{key}")
    return got(response)


def got(response: Response) -> Got:
    """The facts in the head of a 200 or 206."""
    headers = response.headers
    length = int(headers.get("content-length", response.size_bytes))
    size, start = length, 0
    if response.status == 206:
        try:
            unit, _, rest = headers["content-range"].partition(" ")
            span, _, whole = rest.partition("/")
            start, size = int(span.partition("-")[0]), int(whole)
            if unit != "bytes":
                raise ValueError
        except (KeyError, ValueError):
            raise Corrupt(
                f"the answer's Content-Range is {headers.get('content-range', 'missing')!r}: check what listens there"
            ) from None
    return Got(size, start, length, headers.get("etag", "").strip('"'), headers)


def put(
    bucket: str,
    key: str,
    headers: tuple[tuple[str, str], ...] = (),
    *,
    body: bytes | memoryview = b"",
    source: Source | None = None,
) -> Flow[Written]:
    """Make `body`, or what `source` holds, the object."""
    request = Request("PUT", object_target(bucket, key), headers, body, source=source, of=(bucket, key))
    written: Written = yield from ask_json(request, f"{bucket}/{key}", Written)
    return written


def delete(bucket: str, key: str, *, etag: str = "") -> Flow[None]:
    """Delete the object; one that is not there is fine, unless `etag` is given: then only that version will do."""
    headers = (("If-Match", f'"{etag}"'),) if etag else ()
    yield from _ask(Request("DELETE", object_target(bucket, key), headers, of=(bucket, key)), f"{bucket}/{key}")


def copy(call: CopyCall) -> Flow[Written]:
    """Copy an object inside the node."""
    target = encode_path("-/v1/copy", call.bucket, call.key)
    what = f"copying {call.source_bucket}/{call.source_key} to {call.bucket}/{call.key}"
    request = _post(target, call)._replace(of=(call.bucket, call.key))
    written: Written = yield from ask_json(request, what, Written)
    return written


def stat(bucket: str, key: str, *, revalidate: bool = False) -> Flow[ObjectState]:
    """What the node knows of an object."""
    target = with_query(encode_path("-/v1/stat", bucket, key), (("revalidate", "1" if revalidate else ""),))
    state: ObjectState = yield from ask_json(Request("GET", target), f"{bucket}/{key}", ObjectState)
    return state


def list_page(bucket: str, prefix: str, delimiter: str, start_after: str, limit: int) -> Flow[ListPage]:
    """One page of a listing, in byte order."""
    target = with_query(
        encode_path("-/v1/list", bucket),
        (("prefix", prefix), ("delimiter", delimiter), ("start_after", start_after), ("limit", str(limit))),
    )
    page: ListPage = yield from ask_json(Request("GET", target), f"listing {bucket}/{prefix}", ListPage)
    return page


def cached_page(bucket: str, prefix: str, delimiter: str, start_after: str, limit: int) -> Flow[CachedPage]:
    """One page of what the node's index knows of a bucket; the backend is not asked."""
    pairs = (("prefix", prefix), ("delimiter", delimiter), ("start_after", start_after), ("limit", str(limit)))
    target = with_query(encode_path("-/v1/list", bucket), (*pairs, ("cached", "1")))
    page: CachedPage = yield from ask_json(Request("GET", target), f"listing {bucket}/{prefix}", CachedPage)
    return page


# --- buckets ---------------------------------------------------------------------------------------------------------
def buckets() -> Flow[list[Bucket]]:
    """All buckets of the node, by name."""
    found: list[Bucket] = yield from ask_json(Request("GET", "/-/v1/buckets"), "the buckets", list[Bucket])
    return sorted(found, key=lambda bucket: bucket.name)


def bucket(name: str) -> Flow[Bucket]:
    """One bucket's settings; secrets in its options read `***`."""
    found: Bucket = yield from ask_json(Request("GET", encode_path("-/v1/buckets", name)), f"bucket {name}", Bucket)
    return found


def bucket_put(bucket: Bucket, *, check: bool, force: bool = False, here: bool = False) -> Flow[Bucket]:
    """Create or change a bucket; with `check` the node first asks the backend whether it answers and takes writes."""
    flags = (("check", "1" if check else ""), ("force", "1" if force else ""), ("here", "1" if here else ""))
    target = with_query(encode_path("-/v1/buckets", bucket.name), flags)
    kept: Bucket = yield from ask_json(_post(target, bucket, "PUT"), f"bucket {bucket.name}", Bucket)
    return kept


def bucket_delete(name: str, *, force: bool = False, here: bool = False) -> Flow[None]:
    """Forget a bucket and evict what is cached of it; the backend is not touched."""
    flags = (("force", "1" if force else ""), ("here", "1" if here else ""))
    target = with_query(encode_path("-/v1/buckets", name), flags)
    yield from _ask(Request("DELETE", target), f"bucket {name}")


def bucket_check(name: str) -> Flow[None]:
    """Ask the node to ask the bucket's backend whether it answers."""
    yield from _ask(Request("GET", encode_path("-/v1/buckets", name) + "/check"), f"bucket {name}")


# --- jobs ------------------------------------------------------------------------------------------------------------
def start_job(
    verb: JobVerb, bucket: str, prefix: str, keys: Iterable[str], dry_run: bool, share: bool = False
) -> Flow[JobState]:
    """Start a job and return its first state."""
    call = JobCall(bucket, prefix, list(keys), dry_run, share=share)
    state: JobState = yield from ask_json(_post(f"/-/v1/{verb}", call), f"{verb} {bucket}/{prefix}", JobState)
    return state


def job(name: str) -> Flow[JobState]:
    state: JobState = yield from ask_json(Request("GET", encode_path("-/v1/jobs", name)), f"job {name}", JobState)
    return state


def jobs() -> Flow[list[JobState]]:
    """All jobs the node remembers, newest first."""
    found: list[JobState] = yield from ask_json(Request("GET", "/-/v1/jobs"), "the jobs", list[JobState])
    return found


def job_cancel(name: str) -> Flow[JobState]:
    state: JobState = yield from ask_json(Request("DELETE", encode_path("-/v1/jobs", name)), f"job {name}", JobState)
    return state


# --- node ------------------------------------------------------------------------------------------------------------
def status() -> Flow[NodeState]:
    state: NodeState = yield from ask_json(Request("GET", "/-/v1/status"), "the node's status", NodeState)
    return state


def wish(node: str, word: Wish) -> Flow[ClusterNode]:
    call = _post("/-/v1/cluster/wish", WishCall(node, word))
    state: ClusterNode = yield from ask_json(call, f"node {node}", ClusterNode)
    return state


def warm() -> Flow[WarmObjects]:
    found: WarmObjects = yield from ask_json(Request("GET", "/-/v1/cluster/warm"), "what is cached", WarmObjects)
    return found


def manifest(bucket: str, key: str) -> Flow[Manifest]:
    target = encode_path("-/v1/manifests", bucket, key)
    found: Manifest = yield from ask_json(Request("GET", target), f"{bucket}/{key}", Manifest)
    return found


def manifest_put(call: ManifestCall) -> Flow[Manifest]:
    request = _post("/-/v1/cluster/manifest", call)
    written: Manifest = yield from ask_json(request, f"{call.bucket}/{call.key}", Manifest)
    return written


def stop() -> Flow[None]:
    yield from ask_json(Request("POST", "/-/v1/cluster/stop"), "the node", Nothing)


def volume_add(path: str) -> Flow[VolumeState]:
    call = _post("/-/v1/volumes/add", VolumeNamed(path))
    state: VolumeState = yield from ask_json(call, f"volume {path}", VolumeState)
    return state


def volume_give_up(name: str, force: bool) -> Flow[VolumeState]:
    call = _post("/-/v1/volumes/give-up", VolumeNamed(name, force))
    state: VolumeState = yield from ask_json(call, f"volume {name}", VolumeState)
    return state


def lost(bucket: str, prefix: str, start_after: str) -> Flow[list[LostObject]]:
    target = with_query(encode_path("-/v1/lost", bucket), [("prefix", prefix), ("start_after", start_after)])
    found: list[LostObject] = yield from ask_json(Request("GET", target), f"bucket {bucket}", list[LostObject])
    return found


def lost_give_up(bucket: str, prefix: str, keys: Iterable[str]) -> Flow[list[LostObject]]:
    call = _post("/-/v1/lost/give-up", LostCall(bucket, prefix, list(keys)))
    found: list[LostObject] = yield from ask_json(call, f"bucket {bucket}", list[LostObject])
    return found


def node_map() -> Flow[NodeMap]:
    found: NodeMap = yield from ask_json(Request("GET", "/-/v1/map"), "the map", NodeMap)
    return found


def door() -> Flow[DoorAt]:
    """Where clients on the node's host find its door."""
    found: DoorAt = yield from ask_json(Request("GET", "/-/v1/door"), "the node's door", DoorAt)
    return found


def metrics_text() -> Flow[str]:
    response = yield from _ask(Request("GET", "/-/metrics"), "the metrics")
    return response.body.decode("utf-8", "replace")


def ready() -> Flow[Response]:
    """The answer of `/-/readyz`, whatever it is."""
    response = yield Request("GET", "/-/readyz")
    return response
