"""Translates errors into S3's: the one table at this edge.

Theory. S3 clients act on the HTTP status (retry or not) and on the `Code` in the body. An error that knows its S3 code
(`ForebayError.code`) gets that code and S3's status for it; otherwise its kind decides. A code that S3 does not have is
never sent: the kind's code is, with our message, which says what to do.

Invariant. Every code in `KIND_CODES` and every code raised on the S3 paths stands in `STATUS`.
"""

from __future__ import annotations

from typing import Final

from forebay.core.errors import MAP_CHANGES, ForebayError
from forebay.core.types import AGAIN_STATUS, LOOP_STATUS
from forebay.node.front.http.auth import AGAIN_NAME
from forebay.node.front.http.requests import Request, Response
from forebay.node.front.s3.xml import CONTENT_TYPE, DECLARATION, element, readable
from forebay.ports import chance

STATUS: Final = {
    "AccessDenied": 403,
    "AccessForbidden": 403,
    "AuthorizationHeaderMalformed": 400,
    "AuthorizationQueryParametersError": 400,
    "BadDigest": 400,
    "BadRequest": 400,
    "BucketAlreadyExists": 409,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "ConditionalRequestConflict": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "ExpiredToken": 400,
    "IllegalLocationConstraintException": 400,
    "IncompleteBody": 400,
    "InsufficientStorage": 507,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidBucketState": 409,
    "InvalidDigest": 400,
    "InvalidLocationConstraint": 400,
    "InvalidPart": 400,
    "InvalidPartNumber": 416,
    "InvalidPartOrder": 400,
    "InvalidPolicyDocument": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidStorageClass": 400,
    "InvalidTag": 400,
    "InvalidToken": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "LoopDetected": LOOP_STATUS,
    "MalformedACLError": 400,
    "MalformedPOSTRequest": 400,
    "MalformedTrailerError": 400,
    "MalformedXML": 400,
    "MaxPostPreDataLengthExceededError": 400,
    "MetadataTooLarge": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "MissingSecurityHeader": 400,
    "NoSuchBucket": 404,
    "NoSuchBucketPolicy": 404,
    "NoSuchCORSConfiguration": 404,
    "NoSuchKey": 404,
    "NoSuchLifecycleConfiguration": 404,
    "NoSuchPublicAccessBlockConfiguration": 404,
    "NoSuchTagSet": 404,
    "NoSuchUpload": 404,
    "NoSuchVersion": 404,
    "NoSuchWebsiteConfiguration": 404,
    "NotImplemented": 501,
    "ObjectLockConfigurationNotFoundError": 404,
    "OperationAborted": 409,
    "OwnershipControlsNotFoundError": 404,
    "PreconditionFailed": 412,
    "ReplicationConfigurationNotFoundError": 404,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServerSideEncryptionConfigurationNotFoundError": 404,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "UnresolvableGrantByEmailAddress": 400,
    "XAmzContentSHA256Mismatch": 400,
}
KIND_CODES: Final = {
    "NotFound": "NoSuchKey",
    "Exists": "OperationAborted",
    "Precondition": "PreconditionFailed",
    "Denied": "AccessDenied",
    "Invalid": "InvalidRequest",
    "Busy": "SlowDown",
    "Unavailable": "ServiceUnavailable",
    "NoBackendBucket": "ServiceUnavailable",
    "VolumeMissing": "ServiceUnavailable",
    "ObjectLost": "InternalError",
    "Corrupt": "InternalError",  # S3's word for "try again": SDKs do
    "Closed": "ServiceUnavailable",
    "NotSupported": "NotImplemented",
    "Bug": "InternalError",
}
HTTP_CODES: Final = {  # what the connection itself may refuse, in S3's words
    "URITooLong": (414, "InvalidURI"),
    "HeadersTooLarge": (400, "RequestHeaderSectionTooLarge"),
    "VersionNotSupported": (505, "NotImplemented"),
}


def code_and_status(error: ForebayError) -> tuple[str, int]:
    """The S3 code and HTTP status that say `error`."""
    if error.code in HTTP_CODES:
        status, code = HTTP_CODES[error.code]
        return code, status
    code = error.code if error.code in STATUS else KIND_CODES.get(error.kind, "InternalError")
    return code, STATUS[code]


class RequestIds:
    """Identifiers for `x-amz-request-id`: unguessable prefix per process, then a counter, since one is made per hit."""

    def __init__(self) -> None:
        self.prefix = chance.token_hex(4).upper().encode()
        self.count = 0

    def line(self) -> bytes:
        """A finished header line with the next id."""
        self.count += 1
        return b"x-amz-request-id: %b%08X\r\n" % (self.prefix, self.count)


def render(
    error: ForebayError,
    request: Request | None,
    id_line: bytes,
    host_id: str,
    lines: bytes = b"",
    named: tuple[str, str] = ("", ""),
) -> Response:
    """The S3 error document for `error`; `id_line` is this answer's `x-amz-request-id` line, `lines` are further
    ones; `named` are the bucket and key that the request is about."""
    code, status = code_and_status(error)
    if error.code == MAP_CHANGES and request is not None and AGAIN_NAME in request.headers:
        status = AGAIN_STATUS  # a node that asks again by itself; others know the 503
    head = id_line + lines + CONTENT_TYPE
    extra = ""
    if status == 416 and error.size_bytes is not None:
        head += b"Content-Range: bytes */%d\r\n" % error.size_bytes
        extra = element("ActualObjectSize", str(error.size_bytes))
    if code == "NoSuchKey" and named[1]:
        extra = element("Key", readable(named[1]))
    elif code == "NoSuchBucket" and named[0]:
        extra = element("BucketName", readable(named[0]))
    if error.retry_after_s > 0:
        head += b"Retry-After: %d\r\n" % max(1, round(error.retry_after_s))
    if status == 405:
        head += b"Allow: GET, HEAD, PUT, POST, DELETE\r\n"
    resource = request.path.decode("utf-8", "replace") if request is not None else ""
    request_id = id_line.partition(b": ")[2].strip().decode()
    body = "".join(
        (
            DECLARATION,
            "<Error>",
            element("Code", code),
            element("Message", readable(error.message)),
            extra,
            element("Resource", readable(resource)),
            element("RequestId", request_id),
            element("HostId", host_id),
            "</Error>",
        )
    )
    return Response(status, head, body.encode())
