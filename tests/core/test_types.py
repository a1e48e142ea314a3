"""Values that come from outside: what is accepted, and what a range means."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.core.types import (
    FRESH_IMMUTABLE,
    Bucket,
    ObjectInfo,
    RangeSpec,
    check_bucket_name,
    check_key,
    format_freshness,
    parse_freshness,
)


@pytest.mark.parametrize("name", ["abc", "a-b.c", "0ab", "a" * 63, "xn--bcher-kva"])
def test_bucket_names_that_s3_accepts(name):
    assert check_bucket_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "ab", "a" * 64, "Abc", "a_b", "-ab", "ab-", ".ab", "ab.", "a..b", "1.2.3.4", "a/b", "abç", "ab\n"]
)
def test_bucket_names_that_s3_refuses(name):
    with pytest.raises(Invalid) as refused:
        check_bucket_name(name)
    assert refused.value.code == "InvalidBucketName"


@pytest.mark.parametrize("key", ["a", "..", "a//b", "/", "\x00", "日本", "é" * 512, "a" * 1024, " "])
def test_any_character_may_be_in_a_key(key):
    assert check_key(key) == key


@pytest.mark.parametrize(
    "key, code", [("", "InvalidArgument"), ("é" * 513, "KeyTooLongError"), ("\udcff", "InvalidURI")]
)
def test_keys_that_are_refused(key, code):
    with pytest.raises(Invalid) as refused:
        check_key(key)
    assert refused.value.code == code


def oracle(spec: RangeSpec, size: int) -> list[int] | None:
    """Every byte position the range means, by looking at each; None: unsatisfiable."""
    if spec.first is None:
        wanted = [at for at in range(size) if at >= size - (spec.last or 0)]
    else:
        wanted = [at for at in range(size) if at >= spec.first and (spec.last is None or at <= spec.last)]
    return wanted or None


@settings(max_examples=1000)
@given(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30), st.integers(0, 25))
def test_a_range_means_what_the_rfc_says(first, last, size):
    spec = RangeSpec(first, last)
    expected = oracle(spec, size)
    if expected is None:
        with pytest.raises(Invalid) as refused:
            spec.resolve(size)
        assert refused.value.code == "InvalidRange"
    else:
        assert list(range(*spec.resolve(size))) == expected


@pytest.mark.parametrize("text, seconds", [("always", 0), ("60s", 60), ("1.5m", 90), ("2h", 7200), ("1d", 86400)])
def test_freshness_is_read_and_written(text, seconds):
    assert parse_freshness(text) == seconds
    assert parse_freshness(format_freshness(seconds)) == seconds


def test_immutable_is_its_own_word():
    assert parse_freshness("immutable") == FRESH_IMMUTABLE
    assert format_freshness(FRESH_IMMUTABLE) == "immutable"


@pytest.mark.parametrize("text", ["", "60", "s", "-1s", "1w", "60 s", "forever", "1e3s"])
def test_other_freshness_is_refused_with_what_to_write(text):
    with pytest.raises(Invalid, match="use immutable, always"):
        parse_freshness(text)


def test_values_travel_and_versions_may_mix():
    info = ObjectInfo("k", 5, "v1", "etag", 12.5, (("content-type", "text/plain"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ObjectInfo) == info
    newer = msgspec.json.encode({"name": "abc", "url": "memory://", "invented_later": 1})
    assert msgspec.json.decode(newer, type=Bucket) == Bucket("abc", "memory://")
