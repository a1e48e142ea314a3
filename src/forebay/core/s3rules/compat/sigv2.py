"""Verifies AWS Signature Version 2, for presigned URLs only.

Theory. boto3 and awscli 1 presign this way unless they are told otherwise or the region forbids it, so a URL that works
at S3 works here. It signs the method, the object's path, the subresources of the query, content type and MD5, every
`x-amz-*` header and the expiry with HMAC-SHA1, which is not broken as a MAC. It does not sign the host or other query
parameters. So it is accepted for nothing else: requests that are signed in a header must use Version 4.

The signed text begins with the bucket, even where the request names the bucket by its host, and the host itself is not
signed. So the caller passes the object that the request is *taken* for (`resource`), and only that one may have been
signed. If both readings were tried, a URL for the key `b/k` of one bucket would open the key `k` of the bucket `b` to
anybody who writes another Host.

Source: "Signing and authenticating REST requests (AWS signature version 2)", Amazon S3 User Guide.

Invariants. As `core/s3rules/sigv4.py`: constant-time comparison; only `Denied` and `Invalid`, with an S3 code.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Mapping

from forebay.core.errors import Denied, Invalid

EXPIRES_S_MAX = 604_800  # as for Version 4: a presigned request lives for seven days at most
_REQUIRED = (b"AWSAccessKeyId", b"Signature", b"Expires")
_SIGNED = (b"content-md5", b"content-type")
_NUMBER = re.compile(rb"[0-9]{1,18}").fullmatch
_SUBRESOURCES = frozenset(
    b"accelerate acl analytics cors defaultObjectAcl delete inventory lifecycle location logging metrics notification "
    b"object-lock partNumber policy replication requestPayment response-cache-control response-content-disposition "
    b"response-content-encoding response-content-language response-content-type response-expires restore select "
    b"select-type storageClass tagging torrent uploadId uploads versionId versioning versions website".split()
)


def verify_presigned(
    secrets: Mapping[str, str],
    now_s: float,
    method: bytes,
    resource: bytes,
    pairs: list[tuple[bytes, bytes]],
    headers: Mapping[bytes, bytes],
) -> str:
    """The key id that signed this URL. `resource` is /BUCKET/KEY as it was sent, percent-encoded; `pairs` is the query,
    percent-decoded; headers as in `sigv4.Verifier.verify`."""
    given = dict(pairs)
    if any(name not in given for name in _REQUIRED) or len(given) != len(pairs):
        raise Invalid(
            "a presigned URL of Signature Version 2 needs AWSAccessKeyId, Signature and Expires, each once",
            code="AuthorizationQueryParametersError",
        )
    expires = given[b"Expires"]
    if not _NUMBER(expires):
        raise Denied("Expires must be Unix time, in seconds: sign it again", code="AccessDenied")
    if now_s > int(expires):
        raise Denied("Request has expired: sign it again", code="AccessDenied")
    if int(expires) - now_s > EXPIRES_S_MAX:
        raise Denied(f"Expires is too far off: sign for at most {EXPIRES_S_MAX} seconds", code="AccessDenied")
    key_id = given[b"AWSAccessKeyId"].decode("utf-8", "replace")
    secret = secrets.get(key_id)
    if secret is None:
        raise Denied(
            "The access key id you provided does not exist here: check it, or have it added", code="InvalidAccessKeyId"
        )
    text = string_to_sign(method, resource, pairs, headers, expires)
    expected = base64.b64encode(hmac.digest(secret.encode(), text, "sha1"))
    if hmac.compare_digest(expected, given[b"Signature"]):
        return key_id
    raise Denied(
        "The request signature we calculated does not match the signature you provided: check the secret, the method "
        "and the object's name",
        code="SignatureDoesNotMatch",
    )


def string_to_sign(
    method: bytes, resource: bytes, pairs: list[tuple[bytes, bytes]], headers: Mapping[bytes, bytes], expires: bytes
) -> bytes:
    """What is signed. Headers that the signer put into the query count as sent."""
    fields = {name.lower(): value for name, value in pairs if name.lower().startswith(b"x-amz-") or name in _SIGNED}
    fields |= {name: value for name, value in headers.items() if name.startswith(b"x-amz-") or name in _SIGNED}
    lines = [method, *(fields.get(name, b"") for name in _SIGNED), expires]
    lines += [name + b":" + fields[name] for name in sorted(fields) if name not in _SIGNED]
    asked = sorted((name, value) for name, value in pairs if name in _SUBRESOURCES)
    query = b"&".join(name + b"=" + value if value else name for name, value in asked)
    return b"\n".join([*lines, resource + (b"?" + query if query else b"")])
