"""What a request's Range and If-* headers mean for one version of an object.

Theory. A read is decided in two steps: first the *conditions* (does the caller want this version at all?), then the
*range* (which bytes of it?). RFC 9110 section 13.2.2 fixes the order of the conditions, and S3 follows it: If-Match,
else If-Unmodified-Since; then If-None-Match, else If-Modified-Since; then Range, which If-Range may switch off. A
malformed header is ignored, as the RFC asks (13.1.3, 14.2). Only a well-formed range outside the object is an error
(416). S3 answers a request for several ranges with the whole object, which the RFC allows (a server may ignore Range).

Entity tags arrive quoted, or bare from clients that copy them from a listing; both are understood. If-Match and
If-Range compare strongly (a weak tag never matches), If-None-Match weakly (RFC 9110, 8.8.3.2). Times compare in whole
seconds, since an HTTP date has no more.

Rejected: `email.utils` for dates (accepts almost anything, and "almost" differs between versions of Python);
multipart/byteranges (no S3 client asks for it, and S3 does not serve it).

Invariants. (1) No input text raises, except `resolve` with `InvalidRange`. (2) The answer depends only on the headers,
the entity tag and the modification time.
"""

from __future__ import annotations

import re
from calendar import timegm
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from forebay.core.types import RangeSpec

_POSITION_MAX = 10**18  # far above any object (50 TB); longer numbers are clamped to it, not parsed
_RANGE = re.compile(r"bytes=[ \t]*([0-9]*)[ \t]*-[ \t]*([0-9]*)[ \t]*", re.IGNORECASE)
_TAG = re.compile(r'[ \t]*(?:(W/)?"([^"]*)"|([^\s,"]+))[ \t]*(?:,|$)')
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_FIXDATE = re.compile(r"[A-Za-z]{3}, ([0-9]{2}) ([A-Za-z]{3}) ([0-9]{4}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) GMT")
_RFC850 = re.compile(r"[A-Za-z]{6,9}, ([0-9]{2})-([A-Za-z]{3})-([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2}) GMT")
_ASCTIME = re.compile(r"[A-Za-z]{3} ([A-Za-z]{3}) ([ 0-9][0-9]) ([0-9]{2}):([0-9]{2}):([0-9]{2}) ([0-9]{4})")

Verdict = Literal[200, 304, 412]


def parse_range(value: str) -> RangeSpec | None:
    """The one byte range that `value` (a Range header) asks for, or None where the whole object is the answer.

    None: malformed, another unit, last before first, or more than one range. `bytes=-0` and a first byte beyond the
    object are well-formed: `RangeSpec.resolve` refuses them once the size is known.
    """
    match = _RANGE.fullmatch(value)
    if match is None:
        return None
    first, last = match[1], match[2]
    if not first:
        return RangeSpec(None, _position(last)) if last else None
    if not last:
        return RangeSpec(_position(first), None)
    start, end = _position(first), _position(last)
    return RangeSpec(start, end) if start <= end else None


def _position(digits: str) -> int:
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) <= 18 else _POSITION_MAX


def parse_http_date(text: str) -> int | None:
    """Unix time of an HTTP date in any of its three forms (RFC 9110, 5.6.7), or None if it is none of them."""
    if match := _FIXDATE.fullmatch(text):
        day, month, year = match[1], match[2], int(match[3])
        clock = match[4], match[5], match[6]
    elif match := _RFC850.fullmatch(text):
        day, month, year = match[1], match[2], int(match[3])
        year += 1900 if year >= 70 else 2000  # no object was modified before 1970
        clock = match[4], match[5], match[6]
    elif match := _ASCTIME.fullmatch(text):
        month, day, year = match[1], match[2], int(match[6])
        clock = match[3], match[4], match[5]
    else:
        return None
    if month.lower() not in _MONTHS:
        return None
    hour, minute, second = (int(part) for part in clock)
    if not (year >= 1 and 1 <= int(day) <= 31 and hour <= 23 and minute <= 59 and second <= 60):
        return None
    return timegm((year, _MONTHS.index(month.lower()) + 1, int(day), hour, minute, second))


def _tags(value: str) -> list[tuple[bool, str]] | None:
    """(weak, tag) for each entity tag of a list; None for `*`; an item that is no tag ends the list."""
    if value.strip() == "*":
        return None
    found, at = [], 0
    while match := _TAG.match(value, at):
        found.append((match[1] is not None, match[3] if match[2] is None else match[2]))
        if match.end() == len(value):
            break
        at = match.end()
    return found


class Conditions(msgspec.Struct, frozen=True):
    """The If-* headers of a GET or HEAD as they arrived; None where absent."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None

    def judge(self, etag: str, modified_s: float) -> Verdict:
        """200: go on; 304: the caller has this version; 412: the caller does not want this version.

        `etag` is the current entity tag without quotes (a weak one keeps its `W/` prefix); `modified_s` is Unix time.
        """
        if self.if_match is not None:
            tags = _tags(self.if_match)
            if tags is not None and not _strongly_in(tags, etag):
                return 412
        elif self.if_unmodified_since is not None:
            limit = parse_http_date(self.if_unmodified_since)
            if limit is not None and int(modified_s) > limit:
                return 412
        if self.if_none_match is not None:
            tags = _tags(self.if_none_match)
            if tags is None or any(tag == _opaque(etag) for _, tag in tags):
                return 304
        elif self.if_modified_since is not None:
            limit = parse_http_date(self.if_modified_since)
            if limit is not None and int(modified_s) <= limit:
                return 304
        return 200


CONDITION_NAMES: Final = (b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since")


def conditions_of(headers: Mapping[bytes, bytes]) -> Conditions | None:
    """The conditions among a request's headers (names in lower case), or None if there is none."""
    found = [headers.get(name) for name in CONDITION_NAMES]
    if found == [None, None, None, None]:
        return None
    return Conditions(*(None if value is None else value.decode("latin-1") for value in found))


def _opaque(etag: str) -> str:
    return etag[2:].strip('"') if etag.startswith("W/") else etag


def _strongly_in(tags: list[tuple[bool, str]], etag: str) -> bool:
    return bool(etag) and not etag.startswith("W/") and any(not weak and tag == etag for weak, tag in tags)


def range_applies(if_range: str | None, etag: str, modified_s: float) -> bool:
    """Whether a Range header is to be obeyed, given the If-Range header beside it (RFC 9110, 13.1.5)."""
    if if_range is None:
        return True
    text = if_range.strip()
    if (date := parse_http_date(text)) is not None:
        return date == int(modified_s)
    tags = _tags(text)
    return tags is not None and len(tags) == 1 and _strongly_in(tags, etag)
