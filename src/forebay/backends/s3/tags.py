"""Reads and changes the tags of an existing object at S3 and Azure.

Theory. Tags that come with a put are a header (`s3/writing.py`, `azure/writing.py`). For an existing object both
services have the same small document, at different addresses. Changing it leaves bytes, ETag and version alone. The
whole set is replaced, so the last writer wins.

Invariant. Tags are spelt as `core/s3rules/tags.py` spells them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from forebay.backends.http.requests import Answer, Wire
from forebay.backends.s3.listing import parse
from forebay.backends.seam import Body
from forebay.core.s3rules.tags import format_tags, parse_tags


class TagsDocument(NamedTuple):
    """Where the document is, and what it is called."""

    query: tuple[tuple[str, str], ...]
    root: str


AMAZON: Final = TagsDocument((("tagging", ""),), "Tagging")
AZURE: Final = TagsDocument((("comp", "tags"),), "Tags")


async def ask_tags(wire: Wire, key: str, document: TagsDocument) -> Answer:
    """The answer with an object's tags."""
    return await wire.run(functools.partial(wire.ask, list(document.query), key=key))


def tags_in(answer: Answer, what: str, document: TagsDocument) -> str:
    """The tags in an answer that `ask_tags` got; `Unavailable` if there is no such document in it."""
    root = parse(answer, what, document.root)
    return format_tags([(_text(tag, "Key"), _text(tag, "Value")) for tag in root.iterfind("{*}TagSet/{*}Tag")])


def _text(tag: ElementTree.Element, name: str) -> str:
    return tag.findtext("{*}" + name) or ""


async def tell_tags(wire: Wire, key: str, tags: str, document: TagsDocument, headers: Mapping[str, str]) -> Answer:
    """Make `tags` the object's; the answer to it."""
    inner = "".join(
        f"<Tag><Key>{escape(name)}</Key><Value>{escape(value)}</Value></Tag>" for name, value in parse_tags(tags)
    )
    data = f"<{document.root}><TagSet>{inner}</TagSet></{document.root}>".encode()
    sent = {"content-type": "application/xml", **headers}
    body = Body(len(data), data, md5=hashlib.md5(data, usedforsecurity=False).hexdigest())
    return await wire.tell("PUT", key, query=document.query, headers=sent, body=body)
