"""Temporary keys: what they sign, and what of them does not last."""

from __future__ import annotations

import base64
import time
from typing import Any

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest

from forebay.core.access import Identity, encode_identities, parse_grants
from forebay.core.errors import Denied, ForebayError, Invalid
from forebay.core.oidc import Ended, Issuer, Rule, encode_trusted
from forebay.core.s3rules.sessions import SESSIONS_KEPT_MAX, Session, Sessions
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Request
from tests.front.web_tokens import RULES, SECRET, issuer, token, trusted

STATIC = Identity("static", "AKIDSTATIC", "static-secret", grants=parse_grants("admin:*"))
NOW_S = 0  # when the test began: botocore signs by the machine's clock


@pytest.fixture(autouse=True)
def _now() -> None:
    global NOW_S
    NOW_S = int(time.time())


def given(sessions: Sessions | None = None, *, life_s: int = 900, rules: tuple[Rule, ...] = RULES) -> Session:
    """Keys of `ann` from now on."""
    sessions = sessions or Sessions(SECRET, [issuer()])
    return sessions.make(issuer(), "ann", [rule.mark for rule in rules], NOW_S, NOW_S + life_s)


def auth_of(*issuers: Issuer, at_s: list[float] | None = None) -> Auth:
    """A front's check with one identity, and these issuers or the usual one."""
    auth = Auth(lambda: at_s[0]) if at_s else Auth()
    auth.update(encode_identities([STATIC]), encode_trusted(trusted(*issuers)))
    return auth


def signed(key_id: str, secret: str, session_token: str | None, *, by: type = botocore.auth.S3SigV4Auth) -> Request:
    """A GET as botocore signs it, in the header or in the query."""
    asked = botocore.awsrequest.AWSRequest("GET", "http://h/team-a/k", headers={"Host": "h"})
    keys = botocore.credentials.Credentials(key_id, secret, session_token)
    (by(keys) if by is botocore.auth.HmacV1QueryAuth else by(keys, "s3", "us-east-1")).add_auth(asked)
    query = asked.url.partition("?")[2].encode()
    headers = {name.lower().encode(): str(value).encode() for name, value in asked.headers.items()}
    return Request(b"GET", b"/team-a/k?" + query, b"/team-a/k", query, headers)


WAYS = [botocore.auth.S3SigV4Auth, botocore.auth.S3SigV4QueryAuth, botocore.auth.HmacV1QueryAuth]


@pytest.mark.parametrize("way", WAYS)
def test_temporary_keys_sign_in_every_way_that_keys_do(way: Any) -> None:
    session, at_s = given(), [float(NOW_S)]
    auth = auth_of(at_s=at_s)
    request = signed(session.key_id, session.secret, session.token.decode(), by=way)
    for _ in range(2):
        identity = auth.signed(request)
        assert identity.name == "oidc:corp:ann"
        assert identity.grants == parse_grants("read:team-a,write:team-a,read:robots,observe:*")
    at_s[0] += 870
    if way is not botocore.auth.HmacV1QueryAuth:  # whose URL may say another end
        assert auth.signed(request)
    at_s[0] += 31
    with pytest.raises(ForebayError) as caught:
        auth.signed(request)
    assert caught.value.code in ("ExpiredToken", "RequestTimeTooSkewed") or way is not botocore.auth.S3SigV4Auth
    assert caught.value.code != "SignatureDoesNotMatch"


@pytest.mark.parametrize("way", WAYS)
def test_neither_keys_nor_token_are_worth_anything_alone(way: Any) -> None:
    session, auth = given(), auth_of()
    other = Sessions(SECRET, [issuer()]).make(issuer(), "bob", [RULES[0].mark], NOW_S, NOW_S + 900)
    text = session.token.decode()
    for key_id, secret, said in (
        (session.key_id, session.secret, None),
        (session.key_id, session.secret, other.token.decode()),
        (other.key_id, session.secret, text),
        (session.key_id, other.secret, text),
        ("AKIDSTATIC", "static-secret", text),
        ("AKIDSTATIC", session.secret, text),
        (session.key_id, "static-secret", text),
    ):
        for _ in range(2):  # what was learnt of one request serves no other
            with pytest.raises(Denied) as caught:
                auth.signed(signed(key_id, secret, said, by=way))
            assert caught.value.code in ("InvalidAccessKeyId", "SignatureDoesNotMatch")
            assert auth.signed(signed(session.key_id, session.secret, text, by=way)).name == "oidc:corp:ann"
    assert auth.signed(signed("AKIDSTATIC", "static-secret", None, by=way)).name == "static"


def test_a_token_that_was_not_signed_along_is_refused() -> None:
    session, auth = given(), auth_of()
    request = signed("AKIDSTATIC", "static-secret", None)
    request.headers[b"x-amz-security-token"] = session.token
    with pytest.raises(ForebayError):
        auth.signed(request)
    presigned = signed("AKIDSTATIC", "static-secret", None, by=botocore.auth.S3SigV4QueryAuth)
    presigned.headers[b"x-amz-security-token"] = session.token
    with pytest.raises(Invalid, match="X-Amz-Security-Token"):
        auth.signed(presigned)


def test_a_token_of_another_node_or_changed_by_one_bit_opens_nothing() -> None:
    session, sessions = given(), Sessions(SECRET, [issuer()])
    raw = bytearray(base64.urlsafe_b64decode(session.token))
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Invalid) as caught:
            sessions.open(base64.urlsafe_b64encode(raw))
        assert caught.value.code == "InvalidToken"
        raw[bit // 8] ^= 1 << bit % 8
    for text in (b"", b"x", b"\xff" * 40, session.token + b"x" * 9000, given(Sessions(b"t" * 32, [issuer()])).token):
        with pytest.raises(Invalid, match="none of this node"):
            sessions.open(text)
    with pytest.raises(Invalid, match="issues no session tokens"):
        Sessions().open(session.token)
    assert sessions.open(session.token) == session
    assert session.secret not in repr(session)


def test_what_is_taken_out_ends_the_keys_that_it_gave() -> None:
    session = given(rules=RULES[:2])
    text = session.token.decode()
    request = signed(session.key_id, session.secret, text)
    assert auth_of().signed(request).grants == parse_grants("read:team-a,write:team-a,read:robots")
    assert auth_of(issuer(rules=RULES[1:])).signed(request).grants == parse_grants("read:robots")
    more = Rule(claim="groups", value="team-a", allow="admin:team-a")
    assert auth_of(issuer(rules=(more,))).signed(request).grants == parse_grants("admin:team-a")
    for gone in (issuer(rules=RULES[2:]), issuer(issuer="https://x.example"), issuer(audience="x"), issuer(name="x")):
        with pytest.raises(Invalid) as caught:
            auth_of(gone).signed(request)
        assert caught.value.code == "InvalidToken"


def test_keys_end_with_the_token_that_they_were_given_for_and_never_later() -> None:
    auth, now_s = auth_of(issuer(session_s_max=1800)), int(time.time())
    for token_s, asked_s, least_s, most_s in (
        (10_000, 900, 880, 900),
        (10_000, 40_000, 1780, 1800),
        (100, 3600, 80, 100),
    ):
        _, session = auth.exchange(token(exp=now_s + token_s), asked_s)
        assert least_s <= session.identity.until_s - now_s <= most_s + 5
    at_s = [float(now_s + 110)]
    with pytest.raises(Denied, match="expired"):  # a clock's leeway makes no keys that have ended
        auth_of(at_s=at_s).exchange(token(exp=now_s + 100), 3600)
    long = given(life_s=3600)
    assert auth_of(issuer(session_s_max=1800))._sessions.open(long.token).identity.until_s == NOW_S + 1800


def test_a_flood_of_sessions_is_forgotten_in_time() -> None:
    sessions = Sessions(SECRET, [issuer()])
    for number in range(SESSIONS_KEPT_MAX + 50):
        made = sessions.make(issuer(), f"u{number}", [RULES[0].mark], NOW_S, NOW_S + 900)
        assert sessions.open(made.token) == made
    assert len(sessions._known) <= SESSIONS_KEPT_MAX


@pytest.mark.parametrize("way", WAYS)
def test_keys_that_leaked_are_ended_before_their_time_and_others_are_not(way: Any) -> None:
    session, other = given(), given(life_s=1800)
    ended = auth_of(issuer(ended=(Ended(at_s=NOW_S, access_key_id=session.key_id),)))
    for auth, one, is_in in ((auth_of(), session, True), (ended, other, True), (ended, session, False)):
        asked = signed(one.key_id, one.secret, one.token.decode(), by=way)
        if is_in:
            assert auth.signed(asked).name == "oidc:corp:ann"
        else:
            with pytest.raises(Denied, match="ended before their time") as caught:
                auth.signed(asked)
            assert caught.value.code == "AccessDenied"


def test_all_that_a_person_has_is_ended_and_what_they_get_later_is_not() -> None:
    at_s = [float(NOW_S)]
    jwt, keys = token(iat=NOW_S), given()
    auth = auth_of(issuer(ended=(Ended(at_s=NOW_S, subject="ann"),)), at_s=at_s)
    for refused in (
        lambda: auth.holder(jwt),
        lambda: auth.holder(token(iat=None)),  # nobody knows when it was made
        lambda: auth.exchange(jwt.decode().encode(), 900),
        lambda: auth.signed(signed(keys.key_id, keys.secret, keys.token.decode())),
    ):
        with pytest.raises(Denied, match="ended before"):
            refused()
    assert auth.holder(token(sub="bob", iat=NOW_S)).name == "oidc:corp:bob"
    at_s[0] += 60
    later = token(iat=NOW_S + 60, exp=NOW_S + 3600)
    assert auth.holder(later).name == "oidc:corp:ann"
    session = auth.exchange(later, 900)[1]
    assert auth.signed(signed(session.key_id, session.secret, session.token.decode())).name == "oidc:corp:ann"
