"""Messages of the host door: whatever way the bytes are cut, the same messages arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import Corrupt, NotFound
from forebay.core.messages import doorwire
from forebay.core.messages.doorwire import (
    DoorClosed,
    DoorCold,
    DoorDropped,
    DoorError,
    DoorFile,
    DoorHello,
    DoorInline,
    DoorOpen,
    DoorOpened,
    DoorUsed,
    DoorWelcome,
    Frames,
)


def feed(frames: Frames[Any], data: bytes, cuts: list[int]) -> list[Any]:
    """Receive `data` in pieces of these sizes (over and over), and never more than there is room."""
    messages, at, turn = [], 0, 0
    while at < len(data):
        with frames.room() as room:
            size = min(cuts[turn % len(cuts)], len(room), len(data) - at)
            assert size > 0
            room[:size] = data[at : at + size]
        messages += frames.wrote(size)
        at, turn = at + size, turn + 1
    return messages


asks = st.one_of(
    st.builds(DoorHello, st.text(max_size=20)),
    st.builds(DoorOpen, st.integers(1, 2**40), st.lists(st.tuples(st.text(), st.text()), max_size=5)),
    st.builds(DoorUsed, st.lists(st.integers(0, 2**62), max_size=9), st.integers(0, 9), st.integers(0, 9)),
    st.builds(DoorClosed, st.lists(st.integers(0, 2**62), max_size=9)),
)
results = st.one_of(
    st.builds(DoorFile, st.integers(1, 2**62), st.integers(1, 2**45), st.text(), st.text(), st.floats(0, 1e18)),
    st.builds(DoorInline, st.binary(max_size=limits.INLINE_BYTES_MAX), st.text(), st.text()),
    st.just(DoorCold()),
    st.just(DoorError(NotFound("no such bucket: add it", code="NoSuchBucket").to_wire())),
)
answers = st.one_of(
    st.builds(DoorWelcome, st.text()),
    st.builds(DoorOpened, st.integers(1, 2**40), st.lists(results, max_size=5)),
    st.builds(DoorDropped, st.lists(st.integers(0, 2**62))),
)
cuts = st.lists(st.integers(1, 100_000), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(asks, max_size=6), cuts)
def test_what_a_client_says_arrives(said: list[Any], cuts: list[int]) -> None:
    assert feed(doorwire.ask_frames(), b"".join(map(doorwire.encode, said)), cuts) == said


@settings(max_examples=60, deadline=None)
@given(st.lists(answers, max_size=6), cuts)
def test_what_a_front_says_arrives(said: list[Any], cuts: list[int]) -> None:
    assert feed(doorwire.answer_frames(), b"".join(map(doorwire.encode, said)), cuts) == said


def test_the_longest_messages_fit_their_limits() -> None:
    names = [("b" * limits.BUCKET_NAME_BYTES_MAX, "k" * limits.KEY_BYTES_MAX)] * limits.DOOR_FILES_MAX
    ask = DoorOpen(2**63, names)
    assert feed(doorwire.ask_frames(), doorwire.encode(ask), [1 << 20]) == [ask]
    body = DoorInline(b"x" * limits.INLINE_BYTES_MAX, "e" * 200, "v" * 200)
    answer = DoorOpened(2**63, [body] * limits.DOOR_FILES_MAX)
    assert feed(doorwire.answer_frames(), doorwire.encode(answer) * 3, [65_536]) == [answer] * 3


def test_what_is_no_message_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(Corrupt, match="was announced"):
        feed(doorwire.ask_frames(), b"\xff\xff\xff\xffGET / HTTP/1.1\r\n", [1000])
    for junk in (b"\x03\0\0\0abc", b"\x01\0\0\0\xc1", b"\0\0\0\0", bytes(doorwire.encode(DoorDropped([1])))):
        with pytest.raises(Corrupt, match="cannot be read"):
            feed(doorwire.ask_frames(), junk, [7])
