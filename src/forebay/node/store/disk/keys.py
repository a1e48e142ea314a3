"""From (bucket, key) to an LMDB key and back, in the order of listings.

Theory. LMDB sorts by bytes and allows 511 of them; S3 keys reach 1,024. `bucket NUL key` in UTF-8 sorts as listings
must (a bucket name has no NUL, and NUL is below every byte). Up to 510 bytes it *is* the index key. A longer one
becomes its first 495 bytes, the *stem*, and the xxh3-128 of the whole: 511 bytes, a length that no other entry has. Its
record carries the key, and a lookup compares it, so a forged collision is a miss and never a wrong answer.

Order. Entries that are longer than a stem and share one are a *group*. Groups follow one another in true order. Inside
a group hashes disturb the order, so a scan reads the whole group and keeps the smallest keys that still fit the page.

Rejected: several entries per long key (a lookup would take several gets); hashing every key (no listings); a table of
long keys (a second lookup for everyone, to please the few).

Invariants. (1) Different (bucket, key), different index keys (except 128-bit collisions). (2) Outside one group entries
sort as their bytes do.
"""

from __future__ import annotations

from xxhash import xxh3_128_digest

from forebay.core import limits

STEM_BYTES = limits.INDEX_KEY_BYTES_MAX - 16
WHOLE_BYTES_MAX = limits.INDEX_KEY_BYTES_MAX - 1  # so that 511 bytes always mean a hash


def index_key(bucket: str, key: str) -> bytes:
    """The LMDB key of an object. `key` has been checked (`core.types.check_key`)."""
    raw = f"{bucket}\0{key}".encode()
    return raw if len(raw) <= WHOLE_BYTES_MAX else raw[:STEM_BYTES] + xxh3_128_digest(raw)


def is_hashed(entry: bytes) -> bool:
    """Whether the entry holds a stem and a hash, so that the key must come from the record."""
    return len(entry) > WHOLE_BYTES_MAX


def record_key(bucket: str, key: str) -> str:
    """The value for `Record.key`: the key if its entry is hashed, else empty."""
    raw_bytes = len(bucket) + 1 + len(key.encode())
    return key if raw_bytes > WHOLE_BYTES_MAX else ""


def long_key(entry: bytes, key: str) -> str:
    """As `record_key`, when the entry is known."""
    return key if len(entry) > WHOLE_BYTES_MAX else ""


def split(entry: bytes, long_key: str = "") -> tuple[str, str]:
    """Bucket and key of an entry; `long_key` is its record's `key`."""
    bucket, _, key = entry.partition(b"\0")
    return bucket.decode(), long_key if is_hashed(entry) else key.decode()
