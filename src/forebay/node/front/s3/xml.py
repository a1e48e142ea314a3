"""Writes and parses the XML of S3.

Theory. S3's answers are flat and few, so they are joined from text. What matters is that nothing from outside enters
unescaped. Characters that XML 1.0 cannot carry (most controls) become character references, as S3 writes them. A strict
parser refuses such a document; a client with such keys asks for `encoding-type=url`, as all SDKs do.

Documents from clients are read whole. None may have more elements than its operation can name, and they are counted
before anything is built. Names are taken as written, without their prefixes. (With namespaces each name grows by its
URI: 200 KB of them took four seconds and gigabytes.) A document type is refused: it is the door for entities that
expand or fetch. A long document is parsed in a thread, a piece at a time (`read`), while the loop serves hits.

Invariants. (1) `escape` leaves no `<`, `&`, quote or control character. (2) `parse` takes time and memory in proportion
to the document's length.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from datetime import date
from functools import lru_cache
from typing import Final, TypeVar
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from forebay.core.errors import Invalid

DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE: Final = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
CONTENT_TYPE: Final = b"Content-Type: application/xml\r\n"
ELEMENTS_MAX: Final = 16_384  # of a document that is a setting: what SETTING_BYTES_MAX can hold
AT_ONCE_BYTES_MAX: Final = 64 * 1024  # a longer document is understood in a thread
_PIECE_BYTES: Final = 64 * 1024  # expat keeps other threads out while it takes one: about a millisecond
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_YEAR_10000_S: Final = 253402300800
_UNSAFE: Final = re.compile("[&<>\"'\x00-\x1f\x7f\ufffe\uffff]")
# What no XML document can hold, escaped or not.
UNREADABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
ResultT = TypeVar("ResultT")
_NAMED: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;"}


def escape(text: str) -> str:
    """`text` as XML character data or attribute value."""
    return _UNSAFE.sub(_reference, text) if _UNSAFE.search(text) else text


def _reference(match: re.Match[str]) -> str:
    char = match[0]
    return _NAMED.get(char) or f"&#x{ord(char):x};"


def element(name: str, text: str) -> str:
    """`<name>text</name>`, escaped; nothing is left out when the text is empty."""
    return f"<{name}>{escape(text)}</{name}>"


def readable(text: str) -> str:
    """`text` with what XML cannot carry replaced, for people's eyes: an error document must always parse."""
    return UNREADABLE.sub("\ufffd", text)


def timestamp(modified_s: float) -> str:
    """ISO 8601 in UTC with milliseconds, S3's form; times that no calendar holds are clamped."""
    if not 0 <= modified_s < _YEAR_10000_S:
        modified_s = 0.0
    day, millisecond = divmod(int(modified_s * 1000), 86_400_000)
    minute, millisecond = divmod(millisecond, 60_000)
    second, millisecond = divmod(millisecond, 1000)
    return f"{_day(day)}T{minute // 60:02}:{minute % 60:02}:{second:02}.{millisecond:03}Z"


@lru_cache(256)
def _day(days: int) -> str:
    """The date `days` after the epoch; objects of a listing share few."""
    return date.fromordinal(_EPOCH_DAY + days).isoformat()


def document(root: str, inner: str) -> bytes:
    """A whole document with S3's namespace."""
    return f"{DECLARATION}<{root}{NAMESPACE}>{inner}</{root}>".encode()


def parse(body: bytes, root: str, elements_max: int = ELEMENTS_MAX) -> Element:
    """The element tree of a document whose root is `root`, prefixes taken off. `Invalid` (`MalformedXML`), also for one
    of more than `elements_max` elements."""
    if body.count(b"<") > 2 * elements_max:  # an element takes one or two
        raise malformed(f"it has more than {elements_max} elements, where none that is asked for here has as many")
    builder = TreeBuilder()
    parser = expat.ParserCreate("utf-8")  # whatever it declares: another encoding would hide what is looked for
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = _refuse_doctype
    try:
        for at in range(0, len(body), _PIECE_BYTES):
            parser.Parse(body[at : at + _PIECE_BYTES], False)
            if at - parser.CurrentByteIndex > _PIECE_BYTES:  # it waits for the end of a tag
                raise malformed(f"a tag in it is longer than {_PIECE_BYTES} bytes")
        parser.Parse(b"", True)
        tree = builder.close()
    except expat.ExpatError as error:
        raise malformed(str(error)) from None
    for found in tree.iter():
        found.tag = found.tag.rpartition(":")[2]
        if found.attrib:
            found.attrib = {name.rpartition(":")[2]: value for name, value in found.attrib.items()}
    if tree.tag != root:
        raise malformed(f"its root is {tree.tag[:60]}, not {root}")
    return tree


async def read(body: bytes, understand: Callable[[bytes], ResultT]) -> ResultT:
    """What `understand` makes of a document, without making others wait for a long one. Raises what it raises."""
    if len(body) <= AT_ONCE_BYTES_MAX:
        return understand(body)
    return await asyncio.to_thread(understand, body)


def _refuse_doctype(*_: object) -> None:
    raise malformed("a document type has no place in it")


def malformed(what: str) -> Invalid:
    """What to say of a document that is not what it must be."""
    return Invalid(
        f"The XML you provided was not well-formed or did not validate against our published schema: {what}",
        code="MalformedXML",
    )
