"""What the audit log says of a request, and of which requests it says anything.

Theory. A line stands for each change and each call that takes `admin`, whatever came of it, and for each denial (401 or
403) of any request; with `reads` for every other request too. It is made once the request is over, from what was
answered, so it costs a request nothing before its answer. Where one request is about several objects and each has its
own outcome (DeleteObjects, items of a batch that were denied), the handler leaves a note for each with the request, and
each note is a line.

No part of a line is a secret: no header but the copy source's name, no query (a presigned URL has its signature there),
no body but the names in it. An identity is named only once it was proved; what somebody merely claimed is not repeated.

Whoever proves nothing could fill the log with refused requests until what others did is rotated away. So of those a
front writes at most STRANGERS_S_MAX in a second; the others are counted as dropped.

Invariant. What is said of a request depends on the request and its answer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from forebay.core import limits
from forebay.core.access import ANONYMOUS
from forebay.core.errors import ForebayError
from forebay.core.messages import calls
from forebay.core.s3rules.names import Addressing, decode_path
from forebay.core.s3rules.operation_names import operation_name
from forebay.node.front.audit.trail import Trail
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import Request, decode_query
from forebay.node.front.native.routes import PREFIX, find
from forebay.node.front.s3.errors import RequestIds
from forebay.ports import clock as clocks

if TYPE_CHECKING:
    from forebay.node.front.http.connection import Connection
    from forebay.node.front.http.server import Server
    from forebay.node.tls import TlsFiles

STRANGERS_S_MAX = 100
_SHOWN_MAX = limits.KEY_BYTES_MAX  # characters of a name that a client wrote
_QUIET: Final = frozenset(("health", "ready"))  # asked all the time, by whatever watches the node
_NO_CHANGES: Final = frozenset(
    ("UploadPart", "UploadPartCopy", "batch", "upload_part", "hints", "hints_at", "hints_close")
)
_NAMES_IN_BODY: Final = (calls.JobCall, calls.LostCall, calls.VolumeNamed, calls.CopyCall)


class Asked(NamedTuple):
    """What a request was about. `more` holds what only some requests have."""

    operation: str
    bucket: str = ""
    key: str = ""
    counts: bool = False  # it is a change, or takes `admin`
    more: dict[str, Any] = {}


class Audit:
    """One per front. `reads`: say something of every request."""

    def __init__(
        self,
        trail: Trail,
        auth: Auth,
        addressing: Addressing,
        *,
        reads: bool = False,
        clock: clocks.Clock = clocks.system,
    ) -> None:
        self.trail = trail
        self.ids = RequestIds()
        self._auth = auth
        self._addressing = addressing
        self._reads = reads
        self._clock = clock
        self._second = 0  # the one in which strangers' lines are counted
        self._of_strangers = 0

    def connections(self, server: Server, tls: TlsFiles | None) -> Callable[[], Connection]:
        """What makes the server's connections, so that they tell of each request."""
        from forebay.node.front.audit.connections import AuditedConnection, AuditedTlsConnection

        if tls is None:
            return lambda: AuditedConnection(server, self)
        return lambda: AuditedTlsConnection(server, tls, self)

    def answered(self, request: Request, status: int, error: str, request_id: str, sent_bytes: int, cut: bool) -> None:
        """A request is over. `status` is 0 if it was cut off before an answer, `error` the code of what was answered,
        or why it was `cut`; `sent_bytes` is what its answer's body has."""
        denied = status in (401, 403)
        noted = getattr(request, "noted", ())
        if not (denied or noted or self._reads) and request.method in (b"GET", b"HEAD"):
            return
        asked = self._asked(request)
        said = {
            "request": request_id,
            "identity": self._name(request),
            "address": request.peer,
            "operation": asked.operation,
        }
        for bucket, key, note_status, note_error in noted:
            self._say(said, bucket, key, note_status, note_error, 0)
        if denied or (asked.counts and (cut or not noted)) or (self._reads and asked.operation not in _QUIET):
            size_bytes = _body_bytes(request) if asked.counts else sent_bytes
            more = asked.more | ({"cut": True} if cut else {})
            self._say(said, asked.bucket, asked.key, status, error, size_bytes, **more)

    def at_door(self, identity: str, operation: str, bucket: str, key: str, error: ForebayError | None) -> None:
        """Somebody on this host asked at the door (`front/door.py`)."""
        status = 200 if error is None else error.status
        if self._reads or operation == "DoorTake" or status in (401, 403):
            said = {"request": "", "identity": identity, "address": "door", "operation": operation}
            self._say(said, bucket, key, status, "" if error is None else code_of(error), 0)

    def _say(
        self, said: dict[str, Any], bucket: str, key: str, status: int, error: str, size_bytes: int, **more: Any
    ) -> None:
        now_s = self._clock.wall_s()
        if not said["identity"] or (said["identity"] == ANONYMOUS.name and status in (401, 403)):
            if int(now_s) != self._second:
                self._second, self._of_strangers = int(now_s), 0
            self._of_strangers += 1
            if self._of_strangers > STRANGERS_S_MAX:
                self.trail.drop()
                return
        about = {"bucket": bucket[:_SHOWN_MAX], "key": key[:_SHOWN_MAX], "status": status, "error": error}
        self.trail.put({"time": now_s, **said, **about, "bytes": size_bytes, **more})

    def _name(self, request: Request) -> str:
        identity = getattr(request, "identity", None)
        if identity is None:
            return "anyone" if self._auth.open else ""
        return str(identity.name)[:_SHOWN_MAX]

    # --- what it was about -------------------------------------------------------------------------------------------
    def _asked(self, request: Request) -> Asked:
        if request.path.startswith(PREFIX.encode()):
            return _asked_native(request)
        return self._asked_s3(request)

    def _asked_s3(self, request: Request) -> Asked:
        method = request.method.decode("latin-1")
        try:
            bucket, key = self._addressing.split(request.path, request.headers.get(b"host", b""))
        except ForebayError:
            return Asked("", "", request.path[:_SHOWN_MAX].decode("utf-8", "replace"), method not in ("GET", "HEAD"))
        try:
            query = decode_query(request.query)
        except ForebayError:
            query = {}
        source = request.headers.get(b"x-amz-copy-source", b"")
        name = operation_name(method, bucket, key, query, copies=bool(source))
        more = {"source": _source(source)} if source else {}
        if name == "PostObject":
            key = str(getattr(request.sink, "key", ""))  # a form names it in a field
        counts = method in ("PUT", "POST", "DELETE") and name not in _NO_CHANGES
        return Asked(name, bucket, key, counts, more)


def _asked_native(request: Request) -> Asked:
    method = request.method.decode("latin-1")
    try:
        route, taken = find(method, request.path)
    except ForebayError:
        return Asked("", "", request.path[:_SHOWN_MAX].decode("utf-8", "replace"))
    more: dict[str, Any] = {"job": taken["job"][:_SHOWN_MAX]} if "job" in taken else {}
    bucket, key = taken.get("bucket", ""), taken.get("key", "")
    if route.body in _NAMES_IN_BODY and request.body:
        try:
            body = msgspec.json.decode(request.body, type=route.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = None
        if isinstance(body, calls.VolumeNamed):
            more["volume"] = body.name[:_SHOWN_MAX]
        elif isinstance(body, calls.CopyCall):
            more["source"] = f"{body.source_bucket}/{body.source_key}"[:_SHOWN_MAX]
        elif isinstance(body, calls.JobCall | calls.LostCall):
            bucket = body.bucket
            more |= {"prefix": body.prefix[:_SHOWN_MAX], "keys": len(body.keys)}
    changes = method not in ("GET", "HEAD") and route.name not in _NO_CHANGES
    return Asked(route.name, bucket, key, changes or route.may == "admin", more)


def code_of(error: ForebayError) -> str:
    """What says the error in a line."""
    return error.code or error.kind


def _source(raw: bytes) -> str:
    """The object that a copy reads, without the query behind it."""
    try:
        return decode_path(raw.partition(b"?")[0])[:_SHOWN_MAX]
    except ForebayError:
        return ""


def _body_bytes(request: Request) -> int:
    sink = getattr(request.sink, "incoming", request.sink)  # a form has its file's
    return sink.taken_bytes if isinstance(sink, Incoming) else len(request.body)
