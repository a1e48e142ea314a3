"""Presigned URLs of Signature Version 2: the published one, those that botocore makes, and none that was changed."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import pytest

from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.s3rules.names import Addressing
from forebay.core.s3rules.sigv4 import Verified, Verifier

KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
PUBLISHED = b"AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE&Signature=NpgCjnDzrM%2BWFzoENXmpNDUsSn8%3D&Expires=1175139620"
PUBLISHED_HOST = {b"host": b"johnsmith.s3.amazonaws.com"}


AMAZON = Addressing(["s3.amazonaws.com", "localhost"])


def verifier() -> Verifier:
    return Verifier({KEY_ID: SECRET}, AMAZON.bucket_of_host)


def test_the_published_url_verifies_until_it_expires() -> None:
    """Amazon S3 User Guide, "Query string request authentication alternative": the bucket is in the host's name."""
    asked = (b"GET", b"/photos/puppy.jpg", PUBLISHED, PUBLISHED_HOST)
    verified = verifier().verify(1175139620.0, *asked)
    assert isinstance(verified, Verified)
    assert (verified.key_id, verified.presigned) == (KEY_ID, True)
    with pytest.raises(Denied, match="expired") as caught:
        verifier().verify(1175139620.5, *asked)
    assert caught.value.code == "AccessDenied"
    with pytest.raises(Denied, match="too far off"):
        verifier().verify(1175139620.0 - 604_801, *asked)


@pytest.mark.parametrize(
    ("method", "path", "query", "code"),
    [
        (b"PUT", b"/photos/puppy.jpg", PUBLISHED, "SignatureDoesNotMatch"),
        (b"GET", b"/photos/other.jpg", PUBLISHED, "SignatureDoesNotMatch"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED + b"&acl", "SignatureDoesNotMatch"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED + b"&x-amz-acl=public-read", "SignatureDoesNotMatch"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED.replace(b"1175139620", b"1175139621"), "SignatureDoesNotMatch"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED.replace(b"EXAMPLE", b"NOBODY"), "InvalidAccessKeyId"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED + b"&Expires=1", "AuthorizationQueryParametersError"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED.replace(b"1175139620", b"soon"), "AccessDenied"),
        (b"GET", b"/photos/puppy.jpg", PUBLISHED.partition(b"&Expires")[0], "AuthorizationQueryParametersError"),
    ],
)
def test_a_url_that_was_changed_does_not_verify(method: bytes, path: bytes, query: bytes, code: str) -> None:
    with pytest.raises(ForebayError) as caught:
        verifier().verify(1175139600.0, method, path, query, PUBLISHED_HOST)
    assert isinstance(caught.value, Denied | Invalid)
    assert caught.value.code == code


def test_a_url_opens_what_it_was_signed_for_whatever_the_host_says() -> None:
    """The host is not signed: a URL for `photos/puppy.jpg` in one bucket must not open `puppy.jpg` in `photos`."""
    for host, path in (
        (b"johnsmith.elsewhere", b"/photos/puppy.jpg"),  # not a host that names a bucket here: the bucket is `photos`
        (b"johnsmith.s3.amazonaws.com", b"/johnsmith/photos/puppy.jpg"),  # the key is `johnsmith/photos/puppy.jpg`
    ):
        with pytest.raises(Denied) as caught:
            verifier().verify(1175139600.0, b"GET", path, PUBLISHED, {b"host": host})
        assert caught.value.code == "SignatureDoesNotMatch"
    path_style = (b"GET", b"/johnsmith/photos/puppy.jpg", PUBLISHED, {b"host": b"s3.amazonaws.com"})
    assert verifier().verify(1175139600.0, *path_style) is not None


@pytest.mark.parametrize("style", ["path", "virtual"])
@pytest.mark.parametrize(
    ("operation", "more"),
    [
        ("get_object", {}),
        (
            "get_object",
            {"ResponseContentType": "text/plain", "ResponseContentDisposition": 'attachment; filename="a b"'},
        ),
        ("put_object", {"ContentType": "text/x-story", "Metadata": {"colour": "blue"}}),
        ("upload_part", {"UploadId": "some/id", "PartNumber": 3}),
        ("delete_object", {}),
    ],
)
def test_what_botocore_presigns_verifies(style: Any, operation: str, more: dict[str, Any]) -> None:
    config = botocore.config.Config(signature_version="s3", s3={"addressing_style": style})
    s3 = boto3.client(
        "s3",
        endpoint_url="http://localhost:9400",
        region_name="us-east-1",
        aws_access_key_id=KEY_ID,
        aws_secret_access_key=SECRET,
        config=config,
    )
    url = urlsplit(s3.generate_presigned_url(operation, {"Bucket": "corpus", "Key": "a b/ü+c.txt", **more}, 60))
    method = {"get": b"GET", "put": b"PUT", "upload": b"PUT", "delete": b"DELETE"}[operation.partition("_")[0]]
    headers = {b"host": url.netloc.encode()}
    if "ContentType" in more:
        headers |= {b"content-type": b"text/x-story", b"x-amz-meta-colour": b"blue"}
    asked = (time.time(), method, url.path.encode(), url.query.encode(), headers)
    verified = verifier().verify(*asked)
    assert verified is not None
    assert verified.key_id == KEY_ID
    with pytest.raises(Denied):
        Verifier({KEY_ID: SECRET + "x"}).verify(*asked)
