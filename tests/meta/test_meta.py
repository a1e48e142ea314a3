"""What every metadata store promises (`meta/seam.py`), asked of SQLite, of a real etcd of three members, and of the
store of simulated worlds."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.core.errors import Invalid, NotFound, Precondition
from forebay.core.limits import META_CHANGES_MAX
from forebay.meta.etcd import EtcdMeta
from forebay.meta.seam import Change, Entry, Heard, MetaStore
from forebay.meta.sqlite import SqliteMeta
from forebay.ports.clock import SystemClock
from forebay.sim.agreed import Agreed, MemoryMeta
from tests.meta.watched import Watched
from tests.patience import until_async

Open = Callable[[], MetaStore]


@pytest.fixture(params=["sqlite", "etcd", "memory"])
def open_meta(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same store each time it is called; it is empty at first."""
    if request.param == "sqlite":
        return lambda: SqliteMeta(tmp_path / "meta.sqlite")
    if request.param == "memory":
        agreed = Agreed()
        return lambda: MemoryMeta(agreed)
    cluster, namespace = request.getfixturevalue("etcd"), uuid.uuid4().hex
    return lambda: EtcdMeta(cluster.addresses, namespace)


@asynccontextmanager
async def opened(open_meta: Open) -> AsyncIterator[MetaStore]:
    meta = open_meta()
    try:
        yield meta
    finally:
        await meta.aclose()


def run(open_meta: Open, story: Callable[[MetaStore], Awaitable[None]]) -> None:
    async def within() -> None:
        async with opened(open_meta) as meta:
            await story(meta)

    asyncio.run(within())


def test_values_are_kept_with_growing_revisions(open_meta: Open) -> None:
    async def story() -> None:
        meta = open_meta()
        assert await meta.get("a/1") is None
        entries, zeroth = await meta.range("")
        assert entries == []
        first = await meta.put("a/1", b"one")
        second = await meta.put("b/1", b"two")
        third = await meta.put("a/2", b"\x00three")
        assert zeroth < first < second < third
        assert await meta.get("a/1") == Entry("a/1", b"one", first)
        assert await meta.range("a/") == ([Entry("a/1", b"one", first), Entry("a/2", b"\x00three", third)], third)
        fourth = await meta.put("a/1", b"")
        assert await meta.get("a/1") == Entry("a/1", b"", fourth)
        assert await meta.delete("a/1")
        assert not await meta.delete("a/1")
        await meta.aclose()
        await meta.aclose()
        meta = open_meta()
        entries, revision = await meta.range("")
        assert [entry.key for entry in entries] == ["a/2", "b/1"]
        assert revision > fourth, "a delete is a change"
        assert await meta.put("a/1", b"back") > revision, "revisions outlive the process"
        await meta.aclose()

    asyncio.run(story())


def test_a_writer_that_compares_does_not_overwrite_what_it_has_not_read(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        first = await meta.put("key", b"one", revision=0)
        with pytest.raises(Precondition):
            await meta.put("key", b"two", revision=0)
        second = await meta.put("key", b"two", revision=first)
        for late in (meta.put("key", b"three", revision=first), meta.delete("key", revision=first)):
            with pytest.raises(Precondition):
                await late
        assert await meta.get("key") == Entry("key", b"two", second)
        assert await meta.delete("key", revision=second)
        with pytest.raises(Precondition):
            await meta.delete("key", revision=second)

    run(open_meta, story)


def test_a_transaction_happens_whole_or_not_at_all_and_at_one_revision(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        first = await meta.transact({"a": b"1", "b": b"1"}, when={"a": 0, "b": 0, "c": 0})
        assert await meta.range("") == ([Entry("a", b"1", first), Entry("b", b"1", first)], first)
        for wrong in ({"a": first, "c": first}, {"a": first, "b": 0}, {"a": first + 1}):
            with pytest.raises(Precondition):
                await meta.transact({"a": None, "b": b"2", "c": b"2"}, when=wrong)
        assert (await meta.range(""))[1] == first, "nothing was changed"
        second = await meta.transact({"a": None, "b": b"2", "absent": None}, when={"a": first, "b": first})
        assert await meta.range("") == ([Entry("b", b"2", second)], second)
        with pytest.raises(Invalid, match="split it"):
            await meta.transact({str(number): b"" for number in range(META_CHANGES_MAX)}, when={"b": second})
        await meta.transact({str(number): b"" for number in range(META_CHANGES_MAX)})
        assert len((await meta.range(""))[0]) == META_CHANGES_MAX + 1

    run(open_meta, story)


def test_of_writers_that_race_one_wins_each_time(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        async def count_up() -> None:
            for _ in range(5):
                while True:
                    entry = await meta.get("count")
                    value = int(entry.value) if entry else 0
                    try:
                        await meta.put("count", b"%d" % (value + 1), revision=entry.revision if entry else 0)
                        break
                    except Precondition:
                        continue

        await asyncio.gather(*(count_up() for _ in range(4)))
        found = await meta.get("count")
        assert found is not None
        assert found.value == b"20"

    run(open_meta, story)


def test_prefixes_are_text_and_not_patterns(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        for key in ("a%b", "a_b", "aXb", "é/1", "é/2", "\U0010ffff"):
            await meta.put(key, b"")
        assert [entry.key for entry in (await meta.range("a%"))[0]] == ["a%b"]
        assert [entry.key for entry in (await meta.range("a_"))[0]] == ["a_b"]
        assert [entry.key for entry in (await meta.range("é/"))[0]] == ["é/1", "é/2"]
        assert [entry.key for entry in (await meta.range("\U0010ffff"))[0]] == ["\U0010ffff"]

    run(open_meta, story)


def test_a_watch_tells_what_is_there_and_then_every_transaction_once_whole_in_order(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        before = await meta.transact({"a/1": b"one", "a/2": b"two", "b/1": b"not theirs"})
        async with aclosing(meta.watch("a/")) as watch, aclosing(meta.watch("none/")) as empty:
            there = [Change("a/1", b"one", before), Change("a/2", b"two", before)]
            assert await anext(watch) == Heard(there, before)
            assert await anext(empty) == Heard([], before)
            first = await meta.transact({"a/1": None, "a/3": b"three", "b/2": b""})
            await meta.put("b/1", b"not theirs")
            with pytest.raises(Precondition):
                await meta.put("a/1", b"refused", revision=first)
            await meta.delete("a/1")
            heard = await anext(watch)
            assert sorted(heard.changes) == [Change("a/1", None, first), Change("a/3", b"three", first)]
            assert heard.revision == first
            last = await meta.put("a/3", b"")
            assert await anext(watch) == Heard([Change("a/3", b"", last)], last)
        await meta.put("a/4", b"unheard")

    run(open_meta, story)


def test_what_is_under_a_lease_goes_with_it_and_those_who_watch_are_told(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        lease = await meta.grant(30.0)
        assert lease.ttl_s > 0
        await meta.transact({"mine": b"1", "mine too": b"1", "kept": b"1"}, lease=lease.number)
        await meta.put("kept", b"written again, under none")
        await meta.put("others", b"1")
        async with Watched(meta, "") as watched:
            await meta.renew(lease.number)
            await meta.revoke(lease.number)
            await watched.until(lambda state: sorted(state) == ["kept", "others"])
        await meta.revoke(lease.number)
        with pytest.raises(NotFound):
            await meta.renew(lease.number)
        with pytest.raises(NotFound):
            await meta.put("mine", b"2", lease=lease.number)
        assert await meta.get("mine") is None

    run(open_meta, story)


async def put_under(meta: MetaStore, key: str, take: Callable[[], Awaitable[int]]) -> int:
    """The lease that the entry is under: another one if a machine that stood still let the first one end."""
    while True:
        lease = await take()
        try:
            await meta.put(key, b"", lease=lease)
            return lease
        except NotFound:
            await asyncio.sleep(0.01)


def test_a_lease_that_nobody_renews_ends_by_itself_and_one_that_is_held_lasts(open_meta: Open) -> None:
    async def story(meta: MetaStore) -> None:
        async with meta.hold(6.0, SystemClock()) as held, Watched(meta, "") as watched:
            lease = await put_under(meta, "held", held.number)

            async def left() -> int:
                return (await meta.grant(1.0)).number

            await put_under(meta, "left", left)
            await until_async(lambda: [change.value for change in watched.told("left")] == [b"", None])
            assert "held" in watched.state or await held.number() != lease, "only a machine that stands still loses it"
            await until_async(held.holds, "the lease is held")
            lease = await held.number()
            await meta.revoke(lease)  # somebody else ends it: another is taken
            assert await held.number(other_than=lease) != lease
            await watched.until(lambda state: "held" not in state)
            await until_async(held.holds, "another lease is held")
            lease = await held.number()
        with pytest.raises(NotFound):
            await meta.renew(lease)

    run(open_meta, story)


KEYS = st.sampled_from(["a", "a/1", "a/2", "b"])
CHANGES = st.dictionaries(KEYS, st.none() | st.sampled_from([b"1", b"2"]), max_size=3)
STEPS = st.lists(st.tuples(CHANGES, st.dictionaries(KEYS, st.booleans(), max_size=2)), max_size=12)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_any_transactions_do_what_they_do_to_a_dictionary(open_meta: Open, steps: list[tuple]) -> None:
    """`when` says whether each condition holds."""

    async def story(meta: MetaStore) -> None:
        model: dict[str, Entry] = {entry.key: entry for entry in (await meta.range(""))[0]}
        async with Watched(meta, "a") as watched:
            for changes, conditions in steps:
                now = {key: model[key].revision if key in model else 0 for key in conditions}
                when = {key: now[key] if holds else now[key] + 7 for key, holds in conditions.items()}
                if all(conditions.values()):
                    revision = await meta.transact(changes, when=when)
                    for key, value in changes.items():
                        model.pop(key, None)
                        if value is not None:
                            model[key] = Entry(key, value, revision)
                else:
                    with pytest.raises(Precondition):
                        await meta.transact(changes, when=when)
            assert (await meta.range(""))[0] == [model[key] for key in sorted(model)]
            await watched.until(lambda state: state == {k: e.value for k, e in model.items() if k.startswith("a")})

    run(open_meta, story)


def test_sqlites_leases_end_with_the_process(tmp_path: Path) -> None:
    async def story() -> None:
        meta = SqliteMeta(tmp_path / "meta.sqlite")
        lease = await meta.grant(1000.0)
        await meta.transact({"a": b"1", "b": b"1"}, lease=lease.number)
        before = await meta.put("b", b"2")
        await meta.aclose()
        meta = SqliteMeta(tmp_path / "meta.sqlite")
        assert await meta.range("") == ([Entry("b", b"2", before)], before + 1)
        await meta.aclose()

    asyncio.run(story())


def test_the_file_is_for_its_user_alone_and_only_of_a_known_kind(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    meta = SqliteMeta(path)
    asyncio.run(meta.put("secret", b"x"))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(os.stat(file).st_mode) & 0o077 == 0, file
    asyncio.run(meta.aclose())
    with sqlite3.connect(path) as newer:
        newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(Invalid, match="newer version"):
        SqliteMeta(path)
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(Invalid, match="move it away"):
        SqliteMeta(path)
