"""A node that is killed while a disk is full: the disk is in use at the next start, with all that it owes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.disks import Disk, mounted

from .conftest import MIB, NodeProcess, pattern, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real

SIZES = [300, 9_000, 200_000]
COUNT = 12


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk with room enough for journals."""
    with mounted(tmp_path, "small", 400 * MIB) as found:
        yield found


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Disk]:
    """Another one, with as many keys."""
    with mounted(tmp_path, "large", 400 * MIB) as found:
        yield found


def fill(disk: Disk) -> None:
    """Somebody else takes every last byte."""
    with open(disk.path / "others", "wb") as file:
        for piece_bytes in (MIB, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece_bytes)


def volumes(one: NodeProcess) -> dict[str, dict[str, Any]]:
    """By path; none while the engine starts again."""
    with suppress(OSError, AssertionError):
        found = one.json("GET", "status")["volumes"]
        return {each["path"]: each for each in found}
    return {}


def kill(one: NodeProcess) -> None:
    assert one.process is not None
    one.process.kill()
    one.process.wait()


def test_a_node_killed_while_its_disk_is_full_starts_with_it(node: Make, disk: Disk, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    one = node("--fronts", "1", "--flush-timeout", "0", "--volume", str(disk.path / "v"))
    about = {"name": "back", "url": f"file://{bucket}", "freshness_s": 1e18, "write": "back"}
    one.json("PUT", "buckets/back", about)
    one.json("PUT", "buckets/own", {"name": "own", "url": "local://", "write": "local"})
    bucket.rename(tmp_path / "away")
    kept = {f"{name}/{size}-{n}": pattern(size, n) for name in ("back", "own") for size in SIZES for n in range(COUNT)}
    for target, body in kept.items():
        assert one.ask("PUT", f"/{target}", body=body)[0] == 200
    assert (disk.path / "v" / "durable" / "journal.1").stat().st_size
    fill(disk)
    for again in (False, True):
        kill(one)
        if again:
            (tmp_path / "away").rename(bucket)
        one.start()
        (state,) = volumes(one).values()
        assert state["state"] in ("ok", "full"), one.log[-3000:]
        for target, body in kept.items():
            assert one.get(*target.split("/")) == body
        if not again:
            status, answer = one.ask("PUT", "/own/more", body=pattern(2 * MIB))
            assert (status, b"InsufficientStorage" in answer) == (507, True), answer
    flushed = {name[5:]: body for name, body in kept.items() if name.startswith("back/")}
    until(lambda: {each.name for each in bucket.iterdir()} == flushed.keys(), "a full disk's debt is flushed")
    until(lambda: {key: (bucket / key).read_bytes() for key in flushed} == flushed, "all of it")
    until(lambda: one.json("GET", "status")["buckets"][0]["dirty_objects"] == 0, "and known to be")
    (disk.path / "others").unlink()
    until(lambda: [each["state"] for each in volumes(one).values()] == ["ok"], "there is room again")
    assert one.ask("PUT", "/own/more", body=pattern(2 * MIB))[0] == 200
    kill(one)
    one.start()
    for target, body in kept.items():
        assert one.get(*target.split("/")) == body


def test_a_volume_that_cannot_be_opened_for_want_of_room_is_opened_when_there_is(
    node: Make, disk: Disk, other: Disk
) -> None:
    """A new index takes pages; without any left the volume is missed, and comes back without a restart by hand."""
    small, large = disk.path / "v", other.path / "v"
    one = node("--fronts", "1", "--flush-timeout", "0", "--volume", str(small), "--volume", str(large))
    one.json("PUT", "buckets/own", {"name": "own", "url": "local://", "write": "local"})
    kept = {f"{size}-{number}": pattern(size, number) for size in SIZES for number in range(COUNT)}
    for key, body in kept.items():
        assert one.ask("PUT", f"/own/{key}", body=body)[0] == 200
    here = volumes(one)[str(small)]
    assert 0 < here["owed_objects"] < len(kept)
    kill(one)
    mark = small / "volume.json"
    mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))  # the machine stopped: a new index
    (small / "ballast").unlink()
    fill(disk)
    one.start()
    assert volumes(one)[str(large)]["state"] == "ok"
    gone = volumes(one)[str(small)]
    assert (gone["state"], gone["owed_buckets"]) == ("out", ["own"])
    assert "no room" in gone["reason"]
    assert "make room" in gone["change"]
    assert one.metric("forebay_volume_missing") == 1
    missing = 0
    for key, body in kept.items():
        status, answer = one.ask("GET", f"/own/{key}")
        assert (status, answer) == (200, body) or (status == 503 and str(small) in answer.decode()), (status, answer)
        missing += status == 503
    assert missing == here["owed_objects"]
    (disk.path / "others").unlink()
    until(lambda: [each["state"] for each in volumes(one).values()] == ["ok", "ok"], "it is opened by itself")
    for key, body in kept.items():
        assert one.get("own", key) == body


@pytest.mark.parametrize("ballast", [True, False])
def test_a_volume_that_was_away_and_is_full_when_it_comes_back_stops_no_start(
    node: Make, disk: Disk, other: Disk, ballast: bool
) -> None:
    """That its records count as unconfirmed must be written first: with the ballast's room, or when there is room."""
    small, large = disk.path / "v", other.path / "v"
    one = node("--fronts", "1", "--flush-timeout", "0", "--volume", str(small), "--volume", str(large))
    one.json("PUT", "buckets/own", {"name": "own", "url": "local://", "write": "local"})
    kept = {f"{size}-{number}": pattern(size, number) for size in SIZES for number in range(COUNT)}
    for key, body in kept.items():
        assert one.ask("PUT", f"/own/{key}", body=body)[0] == 200
    kill(one)
    small.rename(disk.path / "away")
    one.start()  # without it
    kill(one)
    (disk.path / "away").rename(small)
    if not ballast:
        (small / "ballast").unlink()
    fill(disk)
    one.start()
    states = volumes(one)
    assert states[str(large)]["state"] == "ok"
    assert states[str(small)]["state"] in (("ok", "full") if ballast else ("out",)), one.log[-3000:]
    for key, body in kept.items():
        status, answer = one.ask("GET", f"/own/{key}")
        assert (status, answer) == (200, body) or (status == 503 and str(small) in answer.decode()), (status, answer)
        assert status == 200 or not ballast
    (disk.path / "others").unlink()
    until(lambda: [each["state"] for each in volumes(one).values()] == ["ok", "ok"], "both are used again")
    for key, body in kept.items():
        assert one.get("own", key) == body
