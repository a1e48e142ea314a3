"""S3's ACLs as far as they have a meaning here: a bucket is private, or anybody may read it.

Theory. Identities and their grants decide who may do what (`core/access.py`). Of S3's older language two words remain:
`private`, which is the rule anyway, and `public-read`, which lets unsigned requests read and list the bucket. They are
a setting of the bucket; objects have none. Everything else is refused rather than forgotten, since whoever sets an ACL
relies on it.

The ACL documents in answers are made from that one word. A document that is sent is read for what it grants: everything
to the owner is `private`, READ for everybody beside it is `public-read`, and there is no third.

Rejected: bucket-owner-full-control and its kin on buckets (there is one owner, so they would mean `private` by luck).

Invariant. `read_policy` reads back the word from which `grants_of` made a document.
"""

from __future__ import annotations

import re
from typing import Final, Literal
from xml.etree.ElementTree import Element

from forebay.core.errors import Invalid, NotSupported
from forebay.node.front.http.requests import Request
from forebay.node.front.objects.object_headers import check_acl
from forebay.node.front.s3.listing import OWNER
from forebay.node.front.s3.xml import document, malformed, parse

Acl = Literal["private", "public-read"]
ALL_USERS: Final = "http://acs.amazonaws.com/groups/global/AllUsers"
_OWNER_ID: Final = "forebay"
_CANNED: Final = (
    "aws-exec-read",
    "authenticated-read",
    "bucket-owner-full-control",
    "bucket-owner-read",
    "log-delivery-write",
    "public-read-write",
)
_XSI: Final = 'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
_TYPE: Final = "type"  # of XMLSchema-instance, whatever its prefix is
_HEADER: Final = b"x-amz-acl"
_GRANT: Final = b"x-amz-grant-"
_ACCOUNT: Final = re.compile(r"[0-9a-f]{64}")  # how S3 names accounts


def render_policy(acl: Acl) -> bytes:
    """The AccessControlPolicy document of a bucket, or of an object in it."""
    return document("AccessControlPolicy", f"{OWNER}<AccessControlList>{grants_of(acl)}</AccessControlList>")


def grants_of(acl: Acl) -> str:
    """The Grant elements that say `acl`; the owner's is the last, as S3's suites compare them."""
    public = _grant("Group", f"<URI>{ALL_USERS}</URI>", "READ") if acl == "public-read" else ""
    owner = f"<ID>{_OWNER_ID}</ID><DisplayName>{_OWNER_ID}</DisplayName>"
    return public + _grant("CanonicalUser", owner, "FULL_CONTROL")


def _grant(kind: str, who: str, permission: str) -> str:
    grantee = f'<Grantee {_XSI} xsi:type="{kind}">{who}</Grantee>'
    return f"<Grant>{grantee}<Permission>{permission}</Permission></Grant>"


def canned_acl(request: Request) -> Acl | None:
    """What the headers want a bucket to be, None if they say nothing. `NotSupported` for what is not served, `Invalid`
    for what S3 does not know."""
    granted = _grants(request)
    if granted:
        raise NotSupported(
            f"{granted} is not served: give the caller's identity a grant (`forebay key`), or use the canned ACL "
            "public-read"
        )
    word = request.header(_HEADER)
    if word == "private" or word == "public-read":
        return "private" if word == "private" else "public-read"
    if word in _CANNED:
        raise NotSupported(f"the canned ACL {word} is not served: use private or public-read, and grants of identities")
    if word:
        raise Invalid(f"the canned ACL {word[:60]!r} is not known: use private or public-read", code="InvalidArgument")
    return None


def _grants(request: Request) -> str:
    """The first header that grants something to somebody; "" if none does."""
    return next((name.decode("latin-1") for name in request.headers if name.startswith(_GRANT)), "")


def asked_acl(request: Request) -> Acl:
    """What a PutBucketAcl asks for, by its headers or its document."""
    word = canned_acl(request)
    if word is not None and request.body:
        raise Invalid(
            "This request does not support content: send either x-amz-acl or a document", code="UnexpectedContent"
        )
    if word is None and not request.body:
        raise Invalid(
            "Your request was missing a required header: send x-amz-acl or a document", code="MissingSecurityHeader"
        )
    return word if word is not None else read_policy(request.body)


def read_policy(body: bytes) -> Acl:
    """The word for what an AccessControlPolicy document grants. `Invalid` (`MalformedACLError`), `NotSupported`."""
    root = parse(body, "AccessControlPolicy")
    listed = root.find("AccessControlList")
    if listed is None:
        raise malformed("it has no AccessControlList")
    owner = root.findtext("Owner/ID")
    granted = {_read_grant(grant, owner or _OWNER_ID) for grant in listed.findall("Grant")}
    if granted == {("owner", "FULL_CONTROL")}:
        return "private"
    if granted == {("owner", "FULL_CONTROL"), (ALL_USERS, "READ")}:
        return "public-read"
    raise NotSupported(
        "only two ACLs are served: the owner everything (private), and everybody READ beside it (public-read); "
        "anything finer is a grant of an identity"
    )


def _read_grant(grant: Element, owner: str) -> tuple[str, str]:
    grantee = grant.find("Grantee")
    permission = grant.findtext("Permission") or ""
    if grantee is None or permission not in ("FULL_CONTROL", "READ", "WRITE", "READ_ACP", "WRITE_ACP"):
        raise Invalid(
            "The ACL that you provided was not well formed: each Grant has a Grantee and a Permission of S3's",
            code="MalformedACLError",
        )
    kind = grantee.get(_TYPE, "CanonicalUser" if grantee.find("ID") is not None else "Group")
    if kind == "AmazonCustomerByEmail":
        raise Invalid(
            "The e-mail address you provided does not match any account on record: no account here has one",
            code="UnresolvableGrantByEmailAddress",
        )
    if kind == "CanonicalUser":
        account = grantee.findtext("ID") or ""
        if account in (owner, _OWNER_ID):
            return "owner", permission
        if not _ACCOUNT.fullmatch(account):
            raise Invalid(
                f"Invalid id: {account[:80]!r} is no account's, the owner is {_OWNER_ID}", code="InvalidArgument"
            )
        return "another", permission
    return grantee.findtext("URI") or kind, permission


def check_object_acl(request: Request, acl: Acl) -> None:
    """Return if a PutObjectAcl in a bucket that is `acl` changes nothing: objects have no ACL of their own.
    `NotSupported` if it would, else as `asked_acl`."""
    check_acl(request, acl)
    if b"x-amz-acl" in request.headers and not request.body and not _grants(request):
        return
    if asked_acl(request) != acl:
        raise NotSupported(
            f"objects have no ACL of their own, and this one's bucket is {acl}: change the bucket's, or give "
            "identities grants"
        )


def check_ownership(request: Request) -> None:
    """Return if the objects of a new bucket shall belong to its owner, as they do. `NotSupported`, `Invalid`."""
    word = request.header(b"x-amz-object-ownership")
    if word == "ObjectWriter":
        raise NotSupported("objects belong to the bucket: leave x-amz-object-ownership out, or say BucketOwnerEnforced")
    if word not in ("", "BucketOwnerEnforced", "BucketOwnerPreferred"):
        raise Invalid("Invalid x-amz-object-ownership header: say BucketOwnerEnforced", code="InvalidArgument")
