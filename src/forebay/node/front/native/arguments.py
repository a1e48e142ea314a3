"""What a native request says in its body and query, and the JSON of an answer."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from forebay.core.errors import Invalid
from forebay.node.front.http.requests import Request, decode_query

JSON: Final = b"Content-Type: application/json\r\n"
encode = msgspec.json.Encoder().encode


def decode_body(request: Request, type_: Any) -> Any:
    """The request's body as a `type_`. `Invalid` if it is none."""
    try:
        return msgspec.json.decode(request.body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the body is not the JSON that is expected here: {error}; see /-/openapi.json") from None


def flag_of(request: Request, name: str) -> bool:
    """Whether the query gives `name` as 1 or true."""
    return decode_query(request.query).get(name, "") in ("1", "true")


def number_of(query: dict[str, str], name: str, default: int, *, least: int = 0, most: int) -> int:
    """The number that the query gives under `name`. `Invalid` if it is none, or outside `least` to `most`."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
        raise Invalid(f"{name} is not a number from {least} to {most}: give one, or leave it out")
    return int(text)
