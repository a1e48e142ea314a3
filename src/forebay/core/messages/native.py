"""Messages of the native API that no call to the engine expresses.

Theory. Most of the native API is `calls.py` as JSON. A Complete is not: its path and query name the upload, and its
headers hold the conditions, like a PUT's. So its body has a type of its own, which client and front share.

Invariants. (1) Everything that decodes fits the call that a front makes of it: numbers have bounds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from forebay.core import limits


class ChosenPart(msgspec.Struct, array_like=True, frozen=True):
    """One part that a Complete names: `[number]`, `[number, etag]` or `[number, etag, checksums]`.

    An empty `etag` accepts whatever part has the number. `checksums` maps algorithms to base64.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=limits.PARTS_MAX)]
    etag: str = ""
    checksums: dict[str, str] = {}


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts that make the object, in ascending order.

    `size_bytes` and `checksums` say what the whole object will have; the node refuses to complete anything else.
    """

    parts: list[ChosenPart]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=limits.OBJECT_BYTES_MAX)] | None = None
    checksums: dict[str, str] = {}
