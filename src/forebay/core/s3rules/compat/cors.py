"""Decides which pages of other origins may use a bucket: applies CORS rules to a request as S3 does.

Theory. A browser asks twice. Before a request that a plain form could not make, it sends a *preflight* (OPTIONS with
the method and header names that it will use) and goes on only if the answer allows them. With the *actual* request it
sends `Origin`, and shows the answer to the page only if the answer allows the origin. CORS only tells browsers what to
show; identities decide what a caller may do.

The first of a bucket's rules that fits decides. A preflight must find its origin, its method and all its header names
in one rule; an actual request its origin and method. A rule with a plain `*` is answered with `*`; any other with the
origin itself and with credentials allowed, as S3 does. The answer depends on request headers, so it sends `Vary`;
without that, a cache on the way would give one page's answer to another.

Rejected: regular expressions made of the patterns (one wildcard is a prefix and a suffix); merging the rules that fit
(S3 takes the first, and rules written for S3 rely on their order).

Invariants. (1) The answer holds nothing from the request except an origin or header name that a rule allowed. (2)
Every stored rule has passed `check_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.types import CorsRule, Headers

METHODS: Final = ("GET", "PUT", "POST", "DELETE", "HEAD")
VARY: Final = ("vary", "Origin, Access-Control-Request-Headers, Access-Control-Request-Method")
_ID_CHARS_MAX: Final = 255  # S3's
_TOKEN: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def check_rules(rules: Sequence[CorsRule]) -> None:
    """Return if the rules may be kept, else `Invalid` with the code that S3 has for it."""
    if not rules:
        raise Invalid("the CORS configuration holds no rule: add a CORSRule, or delete it", code="MalformedXML")
    if len(rules) > limits.CORS_RULES_MAX:
        raise Invalid(
            f"the CORS configuration holds {len(rules)} rules: at most {limits.CORS_RULES_MAX} are allowed",
            code="MalformedXML",
        )
    for rule in rules:
        if not rule.origins or not rule.methods:
            raise Invalid(
                "a CORS rule needs at least one AllowedOrigin and one AllowedMethod: add them", code="MalformedXML"
            )
        for method in rule.methods:
            if method not in METHODS:
                raise Invalid(
                    f"Found unsupported HTTP method in CORS config. Unsupported method is {method}: "
                    f"use {', '.join(METHODS)}",
                    code="InvalidRequest",
                )
        for origin in rule.origins:
            _check_pattern("AllowedOrigin", origin)
        for header in rule.headers:
            _check_pattern("AllowedHeader", header)
            _check_token("AllowedHeader", header)
        for header in rule.exposed:
            if "*" in header:
                raise Invalid(
                    f'ExposeHeader "{header}" contains wildcard. We currently do not support wildcard for '
                    "ExposeHeader: name each header",
                    code="InvalidRequest",
                )
            _check_token("ExposeHeader", header)
        if rule.max_age_s is not None and rule.max_age_s < 0:
            raise Invalid("MaxAgeSeconds is negative: use 0 or more seconds", code="MalformedXML")
        if len(rule.id) > _ID_CHARS_MAX:
            raise Invalid(f"a rule's ID is longer than {_ID_CHARS_MAX} characters: shorten it", code="InvalidRequest")


def _check_pattern(element: str, pattern: str) -> None:
    if not pattern:
        raise Invalid(f"an {element} is empty: name one, or use *", code="MalformedXML")
    if pattern.count("*") > 1:
        raise Invalid(
            f'{element} "{pattern}" can not have more than one wildcard: use one, or several elements',
            code="InvalidRequest",
        )


def _check_token(element: str, name: str) -> None:
    if not name or not _TOKEN.issuperset(name):
        raise Invalid(f"{element} {name!r} is no header name: write it like x-amz-meta-name", code="InvalidRequest")


def preflight(rules: Sequence[CorsRule], origin: str, method: str, headers: str) -> Headers | None:
    """The answer's headers to a preflight, or None: it is not allowed. `headers` is Access-Control-Request-Headers."""
    asked = [name for part in headers.split(",") if (name := part.strip().lower())]
    for rule in rules:
        if (
            method in rule.methods
            and _any_fits(rule.origins, origin)
            and all(_any_fits(tuple(pattern.lower() for pattern in rule.headers), name) for name in asked)
        ):
            answer = _allowing(rule, origin)
            if asked:
                answer.insert(2, ("access-control-allow-headers", ", ".join(asked)))
            return tuple(answer)
    return None


def actual(rules: Sequence[CorsRule], origin: str, method: str) -> Headers:
    """The headers to add to the answer of a request that came with `Origin`; `Vary` alone if no rule allows it."""
    for rule in rules:
        if method in rule.methods and _any_fits(rule.origins, origin):
            return tuple(_allowing(rule, origin))
    return (VARY,)


def _allowing(rule: CorsRule, origin: str) -> list[tuple[str, str]]:
    everyone = "*" in rule.origins
    answer = [
        ("access-control-allow-origin", "*" if everyone else origin),
        ("access-control-allow-methods", ", ".join(rule.methods)),
    ]
    if rule.exposed:
        answer.append(("access-control-expose-headers", ", ".join(rule.exposed)))
    if rule.max_age_s is not None:
        answer.append(("access-control-max-age", str(rule.max_age_s)))
    if not everyone:
        answer.append(("access-control-allow-credentials", "true"))
    return [*answer, VARY]


def _any_fits(patterns: Sequence[str], text: str) -> bool:
    return any(_fits(pattern, text) for pattern in patterns)


def _fits(pattern: str, text: str) -> bool:
    """Whether `text` is `pattern`, whose one `*` stands for any run of characters."""
    start, star, end = pattern.partition("*")
    if not star:
        return pattern == text
    return len(text) >= len(start) + len(end) and text.startswith(start) and text.endswith(end)
