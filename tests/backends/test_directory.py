"""A directory as a bucket: what the file system does that no object store does."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.backends import errors
from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.local.memory import MemoryBackend
from forebay.backends.seam import Body
from forebay.core.errors import Denied, NoBackendBucket, NotFound, Precondition, Unavailable
from tests.backends.backend_places import list_all, read, run


def test_control_characters_are_fine_and_what_is_not_utf8_is_not_an_object(tmp_path: Path) -> None:
    (tmp_path / "line\nbreak").write_bytes(b"1")
    (tmp_path / "bell\x07").write_bytes(b"2")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")).write_bytes(b"3")

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        assert await list_all(backend) == (["bell\x07", "line\nbreak"], [])
        assert await read(backend, "line\nbreak") == b"1"

    run(story())


def test_only_regular_files_are_objects(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_bytes(b"x")

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        assert await list_all(backend) == (["file"], [])
        for key in ("pipe", "folder", "folder/", "dangling", "file/x", "y" * 300):
            with pytest.raises(NotFound):
                await backend.fetch(key)
            with pytest.raises(NotFound):
                await backend.head(key)

    run(story())


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(b"x")
    (tmp_path / "real" / "self").symlink_to(".")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "alias").symlink_to("real")

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        assert await list_all(backend) == (["alias/file", "real/file"], [])
        assert await read(backend, "alias/file") == b"x"

    run(story())


def test_a_file_replaced_while_it_is_read_stays_itself_and_one_written_in_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * 3_000_000)

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        fetch = await backend.fetch("data")
        chunks = fetch.__aiter__()
        got = bytes(await chunks.__anext__())
        (tmp_path / "new").write_bytes(b"b" * 3_000_000)
        (tmp_path / "new").replace(path)
        got += b"".join([bytes(chunk) async for chunk in chunks])
        assert got == b"a" * 3_000_000

        fetch = await backend.fetch("data")
        chunks = fetch.__aiter__()
        assert bytes(await chunks.__anext__()) == b"b" * 1_048_576
        with path.open("r+b") as file:
            file.truncate(2_000_000)
        with pytest.raises(Precondition):
            await chunks.__anext__()
        await fetch.aclose()

    run(story())


def test_a_root_that_is_gone_is_no_such_bucket(tmp_path: Path) -> None:
    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path / "gone"))
        for ask in (backend.probe(), backend.fetch("x"), backend.head("x"), backend.list_page("", "", "", 10)):
            with pytest.raises(NoBackendBucket):
                await ask

    run(story())


def test_an_empty_root_on_another_disk_than_before_is_no_bucket(tmp_path: Path) -> None:
    """What an unmounted disk leaves: the mount point. A root that somebody emptied is a bucket without objects."""
    shared = Path(tempfile.mkdtemp(dir="/dev/shm"))
    if shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("the temporary directory is on tmpfs as well")

    async def story() -> None:
        root = tmp_path / "mount"
        root.symlink_to(shared)
        (shared / "key").write_bytes(b"x")
        backend = DirectoryBackend(str(root))
        info = await backend.head("key")
        root.unlink()
        root.mkdir()
        for ask in (backend.fetch("key"), backend.head("key"), backend.check("key", info.version), backend.probe()):
            with pytest.raises(NoBackendBucket, match="another disk"):
                await ask
        with pytest.raises(NoBackendBucket):
            await backend.put("other", Body(1, b"x"))
        root.rmdir()
        root.symlink_to(shared)
        assert await backend.check("key", info.version) is None
        (shared / "key").unlink()
        with pytest.raises(NotFound):
            await backend.check("key", info.version)
        root.unlink()
        root.mkdir()
        (root / "other").write_bytes(b"y")
        assert await read(backend, "other") == b"y", "a directory that was moved has something in it"

    try:
        run(story())
    finally:
        shutil.rmtree(shared)


def test_what_the_disk_says_becomes_the_kind_that_says_what_to_do() -> None:
    for said, kind in {
        PermissionError(13, "no"): Denied,
        FileNotFoundError(2, "gone"): NotFound,
        OSError(5, "input/output error"): Unavailable,
        TimeoutError("slow"): Unavailable,
    }.items():
        assert type(errors.from_os(said, "file:///x")) is kind


def test_a_listing_sees_files_that_came_after_the_page_before(tmp_path: Path) -> None:
    """Name lists are kept between pages only while the directory stands still."""
    for number in range(10):
        (tmp_path / f"f{number}").write_bytes(b"")
    long_ago = time.time() - 100
    os.utime(tmp_path, (long_ago, long_ago))

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        page = await backend.list_page("", "", "", 5)
        assert list(backend._kept) == [""]
        (tmp_path / "f7x").write_bytes(b"")
        keys, _ = await list_all(backend, after=page.next_after)
        assert keys == ["f5", "f6", "f7", "f7x", "f8", "f9"]

    run(story())


def test_pages_of_a_large_directory_read_its_names_once(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"f{number:05}").touch()
    long_ago = time.time() - 100
    os.utime(tmp_path, (long_ago, long_ago))

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        await backend.list_page("", "", "", 10)
        names = backend._kept[""].names
        keys, _ = await list_all(backend, limit=10)
        assert len(keys) == 3000
        assert backend._kept[""].names is names

    run(story())


segment = st.text(alphabet="ab!0.-\x01é", min_size=1, max_size=3).filter(lambda text: text not in (".", ".."))
some_keys = st.lists(st.lists(segment, min_size=1, max_size=3).map("/".join), max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    keys=some_keys,
    prefix=st.sampled_from(["", "a", "a/", "a/b", "b!", "é", "a/b/", "/", "../"]),
    delimiter=st.sampled_from(["", "/", "b", "/a"]),
    after=st.one_of(st.just(""), some_keys.map(lambda found: found[0] if found else "a")),
    limit=st.integers(1, 5),
)
def test_a_directory_lists_as_a_bucket_of_the_same_keys_does(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], prefix: str, delimiter: str, after: str, limit: int
) -> None:
    """Against two oracles: memory, and three lines that know nothing of walking."""
    root = tmp_path_factory.mktemp("listed")
    memory = MemoryBackend()
    made = []
    for key in keys:
        path = root / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        except OSError:
            continue  # a name cannot be a file and a directory
        memory.place(key, b"")
        made.append(key)

    kept = [key for key in sorted(set(made)) if key.startswith(prefix) and key > after]
    folds = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in kept}
    wanted = (
        [key for key in kept if folds[key] < 0],
        sorted({key[: folds[key] + len(delimiter)] for key in kept if folds[key] >= 0}),
    )

    async def story() -> None:
        for backend in (DirectoryBackend(str(root)), memory):
            assert await list_all(backend, prefix, delimiter, after, limit) == wanted

    run(story())


def test_two_that_look_for_the_first_time_do_not_take_each_other_for_an_empty_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, scandir = DirectoryBackend(str(tmp_path)), os.scandir

    class Slow:
        """Another thread looks, and is done, before this one has seen that nothing is there."""

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __next__(self) -> object:
            monkeypatch.setattr(os, "scandir", scandir)
            backend._probe()
            raise StopIteration

    monkeypatch.setattr(os, "scandir", lambda path: Slow())
    backend._probe()
