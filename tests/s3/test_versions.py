"""ListObjectVersions: what is said of a bucket that never had versions, and that tools can empty a bucket by it."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.s3.fake_front import Answer, Front, Object

KEYS = ["a", "b/1", "b/2", "c", "d/x", "ü &"]


@pytest.fixture
def front() -> Front:
    return Front(corpus={key: Object(key.encode()) for key in KEYS})


def shown(answer: Answer) -> list[str]:
    assert (answer.status, answer.xml.tag) == (200, "ListVersionsResult"), answer.body
    return [found.text or "" for found in answer.xml.iterfind("*/Key")] + [
        found.text or "" for found in answer.xml.iterfind("CommonPrefixes/Prefix")
    ]


def test_each_key_has_one_version_and_its_id_is_null(front: Front) -> None:
    answer = front.get("/corpus?versions&encoding-type=url")
    assert shown(answer) == [quote(key, safe="/") for key in KEYS]
    for version in answer.xml.iterfind("Version"):
        assert (version.findtext("VersionId"), version.findtext("IsLatest")) == ("null", "true")
    first = answer.xml.find("Version")
    assert first is not None
    assert (first.findtext("Size"), first.findtext("ETag")) == ("1", f'"{Object(b"a").etag}"')
    assert (first.findtext("Owner/ID"), first.findtext("StorageClass")) == ("forebay", "STANDARD")
    assert answer.xml.find("DeleteMarker") is None
    assert front.get("/nowhere?versions").code == "NoSuchBucket"


@pytest.mark.parametrize("delimiter", ["", "/"])
def test_following_the_markers_shows_each_key_once(front: Front, delimiter: str) -> None:
    seen: list[str] = []
    marker = version = ""
    while True:
        answer = front.get(
            f"/corpus?versions&max-keys=2&delimiter={quote(delimiter)}"
            f"&key-marker={quote(marker)}&version-id-marker={version}"
        )
        assert (answer.xml.findtext("KeyMarker"), answer.xml.findtext("VersionIdMarker")) == (marker, version)
        page = shown(answer)
        assert len(page) <= 2
        seen += page
        if answer.xml.findtext("IsTruncated") == "false":
            break
        marker, version = answer.xml.findtext("NextKeyMarker") or "", answer.xml.findtext("NextVersionIdMarker") or ""
        assert marker
        assert version == "null"
    assert sorted(seen) == (["a", "b/", "c", "d/", "ü &"] if delimiter else KEYS)


def test_markers_that_mean_nothing_are_refused(front: Front) -> None:
    assert front.get("/corpus?versions&version-id-marker=null").code == "InvalidArgument"
    assert front.get("/corpus?versions&key-marker=a&version-id-marker=3sL4kqtJlcpXro").code == "InvalidArgument"
    assert front.get("/corpus?versions&max-keys=none").code == "InvalidArgument"


def test_a_bucket_is_emptied_by_what_the_listing_says(front: Front) -> None:
    keys = [found.findtext("Key") or "" for found in front.get("/corpus?versions").xml.iterfind("Version")]
    named = "".join(
        f"<Object><Key>{key.replace('&', '&amp;')}</Key><VersionId>null</VersionId></Object>" for key in keys
    )
    headers = {"x-amz-bypass-governance-retention": "true"}  # nothing here is retained
    answer = front.ask("POST", "/corpus?delete", headers, f"<Delete>{named}</Delete>".encode())
    assert (answer.status, answer.xml.find("Error")) == (200, None), answer.body
    assert shown(front.get("/corpus?versions")) == []
