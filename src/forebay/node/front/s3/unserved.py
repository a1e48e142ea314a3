"""Operations and headers of S3 that this node refuses by name, so that it never answers them with something else."""

from __future__ import annotations

from typing import Final

from forebay.core.errors import Invalid, NotSupported
from forebay.core.versions import CURRENT
from forebay.node.front.http.requests import Request

# fmt: off
OBJECT_SUBRESOURCES: Final = frozenset(
    (
        "acl", "annotation", "attributes", "legal-hold", "retention", "renameObject", "restore", "select", "tagging",
        "torrent", "uploadId", "uploads", "append", "encryption",
    )
)
BUCKET_SUBRESOURCES: Final = frozenset(
    (
        "abac", "accelerate", "acl", "analytics", "cors", "delete", "encryption", "intelligent-tiering", "inventory",
        "lifecycle", "logging", "metadataConfiguration", "metadataTable", "metrics", "notification", "object-lock",
        "ownershipControls", "policy", "policyStatus", "publicAccessBlock", "replication", "requestPayment",
        "session", "tagging", "uploads", "versioning", "versions", "website",
    )
)
_OF_ONE_OBJECT: Final = OBJECT_SUBRESOURCES  # these mean the current object
_HEADERS: Final = frozenset((
    b"x-amz-server-side-encryption-customer-algorithm",
    b"x-amz-expected-bucket-owner",
    b"x-amz-source-expected-bucket-owner",
))
# fmt: on


def refuse(request: Request, query: dict[str, str], subresources: frozenset[str]) -> None:
    """`NotSupported` for an operation or a header whose meaning we would have to drop."""
    if query and (found := sorted(subresources.intersection(query))):
        raise NotSupported(f"?{found[0]} is not served: ask the bucket itself (docs/s3.md lists what is served)")
    if not _HEADERS.isdisjoint(request.headers):
        header = min(_HEADERS.intersection(request.headers))
        raise NotSupported(f"{header.decode()} is not served: leave it out, or ask the bucket itself")
    if query and query.get("versionId", CURRENT) != CURRENT:
        raise NotSupported(
            "versions are served to reads of objects alone: leave versionId out to mean the current object"
        )


def version_asked(query: dict[str, str]) -> str:
    """The version that a read of an object asks for, and no longer does; "" for the current one."""
    version_id = query.get("versionId", CURRENT) if query.keys().isdisjoint(_OF_ONE_OBJECT) else CURRENT
    if version_id == CURRENT:
        return ""
    if not version_id:
        raise Invalid("Version id cannot be the empty string", code="InvalidArgument")
    del query["versionId"]
    return version_id
