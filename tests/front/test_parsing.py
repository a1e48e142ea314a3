"""Heads and bodies: what is accepted means one thing, and everything else is refused."""

from __future__ import annotations

import contextlib

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import ForebayError, Invalid, NotSupported
from forebay.node.front.http.parser import Chunked, Fields, check_host, parse_fields, parse_line


def test_a_head_is_understood() -> None:
    fields = parse_fields(b"Host: localhost\r\nRange:bytes=0-1  \r\nX-Two: a\r\nx-two:\tb\r\nConnection: Keep-Alive, x")
    assert fields.headers == {
        b"host": b"localhost",
        b"range": b"bytes=0-1",
        b"x-two": b"a,b",
        b"connection": b"Keep-Alive, x",
    }
    assert (fields.keep_alive, fields.length_bytes, fields.expects_continue) == (True, 0, False)
    assert parse_line(b"GET /a%20b?c=d HTTP/1.1") == (b"GET", b"/a%20b?c=d", b"", True)
    assert parse_line(b"GET http://h:1/a?b HTTP/1.0") == (b"GET", b"/a?b", b"h:1", False)
    assert parse_line(b"GET http://h HTTP/1.1") == (b"GET", b"/", b"h", True)
    assert parse_fields(b"Content-Length: 12\r\nExpect: 100-Continue").expects_continue
    assert parse_fields(b"Transfer-Encoding: CHUNKED").length_bytes is None
    assert parse_fields(b"Content-Length: 0012").length_bytes == 12
    assert parse_fields(b"").headers == {}


@pytest.mark.parametrize(
    "block",
    [
        b"Host : a",  # a blank before the colon
        b" Host: a",
        b"Host: a\r\n folded",
        b"Host: a\nX: b",
        b"Host: a\rX: b",
        b"Host: a\r\n\r\nX: b",
        b"Host: a\x00b",
        b"Host: a\x7fb",
        b"no colon",
        b": empty",
        b"Ho(st: a",
        b"H\xc3\xb6st: a",
        b"Host: a\r\nHost: a",
        b"Authorization: a\r\nauthorization: b",
        b"Content-Length: 1\r\nContent-Length: 1",
        b"Content-Length: 1, 1",
        b"Content-Length: +1",
        b"Content-Length: 1_0",
        b"Content-Length: -1",
        b"Content-Length: 0x1",
        b"Content-Length: ",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: \xb2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(block: bytes) -> None:
    with pytest.raises(Invalid):
        parse_fields(block)


@pytest.mark.parametrize(
    "coding", [b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked", b"chunked;a=b", b""]
)
def test_no_transfer_coding_but_chunked(coding: bytes) -> None:
    with pytest.raises(NotSupported):
        parse_fields(b"Transfer-Encoding: " + coding)


@pytest.mark.parametrize(
    "line",
    [
        b"GET /",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b" GET / HTTP/1.1",
        b"GET /a b HTTP/1.1",
        b"GET /\x00 HTTP/1.1",
        b"GET /\xc3\xa9 HTTP/1.1",
        b"GET /a#b HTTP/1.1",
        b"GET a HTTP/1.1",
        b"GET * HTTP/1.1",
        b"GET ftp://h/ HTTP/1.1",
        b"G\x01T / HTTP/1.1",
        b"G(T / HTTP/1.1",
        b"GET / HTTP/1.2x",
        b"GET / http/1.1",
        b"GET\t/ HTTP/1.1",
        b"",
    ],
)
def test_lines_that_are_none(line: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        parse_line(line)
    assert caught.value.code == "BadRequest"


def test_versions_that_are_not_served_are_told_apart_from_nonsense() -> None:
    for version in (b"HTTP/2.0", b"HTTP/1.2", b"HTTP/0.9"):
        with pytest.raises(Invalid) as caught:
            parse_line(b"GET / " + version)
        assert caught.value.code == "VersionNotSupported"


def test_a_host_is_required_and_looked_at() -> None:
    check_host(parse_fields(b"Host: [::1]:9400"), True)
    check_host(Fields({}), False)
    for fields in (Fields({}), parse_fields(b"Host: a b"), parse_fields(b"Host: a/b"), parse_fields(b"Host: a@b")):
        with pytest.raises(Invalid):
            check_host(fields, True)


def test_too_many_headers_and_too_long_ones() -> None:
    many = b"\r\n".join(b"X-%d: a" % number for number in range(limits.HEADERS_MAX))
    assert len(parse_fields(many).headers) == limits.HEADERS_MAX
    for block in (many + b"\r\nY: b", b"X: " + b"a" * limits.HEADER_BYTES_MAX):
        with pytest.raises(Invalid) as caught:
            parse_fields(block)
        assert caught.value.code == "HeadersTooLarge"


# --- chunked bodies ---------------------------------------------------------------------------------------------------
def feed(data: bytes, step: int) -> tuple[bytes, bytes, bool]:
    """(body, rest, done) when `data` comes in pieces of `step` bytes."""
    chunked, body = Chunked(), b""
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        pieces, used = chunked.feed(piece)
        body += b"".join(pieces)
        if chunked.done:
            return body, data[at + used :], True
        assert used == len(piece)
    return body, b"", False


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_chunked_body_comes_out_whole_however_it_arrives(step: int) -> None:
    data = b"5\r\nhello\r\n00A;ext=1\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\nGET /next"
    assert feed(data, step) == (b"hello0123456789", b"GET /next", True)
    assert feed(data[:20], step)[2] is False


@pytest.mark.parametrize(
    "data",
    [
        b"5\nhello\n0\n\n",
        b"5\r\nhelloX\r\n",
        b"\r\nhello",
        b"-5\r\n",
        b"+5\r\nhello",
        b"0x5\r\nhello",
        b"5 5\r\n",
        b"5\x00\r\n",
        b"5;\x01\r\n",
        b"1000000000000000\r\n",
        b"g\r\n",
        b"5" + b" " * 300,
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n" + b"X: " + b"y" * 5000,
        b"0\r\n" + b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 1200,
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_bad_chunking_is_refused(data: bytes, step: int) -> None:
    with pytest.raises(Invalid):
        feed(data, step)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.integers(1, 50), st.binary(max_size=10))
@settings(max_examples=150, deadline=None)
def test_any_chunking_of_any_body(pieces: list[bytes], step: int, tail: bytes) -> None:
    data = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n" + tail
    assert feed(data, step) == (b"".join(pieces), tail, True)


# --- another parser as an oracle -------------------------------------------------------------------------------------
class Oracle:
    """httptools' view of the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.url, self.headers, self.complete = b"", [], 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_message_complete(self) -> None:
        self.complete += 1


_ALPHABET = st.sampled_from(
    [b"GET", b"HEAD", b" ", b"/", b"a", b"%20", b"?", b"HTTP/1.1", b"HTTP/1.0", b"\r\n", b"\n", b"\r", b":", b"Host",
     b"h", b"Content-Length", b"0", b"7", b"Transfer-Encoding", b"chunked", b"\t", b"\x00", b"\x80", b"Connection",
     b"close", b",", b"x-y"]
)  # fmt: skip


@given(st.lists(_ALPHABET, max_size=30))
@example([b"GET", b" ", b"/", b" ", b"HTTP/1.1", b"\r\n", b"Host", b":", b"h", b"\r\n", b"x-y", b":", b" ", b"a"])
@settings(max_examples=400, deadline=None)
def test_what_we_accept_another_parser_reads_alike(parts: list[bytes]) -> None:
    head = b"".join(parts)
    if b"\r\n\r\n" in head:
        return
    line, _, block = head.partition(b"\r\n")
    try:
        method, target, _, http11 = parse_line(line)
        fields = parse_fields(block)
        check_host(fields, http11)
    except ForebayError:
        return
    with contextlib.suppress(httptools.HttpParserInvalidMethodError):
        oracle = Oracle(head + b"\r\n\r\n")
        assert oracle.parser.get_method() == method
        assert oracle.url == target
        assert set(fields.headers) == {name for name, _ in oracle.headers}
        assert (oracle.complete == 1) == (fields.length_bytes == 0)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise_anything_but_our_errors(data: bytes) -> None:
    for function in (parse_fields, parse_line, lambda d: Chunked().feed(d)):
        with contextlib.suppress(ForebayError):
            function(data)
