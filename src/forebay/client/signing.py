"""Signing S3 requests to a node, for the few things that only its S3 side does (multipart uploads).

Theory. A node with identities wants S3 requests signed (Signature Version 4). Keys are those every S3 program finds:
`AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, as `forebay key create` prints them. The body is not signed
(UNSIGNED-PAYLOAD): TLS protects it where it must be, and every byte would be read twice else. A node without identities
does not look, so without keys nothing is signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from datetime import UTC, datetime
from typing import NamedTuple

from forebay.client.http1 import Request
from forebay.core.s3rules.signedbody import UNSIGNED
from forebay.core.s3rules.sigv4 import canonical_path, canonical_query, parse_query, signing_key
from forebay.ports import clock

REGION = b"us-east-1"  # the node takes any


class Keys(NamedTuple):
    """An S3 key pair."""

    access_key_id: str
    secret_access_key: str

    def __repr__(self) -> str:
        return f"Keys({self.access_key_id!r})"


def keys_of_environment() -> Keys | None:
    """The key pair in the environment; None if there is none."""
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    return Keys(key_id, secret) if key_id and secret else None


def sign(request: Request, host: str, keys: Keys, wall_s: float | None = None) -> Request:
    """`request` to `host` with the headers that prove who sends it."""
    now_s = clock.wall_s() if wall_s is None else wall_s
    stamp = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ").encode()
    path, _, query = request.target.encode().partition(b"?")
    fields = {name.lower(): value for name, value in request.headers if name.lower().startswith("x-amz-")}
    fields |= {"host": host, "x-amz-content-sha256": UNSIGNED.decode(), "x-amz-date": stamp.decode()}
    names = ";".join(sorted(fields)).encode()
    lines = "".join(f"{name}:{' '.join(fields[name].split())}\n" for name in sorted(fields)).encode()
    scope = b"/".join((stamp[:8], REGION, b"s3", b"aws4_request"))
    canonical = b"%b\n%b\n%b\n%b\n%b\n%b" % (
        request.method.encode(),
        canonical_path(path),
        canonical_query(parse_query(query)),
        lines,
        names,
        UNSIGNED,
    )
    to_sign = b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (stamp, scope, hashlib.sha256(canonical).hexdigest().encode())
    key = signing_key(keys.secret_access_key, stamp[:8], REGION)
    signature = hmac.digest(key, to_sign, "sha256").hex()
    credential = f"{keys.access_key_id}/{scope.decode()}"
    authorization = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names.decode()}, Signature={signature}"
    more = (
        ("x-amz-content-sha256", UNSIGNED.decode()),
        ("x-amz-date", stamp.decode()),
        ("Authorization", authorization),
    )
    return request._replace(headers=(*request.headers, *more))
