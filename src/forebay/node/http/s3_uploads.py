"""Multipart uploads as S3 speaks of them: create, upload part, part copy, list parts, list uploads, complete, abort.

Theory. `s3.py` asks each of its helpers in turn whether a request is theirs; this one knows its own by `?uploads`,
`?uploadId` and `?partNumber`. The body of a part comes in through `Intake`, as that of an object does; that of
CompleteMultipartUpload is XML in memory. The engine keeps the uploads; nothing of one is remembered here.

Invariant. No operation is answered before the caller was found to be allowed to write to the bucket.
"""

from __future__ import annotations

from forebay.core.access import Identity
from forebay.core.errors import NotSupported
from forebay.core.types import Bucket
from forebay.node.http.auth import Auth, Caller
from forebay.node.http.intake import Intake
from forebay.node.http.requests import BodySink, Call, Exchange, Lines, Request


class UploadsApi:
    """`call` asks the engine, `intake` makes sinks for bodies, `lines` are the first header lines of each answer."""

    def __init__(self, call: Call, auth: Auth, intake: Intake, lines: Lines) -> None:
        self._call = call
        self._auth = auth
        self._intake = intake
        self._lines = lines

    def handle(
        self, request: Request, exchange: Exchange, identity: Identity, bucket: Bucket, key: str, query: dict[str, str]
    ) -> bool:
        """Answer `request`, now or in a task, if it is about uploads; False if it is not, and then nothing was done.

        `key` is empty for the bucket itself. A request with a body comes here when that is whole: `request.sink` is
        what `take_body` returned. Raises `ForebayError` for what is wrong with the request.
        """
        self._refuse(request, query)
        return False

    def take_body(
        self, request: Request, caller: Caller, bucket: Bucket, key: str, query: dict[str, str]
    ) -> BodySink | None:
        """Where the body of `request` goes, or None if the request is not about uploads. Raises to refuse it before it
        is sent."""
        self._refuse(request, query)
        return None

    def _refuse(self, request: Request, query: dict[str, str]) -> None:
        for name in ("uploads", "uploadId"):
            if name in query:
                raise NotSupported(f"?{name} is not served: send the object in one PUT (docs/s3.md lists what is)")
