"""Names for the versions that a versioned backend keeps of its objects.

Theory. A version that a reader names (`versionId`) never changes and has nothing to do with the current object. So it
is cached as an object of its own, in a bucket that exists on this node alone and that no client can name: bucket names
do not begin with `-`. There its name is the key, NUL, and the version's id. Everything that holds for objects then
holds for it: flights, eviction, checksums, a rebuild. Its bucket is `immutable` and cannot be written to.

Rejected: the version's id as a field of each record (every look-up would compare it, and a key has one record); derived
objects (`core/derived.py`: their names may be hashes, and the id must be found again to ask the backend).

Invariants. (1) Different versions have different names, which no current object has. (2) `split_name` undoes
`name_of_version`. (3) The names of a key's versions begin with the key, so a prefix of keys has its versions.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.core import limits
from forebay.core.errors import Invalid, NotSupported
from forebay.core.types import FRESH_IMMUTABLE, Bucket

ID_HEADER: Final = "x-amz-version-id"
CURRENT: Final = "null"  # the id that means the current object here
_PREFIX: Final = "-versions-"
_ID: Final = re.compile(r"[!-~]{1,1024}")


def versions_of(bucket: str) -> str:
    """The bucket that versions of a bucket's objects are in."""
    return _PREFIX + bucket


def whose_versions(bucket: str) -> str:
    """The bucket whose objects' versions are in this one; "" for any other bucket."""
    return bucket[len(_PREFIX) :] if bucket.startswith(_PREFIX) else ""


def name_of_version(key: str, version_id: str) -> str:
    """The name of a version there. `Invalid` for what can be no id, and where both together are too long."""
    if not _ID.fullmatch(version_id):
        raise Invalid("Invalid version id specified", code="InvalidArgument")
    name = f"{key}\0{version_id}"
    if len(name.encode()) > limits.KEY_BYTES_MAX:
        raise Invalid(
            f"key and version id together have more than {limits.KEY_BYTES_MAX - 1} bytes: read that version from the "
            "bucket itself",
            code="KeyTooLongError",
        )
    return name


def split_name(name: str) -> tuple[str, str]:
    """Key and version id."""
    key, _, version_id = name.rpartition("\0")
    return key, version_id


def object_of(bucket: str, name: str) -> tuple[str, str]:
    """Bucket and key of the object that `name` is a version of; of any other name, as they are."""
    of = whose_versions(bucket)
    return (of, split_name(name)[0]) if of else (bucket, name)


def versioned(bucket: Bucket, key: str, version_id: str) -> tuple[Bucket, str]:
    """Where a version of an object is read from. `NotSupported` if the bucket's backend has no versions."""
    if bucket.url and not bucket.url.startswith("s3://"):
        raise NotSupported(
            f"bucket {bucket.name} has no S3 backend that could keep versions: leave the version out to mean the "
            "current object"
        )
    name = name_of_version(key, version_id)
    return Bucket(versions_of(bucket.name), bucket.url, FRESH_IMMUTABLE, options=bucket.options), name
