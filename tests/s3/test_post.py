"""POST Object: forms as browsers send them, signed or to an open node."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forebay.core import limits
from forebay.core.errors import Busy
from forebay.core.messages.calls import PutCall
from forebay.core.types import CorsRule
from tests.s3.conftest import client
from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object

BOUNDARY = "----formboundary7MA4YWxkTrZu0gW"
BIG = bytes(range(256)) * 300  # beyond what lives in a record
CONTENT_TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(fields: dict[str, str], data: bytes | None, filename: str = "photo.jpg") -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if data is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        parts.append(head.encode() + b"Content-Type: image/jpeg\r\n\r\n" + data + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def post(
    front: BucketFront, fields: dict[str, str], data: bytes | None = b"data", pieces: int = 1 << 20, **more: str
) -> Answer:
    return front.ask("POST", "/photos", CONTENT_TYPE, form(fields, data), pieces, **more)


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code if answer.body else ""


def stored(front: BucketFront) -> PutCall:
    (call,) = [arguments for verb, arguments in front.reads.calls if verb == "put"]
    assert isinstance(call, PutCall)
    return call


def nothing_stored(front: BucketFront) -> bool:
    return not front.reads.calls and not front.left_over and not front.reads.buckets["photos"]


@pytest.fixture
def front() -> BucketFront:
    return BucketFront(photos={})


@pytest.fixture
def keyed() -> BucketFront:
    return BucketFront({"site": "write:photos", "reader": "read:photos"}, photos={})


def signed(
    name: str = "site", conditions: list[Any] | None = None, age_s: float = 0.0, **fields: str
) -> dict[str, str]:
    """The fields of a form whose policy `name` signs (Version 4). Conditions are those that the fields need."""
    now = datetime.now(UTC)
    given = {"bucket": "photos"} | {field.replace("_", "-"): value for field, value in fields.items()}
    given |= {
        "x-amz-algorithm": "AWS4-HMAC-SHA256",
        "x-amz-credential": f"AKID{name.upper()}/{now:%Y%m%d}/us-east-1/s3/aws4_request",
        "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}",
    }
    exact = [{field: value} for field, value in given.items() if "${filename}" not in value]
    expires = now + timedelta(hours=1) - timedelta(seconds=age_s)
    policy = encode({"expiration": f"{expires:%Y-%m-%dT%H:%M:%S.000Z}", "conditions": [*exact, *(conditions or [])]})
    key = b"AWS4" + f"secret of {name}".encode()
    for part in (f"{now:%Y%m%d}", "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, policy.encode(), "sha256").hex()
    del given["bucket"]
    return given | {"policy": policy, "x-amz-signature": signature}


def encode(document: Any) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


# --- to an open node -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [b"", b"x", b"\r\n--" + BOUNDARY[:-1].encode(), BIG])
@pytest.mark.parametrize("pieces", [1 << 20, 313])
def test_the_file_of_a_form_becomes_the_object(front: BucketFront, data: bytes, pieces: int) -> None:
    fields = {
        "key": "in/${filename}",
        "Content-Type": "image/png",
        "x-amz-meta-Who": "Zoe",
        "Cache-Control": "no-store",
    }
    answer = post(front, fields, data, pieces)
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["location"] == "http://127.0.0.1:9400/photos/in/photo.jpg"
    call = stored(front)
    assert (call.key, call.size_bytes) == ("in/photo.jpg", len(data))
    assert dict(call.headers) == {"content-type": "image/png", "x-amz-meta-who": "Zoe", "cache-control": "no-store"}
    got = front.get("/photos/in/photo.jpg")
    assert (got.body, got.headers["etag"]) == (data, answer.headers["etag"])
    assert front.left_over == []


def test_tags_come_as_a_document(front: BucketFront) -> None:
    tagging = "<Tagging><TagSet><Tag><Key>a</Key><Value>b c</Value></Tag></TagSet></Tagging>"
    assert post(front, {"key": "k", "tagging": tagging}).status == 204
    assert stored(front).tags == "a=b%20c"


def test_a_checksum_is_held_against_the_file(front: BucketFront) -> None:
    right = base64.b64encode(hashlib.sha256(b"data").digest()).decode()
    assert post(front, {"key": "k", "x-amz-checksum-sha256": right}).headers["x-amz-checksum-sha256"] == right
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    answer = post(front, {"key": "l", "x-amz-checksum-sha256": wrong}, BIG)
    assert answer.status == 400
    assert "l" not in front.reads.buckets["photos"]
    assert front.left_over == []


@pytest.mark.parametrize(
    "asked, status", [("200", 200), ("201", 201), ("204", 204), ("404", 204), ("", 204), ("20l", 204)]
)
def test_the_form_says_which_status_it_wants(front: BucketFront, asked: str, status: int) -> None:
    answer = post(front, {"key": "a b", "success_action_status": asked})
    assert answer.status == status
    if status != 201:
        assert answer.body == b""
        return
    assert answer.xml.tag == "PostResponse"
    assert [element.text for element in answer.xml] == [
        "http://127.0.0.1:9400/photos/a%20b", "photos", "a b", answer.headers["etag"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "url, target",
    [
        ("https://site.example/done", "https://site.example/done?bucket=photos&key=a%20b&etag=%22{}%22"),
        (
            "https://site.example/done?x=1#top",
            "https://site.example/done?x=1&bucket=photos&key=a%20b&etag=%22{}%22#top",
        ),
        ("javascript:alert(1)", ""),
        ("//site.example", ""),
        ("https://", ""),
        ("https://[", ""),
        ("https://site.example/\r\nSet-Cookie: x", ""),
        ("https://site.example/ü", ""),
    ],
)
def test_the_form_says_where_the_browser_goes(front: BucketFront, url: str, target: str) -> None:
    answer = post(front, {"key": "a b", "success_action_redirect": url, "success_action_status": "200"})
    etag = answer.headers["etag"].strip('"')
    if target:
        assert (answer.status, answer.headers["location"]) == (303, target.format(etag))
    else:
        assert (answer.status, "site" in answer.headers["location"]) == (200, False)
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "fields, data, status, code",
    [
        ({}, b"x", 400, "InvalidArgument"),
        ({"key": ""}, b"x", 400, "InvalidArgument"),
        ({"key": "k" * 1025}, b"x", 400, "KeyTooLongError"),
        ({"key": "k"}, None, 400, "InvalidArgument"),
        ({"key": "k", "KEY": "l"}, b"x", 400, "InvalidArgument"),
        ({"key": "k", "x-amz-meta-a": "b\r\nSet-Cookie: c"}, b"x", 400, "InvalidRequest"),
        ({"key": "k", "x-amz-meta-a b": "c"}, b"x", 400, "InvalidArgument"),
        ({"key": "k", "x-amz-meta-a": "b" * 3000}, b"x", 400, "MetadataTooLarge"),
        ({"key": "k", "note": "b" * limits.FORM_BYTES_MAX}, b"x", 400, "MaxPostPreDataLengthExceededError"),
        ({"key": "k", "acl": "public-read"}, b"x", 501, "NotImplemented"),
        ({"key": "k", "x-amz-storage-class": "CHEAP"}, b"x", 400, "InvalidStorageClass"),
        ({"key": "k", "x-amz-server-side-encryption-customer-algorithm": "AES256"}, b"x", 501, "NotImplemented"),
        ({"key": "k", "tagging": "<Tagging/>"}, b"x", 400, "MalformedXML"),
        ({"key": "k", "policy": "e30="}, b"x", 400, "InvalidPolicyDocument"),
    ],
)
def test_forms_that_are_refused(
    front: BucketFront, fields: dict[str, str], data: bytes | None, status: int, code: str
) -> None:
    assert said(post(front, fields, data)) == (status, code)
    assert nothing_stored(front)


def test_bodies_that_are_no_form(front: BucketFront) -> None:
    for header, body in (
        ("multipart/form-data", b"x"),
        (CONTENT_TYPE["content-type"], b"x" * 100),
        (CONTENT_TYPE["content-type"], form({"key": "k"}, BIG)[:-60]),
        (CONTENT_TYPE["content-type"], b""),
    ):
        answer = front.ask("POST", "/photos", {"content-type": header}, body)
        assert said(answer) == (400, "MalformedPOSTRequest"), header
        assert nothing_stored(front)


def test_a_page_posts_to_an_open_node_only_where_rules_allow_it(front: BucketFront) -> None:
    assert said(post(front, {"key": "k"}, origin="https://evil.example")) == (403, "AccessForbidden")
    assert nothing_stored(front)
    front.reads.change("photos", cors=(CorsRule(("https://app.example",), ("POST",)),))
    assert said(post(front, {"key": "k"}, origin="https://evil.example")) == (403, "AccessForbidden")
    answer = post(front, {"key": "k"}, origin="https://app.example")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (204, "https://app.example")


# --- to a node with identities ---------------------------------------------------------------------------------------
def test_a_signed_form_uploads_what_its_policy_allows(keyed: BucketFront) -> None:
    fields = signed(conditions=[["starts-with", "$key", "in/"], ["content-length-range", 1, 10]], key="in/${filename}")
    assert post(keyed, fields).status == 204
    assert stored(keyed).key == "in/photo.jpg"


def test_the_form_that_boto_makes_is_taken(keyed: BucketFront) -> None:
    made = client("http://127.0.0.1:9400", "AKIDSITE", "secret of site").generate_presigned_post(
        "photos", "in/${filename}", {"acl": "private"}, [{"acl": "private"}, ["content-length-range", 0, 100]], 60
    )
    assert made["url"].endswith("/photos")
    assert post(keyed, made["fields"]).status == 204


@pytest.mark.parametrize(
    "change, status, code",
    [
        ({"x-amz-signature": "0" * 64}, 403, "SignatureDoesNotMatch"),
        ({"x-amz-signature": None}, 400, "InvalidArgument"),
        ({"x-amz-credential": "AKIDNOBODY/20300101/us-east-1/s3/aws4_request"}, 403, "InvalidAccessKeyId"),
        ({"policy": None}, 403, "AccessDenied"),
        ({"key": "out/k"}, 403, "AccessDenied"),
        ({"x-amz-meta-who": "me"}, 403, "AccessDenied"),
        ({"success_action_redirect": "https://evil.example"}, 403, "AccessDenied"),
        ({"x-ignore-this": "anything"}, 204, ""),
    ],
)
def test_a_form_is_held_to_its_policy(
    keyed: BucketFront, change: dict[str, str | None], status: int, code: str
) -> None:
    fields = signed(conditions=[["starts-with", "$key", "in/"]], key="in/k")
    changed = {name: value for name, value in (fields | change).items() if value is not None}
    assert said(post(keyed, changed, BIG)) == (status, code)
    assert nothing_stored(keyed) == (status != 204)


def test_a_checksum_needs_no_condition_since_it_allows_nothing(keyed: BucketFront) -> None:
    fields = signed(key="in/k")
    right = base64.b64encode(hashlib.sha256(b"data").digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(b"other").digest()).decode()
    assert said(post(keyed, {**fields, "x-amz-checksum-sha256": wrong})) == (400, "BadDigest")
    assert nothing_stored(keyed)
    assert post(keyed, {**fields, "x-amz-checksum-sha256": right}).status == 204
    refused = signed(key="in/k", conditions=[["eq", "$x-amz-checksum-sha256", right]])
    assert said(post(keyed, {**refused, "x-amz-checksum-sha256": wrong})) == (403, "AccessDenied"), "a condition holds"


def test_a_form_without_a_signature_learns_that_a_bucket_is_not_there(keyed: BucketFront) -> None:
    body = form({"key": "k"}, b"x")
    assert said(keyed.ask("POST", "/none", CONTENT_TYPE, body)) == (404, "NoSuchBucket")
    assert said(keyed.ask("POST", "/photos", CONTENT_TYPE, body)) == (403, "AccessDenied")


def test_a_form_is_known_however_its_type_is_written(front: BucketFront) -> None:
    headers = {"content-type": f"Multipart/Form-Data; Boundary={BOUNDARY}"}
    assert front.ask("POST", "/photos", headers, form({"KEY": "k", "Content-TYPE": "a/b"}, b"x")).status == 204
    assert stored(front).key == "k"
    assert dict(stored(front).headers)["content-type"] == "a/b"


def test_who_may_not_write_may_not_sign_a_form(keyed: BucketFront) -> None:
    assert said(post(keyed, signed("reader", key="k"))) == (403, "AccessDenied")
    assert said(post(keyed, {"key": "k"})) == (403, "AccessDenied")
    assert said(post(keyed, signed(key="k", age_s=3601))) == (403, "AccessDenied")
    elsewhere = keyed.ask("POST", "/other", CONTENT_TYPE, form(signed(key="k"), b"x"))
    assert said(elsewhere) == (403, "AccessDenied")
    assert nothing_stored(keyed)


@pytest.mark.parametrize("size, code", [(9, "EntityTooSmall"), (10, ""), (20, ""), (21, "EntityTooLarge")])
def test_a_file_keeps_to_the_size_that_the_policy_allows(keyed: BucketFront, size: int, code: str) -> None:
    fields = signed(conditions=[["content-length-range", 10, 20]], key="k")
    assert said(post(keyed, fields, b"x" * size, pieces=7)) == ((400, code) if code else (204, ""))
    assert nothing_stored(keyed) == bool(code)


def test_a_file_that_is_too_long_is_cut_off_early(keyed: BucketFront) -> None:
    fields = signed(conditions=[["content-length-range", 0, 50_000]], key="k")
    assert said(post(keyed, fields, bytes(1_000_000), pieces=20_000)) == (400, "EntityTooLarge")
    assert nothing_stored(keyed)
    assert keyed.reads.places == 1, "it had a file, which is gone"


def test_forms_signed_by_version_2_are_taken_too(keyed: BucketFront) -> None:
    policy = encode({"expiration": "2100-01-01T00:00:00Z", "conditions": [{"bucket": "photos"}, {"key": "k"}]})
    signature = base64.b64encode(hmac.digest(b"secret of site", policy.encode(), "sha1")).decode()
    fields = {"key": "k", "AWSAccessKeyId": "AKIDSITE", "policy": policy, "signature": signature}
    assert said(post(keyed, fields | {"signature": signature[::-1]})) == (403, "SignatureDoesNotMatch")
    assert said(post(keyed, fields | {"AWSAccessKeyId": "AKIDNOBODY"})) == (403, "InvalidAccessKeyId")
    assert said(post(keyed, {name: value for name, value in fields.items() if name != "signature"})) == (
        400,
        "InvalidArgument",
    )
    assert nothing_stored(keyed)
    assert post(keyed, fields).status == 204


def test_the_file_of_a_form_that_the_engine_refuses_is_removed(front: BucketFront) -> None:
    front.reads.answers["put"] = Busy("later", code="SlowDown", retry_after_s=1.0)
    assert said(post(front, {"key": "k"}, BIG)) == (503, "SlowDown")
    assert front.left_over == []


def test_posts_that_are_no_forms_are_other_operations(front: BucketFront) -> None:
    front.reads.buckets["photos"]["k"] = Object(b"1")
    answer = front.ask("POST", "/photos?delete", body=b"<Delete><Object><Key>k</Key></Object></Delete>")
    assert answer.status == 200
    assert said(front.ask("POST", "/photos", {"content-type": "text/plain"}, b"x")) == (501, "NotImplemented")
