"""What every backend promises of writing, told once and run against all that can be written to: memory, a directory,
SeaweedFS (S3) without and with keys, Azurite and fake-gcs-server."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from forebay.backends.seam import Backend, Body, PartSeen
from forebay.backends.stack import open_backend
from forebay.backends.wrap.faulty import FaultPlan
from forebay.core import limits
from forebay.core.errors import Closed, Corrupt, Denied, Invalid, NotFound, NotSupported, Precondition
from forebay.core.types import LOCAL_URL, Bucket, Headers, RangeSpec
from tests.backends.backend_places import (
    COPIED,
    COPIED_KINDS,
    KINDS,
    REAL,
    UPLOADED,
    WRITTEN,
    Place,
    list_all,
    read,
    run,
)

on_every_written_backend = pytest.mark.parametrize("place", WRITTEN, indirect=True)
on_every_uploading_backend = pytest.mark.parametrize("place", UPLOADED, indirect=True)
DATA = os.urandom(5_000_000)
HEADERS: Headers = (
    ("content-type", "text/plain"),
    ("content-encoding", "x-packed"),
    ("content-language", "de"),
    ("content-disposition", "attachment; filename=a.txt"),
    ("cache-control", "max-age=5"),
    ("x-amz-meta-color", "red"),
)


@pytest.fixture
def aside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is not the bucket under test."""
    return tmp_path_factory.mktemp("aside")


def some(data: bytes) -> Body:
    return Body(len(data), data)


async def is_absent(backend: Backend, key: str) -> bool:
    try:
        await backend.head(key)
    except NotFound:
        return True
    return False


class Growing:
    """A file whose bytes arrive when the test says so; whoever sends it waits for them."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.there = path, data, 0
        self.path.write_bytes(b"")
        self.more = asyncio.Condition()
        self.waited_for = asyncio.Event()
        self.failure: Exception | None = None

    def body(self) -> Body:
        return Body(len(self.data), path=str(self.path), ready=self._ready)

    async def _ready(self, upto: int) -> None:
        async with self.more:
            while self.there < upto:
                self.waited_for.set()
                if self.failure is not None:
                    raise self.failure
                await self.more.wait()

    async def grow(self, upto: int) -> None:
        async with self.more:
            with self.path.open("ab") as file:
                file.write(self.data[self.there : upto])
            self.there = upto
            self.more.notify_all()

    async def fail(self, failure: Exception) -> None:
        async with self.more:
            self.failure = failure
            self.more.notify_all()


# --- puts ------------------------------------------------------------------------------------------------------------
@on_every_written_backend
def test_what_was_put_is_there_as_it_was_put(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        put = await backend.put("dir/small", some(b"hello"), headers=HEADERS)
        found = await backend.head("dir/small")
        assert (found.version, found.etag, found.size_bytes) == (put.version, put.etag, 5)
        assert put.key == "dir/small"
        assert abs(put.modified_s - found.modified_s) <= 2
        assert set(put.headers) == set(found.headers) == set(HEADERS)
        assert await backend.check("dir/small", put.version) is None
        assert await read(backend, "dir/small", version=put.version) == b"hello"
        (entry,) = (await backend.list_page("", "", "", 10)).entries
        assert (entry.key, entry.etag) == ("dir/small", put.etag)
        await backend.put("empty", some(b""))
        assert await read(backend, "empty") == b""
        assert place.counters.requests["put"] == 2
        assert place.counters.written_bytes == 5
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_a_piece_of_a_file_is_sent_whole_and_replaces_what_was_there(place: Place, aside: Path) -> None:
    source = aside / "source"
    source.write_bytes(b"before" + DATA + b"after")

    async def story() -> None:
        backend = place.open()
        old = await backend.put("data", some(b"old"))
        for md5 in ("", hashlib.md5(DATA).hexdigest()):
            put = await backend.put("data", Body(len(DATA), path=str(source), offset=6, md5=md5))
            assert put.version != old.version
            assert await read(backend, "data", version=put.version) == DATA
        with pytest.raises(Precondition):
            await read(backend, "data", version=old.version)
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_bytes_that_do_not_match_their_md5_are_refused_and_never_seen(place: Place, aside: Path) -> None:
    source = aside / "source"
    source.write_bytes(DATA)
    wrong = hashlib.md5(b"others").hexdigest()

    async def story() -> None:
        backend = place.bare()
        await backend.put("data", some(b"old"))
        # fake-gcs-server does not compare them; Google does.
        bodies = [some(DATA[:100])._replace(md5=wrong), Body(len(DATA), path=str(source), md5=wrong)]
        for body in bodies if place.kind != "gcs" else []:
            with pytest.raises(Corrupt):
                await backend.put("data", body)
        assert await read(backend, "data") == b"old"
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_a_body_that_still_grows_is_sent_as_it_grows(place: Place, aside: Path) -> None:
    async def story() -> None:
        growing = Growing(aside / "growing", DATA)
        backend = place.open()
        putting = asyncio.create_task(backend.put("data", growing.body(), headers=HEADERS))
        for upto in (1, 1_500_000, 1_500_001, len(DATA)):
            await growing.waited_for.wait()
            assert await is_absent(backend, "data")
            growing.waited_for.clear()
            await growing.grow(upto)
        put = await putting
        assert await read(backend, "data", version=put.version) == DATA
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_a_body_whose_bytes_never_come_leaves_what_was_there(place: Place, aside: Path) -> None:
    async def story() -> None:
        backend = place.open()
        old = await backend.put("data", some(b"old"))
        for key in ("data", "fresh"):
            growing = Growing(aside / "growing", DATA)
            putting = asyncio.create_task(backend.put(key, growing.body()))
            await growing.waited_for.wait()
            await growing.grow(2_000_000)
            await growing.fail(Closed("the client hung up: send it again"))
            with pytest.raises(Closed, match="hung up"):
                await putting
        assert place.counters.retries == 0, "nothing brings these bytes back"
        assert await read(backend, "data", version=old.version) == b"old"
        assert await is_absent(backend, "fresh")
        assert await list_all(backend) == (["data"], [])
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_a_put_that_is_cancelled_leaves_nothing_and_harms_nothing(place: Place, aside: Path) -> None:
    async def story() -> None:
        backend = place.open()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            growing = Growing(aside / "growing", DATA)
            putting = asyncio.create_task(backend.put("data", growing.body()))
            await growing.grow(2_000_000)
            await growing.waited_for.wait()
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
        assert await is_absent(backend, "data")
        assert len(os.listdir("/proc/self/fd")) <= before + 4
        put = await backend.put("data", some(b"whole"))
        assert await read(backend, "data", version=put.version) == b"whole"
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_puts_side_by_side_do_not_mix(place: Place, aside: Path) -> None:
    (aside / "source").write_bytes(DATA)

    async def story() -> None:
        backend = place.open()
        bodies = [Body(1_100_000 + n, path=str(aside / "source"), offset=n) for n in range(12)]
        await asyncio.gather(*[backend.put(f"{n}", body) for n, body in enumerate(bodies)])
        for n, body in enumerate(bodies):
            assert await read(backend, f"{n}") == DATA[n : n + body.size_bytes]
        await backend.aclose()

    run(story())


# --- conditions ------------------------------------------------------------------------------------------------------
@on_every_written_backend
def test_a_condition_on_what_is_there_holds_or_nothing_changes(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        first = await backend.put("data", some(b"first"), expect="")
        with pytest.raises(Precondition, match="exists already"):
            await backend.put("data", some(b"never"), expect="")
        second = await backend.put("data", some(b"second"), expect=first.version)
        with pytest.raises(Precondition):
            await backend.put("data", some(b"never"), expect=first.version)
        with pytest.raises(Precondition):
            await backend.put("absent", some(b"never"), expect=first.version)
        assert await is_absent(backend, "absent")
        assert await read(backend, "data", version=second.version) == b"second"

        place.put("data", b"somebody else's")
        with pytest.raises(Precondition):
            await backend.put("data", some(b"never"), expect=second.version)
        assert await read(backend, "data") == b"somebody else's"
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_of_many_that_expect_nothing_one_wins(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        puts = [backend.put("data", some(b"%d" % n), expect="") for n in range(8)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        won = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
        assert all(isinstance(result, Precondition) for n, result in enumerate(results) if n not in won)
        assert len(won) == 1
        assert await read(backend, "data") == b"%d" % won[0]
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_a_delete_removes_and_is_content_with_nothing(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        put = await backend.put("dir/data", some(b"old"))
        with pytest.raises(Invalid):
            await backend.delete("dir/data", expect="")
        if place.kind != "gcs":  # this emulator ignores conditions on deletes; Google does not
            place.put("dir/data", b"somebody else's")
            with pytest.raises(Precondition):
                await backend.delete("dir/data", expect=put.version)
            assert await read(backend, "dir/data") == b"somebody else's"
        now = await backend.head("dir/data")
        await backend.delete("dir/data", expect=now.version)
        assert await is_absent(backend, "dir/data")
        await backend.delete("dir/data")
        await backend.delete("dir/data/below")
        with pytest.raises(Precondition):
            await backend.delete("dir/data", expect=now.version)
        assert await list_all(backend) == ([], [])
        if not place.kind.startswith("s3"):  # SeaweedFS keeps the folder and lists it
            assert await list_all(backend, delimiter="/") == ([], [])
        await backend.aclose()

    run(story())


# --- copies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", COPIED, indirect=True)
def test_a_copy_is_the_same_bytes_and_headers_under_another_key(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        source = await backend.put("a b/source", some(DATA), headers=HEADERS)
        copied = await backend.copy("a b/source", "c/d", source_version=source.version)
        assert (copied.key, copied.size_bytes) == ("c/d", len(DATA))
        assert set((await backend.head("c/d")).headers) == set(HEADERS)
        assert await read(backend, "c/d", version=copied.version) == DATA
        with pytest.raises(NotFound):
            await backend.copy("nothing", "c/e")
        if place.kind != "azure":
            new: Headers = (("content-type", "text/html"), ("x-amz-meta-shape", "round"))
            try:
                await backend.copy("a b/source", "c/d", headers=new)
            except NotSupported:
                raise AssertionError("only Azure cannot") from None
            kept = (await backend.head("c/d")).headers
            assert set(new) <= set(kept)
            assert ("x-amz-meta-color", "red") not in kept
        else:
            with pytest.raises(NotSupported, match="read the source"):
                await backend.copy("a b/source", "c/d", headers=())
        await backend.put("a b/source", some(b"another"))
        with pytest.raises(Precondition):
            await backend.copy("a b/source", "c/f", source_version=source.version)
        assert await is_absent(backend, "c/f")
        await backend.aclose()

    run(story())


# --- uploads ---------------------------------------------------------------------------------------------------------
@on_every_uploading_backend
def test_an_upload_takes_parts_in_any_order_and_replaces_them(place: Place, aside: Path) -> None:
    first, second, last = os.urandom(limits.PART_BYTES_MIN), os.urandom(limits.PART_BYTES_MIN + 7), b"the end"
    (aside / "first").write_bytes(first)

    async def story() -> None:
        backend = place.open()
        upload = await backend.begin_upload("dir/data", headers=HEADERS)
        assert await backend.list_parts("dir/data", upload) == []
        sent = {
            10_000: await backend.put_part("dir/data", upload, 10_000, some(last)),
            2: await backend.put_part("dir/data", upload, 2, some(b"replaced below")),
            1: await backend.put_part("dir/data", upload, 1, Body(len(first), path=str(aside / "first"))),
        }
        sent[2] = await backend.put_part("dir/data", upload, 2, some(second))
        held = [PartSeen(1, sent[1], len(first)), PartSeen(10_000, sent[10_000], len(last))]
        if place.kind != "s3-keys":  # SeaweedFS lists what was replaced too: then it is left out
            held.insert(1, PartSeen(2, sent[2], len(second)))
        assert await backend.list_parts("dir/data", upload) == held
        assert await is_absent(backend, "dir/data")
        done = await backend.complete_upload("dir/data", upload, sorted(sent.items()))
        assert done.size_bytes == len(first) + len(second) + len(last)
        assert set((await backend.head("dir/data")).headers) == set(HEADERS)
        assert await read(backend, "dir/data", version=done.version) == first + second + last
        await backend.aclose()

    run(story())


@on_every_uploading_backend
def test_an_upload_that_is_aborted_or_done_is_gone(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        uploads = {key: await backend.begin_upload(key) for key in ("a/1", "a/2", "b")}
        parts = {key: [(1, await backend.put_part(key, upload, 1, some(b"x")))] for key, upload in uploads.items()}
        has_list = place.kind != "azure"  # which knows blocks, not uploads
        if has_list:
            seen = await backend.list_uploads("a/")
            assert {(item.key, item.upload_id) for item in seen} == {(key, uploads[key]) for key in ("a/1", "a/2")}
            assert all(item.started_s > 1_700_000_000 for item in seen)
        await backend.abort_upload("a/1", uploads["a/1"])
        await backend.abort_upload("a/1", uploads["a/1"])
        await backend.complete_upload("a/2", uploads["a/2"], parts["a/2"])
        assert await read(backend, "a/2") == b"x"
        assert await is_absent(backend, "a/1")
        if has_list:
            assert await backend.list_uploads("a/") == []
            for key in ("a/1", "a/2"):
                for ask in (
                    backend.put_part(key, uploads[key], 2, some(b"y")),
                    backend.list_parts(key, uploads[key]),
                ):
                    with pytest.raises(NotFound) as missing:
                        await ask
                    assert missing.value.code == "NoSuchUpload"
            with pytest.raises(NotFound):
                await backend.complete_upload("a/1", uploads["a/1"], parts["a/1"])
        for number in (0, 10_001):
            with pytest.raises(Invalid):
                await backend.put_part("b", uploads["b"], number, some(b"y"))
        await backend.aclose()

    run(story())


@pytest.mark.real
@pytest.mark.parametrize("place", ["azure"], indirect=True)
def test_a_completion_that_is_made_again_is_no_conflict_with_itself(place: Place) -> None:
    """Its answer was lost: the second attempt meets what the first has made."""

    async def story() -> None:
        backend = place.open()
        upload = await backend.begin_upload("data", headers=HEADERS)
        parts = [(1, await backend.put_part("data", upload, 1, some(b"ours")))]
        done = await backend.complete_upload("data", upload, parts, expect="")
        again = await backend.complete_upload("data", upload, parts, expect="")
        assert (again.version, again.size_bytes) == (done.version, 4)
        other = await backend.begin_upload("data")
        same = [(1, await backend.put_part("data", other, 1, some(b"ours, too")))]
        with pytest.raises(Precondition):
            await backend.complete_upload("data", other, same, expect="")
        await backend.put("data", some(b"a stranger's"))
        with pytest.raises((Precondition, NotFound)):
            await backend.complete_upload("data", upload, parts, expect="")
        assert await read(backend, "data") == b"a stranger's"
        await backend.aclose()

    run(story())


@on_every_uploading_backend
def test_a_completion_has_conditions_too(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        old = await backend.put("data", some(b"old"))
        upload = await backend.begin_upload("data")
        parts = [(1, await backend.put_part("data", upload, 1, some(b"new")))]
        for expect in ("", '"0x1234567890"'):
            with pytest.raises(Precondition):
                await backend.complete_upload("data", upload, parts, expect=expect)
        assert await read(backend, "data", version=old.version) == b"old"
        done = await backend.complete_upload("data", upload, parts, expect=old.version)
        assert await read(backend, "data", version=done.version) == b"new"
        await backend.aclose()

    run(story())


# --- faults ----------------------------------------------------------------------------------------------------------
@on_every_written_backend
def test_lost_answers_resets_and_refusals_that_pass_are_not_noticed(place: Place, aside: Path) -> None:
    source = aside / "source"
    source.write_bytes(DATA)

    async def story() -> None:
        plan = FaultPlan(seed=11, error_rate=0.1, busy_rate=0.05, reset_rate=0.15, lost_rate=0.15)
        backend = place.open(faults=plan)
        version = ""
        for turn in range(5):
            body = Body(1_200_000 + turn, path=str(source), offset=turn)
            put = await backend.put("data", body, expect=version)
            assert await read(backend, "data", version=put.version) == DATA[turn : turn + body.size_bytes]
            if place.kind in COPIED_KINDS:
                await backend.copy("data", f"copy-{turn}", source_version=put.version)
            version = put.version
        await backend.delete("data", expect=version)
        assert await is_absent(backend, "data")
        if backend.part_bytes_min and place.kind != "gcs":
            upload = await backend.begin_upload("data")
            await backend.list_parts("data", upload)
            parts = [(n, await backend.put_part("data", upload, n, Body(100 + n, DATA[: 100 + n]))) for n in (1, 2)]
            assert len(parts) == 2
            await backend.abort_upload("data", upload)
        assert place.counters.retries > 2
        await backend.aclose()

    run(story())


@pytest.mark.parametrize("place", COPIED, indirect=True)
def test_a_prefix_in_the_url_holds_for_writes_too(place: Place, tmp_path: Path) -> None:
    if place.kind == "file":
        (tmp_path / "data/train").mkdir(parents=True)

    async def story() -> None:
        backend = place.open("data/train")
        whole = place.open()
        put = await backend.put("1", some(b"one"))
        assert put.key == "1"
        await backend.copy("1", "2")
        assert await read(whole, "data/train/2") == b"one"
        await backend.delete("1")
        assert await list_all(whole) == (["data/train/2"], [])
        if backend.part_bytes_min and place.kind != "gcs":
            upload = await backend.begin_upload("3")
            if place.kind != "azure":
                assert [item.key for item in await backend.list_uploads("")] == ["3"]
            token = await backend.put_part("3", upload, 1, some(b"three"))
            assert (await backend.complete_upload("3", upload, [(1, token)])).key == "3"
            assert await read(whole, "data/train/3") == b"three"
        await whole.aclose()
        await backend.aclose()

    if place.kind != "memory":
        run(story())


# --- what cannot be written ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", [KINDS[-1]], indirect=True)
def test_a_web_server_says_that_it_cannot_be_written(place: Place) -> None:
    place.put("data", b"x")

    async def story() -> None:
        backend = place.open()
        assert (backend.read_only, backend.part_bytes_min) == (True, 0)
        for call in (
            backend.put("data", some(b"y")),
            backend.delete("data"),
            backend.copy("data", "other"),
            backend.begin_upload("data"),
            backend.put_part("data", "1", 1, some(b"y")),
            backend.complete_upload("data", "1", []),
            backend.abort_upload("data", "1"),
            backend.list_parts("data", "1"),
            backend.list_uploads(""),
        ):
            with pytest.raises(NotSupported, match="give the bucket a backend"):
                await call
        await backend.aclose()

    run(story())


@on_every_written_backend
def test_metadata_beyond_ascii_comes_back(place: Place) -> None:
    stored: Headers = (("content-type", "text/plain"), ("x-amz-meta-a", "two  spaces, ünïcode"))

    async def story() -> None:
        backend = place.open()
        put = await backend.put("data", some(b"hello"), headers=stored)
        assert stored[1] in put.headers
        for asked in (None, RangeSpec(0, 4)):
            fetch = await backend.fetch("data", asked, version=put.version)
            assert dict(fetch.info.headers)["x-amz-meta-a"].split() == stored[1][1].split()
            assert b"".join([bytes(chunk) async for chunk in fetch]) == b"hello"
        assert (await backend.head("data")).version == put.version
        assert await backend.check("data", put.version) is None
        await backend.aclose()

    if place.kind != "azure":  # it takes ASCII only
        run(story())


@pytest.mark.parametrize("place", [REAL[1]], indirect=True)
def test_an_identity_that_may_not_write_is_denied(place: Place) -> None:
    async def story() -> None:
        place.options["secret_access_key"] = "wrong"
        backend = place.open()
        for call in (backend.put("data", some(b"y")), backend.delete("data"), backend.begin_upload("data")):
            with pytest.raises(Denied):
                await call
        await backend.aclose()

    run(story())


def test_a_bucket_without_a_backend_is_empty_and_takes_nothing() -> None:
    async def story() -> None:
        backend = open_backend(Bucket("here", LOCAL_URL, write="local"))
        assert (backend.scheme, backend.read_only, backend.part_bytes_min) == ("local", False, 0)
        for ask in (backend.fetch("a"), backend.head("a"), backend.check("a", "1")):
            with pytest.raises(NotFound) as missing:
                await ask
            assert missing.value.code == "NoSuchKey"
        assert await list_all(backend) == ([], [])
        assert await backend.list_uploads("") == []
        await backend.probe()
        for call in (backend.put("a", some(b"y")), backend.delete("a"), backend.copy("a", "b")):
            with pytest.raises(NotSupported, match="give it the URL of a backend"):
                await call
        await backend.aclose()
        with pytest.raises(Invalid, match="just local://"):
            open_backend(Bucket("here", "local://somewhere"))

    run(story())
