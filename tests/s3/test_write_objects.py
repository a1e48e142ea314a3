"""PutObject, DeleteObject, DeleteObjects, CopyObject: what each way of asking is answered, and what becomes of it."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import pytest
import xxhash
from awscrt import checksums as crt

from forebay.core import limits
from forebay.core.access import Identity, parse_grants
from forebay.core.errors import Busy, Exists, NotFound, Precondition, Unavailable
from forebay.core.messages.calls import CopyCall, Nothing, PutCall, PutOpened
from forebay.core.s3rules.checksums import ALGORITHMS, Checksum
from forebay.node.front.http.checksums import HEADERS
from tests.s3.fake_front import MODIFIED, Answer, Front, Object
from tests.s3.test_write_chunked import encode

BIG = bytes(range(251)) * 400  # beyond what lives in a record
LARGE = b"0123456789abcdef" * (limits.STREAM_BYTES_MIN // 16) + b"tail"


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def sent(front: Front, verb: str = "put") -> Any:
    """The one call of its kind that the engine got."""
    (arguments,) = [arguments for name, arguments in front.reads.calls if name == verb]
    return arguments


def refused(answer: Answer, status: int, code: str, front: Front) -> None:
    """Nothing but an error came of it: no call, no object, no file."""
    assert (answer.status, answer.code) == (status, code)
    assert [name for name, _ in front.reads.calls if name in ("put", "delete", "copy")] == []
    assert front.left_over == []


@pytest.fixture(params=[True, False], ids=["begun", "in a task"])
def front(request: pytest.FixtureRequest) -> Front:
    """Small bodies are put in two ways, which nobody can tell apart."""
    made = Front(corpus={"old": Object(b"old bytes", {"content-type": "a/b", "x-amz-meta-x": "1"}, tags="t=1")})
    made.reads.begins = request.param
    return made


# --- PutObject -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [b"", b"x", bytes(limits.INLINE_BYTES_MAX), bytes(limits.INLINE_BYTES_MAX + 1), BIG])
@pytest.mark.parametrize("pieces", [1 << 20, 777])
def test_what_is_put_is_what_a_read_shows(front: Front, data: bytes, pieces: int) -> None:
    put = front.ask("PUT", "/corpus/new", body=data, pieces=pieces)
    assert put.status == 200
    assert put.body == b""
    got = front.get("/corpus/new")
    assert (got.status, got.body) == (200, data)
    assert got.headers["etag"] == put.headers["etag"]
    call: PutCall = sent(front)
    assert (call.body is None) == (len(data) > limits.INLINE_BYTES_MAX) == bool(call.path)
    assert front.left_over == []


def test_the_engine_is_told_the_sum_of_every_block(front: Front) -> None:
    data = LARGE + bytes(5)
    assert front.ask("PUT", "/corpus/new", body=data, pieces=300_001).status == 200
    blocks = [data[at : at + limits.BLOCK_BYTES] for at in range(0, len(data), limits.BLOCK_BYTES)]
    assert sent(front).sums == [xxhash.xxh3_64_intdigest(block) for block in blocks]


def test_headers_and_metadata_are_stored_and_come_back(front: Front) -> None:
    stored = {
        "content-type": "text/plain; charset=utf-8",
        "cache-control": "max-age=1",
        "content-disposition": 'attachment; filename="ü"',
        "content-language": "de",
        "expires": "Wed, 21 Oct 2026 07:28:00 GMT",
        "x-amz-meta-colour": "blue",
        "x-amz-meta-empty": "",
    }
    more = {"content-encoding": "aws-chunked,gzip", "x-amz-storage-class": "STANDARD", "x-amz-acl": "private"}
    more["x-amz-decoded-content-length"] = "1"
    assert front.put("/corpus/new", encode([b"x"]), stored | more).status == 200
    answer = front.get("/corpus/new")
    assert answer.body == b"x"
    assert {name: answer.headers.get(name) for name in stored} == stored
    assert answer.headers["content-encoding"] == "gzip"
    assert "x-amz-storage-class" not in answer.headers


def test_metadata_has_a_limit_and_must_be_text(front: Front) -> None:
    exact = {"x-amz-meta-a": "v" * (limits.METADATA_BYTES_MAX - 1)}
    assert front.put("/corpus/new", b"x", exact).status == 200
    front.reads.calls.clear()
    refused(front.put("/corpus/new2", b"x", {"x-amz-meta-ab": exact["x-amz-meta-a"]}), 400, "MetadataTooLarge", front)


def test_tags_travel_in_one_spelling(front: Front) -> None:
    assert front.put("/corpus/new", b"x", {"x-amz-tagging": "a=1&b=two+words&c"}).status == 200
    assert sent(front).tags == "a=1&b=two%20words&c="
    front.reads.calls.clear()
    refused(front.put("/corpus/new", b"x", {"x-amz-tagging": "a=1&a=2"}), 400, "InvalidTag", front)


@pytest.mark.parametrize(
    "header",
    [
        {"x-amz-server-side-encryption": "AES256"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-amz-storage-class": "GLACIER"},
        {"x-amz-acl": "public-read"},
        {"x-amz-grant-read": "id=1"},
        {"x-amz-object-lock-mode": "GOVERNANCE"},
        {"x-amz-website-redirect-location": "/x"},
        {"x-amz-write-offset-bytes": "1"},
        {"x-amz-expected-bucket-owner": "1"},
        {"if-modified-since": "Wed, 21 Oct 2026 07:28:00 GMT"},
    ],
)
def test_what_would_have_to_be_forgotten_is_refused(front: Front, header: dict[str, str]) -> None:
    refused(front.put("/corpus/new", b"x", header), 501, "NotImplemented", front)


@pytest.mark.parametrize("data", [b"", b"in chunks", BIG])
def test_a_put_in_chunks_says_its_length_by_its_end(front: Front, data: bytes) -> None:
    headers = {"transfer-encoding": "chunked", "x-amz-content-sha256": hashlib.sha256(data).hexdigest()}
    assert front.ask("PUT", "/corpus/new", headers, data, pieces=777, announced=False).status == 200
    assert front.get("/corpus/new").body == data
    other = {**headers, "x-amz-content-sha256": hashlib.sha256(b"other").hexdigest()}
    front.reads.calls.clear()
    answer = front.ask("PUT", "/corpus/other", other, data, announced=False)
    refused(answer, 400, "XAmzContentSHA256Mismatch", front)
    assert front.left_over == []


def test_a_put_needs_a_length(front: Front) -> None:
    refused(front.ask("PUT", "/corpus/new"), 411, "MissingContentLength", front)
    assert front.ask("PUT", "/corpus/new", {"content-length": "0"}).status == 200
    huge = {"content-length": str(limits.PUT_BYTES_MAX + 1)}
    front.reads.calls.clear()
    refused(front.ask("PUT", "/corpus/huge", huge), 400, "EntityTooLarge", front)


def test_keys_that_cannot_be(front: Front) -> None:
    refused(front.put("/corpus/" + "x" * 1025, b"x"), 400, "KeyTooLongError", front)
    refused(front.put("/corpus/%ff", b"x"), 400, "InvalidURI", front)
    refused(front.put("/Corpus/x", b"x"), 400, "InvalidBucketName", front)
    answer = front.put("/nowhere/x", BIG)
    assert (answer.status, answer.code, front.left_over) == (404, "NoSuchBucket", [])


def test_the_bucket_may_stand_in_the_host(front: Front) -> None:
    assert front.put("/new", b"x", host="corpus.s3.example.com").status == 200
    assert front.get("/corpus/new").body == b"x"


# --- promises about the bytes ----------------------------------------------------------------------------------------
def test_the_checksums_are_the_published_ones() -> None:
    """Check values of the catalogue of CRC algorithms, of RFC 1321 and FIPS 180, and of xxHash's own tests."""
    for algorithm, data, expected in (
        ("CRC32", b"123456789", "cbf43926"),
        ("CRC32C", b"123456789", "e3069283"),
        ("CRC64NVME", b"123456789", "ae8b14860a799888"),
        ("SHA1", b"abc", "a9993e364706816aba3e25717850c26c9cd0d89d"),
        ("SHA256", b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        ("MD5", b"abc", "900150983cd24fb0d6963f7d28e17f72"),
        ("XXHASH64", b"", "ef46db3751d8e999"),
        ("XXHASH3", b"", "2d06800538d394c2"),
    ):
        running = Checksum(algorithm)
        for at in range(len(data)):
            running.update(memoryview(data)[at : at + 1])
        assert running.digest().hex() == expected, algorithm
    assert crt.crc32(BIG) == zlib.crc32(BIG)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data", [b"small", BIG])
@pytest.mark.parametrize("trailing", [False, True])
def test_a_checksum_is_compared_kept_and_said(front: Front, algorithm: str, data: bytes, trailing: bool) -> None:
    right, wrong = Checksum(algorithm), Checksum(algorithm)
    right.update(data)
    wrong.update(data + b"!")
    header = HEADERS[algorithm]
    for running, status in ((wrong, 400), (right, 200)):
        if trailing:
            headers = {"x-amz-trailer": header, "x-amz-decoded-content-length": str(len(data))}
            headers["x-amz-content-sha256"] = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
            body = encode([data], trailers=[f"{header}:{running.base64()}".encode()])
        else:
            headers, body = {header: running.base64(), "x-amz-sdk-checksum-algorithm": algorithm}, data
        answer = front.put("/corpus/new", body, headers)
        assert answer.status == status
        assert front.left_over == []
        if status == 400:
            assert answer.code == "BadDigest"
            assert front.get("/corpus/new").status == 404
    assert answer.headers[header] == right.base64()
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"
    got = front.get("/corpus/new", {"x-amz-checksum-mode": "ENABLED"})
    assert (got.headers[header], got.body) == (right.base64(), data)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-amz-checksum-crc32": "AAAA"}, "BadDigest"),
        ({"x-amz-checksum-crc32": "!!!!!!=="}, "BadDigest"),
        ({"x-amz-checksum-crc99": "AAAAAA=="}, "InvalidRequest"),
        ({"x-amz-checksum-crc32": crc32(b"x"), "x-amz-checksum-sha1": "A" * 27 + "="}, "InvalidRequest"),
        ({"x-amz-sdk-checksum-algorithm": "CRC32"}, "InvalidRequest"),
        ({"x-amz-sdk-checksum-algorithm": "CRC99"}, "InvalidRequest"),
        ({"x-amz-trailer": "x-amz-checksum-crc32"}, "InvalidRequest"),
        ({"content-md5": "short"}, "InvalidDigest"),
        ({"content-md5": md5(b"other")}, "BadDigest"),
        ({"x-amz-content-sha256": hashlib.sha256(b"other").hexdigest()}, "XAmzContentSHA256Mismatch"),
        ({"x-amz-content-sha256": "nonsense"}, "InvalidArgument"),
        ({"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}, "MissingContentLength"),
        ({"content-encoding": "aws-chunked", "x-amz-decoded-content-length": "x"}, "InvalidArgument"),
        ({"content-encoding": "aws-chunked", "x-amz-decoded-content-length": "99"}, "InvalidRequest"),
        ({"content-encoding": "aws-chunked", "x-amz-decoded-content-length": "1"}, "IncompleteBody"),
    ],
)
def test_promises_that_are_broken_or_make_no_sense(front: Front, headers: dict[str, str], code: str) -> None:
    refused(front.put("/corpus/new", b"x", headers), 411 if code == "MissingContentLength" else 400, code, front)


@pytest.mark.parametrize("data", [b"x" * 100, BIG])
@pytest.mark.parametrize("lie", [-1, 1])
def test_a_chunked_body_of_another_length_than_promised(front: Front, data: bytes, lie: int) -> None:
    headers = {"content-encoding": "aws-chunked", "x-amz-decoded-content-length": str(len(data) + lie)}
    refused(front.put("/corpus/new", encode([data]), headers), 400, "IncompleteBody", front)


def test_trailers_must_be_those_that_were_announced(front: Front) -> None:
    length = {"x-amz-decoded-content-length": "1", "content-encoding": "aws-chunked"}
    line = f"x-amz-checksum-crc32:{crc32(b'x')}".encode()
    refused(front.put("/corpus/new", encode([b"x"], trailers=[line]), length), 400, "MalformedTrailerError", front)
    announced = length | {"x-amz-trailer": "x-amz-checksum-crc32"}
    refused(front.put("/corpus/new", encode([b"x"]), announced), 400, "MalformedTrailerError", front)
    other = b"x-amz-checksum-sha1:AAAA"
    refused(front.put("/corpus/new", encode([b"x"], trailers=[other]), announced), 400, "MalformedTrailerError", front)


def test_an_etag_is_an_md5_of_a_short_body_and_where_somebody_asked_for_one(front: Front) -> None:
    assert front.put("/corpus/short", b"bar").headers["etag"] == '"37b51d194a7513e45b56f6524f2d51f2"'
    front.reads.calls.clear()
    expected = f'"{hashlib.md5(LARGE).hexdigest()}"'
    assert front.put("/corpus/cheap", LARGE).headers["etag"] != expected
    assert front.put("/corpus/sent", LARGE, {"content-md5": md5(LARGE)}).headers["etag"] == expected
    front.reads.options = {"etag": "md5"}
    assert front.put("/corpus/option", LARGE).headers["etag"] == expected
    first, *_, last = [call for verb, call in front.reads.calls if verb == "put"]
    assert (first.md5, bool(first.hash128)) == ("", True)
    assert (bool(last.md5), last.hash128) == (True, "")


# --- conditions ------------------------------------------------------------------------------------------------------
def test_conditions_are_the_engines_to_judge(front: Front) -> None:
    etag = Object(b"old bytes").etag
    assert front.put("/corpus/old", b"x", if_none_match="*").code == "PreconditionFailed"
    assert front.put("/corpus/old", b"x", if_match='"other"').status == 412
    assert front.put("/corpus/gone", b"x", if_match='"other"').status == 404
    assert front.get("/corpus/old").body == b"old bytes"
    assert front.put("/corpus/old", b"new", if_match=f'"{etag}"').status == 200
    assert front.put("/corpus/fresh", b"new", if_none_match="*").status == 200
    assert front.put("/corpus/fresh", b"x", if_none_match=f'"{Object(b"new").etag}"').status == 412
    assert front.put("/corpus/fresh", b"newer", if_none_match='"another"').status == 200
    assert front.get("/corpus/old").body == b"new"
    refused_call = front.put("/corpus/old", b"x", if_match=" ")
    assert (refused_call.status, refused_call.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Unavailable("full", code="InsufficientStorage"), 507, "InsufficientStorage"),
        (Busy("dirty", code="SlowDown", retry_after_s=3.0), 503, "SlowDown"),
        (Precondition("lost", code="PreconditionFailed"), 412, "PreconditionFailed"),
        (Exists("a race was lost", code="ConditionalRequestConflict"), 409, "ConditionalRequestConflict"),
        (Unavailable("gone", retry_after_s=1.0), 503, "ServiceUnavailable"),
    ],
)
def test_what_the_engine_refuses_leaves_nothing(front: Front, error: Exception, status: int, code: str) -> None:
    front.reads.answers["put"] = error
    answer = front.put("/corpus/new", BIG)
    assert (answer.status, answer.code) == (status, code)
    assert front.left_over == []
    if status == 503:
        assert int(answer.headers["retry-after"]) >= 1


def test_without_a_volume_there_is_no_room_and_the_body_is_not_awaited(front: Front) -> None:
    front.reads.volumes = 0
    refused(front.put("/corpus/new", BIG), 507, "InsufficientStorage", front)
    assert front.put("/corpus/small", b"lives in memory").status == 200


# --- written through, while it arrives -------------------------------------------------------------------------------
def test_a_large_body_goes_on_to_the_backend_while_it_arrives(front: Front) -> None:
    front.reads.write = "through"
    front.reads.answers["put_open"] = PutOpened(7)
    assert front.ask("PUT", "/corpus/new", body=LARGE, pieces=256 * 1024).status == 200
    opening = sent(front, "put_open")
    assert (opening.size_bytes, opening.path) == (len(LARGE), sent(front).path)
    assert sent(front).put == 7
    grown = [upto for what, put, upto in front.reads.said if (what, put) == ("grown", 7)]
    assert grown[-1] == len(LARGE)
    assert grown == sorted(set(grown))
    assert len(grown) <= 1 + len(LARGE) // (1024 * 1024)


def test_a_body_that_turns_out_wrong_is_given_up(front: Front) -> None:
    front.reads.write = "through"
    front.reads.answers["put_open"] = PutOpened(7)
    answer = front.ask("PUT", "/corpus/new", {"content-md5": md5(b"other")}, LARGE, 256 * 1024)
    assert (answer.status, answer.code) == (400, "BadDigest")
    assert ("gave up", 7, 0) in front.reads.said
    assert front.left_over == []


def test_small_bodies_and_other_modes_are_not_opened_early(front: Front) -> None:
    front.reads.answers["put_open"] = PutOpened(7)
    assert front.put("/corpus/new", LARGE).status == 200
    front.reads.write = "through"
    assert front.put("/corpus/new", BIG).status == 200
    assert [verb for verb, _ in front.reads.calls] == ["put", "put"]


def test_an_engine_that_refuses_to_stream_still_gets_the_body_whole(front: Front) -> None:
    front.reads.write = "through"
    front.reads.answers["put_open"] = Unavailable("not now")
    assert front.put("/corpus/new", LARGE).status == 200
    assert sent(front).put == 0
    assert front.reads.said == []


# --- who may ---------------------------------------------------------------------------------------------------------
def test_an_unsigned_write_is_refused_before_its_body() -> None:
    front = Front(Identity("i", "AKID", "secret", grants=parse_grants("read:*")), corpus={"old": Object(b"1")})
    for method, target in (("PUT", "/corpus/new"), ("DELETE", "/corpus/old"), ("POST", "/corpus?delete")):
        refused(front.ask(method, target, {"content-length": "1000"}), 403, "AccessDenied", front)
    assert front.reads.buckets["corpus"].keys() == {"old"}


# --- DeleteObject and DeleteObjects ----------------------------------------------------------------------------------
def test_deleting(front: Front) -> None:
    assert front.ask("DELETE", "/corpus/old", if_match='"other"').status == 412
    answer = front.ask("DELETE", "/corpus/old")
    assert (answer.status, answer.body) == (204, b"")
    assert front.get("/corpus/old").status == 404
    assert front.ask("DELETE", "/corpus/old").status == 204
    assert front.ask("DELETE", "/corpus/old?versionId=null").status == 204
    for target, headers in (
        ("/corpus/old?versionId=abc", {}),
        ("/corpus/old", {"if-none-match": "*"}),
    ):
        assert front.ask("DELETE", target, headers).status == 501


def test_deleting_under_a_condition(front: Front) -> None:
    """What is gone is gone: a delete that is repeated after its answer was lost is no error."""
    size, modified = "x-amz-if-match-size", "x-amz-if-match-last-modified-time"
    assert front.ask("DELETE", "/corpus/never", if_match='"other"').status == 204
    assert front.ask("DELETE", "/corpus/never", {size: "7"}).status == 204
    later = "Tue, 15 Nov 1994 12:45:27 GMT"
    for headers in ({"if-match": '"other"'}, {size: "10"}, {modified: later}, {modified: "1994-11-15T12:45:27Z"}):
        assert front.ask("DELETE", "/corpus/old", headers).status == 412, headers
    for headers in ({size: "-1"}, {size: "ten"}, {modified: "yesterday"}):
        assert front.ask("DELETE", "/corpus/old", headers).code == "InvalidArgument", headers
    assert front.get("/corpus/old").status == 200
    assert front.ask("DELETE", "/corpus/old", {size: "9", modified: MODIFIED}).status == 204
    assert front.get("/corpus/old").status == 404


def delete_document(*keys: str, more: str = "") -> bytes:
    objects = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{objects}{more}</Delete>'.encode()


def test_deleting_many_says_of_each_what_became_of_it(front: Front) -> None:
    def delete(call: Any) -> Any:
        if call.key == "stuck":
            raise Unavailable("the backend is away")
        if call.key == "odd":
            raise NotFound("no", code="NoSuchBucket")
        return Nothing()

    front.reads.answers["delete"] = delete
    document = delete_document("a&amp;b", "stuck", "odd", "&lt;x&gt;", "x" * 1025)
    answer = front.ask("POST", "/corpus?delete", body=document)
    assert answer.status == 200
    assert [found.findtext("Key") for found in answer.xml.findall("Deleted")] == ["a&b", "<x>"]
    errors = {found.findtext("Key"): found.findtext("Code") for found in answer.xml.findall("Error")}
    assert errors == {"stuck": "ServiceUnavailable", "odd": "NoSuchBucket", "x" * 1025: "KeyTooLongError"}
    quiet = front.ask("POST", "/corpus?delete", body=delete_document("a", "stuck", more="<Quiet>true</Quiet>"))
    assert not quiet.xml.findall("Deleted")
    assert [found.findtext("Key") for found in quiet.xml.findall("Error")] == ["stuck"]


def test_a_thousand_keys_at_once_and_no_more(front: Front) -> None:
    keys = [f"k{number}" for number in range(limits.DELETE_KEYS_MAX)]
    front.reads.buckets["corpus"] |= {key: Object(b"1") for key in keys}
    answer = front.ask("POST", "/corpus?delete", body=delete_document(*keys))
    assert len(answer.xml.findall("Deleted")) == limits.DELETE_KEYS_MAX
    assert front.reads.buckets["corpus"].keys() == {"old"}
    for wrong in (
        delete_document(*keys, "one-more"),
        delete_document(),
        b"",
        b"<Delete>",
        b"<Remove/>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><Delete><Object><Key>&a;</Key></Object></Delete>',
        b"\xff\xfe<",
    ):
        answer = front.ask("POST", "/corpus?delete", body=wrong, content_length=str(len(wrong)))
        assert (answer.status, answer.code) == (400, "MalformedXML"), wrong[:60]


def test_the_document_of_a_delete_is_held_against_its_checksum(front: Front) -> None:
    document = delete_document("old")
    for headers, code in (
        ({"content-md5": md5(b"other")}, "BadDigest"),
        ({"x-amz-checksum-crc32": crc32(b"other")}, "BadDigest"),
        ({"x-amz-content-sha256": hashlib.sha256(b"").hexdigest()}, "XAmzContentSHA256Mismatch"),
    ):
        answer = front.ask("POST", "/corpus?delete", headers, document)
        assert (answer.status, answer.code) == (400, code)
    assert front.get("/corpus/old").status == 200
    right = {"content-md5": md5(document), "x-amz-checksum-crc32": crc32(document)}
    assert front.ask("POST", "/corpus?delete", right, document).status == 200
    assert front.get("/corpus/old").status == 404


def test_versions_and_conditions_of_single_keys(front: Front) -> None:
    document = (
        b"<Delete><Object><Key>old</Key><VersionId>v7</VersionId></Object>"
        b"<Object><Key>old</Key><Size>3</Size></Object>"
        b"<Object><Key>old</Key><LastModifiedTime>1994-11-15T12:45:25.000Z</LastModifiedTime></Object>"
        b"<Object><Key>old</Key><ETag>other</ETag></Object>"
        b"<Object><Key>gone</Key><ETag>other</ETag></Object>"
        b"<Object><Key>none</Key><VersionId>null</VersionId></Object></Delete>"
    )
    answer = front.ask("POST", "/corpus?delete", body=document)
    codes = [found.findtext("Code") for found in answer.xml.findall("Error")]
    assert codes == ["NotImplemented", "PreconditionFailed", "PreconditionFailed", "PreconditionFailed"]
    assert [found.findtext("Key") for found in answer.xml.findall("Deleted")] == ["gone", "none"]


def test_deleting_many_of_a_bucket_that_is_not_there_is_one_error(front: Front) -> None:
    answer = front.ask("POST", "/nothing?delete", body=delete_document("a", "b"))
    assert (answer.status, answer.code) == (404, "NoSuchBucket")


# --- CopyObject ------------------------------------------------------------------------------------------------------
def copy(front: Front, source: str, **more: str) -> Answer:
    return front.ask("PUT", "/corpus/copy", {"content-length": "0", "x-amz-copy-source": source}, **more)


@pytest.mark.parametrize("source", ["/corpus/old", "corpus/old", "corpus/%6Fld", "/corpus/old?versionId=null"])
def test_copying(front: Front, source: str) -> None:
    answer = copy(front, source)
    assert answer.status == 200
    assert answer.xml.tag == "CopyObjectResult"
    assert answer.xml.findtext("ETag") == front.get("/corpus/copy").headers["etag"]
    assert answer.xml.findtext("LastModified") == "1994-11-15T12:45:26.750Z"
    got = front.get("/corpus/copy")
    assert (got.body, got.headers["x-amz-meta-x"]) == (b"old bytes", "1")
    assert front.reads.buckets["corpus"]["copy"].tags == "t=1"


def test_directives(front: Front) -> None:
    answer = copy(
        front, "corpus/old", x_amz_metadata_directive="REPLACE", x_amz_meta_y="2", x_amz_tagging_directive="REPLACE",
        x_amz_tagging="z=9",
    )  # fmt: skip
    assert answer.status == 200
    headers = front.get("/corpus/copy").headers
    assert (headers.get("x-amz-meta-x"), headers["x-amz-meta-y"]) == (None, "2")
    assert front.reads.buckets["corpus"]["copy"].tags == "z=9"
    assert copy(front, "corpus/old", x_amz_meta_y="2").status == 200
    assert "x-amz-meta-y" not in front.get("/corpus/copy").headers
    assert copy(front, "corpus/old", x_amz_metadata_directive="MERGE").code == "InvalidArgument"


def test_a_copy_onto_itself_must_change_something(front: Front) -> None:
    headers = {"content-length": "0", "x-amz-copy-source": "corpus/old"}
    answer = front.ask("PUT", "/corpus/old", headers)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert front.ask("PUT", "/corpus/old", headers, x_amz_metadata_directive="REPLACE").status == 200
    assert "x-amz-meta-x" not in front.get("/corpus/old").headers


def test_conditions_on_the_source(front: Front) -> None:
    for condition, status in (
        ({"x_amz_copy_source_if_match": '"other"'}, 412),
        ({"x_amz_copy_source_if_none_match": Object(b"old bytes").etag}, 412),
        ({"x_amz_copy_source_if_modified_since": "Wed, 21 Oct 2026 07:28:00 GMT"}, 412),
        ({"x_amz_copy_source_if_unmodified_since": "Wed, 21 Oct 1992 07:28:00 GMT"}, 412),
        ({"x_amz_copy_source_if_match": Object(b"old bytes").etag}, 200),
        ({"if_none_match": "*"}, 412),
    ):
        assert copy(front, "corpus/old", **condition).status == status, condition
    call: CopyCall = next(call for verb, call in front.reads.calls if verb == "copy")
    assert (call.source_if_match, call.source_if_none_match) == ('"other"', None)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("corpus", 400),
        ("corpus/", 400),
        ("/", 400),
        ("corpus/%zz", 400),
        ("Corpus/old", 400),
        ("corpus/gone", 404),
        ("nowhere/old", 404),
        ("corpus/old?versionId=7", 501),
    ],
)
def test_sources_that_cannot_be_copied(front: Front, source: str, status: int) -> None:
    assert copy(front, source).status == status


def test_a_copy_takes_no_body_and_a_checksum_that_there_is(front: Front) -> None:
    headers = {"x-amz-copy-source": "corpus/old"}
    assert front.put("/corpus/copy", b"body", headers).code == "InvalidRequest"
    assert copy(front, "corpus/old", x_amz_checksum_algorithm="CRC1").code == "InvalidRequest"
    assert copy(front, "corpus/old", x_amz_checksum_algorithm="sha256").status == 200
    (call,) = [call for verb, call in front.reads.calls if verb == "copy"]
    assert call.checksum_algorithm == "SHA256"
