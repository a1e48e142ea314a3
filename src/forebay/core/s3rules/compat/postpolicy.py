"""Applies the policy of a form upload (POST): what its signer allowed the form's holder to send.

Theory. A site that lets visitors upload signs a *policy*, a JSON document with an expiration and conditions, and puts
it into a form. The visitor's browser fills the form and sends it here without the site. So the policy is the whole
grant: a condition must want every field of the form, and every condition must hold. The signature itself
(`core/s3rules/sigv4.py`) covers only the policy's text.

Field names and operators are compared in lower case, values exactly. `${filename}` in the key is replaced by the file's
name before the conditions are judged.

Forms may use signatures of Version 2 (`AWSAccessKeyId`, `signature`). Many libraries still make them. They cover the
policy's text as those of Version 4 do, with an HMAC that is not broken.

Rejected: ignoring fields that no condition names (the form's holder could set metadata, tags or a redirect that the
signer never thought of); insisting on conditions for checksums (S3's own test suites send them without).

Invariants. (1) A form passes only if a condition names each of its fields, except those in `_FREE` and `_IGNORED`. (2)
Only `Denied` and `Invalid` are raised, whatever the input.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from calendar import timegm
from collections.abc import Mapping
from datetime import date
from typing import Any, Final, Literal, NamedTuple

from forebay.core.errors import Denied, Invalid

FILENAME: Final = "${filename}"
_FREE: Final = frozenset(
    (
        "policy",
        "file",
        "x-amz-signature",
        "signature",
        "awsaccesskeyid",
        "bucket",
    )  # a condition may name them all the same
)
_IGNORED: Final = ("x-ignore-", "x-amz-checksum-")  # the site's own fields, and what can only refuse a damaged file
_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})T(\d{2}):(\d{2}):(\d{2})(?:\.\d{1,9})?Z")
_DOLLAR = re.compile(r"(?<!\\)((?:\\\\)*)\\\$")  # \$ is S3's spelling of a dollar sign; JSON does not know it


class Condition(NamedTuple):
    """`field` (lower case) must equal `value`, or start with it."""

    operator: Literal["eq", "starts-with"]
    field: str
    value: str


class Policy(NamedTuple):
    """`size_min` and `size_max` bound the file's bytes; None where the policy does not."""

    expires_s: float
    conditions: tuple[Condition, ...]
    size_min: int = 0
    size_max: int | None = None


def fill_in(key: str, filename: str) -> str:
    """`key` with every `${filename}` replaced."""
    return key.replace(FILENAME, filename)


def parse_policy(encoded: str) -> Policy:
    """The policy from the form's field (base64 of JSON). `Invalid` (`InvalidPolicyDocument`) says what is wrong."""
    try:
        text = base64.b64decode("".join(encoded.split()), validate=True).decode("utf-8")
        document = json.loads(_DOLLAR.sub(r"\1$", text))
    except (binascii.Error, ValueError, RecursionError):
        raise _invalid("it is not base64 of a JSON document") from None
    if not isinstance(document, dict):
        raise _invalid("it is not a JSON object")
    unknown = sorted(set(document) - {"expiration", "conditions"})
    if unknown:
        raise _invalid(f"unexpected {unknown[0][:60]!r}: only 'expiration' and 'conditions' are known")
    if "expiration" not in document:
        raise _invalid("it has no expiration")
    if not isinstance(document.get("conditions"), list):
        raise _invalid("it has no list of conditions")
    policy = Policy(_parse_expiration(document["expiration"]), ())
    for entry in document["conditions"]:
        policy = _with_condition(policy, entry)
    return policy


def _parse_expiration(value: Any) -> float:
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _invalid("its expiration is not written like 2030-01-01T12:00:00.000Z")
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    try:
        date(year, month, day)
    except ValueError:
        raise _invalid("its expiration is no day of the calendar") from None
    if hour > 23 or minute > 59 or second > 60:
        raise _invalid("its expiration is no time of day")
    return timegm((year, month, day, hour, minute, second))


def _with_condition(policy: Policy, entry: Any) -> Policy:
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise _invalid("Invalid Simple-Condition: Simple-Conditions must have exactly one property specified")
        ((field, value),) = entry.items()
        return _added(policy, "eq", field, value)
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
        raise _invalid("a condition is neither an object nor a list that starts with its operator")
    operator = entry[0].lower()
    if len(entry) != 3:
        raise _invalid(f"a condition {operator[:60]!r} has {len(entry) - 1} arguments: it takes two")
    if operator == "content-length-range":
        least, most = _count(entry[1]), _count(entry[2])
        if policy.size_max is not None:
            least, most = max(least, policy.size_min), min(most, policy.size_max)
        return policy._replace(size_min=least, size_max=most)
    if operator not in ("eq", "starts-with"):
        raise _invalid(f"the operator {operator[:60]!r} is not known: use eq, starts-with or content-length-range")
    field = entry[1]
    if not isinstance(field, str) or not field.startswith("$") or len(field) < 2:
        raise _invalid(f"a condition {operator!r} names no field: write it like $key")
    return _added(policy, "eq" if operator == "eq" else "starts-with", field[1:], entry[2])


def _added(policy: Policy, operator: Literal["eq", "starts-with"], field: str, value: Any) -> Policy:
    if not isinstance(value, str):
        raise _invalid(f"the value for {field[:60]!r} is not text")
    return policy._replace(conditions=(*policy.conditions, Condition(operator, field.lower(), value)))


def _count(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _invalid("content-length-range takes two numbers of bytes, 0 or more")
    return value


def legacy_signer(fields: Mapping[str, str], secrets: Mapping[str, str]) -> str:
    """The key id that signed the form's policy by Version 2; "" if the form has no such signature. `secrets` are by
    key id. `Denied` (`InvalidAccessKeyId`, `SignatureDoesNotMatch`), `Invalid` (`InvalidArgument`)."""
    key_id = fields.get("awsaccesskeyid", "")
    if not key_id:
        return ""
    for name in ("policy", "signature"):
        if not fields.get(name):
            raise Invalid(
                f"Bucket POST must contain a field named '{name}'. If it is specified, please check the order of the "
                "fields.",
                code="InvalidArgument",
            )
    secret = secrets.get(key_id)
    if secret is None:
        raise Denied(
            "The access key id you provided does not exist here: check it, or have it added", code="InvalidAccessKeyId"
        )
    expected = base64.b64encode(hmac.digest(secret.encode(), fields["policy"].encode(), "sha1"))
    if not hmac.compare_digest(expected, fields["signature"].encode()):
        raise Denied(
            "The request signature we calculated does not match the signature you provided: check the key and the "
            "signing method",
            code="SignatureDoesNotMatch",
        )
    return key_id


def check_form(policy: Policy, now_s: float, bucket: str, fields: Mapping[str, str]) -> None:
    """Return if the policy allows a form with these fields (names in lower case, `${filename}` put in), sent to
    `bucket`; else `Denied` (`AccessDenied`) saying what it does not allow. The file's size is checked by
    `check_size`."""
    if now_s >= policy.expires_s:
        raise _refused("Policy expired")
    given = {**fields, "bucket": bucket}
    for condition in policy.conditions:
        value = given.get(condition.field)
        if value is None or not _holds(condition, value):
            raise _refused(
                f'Policy Condition failed: ["{condition.operator}", "${condition.field[:60]}", '
                f'"{condition.value[:200]}"]'
            )
    named = {condition.field for condition in policy.conditions}
    if "bucket" not in named:
        raise _refused("Extra input fields: bucket")
    for name in fields:
        if name not in named and name not in _FREE and not name.startswith(_IGNORED):
            raise _refused(f"Extra input fields: {name[:60]}")


def _holds(condition: Condition, value: str) -> bool:
    if condition.operator == "eq":
        return value == condition.value
    if condition.field == "content-type":  # S3: of a list of types, each must start so
        return all(part.strip().startswith(condition.value) for part in value.split(","))
    return value.startswith(condition.value)


def check_size(policy: Policy, size_bytes: int, *, complete: bool) -> None:
    """Return if a file of `size_bytes` is allowed; not `complete`: so far. `Invalid` (`EntityTooLarge`,
    `EntityTooSmall`)."""
    if policy.size_max is not None and size_bytes > policy.size_max:
        raise Invalid(
            f"Your proposed upload exceeds the maximum allowed size: its policy allows {policy.size_max} bytes",
            code="EntityTooLarge",
        )
    if complete and size_bytes < policy.size_min:
        raise Invalid(
            f"Your proposed upload is smaller than the minimum allowed size: its policy wants {policy.size_min} bytes",
            code="EntityTooSmall",
        )


def _invalid(what: str) -> Invalid:
    return Invalid(f"Invalid Policy: {what}", code="InvalidPolicyDocument")


def _refused(what: str) -> Denied:
    return Denied(
        f"Invalid according to Policy: {what}. Ask whoever gave you the form for another", code="AccessDenied"
    )
