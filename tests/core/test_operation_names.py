"""S3's names for what is asked."""

from __future__ import annotations

import pytest

from forebay.core.s3rules.operation_names import operation_name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("GET", "ListBuckets"),
        ("GET b", "ListObjects"),
        ("GET b list-type", "ListObjectsV2"),
        ("GET b versions", "ListObjectVersions"),
        ("GET b location", "GetBucketLocation"),
        ("GET b uploads", "ListMultipartUploads"),
        ("HEAD b", "HeadBucket"),
        ("PUT b", "CreateBucket"),
        ("PUT b cors", "PutBucketCors"),
        ("DELETE b", "DeleteBucket"),
        ("DELETE b policy", "DeleteBucketPolicy"),
        ("POST b", "PostObject"),
        ("POST b delete", "DeleteObjects"),
        ("GET b/k", "GetObject"),
        ("GET b/k acl", "GetObjectAcl"),
        ("GET b/k attributes", "GetObjectAttributes"),
        ("GET b/k uploadId", "ListParts"),
        ("GET b/k partNumber", "GetObject"),
        ("HEAD b/k", "HeadObject"),
        ("PUT b/k", "PutObject"),
        ("PUT b/k tagging", "PutObjectTagging"),
        ("PUT b/k partNumber,uploadId", "UploadPart"),
        ("DELETE b/k", "DeleteObject"),
        ("DELETE b/k uploadId", "AbortMultipartUpload"),
        ("POST b/k uploads", "CreateMultipartUpload"),
        ("POST b/k uploadId", "CompleteMultipartUpload"),
        ("POST b/k", ""),
        ("PATCH b/k", ""),
        ("OPTIONS b", ""),
        ("POST", "AssumeRoleWithWebIdentity"),
    ],
)
def test_an_operation_has_the_name_that_s3_gives_it(asked: str, name: str) -> None:
    method, place, query = ([*asked.split(), "", ""])[:3]
    bucket, _, key = place.partition("/")
    assert operation_name(method, bucket, key, query.split(",")) == name


def test_a_request_with_a_source_copies() -> None:
    assert operation_name("PUT", "b", "k", (), copies=True) == "CopyObject"
    assert operation_name("PUT", "b", "k", ("partNumber", "uploadId"), copies=True) == "UploadPartCopy"
    assert operation_name("DELETE", "b", "k", (), copies=True) == "DeleteObject"
