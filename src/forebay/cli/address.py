"""What people type for an object: `s3://bucket/key` and `bucket/key` are the same."""

from __future__ import annotations

from typing import NamedTuple

from forebay.core.errors import Invalid
from forebay.core.types import check_bucket_name, check_key


class Address(NamedTuple):
    """A bucket and the rest, which may be empty: a key, or a prefix of keys."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def parse(text: str) -> Address:
    """The address that `text` names, with or without a key; `Invalid` says how to write it."""
    scheme, marks, rest = text.partition("://")
    if marks and scheme not in ("s3", "forebay"):
        raise Invalid(
            f"{text!r} is not an address in the node: write s3://BUCKET/KEY or BUCKET/KEY with a bucket of "
            "`forebay bucket ls` (`forebay bucket add NAME URL` adds one)"
        )
    bucket, _, key = (rest if marks else text).partition("/")
    if not bucket:
        raise Invalid(f"{text!r} names no bucket: write s3://BUCKET/KEY or BUCKET/KEY")
    check_bucket_name(bucket)
    if key:
        check_key(key)
    return Address(bucket, key)


def parse_object(text: str) -> Address:
    """As `parse`, for one object: a key is required."""
    address = parse(text)
    if not address.key:
        raise Invalid(f"{text!r} names a bucket and no object: write {address.bucket}/KEY")
    return address
