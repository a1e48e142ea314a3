"""The requests that Forebay makes itself, against a server whose answers are written out here: keys go out exactly as
they are, and an S3 listing is believed only as far as it keeps its promises."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

from forebay.backends import errors
from forebay.backends.pages import HIGHEST
from forebay.backends.stack import open_backend
from forebay.core.errors import (
    Busy,
    Denied,
    Invalid,
    NoBackendBucket,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.limits import RETRY_AFTER_MAX_S
from forebay.core.machines.retry import RetryPolicy
from forebay.core.types import Bucket, RangeSpec
from tests.backends.backend_places import list_all, read, run
from tests.backends.scripted_http import Asked, Closing, ScriptedServer, answer

ETAG = '"e1"'


class _Standing:
    """Clocks that stand still."""

    def wall_s(self) -> float:
        return 1_767_323_045.0

    def monotonic_s(self) -> float:
        return 1000.0


def bucket(server: ScriptedServer, path: str = "") -> Bucket:
    return Bucket("corpus", f"s3://corpus{path}", options={"endpoint": server.url, "skip_signature": "true"})


def object_named_by_its_target(asked: Asked) -> bytes:
    return answer("200 OK", unquote(asked.target).encode(), etag=ETAG, x_amz_meta_Color="red", content_type="a/b")


UNTIDY = ["a//b", "/lead", "trail/", "//", "x\x01y", "x\ny", "x\x7f", "a///b/", "über//😀", "q?//#%20+ &="]


def test_keys_that_obstore_would_change_are_asked_for_exactly() -> None:
    async def story() -> None:
        with ScriptedServer(object_named_by_its_target) as server:
            backend = open_backend(bucket(server))
            for key in UNTIDY:
                assert await read(backend, key) == b"/corpus/" + key.encode()
                asked = server.asked[-1]
                assert asked.target == "/corpus/" + quote(key, safe="/-_.~")
                info = await backend.head(key)
                assert (info.key, info.version, info.etag) == (key, ETAG, "e1")
                assert info.headers == (("content-type", "a/b"), ("x-amz-meta-color", "red"))
            assert server.connections == 1, "one connection is kept and used again"
            await backend.aclose()

    run(story())


def test_keys_that_proxies_would_resolve_are_never_sent() -> None:
    async def story() -> None:
        with ScriptedServer(object_named_by_its_target) as server:
            backend = open_backend(bucket(server, "/inside"))
            for key in ("..", "../x", "a/../../x", "./x", "a/.", "a/./b", "."):
                for ask in (backend.fetch(key), backend.head(key), backend.check(key, ETAG)):
                    with pytest.raises(Invalid, match="resolve") as refused:
                        await ask
                    assert refused.value.code == "InvalidURI"
            assert server.asked == []
            await backend.aclose()

    run(story())


def test_ranges_and_versions_of_untidy_keys_are_checked() -> None:
    replies = [
        answer("206 Partial Content", b"234", etag=ETAG, content_range="bytes 2-4/10"),
        answer("206 Partial Content", b"234", etag='"e2"', content_range="bytes 2-4/10"),
        answer("412 Precondition Failed"),
        answer("416 Requested Range Not Satisfiable", b"<Code>InvalidRange</Code>"),
    ]

    async def story() -> None:
        with ScriptedServer(lambda _: replies.pop(0)) as server:
            backend = open_backend(bucket(server))
            fetch = await backend.fetch("a//b", RangeSpec(2, 4), version=ETAG)
            assert (fetch.start, fetch.end, fetch.info.size_bytes) == (2, 5, 10)
            assert b"".join([bytes(chunk) async for chunk in fetch]) == b"234"
            assert server.asked[-1].headers["range"] == "bytes=2-4"
            assert server.asked[-1].headers["if-match"] == ETAG
            with pytest.raises(Precondition):
                await backend.fetch("a//b", RangeSpec(2, 4), version=ETAG)  # the server ignored If-Match
            with pytest.raises(Precondition):
                await backend.fetch("a//b", version=ETAG)
            with pytest.raises(Invalid) as refused:
                await backend.fetch("a//b", RangeSpec(20, None))
            assert refused.value.code == "InvalidRange"
            await backend.aclose()

    run(story())


def test_a_server_that_ignores_a_range_is_not_believed() -> None:
    async def story() -> None:
        with ScriptedServer(lambda _: answer("200 OK", b"0123456789", etag=ETAG)) as server:
            backend = open_backend(bucket(server))
            with pytest.raises(NotSupported, match="ranges"):
                await backend.fetch("a//b", RangeSpec(2, 4))
            assert await read(backend, "a//b", RangeSpec(0, 99)) == b"0123456789"
            await backend.aclose()

    run(story())


def test_a_plain_web_server_without_ranges_and_etags_is_read_all_the_same(tmp_path: Path) -> None:
    """Python's own: a range is cut from the whole, and the version is made of date and size."""
    (tmp_path / "data").write_bytes(bytes(range(256)) * 4000)
    (tmp_path / "empty").write_bytes(b"")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()

    async def story() -> None:
        backend = open_backend(Bucket("corpus", f"http://127.0.0.1:{httpd.server_port}"))
        for asked in (RangeSpec(0, 16_000_000), RangeSpec(1000, 900_000), RangeSpec(5, None), RangeSpec(None, 7)):
            start, end = asked.resolve(1_024_000)
            fetch = await backend.fetch("data", asked)
            assert (fetch.start, fetch.end) == (start, end)
            assert b"".join([bytes(chunk) async for chunk in fetch]) == (bytes(range(256)) * 4000)[start:end]
        for asked in (RangeSpec(2_000_000, None), RangeSpec(2_000_000, 2_000_001)):
            with pytest.raises(Invalid) as refused:
                await backend.fetch("data", asked)
            assert (refused.value.code, refused.value.size_bytes) == ("InvalidRange", 1_024_000)
        with pytest.raises(Invalid):
            await backend.fetch("empty", RangeSpec(0, 5))
        info = await backend.head("data")
        assert info.etag == ""
        assert await backend.check("data", info.version) is None
        assert len(await read(backend, "data", version=info.version)) == 1_024_000
        (tmp_path / "data").write_bytes(b"changed")
        assert await backend.check("data", info.version) is not None
        with pytest.raises(Precondition):
            await backend.fetch("data", version=info.version)
        await backend.aclose()

    run(story())
    httpd.shutdown()
    httpd.server_close()


def test_a_connection_that_went_away_while_idle_is_replaced() -> None:
    async def story() -> None:
        with ScriptedServer(object_named_by_its_target) as server:
            backend = open_backend(bucket(server))
            await read(backend, "a//b")
            for sock in server._open:
                sock.shutdown(2)
            assert await read(backend, "a//c") == b"/corpus/a//c"
            await backend.aclose()

    run(story())


# --- listings --------------------------------------------------------------------------------------------------------
def listing(keys: list[str], prefixes: tuple[str, ...] = (), *, more: bool = False, token: str = "") -> bytes:
    contents = "".join(
        f"<Contents><Key>{quote(key)}</Key><Size>1</Size><ETag>&quot;e&quot;</ETag>"
        "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
        for key in keys
    )
    common = "".join(f"<CommonPrefixes><Prefix>{quote(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes)
    tail = f"<IsTruncated>{str(more).lower()}</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
    body = f"<ListBucketResult><EncodingType>url</EncodingType>{contents}{common}{tail}</ListBucketResult>"
    return answer("200 OK", body.encode(), content_type="application/xml")


def query(asked: Asked) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(asked.target).query).items()}


def test_a_page_is_one_request_and_keeps_names_as_they_are() -> None:
    keys = ["a\x01b", "marker/", "x//y", "x/y", "é +&%"]
    keys.sort()

    async def story() -> None:
        with ScriptedServer(lambda _: listing(keys, ("zz/",))) as server:
            backend = open_backend(bucket(server))
            page = await backend.list_page("", "/", "", 100)
            assert [entry.key for entry in page.entries] == keys
            assert page.prefixes == ["zz/"]
            assert page.entries[0].etag == "e"
            assert page.entries[0].modified_s == 1767323045.0
            assert len(server.asked) == 1
            assert query(server.asked[0]) == {
                "list-type": "2",
                "encoding-type": "url",
                "max-keys": "100",
                "delimiter": "/",
            }
            await backend.aclose()

    run(story())


def test_pages_go_on_after_the_last_key_or_past_the_last_folder() -> None:
    def pages(asked: Asked) -> bytes:
        after = query(asked).get("start-after", "")
        return {
            "": listing(["a"], ("b/",), more=True),
            "b/" + HIGHEST: listing(["c"], (), more=True),
            "c": listing(["d"]),
        }[after]

    async def story() -> None:
        with ScriptedServer(pages) as server:
            backend = open_backend(bucket(server))
            assert await list_all(backend, delimiter="/", limit=2) == (["a", "c", "d"], ["b/"])
            await backend.aclose()

    run(story())


def test_empty_pages_that_promise_more_are_followed_by_their_token() -> None:
    def pages(asked: Asked) -> bytes:
        token = query(asked).get("continuation-token", "")
        return listing(["k"]) if token == "t2" else listing([], more=True, token="t2" if token == "t1" else "t1")

    async def story() -> None:
        with ScriptedServer(pages) as server:
            backend = open_backend(bucket(server))
            assert await list_all(backend) == (["k"], [])
            assert len(server.asked) == 3
            await backend.aclose()

    run(story())


def test_a_server_that_ignores_position_prefix_and_page_size_is_corrected() -> None:
    keys = [f"k{number}" for number in range(9)]

    async def story() -> None:
        with ScriptedServer(lambda _: listing(["other", *keys][:0] + sorted([*keys, "other"]))) as server:
            backend = open_backend(bucket(server))
            assert await list_all(backend, prefix="k", limit=4) == (keys, [])
            page = await backend.list_page("k", "", "k6", 4)
            assert [entry.key for entry in page.entries] == ["k7", "k8"]
            await backend.aclose()

    run(story())


def test_a_server_without_order_is_not_listed() -> None:
    async def story() -> None:
        with ScriptedServer(lambda _: listing(["b", "a", "c"], more=True)) as server:
            backend = open_backend(bucket(server))
            with pytest.raises(NotSupported, match="keeps no order"):
                await backend.list_page("", "", "", 10)
            await backend.aclose()

    run(story())


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        ("404 Not Found", "<Code>NoSuchBucket</Code>", NoBackendBucket, None),
        ("403 Forbidden", "<Code>AccessDenied</Code>", Denied, "AccessDenied"),
        ("403 Forbidden", "<Code>SignatureDoesNotMatch</Code>", Denied, "AccessDenied"),
        ("400 Bad Request", "<Code>ExpiredToken</Code>", Denied, "AccessDenied"),
        ("301 Moved Permanently", "<Code>PermanentRedirect</Code><Endpoint>b.s3.eu</Endpoint>", Invalid, None),
        ("400 Bad Request", "<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>", Invalid, None),
        ("503 Slow Down", "<Code>SlowDown</Code>", Busy, None),
        ("500 Internal Server Error", "<Code>InternalError</Code>", Unavailable, None),
        ("501 Not Implemented", "<Code>NotImplemented</Code>", NotSupported, None),
        ("200 OK", "<html>login here</html>", Unavailable, None),
        ("200 OK", "not xml", Unavailable, None),
    ],
)
def test_each_refusal_becomes_the_kind_that_says_what_to_do(status: str, body: str, kind: type, code: str) -> None:
    """By the wire's listing and by obstore's read alike."""

    async def story() -> None:
        said = f"<Error>{body}<Message>why</Message></Error>" if body.startswith("<Code>") else body
        with ScriptedServer(lambda _: answer(status, said.encode())) as server:
            backend = open_backend(bucket(server))
            backend._policy = RetryPolicy(attempts_max=1)  # type: ignore[attr-defined]
            with pytest.raises(kind) as refused:
                await backend.list_page("", "", "", 10)
            assert not code or refused.value.code == code
            assert "/corpus" in str(refused.value)
            if not status.startswith("200"):
                with pytest.raises(kind) as refused:
                    await backend.fetch("key")
                assert not code or refused.value.code == code
            await backend.aclose()

    run(story())


def test_asking_for_many_keys_that_are_not_there_asks_for_the_bucket_once() -> None:
    async def story() -> None:
        said = b"<Error><Code>NoSuchKey</Code></Error>"
        found = {"HEAD": answer("404 Not Found"), "GET": answer("404 Not Found", said)}
        with ScriptedServer(
            lambda asked: listing([]) if "list-type" in asked.target else found[asked.method]
        ) as server:
            backend = open_backend(bucket(server), clock=_Standing())
            for number in range(20):
                with pytest.raises(NotFound):
                    await backend.head(f"key-{number}")
            assert sum("list-type" in asked.target for asked in server.asked) == 1
            for _ in range(2):
                with pytest.raises(NotFound):
                    await backend.fetch("key", version=ETAG)
                with pytest.raises(NotFound):
                    await backend.check("key", ETAG)
            assert sum("list-type" in asked.target for asked in server.asked) == 1, "in the same moment it was there"
            await backend.aclose()

    run(story())


@pytest.mark.parametrize(
    ("status", "kind"),
    [("403 Forbidden", NotFound), ("404 Not Found", NoBackendBucket), ("500 Internal Server Error", Unavailable)],
)
def test_what_the_bucket_answers_decides_what_a_bare_404_means(status: str, kind: type) -> None:
    """Who may not list has only the 404; what cannot be known now is not said."""

    async def story() -> None:
        code = b"<Error><Code>NoSuchBucket</Code></Error>" if status.startswith("404") else b""
        bare = answer("404 Not Found")
        with ScriptedServer(lambda asked: answer(status, code) if "list-type" in asked.target else bare) as server:
            backend = open_backend(bucket(server))
            backend._policy = RetryPolicy(attempts_max=1)  # type: ignore[attr-defined]
            for ask in (backend.head("key"), backend.check("key", ETAG), backend.fetch("key")):
                with pytest.raises(kind) as failed:
                    await ask
                assert type(failed.value) is kind
            await backend.aclose()

    run(story())


class _Patient:
    """The stack over a server, on a clock that sleeping moves."""

    def __init__(self, server: ScriptedServer) -> None:
        self.now_s, self.slept = 1000.0, list[float]()
        self.top = open_backend(bucket(server), clock=self)
        self.top._sleep = self._sleep  # type: ignore[attr-defined]

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


BUSY = "503 Slow Down", b"<Error><Code>SlowDown</Code><Message>why</Message></Error>"
ASKS = {
    "fetch": lambda backend: read(backend, "key"),
    "range": lambda backend: read(backend, "key", RangeSpec(0, 3)),
    "head": lambda backend: backend.head("key"),
    "check": lambda backend: backend.check("key", ETAG),
    "list": lambda backend: backend.list_page("", "", "", 10),
}


def _answering(asked: Asked) -> bytes:
    if "list-type" in asked.target:
        return listing([])
    if "range" in asked.headers:
        return answer("206 Partial Content", b"data", etag=ETAG, content_range="bytes 0-3/9")
    return answer("200 OK", b"" if asked.method == "HEAD" else b"data", etag=ETAG)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("said", ["20", "Sun, 22 Nov 2026 12:00:20 GMT"])
def test_a_backend_that_says_when_to_come_back_is_obeyed_by_reads(ask: str, said: str) -> None:
    """obstore does not tell that header: what comes after the first refusal is told by our own requests."""

    async def story() -> None:
        def script(asked: Asked) -> bytes:
            if patient.now_s < 1020:
                return answer(*BUSY, retry_after=said, date="Sun, 22 Nov 2026 12:00:00 GMT")
            return _answering(asked)

        with ScriptedServer(script) as server:
            patient = _Patient(server)
            await ASKS[ask](patient.top)
            assert patient.slept[-1] == 20
            assert len(server.asked) <= 3, "one more than were needed, to learn how long"
            await patient.top.aclose()

    run(story())


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("status", ["503 Slow Down", "429 Too Many Requests"])
def test_who_would_have_to_wait_for_too_long_is_told_at_once_how_long(ask: str, status: str) -> None:
    async def story() -> None:
        with ScriptedServer(lambda asked: answer(status, b"", retry_after="3600")) as server:
            patient = _Patient(server)
            with pytest.raises(Busy) as refused:
                await ASKS[ask](patient.top)
            assert refused.value.retry_after_s == 3600
            assert len(server.asked) <= 2
            assert sum(patient.slept) < 1
            await patient.top.aclose()

    run(story())


def test_a_header_that_says_nonsense_is_as_none() -> None:
    noon, later = "Sun, 22 Nov 2026 12:00:00 GMT", "Sun, 22 Nov 2026 12:01:00 GMT"
    for said, date, seconds in [
        ("", "", 0), ("7", "", 7), ("-7", "", 0), ("\xb2", "", 0), ("soon", noon, 0), (later, "", 0), (later, noon, 60),
        (noon, later, 0), ("9" * 30, "", RETRY_AFTER_MAX_S), ("Sun, 99 Nov 2026 12:00:00 GMT", noon, 0),
    ]:  # fmt: skip
        assert errors.wait_s(said, date) == seconds, said


def test_a_server_without_ranges_is_read_while_it_is_busy_too() -> None:
    async def story() -> None:
        replies = [answer(*BUSY, retry_after="1")] * 2
        whole = answer("200 OK", b"0123456789", last_modified="Fri, 02 Jan 2026 03:04:05 GMT")
        with ScriptedServer(lambda _: replies.pop() if replies else whole) as server:
            backend = open_backend(Bucket("corpus", server.url + "/data"))
            backend._sleep = lambda seconds: asyncio.sleep(0)  # type: ignore[attr-defined]
            assert await read(backend, "key", RangeSpec(2, 5)) == b"2345"
            await backend.aclose()

    run(story())


def test_a_body_that_is_shorter_than_it_said_is_never_taken_for_whole() -> None:
    """Both ways of reading notice; what is missing is asked for again, of the same version."""
    whole = bytes(range(256)) * 400

    def cut(asked: Asked) -> bytes:
        stored = {"etag": ETAG, "last_modified": "Fri, 02 Jan 2026 03:04:05 GMT"}
        if "range" not in asked.headers:
            return Closing(answer("200 OK", whole[:70_000], content_length=str(len(whole)), **stored))
        first, last = asked.headers["range"].removeprefix("bytes=").split("-")
        assert int(first) <= 70_000
        assert int(last) == len(whole) - 1
        assert asked.headers["if-match"] == ETAG
        span = f"bytes {first}-{last}/{len(whole)}"
        return answer("206 Partial Content", whole[int(first) :], content_range=span, **stored)

    async def story() -> None:
        for key in ("plain", "un//tidy"):
            with ScriptedServer(cut) as server:
                backend = open_backend(bucket(server))
                assert await read(backend, key) == whole
                assert len(server.asked) == 2
                await backend.aclose()

    run(story())
