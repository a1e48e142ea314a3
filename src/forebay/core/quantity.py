"""Sizes and rates as people write them: `24GiB`, `500 MB`, `3GB/s`.

Theory. KB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB, and the short K, M, G and T, of 1024, as `dd` and
systemd have them; a bare number is bytes. Rejected: one meaning for all of them (vendors sell in thousands, and kernels
count otherwise: 7 % at a gigabyte).

Invariants. What is not understood is refused, never taken for a number of bytes.
"""

from __future__ import annotations

import re

from forebay.core.errors import Invalid

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|KIB|MB|MIB|GB|GIB|TB|TIB|K|M|G|T)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(text: str) -> int:
    """`100GiB`, `1.5TB`, `512M` or plain bytes, as bytes; else `Invalid`."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise Invalid(f"size {text!r} is not known: use a number with B, KB, KiB, MB, MiB, GB, GiB, TB or TiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def parse_rate(text: str) -> float:
    """Bytes a second, of `3GB/s` or `3GB`; else `Invalid`."""
    try:
        return float(parse_size(text.strip().removesuffix("/s")))
    except Invalid:
        raise Invalid(f"rate {text!r} is not known: write it as 3GB/s or 500MiB/s") from None
