"""Flows without a socket: what they ask, told the answers from a list."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from forebay.client import flows
from forebay.core.errors import Bug, Busy, Corrupt, Denied, Invalid, NotFound, Unavailable
from forebay.core.messages.calls import CachedEntry, CachedPage, JobState
from forebay.core.messages.http1 import Request, Response
from forebay.core.types import Bucket, RangeSpec


def play(flow: flows.Flow[Any], *answers: Response) -> tuple[Any, list[Request]]:
    """The result of the flow, and what it asked."""
    asked: list[Request] = []
    rest = iter(answers)
    try:
        request = next(flow)
        while True:
            asked.append(request)
            request = flow.send(next(rest))
    except StopIteration as end:
        assert next(rest, None) is None, "an answer was not asked for"
        return end.value, asked


def said(value: Any, status: int = 200) -> Response:
    return Response(status, {}, msgspec.json.encode(value))


def test_a_get_says_which_bytes_it_wants_of_which_version() -> None:
    headers = {"content-range": "bytes 5-9/100", "content-length": "5", "etag": '"abc"'}
    (got, body), (asked,) = play(
        flows.get("corpus", "a b", range=RangeSpec(5, 9), etag="abc"), Response(206, headers, b"56789", 5)
    )
    assert (asked.method, asked.target) == ("GET", "/-/v1/objects/corpus/a%20b")
    assert dict(asked.headers) == {"Range": "bytes=5-9", "If-Match": '"abc"'}
    assert (got.size_bytes, got.start, got.body_bytes, got.etag, body) == (100, 5, 5, "abc", b"56789")


@pytest.mark.parametrize("span", ["", "bytes 5-9", "bytes */100", "items 5-9/100", "bytes x-9/100", "bytes 5-9/*"])
def test_a_part_that_does_not_say_which_is_refused(span: str) -> None:
    headers = {"content-range": span} if span else {}
    with pytest.raises(Corrupt, match="Content-Range"):
        play(flows.get("corpus", "a", range=RangeSpec(5, 9)), Response(206, headers, b"56789", 5))


def test_a_bucket_is_put_with_a_check_or_without() -> None:
    bucket = Bucket("data", "s3://data", options={"region": "x"})
    kept, (asked,) = play(flows.bucket_put(bucket, check=True), said(bucket))
    assert kept == bucket
    assert (asked.method, asked.target) == ("PUT", "/-/v1/buckets/data?check=1")
    assert msgspec.json.decode(asked.body, type=Bucket) == bucket
    _, (asked,) = play(flows.bucket_put(bucket, check=False), said(bucket))
    assert asked.target == "/-/v1/buckets/data"


def test_a_job_is_started_with_a_prefix_or_keys() -> None:
    state = JobState("j1", "evict", "corpus")
    found, (asked,) = play(flows.start_job("evict", "corpus", "", ["a", "b"], True), said(state, 202))
    assert found == state
    assert (asked.method, asked.target) == ("POST", "/-/v1/evict")
    assert msgspec.json.decode(asked.body) == {"bucket": "corpus", "keys": ["a", "b"], "dry_run": True}


def test_a_page_of_the_cache_is_asked_for_as_such() -> None:
    page = CachedPage([CachedEntry("a", 1, "e", 0.0, 1)], ["b/"], "b0")
    found, (asked,) = play(flows.cached_page("corpus", "", "/", "A", 10), said(page))
    assert found == page
    assert asked.target == "/-/v1/list/corpus?delimiter=%2F&start_after=A&limit=10&cached=1"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Invalid), (401, Denied), (403, Denied), (404, NotFound), (429, Busy), (500, Bug), (502, Unavailable)],
)
def test_an_answer_without_words_becomes_the_kind_of_its_status(status: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"status {status}"):
        play(flows.status(), Response(status, {}, b"<html>"))


def test_the_nodes_words_are_kept() -> None:
    error = {"error": {"kind": "Busy", "message": "wait a little", "code": "SlowDown", "retry_after_s": 2.5}}
    with pytest.raises(Busy, match="wait a little") as caught:
        play(flows.jobs(), said(error, 503))
    assert (caught.value.code, caught.value.retry_after_s) == ("SlowDown", 2.5)
    with pytest.raises(Bug, match="of tomorrow"):
        play(flows.jobs(), said({"error": {"kind": "NotYetInvented", "message": "of tomorrow"}}, 500))


def test_a_head_that_finds_nothing_has_words_all_the_same() -> None:
    with pytest.raises(NotFound, match="corpus/a does not exist") as caught:
        play(flows.head("corpus", "a"), Response(404, {}))
    assert caught.value.code == "NoSuchKey"


def test_an_answer_of_another_shape_is_refused() -> None:
    for flow in (flows.status(), flows.jobs(), flows.buckets(), flows.node_map(), flows.bucket("a")):
        with pytest.raises(Corrupt, match="expected shape"):
            play(flow, Response(200, {}, b'"hello"'))


def test_a_node_that_is_not_ready_is_an_answer_and_no_error() -> None:
    answer, _ = play(flows.ready(), Response(503, {}, b'{"ready":false}'))
    assert not answer.ok
