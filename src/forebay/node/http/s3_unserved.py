"""What S3 has and this node does not: known by name, so that it is refused and never answered with something else."""

from __future__ import annotations

from typing import Final

from forebay.core.errors import NotSupported
from forebay.node.http.requests import Request

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
_HEADERS: Final = (
    b"x-amz-server-side-encryption-customer-algorithm",
    b"x-amz-expected-bucket-owner",
    b"x-amz-source-expected-bucket-owner",
)
# fmt: on


def refuse(request: Request, query: dict[str, str], subresources: frozenset[str]) -> None:
    """`NotSupported` for an operation or a header whose meaning we would have to drop."""
    found = sorted(subresources.intersection(query))
    if found:
        raise NotSupported(f"?{found[0]} is not served: ask the bucket itself (docs/s3.md lists what is served)")
    for header in _HEADERS:
        if header in request.headers:
            raise NotSupported(f"{header.decode()} is not served: leave it out, or ask the bucket itself")
    if query.get("versionId", "null") != "null":
        raise NotSupported("versions are not served: leave versionId out to mean the current object")
