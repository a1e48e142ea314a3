"""Writes on the wire, against a server whose answers are written out here: what goes out, what each answer means."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import threading
from base64 import b64encode
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from forebay.backends.locate import locate
from forebay.backends.seam import Backend, Body
from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.retrying import Retrying
from forebay.core import limits
from forebay.core.errors import (
    Busy,
    Corrupt,
    Denied,
    ForebayError,
    Invalid,
    NoBackendBucket,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.types import Bucket
from forebay.ports.chance import Seeded
from forebay.ports.clock import SystemClock
from tests.backends.backend_places import run
from tests.backends.scripted_http import Asked, Closing, ScriptedServer, answer

DATA = os.urandom(3_000_000)
CERTIFICATE = Path(__file__).parents[1] / "client" / "loopback.pem"
ETAG = '"e1"'


def some(data: bytes) -> Body:
    return Body(len(data), data)


def bare(server: ScriptedServer | str, **options: str) -> Backend:
    url = server if isinstance(server, str) else server.url
    return locate(Bucket("corpus", "s3://corpus", options={"endpoint": url, "skip_signature": "true", **options}))


def google(server: ScriptedServer) -> Backend:
    return locate(Bucket("corpus", "gs://corpus", options={"base_url": server.url, "bearer_token": "tok"}))


class Patient:
    """The retrying layer over a backend, on a clock that sleeping moves."""

    def __init__(self, inner: Backend) -> None:
        self.slept: list[float] = []
        self.top = Retrying(inner, SystemClock(), Seeded(1), BackendCounters(), sleep=self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def accept(_: Asked) -> bytes:
    return answer("200 OK", etag=ETAG, date="Sat, 21 Nov 2026 12:00:00 GMT")


# --- what goes out ---------------------------------------------------------------------------------------------------
def test_a_put_says_all_that_is_to_be_stored_and_how_to_check_it() -> None:
    async def story() -> None:
        with ScriptedServer(accept) as server:
            backend = bare(server)
            md5 = hashlib.md5(DATA).hexdigest()
            headers = (
                ("content-type", "a/b"),
                ("expires", "Wed, 21 Oct 2026 07:28:00 GMT"),
                ("x-amz-storage-class", "STANDARD_IA"),
                ("x-amz-meta-a", "1"),
            )
            info = await backend.put("key", some(DATA)._replace(md5=md5), headers=headers, tags="a=b&c=d", expect="")
            assert (info.version, info.etag, info.size_bytes, info.modified_s) == (ETAG, "e1", len(DATA), 1795262400.0)
            (asked,) = server.asked
            assert (asked.method, asked.target, asked.body) == ("PUT", "/corpus/key", DATA)
            sent = asked.headers
            assert sent["content-md5"] == b64encode(bytes.fromhex(md5)).decode()
            assert sent["x-amz-tagging"] == "a=b&c=d"
            assert sent["if-none-match"] == "*"
            assert all(sent[name] == value for name, value in headers)
            assert "authorization" not in sent
            with pytest.raises(Invalid, match="cannot be stored"):
                await backend.put("key", some(b""), headers=(("x-other", "1"),))
            with pytest.raises(Invalid, match="change the metadata"):
                await backend.put("key", some(b""), headers=(("x-amz-meta-a", "two\r\nlines"),))
            assert len(server.asked) == 1
            await backend.aclose()

    run(story())


def test_keys_go_out_exactly_and_connections_are_kept() -> None:
    async def story() -> None:
        with ScriptedServer(accept) as server:
            backend = bare(server)
            for key in ("a//b", "/lead", "trail/", "x\x01y", "über/😀", "q?#%20+ &="):
                await backend.put(key, some(b"x"))
                assert server.asked[-1].target == "/corpus/" + quote(key, safe="/-_.~")
            for key in ("../x", "a/./b"):
                with pytest.raises(Invalid):
                    await backend.put(key, some(b"x"))
            assert server.connections == 1
            await backend.aclose()

    run(story())


def test_a_connection_that_the_server_closed_meanwhile_does_no_harm() -> None:
    async def story() -> None:
        with ScriptedServer(lambda asked: Closing(accept(asked))) as server:
            patient = Patient(bare(server))
            for _ in range(3):
                await patient.top.put("key", some(DATA))
            assert [asked.body for asked in server.asked] == [DATA] * 3
            assert server.connections == 3
            await patient.top.aclose()

    run(story())


def test_a_body_goes_through_tls_whole(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"ab" + DATA)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)

    async def story() -> None:
        with ScriptedServer(accept, context) as server:
            backend = bare(server, allow_invalid_certificates="true")
            for _ in range(2):
                await backend.put("key", Body(len(DATA), path=str(tmp_path / "source"), offset=2))
                assert server.asked[-1].body == DATA
            assert server.connections == 1
            await backend.aclose()

    run(story())


def test_a_file_that_is_too_short_is_never_padded(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(DATA)

    async def story() -> None:
        with ScriptedServer(accept) as server:
            backend = bare(server)
            for size_bytes in (100, 2_500_000):
                with pytest.raises(Corrupt, match="shorter"):
                    await backend.put("key", Body(size_bytes, path=str(tmp_path / "source"), offset=len(DATA) - 99))
            await backend.aclose()
            assert all(len(asked.body) < 100 for asked in server.asked)

    run(story())


def test_what_no_request_may_carry_is_not_begun() -> None:
    async def story() -> None:
        with ScriptedServer(accept) as server:
            for backend in (bare(server), google(server)):
                huge = Body(limits.PUT_BYTES_MAX + 1, path="/nowhere")
                for call in (backend.put("key", huge), backend.put_part("key", "1", 1, huge)):
                    with pytest.raises(Invalid) as refused:
                        await call
                    assert refused.value.code == "EntityTooLarge"
                await backend.aclose()
            assert server.asked == []

    run(story())


# --- what answers mean -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer("404 Not Found", b"<Code>NoSuchKey</Code>"), Precondition),
        (answer("404 Not Found", b"<Code>NoSuchBucket</Code>"), NoBackendBucket),
        (answer("412 Precondition Failed"), Precondition),
        (answer("409 Conflict", b"<Code>ConditionalRequestConflict</Code>"), Unavailable),
        (answer("400 Bad Request", b"<Code>BadDigest</Code>"), Corrupt),
        (answer("400 Bad Request", b"<Code>RequestTimeout</Code>"), Unavailable),
        (answer("501 Not Implemented", b"<Code>NotImplemented</Code>"), NotSupported),
        (answer("503 Slow Down", b"<Code>SlowDown</Code>"), Busy),
        (answer("503 Service Unavailable", b"<Code>ServiceUnavailable</Code>"), Unavailable),
        (answer("503 Service Unavailable"), Unavailable),  # of a proxy that had no answer: it may have been done
        (answer("503 Service Unavailable", b"upstream connect error or disconnect"), Unavailable),
        (answer("500 Internal Server Error"), Unavailable),
        (answer("403 Forbidden"), Denied),
        (b"", Unavailable),
    ],
)
def test_each_refusal_of_a_conditional_put_is_of_its_kind(said: bytes, kind: type[ForebayError]) -> None:
    async def story() -> None:
        with ScriptedServer(lambda _: said) as server:
            backend = bare(server)
            with pytest.raises(kind) as refused:
                await backend.put("key", some(b"x"), expect=ETAG)
            assert refused.value.kind == kind.__name__
            await backend.aclose()

    run(story())


def test_a_service_that_ignores_conditions_is_looked_at_before() -> None:
    there = {"etag": ""}

    def ignorant(asked: Asked) -> bytes:
        if asked.method == "HEAD":
            return answer("200 OK", etag=there["etag"]) if there["etag"] else answer("404 Not Found")
        assert "if-match" not in asked.headers
        assert "if-none-match" not in asked.headers
        there["etag"] = ETAG if asked.method == "PUT" else ""
        return accept(asked)

    async def story() -> None:
        with ScriptedServer(ignorant) as server:
            backend = bare(server, look_before_write="true")
            with pytest.raises(Precondition):
                await backend.put("key", some(b"x"), expect=ETAG)
            await backend.put("key", some(b"x"), expect="")
            with pytest.raises(Precondition, match="exists already"):
                await backend.put("key", some(b"x"), expect="")
            with pytest.raises(Precondition):
                await backend.delete("key", expect='"other"')
            await backend.put("key", some(b"y"), expect=ETAG)
            await backend.delete("key", expect=ETAG)
            assert [asked.method for asked in server.asked if asked.method != "HEAD"] == ["PUT", "PUT", "DELETE"]
            await backend.aclose()

    run(story())


def test_a_backend_that_says_when_to_come_back_is_obeyed() -> None:
    replies = [answer("503 Slow Down", b"<Code>SlowDown</Code>", retry_after="7"), answer("429 Too Many", b"")]

    async def story() -> None:
        with ScriptedServer(lambda asked: replies.pop(0) if replies else accept(asked)) as server:
            patient = Patient(bare(server))
            await patient.top.put("key", some(DATA))
            assert [asked.body for asked in server.asked] == [DATA] * 3
            assert patient.slept[0] == 7
            assert len(patient.slept) == 2
            await patient.top.aclose()

    run(story())


def test_a_refusal_in_the_middle_of_a_body_is_heard() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(answer("403 Forbidden", b"<Code>AccessDenied</Code>"))

    thread = threading.Thread(target=refuse)
    thread.start()

    async def story() -> None:
        backend = bare(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(Denied):
            await backend.put("key", some(os.urandom(50_000_000)))
        await backend.aclose()

    with listener:
        run(story())
        thread.join()


def test_a_completion_that_fails_after_saying_200_has_failed() -> None:
    bodies = [
        (b"<Error><Code>InternalError</Code><Message>x</Message></Error>", Unavailable),
        (b"<Error><Code>NoSuchUpload</Code></Error>", NotFound),
        (b"<Error><Code>InvalidPart</Code></Error>", Invalid),
        (b"  \n", Unavailable),
        (b"<Other/>", Unavailable),
    ]

    async def story() -> None:
        for body, kind in bodies:
            with ScriptedServer(lambda _, body=body: answer("200 OK", body)) as server:  # type: ignore[misc]
                backend = bare(server)
                with pytest.raises(kind):
                    await backend.complete_upload("key", "id", [(1, ETAG)])
                await backend.aclose()

    run(story())


def test_what_was_made_and_deleted_by_another_at_once_was_made() -> None:
    """The look that follows finds nothing: that is no answer to the write."""

    def script(asked: Asked) -> bytes:
        date = "Sat, 21 Nov 2026 12:00:00 GMT"
        if asked.method == "HEAD":
            return answer("404 Not Found")
        if asked.method == "POST":
            said = b"<CompleteMultipartUploadResult><ETag>&quot;e1&quot;</ETag></CompleteMultipartUploadResult>"
        else:
            said = b"<CopyObjectResult><ETag>&quot;e1&quot;</ETag></CopyObjectResult>"
        return answer("200 OK", said, date=date)

    async def story() -> None:
        with ScriptedServer(script) as server:
            backend = bare(server)
            for made in (await backend.copy("a", "b"), await backend.complete_upload("b", "u1", [(1, '"p1"')])):
                assert (made.key, made.version, made.etag, made.modified_s) == ("b", ETAG, "e1", 1795262400.0)
            await backend.put("b", some(b"bytes"))
            assert server.asked[-1].method == "HEAD", "the answer named no ETag"
            await backend.aclose()

    run(story())


# --- Google's uploads, which its emulator does not have --------------------------------------------------------------
def test_googles_uploads_are_s3s_with_other_names() -> None:
    exists = {"now": True}

    def script(asked: Asked) -> bytes:
        query = parse_qs(urlsplit(asked.target).query, keep_blank_values=True)
        if asked.method == "HEAD":
            there = {"etag": ETAG, "x-goog-generation": "5", "last-modified": "Sat, 21 Nov 2026 12:00:00 GMT"}
            fields = {name.replace("-", "_"): value for name, value in there.items()}
            return answer("200 OK", **fields) if exists["now"] else answer("404 Not Found")
        if "uploads" in query:
            said = b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
            return answer("200 OK", said)
        if "partNumber" in query:
            return answer("200 OK", etag='"p1"')
        assert asked.method == "POST"
        exists["now"] = True
        return answer("200 OK", b"<CompleteMultipartUploadResult><ETag>e1</ETag></CompleteMultipartUploadResult>")

    async def story() -> None:
        with ScriptedServer(script) as server:
            backend = google(server)
            upload = await backend.begin_upload("a/b", headers=(("content-type", "x/y"), ("x-amz-meta-color", "red")))
            begun = server.asked[-1]
            assert (begun.target, begun.headers["x-goog-meta-color"]) == ("/corpus/a/b?uploads=", "red")
            assert begun.headers["authorization"] == "Bearer tok"
            with pytest.raises(NotSupported, match="no tags"):
                await backend.begin_upload("a/b", tags="a=b")
            token = await backend.put_part("a/b", upload, 1, some(DATA))
            assert server.asked[-1].target == "/corpus/a/b?partNumber=1&uploadId=u1"
            assert server.asked[-1].body == DATA
            for expect in ("", '"other"'):
                with pytest.raises(Precondition):
                    await backend.complete_upload("a/b", upload, [(1, token)], expect=expect)
                assert server.asked[-1].method == "HEAD", "it was not completed"
            exists["now"] = False
            done = await backend.complete_upload("a/b", upload, [(1, token)], expect="")
            assert done.version == ETAG
            completed = next(asked for asked in server.asked if asked.body.startswith(b"<Complete"))
            assert b'<Part><PartNumber>1</PartNumber><ETag>"p1"</ETag></Part>' in completed.body
            assert not any(name.startswith("x-amz-") for asked in server.asked for name in asked.headers)
            await backend.aclose()

    run(story())


def test_a_google_object_that_is_replaced_at_once_is_not_called_ours() -> None:
    def script(asked: Asked) -> bytes:
        if asked.method == "POST":
            return answer("200 OK", b'{"generation": "5", "updated": "2026-11-21T12:00:00Z"}')
        return answer("200 OK", etag=ETAG, x_goog_generation="6")

    async def story() -> None:
        with ScriptedServer(script) as server:
            backend = google(server)
            info = await backend.put("key", some(b"ours"))
            assert info.version != ETAG
            assert (info.size_bytes, info.modified_s) == (4, 1795262400.0)
            await backend.aclose()

    run(story())
