"""What browsers of other origins are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import Invalid
from forebay.core.s3rules.compat.cors import VARY, actual, check_rules, preflight
from forebay.core.types import CorsRule

SITE = CorsRule(("https://app.example.com", "https://*.corp.example"), ("GET", "PUT"), ("x-amz-*", "content-type"))
ANYONE = CorsRule(("*",), ("GET",), exposed=("ETag", "x-amz-version-id"), max_age_s=600)
RULES = (SITE, ANYONE)


def test_a_preflight_is_answered_with_what_the_rule_allows():
    assert preflight(RULES, "https://app.example.com", "PUT", "X-Amz-Date, content-type") == (
        ("access-control-allow-origin", "https://app.example.com"),
        ("access-control-allow-methods", "GET, PUT"),
        ("access-control-allow-headers", "x-amz-date, content-type"),
        ("access-control-allow-credentials", "true"),
        VARY,
    )


def test_a_rule_for_everyone_says_a_star_and_no_credentials():
    answer = dict(preflight(RULES, "https://elsewhere.example", "GET", "") or ())
    assert answer["access-control-allow-origin"] == "*"
    assert answer["access-control-expose-headers"] == "ETag, x-amz-version-id"
    assert answer["access-control-max-age"] == "600"
    assert "access-control-allow-credentials" not in answer
    assert "access-control-allow-headers" not in answer


@pytest.mark.parametrize(
    "origin, method, headers, allowed",
    [
        ("https://app.example.com", "DELETE", "", False),
        ("https://app.example.com", "put", "", False),
        ("https://app.example.com.evil.example", "PUT", "", False),
        ("http://app.example.com", "PUT", "", False),
        ("https://a.corp.example", "PUT", "", True),
        ("https://.corp.example", "PUT", "", True),
        ("https://corp.example", "PUT", "", False),
        ("https://app.example.com", "PUT", "authorization", False),
        ("https://app.example.com", "PUT", "x-amz-meta-a,,CONTENT-TYPE , ", True),
        ("https://app.example.com", "PUT", "x-amz-meta-a, authorization", False),
        ("https://elsewhere.example", "GET", "x-amz-date", False),
        ("", "GET", "", True),  # an empty origin is an origin: `*` allows it
    ],
)
def test_one_rule_must_allow_origin_method_and_headers(origin, method, headers, allowed):
    assert (preflight(RULES, origin, method, headers) is not None) == allowed


def test_the_first_rule_that_fits_decides():
    first = CorsRule(("https://app.example.com",), ("GET",), max_age_s=1)
    second = CorsRule(("https://app.example.com",), ("GET", "PUT"), max_age_s=2)
    assert dict(preflight((first, second), "https://app.example.com", "GET", "") or ())["access-control-max-age"] == "1"
    assert dict(preflight((first, second), "https://app.example.com", "PUT", "") or ())["access-control-max-age"] == "2"


def test_an_actual_request_is_judged_by_origin_and_method_and_never_refused():
    answer = dict(actual(RULES, "https://app.example.com", "PUT"))
    assert answer["access-control-allow-origin"] == "https://app.example.com"
    assert answer["vary"].startswith("Origin")
    assert actual(RULES, "https://elsewhere.example", "PUT") == (VARY,), "only that it depends on the origin"


@pytest.mark.parametrize(
    "rule, code, words",
    [
        (CorsRule((), ("GET",)), "MalformedXML", "at least one"),
        (CorsRule(("*",), ()), "MalformedXML", "at least one"),
        (CorsRule(("*",), ("PATCH",)), "InvalidRequest", "Unsupported method is PATCH"),
        (CorsRule(("https://*.*",), ("GET",)), "InvalidRequest", "more than one wildcard"),
        (CorsRule(("",), ("GET",)), "MalformedXML", "is empty"),
        (CorsRule(("*",), ("GET",), ("x-*-*",)), "InvalidRequest", "more than one wildcard"),
        (CorsRule(("*",), ("GET",), ("a b",)), "InvalidRequest", "no header name"),
        (CorsRule(("*",), ("GET",), exposed=("x-*",)), "InvalidRequest", "contains wildcard"),
        (CorsRule(("*",), ("GET",), exposed=("a\r\nb",)), "InvalidRequest", "no header name"),
        (CorsRule(("*",), ("GET",), max_age_s=-1), "MalformedXML", "negative"),
        (CorsRule(("*",), ("GET",), id="i" * 256), "InvalidRequest", "255"),
    ],
)
def test_a_rule_that_s3_would_not_keep_is_refused(rule, code, words):
    with pytest.raises(Invalid, match=words) as caught:
        check_rules([SITE, rule])
    assert caught.value.code == code


def test_a_configuration_has_1_to_100_rules():
    check_rules([SITE] * 100)
    for rules in ([], [SITE] * 101):
        with pytest.raises(Invalid) as caught:
            check_rules(rules)
        assert caught.value.code == "MalformedXML"


_origins = st.text("ab*/", max_size=6)


@given(_origins.filter(lambda text: text.count("*") <= 1 and text), st.text("ab/", max_size=8))
def test_a_wildcard_stands_for_any_run_of_characters(pattern, origin):
    rule = CorsRule((pattern,), ("GET",))
    start, star, end = pattern.partition("*")
    expected = any(start + origin[i:j] + end == origin for i in range(9) for j in range(i, 9)) if star else False
    assert (preflight((rule,), origin, "GET", "") is not None) == (expected or pattern == origin)
