"""How a backend is to keep an object: what a bucket's options say, and what a write's own headers say instead."""

from __future__ import annotations

import pytest

from forebay.core.errors import Invalid
from forebay.core.s3rules.keeping import (
    ENCRYPTION,
    KMS_KEY,
    STORAGE_CLASS,
    check_encryption,
    keeping_among,
    keeping_of,
    kept_as,
    without_keeping,
)

OPTIONS = {"storage_class": "STANDARD_IA", "server_side_encryption": "aws:kms", "sse_kms_key_id": "alias/ours"}
KEPT = ((STORAGE_CLASS, "STANDARD_IA"), (ENCRYPTION, "aws:kms"), (KMS_KEY, "alias/ours"))


def test_options_become_the_headers_of_a_write() -> None:
    assert keeping_of(OPTIONS) == KEPT
    assert keeping_of({"access_tier": "Cool"}) == ((STORAGE_CLASS, "Cool"),)
    assert keeping_of({"region": "eu"}) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"storage_class": "two words"},
        {"access_tier": "a\r\nb"},
        {"server_side_encryption": "rot13"},
        {"sse_kms_key_id": "alias/ours"},
        {"server_side_encryption": "AES256", "sse_kms_key_id": "alias/ours"},
        {"server_side_encryption": "aws:kms", "sse_kms_key_id": "two words"},
    ],
)
def test_options_that_s3_would_refuse_are_refused_here(wrong: dict[str, str]) -> None:
    with pytest.raises(Invalid):
        keeping_of(wrong)


def test_what_a_write_says_replaces_what_the_bucket_says() -> None:
    assert kept_as(KEPT, ()) == KEPT
    assert dict(kept_as(KEPT, ((STORAGE_CLASS, "STANDARD"),))) == {**dict(KEPT), STORAGE_CLASS: "STANDARD"}
    # A key of the bucket's does not go with another algorithm.
    assert kept_as(KEPT, ((ENCRYPTION, "AES256"),)) == (KEPT[0], (ENCRYPTION, "AES256"))
    check_encryption("AES256", dict(kept_as(KEPT, ((ENCRYPTION, "AES256"),))).get(KMS_KEY, ""))


def test_stored_headers_are_taken_apart_and_nothing_else_is_lost() -> None:
    headers = (("content-type", "a/b"), *KEPT, ("x-amz-meta-a", "1"))
    assert keeping_among(headers) == KEPT
    assert without_keeping(headers) == (headers[0], headers[-1])
