"""Signatures: the published examples, round trips with the signer that clients use, and everything that must fail."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore import auth as botocore_auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.s3rules.signedbody import (
    CHUNKS,
    CHUNKS_TRAILER,
    EMPTY_SHA256,
    UNSIGNED,
    UNSIGNED_TRAILER,
    ChunkVerifier,
    check_payload,
    check_payload_form,
    check_payload_sha256,
    signs_sha256,
)
from forebay.core.s3rules.sigv4 import (
    EXPIRES_S_MAX,
    SCOPES_KEPT_MAX,
    SKEW_S_MAX,
    Verified,
    Verifier,
    canonical_path,
    canonical_query,
    parse_query,
    parse_stamp,
)

# Key, requests and signatures of the examples that AWS publishes with its S3 authentication guide.
KEY_ID, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
STAMP = b"20130524T000000Z"
NOW_S = 1369353600
HOST = b"examplebucket.s3.amazonaws.com"


# The policy of AWS's example of a form upload, signed with the same key.
POLICY = (
    "eyAiZXhwaXJhdGlvbiI6ICIyMDE1LTEyLTMwVDEyOjAwOjAwLjAwMFoiLA0KICAiY29uZGl0aW9ucyI6IFsNCiAgICB7ImJ1Y2tldCI6ICJzaW"
    "d2NGV4YW1wbGVidWNrZXQifSwNCiAgICBbInN0YXJ0cy13aXRoIiwgIiRrZXkiLCAidXNlci91c2VyMS8iXSwNCiAgICB7ImFjbCI6ICJwdWJs"
    "aWMtcmVhZCJ9LA0KICAgIHsic3VjY2Vzc19hY3Rpb25fcmVkaXJlY3QiOiAiaHR0cDovL3NpZ3Y0ZXhhbXBsZWJ1Y2tldC5zMy5hbWF6b25hd3"
    "MuY29tL3N1Y2Nlc3NmdWxfdXBsb2FkLmh0bWwifSwNCiAgICBbInN0YXJ0cy13aXRoIiwgIiRDb250ZW50LVR5cGUiLCAiaW1hZ2UvIl0sDQog"
    "ICAgeyJ4LWFtei1tZXRhLXV1aWQiOiAiMTQzNjUxMjM2NTEyNzQifSwNCiAgICB7IngtYW16LXNlcnZlci1zaWRlLWVuY3J5cHRpb24iOiAiQU"
    "VTMjU2In0sDQogICAgWyJzdGFydHMtd2l0aCIsICIkeC1hbXotbWV0YS10YWciLCAiIl0sDQoNCiAgICB7IngtYW16LWNyZWRlbnRpYWwiOiAi"
    "QUtJQUlPU0ZPRE5ON0VYQU1QTEUvMjAxNTEyMjkvdXMtZWFzdC0xL3MzL2F3czRfcmVxdWVzdCJ9LA0KICAgIHsieC1hbXotYWxnb3JpdGhtIj"
    "ogIkFXUzQtSE1BQy1TSEEyNTYifSwNCiAgICB7IngtYW16LWRhdGUiOiAiMjAxNTEyMjlUMDAwMDAwWiIgfQ0KICBdDQp9"
)


def _authorization(names: bytes, signature: bytes, credential: bytes = b"20130524/us-east-1/s3/aws4_request") -> bytes:
    return b"AWS4-HMAC-SHA256 Credential=%b/%b,SignedHeaders=%b,Signature=%b" % (
        KEY_ID.encode(),
        credential,
        names,
        signature,
    )


GET_RANGE = {
    b"host": HOST,
    b"range": b"bytes=0-9",
    b"x-amz-content-sha256": EMPTY_SHA256,
    b"x-amz-date": STAMP,
    b"authorization": _authorization(
        b"host;range;x-amz-content-sha256;x-amz-date",
        b"f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
    ),
}
PRESIGNED = (
    b"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    b"&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    b"&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)


def _verifier() -> Verifier:
    return Verifier({KEY_ID: SECRET})


def _get(query: bytes, signature: bytes) -> Verified | None:
    headers = {b"host": HOST, b"x-amz-content-sha256": EMPTY_SHA256, b"x-amz-date": STAMP}
    headers[b"authorization"] = _authorization(b"host;x-amz-content-sha256;x-amz-date", signature)
    return _verifier().verify(NOW_S, b"GET", b"/", query, headers)


def test_the_published_examples_verify() -> None:
    who = (KEY_ID, "us-east-1", EMPTY_SHA256, False)
    listing = b"34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    for verified in (
        _verifier().verify(NOW_S, b"GET", b"/test.txt", b"", GET_RANGE),
        _get(b"lifecycle", b"fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        _get(b"max-keys=2&prefix=J", listing),
        _get(b"prefix=J&max-keys=2", listing),
    ):
        assert verified is not None
        assert verified[:4] == who
        assert verified.key.hex() not in repr(verified)
        assert repr(verified.key) not in repr(verified)


def test_the_published_put_verifies_with_its_body_and_not_with_another() -> None:
    body_sha256 = b"44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
    headers = {
        b"host": HOST,
        b"date": b"Fri, 24 May 2013 00:00:00 GMT",
        b"x-amz-content-sha256": body_sha256,
        b"x-amz-date": STAMP,
        b"x-amz-storage-class": b"REDUCED_REDUNDANCY",
        b"authorization": _authorization(
            b"date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
            b"98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
    }
    body = b"Welcome to Amazon S3."
    assert _verifier().verify(NOW_S, b"PUT", b"/test$file.text", b"", headers, body) is not None
    with pytest.raises(Invalid) as caught:
        _verifier().verify(NOW_S, b"PUT", b"/test$file.text", b"", headers, body + b"!")
    assert caught.value.code == "XAmzContentSHA256Mismatch"


def test_the_published_presigned_url_verifies_until_it_expires() -> None:
    headers = {b"host": HOST}

    def at(now_s: float) -> Verified | None:
        return _verifier().verify(now_s, b"GET", b"/test.txt", PRESIGNED, headers)

    verified = at(NOW_S)
    assert verified is not None
    assert verified[:4] == (KEY_ID, "us-east-1", UNSIGNED, True)
    assert at(NOW_S + 86400) is not None
    assert at(NOW_S - SKEW_S_MAX) is not None
    for now_s, words in ((NOW_S + 86401, "Request has expired"), (NOW_S - SKEW_S_MAX - 1, "not valid yet")):
        with pytest.raises(Denied, match=words) as caught:
            at(now_s)
        assert caught.value.code == "AccessDenied"


# --- bodies in chunks: the two uploads that AWS publishes -------------------------------------------------------------
CHUNK_BYTES = (b"a" * 65536, b"a" * 1024, b"")
SIGNED_CHUNKS = (
    b"ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    b"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    b"b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
)


def _chunked_upload(payload: bytes, seed: bytes, extra: dict[bytes, bytes]) -> Verified:
    headers = {
        b"host": b"s3.amazonaws.com",
        b"x-amz-date": STAMP,
        b"x-amz-storage-class": b"REDUCED_REDUNDANCY",
        b"x-amz-content-sha256": payload,
        b"content-encoding": b"aws-chunked",
        b"x-amz-decoded-content-length": b"66560",
        **extra,
    }
    names = b";".join(sorted(headers))
    headers[b"authorization"] = _authorization(names, seed)
    headers[b"content-length"] = headers.get(b"content-length", b"66946")
    verified = _verifier().verify(NOW_S, b"PUT", b"/examplebucket/chunkObject.txt", b"", headers, None)
    assert verified is not None
    assert verified.payload == payload
    return verified


def _signed_chunks() -> Verified:
    seed = b"4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    return _chunked_upload(CHUNKS, seed, {b"content-length": b"66824"})


def test_the_published_chunks_verify_in_their_order_only() -> None:
    hashes = [sha256(chunk).hexdigest() for chunk in CHUNK_BYTES]
    chunks = ChunkVerifier(_signed_chunks())
    for digest, signature in zip(hashes, SIGNED_CHUNKS, strict=True):
        chunks.check(digest, signature)
    for wrong in (
        [(hashes[1], SIGNED_CHUNKS[1])],  # the first one is missing
        [(hashes[0], SIGNED_CHUNKS[0]), (hashes[0], SIGNED_CHUNKS[0])],  # repeated
        [(hashes[0], SIGNED_CHUNKS[0]), (hashes[2], SIGNED_CHUNKS[2])],  # ended early
        [(hashes[1], SIGNED_CHUNKS[0])],  # other bytes
        [(hashes[0], b"")],
        [(hashes[0], SIGNED_CHUNKS[0].upper())],
        [(hashes[0], b"\xff" * 64)],
    ):
        chunks = ChunkVerifier(_signed_chunks())
        for digest, signature in wrong[:-1]:
            chunks.check(digest, signature)
        with pytest.raises(Denied) as caught:
            chunks.check(*wrong[-1])
        assert caught.value.code == "SignatureDoesNotMatch"


def test_the_published_trailer_verifies_and_no_other() -> None:
    seed = b"106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
    signatures = (
        b"b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        b"1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        b"2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
    )
    trailer = [(b"x-amz-checksum-crc32c", b"sOO8/Q==")]
    signature = b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435"

    def behind_the_chunks() -> ChunkVerifier:
        chunks = ChunkVerifier(_chunked_upload(CHUNKS_TRAILER, seed, {b"x-amz-trailer": b"x-amz-checksum-crc32c"}))
        for chunk, each in zip(CHUNK_BYTES, signatures, strict=True):
            chunks.check(sha256(chunk).hexdigest(), each)
        return chunks

    behind_the_chunks().check_trailer(trailer, signature)
    behind_the_chunks().check_trailer([(b"X-Amz-Checksum-Crc32c", b" sOO8/Q==")], signature)
    for wrong in ([], [(b"x-amz-checksum-crc32c", b"sOO8/Q=0")], [*trailer, (b"x-amz-checksum-sha1", b"x")]):
        with pytest.raises(Denied):
            behind_the_chunks().check_trailer(wrong, signature)
    with pytest.raises(Denied):
        behind_the_chunks().check_trailer(trailer, signatures[2])


def test_what_may_be_said_of_a_body() -> None:
    hello = sha256(b"hello").hexdigest()
    for payload in (UNSIGNED, UNSIGNED_TRAILER, CHUNKS, CHUNKS_TRAILER):
        check_payload_form(payload)
        check_payload(payload, b"anything")
        assert not signs_sha256(payload)
    check_payload(hello.encode(), b"hello")
    check_payload_sha256(hello.encode(), hello)
    assert signs_sha256(hello.encode())
    with pytest.raises(Invalid) as caught:
        check_payload_sha256(hello.encode(), sha256(b"hullo").hexdigest())
    assert caught.value.code == "XAmzContentSHA256Mismatch"
    for payload in (b"", b"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD", b"unsigned-payload", hello.upper().encode()):
        with pytest.raises(Invalid) as caught:
            check_payload_form(payload)
        assert caught.value.code == "InvalidArgument"


def test_a_body_to_come_is_left_to_who_receives_it() -> None:
    request = AWSRequest("PUT", "http://127.0.0.1:9400/bucket/key", data=b"a body")
    botocore_auth.S3SigV4Auth(CREDENTIALS, "s3", "us-east-1").add_auth(request)
    path, query, headers = _arrived(request)
    headers.setdefault(b"x-amz-content-sha256", UNSIGNED)
    verified = _verifier().verify(_now_s(), b"PUT", path, query, headers, None)
    assert verified is not None
    check_payload(verified.payload, b"a body")


# --- form uploads -----------------------------------------------------------------------------------------------------
def test_the_published_form_verifies_and_no_changed_one() -> None:
    fields = {
        "policy": POLICY,
        "x-amz-algorithm": "AWS4-HMAC-SHA256",
        "x-amz-credential": f"{KEY_ID}/20151229/us-east-1/s3/aws4_request",
        "x-amz-date": "20151229T000000Z",
        "x-amz-signature": "8afdbf4008c03f22c2cd3cdb72e4afbb1f6a588f3255ac628749a66d7f09699e",
    }
    verified = _verifier().verify_policy(fields)
    assert verified[:2] == (KEY_ID, "us-east-1")
    for changes, code in (
        ({"policy": POLICY[:-4] + "AAAA"}, "SignatureDoesNotMatch"),
        ({"x-amz-signature": "0" * 64}, "SignatureDoesNotMatch"),
        ({"x-amz-signature": "Ä"}, "SignatureDoesNotMatch"),
        ({"x-amz-signature": ""}, "InvalidArgument"),
        ({"policy": ""}, "InvalidArgument"),
        ({"x-amz-algorithm": "AWS4-HMAC-SHA1"}, "InvalidArgument"),
        ({"x-amz-credential": "x"}, "InvalidArgument"),
        ({"x-amz-credential": "AKIB/20151229/us-east-1/s3/aws4_request"}, "InvalidAccessKeyId"),
        ({"x-amz-date": "20151230T000000Z"}, "InvalidArgument"),
        ({"x-amz-date": "today"}, "InvalidArgument"),
        ({"x-amz-security-token": "t"}, "InvalidToken"),
    ):
        with pytest.raises(ForebayError) as caught:
            _verifier().verify_policy({**fields, **changes})
        assert caught.value.code == code, changes


def test_a_request_without_any_trace_of_a_signature_is_anonymous() -> None:
    assert _verifier().verify(NOW_S, b"GET", b"/k", b"", {b"host": b"h"}) is None
    assert _verifier().verify(NOW_S, b"GET", b"/k", b"prefix=a%2Fb&list-type=2", {b"host": b"h"}) is None


def _without(name: bytes) -> dict[bytes, bytes]:
    return {key: value for key, value in GET_RANGE.items() if key != name}


def _with_authorization(value: bytes) -> dict[bytes, bytes]:
    return {**GET_RANGE, b"authorization": value}


GOOD = GET_RANGE[b"authorization"]
NAMES = b"host;range;x-amz-content-sha256;x-amz-date"
HEADER_FAILURES: list[tuple[str, Mapping[bytes, bytes], str]] = [
    ("another secret's signature", _with_authorization(GOOD[:-1] + b"0"), "SignatureDoesNotMatch"),
    ("another range than signed", {**GET_RANGE, b"range": b"bytes=0-8"}, "SignatureDoesNotMatch"),
    ("another host than signed", {**GET_RANGE, b"host": b"other"}, "SignatureDoesNotMatch"),
    ("a signed header that did not arrive", _without(b"range"), "SignatureDoesNotMatch"),
    ("an unknown key", _with_authorization(GOOD.replace(b"AKIA", b"AKIB")), "InvalidAccessKeyId"),
    ("no date", _without(b"x-amz-date"), "AccessDenied"),
    ("a date that is none", {**GET_RANGE, b"x-amz-date": b"20131324T000000Z"}, "AccessDenied"),
    ("no payload hash", _without(b"x-amz-content-sha256"), "InvalidRequest"),
    ("an x-amz header that is not signed", {**GET_RANGE, b"x-amz-checksum-mode": b"ENABLED"}, "AccessDenied"),
    ("a session token", {**GET_RANGE, b"x-amz-security-token": b"t"}, "AccessDenied"),
    ("version 2", _with_authorization(b"AWS AKIAIOSFODNN7EXAMPLE:frJIUN8DYpKDtOLCwo//yllqDzg="), "InvalidRequest"),
    ("version 4a", _with_authorization(b"AWS4-ECDSA-P256-SHA256 Credential=a"), "InvalidRequest"),
    ("a bearer token", _with_authorization(b"Bearer abc"), "InvalidArgument"),
    ("an empty header", _with_authorization(b""), "AccessDenied"),
    ("words of version 2", _with_authorization(b"AWS LALALA"), "InvalidArgument"),
    ("words only", _with_authorization(b"AWS4-HMAC-SHA256"), "AuthorizationHeaderMalformed"),
    ("no signature", _with_authorization(GOOD.replace(b"Signature=", b"Sign=")), "AuthorizationHeaderMalformed"),
    ("an upper-case signature", _with_authorization(GOOD[:-64] + GOOD[-64:].upper()), "SignatureDoesNotMatch"),
    ("a cut signature", _with_authorization(GOOD[:-1]), "SignatureDoesNotMatch"),
    ("a long signature", _with_authorization(GOOD + b"0"), "SignatureDoesNotMatch"),
    ("a cut signature of nobody", _with_authorization(GOOD.replace(b"AKIA", b"AKIB")[:-9]), "InvalidAccessKeyId"),
    ("a short credential", _with_authorization(_authorization(NAMES, b"0" * 64, b"x")), "AuthorizationHeaderMalformed"),
    (
        "another service",
        _with_authorization(_authorization(NAMES, b"0" * 64, b"20130524/us-east-1/ec2/aws4_request")),
        "AuthorizationHeaderMalformed",
    ),
    (
        "another terminator",
        _with_authorization(_authorization(NAMES, b"0" * 64, b"20130524/us-east-1/s3/aws5_request")),
        "AuthorizationHeaderMalformed",
    ),
    (
        "no region",
        _with_authorization(_authorization(NAMES, b"0" * 64, b"20130524//s3/aws4_request")),
        "AuthorizationHeaderMalformed",
    ),
    (
        "another day in the credential",
        _with_authorization(_authorization(NAMES, b"0" * 64, b"20130525/us-east-1/s3/aws4_request")),
        "AuthorizationHeaderMalformed",
    ),
    (
        "a day that is none",
        _with_authorization(_authorization(NAMES, b"0" * 64, b"2013/us-east-1/s3/aws4_request")),
        "AuthorizationHeaderMalformed",
    ),
    ("host not signed", _with_authorization(_authorization(b"range", b"0" * 64)), "AuthorizationHeaderMalformed"),
]


@pytest.mark.parametrize(("what", "headers", "code"), HEADER_FAILURES, ids=[row[0] for row in HEADER_FAILURES])
def test_a_header_that_does_not_verify(what: str, headers: Mapping[bytes, bytes], code: str) -> None:
    for verifier in (_verifier(), warmed()):
        with pytest.raises(ForebayError) as caught:
            verifier.verify(NOW_S, b"GET", b"/test.txt", b"", headers)
        assert caught.value.code == code, caught.value.message


def warmed() -> Verifier:
    """A verifier that has seen the good request, so that what it keeps cannot let a bad one pass."""
    verifier = _verifier()
    assert verifier.verify(NOW_S, b"GET", b"/test.txt", b"", GET_RANGE) is not None
    return verifier


def test_method_path_and_query_are_signed_too() -> None:
    for method, path, query in (
        (b"HEAD", b"/test.txt", b""),
        (b"GET", b"/test.tx", b""),
        (b"GET", b"/test.txt", b"a=b"),
    ):
        with pytest.raises(Denied) as caught:
            warmed().verify(NOW_S, method, path, query, GET_RANGE)
        assert caught.value.code == "SignatureDoesNotMatch"


def test_clocks_may_differ_by_a_quarter_of_an_hour() -> None:
    for off_s in (-SKEW_S_MAX, SKEW_S_MAX):
        assert warmed().verify(NOW_S + off_s, b"GET", b"/test.txt", b"", GET_RANGE) is not None
    for off_s in (-SKEW_S_MAX - 1, SKEW_S_MAX + 1):
        with pytest.raises(Denied) as caught:
            warmed().verify(NOW_S + off_s, b"GET", b"/test.txt", b"", GET_RANGE)
        assert caught.value.code == "RequestTimeTooSkewed"


def _presigned(**changes: str | None) -> bytes:
    pairs = {name.decode(): value.decode() for name, value in parse_query(PRESIGNED)}
    for name, value in changes.items():
        pairs[name.replace("_", "-")] = value or ""
        if value is None:
            del pairs[name.replace("_", "-")]
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in pairs.items()).encode()


QUERY_FAILURES = [
    (_presigned(X_Amz_Signature="0" * 64), "SignatureDoesNotMatch"),
    (_presigned(X_Amz_Signature="Ä"), "SignatureDoesNotMatch"),
    (_presigned(X_Amz_Expires="86401"), "SignatureDoesNotMatch"),
    (_presigned() + b"&response-content-type=text%2Fhtml", "SignatureDoesNotMatch"),
    (_presigned(X_Amz_Credential="AKIB/20130524/us-east-1/s3/aws4_request"), "InvalidAccessKeyId"),
    (_presigned(X_Amz_Expires=str(EXPIRES_S_MAX + 1)), "AccessDenied"),
    (_presigned(X_Amz_Expires="-1"), "AccessDenied"),
    (_presigned(X_Amz_Expires="0"), "AccessDenied"),
    (_presigned(X_Amz_Expires="soon"), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Expires=None), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Signature=None), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Algorithm=None), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Algorithm="AWS4-HMAC-SHA1"), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Date="2013-05-24"), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Date="20130525T000000Z"), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_SignedHeaders="range"), "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Credential="x"), "AuthorizationQueryParametersError"),
    (_presigned() + b"&X-Amz-Expires=1", "AuthorizationQueryParametersError"),
    (_presigned(X_Amz_Security_Token="t"), "InvalidToken"),
    (b"AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE&Expires=1&Signature=x", "AccessDenied"),
]


@pytest.mark.parametrize(("query", "code"), QUERY_FAILURES)
def test_a_presigned_query_that_does_not_verify(query: bytes, code: str) -> None:
    with pytest.raises(ForebayError) as caught:
        _verifier().verify(NOW_S, b"GET", b"/test.txt", query, {b"host": HOST})
    assert caught.value.code == code


def test_a_percent_encoded_parameter_name_does_not_hide_a_signature() -> None:
    hidden = PRESIGNED.replace(b"X-Amz-", b"X%2DAm%7A%2D")
    assert _verifier().verify(NOW_S, b"GET", b"/test.txt", hidden, {b"host": HOST}) is not None
    with pytest.raises(Denied, match="expired"):
        _verifier().verify(NOW_S + 10**6, b"GET", b"/test.txt", hidden, {b"host": HOST})


def test_header_and_query_together_are_refused() -> None:
    with pytest.raises(Invalid) as caught:
        _verifier().verify(NOW_S, b"GET", b"/test.txt", PRESIGNED, GET_RANGE)
    assert caught.value.code == "InvalidArgument"


def test_an_unsigned_amz_header_beside_a_presigned_url_is_refused() -> None:
    with pytest.raises(Denied, match="not signed"):
        _verifier().verify(NOW_S, b"GET", b"/test.txt", PRESIGNED, {b"host": HOST, b"x-amz-acl": b"public-read"})


def test_kept_scopes_are_bounded_and_unknown_keys_are_not_kept() -> None:
    verifier = _verifier()
    for number in range(SCOPES_KEPT_MAX + 10):
        names = b"host;x-amz-content-sha256;x-amz-date;y%d" % number
        with pytest.raises(Denied):
            verifier.verify(NOW_S, b"GET", b"/", b"", _with_authorization(_authorization(names, b"0" * 64)))
        with pytest.raises(Denied):
            verifier.verify(NOW_S, b"GET", b"/", b"", _with_authorization(GOOD.replace(b"AKIA", b"%04d" % number)))
    assert len(verifier._scopes) <= SCOPES_KEPT_MAX


def test_time_stamps() -> None:
    assert parse_stamp(STAMP) == NOW_S
    for bad in (b"", b"20130524", b"20130229T000000Z", b"20130524T240000Z", b"20130524T000000", b"2013052 T000000Z"):
        assert parse_stamp(bad) is None


def test_paths_are_encoded_once_and_never_normalised() -> None:
    for path, canonical in (
        (b"/a/b.txt", b"/a/b.txt"),
        (b"/a//b/../c/.", b"/a//b/../c/."),
        (b"/a%2fb", b"/a/b"),
        (b"/%41", b"/A"),
        (b"/a b", b"/a%20b"),
        (b"/a+b", b"/a%2Bb"),
        (b"/a%2Bb", b"/a%2Bb"),
        (b"/%e4%b8%ad", b"/%E4%B8%AD"),
        (b"/a%25b", b"/a%25b"),
        (b"/a$b", b"/a%24b"),
    ):
        assert canonical_path(path) == canonical
    assert canonical_query(parse_query(b"b=2&a=1&a=0&c&d=x+y&e=%2F")) == b"a=0&a=1&b=2&c=&d=x%20y&e=%2F"


# --- round trips with botocore, which signs what boto3, awscli and s3fs send ------------------------------------------
CREDENTIALS = Credentials(KEY_ID, SECRET)


def _now_s() -> float:
    return datetime.now(UTC).timestamp()


def _arrived(request: Any) -> tuple[bytes, bytes, dict[bytes, bytes]]:
    """Path, query and headers as a server sees them."""
    url = urlsplit(request.url)
    headers = {name.lower().encode(): str(value).encode() for name, value in request.headers.items()}
    headers.setdefault(b"host", url.netloc.encode())
    return url.path.encode(), url.query.encode(), headers


KEYS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@given(key=KEYS, region=st.sampled_from(["us-east-1", "eu-central-1", "auto"]), value=KEYS)
@settings(max_examples=60, deadline=None)
def test_what_botocore_signs_verifies(key: str, region: str, value: str) -> None:
    url = f"http://127.0.0.1:9400/bucket/{quote(key, safe='/~')}?prefix={quote(value, safe='')}&list-type=2"
    request = AWSRequest("GET", url, headers={"x-amz-checksum-mode": "ENABLED", "Range": "bytes=0-1"})
    botocore_auth.S3SigV4Auth(CREDENTIALS, "s3", region).add_auth(request)
    path, query, headers = _arrived(request)
    verified = _verifier().verify(_now_s(), b"GET", path, query, headers)
    assert verified is not None
    assert (verified.key_id, verified.region) == (KEY_ID, region)
    with pytest.raises(Denied):
        _verifier().verify(_now_s(), b"GET", path + b"x", query, headers)


@given(key=KEYS, expires_s=st.integers(1, EXPIRES_S_MAX))
@settings(max_examples=40, deadline=None)
def test_what_botocore_presigns_verifies(key: str, expires_s: int) -> None:
    url = f"http://corpus.localhost:9400/{quote(key, safe='/~')}?response-content-type=text%2Fplain"
    request = AWSRequest("GET", url)
    botocore_auth.S3SigV4QueryAuth(CREDENTIALS, "s3", "us-east-1", expires=expires_s).add_auth(request)
    path, query, headers = _arrived(request)
    assert _verifier().verify(_now_s(), b"GET", path, query, headers) is not None
    with pytest.raises(Denied, match="expired"):
        _verifier().verify(_now_s() + expires_s + 2, b"GET", path, query, headers)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_one_changed_byte_anywhere_is_noticed(data: st.DataObject) -> None:
    """Whatever single byte of what is signed changes, the request is refused, and with an error of ours."""
    fields: dict[str, bytes] = {"method": b"GET", "path": b"/test.txt", "range": b"bytes=0-9", "authorization": GOOD}
    fields |= {"host": HOST, "x-amz-date": STAMP, "x-amz-content-sha256": EMPTY_SHA256}
    name = data.draw(st.sampled_from(sorted(fields)))
    at = data.draw(st.integers(0, len(fields[name]) - 1))
    byte = data.draw(st.integers(33, 126).filter(lambda b: b != fields[name][at]))
    fields[name] = fields[name][:at] + bytes([byte]) + fields[name][at + 1 :]
    headers = {key.encode(): value for key, value in fields.items() if key not in ("method", "path")}
    with pytest.raises((Denied, Invalid)):
        warmed().verify(NOW_S, fields["method"], fields["path"], b"", headers)
