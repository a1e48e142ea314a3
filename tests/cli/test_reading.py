"""ls, stat, get, cat: what people see and what scripts read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.cat import parse_range
from forebay.cli.get import file_for, relative
from forebay.core.errors import Invalid
from forebay.core.types import RangeSpec
from tests.cli.conftest import Program
from tests.client.fake_node import FakeNode
from tests.patience import PATIENCE_S


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


# --- ls --------------------------------------------------------------------------------------------------------------
def test_ls_looks_like_aws_s3_ls(program: Program) -> None:
    assert program("ls").stdout == "2025-10-09 08:53:20 corpus\n"
    assert program("ls", "s3://corpus").stdout == (
        "                           PRE train/\n"
        "                           PRE val/\n"
        "2025-06-15 15:06:40        100 readme\n"
    )
    assert program("ls", "corpus/train/").stdout == (
        "                           PRE deep/\n"
        "2025-06-15 15:06:40       1000 a.tar\n"
        "2025-06-15 15:06:40    3000000 b.tar\n"
    )
    assert program("ls", "corpus/tra").stdout == "                           PRE train/\n"
    assert program("ls", "-r", "corpus/train/b").stdout == "2025-06-15 15:06:40    3000000 train/b.tar\n"


def test_ls_shows_what_is_cached(program: Program, node: FakeNode) -> None:
    node.page_limit = 2
    assert program("ls", "-rlh", "corpus").stdout == (
        "2025-06-15 15:06:40      100 B        - readme\n"
        "2025-06-15 15:06:40     1000 B  cached+ train/a.tar\n"
        "2025-06-15 15:06:40    2.9 MiB     33 % train/b.tar\n"
        "2025-06-15 15:06:40        5 B        - train/deep/c\n"
        "2025-06-15 15:06:40    2.0 KiB        - val/a.tar\n"
    )
    node.seen.clear()
    assert program("ls", "-r", "--cached", "corpus").stdout == (
        "2025-06-15 15:06:40       1000  cached+ train/a.tar\n2025-06-15 15:06:40    3000000     33 % train/b.tar\n"
    )
    assert all("cached=1" in target for target in node.requests("GET")), "the backend was not asked"
    assert program("ls", "--cached", "corpus").stdout == "                           PRE train/\n"


def test_ls_as_json_is_a_line_for_each(program: Program) -> None:
    assert lines(program("ls", "--json").stdout) == [
        {"bucket": "corpus", "url": "s3://corpus", "created_s": 1760000000.0}
    ]
    prefixes, plain = [], []
    for found in lines(program("ls", "--json", "corpus").stdout):
        (prefixes if "prefix" in found else plain).append(found)
    assert prefixes == [{"prefix": "train/"}, {"prefix": "val/"}]
    assert set(plain[0]) == {"key", "size_bytes", "etag", "modified_s"}
    (found,) = lines(program("ls", "--json", "-l", "corpus/readme").stdout)
    assert set(found) == {"key", "size_bytes", "etag", "modified_s", "cached_bytes", "pinned", "dirty"}


def test_ls_goes_over_pages(program: Program, node: FakeNode) -> None:
    node.objects["corpus"] = {f"k{n:04d}": b"" for n in range(950)}
    node.page_limit = 100
    assert len(program("ls", "-r", "corpus").stdout.splitlines()) == 950
    assert len(node.requests("GET", "/list/")) == 10


def test_a_name_in_a_listing_cannot_steer_the_terminal(program: Program, node: FakeNode) -> None:
    node.objects["corpus"] = {"evil\x1b[2Jname\n": b""}
    assert "\x1b" not in program("ls", "corpus").stdout
    assert len(program("ls", "corpus").stdout.splitlines()) == 1
    assert lines(program("ls", "--json", "corpus").stdout)[0]["key"] == "evil\x1b[2Jname\n"


def test_ls_of_nothing_and_of_what_is_not_there(program: Program, node: FakeNode) -> None:
    node.objects["corpus"] = {}
    assert program("ls", "corpus").stdout == "", "an empty bucket is no error"
    assert "nothing begins with s3://corpus/none" in program("ls", "corpus/none", code=3).stderr
    assert "not known here" in program("ls", "nowhere", code=3).stderr
    assert "not valid" in program("ls", "No_Bucket", code=2).stderr
    assert "is not an address" in program("ls", "gs://bucket/x", code=2).stderr
    assert "name a bucket" in program("ls", "-r", code=2).stderr


# --- stat ------------------------------------------------------------------------------------------------------------
def test_stat_shows_what_the_node_knows(program: Program, node: FakeNode) -> None:
    etag = node.etag("corpus", "train/b.tar")
    shown = program("stat", "s3://corpus/train/b.tar").stdout
    assert shown == (
        "s3://corpus/train/b.tar\n"
        "  size          2.9 MiB (3000000 bytes)\n"
        "  modified      2025-06-15 15:06:40\n"
        f"  etag          {etag}\n"
        f"  version       {etag}\n"
        "  state         partial, clean\n"
        "  backend       has it\n"
        "  cached        976.6 KiB, 1 of 1 blocks\n"
        "  volume        -\n"
        "  pinned        no\n"
        "  fresh until   now: the next read asks the backend\n"
        "  content-type  binary/octet-stream\n"
    )
    assert "state         absent" in program("stat", "corpus/readme").stdout
    assert "state         complete" in program("stat", "corpus/train/a.tar").stdout
    assert "pinned        yes" in program("stat", "corpus/train/a.tar").stdout


def test_stat_as_json_is_the_object_state(program: Program) -> None:
    found = json.loads(program("stat", "corpus/train/a.tar", "--json").stdout)
    assert {"bucket", "key", "size_bytes", "version", "etag", "cached_bytes", "pinned", "fresh_until_s"} <= set(found)
    assert (found["key"], found["cached_bytes"], found["pinned"]) == ("train/a.tar", 1000, True)


def test_stat_can_ask_the_backend_first(program: Program, node: FakeNode) -> None:
    program("stat", "corpus/readme")
    program("stat", "--refresh", "corpus/readme")
    assert node.requests("GET", "/stat/") == [
        "/-/v1/stat/corpus/readme",
        "/-/v1/stat/corpus/readme?revalidate=1",
    ]


def test_stat_of_wrong_things(program: Program) -> None:
    assert "names a bucket and no object" in program("stat", "corpus", code=2).stderr
    assert "does not exist" in program("stat", "corpus/none", code=3).stderr
    assert "1024 are allowed" in program("stat", "corpus/" + "x" * 1025, code=2).stderr


# --- cat -------------------------------------------------------------------------------------------------------------
def test_cat_writes_bytes_and_nothing_else(program: Program, node: FakeNode) -> None:
    node.objects["corpus"]["bytes"] = bytes(range(256)) * 10_000
    for args, wanted in (
        ((), node.objects["corpus"]["bytes"]),
        (("--range", "10-19"), bytes(range(10, 20))),
        (("--range", "-3"), bytes((253, 254, 255))),
        (("--range", f"{256 * 10_000 - 2}-"), bytes((254, 255))),
    ):
        out, err = program.process("cat", "corpus/bytes", *args).communicate(timeout=60)
        assert (out, err) == (wanted, b"")


def test_cat_into_a_pipe_that_closes_ends_quietly(program: Program, node: FakeNode) -> None:
    node.objects["corpus"]["big"] = bytes(20_000_000)
    cat = program.process("cat", "corpus/big")
    assert cat.stdout is not None
    assert cat.stderr is not None
    assert len(cat.stdout.read(1000)) == 1000
    cat.stdout.close()
    assert cat.wait(60) == 141
    assert cat.stderr.read() == b""
    cat.stderr.close()


def test_ls_into_a_pipe_that_closes_ends_quietly(program: Program, node: FakeNode) -> None:
    node.objects["corpus"] = {f"{'k' * 200}{n:05d}": b"" for n in range(3000)}
    ls = program.process("ls", "-r", "corpus")
    assert ls.stdout is not None
    assert ls.stderr is not None
    ls.stdout.read(100)
    ls.stdout.close()
    assert ls.wait(60) == 141
    assert ls.stderr.read() == b""
    ls.stderr.close()


def test_cat_of_wrong_things(program: Program) -> None:
    assert "is not known: use FIRST-LAST" in program("cat", "corpus/readme", "--range", "x", code=2).stderr
    assert "ends before it starts" in program("cat", "corpus/readme", "--range", "9-3", code=2).stderr
    done = program.process("cat", "corpus/readme", "--range", "900-")
    out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (2, b"")
    assert b"outside the object of 100 bytes" in err


@pytest.mark.parametrize(
    ("text", "range"),
    [
        ("0-0", RangeSpec(0, 0)),
        ("5-", RangeSpec(5, None)),
        ("-7", RangeSpec(None, 7)),
        ("bytes=1-2", RangeSpec(1, 2)),
    ],
)
def test_ranges_are_written_as_in_http(text: str, range: RangeSpec) -> None:
    assert parse_range(text) == range


@pytest.mark.parametrize("text", ["", "-", "1", "a-b", "1-2,3-4", "1 - 2", "٣-"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_range(text)


# --- get -------------------------------------------------------------------------------------------------------------
def test_get_one_object_to_a_file_a_directory_and_standard_output(
    program: Program, node: FakeNode, tmp_path: Path
) -> None:
    said = program("get", "corpus/train/b.tar", str(tmp_path / "out")).stdout
    assert said.startswith(f"s3://corpus/train/b.tar -> {tmp_path / 'out'}: 2.9 MiB in ")
    assert (tmp_path / "out").read_bytes() == node.objects["corpus"]["train/b.tar"]
    found = json.loads(program("get", "s3://corpus/train/a.tar", str(tmp_path), "--json").stdout)
    assert (tmp_path / "a.tar").read_bytes() == b"a" * 1000
    assert set(found) == {"files", "size_bytes", "fetched_bytes", "skipped", "failed", "seconds", "target"}
    assert (found["files"], found["fetched_bytes"], found["target"]) == (1, 1000, str(tmp_path / "a.tar"))
    assert program.process("get", "corpus/readme", "-").communicate(timeout=60) == (b"r" * 100, b"")


def test_get_all_under_a_prefix(program: Program, node: FakeNode, tmp_path: Path) -> None:
    said = program("get", "-r", "corpus/train/", str(tmp_path / "out")).stdout
    assert "3 files, 2.9 MiB in " in said
    copied = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(copied) == {"a.tar", "b.tar", "deep/c"}
    assert copied["b.tar"].read_bytes() == node.objects["corpus"]["train/b.tar"]
    assert int(copied["b.tar"].stat().st_mtime) == 1_750_000_000
    node.seen.clear()
    found = json.loads(program("get", "-r", "corpus/train/", str(tmp_path / "out"), "--json").stdout)
    assert (found["skipped"], found["fetched_bytes"]) == (3, 0)
    assert node.requests("GET", "/objects/") == [], "what is there is not fetched again"
    found = json.loads(program("get", "-r", "--force", "corpus/train/", str(tmp_path / "out"), "--json").stdout)
    assert found["fetched_bytes"] == 3_001_005


def test_get_of_a_prefix_that_is_not_a_directory_keeps_the_rest_of_the_names(program: Program, tmp_path: Path) -> None:
    program("get", "-r", "corpus/train/d*", str(tmp_path))
    assert (tmp_path / "deep" / "c").read_bytes() == b"ccccc"


@pytest.mark.parametrize("key", ["../up", "a/../../up", "/abs", "a//b", "./a", "a/\0b"])
def test_a_key_never_leaves_the_target(program: Program, node: FakeNode, tmp_path: Path, key: str) -> None:
    with pytest.raises(Invalid):
        relative(key, "")
    node.objects["corpus"] = {key: b"evil", "good": b"good"}
    folder = tmp_path / "a" / "b" / "c"
    result = program("get", "-r", "corpus", str(folder), code=9)
    assert "not a safe file name" in result.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / "good"]


def test_markers_that_stand_for_directories_are_left_out(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"] = {"train/": b"", "train/a": b"x"}
    program("get", "-r", "corpus/", str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_one_object_that_fails_does_not_stop_the_others(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"] = {"a": b"1", "a/b": b"2", "c": b"3"}
    result = program("get", "-r", "-j", "1", "corpus", str(tmp_path), code=9)
    assert "1 of 3 objects failed" in result.stderr
    assert "a/b: " in result.stderr
    assert (tmp_path / "c").read_bytes() == b"3"


def test_a_get_that_was_cut_says_how_to_go_on_and_goes_on(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.cut_after = 1_000_000
    cut = program("get", "corpus/train/b.tar", str(tmp_path), code=6)
    assert "run the same command again to go on" in cut.stderr
    assert "976.6 KiB are kept" in cut.stderr
    assert not (tmp_path / "b.tar").exists()
    node.cut_after = None
    assert "(there already: 976.6 KiB)" in program("get", "corpus/train/b.tar", str(tmp_path)).stdout
    assert (tmp_path / "b.tar").read_bytes() == node.objects["corpus"]["train/b.tar"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["b.tar"]


@pytest.mark.parametrize("recursive", [False, True])
def test_ctrl_c_leaves_what_can_be_resumed_and_says_so(
    program: Program, node: FakeNode, tmp_path: Path, recursive: bool
) -> None:
    wanted = os.urandom(30_000_000)
    node.objects["corpus"]["big/one"] = wanted
    node.cut_after = 20_000_000
    get: list[subprocess.Popen[bytes]] = []

    def interrupt(key: str, done: int) -> None:
        """20 MB are on their way: press Ctrl-C, and hold the rest back until the program is gone."""
        part = next(iter(tmp_path.glob(".one.*.part")), None)
        give_up = time.monotonic() + PATIENCE_S
        while (part is None or part.stat().st_size == 0) and time.monotonic() < give_up:
            part = next(iter(tmp_path.glob(".one.*.part")), None)
        get[0].send_signal(signal.SIGINT)
        get[0].wait(90)

    node.on_body = interrupt
    args = ["-r", "corpus/big/", str(tmp_path)] if recursive else ["corpus/big/one", str(tmp_path)]
    get.append(program.process("get", *args))
    _, err = get[0].communicate(timeout=60)
    assert get[0].returncode == 130, err
    assert b"interrupted" in err
    assert b"same command again" in err
    assert b"Traceback" not in err
    assert not (tmp_path / "one").exists()
    node.cut_after, node.on_body = None, lambda key, done: None
    node.seen.clear()
    program("get", *args)
    assert (tmp_path / "one").read_bytes() == wanted
    ((_, _, headers),) = [seen for seen in node.seen if seen[0] == "GET" and "/objects/" in seen[1]]
    assert headers["range"].startswith("bytes="), "it went on from where it was"


def test_get_of_wrong_things(program: Program, node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert "there is no directory" in program("get", "corpus/readme", "/nonexistent/dir/x", code=10).stderr
    assert "there is no directory" in program("get", "corpus/readme", str(tmp_path / "file" / "x"), code=10).stderr
    assert "is not a directory" in program("get", "-r", "corpus/", str(tmp_path / "file"), code=2).stderr
    assert "No space left" in program("get", "corpus/readme", "/dev/full", code=10).stderr
    assert "names a bucket and no object" in program("get", "corpus", str(tmp_path), code=2).stderr
    assert "neither an object nor a folder" in program("get", "-r", "corpus/none", str(tmp_path), code=3).stderr
    assert "nothing begins with corpus/none" in program("get", "-r", "corpus/none*", str(tmp_path), code=3).stderr
    assert "does not exist" in program("get", "corpus/none", str(tmp_path), code=3).stderr
    node.objects["corpus"]["dir/"] = b"x"
    assert "does not end in a file name" in program("get", "corpus/dir/", str(tmp_path), code=2).stderr


def test_a_target_without_rights_is_said_so(program: Program, tmp_path: Path) -> None:
    """As root every directory is writable, so the directory is one that nobody can write."""
    assert program("get", "corpus/readme", "/proc/x", code=10).stderr.startswith("forebay: /proc/")


def test_the_target_of_a_key() -> None:
    assert file_for("a/b.tar", "/nonexistent/out") == "/nonexistent/out"
    assert file_for("a/b.tar", "/nonexistent/") == "/nonexistent/b.tar"
    assert file_for("a/b.tar", ".") == "./b.tar"
    with pytest.raises(Invalid):
        file_for("a/..", ".")


def test_many_small_objects_are_fetched_side_by_side(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"] = {f"d{n % 7}/k{n}": os.urandom(n * 10) for n in range(300)}
    program("get", "-r", "corpus", str(tmp_path), "-q")
    for key, data in node.objects["corpus"].items():
        assert (tmp_path / key).read_bytes() == data


def test_get_r_gives_up_at_once_when_the_node_is_gone(program: Program, node: FakeNode, tmp_path: Path) -> None:
    node.objects["corpus"] = {f"k{n}": bytes(100_000) for n in range(200)}
    gone = []

    def leave(key: str, done: int) -> None:
        if not gone:
            gone.append(key)
            node.server.socket.close()
            node.drop_connections()

    node.cut_after, node.on_body = 10, leave
    get = program.process("get", "-r", "-j", "2", "corpus", str(tmp_path))
    _, err = get.communicate(timeout=60)
    assert get.returncode == 6, err
    assert b"no node answers" in err


def test_what_is_no_object_or_no_place_is_said_as_it_is(program: Program, tmp_path: Path) -> None:
    for verb in (("get", "corpus/train"), ("rm", "corpus/train"), ("get", "corpus/train/")):
        assert (
            "is a folder: add -r" in program(*verb, *([str(tmp_path / "x")] if verb[0] == "get" else []), code=3).stderr
        )
    absent = str(tmp_path / "absent" / "file")
    error = program("get", "corpus/readme", absent, code=10).stderr
    assert f"there is no directory {tmp_path / 'absent'}: make it" in error
    error = program("put", absent, "corpus/x", code=10).stderr
    assert error == f"forebay: {absent}: No such file or directory: check the path\n"
    (tmp_path / "file").write_bytes(b"x")
    assert "is no directory" in program("up", "--dir", str(tmp_path / "file"), code=2).stderr
