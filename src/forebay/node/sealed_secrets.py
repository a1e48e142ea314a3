"""Sealing the secrets of an identities file: encrypted for a public key, opened with the private one.

Theory. An X25519 key pair belongs to the node. Sealing draws a fresh key pair, agrees on a secret with the node's
public key, derives a key from it (HKDF-SHA256 over both public keys) and encrypts with ChaCha20-Poly1305; the access
key id is authenticated along. That key is used once, so the nonce is zero. What is kept is the fresh public key and
the ciphertext, in base64.

The private key is a file of one line, `forebay-identity-key-1 <base64>`, wherever the administrator puts it: on another
disk, in memory (a secret of a container), or where systemd hands it to the service, having decrypted it with the
machine's TPM. `docs/security.md` has the recipes.

Rejected: the kernel's keyring (its content ends with the boot, so somebody must put it there from a file, and that file
might as well be read); talking to a TPM here (systemd-creds does it, and is maintained).

Invariants. (1) A private key is never written over, and never readable by others when it is written here. (2) What was
sealed for another access key id, or changed by one bit, does not open.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from forebay.core.errors import Exists, Invalid

KEY_BYTES = 32
_MARK = b"forebay-identity-key-1"
_INFO = b"forebay identity secret 1"
_NONCE = bytes(12)  # each key encrypts once


def seal(public: str, secret: str, key_id: str) -> str:
    """`secret`, to be opened only with the private key of `public` and for `key_id`. `Invalid` if it is no key."""
    recipient = _decode(public)
    fresh = X25519PrivateKey.generate()
    try:
        shared = fresh.exchange(X25519PublicKey.from_public_bytes(recipient))
    except ValueError as error:
        raise Invalid(f"sealed_for is not a public key ({error}): `forebay key seal` writes one") from None
    ours = fresh.public_key().public_bytes_raw()
    box = _cipher(shared, ours, recipient).encrypt(_NONCE, secret.encode(), key_id.encode())
    return base64.b64encode(ours + box).decode()


class Opener:
    """A private key."""

    def __init__(self, private: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)
        self._public = self._private.public_key().public_bytes_raw()

    @property
    def public(self) -> str:
        """What to seal for."""
        return base64.b64encode(self._public).decode()

    def open(self, sealed: str, key_id: str) -> str:
        """The secret. `Invalid` if it was sealed for another key or another access key id, or was changed."""
        raw = _decode(sealed, least=KEY_BYTES + 16)
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(raw[:KEY_BYTES]))
            box = _cipher(shared, raw[:KEY_BYTES], self._public)
            return box.decrypt(_NONCE, raw[KEY_BYTES:], key_id.encode()).decode()
        except (InvalidTag, ValueError):
            raise Invalid(
                f"the secret of {key_id} does not open with this identity key: give the one that it was sealed for "
                "(`sealed_for` in the identities file), or make the key anew"
            ) from None


def make_key(path: Path) -> Opener:
    """A new private key in the new file `path`, readable by its owner only. `Exists` if there is something."""
    private = X25519PrivateKey.generate().private_bytes_raw()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise Exists(f"{path} is there already: choose another name for a new key") from None
    with open(fd, "wb") as file:
        file.write(b"%b %b\n" % (_MARK, base64.b64encode(private)))
        file.flush()
        os.fsync(fd)
    return Opener(private)


def read_key(path: Path) -> Opener:
    """The private key in the file `path`. `Invalid` says what is wrong with it."""
    try:
        mark, _, text = path.read_bytes().strip().partition(b" ")
    except OSError as error:
        raise Invalid(f"the identity key {path} cannot be read ({error.strerror}): check --identity-key") from None
    if mark != _MARK:
        raise Invalid(f"{path} holds no identity key: `forebay key seal` makes one")
    raw = _decode(text.decode("latin-1"))
    if len(raw) != KEY_BYTES:
        raise Invalid(f"the identity key {path} is cut off or changed: restore it, or make new keys")
    return Opener(raw)


def _cipher(shared: bytes, ours: bytes, recipient: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(SHA256(), 32, None, _INFO + ours + recipient).derive(shared))


def _decode(text: str, least: int = 0) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or len(raw) < least:
        raise Invalid("a sealed secret or a key is cut off or changed: restore the file, or make the key anew")
    return raw
