"""Parses sizes and rates as people write them: `24GiB`, `500 MB`, `3GB/s`.

Theory. KB, MB, GB and TB are powers of 1000. KiB, MiB, GiB and TiB, and the short K, M, G and T, are powers of 1024, as
in `dd` and systemd. A bare number is bytes. Rejected: one meaning for all of them (vendors count in thousands and
kernels do not: 7 % at a gigabyte).

Invariants. Text that is not understood is refused, never taken for a number of bytes.
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


_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(size_bytes: float) -> str:
    """`1.5 MiB`; whole bytes below 1 KiB."""
    value, unit = float(size_bytes), 0
    while value >= 1023.95 and unit < len(_SHOWN) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_SHOWN[unit]}"


def counted(number: int, thing: str) -> str:
    """`1 object`, `2 objects`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def rate(bytes_s: float) -> str:
    return f"{size(bytes_s)}/s"


def duration(seconds: float) -> str:
    """`350 µs`, `2.0 ms`, `1.5 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
