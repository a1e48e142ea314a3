"""Multipart uploads that another node of the cluster has: what is asked of them here is asked there.

Theory. An upload lives at the node where it began (the key's home of that moment, unless the bucket is written
through), and its id ends with that node's. Nothing of it is kept here, so any node may be asked about any of its parts.
No lock is held while the other node is asked.
"""

from __future__ import annotations

from forebay.backends.seam import Body
from forebay.core import limits
from forebay.core.errors import NotSupported
from forebay.core.messages.calls import (
    PartState,
    UploadCompleteCall,
    UploadCompleted,
    UploadCreateCall,
    UploadPartCall,
    UploadParts,
    UploadPartsCall,
    UploadState,
    Written,
)
from forebay.node.engine.buckets import Served


async def begin(there: Served, call: UploadCreateCall, now_s: float, algorithm: str, kind: str) -> UploadState:
    """Begin an upload there."""
    upload_id = await there.backend.begin_upload(call.key, headers=call.headers, tags=call.tags)
    return UploadState(call.bucket, call.key, upload_id, now_s, algorithm, kind)


async def part(there: Served, call: UploadPartCall, now_s: float) -> PartState:
    """Send a part. Its checksums were compared here."""
    body = Body(call.size_bytes, data=call.body, path=call.path, md5=call.md5)
    token = await there.backend.put_part(call.key, call.upload_id, call.number, body)
    return PartState(call.number, call.size_bytes, token.strip('"'), now_s, dict(call.checksums))


async def parts(there: Served, call: UploadPartsCall) -> UploadParts:
    """A page of an upload's parts."""
    seen = [each for each in await there.backend.list_parts(call.key, call.upload_id) if each.number > call.after]
    limit = max(0, min(call.limit, limits.LIST_KEYS_MAX))
    shown = [PartState(each.number, each.size_bytes, each.token.strip('"'), 0.0, {}) for each in seen[:limit]]
    return UploadParts(UploadState(call.bucket, call.key, call.upload_id, 0.0), shown, len(seen) > limit)


async def complete(there: Served, call: UploadCompleteCall) -> UploadCompleted:
    """Make the object from the named parts. The other node judges the conditions."""
    expect = "" if call.if_none_match == "*" else call.if_match
    if call.if_none_match not in (None, "*") or (expect and not expect.startswith('"')):
        raise NotSupported("such a condition is judged by the key's home alone: use If-None-Match: * or one ETag")
    tokens: dict[int, str] = {}
    if not all(etag for _, etag, _ in call.parts):
        tokens = {each.number: each.token for each in await there.backend.list_parts(call.key, call.upload_id)}
    named = [(number, f'"{etag}"' if etag else tokens.get(number, "")) for number, etag, _ in call.parts]
    info = await there.backend.complete_upload(call.key, call.upload_id, named, expect=expect)
    return UploadCompleted(Written(info.etag, info.version, info.size_bytes, info.modified_s), {}, "")
