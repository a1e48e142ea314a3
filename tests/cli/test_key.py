"""Keys: made, listed, taken away, and understood by what reads them."""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

from tests.cli.conftest import Program

from forebay.core.access import Identities, parse_identities


def test_a_key_is_made_listed_and_taken_away(alone: Program, tmp_path: Path) -> None:
    path = tmp_path / "node" / "identities.json"
    assert "no keys" in alone("key", "ls").stderr
    made = json.loads(alone("key", "create", "trainer", "--allow", "read:corpus,write:ckpt-*", "--json").stdout)
    assert made["file"] == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (identity,) = parse_identities(path.read_bytes())
    assert (identity.access_key_id, identity.secret_access_key) == (made["access_key_id"], made["secret_access_key"])
    assert identity.token_sha256 == hashlib.sha256(made["token"].encode()).hexdigest()
    assert made["token"] not in path.read_text(), "the token itself is not kept"
    assert identity.may("read", "corpus")
    assert identity.may("write", "ckpt-7")
    assert not identity.may("write", "corpus")
    shown = alone("key", "create", "admin", "--allow", "admin:*").stdout
    assert "export AWS_ACCESS_KEY_ID=FB" in shown
    assert f"--identities {path}" in shown
    assert alone("key", "ls").stdout.splitlines()[0].split() == ["NAME", "ACCESS", "KEY", "ID", "TOKEN", "ALLOWS"]
    assert "secret" not in alone("key", "ls", "--json").stdout
    assert [row["name"] for row in json.loads(alone("key", "ls", "--json").stdout)] == ["trainer", "admin"]
    assert len(Identities(parse_identities(path.read_bytes())).by_key_id) == 2
    assert alone("key", "rm", "trainer").stdout == "the key of trainer is gone\n"
    assert json.loads(alone("key", "rm", "admin", "--json").stdout) == {"name": "admin", "removed": True}
    assert parse_identities(path.read_bytes()) == []


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
