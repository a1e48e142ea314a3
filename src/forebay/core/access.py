"""Who may do what: identities, their secrets, and the one question asked of them.

Theory. An *identity* is a name with ways to prove it (an S3 key pair, a bearer token of which only the SHA-256 is kept)
and *grants*. A grant allows one verb on the buckets whose name fits a pattern, where `*` stands for any run of
characters. What no grant allows is denied; there are no denials, so the order of grants means nothing. The verbs are
independent (`write` without `read` suits a backup job) except that `admin` includes the other two. An S3 secret must be
kept as it is, since verifying a signature needs it.

Rejected: S3 bucket policies and ACLs (a language of their own; buckets behind us have theirs already); roles (one more
name to learn for what a pattern does).

Invariants. (1) Two identities never share a name, an access key id or a token. (2) `decode_identities` reads back what
`encode_identities` wrote.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec

from forebay.core.errors import Invalid

Verb = Literal["read", "write", "admin"]
VERBS: Final = get_args(Verb)
_PATTERN = re.compile(r"[a-z0-9.\-*]{1,63}")


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """`verb` is allowed on buckets whose name fits `pattern`."""

    verb: Verb
    pattern: str

    def covers(self, verb: Verb, bucket: str) -> bool:
        """Whether this grant allows `verb` on `bucket`; an empty bucket name (the node itself) needs pattern `*`."""
        if self.verb not in (verb, "admin"):
            return False
        if "*" not in self.pattern:
            return self.pattern == bucket
        return re.fullmatch(".*".join(re.escape(part) for part in self.pattern.split("*")), bucket) is not None


class Identity(msgspec.Struct, frozen=True):
    """One caller. `token_sha256` is lower-case hex; a way of proving that is not used is empty."""

    name: str
    access_key_id: str = ""
    secret_access_key: str = ""
    token_sha256: str = ""
    grants: tuple[Grant, ...] = ()

    def may(self, verb: Verb, bucket: str) -> bool:
        """Whether any grant allows `verb` on `bucket`."""
        return any(grant.covers(verb, bucket) for grant in self.grants)


ANYONE: Final = Identity("anyone", grants=(Grant("admin", "*"),))  # who calls a node without identities


def parse_grants(text: str) -> tuple[Grant, ...]:
    """Grants from `read:corpus,write:ckpt-*`; `Invalid` says what is wrong with which part."""
    grants = []
    for part in text.split(","):
        verb, colon, pattern = part.strip().partition(":")
        if verb not in VERBS or not colon or not _PATTERN.fullmatch(pattern):
            raise Invalid(f"grant {part.strip()!r} is not <verb>:<bucket or pattern>, verb one of {', '.join(VERBS)}")
        grants.append(Grant(verb, pattern))  # type: ignore[arg-type]
    return tuple(grants)


class _InFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    access_key_id: str = ""
    secret_access_key: str = ""
    token: str = ""
    token_sha256: str = ""
    allow: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    identities: list[_InFile]


def parse_identities(text: bytes) -> list[Identity]:
    """Identities from an identities file (JSON), or `Invalid` saying what is wrong.

    `{"identities": [{"name": "trainer", "access_key_id": "…", "secret_access_key": "…", "token": "…",
    "allow": "read:corpus,write:ckpt-*"}]}`; `token_sha256` may stand instead of `token`.
    """
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Invalid(f"the identities file does not fit: {error}") from None
    identities = []
    for entry in file.identities:
        token = hashlib.sha256(entry.token.encode()).hexdigest() if entry.token else entry.token_sha256.lower()
        if bool(entry.access_key_id) != bool(entry.secret_access_key):
            raise Invalid(
                f"identity {entry.name!r} has half a key: give access_key_id and secret_access_key, or neither"
            )
        if not entry.access_key_id and not token:
            raise Invalid(f"identity {entry.name!r} cannot prove itself: give it a key pair or a token")
        grants = parse_grants(entry.allow) if entry.allow else ()
        identities.append(Identity(entry.name, entry.access_key_id, entry.secret_access_key, token, grants))
    Identities(identities)
    return identities


encode_identities = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(list[Identity])


def decode_identities(body: bytes) -> list[Identity]:
    """What `encode_identities` wrote; no bytes mean no identities."""
    return _decoder.decode(body) if body else []


class Identities:
    """A table of identities, looked up by what they present. Made anew when any identity changes."""

    def __init__(self, identities: Iterable[Identity] = ()) -> None:
        self.by_key_id: dict[str, Identity] = {}
        self._by_token: dict[str, Identity] = {}
        names: set[str] = set()
        for identity in identities:
            if not identity.name or identity.name in names:
                raise Invalid(f"identity name {identity.name!r} is empty or taken twice: give each its own")
            names.add(identity.name)
            for proof, table in (
                (identity.access_key_id, self.by_key_id),
                (identity.token_sha256, self._by_token),
            ):
                if proof and proof in table:
                    raise Invalid(f"identities {identity.name!r} and {table[proof].name!r} share a key or token")
                if proof:
                    table[proof] = identity
        self.secrets = {key_id: identity.secret_access_key for key_id, identity in self.by_key_id.items()}

    def __bool__(self) -> bool:
        return bool(self.by_key_id or self._by_token)

    def by_token(self, token: bytes) -> Identity | None:
        """Who holds `token`. The lookup is by its hash, so timing tells nothing about the token."""
        return self._by_token.get(hashlib.sha256(token).hexdigest())
