"""Who may do what: identities, their secrets, and the one question asked of them.

Theory. An *identity* is a name with ways to prove it (an S3 key pair, a bearer token of which only the SHA-256 is kept)
and *grants*. A grant allows one verb on the buckets whose name fits a pattern, where `*` stands for any run of
characters. What no grant allows is denied; there are no denials, so the order of grants means nothing. The verbs are
independent (`write` without `read` suits a backup job) except that `admin` includes the others. `observe` gives sight
and nothing to take: counters and states, of the buckets it names or with `*` of the whole node. An S3 secret must be
kept as it is, since verifying a signature needs it.

A key can be replaced without a break: the old one stays *retiring* for a while beside the new one. Where identities are
kept, and how secrets are sealed there, is `core/keyfile.py`.

Rejected: S3 bucket policies and ACLs (a language of their own; buckets behind us have theirs already); roles (one more
name to learn for what a pattern does); two secrets for one access key id while it is replaced (every request would be
verified twice, and logs could not tell who still uses the old one).

Invariants. (1) Two identities never share a name, an access key id or a token. (2) `decode_identities` reads back what
`encode_identities` wrote. (3) Neither secrets nor hashes of tokens are ever printed. (4) A table of no identities lets
nobody in: being open to all is the node's decision (`Auth.open`), not that of an empty table.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

from forebay.core.errors import Invalid
from forebay.core.machines.allowance import Limits

Verb = Literal["read", "write", "admin", "observe"]
VERBS: Final = get_args(Verb)
OIDC_NAMES: Final = "oidc:"  # how the names of those begin whom an issuer vouches for (`core/oidc.py`)
_PATTERN = re.compile(r"[a-z0-9.\-*]{1,63}")


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """`verb` is allowed on buckets whose name fits `pattern`."""

    verb: Verb
    pattern: str

    def covers(self, verb: Verb, bucket: str) -> bool:
        """Whether this grant allows `verb` on `bucket`; an empty bucket name (the node itself) needs pattern `*`."""
        return self.verb in (verb, "admin") and self.fits(bucket)

    def fits(self, bucket: str) -> bool:
        """Whether the bucket is one of those that the grant is about."""
        if "*" not in self.pattern:
            return self.pattern == bucket
        return re.fullmatch(".*".join(re.escape(part) for part in self.pattern.split("*")), bucket) is not None


class Retiring(msgspec.Struct, frozen=True):
    """A key pair, a token or both that were replaced; they still prove who calls until `until_s` (Unix time)."""

    access_key_id: str
    secret_access_key: str
    token_sha256: str
    until_s: float

    def __repr__(self) -> str:
        return f"Retiring({self.access_key_id!r}, until_s={self.until_s:.0f})"


class Identity(msgspec.Struct, frozen=True):
    """One caller. `token_sha256` is lower-case hex; a way of proving that is not used is empty. One that is disabled
    keeps its name and keys but proves nothing. `until_s` is Unix time: that of one who came with a token of an issuer
    or a temporary key, 0 for one of the file."""

    name: str
    access_key_id: str = ""
    secret_access_key: str = ""
    token_sha256: str = ""
    grants: tuple[Grant, ...] = ()
    retiring: tuple[Retiring, ...] = ()
    disabled: bool = False
    limits: Limits | None = None
    until_s: float = 0.0

    def __repr__(self) -> str:
        return f"Identity({self.name!r}, {self.access_key_id!r}, {format_grants(self.grants)!r})"

    def may(self, verb: Verb, bucket: str) -> bool:
        """Whether any grant allows `verb` on `bucket`."""
        return any(grant.covers(verb, bucket) for grant in self.grants)

    def sees(self, bucket: str) -> bool:
        """Whether the identity may know of `bucket` at all: some grant is about it."""
        return any(grant.fits(bucket) for grant in self.grants)


ANYONE: Final = Identity("anyone", grants=(Grant("admin", "*"),))  # who calls a node without identities
ANONYMOUS: Final = Identity("anonymous")  # who calls a node with identities and proves none


def parse_grants(text: str) -> tuple[Grant, ...]:
    """Grants from `read:corpus,write:ckpt-*`; `Invalid` says what is wrong with which part."""
    grants = []
    for part in text.split(","):
        verb, colon, pattern = part.strip().partition(":")
        if verb not in VERBS or not colon or not _PATTERN.fullmatch(pattern):
            raise Invalid(f"grant {part.strip()!r} is not <verb>:<bucket or pattern>, verb one of {', '.join(VERBS)}")
        grants.append(Grant(verb, pattern))  # type: ignore[arg-type]
    return tuple(grants)


def format_grants(grants: Iterable[Grant]) -> str:
    """The text that `parse_grants` reads back."""
    return ",".join(f"{grant.verb}:{grant.pattern}" for grant in grants)


encode_identities = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Identity])


def decode_identities(body: bytes) -> list[Identity]:
    """What `encode_identities` wrote; no bytes mean no identities."""
    return _decoder.decode(body) if body else []


class Identities:
    """A table of identities, looked up by what they present. Made anew when any identity changes. `Invalid` if two
    share a name, a key or a token."""

    def __init__(self, identities: Iterable[Identity] = ()) -> None:
        self.by_key_id: dict[str, Identity] = {}
        self.secrets: dict[str, str] = {}
        self._by_token: dict[str, Identity] = {}
        self._until_s: dict[str, float] = {}  # key ids and token hashes that end by themselves
        names: set[str] = set()
        for identity in identities:
            if not identity.name or identity.name in names:
                raise Invalid(f"identity name {identity.name!r} is empty or taken twice: give each its own")
            if identity.name.startswith(OIDC_NAMES):
                raise Invalid(f"identity name {identity.name!r} is one of an issuer's people: choose another")
            names.add(identity.name)
            self._enter(identity, identity.access_key_id, identity.secret_access_key, identity.token_sha256)
            for old in identity.retiring:
                self._enter(identity, old.access_key_id, old.secret_access_key, old.token_sha256)
                self._until_s |= {proof: old.until_s for proof in (old.access_key_id, old.token_sha256) if proof}

    def _enter(self, identity: Identity, key_id: str, secret: str, token_sha256: str) -> None:
        for proof, table in ((key_id, self.by_key_id), (token_sha256, self._by_token)):
            if proof and proof in table:
                raise Invalid(f"identities {identity.name!r} and {table[proof].name!r} share a key or token")
            if proof:
                table[proof] = identity
        if key_id and not identity.disabled:
            self.secrets[key_id] = secret

    def of_key(self, key_id: str, now_s: float) -> Identity | None:
        """Whose key this is; None if it is nobody's, was replaced too long ago, or its owner is disabled."""
        return self._valid(self.by_key_id.get(key_id), key_id, now_s)

    def of_token(self, token: bytes, now_s: float) -> Identity | None:
        """Who holds `token`, as `of_key`. The lookup is by its hash, so timing tells nothing about the token."""
        digest = hashlib.sha256(token).hexdigest()
        return self._valid(self._by_token.get(digest), digest, now_s)

    def _valid(self, identity: Identity | None, proof: str, now_s: float) -> Identity | None:
        if identity is None or identity.disabled or now_s > self._until_s.get(proof, now_s):
            return None
        return identity
