"""GetObjectAttributes: an object's ETag, size, checksum and parts in one document.

Theory. The object's record has all of this, so nothing is read or computed. Sizes and checksums of parts are known if
this node put the parts together and still has the object. For an object from its backend only the number of parts is
known, from its ETag.

Rejected: asking the backend for its attributes (they may be of another version by then, and it does not have dirty
objects yet).

Invariant. The answer holds only what was asked for and is known.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.machines.uploads import PARTS_CHECKSUMS_HEADER, SIZES_HEADER, sizes_of, stored_checksum
from forebay.core.messages.calls import ObjectState
from forebay.core.s3rules.keeping import STANDARD, STORAGE_CLASS
from forebay.node.front.http.requests import Request
from forebay.node.front.s3.xml import document, element

_NAMES: Final = frozenset(("ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"))
_MULTIPART: Final = re.compile(r"[0-9a-f]{32}-([0-9]{1,5})")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


class Asked(NamedTuple):
    """Which attributes, and which page of the parts."""

    names: frozenset[str]
    after: int
    limit: int


def parse_attributes(request: Request) -> Asked:
    """What a request with `?attributes` asks for. `Invalid` (`InvalidArgument`)."""
    names = frozenset(name.strip() for name in request.header(b"x-amz-object-attributes").split(",") if name.strip())
    if not names or not names <= _NAMES:
        raise Invalid(
            f"x-amz-object-attributes must name some of {', '.join(sorted(_NAMES))}: nothing else is known",
            code="InvalidArgument",
        )
    after = _number(request, b"x-amz-part-number-marker", 0)
    return Asked(names, after, min(_number(request, b"x-amz-max-parts", limits.LIST_KEYS_MAX), limits.LIST_KEYS_MAX))


def _number(request: Request, name: bytes, default: int) -> int:
    text = request.header(name)
    if text and not _NUMBER.fullmatch(text):
        raise Invalid(f"{name.decode()} must be a whole number", code="InvalidArgument")
    return int(text) if text else default


def render_attributes(asked: Asked, state: ObjectState) -> bytes:
    """The document about the object."""
    algorithm, value = stored_checksum(tuple(state.headers.items()))
    inner = ""
    if "ETag" in asked.names:
        inner += element("ETag", state.etag)
    if "Checksum" in asked.names and value:
        kind = "COMPOSITE" if "-" in value else "FULL_OBJECT"
        inner += f"<Checksum>{element(f'Checksum{algorithm}', value)}{element('ChecksumType', kind)}</Checksum>"
    multipart = _MULTIPART.fullmatch(state.etag)
    if "ObjectParts" in asked.names and multipart is not None:
        inner += f"<ObjectParts>{_parts(asked, state, int(multipart[1]), algorithm)}</ObjectParts>"
    if "StorageClass" in asked.names:
        inner += element("StorageClass", state.headers.get(STORAGE_CLASS, STANDARD))
    if "ObjectSize" in asked.names:
        inner += element("ObjectSize", str(state.size_bytes))
    return document("GetObjectAttributesResponse", inner)


def _parts(asked: Asked, state: ObjectState, count: int, algorithm: str) -> str:
    sizes = sizes_of(state.headers.get(SIZES_HEADER, ""))
    inner = element("PartsCount", str(count))
    if len(sizes) != count:
        return inner
    checksums = state.headers.get(PARTS_CHECKSUMS_HEADER, "").split(",")
    shown = range(asked.after, min(asked.after + asked.limit, count))
    following = asked.after + len(shown)
    inner += element("PartNumberMarker", str(asked.after)) + element("NextPartNumberMarker", str(following))
    inner += element("MaxParts", str(asked.limit))
    inner += element("IsTruncated", "true" if shown and following < count else "false")
    for at in shown:
        said = element("PartNumber", str(at + 1)) + element("Size", str(sizes[at]))
        if len(checksums) == count and algorithm:
            said += element(f"Checksum{algorithm}", checksums[at])
        inner += f"<Part>{said}</Part>"
    return inner
