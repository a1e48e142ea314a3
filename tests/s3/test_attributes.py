"""GetObjectAttributes, and who is told of checksums."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.core.errors import NotFound
from forebay.core.messages.calls import ObjectState, StatCall
from tests.s3.fake_front import MODIFIED, Answer, Front, Object

ALL = "ETag,Checksum,ObjectParts,StorageClass,ObjectSize"
MIB = 1 << 20
MD5S = "0123456789abcdef" * 2


def state(etag: str, size_bytes: int, **headers: str) -> ObjectState:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ObjectState("corpus", "k", size_bytes, "v", etag, 784903526.75, 0, False, False, 0.0, named)


@pytest.fixture
def front() -> Front:
    front = Front(corpus={"summed": Object(b"data", {"x-amz-checksum-crc32": "AAAAAA=="})})
    states = {
        "plain": state(MD5S, 4, x_amz_checksum_sha256="aGVsbG8="),
        "parts": state(
            f"{MD5S}-4",
            16 * MIB,
            x_amz_checksum_crc32="AAAAAA==-4",
            x_amz_checksum_type="COMPOSITE",
            x_forebay_part_sizes=f"{5 * MIB}*3,{MIB}",
            x_forebay_part_checksums="MQ==,Mg==,Mw==,NA==",
        ),
        "far": state(f"{MD5S}-7", 99),
    }

    def stat(call: StatCall) -> Any:
        if call.key not in states:
            raise NotFound("no such object", code="NoSuchKey")
        return states[call.key]

    front.reads.answers["stat"] = stat
    return front


def attributes(front: Front, key: str, names: str = ALL, **more: str) -> Answer:
    return front.get(f"/corpus/{key}?attributes", {"x-amz-object-attributes": names}, **more)


def test_of_an_object_in_one_part(front: Front) -> None:
    answer = attributes(front, "plain")
    assert (answer.status, answer.headers["last-modified"]) == (200, MODIFIED)
    root = answer.xml
    assert root.tag == "GetObjectAttributesResponse"
    assert (root.findtext("ETag"), root.findtext("ObjectSize")) == (MD5S, "4")
    assert root.findtext("StorageClass") == "STANDARD"
    assert root.findtext("Checksum/ChecksumSHA256") == "aGVsbG8="
    assert root.findtext("Checksum/ChecksumType") == "FULL_OBJECT"
    assert root.find("ObjectParts") is None
    assert [child.tag for child in attributes(front, "plain", "ObjectSize").xml] == ["ObjectSize"]


def test_of_parts_page_by_page(front: Front) -> None:
    parts = attributes(front, "parts").xml.find("ObjectParts")
    assert parts is not None
    shown = [(p.findtext("PartNumber"), p.findtext("Size"), p.findtext("ChecksumCRC32")) for p in parts.findall("Part")]
    assert shown == [
        ("1", str(5 * MIB), "MQ=="),
        ("2", str(5 * MIB), "Mg=="),
        ("3", str(5 * MIB), "Mw=="),
        ("4", str(MIB), "NA=="),
    ]
    assert (parts.findtext("PartsCount"), parts.findtext("IsTruncated")) == ("4", "false")
    page = attributes(front, "parts", x_amz_max_parts="1", x_amz_part_number_marker="2").xml.find("ObjectParts")
    assert page is not None
    assert [part.findtext("PartNumber") for part in page.findall("Part")] == ["3"]
    told = [page.findtext(name) for name in ("PartNumberMarker", "NextPartNumberMarker", "MaxParts", "IsTruncated")]
    assert told == ["2", "3", "1", "true"]


def test_of_an_object_whose_parts_only_its_backend_knew(front: Front) -> None:
    parts = attributes(front, "far").xml.find("ObjectParts")
    assert parts is not None
    assert [(child.tag, child.text) for child in parts] == [("PartsCount", "7")]


def test_what_is_refused(front: Front) -> None:
    assert attributes(front, "gone").code == "NoSuchKey"
    for names in ("", "Nothing", "ETag,Size"):
        assert attributes(front, "plain", names).code == "InvalidArgument"
    assert attributes(front, "plain", x_amz_max_parts="-1").code == "InvalidArgument"


def test_checksums_are_told_to_those_who_ask(front: Front) -> None:
    asked = {"x-amz-checksum-mode": "ENABLED"}
    for method in ("GET", "HEAD"):
        plain = front.ask(method, "/corpus/summed").headers
        assert not [name for name in plain if name.startswith("x-amz-checksum-")], method
        told = front.ask(method, "/corpus/summed", asked).headers
        assert (told["x-amz-checksum-crc32"], told["x-amz-checksum-type"]) == ("AAAAAA==", "FULL_OBJECT")


def test_what_is_kept_for_us_is_told_to_nobody(front: Front) -> None:
    headers = {"x-forebay-part-sizes": "2*2", "x-amz-checksum-crc32": "AAAAAA==-2", "x-amz-checksum-type": "COMPOSITE"}
    front.reads.buckets["corpus"]["two"] = Object(b"data", headers, f"{MD5S}-2")
    asked = {"x-amz-checksum-mode": "ENABLED"}
    assert not [name for name in front.get("/corpus/two").headers if name.startswith(("x-forebay-", "x-amz-checksum-"))]
    told = front.get("/corpus/two", asked).headers
    assert [name for name in told if name.startswith(("x-forebay-", "x-amz-checksum-"))] == [*headers][1:]
    part = front.get("/corpus/two?partNumber=2", asked)
    assert (part.status, part.body, part.headers["x-amz-mp-parts-count"]) == (206, b"ta", "2")
    typed = front.get("/corpus/two?response-content-type=a/b", asked).headers
    assert (typed["content-type"], typed["x-amz-checksum-type"]) == ("a/b", "COMPOSITE")


def parts_of(front: Front, **headers: str) -> None:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    front.reads.buckets["corpus"]["parts"] = Object(b"aaab", {"x-forebay-part-sizes": "3,1", **named}, f"{MD5S}-2")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(("kind", "whole"), [("COMPOSITE", "AAAAAA==-2"), ("FULL_OBJECT", "AAAAAA==")])
def test_a_part_is_told_its_own_checksum(front: Front, method: str, kind: str, whole: str) -> None:
    parts_of(front, x_forebay_part_checksums="MQ==,Mg==", x_amz_checksum_crc32=whole, x_amz_checksum_type=kind)
    asked = {"x-amz-checksum-mode": "ENABLED"}

    def told(query: str, headers: dict[str, str]) -> list[str | None]:
        answer = front.ask(method, f"/corpus/parts{query}", headers).headers
        assert not [name for name in answer if name.startswith("x-forebay-part")]
        return [answer.get("x-amz-checksum-crc32"), answer.get("x-amz-checksum-type")]

    assert told("?partNumber=1", asked) == ["MQ==", kind]
    assert told("?partNumber=2", asked) == ["Mg==", kind]
    assert told("", asked) == [whole, kind]
    assert told("?partNumber=2", {}) == told("", asked | {"range": "bytes=0-0"}) == [None, None]


def test_a_part_whose_checksum_is_not_kept_is_told_none(front: Front) -> None:
    parts_of(front, x_amz_checksum_crc32="AAAAAA==-2")
    asked = {"x-amz-checksum-mode": "ENABLED"}
    part, whole = (front.get(f"/corpus/parts{query}", asked).headers for query in ("?partNumber=1", ""))
    assert not [name for name in part if name.startswith("x-amz-checksum-")]
    assert whole["x-amz-checksum-type"] == "COMPOSITE"


def test_the_only_part_has_the_checksum_of_the_whole(front: Front) -> None:
    told = front.get("/corpus/summed?partNumber=1", {"x-amz-checksum-mode": "ENABLED"}).headers
    assert (told["x-amz-checksum-crc32"], told["x-amz-checksum-type"]) == ("AAAAAA==", "FULL_OBJECT")


def test_an_empty_last_part_is_not_the_whole_object(front: Front) -> None:
    front.reads.buckets["corpus"]["parts"] = Object(b"aaa", {"x-forebay-part-sizes": "3,0"}, f"{MD5S}-2")
    assert front.get("/corpus/parts?partNumber=1").body == b"aaa"
    assert (front.get("/corpus/parts?partNumber=2").status, front.get("/corpus/parts?partNumber=2").code) == (
        416,
        "InvalidRange",
    )
