"""Frames between engine and front: any cut of the stream gives the same messages."""

import itertools
import struct
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import Bug, NotFound
from forebay.core.messages import wire
from forebay.core.record import Record
from forebay.core.types import Bucket, RangeSpec

RECORD = Record(7, 100, "v", "e", 1.0, 2.0, b"ETag: x\r\n", False, present=b"\x03")
MESSAGES = [
    wire.Hello(1, 4242),
    wire.OpenRead(1, "corpus", "a/é", RangeSpec(0, 10), version="v", revalidate=True),
    wire.OpenRead(2, "corpus", "b"),
    wire.Consumed(1, 2**40),
    wire.CloseRead(1),
    wire.Touched([7, 0, 3, 8, 1, 2]),
    wire.Suspect("corpus", "k", 7, "pread: EIO"),
    wire.Call(1, "stat", b"\x80"),
    wire.Reported(1, 2, b"\x80"),
    wire.Welcome("node", [wire.VolumeAt("v0", "/data")], [Bucket("corpus", "memory://")]),
    wire.Opened(1, RECORD, 0, 10, hit=True, body=b"0123456789"),
    wire.Landed(1, 0, 4096, "/data/x", 0),
    wire.Withdrawn(1),
    wire.Grown(1, 4096),
    wire.GaveUp(1),
    wire.Failed(1, NotFound("no such key", code="NoSuchKey").to_wire()),
    wire.Answer(1, b"\x80"),
    wire.Dropped([7, 8]),
    wire.Report(1),
    wire.Beat(),
    wire.Acts(12.5),
]


def test_every_message_is_in_these_tests():
    assert {type(message) for message in MESSAGES} == set(typing.get_args(wire.Message))


def test_a_frame_is_a_length_and_a_tagged_array():
    frame = wire.encode(wire.Consumed(3, 9))
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert msgspec.msgpack.decode(frame[4:]) == ["Consumed", 3, 9]


def test_whole_or_byte_by_byte_the_messages_are_the_same():
    stream = b"".join(wire.encode(message) for message in MESSAGES)
    assert list(wire.Frames().feed(stream)) == MESSAGES
    frames = wire.Frames()
    assert [message for at in range(len(stream)) for message in frames.feed(stream[at : at + 1])] == MESSAGES


@settings(max_examples=200)
@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(0, 2000), max_size=8))
def test_any_cut_of_the_stream_gives_the_same_messages(messages, cuts):
    stream = b"".join(wire.encode(message) for message in messages)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    frames, got = wire.Frames(), []
    for start, end in itertools.pairwise(edges):
        got += frames.feed(stream[start:end])
    assert got == messages


def test_a_tail_waits_for_its_rest():
    frame = wire.encode(wire.Report(5))
    frames = wire.Frames()
    assert list(frames.feed(frame + frame[:3])) == [wire.Report(5)]
    assert list(frames.feed(frame[3:])) == [wire.Report(5)]


def test_a_reader_that_stops_in_the_middle_loses_nothing():
    frames = wire.Frames()
    for message in frames.feed(wire.encode(wire.Report(1)) + wire.encode(wire.Report(2))):
        assert message == wire.Report(1)
        break
    assert list(frames.feed(b"")) == [wire.Report(2)]


def test_an_announced_length_beyond_the_limit_is_refused_at_once():
    with pytest.raises(Bug, match="disagree"):
        list(wire.Frames().feed(struct.pack(">I", limits.FRAME_BYTES_MAX + 1)))


def test_a_message_too_big_is_refused_before_it_is_sent():
    with pytest.raises(Bug, match="page or split"):
        wire.encode(wire.Answer(1, bytes(limits.FRAME_BYTES_MAX)))


def test_unknown_messages_and_garbage_are_errors_not_silence():
    for body in (msgspec.msgpack.encode(["Teapot", 1]), b"\xc1", b""):
        with pytest.raises(msgspec.DecodeError):
            list(wire.Frames().feed(struct.pack(">I", len(body)) + body))
