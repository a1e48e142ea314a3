"""Parses and formats an object's tags.

Theory. Tags are a set of pairs that S3 keeps beside an object. They arrive as a query string (the header
`x-amz-tagging` of a PUT, CopyObject or CreateMultipartUpload) or as XML (PutObjectTagging). The node keeps them as that
query string in one canonical spelling, among the object's stored headers. Tags are metadata for people and billing. The
allowed characters are those that every store takes: letters, digits and spaces of any script, and `+ - = . _ : / @`.

The stored headers hold the tags and their number, which S3 reports with every read. A backend takes tags as an argument
of their own, so `without_tags` removes them from the headers.

Invariant. `format_tags(parse_tags(text))` is the same for every spelling of the same tags in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote_plus

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.types import Headers

HEADER: Final = "x-amz-tagging"
COUNT_HEADER: Final = "x-amz-tagging-count"
Tags = tuple[tuple[str, str], ...]
_CHARS: Final = re.compile(r"[\w\s+\-=._:/@]*")


def check_tags(tags: Sequence[tuple[str, str]]) -> Tags:
    """The tags if S3 would keep them for an object, else `Invalid` (`InvalidTag`) saying which rule they break."""
    if len(tags) > limits.TAGS_MAX:
        raise Invalid(
            f"Object tags cannot be greater than {limits.TAGS_MAX}: {len(tags)} are given, leave some out",
            code="InvalidTag",
        )
    seen = set()
    for key, value in tags:
        if not 1 <= len(key) <= limits.TAG_KEY_CHARS_MAX:
            raise Invalid(
                f"The TagKey you have provided is invalid: use 1 to {limits.TAG_KEY_CHARS_MAX} characters",
                code="InvalidTag",
            )
        if len(value) > limits.TAG_VALUE_CHARS_MAX:
            raise Invalid(
                f"The TagValue you have provided is invalid: use at most {limits.TAG_VALUE_CHARS_MAX} characters",
                code="InvalidTag",
            )
        if not _CHARS.fullmatch(key) or not _CHARS.fullmatch(value):
            raise Invalid(
                "a tag holds a character that is not allowed: use letters, digits, spaces and + - = . _ : / @",
                code="InvalidTag",
            )
        if key.startswith("aws:"):
            raise Invalid("System tags cannot be added/updated by requester: rename aws:…", code="InvalidTag")
        if key in seen:
            raise Invalid(f"Cannot provide multiple Tags with the same key: {key!r} is there twice", code="InvalidTag")
        seen.add(key)
    return tuple(tags)


def parse_tags(text: str) -> Tags:
    """Tags from the header's query string, checked; a key without `=` has the value "". `Invalid` as `check_tags`, and
    `InvalidArgument` for what is no UTF-8."""
    try:
        pairs = [
            (unquote_plus(key, errors="strict"), unquote_plus(value, errors="strict"))
            for key, _, value in (part.partition("=") for part in text.split("&") if part)
        ]
    except UnicodeDecodeError:
        raise Invalid(
            "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag "
            "name duplicates: encode it so",
            code="InvalidArgument",
        ) from None
    return check_tags(pairs)


def format_tags(tags: Sequence[tuple[str, str]]) -> str:
    """The query string of `tags`; "" for none."""
    return "&".join(f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in tags)


def with_tags(headers: Headers, tags: str) -> Headers:
    """Stored headers of an object that has these tags, and no others."""
    kept = without_tags(headers) if headers else headers
    return (*kept, (HEADER, tags), (COUNT_HEADER, str(len(parse_tags(tags))))) if tags else kept


def without_tags(headers: Headers) -> Headers:
    """Stored headers but for what tells of tags."""
    return tuple(each for each in headers if each[0] not in (HEADER, COUNT_HEADER))


def tags_among(headers: Headers) -> str | None:
    """The tags that stored headers tell, "" for none; None where they tell the number alone."""
    found = dict(headers)
    if HEADER in found:
        return found[HEADER]
    return "" if found.get(COUNT_HEADER, "0") == "0" else None
