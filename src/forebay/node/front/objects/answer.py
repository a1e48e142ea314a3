"""How to answer a read once the object is known. The one place that decides, for every API.

Theory. Conditions, a part number and a range can be judged only against one version of the object, and a miss learns
the version later than a hit. So they are gathered here into a `Decide`, which `Reads` calls once with the record. The
order is RFC 9110's (13.2.2): conditions, then the part or range, and only then what the API adds or replaces.

Invariant. A decision depends only on the request's headers and the record.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.core.errors import Invalid, NotSupported, Precondition
from forebay.core.machines.uploads import PARTS_CHECKSUMS_HEADER, SIZES_HEADER, part_range
from forebay.core.record import Record, split_head
from forebay.core.s3rules.conditions import CONDITION_NAMES, conditions_of, parse_range, range_applies
from forebay.core.types import RangeSpec
from forebay.node.front.http.requests import Request
from forebay.node.front.objects.reads import Answer, Decide, answer_plainly

DECIDED_BY: Final = frozenset((*CONDITION_NAMES, b"range"))  # a read with none of these has nothing to decide
_MULTIPART_ETAG: Final = re.compile(r".*-[0-9]+")
_SIZES: Final = re.compile(rb"^%b: ([0-9*,]+)\r?$" % SIZES_HEADER.encode(), re.IGNORECASE | re.MULTILINE)
_SUMS_OF_PARTS: Final = re.compile(rb"^%b: ([^\r]*)\r$" % PARTS_CHECKSUMS_HEADER.encode(), re.MULTILINE)
_TYPE: Final = b"x-amz-checksum-type"
_SUM: Final = re.compile(rb"^(x-amz-checksum-(?!type:)[a-z0-9]+: )([^\r]*)\r$", re.MULTILINE)
_KEPT_BY_304: Final = (b"etag:", b"last-modified:", b"cache-control:", b"expires:", b"vary:")


def asked_range(request: Request) -> RangeSpec | None:
    """The one range that the request asks for; None for the whole object."""
    return parse_range(request.header(b"range")) if b"range" in request.headers else None


def decide_by(
    request: Request,
    asked: RangeSpec | None,
    *,
    part: int | None = None,
    replaced: tuple[bytes, ...] = (),
    extra: bytes = b"",
) -> Decide:
    """How to answer `request`. `replaced` are beginnings (`b"expires:"`) of stored lines that `extra` replaces."""
    headers = request.headers
    conditions = conditions_of(headers)
    if_range = request.header(b"if-range") if b"if-range" in headers else None
    checksums = headers.get(b"x-amz-checksum-mode", b"").upper() == b"ENABLED"

    def decide(record: Record) -> Answer:
        if conditions is not None:
            verdict = conditions.judge(record.etag, record.modified_s)
            if verdict == 412:
                raise Precondition(
                    "At least one of the pre-conditions you specified did not hold: read the object's current state",
                    code="PreconditionFailed",
                )
            if verdict == 304:
                return Answer(304, _only(record.head, _KEPT_BY_304) + extra, 0, 0)
        wanted, said = asked, extra
        if part is not None:
            wanted, counted = _range_of_part(part, record)
            said += counted
        elif asked is not None and not range_applies(if_range, record.etag, record.modified_s):
            wanted = None
        status, head, start, end = answer_plainly(record, wanted, said)
        if replaced:
            head = _without(head[: len(head) - len(said)], replaced) + said
        if checksums and (status == 200 or part is not None):  # a checksum of the whole says nothing about a range
            head = _checksums(record.head, part if _MULTIPART_ETAG.fullmatch(record.etag) else None) + head
        return Answer(status, head, start, end)

    return decide


def _range_of_part(part: int, record: Record) -> tuple[RangeSpec | None, bytes]:
    """The part, and the line that says how many there are. An object that came in one piece is its only part; of one
    that came in parts the sizes are known where this node put it together, else to the backend alone."""
    if _MULTIPART_ETAG.fullmatch(record.etag):
        sizes = _SIZES.search(record.head)
        if sizes is None:
            raise NotSupported("parts of a multipart object are not known here: read ranges of it instead")
        start, end, parts = part_range(sizes[1].decode(), part)
        counted = b"x-amz-mp-parts-count: %d\r\n" % parts
        if start == end and record.size_bytes:
            raise Invalid(f"part {part} is empty: there is nothing to read", code="InvalidRange")
        return (RangeSpec(start, end - 1) if start < end else None), counted
    if part > 1:
        raise Invalid("The requested partnumber is not satisfiable: the object has one part", code="InvalidPartNumber")
    return (RangeSpec(0, None) if record.size_bytes else None), b""


def _checksums(head: bytes, part: int | None) -> bytes:
    """The lines that say the object's checksum and its type, from its record's head; or that of its part `part`."""
    own = split_head(head)[0]
    found = _only(own, (b"x-amz-checksum-",))
    whole = _SUM.search(found)
    if whole is None:
        return b""
    if _TYPE not in found:  # it came with one body, or from a backend
        found += _TYPE + (b": COMPOSITE\r\n" if b"-" in whole[2] else b": FULL_OBJECT\r\n")
    if part is None:
        return found
    sums = _SUMS_OF_PARTS.search(own)
    if sums is None:
        return b""
    return found.replace(whole[0], whole[1] + sums[1].split(b",")[part - 1] + b"\r")


def _only(head: bytes, prefixes: tuple[bytes, ...]) -> bytes:
    return b"".join(line for line in head.splitlines(keepends=True) if line.lower().startswith(prefixes))


def _without(head: bytes, prefixes: tuple[bytes, ...]) -> bytes:
    return b"".join(line for line in head.splitlines(keepends=True) if not line.lower().startswith(prefixes))
