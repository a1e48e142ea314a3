"""Parses the objects in one page of an S3 listing, a thousand at a time, into columns.

Theory. A listing of a million objects is a thousand answers of a few hundred KB, and a training job waits for it before
its first batch. Parsing the XML as a tree costs about 5 µs an object. S3 and its compatible servers send a regular
shape: no comments, no entities except an ETag's quotes, the same tags in the same order for every object. One regular
expression, built from the first object's tags, parses that shape in two fifths of the time. The quick way returns None
for anything else rather than guess, and the answer is then parsed as a tree.

Rejected: obstore's listing (native XML, but it gives keys as paths: see `http/requests.py`); one search per field (as
quick, but the columns shift when one object has a field twice and another not at all).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

_SHAPE = re.compile(rb"\s*(?:<\?xml [^<>]*\?>)?\s*<ListBucketResult(?: [^<>]*)?>")
_END = b"</ListBucketResult>"
_TAG = re.compile(rb"<[^<>]+>")
_TEXTS = {b"Key": rb"([^<&]*)", b"Size": rb"([^<&]*)", b"LastModified": rb"([^<&]*)"}
_TEXTS[b"ETag"] = rb'(?:"|&quot;|&#34;)?([^<&"]*)(?:"|&quot;|&#34;)?'
_PREFIXES = re.compile(rb"<CommonPrefixes><Prefix>([^<&]*)</Prefix></CommonPrefixes>")
_TOKEN = re.compile(rb"<NextContinuationToken>([^<&]*)</NextContinuationToken>")


class Contents(NamedTuple):
    """What an answer holds, in its order. `token` is where the next page begins, if the server says so."""

    keys: list[str]
    sizes: list[int]
    etags: list[str]
    modified_s: list[float]
    prefixes: list[str]
    is_truncated: bool
    token: str


def quick(body: bytes) -> Contents | None:
    """An answer in the usual shape; None if this one is not, and has to be read as a tree."""
    begin = _SHAPE.match(body)
    if begin is None or not body.rstrip().endswith(_END) or b"<!" in body:
        return None
    if body.count(b"<EncodingType>url</EncodingType>") != 1:
        return None
    columns, prefixes = _columns(body), _PREFIXES.findall(body)
    if columns is None or len(prefixes) != body.count(b"<CommonPrefixes"):
        return None
    token = _TOKEN.search(body)
    try:
        return Contents(
            _decoded(columns[b"Key"]),
            list(map(int, columns[b"Size"])),
            [etag.decode() for etag in columns[b"ETag"]],
            [datetime.fromisoformat(time.decode()).timestamp() for time in columns[b"LastModified"]],
            _decoded(prefixes),
            body.count(b"<IsTruncated>true</IsTruncated>") == 1,
            token[1].decode() if token else "",
        )
    except ValueError:
        return None


def _columns(body: bytes) -> dict[bytes, Sequence[bytes]] | None:
    """The texts of the wanted fields of all objects; None unless every object has the tags of the first."""
    begin, count = body.find(b"<Contents>"), body.count(b"<Contents")
    if not count:
        return dict.fromkeys(_TEXTS, ())
    shape = _shape(tuple(_TAG.findall(body, begin, body.find(b"</Contents>", begin) + len(b"</Contents>"))))
    if shape is None:
        return None
    names, pattern = shape
    rows = pattern.findall(body)
    return dict(zip(names, zip(*rows, strict=True), strict=True)) if len(rows) == count else None


@functools.lru_cache(maxsize=16)
def _shape(tags: tuple[bytes, ...]) -> tuple[list[bytes], re.Pattern[bytes]] | None:
    """The names of the wanted fields in the order in which they come between these tags, and what finds their texts;
    None if they are not all there once."""
    names: list[bytes] = []
    pattern, depth = b"", 0
    for tag in tags:
        name = tag[1:-1]
        depth += 0 if tag.endswith(b"/>") else -1 if tag.startswith(b"</") else 1
        if depth == 2 and name in _TEXTS and not tag.startswith(b"</"):
            names.append(name)
            pattern += tag + _TEXTS[name]
        else:
            pattern += re.escape(tag) + rb"[^<]*"
    return (names, re.compile(pattern)) if sorted(names) == sorted(_TEXTS) else None


def slow(root: ElementTree.Element) -> Contents:
    """Any answer, from its tree."""
    decode = _decode if root.findtext("{*}EncodingType") == "url" else str
    found = Contents([], [], [], [], [], _is_truncated(root), root.findtext("{*}NextContinuationToken") or "")
    for item in root.iterfind("{*}Contents"):
        said = {child.tag.rpartition("}")[2]: child.text or "" for child in item}  # four times as fast as findtext
        found.keys.append(decode(said.get("Key", "")))
        found.sizes.append(int(said.get("Size") or 0))
        found.etags.append(said.get("ETag", "").strip('"'))
        found.modified_s.append(parse_time(said.get("LastModified", "")))
    for item in root.iterfind("{*}CommonPrefixes"):
        found.prefixes.append(decode(item.findtext("{*}Prefix") or ""))
    return found


def _is_truncated(root: ElementTree.Element) -> bool:
    return (root.findtext("{*}IsTruncated") or "").strip().lower() == "true"


def _decoded(texts: Sequence[bytes]) -> list[str]:
    if not texts:
        return []
    text = b"\n".join(texts).decode()
    if text.count("\n") != len(texts) - 1:
        raise ValueError("a key with a raw line feed in it")
    text = text.replace("+", " ").replace("%2F", "/")
    found = text.split("\n")
    return list(map(unquote, found)) if "%" in text else found


def _decode(text: str) -> str:
    """A key of `encoding-type=url`. Most have no other escape than their slashes."""
    text = text.replace("+", " ").replace("%2F", "/")
    return unquote(text) if "%" in text else text


@functools.lru_cache(maxsize=4096)
def parse_time(text: str) -> float:
    """Unix time of an ISO 8601 time; 0 if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
