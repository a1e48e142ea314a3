"""What a signed form may send."""

import base64
import hmac
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.s3rules.compat.postpolicy import check_form, check_size, fill_in, legacy_signer, parse_policy

EXPIRES = "2030-06-01T12:00:00.000Z"
EXPIRES_S = 1906545600


def encode(document):
    text = document if isinstance(document, str) else json.dumps(document)
    return base64.b64encode(text.encode()).decode()


def policy(*conditions, expiration=EXPIRES):
    return parse_policy(encode({"expiration": expiration, "conditions": [{"bucket": "photos"}, *conditions]}))


def test_a_form_that_holds_to_its_policy_passes():
    allowed = policy(
        ["StArTs-WiTh", "$KeY", "user/"],
        {"AcL": "private"},
        ["eq", "$x-amz-meta-who", "me"],
        ["content-length-range", 1, "1024"],
    )
    assert allowed.expires_s == EXPIRES_S
    fields = {"key": fill_in("user/${filename}", "a.jpg"), "acl": "private", "x-amz-meta-who": "me"}
    fields |= {"policy": "…", "x-amz-signature": "…", "x-ignore-this": "anything"}
    check_form(allowed, EXPIRES_S - 1, "photos", fields)
    for size in (1, 1024):
        check_size(allowed, size, complete=True)
    with pytest.raises(Invalid) as caught:
        check_size(allowed, 0, complete=True)
    assert caught.value.code == "EntityTooSmall"
    check_size(allowed, 0, complete=False)
    with pytest.raises(Invalid) as caught:
        check_size(allowed, 1025, complete=False)
    assert caught.value.code == "EntityTooLarge"


GOOD = {"key": "user/a", "acl": "private"}


@pytest.mark.parametrize(
    "bucket, changes, words",
    [
        ("other", {}, "bucket"),
        ("photos", {"key": "users"}, "starts-with"),
        ("photos", {"acl": "public-read"}, '"private"'),
        ("photos", {"acl": None}, '"private"'),
        ("photos", {"x-amz-meta-who": "me"}, "Extra input fields: x-amz-meta-who"),
        ("photos", {"success_action_redirect": "https://evil.example"}, "Extra input fields"),
        ("photos", {"tagging": "<Tagging/>"}, "Extra input fields"),
    ],
)
def test_a_form_that_does_not_is_refused(bucket, changes, words):
    allowed = policy(["starts-with", "$key", "user/"], {"acl": "private"})
    fields = {name: value for name, value in (GOOD | changes).items() if value is not None}
    with pytest.raises(Denied, match=words) as caught:
        check_form(allowed, 0, bucket, fields)
    assert caught.value.code == "AccessDenied"
    check_form(allowed, 0, "photos", GOOD)


def test_a_policy_ends():
    with pytest.raises(Denied, match="expired"):
        check_form(policy(["starts-with", "$key", ""]), EXPIRES_S, "photos", {"key": "k"})


def test_a_policy_must_name_its_bucket():
    unbound = parse_policy(encode({"expiration": EXPIRES, "conditions": [["starts-with", "$key", ""]]}))
    with pytest.raises(Denied, match="bucket"):
        check_form(unbound, 0, "photos", {"key": "k"})


def test_of_a_list_of_types_each_must_fit():
    images = policy(["starts-with", "$Content-Type", "image/"])
    check_form(images, 0, "photos", {"content-type": "image/png,image/jpeg"})
    with pytest.raises(Denied):
        check_form(images, 0, "photos", {"content-type": "image/png,text/html"})


def test_a_dollar_sign_may_be_escaped_as_s3_escapes_it():
    for text in (r'["eq", "$key", "\$a"]', r'["eq", "$key", "$a"]'):
        allowed = parse_policy(encode(f'{{"expiration": "{EXPIRES}", "conditions": [{{"bucket": "b"}}, {text}]}}'))
        check_form(allowed, 0, "b", {"key": "$a"})
    allowed = parse_policy(
        encode(f'{{"expiration": "{EXPIRES}", "conditions": [{{"bucket": "b"}}, {{"key": "\\\\$a"}}]}}')
    )
    check_form(allowed, 0, "b", {"key": "\\$a"})


def test_several_ranges_must_all_hold():
    both = policy(["content-length-range", 10, 100], ["content-length-range", 0, 50])
    assert (both.size_min, both.size_max) == (10, 50)


@pytest.mark.parametrize(
    "document, words",
    [
        ("", "not base64"),
        ("{", "not base64"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not base64"),
        ({"conditions": []}, "no expiration"),
        ({"EXPIRATION": EXPIRES, "conditions": []}, "unexpected 'EXPIRATION'"),
        ({"expiration": EXPIRES}, "no list of conditions"),
        ({"expiration": EXPIRES, "conditions": {}}, "no list of conditions"),
        ({"expiration": EXPIRES, "CONDITIONS": []}, "unexpected 'CONDITIONS'"),
        ({"expiration": "2030-06-01 12:00:00", "conditions": []}, "not written like"),
        ({"expiration": "2030-02-30T12:00:00Z", "conditions": []}, "calendar"),
        ({"expiration": "2030-02-20T24:00:00Z", "conditions": []}, "time of day"),
        ({"expiration": 5, "conditions": []}, "not written like"),
        *(
            ({"expiration": EXPIRES, "conditions": [condition]}, words)
            for condition, words in [
                ({}, "exactly one property"),
                ({"a": "b", "c": "d"}, "exactly one property"),
                ({"a": 5}, "not text"),
                ("key", "neither"),
                ([], "neither"),
                ([5, "$key", "x"], "neither"),
                (["eq", "$key"], "1 arguments"),
                (["eq", "key", "x"], "names no field"),
                (["eq", "$", "x"], "names no field"),
                (["eq", "$key", None], "not text"),
                (["ends-with", "$key", "x"], "'ends-with' is not known"),
                (["content-length-range", 0], "1 arguments"),
                (["content-length-range", -1, 0], "two numbers"),
                (["content-length-range", 0, "many"], "two numbers"),
                (["content-length-range", True, 5], "two numbers"),
                (["content-length-range", 0.5, 5], "two numbers"),
            ]
        ),
    ],
)
def test_what_is_no_policy_is_refused(document, words):
    with pytest.raises(Invalid, match=words) as caught:
        parse_policy(encode(document))
    assert caught.value.code == "InvalidPolicyDocument"


@pytest.mark.parametrize("text", ["*", "aGk", "\u00fc", "/" * 9])
def test_what_is_no_base64_is_refused(text):
    with pytest.raises(ForebayError) as caught:
        parse_policy(text)
    assert caught.value.code == "InvalidPolicyDocument"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["$key", "eq", "k", EXPIRES, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "key", "bucket"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(_json | st.fixed_dictionaries({"expiration": st.just(EXPIRES), "conditions": st.lists(_json, max_size=3)}))
def test_any_document_is_a_policy_or_refused(document):
    code = ""
    try:
        allowed = parse_policy(encode(json.dumps(document)))
        check_form(allowed, 0, "k", {"key": "k"})
        check_size(allowed, 5, complete=True)
    except (Invalid, Denied) as error:
        code = error.code
    assert code in ("", "InvalidPolicyDocument", "AccessDenied", "EntityTooLarge", "EntityTooSmall")


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["awsaccesskeyid", "policy", "signature"]), st.text(max_size=9)))
def test_a_form_signed_by_version_2_is_known_by_its_right_signature_alone(fields):
    right = base64.b64encode(hmac.digest(b"secret", fields.get("policy", "").encode(), "sha1")).decode()
    try:
        assert legacy_signer(fields, {"AKID": "secret"}) == ""
        assert not fields.get("awsaccesskeyid")
    except (Invalid, Denied):
        pass
    whole = {"awsaccesskeyid": "AKID", "policy": fields.get("policy") or "e30=", "signature": right}
    if fields.get("policy"):
        assert legacy_signer(whole, {"AKID": "secret"}) == "AKID"
