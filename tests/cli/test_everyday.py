"""Verbs of every day: jobs from a list, logs, status that goes on, saved nodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from forebay.cli import jobs
from tests.cli.conftest import Program
from tests.client.fake_node import FakeNode
from tests.patience import until


def test_a_job_takes_its_objects_from_a_list(
    program: Program, node: FakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tmp_path / "names.txt"
    names.write_bytes(b"corpus/train/a.tar\r\n\ns3://corpus/val/a.tar\n")
    (state,) = json.loads(program("prefetch", "--from", str(names), "--json").stdout)
    assert (state["state"], state["units_done"]) == ("done", 2)
    monkeypatch.setattr(jobs, "KEYS_BYTES_MAX", 15)
    assert len(json.loads(program("evict", "--from", str(names), "--json").stdout)) == 2, "as many jobs as it takes"
    with names.open("rb") as lines:
        listing = program.process("prefetch", "--from", "-", "--json", stdin=lines)
    assert [each["units_done"] for each in json.loads(listing.communicate(timeout=60)[0])] == [2]
    program("prefetch", code=2)
    program("prefetch", "corpus", "--from", str(names), code=2)
    names.write_bytes(b"\n")
    assert "names no objects" in program("prefetch", "--from", str(names), code=2).stderr
    names.write_bytes(b"\xff\n")
    assert "not UTF-8" in program("prefetch", "--from", str(names), code=2).stderr
    program("prefetch", "--from", str(tmp_path / "none"), code=10)


def test_status_goes_on_until_ctrl_c(program: Program, node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = program.process("status", "--watch", "--json")
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["node_id"]
    watching.send_signal(signal.SIGINT)
    assert (watching.wait(timeout=60), watching.communicate()[1]) == (0, b"")


def test_logs_are_printed_and_followed(program: Program, tmp_path: Path) -> None:
    assert "forebay up" in program("logs", code=3).stderr
    log = tmp_path / "node" / "log" / "node.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert len(program("logs").stdout.splitlines()) == 50
    assert program("logs", "-n", "2").stdout == "line 98\nline 99\n"
    assert program("logs", "-n", "0").stdout == ""
    following = program.process("logs", "-n", "1", "-f")
    assert following.stdout is not None
    assert following.stdout.readline() == b"line 99\n"
    with log.open("a") as file:
        file.write("line 100\n")
    assert following.stdout.readline() == b"line 100\n"
    log.rename(log.with_suffix(".1"))
    log.write_text("of a new file\n")
    assert following.stdout.readline() == b"of a new file\n"
    following.send_signal(signal.SIGINT)
    until(lambda: following.poll() is not None)
    assert following.returncode == 0
    following.communicate()


def test_nodes_are_saved_by_name(program: Program, alone: Program, node: FakeNode, tmp_path: Path) -> None:
    alone.env["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    file = tmp_path / "config" / "forebay" / "nodes.json"
    alone("ls", code=6)
    assert "used where no node is named" in alone("config", "set", "test", node.url).stdout
    assert "corpus" in alone("--url", "test", "ls").stdout
    alone.env["FOREBAY_URL"] = ""
    assert "corpus" in alone("ls").stdout, "the first one is used"
    alone.env["FOREBAY_TOKEN"] = "of-other"
    alone("config", "set", "other", "https://other.example:9400", "--token")
    alone.env["FOREBAY_TOKEN"] = ""
    assert file.stat().st_mode & 0o777 == 0o600
    shown = json.loads(alone("config", "ls", "--json").stdout)
    assert [(each["name"], each["token"], each["used"]) for each in shown] == [
        ("other", True, False),
        ("test", False, True),
    ]
    assert "of-other" not in alone("config", "ls").stdout
    alone("config", "set", "test", node.url, "--token", code=2)
    alone.env["FOREBAY_TOKEN"] = "of-test"
    alone("config", "set", "test", node.url, "--token")
    alone.env["FOREBAY_TOKEN"] = ""
    node.seen.clear()
    alone("ls")
    alone("--url", node.url, "ls")
    sent = [
        {name.lower(): value for name, value in headers.items()}.get("authorization") for _, _, headers in node.seen
    ]
    assert sent == ["Bearer of-test", None], "a token goes to whom it was saved for, by name"
    assert "did you mean other?" in alone("config", "use", "othr", code=3).stderr
    alone("config", "use", "other")
    alone("config", "rm", "other")
    alone("config", "rm", "other", code=3)
    alone("config", "set", "Not.a.name", node.url, code=2)
    file.write_text("{")
    assert "mend it" in alone("ls", code=2).stderr


def test_certificates_of_a_saved_node_are_looked_at_when_it_is_saved(alone: Program, tmp_path: Path) -> None:
    alone.env["XDG_CONFIG_HOME"] = str(tmp_path)
    (tmp_path / "none.pem").write_text("no certificate")
    for file in ("missing.pem", "none.pem"):
        error = alone("config", "set", "prod", "https://node7:9400", "--ca", str(tmp_path / file), code=2).stderr
        assert f"the certificates {tmp_path / file} cannot be used" in error
    assert "no nodes are saved" in alone("config", "ls").stderr
