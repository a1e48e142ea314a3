"""The identities file: what stands in it, and what makes it sound.

    {"sealed_for": "<public key>", "identities": [
      {"name": "trainer", "allow": "read:corpus,write:ckpt-*", "access_key_id": "FB…", "secret_sealed": "…",
       "token_sha256": "…", "limits": {"requests_per_s": 100, "bytes_per_s": "200MiB/s", "connections": 32},
       "retiring": [{"access_key_id": "FB…", "secret_sealed": "…", "until_s": 1790000000}]}]}

Theory. People read and write this file, so it is JSON and forgiving where it can be: a secret or a token may stand in
it as it is (`secret_access_key`, `token`), and then the file is as secret as they are. `forebay key` keeps of a token
only its hash. Of an S3 secret a hash is no use, since a signature cannot be verified with it; so it can be *sealed*:
encrypted for a public key that stands in the file. Writing takes nothing else, so keys are made and replaced where the
private key is not; reading takes the private key, which the node is given from outside the file system that holds the
file. A sealed secret is bound to its access key id: moved to another entry it does not open.

Rejected: one encrypted whole (nobody could see who may do what, and each change would need the private key); a key
derived from a pass phrase (somebody must type it at each start, or it lies beside the file).

Invariants. (1) What `parse` returns is sound: names, key ids and tokens are each somebody's alone, no key is half and
every grant can be read; the same of issuers and their rules. (2) `parse(render(file)) == file`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from forebay.core.access import Identities, Identity, Retiring, parse_grants
from forebay.core.errors import Invalid
from forebay.core.machines.allowance import Limited
from forebay.core.oidc import Issuer, check_issuers

Unseal = Callable[[str, str], str]  # (what is sealed, access key id) -> the secret; raises `Invalid`


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A key pair, a token or both. A secret stands in one of two ways."""

    access_key_id: str = ""
    secret_access_key: str = ""
    secret_sealed: str = ""
    token: str = ""
    token_sha256: str = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.access_key_id!r})"

    @property
    def token_hash(self) -> str:
        """SHA-256 of the token, lower-case hex; "" without a token."""
        return hashlib.sha256(self.token.encode()).hexdigest() if self.token else self.token_sha256.lower()


class Replaced(Proof, frozen=True):
    """A proof that ends at `until_s`, Unix time."""

    until_s: float


class Entry(Proof, frozen=True):
    """One identity. `allow` is what `parse_grants` reads."""

    name: str
    allow: str = ""
    disabled: bool = False
    limits: Limited | None = None
    retiring: tuple[Replaced, ...] = ()


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that stands in an identities file. `sealed_for` is the public key that new secrets are sealed for, or "";
    `oidc` are the issuers whose tokens let people in (`core/oidc.py`)."""

    identities: tuple[Entry, ...]
    sealed_for: str = ""
    oidc: tuple[Issuer, ...] = ()

    @property
    def is_sealed(self) -> bool:
        """Whether reading the secrets takes the private key."""
        return any(proof.secret_sealed for entry in self.identities for proof in (entry, *entry.retiring))


def parse(text: bytes) -> KeyFile:
    """The file, or `Invalid` saying what is wrong in it."""
    try:
        file = msgspec.json.decode(text, type=KeyFile)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise Invalid(f"the identities file does not fit: {error}") from None
    identities_of(file, lambda sealed, key_id: sealed)  # sound, but for what is sealed
    return file


def render(file: KeyFile) -> bytes:
    """The file as people read it."""
    body = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    assert parse(body) == file, "what is written can be read"
    return body


def identities_of(file: KeyFile, unseal: Unseal) -> list[Identity]:
    """The identities of the file; `Invalid` says which of them does not fit or cannot be unsealed."""
    identities = []
    for entry in file.identities:
        retiring = tuple(
            Retiring(old.access_key_id, _secret(entry.name, old, unseal), old.token_hash, old.until_s)
            for old in entry.retiring
        )
        secret = _secret(entry.name, entry, unseal)
        grants = parse_grants(entry.allow) if entry.allow else ()
        identities.append(
            Identity(
                entry.name,
                entry.access_key_id,
                secret,
                entry.token_hash,
                grants,
                retiring,
                entry.disabled,
                entry.limits.read() if entry.limits is not None else None,
            )
        )
    Identities(identities)
    check_issuers(file.oidc)
    return identities


def _secret(name: str, proof: Proof, unseal: Unseal) -> str:
    if proof.secret_access_key and proof.secret_sealed:
        raise Invalid(f"identity {name!r} has its secret twice: remove secret_access_key or secret_sealed")
    if bool(proof.access_key_id) != bool(proof.secret_access_key or proof.secret_sealed):
        raise Invalid(f"identity {name!r} has half a key: give access_key_id and secret_access_key, or neither")
    if not proof.access_key_id and not proof.token_hash:
        raise Invalid(f"identity {name!r} cannot prove itself: give it a key pair or a token")
    return unseal(proof.secret_sealed, proof.access_key_id) if proof.secret_sealed else proof.secret_access_key
