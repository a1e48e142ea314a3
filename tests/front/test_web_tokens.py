"""Whom tokens of an issuer let in, and what does not: everything here is tried on the product's own check."""

from __future__ import annotations

import hmac
import json
import random
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from forebay.core import limits
from forebay.core.access import Identity, encode_identities, parse_grants
from forebay.core.errors import Denied, ForebayError, Invalid, Unavailable
from forebay.core.keyfile import parse, render
from forebay.core.messages.calls import IssuerNamed, Nothing
from forebay.core.oidc import ALGORITHMS, Rule, check_issuers, encode_trusted, keys_url, read_keys
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.tokens import AGAIN_S, KNOWN_MAX, LEEWAY_S, WebTokens
from tests.front.web_tokens import (
    AUDIENCE,
    EC_KEY,
    ED_KEY,
    KEY_SET,
    OTHER_KEY,
    RSA_KEY,
    URL,
    by_hand,
    issuer,
    pem_of,
    public_jwk,
    token,
    trusted,
)


def refuses(tokens: WebTokens, text: bytes, words: str, *, now_s: float | None = None) -> None:
    with pytest.raises(Denied, match=words):
        tokens.holder(text, time.time() if now_s is None else now_s)


def test_a_token_is_worth_what_the_rules_for_its_claims_say() -> None:
    tokens, now_s = WebTokens(trusted()), time.time()
    ann = tokens.holder(token(), now_s).identity
    assert (ann.name, ann.grants) == ("oidc:corp:ann", parse_grants("read:team-a,write:team-a"))
    robot = tokens.holder(token(sub="robot:7", scope="x watch y"), now_s).identity
    assert robot.grants == parse_grants("read:team-a,write:team-a,read:robots,observe:*")
    assert tokens.holder(token(groups="team-a"), now_s).identity.grants == ann.grants
    for claims in ({"groups": []}, {"groups": "team-ab"}, {"groups": ["x team-a"]}, {"groups": {"team-a": 1}}):
        refuses(tokens, token(**claims), "no rule lets them")
    refuses(tokens, token(groups=None, sub="my-robot:7", scope="watchers"), "no rule lets them")


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"), [(EC_KEY, "ES256", "ec"), (ED_KEY, "EdDSA", "ed"), (RSA_KEY, "RS256", "rsa")]
)
def test_each_kind_of_key_verifies(key: Any, algorithm: str, kid: str) -> None:
    assert WebTokens(trusted()).holder(token(key, algorithm, kid), time.time()).subject == "ann"


def test_no_algorithm_of_the_tokens_own_choice_is_taken() -> None:
    tokens, now_s = WebTokens(trusted()), int(time.time())
    claims = {"iss": URL, "aud": AUDIENCE, "sub": "ann", "groups": ["team-a"], "exp": now_s + 60}
    for name in ("none", "None", "NONE", "nOnE", "", None, 7, ["RS256"], "HS256", "HS512", "ES256K", "RS1", "rs256"):
        refuses(tokens, by_hand({"alg": name, "kid": "rsa"}, claims), "algorithm is not allowed")
    signed = by_hand({"alg": "HS256", "kid": "rsa"}, claims).rpartition(b".")[0]
    for secret in (pem_of(RSA_KEY), pem_of(RSA_KEY).strip(), KEY_SET["keys"][0]["n"].encode(), b""):
        forged = signed + b"." + by_hand(hmac.digest(secret, signed, "sha256"), b"").split(b".")[0]
        refuses(tokens, forged, "algorithm is not allowed")
    with pytest.raises(Invalid, match="choose of"):
        check_issuers([issuer(algorithms=("HS256",))])
    assert not [name for name in ALGORITHMS if name.startswith("HS") or name.lower() == "none"]


def test_a_key_verifies_with_its_own_algorithm_alone() -> None:
    tokens = WebTokens(trusted())
    refuses(tokens, token(RSA_KEY, "PS256", "rsa"), "not for its algorithm")  # the issuer says RS256 of it
    refuses(tokens, token(RSA_KEY, "RS256", "ec"), "signature")
    refuses(tokens, token(EC_KEY, "ES256", "rsa"), "not for its algorithm")
    refuses(tokens, token(ED_KEY, "EdDSA", "ec"), "signature")
    narrow = WebTokens(trusted(issuer(algorithms=("ES256",))))
    refuses(narrow, token(), "algorithm is not allowed")
    assert narrow.holder(token(EC_KEY, "ES256", "ec"), time.time())


def test_a_signature_of_anybody_else_lets_nobody_in() -> None:
    tokens, good = WebTokens(trusted()), token()
    refuses(tokens, token(OTHER_KEY), "signature")
    head, claims, signature = good.split(b".")
    refuses(tokens, b".".join((head, by_hand({}, {"iss": URL, "exp": 9e9}).split(b".")[1], signature)), "signature")
    refuses(tokens, good[:-8], "signature")
    refuses(tokens, head + b"." + claims + b".", "signature")
    assert tokens.holder(good, time.time())


def test_what_else_a_head_says_of_keys_is_not_read() -> None:
    tokens = WebTokens(trusted())
    own = public_jwk(OTHER_KEY, "rsa")
    for head in ({"jwk": own}, {"jku": "https://evil.example/keys"}, {"x5u": "https://evil.example/c"}, {"x5c": ["x"]}):
        refuses(tokens, token(OTHER_KEY, head=head), "signature")
    for head in ({"crit": ["exp"]}, {"crit": []}, {"crit": ["b64"], "b64": False}, {"typ": "logout+jwt"}):
        refuses(tokens, by_hand({"alg": "RS256", "kid": "rsa", **head}, {"iss": URL}), "kind that is not known")
    assert tokens.holder(token(head={"typ": "at+jwt"}), time.time())


@pytest.mark.parametrize("kid", ["../../etc/passwd", "' OR 1=1 --", "rsa\0", "RSA", "file:///dev/null", "x" * 5000])
def test_a_key_id_is_a_name_and_nothing_else(kid: str) -> None:
    with pytest.raises(Unavailable):
        WebTokens(trusted()).holder(token(kid=kid), time.time())
    refuses(WebTokens(trusted()), by_hand({"alg": "RS256", "kid": 7}, {"iss": URL, "exp": 9e9}), "key id is no text")


def test_without_a_key_id_there_must_be_one_key() -> None:
    alone = WebTokens(trusted(keys={"keys": KEY_SET["keys"][:1]}))
    assert alone.holder(token(kid=None), time.time())
    with pytest.raises(Unavailable):
        WebTokens(trusted()).holder(token(kid=None), time.time())


def test_a_token_for_others_lets_nobody_in() -> None:
    tokens = WebTokens(trusted())
    for audience in ("other", "forebay2", ["other"], ["for", "ebay"], "", [], {"forebay": 1}, [["forebay"]]):
        refuses(tokens, token(aud=audience), "made for others|no claim 'aud'|makes no sense")
    refuses(tokens, token(aud=None), "no claim 'aud'")
    assert tokens.holder(token(aud=["other", AUDIENCE]), time.time())
    for url in (URL + "/", "http://login.example", "https://evil.example", "", None, ["https://login.example"]):
        refuses(tokens, by_hand({"alg": "RS256", "kid": "rsa"}, {"iss": url, "exp": 9e9}), "no issuer that is trusted")


def test_times_are_kept_within_a_small_leeway() -> None:
    tokens, now_s = WebTokens(trusted()), int(time.time())
    ending = token(exp=now_s + 100)
    assert tokens.holder(ending, now_s)
    assert tokens.holder(ending, now_s + 100 + LEEWAY_S)
    refuses(tokens, ending, "expired", now_s=now_s + 101 + LEEWAY_S)  # remembered, and over all the same
    refuses(WebTokens(trusted()), ending, "expired", now_s=now_s + 101 + LEEWAY_S)
    for claim in ("nbf", "iat"):
        assert tokens.holder(token(**{claim: now_s + 20}), now_s)
        refuses(tokens, token(**{claim: now_s + 40}), "not valid yet", now_s=now_s)
    for odd in ("soon", str(now_s + 60), True, [now_s], {}, 10**400, -1, 1e300, float("inf"), float("nan")):
        for claim in ("exp", "nbf", "iat"):
            text = by_hand({"alg": "RS256", "kid": "rsa"}, {"iss": URL, "exp": odd})
            refuses(tokens, text, "no time in seconds", now_s=now_s)
            if claim != "exp" and not isinstance(odd, float | int) and odd != str(now_s + 60):
                head = {"alg": "RS256", "kid": "rsa"}
                said = {"iss": URL, "aud": AUDIENCE, "sub": "ann", "exp": now_s + 60, claim: odd}
                signed = jwt.PyJWS().encode(json.dumps(said).encode(), RSA_KEY, "RS256", headers=head)
                refuses(tokens, signed.encode(), "no time in seconds", now_s=now_s)


def test_what_must_be_there_is_asked_for() -> None:
    tokens = WebTokens(trusted())
    refuses(tokens, token(exp=None), "no time in seconds")
    refuses(tokens, token(sub=None), "no claim 'sub'")
    for subject in ("", "a" * 256, "a\nb", "a\x1b[2J"):
        refuses(tokens, token(sub=subject), "subject is not a printable text")


def test_whatever_comes_is_refused_in_words() -> None:
    tokens, chance, good = WebTokens(trusted()), random.Random(12), token()
    deep = by_hand(b"[" * 11_000, {})
    for text in (b"", b".", b"..", b"...", b"a.b.c", b"\xff.\xff.\xff", deep, by_hand([], []), by_hand(b"null", b"1")):
        refuses(tokens, text, "no JWT")
    refuses(tokens, b"a" * (limits.JWT_BYTES_MAX + 1), "longer than")
    refuses(tokens, token(filler="x" * limits.JWT_BYTES_MAX), "longer than")
    for _ in range(2000):
        mutated = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(mutated))
            mutated[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
        if bytes(mutated).split(b".")[:2] == good.split(b".")[:2]:
            continue  # base64 of the signature may be written in more than one way
        with pytest.raises((Denied, Unavailable)):
            tokens.holder(bytes(mutated), time.time())
    assert tokens.holder(good, time.time())


def test_a_new_key_is_asked_for_once_in_a_while() -> None:
    asked: list[Any] = []
    tokens = WebTokens(trusted(), lambda *question: not asked.append(question))  # type: ignore[func-returns-value]
    now_s = time.time()
    for number in range(50):  # each has an invented key
        with pytest.raises(Unavailable) as caught:
            tokens.holder(token(OTHER_KEY, kid=f"k{number}"), now_s)
        assert (caught.value.retry_after_s, caught.value.code) == (1.0, "IDPCommunicationError")
    assert [(verb, call) for verb, call, _ in asked] == [("issuer_keys", IssuerNamed("corp"))]
    asked[0][2](Nothing())
    for number in range(50):
        refuses(tokens, token(OTHER_KEY, kid=f"k{number}"), "has no such key", now_s=now_s + 1)
    with pytest.raises(Unavailable):
        tokens.holder(token(OTHER_KEY, kid="new"), now_s + AGAIN_S + 1)
    assert len(asked) == 2
    assert tokens.holder(token(), now_s)
    fresh = WebTokens(trusted(keys={"keys": [*KEY_SET["keys"], public_jwk(OTHER_KEY, "k1")]}))
    assert fresh.holder(token(OTHER_KEY, kid="k1"), now_s)


def test_an_issuer_that_was_never_heard_is_waited_for() -> None:
    asked: list[Any] = []
    tokens = WebTokens(trusted(keys={"keys": []}), lambda *question: not asked.append(question))  # type: ignore[func-returns-value]
    for ahead_s in (0, 1, 2):
        with pytest.raises(Unavailable):
            tokens.holder(token(), time.time() + ahead_s)
    asked[0][2](Nothing())
    with pytest.raises(Unavailable):
        tokens.holder(token(), time.time())


def test_only_tokens_that_held_are_remembered() -> None:
    tokens, now_s = WebTokens(trusted()), time.time()
    for _ in range(3):
        refuses(tokens, token(OTHER_KEY), "signature")
    assert not tokens._known
    good = token()
    assert tokens.holder(good, now_s) is tokens.holder(good, now_s)
    assert len(tokens._known) == 1 < KNOWN_MAX


# --- the node's own identities beside them ---------------------------------------------------------------------------
def auth_with(*identities: Identity) -> Auth:
    auth = Auth()
    auth.update(encode_identities(list(identities)), encode_trusted(trusted()))
    return auth


def test_nobody_of_an_issuer_is_taken_for_an_identity_of_the_file() -> None:
    auth = auth_with(Identity("ann", token_sha256="0" * 64, grants=parse_grants("admin:*")))
    ann = auth.holder(token())
    assert ann.name == "oidc:corp:ann"
    assert auth.owner(ann) != auth.owner(Identity("ann"))
    assert not auth.may(ann, "admin", "team-a")
    assert auth.may(auth.holder(token()), "read", "team-a")
    with pytest.raises(Invalid, match="choose another"):
        parse(b'{"identities": [{"name": "oidc:corp:ann", "token": "t"}]}')


def test_two_tokens_of_one_name_may_allow_different_things() -> None:
    auth = auth_with()
    before, after = auth.holder(token(sub="robot:1")), auth.holder(token(sub="robot:1", groups=[]))
    assert before.name == after.name
    for _ in range(2):
        assert auth.may(before, "write", "team-a")
        assert not auth.may(after, "write", "team-a")
        assert auth.may(after, "read", "robots")


def test_a_node_that_trusts_no_issuer_takes_no_tokens() -> None:
    auth = Auth()
    auth.update(encode_identities([Identity("x", token_sha256="0" * 64)]))
    with pytest.raises(Denied, match="FOREBAY_TOKEN"):
        auth.holder(token())


# --- the table -------------------------------------------------------------------------------------------------------
def test_the_table_stands_in_the_identities_file_and_is_read_back() -> None:
    text = b"""{"identities": [], "oidc": [{"name": "corp", "issuer": "https://login.example", "audience": "forebay",
      "rules": [{"claim": "groups", "value": "team-a", "allow": "read:team-a",
                 "limits": {"bytes_per_s": "20MiB/s"}}], "session_s_max": 7200}]}"""
    file = parse(text)
    assert file.oidc[0].session_s_max == 7200
    assert parse(render(file)) == file


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"issuer": "http://login.example"}, "https://HOST"),
        ({"issuer": "https://u@login.example"}, "https://HOST"),
        ({"issuer": "https://login.example/?a=b"}, "https://HOST"),
        ({"issuer": "ftp://login.example"}, "https://HOST"),
        ({"issuer": "https://"}, "https://HOST"),
        ({"issuer": "http://127.0.0.1.evil.example"}, "https://HOST"),
        ({"audience": ""}, "needs an audience"),
        ({"name": "a:b"}, "needs a name"),
        ({"name": ""}, "needs a name"),
        ({"algorithms": ()}, "choose of"),
        ({"algorithms": ("none",)}, "choose of"),
        ({"session_s_max": 60}, "session_s_max"),
        ({"session_s_max": 10**6}, "session_s_max"),
        ({"rules": ()}, "no rules"),
        ({"rules": (Rule(claim="", value="x", allow="read:a"),)}, "claim and a value"),
        ({"rules": (Rule(claim="sub", value="", allow="read:a"),)}, "claim and a value"),
        ({"rules": (Rule(claim="sub", value="x", allow="reed:a"),)}, "grant"),
        ({"rules": (Rule(claim="sub", value="x", allow="read:a"),) * 300}, "more than"),
    ],
)
def test_a_table_that_would_let_in_too_many_or_nobody_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        check_issuers([issuer(**changed)])


def test_issuers_on_loopback_may_do_without_tls() -> None:
    check_issuers([issuer(issuer="http://127.0.0.1:8080/realm"), issuer(name="b", issuer="http://localhost:1")])
    with pytest.raises(Invalid, match="twice"):
        check_issuers([issuer(), issuer(name="other")])


# --- what issuers publish --------------------------------------------------------------------------------------------
def test_of_a_key_set_only_sound_public_numbers_are_kept() -> None:
    weak, private = rsa.generate_private_key(65_537, 1024), KEY_SET["keys"][0] | {"d": "secret", "p": "x"}
    odd = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "hmac", "alg": "HS256"},
        public_jwk(weak, "weak"),
        public_jwk(RSA_KEY, "for-encryption") | {"use": "enc"},
        public_jwk(RSA_KEY, "hmac-with-rsa", alg="HS256"),
        public_jwk(RSA_KEY, "long") | {"n": "x" * 100_000},
        {"kty": ["RSA"], "kid": "list"},
        {"kty": "RSA", "kid": 7, "n": "x", "e": "y"},
        "text",
        None,
    ]
    kept = read_keys(json.dumps({"keys": [private, *odd]}).encode())
    assert [key["kid"] for key in kept] == ["rsa"]
    assert set(kept[0]) == {"kty", "kid", "n", "e", "alg"}
    for body in (b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": [%b]}' % b",".join([b"{}"] * 101), b"[" * 100_000):
        with pytest.raises(Unavailable):
            read_keys(body)
    with pytest.raises(Unavailable, match="more than"):
        read_keys(b" " * (limits.ISSUER_ANSWER_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "url",
    [
        "http://login.example/keys", "file:///etc/passwd", "http://127.0.0.1/keys", "https://u:p@login.example/keys",
        "gopher://x", "https://", "//login.example/keys", "https://login.example/k\r\nHost: x", 7, None,
    ],
)  # fmt: skip
def test_an_issuer_cannot_send_the_node_anywhere(url: Any) -> None:
    with pytest.raises(Unavailable, match="keys are said to be"):
        keys_url(issuer(), json.dumps({"issuer": URL, "jwks_uri": url}).encode())


def test_an_issuer_says_its_own_name() -> None:
    body = json.dumps({"issuer": "https://other.example", "jwks_uri": "https://login.example/keys"}).encode()
    with pytest.raises(Unavailable, match="calls itself"):
        keys_url(issuer(), body)
    body = json.dumps({"issuer": URL, "jwks_uri": "https://keys.example/a?b=c"}).encode()
    assert keys_url(issuer(), body) == "https://keys.example/a?b=c"
    here = issuer(issuer="http://127.0.0.1:8080")
    body = json.dumps({"issuer": here.issuer, "jwks_uri": "http://127.0.0.1:9/keys"}).encode()
    with pytest.raises(Unavailable, match="keys are said to be"):
        keys_url(here, body)


def test_errors_are_of_the_kinds_that_every_edge_knows() -> None:
    for text in (token(OTHER_KEY), token(exp=1), token(kid="new"), b"x"):
        with pytest.raises(ForebayError) as caught:
            WebTokens(trusted()).holder(text, time.time())
        assert caught.value.kind in ("Denied", "Unavailable")
