"""Symbolic links in a directory that is a bucket: nothing is written or removed behind one that leaves it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.backends.local import beneath
from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.local.unfinished import FOLDER, STRANGE_AGE_S
from forebay.backends.seam import Body
from forebay.core.errors import Denied, ForebayError, Invalid
from tests.backends.backend_places import read, run

FLIPS = 150


@pytest.fixture(params=["openat2", "name by name"], autouse=True)
def resolved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As this kernel does it, and as one without openat2."""
    if request.param == "name by name":
        monkeypatch.setattr(beneath, "_SYS_OPENAT2", 100_000)
    return str(request.param)


@pytest.fixture(params=["nameless", "named"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the file system has files without a name."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A bucket's directory, and one outside of it with a victim, which is as it was at the end."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for made in (root, outside, outside / "deep", outside / "empty"):
        made.mkdir()
    (outside / "victim").write_bytes(b"victim")
    before = sorted(outside.rglob("*"))
    yield root, outside
    assert sorted(outside.rglob("*")) == before
    assert (outside / "victim").read_bytes() == b"victim"


def some(data: bytes) -> Body:
    return Body(len(data), data)


def test_behind_a_link_that_leaves_nothing_is_written_or_removed(places: tuple[Path, Path], kept_as: None) -> None:
    root, outside = places
    (root / "out").symlink_to(outside)
    (root / "up").symlink_to("../outside")
    (root / "inner").mkdir()
    (root / "inner" / "out").symlink_to("../../outside")
    (root / "k").write_bytes(b"k")

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        for folder in ("out", "up", "inner/out", "out/deep", "out/new/folder"):
            for expect in (None, ""):
                with pytest.raises(Denied, match="leaves the bucket's directory"):
                    await backend.put(f"{folder}/new", some(b"x"), expect=expect)
            with pytest.raises(Denied, match="leaves the bucket's directory"):
                await backend.copy("k", f"{folder}/new")
            with pytest.raises(Denied, match="leaves the bucket's directory"):
                await backend.delete(f"{folder}/victim")
        assert (await read(backend, "out/victim")) == b"victim", "reads follow links: docs/security.md says why"
        version = (await backend.head("out/victim")).version
        with pytest.raises(Denied):
            await backend.put("out/victim", some(b"x"), expect=version)

    run(story())


def test_a_link_in_the_place_of_the_file_is_replaced_and_removed_itself(places: tuple[Path, Path]) -> None:
    root, outside = places
    for name in ("put", "delete"):
        (root / name).symlink_to(outside / "victim")

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        await backend.put("put", some(b"mine"))
        await backend.delete("delete")
        assert (root / "put").read_bytes() == b"mine"
        assert os.listdir(root) == ["put"]

    run(story())


def test_links_that_stay_are_followed(places: tuple[Path, Path], resolved: str) -> None:
    root, _ = places
    (root / "real").mkdir()
    (root / "alias").symlink_to("real")

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        if resolved == "openat2":
            await backend.put("alias/a/b", some(b"1"))
            assert (root / "real/a/b").read_bytes() == b"1"
            await backend.delete("alias/a/b")
            assert os.listdir(root / "real") == []
        else:
            with pytest.raises(Denied):
                await backend.put("alias/a/b", some(b"1"))

    run(story())
    run(_through_a_link_to_the_root(root))


async def _through_a_link_to_the_root(root: Path) -> None:
    """The root itself may be a link: its operator says where the bucket is."""
    (root.parent / "link").symlink_to(root)
    backend = DirectoryBackend(str(root.parent / "link"))
    await backend.put("x/y", some(b"2"))
    assert (root / "x/y").read_bytes() == b"2"
    await backend.delete("x/y")
    assert not (root / "x").exists()


def test_a_link_that_is_made_meanwhile_does_not_help(places: tuple[Path, Path], kept_as: None) -> None:
    root, outside = places
    (root / "folder").mkdir()
    over = threading.Event()

    def flip() -> None:
        """Have a link out of the root stand where the folder was, and take it away again, as often as can be."""
        while not over.is_set():
            try:
                (root / "folder").rename(root / "aside")
                (root / "folder").symlink_to(outside)
                time.sleep(0)
                os.unlink(root / "folder")
                (root / "aside").rename(root / "folder")
            except OSError:
                if (root / "folder").is_symlink():
                    os.unlink(root / "folder")

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        for number in range(FLIPS):
            for work in (backend.put(f"folder/new-{number % 5}", some(b"x")), backend.delete("folder/victim")):
                try:
                    await work
                except ForebayError:
                    pass

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        run(story())
    finally:
        over.set()
        thread.join()


def test_the_folder_of_unfinished_files_is_no_link(places: tuple[Path, Path]) -> None:
    root, outside = places
    long_ago_s = time.time() - 2 * STRANGE_AGE_S
    os.utime(outside / "victim", (long_ago_s, long_ago_s))
    (root / FOLDER).symlink_to(outside)
    (root / "k").write_bytes(b"old")

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        await backend.list_page("", "", "", 10)
        with pytest.raises(Invalid):
            await backend.put("k", some(b"new"))
        assert (root / "k").read_bytes() == b"old"

    run(story())


def test_no_descriptor_is_left(places: tuple[Path, Path], kept_as: None) -> None:
    root, outside = places
    (root / "out").symlink_to(outside)

    async def story() -> None:
        backend = DirectoryBackend(str(root))

        async def once() -> None:
            await backend.put("a/b/c", some(b"1"))
            await backend.put("a/b/c", some(b"2"), headers=(("content-type", "a/b"),))
            await backend.copy("a/b/c", "d/e")
            await backend.delete("a/b/c")
            await backend.delete("d/e")
            await backend.delete("none/at/all")
            for work in (backend.put("out/x", some(b"1")), backend.delete("out/deep/x")):
                with pytest.raises(Denied):
                    await work

        await once()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await once()
        assert len(os.listdir("/proc/self/fd")) == before
        assert os.listdir(root) == ["out"]

    run(story())
