"""How a client sends a checksum: in `x-amz-checksum-<name>` before the body, or in the trailer behind it.

Theory. Names (`CRC32C`) and form are S3's everywhere here; the algorithms are `core/s3rules/checksums.py`.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from forebay.core.errors import Invalid
from forebay.core.s3rules.checksums import ALGORITHMS, DIGEST_BYTES

HEADERS: Final = {name: f"x-amz-checksum-{name.lower()}" for name in ALGORITHMS}  # algorithm to header
ALGORITHM_OF: Final = {header: name for name, header in HEADERS.items()}


def check_algorithm(name: str) -> str:
    """`name` in S3's spelling, or `Invalid`."""
    if name.upper() not in ALGORITHMS:
        raise Invalid(
            f"Checksum algorithm provided is unsupported. Please try again with any of the valid types: "
            f"[{', '.join(ALGORITHMS)}]",
            code="InvalidRequest",
        )
    return name.upper()


def check_value(algorithm: str, value: str) -> str:
    """`value` in its one spelling if it can be a checksum of that kind, else `Invalid` (`BadDigest`: what no checksum
    can be matches no body)."""
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != DIGEST_BYTES[algorithm]:
        raise Invalid(
            f"Value for {HEADERS[algorithm]} header is invalid: it is base64 of {DIGEST_BYTES[algorithm]} bytes",
            code="BadDigest",
        )
    return base64.b64encode(raw).decode()


def content_md5(value: bytes) -> str:
    """The MD5, hex, that a Content-MD5 header says; `Invalid` (`InvalidDigest`)."""
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 16:
        raise Invalid("The Content-MD5 you specified was invalid: it is base64 of 16 bytes", code="InvalidDigest")
    return raw.hex()


def mismatch(algorithm: str) -> Invalid:
    """What to say when the bytes that came have another checksum than was promised."""
    what = "Content-MD5" if algorithm == "MD5" else algorithm
    return Invalid(f"The {what} you specified did not match what we received: send it again", code="BadDigest")
