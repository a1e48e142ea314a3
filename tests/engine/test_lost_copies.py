"""A disk fails, or comes back, at the worst moment for what two nodes keep of each other's."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.cluster.records import Map
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.messages.calls import DeleteCall, PutCall
from forebay.core.messages.copied import CompareSome, Copied, KeepCopy, copies_of
from forebay.core.types import LOCAL_URL, Bucket
from forebay.node.engine import replicas as replicas_module
from forebay.node.engine.kept import KeptCopies
from forebay.node.store.disk.notes import Note, digest_of
from tests.patience import until_async

from .conftest import Rig
from .conftest import rig as rigged_at
from .test_replicas import beside_another
from .writing import AWAY

Rigged = Callable[..., None]
OWN = Bucket("own", LOCAL_URL, write="local", copies=2)
KEYS = [f"key-{number:02}" for number in range(32)]


@pytest.fixture
def two_disks(tmp_path: Path) -> tuple[str, str]:
    return str(tmp_path / "disk-a"), str(tmp_path / "disk-b")


def fail(rig: Rig, volume_id: str) -> None:
    rig.engine.store._by_id[volume_id].trouble(OSError(errno.EIO, "it errs"), "reading")
    rig.engine.store.housekeep()


@pytest.mark.parametrize("bucket", [OWN, Bucket("remote", "memory://remote", write="back", copies=2)])
def test_a_write_under_way_takes_nothing_along_when_its_disk_fails(
    rigged: Rigged, two_disks: tuple[str, str], bucket: Bucket
) -> None:
    """What was acknowledged is on the disk; the other node has what was to replace it, and that is all there is."""

    async def story(rig: Rig) -> None:
        _, other = beside_another(rig)
        rig.remote.down = AWAY
        await rig.engine.buckets.put(bucket)
        await rig.engine.writes.put(PutCall(bucket.name, "key", 5, body=b"acked"))
        disk, real = rig.engine.store.volume_of(bucket.name, "key"), other.keep_copy

        async def keep(*arguments: Any, **more: Any) -> None:
            await real(*arguments, **more)
            if disk in rig.engine.store._by_id:
                fail(rig, disk)

        other.keep_copy = keep
        with pytest.raises(ForebayError):
            await rig.engine.writes.put(PutCall(bucket.name, "key", 5, body=b"newer"))
        assert other.kept["key"][1] == b"newer"

    rigged(story, volumes=two_disks)


def test_a_list_that_is_made_while_a_disk_fails_is_not_a_whole_one(
    rigged: Rigged, two_disks: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas_module, "LISTED_MAX", 4)
    asked: list[tuple[bool, set[str]]] = []

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig, covered=1)
        await rig.engine.buckets.put(OWN)
        for key in KEYS:
            await rig.engine.writes.put(PutCall("own", key, 5, body=b"acked"))
        disk = rig.engine.store.usable()[0].id
        real = other.compare_copies

        async def compare(home: Any, call: Any) -> list[str]:
            within = {key for key in KEYS if key > call.after and (not call.upto or key <= call.upto)}
            asked.append((isinstance(call, CompareSome), within - {key for key, _ in call.listed}))
            if len(asked) == 1:
                fail(rig, disk)
                await until_async(lambda: len(rig.engine.index.scan("own", "", "", len(KEYS))) < len(KEYS))
            return await real(home, call)

        other.compare_copies = compare
        await replicas._tend_once()

    rigged(story, volumes=two_disks)
    assert asked[0] == (False, set())
    assert any(lacking for _, lacking in asked), "keys of the disk are not listed any more"
    assert all(is_partly for is_partly, lacking in asked if lacking)


def test_what_cannot_be_sent_does_not_count_as_kept(rigged: Rigged, two_disks: tuple[str, str]) -> None:
    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(OWN)
        for key in KEYS:
            await rig.engine.writes.put(PutCall("own", key, 5, body=b"acked"))
        other.kept.clear()
        disk, real = rig.engine.store.usable()[0].id, other.compare_copies

        async def compare(home: Any, call: Any) -> list[str]:
            missing = await real(home, call)
            fail(rig, disk)
            return missing

        other.compare_copies = compare
        with pytest.raises(ForebayError):
            await replicas._tend_once()
        assert not replicas.sent.covered(replicas._agreed(), replicas._seat.alive)

    rigged(story, volumes=two_disks)


def test_what_a_stalled_disk_wrote_after_all_is_compared_again(rigged: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client was told that nobody knows, and the other node got the version before it again."""

    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(OWN)
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"acked"))
        await replicas._tend_once()
        store, commits, answers = rig.engine.store, rig.engine.writes.commits, threading.Event()
        real = store.make_durable

        def slow(prepared: Any) -> None:
            answers.wait()
            real(prepared)

        monkeypatch.setattr(store, "make_durable", slow)
        disk = store.volume_of("own", "key")
        putting = asyncio.create_task(rig.engine.writes.put(PutCall("own", "key", 5, body=b"newer")))
        await until_async(lambda: other.kept["key"][1] == b"newer")
        commits.stalled(disk, Unavailable("the disk does not answer"))
        with pytest.raises(Unavailable):
            await putting
        await replicas._tend_once()
        answers.set()

        def is_shown() -> bool:
            rig.engine.flush()
            commits.answers(disk)
            record = store.owned("own", "key")
            return record is not None and record.inline == b"newer" and commits._queue(disk).refuses is None

        await until_async(is_shown)
        await replicas._tend_once()
        assert other.kept["key"][1] == b"newer"

    rigged(story)


def started_twice(root: Path, disks: tuple[str, str], before: Callable[[Rig], Any], after: Callable[..., Any]) -> None:
    """Two lives of one node; what the first returns, the second is told."""

    async def story() -> None:
        async with rigged_at(root / "node", volumes=disks) as first:
            told = await before(first)
        async with rigged_at(root / "node", volumes=disks) as second:
            await after(second, *told)

    asyncio.run(story())


# --- what is kept here for others ------------------------------------------------------------------------------------
def kept_copies(rig: Rig, agreed: Callable[[], Map]) -> KeptCopies:
    engine = rig.engine
    return KeptCopies(
        engine.node_id, agreed, engine.clock, ThreadPoolExecutor(2), store=engine.store, index=engine.index,
        buckets=engine.buckets, writes=engine.writes, flusher=engine.flusher, bring_up=lambda bucket, key: None,
    )  # fmt: skip


def sent(key: str, number: int, version: int, body: bytes) -> KeepCopy:
    note = Note(version, 1.0, len(body), version, local=True, digest=digest_of(len(body), body=body))
    about = Copied("gone", number, version, 1, "etag", 1.0, (), msgspec.msgpack.encode(note))
    return KeepCopy("own", key, about, len(body), body=body)


def test_an_old_copy_that_a_disk_brings_back_is_not_taken_over(tmp_path: Path, two_disks: tuple[str, str]) -> None:
    """Its actor died long ago, and what was taken over from it was deleted since."""
    maps: list[Map] = []

    async def before(rig: Rig) -> list[str]:
        engine = rig.engine
        both = {engine.node_id: 1.0, "gone": 1.0}
        maps.append(Map(1, True, both, both, both, held=1, covered=1))
        await engine.buckets.put(OWN)
        kept, disk = kept_copies(rig, lambda: maps[-1]), engine.store.usable()[0].id
        key = next(key for key in KEYS if engine.store.volume_of(copies_of("own"), key) == disk)
        await kept.answer(sent(key, 10, 5, b"old"))
        assert not kept.find_lost()
        fail(rig, disk)
        assert kept.find_lost(), "the disk had copies"
        assert not kept.find_lost(), "that is told once"
        await kept.answer(sent(key, 20, 6, b"newer"))
        alone = {engine.node_id: 1.0}
        maps.append(Map(2, True, alone, alone, alone, held=2, covered=1, deposed=("gone",)))
        await kept.take_all_over()
        record = engine.store.owned("own", key)
        assert record is not None
        assert record.inline == b"newer"
        maps.append(msgspec.structs.replace(maps[-1], covered=2))
        if engine.store.owners.of_key("own", key) is None:
            await engine.writes.delete(DeleteCall("own", key))
        return [key]

    async def after(rig: Rig, key: str) -> None:
        kept = kept_copies(rig, lambda: maps[-1])
        shown = rig.engine.store.owned("own", key)
        assert rig.engine.store.any_missed
        assert kept.find_lost(), "it may be old"
        assert not kept.waiting
        await kept.take_all_over()
        assert rig.engine.store.owned("own", key) == shown
        await kept.tidy()
        assert kept.ledger.copies == {}

    started_twice(tmp_path, two_disks, before, after)
