"""Bodies in aws-chunked coding: every way to cut them, every way to spoil them."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.s3rules.chunked import AwsChunked
from forebay.core.s3rules.signedbody import ChunkVerifier
from forebay.core.s3rules.sigv4 import Verified

SEED = Verified(
    "AKID", "us-east-1", b"", False, b"20130524T000000Z", b"20130524/us-east-1/s3/aws4_request", b"0" * 64, b"k"
)


class Recorder(ChunkVerifier):
    """Signatures of its own making: each depends on all before it, as real ones do."""

    def __init__(self) -> None:
        self.before = b""

    def check(self, sha256_hex: str, signature: bytes) -> None:
        expected = hashlib.sha256(self.before + sha256_hex.encode()).hexdigest().encode()
        if signature != expected:
            raise Denied("wrong", code="SignatureDoesNotMatch")
        self.before = signature

    def check_trailer(self, fields: object, signature: bytes) -> None:
        if signature != hashlib.sha256(self.before + b"trailer").hexdigest().encode():
            raise Denied("wrong", code="SignatureDoesNotMatch")


def encode(
    chunks: list[bytes], *, signed: bool = False, trailers: list[bytes] | None = None, end: bytes = b"\r\n"
) -> bytes:
    """A body as a client writes it."""
    before, parts = b"", []
    for chunk in [*chunks, b""]:
        before = hashlib.sha256(before + hashlib.sha256(chunk).hexdigest().encode()).hexdigest().encode()
        extension = b";chunk-signature=" + before if signed else b""
        parts.append(b"%x%b\r\n" % (len(chunk), extension) + (chunk + b"\r\n" if chunk else b""))
    parts += [line + b"\r\n" for line in trailers or []]
    if signed and trailers is not None:
        parts.append(b"x-amz-trailer-signature:" + hashlib.sha256(before + b"trailer").hexdigest().encode() + b"\r\n")
    return b"".join(parts) + end


def decode(raw: bytes, decoder: AwsChunked, cuts: list[int] | None = None) -> bytes:
    found = []
    edges = [0, *sorted(cuts or []), len(raw)]
    for start, stop in pairwise(edges):
        found += [bytes(piece) for piece in decoder.feed(memoryview(raw)[start:stop])]
    decoder.finish()
    return b"".join(found)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=80), max_size=5),
    signed=st.booleans(),
    trailers=st.booleans(),
    ended=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150)
def test_however_the_bytes_are_cut_the_body_comes_out(
    chunks: list[bytes], signed: bool, trailers: bool, ended: bool, seed: int
) -> None:
    lines = [b"x-amz-checksum-crc32:AAAAAA=="] if trailers else None
    raw = encode(chunks, signed=signed, trailers=lines, end=b"\r\n" if ended else b"")
    cuts = sorted(random.Random(seed).choices(range(len(raw) + 1), k=12))
    for where in (None, cuts, list(range(len(raw)))):
        decoder = AwsChunked(Recorder() if signed else None, signed_trailer=signed and trailers)
        assert decode(raw, decoder, where) == b"".join(chunks)
        assert decoder.trailers == ({b"x-amz-checksum-crc32": b"AAAAAA=="} if trailers else {})


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=3),
    at=st.integers(0, 1 << 30),
    byte=st.integers(1, 255),
)
@settings(max_examples=150)
def test_a_changed_byte_of_a_signed_body_never_passes_as_the_body(chunks: list[bytes], at: int, byte: int) -> None:
    """Where it changes nothing that is signed (a letter's case, a blank), the same body comes out."""
    raw = bytearray(encode(chunks, signed=True, trailers=[]))
    raw[at % len(raw)] ^= byte
    try:
        body = decode(bytes(raw), AwsChunked(Recorder(), signed_trailer=True))
    except ForebayError as refused:
        code = refused.code
    else:
        assert body == b"".join(chunks)
        return
    assert code in ("IncompleteBody", "SignatureDoesNotMatch", "MalformedTrailerError")


@given(
    st.lists(
        st.one_of(st.sampled_from([b"\r\n", b"0", b"5", b"a:b", b";chunk-signature=", b"\n"]), st.binary(max_size=9))
    )
)
@settings(max_examples=200)
def test_any_bytes_are_a_body_or_refused(pieces: list[bytes]) -> None:
    decoder = AwsChunked()
    kind = "Invalid"
    try:
        for piece in pieces:
            assert sum(len(part) for part in decoder.feed(memoryview(piece))) <= len(piece)
        decoder.finish()
    except ForebayError as refused:
        kind = refused.kind
    assert kind == "Invalid"


def test_a_real_signature_is_compared() -> None:
    with pytest.raises(Denied, match="signature"):
        decode(encode([b"data"], signed=True), AwsChunked(ChunkVerifier(SEED)))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"5\r\nabc",
        b"5\r\nabcde\r\n",
        b"5\r\nabcdef\r\n0\r\n\r\n",
        b"5\nabcde\r\n0\r\n\r\n",
        b"xyz\r\n",
        b"-1\r\n\r\n",
        b"0\r\n\r\nmore",
        b"0\r\nx-amz-checksum-crc32",
        b"1" * 2000,
        b"ffffffffffffffffff\r\n",
        b"5;chunk-signature=short\r\nabcde\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_whole_body_is_said_to_be_incomplete(raw: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        decode(raw, AwsChunked())
    assert caught.value.code == "IncompleteBody"


@pytest.mark.parametrize("lines", [[b"no colon"], [b"a:1", b"a:2"], [b"a:\x00"], [b"n%d:1" % n for n in range(20)]])
def test_a_trailer_that_is_none_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(Invalid) as caught:
        decode(encode([b"x"], trailers=lines), AwsChunked())
    assert caught.value.code == "MalformedTrailerError"


def test_a_signed_trailer_must_be_there() -> None:
    with pytest.raises(Denied):
        decode(encode([b"x"], signed=True), AwsChunked(Recorder(), signed_trailer=True))


def test_unsigned_chunks_do_not_pass_where_signed_ones_are_due() -> None:
    with pytest.raises(Denied):
        decode(encode([b"x"]), AwsChunked(Recorder()))
