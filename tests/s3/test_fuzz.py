"""Anything a client can send: never an exception but ours, never another bucket or key, always a well-formed answer."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote
from xml.etree import ElementTree

from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.core.access import Identity, parse_grants
from forebay.core.errors import Denied, ForebayError, Invalid, NotFound
from forebay.core.s3rules.names import Addressing, decode_path
from forebay.core.s3rules.sigv4 import Verifier, canonical_path, canonical_query, parse_query
from forebay.core.types import ListEntry, ListPage
from forebay.node.front.http.auth import is_this_machine
from forebay.node.front.s3.listing import decode_token, parse_list, render_list
from forebay.node.front.s3.xml import element, escape, timestamp
from tests.s3.fake_front import OTHER_CALLS, Front, Object

EVERY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
# fmt: off
TARGET_PIECES = [
    b"/", b"//", b"..", b"%2f", b"%", b"%zz", b"%00", b"+", b"?", b"&", b"=", b"corpus", b"k", b"%ff", b"list-type=2",
    b"prefix=", b"max-keys=", b"versionId=", b"partNumber=", b"acl", b"X-Amz-Signature=", b"response-expires=",
]
HEADER_NAMES = [
    "host", "range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range", "x-amz-date",
    "authorization", "x-amz-content-sha256", "x-amz-checksum-mode", "x-amz-security-token", "x-amz-other",
]
FORGED = "AWS4-HMAC-SHA256 Credential=AKID/20130524/r/s3/aws4_request, SignedHeaders=host, Signature=" + "0" * 64
HEADER_VALUES = [
    "bytes=0-", "bytes=-1", '"*"', "*", 'W/"a"', "corpus.localhost", "UNSIGNED-PAYLOAD", "20130524T000000Z", FORGED,
]
AUTHORIZATION_PIECES = [
    b"AWS4-HMAC-SHA256 ", b"Credential=", b"AKID", b"/20130524", b"/us-east-1", b"/s3", b"/aws4_request", b", ", b"/",
    b"SignedHeaders=", b"host", b";x-amz-date", b",Signature=", b"0" * 64, b"AWS ", b"Bearer x",
]
SIGNED_QUERY_PIECES = [
    b"X-Amz-Algorithm=AWS4-HMAC-SHA256", b"X-Amz-Credential=AKID/20130524/r/s3/aws4_request", b"X-Amz-Expires=9",
    b"X-Amz-Date=20130524T000000Z", b"X-Amz-Expires=x", b"X-Amz-SignedHeaders=host", b"X-Amz-Signature=" + b"0" * 64,
    b"Signature=", b"prefix=%ff",
]
LIST_PARAMETERS = [
    "list-type", "prefix", "delimiter", "max-keys", "marker", "start-after", "continuation-token", "encoding-type",
    "fetch-owner",
]
# fmt: on


def _joined(pieces: list[bytes], separator: bytes = b"") -> st.SearchStrategy[bytes]:
    piece = st.one_of(st.sampled_from(pieces), st.sampled_from(pieces), st.binary(min_size=1, max_size=4))
    return st.lists(piece, max_size=14).map(separator.join)


@given(
    method=st.sampled_from(["GET", "HEAD", "PUT", "OPTIONS", "BREW"]),
    target=_joined(TARGET_PIECES),
    headers=st.dictionaries(
        st.sampled_from(HEADER_NAMES),
        st.one_of(st.sampled_from(HEADER_VALUES), st.text(st.characters(min_codepoint=32, max_codepoint=126))),
        max_size=5,
    ),
    open_to_all=st.booleans(),
)
@example(method="GET", target=b"/corpus/k", headers={"range": "bytes=0-0"}, open_to_all=True)
@settings(max_examples=600, deadline=None)
def test_any_request_gets_one_well_formed_answer(
    method: str, target: bytes, headers: dict[str, str], open_to_all: bool
) -> None:
    identities = [] if open_to_all else [Identity("i", "AKID", "secret", grants=parse_grants("read:*"))]
    front = Front(*identities, now_s=1369353600.0, corpus={"k": Object(b"data")})
    front.reads.answers = dict.fromkeys(OTHER_CALLS, NotFound("not here"))
    answer = front.ask(method, target, headers)
    assert 200 <= answer.status < 600
    assert answer.status != 500, answer.body
    assert re.fullmatch(rb"([!-9;-~]+: [^\x00-\x1f\x7f]*\r\n)+", answer.head)
    if answer.status >= 400:
        assert answer.code
        ours = answer.status == 403 and is_this_machine(headers.get("host", ""))
        assert not open_to_all or not ours or method == "OPTIONS"
        assert answer.status != 401
    if not open_to_all:
        assert answer.status not in (200, 206), "nobody here can sign"
    for bucket, key, _ in front.reads.asked:
        assert open_to_all
        assert quote(key, safe="").lower() in quote(decode_path(target.partition(b"?")[0]), safe="").lower()
        assert bucket == "corpus"


@given(key=EVERY_TEXT.filter(bool), bucket=st.from_regex(r"[a-z0-9][a-z0-9.\-]{1,20}[a-z0-9]", fullmatch=True))
@settings(max_examples=300)
def test_a_quoted_name_comes_back_whole(key: str, bucket: str) -> None:
    addressing = Addressing()
    for safe in ("/", "", "/+!$&'()*,;=:@~"):
        quoted = quote(key, safe=safe).encode()
        assert addressing.split(b"/" + bucket.encode() + b"/" + quoted, b"127.0.0.1:9400") == (bucket, key)
        assert addressing.split(b"/" + quoted, bucket.encode() + b".s3.localhost:80") == (bucket, key)


def _refusal(error: ForebayError) -> str:
    """The code of an error that is one of ours to raise."""
    assert error.kind in ("Denied", "Invalid")
    assert error.message
    return error.code


@given(path=st.one_of(st.binary(max_size=60), _joined(TARGET_PIECES)), host=st.binary(max_size=30))
@settings(max_examples=400)
def test_any_target_is_a_name_or_invalid(path: bytes, host: bytes) -> None:
    try:
        bucket, key = Addressing().split(path, host)
    except Invalid as refused:
        code = _refusal(refused)
    else:
        assert len(key.encode()) <= 1024
        assert bucket or not key
        return
    assert code in ("InvalidURI", "InvalidBucketName", "KeyTooLongError")


@given(query=st.binary(max_size=120), path=st.binary(max_size=40))
@settings(max_examples=300)
def test_canonical_forms_are_stable(query: bytes, path: bytes) -> None:
    """Encoding what was decoded changes nothing more: signer and verifier cannot disagree about a canonical form."""
    canonical = canonical_query(parse_query(query))
    assert canonical_query(parse_query(canonical)) == canonical
    assert canonical_path(canonical_path(path)) == canonical_path(path)
    assert re.fullmatch(rb"[A-Za-z0-9_.~%/-]*", canonical_path(path))


@given(
    authorization=st.one_of(st.none(), _joined(AUTHORIZATION_PIECES)),
    query=st.one_of(st.just(b""), _joined(SIGNED_QUERY_PIECES, b"&"), _joined(TARGET_PIECES)),
)
@settings(max_examples=600)
def test_no_forged_signature_passes_and_nothing_else_is_raised(authorization: bytes | None, query: bytes) -> None:
    headers = {b"host": b"h", b"x-amz-date": b"20130524T000000Z", b"x-amz-content-sha256": b"UNSIGNED-PAYLOAD"}
    if authorization is not None:
        headers[b"authorization"] = authorization
    try:
        verified = Verifier({"AKID": "secret"}).verify(1369353600.0, b"GET", b"/corpus/k", query, headers)
    except (Denied, Invalid) as refused:
        code = _refusal(refused)
    else:
        assert verified is None
        assert authorization is None
        return
    assert code


@given(
    query=st.dictionaries(
        st.sampled_from(LIST_PARAMETERS), st.one_of(EVERY_TEXT, st.sampled_from(["1", "2", "url", "true", "0"]))
    ),
    key=EVERY_TEXT,
)
@example(query={"prefix": "\x1f", "list-type": "1", "encoding-type": "url"}, key="a")
@settings(max_examples=300)
def test_any_listing_is_refused_or_well_formed(query: dict[str, str], key: str) -> None:
    try:
        asked = parse_list(query)
    except Invalid as refused:
        code = _refusal(refused)
    else:
        body = render_list("corpus", asked, ListPage([ListEntry(key, 1, "e", 0.0)], [key], key)).decode()
        assert not re.search("[\x00-\x09\x0b-\x1f]", body)
        illegal = re.compile("&#x(?:[0-8bcef]|1[0-9a-f]|fff[ef]);")
        assert not (asked.url_encoded and illegal.search(body) and not asked.token)
        assert ElementTree.fromstring(illegal.sub("", body)) is not None
        return
    assert code == "InvalidArgument"


@given(EVERY_TEXT)
@settings(max_examples=300)
def test_escaped_text_is_read_back_by_a_parser(text: str) -> None:
    xml = element("Key", text)
    assert not re.search("[\x00-\x1f]", xml)
    readable = "".join(c for c in text if c in "\t\n\r" or (ord(c) >= 32 and c not in "\ufffe\uffff"))
    assert ElementTree.fromstring(f"<Key>{escape(readable)}</Key>").text == (readable or None)


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_any_token_is_ours_or_invalid(text: str) -> None:
    try:
        decode_token(text)
    except Invalid:
        pass


@given(st.floats(allow_nan=True, allow_infinity=True))
@settings(max_examples=100)
def test_any_time_can_be_shown(moment_s: float) -> None:
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z", timestamp(moment_s))


@given(st.integers(0, 253402300799))
@settings(max_examples=200)
def test_times_are_shown_as_the_calendar_says(moment_s: int) -> None:
    assert timestamp(moment_s) == datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z").zfill(24)


def test_an_error_of_any_text_renders() -> None:
    front = Front()
    for text in ("", "\x00<>&", "ä" * 5000, "]]>"):
        assert ElementTree.fromstring(
            front.handler.render_error(ForebayError(text.replace("\x00", "")), None).body
        ).findtext("Code")
