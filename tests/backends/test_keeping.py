"""Encryption and storage class on the wire: what each service is told, from headers and from a bucket's options."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from forebay.backends.locate import check, locate
from forebay.backends.seam import Backend, Body
from forebay.core.errors import Invalid, NotSupported
from forebay.core.s3rules.keeping import ENCRYPTION, KMS_KEY, STORAGE_CLASS
from forebay.core.types import Bucket, Headers
from tests.backends.backend_places import run, whole
from tests.backends.scripted_http import Asked, ScriptedServer, answer
from tests.patience import PATIENCE_S

S3_OPTIONS = {"storage_class": "STANDARD_IA", "server_side_encryption": "aws:kms", "sse_kms_key_id": "alias/ours"}
ARN = "arn:aws:kms:eu:1:key/ours"
SAID = {STORAGE_CLASS: "STANDARD_IA", ENCRYPTION: "aws:kms", KMS_KEY: ARN}
ETAG = '"e1"'
DATE = "Sat, 21 Nov 2026 12:00:00 GMT"
COPIED = b"<CopyObjectResult><ETag>&quot;e1&quot;</ETag></CopyObjectResult>"
BEGUN = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"


def backend(server: ScriptedServer, scheme: str, **options: str) -> Backend:
    where = {
        "s3": {"endpoint": server.url, "skip_signature": "true"},
        "gs": {"base_url": server.url, "bearer_token": "tok"},
        "az": {"endpoint": server.url, "account_name": "me", "skip_signature": "true"},
    }
    return locate(Bucket("corpus", f"{scheme}://corpus", options={**where[scheme], **options}))


def some(data: bytes) -> Body:
    return Body(len(data), data)


def amazon(asked: Asked) -> bytes:
    """An S3 that encrypts as it is told, and names the key in its own words."""
    said = {"etag": ETAG, "date": DATE, "last_modified": DATE}
    if asked.method in ("GET", "HEAD"):
        said |= {STORAGE_CLASS: "STANDARD_IA"}
    if asked.method in ("GET", "HEAD") or asked.headers.get(ENCRYPTION) == "aws:kms":
        said |= {ENCRYPTION: "aws:kms", KMS_KEY: ARN}
    body = COPIED if "x-amz-copy-source" in asked.headers else BEGUN if "uploads" in asked.target else b""
    return answer("200 OK", b"data" if asked.method == "GET" else body, **said)


def kept(headers: Headers) -> dict[str, str]:
    return {name: value for name, value in headers if not name.startswith("content-")}


def told(asked: Asked) -> dict[str, str]:
    return {name: value for name, value in asked.headers.items() if name in (STORAGE_CLASS, ENCRYPTION, KMS_KEY)}


def test_s3_is_told_with_every_write_by_options_and_by_headers_instead() -> None:
    async def story() -> None:
        with ScriptedServer(amazon) as server:
            bucket = backend(server, "s3", **S3_OPTIONS)
            options = {STORAGE_CLASS: "STANDARD_IA", ENCRYPTION: "aws:kms", KMS_KEY: "alias/ours"}
            info = await bucket.put("a", some(b"x"))
            assert told(server.asked[-1]) == options
            assert kept(info.headers) == {**options, KMS_KEY: ARN}, "what the backend said of the key"
            await bucket.begin_upload("a")
            assert told(server.asked[-1]) == options
            await bucket.copy("a", "b")
            assert told(next(asked for asked in server.asked if "x-amz-copy-source" in asked.headers)) == options
            own = ((STORAGE_CLASS, "STANDARD"), (ENCRYPTION, "AES256"))
            info = await bucket.put("a", some(b"x"), headers=own)
            assert told(server.asked[-1]) == dict(own)
            assert kept(info.headers) == {}, "the class that S3 does not mention, and an answer that says nothing"
            await bucket.aclose()

    run(story())


def test_what_is_read_says_how_it_is_kept_where_the_bucket_asks_for_it() -> None:
    async def story() -> None:
        with ScriptedServer(amazon) as server:
            bucket = backend(server, "s3", server_side_encryption="aws:kms")
            opened = await bucket.fetch("a")
            assert await whole(opened) == b"data"
            assert kept(opened.info.headers) == SAID
            assert sorted(asked.method for asked in server.asked) == ["GET", "HEAD"]
            assert kept((await bucket.head("a")).headers) == SAID
            changed = await bucket.check("a", '"e0"')
            assert changed is not None
            assert kept(changed.headers) == SAID
            await bucket.aclose()

    run(story())


def test_a_body_does_not_wait_for_a_look_that_hangs() -> None:
    asked_both, go_on = threading.Barrier(2), threading.Event()

    def script(asked: Asked) -> bytes:
        asked_both.wait(PATIENCE_S)
        if asked.method == "HEAD":
            go_on.wait(PATIENCE_S)
        return amazon(asked)

    async def story() -> None:
        with ScriptedServer(script) as server:
            bucket = backend(server, "s3", server_side_encryption="aws:kms")
            opened = await bucket.fetch("a")
            assert await whole(opened) == b"data"
            assert kept(opened.info.headers) == {}
            go_on.set()
            await asyncio.wait(bucket._looks, timeout=PATIENCE_S)  # type: ignore[attr-defined]
            await bucket.aclose()

    run(story())


def test_a_body_comes_also_where_nobody_may_look_at_the_object() -> None:
    def script(asked: Asked) -> bytes:
        return answer("403 Forbidden") if asked.method == "HEAD" else amazon(asked)

    async def story() -> None:
        with ScriptedServer(script) as server:
            bucket = backend(server, "s3", server_side_encryption="AES256")
            opened = await bucket.fetch("a")
            assert await whole(opened) == b"data"
            assert ENCRYPTION not in kept(opened.info.headers)
            await bucket.aclose()

    run(story())


def test_google_is_told_the_class_and_nothing_else() -> None:
    def script(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return answer("200 OK", etag=ETAG, x_goog_generation="7", last_modified=DATE)
        if "uploads" in asked.target:
            return answer("200 OK", BEGUN)
        made = {"generation": "7", "updated": "2026-11-21T12:00:00Z", "size": "1"}
        return answer(
            "200 OK", json.dumps({"done": True, "resource": made} if "rewriteTo" in asked.target else made).encode()
        )

    async def story() -> None:
        with ScriptedServer(script) as server:
            bucket = backend(server, "gs", storage_class="NEARLINE")
            await bucket.put("a", some(b"x"))
            (put,) = (asked for asked in server.asked if asked.method == "POST")
            assert b'"storageClass": "NEARLINE"' in put.body
            await bucket.begin_upload("a")
            assert server.asked[-1].headers["x-goog-storage-class"] == "NEARLINE"
            with pytest.raises(NotSupported, match="read it and put it"):
                await bucket.copy("a", "b")
            await bucket.copy("a", "b", headers=())
            (copy,) = (asked for asked in server.asked if "rewriteTo" in asked.target)
            assert json.loads(copy.body) == {"storageClass": "NEARLINE"}
            for write in (bucket.put("a", some(b"x"), headers=((ENCRYPTION, "AES256"),)),
                          bucket.begin_upload("a", headers=((ENCRYPTION, "AES256"),))):  # fmt: skip
                with pytest.raises(NotSupported, match=ENCRYPTION):
                    await write
            await bucket.aclose()

    run(story())


def test_azure_is_told_the_tier_and_nothing_else() -> None:
    def script(asked: Asked) -> bytes:
        status = "202 Accepted" if "x-ms-copy-source" in asked.headers else "201 Created"
        status = "200 OK" if asked.method == "HEAD" else status
        return answer(status, etag=ETAG, date=DATE, last_modified=DATE)

    async def story() -> None:
        with ScriptedServer(script) as server:
            bucket = backend(server, "az", access_tier="Cool")
            await bucket.put("a", some(b"x"))
            upload = await bucket.begin_upload("a")
            await bucket.complete_upload("a", upload, [])
            await bucket.copy("a", "b")
            writes = [asked for asked in server.asked if asked.method == "PUT"]
            assert [asked.headers.get("x-ms-access-tier") for asked in writes] == ["Cool"] * 3
            with pytest.raises(NotSupported, match=ENCRYPTION):
                await bucket.put("a", some(b"x"), headers=((ENCRYPTION, "AES256"),))
            await bucket.aclose()

    run(story())


def test_options_that_a_service_does_not_have_are_refused_when_the_bucket_is_made() -> None:
    for url, options in (
        ("file:///tmp", {"storage_class": "STANDARD_IA"}),
        ("gs://b", {"server_side_encryption": "AES256"}),
        ("az://b", {"storage_class": "STANDARD_IA"}),
        ("s3://b", {"sse_customer_key": "k"}),
        ("s3://b", {"sse_kms_key_id": "k"}),
        ("s3://b", {"storage_class": "two words"}),
    ):
        with pytest.raises(Invalid):
            check(Bucket("corpus", url, options=options))
