"""A presigned URL of Signature Version 4: the signing side of what `sigv4.py` verifies.

Theory. The same canonical form, with the proof in the query and `host` as the one header that is signed. The body is
not signed, as every SDK does it.

Invariants. (1) `sigv4.Verifier` accepts what is made here, for the method and host it was made for, until it expires.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime

from forebay.core.errors import Invalid
from forebay.core.s3rules.sigv4 import ALGORITHM, EXPIRES_S_MAX, canonical_query, signing_key


def presign(
    method: str, host: str, path: str, key_id: str, secret: str, *, now_s: float, expires_s: int, region: str
) -> str:
    """The query (without `?`) that lets whoever has it make this one request. `path` is percent-encoded as it is sent.
    `Invalid` for a time that S3 does not take."""
    if not 1 <= expires_s <= EXPIRES_S_MAX:
        raise Invalid(f"a presigned URL lives from one second to seven days, not {expires_s} s: choose another time")
    stamp = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ").encode()
    day = stamp[:8]
    scope = b"/".join((day, region.encode(), b"s3", b"aws4_request"))
    query = canonical_query(
        [
            (b"X-Amz-Algorithm", ALGORITHM),
            (b"X-Amz-Credential", key_id.encode() + b"/" + scope),
            (b"X-Amz-Date", stamp),
            (b"X-Amz-Expires", b"%d" % expires_s),
            (b"X-Amz-SignedHeaders", b"host"),
        ]
    )
    canonical = b"\n".join(
        (method.encode(), path.encode(), query, b"host:" + host.encode() + b"\n", b"host", b"UNSIGNED-PAYLOAD")
    )
    text = b"\n".join((ALGORITHM, stamp, scope, hashlib.sha256(canonical).hexdigest().encode()))
    signature = hmac.new(signing_key(secret, day, region.encode()), text, "sha256").hexdigest()
    return f"{query.decode()}&X-Amz-Signature={signature}"
