"""Tokens of OIDC issuers (JWT): whom each lets in, verified with the keys that the engine fetched.

Theory. What a token says is looked at in the order of what it costs: its length, its form, its issuer, its algorithm,
its time, its key. Only then its signature is verified (PyJWT, 40 to 200 µs), and with that its claims. One that held is
remembered by its hash until it ends, so it costs a hash for each further request.

The algorithm is one that the issuer's entry allows and that the key is for, never what the token would like: none of
them is `none` or an HMAC. The key is one of the issuer's own, found by its id; what else a token's head says of keys is
not read. A head with extensions that must be understood (`crit`) is refused, and one of another kind of token (`typ`).

A key that is not known may be a new one. Then the engine is asked to look, and the answer is 503 until it has looked;
after that such a key is unknown for `AGAIN_S`. So tokens with invented keys cost an issuer one look in a while.

Rejected: verifying in a thread (a signature takes as long as handing it over); remembering tokens that failed (there is
no end of different ones); waiting for the issuer while a request is open.

Invariants. (1) Nothing but `Denied` and `Unavailable` is raised, whatever the token. (2) Nobody is let in after the
token's `exp`, but for `LEEWAY_S`. (3) At most `KNOWN_MAX` tokens are remembered, all of them verified, none in clear.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from forebay.core import limits
from forebay.core.access import Identity
from forebay.core.errors import Denied, ForebayError, Unavailable
from forebay.core.messages.calls import IssuerNamed
from forebay.core.oidc import LEEWAY_S, SUBJECT_MAX, Issuer, IssuerKeys, Jwk, Trusted

AGAIN_S: Final = 5.0  # how long a key that the issuer did not have stays unknown
KNOWN_MAX: Final = 4096
_TIME_MAX: Final = 1e11  # Unix time of the year 5138
_TYPES: Final = ("", "jwt", "at+jwt", "application/at+jwt")
_ODD: Final = (
    ValueError,
    TypeError,
    ArithmeticError,
    RecursionError,
    AttributeError,
)  # of what is signed, and nonsense

Ask = Callable[[str, IssuerNamed, Callable[[Any], None]], bool]  # Link.begin


class Holder(NamedTuple):
    """Whom a token is about. `rules` are the marks of those that fit, `until_s` is Unix time."""

    issuer: Issuer
    subject: str
    rules: tuple[bytes, ...]
    until_s: float
    identity: Identity


class WebTokens:
    """Verifies tokens of these issuers. `ask` asks the engine to look for new keys."""

    def __init__(self, trusted: Trusted | None = None, ask: Ask | None = None) -> None:
        self._issuers = {one.issuer.issuer: one for one in trusted.issuers} if trusted is not None else {}
        if self._issuers:
            import jwt  # noqa: F401  - 50 to 150 ms, which no request shall wait for; and few nodes need it
        self._ask = ask
        self._known: dict[bytes, Holder] = {}
        self._keys: dict[tuple[str, str], Any] = {}  # issuer and key id to a key that verifies
        self._looked_s: dict[str, float] = {}  # issuer to when its keys were last looked at for us; inf: under way

    @property
    def trusts_any(self) -> bool:
        """Whether any issuer is trusted."""
        return bool(self._issuers)

    def holder(self, token: bytes, now_s: float) -> Holder:
        """Who holds `token`. `Denied` with the reason if nobody whom an issuer vouches for, `Unavailable` if that is
        not known yet. The error's code is that of STS."""
        digest = hashlib.sha256(token).digest()
        found = self._known.get(digest)
        if found is None:
            found = self._verify(token, now_s)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[digest] = found
        if now_s > found.until_s + LEEWAY_S:
            raise expired()
        return found

    def _verify(self, token: bytes, now_s: float) -> Holder:
        if not self._issuers:
            raise _refused("this node trusts no issuer: put one into the identities file")
        if len(token) > limits.JWT_BYTES_MAX:
            raise _refused(f"it is longer than {limits.JWT_BYTES_MAX} bytes: have the issuer put less into it")
        head, claims = _parts(token)
        if "crit" in head or str(head.get("typ", "")).lower() not in _TYPES:
            raise _refused("it is of a kind that is not known here: send an access token or a service account's token")
        url = claims.get("iss")
        known = self._issuers.get(url) if isinstance(url, str) else None
        if known is None:
            raise _refused("no issuer that is trusted here made it: look at its 'iss' and the identities file")
        algorithm = head.get("alg")
        if not isinstance(algorithm, str) or algorithm not in known.issuer.algorithms:
            raise _refused("its algorithm is not allowed for its issuer")
        if now_s > _time(claims, "exp") + LEEWAY_S:
            raise expired()
        key = self._key(known, head.get("kid", ""), algorithm, now_s)
        return _holder(known.issuer, _checked(token, key, algorithm, known.issuer, now_s))

    def _key(self, known: IssuerKeys, kid: object, algorithm: str, now_s: float) -> Any:
        """The issuer's key of that id, as PyJWT takes it."""
        if not isinstance(kid, str):
            raise _refused("its key id is no text")
        found = self._keys.get((known.issuer.issuer, kid))
        if found is None:
            fitting = [key for key in known.keys if key["kid"] == kid] if kid else list(known.keys)
            if len(fitting) != 1:
                raise self._unknown_key(known, now_s)
            found = self._keys[known.issuer.issuer, kid] = _made(fitting[0])
        if found is None or found[0] not in ("", algorithm):
            raise _refused("its key is not for its algorithm")
        return found[1]

    def _unknown_key(self, known: IssuerKeys, now_s: float) -> ForebayError:
        name = known.issuer.name
        looked_s = self._looked_s.get(name, float("-inf"))
        if looked_s != float("inf") and abs(now_s - looked_s) < AGAIN_S and known.keys:
            return _refused(f"the issuer {name} has no such key: get a new token")
        if looked_s != float("inf") and abs(now_s - looked_s) >= AGAIN_S and self._ask is not None:

            def answered(_: object) -> None:
                self._looked_s[name] = now_s

            if self._ask("issuer_keys", IssuerNamed(name), answered):
                self._looked_s[name] = float("inf")
        return Unavailable(
            f"the key of this token is not known yet, and the issuer {name} is asked for it: try again in a moment",
            code="IDPCommunicationError",
            retry_after_s=1.0,
        )


def _parts(token: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Head and claims, which nobody has verified."""
    pieces = token.split(b".")
    try:
        if len(pieces) != 3:
            raise ValueError
        head, claims = (json.loads(base64.urlsafe_b64decode(piece + b"=" * (-len(piece) % 4))) for piece in pieces[:2])
    except (binascii.Error, *_ODD):
        head = claims = None
    if not isinstance(head, dict) or not isinstance(claims, dict):
        raise _refused("it is no JWT: send what the issuer gave, unchanged")
    return head, claims


def _made(key: Jwk) -> tuple[str, Any] | None:
    """The algorithm that a key is for ("": any of its kind), and the key; None if it is none."""
    import jwt

    try:
        return key.get("alg", ""), jwt.PyJWK(dict(key)).key
    except (jwt.PyJWTError, *_ODD):
        return None


def _checked(token: bytes, key: Any, algorithm: str, issuer: Issuer, now_s: float) -> dict[str, Any]:
    """The claims of a token whose signature, issuer, audience and times are right."""
    import jwt

    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=issuer.audience,
            issuer=issuer.issuer,
            options={
                "require": ["exp", "iss", "aud", "sub"], "verify_exp": False, "verify_nbf": False, "verify_iat": False,
            },
        )  # fmt: skip
    except jwt.InvalidAudienceError:
        raise _refused(f"it was made for others: its 'aud' is not {issuer.audience!r}") from None
    except jwt.MissingRequiredClaimError as error:
        raise _refused(f"it has no claim {error.claim!r}") from None
    except (jwt.PyJWTError, *_ODD):
        raise _refused("its signature is not its issuer's, or what it says makes no sense") from None
    for name in ("nbf", "iat"):
        if name in claims and _time(claims, name) > now_s + LEEWAY_S:
            raise _refused("it is not valid yet: set the clocks right")
    return claims


def _time(claims: dict[str, Any], name: str) -> float:
    """Unix time. The claims may be anybody's."""
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _TIME_MAX:
        raise _refused(f"its {name!r} is no time in seconds")
    return float(value)


def _holder(issuer: Issuer, claims: dict[str, Any]) -> Holder:
    subject = claims["sub"]
    if not isinstance(subject, str) or not 0 < len(subject) <= SUBJECT_MAX or not subject.isprintable():
        raise _refused(f"its subject is not a printable text of at most {SUBJECT_MAX} characters")
    if issuer.has_ended(subject, _time(claims, "iat") if "iat" in claims else 0.0):
        raise _refused("it was ended before its time: get a new one from its issuer")
    rules = tuple(rule.mark for rule in issuer.rules if rule.fits(claims))
    until_s = _time(claims, "exp")
    return Holder(issuer, subject, rules, until_s, issuer.identity(subject, rules, until_s))


def _refused(why: str) -> Denied:
    return Denied(f"the token lets nobody in here: {why}", code="InvalidIdentityToken")


def expired() -> Denied:
    """What is said to whoever comes too late."""
    return Denied("the token has expired: get a new one from its issuer", code="ExpiredTokenException")
