"""Writing into a directory: files come and go whole, leave nothing behind, and meet what file systems forbid."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.seam import Body
from forebay.core.errors import Denied, Invalid, NoBackendBucket, NotFound, NotSupported, Precondition, Unavailable
from tests.backends.backend_places import list_all, read, run

DATA = os.urandom(9_000_000)


def some(data: bytes) -> Body:
    return Body(len(data), data)


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture(params=["nameless", "named"])
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the file system has files without a name; where not, the kernel answers as it does to a directory."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    return str(request.param)


def test_a_put_replaces_the_file_and_leaves_no_other(tmp_path: Path, kept_as: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    root = tmp_path / "root"
    root.mkdir()

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        await backend.put("a/b", some(b"old"), headers=(("content-type", "a/b"),), expect="")
        reader = await backend.fetch("a/b")
        put = await backend.put("a/b", Body(len(DATA), path=str(source)), expect=reader.info.version)
        assert (root / "a/b").read_bytes() == DATA
        assert (await backend.head("a/b")).headers == (), "the headers of the file that was"
        assert [bytes(chunk) async for chunk in reader] == [b"old"], "who had it open reads on"
        with pytest.raises(Precondition):
            await backend.put("a/b", some(b"never"), expect="")
        with pytest.raises(Precondition):
            await backend.put("a/b", some(b"never"), expect=reader.info.version)
        assert await backend.check("a/b", put.version) is None
        assert everything(root) == ["a", "a/b"]

    run(story())


def test_a_put_that_fails_or_is_cancelled_leaves_no_file(tmp_path: Path, kept_as: str) -> None:
    async def fail(upto: int) -> None:
        raise Unavailable("the client is gone")

    async def story() -> None:
        begun = asyncio.Event()

        async def wait(upto: int) -> None:
            begun.set()
            await asyncio.Event().wait()

        backend = DirectoryBackend(str(tmp_path))
        with pytest.raises(Unavailable):
            await backend.put("key", Body(4, b"data", ready=fail))
        putting = asyncio.create_task(backend.put("key", Body(4, b"data", ready=wait)))
        await begun.wait()
        assert await list_all(backend) == ([], []), "what is being written is no object"
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert everything(tmp_path) == []

    run(story())


PUT_THAT_WAITS = """
import asyncio, sys
from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.seam import Body

async def ready(upto):
    if upto > 8 << 20:
        print("half of it is written", flush=True)
        await asyncio.Event().wait()

asyncio.run(DirectoryBackend(sys.argv[1]).put("key", Body(9_000_000, bytes(9_000_000), ready=ready)))
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUT_THAT_WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("half")
        process.kill()
    assert everything(tmp_path) == []


PUT_THAT_STOPS_BEFORE_THE_RENAME = """
import asyncio, os, sys
from forebay.backends.local.directory import DirectoryBackend
from forebay.backends.seam import Body

def stop(source, target):
    print("named", flush=True)
    sys.stdin.read()

os.replace = stop
asyncio.run(DirectoryBackend(sys.argv[1]).put("a/key", Body(3, b"new")))
"""


def test_what_a_process_left_that_was_killed_before_the_rename_goes_and_what_a_living_one_has_stays(
    tmp_path: Path,
) -> None:
    run(DirectoryBackend(str(tmp_path)).put("a/key", some(b"old")))
    command = [sys.executable, "-c", PUT_THAT_STOPS_BEFORE_THE_RENAME, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "named\n"
        (named,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "key"]
        assert named.read_bytes() == b"new"
        assert asyncio.run(list_all(DirectoryBackend(str(tmp_path)))) == (["a/key"], [])
        assert named.exists(), "its process lives"
        process.kill()
    strange = named.with_name("000000000000-1-1")
    strange.write_bytes(b"of another machine, perhaps at work")
    assert asyncio.run(list_all(DirectoryBackend(str(tmp_path)))) == (["a/key"], [])
    assert [path.name for path in named.parent.iterdir()] == [strange.name]
    assert (tmp_path / "a/key").read_bytes() == b"old"
    strange.unlink()
    run(DirectoryBackend(str(tmp_path)).put("a/key", some(b"newer")))
    assert everything(tmp_path) == ["a", "a/key"]


def test_names_of_files_that_are_being_written_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / ".forebay-put-1-1").write_bytes(b"left behind")

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        assert await list_all(backend) == ([], [])
        with pytest.raises(NotFound):
            await backend.head(".forebay-put-1-1")
        with pytest.raises(Invalid):
            await backend.put("a/.forebay-put-1-1", some(b""))
        with pytest.raises(Invalid):
            await backend.put(".forebay-put-unfinished/key", some(b""))

    run(story())


def test_what_a_file_system_cannot_name_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        await backend.put("file", some(b"1"))
        await backend.put("folder/file", some(b"2"))
        for key in ("file/below", "folder", "a//b", "a/../b", "/a", "a/", "x" * 300, "nul\0"):
            for call in (backend.put(key, some(b"never")), backend.copy("file", key)):
                with pytest.raises(Invalid):
                    await call
        with pytest.raises(NotSupported, match="no tags"):
            await backend.put("tagged", some(b""), tags="a=b")
        assert await list_all(backend) == (["file", "folder/file"], [])

    run(story())


def test_a_delete_takes_empty_folders_with_it_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()

    async def story() -> None:
        backend = DirectoryBackend(str(root))
        for key in ("a/b/c/1", "a/2", "3"):
            await backend.put(key, some(b""))
        await backend.delete("a/b/c")  # a folder is no object
        await backend.delete("a/b/c/1/below")
        await backend.delete("../source")
        assert everything(root) == ["3", "a", "a/2", "a/b", "a/b/c", "a/b/c/1"]
        await backend.delete("a/b/c/1")
        assert everything(root) == ["3", "a", "a/2"]
        await backend.delete("a/2")
        await backend.delete("3")
        assert root.is_dir(), "the bucket itself stays"
        await backend.put("a", some(b"now a file"))

    run(story())


def test_puts_and_deletes_in_one_folder_do_not_trip_over_each_other(tmp_path: Path) -> None:
    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))

        async def come_and_go(name: str) -> None:
            for _ in range(60):
                await backend.put(f"deep/folder/{name}", some(name.encode()))
                assert await read(backend, f"deep/folder/{name}") == name.encode()
                await backend.delete(f"deep/folder/{name}")

        await asyncio.gather(*[come_and_go(f"{n}") for n in range(8)])
        assert everything(tmp_path) == []

    run(story())


def test_a_root_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path / "unmounted"))
        for call in (backend.put("a/b", some(b"x")), backend.delete("a/b"), backend.copy("a", "b")):
            with pytest.raises(NoBackendBucket):
                await call
        assert everything(tmp_path) == []

    run(story())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        with pytest.raises(Denied):
            await backend.put("key", some(b"x"))

    try:
        run(story())
    finally:
        tmp_path.chmod(0o700)


def test_metadata_that_the_file_system_cannot_hold_is_refused(tmp_path: Path) -> None:
    too_much = (("x-amz-meta-a", "x" * 100_000),)  # the kernel's limit is 64 KiB

    async def story() -> None:
        backend = DirectoryBackend(str(tmp_path))
        with pytest.raises(Invalid) as refused:
            await backend.put("key", some(b"x"), headers=too_much)
        assert refused.value.code == "MetadataTooLarge"
        assert everything(tmp_path) == []

    run(story())
