"""Finds the bucket and key that a request names, in path style or virtual-host style.

Theory. A key is bytes, not a path: the text behind the bucket's `/`, percent-decoded exactly once and read as UTF-8.
Nothing is normalised. `a//b`, `../x` and `./` are keys like any other, `%2F` and `/` mean the same, and `+` is a plus
sign (it means a space only in queries of forms). The bucket comes from the host name if that ends with one of the
node's base domains (`corpus.localhost`), and otherwise from the first piece of the path.

Rejected: virtual-host style for any dotted host (a node reached as `gpu1.example.com` would lose its first label); `+`
as a space, as some S3 servers have it (a key with a plus could not be named unescaped).

Invariants. (1) A target and host name one (bucket, key), or raise `Invalid`. (2) Quoting a key and splitting the result
gives the same key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.types import check_key

BASE_DOMAINS = ("localhost", "s3.localhost")
_HOSTS_KEPT_MAX = 1024
_ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_PORT = re.compile(rb":[0-9]*$")


def decode_path(raw: bytes) -> str:
    """A percent-encoded path as text, decoded once. `Invalid` (`InvalidURI`) for a bad escape or what is not UTF-8."""
    if b"%" in raw:
        decoded = unquote_to_bytes(raw)
        if len(raw) - len(decoded) != 2 * raw.count(b"%"):
            raise Invalid("a % in the path is not followed by two hexadecimal digits: write %25", code="InvalidURI")
        raw = decoded
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Invalid("the path is not UTF-8: percent-encode it from UTF-8 bytes", code="InvalidURI") from None


class Addressing:
    """How names are read from targets and hosts, for one set of base domains (without ports, lower case)."""

    def __init__(self, base_domains: Iterable[str] = BASE_DOMAINS) -> None:
        self._bases = sorted({base.lower().strip(".").encode() for base in base_domains}, key=len, reverse=True)
        self._hosts: dict[bytes, str] = {}

    def bucket_of_host(self, host: bytes) -> str:
        """The bucket that a Host header names, or "" for path style."""
        bucket = self._hosts.get(host)
        if bucket is None:
            bucket = self._read_host(host)
            if len(self._hosts) >= _HOSTS_KEPT_MAX:
                self._hosts.clear()
            self._hosts[host] = bucket
        return bucket

    def _read_host(self, host: bytes) -> str:
        name = _PORT.sub(b"", host.strip()).lower().rstrip(b".")
        if name in self._bases:
            return ""
        for base in self._bases:  # longest first, so `s3.localhost` wins over `localhost`
            if name.endswith(b"." + base):
                return name[: -len(base) - 1].decode("latin-1")
        return ""

    def has(self, host: bytes) -> bool:
        """Whether a Host header names one of the base domains, or a bucket under one."""
        name = _PORT.sub(b"", host.strip()).lower().rstrip(b".")
        return any(name == base or name.endswith(b"." + base) for base in self._bases)

    def split(self, path: bytes, host: bytes) -> tuple[str, str]:
        """(bucket, key) of a request path (still encoded, without its query).

        Both are empty for the service itself; the key is empty for a bucket. `Invalid`: code `InvalidURI` or
        `KeyTooLongError`. The bucket's name is not checked: look it up.
        """
        if path[:1] != b"/":
            path, host = _absolute(path, host)
        text = path.decode("ascii") if path.isascii() and b"%" not in path else decode_path(path)
        bucket = self._hosts.get(host)
        if bucket is None:
            bucket = self.bucket_of_host(host)
        if bucket:
            key = text[1:]
        else:
            bucket, _, key = text[1:].partition("/")
            if not bucket and key:
                raise Invalid("the path names no bucket: write /<bucket>/<key>", code="InvalidBucketName")
        if len(path) > limits.KEY_BYTES_MAX and key:
            check_key(key)
        return bucket, key


def _absolute(target: bytes, host: bytes) -> tuple[bytes, bytes]:
    """Path and host of an absolute-form target, which a server must accept (RFC 9112, 3.2.2)."""
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise Invalid("the request target must start with '/'", code="InvalidURI")
    return match[2] or b"/", match[1] or host
