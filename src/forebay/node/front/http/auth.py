"""The front's door check: who sent this request, and may they?

Theory. The engine owns the identities and sends them with every `Welcome`; a front only reads them. Without identities
the node listens on loopback alone (the supervisor sees to that), and whoever reaches it is `ANYONE`: signatures are
then not looked at, since clients that sign always need *some* key configured and there is nothing to check it against.
With identities, every request must prove itself: S3 by signature, native by bearer token. A bearer token may be one of
the node's, or one of an OIDC issuer that it trusts (`tokens.py`); S3 has temporary keys for those (`core/s3rules`).

Where an identity may do what is kept per (identity, verb, bucket), because a grant is a pattern and the hot path asks
the same question for every request. What remains is whether a name lies there (`is_within`): nothing to do for grants
without a prefix.

A node without identities trusts whoever reaches it, and a browser on its host reaches it too: a page of any site may
point its own name at 127.0.0.1 and then talk to us as to itself (DNS rebinding). To the browser that is no cross-site
request, so it sends neither `Origin` nor `Sec-Fetch-Site` that would tell; but `Host` carries the page's name. So an
open node answers only to names that mean this machine, and to the domain that its operator gave it, under which buckets
are named. A page may also send a request to our own name, without reading the answer; browsers then name the page in
`Origin`, or say `Sec-Fetch-Site`, and such requests change nothing. A page's origin is trusted by the native API only
where it is the very address that was asked. A name below `localhost` is not: there, pages are objects of a bucket.

A bucket that its admin made `public-read` may be read and listed by anybody; nothing else is ever done unproved.

Who proved an identity with limits is held to them here, once for each request (`accounts.py`).

Rejected: anonymous writing (whoever finds the bucket fills it; a signed form lets a visitor write what was agreed).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from forebay.core.access import (
    ANONYMOUS,
    ANYONE,
    PEER_KEY_ID,
    WHOLE,
    Identities,
    Identity,
    Reach,
    Verb,
    decode_identities,
    is_within,
)
from forebay.core.errors import Denied, Invalid, NotFound, map_changes
from forebay.core.oidc import decode_trusted
from forebay.core.s3rules.compat.postpolicy import legacy_signer
from forebay.core.s3rules.names import Addressing
from forebay.core.s3rules.sessions import Session, Sessions
from forebay.core.s3rules.sigv4 import Verified, Verifier
from forebay.core.types import AGAIN_HEADER, LOOP_HEADER, PEER_HEADER, RELAY_HEADER, Bucket
from forebay.node.front.http.accounts import Accounts
from forebay.node.front.http.requests import Request
from forebay.node.front.http.tokens import Ask, Holder, WebTokens, expired
from forebay.ports import clock

LOOP_NAME, PEER_NAME, RELAY_NAME = LOOP_HEADER.encode(), PEER_HEADER.encode(), RELAY_HEADER.encode()
AGAIN_NAME = AGAIN_HEADER.encode()
_PORT = re.compile(r":\d*\Z")
_FOREIGN = (b"cross-site", b"same-site")  # what Sec-Fetch-Site says of a page at another address
_UNKNOWN: Final[tuple[Identity, Reach]] = (ANONYMOUS, ())
_ANSWERS_KEPT_MAX = 4096  # (identity, verb, bucket) triples


class Caller(NamedTuple):
    """Who sent a request, before its body: `verified` is what was signed, None on a node without identities."""

    identity: Identity
    verified: Verified | None


class Auth:
    """One per front. `wall_s` gives Unix time, `addressing` knows the node's names and the bucket that one means, `ask`
    asks the engine for keys of issuers."""

    def __init__(
        self,
        wall_s: Callable[[], float] = clock.wall_s,
        addressing: Addressing | None = None,
        accounts: Accounts | None = None,
        ask: Ask | None = None,
    ) -> None:
        self._wall_s = wall_s
        self.accounts = accounts if accounts is not None else Accounts(0, clock.monotonic_s)
        self._addressing = addressing if addressing is not None else Addressing()
        self._ask = ask
        self._body = (b"", b"")
        self._hosts: set[bytes] = set()
        self._owners: dict[str, str] = {}
        self.node = b"\0"  # its id
        self.as_home = b""  # how nodes of its cluster name it
        self.update(b"")

    def update(self, identities: bytes, trusted: bytes = b"", buckets: Iterable[Bucket] = ()) -> None:
        """Use the identities, issuers and buckets of a `Welcome`. Nothing is forgotten when they did not change."""
        owners = {bucket.name: bucket.owner for bucket in buckets if bucket.owner}
        known = hasattr(self, "_identities") and (identities, trusted) == self._body
        if known and owners == self._owners:
            return
        self._owners = owners
        self._reaches: dict[tuple[int, str, str], tuple[Identity, Reach]] = {}
        if known:
            return
        self._body = identities, trusted
        decoded = decode_identities(identities)
        self._identities = Identities(decoded)
        self.accounts.follow(decoded)
        issuers = decode_trusted(trusted) if trusted else None
        self._tokens = WebTokens(issuers, self._ask)
        self._sessions = Sessions(issuers.secret, [one.issuer for one in issuers.issuers]) if issuers else Sessions()
        self._verifier = Verifier(self._identities.secrets, self._addressing.bucket_of_host, self._sessions)
        self.open = not identities  # told of none; an identities file without entries lets nobody in

    def check_host(self, request: Request) -> None:
        """Return if the node has identities, or the request was sent to a name of this machine or of the node's domain;
        else `Denied`: a page of another site may have sent it. `Invalid` for a request that this node sent,
        `map_changes` for one of a node that takes this one for a home by another map."""
        if self.node in request.headers.get(LOOP_NAME, b""):
            raise Invalid("this node is asked by itself: its bucket needs another backend", code="LoopDetected")
        named = request.headers.get(PEER_NAME)
        if named is not None and named not in (self.as_home, self.node):  # the node alone: it is asked by no map
            raise map_changes("this node acts by another map of the cluster: ask by that", retry_after_s=1.0)
        if not self.open:
            return
        host = request.headers.get(b"host", b"")
        if not self.knows(host):
            raise Denied(
                "this node has no identities, so it answers to localhost, loopback addresses and the name given with "
                f"--domain only, not to {host[:100].decode('latin-1')!r}: use http://127.0.0.1, or give the node "
                "identities",
                code="AccessDenied",
            )

    def knows(self, host: bytes) -> bool:
        """Whether a Host header names this machine, or the node's domain."""
        if host in self._hosts:
            return True
        if not is_this_machine(host.decode("latin-1")) and not self._addressing.has(host):
            return False
        if len(self._hosts) < _ANSWERS_KEPT_MAX:
            self._hosts.add(host)
        return True

    def signed(self, request: Request, bucket: Bucket | None = None) -> Identity:
        """Who signed an S3 request (header or presigned). `Denied` or `Invalid` with an S3 code if nobody known did;
        `NotFound` if nobody did at all and it is about a bucket that is not known to be there."""
        return ANYONE if self.open else self._verify(request, request.body, bucket).identity

    def check_override(self, request: Request) -> None:
        """Return unless a page of another site has an open node say what an object is: `Denied`. Where there are
        identities the signer says it."""
        headers = request.headers
        reads = headers.get(b"sec-fetch-mode") == b"cors"  # a script reads it, if the bucket's CORS rules let it
        if self.open and headers.get(b"sec-fetch-site") in _FOREIGN and not reads:
            raise Denied(
                "this node has no identities, so pages of other sites may not say what its objects are: leave "
                "response-* out, or give the node identities and sign the URL",
                code="AccessDenied",
            )

    def now_s(self) -> float:
        """Unix time, as signatures and policies are judged by it."""
        return self._wall_s()

    def reader(self, request: Request, bucket: Bucket, name: str | None) -> Identity:
        """Who reads or lists `name` in `bucket`, which they may; else raises as `signed` and `require_read`.
        `ANONYMOUS` if nobody signed and the bucket is public: for reading what is public alone, everything else asks
        `require`."""
        if self.open:
            return ANYONE
        if bucket.acl != "public-read":
            identity = self.signed(request, bucket)
            self.require_read(identity, bucket, name)
            return identity
        now_s = self._wall_s()
        verified = self._verifier.verify(
            now_s, request.method, request.path, request.query, request.headers, request.body
        )
        identity = ANONYMOUS if verified is None else self._owner(verified.key_id, now_s, verified.session)
        return self.admit(request, identity)

    def caller(self, request: Request, bucket: Bucket | None = None) -> Caller:
        """As `signed`, for a request whose body is still to come: whoever receives it holds it against
        `verified.payload`, with the chunk signatures that it may have."""
        return Caller(ANYONE, None) if self.open else self._verify(request, None, bucket)

    def _verify(self, request: Request, body: bytes | None, bucket: Bucket | None) -> Caller:
        now_s = self._wall_s()
        verified = self._verifier.verify(now_s, request.method, request.path, request.query, request.headers, body)
        if verified is None:
            if bucket is not None and not bucket.url:
                raise _no_such_bucket()
            raise Denied("Access denied: this node has identities, so sign the request with a key", code="AccessDenied")
        return Caller(self.admit(request, self._owner(verified.key_id, now_s, verified.session)), verified)

    def admit(self, request: Request, identity: Identity) -> Identity:
        """`identity`, which proved to have sent the request; `Busy` if that is over its limits. A request counts
        once. `Denied` if it passes itself off as a request between nodes."""
        if PEER_NAME in request.headers and identity.access_key_id != PEER_KEY_ID:
            raise Denied(
                f"only nodes of the cluster, with its peer key, may send the header {PEER_HEADER}: leave it out",
                code="AccessDenied",
            )
        request.identity = identity
        if identity.limits is not None and request.account is None:
            account = self.accounts.of(identity)
            account.admit(is_held=request.held is account)
            request.account = account
        return identity

    def _owner(self, key_id: str, now_s: float, session: Session | None) -> Identity:
        """Whose key this is. Its signature was right, but it may have been replaced."""
        if session is not None:
            return session.identity
        identity = self._identities.of_key(key_id, now_s)
        if identity is None:
            raise Denied(
                "The access key id you provided was replaced and is no longer valid: use the new one",
                code="InvalidAccessKeyId",
            )
        return identity

    def signed_policy(self, fields: Mapping[str, str], bucket: Bucket) -> Identity:
        """Who signed the policy of a form upload; `fields` are the form's, names in lower case. The caller still
        compares the form with the policy, and its time. Raises as `signed`."""
        if self.open:
            return ANYONE
        if "policy" not in fields:
            if not bucket.url:
                raise _no_such_bucket()
            raise Denied("Access denied: this node has identities, so send a signed policy", code="AccessDenied")
        now_s = self._wall_s()
        secrets, session = self._verifier.keys(fields.get("x-amz-security-token", "").encode(), now_s)
        key_id = legacy_signer(fields, secrets) or self._verifier.verify_policy(fields).key_id
        return self._owner(key_id, now_s, session)

    def exchange(self, token: bytes, duration_s: int) -> tuple[Holder, Session]:
        """Temporary keys for whoever holds this token of an issuer, and who that is. They end with the token, and with
        the issuer's `session_s_max`. `Denied` and `Unavailable` with a code of STS."""
        if self.open:
            raise Denied(
                "this node has no identities, so it lets everybody in and gives no temporary keys: use any key",
                code="AccessDenied",
            )
        now_s = int(self._wall_s())
        holder = self._tokens.holder(token, now_s)
        until_s = min(now_s + duration_s, now_s + holder.issuer.session_s_max, int(holder.until_s))
        if until_s <= now_s:
            raise expired()
        return holder, self._sessions.make(holder.issuer, holder.subject, holder.rules, now_s, until_s)

    def bearer(self, request: Request) -> Identity:
        """Who holds the bearer token of a native request. `Denied` if nobody known does; without identities, if the
        request was sent to a name that is not the node's."""
        self.check_host(request)
        if self.open:
            if request.method not in (b"GET", b"HEAD"):
                _check_page(request)
            return ANYONE
        scheme, _, token = request.headers.get(b"authorization", b"").partition(b" ")
        return self.admit(request, self.holder(token.strip() if scheme.lower() == b"bearer" else b""))

    def holder(self, token: bytes) -> Identity:
        """Whose bearer token this is, however it came; `ANYONE` without identities, else `Denied` if it is nobody's."""
        if self.open:
            return ANYONE
        now_s = self._wall_s()
        identity = self._identities.of_token(token, now_s) if token else None
        if identity is None and token.count(b".") == 2 and self._tokens.trusts_any:
            return self._tokens.holder(token, now_s).identity
        if identity is None:
            came = "the token is not one that it knows" if token else "no token came"
            raise Denied(
                f"this node has identities, and {came}: set FOREBAY_TOKEN to one that `forebay key create` or `rotate` "
                "showed (over HTTP: 'Authorization: Bearer <token>')",
                code="AccessDenied",
            )
        return identity

    def require_read(self, identity: Identity, bucket: Bucket, name: str | None) -> None:
        """Return if `identity` may read `name` in `bucket` (see `require`), else `Denied`; `NotFound` for a bucket that
        is not known to be there, so that a wrong name is told from a missing grant."""
        self._require_in(identity, "read", bucket, name)

    def require_write(self, identity: Identity, bucket: Bucket, name: str | None) -> None:
        """Return if `identity` may write `name` in `bucket`, else as `require_read`."""
        self._require_in(identity, "write", bucket, name)

    def _require_in(self, identity: Identity, verb: Verb, bucket: Bucket, name: str | None) -> None:
        if identity is ANYONE or self._reaches.get((id(identity), verb, bucket.name), _UNKNOWN)[1] is WHOLE:
            return  # the hot path
        try:
            self.require(identity, verb, bucket.name, name)
        except Denied:
            if bucket.url:
                raise
            raise NotFound(
                f"there is no bucket {bucket.name!r} that {identity.name} may {verb}: look at the name, or have "
                f"'{verb}:{bucket.name}' granted",
                code="NoSuchBucket",
            ) from None

    def owner(self, identity: Identity) -> str:
        """Under whose name what `identity` begins is kept: "" without identities, where all is everybody's."""
        return "" if self.open else identity.name

    def maker(self, identity: Identity, bucket: str) -> str:
        """Under whose name `identity` makes or changes `bucket`, if it may only as the one who made it; else ""."""
        return "" if identity.may("admin", bucket) else identity.name

    def may(self, identity: Identity, verb: Verb, bucket: str = "", name: str | None = "") -> bool:
        """Whether `require` would return."""
        reach = self._reach(identity, verb, bucket)
        return reach is WHOLE or (bool(reach) if name is None else is_within(name, reach))

    def sees(self, identity: Identity, bucket: str, *, whole: bool = False) -> bool:
        """As `Identity.sees`, of a bucket that is there."""
        return identity.sees(bucket, self._owners.get(bucket, ""), whole=whole)

    def _reach(self, identity: Identity, verb: Verb, bucket: str) -> Reach:
        if identity.until_s:  # made anew for each request
            return identity.reach(verb, bucket, self._owners.get(bucket, ""))
        question = (id(identity), verb, bucket)
        known = self._reaches.get(question)
        if known is None:
            if len(self._reaches) >= _ANSWERS_KEPT_MAX:
                self._reaches.clear()
            reach = identity.reach(verb, bucket, self._owners.get(bucket, ""))
            known = self._reaches[question] = (identity, reach)  # it is kept, so no other gets its id
        return known[1]

    def require(self, identity: Identity, verb: Verb, bucket: str = "", name: str | None = "") -> None:
        """Return if `identity` may `verb` on everything in `bucket` whose name begins with `name`: a key, or a prefix;
        "" is all of the bucket and its settings, None anything in it at all; without a bucket it is the node itself.
        Else `Denied`."""
        if identity is ANYONE:
            return
        if not self.may(identity, verb, bucket, name):
            raise _not_granted(identity, verb, bucket, name, self._reach(identity, verb, bucket))


def _not_granted(identity: Identity, verb: Verb, bucket: str, name: str | None, reach: Reach) -> Denied:
    what = f"{bucket}/{name}" if name else bucket or "this node"
    below = ", ".join(f"{bucket}/{prefix}" for prefix in reach[:3])
    only = f" outside of {below}" if below else ""
    return Denied(
        f"{identity.name} may not {verb} {what}{only}: have '{verb}:{bucket or '*'}' granted", code="AccessDenied"
    )


def _no_such_bucket() -> NotFound:
    return NotFound("The specified bucket does not exist: look at the name", code="NoSuchBucket")


def _check_page(request: Request) -> None:
    """Return if no page of another site sent this request; else `Denied`."""
    origin = request.header(b"origin")
    foreign = request.headers.get(b"sec-fetch-site") in _FOREIGN
    if b"origin" in request.headers:
        scheme, _, host = origin.partition("://")
        below = _PORT.sub("", host).rstrip(".").lower().endswith(".localhost")
        own = scheme in ("http", "https") and host == request.header(b"host") and is_this_machine(host) and not below
        foreign = foreign or not own
    if foreign:
        raise Denied(
            f"this node has no identities, so pages of other addresses may change nothing here, and this is one of "
            f"{origin[:100] or 'another site'!r}: give the node identities, and send a token",
            code="AccessDenied",
        )


def is_this_machine(host: str) -> bool:
    """Whether a `Host` field can only mean this machine: none at all, a loopback address, or a name that no resolver
    may give another address (RFC 6761 6.3)."""
    name = _PORT.sub("", host.strip()).strip("[]").rstrip(".").lower()
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
