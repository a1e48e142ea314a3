"""Looks at what a write made. After one that was done their errors are not the write's; after one without an answer
they tell what became of it, where they can."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from email.utils import formatdate

import pytest

from forebay.backends.lost_answers import says_no
from forebay.backends.seam import Backend, Body
from forebay.backends.stack import open_node
from forebay.backends.wrap.counting import BackendCounters
from forebay.backends.wrap.retrying import Retrying
from forebay.core.errors import Unavailable
from forebay.core.types import Bucket, Headers, ObjectInfo
from forebay.ports import chance, clock
from tests.backends.backend_places import run
from tests.backends.scripted_http import Asked, ScriptedServer, answer
from tests.backends.test_keeping import COPIED, backend

COMPLETED = b"<CompleteMultipartUploadResult><ETag>&quot;e1&quot;</ETag></CompleteMultipartUploadResult>"
REWRITTEN = b'{"done": true, "resource": {"generation": "7", "size": "4"}}'
LOOKS = [
    "421 Misdirected Request",
    "503 Service Unavailable",
    "429 Too Many Requests",
    "403 Forbidden",
    "404 Not Found",
]
WRITES: dict[str, Callable[[Backend], Awaitable[ObjectInfo]]] = {
    "copy": lambda bucket: bucket.copy("a", "b"),
    "completion": lambda bucket: bucket.complete_upload("b", "upload", [(1, '"p1"')]),
}


def made(asked: Asked) -> bytes:
    """How each service says that it did it."""
    if "rewriteTo" in asked.target:
        return answer("200 OK", REWRITTEN)
    if "x-ms-copy-source" in asked.headers:
        return answer("202 Accepted", etag='"e1"', x_ms_copy_status="success")
    return answer("200 OK", COPIED if "x-amz-copy-source" in asked.headers else COMPLETED)


def whose_looks_fail(status: str) -> Callable[[Asked], bytes]:
    return lambda asked: answer(status) if asked.method == "HEAD" else made(asked)


def node_at(server: ScriptedServer) -> Backend:
    return open_node(
        Bucket("corpus", "s3://corpus", 0.0, options={"endpoint": server.url, "skip_signature": "true"}),
        clock=clock.system,
        chance=chance.system,
        counters=BackendCounters(),
        node="n1",
        peer="n2 19",
        while_alive=lambda call: call,
    )


@pytest.mark.parametrize("status", LOOKS)
@pytest.mark.parametrize("write", WRITES)
def test_what_another_node_did_is_done_once_and_told(write: str, status: str) -> None:
    """Between the two requests the cluster's map may change, and the second is refused: "nothing was done"."""

    async def story() -> None:
        with ScriptedServer(whose_looks_fail(status)) as server:
            node = node_at(server)
            info = await WRITES[write](node)
            assert (info.etag, info.version) == ("e1", '"e1"')
            assert [asked.method for asked in server.asked].count("HEAD") == 1
            assert len(server.asked) == 2, "it was not done again"
            await node.aclose()

    run(story())


@pytest.mark.parametrize("status", LOOKS[:-1])
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_where_the_answer_does_not_say_what_it_is_nobody_hears_that_it_was_not_done(scheme: str, status: str) -> None:
    async def story() -> None:
        with ScriptedServer(whose_looks_fail(status)) as server:
            bucket = backend(server, scheme)
            with pytest.raises(Unavailable, match="it was written") as caught:
                await bucket.copy("a", "b")
            assert not says_no(caught.value)
            await bucket.aclose()

    run(story())


BODY = b"the same bytes as before"
MD5 = hashlib.md5(BODY).hexdigest()
RED = (("x-amz-meta-color", "red"),)


async def at_once(_: float) -> None:
    """No pause."""


async def put_in_silence(bucket: Backend, headers: Headers = RED, tags: str = "") -> ObjectInfo:
    retrying = Retrying(bucket, clock.system, chance.system, BackendCounters(), sleep=at_once)
    return await retrying.put("key", Body(len(BODY), BODY, md5=MD5), headers=headers, tags=tags)


@pytest.mark.parametrize(
    ("color", "age_s", "headers", "tags", "is_ours"),
    [
        ("red", 0, RED, "", True),
        ("blue", 0, RED, "", False),
        ("red", 0, (), "", False),
        ("red", 3600, RED, "", False),
        ("red", 0, RED, "a=b", False),
        ("red", 0, (*RED, ("x-amz-server-side-encryption", "aws:kms")), "", False),
    ],
)
def test_bytes_that_were_there_before_are_no_answer(
    color: str, age_s: int, headers: Headers, tags: str, is_ours: bool
) -> None:
    """A put of what is there already, with other headers or tags, counted as done though every attempt had failed."""

    def script(asked: Asked) -> bytes:
        if asked.method == "PUT":
            return answer("500 Internal Server Error")
        date = formatdate(clock.system.wall_s() - age_s, usegmt=True)
        return answer(
            "200 OK", etag=f'"{MD5}"', last_modified=date, content_length=str(len(BODY)), x_amz_meta_color=color
        )

    async def story() -> None:
        with ScriptedServer(script) as server:
            bucket = backend(server, "s3")
            if is_ours:
                assert (await put_in_silence(bucket, headers, tags)).etag == MD5
            else:
                with pytest.raises(Unavailable):
                    await put_in_silence(bucket, headers, tags)
            await bucket.aclose()

    run(story())


def test_a_node_that_says_that_it_may_not_have_written_is_believed() -> None:
    """It had the same bytes before; the headers that came with them now it does not have."""

    def script(asked: Asked) -> bytes:
        if asked.method == "PUT":
            return answer("503 Service Unavailable", b"<Error><Code>ServiceUnavailable</Code></Error>")
        return answer("200 OK", etag=f'"{MD5}"', content_length=str(len(BODY)), x_amz_meta_color="red")

    async def story() -> None:
        with ScriptedServer(script) as server:
            node = node_at(server)
            with pytest.raises(Unavailable):
                await node.put("key", Body(len(BODY), BODY, md5=MD5), headers=RED)
            assert [asked.method for asked in server.asked] == ["PUT"]
            await node.aclose()

    run(story())
