"""What a write made is looked at with a second request, whose errors are not the write's: it was done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from forebay.backends.lost_answers import says_no
from forebay.backends.seam import Backend
from forebay.backends.stack import open_node
from forebay.backends.wrap.counting import BackendCounters
from forebay.core.errors import Unavailable
from forebay.core.types import Bucket, ObjectInfo
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


@pytest.mark.parametrize("status", LOOKS)
@pytest.mark.parametrize("write", WRITES)
def test_what_another_node_did_is_done_once_and_told(write: str, status: str) -> None:
    """Between the two requests the cluster's map may change, and the second is refused: "nothing was done"."""

    async def story() -> None:
        with ScriptedServer(whose_looks_fail(status)) as server:
            node = open_node(
                Bucket("corpus", "s3://corpus", 0.0, options={"endpoint": server.url, "skip_signature": "true"}),
                clock=clock.system,
                chance=chance.system,
                counters=BackendCounters(),
                node="n1",
                peer="n2 19",
                while_alive=lambda call: call,
            )
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
