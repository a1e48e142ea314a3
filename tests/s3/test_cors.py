"""CORS over HTTP: the configuration, preflights, what other answers say, and pages that an open node does not trust."""

from __future__ import annotations

import pytest

from forebay.core.types import CorsRule
from tests.s3.fake_buckets import BucketFront
from tests.s3.fake_front import Answer, Object

SITE = "https://app.example.com"
CONFIGURATION = b"""<?xml version="1.0"?>
<CORSConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <CORSRule>
    <ID>the site</ID>
    <AllowedOrigin>https://*.example.com</AllowedOrigin>
    <AllowedMethod>GET</AllowedMethod><AllowedMethod>PUT</AllowedMethod>
    <AllowedHeader>x-amz-*</AllowedHeader>
    <ExposeHeader>ETag</ExposeHeader>
    <MaxAgeSeconds>600</MaxAgeSeconds>
  </CORSRule>
  <CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule>
</CORSConfiguration>"""
RULES = (
    CorsRule(("https://*.example.com",), ("GET", "PUT"), ("x-amz-*",), ("ETag",), 600, "the site"),
    CorsRule(("*",), ("GET",)),
)


def said(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code if answer.body else ""


def allowed(answer: Answer) -> str:
    return answer.headers.get("access-control-allow-origin", "")


@pytest.fixture
def front() -> BucketFront:
    front = BucketFront(corpus={"k": Object(b"1")}, plain={"k": Object(b"1")})
    front.reads.change("corpus", cors=RULES)
    return front


def test_a_configuration_is_put_read_and_removed() -> None:
    front = BucketFront(corpus={})
    assert said(front.get("/corpus?cors")) == (404, "NoSuchCORSConfiguration")
    assert front.put("/corpus?cors", CONFIGURATION).status == 200
    assert front.reads.settings["corpus"].cors == RULES
    read = front.get("/corpus?cors")
    assert (read.status, read.xml.tag) == (200, "CORSConfiguration")
    front.reads.change("corpus", cors=())
    assert front.put("/corpus?cors", read.body).status == 200
    assert front.reads.settings["corpus"].cors == RULES, "what is read may be put back"
    assert front.ask("DELETE", "/corpus?cors").status == 204
    assert said(front.get("/corpus?cors")) == (404, "NoSuchCORSConfiguration")


RULE = b"<CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>GET</AllowedMethod></CORSRule>"


@pytest.mark.parametrize(
    "inner, code",
    [
        (b"", "MalformedXML"),
        (RULE * 101, "MalformedXML"),
        (RULE.replace(b"GET", b"PATCH"), "InvalidRequest"),
        (RULE.replace(b"</CORSRule>", b"<MaxAgeSeconds>soon</MaxAgeSeconds></CORSRule>"), "MalformedXML"),
        (RULE.replace(b"</CORSRule>", b"<MaxAgeSeconds>-1</MaxAgeSeconds></CORSRule>"), "MalformedXML"),
        (RULE + b" " * 65_536, "EntityTooLarge"),
    ],
)
def test_a_configuration_that_s3_would_not_keep(front: BucketFront, inner: bytes, code: str) -> None:
    body = b"<CORSConfiguration>%b</CORSConfiguration>" % inner
    assert said(front.put("/corpus?cors", body)) == (400, code)
    assert front.reads.settings["corpus"].cors == RULES


# --- preflights ------------------------------------------------------------------------------------------------------
def preflight(front: BucketFront, origin: str, method: str, headers: str = "", target: str = "/corpus/k") -> Answer:
    asked = {"origin": origin, "access-control-request-method": method, "access-control-request-headers": headers}
    return front.ask("OPTIONS", target, {name: value for name, value in asked.items() if value})


def test_a_preflight_is_answered_by_the_rules(front: BucketFront) -> None:
    answer = preflight(front, SITE, "PUT", "x-amz-date, X-Amz-Content-Sha256")
    assert (answer.status, answer.body) == (200, b"")
    assert {name: value for name, value in answer.headers.items() if name.startswith("access-") or name == "vary"} == {
        "access-control-allow-origin": SITE,
        "access-control-allow-methods": "GET, PUT",
        "access-control-allow-headers": "x-amz-date, x-amz-content-sha256",
        "access-control-expose-headers": "ETag",
        "access-control-max-age": "600",
        "access-control-allow-credentials": "true",
        "vary": "Origin, Access-Control-Request-Headers, Access-Control-Request-Method",
    }
    assert allowed(preflight(front, "https://elsewhere", "GET")) == "*"
    assert front.reads.calls == [], "a front knows the rules"


def test_a_preflight_needs_no_signature() -> None:
    front = BucketFront({"operator": "admin:*"}, corpus={"k": Object(b"1")})
    front.reads.change("corpus", cors=RULES)
    assert preflight(front, SITE, "PUT").status == 200
    assert said(front.ask("PUT", "/corpus/k", origin=SITE)) == (403, "AccessDenied")


@pytest.mark.parametrize(
    "origin, method, headers, target, status, code",
    [
        ("https://elsewhere", "PUT", "", "/corpus/k", 403, "AccessForbidden"),
        (SITE, "DELETE", "", "/corpus/k", 403, "AccessForbidden"),
        (SITE, "PUT", "authorization", "/corpus/k", 403, "AccessForbidden"),
        (SITE, "GET", "", "/plain/k", 403, "AccessForbidden"),
        (SITE, "GET", "", "/none/k", 403, "AccessForbidden"),
        (SITE, "", "", "/corpus/k", 400, "BadRequest"),
        (SITE, "PATCH", "", "/corpus/k", 400, "BadRequest"),
        ("", "GET", "", "/corpus/k", 400, "BadRequest"),
        (SITE, "GET", "", "/corpus", 200, ""),
    ],
)
def test_what_no_rule_allows(
    front: BucketFront, origin: str, method: str, headers: str, target: str, status: int, code: str
) -> None:
    answer = preflight(front, origin, method, headers, target)
    assert said(answer) == (status, code)
    assert bool(allowed(answer)) == (status == 200)


# --- other answers ---------------------------------------------------------------------------------------------------
def test_answers_say_who_may_see_them(front: BucketFront) -> None:
    for target, status in (("/corpus/k", 200), ("/corpus?list-type=2", 200), ("/corpus", 200), ("/corpus/none", 404)):
        answer = front.get(target, origin=SITE)
        assert (answer.status, allowed(answer)) == (status, SITE), target
        assert answer.headers["access-control-expose-headers"] == "ETag"
        assert answer.headers["vary"].startswith("Origin")
    elsewhere = front.get("/corpus/k", origin="https://elsewhere")
    assert (allowed(elsewhere), "access-control-allow-credentials" in elsewhere.headers) == ("*", False)
    assert allowed(front.ask("HEAD", "/corpus/k", origin=SITE)) == "", "no rule names HEAD"
    part = front.get("/corpus/k", origin=SITE, range="bytes=0-0")
    assert (part.status, allowed(part)) == (206, SITE)
    unchanged = front.get("/corpus/k", origin=SITE, if_none_match="*")
    assert (unchanged.status, allowed(unchanged)) == (304, SITE)
    put = front.put("/corpus/new", b"x", origin=SITE)
    assert (put.status, allowed(put)) == (200, SITE)


def test_without_origin_or_rules_nothing_is_said(front: BucketFront) -> None:
    for answer in (front.get("/corpus/k"), front.get("/plain/k", origin=SITE), front.get("/corpus/none")):
        assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


def test_an_answer_that_no_rule_allows_still_depends_on_the_origin(front: BucketFront) -> None:
    front.reads.change("corpus", cors=RULES[:1])
    answer = front.get("/corpus/k", origin="https://elsewhere")
    assert (answer.status, allowed(answer)) == (200, "")
    assert answer.headers["vary"].startswith("Origin")


def test_a_request_that_names_a_method_is_answered_for_that_one(front: BucketFront) -> None:
    """As S3 does, also where it is no preflight; the answer itself is that of the method which was used."""
    front.reads.change("corpus", cors=(CorsRule((SITE,), ("GET",)), CorsRule(("https://writer",), ("PUT",))))
    for origin, method, shown in ((SITE, "PUT", ""), (SITE, "GET", SITE), ("https://writer", "PUT", "https://writer")):
        answer = front.get("/corpus/k", origin=origin, access_control_request_method=method)
        assert (answer.status, allowed(answer)) == (200, shown)


# --- an open node ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "method, target, body",
    [
        ("POST", "/plain?delete", b"<Delete><Object><Key>k</Key></Object></Delete>"),
        ("PUT", "/plain/k", b"x"),
        ("PUT", "/plain/k", b""),
        ("DELETE", "/plain/k", None),
        ("PUT", "/fresh", None),
        ("DELETE", "/corpus/k", None),  # its rules allow GET and PUT
    ],
)
@pytest.mark.parametrize("origin", [SITE, "null", "http://127.0.0.1:8000"])
def test_a_page_writes_to_an_open_node_only_where_rules_allow_it(
    front: BucketFront, method: str, target: str, body: bytes | None, origin: str
) -> None:
    assert said(front.ask(method, target, body=body, origin=origin)) == (403, "AccessForbidden")
    assert front.reads.calls == []
    assert front.ask(method, target, body=body).status < 300, "who is no browser sends no Origin"
