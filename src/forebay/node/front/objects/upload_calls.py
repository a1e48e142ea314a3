"""Multipart uploads as calls to the engine: what a request's headers and body ask for, whichever API it came by.

The engine owns a part's temporary file from the call on. If the call fails, the file is removed here.
"""

from __future__ import annotations

import re
from typing import Any, Final

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.machines.uploads import no_such_upload
from forebay.core.messages.calls import PartState, UploadCreateCall, UploadPartCall
from forebay.core.types import Bucket
from forebay.node.front.http.bodies import Incoming
from forebay.node.front.http.requests import Request
from forebay.node.front.objects.object_headers import check_acl, keeping_in, refuse_unserved, stored_headers, tags_of
from forebay.node.outcomes import Call

_NUMBER: Final = re.compile(r"[0-9]{1,10}")


def create_call(request: Request, bucket: Bucket, key: str) -> UploadCreateCall:
    """Begin an upload of an object with the request's headers. `Invalid`, `NotSupported`."""
    refuse_unserved(request, keeps=True)
    check_acl(request, bucket.acl)
    algorithm = request.header(b"x-amz-checksum-algorithm").upper()
    kind: Any = request.header(b"x-amz-checksum-type").upper()
    if kind not in ("", "COMPOSITE", "FULL_OBJECT"):
        raise Invalid(
            "Value for x-amz-checksum-type header is invalid: COMPOSITE or FULL_OBJECT", code="InvalidRequest"
        )
    headers = (*stored_headers(request), *keeping_in(request, bucket))
    return UploadCreateCall(bucket.name, key, headers, algorithm, kind, tags_of(request))


def part_number(text: str, upload_id: str) -> int:
    """The number of a part of the upload. `Invalid` if it can be none, `NotFound` if the request names no upload."""
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= limits.PARTS_MAX:
        raise Invalid(
            f"Part number must be an integer between 1 and {limits.PARTS_MAX}, inclusive", code="InvalidArgument"
        )
    if not upload_id:
        raise no_such_upload("")
    return int(text)


async def send_part(call: Call, bucket: str, key: str, upload_id: str, number: int, incoming: Incoming) -> PartState:
    """Give the engine a part whose body is whole. After an error no file of it is left."""
    received = incoming.result
    try:
        state: PartState = await call(
            "upload_part",
            UploadPartCall(
                bucket,
                key,
                upload_id,
                number,
                received.size_bytes,
                received.md5,
                received.path,
                received.body,
                received.checksums,
            ),
        )
    except BaseException:
        received.discard()
        raise
    return state
