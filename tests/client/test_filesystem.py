"""`forebay://` through fsspec, on a real node: what is there, reading, writing, forks, and wrong input."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.callbacks import Callback

from bench.servers import Nginx
from forebay.client.sync import Client
from forebay.core.errors import KINDS, Precondition
from forebay.fsspec.errors import as_os_error
from forebay.fsspec.filesystem import ForebayFileSystem
from tests.node.conftest import NodeProcess, pattern

pytestmark = pytest.mark.real
BIG = pattern(3_000_000, 1)


@pytest.fixture
def fs(file_node: NodeProcess) -> Iterator[ForebayFileSystem]:
    """The node's filesystem, with nothing in its buckets at the end."""
    made = ForebayFileSystem(endpoint_url=file_node.endpoint)
    made.invalidate_cache()
    yield made
    for bucket in ("scratch", "lake"):
        made.rm(bucket, recursive=True)


@pytest.fixture(params=["scratch", "lake"])
def bucket(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tree(fs: ForebayFileSystem, bucket: str) -> str:
    """A few objects: `a.txt`, `sub/b.txt`, `sub/deep/c.bin`, `sub.txt`."""
    texts = {"a.txt": b"one", "sub/b.txt": b"two", "sub/deep/c.bin": BIG, "sub.txt": b""}
    fs.pipe({f"{bucket}/{name}": data for name, data in texts.items()})
    return bucket


def test_it_is_found_by_its_name(file_node: NodeProcess, fs: ForebayFileSystem):
    assert type(fsspec.filesystem("forebay")) is ForebayFileSystem
    with fsspec.open("forebay://lake/x", "wb", endpoint_url=file_node.endpoint) as file:
        file.write(b"data")
    same, path = fsspec.url_to_fs("forebay://lake/x", endpoint_url=file_node.endpoint)
    assert same is fs
    assert path == "lake/x"
    assert fs.unstrip_protocol(path) == "forebay://lake/x"


def test_what_is_there(fs: ForebayFileSystem, tree: str):
    assert {"lake", "scratch"} <= set(fs.ls("", detail=False))
    assert fs.ls(tree, detail=False) == [f"{tree}/{name}" for name in ("a.txt", "sub", "sub.txt")]
    assert [(info["name"], info["type"], info["size"]) for info in fs.ls(f"forebay://{tree}/sub/")] == [
        (f"{tree}/sub/b.txt", "file", 3),
        (f"{tree}/sub/deep", "directory", 0),
    ]
    everything = [f"{tree}/{name}" for name in ("a.txt", "sub.txt", "sub/b.txt", "sub/deep/c.bin")]
    assert fs.find(tree) == everything
    assert fs.find(tree, maxdepth=1) == everything[:2]
    with_folders = [f"{tree}/sub", f"{tree}/sub/b.txt", f"{tree}/sub/deep", everything[3]]
    assert fs.find(f"{tree}/sub", withdirs=True) == with_folders
    assert fs.find(f"{tree}/a.txt") == [f"{tree}/a.txt"]
    assert fs.find(f"{tree}/none") == []
    assert fs.glob(f"{tree}/s*") == [f"{tree}/sub", f"{tree}/sub.txt"]
    assert fs.glob(f"{tree}/**/*.txt") == everything[:3]
    assert fs.glob("la*/") + fs.glob("scrat*") == ["lake", "scratch"]
    assert [(path, sorted(folders), sorted(files)) for path, folders, files in fs.walk(tree)] == [
        (tree, ["sub"], ["a.txt", "sub.txt"]),
        (f"{tree}/sub", ["deep"], ["b.txt"]),
        (f"{tree}/sub/deep", [], ["c.bin"]),
    ]
    assert fs.du(tree) == 6 + len(BIG)
    assert (fs.isdir(f"{tree}/sub"), fs.isfile(f"{tree}/sub"), fs.isdir(tree), fs.exists(f"{tree}/su")) == (
        *(True, False, True, False),
    )
    info = fs.info(f"{tree}/a.txt")
    assert (info["size"], info["type"], bool(info["etag"])) == (3, "file", True)
    age_s = (datetime.now(UTC) - fs.modified(f"{tree}/a.txt")).total_seconds()
    assert -5 < age_s < 120
    assert fs.created(f"{tree}/a.txt") == fs.modified(f"{tree}/a.txt")
    assert fs.expand_path(f"{tree}/sub*") == [f"{tree}/sub", f"{tree}/sub.txt"]
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{tree}/none")


def test_markers_of_directories_are_directories(fs: ForebayFileSystem, file_node: NodeProcess):
    with Client(file_node.endpoint) as client:
        client.put("scratch", "made/", b"")
        client.put("scratch", "full/", b"")
        client.put("scratch", "full/x", b"1")
    assert fs.isdir("scratch/made")
    assert fs.ls("scratch/made") == []
    assert fs.find("scratch") == ["scratch/full/x"]
    assert fs.find("scratch", withdirs=True) == ["scratch", "scratch/full", "scratch/full/x", "scratch/made"]
    fs.rmdir("scratch/made")
    assert not fs.exists("scratch/made")
    with pytest.raises(OSError) as not_empty:
        fs.rmdir("scratch/full")
    assert not_empty.value.errno == errno.ENOTEMPTY
    fs.rm("scratch/full", recursive=True)
    assert fs.ls("scratch") == []


def test_listings_are_kept_until_somebody_here_changes_something(fs: ForebayFileSystem, file_node: NodeProcess):
    fs.pipe_file("scratch/d/a", b"1")
    assert len(fs.ls("scratch/d")) == 1
    with Client(file_node.endpoint) as other:
        other.put("scratch", "d/b", b"2")
        other.put("scratch", "d/a", b"longer")
    assert len(fs.ls("scratch/d")) == 1
    assert (fs.info("scratch/d/a")["size"], fs.cat_file("scratch/d/a")) == (1, b"longer")
    assert fs.exists("scratch/d/b"), "what a listing does not have is asked for"
    assert len(fs.ls("scratch/d", refresh=True)) == 2
    fs.pipe_file("scratch/d/c", b"3")
    assert len(fs.ls("scratch/d")) == 3
    fs.rm("scratch/d/c")
    assert len(fs.ls("scratch/d")) == 2
    never = ForebayFileSystem(endpoint_url=file_node.endpoint, use_listings_cache=False)
    assert len(never.ls("scratch/d")) == 2
    with Client(file_node.endpoint) as other:
        other.delete("scratch", "d/b")
    assert (len(never.ls("scratch/d")), len(fs.ls("scratch/d"))) == (1, 2)
    fs.invalidate_cache("scratch/d/x")
    assert len(fs.ls("scratch/d")) == 1


# --- reading ---------------------------------------------------------------------------------------------------------
def test_ranges(fs: ForebayFileSystem, tree: str, file_node: NodeProcess):
    path = f"{tree}/sub/deep/c.bin"
    for start, end in ((0, 10), (None, 7), (100, None), (-10, None), (-10, -3), (5, -5), (7, 7), (9, 3), (0, 10**9)):
        assert fs.cat_file(path, start, end) == BIG[start:end], (start, end)
    assert fs.cat_file(path, 10**9) == fs.cat_file(f"{tree}/sub.txt") == b""
    assert fs.cat(f"{tree}/sub", recursive=True) == {f"{tree}/sub/b.txt": b"two", path: BIG}
    assert fs.cat([f"{tree}/a.txt", path]) == {f"{tree}/a.txt": b"one", path: BIG}
    assert fs.cat(f"{tree}/*.txt") == {f"{tree}/a.txt": b"one", f"{tree}/sub.txt": b""}
    assert fs.cat([f"{tree}/a.txt", f"{tree}/none"], on_error="omit") == {f"{tree}/a.txt": b"one"}
    assert fs.head(path, 5) + fs.tail(path, 5) == BIG[:5] + BIG[-5:]
    starts = [at * 997 % len(BIG) for at in range(3000)]
    before = file_node.metric("forebay_batches_total")
    found = fs.cat_ranges([path] * 3000, starts, [start + 100 for start in starts])
    assert found == [BIG[start : start + 100] for start in starts]
    asked = file_node.metric("forebay_batches_total") - before
    assert asked <= 2, "3,000 ranges in two requests, or read from the node's file"
    mixed = fs.cat_ranges([path, f"{tree}/none", path, f"{tree}/a.txt"], [0, 0, -4, 50], [3, 3, None, 60])
    assert isinstance(mixed[1], FileNotFoundError)
    assert [mixed[0], mixed[2], mixed[3]] == [BIG[:3], BIG[-4:], b""]
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([path, f"{tree}/none"], 0, 5, on_error="raise")
    with pytest.raises(ValueError):
        fs.cat_ranges([path], [1, 2], 3)


def test_many_ranges_at_once_of_what_the_backend_is_asked_about_each_time(fs: ForebayFileSystem):
    """Readers that come while another's question to the backend was just answered ask anew; once that never ended."""
    fs.pipe_file("asked/c.bin", BIG)
    starts = [at * 997 % 2_000_000 for at in range(2000)]
    for _ in range(6):
        found = fs.cat_ranges(["asked/c.bin"] * 2000, starts, [start + 100 for start in starts])
        assert found == [BIG[start : start + 100] for start in starts]


def test_a_file_is_read(fs: ForebayFileSystem, tree: str):
    path = f"{tree}/sub/deep/c.bin"
    with fs.open(path) as file:
        assert (file.size, file.tell(), file.readable(), file.writable(), file.path) == (
            *(len(BIG), 0, True, False, path),
        )
        assert file.read(10) == BIG[:10]
        assert file.seek(-5, io.SEEK_END) == len(BIG) - 5
        assert file.read() == BIG[-5:]
        file.seek(1000)
        room = bytearray(200_000)
        assert file.readinto(room) == len(room)
        assert room == BIG[1000:201_000]
        again = pickle.loads(pickle.dumps(file))
        assert again.read(50) == BIG[201_000:201_050]
        assert file.info()["size"] == len(BIG)
        again.close()
    fs.pipe_file(f"{tree}/lines", b"".join(b"line %d\n" % number for number in range(10_000)))
    with fs.open(f"{tree}/lines", "r") as text:
        assert [int(line.split()[1]) for line in text] == list(range(10_000))
    for cache in ("readahead", "bytes", "all", "none"):
        with fs.open(path, cache_type=cache, block_size=100_000) as file:
            file.seek(70_000)
            assert file.read(90_000) == BIG[70_000:160_000]


def test_an_open_file_is_of_one_version(fs: ForebayFileSystem, tree: str):
    path = f"{tree}/sub/deep/c.bin"
    with fs.open(path) as file, fs.open(path, cache_type="none") as cached:
        assert file.read(10) == cached.read(10) == BIG[:10]
        fs.pipe_file(path, BIG[::-1])
        for one in (file, cached):
            one.seek(2_000_000)
            with pytest.raises(OSError) as changed:
                one.read(10)
            assert changed.value.errno == errno.ESTALE
            assert isinstance(changed.value.__cause__, Precondition)
    assert fs.cat_file(path, 0, 10) == BIG[::-1][:10]


def test_gets_and_puts_tell_how_far_they_are(fs: ForebayFileSystem, tree: str, tmp_path: Path):
    told = Callback()
    fs.get_file(f"{tree}/sub/deep/c.bin", str(tmp_path / "c"), callback=told)
    assert (tmp_path / "c").read_bytes() == BIG
    assert (told.size, told.value) == (len(BIG), len(BIG))
    told = Callback()
    fs.put_file(str(tmp_path / "c"), f"{tree}/again", callback=told, content_type="image/x-c", metadata={"by": "me"})
    assert (told.size, told.value) == (len(BIG), len(BIG))
    fs.invalidate_cache()
    info = fs.info(f"{tree}/again")
    assert (info["content_type"], info["metadata"]) == ("image/x-c", {"by": "me"})
    with pytest.raises(FileExistsError):
        fs.put_file(str(tmp_path / "c"), f"{tree}/again", mode="create")
    fs.get(f"{tree}/sub", str(tmp_path / "sub"), recursive=True)
    assert (tmp_path / "sub" / "deep" / "c").exists() is False
    assert (tmp_path / "sub" / "deep" / "c.bin").read_bytes() == BIG
    fs.put(str(tmp_path / "sub"), f"{tree}/up", recursive=True)
    assert fs.find(f"{tree}/up") == [f"{tree}/up/b.txt", f"{tree}/up/deep/c.bin"]


# --- writing ---------------------------------------------------------------------------------------------------------
def fail_inside(opened: Any) -> None:
    with opened as file:
        file.write(b"half")
        raise RuntimeError


def test_a_file_is_written_whole_or_not_at_all(fs: ForebayFileSystem, bucket: str):
    path = f"{bucket}/file"
    with fs.open(path, "wb") as file:
        file.write(b"first")
        assert not fs.exists(path)
    assert fs.cat_file(path) == b"first"
    with pytest.raises(RuntimeError):
        fail_inside(fs.open(path, "wb"))
    assert fs.cat_file(path) == b"first"
    with fs.open(path, "wb") as file:
        for at in range(0, len(BIG), 400_000):
            file.write(BIG[at : at + 400_000])
    assert fs.cat_file(path) == BIG
    with fs.open(f"{bucket}/t.gz", "wt", compression="infer") as text:
        text.write("zipped")
    with fs.open(f"{bucket}/t.gz", "rt", compression="infer") as text:
        assert text.read() == "zipped"
    with pytest.raises(RuntimeError):
        fail_inside(fs.open(f"{bucket}/t.gz", "wb", compression="gzip"))
    with fs.open(f"{bucket}/t.gz", "rb", compression="infer") as file:
        assert file.read() == b"zipped"
    lost = fs.open(f"{bucket}/lost", "wb")
    lost.write(b"x")
    with pytest.warns(ResourceWarning, match="never closed"):
        del lost
    assert not fs.exists(f"{bucket}/lost")
    raced = fs.open(f"{bucket}/raced", "xb")
    raced.write(b"mine")
    fs.pipe_file(f"{bucket}/raced", b"theirs")
    with pytest.raises(FileExistsError):
        raced.close()
    assert fs.cat_file(f"{bucket}/raced") == b"theirs"


def test_appending_reads_what_is_small_and_loses_nothing(fs: ForebayFileSystem, bucket: str, monkeypatch: Any):
    path = f"{bucket}/log"
    for line in (b"one\n", b"two\n"):
        with fs.open(path, "ab") as file:
            file.write(line)
    assert fs.cat_file(path) == b"one\ntwo\n"
    late = fs.open(path, "ab")
    late.write(b"late")
    fs.pipe_file(path, b"changed")
    with pytest.raises(OSError) as stale:
        late.close()
    assert (stale.value.errno, fs.cat_file(path)) == (errno.ESTALE, b"changed")
    monkeypatch.setattr("forebay.fsspec.files.APPEND_BYTES_MAX", 3)
    with pytest.raises(OSError, match="several objects") as refused:
        fs.open(path, "ab")
    assert refused.value.errno == errno.EOPNOTSUPP
    with pytest.raises(ValueError, match=r"r\+b"):
        fs.open(path, "r+b")


def test_a_transaction_writes_all_or_nothing(fs: ForebayFileSystem, bucket: str):
    with fs.transaction:
        with fs.open(f"{bucket}/t/a", "wb") as file:
            file.write(b"a")
        with fs.open(f"{bucket}/t/b", "w") as text:
            text.write("b")
        assert fs.find(f"{bucket}/t") == []
    assert fs.cat(f"{bucket}/t/*") == {f"{bucket}/t/a": b"a", f"{bucket}/t/b": b"b"}

    def half() -> None:
        with fs.transaction:
            with fs.open(f"{bucket}/t/a", "wb") as file:
                file.write(b"lost")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert fs.cat_file(f"{bucket}/t/a") == b"a"
    fs.pipe_file(f"{bucket}/t/c", b"after it files are written at once")
    assert fs.exists(f"{bucket}/t/c")


def test_copies_moves_and_deletions(fs: ForebayFileSystem, tree: str):
    fs.cp_file(f"{tree}/a.txt", f"{tree}/copy.txt")
    fs.cp(f"{tree}/sub", f"{tree}/other", recursive=True)
    assert fs.find(f"{tree}/other") == [f"{tree}/other/b.txt", f"{tree}/other/deep/c.bin"]
    fs.mv(f"{tree}/copy.txt", f"{tree}/moved.txt")
    assert (fs.exists(f"{tree}/copy.txt"), fs.cat_file(f"{tree}/moved.txt")) == (False, b"one")
    fs.mv(f"{tree}/other", f"{tree}/elsewhere", recursive=True)
    assert (fs.exists(f"{tree}/other"), fs.cat_file(f"{tree}/elsewhere/deep/c.bin")) == (False, BIG)
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{tree}/none", f"{tree}/x")
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{tree}/none")
    with pytest.raises(IsADirectoryError):
        fs.rm(f"{tree}/sub")
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{tree}/none", recursive=True)
    fs.rm([f"{tree}/a.txt", f"{tree}/moved.txt"])
    fs.rm(f"{tree}/sub", recursive=True)
    assert fs.find(tree) == [f"{tree}/elsewhere/b.txt", f"{tree}/elsewhere/deep/c.bin", f"{tree}/sub.txt"]
    before = fs.ukey(f"{tree}/sub.txt"), fs.checksum(f"{tree}/sub.txt")
    assert before == (fs.ukey(f"{tree}/sub.txt"), fs.checksum(f"{tree}/sub.txt"))
    fs.pipe_file(f"{tree}/sub.txt", b"other")
    assert fs.ukey(f"{tree}/sub.txt") != before[0]
    fs.touch(f"{tree}/sub.txt")
    assert fs.info(f"{tree}/sub.txt")["size"] == 0
    with pytest.raises(NotImplementedError):
        fs.touch(f"{tree}/sub.txt", truncate=False)
    with pytest.raises(NotImplementedError, match="presign"):
        fs.sign(f"{tree}/sub.txt")
    many = {f"{tree}/many/{number:04d}": b"x" for number in range(300)}
    fs.pipe(many)
    fs.rm(f"{tree}/many", recursive=True)
    assert not fs.exists(f"{tree}/many")


def test_buckets_are_made_on_purpose_only(fs: ForebayFileSystem):
    fs.mkdir("fresh")
    try:
        fs.pipe_file("fresh/x", b"1")
        with pytest.raises(FileExistsError):
            fs.mkdir("fresh")
        fs.makedirs("fresh", exist_ok=True)
        fs.makedirs("fresh/deep/er", exist_ok=False)
        with pytest.raises(FileExistsError):
            fs.makedirs("fresh/x", exist_ok=True)
        with pytest.raises(OSError) as not_empty:
            fs.rmdir("fresh")
        assert not_empty.value.errno == errno.ENOTEMPTY
        assert fs.exists("fresh/x")
    finally:
        fs.rm("fresh", recursive=True)
        fs.rmdir("fresh")
    assert not fs.exists("fresh")
    for call in (fs.mkdir, fs.makedirs):
        with pytest.raises(FileNotFoundError, match="make it first"):
            call("mistyped/dir")


# --- instances, processes, loops -------------------------------------------------------------------------------------
def test_instances_are_told_apart_by_node_and_identity(monkeypatch: pytest.MonkeyPatch):
    one = ForebayFileSystem(endpoint_url="http://127.0.0.1:1", token="a")
    assert one is ForebayFileSystem(endpoint_url="http://127.0.0.1:1", token="a")
    assert one is not ForebayFileSystem(endpoint_url="http://127.0.0.1:1", token="b")
    assert one is not ForebayFileSystem(endpoint_url="http://127.0.0.1:2", token="a")
    monkeypatch.setenv("FOREBAY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("FOREBAY_TOKEN", "a")
    assert fsspec.filesystem("forebay") is one
    sent = pickle.dumps(fsspec.filesystem("forebay"))
    monkeypatch.setenv("FOREBAY_URL", "http://127.0.0.1:2")
    assert fsspec.filesystem("forebay").url == "http://127.0.0.1:2"
    assert pickle.loads(sent) is one
    assert ForebayFileSystem(use_listings_cache=False, hf={"token": "of another library"}).url.endswith(":2")
    with pytest.raises(TypeError, match="endpoint_url"):
        ForebayFileSystem(url="http://127.0.0.1:1")


def _in_a_child(fs: ForebayFileSystem, path: str, answers: Any) -> None:
    fresh = fsspec.filesystem("forebay", **fs.storage_options)
    answers.put((fs.cat_file(path), fs.info(path)["size"], fresh.ls(path.rpartition("/")[0], detail=False)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_read_and_parents_go_on(fs: ForebayFileSystem, tree: str, method: str):
    path = f"{tree}/a.txt"
    context: Any = multiprocessing.get_context(method)
    fs.info(path)
    answers = context.Queue()
    children = [context.Process(target=_in_a_child, args=(fs, path, answers)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in range(20):
        fs.invalidate_cache()
        assert fs.info(path)["size"] == 3, "the parent's connections are as they were"
    for _ in children:
        assert answers.get(timeout=60) == (b"one", 3, [f"{tree}/a.txt", f"{tree}/sub", f"{tree}/sub.txt"])
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    fs.invalidate_cache()
    assert fs.info(path)["size"] == 3


def test_a_child_that_ends_by_itself_leaves_the_parents_loop_alone(fs: ForebayFileSystem, tree: str):
    path = f"{tree}/a.txt"
    fs.info(path)
    other = ForebayFileSystem(**fs.storage_options, patience_s=20, skip_instance_cache=True)
    other.info(path)
    pid = os.fork()
    if not pid:
        del other  # the last reference: its connections are the parent's
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    other.invalidate_cache()
    assert other.info(path)["size"] == 3
    other.close()


def test_on_a_loop_of_ones_own(file_node: NodeProcess, fs: ForebayFileSystem):
    async def fail(own: ForebayFileSystem) -> None:
        async with await own.open_async("scratch/own/d", "wb") as file:
            await file.write(b"x")
            raise RuntimeError

    async def story() -> None:
        own = ForebayFileSystem(endpoint_url=file_node.endpoint, asynchronous=True)
        await own._pipe({"scratch/own/a": b"aaa", "scratch/own/b": b"bbb"})
        assert await own._cat_file("scratch/own/a", 1) == b"aa"
        assert await own._cat_ranges(["scratch/own/a", "scratch/own/b"], [0, -1], [2, None]) == [b"aa", b"b"]
        assert await own._find("scratch/own") == ["scratch/own/a", "scratch/own/b"]
        async with await own.open_async("scratch/own/c", "wb") as file:
            await file.write(BIG)
        reader = await own.open_async("scratch/own/c")
        reader.seek(100)
        assert await reader.read(5) == BIG[100:105]
        assert await reader.read() == BIG[105:]
        await reader.close()
        with pytest.raises(RuntimeError):
            await fail(own)
        assert not await own._exists("scratch/own/d")
        with pytest.raises(FileExistsError):
            await own.open_async("scratch/own/c", "xb")
        assert [sorted(files) async for _, _, files in own._walk("scratch/own")] == [["a", "b", "c"]]
        await own._rm("scratch/own", recursive=True)
        assert not await own._exists("scratch/own")
        await own.aclose()

    asyncio.run(story())
    asyncio.run(story())


# --- wrong input -----------------------------------------------------------------------------------------------------
def test_every_kind_of_error_is_an_os_error():
    for kind in KINDS.values():
        error = as_os_error(kind("what is wrong"), "b/k")
        assert isinstance(error, OSError)
        assert "what is wrong" in str(error)
        assert error.filename == "b/k"
    assert isinstance(as_os_error(KINDS["Denied"](""), ""), PermissionError)
    assert isinstance(as_os_error(KINDS["Exists"](""), ""), FileExistsError)


def test_names_that_cannot_be(fs: ForebayFileSystem, bucket: str):
    for call in (fs.cat_file, fs.open, lambda path: fs.pipe_file(path, b""), fs.rm_file, fs.touch):
        with pytest.raises(IsADirectoryError, match="forebay://BUCKET/KEY"):
            call(bucket)
    with pytest.raises(OSError, match="endpoint_url"):
        fs.cat_file("forebay://127.0.0.1:9400/lake/x")
    for call in (fs.cat_file, fs.open, fs.info, fs.ls, fs.modified, fs.rm_file):
        with pytest.raises(FileNotFoundError):
            call("no-such-bucket/key")
    with pytest.raises(FileNotFoundError):
        fs.pipe_file("no-such-bucket/key", b"")
    assert (fs.exists("no-such-bucket"), fs.exists("no-such-bucket/x"), fs.find("no-such-bucket")) == (False, False, [])
    with pytest.raises(OSError, match="name one"):
        fs.rm("", recursive=True)
    with pytest.raises(OSError, match="not valid"):
        ForebayFileSystem(endpoint_url="ftp://nowhere")


def test_a_node_that_is_not_there_is_no_empty_bucket(free_port: int):
    fs = ForebayFileSystem(endpoint_url=f"http://127.0.0.1:{free_port}")
    calls = (fs.info, fs.exists, fs.isfile, fs.isdir, fs.ls, fs.find, fs.cat_file, fs.open, lambda p: list(fs.walk(p)))
    for call in (*calls, lambda path: fs.glob(f"{path}/*"), lambda path: fs.cat_ranges([path], 0, 1)):
        with pytest.raises(ConnectionRefusedError, match="forebay up"):
            call("lake/x")


def test_a_bucket_that_cannot_be_written(
    fs: ForebayFileSystem, file_node: NodeProcess, http_server: Nginx, tmp_path: Path
):
    (http_server.root / "for-files").mkdir()
    (http_server.root / "for-files" / "x").write_bytes(b"of the web")
    file_node.add_bucket("web", f"{http_server.url}/for-files")
    (tmp_path / "x").write_bytes(b"x")

    def by_a_file() -> None:
        with fs.open("web/x", "wb") as file:
            file.write(b"x")

    for call in (by_a_file, lambda: fs.pipe_file("web/x", b"x"), lambda: fs.put_file(str(tmp_path / "x"), "web/x")):
        with pytest.raises(OSError, match="can only be read") as refused:
            call()
        assert refused.value.errno == errno.EOPNOTSUPP
    assert fs.cat_file("web/x") == b"of the web"
    file_node.json("DELETE", "buckets/web")


def test_what_an_identity_may_not_do(tmp_path: Path):
    entries = [
        {"name": "boss", "token": "boss-token-of-the-test", "allow": "admin:*"},
        {"name": "reader", "token": "reader-token-of-the-test", "allow": "read:mine"},
    ]
    (tmp_path / "identities.json").write_text(json.dumps({"identities": entries}))
    (tmp_path / "identities.json").chmod(0o600)
    node = NodeProcess(tmp_path / "n", "--fronts", "0", "--identities", str(tmp_path / "identities.json"))
    node.start()
    try:
        boss, reader, nobody = (
            ForebayFileSystem(endpoint_url=node.endpoint, token=token)
            for token in ("boss-token-of-the-test", "reader-token-of-the-test", "wrong")
        )
        boss.mkdir("mine")
        boss.mkdir("other")
        boss.pipe({"mine/x": b"1", "other/x": b"2"})
        assert (reader.cat_file("mine/x"), reader.ls("", detail=False)) == (b"1", ["mine"])
        for call in (reader.cat_file, reader.open, reader.info, reader.exists, reader.isfile):
            with pytest.raises(PermissionError):
                call("other/x")
        with pytest.raises(PermissionError):
            reader.pipe_file("mine/x", b"3")
        with pytest.raises(PermissionError):
            reader.rm("mine", recursive=True)
        with pytest.raises(PermissionError):
            reader.mkdir("third")
        with pytest.raises(PermissionError):
            nobody.ls("mine")
        assert isinstance(reader.cat_ranges(["other/x"], 0, 1)[0], PermissionError)
    finally:
        node.stop()
