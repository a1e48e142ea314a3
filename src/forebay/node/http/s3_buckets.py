"""What S3 lets one do to a bucket as such, and what hangs on an object beside its bytes: create and delete bucket,
ACLs, CORS, tags, uploads by HTML forms.

Theory. `s3.py` asks each of its helpers in turn whether a request is theirs; this one knows its own by the method (PUT
and DELETE of a bucket), by `?acl`, `?cors` and `?tagging`, and by a body that is a form. What is not served at all
(policies, lifecycle, …) never comes here: `s3.py` refuses it.

Invariant. No operation is answered before the caller was found to be allowed to do it.
"""

from __future__ import annotations

from forebay.core.access import Identity
from forebay.core.errors import Denied, NotSupported
from forebay.core.types import Bucket
from forebay.node.http.auth import Auth, Caller
from forebay.node.http.puts import Puts
from forebay.node.http.requests import BodySink, Call, Exchange, Lines, Request

_SUBRESOURCES = ("acl", "cors", "tagging")


class BucketsApi:
    """`call` asks the engine, `puts` takes objects and `puts.intake` makes sinks for bodies, `lines` are the first
    header lines of each answer."""

    def __init__(self, call: Call, auth: Auth, puts: Puts, lines: Lines) -> None:
        self._call = call
        self._auth = auth
        self._puts = puts
        self._lines = lines

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request`, now or in a task, if it is one of this module's; False if it is not, and then nothing was
        done.

        `key` is empty for the bucket itself. A request with a body comes here when that is whole (`request.body`).
        Raises `ForebayError` for what is wrong with the request.
        """
        self._refuse(request, key, query)
        return False

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is none of this module's. Raises to refuse it
        before it is sent."""
        self._refuse(request, key, query)
        return None

    def take_form(self, request: Request, bucket: Bucket) -> BodySink:
        """Where the form of a POST upload goes. Its signature is inside: nobody is known yet."""
        raise NotSupported("uploads by HTML forms are not served: use PUT, or a presigned URL")

    def handle_form(self, request: Request, exchange: Exchange, bucket: Bucket) -> None:
        """Answer a POST upload whose form is whole: `request.sink` is what `take_form` returned."""
        raise NotSupported("uploads by HTML forms are not served: use PUT, or a presigned URL")

    def preflight(self, request: Request, exchange: Exchange, bucket: Bucket) -> None:
        """Answer an OPTIONS request."""
        raise Denied(
            "CORS is not enabled for this bucket: call from a server, not from a browser page", code="AccessForbidden"
        )

    def cors_lines(self, request: Request, bucket: Bucket) -> bytes:
        """Header lines that the bucket's CORS rules add to the answer to `request`, which has an Origin header."""
        return b""

    def _refuse(self, request: Request, key: str, query: dict[str, str]) -> None:
        for name in _SUBRESOURCES:
            if name in query:
                raise NotSupported(f"?{name} is not served: ask the bucket itself (docs/s3.md lists what is served)")
        if not key and request.method in (b"PUT", b"DELETE"):
            raise NotSupported("buckets are neither made nor deleted here: use `forebay bucket add` or `remove`")
