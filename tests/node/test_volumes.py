"""Volumes that are not there when a node starts: what only they have is neither read wrong nor written over."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Program

from .conftest import MIB, NodeProcess, pattern

Make = Callable[..., NodeProcess]
pytestmark = pytest.mark.real


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A directory that is a bucket."""
    path = tmp_path / "bucket"
    path.mkdir()
    return path


class Disks:
    """Directories that are mounted where the node's volumes are, by renaming: what is away lies elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def path(self, name: str) -> Path:
        return self.folder / name

    def unmount(self, name: str) -> None:
        self.path(name).rename(self.folder / f"{name}-away")
        self.path(name).mkdir()

    def mount(self, name: str) -> None:
        self.path(name).rmdir()
        (self.folder / f"{name}-away").rename(self.path(name))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path / "disks")


def flags(disks: Disks, *names: str) -> list[str]:
    made = ["--fronts", "1", "--flush-timeout", "0"]
    for name in names:
        made += ["--volume", str(disks.path(name))]
    return made


def add(one: NodeProcess, name: str, url: str, write: str, freshness_s: float = 0.0) -> None:
    one.json("PUT", f"buckets/{name}", {"name": name, "url": url, "freshness_s": freshness_s, "write": write})


def put(one: NodeProcess, target: str, body: bytes, code: int = 200, **headers: str) -> str:
    status, answer = one.ask("PUT", target, {name.replace("_", "-"): value for name, value in headers.items()}, body)
    assert status == code, (target, status, answer)
    return answer.decode()


def refused(one: NodeProcess, method: str, target: str, *says: str, body: bytes | None = None) -> None:
    """503, and a message that names the volume and what to do."""
    status, answer = one.ask(method, target, body=body)
    assert status == 503, (method, target, status, answer)
    if method != "HEAD":
        for word in (*says, "volume", "give-up"):
            assert word in answer.decode(), (word, answer)


def program(one: NodeProcess) -> Program:
    return Program(one.endpoint, one.dir / "node")


def volumes(one: NodeProcess) -> dict[str, dict[str, Any]]:
    """By path."""
    return {each["path"]: each for each in one.json("GET", "status")["volumes"]}


def dirty_node(make: Make, disks: Disks, bucket: Path, *names: str) -> NodeProcess:
    """A node that stopped with local objects, and dirty ones newer than the backend's."""
    one = make(*flags(disks, *names))
    add(one, "here", "local://", "local")
    add(one, "back", f"file://{bucket}", "back")
    add(one, "plain", f"file://{bucket}", "through")
    for number in range(8):
        (bucket / f"old-{number}").write_bytes(b"one")
        assert one.get("back", f"old-{number}") == b"one"
    bucket.rename(bucket.with_name("away"))
    for number in range(8):
        put(one, f"/here/local-{number}", b"local %d" % number)
        put(one, f"/here/large-{number}", pattern(MIB, number))
        put(one, f"/back/old-{number}", b"two")
        put(one, f"/back/new-{number}", b"new")
    assert one.ask("DELETE", "/back/old-7")[0] == 204
    one.stop()
    bucket.with_name("away").rename(bucket)
    return one


def all_is_there(one: NodeProcess) -> None:
    for number in range(8):
        assert one.get("here", f"local-{number}") == b"local %d" % number
        assert one.get("here", f"large-{number}") == pattern(MIB, number)
        assert one.get("back", f"new-{number}") == b"new"
        if number < 7:
            assert one.get("back", f"old-{number}") == b"two"
    assert one.ask("GET", "/back/old-7")[0] == 404


def test_the_only_volume_is_not_mounted(node: Make, disks: Disks, bucket: Path) -> None:
    one = dirty_node(node, disks, bucket, "a")
    disks.unmount("a")
    one.start()
    says = (str(disks.path("a")),)
    for key in ("local-1", "large-1", "never"):
        refused(one, "GET", f"/here/{key}", *says)
        refused(one, "HEAD", f"/here/{key}", *says)
    for key in ("old-1", "new-1", "old-7", "never"):
        refused(one, "GET", f"/back/{key}", *says)
        refused(one, "PUT", f"/back/{key}", *says, body=b"three")
        refused(one, "DELETE", f"/back/{key}", *says)
    put(one, "/here/never", b"x", 503, if_none_match="*")
    refused(one, "GET", "/back?list-type=2", *says)
    refused(one, "GET", "/here?list-type=2", *says)
    assert one.get("plain", "old-1") == b"one", "what is written through is read past the volume"
    put(one, "/plain/other", b"through")
    assert one.get("plain", "other") == b"through"
    one.ask("DELETE", "/plain/other")
    assert list(disks.path("a").iterdir()) == [], "nothing is made where a volume lay"

    shown = volumes(one)[str(disks.path("a"))]
    assert (shown["state"], shown["owed_buckets"]) == ("missing", ["back", "here"])
    assert shown["owed_objects"] == 16 + 15
    assert one.metric("forebay_volume_missing") == 1
    assert one.metric("forebay_volume_up") == 0
    run = program(one)
    assert "may be on" in run("status").output
    assert "missing" in run("volume", "ls").output
    assert "31 objects" in run("volume", "owed", str(disks.path("a"))).output
    assert "not in use" in run("flush", code=9).output
    assert "missing" in run("doctor", "--no-measure", "--volume", str(disks.folder), code=1).output
    status, answer = one.ask("DELETE", "/-/v1/buckets/back")
    assert status == 503, answer

    one.stop()
    disks.mount("a")
    one.start()
    all_is_there(one)
    run = program(one)
    run("flush")
    assert [(bucket / f"old-{n}").read_bytes() for n in range(7)] == [b"two"] * 7
    assert not (bucket / "old-7").exists()
    assert volumes(one)[str(disks.path("a"))]["state"] == "ok"


def test_one_of_two_volumes_is_not_mounted(node: Make, disks: Disks, bucket: Path) -> None:
    one = dirty_node(node, disks, bucket, "a", "b")
    disks.unmount("a")
    one.start()
    served: dict[str, bytes] = {}
    missing: list[str] = []
    for number in range(8):
        for target, value in ((f"/here/local-{number}", b"local %d" % number), (f"/back/old-{number}", b"two")):
            status, answer = one.ask("GET", target)
            if status == 503:
                missing.append(target)
                refused(one, "PUT", target, body=b"three")
            elif target == "/back/old-7":
                assert status == 404
            else:
                assert (status, answer) == (200, value), target
                served[target] = value
    assert missing, "about half of sixteen"
    assert served
    (target, _), *_ = served.items()
    put(one, target, b"written beside it")
    served[target] = b"written beside it"
    assert program(one)("flush", code=9).output
    one.stop()
    disks.mount("a")
    one.start()
    assert one.ask("GET", target)[1] == b"written beside it"
    put(one, target, b"two" if "/back/" in target else b"local " + target[-1:].encode())
    all_is_there(one)


def test_what_owes_nothing_is_not_missed(node: Make, disks: Disks, bucket: Path) -> None:
    """All was flushed before the disk went: keys are read from the backend, written, and follow when it is back."""
    one = node(*flags(disks, "a", "b"))
    add(one, "back", f"file://{bucket}", "back", 1e18)
    keys = [f"key-{number}" for number in range(10)]
    for key in keys:
        put(one, f"/back/{key}", b"one")
    program(one)("flush")
    one.stop()
    disks.unmount("a")
    one.start()
    assert volumes(one)[str(disks.path("a"))]["owed_buckets"] == []
    for key in keys:
        assert one.get("back", key) == b"one"
        put(one, f"/back/{key}", b"two")
        assert one.get("back", key) == b"two"
    program(one)("flush", "back")
    bucket.rename(bucket.with_name("away"))
    for key in keys[5:]:
        put(one, f"/back/{key}", b"three")
    one.stop()
    bucket.with_name("away").rename(bucket)
    disks.mount("a")
    disks.unmount("b")
    one.start()
    for key in keys:
        refused(one, "GET", f"/back/{key}")  # a has the first version of some, and b the last one of any
        refused(one, "PUT", f"/back/{key}", body=b"four")
    one.stop()
    disks.mount("b")
    one.start()
    for number, key in enumerate(keys):
        assert one.get("back", key) == (b"two" if number < 5 else b"three"), "the stand-in's is the later one"


def test_another_disk_is_mounted_there(node: Make, disks: Disks, bucket: Path) -> None:
    other = node(*flags(disks, "b"))
    other.stop()
    one = dirty_node(node, disks, bucket, "a")
    disks.path("a").rename(disks.path("a-away"))
    disks.path("b").rename(disks.path("a"))
    before = (disks.path("a") / "volume.json").read_bytes()
    one.start()
    refused(one, "GET", "/here/local-1")
    assert volumes(one)[str(disks.path("a"))]["state"] == "swapped"
    assert (disks.path("a") / "volume.json").read_bytes() == before, "somebody else's is left alone"
    one.stop()
    disks.path("a").rename(disks.path("b"))
    disks.path("a-away").rename(disks.path("a"))
    one.start()
    all_is_there(one)


def test_a_volume_is_given_up_and_another_one_made(node: Make, disks: Disks, bucket: Path) -> None:
    one = dirty_node(node, disks, bucket, "a")
    disks.unmount("a")
    one.start()
    run, path = program(one), str(disks.path("a"))
    volume_id = volumes(one)[path]["volume_id"]
    assert "give it up first" in run("volume", "add", path, code=5).output
    told = run("volume", "give-up", volume_id, code=2).output
    assert "31 objects" in told
    assert "back, here" in told
    refused(one, "GET", "/here/local-1")
    assert "lost: 31 objects" in run("volume", "give-up", volume_id, "--yes").output
    assert one.ask("GET", "/here/local-1")[0] == 404, "it holds at once"
    assert one.get("back", "old-1") == b"one"
    run("flush")
    assert json.loads(run("volume", "add", path, "--json").output)["path"] == path
    one.stop()
    one.start()
    assert volumes(one)[path]["state"] == "ok"
    put(one, "/here/local-1", b"anew")
    one.stop()
    disks.path("a").rename(disks.path("anew"))
    disks.path("a-away").rename(disks.path("a"))
    one.start()
    assert volumes(one)[path]["state"] == "swapped", "what was given up is not taken back"
    refused(one, "GET", "/here/local-1")
    one.stop()
    disks.path("a").rename(disks.path("a-away"))
    disks.path("anew").rename(disks.path("a"))
    one.start()
    assert one.get("here", "local-1") == b"anew"


def test_a_volume_that_nobody_ordered_is_not_made(node: Make, disks: Disks) -> None:
    one = node(*flags(disks, "a"))
    one.stop()
    one._flags = tuple(flags(disks, "a", "b"))
    one.start()
    path = str(disks.path("b"))
    assert not disks.path("b").exists()
    assert volumes(one)[path]["state"] == "new"
    program(one)("volume", "add", os.path.relpath(path))
    assert "--volume" in program(one)("volume", "add", "/elsewhere", code=2).output
    one.stop()
    one.start()
    assert volumes(one)[path]["state"] == "ok"


def test_a_node_from_before_that_remembered_nothing(node: Make, disks: Disks, bucket: Path) -> None:
    """An upgrade: the marks say which volumes there were; none is made where one is missing."""
    one = dirty_node(node, disks, bucket, "a", "b")
    forget(one)
    one.start()
    all_is_there(one)
    assert all(each["state"] == "ok" for each in volumes(one).values())
    one.stop()
    forget(one)
    disks.unmount("b")
    one.start()
    assert volumes(one)[str(disks.path("b"))]["state"] == "missing"
    for number in range(8):
        status, answer = one.ask("GET", f"/here/local-{number}")
        assert (status, answer) == (200, b"local %d" % number) or status == 503
        refused(one, "PUT", f"/here/local-{number}", body=b"nobody knows whose that is")
    refused(one, "GET", "/here/never")
    one.stop()
    disks.mount("b")
    one.start()
    all_is_there(one)


def forget(one: NodeProcess) -> None:
    """Take the memory of volumes away, as it was before there was one."""
    import sqlite3

    with sqlite3.connect(one.dir / "node" / "meta.sqlite") as file:
        assert file.execute("DELETE FROM entries WHERE key = 'node/volumes'").rowcount == 1
    file.close()


@pytest.fixture
def mounted(disks: Disks) -> Iterator[Path]:
    """A volume's path with a filesystem of its own."""
    path = disks.path("a")
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", path], check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    yield path
    subprocess.run(["umount", path], check=False)


def test_a_filesystem_that_is_not_mounted(node: Make, disks: Disks, bucket: Path, mounted: Path) -> None:
    kept = disks.path("kept")
    kept.mkdir()
    subprocess.run(["mount", "--bind", mounted, kept], check=True)
    try:
        one = dirty_node(node, disks, bucket, "a")
        subprocess.run(["umount", mounted], check=True)
        one.start()
        refused(one, "GET", "/here/local-1", str(mounted))
        assert list(mounted.iterdir()) == []
        one.stop()
        subprocess.run(["mount", "--bind", kept, mounted], check=True)
        one.start()
        all_is_there(one)
        one.stop()
    finally:
        subprocess.run(["umount", kept], check=True)
