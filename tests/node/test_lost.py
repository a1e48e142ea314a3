"""Data files of owned objects that are gone: an error that says so, never 404 and never an older version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import Program

from .conftest import MIB, NodeProcess, pattern, until

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A directory that is a bucket."""
    path = tmp_path / "bucket"
    path.mkdir()
    return path


def add(one: NodeProcess, name: str, url: str, write: str, **more: object) -> None:
    one.json("PUT", f"buckets/{name}", {"name": name, "url": url, "freshness_s": 1e18, "write": write, **more})


def put(one: NodeProcess, target: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    return one.ask("PUT", target, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def data_of(one: NodeProcess) -> Path:
    return one.dir / "node" / "volumes" / "v0" / "data"


def lose(one: NodeProcess, how: str) -> None:
    files = [path for path in data_of(one).rglob("*") if path.is_file()]
    assert files
    if how == "directory":
        shutil.rmtree(data_of(one))
        data_of(one).mkdir()
    for path in files if how != "directory" else ():
        if how == "gone":
            path.unlink()
        else:
            with open(path, "r+b") as file:
                file.truncate(MIB)


def is_lost(one: NodeProcess, target: str) -> None:
    status, answer = one.ask("GET", target)
    assert status == 500, (status, answer[:200])
    assert b"lost give-up" in answer
    assert one.ask("HEAD", target)[0] == 500
    for headers in ({"if_none_match": "*"}, {"if_match": "*"}, {"if_match": '"other"'}):
        status, answer = put(one, target, b"conditional", **headers)
        assert status == 500, (headers, status, answer)
    assert one.ask("DELETE", target, {"If-Match": "*"})[0] == 500


def keys(one: NodeProcess, name: str, query: str = "") -> list[str]:
    status, answer = one.ask("GET", f"/{name}?list-type=2{query}")
    assert status == 200
    return [part.partition(b"</Key>")[0].decode() for part in answer.split(b"<Key>")[1:]]


@pytest.mark.parametrize(("how", "durability"), [("gone", "disk"), ("short", "memory"), ("directory", "disk")])
def test_a_lost_file_is_an_error_until_somebody_gives_it_up(
    node: Make, bucket: Path, how: str, durability: str
) -> None:
    one = node("--fronts", "1", "--flush-timeout", "0")
    add(one, "here", "local://", "local", durability=durability)
    add(one, "back", f"file://{bucket}", "back", durability=durability)
    (bucket / "k").write_bytes(b"old")
    assert one.get("back", "k") == b"old"
    bucket.rename(bucket.with_name("away"))
    for target in ("/back/k", "/back/new", "/here/deep/k", "/here/z"):
        assert put(one, target, pattern(2 * MIB))[0] == 200
    one.stop()
    bucket.with_name("away").rename(bucket)
    lose(one, how)
    one.start()
    for target in ("/back/k", "/back/new", "/here/deep/k", "/here/z"):
        is_lost(one, target)
    assert keys(one, "back") == ["k", "new"]
    assert keys(one, "here") == ["deep/k", "z"]
    assert keys(one, "here", "&prefix=z") == ["z"]
    assert b"<Prefix>deep/</Prefix>" in one.ask("GET", "/here?list-type=2&delimiter=/")[1]
    assert one.metric("forebay_lost_objects") == 4
    assert one.ask("DELETE", "/-/v1/buckets/here")[0] == 500, "what is lost is not forgotten by the way"

    run = Program(one.endpoint, one.dir / "node")
    assert [each["key"] for each in json.loads(run("lost", "ls", "back", "--json").output)] == ["k", "new"]
    assert "back/k" in run("lost", "ls").output
    assert "there is no bucket 'bakc'" in run("lost", "ls", "bakc", code=3).output
    assert "are lost" in run("status").output
    assert "back/k" in run("flush", code=9).output
    assert "lost" in run("doctor", "--no-measure", code=1).output

    run("lost", "give-up", "back/k")
    assert one.get("back", "k") == b"old", "what the backend has"
    assert put(one, "/back/new", b"again")[0] == 200, "writing it again mends it"
    assert one.get("back", "new") == b"again"
    assert one.ask("DELETE", "/here/z")[0] == 204
    assert one.ask("GET", "/here/z")[0] == 404
    run("lost", "give-up", "-r", "here/deep/")
    assert one.ask("GET", "/here/deep/k")[0] == 404
    run("flush")
    assert (bucket / "new").read_bytes() == b"again"
    assert one.metric("forebay_lost_objects") == 0
    one.stop()
    one.start()
    assert one.metric("forebay_lost_objects") == 0
    assert keys(one, "here") == []


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_file_that_is_lost_while_the_node_runs(node: Make, bucket: Path, how: str) -> None:
    one = node("--fronts", "1", "--flush-timeout", "0")
    add(one, "here", "local://", "local")
    body = pattern(2 * MIB)
    assert put(one, "/here/k", body)[0] == 200
    lose(one, how)
    with suppress(OSError):  # the answer that finds out is cut
        one.ask("GET", "/here/k")
    until(lambda: one.ask("GET", "/here/k")[0] == 500)
    is_lost(one, "/here/k")
    one.stop()
    one.start()
    is_lost(one, "/here/k")
    assert keys(one, "here") == ["k"]


def test_a_dirty_file_that_is_lost_is_told_by_its_flush(node: Make, bucket: Path) -> None:
    """Nobody reads it: the flush finds it gone, and what is waiting for it is told. Other keys go on."""
    one = node("--fronts", "1", "--flush-timeout", "0")
    add(one, "back", f"file://{bucket}", "back")
    bucket.rename(bucket.with_name("away"))
    assert put(one, "/back/k", pattern(2 * MIB))[0] == 200
    until(lambda: one.json("GET", "status")["buckets"][0]["error"])  # it was tried, and has let go of the file
    lose(one, "gone")
    bucket.with_name("away").rename(bucket)
    run = Program(one.endpoint, one.dir / "node")
    until(lambda: one.metric("forebay_lost_objects") == 1)
    assert "lost" in run("flush", code=9).output
    is_lost(one, "/back/k")
    assert put(one, "/back/other", b"x")[0] == 200
    run("flush", "--exact", "back/other")
    assert put(one, "/back/k", b"y")[0] == 200
    run("flush")
    assert (bucket / "k").read_bytes() == b"y"


def test_a_file_that_comes_back_brings_its_object_back(node: Make, tmp_path: Path) -> None:
    one = node("--fronts", "1", "--flush-timeout", "0")
    add(one, "here", "local://", "local")
    add(one, "quick", "local://", "local", durability="memory")
    body = pattern(2 * MIB)
    for target in ("/here/k", "/quick/k"):
        assert put(one, target, body)[0] == 200
    one.stop()
    data_of(one).rename(tmp_path / "found")
    data_of(one).mkdir()
    one.start()
    is_lost(one, "/here/k")
    is_lost(one, "/quick/k")
    one.stop()
    shutil.rmtree(data_of(one))
    (tmp_path / "found").rename(data_of(one))
    one.start()
    assert one.get("here", "k") == body
    assert one.get("quick", "k") == body
    assert one.metric("forebay_lost_objects") == 0
