"""AWS Signature Version 4, the verifying side, as S3 applies it: in the Authorization header or in a presigned query.

Theory. A signature covers a canonical form of the request, so the verifier's work is to rebuild that form from what
arrived, byte for byte as the signer built it. S3 differs from the general scheme: the path is encoded once (decoded and
re-encoded here, never normalised: `//` and `..` are part of a key), the payload's hash is a header, and `host` and
every `x-amz-*` header present must be signed. Any region is accepted, since the key is derived for the region that the
signer named; the service must be `s3`.

Every request is signed differently, but a client's *scope* (key id, day, region, signed header names) stays the same
for a day: everything in the Authorization header before the signature. So it is parsed and its signing key derived once
and kept, which leaves one SHA-256, one HMAC and the joining of strings per request.

A body is covered by what the signer said of it (`Verified.payload`): its SHA-256; nothing (UNSIGNED-PAYLOAD, which is
what clients send over TLS); or chunks that are signed one after the other, each over the signature before it, starting
from the request's; `core/s3rules/signedbody.py` has all that. A form upload signs its policy alone
(`Verifier.verify_policy`).

A temporary key (`core/s3rules/sessions.py`) comes with its session token, as a signed header or in the signed query. It
is known by that alone: without the token there is no such key.

Replays. What was signed may be sent again as it is until it is too old: SKEW_S_MAX, or what a presigned query says. A
table of signatures seen would refuse honest clients, which sign a retry in the same second alike, and fronts share no
memory. So TLS keeps requests from being overheard, and a writer that must not be repeated sends If-Match or
If-None-Match; `docs/security.md` says this to users.

Rejected: botocore's signer run backwards (ten times slower, and it takes its input as objects of its own); caching
verdicts (a signature is used once); accepting Signature Version 2 in headers (it signs almost nothing; presigned URLs
of it are taken, see `core/s3rules/compat/sigv2.py`).

Invariants. (1) Signatures are compared in constant time. (2) Only scopes of known key ids are kept, and at most
`SCOPES_KEPT_MAX`. (3) Nothing but `Denied` and `Invalid` is raised, with an S3 code, whatever the input. (4) A request
that carries any trace of a signature is never treated as anonymous. (5) No signing key is ever printed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from calendar import timegm
from collections.abc import Callable, Mapping
from datetime import date
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.s3rules.compat import sigv2
from forebay.core.s3rules.names import Addressing
from forebay.core.s3rules.sessions import Session, Sessions, check_session
from forebay.core.s3rules.signedbody import UNSIGNED, check_payload, check_payload_form, mismatch

ALGORITHM: Final = b"AWS4-HMAC-SHA256"
SKEW_S_MAX: Final = 900  # S3's: a clock may be 15 minutes off, in either direction
EXPIRES_S_MAX: Final = 604_800  # S3's: a presigned request lives for seven days at most
SCOPES_KEPT_MAX: Final = 1024  # distinct (key, day, region, header list); each costs about 1 KiB

_CLEAN = re.compile(rb"[A-Za-z0-9/_.~-]*").fullmatch
_CLEAN_WORD = re.compile(rb"[A-Za-z0-9_.~-]*").fullmatch
_STAMP = re.compile(rb"([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z").fullmatch
_AUTHORIZATION = re.compile(
    rb"AWS4-HMAC-SHA256[ ]+Credential=([^\s,]+)[ ]*,[ ]*SignedHeaders=([^\s,]+)[ ]*,[ ]*Signature="
)
_EXPIRES = re.compile(rb"-?[0-9]{1,18}").fullmatch
_SPACES = re.compile(rb" +")

QueryPairs = list[tuple[bytes, bytes]]  # percent-decoded, in the order sent


class Verified(NamedTuple):
    """Who signed; by a temporary key, if there is a `session`. `payload` is the value the signer gave for the body's
    hash, as sent. The rest is where the signatures of chunks start (`ChunkVerifier`)."""

    key_id: str
    region: str
    payload: bytes
    presigned: bool
    stamp: bytes = b""
    scope: bytes = b""
    signature: bytes = b""
    key: bytes = b""
    session: Session | None = None

    def __repr__(self) -> str:
        return f"Verified({self.key_id!r}, {self.region!r}, {self.payload!r}, presigned={self.presigned})"


class _Scope(NamedTuple):
    """All of an Authorization header but the signature, parsed, with its signing key."""

    key_id: str
    region: str
    day: bytes
    text: bytes  # day/region/s3/aws4_request
    names: tuple[bytes, ...]
    name_set: frozenset[bytes]
    names_text: bytes
    key: bytes
    session: Session | None
    token: bytes  # of the session; empty without one

    def __repr__(self) -> str:
        return f"_Scope({self.key_id!r}, {self.text!r})"


def signing_key(secret: str, day: bytes, region: bytes, service: bytes = b"s3") -> bytes:
    """The key that signs every request of one secret on one day in one region."""
    key = hmac.digest(b"AWS4" + secret.encode(), day, "sha256")
    for part in (region, service, b"aws4_request"):
        key = hmac.digest(key, part, "sha256")
    return key


def canonical_path(path: bytes) -> bytes:
    """`path`, percent-encoded exactly once, as S3 signers encode it."""
    if _CLEAN(path):
        return path
    return quote(unquote_to_bytes(path), safe="/-_.~").encode()


def parse_query(query: bytes) -> QueryPairs:
    """The parameters of a query, percent-decoded (`+` is a space), in the order sent; a name without `=` has value
    `b""`."""
    pairs = []
    for item in query.split(b"&"):
        if item:
            name, _, value = item.partition(b"=")
            pairs.append((_decode(name), _decode(value)))
    return pairs


def _decode(text: bytes) -> bytes:
    return text if _CLEAN(text) else unquote_to_bytes(text.replace(b"+", b" "))


def canonical_query(pairs: QueryPairs) -> bytes:
    """Parameters encoded and sorted; a presigned query's own signature is left out."""
    encoded = sorted((_encode(name), _encode(value)) for name, value in pairs if name != b"X-Amz-Signature")
    return b"&".join([name + b"=" + value for name, value in encoded])


def _encode(text: bytes) -> bytes:
    return text if _CLEAN_WORD(text) else quote(text, safe="-_.~").encode()


def parse_stamp(text: bytes) -> int | None:
    """Unix time of `YYYYMMDDTHHMMSSZ`, or None."""
    match = _STAMP(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    try:
        date(year, month, day)
    except ValueError:
        return None
    if hour > 23 or minute > 59 or second > 60:
        return None
    return timegm((year, month, day, hour, minute, second))


class Verifier:
    """Verifies requests against a table of secrets. One per table: make a new one when the table changes.
    `bucket_of_host` reads the bucket out of a Host header ("": there is none), as whoever answers the request does;
    `sessions` knows the temporary keys."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        bucket_of_host: Callable[[bytes], str] = Addressing().bucket_of_host,
        sessions: Sessions | None = None,
    ) -> None:
        self._secrets = secrets
        self._sessions = sessions or Sessions()
        self._bucket_of_host = bucket_of_host
        self._scopes: dict[bytes, _Scope] = {}
        self._stamp: tuple[bytes | None, int] = (None, 0)  # the last time stamp seen: many requests share a second

    def verify(
        self,
        now_s: float,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: Mapping[bytes, bytes],
        body: bytes | None = b"",
    ) -> Verified | None:
        """Who signed this request, or None if it is not signed at all (anonymous).

        `path` and `query` are as on the request line; header names are lower case, values without surrounding white
        space, repeated ones joined by commas. With `body` None it is still to come: whoever receives it compares it
        with `Verified.payload` (`signedbody.check_payload_sha256`, `signedbody.ChunkVerifier`). `Denied`
        (InvalidAccessKeyId, SignatureDoesNotMatch, RequestTimeTooSkewed, AccessDenied) or `Invalid` (InvalidToken,
        ExpiredToken, AuthorizationHeaderMalformed, AuthorizationQueryParametersError, …) says what is wrong with the
        signature.
        """
        authorization = headers.get(b"authorization")
        if b"X-Amz-" in query or b"Signature=" in query or b"AWSAccessKeyId=" in query or b"%" in query:
            pairs = parse_query(query)
            names = {name for name, _ in pairs}
            if names & _QUERY_TRACES:
                if authorization is not None:
                    raise Invalid(
                        "Only one auth mechanism allowed: send either the Authorization header or a presigned query, "
                        "not both",
                        code="InvalidArgument",
                    )
                return self._verify_query(now_s, method, path, pairs, headers, body)
        if authorization is None:
            return None
        scope = self._scopes.get(authorization[:-64])
        token = headers.get(b"x-amz-security-token", b"")
        if scope is None or scope.token != token:
            scope = self._scope_of_header(authorization, token)
        stamp = headers.get(b"x-amz-date", b"")
        self._check_time(now_s, stamp, scope)
        payload = headers.get(b"x-amz-content-sha256")
        if payload is None:
            raise Invalid("Missing required header for this request: x-amz-content-sha256", code="InvalidRequest")
        canonical = b"%b\n%b\n%b\n%b\n%b\n%b" % (
            method,
            path if _CLEAN(path) else canonical_path(path),
            canonical_query(parse_query(query)) if query else b"",
            _canonical_headers(scope, headers),
            scope.names_text,
            payload,
        )
        signature = authorization[-64:]
        _compare(scope, stamp, canonical, signature)
        if body is None:
            check_payload_form(payload)
        else:
            check_payload(payload, body)
        return Verified(
            scope.key_id, scope.region, payload, False, stamp, scope.text, signature, scope.key, scope.session
        )

    def keys(self, token: bytes, now_s: float) -> tuple[Mapping[str, str], Session | None]:
        """The secrets by key id that may sign what comes with this session token (empty: without one)."""
        if not token:
            return self._secrets, None
        session = self._sessions.open(token)
        check_session(session, now_s)
        return {session.key_id: session.secret}, session

    def verify_policy(self, fields: Mapping[str, str]) -> Verified:
        """Who signed the `policy` of a form upload (POST). `fields` are the form's, names in lower case.

        Nothing but the policy's text is signed: the caller reads it, sees that it has not expired (nor the session: see
        `keys`), and holds every other field against its conditions. `Denied` or `Invalid` as in `verify`.
        """
        raw = {name: fields.get(name, "").encode() for name in _POLICY_REQUIRED}
        if any(not value for value in raw.values()):
            missing = ", ".join(name for name, value in raw.items() if not value)
            raise Invalid(f"the form is not signed in full: it lacks {missing}", code="InvalidArgument")
        if raw["x-amz-algorithm"] != ALGORITHM:
            raise Invalid('x-amz-algorithm only supports "AWS4-HMAC-SHA256"', code="InvalidArgument")
        token = fields.get("x-amz-security-token", "").encode()
        scope = self._scope(raw["x-amz-credential"], b"host", _malformed_form, token)
        stamp = raw["x-amz-date"]
        if parse_stamp(stamp) is None or not stamp.startswith(scope.day):
            raise _malformed_form("x-amz-date must be YYYYMMDDTHHMMSSZ, of the credential's day")
        expected = hmac.digest(scope.key, raw["policy"], "sha256").hex().encode()
        if not hmac.compare_digest(expected, raw["x-amz-signature"]):
            raise mismatch()
        return Verified(scope.key_id, scope.region, UNSIGNED, True, stamp, scope.text, session=scope.session)

    def _check_time(self, now_s: float, stamp: bytes, scope: _Scope) -> None:
        seen, stamp_s = self._stamp
        if seen != stamp:
            parsed = parse_stamp(stamp)
            if parsed is None:
                raise Denied(
                    "AWS authentication requires a valid x-amz-date header (YYYYMMDDTHHMMSSZ)", code="AccessDenied"
                )
            stamp_s = parsed
            self._stamp = (stamp, stamp_s)
        if not -SKEW_S_MAX <= now_s - stamp_s <= SKEW_S_MAX:
            raise Denied(
                "The difference between the request time and the server's time is too large: "
                f"{abs(now_s - stamp_s):.0f} s, at most {SKEW_S_MAX} s; set the clocks right",
                code="RequestTimeTooSkewed",
            )
        if not stamp.startswith(scope.day):
            raise Invalid(
                "The authorization header is malformed: the credential's date is not that of x-amz-date",
                code="AuthorizationHeaderMalformed",
            )
        if scope.session is not None:
            check_session(scope.session, now_s)

    def _scope_of_header(self, authorization: bytes, token: bytes) -> _Scope:
        """Parse and keep; only called for a prefix not seen before with this token."""
        prefix = authorization[:-64]
        match = _AUTHORIZATION.match(authorization)
        if match is None:
            raise _unparsed(authorization)
        if b"x-amz-security-token" not in match[2].split(b";"):
            token = b""  # one that nobody signed opens nothing
        scope = self._scope(match[1], match[2], _malformed_header, token)
        if match.end() != len(prefix):
            raise mismatch()  # no signature has another length
        if len(self._scopes) >= SCOPES_KEPT_MAX:
            self._scopes.clear()
        self._scopes[prefix] = scope
        return scope

    def _scope(
        self, credential: bytes, names_text: bytes, malformed: Callable[[str], ForebayError], token: bytes
    ) -> _Scope:
        parts = credential.rsplit(b"/", 4)
        if len(parts) != 5:
            raise malformed("the credential must be <key id>/<yyyymmdd>/<region>/s3/aws4_request")
        raw_key_id, day, region, service, terminator = parts
        if service != b"s3":
            raise malformed('the service in the credential must be "s3"')
        if terminator != b"aws4_request":
            raise malformed('the credential must end with "aws4_request"')
        if parse_stamp(day + b"T000000Z") is None:
            raise malformed("the credential's date must be yyyymmdd")
        if not region or not region.isascii():
            raise malformed("the credential names no region")
        names = tuple(names_text.split(b";"))
        if b"host" not in names:
            raise malformed("'host' must be one of SignedHeaders")
        key_id = raw_key_id.decode("utf-8", "replace")
        session = self._sessions.open(token) if token else None
        if session is None:
            secret = self._secrets.get(key_id)
        else:
            secret = session.secret if session.key_id == key_id else None
        if secret is None:
            raise Denied(
                "The access key id you provided does not exist here: check it, or have it added",
                code="InvalidAccessKeyId",
            )
        key = signing_key(secret, day, region)
        text = b"/".join((day, region, service, terminator))
        return _Scope(key_id, region.decode(), day, text, names, frozenset(names), names_text, key, session, token)

    def _verify_query(
        self,
        now_s: float,
        method: bytes,
        path: bytes,
        pairs: QueryPairs,
        headers: Mapping[bytes, bytes],
        body: bytes | None,
    ) -> Verified:
        given = dict(pairs)
        if b"X-Amz-Algorithm" not in given and (b"AWSAccessKeyId" in given or b"Signature" in given):
            bucket = self._bucket_of_host(headers.get(b"host", b""))
            resource = b"/" + bucket.encode() + path if bucket else path
            secrets, session = self.keys(given.get(b"x-amz-security-token", b""), now_s)
            key_id = sigv2.verify_presigned(secrets, now_s, method, resource, pairs, headers)
            return Verified(key_id, "", UNSIGNED, True, session=session)
        if any(name not in given for name in _QUERY_REQUIRED):
            raise _malformed_query(
                "query-string authentication requires the X-Amz-Algorithm, X-Amz-Credential, X-Amz-Signature, "
                "X-Amz-Date, X-Amz-SignedHeaders and X-Amz-Expires parameters"
            )
        if len(given) != len(pairs) and any(sum(n == name for n, _ in pairs) > 1 for name in _QUERY_REQUIRED):
            raise _malformed_query("each X-Amz-* parameter may be given only once")
        if given[b"X-Amz-Algorithm"] != ALGORITHM:
            raise _malformed_query('X-Amz-Algorithm only supports "AWS4-HMAC-SHA256"')
        stamp, expires = given[b"X-Amz-Date"], given[b"X-Amz-Expires"]
        stamp_s = parse_stamp(stamp)
        if stamp_s is None:
            raise _malformed_query('X-Amz-Date must be in the format "yyyyMMddTHHmmssZ"')
        if not _EXPIRES(expires):
            raise _malformed_query("X-Amz-Expires should be a number of seconds")
        expires_s = int(expires)
        if not 1 <= expires_s <= EXPIRES_S_MAX:
            raise Denied(
                f"X-Amz-Expires must be a number of seconds from 1 to {EXPIRES_S_MAX}: sign it again",
                code="AccessDenied",
            )
        token = given.get(b"X-Amz-Security-Token", b"")
        if b"x-amz-security-token" in headers:
            raise _malformed_query("the session token of a presigned request goes into X-Amz-Security-Token")
        scope = self._scope(given[b"X-Amz-Credential"], given[b"X-Amz-SignedHeaders"], _malformed_query, token)
        if scope.session is not None:
            check_session(scope.session, now_s)
        if not stamp.startswith(scope.day):
            raise _malformed_query("the credential's date is not that of X-Amz-Date")
        if now_s < stamp_s - SKEW_S_MAX:
            raise Denied("Request is not valid yet: it was signed for a later time", code="AccessDenied")
        if now_s > stamp_s + expires_s:
            raise Denied("Request has expired: sign it again", code="AccessDenied")
        payload = given.get(b"X-Amz-Content-Sha256") or headers.get(b"x-amz-content-sha256") or UNSIGNED
        canonical = b"%b\n%b\n%b\n%b\n%b\n%b" % (
            method,
            canonical_path(path),
            canonical_query(pairs),
            _canonical_headers(scope, headers),
            scope.names_text,
            payload,
        )
        signature = given[b"X-Amz-Signature"]
        _compare(scope, stamp, canonical, signature)
        if body is None:
            check_payload_form(payload)
        else:
            check_payload(payload, body)
        return Verified(
            scope.key_id, scope.region, payload, True, stamp, scope.text, signature, scope.key, scope.session
        )


_QUERY_REQUIRED = (
    b"X-Amz-Algorithm",
    b"X-Amz-Credential",
    b"X-Amz-Signature",
    b"X-Amz-Date",
    b"X-Amz-SignedHeaders",
    b"X-Amz-Expires",
)
_POLICY_REQUIRED = ("policy", "x-amz-algorithm", "x-amz-credential", "x-amz-date", "x-amz-signature")
_QUERY_TRACES = {*_QUERY_REQUIRED, b"X-Amz-Security-Token", b"AWSAccessKeyId", b"Signature"}


def _canonical_headers(scope: _Scope, headers: Mapping[bytes, bytes]) -> bytes:
    """The signed headers' lines. `Denied` if an `x-amz-*` header was sent unsigned; a signed one that did not arrive
    counts as empty (and so will not match)."""
    name_set = scope.name_set
    for name in headers:
        if name not in name_set and name.startswith(b"x-amz-"):
            raise Denied(
                f"There were headers present in the request which were not signed: {name.decode('latin-1')}",
                code="AccessDenied",
            )
    lines = []
    for name in scope.names:
        value = headers.get(name, b"")
        if b"  " in value:
            value = _SPACES.sub(b" ", value)
        lines.append(name + b":" + value + b"\n")
    return b"".join(lines)


def _compare(scope: _Scope, stamp: bytes, canonical: bytes, signature: bytes) -> None:
    to_sign = b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (stamp, scope.text, hashlib.sha256(canonical).hexdigest().encode())
    expected = hmac.digest(scope.key, to_sign, "sha256").hex().encode()
    if not hmac.compare_digest(expected, signature):
        raise mismatch()


def _malformed_header(what: str) -> ForebayError:
    return Invalid(f"The authorization header is malformed: {what}", code="AuthorizationHeaderMalformed")


def _malformed_query(what: str) -> ForebayError:
    return Invalid(f"The query's authorization is malformed: {what}", code="AuthorizationQueryParametersError")


def _malformed_form(what: str) -> ForebayError:
    return Invalid(f"The form's authorization is malformed: {what}", code="InvalidArgument")


def _unsupported() -> ForebayError:
    return Invalid(
        "The authorization mechanism you have provided is not supported. Please use AWS4-HMAC-SHA256.",
        code="InvalidRequest",
    )


def _unparsed(authorization: bytes) -> ForebayError:
    """Why an Authorization header could not be parsed."""
    if authorization.startswith(b"AWS4-HMAC-SHA256"):
        return _malformed_header(
            "it must be 'AWS4-HMAC-SHA256 Credential=…, SignedHeaders=…, Signature=<64 hex digits>'"
        )
    if not authorization:
        return Denied("Access denied: the Authorization header is empty, sign the request", code="AccessDenied")
    if authorization.startswith(b"AWS4-") or (authorization.startswith(b"AWS ") and b":" in authorization):
        return _unsupported()
    return Invalid("Unsupported authorization type: sign with AWS4-HMAC-SHA256", code="InvalidArgument")
