"""Any write a client can send: one well-formed answer, each object whole-old, whole-new or absent, nothing left."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.access import Identity, parse_grants
from forebay.core.errors import Invalid, NotFound
from forebay.node.front.s3.write import parse_deletes
from tests.s3.fake_front import OTHER_CALLS, Front, Object
from tests.s3.test_write_chunked import encode

DATA = b"some bytes of an object"
LONG = bytes(range(256)) * 80  # a file, not a record
CRC = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
# fmt: off
FIELDS = [
    ("content-length", "0"), ("content-length", "23"), ("content-length", "9999999999999"), ("content-length", "1"),
    ("content-md5", base64.b64encode(hashlib.md5(DATA).digest()).decode()), ("content-md5", "x"),
    ("content-encoding", "aws-chunked"), ("content-encoding", "gzip, aws-chunked"), ("transfer-encoding", "chunked"),
    ("x-amz-decoded-content-length", "23"), ("x-amz-decoded-content-length", "-1"), ("expect", "100-continue"),
    ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"), ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
    ("x-amz-content-sha256", hashlib.sha256(DATA).hexdigest()), ("x-amz-content-sha256", "junk"),
    ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"),
    ("x-amz-checksum-crc32", CRC), ("x-amz-checksum-crc32", "AAAAAA=="), ("x-amz-checksum-sha1", "%"),
    ("x-amz-trailer", "x-amz-checksum-crc32"), ("x-amz-trailer", "x"), ("x-amz-sdk-checksum-algorithm", "crc32"),
    ("if-match", '"x"'), ("if-match", "*"), ("if-none-match", "*"), ("x-amz-meta-a", "b"), ("x-amz-meta-a", "ü"),
    ("x-amz-copy-source", "corpus/k"), ("x-amz-copy-source", "/%zz"), ("x-amz-metadata-directive", "REPLACE"),
    ("x-amz-tagging", "a=b"), ("x-amz-tagging", "%ff"), ("x-amz-storage-class", "STANDARD"), ("x-amz-acl", "private"),
    ("authorization", "AWS4-HMAC-SHA256 nonsense"), ("origin", "https://example.com"),
]
TARGETS = [
    "/corpus/k", "/corpus/new", "/corpus", "/corpus?delete", "/nowhere/k", "/", "/corpus/k?acl", "/corpus/%ff",
    "/corpus/k?versionId=null", "/corpus/new?x-id=PutObject", "/corpus/k?partNumber=1&uploadId=x", "/corpus/k?uploads",
]
TWICE = [
    ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"), ("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
]
BODIES = [
    b"", DATA, DATA[:-1], LONG, encode([DATA]), encode([DATA[:9], DATA[9:]]), encode([DATA])[:-9],
    encode([DATA], trailers=[b"x-amz-checksum-crc32:" + CRC.encode()]), encode([LONG]),
    encode([DATA], trailers=[b"x-amz-checksum-crc32:AAAAAA=="]),
    b"<Delete><Object><Key>k</Key></Object></Delete>", b"<Delete><Object/></Delete>",
]
DELETE_PIECES = [
    "<Delete>", "</Delete>", "<Object>", "</Object>", "<Key>", "</Key>", "k", "<Quiet>true</Quiet>", "<VersionId>",
    "</VersionId>", "&amp;", "<ETag>x</ETag>", "&#0;", "&x;", "<!DOCTYPE d>", "<![CDATA[", "]]>", "<?x?>",
    '<Delete xmlns="urn:x">',
]
# fmt: on


@given(
    method=st.sampled_from(["PUT", "PUT", "PUT", "POST", "DELETE"]),
    target=st.sampled_from(TARGETS),
    fields=st.lists(st.sampled_from(FIELDS), max_size=5),
    body=st.one_of(st.none(), st.sampled_from(BODIES)),
    pieces=st.sampled_from([1 << 20, 5]),
    write=st.sampled_from(["through", "back"]),
    open_to_all=st.booleans(),
)
@example("PUT", "/corpus/new", [], DATA, 5, "back", True)
@example("POST", "/corpus?delete", [], BODIES[-2], 5, "back", True)
@example("PUT", "/corpus/k", TWICE, DATA[:-1], 1 << 20, "through", True)
@settings(max_examples=500, deadline=None)
def test_any_write_is_whole_or_nothing(
    method: str,
    target: str,
    fields: list[tuple[str, str]],
    body: bytes | None,
    pieces: int,
    write: str,
    open_to_all: bool,
) -> None:
    identities = [] if open_to_all else [Identity("i", "AKID", "secret", grants=parse_grants("write:*"))]
    front = Front(*identities, corpus={"k": Object(b"old")})
    front.reads.write = write  # type: ignore[assignment]
    front.reads.answers = dict.fromkeys(OTHER_CALLS, NotFound("not here", code="NoSuchUpload"))
    sent = dict(fields)  # of two with one name the last
    answer = front.ask(method, target, sent, body, pieces)
    assert 200 <= answer.status < 600
    assert answer.status != 500, answer.body
    assert re.fullmatch(rb"([!-9;-~]+: [^\x00-\x1f\x7f]*\r\n)+", answer.head)
    assert answer.status < 300 or answer.code
    assert front.left_over == []
    objects = front.reads.buckets["corpus"]
    if not open_to_all or answer.status >= 300:
        assert {key: found.data for key, found in objects.items()} == {"k": b"old"}, "a refused write left a trace"
    streaming = any(value.startswith("STREAMING-") for value in sent.values())
    measured = "x-amz-decoded-content-length" in sent
    framed = streaming or (measured and any("aws-chunked" in value for value in sent.values()))
    for found in objects.values():
        whole = (b"old", b"", DATA, LONG) if framed else (b"old", body or b"")
        assert found.data in whole, "neither the old object nor the body that was sent"


@given(st.lists(st.one_of(st.sampled_from(DELETE_PIECES), st.text(max_size=5)), max_size=12).map("".join))
@example("<Delete><Object><Key>k</Key></Object></Delete>")
@settings(max_examples=300)
def test_any_document_names_keys_or_is_malformed(text: str) -> None:
    try:
        asked, _ = parse_deletes(text.encode("utf-8", "surrogatepass"))
    except Invalid as refused:
        code = refused.code
    else:
        assert 1 <= len(asked) <= limits.DELETE_KEYS_MAX
        return
    assert code == "MalformedXML"
