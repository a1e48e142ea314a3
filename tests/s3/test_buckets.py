"""Buckets made, deleted and asked about through S3, and who may."""

from __future__ import annotations

import pytest

from forebay.core.errors import Busy
from forebay.core.types import LOCAL_URL
from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object

ALL_USERS = "http://acs.amazonaws.com/groups/global/AllUsers"
OPERATOR = {"operator": "admin:*", "writer": "write:corpus,read:corpus", "stranger": ""}


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code if answer.body else ""


@pytest.fixture
def front() -> BucketFront:
    return BucketFront(corpus={"k": Object(b"1")})


# --- CreateBucket, DeleteBucket --------------------------------------------------------------------------------------
def test_a_bucket_is_made_here_and_deleted_when_it_is_empty(front: BucketFront) -> None:
    made = front.ask("PUT", "/fresh")
    assert (made.status, made.headers["location"]) == (200, "/fresh")
    assert (front.reads.settings["fresh"].url, front.reads.settings["fresh"].write) == (LOCAL_URL, "local")
    assert front.put("/fresh/k", b"data").status == 200
    refused = front.ask("DELETE", "/fresh")
    assert said(refused) == (409, "BucketNotEmpty")
    assert "only copy" in (refused.xml.findtext("Message") or "")
    assert front.ask("DELETE", "/fresh/k").status == 204
    assert said(front.ask("DELETE", "/fresh")) == (204, "")
    assert said(front.ask("DELETE", "/fresh")) == (404, "NoSuchBucket")


def test_a_bucket_with_a_backend_is_forgotten_though_it_is_not_empty(front: BucketFront) -> None:
    assert front.ask("DELETE", "/corpus").status == 204
    assert "corpus" not in front.reads.settings
    assert front.reads.buckets["corpus"], "its objects are its backend's"


def test_a_bucket_that_owes_its_backend_something_stays(front: BucketFront) -> None:
    front.reads.answers["bucket_delete"] = Busy("3 objects are not flushed: forebay flush corpus", retry_after_s=5.0)
    refused = front.ask("DELETE", "/corpus")
    assert said(refused) == (409, "OperationAborted")
    assert "forebay flush" in (refused.xml.findtext("Message") or "")


def test_a_bucket_that_is_there_is_as_good_as_made_unless_another_was_asked_for(front: BucketFront) -> None:
    there = front.reads.settings["corpus"]
    assert (front.ask("PUT", "/corpus").status, front.reads.settings["corpus"]) == (200, there)
    wanted = "<CreateBucketConfiguration><LocationConstraint>%s</LocationConstraint></CreateBucketConfiguration>"
    assert front.ask("PUT", "/corpus", body=(wanted % "us-east-1").encode()).status == 200
    assert said(front.ask("PUT", "/corpus", body=(wanted % "eu-west-1").encode())) == (409, "BucketAlreadyOwnedByYou")
    assert said(front.ask("PUT", "/corpus", {"x-amz-acl": "public-read"})) == (409, "BucketAlreadyExists")
    assert front.reads.settings["corpus"] == there, "nothing of it changed"


def test_a_name_that_cannot_be(front: BucketFront) -> None:
    none = ("UPPER", "ab", "a..b", "192.168.0.1", "a_b", "-abc", "a.-b", "a-.b", "xn--abc", "abc-s3alias", "abc.mrap")
    for name in none:
        assert said(front.ask("PUT", f"/{name}")) == (400, "InvalidBucketName"), name
    assert list(front.reads.settings) == ["corpus"]


@pytest.mark.parametrize(
    "body, status, code",
    [
        (b"", 200, ""),
        (b"<CreateBucketConfiguration/>", 200, ""),
        (b"<CreateBucketConfiguration><LocationConstraint>eu-west-1</LocationConstraint></CreateBucketConfiguration>",
         200, ""),
        (b"<CreateBucketConfiguration><LocationConstraint>a b</LocationConstraint></CreateBucketConfiguration>",
         400, "InvalidLocationConstraint"),
        (b"<CreateBucketConfiguration><Bucket><Type>Directory</Type></Bucket></CreateBucketConfiguration>",
         400, "InvalidRequest"),
        (b"<Other/>", 400, "MalformedXML"),
        (b"<CreateBucketConfiguration>", 400, "MalformedXML"),
    ],
)  # fmt: skip
def test_where_a_bucket_shall_be(front: BucketFront, body: bytes, status: int, code: str) -> None:
    assert said(front.ask("PUT", "/fresh", body=body)) == (status, code)
    assert ("fresh" in front.reads.settings) == (status == 200)


@pytest.mark.parametrize(
    "headers, status, code, acl",
    [
        ({"x-amz-acl": "private"}, 200, "", "private"),
        ({"x-amz-acl": "public-read"}, 200, "", "public-read"),
        ({"x-amz-acl": "public-read-write"}, 501, "NotImplemented", None),
        ({"x-amz-acl": "friends"}, 400, "InvalidArgument", None),
        ({"x-amz-grant-read": "id=1"}, 501, "NotImplemented", None),
        ({"x-amz-bucket-object-lock-enabled": "true"}, 501, "NotImplemented", None),
    ],
)
def test_what_a_bucket_shall_be(
    front: BucketFront, headers: dict[str, str], status: int, code: str, acl: str | None
) -> None:
    assert said(front.ask("PUT", "/fresh", headers)) == (status, code)
    made = front.reads.settings.get("fresh")
    assert (made.acl if made else None) == acl


def test_only_an_admin_makes_deletes_and_changes_buckets() -> None:
    front = BucketFront(OPERATOR, corpus={"k": Object(b"1")})
    for method, target in (
        ("PUT", "/fresh"),
        ("DELETE", "/corpus"),
        ("PUT", "/corpus?acl"),
        ("PUT", "/corpus?cors"),
        ("DELETE", "/corpus?cors"),
        ("DELETE", "/corpus?policy"),
    ):
        assert said(front.ask_as("writer", method, target)) == (403, "AccessDenied"), (method, target)
        assert said(front.ask(method, target)) == (403, "AccessDenied"), (method, target)
    assert front.reads.calls == []
    assert front.ask_as("operator", "PUT", "/fresh").status == 200
    assert front.ask_as("operator", "DELETE", "/fresh").status == 204
    assert front.ask_as("writer", "GET", "/corpus?acl").status == 200
    for target in ("/corpus?acl", "/corpus?cors", "/corpus?policy", "/corpus/k?acl", "/corpus/k?tagging"):
        assert said(front.ask_as("stranger", "GET", target)) == (403, "AccessDenied"), target


# --- ACLs ------------------------------------------------------------------------------------------------------------
def grants(answer: Answer) -> list[tuple[str, str]]:
    return sorted(
        (grant.findtext("Grantee/URI") or grant.findtext("Grantee/ID") or "", grant.findtext("Permission") or "")
        for grant in answer.xml.findall("AccessControlList/Grant")
    )


def test_an_acl_is_set_with_a_word_and_read_as_a_document(front: BucketFront) -> None:
    assert grants(front.get("/corpus?acl")) == [("forebay", "FULL_CONTROL")]
    assert front.ask("PUT", "/corpus?acl", x_amz_acl="public-read").status == 200
    public = [("forebay", "FULL_CONTROL"), (ALL_USERS, "READ")]
    assert grants(front.get("/corpus?acl")) == public
    assert grants(front.get("/corpus/k?acl")) == public, "its objects are as readable as it is"
    assert front.ask("PUT", "/corpus?acl", x_amz_acl="private").status == 200
    assert front.reads.settings["corpus"].acl == "private"


def test_a_document_that_was_read_may_be_sent_back(front: BucketFront) -> None:
    private = front.get("/corpus?acl").body
    front.reads.change("corpus", acl="public-read")
    public = front.get("/corpus?acl").body
    assert front.put("/corpus?acl", private).status == 200
    assert front.reads.settings["corpus"].acl == "private"
    assert front.put("/corpus?acl", public).status == 200
    assert front.reads.settings["corpus"].acl == "public-read"


def test_acls_that_are_more_than_two_words_are_refused(front: BucketFront) -> None:
    document = front.get("/corpus?acl").body
    for body, status, code in (
        (document.replace(b"FULL_CONTROL", b"READ_ACP"), 501, "NotImplemented"),
        (document.replace(b"FULL_CONTROL", b"EVERYTHING"), 400, "MalformedACLError"),
        (document.replace(b"<ID>forebay</ID><DisplayName>forebay</DisplayName></Grantee>", b"<ID>x</ID></Grantee>"),
         400, "InvalidArgument"),
        (b"<AccessControlPolicy/>", 400, "MalformedXML"),
        (b"no", 400, "MalformedXML"),
    ):  # fmt: skip
        assert said(front.put("/corpus?acl", body)) == (status, code), body
    assert said(front.ask("PUT", "/corpus?acl")) == (400, "MissingSecurityHeader")
    assert front.put("/corpus?acl", document, x_amz_acl="private").status == 400
    assert said(front.ask("PUT", "/corpus?acl", x_amz_acl="authenticated-read")) == (501, "NotImplemented")
    assert front.reads.settings["corpus"].acl == "private"


def test_objects_have_no_acl_of_their_own(front: BucketFront) -> None:
    assert grants(front.get("/corpus/k?acl")) == [("forebay", "FULL_CONTROL")]
    assert said(front.get("/corpus/none?acl")) == (404, "NoSuchKey")
    assert front.ask("PUT", "/corpus/k?acl", x_amz_acl="private").status == 200, "so it is"
    assert said(front.ask("PUT", "/corpus/k?acl", x_amz_acl="public-read")) == (501, "NotImplemented")
    assert said(front.ask("PUT", "/corpus/k?acl")) == (400, "MissingSecurityHeader")
    assert said(front.ask("PUT", "/corpus/none?acl", x_amz_acl="private")) == (404, "NoSuchKey")


def test_anybody_reads_a_public_bucket_and_nothing_else_of_it() -> None:
    front = BucketFront(OPERATOR, corpus={"k": Object(b"1")}, other={"k": Object(b"2")})
    assert said(front.get("/corpus/k")) == (403, "AccessDenied")
    assert front.ask_as("operator", "PUT", "/corpus?acl", {"x-amz-acl": "public-read"}).status == 200
    assert front.get("/corpus/k").body == b"1"
    assert front.ask("HEAD", "/corpus/k").status == 200
    assert front.ask("HEAD", "/corpus").status == 200
    assert [key.text for key in front.get("/corpus?list-type=2").xml.findall("Contents/Key")] == ["k"]
    assert front.ask_as("stranger", "GET", "/corpus/k").body == b"1", "who proves a name is somebody too"
    for method, target in (
        ("GET", "/"),
        ("GET", "/other/k"),
        ("GET", "/corpus?acl"),
        ("GET", "/corpus?cors"),
        ("GET", "/corpus?uploads"),
        ("GET", "/corpus/k?acl"),
        ("GET", "/corpus/k?tagging"),
        ("PUT", "/corpus/k"),
        ("DELETE", "/corpus/k"),
        ("PUT", "/corpus/k?tagging"),
    ):
        assert said(front.ask(method, target)) == (403, "AccessDenied"), (method, target)
    assert said(front.get("/corpus/k?response-content-type=text/html")) == (400, "InvalidRequest")
    wrong = front.ask_as("nobody", "GET", "/corpus/k")
    assert said(wrong) == (403, "InvalidAccessKeyId"), "a signature that is wrong is not no signature"
    assert front.ask_as("operator", "PUT", "/corpus?acl", {"x-amz-acl": "private"}).status == 200
    assert said(front.get("/corpus/k")) == (403, "AccessDenied")


# --- what no bucket here has -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, code",
    [
        ("policy", "NoSuchBucketPolicy"),
        ("lifecycle", "NoSuchLifecycleConfiguration"),
        ("tagging", "NoSuchTagSet"),
        ("website", "NoSuchWebsiteConfiguration"),
        ("replication", "ReplicationConfigurationNotFoundError"),
        ("object-lock", "ObjectLockConfigurationNotFoundError"),
        ("encryption", "ServerSideEncryptionConfigurationNotFoundError"),
        ("publicAccessBlock", "NoSuchPublicAccessBlockConfiguration"),
        ("ownershipControls", "OwnershipControlsNotFoundError"),
        ("cors", "NoSuchCORSConfiguration"),
    ],
)
def test_what_a_bucket_does_not_have_is_said_as_s3_says_it(front: BucketFront, name: str, code: str) -> None:
    assert said(front.get(f"/corpus?{name}")) == (404, code)
    assert said(front.get(f"/none?{name}")) == (404, "NoSuchBucket")
    if name not in ("cors", "object-lock"):
        assert said(front.put(f"/corpus?{name}", b"<X/>")) == (501, "NotImplemented")
    assert front.ask("DELETE", f"/corpus?{name}").status == (204 if name != "object-lock" else 501)


@pytest.mark.parametrize(
    "name, root",
    [
        ("accelerate", "AccelerateConfiguration"),
        ("logging", "BucketLoggingStatus"),
        ("notification", "NotificationConfiguration"),
        ("requestPayment", "RequestPaymentConfiguration"),
        ("versioning", "VersioningConfiguration"),
    ],
)
def test_what_was_never_set_is_an_empty_document(front: BucketFront, name: str, root: str) -> None:
    answer = front.get(f"/corpus?{name}")
    assert (answer.status, answer.xml.tag) == (200, root)
    assert answer.xml.findtext("Payer") == ("BucketOwner" if name == "requestPayment" else None)
    assert said(front.put(f"/corpus?{name}", b"<X/>")) == (501, "NotImplemented")


def test_settings_are_the_engines_not_the_fronts(front: BucketFront) -> None:
    front.reads.change("corpus", acl="public-read")
    front.reads.front.clear()  # added through another front a moment ago
    assert grants(front.get("/corpus?acl"))[1:] == [(ALL_USERS, "READ")]
