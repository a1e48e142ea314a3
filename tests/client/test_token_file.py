"""A bearer token in a file that somebody renews."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from forebay.client import calling
from forebay.client.calling import Calling
from forebay.client.sync import Client
from forebay.core.errors import Invalid
from forebay.core.messages.http1 import Request


def proof_of(one: Calling) -> str:
    """What a request now says of its sender."""
    return dict(one.dress(Request("GET", "/"))[1]).get("Authorization", "")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a token, which clients are told of."""
    monkeypatch.setattr(calling, "REREAD_S", 0.0)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FOREBAY_TOKEN", raising=False)
    path = tmp_path / "token"
    path.write_text("first\n")
    monkeypatch.setenv("FOREBAY_TOKEN_FILE", str(path))
    return path


def test_a_renewed_token_is_used_without_a_new_client(file: Path) -> None:
    one = Calling(None, None, None, None)
    assert proof_of(one) == "Bearer first"
    file.write_text("second")
    assert proof_of(one) == "Bearer second"
    for gone in ("", "two\nlines", "\x00"):
        file.write_text(gone)
        assert proof_of(one) == "Bearer second"
    file.unlink()
    assert proof_of(one) == "Bearer second"
    assert one.token == "second"


def test_another_process_reads_the_file_itself(file: Path) -> None:
    with Client() as client:
        file.write_text("second")
        with pickle.loads(pickle.dumps(client)) as twin:
            assert twin._calling.token == "second"


def test_a_token_that_was_given_goes_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proof_of(Calling(None, "mine", None, None)) == "Bearer mine"
    assert proof_of(Calling(None, "", None, None)) == ""
    monkeypatch.setenv("FOREBAY_TOKEN", "shell")
    assert proof_of(Calling(None, None, None, None)) == "Bearer shell"


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    file.unlink()
    with pytest.raises(Invalid, match="FOREBAY_TOKEN_FILE"):
        Calling(None, None, None, None)
