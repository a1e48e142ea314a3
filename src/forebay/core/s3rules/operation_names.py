"""The name of the S3 operation that a request asks for, in the words of S3's own documentation.

Theory. A method, a bucket or a key, and a *subresource* in the query say it. This is for people who read what was
asked: the answer is decided elsewhere (`node/front/s3/operations.py`), and a request that is refused has a name too. A
name is made of words of this table alone, so it holds nothing that a client wrote.

Invariant. Every name is letters and digits; "" where S3 has no operation.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_VERBS: Final = {"GET": "Get", "HEAD": "Head", "PUT": "Put", "DELETE": "Delete"}
_OF_UPLOADS: Final = {
    "GET": "ListParts",
    "PUT": "UploadPart",
    "POST": "CompleteMultipartUpload",
    "DELETE": "AbortMultipartUpload",
}
_SUBRESOURCES: Final = {  # subresource -> the rest of the name, of an object and of a bucket
    "acl": ("ObjectAcl", "BucketAcl"),
    "attributes": ("ObjectAttributes", ""),
    "cors": ("", "BucketCors"),
    "encryption": ("ObjectEncryption", "BucketEncryption"),
    "legal-hold": ("ObjectLegalHold", ""),
    "lifecycle": ("", "BucketLifecycleConfiguration"),
    "location": ("", "BucketLocation"),
    "logging": ("", "BucketLogging"),
    "notification": ("", "BucketNotificationConfiguration"),
    "object-lock": ("", "ObjectLockConfiguration"),
    "ownershipControls": ("", "BucketOwnershipControls"),
    "policy": ("", "BucketPolicy"),
    "policyStatus": ("", "BucketPolicyStatus"),
    "publicAccessBlock": ("", "PublicAccessBlock"),
    "replication": ("", "BucketReplication"),
    "requestPayment": ("", "BucketRequestPayment"),
    "retention": ("ObjectRetention", ""),
    "tagging": ("ObjectTagging", "BucketTagging"),
    "versioning": ("", "BucketVersioning"),
    "website": ("", "BucketWebsite"),
}
_OF_BUCKETS: Final = {"GET": "ListObjects", "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}


def operation_name(method: str, bucket: str, key: str, query: Container[str], *, copies: bool = False) -> str:
    """The operation; `query` holds the names in the query, `copies` says that the request names a source."""
    if not bucket:
        return {"GET": "ListBuckets", "POST": "AssumeRoleWithWebIdentity"}.get(method, "")
    if key and "uploadId" in query:
        name = _OF_UPLOADS.get(method, "")
        return f"{name}Copy" if copies and name == "UploadPart" else name
    if "uploads" in query and method in ("GET", "POST"):
        return "ListMultipartUploads" if method == "GET" else "CreateMultipartUpload" if key else ""
    for subresource, (of_object, of_bucket) in _SUBRESOURCES.items():
        what = of_object if key else of_bucket
        if what and subresource in query and method in _VERBS:
            return f"{_VERBS[method]}{what}"
    if key:
        return "CopyObject" if copies and method == "PUT" else f"{_VERBS[method]}Object" if method in _VERBS else ""
    if method == "POST":
        return "DeleteObjects" if "delete" in query else "PostObject"
    if method == "GET" and "versions" in query:
        return "ListObjectVersions"
    return "ListObjectsV2" if method == "GET" and "list-type" in query else _OF_BUCKETS.get(method, "")
