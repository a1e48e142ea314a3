"""GetObjectTagging, PutObjectTagging and DeleteObjectTagging.

Theory. Tags are few and small, and changing them leaves the object alone (`node/engine/write/tags.py`). This module
only reads and writes their XML. A form upload has the same document as a field.

Invariant. `read_tags` reads back, by key, what `render_tags` writes.
"""

from __future__ import annotations

from forebay.core.s3rules.tags import Tags, check_tags
from forebay.node.front.s3.xml import document, element, malformed, parse


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
    """The Tagging document of a set of tags, by key: they have no order, and clients compare what they are told."""
    inner = "".join(f"<Tag>{element('Key', key)}{element('Value', value)}</Tag>" for key, value in sorted(tags))
    return document("Tagging", f"<TagSet>{inner}</TagSet>")
