"""Signed requests by the thousand, each different, as an SDK would send them.

Theory. A server that checks signatures must not be measured on one it has seen before. SDKs put a fresh
`amz-sdk-invocation-id` into every request and sign it, so every signature differs even for the same object in the same
second; this does the same. Signing keys are derived once, so that making a request costs two hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Iterator

from bench.load import request_bytes

REGION = "us-east-1"
_EMPTY = hashlib.sha256(b"").hexdigest()
_NAMES = "amz-sdk-invocation-id;host;x-amz-content-sha256;x-amz-date"


def signed_gets(host: str, paths: list[str], count: int, key_id: str, secret: str) -> Iterator[bytes]:
    """`count` GETs over `paths` in turn, signed now (a server accepts them for 15 minutes). Paths need no quoting."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    key = b"AWS4" + secret.encode()
    for part in (stamp[:8], REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    for index in range(count):
        path, invocation = paths[index % len(paths)], str(uuid.uuid4())
        headers = (
            f"amz-sdk-invocation-id:{invocation}\nhost:{host}\nx-amz-content-sha256:{_EMPTY}\nx-amz-date:{stamp}\n"
        )
        canonical = hashlib.sha256(f"GET\n{path}\n\n{headers}\n{_NAMES}\n{_EMPTY}".encode()).hexdigest()
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{canonical}".encode(), "sha256").hex()
        authorization = f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={_NAMES}, Signature={signature}"
        sent = {"amz-sdk-invocation-id": invocation, "x-amz-content-sha256": _EMPTY, "x-amz-date": stamp}
        yield request_bytes(host, path, {**sent, "Authorization": authorization})
