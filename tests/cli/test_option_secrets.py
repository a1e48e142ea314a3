"""Secrets of a backend reach the node without standing in a command line."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Program
from tests.client.fake_node import FakeNode
from tests.patience import PATIENCE_S, until

ADD = ("bucket", "add", "data", "s3://x")


def kept(node: FakeNode) -> dict[str, str]:
    return node.settings["data"].options


def test_a_secret_comes_from_a_file_or_the_environment(program: Program, node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("fi/le+secret=\n")
    program.env["MY_SECRET"] = "env/secret"
    told = program(*ADD, "--option", f"secret_access_key=@{tmp_path}/secret", "--option", "session_token=env:MY_SECRET")
    assert kept(node) == {"secret_access_key": "fi/le+secret=", "session_token": "env/secret"}
    assert "warning" not in told.stderr
    assert "secret=" not in told.output


def test_a_secret_that_is_written_out_works_and_warns(program: Program, node: FakeNode) -> None:
    told = program(*ADD, "--option", "secret_access_key=literal", "--option", "region=x", "--option", "access_key_id=a")
    assert kept(node) == {"secret_access_key": "literal", "region": "x", "access_key_id": "a"}
    assert told.stderr.count("warning") == 1
    assert "secret_access_key=@FILE" in told.stderr
    assert "literal" not in told.stderr
    again = program("bucket", "set", "data", "--option", "secret_access_key=", "--option", "endpoint=http://u:p@h")
    assert again.stderr.count("warning") == 1, "a URL with a password is a secret, no value is none"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("secret_access_key=@/nonexistent", "cannot be read"),
        ("secret_access_key=@/dev/null", "is empty"),
        ("secret_access_key=env:NOT_THERE", "export it"),
        ("secret_access_key", "secret_access_key=@FILE"),  # nobody is there to be asked
    ],
)
def test_a_secret_that_is_not_there_is_an_error(program: Program, node: FakeNode, option: str, words: str) -> None:
    assert words in program(*ADD, "--option", option, code=2).stderr
    assert "data" not in node.settings


def test_a_secret_is_asked_for_on_a_terminal_and_not_shown(program: Program, node: FakeNode) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *ADD, "--option", "secret_access_key"],
        env=program.environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""

    def read() -> bool:
        nonlocal shown
        if select.select([ours], [], [], 0.1)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                return True  # the other side is closed
        return b"secret_access_key: " in shown

    until(read, "the question")
    os.write(ours, b"typed/secret\n")
    assert process.wait(PATIENCE_S) == 0, shown
    while select.select([ours], [], [], 0)[0]:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert kept(node) == {"secret_access_key": "typed/secret"}
    assert b"typed" not in shown
