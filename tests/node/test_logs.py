"""A node's log: its two forms, its rotation, and SIGHUP, which ends no node."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.core.errors import Invalid
from forebay.node.process.logs import JsonLines, TextLines
from forebay.node.rotated_files import ROTATED_KEPT, is_at, open_to_append, rotate
from forebay.node.settings import load
from tests.patience import PATIENCE_S

from .certificates import make as make_pair
from .conftest import NodeProcess, until

Make = Callable[..., NodeProcess]
HOSTILE = "key\n2026-01-01 00:00:00,000 INFO forebay: all is well\r\x1b[2J\x7f\x85\u2028\u2029end"


def record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    found = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("forebay.http", logging.WARNING, __file__, 1, message, arguments, found)


def failed(message: str) -> BaseException:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


# --- the lines -------------------------------------------------------------------------------------------------------
def test_nobody_makes_a_line_of_the_log_but_the_node() -> None:
    text = TextLines().format(record("lost %s", HOSTILE))
    assert text.isprintable()
    assert r"\n2026" in text
    text = TextLines().format(record("a bug at %r", "x", error=failed(HOSTILE)))
    first, *others = text.split("\n")
    assert first.endswith("forebay.http: a bug at 'x'")
    assert others[0].startswith("    Traceback")
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    standing = record("it stands here:")
    standing.stack_info = f'  File "x.py", line 1, in f\n    {HOSTILE.splitlines()[0]}\r'
    first, *others = TextLines().format(standing).split("\n")
    assert others == ['      File "x.py", line 1, in f', r"        key\x0d"]


def test_a_line_of_json_holds_what_a_line_of_text_holds() -> None:
    line = JsonLines("front-1").format(record("lost %s", HOSTILE, error=failed(HOSTILE)))
    assert line.isascii()
    assert line.replace("\x7f", "").isprintable()
    said = json.loads(line)
    assert said["message"] == f"lost {HOSTILE}"
    assert said["error"].endswith(f"ValueError: {HOSTILE}")
    assert (said["level"], said["logger"], said["process"]) == ("WARNING", "forebay.http", "front-1")
    assert said["time"].endswith("Z")
    assert len(said["time"]) == len("2026-01-01T00:00:00.000Z")


def test_files_that_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "log" / "one.log"
    for number in range(ROTATED_KEPT + 2):
        fd = open_to_append(path)
        os.write(fd, b"%d" % number)
        assert is_at(path, fd)
        rotate(path)
        assert not is_at(path, fd)
        os.close(fd)
    assert {each.name: each.read_text() for each in path.parent.iterdir()} == {
        f"one.log.{age}": str(ROTATED_KEPT + 2 - age) for age in range(1, ROTATED_KEPT + 1)
    }


def test_the_settings_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('log_size = "1GiB"\nlog_format = "json"\n')
    found = load(tmp_path / "node.toml", dir=str(tmp_path))
    assert (found.log_bytes_max, found.log_format) == (1 << 30, "json")
    with pytest.raises(Invalid, match="log_size"):
        load(None, dir=str(tmp_path), log_size="1KiB")
    with pytest.raises(Invalid, match="log_format"):
        load(None, dir=str(tmp_path), log_format="xml")


# --- processes -------------------------------------------------------------------------------------------------------
def identities(path: Path, name: str) -> None:
    entry = {"name": name, "allow": "admin:*", "token": name}
    path.with_suffix(".new").write_text(json.dumps({"identities": [entry]}))
    path.with_suffix(".new").chmod(0o600)
    path.with_suffix(".new").replace(path)


@pytest.mark.real
def test_sighup_ends_no_process_and_has_all_read_anew(node: Make, tmp_path: Path) -> None:
    keys, pair = tmp_path / "identities.json", make_pair(tmp_path, "node")
    identities(keys, "first")
    tls = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    one = node("--fronts", "1", "--log-format", "json", "--log-to-file", "--identities", str(keys), *tls, start=False)
    one.start()
    assert one.process is not None
    log = one.dir / "node" / "log" / "node.log"
    before = one.children()
    assert set(before) == {"engine", "front 0"}

    def messages() -> list[tuple[str, str]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [(said["process"], said["message"]) for said in map(json.loads, lines)]

    keys.write_text("not json")
    pair.key.write_text("no key")
    log.rename(log.with_suffix(".old"))
    one.process.send_signal(signal.SIGHUP)
    until(lambda: [m for p, m in messages() if p == "engine" and "the identities stay as they were" in m])
    until(lambda: [m for p, m in messages() if p == "front-0" and "the certificate stays as it was" in m])
    assert [m for p, m in messages() if p == "supervisor" and "SIGHUP" in m]
    for pid in before.values():  # a terminal that goes signals each process of its group
        os.kill(pid, signal.SIGHUP)
    until(lambda: len([m for _, m in messages() if "stay" in m]) >= 4)
    assert one.children() == before
    assert one.stop() == 0
    assert "stay" not in log.with_suffix(".old").read_text()


@pytest.mark.real
def test_sighup_finds_a_node_at_every_moment_of_its_start(node: Make) -> None:
    one = node("--fronts", "1", start=False)
    one.start(wait=False)
    assert one.process is not None
    until((one.dir / "node" / "node.lock").exists)  # before Python runs our first line nothing can take a signal
    while not (one.dir / "node" / "run" / "node.json").exists():
        assert one.process.poll() is None, one.log[-3000:]
        for pid in (one.process.pid, *one.children().values()):
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.01)
    assert one.process.poll() is None
    assert "ended with status" not in one.log, one.log[-3000:]
    assert one.stop() == 0


@pytest.mark.real
def test_ctrl_c_while_a_node_starts_is_no_fault(node: Make) -> None:
    one = node("--fronts", "1", start=False)
    one.start(wait=False, start_new_session=True)
    assert one.process is not None

    def imports() -> bool:
        with suppress(OSError):  # between two of them
            return any("msgspec" in Path(f"/proc/{pid}/maps").read_text() for pid in one.children().values())
        return False

    until(imports)  # a terminal sends it to all of them, and the engine still imports what it needs
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.process.wait(PATIENCE_S) == 0, one.log
    assert "Traceback" not in one.log
    assert "KeyboardInterrupt" not in one.log


@pytest.mark.real
def test_a_long_log_is_put_aside_and_every_process_follows(node: Make, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('log_size = "64KiB"\n')
    one = node("--fronts", "1", "--log-to-file", "--config", str(tmp_path / "node.toml"), start=False)
    log = one.dir / "node" / "log" / "node.log"
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier run\n" * 5000)
    one.start()
    aside = log.with_name("node.log.1")
    until(lambda: aside.exists() and log.exists())
    assert aside.read_text().startswith("of an earlier run\n" * 5000)
    assert "of an earlier run" not in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    one.stop()
    both = aside.read_text() + log.read_text()
    assert "front 0 serves port" in both
    assert "engine of node" in both


@pytest.mark.real
def test_a_node_whose_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "log").write_text("a file in the way")
    command = [sys.executable, "-m", "forebay.node", "--dir", str(tmp_path / "node"), "--log-to-file"]
    done = subprocess.run([*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "log" in done.stderr
    assert "Traceback" not in done.stderr
