"""Makes tokens as issuers do, and as those who would like to be one."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from forebay.core.oidc import Issuer, IssuerKeys, Rule, Trusted, read_keys

URL, AUDIENCE, SECRET = "https://login.example", "forebay", b"s" * 32
RSA_KEY = rsa.generate_private_key(65_537, 2048)
OTHER_KEY = rsa.generate_private_key(65_537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
RULES = (
    Rule(claim="groups", value="team-a", allow="read:team-a,write:team-a"),
    Rule(claim="sub", value="robot:*", allow="read:robots"),
    Rule(claim="scope", value="watch", allow="observe:*"),
)


def public_jwk(key: Any, kid: str, **more: str) -> dict[str, Any]:
    """The public half, as an issuer publishes it."""
    by = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    algorithm: Any = next((one for kind, one in by.items() if isinstance(key, kind)), OKPAlgorithm)
    found: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return {**found, "kid": kid, "use": "sig", **more}


def pem_of(key: Any) -> bytes:
    """The public half as text, which somebody may take for an HMAC's secret."""
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


KEY_SET = {
    "keys": [
        public_jwk(RSA_KEY, "rsa", alg="RS256"),
        public_jwk(EC_KEY, "ec"),
        public_jwk(ED_KEY, "ed", alg="EdDSA"),
    ]
}


def issuer(**changed: Any) -> Issuer:
    """The issuer that signs with the keys here."""
    return Issuer(**{"name": "corp", "issuer": URL, "audience": AUDIENCE, "rules": RULES, **changed})


def trusted(*issuers: Issuer, keys: Any = KEY_SET) -> Trusted:
    """What the engine tells fronts of it."""
    known = read_keys(json.dumps(keys).encode())
    return Trusted(SECRET, tuple(IssuerKeys(one, known) for one in issuers or (issuer(),)))


def token(key: Any = RSA_KEY, algorithm: str = "RS256", kid: str | None = "rsa", **claims: Any) -> bytes:
    """A token of `ann` for an hour; a claim of None is left out, `head` adds to its head."""
    head = {**({} if kid is None else {"kid": kid}), **claims.pop("head", {})}
    now_s = int(time.time())
    said = {"iss": URL, "aud": AUDIENCE, "sub": "ann", "groups": ["team-a"], "iat": now_s, "exp": now_s + 3600}
    said = {name: value for name, value in {**said, **claims}.items() if value is not None}
    return jwt.encode(said, key, algorithm, headers=head).encode()


def by_hand(head: Any, claims: Any, signature: bytes = b"") -> bytes:
    """A token that no library makes."""
    return b".".join(
        base64.urlsafe_b64encode(part if isinstance(part, bytes) else json.dumps(part).encode()).rstrip(b"=")
        for part in (head, claims, signature)
    )
