"""Settings that no bucket has here (policies, lifecycle rules, a web site), and S3's answers for "there is none".

Theory. Tools ask for these settings as a matter of course. `NotImplemented` would stop them. "There is none" lets them
go on, and is true. So reading such a setting is answered as S3 does for a bucket that never had it, removing it
succeeds, and only setting it is refused (`unserved.py`). A setting for which S3 always has a value, or whose value
would have to be invented, stays refused.

Invariant. Answers depend only on whether the bucket exists.
"""

from __future__ import annotations

from typing import Final

from forebay.core.errors import Exists, Invalid, NotFound
from forebay.node.front.s3.xml import document

_EMPTY: Final = {  # subresource: the document that says "never set"
    "accelerate": ("AccelerateConfiguration", ""),
    "logging": ("BucketLoggingStatus", ""),
    "notification": ("NotificationConfiguration", ""),
    "requestPayment": ("RequestPaymentConfiguration", "<Payer>BucketOwner</Payer>"),
}
_NONE: Final = {  # subresource: S3's code for "there is none", and what it is called
    "encryption": ("ServerSideEncryptionConfigurationNotFoundError", "server side encryption configuration"),
    "lifecycle": ("NoSuchLifecycleConfiguration", "lifecycle configuration"),
    "object-lock": ("ObjectLockConfigurationNotFoundError", "Object Lock configuration"),
    "ownershipControls": ("OwnershipControlsNotFoundError", "bucket ownership controls"),
    "policy": ("NoSuchBucketPolicy", "bucket policy"),
    "publicAccessBlock": ("NoSuchPublicAccessBlockConfiguration", "public access block configuration"),
    "replication": ("ReplicationConfigurationNotFoundError", "replication configuration"),
    "tagging": ("NoSuchTagSet", "TagSet"),
    "website": ("NoSuchWebsiteConfiguration", "website configuration"),
}
_REMOVABLE: Final = frozenset(_NONE) - {"object-lock"}  # S3 has no way to remove this one


LOCKS: Final = frozenset(("retention", "legal-hold"))  # of objects, where the bucket has Object Lock


def find_absent(method: bytes, query: dict[str, str]) -> str:
    """The subresource that a request for a bucket reads or removes and no bucket here has; "" if it does not."""
    if method == b"GET":
        return next((name for name in query if name in _EMPTY or name in _NONE), "")
    return next((name for name in query if name in _REMOVABLE), "") if method == b"DELETE" else ""


def render_absent(name: str) -> bytes:
    """The document that says that the subresource was never set. `NotFound` with S3's code where it says it so."""
    if name in _EMPTY:
        return document(*_EMPTY[name])
    code, words = _NONE[name]
    raise NotFound(f"The {words} does not exist: none can be set here", code=code)


def no_bucket_lock() -> Exists:
    """What S3 says to who would lock the objects of a bucket that was made without Object Lock."""
    return Exists("Object Lock configuration cannot be enabled on existing buckets", code="InvalidBucketState")


def no_object_lock() -> Invalid:
    """What S3 says to who locks an object in such a bucket, or asks for its lock."""
    return Invalid("Bucket is missing Object Lock Configuration: it is not served here", code="InvalidRequest")
