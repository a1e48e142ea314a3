"""What every backend promises, told once and run against all of them: memory, a directory, SeaweedFS (S3) without and
with keys, Azurite, fake-gcs-server and nginx."""

from __future__ import annotations

import asyncio
import os

import pytest

from forebay.backends.http.cloud import SEEN_KEPT_S
from forebay.backends.seam import Body
from forebay.backends.wrap.faulty import FaultPlan
from forebay.core.errors import (
    ForebayError,
    Invalid,
    NoBackendBucket,
    NotFound,
    NotSupported,
    Precondition,
    Unavailable,
)
from forebay.core.machines.retry import RetryPolicy
from forebay.core.types import RangeSpec
from forebay.ports import clock as system_clock
from tests.backends.backend_places import BUCKETED, KINDS, LISTED, Place, list_all, read, run, whole

on_every_backend = pytest.mark.parametrize("place", KINDS, indirect=True)
on_every_listing_backend = pytest.mark.parametrize("place", LISTED, indirect=True)
DATA = os.urandom(3_000_000)

# How each kind names the stored content type; a directory has none.
TELLS_CONTENT = {"memory", "coded", "s3", "s3-keys", "azure"}


@on_every_backend
def test_a_whole_object_comes_in_one_request_with_its_description(place: Place) -> None:
    place.put("dir/data.txt", DATA)

    async def story() -> None:
        backend = place.open()
        fetch = await backend.fetch("dir/data.txt")
        assert (fetch.start, fetch.end, fetch.info.size_bytes) == (0, len(DATA), len(DATA))
        assert fetch.info.key == "dir/data.txt"
        assert fetch.info.version
        assert '"' not in fetch.info.etag
        assert fetch.info.modified_s > 1_700_000_000
        pieces = [bytes(chunk) async for chunk in fetch]
        assert b"".join(pieces) == DATA
        assert len(pieces) > 1, "a body of 3 MB is streamed"
        assert await backend.head("dir/data.txt") == fetch.info
        if place.kind in TELLS_CONTENT:
            headers = dict(fetch.info.headers)
            assert headers["content-type"] == "text/plain"
            assert headers["cache-control"] == "max-age=5"
            assert headers["x-amz-meta-color"] == "red"
        assert place.counters.requests == {"fetch": 1, "head": 1}
        assert place.counters.read_bytes == len(DATA)
        await backend.aclose()

    run(story())


@on_every_backend
def test_every_form_of_range_gives_exactly_its_bytes(place: Place) -> None:
    place.put("data", DATA)
    size = len(DATA)
    forms = {
        RangeSpec(0, 0): (0, 1),
        RangeSpec(10, 19): (10, 20),
        RangeSpec(1_000_000, 2_500_000): (1_000_000, 2_500_001),
        RangeSpec(size - 5, size + 100): (size - 5, size),
        RangeSpec(size - 7, None): (size - 7, size),
        RangeSpec(0, None): (0, size),
        RangeSpec(None, 9): (size - 9, size),
        RangeSpec(None, size + 9): (0, size),
    }

    async def story() -> None:
        backend = place.open()
        for asked, (start, end) in forms.items():
            if place.kind == "gcs" and asked == RangeSpec(None, 9):
                continue  # this emulator cuts the answer to a suffix range short; Google does not
            fetch = await backend.fetch("data", asked)
            assert (fetch.start, fetch.end, fetch.info.size_bytes) == (start, end, size), asked
            assert b"".join([bytes(chunk) async for chunk in fetch]) == DATA[start:end], asked
        await backend.aclose()

    run(story())


@on_every_backend
def test_a_range_outside_the_object_is_refused(place: Place) -> None:
    place.put("ten", b"0123456789")
    place.put("empty", b"")
    outside = [RangeSpec(10, 20), RangeSpec(10, None), RangeSpec(5, 4), RangeSpec(None, 0)]

    async def story() -> None:
        backend = place.open()
        for asked in outside:
            with pytest.raises(Invalid) as refused:
                await read(backend, "ten", asked)
            assert refused.value.code == "InvalidRange", asked
        for asked in (RangeSpec(0, 5), RangeSpec(0, None), RangeSpec(None, 5)):
            with pytest.raises(Invalid) as refused:
                await read(backend, "empty", asked)
            assert refused.value.code == "InvalidRange", asked
        assert await read(backend, "empty") == b""
        assert await read(backend, "ten", RangeSpec(0, 5)) == b"012345", "one bad range does not spoil the next"
        await backend.aclose()

    run(story())


@on_every_backend
def test_only_the_version_asked_for_will_do(place: Place) -> None:
    place.put("data", b"old old old")

    async def story() -> None:
        backend = place.open()
        old = await backend.head("data")
        assert await read(backend, "data", RangeSpec(0, 2), version=old.version) == b"old"
        assert await backend.check("data", old.version) is None

        place.put("data", b"new and longer")
        new = await backend.check("data", old.version)
        assert new is not None
        assert new.version != old.version
        assert new.size_bytes == 14
        for asked in (None, RangeSpec(0, 2), RangeSpec(None, 20)):
            with pytest.raises(Precondition):
                await read(backend, "data", asked, version=old.version)
        assert await read(backend, "data", version=new.version) == b"new and longer"
        await backend.aclose()

    run(story())


@on_every_backend
def test_what_is_not_there_is_not_found(place: Place) -> None:
    place.put("folder/file", b"x")

    async def story() -> None:
        backend = place.open()
        for key in ("nothing", "folder/nothing", "folder/file/below"):
            for ask in (backend.fetch(key), backend.head(key), backend.check(key, '"v"')):
                with pytest.raises(NotFound) as missing:
                    await ask
                assert missing.value.code == "NoSuchKey"
                assert key in missing.value.message
        await backend.aclose()

    run(story())


class _HandClock:
    """Clocks that a test moves on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall_s(self) -> float:
        return system_clock.wall_s() + self.ahead_s

    def monotonic_s(self) -> float:
        return system_clock.monotonic_s() + self.ahead_s


@pytest.mark.parametrize("place", BUCKETED, indirect=True)
def test_a_bucket_that_is_gone_is_no_missing_object(place: Place) -> None:
    """A HEAD's 404 does not say of what, and a cached copy of the object must outlive its bucket's absence."""
    place.put("data", b"x")
    assert place.vanish is not None
    clock = _HandClock()

    async def story() -> None:
        backend = place.open(clock=clock)
        backend._policy = RetryPolicy(attempts_max=1)  # type: ignore[attr-defined]
        old = await backend.head("data")
        with pytest.raises(NotFound):
            await backend.head("nothing")
        place.vanish()
        # fake-gcs-server answers 500 about a bucket that it does not have
        kind = Unavailable if place.kind == "gcs" else NoBackendBucket
        with pytest.raises(kind):
            await backend.check("data", old.version)
        clock.ahead_s += SEEN_KEPT_S
        for ask in (backend.fetch("data"), backend.head("data"), backend.head("nothing"), backend.probe()):
            with pytest.raises(kind):
                await ask
        with pytest.raises(kind):
            await backend.list_page("", "", "", 10)
        await backend.aclose()

    run(story())


PECULIAR = [
    "a b", "a+b", "a%20b", "a%2Fb", "%", "é", "e\u0301", "日本/語", "😀", "a\\b", "a?b=c", "a#b", "a&b;c", "a*b", "a:b",
    "~x", "[x]{y}|^`", "quote'\"", "<tag>", "dots..", "...", ".hidden", " leading", "trailing ", "x" * 200, "a/.b/c..",
]  # fmt: skip


@on_every_backend
def test_peculiar_keys_name_their_own_object(place: Place) -> None:
    unfit = {"a\\b"} if place.kind in ("s3", "s3-keys", "azure") else set()  # these list it as 'a/b'
    keys = [key for key in PECULIAR if key not in unfit]
    for key in keys:
        place.put(key, b"content of " + key.encode())

    async def story() -> None:
        backend = place.open()
        for key in keys:
            assert await read(backend, key) == b"content of " + key.encode(), key
            assert (await backend.head(key)).key == key
        if place.kind != "http":
            listed, _ = await list_all(backend, limit=7)
            assert sorted(listed) == sorted(keys)
        await backend.aclose()

    run(story())


@on_every_backend
def test_a_key_is_never_taken_for_another_one(place: Place) -> None:
    """'a//b' is not 'a/b'. Each of these is read as itself or refused, whatever lies under the tidied name."""
    for key in ("a/b", "lead", "trail", "up", "x"):
        place.put(key, b"the tidy object")
    untidy = ["a//b", "//a/b", "/lead", "trail/", "x/../up", "./x", "a/./b", "../x", "..", ".", "x\x01", "x\n", "x\x7f"]

    async def story() -> None:
        backend = place.open()
        for key in untidy:
            if place.kind.startswith("s3") and ("//" in key or key.startswith("/")):
                continue  # SeaweedFS itself stores 'a//b' and '/lead' as 'a/b' and 'lead'; see test_wire.py
            for ask in (backend.fetch(key), backend.head(key)):
                try:
                    answer = await ask
                except (NotFound, Invalid):
                    continue
                pytest.fail(f"{key!r} was answered with {answer}")
        await backend.aclose()

    run(story())


@on_every_backend
def test_keys_that_no_backend_may_have_are_refused(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        for key, code in {"": "InvalidArgument", "x" * 1025: "KeyTooLongError", "é" * 513: "KeyTooLongError"}.items():
            with pytest.raises(Invalid) as refused:
                await backend.fetch(key)
            assert refused.value.code == code
        with pytest.raises(ForebayError):
            await backend.fetch("x" * 1024)  # allowed, but not there: each backend may say so in its way
        await backend.aclose()

    run(story())


KEYS = ["a.txt", "a/1", "a/2", "a/b/3", "a0", "b", "b-1/x", "c!/y", "c/y", "é/z", "z/1", "z/2", "😀"]


@on_every_listing_backend
def test_a_listing_has_every_key_once_in_byte_order(place: Place) -> None:
    for key in KEYS:
        place.put(key, key.encode())

    async def story() -> None:
        backend = place.open()
        page = await backend.list_page("", "", "", 1000)
        assert [entry.key for entry in page.entries] == sorted(KEYS)
        assert page.next_after == ""
        for entry in page.entries:
            info = await backend.head(entry.key)
            assert (entry.size_bytes, entry.etag) == (info.size_bytes, info.etag)
            assert abs(entry.modified_s - info.modified_s) < 1.0
        for limit in (1, 2, 5):
            keys, _ = await list_all(backend, limit=limit)
            assert len(keys) == len(KEYS)
            assert sorted(keys) == sorted(KEYS)
            if not place.kind.startswith("s3"):
                assert keys == sorted(KEYS), "SeaweedFS alone lists pages in its own order"
        await backend.aclose()

    run(story())


@on_every_listing_backend
def test_prefix_delimiter_and_position_cut_a_listing_as_s3_does(place: Place) -> None:
    for key in KEYS:
        place.put(key, key.encode())
    questions = [
        ("", "/", ""),
        ("a", "", ""),
        ("a", "/", ""),
        ("a/", "/", ""),
        ("a/b/", "/", ""),
        ("", "", "a/2"),
        ("", "/", "b"),
        ("a/", "", "a/1"),
        ("b", "-", ""),
        ("nothing", "/", ""),
        ("a//", "", ""),
        ("../", "", ""),
    ]

    async def story() -> None:
        backend = place.open()
        for prefix, delimiter, after in questions:
            if place.kind.startswith("s3") and delimiter == "-":
                continue  # SeaweedFS folds at '/' only
            if place.kind.startswith("s3") and after == "a/2":
                continue  # and 'a.txt' comes after 'a/2' in its order
            kept = [key for key in KEYS if key.startswith(prefix) and key > after]
            folded = {key: _folded(key, prefix, delimiter) for key in kept}
            for limit in (1000, 1):
                asked = (prefix, delimiter, after, limit)
                keys, prefixes = await list_all(backend, prefix, delimiter, after, limit)
                assert sorted(keys) == sorted(key for key, fold in folded.items() if not fold), asked
                assert sorted(prefixes) == sorted({fold for fold in folded.values() if fold}), asked
        await backend.aclose()

    run(story())


def _folded(key: str, prefix: str, delimiter: str) -> str:
    rest = key[len(prefix) :]
    return prefix + rest.split(delimiter)[0] + delimiter if delimiter and delimiter in rest else ""


@on_every_listing_backend
def test_a_key_that_others_lie_below_hides_none_of_them(place: Place) -> None:
    if place.kind == "file":
        return  # where no file can have the name of a directory
    keys = ["a", "foo", "foo/1", "foo/1/x", "foo/2", "foo/3", "g/1", "zoo", "zoo/1"]
    for key in keys:
        place.put(key, b"")

    async def story() -> None:
        backend = place.open()
        for limit in (1, 2, 3, 1000):
            assert await list_all(backend, limit=limit) == (keys, [])
            found, prefixes = await list_all(backend, delimiter="/", limit=limit)
            assert (found, prefixes) == (["a", "foo", "zoo"], ["foo/", "g/", "zoo/"]), limit
            assert await list_all(backend, prefix="foo", limit=limit) == (keys[1:6], [])
            assert await list_all(backend, prefix="foo", delimiter="/", limit=limit) == (["foo"], ["foo/"])
            assert await list_all(backend, prefix="foo/", delimiter="/", limit=limit) == (
                ["foo/1", "foo/2", "foo/3"],
                ["foo/1/"],
            )
        assert await list_all(backend, after="foo") == (keys[2:], [])
        assert await list_all(backend, after="foo", delimiter="/") == (["zoo"], ["foo/", "g/", "zoo/"])
        assert await list_all(backend, prefix="foo/", after="foo") == (keys[2:6], [])
        await backend.aclose()

    run(story())


@on_every_listing_backend
def test_a_large_folder_costs_a_listing_by_delimiter_no_more_than_a_small_one(place: Place) -> None:
    for number in range(300):
        place.put(f"big/{number:04}", b"")
    place.put("after", b"")
    place.put("zebra/1", b"")

    async def story() -> None:
        backend = place.open()
        keys, prefixes = await list_all(backend, delimiter="/", limit=2)
        assert (keys, prefixes) == (["after"], ["big/", "zebra/"])
        assert place.counters.requests["list"] <= 3
        await backend.aclose()

    run(story())


@on_every_backend
def test_a_prefix_in_the_url_is_the_whole_world(place: Place) -> None:
    for key in ("data/train/1", "data/train/2", "data/other", "data/trainer/3"):
        place.put(key, key.encode())

    async def story() -> None:
        backend = place.open("data/train")
        assert await read(backend, "1") == b"data/train/1"
        assert (await backend.head("2")).key == "2"
        for outside in ("../other", "other", "data/train/1"):
            with pytest.raises((NotFound, Invalid)):
                await backend.fetch(outside)
        if place.kind == "http":
            return
        assert await list_all(backend, limit=1) == (["1", "2"], [])
        assert await list_all(backend, after="1") == (["2"], [])
        await backend.aclose()

    if place.kind not in ("memory", "coded"):
        run(story())


@on_every_backend
def test_a_probe_says_whether_the_bucket_answers(place: Place) -> None:
    async def story() -> None:
        place.put("x", b"")
        backend = place.open()
        await backend.probe()
        await backend.aclose()

    run(story())


@pytest.mark.parametrize("place", [KINDS[-1]], indirect=True)
def test_a_web_server_says_that_it_cannot_be_listed(place: Place) -> None:
    async def story() -> None:
        backend = place.open()
        with pytest.raises(NotSupported, match="cannot be listed"):
            await backend.list_page("", "", "", 10)
        assert backend.read_only
        await backend.aclose()

    run(story())


@on_every_backend
def test_closing_a_body_early_frees_it_and_harms_nothing(place: Place) -> None:
    place.put("data", DATA)

    async def story() -> None:
        backend = place.open()
        for _ in range(20):
            fetch = await backend.fetch("data")
            first = await fetch.__aiter__().__anext__()
            assert bytes(first) == DATA[: len(first)]
            await fetch.aclose()
            await fetch.aclose()
        assert await read(backend, "data") == DATA
        await backend.aclose()

    before = len(os.listdir("/proc/self/fd"))
    run(story())
    assert len(os.listdir("/proc/self/fd")) <= before + 25, "connections may stay pooled, but not one per body"


@on_every_backend
def test_who_still_holds_a_backend_that_was_closed_goes_on_with_it(place: Place) -> None:
    """A bucket's settings may change while a job lists it, a client writes to it, and a body is under way."""
    place.put("data", DATA)

    async def story() -> None:
        backend = place.open()
        opened, by_wire = await backend.fetch("data"), await backend.fetch("data")
        first = bytes(await by_wire.__aiter__().__anext__())
        arrived = asyncio.Event()

        async def ready(_: int) -> None:
            await arrived.wait()

        writing = asyncio.create_task(backend.put("new", Body(4, b"some", ready=ready)))
        await asyncio.sleep(0)
        await backend.aclose()
        arrived.set()
        if not backend.read_only:
            assert (await writing).size_bytes == 4
        else:
            with pytest.raises(NotSupported):
                await writing
        assert await whole(opened) == DATA
        assert first + b"".join([bytes(chunk) async for chunk in by_wire]) == DATA
        assert (await backend.head("data")).size_bytes == len(DATA)
        if place.kind in LISTED:
            assert (await backend.list_page("da", "", "", 10)).entries[0].key == "data"

    run(story())


@on_every_backend
def test_a_backend_with_passing_faults_reads_as_one_without(place: Place) -> None:
    place.put("data", DATA)

    async def story() -> None:
        plan = FaultPlan(seed=7, error_rate=0.1, reset_rate=0.2, truncate_rate=0.2)
        backend = place.open(faults=plan)
        for first in range(0, len(DATA), 500_000):
            asked = RangeSpec(first, first + 499_999)
            assert await read(backend, "data", asked) == DATA[first : first + 500_000]
        assert place.counters.retries > 0
        await backend.aclose()

    run(story())
