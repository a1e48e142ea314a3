"""Checks an arriving body against what its signer said of it (`x-amz-content-sha256`).

Theory. There are four ways: the SHA-256 of the whole body; UNSIGNED; aws-chunked with each chunk signed (CHUNKS),
perhaps with a signed trailer (CHUNKS_TRAILER); aws-chunked with an unsigned trailer of checksums (UNSIGNED_TRAILER).
Signatures of chunks form a chain that starts from the request's. So no chunk can be moved, repeated, left out or taken
from another request. The last chunk is signed too, so a missing end is noticed.

    payload = verified.payload                      from sigv4.Verifier.verify(..., body=None), before the body
    if signs_sha256(payload): ... check_payload_sha256(payload, hexdigest)
    if payload in (CHUNKS, CHUNKS_TRAILER): chunks = ChunkVerifier(verified); chunks.check(...) for each

Rejected: Signature Version 4a (elliptic curves, for keys that are valid in several regions; there is one here).

Invariants. (1) Signatures are compared in constant time. (2) A form that cannot be checked is refused before the body.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from forebay.core.errors import Denied, Invalid

if TYPE_CHECKING:
    from forebay.core.s3rules.sigv4 import Verified

UNSIGNED: Final = b"UNSIGNED-PAYLOAD"
CHUNKS: Final = b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD"  # aws-chunked, each chunk signed
CHUNKS_TRAILER: Final = b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"  # and a signed trailer behind them
UNSIGNED_TRAILER: Final = b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"  # aws-chunked, nothing signed, a trailer behind
EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest().encode()
_FORMS = frozenset((UNSIGNED, CHUNKS, CHUNKS_TRAILER, UNSIGNED_TRAILER))
_SHA256 = re.compile(rb"[0-9a-f]{64}").fullmatch


def mismatch() -> Denied:
    return Denied(
        "The request signature we calculated does not match the signature you provided: check the secret key and the "
        "signing method, and that no proxy rewrites the request",
        code="SignatureDoesNotMatch",
    )


def check_payload_form(payload: bytes) -> None:
    """`Invalid` if `payload`, the signer's word about the body, is no form that can be checked here."""
    if payload in _FORMS or _SHA256(payload):
        return
    raise Invalid(
        "x-amz-content-sha256 must be UNSIGNED-PAYLOAD, STREAMING-UNSIGNED-PAYLOAD-TRAILER, "
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD, that with -TRAILER, or the SHA-256 of the body in hex",
        code="InvalidArgument",
    )


def signs_sha256(payload: bytes) -> bool:
    """Whether the signer gave the SHA-256 of the whole body, which must then be compared."""
    return payload not in _FORMS


def check_payload_sha256(payload: bytes, sha256_hex: str) -> None:
    """`Invalid` if `payload` is the SHA-256 of another body."""
    if payload not in _FORMS and sha256_hex.encode() != payload:
        raise Invalid(
            "The provided 'x-amz-content-sha256' header does not match what was computed: the body changed on its way",
            code="XAmzContentSHA256Mismatch",
        )


def check_payload(payload: bytes, body: bytes) -> None:
    """`Invalid` if `payload`, the signer's word about the body, is not a known form or does not fit `body`."""
    if payload == EMPTY_SHA256 and not body:
        return
    check_payload_form(payload)
    if signs_sha256(payload):
        check_payload_sha256(payload, hashlib.sha256(body).hexdigest())


class ChunkVerifier:
    """The signatures inside one aws-chunked body (CHUNKS or CHUNKS_TRAILER), in the order in which they arrive.

    Call `check` for every chunk, the last and empty one too, and then `check_trailer` if there is one. After a `Denied`
    the body is not to be used, and nothing more is to be checked.
    """

    def __init__(self, verified: Verified) -> None:
        self._key = verified.key
        self._about = b"\n%b\n%b\n" % (verified.stamp, verified.scope)
        self._before = verified.signature

    def check(self, sha256_hex: str, signature: bytes) -> None:
        """`Denied` (SignatureDoesNotMatch) if the next chunk, whose bytes have this SHA-256, was not signed so."""
        self._check(b"AWS4-HMAC-SHA256-PAYLOAD", b"%b\n%b" % (EMPTY_SHA256, sha256_hex.encode()), signature)

    def check_trailer(self, fields: Iterable[tuple[bytes, bytes]], signature: bytes) -> None:
        """`Denied` if the trailer's fields but `x-amz-trailer-signature`, as they arrived, were not signed so."""
        lines = b"".join(sorted(name.lower().strip() + b":" + value.strip() + b"\n" for name, value in fields))
        self._check(b"AWS4-HMAC-SHA256-TRAILER", hashlib.sha256(lines).hexdigest().encode(), signature)

    def _check(self, algorithm: bytes, what: bytes, signature: bytes) -> None:
        to_sign = b"%b%b%b\n%b" % (algorithm, self._about, self._before, what)
        expected = hmac.digest(self._key, to_sign, "sha256").hex().encode()
        if not hmac.compare_digest(expected, signature):
            raise mismatch()
        self._before = expected
