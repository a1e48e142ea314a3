"""ListObjectVersions, for buckets that never had versions.

Theory. Versions are not served (GetBucketVersioning says "never enabled"), and S3 has an exact answer for such a
bucket: each key has one version, the current one, with the id `null`. Tools that empty a bucket list versions anyway
and delete each key with that id, which DeleteObject and DeleteObjects accept. So this is ListObjects in other words,
page by page, without delete markers.

Rejected: NotImplemented (true of versions, but it keeps those tools from emptying a bucket); passing on a backend's own
versions (they could be listed, but neither read nor deleted here).

Invariants. (1) Following `NextKeyMarker` shows every key once. (2) All outside text is escaped, and percent-encoded
when the client asked for it.
"""

from __future__ import annotations

from forebay.core.errors import Invalid
from forebay.core.pages import marker_of
from forebay.core.types import ListPage
from forebay.node.front.s3.listing import OWNER, ListRequest, parse_list, render_entries, url_text
from forebay.node.front.s3.xml import document, element, escape

_ASKED = ("prefix", "delimiter", "max-keys", "encoding-type")


def parse_versions(query: dict[str, str]) -> ListRequest:
    """The listing that a request with `?versions` wants; `marker` is its key-marker. `Invalid` (`InvalidArgument`)."""
    marker, version = query.get("key-marker", ""), query.get("version-id-marker", "")
    if version and not marker:
        raise Invalid("A version-id marker cannot be specified without a key marker.", code="InvalidArgument")
    if version not in ("", "null"):
        raise Invalid("Invalid version id specified: here each key has one version, null", code="InvalidArgument")
    return parse_list({name: query[name] for name in _ASKED if name in query} | {"marker": marker})


def render_versions(bucket: str, asked: ListRequest, page: ListPage, version_marker: str) -> bytes:
    """The XML of one page. `version_marker` is shown back as it was sent."""
    name = url_text if asked.url_encoded else escape
    parts = [
        element("Name", bucket),
        f"<Prefix>{name(asked.prefix)}</Prefix>",
        f"<KeyMarker>{name(asked.marker or '')}</KeyMarker>",
        element("VersionIdMarker", version_marker),
        f"<MaxKeys>{asked.limit}</MaxKeys>",
    ]
    if asked.delimiter:
        parts.append(f"<Delimiter>{name(asked.delimiter)}</Delimiter>")
    if asked.url_encoded:
        parts.append("<EncodingType>url</EncodingType>")
    if page.next_after:
        parts.append(f"<NextKeyMarker>{name(marker_of(page.next_after))}</NextKeyMarker>")
        parts.append("<NextVersionIdMarker>null</NextVersionIdMarker>")
    parts.append(f"<IsTruncated>{'true' if page.next_after else 'false'}</IsTruncated>")
    first = "<VersionId>null</VersionId><IsLatest>true</IsLatest>"
    parts.append(render_entries("Version", page, name, first=first, owner=OWNER))
    return document("ListVersionsResult", "".join(parts))
