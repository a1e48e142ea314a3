"""Multipart uploads as decisions: which parts make the object, whether they may, and the object's ETag and checksum.

Theory. An upload is a set of numbered parts; the object is the parts that Complete names, in order. Every decision
follows from descriptions of parts (number, size, MD5, one checksum), never from bytes. The entity tag is the MD5 of the
parts' MD5s, and their number. A COMPOSITE checksum is the checksum of the parts' checksums. A FULL_OBJECT checksum is
combined from the parts' CRCs and sizes. So Complete reads no bytes.

A part's file name *is* its description (`name_of`, `parse_name`). One rename makes a part whole, described and the
latest of its number, on any filesystem. If a stop left two files of one number, the higher `seq` counts.

Rejected: a description beside each part (two files that a stop can part); the metadata store (a synced transaction for
each part, on the loop).

Invariants. (1) `parse_name(name_of(part)) == part`. (2) What `choose` returns is in ascending order of number, each
part once, and only the last is below PART_BYTES_MIN.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, cast

from forebay.core import limits
from forebay.core.errors import Invalid, NotFound
from forebay.core.record import OWN_HEADERS
from forebay.core.s3rules.checksums import ALGORITHMS, CRC_BYTES, DIGEST_BYTES, Checksum, joined
from forebay.core.types import Headers

ChecksumType = Literal["", "COMPOSITE", "FULL_OBJECT"]
AskedPart = tuple[int, str, dict[str, str]]  # number, ETag ("" for any), checksums that the client repeats

SIZES_HEADER: Final = "x-forebay-part-sizes"  # among an object's stored headers; never sent to a backend
SIZES_CHARS_MAX: Final = 200
PARTS_CHECKSUMS_HEADER: Final = "x-forebay-part-checksums"  # the same for their checksums
PARTS_CHECKSUMS_CHARS_MAX: Final = 1000
HEARD_S: Final = 60.0  # by then a node that reaches the cluster's store has heard of whoever came
_CHECKSUM_HEADER: Final = "x-amz-checksum-"
_NAME: Final = re.compile(r"(\d{5})-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]{32})-([A-Z0-9]*)-([0-9a-f]*)")


class Part(NamedTuple):
    """One part that is here. `md5` is hex: the part's ETag. `checksum` is base64, "" if `algorithm` is. `seq` grows
    with each part of the upload. `modified_s` is Unix time, at most to the millisecond."""

    number: int
    seq: int
    size_bytes: int
    md5: str
    modified_s: float
    algorithm: str = ""
    checksum: str = ""


def name_of(part: Part) -> str:
    """The part's file name, at most 230 characters."""
    digest = base64.b64decode(part.checksum).hex()
    numbers = f"{part.number:05}-{part.seq:x}-{round(part.modified_s * 1000):x}-{part.size_bytes:x}"
    return f"{numbers}-{part.md5}-{part.algorithm}-{digest}"


def parse_name(name: str) -> Part | None:
    """The part that a file name describes; None if it describes none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number, seq, modified_ms, size_bytes, md5, algorithm, digest = match.groups()
    if len(digest) % 2 or bool(digest) != bool(algorithm):
        return None
    checksum = base64.b64encode(bytes.fromhex(digest)).decode()
    return Part(int(number), int(seq, 16), int(size_bytes, 16), md5, int(modified_ms, 16) / 1000, algorithm, checksum)


def latest(parts: Sequence[Part]) -> tuple[dict[int, Part], list[Part]]:
    """The current part of each number, and the parts that a later one of their number replaced."""
    kept: dict[int, Part] = {}
    replaced = []
    for part in sorted(parts, key=lambda part: part.seq):
        if part.number in kept:
            replaced.append(kept[part.number])
        kept[part.number] = part
    return kept, replaced


# --- what a client may ask -------------------------------------------------------------------------------------------
def no_such_upload(upload_id: str) -> NotFound:
    """The error for an upload that is not open."""
    return NotFound(
        f"there is no upload {upload_id[:64]!r} of this key: it was completed, aborted or never begun: begin another",
        code="NoSuchUpload",
    )


def new_id(created_s: float, drawn: str, node: str) -> str:
    """The id of an upload that begins; `node` is who has it, "" without a cluster."""
    return f"{int(created_s * 1000):012x}{drawn}{node}"


def is_new(upload_id: str, now_s: float) -> bool:
    """Whether an upload of this id began (or will, by another's clock) so near to now that not every node may have
    heard of the one that has it."""
    try:
        return abs(now_s - int(upload_id[:12], 16) / 1000) < HEARD_S
    except ValueError:
        return False


def check_part(number: int, size_bytes: int) -> None:
    """Raise `Invalid` if a part may not have this number or size."""
    if not 1 <= number <= limits.PARTS_MAX:
        raise Invalid(
            f"Part number must be an integer between 1 and {limits.PARTS_MAX}, inclusive", code="InvalidArgument"
        )
    if size_bytes > limits.PUT_BYTES_MAX:
        raise Invalid(
            f"a part of {size_bytes} bytes is above {limits.PUT_BYTES_MAX}: send smaller parts", code="EntityTooLarge"
        )


def settle_checksum(algorithm: str, kind: str) -> tuple[str, ChecksumType]:
    """The algorithm and type of an upload whose client asks for these; `Invalid` for what S3 refuses."""
    algorithm, kind = algorithm.upper(), kind.upper()
    if not algorithm:
        if kind:
            raise Invalid(
                "The x-amz-checksum-type header can only be used with the x-amz-checksum-algorithm header",
                code="InvalidRequest",
            )
        return "", ""
    if algorithm not in DIGEST_BYTES:
        raise Invalid(
            f"Checksum algorithm provided is unsupported. Use one of {', '.join(ALGORITHMS)}", code="InvalidRequest"
        )
    kind = kind or ("FULL_OBJECT" if algorithm == "CRC64NVME" else "COMPOSITE")
    if kind not in ("COMPOSITE", "FULL_OBJECT"):
        raise Invalid(
            "Value for x-amz-checksum-type header is invalid: COMPOSITE or FULL_OBJECT", code="InvalidRequest"
        )
    if (kind == "FULL_OBJECT" and algorithm not in CRC_BYTES) or (kind == "COMPOSITE" and algorithm == "CRC64NVME"):
        raise Invalid(
            f"The {kind} checksum type cannot be used with the {algorithm.lower()} checksum algorithm",
            code="InvalidRequest",
        )
    return algorithm, cast(ChecksumType, kind)


def pick_checksum(algorithm: str, given: Mapping[str, str]) -> tuple[str, str]:
    """Which checksum of a part to keep: the upload's, or, if the upload has none, the first one given. ("", "") if
    there is none, or if the upload's must be computed. `Invalid` for one of another algorithm."""
    if not algorithm:
        return next(((name, value) for name, value in given.items() if name in DIGEST_BYTES), ("", ""))
    if given and algorithm not in given:
        raise Invalid(
            f"Checksum Type mismatch occurred, expected checksum Type: {algorithm.lower()}, actual checksum Type: "
            f"{next(iter(given)).lower()}",
            code="InvalidRequest",
        )
    return (algorithm, given[algorithm]) if given else ("", "")


# --- completing ------------------------------------------------------------------------------------------------------
def choose(
    parts: Mapping[int, Part], asked: Sequence[AskedPart], algorithm: str, kind: str, size_bytes: int | None
) -> list[Part]:
    """The parts that make the object, in order. `size_bytes` is the object's size according to the client (None: not
    given).

    `Invalid`, with S3's codes: MalformedXML (none or too many), InvalidPartOrder, InvalidPart (not there, or another
    ETag or checksum), EntityTooSmall, EntityTooLarge, InvalidRequest (a checksum missing, another size).
    """
    if not 1 <= len(asked) <= limits.PARTS_MAX:
        raise Invalid(f"name 1 to {limits.PARTS_MAX} parts to complete the upload", code="MalformedXML")
    chosen: list[Part] = []
    for number, etag, given in asked:
        if chosen and number <= chosen[-1].number:
            raise Invalid(
                "The list of parts was not in ascending order. Parts must be ordered by part number",
                code="InvalidPartOrder",
            )
        part = parts.get(number)
        if part is None or etag.strip('"').lower() not in ("", part.md5) or not _repeats(part, given):
            raise Invalid(
                f"part {number} could not be found, or its ETag or checksum is another: list the parts, and send again "
                "what differs",
                code="InvalidPart",
            )
        if kind == "COMPOSITE" and algorithm not in given:
            raise Invalid(
                f"The upload was created using a {algorithm.lower()} checksum. The complete request must include the "
                f"checksum for each part. It was missing for part {number} in the request",
                code="InvalidRequest",
            )
        chosen.append(part)
    for part in chosen[:-1]:
        if part.size_bytes < limits.PART_BYTES_MIN:
            raise Invalid(
                f"part {part.number} has {part.size_bytes} bytes, and each part but the last needs "
                f"{limits.PART_BYTES_MIN}: send larger parts",
                code="EntityTooSmall",
            )
    _check_size(sum(part.size_bytes for part in chosen), size_bytes)
    return chosen


def _repeats(part: Part, given: Mapping[str, str]) -> bool:
    return part.algorithm not in given or given[part.algorithm] == part.checksum


def _check_size(total_bytes: int, promised_bytes: int | None) -> None:
    if promised_bytes not in (None, total_bytes):
        raise Invalid(
            f"x-amz-mp-object-size is {promised_bytes}, and the parts have {total_bytes} bytes", code="InvalidRequest"
        )
    if total_bytes > limits.OBJECT_BYTES_MAX:
        raise Invalid(
            f"the object would have {total_bytes} bytes; at most {limits.OBJECT_BYTES_MAX} are allowed",
            code="EntityTooLarge",
        )


def etag_of(md5s: Sequence[str]) -> str:
    """The entity tag of an object made of parts with these MD5s (hex)."""
    digest = hashlib.md5(b"".join(bytes.fromhex(md5) for md5 in md5s), usedforsecurity=False)
    return f"{digest.hexdigest()}-{len(md5s)}"


def same_request(asked: Sequence[AskedPart], etag: str) -> bool:
    """Whether a Complete names the parts that made the object with this entity tag: then it repeats an earlier
    Complete."""
    tags = [tag.strip('"').lower() for _, tag, _ in asked]
    try:
        return etag == (etag_of(tags) if all(tags) else f"{etag.partition('-')[0]}-{len(tags)}")
    except ValueError:
        return False


def checksum_of(algorithm: str, kind: str, parts: Sequence[Part]) -> str:
    """The object's checksum in S3's form: base64, with `-N` for COMPOSITE. "" if any part has no such checksum."""
    if not algorithm or any(part.algorithm != algorithm for part in parts):
        return ""
    digests = [base64.b64decode(part.checksum) for part in parts]
    if kind == "COMPOSITE":
        whole = Checksum(algorithm)
        whole.update(b"".join(digests))
        return f"{whole.base64()}-{len(parts)}"
    sizes = [part.size_bytes for part in parts]
    return base64.b64encode(joined(algorithm, list(zip(digests, sizes, strict=True)))).decode()


def check_form(promised: Mapping[str, str], algorithm: str, kind: str) -> None:
    """Check that the object checksum a client promises can belong to this upload. `Invalid`: InvalidRequest for another
    kind, BadDigest for a value that no checksum can have."""
    for name, said in promised.items():
        digest, _, count = said.partition("-")
        if name != algorithm or (count and kind != "COMPOSITE"):
            raise Invalid(
                f"Value for x-amz-checksum-{name.lower()} header is invalid: this upload has "
                f"{f'a {kind} checksum of {algorithm}' if algorithm else 'no checksum'}",
                code="InvalidRequest",
            )
        if not _is_digest(name, digest):
            raise _no_match(name, "it is base64 of another length, or none")


def check_promised(promised: Mapping[str, str], value: str) -> None:
    """Compare the object's checksum with what the client promised, which has passed `check_form`. `Invalid` (BadDigest)
    if it differs."""
    for name, said in promised.items():
        digest, _, count = said.partition("-")
        if digest != value.partition("-")[0] or (count and said != value):
            raise _no_match(name, value)


def _no_match(name: str, value: str) -> Invalid:
    return Invalid(f"The {name.lower()} you specified did not match what we calculated: {value}", code="BadDigest")


def _is_digest(algorithm: str, text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == DIGEST_BYTES.get(algorithm)
    except (binascii.Error, ValueError):
        return False


# --- checksums among stored headers ----------------------------------------------------------------------------------
def stored_checksum(headers: Headers) -> tuple[str, str]:
    """Algorithm and value of the checksum among an object's stored headers, ("", "") for none. A COMPOSITE value ends
    in `-` and the number of parts."""
    for name, value in headers:
        algorithm = name.removeprefix(_CHECKSUM_HEADER).upper()
        if name.startswith(_CHECKSUM_HEADER) and algorithm in DIGEST_BYTES:
            return algorithm, value
    return "", ""


def without_own(headers: Headers) -> Headers:
    """Stored headers without ours that describe one object's bytes: checksums and the sizes of parts."""
    return tuple(each for each in headers if not each[0].startswith(OWN_HEADERS))


def with_checksum(headers: Headers, algorithm: str, value: str) -> Headers:
    """Stored headers of an object whose bytes have this FULL_OBJECT checksum."""
    return (*headers, (_CHECKSUM_HEADER + algorithm.lower(), value), (_CHECKSUM_HEADER + "type", "FULL_OBJECT"))


# --- reading parts ---------------------------------------------------------------------------------------------------
def sizes_text(sizes: Sequence[int]) -> str:
    """The parts' sizes, to be stored with the object: `5242880*3,17`. "" if that would be too long for a header."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    text = ",".join(f"{size}*{count}" if count > 1 else str(size) for size, count in runs)
    return text if len(text) <= SIZES_CHARS_MAX else ""


def sizes_of(text: str) -> list[int]:
    """The sizes in a text that `sizes_text` made; [] for ""."""
    runs = (run.partition("*") for run in text.split(",") if run)
    return [int(size) for size, _, count in runs for _ in range(int(count or 1))]


def checksums_text(algorithm: str, parts: Sequence[Part]) -> str:
    """The parts' checksums, to be stored with the object; "" if a part has none, or if they would be too long."""
    if not algorithm or any(part.algorithm != algorithm for part in parts):
        return ""
    text = ",".join(part.checksum for part in parts)
    return text if len(text) <= PARTS_CHECKSUMS_CHARS_MAX else ""


def part_range(text: str, number: int) -> tuple[int, int, int]:
    """Where part `number` (in Complete's order, from 1) lies: start, end, and the number of parts. `Invalid`
    (`InvalidPartNumber`) if there are fewer."""
    start = parts = 0
    found: tuple[int, int] | None = None
    for run in text.split(","):
        size, _, count = run.partition("*")
        size_bytes, many = int(size), int(count or 1)
        if found is None and number <= parts + many:
            first = start + (number - parts - 1) * size_bytes
            found = first, first + size_bytes
        start, parts = start + many * size_bytes, parts + many
    if found is None:
        raise Invalid(
            f"The requested partnumber is not satisfiable: the object has {parts} parts", code="InvalidPartNumber"
        )
    return *found, parts


# --- listing ---------------------------------------------------------------------------------------------------------
def page_of(
    names: Sequence[tuple[str, str]], prefix: str, after_key: str, after_id: str, limit: int
) -> tuple[list[tuple[str, str]], bool]:
    """The next `limit` of sorted (key, upload id) whose key starts with `prefix`, and whether there are more.

    With `after_id`, later uploads of `after_key` count too; without it, only later keys (S3's rule for its markers).
    """
    place = max((after_key, after_id or "\U0010ffff"), (prefix, "")) if after_key else (prefix, "")
    start = bisect_right(names, place)
    page = []
    for name in names[start : start + limit + 1]:
        if not name[0].startswith(prefix):
            break
        page.append(name)
    return page[:limit], len(page) > limit
