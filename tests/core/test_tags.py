"""Tags: what may be one, and how they are spelt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.s3rules.tags import check_tags, format_tags, parse_tags, tags_among, with_tags, without_tags


def test_tags_come_as_a_query_string():
    assert parse_tags("project=blue+sky&stage=a%2Fb%2B&empty=&bare") == (
        ("project", "blue sky"),
        ("stage", "a/b+"),
        ("empty", ""),
        ("bare", ""),
    )
    assert format_tags(parse_tags("project=blue+sky&bare")) == "project=blue%20sky&bare="
    assert parse_tags("") == ()
    assert format_tags(()) == ""


@pytest.mark.parametrize(
    "text, words",
    [
        ("&".join(f"k{n}=v" for n in range(11)), "greater than 10"),
        ("k" * 129 + "=v", "TagKey"),
        ("=v", "TagKey"),
        ("k=" + "v" * 257, "TagValue"),
        ("k=%22", "not allowed"),
        ("k%00=v", "not allowed"),
        ("aws:k=v", "System tags"),
        ("k=1&k=2", "twice"),
    ],
)
def test_what_s3_would_not_keep_is_refused(text, words):
    with pytest.raises(Invalid, match=words) as caught:
        parse_tags(text)
    assert caught.value.code == "InvalidTag"


def test_the_limits_themselves_are_allowed():
    most = [("k" * limits.TAG_KEY_CHARS_MAX, "v" * limits.TAG_VALUE_CHARS_MAX)]
    assert check_tags(most + [(f"k{n}", "ü") for n in range(limits.TAGS_MAX - 1)])


def test_tags_stand_among_stored_headers():
    headers = (("content-type", "a/b"), ("x-amz-meta-a", "b"))
    tagged = with_tags(headers, "k=v&l=")
    assert tagged == (*headers, ("x-amz-tagging", "k=v&l="), ("x-amz-tagging-count", "2"))
    assert tags_among(tagged) == "k=v&l="
    assert with_tags(tagged, "m=n") == (*headers, ("x-amz-tagging", "m=n"), ("x-amz-tagging-count", "1"))
    assert with_tags(tagged, "") == without_tags(tagged) == headers
    assert tags_among(headers) == ""
    assert tags_among((("x-amz-tagging-count", "2"),)) is None, "only the backend knows them"


def test_what_is_not_utf8_is_refused():
    with pytest.raises(Invalid) as caught:
        parse_tags("k=%ff")
    assert caught.value.code == "InvalidArgument"


_words = st.text(st.sampled_from("aZ9ü中 +-=._:/@"), min_size=1, max_size=5).filter(lambda word: word != "aws:")


@given(st.dictionaries(_words.filter(lambda key: not key.startswith("aws:")), _words, max_size=10))
def test_formatting_and_parsing_agree(tags):
    pairs = tuple(tags.items())
    assert parse_tags(format_tags(pairs)) == pairs
