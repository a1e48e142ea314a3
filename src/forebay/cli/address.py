"""What people type for an object: `s3://bucket/key` and `bucket/key` are the same.

Theory. Verbs that work on many objects take a name as a file system does: `run-1` is the object of that name and what
lies in the folder `run-1/`, and never `run-10`. What begins so is written `run-1*`, and S3's own listings stay as S3
has them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from forebay.core.errors import ForebayError, Invalid, NotFound
from forebay.core.types import check_bucket_name, check_key

if TYPE_CHECKING:
    from forebay.client.sync import Client


class Address(NamedTuple):
    """A bucket and the rest, which may be empty: a key, or a prefix of keys."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class Selection(NamedTuple):
    """Which objects an address of many means: the one at `key`, unless that is empty, and all that begin with `prefix`,
    which is "" for a whole bucket."""

    key: str
    prefix: str


def selection(address: Address) -> Selection:
    """`a` is the object and the folder of that name, `a/` the folder, `a*` whatever begins so, "" the bucket. `Invalid`
    for a `*` elsewhere, which `matching` is for."""
    if "*" in address.key[:-1]:
        raise Invalid(f"{address} has a * that is not at its end: name a prefix, or list the objects with --exact")
    if address.key.endswith("*"):
        return Selection("", address.key[:-1])
    if not address.key or address.key.endswith("/"):
        return Selection("", address.key)
    return Selection(address.key, address.key + "/")


def matching(address: Address) -> tuple[Selection, re.Pattern[str] | None]:
    """As `selection`, and the form of the keys where a `*` stands elsewhere: it is any run of characters, also `/`."""
    start, _, _ = address.key.partition("*")
    if "*" not in address.key[:-1]:
        return selection(address), None
    return Selection("", start), re.compile(".*".join(map(re.escape, address.key.split("*"))), re.DOTALL)


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


def no_object(client: Client, at: Address, error: NotFound) -> NotFound:
    """What to raise where `at` should have been one object and `error` says that it is not: it may be a folder."""
    folder = at.key.rstrip("/") + "/"
    try:
        is_folder = error.code != "NoSuchBucket" and bool(client.list_page(at.bucket, folder, limit=1).entries)
    except ForebayError:  # who may read the key need not be allowed to list
        is_folder = False
    if not is_folder:
        return error
    return NotFound(f"{at.bucket}/{at.key} is a folder: add -r for all objects in it", code=error.code)


def nothing_there(at: Address) -> NotFound:
    """What to raise where an address of many selects nothing."""
    (key, prefix), form = matching(at)
    if not key:
        fits = "is named like" if form else "begins with"
        what = f"{at.bucket}/{at.key if form else prefix}"
        return NotFound(f"nothing {fits} {what}: see `forebay ls {at.bucket}/`", code="NoSuchKey")
    return NotFound(
        f"there is neither an object nor a folder {at.bucket}/{key}: see `forebay ls {at.bucket}/{key}`, and write "
        f"{at.bucket}/{key}* for all that begins so",
        code="NoSuchKey",
    )
