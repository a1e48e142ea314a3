"""What is to be taken over, and is gone or may be old: it is refused until the node that had it has said."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.backends.seam import Body
from forebay.core.cluster.records import Map
from forebay.core.errors import ForebayError, Unavailable
from forebay.core.messages.calls import PutCall, VolumeNamed
from forebay.core.messages.copied import (
    CompareCopies,
    Copied,
    CopiesAsked,
    CopiesSaid,
    SendAgain,
    SendBack,
    copies_of,
)
from forebay.node.engine.kept import KeptCopies
from forebay.node.engine.returns import Returns
from forebay.node.store.disk import volume as volume_module
from tests.patience import until_async

from .conftest import Rig
from .conftest import rig as rigged_at
from .test_lost_copies import KEYS, OWN, fail, kept_copies, sent, started_twice, two_disks
from .test_replicas import beside_another

__all__ = ["two_disks"]
Rigged = Callable[..., None]


def taking_over(rig: Rig, held: int = 2) -> Map:
    """The map by which what "gone" had is this node's."""
    alone = {rig.engine.node_id: 1.0}
    return Map(held, True, alone, alone, alone, held=held, covered=held - 1, deposed=("gone",))


def both_hold(rig: Rig) -> Map:
    both = {rig.engine.node_id: 1.0, "gone": 1.0}
    return Map(1, True, both, both, both, held=1, covered=1)


def returns_of(
    rig: Rig, kept: KeptCopies, agreed: Map, says: Callable[[Any], Any], alive: tuple[str, ...] = ("gone",)
) -> Returns:
    """What asks the deposed node, which lives, or others."""

    async def ask(home: str, call: CopiesAsked) -> CopiesSaid:
        return await says(call)

    seat: Any = SimpleNamespace(agreed=agreed, alive=dict.fromkeys(alive))
    peers: Any = SimpleNamespace(ask_copies=ask)
    engine = rig.engine
    return Returns(
        seat, engine.node_id, engine.clock, kept, peers=lambda: peers, home_of=lambda node: node,  # type: ignore
        seconds=lambda agreed, name: agreed.seconds(engine.node_id, *name), came_back=lambda node: None,
        store=engine.store, buckets=engine.buckets, writes=engine.writes, volumes=engine.volumes, lost_after_s=0.0,
    )  # fmt: skip


def told(number: int, call: SendAgain, body: bytes) -> Any:
    again = sent(call.key, number, 4, body)  # an earlier version: the later write had not been acknowledged
    return msgspec.structs.replace(again, about=msgspec.structs.replace(again.about, held=call.held))


async def three_kept_where_a_disk_failed(rig: Rig) -> list[str]:
    """The keys of three copies, whose disk is away when the node starts again, or comes back."""
    engine = rig.engine
    await engine.buckets.put(OWN)
    kept, disk = kept_copies(rig, lambda: both_hold(rig)), engine.store.usable()[0].id
    names = [key for key in KEYS if engine.store.volume_of(copies_of("own"), key) == disk][:3]
    for key in names:
        await kept.answer(sent(key, 10, 5, b"kept"))
    fail(rig, disk)
    return names


def test_copies_that_a_disk_brings_back_wait_for_their_actors_word(tmp_path: Path, two_disks: tuple[str, str]) -> None:
    """Two nodes stopped, and one comes back with a disk that was away: what it kept there may have been cleared."""

    async def after(rig: Rig, current: str, old: str, gone: str) -> None:
        agreed = taking_over(rig)
        kept = kept_copies(rig, lambda: agreed)
        for key in (current, old, gone):
            assert kept.acts_anew(("own", key)), "nobody acts on it as it is"
            with pytest.raises(Unavailable, match="may be old"):
                await kept.take_over(("own", key))
        assert kept.waiting
        assert {name for name, _ in kept.doubtful()} == {("own", current), ("own", old), ("own", gone)}

        kept.is_gone = lambda node: node == "gone"
        with pytest.raises(Unavailable, match="may be old"):
            await kept.take_over(("own", gone))
        kept.is_nowhere_else(("own", gone))
        await kept.take_over(("own", gone))
        assert rig.engine.store.owned("own", gone) is not None, "nobody will ever say, and it is whole"
        kept.is_gone = lambda node: False

        async def says(call: SendAgain) -> CopiesSaid:
            if call.key == old:
                return CopiesSaid([old])
            await kept.answer(told(30, call, b"acked"))
            return CopiesSaid()

        await returns_of(rig, kept, agreed, says).copies(agreed)
        await kept.take_all_over()
        record = rig.engine.store.owned("own", current)
        assert record is not None
        assert record.inline == b"acked"
        assert rig.engine.store.owned("own", old) is None
        assert not kept.waiting

    started_twice(tmp_path, two_disks, three_kept_where_a_disk_failed, after)


def test_what_was_made_again_while_a_disk_was_away_is_worth_nothing_when_it_is_back(
    tmp_path: Path, two_disks: tuple[str, str]
) -> None:
    """The node took over what it was sent again, and let go of it. Its actor has what it had, and is not asked."""

    async def before(rig: Rig) -> str:
        engine = rig.engine
        await engine.buckets.put(OWN)
        kept, disk = kept_copies(rig, lambda: both_hold(rig)), engine.store.usable()[0].id
        key = next(key for key in KEYS if engine.store.volume_of(copies_of("own"), key) == disk)
        await kept.answer(sent(key, 10, 5, b"kept"))
        await engine.known.tend(engine.store, ())
        fail(rig, disk)
        assert kept.find_lost()
        assert kept.absent == {disk}
        await engine.volumes.supersede(kept.absent, [copies_of("own")])
        assert kept.absent == set()
        return key

    async def after(rig: Rig, key: str) -> None:
        agreed = taking_over(rig)
        kept = kept_copies(rig, lambda: agreed)
        assert kept.is_superseded(("own", key))
        with pytest.raises(Unavailable):
            await kept.take_over(("own", key))

        async def says(call: SendAgain) -> CopiesSaid:
            pytest.fail("it would send what it had")

        await returns_of(rig, kept, agreed, says).copies(agreed)
        assert kept.ledger.copies == {}
        assert not kept.waiting

    async def story() -> None:
        async with rigged_at(tmp_path / "node", volumes=two_disks) as first:
            key = await before(first)
        for _ in range(2):  # it may be killed before it has done anything about that
            async with rigged_at(tmp_path / "node", volumes=two_disks) as second:
                assert (second.engine.store.usable()[0].id, copies_of("own")) in second.engine.store.superseded
        async with rigged_at(tmp_path / "node", volumes=two_disks) as third:
            await after(third, key)

    asyncio.run(story())


def test_an_actors_list_says_that_what_a_disk_brought_back_is_current(
    tmp_path: Path, two_disks: tuple[str, str]
) -> None:
    async def before(rig: Rig) -> list[str]:
        await rig.engine.buckets.put(OWN)
        kept, disk = kept_copies(rig, lambda: both_hold(rig)), rig.engine.store.usable()[0].id
        key = next(key for key in KEYS if rig.engine.store.volume_of(copies_of("own"), key) == disk)
        await kept.answer(sent(key, 10, 5, b"kept"))
        fail(rig, disk)
        return [key]

    async def after(rig: Rig, key: str) -> None:
        maps = [both_hold(rig)]
        kept = kept_copies(rig, lambda: maps[-1])
        said = await kept.answer(CompareCopies("own", "gone", 20, 1, [(key, 5)]))
        assert said.missing == []
        maps.append(taking_over(rig))
        await kept.take_over(("own", key))
        assert rig.engine.store.owned("own", key) is not None

    started_twice(tmp_path, two_disks, before, after)


def test_what_may_be_on_a_disk_that_is_not_here_is_refused_until_it_is(
    tmp_path: Path, two_disks: tuple[str, str]
) -> None:
    """The node started without a disk, and what it is to take over was on it, perhaps: it knows of no name."""

    async def before(rig: Rig) -> tuple[str, str]:
        await rig.engine.buckets.put(OWN)
        kept, disk = kept_copies(rig, lambda: both_hold(rig)), rig.engine.store.volume_at(copies_of("own"), KEYS[0])
        assert disk is not None
        await kept.answer(sent(KEYS[0], 10, 5, b"kept"))
        other = next(
            key
            for key in KEYS
            if rig.engine.store.volume_of(copies_of("own"), key) != disk.id
            and rig.engine.store.volume_of("own", key) != disk.id
        )
        return disk.path, other

    async def after(rig: Rig, other: str) -> None:
        maps = [taking_over(rig)]
        kept = kept_copies(rig, lambda: maps[-1])
        kept.is_sure = lambda: maps[-1].covered > 1
        assert ("own", KEYS[0]) not in kept.ledger.copies
        assert kept.waiting, "listings are refused, and not all is covered"
        assert kept.acts_anew(("own", KEYS[0]))
        with pytest.raises(ForebayError, match="own/key-00: the only copy may be on volume"):
            await kept.take_over(("own", KEYS[0]))
        await rig.engine.writes.put(PutCall("own", other, 4, body=b"here"))
        assert not kept.acts_anew(("own", other)), "it is this node's already"
        maps.append(msgspec.structs.replace(maps[-1], covered=2))
        assert not kept.acts_anew(("own", KEYS[0])), "all was made again"
        assert not kept.waiting

    async def story() -> None:
        async with rigged_at(tmp_path / "node", volumes=two_disks) as first:
            path, other = await before(first)
        shutil.move(path, f"{path}.away")
        async with rigged_at(tmp_path / "node", volumes=two_disks) as second:
            await after(second, other)

    asyncio.run(story())


def test_a_node_owes_nothing_on_a_disk_that_was_given_up(rigged: Rigged, two_disks: tuple[str, str]) -> None:
    """Else one whose disk failed would never be drained."""

    async def story(rig: Rig) -> None:
        engine = rig.engine
        await engine.buckets.put(OWN)
        disk = engine.store.usable()[0].id
        for key in [key for key in KEYS if engine.store.volume_of("own", key) == disk]:
            await engine.writes.put(PutCall("own", key, 5, body=b"acked"))
        assert engine._owes_bytes() > 0
        fail(rig, disk)
        assert engine._owes_bytes() > 0, "it may come back"
        await engine.volumes.give_up(VolumeNamed(disk))
        assert engine._owes_bytes() == 0

    rigged(story, volumes=two_disks)


@pytest.mark.parametrize(("code", "state"), [(errno.EIO, "out"), (errno.EROFS, "out"), (errno.ENOSYS, "ok")])
def test_an_idle_disk_that_fails_is_noticed(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    async def story(rig: Rig) -> None:
        volume, touched = rig.engine.store.usable()[0], threading.Event()

        def utime(fd: int) -> None:
            touched.set()
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(volume_module.os, "utime", utime)
        rig.engine.store.housekeep()
        await until_async(touched.is_set)
        await until_async(lambda: volume.desk.oldest() is None)
        monkeypatch.undo()
        assert volume.state == state

    rigged(story)


def test_a_write_that_waited_until_its_node_had_handed_over_is_not_made(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(OWN)
        real = other.keep_copy

        async def keep(*arguments: Any, **more: Any) -> None:
            await real(*arguments, **more)
            one = {"other": 1.0}
            replicas._seat.agreed = Map(3, True, one, one, one, held=2, covered=2)  # type: ignore[misc]

        other.keep_copy = keep  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="handed its keys over"):
            await rig.engine.writes.put(PutCall("own", "key", 5, body=b"later"))
        assert rig.engine.store.owned("own", "key") is None

    rigged(story)


def test_a_node_that_was_taken_over_sends_what_others_lack_and_nothing_else(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        replicas, other = beside_another(rig)
        await rig.engine.buckets.put(OWN)
        await rig.engine.writes.put(PutCall("own", "key", 5, body=b"acked"))
        other.kept.clear()
        before, me = replicas._seat.agreed, rig.engine.node_id
        assert before is not None
        call = SendAgain("own", "key", "other", 2)
        with pytest.raises(ForebayError, match="different maps"):
            await replicas._send_once_more(call)
        one = {"other": 1.0}
        replicas._seat.agreed = Map(2, True, one, one, one, held=2, covered=1, deposed=(me,))  # type: ignore[misc]
        assert (await replicas._send_once_more(call)).missing == []
        assert other.kept["key"][1] == b"acked"
        other.kept.clear()
        assert (await replicas._send_once_more(msgspec.structs.replace(call, key="other"))).missing == ["other"]
        assert other.kept == {}

    rigged(story)


def test_what_a_silent_node_had_comes_from_another_that_keeps_it_too(
    tmp_path: Path, two_disks: tuple[str, str]
) -> None:
    """Three nodes had it. The copy here may be old, or is gone, and its actor never comes back."""

    async def after(rig: Rig, newer: str, older: str, nowhere: str) -> None:
        here = rig.engine.node_id
        both = {here: 1.0, "third": 1.0}
        agreed = msgspec.structs.replace(taking_over(rig), holders=both, deposed=(), given_up={"gone": 2}, deposed_at=2)
        names = {("own", key) for key in (newer, older, nowhere) if agreed.holder("own", key) == here}
        agreed = agreed if len(names) == 3 else msgspec.structs.replace(agreed, holders={here: 1e12, "third": 1.0})
        kept = kept_copies(rig, lambda: agreed)
        kept.ledger.collected(agreed)
        kept.is_gone = lambda node: node == "gone"
        answers = {newer: (9, 6, b"acknowledged"), older: (30, 4, b"not the last")}  # each keeper has its own numbers
        asked: list[str] = []

        async def says(call: SendBack) -> CopiesSaid:
            assert (call.actor, call.keeper) == ("gone", here)
            asked.append(call.key)
            if call.key == nowhere:
                return CopiesSaid([nowhere])
            again = sent(call.key, *answers[call.key])
            await kept.answer(
                msgspec.structs.replace(again, about=msgspec.structs.replace(again.about, held=call.held))
            )
            return CopiesSaid()

        returns = returns_of(rig, kept, agreed, says, alive=("third",))
        for _ in range(2):  # who was asked is not asked again at once
            with pytest.raises(Unavailable, match="may be old"):
                await kept.take_all_over()
            await returns.copies(agreed)
        assert sorted(asked) == sorted((newer, older, nowhere))
        with pytest.raises(Unavailable, match="may be old"):
            await kept.take_all_over()
        assert {name for name, _ in kept.doubtful()} == {("own", older)}, "an older one is refused, so this may be it"
        owned = {key: rig.engine.store.owned("own", key) for key in (newer, nowhere)}
        assert {key: record and record.inline for key, record in owned.items()} == {
            newer: b"acknowledged",
            nowhere: b"kept",
        }

    started_twice(tmp_path, two_disks, three_kept_where_a_disk_failed, after)


def test_who_keeps_it_too_sends_it_to_who_takes_over(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        await rig.engine.buckets.put(OWN)
        three = {rig.engine.node_id: 1.0, "gone": 1.0, "third": 1.0}
        agreed = Map(1, True, three, three, three, held=1, covered=1)
        kept, gone_to = kept_copies(rig, lambda: agreed), list[tuple[str, int, int, bytes | None]]()

        async def sends(node: str, name: tuple[str, str], about: Copied, body: Body) -> None:
            gone_to.append((node, about.number, about.held, body.data))

        kept.sends_back = sends
        await kept.answer(sent("key", 10, 5, b"kept"))
        agreed = msgspec.structs.replace(agreed, epoch=2, held=2, given_up={"gone": 2})
        said = await kept.answer(SendBack("own", "key", "gone", 2, 4, "third"))
        assert (said.missing, gone_to) == ([], [("third", 10, 2, b"kept")]), "whichever version there is"
        for call in (SendBack("own", "key", "gone", 2, 4), SendBack("own", "key", "third", 2, 5, "third")):
            assert (await kept.answer(call)).missing == ["key"]

    rigged(story)
