"""A bucket's CORS rules over HTTP: the configuration document, preflights, and the headers on other answers.

Theory. `core/s3rules/compat/cors.py` says what a rule means; this module reads it from S3's XML, writes it as XML, and
makes header lines of it. A front answers preflights by itself, since it has every bucket's settings. They need no
signature: a browser sends none, and the answer says only what the rules let any page know.

A node without identities trusts whoever reaches it, and a page of any site in a browser on its host does: a form, or a
POST of plain text, needs no preflight. So there a write that carries an `Origin` is taken only if a rule of the bucket
allows that origin; browsers send the header with every write, and other clients send none. The few browsers that leave
it out of a form say `Sec-Fetch-Site`, which no page can forge.

Invariant. Header lines hold nothing from a request that `header_line` has not passed.
"""

from __future__ import annotations

from typing import Final
from xml.etree.ElementTree import Element

from forebay.core.errors import Denied, Invalid
from forebay.core.s3rules.compat import cors
from forebay.core.types import Bucket, CorsRule, Headers
from forebay.node.front.http.requests import Request, header_line
from forebay.node.front.s3.xml import document, element, malformed, parse

_METHOD: Final = b"access-control-request-method"
_HEADERS: Final = b"access-control-request-headers"


def read_rules(body: bytes) -> tuple[CorsRule, ...]:
    """The rules of a CORSConfiguration document, checked. `Invalid` (`MalformedXML`, `InvalidRequest`)."""
    rules = tuple(_read_rule(rule) for rule in parse(body, "CORSConfiguration").findall("CORSRule"))
    cors.check_rules(rules)
    return rules


def _read_rule(rule: Element) -> CorsRule:
    def texts(name: str) -> tuple[str, ...]:
        return tuple((found.text or "").strip() for found in rule.findall(name))

    age = rule.findtext("MaxAgeSeconds")
    if age is not None and not (age.strip().isascii() and age.strip().isdigit() and len(age.strip()) <= 9):
        raise malformed("MaxAgeSeconds is no number of seconds")
    return CorsRule(
        texts("AllowedOrigin"),
        texts("AllowedMethod"),
        texts("AllowedHeader"),
        texts("ExposeHeader"),
        int(age) if age is not None else None,
        rule.findtext("ID") or "",
    )


def render_rules(rules: tuple[CorsRule, ...]) -> bytes:
    """The CORSConfiguration document of a bucket's rules."""
    return document("CORSConfiguration", "".join(_render_rule(rule) for rule in rules))


def _render_rule(rule: CorsRule) -> str:
    parts = [element("ID", rule.id)] if rule.id else []
    for name, values in (
        ("AllowedOrigin", rule.origins),
        ("AllowedMethod", rule.methods),
        ("AllowedHeader", rule.headers),
        ("ExposeHeader", rule.exposed),
    ):
        parts += [element(name, value) for value in values]
    if rule.max_age_s is not None:
        parts.append(element("MaxAgeSeconds", str(rule.max_age_s)))
    return f"<CORSRule>{''.join(parts)}</CORSRule>"


def preflight_lines(request: Request, bucket: Bucket) -> bytes:
    """The header lines that answer an OPTIONS request. `Invalid` if it is no preflight, `Denied` (`AccessForbidden`) if
    no rule allows what it asks."""
    if b"origin" not in request.headers:
        raise Invalid("Insufficient information. Origin request header needed.", code="BadRequest")
    method = request.header(_METHOD)
    if method not in cors.METHODS:
        raise Invalid(f"Invalid Access-Control-Request-Method: {method[:60] or 'null'}", code="BadRequest")
    if not bucket.cors:
        raise Denied(
            "CORSResponse: CORS is not enabled for this bucket: put a CORS configuration, or call from a server",
            code="AccessForbidden",
        )
    answer = cors.preflight(bucket.cors, request.header(b"origin"), method, request.header(_HEADERS))
    if answer is None:
        raise Denied(
            "CORSResponse: This CORS request is not allowed. This is usually because the evalution of Origin, request "
            "method / Access-Control-Request-Method or Access-Control-Request-Headers are not whitelisted by the "
            "resource's CORS spec.",
            code="AccessForbidden",
        )
    return _lines(answer)


def actual_lines(request: Request, bucket: Bucket) -> bytes:
    """The header lines that the rules add to the answer to `request`, which has an Origin header; none to that of a
    preflight."""
    if not bucket.cors or request.method == b"OPTIONS":
        return b""
    return _lines(_allowed(request, bucket, request.header(_METHOD)))  # S3 goes by the header where it is sent


def check_origin(request: Request, bucket: Bucket) -> None:
    """Return if a write may come from the page that its Origin header names, if any; `Denied` (`AccessForbidden`)."""
    named = b"origin" in request.headers
    foreign = request.headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    if (named and len(_allowed(request, bucket)) < 2) or (foreign and not named):
        raise Denied(
            "this node has no identities, so it takes writes from a browser's page only if the bucket's CORS rules "
            "allow the page's origin: add a rule, or give the node identities",
            code="AccessForbidden",
        )


def _allowed(request: Request, bucket: Bucket, method: str = "") -> Headers:
    return cors.actual(bucket.cors, request.header(b"origin"), method or request.method.decode("latin-1"))


def _lines(headers: Headers) -> bytes:
    return b"".join(header_line(name.title().encode(), value.encode("latin-1")) for name, value in headers)
