"""A node's list of the cluster's buckets over a store in memory: what fails half-way, and what comes back old."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from forebay.core.errors import Busy, Exists, ForebayError, Invalid, NotFound, Unavailable
from forebay.core.limits import SHARED_BUCKET_BYTES_MAX
from forebay.core.messages import calls
from forebay.core.types import Bucket
from forebay.node.engine import shared_buckets
from forebay.node.engine.shared_buckets import PREFIX, SharedBuckets
from forebay.ports import chance, clock
from forebay.sim.agreed import Agreed, MemoryMeta
from tests.patience import until_async

OLD, NEW = Bucket("data", "file:///old", created_s=1.0), Bucket("data", "file:///new", created_s=1.0)


class Here:
    """The buckets of a node, in a dict. `owes`: names of which it has what no backend has."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}
        self.owes: set[str] = set()
        self.evicted: list[str] = []
        self.closed: set[str] = set()

    def takes_writes(self, name: str, does: bool) -> None:
        (self.closed.discard if does else self.closed.add)(name)

    def kept(self, name: str) -> Bucket | None:
        return self.buckets.get(name)

    async def take_up(self, bucket: Bucket) -> None:
        if bucket.name in self.owes:
            raise Busy("flush first")
        self.buckets[bucket.name] = bucket

    async def delete_here(self, named: calls.BucketNamed) -> None:
        if named.name in self.owes:
            raise Busy("flush first")
        if self.buckets.pop(named.name, None) is None:
            raise NotFound("there is no such bucket")
        self.evicted.append(named.name)


class Found:
    is_found = True

    def __init__(self) -> None:
        self.found = asyncio.Event()
        self.found.set()


class Store(MemoryMeta):
    """Takes no write while it is `deaf`; while it `forgets`, it writes and does not say so."""

    deaf = forgets = False

    async def put(self, key: str, value: bytes, *, revision: int | None = None, lease: int = 0) -> int:
        if self.deaf:
            raise Unavailable("no etcd")
        done = await super().put(key, value, revision=revision, lease=lease)
        if self.forgets:
            raise Unavailable("no answer")
        return done


class Node:
    """One of a cluster."""

    def __init__(self, agreed: Agreed, secret: str = "key") -> None:
        self.store, self.memory, self.here, self._secret = Store(agreed), MemoryMeta(Agreed()), Here(), secret

    async def __aenter__(self) -> Node:
        self.shared = SharedBuckets(
            self.store, self.memory, self.here, Found(), None, secret=self._secret, chance=chance.system,
            clock=clock.system,
        )  # fmt: skip
        await self.shared.load()
        self._following = asyncio.create_task(self.shared.follow())
        return self

    async def __aexit__(self, *ended: object) -> None:
        self._following.cancel()
        with suppress(asyncio.CancelledError):
            await self._following

    async def set(self, bucket: Bucket) -> None:
        async def make() -> Bucket:
            await self.here.take_up(bucket)
            return bucket

        await self.shared.change(bucket.name, make)

    async def delete(self, name: str = "data") -> None:
        await self.shared.delete(name, lambda: self.here.delete_here(calls.BucketNamed(name)))

    async def until_has(self, *buckets: Bucket) -> None:
        await until_async(lambda: list(self.here.buckets.values()) == list(buckets), f"that it has {buckets}")


def story(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run the test in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        async def whole() -> None:
            await test(*arguments, **named)

        asyncio.run(whole())

    return run


@pytest.mark.parametrize("how", ["add", "first", "change", "delete"])
@pytest.mark.parametrize("fault", ["deaf", "forgets", "cut off"])
@story
async def test_what_the_store_did_not_take_is_taken_back(how: str, fault: str) -> None:
    """`first`: a bucket of which the store has not heard, from a release before."""
    agreed = Agreed()
    async with Node(agreed) as one, Node(agreed) as two:
        before = [] if how == "add" else [OLD]
        if how == "first":
            one.here.buckets["data"] = OLD
        elif how != "add":
            await one.set(OLD)
            await two.until_has(OLD)
        after = [] if how == "delete" else [NEW]
        if fault == "cut off":

            async def never(*_: object, **__: object) -> int:
                await asyncio.Event().wait()
                return 0

            one.store.put = never  # type: ignore[method-assign]
            asked = asyncio.create_task(one.delete() if how == "delete" else one.set(NEW))
            await until_async(lambda: list(one.here.buckets.values()) == after)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        else:
            setattr(one.store, fault, True)
            with pytest.raises(Unavailable):
                await (one.delete() if how == "delete" else one.set(NEW))
        now = after if fault == "forgets" else before
        await one.until_has(*now)
        await two.until_has(*([] if how == "first" and fault != "forgets" else now))


@story
async def test_a_process_that_ended_half_way_follows_the_store_again() -> None:
    agreed = Agreed()
    one = Node(agreed)
    async with one:
        await one.set(OLD)
        one.store.deaf = True
        kept = one.memory._agreed.entries.copy()

        async def make() -> Bucket:
            await one.here.take_up(NEW)
            kept.update(one.memory._agreed.entries)
            return NEW

        with pytest.raises(Unavailable):
            await one.shared.change("data", make)
    one.here.buckets["data"] = NEW  # as it was in the moment of the kill
    one.memory._agreed.entries = kept
    one.store.deaf = False
    async with one:
        await one.until_has(OLD)


@story
async def test_what_is_changed_at_one_node_alone_stays_until_the_cluster_says_something_new() -> None:
    agreed = Agreed()
    async with Node(agreed) as two:
        one = Node(agreed)
        async with one:
            await one.set(OLD)
            one.here.buckets["data"] = NEW
        async with one:
            await until_async(lambda: one.shared._done)
            assert one.here.buckets["data"] == NEW
            newest = Bucket("data", "file:///newest", created_s=1.0)
            await two.set(newest)
            await one.until_has(newest)


@story
async def test_a_bucket_that_was_made_anew_is_deleted_first() -> None:
    agreed = Agreed()
    async with Node(agreed) as two:
        one = Node(agreed)
        async with one:
            await two.set(OLD)
            await one.until_has(OLD)
        await two.delete()
        anew = Bucket("data", "file:///old", created_s=2.0)
        await two.set(anew)
        one.here.owes.add("data")
        async with one:
            await until_async(lambda: "flush first" in one.shared.lagging.get("data", ""))
            assert one.here.buckets["data"] == OLD
            assert one.here.closed == {"data"}
            one.here.owes.clear()
            await one.until_has(anew)
            await until_async(lambda: not one.here.closed)
            assert one.here.evicted == ["data"]


@story
async def test_an_old_word_is_followed_by_nobody_who_remembers_a_newer() -> None:
    """Also where a node comes back that was away, and the store was emptied meanwhile."""
    agreed = Agreed()
    async with Node(agreed) as two:
        one = Node(agreed)
        async with one:
            await two.set(OLD)
            await one.until_has(OLD)
        old = agreed.entries[PREFIX + "data"].value
        await two.set(NEW)
        new = agreed.entries[PREFIX + "data"].value
        agreed.transact({PREFIX + "data": old}, {})
        await until_async(lambda: agreed.entries[PREFIX + "data"].value == new)
        await two.until_has(NEW)
        await two.delete()
        agreed.transact({PREFIX + "data": None}, {})
        async with one:  # it remembers what it followed
            await one.until_has()
            assert b"file" not in agreed.entries[PREFIX + "data"].value
        await two.set(NEW)
        await two.until_has(NEW)


@story
async def test_a_newcomer_makes_a_bucket_that_others_remember_as_deleted() -> None:
    agreed = Agreed()
    async with Node(agreed) as one:
        await one.set(OLD)
        await one.delete()
        agreed.transact({PREFIX + "data": None}, {})
        await until_async(lambda: clock.system.wall_s() * 1000 > one.shared._followed["data"].version + 1)
        async with Node(agreed) as newcomer:
            await newcomer.set(NEW)
            await one.until_has(NEW)
            await newcomer.until_has(NEW)


@story
async def test_who_makes_a_bucket_gets_no_other_nodes_own() -> None:
    agreed = Agreed()
    async with Node(agreed) as one, Node(agreed) as two:
        own = one.here.buckets["data"] = Bucket("data", "file:///own", owner="alice")
        await two.set(Bucket("data", "file:///mine", owner="mallory"))
        await until_async(lambda: "a bucket of its own" in one.shared.lagging.get("data", ""))
        assert one.here.buckets["data"] == own
        with pytest.raises(Exists):
            await one.delete()
        assert two.here.buckets, "nobody deletes the cluster's for having one of the name"
        one.here.buckets.clear()
        await one.until_has(*two.here.buckets.values())


@story
async def test_settings_of_a_later_release_are_neither_followed_nor_lost() -> None:
    agreed = Agreed()
    async with Node(agreed) as one:
        await one.set(OLD)
        said = json.loads(agreed.entries[PREFIX + "data"].value)["word"]
        said["bucket"]["vault"] = "deep"
        said["version"] += 1
        raw = shared_buckets.msgspec.Raw(json.dumps(said).encode())
        value = shared_buckets.msgspec.json.encode(shared_buckets.Signed(raw, one.shared._mac("data", raw)))
        agreed.transact({PREFIX + "data": value}, {})
        await until_async(lambda: "vault" in one.shared.lagging.get("data", ""))
        for attempt in (one.set(NEW), one.delete()):
            with pytest.raises(Invalid, match="update this node"):
                await attempt
        assert agreed.entries[PREFIX + "data"].value == value


@story
async def test_words_of_deleted_buckets_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buckets, "DELETED_MAX", 5)
    agreed = Agreed()
    async with Node(agreed) as one, Node(agreed) as two:
        await one.set(Bucket("stays", "file:///stays"))
        for number in range(20):
            await one.set(Bucket(f"b-{number}", "file:///x"))
            await one.delete(f"b-{number}")
            await until_async(lambda number=number: f"b-{number}" in one.shared._words)
        await two.until_has(Bucket("stays", "file:///stays"))
        assert 5 <= sum(key.startswith(PREFIX) for key in agreed.entries) <= 8
        for node in (one, two):
            await until_async(lambda node=node: len(node.shared._done) >= 1)
            assert len(node.shared._followed) <= 8


@story
async def test_more_than_the_store_takes_is_refused_and_taken_back() -> None:
    agreed = Agreed()
    async with Node(agreed) as one:
        with pytest.raises(ForebayError, match="pin fewer"):
            await one.set(Bucket("data", "file:///x", pinned=("p" * SHARED_BUCKET_BYTES_MAX,)))
        await one.until_has()
