"""Answers are read by the letter: every way of framing a body, and nothing that could be read in two ways."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import Corrupt, Invalid
from forebay.core.messages.http1 import Chunks, Request, build_request, encode_path, parse_head, with_query


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "")).encode()


def test_a_head_says_how_its_body_ends() -> None:
    sized = parse_head(head("HTTP/1.1 200 OK", "Content-Length: 12", 'ETag: "a"'), "GET")
    assert (sized.status, sized.length, sized.chunked, sized.keep_alive) == (200, 12, False, True)
    assert sized.headers["etag"] == '"a"'
    assert parse_head(head("HTTP/1.1 200 OK", "Transfer-Encoding: chunked"), "GET").chunked
    until_close = parse_head(head("HTTP/1.1 200 OK"), "GET")
    assert until_close.length is None
    assert not until_close.keep_alive


def test_answers_that_have_no_body_have_none_whatever_their_head_says() -> None:
    assert parse_head(head("HTTP/1.1 200 OK", "Content-Length: 12"), "HEAD").length == 0
    assert parse_head(head("HTTP/1.1 304 Not Modified", "Content-Length: 12"), "GET").length == 0
    assert parse_head(head("HTTP/1.1 204 No Content"), "DELETE").length == 0


def test_the_other_side_may_close_after_the_answer() -> None:
    assert not parse_head(head("HTTP/1.1 200 OK", "Content-Length: 0", "Connection: close"), "GET").keep_alive
    assert not parse_head(head("HTTP/1.0 200 OK", "Content-Length: 0"), "GET").keep_alive


@pytest.mark.parametrize(
    "lines",
    [
        ("SSH-2.0-OpenSSH_9.2",),
        ("HTTP/1.1 2x0 OK",),
        ("HTTP/1.1 ",),
        ("HTTP/1.1 200 OK", "no colon here"),
        ("HTTP/1.1 200 OK", " folded: line"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "Content-Length: 6"),
        ("HTTP/1.1 200 OK", "Content-Length: 5", "Transfer-Encoding: chunked"),
        ("HTTP/1.1 200 OK", "Transfer-Encoding: gzip, chunked"),
        ("HTTP/1.1 200 OK", "Content-Length: +5"),
        ("HTTP/1.1 200 OK", "Content-Length: ٥"),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(Corrupt):
        parse_head(head(*lines), "GET")


@given(st.binary(max_size=200))
@settings(max_examples=150)
def test_no_bytes_make_the_parser_fail_in_another_way(data: bytes) -> None:
    try:
        parse_head(b"HTTP/1.1 " + data, "GET")
    except Corrupt:
        pass


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), st.integers(1, 40))
@settings(max_examples=150)
def test_chunks_come_together_however_they_are_cut(bodies: list[bytes], piece: int) -> None:
    stream = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\nTrailer: x\r\n\r\nrest"
    chunks, out = Chunks(), b""
    position = 0
    while not chunks.done:
        assert position < len(stream)
        out += chunks.feed(stream[position : position + piece])
        position += piece
    assert out == b"".join(bodies)
    assert b"rest".startswith(chunks.rest)


@pytest.mark.parametrize("stream", [b"zz\r\n", b"3\r\nabcd\r\n", b"\r\n", b"11111111111111111\r\n", b"-1\r\n"])
def test_broken_chunking_is_refused(stream: bytes) -> None:
    with pytest.raises(Corrupt):
        Chunks().feed(stream)


def test_a_chunk_line_that_never_ends_is_refused() -> None:
    with pytest.raises(Corrupt):
        Chunks().feed(b"0" * (limits.HEADER_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("a/b.tar", "/-/v1/objects/x/a/b.tar"),
        ("../a//b", "/-/v1/objects/x/../a//b"),
        ("a b?c#d%e&f", "/-/v1/objects/x/a%20b%3Fc%23d%25e%26f"),
        ("grüße", "/-/v1/objects/x/gr%C3%BC%C3%9Fe"),
        ("a\r\nb", "/-/v1/objects/x/a%0D%0Ab"),
    ],
)
def test_any_key_becomes_one_path(key: str, path: str) -> None:
    assert encode_path("-/v1/objects", "x", key) == path


def test_queries_leave_out_what_is_empty() -> None:
    assert with_query("/x", (("prefix", ""), ("after", "a&b c"))) == "/x?after=a%26b%20c"
    assert with_query("/x", (("prefix", ""),)) == "/x"


def test_line_breaks_do_not_enter_a_request() -> None:
    with pytest.raises(Invalid):
        build_request(Request("GET", "/", (("X", "a\r\nB: c"),)), "h")
    with pytest.raises(Invalid):
        build_request(Request("GET", "/" + "a" * limits.REQUEST_LINE_BYTES_MAX), "h")
