"""Who a token of an OIDC issuer is here, and what it may: issuers, and rules from claims to grants.

    "oidc": [{"name": "corp", "issuer": "https://login.corp", "audience": "forebay", "rules": [
      {"claim": "groups", "value": "team-a", "allow": "read:team-a,write:team-a"},
      {"claim": "sub", "value": "system:serviceaccount:team-b:*", "allow": "read:team-b"}]}]

Theory. This table stands in the identities file (`core/keyfile.py`). The issuer says who somebody is and signs it, and
the rules say what that is worth here. A rule fits a token if the claim is the value, or a list that has it; a final `*`
in the value stands for anything. `scope` is a list of words. All rules that fit count. A token that no rule fits lets
nobody in.

Whoever comes so is called `oidc:NAME:SUBJECT`, and no identity of the file may begin so: jobs and hints belong to
names.

What leaked is *ended* before its time: one pair of temporary keys by its access key id, or all that a person has by
when it was made. The issuer's entry lists that. What the person gets afterwards is worth something again.

The engine fetches the issuers' public keys and hands them to the fronts, which verify (`node/front/http/tokens.py`).

Rejected: a rule without a claim (of many issuers everybody gets tokens: say `"claim": "sub", "value": "*"`);
expressions over claims (a language to learn, and to be wrong in); keys from the token itself (`jku`, `x5u`, `jwk`).

Invariants. (1) Only signatures with private keys are accepted: no `none`, and no HMAC, whose key would be public. (2) A
rule's `mark` changes with what it asks for and not with what it allows. (3) Of a key set only public numbers are kept.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from forebay.core import limits
from forebay.core.access import OIDC_NAMES, Grant, Identity, parse_grants
from forebay.core.errors import Denied, Invalid, Unavailable
from forebay.core.machines.allowance import Limited, loosest

ALGORITHMS: Final = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
SESSION_S_MIN: Final = 900  # as AWS has it: from a quarter of an hour to twelve hours
SESSION_S_DEFAULT: Final = 3600
SESSION_S_MAX: Final = 43_200
SUBJECT_MAX: Final = 255  # characters; OpenID Connect Core 2
NAME_MAX: Final = 32
KEYS_MAX: Final = 100  # of one issuer; they have two or three
KEY_ID_MAX: Final = 256
RULES_MAX: Final = 256  # of one issuer: all of them fit a session token
ENDED_MAX: Final = 1_000  # of one issuer: a front looks through them when it sees a token for the first time
LEEWAY_S: Final = 30.0  # by which clocks may differ
_RSA_CHARACTERS: Final = range(342, 1367)  # the modulus in base64url: 2,048 to 8,192 bits
_NUMBERS: Final = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
_NUMBER_CHARACTERS_MAX: Final = {"n": _RSA_CHARACTERS.stop - 1, "e": 6, "crv": 16, "x": 100, "y": 100}

Jwk = dict[str, str]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Tokens whose `claim` has `value` may what `allow` says (as `parse_grants` reads it), each person within
    `limits`."""

    claim: str
    value: str
    allow: str
    limits: Limited | None = None

    @property
    def mark(self) -> bytes:
        """What stands for this rule in a session token."""
        return hashlib.sha256(f"{self.claim}\0{self.value}".encode()).digest()[:8]

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Whether the claims of a verified token have what this rule asks for."""
        return any(
            said.startswith(self.value[:-1]) if self.value.endswith("*") else said == self.value
            for said in _said(claims, self.claim)
        )


def _said(claims: Mapping[str, Any], name: str) -> list[str]:
    value = claims.get(name)
    if isinstance(value, str):
        return value.split() if name == "scope" else [value]
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What was ended at `at_s` (Unix time): the temporary keys with this id, or what `subject` had until then."""

    at_s: float
    access_key_id: str = ""
    subject: str = ""

    def holds(self, subject: str, made_s: float, key_id: str) -> bool:
        """Whether it ends what `subject` got at `made_s`. A clock may be `LEEWAY_S` ahead."""
        if self.access_key_id:
            return self.access_key_id == key_id
        return self.subject == subject and made_s <= self.at_s + LEEWAY_S

    def is_past(self, now_s: float) -> bool:
        """Whether the keys would have ended by themselves. Nobody knows that of tokens."""
        return bool(self.access_key_id) and now_s > self.at_s + SESSION_S_MAX


class Issuer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One issuer. `issuer` is its URL as tokens name it, `audience` what tokens for this node say in `aud`,
    `session_s_max` bounds temporary keys, `ca` is a PEM file with the authorities that vouch for it (else the
    machine's), `ended` is what is worth nothing although it did not expire."""

    name: str
    issuer: str
    audience: str
    rules: tuple[Rule, ...]
    algorithms: tuple[str, ...] = ALGORITHMS
    session_s_max: int = SESSION_S_DEFAULT
    ca: str = ""
    ended: tuple[Ended, ...] = ()

    @property
    def mark(self) -> bytes:
        """What stands for this issuer in a session token."""
        return hashlib.sha256(f"{self.name}\0{self.issuer}\0{self.audience}".encode()).digest()[:16]

    def has_ended(self, subject: str, made_s: float, key_id: str = "") -> bool:
        """Whether what `subject` got at `made_s` was ended: a token, or the temporary keys with this id."""
        return any(one.holds(subject, made_s, key_id) for one in self.ended)

    def identity(self, subject: str, marks: Iterable[bytes], until_s: float) -> Identity:
        """Who `subject` is until then: what the rules with these marks allow now. `Denied` if there are none."""
        wanted = set(marks)
        grants: dict[Grant, None] = {}
        rules = [rule for rule in self.rules if rule.mark in wanted]
        for rule in rules:
            grants |= dict.fromkeys(parse_grants(rule.allow))
        if not grants:
            raise Denied(
                f"the issuer {self.name} vouches for {subject!r}, but no rule lets them do anything here: have a rule "
                "for one of its claims put into the identities file, or ask the issuer for that claim",
                code="AccessDenied",
            )
        bounds = loosest(rule.limits.read() for rule in rules if rule.limits is not None)
        name = f"{OIDC_NAMES}{self.name}:{subject}"
        return Identity(name, grants=tuple(grants), limits=bounds, until_s=until_s)


class IssuerKeys(msgspec.Struct, array_like=True, frozen=True):
    """An issuer and its public keys; none if it has not been heard for too long."""

    issuer: Issuer
    keys: tuple[Jwk, ...]


class Trusted(msgspec.Struct, array_like=True, frozen=True):
    """What fronts need to know people by an issuer's word. `secret` makes session tokens."""

    secret: bytes
    issuers: tuple[IssuerKeys, ...]

    def __repr__(self) -> str:
        return f"Trusted({self.issuers!r})"


encode_trusted = msgspec.msgpack.Encoder().encode
decode_trusted = msgspec.msgpack.Decoder(Trusted).decode


def check_issuers(issuers: Iterable[Issuer]) -> None:
    """`Invalid` says what is wrong in the table of issuers."""
    names: set[str] = set()
    urls: set[str] = set()
    for issuer in issuers:
        what = f"the issuer {issuer.name!r}"
        if not issuer.name.replace("-", "").isalnum() or not issuer.name.isascii() or len(issuer.name) > NAME_MAX:
            raise Invalid(f"{what} needs a name of letters, digits and '-', at most {NAME_MAX}: it is part of names")
        if issuer.name in names or issuer.issuer in urls:
            raise Invalid(f"{what} or its URL is there twice: give each issuer one entry")
        names.add(issuer.name)
        urls.add(issuer.issuer)
        if not _is_url(issuer.issuer, issuer.issuer):
            raise Invalid(f"{what} has the URL {issuer.issuer!r}: give https://HOST[/PATH] (http:// only on loopback)")
        if not issuer.audience:
            raise Invalid(f"{what} needs an audience: else tokens that were made for others would let people in here")
        for algorithm in issuer.algorithms or ("",):
            if algorithm not in ALGORITHMS:
                raise Invalid(f"{what} has the algorithm {algorithm!r}: choose of {', '.join(ALGORITHMS)}")
        if not SESSION_S_MIN <= issuer.session_s_max <= SESSION_S_MAX:
            raise Invalid(f"{what}: session_s_max is outside {SESSION_S_MIN} to {SESSION_S_MAX} seconds")
        if not issuer.rules:
            raise Invalid(f"{what} has no rules, so its tokens let nobody in: add one, or take the issuer out")
        if len(issuer.rules) > RULES_MAX:
            raise Invalid(f"{what} has more than {RULES_MAX} rules: put some together with '*'")
        if len(issuer.ended) > ENDED_MAX:
            raise Invalid(f"{what} has more than {ENDED_MAX} ended tokens: take the oldest out of `ended`")
        if any(bool(one.access_key_id) == bool(one.subject) for one in issuer.ended):
            raise Invalid(f"what is `ended` of {what} has an access_key_id or a subject: give one of them")
        for rule in issuer.rules:
            if not rule.claim or not rule.value:
                raise Invalid(f'a rule of {what} needs a claim and a value ("*" for any): name both')
            parse_grants(rule.allow)
            if rule.limits is not None:
                rule.limits.read()


def _is_url(url: str, issuer: str) -> bool:
    """Whether an issuer may be at `url`, or have its keys there: https, or where the issuer on loopback itself is."""
    try:
        parts, own = urlsplit(url), urlsplit(issuer)
        _ = parts.port
    except ValueError:
        return False
    if not parts.hostname or parts.username is not None or parts.fragment or not url.isascii() or not url.isprintable():
        return False
    if parts.scheme == "https":
        return url != issuer or not parts.query
    return parts.scheme == "http" and is_loopback_name(parts.hostname) and parts.netloc == own.netloc


def is_loopback_name(host: str) -> bool:
    """Whether a host in a URL can only be this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def discovery_url(issuer: Issuer) -> str:
    """Where an issuer describes itself (OpenID Connect Discovery 4)."""
    return issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"


def keys_url(issuer: Issuer, body: bytes) -> str:
    """Where the issuer's keys are, as its description says. `Unavailable` if that is not one that can be followed."""
    found = _document(body, "description")
    if found.get("issuer") != issuer.issuer:
        raise Unavailable(
            f"it calls itself {str(found.get('issuer'))[:100]!r}: correct `issuer` in the identities file"
        )
    url = found.get("jwks_uri")
    if not isinstance(url, str) or not _is_url(url, issuer.issuer):
        raise Unavailable(f"its keys are said to be at {str(url)[:100]!r}, which is not https: have that corrected")
    return url


def read_keys(body: bytes) -> tuple[Jwk, ...]:
    """The signing keys in a key set (RFC 7517): public numbers alone, weak and odd ones left out. `Unavailable` for
    what is no key set."""
    found = _document(body, "key set").get("keys")
    if not isinstance(found, list) or len(found) > KEYS_MAX:
        raise Unavailable(f"its key set is no list of at most {KEYS_MAX} keys: have that corrected")
    return tuple(key for one in found if isinstance(one, dict) and (key := _public(one)))


def _public(key: dict[str, Any]) -> Jwk:
    kind, kid, use = key.get("kty"), key.get("kid", ""), key.get("use", "sig")
    names = _NUMBERS.get(kind, ()) if isinstance(kind, str) else ()
    if not names or use != "sig" or not isinstance(kid, str) or len(kid) > KEY_ID_MAX:
        return {}
    kept = {"kty": str(kind), "kid": kid}
    for name in names:
        number = key.get(name)
        if not isinstance(number, str) or not 0 < len(number) <= _NUMBER_CHARACTERS_MAX[name]:
            return {}
        kept[name] = number
    if kind == "RSA" and len(kept["n"]) not in _RSA_CHARACTERS:
        return {}
    if "alg" in key:
        if key["alg"] not in ALGORITHMS:
            return {}
        kept["alg"] = key["alg"]
    return kept


def _document(body: bytes, what: str) -> dict[str, Any]:
    if len(body) > limits.ISSUER_ANSWER_BYTES_MAX:
        raise Unavailable(f"its {what} has more than {limits.ISSUER_ANSWER_BYTES_MAX} bytes: is this the issuer?")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"its {what} is no JSON object: is this the issuer?")
    return found
