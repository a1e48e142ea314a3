"""Object tags over HTTP: GetObjectTagging, PutObjectTagging, DeleteObjectTagging.

Theory. Tags are one of the object's stored headers (`core/tags.py`), so reading them is asking what the object is, and
changing them is a call of its own that leaves the bytes alone. The count, which S3 says with every read, is a stored
header too. An object that came from a backend may have tags that only the backend knows: S3 tells their number and not
the tags. Then we say so, since an empty set would be taken for the truth and written back.

Invariant. No set is answered that is not the object's whole set.
"""

from __future__ import annotations

from collections.abc import Mapping

from forebay.core.errors import NotSupported
from forebay.core.tags import COUNT_HEADER, HEADER, Tags, check_tags, parse_tags
from forebay.node.http.s3_xml import document, element, malformed, parse


def read_tags(body: bytes) -> Tags:
    """The tags of a Tagging document, checked. `Invalid` (`MalformedXML`, `InvalidTag`)."""
    root = parse(body, "Tagging")
    sets = root.findall("TagSet")
    if len(sets) != 1:
        raise malformed(f"it has {len(sets)} TagSets: one is wanted")
    pairs = []
    for tag in sets[0].findall("Tag"):
        key, value = tag.findtext("Key"), tag.findtext("Value")
        if key is None or value is None:
            raise malformed("a Tag has no Key or no Value")
        pairs.append((key, value))
    return check_tags(pairs)


def render_tags(tags: Tags) -> bytes:
    """The Tagging document of a set of tags."""
    inner = "".join(f"<Tag>{element('Key', key)}{element('Value', value)}</Tag>" for key, value in tags)
    return document("Tagging", f"<TagSet>{inner}</TagSet>")


def tags_in(headers: Mapping[str, str]) -> Tags:
    """The tags of an object with these stored headers; `NotSupported` where only the backend knows them."""
    if HEADER in headers:
        return parse_tags(headers[HEADER])
    if headers.get(COUNT_HEADER, "0") != "0":
        raise NotSupported("this object's tags were set at its backend, which tells their number alone: ask it")
    return ()
