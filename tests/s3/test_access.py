"""Identities and grants, and the front's door check."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from forebay.core.access import (
    ANYONE,
    WHOLE,
    Grant,
    Identities,
    Identity,
    Retiring,
    Verb,
    decode_identities,
    encode_identities,
    format_grants,
    parse_grants,
)
from forebay.core.errors import Denied, Invalid, NotFound
from forebay.core.keyfile import Entry, KeyFile, Replaced, identities_of, parse, render
from forebay.core.types import Bucket
from forebay.node.front.http.auth import Auth
from forebay.node.front.http.requests import Request

FILE = b"""{"identities": [
    {"name": "trainer", "access_key_id": "AKIDTRAINER", "secret_access_key": "s3cret", "token": "t0ken",
     "allow": "read:corpus, write:ckpt-*"},
    {"name": "operator", "token_sha256": "%b", "allow": "admin:*"},
    {"name": "idle", "token": "other"}
]}""" % hashlib.sha256(b"op").hexdigest().upper().encode()


def identities_in(text: bytes) -> list[Identity]:
    """The identities of a file whose secrets are not sealed."""
    return identities_of(parse(text), lambda sealed, key_id: pytest.fail("nothing is sealed"))


def test_what_grants_allow() -> None:
    for text, verb, bucket, allowed in (
        ("read:corpus", "read", "corpus", True),
        ("read:corpus", "read", "corpus2", False),
        ("read:corpus", "write", "corpus", False),
        ("write:corpus", "read", "corpus", False),
        ("admin:corpus", "read", "corpus", True),
        ("admin:corpus", "write", "corpus", True),
        ("admin:corpus", "admin", "corpus", True),
        ("write:corpus", "admin", "corpus", False),
        ("read:ckpt-*", "read", "ckpt-7b", True),
        ("read:ckpt-*", "read", "ckpt-", True),
        ("read:ckpt-*", "read", "my-ckpt-7b", False),
        ("read:*-ckpt-*", "read", "my-ckpt-7b", True),
        ("read:a.c", "read", "abc", False),
        ("admin:*", "admin", "", True),
        ("admin:corpus", "admin", "", False),
        ("read:one,read:two", "read", "two", True),
    ):
        assert Identity("i", grants=parse_grants(text)).may(verb, bucket) is allowed, (text, verb, bucket)  # type: ignore[arg-type]
    assert not Identity("i").may("read", "corpus")


def test_grants_that_make_no_sense_are_refused_with_their_text() -> None:
    for text in ("", "read", "read:", "list:corpus", "read:Corpus", "read:a b", "read:corpus,,write:x", "read:[a-z]"):
        with pytest.raises(Invalid, match="grant"):
            parse_grants(text)


@pytest.mark.parametrize(
    ("text", "prefix", "shown"),
    [
        ("write:ckpt-*/team-a/", "team-a/", None),
        ("read:b/team-a/*", "team-a/", "read:b/team-a/"),
        ("read:b/run-*", "run-", None),
        ("read:b/a, b/", "a", "no"),
        ("read:b/a%2C b/", "a, b/", "read:b/a%2C%20b/"),
        ("read:b/50%25/%2A/", "50%/*/", None),
        ("read:b/Müller/", "Müller/", None),
        ("read:b/M%C3%BCller%2f", "Müller/", "read:b/Müller/"),
        ("read:b/zero%E2%80%8Bwidth/", "zero\u200bwidth/", None),
        ("admin:*/a/b/c/", "a/b/c/", None),
        ("create:scratch-*", "", None),
    ],
)
def test_prefixes_are_read_and_shown(text: str, prefix: str, shown: str | None) -> None:
    if shown == "no":
        with pytest.raises(Invalid, match="end its prefix"):
            parse_grants(text)
        return
    (grant,) = parse_grants(text)
    assert grant.prefix == prefix
    assert format_grants((grant,)) == (shown or text)


def test_prefixes_that_could_mean_two_things_are_refused() -> None:
    for text, words in (
        ("read:b/", "leave the slash out"),
        ("read:b/*", "leave the slash out"),
        ("read:b/team-a", "end its prefix"),
        ("read:b/*/x/", r"\* stands at the end"),
        ("read:b/a**", r"\* stands at the end"),
        ("read:b//a/", "empty folder"),
        ("read:b/a//", "empty folder"),
        ("read:b/a/../b/", "empty folder"),
        ("read:b/./", "empty folder"),
        ("read:b/a%2F%2E%2E%2Fb/", "empty folder"),
        ("read:b/50%/", "percent-encoded"),
        ("read:b/%FF/", "percent-encoded"),
        ("read:b/" + "x" * 1100 + "/", "at most"),
        ("observe:b/a/", "whole buckets"),
        ("create:b/a/", "whole buckets"),
        ("read:/a/", "verb"),
    ):
        with pytest.raises(Invalid, match=words):
            parse_grants(text)


BUCKETS = ("lake", "lake-2", "scratch", "")
FOLDERS = ("team-a", "team-b", "team", "tea", "..", ".", "", "a b", "é", "e\u0301", "%2e%2e", "team-a\\..", "x,y")
segments = some.sampled_from(FOLDERS)
names = some.lists(segments, max_size=4).map("/".join)
patterns = some.sampled_from(("lake", "lake*", "*", "*-2", "s*h", "other"))
asked_grants = some.lists(
    some.tuples(some.sampled_from(("read", "write", "admin", "observe", "create")), patterns, names | some.just("")),
    max_size=4,
)


def fits_dumbly(pattern: str, text: str) -> bool:
    if not pattern or not text:
        return not pattern.strip("*") and not text
    if pattern[0] == "*":
        return fits_dumbly(pattern[1:], text) or fits_dumbly(pattern, text[1:])
    return pattern[0] == text[0] and fits_dumbly(pattern[1:], text[1:])


def may_dumbly(grants: list[tuple[str, str, str]], verb: str, bucket: str, name: str, own: bool) -> bool:
    leads_out = any(part in (".", "..") for part in name.replace("\\", "/").split("/"))
    for held, pattern, prefix in grants:
        if not fits_dumbly(pattern, bucket):
            continue
        if not (held in (verb, "admin") or (held == "create" and own)):
            continue
        if not prefix:
            return True
        if not leads_out and len(name) >= len(prefix) and all(a == b for a, b in zip(prefix, name, strict=False)):
            return True
    return False


@given(asked_grants, some.sampled_from(BUCKETS), names | some.just(""), some.sampled_from(("i", "j", "")))
@example([("read", "lake", "team-a/")], "lake", "team-a/../team-b/x", "")
@example([("read", "lake", "team-a/")], "lake", "team-a", "")
@example([("write", "*", "team-a/"), ("create", "*", "")], "lake", "team-b/x", "i")
def test_grants_allow_what_a_dumb_reading_of_them_allows(
    wanted: list[tuple[str, str, str]], bucket: str, name: str, owner: str
) -> None:
    told = []
    for verb, pattern, prefix in wanted:
        try:
            told += parse_grants(format_grants([Grant(verb, pattern, prefix)]))  # type: ignore[arg-type]
        except Invalid:
            assert verb in ("observe", "create") or any(part in ("", ".", "..") for part in prefix.split("/"))
    plain = [(grant.verb, grant.pattern, grant.prefix) for grant in told]
    assert all(one in wanted for one in plain), "a grant is what was written"
    identity = Identity("i", grants=tuple(told))
    verbs: tuple[Verb, ...] = ("read", "write", "admin", "observe", "create")
    for verb in verbs:
        expected = may_dumbly(plain, verb, bucket, name, owner == "i")
        expected |= verb == "create" and any(held == "create" and fits_dumbly(p, bucket) for held, p, _ in plain)
        assert identity.may(verb, bucket, name, owner) is expected, (plain, verb, bucket, name, owner)
    for shorter, longer in pairwise(name[:end] for end in range(len(name) + 1)):
        if identity.may("read", bucket, shorter, owner) and not identity.may("read", bucket, longer, owner):
            assert ".." in longer or longer.endswith("."), "what is under a name is under its beginning"
    if identity.may("read", bucket, "", owner):
        assert identity.reach("read", bucket, owner) is WHOLE


def test_a_file_of_identities_travels_whole() -> None:
    identities = identities_in(FILE)
    assert decode_identities(encode_identities(identities)) == identities
    assert [identity.name for identity in identities] == ["trainer", "operator", "idle"]
    assert identities[0].grants == (Grant("read", "corpus"), Grant("write", "ckpt-*"))
    assert "t0ken" not in repr(identities)
    assert decode_identities(b"") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "does not fit"),
        (b"[]", "does not fit"),
        (b'{"identities": [{"nam": "x"}]}', "does not fit"),
        (b'{"identities": [{"name": "x"}]}', "cannot prove itself"),
        (b'{"identities": [{"name": "x", "access_key_id": "A"}]}', "half a key"),
        (b'{"identities": [{"name": "x", "token": "t", "allow": "read"}]}', "grant"),
        (b'{"identities": [{"name": "", "token": "t"}]}', "empty"),
        (b'{"identities": [{"name": "x", "token": "t"}, {"name": "x", "token": "u"}]}', "taken twice"),
        (b'{"identities": [{"name": "x", "token": "t"}, {"name": "y", "token": "t"}]}', "share"),
    ],
)
def test_a_bad_file_says_what_is_wrong(text: bytes, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        identities_in(text)


def _request(headers: dict[bytes, bytes] | None = None) -> Request:
    return Request(b"GET", b"/corpus/a", b"/corpus/a", b"", {b"host": b"h", **(headers or {})})


def test_without_identities_everyone_may() -> None:
    auth = Auth()
    assert auth.open
    assert auth.signed(_request()) is ANYONE
    assert auth.signed(_request({b"authorization": b"AWS4-HMAC-SHA256 whatever"})) is ANYONE
    assert auth.bearer(_request({b"host": b"localhost:9400"})) is ANYONE
    auth.require(ANYONE, "admin", "corpus")


def test_with_identities_a_caller_must_prove_and_be_granted() -> None:
    auth = Auth()
    auth.update(encode_identities(identities_in(FILE)))
    assert not auth.open
    with pytest.raises(Denied, match="sign the request"):
        auth.signed(_request())
    for header in (
        {},
        {b"authorization": b"Bearer wrong"},
        {b"authorization": b"Basic t0ken"},
        {b"authorization": b"Bearer"},
    ):
        with pytest.raises(Denied, match="Bearer"):
            auth.bearer(_request(header))
    trainer = auth.bearer(_request({b"authorization": b"Bearer t0ken"}))
    assert trainer.name == "trainer"
    assert auth.bearer(_request({b"authorization": b"bearer op"})).name == "operator"
    for _ in range(2):  # the second answer is a remembered one
        auth.require(trainer, "read", "corpus")
        with pytest.raises(Denied, match="write:corpus"):
            auth.require(trainer, "write", "corpus")


def test_an_update_takes_effect_at_once() -> None:
    auth = Auth()
    auth.update(encode_identities(identities_in(FILE)))
    trainer = auth.bearer(_request({b"authorization": b"Bearer t0ken"}))
    auth.require(trainer, "read", "corpus")
    auth.update(encode_identities([Identity("trainer", token_sha256=hashlib.sha256(b"t0ken").hexdigest())]))
    with pytest.raises(Denied):
        auth.require(auth.bearer(_request({b"authorization": b"Bearer t0ken"})), "read", "corpus")
    auth.update(b"")
    assert auth.open


def test_who_made_a_bucket_is_judged_by_the_buckets_that_are_there() -> None:
    auth = Auth()
    made = [Identity(name, token_sha256=hashlib.sha256(name.encode()).hexdigest(), grants=parse_grants("create:s-*"))
            for name in ("one", "two")]  # fmt: skip
    auth.update(
        encode_identities(made),
        buckets=[Bucket("s-1", "local://", owner="one"), Bucket("other", "local://", owner="one")],
    )
    one, two = auth.holder(b"one"), auth.holder(b"two")
    for _ in range(2):  # the second answer is a remembered one
        assert [auth.may(who, "admin", "s-1") for who in (one, two)] == [True, False]
        assert [auth.may(who, "create", "s-1") for who in (one, two)] == [True, True]
        assert not auth.may(one, "read", "other"), "which no grant of theirs is about any more"
    auth.update(encode_identities(made), buckets=[Bucket("s-1", "local://", owner="two")])
    assert [auth.may(who, "admin", "s-1") for who in (one, two)] == [False, True], "the same identities, another bucket"
    assert (auth.maker(two, "s-1"), auth.maker(ANYONE, "s-1")) == ("two", "")
    auth.update(encode_identities(made), buckets=[Bucket("s-1", "local://")])
    assert not auth.may(two, "read", "s-1"), "a bucket that nobody made so is nobody's"


def test_a_prefix_allows_keys_and_never_the_bucket() -> None:
    auth = Auth()
    auth.update(encode_identities([Identity("a", token_sha256=hashlib.sha256(b"a").hexdigest(),
                                            grants=parse_grants("read:lake/team-a/"))]))  # fmt: skip
    a, lake = auth.holder(b"a"), Bucket("lake", "memory://lake")
    auth.require_read(a, lake, "team-a/x")
    auth.require_read(a, lake, None)
    for name in ("", "team-a", "team-b/x", "team-a/../team-b/x"):
        with pytest.raises(Denied, match="outside of lake/team-a/"):
            auth.require_read(a, lake, name)
    with pytest.raises(Denied):
        auth.require_write(a, lake, None)
    with pytest.raises(NotFound, match="look at the name"):
        auth.require_read(a, Bucket("lake", ""), "team-b/x")


def test_lookups_by_token_and_key() -> None:
    table = Identities(identities_in(FILE))
    assert table.secrets == {"AKIDTRAINER": "s3cret"}
    assert table.of_token(b"nobody", 0) is None
    assert table.of_key("AKIDNOBODY", 0) is None
    for found in (table.of_token(b"t0ken", 0), table.of_key("AKIDTRAINER", 0)):
        assert found is not None
        assert found.name == "trainer"


def _digest(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def test_a_key_that_was_replaced_works_until_its_time_and_no_longer() -> None:
    old = Retiring("AKIDOLD", "old secret", _digest(b"old"), until_s=100.0)
    table = Identities([Identity("trainer", "AKIDNEW", "new secret", _digest(b"new"), retiring=(old,))])
    assert table.secrets == {"AKIDNEW": "new secret", "AKIDOLD": "old secret"}
    for now_s, works in ((0.0, True), (100.0, True), (100.1, False)):
        assert (table.of_key("AKIDOLD", now_s) is not None) is works
        assert (table.of_token(b"old", now_s) is not None) is works
        assert table.of_key("AKIDNEW", now_s) is not None
        assert table.of_token(b"new", now_s) is not None
    with pytest.raises(Invalid, match="share"):
        Identities([Identity("trainer", "AKIDOLD", "x", retiring=(old,))])


def test_who_is_disabled_proves_nothing_but_keeps_the_key() -> None:
    ann = Identity("ann", "AKIDANN", "secret", _digest(b"t"), parse_grants("read:*"), disabled=True)
    table = Identities([ann])
    assert table.secrets == {}
    assert table.of_key("AKIDANN", 0) is None
    assert table.of_token(b"t", 0) is None
    with pytest.raises(Invalid, match="share"):
        Identities([ann, Identity("bob", "AKIDANN", "secret")])


def test_a_file_without_entries_lets_nobody_in() -> None:
    auth = Auth()
    auth.update(encode_identities(identities_in(b'{"identities": []}')))
    assert not auth.open
    with pytest.raises(Denied):
        auth.signed(_request())
    with pytest.raises(Denied):
        auth.bearer(_request({b"host": b"localhost"}))


def test_no_secret_is_ever_printed() -> None:
    old = Retiring("AKIDOLD", "old-secret", _digest(b"old"), until_s=100.0)
    ann = Identity("ann", "AKIDANN", "ann-secret", _digest(b"t"), parse_grants("read:*"), (old,))
    entry = Entry(name="ann", access_key_id="AKIDANN", secret_access_key="ann-secret", token="tok-en")
    for text in (repr(ann), repr(old), str([ann]), repr(KeyFile((entry,))), f"{entry}"):
        assert "AKID" in text
        for secret in ("secret", "tok-en", _digest(b"t"), _digest(b"old")):
            assert secret not in text


# --- the file ---------------------------------------------------------------------------------------------------------
def _open_sealed(sealed: str, key_id: str) -> str:
    if not sealed.startswith(key_id):
        raise Invalid(f"the secret of {key_id} was sealed for another key")
    return sealed.removeprefix(key_id)


def test_a_file_is_read_back_as_it_was_written() -> None:
    old = Replaced(access_key_id="AKIDOLD", secret_sealed="AKIDOLDx", until_s=1e9)
    ann = Entry(name="ann", allow="read:*", access_key_id="AKIDANN", secret_sealed="AKIDANNy", retiring=(old,))
    bob = Entry(name="bob", token="t", disabled=True)
    for file in (KeyFile(()), KeyFile((), "public"), KeyFile((bob,)), KeyFile((ann, bob), "public")):
        assert parse(render(file)) == file
        assert file.is_sealed == (ann in file.identities)
    found = identities_of(KeyFile((ann, bob)), _open_sealed)
    assert [identity.secret_access_key for identity in found] == ["y", ""]
    assert found[0].retiring == (Retiring("AKIDOLD", "x", "", 1e9),)
    assert format_grants(found[0].grants) == "read:*"
    assert found[1].disabled


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry(name="x", access_key_id="A", secret_access_key="s", secret_sealed="As"), "secret twice"),
        (Entry(name="x", secret_sealed="s"), "half a key"),
        (Entry(name="x", access_key_id="A", secret_sealed="B"), "another key"),
        (Entry(name="x", token="t", retiring=(Replaced(until_s=1.0),)), "cannot prove"),
        (Entry(name="x", token="t", retiring=(Replaced(until_s=1.0, token="t"),)), "share"),
    ],
)
def test_an_entry_that_is_not_sound_is_refused(entry: Entry, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        identities_of(KeyFile((entry,)), _open_sealed)
