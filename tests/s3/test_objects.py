"""GetObject and HeadObject: what each way of asking is answered."""

from __future__ import annotations

import pytest

from forebay.core.errors import Busy, ForebayError, NotSupported
from forebay.core.types import RangeSpec
from forebay.node.front.http.requests import Request
from tests.s3.fake_front import MODIFIED, Front, Object

DATA = bytes(range(256)) * 4
ETAG = Object(DATA).etag


@pytest.fixture
def front() -> Front:
    headers = {"content-type": "image/png", "cache-control": "max-age=60", "x-amz-meta-colour": "blue"}
    return Front(
        corpus={
            "a.png": Object(DATA, headers),
            "empty": Object(b""),
            "multipart": Object(DATA, etag="d41d8cd98f00b204e9800998ecf8427e-2"),
            "summed": Object(DATA, {"x-amz-checksum-crc32": "AAAAAA=="}),
        }
    )


def test_a_plain_get_is_the_object_and_what_is_stored_with_it(front: Front) -> None:
    answer = front.get("/corpus/a.png")
    assert (answer.status, answer.body) == (200, DATA)
    headers = answer.headers
    del headers["x-amz-request-id"]
    assert headers == {
        "etag": f'"{ETAG}"',
        "last-modified": MODIFIED,
        "accept-ranges": "bytes",
        "content-type": "image/png",
        "cache-control": "max-age=60",
        "x-amz-meta-colour": "blue",
    }


def test_two_answers_never_share_a_request_id(front: Front) -> None:
    ids = {front.get("/corpus/a.png").headers["x-amz-request-id"] for _ in range(100)}
    assert len(ids) == 100


def test_ranges(front: Front) -> None:
    for header, expected, content_range in (
        ("bytes=0-9", DATA[:10], "bytes 0-9/1024"),
        ("bytes=1000-", DATA[1000:], "bytes 1000-1023/1024"),
        ("bytes=-24", DATA[-24:], "bytes 1000-1023/1024"),
        ("bytes=-5000", DATA, "bytes 0-1023/1024"),
        ("bytes=1020-5000", DATA[1020:], "bytes 1020-1023/1024"),
    ):
        answer = front.get("/corpus/a.png", range=header)
        assert (answer.status, answer.body) == (206, expected), header
        assert answer.headers["content-range"] == content_range
        assert answer.headers["etag"] == f'"{ETAG}"'


def test_what_is_no_single_range_gets_the_whole_object(front: Front) -> None:
    for header in ("bytes=0-1,3-4", "bytes=9-0", "chunks=0-1", "bytes=x", ""):
        answer = front.get("/corpus/a.png", range=header)
        assert (answer.status, answer.body) == (200, DATA), header
        assert "content-range" not in answer.headers


def test_a_range_outside_says_how_large_the_object_is(front: Front) -> None:
    for target, header, size in (
        ("/corpus/a.png", "bytes=1024-", 1024),
        ("/corpus/a.png", "bytes=-0", 1024),
        ("/corpus/empty", "bytes=0-", 0),
        ("/corpus/empty", "bytes=-1", 0),
    ):
        answer = front.get(target, range=header)
        assert (answer.status, answer.code) == (416, "InvalidRange")
        assert answer.headers["content-range"] == f"bytes */{size}"
        assert answer.xml.findtext("ActualObjectSize") == str(size)


def test_a_miss_is_asked_for_the_range_it_needs(front: Front) -> None:
    front.get("/corpus/a.png", range="bytes=5-9", if_match=ETAG)
    front.get("/corpus/a.png", range="bytes=0-1,3-4")
    assert front.reads.asked == [("corpus", "a.png", RangeSpec(5, 9)), ("corpus", "a.png", None)]


def test_conditions_come_before_ranges(front: Front) -> None:
    not_modified = front.get("/corpus/a.png", range="bytes=5000-", if_none_match=f'"{ETAG}"')
    assert (not_modified.status, not_modified.body) == (304, b"")
    kept = {name for name in not_modified.headers if name != "x-amz-request-id"}
    assert kept == {"etag", "last-modified", "cache-control"}
    failed = front.get("/corpus/a.png", range="bytes=5000-", if_match='"other"')
    assert (failed.status, failed.code) == (412, "PreconditionFailed")
    assert front.get("/corpus/a.png", range="bytes=5000-", if_match=ETAG).status == 416
    assert front.get("/corpus/a.png", range="bytes=0-0", if_match=ETAG).status == 206


def test_times(front: Front) -> None:
    before = MODIFIED.replace("26 GMT", "25 GMT")
    assert front.get("/corpus/a.png", if_modified_since=MODIFIED).status == 304
    assert front.get("/corpus/a.png", if_modified_since=before).status == 200
    assert front.get("/corpus/a.png", if_unmodified_since=MODIFIED).status == 200
    assert front.get("/corpus/a.png", if_unmodified_since=before).status == 412


def test_if_range_falls_back_to_the_whole_object(front: Front) -> None:
    assert front.get("/corpus/a.png", range="bytes=0-9", if_range=f'"{ETAG}"').status == 206
    assert front.get("/corpus/a.png", range="bytes=0-9", if_range=MODIFIED).status == 206
    answer = front.get("/corpus/a.png", range="bytes=0-9", if_range='"old"')
    assert (answer.status, answer.body) == (200, DATA)
    assert front.get("/corpus/a.png", range="bytes=5000-", if_range='"old"').status == 200
    assert front.get("/corpus/a.png", if_range='"old"').status == 200


def test_the_query_may_replace_response_headers(front: Front) -> None:
    answer = front.get(
        "/corpus/a.png?response-content-type=text/plain&response-content-disposition=attachment%3B%20filename%3D%22x%22"
        "&response-cache-control=no-store&response-expires=0&response-content-language=de"
        "&response-content-encoding=identity&x-id=GetObject",
        range="bytes=0-0",
    )
    assert answer.status == 206
    headers = answer.headers
    assert headers["content-type"] == "text/plain"
    assert headers["content-disposition"] == 'attachment; filename="x"'
    assert headers["cache-control"] == "no-store"
    assert (headers["expires"], headers["content-language"]) == ("0", "de")
    assert headers["content-encoding"] == "identity"
    assert (headers["content-range"], headers["x-amz-meta-colour"]) == ("bytes 0-0/1024", "blue")


def test_a_replaced_header_cannot_split_the_response(front: Front) -> None:
    for evil in ("%0d%0aSet-Cookie:%20a=b", "a%0ab", "a%00b"):
        answer = front.get(f"/corpus/a.png?response-content-type=text/plain{evil}")
        assert answer.status == 400
        assert b"Set-Cookie" not in answer.head


def test_part_numbers_of_an_object_that_is_one_part(front: Front) -> None:
    answer = front.get("/corpus/a.png?partNumber=1")
    assert (answer.status, answer.body, answer.headers["content-range"]) == (206, DATA, "bytes 0-1023/1024")
    assert front.get("/corpus/empty?partNumber=1").status == 200
    for target, status, code in (
        ("/corpus/a.png?partNumber=2", 416, "InvalidPartNumber"),
        ("/corpus/a.png?partNumber=0", 400, "InvalidArgument"),
        ("/corpus/a.png?partNumber=10001", 400, "InvalidArgument"),
        ("/corpus/a.png?partNumber=one", 400, "InvalidArgument"),
        ("/corpus/a.png?partNumber=", 400, "InvalidArgument"),
        ("/corpus/multipart?partNumber=1", 501, "NotImplemented"),
    ):
        answer = front.get(target)
        assert (answer.status, answer.code) == (status, code), target
    both = front.get("/corpus/a.png?partNumber=1", range="bytes=0-1")
    assert (both.status, both.code) == (400, "InvalidRequest")


def test_a_stored_checksum_is_never_said_of_a_range(front: Front) -> None:
    mode = {"x-amz-checksum-mode": "ENABLED"}
    assert front.get("/corpus/summed", mode).headers["x-amz-checksum-crc32"] == "AAAAAA=="
    assert "x-amz-checksum-crc32" not in front.get("/corpus/summed", mode, range="bytes=0-9").headers
    assert "x-amz-checksum-crc32" not in front.get("/corpus/a.png", mode).headers


def test_keys_are_bytes_not_paths() -> None:
    keys = [
        "..",
        "../x",
        "a//b",
        "/",
        "a/",
        "a+b",
        "a b",
        "a%b",
        "ä/中",
        "a\x01b",
        "a\nb",
        "?",
        "#",
        "x" * 1024,
        "\U0001f600",
    ]
    front = Front(corpus={key: Object(key.encode()) for key in keys})
    targets = [
        "..",
        "../x",
        "a//b",
        "/",
        "a%2F",
        "a+b",
        "a%20b",
        "a%25b",
        "%C3%A4%2f%e4%b8%ad",
        "a%01b",
        "a%0ab",
        "%3F",
    ]
    targets += ["%23", "x" * 1024, "%F0%9F%98%80"]
    for key, target in zip(keys, targets, strict=True):
        assert front.get(f"/corpus/{target}").body == key.encode(), key
        assert front.get(f"/{target}", host="corpus.localhost:9400").body == key.encode(), key
        assert front.get(f"http://corpus.s3.example.com/{target}").body == key.encode(), key


def test_names_that_cannot_be_read() -> None:
    front = Front(corpus={})
    for target, status, code in (
        ("/corpus/%ff", 400, "InvalidURI"),
        ("/corpus/%c3%28", 400, "InvalidURI"),
        ("/corpus/%ed%a0%80", 400, "InvalidURI"),  # a surrogate
        ("/corpus/%zz", 400, "InvalidURI"),
        ("/corpus/a%2", 400, "InvalidURI"),
        ("corpus/a", 400, "InvalidURI"),
        ("*", 400, "InvalidURI"),
        ("ftp://h/corpus/a", 400, "InvalidURI"),
        ("/corpus/" + "x" * 1025, 400, "KeyTooLongError"),
        ("/corpus/" + "%C3%A4" * 513, 400, "KeyTooLongError"),
        ("//a", 400, "InvalidBucketName"),
        ("/Corpus/a", 400, "InvalidBucketName"),
        ("/../a", 400, "InvalidBucketName"),
        ("/co%2frpus/a", 400, "InvalidBucketName"),
        ("/other/a", 404, "NoSuchBucket"),
        ("/corpus/missing", 404, "NoSuchKey"),
    ):
        answer = front.get(target)
        assert (answer.status, answer.code) == (status, code), target
    raw = front.get(b"/corpus/\xff")
    assert (raw.status, raw.code) == (400, "InvalidURI")


def test_hosts_name_buckets_only_under_the_base_domains() -> None:
    front = Front(corpus={"k": Object(b"1")})
    for host, target in (
        ("corpus.localhost", "/k"),
        ("Corpus.LOCALHOST.:80", "/k"),
        ("corpus.s3.example.com", "/k"),
        ("corpus.s3.localhost:9400", "/k"),
        ("s3.example.com", "/corpus/k"),
        ("localhost", "/corpus/k"),
        ("s3.localhost", "/corpus/k"),
        ("[::1]:9400", "/corpus/k"),
        ("", "/corpus/k"),
    ):
        assert front.get(target, host=host).body == b"1", host


def test_an_error_document_names_what_was_asked_and_is_well_formed() -> None:
    answer = Front(corpus={}).get("/corpus/%3Ca%3E&b%00")
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/xml"
    assert answer.xml.findtext("Resource") == "/corpus/%3Ca%3E&b%00"
    assert answer.xml.findtext("RequestId") == answer.headers["x-amz-request-id"]
    assert answer.xml.findtext("HostId") == "node-1"
    assert answer.xml.findtext("Message")
    assert (answer.xml.findtext("Key"), answer.xml.find("BucketName")) == ("<a>&b\ufffd", None)
    absent = Front(corpus={}).get("/nothing/k").xml
    assert (absent.findtext("BucketName"), absent.find("Key")) == ("nothing", None)


def test_what_is_not_served_is_refused_not_invented(front: Front) -> None:
    answer = front.get("/corpus/a.png?torrent")
    assert (answer.status, answer.code) == (501, "NotImplemented")
    assert front.get("/corpus/a.png?versionId=null").status == 200
    assert front.get("/corpus/a.png?versionId=3HL4kqtJlcpXroDTDmJ").status == 501
    customer_key = {"x-amz-server-side-encryption-customer-algorithm": "AES256"}
    assert front.get("/corpus/a.png", customer_key).status == 501
    assert front.get("/corpus/a.png", {"x-amz-expected-bucket-owner": "123456789012"}).status == 501


def test_writes_that_are_not_served_are_refused_before_their_body_is_sent(front: Front) -> None:
    for method, target, status in (
        ("PUT", "/corpus?lifecycle", 501),
        ("PUT", "/corpus/a.png?retention", 400),
        ("PUT", "/corpus/a.png?encryption", 501),
        ("POST", "/corpus/a.png?select", 501),
        ("POST", "/corpus/a.png", 501),
        ("PUT", "/corpus?policy", 501),
        ("PUT", "/", 405),
        ("DELETE", "/", 405),
    ):
        answer = front.ask(method, target)
        assert (answer.status, bool(answer.code)) == (status, True), (method, target)
    headers = {b"content-length": b"9"}
    request = Request(b"PUT", b"/corpus/a?encryption", b"/corpus/a", b"encryption", headers)
    with pytest.raises(NotSupported):
        front.handler.take_body(request)
    request.method = b"GET"
    assert front.handler.take_body(request).finish() == b""


def test_other_methods(front: Front) -> None:
    patch = front.ask("PATCH", "/corpus/a.png")
    assert (patch.status, patch.code, patch.headers["allow"]) == (
        405,
        "MethodNotAllowed",
        "GET, HEAD, PUT, POST, DELETE",
    )
    assert front.ask("HEAD", "/").status == 405
    preflight = front.ask("OPTIONS", "/corpus/a.png", origin="http://x", access_control_request_method="GET")
    assert (preflight.status, preflight.code) == (403, "AccessForbidden")


def test_every_kind_of_error_has_an_s3_code_and_busy_says_when_to_return(front: Front) -> None:
    from forebay.core.errors import KINDS
    from forebay.node.front.s3.errors import STATUS

    for kind in KINDS.values():
        response = front.handler.render_error(kind("words <&> words", code="NotAnS3Code"), None)
        assert response.status >= 400
        assert b"words &lt;&amp;&gt; words" in response.body
        assert b"NotAnS3Code" not in response.body
    for code, status in STATUS.items():
        assert front.handler.render_error(ForebayError("x", code=code), None).status == status
    busy = front.handler.render_error(Busy("later", retry_after_s=2.4), None)
    assert (busy.status, b"Retry-After: 2\r\n" in busy.head) == (503, True)
