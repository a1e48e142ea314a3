"""The algorithms of S3's checksums, by S3's names for them.

Theory. A checksum is the base64 of its big-endian bytes. CRC32C and CRC64NVME are awscrt's. It is loaded when one of
them is first needed, since that takes 50 ms: each process of a node would start so much later, and few bodies have
these checksums.

Measured, one core, 1 MiB at a time: CRC64NVME and CRC32C 50 GB/s (awscrt), XXH3 20-40, CRC32 4.8 (zlib; awscrt has
2.8), SHA-1 1.8, SHA-256 1.3, MD5 0.7. So only requested checksums are computed.

Invariant. `Checksum` knows each of ALGORITHMS, and its digest has DIGEST_BYTES of it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, Final

import xxhash

_HASHES: Final[dict[str, Callable[[], Any]]] = {
    "SHA1": functools.partial(hashlib.sha1, usedforsecurity=False),
    "SHA256": hashlib.sha256,
    "SHA512": hashlib.sha512,
    "MD5": functools.partial(hashlib.md5, usedforsecurity=False),
    "XXHASH64": xxhash.xxh64,
    "XXHASH3": xxhash.xxh3_64,
    "XXHASH128": xxhash.xxh3_128,
}
CRC_BYTES: Final = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8}
DIGEST_BYTES: Final = CRC_BYTES | {name: int(new().digest_size) for name, new in _HASHES.items()}
ALGORITHMS: Final = tuple(DIGEST_BYTES)


class Checksum:
    """One checksum of bytes that come in pieces."""

    __slots__ = ("_crc", "_hash", "_value", "algorithm")

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._value = 0
        self._crc = _crc(algorithm) if algorithm in CRC_BYTES else None
        self._hash: Any = None if self._crc else _HASHES[algorithm]()

    def update(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        if self._crc is not None:
            self._value = self._crc(data, self._value)
        else:
            self._hash.update(data)

    def digest(self) -> bytes:
        """The checksum so far."""
        if self._crc is not None:
            return self._value.to_bytes(CRC_BYTES[self.algorithm], "big")
        digest: bytes = self._hash.digest()
        return digest

    def base64(self) -> str:
        """The same as S3 says it."""
        return base64.b64encode(self.digest()).decode()


def joined(algorithm: str, values: list[tuple[bytes, int]]) -> bytes:
    """The checksum of bytes that follow each other, from that of each and its number of bytes. One of CRC_BYTES."""
    from awscrt import checksums

    combine: Callable[[int, int, int], int] = {
        "CRC32": checksums.combine_crc32,
        "CRC32C": checksums.combine_crc32c,
        "CRC64NVME": checksums.combine_crc64nvme,
    }[algorithm]
    value = 0
    for digest, size_bytes in values:
        value = combine(value, int.from_bytes(digest, "big"), size_bytes)
    return value.to_bytes(CRC_BYTES[algorithm], "big")


def _crc(algorithm: str) -> Callable[[bytes | memoryview, int], int]:
    if algorithm == "CRC32":
        return zlib.crc32
    from awscrt import checksums

    found: Callable[[bytes | memoryview, int], int] = checksums.crc32c if algorithm == "CRC32C" else checksums.crc64nvme
    return found
