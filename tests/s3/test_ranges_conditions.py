"""Range and If-* headers, as tables: what was sent, what it means."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.core.s3rules.conditions import Conditions, parse_http_date, parse_range, range_applies
from forebay.core.types import RangeSpec

RANGES = """
    bytes=0-9            of 100   -> 0..10
    bytes=0-0            of 100   -> 0..1
    bytes=90-            of 100   -> 90..100
    bytes=-10            of 100   -> 90..100
    bytes=-1000          of 100   -> 0..100
    bytes=90-1000        of 100   -> 90..100
    bytes=99-99          of 100   -> 99..100
    bytes=0-             of 100   -> 0..100
    BYTES=5-6            of 100   -> 5..7
    bytes= 5 - 6         of 100   -> 5..7
    bytes=0005-0006      of 100   -> 5..7
    bytes=0-99999999999999999999999999   of 100 -> 0..100
    bytes=-99999999999999999999999999    of 100 -> 0..100
    bytes=100-           of 100   -> unsatisfiable
    bytes=100-200        of 100   -> unsatisfiable
    bytes=99999999999999999999999999-    of 100 -> unsatisfiable
    bytes=-0             of 100   -> unsatisfiable
    bytes=0-             of 0     -> unsatisfiable
    bytes=0-0            of 0     -> unsatisfiable
    bytes=-5             of 0     -> unsatisfiable
    bytes=0-1,3-4        of 100   -> whole
    bytes=0-1,           of 100   -> whole
    bytes=5-3            of 100   -> whole
    bytes=-              of 100   -> whole
    bytes=               of 100   -> whole
    bytes                of 100   -> whole
    bytes=a-b            of 100   -> whole
    bytes=1-2x           of 100   -> whole
    bytes=--5            of 100   -> whole
    bytes=+1-2           of 100   -> whole
    bytes=1.0-2          of 100   -> whole
    bytes=٣-٤            of 100   -> whole
    items=0-9            of 100   -> whole
    0-9                  of 100   -> whole
"""


def _rows(table: str) -> list[list[str]]:
    return [[part.strip() for part in line.replace(" of ", "->").split("->")] for line in table.strip().splitlines()]


@pytest.mark.parametrize(("header", "size", "meaning"), _rows(RANGES))
def test_what_a_range_header_means(header: str, size: str, meaning: str) -> None:
    spec = parse_range(header)
    if meaning == "whole":
        assert spec is None
    elif meaning == "unsatisfiable":
        assert spec is not None
        with pytest.raises(Invalid) as caught:
            spec.resolve(int(size))
        assert caught.value.code == "InvalidRange"
        assert caught.value.size_bytes == int(size)
    else:
        assert spec is not None
        start, end = spec.resolve(int(size))
        assert f"{start}..{end}" == meaning


def _slice_of(spec: RangeSpec, data: bytes) -> bytes:
    """The dumb way to say what a range is."""
    if spec.first is None:
        return data[-spec.last :] if spec.last else b""
    return data[spec.first :] if spec.last is None else data[spec.first : spec.last + 1]


@given(st.binary(max_size=40), st.one_of(st.none(), st.integers(0, 60)), st.one_of(st.none(), st.integers(0, 60)))
@settings(max_examples=300)
def test_a_resolved_range_is_a_slice_and_a_refused_one_is_empty(
    data: bytes, first: int | None, last: int | None
) -> None:
    spec = parse_range(f"bytes={'' if first is None else first}-{'' if last is None else last}")
    if spec is None:
        assert (first is None and last is None) or (first is not None and last is not None and last < first)
        return
    try:
        start, end = spec.resolve(len(data))
    except Invalid:
        assert _slice_of(spec, data) == b""
    else:
        assert data[start:end] == _slice_of(spec, data) != b""


T = "Tue, 15 Nov 1994 12:45:26 GMT"  # the object's modification time
T_BEFORE = "Tue, 15 Nov 1994 12:45:25 GMT"
T_AFTER = "Tue, 15 Nov 1994 12:45:27 GMT"
MODIFIED_S = 784903526.75  # the fraction cannot be said in a header and must not matter

CONDITIONS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    # If-Match: strong comparison, lists, bare tags, *
    ({"if_match": '"abc"'}, 200),
    ({"if_match": "abc"}, 200),
    ({"if_match": "*"}, 200),
    ({"if_match": '"x", "abc"'}, 200),
    ({"if_match": '"x" , abc'}, 200),
    ({"if_match": '"x"'}, 412),
    ({"if_match": 'W/"abc"'}, 412),
    ({"if_match": '"x,abc"'}, 412),
    ({"if_match": ""}, 412),
    # If-None-Match: weak comparison
    ({"if_none_match": '"abc"'}, 304),
    ({"if_none_match": "abc"}, 304),
    ({"if_none_match": 'W/"abc"'}, 304),
    ({"if_none_match": '"x", W/"abc"'}, 304),
    ({"if_none_match": "*"}, 304),
    ({"if_none_match": '"x"'}, 200),
    ({"if_none_match": ""}, 200),
    # times, in whole seconds
    ({"if_modified_since": T}, 304),
    ({"if_modified_since": T_AFTER}, 304),
    ({"if_modified_since": T_BEFORE}, 200),
    ({"if_unmodified_since": T}, 200),
    ({"if_unmodified_since": T_AFTER}, 200),
    ({"if_unmodified_since": T_BEFORE}, 412),
    # dates that are none are ignored
    ({"if_modified_since": "yesterday"}, 200),
    ({"if_unmodified_since": "yesterday"}, 200),
    ({"if_modified_since": "784903526"}, 200),
    # precedence: the tag decides, the date beside it is not looked at
    ({"if_match": '"abc"', "if_unmodified_since": T_BEFORE}, 200),
    ({"if_match": '"x"', "if_unmodified_since": T_AFTER}, 412),
    ({"if_none_match": '"abc"', "if_modified_since": T_BEFORE}, 304),
    ({"if_none_match": '"x"', "if_modified_since": T_AFTER}, 200),
    # If-Match is judged first
    ({"if_match": '"x"', "if_none_match": '"abc"'}, 412),
    ({"if_match": '"abc"', "if_none_match": '"abc"'}, 304),
    ({"if_match": '"abc"', "if_modified_since": T}, 304),
    ({"if_unmodified_since": T_BEFORE, "if_none_match": '"abc"'}, 412),
    ({"if_unmodified_since": T, "if_modified_since": T}, 304),
]


@pytest.mark.parametrize(("headers", "verdict"), CONDITIONS)
def test_what_conditions_mean_for_version_abc(headers: dict[str, str], verdict: int) -> None:
    assert Conditions(**headers).judge("abc", MODIFIED_S) == verdict


def test_an_object_without_or_with_a_weak_tag_never_matches_strongly() -> None:
    assert Conditions(if_match='""').judge("", MODIFIED_S) == 412
    assert Conditions(if_match='"abc"').judge('W/"abc"', MODIFIED_S) == 412
    assert Conditions(if_none_match='"abc"').judge('W/"abc"', MODIFIED_S) == 304


def test_if_range_switches_the_range_off_unless_it_names_this_version() -> None:
    for header, applies in (
        (None, True),
        ('"abc"', True),
        ('"x"', False),
        ('W/"abc"', False),
        ("*", False),
        (T, True),
        (T_BEFORE, False),
        (T_AFTER, False),
        ("nonsense", False),
        ("", False),
    ):
        assert range_applies(header, "abc", MODIFIED_S) is applies, header


def test_dates_in_all_three_forms_and_nothing_else() -> None:
    for text in (T, "Tuesday, 15-Nov-94 12:45:26 GMT", "Tue Nov 15 12:45:26 1994"):
        assert parse_http_date(text) == 784903526
    for text in (
        "",
        T.replace("GMT", "UTC"),
        T.replace("Nov", "Abc"),
        T.replace("15", "45"),
        T.replace("12:", "24:"),
        "1994-11-15",
    ):
        assert parse_http_date(text) is None


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_no_header_text_raises(text: str) -> None:
    parse_range(text)
    parse_range(f"bytes={text}")
    parse_http_date(text)
    range_applies(text, "abc", MODIFIED_S)
    for name in ("if_match", "if_none_match", "if_modified_since", "if_unmodified_since"):
        assert Conditions(**{name: text}).judge("abc", MODIFIED_S) in (200, 304, 412)
