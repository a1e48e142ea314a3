"""Documents that a client sends: what costs time or memory beyond its length is refused before it is built."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.node.front.s3.uploads import parse_parts
from forebay.node.front.s3.write import parse_deletes
from tests.s3.fake_front import Front, Object

MIB = 1 << 20


def test_names_do_not_grow_by_their_namespace() -> None:
    """Two thousand names in a namespace of 64 KiB were two thousand strings of 64 KiB."""
    names = "".join(f"<n{number}/>" for number in range(2000))
    namespace = "u" * 60_000
    text = f'<Delete xmlns="{namespace}"><Object><Key>k</Key></Object>{names}</Delete>'
    tracemalloc.start()
    try:
        asked, _ = parse_deletes(text.encode())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [one.key for one in asked] == ["k"]
    assert peak_bytes < 20 * len(text)


@pytest.mark.parametrize(
    "inner",
    ["<a/>" * 400_000, "<Object/>" * 200_000, "<a>" * 250_000 + "</a>" * 250_000, "<Object>" + "<Key/>" * 300_000],
)
def test_a_document_of_more_elements_than_can_be_meant_is_not_built(inner: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Invalid, match="elements"):
            parse_deletes(f"<Delete>{inner}</Delete>".encode())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * limits.XML_BODY_BYTES_MAX


@pytest.mark.parametrize("attribute", [' a{}=""', ' xmlns:a{}="x"'])
def test_a_tag_of_a_megabyte_is_refused(attribute: str) -> None:
    attributes = "".join(attribute.format(number) for number in range(MIB // 12))
    with pytest.raises(Invalid, match="tag in it is longer"):
        parse_deletes(f"<Delete{attributes}><Object><Key>k</Key></Object></Delete>".encode())


def test_a_long_document_that_can_be_meant_is_understood() -> None:
    key = "k" * (limits.KEY_BYTES_MAX - 4)
    keys = [f"{key}{number:04}" for number in range(limits.DELETE_KEYS_MAX)]
    text = "".join(
        f'<Object><Key>{key}</Key><VersionId>null</VersionId><ETag>"e"</ETag><Size>1</Size></Object>' for key in keys
    )
    asked, quiet = parse_deletes(f'<Delete xmlns="urn:x"><Quiet>true</Quiet>{text}</Delete>'.encode())
    assert ([one.key for one in asked], quiet) == (keys, True)
    parts = "".join(
        f"<s3:Part><s3:PartNumber>{number}</s3:PartNumber><s3:ETag>x</s3:ETag>"
        f"<s3:ChecksumCRC32>AAAAAA==</s3:ChecksumCRC32></s3:Part>"
        for number in range(1, limits.PARTS_MAX + 1)
    )
    text = f'<s3:CompleteMultipartUpload xmlns:s3="urn:x">{parts}</s3:CompleteMultipartUpload>'
    assert [number for number, _, _ in parse_parts(text.encode())] == list(range(1, limits.PARTS_MAX + 1))


def test_a_long_document_is_understood_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(corpus={"k": Object(b"x"), "other": Object(b"y")})
    threaded: list[int] = []
    understand = asyncio.to_thread

    async def to_thread(function: Any, body: bytes) -> Any:
        threaded.append(len(body))
        return await understand(function, body)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    short = b"<Delete><Object><Key>k</Key></Object></Delete>"
    assert front.ask("POST", "/corpus?delete", {}, short).status == 200
    assert threaded == []
    long = b"<Delete><Object><Key>other</Key></Object>" + b" " * 100_000 + b"</Delete>"
    assert front.ask("POST", "/corpus?delete", {}, long).status == 200
    assert threaded == [len(long)]
    assert front.reads.buckets["corpus"] == {}


@pytest.mark.parametrize(
    ("method", "target"), [("POST", "/corpus/k?uploads"), ("DELETE", "/corpus/k"), ("DELETE", "/corpus/k?uploadId=x")]
)
def test_only_what_names_many_takes_a_long_body(method: str, target: str) -> None:
    answer = Front(corpus={"k": Object(b"x")}).ask(method, target, {}, b" " * (limits.SETTING_BYTES_MAX + 1))
    assert (answer.status, answer.code) == (400, "EntityTooLarge")


@pytest.mark.parametrize("size", ["-1", "1.5", "1e3", "1234567890abc", "9" * 30, "\u0663".encode().decode("latin-1")])
def test_an_odd_size_of_the_whole_is_refused(size: str) -> None:
    body = b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>x</ETag></Part></CompleteMultipartUpload>"
    front = Front(corpus={"k": Object(b"x")})
    answer = front.ask("POST", "/corpus/k?uploadId=x", {"x-amz-mp-object-size": size}, body)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
