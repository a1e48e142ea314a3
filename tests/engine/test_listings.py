"""Listings at the engine: one for all who ask, as fresh as the bucket wants it, kept, and what changed is said."""

import asyncio
import hashlib
from bisect import bisect_right

import pytest

from forebay.core.errors import NotFound, Precondition, Unavailable
from forebay.core.formats.listing import Listing, build
from forebay.core.messages import calls
from forebay.core.types import FRESH_IMMUTABLE, ListEntry, ListPage
from forebay.node.engine.read import listings
from forebay.node.engine.read.parallel_listing import HANDS, Survey


class Server:
    """A listing of some keys, in the order of a server that keeps folders, or in byte order."""

    def __init__(self, keys, folders_first=False):
        self.order = (lambda key: key.replace("/", "\0")) if folders_first else str
        self.entries = {key: ListEntry(key, len(key), "", 1.0) for key in keys}
        self.keys = sorted(keys, key=self.order)
        self.ranks = [self.order(key) for key in self.keys]
        self.asked = self.now = self.most = 0

    async def page(self, after, limit):
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= 1
        first = bisect_right(self.ranks, self.order(after))
        found = self.keys[first : first + limit]
        more = first + limit < len(self.keys)
        return ListPage(sorted(self.entries[key] for key in found), [], found[-1] if more else "")


SHAPES = {
    "numbers": [f"img_{n:07d}.jpg" for n in range(40_000)],
    "classes": [f"train/n{n // 500 * 997:08d}/img_{n:06d}.JPEG" for n in range(40_000)],
    "hashes": [hashlib.md5(b"%d" % n).hexdigest() for n in range(40_000)],
    "uneven": [f"a/{n}" for n in range(400)] + [f"z-big/x.{n:08d}.bin" for n in range(39_600)],
    "dots": [f"d/part-{n // 1000:03d}.{n % 7}/s-{n:07d}" for n in range(20_000)] + ["d.txt", "d-x/1"],
    "scripts": [chr(0x3042 + n % 80) * 2 + f"{n:06d}" for n in range(20_000)],
    "few": ["a", "a/b", "a.b", "c"],
    "none": [],
}


@pytest.mark.parametrize("folders_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_survey_finds_every_key_from_many_places_at_once(shape, folders_first):
    server = Server(SHAPES[shape], folders_first)
    survey = Survey(server.page, "")
    found = Listing(build("b", "", asyncio.run(survey.run())))
    assert found.keys() == sorted(SHAPES[shape])
    assert server.most <= HANDS
    if shape in ("numbers", "classes", "hashes", "uneven"):
        assert server.most == HANDS
        assert server.asked < len(server.keys) / 1000 + 600, "little is asked in vain"


def test_a_page_that_fails_ends_the_survey_and_leaves_nothing_running():
    server = Server(SHAPES["numbers"])

    async def page(after, limit):
        if server.asked > 20:
            raise Unavailable("the backend is away")
        return await server.page(after, limit)

    async def main():
        with pytest.raises(Unavailable):
            await Survey(page, "").run()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


# --- through the engine ----------------------------------------------------------------------------------------------
def place(rig, count, first=0):
    for n in range(first, first + count):
        rig.remote.place(f"p/{n:05d}", b"x" * (n % 50 + 1))


async def ask(rig, **more):
    state = await rig.front.call("listing", calls.ListingCall("remote", **more))
    assert state.id
    return await rig.engine.listings.load("remote", state.prefix, state.id)


def test_all_who_ask_share_one_listing_and_the_next_day_lists_again(rigged):
    async def story(rig):
        place(rig, 2500)
        found = await asyncio.gather(*(ask(rig, prefix="p/") for _ in range(20)))
        assert len({each.id for each in found}) == 1
        assert found[0].keys() == [f"p/{n:05d}" for n in range(2500)]
        listed = rig.remote.count("list")
        place(rig, 1, first=9000)
        assert (await ask(rig, prefix="p/")).id == found[0].id, "it is fresh for a minute"
        assert rig.remote.count("list") == listed
        assert len(await ask(rig, prefix="p/", refresh=True)) == 2501
        place(rig, 1, first=9001)
        rig.clock.ahead_s += 61
        assert len(await ask(rig, prefix="p/")) == 2502

    rigged(story, capacity_bytes=256 << 20)


def test_whoever_wants_the_listing_of_yesterday_is_told_what_changed(rigged):
    async def story(rig):
        place(rig, 20)
        old = await ask(rig)
        assert (await ask(rig, id=old.id)).id == old.id
        rig.remote.place("p/00003", b"other bytes")
        rig.remote.objects.remove("p/00004")
        rig.clock.ahead_s += 61
        with pytest.raises(Precondition, match=r"1 object was removed and 1 object was changed \(p/00003, p/00004\)"):
            await ask(rig, id=old.id)
        with pytest.raises(Precondition, match="19 objects now, and what it had then is not kept"):
            await ask(rig, id="0" * 32)

    rigged(story)


def test_a_restart_finds_nothing_changed_when_nothing_did(rigged):
    async def story(rig):
        place(rig, 1200)
        old = await ask(rig)
        await rig.again()
        rig.remote.place("p/00000", b"changed meanwhile")
        with pytest.raises(Precondition, match="1 object was changed"):
            await ask(rig, id=old.id)

    rigged(story, capacity_bytes=256 << 20)


def test_what_is_written_here_is_in_the_next_listing_whatever_the_freshness(rigged):
    async def story(rig):
        place(rig, 3)
        assert len(await ask(rig)) == 3
        await rig.front.call("put", calls.PutCall("remote", "p/new", 3, body=b"new"))
        assert (await ask(rig)).find("p/new") is not None
        await rig.front.call("delete", calls.DeleteCall("remote", "p/00000"))
        assert (await ask(rig)).find("p/00000") is None
        listed = rig.remote.count("list")
        assert len(await ask(rig)) == 3
        assert rig.remote.count("list") == listed, "and then it is fresh for ever"

    rigged(story, freshness_s=FRESH_IMMUTABLE)


def test_a_long_listing_is_waited_for_in_steps(rigged, monkeypatch):
    monkeypatch.setattr(listings, "WAIT_S", 0.02)

    async def story(rig):
        place(rig, 3000)
        gate = asyncio.Event()
        page = rig.engine.pages.page

        async def slow(served, call):
            if call.start_after:
                await gate.wait()
            return await page(served, call)

        rig.engine.pages.page = slow
        call = calls.ListingCall("remote", refresh=True)
        state = await rig.front.call("listing", call)
        assert (state.id, state.objects) == ("", 1000)
        again = calls.ListingCall("remote", refresh=True, since_s=state.since_s)
        assert (await rig.front.call("listing", again)).objects == 1000, "the same listing"
        gate.set()
        while not state.id:
            state = await rig.front.call("listing", again)
        assert state.objects == 3000

    rigged(story, capacity_bytes=256 << 20)


def test_what_does_not_fit_the_store_is_held_in_memory(rigged):
    async def story(rig):
        place(rig, 2000)

        async def full(call):
            raise Unavailable("full")

        rig.engine.keeping.keep = full
        rig.engine.verbs._table["keep"] = full
        listing = await ask(rig)
        parts = []
        state = await rig.front.call("listing", calls.ListingCall("remote"))
        for start in range(0, state.size_bytes, 10_000):
            end = min(start + 10_000, state.size_bytes)
            parts.append(await rig.front.call("listing_part", calls.ListingPartCall(state.id, start, end)))
        assert Listing(b"".join(parts)).id == listing.id
        with pytest.raises(NotFound):
            await rig.front.call("listing_part", calls.ListingPartCall("0" * 32, 0, 1))

    rigged(story)
