"""Errors: few kinds, each with its facts, the same on both sides of the wire."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core import errors
from forebay.core.errors import KINDS, Bug, ErrorOnWire, ForebayError, NotFound, from_wire


def test_every_kind_is_listed_once_under_its_own_name():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForebayError)]
    assert set(KINDS.values()) == set(kinds) - {ForebayError}
    assert all(name == kind.__name__ == kind("…").kind for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_says_whether_retrying_helps_and_which_status_it_is(kind):
    assert KINDS[kind].retry in ("never", "same", "another", "later")
    assert 400 <= KINDS[kind].status <= 599
    assert KINDS[kind].__doc__, "the docstring says what to do"


@given(st.sampled_from(sorted(KINDS)), st.text(), st.text(), st.floats(0, 1e6))
def test_an_error_survives_the_wire(kind, message, code, after_s):
    error = KINDS[kind](message, code=code, retry_after_s=after_s)
    packed = msgspec.msgpack.encode(error.to_wire())
    back = from_wire(msgspec.msgpack.decode(packed, type=ErrorOnWire))
    assert type(back) is type(error)
    assert (back.message, back.code, back.retry_after_s, str(back)) == (message, code, after_s, str(error))


def test_a_kind_of_a_newer_peer_is_a_bug_with_its_message_kept():
    back = from_wire(ErrorOnWire("Teapot", "short and stout", "T", 1.0))
    assert isinstance(back, Bug)
    assert back.message == "short and stout"


def test_not_found_is_what_file_code_expects():
    with pytest.raises(FileNotFoundError, match="no such key"):
        raise NotFound("no such key")
    assert str(NotFound("no such key", code="NoSuchKey")) == "no such key"
