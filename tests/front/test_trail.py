"""The file of an audit log: what it holds, and what it does when it cannot be written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.node.front.audit.trail import Trail
from forebay.node.rotated_files import ROTATED_KEPT
from tests.patience import until

HOSTILE = 'a"b\\\n{"operation":"PutObject"}\r\x00\x1b[2J\x7f\x85\u2028\u2029\u202e\U0001f600'
Make = Callable[..., Trail]


@pytest.fixture
def trail() -> Iterator[Make]:
    made: list[Trail] = []

    def make(path: Path, **more: Any) -> Trail:
        made.append(Trail(path, 3, **more))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths if path.exists() for line in path.read_bytes().split(b"\n") if line]


def keys(*paths: Path) -> list[str]:
    return [line["key"] for line in lines(*paths) if "key" in line]


def test_a_line_is_one_line_whatever_is_in_it(trail: Make, tmp_path: Path) -> None:
    one = trail(tmp_path / "log" / "audit-3.jsonl")
    one.start()
    one.put({"time": 0.0, "operation": "PutObject", "key": HOSTILE})
    one.stop()
    text = (tmp_path / "log" / "audit-3.jsonl").read_text("ascii")
    assert len(text.splitlines()) == text.count("\n") == 3
    assert text.replace("\n", "").isprintable()
    begins, line, ends = lines(tmp_path / "log" / "audit-3.jsonl")
    assert line == {"time": "1970-01-01T00:00:00.000000Z", "operation": "PutObject", "key": HOSTILE, "front": 3}
    assert next(iter(line)) == "time", "so that lines sort by it"
    assert (begins["operation"], ends["operation"]) == ("AuditBegins", "AuditEnds")
    assert begins["pid"] == os.getpid()
    assert (tmp_path / "log" / "audit-3.jsonl").stat().st_mode & 0o777 == 0o600
    assert (one.lines, one.dropped) == (3, 0)


def test_a_full_file_is_put_aside_and_no_line_is_lost(trail: Make, tmp_path: Path) -> None:
    path = tmp_path / "a"
    one = trail(path, size_bytes_max=2000)
    one.start()
    for number in range(60):
        one.put({"time": 0.0, "key": f"{number:03}"})
        until(lambda: one.lines == number + 2)  # noqa: B023
    one.stop()
    files = [path.with_name(f"a.{age}") for age in range(ROTATED_KEPT, 0, -1)] + [path]
    assert path.with_name("a.1").exists()
    assert keys(*files) == [f"{number:03}" for number in range(60)]
    assert all(file.stat().st_size <= 2000 for file in files if file.exists())


def test_a_file_that_somebody_moved_is_followed(trail: Make, tmp_path: Path) -> None:
    one = trail(tmp_path / "a")
    one.start()
    one.put({"time": 0.0, "key": "1"})
    until(lambda: one.lines == 2)
    (tmp_path / "a").rename(tmp_path / "moved")
    one.put({"time": 0.0, "key": "2"})
    one.stop()
    assert (keys(tmp_path / "moved"), keys(tmp_path / "a")) == (["1"], ["2"])


def test_a_line_that_a_kill_cut_short_spoils_no_other(trail: Make, tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"time": "2026", "ke')
    one = trail(tmp_path / "a")
    one.start()
    one.stop()
    torn, *whole = (tmp_path / "a").read_text().splitlines()
    assert torn == '{"time": "2026", "ke'
    assert [json.loads(line)["operation"] for line in whole] == ["AuditBegins", "AuditEnds"]


def test_a_full_disk_costs_lines_and_says_how_many(
    trail: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    path.symlink_to("/dev/full")  # each write to it finds no room
    one = trail(path, waiting_max=10)
    one.start()
    until(lambda: "cannot be written" in caplog.text)
    for number in range(25):
        one.put({"time": 0.0, "key": str(number)})
    assert one.dropped == 15
    assert one.lines == 0
    path.unlink()  # there is room
    until(lambda: one.lines >= 11)
    until(lambda: "is written again" in caplog.text)
    one.stop()
    assert keys(path) == [str(number) for number in range(10)]
    assert [line["lines"] for line in lines(path) if line.get("operation") == "AuditDropped"] == [15]
    assert (one.lines, one.dropped) == (12, 15)


def test_a_disk_that_stalls_holds_up_nobody(trail: Make, tmp_path: Path) -> None:
    path = tmp_path / "a"
    os.mkfifo(path)  # opening it waits until somebody reads
    one = trail(path, waiting_max=5)
    one.start()
    for number in range(1000):
        one.put({"time": 0.0, "key": str(number)})
    assert one.dropped >= 1000 - 6
    found: list[bytes] = []

    def read() -> None:
        with path.open("rb") as file:
            found.extend(iter(file.readline, b""))

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: one.lines + one.dropped == 1001)
    one.stop()
    reader.join()
    said = [json.loads(line) for line in found]
    dropped = sum(line["lines"] for line in said if line.get("operation") == "AuditDropped")
    assert dropped == one.dropped
    assert len([line for line in said if "key" in line]) + dropped == 1000


def test_what_cannot_be_written_at_the_end_is_counted(trail: Make, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/dev/full")
    one = trail(tmp_path / "a")
    one.start()
    one.put({"time": 0.0, "key": "1"})
    one.stop()
    assert (one.lines, one.dropped) == (0, 3)
