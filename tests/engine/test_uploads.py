"""Uploads at the engine: real disk, real metadata store, a bucket in memory; writing itself is played."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from forebay.backends.local.memory import MemoryBackend
from forebay.core import limits
from forebay.core.errors import Busy, ForebayError, NotFound, Precondition, Unavailable
from forebay.core.machines import uploads
from forebay.core.messages.calls import (
    UploadCompleteCall,
    UploadCompleted,
    UploadCreateCall,
    UploadNamed,
    UploadPartCall,
    UploadPartsCall,
    UploadsCall,
    UploadState,
    Written,
)
from forebay.core.messages.wire import VolumeAt
from forebay.core.s3rules.checksums import Checksum
from forebay.core.types import Bucket, ObjectInfo
from forebay.meta.sqlite import SqliteMeta
from forebay.node.engine.write import parts as files
from forebay.node.engine.write.through_bodies import Through
from forebay.node.engine.write.uploads import DONE_KEPT_S, UploadBook
from forebay.ports.chance import Seeded
from forebay.ports.clock import wall_s

from .conftest import until

MIB = 1 << 20
PART = bytes(5 * MIB)


class Clock:
    def __init__(self) -> None:
        self.now_s = wall_s()

    def wall_s(self) -> float:
        return self.now_s

    monotonic_s = wall_s


class NoNotes:
    """Notes of the uploads that whole bodies begin: none, since they are small."""

    async def ended(self, name: str, upload_id: str = "") -> None:
        assert not name


class WholePuts(Through):
    """Counts what did not become an object by the upload that a client filled."""

    whole_puts = 0

    async def put(self, *arguments: Any, filled: Any = None, **more: Any) -> ObjectInfo:
        put = await super().put(*arguments, filled=filled, **more)
        self.whole_puts += filled is None or not filled.used
        return put


class Writing:
    """Plays `node/engine/write/writes.py`: an object is a file under `data/`."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.fails: ForebayError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.through = WholePuts(NoNotes())  # type: ignore[arg-type]

    @asynccontextmanager
    async def entered(self, bucket: str, key: str) -> AsyncIterator[Any]:
        yield await self.place.get(bucket)

    def lock(self, bucket: str, key: str) -> Any:
        return asyncio.Lock()

    async def expected(self, served: Any, key: str, *conditions: str | None) -> str | None:
        if conditions == (None, None):
            return None
        return (await served.backend.head(key)).version if key in self.place.objects else ""

    @asynccontextmanager
    async def asking(self, bucket: Bucket, key: str) -> AsyncIterator[None]:
        yield

    async def drop(self, bucket: str, key: str) -> None:
        self.place.objects.pop(key, None)

    async def put_file(
        self, served: Any, key: str, path: str, size_bytes: int, sums: list[int], headers: Any, **more: Any
    ) -> Written:
        await self.gate.wait()
        data = Path(path).read_bytes()
        assert len(data) == size_bytes
        blocks = [data[at : at + limits.BLOCK_BYTES] for at in range(0, len(data), limits.BLOCK_BYTES)]
        assert sums == [xxhash.xxh3_64_intdigest(block) for block in blocks]
        if self.fails is not None:
            raise self.fails
        if more["if_none_match"] == "*" and key in self.place.objects:
            raise Precondition("it is there", code="PreconditionFailed")
        etag, version = more["etag"], "ours"
        if served.bucket.write == "through":
            info = await more["send"](None)
            etag, version = info.etag, info.version
        data_path = self.place.dir / "data" / key
        os.replace(path, data_path)
        self.place.objects[key] = SimpleNamespace(etag=etag, headers=dict(headers), path=str(data_path))
        return Written(etag, version, size_bytes, self.place.clock.now_s)


class Place:
    """A directory with a book of uploads; also plays the store, the names of temp files and the buckets."""

    def __init__(self, dir: Path, **settings: Any) -> None:
        self.dir = dir
        self.clock = Clock()
        self.backend: Any = MemoryBackend("uploads")
        self.homes = None  # the node is alone
        self.served = SimpleNamespace(backend=self.backend, bucket=Bucket("b", "memory://uploads", **settings), of=None)
        self.objects: dict[str, Any] = {}
        self.full = False
        self.strict = True
        self.temps = 0
        self.left: list[str] = []  # keys of uploads whose ids nobody heard
        self.heard: set[str] = set()
        self.boot_id = "boot-1"
        for name in ("data", "tmp", "parts"):
            (dir / name).mkdir()

    async def open(self) -> None:
        self.workers = ThreadPoolExecutor(4)
        self.meta = self.open_meta()
        self.writing = Writing(self)
        self.book = UploadBook(
            self.meta,
            self,  # type: ignore[arg-type]
            self,
            self,
            self.writing,
            self.clock,
            Seeded(1),
            self.workers,
            boot_id=self.boot_id,
        )
        await self.book.load()

    def open_meta(self) -> Any:
        return SqliteMeta(self.dir / "meta.db")

    async def close(self) -> None:
        await self.book.aclose(0.05)
        await self.meta.aclose()
        self.workers.shutdown()

    async def again(self, act: Callable[[], Awaitable[Any]]) -> Any:
        """Nobody else acts."""
        return await act()

    async def restart(self) -> None:
        """As after a kill -9: nothing is said goodbye to."""
        await self.close()
        await self.open()

    # what the engine's other parts would answer
    async def get(self, bucket: str) -> Any:
        if bucket != "b":
            raise NotFound("no bucket", code="NoSuchBucket")
        return self.served

    async def leave_uploads(self, served: Any, key: str) -> None:
        self.left.append(key)

    def volumes(self) -> list[VolumeAt]:
        return [VolumeAt("v1", str(self.dir))]

    def volume_of(self, bucket: str, key: str) -> str:
        return "v1"

    def free_to_write(self, bucket: str, key: str, size_bytes: int) -> None:
        if self.full:
            raise Unavailable("full", code="InsufficientStorage")

    def incoming(self, bucket: str, key: str) -> str:
        self.temps += 1
        return str(self.dir / "tmp" / f"in-{os.getpid()}-{self.temps}")

    def lookup(self, bucket: str, key: str) -> Any:
        return self.objects.get(key)

    def data_path(self, record: Any) -> str:
        return record.path

    # what clients do
    async def create(self, key: str = "k", **more: Any) -> UploadState:
        return await self.book.create(UploadCreateCall("b", key, **more))

    async def send(self, upload: UploadState, number: int, data: bytes, **more: Any) -> str:
        path, body = "", data
        if len(data) > limits.INLINE_BYTES_MAX:
            path, body = self.incoming("b", upload.key), None
            Path(path).write_bytes(data)
        md5 = hashlib.md5(data).hexdigest()
        call = UploadPartCall("b", upload.key, upload.upload_id, number, len(data), md5, path, body, **more)
        try:
            state = await self.book.part(call)
        finally:
            if self.strict:
                assert not path or not os.path.exists(path), "the temp file is gone, whatever happened"
        assert state.etag == md5
        return md5

    async def complete(self, upload: UploadState, *parts: tuple[int, str], **more: Any) -> UploadCompleted:
        asked = [(number, etag, {}) for number, etag in parts]
        return await self.book.complete(UploadCompleteCall("b", upload.key, upload.upload_id, asked, **more))

    async def abort(self, upload: UploadState) -> None:
        await self.book.abort(UploadNamed("b", upload.key, upload.upload_id))

    async def settled(self) -> None:
        """Wait for what goes on behind answers."""
        while self.book._tasks:
            await asyncio.wait(list(self.book._tasks))

    def content(self, key: str = "k") -> bytes:
        return Path(self.objects[key].path).read_bytes()

    def files(self) -> list[str]:
        """Every part and temp file on the disk."""
        return [str(path) for name in ("parts", "tmp") for path in (self.dir / name).rglob("*") if path.is_file()]


Story = Callable[[Place], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """`play(story, **bucket_settings)`: nothing may be left behind but what the story says with `leaves=`."""

    def run(story: Story, *, leaves: int = 0, **settings: Any) -> None:
        async def main() -> None:
            place = Place(tmp_path, **settings)
            await place.open()
            try:
                await story(place)
                await place.settled()
                assert len(place.files()) == leaves, place.files()
                assert not await place.backend.list_uploads(""), "an upload was left at the backend"
            finally:
                await place.close()

        asyncio.run(main())

    return run


def code(error: pytest.ExceptionInfo[ForebayError]) -> str:
    return error.value.code


# --- written back or local -------------------------------------------------------------------------------------------
def test_parts_become_one_object(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create(headers=(("content-type", "text/x"),), tags="a=b")
        three = await place.send(upload, 3, b"the end")
        one = await place.send(upload, 1, b"1" * (6 * MIB))
        two = await place.send(upload, 2, b"2" * (5 * MIB + 1))
        done = await place.complete(upload, (1, one), (2, two), (3, three))
        assert place.content() == b"1" * (6 * MIB) + b"2" * (5 * MIB + 1) + b"the end"
        assert done.written.etag == uploads.etag_of([one, two, three])
        assert place.objects["k"].headers == {"content-type": "text/x", "x-forebay-part-sizes": "6291456,5242881,7"}
        with pytest.raises(NotFound) as caught:
            await place.send(upload, 4, b"too late")
        assert code(caught) == "NoSuchUpload"

    play(story, write="local")


def test_a_part_sent_again_replaces_the_earlier(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        old = await place.send(upload, 1, b"old")
        new = await place.send(upload, 1, b"new")
        seen = await place.book.parts(UploadPartsCall("b", "k", upload.upload_id))
        assert [(part.number, part.etag, part.size_bytes) for part in seen.parts] == [(1, new, 3)]
        with pytest.raises(ForebayError) as caught:
            await place.complete(upload, (1, old))
        assert code(caught) == "InvalidPart"
        await place.complete(upload, (1, new))
        assert place.content() == b"new"

    play(story, write="local")


def test_many_parts_at_once_of_one_number_leave_one_whole(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        etags = await asyncio.gather(*(place.send(upload, 1, bytes([n]) * 100_000) for n in range(12)))
        seen = await place.book.parts(UploadPartsCall("b", "k", upload.upload_id))
        assert seen.parts[0].etag in etags
        assert len(place.files()) == 1
        await place.complete(upload, (1, seen.parts[0].etag))
        assert hashlib.md5(place.content()).hexdigest() == seen.parts[0].etag

    play(story, write="back")


def test_checksums_are_made_where_the_client_sent_none(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create(checksum_algorithm="CRC64NVME")
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        done = await place.complete(upload, (1, one), (2, two))
        whole = Checksum("CRC64NVME")
        whole.update(PART + b"end")
        assert done.checksums == {"CRC64NVME": whole.base64()}
        assert done.checksum_type == "FULL_OBJECT"
        headers = place.objects["k"].headers
        assert headers["x-amz-checksum-crc64nvme"] == whole.base64()
        assert headers["x-amz-checksum-type"] == "FULL_OBJECT"

    play(story, write="local")


def test_what_is_refused_leaves_the_upload_as_it_was(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        place.objects["k"] = SimpleNamespace(etag="else", path="", headers={})
        with pytest.raises(Precondition):
            await place.complete(upload, (1, one), (2, two), if_none_match="*")
        del place.objects["k"]
        place.writing.fails = Unavailable("the disk is full", code="InsufficientStorage")
        with pytest.raises(Unavailable):
            await place.complete(upload, (1, one), (2, two))
        place.writing.fails = None
        place.full = True
        with pytest.raises(Unavailable):
            await place.complete(upload, (1, one), (2, two))
        place.full = False
        assert len(place.files()) == 2
        done = await place.complete(upload, (1, one), (2, two), size_bytes=len(PART) + 3)
        assert place.content() == PART + b"end"
        assert done.written.size_bytes == len(PART) + 3

    play(story, write="local")


def test_a_complete_whose_answer_was_lost_may_be_asked_again(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one = await place.send(upload, 1, b"x")
        first = await place.complete(upload, (1, one))
        assert await place.complete(upload, (1, one)) == first
        await place.settled()
        await place.restart()
        assert await place.complete(upload, (1, one)) == first
        with pytest.raises(NotFound):
            await place.complete(upload, (1, one), (2, one))
        place.clock.now_s += DONE_KEPT_S + 1
        await place.book.sweep()
        with pytest.raises(NotFound):
            await place.complete(upload, (1, one))
        assert (await place.meta.range("upload/"))[0] == []

    play(story, write="local")


def test_of_two_completes_at_once_one_wins_and_a_part_comes_too_late(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"2")
        place.writing.gate.clear()
        first = asyncio.create_task(place.complete(upload, (1, one)))
        await until(place.book._open[upload.upload_id].closing.locked)
        second = asyncio.create_task(place.complete(upload, (1, one), (2, two)))
        late = asyncio.create_task(place.send(upload, 2, b"late"))
        stop = asyncio.create_task(place.abort(upload))
        await asyncio.sleep(0.01)
        place.writing.gate.set()
        outcomes = await asyncio.gather(first, second, late, stop, return_exceptions=True)
        assert isinstance(outcomes[0], UploadCompleted)
        assert [type(each) for each in outcomes[1:]] == [NotFound] * 3
        assert place.content() == PART

    play(story, write="local")


def test_a_complete_that_is_asked_again_meanwhile_is_done_once(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one = await place.send(upload, 1, b"1")
        writing, tries = place.writing, 0
        put_file = writing.put_file

        async def counted(*arguments: Any, **more: Any) -> Written:
            nonlocal tries
            tries += 1
            return await put_file(*arguments, **more)

        writing.put_file = counted  # type: ignore[method-assign]
        writing.fails = Unavailable("the backend does not answer")
        writing.gate.clear()
        asking = [asyncio.create_task(place.complete(upload, (1, one))) for _ in range(3)]
        await until(lambda: tries > 0)
        asking[0].cancel()
        writing.gate.set()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(each) for each in outcomes[1:]] == [Unavailable] * 2
        assert tries == 1, "who asks again waits, and does not try again"
        writing.fails = None
        await place.complete(upload, (1, one))
        assert (tries, place.content()) == (2, b"1")

    play(story, write="local")


# --- ending without an object ----------------------------------------------------------------------------------------
def test_an_aborted_upload_leaves_nothing(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        await place.send(upload, 1, PART)
        sending = [asyncio.create_task(place.send(upload, number, PART)) for number in range(2, 8)]
        await asyncio.sleep(0)
        await place.abort(upload)
        for outcome in await asyncio.gather(*sending, return_exceptions=True):
            assert isinstance(outcome, NotFound)
        with pytest.raises(NotFound):
            await place.abort(upload)
        assert (await place.meta.range("upload/"))[0] == []

    play(story, write="back")


def test_a_disk_without_room_for_a_part_keeps_nothing_of_it(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one = await place.send(upload, 1, b"first")

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "replace", full)
            with pytest.raises(Unavailable) as caught:
                await place.send(upload, 2, PART)
            assert code(caught) == "InsufficientStorage"
        assert len(place.files()) == 1
        await place.complete(upload, (1, one))

    play(story, write="local")


def test_old_uploads_are_aborted_and_strange_directories_removed(play: Any) -> None:
    async def story(place: Place) -> None:
        old = await place.create("old")
        await place.send(old, 1, b"x")
        place.clock.now_s += limits.UPLOAD_AGE_MAX_S - 10
        young = await place.create("young")
        await place.send(young, 1, b"y")
        stray = place.dir / "parts" / "nobody"
        stray.mkdir()
        (stray / "file").write_bytes(b"z")
        place.clock.now_s += 20
        await place.book.sweep()
        listed = await place.book.uploads(UploadsCall("b"))
        assert [upload.key for upload in listed.uploads] == ["young"]
        assert not stray.exists()

    play(story, write="local", leaves=1)


def test_a_bucket_that_goes_takes_its_uploads_with_it(play: Any) -> None:
    async def story(place: Place) -> None:
        for number in range(3):
            await place.send(await place.create(f"k{number}"), 1, b"x")
        done = await place.create("done")
        await place.complete(done, (1, await place.send(done, 1, b"x")))
        assert await place.book.abort_bucket("b") == 3
        assert (await place.book.uploads(UploadsCall("b"))).uploads == []
        await place.settled()
        assert (await place.meta.range("upload/"))[0] == []

    play(story, write="through")


def test_listings_come_in_pages(play: Any) -> None:
    async def story(place: Place) -> None:
        made = [await place.create(key) for key in ("b", "a", "a", "c/1")]
        names = sorted((upload.key, upload.upload_id) for upload in made)
        first = await place.book.uploads(UploadsCall("b", limit=3))
        last = first.uploads[-1]
        rest = await place.book.uploads(UploadsCall("b", after_key=last.key, after_id=last.upload_id))
        assert [(u.key, u.upload_id) for u in first.uploads + rest.uploads] == names
        assert (first.more, rest.more) == (True, False)
        for number in (5, 1, 3):
            await place.send(made[0], number, b"x")
        page = await place.book.parts(UploadPartsCall("b", "b", made[0].upload_id, after=1, limit=1))
        assert ([part.number for part in page.parts], page.more) == ([3], True)
        for upload in made:
            await place.abort(upload)

    play(story, write="local")


# --- after a stop ----------------------------------------------------------------------------------------------------
def test_parts_are_found_again(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create(checksum_algorithm="CRC32", checksum_type="FULL_OBJECT")
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        before = await place.book.parts(UploadPartsCall("b", "k", upload.upload_id))
        await place.restart()
        assert await place.book.parts(UploadPartsCall("b", "k", upload.upload_id)) == before
        new = await place.send(upload, 2, b"END")
        await place.restart()
        seen = await place.book.parts(UploadPartsCall("b", "k", upload.upload_id))
        assert [part.etag for part in seen.parts] == [one, new]
        with pytest.raises(ForebayError) as caught:
            await place.complete(upload, (1, one), (2, two))
        assert code(caught) == "InvalidPart"
        await place.abort(upload)

    play(story, write="back")


def test_a_stop_between_joining_and_committing_leaves_the_upload_open(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        place.writing.gate.clear()
        task = asyncio.create_task(place.complete(upload, (1, one), (2, two)))
        await until(lambda: any((place.dir / "tmp").iterdir()))
        # a kill: what is on the disk stays as it is, with the first part grown and a second name in tmp/
        await place.meta.aclose()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for each in list(place.book._tasks):
            each.cancel()
        await asyncio.gather(*place.book._tasks, return_exceptions=True)
        place.workers.shutdown()
        for left in (place.dir / "tmp").iterdir():
            left.unlink()  # the store does, at its start
        await place.open()
        await place.complete(upload, (1, one), (2, two))
        assert place.content() == PART + b"end"

    play(story, write="local")


def test_a_stop_after_committing_ends_the_upload(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        expected: list[Written] = []
        put_file = place.writing.put_file

        async def stop_after(*arguments: Any, **more: Any) -> Written:
            expected.append(await put_file(*arguments, **more))
            await asyncio.Event().wait()
            raise AssertionError

        place.writing.put_file = stop_after  # type: ignore[method-assign]
        task = asyncio.create_task(place.complete(upload, (1, one), (2, two)))
        await until(lambda: bool(expected))
        place.book._work = never_again  # type: ignore[method-assign]
        await place.restart()
        await asyncio.gather(task, return_exceptions=True)
        assert place.content() == PART + b"end"
        assert (await place.complete(upload, (1, one), (2, two))).written.etag == expected[0].etag
        assert (await place.book.uploads(UploadsCall("b"))).uploads == []

    play(story, write="local")


def test_an_upload_on_a_disk_that_is_out_says_so(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        await place.send(upload, 1, b"1")
        monkeypatch.setattr(place, "volumes", list)
        with pytest.raises(Unavailable, match="begin another") as caught:
            await place.send(upload, 2, b"2")
        assert code(caught) == "UploadNotHere"
        await place.abort(upload)
        monkeypatch.undo()
        await place.book.sweep()

    play(story, write="local")


async def never_again(*_: Any) -> Any:
    raise asyncio.CancelledError


def test_parts_that_were_not_synced_end_with_the_machine(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        await place.send(upload, 1, PART)
        await place.restart()
        assert (await place.book.uploads(UploadsCall("b"))).uploads, "a restart of the engine loses nothing"
        place.boot_id = "boot-2"
        await place.restart()
        assert (await place.book.uploads(UploadsCall("b"))).uploads == []
        await place.book.sweep()

    play(story, write="back", durability="memory")


# --- written through -------------------------------------------------------------------------------------------------
def test_through_the_backend_gets_each_part_as_it_arrives(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create(headers=(("content-type", "text/x"),))
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        (there,) = await place.backend.list_uploads("")
        assert [part.size_bytes for part in await place.backend.list_parts("k", there.upload_id)] == [len(PART), 3]
        done = await place.complete(upload, (1, one), (2, two))
        info = await place.backend.head("k")
        assert (done.written.etag, done.written.version) == (info.etag, info.version)
        assert info.headers == (("content-type", "text/x"),)
        assert place.content() == PART + b"end"
        assert place.writing.through.whole_puts == 0

    play(story, write="through")


def test_through_a_restart_asks_the_backend_for_its_parts(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        await place.restart()
        await place.complete(upload, (1, one), (2, two))
        assert (await place.backend.head("k")).size_bytes == len(PART) + 3
        assert place.writing.through.whole_puts == 0

    play(story, write="through")


def test_through_an_upload_that_the_backend_lost_is_put_whole(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one = await place.send(upload, 1, PART)
        (there,) = await place.backend.list_uploads("")
        await place.backend.abort_upload("k", there.upload_id)
        await place.complete(upload, (1, one))
        assert (await place.backend.head("k")).size_bytes == len(PART)
        assert place.writing.through.whole_puts == 1

    play(story, write="through")


def test_through_an_object_that_no_disk_takes_is_made_at_the_backend(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        one, two = await place.send(upload, 1, PART), await place.send(upload, 2, b"end")
        place.full = True
        done = await place.complete(upload, (1, one), (2, two), if_none_match="*")
        info = await place.backend.head("k")
        assert (done.written.etag, done.written.size_bytes) == (info.etag, len(PART) + 3)
        assert place.objects == {}, "and the node keeps nothing of it"

    play(story, write="through")


def test_through_a_backend_that_fails_costs_a_part_or_a_complete_and_no_more(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        put_part, complete = place.backend.put_part, place.backend.complete_upload

        async def down(*_: Any, **more: Any) -> Any:
            raise Unavailable("down")

        place.backend.put_part = place.backend.complete_upload = down
        with pytest.raises(Unavailable):
            await place.send(upload, 1, PART)
        assert place.files() == []
        place.backend.put_part = put_part
        one = await place.send(upload, 1, PART)
        with pytest.raises(Unavailable):
            await place.complete(upload, (1, one))
        assert len(place.files()) == 1
        place.backend.complete_upload = complete
        await place.complete(upload, (1, one))
        assert place.content() == PART

    play(story, write="through")


def test_through_a_refusal_after_a_lost_answer_is_no_proof(play: Any) -> None:
    """The upload became the object, whose ETag does not tell so, and the answer was lost. Who asks again gets it."""

    async def story(place: Place) -> None:
        upload = await place.create()
        parts = [(1, await place.send(upload, 1, PART)), (2, await place.send(upload, 2, b"end"))]
        complete = place.backend.complete_upload

        async def lost(*named: Any, **more: Any) -> Any:
            await complete(*named, **more)
            raise Unavailable("the answer was lost")

        place.backend.complete_upload = lost
        with pytest.raises(Unavailable):
            await place.complete(upload, *parts, if_none_match="*")
        place.writing.fails = Precondition("it is there", code="PreconditionFailed")
        ours = await place.backend.head("k")
        place.backend.place("k", PART + b"END")
        with pytest.raises(Unavailable, match="is not known"):
            await place.complete(upload, *parts, if_none_match="*")
        place.backend.place("k", PART + b"end")
        done = await place.complete(upload, *parts, if_none_match="*")
        assert (done.written.size_bytes, done.written.version) == (
            ours.size_bytes,
            (await place.backend.head("k")).version,
        )

    play(story, write="through")


def test_a_bucket_takes_no_more_uploads_than_it_may(play: Any) -> None:
    async def story(place: Place) -> None:
        place.book._names["b"] = [("k", str(number)) for number in range(limits.UPLOADS_MAX)]
        with pytest.raises(Busy) as caught:
            await place.create()
        assert code(caught) == "SlowDown"
        assert caught.value.retry_after_s > 0
        place.book._names.clear()

    play(story, write="local")


def test_an_upload_begun_there_but_not_heard_of_is_told_and_left(play: Any) -> None:
    async def story(place: Place) -> None:
        begin = place.backend.begin_upload

        async def lost(key: str, **more: Any) -> str:
            await begin(key, **more)
            raise Unavailable("the answer was lost")

        place.backend.begin_upload = lost
        with pytest.raises(Unavailable):
            await place.create()
        [left] = await place.backend.list_uploads("")
        assert place.left == ["k"]
        await place.backend.abort_upload("k", left.upload_id)  # by hand
        assert (await place.meta.range("upload/"))[0] == []

    play(story, write="through")


def test_what_a_backend_does_not_abort_now_it_aborts_later(play: Any) -> None:
    async def story(place: Place) -> None:
        upload = await place.create()
        await place.send(upload, 1, PART)
        abort = place.backend.abort_upload

        async def down(*_: Any) -> None:
            raise Unavailable("down")

        place.backend.abort_upload = down
        await place.abort(upload)
        assert len(await place.backend.list_uploads("")) == 1
        await place.restart()
        place.backend.abort_upload = abort
        await place.book.sweep()
        assert await place.backend.list_uploads("") == []
        assert (await place.meta.range("upload/"))[0] == []

    play(story, write="through")
