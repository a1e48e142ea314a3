"""What S3 lets one ask of ACLs, owners, policies and locks, where a bucket here has only two words for all that."""

from __future__ import annotations

import pytest

from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object

OWNER = (
    '<Grant><Grantee xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:type="CanonicalUser">'
    "<ID>forebay</ID></Grantee><Permission>FULL_CONTROL</Permission></Grant>"
)
POLICY = (
    "<AccessControlPolicy><Owner><ID>forebay</ID></Owner><AccessControlList>%s</AccessControlList>"
    "</AccessControlPolicy>"
)


def policy(kind: str, who: str) -> bytes:
    """A document that grants `who` READ beside the owner."""
    xsi = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
    other = f'<Grant><Grantee {xsi} xsi:type="{kind}">{who}</Grantee><Permission>READ</Permission></Grant>'
    return (POLICY % (OWNER + other)).encode()


EVERYBODY = policy("Group", "<URI>http://acs.amazonaws.com/groups/global/AllUsers</URI>")


@pytest.fixture
def front() -> BucketFront:
    front = BucketFront(private={"k": Object(b"1")}, public={"k": Object(b"1")})
    front.reads.change("public", acl="public-read")
    return front


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code if answer.body else ""


# --- ACLs of objects --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bucket", "word", "status"),
    [
        ("private", "private", 200),
        ("private", "bucket-owner-full-control", 200),
        ("private", "public-read", 501),
        ("private", "authenticated-read", 501),
        ("private", "public", 400),
        ("public", "public-read", 200),
        ("public", "bucket-owner-read", 200),
        ("public", "private", 501),  # it would be readable all the same
        ("public", "public-read-write", 501),
    ],
)
def test_a_write_may_name_the_acl_that_its_object_has_anyway(
    front: BucketFront, bucket: str, word: str, status: int
) -> None:
    acl = {"x-amz-acl": word}
    assert front.put(f"/{bucket}/new", b"x", acl).status == status
    assert ("new" in front.reads.buckets[bucket]) == (status == 200), "what is refused is not half done"
    assert front.ask("PUT", f"/{bucket}/k?acl", acl).status == status
    source = {"x-amz-copy-source": f"/{bucket}/k", **acl}
    assert front.ask("PUT", f"/{bucket}/copy", source).status == status
    if status != 200:
        assert front.ask("POST", f"/{bucket}/large?uploads", acl).status == status


def test_everybody_is_named_before_the_owner(front: BucketFront) -> None:
    """The order that S3's suites compare; clients do not care."""
    for target in ("/public?acl", "/public/k?acl"):
        permissions = front.get(target).xml.findall("AccessControlList/Grant/Permission")
        assert [found.text for found in permissions] == ["READ", "FULL_CONTROL"]


def test_a_document_for_an_object_says_what_its_bucket_says(front: BucketFront) -> None:
    for bucket, body, status in (
        ("private", (POLICY % OWNER).encode(), 200),
        ("private", EVERYBODY, 501),
        ("public", EVERYBODY, 200),
        ("public", (POLICY % OWNER).encode(), 501),
    ):
        assert front.put(f"/{bucket}/k?acl", body).status == status, (bucket, body)
    for grant in ("read", "write", "read-acp", "write-acp", "full-control"):
        header = {f"x-amz-grant-{grant}": "id=forebay"}
        for method, target in (("PUT", "/private/k?acl"), ("PUT", "/private?acl"), ("PUT", "/private/k")):
            body = b"x" if target == "/private/k" else None
            assert said(front.ask(method, target, header, body)) == (501, "NotImplemented"), (grant, target)
    assert said(front.ask("PUT", "/fresh", {"x-amz-grant-read": "id=forebay"})) == (501, "NotImplemented")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (policy("CanonicalUser", "<ID>_nobody</ID>"), 400, "InvalidArgument"),
        (policy("CanonicalUser", f"<ID>{'ab' * 32}</ID>"), 501, "NotImplemented"),
        (policy("AmazonCustomerByEmail", "<EmailAddress>a@b.example</EmailAddress>"),
         400, "UnresolvableGrantByEmailAddress"),
        (policy("Group", "<URI>http://acs.amazonaws.com/groups/global/AuthenticatedUsers</URI>"),
         501, "NotImplemented"),
        ((POLICY % "").encode(), 501, "NotImplemented"),
        (EVERYBODY, 200, ""),
    ],
)  # fmt: skip
def test_whom_a_bucket_may_be_granted_to(front: BucketFront, body: bytes, status: int, code: str) -> None:
    assert said(front.put("/private?acl", body)) == (status, code)
    assert front.reads.settings["private"].acl == ("public-read" if status == 200 else "private")


# --- owners, policies, locks ------------------------------------------------------------------------------------------
def test_whose_objects_shall_be(front: BucketFront) -> None:
    for word, status in (
        ("BucketOwnerEnforced", 200),
        ("BucketOwnerPreferred", 200),
        ("ObjectWriter", 501),
        ("Everybody", 400),
    ):
        assert front.ask("PUT", f"/b-{word.lower()}", {"x-amz-object-ownership": word}).status == status
        assert (f"b-{word.lower()}" in front.reads.settings) == (status == 200)


def test_whether_a_bucket_is_public_follows_its_acl(front: BucketFront) -> None:
    for bucket, public in (("private", "false"), ("public", "true")):
        answer = front.get(f"/{bucket}?policyStatus")
        assert (answer.status, answer.xml.tag, answer.xml.findtext("IsPublic")) == (200, "PolicyStatus", public)
    assert said(front.get("/none?policyStatus")) == (404, "NoSuchBucket")
    assert said(front.put("/private?policyStatus", b"<x/>")) == (501, "NotImplemented")


@pytest.mark.parametrize("lock", ["retention", "legal-hold"])
def test_there_are_no_locks_and_none_can_be_set(front: BucketFront, lock: str) -> None:
    assert said(front.get(f"/private/k?{lock}")) == (400, "InvalidRequest")
    assert said(front.put(f"/private/k?{lock}", b"<X/>")) == (400, "InvalidRequest")
    assert said(front.get(f"/none/k?{lock}")) == (404, "NoSuchBucket")
    assert said(front.put("/private?object-lock", b"<ObjectLockConfiguration/>")) == (409, "InvalidBucketState")
    assert said(front.put("/none?object-lock", b"<ObjectLockConfiguration/>")) == (404, "NoSuchBucket")
    assert list(front.reads.buckets["private"]) == ["k"]


# --- who nobody knows -------------------------------------------------------------------------------------------------
def test_to_who_signs_nothing_a_bucket_that_is_not_there_is_not_there() -> None:
    front = BucketFront({"operator": "admin:*", "tenant": "admin:tenant-*"}, corpus={"k": Object(b"1")})
    for method, target in (
        ("GET", "/none/k"),
        ("GET", "/none"),
        ("HEAD", "/none"),
        ("PUT", "/none/k"),
        ("DELETE", "/none/k"),
        ("GET", "/none?acl"),
        ("POST", "/none?delete"),
    ):
        answer = front.ask(method, target, body=b"<x/>" if method in ("PUT", "POST") else None)
        assert answer.status == 404, (method, target)
        assert front.ask(method, target.replace("none", "corpus")).status == 403, (method, target)
    assert said(front.ask("PUT", "/none")) == (403, "AccessDenied"), "but nobody makes one unsigned"
    assert said(front.get("/corpus/k", {"authorization": ""})) == (403, "AccessDenied")
    assert said(front.ask_as("tenant", "PUT", "/corpus")) == (409, "BucketAlreadyExists"), "it is somebody else's"
    assert said(front.ask_as("tenant", "PUT", "/other")) == (403, "AccessDenied"), "a name that they may not have"
    assert front.ask_as("tenant", "PUT", "/tenant-a").status == 200


def test_a_bucket_of_another_owner_is_not_promised(front: BucketFront) -> None:
    for method, target in (("HEAD", "/private"), ("GET", "/private"), ("GET", "/private/k")):
        assert front.ask(method, target, {"x-amz-expected-bucket-owner": "123456789012"}).status == 501
