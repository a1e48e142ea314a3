"""Object tags: put with the object or beside it, read, removed."""

from __future__ import annotations

import pytest

from forebay.core.messages.calls import TagCall
from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object


def tagging(*tags: tuple[str, str]) -> bytes:
    inner = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in tags)
    return f'<Tagging xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><TagSet>{inner}</TagSet></Tagging>'.encode()


def tags(answer: Answer) -> list[tuple[str | None, str | None]]:
    assert answer.status == 200
    return [(tag.findtext("Key"), tag.findtext("Value")) for tag in answer.xml.findall("TagSet/Tag")]


@pytest.fixture
def front() -> BucketFront:
    return BucketFront(corpus={"a/k": Object(b"1")})


def test_tags_are_set_read_replaced_and_removed(front: BucketFront) -> None:
    assert tags(front.get("/corpus/a/k?tagging")) == []
    assert front.put("/corpus/a/k?tagging", tagging(("stage", "raw data"), ("owner", "a/b+c@d"))).status == 200
    assert front.reads.calls[-1] == ("tag", TagCall("corpus", "a/k", "stage=raw%20data&owner=a%2Fb%2Bc%40d"))
    assert tags(front.get("/corpus/a/k?tagging")) == [("owner", "a/b+c@d"), ("stage", "raw data")], "by key"
    assert front.put("/corpus/a/k?tagging", tagging(("stage", "ü"))).status == 200
    assert tags(front.get("/corpus/a/k?tagging")) == [("stage", "ü")]
    assert front.ask("DELETE", "/corpus/a/k?tagging").status == 204
    assert tags(front.get("/corpus/a/k?tagging")) == []
    assert front.get("/corpus/a/k").body == b"1"


def test_tags_come_with_a_put_too(front: BucketFront) -> None:
    assert front.put("/corpus/new", b"x", x_amz_tagging="stage=raw+data&owner=me").status == 200
    assert tags(front.get("/corpus/new?tagging")) == [("owner", "me"), ("stage", "raw data")]
    refused = front.put("/corpus/other", b"x", x_amz_tagging="a=1&a=2")
    assert (refused.status, refused.code) == (400, "InvalidTag")
    assert "other" not in front.reads.buckets["corpus"]


@pytest.mark.parametrize(
    "body, code",
    [
        (tagging(*((f"k{n}", "v") for n in range(11))), "InvalidTag"),
        (tagging(("k" * 129, "v")), "InvalidTag"),
        (tagging(("k", "v" * 257)), "InvalidTag"),
        (tagging(("k", "1"), ("k", "2")), "InvalidTag"),
        (tagging(("aws:k", "1")), "InvalidTag"),
        (tagging(("k&lt;", "1")), "InvalidTag"),
        (b"<Tagging/>", "MalformedXML"),
        (b"<Tagging><TagSet/><TagSet/></Tagging>", "MalformedXML"),
        (b"<Tagging><TagSet><Tag><Key>k</Key></Tag></TagSet></Tagging>", "MalformedXML"),
        (b"<TagSet/>", "MalformedXML"),
        (b"", "MalformedXML"),
        (b"<Tagging>" + b" " * 70_000 + b"<TagSet/></Tagging>", "EntityTooLarge"),
    ],
)
def test_sets_that_s3_would_not_take(front: BucketFront, body: bytes, code: str) -> None:
    answer = front.put("/corpus/a/k?tagging", body)
    assert (answer.status, answer.code) == (400, code)
    assert [verb for verb, _ in front.reads.calls] == []


def test_tags_of_what_is_not_there(front: BucketFront) -> None:
    for method in ("GET", "PUT", "DELETE"):
        body = tagging(("k", "v")) if method == "PUT" else None
        answer = front.ask(method, "/corpus/none?tagging", body=body)
        assert (answer.status, answer.code) == (404, "NoSuchKey"), method
    assert front.get("/corpus/a/k?tagging&versionId=null").status == 200
    assert front.get("/corpus/a/k?tagging&versionId=x").status == 501


def test_reading_tags_needs_read_and_changing_them_write() -> None:
    front = BucketFront({"reader": "read:corpus", "writer": "write:corpus"}, corpus={"k": Object(b"1")})
    assert front.ask_as("reader", "GET", "/corpus/k?tagging").status == 200
    assert front.ask_as("writer", "GET", "/corpus/k?tagging").status == 403
    assert front.ask_as("writer", "PUT", "/corpus/k?tagging", body=tagging(("k", "v"))).status == 200
    assert front.ask_as("reader", "PUT", "/corpus/k?tagging", body=tagging(("k", "v"))).status == 403
    assert front.ask_as("writer", "DELETE", "/corpus/k?tagging").status == 204
    assert front.ask_as("reader", "DELETE", "/corpus/k?tagging").status == 403
