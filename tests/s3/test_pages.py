"""Pages of other sites, and a node without identities that listens on the browser's own machine."""

from __future__ import annotations

import pytest

from forebay.core.types import CorsRule
from tests.s3.conftest import BUCKET
from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object
from tests.s3.real_node import RealNode

OURS = [
    "127.0.0.1:9400", "127.3.4.5", "[::1]:9400", "localhost", "LocalHost.:9400", "corpus.localhost:9400",
    "s3.example.com:9400", "corpus.S3.example.com",  # the domain that the node was given
]  # fmt: skip
OTHERS = [
    "evil.example:9400", "corpus.evil.example", "10.0.0.1:9400", "127.0.0.1.evil.example", "evils3.example.com",
    "localhost.evil.example", "[2001:db8::1]:9400", "gpu1",
]  # fmt: skip
REQUESTS = [
    ("GET", "/corpus/k", None), ("HEAD", "/corpus/k", None), ("GET", "/corpus?list-type=2", None), ("GET", "/", None),
    ("GET", "/corpus?acl", None), ("PUT", "/corpus/new", b"x"), ("PUT", "/corpus/new", None), ("PUT", "/fresh", None),
    ("DELETE", "/corpus/k", None), ("OPTIONS", "/corpus/k", None),
    ("POST", "/corpus?delete", b"<Delete><Object><Key>k</Key></Object></Delete>"),
]  # fmt: skip


@pytest.fixture
def front() -> BucketFront:
    return BucketFront(corpus={"k": Object(b"data")})


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code if answer.body else ""


@pytest.mark.parametrize(("method", "target", "body"), REQUESTS)
def test_a_page_that_points_its_name_here_gets_nothing(
    front: BucketFront, method: str, target: str, body: bytes | None
) -> None:
    """DNS rebinding: to the browser that is the page's own server, so nothing but Host tells."""
    for host in OTHERS:
        answer = front.ask(method, target, body=body, host=host)
        assert said(answer) == (403, "AccessDenied"), host
        assert b"data" not in answer.body
    assert front.reads.calls == front.reads.asked == []
    assert list(front.reads.buckets["corpus"]) == ["k"]


@pytest.mark.parametrize("host", OURS)
def test_names_of_the_node_itself_work_in_both_styles(front: BucketFront, host: str) -> None:
    target = "/k" if host.lower().startswith("corpus.") else "/corpus/k"
    assert front.get(target, host=host).body == b"data"
    assert front.put(target, b"new", host=host).status == 200
    assert front.get(target, host=host).body == b"new"


def test_a_node_with_identities_answers_to_every_name(front: BucketFront) -> None:
    keyed = BucketFront({"reader": "read:corpus"}, corpus={"k": Object(b"data")})
    keyed.reads.change("corpus", acl="public-read")
    assert [keyed.get("/corpus/k", host=host).status for host in OTHERS if "corpus" not in host] == [200] * 7


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_form_without_an_origin_is_told_by_where_it_comes_from(front: BucketFront, site: str) -> None:
    document = b"<Delete><Object><Key>k</Key></Object></Delete>"
    assert said(front.ask("POST", "/corpus?delete", body=document, sec_fetch_site=site)) == (403, "AccessForbidden")
    assert front.get("/corpus/k", sec_fetch_site=site).status == 200, "a link may lead here; a page sees no answer"
    assert front.ask("POST", "/corpus?delete", body=document, sec_fetch_site="none").status == 200


def test_an_allowed_page_writes_wherever_it_comes_from(front: BucketFront) -> None:
    front.reads.change("corpus", cors=(CorsRule(("https://app.example",), ("PUT",)),))
    headers = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    assert front.put("/corpus/k", b"new", headers).status == 200
    method = {**headers, "access-control-request-method": "PUT"}
    assert said(front.ask("DELETE", "/corpus/k", method)) == (403, "AccessForbidden"), "not what it says, what it does"


@pytest.mark.real
def test_a_real_node_knows_its_names(open_node: RealNode, keyed_node: RealNode) -> None:
    target = f"/{BUCKET}/hello.txt"
    port = open_node.endpoint.rpartition(":")[2]
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert open_node.ask("GET", target, {"host": host})[2] == b"hello, world!"
    assert open_node.ask("GET", "/hello.txt", {"host": f"{BUCKET}.localhost:{port}"})[2] == b"hello, world!"
    status, _, body = open_node.ask("GET", target, {"host": f"evil.example:{port}"})
    assert (status, b"hello, world!" in body, b"--domain" in body) == (403, False, True)
    status, _, body = keyed_node.ask("GET", target, {"host": "gpu1.example"})
    assert (status, b"sign the request" in body) == (403, True), "who has identities asks for them, under any name"
