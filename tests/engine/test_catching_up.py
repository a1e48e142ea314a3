"""After a start the node serves before all that it owes is in view: nobody may notice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from forebay.core.errors import Exists, ForebayError, NotFound, ObjectLost, Precondition, Unavailable
from forebay.core.machines.opening import MISSED
from forebay.core.messages import calls
from forebay.core.types import RangeSpec
from forebay.node.engine.flush import owed_at_start
from forebay.node.engine.flush.owed_at_start import CatchingUp

from .conftest import MIB, Front, Rig, pattern, until
from .writing import AWAY, delete, flushed, names, put, written

Rigged = Callable[..., None]
STOPS = ["process", "machine"]
LARGE = pattern(2 * MIB)


async def stopped(rig: Rig, stop: str) -> None:
    """The process was killed, or the machine: then the index is not believed, and made anew."""
    await rig.stop(clean=False)
    if stop == "machine":
        for volume in rig.settings.volume_dirs:
            mark = Path(volume, "volume.json")
            mark.write_text(mark.read_text().replace('"boot_id": "', '"boot_id": "x'))
    rig.front = Front()


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Event]:
    """Nothing is brought into view of itself until the event is set."""
    may, go_on = asyncio.Event(), CatchingUp._go_on

    async def wait(self: CatchingUp, steps: Iterator[object]) -> None:
        await may.wait()
        await go_on(self, steps)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(owed_at_start, "AT_ONCE", 0)
        patch.setattr(CatchingUp, "_go_on", wait)
        yield may
        may.set()


def theirs(rig: Rig) -> dict[str, bytes]:
    """What the backend has."""
    return {key: data for key, (_, data) in rig.remote.objects._objects.items()}


async def refused(rig: Rig, key: str, kind: type[ForebayError]) -> None:
    with pytest.raises(kind):
        await rig.front.get(key)


@pytest.mark.parametrize(("stop", "durability"), [("process", "disk"), ("process", "memory"), ("machine", "disk")])
def test_what_is_owed_is_the_truth_before_it_is_in_view(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, stop: str, durability: str
) -> None:
    async def story(rig: Rig) -> None:
        await written(rig, "back", durability=durability, dirty_bytes_max=1 << 30)
        for key in ("old", "gone", "again"):
            rig.remote.place(key, b"the backend's")
        rig.remote.writable.clear()
        for key, body in {"old": b"ours", "new": b"n", "large": LARGE, "again": b"1", "drop": b"d"}.items():
            await put(rig, key, body)
        await delete(rig, "gone")
        await stopped(rig, stop)
        with late(monkeypatch) as may:
            await rig.start()
            assert not rig.engine.catching_up.is_done
            assert await rig.front.get("old") == b"ours"
            assert await rig.front.get("large") == LARGE
            await refused(rig, "gone", NotFound)
            await refused(rig, "never", NotFound)
            for key in ("new", "drop"):
                with pytest.raises(Precondition):
                    await put(rig, key, b"theirs", if_none_match="*")
            await put(rig, "again", b"2")
            await delete(rig, "drop")
            await rig.front.call("copy", calls.CopyCall("remote", "new", "remote", "copied"))
            stat = await rig.front.call("stat", calls.StatCall("remote", "new"))
            assert stat.dirty
            listing = asyncio.create_task(names(rig))
            flushing = asyncio.create_task(rig.front.job("flush", calls.JobCall("remote")))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any((listing.done(), flushing.done())), "they are about what is not in view yet"
            assert (await rig.front.call("status", calls.Nothing())).catching_up
            may.set()
            assert await listing == ["again", "copied", "large", "new", "old"]
            await flushed(rig)
            assert (await flushing).state == "done"
        assert not (await rig.front.call("status", calls.Nothing())).catching_up
        assert theirs(rig) == {"again": b"2", "copied": b"n", "large": LARGE, "new": b"n", "old": b"ours"}

    rigged(story)


@pytest.mark.parametrize("stop", STOPS)
def test_a_local_bucket_is_whole_before_it_is_in_view(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    async def story(rig: Rig) -> None:
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        await written(rig, "local")
        for key, body in {"small": b"s", "large": LARGE, "lost": LARGE, "gone": b"g"}.items():
            await put(rig, key, body)
        await delete(rig, "gone")
        lost = rig.engine.store.data_path(rig.engine.store.lookup("remote", "lost"))
        await stopped(rig, stop)
        Path(lost).unlink()
        with late(monkeypatch) as may:
            await rig.start()
            assert await rig.front.get("small") == b"s"
            assert await rig.front.get("large") == LARGE
            await refused(rig, "gone", NotFound)
            await refused(rig, "lost", ObjectLost)
            with pytest.raises(ObjectLost):
                await put(rig, "lost", b"again", if_none_match="*")
            full = asyncio.create_task(rig.front.call("bucket_delete", calls.BucketNamed("remote")))
            may.set()
            with pytest.raises((Exists, ObjectLost)):
                await full
        assert await names(rig) == ["large", "lost", "small"]
        assert [each.key for each in await rig.front.call("lost", calls.LostCall("remote"))] == ["lost"]

    rigged(story)


def test_after_a_machine_stop_reads_go_on_while_the_index_is_made_anew(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        for number in range(6):
            rig.remote.place(f"{number}", pattern(2 * MIB, number))
            await rig.front.get(f"{number}")
        await rig.idle()
        await stopped(rig, "machine")
        with late(monkeypatch):
            await rig.start()
            assert await rig.front.get("3") == pattern(2 * MIB, 3), "it is not found yet"
            await rig.idle()
            before = rig.remote.count("fetch")
            await stopped(rig, "process")
            await rig.start()
            assert not rig.engine.catching_up.is_done, "a new index is not taken for a whole one"
            assert not any(rig.engine.store.sweep()), "what was not looked at is no rubbish"
        await rig.again(clean=False)
        await rig.engine.catching_up.whole()
        await rig.engine.room.learned()
        for number in range(6):
            assert await rig.front.get(f"{number}") == pattern(2 * MIB, number)
        assert rig.remote.count("fetch") == before, "all was found again"
        await until(lambda: len(list(Path(rig.settings.volume_dirs[0], "data").rglob("*/*/*"))) == 6)
        machine = next(iter(rig.engine.room._machines.values()))
        assert machine.used_bytes == rig.engine.store.usage()[0].weighed_bytes == 12 * MIB

    rigged(story)


@pytest.mark.parametrize("mode", ["back", "local"])
@pytest.mark.parametrize("stop", STOPS)
def test_what_happens_while_it_comes_into_view_is_kept(
    rigged: Rigged, monkeypatch: pytest.MonkeyPatch, stop: str, mode: str
) -> None:
    monkeypatch.setattr(owed_at_start, "AT_ONCE", 0)
    monkeypatch.setattr(owed_at_start, "TURN_S", 0)
    chance = random.Random(7)
    have: dict[str, bytes] = {}

    async def change(rig: Rig, key: str) -> None:
        body = chance.randbytes(chance.choice((10, 200_000)))
        match chance.randrange(5):
            case 0:
                await delete(rig, key)
                have.pop(key, None)
            case 1:
                with suppress(Precondition):
                    await put(rig, key, body, if_none_match="*")
                    assert key not in have
                    have[key] = body
            case 2 | 3:
                await put(rig, key, body)
                have[key] = body
            case _:
                with suppress(NotFound):
                    assert await rig.front.get(key) == have.get(key), key
                    return
                assert key not in have

    async def changes(rig: Rig, keys: list[str]) -> None:
        for _ in range(25):
            await change(rig, chance.choice(keys))

    async def story(rig: Rig) -> None:
        await rig.front.call("bucket_delete", calls.BucketNamed("remote"))
        await written(rig, mode)
        rig.remote.writable.clear()
        keys = [f"k{number:03d}" for number in range(120)]
        for key in keys:
            await change(rig, key)
        for _ in range(2):
            await stopped(rig, stop)
            await rig.start()
            await asyncio.gather(*(changes(rig, keys[each::4]) for each in range(4)))
        assert await names(rig) == sorted(have)
        for key in keys:
            assert (await rig.front.get(key) if key in have else None) == have.get(key)
        if mode == "back":
            await flushed(rig)
            assert theirs(rig) == have
        volume = rig.engine.store.usage()[0]
        assert volume.owned_objects == (0 if mode == "back" else len(have))

    rigged(story)


@pytest.mark.parametrize("reads_only", [False, True])
def test_what_a_machine_stop_brought_back_is_not_served_before_the_backend_confirmed_it(
    rigged: Rigged, reads_only: bool
) -> None:
    """A stop may bring back a version that an acknowledged write had replaced, whose flush had ended: the write's file
    and note are gone with the names that were not synced. A bucket that cannot be written has no such versions."""

    async def story(rig: Rig) -> None:
        older, newer = pattern(2 * MIB, 1), pattern(2 * MIB, 2)
        rig.remote.place("key", older)
        assert await rig.front.get("key") == older
        await rig.idle()
        rig.engine.flush()
        await stopped(rig, "machine")
        if not reads_only:
            rig.remote.place("key", newer)  # by a flush of which the stop left nothing
        rig.remote.read_only = reads_only
        rig.remote.down = AWAY
        await rig.start()
        await rig.engine.catching_up.whole()
        if reads_only:
            assert await rig.front.get("key") == older
        else:
            await refused(rig, "key", Unavailable)
        head = rig.front.open("key", head_only=True)
        await head.until(lambda: (head.opened or head.error) is not None)
        assert (head.error is None) == reads_only
        await rig.again(clean=True)
        if not reads_only:
            await refused(rig, "key", Unavailable)  # a clean restart confirms nothing
        rig.remote.down = None
        rig.clock.ahead_s += 100
        fetches = rig.remote.count("fetch")
        assert await rig.front.get("key") == (older if reads_only else newer)
        assert rig.remote.count("fetch") == (fetches if reads_only else fetches + 1)
        rig.remote.down = AWAY
        rig.clock.ahead_s += 100
        assert await rig.front.get("key") == (older if reads_only else newer), "once confirmed it is as any other"

    rigged(story, freshness_s=60.0)


def test_a_listing_or_a_write_under_way_does_not_confirm_what_a_machine_stop_brought_back(rigged: Rigged) -> None:
    async def story(rig: Rig) -> None:
        older = pattern(6 * MIB, 1)
        rig.remote.place("key", older)
        await rig.front.get("key", RangeSpec(0, MIB))
        await rig.idle()
        rig.engine.flush()
        await stopped(rig, "machine")
        await rig.start()
        await rig.engine.catching_up.whole()
        cold = rig.engine.cold
        record = rig.engine.store.lookup("remote", "key")
        assert record is not None
        assert record.checked_s == MISSED
        for window in (False, True):
            if window:
                cold.confirmations.open_window("remote", "key")
            assert cold.confirmations.kept_s("remote", "key", record.version, record.checked_s) == MISSED
        cold.openings.listed("remote", "", "", "")
        assert rig.engine.store.lookup("remote", "key").checked_s == MISSED  # type: ignore[union-attr]
        cold.confirmations.close_window("remote", "key")

    rigged(story)
