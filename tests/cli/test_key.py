"""Keys: made, listed, taken away, and understood by what reads them."""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from forebay.core.access import Identities, Identity, decode_identities
from forebay.core.errors import Exists, Invalid
from forebay.core.keyfile import identities_of, parse
from forebay.core.machines.allowance import Limits
from forebay.core.oidc import SESSION_S_MAX
from forebay.node.engine.identities import IdentitiesFile
from forebay.node.sealed_secrets import Opener, make_key, read_key, seal
from forebay.ports import clock
from tests.cli.conftest import Program


def identities_in(path: Path) -> list[Identity]:
    """The identities of a file whose secrets are not sealed."""
    return identities_of(parse(path.read_bytes()), lambda sealed, key_id: pytest.fail("nothing is sealed"))


def test_a_key_is_made_listed_and_taken_away(alone: Program, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identities.json"
    assert "no keys" in alone("key", "ls").stderr
    made = json.loads(alone("key", "create", "trainer", "--allow", "read:corpus,write:ckpt-*", "--json").stdout)
    assert made["file"] == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (identity,) = identities_in(path)
    assert (identity.access_key_id, identity.secret_access_key) == (made["access_key_id"], made["secret_access_key"])
    assert identity.token_sha256 == hashlib.sha256(made["token"].encode()).hexdigest()
    assert made["token"] not in path.read_text(), "the token itself is not kept"
    assert identity.may("read", "corpus")
    assert identity.may("write", "ckpt-7")
    assert not identity.may("write", "corpus")
    shown = alone("key", "create", "admin", "--allow", "admin:*").stdout
    assert "export AWS_ACCESS_KEY_ID=FB" in shown
    assert f"--identities {path}" in shown
    assert alone("key", "ls").stdout.splitlines()[0].split() == [
        *("NAME", "ACCESS", "KEY", "ID", "TOKEN", "STATE", "LIMITS", "ALLOWS")
    ]
    assert "secret" not in alone("key", "ls", "--json").stdout
    assert [row["name"] for row in json.loads(alone("key", "ls", "--json").stdout)] == ["trainer", "admin"]
    assert len(Identities(identities_in(path)).by_key_id) == 2
    assert alone("key", "rm", "trainer").stdout == "the key of trainer is gone\n"
    assert json.loads(alone("key", "rm", "admin", "--json").stdout) == {"name": "admin", "removed": True}
    assert identities_in(path) == []


def test_limits_are_set_changed_and_kept_by_every_other_change(alone: Program, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identities.json"

    def limits() -> Limits | None:
        return identities_in(path)[0].limits

    alone("key", "create", "trainer", "--allow", "read:*", "--requests-per-s", "500", "--bytes-per-s", "200MiB/s")
    assert limits() == Limits(500, 200 << 20, 0)
    assert (
        "trainer may do 500 requests/s, 200.0 MiB/s, 8 connections."
        in alone("key", "limit", "trainer", "--connections", "8").stdout
    )
    for change in ("rotate", "disable", "enable"):  # a new key is no way out of the limits of the old one
        alone("key", change, "trainer")
        assert limits() == Limits(500, 200 << 20, 8), change
    alone("key", "grant", "trainer", "write:x")
    assert "500 requests/s, 200.0 MiB/s, 8 connections" in alone("key", "ls").stdout
    (shown,) = json.loads(alone("key", "ls", "--json").stdout)
    assert shown["limits"] == {"requests_per_s": 500, "bytes_per_s": "200MiB/s", "connections": 8}
    for wrong in (("--connections", "-1"), ("--bytes-per-s", "fast"), ("--requests-per-s", "nan"), ()):
        alone("key", "limit", "trainer", *wrong, code=2)
    assert limits() == Limits(500, 200 << 20, 8)
    said = alone("key", "limit", "trainer", "--requests-per-s", "0", "--bytes-per-s", "0", "--connections", "0").stdout
    assert "as much as there is" in said
    assert limits() is None


def test_wrong_keys_are_refused(alone: Program, tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys.json"))
    assert "verb one of" in alone("key", "create", "x", "--allow", "fly:corpus", *file, code=2).stderr
    assert "Missing option" in alone("key", "create", "x", *file, code=2).stderr
    alone("key", "create", "x", "--allow", "read:*", *file)
    assert "has a key already" in alone("key", "create", "x", "--allow", "read:*", *file, code=5).stderr
    assert "has no key" in alone("key", "rm", "y", *file, code=3).stderr
    (tmp_path / "keys.json").write_text("{}")
    assert "mend it by hand" in alone("key", "ls", *file, code=2).stderr
    assert "mend it by hand" in alone("key", "create", "z", "--allow", "read:*", *file, code=2).stderr
    assert (tmp_path / "keys.json").read_text() == "{}", "what cannot be read is not overwritten"


def _made(alone: Program, *args: str) -> Any:
    return json.loads(alone("key", *args, "--json").stdout)


def test_a_key_is_replaced_and_the_old_one_works_on_for_a_while(alone: Program, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identities.json"
    first = _made(alone, "create", "trainer", "--allow", "read:*")
    second = _made(alone, "rotate", "trainer", "--grace", "1h")
    now_s = clock.wall_s()
    assert second["access_key_id"] != first["access_key_id"]
    assert now_s + 3500 < second["old_until_s"] <= now_s + 3600
    table = Identities(identities_in(path))
    assert table.secrets == {made["access_key_id"]: made["secret_access_key"] for made in (first, second)}
    assert table.of_token(first["token"].encode(), now_s) is not None
    assert table.of_token(first["token"].encode(), now_s + 3700) is None
    assert "old until" in alone("key", "ls").stdout
    (shown,) = json.loads(alone("key", "ls", "--json").stdout)
    assert [old["access_key_id"] for old in shown["retiring"]] == [first["access_key_id"]]
    third = _made(alone, "rotate", "trainer", "--grace", "0s")
    assert "old_until_s" not in third
    assert list(Identities(identities_in(path)).secrets) == [third["access_key_id"]]
    assert "is not a time" in alone("key", "rotate", "trainer", "--grace", "soon", code=2).stderr
    assert "has no key" in alone("key", "rotate", "nobody", code=3).stderr


def test_what_a_key_may_is_changed_while_it_stays(alone: Program, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identities.json"
    made = _made(alone, "create", "trainer", "--allow", "read:corpus")
    assert "may read:corpus,write:ckpt-*" in alone("key", "grant", "trainer", "write:ckpt-*").stdout
    assert _made(alone, "grant", "trainer", "read:corpus")["allow"] == "read:corpus,write:ckpt-*"
    assert _made(alone, "revoke", "trainer", "read:corpus")["allow"] == "write:ckpt-*"
    assert "has no grant read:corpus" in alone("key", "revoke", "trainer", "read:corpus", code=3).stderr
    assert "is disabled" in alone("key", "disable", "trainer").stdout
    assert Identities(identities_in(path)).secrets == {}
    assert alone("key", "ls").stdout.splitlines()[1].split()[3] == "disabled"
    assert _made(alone, "enable", "trainer")["disabled"] is False
    assert "may do nothing" in alone("key", "revoke", "trainer", "write:ckpt-*").stdout
    (identity,) = identities_in(path)
    assert (identity.secret_access_key, identity.grants) == (made["secret_access_key"], ())


# --- sealed ----------------------------------------------------------------------------------------------------------
def test_a_sealed_file_gives_no_secret_away_and_keys_are_made_without_the_private_one(
    alone: Program, tmp_path: Path
) -> None:
    path, key = tmp_path / "node" / "identities.json", tmp_path / "elsewhere.key"
    made = [_made(alone, "create", "ann", "--allow", "read:*"), _made(alone, "rotate", "ann")]
    assert "the same file system" in alone("key", "seal", str(key)).stderr
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    moved = key.rename(tmp_path / "unreachable")
    made += [_made(alone, "create", "bob", "--allow", "admin:*"), _made(alone, "rotate", "bob")]
    text = path.read_text()
    assert not any(one[secret] in text for one in made for secret in ("secret_access_key", "token"))
    assert all(row["sealed"] for row in json.loads(alone("key", "ls", "--json").stdout))
    file = IdentitiesFile(str(path), str(moved))
    assert file.read()
    found = Identities(decode_identities(file.encoded))
    assert found.secrets == {one["access_key_id"]: one["secret_access_key"] for one in made}
    with pytest.raises(Invalid, match="--identity-key"):
        IdentitiesFile(str(path)).read()
    assert "--from" in alone("key", "seal", str(tmp_path / "new.key"), code=2).stderr
    _made(alone, "seal", str(tmp_path / "new.key"), "--from", str(moved))
    with pytest.raises(Invalid, match="does not open"):
        IdentitiesFile(str(path), str(moved)).read()
    again = IdentitiesFile(str(path), str(tmp_path / "new.key"))
    assert again.read()
    assert Identities(decode_identities(again.encoded)).secrets == found.secrets


def test_what_was_sealed_opens_only_as_it_was_and_for_whom(tmp_path: Path) -> None:
    opener = make_key(tmp_path / "key")
    sealed = seal(opener.public, "s3cret", "AKID")
    assert read_key(tmp_path / "key").open(sealed, "AKID") == "s3cret"
    assert seal(opener.public, "s3cret", "AKID") != sealed
    other = Opener(bytes(range(32)))
    for who, text, key_id in (
        (opener, sealed, "OTHER"),
        (other, sealed, "AKID"),
        (opener, sealed[:-8] + "AAAAAAA=", "AKID"),
        (opener, "A" * len(sealed), "AKID"),
        (opener, sealed[:40], "AKID"),
        (opener, "", "AKID"),
        (opener, "no base64!", "AKID"),
    ):
        with pytest.raises(Invalid):
            who.open(text, key_id)
    with pytest.raises(Exists):
        make_key(tmp_path / "key")
    for wrong in (b"", b"forebay-identity-key-1", b"forebay-identity-key-1 AAAA", b"x" * 60):
        (tmp_path / "wrong").write_bytes(wrong)
        with pytest.raises(Invalid):
            read_key(tmp_path / "wrong")
    with pytest.raises(Invalid, match="cannot be read"):
        read_key(tmp_path / "missing")


def test_a_node_keeps_its_identities_when_the_file_breaks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "identities.json"
    with pytest.raises(Invalid, match="cannot be read"):
        IdentitiesFile(str(path)).read()
    path.write_text(
        '{"identities": [{"name": "ann", "access_key_id": "A", "secret_access_key": "s", "allow": "read:*"}]}'
    )
    path.chmod(0o644)
    file = IdentitiesFile(str(path))
    with caplog.at_level(logging.WARNING):
        assert file.read()
        assert "chmod 600" in caplog.text
        assert not file.read(), "nothing changed"
        before = file.encoded
        for _ in range(3):
            path.write_text("{")
            assert not file.read()
        path.unlink()
        assert not file.read()
    assert file.encoded == before
    assert "stay as they were" in caplog.text
    path.write_text('{"identities": []}')
    assert file.read()
    assert decode_identities(file.encoded) == []
    assert file.encoded, "a file without entries is not a node without identities"
    assert not IdentitiesFile("").read()
    assert IdentitiesFile("").encoded == b""


def test_a_node_logs_by_name_what_changed_in_the_file(
    alone: Program, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "node" / "identities.json"
    made = [json.loads(alone("key", "create", name, "--allow", "read:a", "--json").stdout) for name in ("ann", "bob")]
    file = IdentitiesFile(str(path))
    with caplog.at_level(logging.INFO):
        assert file.read()
        assert caplog.text == "", "a start changes nothing"
        alone("key", "rm", "ann")
        alone("key", "grant", "bob", "read:b")
        alone("key", "create", "cid", "--allow", "read:c")
        assert file.read()
    assert "new: cid; gone: ann; changed: bob" in caplog.text
    assert all(one["secret_access_key"] not in caplog.text for one in made)


def test_what_an_issuers_people_have_is_ended_in_the_file(
    alone: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node" / "identities.json"
    key_id = "FBT" + "A" * 17
    assert "no issuer is in" in alone("key", "end", key_id, code=3).stderr
    rules = [{"claim": "sub", "value": "*", "allow": "read:corpus"}]
    issuers = [
        {"name": name, "issuer": f"https://{name}.example", "audience": "a", "rules": rules} for name in ("corp", "ci")
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"identities": [], "oidc": issuers}))

    def ended() -> list[list[str]]:
        return [[one.access_key_id or one.subject for one in issuer.ended] for issuer in parse(path.read_bytes()).oidc]

    assert "are worth nothing" in alone("key", "end", key_id).stdout
    assert ended() == [[key_id], [key_id]], "its id does not say whose it is"
    for _ in range(2):
        assert "what ann:x got until now" in alone("key", "end", "oidc:corp:ann:x").stdout
    assert ended() == [[key_id, "ann:x"], [key_id]], "once"
    assert json.loads(alone("key", "end", "oidc:ci:bob", "--json").stdout)["ended"] == "oidc:ci:bob"
    alone("key", "create", "trainer", "--allow", "read:corpus")
    assert ended() == [[key_id, "ann:x"], [key_id, "bob"]], "other changes keep it"
    for wrong, code, words in (
        ("FBTshort", 2, "neither temporary keys"),
        ("trainer", 2, "forebay key disable"),
        ("oidc:corp", 2, "neither"),
        ("oidc:corp:", 2, "neither"),
        ("oidc:crop:ann", 3, "it has corp, ci"),
    ):
        assert words in alone("key", "end", wrong, code=code).stderr, wrong
    now_s = clock.wall_s()
    monkeypatch.setattr(clock, "wall_s", lambda: now_s + SESSION_S_MAX + 60)
    alone("key", "end", "oidc:ci:bob")
    assert ended() == [[key_id, "ann:x"], ["bob"]], "keys whose time is over need no ending"
