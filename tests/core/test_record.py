"""The index record: what is present, and the header lines that were made in advance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.record import (
    Record,
    State,
    blocks_in,
    build_head,
    decode_record,
    encode_record,
    header_bytes,
    header_text,
    info_of,
    make_record,
)
from forebay.core.types import ObjectInfo


def record(size, present=b"", complete=False, block_bytes=10):
    return Record(1, size, "v", "e", 0.0, 0.0, b"", complete, present=present, block_bytes=block_bytes)


@settings(max_examples=500)
@given(st.sets(st.integers(0, 11)), st.integers(0, 120), st.integers(0, 120))
def test_has_is_true_exactly_when_every_byte_is_there(blocks, start, end):
    bits = sum(1 << block for block in blocks).to_bytes(2, "little").rstrip(b"\0")
    expected = all(position // 10 in blocks for position in range(start, end))
    assert record(120, bits).has(start, end) == expected


@given(st.integers(0, 120), st.integers(0, 120))
def test_a_complete_object_has_everything(start, end):
    assert record(120, complete=True).has(start, end)


def test_blocks_of_an_object():
    assert [blocks_in(size, 10) for size in (0, 1, 9, 10, 11, 20)] == [0, 1, 1, 1, 2, 2]


@given(
    st.builds(
        Record,
        st.integers(0, 2**63),
        st.integers(0, 2**50),
        st.text(),
        st.text(),
        st.floats(0, 1e12),
        st.floats(0, 1e12),
        st.binary(),
        st.booleans(),
        st.sampled_from([State.CLEAN, State.DIRTY | State.PINNED, State.UNVERIFIED]),
        st.integers(0, 2**31),
        st.none() | st.binary(),
        st.binary(),
        st.text(),
        st.integers(1, 2**30),
    )
)
def test_a_record_survives_the_index(made):
    assert decode_record(encode_record(made)) == made


def test_the_head_holds_what_a_response_needs():
    info = ObjectInfo(
        "k", 5, "v1", "abc-2", 1_700_000_000.9, (("content-type", "image/png"), ("x-amz-meta-owner", "me"))
    )
    assert build_head(info).decode().split("\r\n") == [
        'ETag: "abc-2"',
        "Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT",
        "Accept-Ranges: bytes",
        "Content-Type: image/png",
        "x-amz-meta-owner: me",
        "",
    ]
    assert b"Content-Type: binary/octet-stream\r\n" in build_head(ObjectInfo("k", 5, "v", "e", 0.0))


@given(st.text(), st.text())
def test_no_stored_header_can_split_a_response(name, value):
    names = name.lower().replace(":", "").encode("utf-8", "replace").decode()
    values = value.encode("utf-8", "replace").decode()
    head = build_head(ObjectInfo("k", 5, "v", "e", 0.0, (("content-type", "a/b"), (names, values))))
    lines = head.split(b"\r\n")
    assert lines.pop() == b""
    assert len(lines) in (4, 5)
    assert not any(b"\r" in line or b"\n" in line or b"\0" in line for line in lines)


@given(st.binary().filter(lambda raw: not any(byte < 32 or byte == 127 for byte in raw)))
def test_any_value_comes_back_as_its_bytes(raw):
    text = header_text(raw)
    assert header_bytes(text) == raw
    assert text.isascii() or text.encode() == raw


@pytest.mark.parametrize("raw", [b"Hello World\xe9", b"\xff", "ü".encode(), b"plain", b"", b"=?ISO-8859-1?B?6Q==?="])
def test_a_record_keeps_values_that_are_not_utf_8(raw):
    info = ObjectInfo("k", 5, "v", "e", 0.0, (("content-type", "a/b"), ("x-amz-meta-a", header_text(raw))))
    assert b"x-amz-meta-a: " + raw + b"\r\n" in build_head(info)
    assert info_of(make_record(info, 0.0), "k") == info


def test_no_word_of_a_backend_can_split_a_response():
    for word in ("=?ISO-8859-1?B?DQpYOiB5?=", "=?ISO-8859-1?B?AA==?=", "=?ISO-8859-1?B?6Q=?=", "=?ISO-8859-1?B?YQ==?="):
        assert header_bytes(word) == word.encode()
        assert header_text(word.encode()) == word
