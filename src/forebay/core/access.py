"""Who may do what: identities, their secrets, and the one question asked of them.

Theory. An *identity* is a name with ways to prove it (an S3 key pair, a bearer token of which only the SHA-256 is kept)
and *grants*. A grant allows one verb on the buckets whose name fits a pattern, where `*` stands for any run of
characters. What no grant allows is denied; there are no denials, so the order of grants means nothing. The verbs are
independent (`write` without `read` suits a backup job) except that `admin` includes the others. `observe` gives sight
and nothing to take: counters and states, of the buckets it names or with `*` of the whole node. An S3 secret must be
kept as it is, since verifying a signature needs it.

A grant may end in a *prefix*: then it allows its verb on the keys that begin so, and says nothing of the bucket as a
whole. Every question has one form: may this identity do that to *everything whose name begins with N*? An object's key
is asked about as it is, a listing by its prefix, the bucket itself (its settings, its counters, a listing of all) as
"". So an edge that forgets to name a key asks for the whole bucket, and is denied. Names are compared character by
character, after the one decoding that gave them to the rest of the node. A name with a segment '.' or '..' is under no
prefix: to us it is a name like others, but proxies and servers behind a bucket may take it for a way out.

`create` allows to make buckets whose name fits, and everything on those that the identity made. Who made a bucket is a
setting of the bucket (`Bucket.owner`).

A key can be replaced without a break: the old one stays *retiring* for a while beside the new one. Where identities are
kept, and how secrets are sealed there, is `core/keyfile.py`.

Rejected: S3 bucket policies and ACLs (a language of their own; buckets behind us have theirs already); roles (one more
name to learn for what a pattern does); two secrets for one access key id while it is replaced (every request would be
verified twice, and logs could not tell who still uses the old one); listings cut to what a prefix allows (a page of
what others have would still be told by its holes and markers: S3's policies deny too); a prefix without a slash or `*`
at its end (`team-a` would be `team-ab/` too).

Invariants. (1) Two identities never share a name, an access key id or a token. (2) `decode_identities` reads back what
`encode_identities` wrote. (3) Neither secrets nor hashes of tokens are ever printed. (4) A table of no identities lets
nobody in: being open to all is the node's decision (`Auth.open`), not that of an empty table. (5) `parse_grants` reads
back what `format_grants` wrote. (6) No prefix grant ever answers for the whole bucket.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final, Literal, get_args
from urllib.parse import quote, unquote

import msgspec

from forebay.core.errors import Invalid
from forebay.core.machines.allowance import Limits
from forebay.core.types import check_key

Verb = Literal["read", "write", "admin", "observe", "create"]
VERBS: Final = get_args(Verb)
OIDC_NAMES: Final = "oidc:"  # how the names of those begin whom an issuer vouches for (`core/oidc.py`)
Reach = tuple[str, ...]  # where in a bucket something is allowed: what names may begin with
WHOLE: Final[Reach] = ("",)  # everywhere, and on the bucket itself
_PATTERN = re.compile(r"[a-z0-9.\-*]{1,63}")
_OF_KEYS: Final = ("read", "write", "admin")  # the verbs that a prefix goes with
_WAY_OUT = re.compile(r"(?:^|[/\\])\.\.?(?:[/\\]|\Z)")
_NO_FOLDER = re.compile(r"(?:^|/)(?:\.\.?)?/")  # an empty segment, '.' or '..'
_HALF_ENCODED = re.compile(r"%(?![0-9A-Fa-f]{2})")


def is_within(name: str, reach: Reach) -> bool:
    """Whether everything whose name begins with `name` lies within `reach`: an object's key, the prefix of a listing,
    or "" for all of a bucket and the bucket itself."""
    return reach is WHOLE or (name.startswith(reach) and ("." not in name or _WAY_OUT.search(name) is None))


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """`verb` is allowed on buckets whose name fits `pattern`; with a `prefix`, on the keys there that begin with it."""

    verb: Verb
    pattern: str
    prefix: str = ""

    def gives(self, verb: Verb, own: bool) -> bool:
        """Whether this grant allows `verb` on buckets that it is about. `own`: on one that its holder made."""
        return self.verb == verb or self.verb == "admin" or (self.verb == "create" and own)

    def fits(self, bucket: str) -> bool:
        """Whether the bucket is one of those that the grant is about: not of those that only nodes name, whose names
        begin with `-`, unless the pattern says so too."""
        if "*" not in self.pattern:
            return self.pattern == bucket
        if bucket.startswith("-") and not self.pattern.startswith("-"):
            return False
        return re.fullmatch(".*".join(re.escape(part) for part in self.pattern.split("*")), bucket) is not None


class Retiring(msgspec.Struct, frozen=True):
    """A key pair, a token or both that were replaced; they still prove who calls until `until_s` (Unix time)."""

    access_key_id: str
    secret_access_key: str
    token_sha256: str
    until_s: float

    def __repr__(self) -> str:
        return f"Retiring({self.access_key_id!r}, until_s={self.until_s:.0f})"


PEER_KEY_ID = "FOREBAYPEERNODES"  # of the identity as which the nodes of a cluster ask each other


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

    def reach(self, verb: Verb, bucket: str, owner: str = "") -> Reach:
        """Where in `bucket`, which `owner` made, any grant allows `verb`: `is_within` reads it. An empty bucket name
        (the node itself) needs pattern `*`."""
        own = self._owns(owner)
        given = [grant for grant in self.grants if grant.gives(verb, own) and grant.fits(bucket)]
        if any(not grant.prefix for grant in given):
            return WHOLE
        return tuple(dict.fromkeys(grant.prefix for grant in given))

    def may(self, verb: Verb, bucket: str, name: str = "", owner: str = "") -> bool:
        """Whether any grant allows `verb` on everything in `bucket` whose name begins with `name`."""
        return is_within(name, self.reach(verb, bucket, owner))

    def sees(self, bucket: str, owner: str = "", *, whole: bool = False) -> bool:
        """Whether the identity may know of `bucket` at all: some grant is about it; with `whole`, about all of it."""
        own = self._owns(owner)
        return any(
            grant.fits(bucket) and (own or grant.verb != "create") and not (whole and grant.prefix)
            for grant in self.grants
        )

    def _owns(self, owner: str) -> bool:
        return owner != "" and owner == self.name


ANYONE: Final = Identity("anyone", grants=(Grant("admin", "*"),))  # who calls a node without identities
ANONYMOUS: Final = Identity("anonymous")  # who calls a node with identities and proves none


def parse_grants(text: str) -> tuple[Grant, ...]:
    """Grants from `read:corpus,write:ckpt-*/team-a/`; `Invalid` says what is wrong with which part. In a prefix `%2C`
    is a comma, and so on; it ends in `/`, or in `*` if keys may go on in any way."""
    grants = []
    for part in text.split(","):
        verb, colon, where = part.strip().partition(":")
        pattern, slash, prefix = where.partition("/")
        if verb not in VERBS or not colon or not _PATTERN.fullmatch(pattern):
            raise Invalid(
                f"grant {part.strip()!r} is not <verb>:<bucket or pattern>[/<prefix>/], verb one of {', '.join(VERBS)}"
            )
        if slash and verb not in _OF_KEYS:
            raise Invalid(f"grant {part.strip()!r}: {verb} is about whole buckets, so leave the prefix out")
        grants.append(Grant(verb, pattern, _read_prefix(prefix, part.strip()) if slash else ""))  # type: ignore[arg-type]
    return tuple(grants)


def _read_prefix(text: str, grant: str) -> str:
    raw = text.removesuffix("*")
    try:
        prefix = unquote(raw, errors="strict")
    except UnicodeDecodeError:
        prefix = ""
    if _HALF_ENCODED.search(raw) or (raw and not prefix):
        raise Invalid(f"grant {grant!r}: its prefix is not percent-encoded UTF-8: write %25 for a percent sign")
    if not prefix:
        raise Invalid(f"grant {grant!r}: its prefix is empty: leave the slash out for the whole bucket")
    if "*" in raw:
        raise Invalid(f"grant {grant!r}: in a prefix, * stands at the end only: write %2A for a star in a key")
    if raw == text and not prefix.endswith("/"):
        raise Invalid(f"grant {grant!r}: end its prefix with / for a folder, or with * for all keys that begin so")
    if _NO_FOLDER.search(prefix):
        raise Invalid(f"grant {grant!r}: its prefix has an empty folder, or one called '.' or '..': name real ones")
    return check_key(prefix)


def format_grants(grants: Iterable[Grant]) -> str:
    """The text that `parse_grants` reads back."""
    return ",".join(f"{grant.verb}:{grant.pattern}{_format_prefix(grant.prefix)}" for grant in grants)


def _format_prefix(prefix: str) -> str:
    if not prefix:
        return ""
    shown = (char if char.isprintable() and char not in " %,*" else quote(char) for char in prefix)
    return "/" + "".join(shown) + ("" if prefix.endswith("/") else "*")


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
